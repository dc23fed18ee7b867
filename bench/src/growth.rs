//! How the cost of one operation grows with the size of the cluster: it should not, or slowly.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, ensure};
use wingbeat::{get_all, put};
use wingbeat_core::spec::{ActorSpec, Address, Executable, JobSpec, MachineId, Shape};
use wingbeat_core::{
    ActorId, Amount, ClusterId, FunctionId, Incarnation, JobId, LeaseId, NodeId, ProcessId, ResourceSet, TaskId,
};
use wingbeat_head::state::{Action, Event, State};
use wingbeat_net::messages::{NodeInfo, NodeMessage};
use wingbeat_tests::TestCluster;

use crate::rows::nop;

/// What an operation costs at each size.
pub(crate) struct Growth {
    pub name: &'static str,
    /// What the sizes count.
    pub of: &'static str,
    /// Size, and microseconds an operation.
    pub points: Vec<(u64, f64)>,
}

/// Every growth there is.
pub(crate) fn all() -> Result<Vec<Growth>> {
    Ok(vec![nodes()?, live_refs()?, live_actors()?])
}

/// Seconds of so many no-op tasks, the best of three.
async fn tasks(count: u64) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begun = Instant::now();
        let refs: Vec<_> = (0..count).map(nop::remote).collect();
        ensure!(get_all(&refs).await?.iter().enumerate().all(|(i, value)| i as u64 == *value));
        best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn nodes() -> Result<Growth> {
    const COUNT: u64 = 50_000;
    let mut points = Vec::new();
    for nodes in [1, 2, 4, 8] {
        eprintln!("   growth: {nodes} nodes");
        let cluster = TestCluster::start(nodes, 1)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let seconds = runtime.block_on(async {
            let session = wingbeat::init_at(cluster.address()).token(&cluster.token()?).await?;
            let seconds = tasks(COUNT).await;
            session.shutdown().await;
            seconds
        })?;
        points.push((nodes as u64, seconds * 1e6 / COUNT as f64));
    }
    Ok(Growth { name: "a no-op task, pipelined", of: "nodes of 1 CPU, all on this machine", points })
}

fn live_refs() -> Result<Growth> {
    const COUNT: u64 = 50_000;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let points = runtime.block_on(async {
        wingbeat::init().num_cpus(2).await?;
        let mut held = Vec::new();
        let mut points = Vec::new();
        for live in [1_000, 10_000, 100_000, 1_000_000] {
            eprintln!("   growth: {live} refs");
            while (held.len() as u64) < live {
                held.push(put(&1u64)?);
            }
            points.push((live, tasks(COUNT).await? * 1e6 / COUNT as f64));
        }
        wingbeat::shutdown().await;
        anyhow::Ok(points)
    })?;
    Ok(Growth { name: "a no-op task, pipelined", of: "live refs in the driver", points })
}

/// A head without a network: nodes that do at once what they are told.
struct Head {
    state: State,
    orders: Vec<NodeMessage>,
}

const DRIVER: ProcessId = ProcessId(1);

fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None }
}

impl Head {
    fn with_nodes(count: u64) -> Head {
        let mut head = Head { state: State::new(ClusterId(1), 1), orders: Vec::new() };
        for id in 1..=count {
            head.step(Event::NodeJoined(
                Box::new(NodeInfo {
                    id: NodeId(id),
                    address: address(ProcessId(1_000_000 + id)),
                    hostname: String::new(),
                    resources: ResourceSet::cpus(Amount::whole(64)),
                    labels: BTreeMap::new(),
                    devices: Vec::new(),
                    store_bytes: 0,
                }),
                Vec::new(),
            ));
        }
        head.step(Event::ProcessConnected(DRIVER));
        let executable =
            Executable { hash: String::new(), size: 0, pid: 1, machine: MachineId(1), path: String::new() };
        head.step(Event::JobJoined(Box::new(JobSpec {
            id: JobId(1),
            name: String::new(),
            driver: address(DRIVER),
            executable,
            working_dir: String::new(),
            env: BTreeMap::new(),
            namespace: String::new(),
            priority: 0,
        })));
        head
    }

    fn step(&mut self, event: Event) {
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
    fn create(&mut self, id: u64) -> Result<()> {
        let spec = ActorSpec {
            id: ActorId(id),
            job: JobId(1),
            class: FunctionId(7),
            class_name: "Counter".into(),
            args: Vec::new(),
            placement: Shape::of(ResourceSet::cpus(Amount::ONE)),
            holds: ResourceSet::new(),
            max_restarts: 0,
            max_concurrency: 1,
            groups: BTreeMap::new(),
            name: None,
            detached: false,
            handle: TaskId { owner: DRIVER, seq: id }.output(0),
            owner: address(DRIVER),
        };
        let (answer, actions) = self.state.create_actor(1, spec, false);
        answer?;
        self.take_in(actions);
        let lease = self.orders.drain(..).find_map(|message| match message {
            NodeMessage::StartLease(start) => Some(start.lease),
            _ => None,
        });
        let Some(LeaseId(lease)) = lease else { anyhow::bail!("actor {id} was not placed") };
        self.step(Event::Ready(LeaseId(lease), address(ProcessId(2_000_000 + id)), 1));
        self.step(Event::ActorStarted(ActorId(id), Incarnation(0), Ok(())));
        Ok(())
    }
}

fn live_actors() -> Result<Growth> {
    const COUNT: u64 = 1_000;
    let mut head = Head::with_nodes(1_000);
    let mut points = Vec::new();
    let mut next = 1;
    for live in [1, 10, 100, 1_000, 10_000, 100_000] {
        eprintln!("   growth: {live} actors");
        while next <= live {
            head.create(next)?;
            next += 1;
        }
        let begun = Instant::now();
        for _ in 0..COUNT {
            head.create(next)?;
            head.step(Event::Kill(ActorId(next), false));
            head.orders.clear();
            next += 1;
        }
        points.push((live, begun.elapsed().as_secs_f64() * 1e6 / COUNT as f64));
    }
    black_box(&head.state);
    Ok(Growth {
        name: "an actor made and ended, in the head's state machine, with 1,000 nodes",
        of: "live actors",
        points,
    })
}
