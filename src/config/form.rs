//! The forms of values: each form reads its values and describes itself for people.

use std::{fmt, ops::RangeInclusive, time::Duration};

use super::{
    keys::Key,
    tree::{Field, Reader},
};

/// A way to write a value.
pub(super) trait Form {
    type Value;
    /// None: the value is wrong, which is reported.
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<Self::Value>;
    fn shape(&self) -> Shape;
}

/// A form as the documentation shows it.
pub(super) enum Shape {
    Text,
    Path,
    Boolean,
    Integer(RangeInclusive<u32>),
    /// Whole numbers, at least this one.
    IntegerFrom(u32),
    Number(RangeInclusive<f64>),
    /// Durations, at least this one.
    Duration(Duration),
    /// Sizes in bytes, at most this one.
    Size(u64),
    Words(Vec<&'static str>),
    Texts,
    TextOrTexts,
    TextTable,
    Integers(RangeInclusive<u32>),
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "for docs/configuration.md, which a test compares")
    )]
    Table(Vec<Key>),
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text => f.write_str("string"),
            Self::Path => f.write_str("path"),
            Self::Boolean => f.write_str("boolean"),
            Self::Integer(range) => write!(f, "{} to {}", range.start(), range.end()),
            Self::IntegerFrom(least) => write!(f, "integer from {least}"),
            Self::Number(range) => write!(f, "{} to {}", range.start(), range.end()),
            Self::Duration(Duration::ZERO) => f.write_str("duration"),
            Self::Duration(least) => {
                let least = crate::model::duration::show(*least);
                write!(f, "duration from `{least}`")
            }
            Self::Size(most) => write!(f, "size up to {} MiB", most >> 20),
            Self::Words(words) => {
                let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
                f.write_str(&words.join(", "))
            }
            Self::Texts => f.write_str("list of strings"),
            Self::TextOrTexts => f.write_str("string or list of strings"),
            Self::TextTable => f.write_str("table of strings"),
            Self::Integers(range) => write!(f, "list of {} to {}", range.start(), range.end()),
            Self::Table(_) => f.write_str("table"),
        }
    }
}

/// A form without parameters.
pub(super) struct Plain<T>(
    pub fn() -> Shape,
    pub for<'t> fn(&mut Reader<'t>, Field<'t>) -> Option<T>,
);

impl<T> Form for Plain<T> {
    type Value = T;
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<T> {
        (self.1)(r, field)
    }
    fn shape(&self) -> Shape {
        (self.0)()
    }
}

pub(super) const TEXT: Plain<String> = Plain(|| Shape::Text, |r, f| r.string(f));
/// A string that is not empty.
pub(super) const FILLED: Plain<String> = Plain(|| Shape::Text, |r, f| r.filled(f));
/// A path as written; the checker knows where a relative one starts.
pub(super) const PATH: Plain<String> = Plain(|| Shape::Path, |r, f| r.filled(f));
pub(super) const BOOLEAN: Plain<bool> = Plain(|| Shape::Boolean, |r, f| r.boolean(f));

/// A whole number within a range.
pub(super) struct Count(pub RangeInclusive<u32>);

impl Form for Count {
    type Value = u32;
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<u32> {
        r.count(field, self.0.clone())
    }
    fn shape(&self) -> Shape {
        // Do not show such a large limit: it only keeps sums from overflowing.
        if *self.0.end() >= 1_000_000 {
            Shape::IntegerFrom(*self.0.start())
        } else {
            Shape::Integer(self.0.clone())
        }
    }
}

/// A length of time.
pub(super) struct Span {
    least: Duration,
    /// Why a shorter one is refused, or what to do about it.
    why: Option<&'static str>,
}

impl Span {
    pub(super) const ANY: Self = Self {
        least: Duration::ZERO,
        why: None,
    };
    /// Longer than zero.
    pub(super) const SOME: Self = Self {
        least: Duration::from_millis(1),
        why: None,
    };
    pub(super) const fn from(least: Duration, why: &'static str) -> Self {
        Self {
            least,
            why: Some(why),
        }
    }
}

impl Form for Span {
    type Value = Duration;
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<Duration> {
        let d = r.duration(field)?;
        if d >= self.least {
            return Some(d);
        }
        let show = crate::model::duration::show;
        let message = match d.is_zero() && self.why.is_none() {
            true => "must be longer than zero".to_owned(),
            false => format!("must be at least {}, not {}", show(self.least), show(d)),
        };
        r.wrong(field, message, self.why.map(str::to_owned));
        None
    }
    fn shape(&self) -> Shape {
        Shape::Duration(self.why.map_or(Duration::ZERO, |_| self.least))
    }
}

/// A number of bytes.
pub(super) struct Bytes {
    pub most: u64,
}

impl Form for Bytes {
    type Value = u64;
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<u64> {
        r.size(field, self.most)
    }
    fn shape(&self) -> Shape {
        Shape::Size(self.most)
    }
}

/// One of a few words.
pub(super) struct Word<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy> Form for Word<T> {
    type Value = T;
    fn read<'t>(&self, r: &mut Reader<'t>, field: Field<'t>) -> Option<T> {
        r.word(field, self.0)
    }
    fn shape(&self) -> Shape {
        Shape::Words(self.0.iter().map(|(word, _)| *word).collect())
    }
}
