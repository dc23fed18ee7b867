//! Clusters for tests: a head and nodes, each a process of the test's own executable.
//!
//! ```text
//!   test ── supervisor ── head
//!        ── supervisor ── node daemon ── guard …
//! ```
//!
//! - [`process`]: starts one such process, and ends it.
//! - `entry`: how the executable becomes one, before `main`.
//! - `supervisor`: the small process between the test and a daemon, which sees the end of either.
//! - `daemon`: the head or the node.
//! - [`log`]: what they write.
//! - [`network`]: machines that are pretended, and can be cut off.
//!
//! A test and a supervisor have a socket in common, the lifeline. When it closes, because the test drops its end or has ended in whatever way,
//! the supervisor kills the daemon, waits until everything below it is gone, and ends.

mod daemon;
mod entry;
pub mod log;
pub mod network;
pub mod process;
mod supervisor;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use wingbeat_core::NodeId;
use wingbeat_net::patience::Patience;

use crate::offer::Offer;

/// What a process is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A head.
    Head {
        /// Where it listens; with port 0 where the system chooses.
        at: SocketAddr,
        /// How long silence is borne in its cluster.
        patience: Patience,
    },
    /// A node.
    Node {
        /// The head, as `host:port`.
        head: String,
        /// What it offers.
        offer: Box<Offer>,
    },
}

/// What a process is told when it starts.
#[derive(Serialize, Deserialize)]
struct Start {
    role: Role,
    token: String,
}

/// What a process says when it is there, or cannot be.
#[derive(Serialize, Deserialize)]
enum Started {
    /// It is there.
    Ready {
        pid: u32,
        ready: Ready,
    },
    Failed(String),
}

/// What a process has become.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Ready {
    /// A head, which listens there.
    Head(SocketAddr),
    /// This node.
    Node(NodeId),
}
