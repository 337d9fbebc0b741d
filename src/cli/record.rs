//! `check-record`: judges what `--record` wrote.

use std::path::PathBuf;

use clap::Args;

use super::{Exit, Failure, Out, show::count};
use crate::recording::check::{Verdict, check};

#[derive(Debug, Args)]
#[command(after_help = "\
Give it the files of all instances, of their guards, and of the commands that people ran. If a
file is missing, the command may report an answer that this file would explain. It reads a pipe
to its end, and waits for a pipe that nobody writes to.

Examples:
  soloist run --record /var/lib/soloist/record         on each host
  soloist check-record host-a.record host-b.record
  soloist check-record <(zcat host-a.record.gz) <(ssh host-b cat /var/lib/soloist/record)

Exit codes:
  0    the answers follow from the rules, and no promise is broken
  1    some promise is broken, or an answer follows from no rule
  65   a file is not a record, or was changed")]
pub(super) struct CheckRecord {
    /// The records of a whole fleet
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) fn check_record(args: &CheckRecord, out: &Out) -> Result<Exit, Failure> {
    let verdict = check(&args.files).map_err(Failure::Record)?;
    match args.json {
        true => out.object(&verdict)?,
        false => out.text(&told(&verdict))?,
    }
    Ok(match verdict.breaches.is_empty() {
        true => Exit::Ok,
        false => Exit::Broken,
    })
}

fn told(v: &Verdict) -> String {
    let mut lines = vec![
        format!(
            "{} of {} about {}, {} without an answer",
            count(v.questions, "request"),
            count(v.processes, "process"),
            count(v.jobs, "job"),
            v.unanswered
        ),
        format!(
            "{} granted, {} started, {} planned",
            count(v.granted, "attempt"),
            count(v.ran, "command"),
            count(v.occurrences, "occurrence")
        ),
    ];
    if v.losses > 0 {
        lines.push(format!(
            "{} the store was restarted, or its data was lost or replaced",
            count(v.losses, "time")
        ));
    }
    if v.wrong_times > 0 {
        lines.push(format!(
            "{} with a time that cannot be right",
            count(v.wrong_times, "answer")
        ));
    }
    if v.not_followed > 0 {
        lines.push(format!(
            "{} a job's state changed, and no recorded request explains it",
            count(v.not_followed, "time")
        ));
    }
    if v.not_judged > 0 {
        lines.push(format!(
            "{} a job's state was gone, and no heartbeat tells whether the store had lost its data: this cannot be \
             judged",
            count(v.not_judged, "time")
        ));
    }
    if v.unended > 0 {
        lines.push(format!(
            "{} without a last line: killed, or still running",
            count(v.unended, "process")
        ));
    }
    for b in &v.breaches {
        let job = b
            .job
            .as_ref()
            .map_or_else(String::new, |j| format!("{j}: "));
        lines.push(match b.promise {
            0 => format!("not explained: {job}{}", b.text),
            n => format!("promise {n} broken: {job}{}", b.text),
        });
    }
    lines.push(match v.breaches.len() {
        0 => "all answers follow from the rules, and no promise is broken".to_owned(),
        n => count(n, "breach"),
    });
    lines.join("\n") + "\n"
}
