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

    use super::{Case, collect};
    use crate::{
        logic::claim::Effects,
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

    /// tests/it/cases.rs asks each store the questions of these cases.
    #[test]
    fn the_kept_cases_are_those_of_the_worlds() {
        if std::env::var_os("SOLOIST_WRITE_CASES").is_some() {
            let cases = collect(|| walk_each(10, |_, _, _| {}));
            fs::write(FILE, text(few(&cases))).expect("write the cases");
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
