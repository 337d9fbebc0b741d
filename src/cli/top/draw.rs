//! The screens of `soloist top`: the tables of `status` and `history` on a terminal. Pure: what is shown comes from the
//! state alone.

use std::borrow::Cow;

use anstyle::{AnsiColor, Effects};
use ratatui::{
    Frame,
    buffer::Buffer,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{self, Block, Clear, HighlightSpacing, Padding, Paragraph, Row, TableState},
};

use super::state::{Screen, State};
use crate::{
    acts,
    cli::{
        history,
        show::{self, BAD, BOLD, BUSY, Cell, DIM, GOOD, PLAIN, WARN, count, style_of, took},
        status,
    },
    model::{Outcome, RunRecord},
    view::{JobView, RunView},
    words::{line, span},
};

/// The title of the column with a mark for each of the last runs.
const LAST_RUNS: &str = "LAST RUNS";
/// So many of them.
const MARKS: usize = 10;
/// The titles of the columns of the timeline, which its length and its times cover.
const NAME: &str = "JOB     ";
const TIMELINE: &str = "TIMELINE";
/// So many cells for one of these times.
const TIME: usize = 12;
/// In less than this, a note would say nothing.
const NOTE_LEAST: usize = 12;

const MARK: [(Outcome, char); 11] = [
    (Outcome::Running, '▶'),
    (Outcome::Succeeded, '✓'),
    (Outcome::Failed, '✗'),
    (Outcome::TimedOut, 'T'),
    (Outcome::LeaseLost, 'L'),
    (Outcome::Crashed, '!'),
    (Outcome::Unknown, '?'),
    (Outcome::Missed, 'M'),
    (Outcome::Cancelled, 'c'),
    (Outcome::Replaced, 'r'),
    (Outcome::Skipped, '-'),
];

const KEYS: [(&str, &str); 15] = [
    ("1 2 3, Tab", "jobs, timeline, instances"),
    ("Enter, Esc", "open the job; back"),
    ("Up Down, j k", "another job, run or instance"),
    ("PgUp PgDn", "ten more; of a job, its output"),
    ("/", "only jobs with this in the name"),
    ("+ -", "timeline: shorter, longer"),
    ("w", "why the run came about"),
    ("t", "run the job once now"),
    ("p r", "pause the job, end the pause"),
    ("s", "skip its next occurrences"),
    ("c", "end its active runs"),
    ("d u", "drain the instance; undrain it"),
    ("Ctrl-L", "draw all anew"),
    ("Ctrl-Z", "suspend; `fg` comes back"),
    ("q, Ctrl-C", "quit"),
];

pub(super) fn draw(state: &State, frame: &mut Frame) {
    let area = frame.area();
    let mut said = vec![];
    for (style, text) in verdict(state) {
        let wrapped = wrap(&text, area.width.into()).into_iter();
        said.extend(wrapped.map(|text| say(style, text)));
    }
    // All of it, as long as two thirds are left for the rest.
    let most = usize::from(area.height / 3).max(1);
    if said.len() > most {
        said.truncate(most);
        said[most - 1].push_span(" …");
    }
    let [top, above, body, below] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(said.len() as u16),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    header(state, frame, top);
    frame.render_widget(Paragraph::new(said), above);
    match state.screen {
        _ if state.help => help(frame, body),
        Screen::Jobs => jobs(state, frame, body),
        Screen::Timeline => timeline(state, frame, body),
        Screen::Instances => instances(state, frame, body),
        Screen::Job => job(state, frame, body),
    }
    footer(state, frame, below);
    question(state, frame);
    plain(state, frame.buffer_mut());
}

/// A style of the other commands.
fn look(style: anstyle::Style) -> Style {
    let mut look = Style::new();
    look.fg = style.get_fg_color().map(|colour| match colour {
        anstyle::Color::Ansi(AnsiColor::Green) => Color::Green,
        anstyle::Color::Ansi(AnsiColor::Red) => Color::Red,
        anstyle::Color::Ansi(AnsiColor::Yellow) => Color::Yellow,
        _ => Color::Cyan,
    });
    let effects = style.get_effects();
    look.add_modifier = match effects.contains(Effects::DIMMED) {
        true => Modifier::DIM,
        false if effects.contains(Effects::BOLD) => Modifier::BOLD,
        false => Modifier::empty(),
    };
    look
}

fn say<'t>(style: anstyle::Style, text: impl Into<Cow<'t, str>>) -> Line<'t> {
    Line::styled(text, look(style))
}

/// Takes away what this terminal does not show.
fn plain(state: &State, buffer: &mut Buffer) {
    for cell in &mut buffer.content {
        if !state.colours {
            (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
        }
        if !state.unicode && !cell.symbol().is_ascii() {
            cell.set_symbol(match cell.symbol() {
                "✓" | "┌" | "┐" | "└" | "┘" => "+",
                "✗" => "x",
                "▶" | "›" => ">",
                "↻" | "…" => "~",
                "‖" | "━" => "=",
                "○" => "o",
                "─" => "-",
                "│" => "|",
                _ => "?",
            });
        }
    }
}

fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// A text in lines of at most `most` columns, divided at spaces where there are any.
fn wrap(text: &str, most: usize) -> Vec<String> {
    let (mut lines, mut last, mut used) = (vec![], String::new(), 0);
    for c in text.replace('\t', "    ").chars() {
        used += width(c.encode_utf8(&mut [0; 4]));
        if used > most && !last.is_empty() {
            let at = last.rfind(' ').map_or(last.len(), |at| at + 1);
            let rest = last.split_off(at);
            used = width(&rest) + width(c.encode_utf8(&mut [0; 4]));
            lines.push(std::mem::replace(&mut last, rest));
        }
        last.push(c);
    }
    lines.push(last);
    lines
}

/// A text that is cut says so: a part of a word may be another word.
fn cut(text: &str, most: usize) -> String {
    let mut cut = String::new();
    for c in text.chars() {
        cut.push(c);
        if width(&cut) > most {
            cut.pop();
            cut.pop();
            return cut + "…";
        }
    }
    cut
}

fn header(state: &State, frame: &mut Frame, area: Rect) {
    let here = match state.screen {
        Screen::Job => state.before,
        screen => screen,
    };
    let names = widgets::Tabs::new(["1 jobs", "2 timeline", "3 instances"]).select(here as usize);
    let time = show::instant(state.now / 1000 * 1000);
    let place = format!("{}  {time}", line(&state.address));
    let fits = |text: &String| width(text) + 34 <= area.width.into();
    if let Some(text) = [place, time].into_iter().find(fits) {
        frame.render_widget(say(DIM, text).alignment(Alignment::Right), area);
    }
    let left = Rect {
        width: area.width.min(33),
        ..area
    };
    frame.render_widget(names.divider(""), left);
}

fn names<'a>(all: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = match all.len() {
        0..=3 => String::new(),
        n => format!(" and {} more", n - 3),
    };
    line(&all.take(3).collect::<Vec<_>>().join(", ")) + &more
}

/// How the fleet is: what is worst comes first.
fn verdict(state: &State) -> Vec<(anstyle::Style, String)> {
    let mut said = vec![];
    if let Some((why, since)) = &state.away {
        let since = span(state.now - since);
        let known = match state.status {
            Some(_) => format!("for {since}, this is what was known then"),
            None => format!("yet, for {since}, and it is asked again each second"),
        };
        let text = format!("no answer from the store {known}: {}", line(why));
        said.push((BAD, text));
    }
    let Some(s) = &state.status else {
        let text = format!("asking the store at {} ...", line(&state.address));
        said.extend(said.is_empty().then_some((DIM, text)));
        return said;
    };
    said.extend(status::warnings(s));
    let sick: Vec<&JobView> = s.jobs.iter().filter(|j| j.attention.is_some()).collect();
    if let [first, rest @ ..] = &sick[..] {
        let (needs, why) = match (rest, &first.attention) {
            ([], Some(why)) => ("needs", format!(": {why}")),
            _ => ("need", String::new()),
        };
        let all = names(sick.iter().map(|j| j.job.as_str()));
        let text = format!("{} {needs} attention: {all}{why}", count(sick.len(), "job"));
        said.push((BAD, text));
    }
    let silent: Vec<_> = s.instances.iter().filter(|i| i.silent).collect();
    if !silent.is_empty() {
        let all = names(silent.iter().map(|i| i.instance.as_str()));
        said.push((WARN, format!("not heard from: {all}")));
    }
    said.extend(status::below(s).map(|text| (WARN, text)));
    let running: usize = s.jobs.iter().map(|j| j.running.len()).sum();
    let all = format!(
        "{}, {running} running, {} paused; {}",
        count(s.jobs.len(), "job"),
        s.jobs.iter().filter(|j| j.paused.is_some()).count(),
        count(s.instances.len() - silent.len(), "live instance")
    );
    match said.is_empty() {
        true => said.push((GOOD, format!("all is well: {all}"))),
        false => said.push((PLAIN, all)),
    }
    said
}

/// The rows of a table, `at` selected. Columns for which there is no room are left out, and the last one is cut.
fn table(frame: &mut Frame, area: Rect, t: &show::Table, at: usize) {
    let columns = t.columns();
    let mut left = usize::from(area.width).saturating_sub(2);
    let mut shown = vec![];
    for (n, mut column) in columns.into_iter().enumerate() {
        if n == 0 {
            column.width = column.width.min((left / 3).max(8));
        } else if column.title == "NOTE" && left >= NOTE_LEAST {
            column.width = column.width.min(left);
        }
        if column.width <= left {
            left = left.saturating_sub(column.width + 1);
            shown.push(column);
        }
    }
    let rows = t.rows.iter().map(|row| {
        Row::new(shown.iter().map(|column| match row.get(column.cell) {
            Some(cell) if matches!(column.title, LAST_RUNS | TIMELINE) => {
                cell.text.chars().map(mark_span).collect()
            }
            Some(cell) => aligned(column, say(cell.style, cut(&cell.text, column.width))),
            None => Line::default(),
        }))
    });
    let head = shown
        .iter()
        .map(|column| aligned(column, say(DIM, column.title)));
    let widths = shown.iter().map(|column| column.width as u16);
    let table = widgets::Table::new(rows, widths)
        .header(Row::new(head))
        .row_highlight_style(Modifier::REVERSED)
        .highlight_symbol("› ")
        .highlight_spacing(HighlightSpacing::Always);
    let mut selected = TableState::new().with_selected(at);
    frame.render_stateful_widget(table, area, &mut selected);
}

fn aligned<'t>(column: &show::Column, text: Line<'t>) -> Line<'t> {
    match column.right {
        true => text.right_aligned(),
        false => text,
    }
}

fn mark(outcome: Outcome) -> char {
    let found = MARK.iter().find(|(of, _)| *of == outcome);
    found.map_or('?', |(_, mark)| *mark)
}

fn mark_span(mark: char) -> Span<'static> {
    let of = MARK.iter().find(|(_, of)| *of == mark);
    let style = of.map_or(DIM, |(outcome, _)| style_of(*outcome));
    Span::styled(mark.to_string(), look(style))
}

/// A mark and a word for how a job is.
fn condition(j: &JobView) -> Cell {
    let word = j.state.replace('_', " ");
    let outcome = j.state.parse::<Outcome>().ok();
    let (style, text) = match (j.running.len(), outcome) {
        _ if j.attention.is_some() => (BAD, format!("{} {word}", outcome.map_or('!', mark))),
        (1, _) => (BUSY, "▶ running".to_owned()),
        (2.., _) => (BUSY, format!("▶ {} running", j.running.len())),
        _ if !j.awaited.is_empty() => (WARN, "↻ retries".to_owned()),
        _ if j.triggers > j.triggers_over => (BUSY, "▶ triggered".to_owned()),
        _ if j.paused.is_some() => (WARN, "‖ paused".to_owned()),
        (_, Some(Outcome::Succeeded)) => (GOOD, "✓ ok".to_owned()),
        (_, Some(outcome)) => (style_of(outcome), format!("{} {word}", mark(outcome))),
        _ if matches!(j.state, "none" | "manual") => (DIM, "  not yet".to_owned()),
        _ => (DIM, format!("  {word}")),
    };
    Cell::new(style, text)
}

fn jobs(state: &State, frame: &mut Frame, area: Rect) {
    let Some(s) = &state.status else { return };
    let listed = state.listed();
    let head = [
        "JOB",
        "STATE",
        "NEXT",
        LAST_RUNS,
        ">TOOK",
        "RUNNING ON",
        "NOTE",
    ];
    let mut t = show::Table::new(&head);
    for j in &listed {
        let records = state.records.get(&j.job).map_or(&[][..], |r| r);
        let marks = records.iter().take(MARKS).map(|r| mark(r.outcome));
        let lasted = records.iter().find_map(|r| r.duration_ms);
        t.row([
            Cell::new(BOLD, j.job.as_str()),
            condition(j),
            status::next(j, s),
            marks.rev().collect::<String>().into(),
            lasted.map_or(String::new(), took).into(),
            Cell::new(BUSY, status::running(j, s)),
            Cell::new(WARN, status::job_note(j, s.epoch.open, state.now)),
        ]);
    }
    if listed.is_empty() {
        frame.render_widget(say(DIM, "no job has this in its name"), area);
    }
    table(frame, area, &t, state.at(&listed));
}

/// What ended, what runs and what is planned, with a third of the time after now.
fn timeline(state: &State, frame: &mut Frame, area: Rect) {
    let listed = state.listed();
    let at = state.at(&listed);
    // Only those that are seen: planned occurrences are found one by one.
    let rows = usize::from(area.height.saturating_sub(1));
    let most = listed.len().saturating_sub(rows);
    let first = at.saturating_sub(rows / 2).min(most);
    let shown: Vec<_> = listed.into_iter().skip(first).take(rows).collect();
    let left = usize::from(area.width).saturating_sub(2);
    let longest = shown.iter().map(|j| j.job.as_str().len()).max();
    let name = longest.unwrap_or(0).clamp(NAME.len(), (left / 3).max(8));
    let cells = left.saturating_sub(name + 1);
    if shown.is_empty() || cells < 8 {
        return jobs(state, frame, area);
    }
    let length = 600_000 * 6_i64.pow(state.zoom);
    let cell = length / cells as i64;
    // It moves by whole cells, so that what is drawn changes only then.
    let from = (state.now - length / 3 * 2).div_euclid(cell) * cell;
    let mut t = show::Table::new(&[NAME, TIMELINE]);
    for j in shown {
        t.row([
            Cell::new(BOLD, j.job.as_str()),
            marks(state, j, from, cell, cells).into(),
        ]);
    }
    table(frame, area, &t, at - first);
    let digits = if state.zoom < 3 { 11..16 } else { 5..16 };
    let time = |n: usize| {
        let at = show::instant(from + cell * n as i64);
        format!("{:TIME$}", &at[digits.clone()])
    };
    let times: String = (0..cells).step_by(TIME).map(time).collect();
    let head = say(DIM, format!("  {:name$} {times}", span(length)));
    frame.render_widget(head, area);
}

/// A line of the timeline: `cells` of `cell` ms each, the first at `from`.
fn marks(state: &State, j: &JobView, from: i64, cell: i64, cells: usize) -> String {
    let cell_of = |ms: i64| {
        let n = usize::try_from((ms - from).div_euclid(cell)).ok();
        n.filter(|n| *n < cells)
    };
    let mut marks = vec![' '; cells];
    cell_of(state.now).into_iter().for_each(|n| marks[n] = '│');
    let definition = state.definitions.get(&j.job).map(|job| &**job);
    let mut after = state.now;
    while let Some(next) = acts::planned(definition, after, 1).first().map(|o| o.0)
        && let Some(n) = cell_of(next)
    {
        let passed_over = j.next.is_none_or(|first| next < first.0);
        marks[n] = if passed_over { '-' } else { '○' };
        // The next one with a cell of its own.
        after = next.max(from + cell * (n as i64 + 1) - 1);
    }
    let ended = state.records.get(&j.job).into_iter().flatten().rev();
    let end = |r: &RunRecord| r.finished_at.unwrap_or(r.occurrence.0);
    let ended = ended.map(|r| (r.started_at, end(r), r.outcome));
    let running = j.running.iter();
    let running = running.map(|r| (r.started_at.map(|t| t.0), state.now, r.outcome));
    let mut runs: Vec<_> = ended.chain(running).collect();
    // What is newer, and what went wrong, is on top.
    runs.sort_by_key(|(_, _, outcome)| style_of(*outcome) == BAD);
    for (begin, end, outcome) in runs {
        let begin = begin.unwrap_or(end).max(from).min(end);
        if let (Some(begin), Some(end)) = (cell_of(begin), cell_of(end)) {
            marks[begin..end].fill('━');
            marks[end] = mark(outcome);
        }
    }
    marks.into_iter().collect()
}

fn instances(state: &State, frame: &mut Frame, area: Rect) {
    let Some(s) = &state.status else { return };
    let t = status::instances(s, state.now);
    table(frame, area, &t, state.instance);
}

fn job(state: &State, frame: &mut Frame, area: Rect) {
    let (Some(s), Some(j)) = (&state.status, state.job()) else {
        return;
    };
    let runs = state.runs();
    let run = runs.get(state.run_at(&runs));
    if let (Some(run), Some(_)) = (run, &state.why) {
        return text(state, run, frame, area);
    }
    let columns = usize::from(area.width);
    let is = condition(j);
    let schedule = match j.schedule.is_empty() {
        true => "only when triggered".to_owned(),
        false => format!("{} {}", j.schedule.join(" | "), j.timezone),
    };
    let about = j.description.as_deref().unwrap_or_default();
    let about = line(&format!("{schedule}  {about}"));
    let mut above = vec![Line::from(vec![
        Span::styled(line(j.job.as_str()), look(BOLD)),
        Span::styled(format!("  {}  ", is.text.trim()), look(is.style)),
        Span::styled(about, look(DIM)),
    ])];
    let note = status::job_note(j, s.epoch.open, state.now);
    if !note.is_empty() {
        let wrapped = wrap(&line(&note), columns).into_iter().take(2);
        above.extend(wrapped.map(|text| say(WARN, text)));
    }
    let definition = state.definitions.get(&j.job).map(|job| &**job);
    let after = j.next.map_or(i64::MAX, |next| next.0 - 1);
    let coming = acts::planned(definition, after, 5).into_iter();
    let coming: Vec<String> = coming.map(|o| show::instant(o.0)).collect();
    let next = format!("next: {}  {}", status::next(j, s).text, coming.join("  "));
    above.push(Line::raw(cut(next.trim_end(), columns)));
    let remarks = run.map(RunView::remarks).filter(|text| !text.is_empty());
    let remarks = remarks.map_or(vec![], |text| wrap(&line(&text), columns));
    let [title, list, said, output] = Layout::vertical([
        Constraint::Length(above.len() as u16),
        Constraint::Length((runs.len() + 1).min(usize::from(area.height / 2)) as u16),
        Constraint::Length(remarks.len().min(3) as u16),
        Constraint::Fill(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(above), title);
    let t = history::table(&runs, state.now, false, area.width >= 120);
    table(frame, list, &t, state.run_at(&runs));
    let style = run.map_or(PLAIN, |r| style_of(r.outcome));
    frame.render_widget(Paragraph::new(remarks.join("\n")).style(look(style)), said);
    if let Some(run) = run {
        text(state, run, frame, output);
    }
}

/// The output of a run, or why it came about.
fn text(state: &State, run: &RunView, frame: &mut Frame, area: Rect) {
    let o = &state.text;
    let empty = match run.outcome {
        _ if run.run_id.is_none() => "it did not run",
        _ if o.run != run.run_id => "...",
        Outcome::Running => "it has written nothing yet",
        _ => "it wrote nothing, or its output is no longer kept",
    };
    let mut title = format!("output of {}", show::instant(run.occurrence.0));
    if o.missing > 0 {
        title += &format!(", of which the last {} bytes are missing", o.missing);
    }
    let (title, text, back) = match &state.why {
        Some(why) => ("why; Esc shows the output".to_owned(), &**why, usize::MAX),
        None if o.run == run.run_id && !o.text.is_empty() => (title, &*o.text, state.back),
        None => (title, empty, 0),
    };
    let rows = text.lines().flat_map(|text| wrap(text, area.width.into()));
    let mut rows: Vec<Line> = rows.map(Line::raw).collect();
    let room = usize::from(area.height.saturating_sub(1));
    rows.truncate(rows.len().saturating_sub(back).max(room));
    let rows = rows.split_off(rows.len().saturating_sub(room));
    let block = Block::new().borders(widgets::Borders::TOP).title(title);
    frame.render_widget(Paragraph::new(rows).block(block), area);
}

/// All keys and marks.
fn help(frame: &mut Frame, area: Rect) {
    let keys = KEYS.map(|(key, what)| format!("{key:<13}{what}"));
    let marks = MARK.map(|(of, mark)| format!("{mark} {}", of.as_str().replace('_', " ")));
    let halves = [Constraint::Length(46), Constraint::Fill(1)];
    let [left, right] = Layout::horizontal(halves).areas(area);
    frame.render_widget(Paragraph::new(keys.join("\n")), left);
    frame.render_widget(Paragraph::new(marks.join("\n")), right);
}

fn footer(state: &State, frame: &mut Frame, area: Rect) {
    let acts = "t trigger  p pause  r resume  s skip  c cancel  q quit";
    let (style, text) = match (&state.said, state.screen) {
        (Some((text, good)), _) => (if *good { GOOD } else { BAD }, line(text)),
        _ if state.help => (DIM, "any key comes back  q quit".to_owned()),
        (_, Screen::Jobs | Screen::Timeline) if !state.filter.is_empty() => {
            (PLAIN, format!("/{}  Esc shows all", line(&state.filter)))
        }
        (_, Screen::Jobs) => (DIM, format!("? keys  / find  {acts}")),
        (_, Screen::Timeline) => (DIM, format!("? keys  + - zoom  / find  {acts}")),
        (_, Screen::Instances) => (DIM, "? keys  d drain  u undrain  q quit".to_owned()),
        (_, Screen::Job) => (DIM, format!("? keys  Esc back  w why  {acts}")),
    };
    frame.render_widget(say(style, cut(&text, area.width.into())), area);
}

fn question(state: &State, frame: &mut Frame) {
    let Some(q) = &state.question else { return };
    let columns = frame.area().width.min(64);
    let text = wrap(&q.text, usize::from(columns.saturating_sub(4)).max(1));
    let mut lines: Vec<Line> = text.into_iter().map(|text| say(BOLD, text)).collect();
    for (n, (name, value)) in q.fields.iter().enumerate() {
        let cursor = if n == q.field { "_" } else { "" };
        lines.push(Line::raw(format!("{name:<9} {}{cursor}", line(value))));
    }
    let keys = match q.fields.len() {
        0 => "y yes   n no",
        1 => "Enter does it   Esc does not",
        _ => "Enter does it  Tab next  Esc does not; until: 2h, or empty",
    };
    lines.push(say(DIM, keys));
    let place = frame.area().centered(
        Constraint::Length(columns),
        Constraint::Length(lines.len() as u16 + 2),
    );
    let block = Block::bordered().padding(Padding::horizontal(1));
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(lines).block(block), place);
}
