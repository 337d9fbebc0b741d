//! A store whose clock is wrong for a while: nothing is decided by it, and nothing is lost.

use std::time::Duration;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, LATE_RATHER_THAN_SKIPPED, fleet},
    process,
    proxy::Fault,
    trace::ONCE,
    wait_until,
};

const HOUR: Duration = Duration::from_secs(3600);

/// Instances with a job each second, whose clocks agree with the store's; some have run.
fn running(size: usize) -> Fleet {
    let fleet = fleet(size)
        .store_with_own_clock()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(3);
    fleet
}

fn newest(fleet: &Fleet) -> i64 {
    let status = fleet.json(&["status", "--json"]);
    let text = status["jobs"][0]["newest"].as_str().expect("decided ones");
    let at: jiff::Timestamp = text.parse().expect("a time");
    at.as_millisecond()
}

/// The clock is wrong for as long as `notice` takes, and right again: nothing was decided before its time, and every
/// second from the first to the last is accounted for.
fn survives(fleet: &mut Fleet, by: Duration, notice: impl FnOnce(&mut Fleet)) {
    fleet.server().step_clock(by);
    notice(fleet);
    let runs = fleet.trace().runs().len();
    let known = newest(fleet);
    // Some seconds become due meanwhile; nobody decides them by that clock.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(fleet.trace().runs().len(), runs, "started by a wrong clock");
    assert_eq!(newest(fleet), known, "decided by a wrong clock");
    fleet.server().step_clock(Duration::ZERO);
    fleet.wait_more_runs(4);
}

#[test]
fn a_store_clock_that_jumps_for_a_moment_silences_no_job() {
    let mut fleet = running(2);
    let why = |fleet: &Fleet| fleet.said(&["why", "work"]);
    survives(&mut fleet, HOUR, |fleet| {
        for i in 0..2 {
            fleet.wait_log(i, "the store's clock is 3600.0s ahead");
        }
        wait_until("status says so", GENEROUS, || {
            let text = fleet.said(&["status"]);
            text.contains("do not believe the store's clock, which is 1 h")
        });
        wait_until("why says so", GENEROUS, || {
            why(fleet).contains("instances do not believe the store's clock")
        });
    });
    for i in 0..2 {
        fleet.wait_log(i, "believes the store's clock again");
    }
    fleet.stop();
    fleet.judge(ONCE, &["work"], None);
}

#[test]
fn a_store_that_comes_up_with_a_wrong_clock_silences_no_job() {
    let mut fleet = running(2);
    fleet.server().append_only();
    survives(&mut fleet, HOUR, |fleet| {
        fleet.server().kill();
        fleet.server().revive(None);
        for i in 0..2 {
            fleet.wait_log(i, "the store's clock is 3600.0s ahead");
        }
    });
    let history = fleet.history("work");
    assert!(
        history
            .iter()
            .all(|r| r["count"].as_i64().unwrap_or(1) < 60),
        "given up in the future: {history:#?}"
    );
    fleet.stop();
    fleet.judge(ONCE, &["work"], None);
}

/// An instance that starts while the clock is wrong has seen no other time; the other hosts' clocks tell it.
#[test]
fn an_instance_that_starts_under_a_wrong_clock_asks_the_other_hosts() {
    let mut fleet = running(3);
    survives(&mut fleet, HOUR, |fleet| {
        for i in 0..3 {
            fleet.wait_log(i, "the store's clock is 3600.0s ahead");
        }
        fleet.instances[0].kill();
        std::fs::write(&fleet.instances[0].log, "").expect("an empty log");
        fleet.instances[0].start();
        fleet.wait_log(0, "the store's clock is 3600.0s ahead");
    });
    fleet.stop();
    fleet.judge(ONCE, &["work"], None);
}

/// A clock that was wrong from the beginning and is corrected is believed: the hosts' clocks side with it.
#[test]
fn a_store_clock_that_is_put_right_is_believed() {
    let mut fleet = fleet(1)
        .store_with_own_clock()
        .store_comes_later()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .witness("plain", "for=5", "")
        .start();
    fleet.server().step_clock(HOUR);
    fleet.server().revive(None);
    // One host against the store: the store names the instants.
    let of = |fleet: &Fleet, job: &str| fleet.trace().runs_of(job);
    wait_until("both have run", GENEROUS, || {
        ["work", "plain"]
            .iter()
            .all(|job| of(&fleet, job).len() >= 2)
    });
    // While it is put right, some seconds become due by what was believed.
    fleet.server().stop();
    fleet.server().step_clock(Duration::ZERO);
    std::thread::sleep(Duration::from_millis(2500));
    fleet.server().cont();
    fleet.wait_log(0, "the hosts' clocks agree with it");
    // Everything up to then is decided, an hour ahead. It is named, and put right by hand.
    fleet.wait_log(0, "counts occurrences up to this future instant");
    let text = fleet.said(&["status"]);
    assert!(
        text.contains("`soloist rewind work` corrects that"),
        "{text}"
    );
    let why = fleet.said(&["why", "work"]);
    let ran =
        |runs: &[crate::support::trace::Run]| runs.iter().map(|r| r.occurrence).collect::<Vec<_>>();
    for job in ["work", "plain"] {
        let early = ran(&of(&fleet, job));
        let said = fleet.said(&["rewind", job]);
        assert!(
            said.contains("it now counts only past occurrences"),
            "{said}\n{why}"
        );
        assert!(said.contains("ran before their time"), "{said}");
        wait_until("it runs at its time", GENEROUS, || {
            of(&fleet, job).len() >= early.len() + 3
        });
        let all = ran(&of(&fleet, job));
        for at in &early {
            assert_eq!(all.iter().filter(|o| *o == at).count(), 1, "{at} ran twice");
        }
    }
    let again = fleet.said(&["rewind", "work"]);
    assert!(
        again.contains("`work` counts no future occurrence as decided"),
        "{again}"
    );
}

/// The first instance was alone, and nothing contradicted the clock. The next instance does.
#[test]
fn a_wrong_clock_that_a_lone_instance_believed_is_outvoted_by_those_who_come_later() {
    let mut fleet = fleet(2)
        .store_with_own_clock()
        .store_comes_later()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.instances[1].kill();
    fleet.server().step_clock(HOUR);
    fleet.server().revive(None);
    fleet.wait_runs(2);
    fleet.instances[1].start();
    for i in 0..2 {
        fleet.wait_log(i, "ahead of the time that this host measured");
    }
    wait_until("status says so", GENEROUS, || {
        let text = fleet.said(&["status"]);
        text.contains("\ninstances do not believe the store's clock")
            && text.contains("nothing is started")
    });
    let runs = fleet.trace().runs().len();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(fleet.trace().runs().len(), runs, "started by a wrong clock");
    fleet.server().step_clock(Duration::ZERO);
    for i in 0..2 {
        fleet.wait_log(i, "believes the store's clock again");
    }
    // What was decided an hour ahead is put right by hand.
    let said = fleet.said(&["rewind", "work"]);
    assert!(
        said.contains("it now counts only past occurrences"),
        "{said}"
    );
    fleet.wait_more_runs(3);
}

/// Instances with a job each second and one that is only triggered, who have begun to doubt the store's clock, which is
/// an hour ahead or behind.
fn doubting(hours: i64) -> Fleet {
    let mut fleet = fleet(2)
        .store_with_own_clock()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .job(
            "extra",
            "schedule = []\nstart_within = \"2s\"\ncommand = [\"true\"]\n",
        )
        .start();
    fleet.wait_runs(3);
    fleet.server().set_clock(hours * 3_600_000_000);
    wait_until("both say so", GENEROUS, || {
        let status = fleet.json(&["status", "--json"]);
        status["nobody_believes"] == true
    });
    fleet
}

fn ms(time: &serde_json::Value) -> i64 {
    let at: jiff::Timestamp = time.as_str().expect("a time").parse().expect("a time");
    at.as_millisecond()
}

fn wall() -> i64 {
    soloist::clock::wall_us() / 1000
}

fn near(at: i64, wanted: i64) {
    let apart = Duration::from_millis(at.abs_diff(wanted));
    assert!(apart < GENEROUS, "{apart:?} apart");
}

#[test]
fn status_and_why_go_by_the_time_that_instances_believe() {
    for hours in [1, -1] {
        let fleet = doubting(hours);
        let status = fleet.json(&["status", "--json"]);
        near(ms(&status["now"]), wall());
        for i in status["instances"].as_array().expect("instances") {
            assert_eq!(i["silent"], false, "{status:#}");
            near(ms(&i["last_seen"]), wall());
        }
        let text = fleet.said(&["status"]);
        assert!(text.contains("when the clock is corrected"), "{text}");
        assert!(!text.contains("rewind"), "nothing is wrong with it: {text}");
        // The latest that is planned, by the right time; nobody decides on it.
        wait_until("why says so", GENEROUS, || {
            let why = fleet.json(&["why", "work", "--json"]);
            near(ms(&why["occurrence"]), wall());
            let verdict = why["verdict"].as_str().expect("a verdict");
            let silent = why["silent"].as_array().expect("those without a decision");
            verdict.contains("instances do not believe the store's clock")
                && silent.len() == 2
                && silent
                    .iter()
                    .all(|s| s["reason"] == "does not believe the store's clock")
        });
        // One that ran before is no other than it was, and none of tomorrow is undecided.
        let ran = fleet.trace().runs()[0].occurrence.to_string();
        let why = fleet.said(&["why", "work", &ran]);
        assert!(why.contains("It ran once"), "{why}");
        assert!(!why.contains("stopped reporting"), "{why}");
        let tomorrow = wall() / 1000 * 1000 + 86_400_000;
        let why = fleet.said(&["why", "work", &tomorrow.to_string()]);
        assert!(
            why.contains("It is not due yet: it is due in 23 h"),
            "{why}"
        );
        let history = fleet.said(&["history", "work"]);
        assert!(
            !history.contains(" h ago") && !history.contains("in "),
            "{history}"
        );
    }
}

#[test]
fn a_trigger_says_that_the_clock_stands_in_its_way() {
    let mut fleet = doubting(1);
    let asked = fleet.said(&["trigger", "work", "--key", "a"]);
    assert!(
        asked.contains("once the store's clock is corrected"),
        "{asked}"
    );
    let out = fleet.cli(&["trigger", "extra", "--key", "k", "--wait"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(75), "{said}");
    assert!(!said.contains("no instance is up"), "{said}");
    assert!(
        said.contains("do not believe the store's clock, which is "),
        "{said}"
    );
    assert!(said.contains("with another key"), "{said}");
    fleet.server().step_clock(Duration::ZERO);
    let record = fleet.wait_record("extra", "missed");
    let why = record["error"].as_str().expect("a reason");
    assert!(why.contains("the store's clock was wrong"), "{why}");
    for words in [
        &["trigger", "extra", "--key", "k"][..],
        &["trigger", "extra", "--key", "k", "--wait"],
    ] {
        let out = fleet.cli(words);
        let said = [out.stdout, out.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("the store's clock was wrong"), "{said}");
        assert!(said.contains("use another --key to run it"), "{said}");
    }
}

/// A pause counts by the time that is believed, and says so.
#[test]
fn a_pause_counts_by_the_time_that_instances_believe() {
    for hours in [1, -1] {
        let mut fleet = doubting(hours);
        let out = fleet.cli(&["pause", "work", "--until", "30m"]);
        let warning = String::from_utf8_lossy(&out.stderr);
        assert!(
            warning.contains("instances do not believe it: --until counts by"),
            "{warning}"
        );
        let paused = |fleet: &Fleet| fleet.json(&["status", "--json"])["jobs"][1]["paused"].clone();
        let pause = paused(&fleet);
        near(ms(&pause["until"]), wall() + 1_800_000);
        near(ms(&pause["since"]), wall());
        fleet.server().step_clock(Duration::ZERO);
        let record = fleet.wait_record("work", "skipped");
        assert_eq!(record["error"], "paused");
        let resumed = fleet.said(&["resume", "work"]);
        assert!(resumed.contains("is resumed"), "{resumed}");
        fleet.wait_more_runs(2);
    }
    // Without any instance, the host's own clock speaks.
    let mut fleet = running(1);
    fleet.instances[0].kill();
    fleet.server().step_clock(HOUR);
    let out = fleet.cli(&["pause", "work", "--until", "30m"]);
    let warning = String::from_utf8_lossy(&out.stderr);
    assert!(
        warning.contains(", compared with this host's: --until"),
        "{warning}"
    );
    // What ran in the last hour would be undecided again.
    let known = newest(&fleet);
    fleet.server().set_clock(-3_600_000_000);
    let out = fleet.cli(&["rewind", "work"]);
    let refused = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(75), "{refused}");
    assert!(
        refused.contains("compared with this host's clock it is"),
        "{refused}"
    );
    assert_eq!(newest(&fleet), known);
}

const SECOND: i64 = 1_000_000;
const YEAR: i64 = 365 * 86_400 * SECOND;

/// A lone instance hears a wrong time once while it runs, and a few times at its very start.
#[test]
fn a_wrong_time_that_is_heard_once_silences_no_job() {
    let mut fleet = fleet(1)
        .proxied()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(2);
    let heard = |fleet: &Fleet| {
        wait_until("it was heard", GENEROUS, || {
            fleet.proxies[0].fault() == Fault::None
        });
    };
    for by in [40 * SECOND, 3600 * SECOND, 10 * YEAR, -3600 * SECOND] {
        fleet.proxies[0].set(Fault::WrongTime(by, 1));
        heard(&fleet);
        fleet.wait_more_runs(2);
        fleet.instances[0].urge();
        fleet.proxies[0].set(Fault::WrongTime(by, 3));
        fleet.instances[0].start();
        heard(&fleet);
        fleet.wait_more_runs(2);
    }
    fleet.stop();
    fleet.judge(ONCE, &["work"], None);
}

/// The instance is neither busy nor large, and ends when it is asked to.
fn well(fleet: &mut Fleet) {
    let pid = fleet.instances[0].pid();
    let kib = process::resident_kib(pid).expect("it runs");
    let ticks = process::cpu_ticks(pid);
    assert!(kib < 200_000, "{kib} KiB");
    assert!(ticks < 500, "{ticks} hundredths of a second of CPU");
    fleet.stop();
}

fn wait_struck(fleet: &Fleet, times: usize) {
    let before = fleet.proxies[0].struck();
    wait_until("many replies were others", GENEROUS, || {
        fleet.proxies[0].struck() > before + times
    });
}

/// The store tells a wrong time for ever, to an instance that knows the right one, and to one that does not.
#[test]
fn whatever_time_a_store_tells_the_daemon_stays_small_and_ends_when_asked() {
    for (by, impossible) in [
        (10 * YEAR, false),
        (-10 * YEAR, false),
        (7000 * YEAR, false),
        (20_000 * YEAR, true),
        (i64::MAX, true),
        (-100 * YEAR, true),
    ] {
        let mut fleet = fleet(1)
            .proxied()
            .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
            .start();
        fleet.wait_runs(1);
        fleet.proxies[0].set(Fault::WrongTime(by, u32::MAX));
        wait_struck(&fleet, 10);
        well(&mut fleet);
        if by.abs() == 10 * YEAR {
            fleet.server().command::<()>(&["FLUSHALL"]);
        }
        fleet.instances[0].start();
        wait_struck(&fleet, 10);
        if impossible {
            fleet.wait_log(0, "its clock cannot be right");
            fleet.wait_log(0, "is no time from 1970 to the year 9999");
        }
        // Neither the instance nor the store's data has known another time.
        if by.abs() == 10 * YEAR {
            fleet.wait_log(0, "this host's clock is 31");
            fleet.wait_log(0, "does not show the times that arrive here in its answers");
            let status = fleet.said(&["status"]);
            assert!(
                status.contains("occurrences follow the store's clock"),
                "{status}"
            );
            wait_until("why says so", GENEROUS, || {
                let at = newest_decision(&mut fleet);
                at.is_some_and(|at| {
                    fleet
                        .said(&["why", "work", &at])
                        .contains("could not claim it")
                })
            });
        }
        well(&mut fleet);
        let log = fleet.instances[0].log_text();
        assert!(!log.contains("panicked"), "{log}");
    }
}

/// The occurrence of the newest decision, ms.
fn newest_decision(fleet: &mut Fleet) -> Option<String> {
    let line: Option<String> = fleet
        .server()
        .command(&["LINDEX", "soloist:{work}:decisions", "0"]);
    let decision: serde_json::Value = serde_json::from_str(&line?).ok()?;
    Some(decision["occurrence"].to_string())
}

/// Replies whose numbers are others at random, in the time and in all that is stored.
#[test]
fn garbled_replies_are_survived() {
    let mut fleet = fleet(1)
        .proxied()
        .witness("work", "for=5", LATE_RATHER_THAN_SKIPPED)
        .witness("jittered", "for=5", "jitter = \"800ms\"")
        .start();
    fleet.wait_runs(2);
    for percent in [2, 20, 100] {
        fleet.proxies[0].set(Fault::Garble(percent));
        wait_struck(&fleet, 60);
        well(&mut fleet);
        fleet.instances[0].start();
        wait_struck(&fleet, 30);
        fleet.proxies[0].set(Fault::None);
        fleet.wait_more_runs(3);
    }
    well(&mut fleet);
    let log = fleet.instances[0].log_text();
    assert!(!log.contains("panicked"), "{log}");
}
