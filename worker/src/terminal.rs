//! Output of user code on the driver's terminal: prefixed with where it comes from, repeats folded. It is written on a thread of its own:
//! the program may hold the lock of its output while it waits for a result, and nobody may read.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use tokio::sync::oneshot;
use wingbeat_net::messages::LogLine;

/// When nothing has come for so long, it is said how often the last line has come: the first time, and after ten times as long each next time, so that
/// a line that comes again and again is not shown nearly each time.
const PAUSE: Duration = Duration::from_secs(3);

/// The way to the thread that shows lines. It ends when nobody has one any more.
#[derive(Clone)]
pub(crate) struct Terminal(Sender<Message>);

enum Message {
    /// With who waits until they are shown. So many wait here as calls are under way that bring them.
    Lines(Vec<LogLine>, oneshot::Sender<()>),
    Say(String),
}

/// What was shown last, and where.
struct Shown {
    last: Option<Repeated>,
    output: Option<Output>,
}

/// Takes lines in place of the terminal. Implemented for whoever keeps what user code has written.
#[derive(Clone)]
pub struct Output(Arc<dyn Fn(&str) + Send + Sync>);

impl Output {
    /// Calls this with each line.
    pub fn new(take: impl Fn(&str) + Send + Sync + 'static) -> Output {
        Output(Arc::new(take))
    }
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Output")
    }
}

struct Repeated {
    source: String,
    text: String,
    is_stderr: bool,
    times: u32,
    /// How much of that was said.
    said: u32,
    /// When nothing comes for so long, the rest is said.
    pause: Duration,
}

impl Repeated {
    /// Whether a line is this one again: also from another process, where the same function runs.
    fn is(&self, line: &LogLine) -> bool {
        self.text == line.text && self.is_stderr == line.is_stderr && self.source == line.source
    }

    /// How often the line has come, for who reads, with or without a word behind it.
    fn told(&self, rest: &str) -> String {
        let times = if self.times == 1 { "once".to_owned() } else { format!("{} times", self.times) };
        format!("({}) … the last line came {times} more{rest}", short(&self.source))
    }
}

impl Terminal {
    /// One that gives what user code has written to `output`, if that is there.
    ///
    /// # Errors
    /// The process may have no more threads.
    pub(crate) fn start(output: Option<Output>) -> std::io::Result<Terminal> {
        let (queue, messages) = channel();
        std::thread::Builder::new().name("wingbeat-output".into()).spawn(move || {
            let mut shown = Shown { last: None, output };
            loop {
                let message = match shown.count_is_due_in() {
                    Some(pause) => messages.recv_timeout(pause),
                    None => messages.recv().map_err(RecvTimeoutError::from),
                };
                match message {
                    Ok(Message::Lines(lines, done)) => {
                        shown.show(lines);
                        // Nobody waits any more once the session is over.
                        let _ = done.send(());
                    }
                    Ok(Message::Say(text)) => shown.say(&text),
                    Err(RecvTimeoutError::Timeout) => shown.count(),
                    // The program may have ended, and what takes lines with it.
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Terminal(queue))
    }

    /// Shows lines; no lines: those before were the last. What is given is ready when they are shown.
    pub(crate) fn show(&self, lines: Vec<LogLine>) -> impl Future<Output = ()> + Send + 'static {
        let (done, shown) = oneshot::channel();
        // The thread ends with the process.
        let _ = self.0.send(Message::Lines(lines, done));
        async move {
            let _ = shown.await;
        }
    }

    /// Shows what the runtime itself has to say, on the terminal in any case: it may be why nothing else is shown.
    pub(crate) fn say(&self, text: &str) {
        let _ = self.0.send(Message::Say(text.to_owned()));
    }
}

impl Shown {
    fn print(&self, is_stderr: bool, text: &str) {
        match &self.output {
            // A panic is printed where it happens. The next line may be shown.
            Some(Output(take)) => drop(catch_unwind(AssertUnwindSafe(|| take(text)))),
            None => print(is_stderr, text),
        }
    }

    fn show(&mut self, lines: Vec<LogLine>) {
        if lines.is_empty() {
            self.end_of_last();
        }
        for line in lines {
            match &mut self.last {
                Some(repeated) if repeated.is(&line) => {
                    repeated.times += 1;
                    // Said at each power of ten, so that a flood is short and a stall is seen.
                    if is_power_of_ten(repeated.times) {
                        repeated.said = repeated.times;
                        let told = repeated.told("");
                        self.print(line.is_stderr, &told);
                    }
                }
                _ => {
                    self.end_of_last();
                    let source = short(&line.source);
                    self.print(line.is_stderr, &format!("({source} pid={}, {}) {}", line.pid, line.node, line.text));
                    let LogLine { source, text, is_stderr, .. } = line;
                    self.last = Some(Repeated { source, text, is_stderr, times: 0, said: 0, pause: PAUSE });
                }
            }
        }
    }

    /// When nothing comes for so long, it is to be said how often the last line has come.
    fn count_is_due_in(&self) -> Option<Duration> {
        self.last.as_ref().filter(|last| last.times > last.said).map(|last| last.pause)
    }

    /// Says how often the last line has come so far.
    fn count(&mut self) {
        if let Some(repeated) = &mut self.last {
            repeated.said = repeated.times;
            repeated.pause *= 10;
            let (is_stderr, told) = (repeated.is_stderr, repeated.told(" so far"));
            self.print(is_stderr, &told);
        }
    }

    /// Another line comes: how often the last one has come in all, unless that was said.
    fn end_of_last(&mut self) {
        if let Some(repeated) = self.last.take()
            && repeated.times > repeated.said
        {
            self.print(repeated.is_stderr, &repeated.told(", in all"));
        }
    }

    fn say(&mut self, text: &str) {
        // What comes next repeats nothing.
        self.end_of_last();
        print(true, text);
    }
}

fn is_power_of_ten(mut number: u32) -> bool {
    while number >= 10 && number.is_multiple_of(10) {
        number /= 10;
    }
    number == 1
}

/// The last part of a path: the crate and modules are known to who reads.
fn short(source: &str) -> &str {
    match source.rsplit_once("::") {
        Some((_, name)) => name,
        None if source.is_empty() => "worker",
        None => source,
    }
}

fn print(is_stderr: bool, text: &str) {
    // A terminal that is gone is no reason to fail.
    let _ = if is_stderr { writeln!(std::io::stderr(), "{text}") } else { writeln!(std::io::stdout(), "{text}") };
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn how_often_a_line_has_come_is_said_exactly_when_another_one_comes() {
        let shown = Arc::new(Mutex::new(Vec::new()));
        let to = shown.clone();
        let output = Output::new(move |line| to.lock().push(line.to_owned()));
        let mut terminal = Shown { last: None, output: Some(output) };
        let line = |text: &str| LogLine {
            node: "here".into(),
            pid: 7,
            source: "it::prints".into(),
            is_stderr: false,
            text: text.into(),
        };
        terminal.show((0..26).map(|_| line("again")).chain([line("other"), line("other"), line("last")]).collect());
        let said = |text: &str| format!("(prints) … the last line came {text}");
        let lines = std::mem::take(&mut *shown.lock());
        assert_eq!(
            lines[1..5],
            [said("once more"), said("10 times more"), said("25 times more, in all"), lines[4].clone()]
        );
        assert!(
            lines[4].ends_with("other") && lines[5] == said("once more") && lines[6].ends_with("last"),
            "{lines:?}"
        );
        assert_eq!(lines.len(), 7);
        terminal.show(vec![line("last"), line("last")]);
        terminal.show(Vec::new());
        assert_eq!(shown.lock()[..], [said("once more"), said("2 times more, in all")]);
    }

    #[test]
    fn how_often_a_line_has_come_is_said_when_nothing_comes_for_a_while() {
        let (to, taken) = channel();
        let terminal = Terminal::start(Some(Output::new(move |line| to.send(line.to_owned()).unwrap()))).unwrap();
        let line = LogLine {
            node: "here".into(),
            pid: 7,
            source: "it::prints".into(),
            is_stderr: false,
            text: "again".into(),
        };
        drop(terminal.show(vec![line; 6]));
        let said: Vec<String> = taken.iter().take(3).collect();
        assert_eq!(said[2], "(prints) … the last line came 5 times more so far");
    }

    #[test]
    fn whoever_takes_lines_and_panics_gets_the_next() {
        let (to, taken) = channel();
        let output = Output::new(move |line| {
            to.send(()).unwrap();
            assert!(!line.ends_with("bad"), "it cannot be taken");
        });
        let mut shown = Shown { last: None, output: Some(output) };
        let line = |text: &str| LogLine {
            node: "here".into(),
            pid: 7,
            source: "it::prints".into(),
            is_stderr: false,
            text: text.into(),
        };
        shown.show(vec![line("bad"), line("good")]);
        assert_eq!(taken.try_iter().count(), 2);
    }

    #[test]
    fn repeats_are_counted_at_powers_of_ten() {
        let shown: Vec<u32> = (1..=1000).filter(|n| is_power_of_ten(*n)).collect();
        assert_eq!(shown, [1, 10, 100, 1000]);
    }
}
