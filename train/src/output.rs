//! What ranks print: where it goes, and how lines are made of it.
//!
//! Pure but for [`Prefixed`], which writes.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

/// A line that is longer is cut.
const LONGEST: usize = 1 << 20;
/// How often the state of a progress bar becomes a line where nobody watches it live.
const BAR: Duration = Duration::from_secs(10);

/// Where what ranks print goes: see [`TorchTrainer::output`](crate::TorchTrainer::output). Its calls come one after the
/// other, on a thread of their own. While one takes its time, ranks wait with what they print, as they do for a slow
/// terminal.
pub trait RankOutput: Send {
    /// An attempt begins; the first is 0.
    fn begun(&mut self, attempt: u32) {
        let _ = attempt;
    }

    /// A rank has printed these bytes, as they are: a line may come in parts, and a part may have many lines.
    fn printed(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]);

    /// Called twice after something was printed, each time when a tenth of a second has passed: the beginning of a line
    /// that is held back may be shown now.
    fn paused(&mut self) {}

    /// Nothing more comes from this rank in this attempt.
    fn ended(&mut self, rank: u32) {
        let _ = rank;
    }

    /// A rank that has ended had failed: what it wrote into torchelastic's error file, which is JSON.
    fn failed(&mut self, rank: u32, error_file: &str) {
        let _ = (rank, error_file);
    }
}

/// A line that a rank has printed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Line {
    /// Whether to standard error.
    pub is_stderr: bool,
    /// The line, without its end; of a progress bar, which is drawn over itself with `\r`, its last state.
    pub text: String,
}

/// What terminals would show of a line in the end: what follows its last `\r`.
pub(crate) fn last_state(line: &[u8]) -> &[u8] {
    line.rsplit(|byte| *byte == b'\r').find(|state| !state.is_empty()).unwrap_or_default()
}

/// Makes lines of what ranks print.
#[derive(Debug, Default)]
pub struct Lines {
    held: BTreeMap<(u32, bool), OpenLine>,
}

/// A line that has begun.
#[derive(Debug, Default)]
struct OpenLine {
    /// What it is so far, since its last `\r`.
    text: Vec<u8>,
    /// What was before that.
    before: Vec<u8>,
    /// When its state was shown, or else when it was drawn over itself first.
    shown: Option<Instant>,
}

impl OpenLine {
    /// Takes in what has no end of line in it.
    fn add(&mut self, bytes: &[u8], now: Instant) {
        self.text.extend_from_slice(bytes);
        // One at the end may belong to an end of line.
        let looked_at = self.text.len().saturating_sub(1);
        if let Some(at) = self.text[..looked_at].iter().rposition(|byte| *byte == b'\r') {
            let state = last_state(&self.text[..at]);
            if !state.is_empty() {
                self.before = state.to_vec();
            }
            self.text.drain(..=at);
            self.shown.get_or_insert(now);
        }
    }

    /// What a terminal shows of it now.
    fn state(&self) -> &[u8] {
        match last_state(&self.text) {
            [] => &self.before,
            state => state,
        }
    }
}

impl Lines {
    /// None yet.
    pub fn new() -> Lines {
        Lines::default()
    }

    /// A rank has printed these bytes: calls `told` for each line that is complete with them.
    ///
    /// ```
    /// use wingbeat_train::Lines;
    ///
    /// let (mut lines, mut seen) = (Lines::new(), Vec::new());
    /// for part in ["a li", "ne\n 10%\r 5", "0%\r100%\nthe r"] {
    ///     lines.take_in(0, false, part.as_bytes(), |line| seen.push(line.text));
    /// }
    /// assert_eq!(seen, ["a line", "100%"]);
    /// lines.end(0, |line| seen.push(line.text));
    /// assert_eq!(seen[2], "the r");
    /// ```
    pub fn take_in(&mut self, rank: u32, is_stderr: bool, bytes: &[u8], mut told: impl FnMut(Line)) {
        let mut tell = |bytes: &[u8]| told(Line { is_stderr, text: String::from_utf8_lossy(bytes).into_owned() });
        let held = self.held.entry((rank, is_stderr)).or_default();
        let now = Instant::now();
        let mut parts = bytes.split(|byte| *byte == b'\n');
        // There is one at least; the last has no end yet.
        let rest = parts.next_back().unwrap_or_default();
        for part in parts {
            if held.text.is_empty() && held.before.is_empty() {
                tell(last_state(part));
            } else {
                held.add(part, now);
                tell(held.state());
                *held = OpenLine::default();
            }
        }
        for part in rest.chunks(LONGEST) {
            held.add(part, now);
            if held.text.len() >= LONGEST {
                tell(&held.text);
                held.text.clear();
            }
        }
    }

    /// The lines that have begun, as a terminal would show them now, with their ranks.
    pub fn live(&self) -> impl Iterator<Item = (u32, String)> {
        let begun = self.held.iter().filter(|(_, held)| !held.state().is_empty());
        begun.map(|((rank, _), held)| (*rank, String::from_utf8_lossy(held.state()).into_owned()))
    }

    /// Calls `told` with the state of each line that has been drawn over itself for 10 s without being shown: for where nobody
    /// watches it live.
    pub fn bars(&mut self, told: impl FnMut(u32, Line)) {
        self.bars_after(BAR, told);
    }

    fn bars_after(&mut self, for_so_long: Duration, mut told: impl FnMut(u32, Line)) {
        for ((rank, is_stderr), held) in &mut self.held {
            if held.shown.is_some_and(|shown| shown.elapsed() >= for_so_long) && !held.state().is_empty() {
                held.shown = Some(Instant::now());
                let text = String::from_utf8_lossy(held.state()).into_owned();
                told(*rank, Line { is_stderr: *is_stderr, text });
            }
        }
    }

    /// Nothing more comes from this rank: calls `told` with what has no end.
    pub fn end(&mut self, rank: u32, mut told: impl FnMut(Line)) {
        for is_stderr in [false, true] {
            if let Some(held) = self.held.remove(&(rank, is_stderr))
                && !held.state().is_empty()
            {
                told(Line { is_stderr, text: String::from_utf8_lossy(held.state()).into_owned() });
            }
        }
    }
}

/// Calls a function for each line.
pub(crate) struct ByLine<F> {
    lines: Lines,
    told: F,
}

impl<F: Fn(u32, &Line) + Send> ByLine<F> {
    pub(crate) fn new(told: F) -> Self {
        ByLine { lines: Lines::new(), told }
    }
}

impl<F: Fn(u32, &Line) + Send> RankOutput for ByLine<F> {
    fn printed(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) {
        self.lines.take_in(rank, is_stderr, bytes, |line| (self.told)(rank, &line));
    }

    fn paused(&mut self) {
        self.lines.bars(|rank, line| (self.told)(rank, &line));
    }

    fn ended(&mut self, rank: u32) {
        self.lines.end(rank, |line| (self.told)(rank, &line));
    }
}

/// Each line with its rank, to this process's own standard output and standard error.
#[derive(Default)]
pub(crate) struct Prefixed {
    lines: Lines,
    written: Batch,
}

impl RankOutput for Prefixed {
    fn printed(&mut self, rank: u32, is_stderr: bool, bytes: &[u8]) {
        self.lines.take_in(rank, is_stderr, bytes, |line| self.written.add(rank, &line));
        self.written.flush();
    }

    fn paused(&mut self) {
        self.lines.bars(|rank, line| self.written.add(rank, &line));
        self.written.flush();
    }

    fn ended(&mut self, rank: u32) {
        self.lines.end(rank, |line| self.written.add(rank, &line));
        self.written.flush();
    }
}

/// What is to be written at once.
#[derive(Default)]
struct Batch {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Batch {
    fn add(&mut self, rank: u32, line: &Line) {
        let to = if line.is_stderr { &mut self.stderr } else { &mut self.stdout };
        // Into memory.
        let _ = writeln!(to, "[rank {rank}] {}", line.text);
    }

    fn flush(&mut self) {
        // Training goes on when nobody reads any more, as under `| head`.
        if !self.stdout.is_empty() {
            let _ = std::io::stdout().write_all(&self.stdout);
        }
        if !self.stderr.is_empty() {
            let _ = std::io::stderr().write_all(&self.stderr);
        }
        self.stdout.clear();
        self.stderr.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that these parts make, and what is live after them.
    fn of(parts: &[&[u8]]) -> (Vec<String>, Vec<String>) {
        let (mut lines, mut seen) = (Lines::new(), Vec::new());
        for part in parts {
            lines.take_in(3, false, part, |line| seen.push(line.text));
        }
        (seen, lines.live().map(|(_, text)| text).collect())
    }

    #[test]
    fn lines_are_the_same_however_they_are_cut() {
        let text: &[u8] = b"one\n\ntwo\r\n\r 1%|#\r 50%|##\r100%|###\nlast\r\r\n10\r20\r\nlive\r 7%";
        let whole = of(&[text]);
        assert_eq!(whole.0, ["one", "", "two", "100%|###", "last", "20"]);
        assert_eq!(whole.1, [" 7%"]);
        for first in 0..text.len() {
            for second in first..text.len() {
                let parts = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(of(&parts), whole, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn a_bar_that_ends_each_state_with_a_return_is_shown_too() {
        let (lines, live) = of(&[b"10%\r", b"20%\r"]);
        assert_eq!((lines, live), (vec![], vec!["20%".to_owned()]));
        assert_eq!(of(&[b"10%\r", b"20%\r", b"\n"]).0, ["20%"]);
    }

    #[test]
    fn a_bar_is_a_line_now_and_then_and_a_plain_line_is_not() {
        let mut lines = Lines::new();
        lines.take_in(0, false, b"a line without end", |_| panic!("it has no end"));
        lines.bars_after(Duration::ZERO, |_, line| panic!("{line:?} is no bar"));
        lines.take_in(1, true, b"\r 1%\r 2%", |_| panic!("it has no end"));
        lines.bars_after(Duration::from_secs(3600), |_, line| panic!("{line:?} is new"));
        let mut seen = Vec::new();
        lines.bars_after(Duration::ZERO, |rank, line| seen.push((rank, line)));
        assert_eq!(seen, [(1, Line { is_stderr: true, text: " 2%".into() })]);
        lines.end(1, |line| seen.push((1, line)));
        assert_eq!(seen.len(), 2, "and the last state at the end");
    }

    #[test]
    fn what_is_held_of_a_line_without_end_is_bounded() {
        let mut lines = Lines::new();
        let (mut seen, chunk) = (0, vec![b'x'; 64 * 1024]);
        for _ in 0..1_000 {
            lines.take_in(0, false, &chunk, |line| seen += line.text.len());
            lines.take_in(1, false, b"\r some state of a bar", |_| panic!("it has no end"));
        }
        assert!(lines.held.values().all(|held| held.text.len() + held.before.len() < 2 * LONGEST));
        lines.end(0, |line| seen += line.text.len());
        assert_eq!(seen, 1_000 * chunk.len(), "nothing is lost");
    }

    #[test]
    fn streams_and_ranks_do_not_mix() {
        let (mut lines, mut seen) = (Lines::new(), Vec::new());
        for (rank, is_stderr, part) in
            [(0, false, "a"), (1, false, "b"), (0, true, "c"), (0, false, "\n"), (0, true, "\n")]
        {
            lines.take_in(rank, is_stderr, part.as_bytes(), |line| seen.push((rank, line.is_stderr, line.text)));
        }
        assert_eq!(seen, [(0, false, "a".to_owned()), (0, true, "c".to_owned())]);
    }
}
