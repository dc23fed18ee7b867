//! What becomes of the world when something breaks: each fault of a [`schedule`](super::schedule), and what ends a task.

use rand::SeedableRng;
use rand::rngs::StdRng;
use wingbeat_core::error::Error;
use wingbeat_core::resources::GPU;
use wingbeat_core::spec::Outputs;
use wingbeat_core::{Amount, NodeId, ProcessId, ResourceSet, TaskId};
use wingbeat_head::state::{Event, Fact, Speaker};
use wingbeat_net::messages::HeadMessage;

use super::head::NAMESPACE;
use super::schedule::{Fault, Strike, draw, pick};
use super::world::{Happening, World};
use crate::owner::submission::Cancel;

impl World {
    /// Plans all faults of a small cluster.
    pub(super) fn plan_faults(&mut self) {
        for (number, strike) in self.strikes.clone().into_iter().enumerate() {
            if !self.left_out.contains(&number) {
                self.schedule(strike.at, Happening::Strikes(strike));
            }
        }
    }

    /// Something happens, unless every program has ended. What is chance in it, comes from it alone.
    pub(super) fn strikes(&mut self, strike: Strike) {
        if self.drivers.is_empty() {
            return;
        }
        self.shared.trace(|| format!("{:?}", strike.fault));
        let before = self.shared.random.replace(StdRng::seed_from_u64(strike.luck));
        self.suffers(strike.fault);
        self.shared.random.replace(before);
    }

    /// What happens now in a large cluster, where it is not known before.
    pub(super) fn something_happens(&mut self) {
        let mut random = StdRng::seed_from_u64(self.shared.below(u64::MAX));
        let restarts_one_of = self.shared.config.large().map_or(12, |large| (large.nodes / 4).max(12));
        for (fault, luck) in draw(&mut random, &self.shared.config, restarts_one_of) {
            self.strikes(Strike { at: self.shared.now(), fault, luck });
        }
    }

    pub(super) fn maybe_retire(&mut self) {
        if self.shared.below(4) == 0 {
            self.retire_idle_workers();
        }
    }

    /// The time of a task is over, unless it is done.
    pub(super) fn times_out(&mut self, at: ProcessId, task: TaskId, outputs: Outputs) {
        let Some(process) = self.alive(at) else { return };
        if !process.owner.submission.timeouts.end(task) {
            return;
        }
        self.shared.trace(|| format!("the time of {task} is over"));
        self.shared.report.borrow_mut().timeouts += 1;
        self.shared.timed_out.borrow_mut().insert(task.to_string());
        self.shared.cancelled.borrow_mut().insert(task);
        let error = Error::TimedOut { what: task.to_string(), limit_ms: 1 };
        process.owner.fail_outputs(task, outputs, &error);
        process.owner.cancel(Cancel { task, outputs, force: false, again: false });
    }

    fn suffers(&mut self, fault: Fault) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        match fault {
            Fault::Retire => self.retire_idle_workers(),
            Fault::Quota { cpus, gpus, lasts } => self.limit(cpus, gpus, lasts),
            Fault::HeadDies { away } => self.head_dies(away),
            Fault::StandsStill { what, nth, lasts } => self.something_stands_still(what, nth, lasts),
            Fault::Cut { nth } | Fault::Breaks { nth } => {
                let processes: Vec<ProcessId> = self.processes.keys().copied().collect();
                let Some(one) = pick(&processes, nth) else { return };
                let peers = self.processes[&one].side.peers();
                match (pick(&peers, nth / 64), fault) {
                    (Some(other), Fault::Cut { .. }) => self.cut(one, other),
                    (Some(other), _) => self.breaks(one, other),
                    (None, _) => {}
                }
            }
            Fault::WorkerDies { nth } => {
                let workers = self.processes.values().filter(|process| process.is_worker());
                let workers: Vec<ProcessId> = workers.map(|process| process.id).collect();
                if let Some(worker) = pick(&workers, nth) {
                    self.shared.report.borrow_mut().deaths += 1;
                    self.dies(worker);
                }
            }
            Fault::NodeDies { nth }
            | Fault::GivenUp { nth }
            | Fault::Drain { nth, .. }
            | Fault::Full { nth, .. }
            | Fault::MemoryShort { nth, .. }
            | Fault::StartsFail { nth, .. } => {
                if let Some(node) = pick(&nodes, nth) {
                    self.node_suffers(node, fault);
                }
            }
            Fault::JournalFails { lasts } if !self.is_head_away => {
                self.step(Event::JournalFails(Some("the simulation".into())));
                self.schedule(lasts, Happening::CanWrite);
            }
            Fault::DriverLeaves { nth } if self.drivers.len() > 1 => {
                let drivers: Vec<ProcessId> = self.drivers.iter().copied().collect();
                if let Some(driver) = pick(&drivers, nth) {
                    self.driver_leaves(driver);
                }
            }
            Fault::JournalFails { .. } | Fault::DriverLeaves { .. } => {}
        }
    }

    fn node_suffers(&mut self, node: NodeId, fault: Fault) {
        match fault {
            Fault::NodeDies { .. } => {
                self.shared.report.borrow_mut().deaths += 1;
                self.replace(node);
                self.node_dies(node);
            }
            Fault::GivenUp { .. } => self.is_given_up(node),
            Fault::Drain { within, comes_back, .. } => self.drain(node, within, comes_back),
            Fault::Full { lasts, .. } => self.fills(node, lasts),
            Fault::MemoryShort { lasts, .. } => self.memory_is_short(node, lasts),
            Fault::StartsFail { lasts, .. } => self.sickens(node, lasts),
            _ => {}
        }
    }

    /// There is no room in the store of a node for some time, nor on its disk.
    fn fills(&mut self, node: NodeId, lasts: u64) {
        self.shared.report.borrow_mut().fills += 1;
        self.shared.full.borrow_mut().insert(node);
        self.schedule(lasts, Happening::HasRoom(node));
    }

    /// No worker process can be started on a node for some time.
    fn sickens(&mut self, node: NodeId, lasts: u64) {
        self.shared.report.borrow_mut().deaths += 1;
        self.shared.sick.borrow_mut().insert(node);
        self.schedule(lasts, Happening::IsWell(node));
    }

    /// The head's disk has room again.
    pub(super) fn can_write(&mut self) {
        // A head that was started again begins with one that has.
        if !self.is_head_away {
            self.step(Event::JournalFails(None));
        }
    }

    /// A person empties a node, and changes their mind or not.
    fn drain(&mut self, node: NodeId, within: u64, comes_back: Option<u64>) {
        if self.is_head_away || self.waits_for_the_kept() {
            return;
        }
        self.shared.report.borrow_mut().deaths += 1;
        if comes_back.is_none() {
            self.replace(node);
        }
        let (_, actions) =
            self.state.drain(self.head_now(), node, Some(within), "a person".into(), comes_back.is_none());
        self.act(actions);
        if let Some(after) = comes_back {
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
    fn limit(&mut self, cpus: u32, gpus: u32, lasts: u64) {
        if !self.is_head_away && !self.waits_for_the_kept() {
            self.set_quota(Some(ResourceSet::cpus(Amount::whole(cpus)).with(GPU, Amount::whole(gpus))));
            self.schedule(lasts, Happening::EndQuota);
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
