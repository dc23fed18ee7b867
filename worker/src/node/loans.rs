//! The store's memory in drivers, for as long as anything there can touch it.
//!
//! A driver's control connection ends with its session, or with what breaks connections, while views that user code has taken live on,
//! and while another thread still fills a new object. So the driver's mapping keeps the socket over which the memory was sent
//! (`Mapping::open_leased`), and what the driver has pinned and not sealed is taken back when that is closed: by the last view,
//! or by the kernel when the process has ended. A process that the driver has forked has the mapping and the socket, too.
//!
//! Worker processes need none of this: what they have is taken back when they have ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use wingbeat_core::ProcessId;

use super::{Daemon, send_arena};

/// How many mappings each driver has: it may come back and map the memory again while views of its first mapping live, and both
/// have the same pins. An entry ends with the last of them.
#[derive(Default)]
pub(super) struct Loans(Mutex<BTreeMap<ProcessId, u64>>);

impl Daemon {
    /// Lends the memory to a driver, and takes back what the driver holds there when it has nothing mapped any more.
    pub(super) async fn lend_memory(self: &Arc<Self>, stream: UnixStream, driver: ProcessId) {
        let arena = {
            let mut loans = self.loans.0.lock();
            *loans.entry(driver).or_default() += 1;
            self.store.attach(driver)
        };
        match send_arena(&stream, arena) {
            Ok(()) => {
                let mut ended = self.ending.ended.subscribe();
                tokio::select! {
                    () = closed(stream) => {}
                    // The store ends with the daemon, which gives nothing of it to others any more.
                    _ = ended.wait_for(Option::is_some) => return,
                }
            }
            Err(error) => tracing::warn!(%error, "cannot hand out the store's memory"),
        }
        {
            let mut loans = self.loans.0.lock();
            let left = loans.get(&driver).map_or(0, |loans| loans.saturating_sub(1));
            if left > 0 {
                loans.insert(driver, left);
                return;
            }
            loans.remove(&driver);
            self.store.process_gone(driver);
        }
        self.object_settled();
    }
}

/// Waits until nobody has the other end any more. Nothing is said there.
async fn closed(mut stream: UnixStream) {
    while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {}
}
