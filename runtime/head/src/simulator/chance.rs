//! What may happen at any time.

use std::collections::BTreeMap;

use rand::RngExt;
use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::*;
use wingbeat_core::*;
use wingbeat_net::messages::HeadMessage;

use super::daemon::{Phase, address, worker_of};
use super::owner::Owner;
use super::world::{DRIVERS, Happening, World, holding};
use crate::state::Event;

impl World {
    pub(super) fn shape(&mut self) -> Shape {
        let resources = match self.random.random_range(0..14) {
            0..=5 => holding(1.0, 0.0),
            6 => holding(4.0, 0.0),
            7 => holding(0.5, 0.0),
            8 => holding(1.0, 1.0),
            9 => holding(0.0, 0.25),
            10 => holding(2.0, 2.0),
            11 => holding(1.0, 0.0).with("memory", Amount::whole(8)),
            12 => holding(1.0, 0.0).with("license", Amount::ONE),
            _ => holding(8.0, 4.0),
        };
        let mut shape = Shape { patient: self.chance(2), ..Shape::of(resources) };
        match self.random.random_range(0..12) {
            0 => shape.strategy = Strategy::Spread,
            1 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().take(32).collect();
                if let Some(node) = self.pick(&nodes) {
                    shape.strategy = Strategy::Node { node, soft: self.chance(2) };
                }
            }
            2 => shape.labels = vec!["zone=a".parse().unwrap_or_default()],
            3 => {
                let rules = ["zone in (a)", "zone != a"].map(|rule| rule.parse().unwrap_or_default());
                shape.labels = rules.to_vec();
            }
            4 | 5 => {
                let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
                if let Some(group) = self.pick(&groups) {
                    let index = self.chance(2).then(|| self.random.random_range(0..3));
                    shape.strategy = Strategy::Bundle { group, index };
                }
            }
            6 if shape.resources.get(GPU).is_zero() => shape.gpu_memory = 20 << 30,
            _ => {}
        }
        shape
    }

    pub(super) fn something_new(&mut self) -> Result<(), String> {
        let owners: Vec<ProcessId> = self.owners.keys().copied().collect();
        let Some(process) = self.pick(&owners) else { return self.new_driver() };
        let drivers: Vec<ProcessId> =
            self.owners.iter().filter(|(_, owner)| owner.job.is_some()).map(|(process, _)| *process).collect();
        // As much work as there are nodes for it.
        let scale = (self.config.nodes as u32 / 32).clamp(1, 100);
        match self.random.random_range(0..100) {
            0..=39 => {
                let shape = self.shape();
                let more =
                    self.random.random_range(1..20) * if self.owners[&process].job.is_some() { scale } else { 1 };
                if let Some(owner) = self.owners.get_mut(&process) {
                    let backlog = owner.demands.entry(shape.clone()).or_default();
                    // Nobody piles up work for ever.
                    backlog.left = (backlog.left + more).min(30 * scale);
                }
                self.demand(process, &shape);
            }
            40..=49 => self.new_actor(process)?,
            50..=54 => {
                if let Some(actor) = self.pick_actor() {
                    let may_restart = self.chance(2);
                    self.say(process, HeadMessage::KillActor { actor, may_restart });
                }
            }
            55..=58 => {
                if let Some(actor) = self.pick_actor() {
                    self.say(process, HeadMessage::TerminateActor { actor, by: "the simulation".into() });
                }
            }
            59..=68 => self.new_group(process)?,
            69..=76 => {
                let groups: Vec<PlacementGroupId> = self.groups.keys().copied().collect();
                if let Some(group) = self.pick(&groups) {
                    self.ask(|state, now| ((), state.remove_placement_group(now, group)))?;
                }
            }
            77..=80 => self.new_owner()?,
            81 | 82 => {
                let namespace = format!("team{}", self.random.random_range(0..4));
                let cpus = f64::from(self.random.random_range(8..32 * scale));
                let limit = self.chance(2).then(|| holding(cpus, cpus / 8.0));
                match &limit {
                    Some(limit) => drop(self.quotas.insert(namespace.clone(), limit.clone())),
                    None => drop(self.quotas.remove(&namespace)),
                }
                self.ask(|state, now| ((), state.quota(now, &namespace, limit)))?;
            }
            83 | 84 => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes).filter(|node| self.nodes[node].is_connected) {
                    let within = (!self.chance(3)).then(|| self.random.random_range(0..2_000));
                    let stops = self.chance(4);
                    // The head may know already that the node is gone.
                    let _ = self.ask(|state, now| state.drain(now, node, within, "test".into(), stops))?;
                }
            }
            85 if drivers.len() > DRIVERS as usize / 2 => {
                if let Some(driver) = self.pick(&drivers) {
                    self.process_gone(driver)?;
                }
            }
            86 if drivers.len() < DRIVERS as usize => self.new_driver()?,
            87..=89 => self.crash_a_worker(),
            90 if self.config.faults => {
                let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
                if let Some(node) = self.pick(&nodes) {
                    self.cut_off(node)?;
                }
            }
            91 if self.config.faults && self.chance(40) => self.restart_head()?,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn pick_actor(&mut self) -> Option<ActorId> {
        let at = (!self.actors.is_empty()).then(|| self.random.random_range(0..self.actors.len()))?;
        Some(self.actors.swap_remove(at))
    }

    pub(super) fn new_actor(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(job) = self.job_of(process) else { return Ok(()) };
        let id = self.id();
        let mut placement = self.shape();
        let holds = if self.chance(3) { ResourceSet::new() } else { placement.resources.clone() };
        if placement.gpu_memory == 0 && holds.is_empty() {
            placement.resources.set(CPU, Amount::ONE);
            placement.resources.set(GPU, Amount::ZERO);
        }
        let name = self.chance(3).then(|| ScopedName { namespace: job.namespace.clone(), name: format!("actor{id}") });
        let spec = ActorSpec {
            id: ActorId(id),
            job: job.id,
            class: FunctionId(7),
            class_name: "Counter".into(),
            args: Vec::new(),
            placement,
            holds,
            max_restarts: [0, 1, 3, u32::MAX][self.random.random_range(0..4)],
            max_concurrency: 1,
            max_pending_calls: None,
            groups: BTreeMap::new(),
            detached: name.is_some() && self.chance(3),
            yields_to_drain: self.chance(5),
            name,
            handle: TaskId { owner: process, seq: id }.output(0),
            owner: address(process),
        };
        self.report.actors += 1;
        self.actors.push(ActorId(id));
        if let Some(owner) = self.owners.get_mut(&process) {
            owner.actors.insert(ActorId(id));
        }
        // What can never be is refused: that is an answer, too.
        let _ = self.ask(|state, now| state.create_actor(now, spec, false))?;
        self.say(process, HeadMessage::WatchActor(ActorId(id)));
        Ok(())
    }

    pub(super) fn job_of(&self, process: ProcessId) -> Option<JobSpec> {
        let owner = self.owners.get(&process)?;
        if let Some(job) = &owner.job {
            return Some(job.clone());
        }
        let job = self.granted.get(&owner.lease?)?.start.job;
        self.owners.values().filter_map(|owner| owner.job.as_ref()).find(|spec| spec.id == job).cloned()
    }

    pub(super) fn new_group(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(job) = self.job_of(process) else { return Ok(()) };
        let id = PlacementGroupId(self.id());
        let count = if self.chance(3) { 1 } else { self.random.random_range(1..6) };
        let each = match self.random.random_range(0..5) {
            0 | 1 => holding(1.0, 0.0),
            2 => holding(4.0, 0.0),
            3 => holding(1.0, 1.0),
            _ => holding(0.0, 0.5),
        };
        let labels = if self.chance(6) { vec!["zone=b".parse().unwrap_or_default()] } else { Vec::new() };
        let bundle = BundleSpec { resources: each, gpu_memory: 0, labels };
        let name =
            self.chance(3).then(|| ScopedName { namespace: job.namespace.clone(), name: format!("group{}", id.0) });
        let spec = PlacementGroupSpec {
            id,
            job: job.id,
            detached: name.is_some() && self.chance(3),
            name,
            strategy: [
                PlacementStrategy::Pack,
                PlacementStrategy::Spread,
                PlacementStrategy::StrictPack,
                PlacementStrategy::StrictSpread,
            ][self.random.random_range(0..4)],
            bundles: vec![bundle; count],
            captures_children: self.chance(2),
            patient: self.chance(2),
            owner: address(process),
        };
        self.groups.insert(id, spec.clone());
        // Heard by its first driver, so that every change is seen.
        self.ask(|state, now| {
            let (answer, mut actions) = state.create_group(now, spec);
            actions.extend(state.step(now, Event::Says(process.into(), HeadMessage::WatchPlacementGroup(id))));
            (answer, actions)
        })?
        .map_or_else(
            |_| {
                self.groups.remove(&id);
                Ok(())
            },
            |_| Ok(()),
        )
    }

    /// A worker process begins to have tasks of its own.
    pub(super) fn new_owner(&mut self) -> Result<(), String> {
        let ready = self.nodes.values().take(64).flat_map(|daemon| daemon.leases.iter());
        let ready: Vec<LeaseId> =
            ready.filter(|(_, serving)| serving.phase == Phase::Ready).map(|(lease, _)| *lease).collect();
        let Some(lease) = self.pick(&ready).filter(|lease| !self.owners.contains_key(&worker_of(*lease))) else {
            return Ok(());
        };
        self.owners.insert(worker_of(lease), Owner::new(None, Some(lease)));
        self.deliver(Event::ProcessConnected(worker_of(lease)))
    }

    pub(super) fn crash_a_worker(&mut self) {
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let Some(node) = self.pick(&nodes) else { return };
        let serving = self.nodes[&node].leases.iter().filter(|(_, serving)| serving.phase == Phase::Ready);
        let ready: Vec<LeaseId> = serving.map(|(lease, _)| *lease).collect();
        if let Some(lease) = self.pick(&ready) {
            self.worker_gone(node, lease);
        }
    }

    /// A node hears and says nothing for some time; if it is long, the head gives it up.
    pub(super) fn cut_off(&mut self, node: NodeId) -> Result<(), String> {
        let long = self.chance(2);
        let lasts = self.random.random_range(10..500);
        let is_noticed = self.chance(2);
        let Some(daemon) = self.nodes.get_mut(&node) else { return Ok(()) };
        daemon.to_head_at = daemon.to_head_at.max(self.now + lasts);
        daemon.to_node_at = daemon.to_node_at.max(self.now + lasts);
        if long {
            self.schedule(lasts, Happening::Lost(node));
        } else if is_noticed {
            self.schedule(lasts, Happening::Here(node));
        }
        match is_noticed {
            true => self.deliver(Event::NodeAway(node)),
            false => Ok(()),
        }
    }
}
