//! What one contest and one job do by themselves. `src/world` has whole fleets of them.

use std::path::Path;

use super::{job::CONTRADICTION, *};
use crate::{
    config,
    logic::{
        belief::Estimate,
        claim::{Presence, Remembered, State, TargetId, Triggered},
    },
    model::JobName,
};

/// Noon of a day, Unix ms: what the store's clock shows at the beginning.
const NOON: i64 = 1_795_348_800_000;

fn job(lines: &str) -> Arc<Job> {
    let text = format!(
        "[jobs.draw]\ncommand = [\"true\"]\nschedule = \"@every 2s\"\nlease = \"2s\"\n{lines}\n"
    );
    let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
    config.jobs.values().next().expect("a job").clone()
}

/// Whatever the answers say: a contest asks once a second in the end, and at once in the beginning.
#[test]
fn a_contest_asks_less_and_less_often() {
    let (mut contest, _) = Contest::new(Ask::next_attempt(Occurrence(1)), 0);
    let waits: Vec<u128> = (0..16)
        .map(|_| contest.pace(Duration::from_micros(50)).as_millis())
        .collect();
    assert_eq!(waits[..5], [0, 0, 0, 0, 2]);
    assert_eq!(waits[15], 1000);
    assert_eq!(contest.pace(Duration::from_secs(4)).as_secs(), 4);
}

/// One look of a job's only contest at `job`.
fn look(job: &mut JobState, ask: Ask, halt: Option<Halt>, slot: Slot, permit: bool) -> Step {
    let mut belief = Belief::default();
    let now = Boottime(1_000_000_000);
    belief.sample(Estimate::new(NOON * 1000, now, now));
    let me = Me {
        instance: InstanceId::new("a"),
        host: "a".to_owned(),
    };
    let mut view = View {
        me: &me,
        now,
        clock: &belief,
        subject: Subject::Here(job),
        halt,
        slot,
        permit,
        lapsed: None,
        fresh: &|| RunId(uuid::Uuid::nil()),
    };
    Contest::new(ask, 0).0.look(&mut view, &mut vec![])
}

fn scheduled(at: i64) -> Ask {
    Ask {
        target: Target::Scheduled(Occurrence(at)),
        missed: vec![],
        trigger: Trigger::Schedule,
        start_by: at + 60_000,
        next_attempt: false,
    }
}

fn epoch(id: &str) -> Epoch {
    Epoch {
        incarnation: "i".into(),
        id: id.into(),
        born: NOON,
        open: true,
        quarantine: Duration::from_secs(9),
        first_seen: Boottime(1),
        open_seen: None,
        others_know: false,
    }
}

fn registered() -> JobState {
    let definition = job("");
    let mut job = JobState::new(definition.clone(), Account::default());
    let state = State {
        newest: NOON - 2000,
        ..State::default()
    };
    assert!(
        job.registered(&definition, &state, &epoch("1"), NOON - 1)
            .is_some()
    );
    job
}

fn running(at: i64) -> claim::Open {
    claim::Open {
        run: Run {
            id: RunId(uuid::Uuid::nil()),
            occurrence: Occurrence(at),
            attempt: 1,
            trigger: Trigger::Manual,
            key: None,
            instance: InstanceId::new("b"),
            host: String::new(),
            lease: 1000,
            definition: String::new(),
            granted_at: at,
        },
        seq: 0,
        incarnation: "i".to_owned(),
        renewed_at: at,
        stop: None,
        next_attempt: None,
    }
}

/// What the store answers to a claim for the trigger `key`.
fn answered(job: &mut JobState, key: &str, answer: Answer) {
    let target = Target::Manual {
        key: key.to_owned(),
        before: None,
    };
    let ask = Ask {
        target,
        trigger: Trigger::Manual,
        ..scheduled(NOON)
    };
    let _ = told(job, ask, answer);
}

/// What follows when the store answers the claim of a job's only contest.
fn told(job: &mut JobState, ask: Ask, answer: Answer) -> Vec<Effect> {
    let mut belief = Belief::default();
    let now = Boottime(1);
    belief.sample(Estimate::new(NOON * 1000, now, now));
    let mut view = View {
        me: &Me {
            instance: InstanceId::new("a"),
            host: String::new(),
        },
        now,
        clock: &belief,
        subject: Subject::Here(job),
        halt: None,
        slot: Slot::Needless,
        permit: true,
        lapsed: None,
        fresh: &|| RunId(uuid::Uuid::nil()),
    };
    let info = AnswerInfo {
        incarnation: "i".into(),
        store_ms: NOON,
        lapsed: false,
        expires_in: Duration::ZERO,
    };
    let (mut contest, _) = Contest::new(ask, 0);
    let _ = contest.look(&mut view, &mut vec![]);
    let mut effects = vec![];
    let _ = contest.answered(answer, info, &mut view, &mut effects);
    effects
}

#[test]
fn the_store_is_told_of_triggers_once_in_each_epoch() {
    let mut job = registered();
    let me = Me {
        instance: InstanceId::new("a"),
        host: String::new(),
    };
    let told = |job: &JobState, id| {
        let Remembered {
            triggered,
            triggers,
            ..
        } = job.registration(&me, &epoch(id)).remembered;
        let used: Vec<String> = triggered.into_iter().map(|t| t.key).collect();
        let waiting: Vec<(String, i64)> = triggers.into_iter().map(|t| (t.key, t.at)).collect();
        (used, waiting)
    };
    for key in ["won", "lost", "runs", "missed", "waits"] {
        job.triggered(key, NOON - 7, Boottime(1));
    }
    let grant = Grant {
        occurrence: Occurrence(NOON - 1),
        attempt: 1,
        trigger: Trigger::Manual,
    };
    answered(&mut job, "won", Answer::Granted(grant));
    answered(&mut job, "lost", Answer::Settled(None));
    answered(&mut job, "runs", Answer::Running(running(NOON - 1)));
    let missed = Answer::Recorded {
        outcome: Outcome::Missed,
        reason: String::new(),
    };
    answered(&mut job, "missed", missed);
    assert_eq!(told(&job, "1"), (vec![], vec![]), "the store knows them");
    let known = ["won", "lost", "runs", "missed"].map(String::from).to_vec();
    let waiting = vec![("waits".to_owned(), NOON - 7)];
    assert_eq!(told(&job, "2"), (known, waiting));
    // What the store says counts for more.
    let says = State {
        triggered: vec![Triggered {
            key: "lost".to_owned(),
            occurrence: Occurrence(NOON - 5),
            at: NOON - 5,
        }],
        ..State::default()
    };
    let definition = job.definition.clone();
    let _ = job.registered(&definition, &says, &epoch("2"), NOON);
    assert_eq!(told(&job, "2"), (vec![], vec![]));
    let triggered = job.registration(&me, &epoch("3")).remembered.triggered;
    assert_eq!(triggered[0], says.triggered[0]);
    // A key is remembered for a week.
    let _ = job.registered(
        &definition,
        &State::default(),
        &epoch("3"),
        NOON + claim::KEYS_KEPT_MS - 1,
    );
    assert_eq!(told(&job, "4").0.len(), 3);
    let _ = job.registered(
        &definition,
        &State::default(),
        &epoch("3"),
        NOON + claim::KEYS_KEPT_MS,
    );
    assert_eq!(told(&job, "4").0.len(), 0);
}

/// A claim was granted, its answer was lost, and by the next claim it is too late: the record says why.
#[test]
fn a_grant_that_is_known_of_too_late_is_missed_for_a_reason() {
    for (start_by, reason) in [
        (NOON + 60_000, None),
        (NOON - 1, Some(claim::TOO_LATE)),
        (claim::NEVER, Some(claim::OVERDUE)),
    ] {
        let mut job = registered();
        let ask = Ask {
            start_by,
            ..scheduled(NOON - 1000)
        };
        let grant = Grant {
            occurrence: Occurrence(NOON - 1000),
            attempt: 1,
            trigger: Trigger::Schedule,
        };
        let effects = told(&mut job, ask, Answer::Granted(grant));
        let win = effects.into_iter().find_map(|e| match e {
            Effect::Start(win) => Some(win),
            _ => None,
        });
        assert_eq!(win.expect("it is granted").too_late, reason);
    }
}

#[test]
fn an_instance_says_whether_it_has_had_a_job_all_the_time() {
    let me = Me {
        instance: InstanceId::new("a"),
        host: String::new(),
    };
    let says = |job: &JobState| {
        let ask = job.registration(&me, &epoch("1"));
        (ask.presence, ask.owed.len())
    };
    let register = |state: &mut JobState| {
        let definition = state.definition.clone();
        let _ = state.registered(&definition, &State::default(), &epoch("1"), NOON);
    };
    let mut state = JobState::new(job(""), Account::default());
    assert_eq!(says(&state), (Presence::New, 0));
    register(&mut state);
    assert_eq!(says(&state), (Presence::Kept, 0));
    state.redefine(job("start_within = \"9s\""), Some(Occurrence(NOON)));
    assert_eq!(says(&state), (Presence::Kept, 0));
    let mut disabled = JobState::new(job("enabled = false"), Account::default());
    assert_eq!(says(&disabled), (Presence::Disabled, 0));
    register(&mut disabled);
    assert_eq!(says(&disabled), (Presence::Disabled, 0));
    let absence = Absence {
        owed: vec![Missed::one(Occurrence(NOON - 1))],
        ..Absence::default()
    };
    let mut state = JobState::new(job(""), Account::default());
    state.comes_back(absence, Some(Occurrence(NOON - 9)));
    assert_eq!(state.registration(&me, &epoch("1")).back_at, NOON - 9);
    assert_eq!(says(&state), (Presence::New, 1));
    register(&mut state);
    assert_eq!(says(&state), (Presence::Kept, 0));
}

/// The store has to know of an absence before the return, and the others need time to contradict.
#[test]
fn a_job_that_is_back_is_registered_once_the_others_could_contradict() {
    let now = Boottime(9_000_000_000);
    for (told, has_to_tell) in [
        (Told::No, true),
        (Told::In(EpochName::of(&epoch("1"))), true),
        (Told::In(EpochName::of(&epoch("2"))), false),
        (Told::NotNeeded, false),
    ] {
        let mut state = JobState::new(job(""), Account::default());
        let absence = Absence {
            told,
            ..Absence::default()
        };
        state.comes_back(absence, None);
        let epoch = epoch("2");
        assert_eq!(state.has_to_tell_absence(&epoch), has_to_tell);
        assert_eq!(state.register_in(&epoch, now), Some(Duration::ZERO));
        if has_to_tell {
            state.told_absence(&epoch, now);
            assert!(!state.has_to_tell_absence(&epoch));
            assert_eq!(state.register_in(&epoch, now), Some(CONTRADICTION));
            let later = now + CONTRADICTION;
            assert_eq!(state.register_in(&epoch, later), Some(Duration::ZERO));
        }
    }
}

/// A trigger of a disabled job takes an instant before what is still to be recorded.
#[test]
fn a_disabled_job_is_owed_what_was_undecided_when_it_was_disabled() {
    let mut disabled = JobState::new(job("enabled = false"), Account::default());
    assert_eq!(disabled.next_undecided(), None);
    let owed = Occurrence(NOON - 1500);
    disabled.owes(Some(owed));
    assert_eq!(disabled.next_undecided(), Some(owed));
    disabled.decided(owed);
    assert_eq!(disabled.next_undecided(), None);
}

/// The store lost its data at noon: what an instance takes for lost is not what was planned while it was without the
/// job.
#[test]
fn what_is_planned_during_an_absence_is_not_lost() {
    let me = Me {
        instance: InstanceId::new("a"),
        host: String::new(),
    };
    let older = State {
        newest: NOON - 2000,
        ..State::default()
    };
    let lost = |state: &JobState| {
        let job = &state.definition;
        let ask = state.registration(&me, &epoch("2"));
        let ask = JobState::adoption(job, ask, &epoch("2"), NOON, Some(&older));
        ask.lost.iter().map(|l| l.last.0).collect::<Vec<_>>()
    };
    assert_eq!(lost(&registered()), [NOON]);
    let disabled = JobState::new(job("enabled = false"), Account::default());
    assert_eq!(lost(&disabled), [0; 0]);
    let owed = Missed::one(Occurrence(NOON - 1500));
    for (back_at, all) in [
        (NOON - 500, vec![NOON - 1500, NOON]),
        (NOON + 500, vec![NOON - 1500]),
    ] {
        let mut back = JobState::new(job(""), Account::default());
        let absence = Absence {
            owed: vec![owed],
            ..Absence::default()
        };
        back.comes_back(absence, Some(Occurrence(back_at)));
        assert_eq!(lost(&back), all);
    }
}

#[test]
fn what_is_missing_is_got_first_one_thing_after_the_other() {
    let mut job = registered();
    let ask = || scheduled(NOON);
    let step = look(&mut job, ask(), None, Slot::Missing, false);
    assert!(
        matches!(step, Step::TakeSlot(t) if t > Duration::from_secs(60)),
        "{step:?}"
    );
    let step = look(&mut job, ask(), None, Slot::Held, false);
    assert!(
        matches!(step, Step::TakePermit { first: false }),
        "{step:?}"
    );
    let step = look(&mut job, ask(), None, Slot::Needless, true);
    assert!(matches!(step, Step::Ask(_)), "{step:?}");
    // When its time is over, recording it needs no slot.
    let late = Ask {
        start_by: NOON - 1000,
        ..ask()
    };
    let step = look(&mut job, late, None, Slot::Missing, true);
    assert!(matches!(step, Step::Ask(_)), "{step:?}");
}

#[test]
fn a_contest_waits_for_the_settlement_of_its_own_instances_run() {
    let mut job = registered();
    let run = RunId(uuid::Uuid::max());
    assert!(
        job.account
            .begin(&TargetId::Scheduled(Occurrence(NOON - 2000)), run)
    );
    let asked = |job: &mut JobState| {
        matches!(
            look(job, scheduled(NOON), None, Slot::Needless, true),
            Step::Ask(_)
        )
    };
    assert!(asked(&mut job), "while it runs the store decides");
    job.account.run_is_over(run);
    assert!(!asked(&mut job));
    job.run_has_ended(run);
    assert!(asked(&mut job));
}

#[test]
fn what_was_asked_and_not_heard_is_neither_decided_nor_given_up() {
    let mut job = registered();
    let ended =
        |job: &mut JobState, halt| match look(job, scheduled(NOON), halt, Slot::Needless, true) {
            Step::End(ended) => Some(ended),
            _ => None,
        };
    let drain = || Some(Halt::Draining);
    assert_eq!(ended(&mut job, drain()), Some(ContestEnd::Draining));
    // The answer is awaited: the claim has the same run id again, also when others tell that the occurrence is decided.
    let first = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    job.decided(Occurrence(NOON));
    let again = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    match (first, again) {
        (Step::Ask(first), Step::Ask(again)) => assert_eq!(first.run, again.run),
        other => panic!("{other:?}"),
    }
    let step = look(&mut job, scheduled(NOON), drain(), Slot::Needless, true);
    assert!(matches!(step, Step::FindGrant(_)), "{step:?}");
    job.account.forget(&TargetId::Scheduled(Occurrence(NOON)));
    assert_eq!(ended(&mut job, None), Some(ContestEnd::Settled));
}

/// The history shows why.
#[test]
fn a_claim_for_what_is_too_late_doubts_no_clock_without_cause() {
    for start_by in [claim::NEVER, NOON - 500, NOON + 60_000] {
        let mut job = registered();
        let ask = Ask {
            start_by,
            ..scheduled(NOON)
        };
        match look(&mut job, ask, None, Slot::Needless, true) {
            Step::Ask(claim) => assert_eq!(claim.start_by, start_by),
            other => panic!("{other:?}"),
        }
    }
}

/// A claim that counts as unanswered holds up the word to the store that this instance does not have the job any more.
#[test]
fn an_answer_that_ends_a_claim_leaves_nothing_unanswered() {
    let (newest, reason) = (Occurrence(NOON), "paused".to_owned());
    for answer in [
        Answer::Running(running(NOON)),
        Answer::Settled(None),
        Answer::Recorded {
            outcome: Outcome::Skipped,
            reason,
        },
        Answer::Behind {
            newest,
            early: vec![],
        },
    ] {
        let mut job = registered();
        let step = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
        assert!(matches!(step, Step::Ask(_)), "{step:?}");
        assert!(job.account.has_unanswered_claims());
        told(&mut job, scheduled(NOON), answer.clone());
        assert!(!job.account.has_unanswered_claims(), "{answer:?}");
    }
}

#[test]
fn a_claim_that_may_be_granted_gets_the_next_permit() {
    let mut job = registered();
    let id = TargetId::Scheduled(Occurrence(NOON));
    let step = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    assert!(matches!(step, Step::Ask(_)), "{step:?}");
    // The next contest for it does not know of this one.
    let again = |job: &mut JobState| look(job, scheduled(NOON), None, Slot::Needless, false);
    assert!(matches!(again(&mut job), Step::TakePermit { first: false }));
    job.account.set_unheard(&id, true);
    assert!(matches!(again(&mut job), Step::TakePermit { first: true }));
    let asked = look(&mut job, scheduled(NOON), None, Slot::Needless, true);
    assert!(matches!(asked, Step::Ask(_)), "{asked:?}");
    told(&mut job, scheduled(NOON), Answer::InDoubt);
    assert!(matches!(again(&mut job), Step::TakePermit { first: false }));
}

#[test]
fn nothing_is_asked_that_would_jump_over_what_is_due() {
    let mut job = registered();
    let due = Due {
        job: JobName::new("draw"),
        target: Target::Scheduled(Occurrence(NOON)),
        start_at: NOON,
        start_by: NOON + 60_000,
        overdue: false,
        missed: vec![],
    };
    assert!(job.due(due, NOON));
    let step = look(&mut job, scheduled(NOON + 2000), None, Slot::Needless, true);
    assert!(matches!(step, Step::End(ContestEnd::Undecided)), "{step:?}");
}

#[test]
fn a_run_is_begun_once_however_often_it_is_granted() {
    let (mut account, id) = (Account::default(), TargetId::Scheduled(Occurrence(1)));
    let run = RunId(uuid::Uuid::max());
    assert!(account.begin(&id, run));
    assert!(!account.begin(&id, run));
    account.run_has_ended(run);
    assert!(!account.begin(&id, run));
}

/// A grant whose answer got lost is found when the job is registered again, perhaps after its last moment for a start.
#[test]
fn a_grant_that_is_found_too_late_is_not_started() {
    let mut belief = Belief::default();
    let now = Boottime(1_000_000_000);
    belief.sample(Estimate::new(NOON * 1000, now, now));
    let me = Me {
        instance: InstanceId::new("a"),
        host: "a".to_owned(),
    };
    let within = registered().definition.start_within.as_millis() as i64;
    for (after, expected) in [(0, false), (within, false), (within + 1, true)] {
        let mut job = registered();
        let mut view = View {
            me: &me,
            now,
            clock: &belief,
            subject: Subject::Here(&mut job),
            halt: None,
            slot: Slot::Needless,
            permit: true,
            lapsed: None,
            fresh: &|| RunId(uuid::Uuid::nil()),
        };
        let mut effects = vec![];
        let (mut contest, _) = Contest::new(Ask::next_attempt(Occurrence(NOON)), 0);
        assert!(matches!(
            contest.look(&mut view, &mut effects),
            Step::Ask(_)
        ));
        let grant = Answer::Granted(Grant {
            occurrence: Occurrence(NOON),
            attempt: 1,
            trigger: Trigger::Schedule,
        });
        let info = AnswerInfo {
            incarnation: "a".into(),
            store_ms: NOON + after,
            lapsed: false,
            expires_in: Duration::MAX,
        };
        let _ = contest.answered(grant, info, &mut view, &mut effects);
        let late = effects.iter().find_map(|e| match e {
            Effect::Start(win) => Some(win.too_late.is_some()),
            _ => None,
        });
        assert_eq!(late, Some(expected), "{after} ms after its instant");
    }
}
