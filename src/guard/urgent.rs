//! The guard's real-time priority: it gets a CPU although the host has more to do than it can.
//!
//! A guard that waits for a CPU for longer than the kill budget ends its command too late, and another host has taken
//! over by then. That is not far-fetched: where each session has its share of the CPUs (the kernel's autogroup, which
//! applies outside of cgroups with a CPU controller), a guard beside four busy loops waited for up to six seconds.
//! Clusters' fencing daemons ask for the same priority, for the same reason.
//!
//! Only a guard whose command runs has it, because then there is little to do; many starts at once must not take the
//! CPUs from the daemon, which renews leases. The kernel may refuse (no CAP_SYS_NICE, as in most containers; systemd's
//! `RestrictRealtime=`): then the guard goes on without.

/// The lowest of the real-time priorities.
const PRIORITY: libc::c_int = 1;

/// This process has a real-time priority until this is dropped. The processes that it forks do not have it.
#[derive(Debug)]
pub(super) struct Urgent {
    policy: libc::c_int,
    before: libc::sched_param,
}

impl Urgent {
    /// None: the kernel refuses, or somebody gave this process a real-time priority already.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: plain system calls about this process, with a structure that lives during the call.
        unsafe {
            let policy = libc::sched_getscheduler(0);
            let mut before: libc::sched_param = std::mem::zeroed();
            if libc::sched_getparam(0, &raw mut before) != 0 {
                return None;
            }
            let ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE];
            let mut real_time = before;
            real_time.sched_priority = PRIORITY;
            let forked_without = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
            let done = ordinary.contains(&policy)
                && libc::sched_setscheduler(0, forked_without, &raw const real_time) == 0;
            done.then_some(Self { policy, before })
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        // SAFETY: as above. To give a priority up needs no right.
        unsafe { libc::sched_setscheduler(0, self.policy, &raw const self.before) };
    }
}
