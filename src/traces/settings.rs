//! Where spans go: read from the variables that OpenTelemetry specifies for all programs. If a variable is wrong,
//! soloist says so without its value, which may be secret, and takes the variable as unset.

use std::{fmt, time::Duration};

use hyper::header::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

/// Where spans go, and what is said of this process.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// With the path.
    pub(super) url: String,
    /// Names and values.
    pub(super) headers: Vec<(String, String)>,
    /// The time limit of each request.
    pub(super) timeout: Duration,
    /// Attributes of this process.
    pub(super) resource: Vec<(String, String)>,
}

/// Leaves out what may be secret.
impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// What a process says of itself, unless the variables say otherwise.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own<'a> {
    pub(crate) instance: &'a str,
    pub(crate) host: &'a str,
    pub(crate) namespace: &'a str,
}

/// The time limit of a request without a variable.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that a variable may say, in milliseconds.
const TIMEOUT_MOST: u64 = 600_000;
/// Where a receiver listens if nobody says otherwise.
const LOCAL: &str = "http://localhost:4318";
/// Behind an address that is not of traces alone.
const PATH: &str = "/v1/traces";
/// Headers that the client makes.
const OURS: [&str; 4] = [
    "content-type",
    "content-length",
    "transfer-encoding",
    "connection",
];

/// Looks at the variables. None: no spans are sent. Also what is wrong with them, in words.
pub(crate) fn read(
    variable: &dyn Fn(&str) -> Option<String>,
    own: Own<'_>,
) -> (Option<Settings>, Vec<String>) {
    let mut problems = vec![];
    let settings = Variables(variable).settings(own, &mut problems);
    (settings, problems)
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// An empty variable counts as unset.
    fn get(&self, name: &str) -> Option<String> {
        let value = (self.0)(name)?.trim().to_owned();
        (!value.is_empty()).then_some(value)
    }

    /// The value of an option of the exporter, and the variable that has it: the one for traces goes before the one for
    /// everything.
    fn option(&self, end: &str) -> Option<(String, String)> {
        ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"]
            .iter()
            .find_map(|begin| {
                let name = format!("{begin}{end}");
                Some((self.get(&name)?, name))
            })
    }

    fn settings(&self, own: Own<'_>, problems: &mut Vec<String>) -> Option<Settings> {
        if !self.wanted(problems) {
            return None;
        }
        let url = self.url(problems)?;
        for end in ["CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"] {
            if let Some((_, name)) = self.option(end) {
                problems.push(format!(
                    "{name} has no effect: soloist trusts the authorities that the host trusts (SSL_CERT_FILE names \
                    others), and shows no certificate"
                ));
            }
        }
        Some(Settings {
            url,
            headers: self.headers(problems),
            timeout: self.timeout(problems),
            resource: self.resource(own, problems),
        })
    }

    /// Whether spans are to be sent, and soloist knows how.
    fn wanted(&self, problems: &mut Vec<String>) -> bool {
        let disabled = self.get("OTEL_SDK_DISABLED");
        if disabled.is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            return false;
        }
        let exporters = self.get("OTEL_TRACES_EXPORTER").unwrap_or_default();
        let named: Vec<&str> = exporters.split(',').map(str::trim).collect();
        if named.contains(&"none") {
            return false;
        }
        let addressed = self.option("ENDPOINT").is_some();
        match named.contains(&"otlp") {
            false if exporters.is_empty() && !addressed => return false,
            false if !exporters.is_empty() => {
                problems.push(
                    "OTEL_TRACES_EXPORTER names no exporter that soloist has, which is `otlp`: no traces are sent"
                        .to_owned(),
                );
                return false;
            }
            _ => {}
        }
        match self.option("PROTOCOL") {
            Some((protocol, name)) if protocol == "grpc" => {
                problems.push(format!(
                    "{name} is `grpc`, and soloist speaks `http/json`: no traces are sent; set \
                    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json, and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT to where the \
                    receiver takes HTTP, as http://collector:4318/v1/traces"
                ));
                false
            }
            // A receiver of OTLP over HTTP takes both of its forms.
            Some((protocol, _)) if ["http/json", "http/protobuf"].contains(&&*protocol) => true,
            Some((_, name)) => {
                problems.push(format!("{name} is no protocol: soloist speaks `http/json`"));
                true
            }
            None => true,
        }
    }

    fn url(&self, problems: &mut Vec<String>) -> Option<String> {
        let (address, name) = self
            .option("ENDPOINT")
            .unwrap_or_else(|| (LOCAL.to_owned(), String::new()));
        let sound = crate::config::is_http_url(&address)
            && address
                .parse::<hyper::Uri>()
                .is_ok_and(|uri| uri.host().is_some());
        if !sound {
            problems.push(format!(
                "{name} is not the address of a server, as http://collector:4318: no traces are sent"
            ));
            return None;
        }
        Some(match name.ends_with("TRACES_ENDPOINT") {
            true => address,
            false => format!("{}{PATH}", address.trim_end_matches('/')),
        })
    }

    fn headers(&self, problems: &mut Vec<String>) -> Vec<(String, String)> {
        let Some((text, name)) = self.option("HEADERS") else {
            return vec![];
        };
        let sound = |(header, value): &(String, String)| {
            HeaderName::try_from(header).is_ok_and(|name| !OURS.contains(&name.as_str()))
                && HeaderValue::from_str(value).is_ok()
        };
        match pairs(&text).filter(|pairs| pairs.iter().all(sound)) {
            Some(pairs) => pairs,
            None => {
                problems.push(format!(
                    "{name} is not of the form `name=value,name=value` with headers of HTTP: none of them is sent"
                ));
                vec![]
            }
        }
    }

    fn timeout(&self, problems: &mut Vec<String>) -> Duration {
        let Some((text, name)) = self.option("TIMEOUT") else {
            return TIMEOUT;
        };
        match text.parse() {
            Ok(ms @ 1..=TIMEOUT_MOST) => Duration::from_millis(ms),
            _ => {
                problems.push(format!(
                    "{name} is not a number of milliseconds from 1 to {TIMEOUT_MOST}: the time limit is {TIMEOUT:?}"
                ));
                TIMEOUT
            }
        }
    }

    fn resource(&self, own: Own<'_>, problems: &mut Vec<String>) -> Vec<(String, String)> {
        let mut resource = [
            ("service.name", "soloist"),
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", own.instance),
            ("host.name", own.host),
            ("soloist.namespace", own.namespace),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .to_vec();
        const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
        let given = self.get(ATTRIBUTES).unwrap_or_default();
        let given = pairs(&given).unwrap_or_else(|| {
            problems.push(format!(
                "{ATTRIBUTES} is not of the form `key=value,key=value`: it has no effect"
            ));
            vec![]
        });
        let name = self.get("OTEL_SERVICE_NAME");
        let name = name.map(|name| ("service.name".to_owned(), name));
        for (key, value) in given.into_iter().chain(name) {
            resource.retain(|(known, _)| *known != key);
            resource.push((key, value));
        }
        resource
    }
}

/// `a=1,b=2`, with the values percent-encoded. None: it is something else.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
    let pair = |part: &str| {
        let (key, value) = part.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        let key = key.trim();
        (!key.is_empty()).then(|| (key.to_owned(), value.into_owned()))
    };
    parts.map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Own<'_> = Own {
        instance: "i1",
        host: "h",
        namespace: "soloist",
    };

    fn read_of(variables: &[(&str, &str)]) -> (Option<Settings>, Vec<String>) {
        let get = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        read(&get, OWN)
    }

    fn sound(variables: &[(&str, &str)]) -> Settings {
        let (settings, problems) = read_of(variables);
        assert_eq!(problems, [""; 0], "{variables:?}");
        settings.expect("spans are sent")
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");

    #[test]
    fn nothing_is_sent_unless_somebody_says_where() {
        let off: [&[(&str, &str)]; 7] = [
            &[],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", " ")],
            &[("OTEL_SERVICE_NAME", "x")],
            &[ENDPOINT, ("OTEL_SDK_DISABLED", "TRUE")],
            &[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")],
            &[("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://c:4318")],
            &[
                ("OTEL_SDK_DISABLED", "true"),
                ("OTEL_TRACES_EXPORTER", "otlp"),
            ],
        ];
        for variables in off {
            assert_eq!(read_of(variables), (None, vec![]), "{variables:?}");
        }
        let on = sound(&[ENDPOINT, ("OTEL_SDK_DISABLED", "yes")]);
        assert_eq!(on.url, "http://c:4318/v1/traces");
        assert_eq!((on.timeout, on.headers.len()), (TIMEOUT, 0));
        let local = sound(&[("OTEL_TRACES_EXPORTER", "otlp")]);
        assert_eq!(local.url, "http://localhost:4318/v1/traces");
    }

    #[test]
    fn what_is_of_traces_goes_before_what_is_of_everything() {
        let s = sound(&[
            ENDPOINT,
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://t/in"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=1"),
            (
                "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
                "api-key=a%3Db, x = y ,",
            ),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "250"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
        ]);
        assert_eq!(s.url, "https://t/in");
        let of = |k: &str, v: &str| (k.to_owned(), v.to_owned());
        assert_eq!(s.headers, [of("api-key", "a=b"), of("x", "y")]);
        assert_eq!(s.timeout, Duration::from_millis(250));
        let slash = sound(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c/otlp/")]);
        assert_eq!(slash.url, "http://c/otlp/v1/traces");
    }

    #[test]
    fn a_process_says_what_it_is_and_the_variables_say_more() {
        let of = |s: &Settings, key: &str| {
            let found: Vec<_> = s.resource.iter().filter(|(k, _)| k == key).collect();
            assert!(found.len() < 2, "{found:?}");
            found.first().map(|(_, v)| v.clone())
        };
        let plain = sound(&[ENDPOINT]);
        assert_eq!(of(&plain, "service.name").as_deref(), Some("soloist"));
        assert_eq!(of(&plain, "service.instance.id").as_deref(), Some("i1"));
        let more = sound(&[
            ENDPOINT,
            ("OTEL_SERVICE_NAME", "nightly"),
            (
                "OTEL_RESOURCE_ATTRIBUTES",
                "service.name=other,deployment.environment.name=prod%20eu,host.name=mine",
            ),
        ]);
        assert_eq!(of(&more, "service.name").as_deref(), Some("nightly"));
        assert_eq!(of(&more, "host.name").as_deref(), Some("mine"));
        let environment = of(&more, "deployment.environment.name");
        assert_eq!(environment.as_deref(), Some("prod eu"));
    }

    #[test]
    fn what_is_wrong_is_said_without_the_value() {
        // The variables, a word of what is said, and whether spans are sent all the same.
        let cases = [
            (
                ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://hunter2"),
                "not the address",
                false,
            ),
            (
                ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://me:hunter2@c"),
                "not the address",
                false,
            ),
            (
                ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2"),
                "none of them",
                true,
            ),
            (
                ("OTEL_EXPORTER_OTLP_HEADERS", "a=hunter2%0Ab"),
                "none of them",
                true,
            ),
            (
                ("OTEL_EXPORTER_OTLP_HEADERS", "Content-Length=hunter2"),
                "none of them",
                true,
            ),
            (
                ("OTEL_EXPORTER_OTLP_HEADERS", "a=hunter2%ff"),
                "none of them",
                true,
            ),
            (
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "hunter2"),
                "milliseconds",
                true,
            ),
            (("OTEL_EXPORTER_OTLP_TIMEOUT", "0"), "milliseconds", true),
            (("OTEL_RESOURCE_ATTRIBUTES", "hunter2"), "no effect", true),
            (("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), "http/json", false),
            (
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "hunter2"),
                "http/json",
                true,
            ),
            (("OTEL_TRACES_EXPORTER", "zipkin"), "otlp", false),
            (
                ("OTEL_EXPORTER_OTLP_CERTIFICATE", "hunter2.pem"),
                "SSL_CERT_FILE",
                true,
            ),
        ];
        for (variable, word, sent) in cases {
            let (settings, problems) = read_of(&[ENDPOINT, variable]);
            assert_eq!(settings.is_some(), sent, "{variable:?}");
            let [problem] = &problems[..] else {
                panic!("{variable:?}: {problems:?}");
            };
            assert!(problem.contains(variable.0), "{problem}");
            assert!(problem.contains(word), "{problem}");
            assert!(!problem.contains("hunter2"), "{problem}");
        }
    }

    #[test]
    fn the_settings_show_no_secret() {
        let s = sound(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c/hunter1"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter2"),
        ]);
        assert!(!format!("{s:?}").contains("hunter"), "{s:?}");
        let handed = serde_json::to_value(&s).expect("JSON");
        let back: Settings = serde_json::from_value(handed).expect("what was handed on");
        assert_eq!(back, s);
    }
}
