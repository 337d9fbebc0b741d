//! Runs: of one job, of all jobs, and the output of one.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use axum::{Extension, body::Bytes, extract::State, http::Uri, response::Response};
use futures_util::StreamExt as _;
use serde::Serialize;

use super::{
    App,
    api::{Args, Path, json, named},
    auth::Caller,
    board::Inner,
    events::{STREAMS, Sent, sse, write_event},
    problem::{Problem, ProblemView},
};
use crate::{
    config::Job,
    model::{JobName, Outcome, RunId, RunRecord, Stream},
    store::{self, HISTORY_KEPT, Output, Store},
    view::{RunView, Time, late_since_due},
};

/// How many requests for records are under way at one time.
const AT_ONCE: usize = 8;
/// How often a stream looks for new output; ever less often while there is none, up to the second time.
const POLL: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));
/// Every this many looks, a stream also checks whether the run is still active: a vanished host never sends its last
/// output.
const LOOK: u32 = 5;
/// No character has more bytes, in UTF-8.
const CHARACTER_MOST: usize = 4;

/// Which runs are wanted.
struct Filter {
    outcomes: Vec<Outcome>,
    from: i64,
    to: i64,
    /// So far a run that goes on has lasted.
    now: i64,
    instance: Option<String>,
}

impl Filter {
    /// The arguments that may be there once. `outcome` may be there several times.
    const ONCE: [&'static str; 3] = ["from", "to", "instance"];

    fn of(args: &Args, now: i64) -> Result<Self, Problem> {
        let outcomes = args.given("outcome").flat_map(|all| all.split(','));
        let outcomes: Result<Vec<Outcome>, _> = outcomes.map(str::parse).collect();
        let from = args.instant("from")?.unwrap_or(i64::MIN);
        let to = args.instant("to")?.unwrap_or(i64::MAX);
        if from > to {
            return Err(Problem::bad("`from` is after `to`: no run is between them")
                .hint("exchange the two, or leave one of them out"));
        }
        Ok(Self {
            outcomes: outcomes.map_err(|why| Problem::bad(format!("`outcome`: {why}")))?,
            from,
            to,
            now,
            instance: args.text("instance").map(str::to_owned),
        })
    }

    /// Some of the time from the planned instant to the end is within the time that is asked for.
    fn wants(&self, r: &RunView) -> bool {
        let ends = match r.outcome {
            Outcome::Running => self.now,
            _ => r.finished_at.map_or(r.occurrence.0, |t| t.0),
        };
        let of = |name: &String| r.instance.as_ref().is_some_and(|i| i.as_str() == name);
        (self.outcomes.is_empty() || self.outcomes.contains(&r.outcome))
            && r.occurrence.0 <= self.to
            && (r.occurrence.0 >= self.from || ends >= self.from)
            && self.instance.as_ref().is_none_or(of)
    }

    /// More than the time is filtered.
    fn is_narrow(&self) -> bool {
        !self.outcomes.is_empty() || self.instance.is_some()
    }
}

/// Newest occurrence first; within an occurrence, the last attempt first.
fn sort(runs: &mut [RunView]) {
    runs.sort_by(|a, b| {
        (b.occurrence, b.attempt)
            .cmp(&(a.occurrence, a.attempt))
            .then_with(|| a.job.cmp(&b.job))
    });
}

/// A job's active runs.
fn active(inner: &Inner, job: &JobName) -> Vec<RunView> {
    inner
        .job(job)
        .map_or_else(Vec::new, |job| job.view.running.clone())
}

/// The active runs and the ended ones, which [`late_since_due`] has seen; one that ended between the two reads is in
/// both.
fn joined(active: Vec<RunView>, ended: Vec<RunRecord>) -> Vec<RunView> {
    let mut all: Vec<RunView> = active;
    all.retain(|r| ended.iter().all(|e| e.run_id != r.run_id));
    all.extend(ended.into_iter().map(RunView::from));
    all
}

/// A page of runs.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct Runs {
    /// Without their output.
    runs: Vec<RunView>,
    /// The cursor of the next page; null: there is none.
    next: Option<String>,
}

/// The runs of a job, newest first
#[utoipa::path(
    get,
    path = "/api/v1/jobs/{job}/runs",
    operation_id = "runs_of_job",
    tag = "runs",
    params(
        ("job" = String, Path),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 1000, description = "how many; default 50"),
        ("cursor" = Option<String>, Query, description = "`next` of the page before"),
        ("outcome" = Option<Vec<Outcome>>, Query, description = "only with these outcomes, also as `failed,timed_out`"),
        ("from" = Option<String>, Query,
            description = "only runs that end then or later; one that goes on lasts until now"),
        ("to" = Option<String>, Query, description = "only runs that were planned for then or earlier"),
        ("instance" = Option<String>, Query, description = "only those of this instance"),
    ),
    responses(
        (status = 200, description = "a page of runs", body = Runs),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn of_job(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response, Problem> {
    let [a, b, c] = Filter::ONCE;
    let args = Args::of(&uri, &["limit", "cursor", a, b, c], &["outcome"])?;
    let filter = Filter::of(&args, app.board.read().clock().now)?;
    let limit = args.number("limit", 1..=1000)?.unwrap_or(50);
    let after = args.given("cursor").next().map(Cursor::parse).transpose()?;
    let name = named(&app.board, &name)?;
    let active = active(&app.board.read(), &name);
    let ended = app.records(&name, HISTORY_KEPT).await?;
    let mut all = joined(active, ended);
    all.retain(|r| filter.wants(r));
    sort(&mut all);
    Ok(json(&page(all, after, limit)))
}

/// A place in a list: after the `nth` run of this attempt of this occurrence.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cursor {
    occurrence: i64,
    attempt: u32,
    nth: usize,
}

impl Cursor {
    fn parse(text: &str) -> Result<Self, Problem> {
        let mut parts = text.split('.');
        let mut next = || parts.next();
        let read: Option<Self> = (|| {
            Some(Self {
                occurrence: next()?.parse().ok()?,
                attempt: next()?.parse().ok()?,
                nth: next()?.parse().ok()?,
            })
        })();
        // Its own are written so.
        match read.filter(|cursor| cursor.to_string() == text) {
            Some(cursor) => Ok(cursor),
            None => Err(Problem::bad("`cursor` is not one that this server gave")
                .hint("begin without a cursor")),
        }
    }
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (occurrence, attempt, nth) = (self.occurrence, self.attempt, self.nth);
        write!(f, "{occurrence}.{attempt}.{nth}")
    }
}

fn page(all: Vec<RunView>, after: Option<Cursor>, limit: usize) -> Runs {
    let place = |r: &RunView| (r.occurrence.0, r.attempt);
    let start = after.map_or(0, |c| {
        let at = (c.occurrence, c.attempt);
        let newer = all.partition_point(|r| place(r) > at);
        let same = all[newer..].iter().take_while(|r| place(r) == at).count();
        newer + c.nth.min(same)
    });
    let end = start.saturating_add(limit).min(all.len());
    let next = (end < all.len() && end > start).then(|| {
        let last = &all[end - 1];
        let nth = all[..end]
            .iter()
            .rev()
            .take_while(|r| place(r) == place(last))
            .count();
        let cursor = Cursor {
            occurrence: last.occurrence.0,
            attempt: last.attempt,
            nth,
        };
        cursor.to_string()
    });
    let runs = all.into_iter().skip(start).take(end - start).collect();
    Runs { runs, next }
}

impl App {
    /// The records of a job, as they are shown.
    async fn records(&self, job: &JobName, n: usize) -> Result<Vec<RunRecord>, Problem> {
        let (name, definition) = (job.clone(), self.board.read().definition(job));
        let asked = self.ask(move |store| {
            let name = name.clone();
            async move { store.records(&name, n).await }
        });
        let mut records = asked.await?;
        late_since_due(&mut records, definition.as_deref());
        Ok(records)
    }
}

/// Runs of many jobs.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct AllRuns {
    /// Without their output.
    runs: Vec<RunView>,
    /// There are more: ask for less time, or fewer jobs.
    truncated: bool,
}

/// The runs of all jobs, newest first
#[utoipa::path(
    get,
    path = "/api/v1/runs",
    operation_id = "runs",
    tag = "runs",
    params(
        ("job" = Option<Vec<String>>, Query, description = "only of these jobs"),
        ("limit" = Option<usize>, Query, minimum = 1, maximum = 5000, description = "how many; default 500"),
        ("outcome" = Option<Vec<Outcome>>, Query, description = "only with these outcomes, also as `failed,timed_out`"),
        ("from" = Option<String>, Query,
            description = "only runs that end then or later; one that goes on lasts until now"),
        ("to" = Option<String>, Query, description = "only runs that were planned for then or earlier"),
        ("instance" = Option<String>, Query, description = "only those of this instance"),
    ),
    responses(
        (status = 200, description = "the runs", body = AllRuns),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn all(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Problem> {
    let [a, b, c] = Filter::ONCE;
    let args = Args::of(&uri, &["limit", a, b, c], &["job", "outcome"])?;
    let filter = Filter::of(&args, app.board.read().clock().now)?;
    let limit = args.number("limit", 1..=5000)?.unwrap_or(500);
    let names: BTreeSet<JobName> = args
        .all("job")
        .map(|name| named(&app.board, name))
        .collect::<Result<_, _>>()?;
    let (wanted, mut runs) = {
        let inner = app.board.read();
        let names: BTreeSet<JobName> = match names.is_empty() {
            true => inner.each().map(|job| job.view.job.clone()).collect(),
            false => names,
        };
        let runs: Vec<RunView> = names.iter().flat_map(|name| active(&inner, name)).collect();
        (wanted(&inner, &names, &filter, limit), runs)
    };
    let ended: Vec<RunRecord> = app
        .ask(move |store| {
            let wanted = wanted.clone();
            async move { read(&*store, wanted).await }
        })
        .await?;
    runs = joined(runs, ended);
    runs.retain(|r| filter.wants(r));
    sort(&mut runs);
    let truncated = runs.len() > limit;
    runs.truncate(limit);
    Ok(json(&AllRuns { runs, truncated }))
}

/// The newest `n` records of a job.
#[derive(Clone)]
struct Wanted {
    job: JobName,
    definition: Option<Arc<Job>>,
    n: usize,
}

/// How many records of which jobs are to be read, so that the newest `limit` are among them: the board knows when the
/// last runs of each job were.
fn wanted(inner: &Inner, names: &BTreeSet<JobName>, filter: &Filter, limit: usize) -> Vec<Wanted> {
    let known = |name: &JobName| inner.job(name);
    let in_time = |at: Time| at.0 <= filter.to;
    let mut newest: Vec<i64> = names
        .iter()
        .filter_map(known)
        .flat_map(|job| job.recent.iter())
        .map(|r| r.occurrence)
        .filter(|at| in_time(*at))
        .map(|t| t.0)
        .collect();
    // A filter may leave none of these.
    let enough = newest.len() > limit && !filter.is_narrow();
    let oldest = match enough {
        true => {
            *newest
                .select_nth_unstable_by_key(limit, |at| Reverse(*at))
                .1
        }
        false => i64::MIN,
    };
    let oldest = oldest.max(filter.from);
    names
        .iter()
        .filter_map(|name| {
            let recent: Vec<_> = known(name)?.recent.iter().collect();
            let reaches = |r: &super::board::Recent| {
                let ends = r
                    .started_at
                    .map_or(r.occurrence.0, |t| t.0)
                    .saturating_add(r.duration_ms.unwrap_or(0));
                r.occurrence.0.max(ends) >= oldest
            };
            let last = recent.iter().rposition(reaches)?;
            // All that the board has are wanted: there may be more before them. One more: the lateness of an attempt
            // counts from the end of the one before.
            let n = if last + 1 == recent.len() {
                HISTORY_KEPT
            } else {
                last + 2
            };
            Some(Wanted {
                job: name.clone(),
                definition: inner.definition(name),
                n,
            })
        })
        .collect()
}

async fn read(store: &dyn Store, wanted: Vec<Wanted>) -> Result<Vec<RunRecord>, store::Error> {
    let asks = wanted
        .into_iter()
        .map(|w| async move { (store.records(&w.job, w.n).await, w.definition) });
    let mut all = vec![];
    let mut answers = futures_util::stream::iter(asks).buffer_unordered(AT_ONCE);
    while let Some((records, definition)) = answers.next().await {
        match records {
            Ok(mut records) => {
                late_since_due(&mut records, definition.as_deref());
                all.extend(records);
            }
            // It hides no other job's.
            Err(store::Error::Corrupt { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(all)
}

/// The job and the run that a request names.
async fn run_of(app: &App, id: &str, args: &Args) -> Result<(JobName, RunView), Problem> {
    let job = args.text("job").ok_or_else(|| {
        Problem::bad("the job is missing")
            .hint("add `?job=NAME`: the store finds runs only with their job")
    })?;
    let job = named(&app.board, job)?;
    let id: RunId = id
        .parse()
        .map_err(|_| Problem::bad("the id of a run is a UUID"))?;
    let running = active(&app.board.read(), &job)
        .into_iter()
        .find(|r| r.run_id == Some(id));
    let ended = app
        .records(&job, HISTORY_KEPT)
        .await?
        .into_iter()
        .find(|r| r.run_id == Some(id));
    let run = ended.map(RunView::from).or(running);
    let run = run.ok_or_else(|| {
        Problem::missing(format!("`{job}` has no run {id}")).hint(format!(
            "the store keeps the last {HISTORY_KEPT} records of a job: `/api/v1/jobs/{job}/runs`"
        ))
    })?;
    Ok((job, run))
}

/// One run, with the end of its output
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}",
    operation_id = "run",
    tag = "runs",
    params(("id" = RunId, Path), ("job" = String, Query, min_length = 1, description = "the run's job")),
    responses(
        (status = 200, description = "the run", body = RunView),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn one(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["job"], &[])?;
    let (job, mut run) = run_of(&app, &id, &args).await?;
    if let Some(id) = run.run_id {
        let tail = app
            .ask(move |store| {
                let job = job.clone();
                async move { store::tail(&*store, &job, id).await }
            })
            .await;
        // What cannot be read hides nothing else.
        let (tail, complete) = tail.unwrap_or_default();
        run.output_tail = tail;
        run.output_truncated |= !complete && run.outcome != Outcome::Running;
    }
    Ok(json(&run))
}

/// A piece of a run's output. Bytes are counted from the first that the run wrote.
#[derive(Debug, PartialEq, Serialize, utoipa::ToSchema)]
struct Piece {
    /// The number of the first byte of `data`: greater than asked for if the bytes before were not kept.
    from: u64,
    /// Where to go on.
    next: u64,
    /// No more output will come.
    ended: bool,
    /// What is not UTF-8 is replaced.
    data: String,
    /// Which parts of `data` came from stderr: from, and to (exclusive), in UTF-16 units.
    stderr: Vec<(usize, usize)>,
    /// Bytes before `from`, or after the end, were not kept.
    truncated: bool,
}

impl Piece {
    /// `wanted`: the byte that was asked for; `over`: the run has ended.
    fn of(wanted: u64, output: Option<Output>, over: bool) -> Self {
        let mut o = output.unwrap_or_else(|| Output {
            from: wanted,
            ..Output::default()
        });
        let from = o.from.max(wanted);
        let ended = o.done || over && !o.more && !o.coming;
        if !ended {
            // The rest of the last character is still to come.
            o.data.truncate(o.data.len() - incomplete(&o.data));
        }
        let (mut data, mut stderr, mut at) = (String::new(), vec![], 0);
        for (stream, piece) in o.stderr.cut(from, &o.data) {
            let text = String::from_utf8_lossy(piece);
            let to = at + text.encode_utf16().count();
            stderr.extend((stream == Stream::Stderr).then_some((at, to)));
            data.push_str(&text);
            at = to;
        }
        Self {
            from,
            next: from.saturating_add(o.data.len() as u64),
            ended,
            data,
            stderr,
            truncated: from > wanted || o.missing > 0,
        }
    }
}

/// How many bytes at the end begin a character whose rest is missing.
fn incomplete(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last();
    let cut = last.map_or(&[][..], |chunk| chunk.invalid());
    match std::str::from_utf8(cut) {
        Err(e) if e.error_len().is_none() && cut.len() < CHARACTER_MOST => cut.len(),
        _ => 0,
    }
}

/// The output of a run, piece by piece, or as a stream until the run ends
#[utoipa::path(
    get,
    path = "/api/v1/runs/{id}/output",
    tag = "runs",
    params(
        ("id" = RunId, Path),
        ("job" = String, Query, min_length = 1, description = "the run's job"),
        ("from" = Option<u64>, Query, description = "the first byte; default 0"),
        ("follow" = Option<bool>, Query, description = "events `output` with the same object, until the run ends"),
    ),
    responses(
        (status = 200, description = "a piece, or a stream of them", content(
            (Piece = "application/json"),
            (Sent = "text/event-stream"),
        )),
        (status = "default", description = "a problem", body = ProblemView, content_type = "application/problem+json"),
    )
)]
pub(super) async fn output(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, Problem> {
    let args = Args::of(&uri, &["job", "from", "follow"], &[])?;
    let from = match args.given("from").next().map(str::parse) {
        None => 0,
        Some(Ok(from)) => from,
        Some(Err(_)) => return Err(Problem::bad("`from` must be the number of a byte")),
    };
    let follow = args.is_set("follow")?;
    let (job, run) = run_of(&app, &id, &args).await?;
    let id = run
        .run_id
        .ok_or_else(|| Problem::missing("it was not run"))?;
    let over = run.outcome != Outcome::Running;
    if !follow {
        let output = app.output(&job, id, from).await?;
        return Ok(json(&Piece::of(from, output, over)));
    }
    let permit = app.streams.clone().try_acquire_owned().map_err(|_| {
        Problem::unavailable(format!("{STREAMS} streams are open already"))
            .hint("close some, or ask without `follow`")
    })?;
    let follower = Follower {
        app: app.clone(),
        job,
        id,
        at: from,
        over,
        looks: 0,
        pause: POLL.0,
        ended: false,
        _permit: permit,
    };
    let pieces = futures_util::stream::unfold(follower, |mut follower| async move {
        let piece = follower.next().await?;
        Some((piece, follower))
    });
    Ok(sse(&app, caller, pieces))
}

impl App {
    async fn output(
        &self,
        job: &JobName,
        run: RunId,
        from: u64,
    ) -> Result<Option<Output>, Problem> {
        let job = job.clone();
        self.ask(move |store| {
            let job = job.clone();
            async move { store.output(&job, run, from).await }
        })
        .await
    }
}

/// A client that follows the output of a run.
struct Follower {
    app: Arc<App>,
    job: JobName,
    id: RunId,
    at: u64,
    over: bool,
    looks: u32,
    pause: Duration,
    ended: bool,
    _permit: tokio::sync::OwnedSemaphorePermit,
}

impl Follower {
    /// None: the run has ended, and all of its output was sent.
    async fn next(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut quiet = Duration::ZERO;
        loop {
            // Before the output is read, so that none that is written in between is lost.
            self.looks += 1;
            if !self.over && self.looks.is_multiple_of(LOOK) {
                self.over = !self.is_active();
            }
            // A store that is away does not end the stream.
            if let Ok(output) = self.app.output(&self.job, self.id, self.at).await {
                let piece = Piece::of(self.at, output, self.over);
                if piece.next > self.at || piece.ended || self.looks == 1 {
                    self.at = piece.next;
                    self.ended = piece.ended;
                    self.pause = POLL.0;
                    let mut out = vec![];
                    write_event(&mut out, &piece.next.to_string(), "output", &piece);
                    return Some(out.into());
                }
            }
            if quiet >= Duration::from_secs(10) {
                return Some(Bytes::from_static(b": alive\n\n"));
            }
            quiet += self.pause;
            tokio::select! {
                () = tokio::time::sleep(self.pause) => {}
                () = self.app.finish.cancelled() => return None,
            }
            self.pause = (self.pause * 3 / 2).min(POLL.1);
        }
    }

    /// As the board knows it. While the store is away nobody knows.
    fn is_active(&self) -> bool {
        let inner = self.app.board.read();
        active(&inner, &self.job)
            .iter()
            .any(|r| r.run_id == Some(self.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::history::tests::run;

    #[test]
    fn pages_have_each_run_once() {
        let mut all: Vec<RunView> = (0..7)
            .map(|n| run(n / 3 * 1000, (n % 2) as u32, Outcome::Failed))
            .collect();
        sort(&mut all);
        for limit in 1..9 {
            let (mut seen, mut cursor) = (vec![], None);
            loop {
                let page = page(all.clone(), cursor, limit);
                assert!(page.runs.len() <= limit);
                seen.extend(page.runs);
                match page.next {
                    Some(next) => cursor = Some(Cursor::parse(&next).expect("its own")),
                    None => break,
                }
            }
            assert_eq!(seen, all, "{limit}");
        }
        // New runs came before the page.
        let first = page(all.clone(), None, 2);
        let mut more = all.clone();
        more.push(run(9000, 1, Outcome::Succeeded));
        sort(&mut more);
        let cursor = Cursor::parse(&first.next.expect("more")).expect("its own");
        assert_eq!(page(more, Some(cursor), 100).runs, all[2..]);
        for text in ["", "x", "1.2", "1.2.3.4", "1.-2.3", "+1.2.3", "1.02.3"] {
            assert!(Cursor::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn pieces_end_between_characters() {
        let text = "aä日👩\u{301}".as_bytes();
        for cut in 0..=text.len() {
            let output = Output {
                from: 5,
                data: text[..cut].to_vec(),
                ..Output::default()
            };
            let piece = Piece::of(5, Some(output), false);
            assert!(!piece.data.contains('\u{fffd}'), "{cut}");
            assert!(text.starts_with(piece.data.as_bytes()));
            assert_eq!(piece.next, 5 + piece.data.len() as u64);
        }
        let mut stderr = crate::model::Marks::default();
        stderr.add(6, 8);
        let piece = Piece::of(
            5,
            Some(Output {
                from: 5,
                data: text.to_vec(),
                stderr,
                ..Output::default()
            }),
            true,
        );
        assert_eq!((piece.data.as_bytes(), piece.stderr), (text, vec![(1, 2)]));
        let broken = Output {
            data: b"a\xff\xe6\x97".to_vec(),
            ..Output::default()
        };
        let piece = Piece::of(0, Some(broken.clone()), false);
        assert_eq!((piece.data.as_str(), piece.next), ("a\u{fffd}", 2));
        // At its end nothing is waited for.
        let piece = Piece::of(0, Some(broken), true);
        assert_eq!(
            (piece.data.as_str(), piece.next, piece.ended),
            ("a\u{fffd}\u{fffd}", 4, true)
        );
    }
}
