//! Servers that cannot be reached, or that are not who they should be: over HTTPS, and over both kinds of TLS for mail.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::Path,
    process::Command,
};

use serde_json::Value;

use super::servers::{Hook, MailServer, Mode, Oddity, Wire, identity};
use crate::{
    options::certificates,
    support::{GENEROUS, fleet::fleet, process::alive, server::free_port, wait_until},
};

/// Sends a test over the channel `ops` of this table, with `ca.pem` as the only authority. Returns whether it was
/// delivered, and what is said of it.
fn tell(dir: &Path, table: &str) -> (bool, String) {
    let text = format!(
        "[store]\nurl = \"redis://127.0.0.1:1\"\n[notify.ops]\n{table}\n[jobs.a]\ncommand = \"true\"\n"
    );
    let config = dir.join("jobs.toml");
    fs::write(&config, text).expect("a configuration");
    let out = Command::new(env!("CARGO_BIN_EXE_soloist"))
        .arg("--config")
        .arg(&config)
        .args(["notify", "test", "ops", "--json"])
        .env("SSL_CERT_FILE", dir.join("ca.pem"))
        .env("HUB_KEY", "hunter2secret")
        .output()
        .expect("soloist starts");
    let said: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| {
        panic!("{e}: {}", String::from_utf8_lossy(&out.stderr));
    });
    let delivered = said["delivered"] == true;
    assert_eq!(out.status.code(), Some(if delivered { 0 } else { 75 }));
    (
        delivered,
        said["answer"].as_str().expect("words").to_owned(),
    )
}

#[track_caller]
fn refuses(dir: &Path, table: &str, why: &str) {
    let (delivered, said) = tell(dir, table);
    assert!(!delivered && said.contains(why), "{table}: {said}");
}

/// However the server fails, it is said in words that do not need the source of a library.
#[test]
fn each_way_in_which_a_server_fails_is_said_in_plain_words() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Closes);
    let table = |port: u16| {
        format!("type = \"webhook\"\ntimeout = \"2s\"\nurl = \"http://127.0.0.1:{port}/ops\"")
    };
    let port = hook.port();
    for (mode, why) in [
        (
            Mode::Closes,
            "the server closed the connection without an answer",
        ),
        (Mode::Babbles, "the server did not answer in HTTP/1.1"),
        (Mode::Hangs, "did not answer within 2s"),
        (Mode::Redirects, "soloist follows no redirects"),
    ] {
        hook.set(mode);
        refuses(dir.path(), &table(port), &format!("127.0.0.1:{port}"));
        refuses(dir.path(), &table(port), why);
    }
    refuses(dir.path(), &table(free_port()), "cannot connect: ");
    let (_, said) = tell(dir.path(), &table(free_port()));
    assert!(!said.contains("client error"), "{said}");
}

/// The head of an answer says that the message was taken: the rest is only shown.
#[test]
fn an_answer_that_never_ends_is_a_delivery() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Drips);
    let url = hook.url("ops");
    let table = format!("type = \"webhook\"\ntimeout = \"5s\"\nurl = \"{url}\"");
    let (delivered, said) = tell(dir.path(), &table);
    assert!(delivered && said.starts_with("200 OK"), "{said}");
    assert_eq!(hook.heard("ops").len(), 1);
}

/// User and password in an address leave as a header, and are shown nowhere.
#[test]
fn user_and_password_of_an_address_log_in() {
    let dir = tempfile::tempdir().expect("a directory");
    let hook = Hook::start(Mode::Takes);
    let table = |login: &str| {
        let port = hook.port();
        format!("type = \"webhook\"\nurl = \"http://{login}@127.0.0.1:{port}/ops\"")
    };
    let (delivered, said) = tell(dir.path(), &table("Aladdin:open%20sesame"));
    assert!(delivered, "{said}");
    let sent = hook.headers();
    let wanted = "authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==";
    assert!(
        sent[0].iter().any(|h| h.eq_ignore_ascii_case(wanted)),
        "{sent:?}"
    );
    assert_eq!(hook.paths(), ["/ops"]);
    hook.set(Mode::Status(401));
    let (delivered, said) = tell(dir.path(), &table("Aladdin:hunter2secret"));
    assert!(!delivered && said.contains("401"), "{said}");
    assert!(
        !said.contains("hunter2") && !said.contains("Aladdin"),
        "{said}"
    );
}

/// A command that fails says why on stderr.
#[test]
fn what_a_command_says_of_its_failure_is_shown_without_secrets() {
    let dir = tempfile::tempdir().expect("a directory");
    let command = |script: &str| {
        format!("type = \"command\"\ntimeout = \"2s\"\ncommand = [\"/bin/sh\", \"-c\", '{script}']")
    };
    let why = |script: &str| {
        let (delivered, said) = tell(dir.path(), &command(script));
        assert!(!delivered, "{said}");
        said
    };
    assert_eq!(
        why("echo no; echo one >&2; printf \"\\033[2Jno hub for ${HUB_KEY}\\n\" >&2; exit 3"),
        "the command ended with exit code 3: one; \\x1b[2Jno hub for ***"
    );
    assert_eq!(
        why("exit 3"),
        "the command ended with exit code 3; it wrote nothing to stderr"
    );
    assert!(why("kill -9 $$").starts_with("the command ended with SIGKILL"));
    let hung = why("echo waiting for the hub >&2; sleep 100");
    assert_eq!(
        hung,
        "the command did not end within 2s and was killed: waiting for the hub"
    );
    // More than a pipe holds, and than anybody reads.
    let long = why("yes no hub | head -c 700000 >&2; echo the end >&2; exit 1");
    assert!(
        long.ends_with("no hub; the end") && long.len() < 400,
        "{long}"
    );
    // What it left behind keeps the pipe open.
    let left = why("echo no hub >&2; setsid sleep 3 & sleep 0.1; exit 1");
    assert_eq!(left, "the command ended with exit code 1: no hub");
}

/// The certificates that are wrong for `localhost`, and what is said of each.
const WRONG: [(&str, &str); 2] = [
    ("own", "is not from an authority that this host trusts"),
    ("elsewhere", "is for another name than that of the address"),
];

#[test]
fn https_goes_to_servers_with_a_right_certificate_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    certificates(dir);
    let hook = Hook::start(Mode::Takes);
    let table = |scheme: &str| {
        let port = hook.port();
        format!("type = \"webhook\"\ntimeout = \"2s\"\nurl = \"{scheme}://localhost:{port}/ops\"")
    };
    // Not a server of TLS at all.
    refuses(dir, &table("https"), "it does not speak TLS at this port");
    for (name, why) in WRONG {
        hook.identify(identity(dir, name));
        refuses(dir, &table("https"), why);
    }
    assert_eq!(hook.paths(), [""; 0], "nothing was sent");
    hook.identify(identity(dir, "server"));
    refuses(dir, &table("http"), "localhost:");
    assert_eq!(hook.heard("ops").len(), 0);
    let (delivered, said) = tell(dir, &table("https"));
    assert!(delivered && said.contains("200 OK: ok"), "{said}");
    assert_eq!(hook.heard("ops").len(), 1);
}

#[test]
fn mail_goes_to_servers_with_a_right_certificate_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    certificates(dir);
    let table = |scheme: &str, server: &MailServer| {
        format!(
            "type = \"email\"\nsmtp = \"{scheme}://me:hunter2@localhost:{}\"\nfrom = \"s@example.org\"\n\
             to = \"ann@example.org\"",
            server.port()
        )
    };
    for (scheme, wire) in [("smtps", Wire::Tls), ("smtp+starttls", Wire::StartTls)] {
        for (name, why) in WRONG {
            let server = MailServer::start_with(wire, Some(identity(dir, name)));
            refuses(dir, &table(scheme, &server), why);
            let (clear, secret) = server.commands();
            assert!(secret.is_empty() && server.mails().is_empty());
            assert!(
                clear.iter().all(|w| w == "EHLO" || w == "STARTTLS"),
                "{clear:?}"
            );
        }
        let server = MailServer::start_with(wire, Some(identity(dir, "server")));
        let (delivered, said) = tell(dir, &table(scheme, &server));
        assert!(delivered, "{scheme}: {said}");
        let (clear, secret) = server.commands();
        assert!(secret.contains(&"AUTH".to_owned()), "{secret:?}");
        assert!(
            clear.iter().all(|w| w == "EHLO" || w == "STARTTLS"),
            "{clear:?}"
        );
        let mails = server.mails();
        assert!(
            mails.len() == 1 && mails[0].contains("Subject: soloist: a test"),
            "{mails:?}"
        );
    }
    // Somebody on the way took the offer of TLS out: neither the password nor the mail leaves.
    let server = MailServer::start_with(Wire::StartTls, None);
    refuses(
        dir,
        &table("smtp+starttls", &server),
        "it offers no STARTTLS, so neither the password nor the mail is sent",
    );
    let (clear, _) = server.commands();
    assert!(
        clear.iter().all(|w| w == "EHLO" || w == "QUIT"),
        "{clear:?}"
    );
    assert!(server.mails().is_empty());
}

/// A mail server that answers all commands well but one.
fn unwilling(word: &'static str, answer: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream);
            let _ = reader.get_mut().write_all(b"220 test\r\n");
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|n| n > 0) {
                let said = match line.split_whitespace().next().unwrap_or_default() {
                    said if said == word => answer,
                    "EHLO" => "250-test\r\n250 AUTH PLAIN",
                    "AUTH" => "235 welcome",
                    "DATA" => "354 go on",
                    _ => "250 ok",
                };
                let _ = reader.get_mut().write_all(format!("{said}\r\n").as_bytes());
                line.clear();
            }
        }
    });
    port
}

#[test]
fn what_a_mail_server_refuses_is_said_in_plain_words() {
    let dir = tempfile::tempdir().expect("a directory");
    for (word, answer, why) in [
        (
            "AUTH",
            "535 5.7.8 bad credentials",
            "it refuses user or password of `smtp`, or the way to log in (535: 5.7.8 bad credentials)",
        ),
        (
            "RCPT",
            "550 5.1.1 no such user here",
            "it refuses an address of `from` or `to` (550: 5.1.1 no such user here)",
        ),
        (
            "RCPT",
            "550 not today",
            "it refuses the mail (550: not today)",
        ),
        (
            "MAIL",
            "451 come back later",
            "it takes no mail at present (451: come back later)",
        ),
        ("EHLO", "250 test", "it offers no way to log in"),
        ("EHLO", "hello", "it does not speak SMTP at this port"),
    ] {
        let port = unwilling(word, answer);
        let table = format!(
            "type = \"email\"\nsmtp = \"smtp://me:hunter2@127.0.0.1:{port}\"\nfrom = \"s@example.org\"\n\
             to = \"ann@example.org\""
        );
        let (delivered, said) = tell(dir.path(), &table);
        assert!(!delivered && said.contains(why), "{word}: {said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

/// Those who are not refused get the mail once.
#[test]
fn a_receiver_who_is_refused_silences_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let server = MailServer::start();
    let table = format!(
        "type = \"email\"\nsmtp = \"{}\"\nfrom = \"s@example.org\"\n\
         to = [\"bad@example.org\", \"ann@example.org\", \"bob@example.org\"]",
        server.url()
    );
    let (delivered, said) = tell(dir.path(), &table);
    assert!(
        !delivered && said.contains("2 of 3 receivers have the mail; not bad@example.org: "),
        "{said}"
    );
    assert!(said.contains("550: 5.1.1 no such user"), "{said}");
    let to: Vec<_> = server.taken().into_iter().map(|(to, _)| to).collect();
    assert_eq!(to, [["ann"], ["bob"]]);
}

/// A mail server that dies has taken the mail at most if it had it.
#[test]
fn a_mail_server_that_dies_is_told_in_plain_words() {
    let dir = tempfile::tempdir().expect("a directory");
    for (word, oddity, why) in [
        (
            ".",
            Oddity::Dies,
            "it closed the connection without an answer",
        ),
        (
            "EHLO",
            Oddity::Dies,
            "it closed the connection without an answer",
        ),
        ("RCPT", Oddity::Hangs, "did not answer within 2s"),
    ] {
        let server = MailServer::start_odd(&[(word, oddity)]);
        let table = format!(
            "type = \"email\"\nsmtp = \"{}\"\nfrom = \"s@example.org\"\nto = \"ann@example.org\"\n\
             timeout = \"2s\"",
            server.url()
        );
        refuses(dir.path(), &table, why);
        assert_eq!(server.mails().len(), usize::from(word == "."));
    }
}

/// Also what left its session, and has no parent but soloist.
#[test]
fn a_command_that_is_killed_leaves_nothing_behind() {
    let dir = tempfile::tempdir().expect("a directory");
    let pids = dir.path().join("pids");
    let script = "(setsid sleep 777 & echo $! >> \"$0\"); env -i setsid sleep 777 & echo $! >> \"$0\"; \
                  while :; do sleep 0.1; done";
    let table = format!(
        "type = \"command\"\ntimeout = \"2s\"\ncommand = [\"/bin/sh\", \"-c\", '{script}', {pids:?}]"
    );
    refuses(dir.path(), &table, "was killed");
    let pids = fs::read_to_string(pids).expect("the pids");
    assert_eq!(pids.lines().count(), 2);
    for pid in pids.lines() {
        let pid = pid.parse().expect("a pid");
        wait_until("it is killed", GENEROUS, || !alive(pid));
    }
}

/// What a file has when soloist reads its configuration is where messages go, until it reads it again.
#[test]
fn an_address_and_a_key_may_be_in_files() {
    let hook = Hook::start(Mode::Takes);
    let tables = "[notify.ops]\ntype = \"webhook\"\nurl_file = \"hook\"\n\
                  [notify.pager]\ntype = \"pagerduty\"\nurl_file = \"pager\"\nrouting_key_file = \"key\"\n";
    let fleet = fleet(1)
        .tables(tables)
        .default("notify", "[\"ops\", \"pager\"]")
        .job("bad", "command = \"false\"\nschedule = \"@every 1s\"")
        .file("hook", &format!("{}\n", hook.url("old")))
        .file("pager", &hook.url("pager"))
        .file("key", "first\r\n")
        .start();
    hook.wait("old", 1);
    assert_eq!(hook.wait("pager", 1)[0]["routing_key"], "first");
    // Another job, whose messages show where they go now.
    fs::write(fleet.file("hook"), hook.url("new")).expect("write");
    fs::write(fleet.file("key"), "second").expect("write");
    let said = fleet.said(&["notify", "test", "ops"]);
    assert!(said.contains("200 OK"), "{said}");
    assert_eq!(hook.heard("new").len(), 1, "a command reads it anew");
    let mut fleet = fleet;
    let other = "command = \"false\"\nschedule = \"@every 1s\"";
    fleet.set_job("other", Some(other));
    fleet.reload(0);
    let heard = hook.wait("new", 2);
    assert_eq!(super::kinds(&heard[1]), [("other", "failed")]);
    assert_eq!(hook.wait("pager", 2)[1]["routing_key"], "second");
    // What cannot be used is refused, and the daemon goes on with what it has.
    fs::write(fleet.file("hook"), "\n").expect("write");
    let out = fleet.cli(&["check"]);
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(78), "{said}");
    assert!(
        said.contains("`url_file`") && said.contains("the file is empty"),
        "{said}"
    );
    fleet.instances[0].signal(rustix::process::Signal::HUP);
    fleet.wait_log(
        0,
        "the new configuration is invalid, the old one stays in use",
    );
}
