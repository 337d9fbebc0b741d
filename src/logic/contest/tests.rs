//! What one contest and one job do by themselves. `src/simulation` has whole fleets of them.

use std::path::Path;

use super::{job::CONTRADICTION, *};
use crate::{
    config,
    logic::{
        belief::Estimate,
        catch_up::Backlog,
        claim::{OnCrash, Pause, Presence, Remembered, State, TargetId, Triggered},
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

fn me() -> Me {
    Me {
        instance: InstanceId::new("a"),
        host: String::new(),
    }
}

fn decided(at: i64) -> State {
    State {
        newest: at,
        ..State::default()
    }
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
    let state = decided(NOON - 2000);
    assert!(
        job.registered(&definition, &state, &epoch("1"), NOON - 1)
            .is_some()
    );
    job
}

fn running(at: i64) -> claim::Open {
    claim::Open {
        run: Run {
            trigger: Trigger::Manual,
            instance: InstanceId::new("b"),
            lease: 1000,
            ..Run::first(at)
        },
        ..claim::Open::first(at)
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
        me: &me(),
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
    let me = me();
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
    let me = me();
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

/// The store is told of an absence, and the others need time to contradict.
#[test]
fn a_job_that_is_back_is_registered_once_the_others_could_contradict() {
    let now = Boottime(9_000_000_000);
    for (began, wait) in [
        (None, Duration::ZERO),
        (Some(now), CONTRADICTION),
        (Some(Boottime(now.0 - 1_000_000_000)), CONTRADICTION / 3),
        (Some(Boottime(0)), Duration::ZERO),
    ] {
        let mut state = JobState::new(job(""), Account::default());
        let absence = Absence {
            began,
            ..Absence::default()
        };
        state.comes_back(absence, None);
        assert_eq!(state.register_in(&epoch("2"), now), Some(wait));
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
    let me = me();
    let older = decided(NOON - 2000);
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
    match look(&mut job, scheduled(NOON), None, Slot::Needless, true) {
        Step::Ask(claim) => assert_eq!(claim.holds, [run]),
        other => panic!("{other:?}"),
    }
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
        assert_eq!(job.newest(), Occurrence(NOON - 2000));
        told(&mut job, scheduled(NOON), answer.clone());
        assert!(!job.account.has_unanswered_claims(), "{answer:?}");
        assert_eq!(job.newest(), Occurrence(NOON), "{answer:?}");
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
fn a_run_is_begun_once_however_often_it_is_granted() {
    let (mut account, id) = (Account::default(), TargetId::Scheduled(Occurrence(1)));
    let run = RunId(uuid::Uuid::max());
    assert!(account.begin(&id, run));
    assert!(!account.begin(&id, run));
    account.run_has_ended(run);
    assert!(!account.begin(&id, run));
}

fn job_of(lines: &str) -> Arc<Job> {
    let text = format!("[jobs.draw]\ncommand = [\"true\"]\n{lines}\n");
    let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
    config.jobs.values().next().expect("a job").clone()
}

/// `f`, with what the instance `a` sees a second after it started, at noon.
fn seeing<T>(subject: Subject<'_>, halt: Option<Halt>, f: impl FnOnce(&mut View<'_>) -> T) -> T {
    let mut belief = Belief::default();
    let now = Boottime(1_000_000_000);
    belief.sample(Estimate::new(NOON * 1000, now, now));
    seeing_by(&belief, subject, halt, f)
}

fn seeing_by<T>(
    belief: &Belief,
    subject: Subject<'_>,
    halt: Option<Halt>,
    f: impl FnOnce(&mut View<'_>) -> T,
) -> T {
    let now = Boottime(1_000_000_000);
    let mut view = View {
        me: &Me {
            instance: InstanceId::new("a"),
            host: "a".to_owned(),
        },
        now,
        clock: belief,
        subject,
        halt,
        slot: Slot::Needless,
        permit: true,
        lapsed: None,
        fresh: &|| RunId(uuid::Uuid::max()),
    };
    f(&mut view)
}

fn answer_at(store_ms: i64) -> AnswerInfo {
    AnswerInfo {
        incarnation: "i".into(),
        store_ms,
        lapsed: false,
        expires_in: Duration::MAX,
    }
}

fn grant(at: i64, trigger: Trigger) -> Answer {
    Answer::Granted(Grant {
        occurrence: Occurrence(at),
        attempt: 1,
        trigger,
    })
}

/// An account with a claim for noon that has no answer.
fn unanswered() -> Account {
    let mut account = Account::default();
    let id = TargetId::Scheduled(Occurrence(NOON));
    account.ask(id, &job(""), || RunId(uuid::Uuid::nil()));
    account
}

fn ended(step: Step) -> Option<ContestEnd> {
    match step {
        Step::End(end) => Some(end),
        _ => None,
    }
}

/// The job was removed meanwhile: a grant that may be there is looked for, and counts; nothing else is claimed.
#[test]
fn a_claim_of_a_removed_job_is_found_or_given_up() {
    let mut nothing = Account::default();
    let end = seeing(Subject::Removed(&mut nothing), None, |v| {
        ended(Contest::new(scheduled(NOON), 0).0.look(v, &mut vec![]))
    });
    assert_eq!(end, Some(ContestEnd::Gone));

    // No answer about it: it stays open unless the instance stops, which forgets it.
    for (granted, stopping, expected, left) in [
        (None, false, ContestEnd::Undecided, true),
        (None, true, ContestEnd::Gone, false),
        (Some(false), false, ContestEnd::Gone, false),
    ] {
        let mut account = unanswered();
        let end = seeing(Subject::Removed(&mut account), None, |v| {
            let mut contest = Contest::new(scheduled(NOON), 0).0;
            let step = contest.look(v, &mut vec![]);
            assert!(
                matches!(step, Step::FindGrant(run) if run == RunId(uuid::Uuid::nil())),
                "{step:?}"
            );
            ended(contest.found(granted, stopping, v, &mut vec![]))
        });
        assert_eq!(end, Some(expected));
        assert_eq!(account.has_unanswered_claims(), left);
        assert_eq!(account.is_closed(), !left);
    }

    // It is ours: the same claim again brings the lease, with the definition of then.
    let mut account = unanswered();
    let mut effects = vec![];
    let end = seeing(Subject::Removed(&mut account), None, |v| {
        let mut contest = Contest::new(scheduled(NOON), 0).0;
        let _ = contest.look(v, &mut effects);
        let found = contest.found(Some(true), false, v, &mut effects);
        assert!(matches!(found, Step::Look), "{found:?}");
        match contest.look(v, &mut effects) {
            Step::Ask(claim) => {
                assert_eq!(claim.run, RunId(uuid::Uuid::nil()));
                assert_eq!((claim.job.as_str(), claim.lease), ("draw", 2000));
            }
            other => panic!("{other:?}"),
        }
        let grant = grant(NOON, Trigger::Schedule);
        ended(contest.answered(grant, answer_at(NOON + 1), v, &mut effects))
    });
    assert_eq!(end, Some(ContestEnd::Won(RunId(uuid::Uuid::nil()))));
    assert!(effects.iter().any(|e| matches!(e, Effect::Start(_))));
    assert!(!account.has_unanswered_claims() && !account.is_idle());

    // Found, but by now another contest has its answer.
    let mut account = unanswered();
    let end = seeing(Subject::Removed(&mut account), None, |v| {
        let mut contest = Contest::new(scheduled(NOON), 0).0;
        let _ = contest.look(v, &mut vec![]);
        let _ = contest.found(Some(true), false, v, &mut vec![]);
        v.subject
            .account()
            .forget(&TargetId::Scheduled(Occurrence(NOON)));
        ended(contest.look(v, &mut vec![]))
    });
    assert_eq!(end, Some(ContestEnd::Gone));
}

/// While the store is not to be relied on nothing is asked; a job here notes why, once for each occurrence.
#[test]
fn an_unreliable_store_is_asked_nothing_and_noted_once() {
    let halt = || Some(Halt::Unreliable("clock_in_doubt", "why".into()));
    let mut job = registered();
    let noted = |job: &mut JobState, at| {
        let mut effects = vec![];
        let end = seeing(Subject::Here(job), halt(), |v| {
            ended(Contest::new(scheduled(at), 0).0.look(v, &mut effects))
        });
        assert_eq!(end, Some(ContestEnd::Undecided));
        effects.len()
    };
    let counts = [NOON, NOON, NOON + 2000].map(|at| noted(&mut job, at));
    assert_eq!(counts, [1, 0, 1]);
    let mut account = unanswered();
    let mut effects = vec![];
    let end = seeing(Subject::Removed(&mut account), None, |v| {
        let mut contest = Contest::new(scheduled(NOON), 0).0;
        let _ = contest.found(Some(true), false, v, &mut effects);
        v.halt = halt();
        ended(contest.look(v, &mut effects))
    });
    assert_eq!((end, effects.len()), (Some(ContestEnd::Undecided), 0));
    assert!(account.has_unanswered_claims());
}

/// A disabled job has its triggers, and what was decided before.
#[test]
fn a_disabled_job_claims_no_new_occurrence() {
    let definition = job("enabled = false");
    let mut job = JobState::new(definition.clone(), Account::default());
    let state = decided(NOON);
    let _ = job.registered(&definition, &state, &epoch("1"), NOON + 1);
    let mut end = |ask| ended(look(&mut job, ask, None, Slot::Needless, true));
    assert_eq!(end(scheduled(NOON + 2000)), Some(ContestEnd::Gone));
    assert_eq!(end(scheduled(NOON)), Some(ContestEnd::Settled));
    assert_eq!(end(Ask::next_attempt(Occurrence(NOON))), None);
    let manual = Target::Manual {
        key: "k".to_owned(),
        before: None,
    };
    assert_eq!(end(Ask::again(manual)), None);
}

/// A store that refuses is not asked again; one that cannot be reached is, a few times. Both are told once.
#[test]
fn what_the_store_refuses_is_not_tried_again() {
    let mut job = registered();
    let mut effects = vec![];
    let (refused, lost) = seeing(Subject::Here(&mut job), None, |v| {
        let mut fails = |transient| {
            let mut contest = Contest::new(scheduled(NOON), 0).0;
            let _ = contest.look(v, &mut vec![]);
            let pause = |n| Duration::from_millis(u64::from(n));
            contest.failed("why", transient, 1, pause, v, &mut effects)
        };
        (fails(false), fails(true))
    });
    assert!(matches!(lost, Step::Pause(wait, _) if wait == Duration::from_millis(1)));
    assert_eq!(ended(refused), Some(ContestEnd::Undecided));
    assert!(
        matches!(
            effects[..],
            [Effect::CannotClaim(_), Effect::Note(None, "store_error", _)]
        ),
        "{effects:?}"
    );
    // Nobody is left to tell.
    let mut account = unanswered();
    let mut effects = vec![];
    let end = seeing(Subject::Removed(&mut account), None, |v| {
        let mut contest = Contest::new(scheduled(NOON), 0).0;
        ended(contest.failed("why", true, 0, |_| Duration::ZERO, v, &mut effects))
    });
    assert_eq!((end, effects.len()), (Some(ContestEnd::Undecided), 0));
    assert!(account.is_unheard(&TargetId::Scheduled(Occurrence(NOON))));
}

/// By a wrong clock it was due, and the clock has been corrected: the job is planned anew. What was decided before, or
/// what an instance without a clock of its own asks, only waits.
#[test]
fn an_occurrence_that_is_early_by_far_is_planned_anew() {
    let early = || Answer::Early { wait_us: 9_000_000 };
    let asks = |ask: Ask, clock: bool| {
        let mut job = registered();
        let mut belief = Belief::default();
        if clock {
            let now = Boottime(1_000_000_000);
            belief.sample(Estimate::new(NOON * 1000, now, now));
        }
        let step = seeing_by(&belief, Subject::Here(&mut job), None, |v| {
            let mut contest = Contest::new(ask, 0).0;
            let _ = contest.look(v, &mut vec![]);
            contest.answered(early(), answer_at(NOON), v, &mut vec![])
        });
        (ended(step), job.is_registered())
    };
    let undecided = Some(ContestEnd::Undecided);
    assert_eq!(asks(scheduled(NOON), true), (undecided, false));
    assert_eq!(asks(scheduled(NOON), false), (None, true));
    let again = Ask::next_attempt(Occurrence(NOON));
    assert_eq!(asks(again, true), (None, true));
}

/// The longest of these is the reason of a late start.
#[test]
fn a_contest_says_what_it_waits_for() {
    let turn = |rank| Contest::new(scheduled(NOON), rank).1;
    assert!(matches!(turn(0), Step::Look));
    for (rank, ms) in [(1, 3), (2, 6), (15, 45), (99, 45)] {
        let wait = Duration::from_millis(ms);
        assert!(matches!(turn(rank), Step::Pause(first, _) if first == wait));
    }
    // The turns of others are over in no time.
    assert!(matches!(turn(1), Step::Pause(_, None)));
    let after = |answer: Option<Answer>| {
        let mut job = registered();
        seeing(Subject::Here(&mut job), None, |v| {
            let mut contest = Contest::new(scheduled(NOON), 0).0;
            let _ = contest.look(v, &mut vec![]);
            match answer {
                Some(answer) => contest.answered(answer, answer_at(NOON), v, &mut vec![]),
                None => contest.failed("why", true, 1, |_| Duration::ZERO, v, &mut vec![]),
            }
        })
    };
    for (answer, waits_for) in [
        (None, Some(Wait::StoreAway)),
        (Some(Answer::InDoubt), Some(Wait::StoreAway)),
        (Some(Answer::Later { wait_ms: 5 }), Some(Wait::Overlap)),
        (
            Some(Answer::RunFirst(Occurrence(NOON - 2000))),
            Some(Wait::Overlap),
        ),
        (Some(Answer::Settled(None)), None),
    ] {
        let step = after(answer);
        assert_eq!(step.waits_for(), waits_for, "{step:?}");
    }
}

/// The store says that another occurrence goes first. If it is the very one, asking again is all there is to do.
#[test]
fn another_occurrence_goes_first_but_none_before_itself() {
    let step = |first: i64| {
        let mut job = registered();
        seeing(Subject::Here(&mut job), None, |v| {
            let mut contest = Contest::new(scheduled(NOON), 0).0;
            let _ = contest.look(v, &mut vec![]);
            let answer = Answer::RunFirst(Occurrence(first));
            contest.answered(answer, answer_at(NOON), v, &mut vec![])
        })
    };
    let other = step(NOON - 2000);
    assert!(
        matches!(other, Step::First(at) if at.0 == NOON - 2000),
        "{other:?}"
    );
    let same = step(NOON);
    assert!(matches!(same, Step::Rest(wait, _) if wait == Duration::from_millis(1)));
}

/// The store's clock stands still or is behind, and our own says that the time of a trigger is over.
#[test]
fn a_trigger_whose_time_is_over_on_our_own_clock_is_too_late() {
    for (learned, too_late) in [(0, Some(claim::TOO_LATE)), (1, None), (1_000_000_000, None)] {
        let mut job = registered();
        let within = job.definition.start_within + START_MARGIN;
        let due = job.triggered("k", NOON, Boottime(learned));
        let mut effects = vec![];
        seeing(Subject::Here(&mut job), None, |v| {
            v.now = Boottime(0) + within;
            let ask = Ask {
                target: due.target,
                trigger: Trigger::Manual,
                start_by: due.start_by,
                ..scheduled(NOON)
            };
            let mut contest = Contest::new(ask, 0).0;
            match contest.look(v, &mut effects) {
                Step::Ask(claim) if too_late.is_some() => {
                    assert_eq!(claim.start_by, claim::PASSED);
                }
                Step::Ask(claim) => assert_eq!(claim.start_by, due.start_by),
                other => panic!("{other:?}"),
            }
            let answer = grant(NOON + 1, Trigger::Manual);
            let _ = contest.answered(answer, answer_at(NOON + 2), v, &mut effects);
        });
        let win = effects.into_iter().find_map(|e| match e {
            Effect::Start(win) => Some(win),
            _ => None,
        });
        assert_eq!(win.expect("granted").too_late, too_late);
    }
}

/// How long a contest waits after `answer`; None: it does not wait.
fn waits(job: &mut JobState, ask: Ask, answer: Answer, lapsed: bool) -> Option<Duration> {
    let info = AnswerInfo {
        expires_in: Duration::from_millis(70),
        ..answer_at(NOON)
    };
    let step = seeing(Subject::Here(job), None, |v| {
        v.lapsed = lapsed.then(|| Observed {
            run: RunId(uuid::Uuid::nil()),
            seq: 0,
            incarnation: "i".to_owned(),
        });
        Contest::new(ask, 0)
            .0
            .answered(answer, info, v, &mut vec![])
    });
    match step {
        Step::Rest(wait, _) => Some(wait),
        _ => None,
    }
}

/// For a proof that a holder lives a contest looks soon after its next renewal; for a clock or a pause it waits as long
/// as the answer says, within limits.
#[test]
fn an_answer_says_when_to_ask_again() {
    let us = Duration::from_micros;
    let blocked = |lease| {
        let mut open = running(NOON);
        open.run.lease = lease;
        Answer::Blocked(open)
    };
    let manual = |before: Option<i64>| Ask {
        target: Target::Manual {
            key: "k".to_owned(),
            before: before.map(Occurrence),
        },
        ..scheduled(NOON)
    };
    let again = || Ask::next_attempt(Occurrence(NOON));
    let soon = |ask: Ask| Ask {
        start_by: NOON + 10,
        ..ask
    };
    let early = |wait_us| Answer::Early { wait_us };
    let later = |wait_ms| Answer::Later { wait_ms };
    for (ask, answer, wait) in [
        (scheduled(NOON), blocked(500), us(50_000)),
        (scheduled(NOON), blocked(5000), us(70_000)),
        (soon(scheduled(NOON)), blocked(5000), us(11_000)),
        (scheduled(NOON), early(3000), us(3000)),
        (scheduled(NOON), early(10), us(50)),
        // It is planned anew from there on.
        (scheduled(NOON), early(1_000_000), us(1_000_000)),
        (again(), early(9_000_000), us(5_000_000)),
        (manual(None), early(10), us(50)),
        (manual(None), early(700_000), us(700_000)),
        (manual(None), early(9_000_000), us(1_000_000)),
        (manual(Some(NOON + 1)), early(700_000), us(700_000)),
        (manual(Some(NOON)), early(700_000), us(20_000)),
        (again(), later(0), us(1000)),
        (again(), later(500), us(500_000)),
        (again(), later(60_000), us(30_000_000)),
        (soon(again()), later(500), us(11_000)),
        (scheduled(NOON), Answer::InDoubt, us(20_000)),
    ] {
        let text = format!("{ask:?} {answer:?}");
        let mut job = registered();
        assert_eq!(waits(&mut job, ask, answer, false), Some(wait), "{text}");
    }
    let mut job = registered();
    assert_eq!(
        waits(&mut job, scheduled(NOON), early(1_000_001), false),
        None
    );
    // Others have decided past what a trigger would take: the store is asked what.
    let mut job = registered();
    let _ = waits(&mut job, manual(Some(NOON + 1)), early(1000), false);
    assert!(job.is_registered());
    let _ = waits(&mut job, manual(Some(NOON)), early(1000), false);
    assert!(!job.is_registered() && job.may_be_claimed());
}

fn due(target: Target, at: i64) -> Due {
    Due {
        job: JobName::new("draw"),
        target,
        start_at: at,
        start_by: at + 60_000,
        overdue: false,
        missed: vec![],
    }
}

fn at(at: i64) -> Target {
    Target::Scheduled(Occurrence(at))
}

fn next_target(job: &mut JobState, now: i64) -> Option<Target> {
    match job.next(now) {
        Next::Ask(ask) => Some(ask.target),
        _ => None,
    }
}

#[test]
fn what_ran_early_holds_up_no_claim() {
    let mut job = registered();
    assert!(job.due(due(at(NOON), NOON), NOON));
    let asks = |job: &mut JobState| {
        let step = look(job, scheduled(NOON + 2000), None, Slot::Needless, true);
        matches!(step, Step::Ask(_))
    };
    assert!(!asks(&mut job));
    let behind = Answer::Behind {
        newest: Occurrence(NOON - 2000),
        early: vec![Occurrence(NOON)],
    };
    told(&mut job, scheduled(NOON + 4000), behind);
    assert!(asks(&mut job));
}

/// Nothing is claimed before the store knows the job, or after it has lost it.
#[test]
fn a_job_is_claimed_while_the_store_knows_it() {
    let asks = |job: &mut JobState| {
        let step = look(job, scheduled(NOON), None, Slot::Needless, true);
        matches!(step, Step::Ask(_))
    };
    assert!(!asks(&mut JobState::new(job(""), Account::default())));
    for answer in [Answer::Quarantined, Answer::Absent] {
        let mut job = registered();
        let before = job.changes().to_register;
        told(&mut job, scheduled(NOON), answer);
        assert!(!job.may_be_claimed());
        assert_eq!(job.changes().to_register, before + 1);
    }
}

/// The history says whether the clock was in doubt at the last moment for a start, of what was to be started.
#[test]
fn what_is_too_late_in_doubt_says_so() {
    let ms = |n: u64| Boottime(n * 1_000_000);
    // The clock jumps at `from`; half a second before the look it was noon.
    let doubts = |from: u64| {
        let mut belief = Belief::default();
        belief.sample(Estimate::new(NOON * 1000 - 500_000, ms(0), ms(0)));
        let jump = (NOON + 3_600_000) * 1000;
        belief.sample(Estimate::new(jump, ms(from), ms(from)));
        belief
    };
    for (from, start_by, asked) in [
        (900, NOON + 450, claim::PASSED_IN_DOUBT),
        (900, NOON + 300, NOON + 300),
        // There is time left.
        (900, NOON + 490, NOON + 490),
        (0, claim::NEVER, claim::NEVER),
    ] {
        let mut job = registered();
        let ask = Ask {
            start_by,
            ..scheduled(NOON)
        };
        seeing_by(
            &doubts(from),
            Subject::Here(&mut job),
            None,
            |v| match Contest::new(ask, 0).0.look(v, &mut vec![]) {
                Step::Ask(claim) => assert_eq!(claim.start_by, asked, "{from} {start_by}"),
                other => panic!("{other:?}"),
            },
        );
    }
}

// ---- one job ----

/// What the store has may be old, lost, or nothing that counts any more; a later word takes an earlier one no further.
#[test]
fn a_standing_keeps_what_it_needs() {
    let now = Boottime(9_000_000_000);
    let waits = |job: &JobState| job.register_in(&epoch("1"), now).map(|wait| wait.as_secs());
    let says = |job: &JobState| (job.may_be_claimed(), job.is_registered(), waits(job));
    let mut job = registered();
    assert_eq!(says(&job), (true, true, None));
    job.stale();
    assert_eq!(says(&job), (true, false, Some(0)));
    assert!(job.refused(now));
    assert!(job.is_troubled());
    job.stale();
    assert_eq!(says(&job), (true, false, Some(5)));
    job.lost();
    assert_eq!(says(&job), (false, false, Some(5)));
    job.stale();
    assert_eq!(says(&job), (false, false, Some(5)));
    job.look_anew();
    job.lost();
    assert_eq!(says(&job), (false, false, Some(5)));
    job.resync();
    assert_eq!(says(&job), (false, false, Some(5)));
    let definition = job.definition.clone();
    let state = decided(NOON + 2000);
    // It was new for this instance, so what is overdue was looked at.
    let follows = job.registered(&definition, &state, &epoch("1"), NOON + 2500);
    let plan_after = follows.and_then(|follows| follows.plan_after);
    assert_eq!(plan_after, Some(Occurrence(NOON + 2500)));
    assert_eq!(says(&job), (true, true, None));
    assert!(!job.is_troubled());
    // What was planned meanwhile has waited for the store, until now.
    assert_eq!(job.away_until(Occurrence(NOON), NOON + 9000), NOON + 2500);
    // After a loss it is not new.
    job.lost();
    let follows = job.registered(&definition, &state, &epoch("1"), NOON + 2500);
    assert_eq!(follows.map(|follows| follows.plan_after), Some(None));
    job.resync();
    assert_eq!(says(&job), (true, false, Some(0)));
}

/// Tasks that wait for a job look at these counters.
#[test]
fn whoever_waits_for_a_job_is_woken() {
    let mut job = registered();
    let definition = job.definition.clone();
    let mut grew = |what: &str, changed: bool, to_register: bool, f: &dyn Fn(&mut JobState)| {
        let before = job.changes();
        f(&mut job);
        let after = job.changes();
        assert_eq!(after.changed, before.changed + u64::from(changed), "{what}");
        let more = u64::from(to_register);
        assert_eq!(after.to_register, before.to_register + more, "{what}");
    };
    grew("elsewhere", true, false, &|job| job.ended_elsewhere());
    let run = RunId(uuid::Uuid::max());
    grew("here", true, false, &|job| job.run_has_ended(run));
    grew("stale", false, true, &|job| job.stale());
    grew("lost", false, true, &|job| job.lost());
    grew("anew", true, true, &|job| job.look_anew());
    grew("resync", false, true, &|job| job.resync());
    let other = job_of("schedule = \"@every 4s\"");
    grew("redefined", true, true, &|job| {
        job.redefine(other.clone(), None);
    });
    grew("back", true, true, &|job| {
        job.redefine(definition.clone(), None);
    });
    grew("registered", true, false, &|job| {
        let _ = job.registered(&definition, &State::default(), &epoch("1"), NOON);
    });
}

/// What came due while no instance was running is in the queue after the registration, without what waits for its
/// jitter.
#[test]
fn what_is_overdue_at_the_start_is_caught_up() {
    let begins = |lines: &str, newest: i64| {
        let definition = job_of(&format!("schedule = \"@every 60s\"\n{lines}"));
        let mut job = JobState::new(definition.clone(), Account::default());
        let state = decided(newest);
        let follows = job.registered(&definition, &state, &epoch("1"), NOON + 500);
        let follows = follows.expect("its definition");
        let both = |(from, to): (Occurrence, Occurrence)| (from.0 - NOON, to.0 - NOON);
        let listed = matches!(job.next(NOON + 500), Next::Unfold(..));
        let catch_up = follows.catch_up.map(both);
        assert_eq!(catch_up.is_some(), listed);
        (catch_up, follows.plan_after.map(|after| after.0 - NOON))
    };
    let minute = 60_000;
    assert_eq!(begins("", NOON - minute), (Some((-minute, 500)), Some(500)));
    assert_eq!(begins("", NOON), (None, Some(500)));
    let off = "enabled = false";
    assert_eq!(begins(off, NOON - minute), (None, Some(500)));
    // The occurrence of noon is not overdue before its jitter is over.
    let jitter = "jitter = \"500ms\"";
    assert_eq!(begins(jitter, NOON - minute), (Some((-minute, 0)), Some(0)));
    let jitter = "jitter = \"501ms\"";
    assert_eq!(begins(jitter, NOON - minute), (None, Some(-1)));
    // Nor is anything planned again that is decided.
    assert_eq!(begins(jitter, NOON), (None, Some(0)));
}

/// The store's state of a job: what this instance has to do about each of its entries.
#[test]
fn each_open_occurrence_is_watched_asked_for_or_ours() {
    let mut job = registered();
    let id = |n: u128| RunId(uuid::Uuid::from_u128(n));
    let open = |n: u128, awaited: bool| {
        let occurrence = NOON + n as i64 * 2000;
        let mut open = running(occurrence);
        open.run.id = id(n);
        open.next_attempt = awaited.then_some(claim::NextAttempt {
            at: occurrence,
            trigger: Trigger::Retry,
        });
        open
    };
    // 1 goes on here; 2 elsewhere; 3 has had its run here, and waits for another attempt; 4 is ours, and its grant was
    // not heard of.
    assert!(
        job.account
            .begin(&TargetId::Scheduled(Occurrence(0)), id(1))
    );
    assert!(
        job.account
            .begin(&TargetId::Scheduled(Occurrence(0)), id(3))
    );
    let definition = job.definition.clone();
    let mut asks = |n: u128| {
        let target = TargetId::Scheduled(Occurrence(NOON + n as i64 * 2000));
        job.account.ask(target, &definition, || id(n));
    };
    // 5 is decided, and not by a grant of ours; 6 is, and its next attempt is awaited; 7 is not decided.
    [4, 5, 6, 7].into_iter().for_each(&mut asks);
    let sixth = Occurrence(NOON + 12_000);
    assert!(job.await_next_attempt(sixth) && !job.await_next_attempt(sixth));
    let state = State {
        newest: NOON + 12_000,
        open: vec![
            open(1, false),
            open(2, false),
            open(3, true),
            open(4, false),
        ],
        triggers: vec![claim::Pending {
            key: "k".to_owned(),
            at: NOON - 1,
            by: None,
        }],
        ..State::default()
    };
    let follows = job.registered(&definition, &state, &epoch("1"), NOON + 12_000);
    let follows = follows.expect("its definition");
    let nth = |at: Occurrence| (at.0 - NOON) / 2000;
    let watched: Vec<_> = follows
        .watch
        .iter()
        .map(|o| nth(o.run.occurrence))
        .collect();
    assert_eq!(watched, [2, 3, 4]);
    let again: Vec<_> = follows.ask_again.iter().map(|at| nth(*at)).collect();
    assert_eq!(again, [4, 3]);
    assert_eq!(follows.triggers, state.triggers);
    let left = job.unanswered();
    let left: Vec<_> = left.iter().map(|ask| ask.target.clone()).collect();
    assert_eq!(left, [4, 6, 7].map(|n| at(NOON + n * 2000)));
    assert!(!job.await_next_attempt(sixth), "it waits already");
    job.awaits_no_longer(sixth);
    assert!(job.await_next_attempt(sixth));
}

#[test]
fn a_longer_lease_of_another_instance_lengthens_the_quarantine() {
    let mut job = registered();
    let own = job.quarantine();
    let mut open = running(NOON);
    open.run.lease = 1000;
    assert_eq!(job.note_lease(&open), own);
    open.run.lease = 60_000;
    let longer = job.note_lease(&open);
    assert!(longer > Duration::from_secs(60), "{longer:?}");
    assert_eq!(job.quarantine(), longer);
    open.run.lease = 1000;
    assert_eq!(job.note_lease(&open), longer);
}

/// One that has not had the job all the time lets the others go first.
#[test]
fn who_may_know_less_adopts_a_job_later() {
    let now = Boottime(9_000_000_000);
    let opened = Epoch {
        open_seen: Some(now),
        others_know: true,
        ..epoch("1")
    };
    let new = JobState::new(job(""), Account::default());
    assert_eq!(new.adoptable_in(&opened, now), Duration::from_secs(2));
    assert_eq!(registered().adoptable_in(&opened, now), Duration::ZERO);
}

/// What was lost is one range, from after what is known of to the loss; of a job that nobody knew, nothing was.
#[test]
fn what_was_lost_is_counted_from_what_is_known() {
    let me = me();
    let lost = |state: &JobState, older: Option<&State>| {
        let ask = state.registration(&me, &epoch("2"));
        let ask = JobState::adoption(&state.definition, ask, &epoch("2"), NOON, older);
        let ranges = ask.lost.iter();
        let ranges = ranges.map(|l| (l.first.0 - NOON, l.last.0 - NOON, l.count));
        (ask.counted_from, ranges.collect::<Vec<_>>())
    };
    let older = |newest, since| State {
        newest,
        since,
        ..State::default()
    };
    let new = JobState::new(job(""), Account::default());
    assert_eq!(lost(&new, None), (0, vec![]));
    let from = NOON - 10_000;
    let five = (from, vec![(-8000, 0, 5)]);
    assert_eq!(lost(&new, Some(&older(from, 0))), five);
    assert_eq!(lost(&new, Some(&older(0, from))), five);
    assert_eq!(lost(&new, Some(&older(NOON, 0))), (NOON, vec![]));
    let one = (NOON - 2000, vec![(0, 0, 1)]);
    assert_eq!(lost(&registered(), Some(&older(from, 0))), one);
    assert_eq!(lost(&registered(), None), one);
}

#[test]
fn a_small_step_of_the_clock_is_no_future_and_a_short_delay_no_outage() {
    let slack = crate::logic::belief::SLACK.as_millis() as i64;
    let job = registered();
    let newest = NOON - 2000;
    assert!(!job.ahead(Occurrence(newest - slack)));
    assert!(job.ahead(Occurrence(newest - slack - 1)));
    for (late, first) in [(3000, NOON), (3001, NOON + 2000)] {
        let mut job = registered();
        assert!(job.due(due(at(NOON), NOON), NOON));
        let next = NOON + 2000;
        assert!(job.due(due(at(next), next), next + late));
        assert_eq!(next_target(&mut job, next + late), Some(at(first)));
    }
}

/// Its trouble is over with the first claim that works, and a trigger that is decided waits no more.
#[test]
fn a_claim_that_has_an_end_ends_what_was_noted() {
    let me = me();
    for (end, over) in [
        (ContestEnd::Settled, true),
        (ContestEnd::Recorded(Outcome::Missed), true),
        (ContestEnd::Undecided, false),
        (ContestEnd::Behind, false),
    ] {
        let mut job = registered();
        let trigger = job.triggered("k", NOON, Boottime(1));
        let target = trigger.target.clone();
        assert!(job.due(trigger, NOON));
        assert!(job.refused(Boottime(1)));
        job.ended(&target, &end, false, NOON + 700);
        assert_eq!(job.is_troubled(), !over, "{end:?}");
        // So long what is claimed next has waited for the store, too.
        let until = if over { NOON + 700 } else { NOON + 900 };
        assert_eq!(
            job.away_until(Occurrence(NOON), NOON + 900),
            until,
            "{end:?}"
        );
        let waiting = job.registration(&me, &epoch("2")).remembered.triggers;
        assert_eq!(waiting.is_empty(), over, "{end:?}");
    }
    // What an instance leaves to others when it drains is theirs.
    let mut job = registered();
    let trigger = job.triggered("k", NOON, Boottime(1));
    let target = trigger.target.clone();
    assert!(job.due(trigger, NOON));
    job.ended(&target, &ContestEnd::Draining, true, NOON);
    let waiting = job.registration(&me, &epoch("2")).remembered.triggers;
    assert_eq!(waiting, []);
}

/// Times at which a job is to be registered: at once, a while after a refusal, at the end of the quarantine of the
/// epoch that said so.
#[test]
fn a_job_is_registered_when_it_was_said() {
    let now = Boottime(9_000_000_000);
    let closed = |id| Epoch {
        open: false,
        first_seen: now,
        ..epoch(id)
    };
    let mut state = JobState::new(job(""), Account::default());
    let again = |state: &JobState| state.register_in(&closed("1"), now);
    assert_eq!(again(&state), Some(Duration::ZERO));
    state.register_after_quarantine(&closed("1"), None);
    assert_eq!(again(&state), Some(state.quarantine()));
    // Another epoch may say something else.
    assert_eq!(state.register_in(&closed("2"), now), Some(Duration::ZERO));
    assert!(state.refused(now), "the first time is news");
    assert!(!state.refused(now));
    assert_eq!(again(&state), Some(Duration::from_secs(5)));
    state.resync();
    assert_eq!(again(&state), Some(Duration::from_secs(5)));
    state.register_after_quarantine(&closed("1"), None);
    state.resync();
    assert_eq!(again(&state), Some(Duration::ZERO));
}

/// Since the first time in an epoch; what is planned from then on is to be recorded.
#[test]
fn a_new_job_says_since_when_it_waits() {
    let (one, two) = (epoch("1"), epoch("2"));
    let me = Me {
        instance: InstanceId::new("a"),
        host: "a.example".to_owned(),
    };
    let since = |state: &JobState, epoch| state.registration(&me, epoch).waits_since;
    let mut state = JobState::new(job(""), Account::default());
    assert_eq!(since(&state, &one), 0);
    state.register_after_quarantine(&one, Some(NOON));
    state.register_after_quarantine(&one, Some(NOON + 5));
    state.resync();
    assert_eq!((since(&state, &one), since(&state, &two)), (NOON, 0));
    state.register_after_quarantine(&two, Some(NOON + 9));
    assert_eq!((since(&state, &one), since(&state, &two)), (0, NOON + 9));
    // Once it is registered, what is planned meanwhile is in its queue.
    let lost = State {
        lost_until: NOON + 20,
        ..State::default()
    };
    let definition = state.definition.clone();
    assert!(
        state
            .registered(&definition, &lost, &two, NOON + 20)
            .is_some()
    );
    let kept = |at: i64| state.was_kept_back(Occurrence(NOON + at));
    assert_eq!([kept(20), kept(21)], [true, false]);
    state.lost();
    state.register_after_quarantine(&two, Some(NOON + 30));
    assert_eq!(since(&state, &two), 0);
}

#[test]
fn a_definition_that_was_replaced_meanwhile_is_not_registered() {
    let mut job = registered();
    let old = job.definition.clone();
    assert_eq!(job.redefine(job_of("schedule = \"@every 4s\""), None), None);
    let (state, one) = (State::default(), epoch("1"));
    assert_eq!(job.registered(&old, &state, &one, NOON), None);
    assert!(!job.is_registered());
    let new = job.definition.clone();
    assert!(job.registered(&new, &state, &one, NOON).is_some());
}

/// What counted as decided lay in the future. The store says that it is not: the job is planned as after a start.
#[test]
fn what_the_store_put_back_from_the_future_is_planned_anew() {
    let mut job = registered();
    let definition = job.definition.clone();
    let at = |newest| decided(newest);
    let hour = 3_600_000;
    let ahead = job.registered(&definition, &at(NOON + hour), &epoch("1"), NOON);
    let ahead = ahead.expect("its definition");
    assert_eq!(ahead.ahead, Some(Occurrence(NOON + hour)));
    assert_eq!(ahead.plan_after, None, "the job was not new");
    let back = job.registered(&definition, &at(NOON), &epoch("1"), NOON);
    let back = back.expect("its definition");
    assert_eq!(
        (back.ahead, back.plan_after),
        (None, Some(Occurrence(NOON)))
    );
    assert_eq!(job.newest(), Occurrence(NOON));
}

#[test]
fn what_is_decided_is_not_due_and_what_was_overdue_is_no_sign_of_a_stall() {
    let due = |n: i64, overdue| Due {
        overdue,
        ..due(at(n), n)
    };
    let mut job = registered();
    assert!(!job.due(due(NOON - 2000, false), NOON));
    assert!(matches!(job.next(NOON), Next::Idle));
    // Two that come in late: after a stall the newer one is run, and the other given up.
    for (overdue, first) in [(false, NOON + 2000), (true, NOON)] {
        let mut job = registered();
        for at in [NOON, NOON + 2000] {
            assert!(job.due(due(at, overdue), NOON + 9000));
        }
        match job.next(NOON + 9000) {
            Next::Ask(ask) => assert_eq!(ask.target, Target::Scheduled(Occurrence(first))),
            other => panic!("{other:?}"),
        }
    }
}

/// Nobody looked for a while, but instances were running: it is an outage, and what comes due next is run instead of what
/// was overdue. After an absence of all instances, what was overdue is caught up first.
#[test]
fn what_came_due_while_nobody_looked_is_an_outage() {
    for (absent, first, missed) in [(false, NOON + 6000, 3), (true, NOON + 4000, 2)] {
        let mut job = registered();
        let backlog = Backlog {
            schedules: job.definition.schedules.clone(),
            jitter: Duration::ZERO,
            after: Occurrence(NOON - 2000),
            last: Occurrence(NOON + 4000),
        };
        job.overdue(backlog, absent, NOON + 5000);
        while let Next::Unfold(definition, segments, known) = job.next(NOON + 5000) {
            let unfolded = unfold(segments, &definition, NOON + 5000, known);
            job.unfolded(unfolded, NOON + 5000);
        }
        let due = due(at(NOON + 6000), NOON + 6000);
        assert!(job.due(due, NOON + 6000));
        match job.next(NOON + 6000) {
            Next::Ask(ask) => {
                assert_eq!(ask.target, Target::Scheduled(Occurrence(first)));
                assert_eq!(ask.missed.len(), missed);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Others claim what a draining instance had in its queue. A contest that ended because its occurrence was not to be
/// claimed here leaves the queue as it is.
#[test]
fn a_drain_empties_the_queue_and_nothing_else_does() {
    for (end, draining, left) in [
        (ContestEnd::Draining, true, false),
        (ContestEnd::Draining, false, true),
        (ContestEnd::Gone, true, true),
        (ContestEnd::Behind, true, true),
        (ContestEnd::Undecided, true, true),
        (ContestEnd::Settled, false, false),
    ] {
        let mut job = registered();
        let target = at(NOON);
        assert!(job.due(due(target.clone(), NOON), NOON));
        job.ended(&target, &end, draining, NOON);
        assert_eq!(matches!(job.next(NOON), Next::Ask(_)), left, "{end:?}");
    }
}

/// A job that is removed is given up up to now, and only if the store knows it.
#[test]
fn what_a_removed_job_owes_is_given_up_once() {
    let (me, run) = (
        Me {
            instance: InstanceId::new("a"),
            host: "h".to_owned(),
        },
        RunId(uuid::Uuid::max()),
    );
    let new = JobState::new(job(""), Account::default());
    assert!(new.given_up(&me, Occurrence(NOON), run).is_none());
    let job = registered();
    let up_to = |now: i64| job.given_up(&me, Occurrence(now), run);
    assert!(up_to(NOON - 1).is_none(), "nothing is due");
    let (claim, after) = up_to(NOON + 4500).expect("three are due");
    assert_eq!(claim.target, Target::Scheduled(Occurrence(NOON + 4000)));
    let missed: Vec<i64> = claim.missed.iter().map(|m| m.last.0 - NOON).collect();
    assert_eq!((missed, claim.start_by), (vec![0, 2000], claim::REMOVED));
    assert_eq!(claim.known, Occurrence(NOON - 2000));
    let within = job.definition.start_within + START_MARGIN;
    assert_eq!(after, NOON + 4000 + within.as_millis() as i64);
    // A long time is one record, and the newest ones have one each.
    let (claim, _) = up_to(NOON + 2000 * 200).expect("many are due");
    assert_eq!(claim.missed.len(), 100);
    assert_eq!(claim.missed.iter().map(|m| m.count).sum::<u64>(), 200);
    assert_eq!(claim.missed[0].first, Occurrence(NOON));
}

/// Claims without an answer are asked again: a trigger's within its time, an occurrence's whenever.
#[test]
fn what_has_no_answer_is_asked_again() {
    let mut job = registered();
    assert_eq!(job.unanswered(), []);
    let due = job.triggered("k", NOON, Boottime(1));
    let definition = job.definition.clone();
    let fresh = || RunId(uuid::Uuid::max());
    for id in [
        TargetId::Scheduled(Occurrence(NOON)),
        TargetId::Manual("k".to_owned()),
        TargetId::Manual("not known here".to_owned()),
    ] {
        let run = match id {
            TargetId::Scheduled(_) => RunId(uuid::Uuid::nil()),
            TargetId::Manual(_) => fresh(),
        };
        job.account.ask(id, &definition, || run);
    }
    let asks = job.unanswered();
    let seen: Vec<_> = asks
        .iter()
        .map(|ask| (ask.key(), ask.trigger, ask.start_by, ask.next_attempt))
        .collect();
    assert_eq!(
        seen,
        [
            (None, Trigger::Schedule, i64::MAX, true),
            (Some("k"), Trigger::Manual, due.start_by, true),
            (Some("not known here"), Trigger::Manual, i64::MAX, true),
        ]
    );
    // The store shows that the trigger's is ours.
    let mut open = running(NOON - 5);
    (open.run.id, open.run.key) = (fresh(), Some("k".to_owned()));
    let state = State {
        newest: NOON,
        open: vec![open],
        ..State::default()
    };
    let follows = job.registered(&definition, &state, &epoch("1"), NOON);
    let follows = follows.expect("its definition");
    let keys: Vec<_> = follows.triggers.iter().map(|t| (&*t.key, t.at)).collect();
    assert_eq!(keys, [("k", NOON - 5)]);
    // The other one is decided, and not ours.
    assert!(!job.unanswered().iter().any(|ask| ask.key().is_none()));
}

/// What people asked for is kept in mind while the job is away.
#[test]
fn what_was_asked_of_a_job_outlasts_its_absence() {
    let mut job = registered();
    let definition = job.definition.clone();
    let used = Triggered {
        key: "k".to_owned(),
        occurrence: Occurrence(NOON - 5),
        at: NOON - 5,
    };
    let paused = State {
        newest: NOON,
        pause: Some(Pause {
            until: None,
            reason: None,
            at: NOON,
            by: None,
        }),
        triggered: vec![used.clone()],
        ..State::default()
    };
    let _ = job.registered(&definition, &paused, &epoch("1"), NOON);
    let memory = job.memory();
    let mut back = JobState::new(definition.clone(), Account::default());
    back.recall(memory.clone(), job.newest());
    assert_eq!((back.newest(), back.memory()), (Occurrence(NOON), memory));
    assert_eq!(back.remembered().pause, paused.pause);
    let me = me();
    let told = back.registration(&me, &epoch("2")).remembered;
    assert_eq!((told.pause, told.triggered), (paused.pause, vec![used]));
    // Nothing was asked.
    let mut back = JobState::new(definition, Account::default());
    back.recall(Remembered::default(), Occurrence(NOON));
    assert_eq!(back.remembered(), Remembered::default());
}

/// A job that may run again what was lost gives nothing up, and its attempts follow its own rule.
#[test]
fn a_job_that_runs_again_what_was_lost_takes_nothing_for_lost() {
    for (lines, lost, before, on_crash) in [
        ("on_crash = \"rerun\"", 1, NOON, OnCrash::Fail),
        (
            "on_crash = \"rerun\"\non_state_loss = \"rerun\"",
            0,
            0,
            OnCrash::Rerun,
        ),
    ] {
        let definition = job(lines);
        let state = JobState::new(definition.clone(), Account::default());
        let me = Me {
            instance: InstanceId::new("a"),
            host: String::new(),
        };
        let older = decided(NOON - 2000);
        let ask = state.registration(&me, &epoch("2"));
        assert_eq!(ask.on_crash, on_crash);
        let ask = JobState::adoption(&definition, ask, &epoch("2"), NOON, Some(&older));
        assert_eq!((ask.lost.len(), ask.lost_before), (lost, before), "{lines}");
        assert_eq!(ask.adopt.as_deref(), Some("i"));
    }
}

/// What the former definition planned waits for the former jitter, and nothing overtakes it.
#[test]
fn a_new_schedule_begins_now_and_what_waits_for_its_jitter_stays_owed() {
    let plain = "schedule = \"@every 60s\"";
    let jitter = "schedule = \"@every 60s\"\njitter = \"50s\"";
    let other = job_of("schedule = \"@every 30s\"");
    let start = |definition: &Arc<Job>, newest: i64| {
        let mut job = JobState::new(definition.clone(), Account::default());
        let state = decided(newest);
        let _ = job.registered(definition, &state, &epoch("1"), newest);
        job
    };
    // Before the store's first answer nothing was planned; the same plan goes on.
    let mut job = start(&job_of(plain), NOON - 60_000);
    assert_eq!(job.redefine(other.clone(), None), None);
    let mut job = start(&job_of(plain), NOON - 60_000);
    assert_eq!(job.redefine(job_of(plain), Some(Occurrence(NOON))), None);
    // Not registered: it is planned when it is.
    let mut new = JobState::new(job_of(plain), Account::default());
    new.comes_back(Absence::default(), None);
    assert_eq!(new.redefine(other.clone(), Some(Occurrence(NOON))), None);
    let me = me();
    assert_eq!(new.registration(&me, &epoch("1")).back_at, NOON);

    let jittered = job_of(jitter);
    let jittered_off = job_of(&format!("{jitter}\nenabled = false"));
    let at = Occurrence(NOON);
    let starts =
        crate::logic::jitter::start_at_ms("draw", &jittered.schedules, at, jittered.jitter);
    assert!(starts > NOON + 1 && starts <= NOON + 50_000, "{starts}");
    for (definition, newest, now, waits) in [
        // No jitter: it was handed in at noon.
        (&job_of(plain), NOON - 60_000, NOON + 1, false),
        (&jittered_off, NOON - 60_000, NOON + 1, false),
        // It is decided.
        (&jittered, NOON + 1, NOON + 1, false),
        // None is planned in the time of the jitter.
        (&jittered, NOON - 60_000, NOON - 1000, false),
        (&jittered, NOON - 60_000, NOON + 1, true),
        // Its jitter is over: the dispatcher has handed it in.
        (&jittered, NOON - 60_000, starts, false),
    ] {
        let mut job = start(definition, newest);
        let after = job.redefine(other.clone(), Some(Occurrence(now)));
        assert_eq!(after, Some(Occurrence(now)));
        // Nothing newer is claimed before it.
        let newer = Ask {
            target: Target::Scheduled(Occurrence(NOON + 30_000)),
            ..scheduled(NOON)
        };
        assert_eq!(!job.may_claim(&newer), waits, "{now} {}", definition.digest);
    }
}
