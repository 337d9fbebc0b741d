//! Whether an answer is what the OpenAPI document says: the part of JSON Schema that the document uses.

use std::collections::BTreeSet;

use serde_json::Value;

/// What is wrong with `value`, as a path and a reason; empty: nothing.
pub fn wrong(document: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut found = vec![];
    check(document, schema, value, "$", &mut found);
    // With `allOf`, each part knows only its own members.
    let known = members(document, schema);
    if let (Some(object), Some(known)) = (value.as_object(), known) {
        let strange = object.keys().filter(|name| !known.contains(*name));
        found.extend(strange.map(|name| format!("$: `{name}` is not described")));
    }
    found
}

fn resolve<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(path) => {
            let found = document.pointer(path.trim_start_matches('#'));
            resolve(
                document,
                found.unwrap_or_else(|| panic!("{path} is not in the document")),
            )
        }
        None => schema,
    }
}

/// The names of all members that an object may have; None: any.
fn members(document: &Value, schema: &Value) -> Option<BTreeSet<String>> {
    let schema = resolve(document, schema);
    let mut names: BTreeSet<String> = BTreeSet::new();
    for all in ["allOf", "oneOf", "anyOf"] {
        for part in schema[all].as_array().into_iter().flatten() {
            if resolve(document, part)["type"] != "null" {
                names.extend(members(document, part)?);
            }
        }
    }
    if let Some(properties) = schema["properties"].as_object() {
        names.extend(properties.keys().cloned());
    } else if names.is_empty() && schema["type"] != "object" {
        return None;
    }
    Some(names)
}

fn check(document: &Value, schema: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    let schema = resolve(document, schema);
    for part in schema["allOf"].as_array().into_iter().flatten() {
        check(document, part, value, at, found);
    }
    for any in ["oneOf", "anyOf"] {
        if let Some(parts) = schema[any].as_array() {
            let of = |part: &Value| {
                let mut wrong = vec![];
                check(document, part, value, at, &mut wrong);
                wrong
            };
            let all: Vec<_> = parts.iter().map(of).collect();
            if all.iter().all(|wrong| !wrong.is_empty()) {
                found.push(format!("{at}: {value} is none of {any}: {all:?}"));
            }
        }
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    let is = |kind: &&str| match *kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("an unknown type {other}"),
    };
    if !kinds.is_empty() && !kinds.iter().any(is) {
        found.push(format!("{at}: {value} is not {kinds:?}"));
        return;
    }
    if let Some(text) = value.as_str() {
        let is = match schema["format"].as_str() {
            Some("date-time") => text.parse::<jiff::Timestamp>().is_ok(),
            Some("uuid") => text.parse::<uuid::Uuid>().is_ok(),
            _ => true,
        };
        if !is {
            found.push(format!("{at}: {text} is no {}", schema["format"]));
        }
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
        && !value.is_null()
    {
        found.push(format!("{at}: {value} is none of {allowed:?}"));
    }
    if let Some(object) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().expect("a name");
            if !object.contains_key(name) {
                found.push(format!("{at}: `{name}` is missing"));
            }
        }
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            if let Some(value) = object.get(name) {
                check(document, inner, value, &format!("{at}.{name}"), found);
            }
        }
    }
    for (n, item) in value.as_array().into_iter().flatten().enumerate() {
        if !schema["items"].is_null() {
            check(
                document,
                &schema["items"],
                item,
                &format!("{at}[{n}]"),
                found,
            );
        }
    }
}

#[test]
fn a_value_that_is_not_as_described_is_noticed() {
    let document = serde_json::json!({"components": {"schemas": {
        "A": {"type": "object", "required": ["n"], "properties": {
            "n": {"type": "integer"}, "s": {"type": ["string", "null"]}, "e": {"type": "string", "enum": ["x"]},
            "t": {"type": "string", "format": "date-time"}, "l": {"type": "array", "items": {"type": "boolean"}}}},
        "B": {"allOf": [{"$ref": "#/components/schemas/A"}, {"type": "object", "properties": {"b": {"type": "number"}}}]},
    }}});
    let b = serde_json::json!({"$ref": "#/components/schemas/B"});
    let told = |text: &str| wrong(&document, &b, &serde_json::from_str(text).expect("JSON")).len();
    assert_eq!(
        told(r#"{"n": 1, "s": null, "e": "x", "l": [true], "b": 0.5}"#),
        0
    );
    for text in [
        "{}",
        "[]",
        r#"{"n": "1"}"#,
        r#"{"n": 1, "s": 1}"#,
        r#"{"n": 1, "e": "y"}"#,
        r#"{"n": 1, "t": "noon"}"#,
        r#"{"n": 1, "l": [1]}"#,
        r#"{"n": 1, "b": "x"}"#,
        r#"{"n": 1, "other": 1}"#,
    ] {
        assert!(told(text) > 0, "{text}");
    }
}
