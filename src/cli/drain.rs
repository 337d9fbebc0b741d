//! `drain` and `undrain`: one instance, before and after a deployment.

use clap::Args;
use serde::Serialize;

use super::{Context, Exit, Failure};
use crate::{
    acts::{self, Others},
    model::InstanceId,
    store::{Fleet, Info},
    view::{Clock, RunningView},
};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  soloist drain              the instance on this host
  soloist drain web-1-7f3a   this instance; `soloist status` lists all")]
pub(super) struct Drain {
    /// Name of the instance [default: the only one on this host]
    instance: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct Answer {
    instance: InstanceId,
    draining: bool,
    /// The runs that it still has.
    running: Vec<RunningView>,
}

pub(super) async fn drain(ctx: &Context, args: &Drain, on: bool) -> Result<Exit, Failure> {
    let (answer, text) = drained(ctx, args.instance.as_deref(), on).await?;
    ctx.out.say(&answer, || text)?;
    Ok(Exit::Ok)
}

/// `named`: None for the only instance on this host.
pub(super) async fn drained(
    ctx: &Context,
    named: Option<&str>,
    on: bool,
) -> Result<(Answer, String), Failure> {
    let (fleet, clock) = ctx.fleet().await?;
    let id = choose(&fleet, named, &crate::store::host(), clock)?;
    let asked = ctx.asker().drain(&id, on, &acts::me()).await;
    asked.map_err(|r| ctx.refused(r))?;
    let info = fleet.instances.get(&id);
    let answer = Answer {
        instance: id,
        draining: on,
        running: info.map_or(vec![], |i| {
            i.running
                .iter()
                .map(|(job, o)| RunningView {
                    job: job.clone(),
                    occurrence: (*o).into(),
                })
                .collect()
        }),
    };
    let text = render(&answer, &acts::others(&fleet, &answer.instance, clock));
    Ok((answer, text))
}

fn render(a: &Answer, others: &Others) -> String {
    let running: Vec<_> = a.running.iter().map(|r| &r.job).collect();
    acts::drained(&a.instance, a.draining, &running, others) + "\n"
}

/// The instance that the user named, or the only one on this host.
fn choose(
    fleet: &Fleet,
    named: Option<&str>,
    host: &str,
    clock: Clock,
) -> Result<InstanceId, Failure> {
    let list = |ids: &[&InstanceId]| {
        let names: Vec<&str> = ids.iter().map(|i| i.as_str()).collect();
        names.join(", ")
    };
    if let Some(name) = named {
        return acts::instance(fleet, name).map_err(Failure::from);
    }
    let here: Vec<&InstanceId> = fleet
        .instances
        .iter()
        .filter(|(_, i): &(_, &Info)| i.host == host && !clock.silent(i))
        .map(|(id, _)| id)
        .collect();
    match here[..] {
        [id] => Ok(id.clone()),
        [] => Err(Failure::usage(
            format!("no instance is up on this host ({host})"),
            acts::instances_in_words(fleet),
        )),
        _ => Err(Failure::usage(
            format!("several instances are up on this host: {}", list(&here)),
            "name one of them",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        acts::others,
        model::{JobName, Occurrence},
        store::LIVE_WITHIN_MS,
    };

    fn fleet(instances: &[(&str, &str, i64)]) -> Fleet {
        Fleet::of(instances.iter().map(|(id, host, seen)| {
            let info = Info {
                seen: *seen,
                host: (*host).into(),
                process: 1,
                running: vec![(JobName::new("draw"), Occurrence(1))],
                jobs: 1,
                ..Info::default()
            };
            (InstanceId::new(id), info)
        }))
    }

    fn at(f: &Fleet, now: i64) -> Clock {
        Clock::of(f, now)
    }

    fn told(f: Result<InstanceId, Failure>) -> String {
        match f {
            Ok(id) => id.to_string(),
            Err(Failure::Usage { message, hint }) => {
                format!("{message} / {}", hint.unwrap_or_default())
            }
            Err(other) => format!("{other:?}"),
        }
    }

    #[test]
    fn the_only_live_instance_of_this_host_is_meant() {
        let now = 100_000;
        let f = fleet(&[("a-1", "a", now), ("a-0", "a", 0), ("b-1", "b", now)]);
        assert_eq!(told(choose(&f, None, "a", at(&f, now))), "a-1");
        assert_eq!(told(choose(&f, Some("b-1"), "a", at(&f, now))), "b-1");
        assert_eq!(
            told(choose(&f, Some("b1"), "a", at(&f, now))),
            "no instance `b1` / did you mean `b-1`?"
        );
        assert_eq!(
            told(choose(&f, None, "c", at(&f, now))),
            "no instance is up on this host (c) / the instances are a-0, a-1, b-1"
        );
        let f = fleet(&[("a-1", "a", now), ("a-2", "a", now)]);
        assert_eq!(
            told(choose(&f, None, "a", at(&f, now))),
            "several instances are up on this host: a-1, a-2 / name one of them"
        );
        assert_eq!(
            told(choose(&fleet(&[]), None, "a", at(&fleet(&[]), now))),
            "no instance is up on this host (a) / no instance has ever used this store"
        );
    }

    #[test]
    fn a_drain_says_what_is_still_running_and_who_goes_on() {
        let id = InstanceId::new("a-1");
        let live = |live| Others {
            live,
            overdue: vec![],
        };
        let mut a = Answer {
            instance: id.clone(),
            draining: true,
            running: vec![RunningView {
                job: JobName::new("draw"),
                occurrence: crate::view::Time(1),
            }],
        };
        assert_eq!(
            render(&a, &live(1)),
            "a-1 claims nothing more and finishes draw; 1 other instance runs jobs\n"
        );
        a.running.clear();
        assert_eq!(
            render(&a, &live(0)),
            "a-1 claims nothing more and runs nothing now; no other instance is up to run jobs\n"
        );
        a.draining = false;
        assert_eq!(render(&a, &live(0)), "a-1 claims again\n");
        // Whatever the store has for a name.
        let odd = InstanceId::new("a\nb\x1b[30m");
        let job = JobName::new("c\nd");
        let a = Answer {
            instance: odd,
            draining: true,
            running: vec![RunningView {
                job,
                occurrence: crate::view::Time(1),
            }],
        };
        assert_eq!(
            render(&a, &live(1)),
            "a\\nb\\x1b[30m claims nothing more and finishes c\\nd; 1 other instance runs jobs\n"
        );
        let f = fleet(&[("a-1", "a", 0), ("a-2", "a", 0)]);
        assert_eq!(others(&f, &id, at(&f, LIVE_WITHIN_MS)), live(1));
        assert_eq!(others(&f, &id, at(&f, 100_000)), live(0));
        let quiet = others(&f, &id, at(&f, LIVE_WITHIN_MS + 1));
        let overdue = vec![(InstanceId::new("a-2"), LIVE_WITHIN_MS + 1)];
        assert_eq!(quiet, Others { live: 0, overdue });
        assert!(render(&a, &quiet).ends_with(
            "; no other instance is up to run jobs; a-2 may be gone, it has not reported for 3.50 s\n"
        ));
    }
}
