//! The binary: the hooks of the guard, then the command line.

use std::process::ExitCode;

/// What came to this process with its start, and is gone when `main` begins.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        soloist::cli::before_main();
    }
    before_main
};

fn main() -> ExitCode {
    // Before the argument parser, and before any thread exists.
    match std::env::args_os().nth(1) {
        Some(arg) if arg == soloist::guard::ARGUMENT => soloist::guard::main(),
        Some(arg) if arg == soloist::guard::ZYGOTE_ARGUMENT => soloist::guard::zygote(),
        Some(arg) if arg == soloist::guard::SETTLE_ARGUMENT => soloist::settle::main(),
        Some(arg) if arg == soloist::last_will::ARGUMENT => soloist::last_will::settle::main(),
        _ => soloist::cli::main(),
    }
}
