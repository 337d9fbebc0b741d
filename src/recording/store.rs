//! A store that writes down what it is asked, and answers.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::{Line, Recorder};
use crate::{
    clock::{Boottime, StoreClock},
    logic::{
        claim::{
            Answer, Answered, Claim, Control, Controlled, Event, Question, Register, Registration,
            Renew, Renewal, Settle, Settlement, State,
        },
        notify::lease::{Write, Written},
    },
    model::{InstanceId, JobName, Marks, RunId, RunRecord},
    store::{Beat, Changed, Decision, Error, Fleet, Notices, Output, Problem, Reply, Store, Tail},
};

/// Another store, with a [`Recorder`] in front of it.
struct RecordingStore {
    recorder: Arc<Recorder>,
    beats: Mutex<Beats>,
    inner: Arc<dyn Store>,
}

/// Heartbeats, of which few are written down: now and then one, and those before and after a change of the epoch.
#[derive(Default)]
struct Beats {
    /// The last one, unless it is written down.
    last: Option<Line>,
    /// The incarnation and the epoch's id that it found.
    epoch: Option<(Arc<str>, Arc<str>)>,
    written: Option<Boottime>,
}

/// Between two heartbeats that are written down while nothing changes.
const NOW_AND_THEN: Duration = Duration::from_secs(60);

impl Beats {
    fn found(&mut self, recorder: &Recorder, reply: &Reply<Fleet>) {
        let line = Line::Epoch {
            sent: reply.sent,
            received: reply.received,
            now_us: reply.now_us,
            incarnation: reply.incarnation.to_string(),
            id: reply.value.id.to_string(),
        };
        let epoch = Some((reply.incarnation.clone(), reply.value.id.clone()));
        let recent = |at: Boottime| reply.received.since(at) < NOW_AND_THEN;
        if self.epoch == epoch && self.written.is_some_and(recent) {
            self.last = Some(line);
            return;
        }
        if self.epoch != epoch
            && let Some(last) = self.last.take()
        {
            recorder.write(&last);
        }
        recorder.write(&line);
        (self.last, self.epoch, self.written) = (None, epoch, Some(reply.received));
    }
}

/// The store, with the recorder in front of it if there is one.
pub fn recording(inner: Arc<dyn Store>, recorder: Option<&Arc<Recorder>>) -> Arc<dyn Store> {
    match recorder {
        Some(recorder) => {
            inner.show_states();
            Arc::new(RecordingStore {
                recorder: recorder.clone(),
                beats: Mutex::default(),
                inner,
            })
        }
        None => inner,
    }
}

impl RecordingStore {
    fn asks(&self, question: Question) -> u64 {
        let sent = Boottime::now();
        self.recorder.write(&Line::Asks { sent, question })
    }

    /// Writes down the answers to the questions of these lines, in order.
    fn answers<T>(
        &self,
        asked: &[u64],
        reply: &Result<Reply<T>, Error>,
        answers: impl FnOnce(&T) -> Vec<Answered>,
    ) {
        let reply = match reply {
            Ok(reply) => reply,
            Err(e) => {
                let error = e.to_string();
                for &to in asked {
                    let error = error.clone();
                    self.recorder.write(&Line::Fails { to, error });
                }
                return;
            }
        };
        // A registration may take several requests, and its reply has the times of one of them.
        let received = Boottime::now();
        let mut around = reply.around.iter().cloned();
        for (&to, answer) in asked.iter().zip(answers(&reply.value)) {
            let leases = matches!(
                answer,
                Answered::Claim(Answer::Granted(_)) | Answered::Renew(Renewal::Renewed(_))
            );
            self.recorder.write(&Line::Answers {
                to,
                left: leases.then_some(reply.sent),
                received,
                now_us: reply.now_us,
                answer,
                around: around.next(),
            });
        }
    }
}

#[async_trait]
impl Store for RecordingStore {
    fn address(&self) -> &str {
        self.inner.address()
    }
    fn place(&self, job: &JobName) -> String {
        self.inner.place(job)
    }
    fn durable(&self) -> bool {
        self.inner.durable()
    }
    fn local_clock(&self) -> bool {
        self.inner.local_clock()
    }
    fn believe(&self, clock: Arc<StoreClock>) {
        self.inner.believe(clock);
    }
    fn hurry(&self) {
        self.inner.hurry();
    }
    fn show_states(&self) {
        self.inner.show_states();
    }
    async fn check(&self) -> Result<Vec<Problem>, Error> {
        self.inner.check().await
    }

    async fn claim(&self, claims: &[Claim]) -> Result<Reply<Vec<Answer>>, Error> {
        let ask = |c: &Claim| self.asks(Question::Claim(Box::new(c.clone())));
        let asked: Vec<u64> = claims.iter().map(ask).collect();
        let reply = self.inner.claim(claims).await;
        self.answers(&asked, &reply, |answers| {
            let answers = answers.iter().cloned();
            answers.map(Answered::Claim).collect()
        });
        reply
    }
    async fn renew(&self, renew: &Renew) -> Result<Reply<Renewal>, Error> {
        let asked = self.asks(Question::Renew(Box::new(renew.clone())));
        let reply = self.inner.renew(renew).await;
        self.answers(&[asked], &reply, |a| vec![Answered::Renew(*a)]);
        reply
    }
    async fn settle(&self, settle: &Settle, output: &Tail) -> Result<Reply<Settlement>, Error> {
        let asked = self.asks(Question::Settle(Box::new(settle.clone())));
        let reply = self.inner.settle(settle, output).await;
        self.answers(&[asked], &reply, |a| vec![Answered::Settle(*a)]);
        reply
    }
    async fn register(
        &self,
        jobs: &[Register],
    ) -> Result<Reply<Vec<(Registration, Option<State>)>>, Error> {
        let ask = |r: &Register| self.asks(Question::Register(Box::new(r.clone())));
        let asked: Vec<u64> = jobs.iter().map(ask).collect();
        let reply = self.inner.register(jobs).await;
        self.answers(&asked, &reply, |answers| {
            let answers = answers.iter();
            answers.map(|(a, _)| Answered::Register(*a)).collect()
        });
        reply
    }
    async fn control(&self, job: &JobName, what: &Control) -> Result<Reply<Controlled>, Error> {
        let asked = self.asks(Question::Control(job.clone(), what.clone()));
        let reply = self.inner.control(job, what).await;
        self.answers(&[asked], &reply, |a| vec![Answered::Control(a.clone())]);
        reply
    }
    async fn jobs(&self) -> Result<Vec<JobName>, Error> {
        self.inner.jobs().await
    }
    async fn observe(&self, jobs: &[JobName]) -> Result<Reply<Vec<Option<State>>>, Error> {
        self.inner.observe(jobs).await
    }

    async fn heartbeat(&self, beat: Option<&Beat>) -> Result<Reply<Fleet>, Error> {
        let reply = self.inner.heartbeat(beat).await;
        if let (Ok(reply), Some(_)) = (&reply, beat) {
            self.beats.lock().found(&self.recorder, reply);
        }
        reply
    }
    async fn found(&self, id: &str) -> Result<Reply<Fleet>, Error> {
        self.inner.found(id).await
    }
    async fn leave(&self, instance: &InstanceId, process: u32) -> Result<(), Error> {
        // Until then the epoch has not changed.
        if let Some(last) = self.beats.lock().last.take() {
            self.recorder.write(&last);
        }
        self.inner.leave(instance, process).await
    }
    async fn drain(&self, instance: &InstanceId, on: bool, by: &str) -> Result<(), Error> {
        self.inner.drain(instance, on, by).await
    }
    async fn notices(&self, all: bool) -> Result<Reply<Notices>, Error> {
        self.inner.notices(all).await
    }
    async fn note(&self, write: &Write) -> Result<Reply<Written>, Error> {
        self.inner.note(write).await
    }
    async fn journal(&self, decisions: &[Decision]) -> Result<(), Error> {
        self.inner.journal(decisions).await
    }
    async fn decisions(&self, job: &JobName) -> Result<Vec<Decision>, Error> {
        self.inner.decisions(job).await
    }
    async fn history(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        self.inner.history(job, n).await
    }
    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Error> {
        self.inner.records(job, n).await
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
        let inner = &self.inner;
        inner.append_output(job, run, at, data, keep, stderr).await
    }
    async fn output(&self, job: &JobName, run: RunId, from: u64) -> Result<Option<Output>, Error> {
        self.inner.output(job, run, from).await
    }
    fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.events()
    }
    fn changes(&self) -> broadcast::Receiver<Changed> {
        self.inner.changes()
    }
}
