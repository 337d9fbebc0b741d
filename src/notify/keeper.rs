//! The notifier: one instance of the fleet at a time ([`Stand`]). It looks at the records of jobs as they change,
//! judges them, notes what it judged together with the messages that follow from it, and sends the messages. All that
//! it knows is in the store: an instance that takes over goes on where the last one was.

mod lacks;
mod look;
mod pending;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::sync::{
    broadcast,
    broadcast::error::{RecvError, TryRecvError},
    mpsc,
};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, error, info, warn};

use self::pending::Pending;
use super::{
    LAST_WORDS, Parts, Undelivered, send,
    text::{self, Surroundings, Text},
};
use crate::{
    clock::Boottime,
    config::{Channel, Config, Job},
    failpoint,
    health::Told,
    logic::{
        backoff,
        claim::State,
        notify::{
            GIVE_UP_MS, GivenUp, Item, Kind, Message, Notes, Rules, Turn, WAITING, Watch, in_turn,
            refused_again, remembered,
            stand::{self, GIVEN_UP, OF_JOB, Stand, Write, Written},
        },
    },
    model::JobName,
    store::{self, Asking, Changed, Reply},
    view, words,
};

/// The names of the notes of messages begin so.
const OF_MESSAGE: &str = "message:";
/// Since when the fleet has notes: older records are told to nobody.
const SINCE: &str = "since";
/// Records that were made so long before the first notifier are told, ms.
const BEFORE_MS: i64 = 60_000;

/// The pause between two tries to deliver a message: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));
/// The time between two tries of one write.
const WRITE_AGAIN: Duration = Duration::from_millis(200);
/// The time between two looks at some of the jobs of which nothing was heard, and how many those are.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const LOOK_AT: usize = 500;
/// Jobs are looked at again so soon after a look that could not judge all.
const LOOK_SOON: Duration = Duration::from_millis(200);
/// Without a state that can be read nobody knows whether another attempt follows: after this time a bad end is told all
/// the same.
const UNREADABLE_MOST: Duration = Duration::from_secs(60);

pub(super) struct Keeper {
    parts: Parts,
    asking: Asking,
    process: u64,
    config: Arc<Config>,
    stand: Stand,
    /// When to ask for the lease again, or renew it.
    next_stand: Boottime,
    /// Unix ms of the store's clock, at a moment.
    clock: Option<(i64, Boottime)>,
    /// Of the notifier only: the same as the store has.
    since: i64,
    notes: BTreeMap<JobName, Notes>,
    messages: BTreeMap<String, Message>,
    given_up: Vec<GivenUp>,
    /// Jobs of other instances.
    lacking: lacks::Lacking,
    /// Says at which jobs to look. None: it says nothing any more.
    hints: Option<broadcast::Receiver<Changed>>,
    /// All hints of before this time were taken in, Unix ms.
    heard: i64,
    pending: Pending,
    /// Since when time has made jobs overdue of which not all are told, Unix ms.
    passing: Option<i64>,
    round: Option<JobName>,
    next_round: Boottime,
    /// Jobs are not looked at before this.
    not_before: Boottime,
    /// Since when the states of these jobs cannot be read.
    unreadable: BTreeMap<JobName, Boottime>,
    /// By channel: what is being sent.
    under_way: BTreeMap<String, AbortOnDropHandle<()>>,
    results: mpsc::UnboundedSender<Sent>,
    sent: mpsc::UnboundedReceiver<Sent>,
}

/// What became of a message.
struct Sent {
    channel: String,
    id: String,
    /// To which of its receivers.
    to: Vec<String>,
    result: Result<String, Undelivered>,
}

/// Notes to be written together.
#[derive(Default)]
struct Changes {
    notes: BTreeMap<JobName, Notes>,
    messages: BTreeMap<String, Message>,
    /// Jobs whose notes are not needed any more.
    forgotten: Vec<JobName>,
    /// A message that was delivered.
    delivered: Option<String>,
    given_up: Vec<GivenUp>,
}

impl Keeper {
    pub(super) fn new(parts: Parts, asking: Asking, hints: broadcast::Receiver<Changed>) -> Self {
        let now = Boottime::now();
        let (results, sent) = mpsc::unbounded_channel();
        let config = parts.config.borrow().clone();
        parts.health.figures.channels(config.channels.keys());
        Self {
            parts,
            asking,
            process: fastrand::u64(..),
            config,
            stand: Stand::new(),
            next_stand: now,
            clock: None,
            since: 0,
            notes: BTreeMap::new(),
            messages: BTreeMap::new(),
            given_up: vec![],
            lacking: lacks::Lacking::default(),
            hints: Some(hints),
            heard: 0,
            pending: Pending::default(),
            passing: None,
            round: None,
            next_round: now,
            not_before: now,
            unreadable: BTreeMap::new(),
            under_way: BTreeMap::new(),
            results,
            sent,
        }
    }

    pub(super) async fn run(mut self) {
        let finish = self.parts.finish.clone();
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
                seen = self.parts.config.changed() => {
                    // The daemon is gone.
                    let Ok(()) = seen else { return };
                    self.config = self.parts.config.borrow_and_update().clone();
                    let figures = &self.parts.health.figures;
                    figures.channels(self.config.channels.keys());
                    self.lacks_less();
                    self.all();
                }
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    fn is_notifier(&self) -> bool {
        matches!(self.stand, Stand::Notifier { .. })
    }

    fn hear(&mut self, hint: Result<Changed, RecvError>) {
        match hint {
            Ok(Changed::Jobs(names)) if self.is_notifier() => {
                for name in &*names {
                    if self.watched(name).is_some() {
                        self.pending.add(name.clone(), self.heard);
                    }
                }
            }
            Ok(Changed::Jobs(_)) => {}
            Ok(Changed::Any) | Err(RecvError::Lagged(_)) => self.all(),
            Err(RecvError::Closed) => self.hints = None,
        }
    }

    /// Takes in all hints that have come.
    fn hear_all(&mut self) {
        let now = self.now_ms();
        while let Some(hints) = &mut self.hints {
            let hint = match hints.try_recv() {
                Ok(hint) => Ok(hint),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Lagged(n)) => Err(RecvError::Lagged(n)),
                Err(TryRecvError::Closed) => Err(RecvError::Closed),
            };
            self.hear(hint);
        }
        self.heard = now;
    }

    /// The jobs that the configuration has no more, and of which somebody is told all the same, once the next attempts
    /// that they had are dropped.
    fn awaiting(&self) -> impl Iterator<Item = &JobName> {
        let gone = |name: &&JobName| !self.config.jobs.contains_key(*name);
        let channels = &self.config.channels;
        let told = |n: &Notes| n.awaited_for.iter().any(|c| channels.contains_key(c));
        let notes = self.notes.iter().filter(move |(_, n)| told(n));
        notes.map(|(name, _)| name).filter(gone)
    }

    /// Looks at all jobs, as far as anybody is told of them.
    fn all(&mut self) {
        if self.is_notifier() {
            let names = self.config.jobs.keys().chain(&self.lacking.jobs);
            let told = names.filter(|name| self.watched(name).is_some());
            let told: Vec<JobName> = told.cloned().collect();
            for name in told {
                self.pending.add(name, self.heard);
            }
        }
    }

    /// Does what is to be done now.
    async fn step(&mut self) {
        let now = Boottime::now();
        if self.is_notifier() && !self.stand.trusts(now) {
            self.too_late();
        }
        // Another instance may have jobs of which it tells, and send what waits for channels that are gone here.
        let channels = &self.config.channels;
        let mut waiting = self.messages.values();
        if self.is_notifier()
            && !self.config.tells_anybody()
            && !waiting.any(|m| channels.contains_key(&m.channel))
            && self.awaiting().next().is_none()
        {
            self.give_back().await;
        }
        if now >= self.next_stand {
            // However often the notifier writes meanwhile: what the time changes is looked at, too.
            self.next_stand = now + stand::EVERY;
            match self.is_notifier() {
                true if self.time_passes().await => self.passing = None,
                true => {
                    self.passing = self.passing.or(Some(self.now_ms()));
                    self.next_stand = now;
                }
                false => self.look_at_lease().await,
            }
        }
        if !self.is_notifier() {
            return;
        }
        if now >= self.next_round {
            self.next_round = now + LOOK_AGAIN;
            self.next_of_round();
            self.look_for_lacking(now).await;
        }
        if now >= self.not_before {
            self.look().await;
        }
        // However long that took: what happened meanwhile may belong to the same message.
        self.hear_all();
        self.start_sending().await;
    }

    /// All that belongs to the message is in it, however far behind the notifier is.
    fn is_whole(&self, m: &Message) -> bool {
        let mut behind = self.pending.oldest().into_iter().chain(self.passing);
        !behind.any(|heard| heard <= m.due && m.takes(&m.channel, heard))
    }

    /// When [`Keeper::step`] has something to do.
    fn wake(&self) -> Boottime {
        let mut wake = self.next_stand;
        if self.is_notifier() {
            wake = wake.min(self.next_round);
            if self.pending.oldest().is_some() {
                wake = wake.min(self.not_before);
            }
            // What waits for a channel that is gone is not due before that is back.
            let turn = self.in_turn().into_iter();
            let ready = |m: &Message| self.free(m) && self.is_whole(m);
            let free = turn.filter(|(id, _)| self.messages.get(*id).is_some_and(ready));
            if let Some(due) = free.map(|(_, turn)| turn.due).min() {
                let wait = due.saturating_sub(self.now_ms()).max(0) as u64;
                wake = wake.min(Boottime::now() + Duration::from_millis(wait));
            }
        }
        wake
    }

    /// The channel of the message is there, and nothing is being sent over it.
    fn free(&self, m: &Message) -> bool {
        self.config.channels.contains_key(&m.channel) && !self.under_way.contains_key(&m.channel)
    }

    /// To whom the message is to go, if its channel has receivers of its own.
    fn receivers(&self, m: &Message) -> Option<Vec<String>> {
        let all = self.config.channels.get(&m.channel)?.way.receivers();
        let lacks = |receiver: &&String| m.left.is_empty() || m.left.contains(receiver);
        (!all.is_empty()).then(|| all.iter().filter(lacks).cloned().collect())
    }

    fn in_turn(&self) -> BTreeMap<&String, Turn> {
        in_turn(&self.messages, |m| self.receivers(m))
    }

    /// The store's clock as this instance believes it, Unix ms: one that jumps makes no message old, and no job
    /// overdue.
    fn now_ms(&self) -> i64 {
        if let Some(ms) = self.parts.clock.now_ms() {
            return ms;
        }
        let (ms, at) = self.clock.unwrap_or((0, Boottime::now()));
        ms.saturating_add(Boottime::now().since(at).as_millis() as i64)
    }

    fn sample<T>(&mut self, reply: &Reply<T>) {
        self.clock = Some((reply.now_us.div_euclid(1000), reply.received));
    }

    /// Looks who the notifier is, and becomes it if nobody else is.
    async fn look_at_lease(&mut self) {
        if !self.config.tells_anybody() {
            return;
        }
        let seen = self.asking.ask(|s| async move { s.notices(false).await });
        match seen.await {
            Ok(reply) => {
                self.sample(&reply);
                self.stand.saw(reply.value.lease, reply.received);
            }
            Err(e) => return debug!(error = %e, "cannot look who sends notifications"),
        }
        let me = &self.parts.instance;
        let Some(lease) = self.stand.may_take(me, self.process, Boottime::now()) else {
            return;
        };
        let write = Write {
            was: self.stand.known(),
            lease: lease.text(),
            ..Write::default()
        };
        match self.note(write).await {
            Ok(reply) => match reply.value {
                Written::Done => self.stand.wrote(lease, reply.sent),
                Written::Not(other) => return self.stand.saw(other, reply.received),
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
        self.sample(&all);
        let now = self.now_ms();
        let mut unreadable = 0;
        let mut since = None;
        for (name, note) in all.value.notes {
            if let Some(job) = name.strip_prefix(OF_JOB) {
                match serde_json::from_str(&note) {
                    Ok(notes) => drop(self.notes.insert(JobName::new(job), notes)),
                    Err(_) => unreadable += 1,
                }
            } else if let Some(id) = name.strip_prefix(OF_MESSAGE) {
                match serde_json::from_str::<Message>(&note) {
                    Ok(mut message) => {
                        // Whoever was sending it may have done so.
                        message.perhaps_sent |= message.sending.take().is_some();
                        self.messages.insert(id.to_owned(), message);
                    }
                    Err(_) => unreadable += 1,
                }
            } else if name == SINCE {
                since = note.parse().ok();
            } else if name == GIVEN_UP {
                self.given_up = serde_json::from_str(&note).unwrap_or_default();
            }
        }
        if unreadable > 0 {
            warn!(
                unreadable,
                "notes of notifications that cannot be read are left out"
            );
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
        self.all();
        self.not_before = Boottime::now();
        Ok(())
    }

    /// This instance is no longer the notifier.
    fn step_back(&mut self, lease: Option<Option<String>>) {
        self.stand = Stand::new();
        if let Some(lease) = lease {
            self.stand.saw(lease, Boottime::now());
        }
        // What is being sent ends here; whoever is the notifier next sends it again.
        self.under_way.clear();
        self.notes.clear();
        self.messages.clear();
        self.given_up.clear();
        self.lacking = lacks::Lacking::default();
        self.pending.clear();
        self.passing = None;
        while self.sent.try_recv().is_ok() {}
    }

    fn too_late(&mut self) {
        warn!("the store did not answer in time: another instance may send the notifications now");
        self.step_back(None);
    }

    /// Writes as the notifier, and tries again as long as it is sure to be that. False: it is so no longer.
    async fn write(&mut self, set: Vec<(String, String)>, remove: Vec<String>) -> bool {
        let Some(mut lease) = self.stand.renewed(Boottime::now()) else {
            self.step_back(None);
            return false;
        };
        lease.lacks = self.lacks();
        let write = Write {
            was: self.stand.known(),
            lease: lease.text(),
            set,
            remove,
        };
        loop {
            match self.note(write.clone()).await {
                Ok(reply) => {
                    self.sample(&reply);
                    match reply.value {
                        Written::Done => {
                            self.stand.wrote(lease, reply.sent);
                            return true;
                        }
                        Written::Not(other) => {
                            info!("another instance sends the fleet's notifications now");
                            self.step_back(Some(other));
                            return false;
                        }
                    }
                }
                Err(e) => debug!(error = %e, "cannot write notes of notifications; retrying"),
            }
            if !self.stand.trusts(Boottime::now()) {
                self.too_late();
                return false;
            }
            tokio::time::sleep(WRITE_AGAIN).await;
        }
    }

    /// Writes these changes, and takes them in.
    async fn commit(&mut self, changes: Changes) -> bool {
        let json = |v: serde_json::Result<String>| v.unwrap_or_default();
        let mut set: Vec<(String, String)> = changes
            .notes
            .iter()
            .map(|(job, n)| (format!("{OF_JOB}{job}"), json(serde_json::to_string(n))))
            .collect();
        set.extend(
            changes
                .messages
                .iter()
                .map(|(id, m)| (format!("{OF_MESSAGE}{id}"), json(serde_json::to_string(m)))),
        );
        let gone = changes.given_up.iter().map(|g| &g.id);
        let gone: Vec<String> = gone.chain(&changes.delivered).cloned().collect();
        let mut remove: Vec<String> = gone.iter().map(|id| format!("{OF_MESSAGE}{id}")).collect();
        let forgotten = changes.forgotten.iter();
        remove.extend(forgotten.map(|job| format!("{OF_JOB}{job}")));
        let mut given_up = self.given_up.clone();
        if !changes.given_up.is_empty() {
            given_up = remembered(given_up, &changes.given_up, self.now_ms());
            set.push((GIVEN_UP.to_owned(), json(serde_json::to_string(&given_up))));
        }
        if !self.write(set, remove).await {
            return false;
        }
        self.notes.extend(changes.notes);
        self.messages.extend(changes.messages);
        self.given_up = given_up;
        for id in gone {
            self.messages.remove(&id);
        }
        for job in changes.forgotten {
            self.notes.remove(&job);
        }
        for g in changes.given_up {
            let GivenUp {
                channel,
                id,
                tries,
                why,
                ..
            } = g;
            error!(%channel, id = %id, tries, why, "gave a message up");
            let figures = &self.parts.health.figures;
            figures.notification(&channel, Told::GivenUp);
        }
        true
    }

    /// Tells what the time alone has changed, and renews the lease. False: there is more.
    async fn time_passes(&mut self) -> bool {
        let now = self.now_ms();
        let heard = self.passing.unwrap_or(now);
        let (mut changes, mut all) = (Changes::default(), true);
        for (name, notes) in &self.notes {
            if changes.notes.len() + changes.forgotten.len() >= look::AT_ONCE {
                all = false;
                break;
            }
            let watched = self.watched(name);
            match notes.watch(watched.is_some(), now) {
                Watch::Same => {}
                Watch::Becomes(notes) => {
                    changes.notes.insert(name.clone(), notes);
                    continue;
                }
                Watch::Forget => {
                    changes.forgotten.push(name.clone());
                    continue;
                }
            }
            let Some(watched) = watched else {
                continue;
            };
            let within = watched.job.and_then(within);
            if notes.due(within).is_none_or(|at| at > now) {
                continue;
            }
            let mut notes = notes.clone();
            let verdicts = notes.passes(self.rules_of(&watched), within, now);
            for verdict in verdicts {
                let expected = match verdict.kind {
                    Kind::Overdue => within,
                    _ => None,
                };
                let run = verdict.last_bad.as_deref().map(|r| text::about(r, ""));
                let item = Item {
                    expected,
                    never: notes.success.is_none(),
                    ..text::item(name, watched.job, &verdict, run, now)
                };
                self.tell(&mut changes, &verdict.channel, item, (heard, now));
            }
            changes.notes.insert(name.clone(), notes);
        }
        self.limit(&mut changes, now);
        self.commit(changes).await && all
    }

    /// Adds something to a message that waits for the channel, or to a new one. `heard`: it happened after this time.
    fn tell(&self, changes: &mut Changes, channel: &str, item: Item, (heard, now): (i64, i64)) {
        if let Some(message) = self.open_message(changes, channel, heard) {
            message.join(item, heard);
            return;
        }
        let id = format!("{now}-{:08x}", fastrand::u32(..));
        changes
            .messages
            .insert(id, Message::new(item, channel, now));
    }

    /// The message of the channel that still takes something.
    fn open_message<'a>(
        &self,
        changes: &'a mut Changes,
        channel: &str,
        now: i64,
    ) -> Option<&'a mut Message> {
        let open = |(id, m): (&String, &Message)| m.takes(channel, now).then(|| id.clone());
        let id = changes.messages.iter().find_map(open);
        let id = id.or_else(|| self.messages.iter().find_map(open))?;
        if !changes.messages.contains_key(&id) {
            changes
                .messages
                .insert(id.clone(), self.messages.get(&id)?.clone());
        }
        changes.messages.get_mut(&id)
    }

    /// Gives up messages of which a channel has too many, and those that are too old.
    fn limit(&self, changes: &mut Changes, now: i64) {
        let mut by_channel: BTreeMap<&str, Vec<(&String, &Message)>> = BTreeMap::new();
        for (id, m) in &self.messages {
            if m.sending.is_none() {
                by_channel.entry(&m.channel).or_default().push((id, m));
            }
        }
        for (channel, messages) in by_channel {
            let many = messages.len().saturating_sub(WAITING);
            for (n, (id, m)) in messages.into_iter().enumerate() {
                let old = now.saturating_sub(m.at) > GIVE_UP_MS;
                if n < many || old {
                    let why = match (old, &m.why) {
                        (false, _) => format!("more than {WAITING} messages wait for the channel"),
                        (true, Some(why)) => format!("it is too old; at last: {why}"),
                        (true, None) if !self.config.channels.contains_key(channel) => {
                            "it is too old, and there is no such channel any more".to_owned()
                        }
                        (true, None) => "it is too old".to_owned(),
                    };
                    changes.given_up.push(GivenUp::new(id, m, &why, now));
                }
            }
        }
        let gone = |id: &String| changes.given_up.iter().any(|g| g.id == *id);
        changes.messages.retain(|id, _| !gone(id));
    }

    /// Begins to send what is due: one message of each channel at a time.
    async fn start_sending(&mut self) {
        let now = self.now_ms();
        let mut chosen: BTreeMap<String, (Turn, String)> = BTreeMap::new();
        for (id, turn) in self.in_turn() {
            let ready = |m: &&Message| self.free(m) && self.is_whole(m);
            let Some(m) = self.messages.get(id).filter(ready) else {
                continue;
            };
            let earlier = |(of, _): &(Turn, String)| turn.due < of.due;
            if turn.due <= now && chosen.get(&m.channel).is_none_or(earlier) {
                chosen.insert(m.channel.clone(), (turn, id.clone()));
            }
        }
        if chosen.is_empty() {
            return;
        }
        let states = self.states(&chosen).await;
        // What cannot be asked is not said.
        let fleet = self.asking.fleet().await;
        let drained = fleet.is_ok_and(|fleet| {
            let clock = view::Clock::of(&fleet.value, fleet.now_us.div_euclid(1000));
            view::drained(&fleet.value, clock)
        });
        let mut changes = Changes::default();
        for (_, id) in chosen.values() {
            if let Some(m) = self.messages.get(id) {
                let sending = Some(self.parts.instance.clone());
                let message = Message {
                    sending,
                    ..m.clone()
                };
                changes.messages.insert(id.clone(), message);
            }
        }
        if !self.commit(changes).await {
            return;
        }
        failpoint::here("notify_claimed");
        let surroundings = Surroundings::of(&self.config, &self.parts.instance, self.now_ms());
        for (name, (turn, id)) in chosen {
            let (Some(message), Some(channel)) =
                (self.messages.get(&id), self.config.channels.get(&name))
            else {
                continue;
            };
            let message = text::refreshed(message, &self.config, &states, drained, self.now_ms());
            let text = Text::of(&message, &id, &surroundings);
            let task = deliver(
                channel.clone(),
                (text, turn.to),
                self.config.store_variables.clone(),
                self.results.clone(),
                self.stand.until(),
            );
            self.under_way
                .insert(name, AbortOnDropHandle::new(tokio::spawn(task)));
        }
    }

    /// The states of the jobs of which these messages tell, as far as the store says.
    async fn states(&self, chosen: &BTreeMap<String, (Turn, String)>) -> BTreeMap<JobName, State> {
        let messages = chosen.values().filter_map(|(_, id)| self.messages.get(id));
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
        self.under_way.remove(&sent.channel);
        let Some(message) = self.messages.get(&sent.id).cloned() else {
            return;
        };
        let (channel, id) = (&sent.channel, &sent.id);
        let all = self.receivers(&message).unwrap_or_default();
        let lacks = |receiver: &&String| match &sent.result {
            // It did not go to who lacks an earlier one.
            _ if !sent.to.contains(receiver) => true,
            Ok(_) => false,
            Err(e) => e.lacking.is_empty() || e.lacking.contains(receiver),
        };
        let lacking: Vec<String> = all.iter().filter(lacks).cloned().collect();
        let delivered = lacking.is_empty() && (sent.result.is_ok() || !all.is_empty());
        let left = match lacking.len() == all.len() {
            true => message.left.clone(),
            false => lacking.clone(),
        };
        let mut changes = Changes::default();
        let figures = &self.parts.health.figures;
        match sent.result {
            Ok(said) | Err(Undelivered { why: said, .. }) if delivered => {
                failpoint::here("notify_sent");
                info!(%channel, id = %id, said, "sent a notification");
                figures.notification(channel, Told::Sent);
                changes.delivered = Some(id.clone());
            }
            Ok(said) => {
                let lack = left.join(", ");
                info!(%channel, id = %id, said, lack, "sent a notification to those who lack no earlier one");
                let sending = None;
                let message = Message {
                    left,
                    sending,
                    ..message
                };
                changes.messages.insert(id.clone(), message);
            }
            Err(e) => {
                figures.notification(channel, Told::Failed);
                let mut parts = apart(lacking, &sent.to, &e);
                if parts.len() < 2 {
                    let tried = parts.pop().map_or(Some(e), |(_, e)| e);
                    parts.push((left, tried));
                }
                for (n, (left, e)) in parts.into_iter().enumerate() {
                    let apart = match n {
                        0 => id.clone(),
                        _ => format!("{id}-{:08x}", fastrand::u32(..)),
                    };
                    let message = message.clone();
                    match e {
                        Some(e) => self.again(&mut changes, &apart, message, left, e),
                        None => {
                            let sending = None;
                            let message = Message {
                                left,
                                sending,
                                ..message
                            };
                            changes.messages.insert(apart, message);
                        }
                    }
                }
            }
        }
        self.commit(changes).await;
    }

    /// A message was not sent to those who are `left` (empty: to nobody): it is tried again, or given up.
    fn again(
        &self,
        changes: &mut Changes,
        id: &str,
        message: Message,
        left: Vec<String>,
        e: Undelivered,
    ) {
        let (channel, now) = (&message.channel, self.now_ms());
        let tries = message.tries.saturating_add(1);
        let refusals = message.refusals.saturating_add(u32::from(e.refused));
        let pause = match e.refused {
            true => refused_again(refusals),
            false => Some(backoff::nth(AGAIN.0, tries, AGAIN.1)),
        };
        let pause = pause.map(|p| backoff::spread(failpoint::hurry(p), fastrand::f64()));
        let Some(pause) = pause else {
            let message = Message {
                tries,
                left,
                ..message
            };
            changes
                .given_up
                .push(GivenUp::new(id, &message, &e.why, now));
            return;
        };
        let pause = e.retry_after.unwrap_or(pause);
        let words = words::took(pause.as_millis() as i64);
        warn!(%channel, id = %id, tries, error = e.why, pause = words, "cannot send a notification; retrying");
        let due = now.saturating_add(pause.as_millis() as i64);
        let message = Message {
            tries,
            refusals,
            left,
            sending: None,
            perhaps_sent: message.perhaps_sent || e.perhaps,
            due,
            channel_rests: if e.retry_after.is_some() { due } else { 0 },
            why: Some(e.why),
            ..message
        };
        changes.messages.insert(id.to_owned(), message);
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
        if let Some(mut lease) = self.stand.renewed(Boottime::now()) {
            (lease.over, lease.lacks) = (true, None);
            let write = Write {
                was: self.stand.known(),
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
    (text, to): (Text, Vec<String>),
    hidden: Arc<[String]>,
    results: mpsc::UnboundedSender<Sent>,
    until: Option<Boottime>,
) {
    // This process may have slept: another instance sends it then.
    let result = match until.is_some_and(|until| Boottime::now() < until) {
        true => send::send(&channel, &to, &text, &hidden).await,
        false => Err(Undelivered::new("this instance was held up")),
    };
    let _ = results.send(Sent {
        channel: channel.name.clone(),
        id: text.id,
        to,
        result,
    });
}

/// A job of which somebody is told.
struct Watched<'a> {
    /// None: this configuration lacks it.
    job: Option<&'a Job>,
    channels: &'a [String],
}

impl Keeper {
    /// None: nobody is told of the job.
    fn watched(&self, name: &JobName) -> Option<Watched<'_>> {
        let job = self.config.jobs.get(name).map(|job| &**job);
        let channels = match job {
            Some(job) => &job.alarms.notify,
            None if self.lacking.jobs.contains(name) => &self.config.default_channels,
            // What was awaited of a job that was removed is told to whom it was to be told.
            None => &self.notes.get(name)?.awaited_for,
        };
        (!channels.is_empty()).then_some(Watched { job, channels })
    }

    /// The channels of a job, with their rules.
    fn rules_of<'a>(
        &'a self,
        watched: &Watched<'a>,
    ) -> impl Iterator<Item = (&'a str, &'a Rules)> + use<'a> {
        let channels = watched.channels.iter();
        channels
            .filter_map(move |name| Some((name.as_str(), &self.config.channels.get(name)?.rules)))
    }
}

/// How long the job may be without a success, ms.
fn within(job: &Job) -> Option<i64> {
    let within = job.alarms.expect_success_within.filter(|_| job.enabled)?;
    Some(i64::try_from(within.as_millis()).unwrap_or(i64::MAX))
}

/// The receivers who lack a message after a try that reached those in `to`, in parts that go on apart, each with why it
/// failed. None: they were not tried, because they lack an earlier message. Some are given up soon, others later.
fn apart(
    lacking: Vec<String>,
    to: &[String],
    e: &Undelivered,
) -> Vec<(Vec<String>, Option<Undelivered>)> {
    let (tried, waiting): (Vec<_>, Vec<_>) = lacking.into_iter().partition(|r| to.contains(r));
    let (refused, others) = tried.into_iter().partition(|r| e.for_good.contains(r));
    let others_e = Undelivered {
        for_good: vec![],
        ..e.clone()
    };
    let refused_e = Undelivered {
        refused: true,
        ..others_e.clone()
    };
    let parts = [
        (waiting, None),
        (others, Some(others_e)),
        (refused, Some(refused_e)),
    ];
    parts.into_iter().filter(|(to, _)| !to.is_empty()).collect()
}
