//! Judges what a record tells against the promises of docs/guarantees.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::tz::TimeZone;

use super::{
    Rules,
    check::{Breach, Process, Ran, Records, Verdict},
    order::{Decided, Jump, Operation, Ordered},
};
use crate::{
    logic::{
        claim::{Answer, Answered, Claim, Grant, OnCrash, Overlap, Question, Renewal, Target},
        schedule::{Schedule, next_of},
    },
    model::{Boottime, JobName, Occurrence, RunId},
};

/// How exactly times of two hosts can be compared, or a time with the store's clock, and how late a busy host may be,
/// µs.
const EXACTNESS: i64 = 1_000_000;
/// More planned occurrences of a job than this are not looked at.
const MOST: usize = 1_000_000;

/// An attempt that was granted for the first time.
struct Granted<'a> {
    grant: Grant,
    claim: &'a Claim,
    /// By the store's clock, as it was used for the decision.
    now_us: i64,
    /// How many losses of data, and questions without an answer that were not found, came before it.
    losses: usize,
    /// How many of these were losses for certain, or may have been.
    lost: usize,
    /// When the store answered last before the next of these, by its clock as it was most of the time.
    kept_until_us: i64,
}

impl Granted<'_> {
    /// It came before its time, and the store may have lost that before this time had come: then nobody remembers it.
    fn forgotten_by(&self, later: &Self) -> bool {
        later.lost > self.lost && self.kept_until_us < self.grant.occurrence.0.saturating_mul(1000)
    }
}

struct Judge<'a> {
    records: &'a Records,
    job: &'a JobName,
    operations: &'a [Operation],
    ordered: &'a Ordered,
    rules: Vec<&'a Rules>,
    granted: Vec<Granted<'a>>,
    verdict: &'a mut Verdict,
}

impl Records {
    pub(super) fn judge(
        &self,
        job: &JobName,
        operations: &[Operation],
        ordered: &Ordered,
        verdict: &mut Verdict,
    ) {
        let mut judge = Judge {
            records: self,
            job,
            operations,
            ordered,
            rules: self.all_rules(job).collect(),
            granted: granted(&self.processes, operations, &ordered.decided),
            verdict,
        };
        judge.verdict.granted += judge.granted.len();
        judge.one_grant();
        judge.never_early();
        judge.no_overlap();
        judge.no_orphan();
        judge.crash_policy();
        judge.nothing_dropped();
        judge.tokens_increase();
    }
}

fn granted<'a>(
    processes: &[Process],
    operations: &'a [Operation],
    decided: &[Decided],
) -> Vec<Granted<'a>> {
    let (mut all, mut seen, mut losses) = (vec![], BTreeSet::new(), 0);
    // Of each stretch between two losses.
    let mut kept_until = vec![i64::MIN];
    for d in decided {
        let operation = &operations[d.operation];
        let done = operation.done.as_ref();
        losses += usize::from(d.jump.is_some());
        if matches!(d.jump, Some(Jump::Lost | Jump::Unseen)) {
            kept_until.push(i64::MIN);
        }
        if let (Some(done), Some(until)) = (done, kept_until.last_mut()) {
            *until = processes[operation.process]
                .store_us(done.received)
                .max(*until);
        }
        let step = done.and_then(|done| done.step.as_ref());
        if step.is_some_and(|step| step.records.is_none()) {
            // Told as not explained.
            continue;
        }
        let Question::Claim(claim) = &operation.question else {
            continue;
        };
        let Answered::Claim(Answer::Granted(grant)) = &d.answer else {
            continue;
        };
        if seen.insert(claim.run) {
            all.push(Granted {
                grant: *grant,
                claim,
                now_us: d.now_us,
                losses,
                lost: kept_until.len() - 1,
                kept_until_us: i64::MAX,
            });
        }
    }
    for granted in &mut all {
        granted.kept_until_us = kept_until[granted.lost];
    }
    all
}

impl Judge<'_> {
    fn breach(&mut self, promise: u8, text: String) {
        self.breach_at(None, promise, text);
    }

    fn breach_at(&mut self, at: Option<Boottime>, promise: u8, text: String) {
        self.verdict.breaches.push(Breach {
            promise,
            job: Some(self.job.clone()),
            file: None,
            at,
            text,
        });
    }

    fn overlaps(&self) -> bool {
        self.rules.iter().any(|r| r.overlap == Overlap::Allow)
    }

    fn ran(&self, run: RunId) -> Option<&Ran> {
        self.records.runs.get(&run)
    }

    fn one_grant(&mut self) {
        let mut granted: BTreeMap<(Occurrence, u32), &Granted<'_>> = BTreeMap::new();
        let mut started: BTreeMap<Occurrence, Vec<RunId>> = BTreeMap::new();
        let mut keys: BTreeMap<&str, Occurrence> = BTreeMap::new();
        let mut breaches = vec![];
        for g in &self.granted {
            let (at, attempt, run) = (g.grant.occurrence, g.grant.attempt, g.claim.run);
            match granted.insert((at, attempt), g) {
                Some(before) if before.forgotten_by(g) => drop(started.remove(&at)),
                Some(before) => {
                    let other = before.claim.run;
                    let text =
                        format!("attempt {attempt} of {at} was granted to {other} and to {run}");
                    breaches.push((1, text));
                }
                None => {}
            }
            if self.ran(run).is_some_and(|r| r.started.is_some()) {
                started.entry(at).or_default().push(run);
            }
            if let Target::Manual { key, .. } = &g.claim.target
                && attempt == 1
                && let Some(before) = keys.insert(key, at)
            {
                breaches.push((
                    6,
                    format!("the trigger `{key}` ran as {before} and as {at}"),
                ));
            }
        }
        let once = |r: &&Rules| r.on_crash == OnCrash::Fail && !r.retries;
        if self.rules.iter().all(once) {
            for (at, runs) in started.iter().filter(|(_, runs)| runs.len() > 1) {
                breaches.push((
                    1,
                    format!("{at} was started {} times: {runs:?}", runs.len()),
                ));
            }
        }
        for (promise, text) in breaches {
            self.breach(promise, text);
        }
    }

    fn never_early(&mut self) {
        let mut breaches = vec![];
        for g in &self.granted {
            if let Some(us) = early_us(&g.grant, g.now_us) {
                let text = format!(
                    "{} was granted {} ms before its time",
                    g.grant.occurrence,
                    us / 1000
                );
                breaches.push((None, text));
            }
            let ran = self.ran(g.claim.run);
            if let Some((process, started)) = ran.and_then(|r| Some((r.process, r.started?)))
                && let us = self.records.processes[process].store_us(started)
                && early_us(&g.grant, us + EXACTNESS).is_some()
            {
                let text = format!("{} was started before its time", g.grant.occurrence);
                breaches.push((Some(started), text));
            }
        }
        for (at, text) in breaches {
            self.breach_at(at, 2, text);
        }
    }

    fn no_overlap(&mut self) {
        if self.overlaps() {
            return;
        }
        let of_job: Vec<(RunId, &Ran)> = self
            .granted
            .iter()
            .filter_map(|g| Some((g.claim.run, self.ran(g.claim.run)?)))
            .collect();
        let mut breaches = vec![];
        for (n, (run, a)) in of_job.iter().enumerate() {
            for (other, b) in of_job.iter().skip(n + 1).take(50) {
                if let Some(us) = self.together(a, b)
                    && !self.noticed_late(a)
                    && !self.noticed_late(b)
                {
                    let text = format!("{run} and {other} ran together for {us} µs");
                    breaches.push((a.ended.min(b.ended), text));
                }
            }
        }
        for (at, text) in breaches {
            self.breach_at(at, 3, text);
        }
    }

    /// How long two commands ran at the same time, µs.
    fn together(&self, a: &Ran, b: &Ran) -> Option<i64> {
        let processes = &self.records.processes;
        let same_host = processes[a.process].boot == processes[b.process].boot;
        let us = |r: &Ran, at: Boottime| match same_host {
            true => Some((at.0 / 1000) as i64),
            false => Some(processes[r.process].store_us(at)),
        };
        let begin = us(a, a.started?)?.max(us(b, b.started?)?);
        let end = us(a, a.ended?)?.min(us(b, b.ended?)?);
        // A guard may notice late that its command is gone.
        Some(end - begin).filter(|together| *together > EXACTNESS)
    }

    /// The instance did not run at some time between these: it could not end the command, nor notice its end (A3).
    fn stood(&self, ran: &Ran, from: Boottime, to: Boottime) -> bool {
        let starter = ran.starter.map(|p| &self.records.processes[p]);
        starter.is_some_and(|p| p.stood(from, to))
    }

    fn noticed_late(&self, ran: &Ran) -> bool {
        let times = ran.started.zip(ran.ended);
        times.is_some_and(|(started, ended)| self.stood(ran, started, ended))
    }

    /// A command is gone before its lease can lapse anywhere.
    fn no_orphan(&mut self) {
        let mut confirmed: BTreeMap<RunId, Boottime> = BTreeMap::new();
        for o in self.operations {
            let Some(done) = &o.done else { continue };
            let run = match (&o.question, &done.answer) {
                (Question::Claim(c), Answered::Claim(Answer::Granted(_))) => c.run,
                (Question::Renew(r), Answered::Renew(Renewal::Renewed(_))) => r.run.id,
                _ => continue,
            };
            // It may have waited for the lock of a file before it left.
            let sent = done.left.unwrap_or(o.sent);
            let last = confirmed.entry(run).or_insert(sent);
            *last = sent.max(*last);
        }
        let mut breaches = vec![];
        for g in &self.granted {
            let run = g.claim.run;
            let ran = self.ran(run).filter(|r| r.started.is_some());
            let (Some(ended), Some(last)) = (ran.and_then(|r| r.ended), confirmed.get(&run)) else {
                continue;
            };
            let lived_ms = ended.since(*last).as_millis() as i64;
            if lived_ms > g.claim.lease + EXACTNESS / 1000
                && !ran.is_some_and(|ran| self.stood(ran, *last, ended))
            {
                let text = format!(
                    "{run} ended {lived_ms} ms after its lease was confirmed last; the lease has {} ms",
                    g.claim.lease
                );
                breaches.push((ended, text));
            }
        }
        for (at, text) in breaches {
            self.breach_at(Some(at), 4, text);
        }
    }

    fn crash_policy(&mut self) {
        let most = self.rules.iter().map(|r| r.max_attempts).max();
        let once = |r: &&Rules| r.on_crash == OnCrash::Fail && !r.retries;
        let once = !self.rules.is_empty() && self.rules.iter().all(once);
        // An attempt whose command was not executed may be repeated whatever the job says.
        let idle: BTreeSet<_> = (self.operations.iter())
            .filter_map(|o| match &o.question {
                Question::Settle(s) if s.record.started_at.is_none() => Some(&s.record),
                _ => None,
            })
            .map(|r| (r.occurrence, r.attempt))
            .collect();
        let more = |g: &&Granted<'_>| {
            let earlier = (1..g.grant.attempt).map(|n| (g.grant.occurrence, n));
            let ran = earlier.filter(|attempt| !idle.contains(attempt)).count() as u32;
            once && ran > 0 || most.is_some_and(|most| ran >= most)
        };
        let texts: Vec<String> = self
            .granted
            .iter()
            .filter(more)
            .map(|g| {
                let (at, attempt) = (g.grant.occurrence, g.grant.attempt);
                format!("the store granted attempt {attempt} of {at}, more than the job allows")
            })
            .collect();
        for text in texts {
            self.breach(5, text);
        }
    }

    /// Each planned occurrence, and each attempt that was granted, has an outcome.
    fn nothing_dropped(&mut self) {
        let decided = &self.ordered.decided;
        let recorded: BTreeSet<RunId> = decided
            .iter()
            .flat_map(|d| &d.records)
            .filter_map(|r| r.run_id)
            .collect();
        let state = self.ordered.state.as_ref();
        let open: BTreeSet<RunId> = state
            .map(|s| s.open.iter().map(|e| e.run.id).collect())
            .unwrap_or_default();
        let losses = decided.iter().filter(|d| d.jump.is_some()).count();
        let mut texts: Vec<String> = self
            .granted
            .iter()
            // What the store lost is recorded without the name of its run.
            .filter(|g| g.losses == losses)
            .filter(|g| !recorded.contains(&g.claim.run) && !open.contains(&g.claim.run))
            .map(|g| format!("{} of {} has no outcome", g.claim.run, g.grant.occurrence))
            .collect();
        let mut with_outcome: BTreeMap<Occurrence, u64> = BTreeMap::new();
        for g in &self.granted {
            with_outcome.entry(g.grant.occurrence).or_insert(1);
        }
        for r in decided.iter().flat_map(|d| &d.records) {
            let count = with_outcome.entry(r.occurrence).or_insert(1);
            *count = r.count.max(*count);
        }
        let planned = self.planned();
        self.verdict.occurrences += planned.len();
        let mut covered = 0;
        let mut missing = vec![];
        for at in planned.iter().rev() {
            if let Some(count) = with_outcome.get(at) {
                covered = covered.max(*count);
            }
            match covered {
                0 => missing.push(*at),
                _ => covered -= 1,
            }
        }
        if let (Some(last), Some(first)) = (missing.first(), missing.last()) {
            let n = missing.len();
            texts.push(format!(
                "{n} planned occurrences have no outcome: {first} to {last}"
            ));
        }
        for text in texts {
            self.breach(6, text);
        }
    }

    /// The occurrences that must have an outcome.
    fn planned(&self) -> Vec<Occurrence> {
        let known = self.ordered.decided.iter().position(|d| d.since > 0);
        let known = known.map(|n| &self.ordered.decided[n..]);
        let (Some(rules), Some([first, rest @ ..])) = (self.records.rules(self.job), known) else {
            return vec![];
        };
        // What another schedule planned is not known any more.
        if self.rules.iter().any(|r| r.schedules != rules.schedules) || !rules.enabled {
            return vec![];
        }
        let Ok(zone) = TimeZone::get(&rules.timezone) else {
            return vec![];
        };
        let parse = |(text, dst): &(String, _)| {
            Schedule::parse(text, &zone, *dst, self.job.as_str()).map(Arc::new)
        };
        let Ok(schedules) = rules
            .schedules
            .iter()
            .map(parse)
            .collect::<Result<Vec<_>, _>>()
        else {
            return vec![];
        };
        // Not owed: before `since`, which moves when nobody had the job for a while.
        let mut not_owed = vec![(0, first.since.max(first.newest))];
        let mut before = first;
        // What was decided when nobody had the job any more. Triggers may have moved `newest` on since.
        let mut off_from = None;
        for d in rest {
            if d.jump == Some(Jump::Unanswered) {
                not_owed.push((before.newest, d.newest));
            }
            if d.off > 0 {
                off_from.get_or_insert(before.newest);
            }
            if d.since > before.since {
                not_owed.push((off_from.unwrap_or(before.newest), d.since));
            }
            if d.off == 0 {
                off_from = None;
            }
            before = d;
        }
        let upto = before.newest.max(self.overdue_before(rules));
        let mut at = Occurrence(first.since.max(first.newest));
        let mut planned = vec![];
        while let Some(next) = next_of(&schedules, at)
            && next.0 <= upto
            && planned.len() < MOST
        {
            at = next;
            if !not_owed
                .iter()
                .any(|(from, to)| *from < at.0 && at.0 <= *to)
            {
                planned.push(at);
            }
        }
        planned
    }

    /// What was planned before this should have been decided when the record ends, Unix ms.
    fn overdue_before(&self, rules: &Rules) -> i64 {
        let daemons = self.records.processes.iter();
        let daemons =
            daemons.filter(|p| p.jobs.last().is_some_and(|(_, j)| j.contains_key(self.job)));
        let last = daemons.map(Process::last_us).max();
        let patience = rules.start_within + rules.jitter + 3 * rules.lease;
        last.map_or(0, |us| us / 1000 - patience.as_millis() as i64 - 10_000)
    }

    fn tokens_increase(&mut self) {
        if self.overlaps() {
            return;
        }
        let mut last: Option<&Granted<'_>> = None;
        let mut texts = vec![];
        for g in &self.granted {
            let token = g.grant.token();
            if let Some(last) = last.filter(|last| !last.forgotten_by(g))
                && let before = last.grant.token()
                && before >= token
            {
                texts.push(format!("token {token} was granted after {before}"));
            }
            last = Some(g);
        }
        for text in texts {
            self.breach(8, text);
        }
    }
}

/// How long before its time an occurrence was granted or started. Only its first attempt tells: a later one follows it,
/// and the store's clock may have gone back since.
fn early_us(grant: &Grant, us: i64) -> Option<i64> {
    let left = grant.occurrence.0.saturating_mul(1000).saturating_sub(us);
    (grant.attempt == 1 && left > 0).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::Trigger, recording::order};

    #[test]
    fn a_retry_after_the_stores_clock_went_back_is_not_early() {
        let grant = |attempt| Grant {
            occurrence: Occurrence(708_000),
            attempt,
            trigger: Trigger::Schedule,
        };
        assert_eq!(early_us(&grant(1), 707_518_000), Some(482_000));
        assert_eq!(early_us(&grant(1), 708_000_000), None);
        assert_eq!(early_us(&grant(2), 707_518_000), None);
    }

    /// The promises that are found broken where an attempt was granted by a wrong clock, and again after a loss;
    /// `kept_until_ms`: of the store's last answer before it.
    fn granted_again(jump: Jump, kept_until_ms: i64, due_ms: i64) -> Vec<u8> {
        let mut records = Records::default();
        records.begin("i".to_owned(), "boot");
        let at = |ms: i64| Boottime(ms as u64 * 1_000_000);
        let operation = |run, ms| Operation {
            place: (0, 0),
            process: 0,
            boot: 0,
            sent: at(ms),
            sent_us: ms * 1000,
            about_us: ms * 1000,
            question: order::tests::claim(run, 0, None),
            done: Some(order::Done {
                left: None,
                received: at(ms),
                now_us: ms * 1000,
                answer: answered(due_ms),
                step: None,
            }),
        };
        fn answered(due_ms: i64) -> Answered {
            Answered::Claim(Answer::Granted(Grant {
                occurrence: Occurrence(due_ms),
                attempt: 1,
                trigger: Trigger::Schedule,
            }))
        }
        let operations = [
            operation(1, 100),
            operation(2, kept_until_ms),
            operation(3, 900),
        ];
        let decided = |operation, jump| Decided {
            operation,
            now_us: due_ms * 1000,
            answer: answered(due_ms),
            records: vec![],
            jump,
            since: 0,
            newest: 0,
            off: 0,
        };
        let decided = [decided(0, None), decided(1, None), decided(2, Some(jump))];
        let granted = granted(&records.processes, &operations, &decided);
        let (ordered, job) = (
            Ordered {
                decided: vec![],
                state: None,
            },
            JobName::new("a"),
        );
        let mut verdict = Verdict::default();
        let mut judge = Judge {
            records: &records,
            job: &job,
            operations: &operations,
            ordered: &ordered,
            rules: vec![],
            granted,
            verdict: &mut verdict,
        };
        // It only tells how long the data were there.
        judge.granted.remove(1);
        judge.one_grant();
        judge.tokens_increase();
        verdict.breaches.iter().map(|b| b.promise).collect()
    }

    #[test]
    fn only_a_loss_before_the_time_of_an_occurrence_lets_it_be_forgotten() {
        let broken = [1, 8];
        assert_eq!(granted_again(Jump::Lost, 500, 600), [0_u8; 0]);
        assert_eq!(granted_again(Jump::Unseen, 500, 600), [0_u8; 0]);
        assert_eq!(granted_again(Jump::Lost, 500, 500), broken);
        assert_eq!(granted_again(Jump::Unanswered, 500, 600), broken);
        assert_eq!(granted_again(Jump::Unexplained, 500, 600), broken);
    }
}
