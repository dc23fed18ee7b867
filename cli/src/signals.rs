//! The signals that ask a command to end.

use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// One that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopSignal {
    /// What has happened, in a word.
    pub what: &'static str,
    pub number: i32,
}

/// Listens for them.
pub(crate) struct Signals(Vec<(StopSignal, Signal)>);

/// What SIGINT does.
pub(crate) const INTERRUPTED: &str = "interrupted";

/// What has happened when a signal comes.
const NAMES: [(&str, SignalKind, &str); 6] = [
    ("SIGINT", SignalKind::interrupt(), INTERRUPTED),
    ("SIGTERM", SignalKind::terminate(), "terminated"),
    ("SIGHUP", SignalKind::hangup(), "hung up"),
    ("SIGQUIT", SignalKind::quit(), "told to quit"),
    ("SIGUSR1", SignalKind::user_defined1(), "got SIGUSR1"),
    ("SIGUSR2", SignalKind::user_defined2(), "got SIGUSR2"),
];

/// Those that torchrun passes on to ranks.
pub(crate) const OF_RUN: [i32; 4] = [2, 15, 1, 3];

/// The number of a signal that can be passed on.
pub(crate) fn by_name(name: &str) -> Result<i32, String> {
    let known = NAMES.iter().find(|(known, _, _)| *known == name.trim());
    let names = NAMES.map(|(name, _, _)| name).join(", ");
    known.map(|(_, kind, _)| kind.as_raw_value()).ok_or_else(|| format!("{name:?} is none of {names}"))
}

impl Signals {
    /// Those that end a daemon.
    pub(crate) fn of_daemon() -> std::io::Result<Signals> {
        Self::of(&OF_RUN[..3])
    }

    /// These. What was to be ignored from the start, as `nohup` has it with SIGHUP, still is; but SIGINT, which shells have
    /// every background job ignore, is heard.
    pub(crate) fn of(numbers: &[i32]) -> std::io::Result<Signals> {
        let ignored = ignored();
        let heard = NAMES.iter().filter(|(_, kind, _)| {
            let number = kind.as_raw_value();
            let is_ignored = *kind != SignalKind::interrupt() && ignored & (1 << (number - 1)) != 0;
            numbers.contains(&number) && !is_ignored
        });
        let listening =
            heard.map(|(_, kind, what)| Ok((StopSignal { what, number: kind.as_raw_value() }, signal(*kind)?)));
        Ok(Signals(listening.collect::<std::io::Result<_>>()?))
    }

    /// The next that comes.
    pub(crate) async fn next(&mut self) -> StopSignal {
        std::future::poll_fn(|cx| {
            let ready = self.0.iter_mut().find_map(|(asked, signal)| signal.poll_recv(cx).is_ready().then_some(*asked));
            ready.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    }
}

/// How much later the second of two signals comes at least: a shell that ends signals its job, and then the system does.
const AGAIN: Duration = Duration::from_secs(1);

/// And after a Ctrl-C: of one, a process may hear twice, from the terminal and from the program that started it. A Python program that
/// waits for it passes it on after a quarter of a second (`subprocess.Popen.wait`).
const CTRL_C_AGAIN: Duration = Duration::from_millis(500);

/// The signals that are passed on to a run.
pub(crate) struct Heard(pub Vec<i32>);

impl Heard {
    /// Calls `told` for the first that comes, and for each that somebody sends again after that: not at once, and not SIGHUP,
    /// of which nobody is there any more to send a second.
    pub(crate) fn block_on_each(self, mut told: impl FnMut(StopSignal, bool)) {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            let Ok(mut signals) = Signals::of(&self.0) else { return };
            let mut first: Option<(Instant, i32)> = None;
            loop {
                let signal = signals.next().await;
                match first {
                    None => {
                        first = Some((Instant::now(), signal.number));
                        told(signal, false);
                    }
                    Some((at, number)) => {
                        let was_ctrl_c = number == SignalKind::interrupt().as_raw_value();
                        let after = if was_ctrl_c { CTRL_C_AGAIN } else { AGAIN };
                        if at.elapsed() >= after && signal.number != SignalKind::hangup().as_raw_value() {
                            told(signal, true);
                        }
                    }
                }
            }
        });
    }
}

/// The signals that this process was to ignore when it started, one bit each.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}
