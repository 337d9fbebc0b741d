//! Walks the parsed TOML: takes keys out of tables, values out of keys, and reports every problem. Written by hand,
//! because serde stops at the first problem.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use jiff::tz::{TimeZone, TimeZoneDatabase};
use toml::{Spanned, de::DeValue};

use super::{
    Sends, expand, nearest,
    report::{Collector, Place},
    value,
};
use crate::model::duration::{self, Wrong};

pub(super) type Node<'t> = &'t Spanned<DeValue<'t>>;

/// A value and its place.
#[derive(Debug, Clone)]
pub(super) struct At<T> {
    pub value: T,
    pub span: Range<usize>,
}

/// The result of reading a key.
#[derive(Debug, Clone, Default)]
pub(super) enum Given<T> {
    #[default]
    Absent,
    /// A wrong value at this place, which is already reported: the key counts as present.
    Wrong(Range<usize>),
    Read(At<T>),
}

impl<T> Given<T> {
    pub(super) fn or<'g>(&'g self, other: &'g Self) -> &'g Self {
        if matches!(self, Self::Absent) {
            other
        } else {
            self
        }
    }
    pub(super) fn is_wrong(&self) -> bool {
        matches!(self, Self::Wrong(_))
    }
    /// The place of the value, right or wrong.
    pub(super) fn span(&self) -> Option<Range<usize>> {
        match self {
            Self::Absent => None,
            Self::Wrong(span) => Some(span.clone()),
            Self::Read(at) => Some(at.span.clone()),
        }
    }
    pub(super) fn read(&self) -> Option<&At<T>> {
        if let Self::Read(at) = self {
            Some(at)
        } else {
            None
        }
    }
    pub(super) fn value(&self) -> Option<&T> {
        self.read().map(|at| &at.value)
    }
}

impl<T: Clone> Given<T> {
    /// The given value, or else the key's default; None: wrong.
    pub(super) fn or_usual(&self, usual: &Self) -> Option<T> {
        self.or(usual).value().cloned()
    }
    /// None: wrong. Some(None): absent.
    pub(super) fn optional(&self) -> Option<Option<T>> {
        match self {
            Self::Absent => Some(None),
            Self::Wrong(_) => None,
            Self::Read(at) => Some(Some(at.value.clone())),
        }
    }
}

/// A time zone of the bundled database.
#[derive(Debug, Clone)]
pub(super) struct Zone {
    pub name: Arc<str>,
    pub tz: TimeZone,
}

/// The input of reading, and the problems found.
pub(super) struct Reader<'t> {
    pub text: &'t str,
    pub env: &'t dyn Fn(&str) -> Option<String>,
    /// The directory of the configuration file, absolute if possible.
    pub dir: PathBuf,
    pub problems: Collector<'t>,
    /// The variables that the strings of `[store]`, `[http]` and `[notify]` name.
    pub variables: BTreeSet<String>,
    /// Whose addresses are of use.
    pub sends: Sends<'t>,
    database: TimeZoneDatabase,
    /// Time zones by their written names; Err: the hint for an unknown name, which is costly to find.
    zones: HashMap<String, Result<Zone, String>>,
}

/// A key with its value.
#[derive(Clone, Copy)]
pub(super) struct Field<'t> {
    pub place: Place<'t>,
    /// The tables around it below the place: `retry.`, or empty.
    pub prefix: &'static str,
    pub key: &'t str,
    pub node: Node<'t>,
}

impl std::fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.prefix, clipped(self.key))
    }
}

impl Field<'_> {
    /// True: its value comes at least partly from the environment, so no message may repeat it.
    fn is_expanded(&self) -> bool {
        self.place.expands()
            && self
                .node
                .get_ref()
                .as_str()
                .is_some_and(|s| s.contains("${"))
    }
}

impl<'t> Reader<'t> {
    pub(super) fn new(
        text: &'t str,
        env: &'t dyn Fn(&str) -> Option<String>,
        dir: PathBuf,
        problems: Collector<'t>,
    ) -> Self {
        Self {
            text,
            env,
            dir,
            problems,
            variables: BTreeSet::new(),
            sends: Sends::All,
            database: TimeZoneDatabase::bundled(),
            zones: HashMap::new(),
        }
    }

    pub(super) fn wrong(
        &mut self,
        field: Field<'_>,
        message: String,
        hint: impl Into<Option<String>>,
    ) {
        self.problems.add(
            field.place,
            field.node.span(),
            format!("`{field}`: {message}"),
            hint.into(),
        );
    }

    fn wrong_type<T>(&mut self, field: Field<'_>, expected: &str, hint: Option<&str>) -> Option<T> {
        let found = kind(field.node.get_ref());
        self.wrong(
            field,
            format!("expected {expected}, found {found}"),
            hint.map(str::to_owned),
        );
        None
    }

    /// The place of `inner`, a range of bytes of the string's value, if the file has the value literally; otherwise the
    /// place of the whole string.
    pub(super) fn inside(&self, node: &Spanned<DeValue<'_>>, inner: &Range<usize>) -> Range<usize> {
        match node.get_ref().as_str() {
            Some(value) => inside(self.text, node.span(), value, inner),
            None => node.span(),
        }
    }

    pub(super) fn string(&mut self, field: Field<'_>) -> Option<String> {
        let Some(text) = field.node.get_ref().as_str() else {
            let quotes = matches!(
                field.node.get_ref(),
                DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_)
            );
            return self.wrong_type(field, "a string", quotes.then_some("put it in quotes"));
        };
        if !field.place.expands() {
            return Some(text.to_owned());
        }
        self.expand(field, text)
    }

    /// A string whose variables are expanded, wherever it stands.
    pub(super) fn expanded(&mut self, field: Field<'_>) -> Option<String> {
        match field.node.get_ref().as_str() {
            Some(text) => self.expand(field, text),
            None => self.wrong_type(field, "a string", None),
        }
    }

    fn expand(&mut self, field: Field<'_>, text: &str) -> Option<String> {
        let expanded = RefCell::new(std::mem::take(&mut self.variables));
        let out = expand::expand(text, &|name| {
            expanded.borrow_mut().insert(name.to_owned());
            (self.env)(name)
        });
        self.variables = expanded.into_inner();
        match out {
            Ok(text) => Some(text),
            Err(errors) => {
                for error in errors {
                    let span = self.inside(field.node, &error.span);
                    let message = format!("`{field}`: {}", error.message);
                    self.problems
                        .add(field.place, span, message, Some(error.hint));
                }
                None
            }
        }
    }

    /// Notes the variables that a value names, and reads nothing of it.
    pub(super) fn note_variables(&mut self, value: &DeValue<'_>) {
        match value {
            DeValue::String(text) => {
                let named = RefCell::new(std::mem::take(&mut self.variables));
                // Whether it could be expanded is of no matter.
                let _ = expand::expand(text, &|name| {
                    named.borrow_mut().insert(name.to_owned());
                    None
                });
                self.variables = named.into_inner();
            }
            DeValue::Array(items) => {
                for item in items {
                    self.note_variables(item.get_ref());
                }
            }
            _ => {}
        }
    }

    /// A string that is not empty and has no NUL: a path or a name.
    pub(super) fn filled(&mut self, field: Field<'_>) -> Option<String> {
        let text = self.string(field)?;
        if text.is_empty() {
            self.wrong(
                field,
                "must not be empty".into(),
                Some("leave the key out instead".into()),
            );
            return None;
        }
        self.without_nul(field, text)
    }

    fn without_nul(&mut self, field: Field<'_>, text: String) -> Option<String> {
        if text.contains('\0') {
            self.wrong(field, "must not contain a NUL character".into(), None);
            return None;
        }
        Some(text)
    }

    /// An argument that the system accepts: any string without NUL.
    pub(super) fn argument(&mut self, field: Field<'_>) -> Option<String> {
        let text = self.string(field)?;
        self.without_nul(field, text)
    }

    pub(super) fn boolean(&mut self, field: Field<'_>) -> Option<bool> {
        match field.node.get_ref() {
            DeValue::Boolean(b) => Some(*b),
            DeValue::String(s) if matches!(&**s, "true" | "false") => {
                self.wrong_type(field, "true or false", Some("remove the quotes"))
            }
            _ => self.wrong_type(field, "true or false", None),
        }
    }

    /// A whole number within `range`.
    pub(super) fn integer(
        &mut self,
        field: Field<'_>,
        range: std::ops::RangeInclusive<i64>,
    ) -> Option<i64> {
        let DeValue::Integer(integer) = field.node.get_ref() else {
            let quoted = field
                .node
                .get_ref()
                .as_str()
                .is_some_and(|s| s.parse::<i64>().is_ok());
            return self.wrong_type(field, "an integer", quoted.then_some("remove the quotes"));
        };
        let number = i64::from_str_radix(integer.as_str(), integer.radix())
            .ok()
            .filter(|n| range.contains(n));
        if number.is_none() {
            let (least, most) = range.into_inner();
            let message = if most == i64::MAX {
                format!("must be at least {least}, not {integer}")
            } else {
                format!("must be between {least} and {most}, not {integer}")
            };
            self.wrong(field, message, None);
        }
        number
    }

    pub(super) fn count(
        &mut self,
        field: Field<'_>,
        range: std::ops::RangeInclusive<u32>,
    ) -> Option<u32> {
        let (least, most) = range.into_inner();
        self.integer(field, least.into()..=most.into())
            .and_then(|n| u32::try_from(n).ok())
    }

    pub(super) fn number(&mut self, field: Field<'_>) -> Option<f64> {
        match field.node.get_ref() {
            DeValue::Float(f) => f.as_str().parse().ok(),
            DeValue::Integer(i) => i64::from_str_radix(i.as_str(), i.radix())
                .ok()
                .map(|n| n as f64),
            _ => return self.wrong_type(field, "a number", None),
        }
        .or_else(|| self.wrong_type(field, "a number", None))
    }

    pub(super) fn duration(&mut self, field: Field<'_>) -> Option<Duration> {
        let hint = match field.node.get_ref() {
            DeValue::String(_) => None,
            DeValue::Integer(n) => Some(format!("add a unit, such as \"{n}s\"")),
            _ => Some("write it as \"15s\" or \"1h30m\"".to_owned()),
        };
        if hint.is_some() {
            return self.wrong_type(field, "a duration", hint.as_deref());
        }
        let text = self.string(field)?;
        let read = duration::parse(&text);
        self.or_wrong(field, read)
    }

    /// A number of bytes, at most `most`.
    pub(super) fn size(&mut self, field: Field<'_>, most: u64) -> Option<u64> {
        let read = match field.node.get_ref() {
            DeValue::Integer(n) => value::size(n.as_str()),
            DeValue::String(_) => value::size(&self.string(field)?),
            _ => {
                return self.wrong_type(
                    field,
                    "a size",
                    Some("write it as \"64KiB\" or a number of bytes"),
                );
            }
        };
        let bytes = self.or_wrong(field, read)?;
        if bytes > most {
            self.wrong(field, format!("must be at most {}MiB", most >> 20), None);
            return None;
        }
        Some(bytes)
    }

    fn or_wrong<T>(&mut self, field: Field<'_>, read: Result<T, Wrong>) -> Option<T> {
        if read.is_err() && field.is_expanded() {
            self.wrong(
                field,
                "not valid after its variables are expanded".into(),
                None,
            );
            return None;
        }
        read.map_err(|wrong| self.wrong(field, wrong.message, wrong.hint))
            .ok()
    }

    /// One of a few words.
    pub(super) fn word<T: Copy>(
        &mut self,
        field: Field<'_>,
        words: &[(&'static str, T)],
    ) -> Option<T> {
        let text = self.string(field)?;
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
            return Some(*value);
        }
        let names = words.iter().map(|(word, _)| *word);
        let hint = match nearest(&text, names.clone()) {
            Some(word) => format!("did you mean `{word}`?"),
            None => format!("use {}", listed(names)),
        };
        let message = if field.is_expanded() {
            String::new()
        } else {
            format!(" `{}`", clipped(&text))
        };
        self.wrong(field, format!("unknown value{message}"), hint);
        None
    }

    /// Reads each element of a list with `read`.
    pub(super) fn list<T>(
        &mut self,
        field: Field<'t>,
        expected: &str,
        read: impl Fn(&mut Self, Field<'t>) -> Option<T>,
    ) -> Option<Vec<At<T>>> {
        let DeValue::Array(items) = field.node.get_ref() else {
            return self.wrong_type(field, expected, None);
        };
        let read: Vec<_> = items
            .iter()
            .map(|node| {
                Some(At {
                    value: read(self, Field { node, ..field })?,
                    span: node.span(),
                })
            })
            .collect();
        read.into_iter().collect()
    }

    /// A string, or a list of strings; reads each with `read`.
    pub(super) fn one_or_more<T>(
        &mut self,
        field: Field<'t>,
        read: impl Fn(&mut Self, Field<'t>) -> Option<T>,
    ) -> Option<Vec<At<T>>> {
        match field.node.get_ref() {
            DeValue::String(_) => Some(vec![At {
                value: read(self, field)?,
                span: field.node.span(),
            }]),
            _ => self.list(field, "a string or a list of strings", read),
        }
    }

    /// An IANA time zone, from the database in the binary: the same on every host.
    pub(super) fn zone(&mut self, field: Field<'_>) -> Option<Zone> {
        let name = self.string(field)?;
        let known = match self.zones.get(&name) {
            Some(known) => known.clone(),
            None => {
                let found = match self.database.get(&name) {
                    Ok(tz) if !tz.is_unknown() => Ok(Zone {
                        name: tz.iana_name().unwrap_or(&name).into(),
                        tz,
                    }),
                    _ => Err(self.zone_hint(&name)),
                };
                self.zones.insert(name.clone(), found.clone());
                found
            }
        };
        let message = format!("unknown time zone `{}`", clipped(&name));
        known.map_err(|hint| self.wrong(field, message, hint)).ok()
    }

    fn zone_hint(&self, name: &str) -> String {
        let names: Vec<String> = self
            .database
            .available()
            .map(|n| n.as_str().to_owned())
            .collect();
        let parts = |name: &str| {
            let (region, city) = name.rsplit_once('/').unwrap_or(("", name));
            (
                region.to_ascii_lowercase(),
                city.to_ascii_lowercase().replace(' ', "_"),
            )
        };
        let (region, city) = parts(name);
        // The user may have written a city without its region, or one that has the zone of another city.
        let zone_of = ZONE_OF.iter().find(|(cities, _)| cities.contains(&&*city));
        let by_city = || {
            names
                .iter()
                .map(String::as_str)
                .find(|n| parts(n).1 == city)
        };
        // A slip of the keyboard. Short names are words of their own: abbreviations, other cities.
        let slips = |n: &str| {
            let slips = strsim::damerau_levenshtein(&parts(n).1, &city);
            (parts(n).0 == region && city.len() > 4 && slips <= (city.len() / 5).min(2))
                .then_some(slips)
        };
        let near = || names.iter().filter_map(|n| Some((slips(n)?, &**n))).min();
        let meant = zone_of.map(|(_, zone)| *zone).or_else(by_city);
        match (meant.or_else(|| Some(near()?.1)), offset(name)) {
            (_, Some(hint)) => hint,
            (Some(name), _) => format!("did you mean `{name}`?"),
            (None, _) => "use an IANA name such as `Europe/Berlin` or `UTC`".into(),
        }
    }
}

/// Large cities that have no zone of their own name.
const ZONE_OF: [(&[&str], &str); 5] = [
    (&["beijing", "shenzhen", "guangzhou"], "Asia/Shanghai"),
    (
        &["delhi", "new_delhi", "mumbai", "bangalore"],
        "Asia/Kolkata",
    ),
    (&["frankfurt", "munich", "hamburg"], "Europe/Berlin"),
    (
        &["washington", "boston", "miami", "atlanta"],
        "America/New_York",
    ),
    (
        &["san_francisco", "seattle", "las_vegas"],
        "America/Los_Angeles",
    ),
];

/// The zone to write for a distance from UTC, as in `GMT+2` and `+05:30`: the names of such zones have the other sign.
fn offset(name: &str) -> Option<String> {
    let upper = name.to_ascii_uppercase().replace(' ', "");
    let text = upper.trim_start_matches("ETC/");
    let text = text.trim_start_matches("UTC").trim_start_matches("GMT");
    let (sign, rest) = text.split_at_checked(1)?;
    let (other, most) = match sign {
        "+" => ("-", 14),
        "-" => ("+", 12),
        _ => return None,
    };
    let whole = rest.trim_end_matches(":00");
    let city = "the zone of a city, such as `Europe/Berlin`, also has its daylight saving";
    Some(match whole.parse::<u32>() {
        Ok(hours) if (1..=most).contains(&hours) => {
            format!("`Etc/GMT{other}{hours}` is UTC{sign}{hours}; {city}")
        }
        _ => format!("name a city: {city}"),
    })
}

/// The place in the text of the bytes `inner` of a string's value; all of `span` if the string has escapes.
pub(super) fn inside(
    text: &str,
    span: Range<usize>,
    value: &str,
    inner: &Range<usize>,
) -> Range<usize> {
    let written = text.get(span.clone()).unwrap_or_default();
    let quote = ["\"\"\"", "'''", "\"", "'"]
        .into_iter()
        .find(|q| written.starts_with(q))
        .map_or(0, str::len);
    let Some(body) = written.get(quote..written.len().saturating_sub(quote)) else {
        return span;
    };
    if quote == 0 || body != value || inner.start > inner.end || inner.end > value.len() {
        return span;
    }
    let start = span.start + quote;
    // A mark that splits a character would not be shown.
    if !value.is_char_boundary(inner.start) || !value.is_char_boundary(inner.end) {
        return span;
    }
    start + inner.start..start + inner.end
}

/// A table whose keys are taken out one by one; keys that are left at the end are unknown.
pub(super) struct Table<'t> {
    place: Place<'t>,
    /// `retry.` inside `retry`, empty at the place itself.
    prefix: &'static str,
    entries: Vec<Entry<'t>>,
    known: Vec<&'static str>,
}

struct Entry<'t> {
    key: &'t str,
    key_span: Range<usize>,
    node: Node<'t>,
    taken: bool,
}

impl<'t> Table<'t> {
    /// None: it is not a table, which is reported.
    pub(super) fn open(r: &mut Reader<'t>, field: Field<'t>, prefix: &'static str) -> Option<Self> {
        let DeValue::Table(table) = field.node.get_ref() else {
            let found = kind(field.node.get_ref());
            let hint = match field.place {
                Place::Jobs => {
                    Some("write `[jobs.NAME]`, with `command` and `schedule` below it".to_owned())
                }
                _ => None,
            };
            r.wrong(field, format!("expected a table, found {found}"), hint);
            return None;
        };
        Some(Self::of(field.place, prefix, table))
    }

    pub(super) fn of(
        place: Place<'t>,
        prefix: &'static str,
        table: &'t toml::de::DeTable<'t>,
    ) -> Self {
        let entries = table
            .iter()
            .map(|(key, node)| Entry {
                key: key.get_ref(),
                key_span: key.span(),
                node,
                taken: false,
            })
            .collect();
        Self {
            place,
            prefix,
            entries,
            known: Vec::new(),
        }
    }

    /// From here on problems belong to `place`.
    pub(super) fn place_at(&mut self, place: Place<'t>) {
        self.place = place;
    }

    fn find(&mut self, key: &'static str) -> Option<&mut Entry<'t>> {
        self.known.push(key);
        let entry = self.entries.iter_mut().find(|e| e.key == key)?;
        entry.taken = true;
        Some(entry)
    }

    /// As [`Table::field`], of a key that is refused whatever it has: no hint names it.
    pub(super) fn refused(&mut self, name: &'static str) -> Option<Field<'t>> {
        let field = self.field(name);
        self.known.retain(|known| *known != name);
        field
    }

    pub(super) fn field(&mut self, name: &'static str) -> Option<Field<'t>> {
        let (place, prefix) = (self.place, self.prefix);
        let node = self.find(name)?.node;
        Some(Field {
            place,
            prefix,
            key: name,
            node,
        })
    }

    pub(super) fn take<T>(
        &mut self,
        r: &mut Reader<'t>,
        key: &'static str,
        read: impl FnOnce(&mut Reader<'t>, Field<'t>) -> Option<T>,
    ) -> Given<T> {
        let Some(field) = self.field(key) else {
            return Given::Absent;
        };
        match read(r, field) {
            Some(value) => Given::Read(At {
                value,
                span: field.node.span(),
            }),
            None => Given::Wrong(field.node.span()),
        }
    }

    /// Takes out keys whose values are of no use here.
    pub(super) fn pass(&mut self, r: &mut Reader<'t>, keys: &[&str]) {
        self.entries.retain(|entry| {
            let pass = keys.contains(&entry.key);
            if pass {
                r.note_variables(entry.node.get_ref());
            }
            !pass
        });
    }

    /// Keys of the specification that this version does not have.
    pub(super) fn later(&mut self, r: &mut Reader<'t>, keys: &[&'static str]) {
        let place = self.place;
        for key in keys {
            if let Some(entry) = self.entries.iter_mut().find(|e| e.key == *key) {
                entry.taken = true;
                let message = format!("this version does not support `{key}` yet");
                let span = entry.key_span.clone();
                r.problems
                    .add(place, span, message, Some("remove it for now".into()));
            }
        }
    }

    /// Reports the keys that are left. `elsewhere` knows the right place of keys in the wrong table.
    pub(super) fn finish(
        self,
        r: &mut Reader<'t>,
        elsewhere: impl Fn(&str) -> Option<&'static str>,
    ) {
        for entry in self.entries.iter().filter(|e| !e.taken) {
            let full = |key: &str| format!("{}{key}", self.prefix);
            let hint = match (
                elsewhere(entry.key),
                nearest(entry.key, self.known.iter().copied()),
            ) {
                (Some(place), _) => place.to_owned(),
                (None, Some(known)) => format!("did you mean `{}`?", full(known)),
                (None, None) => format!(
                    "known keys: {}",
                    listed(self.known.iter().map(|key| full(key)))
                ),
            };
            let key = full(&clipped(entry.key));
            r.problems.add(
                self.place,
                entry.key_span.clone(),
                format!("unknown key `{key}`"),
                Some(hint),
            );
        }
    }

    /// All entries: for tables whose keys are names.
    pub(super) fn names(&self) -> impl Iterator<Item = (&'t str, Range<usize>, Node<'t>)> {
        self.entries
            .iter()
            .map(|e| (e.key, e.key_span.clone(), e.node))
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn listed(names: impl Iterator<Item = impl std::fmt::Display>) -> String {
    let names: Vec<_> = names.map(|n| format!("`{n}`")).collect();
    match names.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

/// For messages: one line of limited length.
pub(super) fn clipped(text: &str) -> String {
    let mut out: String = text.chars().take(60).flat_map(char::escape_debug).collect();
    if text.chars().nth(60).is_some() {
        out.push('…');
    }
    out
}
