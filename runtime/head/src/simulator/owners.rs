//! What pretended drivers and worker processes hear, do and say.

use std::collections::BTreeMap;

use rand::RngExt;
use wingbeat_core::spec::{Executable, JobSpec, MachineId, Shape};
use wingbeat_core::{JobId, LeaseId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadEvent, HeadMessage, Wait};

use super::daemon::{address, worker_of};
use super::owner::{Backlog, Held, Owner};
use super::world::{Happening, World};
use crate::state::{Event, Millis};

impl World {
    pub(super) fn say(&mut self, process: ProcessId, message: HeadMessage) {
        let delay = self.random.random_range(0..4);
        self.say_after(process, delay, Event::Says(process.into(), message));
    }

    pub(super) fn say_after(&mut self, process: ProcessId, delay: Millis, event: Event) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        owner.to_head_at = owner.to_head_at.max(self.now + delay);
        let after = owner.to_head_at - self.now;
        self.schedule(after, Happening::FromProcess(process, event));
    }

    pub(super) fn new_driver(&mut self) -> Result<(), String> {
        let id = self.id();
        let namespace = format!("team{}", self.random.random_range(0..4));
        let priority = [0, 0, 0, 5, -5][self.random.random_range(0..5)];
        let executable =
            Executable { hash: String::new(), size: 0, pid: 1, machine: MachineId(1), path: String::new() };
        let spec = JobSpec {
            id: JobId(id),
            name: format!("job{id}"),
            driver: address(ProcessId(id)),
            executable,
            working_dir: String::new(),
            env: BTreeMap::new(),
            local_env: BTreeMap::new(),
            namespace,
            priority,
        };
        self.namespaces.insert(spec.id, spec.namespace.clone());
        self.owners.insert(ProcessId(id), Owner::new(Some(spec.clone()), None));
        self.deliver(Event::ProcessConnected(ProcessId(id)))?;
        self.deliver(Event::JobJoined(Box::new(spec)))
    }

    pub(super) fn process_gone(&mut self, process: ProcessId) -> Result<(), String> {
        let Some(owner) = self.owners.remove(&process) else { return Ok(()) };
        self.deliver(Event::ProcessLost(process, owner.job.map(|job| job.id)))
    }

    pub(super) fn demand(&mut self, process: ProcessId, shape: &Shape) {
        let Some(wanted) = self.owners.get(&process).and_then(|owner| owner.demands.get(shape)).map(Backlog::wanted)
        else {
            return;
        };
        let demand = HeadMessage::Demand { shape: shape.clone(), wanted, name: "task".into() };
        if self.config.faults && self.chance(100) {
            self.say(process, demand.clone());
        }
        self.say(process, demand);
    }

    pub(super) fn process_hears(&mut self, process: ProcessId, event: HeadEvent) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        match event {
            HeadEvent::Granted { shape, lease, node, .. } => {
                let backlog = owner.demands.entry((*shape).clone()).or_default();
                if backlog.left == 0 {
                    self.say(process, HeadMessage::ReturnLease(lease));
                    return;
                }
                backlog.left -= 1;
                backlog.held.insert(lease, Held { node: node.node, is_recalled: false });
                self.begin_task(process, lease);
            }
            HeadEvent::Recall(lease) => {
                if let Some((_, backlog)) = owner.backlog_of(lease)
                    && let Some(held) = backlog.held.get_mut(&lease)
                {
                    held.is_recalled = true;
                }
            }
            HeadEvent::Refused { shape, .. } => {
                if let Some(backlog) = owner.demands.get_mut(&shape) {
                    backlog.left = 0;
                }
            }
            HeadEvent::WorkerDied(death) => {
                if let Some(lease) = death.lease {
                    self.lease_broke(process, lease);
                }
            }
            HeadEvent::NodeDied { node, .. } => {
                let backlogs = owner.demands.values().flat_map(|backlog| backlog.held.iter());
                let lost: Vec<LeaseId> =
                    backlogs.filter(|(_, held)| held.node == node).map(|(lease, _)| *lease).collect();
                for lease in lost {
                    self.lease_broke(process, lease);
                }
            }
            _ => {}
        }
    }

    pub(super) fn begin_task(&mut self, process: ProcessId, lease: LeaseId) {
        let lasts =
            if self.chance(30) { self.random.random_range(200..3_000) } else { self.random.random_range(1..60) };
        self.schedule(lasts, Happening::TaskDone(process, lease));
        let worker = worker_of(lease);
        if self.owners.contains_key(&worker) && self.chance(2) {
            let seq = self.id();
            let wait = Wait { task: TaskId { owner: worker, seq }, name: "t".into(), actor: None, on: Vec::new() };
            self.say(worker, HeadMessage::Waiting { lease: Some(lease), wait });
            let after = self.random.random_range(4..80);
            self.schedule(after, Happening::Resumed(worker, lease, seq));
        }
    }

    /// The worker process of a lease is gone: its task is tried again.
    pub(super) fn lease_broke(&mut self, process: ProcessId, lease: LeaseId) {
        let Some(owner) = self.owners.get_mut(&process) else { return };
        let Some((shape, backlog)) = owner.backlog_of(lease) else { return };
        backlog.held.remove(&lease);
        backlog.left += 1;
        let shape = shape.clone();
        self.demand(process, &shape);
    }

    pub(super) fn task_done(&mut self, process: ProcessId, lease: LeaseId) {
        let stops = self.is_ending;
        let Some(owner) = self.owners.get_mut(&process) else { return };
        let Some((shape, backlog)) = owner.backlog_of(lease) else { return };
        self.report.tasks += 1;
        let goes_on = backlog.left > 0 && !stops && backlog.held.get(&lease).is_some_and(|held| !held.is_recalled);
        if goes_on {
            backlog.left -= 1;
            return self.begin_task(process, lease);
        }
        backlog.held.remove(&lease);
        let shape = shape.clone();
        self.say(process, HeadMessage::ReturnLease(lease));
        self.demand(process, &shape);
    }
}
