//! `examples/lottery`: a database that checks the fencing token refuses what a frozen holder writes late. Promise 8 of
//! docs/guarantees.md, on SQLite, PostgreSQL, MariaDB and the text file that stands in where no sqlite3 is.
//!
//! A database that is not installed is skipped; nothing here needs the network.

use std::{
    collections::BTreeSet,
    fs,
    io::Write as _,
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::unistd::{User, geteuid};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support;

const WINNERS: usize = 10;
const STALE: i32 = 3;
const USAGE: i32 = 64;

/// Where a test's entrants are, and how to look at its tables without `draw.sh`.
struct Database {
    /// As `draw.sh` takes it.
    url: String,
    /// Prints the answer to the SQL on its stdin, columns separated by tabs. None: the text file at `url`.
    client: Option<Vec<String>>,
}

impl Database {
    /// Starts one draw with the environment that soloist would give it.
    fn start(&self, job: &str, occurrence_ms: i64, token: i64) -> Child {
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/lottery/draw.sh"))
            .args(["--winners", &WINNERS.to_string(), "--seed", "42"])
            .env("LOTTERY_DB", &self.url)
            .env("SOLOIST_JOB", job)
            .env(
                "SOLOIST_OCCURRENCE",
                soloist::model::rfc3339_ms(occurrence_ms),
            )
            .env("SOLOIST_OCCURRENCE_MS", occurrence_ms.to_string())
            .env("SOLOIST_FENCING_TOKEN", token.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("draw.sh starts")
    }

    fn draw(&self, job: &str, occurrence_ms: i64, token: i64) -> Drawn {
        Drawn::from(
            self.start(job, occurrence_ms, token)
                .wait_with_output()
                .expect("draw.sh ends"),
        )
    }

    /// The rows of `table` (fence, draws, winners) that belong to `job`, without the job's name.
    fn rows(&self, table: &str, job: &str) -> Vec<Vec<String>> {
        let columns = match table {
            "fence" => "token",
            "draws" => "occurrence_ms, token, entrants",
            _ => "occurrence_ms, place, entrant",
        };
        let Some(client) = &self.client else {
            let text = fs::read_to_string(self.url.trim_start_matches("file:")).unwrap_or_default();
            let lines = text
                .lines()
                .map(|line| line.split('\t').map(str::to_owned).collect::<Vec<_>>());
            return lines
                .filter(|row| row[0] == table.trim_end_matches('s') && row[1] == job)
                .map(|row| match table {
                    "draws" => vec![row[2].clone(), row[4].clone(), row[6].clone()],
                    "winners" => row[2..5].to_vec(),
                    _ => row[2..].to_vec(),
                })
                .collect();
        };
        let mut child = Command::new(&client[0])
            .args(&client[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the database's client starts");
        let sql = format!("select {columns} from {table} where job = '{job}' order by 1, 2;");
        let sql = if table == "fence" {
            sql.replace(", 2", "")
        } else {
            sql
        };
        child
            .stdin
            .take()
            .expect("piped")
            .write_all(sql.as_bytes())
            .expect("the client reads");
        let out = child.wait_with_output().expect("the client ends");
        assert!(out.status.success(), "{sql} on {}", self.url);
        let text = String::from_utf8(out.stdout).expect("UTF-8");
        text.lines()
            .map(|line| line.split('\t').map(str::to_owned).collect())
            .collect()
    }

    fn fence(&self, job: &str) -> String {
        self.rows("fence", job).concat().concat()
    }

    /// Asserts that `job` has one draw of `occurrence_ms`, by `token`, with ten different winners.
    fn assert_drawn_once(&self, job: &str, occurrence_ms: i64, token: i64) {
        let at = occurrence_ms.to_string();
        let draws: Vec<_> = self
            .rows("draws", job)
            .into_iter()
            .filter(|row| row[0] == at)
            .collect();
        assert_eq!(
            draws,
            [[at.clone(), token.to_string(), "1000".to_owned()]],
            "{}",
            self.url
        );
        let winners: Vec<_> = self
            .rows("winners", job)
            .into_iter()
            .filter(|row| row[0] == at)
            .collect();
        assert_eq!(winners.len(), WINNERS, "{}", self.url);
        let different: BTreeSet<_> = winners.iter().map(|row| &row[2]).collect();
        assert_eq!(
            different.len(),
            WINNERS,
            "{}: a winner twice: {winners:?}",
            self.url
        );
    }
}

/// What one draw said.
#[derive(Debug)]
struct Drawn {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl From<Output> for Drawn {
    fn from(out: Output) -> Self {
        Self {
            code: out.status.code(),
            stdout: String::from_utf8(out.stdout).expect("UTF-8"),
            stderr: String::from_utf8(out.stderr).expect("UTF-8"),
        }
    }
}

impl Drawn {
    fn assert_done(&self) {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.winners().len(), WINNERS, "{self:?}");
    }

    fn assert_refused(&self, token: i64) {
        assert_eq!(self.code, Some(STALE), "{self:?}");
        assert!(
            self.stderr.contains(&format!("token {token} is stale")),
            "{self:?}"
        );
        assert_eq!(self.stdout, "", "a refused draw announces nobody");
    }

    /// The numbers of the winners, in their order.
    fn winners(&self) -> Vec<u32> {
        let numbers = self
            .stdout
            .lines()
            .filter_map(|line| line.split_once(" no. "));
        numbers
            .map(|(_, number)| number.parse().expect("a number"))
            .collect()
    }
}

const NOON: i64 = 1_767_225_600_000;
const DAY: i64 = 86_400_000;

fn every_rule_holds(db: &Database) {
    attempts_at_one_time_make_one_draw(db);
    a_stale_token_is_refused(db);
    an_occurrence_is_drawn_once(db);
    a_seed_means_the_same_winners_everywhere(db);
    what_is_no_name_reaches_no_database(db);
}

/// Runs first: all eight find an empty database, so the set-up is contended too.
fn attempts_at_one_time_make_one_draw(db: &Database) {
    let children: Vec<_> = (1..=8)
        .map(|token| (token, db.start("crowd", NOON, token)))
        .collect();
    let drawn: Vec<(i64, Drawn)> = children
        .into_iter()
        .map(|(t, c)| (t, Drawn::from(c.wait_with_output().expect("draw.sh ends"))))
        .collect();
    let mut announced = BTreeSet::new();
    for (token, drawn) in &drawn {
        if drawn.code == Some(STALE) {
            drawn.assert_refused(*token);
        } else {
            drawn.assert_done();
            announced.insert(drawn.winners());
        }
    }
    assert_eq!(
        drawn[7].1.code,
        Some(0),
        "nobody is newer than the newest: {drawn:?}"
    );
    assert_eq!(
        announced.len(),
        1,
        "all that were let through announce the same winners: {drawn:?}"
    );
    assert_eq!(db.fence("crowd"), "8", "{}", db.url);
    let draws = db.rows("draws", "crowd");
    assert_eq!(draws.len(), 1, "{draws:?}");
    let winner: i64 = draws[0][1].parse().expect("a token");
    assert_eq!(
        drawn[winner as usize - 1].1.code,
        Some(0),
        "the recorded draw was let through: {drawn:?}"
    );
    db.assert_drawn_once("crowd", NOON, winner);
}

/// The holder of token 1 froze, token 2 drew in its place, then the first one thaws and writes.
fn a_stale_token_is_refused(db: &Database) {
    db.draw("fence", NOON, 2).assert_done();
    let before = (db.rows("draws", "fence"), db.rows("winners", "fence"));
    db.draw("fence", NOON, 1).assert_refused(1);
    // Also for an occurrence that has no draw yet: here nothing but the fence stands in its way.
    db.draw("fence", NOON - DAY, 1).assert_refused(1);
    assert_eq!(
        (db.rows("draws", "fence"), db.rows("winners", "fence")),
        before,
        "{}",
        db.url
    );
    assert_eq!(db.fence("fence"), "2", "{}", db.url);
    // Other jobs have a fence of their own.
    db.draw("another-fence", NOON, 1).assert_done();
}

fn an_occurrence_is_drawn_once(db: &Database) {
    let first = db.draw("once", NOON, 5);
    first.assert_done();
    let again = db.draw("once", NOON, 5);
    again.assert_done();
    assert_eq!(
        first.stdout, again.stdout,
        "asking again gives the same answer"
    );
    let takeover = db.draw("once", NOON, 6);
    takeover.assert_done();
    assert_eq!(takeover.winners(), first.winners());
    assert!(
        takeover.stdout.contains("Already drawn, with token 5"),
        "{takeover:?}"
    );
    db.assert_drawn_once("once", NOON, 5);
    assert_eq!(db.fence("once"), "6", "{}", db.url);

    let stolen = db.draw("once", NOON + DAY, 5);
    stolen.assert_refused(5);
    db.draw("once", NOON + DAY, 7).assert_done();
    db.assert_drawn_once("once", NOON + DAY, 7);
}

fn a_seed_means_the_same_winners_everywhere(db: &Database) {
    let drawn = db.draw("seed", NOON, 1);
    assert_eq!(
        drawn.winners(),
        [50, 507, 650, 490, 954, 639, 543, 155, 364, 684],
        "{}",
        db.url
    );
}

fn what_is_no_name_reaches_no_database(db: &Database) {
    let drawn = db.draw("x'; drop table draws; --", NOON, 1);
    assert_eq!(drawn.code, Some(USAGE), "{drawn:?}");
    db.assert_drawn_once("once", NOON, 5);
}

#[test]
fn the_text_file_refuses_a_stale_draw() {
    let dir = TempDir::new().expect("a directory");
    every_rule_holds(&Database {
        url: format!("file:{}", dir.path().join("lottery.tsv").display()),
        client: None,
    });
}

#[test]
fn sqlite_refuses_a_stale_draw() {
    let Some(sqlite3) = installed("sqlite3") else {
        return skip("SQLite", "sqlite3");
    };
    let dir = TempDir::new().expect("a directory");
    let file = dir.path().join("lottery.db").display().to_string();
    let client = [&sqlite3, "-batch", "-separator", "\t", &file]
        .map(str::to_owned)
        .to_vec();
    every_rule_holds(&Database {
        url: format!("sqlite:{file}"),
        client: Some(client),
    });
}

#[test]
fn postgres_refuses_a_stale_draw() {
    let (Some(psql), Some(initdb), Some(postgres)) = (
        installed("psql"),
        installed("initdb"),
        installed("postgres"),
    ) else {
        return skip("PostgreSQL", "postgresql");
    };
    let dir = TempDir::new().expect("a directory");
    // It refuses to be root: then its files and processes belong to somebody else.
    let user = geteuid().is_root().then(|| {
        let found = ["postgres", "nobody"]
            .iter()
            .find_map(|name| User::from_name(name).ok().flatten());
        found.expect("a user `postgres` or `nobody`")
    });
    if let Some(user) = &user {
        chown(dir.path(), Some(user.uid.as_raw()), Some(user.gid.as_raw())).expect("chown");
    }
    let program = |path: &str| {
        let mut command = Command::new(path);
        command.current_dir(dir.path()).env("LC_ALL", "C.UTF-8");
        if let Some(user) = &user {
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        command
    };
    let data = dir.path().join("data");
    let out = program(&initdb)
        .args(["-U", "postgres", "-A", "trust", "--no-sync", "-D"])
        .arg(&data)
        .output();
    succeeded("initdb", &out.expect("initdb starts"));
    let url = format!(
        "postgresql:///postgres?host={}&user=postgres",
        dir.path().display()
    );
    let client = [&psql, "-X", "-q", "-A", "-t", "-F", "\t", "-d", &url]
        .map(str::to_owned)
        .to_vec();
    let _server = Server::start(
        program(&postgres)
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(dir.path())
            .args([
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
                "-c",
                "jit=off",
            ]),
        // An immediate shutdown: its children end with it, and so does its shared memory.
        Signal::QUIT,
        &dir.path().join("log"),
        &client,
    );
    every_rule_holds(&Database {
        url,
        client: Some(client),
    });
}

#[test]
fn mariadb_refuses_a_stale_draw() {
    let (Some(mariadb), Some(install), Some(mariadbd)) = (
        installed("mariadb"),
        installed("mariadb-install-db"),
        installed("mariadbd"),
    ) else {
        return skip("MariaDB", "mariadb-server");
    };
    let dir = TempDir::new().expect("a directory");
    let data = format!("--datadir={}", dir.path().join("data").display());
    let socket = dir.path().join("socket");
    // As root it wants to be told that root is meant.
    let user = geteuid().is_root().then_some("--user=root");
    let out = Command::new(install)
        .args([
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            &data,
        ])
        .args(user)
        .output();
    succeeded(
        "mariadb-install-db",
        &out.expect("mariadb-install-db starts"),
    );
    let socket_option = format!("--socket={}", socket.display());
    let client = [
        &mariadb,
        "--no-defaults",
        "-N",
        "-B",
        "--user=root",
        &socket_option,
    ]
    .map(str::to_owned)
    .to_vec();
    let _server = Server::start(
        Command::new(mariadbd)
            .args([
                "--no-defaults",
                "--skip-networking",
                "--innodb-flush-log-at-trx-commit=0",
                &data,
                &socket_option,
            ])
            .arg(format!("--pid-file={}", dir.path().join("pid").display()))
            .args(user),
        Signal::TERM,
        &dir.path().join("log"),
        &client,
    );
    let out = Command::new(&client[0])
        .args(&client[1..])
        .args(["-e", "create database lottery"])
        .output();
    succeeded("create database", &out.expect("the client starts"));
    let client = [client, vec!["lottery".to_owned()]].concat();
    let url = format!("mysql://root@localhost/lottery?socket={}", socket.display());
    every_rule_holds(&Database {
        url,
        client: Some(client),
    });
}

/// A database server of this test alone; it ends with this value.
struct Server {
    child: Child,
    stop: Signal,
}

impl Server {
    /// Returns once `client` gets an answer.
    fn start(command: &mut Command, stop: Signal, log: &Path, client: &[String]) -> Self {
        let output = fs::File::create(log).expect("a log");
        command
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a descriptor"))
            .stderr(output);
        let mut server = Self {
            child: command.spawn().expect("the server starts"),
            stop,
        };
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            let probe = Command::new(&client[0])
                .args(&client[1..])
                .stdin(Stdio::null())
                .output();
            if probe.expect("the client starts").status.success() {
                return server;
            }
            let ended = server.child.try_wait().expect("a child");
            assert!(
                ended.is_none() && Instant::now() < patience,
                "the server does not answer ({ended:?}):\n{}",
                fs::read_to_string(log).unwrap_or_default()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Not yet waited for, so the id is still its own.
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process(pid, self.stop);
        }
        let _ = self.child.wait();
    }
}

/// The path of a program, also of those that Debian keeps out of `PATH`.
fn installed(program: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    folders.extend(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    if let Ok(versions) = fs::read_dir("/usr/lib/postgresql") {
        folders.extend(versions.flatten().map(|version| version.path().join("bin")));
    }
    let found = folders
        .into_iter()
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())?;
    Some(found.display().to_string())
}

fn skip(database: &str, package: &str) {
    support::skip(&format!(
        "{database} is not installed (apt-get install {package})"
    ));
}

fn succeeded(what: &str, out: &Output) {
    let text = [
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    ]
    .concat();
    assert!(out.status.success(), "{what}: {}\n{text}", out.status);
}

#[test]
fn a_password_of_a_database_is_no_argument() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    let fake = "#!/bin/sh\necho \"$@\" >args\nprintf '%s' \"${PGPASSWORD-}${MYSQL_PWD-}\" >password\ncat >/dev/null\nexit 1\n";
    for program in ["psql", "mariadb"] {
        let path = dir.path().join(program);
        fs::write(&path, fake).expect("a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    let path = std::env::var("PATH").unwrap_or_default();
    for (url, place) in [
        (
            "postgres://me:p%40%7e%25ss@host:1/db?sslmode=off",
            "postgres://me@host:1/db?sslmode=off",
        ),
        ("postgresql://:p%40%7e%25ss@host", "postgres://host"),
        ("mysql://me:p%40%7e%25ss@host:1/db", "--host=host"),
    ] {
        let out =
            Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/lottery/draw.sh"))
                .current_dir(dir.path())
                .env("PATH", format!("{}:{path}", dir.path().display()))
                .envs([
                    ("LOTTERY_DB", url),
                    ("SOLOIST_JOB", "a"),
                    ("SOLOIST_OCCURRENCE", "2026-01-01T00:00:00Z"),
                    ("SOLOIST_OCCURRENCE_MS", "1767225600000"),
                    ("SOLOIST_FENCING_TOKEN", "1"),
                ])
                .output()
                .expect("draw.sh starts");
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        let said = |name: &str| fs::read_to_string(dir.path().join(name)).expect("it was asked");
        assert!(
            !said("args").contains("ss@") && !said("args").contains("%40"),
            "{}",
            said("args")
        );
        assert!(said("args").contains(place), "{}", said("args"));
        assert_eq!(said("password"), "p@~%ss", "{url}");
    }
}
