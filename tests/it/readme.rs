//! The README's own lines, the shipped `jobs.toml`, and what the documents name: run as they stand there, so that they
//! stay true.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    http::client,
    support::{
        GENEROUS, fleet, process,
        server::{RedisServer, free_port},
        wait_until,
    },
};

const README: &str = include_str!("../../README.md");
const DOCKERFILE: &str = include_str!("../../Dockerfile");

/// The code blocks of a page that are in this language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let (mut found, mut open) = (vec![], None::<(usize, String)>);
    for line in page.lines() {
        let text = line.trim_start();
        match (&mut open, text.strip_prefix("```")) {
            (None, Some(of)) if of == language => {
                open = Some((line.len() - text.len(), String::new()))
            }
            (Some(_), Some(_)) => found.extend(open.take().map(|(_, block)| block)),
            (Some((indent, block)), None) => {
                *block += line.get(*indent..).unwrap_or("");
                block.push('\n');
            }
            _ => {}
        }
    }
    found
}

/// A copy of the files that a user has, with `soloist` on the PATH.
struct Clone {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Clone {
    fn new(jobs: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        std::fs::write(dir.path().join("jobs.toml"), jobs).expect("jobs.toml");
        for (target, link) in [
            (here.join("examples"), "examples"),
            (env!("CARGO_BIN_EXE_soloist").into(), "soloist"),
        ] {
            std::os::unix::fs::symlink(target, dir.path().join(link)).expect("a link");
        }
        Self { dir, daemon: None }
    }

    fn command(&self, line: &str) -> Command {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = std::iter::once(self.dir.path().to_owned());
        let path = std::env::join_paths(own.chain(std::env::split_paths(&path))).expect("a PATH");
        // A command that waits for ever is to fail its test, not to hang it.
        let mut command = Command::new("timeout");
        command
            .args(["120", "sh", "-c", line])
            .current_dir(self.dir.path())
            .env("PATH", path)
            .stdin(Stdio::null());
        for name in [
            "SOLOIST_CONFIG",
            "SOLOIST_LOG",
            "SOLOIST_INSTANCE",
            "NOTIFY_SOCKET",
        ] {
            command.env_remove(name);
        }
        command
    }

    fn sh(&self, line: &str) -> Output {
        self.command(line).output().expect("a shell")
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// `soloist run`, until this value ends; returns when it grants.
    fn run(&mut self, instance: &str) {
        let log = std::fs::File::create(self.log()).expect("a log");
        let mut command = process::mortal(env!("CARGO_BIN_EXE_soloist"));
        command
            .arg("run")
            .current_dir(self.dir.path())
            .env("SOLOIST_INSTANCE", instance)
            .env_remove("SOLOIST_CONFIG")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log);
        self.daemon = Some(command.spawn().expect("soloist starts"));
        wait_until("the instance is up", GENEROUS, || {
            let status = self.sh("soloist status --json");
            let text = String::from_utf8_lossy(&status.stdout).into_owned();
            text.contains(&format!("\"{instance}\"")) && !text.contains("\"known\": false")
        });
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            process::signal(daemon.id(), Signal::TERM);
            process::reap(daemon, Duration::from_secs(10));
        }
        process::end_soloists_in(self.dir.path());
        if std::thread::panicking() {
            eprintln!(
                "{}",
                std::fs::read_to_string(self.log()).unwrap_or_default()
            );
        }
    }
}

/// A line without what differs from run to run: numbers, names of days and winners, durations.
fn shape(line: &str) -> String {
    let mut text = String::new();
    for word in line.split_whitespace() {
        let mut shaped = String::new();
        for c in word.chars() {
            match c {
                '0'..='9' if shaped.ends_with('#') => {}
                '0'..='9' => shaped.push('#'),
                c => shaped.push(c),
            }
        }
        let day = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"].contains(&word);
        text += match day {
            true => "DAY",
            false if word.contains('@') => "WHO",
            false => &shaped,
        };
        text.push(' ');
    }
    // A whole second is written without its milliseconds.
    let mut text = text.replace("#.#Z", "#Z");
    if let Some(at) = text.find(" in #") {
        text.replace_range(at.., " in SOME TIME");
    }
    for (from, to) in [
        ("# s ago", "now"),
        ("#.# s", "TOOK"),
        ("# ms", "TOOK"),
        ("# s", "TOOK"),
    ] {
        text = text.replace(from, to);
    }
    if text.starts_with("#. ") {
        text = "#. WINNER no. #".into();
    }
    text.trim_end().to_owned()
}

/// Asserts that the output has the form that the page shows; there `...` stands for any lines.
#[track_caller]
fn assert_shown(shown: &[&str], printed: &str, of: &str) {
    let lines: Vec<String> = printed.lines().map(shape).collect();
    let (mut next, mut any) = (0, false);
    for line in shown {
        if line.trim() == "..." {
            any = true;
            continue;
        }
        let wanted = shape(line);
        if std::mem::take(&mut any) {
            // The last of its kind: winners all look alike.
            let found = lines.iter().rposition(|l| *l == wanted);
            next = found.unwrap_or_else(|| panic!("`{of}` lacks {wanted:?}:\n{printed}"));
        }
        let line = lines.get(next);
        assert_eq!(line, Some(&wanted), "`{of}` prints:\n{printed}");
        next += 1;
    }
    assert!(any || next == lines.len(), "`{of}` prints more:\n{printed}");
}

#[test]
fn the_eight_lines_print_what_the_readme_shows() {
    let [eight, _fleet] = &blocks(README, "toml")[..] else {
        panic!("not two configurations in the README");
    };
    assert_eq!(eight.lines().filter(|l| !l.is_empty()).count(), 7);
    let [console] = &blocks(README, "console")[..] else {
        panic!("not one console in the README");
    };
    let mut clone = Clone::new(eight);
    // The instance whose name the page shows.
    clone.run("web-1-5e6f");
    let mut commands: Vec<(&str, Vec<&str>)> = vec![];
    for line in console.lines() {
        match line.strip_prefix("$ ") {
            Some(command) => commands.push((command, vec![])),
            None => commands.last_mut().expect("a command first").1.push(line),
        }
    }
    assert!(commands.len() >= 3, "{commands:?}");
    for (command, shown) in commands {
        let ran = clone.sh(command);
        let out = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert!(ran.status.success(), "`{command}` failed: {ran:?}");
        assert_shown(&shown, &out, command);
    }
}

#[test]
fn the_readmes_fleet_configuration_is_valid() {
    let fleet = &blocks(README, "toml")[1];
    let file = "/etc/soloist/redis-password";
    assert!(fleet.contains(file), "{fleet}");
    let jobs =
        fleet.replace(file, "password") + "[jobs.a]\nschedule = '@daily'\ncommand = 'true'\n";
    let clone = Clone::new(&jobs);
    std::fs::write(clone.dir.path().join("password"), "secret\n").expect("a file");
    let ran = clone.sh("soloist check");
    let out = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{ran:?}");
    assert!(out.contains("rediss://"), "{out}");
}

#[test]
fn the_readmes_lines_start_a_fleet_on_one_host() {
    let blocks = blocks(README, "sh");
    let lines = blocks.iter().find(|b| b.starts_with("redis-server "));
    let mut lines = lines.expect("a fleet in the README").clone();
    let clone = Clone::new(include_str!("../../jobs.toml"));
    let ports = [free_port(), free_port(), free_port()].map(|port| port.to_string());
    std::fs::write(clone.dir.path().join("ports"), ports.join("\n") + "\n").expect("ports");
    let founded =
        "until soloist --config web-1.toml status | grep -q '^1 live'; do sleep 0.1; done";
    for (written, here) in [
        ("7379", &*free_port().to_string()),
        ("787$n", "$(sed -n ${n}p ports)"),
        ("sleep 3", founded),
    ] {
        assert!(lines.contains(written), "{lines}");
        lines = lines.replace(written, here);
    }
    lines += "trap 'kill $(jobs -p); wait' TERM\nwait\n";
    let mut shell = clone.command(&lines);
    shell.stdout(Stdio::null()).stderr(Stdio::null());
    let mut shell = shell.spawn().expect("a shell");
    wait_until("all three are up and draw", GENEROUS, || {
        let ran = clone.sh(
            "soloist --config web-2.toml status; soloist --config web-3.toml history lottery-demo",
        );
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        [
            "3 live instances",
            "\nweb-1 ",
            "\nweb-2 ",
            "\nweb-3 ",
            "succeeded",
        ]
        .iter()
        .all(|word| text.contains(word))
    });
    for port in &ports {
        let page = client::get(&format!("127.0.0.1:{port}"), "/healthz").send();
        assert_eq!(page.status, 200, "{port}");
    }
    process::signal(shell.id(), Signal::TERM);
    assert!(shell.wait().is_ok());
}

/// The sample's store and commands are relative paths.
#[test]
fn the_dockerfiles_lines_put_the_sample_where_it_can_write() {
    let setting = |name: &str| {
        let mut lines = DOCKERFILE.lines().filter_map(|l| l.strip_prefix(name));
        lines.next_back().map(str::trim)
    };
    let place = setting("WORKDIR ").expect("a directory");
    assert_eq!(setting("VOLUME "), Some(place));
    assert!(!DOCKERFILE.contains("SOLOIST_CONFIG"));
    for mounted in ["jobs.toml", "examples"] {
        let mount = format!(" -v ./{mounted}:{place}/{mounted}:ro ");
        assert!(DOCKERFILE.contains(&mount), "{mount}");
    }
}

/// An orchestrator must not restart an instance because its store is away, but because it hangs.
#[test]
fn the_images_health_check_does_not_ask_the_store() {
    let check = DOCKERFILE.replace("\\\n", "");
    let check = check.lines().find_map(|l| l.strip_prefix("HEALTHCHECK "));
    let check = check.and_then(|l| Some(l.split_once("CMD ")?.1));
    let check: Vec<String> = serde_json::from_str(check.expect("a check")).expect("JSON");
    let mut fleet = fleet::fleet(1).http("").start();
    let at = fleet.http(0);
    let port = at.rsplit(':').next().expect("a port");
    let passes = |port: &str, within: &str| {
        let words = check.iter().map(|word| word.replace("7878", port));
        let ran = Command::new("timeout").arg(within).args(words).output();
        ran.expect("bash").status.success()
    };
    let ready = || client::get(&at, "/readyz").send().status == 200;
    wait_until("the store answers", GENEROUS, ready);
    assert!(passes(port, "60"));
    fleet.server().stop();
    wait_until("the store is away", GENEROUS, || !ready());
    assert!(passes(port, "60"));
    fleet.instances[0].signal(Signal::STOP);
    assert!(!passes(port, "1"), "it hangs");
    fleet.instances[0].signal(Signal::CONT);
    fleet.server().cont();
    fleet.stop();
    assert!(passes(port, "60"), "without [http]");
}

#[test]
fn the_readmes_crontab_line_runs_once_in_its_period() {
    let crontab = blocks(README, "sh")
        .into_iter()
        .find(|b| b.starts_with("* * * * *"));
    let crontab = crontab.expect("a crontab line in the README");
    let line = crontab.trim().trim_start_matches("* * * * *").trim();
    let server = RedisServer::start();
    let clone = Clone::new("");
    let (store, report) = ("redis://redis.example.net/0", "/usr/local/bin/report");
    assert!(line.contains(store) && line.contains(report), "{line}");
    let url = format!("redis://127.0.0.1:{}/0", server.port());
    let line = line
        .replace(store, &url)
        .replace(report, "sh -c 'echo ran >> report'");
    let minute = || {
        let (seconds, _): (i64, i64) = server.command(&["TIME"]);
        seconds / 60
    };
    let ran = || {
        let text = std::fs::read_to_string(clone.dir.path().join("report")).unwrap_or_default();
        text.lines().count()
    };
    // Again where a new minute began meanwhile.
    for _ in 0..3 {
        let (begun, before) = (minute(), ran());
        let hosts = [clone.command(&line).spawn(), clone.command(&line).spawn()];
        let codes = hosts.map(|host| host.expect("a shell").wait().expect("it ends").code());
        if minute() == begun {
            assert_eq!(ran() - before, 1, "{codes:?}");
            assert!(codes.contains(&Some(0)), "{codes:?}");
            return;
        }
    }
    panic!("no three commands within a minute");
}

#[test]
fn the_readmes_commands_and_their_options_exist() {
    let table = README.lines().filter(|l| l.starts_with("| `soloist "));
    let clone = Clone::new("");
    let mut seen = BTreeSet::new();
    for row in table {
        let cell = row.split(" | ").next().expect("a cell");
        for (i, text) in cell.split('`').enumerate().filter(|(i, _)| i % 2 == 1) {
            assert!(i == 1 || !text.starts_with("soloist"), "{row}");
            let text = text.trim_start_matches("soloist ");
            let name = text.split(' ').next().expect("a command");
            let help = clone.sh(&format!("soloist {name} --help"));
            assert!(help.status.success(), "{name}: {help:?}");
            let help = String::from_utf8_lossy(&help.stdout).into_owned();
            // Up to a command that it runs.
            let own = text.split(" -- ").next().expect("words");
            for option in own
                .split(|c: char| " []".contains(c))
                .filter(|w| w.starts_with('-'))
            {
                let there = help
                    .split(|c: char| " ,\n".contains(c))
                    .any(|w| w == option);
                assert!(there, "`soloist {name}` has no {option}:\n{help}");
            }
            seen.insert(name.to_owned());
        }
    }
    // Each command of the program is there.
    let help = clone.sh("soloist --help");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let commands = help
        .split("Commands:\n")
        .nth(1)
        .expect("commands")
        .split("\n\n")
        .next();
    let all: BTreeSet<String> = (commands.expect("commands").lines())
        .filter_map(|l| l.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help")
        .map(str::to_owned)
        .collect();
    assert_eq!(seen, all);
}

#[test]
fn the_shipped_jobs_do_what_their_comments_say() {
    let mut clone = Clone::new(include_str!("../../jobs.toml"));
    let check = clone.sh("soloist check");
    assert!(check.status.success(), "{check:?}");
    clone.run("here");
    // On its own, every five seconds; the others are asked for.
    wait_until("the demonstration draws", GENEROUS, || {
        let history = clone.sh("soloist history lottery-demo --outcome succeeded --json");
        String::from_utf8_lossy(&history.stdout).contains("\"schedule\"")
    });
    let hello = "hello for 2";
    for (job, code, output) in [
        ("lottery-draw", 0, "And the winners of "),
        ("hello", 0, hello),
        ("environment", 0, "hello, path /"),
        ("spread", 0, "somewhere in the first third of the minute\n"),
        ("flaky", 0, "attempt 1\nattempt 2\n"),
        ("hangs", 128 + 15, "this takes too long\n"),
        ("reindex", 0, "indexed\n"),
        ("nightly", 0, "good night, Berlin\n"),
    ] {
        if job == "flaky" {
            // Its occurrence at second 30 would take the place of an attempt that is awaited then.
            wait_until("its occurrence is far", GENEROUS, || {
                !(20..32).contains(&(soloist::clock::wall_us() / 1_000_000 % 60))
            });
        }
        let ran = clone.sh(&format!("soloist trigger {job} --wait"));
        let out = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert_eq!(ran.status.code(), Some(code), "{job}: {ran:?}");
        assert!(out.starts_with(output), "{job}: {out}");
    }
    let history = clone.sh("soloist history hangs --outcome timed_out --json");
    assert!(String::from_utf8_lossy(&history.stdout).contains("\"timed_out\""));
    // Each job of the file was looked at: one more is switched off.
    let status = clone.sh("soloist status --json");
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let jobs = status["jobs"].as_array().expect("jobs");
    let off: Vec<_> = jobs
        .iter()
        .filter(|j| j["enabled"] == false)
        .map(|j| &j["job"])
        .collect();
    assert_eq!(
        (jobs.len(), &off[..]),
        (10, &[&serde_json::json!("off")][..])
    );
}

/// The pages that people read.
fn pages() -> Vec<(PathBuf, String)> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let docs = std::fs::read_dir(here.join("docs")).expect("docs");
    let mut files: Vec<PathBuf> = docs.map(|f| f.expect("a file").path()).collect();
    let others = [
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "examples/lottery/README.md",
    ];
    files.extend(others.map(|f| here.join(f)));
    files.retain(|f| f.extension().is_some_and(|e| e == "md"));
    let read = |f: &PathBuf| std::fs::read_to_string(f).expect("a page");
    files.iter().map(|f| (f.clone(), read(f))).collect()
}

#[test]
fn links_between_the_pages_lead_somewhere() {
    for (file, text) in pages() {
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().expect("a part");
            if target.is_empty() || target.contains("://") {
                continue;
            }
            let path = file.parent().expect("a directory").join(target);
            assert!(path.exists(), "{} links to {link}", file.display());
        }
    }
}

fn sources(path: &Path) -> String {
    let entries = fs::read_dir(path).expect("a directory").flatten();
    let texts = entries.map(|entry| match entry.path() {
        path if path.is_dir() => sources(&path),
        // Some hold what is no text.
        path => fs::read_to_string(path).unwrap_or_default(),
    });
    texts.collect()
}

#[test]
fn the_functions_that_the_pages_name_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let code = sources(&root.join("src")) + &sources(&root.join("tests/it"));
    let (mut missing, mut found) = (vec![], 0);
    for page in ["docs/design.md", "CONTRIBUTING.md"] {
        let text = fs::read_to_string(root.join(page)).expect("a page");
        // In backquotes: `Type::function`, `Type::VARIANT`.
        for name in text.split('`').skip(1).step_by(2) {
            let plain = |c: char| c.is_alphanumeric() || "_:".contains(c);
            let Some((_, last)) = name.rsplit_once("::").filter(|_| name.chars().all(plain)) else {
                continue;
            };
            let mut there = vec![
                format!("fn {last}("),
                format!("fn {last}<"),
                format!("mod {last};"),
            ];
            // A type, or a variant of one.
            if last.starts_with(char::is_uppercase) {
                there.extend([
                    format!("enum {last} "),
                    format!("struct {last} "),
                    format!("    {last}"),
                ]);
            }
            match there.iter().any(|form| code.contains(form.as_str())) {
                true => found += 1,
                false => missing.push(name.to_owned()),
            }
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
    assert!(found > 15, "{found}");
}

/// Whether a name fits, where `*` stands for anything.
fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            (0..=name.len()).any(|i| name.is_char_boundary(i) && fits(rest, &name[i..]))
        }),
    }
}

#[test]
fn the_tests_that_the_guarantees_name_exist() {
    let list = Command::new(std::env::current_exe().expect("this program"))
        .args(["--list", "--format", "terse"])
        .output()
        .expect("a list of tests");
    let list = String::from_utf8(list.stdout).expect("UTF-8");
    let ours: Vec<&str> = list
        .lines()
        .filter_map(|l| l.strip_suffix(": test"))
        .collect();
    assert!(ours.len() > 400, "{}", ours.len());
    let page = include_str!("../../docs/guarantees.md");
    let name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:*".contains(c);
    let quoted = page.split('`').skip(1).step_by(2);
    let names: BTreeSet<&str> = quoted
        .filter(|t| t.chars().all(name) && (t.contains("::") || t.matches('_').count() >= 3))
        .collect();
    assert!(names.len() > 40, "{names:?}");
    // A unit test, or all of a module.
    let unit = |t: &str| {
        let module = format!("src/{}.rs", t.replace("::", "/"));
        if Path::new(env!("CARGO_MANIFEST_DIR")).join(module).exists() {
            return true;
        }
        let module = t.split("::tests::").next().unwrap_or(t).replace("::", "/");
        let own = t.rsplit("::").next().unwrap_or(t);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let text: String = [format!("{module}.rs"), format!("{module}/tests.rs")]
            .iter()
            .map(|file| std::fs::read_to_string(source.join(file)).unwrap_or_default())
            .collect();
        let mut fns = text.split("fn ").filter_map(|rest| rest.split('(').next());
        fns.any(|name| fits(own, name))
    };
    let missing: Vec<&&str> = names
        .iter()
        .filter(|t| {
            let any = format!("*::{t}");
            let below = format!("{t}::*");
            let found = |n: &&&str| fits(t, n) || fits(&any, n) || fits(&below, n);
            ours.iter().find(found).is_none() && !unit(t)
        })
        .collect();
    assert!(
        missing.is_empty(),
        "docs/guarantees.md names tests that do not exist: {missing:#?}"
    );
}
