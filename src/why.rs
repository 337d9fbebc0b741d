//! Explains one occurrence, by the records of the store and the decisions of the instances.

use serde::Serialize;

use crate::{
    acts,
    config::Job,
    logic::{
        belief::SLACK,
        claim::{Overlap, State, planned_never, trigger_is_over},
        schedule::{Schedule, differs, next_of},
    },
    model::{InstanceId, JobName, Occurrence, Outcome},
    store::{Decision, Fleet, Info, Outage},
    view::{self, RunView, Time},
    words,
};

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct WhyView {
    pub(crate) job: JobName,
    pub(crate) occurrence: Time,
    #[cfg_attr(feature = "http", schema(format = DateTime))]
    pub(crate) local: Option<String>,
    /// The schedule of this configuration has it.
    pub(crate) planned: bool,
    /// Its fate, as one sentence.
    pub(crate) verdict: String,
    pub(crate) runs: Vec<RunView>,
    pub(crate) decisions: Vec<DecisionView>,
    /// Live instances without a decision, and why that may be.
    pub(crate) silent: Vec<SilentView>,
    /// The instances that the store did not answer at that time.
    pub(crate) unanswered: Vec<UnansweredView>,
    /// The store's problems now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) problems: Vec<String>,
    /// The occurrences before and after the instant, if the instant is not an occurrence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) before: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) after: Option<Time>,
}

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct DecisionView {
    pub(crate) instance: InstanceId,
    pub(crate) at: Time,
    pub(crate) decision: String,
    pub(crate) detail: String,
}

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct SilentView {
    pub(crate) instance: InstanceId,
    pub(crate) reason: String,
}

#[derive(Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "http", derive(utoipa::ToSchema))]
pub(crate) struct UnansweredView {
    pub(crate) instance: InstanceId,
    pub(crate) from: Time,
    pub(crate) until: Time,
}

/// All that is known.
pub(crate) struct Facts<'a> {
    pub(crate) name: &'a JobName,
    /// None: not in this configuration.
    pub(crate) job: Option<&'a Job>,
    pub(crate) state: Option<State>,
    /// The incarnation of the store.
    pub(crate) incarnation: &'a str,
    pub(crate) clock: view::Clock,
    /// By that clock.
    pub(crate) now: i64,
    pub(crate) fleet: Fleet,
    /// The job's records, newest first.
    pub(crate) history: Vec<RunView>,
    pub(crate) decisions: Vec<Decision>,
}

/// The last occurrence before `t`; None when there is none since 1970.
pub(crate) fn previous(
    schedules: &[std::sync::Arc<Schedule>],
    t: Occurrence,
) -> Option<Occurrence> {
    // `next_after(x) < t` holds for each x before the result, and for no other x.
    let before = |x: i64| next_of(schedules, Occurrence(x)).is_some_and(|o| o < t);
    let (mut yes, mut no) = (-1, t.0);
    if !before(yes) {
        return None;
    }
    while no - yes > 1 {
        let middle = yes + (no - yes) / 2;
        if before(middle) {
            yes = middle;
        } else {
            no = middle;
        }
    }
    Some(Occurrence(no))
}

/// When the store did not answer this instance, if that was at the instant of the occurrence.
fn outage(info: &Info, at: Occurrence) -> Option<Outage> {
    let mut outages = info.outages.iter();
    outages.find(|o| o.from <= at.0 && at.0 < o.until).copied()
}

/// Why nothing was planned for this time, as far as the configuration says. None: something was.
pub(crate) fn unplanned_words(job: &Job, at: Occurrence, now: i64) -> Option<String> {
    let ahead = at.0 > now;
    if job.schedules.is_empty() {
        let what = if ahead { "will happen" } else { "happened" };
        return Some(format!(
            "Nothing {what} at that time: the job has no schedule, so it runs only when somebody triggers it."
        ));
    }
    let why = differs(&job.schedules, at)?;
    let disabled = match job.enabled {
        true => "",
        false => " Besides, the job is disabled in this configuration.",
    };
    let is = if ahead { "is" } else { "was" };
    Some(format!(
        "Nothing {is} planned for that time: {}.{disabled}",
        words::line(&why)
    ))
}

impl Facts<'_> {
    /// The latest occurrence that is due or decided, a trigger among them.
    pub(crate) fn latest(&self) -> Option<Occurrence> {
        let planned = self
            .job
            .and_then(|j| previous(&j.schedules, Occurrence(self.now + 1)));
        let decided = self.state.as_ref().map(|s| s.newest);
        let decided = decided.filter(|n| 0 < *n && *n <= self.now);
        // A trigger that came to no run is not among the decided occurrences.
        let recorded = self.history.iter().map(|r| Occurrence(r.occurrence.0));
        let recorded = recorded.filter(|at| at.0 <= self.now).max();
        let waits = self.triggers().filter(|at| at.0 <= self.now).max();
        planned
            .max(decided.map(Occurrence))
            .max(recorded)
            .max(waits)
    }

    /// The triggers that wait, as the occurrences that they are if nobody starts them in time.
    fn triggers(&self) -> impl Iterator<Item = Occurrence> {
        let waiting = self.state.iter().flat_map(|st| &st.triggers);
        waiting.map(|t| planned_never(t.at))
    }

    pub(crate) fn explain(&self, at: Occurrence) -> WhyView {
        let schedules = self.job.map_or(&[][..], |j| &j.schedules);
        let planned = next_of(schedules, Occurrence(at.0 - 1)) == Some(at);
        let ended = self.history.iter().filter(|r| r.occurrence.0 == at.0);
        let mut runs: Vec<RunView> = ended.cloned().collect();
        view::late_since_due(&mut runs, self.job);
        if let Some(st) = &self.state {
            let held = st.open.iter().filter(|o| o.next_attempt.is_none());
            // The records were read after the state: by then it may have ended.
            let ended: Vec<_> = runs.iter().map(|r| r.run_id).collect();
            let of_it = held.filter(|o| o.run.occurrence == at && !ended.contains(&Some(o.run.id)));
            runs.extend(of_it.map(|o| RunView::running(self.name, o)));
        }
        runs.sort_by_key(|r| r.attempt);
        // The last of a range of missed occurrences stands for all of them. Ranges do not overlap, so only the next one
        // can contain `at`.
        if runs.is_empty() && planned {
            let later = |r: &&RunView| r.count > 1 && at.0 < r.occurrence.0;
            let next = self.history.iter().filter(later);
            let next = next.min_by_key(|r| r.occurrence);
            runs.extend(
                next.filter(|r| self.within(at, r.occurrence.0, r.count))
                    .cloned(),
            );
        }
        let mut decisions: Vec<DecisionView> = self
            .decisions
            .iter()
            .filter(|d| d.occurrence == at)
            .map(|d| DecisionView {
                instance: d.instance.clone(),
                at: Time(d.at),
                decision: d.decision.clone(),
                detail: d.detail.clone(),
            })
            .collect();
        decisions.sort_by(|a, b| (a.at, &a.instance).cmp(&(b.at, &b.instance)));
        let known = !runs.is_empty() || !decisions.is_empty();
        let stranger = !planned && !known;
        let neighbour = |o: Option<Occurrence>| o.filter(|_| stranger).map(Time::from);
        let silent = if at.0 > self.now || stranger {
            vec![]
        } else {
            self.silent(at, &decisions, &runs)
        };
        WhyView {
            job: self.name.clone(),
            occurrence: at.into(),
            local: schedules.first().map(|s| s.local(at)),
            planned,
            verdict: self.verdict(at, planned, &runs, &decisions),
            runs,
            decisions,
            silent,
            unanswered: self.unanswered(at),
            problems: vec![],
            before: neighbour(previous(schedules, at)),
            after: neighbour(next_of(schedules, at)),
        }
    }

    /// `at` is one of the `count` occurrences that end with `last`.
    fn within(&self, at: Occurrence, last: i64, count: u64) -> bool {
        let schedules = self.job.map_or(&[][..], |j| &j.schedules);
        let mut o = at;
        for _ in 1..count.min(100_000) {
            match next_of(schedules, o) {
                Some(next) if next.0 <= last => o = next,
                _ => return o.0 == last,
            }
            if o.0 == last {
                return true;
            }
        }
        false
    }

    fn silent(
        &self,
        at: Occurrence,
        decisions: &[DecisionView],
        runs: &[RunView],
    ) -> Vec<SilentView> {
        // An instance writes its decisions down once a second.
        let soon = self.now - at.0 < 5_000;
        let ran = |id: &InstanceId| {
            runs.iter()
                .any(|r| r.attempt > 0 && r.instance.as_ref() == Some(id))
        };
        self.fleet
            .instances
            .iter()
            .filter(|(id, _)| !decisions.iter().any(|d| d.instance == **id))
            .filter(|(_, info)| outage(info, at).is_none())
            .map(|(id, info)| SilentView {
                instance: id.clone(),
                reason: if ran(id) {
                    match soon {
                        true => "ran it, and has not recorded its decision yet".to_owned(),
                        false => "ran it; its decision was not recorded".to_owned(),
                    }
                } else if info.started_at > at.0 {
                    match self.was_there(id, at) {
                        true => {
                            "was restarted since: its earlier decisions are not recorded".to_owned()
                        }
                        false => format!(
                            "is up only since {}, as far as is known",
                            words::instant(info.started_at)
                        ),
                    }
                } else if self.clock.silent(info) && info.seen < at.0 {
                    "had stopped reporting to the store".to_owned()
                } else if info.clock_doubt_ms.is_some() && !self.clock.silent(info) {
                    "does not believe the store's clock".to_owned()
                } else if soon {
                    "has recorded no decision yet".to_owned()
                } else {
                    "recorded no decision".to_owned()
                },
            })
            .collect()
    }

    /// An instance of this name did something before the occurrence: what it reports of itself begins with its process.
    fn was_there(&self, id: &InstanceId, at: Occurrence) -> bool {
        let mut runs = self.history.iter();
        let ran = |r: &RunView| {
            r.instance.as_ref() == Some(id) && r.started_at.is_some_and(|t| t.0 <= at.0)
        };
        let mut decisions = self.decisions.iter();
        runs.any(ran) || decisions.any(|d| d.instance == *id && d.at <= at.0)
    }

    fn unanswered(&self, at: Occurrence) -> Vec<UnansweredView> {
        let of = |id: &InstanceId, info: &Info| {
            let outage = outage(info, at)?;
            Some(UnansweredView {
                instance: id.clone(),
                from: Time(outage.from),
                until: Time(outage.until),
            })
        };
        let instances = self.fleet.instances.iter();
        instances.filter_map(|(id, info)| of(id, info)).collect()
    }

    /// One sentence for a person in a hurry.
    // Long: one reason after the other; the first that holds is the verdict.
    fn verdict(
        &self,
        at: Occurrence,
        planned: bool,
        runs: &[RunView],
        decisions: &[DecisionView],
    ) -> String {
        let now = self.now;
        // A wrong clock may have made instances give up an occurrence that lies in the future: it is not due yet.
        if let Some(last) = runs.last().filter(|r| r.attempt > 0 || at.0 <= now) {
            let told = self.told_by_runs(at, runs, last);
            let state = self.state.as_ref().filter(|_| last.attempt == 0);
            let hint = state.and_then(|st| self.rewind(st));
            let more = hint.or_else(|| self.next_attempt(at));
            return more.map_or(told.clone(), |more| format!("{told} {more}"));
        }
        // Of a job without a schedule each time before a loss may have had a run.
        let manual = self.job.is_some_and(|j| j.schedules.is_empty());
        if let Some(st) = &self.state
            && manual
            && at.0 <= now
            && self.lost(st, at)
        {
            return self.told_as_lost(decisions);
        }
        if self.triggers().any(|waits| waits == at) {
            let over = |j: &&Job| trigger_is_over(at.0, j.start_within, now);
            if let Some(job) = self.job.filter(over) {
                let over = acts::over(job.start_within, &self.fleet, self.clock);
                return format!("It is a trigger, and {over}.");
            }
            let why = acts::standstill(&self.fleet, self.clock);
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            return format!("It is a trigger that no instance has started yet{why}.");
        }
        let unplanned = !planned && decisions.is_empty();
        if unplanned && let Some(why) = self.job.and_then(|job| unplanned_words(job, at, now)) {
            return why;
        }
        let disabled = self.job.is_some_and(|j| !j.enabled);
        let Some(st) = &self.state else {
            return match disabled {
                true => "It does not run: the job is disabled in this configuration, and no instance has registered it \
                         with the store."
                    .to_owned(),
                false => match acts::wait(&self.fleet, self.clock) {
                    Some(why) => format!("Nothing is recorded of it yet: {why}."),
                    None => "Nothing is known: no instance has registered the job with the store yet.".to_owned(),
                },
            };
        };
        if let Some(next) = self.next_attempt(at) {
            return next;
        }
        let doubt = self.clock.doubt_ms.filter(|_| self.clock.nobody_believes);
        if planned
            && at.0 <= now
            && at.0 > st.newest.max(st.since)
            && self.job.is_some_and(|j| j.enabled)
            && let Some(ahead) = doubt
        {
            return format!(
                "It is undecided: instances do not believe the store's clock, which is {}, and start nothing until it \
                is corrected.",
                words::apart(ahead)
            );
        }
        if planned
            && at.0 > now
            && at.0 <= st.newest.max(st.since)
            && let Some(why) = self.rewind(st)
        {
            return format!("It will not run. {why}");
        }
        if unplanned && at.0 > now {
            return "Nothing is planned for that time.".to_owned();
        }
        if unplanned {
            return "Nothing was planned for that time, and nobody triggered the job.".to_owned();
        }
        if at.0 > now && disabled {
            return "It will not run: the job is disabled in this configuration.".to_owned();
        }
        if at.0 > now {
            return format!(
                "It is not due yet: it is due {}{}.",
                words::relative(at.0, now),
                self.ahead(st, at.0)
            );
        }
        if disabled {
            return "It was not run: the job is disabled in this configuration.".to_owned();
        }
        if st.incarnation != self.incarnation {
            return match acts::wait(&self.fleet, self.clock) {
                Some(why) => format!("Nothing is recorded of it yet: {why}."),
                None => "It waits: the store was restarted or lost its data, and an instance is about to register the \
                         job again."
                    .to_owned(),
            };
        }
        let epoch = self.fleet.born;
        if self.lost(st, at) {
            return self.told_as_lost(decisions);
        }
        if at.0 <= st.since {
            return format!(
                "Not run: this schedule took effect at {}: the schedule was new, or the job came back or was enabled \
                again.",
                words::instant(st.since)
            );
        }
        if at.0 <= st.lost_until {
            return format!("It was not run: {}.", words::line(st.why_kept_back()));
        }
        if at.0 <= st.newest && at.0 < epoch {
            return format!(
                "It was decided, but its record is gone: it was deleted, or the store lost data when it started anew at \
                {}.",
                words::instant(epoch)
            );
        }
        if at.0 <= st.newest {
            return "It was decided, but its record has been deleted since.".to_owned();
        }
        if let Some(o) = st.open.first()
            && let Some(j) = self.job
            && j.overlap != Overlap::Allow
        {
            return format!(
                "It is undecided: the run of {} on {} has not ended yet.",
                words::instant(o.run.occurrence.0),
                o.run.instance
            );
        }
        if !self.fleet.instances.values().any(|i| !self.clock.silent(i)) {
            return "It is undecided: no instance is up. The next instance that starts will run it or record it."
                .to_owned();
        }
        if view::drained(&self.fleet, self.clock) {
            return format!("It is undecided: {}.", view::DRAINED);
        }
        if now - at.0 < 5_000 {
            return "It has just become due, and no instance has decided on it yet.".to_owned();
        }
        let jitter = self.job.map_or(0, |j| {
            i64::try_from(j.jitter.as_millis()).unwrap_or(i64::MAX)
        });
        if now - at.0 < jitter {
            return format!(
                "It is delayed by the job's jitter, up to {}.",
                words::took(jitter)
            );
        }
        "It is undecided, although instances are up: see their logs, and `soloist status`."
            .to_owned()
    }

    /// The store has lost what it knew of that time, or was new later.
    fn lost(&self, st: &State, at: Occurrence) -> bool {
        let anew = at.0 <= st.since && at.0 < self.fleet.born && !self.survived(st);
        at.0 <= st.lost_before || anew
    }

    fn told_as_lost(&self, decisions: &[DecisionView]) -> String {
        let epoch = words::instant(self.fleet.born);
        match decisions.iter().find(|d| d.decision == "won") {
            Some(ran) => format!(
                "It ran on {}, and nobody knows how it ended: later, at {epoch}, the store lost its data.",
                ran.instance
            ),
            None => format!(
                "Nobody knows whether it ran: later, at {epoch}, the store lost its data, or was new, and it has no \
                record from before."
            ),
        }
    }

    /// The job's state is older than the store's epoch. One that an instance began anew, with no more than the newest
    /// occurrence that it knew, has no run after that which had ended before the epoch.
    fn survived(&self, st: &State) -> bool {
        let epoch = self.fleet.born;
        let before = |r: &RunView| r.finished_at.is_some_and(|t| t.0 < epoch);
        let mut history = self.history.iter();
        st.since < epoch && history.any(|r| r.occurrence.0 > st.since && before(r))
    }

    /// Says when the next attempt of `at` is due, if one is awaited.
    fn next_attempt(&self, at: Occurrence) -> Option<String> {
        let st = self.state.as_ref()?;
        let open = st.open.iter().find(|o| o.run.occurrence == at)?;
        let at = open.next_attempt?.at;
        let (due, held_back) = (words::relative(at, self.now), self.held_back(st, at));
        Some(format!("Its next attempt is due {due}{held_back}."))
    }

    /// Says so if the job counts future occurrences as decided.
    fn rewind(&self, st: &State) -> Option<String> {
        let until = st.newest.max(st.since);
        (until > self.now.saturating_add(SLACK.as_millis() as i64)).then(|| {
            format!(
                "The store's clock was wrong, so everything up to {} counts as decided; `{}` corrects that.",
                words::instant(until),
                words::command("rewind", &[self.name.as_str()])
            )
        })
    }

    fn told_by_runs(&self, at: Occurrence, runs: &[RunView], last: &RunView) -> String {
        let on = last
            .instance
            .as_ref()
            .map_or(String::new(), |i| format!(" on {i}"));
        let reason = match words::line(&last.remarks()) {
            remarks if remarks.is_empty() => remarks,
            remarks => format!(": {remarks}"),
        };
        if last.attempt == 0 {
            if last.count > 1 && last.occurrence.0 != at.0 {
                return format!(
                    "It is one of {} occurrences up to {} that were {}{reason}.",
                    last.count,
                    words::instant(last.occurrence.0),
                    last.outcome
                );
            }
            return match last.outcome {
                Outcome::Unknown => format!("Nobody knows whether it ran{reason}."),
                outcome => format!("It did not run, it was {outcome}{reason}."),
            };
        }
        if last.outcome == Outcome::Unknown && last.started_at.is_none() {
            let attempt = match last.attempt {
                1 => "It".to_owned(),
                n => format!("Attempt {n}"),
            };
            let to = (last.instance.as_ref()).map_or(String::new(), |i| format!(" to {i}"));
            let error = last.error.as_deref().unwrap_or("its end is not known");
            return format!("{attempt} was granted{to}, but {}.", words::line(error));
        }
        let attempts = runs.iter().filter(|r| r.attempt > 0).count();
        let late = last
            .lateness_ms
            .filter(|_| attempts == 1)
            .map_or(String::new(), |ms| {
                format!(", {} after its instant", words::took(ms))
            });
        if last.outcome == Outcome::Running {
            let since = last.started_at.map_or(0, |t| self.now - t.0);
            return format!(
                "It is running{on} for {}, attempt {}{late}{reason}.",
                words::took(since),
                last.attempt
            );
        }
        let lasted = last
            .duration_ms
            .map_or(String::new(), |ms| format!(" after {}", words::took(ms)));
        let how = match view::exit(last) {
            how if how.is_empty() || how == "0" => String::new(),
            how if last.signal.is_some() => format!(" ({how})"),
            how => format!(" (exit {how})"),
        };
        let executed = |r: &&RunView| r.attempt > 0 && r.started_at.is_some();
        let times = match (runs.iter().filter(executed).count(), attempts) {
            (0, 1) => return format!("It was not executed{on}: {}{reason}.", last.outcome),
            (1, 1) => "It ran once".to_owned(),
            (0, _) => format!("None of its {attempts} attempts was executed; the last one"),
            (ran, _) if ran == attempts => format!("It ran {ran} times; the last attempt"),
            (1, _) => format!("It ran once in {attempts} attempts; the last one"),
            (ran, _) => format!("It ran {ran} times in {attempts} attempts; the last one"),
        };
        let comma = if attempts == 1 { "," } else { "" };
        format!(
            "{times}{on}{late}{comma} {}{how}{lasted}{reason}.",
            last.outcome
        )
    }

    /// What keeps a future occurrence from running.
    fn ahead(&self, st: &State, due: i64) -> String {
        let held_back = self.held_back(st, due);
        if held_back.is_empty() && st.skip > 0 {
            return format!(
                ", but the next {} occurrences of the job will be skipped",
                st.skip
            );
        }
        held_back
    }

    /// What keeps an attempt from running that is due then.
    fn held_back(&self, st: &State, due: i64) -> String {
        if let Some(p) = view::paused(st, self.now.max(due)) {
            return p.until.map_or(
                ", but the job is paused until somebody resumes it".to_owned(),
                |t| format!(", but the job is paused until {}", words::instant(t.0)),
            );
        }
        let held_back = self.fleet_holds_back();
        match held_back.as_str() {
            "" => held_back,
            why => format!(", but {why}"),
        }
    }

    /// What keeps all instances from starting anything; empty: nothing.
    fn fleet_holds_back(&self) -> String {
        if let Some(ahead) = self.clock.doubt_ms.filter(|_| self.clock.nobody_believes) {
            return format!(
                "no instance starts anything until the store's clock, which is {}, is corrected",
                words::apart(ahead)
            );
        }
        if view::drained(&self.fleet, self.clock) {
            return view::DRAINED.to_owned();
        }
        String::new()
    }
}
