//! What a terminal sends, as keys.

/// A key of the keyboard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Enter,
    Esc,
    Tab,
    Back,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-Z.
    Suspend,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-L.
    Redraw,
}

/// The keys that `bytes` are. `begun` keeps the beginning of a sequence or of a character whose rest is still to come.
pub(super) fn keys(begun: &mut Vec<u8>, bytes: &[u8]) -> Vec<Key> {
    begun.extend_from_slice(bytes);
    let (mut keys, mut at) = (vec![], 0);
    while at < begun.len() {
        let Some((key, length)) = first(&begun[at..]) else {
            break;
        };
        keys.extend(key);
        at += length;
    }
    begun.drain(..at);
    // Whatever this is, it is no key.
    if begun.len() > 32 {
        begun.clear();
    }
    keys
}

/// The first key, None if it means nothing here, and its length in bytes. None: it is not complete.
fn first(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    let key = match bytes[0] {
        b'\x1b' => return escape(bytes),
        b'\r' | b'\n' => Key::Enter,
        b'\t' => Key::Tab,
        0x08 | 0x7f => Key::Back,
        0x03 => Key::Interrupt,
        0x1a => Key::Suspend,
        0x0c => Key::Redraw,
        ..=0x1f => return Some((None, 1)),
        byte => {
            let length = match byte {
                0xc2..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf4 => 4,
                _ => 1,
            };
            let whole = bytes.get(..length)?;
            let c = std::str::from_utf8(whole)
                .ok()
                .and_then(|text| text.chars().next());
            return match c {
                Some(c) if !crate::text::acts(c) => Some((Some(Key::Char(c)), length)),
                Some(_) => Some((None, length)),
                None => Some((None, 1)),
            };
        }
    };
    Some((Some(key), 1))
}

/// A key that comes as a sequence. A lone escape is the key of that name: a terminal sends a sequence at once.
fn escape(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    let (Some(second), rest) = (bytes.get(1), bytes.get(2..).unwrap_or_default()) else {
        return Some((Some(Key::Esc), 1));
    };
    if !matches!(second, b'[' | b'O') {
        return Some((Some(Key::Esc), 1));
    }
    let end = rest.iter().position(|b| (0x40..=0x7e).contains(b))?;
    let key = match (rest[end], &rest[..end]) {
        (b'A', _) => Some(Key::Up),
        (b'B', _) => Some(Key::Down),
        (b'C', _) => Some(Key::Right),
        (b'D', _) => Some(Key::Left),
        (b'H', _) | (b'~', b"1" | b"7") => Some(Key::Home),
        (b'F', _) | (b'~', b"4" | b"8") => Some(Key::End),
        (b'~', b"5") => Some(Key::PageUp),
        (b'~', b"6") => Some(Key::PageDown),
        (b'~', b"3") => Some(Key::Back),
        (b'Z', _) => Some(Key::Tab),
        (b'M', b"") if *second == b'O' => Some(Key::Enter),
        _ => None,
    };
    Some((key, 3 + end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_sends_is_keys_however_it_is_cut() {
        let bytes = "t\x1b[A\x1bOB\x1b[6~\x1b[1;5C\x1b[200~ä日\r\x03".as_bytes();
        let whole = [
            Key::Char('t'),
            Key::Up,
            Key::Down,
            Key::PageDown,
            Key::Right,
            Key::Char('ä'),
            Key::Char('日'),
            Key::Enter,
            Key::Interrupt,
        ];
        for cut in 0..bytes.len() {
            // An escape that stands alone is a key of its own.
            if cut > 0 && bytes[cut - 1] == 0x1b {
                continue;
            }
            let mut begun = vec![];
            let mut got = keys(&mut begun, &bytes[..cut]);
            got.extend(keys(&mut begun, &bytes[cut..]));
            assert_eq!(got, whole, "cut at {cut}");
        }
        let mut begun = vec![];
        assert_eq!(keys(&mut begun, b"\x1b"), [Key::Esc]);
        assert_eq!(
            keys(&mut begun, b"\x1bq\xff\x00"),
            [Key::Esc, Key::Char('q')]
        );
        assert_eq!(keys(&mut begun, b"\x1b["), []);
        assert_eq!(keys(&mut begun, &[b'1'; 100]), []);
        assert!(begun.is_empty());
    }
}
