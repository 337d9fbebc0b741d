//! What a fleet promises, judged by what really happened: the truth that no instance and no store sees.

use std::collections::{BTreeMap, BTreeSet};

use super::{NOON, World};
use crate::{
    logic::{
        belief::{NEAR, PROBATION, SLACK},
        claim::{Answer, Claim, OnCrash, Overlap, Target},
        guard_life::DAEMON_GONE_GRACE,
        schedule::next_of,
    },
    model::{Boottime, FencingToken, JobName, Occurrence, Outcome, RunId, RunRecord, Trigger},
};

#[derive(Debug, Clone, Default)]
pub(super) struct Truth {
    starts: Vec<Start>,
    /// All records that the store ever made, also those that it lost.
    records: Vec<RunRecord>,
    /// Jobs that are paused.
    pub(super) paused: BTreeSet<JobName>,
    /// The attempts that were granted, by run.
    granted: BTreeMap<RunId, FencingToken>,
    /// The processes that knew of a pause: the instance, and which of its processes.
    knowers: BTreeSet<(JobName, usize, u32)>,
    /// The processes that ran a trigger: the job, its key, the instance, and which of its processes.
    triggered: BTreeSet<(JobName, String, usize, u32)>,
    /// What was running when people cancelled it.
    cancelled: BTreeMap<(JobName, Occurrence), u32>,
    /// Since when a daemon is gone whose command still runs.
    orphans: BTreeMap<RunId, Boottime>,
    /// The store lost or changed its data, or its clock was wrong: some promises are weaker then.
    pub(super) data_lost: bool,
    pub(super) clock_wrong_since: Option<Boottime>,
    pub(super) clock_wrong_for_long: bool,
    pub(super) clock_was_wrong: bool,
    pub(super) walls_wrong: bool,
    /// The store lost all, and not each instance knows it.
    all_lost: bool,
    /// Of these jobs nothing is promised up to here.
    forgotten: BTreeMap<JobName, Occurrence>,
}

#[derive(Debug, Clone)]
struct Start {
    job: JobName,
    run: RunId,
    token: FencingToken,
    occurrence: Occurrence,
    key: Option<String>,
    /// Unix ms, truly.
    to: Option<i64>,
}

impl Truth {
    pub(super) fn ended(&mut self, run: RunId, ms: i64) {
        for start in self.starts.iter_mut().filter(|s| s.run == run) {
            start.to.get_or_insert(ms);
        }
    }
}

impl World {
    /// Whether the store's clock was wrong for so long that it may be believed.
    pub(super) fn judge_the_clock(&mut self) {
        let truth = &mut self.truth;
        let long = truth
            .clock_wrong_since
            .is_some_and(|since| self.now.since(since) >= PROBATION);
        truth.clock_wrong_for_long |= long;
    }

    /// After a loss of all data nothing is promised of what comes due until each instance that lives has found the
    /// loss: one that knows nothing of a job may begin it anew before.
    pub(super) fn judge_the_memory(&mut self) {
        let ms = self.ms().max(self.store_us() / 1000);
        let epoch = self.server.data.epoch.as_ref().map(|e| e.id.clone());
        let found = |i: &super::Instance| i.has_found(epoch.as_deref());
        let all_have = epoch.is_some() && self.instances.iter().filter(|i| i.alive).all(found);
        let any = self.instances.iter().any(|i| i.alive);
        if !self.truth.all_lost || all_have && any {
            self.truth.all_lost = false;
            return;
        }
        for job in &self.plan.jobs {
            let upto = self.truth.forgotten.entry(job.name.clone());
            let upto = upto.or_insert(Occurrence(ms));
            *upto = Occurrence(ms).max(*upto);
        }
        // Nobody may know their tokens any more. What still runs must not be overlapped all the same.
        let knows = |s: &Start| {
            let newest = |i: &super::Instance| i.jobs[&s.job].state.newest();
            self.instances
                .iter()
                .any(|i| i.alive && newest(i) >= s.occurrence)
        };
        let kept = |s: &Start| s.to.is_none() || knows(s);
        let starts = std::mem::take(&mut self.truth.starts);
        self.truth.starts = starts.into_iter().filter(kept).collect();
    }

    /// All records are lost, also of what is under way: of what is decided, nothing is promised any more.
    pub(super) fn outcomes_lost(&mut self) {
        self.truth.all_lost = true;
        for (job, state) in &self.server.data.states {
            let known = self.instances.iter().map(|i| i.jobs[job].state.newest());
            let newest = known
                .max()
                .unwrap_or(Occurrence(0))
                .max(Occurrence(state.newest));
            let upto = self.truth.forgotten.entry(job.clone()).or_insert(newest);
            *upto = newest.max(*upto);
        }
    }

    /// A command has begun to run.
    // Long: one promise after the other.
    pub(super) fn started(&mut self, run: RunId) {
        let Some(command) = self.command(run) else {
            return;
        };
        let (job, run, command_of) = (command.job.clone(), command.run.clone(), command.of);
        let definition = self.plan.job(&job).clone();
        let start = Start {
            job: job.clone(),
            run: run.id,
            token: run.token(),
            occurrence: run.occurrence,
            key: run.key.clone(),
            to: None,
        };
        self.say(|_| {
            format!(
                "{} STARTS {} attempt {} as run {}",
                run.instance,
                run.occurrence,
                run.attempt,
                super::short(run.id)
            )
        });
        let now = self.ms();
        let of_job: Vec<&Start> = self.truth.starts.iter().filter(|s| s.job == job).collect();
        let mut broken: Option<(&str, String)> = None;
        let mut breaks = |promise, how: String| _ = broken.get_or_insert((promise, how));
        let name = format!("{} attempt {}", run.occurrence, run.attempt);
        if of_job.iter().any(|s| s.token == start.token) {
            breaks("one grant for each attempt", format!("{name} starts twice"));
        }
        let repeats = definition.on_crash == OnCrash::Rerun || definition.retry.is_some();
        let again = of_job.iter().find(|s| s.occurrence == run.occurrence);
        if let Some(again) = again
            && !repeats
        {
            breaks(
                "with on_crash = fail an occurrence starts once",
                format!("{name} starts after attempt {}", again.token.0 % 1000),
            );
        }
        if definition.overlap != Overlap::Allow {
            if let Some(other) = of_job.iter().find(|s| s.to.is_none()) {
                breaks(
                    "two runs of a job never overlap",
                    format!("{name} starts while {} runs", other.occurrence),
                );
            }
            // A believed clock that was an hour ahead, and data that was lost since: see `know` in `claim.rs`.
            if let Some(newer) = of_job.iter().find(|s| s.token >= start.token)
                && !(self.truth.walls_wrong && self.truth.data_lost)
                // Known, and not mended yet: docs/faults.md.
                && !(self.truth.data_lost && run.attempt > 1)
            {
                breaks(
                    "tokens strictly increase",
                    format!("{name} starts after {}", newer.occurrence),
                );
            }
        }
        // A clock that went on evenly for long, and is not far from the hosts', is believed.
        // So is one that an instance has found when it began, unless more hosts contradict it than there may be here.
        let misled = self.instances[command_of.0].misled;
        let early = match self.truth.clock_wrong_for_long {
            true => SLACK + NEAR,
            false => SLACK,
        };
        if run.occurrence.0 > now + early.as_millis() as i64
            && !self.truth.walls_wrong
            && !misled
            && run.attempt == 1
        {
            breaks(
                "nothing starts early",
                format!(
                    "{name} starts {} ms before its time",
                    run.occurrence.0 - now
                ),
            );
        }
        let here = &self.instances[command_of.0];
        if !here.alive || here.generation != command_of.1 {
            breaks("no orphan", format!("{name} starts after its daemon died"));
        }
        if of_job.iter().any(|s| s.run == run.id) {
            breaks(
                "each start has an id of its own",
                format!("{name} starts as a run that was"),
            );
        }
        // An attempt that never started is made up for.
        let before = of_job.iter().filter(|s| s.occurrence == run.occurrence);
        if before.count() >= definition.max_attempts as usize {
            breaks(
                "an occurrence starts max_attempts times at most",
                format!("{name} starts, of {}", definition.max_attempts),
            );
        }
        let cancelled = self.truth.cancelled.get(&(job.clone(), run.occurrence));
        if cancelled.is_some_and(|attempt| run.attempt > *attempt) && !self.truth.data_lost {
            breaks(
                "what people cancelled is not repeated",
                format!("{name} starts"),
            );
        }
        let latest = run.occurrence.0 + (definition.start_within.as_millis() as i64) + 2500;
        let caught_up = run.trigger != Trigger::Schedule;
        if now > latest && run.attempt == 1 && !caught_up && !self.truth.clock_was_wrong {
            breaks(
                "nothing starts too late",
                format!("{name} starts {} ms after its last moment", now - latest),
            );
        }
        if let Some(key) = &run.key
            && run.attempt == 1
            && of_job.iter().any(|s| s.key.as_ref() == Some(key))
        {
            breaks("a trigger runs once", format!("{key} starts again"));
        }
        if let Some(key) = &run.key {
            let (i, generation) = command_of;
            let ran = (job.clone(), key.clone(), i, generation);
            self.truth.triggered.insert(ran);
        }
        if run.trigger == Trigger::Retry {
            self.reached.insert("retry");
        } else if run.attempt > 1 {
            self.reached.insert("takeover");
        }
        if run.key.is_some() {
            self.reached.insert("trigger");
        }
        self.truth.starts.push(start);
        if let Some((promise, how)) = broken {
            self.breaks(promise, &how);
        }
    }

    /// The store has answered a claim.
    pub(super) fn granted(&mut self, c: &Claim, answer: &Answer) {
        match answer {
            Answer::Granted(g) => {
                let before = self.truth.granted.insert(c.run, g.token());
                // A claim that is sent again gets the same grant.
                let scheduled = matches!(c.target, Target::Scheduled(_)) && before.is_none();
                if scheduled
                    && self.truth.paused.contains(&c.job)
                    && self.somebody_knows_the_pause(&c.job)
                {
                    let how = format!("{} is granted", g.occurrence);
                    self.breaks(
                        "nothing is granted under a pause that a living instance knows",
                        &how,
                    );
                }
                if let Target::Manual { key, .. } = &c.target
                    && before.is_none()
                    && g.attempt == 1
                    && self.somebody_knows_the_key(&c.job, key)
                {
                    let how = format!("{key} is granted again");
                    self.breaks("a key that a living instance knows runs once", &how);
                }
            }
            Answer::Blocked(_) => _ = self.reached.insert("blocked"),
            Answer::RunFirst(_) => _ = self.reached.insert("run first"),
            Answer::Behind { .. } => _ = self.reached.insert("behind"),
            _ => {}
        }
    }

    /// An instance that ran it lives, and has told the store.
    fn somebody_knows_the_key(&self, job: &JobName, key: &str) -> bool {
        let epoch = self.server.data.epoch.as_ref().map(|e| &*e.id);
        let told = |i: &super::Instance| i.alive && !i.frozen && !i.cut && i.has_found(epoch);
        let mut ran = self.truth.triggered.iter().filter(|(of, ..)| of == job);
        ran.any(|(_, of, i, generation)| {
            let here = &self.instances[*i];
            of == key && here.generation == *generation && told(here)
        })
    }

    /// An instance that knew of it lives, and has told the store: after a loss of the data it registers first.
    fn somebody_knows_the_pause(&self, job: &JobName) -> bool {
        let epoch = self.server.data.epoch.as_ref().map(|e| &*e.id);
        let told = |i: &super::Instance| i.alive && !i.frozen && !i.cut && i.has_found(epoch);
        self.truth.knowers.iter().any(|(of, i, generation)| {
            let here = &self.instances[*i];
            of == job && here.generation == *generation && told(here)
        })
    }

    /// Who knows of pauses by now.
    pub(super) fn judge_the_pauses(&mut self) {
        for job in &self.plan.jobs {
            if !self.truth.paused.contains(&job.name) {
                self.truth.knowers.retain(|(of, ..)| *of != job.name);
                continue;
            }
            for (i, here) in self.instances.iter().enumerate() {
                if here.alive && here.jobs[&job.name].state.remembered().pause.is_some() {
                    self.truth
                        .knowers
                        .insert((job.name.clone(), i, here.generation));
                }
            }
        }
    }

    /// People have cancelled a job.
    pub(super) fn cancelled(&mut self, job: &JobName) {
        let open = self
            .server
            .data
            .states
            .get(job)
            .map_or(&[][..], |s| &s.open);
        for o in open {
            let name = (job.clone(), o.run.occurrence);
            self.truth.cancelled.insert(name, o.run.attempt);
        }
    }

    /// No command outlives its daemon by more than the guard needs to end it.
    pub(super) fn judge_the_orphans(&mut self) {
        let mut left = BTreeMap::new();
        for c in &self.commands {
            let here = &self.instances[c.of.0];
            let runs = matches!(c.state, super::CommandState::Runs { .. });
            if runs && (!here.alive || here.generation != c.of.1) {
                let since = self
                    .truth
                    .orphans
                    .get(&c.run.id)
                    .copied()
                    .unwrap_or(self.now);
                left.insert(c.run.id, since);
            }
        }
        let most = DAEMON_GONE_GRACE + self.plan.grid * 2;
        let old = left.values().any(|since| self.now.since(*since) > most);
        self.truth.orphans = left;
        if old {
            self.breaks("no orphan", "a command goes on without its daemon");
        }
    }

    /// The store makes a record.
    pub(super) fn recorded(&mut self, record: RunRecord) {
        let same = |r: &&RunRecord| {
            r.job == record.job && r.occurrence == record.occurrence && r.attempt == record.attempt
        };
        // A holder that was away records how its run ended after another has found its lease lapsed.
        let known_later =
            |r: &RunRecord| r.run_id == record.run_id && r.outcome == Outcome::Unknown;
        let before = self.truth.records.iter().find(same);
        let changed = before.is_some_and(|r| {
            !known_later(r) && (r.outcome, r.run_id) != (record.outcome, record.run_id)
        });
        if changed && !self.truth.data_lost {
            let how = format!(
                "{} was {:?} and is {:?}",
                record.occurrence,
                before.map(|r| r.outcome),
                record.outcome
            );
            self.breaks("what is recorded does not change", &how);
        }
        match record.outcome {
            Outcome::Missed => _ = self.reached.insert("missed"),
            Outcome::Skipped => _ = self.reached.insert("skipped"),
            Outcome::Unknown => _ = self.reached.insert("unknown"),
            Outcome::Replaced => _ = self.reached.insert("replaced"),
            Outcome::Cancelled => _ = self.reached.insert("cancelled"),
            Outcome::LeaseLost => _ = self.reached.insert("lease lost"),
            Outcome::Crashed => _ = self.reached.insert("crashed"),
            _ => {}
        }
        self.truth.records.push(record);
    }

    pub(super) fn outcomes(&self) -> impl Iterator<Item = Outcome> {
        self.truth.records.iter().map(|r| r.outcome)
    }

    /// All is calm, and was for long enough: what has to come to an end has.
    pub(super) fn judge_the_end(&mut self) {
        let until = Occurrence(NOON + (self.plan.lasts.as_millis() as i64) + 5000);
        for i in 0..self.instances.len() {
            if self.instances[i].stopping && self.instances[i].alive {
                self.breaks("a daemon told to stop ends", "it does not");
            }
        }
        for job in self.plan.clone().jobs.iter().filter(|j| j.enabled) {
            let state = self.server.data.states.get(&job.name);
            // Most hosts may have confirmed a wrong clock: then what lies in the future is decided (`soloist rewind`
            // corrects that), or what lies in the past is planned.
            if self.truth.walls_wrong {
                continue;
            }
            let waiting = state.map_or(0, |s| s.triggers.len());
            if waiting > 0 {
                self.breaks("nothing waits for ever", "a trigger does");
            }
            let all: Vec<RunRecord> = self
                .truth
                .records
                .iter()
                .filter(|r| r.job == job.name)
                .cloned()
                .collect();
            // From the first that was recorded on, each has an end; a trigger has an instant of its own. A record of
            // several stands for those before it, which are two seconds apart.
            let planned = all.iter().filter(|r| r.trigger != Trigger::Manual);
            let Some(first) = planned.map(|r| r.occurrence).min() else {
                self.breaks("each occurrence has an outcome", "none of the job has");
                continue;
            };
            let forgotten = self.truth.forgotten.get(&job.name);
            let first = first.max(Occurrence(NOON));
            let mut at = forgotten.map_or(first, |f| {
                next_of(&job.schedules, *f).expect("a next").max(first)
            });
            while at <= until {
                let stands_for = |r: &RunRecord| {
                    r.occurrence.0 - 2000 * (r.count as i64 - 1) <= at.0 && at <= r.occurrence
                };
                if !all.iter().any(stands_for) {
                    let how = format!("{} of {} has none", at, job.name);
                    self.breaks("each occurrence has an outcome", &how);
                    break;
                }
                at = next_of(&job.schedules, at).expect("there is always a next");
            }
        }
    }
}
