//! Every key of `[store]` against real Redis servers: TLS, users, sockets, databases, namespaces, timeouts, pools,
//! replicas, retries; and a server that is not set up as it must be.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use soloist::{
    config,
    logic::claim::{
        Answer, Claim, Control, Event, Grant, OnCrash, Overlap, Register, Registration, Renew,
        Renewal, Target,
    },
    model::{InstanceId, JobName, Occurrence, RunId, Trigger},
    store::{self, Error, Store},
};
use tempfile::TempDir;

use crate::support::{
    GENEROUS,
    fleet::{Fleet, LATE_RATHER_THAN_SKIPPED, each_second, fleet, occurrence_ms},
    registration,
    server::{RedisServer, free_port},
    trace::ONCE,
    wait_for, wait_until,
};

const SECRET: &str = "s3cret-Pa55";

/// A directory with a configuration, and what it names.
struct Site(TempDir);

impl Site {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }
    fn file(&self, name: &str, text: &str) {
        std::fs::write(self.0.path().join(name), text).expect("a file is written");
    }
    /// With these lines in `[store]`.
    fn configure(&self, lines: &str) -> config::Config {
        let text =
            format!("[store]\n{lines}\n[jobs.backup]\nschedule = \"@daily\"\ncommand = \"true\"\n");
        self.file("jobs.toml", &text);
        config::load(&self.0.path().join("jobs.toml"), config::Sends::All)
            .unwrap_or_else(|e| panic!("{e}"))
    }
    fn store(&self, lines: &str) -> Arc<dyn Store> {
        store::open(&self.configure(lines).store).expect("a store")
    }
    fn cli(&self, words: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_soloist"))
            .args(words)
            .current_dir(self.0.path())
            .env_remove("SOLOIST_CONFIG")
            .env_remove("SOLOIST_LOG")
            .stdin(Stdio::null())
            .output()
            .expect("soloist starts")
    }
    /// What `soloist status` says where it cannot reach the store, which must be one chain and one hint, without the
    /// password.
    #[track_caller]
    fn failure(&self, lines: &str) -> String {
        // A busy host needs a while for TLS.
        let patient = if lines.contains("timeout") {
            ""
        } else {
            "timeout = \"5s\"\n"
        };
        self.configure(&format!("{lines}\n{patient}retry = {{ attempts = 0 }}"));
        let o = self.cli(&["status"]);
        let text = String::from_utf8(o.stderr).expect("stderr is UTF-8");
        assert_eq!((o.status.code(), o.stdout.len()), (Some(69), 0), "{text}");
        assert!(!text.contains(SECRET), "{text}");
        assert!(
            text.lines().count() == 2 && text.contains("\nhint: "),
            "{text}"
        );
        text
    }
    #[track_caller]
    fn works(&self, lines: &str) {
        self.configure(lines);
        let o = self.cli(&["status"]);
        let (out, err) = (
            String::from_utf8_lossy(&o.stdout),
            String::from_utf8_lossy(&o.stderr),
        );
        assert!(o.status.success(), "{err}");
        assert!(out.contains("no instance is up"), "{out}");
        assert!(!out.contains(SECRET) && !err.contains(SECRET), "{out}{err}");
    }
}

fn backup() -> JobName {
    JobName::new("backup")
}

fn claim(job: JobName, at: i64, instance: &str) -> Claim {
    Claim {
        job,
        target: Target::Scheduled(Occurrence(at)),
        known: Occurrence(0),
        missed: vec![],
        run: RunId::random(),
        instance: InstanceId::new(instance),
        host: instance.to_owned(),
        trigger: Trigger::Schedule,
        start_by: at + 3_600_000,
        lease: 15_000,
        overlap: Overlap::Skip,
        on_crash: OnCrash::Fail,
        max_attempts: 1,
        definition: "d".to_owned(),
        observed: None,
        holds: vec![],
        cause: None,
    }
}

fn renewal(c: &Claim, seq: u32) -> Renew {
    let Target::Scheduled(occurrence) = c.target else {
        panic!("a scheduled claim");
    };
    let grant = Grant {
        occurrence,
        attempt: 1,
        trigger: c.trigger,
    };
    Renew {
        late: false,
        reclaim: String::new(),
        job: c.job.clone(),
        run: c.run(grant, occurrence.0),
        seq,
    }
}

/// The store's time (Unix ms), with these jobs registered in its present incarnation.
async fn register(s: &dyn Store, jobs: &[JobName]) -> i64 {
    let look = s.observe(&[]).await.expect("the store answers");
    let ask: Vec<Register> = jobs
        .iter()
        .map(|job| registration(job, Some(look.incarnation.to_string())))
        .collect();
    let answers = s.register(&ask).await.expect("jobs are registered").value;
    assert!(
        answers.iter().all(|(a, _)| *a == Registration::Ready),
        "{answers:?}"
    );
    look.now_us / 1000
}

async fn ask(s: &dyn Store, c: &Claim) -> Result<Answer, Error> {
    let reply = s.claim(std::slice::from_ref(c)).await?;
    Ok(reply.value.into_iter().next().expect("one answer"))
}

#[track_caller]
fn openssl(dir: &Path, words: &str) {
    let o = Command::new("openssl")
        .args(words.split(' '))
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| {
            panic!("cannot start openssl: {e}; the tests need it (./test.sh installs it)")
        });
    assert!(
        o.status.success(),
        "openssl {words}: {}",
        String::from_utf8_lossy(&o.stderr)
    );
}

/// Two authorities, `ca` and `other`; certificates of the first for a server (`server`), for a server of another name
/// (`elsewhere`) and for a client, and one of the second for a client (`stranger`); a server's that nobody else signed
/// (`own`): NAME.pem and NAME.key each.
pub fn certificates(dir: &Path) {
    let config = "[req]\ndistinguished_name = dn\nprompt = no\n[dn]\nCN = soloist-test\n\
                  [authority]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\n\
                  [server]\nsubjectAltName = DNS:localhost, IP:127.0.0.1\nextendedKeyUsage = serverAuth\n\
                  [elsewhere]\nsubjectAltName = DNS:elsewhere.example.org\nextendedKeyUsage = serverAuth\n\
                  [client]\nbasicConstraints = CA:FALSE\nextendedKeyUsage = clientAuth\n";
    std::fs::write(dir.join("openssl.cnf"), config).expect("openssl.cnf");
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config openssl.cnf";
    for name in ["ca", "other"] {
        openssl(
            dir,
            &format!(
                "req -x509 {key} -extensions authority -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem"
            ),
        );
    }
    openssl(
        dir,
        &format!(
            "req -x509 {key} -extensions server -days 2 -subj /CN=own -keyout own.key -out own.pem"
        ),
    );
    for (name, from, kind) in [
        ("server", "ca", "server"),
        ("elsewhere", "ca", "elsewhere"),
        ("client", "ca", "client"),
        ("stranger", "other", "client"),
    ] {
        openssl(
            dir,
            &format!("req {key} -subj /CN={name} -keyout {name}.key -out {name}.csr"),
        );
        openssl(
            dir,
            &format!(
                "x509 -req -in {name}.csr -CA {from}.pem -CAkey {from}.key -CAcreateserial -days 2 -extfile openssl.cnf -extensions {kind} -out {name}.pem"
            ),
        );
    }
}

fn tls_server(site: &Site, clients: &str) -> (RedisServer, u16) {
    let port = free_port();
    let path = |name: &str| site.0.path().join(name).display().to_string();
    let server = RedisServer::start_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &path("server.pem"),
        "--tls-key-file",
        &path("server.key"),
        "--tls-ca-cert-file",
        &path("ca.pem"),
        "--tls-auth-clients",
        clients,
    ]);
    (server, port)
}

#[test]
fn tls_is_spoken_with_servers_of_the_given_authority_only() {
    let site = Site::new();
    certificates(site.0.path());
    let (_server, port) = tls_server(&site, "no");
    let url = format!("url = \"rediss://localhost:{port}\"");
    site.works(&format!("{url}\ntls = {{ ca = \"ca.pem\" }}"));
    site.works(&format!(
        "url = \"rediss://127.0.0.1:{port}/2\"\ntls = {{ ca = \"ca.pem\" }}"
    ));
    for lines in [
        format!("{url}\ntls = {{ ca = \"other.pem\" }}"),
        url.clone(),
    ] {
        let e = site.failure(&lines);
        assert!(e.contains("`tls.ca`"), "{e}");
    }
    let e = site.failure(&format!(
        "{url}\ntls = {{ ca = \"ca.pem\", cert = \"client.pem\", key = \"stranger.key\" }}"
    ));
    assert!(
        e.contains("the key does not belong to the certificate"),
        "{e}"
    );
    // Not a TLS client at all.
    let e = site.failure(&format!("url = \"redis://localhost:{port}\""));
    assert!(e.contains(&format!("localhost:{port}")), "{e}");
    // A server without TLS answers nothing.
    let plain = free_port();
    let _plain = RedisServer::start_with(&["--port", &plain.to_string()]);
    let e = site.failure(&format!("url = \"rediss://localhost:{plain}\""));
    assert!(e.contains("does not speak TLS"), "{e}");
    // A file that cannot be read or used as a certificate is named.
    site.file("junk.pem", "junk");
    let lines = format!("{url}\ntls = {{ ca = \"junk.pem\" }}");
    site.configure(&lines);
    for code in [69, 78] {
        let o = site.cli(&["status"]);
        let e = String::from_utf8_lossy(&o.stderr).into_owned();
        assert!(
            o.status.code() == Some(code) && e.contains("junk.pem"),
            "{e}"
        );
        std::fs::remove_file(site.0.path().join("junk.pem")).ok();
    }
}

#[test]
fn tls_shows_the_clients_own_certificate() {
    let site = Site::new();
    certificates(site.0.path());
    let (_server, port) = tls_server(&site, "yes");
    let with = |own: &str| {
        format!("url = \"rediss://localhost:{port}\"\ntls = {{ ca = \"ca.pem\"{own} }}")
    };
    site.works(&with(", cert = \"client.pem\", key = \"client.key\""));
    for own in ["", ", cert = \"stranger.pem\", key = \"stranger.key\""] {
        let e = site.failure(&with(own));
        assert!(e.contains(&format!("localhost:{port}")), "{e}");
        assert!(
            e.contains("wants a certificate that it trusts"),
            "{own}: {e}"
        );
    }
}

/// Errors that only a real server gives: each says what it means.
#[tokio::test]
async fn a_server_that_takes_no_writes_says_why_and_so_does_the_history() {
    let site = Site::new();
    let server = RedisServer::start_with(&["--enable-protected-configs", "yes"]);
    let url = server.url();
    let e = site.failure(&format!("url = \"{url}?db=99\""));
    assert!(e.contains("raise its `databases`"), "{e}");
    let store = site.store(&format!("url = {url:?}"));
    let now = register(&*store, &[backup()]).await;
    let refused = async |words: &str| {
        let e = ask(&*store, &claim(backup(), now, "a")).await;
        let e = e.expect_err("no grant");
        assert!(e.is_transient() && e.to_string().contains(words), "{e}");
        let o = site.cli(&["history"]);
        let told = String::from_utf8_lossy(&o.stderr).into_owned();
        // It has no runs to show, or cannot even look for them.
        assert!(told.contains(words), "{:?}: {told}", o.status);
    };
    let gone = site.0.path().join("gone");
    std::fs::create_dir(&gone).expect("a directory");
    server.command::<()>(&["CONFIG", "SET", "dir", &gone.display().to_string()]);
    std::fs::remove_dir(&gone).expect("removed");
    server.command::<()>(&["CONFIG", "SET", "save", "3600 1"]);
    server.command::<redis::Value>(&["BGSAVE"]);
    wait_until("the server cannot save", GENEROUS, || {
        let info: String = server.command(&["INFO", "persistence"]);
        info.contains("rdb_last_bgsave_status:err")
    });
    refused("cannot save its data").await;
    server.command::<()>(&["CONFIG", "SET", "save", ""]);
    server.command::<()>(&["REPLICAOF", "127.0.0.1", "1"]);
    refused("is a replica").await;
}

/// A pipe that nobody writes to, and a file without an end.
#[test]
fn files_of_tls_that_have_no_end_hang_nothing() {
    let site = Site::new();
    let pipe = site.0.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo").success());
    let pipe = pipe.display().to_string();
    for (file, keys) in [
        (&*pipe, &["ca"][..]),
        (&*pipe, &["cert", "key"]),
        ("/dev/zero", &["ca"]),
        ("/dev/zero", &["cert", "key"]),
    ] {
        let tls: Vec<String> = keys.iter().map(|k| format!("{k} = {file:?}")).collect();
        let lines = format!(
            "url = \"rediss://localhost:1\"\ntls = {{ {} }}",
            tls.join(", ")
        );
        let text = format!("[store]\n{lines}\n[jobs.a]\nschedule = []\ncommand = \"true\"\n");
        site.file("jobs.toml", &text);
        for words in [
            &["check"][..],
            &["status"],
            &["run"],
            &["exec", "--lock", "a", "--", "true"],
        ] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_soloist"));
            command
                .args(words)
                .current_dir(site.0.path())
                .env_remove("SOLOIST_CONFIG")
                .env_remove("SOLOIST_STORE_URL")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            let mut child = command.spawn().expect("soloist starts");
            crate::support::process::reap(&mut child, GENEROUS);
            let o = child.wait_with_output().expect("it ended");
            let said = String::from_utf8_lossy(&o.stderr).into_owned();
            assert_eq!(o.status.code(), Some(78), "{words:?} {tls:?}: {said}");
            for key in keys {
                assert!(
                    said.contains(&format!(
                        "`tls.{key}`: cannot read `{file}`: it is not a regular file"
                    )),
                    "{words:?} {tls:?}: {said}"
                );
            }
        }
    }
}

/// The user that docs/operations.md describes, as the words of ACL SETUSER.
fn documented_user() -> Vec<String> {
    let page = include_str!("../../docs/operations.md");
    let line = page
        .lines()
        .find_map(|l| l.strip_prefix("user "))
        .expect("docs/operations.md has the line of an ACL file");
    assert!(line.contains("-@all") && line.contains("~soloist:*") && line.contains("&soloist:*"));
    let line = line.replace("CHANGE-ME", SECRET);
    ["ACL", "SETUSER"]
        .into_iter()
        .chain(line.split(' '))
        .map(str::to_owned)
        .collect()
}

fn set_documented_user(server: &RedisServer) {
    let words = documented_user();
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn a_fleet_needs_no_more_than_the_documented_permissions() {
    let site = Site::new();
    site.file("password", &format!("{SECRET}\n"));
    let file = site.0.path().join("password").display().to_string();
    let mut fleet = fleet(2)
        .store(&format!("username = \"soloist\"\npassword_file = {file:?}"))
        .witness("a", "for=5", "")
        .job(
            "long",
            "command = [\"{witness}\", \"{trace}\", \"for=600000\", \"beat=50\"]",
        )
        .start();
    // The user does not exist yet: that is said, without the password, and waited out.
    wait_until("the refusal is in the log", GENEROUS, || {
        let text = fleet.instances[0].log_text();
        text.contains("does not accept the user name and password")
    });
    let e = fleet.cli(&["status"]);
    let e = String::from_utf8_lossy(&e.stderr).into_owned();
    assert!(
        e.contains("does not accept the user name and password"),
        "{e}"
    );
    set_documented_user(fleet.server());
    fleet.server().command::<()>(&["ACL", "LOG", "RESET"]);
    fleet.wait_runs(3);
    fleet.json(&["status", "--json"]);
    assert!(fleet.cli(&["trigger", "long"]).status.success());
    fleet.wait_holder("long");
    for words in [
        &["pause", "a", "--reason", "test"][..],
        &["resume", "a"],
        &["skip", "a"],
        &["cancel", "long"],
        &["drain", "i2"],
        &["undrain", "i2"],
        &["why", "a"],
        &["logs", "long"],
        &["trigger", "a", "--wait"],
    ] {
        let o = fleet.cli(words);
        assert!(
            o.status.success(),
            "{words:?}: {}",
            String::from_utf8_lossy(&o.stderr)
        );
    }
    fleet.wait_record("long", "cancelled");
    let denied: Vec<Vec<redis::Value>> = fleet.server().command(&["ACL", "LOG"]);
    let denied: Vec<String> = denied
        .iter()
        .map(|entry| format!("{entry:?}"))
        // redis-rs introduces itself; a refusal of that is nothing.
        .filter(|entry| !entry.contains("client|setinfo"))
        .collect();
    assert_eq!(denied, Vec::<String>::new(), "the page allows too little");
    fleet.stop();
    for i in &fleet.instances {
        assert!(
            !i.log_text().contains(SECRET),
            "{} wrote the password",
            i.id
        );
    }
    // Nothing outside of the namespace, and no other command.
    let mut c = redis::Client::open(fleet.server().url().as_str())
        .and_then(|c| c.get_connection())
        .expect("a connection");
    redis::cmd("AUTH")
        .arg("soloist")
        .arg(SECRET)
        .exec(&mut c)
        .expect("the user may log in");
    for words in [
        &["HGET", "elsewhere", "x"][..],
        &["PUBLISH", "elsewhere", "x"],
        &["KEYS", "*"],
        &["FLUSHALL"],
    ] {
        let mut cmd = redis::cmd(words[0]);
        let e = cmd.arg(&words[1..]).exec(&mut c).expect_err("refused");
        assert_eq!(e.code(), Some("NOPERM"), "{words:?}: {e}");
    }
}

#[test]
fn a_reload_says_what_of_the_store_takes_effect_at_the_next_start() {
    let site = Site::new();
    let file = site.0.path().join("password").display().to_string();
    site.file("password", &format!("{SECRET}\n"));
    let mut fleet = fleet(1)
        .store(&format!("username = \"soloist\"\npassword_file = {file:?}"))
        .witness("a", "for=5", "")
        .start();
    set_documented_user(fleet.server());
    fleet.wait_runs(1);
    let reloads = |fleet: &Fleet| {
        let log = fleet.instances[0].log_text();
        log.matches("configuration reloaded").count()
    };
    let says = |fleet: &Fleet| {
        let log = fleet.instances[0].log_text();
        log.matches("[store] has changed (the password)").count()
    };
    let reload = |fleet: &Fleet| {
        let before = reloads(fleet);
        fleet.instances[0].signal(rustix::process::Signal::HUP);
        wait_until("the configuration is reloaded", GENEROUS, || {
            reloads(fleet) > before
        });
    };
    reload(&fleet);
    assert_eq!(says(&fleet), 0, "nothing has changed");
    site.file("password", "another-0ne");
    reload(&fleet);
    wait_until("the change is said", GENEROUS, || says(&fleet) == 1);
    // Each reload says it again as long as the change is there.
    reload(&fleet);
    wait_until("the change is said again", GENEROUS, || says(&fleet) == 2);
    site.file("password", &format!("{SECRET}\n"));
    reload(&fleet);
    // The store goes on as it was.
    fleet.wait_more_runs(1);
    fleet.stop();
    let log = fleet.instances[0].log_text();
    assert!(!log.contains(SECRET) && !log.contains("another-0ne"));
    assert_eq!(says(&fleet), 2, "{log}");
}

/// A file that is read while an editor writes it may be short of its `[store]`.
#[test]
fn a_reload_that_names_another_store_is_refused() {
    let mut fleet = fleet(1).witness("a", "for=5", "").start();
    fleet.wait_runs(1);
    let config = fleet.instances[0].config.clone();
    let written = std::fs::read_to_string(&config).expect("the configuration");
    let other = "\nenabled = false\n";
    for changed in [
        String::new(),
        written.replacen("[store]", "[store]\nnamespace = \"other\"", 1) + other,
    ] {
        std::fs::write(&fleet.instances[0].log, "").expect("an empty log");
        std::fs::write(&config, changed).expect("write the configuration");
        fleet.instances[0].signal(rustix::process::Signal::HUP);
        fleet.wait_log(0, "names another store");
        fleet.wait_more_runs(2);
    }
    fleet.stop();
}

#[test]
fn a_wrong_or_missing_password_is_named_and_not_shown() {
    let server = RedisServer::start();
    set_documented_user(&server);
    let site = Site::new();
    site.file("password", &format!("{SECRET}\n"));
    site.file("wrong", &format!("x{SECRET}"));
    let port = server.port();
    let tcp = format!("url = \"redis://localhost:{port}\"");
    let socket = format!("url = {:?}", server.url());
    for url in [&tcp, &socket] {
        site.works(&format!(
            "{url}\nusername = \"soloist\"\npassword_file = \"password\""
        ));
        for who in [
            "username = \"soloist\"\npassword_file = \"wrong\"",
            "username = \"nobody\"\npassword_file = \"password\"",
        ] {
            let e = site.failure(&format!("{url}\n{who}"));
            assert!(
                e.contains("does not accept the user name and password"),
                "{e}"
            );
        }
    }
    site.works(&format!(
        "url = \"redis://soloist:{SECRET}@localhost:{port}/0\""
    ));
    let e = site.failure(&format!(
        "url = \"redis://soloist:x{SECRET}@localhost:{port}/0\""
    ));
    assert!(
        e.contains("does not accept the user name and password"),
        "{e}"
    );
    // A missing permission, inside a script and for the script.
    for (without, word) in [("-info", "script"), ("-evalsha", "evalsha")] {
        server.command::<()>(&["ACL", "SETUSER", "soloist", without]);
        let e = site.failure(&format!(
            "{tcp}\nusername = \"soloist\"\npassword_file = \"password\""
        ));
        assert!(e.contains(word) && e.contains("docs/operations.md"), "{e}");
    }
    // A server that wants a password where none is configured; then the default user's.
    server.command::<()>(&["CONFIG", "SET", "requirepass", SECRET]);
    let e = site.failure(&tcp);
    assert!(
        e.contains("wants a password") && e.contains("password_file"),
        "{e}"
    );
    site.works(&format!("{tcp}\npassword_file = \"password\""));
    let e = site.failure(&format!("{tcp}\npassword_file = \"wrong\""));
    assert!(
        e.contains("does not accept the user name and password"),
        "{e}"
    );
}

#[tokio::test]
async fn databases_and_namespaces_keep_fleets_apart() {
    let server = RedisServer::start();
    let (site, port, socket) = (Site::new(), server.port(), server.url());
    let tcp = site.store(&format!("url = \"redis://localhost:{port}\""));
    let now = register(&*tcp, &[backup()]).await;
    assert!(matches!(
        ask(&*tcp, &claim(backup(), now, "a")).await,
        Ok(Answer::Granted(_))
    ));
    // The same database by its other names.
    for url in [
        socket.clone(),
        format!("{socket}?db=0"),
        format!("redis://127.0.0.1:{port}/0"),
    ] {
        let other = site.store(&format!("url = {url:?}"));
        let answer = ask(&*other, &claim(backup(), now, "b"))
            .await
            .expect("an answer");
        assert!(matches!(answer, Answer::Running(_)), "{url}: {answer:?}");
    }
    // Another one, by both of its names; another namespace.
    let third = site.store(&format!("url = \"redis://localhost:{port}/3\""));
    register(&*third, &[backup()]).await;
    assert!(matches!(
        ask(&*third, &claim(backup(), now, "a")).await,
        Ok(Answer::Granted(_))
    ));
    let same = site.store(&format!("url = \"{socket}?db=3\""));
    assert!(matches!(
        ask(&*same, &claim(backup(), now, "b")).await,
        Ok(Answer::Running(_))
    ));
    let named = site.store(&format!("url = {socket:?}\nnamespace = \"web:blue\""));
    assert_eq!(
        ask(&*named, &claim(backup(), now, "a"))
            .await
            .expect("an answer"),
        Answer::Absent
    );
    register(&*named, &[backup()]).await;
    assert!(matches!(
        ask(&*named, &claim(backup(), now, "a")).await,
        Ok(Answer::Granted(_))
    ));
    let keys: Vec<String> = server.command(&["KEYS", "*"]);
    let (blue, rest): (Vec<_>, Vec<_>) = keys.iter().partition(|k| k.starts_with("web:blue:"));
    assert!(!blue.is_empty(), "{keys:?}");
    assert!(rest.iter().all(|k| k.starts_with("soloist:")), "{keys:?}");

    // Hints stay in their namespace.
    let (mut plain_events, mut blue_events) = (tcp.events(), named.events());
    let trigger = async |s: &dyn Store, key: &str| {
        let what = Control::Trigger {
            key: key.to_owned(),
        };
        s.control(&backup(), &what).await.expect("a trigger");
    };
    let mut n = 0;
    for (events, s, name) in [
        (&mut plain_events, &tcp, "plain"),
        (&mut blue_events, &named, "blue"),
    ] {
        // Until the subscription is there.
        loop {
            n += 1;
            trigger(&**s, &format!("{name}-{n}")).await;
            if let Ok(Ok(Event::Triggered { key, .. })) =
                tokio::time::timeout(Duration::from_millis(200), events.recv()).await
            {
                assert!(key.starts_with(name), "{key}");
                break;
            }
        }
    }
    trigger(&*tcp, "plain-last").await;
    trigger(&*named, "blue-last").await;
    for (events, name) in [(&mut plain_events, "plain"), (&mut blue_events, "blue")] {
        loop {
            let received = tokio::time::timeout(GENEROUS, events.recv())
                .await
                .expect("a hint");
            if let Ok(Event::Triggered { key, .. }) = received {
                assert!(key.starts_with(name), "{name} received {key}");
                if key.ends_with("last") {
                    break;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_server_that_hangs_costs_about_the_timeout() {
    let server = RedisServer::start();
    let site = Site::new();
    for url in [server.url(), format!("redis://localhost:{}", server.port())] {
        let s = site.store(&format!("url = {url:?}\ntimeout = \"300ms\""));
        let now = register(&*s, &[backup()]).await;
        server.stop();
        // With a connection that was made before, and with one that is to be made.
        for _ in 0..2 {
            let begun = Instant::now();
            let e = ask(&*s, &claim(backup(), now, "a"))
                .await
                .expect_err("no answer");
            assert!(e.is_transient(), "{e}");
            // The server never answers: without the timeout this would not be reached.
            assert!(begun.elapsed() < GENEROUS, "{:?}", begun.elapsed());
        }
        server.cont();
        let begun = Instant::now();
        while ask(&*s, &claim(backup(), now, "a")).await.is_err() {
            assert!(begun.elapsed() < GENEROUS, "it does not come back");
        }
    }
}

#[tokio::test]
async fn one_connection_is_enough_for_two_hundred_claims_at_once() {
    let server = RedisServer::start();
    let site = Site::new();
    let s = site.store(&format!(
        "url = {:?}\ntimeout = \"2s\"\npool_size = 1",
        server.url()
    ));
    let jobs: Vec<JobName> = (0..200).map(|i| JobName::new(&format!("job{i}"))).collect();
    let now = register(&*s, &jobs).await;
    let claims = jobs.iter().map(|job| {
        let (s, c) = (s.clone(), claim(job.clone(), now, "a"));
        tokio::spawn(async move { ask(&*s, &c).await })
    });
    for answer in futures_util::future::join_all(claims).await {
        let answer = answer.expect("no panic");
        assert!(matches!(answer, Ok(Answer::Granted(_))), "{answer:?}");
    }
    let clients: String = server.command(&["CLIENT", "LIST"]);
    let asking = clients
        .lines()
        .filter(|c| c.contains("cmd=evalsha"))
        .count();
    let renewing = 2;
    assert!((1..=1 + renewing).contains(&asking), "{clients}");
}

/// A replica of `server`, connected and up to date.
fn replica(server: &RedisServer) -> RedisServer {
    let port = server.port().to_string();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    await_replica(server);
    replica
}

fn await_replica(server: &RedisServer) {
    wait_until("the replica follows", GENEROUS, || {
        let info: String = server.command(&["INFO", "replication"]);
        info.contains("state=online")
    });
}

#[tokio::test]
async fn grants_and_renewals_count_only_when_the_replica_has_them() {
    let server = RedisServer::start_with(&["--repl-diskless-sync-delay", "0"]);
    let site = Site::new();
    let s = site.store(&format!(
        "url = {:?}\nmin_replicas = 1\ntimeout = \"1s\"",
        server.url()
    ));
    // Before anything is known there: a server whose first replica comes gives its data another name.
    let replica = replica(&server);
    let now = register(&*s, &[backup()]).await;
    let c = claim(backup(), now, "a");
    let lacks = |answer: Result<String, Error>| {
        assert!(
            matches!(
                answer,
                Err(Error::NotReplicated {
                    have: 0,
                    want: 1,
                    ..
                })
            ),
            "{answer:?}"
        );
    };
    let claim_again = async || ask(&*s, &c).await.map(|a| format!("{a:?}"));
    let renew = async |seq| {
        s.renew(&renewal(&c, seq))
            .await
            .map(|r| format!("{:?}", r.value))
    };
    // Asked again, the answer must not become better by itself.
    replica.stop();
    lacks(claim_again().await);
    lacks(claim_again().await);
    replica.cont();
    wait_until_async(async || matches!(ask(&*s, &c).await, Ok(Answer::Granted(_)))).await;
    assert_eq!(
        s.renew(&renewal(&c, 1)).await.expect("renewed").value,
        Renewal::Renewed(None)
    );
    replica.stop();
    for seq in 2..4 {
        lacks(renew(seq).await);
        lacks(claim_again().await);
    }
    let later = claim(backup(), now + 1, "b");
    assert!(
        matches!(ask(&*s, &later).await, Err(Error::NotReplicated { .. })),
        "not even a refusal is relied on"
    );
    replica.cont();
    wait_until_async(async || renew(4).await.is_ok()).await;
    assert!(matches!(ask(&*s, &c).await, Ok(Answer::Granted(_))));
}

async fn wait_until_async(mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < GENEROUS, "waited in vain");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the server's clock shows so many seconds more; returns what it showed before, in Unix ms.
fn pass(server: &RedisServer, seconds: i64) -> i64 {
    let now = || {
        let (s, us): (i64, i64) = server.command(&["TIME"]);
        s * 1000 + us / 1000
    };
    let before = now();
    wait_until("time passes", GENEROUS, || now() >= before + seconds * 1000);
    before
}

/// Starts of occurrences after `after` (Unix ms).
fn starts_after(fleet: &Fleet, after: i64) -> usize {
    fleet
        .trace()
        .runs()
        .iter()
        .filter(|r| r.occurrence > after)
        .count()
}

#[test]
fn a_fleet_starts_nothing_without_its_replica() {
    let mut fleet = fleet(2)
        .store("min_replicas = 1")
        .witness("a", "for=5", "")
        .witness("long", "for=3000 beat=20", "")
        .start();
    let said = |fleet: &Fleet, times: usize| {
        wait_until("it says that the replica is missing", GENEROUS, || {
            let logs: String = fleet.instances.iter().map(|i| i.log_text()).collect();
            logs.matches("only 0 of 1 replicas").count() >= times
        });
    };
    said(&fleet, 1);
    assert_eq!(fleet.trace().runs().len(), 0);
    // The commands name what is missing.
    for command in [&["status"][..], &["why", "a"], &["trigger", "a"]] {
        wait_until("the command says it", GENEROUS, || {
            let said = fleet.cli(command);
            let said = [said.stdout, said.stderr].concat();
            String::from_utf8_lossy(&said).contains("only 0 of 1 replicas follow the server")
        });
    }
    let replica = replica(fleet.server());
    fleet.wait_runs(4);
    // Longer than its lease of two seconds: it was renewed.
    fleet.wait_record("long", "succeeded");

    let logs: String = fleet.instances.iter().map(|i| i.log_text()).collect();
    let before = logs.matches("only 0 of 1 replicas").count();
    replica.stop();
    let stopped = pass(fleet.server(), 3);
    said(&fleet, before + 1);
    // What was granted before may still start; what is due a second later may not.
    assert_eq!(starts_after(&fleet, stopped + 1000), 0);
    replica.cont();
    wait_until("occurrences start again", GENEROUS, || {
        starts_after(&fleet, stopped + 1000) >= 4
    });
    fleet.stop_all_now();
    fleet.judge(ONCE, &["a"], None);
    drop(replica);
}

#[test]
fn commands_ask_again_as_often_as_configured() {
    let site = Site::new();
    // Nobody listens there.
    let port = free_port();
    for (retry, again, at_least) in [
        ("attempts = 0", 0, 0),
        (
            "attempts = 3, interval = \"50ms\", backoff = \"fixed\", jitter = false",
            3,
            150,
        ),
        (
            "attempts = 3, interval = \"50ms\", jitter = false",
            3,
            50 + 100 + 200,
        ),
        (
            "attempts = 4, interval = \"50ms\", max_interval = \"60ms\"",
            4,
            50,
        ),
    ] {
        site.configure(&format!(
            "url = \"redis://localhost:{port}\"\ntimeout = \"50ms\"\nretry = {{ {retry} }}"
        ));
        let begun = Instant::now();
        let o = site.cli(&["--log", "soloist=debug", "status"]);
        let text = String::from_utf8_lossy(&o.stderr).into_owned();
        assert_eq!(o.status.code(), Some(69), "{text}");
        assert_eq!(
            text.matches("asking again").count(),
            again,
            "{retry}: {text}"
        );
        assert!(
            begun.elapsed() >= Duration::from_millis(at_least),
            "{retry}"
        );
    }
}

#[tokio::test]
async fn a_servers_set_up_is_read_without_permission_to_configure() {
    let server = RedisServer::start();
    set_documented_user(&server);
    let site = Site::new();
    site.file("password", SECRET);
    let s = site.store(&format!(
        "url = {:?}\nusername = \"soloist\"\npassword_file = \"password\"",
        server.url()
    ));
    assert_eq!(s.check().await.expect("a look"), []);
    for (policy, fatal) in [
        ("allkeys-lru", true),
        ("allkeys-lfu", true),
        ("allkeys-random", true),
        ("volatile-lru", false),
        ("volatile-ttl", false),
    ] {
        server.command::<()>(&["CONFIG", "SET", "maxmemory-policy", policy]);
        let found = s.check().await.expect("a look");
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].fatal, fatal, "{policy}");
        assert!(found[0].text.contains(policy), "{found:?}");
    }
    server.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    assert_eq!(s.check().await.expect("a look"), []);
}

#[test]
fn a_full_server_is_named_by_status_and_by_the_daemon() {
    const FULL: &str = "the server is full; raise its maxmemory";
    let mut fleet = fleet(1).witness("a", "for=5", "").start();
    fleet.wait_runs(1);
    let said = |fleet: &Fleet, words: &[&str]| {
        let out = fleet.cli(words);
        String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned()
    };
    assert_eq!(
        fleet.json(&["status", "--json"])["problems"],
        serde_json::json!([])
    );
    let set = |fleet: &mut Fleet, most| {
        let words = ["CONFIG", "SET", "maxmemory", most];
        fleet.server().command::<()>(&words);
    };
    set(&mut fleet, "1");
    let problems = fleet.json(&["status", "--json"])["problems"].to_string();
    assert!(problems.contains(FULL), "{problems}");
    let status = said(&fleet, &["status"]);
    assert!(status.contains(&format!("the store: {FULL}")), "{status}");
    let why = said(&fleet, &["why", "a"]);
    assert!(why.contains(&format!("the store: {FULL}")), "{why}");
    for words in [&["pause", "a"][..], &["drain"]] {
        let refused = said(&fleet, words);
        assert!(refused.contains(FULL), "{refused}");
        for wrong in ["is up", "permissions"] {
            assert!(!refused.contains(wrong), "{refused}");
        }
    }
    fleet.wait_log(0, &format!("check the settings of the store: {FULL}"));
    set(&mut fleet, "0");
    fleet.wait_more_runs(2);
    fleet.stop();
}

#[test]
fn nothing_is_started_on_a_server_that_evicts_keys() {
    let policy = |fleet: &mut Fleet, to: &str| {
        fleet
            .server()
            .command::<()>(&["CONFIG", "SET", "maxmemory-policy", to]);
    };
    let complaints = |fleet: &Fleet, i: usize| {
        fleet.instances[i]
            .log_text()
            .matches("is not safe to use")
            .count()
    };
    let mut fleet = fleet(2)
        .store_comes_later()
        .witness("a", "for=5", "")
        .start();
    // From the start.
    fleet.server().args(&["--maxmemory-policy", "allkeys-lru"]);
    fleet.server().revive(None);
    for i in 0..2 {
        wait_until("the policy is complained of", GENEROUS, || {
            complaints(&fleet, i) > 0
        });
        let text = fleet.instances[i].log_text();
        assert!(
            text.contains("ERROR") && text.contains("allkeys-lru"),
            "{text}"
        );
    }
    pass(fleet.server(), 3);
    assert_eq!(fleet.trace().runs().len(), 0, "something was started");
    policy(&mut fleet, "noeviction");
    fleet.wait_runs(3);

    // Changed under a running fleet: as soon as each of them has seen it, nothing starts.
    let before: Vec<usize> = (0..2).map(|i| complaints(&fleet, i)).collect();
    policy(&mut fleet, "allkeys-random");
    for (i, before) in before.iter().enumerate() {
        wait_until("the new policy is complained of", GENEROUS, || {
            complaints(&fleet, i) > *before
        });
    }
    let seen = pass(fleet.server(), 3);
    assert_eq!(
        starts_after(&fleet, seen + 1000),
        0,
        "something was started"
    );
    // The message is where a person looks for it.
    wait_until("`why` has the reason", GENEROUS, || {
        (1..=3).any(|second| {
            let occurrence = (seen / 1000 + second) * 1000;
            let why = fleet.json(&["why", "a", &occurrence.to_string(), "--json"]);
            why["decisions"].to_string().contains("allkeys-random")
        })
    });
    policy(&mut fleet, "noeviction");
    wait_until("occurrences start again", GENEROUS, || {
        starts_after(&fleet, seen + 1000) >= 3
    });
    fleet.stop();
    fleet.judge(ONCE, &["a"], None);
}

#[test]
fn a_server_that_may_drop_histories_is_warned_of_and_used() {
    let mut fleet = fleet(1)
        .store_comes_later()
        .witness("a", "for=5", "")
        .start();
    fleet.server().args(&["--maxmemory-policy", "volatile-lru"]);
    fleet.server().revive(None);
    fleet.wait_runs(2);
    let text = fleet.instances[0].log_text();
    assert_eq!(text.matches("volatile-lru").count(), 1, "{text}");
    assert!(
        text.contains("WARN") && text.contains("check the settings of the store"),
        "{text}"
    );
    fleet.stop();
}

#[test]
fn another_definition_of_a_job_is_shown_and_each_occurrence_still_runs_once() {
    let mut fleet = fleet(2)
        .witness("a", "for=5", LATE_RATHER_THAN_SKIPPED)
        .witness("b", "for=5", LATE_RATHER_THAN_SKIPPED)
        .start();
    fleet.wait_runs(2);
    let both_seen = |fleet: &Fleet| {
        let status = fleet.json(&["status", "--json"]);
        let list = status["instances"].as_array().cloned().unwrap_or_default();
        (list.len() == 2).then_some(status)
    };
    let status = wait_for("both instances are seen", GENEROUS, || both_seen(&fleet));
    let differ = |status: &serde_json::Value| -> Vec<bool> {
        let list = status["instances"].as_array().expect("instances");
        list.iter().map(|i| i["config_differs"] == true).collect()
    };
    assert_eq!(differ(&status), [false, false]);
    assert!(
        !String::from_utf8_lossy(&fleet.cli(&["status"]).stdout).contains("another definition")
    );

    fleet.set_job("a", Some(&each_second("for=7", LATE_RATHER_THAN_SKIPPED)));
    fleet.write_config(1);
    fleet.instances[1].signal(rustix::process::Signal::HUP);
    wait_until("the other definition is seen", GENEROUS, || {
        let status = fleet.json(&["status", "--json"]);
        let jobs = status["jobs"].as_array().expect("jobs");
        let other: Vec<&str> = jobs
            .iter()
            .filter(|j| j["other_definition"] == true)
            .filter_map(|j| j["job"].as_str())
            .collect();
        differ(&status) == [false, true] && other == ["a"]
    });

    let text = fleet.cli(&["status"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    let row = |start: &str| {
        text.lines()
            .find(|l| l.starts_with(start))
            .unwrap_or("")
            .to_owned()
    };
    assert!(
        row("i2 ").contains(" differs") && !row("i1 ").contains(" differs"),
        "{text}"
    );
    assert!(
        row("a ").contains("the fleet runs another definition"),
        "{text}"
    );
    assert!(!row("b ").contains("another definition"), "{text}");
    let runs = fleet.trace().runs().len();
    fleet.wait_runs(runs + 8);
    fleet.stop();
    fleet.judge_all_started(&["a", "b"]);
    let newest = fleet
        .history("a")
        .first()
        .map(occurrence_ms)
        .expect("a record");
    assert!(newest > 0);
}

#[test]
fn no_password_is_printed_whatever_characters_it_has() {
    const PASSWORD: &str = "hunter2@b?c=d:e/f&user=x@y hunter2";
    let encoded: String = PASSWORD.bytes().fold(String::new(), |out, b| match b {
        // These may stand in a query as they are.
        b'@' | b'?' | b':' | b'/' => out + &char::from(b).to_string(),
        b if b.is_ascii_alphanumeric() => out + &char::from(b).to_string(),
        b => out + &format!("%{b:02X}"),
    });
    let server = RedisServer::start();
    let rule = format!(">{PASSWORD}");
    for user in ["plain", "a@b"] {
        let rules = ["ACL", "SETUSER", user, "on", &rule, "~*", "&*", "+@all"];
        server.command::<()>(&rules);
    }
    let socket = server.socket();
    let urls = [
        format!("?pass={encoded}&user=plain"),
        format!("?user=plain&pass={encoded}"),
        format!("?pass={encoded}&user=a%40b"),
        format!("?db=0&user=a%40b&pass={encoded}"),
    ]
    .map(|query| format!("redis+unix://{}{query}", socket.display()));
    let site = Site::new();
    let run = |words: &[&str], url: &str, status: i32| {
        let o = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .args(words)
            .current_dir(site.0.path())
            .env_remove("SOLOIST_CONFIG")
            .env("SOLOIST_LOG", "trace")
            .env("SOLOIST_STORE_URL", url)
            .stdin(Stdio::null())
            .output()
            .expect("soloist starts");
        let all = format!(
            "{}{}",
            String::from_utf8_lossy(&o.stdout),
            String::from_utf8_lossy(&o.stderr)
        );
        assert!(!all.contains("hunter2"), "{words:?} {url}\n{all}");
        assert_eq!(o.status.code(), Some(status), "{words:?} {url}\n{all}");
        all
    };
    for url in &urls {
        let absent = url.replace("redis.sock", "none.sock");
        let wrong = url.replace("hunter2@", "hunter2-");
        for (url, status) in [(url, 0), (&absent, 69), (&wrong, 69)] {
            site.configure(&format!("url = '{url}'\nretry = {{ attempts = 0 }}"));
            run(&["check"], "", 0);
            run(&["check", "--json"], "", 0);
            run(&["status"], "", status);
            run(&["status", "--json"], "", status);
            run(&["exec", "--lock", "a", "--", "true"], url, status);
        }
        site.file(
            "jobs.toml",
            &format!("[store]\nurl = '{url}'\ntimeout = 1\n"),
        );
        run(&["check"], "", 78);
        run(&["check", "--json"], "", 78);
        run(
            &["exec", "--lock", "a", "--", "true"],
            &format!("{url}&x=1"),
            64,
        );
        // The start line, and whatever else a daemon says.
        site.configure(&format!("url = '{url}'"));
        let log = site.0.path().join("log");
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_soloist"))
            .arg("run")
            .current_dir(site.0.path())
            .env("SOLOIST_LOG", "trace")
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&log).expect("a log"))
            .spawn()
            .expect("soloist starts");
        let text = || std::fs::read_to_string(&log).unwrap_or_default();
        wait_until("the daemon has met the store", GENEROUS, || {
            text().contains("redis+unix://") && run(&["status"], "", 0).contains("backup")
        });
        crate::support::process::signal(daemon.id(), rustix::process::Signal::TERM);
        let _ = daemon.wait();
        assert!(!text().contains("hunter2"), "{}", text());
    }
}

/// Answers whatever it is asked as a server without HELLO does, which repeats what it was told.
#[test]
fn a_server_that_repeats_the_password_is_not_quoted() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        for mut peer in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut asked = [0; 4096];
                while let Ok(n @ 1..) = peer.read(&mut asked) {
                    let commands = asked[..n].iter().filter(|b| **b == b'*').count();
                    let answer = format!(
                        "-ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' '{SECRET}' \r\n"
                    );
                    let _ = peer.write_all(answer.repeat(commands).as_bytes());
                }
            });
        }
    });
    let site = Site::new();
    let text = site.failure(&format!(
        "url = 'redis://:{SECRET}@127.0.0.1:{port}?protocol=resp3'"
    ));
    assert!(text.contains("unknown command"), "{text}");
}
