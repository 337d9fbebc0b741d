//! Which module may use which, by reading the sources: the pure rules use nothing of the world around them.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The sources below `path`, without tests: files of tests, and what follows `#[cfg(test)]` and a module.
fn sources(path: &Path) -> Vec<(PathBuf, String)> {
    let mut all = vec![];
    for entry in fs::read_dir(path).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.extend(sources(&path));
        } else if !["tests.rs", "bounds.rs", "oracle.rs"]
            .iter()
            .any(|t| path.ends_with(t))
        {
            let text = fs::read_to_string(&path).expect("text");
            let code = text
                .split("#[cfg(test)]\nmod tests {")
                .next()
                .unwrap_or_default();
            all.push((path, code.to_owned()));
        }
    }
    all
}

/// The lines of `code` that are no comments.
fn lines(code: &str) -> impl Iterator<Item = &str> {
    let lines = code.lines().map(str::trim_start);
    lines.filter(|line| !line.starts_with("//"))
}

/// The modules of the crate that `code` names: `crate::a::b`, `crate::{a::b, c}`.
fn named(code: &str) -> Vec<String> {
    let code: String = lines(code).collect::<Vec<_>>().join(" ");
    let mut names = vec![];
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.push(rest.to_owned());
            continue;
        };
        let (mut depth, mut item) = (1, String::new());
        for c in list.chars() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if depth == 0 || depth == 1 && c == ',' {
                names.push(item.trim().to_owned());
                item.clear();
            } else {
                item.push(c);
            }
            if depth == 0 {
                break;
            }
        }
    }
    let first = |name: &String| {
        name.split(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
            .map(ToOwned::to_owned)
    };
    names
        .iter()
        .filter_map(first)
        .filter(|name| !name.is_empty())
        .collect()
}

#[test]
fn the_rules_know_nothing_but_themselves_and_the_model() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = sources(&src.join("logic"));
    assert!(found.len() > 20, "{}", found.len());
    found.extend(sources(&src.join("model")));
    for file in ["logic.rs", "model.rs"] {
        let path = src.join(file);
        let text = fs::read_to_string(&path).expect("text");
        found.push((path, text));
    }
    // What would be an effect: the time, the file system, other processes, a runtime.
    let effects = [
        "std::fs",
        "std::net",
        "std::env",
        "std::thread",
        "std::process",
        "tokio::",
        "Instant::now",
        "SystemTime",
        "Boottime::now",
        "RunId::random",
        "wall_us(",
        "println!",
        "fastrand::",
    ];
    for (path, code) in found {
        let strangers: Vec<_> = named(&code)
            .into_iter()
            .filter(|name| !["logic", "model"].contains(&name.as_str()))
            .collect();
        assert!(
            strangers.is_empty(),
            "{} knows of {strangers:?}",
            path.display()
        );
        for line in lines(&code) {
            let effect = effects.iter().find(|effect| line.contains(*effect));
            assert!(effect.is_none(), "{}: {line}", path.display());
        }
    }
}

#[test]
fn names_are_found_however_they_are_written() {
    let code = "use crate::{\n    a::{self, b},\n    c,\n};\n// crate::no\ncrate::d::e();";
    assert_eq!(named(code), ["a", "c", "d"]);
}

/// The functions of `code` with more than `most` lines: their names, and whether a line `// Long: ` above says why.
fn long_functions(code: &str, most: usize) -> Vec<(&str, bool)> {
    let lines: Vec<&str> = code.lines().collect();
    let mut found = vec![];
    for (at, line) in lines.iter().enumerate() {
        let words = line.trim_start();
        let indent = &line[..line.len() - words.len()];
        let name = words.split_once("fn ").filter(|(before, _)| {
            let known = ["pub", "async", "const", "unsafe", "extern", "\"C\""];
            let word = |w: &str| known.contains(&w) || w.starts_with("pub(");
            before.split_whitespace().all(word)
        });
        let Some((_, rest)) = name else { continue };
        let name = rest
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .next();
        let end = format!("{indent}}}");
        let Some(length) = lines[at..].iter().position(|l| *l == end) else {
            continue;
        };
        if length + 1 > most {
            let above = lines[..at].iter().rev();
            let mut above = above.take_while(|l| l.trim_start().starts_with(['/', '#']));
            let says = above.any(|l| l.trim_start().starts_with("// Long: "));
            found.push((name.unwrap_or_default(), says));
        }
    }
    found
}

#[test]
fn long_functions_say_why_they_are() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut without = vec![];
    let mut long = 0;
    for (path, code) in sources(&src) {
        for (name, says) in long_functions(&code, 80) {
            long += 1;
            if !says {
                without.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(long > 0, "the finder finds nothing");
    assert!(
        without.is_empty(),
        "split these, or say why not in a line `// Long: ` above: {without:#?}"
    );
}

#[test]
fn comments_have_lines_of_at_most_120_characters() {
    let long: Vec<String> = ["src", "tests/it", "tests/harness", "benches"]
        .iter()
        .flat_map(|dir| sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir)))
        .flat_map(|(path, code)| {
            let comments = code.lines().filter(|l| l.trim_start().starts_with("//"));
            let long: Vec<_> = comments.filter(|l| l.chars().count() > 120).collect();
            long.into_iter()
                .map(|l| format!("{}: {l}", path.display()))
                .collect::<Vec<_>>()
        })
        .collect();
    assert!(long.is_empty(), "wrap these: {long:#?}");
}

/// `tracing` takes a field of this name for the sentence of the event, which is then not shown.
#[test]
fn no_event_has_a_field_named_message() {
    for (path, code) in sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let named = |line: &&str| line.contains("message = %") || line.contains("message = ?");
        let found = lines(&code).find(named);
        assert_eq!(found, None, "{}", path.display());
    }
}
