//! What `soloist top` shows, and what its keys do. Pure: time, answers of the store and keys come in; what to do comes
//! out.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::{
    clock,
    config::{Config, Job},
    model::{InstanceId, JobName, Occurrence, RunId, RunRecord},
    store::Output,
    view::{self, JobView, RunView, StatusView, Time},
    words,
};

/// How many bytes of a run's output are kept for the screen.
const OUTPUT_KEPT: usize = 64 << 10;
/// How far PgUp and PgDn go.
const PAGE: isize = 10;
/// The timeline has 10 minutes, and six times as much with each step: up to nine days.
const ZOOM_MOST: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Screen {
    #[default]
    Jobs,
    Timeline,
    Instances,
    Job,
}

/// What a person asks for, and has confirmed if it changes anything.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Act {
    Quit,
    Suspend,
    Redraw,
    /// Lists only jobs with this in their names.
    Find(String),
    Why(JobName, Occurrence),
    Trigger(JobName),
    /// With a reason, and until when.
    Pause(JobName, String, String),
    Resume(JobName),
    Skip(JobName, u32),
    Cancel(JobName),
    Drain(InstanceId, bool),
}

/// A question that must be answered before an act.
#[derive(Debug)]
pub(super) struct Question {
    act: Act,
    pub text: String,
    /// Names of what can be entered, and what was.
    pub fields: Vec<(&'static str, String)>,
    pub field: usize,
}

/// What is looked at beside the fleet.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Wanted {
    pub job: Option<JobName>,
    pub run: Option<RunId>,
}

/// The output of the run that is looked at.
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    pub run: Option<RunId>,
    pub text: String,
    pub done: bool,
    pub missing: u64,
}

impl Text {
    /// `text`: what `o` says.
    pub(super) fn add(&mut self, text: &str, o: &Output) {
        self.text.push_str(text);
        (self.done, self.missing) = (o.done, o.missing);
        let over = self.text.len().saturating_sub(OUTPUT_KEPT);
        let over = (over..).find(|at| self.text.is_char_boundary(*at));
        self.text.drain(..over.unwrap_or(0));
    }
}

/// What the store said.
#[derive(Debug)]
pub(super) struct News {
    pub status: StatusView,
    /// The ended runs of jobs, newest first, as far as they may have changed.
    pub records: Vec<(JobName, Vec<RunRecord>)>,
    pub text: Text,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub address: String,
    pub definitions: BTreeMap<JobName, Arc<Job>>,
    pub unicode: bool,
    pub colours: bool,
    /// The time that the fleet uses, Unix ms.
    pub now: i64,
    /// That time minus this host's.
    ahead: i64,
    /// None: the store has not answered yet.
    pub status: Option<StatusView>,
    pub records: HashMap<JobName, Vec<RunRecord>>,
    pub text: Text,
    /// Why the store does not answer, and since when.
    pub away: Option<(String, i64)>,
    pub screen: Screen,
    /// From which a job was opened.
    pub before: Screen,
    pub zoom: u32,
    pub selected: Option<JobName>,
    pub instance: usize,
    /// Occurrence and attempt of one of its runs; None: the newest, whichever that is.
    run: Option<(Time, u32)>,
    /// So many lines from the end of the output; 0: it is followed.
    pub back: usize,
    /// Why an occurrence ran or did not, in place of the output.
    pub why: Option<String>,
    pub filter: String,
    pub help: bool,
    pub question: Option<Question>,
    /// What came of the last act; false: it failed.
    pub said: Option<(String, bool)>,
}

impl State {
    pub(super) fn new(config: &Config, address: &str) -> Self {
        Self {
            address: address.to_owned(),
            definitions: config.jobs.clone(),
            unicode: true,
            colours: true,
            zoom: 1,
            now: clock::wall_us() / 1000,
            ..Self::default()
        }
    }

    /// `local_ms`: the time of this host, from any origin.
    pub(super) fn tick(&mut self, local_ms: i64) {
        if self.ahead == 0 {
            self.ahead = self.now - local_ms;
        }
        self.now = local_ms + self.ahead;
    }

    pub(super) fn take(&mut self, news: News, local_ms: i64) {
        self.away = None;
        self.ahead = news.status.now.0 - local_ms;
        self.now = news.status.now.0;
        for (job, mut records) in news.records {
            view::late_since_due(&mut records, self.definitions.get(&job).map(|job| &**job));
            self.records.insert(job, records);
        }
        self.status = Some(news.status);
        self.text = news.text;
        if self.selected.is_none() {
            self.selected = self.listed().first().map(|j| j.job.clone());
        }
    }

    pub(super) fn away(&mut self, why: String, since: i64) {
        let since = self
            .away
            .take()
            .map_or(since + self.ahead, |(_, since)| since);
        self.away = Some((why, since));
    }

    pub(super) fn wanted(&self) -> Wanted {
        let job = self.selected.clone().filter(|_| self.screen == Screen::Job);
        let runs = if job.is_some() { self.runs() } else { vec![] };
        Wanted {
            job,
            run: runs.get(self.run_at(&runs)).and_then(|r| r.run_id),
        }
    }

    /// The jobs that are listed: those that need attention first.
    pub(super) fn listed(&self) -> Vec<&JobView> {
        let all = self.status.iter().flat_map(|s| &s.jobs);
        let mut all: Vec<&JobView> = all
            .filter(|j| j.job.as_str().contains(&self.filter))
            .collect();
        all.sort_by_key(|j| j.attention.is_none());
        all
    }

    /// Which of the listed jobs is selected.
    pub(super) fn at(&self, listed: &[&JobView]) -> usize {
        let selected = listed
            .iter()
            .position(|j| Some(&j.job) == self.selected.as_ref());
        selected.unwrap_or(0)
    }

    pub(super) fn job(&self) -> Option<&JobView> {
        let mut jobs = self.status.iter().flat_map(|s| &s.jobs);
        jobs.find(|j| Some(&j.job) == self.selected.as_ref())
    }

    /// The runs of the job that is looked at, newest first.
    pub(super) fn runs(&self) -> Vec<RunView> {
        let Some(job) = self.job() else { return vec![] };
        let mut runs: Vec<RunView> = job.running.clone();
        runs.sort_by_key(|r| std::cmp::Reverse((r.occurrence, r.attempt)));
        let ended = self.records.get(&job.job).into_iter().flatten();
        // A run that ended between two reads is in both.
        let ended = ended.filter(|r| job.running.iter().all(|open| r.run_id != open.run_id));
        runs.extend(ended.cloned().map(RunView::from));
        runs
    }

    /// Which of [`State::runs`] is selected.
    pub(super) fn run_at(&self, runs: &[RunView]) -> usize {
        let selected = runs
            .iter()
            .position(|r| Some((r.occurrence, r.attempt)) == self.run);
        selected.unwrap_or(0)
    }

    pub(super) fn open(&mut self, job: JobName) {
        self.selected = Some(job);
        self.before = std::mem::replace(&mut self.screen, Screen::Job);
        (self.run, self.back, self.why) = (None, 0, None);
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Act> {
        use KeyCode as K;
        self.said = None;
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                K::Char('c') => Some(Act::Quit),
                K::Char('z') => Some(Act::Suspend),
                K::Char('l') => Some(Act::Redraw),
                _ => None,
            };
        }
        let typed = self.question.as_ref().is_some_and(|q| !q.fields.is_empty());
        if key.code == K::Char('q') && !typed {
            return Some(Act::Quit);
        }
        if std::mem::take(&mut self.help) {
            return None;
        }
        if self.question.is_some() {
            return self.answer(key.code);
        }
        match key.code {
            K::Esc | K::Left | K::Backspace if self.why.is_some() => self.why = None,
            K::Esc | K::Left | K::Backspace if self.screen == Screen::Job => {
                self.screen = self.before;
            }
            K::Esc => self.filter.clear(),
            K::Char('1') => self.screen = Screen::Jobs,
            K::Char('2') => self.screen = Screen::Timeline,
            K::Char('3') => self.screen = Screen::Instances,
            K::Char('+' | '=') => self.zoom = self.zoom.saturating_sub(1),
            K::Char('-') => self.zoom = (self.zoom + 1).min(ZOOM_MOST),
            K::Tab if self.screen == Screen::Jobs => self.screen = Screen::Timeline,
            K::Tab if self.screen == Screen::Timeline => self.screen = Screen::Instances,
            K::Tab => self.screen = Screen::Jobs,
            K::Enter | K::Right if matches!(self.screen, Screen::Jobs | Screen::Timeline) => {
                let listed = self.listed();
                let job = listed.get(self.at(&listed)).map(|j| j.job.clone());
                job.into_iter().for_each(|job| self.open(job));
            }
            K::Char('?' | 'h') => self.help = true,
            K::Up | K::Char('k') => self.step(-1),
            K::Down | K::Char('j') => self.step(1),
            K::PageUp if self.screen == Screen::Job => {
                let lines = self.text.text.lines().count();
                self.back = (self.back + PAGE.unsigned_abs()).min(lines);
            }
            K::PageDown if self.screen == Screen::Job => {
                self.back = self.back.saturating_sub(PAGE.unsigned_abs());
            }
            K::PageUp => self.step(-PAGE),
            K::PageDown => self.step(PAGE),
            K::Home | K::Char('g') => self.step(isize::MIN),
            K::End | K::Char('G') => self.step(isize::MAX),
            K::Char('w') if self.screen == Screen::Job => {
                let runs = self.runs();
                let run = runs.get(self.run_at(&runs))?;
                return Some(Act::Why(run.job.clone(), Occurrence(run.occurrence.0)));
            }
            K::Char(c) => self.question = self.asked(c),
            _ => {}
        }
        None
    }

    fn step(&mut self, by: isize) {
        let moved = |at: usize, all: usize| at.saturating_add_signed(by).min(all.saturating_sub(1));
        match self.screen {
            Screen::Instances => {
                let all = self.status.as_ref().map_or(0, |s| s.instances.len());
                self.instance = moved(self.instance, all);
            }
            Screen::Job => {
                let runs = self.runs();
                let at = moved(self.run_at(&runs), runs.len());
                // The newest one stays the newest.
                let run = runs.get(at).filter(|_| at > 0);
                self.run = run.map(|r| (r.occurrence, r.attempt));
                (self.back, self.why) = (0, None);
            }
            Screen::Jobs | Screen::Timeline => {
                let listed = self.listed();
                let job = listed.get(moved(self.at(&listed), listed.len()));
                self.selected = job.map(|j| j.job.clone()).or(self.selected.take());
            }
        }
    }

    /// What the key of an act asks.
    fn asked(&self, key: char) -> Option<Question> {
        let (act, text) = match (self.screen, key) {
            (Screen::Instances, 'd' | 'u') => {
                let i = self.status.as_ref()?.instances.get(self.instance)?;
                let name = words::line(i.instance.as_str());
                let text = match key {
                    'd' => format!(
                        "Drain {name}? It claims nothing more and finishes its active runs."
                    ),
                    _ => format!("Undrain {name}? It claims again."),
                };
                (Act::Drain(i.instance.clone(), key == 'd'), text)
            }
            (Screen::Instances, _) => return None,
            (Screen::Jobs | Screen::Timeline, '/') => {
                let text = "List only jobs with this in the name?".to_owned();
                (Act::Find(self.filter.clone()), text)
            }
            _ => self.asked_of_job(key)?,
        };
        let fields = match &act {
            Act::Pause(..) => vec![("reason", String::new()), ("until", String::new())],
            Act::Skip(..) => vec![("how many", String::new())],
            Act::Find(text) => vec![("name", text.clone())],
            _ => vec![],
        };
        Some(Question {
            act,
            text,
            fields,
            field: 0,
        })
    }

    fn asked_of_job(&self, key: char) -> Option<(Act, String)> {
        // Nothing is done to what nobody sees.
        let listed = self.listed();
        let job = match self.screen {
            Screen::Job => self.job(),
            _ => listed.get(self.at(&listed)).copied(),
        };
        let job = &job?.job;
        let (act, text) = match key {
            't' => (
                Act::Trigger(job.clone()),
                "Run _ once now, on one instance?",
            ),
            'p' => (
                Act::Pause(job.clone(), String::new(), String::new()),
                "Pause _ on all instances? What runs goes on.",
            ),
            'r' => (Act::Resume(job.clone()), "End the pause of _?"),
            's' => (
                Act::Skip(job.clone(), 1),
                "Skip the next occurrences of _? 0 takes a skip back.",
            ),
            'c' => (
                Act::Cancel(job.clone()),
                "End the active runs of _, on all instances?",
            ),
            _ => return None,
        };
        Some((act, text.replacen('_', job.as_str(), 1)))
    }

    fn answer(&mut self, key: KeyCode) -> Option<Act> {
        let mut q = self.question.take()?;
        let fields = q.fields.len();
        match (key, fields) {
            (KeyCode::Esc, _) | (KeyCode::Char('n' | 'N'), 0) => return None,
            (KeyCode::Char('y' | 'Y') | KeyCode::Enter, 0) => return Some(q.act),
            (KeyCode::Enter, _) => match answered(&q) {
                Some(Act::Find(text)) => {
                    self.filter = text;
                    // What is selected must be on the screen.
                    self.step(0);
                    return None;
                }
                Some(act) => return Some(act),
                None => self.said = Some(("write a number, as 1".to_owned(), false)),
            },
            (KeyCode::Tab | KeyCode::Down | KeyCode::Up, 1..) => q.field = (q.field + 1) % fields,
            (KeyCode::Backspace, 1..) => drop(q.fields[q.field].1.pop()),
            (KeyCode::Char(c), 1..) if q.fields[q.field].1.len() < 200 => {
                q.fields[q.field].1.push(c)
            }
            _ => {}
        }
        self.question = Some(q);
        None
    }
}

/// The act with what was entered. None: that is no number.
fn answered(q: &Question) -> Option<Act> {
    let field = |n: usize| q.fields[n].1.trim().to_owned();
    Some(match q.act.clone() {
        Act::Pause(job, ..) => Act::Pause(job, field(0), field(1)),
        Act::Skip(job, _) => Act::Skip(job, field(0).parse().ok()?),
        Act::Find(_) => Act::Find(field(0)),
        act => act,
    })
}
