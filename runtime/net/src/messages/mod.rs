//! What the parties say to each other.
//!
//! One-way messages travel in batches, in order: through each service's `deliver`, and what the head says through `orders` (to a
//! node) and `head_events`, what a node says to its worker processes through `commands`. What queued while
//! the last batch was being sent goes out as the next. The acknowledgement of a batch says that its
//! messages were taken in, in order; it never waits for user code.
//!
//! - `head`: to and from the head: what processes and nodes tell it, and what it tells processes.
//! - `node`: what a node is, and what it is told.
//! - `peer`: between processes: tasks, results, objects and who holds them.
//! - `worker`: between a worker process and its daemon.
//! - `state`: what people ask of a cluster; `stacks`: and of a process.
//! - `succession`: between a head, its standby and the nodes that decide which of them leads.
//! - `weight`: how large they are, roughly.

mod head;
mod node;
mod peer;
mod stacks;
mod state;
mod succession;
mod weight;
mod worker;

pub use head::*;
pub use node::*;
pub use peer::*;
pub use stacks::*;
pub use state::*;
pub use succession::*;
pub use weight::*;
pub use worker::*;
