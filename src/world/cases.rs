//! What the worlds ask the store, written down as cases for every store: a state, a question, the answer, and the state
//! after it.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    logic::claim::{Answered, Effects, Question, State},
    model::LAST_MS,
};

/// A question that a world asked, and what came of it by the rules.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Case {
    /// The store's clock.
    now_us: i64,
    incarnation: String,
    /// None: the store knows nothing of the job.
    before: Option<State>,
    question: Question,
    answer: Answered,
    after: Option<State>,
    effects: Effects,
}

thread_local! {
    static BOOK: RefCell<Option<BTreeMap<String, Case>>> = const { RefCell::new(None) };
}

/// Carries out `f`, and returns what was asked meanwhile: of all questions that differ in names and times only, but not
/// in which of them are equal or come first, one. In an order of no meaning.
pub(crate) fn collect(f: impl FnOnce()) -> Vec<Case> {
    BOOK.set(Some(BTreeMap::new()));
    f();
    let book = BOOK.take().unwrap_or_default();
    book.into_values().collect()
}

/// The answer to a question, which [`collect`] writes down.
pub(super) fn decide(
    question: &Question,
    state: &mut Option<State>,
    now_us: i64,
    incarnation: &str,
    effects: &mut Effects,
) -> Answered {
    let before = BOOK.with_borrow(Option::is_some).then(|| state.clone());
    let mut own = Effects::default();
    let answer = question.decide(state, now_us, incarnation, &mut own);
    if let Some(before) = before {
        let case = Case {
            now_us,
            incarnation: incarnation.to_owned(),
            before,
            question: question.clone(),
            answer: answer.clone(),
            after: state.clone(),
            effects: own.clone(),
        };
        BOOK.with_borrow_mut(|book| {
            if let Some(book) = book {
                book.entry(shape(&case)).or_insert(case);
            }
        });
    }
    effects.records.append(&mut own.records);
    effects.joined.append(&mut own.joined);
    effects.events.append(&mut own.events);
    answer
}

/// Numbers from here to the last possible time are times in ms.
const FIRST_TIME: i64 = 1_000_000_000_000;

/// The members whose values are names.
const NAMES: [&str; 9] = [
    "run",
    "run_id",
    "instance",
    "host",
    "key",
    "incarnation",
    "job",
    "adopt",
    "holds",
];

/// State and question with their times as ranks, and their names as numbers.
fn shape(case: &Case) -> String {
    let mut shape = json(&(&case.before, &case.question));
    let now = case.now_us.div_euclid(1000);
    let mut times = vec![now];
    each(&mut shape, "", &mut |_, v| {
        times.extend(time(v));
    });
    times.sort_unstable();
    times.dedup();
    let rank = |at: i64| times.partition_point(|t| *t < at);
    let mut names = vec![case.incarnation.clone()];
    each(&mut shape, "", &mut |member, v| {
        if let Some(at) = time(v) {
            *v = rank(at).into();
        } else if let Some(name) = name(member, v) {
            let known = names.iter().position(|n| *n == name);
            *v = known.unwrap_or(names.len()).into();
            if known.is_none() {
                names.push(name);
            }
        } else if let Some(text) = undated(v) {
            *v = text.into();
        }
    });
    format!("{} {} {shape}", rank(now), case.now_us % 1000 == 0)
}

impl Case {
    /// What can be said about the case: of each time, whether it has come; of each name, whether it is the present
    /// incarnation; of other numbers only whether they are 0; and what is not there.
    fn traits(&self) -> BTreeSet<String> {
        let mut of = json(&(&self.before, &self.question, &self.answer, &self.effects));
        let mut traits = BTreeSet::new();
        each(&mut of, "", &mut |member, v| {
            let word = if let Some(at) = time(v) {
                (at * 1000).cmp(&self.now_us) as i64
            } else if let Some(name) = name(member, v) {
                (name == self.incarnation).into()
            } else if let Some(n) = v.as_i64() {
                n.signum()
            } else if let Some(text) = undated(v) {
                traits.insert(format!("{member} {text}"));
                return;
            } else {
                traits.insert(format!("{member} {v}"));
                return;
            };
            traits.insert(format!("{member} {word}"));
        });
        traits
    }
}

fn json(v: &impl Serialize) -> Value {
    serde_json::to_value(v).expect("soloist's own types")
}

fn time(v: &Value) -> Option<i64> {
    v.as_i64().filter(|n| (FIRST_TIME..=LAST_MS).contains(n))
}

fn name(member: &str, v: &Value) -> Option<String> {
    let name = v.as_str().filter(|_| NAMES.contains(&member));
    name.map(str::to_owned)
}

/// A text that ends with a time, without it.
fn undated(v: &Value) -> Option<String> {
    let (text, time) = v.as_str()?.rsplit_once(' ')?;
    let dated = time.parse::<jiff::Timestamp>().is_ok();
    dated.then(|| text.to_owned())
}

/// Does `f` to each value that has no parts, with the name of the member that it belongs to.
fn each(v: &mut Value, member: &str, f: &mut impl FnMut(&str, &mut Value)) {
    match v {
        Value::Array(all) => all.iter_mut().for_each(|v| each(v, member, f)),
        Value::Object(all) => all.iter_mut().for_each(|(k, v)| each(v, k, f)),
        v => f(member, v),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::{Case, collect, decide};
    use crate::{
        logic::{
            attempts,
            claim::{
                Claim, Effects, Last, Missed, NEVER, NextAttempt, Observed, OnCrash, Open, Overlap,
                PASSED, PASSED_IN_DOUBT, Pause, Pending, Question, REMOVED, Renew, Settle, State,
                StopRequest, Target, Triggered,
            },
        },
        model::{InstanceId, JobName, Occurrence, Outcome, Run, RunId, RunRecord, Trigger, Wait},
        world::explore::{number, walk_each},
    };

    const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases.jsonl");

    fn text<'a>(cases: impl IntoIterator<Item = &'a Case>) -> String {
        let line = |c: &Case| serde_json::to_string(c).expect("soloist's own types") + "\n";
        cases.into_iter().map(line).collect()
    }

    /// So many that each two traits that some case has together are together in one of them.
    fn few(cases: &[Case]) -> Vec<&Case> {
        let mut met = BTreeSet::new();
        let mut is_new = |case: &&Case| {
            let traits: Vec<String> = case.traits().into_iter().collect();
            let before = met.len();
            for (i, a) in traits.iter().enumerate() {
                met.extend(traits[..i].iter().map(|b| format!("{a} {b}")));
            }
            met.len() > before
        };
        cases.iter().filter(|case| is_new(case)).collect()
    }

    const T: i64 = 1_800_000_000_000;

    fn run(n: u128, at: i64, attempt: u32) -> Run {
        Run {
            id: RunId(uuid::Uuid::from_u128(n)),
            attempt,
            lease: 1000,
            definition: "d".to_owned(),
            ..Run::first(at)
        }
    }

    fn held(n: u128, at: i64, attempt: u32) -> Open {
        Open {
            run: run(n, at, attempt),
            seq: 3,
            renewed_at: at + 500,
            ..Open::first(at)
        }
    }

    fn awaited(n: u128, at: i64, trigger: Trigger) -> Open {
        Open {
            next_attempt: Some(NextAttempt { at, trigger }),
            ..held(n, at, 1)
        }
    }

    fn asks(at: i64) -> Claim {
        Claim {
            job: JobName::new("j0"),
            target: Target::Scheduled(Occurrence(at)),
            known: Occurrence(0),
            missed: vec![],
            run: RunId(uuid::Uuid::from_u128(99)),
            instance: InstanceId::new("b"),
            host: "b".to_owned(),
            trigger: Trigger::Schedule,
            start_by: at + 60_000,
            lease: 1000,
            overlap: Overlap::Skip,
            on_crash: OnCrash::Rerun,
            max_attempts: 3,
            definition: "d".to_owned(),
            observed: None,
            holds: vec![],
            cause: None,
        }
    }

    /// What no world asks, because it needs a changed policy, a corrected clock or several losses.
    // Long: one case after the other.
    fn corners() -> Vec<Case> {
        let known = || State {
            incarnation: "i".to_owned(),
            schedule: "s".to_owned(),
            definition: "d".to_owned(),
            newest: T - 60_000,
            ..State::default()
        };
        let seen = |e: &Open| {
            Some(Observed {
                run: e.run.id,
                seq: e.seq,
                incarnation: e.incarnation.clone(),
            })
        };
        let mut all: Vec<(State, Question)> = vec![];
        let mut claim = |st: State, c: Claim| all.push((st, Question::Claim(c.into())));
        // A dead run before, or behind, an awaited attempt; one that was asked to end has no other attempt.
        let dead = held(1, T - 2000, 1);
        let stopped = Open {
            stop: Some(StopRequest::Cancelled),
            ..dead.clone()
        };
        for dead in [dead, stopped] {
            for dead_first in [true, false] {
                let mut open = vec![awaited(2, T - 1000, Trigger::Takeover)];
                open.insert(usize::from(!dead_first), dead.clone());
                let st = State {
                    newest: T - 1000,
                    open,
                    ..known()
                };
                let observed = seen(&dead);
                claim(
                    st,
                    Claim {
                        observed,
                        ..asks(T - 1000)
                    },
                );
            }
        }
        // A retry gives way, and the run behind it lives.
        let st = State {
            newest: T - 1000,
            open: vec![awaited(1, T - 2000, Trigger::Retry), held(2, T - 1000, 1)],
            ..known()
        };
        let holds = vec![RunId(uuid::Uuid::from_u128(2))];
        claim(st, Claim { holds, ..asks(T) });
        // What ran early divides what a loss kept back; what was removed, and what was due before the loss, is no part.
        let lost = |early: &[i64], lost_before| State {
            lost_before,
            lost_until: T,
            early: early.iter().copied().map(Occurrence).collect(),
            ..known()
        };
        for (early, lost_before, start_by) in [
            (vec![T - 30_000], 0, NEVER),
            (vec![T - 60_000, T - 15_000], 0, NEVER),
            (vec![], 0, REMOVED),
            (vec![], T - 40_000, NEVER),
            (vec![], T - 40_000, T + 60_000),
        ] {
            let missed = [T - 50_000, T - 40_000, T - 20_000];
            let missed = missed.map(|at| Missed::one(Occurrence(at))).to_vec();
            claim(
                lost(&early, lost_before),
                Claim {
                    missed,
                    start_by,
                    ..asks(T - 10_000)
                },
            );
        }
        // What a new fleet waited for does not run, whatever else there is to say of it.
        let first = |early: &[i64]| State {
            first_wait: true,
            lost_why: "the store was new, and granted nothing until then".to_owned(),
            skip: 1,
            ..lost(early, T - 90_000)
        };
        for (early, start_by) in [
            (vec![], T + 60_000),
            (vec![], PASSED_IN_DOUBT),
            (vec![], REMOVED),
            (vec![T - 15_000], T + 60_000),
        ] {
            let missed = [T - 50_000, T - 20_000];
            let missed = missed.map(|at| Missed::one(Occurrence(at))).to_vec();
            claim(
                first(&early),
                Claim {
                    missed,
                    start_by,
                    ..asks(T - 10_000)
                },
            );
        }
        // What a pause kept from running is one record, also if it comes late.
        for (until, start_by, early) in [
            (None, NEVER, vec![]),
            (None, T + 60_000, vec![]),
            (None, REMOVED, vec![]),
            (Some(T - 10_000), NEVER, vec![]),
            (Some(T - 10_000), PASSED_IN_DOUBT, vec![T - 30_000]),
            (Some(T - 5000), PASSED, vec![T - 15_000]),
        ] {
            let pause = Pause {
                until,
                reason: Some("by \"hand\" / now".to_owned()),
                at: T - 45_000,
                by: None,
            };
            let missed = [T - 50_000, T - 40_000, T - 20_000];
            let missed = missed.map(|at| Missed::one(Occurrence(at))).to_vec();
            claim(
                State {
                    pause: Some(pause),
                    early: early.into_iter().map(Occurrence).collect(),
                    ..known()
                },
                Claim {
                    missed,
                    start_by,
                    cause: Some(Wait::Overdue),
                    ..asks(T - 10_000)
                },
            );
        }
        // It ran early, and is the one that ended last.
        let st = State {
            early: vec![Occurrence(T - 1000)],
            last: Some(Last {
                occurrence: Occurrence(T - 1000),
                attempt: 1,
                run: RunId(uuid::Uuid::from_u128(1)),
                instance: InstanceId::new("a"),
                outcome: Outcome::Succeeded,
                from: T - 2000,
                started: Some(T - 1990),
                to: T - 1500,
                ended: None,
            }),
            ..known()
        };
        claim(st, asks(T - 1000));
        // A trigger without room is given up at a whole second.
        let st = State {
            newest: T + 60_000,
            triggers: vec![Pending {
                key: "k".to_owned(),
                at: T,
                by: None,
            }],
            ..known()
        };
        let target = Target::Manual {
            key: "k".to_owned(),
            before: None,
        };
        let trigger = Trigger::Manual;
        claim(
            st,
            Claim {
                target,
                trigger,
                start_by: PASSED,
                cause: Some(Wait::Slot),
                ..asks(T)
            },
        );
        // An older state, in which an attempt before ours, or a later one, is open; and what it knows of our key.
        let older = |open: Vec<Open>| State {
            incarnation: "before".to_owned(),
            newest: T,
            open,
            ..known()
        };
        let pending = |key: &str| Pending {
            key: key.to_owned(),
            at: T,
            by: None,
        };
        let used = Triggered {
            key: "k".to_owned(),
            occurrence: Occurrence(T),
            at: T,
        };
        for (attempt, triggers, triggered) in [
            (1, vec![], vec![]),
            (2, vec![pending("k"), pending("other")], vec![]),
            (3, vec![], vec![]),
            (1, vec![pending("other")], vec![used]),
        ] {
            let st = State {
                triggers,
                triggered,
                ..older(vec![held(1, T, attempt), held(4, T - 5000, 1)])
            };
            let mut ours = run(2, T, 2);
            (ours.key, ours.trigger) = (Some("k".to_owned()), Trigger::Manual);
            let renew = Renew {
                job: JobName::new("j0"),
                run: ours.clone(),
                seq: 7,
                late: false,
                reclaim: String::new(),
            };
            for reclaim in ["", "i", "another"] {
                let renew = Renew {
                    reclaim: reclaim.to_owned(),
                    ..renew.clone()
                };
                all.push((st.clone(), Question::Renew(renew.into())));
            }
            let record = RunRecord::of(&JobName::new("j0"), &ours);
            let settle = Settle {
                run: ours.id,
                record: RunRecord {
                    outcome: Outcome::Failed,
                    ..record.lasting(Some(T), Some(T + 500))
                },
                next_attempt: None,
            };
            all.push((st, Question::Settle(settle.into())));
        }
        // A run that was found dead was never executed, and what is open beside it is older.
        let never = held(5, T, 1);
        let st = State {
            newest: T,
            open: vec![held(4, T - 5000, 1)],
            last: Some(Last {
                occurrence: Occurrence(T),
                attempt: 1,
                run: never.run.id,
                instance: InstanceId::new("a"),
                outcome: Outcome::Unknown,
                from: T,
                started: Some(T),
                to: T + 500,
                ended: Some(T + 2000),
            }),
            lapsed: Some(never.clone().into()),
            ..known()
        };
        let settle = Settle {
            run: never.run.id,
            record: RunRecord {
                outcome: Outcome::Crashed,
                ..RunRecord::of(&JobName::new("j0"), &never.run).lasting(Some(T), Some(T + 500))
            },
            next_attempt: attempts::after_no_start(1),
        };
        all.push((st, Question::Settle(settle.into())));
        let ask = || {
            for (st, question) in &all {
                let (mut state, mut effects) = (Some(st.clone()), Effects::default());
                let now_us = (T + 1000) * 1000;
                let _ = decide(question, &mut state, now_us, "i", &mut effects);
            }
        };
        collect(ask)
    }

    /// tests/it/cases.rs asks each store the questions of these cases.
    #[test]
    fn the_kept_cases_are_those_of_the_worlds() {
        if std::env::var_os("SOLOIST_WRITE_CASES").is_some() {
            let cases = collect(|| walk_each(10, |_, _, _| {}));
            let corners = corners();
            let all = few(&cases).into_iter().chain(&corners);
            fs::write(FILE, text(all)).expect("write the cases");
        }
        let lines = fs::read_to_string(FILE).expect("read the cases");
        let read = |line: &str| serde_json::from_str(line).expect("a case");
        let kept: Vec<Case> = lines.lines().map(read).collect();
        for case in &kept {
            let (mut state, mut effects) = (case.before.clone(), Effects::default());
            let answer =
                case.question
                    .decide(&mut state, case.now_us, &case.incarnation, &mut effects);
            let by_the_rules = (answer, state, effects);
            let kept = (
                case.answer.clone(),
                case.after.clone(),
                case.effects.clone(),
            );
            assert_eq!(by_the_rules, kept, "the rules differ (left) from {FILE}");
        }
        let traits =
            |cases: &[Case]| -> BTreeSet<String> { cases.iter().flat_map(Case::traits).collect() };
        for corner in corners() {
            assert!(kept.contains(&corner), "no kept case: {corner:?}");
        }
        let asked = traits(&collect(|| walk_each(1, |_, _, _| {})));
        let kept = traits(&kept);
        let missing: Vec<&String> = asked.difference(&kept).collect();
        assert!(
            missing.is_empty(),
            "worlds ask what no kept case does: {missing:?}; run this test with SOLOIST_WRITE_CASES=1"
        );
    }

    /// SOLOIST_SEEDS and SOLOIST_CASES say how many seeds, and where to.
    #[test]
    #[ignore = "writes as many cases as one likes"]
    fn write_all_cases() {
        let seeds = number("SOLOIST_SEEDS", 10) as u64;
        let file = std::env::var("SOLOIST_CASES").unwrap_or_else(|_| "cases.jsonl".to_owned());
        let cases = collect(|| walk_each(seeds, |_, _, _| {}));
        fs::write(&file, text(&cases)).expect("write the cases");
        println!("{} cases of {seeds} seeds in {file}", cases.len());
    }
}
