//! The notifier: one instance of the fleet at a time ([`Role`]). It looks at the records of jobs as they change, judges
//! them, notes what it judged together with the messages that follow from it, and sends the messages. All that it knows
//! is in the store: an instance that takes over goes on where the last one was.

mod look;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{
    broadcast::{self, error::RecvError},
    mpsc,
};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, error, info, warn};

use super::{
    Context, LAST_WORDS, Undelivered, send,
    text::{Surroundings, Text},
};
use crate::{
    clock::{self, Boottime},
    config::{Channel, Config},
    failpoint,
    health::Delivery,
    logic::{
        backoff,
        claim::State,
        notify::{
            ChannelRules, FORGET_MS, GivenUp, Item, Message, Notes,
            lease::{self, GIVEN_UP, OF_JOB, Role, Write, Written},
            remember,
        },
    },
    model::JobName,
    store::{self, Asking, Changed, Reply},
    words,
};

/// The names of the notes of messages begin so.
const OF_MESSAGE: &str = "message:";
/// Since when the fleet has notes: older records are told to nobody.
const SINCE: &str = "since";
/// Records that were made so long before the first notifier are told, ms.
const BEFORE_MS: i64 = 60_000;
/// The pause between two tries to deliver a message: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));
/// A message that is older than this is given up when a try fails, ms.
const GIVE_UP_MS: i64 = 3_600_000;
/// A message that the server refuses is given up after so many tries, in about a minute: somebody may be about to mend
/// the server.
const REFUSED_TRIES: u32 = 6;
/// The time between two tries of one write.
const WRITE_AGAIN: Duration = Duration::from_millis(200);

pub(super) struct Notifier {
    context: Context,
    asking: Asking,
    process: u64,
    config: Arc<Config>,
    role: Role,
    /// When to ask for the lease again, or renew it.
    next_lease: Boottime,
    /// Of the notifier only: the same as the store has.
    since: i64,
    notes: BTreeMap<JobName, Notes>,
    messages: BTreeMap<String, Message>,
    given_up: Vec<GivenUp>,
    /// Says at which jobs to look. None: it says nothing any more.
    hints: Option<broadcast::Receiver<Changed>>,
    /// The jobs at which to look, not before this moment, and the one that was looked at last.
    pending: BTreeSet<JobName>,
    not_before: Boottime,
    looked: Option<JobName>,
    /// When to look at some of the jobs of which nothing was heard, and the last of them so far.
    next_round: Boottime,
    round: Option<JobName>,
    /// By channel: what is being sent.
    under_way: BTreeMap<String, AbortOnDropHandle<()>>,
    results: mpsc::UnboundedSender<Sent>,
    sent: mpsc::UnboundedReceiver<Sent>,
}

/// What became of a message.
struct Sent {
    channel: String,
    id: String,
    result: Result<String, Undelivered>,
}

/// Notes to be written together.
#[derive(Default)]
struct Changes {
    notes: BTreeMap<JobName, Notes>,
    /// Jobs whose notes are not needed any more.
    forgotten: Vec<JobName>,
    messages: BTreeMap<String, Message>,
    /// A message that was delivered.
    delivered: Option<String>,
    given_up: Vec<GivenUp>,
}

impl Notifier {
    pub(super) fn new(
        context: Context,
        asking: Asking,
        hints: broadcast::Receiver<Changed>,
    ) -> Self {
        let now = Boottime::now();
        let (results, sent) = mpsc::unbounded_channel();
        let config = context.config.borrow().clone();
        context.health.figures.channels(config.channels.keys());
        Self {
            context,
            asking,
            process: fastrand::u64(..),
            config,
            role: Role::new(),
            next_lease: now,
            since: 0,
            notes: BTreeMap::new(),
            messages: BTreeMap::new(),
            given_up: vec![],
            hints: Some(hints),
            pending: BTreeSet::new(),
            not_before: now,
            looked: None,
            next_round: now,
            round: None,
            under_way: BTreeMap::new(),
            results,
            sent,
        }
    }

    pub(super) async fn run(mut self) {
        let finish = self.context.finish.clone();
        loop {
            if finish.run_until_cancelled(self.step()).await.is_none() {
                return self.leave().await;
            }
            let wait = self.wake().since(Boottime::now());
            // A suspend stops the runtime's timers.
            let wait = wait.clamp(Duration::from_millis(1), Duration::from_secs(1));
            tokio::select! {
                biased;
                () = finish.cancelled() => return self.leave().await,
                Some(sent) = self.sent.recv() => self.ended(sent).await,
                hint = hint(&mut self.hints) => self.hear(hint),
                seen = self.context.config.changed() => {
                    // The daemon is gone.
                    let Ok(()) = seen else { return };
                    self.config = self.context.config.borrow_and_update().clone();
                    let figures = &self.context.health.figures;
                    figures.channels(self.config.channels.keys());
                    self.look_at_all();
                }
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn is_notifier(&self) -> bool {
        matches!(self.role, Role::Notifier { .. })
    }

    fn hear(&mut self, hint: Result<Changed, RecvError>) {
        match hint {
            Ok(Changed::Jobs(names)) if self.is_notifier() => {
                self.pending.extend(names.iter().cloned());
            }
            Ok(Changed::Jobs(_)) => {}
            Ok(Changed::Any) | Err(RecvError::Lagged(_)) => self.look_at_all(),
            Err(RecvError::Closed) => self.hints = None,
        }
    }

    fn look_at_all(&mut self) {
        if self.is_notifier() {
            self.pending.extend(self.config.jobs.keys().cloned());
        }
    }

    /// Does what is to be done now.
    async fn step(&mut self) {
        let now = Boottime::now();
        if self.is_notifier() && !self.role.trusts(now) {
            self.too_late();
        }
        // Another instance may have jobs of which it tells. What is being sent would be sent again.
        if self.is_notifier() && !self.config.tells_anybody() && self.under_way.is_empty() {
            self.give_back().await;
        }
        if now >= self.next_lease {
            // However often the notifier writes meanwhile: what the time changes is looked at, too.
            self.next_lease = now + lease::EVERY;
            match self.is_notifier() {
                true if self.time_passes().await => {}
                true => self.next_lease = now,
                false => self.look_at_lease().await,
            }
        }
        if self.is_notifier() {
            self.look(now).await;
            self.start_sending().await;
        }
    }

    /// The oldest message of each channel that is there, and over which nothing is being sent.
    fn heads(&self) -> BTreeMap<&str, (&String, &Message)> {
        let mut heads = BTreeMap::new();
        // The ids begin with the time.
        for (id, m) in &self.messages {
            let there = self.config.channels.contains_key(&m.channel);
            if there && !self.under_way.contains_key(&m.channel) {
                heads.entry(&*m.channel).or_insert((id, m));
            }
        }
        heads
    }

    /// When [`Notifier::step`] has something to do.
    fn wake(&self) -> Boottime {
        let mut wake = self.next_lease;
        if self.is_notifier() {
            wake = wake.min(self.next_round);
            if !self.pending.is_empty() {
                wake = wake.min(self.not_before);
            }
            if let Some(due) = self.heads().values().map(|(_, m)| m.due).min() {
                let wait = due.saturating_sub(self.now_ms()).max(0) as u64;
                wake = wake.min(Boottime::now() + Duration::from_millis(wait));
            }
        }
        wake
    }

    /// The store's clock as this instance believes it, Unix ms: one that jumps makes no message old, and no job
    /// overdue.
    fn now_ms(&self) -> i64 {
        let here = || clock::wall_us().div_euclid(1000);
        self.context.clock.now_ms().unwrap_or_else(here)
    }

    /// Looks who the notifier is, and becomes it if nobody else is.
    async fn look_at_lease(&mut self) {
        if !self.config.tells_anybody() {
            return;
        }
        let seen = self.asking.ask(|s| async move { s.notices(false).await });
        match seen.await {
            Ok(reply) => {
                self.role.saw(reply.value.lease, reply.received);
            }
            Err(e) => return debug!(error = %e, "cannot look who sends notifications"),
        }
        let me = &self.context.instance;
        let Some(lease) = self.role.may_take(me, self.process, Boottime::now()) else {
            return;
        };
        let write = Write {
            was: self.role.known(),
            lease: lease.text(),
            ..Write::default()
        };
        match self.note(write).await {
            Ok(reply) => match reply.value {
                Written::Done => self.role.wrote(lease, reply.sent),
                Written::Not(other) => return self.role.saw(other, reply.received),
            },
            Err(e) => return debug!(error = %e, "cannot take over the notifications"),
        }
        failpoint::here("notify_taken");
        if let Err(e) = self.read_notes().await {
            warn!(error = %e, "cannot read what was noted for notifications; retrying");
            self.step_back(None);
        }
    }

    async fn note(&self, write: Write) -> Result<Reply<Written>, store::Error> {
        self.asking
            .ask(|s| async move { s.note(&write).await })
            .await
    }

    /// The notifier begins: what the last one knew is in the store.
    async fn read_notes(&mut self) -> Result<(), store::Error> {
        let all = self.asking.ask(|s| async move { s.notices(true).await });
        let all = all.await?;
        let (now, mut notes) = (all.now_us.div_euclid(1000), all.value.notes);
        let since = notes.remove(SINCE).and_then(|s| s.parse().ok());
        if let Some(note) = notes.remove(GIVEN_UP) {
            self.given_up = serde_json::from_str(&note).unwrap_or_default();
        }
        for (name, note) in notes {
            if let Some(job) = name.strip_prefix(OF_JOB)
                && let Ok(notes) = serde_json::from_str(&note)
            {
                self.notes.insert(JobName::new(job), notes);
            } else if let Some(id) = name.strip_prefix(OF_MESSAGE)
                && let Ok(mut message) = serde_json::from_str::<Message>(&note)
            {
                // The instance that was sending it may have done so.
                message.perhaps_sent |= std::mem::take(&mut message.sending);
                self.messages.insert(id.to_owned(), message);
            } else {
                warn!(
                    note = words::line(&name),
                    "left out a note that cannot be read"
                );
            }
        }
        info!(
            waiting = self.messages.len(),
            "this instance sends the fleet's notifications now"
        );
        match since {
            Some(since) => self.since = since,
            None => {
                self.since = now - BEFORE_MS;
                let set = vec![(SINCE.to_owned(), self.since.to_string())];
                self.write(set, vec![]).await;
            }
        }
        self.look_at_all();
        Ok(())
    }

    /// This instance is no longer the notifier.
    fn step_back(&mut self, lease: Option<Option<String>>) {
        self.role = Role::new();
        if let Some(lease) = lease {
            self.role.saw(lease, Boottime::now());
        }
        // What is being sent ends here; the next notifier sends it again.
        self.under_way.clear();
        self.notes.clear();
        self.messages.clear();
        self.given_up.clear();
        self.pending.clear();
        while self.sent.try_recv().is_ok() {}
    }

    fn too_late(&mut self) {
        warn!("the store did not answer in time: another instance may send the notifications now");
        self.step_back(None);
    }

    /// Writes as the notifier, and tries again as long as it is sure to be that. False: it is so no longer.
    async fn write(&mut self, set: Vec<(String, String)>, remove: Vec<String>) -> bool {
        let Some(lease) = self.role.renewed(Boottime::now()) else {
            self.step_back(None);
            return false;
        };
        let write = Write {
            was: self.role.known(),
            lease: lease.text(),
            set,
            remove,
        };
        loop {
            match self.note(write.clone()).await {
                Ok(reply) => match reply.value {
                    Written::Done => {
                        self.role.wrote(lease, reply.sent);
                        return true;
                    }
                    Written::Not(other) => {
                        info!("another instance sends the fleet's notifications now");
                        self.step_back(Some(other));
                        return false;
                    }
                },
                Err(e) => debug!(error = %e, "cannot write notes of notifications; retrying"),
            }
            if !self.role.trusts(Boottime::now()) {
                self.too_late();
                return false;
            }
            tokio::time::sleep(WRITE_AGAIN).await;
        }
    }

    /// Writes these changes, and takes them in.
    async fn commit(&mut self, changes: Changes) -> bool {
        fn json<T: serde::Serialize>(value: &T) -> String {
            serde_json::to_string(value).unwrap_or_default()
        }
        let notes = changes.notes.iter();
        let mut set: Vec<(String, String)> = notes
            .map(|(job, n)| (format!("{OF_JOB}{job}"), json(n)))
            .collect();
        let messages = changes.messages.iter();
        set.extend(messages.map(|(id, m)| (format!("{OF_MESSAGE}{id}"), json(m))));
        let gone = changes.given_up.iter().map(|g| &g.id);
        let gone: Vec<String> = gone.chain(&changes.delivered).cloned().collect();
        let mut remove: Vec<String> = gone.iter().map(|id| format!("{OF_MESSAGE}{id}")).collect();
        let forgotten = changes.forgotten.iter();
        remove.extend(forgotten.map(|job| format!("{OF_JOB}{job}")));
        let mut given_up = self.given_up.clone();
        for g in &changes.given_up {
            remember(&mut given_up, g.clone());
        }
        if !changes.given_up.is_empty() {
            set.push((GIVEN_UP.to_owned(), json(&given_up)));
        }
        if !self.write(set, remove).await {
            return false;
        }
        self.given_up = given_up;
        self.notes.extend(changes.notes);
        for job in changes.forgotten {
            self.notes.remove(&job);
        }
        self.messages.extend(changes.messages);
        for id in gone {
            self.messages.remove(&id);
        }
        for g in changes.given_up {
            let (channel, why) = (&g.channel, &g.why);
            error!(%channel, id = %g.id, tries = g.tries, why, "gave a message up");
            let figures = &self.context.health.figures;
            figures.notification(channel, Delivery::GivenUp);
        }
        true
    }

    /// The channels of a job, with their rules. Empty: nobody is told of it.
    fn channels(&self, job: &JobName) -> Vec<ChannelRules<'_>> {
        let channels = &self.config.channels;
        let job = self.config.jobs.get(job);
        let names = job.into_iter().flat_map(|job| &job.alarms.notify);
        names
            .filter_map(|name| Some((&**name, &channels.get(name)?.rules)))
            .collect()
    }

    /// Tells what the time alone has changed, and renews the lease. False: there is more.
    async fn time_passes(&mut self) -> bool {
        let now = self.now_ms();
        let mut changes = Changes::default();
        for (name, known) in &self.notes {
            if changes.notes.len() + changes.forgotten.len() >= look::AT_ONCE {
                break;
            }
            let channels = self.channels(name);
            let is_watched = !channels.is_empty();
            if is_watched == known.unwatched.is_some() {
                let unwatched = (!is_watched).then_some(now);
                let notes = Notes {
                    unwatched,
                    ..known.clone()
                };
                changes.notes.insert(name.clone(), notes);
                continue;
            }
            // An instance may have another configuration for a moment, and a job that comes back is not told anew.
            if known
                .unwatched
                .is_some_and(|since| now - since >= FORGET_MS)
            {
                changes.forgotten.push(name.clone());
            }
            let job = self.config.jobs.get(name).filter(|job| job.enabled);
            let within = job.and_then(|job| job.alarms.expect_success_within);
            let within = within.map(|d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX));
            if is_watched && known.is_due(&channels, within, now) {
                let mut notes = known.clone();
                for (channel, item) in notes.time_passes(name, &channels, within, now) {
                    self.tell(&mut changes, &channel, item, now);
                }
                changes.notes.insert(name.clone(), notes);
            }
        }
        let all = changes.notes.len() + changes.forgotten.len() < look::AT_ONCE;
        for (id, m) in &self.messages {
            if !self.config.channels.contains_key(&m.channel) && now - m.at > GIVE_UP_MS {
                let given_up = GivenUp::new(id, m, "there is no such channel any more", now);
                changes.given_up.push(given_up);
            }
        }
        self.commit(changes).await && all
    }

    /// Adds something to the message that waits for the channel, or to a new one.
    fn tell(&self, changes: &mut Changes, channel: &str, item: Item, now: i64) {
        if let Some(message) = self.open_message(changes, channel) {
            return message.join(item, now);
        }
        let id = format!("{now}-{:08x}", fastrand::u32(..));
        let message = Message::new(item, channel, now);
        changes.messages.insert(id, message);
    }

    /// The message of the channel that still takes something.
    fn open_message<'a>(&self, changes: &'a mut Changes, channel: &str) -> Option<&'a mut Message> {
        let mut known = changes.messages.iter().chain(&self.messages);
        let (id, message) = known.find(|(_, m)| m.takes(channel))?;
        let (id, message) = (id.clone(), message.clone());
        Some(changes.messages.entry(id).or_insert(message))
    }

    /// Begins to send what is due: one message of each channel at a time.
    async fn start_sending(&mut self) {
        let now = self.now_ms();
        let heads = self.heads().into_values();
        let due: BTreeMap<String, Message> = heads
            .filter(|(_, m)| m.due <= now)
            .map(|(id, m)| {
                let sending = true;
                let message = Message {
                    sending,
                    ..m.clone()
                };
                (id.clone(), message)
            })
            .collect();
        if due.is_empty() {
            return;
        }
        let states = self.states(due.values()).await;
        let changes = Changes {
            messages: due.clone(),
            ..Changes::default()
        };
        if !self.commit(changes).await {
            return;
        }
        failpoint::here("notify_claimed");
        for (id, message) in due {
            let Some(channel) = self.config.channels.get(&message.channel) else {
                continue;
            };
            let surroundings = Surroundings {
                config: &self.config,
                states: &states,
                from: &self.context.instance,
                now: self.now_ms(),
            };
            let task = deliver(
                channel.clone(),
                message.only.clone(),
                Text::of(&message, &id, &surroundings),
                self.config.store_variables.clone(),
                self.results.clone(),
                self.role.until(),
            );
            let task = AbortOnDropHandle::new(tokio::spawn(task));
            self.under_way.insert(message.channel, task);
        }
    }

    /// The states of the jobs of which these messages tell, as far as the store says.
    async fn states(&self, messages: impl Iterator<Item = &Message>) -> BTreeMap<JobName, State> {
        let jobs: BTreeSet<&JobName> = messages.flat_map(|m| &m.items).map(|i| &i.job).collect();
        let jobs: Vec<JobName> = jobs.into_iter().cloned().collect();
        match self.asking.states(jobs.clone()).await {
            Ok(all) => (jobs.into_iter().zip(all.value))
                .filter_map(|(job, state)| Some((job, state.ok()??)))
                .collect(),
            Err(e) => {
                debug!(error = %e, "cannot see how jobs are now, of which a notification tells");
                BTreeMap::new()
            }
        }
    }

    /// A message was sent, or not.
    async fn ended(&mut self, sent: Sent) {
        let Sent {
            channel,
            id,
            result,
        } = sent;
        self.under_way.remove(&channel);
        let Some(message) = self.messages.get(&id).cloned() else {
            return;
        };
        let mut changes = Changes::default();
        let figures = &self.context.health.figures;
        match result {
            Ok(said) => {
                failpoint::here("notify_sent");
                info!(%channel, %id, said, "sent a notification");
                figures.notification(&channel, Delivery::Sent);
                changes.delivered = Some(id);
            }
            Err(e) => {
                figures.notification(&channel, Delivery::Failed);
                self.again(&mut changes, id, message, e);
            }
        }
        self.commit(changes).await;
    }

    /// A message was not sent: it is tried again, or given up.
    fn again(&self, changes: &mut Changes, id: String, message: Message, e: Undelivered) {
        let now = self.now_ms();
        let tries = message.tries.saturating_add(1);
        let mut message = Message {
            tries,
            refusals: message.refusals + u32::from(e.refused),
            failed_at: if tries == 1 { now } else { message.failed_at },
            sending: false,
            perhaps_sent: message.perhaps_sent || e.perhaps,
            ..message
        };
        if !e.lacking.is_empty() {
            message.only = e.lacking;
        }
        let refused = message.refusals >= REFUSED_TRIES;
        if refused || now.saturating_sub(message.failed_at) > GIVE_UP_MS {
            let given_up = GivenUp::new(&id, &message, &e.why, now);
            return changes.given_up.push(given_up);
        }
        let pause = failpoint::hurry(backoff::nth(AGAIN.0, tries, AGAIN.1));
        let pause = backoff::spread(pause, fastrand::f64());
        let pause = e.retry_after.unwrap_or(pause).as_millis() as i64;
        message.due = now.saturating_add(pause);
        let (channel, pause) = (&message.channel, words::took(pause));
        warn!(%channel, %id, tries, error = e.why, pause, "cannot send a notification; retrying");
        changes.messages.insert(id, message);
    }

    /// The daemon ends: another instance may go on at once.
    async fn leave(mut self) {
        if !self.is_notifier() {
            return;
        }
        let until = tokio::time::Instant::now() + LAST_WORDS;
        while !self.under_way.is_empty()
            && let Ok(Some(sent)) = tokio::time::timeout_at(until, self.sent.recv()).await
        {
            let _ = tokio::time::timeout_at(until, self.ended(sent)).await;
        }
        self.give_back().await;
    }

    /// Is the notifier no longer, and says so: another instance need not wait.
    async fn give_back(&mut self) {
        if let Some(mut lease) = self.role.renewed(Boottime::now()) {
            lease.over = true;
            let write = Write {
                was: self.role.known(),
                lease: lease.text(),
                ..Write::default()
            };
            let _ = tokio::time::timeout(LAST_WORDS, self.note(write)).await;
            self.step_back(None);
        }
    }
}

/// What is said of jobs next; if nothing ever is, this takes for ever.
async fn hint(hints: &mut Option<broadcast::Receiver<Changed>>) -> Result<Changed, RecvError> {
    match hints {
        Some(hints) => hints.recv().await,
        None => std::future::pending().await,
    }
}

async fn deliver(
    channel: Arc<Channel>,
    only: Vec<String>,
    text: Text,
    hidden: Arc<[String]>,
    results: mpsc::UnboundedSender<Sent>,
    until: Option<Boottime>,
) {
    // This process may have slept: another instance sends it then.
    let result = match until.is_some_and(|until| Boottime::now() < until) {
        true => send::send(&channel, &only, &text, &hidden).await,
        false => Err(Undelivered::new("this instance was held up")),
    };
    let _ = results.send(Sent {
        channel: channel.name.clone(),
        id: text.id,
        result,
    });
}
