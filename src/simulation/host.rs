//! A host: its clocks, and a runtime whose time goes on only in the steps of the simulation.

use std::{
    cell::{Cell, RefCell},
    ffi::{c_uint, c_void},
    future::Future,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::runtime::Runtime;

use super::network::{Net, Stream};
use crate::{model::RunId, runner::Guards};

/// The begin of all simulations, by a clock that is right: 2026-11-22T12:00:00Z, Unix µs.
pub(super) const EPOCH_US: i64 = 1_795_348_800_000_000;

/// What code that runs on a host can find out about it.
#[derive(Clone)]
struct Here {
    host: usize,
    net: Arc<Mutex<Net>>,
    guards: Arc<Mutex<Guards>>,
    /// At the begin of the step: the simulation's time and the host's CLOCK_BOOTTIME, ns.
    world: u64,
    boot: u64,
    /// The same by the runtime.
    begun: tokio::time::Instant,
    rate: f64,
    /// The wall clock is so far ahead of the truth, µs.
    wall_ahead_us: i64,
}

thread_local! {
    /// From where the randomness of this thread comes; None: from the kernel.
    static RANDOM: Cell<Option<u64>> = const { Cell::new(None) };
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

impl Here {
    fn boot_ns(&self) -> u64 {
        self.boot + self.begun.elapsed().as_nanos() as u64
    }
    fn world_ns(&self) -> u64 {
        self.world + (self.begun.elapsed().as_nanos() as f64 / self.rate) as u64
    }
}

fn here<T>(of: impl FnOnce(&Here) -> T) -> Option<T> {
    HERE.with_borrow(|h| h.as_ref().map(of))
}

/// All that is random on this thread follows from the seed.
pub(super) fn seed(seed: u64) {
    fastrand::seed(seed);
    RANDOM.set(Some(seed));
    RunId::come_from(|| fastrand::u128(..));
}

/// Stands before the C library's, from which the standard library takes the keys of its hash maps, and others theirs.
///
/// # Safety
/// As the C library's: `to` has room for `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(to: *mut c_void, length: usize, flags: c_uint) -> isize {
    let Some(seed) = RANDOM.get() else {
        // SAFETY: the caller's promise.
        return unsafe { libc::syscall(libc::SYS_getrandom, to, length, flags) as isize };
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), length) };
    rng.fill(bytes);
    RANDOM.set(Some(rng.u64(..)));
    length as isize
}

/// Seconds and nanoseconds of a clock of the simulated host; None: this thread simulates none.
pub(crate) fn gettime(clock: libc::clockid_t) -> Option<(i64, i64)> {
    here(|h| {
        let ns = match clock {
            libc::CLOCK_BOOTTIME => h.boot_ns() as i64,
            _ => (EPOCH_US + h.wall_ahead_us) * 1000 + h.world_ns() as i64,
        };
        (ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000))
    })
}

/// Some simulated host's code runs on this thread.
pub(crate) fn simulated() -> bool {
    HERE.with_borrow(Option::is_some)
}

/// A connection to the simulated server; None: this thread simulates no host.
pub(crate) fn connect() -> Option<std::io::Result<Stream>> {
    here(|h| Stream::connect(&h.net, h.host))
}

/// The simulation's time, ns.
pub(super) fn world_now() -> u64 {
    here(Here::world_ns).unwrap_or(0)
}

pub(crate) fn guards() -> Option<(usize, Arc<Mutex<Guards>>)> {
    here(|h| (h.host, h.guards.clone()))
}

pub(super) struct Host {
    pub(super) number: usize,
    runtime: Runtime,
    net: Arc<Mutex<Net>>,
    guards: Arc<Mutex<Guards>>,
    /// The host's CLOCK_BOOTTIME, ns, up to which its runtime was stepped.
    pub(super) boot: u64,
    /// What its CLOCK_BOOTTIME was when the simulation began.
    base: u64,
    /// Its clocks go so much faster than the truth.
    rate: f64,
    pub(super) wall_ahead_us: i64,
    /// Its process is stopped until this time of the simulation.
    pub(super) stopped_until: u64,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
}

impl Host {
    pub(super) fn new(
        number: usize,
        rate: f64,
        net: &Arc<Mutex<Net>>,
        guards: &Arc<Mutex<Guards>>,
    ) -> Self {
        let base = (number as u64 + 1) * 1_000_000_000_000;
        Self {
            number,
            runtime: runtime(),
            net: net.clone(),
            guards: guards.clone(),
            boot: base,
            base,
            rate,
            wall_ahead_us: 0,
            stopped_until: 0,
        }
    }

    /// The host's CLOCK_BOOTTIME at this time of the simulation, ns.
    pub(super) fn boot_at(&self, world: u64) -> u64 {
        self.base + (world as f64 * self.rate) as u64
    }

    /// The process dies: nothing of it is left, nor of what it had.
    pub(super) fn kill<T>(&mut self, world: u64, had: T) {
        // On its runtime. It does nothing more, not even catch up if it was stopped.
        self.inside(world, Duration::ZERO, || {
            self.runtime.block_on(async { drop(had) })
        });
        let dead = std::mem::replace(&mut self.runtime, runtime());
        self.inside(world, Duration::ZERO, || dead.shutdown_background());
        self.boot = self.boot_at(world);
    }

    /// `missed`: by so much the runtime's time is behind.
    fn inside<T>(&self, world: u64, missed: Duration, f: impl FnOnce() -> T) -> T {
        let _context = self.runtime.enter();
        HERE.set(Some(Here {
            host: self.number,
            net: self.net.clone(),
            guards: self.guards.clone(),
            world,
            boot: self.boot,
            begun: tokio::time::Instant::now() + missed,
            rate: self.rate,
            wall_ahead_us: self.wall_ahead_us,
        }));
        let out = f();
        HERE.set(None);
        out
    }

    /// Runs `f` on the host, as far as it gets without waiting for the next step.
    pub(super) fn run<T>(&mut self, world: u64, f: impl Future<Output = T>) -> T {
        self.catch_up(world);
        self.inside(world, Duration::ZERO, || self.runtime.block_on(f))
    }

    pub(super) fn spawn(&self, f: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(f);
    }

    /// The host goes on from `from` to `until` of the simulation.
    pub(super) fn step(&mut self, from: u64, until: u64) {
        if self.stopped_until >= until {
            return;
        }
        if self.runtime.metrics().num_alive_tasks() == 0 {
            return;
        }
        self.catch_up(from);
        let until_boot = self.boot_at(until);
        let lasts = Duration::from_nanos(until_boot.saturating_sub(self.boot));
        let took = self.inside(from, Duration::ZERO, || {
            self.runtime.block_on(async {
                let begun = tokio::time::Instant::now();
                tokio::time::sleep(lasts).await;
                begun.elapsed()
            })
        });
        self.boot += took.as_nanos() as u64;
    }
    /// A process that was stopped, or had nothing to do, finds that time has passed.
    fn catch_up(&mut self, world: u64) {
        let now = self.boot_at(world);
        let missed = now.saturating_sub(self.boot);
        if missed > 1_000_000 {
            self.boot = now;
            let missed = Duration::from_nanos(missed);
            self.inside(world, missed, || {
                self.runtime.block_on(tokio::time::advance(missed))
            });
        }
    }
}
