//! What pretended nodes hear, do and say.

use std::collections::BTreeMap;

use wingbeat_core::error::Error;
use wingbeat_core::spec::Exit;
use wingbeat_core::{Amount, LeaseId, NodeId, ProcessId};
use wingbeat_net::messages::{DeviceInfo, HeadMessage, LeaseHolder, NodeInfo, NodeMessage, Running, WorkerDeath};

use rand::RngExt;

use super::daemon::{Daemon, Phase, Serving, address, worker_of};
use super::world::{Happening, World, holding};
use crate::state::Event;

impl World {
    pub(super) fn new_node(&mut self) -> NodeInfo {
        let id = self.id();
        let kind = self.random.random_range(0..10);
        let (cpus, gpus) = [(4, 0), (8, 0), (16, 0), (64, 0), (8, 0), (4, 0), (16, 2), (32, 4), (64, 8), (2, 0)][kind];
        let zone = ["a", "b", "c"][self.random.random_range(0..3)];
        let mut resources = holding(f64::from(cpus), f64::from(gpus)).with("memory", Amount::whole(cpus * 4));
        if kind == 4 {
            resources.set("license", Amount::whole(2));
        }
        let device = |number: u32| DeviceInfo {
            memory: 80 << 30,
            island: Some(number / 4),
            numa: Some(number / 4),
            ..DeviceInfo::default()
        };
        NodeInfo {
            id: NodeId(id),
            address: address(ProcessId(id)),
            hostname: format!("host{id}"),
            resources,
            devices: (0..gpus).map(device).collect(),
            labels: BTreeMap::from([("zone".to_owned(), zone.to_owned())]),
            store_bytes: 0,
        }
    }

    pub(super) fn node_joins(&mut self, info: NodeInfo) -> Result<(), String> {
        let slowness = if self.chance(20) { 40 } else { 1 };
        self.nodes.insert(info.id, Daemon::new(info.clone(), slowness));
        self.deliver(Event::NodeJoined(Box::new(info), Running::default()))
    }

    /// The head learns that a node is gone; the next time, it is another node.
    pub(super) fn node_lost(&mut self, id: NodeId) -> Result<(), String> {
        let Some(daemon) = self.nodes.remove(&id) else { return Ok(()) };
        self.report.nodes_lost += 1;
        let workers: Vec<ProcessId> = daemon.leases.keys().map(|lease| worker_of(*lease)).collect();
        self.deliver(Event::NodeLost(id, "the simulation".into()))?;
        for worker in workers {
            self.process_gone(worker)?;
        }
        if !self.is_ending {
            let info = NodeInfo { ..self.new_node() };
            let after = self.random.random_range(100..5_000);
            self.schedule(after, Happening::Join(Box::new(info)));
        }
        Ok(())
    }

    pub(super) fn send(&mut self, node: NodeId, message: HeadMessage) {
        let event = Event::Says(node.into(), message);
        let faults = self.config.faults;
        let delay = self.random.random_range(0..4);
        let is_repeated = faults && self.chance(100);
        let Some(daemon) = self.nodes.get_mut(&node) else { return };
        daemon.to_head_at = daemon.to_head_at.max(self.now + delay * if faults { daemon.slowness } else { 1 });
        let after = daemon.to_head_at - self.now;
        if is_repeated {
            self.schedule(after, Happening::ToHead(node, event.clone()));
        }
        self.schedule(after, Happening::ToHead(node, event));
    }

    pub(super) fn node_hears(&mut self, node: NodeId, message: NodeMessage) -> Result<(), String> {
        let fails = self.config.faults && self.chance(200);
        let delay = self.random.random_range(1..8);
        let Some(daemon) = self.nodes.get_mut(&node) else { return Ok(()) };
        let delay = delay * daemon.slowness;
        match message {
            NodeMessage::BeginJob(spec) => drop(daemon.jobs.insert(spec.id)),
            NodeMessage::StartLease(start) => {
                if !daemon.jobs.contains(&start.job) {
                    return Err(format!("{node} was given {} of {}, of which it never heard", start.lease, start.job));
                }
                let lease = start.lease;
                if fails {
                    self.send(node, HeadMessage::LeaseFailed { lease, error: Error::NoSession });
                    return Ok(());
                }
                daemon.leases.insert(lease, Serving { start: *start, phase: Phase::Starting, has_started: None });
                self.schedule(delay, Happening::Started(node, lease));
            }
            NodeMessage::EndLease { lease, kill } => match daemon.leases.get_mut(&lease) {
                None => self.send(node, HeadMessage::LeaseEnded(lease)),
                Some(serving) if kill.is_some() || !serving.start.gpus.is_empty() => {
                    serving.phase = Phase::Dying;
                    self.schedule(delay, Happening::Gone(node, lease));
                }
                Some(_) => {
                    daemon.leases.remove(&lease);
                    self.send(node, HeadMessage::LeaseEnded(lease));
                    self.process_gone(worker_of(lease))?;
                }
            },
            NodeMessage::DrainActor { lease, .. } => {
                if let Some(serving) = daemon.leases.get_mut(&lease) {
                    serving.phase = Phase::Dying;
                    self.schedule(delay, Happening::Gone(node, lease));
                }
            }
            NodeMessage::EndJob { job } => {
                let ended =
                    daemon.leases.iter_mut().filter(|(_, serving)| serving.start.job == job && !serving.is_detached());
                let ended: Vec<LeaseId> = ended
                    .map(|(lease, serving)| {
                        serving.phase = Phase::Dying;
                        *lease
                    })
                    .collect();
                if !daemon.leases.values().any(|serving| serving.start.job == job && serving.is_detached()) {
                    daemon.jobs.remove(&job);
                }
                for lease in ended {
                    self.schedule(delay, Happening::Gone(node, lease));
                }
            }
            NodeMessage::Stop(_) => self.schedule(1, Happening::Lost(node)),
            _ => {}
        }
        Ok(())
    }

    pub(super) fn worker_started(&mut self, node: NodeId, lease: LeaseId) {
        let fails = self.chance(50);
        let Some(serving) = self.nodes.get_mut(&node).and_then(|daemon| daemon.leases.get_mut(&lease)) else { return };
        if serving.phase != Phase::Starting {
            return;
        }
        serving.phase = Phase::Ready;
        let outcome = if fails { Err(Error::NoSession) } else { Ok(()) };
        serving.has_started = Some(outcome.clone());
        let holder = serving.start.holder.clone();
        self.send(node, HeadMessage::LeaseReady { lease, worker: address(worker_of(lease)), pid: 7 });
        if let LeaseHolder::Actor(spec, life) = holder {
            self.send(node, HeadMessage::ActorStarted { actor: spec.id, incarnation: life, outcome });
        }
    }

    /// The worker process of a lease, and all that it started, is gone.
    pub(super) fn worker_gone(&mut self, node: NodeId, lease: LeaseId) {
        let leaks = self.chance(50);
        let Some(daemon) = self.nodes.get_mut(&node) else { return };
        let Some(serving) = daemon.leases.remove(&lease) else { return };
        if serving.phase != Phase::Starting {
            let exit = Exit { code: None, signal: Some(9), stderr: Vec::new(), reason: None };
            let process = worker_of(lease);
            let death = WorkerDeath { process, pid: 7, node, lease: Some(lease), exit, started: 0, is_moved: false };
            self.send(node, HeadMessage::WorkerDied(death));
        }
        if leaks && let Some((device, _)) = serving.start.gpus.first() {
            let device = *device;
            if let Some(daemon) = self.nodes.get_mut(&node) {
                daemon.held.insert(device);
            }
            self.say_held(node);
            let after = self.random.random_range(10..2_000);
            self.schedule(after, Happening::Released(node, device));
        }
        self.send(node, HeadMessage::LeaseEnded(lease));
        // Its own connection breaks at about the same time.
        let worker = worker_of(lease);
        if self.owners.contains_key(&worker) {
            let after = self.random.random_range(0..5);
            self.say_after(worker, after, Event::ProcessLost(worker, None));
        }
    }

    pub(super) fn say_held(&mut self, node: NodeId) {
        let Some(daemon) = self.nodes.get(&node) else { return };
        let held = daemon.held.iter().map(|device| (*device, "somebody".to_owned())).collect();
        self.send(node, HeadMessage::DevicesHeld(held));
    }
}
