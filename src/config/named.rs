//! Reads files that a user names: regular ones up to a size, so that nothing hangs on them or fills the memory.

use std::{
    fs,
    path::{Path, PathBuf},
};
#[cfg(feature = "tls")]
use std::{
    fs::{File, Metadata},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt as _,
};

/// The files that a configuration names have a password, a key or some variables; a larger one is a mistake.
#[cfg(feature = "tls")]
const MOST: u64 = 1 << 20;
/// The most symbolic links that a path may end in; the kernel has the same limit.
const LINKS: usize = 40;

/// The content of a file that the configuration names.
///
/// # Errors
/// Why it cannot be read, in words.
#[cfg(feature = "tls")]
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let regular = |meta: Metadata| match meta.is_file() {
        true => Ok(()),
        false => Err("it is not a regular file".to_owned()),
    };
    // Before it is opened, because to open a device may have an effect.
    regular(fs::metadata(path).map_err(|e| words(&e))?)?;
    // It may be another file by now: without the flag, to open a pipe would wait for its writer.
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    let file = opened.map_err(|e| words(&e))?;
    regular(file.metadata().map_err(|e| words(&e))?)?;
    bounded(file, MOST).map_err(|e| words(&e))
}

/// By these a changed file is known: time, size, inode.
#[cfg(feature = "http")]
pub(crate) type Version = (i64, i64, u64, u64);

/// The version of the file to which a path leads. None: there is none.
#[cfg(feature = "http")]
pub(crate) fn version(path: &Path) -> Option<Version> {
    use std::os::unix::fs::MetadataExt as _;
    let m = fs::metadata(path).ok()?;
    Some((m.mtime(), m.mtime_nsec(), m.size(), m.ino()))
}

/// All that can be read, up to `most` bytes, which is a number of MiB.
///
/// # Errors
/// There is more, or it cannot be read.
#[cfg(feature = "tls")]
pub(super) fn bounded(file: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(io::Error::other(format!(
            "it is larger than {}MiB",
            most >> 20
        ))),
        false => Ok(bytes),
    }
}

/// Why a file cannot be read, without the number of the error, which helps nobody.
#[cfg(feature = "tls")]
pub(super) fn words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

/// The file to which a link leads, whether it exists or not.
pub(crate) fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let Ok(target) = fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("/")).join(target);
    }
    path
}
