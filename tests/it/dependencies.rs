//! What `cargo deny check licenses bans sources` checks, by `deny.toml` and what cargo says of the dependencies: that
//! program takes minutes to build.

use std::{collections::BTreeMap, process::Command};

use serde_json::Value;
use spdx::{Expression, Licensee, ParseMode};

/// All packages of the targets in `deny.toml`, tests and benches included, as cargo describes them.
fn packages(targets: &[&str]) -> Vec<Value> {
    let mut all = BTreeMap::new();
    for target in targets {
        let output = Command::new(env!("CARGO"))
            .args([
                "metadata",
                "--locked",
                "--format-version",
                "1",
                "--filter-platform",
                target,
            ])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        let mut metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let nodes = metadata["resolve"]["nodes"].take();
        let used: Vec<&str> = (nodes.as_array().expect("a list").iter())
            .filter_map(|node| node["id"].as_str())
            .collect();
        let listed = metadata["packages"].as_array().expect("a list");
        for package in listed
            .iter()
            .filter(|p| used.iter().any(|id| p["id"] == *id))
        {
            all.insert(package["id"].to_string(), package.clone());
        }
    }
    all.into_values().collect()
}

/// What is wrong with the licence of a package.
fn unlicensed(package: &Value, allowed: &[Licensee]) -> Option<String> {
    let name = &package["name"];
    let Some(licence) = package["license"].as_str() else {
        return Some(format!("{name} names no licence"));
    };
    match Expression::parse_mode(licence, ParseMode::LAX) {
        Ok(all) if all.evaluate(|one| allowed.iter().any(|a| a.satisfies(one))) => None,
        Ok(_) => Some(format!("{name} is under {licence}")),
        Err(e) => Some(format!("{name}: {e}")),
    }
}

/// What is wrong with where it comes from, or with what it asks for.
fn unknown(package: &Value, registries: &[&str]) -> Option<String> {
    let name = &package["name"];
    let source = package["source"].as_str();
    let known = source.is_none_or(|s| registries.iter().any(|r| s == format!("registry+{r}")));
    let ours = source.is_none();
    let mut asks = package["dependencies"].as_array().into_iter().flatten();
    let any = asks.find(|d| ours && d["req"] == "*" && d["path"].is_null());
    match (known, any) {
        (false, _) => Some(format!("{name} comes from {source:?}")),
        (true, Some(d)) => Some(format!("{name} takes any version of {}", d["name"])),
        (true, None) => None,
    }
}

#[test]
fn dependencies_have_the_licences_and_sources_that_deny_toml_allows() {
    let text = include_str!("../../deny.toml");
    let rules: toml::Table = toml::from_str(text).expect("TOML");
    let list = |table: &str, key: &str| -> Vec<&str> {
        let all = rules[table][key].as_array().expect("a list");
        all.iter().filter_map(toml::Value::as_str).collect()
    };
    let allowed: Vec<Licensee> = (list("licenses", "allow").into_iter())
        .map(|name| Licensee::parse(name).expect("a licence"))
        .collect();
    let registries = list("sources", "allow-registry");
    let packages = packages(&list("graph", "targets"));
    assert!(packages.len() > 200, "{}", packages.len());
    let mut wrong: Vec<String> = packages
        .iter()
        .filter_map(|p| unlicensed(p, &allowed))
        .collect();
    wrong.extend(packages.iter().filter_map(|p| unknown(p, &registries)));
    assert!(wrong.is_empty(), "{wrong:#?}");
    // Each licence is there for a crate that needs it.
    let needless: Vec<String> = (0..allowed.len())
        .map(|i| [&allowed[..i], &allowed[i + 1..]].concat())
        .zip(list("licenses", "allow"))
        .filter(|(others, _)| packages.iter().all(|p| unlicensed(p, others).is_none()))
        .map(|(_, name)| name.to_owned())
        .collect();
    assert!(
        needless.is_empty(),
        "deny.toml allows what no crate needs: {needless:?}"
    );
}
