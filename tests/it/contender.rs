//! Contenders in this process, over stores that lose requests and replies, refuse, and cannot be reached: each
//! occurrence is granted and started once, or recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use soloist::{
    clock::{Boottime, StoreClock},
    config::{self, Job},
    contender::{Ask, Contender, ContestEnd, Due, Epoch, Granted, Parts, PlanUpdate, note_clock},
    logic::claim::{
        self, Answer, Claim, Control, Controlled, DelayedAttempt, Event, OnCrash, Overlap,
        Register, Registration, Renew, Renewal, Settle, Settlement, State, Target,
    },
    logic::schedule::next_of,
    model::{InstanceId, JobName, Marks, Occurrence, Outcome, RunId, RunRecord, Trigger},
    store::{Decision, Error, Fleet, Output, Reply, Store, Tail, memory::MemoryStore},
};
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::support::{GENEROUS, server::RedisServer};

/// A store, as one instance reaches it.
struct Line {
    store: Arc<dyn Store>,
    claims: AtomicUsize,
    /// How many of a hundred requests get lost, and how many replies.
    lost_requests: AtomicU32,
    lost_replies: AtomicU32,
    seed: AtomicU64,
    away: AtomicBool,
    /// Delayed claims wait here: before they reach the store, or after.
    hold_before: AtomicBool,
    hold_after: AtomicBool,
    go_on: Notify,
    /// Requests for one of these jobs are refused.
    refused: Mutex<BTreeSet<JobName>>,
}

impl Line {
    fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            claims: AtomicUsize::new(0),
            lost_requests: AtomicU32::new(0),
            lost_replies: AtomicU32::new(0),
            seed: AtomicU64::new(1),
            away: AtomicBool::new(false),
            hold_before: AtomicBool::new(false),
            hold_after: AtomicBool::new(false),
            go_on: Notify::new(),
            refused: Mutex::default(),
        })
    }

    fn error(&self) -> Error {
        Error::Unreachable {
            address: "the test".into(),
            reason: "lost".into(),
        }
    }

    fn lot(&self, percent: &AtomicU32) -> Result<(), Error> {
        // A linear congruence: the same faults for the same seed and order.
        let step = |x: u64| {
            x.wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407)
        };
        let was = self
            .seed
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |x| Some(step(x)))
            .unwrap_or_default();
        if self.away.load(Ordering::SeqCst)
            || (step(was) >> 33) % 100 < u64::from(percent.load(Ordering::SeqCst))
        {
            return Err(self.error());
        }
        Ok(())
    }

    fn refuses<'a>(&self, jobs: impl Iterator<Item = &'a JobName>) -> Result<(), Error> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let mut jobs = jobs;
        match jobs.find(|j| refused.contains(j)) {
            None => Ok(()),
            Some(job) => Err(Error::Refused {
                address: "the test".into(),
                reason: format!("WRONGTYPE {job}"),
            }),
        }
    }

    async fn pass<T>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send,
    ) -> Result<T, Error> {
        self.lot(&self.lost_requests)?;
        let done = work.await;
        self.lot(&self.lost_replies)?;
        done
    }

    async fn held(&self, gate: &AtomicBool) {
        loop {
            let go_on = self.go_on.notified();
            if !gate.load(Ordering::SeqCst) {
                return;
            }
            go_on.await;
        }
    }

    fn let_go(&self) {
        self.hold_before.store(false, Ordering::SeqCst);
        self.hold_after.store(false, Ordering::SeqCst);
        self.go_on.notify_waiters();
    }
}

#[async_trait]
impl Store for Line {
    fn address(&self) -> &str {
        self.store.address()
    }
    fn durable(&self) -> bool {
        self.store.durable()
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        self.store.believe(clock);
    }
    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        self.claims.fetch_add(claims.len(), Ordering::SeqCst);
        self.held(&self.hold_before).await;
        self.refuses(claims.iter().map(|c| &c.job))?;
        let mut done = self.pass(self.store.claim(claims)).await;
        self.held(&self.hold_after).await;
        if let Ok(reply) = &mut done {
            reply.received = Boottime::now();
        }
        done
    }
    async fn renew(&self, r: &Renew) -> Result<Reply<Renewal>, Error> {
        self.pass(self.store.renew(r)).await
    }
    async fn settle(&self, s: &Settle, t: &Tail) -> Result<Reply<Settlement>, Error> {
        self.pass(self.store.settle(s, t)).await
    }
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        self.refuses(jobs.iter().map(|r| &r.job))?;
        self.pass(self.store.register(jobs)).await
    }
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        self.pass(self.store.control(job, what)).await
    }
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        self.refuses(jobs.iter())?;
        self.pass(self.store.observe(jobs)).await
    }
    async fn heartbeat(&self, b: Option<&soloist::store::Beat>) -> Result<Reply<Fleet>, Error> {
        self.pass(self.store.heartbeat(b)).await
    }
    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        self.pass(self.store.jobs()).await
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
        w: &soloist::logic::notify::stand::Write,
    ) -> Result<Reply<soloist::logic::notify::stand::Written>, Error> {
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
        self.store
            .append_output(job, run, at, data, keep, stderr)
            .await
    }
    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        self.store.output(job, run, from).await
    }
    fn events(&self) -> broadcast::Receiver<Event> {
        self.store.events()
    }
}

/// The runs that all contenders of a test started.
#[derive(Default)]
struct Started {
    all: Mutex<Vec<Start>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Start {
    by: InstanceId,
    job: JobName,
    occurrence: Occurrence,
    attempt: u32,
    run: RunId,
    trigger: Trigger,
    too_late: bool,
}

impl Started {
    fn all(&self) -> Vec<Start> {
        self.all
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
    fn of(&self, at: i64) -> Vec<Start> {
        let mut all = self.all();
        all.retain(|s| s.occurrence.0 == at);
        all
    }
    /// Runs, without what was granted too late.
    fn runs(&self) -> Vec<i64> {
        let all = self.all();
        let runs = all.iter().filter(|s| !s.too_late);
        runs.map(|s| s.occurrence.0).collect()
    }
    fn once(&self) {
        let mut seen = BTreeSet::new();
        for s in self.all() {
            assert!(
                seen.insert((s.job.clone(), s.occurrence, s.attempt)),
                "started twice: {s:?}"
            );
        }
    }
}

/// How long a run lasts; those that last for ever are ended by [`Node::end`].
#[derive(Clone, Copy)]
enum Lasts {
    Ms(u64),
    ForEver,
}

struct Node {
    contender: Arc<Contender>,
    line: Arc<Line>,
    stop: CancellationToken,
    kept: tokio::task::JoinHandle<()>,
    open: Arc<Mutex<Vec<Granted>>>,
    plans: Mutex<mpsc::UnboundedReceiver<PlanUpdate>>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
        self.line.let_go();
    }
}

struct Setup<'a> {
    name: &'a str,
    line: Arc<Line>,
    started: Arc<Started>,
    max_parallel: Option<u32>,
    lasts: Lasts,
}

impl Node {
    fn new(s: Setup<'_>) -> Self {
        let stop = CancellationToken::new();
        let clock = Arc::new(StoreClock::default());
        let instance = InstanceId::new(s.name);
        let (journal, decisions) = mpsc::channel(10_000);
        let (plans, planned) = mpsc::unbounded_channel();
        let open: Arc<Mutex<Vec<Granted>>> = Arc::default();
        let store: Arc<dyn Store> = s.line.clone();
        let mut retry = config::StoreRetry::default();
        (retry.attempts, retry.exponential, retry.jitter) = (2, false, false);
        (retry.interval, retry.max_interval) = (Duration::from_millis(3), Duration::from_millis(3));
        let contender = Arc::new_cyclic(|weak: &std::sync::Weak<Contender>| {
            let parts = Parts {
                store: store.clone(),
                clock: clock.clone(),
                instance: instance.clone(),
                host: s.name.to_owned(),
                retry: retry.clone(),
                max_parallel: s.max_parallel,
                journal,
                plans,
                health: std::sync::Arc::default(),
                last_will: None,
                stop: stop.clone(),
                tasks: TaskTracker::new(),
            };
            let (weak, started, open, lasts) =
                (weak.clone(), s.started.clone(), open.clone(), s.lasts);
            Contender::build(
                parts,
                Box::new(move |g: Granted| {
                    let Some(contender) = weak.upgrade() else {
                        return;
                    };
                    started
                        .all
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(Start {
                            by: contender.me.instance.clone(),
                            job: g.job.name.clone(),
                            occurrence: g.run.occurrence,
                            attempt: g.run.attempt,
                            run: g.run.id,
                            trigger: g.run.trigger,
                            too_late: g.too_late.is_some(),
                        });
                    match lasts {
                        Lasts::Ms(ms) => {
                            tokio::spawn(async move {
                                tokio::time::sleep(Duration::from_millis(ms)).await;
                                settle(&contender, g, Outcome::Succeeded, None).await;
                            });
                        }
                        Lasts::ForEver => {
                            open.lock().unwrap_or_else(PoisonError::into_inner).push(g);
                        }
                    }
                }),
            )
        });
        tokio::spawn(contender.clone().watch());
        let kept = tokio::spawn(keep(contender.clone(), stop.clone(), decisions));
        Self {
            contender,
            line: s.line,
            stop,
            kept,
            open,
            plans: Mutex::new(planned),
        }
    }

    fn simple(name: &str, store: &Arc<MemoryStore>, started: &Arc<Started>) -> Self {
        Self::new(Setup {
            name,
            line: Line::new(store.clone()),
            started: started.clone(),
            max_parallel: None,
            lasts: Lasts::Ms(0),
        })
    }

    /// Its runs last until they are ended.
    fn lasting(name: &str, store: &Arc<MemoryStore>, started: &Arc<Started>) -> Self {
        Self::new(Setup {
            name,
            line: Line::new(store.clone()),
            started: started.clone(),
            max_parallel: None,
            lasts: Lasts::ForEver,
        })
    }

    /// Waits until so many claims were sent.
    async fn asked(&self, claims: usize) {
        until("it was asked for", || {
            (self.line.claims.load(Ordering::SeqCst) >= claims).then_some(())
        })
        .await;
    }

    /// Has the job, and may claim it.
    async fn with(&self, job: &Arc<Job>) {
        self.contender.set_job(job.clone());
        self.planned(&job.name).await;
    }

    /// What the contender tells the dispatcher, once the job is registered.
    async fn planned(&self, job: &JobName) -> Occurrence {
        until("the job is planned", || {
            match self
                .plans
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .try_recv()
            {
                Ok(PlanUpdate::PlanAfter(of, after)) if of.name == *job => Some(after),
                _ => None,
            }
        })
        .await
    }

    fn due(&self, job: &Job, at: i64) {
        self.contender.due(vec![due(job, at)]);
    }

    async fn contest(&self, job: &Job, at: i64) -> ContestEnd {
        let ask = Ask {
            target: Target::Scheduled(Occurrence(at)),
            missed: vec![],
            trigger: Trigger::Schedule,
            start_by: at + job.start_within.as_millis() as i64,
            next_attempt: false,
        };
        self.contender.contest(&job.name, ask).await
    }

    /// Ends the oldest run that lasts for ever.
    async fn end(&self, outcome: Outcome, next_attempt: Option<DelayedAttempt>) {
        let g = until("a run to end", || {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            (!open.is_empty()).then(|| open.remove(0))
        })
        .await;
        settle(&self.contender, g, outcome, next_attempt).await;
    }
}

fn alone() -> (Arc<MemoryStore>, Arc<Started>, Node) {
    let (store, started) = (Arc::new(MemoryStore::new()), Arc::new(Started::default()));
    let node = Node::simple("a", &store, &started);
    (store, started, node)
}

fn due(job: &Job, at: i64) -> Due {
    Due {
        job: job.name.clone(),
        target: Target::Scheduled(Occurrence(at)),
        start_at: at,
        start_by: at + job.start_within.as_millis() as i64,
        overdue: false,
        missed: vec![],
    }
}

/// The epoch of a store, which is taken for open.
fn open_epoch(reply: &Reply<Fleet>) -> Epoch {
    Epoch {
        incarnation: reply.incarnation.clone(),
        id: reply.value.id.clone(),
        born: reply.value.born,
        open: true,
        quarantine: Duration::ZERO,
        first_seen: Boottime::now(),
        open_seen: None,
        others_know: false,
    }
}

/// What the fleet task and the listener do for a contender.
async fn keep(
    contender: Arc<Contender>,
    stop: CancellationToken,
    mut decisions: mpsc::Receiver<Decision>,
) {
    let mut events = contender.store.events();
    loop {
        if let Ok(reply) = contender.store.heartbeat(None).await {
            note_clock(&contender.clock, &reply);
            // The clocks of these tests are moved, and run fast: the hosts say that they are right.
            let _ = contender.clock.vote(&[0, 0]);
            let _ = contender.register(&open_epoch(&reply)).await;
        }
        while let Ok(d) = decisions.try_recv() {
            let _ = contender.store.journal(&[d]).await;
        }
        tokio::select! {
            () = contender.registration_due.notified() => {}
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
            event = events.recv() => if let Ok(event) = event { contender.on_event(&event) },
            () = stop.cancelled() => return,
        }
    }
}

async fn settle(
    contender: &Arc<Contender>,
    g: Granted,
    outcome: Outcome,
    next_attempt: Option<DelayedAttempt>,
) {
    let now = contender.clock.now_us().unwrap_or(0) / 1000;
    ended(contender, g, outcome, next_attempt, now).await;
}

async fn ended(
    contender: &Arc<Contender>,
    g: Granted,
    outcome: Outcome,
    next_attempt: Option<DelayedAttempt>,
    finished: i64,
) {
    let outcome = if g.too_late.is_some() {
        Outcome::Missed
    } else {
        outcome
    };
    let record = RunRecord {
        outcome,
        ..RunRecord::of(&g.job.name, &g.run).lasting(Some(g.run.granted_at), Some(finished))
    };
    let s = Settle {
        run: g.run.id,
        record,
        next_attempt,
    };
    while contender.store.settle(&s, &Tail::default()).await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let awaited = next_attempt.map(|_| g.run.occurrence);
    let (job, run) = (g.job.name.clone(), g.run.id);
    drop(g);
    contender.run_ended(&job, run, awaited);
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            begun.elapsed() < GENEROUS,
            "waited in vain for this: {what}"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Each decided occurrence of the job, with its outcomes, oldest first.
async fn outcomes(store: &dyn Store, job: &JobName) -> Vec<(i64, Outcome)> {
    let mut records = store.history(job, 1000).await.unwrap();
    records.reverse();
    let mut all: Vec<_> = records
        .into_iter()
        .map(|r| (r.occurrence.0, r.outcome))
        .collect();
    all.sort_by_key(|(at, _)| *at);
    all
}

async fn recorded(store: &dyn Store, job: &JobName, n: usize) -> Vec<(i64, Outcome)> {
    let begun = Instant::now();
    loop {
        let all = outcomes(store, job).await;
        if all.len() >= n {
            return all;
        }
        assert!(begun.elapsed() < GENEROUS, "{n} records awaited: {all:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn job(lines: &str) -> Arc<Job> {
    named("work", lines)
}
fn named(name: &str, lines: &str) -> Arc<Job> {
    let text = format!(
        "store = {{ url = \"memory:\", timeout = \"50ms\" }}\n[jobs.{name}]\ncommand = [\"true\"]\n{lines}\n"
    );
    let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).unwrap();
    config.jobs.values().next().unwrap().clone()
}

/// The clock of a store that was not shifted, and so much.
fn now(_: &MemoryStore, shift: i64) -> i64 {
    soloist::clock::wall_us() / 1000 + shift
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_wake_ups_are_one_command() {
    let server = RedisServer::start();
    let started = Arc::new(Started::default());
    let node = Node::new(Setup {
        name: "a",
        line: Line::new(Arc::new(server.store())),
        started: started.clone(),
        max_parallel: None,
        lasts: Lasts::Ms(0),
    });
    // A heartbeat begins the epoch.
    let job = job("");
    let info = soloist::store::Info {
        host: "a".into(),
        process: 1,
        jobs: 1,
        ..Default::default()
    };
    let beat = soloist::store::Beat {
        instance: InstanceId::new("a"),
        info,
        quarantine: Duration::from_millis(1),
        open: None,
    };
    node.line.store.heartbeat(Some(&beat)).await.unwrap();
    // A claim within the quarantine would be asked again.
    tokio::time::sleep(2 * beat.quarantine).await;
    node.with(&job).await;
    let at = soloist::clock::wall_us() / 1000;
    let woken: Vec<_> = (0..1000)
        .map(|_| {
            let (contender, name) = (node.contender.clone(), job.name.clone());
            tokio::spawn(async move {
                let ask = Ask {
                    target: Target::Scheduled(Occurrence(at)),
                    missed: vec![],
                    trigger: Trigger::Schedule,
                    start_by: at + 60_000,
                    next_attempt: false,
                };
                contender.contest(&name, ask).await
            })
        })
        .collect();
    let mut ends = BTreeMap::new();
    for w in woken {
        *ends.entry(format!("{:?}", w.await.unwrap())).or_insert(0) += 1;
    }
    assert_eq!(node.line.claims.load(Ordering::SeqCst), 1, "{ends:?}");
    assert_eq!(started.of(at).len(), 1);
    // A contender that comes later finds it decided, and asks nothing.
    assert_eq!(node.contest(&job, at).await, ContestEnd::Settled);
    assert_eq!(node.line.claims.load(Ordering::SeqCst), 1);
    let calls: String = server.command(&["INFO", "commandstats"]);
    assert!(calls.contains("evalsha"), "{calls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wins_are_spread_and_a_dead_first_in_rank_holds_up_nobody() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let job = job("overlap = \"allow\"");
    let names = ["a", "b", "c", "d", "e", "dead"];
    let live: Arc<[InstanceId]> = names.iter().map(|n| InstanceId::new(n)).collect();
    let nodes: Vec<_> = names[..5]
        .iter()
        .map(|n| Node::simple(n, &store, &started))
        .collect();
    for n in &nodes {
        n.with(&job).await;
        n.contender.set_live(live.clone());
    }
    let base = now(&store, -60_000 + 5_000);
    for i in 0..100 {
        let all = nodes.iter().map(|n| n.contest(&job, base + i * 10));
        let ends = futures_util::future::join_all(all).await;
        let won = |c: &&ContestEnd| matches!(c, ContestEnd::Won(_));
        assert_eq!(ends.iter().filter(won).count(), 1, "{ends:?}");
    }
    started.once();
    let mut wins: BTreeMap<String, usize> = BTreeMap::new();
    for s in started.all() {
        *wins.entry(s.by.as_str().to_owned()).or_default() += 1;
    }
    assert_eq!(wins.len(), 5, "{wins:?}");
    assert!(wins.values().all(|n| *n >= 6), "{wins:?}");
}

#[tokio::test]
async fn what_is_prepared_for_is_asked_for_with_the_run_that_was_named() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let (job, node) = (job(""), Node::simple("a", &store, &started));
    node.with(&job).await;
    let at = now(&store, 20);
    let prepared: Vec<_> = node.contender.runs_to_prepare(&[due(&job, at)]).collect();
    let [(name, run)] = &prepared[..] else {
        panic!("{prepared:?}");
    };
    assert_eq!(*name, job.name);
    node.due(&job, at);
    let of = until("it is started", || started.of(at).pop()).await;
    assert_eq!(of.run, *run);
    // The occurrence is decided: nothing more may happen.
    assert_eq!(node.contender.runs_to_prepare(&[due(&job, at)]).count(), 0);
}

#[tokio::test]
async fn one_instance_prepares_for_an_occurrence_and_that_one_goes_first() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let job = job("overlap = \"allow\"");
    let names = ["a", "b", "c"];
    let live: Arc<[InstanceId]> = names.iter().map(|n| InstanceId::new(n)).collect();
    let nodes = names.map(|n| Node::simple(n, &store, &started));
    for n in &nodes {
        n.with(&job).await;
        n.contender.set_live(live.clone());
    }
    let base = now(&store, 1000);
    let mut by = BTreeSet::new();
    for i in 0..50 {
        let due = [due(&job, base + i * 10)];
        let prepares = |n: &&Node| n.contender.runs_to_prepare(&due).count() == 1;
        let who: Vec<&Node> = nodes.iter().filter(prepares).collect();
        assert_eq!(who.len(), 1);
        by.insert(who[0].contender.me.instance.clone());
    }
    assert_eq!(by.len(), 3);
}

#[tokio::test]
async fn nothing_is_prepared_that_something_stands_against() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let (job, node) = (job(""), Node::simple("a", &store, &started));
    node.with(&job).await;
    let prepares = |at: i64| node.contender.runs_to_prepare(&[due(&job, at)]).count() == 1;
    let base = now(&store, -500);
    // Where a prepared occurrence comes to nothing, the next one is not prepared; until one is won again.
    let pause = Control::Pause {
        until: None,
        reason: None,
    };
    store.control(&job.name, &pause).await.unwrap();
    assert!(prepares(base));
    node.due(&job, base);
    recorded(&*store, &job.name, 1).await;
    until("that is known", || (!prepares(base + 10)).then_some(())).await;
    store.control(&job.name, &Control::Resume).await.unwrap();
    node.due(&job, base + 10);
    recorded(&*store, &job.name, 2).await;
    until("it is prepared for again", || {
        prepares(base + 20).then_some(())
    })
    .await;
    node.contender.set_draining(true);
    assert!(!prepares(base + 30));
    node.contender.set_draining(false);
    node.planned(&job.name).await;
    until("it claims again", || prepares(base + 40).then_some(())).await;
    node.contender
        .set_halt("store_error", Some("evicts".into()));
    assert!(!prepares(base + 50));
    node.contender.set_halt("store_error", None);
    assert!(prepares(base + 50));

    let line = Line::new(store.clone());
    let busy = Node::new(Setup {
        name: "b",
        line,
        started: started.clone(),
        max_parallel: None,
        lasts: Lasts::ForEver,
    });
    let job = named("long", "");
    busy.with(&job).await;
    busy.due(&job, base);
    until("it runs", || started.of(base).pop()).await;
    assert_eq!(
        busy.contender
            .runs_to_prepare(&[due(&job, base + 20)])
            .count(),
        0
    );
}

/// An hour of downtime of a job of every ten minutes, decided up to its beginning.
async fn downtime(catch_up: &str) -> (Vec<i64>, Vec<(i64, Outcome)>, Vec<i64>) {
    let base = soloist::clock::wall_us() / 1000;
    // The clock of the store stands in the middle between two occurrences.
    let grid = base - base.rem_euclid(600_000);
    let offset = grid + 300_000 - base;
    let clock = move || soloist::clock::wall_us() + (offset - 3_600_000) * 1000;
    let store = Arc::new(MemoryStore::new_with_clock(Arc::new(clock)));
    let started = Arc::new(Started::default());
    let job = job(&format!(
        "schedule = \"@every 10m\"\nstart_within = \"25m\"\n{catch_up}"
    ));
    let before = Node::simple("before", &store, &started);
    before.with(&job).await;
    drop(before);
    store.shift(3_600_000);
    let node = Node::simple("a", &store, &started);
    let planned = {
        node.contender.set_job(job.clone());
        node.planned(&job.name).await
    };
    let due: Vec<i64> = (-5..=0).map(|i| grid + i * 600_000).collect();
    assert!(planned.0 >= grid && planned.0 < grid + 600_000);
    let all = recorded(&*store, &job.name, 6).await;
    started.once();
    (due, all, started.runs())
}

#[tokio::test]
async fn downtime_is_caught_up_by_policy() {
    use Outcome::{Missed, Succeeded};
    for (policy, run) in [("latest", 1), ("all", 2), ("none", 0)] {
        // `all` would skip the second while the first still runs.
        let lines = format!("catch_up = \"{policy}\"\noverlap = \"queue\"");
        let (due, all, runs) = downtime(&lines).await;
        // 25 minutes: the last three could start, 5, 15 and 25 minutes late; the third by a hair or not.
        let expected: Vec<(i64, Outcome)> = due
            .iter()
            .enumerate()
            .map(|(i, at)| (*at, if 6 - i <= run { Succeeded } else { Missed }))
            .collect();
        if policy == "all" {
            assert_eq!(all[4..], expected[4..], "{policy}");
            assert_eq!(all.len(), 6, "{policy}");
        } else {
            assert_eq!(all, expected, "{policy}");
            assert_eq!(runs.len(), run, "{policy}");
        }
    }
}

/// More occurrences than are listed at one time.
#[tokio::test]
async fn all_that_may_still_start_after_a_downtime_is_run() {
    let every = 10_000;
    let base = soloist::clock::wall_us() / 1000;
    // The clock of the store stands in the middle between two occurrences.
    let grid = base - base.rem_euclid(every);
    let offset = grid + every / 2 - base - 1_800_000;
    let clock = move || soloist::clock::wall_us() + offset * 1000;
    let store = Arc::new(MemoryStore::new_with_clock(Arc::new(clock)));
    let started = Arc::new(Started::default());
    let job = job(
        "schedule = \"@every 10s\"\nstart_within = \"25m\"\ncatch_up = \"all\"\noverlap = \"queue\"",
    );
    let before = Node::simple("before", &store, &started);
    before.with(&job).await;
    drop(before);
    store.shift(1_800_000);
    let (a, b) = (
        Node::simple("a", &store, &started),
        Node::simple("b", &store, &started),
    );
    a.contender.set_job(job.clone());
    b.contender.set_job(job.clone());
    let due: Vec<i64> = (-179..=0).map(|i| grid + i * every).collect();
    let all = recorded(&*store, &job.name, 180).await;
    each_once(&all, &due);
    started.once();
    // 25 minutes are 150 occurrences; those at the limit may be too late by a hair.
    let missed = all.iter().filter(|(_, o)| *o == Outcome::Missed).count();
    assert!((29..=32).contains(&missed), "{missed} were missed");
    assert!(all[missed..].iter().all(|(_, o)| *o == Outcome::Succeeded));
}

/// Another definition comes while an occurrence waits for the jitter of the one before.
#[tokio::test]
async fn what_waits_for_its_jitter_is_not_overtaken_after_a_reload() {
    for by in ["a trigger", "an occurrence"] {
        let store = Arc::new(MemoryStore::new());
        let started = Arc::new(Started::default());
        let node = Node::simple("a", &store, &started);
        let hour = 3_600_000;
        let old = job("schedule = \"@every 1h\"\njitter = \"30m\"\nstart_within = \"1h\"");
        node.with(&old).await;
        let real = now(&store, 0);
        let next = real - real.rem_euclid(hour) + hour;
        let start = |at: i64| {
            soloist::logic::jitter::start_at_ms("work", &old.schedules, Occurrence(at), old.jitter)
        };
        // One that waits for a while.
        let at = (0..100)
            .map(|i| next + i * hour)
            .find(|at| start(*at) > at + 400_000)
            .expect("not all start at once");
        store.shift(at - hour / 2 - real);
        // Earlier occurrences are not part of this test.
        node.due(&old, at - hour);
        recorded(&*store, &old.name, 1).await;
        store.shift(hour / 2 + 60_000);
        until_even(&node, at + 60_000).await;
        let new = job("schedule = \"@every 5m\"\nstart_within = \"1h\"");
        node.contender.set_job(new.clone());
        node.planned(&new.name).await;
        until_registered(&node, &new).await;
        if by == "a trigger" {
            let put = Control::Trigger { key: "k".into() };
            store.control(&new.name, &put).await.unwrap();
            let all = recorded(&*store, &new.name, 2).await;
            assert!(all[1].0 < at, "{all:?}");
            node.due(&old, at);
        } else {
            store.shift(240_000);
            until_even(&node, at + 300_000).await;
            node.due(&new, at + 300_000);
        }
        let all = recorded(&*store, &new.name, 3).await;
        let found = all.iter().find(|(x, _)| *x == at);
        assert_eq!(found, Some(&(at, Outcome::Succeeded)), "{by}: {all:?}");
        started.once();
    }
}

/// Until the instance goes by the store's clock as it was moved.
async fn until_even(node: &Node, at: i64) {
    until("the clock is taken over", || {
        let now = node.contender.clock.now_us()? / 1000;
        (now >= at).then_some(())
    })
    .await;
}

async fn until_registered(node: &Node, job: &Job) {
    let begun = Instant::now();
    loop {
        let states = node
            .contender
            .store
            .observe(std::slice::from_ref(&job.name));
        let state = states.await.unwrap().value.remove(0).unwrap();
        if state.definition == job.digest {
            return;
        }
        assert!(begun.elapsed() < GENEROUS, "it is not registered");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Every scheduled instant of the backlog is in the history once.
fn each_once(all: &[(i64, Outcome)], due: &[i64]) {
    let names: Vec<i64> = all.iter().map(|(at, _)| *at).collect();
    assert_eq!(names, due, "{all:?}");
}

#[tokio::test]
async fn what_piles_up_in_an_outage_is_caught_up_by_policy() {
    use Outcome::{Missed, Succeeded};
    for (policy, run) in [("latest", 1), ("all", 5), ("none", 0)] {
        let (store, started, node) = alone();
        // With `all` each waits for the run before it, so that none overlaps.
        let overlap = if policy == "all" { "queue" } else { "skip" };
        let job = job(&format!(
            "catch_up = \"{policy}\"\nstart_within = \"10m\"\noverlap = \"{overlap}\""
        ));
        node.with(&job).await;
        node.line.away.store(true, Ordering::SeqCst);
        let base = now(&store, -60_000);
        let due: Vec<i64> = (0..5).map(|i| base + i * 5_000).collect();
        for at in &due {
            node.due(&job, *at);
        }
        let asked = node.line.claims.load(Ordering::SeqCst);
        until("it was asked for in vain", || {
            (node.line.claims.load(Ordering::SeqCst) > asked + 3).then_some(())
        })
        .await;
        node.line.away.store(false, Ordering::SeqCst);
        let all = recorded(&*store, &job.name, 5).await;
        each_once(&all, &due);
        started.once();
        let runs = all.iter().filter(|(_, o)| *o == Succeeded).count();
        assert_eq!(runs, run, "{policy}: {all:?}");
        let missed = all.iter().filter(|(_, o)| *o == Missed).count();
        assert_eq!(missed, 5 - run, "{policy}: {all:?}");
        if policy == "latest" {
            assert_eq!(started.runs(), due[4..]);
        }
    }
}

/// The grant's reply was lost, then the store could not be reached while more became due: the grant does not lapse.
#[tokio::test]
async fn a_grant_whose_reply_was_lost_is_not_given_up_for_a_newer_one() {
    for policy in ["all", "latest"] {
        let (store, started, node) = alone();
        let overlap = if policy == "all" { "queue" } else { "skip" };
        let job = job(&format!(
            "catch_up = \"{policy}\"\nstart_within = \"10m\"\noverlap = \"{overlap}\""
        ));
        node.with(&job).await;
        let base = now(&store, -20_000);
        node.line.lost_replies.store(100, Ordering::SeqCst);
        node.due(&job, base);
        node.asked(4).await;
        node.due(&job, base + 5_000);
        node.due(&job, base + 10_000);
        node.line.lost_replies.store(0, Ordering::SeqCst);
        let all = recorded(&*store, &job.name, 3).await;
        each_once(&all, &[base, base + 5_000, base + 10_000]);
        // Not `unknown`, as it would be had its lease been left to lapse.
        let fine = [Outcome::Succeeded, Outcome::Missed, Outcome::Skipped];
        assert!(all.iter().all(|(_, o)| fine.contains(o)), "{all:?}");
        if policy == "all" {
            assert!(all.iter().all(|(_, o)| *o == Outcome::Succeeded), "{all:?}");
        }
        started.once();
    }
}

/// Trust counts neither from when the claim was queued, nor from when it was answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trust_counts_from_when_the_claim_left() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::lasting("a", &store, &started);
    let job = job("overlap = \"allow\"");
    node.with(&job).await;
    let sent = async |at: i64, gate: &AtomicBool| {
        gate.store(true, Ordering::SeqCst);
        let before = node.line.claims.load(Ordering::SeqCst);
        node.due(&job, at);
        until("the claim is on its way", || {
            (node.line.claims.load(Ordering::SeqCst) > before).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let let_go = Boottime::now();
        node.line.let_go();
        let granted = until("it is granted", || {
            node.open
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop()
        })
        .await;
        (let_go, granted)
    };
    let (left, first) = sent(now(&store, -2000), &node.line.hold_before).await;
    assert!(first.sent >= left, "it waited here before it left");
    let (answered, second) = sent(now(&store, -1000), &node.line.hold_after).await;
    assert!(second.sent < answered, "its answer was long on its way");
}

/// A claim is sent once, and again as often as `store.retry` says; then other instances may decide.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_asked_again_as_often_as_configured() {
    let (store, _, node) = alone();
    let job = job("");
    node.with(&job).await;
    let asked = || node.line.claims.load(Ordering::SeqCst);
    node.line.away.store(true, Ordering::SeqCst);
    for n in 1..3 {
        let outcome = node.contest(&job, now(&store, -1000)).await;
        assert_eq!(outcome, ContestEnd::Undecided);
        assert_eq!(asked(), 3 * n);
    }
    // A refused claim is not sent again.
    node.line.away.store(false, Ordering::SeqCst);
    let refused = || {
        node.line
            .refused
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    refused().insert(job.name.clone());
    let outcome = node.contest(&job, now(&store, -1000)).await;
    assert_eq!((outcome, asked()), (ContestEnd::Undecided, 7));
    refused().clear();
    let outcome = node.contest(&job, now(&store, -1000)).await;
    assert!(matches!(outcome, ContestEnd::Won(_)));
    assert_eq!(asked(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_is_claimed_than_can_be_started_in_time() {
    // As `logic::pace` has it.
    let first = soloist::logic::pace::Pace::new(soloist::contender::cores()).limit();
    let lowered = first * 2 / 3;
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::lasting("a", &store, &started);
    let jobs: Vec<_> = (0..4 * first)
        .map(|i| named(&format!("j{i}"), ""))
        .collect();
    for job in &jobs {
        node.contender.set_job(job.clone());
    }
    let mut planned = 0;
    until("all jobs are planned", || {
        let mut plans = node.plans.lock().unwrap_or_else(PoisonError::into_inner);
        while plans.try_recv().is_ok() {
            planned += 1;
        }
        (planned == jobs.len()).then_some(())
    })
    .await;
    let at = now(&store, -1000);
    node.contender
        .due(jobs.iter().map(|j| due(j, at)).collect());
    let granted = async |n: usize| {
        until("the grants", || {
            (started.all().len() >= n).then_some(()) // More would be seen below.
        })
        .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(started.all().len(), n);
        assert_eq!(node.line.claims.load(Ordering::SeqCst), n);
    };
    granted(first).await;
    let start = |n: usize| {
        let mut open = node.open.lock().unwrap_or_else(PoisonError::into_inner);
        for g in open.iter_mut().filter(|g| g.permit.is_some()).take(n) {
            g.permit = None;
        }
    };
    start(10);
    granted(first + 10).await;
    {
        let open = node.open.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = open.iter().find(|g| g.permit.is_some());
        let (waits, trust) = (waits.expect("a permit"), Duration::from_secs(8));
        let permit = waits.permit.as_ref().expect("a permit");
        permit.waited(trust / 2, trust);
    }
    start(first);
    granted(first + 10 + lowered).await;
    start(lowered);
    granted(first + 10 + 2 * lowered).await;
    started.once();
}

/// A reply that comes after the last moment for a start starts nothing, and the occurrence is recorded.
#[tokio::test]
async fn a_grant_that_is_known_of_too_late_starts_nothing() {
    let (store, started, node) = alone();
    let job = job("start_within = \"20s\"");
    node.with(&job).await;
    let at = now(&store, -1_000);
    node.line.lost_replies.store(100, Ordering::SeqCst);
    node.due(&job, at);
    node.asked(1).await;
    store.shift(60_000);
    node.line.lost_replies.store(0, Ordering::SeqCst);
    let all = recorded(&*store, &job.name, 1).await;
    assert_eq!(all, [(at, Outcome::Missed)]);
    assert!(started.runs().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_does_not_jump_over_what_is_due_and_not_decided() {
    // A run goes on, a trigger waits for it, and the next scheduled one comes behind the trigger.
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let line = Line::new(store.clone());
    let node = Node::new(Setup {
        name: "a",
        line,
        started: started.clone(),
        max_parallel: None,
        lasts: Lasts::ForEver,
    });
    let every = 60_000;
    let job = job("schedule = \"@every 60s\"\noverlap = \"queue\"\nstart_within = \"1h\"");
    node.with(&job).await;
    let real = now(&store, 0);
    let first = real - real.rem_euclid(every) + every;
    store.shift(first - real + 1_000);
    node.due(&job, first);
    until("it runs", || (started.runs() == [first]).then_some(())).await;
    let trigger = |key: &str| Control::Trigger { key: key.into() };
    for key in ["k", "l"] {
        let done = node.contender.store.control(&job.name, &trigger(key)).await;
        assert_eq!(done.unwrap().value, Controlled::Done);
    }
    // The trigger's claim has been answered: it is held.
    let asked = node.line.claims.load(Ordering::SeqCst);
    until("the trigger waits", || {
        (node.line.claims.load(Ordering::SeqCst) > asked + 1).then_some(())
    })
    .await;
    store.shift(every);
    node.due(&job, first + every);
    for _ in 0..4 {
        node.end(Outcome::Succeeded, None).await;
    }
    let all = recorded(&*store, &job.name, 4).await;
    let names: Vec<i64> = all.iter().map(|(at, _)| *at).collect();
    assert_eq!((names[0], names[3]), (first, first + every), "{all:?}");
    assert!(all.iter().all(|(_, o)| *o == Outcome::Succeeded), "{all:?}");
}

/// No instance was running when the trigger was put in, nor when the occurrences after it came due.
#[tokio::test]
async fn a_trigger_from_the_downtime_does_not_swallow_what_is_overdue() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let job = job("schedule = \"@every 60s\"");
    let before = Node::simple("before", &store, &started);
    before.with(&job).await;
    let trigger = Control::Trigger { key: "k".into() };
    drop(before);
    let (real, every) = (now(&store, 0), 60_000);
    store.control(&job.name, &trigger).await.unwrap();
    let first = real - real.rem_euclid(every) + every;
    store.shift(first + 4 * every + 30_000 - real);
    let node = Node::simple("a", &store, &started);
    node.contender.set_job(job.clone());
    let all = recorded(&*store, &job.name, 6).await;
    let due: Vec<i64> = (0..5).map(|i| first + i * every).collect();
    for at in &due {
        let n = all.iter().filter(|(x, _)| x == at).count();
        assert_eq!(n, 1, "{at} in {all:?}");
    }
    assert_eq!(started.runs(), due[4..]);
}

/// The hint of a trigger may come before the first answer of the store.
#[tokio::test]
async fn a_trigger_that_is_heard_of_before_the_stores_clock_is_no_late_one() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let job = job("start_within = \"10s\"");
    let before = Node::simple("before", &store, &started);
    before.with(&job).await;
    drop(before);
    let trigger = Control::Trigger { key: "k".into() };
    store.control(&job.name, &trigger).await.unwrap();
    let node = Node::simple("a", &store, &started);
    assert_eq!(node.contender.clock.now_us(), None);
    node.contender.set_job(job.clone());
    node.contender.on_event(&Event::Triggered {
        job: job.name.clone(),
        key: "k".into(),
        at: 0,
    });
    let all = recorded(&*store, &job.name, 1).await;
    assert_eq!(all[0].1, Outcome::Succeeded, "{all:?}");
}

/// While an occurrence waits for its jitter, a trigger comes.
#[tokio::test]
async fn a_trigger_leaves_alone_what_waits_for_its_jitter() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::simple("a", &store, &started);
    let every = 60_000;
    let job = job("schedule = \"@every 60s\"\njitter = \"30s\"");
    node.with(&job).await;
    let real = now(&store, 0);
    let first = real - real.rem_euclid(every) + every;
    store.shift(first + 10_000 - real);
    for key in ["k", "l", "m"] {
        let trigger = Control::Trigger { key: key.into() };
        store.control(&job.name, &trigger).await.unwrap();
    }
    let manual = recorded(&*store, &job.name, 3).await;
    assert!(manual.iter().all(|(at, _)| *at < first), "{manual:?}");
    node.due(&job, first);
    let all = recorded(&*store, &job.name, 4).await;
    assert_eq!(all[3], (first, Outcome::Succeeded), "{all:?}");
}

/// The store's clock was ahead when a job was decided, and was corrected: it is behind the decided occurrences. That
/// one was missed, and is in the history.
async fn behind_what_is_decided(node: &Node, store: &MemoryStore, job: &Job, by: i64) {
    store.shift(by);
    let claim = Claim {
        job: job.name.clone(),
        target: Target::Scheduled(Occurrence(now(store, by) - 5)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: node.contender.me.instance.clone(),
        host: "a".into(),
        trigger: Trigger::Schedule,
        start_by: 0,
        lease: 1000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: job.digest.clone(),
        observed: None,
        holds: vec![],
        cause: None,
    };
    let answer = store.claim(&[claim]).await.unwrap().value.remove(0);
    assert!(matches!(answer, Answer::Recorded { .. }), "{answer:?}");
    store.shift(-by);
}

/// What became of the trigger: the record that does not lie in the future.
async fn of_the_trigger(store: &MemoryStore, job: &Job) -> Outcome {
    let all = recorded(store, &job.name, 2).await;
    let (_, outcome) = all.iter().min_by_key(|(at, _)| *at).unwrap();
    *outcome
}

#[tokio::test]
async fn a_trigger_waits_for_the_stores_clock_without_haste_and_ends() {
    let (store, started, node) = alone();
    let job = job("start_within = \"3s\"");
    node.with(&job).await;
    behind_what_is_decided(&node, &store, &job, 3_600_000).await;
    let put = Control::Trigger { key: "k".into() };
    let begun = Instant::now();
    store.control(&job.name, &put).await.unwrap();
    // The store's clock may stand still as well: the time that passes on this instance counts.
    assert_eq!(of_the_trigger(&store, &job).await, Outcome::Missed);
    assert!(begun.elapsed() >= Duration::from_secs(3));
    assert!(started.all().is_empty());
    // At first every few milliseconds, in the end once a second.
    let asked = node.line.claims.load(Ordering::SeqCst);
    let most = 16 + begun.elapsed().as_secs() as usize;
    assert!(asked <= most, "asked {asked} times");
}

#[tokio::test]
async fn while_the_stores_clock_is_in_doubt_no_registration_is_asked_for() {
    const HOUR: i64 = 3_600_000;
    let store = Arc::new(MemoryStore::new());
    let node = Node::simple("a", &store, &Arc::new(Started::default()));
    let contender = &node.contender;
    node.with(&job("")).await;
    // From here on the test itself does what keeps a contender going.
    node.stop.cancel();
    until("nobody else asks", || node.kept.is_finished().then_some(())).await;
    store.shift(HOUR);
    let reply = store.heartbeat(None).await.unwrap();
    note_clock(&contender.clock, &reply);
    assert!(contender.clock.doubt_us().is_some());
    contender.set_job(named("other", ""));
    // Each question would fail.
    node.line.away.store(true, Ordering::SeqCst);
    let left = contender.register(&open_epoch(&reply)).await;
    assert_eq!(left.unwrap(), 1);
    node.line.away.store(false, Ordering::SeqCst);
    store.shift(-HOUR);
    let reply = store.heartbeat(None).await.unwrap();
    note_clock(&contender.clock, &reply);
    let left = contender.register(&open_epoch(&reply)).await;
    assert_eq!(left.unwrap(), 0);
}

#[tokio::test]
async fn a_trigger_runs_when_the_stores_clock_has_room_for_it() {
    let (store, started, node) = alone();
    let job = job("start_within = \"10m\"");
    node.with(&job).await;
    behind_what_is_decided(&node, &store, &job, 60_000).await;
    let put = Control::Trigger { key: "k".into() };
    store.control(&job.name, &put).await.unwrap();
    node.asked(3).await;
    store.shift(61_000);
    let all = recorded(&*store, &job.name, 2).await;
    assert!(
        all.iter()
            .any(|(_, outcome)| *outcome == Outcome::Succeeded)
    );
    assert_eq!(started.runs().len(), 1);
}

fn limited(store: &Arc<MemoryStore>, started: &Arc<Started>) -> Node {
    Node::new(Setup {
        name: "a",
        line: Line::new(store.clone()),
        started: started.clone(),
        max_parallel: Some(1),
        lasts: Lasts::ForEver,
    })
}

/// The newer occurrence waits for the older one's next attempt, and must not have the only slot meanwhile.
#[tokio::test]
async fn an_attempt_that_goes_first_finds_a_slot() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = limited(&store, &started);
    let job = job("overlap = \"queue\"");
    node.with(&job).await;
    let first = now(&store, -2_000);
    node.due(&job, first);
    until("it runs", || (started.runs() == [first]).then_some(())).await;
    node.due(&job, first + 1_000);
    // Its next attempt is awaited; an instance hears of that only when it is told to run it first.
    node.line.hold_before.store(true, Ordering::SeqCst);
    let g = node.open.lock().unwrap().remove(0);
    let s = Settle {
        run: g.run.id,
        record: RunRecord {
            run_id: Some(g.run.id),
            job: job.name.clone(),
            occurrence: g.run.occurrence,
            trigger: g.run.trigger,
            attempt: 1,
            fencing_token: None,
            instance: None,
            host: None,
            started_at: None,
            finished_at: None,
            lateness_ms: None,
            duration_ms: None,
            outcome: Outcome::Crashed,
            exit_code: None,
            signal: None,
            output_tail: String::new(),
            output_truncated: false,
            error: None,
            count: 1,
            usage: soloist::model::Usage::default(),
            waited: None,
            by: None,
        },
        next_attempt: Some(DelayedAttempt {
            delay_ms: 0,
            trigger: Trigger::Takeover,
        }),
    };
    let _ = store.settle(&s, &Tail::default()).await.unwrap();
    drop(g);
    node.line.let_go();
    until("the takeover runs", || {
        started.all().iter().any(|s| s.attempt == 2).then_some(())
    })
    .await;
    node.end(Outcome::Succeeded, None).await;
    node.end(Outcome::Succeeded, None).await;
    let all = recorded(&*store, &job.name, 3).await;
    assert_eq!(all[2], (first + 1_000, Outcome::Succeeded), "{all:?}");
}

/// No slot becomes free in time: the occurrence is recorded all the same, and a drained instance takes none later.
#[tokio::test]
async fn waiting_for_a_slot_ends_with_a_record_or_a_drain() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = limited(&store, &started);
    let long = named("long", "");
    let short = named("short", "start_within = \"1s\"");
    let other = named("other", "start_within = \"1h\"");
    node.with(&long).await;
    node.with(&short).await;
    node.with(&other).await;
    let at = now(&store, -100);
    node.due(&long, at);
    until("it runs", || (started.runs() == [at]).then_some(())).await;
    node.due(&short, at);
    node.due(&other, at);
    let all = recorded(&*store, &short.name, 1).await;
    assert_eq!(all, [(at, Outcome::Missed)]);
    node.contender.set_draining(true);
    node.end(Outcome::Succeeded, None).await;
    // Long enough: the claim of another job takes the same way.
    node.contender.set_draining(false);
    until("it runs after the drain only", || {
        (started.all().len() == 2).then_some(())
    })
    .await;
    assert_eq!(started.all()[1].job, other.name);
}

/// One instance alone is drained: nobody decides what is due meanwhile, and afterwards nothing of that may be jumped
/// over.
#[tokio::test]
async fn what_a_drain_left_over_is_caught_up_after_it() {
    let (store, started, node) = alone();
    let every = 60_000;
    let job = job("schedule = \"@every 60s\"");
    node.with(&job).await;
    let real = now(&store, 0);
    let first = real - real.rem_euclid(every) + every;
    store.shift(first + 1_000 - real);
    node.due(&job, first);
    recorded(&*store, &job.name, 1).await;
    node.contender.set_draining(true);
    for i in 1..4 {
        store.shift(every);
        node.due(&job, first + i * every);
        // Until the instance leaves it to others, and there are none.
        let begun = Instant::now();
        let at = Occurrence(first + i * every);
        let left = |d: &Decision| d.occurrence == at && d.decision == "draining";
        while !store.decisions(&job.name).await.unwrap().iter().any(left) {
            assert!(begun.elapsed() < GENEROUS, "{at} is not left to others");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    node.contender.set_draining(false);
    recorded(&*store, &job.name, 4).await;
    store.shift(every);
    node.due(&job, first + 4 * every);
    let all = recorded(&*store, &job.name, 5).await;
    let due: Vec<i64> = (0..5).map(|i| first + i * every).collect();
    each_once(&all, &due);
    assert_eq!(started.runs(), [due[0], due[3], due[4]], "{all:?}");
}

/// The job goes from the configuration between the claim and its answer.
#[tokio::test]
async fn what_was_granted_runs_although_its_job_was_removed() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::simple("a", &store, &started);
    let job = job("");
    node.with(&job).await;
    let at = now(&store, -100);
    node.line.hold_after.store(true, Ordering::SeqCst);
    node.due(&job, at);
    until("it was granted", || {
        (node.line.claims.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    node.contender.remove_job(&job.name);
    node.line.let_go();
    let all = recorded(&*store, &job.name, 1).await;
    assert_eq!(all, [(at, Outcome::Succeeded)]);
    // Back again: a driver takes what is due.
    node.contender.set_job(job.clone());
    until("it is known again", || {
        node.due(&job, at + 50);
        started.runs().contains(&(at + 50)).then_some(())
    })
    .await;
    started.once();
}

/// The same, and it comes back while that run goes on: nobody asks for it again.
#[tokio::test]
async fn what_was_granted_while_its_job_was_removed_starts_once() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::new(Setup {
        name: "a",
        line: Line::new(store.clone()),
        started: started.clone(),
        max_parallel: None,
        lasts: Lasts::ForEver,
    });
    let job = job("");
    node.with(&job).await;
    let at = now(&store, -100);
    node.line.hold_after.store(true, Ordering::SeqCst);
    node.due(&job, at);
    until("it was granted", || {
        (node.line.claims.load(Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    node.contender.remove_job(&job.name);
    node.line.let_go();
    until("it is started", || (started.all().len() == 1).then_some(())).await;
    node.with(&job).await;
    let begun = Instant::now();
    while node.contest(&job, at).await == ContestEnd::Undecided {
        assert!(begun.elapsed() < GENEROUS, "it is not known again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    started.once();
}

/// The reply to a claim is lost, then the store is away, and the job is removed from the only configuration that has
/// it.
#[tokio::test]
async fn what_was_granted_without_a_reply_before_its_job_was_removed_is_run() {
    for (trigger, disabled) in [(false, false), (true, false), (false, true)] {
        let store = Arc::new(MemoryStore::new());
        let started = Arc::new(Started::default());
        let node = Node::simple("a", &store, &started);
        let job = job("");
        node.with(&job).await;
        let at = now(&store, -100);
        node.line.lost_replies.store(100, Ordering::SeqCst);
        if trigger {
            let key = "k".to_owned();
            let what = Control::Trigger { key: key.clone() };
            store.control(&job.name, &what).await.unwrap();
            node.contender.on_event(&Event::Triggered {
                job: job.name.clone(),
                key,
                at: 0,
            });
        } else {
            node.due(&job, at);
        }
        until("it was granted", || {
            (node.line.claims.load(Ordering::SeqCst) > 0).then_some(())
        })
        .await;
        node.line.away.store(true, Ordering::SeqCst);
        // No contest is under way when the job is removed: its driver pauses between two rounds.
        let mut asked = 0;
        while asked != node.line.claims.load(Ordering::SeqCst) {
            asked = node.line.claims.load(Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
        match disabled {
            true => node.contender.set_job(self::job("enabled = false")),
            false => drop(node.contender.remove_job(&job.name)),
        }
        assert_eq!(started.all(), []);
        node.line.lost_replies.store(0, Ordering::SeqCst);
        node.line.away.store(false, Ordering::SeqCst);
        let all = recorded(&*store, &job.name, 1).await;
        assert_eq!(all[0].1, Outcome::Succeeded);
        started.once();
        // Nothing keeps this instance from saying that it is without the job.
        until("the claim is settled", || {
            (!node.contender.has_unanswered_claims(&job.name)).then_some(())
        })
        .await;
    }
}

/// One instance is told to be without the job while occurrences of it wait for their jitter.
#[tokio::test]
async fn what_waits_for_its_jitter_is_recorded_when_its_job_is_removed_or_disabled() {
    for disabled in [None, Some("enabled = false")] {
        what_waits_for_its_jitter_is_recorded_when_its_job_is(disabled).await;
    }
}

async fn what_waits_for_its_jitter_is_recorded_when_its_job_is(disabled: Option<&str>) {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    const LINES: &str = "schedule = \"@every 1s\"\njitter = \"1s\"\nstart_within = \"500ms\"\n";
    let without = disabled.map(|disabled| job(&format!("{LINES}{disabled}")));
    let job = job(LINES);
    let (node, other) = (
        Node::simple("a", &store, &started),
        Node::simple("b", &store, &started),
    );
    node.with(&job).await;
    other.with(&job).await;
    let planned = now(&store, 1000) / 1000 * 1000;
    until("two instants have passed", || {
        (now(&store, 0) > planned + 1100).then_some(())
    })
    .await;
    // Also when the store cannot be reached at that moment.
    node.line.away.store(true, Ordering::SeqCst);
    match without {
        Some(without) => node.contender.set_job(without),
        None => drop(node.contender.remove_job(&job.name)),
    }
    until("it was asked", || {
        (node.line.claims.load(Ordering::SeqCst) > 0).then_some(())
    })
    .await;
    node.line.away.store(false, Ordering::SeqCst);
    let all = recorded(&*store, &job.name, 2).await;
    let mut at: Vec<i64> = all.iter().map(|(at, _)| *at).collect();
    at.sort_unstable();
    assert!(
        at.contains(&planned) && at.contains(&(planned + 1000)),
        "{planned} {all:?}"
    );
    let history = store.history(&job.name, 10).await.unwrap();
    for r in &history {
        assert_eq!(r.outcome, Outcome::Missed);
        assert_eq!(r.error.as_deref(), Some(claim::JOB_REMOVED));
    }
    // An instance that still has the job finds them decided, and does not run them.
    for at in at {
        assert_eq!(other.contest(&job, at).await, ContestEnd::Settled);
    }
    assert_eq!(started.runs(), [0; 0]);
    // Later occurrences belong to the instances that still have the job.
    let later = now(&store, 0) / 1000 * 1000 + 1000;
    other.due(&job, later);
    until("the other runs it", || {
        started.runs().contains(&later).then_some(())
    })
    .await;
}

/// The job is disabled on one instance for a while. The other one has it, and cannot reach the store. When the first
/// one has it again, it runs what the other one owes, instead of jumping over it.
#[tokio::test]
async fn what_another_instance_owes_is_not_jumped_over_when_a_job_is_enabled_again() {
    const LINES: &str = "schedule = \"@every 1s\"\ncatch_up = \"all\"\n";
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let (node, other) = (
        Node::simple("a", &store, &started),
        Node::simple("b", &store, &started),
    );
    let (enabled, disabled) = (job(LINES), job(&format!("{LINES}enabled = false\n")));
    node.with(&enabled).await;
    other.with(&enabled).await;
    other.line.away.store(true, Ordering::SeqCst);
    node.with(&disabled).await;
    // Had the store been told, the other one would have contradicted.
    let first = now(&store, 0) / 1000 * 1000 + 1000;
    until("three instants have passed", || {
        (now(&store, 0) > first + 2100).then_some(())
    })
    .await;
    node.with(&enabled).await;
    until("all are run", || {
        let runs = started.runs();
        let all = (0..3).all(|n| runs.contains(&(first + n * 1000)));
        all.then_some(())
    })
    .await;
    started.once();
}

#[tokio::test]
async fn what_a_removed_job_leaves_is_run_by_those_who_have_it() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let job = job("schedule = \"@every 1s\"\nstart_within = \"2s\"");
    let (node, other) = (
        Node::simple("a", &store, &started),
        Node::simple("b", &store, &started),
    );
    node.with(&job).await;
    other.with(&job).await;
    let at = now(&store, 1000) / 1000 * 1000;
    let clock = soloist::clock::wall_us;
    let passed = |ms: i64| until("it is due", move || (clock() / 1000 > ms).then_some(()));
    passed(at).await;
    node.contender.remove_job(&job.name);
    passed(at + 300).await;
    other.due(&job, at);
    until("the other has run it", || started.of(at).pop()).await;
    until("the one without it has asked", || {
        (node.line.claims.load(Ordering::SeqCst) > 0).then_some(())
    })
    .await;
    let all = outcomes(&*store, &job.name).await;
    let of_it: Vec<_> = all.iter().filter(|(o, _)| *o == at).collect();
    assert_eq!(of_it, [&(at, Outcome::Succeeded)]);
}

#[tokio::test]
async fn what_waits_for_its_turn_is_recorded_when_its_job_is_removed() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::new(Setup {
        name: "a",
        line: Line::new(store.clone()),
        started: started.clone(),
        max_parallel: None,
        lasts: Lasts::ForEver,
    });
    let job = job("schedule = \"@every 1s\"\noverlap = \"queue\"\nstart_within = \"1s\"");
    node.with(&job).await;
    let first = now(&store, 1000) / 1000 * 1000;
    node.due(&job, first);
    until("the first runs", || {
        started.runs().contains(&first).then_some(())
    })
    .await;
    let second = first + 1000;
    until("the second is due", || {
        (now(&store, 0) > second).then_some(())
    })
    .await;
    node.due(&job, second);
    node.contender.remove_job(&job.name);
    let all = recorded(&*store, &job.name, 1).await;
    assert_eq!(all[0], (second, Outcome::Missed), "{all:?}");
    // The run itself is not disturbed.
    node.end(Outcome::Succeeded, None).await;
    let all = recorded(&*store, &job.name, 2).await;
    assert!(all.contains(&(first, Outcome::Succeeded)), "{all:?}");
    assert_eq!(started.runs(), [first]);
}

/// The run before is over, and its settlement waits: for the store, or for its turn. Occurrences that were due
/// meanwhile must not be skipped because of it.
#[tokio::test]
async fn what_is_due_between_the_end_of_a_run_and_its_settlement_is_not_skipped() {
    let store = Arc::new(MemoryStore::new());
    let started = Arc::new(Started::default());
    let node = Node::lasting("a", &store, &started);
    let job = job("");
    node.with(&job).await;
    let first = now(&store, -1000);
    node.due(&job, first);
    let run = until("the first runs", || started.of(first).pop())
        .await
        .run;
    let finished = now(&store, 0);
    node.contender.run_over(&job.name, run);
    until("time has passed", || {
        (now(&store, 0) > finished + 20).then_some(())
    })
    .await;
    let second = finished + 10;
    node.due(&job, second);
    // A claim now would be skipped: for the store, the first run goes on.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(outcomes(&*store, &job.name).await, []);
    let g = node.open.lock().unwrap().remove(0);
    ended(&node.contender, g, Outcome::Succeeded, None, finished).await;
    until("the second runs", || started.of(second).pop()).await;
    assert_eq!(
        outcomes(&*store, &job.name).await,
        [(first, Outcome::Succeeded)]
    );
}

#[tokio::test]
async fn another_jitter_is_planned_anew() {
    let store = Arc::new(MemoryStore::new());
    let node = Node::simple("a", &store, &Arc::default());
    let old = job("schedule = \"@every 1h\"");
    node.with(&old).await;
    let new = job("schedule = \"@every 1h\"\njitter = \"5m\"");
    node.contender.set_job(new.clone());
    node.planned(&new.name).await;
}

/// A key of another type under one job.
#[tokio::test]
async fn a_job_that_the_store_refuses_takes_no_other_down() {
    let (store, started, node) = alone();
    let jobs: Vec<_> = (0..5).map(|i| named(&format!("j{i}"), "")).collect();
    let bad = &jobs[2];
    node.line.refused.lock().unwrap().insert(bad.name.clone());
    for j in &jobs {
        node.contender.set_job(j.clone());
    }
    let at = now(&store, -100);
    until("the others run", || {
        for j in &jobs {
            node.due(j, at);
        }
        (started.all().len() == 4).then_some(())
    })
    .await;
    assert!(started.all().iter().all(|s| s.job != bad.name));
    node.line.refused.lock().unwrap().clear();
    until("it runs when it is repaired", || {
        (started.all().len() == 5).then_some(())
    })
    .await;
    started.once();
}

/// A holder is dead, and one of the jobs that are looked at cannot be read.
#[tokio::test]
async fn a_dead_holder_is_found_although_another_job_cannot_be_read() {
    let (store, started, node) = alone();
    let quick = "lease = \"500ms\"\non_crash = \"rerun\"\nmax_attempts = 3";
    let jobs = [named("bad", quick), named("good", quick)];
    let dead = Node::lasting("dead", &store, &started);
    let at = now(&store, -100);
    for j in &jobs {
        dead.with(j).await;
        node.with(j).await;
        assert!(matches!(dead.contest(j, at).await, ContestEnd::Won(_)));
        assert!(matches!(node.contest(j, at).await, ContestEnd::Lost { .. }));
    }
    let bad = jobs[0].name.clone();
    node.line.refused.lock().unwrap().insert(bad);
    // The holder is gone: nobody renews.
    dead.stop.cancel();
    dead.contender.set_draining(true);
    until("the other is taken over", || {
        let all = started.all();
        let taken = |s: &&Start| s.job == jobs[1].name && s.attempt == 2;
        all.iter().find(taken).map(|s| s.trigger)
    })
    .await;
}

/// Plans the occurrences of a contender's jobs, as the dispatcher does.
async fn dispatch(contender: Arc<Contender>, mut plans: mpsc::UnboundedReceiver<PlanUpdate>) {
    let mut planned: BTreeMap<JobName, (Arc<Job>, Occurrence)> = BTreeMap::new();
    while !contender.stop.is_cancelled() {
        while let Ok(plan) = plans.try_recv() {
            match plan {
                PlanUpdate::PlanAfter(job, after) => {
                    let before = planned.insert(job.name.clone(), (job.clone(), after));
                    // What the old plan has up to the change stays owed.
                    if let Some((old, mut at)) = before {
                        while let Some(next) = next_of(&old.schedules, at).filter(|n| *n <= after) {
                            contender.due(vec![due(&job, next.0)]);
                            at = next;
                        }
                    }
                }
                PlanUpdate::Remove(name) => drop(planned.remove(&name)),
            };
        }
        let now = contender.clock.now_us().unwrap_or(0) / 1000;
        for (job, after) in planned.values_mut() {
            while let Some(at) = next_of(&job.schedules, *after).filter(|at| at.0 <= now) {
                contender.due(vec![due(job, at.0)]);
                *after = at;
            }
        }
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Several instances and a store whose clock runs twenty times as fast; requests and replies are lost at random,
/// instances are cut off and drained now and then, jobs go and come back, triggers are put in. Every occurrence is in
/// the history once, started at most once, and none is given up while its holder lives.
async fn weather(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let began = soloist::clock::wall_us();
    let clock = move || began + (soloist::clock::wall_us() - began) * 20;
    let store = Arc::new(MemoryStore::new_with_clock(Arc::new(clock)));
    let started = Arc::new(Started::default());
    let overlaps = ["skip", "queue", "allow", "replace"];
    let policies = ["latest", "all", "none"];
    let jobs: Vec<_> = (0..3)
        .map(|i| {
            let (overlap, policy) = (overlaps[rng.usize(..4)], policies[rng.usize(..3)]);
            // A lease that outlasts each absence, on a slow machine too: three minutes, as this store's clock runs.
            let lines = format!(
                "schedule = \"@every 1s\"\noverlap = \"{overlap}\"\ncatch_up = \"{policy}\"\nlease = \"1h\""
            );
            named(&format!("j{i}"), &lines)
        })
        .collect();
    let limit = rng.bool().then(|| rng.u32(1..3));
    let mut nodes = vec![];
    for i in 0..4 {
        let line = Line::new(store.clone());
        line.seed.store(seed * 10 + i, Ordering::SeqCst);
        let mut node = Node::new(Setup {
            name: &format!("n{i}"),
            line,
            started: started.clone(),
            max_parallel: limit,
            lasts: Lasts::Ms(rng.u64(..25)),
        });
        let (_, none) = mpsc::unbounded_channel();
        let plans = std::mem::replace(&mut node.plans, Mutex::new(none));
        let plans = plans.into_inner().unwrap();
        tokio::spawn(dispatch(node.contender.clone(), plans));
        for j in &jobs {
            node.contender.set_job(j.clone());
        }
        nodes.push(node);
    }
    let live: Arc<[InstanceId]> = nodes
        .iter()
        .map(|n| n.contender.me.instance.clone())
        .collect();
    let replies = rng.u32(..30);
    for n in &nodes {
        n.contender.set_live(live.clone());
        n.line.lost_requests.store(rng.u32(..10), Ordering::SeqCst);
        n.line.lost_replies.store(replies, Ordering::SeqCst);
    }
    let mut keys = 0;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(rng.u64(5..40))).await;
        let some = &nodes[rng.usize(..4)];
        let job = &jobs[rng.usize(..3)];
        match rng.u32(..16) {
            0 => some.line.away.store(true, Ordering::SeqCst),
            1..5 => some.line.away.store(false, Ordering::SeqCst),
            5 => some.contender.set_draining(true),
            6..9 => some.contender.set_draining(false),
            9 => some.contender.resync(),
            10 => drop(some.contender.remove_job(&job.name)),
            11 => some.contender.set_job(job.clone()),
            12 => {
                keys += 1;
                let key = format!("k{keys}");
                let _ = store
                    .control(&job.name, &Control::Trigger { key })
                    .await
                    .unwrap();
            }
            _ => {}
        }
    }
    for n in &nodes {
        n.line.away.store(false, Ordering::SeqCst);
        n.line.lost_requests.store(0, Ordering::SeqCst);
        n.line.lost_replies.store(0, Ordering::SeqCst);
        n.contender.set_draining(false);
        for j in &jobs {
            n.contender.set_job(j.clone());
        }
    }
    let end = clock() / 1000;
    for j in &jobs {
        let name = std::slice::from_ref(&j.name);
        let begun = Instant::now();
        let state = loop {
            let reply = store.observe(name).await.unwrap();
            let state = reply.value[0].clone().unwrap();
            if state.newest > end && state.open.iter().all(|o| o.run.occurrence.0 > end) {
                break state;
            }
            assert!(
                begun.elapsed() < GENEROUS,
                "seed {seed}: {state:#?} of {}",
                j.name
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        // The ended run is recorded in the same step.
        let records = store.history(&j.name, 1000).await.unwrap();
        let oldest = records.iter().map(|r| r.occurrence.0).min().unwrap();
        let mut seen: BTreeMap<i64, Outcome> = BTreeMap::new();
        for r in records.iter().filter(|r| r.occurrence.0 <= end) {
            let (at, outcome) = (r.occurrence.0, r.outcome);
            assert_eq!(r.count, 1, "seed {seed}");
            assert_ne!(
                outcome,
                Outcome::Unknown,
                "seed {seed}: given up while held: {r:?}"
            );
            assert_eq!(seen.insert(at, outcome), None, "seed {seed}: twice: {r:?}");
        }
        let mut at = Occurrence(state.since.max(oldest - 1));
        while let Some(next) = next_of(&j.schedules, at).filter(|next| next.0 <= end) {
            assert!(
                seen.contains_key(&next.0),
                "seed {seed}, {}: {next} is lost; {seen:?}",
                j.name
            );
            at = next;
        }
    }
    started.once();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_weather_loses_or_repeats_an_occurrence() {
    let seeds = crate::support::test_seconds().div_ceil(2).max(4);
    for seed in 1..=seeds {
        weather(seed).await;
    }
}
