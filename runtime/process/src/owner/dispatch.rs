//! Which task goes to which lease: a deterministic state machine without IO.
//!
//! The owner keeps one queue a shape. The head grants leases for it, and tasks are pushed straight to the
//! worker processes behind them. While tasks are short, several are pushed ahead of need, about
//! [`AHEAD_NANOS`] of work; while they are long, or of unknown length, one at a time. A lease that runs dry
//! while another has unstarted tasks gets half of those.
//!
//! ```text
//!            submit                 push                      result
//!   caller ─────────▶ ready queue ────────▶ in flight (lease) ───────▶ done
//!                        ▲                      │
//!                        └── given back, lost ──┘
//! ```
//!
//! A message costs what it has touched: the shapes and leases that have changed are noted, and only those are dealt with
//! (`dealing`), by sums and orders over leases that are kept (`leases`).
//!
//! What becomes of a task when an attempt has ended is in `attempts`, and what becomes of those whose process, connection or node is gone in
//! `losses`. A task that waits for what it has submitted gives its process away meanwhile: `at_home`.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Outputs, Shape, TaskSpec};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{LeaseId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{MESSAGE_LIMIT, Weight};

use crate::owner::argument_bytes::ArgumentBytes;
use crate::owner::memory_retries::MemoryRetries;
use crate::owner::name::Name;
use crate::owner::object::Held;
use crate::owner::recipe::Remaking;
use crate::owner::resting::Resting;
use crate::owner::retrying::RetryOn;
use crate::owner::wanted::Wanted;

mod at_home;
mod attempts;
mod dealing;
mod leases;
mod losses;
mod spreading;

use at_home::AtHome;
pub(crate) use at_home::TakenHome;
use attempts::After;
pub(crate) use attempts::Settled;
use dealing::Touched;
use leases::{Lease, Leases, Phase, Standings};
pub(crate) use losses::CAUSE_LIMIT_MS;
use losses::lost_argument;
use spreading::{Keeping, Spreading};

/// How much work is pushed ahead to a lease: a few round trips' worth, so that a worker process never
/// waits for its next short task, and little enough to be dealt again when another lease appears.
const AHEAD_NANOS: f64 = 2_000_000.0;
/// Tasks that take longer on average are pushed one at a time.
const LONG_NANOS: f64 = 20_000_000.0;
/// And at most so many tasks, which bounds the memory of a worker process.
const AHEAD_TASKS: usize = 2_048;
/// And at most so many bytes of arguments, unless one task alone has more: enough for a fast network's round trip, and a
/// bound of the memory of a worker process that does not get to its tasks.
const AHEAD_BYTES: usize = 8 << 20;
/// What has run for so long is no short task, whatever others of its shape take: a stream may wait for its consumer, and that
/// for what stands behind it. Nothing more goes there, and for what does another lease is asked for.
const STUCK_MS: u64 = 20;
/// Leases wanted for one shape at most; the head grants what there is.
const WANTED_LIMIT: usize = 4_096;
/// An idle lease is kept so long, since the next task often comes at once. The head can recall it earlier.
pub(crate) const IDLE_KEEP_MS: u64 = 300;
/// What a task costs beside its user code; keeps the depth of no-op tasks within bounds.
const OVERHEAD_NANOS: f64 = 1_000.0;
/// A task that this process submitted and that is not done.
pub(crate) struct Task {
    pub spec: Arc<TaskSpec>,
    pub shape: Arc<Shape>,
    /// Name for messages.
    pub name: Name,
    /// Attempts that a system failure may still cost.
    pub retries: u32,
    /// How many of them failures of user code and of its processes have cost.
    pub failures: u32,
    /// And those that its node's shortage of memory may cost.
    pub memory_retries: MemoryRetries,
    /// Which errors of its own cost a retry, too.
    pub retry_on: RetryOn,
    pub cancelled: bool,
    /// Handles of argument objects and of refs inside arguments: they live until the task is done.
    pub held: Held,
    #[expect(dead_code, reason = "they count until this is dropped")]
    pub bytes: ArgumentBytes,
    /// Set when lost outputs are made again.
    pub remaking: Option<Remaking>,
}

/// What is to be done.
pub(crate) enum Action {
    Push {
        worker: Address,
        lease: LeaseId,
        first: u64,
        tasks: Vec<Arc<TaskSpec>>,
    },
    Demand {
        shape: Arc<Shape>,
        wanted: u32,
        name: Name,
    },
    Return {
        lease: LeaseId,
    },
    /// As `Return`, of a lease whose worker process may still run something.
    Abandon {
        lease: LeaseId,
    },
    TakeBack {
        worker: ProcessId,
        lease: LeaseId,
        most: u32,
        recalled: bool,
    },
    Cancel {
        worker: ProcessId,
        task: TaskId,
        force: bool,
    },
    /// A task that runs in this process is to stop.
    CancelAtHome {
        task: TaskId,
        force: bool,
    },
    /// There is something for this process to run: [`Dispatch::take_home`].
    AtHome,
    /// An attempt that may have stored some of its outputs there does not count any more.
    Left {
        task: TaskId,
        outputs: Outputs,
        at: StoreNode,
    },
    Fail {
        task: Task,
        error: Error,
    },
    /// Every place that it knows of this argument was on a node that has died since: it waits for the argument again.
    ArgumentLost {
        task: Task,
        argument: ObjectId,
    },
}

/// A lease as the head grants it.
pub(crate) struct Grant {
    pub shape: Arc<Shape>,
    pub lease: LeaseId,
    pub worker: Address,
    pub node: StoreNode,
    pub pid: u32,
}

struct Queue {
    ready: VecDeque<Task>,
    /// Its leases.
    standings: Standings,
    /// Smoothed run time of a task; none before the first result.
    average_nanos: Option<f64>,
    announced: u32,
    name: Name,
    /// Since when its first ready tasks wait: since the last went to a lease, or there are any.
    front_since_ms: Option<u64>,
    /// It is among those that have changed.
    is_touched: bool,
    /// Set if its tasks are to be spread.
    spreading: Option<Box<Spreading>>,
}

impl Queue {
    fn new(shape: &Shape, name: Name) -> Queue {
        Queue {
            ready: VecDeque::new(),
            standings: Standings::default(),
            average_nanos: None,
            announced: 0,
            name,
            front_since_ms: None,
            is_touched: false,
            spreading: Spreading::of(shape),
        }
    }
}

/// The state.
#[derive(Default)]
pub(crate) struct Dispatch {
    /// By shape, from the first task until nothing waits, no lease is held and none is wanted.
    queues: BTreeMap<Arc<Shape>, Queue>,
    /// Shapes of which something has changed, until [`Dispatch::settle`].
    touched: Touched,
    /// Shapes whose tasks are kept for leases that are to come; renewed by [`Dispatch::settle`].
    keeping: Keeping,
    /// How many nodes there are, as far as the head has said.
    nodes: u32,
    /// From the head's word until they are given up: returned, abandoned, or lost with their process or node.
    leases: Leases,
    /// The same leases, by their worker processes.
    by_worker: HashMap<ProcessId, LeaseId>,
    /// Tasks that run in this process, until they have a result.
    at_home: AtHome,
    /// Tasks that are tried again after a pause, until that is over.
    resting: Resting,
    /// Tasks that have failed, while user code is asked whether they are tried again. Seldom any.
    undecided: BTreeMap<TaskId, Task>,
    /// Nodes that have died, whose ids are never used again: a task that was queued before, or comes back, still names them.
    dead_nodes: HashSet<NodeId>,
    /// Set at the end of the session: nothing is queued any more.
    session_over: Option<Error>,
}

/// Where a task is; see [`Dispatch::standing`].
pub(crate) enum DispatchStanding {
    /// It was ended because memory was short, or has failed again, and is tried again after a pause.
    Resting { why: String, pause_ms: u64 },
    /// It is on no lease yet.
    Ready { before: usize, shape: Shape },
    /// It was pushed to a worker process.
    Pushed { before: usize, lease: LeaseId, pid: u32 },
    /// It runs in this process.
    AtHome,
    /// It has failed, and user code is asked whether it is tried again.
    Undecided,
}

impl Dispatch {
    /// How many are not done.
    pub(crate) fn pending(&self) -> usize {
        let ready = self.queues.values().map(|queue| queue.ready.len()).sum::<usize>();
        let in_flight = self.leases.iter().map(|lease| lease.in_flight.len()).sum::<usize>();
        ready + in_flight + self.at_home.len() + self.undecided.len() + self.resting.len()
    }

    /// Where a task that is not done is, with its name.
    pub(crate) fn standing(&self, id: TaskId) -> Option<(String, DispatchStanding)> {
        if let Some((name, why, pause_ms)) = self.resting.standing(id) {
            return Some((name, DispatchStanding::Resting { why, pause_ms }));
        }
        for (shape, queue) in &self.queues {
            if let Some(before) = queue.ready.iter().position(|task| task.spec.id == id) {
                let standing = DispatchStanding::Ready { before, shape: (**shape).clone() };
                return Some((queue.ready[before].name.to_string(), standing));
            }
        }
        if let Some(task) = self.at_home.get(id) {
            return Some((task.name.to_string(), DispatchStanding::AtHome));
        }
        if let Some(task) = self.undecided.get(&id) {
            return Some((task.name.to_string(), DispatchStanding::Undecided));
        }
        self.leases.iter().find_map(|lease| {
            let before = lease.in_flight.iter().position(|(_, task)| task.spec.id == id)?;
            let standing = DispatchStanding::Pushed { before, lease: lease.grant.lease, pid: lease.grant.pid };
            Some((lease.in_flight[before].1.name.to_string(), standing))
        })
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let ready =
            self.queues.values().flat_map(|queue| queue.ready.iter().map(|task| format!("{} ready", task.spec.id)));
        let leases = self.leases.iter().map(|lease| {
            let flying: Vec<TaskId> = lease.in_flight.iter().map(|(_, task)| task.spec.id).collect();
            format!("{} ({:?}) with {flying:?}", lease.grant.lease, lease.phase)
        });
        let undecided = self.undecided.keys().map(|task| format!("{task} undecided"));
        let resting = self.resting.iter().map(|task| format!("{} rests", task.spec.id));
        let at_home = self.at_home.iter().map(|task| format!("{} at home", task.spec.id));
        ready.chain(leases).chain(at_home).chain(undecided).chain(resting).collect()
    }

    /// A task whose arguments are all there.
    pub(crate) fn submit(&mut self, task: Task, out: &mut Vec<Action>) {
        if let Some(error) = &self.session_over {
            out.push(Action::Fail { task, error: error.clone() });
            return;
        }
        if let Some(error) = too_large(&task.spec, &task.name) {
            out.push(Action::Fail { task, error });
            return;
        }
        self.queue_of(&task).push_back(task);
    }

    /// The ready tasks among which this one belongs.
    fn queue_of(&mut self, task: &Task) -> &mut VecDeque<Task> {
        let queue = self.queues.entry(task.shape.clone()).or_insert_with(|| Queue::new(&task.shape, task.name.clone()));
        self.touched.add(&task.shape, queue);
        &mut queue.ready
    }

    /// The leases that it has.
    pub(crate) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.iter().map(|lease| lease.grant.lease)
    }

    /// The head knows nothing of what is wanted: [`Dispatch::settle`] says it again.
    pub(crate) fn announce_anew(&mut self) {
        for (shape, queue) in &mut self.queues {
            queue.announced = u32::MAX;
            self.touched.add(shape, queue);
        }
    }

    /// The head granted a lease.
    pub(crate) fn granted(&mut self, grant: Grant, now_ms: u64, out: &mut Vec<Action>) {
        let Some((shape, _)) = self.queues.get_key_value(&grant.shape) else {
            // Nothing of the shape is left to do.
            out.push(Action::Return { lease: grant.lease });
            return;
        };
        let shape = shape.clone();
        if let Some(queue) = self.queues.get_mut(&shape)
            && let Some(spreading) = &mut queue.spreading
        {
            spreading.came(now_ms);
        }
        self.by_worker.insert(grant.worker.process, grant.lease);
        self.leases.insert(Lease::new(Grant { shape, ..grant }, now_ms));
    }

    /// The head says that the shape can never be had.
    pub(crate) fn refused(&mut self, shape: &Shape, error: &Error, out: &mut Vec<Action>) {
        let Some((shape, _)) = self.queues.get_key_value(shape) else { return };
        let shape = shape.clone();
        let Some(queue) = self.queues.get_mut(&shape) else { return };
        self.touched.add(&shape, queue);
        queue.announced = 0;
        queue.spreading = Spreading::of(&shape);
        for task in queue.ready.drain(..) {
            // The head knows the name of one of them.
            let error = error.clone().about(|| task.name.to_string());
            out.push(Action::Fail { task, error });
        }
    }

    /// The head wants a lease back.
    pub(crate) fn recalled(&mut self, id: LeaseId, out: &mut Vec<Action>) {
        let Some(lease) = self.leases.change(id) else { return };
        if matches!(lease.phase, Phase::Open | Phase::Waiting) {
            lease.phase = Phase::Recalled;
            // What waits there for what it has submitted may run that for hours. What is being taken back already may be a part.
            let runs_others = lease.in_flight.iter().any(|(_, task)| task.spec.shares_process);
            if runs_others || lease.in_flight.len() > 1 {
                lease.taking_back = true;
                let most = lease.in_flight.len() as u32;
                let worker = lease.grant.worker.process;
                out.push(Action::TakeBack { worker, lease: id, most, recalled: true });
            }
        }
        self.return_if_done(id, out);
    }

    fn return_if_done(&mut self, id: LeaseId, out: &mut Vec<Action>) {
        let done =
            self.leases.get(id).is_some_and(|lease| lease.phase == Phase::Recalled && lease.in_flight.is_empty());
        if done {
            self.give_up(id);
            out.push(Action::Return { lease: id });
        }
    }

    fn give_up(&mut self, id: LeaseId) -> Option<Lease> {
        let shape = self.leases.get(id)?.grant.shape.clone();
        let mut queue = self.queues.get_mut(&shape);
        let lease = self.leases.remove(id, queue.as_mut().map(|queue| &mut queue.standings))?;
        self.by_worker.remove(&lease.grant.worker.process);
        if let Some(queue) = queue {
            // What was announced included it.
            queue.announced = u32::MAX;
            self.touched.add(&shape, queue);
        }
        Some(lease)
    }

    /// A result arrived from `worker`.
    pub(crate) fn finished(
        &mut self,
        worker: ProcessId,
        task: TaskId,
        failed: Option<&Error>,
        ran_nanos: u64,
        now_ms: u64,
        out: &mut Vec<Action>,
    ) -> Settled {
        // An owner may have a lease of its own process, too.
        if worker == task.owner
            && let Some(settled) = self.finished_at_home(task, failed, ran_nanos, now_ms)
        {
            return settled;
        }
        let Some(id) = self.by_worker.get(&worker).copied() else { return Settled::Unknown };
        let Some(lease) = self.leases.change(id) else { return Settled::Unknown };
        let Some(at) = lease.in_flight.iter().position(|(_, flying)| flying.spec.id == task) else {
            return Settled::Unknown;
        };
        let Some((_, task)) = lease.in_flight.remove(at) else { return Settled::Unknown };
        lease.bytes = lease.bytes.saturating_sub(task.spec.weight());
        lease.last_result_ms = now_ms;
        if lease.in_flight.is_empty() {
            lease.idle_since_ms = now_ms;
        }
        let shape = lease.grant.shape.clone();
        self.took(&shape, ran_nanos);
        if self.at_home.knows(task.spec.function) {
            self.at_home.took(task.spec.function, ran_nanos);
        }
        self.return_if_done(id, out);
        self.settled(task, failed, now_ms)
    }

    /// A task of this shape ran for so long.
    fn took(&mut self, shape: &Arc<Shape>, ran_nanos: u64) {
        if let Some(queue) = self.queues.get_mut(shape) {
            queue.average_nanos = Some(smoothed(queue.average_nanos, ran_nanos));
        }
    }

    /// A worker process gave unstarted tasks back.
    pub(crate) fn gave_back(
        &mut self,
        id: LeaseId,
        tasks: &[TaskId],
        waiting: bool,
        now_ms: u64,
        out: &mut Vec<Action>,
    ) {
        let Some(lease) = self.leases.change(id) else { return };
        lease.taking_back = false;
        if waiting && lease.phase == Phase::Open {
            lease.phase = Phase::Waiting;
        }
        // Half of 2,000 may come back: none is searched for among all.
        let mut given: HashSet<TaskId> = tasks.iter().copied().collect();
        let mut returned = Vec::with_capacity(given.len());
        // They were the last.
        let mut kept = Vec::new();
        while !given.is_empty()
            && let Some((seq, task)) = lease.in_flight.pop_back()
        {
            if given.remove(&task.spec.id) {
                lease.bytes = lease.bytes.saturating_sub(task.spec.weight());
                returned.push(task);
            } else {
                kept.push((seq, task));
            }
        }
        lease.in_flight.extend(kept.into_iter().rev());
        if lease.in_flight.is_empty() {
            lease.idle_since_ms = now_ms;
        }
        for task in returned {
            if task.cancelled {
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
            } else {
                self.again(task, After::Nothing);
            }
        }
        self.return_if_done(id, out);
    }

    /// A worker process takes tasks again.
    pub(crate) fn ready(&mut self, id: LeaseId) {
        if let Some(lease) = self.leases.change(id)
            && lease.phase == Phase::Waiting
        {
            lease.phase = Phase::Open;
        }
    }

    /// The user wants these tasks not to run; those that are found are taken out of `wanted`.
    pub(crate) fn cancel(&mut self, wanted: &mut Wanted, out: &mut Vec<Action>) {
        for (shape, queue) in &mut self.queues {
            for task in wanted.take_from(&mut queue.ready, |task| task.spec.id) {
                self.touched.add(shape, queue);
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
            }
        }
        let asked: Vec<TaskId> = self.undecided.keys().copied().filter(|id| wanted.take(*id).is_some()).collect();
        let undecided: Vec<Task> = asked.iter().filter_map(|id| self.undecided.remove(id)).collect();
        for task in undecided.into_iter().chain(self.resting.cancel(wanted)) {
            let error = Error::Cancelled { task: task.name.to_string() };
            out.push(Action::Fail { task, error });
        }
        self.at_home.cancel(wanted, out);
        if wanted.is_empty() {
            return;
        }
        for (grant, task) in self.leases.tasks_mut() {
            let id = task.spec.id;
            if let Some(force) = wanted.take(id) {
                task.cancelled = true;
                out.push(Action::Cancel { worker: grant.worker.process, task: id, force });
                if wanted.is_empty() {
                    return;
                }
            }
        }
    }

    /// Tasks that `parent` submitted, but for those that run and were asked to stop.
    pub(crate) fn children_of(&self, parent: TaskId) -> Vec<TaskId> {
        let ready = self.queues.values().flat_map(|queue| queue.ready.iter());
        let flying = self.leases.iter().flat_map(|lease| lease.in_flight.iter().map(|(_, task)| task));
        let all =
            ready.chain(flying).chain(self.at_home.iter()).chain(self.undecided.values()).chain(self.resting.iter());
        all.filter(|task| task.spec.parent == Some(parent) && !task.cancelled).map(|task| task.spec.id).collect()
    }

    /// Time passes.
    pub(crate) fn tick(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.renew_leases(now_ms);
        while let Some(task) = self.resting.rested(now_ms) {
            self.again(task, After::Nothing);
        }
        let due = self.leases.due(now_ms);
        let (unexplained, idle): (Vec<LeaseId>, Vec<LeaseId>) =
            due.into_iter().partition(|id| self.leases.lost().contains(id));
        for id in unexplained {
            self.bury(id, None, now_ms, out);
        }
        for id in idle {
            let shape = self.leases.get(id).map(|lease| lease.grant.shape.clone());
            if shape.is_some_and(|shape| self.keeps_leases_of(&shape)) {
                if let Some(lease) = self.leases.change(id) {
                    lease.idle_since_ms = now_ms;
                }
                continue;
            }
            if self.give_up(id).is_some() {
                out.push(Action::Return { lease: id });
            }
        }
        self.touch_kept(now_ms);
    }

    /// In how many milliseconds [`Dispatch::tick`] has something to do. Asked when everything is settled: what was just sent
    /// somewhere may have to be looked after.
    pub(crate) fn next_tick(&mut self, now_ms: u64) -> Option<u64> {
        self.renew_leases(now_ms);
        let due = self.leases.next_due().map(|at| at.saturating_sub(now_ms));
        // Somebody else's unstarted tasks may be worth taking in a moment.
        let uneven = self.leases.are_uneven().then_some(2);
        let all = [due, uneven, self.resting.next(now_ms), self.kept_for(now_ms), self.left_until(now_ms)];
        all.into_iter().flatten().min()
    }

    /// Gives back every lease under which nothing runs. Whether there were any.
    pub(crate) fn return_idle(&mut self, out: &mut Vec<Action>) -> bool {
        let is_idle =
            |lease: &&Lease| matches!(lease.phase, Phase::Open | Phase::Waiting) && lease.in_flight.is_empty();
        let idle: Vec<LeaseId> = self.leases.iter().filter(is_idle).map(|lease| lease.grant.lease).collect();
        for lease in &idle {
            self.give_up(*lease);
            out.push(Action::Return { lease: *lease });
        }
        !idle.is_empty()
    }

    /// Whether it has neither tasks nor leases.
    pub(crate) fn is_done(&self) -> bool {
        let has_queued = self.queues.values().any(|queue| !queue.ready.is_empty());
        self.leases.is_empty()
            && self.at_home.is_empty()
            && self.undecided.is_empty()
            && self.resting.is_empty()
            && !has_queued
    }

    /// The session is over: nothing will run any more.
    pub(crate) fn end(&mut self, error: &Error, out: &mut Vec<Action>) {
        self.session_over = Some(error.clone());
        let queues = std::mem::take(&mut self.queues);
        let leases = self.leases.take_all();
        self.by_worker.clear();
        let ready = queues.into_values().flat_map(|queue| queue.ready);
        let flying = leases.flat_map(|lease| lease.in_flight.into_iter().map(|(_, task)| task));
        let undecided = std::mem::take(&mut self.undecided).into_values();
        for task in ready.chain(flying).chain(self.at_home.take_all()).chain(undecided).chain(self.resting.take_all()) {
            out.push(Action::Fail { task, error: error.clone() });
        }
    }
}

/// Why a task or call cannot be sent to anybody, if it cannot.
pub(crate) fn too_large(spec: &TaskSpec, name: &Name) -> Option<Error> {
    let weight = spec.weight();
    (weight > MESSAGE_LIMIT).then(|| Error::InvalidArgument {
        what: format!(
            "the arguments of {name} need {weight} bytes in one message, over the limit of {MESSAGE_LIMIT}; put large values and long lists of refs into the store with `put`, and pass their refs"
        ),
    })
}

fn smoothed(average: Option<f64>, ran_nanos: u64) -> f64 {
    let ran = ran_nanos as f64;
    match average {
        None => ran,
        // Quick to believe that tasks are long, slow to believe that they are short.
        Some(average) if ran > average => average + (ran - average) * 0.3,
        Some(average) => average + (ran - average) * 0.05,
    }
}

#[cfg(test)]
mod scale_tests;

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
