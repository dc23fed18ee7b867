//! Pretended nodes: they start and end worker processes, and hold copies.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use wingbeat_core::spec::{Exit, Outcome};
use wingbeat_core::{Amount, Incarnation, JobId, LeaseId, NodeId, ObjectId, ProcessId, ResourceSet};
use wingbeat_head::state::Event;
use wingbeat_net::messages::{LeaseHolder, LeaseStart, NodeInfo, NodeMessage, WorkerDeath};

use super::execution::{Ended, Execution, Running};
use super::process::Process;
use super::programs;
use super::queue::{Being, Next};
use super::side::address;
use super::site::Site;
use super::world::{End, Happening, World};

#[derive(Default)]
pub(super) struct Node {
    /// Worker processes, each with the lease that it serves.
    pub workers: BTreeMap<ProcessId, Option<LeaseId>>,
    /// Worker processes that are about to be killed, because the head or a person wants it.
    pub dying: BTreeSet<ProcessId>,
    /// Leases whose end was not reported.
    leases: BTreeMap<LeaseId, Serving>,
    jobs: BTreeSet<JobId>,
}

struct Serving {
    start: LeaseStart,
    /// None while it is being started.
    by: Option<ProcessId>,
}

impl World {
    pub(super) fn new_node(&mut self) {
        let id = NodeId(self.shared.id());
        let cpus = 2 + self.shared.below(2) as u32;
        let info = NodeInfo {
            id,
            address: address(ProcessId(id.0)),
            hostname: format!("host{}", id.0),
            resources: ResourceSet::cpus(Amount::whole(cpus)),
            devices: Vec::new(),
            labels: BTreeMap::new(),
            store_bytes: 1 << 30,
        };
        self.nodes.insert(id, Node::default());
        self.shared.nodes.borrow_mut().insert(id);
        self.step(Event::NodeJoined(Box::new(info), Vec::new()));
    }

    pub(super) fn node_hears(&mut self, id: NodeId, message: NodeMessage) {
        let delay = 1 + self.shared.below(8);
        let Some(node) = self.nodes.get_mut(&id) else { return };
        match message {
            NodeMessage::BeginJob(spec) => drop(node.jobs.insert(spec.id)),
            NodeMessage::StartLease(start) => {
                assert!(node.jobs.contains(&start.job), "{id} never heard of {}", start.job);
                let (lease, job) = (start.lease, start.job);
                let before = node.leases.insert(lease, Serving { start: *start, by: None });
                assert!(before.is_none(), "{lease} is granted twice");
                // An actor's process ends with the actor, and what it owns with it: it is given one that owns nothing.
                let is_actor = matches!(node.leases[&lease].start.holder, LeaseHolder::Actor(..));
                let free = node.workers.iter().find(|(process, lease)| {
                    let is_dying = node.dying.contains(process);
                    let process = &self.processes[process];
                    let is_fit = !process.queue.borrow().ended && (!is_actor || process.owner.objects.len() == 0);
                    lease.is_none() && !is_dying && is_fit && process.job == job
                });
                let free = free.map(|(process, _)| *process);
                match free {
                    Some(process) => self.assign(id, lease, process),
                    None => self.schedule(3 * delay, Happening::WorkerUp(id, lease)),
                }
            }
            NodeMessage::EndLease { lease, kill } => {
                let by = node.leases.get(&lease).and_then(|serving| serving.by);
                match by {
                    // Its end is reported with that of its process.
                    Some(process) if kill.is_some() => {
                        node.dying.insert(process);
                        self.schedule(delay, Happening::Dies(process));
                    }
                    Some(process) if node.dying.contains(&process) => {}
                    by => {
                        node.leases.remove(&lease);
                        if let Some(lease) = by.and_then(|process| node.workers.get_mut(&process)) {
                            *lease = None;
                        }
                        self.send_to_head(End::Node(id), Event::Ended(lease));
                    }
                }
            }
            NodeMessage::DrainActor { lease, .. } => {
                let by = node.leases.get(&lease).and_then(|serving| serving.by);
                if let Some(process) = by.and_then(|process| self.alive(process)) {
                    process.queue.borrow_mut().draining = true;
                }
            }
            NodeMessage::EndJob { job } => {
                node.jobs.remove(&job);
                let unstarted: Vec<LeaseId> = node
                    .leases
                    .iter()
                    .filter(|(_, serving)| serving.by.is_none() && serving.start.job == job)
                    .map(|(lease, _)| *lease)
                    .collect();
                let ended: Vec<ProcessId> =
                    node.workers.keys().copied().filter(|process| self.processes[process].job == job).collect();
                for lease in &unstarted {
                    node.leases.remove(lease);
                }
                node.dying.extend(&ended);
                for lease in unstarted {
                    self.send_to_head(End::Node(id), Event::Ended(lease));
                }
                for process in ended {
                    self.schedule(delay, Happening::Dies(process));
                }
            }
            NodeMessage::OwnersGone(owners) => {
                let is_gone = |object: &ObjectId| owners.contains(&object.owner());
                self.shared.copies.borrow_mut().retain(|(object, node), _| *node != id || !is_gone(object));
            }
            _ => {}
        }
    }

    /// A worker process has started, for a lease that may be over by now.
    pub(super) fn worker_up(&mut self, id: NodeId, lease: LeaseId) {
        let Some(job) = self.nodes.get(&id).and_then(|node| node.leases.get(&lease)).map(|serving| serving.start.job)
        else {
            return;
        };
        let process = ProcessId(1_000_000 + self.shared.id());
        self.new_process(process, (job, id), false);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.workers.insert(process, None);
        }
        self.assign(id, lease, process);
    }

    fn assign(&mut self, id: NodeId, lease: LeaseId, to: ProcessId) {
        let (Some(process), Some(node)) = (self.alive(to), self.nodes.get_mut(&id)) else { return };
        let Some(serving) = node.leases.get_mut(&lease) else { return };
        serving.by = Some(to);
        node.workers.insert(to, Some(lease));
        let mut queue = process.queue.borrow_mut();
        queue.lease = Some(lease);
        queue.started = 0;
        if let LeaseHolder::Actor(spec, incarnation) = &serving.start.holder {
            queue.being = Some(Being { spec: spec.clone(), incarnation: *incarnation, has_begun: false });
        }
        drop(queue);
        self.send_to_head(End::Node(id), Event::Ready(lease, address(to), to.0 as u32));
    }

    /// Begins what a worker process can begin.
    pub(super) fn begin(&mut self, process: &Rc<Process>, next: Next) {
        let (number, began) = (self.shared.id(), self.shared.now());
        let shared = self.shared.clone();
        let actor = process.queue.borrow().being.as_ref().map(|being| being.spec.id);
        let (execution, program): (_, std::pin::Pin<Box<dyn Future<Output = Ended>>>) = match next {
            Next::Become(being) => {
                let site = Site { process: process.clone(), execution: None, shared };
                (None, Box::pin(programs::constructor(site, being)))
            }
            Next::Attempt { spec, lease } => {
                let (is_cancelled, is_disowned, waits) = Default::default();
                let execution = Execution { number, spec, lease, actor, began, is_cancelled, is_disowned, waits };
                let execution = Rc::new(execution);
                process.queue.borrow_mut().running = Some(execution.clone());
                let site = Site { process: process.clone(), execution: Some(execution.clone()), shared };
                (Some(execution), Box::pin(programs::attempt(site)))
            }
        };
        self.shared.begin(number, process, execution, program);
    }

    /// A program has ended.
    pub(super) fn ended(&mut self, running: Running, ended: Ended) {
        let Running { process, execution, program, .. } = running;
        // What it holds may be the last that holds it.
        drop(program);
        if let Some(execution) = execution {
            process.queue.borrow_mut().streams.remove(&execution.spec.id);
            return process.done(&execution, ended, &self.shared);
        }
        if process.is_driver {
            self.drivers.remove(&process.id);
            return;
        }
        let mut queue = process.queue.borrow_mut();
        queue.is_beginning = false;
        let being = queue.being.as_ref().map(|being| (being.spec.id, being.incarnation));
        drop(queue);
        let (actor, incarnation): (_, Incarnation) = being.expect("it is an actor");
        let outcome = match ended.0 {
            Outcome::Failed(error) => Err(*error),
            _ => Ok(()),
        };
        self.send_to_head(End::Node(process.node.get()), Event::ActorStarted(actor, incarnation, outcome));
    }

    /// A worker process that is to do nothing more ends when what it has said was taken in.
    pub(super) fn let_exit(&mut self, process: &Process) {
        let queue = process.queue.borrow();
        let is_done = queue.ended && queue.running.is_none();
        if process.is_driver || !(is_done || queue.killed_at.is_some()) || process.exits.replace(true) {
            return;
        }
        let until = queue.killed_at.unwrap_or(self.shared.now() + 5_000);
        self.schedule(1, Happening::Exits { process: process.id, until });
    }

    pub(super) fn exits(&mut self, id: ProcessId, until: u64) {
        let Some(process) = self.alive(id) else { return };
        // The head ends what still has a lease of it, with all that it owns.
        let has_leases = process.owner.submission.look(|dispatch, _| dispatch.what_is_left().len()) > 0;
        let has_leases = has_leases && process.queue.borrow().killed_at.is_none();
        if self.shared.now() >= until || process.is_settled() && process.side.is_flushed() && !has_leases {
            return self.dies(id);
        }
        self.schedule(3, Happening::Exits { process: id, until });
    }

    /// A worker process or a driver is no more.
    pub(super) fn dies(&mut self, id: ProcessId) {
        let Some(process) = self.processes.remove(&id) else { return };
        self.shared.trace(|| format!("{id} ends"));
        self.shared.ended.borrow_mut().insert(id);
        process.is_alive.set(false);
        self.shared.untold.borrow_mut().extend(process.side.untold());
        process.side.end();
        self.drivers.remove(&id);
        let (gone, kept) =
            std::mem::take(&mut self.running).into_iter().partition(|(_, running)| running.process.id == id);
        let gone: BTreeMap<u64, Running> = gone;
        self.running = kept;
        let started = process.queue.borrow().started;
        drop(gone);
        process.end();
        self.tell_peers_of_death(id);
        if process.is_connected.get() {
            let job = process.is_driver.then_some(process.job);
            self.send_to_head(End::Process(id), Event::ProcessLost(id, job));
        }
        let node = process.node.get();
        let Some(at) = self.nodes.get_mut(&node).filter(|_| !process.is_driver) else { return };
        at.dying.remove(&id);
        let lease = at.workers.remove(&id).flatten();
        let exit = Exit { code: None, signal: Some(9), stderr: Vec::new(), reason: None };
        let death = WorkerDeath { process: id, pid: id.0 as u32, node, lease, exit, started };
        self.send_to_head(End::Node(node), Event::WorkerDied(death));
        if let Some(lease) = lease
            && let Some(at) = self.nodes.get_mut(&node)
        {
            at.leases.remove(&lease);
            self.send_to_head(End::Node(node), Event::Ended(lease));
        }
    }

    /// A node is no more, with its worker processes and its store.
    pub(super) fn node_dies(&mut self, id: NodeId) {
        let Some(node) = self.nodes.remove(&id) else { return };
        self.shared.trace(|| format!("{id} dies"));
        self.shared.nodes.borrow_mut().remove(&id);
        self.shared.copies.borrow_mut().retain(|(_, at), _| *at != id);
        for process in node.workers.into_keys() {
            self.dies(process);
        }
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        for process in self.processes.values().filter(|process| process.node.get() == id) {
            // The driver's connection with its node has ended: it uses another.
            process.node.set(nodes[self.shared.below(nodes.len() as u64) as usize]);
        }
        self.send_to_head(End::Node(id), Event::NodeLost(id, "the simulation".into()));
    }

    /// An owner has a node delete a copy. One that was made again there since is needed.
    pub(super) fn delete(&mut self, by: ProcessId, node: NodeId, object: ObjectId) {
        let Some(process) = self.alive(by) else { return };
        if process.node.get() != node && process.owner.objects.get(object).is_some_and(|known| known.is_stored_at(node))
        {
            return;
        }
        let after = self.shared.below(5);
        self.schedule(after, Happening::Deleted(node, object));
    }
}
