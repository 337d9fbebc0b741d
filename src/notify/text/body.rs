//! The text of a message, which may have to be cut: what it begins and ends with stays.

use std::fmt::Write as _;

use crate::{model::JobName, words::number};

#[derive(Default)]
pub(in crate::notify) struct Body {
    pub(in crate::notify) intro: String,
    /// The jobs of which it tells, if the title does not name all.
    pub(in crate::notify) names: Vec<Names>,
    /// How many more jobs there are, of which nobody knows what happened to them.
    pub(in crate::notify) rest: u64,
    pub(in crate::notify) details: Vec<Details>,
    /// Says which command shows more.
    pub(in crate::notify) closing: String,
}

/// Jobs to which the same happened.
pub(in crate::notify) struct Names {
    pub(in crate::notify) what: &'static str,
    pub(in crate::notify) jobs: Vec<JobName>,
    /// How many more.
    pub(in crate::notify) unnamed: u64,
}

/// What is said of one job.
#[derive(Default)]
pub(in crate::notify) struct Details {
    /// With several jobs each has its own.
    pub(in crate::notify) title: Option<String>,
    pub(in crate::notify) facts: String,
    pub(in crate::notify) link: Option<String>,
    pub(in crate::notify) output: String,
}

/// Where the links to the page are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::notify) enum Links {
    InTheText,
    /// The service shows the text as it is, so that a link in it could not be clicked.
    Apart,
}

impl Details {
    pub(in crate::notify) fn text(&self, links: Links) -> String {
        let mut out = String::new();
        if let Some(title) = &self.title {
            let _ = writeln!(out, "{title}");
        }
        out += &self.facts;
        if let Some(link) = self.link.as_ref().filter(|_| links == Links::InTheText) {
            out += &line("link", link);
        }
        out + &self.output
    }
}

impl Details {
    /// Of the output the begin is cut: its end says most.
    fn within(
        &self,
        links: Links,
        most: usize,
        count: fn(&str) -> usize,
        cut: fn(&str, usize) -> String,
    ) -> String {
        let whole = self.text(links);
        let Some((title, lines)) = self.output.split_once('\n') else {
            return cut(&whole, most);
        };
        let head = whole.strip_suffix(&self.output).unwrap_or_default();
        let head = format!("{head}{title}\n  …\n");
        let mut room = most.saturating_sub(count(&head));
        let mut kept: Vec<&str> = vec![];
        for line in lines.lines().rev() {
            let Some(left) = room.checked_sub(count(line) + 1) else {
                break;
            };
            room = left;
            kept.insert(0, line);
        }
        match kept.is_empty() {
            true => cut(&whole, most),
            false => format!("{head}{}\n", kept.join("\n")),
        }
    }
}

/// One line of facts. Without a name it goes on with what the line before began.
pub(super) fn line(name: &str, text: &str) -> String {
    let colon = if name.is_empty() { "" } else { ":" };
    format!("{:<12} {text}\n", format!("{name}{colon}"))
}

impl Body {
    pub(in crate::notify) fn whole(&self, links: Links) -> String {
        let (names, gap) = (self.names(usize::MAX), self.gap());
        let details = self.details(links);
        format!("{}{names}{gap}{details}{}", self.intro, self.closing)
    }

    /// At most as much as `most` allows, by `count`; `cut` cuts a text to that.
    pub(in crate::notify) fn within(
        &self,
        links: Links,
        most: usize,
        count: fn(&str) -> usize,
        cut: fn(&str, usize) -> String,
    ) -> String {
        let whole = self.whole(links);
        if count(&whole) <= most {
            return whole;
        }
        // With the names first, nobody has to open the page to see which jobs it is about.
        let head = format!("{}{}{}", self.intro, self.names(most / 2), self.gap());
        let closing = match self.closing.is_empty() {
            true => String::new(),
            false => format!(
                "\n\n{}{}",
                line("cut", "this channel takes no longer text"),
                self.closing.trim_start_matches('\n')
            ),
        };
        let room = most.saturating_sub(count(&head) + count(&closing));
        let details = match &self.details[..] {
            [one] => one.within(links, room, count, cut),
            _ => cut(&self.details(links), room),
        };
        cut(&format!("{head}{details}{closing}"), most)
    }

    /// All jobs of which it tells, if the title does not name them.
    pub(in crate::notify) fn all_names(&self) -> String {
        self.names(usize::MAX)
    }

    fn details(&self, links: Links) -> String {
        let all: Vec<String> = self.details.iter().map(|d| d.text(links)).collect();
        all.join("\n")
    }

    fn gap(&self) -> &'static str {
        if self.names.is_empty() { "" } else { "\n" }
    }

    /// As many names as this number of characters has room for.
    fn names(&self, most: usize) -> String {
        let mut out = String::new();
        let (mut left, mut rest) = (most, self.rest);
        for Names {
            what,
            jobs,
            unnamed,
        } in &self.names
        {
            let mut line = format!("{what}: ");
            let mut shown = 0;
            for job in jobs {
                let length = job.as_str().len() + 2;
                // The counts of what is left out, too.
                if left < length + 2 * what.len() + 20 {
                    break;
                }
                left -= length;
                line += if shown > 0 { ", " } else { "" };
                line += job.as_str();
                shown += 1;
            }
            left = left.saturating_sub(what.len() + 2);
            match (jobs.len() - shown) as u64 + unnamed {
                0 => {}
                more if shown > 0 => line += &format!(", and {} more", number(more)),
                more => {
                    rest += more;
                    continue;
                }
            }
            out += &line;
            out.push('\n');
        }
        if rest > 0 {
            let _ = writeln!(out, "and {} more", number(rest));
        }
        out
    }
}

/// The number of characters.
pub(in crate::notify) fn letters(text: &str) -> usize {
    text.chars().count()
}

/// At most `most` characters; what is cut is marked.
pub(in crate::notify) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some(_) => {
            let mut out: String = text.chars().take(most.saturating_sub(1)).collect();
            out.push('…');
            out
        }
    }
}
