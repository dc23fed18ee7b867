//! Output of user code on the driver's terminal: prefixed with where it comes from, repeats folded.

use std::io::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use wingbeat_net::messages::LogLine;

/// Shows lines.
pub(crate) struct Terminal {
    last: Mutex<Option<Repeated>>,
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
    text: String,
    is_stderr: bool,
    times: u32,
}

impl Terminal {
    /// One that gives what user code has written to `output`, if that is there.
    pub(crate) fn of(output: Option<Output>) -> Terminal {
        Terminal { last: Mutex::default(), output }
    }

    fn print(&self, is_stderr: bool, text: &str) {
        match &self.output {
            Some(Output(take)) => take(text),
            None => print(is_stderr, text),
        }
    }

    pub(crate) fn show(&self, lines: Vec<LogLine>) {
        let mut last = self.last.lock();
        for line in lines {
            match &mut *last {
                Some(repeated) if repeated.text == line.text && repeated.is_stderr == line.is_stderr => {
                    repeated.times += 1;
                    // Said at each power of ten, so that a flood is short and a stall is seen.
                    if is_power_of_ten(repeated.times) {
                        let more =
                            if repeated.times == 1 { "once".to_owned() } else { format!("{} times", repeated.times) };
                        let source = short(&line.source);
                        self.print(line.is_stderr, &format!("({source}) … the last line came {more} more"));
                    }
                }
                _ => {
                    let source = short(&line.source);
                    self.print(line.is_stderr, &format!("({source} pid={}, {}) {}", line.pid, line.node, line.text));
                    *last = Some(Repeated { text: line.text, is_stderr: line.is_stderr, times: 0 });
                }
            }
        }
    }
}

impl Terminal {
    /// Shows what the runtime itself has to say, on the terminal in any case: it may be why nothing else is shown.
    pub(crate) fn say(&self, text: &str) {
        // What comes next repeats nothing.
        *self.last.lock() = None;
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
    use super::*;

    #[test]
    fn repeats_are_counted_at_powers_of_ten() {
        let shown: Vec<u32> = (1..=1000).filter(|n| is_power_of_ten(*n)).collect();
        assert_eq!(shown, [1, 10, 100, 1000]);
    }
}
