//! Each kind of broken promise is found, and what is not promised is not counted.

use std::collections::BTreeSet;

use soloist::model::{JobName, Occurrence, Outcome, RunRecord, Trigger};

use super::*;

/// A job each two seconds with a lease of two.
fn job() -> Job {
    Job {
        name: "a",
        period_ms: Some(2000),
        lease_ns: 2 * SECOND,
        may_overlap: false,
        repeats: Repeats::Never,
        succeeds: true,
        start_within_ms: 20_000,
        jitter_ms: 0,
        comes_and_goes: false,
    }
}

/// Attempt `attempt` of the occurrence at `second` on i1, alive from `from` to `to` (ms). Both clocks begin with 0.
fn run(second: i64, attempt: u32, from: i64, to: i64) -> Run {
    let occurrence = second * 1000;
    Run {
        job: "a".into(),
        occurrence,
        token: occurrence * 1000 + i64::from(attempt),
        attempt,
        instance: "i1".into(),
        trigger: "schedule".into(),
        run: format!("r{second}-{attempt}-{from}"),
        root: 1,
        pids: BTreeSet::from([1]),
        start_ns: from * MS,
        start_wall_us: from * 1000,
        last_ns: to * MS,
        ended: true,
        ended_ns: Some(to * MS),
    }
}

fn record(second: i64, attempt: u32, outcome: Outcome, seen_ms: i64) -> Seen {
    let job = JobName::new("a");
    let of = Occurrence(second * 1000);
    let mut record = RunRecord::without_run(&job, of, Trigger::Schedule, outcome);
    record.attempt = attempt;
    record.instance = Some(soloist::model::InstanceId::new("i1"));
    Seen {
        record,
        seen_ns: seen_ms * MS,
    }
}

fn struck(effect: Effect, from: i64, to: i64) -> Struck {
    Struck {
        name: "a fault",
        effect,
        from_ns: from * MS,
        done_ns: from * MS,
        to_ns: to * MS,
    }
}

fn evidence(runs: &[Run], faults: &[Struck]) -> Evidence {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|r| r.start_ns);
    Evidence {
        jobs: vec![job()],
        now_ns: runs.iter().map(|r| r.last_ns).max().unwrap_or(0),
        records: vec![],
        decided: runs.iter().map(|r| (r.job.clone(), r.occurrence)).collect(),
        runs,
        struck: faults.to_vec(),
        instances: 3,
        since_ns: i64::MIN / 2,
        ..Evidence::default()
    }
}

/// The kinds of what is broken, and of what is excused.
fn kinds(e: &Evidence) -> (Vec<Kind>, Vec<Kind>) {
    let verdict = judge(e);
    let of = |excused: bool| {
        let all = verdict.findings.iter();
        let all = all.filter(|f| f.excused.is_some() == excused);
        all.map(|f| f.kind).collect::<Vec<_>>()
    };
    (of(false), of(true))
}

fn broken(runs: &[Run], faults: &[Struck]) -> Vec<Kind> {
    kinds(&evidence(runs, faults)).0
}

const I1: Option<usize> = Some(0);

#[test]
fn what_goes_well_breaks_nothing() {
    let e = evidence(&[run(2, 1, 2001, 3000), run(4, 1, 4001, 5000)], &[]);
    let verdict = judge(&e);
    assert_eq!(verdict.findings, []);
    assert_eq!(verdict.judged, 2);
    assert_eq!(verdict.longest_silence_ns, 1001 * MS);
}

#[test]
fn an_attempt_that_starts_twice_is_a_duplicate() {
    let twice = [run(2, 1, 2001, 2100), run(2, 1, 2500, 2600)];
    assert_eq!(broken(&twice, &[]), [Kind::Duplicate, Kind::Token]);
    // It was cut off while the data was lost: known, and not promised.
    let known = [
        struck(Effect::LosesAll, 2200, 2200),
        struck(Effect::Cut { instance: 0 }, 2150, 2400),
    ];
    let (broken_ones, excused) = kinds(&evidence(&twice, &known));
    assert_eq!(broken_ones, []);
    assert_eq!(excused, [Kind::Duplicate, Kind::Token]);
    // The loss alone is no excuse, nor is one that came before.
    assert_eq!(broken(&twice, &known[..1]), [Kind::Duplicate, Kind::Token]);
    let before = [struck(Effect::LosesAll, 1900, 1900), known[1].clone()];
    assert_eq!(broken(&twice, &before), [Kind::Duplicate, Kind::Token]);
}

#[test]
fn what_started_early_may_start_again_if_the_data_is_lost_before_its_time() {
    let early = run(4, 1, 1001, 1100);
    let again = run(4, 1, 4001, 4100);
    // Its token is smaller than that of the later occurrence.
    let runs = [run(2, 1, 500, 600), early, run(6, 1, 1500, 1600), again];
    // The later occurrence lies in the future in both cases, the earlier one only in the first.
    for (lost, excused) in [(3900, true), (4001, false)] {
        let faults = [struck(Effect::LosesAll, lost, lost)];
        let found = kinds(&evidence(&runs, &faults));
        assert!(found.1.contains(&Kind::Token), "{lost}");
        assert_eq!(found.1.contains(&Kind::Duplicate), excused, "{lost}");
        assert_eq!(found.0.contains(&Kind::Duplicate), !excused, "{lost}");
    }
    let late = [
        run(2, 1, 500, 600),
        run(6, 1, 1500, 1600),
        run(2, 1, 6500, 6600),
    ];
    let found = kinds(&evidence(&late, &[struck(Effect::LosesAll, 6001, 6001)]));
    assert!(found.0.contains(&Kind::Token));
}

#[test]
fn another_attempt_is_a_repeat_unless_the_job_asks_for_it() {
    let mut first = run(2, 1, 2001, 2100);
    let second = run(2, 2, 2500, 2600);
    let with = |first: &Run, repeats: Repeats, faults: &[Struck]| {
        let mut e = evidence(&[first.clone(), second.clone()], faults);
        e.jobs[0].repeats = repeats;
        kinds(&e).0
    };
    assert_eq!(with(&first, Repeats::Never, &[]), [Kind::Repeated]);
    assert_eq!(with(&first, Repeats::AfterCrash, &[]), []);
    assert_eq!(with(&first, Repeats::AfterFailure, &[]), []);
    (first.ended, first.ended_ns) = (false, None);
    assert_eq!(with(&first, Repeats::AfterFailure, &[]), [Kind::Repeated]);
    let killed = Effect::JobKilled {
        run: first.run.clone(),
    };
    let killed = [struck(killed, 2050, 2050)];
    assert_eq!(with(&first, Repeats::AfterFailure, &killed), []);
}

#[test]
fn runs_that_are_alive_together_overlap() {
    let runs = [run(2, 1, 2001, 4100), run(4, 1, 4001, 5000)];
    assert_eq!(broken(&runs, &[]), [Kind::Overlap]);
    let mut e = evidence(&runs, &[]);
    e.jobs[0].may_overlap = true;
    assert_eq!(kinds(&e), (vec![], vec![]));
    for (effect, promised) in [
        (Effect::Frozen { instance: 0 }, false),
        (Effect::Frozen { instance: 1 }, true),
        (Effect::BothKilled { instance: 0 }, false),
        (Effect::HostStalled, false),
        (Effect::Killed { instance: 1 }, true),
        (Effect::Cut { instance: 0 }, true),
        (Effect::LosesAll, true),
    ] {
        let found = broken(&runs, &[struck(effect.clone(), 3000, 3500)]);
        assert_eq!(found.contains(&Kind::Overlap), promised, "{effect:?}");
    }
}

#[test]
fn what_outlives_its_daemon_guard_lease_or_command_is_an_orphan() {
    let mut long = run(2, 1, 2001, 9000);
    (long.ended, long.ended_ns) = (false, None);
    let killed = Effect::GuardKilled {
        run: long.run.clone(),
    };
    for (effect, at, to) in [
        (Effect::Killed { instance: 0 }, 7900, 9000),
        (Effect::Stopped { instance: 0 }, 6000, 9000),
        (Effect::Cut { instance: 0 }, 6000, 9000),
        (Effect::Silenced, 6000, 9000),
        (killed, 7900, 7900),
    ] {
        // Longer than allowed, by a second.
        let strict = [struck(effect.clone(), at - 1000, to)];
        assert_eq!(
            broken(&[long.clone()], &strict),
            [Kind::Orphan],
            "{effect:?}"
        );
        // In time, and elsewhere.
        let late = [struck(effect.clone(), at + 900, to + 900)];
        assert_eq!(broken(&[long.clone()], &late), [], "{effect:?}");
        let mut other = long.clone();
        (other.instance, other.run) = ("i2".into(), "other".into());
        let all = effect == Effect::Silenced;
        assert_eq!(!broken(&[other], &strict).is_empty(), all, "{effect:?}");
    }
    // It counts from the moment at which the last daemon was killed.
    let mut slow = struck(Effect::Killed { instance: 0 }, 6900, 9000);
    assert_eq!(broken(&[long.clone()], &[slow.clone()]), [Kind::Orphan]);
    slow.done_ns = 8100 * MS;
    assert_eq!(broken(&[long.clone()], &[slow]), []);
    // What a daemon and its guards left is ended when the daemon starts again.
    let both = Effect::BothKilled { instance: 0 };
    let mut early = long.clone();
    early.start_ns = -5000 * MS;
    for (again, orphans) in [(-3500, 1), (-2500, 0)] {
        let faults = [
            struck(both.clone(), -4000, again),
            struck(Effect::Started { instance: 0 }, again, again),
        ];
        let found = broken(&[early.clone()], &faults);
        assert_eq!(found, vec![Kind::Orphan; orphans], "{again}");
    }
    let mut left = run(2, 1, 2001, 9000);
    left.ended_ns = Some(5000 * MS);
    assert_eq!(broken(&[left], &[]), [Kind::Orphan]);
    let mut e = evidence(&[], &[]);
    e.left_over = vec!["7 witness".into()];
    assert_eq!(kinds(&e).0, [Kind::Orphan]);
}

#[test]
fn a_start_before_its_time_is_early() {
    let early = [run(2, 1, 1990, 2100)];
    assert_eq!(broken(&early, &[]), [Kind::Early]);
    // A step of less than a second is believed; a longer one is not, unless it lasts.
    let step = |us, from, to| [struck(Effect::ServerClock { us }, from, to)];
    assert_eq!(broken(&early, &step(300_000, 1000, 2500)), []);
    assert_eq!(broken(&early, &step(-300_000, 1000, 2500)), [Kind::Early]);
    assert_eq!(broken(&early, &step(5_000_000, 1000, 2500)), [Kind::Early]);
    let long = step(5_000_000, -20_000, 2500);
    assert_eq!(kinds(&evidence(&early, &long)), (vec![], vec![Kind::Early]));
    // An instance that began under it, if it is near.
    for (us, excused) in [(5_000_000, true), (3_600_000_000, false)] {
        let mut faults = step(us, 500, 2500).to_vec();
        faults.push(struck(Effect::Killed { instance: 0 }, 400, 900));
        let found = kinds(&evidence(&early, &faults));
        assert_eq!(found.1.contains(&Kind::Early), excused, "{us}");
    }
}

#[test]
fn an_occurrence_without_a_start_and_a_record_is_missed() {
    let runs = [run(2, 1, 2001, 2100), run(8, 1, 8001, 8100)];
    let mut e = evidence(&runs, &[]);
    let ended = [2, 8].map(|at| record(at, 1, Outcome::Succeeded, at * 1000 + 200));
    e.records = [&ended[..], &[record(4, 0, Outcome::Skipped, 4100)]].concat();
    // It may have been granted, and be about to start.
    assert_eq!(kinds(&e), (vec![], vec![]));
    e.over = true;
    assert_eq!(kinds(&e), (vec![Kind::Missed], vec![]));
    let mut range = record(6, 0, Outcome::Missed, 6100);
    range.record.count = 2;
    e.records = [&ended[..], &[range]].concat();
    assert_eq!(kinds(&e), (vec![], vec![]));
    e.records = ended.to_vec();
    e.struck = vec![struck(Effect::LosesAll, 6500, 6500)];
    assert_eq!(kinds(&e), (vec![], vec![Kind::Missed; 2]));
    // What nobody has decided yet is not judged.
    e.struck.clear();
    e.decided.insert("a".into(), 3000);
    assert_eq!(kinds(&e), (vec![], vec![]));
}

#[test]
fn in_the_end_each_attempt_has_an_outcome() {
    let mut e = evidence(&[run(2, 1, 2001, 2100)], &[]);
    e.over = true;
    assert_eq!(kinds(&e), (vec![Kind::Missed], vec![]));
    e.records = vec![record(2, 1, Outcome::Succeeded, 2200)];
    assert_eq!(kinds(&e), (vec![], vec![]));
}

#[test]
fn a_run_that_is_lost_needs_a_fault_that_explains_it() {
    let lost = |outcome, faults: &[Struck]| {
        let mut e = evidence(&[run(2, 1, 2001, 2100)], faults);
        e.records = vec![record(2, 1, outcome, 2200)];
        kinds(&e).0
    };
    for outcome in [
        Outcome::Unknown,
        Outcome::Crashed,
        Outcome::LeaseLost,
        Outcome::Failed,
    ] {
        assert_eq!(lost(outcome, &[]), [Kind::Lost], "{outcome}");
        for (effect, explains) in [
            (Effect::Killed { instance: 0 }, true),
            (Effect::Killed { instance: 1 }, false),
            (Effect::Silenced, true),
            (Effect::Harmless, false),
            (Effect::ServerClock { us: 300_000 }, false),
        ] {
            let found = lost(outcome, &[struck(effect.clone(), 2050, 2060)]);
            assert_eq!(found.is_empty(), explains, "{outcome} {effect:?}");
        }
    }
    // Long after its last sign: only of one that was stopped then.
    let late = struck(Effect::Silenced, 4000, 4100);
    let silent = |faults: &[Struck]| {
        let id = soloist::model::RunId::random();
        let mut run = run(2, 1, 2001, 2100);
        run.run = id.to_string();
        let mut e = evidence(&[run], faults);
        let mut lost = record(2, 1, Outcome::LeaseLost, 5000);
        lost.record.run_id = Some(id);
        e.records = vec![lost];
        kinds(&e).0
    };
    assert_eq!(silent(std::slice::from_ref(&late)), [Kind::Lost]);
    let halted = struck(Effect::JobHalted, 2090, 3000);
    assert_eq!(silent(&[halted, late]), []);
    assert_eq!(lost(Outcome::Succeeded, &[]), []);
    assert_eq!(lost(Outcome::Cancelled, &[]), []);
    // A trigger that was lost with the data is told of when the quarantine is over.
    for (attempt, found) in [(0, vec![]), (1, vec![Kind::Lost])] {
        let mut e = evidence(&[], &[struck(Effect::LosesAll, 2500, 2500)]);
        e.records = vec![record(7, attempt, Outcome::Unknown, 7500)];
        assert_eq!(kinds(&e).0, found, "attempt {attempt}");
    }
    // What struck after its end explains nothing, except a loss of the data that had its outcome.
    let after = |effect| lost(Outcome::Unknown, &[struck(effect, 3500, 9000)]);
    assert_eq!(after(Effect::Killed { instance: 0 }), [Kind::Lost]);
    let mut e = evidence(&[], &[struck(Effect::Cut { instance: 0 }, 3500, 9000)]);
    e.records = vec![record(2, 1, Outcome::Unknown, 4500)];
    e.records[0].record.started_at = Some(2010);
    assert_eq!(kinds(&e).0, [Kind::Lost], "granted, and never started");
    e.struck[0].from_ns = 2500 * MS;
    assert_eq!(kinds(&e).0, []);
    e.struck[0] = struck(Effect::LosesAll, 3500, 3500);
    assert_eq!(kinds(&e).0, []);
}

#[test]
fn a_start_in_a_pause_is_found() {
    let pause = |from| [struck(Effect::Paused { job: "a".into() }, from, 9000)];
    assert_eq!(
        broken(&[run(4, 1, 4001, 4100)], &pause(2000)),
        [Kind::Paused]
    );
    assert_eq!(broken(&[run(4, 1, 4001, 4100)], &pause(3000)), []);
    let mut triggered = run(4, 1, 4001, 4100);
    triggered.trigger = "manual".into();
    assert_eq!(broken(&[triggered], &pause(2000)), []);
}

#[test]
fn a_silence_needs_a_fault_that_explains_it() {
    let late = run(22, 1, 22_001, 22_100);
    let runs: Vec<Run> = [run(2, 1, 2001, 2100), late].into();
    let silent = |faults: &[Struck]| {
        let mut e = evidence(&runs, faults);
        e.jobs[0].period_ms = Some(20_000 / 10);
        e.records = (2..11)
            .map(|n| record(2 * n, 0, Outcome::Missed, 22_050))
            .collect();
        let verdict = judge(&e);
        (
            verdict.count(Kind::Silence),
            verdict.longest_silence_ns / MS,
        )
    };
    assert_eq!(silent(&[]), (1, 19_901));
    let of = |effect, from, to| [struck(effect, from, to)];
    // The server's absence, and a quarantine after it.
    assert_eq!(silent(&of(Effect::Silenced, 3000, 15_000)), (0, 901));
    // One instance of three: others take over after a lease.
    let cut = Effect::Cut { instance: 0 };
    assert_eq!(silent(&of(cut, 3000, 20_000)).0, 1);
}

#[test]
fn tokens_increase() {
    let mut older = run(2, 1, 4500, 4600);
    older.ended_ns = Some(older.last_ns);
    assert_eq!(broken(&[run(4, 1, 4001, 4100), older], &[]), [Kind::Token]);
}

#[test]
fn triggers_run_once_for_a_key_and_have_an_outcome() {
    let mut e = evidence(&[run(2, 1, 2001, 2100), run(4, 1, 4001, 4100)], &[]);
    e.jobs[0].period_ms = None;
    e.keys = BTreeSet::from(["k".into()]);
    assert_eq!(kinds(&e).0, [Kind::Duplicate]);
    e.keys = ["k", "l", "m"].map(Into::into).into();
    e.accepted = e.keys.clone();
    e.over = true;
    e.records = [2, 4]
        .map(|s| record(s, 1, Outcome::Succeeded, 5000))
        .into();
    assert_eq!(kinds(&e).0, [Kind::Missed]);
    e.accepted.pop_last();
    assert_eq!(kinds(&e), (vec![], vec![]));
}

#[test]
fn a_daemon_that_does_not_end_is_found() {
    let e = Effect::NotEnded { instance: 0 };
    assert_eq!(broken(&[], &[struck(e, 1, 1)]), [Kind::NotEnded]);
}

/// Who is told to read at second 3 has read it at 4, and who is told at 13 at 14. Ends of spells are what counts here.
fn came_and_went() -> Comings {
    let jobs =
        |names: &[&str]| -> BTreeSet<String> { names.iter().map(|&n| n.to_owned()).collect() };
    let log = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(log.path(), "configuration reloaded").expect("write the log");
    let mut comings = Comings::new(3, jobs(&["a"]));
    for i in 0..3 {
        comings.starts(i, -100 * SECOND);
    }
    for (second, has) in [(3, &[][..]), (13, &["a"])] {
        comings.written(jobs(has), second * SECOND, |_| 0);
        for i in 0..3 {
            comings.told(i, second * SECOND, 0);
        }
        comings.look_at((second + 1) * SECOND, |_| log.path());
    }
    comings
}

#[test]
fn a_start_of_what_was_planned_in_an_absence_is_found() {
    let runs = [run(2, 1, 2000, 2100), run(8, 1, 14_500, 14_600)];
    let mut e = evidence(&runs, &[]);
    e.jobs[0].comes_and_goes = true;
    // Without a ledger nobody was there.
    assert_eq!(judge(&e).findings, []);
    e.comings = came_and_went();
    let found = judge(&e);
    assert_eq!(found.count(Kind::Absent), 1, "{found:#?}");
    // At 4 the last instance has read that the job is gone, at 13 the first one may have it again.
    for at in [4, 13] {
        e.runs = vec![run(2, 1, 2000, 2100), run(at, 1, 14_500, 14_600)];
        assert_eq!(judge(&e).count(Kind::Absent), 0, "{at}");
    }
    // If none of them could tell the store, it is not promised.
    e.runs = runs.to_vec();
    for effect in [Effect::Silenced, Effect::GrantsNothing] {
        e.struck = vec![struck(effect, 2500, 14_000)];
        let found = judge(&e);
        assert_eq!(
            (found.count(Kind::Absent), found.excused(Kind::Absent)),
            (0, 1)
        );
    }
}

#[test]
fn what_was_planned_while_an_instance_had_the_job_is_to_have_a_record() {
    let runs = [run(-20, 1, -20_000, -19_900), run(18, 1, 18_000, 18_100)];
    let mut e = evidence(&runs, &[]);
    e.jobs[0].comes_and_goes = true;
    e.jobs[0].start_within_ms = 3000;
    e.over = true;
    e.now_ns = 60 * SECOND;
    let missed = |e: &Evidence| {
        let found = judge(e);
        let missed = found.findings.iter().filter(|f| f.kind == Kind::Missed);
        let missed = missed.filter(|f| f.what.contains("neither"));
        missed.map(|f| f.at_ns / SECOND).collect::<Vec<_>>()
    };
    assert_eq!(missed(&e), [0i64; 0], "nobody was there");
    e.comings = came_and_went();
    // Not 4 to 12, when nobody had it, nor 14, when it had just come back.
    assert_eq!(
        missed(&e),
        [-18, -16, -14, -12, -10, -8, -6, -4, -2, 0, 2, 16]
    );
    // All were killed before the time was over in which the last ones could start.
    let killed = |instance| struck(Effect::Killed { instance }, 4500, 4600);
    e.struck = (0..3).map(killed).collect();
    assert_eq!(missed(&e), [-18, -16, -14, -12, -10, -8, -6, -4, -2, 16]);
    // One of them was not.
    e.struck.pop();
    assert_eq!(missed(&e).len(), 12);
    // Known, and not mended: what is planned while the store is silent, if the job comes back meanwhile.
    e.struck = vec![struck(Effect::Silenced, 12_500, 16_500)];
    let excused = |e: &Evidence| judge(e).excused(Kind::Missed);
    let before = excused(&e);
    e.struck = vec![struck(Effect::Silenced, 15_500, 16_500)];
    assert_eq!(before, excused(&e) + 1);
}

#[test]
fn a_start_before_the_end_of_its_jitter_is_found() {
    let mut e = evidence(&[run(2, 1, 2000, 2100)], &[]);
    e.jobs[0].jitter_ms = 900_000;
    assert_eq!(judge(&e).count(Kind::Early), 1);
    e.runs[0].trigger = "manual".into();
    assert_eq!(judge(&e).count(Kind::Early), 0);
}

#[test]
fn a_key_that_runs_a_job_twice_is_found() {
    let mut runs = [run(1, 1, 1000, 1100), run(3, 1, 3000, 3100)];
    for run in &mut runs {
        run.trigger = "manual".into();
    }
    let mut e = evidence(&runs, &[]);
    let key = |key: &str| key.to_owned();
    e.few_keys = BTreeMap::from([(key("a"), BTreeSet::from([key("k")]))]);
    assert_eq!(judge(&e).count(Kind::Duplicate), 1);
    e.few_keys = BTreeMap::from([(key("a"), BTreeSet::from([key("k"), key("l")]))]);
    assert_eq!(judge(&e).count(Kind::Duplicate), 0);
}
