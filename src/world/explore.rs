//! Tries what can happen: all of it, in small worlds, by stateright; or what a seed chooses, in larger ones.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use stateright::{Checker, HasDiscoveries, Model, Property};

use super::{Choice, Fault, Plan, World};
use crate::{logic::bent::Rule, model::Outcome};

/// A plan whose worlds stateright visits.
struct Fleet(Arc<Plan>);

impl Model for Fleet {
    type State = World;
    type Action = Choice;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.0.clone())]
    }
    fn actions(&self, world: &World, actions: &mut Vec<Choice>) {
        actions.extend(world.choices());
    }
    fn next_state(&self, world: &World, choice: Choice) -> Option<World> {
        let mut next = world.clone();
        next.apply(choice);
        // Where there is no choice, nothing is to be compared with what came before.
        while let [only] = next.choices()[..] {
            next.apply(only);
        }
        Some(next)
    }
    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("the promises hold", |_, world: &World| {
            world.broken.is_none()
        })]
    }
}

/// What was visited.
#[derive(Debug)]
pub(crate) struct Visited {
    pub(crate) states: usize,
    pub(crate) took: Duration,
    /// The choices that lead to a broken promise, and what was broken.
    pub(crate) broken: Option<(Vec<Choice>, String)>,
}

/// Visits all that can happen, or `most` states of it.
pub(crate) fn visit_all(plan: Plan, most: usize) -> Visited {
    let begun = Instant::now();
    let plan = Arc::new(plan);
    let checker = Fleet(plan)
        .checker()
        .threads(2)
        .target_state_count(most)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let broken = checker.discovery("the promises hold").map(|path| {
        let last = path.last_state().broken.clone().unwrap_or_default();
        (path.into_actions(), last)
    });
    Visited {
        states: checker.unique_state_count(),
        took: begun.elapsed(),
        broken,
    }
}

/// What `seed` chooses, to the end; with all choices that it made.
pub(crate) fn walk(plan: &Arc<Plan>, seed: u64) -> (World, Vec<Choice>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(plan.clone());
    let mut made = vec![];
    loop {
        let all = world.choices();
        if all.is_empty() {
            return (world, made);
        }
        let pick = |rng: &mut fastrand::Rng, of: &[Choice]| of[rng.usize(0..of.len())];
        let (quiet, loud): (Vec<Choice>, Vec<Choice>) = all
            .into_iter()
            .partition(|c| matches!(c, Choice::Time | Choice::Deliver(_)));
        let choice = match rng.u8(0..100) {
            0..8 if !loud.is_empty() => {
                // Each kind as often as the others, however many ways it has.
                let kinds: BTreeSet<Fault> = loud.iter().filter_map(kind).collect();
                let kinds: Vec<Fault> = kinds.into_iter().collect();
                let one = kinds[rng.usize(0..kinds.len())];
                let ways: Vec<Choice> = loud.into_iter().filter(|c| kind(c) == Some(one)).collect();
                pick(&mut rng, &ways)
            }
            _ => pick(&mut rng, &quiet),
        };
        made.push(choice);
        world.apply(choice);
    }
}

fn kind(choice: &Choice) -> Option<Fault> {
    match choice {
        Choice::Fault(fault, ..) | Choice::Over(fault, _) => Some(*fault),
        Choice::Time | Choice::Deliver(_) => None,
    }
}

/// The same choices again, told line by line.
pub(crate) fn story(plan: &Arc<Plan>, choices: &[Choice]) -> String {
    let mut world = World::new(plan.clone());
    world.story = Some(vec![]);
    for choice in choices {
        world.apply(*choice);
        if world.broken.is_some() {
            break;
        }
    }
    while let [only] = world.choices()[..] {
        world.apply(only);
    }
    world.story.unwrap_or_default().join("\n")
}

/// As [`story`], of choices after each of which stateright took those that had no alternative.
pub(crate) fn story_of_visit(plan: &Arc<Plan>, choices: &[Choice]) -> String {
    let mut world = World::new(plan.clone());
    world.story = Some(vec![]);
    for choice in choices {
        world.apply(*choice);
        while let [only] = world.choices()[..] {
            world.apply(only);
        }
    }
    world.story.unwrap_or_default().join("\n")
}

const QUEUE: &str = "overlap = \"queue\"\nstart_within = \"4s\"";
const POLICIES: [&str; 7] = [
    "",
    QUEUE,
    "on_crash = \"rerun\"\nmax_attempts = 4",
    "on_crash = \"rerun\"\nmax_attempts = 4\noverlap = \"queue\"\nstart_within = \"4s\"",
    "retry = { attempts = 2, interval = \"300ms\" }",
    "overlap = \"replace\"\ncatch_up = \"all\"",
    "overlap = \"allow\"\non_crash = \"rerun\"",
];

/// What goes wrong together: everything, and groups in which each is more frequent.
const WEATHERS: [&[Fault]; 6] = [
    Fault::ALL,
    &[Fault::Lose, Fault::Slow, Fault::Freeze, Fault::Kill],
    &[
        Fault::Flush,
        Fault::Reboot,
        Fault::Cut,
        Fault::Freeze,
        Fault::Kill,
        Fault::Pause,
    ],
    &[
        Fault::Trigger,
        Fault::Rollback,
        Fault::Drain,
        Fault::Slow,
        Fault::Cancel,
    ],
    &[Fault::Clock, Fault::Kill, Fault::Slow, Fault::Down],
    &[
        Fault::Slow,
        Fault::Kill,
        Fault::Cancel,
        Fault::Trigger,
        Fault::Flush,
    ],
];

/// Three instances, thirty seconds, eight faults.
fn walked(
    weather: usize,
    policy: usize,
    seed: u64,
    bent: Option<Rule>,
) -> (World, Vec<Choice>, Arc<Plan>) {
    let mut plan = Plan::new("walk", &[POLICIES[policy]], 3).with(8, WEATHERS[weather]);
    plan = plan.lasting(Duration::from_secs(30));
    (plan.all_orders, plan.bent) = (true, bent);
    let plan = Arc::new(plan);
    let (world, choices) = walk(&plan, seed);
    (world, choices, plan)
}

/// Walks with each seed below `seeds` through each weather with each policy. `f` gets the world at its end, its story,
/// and what leads to it.
pub(crate) fn walk_each(seeds: u64, mut f: impl FnMut(World, &dyn Fn() -> String, &str)) {
    for seed in 0..seeds {
        for weather in 0..WEATHERS.len() {
            for policy in 0..POLICIES.len() {
                let (world, choices, plan) = walked(weather, policy, seed, None);
                let name = format!("seed {seed}, weather {weather}, policy {policy}");
                f(world, &|| story(&plan, &choices), &name);
            }
        }
    }
}

/// A number from the environment.
pub(crate) fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |n| n.parse().expect("a number"))
}

/// Seeds 0 to SOLOIST_SEEDS (default 10), each with every weather and policy.
#[test]
fn the_promises_hold_whatever_happens() {
    let (mut reached, mut worlds) = (BTreeSet::new(), 0);
    let seeds = number("SOLOIST_SEEDS", 10) as u64;
    let begun = Instant::now();
    walk_each(seeds, |world, told, name| {
        worlds += 1;
        let broken = &world.broken;
        assert!(broken.is_none(), "{name}: {broken:?}\n{}", told());
        reached.extend(world.reached);
    });
    println!("{worlds} worlds in {:?}", begun.elapsed());
    // What these worlds are for does happen in them.
    let all = [
        "believed again",
        "blocked",
        "cancelled",
        "catch-up",
        "crashed",
        "doubt",
        "drained before the answer",
        "granted too late",
        "killed",
        "lease lost",
        "lost",
        "missed",
        "never started",
        "quarantine",
        "replaced",
        "retry",
        "run first",
        "settled by a guard",
        "skipped",
        "takeover",
        "trigger",
        "unknown",
    ];
    if seeds >= 15 {
        let missing: Vec<_> = all.iter().filter(|what| !reached.contains(*what)).collect();
        assert!(
            missing.is_empty(),
            "{missing:?} did not happen in {reached:?}"
        );
    }
}

/// Two instances, three seconds, one fault: up to SOLOIST_STATES states (default 5,000) of each policy.
#[test]
fn what_one_fault_can_do_is_visited() {
    let most = number("SOLOIST_STATES", 5_000);
    for lines in [POLICIES[0], POLICIES[3]] {
        let plan = Plan::new("visit", &[lines], 2).with(1, Fault::ALL);
        let plan = plan.lasting(Duration::from_secs(3));
        let visited = visit_all(plan.clone(), most);
        println!("{lines:?}: {} states in {:?}", visited.states, visited.took);
        if let Some((choices, broken)) = visited.broken {
            panic!("{broken}\n{}", story_of_visit(&Arc::new(plan), &choices));
        }
        assert!(visited.states > most / 4, "only {} states", visited.states);
    }
}

/// Where the walks find that a rule is out: the weather, the policy, and the first seed that does.
const FOUND: [(Rule, usize, usize, u64); 30] = [
    (Rule::DecidedStaysDecided, 1, 0, 0),
    (Rule::KeysAreRemembered, 0, 0, 0),
    (Rule::PauseHolds, 0, 4, 0),
    (Rule::OverlapIsLookedAt, 0, 0, 0),
    (Rule::LapseNeedsProof, 0, 0, 0),
    (Rule::TakeoverNeedsProof, 0, 2, 0),
    (Rule::OtherDataGrantsNothing, 3, 4, 9),
    (Rule::RepeatedGrantIsSeen, 1, 2, 115),
    (Rule::FailMeansOnce, 0, 2, 14),
    (Rule::StoppedIsNotRetried, 5, 2, 192),
    (Rule::NewerHasItsTurn, 1, 4, 40),
    (Rule::LostTriggersDoNotRun, 0, 5, 313),
    (Rule::PauseIsToldAgain, 0, 1, 2),
    (Rule::KeysAreToldAgain, 5, 6, 35),
    (Rule::QuarantineIsWaitedOut, 5, 0, 1),
    (Rule::VouchedAfterQuarantine, 2, 4, 417),
    (Rule::JumpsAreDoubted, 0, 1, 2),
    (Rule::LeaseLapsesAtItsEnd, 0, 0, 0),
    (Rule::ChangeBeginsAnew, 0, 2, 0),
    (Rule::DeadlineEnds, 1, 0, 5),
    (Rule::DaemonsDeathEnds, 1, 5, 0),
    (Rule::AttemptsAreBounded, 1, 3, 17),
    (Rule::StoppedIsNotTakenUp, 0, 2, 77),
    (Rule::PauseHoldsAttempts, 0, 2, 12),
    (Rule::GrantIsRemembered, 1, 5, 23),
    (Rule::SettlesItsRun, 0, 6, 0),
    (Rule::RenewsItsRun, 1, 6, 1),
    (Rule::CancelDropsTheNext, 5, 5, 71),
    (Rule::KeysRunOnce, 3, 6, 0),
    (Rule::KillFollows, 1, 5, 0),
];

#[test]
fn a_rule_that_is_taken_out_is_missed() {
    for (rule, weather, policy, first) in FOUND {
        // After a change of the program it may be another seed.
        let seeds = first..first + number("SOLOIST_SEEDS", 800) as u64;
        let broken = seeds.into_iter().find_map(|seed| {
            let (world, ..) = walked(weather, policy, seed, Some(rule));
            world.broken.map(|how| (seed, how))
        });
        let (seed, how) = broken.unwrap_or_else(|| panic!("no world misses {rule:?}"));
        println!("{rule:?}: seed {seed}: {how}");
    }
}

/// Worlds beyond the first seeds that a fault of the worlds themselves once broke.
#[test]
fn what_broke_once_holds() {
    for (weather, policy, seed) in [(4, 4, 21), (5, 5, 95), (0, 4, 115)] {
        let (world, ..) = walked(weather, policy, seed, None);
        assert!(world.broken.is_none(), "seed {seed}: {:?}", world.broken);
    }
}

/// Searches all weathers and policies for a world that misses each rule, also those that are not in [`FOUND`];
/// SOLOIST_RULE: only this rule.
#[test]
#[ignore = "takes minutes"]
fn search_for_bent_rules() {
    let only = std::env::var("SOLOIST_RULE").ok();
    let wanted = |rule: &&Rule| {
        only.as_ref()
            .is_none_or(|name| format!("{rule:?}") == *name)
    };
    for rule in Rule::ALL.iter().filter(wanted) {
        let begun = Instant::now();
        let pairs = (0..WEATHERS.len()).flat_map(|w| (0..POLICIES.len()).map(move |p| (w, p)));
        let worlds = (0..number("SOLOIST_SEEDS", 700) as u64)
            .flat_map(|seed| pairs.clone().map(move |at| (seed, at)));
        let found = worlds.into_iter().find_map(|(seed, (weather, policy))| {
            let (world, ..) = walked(weather, policy, seed, Some(*rule));
            world.broken.map(|how| (seed, weather, policy, how))
        });
        println!("{rule:?}: {found:?} in {:?}", begun.elapsed());
    }
}

#[test]
fn a_seed_gives_the_same_world_each_time() {
    let [a, b] = [7, 7].map(|seed| {
        let (_, choices, plan) = walked(0, 3, seed, None);
        story(&plan, &choices)
    });
    assert_eq!(a, b);
    assert!(a.lines().count() > 50, "{a}");
}

/// Each has a run that ended by itself, or is skipped for the sake of one.
fn nothing_was_given_up(plan: Plan) {
    let plan = Arc::new(plan);
    for seed in 0..30 {
        let (world, choices) = walk(&plan, seed);
        let well = |outcome| {
            matches!(
                outcome,
                Outcome::Succeeded | Outcome::Failed | Outcome::Skipped
            )
        };
        let ill: Vec<_> = world.outcomes().filter(|o| !well(*o)).collect();
        let broken = &world.broken;
        assert!(
            ill.is_empty() && broken.is_none(),
            "seed {seed}: {ill:?} {broken:?}\n{}",
            story(&plan, &choices)
        );
    }
}

/// Where nobody dies and few messages get lost, nothing that was granted is lost.
#[test]
fn few_losses_cost_no_run() {
    let plan = Plan::new("losses", &[""], 3).with(4, &[Fault::Lose]);
    nothing_was_given_up(plan.lasting(Duration::from_secs(30)));
}

/// Nothing is given up by a store's clock that is wrong for some seconds, where it may start that much later.
#[test]
fn a_wrong_clock_costs_no_run() {
    let lines = "start_within = \"60s\"\ncatch_up = \"all\"";
    let plan = Plan::new("clock", &[lines], 2).with(3, &[Fault::Clock]);
    nothing_was_given_up(plan.lasting(Duration::from_secs(30)));
}
