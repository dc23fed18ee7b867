//! What a worker process does while its daemon says nothing: the head may have given the node up, and started elsewhere what
//! runs here.

use std::sync::Arc;
use std::time::Duration;

use wingbeat_core::NodeId;
use wingbeat_net::limits::limits;
use wingbeat_net::messages::NodeMessage;
use wingbeat_net::mux::{self, Connection};
use wingbeat_process::Process;

use super::queue::Queue;

/// The head is asked so many times within the limit of silence.
const QUESTIONS: u32 = 4;

/// Starts no task or call while the daemon has been silent for longer than [`Limits::silence`](wingbeat_net::limits::Limits::silence), and
/// ends the process if the head has given the node up. Whatever runs goes on until then.
pub(super) async fn keep(queue: Arc<Queue>, connection: Connection, node: NodeId) {
    let mut silence = connection.silence();
    while silence.wait_for(|silent| *silent).await.is_ok() {
        queue.hold(true);
        tokio::select! {
            heard = silence.wait_for(|silent| !*silent) => if heard.is_err() {
                // The connection has ended, and with it this process.
                return;
            },
            () = given_up(queue.session.process(), node) => {
                // Nothing is printed: the daemon that would read it is stopped. With the group goes what user code has
                // started in it; the guard ends the rest.
                let _ = rustix::process::kill_current_process_group(rustix::process::Signal::KILL);
            }
        }
        queue.hold(false);
    }
}

/// Waits until the head says that it does not know the node. One that may not lead is none that could vouch for it.
async fn given_up(process: &Process, node: NodeId) {
    let pause: Duration = limits().silence / QUESTIONS;
    loop {
        if let Some(head) = process.connected_head()
            && let Ok(None | Some(false)) = head.knows_node(mux::within(limits().silence), node).await
        {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

/// Tells the daemon when this process has lost the head, so that it gives it no further leases.
pub(super) async fn report_loss_of_head(process: Process) {
    process.over().await;
    process.tell_node(NodeMessage::LostHead);
}
