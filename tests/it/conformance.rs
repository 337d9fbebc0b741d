//! One suite over every store: each operation and each answer of the contract. What only Redis can do (forget, be full,
//! refuse) comes at the end.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use soloist::{
    clock::{Boottime, StoreClock},
    config,
    guard::{HandOver, KnownEnd, Moment},
    logic::claim::{
        self, Answer, Claim, Control, Controlled, DelayedAttempt, Event, Grant, IN_DOUBT, LIBRARY,
        LOST, Missed, NEVER, NextAttempt, OVERDUE, OVERLAPS, OWN_KEY, Observed, OnCrash, Open,
        Overlap, PASSED, PASSED_IN_DOUBT, Pause, Presence, Register, Registration, Remembered,
        Renew, Renewal, Settle, Settlement, State, StopRequest, TOO_LATE, Target,
    },
    logic::notify::lease::{Write, Written},
    model::{
        InstanceId, JobName, Marks, Occurrence, Outcome, Run, RunId, RunRecord, Trigger, Usage,
        Wait,
    },
    settle::ReleaseOnDeath,
    store::{
        self, Beat, DECISIONS_KEPT, Decision, Error, HISTORY_KEPT, Info, Notices, OUTPUT_AT_ONCE,
        Outage, Output, Problem, Store, Tail, memory::MemoryStore, sqlite::SqliteStore,
    },
};
use tokio::sync::broadcast;

use crate::support::{
    proxy::Proxy,
    server::{RedisServer, settings},
};

/// A place for handles that share one set of data.
enum Bed {
    Memory(Arc<MemoryStore>),
    Sqlite(tempfile::TempDir),
    Redis(RedisServer),
}

impl Bed {
    fn memory() -> Self {
        Self::Memory(Arc::new(MemoryStore::new()))
    }
    fn sqlite() -> Self {
        Self::Sqlite(tempfile::TempDir::new().unwrap())
    }
    fn redis() -> Self {
        Self::Redis(RedisServer::start())
    }
    /// One more handle, as another process would have.
    fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Memory(m) => m.clone(),
            Self::Sqlite(dir) => Arc::new(SqliteStore::open(&dir.path().join("state.db")).unwrap()),
            Self::Redis(server) => Arc::new(server.store()),
        }
    }
}

macro_rules! conformance {
    ($($test:ident)*) => {
        mod memory { $(#[tokio::test] async fn $test() { super::$test(super::Bed::memory()).await })* }
        mod sqlite { $(#[tokio::test] async fn $test() { super::$test(super::Bed::sqlite()).await })* }
        mod redis { $(#[tokio::test] async fn $test() { super::$test(super::Bed::redis()).await })* }
    };
}

conformance! {
    an_occurrence_is_granted_once
    the_same_claim_again_gets_the_same_answer
    an_occurrence_in_the_future_is_early_by_the_stores_clock
    a_hundred_contenders_get_one_grant
    any_number_of_claims_is_answered_in_order
    a_lease_lapses_only_when_exactly_this_one_was_observed
    a_lapsed_run_is_not_run_again_unless_asked
    a_lapsed_run_is_taken_over_until_the_last_attempt
    a_retry_waits_for_its_time
    overlap_skip_records_the_newer_occurrence
    overlap_skip_waits_where_the_holder_may_be_dead
    overlap_queue_waits_for_the_end
    overlap_queue_lets_a_retry_go_first
    overlap_replace_ends_the_older_run
    overlap_allow_runs_both
    a_change_away_from_allow_does_not_overlap
    a_takeover_comes_before_a_newer_occurrence
    a_retry_gives_way_to_a_newer_occurrence
    a_takeover_is_due_at_once
    what_may_have_run_before_a_loss_is_not_granted
    what_a_loss_kept_from_running_is_one_record
    what_the_first_wait_kept_from_running_is_one_record
    what_cannot_be_started_in_time_is_missed
    a_pause_skips_until_it_ends
    what_comes_late_in_a_pause_is_skipped
    skips_are_counted
    a_cancel_reaches_the_holder
    records_say_who_asked
    a_trigger_runs_once_for_its_key
    a_trigger_that_has_no_room_waits_and_is_recorded_in_the_end
    a_trigger_that_is_given_up_jumps_over_nothing
    what_passed_while_the_clock_was_in_doubt_says_so
    a_range_that_is_decided_in_part_is_not_recorded_whole
    a_pause_holds_attempts_back
    a_trigger_stays_between_the_decided_and_the_next
    a_trigger_survives_its_client
    an_unknown_job_is_absent
    a_register_in_the_future_is_put_back_and_what_ran_stays_decided
    what_ran_early_is_not_given_up
    what_lies_in_the_future_is_no_knowledge
    what_people_asked_for_is_told_again_until_they_ask_for_something_else
    what_is_planned_while_nobody_has_the_job_is_not_owed
    a_job_of_the_library_is_not_taken_for_nobodys
    a_store_in_doubt_decides_nothing
    a_register_only_grows
    a_renewal_is_for_the_holder_alone
    a_lease_is_put_back_for_a_holder_that_trusts_it_and_knows_of_the_loss
    a_settlement_counts_once
    the_true_record_replaces_unknown
    the_fleet_knows_its_instances
    decisions_are_kept_newest_first
    history_is_kept_newest_first
    output_is_added_once
    output_says_which_bytes_are_of_stderr
    output_that_is_much_comes_in_pieces_after_the_settlement
    output_that_stays_away_is_given_up
    an_offset_beyond_all_output_is_survived
    events_reach_every_handle
    notes_are_written_by_who_has_the_lease_alone
}

fn write(was: Option<&str>, lease: &str, set: &[(&str, &str)], remove: &[&str]) -> Write {
    let owned = |text: &&str| (*text).to_owned();
    Write {
        was: was.map(str::to_owned),
        lease: lease.to_owned(),
        set: set.iter().map(|(k, v)| (owned(k), owned(v))).collect(),
        remove: remove.iter().map(owned).collect(),
    }
}

async fn notes_are_written_by_who_has_the_lease_alone(bed: Bed) {
    let (a, b) = (bed.store(), bed.store());
    let first = a.notices(true).await.unwrap().value;
    assert_eq!(first, Notices::default());
    let take = write(None, "a1", &[("job:x", "1"), ("job:y", "2")], &[]);
    assert_eq!(a.note(&take).await.unwrap().value, Written::Done);
    // Another one, which saw no lease, either.
    let late = write(None, "b1", &[("job:x", "3")], &["job:y"]);
    let not = Written::Not(Some("a1".to_owned()));
    assert_eq!(b.note(&late).await.unwrap().value, not);
    // The reply was lost: the same answer.
    assert_eq!(a.note(&take).await.unwrap().value, Written::Done);
    let change = write(Some("a1"), "a2", &[("job:x", "4")], &["job:y", "job:z"]);
    assert_eq!(a.note(&change).await.unwrap().value, Written::Done);
    let now = b.notices(true).await.unwrap().value;
    assert_eq!(now.lease.as_deref(), Some("a2"));
    assert_eq!(now.notes, [("job:x".to_owned(), "4".to_owned())].into());
    let lease = b.notices(false).await.unwrap().value;
    assert_eq!((lease.lease.as_deref(), lease.notes.len()), (Some("a2"), 0));
    // One note comes with the lease alone, too.
    let given_up = write(Some("a2"), "a3", &[("given_up", "é")], &[]);
    assert_eq!(a.note(&given_up).await.unwrap().value, Written::Done);
    let few = b.notices(false).await.unwrap().value;
    assert_eq!(few.notes, [("given_up".to_owned(), "é".to_owned())].into());
    let gone = write(Some("a3"), "a2", &[], &["given_up"]);
    assert_eq!(a.note(&gone).await.unwrap().value, Written::Done);
    // Taken over: a request of the one before that arrives late changes nothing.
    let over = write(Some("a2"), "b2", &[], &[]);
    assert_eq!(b.note(&over).await.unwrap().value, Written::Done);
    for stale in [
        &take,
        &change,
        &write(Some("a2"), "a3", &[("job:x", "5")], &[]),
    ] {
        let not = Written::Not(Some("b2".to_owned()));
        assert_eq!(a.note(stale).await.unwrap().value, not);
    }
    assert_eq!(a.notices(true).await.unwrap().value.notes, now.notes);
}

const MINUTE: i64 = 60_000;

fn job(name: &str) -> JobName {
    JobName::new(name)
}
fn j() -> JobName {
    job("backup")
}

fn claim(at: i64, instance: &str) -> Claim {
    Claim {
        job: j(),
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new(instance),
        host: format!("{instance}.example"),
        trigger: Trigger::Schedule,
        start_by: at + 60 * MINUTE,
        lease: 15_000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: "d1".to_owned(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

fn manual(key: &str, before: Option<i64>, instance: &str) -> Claim {
    Claim {
        target: Target::Manual {
            key: key.to_owned(),
            before: before.map(Occurrence),
        },
        trigger: Trigger::Manual,
        start_by: i64::MAX / 2,
        ..claim(0, instance)
    }
}

fn registration(name: &str, adopt: Option<&str>) -> Register {
    Register {
        schedule: "s1".to_owned(),
        definition: "d1".to_owned(),
        host: "a.example".to_owned(),
        ..crate::support::registration(&job(name), adopt.map(str::to_owned))
    }
}

fn renewal(c: &Claim, g: Grant, seq: u32) -> Renew {
    Renew {
        late: false,
        reclaim: String::new(),
        job: c.job.clone(),
        run: c.run(g, g.occurrence.0),
        seq,
    }
}

/// A holder whose run the store does not know any more has its lease put back.
async fn reclaims(s: &dyn Store, c: &Claim, g: Grant, seq: u32) {
    let ask = renewal(c, g, seq);
    let asked = patient(|| s.renew(&ask)).await;
    assert_eq!(asked.value, Renewal::Unknown);
    let again = Renew {
        reclaim: asked.incarnation.to_string(),
        ..ask
    };
    assert_eq!(s.renew(&again).await.unwrap().value, Renewal::Renewed(None));
}

fn settlement(c: &Claim, g: Grant, outcome: Outcome) -> Settle {
    Settle {
        run: c.run,
        record: RunRecord {
            outcome,
            exit_code: Some(0),
            ..RunRecord::of(&c.job, &c.run(g, g.occurrence.0))
                .lasting(Some(g.occurrence.0), Some(g.occurrence.0 + 5))
        },
        next_attempt: None,
    }
}

fn nothing() -> Tail {
    Tail::default()
}

fn observed(open: &Open) -> Option<Observed> {
    Some(Observed {
        run: open.run.id,
        seq: open.seq,
        incarnation: open.incarnation.clone(),
    })
}

async fn one(s: &dyn Store, c: &Claim) -> Answer {
    s.claim(std::slice::from_ref(c))
        .await
        .unwrap()
        .value
        .remove(0)
}

async fn granted(s: &dyn Store, c: &Claim) -> Grant {
    match one(s, c).await {
        Answer::Granted(g) => g,
        other => panic!("expected a grant, got {other:?}"),
    }
}

/// Claims again until the answer is another one than to wait for the clock.
async fn in_time(s: &dyn Store, c: &Claim) -> Answer {
    loop {
        match one(s, c).await {
            Answer::Early { wait_us } => {
                tokio::time::sleep(Duration::from_micros(wait_us as u64)).await;
            }
            Answer::Later { wait_ms } => {
                tokio::time::sleep(Duration::from_millis(wait_ms as u64)).await;
            }
            other => return other,
        }
    }
}

async fn settle(s: &dyn Store, c: &Claim, g: Grant, outcome: Outcome) -> Settlement {
    let settle = settlement(c, g, outcome);
    s.settle(&settle, &nothing()).await.unwrap().value
}

async fn state(s: &dyn Store) -> State {
    let mut states = s.observe(&[j()]).await.unwrap().value;
    states.remove(0).expect("the job is known")
}

/// The store's clock in ms, and its incarnation.
async fn now(s: &dyn Store) -> (i64, Arc<str>) {
    let r = s.observe(&[]).await.unwrap();
    (r.now_us / 1000, r.incarnation)
}

/// A handle, with the job known, and the store's time.
async fn ready(bed: &Bed) -> (Arc<dyn Store>, i64) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let r = s
        .register(&[registration("backup", Some(&incarnation))])
        .await;
    assert_eq!(r.unwrap().value[0].0, Registration::Ready);
    (s, now)
}

/// As [`ready`], with a watermark that stands so far in the future: a run was settled there by a clock that was wrong.
async fn ahead(bed: &Bed, by: i64) -> (Arc<dyn Store>, i64) {
    let s = bed.store();
    let (now, _) = now(&*s).await;
    let grant = Grant {
        occurrence: Occurrence(now + by),
        attempt: 1,
        trigger: Trigger::Schedule,
    };
    let settled = settle(&*s, &claim(now + by, "a"), grant, Outcome::Succeeded).await;
    assert_eq!(settled, Settlement::Done);
    let (s, _) = ready(bed).await;
    assert_eq!(state(&*s).await.newest, grant.occurrence.0);
    (s, now)
}

async fn register(s: &dyn Store, r: Register) -> (Registration, Option<State>) {
    s.register(&[r]).await.unwrap().value.remove(0)
}

async fn control(s: &dyn Store, what: Control) -> Controlled {
    s.control(&j(), &what).await.unwrap().value
}

async fn outcomes(s: &dyn Store) -> Vec<Outcome> {
    let records = s.history(&j(), 1000).await.unwrap();
    records.iter().map(|r| r.outcome).collect()
}

/// Does `f` until `wanted` was received: a listener may need a moment to be there.
async fn until_received<F: Future<Output = ()>>(
    events: &mut broadcast::Receiver<Event>,
    wanted: &Event,
    f: impl Fn() -> F,
) {
    tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            f().await;
            let step = tokio::time::timeout(Duration::from_millis(200), async {
                loop {
                    if events.recv().await.unwrap() == *wanted {
                        return;
                    }
                }
            });
            if step.await.is_ok() {
                return;
            }
        }
    })
    .await
    .unwrap_or_else(|_| panic!("{wanted:?} was never received"));
}

async fn receives(events: &mut broadcast::Receiver<Event>, wanted: &Event) {
    tokio::time::timeout(Duration::from_secs(30), async {
        while events.recv().await.unwrap() != *wanted {}
    })
    .await
    .unwrap_or_else(|_| panic!("{wanted:?} was never received"));
}

/// Events of this handle, once they surely arrive.
async fn listen(s: &dyn Store) -> broadcast::Receiver<Event> {
    let mut events = s.events();
    let nobody = InstanceId::new("nobody");
    until_received(&mut events, &Event::Drain, || async {
        s.drain(&nobody, false, "").await.unwrap();
    })
    .await;
    events
}

async fn an_occurrence_is_granted_once(bed: Bed) {
    let (a, now) = ready(&bed).await;
    let b = bed.store();
    let mine = claim(now, "a");
    let g = granted(&*a, &mine).await;
    assert_eq!(
        g,
        Grant {
            occurrence: Occurrence(now),
            attempt: 1,
            trigger: Trigger::Schedule
        }
    );
    assert_eq!(g.token().0, now * 1000 + 1);
    match one(&*b, &claim(now, "b")).await {
        Answer::Running(open) => {
            assert_eq!((open.run.id, open.run.instance.as_str()), (mine.run, "a"));
            assert_eq!(
                (open.run.host.as_str(), open.run.lease, open.seq),
                ("a.example", 15_000, 0)
            );
            assert_eq!(open.run.definition, "d1");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        settle(&*a, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    match one(&*b, &claim(now, "b")).await {
        Answer::Settled(Some(last)) => {
            assert_eq!((last.run, last.outcome), (mine.run, Outcome::Succeeded));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        one(&*b, &claim(now - 1000, "b")).await,
        Answer::Settled(None)
    );
    assert_eq!(outcomes(&*b).await, [Outcome::Succeeded]);
}

async fn the_same_claim_again_gets_the_same_answer(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let c = claim(now, "a");
    let first = one(&*s, &c).await;
    assert!(matches!(first, Answer::Granted(_)));
    assert_eq!(one(&*bed.store(), &c).await, first);
    assert_eq!(state(&*s).await.open.len(), 1);
}

async fn an_occurrence_in_the_future_is_early_by_the_stores_clock(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let c = claim(now + 200, "a");
    let r = s.claim(std::slice::from_ref(&c)).await.unwrap();
    assert_eq!(
        r.value[0],
        Answer::Early {
            wait_us: (now + 200) * 1000 - r.now_us
        }
    );
    assert!(matches!(in_time(&*s, &c).await, Answer::Granted(_)));
    assert!(state(&*s).await.open[0].run.granted_at >= now + 200);
}

async fn a_hundred_contenders_get_one_grant(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let stores = [s.clone(), bed.store(), bed.store(), bed.store()];
    for round in 0..3 {
        let contenders = (0..100).map(|i| {
            let s = stores[i % 4].clone();
            let c = claim(now - 10 + round, &format!("i{i}"));
            let c = Claim {
                overlap: Overlap::Allow,
                ..c
            };
            tokio::spawn(async move { one(&*s, &c).await })
        });
        let contenders: Vec<_> = contenders.collect();
        let (mut grants, mut running) = (0, 0);
        for c in contenders {
            match c.await.unwrap() {
                Answer::Granted(_) => grants += 1,
                Answer::Running(_) => running += 1,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((grants, running), (1, 99));
    }
}

async fn any_number_of_claims_is_answered_in_order(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let names: Vec<String> = (0..250).map(|i| format!("job-{i}")).collect();
    let all: Vec<Register> = names
        .iter()
        .map(|n| registration(n, Some(&incarnation)))
        .collect();
    let known = s.register(&all).await.unwrap().value;
    assert_eq!(known.len(), 250);
    assert!(
        known
            .iter()
            .all(|(r, st)| *r == Registration::Ready && st.is_some())
    );
    let claims: Vec<Claim> = names
        .iter()
        .enumerate()
        .map(|(i, n)| Claim {
            job: job(n),
            ..claim(now - 1000 + i as i64, "a")
        })
        .collect();
    let answers = s.claim(&claims).await.unwrap().value;
    assert_eq!(answers.len(), 250);
    for (i, a) in answers.iter().enumerate() {
        assert!(
            matches!(a, Answer::Granted(g) if g.occurrence.0 == now - 1000 + i as i64),
            "{i}: {a:?}"
        );
    }
    let jobs: Vec<JobName> = names.iter().map(|n| job(n)).collect();
    let states = s.observe(&jobs).await.unwrap().value;
    for (i, st) in states.iter().enumerate() {
        assert_eq!(st.as_ref().unwrap().newest, now - 1000 + i as i64);
    }
    // A batch without claims is answered, too.
    assert!(s.claim(&[]).await.unwrap().value.is_empty());
    assert!(s.register(&[]).await.unwrap().value.is_empty());
    assert!(s.observe(&[]).await.unwrap().value.is_empty());
    s.journal(&[]).await.unwrap();
}

async fn a_lease_lapses_only_when_exactly_this_one_was_observed(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    let before = state(&*s).await.open[0].clone();
    let r = s.renew(&renewal(&mine, g, 1)).await.unwrap().value;
    assert_eq!(r, Renewal::Renewed(None));
    let present = state(&*s).await.open[0].clone();
    let theirs = claim(now, "b");
    let wrong = [
        None,
        observed(&before),
        observed(&Open {
            run: Run {
                id: RunId::random(),
                ..present.run.clone()
            },
            ..present.clone()
        }),
        observed(&Open {
            incarnation: "another".to_owned(),
            ..present.clone()
        }),
        observed(&Open {
            seq: present.seq + 1,
            ..present.clone()
        }),
    ];
    for observed in wrong {
        let c = Claim {
            observed,
            holds: vec![],
            ..theirs.clone()
        };
        assert!(matches!(one(&*s, &c).await, Answer::Running(_)), "{c:?}");
    }
    let c = Claim {
        observed: observed(&present),
        ..theirs
    };
    assert!(matches!(
        one(&*s, &c).await,
        Answer::Recorded {
            outcome: Outcome::Unknown,
            ..
        }
    ));
}

async fn a_lapsed_run_is_not_run_again_unless_asked(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    let open = state(&*s).await.open[0].clone();
    while self::now(&*s).await.0 <= open.renewed_at {}
    let theirs = Claim {
        observed: observed(&open),
        ..claim(now, "b")
    };
    assert!(matches!(
        one(&*s, &theirs).await,
        Answer::Recorded {
            outcome: Outcome::Unknown,
            ..
        }
    ));
    match one(&*s, &theirs).await {
        Answer::Settled(Some(last)) => {
            assert_eq!((last.run, last.outcome), (mine.run, Outcome::Unknown));
            // The run counts as busy until its last renewal.
            assert_eq!(last.to, open.renewed_at);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Lost
    );
    let h = s.history(&j(), 10).await.unwrap();
    assert_eq!(h.len(), 1);
    assert_eq!(
        (h[0].run_id, h[0].outcome, h[0].attempt),
        (Some(mine.run), Outcome::Unknown, 1)
    );
    assert_eq!(h[0].fencing_token, Some(g.token()));
    // The state and the history say the same of its start and its end; also once its guard tells the end.
    let said = async || {
        let last = state(&*s).await.last.expect("it ended");
        (last.outcome, last.started, Some(last.ended()))
    };
    assert_eq!(
        said().await,
        (h[0].outcome, h[0].started_at, h[0].finished_at)
    );
    let told = settle(&*s, &mine, g, Outcome::Crashed).await;
    assert_eq!(told, Settlement::Lost);
    let h = s.history(&j(), 10).await.unwrap();
    assert_eq!(h[0].outcome, Outcome::Crashed);
    assert_eq!(
        said().await,
        (h[0].outcome, h[0].started_at, h[0].finished_at)
    );
}

async fn a_lapsed_run_is_taken_over_until_the_last_attempt(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let rerun = |instance: &str, observed: Option<Observed>| Claim {
        on_crash: OnCrash::Rerun,
        max_attempts: 2,
        observed,
        holds: vec![],
        ..claim(now, instance)
    };
    granted(&*s, &rerun("a", None)).await;
    let open = state(&*s).await.open[0].clone();
    let second = rerun("b", observed(&open));
    let g = granted(&*s, &second).await;
    assert_eq!((g.attempt, g.trigger), (2, Trigger::Takeover));
    assert_eq!(g.token().0, now * 1000 + 2);
    // The claim is sent again after a lost reply; and the first holder learns that its lease is over.
    assert_eq!(one(&*s, &second).await, Answer::Granted(g));
    let open = state(&*s).await.open[0].clone();
    assert_eq!(open.run.id, second.run);
    let third = rerun("c", observed(&open));
    assert!(matches!(
        one(&*s, &third).await,
        Answer::Recorded {
            outcome: Outcome::Unknown,
            ..
        }
    ));
    assert!(matches!(
        one(&*s, &rerun("d", None)).await,
        Answer::Settled(Some(_))
    ));
    assert_eq!(outcomes(&*s).await, [Outcome::Unknown, Outcome::Unknown]);
}

async fn a_retry_waits_for_its_time(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mut events = listen(&*s).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 300,
            trigger: Trigger::Retry,
        }),
        ..settlement(&mine, g, Outcome::Failed)
    };
    let r = s.settle(&failed, &nothing()).await.unwrap();
    assert_eq!(r.value, Settlement::Done);
    receives(
        &mut events,
        &Event::AttemptAwaited {
            job: j(),
            occurrence: Occurrence(now),
        },
    )
    .await;
    let due = r.now_us / 1000 + 300;
    assert_eq!(
        state(&*s).await.open[0].next_attempt,
        Some(NextAttempt {
            at: due,
            trigger: Trigger::Retry
        })
    );
    let theirs = claim(now, "b");
    let asked = s.claim(std::slice::from_ref(&theirs)).await.unwrap();
    assert_eq!(
        asked.value[0],
        Answer::Later {
            wait_ms: due - asked.now_us / 1000
        }
    );
    // The run that had its turn does not get the next attempt.
    assert_eq!(one(&*s, &mine).await, Answer::Settled(None));
    match in_time(&*s, &theirs).await {
        Answer::Granted(g) => assert_eq!((g.attempt, g.trigger), (2, Trigger::Retry)),
        other => panic!("{other:?}"),
    }
    assert!(state(&*s).await.open[0].run.granted_at >= due);
    assert!(matches!(one(&*s, &claim(now, "c")).await, Answer::Running(o) if o.run.attempt == 2));
}

async fn overlap_skip_records_the_newer_occurrence(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    let over = Answer::Recorded {
        outcome: Outcome::Skipped,
        reason: OVERLAPS.to_owned(),
    };
    // An overdue occurrence, and nothing ran when it was due: it is not skipped because of a run that began later.
    let overdue = one(&*s, &claim(now - 500, "b")).await;
    assert!(matches!(overdue, Answer::Blocked(_)), "{overdue:?}");
    let began = state(&*s).await.open[0].run.granted_at;
    assert_eq!(one(&*s, &claim(began, "b")).await, over);
    while self::now(&*s).await.0 < began + 30 {}
    let mut settlement = settlement(&mine, g, Outcome::Succeeded);
    settlement.record.finished_at = Some(began + 20);
    let settled = s.settle(&settlement, &nothing()).await.unwrap();
    assert_eq!(settled.value, Settlement::Done);
    // The run was going on when this occurrence was due, but not when the next one was, however late its end was
    // recorded.
    assert_eq!(one(&*s, &claim(began + 10, "b")).await, over);
    let next = claim(began + 25, "b");
    assert!(matches!(in_time(&*s, &next).await, Answer::Granted(_)));
}

async fn overlap_skip_waits_where_the_holder_may_be_dead(bed: Bed) {
    let (s, now) = ready(&bed).await;
    granted(&*s, &claim(now, "a")).await;
    let renewed_at = state(&*s).await.open[0].renewed_at;
    // No sign of life since this occurrence was due: the run before may be dead.
    let next = claim(renewed_at + 50, "b");
    assert!(matches!(in_time(&*s, &next).await, Answer::Blocked(o) if o.run.occurrence.0 == now));
    assert!(state(&*s).await.waiting);
    let open = state(&*s).await.open[0].clone();
    let next = Claim {
        observed: observed(&open),
        ..next
    };
    assert!(
        matches!(one(&*s, &next).await, Answer::Granted(g) if g.occurrence.0 == renewed_at + 50)
    );
    assert_eq!(outcomes(&*s).await, [Outcome::Unknown]);
    // The holder knows that its run lives; another process of the same name does not.
    let open = state(&*s).await.open[0].clone();
    let namesake = claim(open.run.granted_at + 10, "b");
    assert!(matches!(in_time(&*s, &namesake).await, Answer::Blocked(o) if o.run.id == open.run.id));
    let own = Claim {
        holds: vec![open.run.id],
        ..namesake
    };
    assert!(matches!(
        in_time(&*s, &own).await,
        Answer::Recorded {
            outcome: Outcome::Skipped,
            ..
        }
    ));
}

async fn overlap_queue_waits_for_the_end(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let other = bed.store();
    let mut events = listen(&*other).await;
    let mine = claim(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    let next = Claim {
        overlap: Overlap::Queue,
        ..claim(now - 500, "b")
    };
    assert!(matches!(one(&*s, &next).await, Answer::Blocked(o) if o.run.id == mine.run));
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    receives(&mut events, &Event::Ended { job: j() }).await;
    assert!(matches!(one(&*s, &next).await, Answer::Granted(_)));
    assert!(!state(&*s).await.waiting);
}

async fn overlap_queue_lets_a_retry_go_first(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let queue = |at, instance: &str| Claim {
        overlap: Overlap::Queue,
        ..claim(at, instance)
    };
    let mine = queue(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 200,
            trigger: Trigger::Retry,
        }),
        ..settlement(&mine, g, Outcome::Failed)
    };
    let _ = s.settle(&failed, &nothing()).await.unwrap();
    let next = queue(now - 500, "b");
    assert!(matches!(one(&*s, &next).await, Answer::Later { wait_ms } if wait_ms <= 200));
    assert_eq!(
        in_time(&*s, &next).await,
        Answer::RunFirst(Occurrence(now - 1000))
    );
    let retry = queue(now - 1000, "b");
    let g = granted(&*s, &retry).await;
    assert_eq!(g.attempt, 2);
    assert_eq!(
        settle(&*s, &retry, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(matches!(one(&*s, &next).await, Answer::Granted(_)));
}

async fn overlap_replace_ends_the_older_run(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mut events = listen(&*s).await;
    let replace = |at, instance: &str| Claim {
        overlap: Overlap::Replace,
        ..claim(at, instance)
    };
    let mine = replace(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    let next = replace(now - 500, "b");
    assert!(
        matches!(one(&*s, &next).await, Answer::Blocked(o) if o.stop == Some(StopRequest::Replaced))
    );
    receives(&mut events, &Event::Stop { job: j() }).await;
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Renewed(Some(StopRequest::Replaced))
    );
    // Asked to end on purpose: no further attempt.
    let replaced = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Retry,
        }),
        ..settlement(&mine, g, Outcome::Replaced)
    };
    assert_eq!(
        s.settle(&replaced, &nothing()).await.unwrap().value,
        Settlement::Done
    );
    assert!(matches!(one(&*s, &next).await, Answer::Granted(g) if g.attempt == 1));
}

async fn overlap_allow_runs_both(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let allow = |at, instance: &str| Claim {
        overlap: Overlap::Allow,
        ..claim(at, instance)
    };
    let (first, second) = (allow(now - 1000, "a"), allow(now - 500, "b"));
    let g1 = granted(&*s, &first).await;
    let g2 = granted(&*s, &second).await;
    assert!(g2.token() > g1.token());
    assert_eq!(state(&*s).await.open.len(), 2);
    assert_eq!(one(&*s, &first).await, Answer::Granted(g1));
    assert!(
        matches!(one(&*s, &allow(now - 1000, "c")).await, Answer::Running(o) if o.run.id == first.run)
    );
    for (c, g) in [(&first, g1), (&second, g2)] {
        assert_eq!(
            s.renew(&renewal(c, g, 1)).await.unwrap().value,
            Renewal::Renewed(None)
        );
        assert_eq!(
            settle(&*s, c, g, Outcome::Succeeded).await,
            Settlement::Done
        );
    }
    assert!(state(&*s).await.open.is_empty());
}

async fn a_change_away_from_allow_does_not_overlap(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let allow = |at, instance: &str| Claim {
        overlap: Overlap::Allow,
        ..claim(at, instance)
    };
    let (first, second) = (allow(now - 1000, "a"), allow(now - 900, "b"));
    let g = granted(&*s, &first).await;
    granted(&*s, &second).await;
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Retry,
        }),
        ..settlement(&first, g, Outcome::Failed)
    };
    let _ = s.settle(&failed, &nothing()).await.unwrap();
    // What is open now: a retry of the first, and the second, which runs.
    let queue = |at| Claim {
        overlap: Overlap::Queue,
        ..claim(at, "c")
    };
    assert!(
        matches!(one(&*s, &queue(now - 1000)).await, Answer::Blocked(o) if o.run.id == second.run)
    );
    assert!(matches!(in_time(&*s, &queue(now)).await, Answer::RunFirst(o) if o.0 == now - 1000));
    let replace = Claim {
        overlap: Overlap::Replace,
        ..claim(now, "c")
    };
    assert!(matches!(one(&*s, &replace).await, Answer::Blocked(o) if o.run.id == second.run));
}

async fn a_takeover_comes_before_a_newer_occurrence(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let rerun = |at, observed: Option<Observed>| Claim {
        on_crash: OnCrash::Rerun,
        max_attempts: 3,
        observed,
        holds: vec![],
        ..claim(at, "b")
    };
    granted(
        &*s,
        &Claim {
            instance: InstanceId::new("a"),
            ..rerun(now - 1000, None)
        },
    )
    .await;
    let open = state(&*s).await.open[0].clone();
    let next = rerun(now - 500, observed(&open));
    assert_eq!(
        one(&*s, &next).await,
        Answer::RunFirst(Occurrence(now - 1000))
    );
    assert_eq!(
        one(&*s, &next).await,
        Answer::RunFirst(Occurrence(now - 1000))
    );
    let first = rerun(now - 1000, None);
    let g = granted(&*s, &first).await;
    assert_eq!((g.attempt, g.trigger), (2, Trigger::Takeover));
    assert_eq!(
        settle(&*s, &first, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(matches!(
        one(&*s, &Claim { overlap: Overlap::Queue, ..next }).await,
        Answer::Granted(g) if g.attempt == 1
    ));
}

async fn a_retry_gives_way_to_a_newer_occurrence(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = Claim {
        overlap: Overlap::Replace,
        ..claim(now - 1000, "a")
    };
    let g = granted(&*s, &mine).await;
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Retry,
        }),
        ..settlement(&mine, g, Outcome::Failed)
    };
    let _ = s.settle(&failed, &nothing()).await.unwrap();
    let next = Claim {
        overlap: Overlap::Replace,
        ..claim(now - 500, "b")
    };
    let g2 = granted(&*s, &next).await;
    assert!(g2.token() > g.token());
    assert!(matches!(
        one(&*s, &claim(now - 1000, "c")).await,
        Answer::Settled(_)
    ));
    assert_eq!(state(&*s).await.open.len(), 1);
}

/// A takeover that was dated by a clock that was an hour ahead must not hold the job up for an hour.
async fn a_takeover_is_due_at_once(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    let crashed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 3_600_000,
            trigger: Trigger::Takeover,
        }),
        ..settlement(&mine, g, Outcome::Crashed)
    };
    let _ = s.settle(&crashed, &nothing()).await.unwrap();
    let g = granted(&*s, &claim(now - 1000, "b")).await;
    assert_eq!((g.attempt, g.trigger), (2, Trigger::Takeover));
}

/// An instance that knows nothing of the job has begun it anew; another one still claims what was due before.
async fn what_may_have_run_before_a_loss_is_not_granted(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let begins = |name: &str, lost_before: i64| Register {
        lost_before,
        ..registration(name, Some(&incarnation))
    };
    // `rerun`: it is granted, although it may have run. So is it if the date of the loss cannot be right.
    let jobs = [
        begins("backup", now - 1000),
        begins("again", 0),
        begins("wrong", now + MINUTE),
    ];
    let _ = s.register(&jobs).await.unwrap();
    let of = |name: &str, at: i64| Claim {
        job: job(name),
        ..claim(at, "b")
    };
    let unknown = Answer::Recorded {
        outcome: Outcome::Unknown,
        reason: LOST.to_owned(),
    };
    assert_eq!(one(&*s, &of("backup", now - 2000)).await, unknown);
    let again = one(&*s, &of("backup", now - 2000)).await;
    assert_eq!(again, Answer::Settled(None));
    assert_eq!(one(&*s, &of("backup", now - 1000)).await, unknown);
    let records = s.history(&job("backup"), 9).await.unwrap();
    let told: Vec<_> = records
        .iter()
        .map(|r| (r.occurrence.0, r.outcome))
        .collect();
    let lost = |at| (at, Outcome::Unknown);
    assert_eq!(told, [lost(now - 1000), lost(now - 2000)]);
    // What was due after the loss runs.
    for (name, at) in [
        ("backup", now - 999),
        ("again", now - 2000),
        ("wrong", now - 2000),
    ] {
        let answer = one(&*s, &of(name, at)).await;
        assert!(matches!(answer, Answer::Granted(_)), "{name}: {answer:?}");
        let state = s.observe(&[job(name)]).await.unwrap().value.remove(0);
        let left = state.map(|st| (st.newest, st.lost_before > at));
        assert_eq!(left, Some((at, false)), "{name}");
    }
}

/// What was planned between the loss and the adoption, decided by several claims.
async fn what_a_loss_kept_from_running_is_one_record(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let begins = Register {
        lost_before: now - 90_000,
        ..registration("backup", Some(&incarnation))
    };
    let _ = s.register(&[begins]).await.unwrap();
    let why = why_kept_back(&*s, "the store had lost its data, ").await;
    let kept_back = Answer::Recorded {
        outcome: Outcome::Missed,
        reason: why.clone(),
    };
    let given_up = |missed: &[i64], at: i64| Claim {
        missed: (missed.iter().map(|at| Missed::one(Occurrence(now - at)))).collect(),
        start_by: NEVER,
        ..claim(now - at, "a")
    };
    let before = claim(now - 85_000, "a");
    let run = granted(&*s, &before).await;
    let first = one(&*s, &given_up(&[80_000, 70_000], 60_000)).await;
    assert_eq!(first, kept_back);
    // What is recorded meanwhile of another occurrence stays.
    let settled = settle(&*s, &before, run, Outcome::Succeeded).await;
    assert_eq!(settled, Settlement::Done);
    assert_eq!(one(&*s, &given_up(&[], 50_000)).await, kept_back);
    // It runs, and the next one comes too late again.
    let runs = Claim {
        missed: vec![Missed::one(Occurrence(now - 40_000))],
        overlap: Overlap::Allow,
        ..claim(now - 30_000, "a")
    };
    assert!(matches!(one(&*s, &runs).await, Answer::Granted(_)));
    let late = Claim {
        start_by: now - 1,
        overlap: Overlap::Allow,
        ..given_up(&[], 20_000)
    };
    assert_eq!(one(&*s, &late).await, kept_back);
    let records = s.history(&j(), 9).await.unwrap();
    let told: Vec<_> = records
        .iter()
        .map(|r| (now - r.occurrence.0, r.count, r.outcome, r.error.as_deref()))
        .collect();
    let one = |at, count| (at, count, Outcome::Missed, Some(&*why));
    let ran = (85_000, 1, Outcome::Succeeded, None);
    assert_eq!(told, [one(20_000, 1), one(40_000, 5), ran]);
}

/// What the records of the job say of what a loss of the data kept from running; it names the time of the adoption.
async fn why_kept_back(s: &dyn Store, begins: &str) -> String {
    let state = s.observe(&[j()]).await.unwrap().value.remove(0);
    let state = state.expect("a state");
    let until = format!(" granted nothing until {}", Occurrence(state.lost_until));
    assert!(
        state.lost_why.starts_with(begins) && state.lost_why.ends_with(&until),
        "{state:?}"
    );
    state.lost_why
}

/// An instance that knew nothing of the job waited for the store, and so does another one that claims late.
async fn what_the_first_wait_kept_from_running_is_one_record(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let begins = Register {
        lost_before: now - 91_000,
        waits_since: now - 90_000,
        ..registration("backup", Some(&incarnation))
    };
    let _ = s.register(&[begins]).await.unwrap();
    let why = why_kept_back(&*s, "the store was new, ").await;
    let kept_back = Answer::Recorded {
        outcome: Outcome::Skipped,
        reason: why.clone(),
    };
    assert_eq!(
        control(&*s, Control::Skip { count: 1 }).await,
        Controlled::Done
    );
    let catches_up = Claim {
        missed: vec![
            Missed::one(Occurrence(now - 80_000)),
            Missed::one(Occurrence(now - 70_000)),
        ],
        trigger: Trigger::CatchUp,
        ..claim(now - 60_000, "a")
    };
    assert_eq!(one(&*s, &catches_up).await, kept_back);
    assert_eq!(one(&*s, &catches_up).await, Answer::Settled(None));
    let late = Claim {
        start_by: now - 1,
        ..claim(now - 50_000, "b")
    };
    assert_eq!(one(&*s, &late).await, kept_back);
    let left = s
        .observe(&[j()])
        .await
        .unwrap()
        .value
        .remove(0)
        .expect("a state");
    assert_eq!(
        (left.since, left.first_wait, left.skip),
        (now - 90_000, true, 1)
    );
    // One that nobody has any more has its own reason.
    assert_eq!(
        control(&*s, Control::Skip { count: 0 }).await,
        Controlled::Done
    );
    let removed = Claim {
        start_by: claim::REMOVED,
        ..claim(now - 40_000, "b")
    };
    let reason = claim::JOB_REMOVED.to_owned();
    assert_eq!(
        one(&*s, &removed).await,
        Answer::Recorded {
            outcome: Outcome::Missed,
            reason
        }
    );
    let records = s.history(&j(), 9).await.unwrap();
    let told: Vec<_> = records
        .iter()
        .map(|r| (now - r.occurrence.0, r.count, r.outcome, r.error.as_deref()))
        .collect();
    assert_eq!(
        told,
        [
            (40_000, 1, Outcome::Missed, Some(claim::JOB_REMOVED)),
            (50_000, 4, Outcome::Skipped, Some(&*why))
        ]
    );
}

async fn what_cannot_be_started_in_time_is_missed(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let late = Claim {
        start_by: now - 1000,
        cause: Some(Wait::Slot),
        ..claim(now - 2000, "a")
    };
    let too_late = format!("{TOO_LATE}: {}", Wait::Slot.cause());
    let missed = Answer::Recorded {
        outcome: Outcome::Missed,
        reason: too_late.clone(),
    };
    assert_eq!(one(&*s, &late).await, missed);
    assert!(matches!(one(&*s, &late).await, Answer::Settled(None)));
    let range = |first: i64, last: i64, count| Missed {
        first: Occurrence(first),
        last: Occurrence(last),
        count,
    };
    let c = Claim {
        trigger: Trigger::CatchUp,
        // The first is decided already, the last is not before the target.
        missed: vec![
            range(now - 3000, now - 2000, 4),
            range(now - 1900, now - 1200, 7),
            range(now - 1100, now - 1050, 2),
            range(now - 1000, now - 1000, 9),
        ],
        cause: Some(Wait::Overdue),
        ..claim(now - 1000, "a")
    };
    assert!(matches!(one(&*s, &c).await, Answer::Granted(g) if g.trigger == Trigger::CatchUp));
    let h = s.history(&j(), 10).await.unwrap();
    let seen: Vec<_> = h
        .iter()
        .map(|r| {
            (
                r.occurrence.0 - now,
                r.count,
                r.outcome,
                r.error.as_deref().unwrap(),
            )
        })
        .collect();
    let overdue = format!("{OVERDUE}: {}", Wait::Overdue.cause());
    assert_eq!(
        seen,
        [
            (-1050, 2, Outcome::Missed, overdue.as_str()),
            (-1200, 7, Outcome::Missed, overdue.as_str()),
            (-2000, 1, Outcome::Missed, too_late.as_str())
        ]
    );
}

async fn a_pause_skips_until_it_ends(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let pause = |until| Control::Pause {
        until,
        reason: Some("night \"shift\" / ü".to_owned()),
    };
    assert_eq!(control(&*s, Control::Resume).await, Controlled::Nothing);
    assert_eq!(control(&*s, pause(None)).await, Controlled::Done);
    let reason = "paused: night \"shift\" / ü".to_owned();
    let skipped = Answer::Recorded {
        outcome: Outcome::Skipped,
        reason,
    };
    assert_eq!(one(&*s, &claim(now - 900, "a")).await, skipped);
    assert_eq!(control(&*s, Control::Resume).await, Controlled::Done);
    assert_eq!(
        control(
            &*s,
            Control::Pause {
                until: None,
                reason: None
            }
        )
        .await,
        Controlled::Done
    );
    let plain = Answer::Recorded {
        outcome: Outcome::Skipped,
        reason: "paused".to_owned(),
    };
    assert_eq!(one(&*s, &claim(now - 800, "a")).await, plain);
    let (t, _) = self::now(&*s).await;
    assert_eq!(control(&*s, pause(Some(t + 300))).await, Controlled::Done);
    assert_eq!(one(&*s, &claim(now - 700, "a")).await, skipped);
    // A person asked for the trigger: it runs in a pause too.
    assert_eq!(
        control(&*s, Control::Trigger { key: "k".into() }).await,
        Controlled::Done
    );
    let by_hand = manual("k", None, "a");
    let g = granted(&*s, &by_hand).await;
    assert_eq!(
        settle(&*s, &by_hand, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    let after = claim(t + 300, "a");
    assert!(matches!(in_time(&*s, &after).await, Answer::Granted(_)));
    assert_eq!(state(&*s).await.pause, None);
    assert_eq!(control(&*s, Control::Resume).await, Controlled::Nothing);
}

/// Nothing was missed, and what one pause kept from running is one record.
async fn what_comes_late_in_a_pause_is_skipped(bed: Bed) {
    let (s, _) = ready(&bed).await;
    let pause = Control::Pause {
        until: None,
        reason: Some("night \"shift\" / ü".to_owned()),
    };
    assert_eq!(control(&*s, pause).await, Controlled::Done);
    let skipped = Answer::Recorded {
        outcome: Outcome::Skipped,
        reason: "paused: night \"shift\" / ü".to_owned(),
    };
    let at = self::now(&*s).await.0 + 20;
    let late = |at: i64| Claim {
        start_by: NEVER,
        missed: vec![Missed::one(Occurrence(at - 10))],
        known: Occurrence(at - 20),
        ..claim(at, "a")
    };
    assert_eq!(in_time(&*s, &late(at)).await, skipped);
    assert_eq!(in_time(&*s, &late(at + 20)).await, skipped);
    let seen = s.history(&j(), 10).await.unwrap();
    let seen: Vec<_> = seen
        .iter()
        .map(|r| (r.occurrence.0 - at, r.count, r.outcome))
        .collect();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(seen[0], (20, 4, Outcome::Skipped));
}

async fn skips_are_counted(bed: Bed) {
    let (s, now) = ready(&bed).await;
    assert_eq!(
        control(&*s, Control::Skip { count: 2 }).await,
        Controlled::Done
    );
    for i in 0..2 {
        assert!(matches!(
            one(&*s, &claim(now - 100 + i, "a")).await,
            Answer::Recorded {
                outcome: Outcome::Skipped,
                ..
            }
        ));
    }
    assert!(matches!(
        one(&*s, &claim(now - 50, "a")).await,
        Answer::Granted(_)
    ));
    assert_eq!(
        control(&*s, Control::Skip { count: 5 }).await,
        Controlled::Done
    );
    assert_eq!(
        control(&*s, Control::Skip { count: 0 }).await,
        Controlled::Done
    );
    assert_eq!(state(&*s).await.skip, 0);
}

async fn a_cancel_reaches_the_holder(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mut events = listen(&*s).await;
    assert_eq!(control(&*s, Control::Cancel).await, Controlled::Nothing);
    let mine = claim(now - 1000, "a");
    let g = granted(&*s, &mine).await;
    assert_eq!(
        control(&*s, Control::Cancel).await,
        Controlled::Stopping(vec![mine.run])
    );
    receives(&mut events, &Event::Stop { job: j() }).await;
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Renewed(Some(StopRequest::Cancelled))
    );
    let retry = |c: &Claim, g, outcome| Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 60_000,
            trigger: Trigger::Retry,
        }),
        ..settlement(c, g, outcome)
    };
    let cancelled = retry(&mine, g, Outcome::Cancelled);
    assert_eq!(
        s.settle(&cancelled, &nothing()).await.unwrap().value,
        Settlement::Done
    );
    assert!(state(&*s).await.open.is_empty());
    // What waits for its next attempt is dropped.
    let (t, _) = self::now(&*s).await;
    let next = claim(t, "a");
    let g = granted(&*s, &next).await;
    let _ = s
        .settle(&retry(&next, g, Outcome::Failed), &nothing())
        .await
        .unwrap();
    assert_eq!(state(&*s).await.open.len(), 1);
    assert_eq!(control(&*s, Control::Cancel).await, Controlled::Done);
    assert!(state(&*s).await.open.is_empty());
}

async fn records_say_who_asked(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let by = |what: Control, who: &str| control(&*s, what.by(who));
    let pause = Control::Pause {
        until: None,
        reason: Some("moving".to_owned()),
    };
    assert_eq!(by(pause, "alice@web-1").await, Controlled::Done);
    // In its time, and two that come late: one record, which goes on.
    for at in [now - 3000, now - 2900, now - 2800] {
        let late = Claim {
            start_by: if at == now - 3000 { i64::MAX / 2 } else { at },
            ..claim(at, "a")
        };
        assert!(matches!(one(&*s, &late).await, Answer::Recorded { .. }));
    }
    assert_eq!(by(Control::Resume, "bob \"x\" ü").await, Controlled::Done);
    let resumed_by = state(&*s).await.resumed_by;
    assert_eq!(resumed_by.as_deref(), Some("bob \"x\" ü"));
    let skip = Control::Skip { count: 1 };
    assert_eq!(by(skip, "carol").await, Controlled::Done);
    let skipped = one(&*s, &claim(now - 2500, "a")).await;
    assert!(matches!(skipped, Answer::Recorded { .. }), "{skipped:?}");
    // A trigger, and its retry, which somebody else cancels.
    let put = |key: &str| Control::Trigger {
        key: key.to_owned(),
    };
    assert_eq!(by(put("k"), "dave/\"\n\"").await, Controlled::Done);
    let mine = manual("k", None, "a");
    let Answer::Granted(g) = in_time(&*s, &mine).await else {
        panic!("no grant")
    };
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Retry,
        }),
        ..settlement(&mine, g, Outcome::Failed)
    };
    let _ = s.settle(&failed, &nothing()).await.unwrap();
    let again = manual("k", None, "b");
    let Answer::Granted(g) = in_time(&*s, &again).await else {
        panic!("no grant")
    };
    let asked = by(Control::Cancel, "erin").await;
    assert_eq!(asked, Controlled::Stopping(vec![again.run]));
    let _ = settle(&*s, &again, g, Outcome::Cancelled).await;
    // One that nobody starts, and one whose instance vanishes.
    assert_eq!(by(put("l"), "frank").await, Controlled::Done);
    let late = Claim {
        start_by: 0,
        ..manual("l", None, "a")
    };
    assert!(matches!(one(&*s, &late).await, Answer::Recorded { .. }));
    assert_eq!(by(put("m"), "grace").await, Controlled::Done);
    let gone = manual("m", None, "a");
    assert!(matches!(in_time(&*s, &gone).await, Answer::Granted(_)));
    let open = state(&*s).await.open.remove(0);
    let proof = Claim {
        observed: observed(&open),
        ..manual("m", None, "b")
    };
    assert!(matches!(one(&*s, &proof).await, Answer::Recorded { .. }));
    let records = s.history(&j(), 100).await.unwrap();
    let said: Vec<_> = records
        .iter()
        .rev()
        .map(|r| (r.outcome, r.by.as_deref()))
        .collect();
    assert_eq!(
        said,
        [
            (Outcome::Skipped, Some("alice@web-1")),
            (Outcome::Skipped, Some("carol")),
            (Outcome::Failed, Some("dave/\"\"")),
            (Outcome::Cancelled, Some("erin")),
            (Outcome::Missed, Some("frank")),
            (Outcome::Unknown, Some("grace")),
        ]
    );
    let asked = by(Control::Skip { count: 2 }, &"ü".repeat(200)).await;
    assert_eq!(asked, Controlled::Done);
    assert_eq!(state(&*s).await.skip_by, Some("ü".repeat(100)));
}

async fn a_trigger_runs_once_for_its_key(bed: Bed) {
    let (s, _) = ready(&bed).await;
    let mut events = listen(&*s).await;
    let key = "by \"hand\" / ü 1".to_owned();
    let put = || Control::Trigger { key: key.clone() };
    assert!(matches!(
        one(&*s, &manual(&key, None, "a")).await,
        Answer::Settled(None)
    ));
    assert_eq!(control(&*s, put()).await, Controlled::Done);
    receives(
        &mut events,
        &Event::Triggered {
            job: j(),
            key: key.clone(),
            at: state(&*s).await.triggers[0].at,
        },
    )
    .await;
    assert_eq!(control(&*s, put()).await, Controlled::Nothing);
    let mine = manual(&key, None, "a");
    let asked = s.claim(std::slice::from_ref(&mine)).await.unwrap();
    let Answer::Granted(g) = asked.value[0] else {
        panic!("{asked:?}")
    };
    assert_eq!(
        (g.occurrence.0, g.trigger),
        (asked.now_us / 1000, Trigger::Manual)
    );
    assert_eq!(one(&*s, &mine).await, Answer::Granted(g));
    assert!(
        matches!(one(&*s, &manual(&key, None, "b")).await, Answer::Running(o) if o.run.key == Some(key.clone()))
    );
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(
        matches!(one(&*s, &manual(&key, None, "b")).await, Answer::Settled(Some(l)) if l.run == mine.run)
    );
    assert_eq!(
        control(&*s, put()).await,
        Controlled::Triggered(g.occurrence)
    );
    assert!(state(&*s).await.triggers.is_empty());
    // However many triggers come after it, with keys or without, it is the same run.
    for i in 0..80 {
        let key = match i % 2 {
            0 => format!("k{i}"),
            _ => format!("{OWN_KEY}{i}"),
        };
        assert_eq!(
            control(&*s, Control::Trigger { key: key.clone() }).await,
            Controlled::Done
        );
        let c = manual(&key, None, "a");
        let Answer::Granted(g) = in_time(&*s, &c).await else {
            panic!("{key} was not granted")
        };
        assert_eq!(
            settle(&*s, &c, g, Outcome::Succeeded).await,
            Settlement::Done
        );
    }
    assert_eq!(
        control(&*s, put()).await,
        Controlled::Triggered(g.occurrence)
    );
    let (now, _) = self::now(&*s).await;
    let first = &state(&*s).await.triggered[0];
    assert_eq!(
        (&first.key, first.occurrence, first.at <= now),
        (&key, g.occurrence, true)
    );
}

/// Decided occurrences lie in the future of the store's clock, which was corrected.
async fn a_trigger_that_has_no_room_waits_and_is_recorded_in_the_end(bed: Bed) {
    let (s, now) = ahead(&bed, 60 * MINUTE).await;
    let put = Control::Trigger { key: "k".into() };
    assert_eq!(control(&*s, put.clone()).await, Controlled::Done);
    let put_in = state(&*s).await.triggers[0].at;
    // It is recorded at its own time, not at that of its record.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let c = manual("k", None, "a");
    match one(&*s, &c).await {
        // The trigger waits until there is room.
        Answer::Early { wait_us } => assert!(
            (59 * MINUTE * 1000..61 * MINUTE * 1000).contains(&wait_us),
            "{wait_us}"
        ),
        other => panic!("{other:?}"),
    }
    let passed = Claim {
        start_by: PASSED,
        ..c
    };
    let missed = Answer::Recorded {
        outcome: Outcome::Missed,
        reason: TOO_LATE.to_owned(),
    };
    assert_eq!(one(&*s, &passed).await, missed);
    let record = s.history(&j(), 10).await.unwrap().remove(0);
    assert_eq!(record.outcome, Outcome::Missed);
    assert!((0..2).contains(&(record.occurrence.0 - put_in)));
    assert_ne!(
        record.occurrence.0 % 1000,
        0,
        "a scheduled one has that name"
    );
    let st = state(&*s).await;
    assert_eq!((st.newest, st.triggers), (now + 60 * MINUTE, vec![]));
    assert_eq!(
        control(&*s, put).await,
        Controlled::Triggered(record.occurrence)
    );
}

/// An instance that gives up a trigger may not know all that was decided: an undecided occurrence is still decided
/// after it.
async fn a_trigger_that_is_given_up_jumps_over_nothing(bed: Bed) {
    let (s, now) = ready(&bed).await;
    granted(&*s, &claim(now - 5000, "a")).await;
    let put = Control::Trigger { key: "k".into() };
    assert_eq!(control(&*s, put).await, Controlled::Done);
    let given_up = Claim {
        start_by: PASSED,
        ..manual("k", Some(now - 6000), "b")
    };
    assert!(matches!(
        one(&*s, &given_up).await,
        Answer::Recorded {
            outcome: Outcome::Missed,
            ..
        }
    ));
    assert_eq!(state(&*s).await.newest, now - 5000);
    let next = Claim {
        overlap: Overlap::Allow,
        ..claim(now - 4000, "b")
    };
    granted(&*s, &next).await;
}

/// The reason says so where the store's clock stood in the way.
async fn what_passed_while_the_clock_was_in_doubt_says_so(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let key = || Control::Trigger {
        key: "k".to_owned(),
    };
    assert_eq!(control(&*s, key()).await, Controlled::Done);
    for c in [claim(now - 10, "a"), manual("k", None, "a")] {
        let passed = Claim {
            start_by: PASSED_IN_DOUBT,
            ..c
        };
        let recorded = Answer::Recorded {
            outcome: Outcome::Missed,
            reason: IN_DOUBT.to_owned(),
        };
        assert_eq!(one(&*s, &passed).await, recorded);
    }
}

/// Some of a range was decided after it was counted: the claimant has to count anew.
async fn a_range_that_is_decided_in_part_is_not_recorded_whole(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let first = claim(now - 5000, "a");
    let g = granted(&*s, &first).await;
    assert_eq!(
        settle(&*s, &first, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    let range = |first: i64, last: i64, count| Missed {
        first: Occurrence(now - first),
        last: Occurrence(now - last),
        count,
    };
    let giving_up = |missed| Claim {
        missed,
        ..claim(now - 1000, "b")
    };
    let behind = Answer::Behind {
        newest: Occurrence(now - 5000),
        early: vec![],
    };
    for missed in [
        vec![range(9000, 2000, 8)],
        vec![range(5000, 2000, 4)],
        vec![range(9000, 6000, 4), range(5500, 4500, 3)],
    ] {
        assert_eq!(one(&*s, &giving_up(missed)).await, behind);
    }
    assert_eq!(state(&*s).await.newest, now - 5000);
    assert_eq!(s.history(&j(), 10).await.unwrap().len(), 1);
    let left = vec![range(9000, 5000, 5), range(4000, 2000, 3)];
    let _ = granted(&*s, &giving_up(left)).await;
    let missed = s.history(&j(), 10).await.unwrap().remove(0);
    assert_eq!(
        (missed.outcome, missed.occurrence.0, missed.count),
        (Outcome::Missed, now - 2000, 3)
    );
}

/// "Nothing starts" is what a pause says: neither a retry nor the rerun after a crash.
async fn a_pause_holds_attempts_back(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mut events = listen(&*s).await;
    let pause = |until| Control::Pause {
        until,
        reason: None,
    };
    let rerun = |at: i64, instance: &str| Claim {
        on_crash: OnCrash::Rerun,
        max_attempts: 5,
        ..claim(at, instance)
    };
    let first = rerun(now - 5000, "a");
    let g = granted(&*s, &first).await;
    assert_eq!(control(&*s, pause(None)).await, Controlled::Done);
    // It fails in the pause, and its retry is due at once.
    let failed = Settle {
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Retry,
        }),
        ..settlement(&first, g, Outcome::Failed)
    };
    let done = s.settle(&failed, &nothing()).await.unwrap().value;
    assert_eq!(done, Settlement::Done);
    let second = rerun(now - 5000, "b");
    assert!(matches!(one(&*s, &second).await, Answer::Later { wait_ms } if wait_ms > 1000));
    // The pause goes on without it, and it waits.
    let newer = Claim {
        overlap: Overlap::Queue,
        ..rerun(now - 4000, "a")
    };
    assert!(matches!(
        one(&*s, &newer).await,
        Answer::Recorded {
            outcome: Outcome::Skipped,
            ..
        }
    ));
    let at = Occurrence(now - 5000);
    until_received(
        &mut events,
        &Event::AttemptAwaited {
            job: j(),
            occurrence: at,
        },
        || async {
            let _ = control(&*s, pause(None)).await;
            let _ = control(&*s, Control::Resume).await;
        },
    )
    .await;
    let g = granted(&*s, &second).await;
    assert_eq!((g.occurrence, g.attempt), (at, 2));
    // The holder vanishes in a pause: that is found out and recorded, and the rerun waits.
    assert_eq!(control(&*s, pause(None)).await, Controlled::Done);
    let third = Claim {
        observed: observed(&state(&*s).await.open[0]),
        ..rerun(now - 5000, "c")
    };
    assert!(matches!(one(&*s, &third).await, Answer::Later { .. }));
    assert_eq!(outcomes(&*s).await[0], Outcome::Unknown);
    // A trigger would have to wait for that attempt.
    let put = Control::Trigger { key: "k".into() };
    assert_eq!(control(&*s, put).await, Controlled::Done);
    let by_hand = manual("k", None, "a");
    assert!(matches!(one(&*s, &by_hand).await, Answer::Later { .. }));
    let (t, _) = self::now(&*s).await;
    assert_eq!(control(&*s, pause(Some(t + 200))).await, Controlled::Done);
    match in_time(&*s, &third).await {
        Answer::Granted(g) => assert_eq!((g.attempt, g.trigger), (3, Trigger::Takeover)),
        other => panic!("{other:?}"),
    }
}

async fn a_trigger_stays_between_the_decided_and_the_next(bed: Bed) {
    let (s, now) = ready(&bed).await;
    assert_eq!(
        control(&*s, Control::Trigger { key: "k".into() }).await,
        Controlled::Done
    );
    let first = claim(now - 1000, "a");
    let g = granted(&*s, &first).await;
    assert_eq!(
        settle(&*s, &first, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    // No room between the newest decided one and the next: it has to wait until there is.
    assert_eq!(
        one(&*s, &manual("k", Some(now - 999), "a")).await,
        Answer::Early { wait_us: 1000 }
    );
    let c = manual("k", Some(now - 500), "a");
    let g = granted(&*s, &c).await;
    assert_eq!(g.occurrence.0, now - 999);
    // The scheduled occurrence is not lost because of it.
    let next = Claim {
        overlap: Overlap::Queue,
        ..claim(now - 500, "b")
    };
    assert!(
        matches!(one(&*s, &next).await, Answer::Blocked(o) if o.run.key.as_deref() == Some("k"))
    );
    assert_eq!(
        settle(&*s, &c, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(matches!(one(&*s, &next).await, Answer::Granted(_)));
}

async fn a_trigger_survives_its_client(bed: Bed) {
    let (s, _) = ready(&bed).await;
    assert_eq!(
        control(&*s, Control::Trigger { key: "k".into() }).await,
        Controlled::Done
    );
    drop(s);
    assert!(matches!(
        one(&*bed.store(), &manual("k", None, "b")).await,
        Answer::Granted(_)
    ));
}

async fn an_unknown_job_is_absent(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    assert_eq!(one(&*s, &claim(now, "a")).await, Answer::Absent);
    assert_eq!(control(&*s, Control::Cancel).await, Controlled::Absent);
    assert_eq!(s.observe(&[j()]).await.unwrap().value, [None]);
    assert_eq!(
        register(&*s, registration("backup", None)).await,
        (Registration::Absent, None)
    );
    assert_eq!(
        register(&*s, registration("backup", Some("another"))).await,
        (Registration::Absent, None)
    );
    let (answer, st) = register(&*s, registration("backup", Some(&incarnation))).await;
    let st = st.unwrap();
    assert_eq!(answer, Registration::Ready);
    assert_eq!(
        (&*st.incarnation, &*st.schedule, &*st.definition, st.newest),
        (&*incarnation, "s1", "d1", 0)
    );
    assert!(st.since >= now);
    assert_eq!(state(&*s).await, st);
}

async fn a_register_in_the_future_is_put_back_and_what_ran_stays_decided(bed: Bed) {
    let (s, now) = ahead(&bed, 2 * MINUTE).await;
    assert_eq!(
        one(&*s, &claim(now - 10, "a")).await,
        Answer::Settled(None),
        "everything up to then counts as decided"
    );
    let early = Occurrence(now + 2000);
    let last = Occurrence(now + 2 * MINUTE);
    let ran = vec![last, early, Occurrence(now - MINUTE)];
    let rewind = Control::Rewind { ran };
    assert_eq!(control(&*s, rewind.clone()).await, Controlled::Done);
    assert_eq!(control(&*s, rewind).await, Controlled::Nothing);
    let st = state(&*s).await;
    assert!(st.newest >= now && st.newest < now + MINUTE, "{st:?}");
    assert_eq!(st.early, [early, last]);
    // An occurrence that ran early does not run again; the others run.
    let other = claim(early.0 + 20, "a");
    assert_eq!(
        in_time(&*s, &claim(early.0, "a")).await,
        Answer::Settled(None)
    );
    assert_eq!(state(&*s).await.early, [last]);
    assert!(matches!(in_time(&*s, &other).await, Answer::Granted(_)));
}

/// A run before its time is in the history as a run, and is not counted among the missed ones.
async fn what_ran_early_is_not_given_up(bed: Bed) {
    let (s, now) = ahead(&bed, 2 * MINUTE).await;
    let now = now + 1500;
    let at = |ms: i64| Occurrence(now + ms);
    let last = Occurrence(state(&*s).await.newest);
    let ran = vec![at(400), at(600), at(700), last];
    let done = control(&*s, Control::Rewind { ran: ran.clone() }).await;
    assert_eq!(done, Controlled::Done);
    let rewound = state(&*s).await.newest;
    assert!(rewound < at(290).0, "too slow to be judged");
    let range = |first: i64, last: i64, count| Missed {
        first: at(first),
        last: at(last),
        count,
    };
    let giving_up = |target: i64, missed| Claim {
        missed,
        ..claim(now + target, "a")
    };
    let behind = Answer::Behind {
        newest: Occurrence(rewound),
        early: ran.clone(),
    };
    // In the middle, at an end, or by itself.
    for missed in [
        vec![range(300, 500, 3)],
        vec![range(400, 500, 2)],
        vec![range(300, 400, 2)],
        vec![range(300, 300, 1), range(400, 400, 1)],
    ] {
        assert_eq!(in_time(&*s, &giving_up(800, missed)).await, behind);
    }
    assert_eq!(state(&*s).await.newest, rewound);
    // The target ran early too: the range that is given up with it is recorded all the same.
    let left = vec![range(300, 350, 2), range(500, 500, 1)];
    let target = giving_up(600, left);
    assert_eq!(in_time(&*s, &target).await, Answer::Settled(None));
    let st = state(&*s).await;
    assert_eq!((st.newest, st.early), (at(600).0, vec![at(700), last]));
    let all = s.history(&j(), 9).await.unwrap();
    let all: Vec<_> = all
        .iter()
        .map(|r| (r.outcome, r.occurrence, r.count))
        .collect();
    assert_eq!(
        all,
        [
            (Outcome::Missed, at(500), 1),
            (Outcome::Missed, at(350), 2),
            (Outcome::Succeeded, last, 1)
        ]
    );
    // Early runs whose time has passed are forgotten.
    assert!(matches!(
        in_time(&*s, &claim(now + 800, "a")).await,
        Answer::Granted(_)
    ));
    let _ = in_time(&*s, &claim(now + 900, "a")).await;
    assert_eq!(state(&*s).await.early, [last]);
}

async fn what_lies_in_the_future_is_no_knowledge(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let wrong = Occurrence(now + 60 * MINUTE);
    let known = Claim {
        known: wrong,
        ..claim(now - 10, "a")
    };
    assert!(matches!(one(&*s, &known).await, Answer::Granted(_)));
    let r = Register {
        known: wrong,
        ..registration("backup", None)
    };
    let (answer, st) = register(&*s, r).await;
    assert_eq!(
        (answer, st.unwrap().newest),
        (Registration::Ready, now - 10)
    );
}

async fn what_people_asked_for_is_told_again_until_they_ask_for_something_else(bed: Bed) {
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let remembered = Remembered {
        pause: Some(Pause {
            until: None,
            reason: None,
            at: now - MINUTE,
            by: None,
        }),
        skip: 2,
        skip_at: now - MINUTE,
        ..Remembered::default()
    };
    let tell = |adopt: Option<&str>| Register {
        remembered: remembered.clone(),
        ..registration("backup", adopt)
    };
    // Before any instance adopts, so that nothing starts in between.
    let (answer, st) = register(&*s, tell(None)).await;
    assert_eq!(answer, Registration::Absent);
    assert_eq!(Remembered::of(&st.expect("it is kept")), remembered);
    let (answer, st) = register(&*s, registration("backup", Some(&incarnation))).await;
    assert_eq!(
        (answer, Remembered::of(&st.unwrap())),
        (Registration::Ready, remembered.clone())
    );
    assert!(matches!(
        in_time(&*s, &claim(self::now(&*s).await.0 + 5, "a")).await,
        Answer::Recorded {
            outcome: Outcome::Skipped,
            ..
        }
    ));
    // A newer request counts, whichever instance tells the old one again.
    assert_eq!(control(&*s, Control::Resume).await, Controlled::Done);
    assert_eq!(
        control(&*s, Control::Skip { count: 0 }).await,
        Controlled::Done
    );
    let (_, st) = register(&*s, tell(None)).await;
    let st = st.unwrap();
    assert_eq!((st.pause, st.skip), (None, 0));
    // A skip that was used up does not come back either.
    assert_eq!(
        control(&*s, Control::Skip { count: 1 }).await,
        Controlled::Done
    );
    let asked = Remembered::of(&state(&*s).await);
    let at = self::now(&*s).await.0 + 5;
    assert!(matches!(
        in_time(&*s, &claim(at, "a")).await,
        Answer::Recorded {
            outcome: Outcome::Skipped,
            ..
        }
    ));
    let again = Register {
        remembered: asked,
        ..registration("backup", None)
    };
    assert_eq!(register(&*s, again).await.1.unwrap().skip, 0);
    assert!(matches!(
        in_time(&*s, &claim(at + 5, "a")).await,
        Answer::Granted(_)
    ));
}

async fn what_is_planned_while_nobody_has_the_job_is_not_owed(bed: Bed) {
    let (s, now) = ready(&bed).await;
    assert_eq!(s.jobs().await.unwrap(), [j()]);
    let since = state(&*s).await.since;
    assert_eq!(control(&*s, Control::Off).await, Controlled::Done);
    assert_eq!(control(&*s, Control::Off).await, Controlled::Nothing);
    // An instance registers it as disabled, which changes nothing.
    let disabled = Register {
        presence: Presence::Disabled,
        ..registration("backup", None)
    };
    let st = register(&*s, disabled).await.1.unwrap();
    assert!(st.off >= now && st.since == since, "{st:?}");
    let off = st.off;
    let st = register(&*s, registration("backup", None)).await.1.unwrap();
    assert!(st.off == 0 && st.since >= off, "{st:?}");
    // If an instance has the job after all, and claims it, nothing is forgotten.
    assert_eq!(control(&*s, Control::Off).await, Controlled::Done);
    granted(&*s, &claim(self::now(&*s).await.0, "a")).await;
    let since = st.since;
    let st = register(&*s, registration("backup", None)).await.1.unwrap();
    assert_eq!((st.off, st.since), (0, since));
    // The same if it says so.
    assert_eq!(control(&*s, Control::Off).await, Controlled::Done);
    let has = |presence, owed| Register {
        presence,
        owed,
        ..registration("backup", None)
    };
    let kept = has(Presence::Kept, vec![]);
    let st = register(&*s, kept).await.1.unwrap();
    assert_eq!((st.off, st.since), (0, since));
    // To record what was undecided when the job was removed says nothing about its presence.
    assert_eq!(control(&*s, Control::Off).await, Controlled::Done);
    let removed = Claim {
        start_by: claim::REMOVED,
        ..claim(state(&*s).await.newest + 1, "a")
    };
    let answer = in_time(&*s, &removed).await;
    assert!(matches!(answer, Answer::Recorded { .. }), "{answer:?}");
    assert!(state(&*s).await.off > 0);
    // What an instance owes, and has not recorded by the time it has the job again, is recorded then.
    let newest = state(&*s).await.newest;
    let owed = Missed {
        first: Occurrence(newest + 1),
        last: Occurrence(newest + 2),
        count: 2,
    };
    let far = Missed::one(Occurrence(newest + 1_000_000));
    while self::now(&*s).await.0 < newest + 2 {}
    let back = has(Presence::New, vec![owed, far]);
    let st = register(&*s, back).await.1.unwrap();
    assert!(st.off == 0 && st.since > since, "{st:?}");
    assert_eq!(st.newest, newest + 2);
    let record = s.records(&j(), 1).await.unwrap().remove(0);
    assert_eq!((record.outcome, record.count), (Outcome::Missed, 2));
}

/// A job of the library's electors is in no configuration: no instance has anything to say about it.
async fn a_job_of_the_library_is_not_taken_for_nobodys(bed: Bed) {
    let (s, _) = ready(&bed).await;
    let theirs = Register {
        schedule: LIBRARY.to_owned(),
        definition: LIBRARY.to_owned(),
        ..registration("backup", None)
    };
    let before = register(&*s, theirs).await.1;
    assert_eq!(control(&*s, Control::Off).await, Controlled::Nothing);
    assert_eq!(Some(state(&*s).await), before);
}

/// The store's clock is not where the caller believes it to be.
async fn a_store_in_doubt_decides_nothing(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let (c, g) = {
        let c = claim(now - 20, "a");
        let g = granted(&*s, &c).await;
        (c, g)
    };
    let doubting = bed.store();
    let clock = Arc::new(StoreClock::default());
    doubting.believe(clock.clone());
    let (sent, hour) = (Boottime::now(), 60 * MINUTE);
    // As if the clock had shown an hour less until now.
    let _ = clock.sample((now - hour) * 1000, sent, sent);
    let before = state(&*s).await;
    let other = Claim {
        start_by: now - 10,
        ..claim(now - 10, "b")
    };
    assert_eq!(one(&*doubting, &other).await, Answer::InDoubt);
    let (answer, _) = register(&*doubting, registration("another", None)).await;
    assert_eq!(answer, Registration::Quarantined);
    assert_eq!(state(&*s).await, before);
    let pause = Control::Pause {
        until: None,
        reason: None,
    };
    assert_eq!(control(&*doubting, pause).await, Controlled::Done);
    let at = state(&*s).await.pause.expect("a pause").at;
    assert!(at < now - hour + MINUTE, "{at} is not an hour before {now}");
    assert_eq!(control(&*doubting, Control::Resume).await, Controlled::Done);
    // Necessary writes are made, with the time that is believed.
    let renewed = doubting.renew(&renewal(&c, g, 1)).await.unwrap().value;
    assert_eq!(renewed, Renewal::Renewed(None));
    let at = state(&*s).await.open[0].renewed_at;
    assert!(
        at >= now - hour && at < now - hour + MINUTE,
        "{at} is not an hour before {now}"
    );
    let next_attempt = DelayedAttempt {
        delay_ms: 1000,
        trigger: Trigger::Retry,
    };
    let failed = Settle {
        next_attempt: Some(next_attempt),
        ..settlement(&c, g, Outcome::Failed)
    };
    let settled = doubting.settle(&failed, &nothing()).await.unwrap().value;
    assert_eq!(settled, Settlement::Done);
    let at = state(&*s).await.open[0].next_attempt.expect("a retry").at;
    assert!(at < now - hour + MINUTE, "{at} is not an hour before {now}");
    // A request that was long on its way raises no doubt.
    let late = Arc::new(StoreClock::default());
    let _ = late.sample((now - 3000) * 1000, sent, sent);
    let patient = bed.store();
    patient.believe(late);
    if !matches!(bed, Bed::Memory(_)) {
        let answer = one(&*patient, &claim(now - 20, "b")).await;
        assert_ne!(answer, Answer::InDoubt);
    }
}

async fn a_register_only_grows(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let (_, incarnation) = self::now(&*s).await;
    let since = state(&*s).await.since;
    let known = |at| Register {
        known: Occurrence(at),
        ..registration("backup", Some(&incarnation))
    };
    let (_, st) = register(&*s, known(now - 5000)).await;
    assert_eq!(st.unwrap().newest, now - 5000);
    let (_, st) = register(&*s, known(now - 9000)).await;
    assert_eq!(st.unwrap().newest, now - 5000);
    assert!(matches!(
        one(&*s, &claim(now - 6000, "a")).await,
        Answer::Settled(None)
    ));
    // A claim carries what its instance knows, and it counts whatever the answer.
    let c = Claim {
        known: Occurrence(now - 3000),
        ..claim(now - 4000, "a")
    };
    assert_eq!(one(&*s, &c).await, Answer::Settled(None));
    assert_eq!(state(&*s).await.newest, now - 3000);
    // Another schedule owes nothing from before; another definition is only noted.
    let (_, st) = register(
        &*s,
        Register {
            definition: "d2".into(),
            ..known(0)
        },
    )
    .await;
    let st = st.unwrap();
    assert_eq!((st.since, &*st.definition), (since, "d2"));
    let asked = s
        .register(&[Register {
            schedule: "s2".into(),
            ..known(0)
        }])
        .await
        .unwrap();
    let st = asked.value[0].1.clone().unwrap();
    assert_eq!((&*st.schedule, st.newest), ("s2", now - 3000));
    assert!(st.since >= since && st.since <= self::now(&*s).await.0);
}

async fn a_renewal_is_for_the_holder_alone(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    for seq in 1..4 {
        assert_eq!(
            s.renew(&renewal(&mine, g, seq)).await.unwrap().value,
            Renewal::Renewed(None)
        );
        assert_eq!(state(&*s).await.open[0].seq, seq);
    }
    // Asked again after a lost reply it still changes: an observer must see that the holder lives.
    assert_eq!(
        s.renew(&renewal(&mine, g, 3)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    assert_eq!(state(&*s).await.open[0].seq, 4);
    let other = Claim {
        run: RunId::random(),
        ..mine.clone()
    };
    assert_eq!(
        s.renew(&renewal(&other, g, 9)).await.unwrap().value,
        Renewal::Lost
    );
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert_eq!(
        s.renew(&renewal(&mine, g, 5)).await.unwrap().value,
        Renewal::Lost
    );
}

async fn a_lease_is_put_back_for_a_holder_that_trusts_it_and_knows_of_the_loss(bed: Bed) {
    // A store that knows nothing of the job: its data is gone.
    let s = bed.store();
    let (now, _) = now(&*s).await;
    let c = claim(now - 100, "a");
    let g = Grant {
        occurrence: Occurrence(now - 100),
        attempt: 1,
        trigger: Trigger::Schedule,
    };
    let in_time = renewal(&c, g, 1);
    // It may have left before the data was lost, and come when the run has ended, and a later attempt, too.
    let before = in_time.clone();
    for reclaim in ["", "of other data"] {
        let ask = Renew {
            reclaim: reclaim.to_owned(),
            ..before.clone()
        };
        assert_eq!(s.renew(&ask).await.unwrap().value, Renewal::Unknown);
        assert_eq!(s.observe(&[j()]).await.unwrap().value, [None]);
    }
    let in_time = Renew {
        reclaim: s.renew(&before).await.unwrap().incarnation.to_string(),
        ..in_time
    };
    let late = Renew {
        late: true,
        ..in_time.clone()
    };
    assert_eq!(s.renew(&late).await.unwrap().value, Renewal::Lost);
    assert_eq!(s.observe(&[j()]).await.unwrap().value, [None]);
    let renewed = s.renew(&in_time).await.unwrap().value;
    assert_eq!(renewed, Renewal::Renewed(None));
    // What the store has goes on: only putting a lease back is refused.
    assert_eq!(s.renew(&late).await.unwrap().value, Renewal::Renewed(None));
    assert_eq!(
        s.renew(&before).await.unwrap().value,
        Renewal::Renewed(None)
    );
    assert_eq!(state(&*s).await.open.len(), 1);
}

async fn a_settlement_counts_once(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    let settle = settlement(&mine, g, Outcome::Succeeded);
    let tail = |data: &[u8]| Tail {
        before: 3,
        data: data.to_vec(),
        ..nothing()
    };
    assert_eq!(
        s.settle(&settle, &tail(b"one")).await.unwrap().value,
        Settlement::Done
    );
    assert_eq!(
        s.settle(&settle, &tail(b"two")).await.unwrap().value,
        Settlement::Done
    );
    let h = s.history(&j(), 10).await.unwrap();
    assert_eq!(h.len(), 1);
    assert_eq!(
        h[0],
        RunRecord {
            output_tail: "one".into(),
            // Three bytes were before these.
            output_truncated: true,
            ..settle.record
        }
    );
    let last = state(&*s).await.last.unwrap();
    assert_eq!(
        (last.run, last.occurrence, last.outcome),
        (mine.run, g.occurrence, Outcome::Succeeded)
    );
}

async fn the_true_record_replaces_unknown(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let mine = claim(now, "a");
    let g = granted(&*s, &mine).await;
    let open = state(&*s).await.open[0].clone();
    let theirs = Claim {
        observed: observed(&open),
        ..claim(now, "b")
    };
    assert!(matches!(
        one(&*s, &theirs).await,
        Answer::Recorded {
            outcome: Outcome::Unknown,
            ..
        }
    ));
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Lost
    );
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done,
        "sent again"
    );
    assert_eq!(outcomes(&*s).await, [Outcome::Succeeded]);
    assert_eq!(state(&*s).await.last.unwrap().outcome, Outcome::Succeeded);
}

fn info(jobs: u32) -> Info {
    Info {
        host: "ä \"host\"".to_owned(),
        pid: 4711,
        process: 1,
        version: "0.1.0".to_owned(),
        config: "c1".to_owned(),
        clock_offset_ms: -1.5,
        started_at: 1_700_000_000_000,
        running: vec![(j(), Occurrence(1_700_000_000_000))],
        jobs,
        outages: vec![Outage {
            from: 1_700_000_000_000,
            until: 1_700_000_012_345,
        }],
        ..Info::default()
    }
}

async fn the_fleet_knows_its_instances(bed: Bed) {
    let s = bed.store();
    let (a, b) = (InstanceId::new("a"), InstanceId::new("b"));
    let beat = |instance: &InstanceId, quarantine, open| Beat {
        instance: instance.clone(),
        info: info(7),
        quarantine: Duration::from_millis(quarantine),
        open,
    };
    let first = s.heartbeat(None).await.unwrap();
    assert!(first.value.instances.is_empty() && first.value.drains.is_empty());
    assert_eq!(first.value.quarantine, Duration::ZERO);
    let r = s.heartbeat(Some(&beat(&a, 1234, None))).await.unwrap();
    assert_eq!(r.value.instances.len(), 1);
    assert_eq!(
        r.value.instances[&a],
        Info {
            seen: r.now_us / 1000,
            ..info(7)
        }
    );
    assert_eq!(r.value.born, first.value.born);
    let wrong = Some((r.incarnation.clone(), "another".into()));
    let f = s
        .heartbeat(Some(&beat(&b, 1000, wrong)))
        .await
        .unwrap()
        .value;
    assert_eq!(
        (f.instances.len(), f.quarantine),
        (2, Duration::from_millis(1234))
    );
    // Redis alone forgets; the others are open from the beginning.
    assert_eq!(f.open, !matches!(bed, Bed::Redis(_)));
    let right = Some((r.incarnation.clone(), r.value.id.clone()));
    assert!(
        s.heartbeat(Some(&beat(&b, 1000, right)))
            .await
            .unwrap()
            .value
            .open
    );

    let other = bed.store();
    other.drain(&a, true, "alice@web-1").await.unwrap();
    other.drain(&a, true, "alice@web-1").await.unwrap();
    other.drain(&b, true, "bob").await.unwrap();
    let mut f = s.heartbeat(None).await.unwrap().value;
    f.drains.sort();
    assert_eq!(f.drains, [a.clone(), b.clone()]);
    assert_eq!(f.drained_by[&a], "alice@web-1");
    other.drain(&a, false, "carol ü").await.unwrap();
    let f = s.heartbeat(None).await.unwrap().value;
    assert_eq!(f.drains, std::slice::from_ref(&b));
    assert_eq!((&*f.drained_by[&a], &*f.drained_by[&b]), ("carol ü", "bob"));
    // Another process of the same name.
    s.leave(&b, 2).await.unwrap();
    assert_eq!(s.heartbeat(None).await.unwrap().value.instances.len(), 2);
    s.leave(&b, 1).await.unwrap();
    // Asked again, because its answer was lost.
    s.leave(&b, 1).await.unwrap();
    let f = other.heartbeat(None).await.unwrap().value;
    assert_eq!(f.instances.keys().collect::<Vec<_>>(), [&a]);
    assert!(f.drains.is_empty() && f.open);
    assert_eq!(f.drained_by.keys().collect::<Vec<_>>(), [&a]);
}

async fn decisions_are_kept_newest_first(bed: Bed) {
    let s = bed.store();
    let decision = |name: &str, at: i64| Decision {
        job: job(name),
        occurrence: Occurrence(at),
        instance: InstanceId::new("a"),
        at,
        decision: "lost".to_owned(),
        detail: "to b".to_owned(),
    };
    let kept = DECISIONS_KEPT as i64;
    let all: Vec<Decision> = (1..=kept + 10).map(|i| decision("backup", i)).collect();
    s.journal(&all).await.unwrap();
    s.journal(&[decision("other", 1), decision("backup", 9000)])
        .await
        .unwrap();
    let d = bed.store().decisions(&j()).await.unwrap();
    assert_eq!(d.len(), DECISIONS_KEPT);
    assert_eq!(d[0], decision("backup", 9000));
    assert_eq!((d[1].at, d[kept as usize - 1].at), (kept + 10, 12));
    assert_eq!(s.decisions(&job("other")).await.unwrap().len(), 1);
    assert!(s.decisions(&job("nobody")).await.unwrap().is_empty());
}

async fn history_is_kept_newest_first(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let kept = HISTORY_KEPT as i64;
    let mut first = None;
    for i in 0..kept + 5 {
        let c = Claim {
            overlap: Overlap::Queue,
            ..claim(now - 1000 + i, "a")
        };
        let g = granted(&*s, &c).await;
        let tail = Tail {
            data: format!("{i}\n").into_bytes(),
            ..nothing()
        };
        let _ = s
            .settle(&settlement(&c, g, Outcome::Succeeded), &tail)
            .await
            .unwrap();
        first = first.or(Some(c.run));
    }
    let h = s.history(&j(), 3).await.unwrap();
    assert_eq!(h.len(), 3);
    for (i, r) in (0..).zip(&h) {
        let n = kept + 4 - i;
        assert_eq!(
            (r.occurrence.0 - now + 1000, &r.output_tail),
            (n, &format!("{n}\n"))
        );
        assert_eq!(r.fencing_token, Some(r.occurrence.token(1)));
    }
    let h = s.history(&j(), 10_000).await.unwrap();
    assert_eq!(h.len(), HISTORY_KEPT);
    // The output of a run is removed with its record.
    if !matches!(bed, Bed::Memory(_)) {
        assert_eq!(s.output(&j(), first.unwrap(), 0).await.unwrap(), None);
    }
    assert!(
        s.output(&j(), h[0].run_id.unwrap(), 0)
            .await
            .unwrap()
            .is_some()
    );
    assert!(s.history(&job("nobody"), 5).await.unwrap().is_empty());
}

async fn an_offset_beyond_all_output_is_survived(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let c = claim(now, "a");
    let _ = granted(&*s, &c).await;
    let read = async |from: u64| s.output(&j(), c.run, from).await.unwrap();
    s.append_output(&j(), c.run, 0, b"some", 100, &Marks::default())
        .await
        .unwrap();
    for far in [1 << 53, i64::MAX as u64, u64::MAX - 3, u64::MAX] {
        let all = read(far).await.expect("an output");
        assert_eq!((all.from, all.data.len(), all.more), (4, 0, false));
        // No command can have written so much.
        let _ = s
            .append_output(&j(), c.run, far, b"more and more", 100, &Marks::default())
            .await;
        assert!(read(0).await.is_some());
    }
}

async fn output_says_which_bytes_are_of_stderr(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let c = claim(now - 1000, "a");
    let g = granted(&*s, &c).await;
    let marks = Marks::parse;
    let add = async |at: u64, data: &[u8], stderr: &str| {
        let stderr = marks(stderr);
        let told = s.append_output(&j(), c.run, at, data, 100, &stderr).await;
        told.unwrap();
    };
    let read = async || s.output(&j(), c.run, 0).await.unwrap().unwrap();
    add(0, b"out\n", "").await;
    assert_eq!(read().await.stderr, marks(""));
    add(4, b"err\n", "4-8").await;
    add(8, b"out\nerr\n", "4-8 12-16").await;
    // Repeated, as after a lost answer.
    add(4, b"err\n", "4-8").await;
    assert_eq!(read().await.stderr, marks("4-8 12-16"));
    let tail = |before: u64, data: &[u8], stderr: &str| Tail {
        before,
        data: data.to_vec(),
        stderr: marks(stderr),
        ..nothing()
    };
    // The end of the output takes the place of all.
    let all = tail(4, b"err\nout\nerr\nerr\n", "4-8 12-20");
    let settled = settlement(&c, g, Outcome::Succeeded);
    let _ = s.settle(&settled, &all).await.unwrap();
    assert_eq!(read().await.stderr, marks("4-8 12-20"));
    // A short run has no more than its settlement.
    let c = claim(now, "a");
    let g = granted(&*s, &c).await;
    let settled = settlement(&c, g, Outcome::Failed);
    let _ = s.settle(&settled, &tail(0, b"err\n", "0-4")).await.unwrap();
    let o = s.output(&j(), c.run, 0).await.unwrap().unwrap();
    assert_eq!((o.stderr, o.done), (marks("0-4"), true));
}

async fn output_is_added_once(bed: Bed) {
    let (s, now) = ready(&bed).await;
    let c = claim(now, "a");
    let g = granted(&*s, &c).await;
    let add = async |at: u64, data: &[u8]| {
        s.append_output(&j(), c.run, at, data, 10, &Marks::default())
            .await
            .unwrap()
    };
    let read = async |from: u64| s.output(&j(), c.run, from).await.unwrap();
    let is = |from: u64, data: &[u8], done: bool| {
        Some(Output {
            from,
            data: data.to_vec(),
            done,
            ..Output::default()
        })
    };
    assert_eq!(read(0).await, None);
    add(0, b"abc\xff").await;
    add(0, b"abc\xff").await;
    assert_eq!(read(0).await, is(0, b"abc\xff", false));
    add(2, b"c\xffde").await;
    assert_eq!(read(3).await, is(3, b"\xffde", false));
    assert_eq!(read(99).await, is(6, b"", false));
    add(6, b"fghijkl").await;
    assert_eq!(
        read(0).await,
        is(3, b"\xffdefghijkl"[0..10].as_ref(), false)
    );
    // A hole drops the output before it.
    add(100, b"xyz").await;
    assert_eq!(read(0).await, is(100, b"xyz", false));
    // Without a tail, the added pieces stay.
    assert_eq!(
        settle(&*s, &c, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert_eq!(read(0).await, is(100, b"xyz", true));
    add(103, b"late").await;
    assert_eq!(read(0).await, is(100, b"xyz", true));
    assert_eq!(s.history(&j(), 1).await.unwrap()[0].output_tail, "xyz");
}

/// All that can be read of a run's output, and the last answer.
async fn read_all(s: &dyn Store, run: RunId) -> (Vec<u8>, Output) {
    let mut all = vec![];
    let mut at = 0;
    loop {
        let some = s.output(&j(), run, at).await.unwrap().expect("some");
        assert!(some.data.len() <= OUTPUT_AT_ONCE);
        at = some.from + some.data.len() as u64;
        all.extend_from_slice(&some.data);
        if !some.more {
            return (all, some);
        }
        assert!(!some.done);
    }
}

async fn output_that_is_much_comes_in_pieces_after_the_settlement(bed: Bed) {
    const KEEP: usize = 600_000;
    let (s, now) = ready(&bed).await;
    let c = claim(now, "a");
    let g = granted(&*s, &c).await;
    let written: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 253) as u8).collect();
    let kept = written.len() - KEEP;
    let add = async |at: usize, data: &[u8]| {
        let done = s
            .append_output(&j(), c.run, at as u64, data, KEEP, &Marks::default())
            .await;
        done.unwrap();
    };
    // Some of it was shown while the command went on.
    add(0, &written[..100_000]).await;
    add(380_000, &written[380_000..500_000]).await;
    let (live, last) = read_all(&*s, c.run).await;
    assert!(live == written[380_000..500_000] && !last.done && !last.coming);
    let tail = Tail {
        before: kept as u64,
        more: KEEP as u64,
        ..nothing()
    };
    let settled = settlement(&c, g, Outcome::Succeeded);
    let done = s.settle(&settled, &tail).await.unwrap().value;
    assert_eq!(done, Settlement::Done);
    assert!(state(&*s).await.open.is_empty(), "the lease is released");
    let (_, last) = read_all(&*s, c.run).await;
    assert!(last.coming && !last.done, "{}", last.from);
    assert!(s.history(&j(), 1).await.unwrap()[0].output_truncated);
    for at in (500_000..written.len()).step_by(70_000) {
        let piece = &written[at..(at + 70_000).min(written.len())];
        add(at, piece).await;
        add(at, piece).await;
    }
    let (all, last) = read_all(&*s, c.run).await;
    assert!(all == written[kept..], "{} bytes", all.len());
    assert!(last.done && !last.coming && last.missing == 0);
    // The output is closed.
    add(written.len(), b"more").await;
    assert_eq!(read_all(&*s, c.run).await.0.len(), KEEP);
    let h = s.history(&j(), 1).await.unwrap();
    assert_eq!(h[0].output_tail, String::from_utf8_lossy(&written[kept..]));
    // The settlement itself says that the command's own tail was cut.
    assert!(h[0].output_truncated);
    assert_eq!(s.records(&j(), 1).await.unwrap()[0].run_id, Some(c.run));
}

async fn output_that_stays_away_is_given_up(mut bed: Bed) {
    let time = Arc::new(AtomicI64::new(0));
    let (s, now) = match &bed {
        Bed::Sqlite(dir) => {
            let ahead = time.clone();
            let clock = move || soloist::clock::wall_us() + ahead.load(Ordering::SeqCst) * 1000;
            let file = dir.path().join("state.db");
            let s = SqliteStore::open_with_clock(&file, Arc::new(clock)).unwrap();
            let _ = register(&s, registration("backup", Some(&self::now(&s).await.1))).await;
            let at = self::now(&s).await.0;
            (Arc::new(s) as Arc<dyn Store>, at)
        }
        _ => ready(&bed).await,
    };
    let c = claim(now, "a");
    let g = granted(&*s, &c).await;
    s.append_output(&j(), c.run, 0, b"some", 100, &Marks::default())
        .await
        .unwrap();
    let tail = Tail {
        more: 10,
        ..nothing()
    };
    let settled = settlement(&c, g, Outcome::Succeeded);
    let _ = s.settle(&settled, &tail).await.unwrap();
    let (_, last) = read_all(&*s, c.run).await;
    assert!(last.coming && !last.done && last.missing == 0);
    let patience = store::OUTPUT_PATIENCE.as_millis() as i64;
    for (passed, given_up) in [(patience - 60_000, false), (patience + 1000, true)] {
        match &mut bed {
            Bed::Memory(m) => {
                m.shift(passed - time.swap(passed, Ordering::SeqCst));
            }
            Bed::Sqlite(_) => time.store(passed, Ordering::SeqCst),
            // Its clock is its own.
            Bed::Redis(server) => {
                let key = format!("soloist:{{backup}}:output:{}", c.run);
                let until: i64 = server.command(&["HGET", &key, "until"]);
                let earlier = until - (passed - time.swap(passed, Ordering::SeqCst));
                server.command::<()>(&["HSET", &key, "until", &earlier.to_string()]);
            }
        }
        let (all, last) = read_all(&*s, c.run).await;
        assert_eq!(all, b"some");
        assert_eq!((last.done, last.coming), (given_up, !given_up));
        assert_eq!(last.missing, if given_up { 6 } else { 0 });
    }
    let h = s.history(&j(), 1).await.unwrap();
    assert_eq!((&*h[0].output_tail, h[0].output_truncated), ("some", true));
}

async fn events_reach_every_handle(bed: Bed) {
    let (s, _) = ready(&bed).await;
    let other = bed.store();
    let (mut here, mut there) = (listen(&*s).await, listen(&*other).await);
    assert_eq!(
        control(&*s, Control::Trigger { key: "k".into() }).await,
        Controlled::Done
    );
    let wanted = Event::Triggered {
        job: j(),
        key: "k".to_owned(),
        at: state(&*s).await.triggers[0].at,
    };
    receives(&mut here, &wanted).await;
    receives(&mut there, &wanted).await;
    // Once: our own events do not come back through the store.
    assert_eq!(
        control(&*s, Control::Trigger { key: "k2".into() }).await,
        Controlled::Done
    );
    let wanted = Event::Triggered {
        job: j(),
        key: "k2".to_owned(),
        at: state(&*s).await.triggers[1].at,
    };
    for events in [&mut here, &mut there] {
        let first = tokio::time::timeout(Duration::from_secs(30), async {
            loop {
                match events.recv().await.unwrap() {
                    // Left over from `listen`.
                    Event::Drain | Event::Gap => {}
                    other => return other,
                }
            }
        });
        assert_eq!(first.await.unwrap(), wanted);
    }
}

// What only Redis can do.

fn server(bed: &mut Bed) -> &mut RedisServer {
    match bed {
        Bed::Redis(server) => server,
        _ => panic!("not Redis"),
    }
}

/// Asks until the store answers again: a restart breaks connections.
async fn patient<T, F: Future<Output = Result<T, Error>>>(f: impl Fn() -> F) -> T {
    for _ in 0..50 {
        match f().await {
            Ok(v) => return v,
            Err(e) if e.is_transient() => {}
            Err(e) => panic!("{e}"),
        }
    }
    panic!("the store did not come back");
}

async fn reconnect(s: &dyn Store) -> (i64, Arc<str>) {
    let r = patient(|| s.observe(&[])).await;
    // Renewals have connections of their own, which break too.
    let gone = renewal(
        &Claim {
            job: job("nobody"),
            ..claim(1, "a")
        },
        Grant {
            occurrence: Occurrence(1),
            attempt: 1,
            trigger: Trigger::Schedule,
        },
        1,
    );
    let _ = patient(|| s.renew(&gone)).await;
    (r.now_us / 1000, r.incarnation)
}

/// The process that records the outcome for a dead daemon knows what its daemon believed: while the server's clock is
/// wrong, it does not date the next attempt by that clock.
#[tokio::test]
async fn who_settles_for_a_dead_daemon_dates_the_next_attempt_by_the_clock_that_it_believed() {
    const DELAY: i64 = 10 * MINUTE;
    for wrong in [60 * MINUTE, -60 * MINUTE] {
        let bed = Bed::Redis(RedisServer::start_with_own_clock());
        let Bed::Redis(server) = &bed else {
            unreachable!()
        };
        let (s, now) = ready(&bed).await;
        let mine = claim(now, "a");
        let grant = granted(&*s, &mine).await;
        let moment = Moment::now();
        let release = ReleaseOnDeath {
            store: config::Store::from_url(&server.url()).unwrap(),
            key: String::new(),
            owner: String::new(),
            patience: Duration::ZERO,
        };
        let hand_over = HandOver {
            settle: serde_json::json!({
                "store": serde_json::to_value(release).unwrap()["store"],
                "record": settlement(&mine, grant, Outcome::Running).record,
                "on_crash": null,
                "on_failure": DelayedAttempt { delay_ms: DELAY, trigger: Trigger::Retry },
                "on_no_start": null,
                "offset_us": moment.wall_us - (moment.boottime.0 / 1000) as i64,
                "patience": Duration::from_secs(15),
            }),
            end: KnownEnd {
                outcome: Outcome::Failed,
                cause: None,
                exit_code: Some(1),
                signal: None,
                error: None,
                started: Some(moment),
                ended: moment,
                usage: Usage::default(),
            },
        };
        server.set_clock(wrong * 1000);
        let ended = std::process::Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("__settle")
            .stdin(hand_over.to_file().unwrap())
            .output()
            .unwrap();
        assert!(ended.status.success(), "{ended:?}");
        let next = state(&*s).await.open.remove(0).next_attempt.unwrap();
        let believed = now + DELAY..now + DELAY + 2 * MINUTE;
        assert!(believed.contains(&next.at), "{} ms", next.at - now);
        assert_eq!(next.trigger, Trigger::Retry);
    }
}

#[tokio::test]
async fn redis_scripts_are_loaded_again_after_a_script_flush() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    server(&mut bed).command::<()>(&["SCRIPT", "FLUSH"]);
    let c = claim(now, "a");
    let g = granted(&*s, &c).await;
    server(&mut bed).command::<()>(&["SCRIPT", "FLUSH"]);
    assert_eq!(
        s.renew(&renewal(&c, g, 1)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    assert_eq!(
        settle(&*s, &c, g, Outcome::Succeeded).await,
        Settlement::Done
    );
}

#[tokio::test]
async fn redis_that_kept_its_data_is_quarantined_until_it_is_adopted() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let (old_now, old) = self::now(&*s).await;
    let f = s.heartbeat(None).await.unwrap().value;
    let (mine, dead) = (
        claim(now - 100, "a"),
        Claim {
            job: job("other"),
            ..claim(now - 100, "x")
        },
    );
    let g = granted(&*s, &mine).await;
    let more = Register {
        job: job("other"),
        ..registration("other", Some(&old))
    };
    let _ = register(&*s, more.clone()).await;
    granted(&*s, &dead).await;
    server(&mut bed).restart();
    let (_, incarnation) = reconnect(&*s).await;
    assert_ne!(incarnation, old);
    let next = Claim {
        overlap: Overlap::Queue,
        ..claim(now, "b")
    };
    assert_eq!(one(&*s, &next).await, Answer::Quarantined);
    // Neither the same claim sent again nor a look at the lease is a way around it.
    let open = state(&*s).await.open[0].clone();
    assert_eq!(one(&*s, &mine).await, Answer::Quarantined);
    let observer = Claim {
        observed: observed(&open),
        ..claim(now - 100, "b")
    };
    assert_eq!(one(&*s, &observer).await, Answer::Quarantined);
    let (answer, st) = register(&*s, registration("backup", Some(&old))).await;
    assert_eq!(
        (answer, st.unwrap().incarnation),
        (Registration::Quarantined, old.to_string())
    );
    let f2 = s.heartbeat(None).await.unwrap().value;
    assert!(f2.born >= f.born && f2.born >= old_now && !f2.open);
    // The holder lives and reclaims; then both jobs are adopted.
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    let (answer, st) = register(&*s, registration("backup", Some(&incarnation))).await;
    let st = st.unwrap();
    assert_eq!(
        (answer, st.incarnation.as_str()),
        (Registration::Ready, &*incarnation)
    );
    assert_eq!(
        (st.open[0].run.id, st.open[0].incarnation.as_str()),
        (mine.run, &*incarnation)
    );
    assert!(matches!(one(&*s, &next).await, Answer::Blocked(o) if o.run.id == mine.run));
    let more = Register {
        adopt: Some(incarnation.to_string()),
        epoch: None,
        ..more
    };
    let (_, st) = register(&*s, more).await;
    let st = st.unwrap();
    assert!(st.open.is_empty());
    assert_eq!(st.last.unwrap().outcome, Outcome::Unknown);
    let h = s.history(&job("other"), 5).await.unwrap();
    assert_eq!(
        (h[0].run_id, h[0].outcome),
        (Some(dead.run), Outcome::Unknown)
    );
    assert!(matches!(one(&*s, &dead).await, Answer::Settled(_)));
}

/// Everything is lost while a run goes on.
async fn loses_everything(lose: impl Fn(&mut RedisServer)) {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 100, "a");
    let g = granted(&*s, &mine).await;
    lose(server(&mut bed));
    let (_, incarnation) = reconnect(&*s).await;
    assert_eq!(one(&*s, &mine).await, Answer::Absent);
    assert_eq!(one(&*s, &claim(now - 100, "b")).await, Answer::Absent);
    assert_eq!(
        register(&*s, registration("backup", None)).await.0,
        Registration::Absent
    );
    assert!(!s.heartbeat(None).await.unwrap().value.open);
    // Reclaimed into the new incarnation: still nothing is granted.
    reclaims(&*s, &mine, g, 5).await;
    let open = state(&*s).await.open[0].clone();
    assert_eq!((open.run.id, open.seq, open.run.attempt), (mine.run, 5, 1));
    assert_eq!(open.incarnation, *incarnation);
    assert_eq!(one(&*s, &claim(now - 100, "b")).await, Answer::Quarantined);
    // The job is adopted after the quarantine; nobody knows what became of the occurrences before.
    let r = Register {
        known: Occurrence(now - 5000),
        lost: vec![Missed {
            first: Occurrence(now - 80),
            last: Occurrence(now - 60),
            count: 3,
        }],
        ..registration("backup", Some(&incarnation))
    };
    let (answer, st) = register(&*s, r).await;
    assert_eq!(
        (answer, st.unwrap().newest),
        (Registration::Ready, now - 60)
    );
    let h = s.history(&j(), 5).await.unwrap();
    assert_eq!(
        (h[0].outcome, h[0].occurrence.0, h[0].count),
        (Outcome::Unknown, now - 60, 3)
    );
    assert!(
        matches!(one(&*s, &claim(now - 100, "b")).await, Answer::Running(o) if o.run.id == mine.run)
    );
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(matches!(
        one(&*s, &claim(now - 100, "b")).await,
        Answer::Settled(Some(_))
    ));
    assert!(matches!(
        one(&*s, &claim(now - 60, "b")).await,
        Answer::Settled(None)
    ));
    let next = Claim {
        overlap: Overlap::Queue,
        ..claim(now, "b")
    };
    assert!(matches!(one(&*s, &next).await, Answer::Granted(_)));
}

#[tokio::test]
async fn redis_restarted_empty_takes_a_lease_back_and_runs_nothing_twice() {
    loses_everything(RedisServer::restart_empty).await;
}

#[tokio::test]
async fn redis_flushed_takes_a_lease_back_and_runs_nothing_twice() {
    loses_everything(|s| s.flush()).await;
}

/// The scripts doubt their server's clock where the rule in Rust does: `AHEAD` and `BEHIND` come from there.
#[tokio::test]
async fn redis_is_in_doubt_where_the_rules_say() {
    let mut bed = Bed::redis();
    let _ = now(&*bed.store()).await;
    let server = server(&mut bed);
    let script =
        ::redis::Script::new(soloist::store::redis::script("claim").expect("there is one"));
    let client = ::redis::Client::open(server.url()).unwrap();
    let mut c = client.get_connection().unwrap();
    for believed_ahead in [-60_000, -13_000, -7_000, 0, 500, 5_000] {
        let (s, us): (i64, i64) = ::redis::cmd("TIME").query(&mut c).unwrap();
        let shown = s * 1000 + us / 1000;
        let believed = shown + believed_ahead;
        let mut call = script.key("soloist:{x}:state");
        call.key("soloist:{x}:history")
            .arg(&["a", "h", "soloist:events", "x"]);
        call.arg(shown).arg(0).arg("r").arg(shown + 60_000);
        call.arg(&["skip", "schedule", "", ""]).arg(believed);
        let (_, _, said): (i64, String, Vec<String>) = call.invoke(&mut c).unwrap();
        let doubted = soloist::logic::belief::in_doubt(believed, shown);
        let expected = if doubted { "in_doubt" } else { "absent" };
        assert_eq!(said, [expected], "{believed_ahead} ms");
    }
}

/// Foreign data says that a run had a petabyte of output: dropping that holds up no other request.
#[tokio::test]
async fn redis_counts_through_no_more_output_than_a_run_can_have() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 100, "a");
    let _ = granted(&*s, &mine).await;
    s.append_output(&j(), mine.run, 0, b"some", 100, &Marks::default())
        .await
        .unwrap();
    let key = format!("soloist:{{backup}}:output:{}", mine.run);
    let stop = 1_u64 << 50;
    server(&mut bed).command::<()>(&["HSET", &key, "stop", &stop.to_string()]);
    let told = s
        .append_output(&j(), mine.run, stop + 1, b"more", 100, &Marks::default())
        .await;
    told.expect("an answer in time");
    let output = s.output(&j(), mine.run, 0).await.unwrap();
    assert_eq!(output.unwrap().data, b"more");
}

/// Foreign data has the greatest possible number of renewals: the job's state stays readable.
#[tokio::test]
async fn redis_counts_renewals_no_further_than_they_can_be_read() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 100, "a");
    let g = granted(&*s, &mine).await;
    let key = "soloist:{backup}:state";
    let server = server(&mut bed);
    let open: String = server.command(&["HGET", key, "open"]);
    let most = open.replace("\"seq\":0", &format!("\"seq\":{}", u32::MAX));
    assert_ne!(most, open);
    server.command::<()>(&["HSET", key, "open", &most]);
    let renewed = s.renew(&renewal(&mine, g, 1)).await.unwrap().value;
    assert_eq!(renewed, Renewal::Renewed(None));
    assert_eq!(state(&*s).await.open[0].seq, u32::MAX);
    // Asked for again after a lost answer.
    assert_eq!(one(&*s, &mine).await, Answer::Granted(g));
    assert_eq!(state(&*s).await.open[0].seq, u32::MAX);
}

/// The run goes on and reclaims its lease, together with the key of its trigger.
#[tokio::test]
async fn redis_learns_the_key_of_a_trigger_again_from_its_run() {
    let mut bed = Bed::redis();
    let (s, _) = ready(&bed).await;
    let put = Control::Trigger { key: "k".into() };
    assert_eq!(control(&*s, put.clone()).await, Controlled::Done);
    let c = manual("k", None, "a");
    let g = granted(&*s, &c).await;
    server(&mut bed).flush();
    reclaims(&*s, &c, g, 1).await;
    assert_eq!(
        s.renew(&renewal(&c, g, 2)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    let (_, incarnation) = now(&*s).await;
    let _ = register(&*s, registration("backup", Some(&incarnation))).await;
    assert_eq!(
        control(&*s, put.clone()).await,
        Controlled::Triggered(g.occurrence)
    );
    assert_eq!(
        settle(&*s, &c, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert_eq!(control(&*s, put).await, Controlled::Triggered(g.occurrence));
    assert_eq!(state(&*s).await.triggered.len(), 1);
}

#[tokio::test]
async fn redis_with_an_older_state_does_not_make_an_attempt_twice() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let rerun = |instance: &str| Claim {
        on_crash: OnCrash::Rerun,
        max_attempts: 5,
        ..claim(now - 100, instance)
    };
    let first = rerun("a");
    granted(&*s, &first).await;
    let older = server(&mut bed).snapshot();
    let open = state(&*s).await.open[0].clone();
    let second = Claim {
        observed: observed(&open),
        ..rerun("b")
    };
    let g = granted(&*s, &second).await;
    assert_eq!(g.attempt, 2);
    server(&mut bed).kill();
    server(&mut bed).revive(Some(&older));
    let (_, incarnation) = reconnect(&*s).await;
    // The older state has the first attempt still running.
    assert_eq!(state(&*s).await.open[0].run.id, first.run);
    assert_eq!(
        settle(&*s, &second, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    let adopt = Register {
        on_crash: OnCrash::Rerun,
        max_attempts: 5,
        ..registration("backup", Some(&incarnation))
    };
    let (_, st) = register(&*s, adopt).await;
    assert!(st.unwrap().open.is_empty());
    assert!(matches!(one(&*s, &rerun("c")).await, Answer::Settled(_)));
}

#[tokio::test]
async fn redis_that_lost_a_grant_takes_it_back_from_its_holder() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let (_, old) = self::now(&*s).await;
    let older = server(&mut bed).snapshot();
    let mine = claim(now - 100, "a");
    let g = granted(&*s, &mine).await;
    server(&mut bed).kill();
    server(&mut bed).revive(Some(&older));
    let (_, incarnation) = reconnect(&*s).await;
    assert_ne!(incarnation, old);
    assert_eq!(state(&*s).await.newest, 0);
    assert_eq!(one(&*s, &claim(now - 100, "b")).await, Answer::Quarantined);
    reclaims(&*s, &mine, g, 1).await;
    let (_, st) = register(&*s, registration("backup", Some(&incarnation))).await;
    assert_eq!(st.unwrap().open.len(), 1);
    assert!(
        matches!(one(&*s, &claim(now - 100, "b")).await, Answer::Running(o) if o.run.id == mine.run)
    );
}

/// A holder that is frozen between its grant and its start is found dead, the server is restarted with its data, and
/// the holder thaws.
#[tokio::test]
async fn redis_restarted_after_a_takeover_does_not_give_the_dead_lease_back() {
    for on_crash in [OnCrash::Fail, OnCrash::Rerun] {
        let mut bed = Bed::redis();
        let (s, now) = ready(&bed).await;
        let claim_of = |instance: &str| Claim {
            on_crash,
            max_attempts: 2,
            ..claim(now - 100, instance)
        };
        let first = claim_of("a");
        let g = granted(&*s, &first).await;
        let second = Claim {
            observed: observed(&state(&*s).await.open[0]),
            ..claim_of("b")
        };
        match one(&*s, &second).await {
            // Ended, so that nothing open tells of the occurrence.
            Answer::Granted(g) => {
                let end = settle(&*s, &second, g, Outcome::Succeeded).await;
                assert_eq!(end, Settlement::Done);
            }
            Answer::Settled(_) | Answer::Recorded { .. } => {}
            other => panic!("{other:?}"),
        }
        server(&mut bed).restart();
        reconnect(&*s).await;
        let renewed = s.renew(&renewal(&first, g, 1)).await.unwrap().value;
        assert_eq!(renewed, Renewal::Lost, "{on_crash:?}");
        assert_eq!(state(&*s).await.open, []);
    }
}

#[tokio::test]
async fn redis_restarted_after_a_settlement_does_not_reopen_it() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 100, "a");
    let g = granted(&*s, &mine).await;
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    server(&mut bed).restart();
    reconnect(&*s).await;
    // The settlement's reply was lost, and the holder still renews.
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Lost
    );
    assert_eq!(
        settle(&*s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    assert!(state(&*s).await.open.is_empty());
}

#[tokio::test]
async fn redis_that_is_full_renews_and_settles_and_grants_nothing() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let mine = claim(now - 100, "a");
    let g = granted(&*s, &mine).await;
    let beat = Beat {
        instance: InstanceId::new("a"),
        info: info(1),
        quarantine: Duration::from_secs(1),
        open: None,
    };
    server(&mut bed).command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let e = s.claim(&[claim(now, "b")]).await.unwrap_err();
    assert!(
        e.to_string()
            .contains("the server is full; raise its maxmemory"),
        "{e}"
    );
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    let r = s.heartbeat(Some(&beat)).await.unwrap().value;
    assert_eq!(r.instances.len(), 1);
    let tail = Tail {
        data: b"bye".to_vec(),
        ..nothing()
    };
    let settle = settlement(&mine, g, Outcome::Succeeded);
    assert_eq!(
        s.settle(&settle, &tail).await.unwrap().value,
        Settlement::Done
    );
    server(&mut bed).command::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(s.history(&j(), 5).await.unwrap()[0].output_tail, "bye");
    // A refused request leaves nothing behind.
    assert_eq!(state(&*s).await.newest, now - 100);
}

/// Calls the script as `RedisStore` does, because a race between two instances cannot be repeated reliably.
#[tokio::test]
async fn redis_replaces_a_state_only_if_it_is_what_was_read() {
    let mut bed = Bed::redis();
    let (_, incarnation) = now(&*bed.store()).await;
    let server = server(&mut bed);
    let script = soloist::store::redis::script("compare_and_set").expect("there is one");
    let script = ::redis::Script::new(script);
    let mut c = ::redis::Client::open(server.url())
        .and_then(|c| c.get_connection())
        .unwrap();
    let mut compare_and_set = |incarnation: &str, was: &[&str], set: &[&str]| {
        let mut call = script.key("soloist:{backup}:state");
        call.key("soloist:{backup}:history");
        call.key("soloist:epoch").key("soloist:jobs");
        call.arg(incarnation)
            .arg("soloist:events")
            .arg("")
            .arg("backup");
        for list in [was, set, &[], &[], &[]] {
            call.arg(list.len()).arg(list);
        }
        let (_, _, done): (i64, String, i64) = call.arg("").invoke(&mut c).unwrap();
        done == 1
    };
    assert!(compare_and_set(
        &incarnation,
        &[],
        &["schedule", "s", "newest", "5"]
    ));
    let read = ["schedule", "s", "newest", "5"];
    // Another incarnation than the one that was read.
    assert!(!compare_and_set("another", &read, &["schedule", "x"]));
    // Another value; a field more; one less.
    assert!(!compare_and_set(
        &incarnation,
        &["schedule", "s", "newest", "4"],
        &["schedule", "x"]
    ));
    assert!(!compare_and_set(
        &incarnation,
        &["schedule", "s"],
        &["schedule", "x"]
    ));
    assert!(!compare_and_set(
        &incarnation,
        &["schedule", "s", "newest", "5", "skip", "1"],
        &["schedule", "x"]
    ));
    assert!(!compare_and_set(
        &incarnation,
        &["schedule", "s", "skip", "1"],
        &["schedule", "x"]
    ));
    let state: Vec<(String, String)> = server.command(&["HGETALL", "soloist:{backup}:state"]);
    let schedule = state.iter().find(|(name, _)| name == "schedule");
    assert_eq!(schedule.map(|(_, v)| &**v), Some("s"));
    assert!(compare_and_set(&incarnation, &read, &["schedule", "x"]));
}

/// All of them change the same field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_loses_no_change_to_another_one() {
    const CHANGES: usize = 30;
    let bed = Bed::redis();
    let (s, _) = ready(&bed).await;
    let stores: Vec<_> = (0..3).map(|_| bed.store()).collect();
    let all = (0..CHANGES).map(|i| {
        let s = stores[i % stores.len()].clone();
        tokio::spawn(async move {
            control(
                &*s,
                Control::Trigger {
                    key: format!("k{i}"),
                },
            )
            .await
        })
    });
    for done in futures_util::future::join_all(all).await {
        assert_eq!(done.unwrap(), Controlled::Done);
    }
    let mut keys: Vec<String> = state(&*s)
        .await
        .triggers
        .into_iter()
        .map(|t| t.key)
        .collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), CHANGES);
}

/// Existing connections lead nowhere any more; connections to a server that is no primary are as useless.
#[tokio::test]
async fn redis_connections_that_failed_are_not_used_again() {
    let (first, second) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(first.port());
    let mut c = settings(&proxy.url());
    c.timeout = Duration::from_millis(300);
    c.pool_size = 1;
    let s = soloist::store::redis::RedisStore::open(&proxy.url(), &c).unwrap();
    let nobody = Claim {
        job: job("nobody"),
        ..claim(1, "a")
    };
    let gone = renewal(
        &nobody,
        Grant {
            occurrence: Occurrence(1),
            attempt: 1,
            trigger: Trigger::Schedule,
        },
        1,
    );
    let ask = async || -> Vec<Option<Error>> {
        let renewed = s.renew(&gone).await;
        let piece = s
            .append_output(&j(), gone.run.id, 0, b"x", 9, &Marks::default())
            .await;
        vec![
            s.claim(std::slice::from_ref(&nobody)).await.err(),
            renewed.err(),
            piece.err(),
        ]
    };
    assert!(ask().await.iter().all(Option::is_none));
    proxy.forget_connections();
    // Requests that were under way before may still arrive.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let failed = ask().await;
    assert!(
        failed.iter().flatten().all(Error::is_transient),
        "{failed:?}"
    );
    assert_eq!(failed.iter().flatten().count(), 3, "{failed:?}");
    let next = ask().await;
    assert!(
        next.iter().all(Option::is_none),
        "after a timeout: {next:?}"
    );
    // By now the proxy leads to the primary.
    proxy.redirect(second.port());
    let port = second.port().to_string();
    first.command::<()>(&["REPLICAOF", "127.0.0.1", &port]);
    let failed = ask().await;
    assert_eq!(failed.iter().flatten().count(), 3, "{failed:?}");
    let next = ask().await;
    assert!(next.iter().all(Option::is_none), "after READONLY: {next:?}");
}

/// Otherwise an instance would begin runs that it could not keep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_without_a_connection_for_renewals_is_not_safe_to_use() {
    let server = RedisServer::start();
    let mut c = settings(&server.url());
    c.pool_size = 1;
    let s = soloist::store::redis::RedisStore::open(&server.url(), &c).unwrap();
    // Its one connection for all that is not a renewal.
    s.heartbeat(None).await.unwrap();
    let client = ::redis::Client::open(server.url()).unwrap();
    let mut admin = client.get_connection().unwrap();
    let mut clients = |most: u32| {
        let mut set = ::redis::cmd("CONFIG");
        set.arg("SET").arg("maxclients").arg(most);
        set.query::<()>(&mut admin).unwrap();
    };
    clients(1);
    let found = s.check().await.unwrap();
    let [Problem { fatal: true, text }] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(
        text.contains("if the server's maxclients is reached"),
        "{text}"
    );
    clients(100);
    assert_eq!(s.check().await.unwrap(), []);
    // From now on it has that connection.
    clients(1);
    assert_eq!(s.check().await.unwrap(), []);
}

#[tokio::test]
async fn redis_tells_of_a_gap_when_hints_may_have_been_lost() {
    let mut bed = Bed::redis();
    let s = bed.store();
    let mut events = s.events();
    let gap = async |events: &mut broadcast::Receiver<Event>, when: &str| {
        let received = async {
            loop {
                if events.recv().await.unwrap() == Event::Gap {
                    return;
                }
            }
        };
        let received = tokio::time::timeout(crate::support::GENEROUS, received).await;
        received.unwrap_or_else(|_| panic!("no gap is received {when}"));
    };
    gap(&mut events, "at the beginning").await;
    for _ in 0..2 {
        let killed: i64 = server(&mut bed).command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        assert_eq!(killed, 1);
        gap(&mut events, "after a new connection").await;
    }
}

#[tokio::test]
async fn redis_renews_many_at_once_and_an_error_is_one_run_s_alone() {
    let mut bed = Bed::redis();
    let s = bed.store();
    let (now, incarnation) = now(&*s).await;
    let names: Vec<String> = (0..250).map(|i| format!("j{i}")).collect();
    let all: Vec<Register> = names
        .iter()
        .map(|n| registration(n, Some(&incarnation)))
        .collect();
    let _ = s.register(&all).await.unwrap();
    let claims: Vec<Claim> = names
        .iter()
        .map(|n| Claim {
            job: job(n),
            ..claim(now, "a")
        })
        .collect();
    let answers = s.claim(&claims).await.unwrap().value;
    let mut asks = vec![];
    for (c, answer) in claims.iter().zip(&answers) {
        let Answer::Granted(g) = answer else {
            panic!("{answer:?}");
        };
        asks.push(renewal(c, *g, 1));
    }
    let server = server(&mut bed);
    server.command::<()>(&["SET", "soloist:{j7}:state", "of somebody else"]);
    server.command::<()>(&["SCRIPT", "FLUSH"]);
    let before = Boottime::now();
    let renewals = futures_util::future::join_all(asks.iter().map(|r| s.renew(r))).await;
    for (i, renewal) in renewals.into_iter().enumerate() {
        if i == 7 {
            let e = renewal.unwrap_err();
            assert!(e.to_string().contains("WRONGTYPE"), "{e}");
            continue;
        }
        let renewal = renewal.unwrap();
        assert_eq!(renewal.value, Renewal::Renewed(None));
        assert!(before <= renewal.sent && renewal.sent <= renewal.received);
    }
    let seen = s.observe(&[job("j3")]).await.unwrap().value.remove(0);
    assert_eq!(seen.unwrap().open[0].seq, 1);
}

#[tokio::test]
async fn redis_forgets_what_is_no_state_after_its_time() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let (first, second) = (claim(now - 2000, "a"), claim(now - 1000, "a"));
    let g = granted(&*s, &first).await;
    let tail = Tail {
        data: b"out".to_vec(),
        ..nothing()
    };
    let settled = settlement(&first, g, Outcome::Succeeded);
    let _ = s.settle(&settled, &tail).await.unwrap();
    let _ = granted(&*s, &second).await;
    s.append_output(&j(), second.run, 0, b"live", 10, &Marks::default())
        .await
        .unwrap();
    let decision = Decision {
        job: j(),
        occurrence: Occurrence(now),
        instance: InstanceId::new("a"),
        at: now,
        decision: "won".to_owned(),
        detail: String::new(),
    };
    s.journal(&[decision]).await.unwrap();
    let beat = Beat {
        instance: InstanceId::new("a"),
        info: info(1),
        quarantine: Duration::from_secs(1),
        open: None,
    };
    s.heartbeat(Some(&beat)).await.unwrap();
    s.drain(&InstanceId::new("a"), true, "alice").await.unwrap();
    s.heartbeat(Some(&beat)).await.unwrap();
    let keys = [
        ("{backup}:history".to_owned(), store::RECORDS_TTL),
        ("{backup}:decisions".to_owned(), store::DECISIONS_TTL),
        (
            format!("{{backup}}:output:{}", first.run),
            store::OUTPUT_TTL,
        ),
        (
            format!("{{backup}}:output:{}", second.run),
            store::OUTPUT_TTL,
        ),
        ("instances".to_owned(), store::FORGET_INSTANCE),
    ];
    let server = server(&mut bed);
    for (key, ttl) in keys {
        let key = format!("soloist:{key}");
        let left: i64 = server.command(&["PTTL", &key]);
        let ttl = ttl.as_millis() as i64;
        assert!(
            (ttl - 600_000..=ttl).contains(&left),
            "{key} expires in {left} of {ttl} ms"
        );
    }
    for key in ["{backup}:state", "drains", "epoch"] {
        let left: i64 = server.command(&["PTTL", &format!("soloist:{key}")]);
        assert_eq!(left, -1, "{key} has no expiry");
    }
}

#[tokio::test]
async fn redis_keeps_a_drain_as_long_as_its_instance() {
    let mut bed = Bed::redis();
    let s = bed.store();
    let (a, b) = (InstanceId::new("a"), InstanceId::new("b"));
    let beat = async |instance: &InstanceId| {
        let beat = Beat {
            instance: instance.clone(),
            info: info(1),
            quarantine: Duration::from_secs(1),
            open: None,
        };
        s.heartbeat(Some(&beat)).await.unwrap().value.drains
    };
    let drained = std::slice::from_ref(&a);
    beat(&a).await;
    s.drain(&a, true, "alice@web-1").await.unwrap();
    assert_eq!(beat(&b).await, drained);
    // As by a server's clock that was ahead for a moment: all instances look as if they had been silent for long.
    let server = server(&mut bed);
    for _ in 0..2 {
        server.command::<()>(&["DEL", "soloist:instances"]);
        assert_eq!(beat(&b).await, drained);
        assert_eq!(beat(&a).await, drained);
    }
    let since: String = server.command(&["HGET", "soloist:drains", "a"]);
    assert_eq!(since, "1 alice@web-1", "it lives");
    // The instance does not come back.
    server.command::<()>(&["HDEL", "soloist:instances", "a"]);
    assert_eq!(beat(&b).await, drained);
    let since: String = server.command(&["HGET", "soloist:drains", "a"]);
    let since: i64 = since.strip_suffix(" alice@web-1").unwrap().parse().unwrap();
    let long_ago = (since - store::FORGET_INSTANCE.as_millis() as i64 - 1000).to_string();
    server.command::<()>(&["HSET", "soloist:drains", "a", &long_ago]);
    assert_eq!(beat(&b).await, []);
}

#[tokio::test]
async fn redis_needs_few_permissions_and_names_the_missing() {
    let mut bed = Bed::redis();
    let server = server(&mut bed);
    let rules = "ACL SETUSER soloist on >secret resetkeys ~soloist:* resetchannels &soloist:* -@all +evalsha \
                 +script|load +info +time +publish +subscribe +hget +hmget +hset +hdel +hgetall +hlen +hincrby \
                 +lpush +lrange +ltrim +rpop +del +exists +persist +pexpire +sadd +smembers";
    server.command::<()>(&rules.split_whitespace().collect::<Vec<_>>());
    let mut c = settings(&server.url());
    c.username = Some("soloist".to_owned());
    c.password = Some(soloist::config::Secret::new("secret"));
    let s = soloist::store::redis::RedisStore::open(&server.url(), &c).unwrap();
    let (now, incarnation) = self::now(&s).await;
    let _ = register(&s, registration("backup", Some(&incarnation))).await;
    let mine = claim(now, "a");
    let g = granted(&s, &mine).await;
    assert_eq!(
        s.renew(&renewal(&mine, g, 1)).await.unwrap().value,
        Renewal::Renewed(None)
    );
    assert_eq!(
        settle(&s, &mine, g, Outcome::Succeeded).await,
        Settlement::Done
    );
    s.journal(&[]).await.unwrap();
    s.heartbeat(None).await.unwrap();
    listen(&s).await;
    server.command::<()>(&["ACL", "SETUSER", "soloist", "-evalsha"]);
    let e = s.observe(&[]).await.unwrap_err();
    assert!(matches!(e, Error::Refused { .. }), "{e}");
    assert!(e.to_string().contains("evalsha"), "{e}");
    c.password = Some(soloist::config::Secret::new("wrong"));
    let s = soloist::store::redis::RedisStore::open(&server.url(), &c).unwrap();
    let e = s.observe(&[]).await.unwrap_err();
    assert!(e.to_string().to_lowercase().contains("password"), "{e}");
    assert!(!e.to_string().contains("wrong"), "{e}");
}

#[tokio::test]
async fn redis_with_foreign_data_is_an_error_and_no_panic() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let server = server(&mut bed);
    server.command::<()>(&["HSET", "soloist:{backup}:state", "open", "[{\"x\":1}]"]);
    let e = s.observe(&[j()]).await.unwrap_err();
    assert!(
        matches!(e, Error::Corrupt { .. }) && e.to_string().contains("field open"),
        "{e}"
    );
    server.command::<()>(&["SET", "soloist:{backup}:state", "x"]);
    let e = s.claim(&[claim(now, "a")]).await.unwrap_err();
    assert!(
        matches!(e, Error::Corrupt { .. }) && e.to_string().contains("WRONGTYPE"),
        "{e}"
    );
}

/// What another program wrote among the instances, or removed from the epoch, costs none of the others.
#[tokio::test]
async fn redis_knows_its_instances_among_what_others_wrote() {
    let mut bed = Bed::redis();
    let s = bed.store();
    let a = InstanceId::new("a");
    let beat = Beat {
        instance: a.clone(),
        info: info(1),
        quarantine: Duration::from_secs(1),
        open: None,
    };
    let first = s.heartbeat(Some(&beat)).await.unwrap().value;
    let server = server(&mut bed);
    let odd = "{\"seen\":99999999999999}";
    let add = ["a", odd, "z", odd, "number", "7", "text", "x"];
    server.command::<()>(&[&["HSET", "soloist:instances"][..], &add].concat());
    let fleet = s.heartbeat(Some(&beat)).await.unwrap().value;
    assert_eq!(fleet.instances.keys().collect::<Vec<_>>(), [&a]);
    let left: Vec<String> = server.command(&["HKEYS", "soloist:instances"]);
    assert!(
        !left.iter().any(|name| name == "number" || name == "text"),
        "{left:?}"
    );
    // An entry that does not say of which process it is belongs to no living one.
    server.command::<()>(&[
        "HSET",
        "soloist:instances",
        "a",
        "{\"seen\":99999999999999}",
    ]);
    s.leave(&a, 1).await.unwrap();
    let has: i64 = server.command(&["HEXISTS", "soloist:instances", "a"]);
    assert_eq!(has, 1);
    // Without its id an epoch ends.
    server.command::<()>(&["HDEL", "soloist:epoch", "id"]);
    let fleet = s.heartbeat(Some(&beat)).await.unwrap().value;
    assert_ne!(fleet.id, first.id);
}

#[tokio::test]
async fn redis_that_is_gone_is_an_error_and_comes_back() {
    let mut bed = Bed::redis();
    let (s, now) = ready(&bed).await;
    let server = server(&mut bed);
    let all = server.snapshot();
    server.kill();
    let e = s.claim(&[claim(now, "a")]).await.unwrap_err();
    assert!(e.is_transient(), "{e}");
    let e = s.claim(&[claim(now, "a")]).await.unwrap_err();
    assert!(e.is_transient(), "{e}");
    server.revive(Some(&all));
    let answer = patient(|| s.claim(&[])).await;
    assert!(answer.value.is_empty());
}

/// In a state that is older than the grant, earlier attempts are over, and later ones are not.
#[test]
fn a_settlement_ends_the_attempts_up_to_its_own() {
    let c = claim(1000, "a");
    let entry = |attempt: u32| {
        let theirs = claim(1000, "b");
        Open {
            run: Run {
                occurrence: Occurrence(1000),
                attempt,
                trigger: Trigger::Schedule,
                key: None,
                id: theirs.run,
                instance: theirs.instance,
                host: theirs.host,
                lease: 1,
                definition: "d1".into(),
                granted_at: 0,
            },
            seq: 0,
            incarnation: "before".into(),
            renewed_at: 0,
            stop: None,
            next_attempt: None,
            by: None,
            stopped_by: None,
        }
    };
    for (attempt, left) in [(1, 1), (2, 0), (3, 0)] {
        let mut st = Some(State {
            incarnation: "before".into(),
            newest: 1000,
            open: vec![entry(2)],
            ..State::default()
        });
        let g = Grant {
            occurrence: Occurrence(1000),
            attempt,
            trigger: Trigger::Schedule,
        };
        let mut settled = settlement(&c, g, Outcome::Succeeded);
        settled.record.attempt = attempt;
        let mut effects = soloist::logic::claim::Effects::default();
        let done = soloist::logic::claim::settle(&mut st, &settled, 2_000_000, "now", &mut effects);
        assert_eq!(done, Settlement::Done);
        assert_eq!(st.unwrap().open.len(), left, "attempt {attempt}");
    }
}

/// The data is lost between the second look at the epoch and the step that adopts: a job with a living holder looks
/// like a new one then.
#[tokio::test]
async fn redis_adopts_a_state_only_in_the_epoch_that_was_seen() {
    let mut bed = Bed::redis();
    let s = bed.store();
    let seen = s.heartbeat(None).await.unwrap();
    let adopt = Register {
        epoch: Some(seen.value.id.to_string()),
        ..registration("backup", Some(&seen.incarnation))
    };
    server(&mut bed).flush();
    assert_eq!(
        register(&*s, adopt.clone()).await,
        (Registration::Absent, None)
    );
    let anew = s.heartbeat(None).await.unwrap();
    assert_ne!(anew.value.id, seen.value.id);
    assert_eq!(
        register(&*s, adopt.clone()).await,
        (Registration::Absent, None)
    );
    let adopt = Register {
        epoch: Some(anew.value.id.to_string()),
        ..adopt
    };
    assert_eq!(register(&*s, adopt).await.0, Registration::Ready);
}
