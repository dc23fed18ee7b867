//! How a process does what its owner has decided: over its connections.

use std::sync::Arc;

use wingbeat_core::spec::Address;
use wingbeat_core::value::StoreNode;
use wingbeat_core::{ObjectId, ProcessId};
use wingbeat_net::limits::limits;
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, PeerMessage, Registration, Work};

use crate::owner::{Outside, Owner};
use crate::recorded::Event;
use crate::wire::head_link::HeadLink;
use crate::wire::process::{Process, Wire};

impl Wire {
    /// Who answers for the objects of this process when it is no more, once it has a node.
    pub(crate) fn steward(&self) -> Option<&Address> {
        self.steward.get()
    }
}

impl Outside for Wire {
    fn now_ms(&self) -> u64 {
        self.io.now_ms()
    }

    fn learn(&self, address: &Address) {
        self.peers.learn(address);
    }

    fn address_of(&self, process: ProcessId) -> Option<Address> {
        match process == self.who.address.process {
            true => Some(self.address()),
            false => self.peers.last_address(process),
        }
    }

    fn is_gone(&self, process: ProcessId) -> bool {
        self.peers.is_gone(process)
    }

    fn lacks_descriptors(&self) -> Option<String> {
        self.peers.lacks_descriptors.lock().clone()
    }

    fn has_head(&self) -> bool {
        self.head.get().is_some_and(HeadLink::is_here)
    }

    fn has_steward(&self, gone: ProcessId) -> bool {
        self.peers.steward_of(gone).is_some_and(|steward| steward.process != self.who.address.process)
    }

    fn left_to(&self, steward: ProcessId) -> Vec<ProcessId> {
        self.peers.left_to(steward)
    }

    fn tell_steward(&self, owner: &Arc<Owner>, message: PeerMessage) -> bool {
        self.steward.get().is_some_and(|steward| self.send(owner, steward, message))
    }

    fn keeps_for_a_while(&self, owner: &Arc<Owner>, gone: ProcessId) {
        let Some(process) = Process::of(owner) else { return };
        let owner = owner.clone();
        process.vital("what was adopted", async move {
            tokio::time::sleep(limits().adopted).await;
            owner.let_go_of(gone);
        });
    }

    fn has_work_at_home(&self) {
        if let Some(executor) = self.executor.get() {
            executor.has_work_at_home();
        }
    }

    fn send(&self, owner: &Arc<Owner>, to: &Address, message: PeerMessage) -> bool {
        self.record(|| Event::ToProcess(to.process, message.clone()));
        if to.process == self.who.address.process {
            return self.to_itself.send(message).is_ok();
        }
        let Err(message) = self.peers.say(to.process, message) else { return true };
        self.send_in_new_contact(owner, to, message)
    }

    fn send_to(&self, owner: &Arc<Owner>, to: ProcessId, message: PeerMessage, in_a_hurry: bool) -> bool {
        self.record(|| Event::ToProcess(to, message.clone()));
        if to == self.who.address.process {
            return self.to_itself.send(message).is_ok();
        }
        if in_a_hurry && let Some(link) = self.peers.link(to) {
            link.send_in_a_hurry(message);
            return true;
        }
        let Err(message) = self.peers.say(to, message) else { return true };
        match self.peers.address(to) {
            Some(address) => self.send_in_new_contact(owner, &address, message),
            None if message.is_for_owner() && self.has_steward(to) => {
                self.peers.steward_of(to).is_some_and(|steward| self.send(owner, &steward, message))
            }
            None => {
                self.record(|| Event::Unsent(to));
                false
            }
        }
    }

    fn when_taken_in(&self, owner: &Arc<Owner>, by: ProcessId, number: Registration) -> bool {
        let (Some(link), Some(process)) = (self.peers.link_for(by), Process::of(owner)) else { return false };
        process.clone().vital("a registration", process.see_registered(by, link, number));
        true
    }

    fn tell_head(&self, owner: &Arc<Owner>, message: HeadMessage) {
        let Some(head) = self.head.get() else { return };
        self.record(|| Event::ToHead(message.clone()));
        if head.say(message)
            && let Some(process) = Process::of(owner)
        {
            process.reach_head(head);
        }
    }

    fn delete_at(&self, owner: &Arc<Owner>, at: &StoreNode, object: ObjectId) {
        if let Some(process) = Process::of(owner) {
            process.delete_at(at, object);
        }
    }

    fn run(&self, code: Box<dyn FnOnce() + Send>) {
        if let Err((error, code)) = self.questions.run(code) {
            tracing::warn!(%error, "no thread can be started on which `retry_if` is asked: a task fails instead");
            drop(code);
        }
    }

    fn has_ebbed(&self, owner: &Arc<Owner>) {
        if let Some(process) = Process::of(owner) {
            process.give_memory_back();
        }
    }
}

impl Wire {
    /// Says something to a process with which there is no contact. False when it is gone.
    fn send_in_new_contact(&self, owner: &Arc<Owner>, to: &Address, message: PeerMessage) -> bool {
        let Some(process) = Process::of(owner) else { return false };
        let peer = to.process;
        if self.peers.is_gone(peer) {
            if matches!(message, PeerMessage::Work(Work::Tasks { .. } | Work::Calls { .. })) {
                // Somebody waits for their results.
                let owner = process.owner.clone();
                process.vital("the loss of a process", async move { owner.connection_lost(peer) });
            }
            self.record(|| Event::Unsent(peer));
            return false;
        }
        self.peers.learn(to);
        let (link, contact, is_new) = self.peers.link_or_new(peer);
        link.send(message);
        if is_new {
            process.clone().vital("a contact", async move { process.dial_peer(peer, contact).await });
        }
        true
    }
}

impl Process {
    /// Queues a message to a process by id. False when nobody knows where it is, or it is gone.
    pub(crate) fn send_to(&self, to: ProcessId, message: PeerMessage) -> bool {
        self.wire.send_to(&self.owner, to, message, false)
    }

    /// As [`Process::send_to`], for a message that may wait a moment for others to that process.
    pub(crate) fn send_with_others(&self, to: ProcessId, message: PeerMessage) {
        match (self.wire.moment.get(), self.wire.peers.link(to)) {
            (Some(moment), Some(link)) => {
                self.wire.record(|| Event::ToProcess(to, message.clone()));
                link.send_with_others(message, moment);
            }
            _ => drop(self.send_to(to, message)),
        }
    }

    /// Waits until an owner has taken in the registrations that were sent to it. If contact is lost first, whoever sees to
    /// that sees to the rest.
    async fn see_registered(self, with: ProcessId, link: Link<PeerMessage>, mut number: Registration) {
        while link.flushed().await {
            match self.owner.registered(with, number, || !link.is_broken()) {
                Some(next) => number = next,
                None => return,
            }
        }
    }
}
