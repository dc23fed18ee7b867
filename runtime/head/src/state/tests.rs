//! The state machine in virtual time, with nodes that answer when a test says so.

use std::collections::BTreeMap;

use wingbeat_core::error::Error;
use wingbeat_core::resources::{CPU, GPU};
use wingbeat_core::spec::*;
use wingbeat_core::*;
use wingbeat_net::messages::{
    DeviceInfo, Explanation, HeadEvent, HeadMessage, LeaseHolder, LeaseStart, NodeInfo, NodeMessage, Running,
    RunningLease, Subject, Wait, WaitsFor, WorkerDeath,
};

use super::facts::{BundlePlace, KeptActor};
use super::{Action, Event, Fact, Millis, Speaker, State};

mod actors;
mod exact;
mod faults;
mod groups;
mod late;
mod leases;
mod load;
mod recovery;
#[cfg(feature = "journal")]
mod return_of_many;
mod scheduling;
mod waits;
mod why;

/// A cluster whose actions are kept until a test looks at them.
struct Bench {
    state: State,
    now: Millis,
    /// What processes were told and nodes were ordered, since a test last took it.
    told: Vec<(ProcessId, HeadEvent)>,
    ordered: Vec<(NodeId, NodeMessage)>,
    /// Every lease that a node was told to start.
    started: BTreeMap<LeaseId, (NodeId, LeaseStart)>,
}

/// An actor as it was written down in one of its lives.
fn kept(spec: ActorSpec, life: u32) -> Fact {
    Fact::Actor(KeptActor { life: Some(Incarnation(life)), ..KeptActor::new(spec) })
}

const DRIVER: ProcessId = ProcessId(1);
const OTHER: ProcessId = ProcessId(2);

fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: format!("p{}", process.0), tcp: None, steward: None }
}

fn amount(value: f64) -> Amount {
    Amount::new(value).unwrap()
}

fn cpus(count: f64) -> ResourceSet {
    ResourceSet::cpus(amount(count))
}

fn gpus(count: f64) -> ResourceSet {
    ResourceSet::new().with(GPU, amount(count))
}

fn shape(resources: ResourceSet) -> Shape {
    Shape::of(resources)
}

/// The process that runs a lease.
fn worker_of(lease: LeaseId) -> ProcessId {
    ProcessId(1_000_000 + lease.0)
}

fn exit() -> Exit {
    Exit { code: None, signal: Some(9), stderr: Vec::new(), reason: None, memory: None }
}

fn job_of(driver: ProcessId) -> JobSpec {
    JobSpec {
        id: JobId(driver.0),
        name: format!("job {}", driver.0),
        driver: address(driver),
        executable: Executable { hash: String::new(), size: 0, pid: 1, machine: MachineId(1), path: String::new() },
        working_dir: String::new(),
        env: BTreeMap::new(),
        local_env: BTreeMap::new(),
        namespace: "test".into(),
        priority: 0,
    }
}

fn actor_of(owner: ProcessId, id: u64) -> ActorSpec {
    let task = TaskId { owner, seq: id };
    ActorSpec {
        id: ActorId(id),
        job: JobId(owner.0),
        class: FunctionId(7),
        class_name: "Counter".into(),
        args: Vec::new(),
        placement: shape(cpus(1.0)),
        holds: ResourceSet::new(),
        max_restarts: 0,
        max_concurrency: 1,
        max_task_retries: 0,
        max_pending_calls: None,
        groups: BTreeMap::new(),
        name: None,
        detached: false,
        yields_to_drain: false,
        handle: task.output(0),
        owner: address(owner),
    }
}

fn group_of(owner: ProcessId, id: u64, strategy: PlacementStrategy, bundles: &[ResourceSet]) -> PlacementGroupSpec {
    let bundle = |resources: &ResourceSet| BundleSpec { resources: resources.clone(), ..BundleSpec::default() };
    PlacementGroupSpec {
        id: PlacementGroupId(id),
        job: JobId(owner.0),
        name: None,
        strategy,
        bundles: bundles.iter().map(bundle).collect(),
        detached: false,
        captures_children: false,
        patient: false,
        owner: address(owner),
    }
}

/// In a bundle of a group.
fn inside(group: u64, index: Option<u32>, resources: ResourceSet) -> Shape {
    Shape { strategy: Strategy::Bundle { group: PlacementGroupId(group), index }, ..shape(resources) }
}

fn named(mut spec: ActorSpec, name: &str) -> ActorSpec {
    spec.name = Some(ScopedName { namespace: "test".into(), name: name.into() });
    spec
}

impl Bench {
    fn empty() -> Bench {
        Bench {
            state: State::new(ClusterId(1), 1 << 32),
            now: 0,
            told: Vec::new(),
            ordered: Vec::new(),
            started: BTreeMap::new(),
        }
    }

    /// Two drivers, and one node with `resources`.
    fn new(resources: ResourceSet) -> Bench {
        let mut bench = Bench::empty();
        bench.node(1, resources);
        bench.driver(DRIVER);
        bench.driver(OTHER);
        bench.ordered.clear();
        bench
    }

    fn node(&mut self, id: u64, resources: ResourceSet) {
        self.step(Event::NodeJoined(
            Box::new(NodeInfo {
                id: NodeId(id),
                address: address(ProcessId(900 + id)),
                hostname: format!("host{id}"),
                resources,
                devices: Vec::new(),
                labels: BTreeMap::new(),
                store_bytes: 0,
            }),
            Running::default(),
        ));
    }

    fn driver(&mut self, process: ProcessId) {
        self.step(Event::ProcessConnected(process));
        self.step(Event::JobJoined(Box::new(job_of(process))));
    }

    fn step(&mut self, event: Event) {
        let actions = self.state.step(self.now, event);
        self.take_in(actions);
    }

    fn says(&mut self, by: impl Into<Speaker>, message: HeadMessage) {
        self.step(Event::Says(by.into(), message));
    }

    fn create(&mut self, spec: ActorSpec, or_get: bool) -> Result<ActorInfo, Error> {
        let (answer, actions) = self.state.create_actor(self.now, spec, or_get);
        self.take_in(actions);
        answer
    }

    fn take_in(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Tell(process, event) => self.told.push((process, event)),
                Action::Order(node, message) => {
                    if let NodeMessage::StartLease(start) = &message {
                        let before = self.started.insert(start.lease, (node, (**start).clone()));
                        assert!(before.is_none(), "{} was started twice", start.lease);
                    }
                    self.ordered.push((node, message));
                }
            }
        }
    }

    fn tick(&mut self, millis: Millis) {
        self.now += millis;
        self.step(Event::Tick);
    }

    fn demand(&mut self, process: ProcessId, resources: ResourceSet, wanted: u32) {
        self.says(process, HeadMessage::Demand { shape: shape(resources), wanted, name: "square".into() });
    }

    /// A node with labels, and with devices of 80 GiB each, four to an island.
    fn labelled(&mut self, id: u64, resources: ResourceSet, labels: &[(&str, &str)]) {
        let devices = (resources.get(GPU).units() / 10_000) as u32;
        let device = |number| DeviceInfo {
            memory: 80 << 30,
            island: Some(number / 4),
            numa: Some(number / 4),
            ..DeviceInfo::default()
        };
        let info = NodeInfo {
            id: NodeId(id),
            address: address(ProcessId(900 + id)),
            hostname: format!("host{id}"),
            resources,
            devices: (0..devices).map(device).collect(),
            labels: labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            store_bytes: 0,
        };
        self.step(Event::NodeJoined(Box::new(info), Running::default()));
    }

    fn wants(&mut self, process: ProcessId, shape: Shape, wanted: u32) {
        self.says(process, HeadMessage::Demand { shape, wanted, name: "square".into() });
    }

    /// Makes a group, watched by its creator.
    fn group(&mut self, spec: PlacementGroupSpec) -> Result<(), Error> {
        let (id, owner) = (spec.id, spec.owner.process);
        let (answer, actions) = self.state.create_group(self.now, spec);
        self.take_in(actions);
        answer?;
        self.says(owner, HeadMessage::WatchPlacementGroup(id));
        Ok(())
    }

    fn remove_group(&mut self, id: u64) {
        let actions = self.state.remove_placement_group(self.now, PlacementGroupId(id));
        self.take_in(actions);
    }

    fn drain(&mut self, node: u64, within: Millis, stops: bool) {
        let (answer, actions) = self.state.drain(self.now, NodeId(node), Some(within), "kernel update".into(), stops);
        self.take_in(actions);
        answer.unwrap();
    }

    fn quota(&mut self, namespace: &str, limit: Option<ResourceSet>) {
        let actions = self.state.quota(self.now, namespace, limit);
        self.take_in(actions);
    }

    /// The nodes of a group's bundles, by the last that its creator heard.
    fn places(&mut self, id: u64) -> Option<Vec<u64>> {
        let states = self.group_states(id);
        match states.last()? {
            PlacementGroupState::Placed { nodes, .. } => Some(nodes.iter().map(|node| node.0).collect()),
            _ => None,
        }
    }

    fn group_states(&mut self, id: u64) -> Vec<PlacementGroupState> {
        let mut states = Vec::new();
        self.told.retain(|(_, event)| match event {
            HeadEvent::PlacementGroup { group, state } if *group == PlacementGroupId(id) => {
                states.push(state.clone());
                false
            }
            _ => true,
        });
        states
    }

    /// The leases that nodes were told to start since this was last asked.
    fn starts(&mut self) -> Vec<LeaseStart> {
        let mut starts = Vec::new();
        self.ordered.retain(|(_, message)| match message {
            NodeMessage::StartLease(start) => {
                starts.push((**start).clone());
                false
            }
            _ => true,
        });
        starts
    }

    /// The nodes get the processes of all new leases ready.
    fn ready(&mut self) -> Vec<LeaseId> {
        let starts = self.starts();
        for start in &starts {
            self.says(
                NodeId(1),
                HeadMessage::LeaseReady { lease: start.lease, worker: address(worker_of(start.lease)), pid: 77 },
            );
        }
        starts.iter().map(|start| start.lease).collect()
    }

    /// The leases that a process was granted since this was last asked.
    fn granted(&mut self, to: ProcessId) -> Vec<LeaseId> {
        self.told_to(to, |event| match event {
            HeadEvent::Granted { lease, .. } => Some(*lease),
            _ => None,
        })
    }

    fn recalled(&mut self, from: ProcessId) -> Vec<LeaseId> {
        self.told_to(from, |event| match event {
            HeadEvent::Recall(lease) => Some(*lease),
            _ => None,
        })
    }

    fn refused(&mut self, process: ProcessId) -> Vec<Error> {
        self.told_to(process, |event| match event {
            HeadEvent::Refused { error, .. } => Some(error.clone()),
            _ => None,
        })
    }

    fn actor_states(&mut self, process: ProcessId, id: u64) -> Vec<ActorState> {
        self.told_to(process, |event| match event {
            HeadEvent::Actor { actor, state } if *actor == ActorId(id) => Some(state.clone()),
            _ => None,
        })
    }

    fn told_to<T>(&mut self, process: ProcessId, pick: impl Fn(&HeadEvent) -> Option<T>) -> Vec<T> {
        let mut picked = Vec::new();
        self.told.retain(|(to, event)| match pick(event).filter(|_| *to == process) {
            Some(found) => {
                picked.push(found);
                false
            }
            None => true,
        });
        picked
    }

    fn return_and_end(&mut self, owner: ProcessId, lease: LeaseId) {
        self.says(owner, HeadMessage::ReturnLease(lease));
        self.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }

    fn crash(&mut self, lease: LeaseId) {
        self.crash_in(lease, 0);
    }

    /// `started` is what [`WorkerDeath::started`] says.
    fn crash_in(&mut self, lease: LeaseId, started: u64) {
        let node = self.started[&lease].0;
        let process = worker_of(lease);
        let death = WorkerDeath {
            process,
            pid: 77,
            job: JobId(DRIVER.0),
            node,
            lease: Some(lease),
            exit: exit(),
            started,
            is_moved: false,
        };
        self.says(NodeId(1), HeadMessage::WorkerDied(death));
        self.says(NodeId(1), HeadMessage::LeaseEnded(lease));
    }

    /// Makes an actor, and lets it start.
    fn alive(&mut self, spec: ActorSpec) -> LeaseId {
        let (id, owner) = (spec.id, spec.owner.process);
        self.create(spec, false).unwrap();
        self.says(owner, HeadMessage::WatchActor(id));
        self.start_actor(id, 0)
    }

    fn start_actor(&mut self, id: ActorId, incarnation: u32) -> LeaseId {
        let leases = self.ready();
        let lease = *leases.last().expect("the actor was not placed");
        self.says(
            NodeId(1),
            HeadMessage::ActorStarted { actor: id, incarnation: Incarnation(incarnation), outcome: Ok(()) },
        );
        lease
    }

    fn free(&self) -> ResourceSet {
        self.state.picture().nodes[0].available.clone()
    }

    fn wait(&mut self, process: ProcessId, lease: LeaseId, seq: u64) {
        let wait = Wait {
            task: TaskId { owner: process, seq },
            name: "t".into(),
            within: None,
            waits_for: WaitsFor::Results,
            awaits: Vec::new(),
        };
        self.says(process, HeadMessage::Waiting { lease: Some(lease), wait });
    }

    fn resume(&mut self, process: ProcessId, lease: LeaseId, seq: u64) {
        self.says(DRIVER, HeadMessage::Resumed { lease: Some(lease), task: TaskId { owner: process, seq } });
    }
}
