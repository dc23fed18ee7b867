//! A process that was killed, and that the kernel does not end: what waits for it waits on, and is told why.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wingbeat_core::ProcessId;
use wingbeat_net::link::Link;
use wingbeat_net::messages::LogLine;

use super::Daemon;

/// People are told of a process that is still there so long after it was killed. Others end within milliseconds; to give back a large
/// memory takes up to a second.
const SHOWN_AFTER: Duration = Duration::from_secs(5);
/// How often it is looked at from then on.
const THEN_EVERY: Duration = Duration::from_secs(1);
/// A guard that could not be asked to kill one is asked again after so long.
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(50);

impl Daemon {
    /// The guard was `asked` to kill a process: asks again until it has heard that. Says to the node's log and to the driver of its job if the
    /// process does not end, and again when it has.
    pub(super) async fn follow_to_its_end(self: Arc<Self>, process: ProcessId, asked: io::Result<()>) {
        let since = Instant::now();
        let following = async {
            let is_there = || self.pool.lock().processes.get(&process).is_some_and(|known| known.gone.is_none());
            until_heard(process, asked, || self.guard.kill(process), is_there).await;
            tokio::time::sleep(SHOWN_AFTER).await;
            // Nothing is known of it once it has ended.
            let Some((pid, log)) = self.while_it_is_there(process) else { return };
            let say = |text: String| {
                tracing::warn!(%process, "{text}");
                let Some(log) = &log else { return };
                log.send(LogLine {
                    pid,
                    source: "wingbeat".into(),
                    node: self.who.hostname.clone(),
                    is_stderr: true,
                    text,
                });
            };
            let why = what_holds(pid);
            say(format!(
                "process {pid} was killed {SHOWN_AFTER:?} ago and has not ended: {why}. Until it has, its CPUs and GPUs are not free, and who waits for it waits on"
            ));
            while self.while_it_is_there(process).is_some() {
                tokio::time::sleep(THEN_EVERY).await;
            }
            say(format!("process {pid} has ended, {} s after it was killed", since.elapsed().as_secs()));
        };
        self.until_ended(following).await;
    }

    /// Its number, and the way to the driver of its job. None if it was never started, or has ended.
    fn while_it_is_there(&self, process: ProcessId) -> Option<(u32, Option<Link<LogLine>>)> {
        let pool = self.pool.lock();
        let known = pool.processes.get(&process).filter(|known| known.gone.is_none())?;
        let pid = Some(pool.state.pid_of(process)).filter(|pid| *pid != 0)?;
        Some((pid, pool.logs.get(&known.job).cloned()))
    }
}

/// Asks until it is heard, or nobody is there any more of whom it is asked.
async fn until_heard(
    process: ProcessId,
    mut asked: io::Result<()>,
    ask: impl Fn() -> io::Result<()>,
    is_there: impl Fn() -> bool,
) {
    if let Err(error) = &asked {
        tracing::warn!(%error, %process, "the guard cannot be asked to end a worker process now, and will be asked again");
    }
    while asked.is_err() && is_there() {
        tokio::time::sleep(ASKED_AGAIN_AFTER).await;
        asked = ask();
    }
}

/// What the kernel says of the threads of a process that should have ended.
fn what_holds(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut holds = threads.filter_map(|thread| what_holds_thread(&thread.path()));
    holds.next().unwrap_or_else(|| "the kernel does not say why".to_owned())
}

fn what_holds_thread(thread: &Path) -> Option<String> {
    let status = fs::read_to_string(thread.join("status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if let Some(debugger) = field("TracerPid:").filter(|pid| *pid != "0") {
        return Some(format!("process {debugger} debugs it, and has not let go of it"));
    }
    if !field("State:")?.starts_with('D') {
        return None;
    }
    let place = fs::read_to_string(thread.join("wchan")).unwrap_or_default();
    Some(match place.as_str() {
        "" | "0" => "it waits for a disk or a device that does not answer".to_owned(),
        place => format!("it waits for a disk or a device that does not answer, in the kernel's {place}"),
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_guard_that_takes_nothing_is_asked_until_it_has_heard() {
        let full = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        let asked = Cell::new(0);
        let ask = || {
            asked.set(asked.get() + 1);
            if asked.get() < 3 { full() } else { Ok(()) }
        };
        until_heard(ProcessId(7), full(), ask, || true).await;
        assert_eq!(asked.get(), 3);
        // What was heard is not asked again.
        until_heard(ProcessId(7), Ok(()), ask, || true).await;
        assert_eq!(asked.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn of_a_process_that_has_ended_nothing_is_asked() {
        let never = || -> io::Result<()> { panic!("nobody is there") };
        until_heard(ProcessId(7), Err(io::Error::from_raw_os_error(libc::ENOBUFS)), never, || false).await;
    }
}
