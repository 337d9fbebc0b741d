//! What `contrib/` has for Prometheus and Grafana: it names only what an instance shows, and promtool accepts it.

use std::{
    collections::BTreeSet,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::client::get;
use crate::support::{GENEROUS, fleet::fleet, skip, wait_for, wait_until};

const RULES: &str = include_str!("../../../contrib/prometheus/alerts.yml");
const RULES_TEST: &str = include_str!("../../../contrib/prometheus/alerts.test.yml");
const DASHBOARD: &str = include_str!("../../../contrib/grafana/soloist.json");
const PAGE: &str = include_str!("../../../docs/http.md");

/// The metrics of an instance that has run a job.
fn metrics() -> String {
    let fleet = fleet(1)
        .sqlite()
        .http("")
        .tables("[notify.ops]\ntype = \"command\"\ncommand = [\"true\"]\n")
        .job("job", "command = \"true\"\nschedule = \"0 0 1 1 *\"")
        .start();
    let at = fleet.http(0);
    wait_until("the job is known", GENEROUS, || {
        get(&at, "/api/v1/jobs").of(200)["jobs"][0]["known"] == true
    });
    fleet.said(&["trigger", "job", "--wait"]);
    wait_for("a run that is counted", GENEROUS, || {
        let text = get(&at, "/metrics").send().text();
        let counted = text.contains("soloist_job_last_success_timestamp_seconds{job=\"job\"}")
            && text.contains("soloist_runs_total{job=\"job\",outcome=\"succeeded\"} ");
        counted.then_some(text)
    })
}

/// Each `soloist_…` in the text, with the label matchers that follow it.
fn named(text: &str) -> Vec<(&str, &str)> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let found = text.match_indices("soloist_").filter(|(at, _)| {
        // Not within another word, such as the name of a recording rule.
        !text[..*at].ends_with(|c: char| is_word(c) || c == ':')
    });
    let found = found.map(|(at, _)| {
        let rest = &text[at..];
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let labels = rest[end..]
            .strip_prefix('{')
            .and_then(|l| l.split_once('}'));
        (&rest[..end], labels.map_or("", |(labels, _)| labels))
    });
    found.collect()
}

fn expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let all = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let targets = all(&dashboard["panels"])
        .into_iter()
        .flat_map(|p| all(&p["targets"]));
    let notes = all(&dashboard["annotations"]["list"]);
    let found = targets
        .chain(notes)
        .map(|t| t["expr"].as_str().expect("an expression").to_owned());
    found.collect()
}

#[test]
fn rules_and_dashboard_name_only_metrics_that_there_are() {
    let metrics = metrics();
    let types = metrics.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    let types = types.filter_map(|l| l.split_once(' '));
    let types: BTreeSet<String> = types
        .map(|(name, kind)| match kind {
            "counter" => format!("{name}_total"),
            _ => name.to_owned(),
        })
        .collect();
    // Of a histogram the parts; of what is counted by label, the name also before it was counted.
    let exists = |name: &str| {
        types.contains(name)
            || ["_bucket", "_sum", "_count"].iter().any(|end| {
                name.strip_suffix(end).is_some_and(|of| types.contains(of))
                    && metrics.contains(&format!("\n{name}"))
            })
    };
    let expressions = expressions();
    assert!(expressions.len() > 30, "{expressions:?}");
    let texts = [RULES, RULES_TEST]
        .into_iter()
        .chain(expressions.iter().map(String::as_str));
    let mut seen = BTreeSet::new();
    for text in texts {
        for (name, labels) in named(text) {
            assert!(exists(name), "{name} is no metric, in: {text}");
            seen.insert(name);
            // The values that a rule asks for are some that there are.
            for label in labels
                .split(',')
                .filter(|l| l.contains("=\"") && !l.contains('$'))
            {
                let known = ["job=", "instance=", "le="]
                    .iter()
                    .any(|own| label.starts_with(own));
                let shown = |l: &str| l.starts_with(name) && l.contains(label);
                assert!(
                    known || metrics.lines().any(shown),
                    "{name} has never {label}"
                );
            }
        }
    }
    assert!(seen.len() > 20, "{seen:?}");
    // What there is, is described, and is on the dashboard.
    let dashboard = expressions.concat();
    for name in types {
        assert!(
            PAGE.contains(&format!("`{name}")),
            "{name} is not in docs/http.md"
        );
        assert!(dashboard.contains(&name), "{name} is not on the dashboard");
    }
}

#[test]
fn each_alert_is_tried() {
    let alerts = RULES
        .lines()
        .filter_map(|l| l.trim().strip_prefix("- alert: "));
    let alerts: Vec<&str> = alerts.collect();
    assert!(alerts.len() > 15, "{alerts:?}");
    for alert in alerts {
        let fires = format!("alertname: {alert}\n        exp_alerts:");
        assert!(
            RULES_TEST.contains(&fires),
            "no test in which {alert} fires"
        );
        let silent = format!("alertname: {alert} }}");
        assert!(
            RULES_TEST.contains(&silent),
            "no test in which {alert} is silent"
        );
    }
}

/// Runs promtool on this input, in `contrib/prometheus`.
#[track_caller]
fn promtool(arguments: &[&str], input: &str) {
    let mut child = Command::new("promtool")
        .args(arguments)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("contrib/prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start promtool");
    let mut stdin = child.stdin.take().expect("its input");
    // It may end before it has read all.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let output = child.wait_with_output().expect("wait for promtool");
    assert!(
        output.status.success(),
        "promtool {arguments:?}: {output:?}"
    );
}

#[test]
fn promtool_finds_nothing_wrong() {
    if Command::new("promtool").arg("--version").output().is_err() {
        return skip("promtool is not installed (./test.sh --all does)");
    }
    // Reads the rules, too.
    promtool(&["check", "config", "prometheus.yml"], "");
    promtool(&["test", "rules", "alerts.test.yml"], "");
    let rules = expressions()
        .into_iter()
        .enumerate()
        .map(|(i, expression)| {
            let mut expression = expression;
            for variable in ["$__rate_interval", "$__interval", "$__range"] {
                expression = expression.replace(variable, "5m");
            }
            json!({"record": format!("panel_{i}"), "expr": expression})
        });
    let rules: Vec<Value> = rules.collect();
    let rules = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("rules.yml");
    // JSON is YAML.
    std::fs::write(&file, rules.to_string()).expect("write the rules");
    promtool(&["check", "rules", file.to_str().expect("UTF-8")], "");
}
