//! Checks whether another user may change a trusted file: jobs run with the rights of the process that reads their
//! definition.

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs::{self, Metadata},
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Component, Path, PathBuf},
};

/// How many symbolic links one path may have; the kernel has the same limit.
const LINKS: u32 = 40;
const STICKY: u32 = 0o1000;

/// Says which other user may write, and gives the command that prevents it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    pub message: String,
    pub fix: String,
}

/// The user that reads the file and trusts it.
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
    /// This user's name for a hint.
    fn name(self) -> String {
        match self.uid {
            0 => "root".to_owned(),
            uid => uid.to_string(),
        }
    }
}

/// True: a file that other users may write is an error. False: it is a warning.
pub fn strict() -> bool {
    Reader::own().uid == 0
}

/// Checks `file`, each symbolic link and each directory on the way to it: all must belong to root or to this user, and
/// only these two, or this process's group, may write to them. In a sticky directory everybody may create files, so
/// only the owners of files count; on a read-only file system nobody may write.
pub fn foreign(file: &Path) -> Option<Foreign> {
    let absolute = std::path::absolute(file).ok()?;
    look(&absolute, Reader::own(), judge)
}

/// Checks like [`foreign`]. Logs a warning, or returns an error if soloist runs as root.
///
/// # Errors
/// Another user may change the file, and soloist runs as root.
pub fn trusted(file: &Path) -> Result<(), Foreign> {
    refused_or_warned(foreign(file))
}

/// Like [`trusted`], for the way to `file` alone: whoever may write to a directory can replace the files in it.
///
/// # Errors
/// Another user may put another file in its place, and soloist runs as root.
pub fn place(file: &Path) -> Result<(), Foreign> {
    let on_the_way = |path: &Path, meta: &Metadata, reader| {
        let leads_on = meta.is_dir() || meta.is_symlink();
        leads_on.then(|| judge(path, meta, reader)).flatten()
    };
    let absolute = std::path::absolute(file).ok();
    refused_or_warned(absolute.and_then(|path| look(&path, Reader::own(), on_the_way)))
}

fn refused_or_warned(found: Option<Foreign>) -> Result<(), Foreign> {
    match found {
        None => Ok(()),
        Some(f) if strict() => Err(f),
        Some(f) => {
            tracing::warn!("{}: {}", f.message, f.fix);
            Ok(())
        }
    }
}

/// Like [`trusted`], for a database and the files beside it, which may also belong to the owner of the directory, and
/// may be missing. Checks only whom they belong to, and the links on the way to them: whoever owns a link chooses where
/// soloist writes, so not even the owner of the directory may.
///
/// # Errors
/// A file or a link belongs to another user, and soloist runs as root.
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
        let absolute = std::path::absolute(&path).ok();
        if let Some(f) = absolute.and_then(|path| look(&path, reader, judge_link)) {
            refused_or_warned(Some(f))?;
            continue;
        }
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
                "if you trust its content, `chown -h {} {}`; otherwise name another file",
                reader.name(),
                path.display()
            ),
        };
        refused_or_warned(Some(f))?;
    }
    Ok(())
}

/// `judge`'s objection to the first part of the way to `file` that it does not accept. The way ends at the first
/// missing part.
fn look(
    file: &Path,
    reader: Reader,
    judge: impl Fn(&Path, &Metadata, Reader) -> Option<Foreign>,
) -> Option<Foreign> {
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
        // The code that opens the file reports the error.
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

fn judge_link(path: &Path, meta: &Metadata, reader: Reader) -> Option<Foreign> {
    if !meta.is_symlink() || reader.trusts(meta.uid()) || read_only(path) {
        return None;
    }
    let shown = path.display();
    Some(Foreign {
        message: format!(
            "{shown} is a symbolic link of user {}, who chooses with it where soloist writes",
            meta.uid()
        ),
        fix: format!(
            "name the file itself, or `chown -h {} {shown}`",
            reader.name()
        ),
    })
}

fn judge(path: &Path, meta: &Metadata, reader: Reader) -> Option<Foreign> {
    let kind = meta.file_type();
    // Ignore devices, which have no content of their own.
    if kind.is_char_device() || read_only(path) {
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
    // A link itself cannot be written, only replaced in its directory; and in a sticky directory only a file's owner
    // can replace it.
    if meta.is_symlink() || meta.is_dir() && meta.mode() & STICKY != 0 {
        return None;
    }
    let place = if meta.is_dir() { "in " } else { "" };
    let group = meta.mode() & 0o020 != 0 && meta.gid() != 0 && meta.gid() != reader.gid;
    let (who, what) = match (meta.mode() & 0o002 != 0, group) {
        (true, true) => ("everybody", "go-w"),
        (true, false) => ("everybody", "o-w"),
        (false, true) => ("its group", "g-w"),
        (false, false) => return None,
    };
    Some(Foreign {
        message: format!(
            "{who} may write {place}{shown} (mode {:04o})",
            meta.mode() & 0o7777
        ),
        fix: format!("`chmod {what} {shown}`"),
    })
}

/// True if its file system is mounted read-only, like a ConfigMap in a container.
fn read_only(path: &Path) -> bool {
    rustix::fs::statvfs(path)
        .is_ok_and(|fs| fs.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}
