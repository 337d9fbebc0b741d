//! Files that another user may write: refused as root, named in a warning otherwise.

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{PermissionsExt as _, chown, lchown, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::process::Signal;

use crate::support::{GENEROUS, process, skip, wait_for, wait_until};

const STRANGER: u32 = 54_321;

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// With a job, and files beside it; everybody may look at them.
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let place = Self { dir };
        mode(place.dir.path(), 0o755);
        place.write("variables", "A=1\n");
        place.write("password", "secret\n");
        place.write("hook", "https://hooks.example.org/secret\n");
        place.write("routing-key", "secret\n");
        place.write(
            "jobs.toml",
            "[store]\nurl = \"redis://127.0.0.1:1\"\nusername = \"u\"\npassword_file = \"password\"\n\
             [notify.ops]\ntype = \"slack\"\nurl_file = \"hook\"\n\
             [notify.pager]\ntype = \"pagerduty\"\nrouting_key_file = \"routing-key\"\n\
             [jobs.a]\nschedule = \"@hourly\"\ncommand = [\"true\"]\nenv_file = \"variables\"\n",
        );
        place
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a file");
        mode(&self.path(name), 0o644);
    }
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("another mode");
}

fn check(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_soloist"));
    command.arg("--config").arg(config).arg("check");
    command
}

fn run(mut command: Command) -> (Option<i32>, String) {
    let out = command.output().expect("it starts");
    let text = [out.stdout, out.stderr].concat();
    (
        out.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[track_caller]
fn accepted(config: &Path) {
    let (code, text) = run(check(config));
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("WARN"), "{text}");
}

#[track_caller]
fn refused(config: &Path, parts: &[&str]) {
    let (code, text) = run(check(config));
    assert_eq!(code, Some(78), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
}

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip("only root can give files away");
    }
    root
}

#[test]
fn as_root_what_others_may_write_is_refused() {
    if !root() {
        return;
    }
    for (file, what) in [
        ("jobs.toml", "jobs.toml"),
        ("variables", "`env_file`"),
        ("password", "`password_file`"),
        ("hook", "`url_file`"),
        ("routing-key", "`routing_key_file`"),
    ] {
        let place = Place::new();
        let (config, path) = (place.path("jobs.toml"), place.path(file));
        accepted(&config);
        mode(&path, 0o666);
        refused(&config, &[what, "everybody may write", "`chmod o-w "]);
        mode(&path, 0o664);
        accepted(&config);
        chown(&path, None, Some(STRANGER)).expect("another group");
        refused(&config, &[what, "its group may write", "`chmod g-w "]);
        mode(&path, 0o644);
        accepted(&config);
        chown(&path, Some(STRANGER), None).expect("another owner");
        refused(&config, &[what, "belongs to user 54321", "`chown root "]);
    }
}

#[test]
fn as_root_the_way_to_a_file_counts_as_well() {
    if !root() {
        return;
    }
    let place = Place::new();
    let (dir, config) = (place.dir.path(), place.path("jobs.toml"));
    mode(dir, 0o777);
    refused(&config, &["everybody may write in ", "`chmod o-w "]);
    mode(dir, 0o1777);
    accepted(&config);
    chown(dir, Some(STRANGER), None).expect("another owner");
    refused(&config, &["belongs to user 54321"]);
    chown(dir, Some(0), None).expect("our own");
    // As a ConfigMap is laid out: links of root's, one of them to a directory.
    fs::create_dir(place.path("..2026")).expect("a directory");
    mode(&place.path("..2026"), 0o755);
    fs::rename(&config, place.path("..2026/jobs.toml")).expect("moved");
    for name in ["variables", "password"] {
        fs::rename(place.path(name), place.path("..2026").join(name)).expect("moved");
        symlink(Path::new("..data").join(name), place.path(name)).expect("a link");
    }
    symlink("..2026", place.path("..data")).expect("a link");
    symlink("..data/jobs.toml", &config).expect("a link");
    accepted(&config);
    lchown(place.path("..data"), Some(STRANGER), None).expect("another owner");
    refused(
        &config,
        &["..data belongs to user 54321", "`chown -h root "],
    );
    lchown(place.path("..data"), Some(0), None).expect("our own");
    // As in a container: everybody may write, except through the mount.
    mode(dir, 0o777);
    refused(&config, &["everybody may write in "]);
    let mut mounted = Command::new("unshare");
    mounted.args(["-m", "sh", "-c", "mount --bind \"$1\" \"$1\" && mount -o remount,ro,bind \"$1\" && exec \"$2\" --config \"$1/jobs.toml\" check", "sh"]);
    mounted.arg(dir).arg(env!("CARGO_BIN_EXE_soloist"));
    let (code, text) = run(mounted);
    if text.contains("unshare: ") || text.contains("mount: ") {
        return skip(&format!("cannot mount: {text}"));
    }
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn another_user_is_warned() {
    if !root() {
        return;
    }
    let place = Place::new();
    for name in ["jobs.toml", "variables", "password"] {
        chown(place.path(name), Some(STRANGER), Some(STRANGER)).expect("another owner");
    }
    let as_stranger = |path: &Path| {
        let mut command = check(path);
        command.uid(STRANGER).gid(STRANGER).current_dir("/");
        run(command)
    };
    let config = place.path("jobs.toml");
    let (code, text) = as_stranger(&config);
    if code.is_none() || text.contains("Permission denied") {
        return skip("another user cannot start the program where it is");
    }
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("WARN"), "{text}");
    // The file's own group may write it.
    mode(&config, 0o664);
    assert!(!as_stranger(&config).1.contains("WARN"));
    mode(&config, 0o666);
    let (code, text) = as_stranger(&config);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("WARN") && text.contains("`chmod o-w "),
        "{text}"
    );
}

#[test]
fn as_root_a_planted_database_is_refused() {
    if !root() {
        return;
    }
    let place = Place::new();
    let (db, config) = (place.path("soloist.db"), place.path("jobs.toml"));
    place.write(
        "jobs.toml",
        "[store]\nurl = \"sqlite:soloist.db\"\n[jobs.a]\nschedule = []\ncommand = [\"true\"]\n",
    );
    drop(soloist::store::sqlite::SqliteStore::open(&db).expect("a database"));
    let wal = place.path("soloist.db-wal");
    // The store's threads end later than the store. If two close the database at one time, none removes the files
    // beside it.
    wait_until("the database is closed", GENEROUS, || {
        let open = fs::read_dir("/proc/self/fd").expect("our descriptors");
        let mut open = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        !open.any(|file| file.starts_with(place.dir.path()))
    });
    let status = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_soloist"));
        command.arg("--config").arg(&config).arg("status");
        run(command)
    };
    assert_eq!(status().0, Some(0), "{}", status().1);
    mode(place.dir.path(), 0o1777);
    chown(&db, Some(STRANGER), None).expect("another owner");
    let (code, text) = status();
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("belongs to user 54321"), "{text}");
    assert!(text.contains("chown -h root"), "{text}");
    chown(&db, Some(0), None).expect("our own");
    fs::write(&wal, "").expect("a file");
    chown(&wal, Some(STRANGER), None).expect("another owner");
    assert_eq!(status().0, Some(69), "{}", status().1);
    fs::remove_file(&wal).expect("removed");
    // A link that another user made, to a file of root's.
    let true_db = place.path("true.db");
    fs::rename(&db, &true_db).expect("moved");
    symlink(&true_db, &db).expect("a link");
    lchown(&db, Some(STRANGER), None).expect("another owner");
    assert_eq!(status().0, Some(69), "{}", status().1);
}

/// Starts a daemon as this user, ends it once it has met its store, and returns its exit code and its log.
fn daemon(config: &Path, user: u32) -> (Option<i32>, String) {
    let log = config.with_extension("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_soloist"));
    command.arg("--config").arg(config).arg("run");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(fs::File::create(&log).expect("a log"));
    command.uid(user).gid(user).current_dir("/");
    let mut child = command.spawn().expect("it starts");
    let text = || fs::read_to_string(&log).expect("text");
    let code = wait_for("the daemon has ended, or met its store", GENEROUS, || {
        let ended = child.try_wait().expect("our child");
        let code = ended.map(|status| status.code());
        code.or_else(|| text().contains("jobs=1").then_some(None))
    });
    if code.is_none() {
        process::signal(child.id(), Signal::TERM);
        process::reap(&mut child, GENEROUS);
    }
    (code, text())
}

/// Whoever owns a directory can replace the files in it. To look at somebody's store is another matter.
#[test]
fn as_root_no_daemon_keeps_its_state_in_a_directory_of_another_user() {
    if !root() {
        return;
    }
    let place = Place::new();
    let (their, config) = (place.path("their"), place.path("jobs.toml"));
    fs::create_dir(&their).expect("a directory");
    place.write(
        "jobs.toml",
        "[store]\nurl = \"sqlite:their/soloist.db\"\n[jobs.a]\nschedule = []\ncommand = [\"true\"]\n",
    );
    let all_belong_to = |user: u32| {
        for entry in fs::read_dir(&their).expect("a directory").flatten() {
            chown(entry.path(), Some(user), None).expect("another owner");
        }
        chown(&their, Some(user), None).expect("another owner");
    };
    all_belong_to(STRANGER);
    let (code, text) = daemon(&config, 0);
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("belongs to user 54321"), "{text}");
    assert!(text.contains("`chown root "), "{text}");
    assert_eq!(fs::read_dir(&their).expect("a directory").count(), 0);
    let (code, text) = daemon(&config, STRANGER);
    if text.contains("Permission denied") {
        return skip("another user cannot start the program where it is");
    }
    assert_eq!(code, None, "{text}");
    assert!(!text.contains("belongs to"), "{text}");
    // To look is allowed.
    let mut status = Command::new(env!("CARGO_BIN_EXE_soloist"));
    status.arg("--config").arg(&config).arg("status");
    let (code, text) = run(status);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(daemon(&config, 0).0, Some(69));
    // Everybody may write there: root refuses, others are warned.
    mode(&their, 0o777);
    let (code, text) = daemon(&config, STRANGER);
    assert_eq!(code, None, "{text}");
    assert!(
        text.contains("WARN") && text.contains("everybody may write in "),
        "{text}"
    );
    all_belong_to(0);
    let (code, text) = daemon(&config, 0);
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("everybody may write in "), "{text}");
    // Only the owners of files in a sticky directory can replace them.
    mode(&their, 0o1777);
    let (code, text) = daemon(&config, 0);
    assert_eq!(code, None, "{text}");
}

#[test]
fn as_root_nobody_else_chooses_where_the_database_is_made() {
    if !root() {
        return;
    }
    let place = Place::new();
    let target = place.path("target.db");
    let their = place.path("their");
    fs::create_dir(&their).expect("a directory");
    let opened = |path: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_soloist"));
        command.arg("exec").arg("--store");
        command.arg(format!("sqlite:{}", path.display()));
        command.args(["--lock", "a", "--", "true"]);
        run(command)
    };
    let their_own = |path: &Path| lchown(path, Some(STRANGER), None).expect("another owner");
    // In a directory of their own: the link itself, one beside the file, and one to a directory.
    let link = their.join("link.db");
    symlink(&target, &link).expect("a link");
    let beside = their.join("soloist.db-wal");
    symlink(&target, &beside).expect("a link");
    let directory = their.join("directory");
    symlink(place.dir.path(), &directory).expect("a link");
    for path in [&their, &link, &beside, &directory] {
        their_own(path);
    }
    for path in [
        &link,
        &their.join("soloist.db"),
        &directory.join("target.db"),
    ] {
        let (code, text) = opened(path);
        assert_eq!(code, Some(69), "{text}");
        assert!(text.contains("is a symbolic link of user 54321"), "{text}");
        assert!(text.contains("`chown -h root "), "{text}");
        assert!(!target.exists(), "{}", path.display());
    }
    // A link of root's own: the file gets the same mode as without a link.
    lchown(&link, Some(0), None).expect("our own");
    let (code, text) = opened(&link);
    assert_eq!(code, Some(0), "{text}");
    let meta = fs::metadata(&target).expect("a database");
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
}
