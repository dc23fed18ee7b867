//! How Wingbeat's processes reach each other.
//!
//! - [`address`]: listening and dialling: who may come in, and whom one has reached.
//! - [`transport`]: how connections are made: by unix socket or TCP, or through a pretended network.
//! - `machine`, `stream`: which machine this is, and a connected socket.
//! - `admission`: connections that have not proved the token yet.
//! - [`handshake`]: the first bytes of every connection: protocol version, proof of the token, who is who.
//! - [`mux`]: two tarpc channels over one connection, one each way.
//! - [`faults`]: which kinds of messages there are, and what is done to them to see what follows.
//! - [`descriptors`]: how many this process may have.
//! - `socket`, `outbox`, [`spin`]: a connected socket, what is to be written to it, and waiting awake.
//! - [`messages`] and [`services`]: what is said.
//! - [`limits`] and [`patience`]: how long things may take, and what of that the head says.
//! - [`liveness`]: whether somebody who should be heard is alive.
//! - [`memory`]: what connections hold while they are quiet, and the allocator.
//! - [`silence`]: who probes connections, and what follows from silence.
//! - [`panics`]: of the runtime's own tasks, which nobody may miss.
//! - [`threads`]: work that may block.
//! - [`recording`]: what a head or a node took in, or a process heard and said, in a file.
//! - [`way`]: the way to the head, which may be started again.
//! - [`sequence`] and [`link`]: one-way messages to a peer, in order and once, over any number of connections; [`moment`]: those that wait
//!   for others.
//! - [`peer_process`]: the end of the process that has dialled; `staggered`: several attempts, one after the other and beside each other.
//!
//! A connection ends when either side closes it or, over TCP, when nothing was heard for
//! [`limits::Limits::silence`]. Whoever uses a connection learns of its end through [`mux::Connection::closed`].

pub mod address;
mod admission;
pub mod descriptors;
pub mod faults;
pub mod handshake;
pub mod limits;
pub mod link;
pub mod liveness;
mod machine;
pub mod memory;
pub mod messages;
pub mod moment;
pub mod mux;
mod outbox;
pub mod panics;
pub mod patience;
pub mod peer_process;
pub mod recording;
pub mod seek;
pub mod sequence;
pub mod services;
pub mod silence;
mod socket;
pub mod spin;
mod staggered;
mod stream;
pub mod threads;
pub mod transport;
pub mod way;

pub use handshake::{Hello, Purpose, Role, Token};
pub use mux::Connection;
