//! Whether somebody else may change a file that is trusted: jobs run with the rights of whoever reads their definition.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs::{self, Metadata},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Component, Path, PathBuf},
};

/// Symbolic links on one path; the kernel follows as many.
const LINKS: u32 = 40;
const STICKY: u32 = 0o1000;

/// Who else may write, and what ends that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    pub message: String,
    pub fix: String,
}

/// Who reads, and goes by what is read.
#[derive(Debug, Clone, Copy)]
struct Reader {
    uid: u32,
    gid: u32,
}

impl Reader {
    fn own() -> Self {
        Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }
    fn trusts(self, uid: u32) -> bool {
        uid == 0 || uid == self.uid
    }
    /// Who is meant in a hint.
    fn name(self) -> String {
        match self.uid {
            0 => "root".to_owned(),
            uid => uid.to_string(),
        }
    }
}

/// True: what others may write is refused. Otherwise it is said.
pub fn strict() -> bool {
    Reader::own().uid == 0
}

/// Looks at `file` as it is named, at each symbolic link and at each directory on the way: all must belong to root or to
/// this user, and only they, or this process's group, may write. In a sticky directory everybody may put files, and the
/// owner counts; on a file system that is mounted read-only nobody may.
pub fn foreign(file: &Path) -> Option<Foreign> {
    let absolute = std::path::absolute(file).ok()?;
    look(&absolute, Reader::own())
}

/// Says so, or gives it back as an error where it is not to be borne.
///
/// # Errors
/// As root.
pub fn trusted(file: &Path) -> Result<(), Foreign> {
    match foreign(file) {
        None => Ok(()),
        Some(f) if strict() => Err(f),
        Some(f) => {
            tracing::warn!("{}: {}", f.message, f.fix);
            Ok(())
        }
    }
}

/// As [`trusted`], of a database, which may belong to the owner of its directory as well. It may be missing; so may what
/// lies beside it.
///
/// # Errors
/// As root.
pub fn database(file: &Path) -> Result<(), Foreign> {
    let reader = Reader::own();
    let owner = file.parent().and_then(|dir| {
        let dir = if dir.as_os_str().is_empty() {
            Path::new(".")
        } else {
            dir
        };
        fs::metadata(dir).ok()
    });
    for end in ["", "-wal", "-shm", "-journal"] {
        let mut path = file.as_os_str().to_owned();
        path.push(end);
        let path = PathBuf::from(path);
        let Ok(meta) = fs::symlink_metadata(&path) else {
            continue;
        };
        if reader.trusts(meta.uid()) || owner.as_ref().is_some_and(|o| o.uid() == meta.uid()) {
            continue;
        }
        let f = Foreign {
            message: format!(
                "{} belongs to user {}, who neither runs soloist nor owns the directory",
                path.display(),
                meta.uid()
            ),
            fix: format!(
                "if you trust what is in it, `chown -h {} {}`; otherwise name another file",
                reader.name(),
                path.display()
            ),
        };
        if strict() {
            return Err(f);
        }
        tracing::warn!("{}: {}", f.message, f.fix);
    }
    Ok(())
}

fn look(file: &Path, reader: Reader) -> Option<Foreign> {
    let mut left: VecDeque<OsString> = VecDeque::new();
    let parts = |path: &Path| -> Vec<OsString> {
        let named = |c: Component<'_>| match c {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        };
        path.components().filter_map(named).collect()
    };
    left.extend(parts(file));
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    while let Some(name) = left.pop_front() {
        if name == ".." {
            at.pop();
            continue;
        }
        at.push(&name);
        // Whoever opens it says what is wrong.
        let meta = fs::symlink_metadata(&at).ok()?;
        if let Some(f) = judge(&at, &meta, reader) {
            return Some(f);
        }
        if meta.is_symlink() {
            links += 1;
            let target = fs::read_link(&at).ok().filter(|_| links <= LINKS)?;
            at.pop();
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            for part in parts(&target).into_iter().rev() {
                left.push_front(part);
            }
        }
    }
    None
}

fn judge(path: &Path, meta: &Metadata, reader: Reader) -> Option<Foreign> {
    let kind = meta.file_type();
    // What a shell gives as a file, and what has no content of its own.
    if kind.is_fifo() || kind.is_char_device() || read_only(path) {
        return None;
    }
    let shown = path.display();
    if !reader.trusts(meta.uid()) {
        let link = if meta.is_symlink() { "-h " } else { "" };
        return Some(Foreign {
            message: format!("{shown} belongs to user {}, who may change it", meta.uid()),
            fix: format!("`chown {link}{} {shown}`", reader.name()),
        });
    }
    // A link is replaced in its directory, and not written; nor is what lies in a sticky directory, but by its owner.
    if meta.is_symlink() || meta.is_dir() && meta.mode() & STICKY != 0 {
        return None;
    }
    let group = meta.mode() & 0o020 != 0 && meta.gid() != 0 && meta.gid() != reader.gid;
    let (who, what) = match (meta.mode() & 0o002 != 0, group) {
        (true, true) => ("everybody", "go-w"),
        (true, false) => ("everybody", "o-w"),
        (false, true) => ("its group", "g-w"),
        (false, false) => return None,
    };
    let place = if meta.is_dir() { "in " } else { "" };
    Some(Foreign {
        message: format!(
            "{who} may write {place}{shown} (mode {:04o})",
            meta.mode() & 0o7777
        ),
        fix: format!("`chmod {what} {shown}`"),
    })
}

/// Its file system is mounted read-only, as a ConfigMap is in a container.
fn read_only(path: &Path) -> bool {
    rustix::fs::statvfs(path)
        .is_ok_and(|fs| fs.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}
