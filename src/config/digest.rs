//! Digests of a definition, the same on every host and in every build: xxh3 over a canonical form.
//!
//! The canonical form is a list of `key`, length, text. A field that a later version adds is written only when
//! it differs from its default, so that instances of two versions agree on a file that does not use it.

use xxhash_rust::xxh3::Xxh3;

use super::{Command, Config, Job, StoreUrl};

/// Collects fields in a fixed order.
pub(super) struct Canon(Xxh3);

impl Canon {
    pub(super) fn new() -> Self {
        Self(Xxh3::new())
    }

    /// Lengths separate neighbouring fields: `ab`, `c` is not `a`, `bc`.
    pub(super) fn text(&mut self, key: &str, text: &str) -> &mut Self {
        for part in [key, text] {
            self.0.update(&(part.len() as u64).to_le_bytes());
            self.0.update(part.as_bytes());
        }
        self
    }

    pub(super) fn show(&mut self, key: &str, value: impl std::fmt::Debug) -> &mut Self {
        self.text(key, &format!("{value:?}"))
    }

    /// 16 hex digits.
    pub(super) fn finish(&self) -> String {
        format!("{:016x}", self.0.digest())
    }
}

/// The settings that determine the job's occurrences: not `jitter`, which only moves their starts. `dst` is written as
/// in the file.
pub(super) fn schedule(texts: &[String], timezone: &str, dst: &str) -> String {
    let mut canon = Canon::new();
    for text in texts {
        canon.text("schedule", text);
    }
    canon.text("timezone", timezone).text("dst", dst).finish()
}

/// Everything that changes what runs, when, where and how often; not `description` and `tags`. `working_dir`
/// counts as written: the same file in two places is the same definition.
///
/// It includes only the names of variables: a reader of the store could try values until the digest fits, and the hosts
/// share no secret that such a reader does not have.
pub(super) fn job(job: &Job, working_dir: Option<&str>) -> String {
    let mut canon = Canon::new();
    let mut option = |key: &str, value: Option<&str>| {
        if let Some(value) = value {
            canon.text(key, value);
        }
    };
    option("working_dir", working_dir);
    option("user", job.user.as_deref());
    option("group", job.group.as_deref());
    option("new_privileges", job.new_privileges.then_some("true"));
    option(
        "timeout",
        job.timeout.map(|t| t.as_millis().to_string()).as_deref(),
    );
    canon
        .text("name", job.name.as_str())
        .text("when", &job.schedule_digest)
        .text("jitter", &job.jitter.as_millis().to_string());
    match &job.command {
        Command::Shell(line) => {
            canon.text("shell", line);
        }
        Command::Argv(argv) => {
            for arg in argv {
                canon.text("arg", arg);
            }
        }
    }
    for name in job.env.keys() {
        canon.text("env", name);
    }
    for name in job.pass_env.iter() {
        canon.text("pass_env", name);
    }
    canon
        .text("enabled", if job.enabled { "true" } else { "false" })
        .text("grace", &job.grace.as_millis().to_string())
        .text("lease", &job.lease.length.as_millis().to_string())
        .text(
            "renew_every",
            &job.lease.renew_every.as_millis().to_string(),
        )
        .text("trust", &job.lease.trust.as_millis().to_string())
        .show("overlap", job.overlap)
        .show("on_crash", job.on_crash)
        .show("on_state_loss", job.on_state_loss)
        .text("max_attempts", &job.max_attempts.to_string())
        .text("start_within", &job.start_within.as_millis().to_string())
        .show("catch_up", job.catch_up)
        .text("keep", &job.output.keep.to_string())
        .text("log", if job.output.log { "true" } else { "false" });
    for code in job.success_codes.iter() {
        canon.text("success_code", &code.to_string());
    }
    if let Some(retry) = &job.retry {
        canon
            .text("retry", &retry.attempts.to_string())
            .text("interval", &retry.interval.as_millis().to_string())
            .text(
                "backoff",
                if retry.exponential {
                    "exponential"
                } else {
                    "fixed"
                },
            )
            .text("max_interval", &retry.max_interval.as_millis().to_string());
    }
    canon.finish()
}

/// The digest of the whole configuration, without passwords: the digest is public, and somebody could guess passwords
/// with it. `sqlite` is the path as written.
pub(super) fn config(config: &Config, sqlite: &str) -> String {
    let mut canon = Canon::new();
    let store = &config.store;
    match &store.url {
        StoreUrl::Sqlite(_) => canon.text("sqlite", sqlite),
        url => canon.text("url", &url.to_string()),
    };
    if let Some(username) = &store.username {
        canon.text("username", username);
    }
    if let Some(tls) = &store.tls {
        canon
            .show("ca", tls.ca.is_some())
            .show("cert", tls.cert.is_some());
    }
    canon
        .text("namespace", &store.namespace)
        .text("timeout", &store.timeout.as_millis().to_string())
        .text("pool_size", &store.pool_size.to_string())
        .text("min_replicas", &store.min_replicas.to_string())
        .text("attempts", &store.retry.attempts.to_string())
        .text("interval", &store.retry.interval.as_millis().to_string())
        .text(
            "backoff",
            if store.retry.exponential {
                "exponential"
            } else {
                "fixed"
            },
        )
        .text(
            "max_interval",
            &store.retry.max_interval.as_millis().to_string(),
        )
        .text("jitter", if store.retry.jitter { "true" } else { "false" })
        .text(
            "max_parallel",
            &config
                .limits
                .max_parallel
                .map_or_else(String::new, |n| n.to_string()),
        )
        .text("drain", &config.limits.drain.as_millis().to_string())
        .text("clock_drift", &config.limits.clock_drift.to_string());
    // Not their addresses and keys.
    for (name, channel) in &config.channels {
        canon
            .text("channel", name)
            .text("type", channel.kind)
            .show("rules", &channel.rules);
    }
    for (name, job) in &config.jobs {
        canon.text("job", name.as_str()).text("is", &job.digest);
        canon.text(
            "description",
            job.description.as_deref().unwrap_or_default(),
        );
        for tag in job.tags.iter() {
            canon.text("tag", tag);
        }
        // Not the address of heartbeats, which is secret.
        for channel in &job.alarms.notify {
            canon.text("notify", channel);
        }
        if let Some(within) = job.alarms.expect_success_within {
            canon.text("expect_success_within", &within.as_millis().to_string());
        }
    }
    canon.finish()
}
