//! The screens of `soloist top`. Pure: what is shown comes from the state alone.

use ratatui::{
    Frame,
    buffer::Buffer,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::Span,
};

use super::state::{Line, SPANS, Screen, State, cell_of, planned};
use crate::{
    acts,
    cli::status::job_note,
    logic::coming::{Coming, SKIPS_COUNTED},
    model::{Outcome, RunRecord},
    view::{self, InstanceView, JobView, RunView},
    words::{self, count, fitting, relative, span, took},
};

const PLAIN: Style = Style::new();
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// What a text is about; with colours it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Plain,
    Good,
    Bad,
    Warn,
    Busy,
    Dim,
}

impl State {
    fn style(&self, mood: Mood) -> Style {
        let (colour, without) = match mood {
            Mood::Plain => return PLAIN,
            Mood::Dim => return DIM,
            Mood::Good => (Color::Green, PLAIN),
            Mood::Bad => (Color::Red, BOLD),
            Mood::Warn => (Color::Yellow, PLAIN),
            Mood::Busy => (Color::Cyan, BOLD),
        };
        match self.colours {
            true => without.fg(colour),
            false => without,
        }
    }

    /// The mark, or the other one on a terminal without UTF-8.
    fn mark(&self, unicode: &'static str, ascii: &'static str) -> &'static str {
        if self.unicode { unicode } else { ascii }
    }

    /// Text from elsewhere as this terminal can show it, on one line.
    fn fit(&self, text: &str) -> String {
        self.ascii(&words::line(text))
    }

    fn ascii(&self, text: &str) -> String {
        match self.unicode {
            true => text.to_owned(),
            false => text
                .chars()
                .map(|c| match c {
                    '…' => '~',
                    c if c.is_ascii() => c,
                    _ => '?',
                })
                .collect(),
        }
    }

    fn local(&self, ms: i64, format: &str) -> String {
        let at = jiff::Timestamp::from_millisecond(ms).unwrap_or_default();
        at.to_zoned(self.zone.clone()).strftime(format).to_string()
    }

    /// The time of the day, with the day if that is not today.
    fn clock_time(&self, ms: i64) -> String {
        match self.local(ms, "%F") == self.local(self.now, "%F") {
            true => self.local(ms, "%H:%M:%S"),
            false => self.local(ms, "%m-%d %H:%M"),
        }
    }
}

/// What stands at the end of a text that is cut; [`draw`] writes it in ASCII where that is all there is.
const CUT: &str = "…";

/// Writes `text` at a place, at most `width` columns of it, and nothing outside of `area`. A text that is cut says so:
/// a part of a word may be another word.
fn put(buf: &mut Buffer, area: Rect, x: u16, y: u16, width: u16, text: &str, style: Style) {
    if x >= area.width || y >= area.height || width == 0 {
        return;
    }
    let width = width.min(area.width - x);
    let (left, top) = (area.x + x, area.y + y);
    if width < 2 || Span::raw(text).width() <= width.into() {
        buf.set_stringn(left, top, text, width.into(), style);
        return;
    }
    let (end, _) = buf.set_stringn(left, top, text, usize::from(width) - 1, style);
    buf.set_stringn(end, top, CUT, 1, style);
}

fn right(buf: &mut Buffer, area: Rect, x: u16, y: u16, width: u16, text: &str, style: Style) {
    let length = u16::try_from(text.chars().count())
        .unwrap_or(width)
        .min(width);
    put(buf, area, x + (width - length), y, length, text, style);
}

/// A length of time at the right of a column, in a form that fits.
fn length(buf: &mut Buffer, area: Rect, c: &Column, y: u16, ms: Option<i64>, style: Style) {
    let text = ms.map(|ms| fitting(ms, c.width.into(), took));
    right(buf, area, c.x, y, c.width, &text.unwrap_or_default(), style);
}

/// So many rows of an area, from row `from` on.
fn rows(area: Rect, from: u16, height: u16) -> Rect {
    let from = from.min(area.height);
    Rect {
        y: area.y + from,
        height: height.min(area.height - from),
        ..area
    }
}

pub(super) fn draw(state: &State, frame: &mut Frame) {
    let area = frame.area();
    let buf = frame.buffer_mut();
    if area.width < 20 || area.height < 5 {
        put(buf, area, 0, 0, area.width, "soloist: too small", PLAIN);
        return;
    }
    header(state, buf, area);
    let wrapped = |(text, mood): (String, Mood)| {
        let lines = wrap_words(&state.ascii(&text), area.width.into());
        lines.into_iter().map(move |line| (line, mood))
    };
    // All of it, as long as two thirds are left for the rest; on a small screen the worst.
    let (said, most) = match area.height {
        ..16 => (1, 1),
        height => (usize::MAX, height / 3),
    };
    let said = verdict(state).into_iter().take(said);
    let mut verdict: Vec<_> = said.flat_map(wrapped).collect();
    let lines = u16::try_from(verdict.len()).unwrap_or(most).min(most);
    if usize::from(lines) < verdict.len()
        && let Some((last, _)) = verdict.get_mut(usize::from(lines) - 1)
    {
        *last += " …";
    }
    for (y, (text, mood)) in (1..).zip(verdict.iter().take(lines.into())) {
        put(
            buf,
            area,
            0,
            y,
            area.width,
            &state.ascii(text),
            state.style(*mood),
        );
    }
    let body = rows(area, 1 + lines, area.height.saturating_sub(2 + lines));
    match state.screen {
        _ if state.help => help(state, buf, body),
        Screen::Overview => overview(state, buf, body),
        Screen::Timeline => timeline(state, buf, body),
        Screen::Instances => instances(state, buf, body),
        Screen::Job => job(state, buf, body),
    }
    footer(state, buf, rows(area, area.height - 1, 1));
    question(state, buf, area);
    if !state.unicode {
        for cell in buf.content.iter_mut().filter(|cell| cell.symbol() == CUT) {
            cell.set_symbol("~");
        }
    }
}

fn header(state: &State, buf: &mut Buffer, area: Rect) {
    let mut x = 0;
    let narrow = area.width < 60;
    let names: [(Screen, &str); 3] = [
        (
            Screen::Overview,
            if narrow { "1 jobs" } else { "1 overview" },
        ),
        (
            Screen::Timeline,
            if narrow { "2 time" } else { "2 timeline" },
        ),
        (
            Screen::Instances,
            if narrow { "3 inst" } else { "3 instances" },
        ),
    ];
    if !narrow {
        put(buf, area, 0, 0, 9, "soloist", BOLD);
        x = 9;
    }
    for (screen, name) in names {
        let here = state.screen == screen || state.screen == Screen::Job && state.before == screen;
        let style = if here {
            BOLD.add_modifier(Modifier::REVERSED)
        } else {
            PLAIN
        };
        let text = format!(" {name} ");
        let width = u16::try_from(text.len()).unwrap_or(0);
        put(buf, area, x, 0, width, &text, style);
        x += width + u16::from(!narrow);
    }
    let time = state.local(state.now, if narrow { "%H:%M:%S" } else { "%H:%M:%S %Z" });
    let place = state.fit(&format!("{} {}", state.address, state.namespace));
    let free = area.width.saturating_sub(x + 1);
    let full = format!("{place}  {time}");
    let text = if full.chars().count() <= free.into() {
        full
    } else {
        time
    };
    if text.chars().count() <= free.into() {
        right(buf, area, x + 1, 0, free, &state.ascii(&text), DIM);
    }
}

fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = all.collect();
    let first = all.iter().take(3).copied().collect::<Vec<_>>().join(", ");
    match all.len() {
        0..=3 => first,
        n => format!("{first} and {} more", n - 3),
    }
}

/// How the fleet is: what is worst comes first.
// Long: one thing that may be wrong after the other.
fn verdict(state: &State) -> Vec<(String, Mood)> {
    let mut said = vec![];
    if let Some(why) = &state.away {
        let since = span(state.now - state.away_since);
        let known = match state.fleet {
            Some(_) => format!("for {since}, this is what was known then"),
            None => format!("yet, for {since}, and it is asked again each second"),
        };
        said.push((
            format!("no answer from the store {known}: {}", words::line(why)),
            Mood::Bad,
        ));
    } else if state.fleet.is_none() {
        said.push((
            format!("asking the store at {} ...", words::line(&state.address)),
            Mood::Dim,
        ));
    }
    for p in &state.problems {
        said.push((format!("the store: {}", words::line(p)), Mood::Bad));
    }
    if let Some(why) = state.clock.and_then(acts::doubt) {
        said.push((why, Mood::Bad));
    }
    let live = state.instances.iter().filter(|i| !i.silent).count();
    if state.fleet.is_some() && live == 0 {
        said.push((acts::NOBODY.to_owned(), Mood::Bad));
    } else if state.fleet.is_some() && state.instances.iter().all(|i| i.silent || i.draining) {
        said.push((view::DRAINED.to_owned(), Mood::Warn));
    }
    if let Some(fleet) = state.fleet.as_ref().filter(|f| !f.open) {
        said.push((view::epoch(fleet, state.now).words, Mood::Warn));
    }
    let jobs = || state.jobs.values();
    let sick: Vec<&JobView> = (jobs().map(|l| &l.view))
        .filter(|v| v.attention.is_some())
        .collect();
    if let [first, rest @ ..] = &sick[..] {
        let (needs, why) = match (rest, &first.attention) {
            ([], Some(why)) => ("needs", format!(": {why}")),
            _ => ("need", String::new()),
        };
        let (all, n) = (names(sick.iter().map(|v| v.job.as_str())), sick.len());
        let text = format!("{} {needs} attention: {all}{why}", count(n, "job"));
        said.push((text, Mood::Bad));
    }
    let silent: Vec<&InstanceView> = state.instances.iter().filter(|i| i.silent).collect();
    if !silent.is_empty() {
        let who = names(silent.iter().map(|i| i.instance.as_str()));
        said.push((format!("not heard from: {}", words::line(&who)), Mood::Warn));
    }
    let running: usize = jobs().map(|l| l.view.running.len()).sum();
    let paused = jobs().filter(|l| l.view.paused.is_some()).count();
    let mut all = count(state.jobs.len(), "job");
    if state.fleet.is_some() {
        all += &format!(", {running} running");
        if paused > 0 {
            all += &format!(", {paused} paused");
        }
        all += &format!("; {}", count(live, "live instance"));
    }
    match said.is_empty() {
        true => said.push((format!("all is well: {all}"), Mood::Good)),
        false => said.push((all, Mood::Plain)),
    }
    said
}

/// A mark, a word and a mood for how a job is.
fn condition(state: &State, l: &Line) -> (&'static str, String, Mood) {
    let v = &l.view;
    if v.attention.is_some() {
        let ran = v.state.parse::<Outcome>().is_ok();
        let mark = if ran { state.mark("✗", "x") } else { "!" };
        return (mark, v.state.replace('_', " "), Mood::Bad);
    }
    if !v.running.is_empty() {
        let n = v.running.len();
        let word = if n > 1 {
            format!("{n} running")
        } else {
            "running".into()
        };
        return (state.mark("▶", ">"), word, Mood::Busy);
    }
    if !v.awaited.is_empty() {
        return (state.mark("↻", "~"), "retries".into(), Mood::Warn);
    }
    if v.triggers > v.triggers_over {
        return (state.mark("▷", ">"), "triggered".into(), Mood::Busy);
    }
    if v.paused.is_some() {
        return (state.mark("‖", "="), "paused".into(), Mood::Warn);
    }
    match v.state {
        "off" => (" ", "off".into(), Mood::Dim),
        _ if !l.known || !v.known => (" ", if l.known { "waits" } else { "" }.into(), Mood::Dim),
        "none" | "manual" => (" ", "not yet".into(), Mood::Dim),
        _ => (state.mark("✓", "+"), "ok".into(), Mood::Good),
    }
}

fn outcome_mark(state: &State, outcome: Outcome) -> (&'static str, Mood) {
    match outcome {
        Outcome::Running => (state.mark("▶", ">"), Mood::Busy),
        Outcome::Succeeded => (state.mark("✓", "+"), Mood::Good),
        Outcome::Failed => (state.mark("✗", "x"), Mood::Bad),
        Outcome::TimedOut => ("T", Mood::Bad),
        Outcome::LeaseLost => ("L", Mood::Bad),
        Outcome::Crashed => ("!", Mood::Bad),
        Outcome::Unknown => ("?", Mood::Bad),
        Outcome::Missed => ("M", Mood::Bad),
        Outcome::Cancelled => ("c", Mood::Warn),
        Outcome::Replaced => ("r", Mood::Warn),
        Outcome::Skipped => ("-", Mood::Dim),
    }
}

/// Where a column is. Without a width it is not shown.
struct Column {
    x: u16,
    width: u16,
}

/// Places columns of these widths one after the other with a space between; those that do not fit get no width.
fn columns<const N: usize>(from: u16, width: u16, wanted: [u16; N]) -> [Column; N] {
    let mut x = from;
    wanted.map(|w| {
        let fits = w > 0 && x + w <= width;
        let column = Column {
            x,
            width: if fits { w } else { 0 },
        };
        if fits {
            x += w + 1;
        }
        column
    })
}

/// The first of the rows that are shown, so that row `at` is among them.
fn first(at: usize, rows: usize, all: usize) -> usize {
    at.saturating_sub(rows / 2).min(all.saturating_sub(rows))
}

fn chosen(state: &State, buf: &mut Buffer, area: Rect, y: u16, here: bool) {
    if here {
        put(buf, area, 0, y, 1, state.mark("›", ">"), BOLD);
        let row = rows(area, y, 1);
        buf.set_style(row, Style::new().add_modifier(Modifier::REVERSED));
    }
}

fn next_in(l: &Line, now: i64, width: u16) -> String {
    let span = |ms| fitting(ms, width.into(), span);
    match (l.view.awaited.first(), l.view.next) {
        (Some(a), _) if a.at.0 <= now => "due".into(),
        (Some(a), _) => span(a.at.0 - now + 999),
        (None, Some(t)) if t.0 <= now => "now".into(),
        (None, Some(t)) => span(t.0 - now + 999),
        (None, None) if l.view.paused.as_ref().is_some_and(|p| p.until.is_none()) => {
            "paused".into()
        }
        (None, None) if l.definition.schedules.is_empty() => "manual".into(),
        (None, None) if l.view.skip > SKIPS_COUNTED => "skipped".into(),
        (None, None) => "never".into(),
    }
}

/// As wide as the longest name, within bounds.
fn job_width(listed: &[&Line], least: u16, most: u16) -> u16 {
    let longest = listed
        .iter()
        .map(|l| l.view.job.as_str().len())
        .max()
        .unwrap_or(0);
    u16::try_from(longest)
        .unwrap_or(most)
        .clamp(least, most.max(least))
}

/// For a mark and the longest word for how a job is.
const STATE_WIDTH: u16 = 12;
/// As wide as its title: there is a form of each countdown that fits.
const NEXT_LEAST: u16 = 7;
/// In less than this, a note would say nothing.
const NOTE_LEAST: u16 = 12;

// Long: one column after the other.
fn overview(state: &State, buf: &mut Buffer, area: Rect) {
    let listed = state.listed();
    let w = area.width;
    let name = job_width(
        &listed,
        8,
        if w >= 150 {
            40
        } else if w >= 80 {
            16
        } else if w >= 60 {
            w.saturating_sub(2 + 1 + STATE_WIDTH + 1 + 11)
        } else {
            w.saturating_sub(2 + 1 + STATE_WIDTH + 1 + 9)
        },
    );
    let strip = if w >= 120 { 24 } else { 10 };
    let by = if w >= 150 { 24 } else { 10 };
    let [job, cond, next, runs, last, late, who, note] = match w {
        ..60 => {
            let cond = w.saturating_sub(2 + name + 1).min(STATE_WIDTH);
            let left = w.saturating_sub(2 + name + 1 + cond + 1).min(12);
            let next = if left < NEXT_LEAST { 0 } else { left };
            columns(2, w, [name, cond, next, 0, 0, 0, 0, 0])
        }
        60..80 => columns(2, w, [name, STATE_WIDTH, 11, strip, 0, 0, 0, 0]),
        _ => {
            let used = 2 + name + STATE_WIDTH + 11 + strip + 8 + 8 + by + 7;
            let left = w.saturating_sub(used);
            columns(
                2,
                w,
                [
                    name,
                    STATE_WIDTH,
                    11,
                    strip,
                    8,
                    8,
                    by.min(w.saturating_sub(used - by)),
                    if left < NOTE_LEAST { 0 } else { left },
                ],
            )
        }
    };
    for (c, title) in [
        (&job, "JOB"),
        (&cond, "STATE"),
        (&runs, "LAST RUNS"),
        (&who, "RUN BY"),
        (&note, "NOTE"),
    ] {
        put(buf, area, c.x, 0, c.width, title, DIM);
    }
    for (c, title) in [(&next, "NEXT IN"), (&last, "TOOK"), (&late, "LATE")] {
        right(buf, area, c.x, 0, c.width, title, DIM);
    }
    let shown = usize::from(area.height.saturating_sub(1));
    state.rows.set(area.height.saturating_sub(1));
    let at = state.at(&listed);
    let from = first(at, shown, listed.len());
    let open = state.fleet.as_ref().is_none_or(|f| f.open);
    for (y, (i, l)) in (1..).zip(listed.iter().enumerate().skip(from).take(shown)) {
        let (mark, word, mood) = condition(state, l);
        put(
            buf,
            area,
            job.x,
            y,
            job.width,
            &state.fit(l.view.job.as_str()),
            BOLD,
        );
        put(
            buf,
            area,
            cond.x,
            y,
            cond.width,
            &format!("{mark} {word}"),
            state.style(mood),
        );
        right(
            buf,
            area,
            next.x,
            y,
            next.width,
            &next_in(l, state.now, next.width),
            PLAIN,
        );
        for (x, r) in (0..runs.width).zip(l.recent.iter().take(runs.width.into()).rev()) {
            let (mark, mood) = outcome_mark(state, r.outcome);
            put(buf, area, runs.x + x, y, 1, mark, state.style(mood));
        }
        let ran = l.recent.iter().find(|r| r.run_id.is_some());
        let active = l.view.running.first();
        let lasted = match active {
            Some(r) => r.started_at.map(|t| (state.now - t.0).max(0) / 1000 * 1000),
            None => ran.and_then(|r| r.duration_ms),
        };
        let style = if active.is_some() {
            state.style(Mood::Busy)
        } else {
            PLAIN
        };
        length(buf, area, &last, y, lasted, style);
        let by = match active {
            Some(r) => r.instance.as_ref(),
            None => ran.and_then(|r| r.instance.as_ref()),
        };
        // Nobody else knows it while it runs.
        let lateness = ran.filter(|_| active.is_none()).and_then(|r| r.lateness_ms);
        length(buf, area, &late, y, lateness, PLAIN);
        let by = by.map_or(String::new(), |i| state.fit(i.as_str()));
        let style = if active.is_some() { PLAIN } else { DIM };
        put(buf, area, who.x, y, who.width, &by, style);
        if note.width > 0 && l.known {
            let text = state.fit(&job_note(&l.view, open, state.now));
            put(
                buf,
                area,
                note.x,
                y,
                note.width,
                &text,
                state.style(Mood::Warn),
            );
        }
        chosen(state, buf, area, y, i == at);
    }
    if listed.is_empty() {
        nothing_listed(state, buf, area);
    }
}

fn nothing_listed(state: &State, buf: &mut Buffer, area: Rect) {
    let text = match state.jobs.is_empty() {
        true => "the configuration has no jobs",
        false => "no job has this in its name: Esc shows all",
    };
    put(buf, area, 2, 1, area.width, text, DIM);
}

// Long: one row after the other, each in three layers: what is planned, what ended, what runs.
fn timeline(state: &State, buf: &mut Buffer, area: Rect) {
    let listed = state.listed();
    let name = job_width(&listed, 8, (area.width / 4).max(8));
    let x = 2 + name + 1;
    let width = area.width.saturating_sub(x);
    let length = SPANS[state.span.min(SPANS.len() - 1)];
    if width < 8 {
        return;
    }
    // The window moves by whole cells, so that what is drawn changes only then.
    let cell = (length / i64::from(width)).max(1);
    let to = (state.now + length / 3).div_euclid(cell) * cell;
    let from = to - cell * i64::from(width);
    let now = cell_of(state.now, from, to, width);
    let format = if length > 86_400_000 {
        "%a %H:%M"
    } else {
        "%H:%M"
    };
    put(buf, area, 2, 0, name, &format!("{} ", span(length)), DIM);
    let step = if length > 86_400_000 { 16 } else { 10 };
    for at in (0..width.saturating_sub(9)).step_by(step) {
        let text = state.local(from + cell * i64::from(at), format);
        put(buf, area, x + at, 0, 10, &text, DIM);
    }
    let shown = usize::from(area.height.saturating_sub(1));
    state.rows.set(area.height.saturating_sub(1));
    let at = state.at(&listed);
    let skipped = first(at, shown, listed.len());
    let mut cache = state.planned.borrow_mut();
    for (y, (i, l)) in (1..).zip(listed.iter().enumerate().skip(skipped).take(shown)) {
        put(buf, area, 2, y, name, &state.fit(l.view.job.as_str()), BOLD);
        put(buf, area, x + now, y, 1, state.mark("│", "|"), DIM);
        let window = (from, to, width);
        let known = cache.get(&l.view.job).filter(|(of, _)| *of == window);
        let cells = match known {
            Some((_, cells)) => cells.clone(),
            None => {
                let cells = planned(&l.definition, state.now, from, to, width);
                cache.insert(l.view.job.clone(), (window, cells.clone()));
                cells
            }
        };
        for c in cells {
            let end = from + cell * (i64::from(c) + 1);
            let out = l.view.next.is_none_or(|next| end <= next.0);
            let mark = if out { "-" } else { state.mark("○", "o") };
            put(buf, area, x + c, y, 1, mark, DIM);
        }
        let bar = |buf: &mut Buffer, a: i64, b: i64, mood: Mood| {
            if b < from || a >= to {
                return;
            }
            let (a, b) = (cell_of(a, from, to, width), cell_of(b, from, to, width));
            for c in a..=b {
                put(
                    buf,
                    area,
                    x + c,
                    y,
                    1,
                    state.mark("━", "="),
                    state.style(mood),
                );
            }
        };
        // Oldest first: what is newer, and what went wrong, is on top.
        let mut ended: Vec<&RunRecord> = l.recent.iter().rev().collect();
        ended.sort_by_key(|r| outcome_mark(state, r.outcome).1 == Mood::Bad);
        for r in ended {
            let end = r.finished_at.unwrap_or(r.occurrence.0);
            let (mark, mood) = outcome_mark(state, r.outcome);
            if let Some(started) = r.started_at {
                bar(buf, started, end, mood);
            }
            if (from..to).contains(&end) {
                put(
                    buf,
                    area,
                    x + cell_of(end, from, to, width),
                    y,
                    1,
                    mark,
                    state.style(mood),
                );
            }
        }
        for r in &l.view.running {
            bar(
                buf,
                r.started_at.map_or(state.now, |t| t.0),
                state.now,
                Mood::Busy,
            );
            put(
                buf,
                area,
                x + now,
                y,
                1,
                state.mark("▶", ">"),
                state.style(Mood::Busy),
            );
        }
        if i == at {
            put(buf, area, 0, y, 1, state.mark("›", ">"), BOLD);
            buf.set_style(
                Rect {
                    width: 2 + name,
                    ..rows(area, y, 1)
                },
                Style::new().add_modifier(Modifier::REVERSED),
            );
        }
    }
    if listed.is_empty() {
        nothing_listed(state, buf, area);
    }
}

// Long: a column after the other.
fn instances(state: &State, buf: &mut Buffer, area: Rect) {
    let w = area.width;
    let name = if w >= 120 {
        32
    } else if w >= 60 {
        20
    } else {
        16
    };
    let note = w
        .saturating_sub(2 + name + 1 + 10 + 1 + 8 + 1 + 9 + 1 + 9 + 1 + 5 + 1)
        .min(60);
    let [id, seen, runs, clock, config, jobs, notes] = columns(2, w, [name, 10, 8, 9, 9, 5, note]);
    for (c, title) in [
        (&id, "INSTANCE"),
        (&seen, "SEEN"),
        (&config, "CONFIG"),
        (&notes, "HOST, NOTE"),
    ] {
        put(buf, area, c.x, 0, c.width, title, DIM);
    }
    for (c, title) in [(&runs, "RUNNING"), (&clock, "CLOCK"), (&jobs, "JOBS")] {
        right(buf, area, c.x, 0, c.width, title, DIM);
    }
    let shown = usize::from(area.height.saturating_sub(1));
    state.rows.set(area.height.saturating_sub(1));
    let from = first(state.instance, shown, state.instances.len());
    for (y, (n, i)) in (1..).zip(state.instances.iter().enumerate().skip(from).take(shown)) {
        put(
            buf,
            area,
            id.x,
            y,
            id.width,
            &state.fit(i.instance.as_str()),
            BOLD,
        );
        let silent = state.style(if i.silent { Mood::Bad } else { Mood::Plain });
        put(
            buf,
            area,
            seen.x,
            y,
            seen.width,
            &relative(i.last_seen.0, state.now),
            silent,
        );
        let running = if i.silent {
            "?".to_owned()
        } else {
            i.running.len().to_string()
        };
        right(buf, area, runs.x, y, runs.width, &running, PLAIN);
        let wrong = state.style(if i.clock_warning {
            Mood::Bad
        } else {
            Mood::Plain
        });
        let offset = format!("{:+.3} s", i.clock_offset_ms.round() as i64 as f64 / 1000.0);
        right(buf, area, clock.x, y, clock.width, &offset, wrong);
        let differs = state.style(if i.config_differs {
            Mood::Warn
        } else {
            Mood::Dim
        });
        let digest: String = i.config.chars().take(8).collect();
        put(
            buf,
            area,
            config.x,
            y,
            config.width,
            &state.fit(&digest),
            differs,
        );
        right(buf, area, jobs.x, y, jobs.width, &i.jobs.to_string(), PLAIN);
        let mut said = vec![i.host.clone()];
        if i.draining {
            said.push("draining".into());
        }
        if i.config_differs {
            said.push("another configuration".into());
        }
        said.extend(i.running.iter().map(|r| format!("runs {}", r.job)));
        put(
            buf,
            area,
            notes.x,
            y,
            notes.width,
            &state.fit(&said.join(", ")),
            PLAIN,
        );
        chosen(state, buf, area, y, n == state.instance);
    }
    if state.instances.is_empty() {
        put(
            buf,
            area,
            2,
            1,
            w,
            "no instance is up: `soloist run` starts one",
            DIM,
        );
    }
}

fn job(state: &State, buf: &mut Buffer, area: Rect) {
    let Some(l) = state.line() else { return };
    let (mark, word, mood) = condition(state, l);
    let name = state.fit(l.view.job.as_str());
    put(buf, area, 0, 0, area.width, &name, BOLD);
    let x = u16::try_from(name.len()).unwrap_or(0) + 2;
    put(
        buf,
        area,
        x,
        0,
        13,
        &format!("{mark} {word}"),
        state.style(mood),
    );
    let schedule = match l.view.schedule.is_empty() {
        true => "only when triggered".to_owned(),
        false => format!("{} {}", l.view.schedule.join(" | "), l.view.timezone),
    };
    let about = match &l.view.description {
        Some(text) => format!("{schedule}  {text}"),
        None => schedule,
    };
    put(buf, area, x + 14, 0, area.width, &state.fit(&about), DIM);
    let mut y = 1;
    let open = state.fleet.as_ref().is_none_or(|f| f.open);
    let note = job_note(&l.view, open, state.now);
    if l.known && !note.is_empty() {
        put(
            buf,
            area,
            0,
            y,
            area.width,
            &state.fit(&note),
            state.style(Mood::Warn),
        );
        y += 1;
    }
    if area.height > 9 {
        let coming = Coming::of(&l.definition, l.state.as_ref(), state.now);
        let coming: Vec<_> = coming.runs(&l.definition).take(12).collect();
        let mut text = match coming.first() {
            Some(o) => format!("next {}: ", relative(o.0, state.now)),
            None if l.view.passed_over.is_some() => "no next run".to_owned(),
            None => "no next occurrence".to_owned(),
        };
        for o in &coming {
            let one = format!(" {}", state.clock_time(o.0));
            if text.len() + one.len() > usize::from(area.width) {
                break;
            }
            text.push_str(&one);
        }
        put(buf, area, 0, y, area.width, &text, PLAIN);
        y += 1;
    }
    let runs = state.runs();
    let left = area.height.saturating_sub(y);
    let list = (left / 2)
        .min(u16::try_from(runs.len() + 1).unwrap_or(left))
        .max(2.min(left));
    history(state, &runs, buf, rows(area, y, list));
    y += list;
    let left = left - list;
    let said = error(state, &runs, buf, rows(area, y, left));
    output(state, &runs, buf, rows(area, y + said, left - said));
}

fn history(state: &State, runs: &[RunView], buf: &mut Buffer, area: Rect) {
    let w = area.width;
    let wide = if w >= 120 { 24 } else { 10 };
    let error = w.saturating_sub(2 + 12 + 12 + 9 + 9 + 8 + wide + 6);
    let [when, how, lasted, late, code, who, why] = columns(2, w, [11, 12, 9, 9, 8, wide, error]);
    for (c, title) in [
        (&when, "FOR"),
        (&how, "OUTCOME"),
        (&code, "EXIT"),
        (&who, "RUN BY"),
        (&why, "ERROR"),
    ] {
        put(buf, area, c.x, 0, c.width, title, DIM);
    }
    for (c, title) in [(&lasted, "TOOK"), (&late, "LATE")] {
        right(buf, area, c.x, 0, c.width, title, DIM);
    }
    let shown = usize::from(area.height.saturating_sub(1));
    let at = state.run_at(runs);
    let from = first(at, shown, runs.len());
    for (y, (i, r)) in (1..).zip(runs.iter().enumerate().skip(from).take(shown)) {
        let (mark, mood) = outcome_mark(state, r.outcome);
        put(
            buf,
            area,
            when.x,
            y,
            when.width,
            &state.clock_time(r.occurrence.0),
            PLAIN,
        );
        let outcome = format!("{mark} {}", r.outcome.as_str().replace('_', " "));
        put(buf, area, how.x, y, how.width, &outcome, state.style(mood));
        let ms = match (r.outcome, r.started_at) {
            (Outcome::Running, Some(t)) => Some((state.now - t.0).max(0) / 1000 * 1000),
            _ => r.duration_ms,
        };
        length(buf, area, &lasted, y, ms, PLAIN);
        length(buf, area, &late, y, r.lateness_ms, PLAIN);
        put(buf, area, code.x, y, code.width, &view::exit(r), PLAIN);
        let by = r
            .instance
            .as_ref()
            .map_or(String::new(), |i| state.fit(i.as_str()));
        put(buf, area, who.x, y, who.width, &by, PLAIN);
        let mut said = r.error.clone().unwrap_or_default();
        if r.count > 1 {
            said = format!("{} times; {said}", r.count);
        }
        if r.attempt > 1 {
            said = format!("attempt {} ({}) {said}", r.attempt, r.trigger.as_str());
        }
        put(buf, area, why.x, y, why.width, &state.fit(&said), DIM);
        chosen(state, buf, area, y, i == at);
    }
    if runs.is_empty() {
        put(buf, area, 2, 1, w, "it has not run yet", DIM);
    }
}

/// The whole error of the selected run, for which its column has no room, in two rows at most. Returns how many.
fn error(state: &State, runs: &[RunView], buf: &mut Buffer, area: Rect) -> u16 {
    let selected = runs.get(state.run_at(runs));
    let Some(text) = selected.and_then(|r| r.error.as_ref()) else {
        return 0;
    };
    // The title of the output and a row of it stay.
    let most = area.height.saturating_sub(2).min(2);
    let text = state.fit(&format!("error: {text}"));
    let mut parts = wrap(&text, area.width.into()).into_iter();
    for y in 0..most {
        let Some(mut part) = parts.next() else {
            return y;
        };
        if y + 1 == most {
            part.extend(parts.by_ref());
        }
        let style = state.style(Mood::Bad);
        put(buf, area, 0, y, area.width, &part, style);
    }
    most
}

fn output(state: &State, runs: &[RunView], buf: &mut Buffer, area: Rect) {
    if area.height == 0 {
        return;
    }
    let Some(r) = runs.get(state.run_at(runs)) else {
        return;
    };
    let o = &state.output;
    let ended = r.outcome != Outcome::Running;
    let how = match (ended, state.back) {
        _ if r.run_id.is_none() => "it did not run".to_owned(),
        (_, 1..) => format!("{} above the end; End follows", count(state.back, "line")),
        (false, 0) => "followed".to_owned(),
        (true, 0) if o.missing > 0 => format!("the last {} bytes are missing", o.missing),
        (true, 0) => "ended".to_owned(),
    };
    let title = format!("output of {}, {how} ", state.clock_time(r.occurrence.0));
    let rule = state.mark("─", "-").repeat(area.width.into());
    put(buf, area, 0, 0, area.width, &rule, DIM);
    put(buf, area, 0, 0, area.width, &title, DIM);
    let room = usize::from(area.height - 1);
    state.rows.set(area.height - 1);
    if o.text.is_empty() {
        let text = match (o.asked, ended) {
            (false, _) if r.run_id.is_some() => "...",
            (_, false) => "it has written nothing yet",
            _ => "it wrote nothing, or its output is no longer kept",
        };
        put(buf, area, 0, 1, area.width, text, DIM);
        return;
    }
    // From the end: only as much as is shown.
    let mut shown: Vec<String> = vec![];
    for line in o.text.trim_end_matches('\n').rsplit('\n') {
        let mut parts = wrap(&state.ascii(line), area.width.into());
        while let Some(part) = parts.pop() {
            shown.push(part);
        }
        if shown.len() >= room + state.back {
            break;
        }
    }
    let back = state.back.min(shown.len().saturating_sub(room));
    shown.drain(..back);
    shown.truncate(room);
    for (y, line) in (1..).zip(shown.iter().rev()) {
        put(buf, area, 0, y, area.width, line, PLAIN);
    }
}

/// Letters of East Asia and emoji take two columns.
fn wide(c: char) -> bool {
    matches!(u32::from(c),
        0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f | 0xff00..=0xff60
        | 0x1f300..=0x1faff | 0x20000..=0x3fffd)
}

/// A line in pieces of at most `width` columns, with its tabs as spaces.
fn wrap(line: &str, width: usize) -> Vec<String> {
    let (mut parts, mut part, mut at) = (vec![], String::new(), 0);
    for c in line.chars() {
        let (c, columns) = match c {
            '\t' => (' ', 8 - at % 8),
            c if wide(c) => (c, 2),
            c => (c, 1),
        };
        if at + columns > width && at > 0 {
            parts.push(std::mem::take(&mut part));
            at = 0;
        }
        match c {
            ' ' => part.extend(std::iter::repeat_n(' ', columns.min(width))),
            c => part.push(c),
        }
        at += columns;
    }
    parts.push(part);
    parts
}

const HELP: [(&str, &str); 14] = [
    ("1 2 3, Tab", "overview, timeline, instances"),
    ("Enter, Esc", "open the job; back"),
    ("Up Down, j k", "another job, run or instance"),
    ("PgUp PgDn", "a page; of a job, its output"),
    ("/", "only jobs with this in the name"),
    ("+ -", "timeline: shorter, longer"),
    ("t", "run the job once now"),
    ("p r", "pause the job, end the pause"),
    ("s", "skip its next occurrences"),
    ("c", "end its active runs"),
    ("d u", "drain the instance; undrain it"),
    ("Ctrl-L", "draw all anew"),
    ("Ctrl-Z", "suspend; `fg` comes back"),
    ("q, Ctrl-C", "quit"),
];

/// All keys and marks; what has no room comes when it is scrolled to.
fn help(state: &State, buf: &mut Buffer, area: Rect) {
    let marks = [
        Outcome::Running,
        Outcome::Succeeded,
        Outcome::Failed,
        Outcome::TimedOut,
        Outcome::Crashed,
        Outcome::Unknown,
        Outcome::LeaseLost,
        Outcome::Missed,
        Outcome::Skipped,
        Outcome::Cancelled,
        Outcome::Replaced,
    ];
    let marks = marks.map(|o| (outcome_mark(state, o).0, o.as_str().replace('_', " ")));
    let marks = marks.iter().map(|(mark, word)| (*mark, word.as_str()));
    let mut lines: Vec<(&str, String)> = vec![];
    for (key, what) in HELP.into_iter().chain(marks) {
        let width = usize::from(area.width.saturating_sub(15)).max(1);
        let parts = wrap_words(what, width).into_iter();
        lines.extend(
            parts
                .enumerate()
                .map(|(n, part)| (if n == 0 { key } else { "" }, part)),
        );
    }
    let room = usize::from(area.height);
    let last = lines.len().saturating_sub(room);
    state.help_last.set(last);
    state.rows.set(area.height);
    let shown = lines.iter().skip(state.help_at.min(last)).take(room);
    for (y, (key, what)) in (0..).zip(shown) {
        put(buf, area, 1, y, 13, key, BOLD);
        put(buf, area, 15, y, area.width, what, PLAIN);
    }
}

/// A text in lines of at most `width` columns, divided at its spaces.
fn wrap_words(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines
            .last_mut()
            .filter(|l| l.is_empty() || l.len() + 1 + word.len() <= width);
        match last {
            Some(line) => {
                *line += if line.is_empty() { "" } else { " " };
                *line += word;
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

fn footer(state: &State, buf: &mut Buffer, area: Rect) {
    if let Some((text, good)) = &state.said {
        let style = state.style(if *good { Mood::Good } else { Mood::Bad });
        put(buf, area, 0, 0, area.width, &state.fit(text), style);
        return;
    }
    if state.filtering || !state.filter.is_empty() && state.screen != Screen::Job {
        let end = if state.filtering {
            "_  Enter keeps it, Esc shows all"
        } else {
            "  / changes it, Esc shows all"
        };
        put(
            buf,
            area,
            0,
            0,
            area.width,
            &state.fit(&format!("/{}{end}", state.filter)),
            PLAIN,
        );
        return;
    }
    let keys = match state.screen {
        _ if state.help && state.help_last.get() > 0 => "Up Down more  Esc back  q quit",
        _ if state.help => "Esc back  q quit",
        Screen::Overview => {
            "? keys  Enter job  t trigger  p pause  r resume  s skip  c cancel  / find  q"
        }
        Screen::Timeline => {
            "? keys  Enter job  + - zoom  t trigger  p pause  r resume  / find  q quit"
        }
        Screen::Instances => "? keys  d drain  u undrain  q quit",
        Screen::Job => {
            "Esc back  ? keys  PgUp PgDn output  t trigger  p pause  r resume  c cancel  q"
        }
    };
    put(
        buf,
        area,
        0,
        0,
        area.width,
        whole(keys, area.width.into()),
        DIM,
    );
}

/// As many of the hints, which two spaces divide, as fit: all are below `?`.
fn whole(keys: &str, width: usize) -> &str {
    if keys.len() <= width {
        return keys;
    }
    let some = keys.get(..(width + 2).min(keys.len())).unwrap_or_default();
    some.rfind("  ").map_or("", |at| &keys[..at])
}

fn question(state: &State, buf: &mut Buffer, area: Rect) {
    let Some(q) = &state.question else { return };
    let width = area.width.min(64);
    let room = usize::from(width.saturating_sub(4));
    let lines = wrap_words(&state.fit(&q.text), room);
    let text: Vec<String> = lines.iter().flat_map(|line| wrap(line, room)).collect();
    let height = u16::try_from(text.len() + q.fields.len() + 3)
        .unwrap_or(6)
        .min(area.height);
    let place = Rect {
        x: area.x + (area.width - width) / 2,
        y: area.y + (area.height - height) / 2,
        width,
        height,
    };
    let edge = state.mark("─", "-").repeat(width.into());
    for y in 0..height {
        let row = if y == 0 || y + 1 == height {
            edge.clone()
        } else {
            " ".repeat(width.into())
        };
        put(buf, place, 0, y, width, &row, PLAIN);
    }
    buf.set_style(place, Style::reset());
    let mut y = 1;
    for line in &text {
        put(buf, place, 2, y, width - 4, line, BOLD);
        y += 1;
    }
    for (i, (name, value)) in q.fields.iter().enumerate() {
        let here = i == q.field;
        let room = usize::from(width.saturating_sub(15));
        // Of a long text, its end is shown.
        let value = state.fit(value);
        let skipped = value.chars().count().saturating_sub(room.saturating_sub(1));
        let value: String = value.chars().skip(skipped).collect();
        let text = format!("{name:<10} {value}{}", if here { "_" } else { "" });
        put(
            buf,
            place,
            2,
            y,
            width - 4,
            &text,
            if here { BOLD } else { PLAIN },
        );
        y += 1;
    }
    let keys = match (
        q.fields.len(),
        q.fields.get(q.field).is_some_and(|f| f.0 == "until"),
    ) {
        (0, _) => "y yes   n no",
        (1, _) => "Enter does it   Esc does not",
        (_, true) => "Enter does it  Esc not; as 2h, or empty: until resumed",
        (_, false) => "Enter does it   Tab next field   Esc does not",
    };
    put(buf, place, 2, height - 2, width - 4, keys, DIM);
}

#[cfg(test)]
mod tests;
