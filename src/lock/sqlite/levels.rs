//! The levels of a reentrant lock, as a row of SQLite has them. For Redis, lua/lock/enter.lua and leave.lua follow the
//! same rules.

use super::super::reentrant::LevelToLeave;

/// The levels of a lock: the names of those that are over, a tab, the names of those that are not; with commas between
/// names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Levels {
    /// The newest of the levels that are over.
    over: Vec<String>,
    inside: Vec<String>,
}

/// How many names of levels that are over are remembered.
const OVER_KEPT: usize = 16;

impl Levels {
    /// The levels of a new grant: what the grant before it had left is over.
    pub(super) fn after(last: Option<Self>, first: &str) -> Self {
        let mut over = last.map_or_else(Vec::new, |l| [l.over, l.inside].concat());
        over.drain(..over.len().saturating_sub(OVER_KEPT));
        Self {
            over,
            inside: vec![first.to_owned()],
        }
    }

    pub(super) fn parse(text: &str) -> Self {
        let (over, inside) = text.split_once('\t').unwrap_or((text, ""));
        let names = |list: &str| {
            let names = list.split(',').filter(|name| !name.is_empty());
            names.map(str::to_owned).collect()
        };
        Self {
            over: names(over),
            inside: names(inside),
        }
    }

    pub(super) fn is_over(&self, name: &str) -> bool {
        self.over.iter().any(|n| n == name)
    }

    pub(super) fn is_inside(&self, name: &str) -> bool {
        self.inside.iter().any(|n| n == name)
    }

    pub(super) fn count(&self) -> usize {
        self.inside.len()
    }

    pub(super) fn enter(&mut self, name: &str) {
        if !self.is_inside(name) {
            self.inside.push(name.to_owned());
        }
    }

    /// Asked again, it takes off no further level.
    pub(super) fn leave(&mut self, name: &str, which: LevelToLeave) {
        if self.is_over(name) {
            return;
        }
        let at = match self.inside.iter().position(|n| n == name) {
            None if which == LevelToLeave::Newest => self.inside.len().checked_sub(1),
            at => at,
        };
        let gone = at.map(|at| self.inside.remove(at));
        let gone = gone.filter(|gone| gone != name);
        self.over.extend(gone.into_iter().chain([name.to_owned()]));
        let excess = self.over.len().saturating_sub(OVER_KEPT);
        self.over.drain(..excess);
    }
}

impl std::fmt::Display for Levels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\t{}", self.over.join(","), self.inside.join(","))
    }
}
