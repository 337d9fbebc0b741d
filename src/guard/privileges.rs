//! Drops the daemon's privileges before the command of another user is executed; runs in the forked child.

use std::io;

use rustix::{
    fs::Mode,
    process::Pid,
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities},
};

/// The capabilities that a daemon without root gets for `user`. A process with the first can become root.
const FOR_USERS: CapabilitySet = CapabilitySet::SETUID
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::KILL);

const OURSELVES: Option<Pid> = None;

/// Whether the guard can signal processes of another user.
pub(super) fn may_signal_others() -> bool {
    capabilities(OURSELVES).is_ok_and(|sets| sets.effective.contains(CapabilitySet::KILL))
}

/// Lets another user too open the pipes of the command's output by their names, /dev/stdout and /dev/stderr. Only a
/// process that has one of them open has such a name for it.
pub(super) fn open_output() {
    for fd in [rustix::stdio::stdout(), rustix::stdio::stderr()] {
        let pipe = rustix::fs::fstat(fd)
            .is_ok_and(|f| rustix::fs::FileType::from_raw_mode(f.st_mode).is_fifo());
        if pipe {
            // Ignore an error: few programs open them, and most of these work without.
            let _ = rustix::fs::fchmod(fd, Mode::from_raw_mode(0o622));
        }
    }
}

/// Makes a new session keyring, so that the daemon's keys are out of reach. Call it before changing the user: the other
/// user may have used up their own quota of keys.
pub(super) fn own_keyring() -> io::Result<()> {
    const JOIN_SESSION_KEYRING: libc::c_int = 1;
    let nameless = std::ptr::null::<libc::c_char>();
    // SAFETY: it takes a name or null.
    let key = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, nameless) };
    if key >= 0 {
        return Ok(());
    }
    unless_there_are_no_keys(io::Error::last_os_error())
}

fn unless_there_are_no_keys(error: io::Error) -> io::Result<()> {
    match error.raw_os_error() {
        // The kernel has no keys, or the container may not use them, so the command cannot reach any.
        Some(libc::ENOSYS | libc::EPERM | libc::EACCES) => Ok(()),
        _ => Err(error),
    }
}

/// Empties the bounding set, so that no executed program can gain a capability. Without CAP_SETPCAP this is not
/// possible.
pub(super) fn bound() {
    for capability in 0..libc::c_ulong::from(u64::BITS) {
        // SAFETY: takes no pointers. The kernel refuses it without the right to do it, and for unknown numbers.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
}

/// Empties all other capability sets; clearing the inheritable set clears the ambient set too.
pub(super) fn give_up_all() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    Ok(set_capabilities(OURSELVES, sets)?)
}

/// Keeps executed programs from gaining rights by setuid or file capabilities.
pub(super) fn no_new() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Keeps a command of soloist's own user from getting the ambient capabilities that the daemon has for `user`.
pub(super) fn keep_to_ourselves() -> io::Result<()> {
    let sets = capabilities(OURSELVES)?;
    if rustix::process::geteuid().is_root() || !sets.inheritable.intersects(FOR_USERS) {
        return Ok(());
    }
    let inheritable = sets.inheritable - FOR_USERS;
    Ok(set_capabilities(
        OURSELVES,
        CapabilitySets {
            inheritable,
            ..sets
        },
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keyring_is_not_needed_where_there_are_no_keys() {
        for (errno, fine) in [
            (libc::ENOSYS, true),
            (libc::EPERM, true),
            (libc::EACCES, true),
            (libc::EDQUOT, false),
            (libc::ENOMEM, false),
        ] {
            let judged = unless_there_are_no_keys(io::Error::from_raw_os_error(errno));
            assert_eq!(judged.is_ok(), fine, "{errno}");
        }
    }
}
