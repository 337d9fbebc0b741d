//! The first start of a fleet on a new Redis, with and without its wait.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use rustix::process::Signal;
use serde_json::Value;
use soloist::store::{Store as _, redis::RedisStore};
use tempfile::TempDir;

use crate::support::{
    GENEROUS, process,
    server::{RedisServer, settings},
    wait_until,
};

/// A directory with a jobs.toml that names `server`, and the instances that run there.
struct Here {
    dir: TempDir,
    running: Vec<Child>,
}

impl Here {
    fn new(server: &RedisServer, jobs: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let text = format!("[store]\nurl = '{}'\n{jobs}", server.url());
        fs::write(dir.path().join("jobs.toml"), text).expect("a file");
        Self {
            dir,
            running: vec![],
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_soloist"));
        c.args(args)
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        for name in ["SOLOIST_CONFIG", "SOLOIST_LOG", "SOLOIST_INSTANCE"] {
            c.env_remove(name);
        }
        c
    }

    fn start(&mut self, name: &str, more: &[&str]) {
        let log = fs::File::create(self.dir.path().join(name)).expect("a file");
        let args = [&["run", "--instance", name], more].concat();
        let child = self.command(&args).stderr(log).spawn();
        self.running.push(child.expect("it starts"));
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(name)).expect("a log")
    }

    fn history(&self, job: &str) -> Vec<Value> {
        let ran = self
            .command(&["history", job, "-n", "200", "--json"])
            .output();
        let ran = ran.expect("it starts");
        serde_json::from_slice(&ran.stdout).unwrap_or_default()
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        for child in &mut self.running {
            process::signal(child.id(), Signal::KILL);
            let _ = child.wait();
        }
    }
}

const EACH_SECOND: &str = "[jobs.tick]\nschedule = '@every 1s'\ncommand = 'true'\n";

fn redis(server: &RedisServer) -> RedisStore {
    RedisStore::open(&server.url(), &settings(&server.url())).expect("a store")
}

/// One step of the store decides, so of many that say the same at once, one may begin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_found_a_fleet_at_once_one_does() {
    let server = RedisServer::start();
    let ids: Vec<String> = (0..30).map(|n| format!("founder-{n}")).collect();
    let asked = ids.iter().map(|id| {
        let (store, id) = (redis(&server), id.clone());
        tokio::spawn(async move {
            // A command that only looks changes nothing.
            let _ = store.heartbeat(None).await;
            store.found(&id).await.expect("an answer").value
        })
    });
    let mut answers = vec![];
    for task in asked.collect::<Vec<_>>() {
        answers.push(task.await.expect("no panic"));
    }
    let founded: Vec<&String> = (ids.iter().zip(&answers))
        .filter(|(id, fleet)| **id == *fleet.id)
        .map(|(id, _)| id)
        .collect();
    let [founder] = founded[..] else {
        panic!("not one has founded it: {founded:?}");
    };
    assert!(answers.iter().filter(|fleet| fleet.open).count() >= 1);
    // Its reply may have been lost.
    let again = redis(&server)
        .found(founder)
        .await
        .expect("an answer")
        .value;
    assert!(again.open && *again.id == **founder);
    let late = redis(&server).found("late").await.expect("an answer").value;
    assert!(*late.id == **founder);
}

/// Whatever is left of a fleet, also where its epoch is gone.
#[tokio::test]
async fn a_store_that_knows_anything_of_a_fleet_does_not_begin_open() {
    for name in ["instances", "drains", "jobs"] {
        let server = RedisServer::start();
        let key = format!("soloist:{name}");
        let _: i64 = match name {
            "jobs" => server.command(&["SADD", &key, "old"]),
            // An instance that was seen long ago, or that somebody drained.
            "drains" => server.command(&["HSET", &key, "old", "1"]),
            _ => {
                let silent = r#"{"seen":1,"host":"h","pid":1,"version":"","config":"","clock_offset_ms":0,
                    "started_at":0,"running":[],"draining":false,"jobs":1}"#;
                server.command(&["HSET", &key, "old", silent])
            }
        };
        let fleet = redis(&server).found("founder").await.expect("an answer");
        assert!(!fleet.value.open, "{name}");
    }
}

#[test]
fn the_first_start_says_why_it_waits_and_how_not_to() {
    let server = RedisServer::start();
    let mut here = Here::new(&server, EACH_SECOND);
    here.start("a", &[]);
    wait_until("it says so", GENEROUS, || {
        here.log("a").contains("the store is new")
    });
    let log = here.log("a");
    for part in [
        "jobs wait up to 1",
        " s more, until 20",
        "stop a, and start it once with --new-fleet",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    // A second one need not wait for as long, and must not skip it.
    let refused = here
        .command(&["run", "--instance", "b", "--new-fleet"])
        .output();
    let refused = refused.expect("it starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(75), "{said}");
    assert!(
        said.contains("--new-fleet is refused: ") && said.contains("the instance a on "),
        "{said}"
    );
    assert!(
        said.contains("hint: start it without --new-fleet"),
        "{said}"
    );
    here.start("c", &[]);
    wait_until("it says so", GENEROUS, || {
        here.log("c").contains("the store is new")
    });
    assert!(!here.log("c").contains("--new-fleet"), "{}", here.log("c"));
    assert!(here.history("tick").is_empty());
}

/// Whoever asks for a job in that time reads the same words as whoever looks at the fleet.
#[test]
fn each_command_says_why_nothing_starts_yet() {
    let server = RedisServer::start();
    let mut here = Here::new(&server, &format!("{EACH_SECOND}lease = '1h'\n"));
    here.start("a", &[]);
    let why = "the store is new, was restarted or lost its data, and runs from before may still be alive; if nothing \
               of this fleet runs anywhere else, there is no need to wait: stop a, and start it once with --new-fleet";
    let said = |args: &[&str]| {
        let ran = here.command(args).output().expect("it starts");
        [ran.stdout, ran.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .concat()
    };
    wait_until("it waits", GENEROUS, || said(&["status"]).contains(why));
    for args in [
        &["trigger", "tick"][..],
        &["trigger", "tick", "--wait"],
        &["pause", "tick"],
        &["why", "tick"],
        &["next", "-n", "1"],
    ] {
        let said = said(args);
        assert!(
            said.contains(why) && said.contains(" more, until 20"),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn a_new_fleet_starts_at_once_and_only_once() {
    let mut server = RedisServer::start();
    let mut here = Here::new(&server, EACH_SECOND);
    // Somebody looked first.
    let looked = here.command(&["status"]).output().expect("it starts");
    assert!(looked.status.success());
    here.start("a", &["--new-fleet"]);
    wait_until("it runs its job", GENEROUS, || {
        !here.history("tick").is_empty()
    });
    let log = here.log("a");
    assert!(log.contains("starting without a wait"), "{log}");
    assert!(
        !log.contains("the store is new"),
        "no wait came first: {log}"
    );
    for child in &mut here.running {
        process::signal(child.id(), Signal::TERM);
        assert!(child.wait().expect("it ends").success());
    }
    here.running.clear();
    // The store knows the fleet, also after a restart.
    let refused = |what: &str| {
        let ran = here
            .command(&["run", "--new-fleet"])
            .output()
            .expect("it starts");
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(75), "{what}: {said}");
        assert!(said.contains("--new-fleet is refused"), "{what}: {said}");
    };
    refused("with its data");
    server.restart();
    refused("restarted with its data");
}
