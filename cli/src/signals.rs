//! The signals that ask a command to end.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// One that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// What has happened, in a word.
    pub what: &'static str,
    pub number: i32,
}

/// Listens for them.
pub(crate) struct Signals(Vec<(Asked, Signal)>);

const OF_DAEMONS: [(&str, SignalKind); 3] =
    [("interrupted", SignalKind::interrupt()), ("terminated", SignalKind::terminate()), ("hung up", SignalKind::hangup())];

impl Signals {
    /// Those that end a daemon. What was to be ignored from the start, as `nohup` has it with SIGHUP, still is; but SIGINT,
    /// which shells have every background job ignore, is heard.
    pub(crate) fn of_daemon() -> std::io::Result<Signals> {
        Self::of(&OF_DAEMONS)
    }

    /// Those that torchrun passes on to ranks.
    pub(crate) fn of_run() -> std::io::Result<Signals> {
        Self::of(&[OF_DAEMONS.as_slice(), &[("told to quit", SignalKind::quit())]].concat())
    }

    fn of(all: &[(&'static str, SignalKind)]) -> std::io::Result<Signals> {
        let ignored = ignored();
        let heard = all.iter().filter(|(_, kind)| {
            *kind == SignalKind::interrupt() || ignored & (1 << (kind.as_raw_value() - 1)) == 0
        });
        let listening = heard.map(|(what, kind)| Ok((Asked { what, number: kind.as_raw_value() }, signal(*kind)?)));
        Ok(Signals(listening.collect::<std::io::Result<_>>()?))
    }

    /// The next that comes.
    pub(crate) async fn next(&mut self) -> Asked {
        std::future::poll_fn(|cx| {
            let ready = self.0.iter_mut().find_map(|(asked, signal)| signal.poll_recv(cx).is_ready().then_some(*asked));
            ready.map_or(std::task::Poll::Pending, std::task::Poll::Ready)
        })
        .await
    }
}

/// The signals that this process was to ignore when it started, one bit each.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}
