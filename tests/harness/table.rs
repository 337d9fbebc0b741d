//! What the harness prints: a line per minute, findings, and the table at the end.

use std::{collections::BTreeSet, fmt::Write as _, time::Duration};

use super::{
    Options,
    effect::Effect,
    judge::{Kind, MS, Verdict},
    stage::Stage,
};

/// What was printed already.
pub struct Printed {
    quiet: bool,
    minutes: u64,
    findings: BTreeSet<(Kind, String, i64, String)>,
    pub first_broken: Option<Duration>,
}

impl Printed {
    pub fn new(options: &Options) -> Self {
        Self {
            quiet: options.quiet,
            minutes: 0,
            findings: BTreeSet::new(),
            first_broken: None,
        }
    }

    fn line(&self, text: &str) {
        if !self.quiet {
            println!("{text}");
        }
    }

    /// New findings, to the log; broken promises also to stdout.
    pub fn found(&mut self, stage: &mut Stage, verdict: &Verdict) {
        for finding in &verdict.findings {
            let name = (
                finding.kind,
                finding.job.clone(),
                finding.at_ns / (10 * MS),
                String::new(),
            );
            if !self.findings.insert(name) {
                continue;
            }
            let lately = stage.lately(finding.at_ns);
            stage.say(&format!("FOUND {finding}; struck: {lately}"));
            if finding.excused.is_none() {
                let at = stage.elapsed();
                self.first_broken.get_or_insert(at);
                self.line(&format!("{:8.1} s  BROKEN  {finding}", at.as_secs_f64()));
            }
        }
    }

    pub fn minute(&mut self, stage: &mut Stage) {
        let minutes = stage.elapsed().as_secs() / 60;
        if minutes == self.minutes {
            return;
        }
        self.minutes = minutes;
        let verdict = stage.judge(false);
        self.found(stage, &verdict);
        self.line(&format!(
            "minute {minutes}: {} faults, {} starts, {} occurrences judged, {} broken promises, {} not promised",
            stage.faults.values().sum::<usize>(),
            stage.runs(),
            verdict.judged,
            verdict.broken().count(),
            verdict.findings.len() - verdict.broken().count(),
        ));
    }
}

pub fn table(stage: &Stage, verdict: &Verdict) -> String {
    let mut out = String::new();
    let mut row = |name: &str, count: String, excused: &str| {
        writeln!(out, "{name:<30} {count:>9} {excused:>13}").expect("a string");
    };
    row("", "count".into(), "not promised");
    row("seconds", stage.elapsed().as_secs().to_string(), "");
    let faults: usize = stage.faults.values().sum();
    row("faults", faults.to_string(), "");
    row("starts", stage.runs().to_string(), "");
    row("occurrences judged", verdict.judged.to_string(), "");
    for kind in Kind::ALL {
        let excused = verdict.excused(kind).to_string();
        row(kind.name(), verdict.count(kind).to_string(), &excused);
    }
    let silence = verdict.longest_silence_ns / MS;
    row("longest silence (ms)", silence.to_string(), "");
    let stalls = stage
        .struck
        .iter()
        .filter(|s| s.effect == Effect::HostStalled);
    row("this host stood still", stalls.count().to_string(), "");
    row("", String::new(), "");
    for (name, count) in &stage.faults {
        row(&format!("  {name}"), count.to_string(), "");
    }
    out
}
