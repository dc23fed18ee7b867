//! What may happen at any time.

use wingbeat_core::resources::GPU;
use wingbeat_core::{Amount, NodeId, ProcessId, ResourceSet};
use wingbeat_head::state::{Event, Fact, Speaker};
use wingbeat_net::messages::HeadMessage;

use super::head::NAMESPACE;
use super::world::{Happening, World};

impl World {
    pub(super) fn chance(&mut self) {
        if self.shared.config.large().is_some() || self.shared.now() > self.faults_end || self.drivers.is_empty() {
            return;
        }
        self.something_happens();
        let after = 1 + self.shared.below(80);
        self.schedule(after, Happening::Chance);
    }

    pub(super) fn something_happens(&mut self) {
        self.maybe_retire();
        if self.shared.below(20) == 0 {
            self.limit();
        }
        if self.shared.config.restarts && self.shared.below(self.restarts_one_of()) == 0 {
            self.head_dies();
        }
        if (self.shared.config.restarts || self.shared.config.faults) && self.shared.below(8) == 0 {
            self.something_stands_still();
        }
        if self.shared.config.faults {
            self.something_breaks();
        }
    }

    /// At one chance of so many the head dies.
    fn restarts_one_of(&self) -> u64 {
        self.shared.config.large().map_or(12, |large| (large.nodes / 4).max(12))
    }

    pub(super) fn maybe_retire(&mut self) {
        if self.shared.below(4) == 0 {
            self.retire_idle_workers();
        }
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> Option<T> {
        (!of.is_empty()).then(|| of[self.shared.below(of.len() as u64) as usize])
    }

    fn something_breaks(&mut self) {
        let processes: Vec<ProcessId> = self.processes.keys().copied().collect();
        match self.shared.below(40) {
            0..=14 => {
                if let Some(one) = self.pick(&processes) {
                    let peers = self.processes[&one].side.peers();
                    if let Some(other) = self.pick(&peers) {
                        match self.shared.below(2) {
                            0 => self.cut(one, other),
                            _ => self.breaks(one, other),
                        }
                    }
                }
            }
            15..=19 => {
                let workers: Vec<ProcessId> =
                    self.processes.values().filter(|process| process.is_worker()).map(|process| process.id).collect();
                if let Some(worker) = self.pick(&workers) {
                    self.shared.report.borrow_mut().deaths += 1;
                    self.dies(worker);
                }
            }
            20 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.shared.report.borrow_mut().deaths += 1;
                    self.replace(node);
                    self.node_dies(node);
                }
            }
            26 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.is_given_up(node);
                }
            }
            22 | 23 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.drain(node);
                }
            }
            24 | 25 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.fills(node);
                }
            }
            27 if !self.is_head_away => {
                self.step(Event::JournalFails(Some("the simulation".into())));
                let after = self.shared.below(400);
                self.schedule(after, Happening::CanWrite);
            }
            21 if self.drivers.len() > 1 => {
                let drivers: Vec<ProcessId> = self.drivers.iter().copied().collect();
                if let Some(driver) = self.pick(&drivers) {
                    self.driver_leaves(driver);
                }
            }
            _ => {}
        }
    }

    /// There is no room in the store of a node for some time, nor on its disk.
    fn fills(&mut self, node: NodeId) {
        self.shared.report.borrow_mut().fills += 1;
        self.shared.full.borrow_mut().insert(node);
        let after = self.shared.below(400);
        self.schedule(after, Happening::HasRoom(node));
    }

    /// The head's disk has room again.
    pub(super) fn can_write(&mut self) {
        // A head that was started again begins with one that has.
        if !self.is_head_away {
            self.step(Event::JournalFails(None));
        }
    }

    /// A person empties a node, and changes their mind or not.
    fn drain(&mut self, node: NodeId) {
        if self.is_head_away || self.waits_for_the_kept() {
            return;
        }
        self.shared.report.borrow_mut().deaths += 1;
        let (within, comes_back) = (self.shared.below(300), self.shared.below(3) > 0);
        if !comes_back {
            self.replace(node);
        }
        let (_, actions) = self.state.drain(self.head_now(), node, Some(within), "a person".into(), !comes_back);
        self.act(actions);
        if comes_back {
            let after = self.shared.below(600);
            self.schedule(after, Happening::EndDrain(node));
        }
    }

    pub(super) fn end_drain(&mut self, node: NodeId) {
        if self.is_head_away || self.waits_for_the_kept() {
            // People ask again.
            return self.schedule(500, Happening::EndDrain(node));
        }
        let (answer, actions) = self.state.drain(self.head_now(), node, None, String::new(), false);
        self.act(actions);
        if answer.is_err() && self.nodes.contains_key(&node) {
            // It is not back.
            self.schedule(500, Happening::EndDrain(node));
        }
    }

    /// All that runs may hold so much only, for some time.
    fn limit(&mut self) {
        if !self.is_head_away && !self.waits_for_the_kept() {
            let (cpus, gpus) = (3 + self.shared.below(4) as u32, 1 + self.shared.below(4) as u32);
            self.set_quota(Some(ResourceSet::cpus(Amount::whole(cpus)).with(GPU, Amount::whole(gpus))));
            let after = self.shared.below(500);
            self.schedule(after, Happening::EndQuota);
        }
    }

    fn set_quota(&mut self, quota: Option<ResourceSet>) {
        self.grants.limited_to(quota.clone());
        self.shared.was_limited.set(true);
        let actions = self.state.quota(self.head_now(), NAMESPACE, quota);
        self.act(actions);
    }

    pub(super) fn end_quota(&mut self) {
        match self.is_head_away || self.waits_for_the_kept() {
            true => self.schedule(500, Happening::EndQuota),
            false => self.set_quota(None),
        }
    }

    /// Somebody ends what outlives its driver.
    pub(super) fn kill_detached_actors(&mut self) {
        let detached = self.facts.values().filter_map(|fact| match fact {
            Fact::Actor(actor) if actor.spec.detached => Some(actor.spec.id),
            _ => None,
        });
        for actor in detached.collect::<Vec<_>>() {
            let by = Speaker::Process(ProcessId(0));
            self.step(Event::Says(by, HeadMessage::KillActor { actor, may_restart: false }));
        }
        self.come_to_rest();
    }

    /// Nodes look for worker processes that are not worth keeping.
    pub(super) fn retire_idle_workers(&mut self) {
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.node_steps(node, wingbeat_node::Event::Tick);
        }
    }
}
