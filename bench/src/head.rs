//! A head without a network: its decisions alone, with nodes that do at once what they are told.

use std::collections::BTreeMap;

use anyhow::Result;
use wingbeat_core::spec::{ActorSpec, Address, Executable, JobSpec, MachineId, PlacementGroupSpec, Shape};
use wingbeat_core::{
    ActorId, Amount, ClusterId, FunctionId, Incarnation, JobId, LeaseId, NodeId, PlacementGroupId, ProcessId,
    ResourceSet, TaskId,
};
use wingbeat_head::state::{Action, Event, State};
use wingbeat_net::messages::{HeadMessage, NodeInfo, NodeMessage, Running};

/// A head without a network: nodes that do at once what they are told.
pub(crate) struct Head {
    pub state: State,
    pub orders: Vec<NodeMessage>,
}

pub(crate) const DRIVER: ProcessId = ProcessId(1);

pub(crate) fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

/// An actor of one CPU that nobody has named.
pub(crate) fn actor(id: ActorId, job: JobId, owner: Address) -> ActorSpec {
    ActorSpec {
        id,
        job,
        class: FunctionId(7),
        class_name: "Counter".into(),
        args: Vec::new(),
        placement: Shape::of(ResourceSet::cpus(Amount::ONE)),
        holds: ResourceSet::new(),
        max_restarts: 0,
        max_concurrency: 1,
        max_task_retries: 0,
        max_pending_calls: None,
        groups: BTreeMap::new(),
        name: None,
        detached: false,
        yields_to_drain: false,
        handle: TaskId { owner: owner.process, seq: id.0 }.output(0),
        owner,
    }
}

impl Head {
    pub(crate) fn with_nodes(count: u64) -> Head {
        let mut head = Head { state: State::new(ClusterId(1), 1), orders: Vec::new() };
        for id in 1..=count {
            head.step(Event::NodeJoined(
                Box::new(NodeInfo {
                    id: NodeId(id),
                    address: Address { machine: MachineId(id), ..address(ProcessId(1_000_000 + id)) },
                    hostname: String::new(),
                    resources: ResourceSet::cpus(Amount::whole(64)),
                    labels: BTreeMap::new(),
                    devices: Vec::new(),
                    store_bytes: 0,
                }),
                Running::default(),
            ));
        }
        head.driver(DRIVER.0);
        head
    }

    /// A driver joins; its job has the same number.
    pub(crate) fn driver(&mut self, id: u64) {
        let driver = ProcessId(id);
        self.step(Event::ProcessConnected(driver));
        let executable =
            Executable { hash: String::new(), size: 0, pid: 1, machine: MachineId(1), path: String::new() };
        self.step(Event::JobJoined(Box::new(JobSpec {
            id: JobId(id),
            name: String::new(),
            driver: address(driver),
            executable,
            working_dir: String::new(),
            env: BTreeMap::new(),
            local_env: BTreeMap::new(),
            namespace: String::new(),
            priority: 0,
        })));
    }

    pub(crate) fn demand(&mut self, process: ProcessId, shape: &Shape, wanted: u32) {
        self.step(Event::Says(
            process.into(),
            HeadMessage::Demand { shape: shape.clone(), wanted, name: "task".into() },
        ));
    }

    /// Nodes get the processes of all new leases ready.
    pub(crate) fn ready(&mut self) -> Vec<LeaseId> {
        let orders = std::mem::take(&mut self.orders);
        let started = orders.into_iter().filter_map(|message| match message {
            NodeMessage::StartLease(start) => Some(start.lease),
            _ => None,
        });
        let leases: Vec<LeaseId> = started.collect();
        for lease in &leases {
            self.step(Event::Says(
                NodeId(1).into(),
                HeadMessage::LeaseReady { lease: *lease, worker: address(ProcessId(1 << 40 | lease.0)), pid: 1 },
            ));
        }
        leases
    }

    pub(crate) fn create_group(&mut self, spec: PlacementGroupSpec) -> Result<()> {
        let id = spec.id;
        let (answer, _) = self.state.create_group(1, spec);
        answer?;
        let is_placed = self.state.placed(id);
        anyhow::ensure!(is_placed, "{id} was not placed");
        Ok(())
    }

    pub(crate) fn remove_group(&mut self, id: PlacementGroupId) {
        let _ = self.state.remove_placement_group(1, id);
    }

    pub(crate) fn step(&mut self, event: Event) {
        let actions = self.state.step(1, event);
        self.take_in(actions);
    }

    fn take_in(&mut self, actions: Vec<Action>) {
        self.orders.extend(actions.into_iter().filter_map(|action| match action {
            Action::Order(_, message) => Some(message),
            _ => None,
        }));
    }

    /// An actor, from the request to its first life.
    pub(crate) fn create(&mut self, id: u64) -> Result<()> {
        let spec = actor(ActorId(id), JobId(1), address(DRIVER));
        let (answer, actions) = self.state.create_actor(1, spec, false);
        answer?;
        self.take_in(actions);
        let lease = self.orders.drain(..).find_map(|message| match message {
            NodeMessage::StartLease(start) => Some(start.lease),
            _ => None,
        });
        let Some(LeaseId(lease)) = lease else { anyhow::bail!("actor {id} was not placed") };
        self.step(Event::Says(
            NodeId(1).into(),
            HeadMessage::LeaseReady { lease: LeaseId(lease), worker: address(ProcessId(2_000_000 + id)), pid: 1 },
        ));
        self.step(Event::Says(
            NodeId(1).into(),
            HeadMessage::ActorStarted { actor: ActorId(id), incarnation: Incarnation(0), outcome: Ok(()) },
        ));
        Ok(())
    }
}
