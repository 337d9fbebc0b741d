use std::path::Path;

use super::*;
use crate::{config, store::memory::MemoryStore};

fn job(lines: &str) -> Arc<Job> {
    let text = format!("[jobs.work]\ncommand = [\"true\"]\n{lines}\n");
    let config = config::parse(&text, Path::new("/jobs.toml"), &|_| None).expect("valid");
    config.jobs.values().next().expect("a job").clone()
}

fn contender() -> Arc<Contender> {
    let parts = Parts {
        store: Arc::new(MemoryStore::new()),
        clock: Arc::default(),
        instance: InstanceId::new("a"),
        host: "a".into(),
        retry: StoreRetry {
            attempts: 0,
            interval: Duration::ZERO,
            exponential: false,
            max_interval: Duration::ZERO,
            jitter: false,
        },
        max_parallel: None,
        journal: mpsc::channel(10).0,
        plans: mpsc::unbounded_channel().0,
        health: std::sync::Arc::default(),
        last_will: None,
        stop: CancellationToken::new(),
        tasks: TaskTracker::new(),
    };
    Arc::new(Contender::build(parts, Box::new(|_| {})))
}

fn held(at: i64) -> Open {
    Open {
        run: Run {
            instance: InstanceId::new("b"),
            ..Run::first(at)
        },
        ..Open::first(at)
    }
}

/// An answer that comes after a job was removed says who holds it.
#[tokio::test]
async fn a_removed_job_is_watched_no_more() {
    let (contender, job) = (contender(), job(""));
    contender.set_job(job.clone());
    let _ = contender.watch_lease(&job.name, &held(1000), Boottime::now());
    assert!(contender.watches.has(&job.name, Occurrence(1000)));
    contender.remove_job(&job.name);
    let _ = contender.watch_lease(&job.name, &held(2000), Boottime::now());
    for at in [1000, 2000] {
        assert!(!contender.watches.has(&job.name, Occurrence(at)));
    }
}
