//! SIGHUP: reads the configuration again, and puts it in force if it is valid.

use std::{path::Path, sync::Arc, time::Duration};

use tokio::sync::{oneshot, watch};
use tracing::{error, info, warn};

use super::{
    fleet, notify,
    signals::{SignalRequest, Signals},
};
use crate::{
    config::{self, Config, Sends},
    contender::Contender,
};

/// The result of reading the configuration.
type Loading = Result<Config, config::Report>;

/// Reads the configuration. None: a signal asked the daemon to stop first.
pub(super) async fn load(path: &Path, signals: &mut Signals) -> Option<Loading> {
    notify_reloading();
    let mut loading = read(path);
    // Reading may hang on a network file system.
    loop {
        tokio::select! {
            loaded = &mut loading => return loaded.ok(),
            asked = signals.next() => match asked {
                // A SIGHUP that arrives during the read leads to another read.
                SignalRequest::Reload => loading = read(path),
                stop @ SignalRequest::Stop(_) => {
                    signals.asked = Some(stop);
                    return None;
                }
            },
        }
    }
}

/// Reads in a thread that may be left behind if it hangs.
fn read(path: &Path) -> oneshot::Receiver<Loading> {
    let (loaded, answer) = oneshot::channel();
    let path = path.to_owned();
    std::thread::spawn(move || {
        // The receiver is gone if the daemon stops.
        let _ = loaded.send(config::load(&path, Sends::All));
    });
    answer
}

fn notify_reloading() {
    let now = Duration::from_nanos(crate::clock::Boottime::now().0);
    notify(&[
        sd_notify::NotifyState::Reloading,
        sd_notify::NotifyState::Custom(&format!("MONOTONIC_USEC={}", now.as_micros())),
    ]);
}

/// Puts a new configuration in force, or logs why it cannot.
pub(super) fn put_in_force(
    loaded: Loading,
    config: &mut Config,
    contender: &Arc<Contender>,
    seen: &watch::Sender<fleet::Loaded>,
) {
    match loaded {
        Err(report) => {
            error!("the new configuration is invalid, the old one stays in use:");
            // Each line of the report becomes one line of the log.
            report.to_string().lines().for_each(|line| error!("{line}"));
        }
        // The jobs of a file must not run by the claims of a store that the file does not name.
        Ok(new) if !same_store(&config.store, &new.store) => error!(
            "the new configuration names another store (`url` or `namespace` in [store] has changed), so the old one \
            stays in use: restart soloist to use that store"
        ),
        Ok(new) => {
            let mut changed = (0, 0, 0);
            for name in config
                .jobs
                .keys()
                .filter(|name| !new.jobs.contains_key(*name))
            {
                contender.remove_job(name);
                changed.0 += 1;
            }
            for (name, job) in &new.jobs {
                match config.jobs.get(name) {
                    Some(old) if same(old, job) => continue,
                    Some(_) => changed.1 += 1,
                    None => changed.2 += 1,
                }
                contender.set_job(job.clone());
            }
            let (removed, altered, added) = changed;
            info!(
                removed,
                altered,
                added,
                jobs = new.jobs.len(),
                config = new.digest,
                "configuration reloaded"
            );
            let old = std::mem::replace(config, new);
            if old.store != config.store {
                let what = changed_of_store(&old.store, &config.store).join(", ");
                warn!(
                    "[store] has changed ({what}), but this instance keeps using the old settings: restart soloist \
                    to apply the change"
                );
                // Compared with the settings in use, so that each reload repeats the warning.
                config.store = old.store;
            }
            if old.limits.max_parallel != config.limits.max_parallel {
                warn!("`max_parallel` has changed: restart soloist to apply the change");
                config.limits.max_parallel = old.limits.max_parallel;
            }
            if old.http != config.http {
                warn!("[http] has changed: restart soloist to apply the change");
                config.http = old.http;
            }
            // Not `send`, which changes nothing while the channel has no receiver.
            seen.send_replace(fleet::Loaded::of(config));
        }
    }
    notify(&[sd_notify::NotifyState::Ready]);
}

/// Compares the URLs without their passwords, which may change.
fn same_store(a: &config::Store, b: &config::Store) -> bool {
    a.url.to_string() == b.url.to_string() && a.namespace == b.namespace
}

/// The names of the keys of `[store]` that differ, of those that may, in the order of its fields.
fn changed_of_store(a: &config::Store, b: &config::Store) -> Vec<&'static str> {
    // Lists all fields, so that the compiler reports a new one.
    let config::Store {
        url,
        namespace: _,
        username,
        password,
        tls,
        timeout,
        pool_size,
        min_replicas,
        retry,
    } = a;
    [
        ("the password in url", *url != b.url),
        ("username", *username != b.username),
        ("the password", *password != b.password),
        ("tls", *tls != b.tls),
        ("timeout", *timeout != b.timeout),
        ("pool_size", *pool_size != b.pool_size),
        ("min_replicas", *min_replicas != b.min_replicas),
        ("retry", *retry != b.retry),
    ]
    .into_iter()
    .filter_map(|(name, changed)| changed.then_some(name))
    .collect()
}

fn same(a: &config::Job, b: &config::Job) -> bool {
    let digests = |job: &config::Job| (job.digest.clone(), job.schedule_digest.clone());
    // The digest does not contain the values of variables.
    digests(a) == digests(b) && a.enabled == b.enabled && a.env == b.env && a.alarms == b.alarms
}
