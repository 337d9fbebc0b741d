//! HTTPS: who is served, with which certificate, and what a broken one changes.

use std::{
    io::{BufReader, Write as _},
    net::TcpStream,
    path::Path,
    sync::Arc,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};

use super::client::read;
use crate::support::{
    GENEROUS,
    fleet::{Fleet, fleet},
};

type Tls = StreamOwned<ClientConnection, TcpStream>;

/// A fleet of one that serves HTTPS, with the certificates of a directory.
fn served(dir: &Path) -> (Fleet, String) {
    crate::options::certificates(dir);
    let text = |name: &str| std::fs::read_to_string(dir.join(name)).expect("a file");
    let fleet = fleet(1)
        .sqlite()
        .file("server.pem", &text("server.pem"))
        .file("server.key", &text("server.key"))
        .http("tls = { cert = \"server.pem\", key = \"server.key\" }")
        .witness("a", "for=5", "")
        .start();
    let at = fleet.http(0);
    (fleet, at)
}

/// Of this file, in which there is one.
fn certificate(file: &Path) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(file).expect("a certificate")
}

/// A connection to a server whose certificate this authority, or itself, has signed; after the handshake.
fn connect(at: &str, authority: &Path) -> Result<Tls, String> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate(authority)).expect("an authority");
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    let mut tls = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut tcp = TcpStream::connect(at).expect("connect");
    tcp.set_read_timeout(Some(GENEROUS)).expect("a timeout");
    while tls.is_handshaking() {
        tls.complete_io(&mut tcp).map_err(|e| e.to_string())?;
    }
    Ok(StreamOwned::new(tls, tcp))
}

fn ask(stream: Tls, path: &str) -> Option<u16> {
    let mut stream = stream;
    let ask = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).ok()?;
    read(&mut BufReader::new(stream)).map(|reply| reply.status)
}

/// Puts a pair of the directory in the place of the one that is served, each file as a whole.
fn renew(fleet: &Fleet, dir: &Path, cert: &str, key: &str) {
    for (from, to) in [(cert, "server.pem"), (key, "server.key")] {
        let new = fleet.file(&format!("{to}.new"));
        std::fs::copy(dir.join(from), &new).expect("copy");
        std::fs::rename(new, fleet.file(to)).expect("rename");
    }
}

#[test]
fn a_reload_reads_the_certificate_again_and_says_what_came_of_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (fleet, at) = served(dir.path());
    let (ca, own) = (dir.path().join("ca.pem"), dir.path().join("own.pem"));
    let mut stream = connect(&at, &ca).expect("a handshake");
    stream
        .write_all(
            b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n",
        )
        .expect("send");
    // The key of another certificate.
    renew(&fleet, dir.path(), "own.pem", "server.key");
    fleet.reload(0);
    fleet.wait_log(0, "server.key is not the key of the first certificate in");
    // A file that is not there is a wrong one, too: the rest of the configuration is in force.
    std::fs::remove_file(fleet.file("server.pem")).expect("remove");
    fleet.reload(0);
    fleet.wait_log(0, "server.pem: no such file");
    let served = connect(&at, &ca).expect("the old certificate");
    assert_eq!(ask(served, "/healthz"), Some(200));
    renew(&fleet, dir.path(), "own.pem", "own.key");
    fleet.reload(0);
    fleet.wait_log(0, "the TLS certificate was read again");
    let ready = connect(&at, &own).expect("a handshake");
    assert_eq!(ask(ready, "/healthz"), Some(200));
    // The stream that was open all the time goes on: it tells of a run that has only ended now.
    fleet.wait_more_runs(1);
    let mut lines = BufReader::new(stream);
    let mut seen = String::new();
    while !seen.contains("event: ended") {
        let n = std::io::BufRead::read_line(&mut lines, &mut seen).expect("the stream");
        assert!(n > 0, "the stream ended: {seen}");
    }
}

#[test]
fn check_says_that_a_key_is_not_that_of_its_certificate() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (fleet, _) = served(dir.path());
    let check = || {
        let output = fleet.instances[0].command().args(["check"]).output();
        let output = output.expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = check();
    assert_eq!(code, Some(0), "{said}");
    renew(&fleet, dir.path(), "own.pem", "server.key");
    let (code, said) = check();
    assert_eq!(code, Some(78), "{said}");
    let why = "server.key is not the key of the first certificate in";
    assert!(said.contains(why) && said.contains("| tls = "), "{said}");
    std::fs::remove_file(fleet.file("server.pem")).expect("remove");
    let (code, said) = check();
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("server.pem: no such file"), "{said}");
}
