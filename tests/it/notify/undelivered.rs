//! Messages that are given up: each instance tells of them.

use serde_json::Value;

use super::{
    channel,
    servers::{Hook, Mode},
};
use crate::{
    http::client::get,
    support::{GENEROUS, fleet::fleet, wait_for, wait_until},
};

fn undelivered(at: &str) -> Vec<Value> {
    let all = get(at, "/api/v1/events?feed=true").of(200);
    let events = all["events"].as_array().expect("events");
    let wanted = events.iter().filter(|e| e["kind"] == "undelivered");
    wanted.cloned().collect()
}

#[test]
fn a_message_that_is_given_up_is_an_event_on_each_instance() {
    let hook = Hook::start(Mode::Status(404));
    let mut fleet = fleet(2)
        .http("")
        .tables(&channel("ops", &hook, ""))
        .default("notify", "[\"ops\"]")
        .job("bad", "command = \"false\"\nschedule = \"@every 1s\"")
        .env(0, "SOLOIST_FAILPOINT", "hurry")
        .env(1, "SOLOIST_FAILPOINT", "hurry")
        .start();
    let said = fleet.said(&["notify", "undelivered"]);
    assert_eq!(said, "no message was given up\n");
    let (a, b) = (fleet.http(0), fleet.http(1));
    let mut stream = get(&b, "/api/v1/events").stream();
    let event = stream.wait("it is given up", |e| e.kind == "undelivered");
    assert_eq!(event.data["channel"], "ops");
    assert_eq!(
        (&event.data["job"], &event.data["count"]),
        (&"bad".into(), &1.into())
    );
    let why = event.data["reason"].as_str().expect("why");
    assert!(why.contains("404") && !why.contains("/ops"), "{why}");
    for at in [&a, &b] {
        wait_until("each instance tells", GENEROUS, || {
            undelivered(at).len() == 1
        });
    }
    assert_eq!(hook.paths().len(), 6);
    // What became of it is counted by the instance that sent it, and is there on the others.
    let notifier = (0..2).find(|i| {
        let log = fleet.instances[*i].log_text();
        log.contains("gave a message up")
    });
    let notifier = notifier.expect("one that gave it up");
    for (i, at) in [&a, &b].into_iter().enumerate() {
        let metrics = get(at, "/metrics").send().text();
        let counts = if i == notifier { [0, 6, 1] } else { [0, 0, 0] };
        for (result, n) in ["sent", "failed", "given_up"].into_iter().zip(counts) {
            let labels = format!("{{channel=\"ops\",result=\"{result}\"}}");
            let line = format!("\nsoloist_notifications_total{labels} {n}\n");
            assert!(metrics.contains(&line), "{line}: {metrics}");
        }
    }
    let told = fleet.json(&["notify", "undelivered", "--json"]);
    assert_eq!(told.as_array().map(Vec::len), Some(1), "{told}");
    assert_eq!(told[0]["channel"], "ops");
    assert_eq!(told[0]["tries"], 6);
    assert_eq!(
        told[0]["about"][0],
        serde_json::json!({"job": "bad", "kind": "failed"})
    );
    let text = fleet.said(&["notify", "undelivered"]);
    assert!(
        text.contains("bad failed") && text.contains("404"),
        "{text}"
    );
    // It is known to who comes later, too.
    fleet.instances[1 - notifier].kill();
    fleet.instances[1 - notifier].start();
    wait_for("it tells, too", GENEROUS, || {
        let at = fleet.http(1 - notifier);
        let known = std::net::TcpStream::connect(&at).is_ok() && !undelivered(&at).is_empty();
        known.then_some(())
    });
}
