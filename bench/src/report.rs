//! What a row says, in a table for people and as a line of JSON.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use serde::Serialize;

/// A figure, and how it varied.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub row: &'static str,
    pub value: f64,
    pub worst: f64,
    pub best: f64,
    pub unit: &'static str,
    /// Whether less is better.
    pub less: bool,
    pub must: Must,
}

/// What a row must reach on two cores.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Must {
    Nothing,
    /// At least this, or, where less is better, at most this.
    Reach(f64),
    /// So many times as good as this limit, another row of the same run.
    Of(&'static str, f64),
}

impl Figure {
    /// Of what was measured several times: `values` are in the row's unit.
    pub(crate) fn of(row: &'static str, unit: &'static str, less: bool, mut values: Vec<f64>, must: Must) -> Figure {
        values.sort_by(f64::total_cmp);
        let (first, last) = (values[0], values[values.len() - 1]);
        let (worst, best) = if less { (last, first) } else { (first, last) };
        Figure { row, value: values[values.len() / 2], worst, best, unit, less, must }
    }

    pub(crate) fn rate(row: &'static str, count: u64, seconds: &[f64], must: Must) -> Figure {
        Self::of(row, "/s", false, seconds.iter().map(|seconds| count as f64 / seconds).collect(), must)
    }

    pub(crate) fn bandwidth(row: &'static str, bytes: u64, seconds: &[f64], must: Must) -> Figure {
        Self::of(row, "GB/s", false, seconds.iter().map(|seconds| bytes as f64 / 1e9 / seconds).collect(), must)
    }

    /// How many times as good as `other`; above 1 is better.
    fn times(&self, other: f64) -> f64 {
        if self.less { other / self.value } else { self.value / other }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    row: &'a str,
    value: f64,
    unit: &'a str,
    limit: Option<f64>,
    limit_ratio: Option<f64>,
    peer: Option<&'a str>,
    peer_value: Option<f64>,
    peer_ratio: Option<f64>,
}

/// The figures of a run.
#[derive(Default)]
pub(crate) struct Report {
    figures: Vec<Figure>,
    failed: Vec<(&'static str, String)>,
    /// What a peer reached, by row.
    peers: BTreeMap<String, f64>,
    peer: Option<String>,
}

impl Report {
    /// Reads what a peer's script printed: a line of JSON a row.
    pub(crate) fn read_peer(&mut self, file: &Path) -> Result<()> {
        let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        for line in text.lines().filter(|line| line.starts_with('{')) {
            let json: serde_json::Value = serde_json::from_str(line)?;
            if let (Some(row), Some(value)) = (json["row"].as_str(), json["value"].as_f64()) {
                self.peers.insert(row.to_owned(), value);
                self.peer = json["system"].as_str().map(str::to_owned).or(self.peer.take());
            }
        }
        Ok(())
    }

    /// Takes in a figure, and says it.
    pub(crate) fn add(&mut self, figure: Figure) {
        let held = match self.holds(&figure) {
            None => "",
            Some(true) => "  ok",
            Some(false) => "  MISSED",
        };
        eprintln!("   {:<28} {:>16}{held}", figure.row, with_unit(figure.value, figure.unit));
        self.figures.push(figure);
    }

    /// A row whose result was wrong or missing.
    pub(crate) fn fail(&mut self, row: &'static str, why: String) {
        eprintln!("   {row:<28} FAILED: {why}");
        self.failed.push((row, why));
    }

    pub(crate) fn value(&self, row: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.row == row).map(|figure| figure.value)
    }

    fn limit(&self, figure: &Figure) -> Option<f64> {
        match figure.must {
            Must::Nothing => None,
            Must::Reach(value) => Some(value),
            Must::Of(limit, _) => self.value(limit),
        }
    }

    fn holds(&self, figure: &Figure) -> Option<bool> {
        let limit = self.limit(figure)?;
        let share = if let Must::Of(_, share) = figure.must { share } else { 1.0 };
        Some(figure.times(limit) >= share)
    }

    fn line<'a>(&'a self, figure: &'a Figure) -> Line<'a> {
        let limit = self.limit(figure);
        let peer_value = self.peers.get(figure.row).copied();
        Line {
            row: figure.row,
            value: figure.value,
            unit: figure.unit,
            limit,
            limit_ratio: limit.map(|limit| figure.times(limit)),
            peer: peer_value.and(self.peer.as_deref()),
            peer_value,
            peer_ratio: peer_value.map(|value| figure.times(value)),
        }
    }

    /// A line of JSON a row.
    pub(crate) fn write_json(&self, file: &Path) -> Result<()> {
        let mut out = std::fs::File::create(file).with_context(|| format!("writing {}", file.display()))?;
        for figure in &self.figures {
            serde_json::to_writer(&mut out, &self.line(figure))?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// Rows as text: what, figure, range, what it must reach, how it compares.
    pub(crate) fn rows(&self) -> Vec<[String; 6]> {
        let row = |figure: &Figure| {
            let line = self.line(figure);
            let must = match figure.must {
                Must::Nothing => String::new(),
                Must::Reach(value) => {
                    format!("{} {}", if figure.less { "≤" } else { "≥" }, with_unit(value, figure.unit))
                }
                Must::Of(limit, share) => format!("≥ {:.2} × {limit}", share),
            };
            let of_limit = |ratio: f64| if ratio.is_finite() { format!("{ratio:.2} ×") } else { "fully".to_owned() };
            let mut reached = line.limit_ratio.map(of_limit).unwrap_or_default();
            if self.holds(figure) == Some(false) {
                reached.push_str(" missed");
            }
            let peer = line.peer_value.map(|_| format!("{:.1} ×", line.peer_ratio.unwrap_or_default()));
            [
                figure.row.to_owned(),
                with_unit(figure.value, figure.unit),
                format!("{} to {}", with_unit(figure.worst, figure.unit), with_unit(figure.best, figure.unit)),
                must,
                reached,
                peer.unwrap_or_default(),
            ]
        };
        self.figures.iter().map(row).collect()
    }

    pub(crate) fn peer(&self) -> &str {
        self.peer.as_deref().unwrap_or("peer")
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["row", "median", "worst to best", "must reach", "reached", &format!("× {}", self.peer())]);
        for row in self.rows() {
            table.add_row(row);
        }
        table
    }

    pub(crate) fn failures(&self) -> &[(&'static str, String)] {
        &self.failed
    }
}

/// Short times in smaller units.
pub(crate) fn with_unit(value: f64, unit: &str) -> String {
    match unit {
        "s" if value < 1e-3 => format!("{} µs", shown(value * 1e6)),
        "s" if value < 1.0 => format!("{} ms", shown(value * 1e3)),
        unit => format!("{} {unit}", shown(value)),
    }
}

/// With as many digits as mean something.
pub(crate) fn shown(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => {
            let digits = format!("{value:.0}");
            let mut text = String::new();
            for (i, digit) in digits.chars().enumerate() {
                if i > 0 && (digits.len() - i).is_multiple_of(3) && digits.as_bytes()[i - 1] != b'-' {
                    text.push(',');
                }
                text.push(digit);
            }
            text
        }
        large if large >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
