//! The connections of a process: other processes, the head, its node. It does what the process's owner decides
//! ([`Outside`](crate::owner::Outside)), and tells the owner what others say.
//!
//! - [`process`]: what takes part, its start and its end; `outside`: what the owner has it do; [`io`]: its thread.
//! - `peers`: what is known of other processes; `contact`: how they are reached, over any number of connections; [`service`]:
//!   what they say.
//! - [`head_link`], `head`; [`node_link`], `storage`, [`view`]: values in shared memory; `to_delete`, `deletions`; `watched`:
//!   placement groups.
//! - [`executor`]: what a worker process adds.

mod contact;
mod deletions;
pub(crate) mod executor;
mod head;
pub(crate) mod head_link;
pub(crate) mod io;
pub(crate) mod looks;
pub(crate) mod node_link;
pub(crate) mod numbers;
mod outside;
mod peers;
#[cfg(test)]
pub(crate) mod pretended_node;
pub(crate) mod process;
pub(crate) mod service;
pub(crate) mod steward;
mod storage;
mod to_delete;
pub(crate) mod view;
pub(crate) mod watched;
