//! Memory is short on a node for a while: the real watch says who ends for that.

use std::collections::BTreeSet;

use wingbeat_core::error::Error;
use wingbeat_core::memory::{EndedBy, MemoryShortage, MemoryUsage};
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_node as node;
use wingbeat_node::memory::{Sample, User, Verdict, Work};

use super::execution::Shared;
use super::world::{Happening, World};

/// How often a node looks.
const LOOKS_EVERY: u64 = 250;
const GIB: u64 = 1 << 30;
const LIMIT: u64 = 16 * GIB;
const THRESHOLD: u64 = 15 * GIB;

impl World {
    pub(super) fn memory_is_short(&mut self, id: NodeId, lasts: u64) {
        let until = self.shared.now() + lasts;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.memory.short_until = until;
        if !std::mem::replace(&mut node.memory.is_watched, true) {
            self.schedule(0, Happening::LooksAtMemory(id));
        }
    }

    /// A node looks how much memory is left. Once more when there is enough.
    pub(super) fn looks_at_memory(&mut self, id: NodeId) {
        let now = self.shared.now();
        let Some(node) = self.nodes.get(&id) else { return };
        let is_short = now < node.memory.short_until;
        let used = if is_short { THRESHOLD + GIB / 2 } else { GIB };
        let usage = MemoryUsage { of: "the simulation".into(), limit: LIMIT, used, threshold: THRESHOLD, store: 0 };
        let users: Vec<User> = node.state.users_of_memory().map(|(user, _)| self.use_of(user)).collect();
        let is_ending = node.state.is_ending_for_memory();
        let hostname = node.info.hostname.clone();
        let sample = Sample { usage: usage.clone(), users: Some(users.clone()), is_ending, store_gives: false };
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let verdict = node.memory.watch.look(now, &sample);
        node.memory.is_watched = is_short;
        self.shared.trace(|| format!("{id} looks at its memory: {verdict:?}"));
        if is_short {
            self.schedule(LOOKS_EVERY, Happening::LooksAtMemory(id));
        }
        let process = match verdict {
            Verdict::End(process, _) => {
                self.shared.ended_for_memory.borrow_mut().insert(process);
                let mut report = self.shared.report.borrow_mut();
                report.deaths += 1;
                report.shortages += 1;
                process
            }
            Verdict::Retire(process) => process,
            Verdict::Enough | Verdict::Relieve(_) | Verdict::Helpless => return,
        };
        let Some(user) = users.into_iter().find(|user| user.process == process) else { return };
        let shortage = MemoryShortage { node: id, hostname, by: EndedBy::Node, usage, largest: Vec::new() };
        let is_leaving = user.work == Work::Leaving;
        let ran_out =
            node::Event::MemoryRanOut { process, lease: user.lease, is_leaving, shortage: Box::new(shortage) };
        self.node_steps(id, ran_out);
    }

    /// What a process uses, and what it runs.
    fn use_of(&self, user: User) -> User {
        let bytes = GIB + user.process.0 % 3 * GIB / 2;
        let Some(process) = self.processes.get(&user.process) else { return User { bytes, ..user } };
        let queue = process.queue.borrow();
        let work = match user.work {
            Work::Tasks { owner, .. } => {
                let yields = queue.running.as_ref().is_some_and(|running| running.spec.yields_memory);
                Work::Tasks { owner, yields }
            }
            other => other,
        };
        User { started: queue.started, bytes, work, ..user }
    }
}

impl Shared {
    /// Whether memory was short where this says so, and a task has used up all its retries of that.
    pub(super) fn explains_shortage(&self, error: &Error) -> bool {
        let Error::OutOfMemory { task, process, .. } = error else { return false };
        let ended: BTreeSet<ProcessId> = self.ended_for_memory.borrow().clone();
        // What had begun in such a process may have been done, and its result lost.
        let begun = self.begun_in.borrow();
        let of_task = begun.iter().filter(|((id, _), process)| ended.contains(process) && id.to_string() == *task);
        let allowed = self.memory_retries.borrow().get(task).copied().unwrap_or(0);
        ended.contains(process)
            && (of_task.count() > allowed as usize || !self.memory_retries.borrow().contains_key(task))
    }
}
