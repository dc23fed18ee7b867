//! A process that was killed, and that the kernel does not end: what waits for it waits on, and is told why.

use std::fs;
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

impl Daemon {
    /// A process was killed: says so to the node's log and to the driver of its job if it does not end, and again when it has.
    pub(super) async fn follow_to_its_end(self: Arc<Self>, process: ProcessId) {
        let since = Instant::now();
        let following = async {
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
