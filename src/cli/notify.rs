//! `notify test`: sends a message that says that it is a test, and shows what came back.

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{Exit, Failure, Out};
use crate::{
    clock,
    config::{Config, nearest},
    model::InstanceId,
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
}

#[derive(Debug, Args)]
#[command(after_help = "\
The message leaves from this host, once, and says that nothing is wrong. If it is not delivered, the exit code is 75.

Examples:
  soloist notify test ops
  soloist notify test ops --json")]
struct Test {
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
        let NotifyCommand::Test(t) = &self.command;
        t.json
    }
}

pub(super) fn notify(args: &Notify, config: &Config, out: &Out) -> Result<Exit, Failure> {
    let NotifyCommand::Test(args) = &args.command;
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
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let from = InstanceId::new(&host);
    let now = clock::wall_us().div_euclid(1000);
    let sent = runtime.block_on(notifications::test(channel, config, &from, now));
    runtime.shutdown_background();
    let (delivered, answer) = match &sent {
        Ok(answer) => (true, answer.as_str()),
        Err(e) => (false, e.why.as_str()),
    };
    let tested = Tested {
        channel: &channel.name,
        kind: channel.kind(),
        delivered,
        answer,
    };
    match delivered {
        true => out.say(&tested, || {
            format!(
                "sent over `{}` ({}): {answer}\n",
                channel.name,
                channel.kind()
            )
        })?,
        false if args.json => out.say(&tested, String::new)?,
        false => {
            return Err(Failure::TryAgain {
                message: format!("`{}` ({}) did not take the message: {answer}", channel.name, channel.kind()),
                hint: Some("look at the channel's table in the configuration, and at the server that it names".to_owned()),
            });
        }
    }
    Ok(if delivered { Exit::Ok } else { Exit::TryAgain })
}
