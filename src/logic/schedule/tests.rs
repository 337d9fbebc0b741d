//! Tables of what the language and the daylight-saving rules mean, and properties.

use jiff::tz::TimeZoneDatabase;
use proptest::prelude::*;

use super::*;

pub(super) fn zone(name: &str) -> TimeZone {
    TimeZoneDatabase::bundled().get(name).unwrap()
}

fn at(text: &str) -> Occurrence {
    Occurrence(text.parse::<Timestamp>().unwrap().as_millisecond())
}

fn schedule(text: &str, tz: &str) -> Schedule {
    with(text, tz, Dst::default())
}

fn with(text: &str, tz: &str, dst: Dst) -> Schedule {
    Schedule::parse(text, &zone(tz), dst, "job").unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn refused(text: &str) -> Error {
    match Schedule::parse(text, &zone("Europe/Berlin"), Dst::default(), "job") {
        Ok(_) => panic!("`{text}` was accepted"),
        Err(error) => error,
    }
}

/// All occurrences in (from, to], in local time.
fn local(schedule: &Schedule, from: &str, to: &str) -> Vec<String> {
    let (mut t, end) = (at(from), at(to));
    let mut found = Vec::new();
    while let Some(next) = schedule.next_after(t)
        && next <= end
    {
        found.push(schedule.local(next));
        t = next;
    }
    found
}

/// All occurrences of one local day, given by its date and the offset at its start and end.
fn day(text: &str, tz: &str, dst: Dst, date: &str, offsets: (&str, &str)) -> Vec<String> {
    let (from, to) = (
        format!("{date}T00:00:00{}", offsets.0),
        format!("{date}T23:59:59{}", offsets.1),
    );
    let before = Occurrence(at(&from).0 - 1);
    local(&with(text, tz, dst), &before.to_string(), &to)
        .into_iter()
        .map(|time| time.replace(&format!("{date}T"), ""))
        .collect()
}

/// A local day by its name, its zone, its date, and the offsets at its start and end.
type Day = (
    &'static str,
    &'static str,
    &'static str,
    (&'static str, &'static str),
);

#[rustfmt::skip]
const DAYS: [Day; 12] = [
    ("Berlin spring", "Europe/Berlin", "2026-03-29", ("+01:00", "+02:00")),
    ("Berlin autumn", "Europe/Berlin", "2026-10-25", ("+02:00", "+01:00")),
    ("New York spring", "America/New_York", "2026-03-08", ("-05:00", "-04:00")),
    ("New York autumn", "America/New_York", "2026-11-01", ("-04:00", "-05:00")),
    // Half an hour at 02:00.
    ("Lord Howe spring", "Australia/Lord_Howe", "2026-10-04", ("+10:30", "+11:00")),
    ("Lord Howe autumn", "Australia/Lord_Howe", "2026-04-05", ("+11:00", "+10:30")),
    // No midnight: the day begins at 01:00. (The window begins an hour before.)
    ("Beirut spring", "Asia/Beirut", "2026-03-29", ("+02:00", "+03:00")),
    ("Santiago spring", "America/Santiago", "2026-09-06", ("-04:00", "-03:00")),
    // 23:xx twice.
    ("Beirut autumn", "Asia/Beirut", "2026-10-24", ("+03:00", "+02:00")),
    ("Santiago autumn", "America/Santiago", "2026-04-04", ("-03:00", "-04:00")),
    // Two hours.
    ("Troll spring", "Antarctica/Troll", "2026-03-29", ("+00:00", "+02:00")),
    ("Troll autumn", "Antarctica/Troll", "2026-10-25", ("+02:00", "+00:00")),
];

fn gap(gap: Gap) -> Dst {
    Dst {
        gap: Some(gap),
        overlap: None,
    }
}

fn overlap(overlap: Fold) -> Dst {
    Dst {
        gap: None,
        overlap: Some(overlap),
    }
}

/// The lines of a table: one that is indented goes on with the one before, and `#` begins a comment.
fn lines(table: &str) -> Vec<String> {
    let joined = table.replace("\n    ", " ");
    let lines = joined
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(ToOwned::to_owned).collect()
}

fn columns<const N: usize>(line: &str) -> [&str; N] {
    let all: Vec<&str> = line.split('|').map(str::trim).collect();
    all.try_into().expect("all columns")
}

/// A day, a pattern, what `dst` says, and the occurrences of that day. A line that is indented goes on with the one
/// before.
const DAYLIGHT_SAVING: &str = "
Berlin spring | 30 2 * * * | | 03:00:00+02:00
Berlin spring | 30 1 * * * | | 01:30:00+01:00
Berlin spring | 0 3 * * * | | 03:00:00+02:00
Berlin spring | 0 0 * * * | | 00:00:00+01:00
Berlin spring | 0,30 2 * * * | | 03:00:00+02:00
Berlin spring | 30 2,3 * * * | | 03:00:00+02:00 03:30:00+02:00
Berlin spring | 10,20 1-3 * * * | | 01:10:00+01:00 01:20:00+01:00 03:00:00+02:00 03:10:00+02:00 03:20:00+02:00
Berlin spring | */15 1-3 * * * | | 01:00:00+01:00 01:15:00+01:00 01:30:00+01:00 01:45:00+01:00 03:00:00+02:00
    03:15:00+02:00 03:30:00+02:00 03:45:00+02:00
Berlin spring | */15 2 * * * | |
Berlin spring | 0 30 2 * * * | | 03:00:00+02:00
# a star in the seconds makes nobody follow the clock
Berlin spring | * 30 2 * * * | | 03:00:00+02:00
Berlin autumn | 30 2 * * * | | 02:30:00+02:00
Berlin autumn | 0 30 2 * * * | | 02:30:00+02:00
Berlin autumn | */30 30 2 * * * | | 02:30:00+02:00 02:30:30+02:00
Berlin autumn | 0 3 * * * | | 03:00:00+01:00
Berlin autumn | */15 2 * * * | | 02:00:00+02:00 02:15:00+02:00 02:30:00+02:00 02:45:00+02:00 02:00:00+01:00
    02:15:00+01:00 02:30:00+01:00 02:45:00+01:00
Berlin autumn | 30 */2 * * * | | 00:30:00+02:00 02:30:00+02:00 02:30:00+01:00 04:30:00+01:00 06:30:00+01:00
    08:30:00+01:00 10:30:00+01:00 12:30:00+01:00 14:30:00+01:00 16:30:00+01:00 18:30:00+01:00 20:30:00+01:00
    22:30:00+01:00
New York spring | 30 2 * * * | | 03:00:00-04:00
New York autumn | 30 1 * * * | | 01:30:00-04:00
New York autumn | */15 1 * * * | | 01:00:00-04:00 01:15:00-04:00 01:30:00-04:00 01:45:00-04:00 01:00:00-05:00
    01:15:00-05:00 01:30:00-05:00 01:45:00-05:00
Lord Howe spring | 15 2 * * * | | 02:30:00+11:00
Lord Howe spring | 30 2 * * * | | 02:30:00+11:00
Lord Howe spring | */15 2 * * * | | 02:30:00+11:00 02:45:00+11:00
Lord Howe autumn | 45 1 * * * | | 01:45:00+11:00
Lord Howe autumn | */15 1 * * * | | 01:00:00+11:00 01:15:00+11:00 01:30:00+11:00 01:45:00+11:00 01:30:00+10:30
    01:45:00+10:30
Beirut spring | 0 0 * * * | | 01:00:00+03:00
Beirut spring | 30 2 * * * | | 02:30:00+03:00
Beirut spring | 0 0,12 * * * | | 01:00:00+03:00 12:00:00+03:00
Santiago spring | 0 0 * * * | | 01:00:00-03:00
Santiago spring | 30 2 * * * | | 02:30:00-03:00
Santiago spring | 0 0,12 * * * | | 01:00:00-03:00 12:00:00-03:00
Beirut autumn | 30 23 * * * | | 23:30:00+03:00
Beirut autumn | */30 23 * * * | | 23:00:00+03:00 23:30:00+03:00 23:00:00+02:00 23:30:00+02:00
Santiago autumn | 30 23 * * * | | 23:30:00-03:00
Santiago autumn | */30 23 * * * | | 23:00:00-03:00 23:30:00-03:00 23:00:00-04:00 23:30:00-04:00
Troll spring | 30 1,2 * * * | | 03:00:00+02:00
Troll autumn | 30 1,2 * * * | | 01:30:00+02:00 02:30:00+02:00
Troll autumn | 30 */2 * * * | | 00:30:00+02:00 02:30:00+02:00 02:30:00+00:00 04:30:00+00:00 06:30:00+00:00
    08:30:00+00:00 10:30:00+00:00 12:30:00+00:00 14:30:00+00:00 16:30:00+00:00 18:30:00+00:00 20:30:00+00:00
    22:30:00+00:00
Berlin spring | 30 2 * * * | gap=skip |
Berlin spring | 30 2,3 * * * | gap=skip | 03:30:00+02:00
Berlin spring | */15 2 * * * | gap=shift | 03:00:00+02:00
Berlin autumn | 30 2 * * * | overlap=second | 02:30:00+01:00
Berlin autumn | 30 2 * * * | overlap=both | 02:30:00+02:00 02:30:00+01:00
Berlin autumn | */30 2 * * * | overlap=first | 02:00:00+02:00 02:30:00+02:00
Berlin autumn | */30 2 * * * | overlap=second | 02:00:00+01:00 02:30:00+01:00
Lord Howe autumn | 15,45 1 * * * | overlap=second | 01:15:00+11:00 01:45:00+10:30
Beirut autumn | 30 23 * * * | overlap=second | 23:30:00+02:00
";

#[test]
fn daylight_saving_follows_vixie_cron_unless_dst_says_otherwise() {
    for line in lines(DAYLIGHT_SAVING) {
        let [name, text, says, expected] = columns(&line);
        let (_, tz, date, offsets) = DAYS.iter().find(|day| day.0 == name).expect("a day");
        let dst = match says.split_once('=') {
            None => Dst::default(),
            Some(("gap", "skip")) => gap(Gap::Skip),
            Some(("gap", _)) => gap(Gap::Shift),
            Some((_, "first")) => overlap(Fold::First),
            Some((_, "second")) => overlap(Fold::Second),
            Some(_) => overlap(Fold::Both),
        };
        assert_eq!(
            day(text, tz, dst, date, *offsets).join(" "),
            expected,
            "{line}"
        );
    }
}

#[test]
fn a_jump_of_three_hours_or_more_is_a_correction_and_loses_times() {
    // Samoa had no 30 December 2011.
    let daily = with("30 12 * * *", "Pacific/Apia", gap(Gap::Shift));
    assert_eq!(
        local(
            &daily,
            "2011-12-29T12:00:00-10:00",
            "2011-12-31T23:00:00+14:00"
        ),
        ["2011-12-29T12:30:00-10:00", "2011-12-31T12:30:00+14:00"]
    );
    // Three hours forward are one already; three hours back are not yet.
    let casey = schedule("30 22 * * *", "Antarctica/Casey");
    assert_eq!(
        local(
            &casey,
            "2021-03-12T22:00:00+11:00",
            "2021-03-14T22:00:00+08:00"
        ),
        ["2021-03-12T22:30:00+11:00", "2021-03-13T22:30:00+11:00"]
    );
    let casey = schedule("30 1 * * *", "Antarctica/Casey");
    assert_eq!(
        local(
            &casey,
            "2020-10-03T00:00:00+08:00",
            "2020-10-05T22:00:00+11:00"
        ),
        ["2020-10-03T01:30:00+08:00", "2020-10-05T01:30:00+11:00"]
    );
}

/// A pattern, an instant, and the occurrences that follow it.
const CALENDARS: &str = "
0 0 29 2 * | 2096-03-01T00:00:00Z | 2104-02-29T00:00:00 2108-02-29T00:00:00
# a star joins the day fields by `and`: 29 February on a Sunday
0 0 29 2 */7 | 2026-01-01T00:00:00Z | 2032-02-29T00:00:00 2060-02-29T00:00:00
59 23 31 12 * | 2026-12-31T23:58:00Z | 2026-12-31T23:59:00 2027-12-31T23:59:00
* * * * * | 2026-12-31T23:58:30Z | 2026-12-31T23:59:00 2027-01-01T00:00:00
* * * * * * | 2026-12-31T23:59:58.5Z | 2026-12-31T23:59:59 2027-01-01T00:00:00
*/20 5 0 * * * | 2026-05-05T00:05:19Z | 2026-05-05T00:05:20 2026-05-05T00:05:40 2026-05-06T00:05:00
0 0 L * * | 2028-01-31T00:00:00Z | 2028-02-29T00:00:00 2028-03-31T00:00:00
0 0 LW * * | 2026-01-31T00:00:00Z | 2026-02-27T00:00:00 2026-03-31T00:00:00
# 1 August 2026 is a Saturday, 15 August too, 31 May a Sunday
0 0 1W 8 * | 2026-01-01T00:00:00Z | 2026-08-03T00:00:00
0 0 15W 8 * | 2026-01-01T00:00:00Z | 2026-08-14T00:00:00
0 0 31W 5 ? | 2026-01-01T00:00:00Z | 2026-05-29T00:00:00
0 0 ? * 5#2 | 2026-11-01T00:00:00Z | 2026-11-13T00:00:00 2026-12-11T00:00:00
0 0 * * FRIL | 2026-11-01T00:00:00Z | 2026-11-27T00:00:00 2026-12-25T00:00:00
0 0 * * mon#5 | 2026-11-01T00:00:00Z | 2026-11-30T00:00:00 2027-03-29T00:00:00
0 0 * * 0 | 2026-11-01T00:00:00Z | 2026-11-08T00:00:00
0 0 * * 7 | 2026-11-01T00:00:00Z | 2026-11-08T00:00:00
0 0 * * FRI-SUN | 2026-11-05T00:00:00Z | 2026-11-06T00:00:00 2026-11-07T00:00:00 2026-11-08T00:00:00
    2026-11-13T00:00:00
# once around the week is one day
0 0 * * SUN-SUN | 2026-11-01T00:00:00Z | 2026-11-08T00:00:00
0 0 * * 0,7 | 2026-11-01T00:00:00Z | 2026-11-08T00:00:00 2026-11-15T00:00:00
# both day fields: either
0 0 13 * fri | 2026-11-05T00:00:00Z | 2026-11-06T00:00:00 2026-11-13T00:00:00 2026-11-20T00:00:00
0 0 1-7 * */7 | 2026-11-02T00:00:00Z | 2026-12-06T00:00:00
15,45 8-10/2 * JAN,jul * | 2026-07-31T08:15:00Z | 2026-07-31T08:45:00 2026-07-31T10:15:00
    2026-07-31T10:45:00 2027-01-01T08:15:00
@hourly | 2026-11-05T00:00:00Z | 2026-11-05T01:00:00
@daily | 2026-11-05T00:00:00Z | 2026-11-06T00:00:00
@midnight | 2026-11-05T00:00:00Z | 2026-11-06T00:00:00
@weekly | 2026-11-05T00:00:00Z | 2026-11-08T00:00:00
@monthly | 2026-11-05T00:00:00Z | 2026-12-01T00:00:00
@yearly | 2026-11-05T00:00:00Z | 2027-01-01T00:00:00
@Annually | 2026-11-05T00:00:00Z | 2027-01-01T00:00:00
# counted from the epoch, whatever the start
@every 90s | 2026-01-01T00:00:01Z | 2026-01-01T00:01:30 2026-01-01T00:03:00
@every 1h30m | 1970-01-01T00:00:00Z | 1970-01-01T01:30:00 1970-01-01T03:00:00
@every 1500ms | 1969-12-31T23:59:58.500Z | 1970-01-01T00:00:00 1970-01-01T00:00:01.5
@at 2026-12-24T18:00:00+01:00 | 2026-01-01T00:00:00Z | 2026-12-24T17:00:00
@at 2026-12-24T18:00:00Z | 2026-01-01T00:00:00Z | 2026-12-24T18:00:00
@at 2026-12-24T18:00:00 | 2026-01-01T00:00:00Z | 2026-12-24T18:00:00
@at 2026-12-24 18:00 | 2026-01-01T00:00:00Z | 2026-12-24T18:00:00
@at 2026-12-24T18:00:00.5 | 2026-01-01T00:00:00Z | 2026-12-24T18:00:00.5
";

#[test]
fn calendars() {
    for line in lines(CALENDARS) {
        let [text, from, expected] = columns(&line);
        let schedule = schedule(text, "UTC");
        let mut t = at(from);
        for expected in expected.split(' ') {
            t = schedule.next_after(t).unwrap();
            assert_eq!(schedule.local(t), format!("{expected}+00:00"), "{line}");
        }
        if text.starts_with("@at") {
            assert_eq!(schedule.next_after(t), None, "{line}");
        }
    }
}

/// In 28 years each month begins and ends on each day of the week.
#[test]
fn days_of_a_month_are_those_that_the_words_name() {
    use jiff::civil::{Date, Weekday, date};

    let working = |d: &Date| !matches!(d.weekday(), Weekday::Saturday | Weekday::Sunday);
    let near = |days: &[Date], n: usize| {
        let wanted = days.get(n - 1)?;
        let working = days.iter().copied().filter(working);
        working.min_by_key(|d| d.day().abs_diff(wanted.day()))
    };
    let on = |days: &[Date], weekday| {
        let days = days.iter().copied().filter(|d| d.weekday() == weekday);
        days.collect::<Vec<_>>()
    };
    type Named<'a> = Box<dyn Fn(&[Date]) -> Option<Date> + 'a>;
    let mut cases: Vec<(String, Named)> = vec![
        ("0 0 L * ?".into(), Box::new(|days| days.last().copied())),
        (
            "0 0 LW * ?".into(),
            Box::new(|days| days.iter().copied().rfind(working)),
        ),
        (
            "0 0 ? * SUNL".into(),
            Box::new(|days| on(days, Weekday::Sunday).last().copied()),
        ),
        (
            "0 0 ? * SAT#5".into(),
            Box::new(|days| on(days, Weekday::Saturday).get(4).copied()),
        ),
    ];
    for n in 1..=31 {
        cases.push((format!("0 0 {n}W * ?"), Box::new(move |days| near(days, n))));
    }
    for (text, named) in cases {
        let schedule = schedule(&text, "UTC");
        let mut t = at("2000-12-31T23:59:59Z");
        for month in (0..28 * 12).map(|n| (2001 + n / 12, (n % 12 + 1) as i8)) {
            let first = date(month.0, month.1, 1);
            let days: Vec<_> = (1..=first.days_in_month())
                .map(|day| date(month.0, month.1, day))
                .collect();
            let Some(day) = named(&days) else { continue };
            t = schedule.next_after(t).unwrap();
            assert_eq!(schedule.local(t)[..10], day.to_string(), "`{text}`");
        }
    }
}

#[test]
fn an_instant_in_local_time_is_a_fixed_time() {
    let cases: &[(&str, Dst, &[&str])] = &[
        (
            "@at 2026-07-01T18:00:00",
            Dst::default(),
            &["2026-07-01T18:00:00+02:00"],
        ),
        (
            "@at 2026-03-29T02:30:00",
            Dst::default(),
            &["2026-03-29T03:00:00+02:00"],
        ),
        (
            "@at 2026-10-25T02:30:00",
            Dst::default(),
            &["2026-10-25T02:30:00+02:00"],
        ),
        (
            "@at 2026-10-25T02:30:00",
            overlap(Fold::Second),
            &["2026-10-25T02:30:00+01:00"],
        ),
        (
            "@at 2026-10-25T02:30:00",
            overlap(Fold::Both),
            &["2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"],
        ),
    ];
    for (text, dst, expected) in cases {
        let schedule = with(text, "Europe/Berlin", *dst);
        assert_eq!(
            local(&schedule, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
            *expected,
            "{text} {dst:?}"
        );
    }
    let skip = gap(Gap::Skip);
    let error = Schedule::parse(
        "@at 2026-03-29T02:30:00",
        &zone("Europe/Berlin"),
        skip,
        "job",
    )
    .unwrap_err();
    assert!(error.message.contains("does not exist"), "{error}");
    assert_eq!(error.span, Some(4..23));
}

/// These values must never change: instances of different versions would run a job at different times.
#[test]
fn h_is_the_same_for_ever() {
    let next = |text: &str, job: &str| {
        let schedule = Schedule::parse(text, &zone("UTC"), Dst::default(), job).unwrap();
        assert!(schedule.uses_job_name());
        schedule.local(schedule.next_after(at("2026-01-01T00:00:00Z")).unwrap())[..19].to_owned()
    };
    let cases: &[(&str, &str, &str)] = &[
        ("H H * * *", "backup", "2026-01-01T13:49:00"),
        ("H H * * *", "report", "2026-01-01T00:46:00"),
        ("H H H * * *", "backup", "2026-01-01T13:49:56"),
        ("H H H H *", "backup", "2026-12-05T13:49:00"),
        ("0 0 * * H", "backup", "2026-01-07T00:00:00"),
        ("H/15 * * * *", "backup", "2026-01-01T00:04:00"),
        ("h(0-29) * * * *", "backup", "2026-01-01T00:19:00"),
        ("H(30-59)/10 * * * *", "backup", "2026-01-01T00:39:00"),
    ];
    let got: Vec<_> = cases
        .iter()
        .map(|(text, job, _)| (*text, *job, next(text, job)))
        .collect();
    let expected: Vec<_> = cases
        .iter()
        .map(|(text, job, time)| (*text, *job, (*time).to_owned()))
        .collect();
    assert_eq!(got, expected);
}

#[test]
fn h_stays_in_its_range_and_spreads() {
    let mut minutes = std::collections::BTreeSet::new();
    let mut same = 0;
    for i in 0..500 {
        let job = format!("job-{i}");
        let fields = |text: &str| match parse::parse(text, &job).unwrap() {
            Parsed::Cron { calendar, .. } => calendar,
            other => panic!("{other:?}"),
        };
        let all = fields("H H H H H H");
        assert!(all.seconds.count_ones() == 1 && all.minutes.count_ones() == 1);
        assert!((1..=28).contains(&all.days.plain.trailing_zeros()));
        assert!(all.weekdays.plain < 0x80 && all.weekdays.plain.count_ones() == 1);
        minutes.insert(all.minutes.trailing_zeros());
        same += u32::from(all.minutes == all.seconds);
        let part = fields("H(10-19),H(30-39) H(0-6)/2 H/7 * *");
        assert_eq!((part.minutes & 0x3ff << 10).count_ones(), 1);
        assert_eq!((part.minutes & 0x3ff << 30).count_ones(), 1);
        assert_eq!(part.minutes.count_ones(), 2);
        assert!(part.hours == 0b101_0101 || part.hours == 0b10_1010);
        assert_eq!(part.days.plain.count_ones(), 4);
        assert!(part.days.plain < 1 << 29);
    }
    assert_eq!(minutes.len(), 60);
    assert!(
        same < 30,
        "minute and second are the same for {same} of 500 jobs"
    );
    assert!(!schedule("@daily", "UTC").uses_job_name());
    assert!(!schedule("0 0 * * THU", "UTC").uses_job_name());
}

/// As people write them in crontabs and configurations, with the next five occurrences of each by another program.
#[test]
fn real_schedules_have_the_occurrences_that_another_program_found() {
    let all = include_str!("../../../tests/schedules.tsv");
    let mut count = 0;
    for line in all.lines().filter(|line| !line.starts_with("# ")) {
        let (text, times) = line
            .rsplit_once('\t')
            .expect("a schedule and its occurrences");
        let wanted: Vec<&str> = times.split(' ').collect();
        assert_eq!(wanted.len(), 5, "{line}");
        let schedule = schedule(text, "UTC");
        let mut t = at("2028-02-26T00:00:00Z");
        for wanted in wanted {
            t = schedule
                .next_after(t)
                .unwrap_or_else(|| panic!("{text}: none after {t}"));
            assert_eq!(t, at(&format!("{wanted}Z")), "{text}");
        }
        count += 1;
    }
    assert_eq!(count, 282);
}

/// A text, the part that the refusal points at, what its message contains, and its hint.
const REFUSALS: &str = "
61 * * * * | 61 | minute 61 is outside 0-59
0 24 * * * | 24 | hour 24 is outside 0-23
0 0 0 * * | 0 | day of month 0 is outside 1-31
0 0 * 13 * | 13 | month 13 is outside 1-12
0 0 * * 8 | 8 | day of week 8 is outside 0-7
60 0 0 * * * | 60 | second 60 is outside 0-59
0 1,99999999999 * * * | 99999999999 | outside 0-23
0 0 * JUNE * | JUNE | not a month | did you mean `JUN`
0 0 * jam * | jam | not a month | did you mean `JAN`
0 0 * * tues | tues | not a day of week | did you mean `TUE`
0 0 * MON * | MON | not a month | month is 1-12
0 0 5JAN * * | 5JAN | not a day of month
5/15 * * * * | 5/15 | needs a range | `5-59/15`
*/0 * * * * | 0 | from 1 to 60
*/ * * * * |  | from 1 to 60
*/+5 * * * * | +5 | from 1 to 60
/5 * * * * |  | missing
30-10 * * * * | 30-10 | backwards | `30-59,0-10`
1- * * * * |  | missing
-1 * * * * |  | missing
1,,2 * * * * | 1,,2 | beside a comma
1, * * * * | 1, * | no blanks | write `1,*`
0 22, 10 * * * | 22, 10 | no blanks | write `22,10`
0 22 ,10 * * * | 22 ,10 | no blanks | write `22,10`
* * * * 1, | 1, | a day of week is missing beside a comma
0 5, * * * * | 5, * | no blanks
0 , * * * | 0 , | no blanks
0 1,,2 * * * | 1,,2 | an hour is missing
0 0 L-3 * * | L-3 | a day before the last one, is not supported | `25-28`
TZ=Asia/Tokyo 0 9 * * * | TZ=Asia/Tokyo | no time zone | `timezone = \"Asia/Tokyo\"`
CRON_TZ=UTC 0 9 * * * | CRON_TZ=UTC | no time zone
? * * * * | ? | not a minute | minute is 0-59
0 0 ?,1 * * | ? | stands alone
0 0 * * L | L | needs a day of week | 5L
0 0 * * 5#6 | 6 | outside #1-#5 | 5#2
0 0 32W * * | 32 | outside 1-31
0 L * * * | L | not an hour
H(5) * * * * | H(5) | not understood | H(0-29)
H[0-29) * * * * | H[0-29) | not understood | H(0-29)
H(0-70) * * * * | 70 | outside 0-59
0 0 31 2 * | 31 2 * | never happens | February
0 0 31 2 * | 31 2 * | never happens | leave `schedule` out; `enabled = false`
0 0 31 4,6,9,11 * | 31 4,6,9,11 * | never happens
* * * | * * * | found 3 fields | 0 12 * * *
0 0 12 * * * 2027 | 2027 | year | @at
0 0 12 * * ? * | * | year | leave it out
1 2 3 4 5 6 7 8 | 1 2 3 4 5 6 7 8 | found 8 fields
@dayly | @dayly | unknown nickname | did you mean `@daily`
@nonsense | @nonsense | unknown nickname | @every DURATION
@daily 5 | 5 | nothing may follow
@reboot | @reboot | not supported | soloist trigger
@every | @every | needs a duration | 90s
@every soon | soon | not a duration | 1h30m
@every 500ms | 500ms | at least one second
@every -5m | -5m | not a duration | 1h30m
@every 0s | 0s | at least one second
@every 1500us 1s | 1500us 1s | not a duration
@at | @at | needs a date
@at 9999-12-31T00:00:00+01:00 | 9999-12-31T00:00:00+01:00 | outside of the calendar
@at 9999-12-31T00:00:00 | 9999-12-31T00:00:00 | `9999-12-31T00:00:00` is outside of the calendar
@at 9999-12-32T00:00:00Z | 9999-12-32T00:00:00Z | that exists
@at tomorrow | tomorrow | not a date | 2026-12-24T18:00:00+01:00
@at 2026-12-24 | 2026-12-24 | needs a time | `@at 2026-12-24T18:00:00`
@at 2026-02-29T00:00:00 | 2026-02-29T00:00:00 | not a date
@at 2026-12-24T18:00:00+99:00 | 2026-12-24T18:00:00+99:00 | not a date
@at 2026-12-24T18:00:00+01:00[Europe/Paris] | 2026-12-24T18:00:00+01:00[Europe/Paris] | brackets | timezone
@at 2026-12-24T18:00:00.0005Z | 2026-12-24T18:00:00.0005Z | milliseconds
@at 2026-12-24T18:00:00.0005 | 2026-12-24T18:00:00.0005 | milliseconds
";

#[test]
fn refusals_point_at_the_fault_and_say_what_is_allowed() {
    let others = [
        ("", "", "empty", "@daily"),
        ("   ", "   ", "empty", "five fields"),
        (" 5", "5", "found 1 field,", ""),
        (
            "@at 9999-12-31T00:00:00Z",
            "9999-12-31T00:00:00Z",
            "`9999-12-31T00:00:00Z` is outside of the calendar, which ends at 9999-12-30T22:00:00Z",
            "leave `schedule` out",
        ),
    ];
    let table = REFUSALS.trim().lines().map(|line| {
        let mut columns = line.split(" | ");
        let mut column = || columns.next().unwrap_or_default();
        (column(), column(), column(), column())
    });
    for (text, part, message, hint) in others.into_iter().chain(table) {
        let error = refused(text);
        assert!(error.message.contains(message), "`{text}`: {error:?}");
        assert_eq!(
            &text[error.span.clone().unwrap()],
            part,
            "`{text}`: {error:?}"
        );
        let said = error.hint.as_deref().unwrap_or_default();
        assert!(said.contains(hint), "`{text}`: {error:?}");
    }
    // A word that resembles no known one gets no "did you mean".
    for text in ["@nonsense", "0 0 * QQQQ *"] {
        let hint = refused(text).hint.unwrap();
        assert!(!hint.contains("did you mean"), "`{text}`: {hint}");
    }
    // The same word twice: the faulty one is meant.
    assert_eq!(refused("0 0 0 * *").span, Some(4..5));
    assert_eq!(refused("  10 1-99 * * *").span, Some(7..9));
}

#[test]
fn of_several_schedules_the_earliest_counts_and_equal_instants_are_one() {
    let both = [
        Arc::new(schedule("0 */2 * * *", "UTC")),
        Arc::new(schedule("0 */3 * * *", "UTC")),
    ];
    let mut t = at("2026-01-01T00:00:00Z");
    let mut hours = Vec::new();
    for _ in 0..6 {
        t = next_of(&both, t).unwrap();
        hours.push(t.timestamp().to_zoned(TimeZone::UTC).hour());
    }
    assert_eq!(hours, [2, 3, 4, 6, 8, 9]);
    assert_eq!(next_of(&[], t), None);
    assert_eq!(
        next_of(&[Arc::new(schedule("@at 2020-01-01T00:00:00Z", "UTC"))], t),
        None
    );
}

#[test]
fn the_end_of_time_is_an_end() {
    let last = at("9999-12-30T00:00:00Z");
    for text in [
        "* * * * *",
        "@every 1s",
        "@yearly",
        "0 0 29 2 *",
        "* * * * * *",
    ] {
        let schedule = schedule(text, "America/New_York");
        let mut t = last;
        for _ in 0..5 {
            match schedule.next_after(t) {
                Some(next) => assert!(next > t),
                None => break,
            }
            t = Occurrence(t.0 + DAY * 1000);
        }
        assert_eq!(schedule.next_after(Occurrence(i64::MAX)), None, "{text}");
        schedule.next_after(Occurrence(i64::MIN));
    }
    // Instants end at 22:00 UTC of the last day but one, where some clocks show more.
    let schedule = schedule("30 22 * * *", "Etc/GMT-2");
    let last = at("9999-12-30T20:30:00Z");
    for before in [1, 1000, 1800 * 1000, 3600 * 1000, DAY * 1000] {
        let next = schedule.next_after(Occurrence(last.0 - before));
        assert_eq!(next, Some(last), "{before} ms before");
    }
    assert_eq!(schedule.next_after(last), None);
    // A pattern that this zone's rules never let happen ends too, instead of searching for ever.
    let skip = gap(Gap::Skip);
    let never = with("30 2 * 3 */7", "Europe/Berlin", skip);
    assert!(never.next_after(at("2026-01-01T00:00:00Z")).is_some());
    let never = with("30 2 25-31 3 */7", "Europe/Berlin", skip);
    assert_eq!(never.next_after(at("2026-01-01T00:00:00Z")), None);
}

/// Zones with every kind of jump, and one without.
const ZONES: [&str; 8] = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Beirut",
    "Antarctica/Troll",
    "Africa/Casablanca",
    "Pacific/Apia",
];

fn any_schedule() -> impl Strategy<Value = (String, Schedule)> {
    let second = prop_oneof![
        Just("".to_owned()),
        Just("*/20 ".to_owned()),
        (0..60u32).prop_map(|n| format!("{n} "))
    ];
    let minute = prop_oneof![
        Just("*/7".to_owned()),
        (0..60u32).prop_map(|n| n.to_string()),
        Just("0,30".to_owned()),
        Just("H/10".to_owned())
    ];
    let hour = prop_oneof![
        Just("*".to_owned()),
        (0..24u32).prop_map(|n| n.to_string()),
        Just("1-3".to_owned()),
        Just("*/2".to_owned())
    ];
    let day = prop_oneof![4 => Just("*".to_owned()), 1 => (1..29u32).prop_map(|n| n.to_string()), 1 => Just("L".to_owned())];
    let weekday = prop_oneof![4 => Just("*".to_owned()), 1 => Just("SUN".to_owned()), 1 => Just("1#2".to_owned())];
    let cron = (second, minute, hour, day, weekday)
        .prop_map(|(s, m, h, d, w)| format!("{s}{m} {h} {d} * {w}"));
    let every = (1000i64..10_000_000).prop_map(|ms| format!("@every {ms}ms"));
    let gap = prop_oneof![Just(None), Just(Some(Gap::Shift)), Just(Some(Gap::Skip))];
    let overlap = prop_oneof![
        Just(None),
        Just(Some(Fold::First)),
        Just(Some(Fold::Second)),
        Just(Some(Fold::Both))
    ];
    (
        prop_oneof![6 => cron, 1 => every],
        proptest::sample::select(&ZONES[..]),
        gap,
        overlap,
    )
        .prop_map(|(text, tz, gap, overlap)| {
            let schedule = with(&text, tz, Dst { gap, overlap });
            (format!("{text} {tz} {gap:?} {overlap:?}"), schedule)
        })
}

/// Instants near jumps, and any others from 1990 to 2036.
fn any_instant() -> impl Strategy<Value = i64> {
    let jumps: Vec<i64> = ZONES
        .iter()
        .flat_map(|name| {
            let zone = zone(name);
            zone.following(Timestamp::from_second(631_152_000).unwrap())
                .map(|jump| jump.timestamp().as_millisecond())
                .take_while(|ms| *ms < 2_082_758_400_000)
                .collect::<Vec<_>>()
        })
        .collect();
    prop_oneof![
        631_152_000_000..2_082_758_400_000i64,
        (proptest::sample::select(jumps), -20_000_000..20_000_000i64)
            .prop_map(|(jump, by)| jump + by),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn walking_equals_starting_anywhere((name, schedule) in any_schedule(), start in any_instant(), part in 0.0..1.0f64) {
        let mut t = Occurrence(start);
        for _ in 0..6 {
            let next = schedule.next_after(t).unwrap();
            prop_assert!(next > t, "{name}");
            // From any instant before it, and just before it, it is the next one.
            let between = Occurrence(t.0 + ((next.0 - t.0 - 1) as f64 * part) as i64);
            prop_assert_eq!(schedule.next_after(between), Some(next), "{} from {}", &name, between);
            prop_assert_eq!(schedule.next_after(Occurrence(next.0 - 1)), Some(next), "{}", &name);
            t = next;
        }
    }

    /// Nothing that a user can write panics, and every refusal points into the text.
    #[test]
    fn any_text_is_answered(text in "(@[a-z]{2,6} )?([0-9*/,#?LWH()-]{1,5}|[A-Za-z]{3}|[^ ]{1,3}|[0-9T:+Z.-]{8,25})( [0-9*/,#?LWHhé()-]{1,4}| [A-Z]{3}| \\*| 1){0,6}") {
        match Schedule::parse(&text, &TimeZone::UTC, Dst::default(), "job") {
            Ok(schedule) => { schedule.next_after(Occurrence(0)); }
            Err(error) => prop_assert!(error.span.is_some_and(|span| text.get(span).is_some())),
        }
    }
}
