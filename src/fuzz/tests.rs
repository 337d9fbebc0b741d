//! Each target, on the kept inputs and on changed ones.

use std::{fmt::Write as _, fs, panic, path::PathBuf};

use fastrand::Rng;

use super::*;

/// Changed inputs that each target is tried on.
const CHANGED: usize = 500;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

fn kept(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let files = fs::read_dir(directory().join("corpus").join(name)).expect("kept inputs");
    let mut files: Vec<PathBuf> = files.map(|f| f.expect("an input").path()).collect();
    files.sort();
    let read = |path: PathBuf| (path.clone(), fs::read(path).expect("an input"));
    files.into_iter().map(read).collect()
}

/// The words of a dictionary of libFuzzer: what stands between quotes, with `\xHH`, `\"` and `\\`.
fn words(name: &str) -> Vec<Vec<u8>> {
    let text = fs::read_to_string(directory().join(format!("{name}.dict"))).unwrap_or_default();
    let quoted = text
        .lines()
        .filter_map(|l| l.strip_prefix('"')?.strip_suffix('"'));
    let word = |quoted: &str| {
        let (mut word, mut rest) = (vec![], quoted.as_bytes());
        while let Some((first, after)) = rest.split_first() {
            let hex = after.get(1..3).and_then(|h| std::str::from_utf8(h).ok());
            let (byte, used) = match (first, after.first(), hex) {
                (b'\\', Some(b'x'), Some(hex)) => {
                    (u8::from_str_radix(hex, 16).expect("two digits"), 4)
                }
                (b'\\', Some(other), _) => (*other, 2),
                _ => (*first, 1),
            };
            word.push(byte);
            rest = &rest[used..];
        }
        word
    };
    quoted.map(word).collect()
}

/// Some bytes of it are others, moved, gone or there twice; or come from another input or the dictionary.
fn change(rng: &mut Rng, input: &[u8], other: &[u8], words: &[Vec<u8>]) -> Vec<u8> {
    let mut out = input.to_vec();
    let part = |rng: &mut Rng, of: &[u8]| {
        let from = rng.usize(..=of.len());
        from..from + rng.usize(..=(of.len() - from).min(40))
    };
    for _ in 0..rng.usize(1..=4) {
        let here = part(rng, &out);
        let new = match rng.u8(..6) {
            0 => vec![],
            1 => vec![rng.u8(..)],
            2 => out[part(rng, &out)].to_vec(),
            3 => other[part(rng, other)].to_vec(),
            4 => rng.i64(..).to_string().into_bytes(),
            _ => rng.choice(words).cloned().unwrap_or_default(),
        };
        let end = if rng.bool() { here.start } else { here.end };
        out.splice(here.start..end, new);
    }
    out
}

fn tried(name: &str, target: Tries, what: &str, input: &[u8]) {
    if let Err(why) = panic::catch_unwind(|| target(input)) {
        let mut text = String::new();
        input
            .iter()
            .for_each(|b| write!(text, "\\x{b:02x}").unwrap());
        eprintln!(
            "{name}: {what}: {:?}\nas bytes: {text}",
            String::from_utf8_lossy(input)
        );
        panic::resume_unwind(why);
    }
}

fn holds(name: &str) {
    let (_, target) = TARGETS
        .into_iter()
        .find(|(n, _)| *n == name)
        .expect("a target");
    let (kept, words) = (kept(name), words(name));
    assert!(!kept.is_empty());
    for (path, input) in &kept {
        tried(name, target, &path.display().to_string(), input);
    }
    // As for proptest: test.sh tries the same each time.
    let seed = std::env::var("PROPTEST_RNG_SEED").ok();
    let seed = seed
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    let mut rng = Rng::with_seed(seed);
    for _ in 0..CHANGED {
        let (input, other) = (rng.choice(&kept), rng.choice(&kept));
        let (input, other) = input.zip(other).expect("there are some");
        let input = change(&mut rng, &input.1, &other.1, &words);
        tried(name, target, "a changed input", &input);
    }
}

macro_rules! holds {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            holds(stringify!($name));
        })*

        #[test]
        fn each_target_has_its_program() {
            let names = [$(stringify!($name)),*];
            assert_eq!(TARGETS.map(|(name, _)| name), names);
            let cargo = fs::read_to_string(directory().join("Cargo.toml")).expect("fuzz/Cargo.toml");
            for name in names {
                let path = format!("fuzz_targets/{name}.rs");
                let program = fs::read_to_string(directory().join(&path)).expect("a program");
                assert_eq!(
                    program,
                    format!(
                        "#![no_main]\nlibfuzzer_sys::fuzz_target!(|data: &[u8]| soloist::fuzz::{name}(data));\n"
                    )
                );
                let said = format!("[[bin]]\nname = \"{name}\"\npath = \"{path}\"\n");
                assert!(cargo.contains(&said), "{said}");
            }
        }
    };
}
holds!(config duration guard reply schedule shown state text url);
