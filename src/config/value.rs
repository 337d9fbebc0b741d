//! Sizes as the configuration writes them.

use crate::model::duration::Wrong;

/// Reads a size in bytes: `64KiB`, `1MB`, `512B`, `512`. KiB, MiB, GiB count in 1024, kB, MB, GB in 1000.
pub(super) fn size(text: &str) -> Result<u64, Wrong> {
    let not = || {
        let hint = "write it as `64KiB`, `1MB` or a number of bytes";
        Wrong::new(format!("`{}` is not a size", text.escape_debug()), hint)
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "GiB" => 1 << 30,
        _ => return Err(not()),
    };
    let number = number.parse::<u64>().ok();
    number.and_then(|n| n.checked_mul(factor)).ok_or_else(not)
}
