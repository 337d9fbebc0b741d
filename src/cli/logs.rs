//! `logs`: the output of a run, from any host.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Context, Exit, Failure, Out, remark, show, terminal::unicode};
use crate::{
    model::{JobName, Outcome, RunId, Stream},
    store::{OUTPUT_MOST, Output},
    text,
    view::RunView,
};

/// How often to read a running command's output.
pub(super) const POLL: Duration = Duration::from_millis(200);
/// Every this many reads, also check whether the run is still active: a vanished host never sends its last output.
const LOOK: u32 = 5;

#[derive(Debug, Args)]
#[command(after_help = "\
The store keeps the last bytes of each run for 7 days; the job's `output.keep` says how many.

stdout and stderr come in the order in which soloist read them, and both go to stdout. On a terminal a mark shows the \
lines of stderr, and a line that the other stream interrupts is broken there. In a pipe or a file nothing is marked or \
changed: a script tells them apart by `--stream`, or by `stderr` of `--json`.

Examples:
  soloist logs backup               of the active run, or else of the last one
  soloist logs backup -f            until it ends
  soloist logs backup 019aa1c4-…    of this run; `soloist history backup --json` lists the runs
  soloist logs backup --stream stderr >errors.txt")]
pub(super) struct Logs {
    /// Name of the job
    job: String,
    /// Id of the run, or the beginning of it [default: the latest]
    run: Option<String>,
    /// Follow the output until the run ends
    #[arg(short, long)]
    follow: bool,
    /// Only what the run wrote to this stream. The newest 500 changes between the two are known; what came before them
    /// counts as stdout
    #[arg(long, value_name = "NAME")]
    stream: Option<Of>,
    /// Write the bytes unchanged on a terminal too: the run's colours, and any other control sequences
    #[arg(long)]
    pub raw: bool,
    /// Print JSON: one object, or one per line with --follow
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Of {
    Stdout,
    Stderr,
}

impl From<Of> for Stream {
    fn from(of: Of) -> Self {
        match of {
            Of::Stdout => Self::Stdout,
            Of::Stderr => Self::Stderr,
        }
    }
}

#[derive(Debug, Serialize)]
struct Chunk<'a> {
    job: &'a JobName,
    run_id: RunId,
    /// The position of the first byte of `output` in the whole output of the run.
    from: u64,
    /// With --stream, only what came from that stream.
    output: String,
    /// Which bytes came from stderr: from, and to (exclusive), counted as `from` is.
    stderr: Vec<(u64, u64)>,
    /// No more output will follow.
    done: bool,
}

impl<'a> Chunk<'a> {
    fn of(job: &'a JobName, run: RunId, printer: &Printer, o: &Output, done: bool) -> Self {
        let to = o.from.saturating_add(o.data.len() as u64);
        Self {
            job,
            run_id: run,
            from: o.from,
            output: String::from_utf8_lossy(&printer.of(o).concat()).into_owned(),
            stderr: o.stderr.within(o.from, to),
            done,
        }
    }
}

pub(super) async fn logs(ctx: &Context, args: &Logs) -> Result<Exit, Failure> {
    let (job, _) = ctx.known_job(&args.job).await?;
    let run = match &args.run {
        Some(text) => find(ctx, &job, text).await?,
        None => latest(ctx, &job).await?,
    };
    let mut reader = Reader::new(job.clone(), run);
    let mut printer = Printer::new(args.stream.map(Stream::from));
    let mut show = |o: &Output, done: bool| {
        if !ctx.out.json {
            return printer.show(&ctx.out, o, done);
        }
        let chunk = Chunk::of(&job, run, &printer, o, done);
        if args.follow {
            ctx.out.line(&chunk)
        } else {
            ctx.out.object(&chunk)
        }
    };
    if args.follow {
        while !reader.step(ctx, &mut show).await? {
            tokio::time::sleep(POLL).await;
        }
        return Ok(Exit::Ok);
    }
    // Reads piece by piece what is there now, and waits for nothing.
    let mut o = match ctx
        .ask(async || ctx.store.output(&job, run, 0).await)
        .await?
    {
        Some(o) => o,
        None => {
            let running = is_running(ctx, &job, run).await?;
            if running {
                remark("the run has written nothing yet; -f follows it");
            } else {
                remark("the run wrote nothing, or its output has been deleted since");
            }
            if ctx.out.json {
                show(&Output::default(), !running)?;
            }
            return Ok(Exit::Ok);
        }
    };
    if o.from > 0 {
        remark(&format!("the first {} bytes were not kept", o.from));
    }
    // One object has it all.
    let (first, mut all) = (o.from, vec![]);
    loop {
        let next = o.from.saturating_add(o.data.len() as u64);
        if ctx.out.json {
            all.append(&mut o.data);
        } else {
            show(&o, !o.more)?;
        }
        if !o.more || all.len() > OUTPUT_MOST {
            break;
        }
        let more = async || ctx.store.output(&job, run, next).await;
        let Some(more) = ctx.ask(more).await? else {
            break;
        };
        o = more;
    }
    if ctx.out.json {
        let whole = Output {
            from: first,
            data: all,
            stderr: o.stderr.clone(),
            ..Output::default()
        };
        show(&whole, o.done)?;
    }
    if o.coming {
        remark("the run has ended; its output is still being stored: -f waits for it");
    }
    missing(&o);
    Ok(Exit::Ok)
}

fn missing(o: &Output) {
    if o.missing > 0 {
        remark(&format!(
            "the last {} bytes are missing: the instance could not store them",
            o.missing
        ));
    }
}

/// Writes the output of a job's command: unchanged, or made for a terminal.
#[derive(Debug)]
pub(super) struct Printer {
    only: Option<Stream>,
    unicode: bool,
    /// The cut characters at the ends of stdout and stderr.
    begun: [text::Stream; 2],
    /// The stream whose line the terminal is in.
    open: Option<Stream>,
}

impl Printer {
    pub(super) fn new(only: Option<Stream>) -> Self {
        Self {
            only,
            unicode: unicode(|name| std::env::var(name).ok()),
            begun: Default::default(),
            open: None,
        }
    }

    /// The pieces that are to be shown.
    fn of<'a>(&self, o: &'a Output) -> Vec<&'a [u8]> {
        let shown = self.parts(o).into_iter();
        shown.map(|(_, data)| data).collect()
    }

    fn parts<'a>(&self, o: &'a Output) -> Vec<(Stream, &'a [u8])> {
        let mut all = o.stderr.cut(o.from, &o.data);
        all.retain(|(stream, _)| self.only.is_none_or(|only| only == *stream));
        all
    }

    /// With `done`, also an incomplete last character.
    pub(super) fn show(&mut self, out: &Out, o: &Output, done: bool) -> Result<(), Failure> {
        match out.raw {
            true => out.bytes(&self.of(o).concat()),
            false => out.bytes(self.for_eyes(out.color, o, done).as_bytes()),
        }
    }

    fn for_eyes(&mut self, colour: bool, o: &Output, done: bool) -> String {
        let mut text = String::new();
        for (stream, data) in self.parts(o) {
            let shown = self.begun[stream as usize].push(data);
            self.put(&mut text, colour, stream, &shown);
        }
        for stream in [Stream::Stdout, Stream::Stderr] {
            if done {
                let shown = self.begun[stream as usize].end();
                self.put(&mut text, colour, stream, &shown);
            }
        }
        text
    }

    fn put(&mut self, text: &mut String, colour: bool, stream: Stream, shown: &str) {
        for line in shown.split_inclusive('\n') {
            if self.open != Some(stream) {
                if self.open.is_some() {
                    text.push('\n');
                }
                if stream == Stream::Stderr && self.only.is_none() {
                    let mark = if self.unicode { "┃" } else { "!" };
                    let style = if colour { show::STDERR } else { show::PLAIN };
                    text.push_str(&show::paint(style, mark));
                    text.push(' ');
                }
            }
            text.push_str(line);
            self.open = (!line.ends_with('\n')).then_some(stream);
        }
    }
}

/// Adds their output to the views of ended runs.
pub(super) async fn fill(ctx: &Context, runs: &mut [RunView]) -> Result<(), Failure> {
    for r in runs {
        let Some(run) = r.run_id.filter(|_| r.outcome != Outcome::Running) else {
            continue;
        };
        let tail = async || crate::store::tail(&*ctx.store, &r.job, run).await;
        // What cannot be read hides nothing else.
        let (tail, complete) = match ctx.ask(tail).await {
            Err(Failure::Store(e, _)) if !e.is_transient() => {
                remark(&format!("the output of run {run} cannot be read: {e}"));
                (String::new(), false)
            }
            read => read?,
        };
        r.output_tail = tail;
        r.output_truncated |= !complete;
    }
    Ok(())
}

/// Reads the output of one run piece by piece.
pub(super) struct Reader {
    job: JobName,
    run: RunId,
    /// The next byte.
    at: u64,
    polls: u32,
    /// The run has ended, and some of its output is not in the store yet.
    coming: bool,
}

impl Reader {
    pub(super) fn new(job: JobName, run: RunId) -> Self {
        Self {
            job,
            run,
            at: 0,
            polls: 0,
            coming: false,
        }
    }

    pub(super) fn run(&self) -> RunId {
        self.run
    }

    /// Shows new output. True: the run has ended, and all of its output was shown.
    pub(super) async fn step(
        &mut self,
        ctx: &Context,
        show: &mut impl FnMut(&Output, bool) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        self.polls += 1;
        // Check this before reading the output, so that no output written in between is lost.
        let ended =
            self.polls.is_multiple_of(LOOK) && !is_running(ctx, &self.job, self.run).await?;
        loop {
            let mut output = ctx
                .ask(async || ctx.store.output(&self.job, self.run, self.at).await)
                .await?
                .unwrap_or_default();
            let from = output.from.max(self.at);
            if from > self.at {
                remark(&format!("{} bytes were not kept", from - self.at));
            }
            output.from = from;
            self.at = from.saturating_add(output.data.len() as u64);
            // The instance stores the rest of an ended run's output, or gives it up after a while.
            self.coming = output.coming;
            let over = output.done || ended && !output.more && !output.coming;
            if !output.data.is_empty() || over {
                show(&output, over)?;
            }
            missing(&output);
            if !output.more {
                return Ok(over);
            }
        }
    }

    /// Shows the rest of the output of an ended run; waits for output that is not in the store yet.
    pub(super) async fn finish(
        &mut self,
        ctx: &Context,
        show: &mut impl FnMut(&Output, bool) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        while !self.step(ctx, show).await? && self.coming {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

async fn is_running(ctx: &Context, job: &JobName, run: RunId) -> Result<bool, Failure> {
    let state = ctx.state(job).await?.value;
    Ok(state.is_some_and(|st| st.held_by(run).is_some()))
}

async fn latest(ctx: &Context, job: &JobName) -> Result<RunId, Failure> {
    let state = ctx.state(job).await?.value.unwrap_or_default();
    let held = state.open.iter().filter(|o| o.next_attempt.is_none());
    if let Some(open) = held.max_by_key(|o| o.run.occurrence.token(o.run.attempt)) {
        return Ok(open.run.id);
    }
    if let Some(last) = state.last {
        return Ok(last.run);
    }
    if let Some(run) = runs(ctx, job).await?.first() {
        return Ok(*run);
    }
    let (fleet, _) = ctx.fleet().await?;
    Err(Failure::usage(
        format!(
            "`{job}` has not run yet{}",
            crate::view::as_far_as_known(&fleet)
        ),
        format!(
            "`{}` says when it will; `{}` starts it now",
            crate::words::command("next", &[job.as_str()]),
            crate::words::command("trigger", &[job.as_str()])
        ),
    ))
}

/// The ids of the runs that the store knows, newest first.
async fn runs(ctx: &Context, job: &JobName) -> Result<Vec<RunId>, Failure> {
    let open = ctx.state(job).await?.value.unwrap_or_default().open;
    let ended = ctx
        .ask(async || ctx.store.records(job, crate::store::HISTORY_KEPT).await)
        .await?;
    let open = open.into_iter().map(|o| o.run.id);
    let mut all: Vec<RunId> = vec![];
    for run in open.chain(ended.into_iter().filter_map(|r| r.run_id)) {
        if !all.contains(&run) {
            all.push(run);
        }
    }
    Ok(all)
}

async fn find(ctx: &Context, job: &JobName, text: &str) -> Result<RunId, Failure> {
    let wanted = text.to_ascii_lowercase();
    let fit: Vec<RunId> = runs(ctx, job)
        .await?
        .into_iter()
        .filter(|r| r.to_string().starts_with(&wanted))
        .collect();
    match fit[..] {
        [run] => Ok(run),
        [] => Err(Failure::usage(
            format!("the store has no run `{text}` of `{job}`"),
            format!(
                "`{}` lists the runs",
                crate::words::command("history --json", &[job.as_str()])
            ),
        )),
        _ => Err(Failure::usage(
            format!("{} runs of `{job}` begin with `{text}`", fit.len()),
            "give more characters of the id",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Marks;

    fn printer(only: Option<Stream>) -> Printer {
        Printer {
            unicode: true,
            ..Printer::new(only)
        }
    }

    #[test]
    fn lines_of_stderr_have_a_mark() {
        let data = "one\ntwo\nthree\nfo".as_bytes();
        let mut stderr = Marks::default();
        stderr.add(4, 8);
        stderr.add(14, 16);
        let whole = Output {
            data: data.to_vec(),
            stderr: stderr.clone(),
            ..Output::default()
        };
        let marked = "one\n┃ two\nthree\n┃ fo";
        assert_eq!(printer(None).for_eyes(false, &whole, true), marked);
        let red = format!("{}┃{:#} two", show::STDERR, show::STDERR);
        assert!(printer(None).for_eyes(true, &whole, true).contains(&red));
        let ascii = Printer {
            unicode: false,
            ..printer(None)
        };
        let marked = { ascii }.for_eyes(false, &whole, true);
        assert_eq!(marked, "one\n! two\nthree\n! fo");
        for (only, shown) in [
            (Stream::Stdout, "one\nthree\n"),
            (Stream::Stderr, "two\nfo"),
        ] {
            let mut p = printer(Some(only));
            assert_eq!(p.for_eyes(false, &whole, true), shown);
            assert_eq!(p.of(&whole).concat(), shown.as_bytes());
        }
        // Piece by piece it reads the same.
        for at in 0..data.len() {
            let mut p = printer(None);
            let piece = |from: usize, data: &[u8]| Output {
                from: from as u64,
                data: data.to_vec(),
                stderr: stderr.clone(),
                ..Output::default()
            };
            let first = p.for_eyes(false, &piece(0, &data[..at]), false);
            let rest = p.for_eyes(false, &piece(at, &data[at..]), true);
            assert_eq!(first + &rest, "one\n┃ two\nthree\n┃ fo", "cut at {at}");
        }
    }

    #[test]
    fn a_line_that_the_other_stream_interrupts_is_broken() {
        let mut stderr = Marks::default();
        stderr.add(2, 6);
        let o = Output {
            data: b"..bad\n..\xff".to_vec(),
            stderr,
            ..Output::default()
        };
        let shown = printer(None).for_eyes(false, &o, true);
        assert_eq!(shown, "..\n┃ bad\n..\u{fffd}");
    }
}
