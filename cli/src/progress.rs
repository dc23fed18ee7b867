//! What `wingbeat train` shows while it runs: where its ranks are, and how far they have come.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use wingbeat_train::RankPlace;

use crate::rank_logs;

/// How often a line is printed where there is no terminal.
const PLAIN: Duration = Duration::from_secs(10);

/// A line at the bottom of the terminal, or where there is none, a line now and then.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Mutex<State>>);

struct State {
    /// None without a terminal.
    bar: Option<ProgressBar>,
    attempt: u32,
    ranks: usize,
    begun: Instant,
    reports: u64,
    /// The step of the first report, and when it came: what throughput is counted from.
    first: Option<(f64, Instant)>,
    printed: Option<Instant>,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            // The template is this one's own.
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let begun = Instant::now();
        let state = State { bar, attempt: 0, ranks: 0, begun, reports: 0, first: None, printed: None };
        Progress(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attempt begins.
    pub(crate) fn attempt(&self, attempt: u32, places: &[RankPlace]) {
        let mut state = self.state();
        (state.attempt, state.ranks, state.reports, state.first) = (attempt, places.len(), 0, None);
        let Some(bar) = &state.bar else { return };
        bar.set_message(format!("attempt {}, {} ranks", attempt + 1, places.len()));
        bar.suspend(|| eprintln!("{}", table(places)));
    }

    /// A line that a rank has printed.
    pub(crate) fn line(&self, is_stderr: bool, text: &str) {
        match &self.state().bar {
            Some(bar) => bar.suspend(|| rank_logs::show(is_stderr, text)),
            None => rank_logs::show(is_stderr, text),
        }
    }

    /// What the run says about itself.
    pub(crate) fn notice(&self, text: &str) {
        self.line(true, &format!("wingbeat: {text}"));
    }

    /// All ranks have reported.
    pub(crate) fn report(&self, metrics: &BTreeMap<String, f64>) {
        let mut state = self.state();
        state.reports += 1;
        let step = metrics.get("step").copied().unwrap_or(state.reports as f64);
        let now = Instant::now();
        let (first, since) = *state.first.get_or_insert((step, now));
        let seconds = now.duration_since(since).as_secs_f64();
        let mut text = format!("attempt {}, {} ranks, step {step}", state.attempt + 1, state.ranks);
        if seconds > 0.0 && step > first {
            text.push_str(&format!(", {:.1} steps/s", (step - first) / seconds));
        }
        for (name, value) in metrics.iter().filter(|(name, _)| *name != "step") {
            text.push_str(&format!(", {name} {value:.4}"));
        }
        match &state.bar {
            Some(bar) => bar.set_message(text),
            None if state.printed.is_none_or(|printed| now.duration_since(printed) >= PLAIN) => {
                state.printed = Some(now);
                eprintln!("wingbeat: {:.0} s: {text}", now.duration_since(state.begun).as_secs_f64());
            }
            None => {}
        }
    }

    /// Nothing more comes.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.state().bar {
            bar.finish_and_clear();
        }
    }
}

/// Where ranks are: one line each, or a line for each node where they are many.
fn table(places: &[RankPlace]) -> Table {
    const MANY: usize = 16;
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let gpus = |gpus: &[u32]| gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let start = |is_warm: bool| if is_warm { "forked" } else { "new process" };
    if places.len() <= MANY {
        table.set_header(["rank", "node", "GPU", "start"]);
        for (rank, place) in places.iter().enumerate() {
            table.add_row([rank.to_string(), place.node.clone(), gpus(&place.gpus), start(place.is_warm).into()]);
        }
        return table;
    }
    table.set_header(["ranks", "node", "GPUs", "start"]);
    let mut begin = 0;
    for group in places.chunk_by(|a, b| a.node == b.node) {
        let devices: Vec<u32> = group.iter().flat_map(|place| place.gpus.clone()).collect();
        let ranks = format!("{begin} to {}", begin + group.len() - 1);
        table.add_row([ranks, group[0].node.clone(), gpus(&devices), start(group[0].is_warm).into()]);
        begin += group.len();
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ranks_have_a_line_each_and_many_share_their_node_s() {
        let place = |node: &str, gpu| RankPlace { node: node.into(), gpus: vec![gpu], is_warm: true };
        insta::assert_snapshot!(table(&[place("a", 0), place("b", 3)]).trim_fmt(), @r"
         rank  node  GPU  start
         0     a     0    forked
         1     b     3    forked
        ");
        let many: Vec<RankPlace> = (0..16).map(|gpu| place(if gpu < 8 { "a" } else { "b" }, gpu % 8)).collect();
        let many = [many, vec![place("c", 0)]].concat();
        insta::assert_snapshot!(table(&many).trim_fmt(), @r"
         ranks     node  GPUs             start
         0 to 7    a     0,1,2,3,4,5,6,7  forked
         8 to 15   b     0,1,2,3,4,5,6,7  forked
         16 to 16  c     0                forked
        ");
    }
}
