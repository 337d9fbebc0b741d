//! What `soloist top` shows, and what its keys do. Pure: time, answers of the store and keys come in; what to do comes
//! out.

use std::{cell::RefCell, collections::BTreeMap, collections::HashMap, sync::Arc};

use super::keys::Key;
use crate::{
    config::{Config, Job},
    logic::{claim, judge},
    model::{InstanceId, JobName, Occurrence, Outcome, RunId, RunRecord},
    store::{Fleet, Output},
    text, view,
    view::{Clock, InstanceView, JobView, RunView},
};

/// How many ended runs of each job are shown in a line.
pub(super) const RECENT: usize = judge::RECORDS;
/// How many records of the job that is looked at.
pub(super) const HISTORY: usize = 100;
/// How many bytes of a run's output are kept for the screen.
const OUTPUT_KEPT: usize = 256 << 10;
/// What a planned instant changes is shown so much later: by then its grant has most likely been seen.
const AFTER_INSTANT_MS: i64 = 300;
/// The lengths of time that the timeline can show.
pub(super) const SPANS: [i64; 6] = [
    600_000,
    3_600_000,
    10_800_000,
    43_200_000,
    86_400_000,
    604_800_000,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Screen {
    Overview,
    Timeline,
    Instances,
    Job,
}

/// What a person asks for, and has confirmed.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Act {
    Quit,
    Suspend,
    Redraw,
    Trigger(JobName),
    Pause {
        job: JobName,
        until: String,
        reason: String,
    },
    Resume(JobName),
    Skip {
        job: JobName,
        count: u32,
    },
    Cancel(JobName),
    Drain(InstanceId, bool),
}

/// A question that must be answered before an act.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Question {
    pub act: Act,
    pub text: String,
    /// Names of what can be entered, and what was.
    pub fields: Vec<(&'static str, String)>,
    pub field: usize,
}

/// A job in the lists.
#[derive(Debug)]
pub(super) struct Line {
    pub definition: Arc<Job>,
    pub state: Option<claim::State>,
    incarnation: Arc<str>,
    pub view: JobView,
    /// The last ended runs, newest first.
    pub recent: Vec<RunRecord>,
    /// Its state and its records were read.
    pub known: bool,
    /// See [`view::noted`].
    noted: Option<i64>,
    /// Since when it has had no success.
    without_success: Option<i64>,
}

impl Line {
    fn show(&mut self, now: i64) {
        let unreadable = self.view.unreadable.take();
        self.view = view::job(
            &self.definition.name,
            Some(&self.definition),
            self.state.as_ref(),
            now,
            &self.incarnation,
        );
        self.view.unreadable = unreadable;
        // The records know of older successes than the state. Where nobody noted anything, one that they do not have
        // was before all of them.
        let mut ended = self
            .recent
            .iter()
            .filter(|r| r.outcome == Outcome::Succeeded);
        let success = ended.next().and_then(|r| r.finished_at);
        let known = view::without_success(self.state.as_ref(), self.noted).max(success);
        self.without_success = known.or_else(|| self.recent.last().map(|r| r.occurrence.0));
        self.look_at_time(now, true);
    }

    /// What the passing of time alone changes; `anew`: all else may have changed.
    fn look_at_time(&mut self, now: i64, anew: bool) {
        let overdue = view::overdue(&self.definition, self.without_success, now);
        if anew || overdue != self.view.overdue {
            self.view.overdue = overdue;
            let records = self.recent.iter().map(RunRecord::decided);
            self.view.judge(false, records);
        }
    }
}

/// What was found of one job.
#[derive(Debug)]
pub(super) struct Found {
    pub job: JobName,
    pub state: Result<Option<claim::State>, String>,
    /// None: they cannot have changed, or cannot be read.
    pub records: Option<Vec<RunRecord>>,
}

/// What comes from the store.
#[derive(Debug)]
pub(super) enum News {
    Found {
        found: Vec<Found>,
        incarnation: Arc<str>,
    },
    Fleet {
        fleet: Box<Fleet>,
        /// The store's clock, Unix ms, when `local_ms` was this host's.
        shown: i64,
        local_ms: i64,
    },
    Problems(Vec<String>),
    /// By job: see [`view::noted`].
    Noted(BTreeMap<JobName, i64>),
    /// The store does not answer: why, and what to do.
    Away(String),
    /// More records of the job that is looked at.
    History(JobName, Vec<RunRecord>),
    Output(RunId, Option<Output>),
}

/// The output of the run that is looked at.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub run: Option<RunId>,
    stream: text::Stream,
    pub text: String,
    /// The number of the next byte.
    pub at: u64,
    pub begun_at: u64,
    pub done: bool,
    pub missing: u64,
    /// The store has answered.
    pub asked: bool,
}

impl Shown {
    fn take(&mut self, output: Option<Output>) {
        self.asked = true;
        let Some(o) = output else { return };
        if o.from > self.at {
            self.text.clear();
            (self.begun_at, self.at) = (o.from, o.from);
        }
        // What is asked for again, after an error, may be known already.
        let known = usize::try_from(self.at - o.from).unwrap_or(usize::MAX);
        let new = o.data.get(known..).unwrap_or_default();
        self.at += new.len() as u64;
        self.text.push_str(&self.stream.push(new));
        if o.done {
            let rest = self.stream.end();
            self.text.push_str(&rest);
        }
        (self.done, self.missing) = (o.done, o.missing);
        if self.text.len() > OUTPUT_KEPT {
            let mut from = self.text.len() - OUTPUT_KEPT;
            while !self.text.is_char_boundary(from) {
                from += 1;
            }
            from = self.text[from..].find('\n').map_or(from, |n| from + n + 1);
            self.text.drain(..from);
            self.begun_at = self.begun_at.max(1);
        }
    }
}

/// Occurrences by job, for one window of time.
type Planned = HashMap<JobName, ((i64, i64, u16), Vec<u16>)>;

#[derive(Debug)]
pub(super) struct State {
    pub address: String,
    pub namespace: String,
    digest: String,
    pub unicode: bool,
    pub colours: bool,
    pub zone: jiff::tz::TimeZone,
    /// The time that the fleet uses, Unix ms.
    pub now: i64,
    /// That time minus this host's.
    ahead: i64,
    pub clock: Option<Clock>,
    pub fleet: Option<Fleet>,
    pub instances: Vec<InstanceView>,
    pub problems: Vec<String>,
    pub away: Option<String>,
    /// Since when the store does not answer.
    pub away_since: i64,
    pub jobs: BTreeMap<JobName, Line>,
    pub screen: Screen,
    pub before: Screen,
    pub selected: Option<JobName>,
    pub instance: usize,
    /// Which of its runs; None: the newest, whichever that is.
    pub run: Option<RunId>,
    pub history: Vec<RunRecord>,
    pub output: Shown,
    /// So many lines from the end of the output; 0: it is followed.
    pub back: usize,
    pub span: usize,
    pub filter: String,
    pub filtering: bool,
    pub help: bool,
    /// The first line of the help that is shown, and the last that may be first.
    pub help_at: usize,
    pub help_last: std::cell::Cell<usize>,
    pub question: Option<Question>,
    /// What came of the last act; false: it failed.
    pub said: Option<(String, bool)>,
    /// How many rows the list had when it was drawn.
    pub rows: std::cell::Cell<u16>,
    pub planned: RefCell<Planned>,
}

impl State {
    pub(super) fn new(config: &Config, address: &str, local_ms: i64, wall_ms: i64) -> Self {
        let line = |job: &Arc<Job>| Line {
            definition: job.clone(),
            state: None,
            incarnation: "".into(),
            view: view::job(&job.name, Some(job), None, wall_ms, ""),
            recent: vec![],
            known: false,
            noted: None,
            without_success: None,
        };
        let jobs: BTreeMap<JobName, Line> = (config.jobs.iter())
            .map(|(name, job)| (name.clone(), line(job)))
            .collect();
        Self {
            address: address.to_owned(),
            namespace: config.store.namespace.clone(),
            digest: config.digest.clone(),
            unicode: true,
            colours: true,
            zone: jiff::tz::TimeZone::UTC,
            now: wall_ms,
            ahead: wall_ms - local_ms,
            clock: None,
            fleet: None,
            instances: vec![],
            problems: vec![],
            away: None,
            away_since: wall_ms,
            selected: jobs.keys().next().cloned(),
            jobs,
            screen: Screen::Overview,
            before: Screen::Overview,
            instance: 0,
            run: None,
            history: vec![],
            output: Shown::default(),
            back: 0,
            span: 1,
            filter: String::new(),
            filtering: false,
            help: false,
            help_at: 0,
            help_last: std::cell::Cell::new(0),
            question: None,
            said: None,
            rows: std::cell::Cell::new(10),
            planned: RefCell::default(),
        }
    }

    /// Time has passed. `local_ms` is this host's.
    pub(super) fn tick(&mut self, local_ms: i64) {
        self.now = local_ms.saturating_add(self.ahead);
        let now = self.now;
        for line in self.jobs.values_mut() {
            let ends = line.view.paused.as_ref().and_then(|p| p.until);
            let passed = line.view.passed_over.as_ref().map(|p| p.occurrence);
            let mut instants = line.view.next.into_iter().chain(passed);
            let due =
                instants.any(|t| t.0 + AFTER_INSTANT_MS <= now) || ends.is_some_and(|t| t.0 <= now);
            match due {
                true => line.show(now),
                false => line.look_at_time(now, false),
            }
        }
        self.show_instances();
    }

    fn show_instances(&mut self) {
        if let (Some(fleet), Some(mut clock), None) = (&self.fleet, self.clock, &self.away) {
            clock.now = self.now;
            self.instances = view::instances(fleet, &self.digest, clock, |job| {
                self.jobs.get(job)?.state.as_ref()
            });
            self.instance = self.instance.min(self.instances.len().saturating_sub(1));
        }
    }

    pub(super) fn take(&mut self, news: News) {
        match news {
            News::Found { found, incarnation } => {
                self.away = None;
                for f in found {
                    self.found(f, &incarnation);
                }
            }
            News::Fleet {
                fleet,
                shown,
                local_ms,
            } => {
                self.away = None;
                let clock = Clock::of(&fleet, shown);
                self.ahead = clock.now - local_ms;
                self.clock = Some(clock);
                self.fleet = Some(*fleet);
                self.tick(local_ms);
            }
            News::Problems(problems) => self.problems = problems,
            News::Noted(noted) => {
                for (job, line) in &mut self.jobs {
                    line.noted = noted.get(job).copied();
                    line.show(self.now);
                }
            }
            News::Away(why) => {
                if self.away.is_none() {
                    self.away_since = self.now;
                }
                self.away = Some(why);
            }
            News::History(job, records) => {
                if self.watched() == Some(&job) {
                    self.history = records;
                    self.follow();
                }
            }
            News::Output(run, output) => {
                if self.output.run == Some(run) {
                    self.output.take(output);
                }
            }
        }
    }

    fn found(&mut self, f: Found, incarnation: &Arc<str>) {
        let now = self.now;
        let Some(line) = self.jobs.get_mut(&f.job) else {
            return;
        };
        match f.state {
            Ok(state) => {
                line.view.unreadable = None;
                line.state = state;
            }
            Err(why) => line.view.unreadable = Some(why),
        }
        if let Some(records) = f.records {
            line.recent = records;
            view::late_since_due(&mut line.recent, Some(&line.definition));
        }
        line.known = true;
        line.incarnation = incarnation.clone();
        line.show(now);
        if self.watched() == Some(&f.job) {
            self.follow();
        }
    }

    /// The job that is looked at.
    pub(super) fn watched(&self) -> Option<&JobName> {
        (self.screen == Screen::Job)
            .then_some(self.selected.as_ref())
            .flatten()
    }

    /// The runs of the job that is looked at, newest first.
    pub(super) fn runs(&self) -> Vec<RunView> {
        let Some(line) = self.selected.as_ref().and_then(|j| self.jobs.get(j)) else {
            return vec![];
        };
        let mut runs: Vec<RunView> = line.view.running.clone();
        runs.sort_by_key(|r| std::cmp::Reverse((r.occurrence, r.attempt)));
        let older = (self.history.iter()).filter(|h| {
            let same = |r: &RunRecord| {
                (r.run_id, r.occurrence, r.attempt) == (h.run_id, h.occurrence, h.attempt)
            };
            h.job == line.view.job && !line.recent.iter().any(same)
        });
        let records = line.recent.iter().chain(older);
        let open: Vec<_> = runs.iter().map(|r| r.run_id).collect();
        let mut ended: Vec<RunView> = records.cloned().map(RunView::from).collect();
        ended.retain(|r| r.run_id.is_none() || !open.contains(&r.run_id));
        view::late_since_due(&mut ended, Some(&line.definition));
        runs.extend(ended);
        runs
    }

    /// Which of [`State::runs`] is selected.
    pub(super) fn run_at(&self, runs: &[RunView]) -> usize {
        let wanted = self.run;
        wanted
            .and_then(|id| runs.iter().position(|r| r.run_id == Some(id)))
            .unwrap_or(0)
    }

    /// Shows the output of the run that is selected now.
    fn follow(&mut self) {
        let runs = self.runs();
        let run = runs.get(self.run_at(&runs)).and_then(|r| r.run_id);
        if self.output.run != run {
            self.output = Shown {
                run,
                ..Shown::default()
            };
            self.back = 0;
        }
    }

    /// The jobs that are listed: those that need attention first.
    pub(super) fn listed(&self) -> Vec<&Line> {
        let fits = |l: &&Line| l.view.job.as_str().contains(&self.filter);
        let mut all: Vec<&Line> = self.jobs.values().filter(fits).collect();
        all.sort_by_key(|l| l.view.attention.is_none());
        all
    }

    pub(super) fn line(&self) -> Option<&Line> {
        self.selected.as_ref().and_then(|job| self.jobs.get(job))
    }

    // ---- keys ----

    pub(super) fn key(&mut self, key: Key) -> Option<Act> {
        match key {
            Key::Interrupt => return Some(Act::Quit),
            Key::Suspend => return Some(Act::Suspend),
            Key::Redraw => return Some(Act::Redraw),
            _ => {}
        }
        self.said = None;
        if key == Key::Char('q') && !self.types() {
            return Some(Act::Quit);
        }
        if self.help {
            self.help_key(key);
            return None;
        }
        if self.question.is_some() {
            return self.answer(key);
        }
        if self.filtering {
            self.filter_key(key);
            return None;
        }
        match key {
            Key::Esc | Key::Left | Key::Back if self.screen == Screen::Job => self.go(self.before),
            Key::Esc => self.filter.clear(),
            Key::Char('1') => self.go(Screen::Overview),
            Key::Char('2') => self.go(Screen::Timeline),
            Key::Char('3') => self.go(Screen::Instances),
            Key::Tab => self.go(match self.screen {
                Screen::Overview => Screen::Timeline,
                Screen::Timeline => Screen::Instances,
                Screen::Instances | Screen::Job => Screen::Overview,
            }),
            Key::Enter | Key::Right => self.open(),
            Key::Char('?') | Key::Char('h') => (self.help, self.help_at) = (true, 0),
            Key::Char('/') if self.lists() => self.filtering = true,
            Key::Char('+') | Key::Char('=') => self.span = self.span.saturating_sub(1),
            Key::Char('-') => self.span = (self.span + 1).min(SPANS.len() - 1),
            Key::Up | Key::Char('k') => self.step(-1),
            Key::Down | Key::Char('j') => self.step(1),
            Key::PageUp => self.page(-1),
            Key::PageDown => self.page(1),
            Key::Home | Key::Char('g') => self.step(-1_000_000),
            Key::End | Key::Char('G') => self.step(1_000_000),
            Key::Char(c) => self.ask(c),
            _ => {}
        }
        None
    }

    /// What is typed is text.
    fn types(&self) -> bool {
        let asked = self.question.as_ref();
        !self.help && (self.filtering || asked.is_some_and(|q| !q.fields.is_empty()))
    }

    fn help_key(&mut self, key: Key) {
        let page = usize::from(self.rows.get().max(2) - 1);
        self.help_at = match key {
            Key::Up | Key::Char('k') => self.help_at.saturating_sub(1),
            Key::Down | Key::Char('j') => self.help_at + 1,
            Key::PageUp => self.help_at.saturating_sub(page),
            Key::PageDown => self.help_at + page,
            Key::Home | Key::Char('g') => 0,
            Key::End | Key::Char('G') => usize::MAX,
            _ => {
                self.help = false;
                return;
            }
        };
        self.help_at = self.help_at.min(self.help_last.get());
    }

    fn lists(&self) -> bool {
        matches!(self.screen, Screen::Overview | Screen::Timeline)
    }

    fn go(&mut self, screen: Screen) {
        self.screen = screen;
    }

    fn open(&mut self) {
        if self.lists() && self.selected.is_some() {
            self.before = self.screen;
            self.screen = Screen::Job;
            self.run = None;
            self.history.clear();
            self.back = 0;
            self.follow();
        }
    }

    fn page(&mut self, pages: isize) {
        let rows = isize::try_from(self.rows.get().max(2) - 1).unwrap_or(1);
        if self.screen == Screen::Job {
            let back = self.back.saturating_add_signed(-pages * rows);
            self.back = back.min(self.output.text.len());
            return;
        }
        self.step(pages * rows);
    }

    fn step(&mut self, by: isize) {
        let moved = |at: usize, len: usize| at.saturating_add_signed(by).min(len.saturating_sub(1));
        match self.screen {
            Screen::Instances => self.instance = moved(self.instance, self.instances.len()),
            Screen::Job => {
                let mut runs = self.runs();
                runs.retain(|r| r.run_id.is_some());
                let at = moved(self.run_at(&runs), runs.len());
                // The newest one stays the newest.
                self.run = runs.get(at).filter(|_| at > 0).and_then(|r| r.run_id);
                self.follow();
            }
            Screen::Overview | Screen::Timeline => {
                let listed = self.listed();
                let at = self.at(&listed);
                let at = moved(at, listed.len());
                self.selected = listed.get(at).map(|l| l.view.job.clone());
            }
        }
    }

    /// Which of the listed jobs is selected.
    pub(super) fn at(&self, listed: &[&Line]) -> usize {
        let selected = self.selected.as_ref();
        listed
            .iter()
            .position(|l| Some(&l.view.job) == selected)
            .unwrap_or(0)
    }

    fn filter_key(&mut self, key: Key) {
        match key {
            Key::Char(c) if self.filter.len() < 100 => self.filter.push(c),
            Key::Back => drop(self.filter.pop()),
            Key::Esc => {
                self.filter.clear();
                self.filtering = false;
            }
            Key::Enter | Key::Tab => self.filtering = false,
            Key::Up => return self.step(-1),
            Key::Down => return self.step(1),
            _ => {}
        }
        // What is selected must be on the screen.
        let listed = self.listed();
        if !listed
            .iter()
            .any(|l| Some(&l.view.job) == self.selected.as_ref())
        {
            self.selected = listed
                .first()
                .map(|l| l.view.job.clone())
                .or(self.selected.take());
        }
    }

    /// The key of an act: asks whether it is meant.
    fn ask(&mut self, key: char) {
        if self.screen == Screen::Instances {
            let Some(i) = self.instances.get(self.instance) else {
                return;
            };
            let (on, text) = match key {
                'd' => (true, "claims nothing more and finishes its active runs"),
                'u' => (false, "claims again"),
                _ => return,
            };
            let verb = if on { "Drain" } else { "Undrain" };
            let name = crate::words::line(i.instance.as_str());
            self.question = Some(Question {
                text: format!("{verb} {name}? It {text}."),
                act: Act::Drain(i.instance.clone(), on),
                fields: vec![],
                field: 0,
            });
            return;
        }
        let listed = self.screen == Screen::Job
            || self
                .listed()
                .iter()
                .any(|l| Some(&l.view.job) == self.selected.as_ref());
        let Some(job) = self.selected.clone().filter(|_| listed) else {
            return;
        };
        let (text, act, fields) = match key {
            't' => (
                format!("Run {job} once now, on one instance?"),
                Act::Trigger(job),
                vec![],
            ),
            'p' => (
                format!("Pause {job} on all instances? What runs goes on."),
                Act::Pause {
                    job,
                    until: String::new(),
                    reason: String::new(),
                },
                vec![("reason", String::new()), ("until", String::new())],
            ),
            'r' => (format!("End the pause of {job}?"), Act::Resume(job), vec![]),
            's' => (
                format!("Skip the next occurrences of {job}? 0 takes a skip back."),
                Act::Skip { job, count: 1 },
                vec![("how many", "1".to_owned())],
            ),
            'c' => (
                format!("End the active runs of {job}, on all instances?"),
                Act::Cancel(job),
                vec![],
            ),
            _ => return,
        };
        self.question = Some(Question {
            act,
            text,
            fields,
            field: 0,
        });
    }

    fn answer(&mut self, key: Key) -> Option<Act> {
        let mut q = self.question.take()?;
        let fields = q.fields.len();
        match (key, fields) {
            (Key::Esc, _) | (Key::Char('n' | 'N'), 0) => return None,
            (Key::Char('y' | 'Y') | Key::Enter, 0) => return Some(q.act),
            (Key::Enter, _) => match answered(&q) {
                Ok(act) => return Some(act),
                Err(why) => self.said = Some((why, false)),
            },
            (Key::Tab | Key::Down, 1..) => q.field = (q.field + 1) % fields,
            (Key::Up, 1..) => q.field = (q.field + fields - 1) % fields,
            (Key::Back, 1..) => drop(q.fields[q.field].1.pop()),
            (Key::Char(c), 1..) if q.fields[q.field].1.len() < 200 => q.fields[q.field].1.push(c),
            _ => {}
        }
        self.question = Some(q);
        None
    }
}

/// The act with what was entered.
fn answered(q: &Question) -> Result<Act, String> {
    let field = |name: &str| {
        let found = q.fields.iter().find(|(n, _)| *n == name);
        found.map_or("", |(_, text)| text.trim()).to_owned()
    };
    match &q.act {
        Act::Pause { job, .. } => Ok(Act::Pause {
            job: job.clone(),
            until: field("until"),
            reason: field("reason"),
        }),
        Act::Skip { job, .. } => match field("how many").parse() {
            Ok(count) => Ok(Act::Skip {
                job: job.clone(),
                count,
            }),
            Err(_) => Err("write a number, as 1".to_owned()),
        },
        act => Ok(act.clone()),
    }
}

/// The cells of `width` between `from` and `to` in which the job has an occurrence after `now`.
pub(super) fn planned(job: &Job, now: i64, from: i64, to: i64, width: u16) -> Vec<u16> {
    let (mut cells, mut at) = (vec![], now.max(from));
    while let Some(next) = crate::acts::planned(Some(job), at, 1).first().copied()
        && next < Occurrence(to)
    {
        let cell = cell_of(next.0, from, to, width);
        cells.push(cell);
        // The next one that would be seen.
        let end = from + (to - from) * (i64::from(cell) + 1) / i64::from(width.max(1));
        at = next.0.max(end - 1);
    }
    cells
}

/// In which of `width` cells between `from` and `to` an instant is.
pub(super) fn cell_of(at: i64, from: i64, to: i64, width: u16) -> u16 {
    let most = i64::from(width).saturating_sub(1).max(0);
    let cell = (at - from).saturating_mul(i64::from(width)) / (to - from).max(1);
    cell.clamp(0, most) as u16
}
