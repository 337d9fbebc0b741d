//! What the keys of a job and the limits of an instance do, on a real fleet.

use std::collections::BTreeSet;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, LATE_RATHER_THAN_SKIPPED, each_second, fleet},
    skip,
    trace::{Expect, ONCE, RERUN, Run},
    wait_for, wait_until,
};

/// The most runs that were alive at one moment.
fn most_at_once(runs: &[Run]) -> usize {
    let at = |run: &Run| {
        let alive = |other: &&Run| other.start_ns <= run.start_ns && run.start_ns <= other.last_ns;
        runs.iter().filter(alive).count()
    };
    runs.iter().map(at).max().unwrap_or(0)
}

/// A run that does not end by itself while a test lasts.
const ENDLESS: &str = "for=600000 beat=5";

#[test]
fn replace_ends_the_run_before_wherever_it_is() {
    let mut fleet = fleet(3)
        .default("grace", "\"100ms\"")
        .witness(
            "a",
            &format!("{ENDLESS} ignore-term"),
            "overlap = \"replace\"",
        )
        .start();
    wait_until("runs are replaced", GENEROUS, || {
        let runs = fleet.trace().runs();
        // Another instance may replace it, too; the holder learns that with its next renewal.
        let by_another = |pair: &[Run]| pair[0].instance != pair[1].instance;
        runs.len() > 3 && runs.windows(2).any(by_another)
    });
    // Not a run that was replaced before its command had started.
    wait_until("one is recorded", GENEROUS, || {
        let mut all = fleet.history("a").into_iter();
        all.any(|r| r["outcome"] == "replaced" && r["signal"] == 9)
    });
    fleet.stop_all_now();
    fleet.judge(ONCE, &["a"], None);
    assert!(fleet.trace().runs().iter().all(|r| !r.ended));
    let outcomes: BTreeSet<String> = fleet
        .history("a")
        .iter()
        .map(|r| r["outcome"].to_string())
        .collect();
    assert!(!outcomes.contains("\"skipped\""), "{outcomes:?}");
}

#[test]
fn allow_lets_runs_of_one_job_overlap_and_each_occurrence_still_starts_once() {
    let mut fleet = fleet(3)
        .witness("a", "for=5000", "overlap = \"allow\"\ncatch_up = \"all\"")
        .start();
    wait_until("three runs are alive together", GENEROUS, || {
        most_at_once(&fleet.trace().runs()) >= 3
    });
    fleet.stop_all_now();
    let expect = Expect {
        overlaps: true,
        ..ONCE
    };
    fleet.judge(expect, &["a"], None);
    let skipped = |r: &serde_json::Value| r["outcome"] == "skipped";
    assert!(!fleet.history("a").iter().any(skipped));
}

#[test]
fn an_instance_runs_no_more_at_once_than_max_parallel_and_the_rest_waits() {
    let jobs: Vec<String> = (1..=6).map(|i| format!("j{i}")).collect();
    let mut plan = fleet(1).limits("max_parallel = 2");
    for job in &jobs {
        let lines = each_second("for=400 beat=5", LATE_RATHER_THAN_SKIPPED);
        plan = plan.job(job, &lines.replacen("* * * * * *", "@every 3s", 1));
    }
    let mut fleet = plan.start();
    wait_until("each job has run twice", GENEROUS, || {
        let trace = fleet.trace();
        jobs.iter().all(|job| trace.runs_of(job).len() >= 2)
    });
    fleet.stop_all_now();
    // All six are due at one instant: two at a time, and never three.
    assert_eq!(most_at_once(&fleet.trace().runs()), 2);
    fleet.judge(ONCE, &[], None);
    // A run that waits for a slot is late: by one run at least, some by two.
    let late = |ms: i64| {
        let all = jobs.iter().flat_map(|job| fleet.history(job));
        all.filter(|r| r["lateness_ms"].as_i64() >= Some(ms))
            .count()
    };
    assert!(
        late(400) >= 4 && late(800) >= 2,
        "{} {}",
        late(400),
        late(800)
    );
}

#[test]
fn a_slot_is_not_kept_while_another_instances_run_is_waited_for() {
    // One slot each. The next occurrence of the endless job waits on the instance that does not run it, for ever; the
    // other jobs need its slot.
    let mut fleet = fleet(2)
        .limits("max_parallel = 1")
        .witness("endless", ENDLESS, "overlap = \"queue\"")
        .witness("other", "for=5", "")
        .start();
    let (holder, run) = fleet.wait_holder("endless");
    let free = &fleet.instances[1 - holder].id;
    // The first that waits may have come after a few of the other job: many of them come after it.
    wait_until("the other job runs on beside it", GENEROUS, || {
        let runs = fleet.trace().runs_of("other");
        let later = |r: &&Run| r.instance == *free && r.occurrence > run.occurrence + 2000;
        runs.iter().filter(later).count() >= 6
    });
    fleet.stop_all_now();
    fleet.judge(ONCE, &[], None);
    assert_eq!(fleet.trace().runs_of("endless").len(), 1);
}

#[test]
fn env_files_reach_the_command_and_are_read_again_on_a_reload() {
    let command = "command = 'echo \"$ONE $TWO $THREE $FOUR\" >> said'";
    let mut fleet = fleet(2).job(
        "a",
        &format!("schedule = \"* * * * * *\"\n{command}\nenv_file = \"vars\"\nenv = {{ FOUR = \"own\" }}\n"),
    );
    fleet = fleet
        .default("env_file", "\"common\"")
        .default("env", "{ TWO = \"defaults\", THREE = \"defaults\" }")
        .file("common", "ONE=common\nTWO=common\nTHREE=common\n")
        .file(
            "vars",
            "# the job's own\nexport THREE=\"of the job\"\nFOUR=file\n",
        );
    let mut fleet = fleet.start();
    let said = |fleet: &Fleet, line: &str| {
        wait_until(&format!("the command says {line:?}"), GENEROUS, || {
            let said = std::fs::read_to_string(fleet.file("said")).unwrap_or_default();
            said.lines().any(|l| l == line)
        });
    };
    said(&fleet, "common defaults of the job own");
    std::fs::write(fleet.file("vars"), "THREE=changed\n").expect("write the file");
    fleet.signal_all(Signal::HUP);
    said(&fleet, "common defaults changed own");
    fleet.stop();
}

/// A job without a schedule, which fails each time.
fn failing(retry: &str) -> String {
    format!(
        "command = [\"{{witness}}\", \"{{trace}}\", \"for=1\", \"exit=3\"]\nretry = {{ {retry} }}\n"
    )
}

/// Runs the job to its end; returns the outcome of each attempt, oldest first.
fn attempts(fleet: &Fleet, job: &str) -> Vec<Run> {
    let told = fleet.cli(&["trigger", job, "--wait"]);
    assert_eq!(told.status.code(), Some(3), "{told:?}");
    let mut runs = fleet.trace().runs_of(job);
    runs.sort_by_key(|r| r.attempt);
    let mut records = fleet.history(job);
    records.reverse();
    let recorded: Vec<_> = records
        .iter()
        .map(|r| (r["attempt"].as_u64(), r["outcome"].as_str()))
        .collect();
    let expected: Vec<_> = runs
        .iter()
        .map(|r| (Some(u64::from(r.attempt)), Some("failed")))
        .collect();
    assert_eq!(recorded, expected);
    runs
}

/// Milliseconds between the end of each attempt and the start of the next.
fn gaps(runs: &[Run]) -> Vec<i64> {
    let gap = |pair: &[Run]| (pair[1].start_ns - pair[0].last_ns) / 1_000_000;
    runs.windows(2).map(gap).collect()
}

#[test]
fn a_failed_command_is_tried_again_as_often_and_as_late_as_its_job_says() {
    let mut fleet = fleet(3)
        // So that no attempt loses its lease on a slow machine.
        .default("lease", "\"30s\"")
        // `max_attempts` is another bound, of the same height unless it is given.
        .job(
            "doubling",
            &(failing("attempts = 4, interval = '200ms', backoff = 'exponential'")
                + "max_attempts = 20\n"),
        )
        // Doubled without end the last of these would wait for hours.
        .job(
            "bounded",
            &failing(
                "attempts = 14, interval = '50ms', backoff = 'exponential', \
                 max_interval = '150ms'",
            ),
        )
        .job(
            "fixed",
            &failing("attempts = 14, interval = '80ms', backoff = 'fixed'"),
        )
        .job("never", &failing("attempts = 0"))
        .start();
    wait_until("the jobs are known", GENEROUS, || {
        fleet
            .cli(&["trigger", "never", "--key", "first", "--wait"])
            .status
            .code()
            == Some(3)
    });
    for (job, again, at_least) in [
        ("doubling", 4, &[200, 400, 800, 1600][..]),
        ("bounded", 14, &[50, 100, 150, 150, 150]),
        ("fixed", 14, &[80, 80, 80]),
    ] {
        let runs = attempts(&fleet, job);
        let numbers: Vec<u32> = runs.iter().map(|r| r.attempt).collect();
        assert_eq!(numbers, (1..=again + 1).collect::<Vec<u32>>(), "{job}");
        assert_eq!(runs[0].trigger, "manual");
        assert!(
            runs[1..].iter().all(|r| r.trigger == "retry"),
            "{job}: {runs:#?}"
        );
        let gaps = gaps(&runs);
        // The store's clock and the witness's are read at other moments.
        let early = gaps
            .iter()
            .zip(at_least)
            .find(|(gap, least)| *gap + 5 < **least);
        assert_eq!(early, None, "{job}: {gaps:?}");
    }
    assert_eq!(fleet.trace().runs_of("never").len(), 1);
    fleet.stop();
    fleet.judge(RERUN, &[], None);
}

#[test]
fn another_instance_takes_the_next_attempt_when_the_first_ones_is_gone() {
    let mut fleet = fleet(2)
        .job("a", &failing("attempts = 1, interval = \"1ms\""))
        .start();
    // The pause holds the second attempt back until the instance of the first is gone.
    wait_until("the job is known", GENEROUS, || {
        fleet.cli(&["pause", "a"]).status.success()
    });
    fleet.said(&["trigger", "a", "--key", "k"]);
    let record = fleet.wait_record("a", "failed");
    let first = fleet.index(record["instance"].as_str().expect("an instance"));
    fleet.instances[first].kill();
    fleet.said(&["resume", "a"]);
    let next = fleet.wait_run("the second attempt", |r| r.attempt == 2);
    assert_eq!(fleet.index(&next.instance), 1 - first);
    assert_eq!((next.trigger.as_str(), next.token % 1000), ("retry", 2));
    wait_until("it is recorded", GENEROUS, || fleet.history("a").len() == 2);
    fleet.stop();
    fleet.judge(RERUN, &[], None);
}

#[test]
fn a_command_gets_no_variable_of_the_store_and_with_a_user_those_of_a_login() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let root = rustix::process::geteuid().is_root();
    let user = if root { "user = 'nobody'" } else { "" };
    let show = "command = '''env; tr '\\0' '\\n' < /proc/$PPID/environ; true'''\nworking_dir = '/'";
    let text = format!(
        "[store]\nurl = 'sqlite:${{HIDDEN_NAME}}'\nnamespace = '${{HIDDEN_SPACE:-x}}'\n\
         [jobs.plain]\n{show}\n[jobs.passed]\n{show}\npass_env = ['HIDDEN_NAME', 'ABSENT']\n\
         [jobs.own]\n{show}\nenv = {{ HIDDEN_NAME = 'own' }}\n\
         [jobs.login]\n{show}\n{user}\npass_env = ['ASKED_FOR']\nenv = {{ OWN = 'own' }}\n"
    );
    std::fs::write(dir.path().join("jobs.toml"), text).expect("write the file");
    let soloist = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_soloist"));
        command
            .args(words)
            .current_dir(dir.path())
            .env_remove("SOLOIST_CONFIG")
            .env("HIDDEN_NAME", "hunter2.db")
            .env("HIDDEN_SPACE", "hunter3")
            .env("SOLOIST_STORE_URL", "hunter4")
            .env("TOKEN", "of the daemon")
            .env("ASKED_FOR", "yes")
            .env("LANG", "C.UTF-8")
            .stdin(std::process::Stdio::null());
        command
    };
    let log = std::fs::File::create(dir.path().join("log")).expect("a log");
    let mut daemon = soloist(&["run"]).stderr(log).spawn().expect("it starts");
    wait_until("the daemon is up", GENEROUS, || {
        let status = soloist(&["status"]).output().expect("it starts");
        String::from_utf8_lossy(&status.stdout).contains("plain")
    });
    let shown = |job: &str| {
        // The store may not know it yet.
        wait_for("it ran", GENEROUS, || {
            let ran = soloist(&["trigger", job, "--wait"]).output();
            let o = ran.expect("it starts");
            let shown = String::from_utf8_lossy(&o.stdout).into_owned();
            o.status.success().then_some(shown)
        })
    };
    let has = |text: &str, line: &str| text.lines().any(|l| l == line);
    let plain = shown("plain");
    assert!(!plain.contains("hunter"), "{plain}");
    assert!(has(&plain, "TOKEN=of the daemon"), "{plain}");
    let passed = shown("passed");
    assert!(has(&passed, "HIDDEN_NAME=hunter2.db"), "{passed}");
    assert!(!passed.contains("hunter3"), "{passed}");
    assert!(has(&shown("own"), "HIDDEN_NAME=own"));
    if root {
        let login = shown("login");
        let names: std::collections::BTreeSet<&str> = login
            .lines()
            .filter_map(|l| l.split_once('='))
            .map(|(name, _)| name)
            .filter(|name| !name.starts_with("SOLOIST_") && !["PWD", "SHLVL", "_"].contains(name))
            .collect();
        let expected = [
            "ASKED_FOR",
            "HOME",
            "LANG",
            "LOGNAME",
            "OWN",
            "PATH",
            "SHELL",
            "TRACEPARENT",
            "USER",
        ];
        assert!(names.iter().eq(&expected), "{login}");
        assert!(
            has(&login, "USER=nobody") && has(&login, "ASKED_FOR=yes"),
            "{login}"
        );
        assert!(has(&login, "SOLOIST_JOB=login"), "{login}");
    }
    crate::support::process::signal(daemon.id(), Signal::TERM);
    assert!(daemon.wait().expect("it ends").success());
}

#[test]
fn a_sqlite_file_that_others_may_open_is_warned_of() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("soloist.db");
    std::fs::write(dir.path().join("jobs.toml"), "").expect("write the file");
    let says = |mode: u32| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(&file, "").expect("write the file");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("chmod");
        let log = dir.path().join("log");
        let mut daemon = std::process::Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("run")
            .current_dir(dir.path())
            .env_remove("SOLOIST_CONFIG")
            .stderr(std::fs::File::create(&log).expect("a log"))
            .spawn()
            .expect("it starts");
        let text = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_until("the daemon is up", GENEROUS, || text().contains(" jobs=0"));
        crate::support::process::signal(daemon.id(), Signal::TERM);
        assert!(daemon.wait().expect("it ends").success());
        let kept = std::fs::metadata(&file).expect("the file").permissions();
        assert_eq!(kept.mode() & 0o777, mode);
        text()
    };
    let warned = says(0o640);
    assert!(
        warned.contains("(mode 640)") && warned.contains("chmod 600"),
        "{warned}"
    );
    assert!(!says(0o600).contains("chmod"));
}

/// Not by this process: a child that another test forks meanwhile would keep the copy open for writing, and it could
/// not be executed.
fn copy_program(from: &str, to: &std::path::Path) {
    let copied = std::process::Command::new("cp").arg(from).arg(to).status();
    assert!(copied.expect("cp").success());
}

/// Tries to read what it must not: of the guard, of the daemon, and of another process of its user.
const NOSY: &str = r#"command = '''
for pid in $PPID $(cut -d' ' -f4 /proc/$PPID/stat) $$; do
    cat /proc/$pid/environ >/dev/null 2>&1 && echo read || echo refused
done'''"#;

#[test]
fn a_job_of_the_same_user_cannot_look_into_guard_and_daemon() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let open = |path: &std::path::Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("chmod");
    };
    open(dir.path());
    let exe = dir.path().join("soloist");
    copy_program(env!("CARGO_BIN_EXE_soloist"), &exe);
    open(&exe);
    std::fs::write(
        dir.path().join("jobs.toml"),
        format!("[jobs.nosy]\n{NOSY}\n"),
    )
    .expect("write the file");
    let root = rustix::process::geteuid().is_root();
    let soloist = |words: &[&str]| {
        let mut command = std::process::Command::new(if root { "setpriv" } else { "env" });
        if root {
            command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
        }
        command
            .arg(&exe)
            .args(words)
            .current_dir(dir.path())
            .env_remove("SOLOIST_CONFIG")
            .stdin(std::process::Stdio::null());
        command
    };
    let log = std::fs::File::create(dir.path().join("log")).expect("a log");
    let mut daemon = soloist(&["run"]).stderr(log).spawn().expect("it starts");
    let begun = std::time::Instant::now();
    wait_until("the daemon has made its job known", GENEROUS, || {
        let status = soloist(&["status"]).output().expect("it starts");
        let said = String::from_utf8_lossy(&status.stdout);
        if begun.elapsed() > GENEROUS / 2 {
            let log = std::fs::read_to_string(dir.path().join("log"));
            panic!("{status:?}, and the daemon says {log:?}");
        }
        said.contains("nosy") && !said.contains("no instance has registered it yet")
    });
    let o = soloist(&["trigger", "nosy", "--wait"])
        .output()
        .expect("it starts");
    crate::support::process::signal(daemon.id(), Signal::TERM);
    assert!(daemon.wait().expect("it ends").success());
    let said = String::from_utf8_lossy(&o.stdout);
    // The command can read its own children as ever.
    assert_eq!(said, "refused\nrefused\nread\n", "{o:?}");
}

/// A daemon of some user with some privileges, in a directory that all may write.
struct Privileged {
    dir: tempfile::TempDir,
    as_whom: &'static [&'static str],
    daemon: Option<std::process::Child>,
}

impl Privileged {
    fn start(as_whom: &'static [&'static str], jobs: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mode = |file: &str, mode: u32| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(dir.path().join(file), mode).expect("chmod");
        };
        // A user other than root makes the store's file there; root would not read a file that others may write.
        mode(".", if as_whom.is_empty() { 0o755 } else { 0o777 });
        copy_program(env!("CARGO_BIN_EXE_soloist"), &dir.path().join("soloist"));
        mode("soloist", 0o755);
        // A setuid program, as sudo is: a user that executes it becomes root.
        copy_program("/usr/bin/id", &dir.path().join("like-sudo"));
        mode("like-sudo", 0o4755);
        std::fs::write(dir.path().join("jobs.toml"), jobs).expect("write the file");
        let mut this = Self {
            dir,
            as_whom,
            daemon: None,
        };
        let log = std::fs::File::create(this.dir.path().join("log")).expect("a log");
        let daemon = this.soloist(&["run"]).stderr(log).spawn();
        this.daemon = Some(daemon.expect("it starts"));
        this
    }

    fn soloist(&self, words: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new("setpriv");
        command
            .args(self.as_whom)
            .arg("./soloist")
            .args(words)
            .current_dir(self.dir.path())
            .env_remove("SOLOIST_CONFIG")
            .stdin(std::process::Stdio::null());
        command
    }

    /// Triggers the job and waits for the run's end.
    fn trigger(&self, job: &str) -> std::process::Output {
        // The store may not be there yet, or not know the job.
        wait_for("a run", GENEROUS, || {
            let o = self.soloist(&["trigger", job, "--wait"]).output();
            let o = o.expect("it starts");
            (!matches!(o.status.code(), Some(69 | 75))).then_some(o)
        })
    }

    /// The output of a triggered run, which must succeed.
    fn run(&self, job: &str) -> String {
        let o = self.trigger(job);
        assert!(o.status.success(), "{o:?}");
        String::from_utf8_lossy(&o.stdout).into_owned()
    }
}

impl Drop for Privileged {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            crate::support::process::signal(daemon.id(), Signal::TERM);
            crate::support::process::reap(&mut daemon, GENEROUS);
        }
    }
}

/// Says its sets of capabilities and whether there may be new ones; whether it can become root, alone and with the help
/// of a setuid program.
const PRIVILEGES: &str = r#"command = """
grep -E '^(Cap|NoNewPrivs)' /proc/self/status
setpriv --reuid=0 true 2>/dev/null && echo became root
./like-sudo -u
""""#;

fn privileges<'a>(said: &'a str, of: &str) -> &'a str {
    let line = said.lines().find_map(|l| l.strip_prefix(of));
    line.unwrap_or_else(|| panic!("no {of}: {said}"))
        .trim_start_matches([':', '\t', '0'])
}

#[test]
fn a_job_of_another_user_keeps_no_privilege_of_the_daemons() {
    const AMBIENT: &[&str] = &[
        "--reuid=daemon",
        "--regid=daemon",
        "--clear-groups",
        "--inh-caps=+setuid,+setgid,+kill,+net_raw",
        "--ambient-caps=+setuid,+setgid,+kill,+net_raw",
    ];
    const SETS: [&str; 4] = ["CapInh", "CapPrm", "CapEff", "CapAmb"];
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let jobs = format!(
        "[jobs.other]\n{PRIVILEGES}\nuser = 'nobody'\n\
         [jobs.allowed]\n{PRIVILEGES}\nuser = 'nobody'\nnew_privileges = true\n\
         [jobs.own]\n{PRIVILEGES}\n"
    );
    let nobody = nix::unistd::User::from_name("nobody").ok().flatten();
    let nobody = nobody.expect("nobody").uid.to_string();
    for as_whom in [&[][..], AMBIENT] {
        let daemon = Privileged::start(as_whom, &jobs);
        for job in ["other", "allowed"] {
            let said = daemon.run(job);
            for set in SETS {
                assert_eq!(privileges(&said, set), "", "{job}: {said}");
            }
            assert!(!said.contains("became root"), "{job}: {said}");
            let allowed = job == "allowed";
            let none_new = if allowed { "" } else { "1" };
            assert_eq!(privileges(&said, "NoNewPrivs"), none_new, "{said}");
            // To take away from this one is a privilege of its own.
            let bound = !allowed && as_whom.is_empty();
            assert_eq!(
                privileges(&said, "CapBnd").is_empty(),
                bound,
                "{job}: {said}"
            );
            let whom = if allowed { "0" } else { &nobody };
            assert_eq!(said.lines().last(), Some(whom), "{job}: {said}");
        }
        let own = daemon.run("own");
        assert_eq!(privileges(&own, "NoNewPrivs"), "", "{own}");
        assert_eq!(own.lines().last(), Some("0"), "{own}");
        if as_whom.is_empty() {
            assert_ne!(privileges(&own, "CapEff"), "", "{own}");
        } else {
            // CAP_NET_RAW alone: the others are there for `user`.
            for set in SETS {
                assert_eq!(privileges(&own, set), "2000", "{own}");
            }
            assert!(!own.contains("became root"), "{own}");
        }
    }
}

#[test]
fn a_job_of_another_user_that_could_not_be_ended_is_not_started() {
    const WITHOUT_KILL: &[&str] = &[
        "--reuid=daemon",
        "--regid=daemon",
        "--clear-groups",
        "--inh-caps=+setuid,+setgid",
        "--ambient-caps=+setuid,+setgid",
    ];
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let daemon = Privileged::start(
        WITHOUT_KILL,
        "[jobs.own]\ncommand = 'true'\n[jobs.other]\ncommand = 'touch ran'\nuser = 'nobody'\n",
    );
    daemon.run("own");
    let o = daemon.trigger("other");
    let said = String::from_utf8_lossy(&o.stderr).into_owned();
    assert!(!o.status.success() && said.contains("CAP_KILL"), "{o:?}");
    assert!(!daemon.dir.path().join("ran").exists());
}

#[test]
fn a_record_says_what_its_run_took() {
    // What counts is a child of the command; the bytes are written by another one.
    let busy = "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; head -c 5000 /dev/zero";
    let lines = |command: &str| format!("schedule = \"* * * * * *\"\ncommand = {command:?}\n");
    let fleet = fleet(1)
        .job("busy", &lines(busy))
        .job("quiet", &lines("true"))
        .job(
            "none",
            "schedule = \"* * * * * *\"\ncommand = [\"/nonexistent/x\"]\n",
        )
        .start();
    let busy = fleet.wait_record("busy", "succeeded");
    let number = |record: &Value, name: &str| record[name].as_u64();
    assert!(number(&busy, "cpu_ms") > Some(20), "{busy}");
    // One process after the other: together not more than the run lasted.
    let lasted = number(&busy, "duration_ms").map(|ms| ms + 1000);
    assert!(number(&busy, "cpu_ms") < lasted, "{busy}");
    assert!(number(&busy, "peak_memory_bytes") > Some(100_000), "{busy}");
    assert_eq!(number(&busy, "output_bytes"), Some(5000), "{busy}");
    let quiet = fleet.wait_record("quiet", "succeeded");
    assert!(
        number(&quiet, "cpu_ms") < number(&busy, "cpu_ms"),
        "{quiet}"
    );
    assert_eq!(number(&quiet, "output_bytes"), Some(0), "{quiet}");
    let none = fleet.wait_record("none", "failed");
    for name in ["cpu_ms", "peak_memory_bytes", "output_bytes"] {
        assert!(none[name].is_null(), "{none}");
    }
}
