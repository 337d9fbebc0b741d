//! The ended runs that the board keeps of a job. With 24 runs of each of a thousand jobs they are most of what HTTP
//! takes of memory, so they are packed: about 26 bytes each, most of them the run's id, where the fields take 112.

use serde::{Serialize, Serializer};
use uuid::Uuid;

use super::Recent;
use crate::{
    model::{InstanceId, Outcome, RunId, Trigger},
    view::Time,
};

const TRIGGERS: [Trigger; 5] = [
    Trigger::Schedule,
    Trigger::CatchUp,
    Trigger::Manual,
    Trigger::Retry,
    Trigger::Takeover,
];

// Which fields are there.
const RUN_ID: u8 = 1;
const EXIT_CODE: u8 = 2;
const STARTED: u8 = 4;
const DURATION: u8 = 8;
const LATENESS: u8 = 16;
/// The lateness is the time from the occurrence to the start, as of each first attempt.
const PLAIN_LATENESS: u8 = 32;
const INSTANCE: u8 = 64;
const COUNT: u8 = 128;
/// The end is not that of the start and the duration, as of a run that was never started. It stands with the trigger.
const FINISHED: u8 = 8;

/// Ended runs, in the order in which they were put in.
#[derive(Debug, Clone, PartialEq, Default)]
pub(in crate::http) struct Recents {
    packed: Box<[u8]>,
    /// The names that the runs have.
    instances: Box<[InstanceId]>,
}

impl Recents {
    pub(super) fn of(runs: &[Recent]) -> Self {
        let mut instances: Vec<InstanceId> = vec![];
        let mut packed = vec![];
        let mut before = 0;
        for r in runs {
            let name = r.instance.as_ref().map(|instance| {
                let known = instances.iter().position(|name| name == instance);
                known.unwrap_or_else(|| {
                    instances.push(instance.clone());
                    instances.len() - 1
                })
            });
            pack(&mut packed, r, before, name);
            before = r.occurrence.0;
        }
        Self {
            packed: packed.into(),
            instances: instances.into(),
        }
    }

    pub(in crate::http) fn iter(&self) -> impl Iterator<Item = Recent> {
        let (mut rest, mut before) = (&self.packed[..], 0);
        std::iter::from_fn(move || {
            let run = unpack(&mut rest, before, &self.instances)?;
            before = run.occurrence.0;
            Some(run)
        })
    }
}

impl Serialize for Recents {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(self.iter())
    }
}

/// `before`: the occurrence of the run before it. `name`: the place of its instance's name.
fn pack(out: &mut Vec<u8>, r: &Recent, before: i64, name: Option<usize>) {
    let occurrence = r.occurrence.0;
    let since = |t: Time| t.0.wrapping_sub(occurrence);
    let plain = r.lateness_ms.is_some() && r.lateness_ms == r.started_at.map(since);
    let fields = [
        (RUN_ID, r.run_id.is_some()),
        (EXIT_CODE, r.exit_code.is_some()),
        (STARTED, r.started_at.is_some()),
        (DURATION, r.duration_ms.is_some()),
        (LATENESS, r.lateness_ms.is_some() && !plain),
        (PLAIN_LATENESS, plain),
        (INSTANCE, name.is_some()),
        (COUNT, r.count != 1),
    ];
    let fields = fields.iter().filter(|(_, there)| *there);
    out.push(fields.fold(0, |all, (field, _)| all | field));
    let finished = r.finished_at.filter(|_| r.finished_at != r.usual_end());
    let there = if finished.is_some() { FINISHED } else { 0 };
    out.push(place(&Outcome::ALL, r.outcome) << 4 | there | place(&TRIGGERS, r.trigger));
    if let Some(id) = r.run_id {
        // It begins with the milliseconds when it was made, not long before or after the planned instant.
        let (made, rest) = halves(id);
        out.extend_from_slice(&rest);
        put(out, made.wrapping_sub(occurrence));
    }
    let numbers = [
        Some(occurrence.wrapping_sub(before)),
        Some(i64::from(r.attempt)),
        r.exit_code.map(i64::from),
        r.started_at.map(since),
        r.duration_ms,
        r.lateness_ms.filter(|_| !plain),
        name.map(|name| name as i64),
        (r.count != 1).then_some(r.count as i64),
        finished.map(since),
    ];
    for n in numbers.into_iter().flatten() {
        put(out, n);
    }
}

fn unpack(rest: &mut &[u8], before: i64, instances: &[InstanceId]) -> Option<Recent> {
    let ([fields, kinds], after) = rest.split_first_chunk()?;
    *rest = after;
    let has = |field| fields & field != 0;
    let mut id = None;
    if has(RUN_ID) {
        let (half, after) = rest.split_first_chunk()?;
        *rest = after;
        id = Some((take(rest)?, half));
    }
    let occurrence = take(rest)?.wrapping_add(before);
    let run_id = id.map(|(made, half)| whole(made.wrapping_add(occurrence), half));
    let attempt = take(rest)? as u32;
    let mut number = |there: bool| {
        if there {
            take(rest).map(Some)
        } else {
            Some(None)
        }
    };
    let exit_code = number(has(EXIT_CODE))?.map(|n| n as i32);
    let started = number(has(STARTED))?;
    let duration_ms = number(has(DURATION))?;
    let lateness_ms = number(has(LATENESS))?.or(started.filter(|_| has(PLAIN_LATENESS)));
    let instance = number(has(INSTANCE))?.and_then(|n| instances.get(n as usize));
    let count = number(has(COUNT))?.map_or(1, |n| n as u64);
    let finished = number(kinds & FINISHED != 0)?;
    let run = Recent {
        run_id,
        occurrence: Time(occurrence),
        attempt,
        trigger: *TRIGGERS.get(usize::from(kinds & 7))?,
        outcome: *Outcome::ALL.get(usize::from(kinds >> 4))?,
        exit_code,
        started_at: started.map(|n| Time(n.wrapping_add(occurrence))),
        duration_ms,
        finished_at: None,
        lateness_ms,
        instance: instance.cloned(),
        count,
    };
    let finished_at = finished.map(|n| Time(n.wrapping_add(occurrence)));
    Some(Recent {
        finished_at: finished_at.or(run.usual_end()),
        ..run
    })
}

/// The first six bytes of an id as a number, and the others.
fn halves(id: RunId) -> (i64, [u8; 10]) {
    let all = id.0.as_u128();
    let mut rest = [0; 10];
    rest.copy_from_slice(&id.0.as_bytes()[6..]);
    ((all >> 80) as i64, rest)
}

fn whole(made: i64, rest: &[u8; 10]) -> RunId {
    let mut all = [0; 16];
    all[..6].copy_from_slice(&made.to_be_bytes()[2..]);
    all[6..].copy_from_slice(rest);
    RunId(Uuid::from_bytes(all))
}

fn place<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|o| *o == one).unwrap_or_default() as u8
}

/// Writes a number in as many times seven bits as it needs; one that is below 0, too.
fn put(out: &mut Vec<u8>, n: i64) {
    let mut n = (n << 1 ^ n >> 63) as u64;
    while n > 0x7f {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn take(rest: &mut &[u8]) -> Option<i64> {
    let (mut n, mut bits) = (0, 0);
    loop {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        n |= u64::from(byte & 0x7f) << bits;
        if byte & 0x80 == 0 {
            return Some((n >> 1) as i64 ^ -((n & 1) as i64));
        }
        bits += 7;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_number() -> impl Strategy<Value = i64> {
        prop_oneof![
            Just(i64::MIN),
            Just(i64::MAX),
            any::<i64>(),
            -200_i64..200_000
        ]
    }

    prop_compose! {
        fn a_run()(
            ids in (proptest::option::of(any::<u128>()), proptest::option::of("[a-c]{1,2}")),
            kinds in (0..Outcome::ALL.len(), 0..TRIGGERS.len()),
            numbers in (any_number(), any::<u32>(), any::<u64>()),
            some in (
                proptest::option::of(any::<i32>()),
                proptest::option::of(any_number()),
                proptest::option::of(any_number()),
                proptest::option::of(any_number()),
            ),
            finished in any_number(),
            plain in any::<bool>(),
        ) -> Recent {
            let (occurrence, attempt, count) = numbers;
            let (exit_code, started, duration_ms, lateness) = some;
            let since = started.map(|t| t.wrapping_sub(occurrence));
            let run = Recent {
                run_id: ids.0.map(|id| RunId(Uuid::from_u128(id))),
                occurrence: Time(occurrence),
                attempt,
                trigger: TRIGGERS[kinds.1],
                outcome: Outcome::ALL[kinds.0],
                exit_code,
                started_at: started.map(Time),
                duration_ms,
                finished_at: None,
                lateness_ms: if plain { since } else { lateness },
                instance: ids.1.map(|name| InstanceId::new(&name)),
                count: if plain { 1 } else { count },
            };
            let finished_at = if plain { run.usual_end() } else { Some(Time(finished)) };
            Recent { finished_at, ..run }
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_out_as_it_was(runs in proptest::collection::vec(a_run(), 0..30)) {
            let packed = Recents::of(&runs);
            prop_assert_eq!(packed.iter().collect::<Vec<_>>(), runs);
        }
    }

    #[test]
    fn every_outcome_and_trigger_has_its_place() {
        // A new variant that is missing in the list, or stands elsewhere in it, would be shown as another one.
        for (at, outcome) in Outcome::ALL.iter().enumerate() {
            assert_eq!(*outcome as usize, at);
        }
        for (at, trigger) in TRIGGERS.iter().enumerate() {
            assert_eq!(*trigger as usize, at);
        }
        let outcomes = serde_json::from_str::<Outcome>("\"x\"").expect_err("none");
        assert_eq!(
            outcomes.to_string().matches('`').count(),
            2 * Outcome::ALL.len() + 2,
            "{outcomes}"
        );
        let triggers = serde_json::from_str::<Trigger>("\"x\"").expect_err("none");
        assert_eq!(
            triggers.to_string().matches('`').count(),
            2 * TRIGGERS.len() + 2,
            "{triggers}"
        );
    }

    #[test]
    fn a_usual_run_takes_26_bytes() {
        let at = 1_795_176_000_000;
        let run = |n: i64| Recent {
            run_id: Some(RunId(Uuid::from_u128(
                ((at - n * 3_600_000 - 200) as u128) << 80 | 7 << 76 | 7,
            ))),
            occurrence: Time(at - n * 3_600_000),
            attempt: 1,
            trigger: Trigger::Schedule,
            outcome: Outcome::Succeeded,
            exit_code: Some(0),
            started_at: Some(Time(at - n * 3_600_000 + 7)),
            duration_ms: Some(95_000),
            finished_at: Some(Time(at - n * 3_600_000 + 95_007)),
            lateness_ms: Some(7),
            instance: Some(InstanceId::new("web-1")),
            count: 1,
        };
        let runs: Vec<Recent> = (0..24).map(run).collect();
        let packed = Recents::of(&runs);
        assert!(packed.packed.len() <= 24 * 26, "{}", packed.packed.len());
        assert_eq!(packed.instances.len(), 1);
    }
}
