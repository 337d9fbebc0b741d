//! Holders in this process, over a store whose answers are delayed: from the grant to the settlement, with real guards.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use soloist::{
    clock::{Boottime, StoreClock},
    config::{self, Job},
    contender::{Contender, Granted, Parts},
    guard,
    holder::Holder,
    logic::{
        claim::{
            Answer, Claim, Control, Controlled, Event, OnCrash, Overlap, Register, Registration,
            Renew, Renewal, Settle, Settlement, State, Target,
        },
        delays::Delays,
    },
    model::{InstanceId, JobName, Marks, Occurrence, Outcome, RunId, RunRecord, Trigger},
    runner::Runner,
    store::{
        Beat, Decision, Error, Fleet, OUTPUT_AT_ONCE, Output, Reply, Store, Tail,
        memory::MemoryStore,
    },
};
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::support::{GENEROUS, process, registration};

/// A store, as one holder reaches it.
struct Line {
    store: MemoryStore,
    /// Renewals that the store was asked for, and those that it confirmed, with when they left.
    renewals: AtomicU32,
    confirmed: Mutex<Vec<Boottime>>,
    /// Whether each renewal said that it left after the end of trust.
    late: Mutex<Vec<bool>>,
    /// Renewals are answered when this is over.
    hold_renewals: AtomicBool,
    /// No renewal gets through any more.
    cut: AtomicBool,
    /// For so many more pieces of output the store's answer is lost.
    lost_pieces: AtomicU32,
    go_on: Notify,
    /// A server at this address; None: a file.
    address: Option<&'static str>,
}

fn lost() -> Error {
    Error::Unreachable {
        address: "the test".into(),
        reason: "lost".into(),
    }
}

impl Line {
    fn new(address: Option<&'static str>) -> Arc<Self> {
        Arc::new(Self {
            address,
            store: MemoryStore::new(),
            renewals: AtomicU32::new(0),
            confirmed: Mutex::default(),
            late: Mutex::default(),
            hold_renewals: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            lost_pieces: AtomicU32::new(0),
            go_on: Notify::new(),
        })
    }
    fn hold_renewals(&self) {
        self.hold_renewals.store(true, Ordering::SeqCst);
    }
    fn let_go(&self) {
        self.hold_renewals.store(false, Ordering::SeqCst);
        self.go_on.notify_waiters();
    }
    fn renewals(&self) -> u32 {
        self.renewals.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Store for Line {
    fn address(&self) -> &str {
        self.address.unwrap_or("/state.db")
    }
    fn durable(&self) -> bool {
        self.address.is_none()
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        self.store.believe(clock);
    }
    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        self.store.claim(claims).await
    }
    async fn renew(&self, r: &Renew) -> Result<Reply<Renewal>, Error> {
        if self.cut.load(Ordering::SeqCst) {
            return Err(lost());
        }
        let reply = self.store.renew(r).await?;
        self.late
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(r.late);
        self.renewals.fetch_add(1, Ordering::SeqCst);
        loop {
            let go_on = self.go_on.notified();
            if !self.hold_renewals.load(Ordering::SeqCst) {
                break;
            }
            go_on.await;
        }
        let mut confirmed = self
            .confirmed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        confirmed.push(reply.sent);
        Ok(reply)
    }
    async fn settle(&self, s: &Settle, t: &Tail) -> Result<Reply<Settlement>, Error> {
        self.store.settle(s, t).await
    }
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        self.store.register(jobs).await
    }
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        self.store.control(job, what).await
    }
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        self.store.observe(jobs).await
    }
    async fn heartbeat(&self, b: Option<&Beat>) -> Result<Reply<Fleet>, Error> {
        self.store.heartbeat(b).await
    }
    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        self.store.jobs().await
    }
    async fn leave(&self, i: &InstanceId, process: u32) -> Result<(), Error> {
        self.store.leave(i, process).await
    }
    async fn drain(&self, i: &InstanceId, on: bool, by: &str) -> Result<(), Error> {
        self.store.drain(i, on, by).await
    }
    async fn notices(&self, all: bool) -> Result<Reply<soloist::store::Notices>, Error> {
        self.store.notices(all).await
    }
    async fn note(
        &self,
        w: &soloist::logic::notify::lease::Write,
    ) -> Result<Reply<soloist::logic::notify::lease::Written>, Error> {
        self.store.note(w).await
    }
    async fn journal(&self, d: &[Decision]) -> Result<(), Error> {
        self.store.journal(d).await
    }
    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error> {
        self.store.decisions(job).await
    }
    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        self.store.history(job, n).await
    }
    async fn append_output(
        &self,
        job: &JobName,
        run: RunId,
        at: u64,
        data: &[u8],
        keep: usize,
        stderr: &Marks,
    ) -> Result<(), Error> {
        assert!(data.len() <= OUTPUT_AT_ONCE);
        self.store
            .append_output(job, run, at, data, keep, stderr)
            .await?;
        let one_less = |n: u32| n.checked_sub(1);
        let left = &self.lost_pieces;
        match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less) {
            Ok(_) => Err(lost()),
            Err(_) => Ok(()),
        }
    }
    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        self.store.output(job, run, from).await
    }
    fn events(&self) -> broadcast::Receiver<Event> {
        self.store.events()
    }
}

/// The parts of one instance that a granted run needs.
struct Node {
    line: Arc<Line>,
    holder: Arc<Holder>,
    contender: Arc<Contender>,
    job: Arc<Job>,
}

impl Node {
    /// With one job of these lines.
    async fn new(lines: &str) -> Self {
        Self::of(lines, Some("memory:")).await
    }

    /// With one job of these lines, over a new store at this address.
    async fn of(lines: &str, address: Option<&'static str>) -> Self {
        let text = format!("store.url = \"memory:\"\n[jobs.work]\n{lines}\n");
        let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None)
            .unwrap_or_else(|e| panic!("{e}"));
        let job = config.jobs.values().next().expect("a job").clone();
        let line = Line::new(address);
        let store: Arc<dyn Store> = line.clone();
        let clock = Arc::new(StoreClock::default());
        let instance = InstanceId::new("a");
        let (journal, _) = mpsc::channel(1);
        let (plans, _) = mpsc::unbounded_channel();
        let contender = Contender::build(
            Parts {
                store: store.clone(),
                clock: clock.clone(),
                instance: instance.clone(),
                host: "a".into(),
                retry: config.store.retry.clone(),
                max_parallel: None,
                journal,
                plans,
                health: std::sync::Arc::default(),
                last_will: None,
                stop: CancellationToken::new(),
                tasks: TaskTracker::new(),
            },
            Box::new(drop),
        );
        let runner = Runner::with_exe(env!("CARGO_BIN_EXE_soloist").into()).expect("a runner");
        let holder = Holder::new(store, clock, runner, instance, "a".into(), config.store);
        let first = line.heartbeat(None).await.expect("the store in memory");
        soloist::contender::note_clock(&holder.clock, &first);
        let register = registration(&job.name, Some(first.incarnation.to_string()));
        line.register(&[register]).await.expect("registered");
        Self {
            line,
            holder,
            contender: Arc::new(contender),
            job,
        }
    }

    /// Claims an occurrence of just now.
    async fn granted(&self) -> Granted {
        let run = RunId::random();
        let now = self.holder.clock.now_us().expect("a clock") / 1000;
        let claim = Claim {
            job: self.job.name.clone(),
            target: Target::Scheduled(Occurrence(now)),
            known: Occurrence(0),
            missed: vec![],
            run,
            instance: InstanceId::new("a"),
            host: "a".into(),
            trigger: Trigger::Schedule,
            start_by: now + 60_000,
            lease: self.job.lease.length.as_millis() as i64,
            overlap: Overlap::Skip,
            on_crash: OnCrash::Fail,
            max_attempts: 1,
            definition: "d".into(),
            observed: None,
            holds: vec![],
            cause: None,
        };
        let begun = Instant::now();
        let reply = loop {
            let reply = self.line.claim(std::slice::from_ref(&claim)).await;
            let reply = reply.expect("the store in memory");
            match reply.value[0] {
                Answer::Granted(_) => break reply,
                // The clock is not exact to the last microsecond.
                Answer::Early { .. } if begun.elapsed() < GENEROUS => {}
                ref other => panic!("not granted: {other:?}"),
            }
        };
        let Answer::Granted(grant) = reply.value[0] else {
            unreachable!("looked at above");
        };
        Granted {
            job: self.job.clone(),
            run: claim.run(grant, reply.now_us / 1000),
            incarnation: reply.incarnation,
            sent: reply.sent,
            start_by: now + 60_000,
            permit: None,
            in_will: None,
            too_late: None,
            slot: None,
            waits: Delays::default(),
            won: reply.received,
        }
    }

    fn start(&self, granted: Granted) {
        self.holder.start(self.contender.clone(), granted);
    }

    async fn record(&self) -> RunRecord {
        until("a record", async || {
            let mut all = self.line.history(&self.job.name, 10).await.ok()?;
            all.pop()
        })
        .await
    }

    async fn cancel(&self) {
        let job = &self.job.name;
        let done = self.line.control(job, &Control::Cancel).await;
        done.expect("the store in memory");
        self.holder.nudge(job);
    }
}

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(
            begun.elapsed() < GENEROUS,
            "waited in vain for this: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// With this lease, a renewal comes only when a test asks for it.
const LONG_LEASE: &str = "lease = \"1h\"";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_confirmation_of_a_renewal_does_not_lengthen_trust() {
    let node = Node::new("command = \"sleep 60\"\nlease = \"6s\"").await;
    let lease = *node.job.lease;
    node.line.hold_renewals();
    node.start(node.granted().await);
    until("a renewal", async || {
        (node.line.renewals() > 0).then_some(())
    })
    .await;
    // Just before the trust of the grant ends.
    tokio::time::sleep(lease.trust - lease.renew_every - Duration::from_millis(700)).await;
    node.line.cut.store(true, Ordering::SeqCst);
    node.line.let_go();
    let sent = until("its confirmation", async || {
        let confirmed = node.line.confirmed.lock();
        confirmed
            .unwrap_or_else(PoisonError::into_inner)
            .first()
            .copied()
    })
    .await;
    let record = node.record().await;
    assert_eq!(record.outcome, Outcome::LeaseLost, "{record:?}");
    let lived = Boottime::now().since(sent);
    assert!(
        lived >= lease.trust && lived < lease.length,
        "the run ended {lived:?} after the request that was confirmed last; trust lasts {:?}, the lease {:?}",
        lease.trust,
        lease.length
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_with_little_trust_left_is_renewed_before_its_command_starts() {
    let node = Node::new("command = \"true\"\nlease = \"60s\"").await;
    for (spent, late) in [(1.0, true), (0.9, false), (2.0, true)] {
        let mut granted = node.granted().await;
        let run = granted.run.id;
        granted.sent = granted.sent - node.job.lease.trust.mul_f64(spent);
        let before = node.line.renewals();
        node.line.hold_renewals();
        node.start(granted);
        until("a renewal", async || {
            (node.line.renewals() > before).then_some(())
        })
        .await;
        let all = node.line.late.lock();
        let newest = all.unwrap_or_else(PoisonError::into_inner).last().copied();
        assert_eq!(newest, Some(late), "{spent}");
        let newest = node.line.history(&node.job.name, 1).await.unwrap();
        assert!(newest.first().is_none_or(|r| r.run_id != Some(run)));
        node.line.let_go();
        let record = until("its record", async || {
            let all = node.line.history(&node.job.name, 10).await.ok()?;
            all.into_iter().find(|r| r.run_id == Some(run))
        })
        .await;
        assert_eq!(record.outcome, Outcome::Succeeded, "{record:?}");
    }
}

/// `start_within` is about the first attempt of an occurrence. A retry, or a takeover, runs however late it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_moment_for_a_start_is_that_of_the_first_attempt() {
    for (attempt, expected) in [
        (1, Outcome::Missed),
        (2, Outcome::Succeeded),
        (3, Outcome::Succeeded),
    ] {
        let node = Node::new(&format!("command = \"true\"\n{LONG_LEASE}")).await;
        let mut granted = node.granted().await;
        granted.run.attempt = attempt;
        granted.start_by -= 120_000;
        node.start(granted);
        let record = node.record().await;
        assert_eq!(record.outcome, expected, "{record:?}");
        let host = soloist::model::Wait::Host.cause();
        let why = record.error.as_deref().unwrap_or_default();
        assert_eq!(why.ends_with(host), expected == Outcome::Missed, "{why}");
    }
}

/// Fleets that have the same job in two stores do not meet in one trace. A server is known by its address, which
/// outlives its data; a file by its data, because many hosts have one at the same path.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trace_of_an_occurrence_is_that_of_its_store() {
    let mut occurrence = None;
    let mut traces = vec![];
    for (data, address) in [
        ("1", Some("a:6379")),
        ("2", Some("a:6379")),
        ("1", Some("b:6379")),
        ("1", None),
        ("2", None),
    ] {
        let node = Node::of(
            &format!("command = \"echo $TRACEPARENT\"\n{LONG_LEASE}"),
            address,
        )
        .await;
        let mut granted = node.granted().await;
        granted.incarnation = data.into();
        granted.run.occurrence = *occurrence.get_or_insert(granted.run.occurrence);
        node.start(granted);
        let record = node.record().await;
        let text = record.output_tail.split('-').nth(1).map(str::to_owned);
        traces.push(text.unwrap_or_else(|| panic!("{record:?}")));
    }
    let mut different = traces.clone();
    different.sort();
    different.dedup();
    assert_eq!((&traces[0], different.len()), (&traces[1], 4), "{traces:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_grant_is_started_without_a_renewal() {
    let node = Node::new("command = \"true\"\nlease = \"1h\"").await;
    let begun = wall_ms();
    node.start(node.granted().await);
    let record = node.record().await;
    assert_eq!(record.outcome, Outcome::Succeeded);
    assert_eq!(node.line.renewals(), 0);
    // The clock of the store in memory is that of this host.
    let times = [
        Some(record.occurrence.0),
        record.started_at,
        record.finished_at,
    ];
    let times = times.map(|at| at.expect("a time"));
    assert!(times.is_sorted(), "{record:?}");
    assert!(
        times[0] >= begun - 1000 && times[2] <= wall_ms() + 1000,
        "{record:?}"
    );
    assert_eq!(record.duration_ms, Some(times[2] - times[1]));
    assert_eq!(record.lateness_ms, Some(times[1] - times[0]));
}

fn wall_ms() -> i64 {
    soloist::clock::wall_us() / 1000
}

/// A run that is ended on request keeps its lease until it has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_is_to_end_during_a_renewal_is_renewed_until_it_has_ended() {
    let node = Node::new(
        "command = \"trap '' TERM; while :; do sleep 1; done\"\nlease = \"6s\"\ngrace = \"1h\"",
    )
    .await;
    node.line.hold_renewals();
    node.start(node.granted().await);
    until("a renewal is under way", async || {
        (node.line.renewals() == 1).then_some(())
    })
    .await;
    let end = node.job.grace + node.job.lease.kill_budget;
    assert_eq!(node.holder.longest_end(), end);
    node.holder.kill.cancel();
    tokio::time::sleep(Duration::from_millis(20)).await;
    node.line.let_go();
    until("further renewals", async || {
        (node.line.renewals() > 3).then_some(())
    })
    .await;
    assert_eq!(node.holder.running().len(), 1);
    node.line.cut.store(true, Ordering::SeqCst);
    assert_eq!(node.record().await.outcome, Outcome::Cancelled);
    until("nothing runs", async || {
        node.holder.running().is_empty().then_some(())
    })
    .await;
    assert_eq!(node.holder.longest_end(), Duration::ZERO);
}

/// The guards of this run: executed, or forked from the zygote.
fn guards_of(run: RunId) -> Vec<u32> {
    let run = run.to_string();
    let mut guards = process::with_argument(Path::new(&run));
    guards.retain(|pid| process::command_line(*pid).contains(guard::ARGUMENT));
    guards
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_is_prepared_for_a_run_and_ends_if_the_run_is_not_granted() {
    let node = Node::new(&format!("command = \"sleep 60\"\n{LONG_LEASE}")).await;
    let granted = node.granted().await;
    let (run, other) = (granted.run.id, RunId::random());
    for run in [run, other] {
        node.holder.prepare(&node.contender, &node.job.name, run);
    }
    let prepared = async |run| until("its guard", async || guards_of(run).pop()).await;
    let (guard, _) = (prepared(run).await, prepared(other).await);
    node.start(granted);
    until("the run goes on", async || {
        (process::children(guard).len() == 1).then_some(())
    })
    .await;
    until("the other guard has ended", async || {
        guards_of(other).is_empty().then_some(())
    })
    .await;
    assert_eq!(guards_of(run), [guard]);
    node.cancel().await;
    assert_eq!(node.record().await.outcome, Outcome::Cancelled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_another_s_by_now_starts_nothing() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("started");
    let node = Node::new(&format!("command = [\"touch\", {file:?}]\nlease = \"60s\"")).await;
    let mut granted = node.granted().await;
    granted.sent = granted.sent - node.job.lease.trust;
    // Claim it as another instance would that saw the lease unrenewed.
    let open = node
        .line
        .observe(std::slice::from_ref(&node.job.name))
        .await;
    let open = open.unwrap().value[0].clone().unwrap().open.remove(0);
    let theirs = Claim {
        job: node.job.name.clone(),
        target: Target::Scheduled(open.run.occurrence),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new("b"),
        host: "b".into(),
        trigger: Trigger::Schedule,
        start_by: i64::MAX,
        lease: open.run.lease,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Rerun,
        max_attempts: 9,
        definition: "d".into(),
        observed: Some(soloist::logic::claim::Observed {
            run: open.run.id,
            seq: open.seq,
            incarnation: open.incarnation.clone(),
        }),
        holds: vec![],
        cause: None,
    };
    let answer = node.line.claim(&[theirs]).await.unwrap();
    assert!(matches!(answer.value[0], Answer::Granted(g) if g.attempt == 2));
    let run = granted.run.id;
    node.start(granted);
    let record = until("the true record", async || {
        let all = node.line.history(&node.job.name, 10).await.ok()?;
        all.into_iter()
            .find(|r| r.run_id == Some(run) && r.outcome != Outcome::Unknown)
    })
    .await;
    assert_eq!(record.outcome, Outcome::LeaseLost, "{record:?}");
    assert_eq!((record.started_at, file.exists()), (None, false));
    let state = node
        .line
        .observe(std::slice::from_ref(&node.job.name))
        .await;
    let state = state.unwrap().value[0].clone().unwrap();
    assert_eq!(
        state.open[0].run.instance,
        InstanceId::new("b"),
        "{state:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_run_writes_can_be_read_while_it_goes_on() {
    let node = Node::new(&format!(
        "command = \"echo one; while sleep 0.1; do echo more; done\"\n{LONG_LEASE}"
    ))
    .await;
    let granted = node.granted().await;
    let run = granted.run.id;
    node.start(granted);
    until("its first lines", async || {
        let output = node.line.output(&node.job.name, run, 0).await.ok()??;
        (output.data.starts_with(b"one\nmore\n") && !output.done).then_some(())
    })
    .await;
    assert_eq!(node.holder.running().len(), 1);
    node.cancel().await;
    assert_eq!(node.record().await.outcome, Outcome::Cancelled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_whose_answers_get_lost_is_complete_all_the_same() {
    const BYTES: usize = 700_000;
    let node = Node::new(&format!(
        "command = \"yes | head -c {BYTES}; sleep 0.8; yes n | head -c {BYTES}\"\n\
         output = {{ keep = \"1MiB\", log = false }}\n{LONG_LEASE}"
    ))
    .await;
    node.line.lost_pieces.store(9, Ordering::SeqCst);
    let granted = node.granted().await;
    let run = granted.run.id;
    node.start(granted);
    assert_eq!(node.record().await.outcome, Outcome::Succeeded);
    let (mut all, mut at) = (vec![], 0);
    loop {
        let some = until("its output", async || {
            let some = node.line.output(&node.job.name, run, at).await.ok()??;
            (some.done || some.more).then_some(some)
        })
        .await;
        if some.from != at {
            // Newer pieces have arrived meanwhile, and pushed out what was read before.
            all.clear();
        }
        at = some.from + some.data.len() as u64;
        all.extend(some.data);
        if some.done {
            break;
        }
    }
    assert_eq!((all.len(), at), (1 << 20, 2 * BYTES as u64));
    let first = all.iter().filter(|b| **b == b'y').count();
    assert_eq!(first, ((1 << 20) - BYTES).div_ceil(2));
    until("nothing is left to do", async || {
        node.holder.runs.is_empty().then_some(())
    })
    .await;
}
