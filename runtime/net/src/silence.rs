//! Noticing that the other side of a connection says nothing any more, although it has not ended: its machine is cut off,
//! or it is stopped.

use std::io;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::limits::{self, limits};
use crate::liveness::{Liveness, Verdict};

/// Parts of the silence limit on one machine, where nothing is lost on the way. Each wakes both processes when they are
/// idle.
const LOCAL_PROBES: u32 = 4;
/// Between machines probes may be lost.
const PROBES: u32 = 10;

/// What a connection does about silence. Between machines always as [`Probing::Both`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Probing {
    /// Nothing on one machine, where the kernel says when a process has ended.
    #[default]
    BetweenMachines,
    /// Both sides probe, and either ends a connection on which it has heard nothing for the limit: between the head and
    /// nodes, which may be stopped.
    Both,
    /// Probes for the other side, and expects none from it.
    Sends,
    /// As [`Probing::Both`], and sends no probes: the other side is [`Probing::Sends`]. It ends a connection when whoever is behind it is lost,
    /// and not when it is suspect: between a driver and its node, which keeps its values.
    Expects,
    /// As [`Probing::Expects`], but silence is noted instead ([`crate::mux::Connection::silence`]), and the connection
    /// goes on.
    Notes,
}

/// The silence of one connection.
pub(crate) struct Silence {
    probing: Probing,
    parts: u32,
    noted: watch::Sender<bool>,
}

impl Silence {
    pub(crate) fn new(probing: Probing, between_machines: bool) -> Silence {
        let (probing, parts) = if between_machines { (Probing::Both, PROBES) } else { (probing, LOCAL_PROBES) };
        Silence { probing, parts, noted: watch::Sender::new(false) }
    }

    /// How often a probe is sent now when nothing else is; none for never.
    pub(crate) fn probe_every(&self) -> Option<Duration> {
        matches!(self.probing, Probing::Both | Probing::Sends).then(|| self.part())
    }

    pub(crate) fn noted(&self) -> watch::Receiver<bool> {
        self.noted.subscribe()
    }

    fn part(&self) -> Duration {
        limits::silence() / self.parts
    }

    /// Waits for `read`. Time in which this process itself stood still is not the other side's silence: of however long
    /// that was, one part counts.
    pub(crate) async fn reading(&self, read: impl Future<Output = io::Result<usize>>) -> io::Result<usize> {
        if matches!(self.probing, Probing::BetweenMachines | Probing::Sends) {
            return read.await;
        }
        let mut read = std::pin::pin!(read);
        let mut liveness = Liveness::default();
        loop {
            let (begun, part) = (Instant::now(), self.part());
            if let Ok(read) = tokio::time::timeout(part, &mut read).await {
                self.note(false);
                return read;
            }
            let (took, limits) = (begun.elapsed(), limits());
            liveness.heard_nothing(part, took);
            let verdict = liveness.verdict(limits.silence, limits.lost.max(limits.silence));
            match self.probing {
                // Whoever stood still for so long may have been given up: it waits until it has heard something.
                Probing::Notes => self.note(verdict != Verdict::Alive || took >= limits.silence),
                Probing::Expects if verdict != Verdict::Lost => {}
                _ if verdict != Verdict::Alive => {
                    self.note(true);
                    return Err(io::ErrorKind::TimedOut.into());
                }
                _ => {}
            }
        }
    }

    fn note(&self, silent: bool) {
        self.noted.send_if_modified(|noted| std::mem::replace(noted, silent) != silent);
    }
}
