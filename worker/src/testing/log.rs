//! What the processes of a test cluster write, line by line, in the order in which it is read.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// So many lines are kept: megabytes, and more than anybody reads.
const LINES: usize = 10_000;
/// What is longer counts as several lines.
const LONGEST_LINE: u64 = 16 << 10;

/// The last lines of all processes.
#[derive(Default)]
pub struct Log {
    kept: Mutex<Kept>,
    changed: Condvar,
}

#[derive(Default)]
struct Kept {
    /// Who has written it, and what.
    lines: VecDeque<(Arc<str>, String)>,
    /// How many are not kept any more.
    dropped: u64,
    /// Whose pipes are still read.
    open: Vec<Arc<str>>,
}

impl Log {
    /// Adds a line of this process.
    pub fn add(&self, source: &Arc<str>, line: &str) {
        let mut kept = self.kept.lock();
        if kept.lines.len() == LINES {
            kept.lines.pop_front();
            kept.dropped += 1;
        }
        kept.lines.push_back((source.clone(), line.to_owned()));
    }

    /// Adds what this process writes to a pipe, until it is closed.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn follow(self: &Arc<Self>, source: &Arc<str>, pipe: impl Read + Send + 'static) -> std::io::Result<()> {
        self.kept.lock().open.push(source.clone());
        let (following, of) = (self.clone(), source.clone());
        let thread = std::thread::Builder::new().name("wingbeat-log".into()).spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                following.add(&of, String::from_utf8_lossy(line.trim_ascii_end()).as_ref());
                line.clear();
            }
            following.is_closed(&of);
        });
        thread.map(drop).inspect_err(|_| self.is_closed(source))
    }

    fn is_closed(&self, source: &Arc<str>) {
        let mut kept = self.kept.lock();
        if let Some(at) = kept.open.iter().position(|open| open == source) {
            kept.open.swap_remove(at);
        }
        drop(kept);
        self.changed.notify_all();
    }

    /// Waits until everything that one process has written, or all have, was read to its end, for so long at most.
    pub fn wait_for_end(&self, of: Option<&str>, limit: Duration) {
        let mut kept = self.kept.lock();
        let is_open = |kept: &mut Kept| kept.open.iter().any(|open| of.is_none_or(|of| of == &**open));
        let _ = self.changed.wait_while_for(&mut kept, is_open, limit);
    }

    /// The lines of one process, or of all, each with the process before it.
    pub fn text(&self, of: Option<&str>) -> String {
        let kept = self.kept.lock();
        let mut text = String::new();
        if kept.dropped > 0 {
            text = format!("({} earlier lines were not kept)\n", kept.dropped);
        }
        for (source, line) in kept.lines.iter().filter(|(source, _)| of.is_none_or(|of| of == &**source)) {
            text.push_str(&format!("[{source}] {line}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let (log, one, other) = (Log::default(), Arc::from("one"), Arc::from("other"));
        log.add(&other, "first");
        (0..LINES).for_each(|number| log.add(&one, &number.to_string()));
        let text = log.text(None);
        assert!(text.starts_with("(1 earlier lines were not kept)\n[one] 0\n") && text.ends_with("[one] 9999\n"));
        assert_eq!(log.text(Some("other")).lines().count(), 1);
    }

    #[test]
    fn a_line_without_an_end_is_cut_and_kept() {
        let (log, source) = (Arc::new(Log::default()), Arc::from("it"));
        log.follow(&source, std::io::Cursor::new([vec![b'x'; LONGEST_LINE as usize + 1], b"\nend".to_vec()].concat()))
            .unwrap();
        log.wait_for_end(None, Duration::from_secs(60));
        let lines: Vec<usize> = log.text(None).lines().map(str::len).collect();
        assert_eq!(lines, [LONGEST_LINE as usize + 5, 6, 8]);
    }
}
