//! What `wingbeat train` shows while it runs: what its ranks print, where they are, and how far they have come.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use wingbeat_train::{Line, Lines, RankOutput, RankProgress};
use wingbeat_worker::aside::Aside;

use crate::rank_logs;
use crate::say::{is_quiet, notice};

/// How often a line is printed where there is no terminal.
const PLAIN: Duration = Duration::from_secs(10);
/// How often the table is drawn anew: more often than this nobody reads.
const DRAW: Duration = Duration::from_millis(100);
/// With more ranks than this, those of a node share a line.
const MANY: usize = 16;
/// The name of the metric that says how far a rank is; without it, reports are counted.
const STEP: &str = "step";

/// A table at the bottom of the terminal, or where there is none, a line now and then. Whoever reads it may not read for long:
/// only the thread that shows what ranks print, and one of its own, ever write.
#[derive(Clone)]
pub(crate) struct Progress {
    state: Arc<Mutex<State>>,
    aside: Aside<Message>,
}

/// What is shown besides what ranks print.
enum Message {
    Notice(String),
    Update(wingbeat_train::Progress),
    End,
}

struct State {
    /// None without a terminal.
    bar: Option<ProgressBar>,
    /// The table above its last line, as it was drawn last.
    table: String,
    /// What ranks print.
    lines: Lines,
    /// Whether lines are shown with their ranks.
    is_prefixed: bool,
    /// When the lines that have begun were drawn last.
    drawn: Instant,
    begun: Instant,
    attempt: Option<u32>,
    /// The first step that was reported, and when: what throughput is counted from.
    first: Option<(f64, Instant)>,
    shown: Option<Instant>,
}

impl Progress {
    /// Lines are shown with their ranks if `is_prefixed`.
    ///
    /// # Errors
    /// The process may have no more threads.
    pub(crate) fn new(is_prefixed: bool) -> std::io::Result<Progress> {
        let bar = (std::io::stderr().is_terminal() && !is_quiet()).then(|| {
            let bar = ProgressBar::new_spinner();
            // The template is this one's own.
            if let Ok(style) = ProgressStyle::with_template("{msg}\n{spinner} {elapsed} {prefix}") {
                bar.set_style(style);
            }
            bar.set_prefix("placing ranks");
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let state = Arc::new(Mutex::new(State {
            bar,
            table: String::new(),
            lines: Lines::new(),
            is_prefixed,
            drawn: Instant::now(),
            begun: Instant::now(),
            attempt: None,
            first: None,
            shown: None,
        }));
        let shown = state.clone();
        let aside = Aside::start(move |told| {
            let mut state = shown.lock().unwrap_or_else(PoisonError::into_inner);
            match told {
                Message::Notice(_) if is_quiet() => {}
                Message::Notice(text) => {
                    let bar = state.bar.clone();
                    drop(state);
                    show(bar.as_ref(), true, format!("wingbeat: {text}\n").as_bytes());
                }
                Message::Update(now) => {
                    let line = state.update(&now);
                    drop(state);
                    if let Some(line) = line {
                        notice!("{line}");
                    }
                }
                Message::End => {
                    if let Some(bar) = &state.bar {
                        bar.finish_and_clear();
                    }
                }
            }
        })?;
        Ok(Progress { state, aside })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the run says about itself.
    pub(crate) fn notice(&self, text: &str) {
        self.aside.tell(Message::Notice(text.to_owned()));
    }

    /// An attempt has begun, or all ranks have reported.
    pub(crate) fn update(&self, now: &wingbeat_train::Progress) {
        self.aside.tell(Message::Update(now.clone()));
    }

    /// Nothing more comes.
    pub(crate) fn end(&self) {
        self.aside.tell(Message::End);
        self.aside.end();
    }
}

impl RankOutput for Progress {
    fn printed(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) {
        let mut state = self.state();
        let (mut shown, is_prefixed) = (Vec::new(), state.is_prefixed);
        state.lines.take_in(rank, is_stderr, bytes, |line| add(&mut shown, is_prefixed, rank, &line));
        if state.drawn.elapsed() >= DRAW {
            state.draw();
        }
        let bar = state.bar.clone();
        drop(state);
        show(bar.as_ref(), is_stderr, &shown);
    }

    fn paused(&mut self) {
        let mut state = self.state();
        if state.bar.is_some() {
            return state.draw();
        }
        let (mut shown, is_prefixed) = ([Vec::new(), Vec::new()], state.is_prefixed);
        state.lines.bars(|rank, line| add(&mut shown[usize::from(line.is_stderr)], is_prefixed, rank, &line));
        drop(state);
        show(None, false, &shown[0]);
        show(None, true, &shown[1]);
    }

    fn ended(&mut self, rank: u32) {
        let mut state = self.state();
        let (mut shown, is_prefixed) = ([Vec::new(), Vec::new()], state.is_prefixed);
        state.lines.end(rank, |line| add(&mut shown[usize::from(line.is_stderr)], is_prefixed, rank, &line));
        state.draw();
        let bar = state.bar.clone();
        drop(state);
        show(bar.as_ref(), false, &shown[0]);
        show(bar.as_ref(), true, &shown[1]);
    }
}

/// Shows whole lines; on a terminal, above what is drawn at its bottom.
fn show(bar: Option<&ProgressBar>, is_stderr: bool, text: &[u8]) {
    let is_terminal = if is_stderr { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    match bar {
        _ if text.is_empty() => {}
        Some(bar) if is_terminal => bar.suspend(|| rank_logs::show(is_stderr, text)),
        _ => rank_logs::show(is_stderr, text),
    }
}

/// Adds a line, with its rank or without.
fn add(to: &mut Vec<u8>, is_prefixed: bool, rank: u32, line: &Line) {
    let text = if is_prefixed { format!("[rank {rank}] {}\n", line.text) } else { format!("{}\n", line.text) };
    to.extend_from_slice(text.as_bytes());
}

impl State {
    /// Draws the table, and above it, the lines that have begun: the progress bars of ranks.
    fn draw(&mut self) {
        let Some(bar) = &self.bar else { return };
        self.drawn = Instant::now();
        let width =
            rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| usize::from(size.ws_col.max(20)));
        let live =
            self.lines.live().map(|(rank, text)| format!("[rank {rank}] {text}").chars().take(width - 1).collect());
        let mut shown: Vec<String> = live.take(MANY).collect();
        shown.extend((!self.table.is_empty()).then(|| self.table.clone()));
        bar.set_message(shown.join("\n"));
    }

    /// Takes in how the run is, and gives what is to be said of it without a terminal. Who says it must hold nothing that others wait for:
    /// nobody may read.
    fn update(&mut self, now: &wingbeat_train::Progress) -> Option<String> {
        if self.attempt.replace(now.attempt) != Some(now.attempt) || now.reports == 0 {
            (self.first, self.shown) = (None, None);
        }
        let rate = match now.ranks.first().filter(|_| now.reports > 0) {
            Some(rank) => self.rate(rank.metrics.get(STEP).copied().unwrap_or(now.reports as f64)),
            None => None,
        };
        let pause = if self.bar.is_some() { DRAW } else { PLAIN };
        let is_due = self.shown.is_none_or(|shown| shown.elapsed() >= pause);
        if !is_due {
            return None;
        }
        self.shown = Some(Instant::now());
        match &self.bar {
            Some(bar) => {
                bar.set_prefix(summary(now, rate));
                self.table = table(&now.ranks).trim_fmt();
                self.draw();
                None
            }
            None if now.reports > 0 => {
                let seconds = self.begun.elapsed().as_secs_f64();
                Some(format!("wingbeat: {seconds:.0} s: {}{}", summary(now, rate), metrics(&now.ranks[0].metrics)))
            }
            // The first report is worth a line.
            None => {
                self.shown = None;
                None
            }
        }
    }

    /// Steps a second since the first.
    fn rate(&mut self, step: f64) -> Option<f64> {
        let now = Instant::now();
        let (first, since) = *self.first.get_or_insert((step, now));
        let seconds = now.duration_since(since).as_secs_f64();
        (seconds > 0.0 && step > first).then(|| (step - first) / seconds)
    }
}

/// What is said of all ranks.
fn summary(now: &wingbeat_train::Progress, rate: Option<f64>) -> String {
    let mut text = format!("attempt {}, {}", now.attempt + 1, counted(now.ranks.len() as u32));
    if let Some(rate) = rate {
        text.push_str(&format!(", {rate:.1} steps/s"));
    }
    text
}

/// `1 rank`, `2 ranks`.
pub(crate) fn counted(ranks: u32) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}

/// Metrics in a line, after something else.
pub(crate) fn metrics(metrics: &BTreeMap<String, f64>) -> String {
    metrics.iter().fold(String::new(), |text, (name, value)| format!("{text}, {name} {}", shown(*value)))
}

/// A number of whatever size: steps are whole, losses are not.
fn shown(value: f64) -> String {
    match value {
        whole if whole.fract() == 0.0 && whole.abs() < 1e15 => format!("{whole}"),
        small if small != 0.0 && small.abs() < 0.001 => format!("{small:.2e}"),
        value => format!("{value:.4}"),
    }
}

/// Where ranks are, and what they have reported: one line each, or a line for each node where they are many.
fn table(ranks: &[RankProgress]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let names: BTreeSet<&str> = ranks.iter().flat_map(|rank| rank.metrics.keys()).map(String::as_str).collect();
    // How far they are comes first, and how well it goes second.
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_by_key(|name| (*name != STEP, *name != "loss"));
    let has_gpus = ranks.iter().any(|rank| !rank.gpus.is_empty());
    let group: &dyn Fn(&RankProgress, &RankProgress) -> bool = match ranks.len() > MANY {
        true => &|a, b| a.node == b.node,
        false => &|_, _| false,
    };
    let mut header = vec!["rank", "node"];
    header.extend(has_gpus.then_some("GPU"));
    header.push("start");
    header.extend(&names);
    table.set_header(header);
    let mut begin = 0;
    for ranks in ranks.chunk_by(group) {
        let first = &ranks[0];
        let mut row = match ranks.len() {
            1 => vec![begin.to_string()],
            count => vec![format!("{begin} to {}", begin + count - 1)],
        };
        begin += ranks.len();
        row.push(first.node.clone());
        if has_gpus {
            let gpus: Vec<String> = ranks.iter().flat_map(|rank| &rank.gpus).map(u32::to_string).collect();
            row.push(gpus.join(","));
        }
        row.push(if first.is_warm { "forked" } else { "new process" }.into());
        row.extend(names.iter().map(|name| of_ranks(ranks, name)));
        table.add_row(row);
    }
    table
}

/// A metric of one rank, or the mean of several; of the steps, the least.
fn of_ranks(ranks: &[RankProgress], name: &str) -> String {
    let values: Vec<f64> = ranks.iter().filter_map(|rank| rank.metrics.get(name).copied()).collect();
    match values.as_slice() {
        [] => "-".into(),
        values if name == STEP => shown(values.iter().copied().fold(f64::INFINITY, f64::min)),
        values => shown(values.iter().sum::<f64>() / values.len() as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(node: &str, gpu: u32, metrics: &[(&str, f64)]) -> RankProgress {
        let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let mut rank = RankProgress::default();
        (rank.node, rank.gpus, rank.is_warm, rank.metrics) = (node.into(), vec![gpu], true, metrics);
        rank
    }

    #[test]
    fn few_ranks_have_a_line_each_with_what_they_reported() {
        insta::assert_snapshot!(table(&[rank("a", 0, &[]), rank("b", 3, &[])]).trim_fmt(), @r"
         rank  node  GPU  start
         0     a     0    forked
         1     b     3    forked
        ");
        let reported = |loss| [("accuracy", 0.5), ("loss", loss), ("step", 120.0)];
        insta::assert_snapshot!(table(&[rank("a", 0, &reported(0.25)), rank("b", 3, &reported(0.00001))]).trim_fmt(), @r"
         rank  node  GPU  start   step  loss     accuracy
         0     a     0    forked  120   0.2500   0.5000
         1     b     3    forked  120   1.00e-5  0.5000
        ");
    }

    #[test]
    fn many_ranks_share_their_node_s_line() {
        let of = |index: u32| rank(if index < 8 { "a" } else { "b" }, index % 8, &[("loss", f64::from(index))]);
        let many: Vec<RankProgress> = (0..16).map(of).chain([rank("c", 0, &[])]).collect();
        insta::assert_snapshot!(table(&many).trim_fmt(), @r"
         rank     node  GPU              start   loss
         0 to 7   a     0,1,2,3,4,5,6,7  forked  3.5000
         8 to 15  b     0,1,2,3,4,5,6,7  forked  11.5000
         16       c     0                forked  -
        ");
    }
}
