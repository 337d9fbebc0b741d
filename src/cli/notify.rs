//! `notify test`: sends a message that says that it is a test, and shows what came back. `notify undelivered`: the
//! messages that were given up.

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use super::{
    Context, Exit, Failure, Out,
    show::{BOLD, Cell, Table, relative},
};
use crate::{
    clock,
    config::{Config, Sends, Way, nearest},
    logic::notify::{GivenUp, Kind, lease},
    model::{InstanceId, JobName, rfc3339_ms},
    notify as notifications,
};

#[derive(Debug, Args)]
pub(super) struct Notify {
    #[command(subcommand)]
    command: NotifyCommand,
}

#[derive(Debug, Subcommand)]
enum NotifyCommand {
    /// Send a test over a channel (`[notify.NAME]`), and show what came back
    Test(Test),
    /// Show the messages that were given up: nobody was told what they say
    Undelivered(Undelivered),
}

#[derive(Debug, Args)]
#[command(after_help = "\
The fleet remembers the last twenty, for a week.

Examples:
  soloist notify undelivered
  soloist notify undelivered --json")]
struct Undelivered {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
The message leaves from this host, once, and says that nothing is wrong. If it is not delivered, the exit code is 75.

Examples:
  soloist notify test ops
  soloist notify test ops --json")]
pub(super) struct Test {
    /// The name of the channel
    channel: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Tested<'a> {
    channel: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    delivered: bool,
    answer: &'a str,
}

impl Notify {
    pub(super) fn json(&self) -> bool {
        match &self.command {
            NotifyCommand::Test(t) => t.json,
            NotifyCommand::Undelivered(u) => u.json,
        }
    }

    /// `test`, which needs no store.
    pub(super) fn test(&self) -> Option<&Test> {
        match &self.command {
            NotifyCommand::Test(t) => Some(t),
            NotifyCommand::Undelivered(_) => None,
        }
    }
}

impl Test {
    /// The other channels may be such that only the daemon can read where they lead.
    pub(super) fn over(&self) -> Sends<'_> {
        Sends::Over(&self.channel)
    }
}

pub(super) async fn undelivered(ctx: &Context) -> Result<Exit, Failure> {
    let reply = ctx.ask(async || ctx.store.notices(false).await).await?;
    let note = reply.value.notes.get(lease::GIVEN_UP);
    let mut all: Vec<GivenUp> = note
        .and_then(|note| serde_json::from_str(note).ok())
        .unwrap_or_default();
    all.reverse();
    let now = reply.now_us.div_euclid(1000);
    let about = |(job, kind): &(JobName, Kind)| json!({ "job": job, "kind": kind });
    let views = all.iter().map(|g| {
        json!({
            "id": g.id,
            "channel": g.channel,
            "at": rfc3339_ms(g.at),
            "tries": g.tries,
            "why": g.why,
            "about": g.about.iter().map(about).collect::<Vec<_>>(),
            "more": g.more,
        })
    });
    let views: Vec<serde_json::Value> = views.collect();
    ctx.out.say(&views, || render(&all, now))?;
    Ok(Exit::Ok)
}

fn render(all: &[GivenUp], now: i64) -> String {
    if all.is_empty() {
        return "no message was given up\n".to_owned();
    }
    let mut t = Table::new(&["GIVEN UP", "CHANNEL", ">TRIES", "ABOUT", "WHY"]);
    for g in all {
        let about = g.about.iter();
        let mut about: Vec<String> = about
            .map(|(job, kind)| format!("{job} {}", kind.as_str().replace('_', " ")))
            .collect();
        if g.more > 0 {
            about.push(format!("{} more", g.more));
        }
        t.row([
            relative(g.at, now).into(),
            Cell::new(BOLD, g.channel.as_str()),
            g.tries.to_string().into(),
            about.join(", ").into(),
            g.why.as_str().into(),
        ]);
    }
    t.render()
}

pub(super) fn test(args: &Test, config: &Config, out: &Out) -> Result<Exit, Failure> {
    let Some(channel) = config.channels.get(&args.channel) else {
        let names = config.channels.keys().map(String::as_str);
        let hint = match nearest(&args.channel, names.clone()) {
            Some(near) => format!("did you mean `{near}`?"),
            None if config.channels.is_empty() => {
                "the configuration has no `[notify.NAME]`".to_owned()
            }
            None => format!("the channels are {}", names.collect::<Vec<_>>().join(", ")),
        };
        let name = crate::words::line(&args.channel);
        return Err(Failure::usage(
            format!("there is no channel `{name}`"),
            hint,
        ));
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::internal("cannot start the runtime", e))?;
    let from = InstanceId::new(&crate::store::host());
    let now = clock::wall_us().div_euclid(1000);
    let sent = runtime.block_on(notifications::test(channel, config, &from, now));
    runtime.shutdown_background();
    let (delivered, answer) = match sent {
        Ok(answer) => (true, answer),
        Err(e) => (false, e.in_words()),
    };
    let tested = Tested {
        channel: &channel.name,
        kind: channel.kind,
        delivered,
        answer: &answer,
    };
    match delivered {
        true => out.say(&tested, || {
            format!(
                "sent over `{}` ({}): {answer}\n",
                channel.name, channel.kind
            )
        })?,
        false if args.json => out.say(&tested, String::new)?,
        false => {
            let what = match &channel.way {
                Way::Command(_) => "command that it names",
                _ => "server that it names",
            };
            return Err(Failure::TryAgain {
                message: format!(
                    "`{}` ({}) did not take the message: {answer}",
                    channel.name, channel.kind
                ),
                hint: Some(format!(
                    "look at the channel's table in the configuration, and at the {what}"
                )),
            });
        }
    }
    Ok(if delivered { Exit::Ok } else { Exit::TryAgain })
}
