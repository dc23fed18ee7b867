//! The rules that were there before, for which the world stays: it finds what was wrong with them.

use std::collections::BTreeMap;

use super::super::tests::Pid;
use super::super::*;
use super::{Message, Step, World};

/// A message that waits by the old rule for each of these registrations.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Taken {
    needs: BTreeMap<ProcessId, Registration>,
    then: Later,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Later {
    /// A task was spawned that will take the list and send this.
    Begin(Pid, Message),
    Send(Pid, Message),
    ReleaseBatch(Vec<(ObjectId, Registration)>),
    /// After the look at the table.
    SendReleases(Vec<(ObjectId, Registration)>),
}

/// What a process keeps by the old rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct OldRule {
    unacknowledged: BTreeMap<ProcessId, Registration>,
    acknowledged: BTreeMap<ProcessId, Registration>,
    taken: Vec<Taken>,
}

impl OldRule {
    pub(super) fn registers(&mut self, owner: ProcessId, number: Registration) {
        self.unacknowledged.insert(owner, number);
    }

    pub(super) fn acknowledges(&mut self, owner: ProcessId, up_to: Registration) {
        let known = self.acknowledged.entry(owner).or_default();
        *known = up_to.max(*known);
    }

    fn forget_acknowledged(&mut self) {
        let known = &self.acknowledged;
        self.unacknowledged.retain(|owner, number| known.get(owner) < Some(&*number));
    }

    /// Whether the release loop waits for a batch that it has begun.
    pub(super) fn holds_up_releases(&self) -> bool {
        self.taken.iter().any(|taken| matches!(taken.then, Later::ReleaseBatch(_) | Later::SendReleases(_)))
    }

    /// A step for each message whose registrations were acknowledged.
    pub(super) fn steps(&self, pid: Pid) -> impl Iterator<Item = Step> {
        let is_known = |(owner, number)| self.acknowledged.get(owner) >= Some(number);
        let taken = self.taken.iter().enumerate().filter(move |(_, taken)| taken.needs.iter().all(is_known));
        taken.map(move |(which, _)| Step::GoOn(pid, which))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.taken.is_empty()
    }
}

impl World {
    pub(super) fn confirm_by_taking(&mut self, pid: Pid, to: Pid, message: Message) {
        let old = &mut self.of(pid).old;
        old.forget_acknowledged();
        let is_result = matches!(message, Message::Result { .. });
        if is_result && old.unacknowledged.keys().all(|owner| owner.0 == to) {
            return self.send(pid, to, message);
        }
        old.taken.push(Taken { needs: BTreeMap::new(), then: Later::Begin(to, message) });
    }

    pub(super) fn release_by_taking(&mut self, pid: Pid) {
        let process = self.of(pid);
        let batch = process.released.drain(..).map(|(id, number, _)| (id, number)).collect();
        let needs = std::mem::take(&mut process.old.unacknowledged);
        process.old.taken.push(Taken { needs, then: Later::ReleaseBatch(batch) });
    }

    pub(super) fn go_on(&mut self, pid: Pid, which: usize) {
        let process = self.of(pid);
        match process.old.taken.remove(which).then {
            Later::Begin(to, message) => {
                let needs = std::mem::take(&mut process.old.unacknowledged);
                process.old.taken.push(Taken { needs, then: Later::Send(to, message) });
            }
            Later::Send(to, message) => self.send(pid, to, message),
            Later::ReleaseBatch(mut batch) => {
                batch.retain(|(id, _)| !process.table.contains_key(id));
                process.old.taken.push(Taken { needs: BTreeMap::new(), then: Later::SendReleases(batch) });
            }
            Later::SendReleases(batch) => {
                for (id, _) in batch {
                    // Without a number: it ends whatever the owner knows.
                    self.send(pid, id.owner().0, Message::Release(id, Registration(u64::MAX)));
                }
            }
        }
    }
}
