//! Until when a certificate is valid. rustls does not tell a server that of its own certificate, so this reads the one
//! field of it (RFC 5280):
//! `Certificate { TBSCertificate { [version], serial, signature, issuer, validity { from, to } } }`.

const INTEGER: u8 = 0x02;
const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const VERSION: u8 = 0xa0;

/// Unix ms; None: it cannot be read.
pub(super) fn expires(der: &[u8]) -> Option<i64> {
    let (certificate, _) = of_kind(der, SEQUENCE)?;
    let (mut rest, _) = of_kind(certificate, SEQUENCE)?;
    if let Some((_, after)) = of_kind(rest, VERSION) {
        rest = after;
    }
    for kind in [INTEGER, SEQUENCE, SEQUENCE] {
        (_, rest) = of_kind(rest, kind)?;
    }
    let (validity, _) = of_kind(rest, SEQUENCE)?;
    let (_, _, to) = element(validity)?;
    let (kind, text, _) = element(to)?;
    time(kind, std::str::from_utf8(text).ok()?)
}

/// The first element: its kind, its content, and what follows it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (kind, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            let length = bytes.iter().fold(0, |n, b| n << 8 | usize::from(*b));
            (length, rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*kind, content, rest))
}

fn of_kind(der: &[u8], wanted: u8) -> Option<(&[u8], &[u8])> {
    let (kind, content, rest) = element(der)?;
    (kind == wanted).then_some((content, rest))
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`.
fn time(kind: u8, text: &str) -> Option<i64> {
    let text = match kind {
        UTC_TIME if text.get(..2)? < "50" => format!("20{text}"),
        UTC_TIME => format!("19{text}"),
        GENERALIZED_TIME => text.to_owned(),
        _ => return None,
    };
    let time = jiff::civil::DateTime::strptime("%Y%m%d%H%M%SZ", text).ok()?;
    let zoned = time.to_zoned(jiff::tz::TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_millisecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(kind: u8, content: &[u8]) -> Vec<u8> {
        let length = match content.len() {
            n @ 0..0x80 => vec![n as u8],
            n => vec![0x82, (n >> 8) as u8, n as u8],
        };
        [vec![kind], length, content.to_vec()].concat()
    }

    fn certificate(version: bool, to: Vec<u8>) -> Vec<u8> {
        let validity = [put(UTC_TIME, b"200101000000Z"), to].concat();
        let version = if version {
            put(VERSION, &put(INTEGER, &[2]))
        } else {
            vec![]
        };
        let name = vec![7; 300];
        let all = [
            version,
            put(INTEGER, &[9]),
            put(SEQUENCE, b"ecdsa"),
            put(SEQUENCE, &name),
            put(SEQUENCE, &validity),
            put(SEQUENCE, b"subject"),
        ];
        put(
            SEQUENCE,
            &[put(SEQUENCE, &all.concat()), put(SEQUENCE, b"signed")].concat(),
        )
    }

    #[test]
    fn a_certificate_says_until_when_it_is_valid() {
        let noon = 1_795_176_000_000; // 2026-11-20T12:00:00Z
        for version in [false, true] {
            let utc = certificate(version, put(UTC_TIME, b"261120120000Z"));
            assert_eq!(expires(&utc), Some(noon));
            let long = certificate(version, put(GENERALIZED_TIME, b"20261120120000Z"));
            assert_eq!(expires(&long), Some(noon));
            // Whatever is cut off, it only cannot be read.
            for n in 0..utc.len() {
                assert_eq!(expires(&utc[..n]), None);
            }
        }
        assert_eq!(
            expires(&certificate(true, put(UTC_TIME, b"261320120000Z"))),
            None
        );
    }
}
