//! Heartbeats: asks the address of a job when a run of it starts and ends, for services that watch whether jobs run.
//! What cannot be asked at once is left out: such a service tells its people if nothing comes.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    task::JoinHandle,
};
use tracing::{debug, warn};

use super::client;
use crate::{
    config::HiddenUrl,
    model::{JobName, Outcome, RunRecord},
};

/// How many wait for a turn; more are left out.
const WAITING: usize = 1000;
/// How many are under way at one time.
const AT_ONCE: usize = 16;
/// The time limit of each try, and how often it is tried.
const LIMIT: Duration = Duration::from_secs(5);
const TRIES: u32 = 3;
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Beat {
    job: JobName,
    url: String,
}

/// Where a daemon hands in its heartbeats.
#[derive(Debug, Default)]
pub(crate) struct Heartbeats(Mutex<Sending>);

#[derive(Debug, Default)]
enum Sending {
    /// Its thread starts with the first.
    #[default]
    Nothing,
    By(Thread),
    /// Nobody would wait for what comes now.
    Over,
}

#[derive(Debug)]
struct Thread {
    beats: mpsc::Sender<Beat>,
    /// Nothing is left to be sent.
    end: oneshot::Receiver<()>,
}

/// What happened to a run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Moment<'a> {
    Starts,
    Ends(&'a RunRecord),
}

/// What is put behind the path of the address. None: nothing is to be said.
fn suffix(moment: Moment<'_>) -> Option<String> {
    Some(match moment {
        Moment::Starts => "/start".to_owned(),
        Moment::Ends(r) => match r.outcome {
            Outcome::Succeeded => String::new(),
            // The run that replaces it tells its own start.
            Outcome::Running | Outcome::Skipped | Outcome::Replaced => return None,
            // The person who ended it knows that, but the service waits for its end.
            Outcome::Cancelled => "/fail".to_owned(),
            _ => match r.exit_code {
                // 0 would mean a success.
                Some(code @ 1..=255) => format!("/{code}"),
                _ => "/fail".to_owned(),
            },
        },
    })
}

/// The address with the suffix at the end of its path.
fn address(url: &str, suffix: &str) -> String {
    let at = url.find(['?', '#']).unwrap_or(url.len());
    let (path, rest) = url.split_at(at);
    format!("{}{suffix}{rest}", path.trim_end_matches('/'))
}

impl Heartbeats {
    /// Never waits.
    pub(crate) fn send(&self, job: &JobName, url: Option<&HiddenUrl>, moment: Moment<'_>) {
        let (Some(url), Some(suffix)) = (url, suffix(moment)) else {
            return;
        };
        let beat = Beat {
            job: job.clone(),
            url: address(url.expose(), &suffix),
        };
        let mut sending = self.0.lock();
        if let Sending::Nothing = *sending {
            *sending = Sending::By(start());
        }
        let Sending::By(thread) = &*sending else {
            return debug!(%job, "this instance has ended: left a heartbeat out");
        };
        if thread.beats.try_send(beat).is_err() {
            debug!(%job, "too many heartbeats wait already: left one out");
        }
    }

    /// Takes no more. Waits until what was handed in is sent, but not for longer than this.
    pub(crate) async fn finish(&self, limit: Duration) {
        let sending = std::mem::replace(&mut *self.0.lock(), Sending::Over);
        if let Sending::By(Thread { beats, end }) = sending {
            drop(beats);
            let _ = tokio::time::timeout(limit, end).await;
        }
    }
}

fn start() -> Thread {
    let (sender, beats) = mpsc::channel(WAITING);
    let (ended, end) = oneshot::channel::<()>();
    let body = move || {
        let _ended = ended;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        match runtime {
            Ok(runtime) => runtime.block_on(run(beats)),
            Err(error) => warn!(%error, "cannot send heartbeats: no runtime"),
        }
    };
    if let Err(error) = std::thread::Builder::new()
        .name("heartbeat".to_owned())
        .spawn(body)
    {
        warn!(%error, "cannot send heartbeats: no thread");
    }
    Thread { beats: sender, end }
}

async fn run(mut beats: mpsc::Receiver<Beat>) {
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    // The last of each job: what is said of one job arrives in order.
    let mut last: HashMap<JobName, JoinHandle<()>> = HashMap::new();
    while let Some(beat) = beats.recv().await {
        last.retain(|_, task| !task.is_finished());
        let before = last.remove(&beat.job);
        let job = beat.job.clone();
        let Ok(turn) = turns.clone().acquire_owned().await else {
            return;
        };
        let task = tokio::spawn(async move {
            let _turn = turn;
            if let Some(before) = before {
                let _ = before.await;
            }
            for n in 1..=TRIES {
                match client::post(&beat.url, "text/plain", vec![], LIMIT).await {
                    Ok(_) => return debug!(job = %beat.job, "sent a heartbeat"),
                    Err(e) if n == TRIES || e.refused => {
                        return warn!(job = %beat.job, error = e.why, "cannot send a heartbeat");
                    }
                    Err(_) => tokio::time::sleep(PAUSE * n).await,
                }
            }
        });
        last.insert(job, task);
    }
    for task in last.into_values() {
        let _ = task.await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::TcpListener,
    };

    use super::*;

    /// The daemon ends right after a run, whose service takes a moment to answer.
    #[tokio::test]
    async fn the_daemon_ends_after_its_last_heartbeats() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/beat", server.local_addr().expect("an address"));
        let (heard, hears) = std::sync::mpsc::channel();
        let serve = std::thread::spawn(move || {
            let (stream, _) = server.accept().expect("a connection");
            let mut line = String::new();
            let mut reader = BufReader::new(&stream);
            reader.read_line(&mut line).expect("a line");
            heard.send(line).expect("the test waits");
            (&stream)
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                .ok();
        });
        let beats = Heartbeats::default();
        let job = JobName::new("x");
        beats.send(&job, Some(&HiddenUrl::new(&url)), Moment::Starts);
        beats.finish(Duration::from_secs(60)).await;
        beats.send(&job, Some(&HiddenUrl::new(&url)), Moment::Starts);
        assert!(matches!(*beats.0.lock(), Sending::Over), "no new thread");
        let line = hears.try_recv().expect("it came before the end");
        assert!(line.starts_with("POST /beat/start "), "{line}");
        serve.join().expect("the server");
    }

    #[test]
    fn the_end_of_a_run_is_a_suffix_of_the_path() {
        let ends = |outcome, exit_code| {
            let job = JobName::new("x");
            let r = RunRecord::without_run(
                &job,
                crate::model::Occurrence(1),
                crate::model::Trigger::Schedule,
                outcome,
            );
            suffix(Moment::Ends(&RunRecord { exit_code, ..r }))
        };
        assert_eq!(suffix(Moment::Starts).as_deref(), Some("/start"));
        assert_eq!(ends(Outcome::Succeeded, Some(0)).as_deref(), Some(""));
        // A job for which 3 is a success.
        assert_eq!(ends(Outcome::Succeeded, Some(3)).as_deref(), Some(""));
        assert_eq!(ends(Outcome::Failed, Some(3)).as_deref(), Some("/3"));
        assert_eq!(ends(Outcome::Failed, Some(0)).as_deref(), Some("/fail"));
        assert_eq!(ends(Outcome::Failed, None).as_deref(), Some("/fail"));
        assert_eq!(ends(Outcome::TimedOut, None).as_deref(), Some("/fail"));
        assert_eq!(ends(Outcome::Cancelled, Some(0)).as_deref(), Some("/fail"));
        assert_eq!(ends(Outcome::Replaced, Some(0)), None);
        for (url, with) in [
            ("https://hc/a", "https://hc/a/start"),
            ("https://hc/a/", "https://hc/a/start"),
            ("https://hc/a?x=1", "https://hc/a/start?x=1"),
        ] {
            assert_eq!(address(url, "/start"), with);
        }
    }
}
