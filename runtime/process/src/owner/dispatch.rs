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
//! A task that waits for what it has submitted gives its process away meanwhile: `at_home`.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Arg, Outputs, Shape, TaskSpec};
use wingbeat_core::value::StoreNode;
use wingbeat_core::{LeaseId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{MESSAGE_LIMIT, Weight, WorkerDeath};

use crate::owner::argument_bytes::ArgumentBytes;
use crate::owner::memory_retries::MemoryRetries;
use crate::owner::name::Name;
use crate::owner::object::Held;
use crate::owner::recipe::Remaking;
use crate::owner::resting::Resting;
use crate::owner::retrying::{RetryOn, Verdict, one_less, pause_ms};
use crate::owner::wanted::Wanted;

mod at_home;

use at_home::AtHome;
pub(crate) use at_home::TakenHome;

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
/// When contact with a worker process is lost and no exit is reported within this time, the connection broke and the process
/// may live: its lease is returned, and its tasks are tried again elsewhere.
pub(crate) const CAUSE_LIMIT_MS: u64 = 5_000;

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

/// What became of the last attempt at a task that is tried again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// It was never begun.
    Nothing,
    /// It was begun, and moved to another node: it costs no retry.
    Move,
    /// It was ended for that, and has paid with a retry of those for that.
    MemoryShortage,
    Failure,
}

impl Task {
    /// Whether it may not begin a second time, whatever becomes of the first.
    fn runs_at_most_once(&self) -> bool {
        self.retries == 0 && self.spec.attempt == 0
    }

    /// It is tried again after this.
    fn costs(&mut self, after: After) {
        if after != After::Nothing {
            let spec = Arc::make_mut(&mut self.spec);
            spec.attempt = spec.attempt.saturating_add(1);
            spec.yields_memory = self.memory_retries.has_any();
            // What has ended its process may have been what that has run for it: now each has its own, and the cause is known.
            spec.shares_process &= after == After::Move;
        }
        if after == After::Failure {
            self.retries = one_less(self.retries);
        }
        if let Some(remaking) = &self.remaking {
            remaking.goes_on(self.spec.attempt, self.retries);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Open,
    /// The worker process waits in user code, and takes no tasks.
    Waiting,
    /// The head wants it back; what runs finishes.
    Recalled,
    /// The connection to the worker process ended; its cause is not known yet.
    Lost {
        since_ms: u64,
    },
}

struct Lease {
    grant: Grant,
    phase: Phase,
    /// In order of pushing. `next - in_flight.len()` is not the first's number: tasks leave in any order.
    in_flight: VecDeque<(u64, Task)>,
    /// What those weigh.
    bytes: usize,
    next: u64,
    taking_back: bool,
    idle_since_ms: u64,
    /// When it last delivered, or got its first task.
    last_result_ms: u64,
    /// The news of its end, if it came before the end of the connection.
    death: Option<WorkerDeath>,
}

impl Lease {
    fn is_stuck(&self, now_ms: u64) -> bool {
        !self.in_flight.is_empty() && now_ms >= self.last_result_ms + STUCK_MS
    }
}

struct Queue {
    ready: VecDeque<Task>,
    leases: Vec<LeaseId>,
    /// Smoothed run time of a task; none before the first result.
    average_nanos: Option<f64>,
    announced: u32,
    name: Name,
    /// Since when its first ready task is the first.
    front_since_ms: Option<u64>,
}

impl Queue {
    fn new(name: Name) -> Queue {
        Queue {
            ready: VecDeque::new(),
            leases: Vec::new(),
            average_nanos: None,
            announced: 0,
            name,
            front_since_ms: None,
        }
    }
}

/// The state.
#[derive(Default)]
pub(crate) struct Dispatch {
    queues: BTreeMap<Arc<Shape>, Queue>,
    leases: BTreeMap<LeaseId, Lease>,
    by_worker: HashMap<ProcessId, LeaseId>,
    at_home: AtHome,
    resting: Resting,
    /// Tasks that have failed, while user code is asked whether they are tried again. Seldom any.
    undecided: BTreeMap<TaskId, Task>,
    /// Nodes that have died, whose ids are never used again: a task that was queued before, or comes back, still names them.
    dead_nodes: HashSet<NodeId>,
    /// Set at the end of the session: nothing is queued any more.
    session_over: Option<Error>,
}

/// An argument of which the task knows dead nodes alone.
fn lost_argument(spec: &TaskSpec, dead: &HashSet<NodeId>) -> Option<ObjectId> {
    if dead.is_empty() {
        return None;
    }
    spec.args.iter().find_map(|arg| match arg {
        Arg::Stored(id, stored) if !stored.nodes.is_empty() => {
            stored.nodes.iter().all(|holder| dead.contains(&holder.node)).then_some(*id)
        }
        _ => None,
    })
}

/// What became of a result.
pub(crate) enum Settled {
    /// The task is done, with this result.
    Done(Task),
    /// It will be tried again.
    Retried,
    /// User code says whether it is: [`Dispatch::decided`].
    Asks(RetryOn),
    /// Nobody waits for it: a result of an attempt that was given up.
    Unknown,
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
        let in_flight = self.leases.values().map(|lease| lease.in_flight.len()).sum::<usize>();
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
        self.leases.values().find_map(|lease| {
            let before = lease.in_flight.iter().position(|(_, task)| task.spec.id == id)?;
            let standing = DispatchStanding::Pushed { before, lease: lease.grant.lease, pid: lease.grant.pid };
            Some((lease.in_flight[before].1.name.to_string(), standing))
        })
    }

    #[cfg(test)]
    pub(crate) fn what_is_left(&self) -> Vec<String> {
        let ready =
            self.queues.values().flat_map(|queue| queue.ready.iter().map(|task| format!("{} ready", task.spec.id)));
        let leases = self.leases.values().map(|lease| {
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
        let queue = self.queues.entry(task.shape.clone()).or_insert_with(|| Queue::new(task.name.clone()));
        queue.ready.push_back(task);
    }

    /// Pushes what can be pushed and says how many leases are wanted. Called once after a round of events.
    pub(crate) fn settle(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.offer_home(now_ms, out);
        let shapes: Vec<Arc<Shape>> = self.queues.keys().cloned().collect();
        for shape in shapes {
            self.fill(&shape, now_ms, out);
            self.rebalance(&shape, now_ms, out);
            self.announce(&shape, now_ms, out);
        }
    }

    fn fill(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        if queue.ready.is_empty() {
            queue.front_since_ms = None;
            return;
        }
        queue.front_since_ms.get_or_insert(now_ms);
        let depth = match queue.average_nanos {
            None => 1,
            Some(nanos) => {
                // The next ones wait at hand, unless a round trip is nothing beside a task: among longer ones there
                // may be some that take no time at all.
                let least = if nanos < LONG_NANOS { 4 } else { 1 };
                ((AHEAD_NANOS / (nanos + OVERHEAD_NANOS)) as usize).clamp(least, AHEAD_TASKS)
            }
        };
        let mut open: Vec<(usize, LeaseId)> = queue
            .leases
            .iter()
            .filter_map(|id| self.leases.get(id))
            .filter(|lease| lease.phase == Phase::Open && !lease.is_stuck(now_ms))
            // Refilled at half, so that tasks go in batches.
            .filter(|lease| lease.in_flight.len() * 2 <= depth || lease.in_flight.is_empty())
            .map(|lease| (lease.in_flight.len(), lease.grant.lease))
            .filter(|(in_flight, _)| *in_flight < depth)
            .collect();
        open.sort_unstable();
        if open.is_empty() {
            return;
        }
        // Filled up to one level, so that who has less gets more.
        let all = queue.ready.len() + open.iter().map(|(in_flight, _)| in_flight).sum::<usize>();
        let takers = open.len() + usize::from(queue.left_to_home(&self.at_home, now_ms) > 0);
        let level = all.div_ceil(takers).min(depth);
        for (in_flight, id) in open {
            let share = level.saturating_sub(in_flight).min(queue.ready.len());
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            if share == 0 {
                continue;
            }
            if lease.in_flight.is_empty() {
                lease.last_result_ms = now_ms;
            }
            let first = lease.next;
            let mut tasks = Vec::with_capacity(share);
            while tasks.len() < share {
                let Some(weight) = queue.ready.front().map(|task| task.spec.weight()) else { break };
                if lease.bytes > 0 && lease.bytes + weight > AHEAD_BYTES {
                    break;
                }
                let Some(task) = queue.ready.pop_front() else { break };
                // A node that has joined since knows nothing of them, and would look for them in vain.
                if let Some(argument) = lost_argument(&task.spec, &self.dead_nodes) {
                    out.push(Action::ArgumentLost { task, argument });
                    continue;
                }
                tasks.push(task.spec.clone());
                lease.bytes += weight;
                lease.in_flight.push_back((lease.next, task));
                lease.next += 1;
            }
            if tasks.is_empty() {
                continue;
            }
            queue.front_since_ms = Some(now_ms);
            out.push(Action::Push { worker: lease.grant.worker.clone(), lease: id, first, tasks });
        }
    }

    /// An idle lease gets half of what the fullest one has not started.
    fn rebalance(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get(shape) else { return };
        if !queue.ready.is_empty() || queue.leases.len() < 2 {
            return;
        }
        let leases = || queue.leases.iter().filter_map(|id| self.leases.get(id));
        if !leases().any(|lease| lease.phase == Phase::Open && lease.in_flight.is_empty()) {
            return;
        }
        let fullest = leases()
            .filter(|lease| matches!(lease.phase, Phase::Open | Phase::Waiting) && !lease.taking_back)
            // One that delivers is about to be done by itself.
            .filter(|lease| lease.in_flight.len() >= 2 && now_ms > lease.last_result_ms + 1)
            .max_by_key(|lease| (lease.in_flight.len(), std::cmp::Reverse(lease.grant.lease)))
            .map(|lease| lease.grant.lease);
        if let Some(lease) = fullest.and_then(|id| self.leases.get_mut(&id)) {
            lease.taking_back = true;
            let most = (lease.in_flight.len() / 2).max(1) as u32;
            let worker = lease.grant.worker.process;
            out.push(Action::TakeBack { worker, lease: lease.grant.lease, most, recalled: false });
        }
    }

    fn announce(&mut self, shape: &Arc<Shape>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(queue) = self.queues.get_mut(shape) else { return };
        let mut busy = 0;
        let mut waiting = 0;
        for lease in queue.leases.iter().filter_map(|id| self.leases.get(id)) {
            match lease.phase {
                Phase::Waiting => waiting += 1,
                _ => busy += usize::from(!lease.in_flight.is_empty()),
            }
        }
        // A task in flight on each busy lease, and those that could start elsewhere. Leases whose process
        // waits are held but of no use.
        let short = queue.average_nanos.is_some_and(|nanos| nanos < 20_000.0);
        let left_to_home = queue.left_to_home(&self.at_home, now_ms);
        let (mut soon_done, mut could_start) = (0, queue.ready.len() - left_to_home);
        for lease in queue.leases.iter().filter_map(|id| self.leases.get(id)) {
            let unstarted = lease.in_flight.len().saturating_sub(1);
            if short && !lease.is_stuck(now_ms) {
                soon_done += unstarted;
            } else {
                could_start += unstarted;
            }
        }
        let could_use = could_start + soon_done / 64;
        let held = queue.leases.len();
        // In steps, so that the head hears of real changes only: none, what is held, or the next power of two.
        let wanted = match (busy + could_use).min(WANTED_LIMIT) + waiting {
            wanted if wanted <= held => held as u32,
            wanted => wanted.next_power_of_two() as u32,
        };
        if wanted != queue.announced {
            queue.announced = wanted;
            out.push(Action::Demand { shape: shape.clone(), wanted, name: queue.name.clone() });
        }
        if queue.ready.is_empty() && queue.leases.is_empty() && wanted == 0 {
            self.queues.remove(shape);
        }
    }

    /// The leases that it has.
    pub(crate) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.keys().copied()
    }

    /// The head knows nothing of what is wanted: [`Dispatch::settle`] says it again.
    pub(crate) fn announce_anew(&mut self) {
        for queue in self.queues.values_mut() {
            queue.announced = u32::MAX;
        }
    }

    /// The head granted a lease.
    pub(crate) fn granted(&mut self, grant: Grant, now_ms: u64, out: &mut Vec<Action>) {
        let Some((shape, queue)) = self.queues.iter_mut().find(|(known, _)| **known == grant.shape) else {
            // Nothing of the shape is left to do.
            out.push(Action::Return { lease: grant.lease });
            return;
        };
        let id = grant.lease;
        queue.leases.push(id);
        self.by_worker.insert(grant.worker.process, id);
        let lease = Lease {
            grant: Grant { shape: shape.clone(), ..grant },
            phase: Phase::Open,
            in_flight: VecDeque::new(),
            bytes: 0,
            next: 0,
            taking_back: false,
            idle_since_ms: now_ms,
            last_result_ms: now_ms,
            death: None,
        };
        self.leases.insert(id, lease);
    }

    /// The head says that the shape can never be had.
    pub(crate) fn refused(&mut self, shape: &Shape, error: &Error, out: &mut Vec<Action>) {
        let Some((_, queue)) = self.queues.iter_mut().find(|(known, _)| ***known == *shape) else { return };
        queue.announced = 0;
        for task in queue.ready.drain(..) {
            // The head knows the name of one of them.
            let error = error.clone().about(|| task.name.to_string());
            out.push(Action::Fail { task, error });
        }
    }

    /// The head wants a lease back.
    pub(crate) fn recalled(&mut self, id: LeaseId, out: &mut Vec<Action>) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        if matches!(lease.phase, Phase::Open | Phase::Waiting) {
            lease.phase = Phase::Recalled;
            // What waits there for what it has submitted may run that for hours.
            let runs_others = lease.in_flight.iter().any(|(_, task)| task.spec.shares_process);
            if runs_others || lease.in_flight.len() > 1 && !lease.taking_back {
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
            self.leases.get(&id).is_some_and(|lease| lease.phase == Phase::Recalled && lease.in_flight.is_empty());
        if done {
            self.give_up(id);
            out.push(Action::Return { lease: id });
        }
    }

    fn give_up(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        self.by_worker.remove(&lease.grant.worker.process);
        if let Some(queue) = self.queues.get_mut(&lease.grant.shape) {
            queue.leases.retain(|other| *other != id);
            // What was announced included it.
            queue.announced = u32::MAX;
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
        let Some(lease) = self.leases.get_mut(&id) else { return Settled::Unknown };
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

    /// An attempt has ended: what becomes of the task.
    fn settled(&mut self, task: Task, failed: Option<&Error>, now_ms: u64) -> Settled {
        match failed {
            Some(error) if Self::has_retries(&task, error) && self.can_retry(&task) => match verdict(&task, error) {
                Verdict::Retry => {
                    self.failed(task, error.clone(), now_ms);
                    Settled::Retried
                }
                Verdict::Fail => Settled::Done(task),
                Verdict::Ask => {
                    let asks = Settled::Asks(task.retry_on.clone());
                    self.undecided.insert(task.spec.id, task);
                    asks
                }
            },
            _ => Settled::Done(task),
        }
    }

    /// User code has said whether a task that has failed is tried again. It is none if it was cancelled meanwhile.
    pub(crate) fn decided(&mut self, id: TaskId, again: bool, error: Error, now_ms: u64, out: &mut Vec<Action>) {
        match self.undecided.remove(&id) {
            Some(task) if again => self.failed(task, error, now_ms),
            Some(task) => out.push(Action::Fail { task, error }),
            None => {}
        }
    }

    fn can_retry(&self, task: &Task) -> bool {
        !task.cancelled && self.session_over.is_none()
    }

    /// Of what has happened to its process.
    fn may_retry(&self, task: &Task, error: &Error) -> bool {
        Self::has_retries(task, error) && self.can_retry(task) && matches!(verdict(task, error), Verdict::Retry)
    }

    /// Whether attempts are left of those that such a failure may cost.
    fn has_retries(task: &Task, error: &Error) -> bool {
        match error {
            Error::OutOfMemory { .. } => task.memory_retries.has_any(),
            _ => task.retries > 0,
        }
    }

    /// Tries a task again that may be: after a pause, unless it is the first failure and memory was not short.
    fn failed(&mut self, mut task: Task, error: Error, now_ms: u64) {
        let pause = match error {
            Error::OutOfMemory { .. } => {
                let pause = task.memory_retries.take();
                task.costs(After::MemoryShortage);
                pause
            }
            _ => {
                let pause = pause_ms(task.failures);
                task.failures = task.failures.saturating_add(1);
                task.costs(After::Failure);
                pause
            }
        };
        match pause {
            0 => self.again(task, After::Nothing),
            pause => self.resting.rests(task, error, pause, now_ms),
        }
    }

    /// Puts a task at the front of its queue.
    fn again(&mut self, mut task: Task, after: After) {
        task.costs(after);
        let queue = self.queues.entry(task.shape.clone()).or_insert_with(|| Queue::new(task.name.clone()));
        queue.ready.push_front(task);
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
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.taking_back = false;
        if waiting && lease.phase == Phase::Open {
            lease.phase = Phase::Waiting;
        }
        let mut returned = Vec::new();
        lease.in_flight = std::mem::take(&mut lease.in_flight)
            .into_iter()
            .filter_map(|(seq, task)| {
                if tasks.contains(&task.spec.id) {
                    lease.bytes = lease.bytes.saturating_sub(task.spec.weight());
                    returned.push(task);
                    None
                } else {
                    Some((seq, task))
                }
            })
            .collect();
        if lease.in_flight.is_empty() {
            lease.idle_since_ms = now_ms;
        }
        for task in returned.into_iter().rev() {
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
        if let Some(lease) = self.leases.get_mut(&id)
            && lease.phase == Phase::Waiting
        {
            lease.phase = Phase::Open;
        }
    }

    /// The user wants these tasks not to run; those that are found are taken out of `wanted`.
    pub(crate) fn cancel(&mut self, wanted: &mut Wanted, out: &mut Vec<Action>) {
        for queue in self.queues.values_mut() {
            for task in wanted.take_from(&mut queue.ready, |task| task.spec.id) {
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
        for lease in self.leases.values_mut() {
            if wanted.is_empty() {
                return;
            }
            for (_, task) in &mut lease.in_flight {
                let id = task.spec.id;
                if let Some(force) = wanted.take(id) {
                    task.cancelled = true;
                    out.push(Action::Cancel { worker: lease.grant.worker.process, task: id, force });
                }
            }
        }
    }

    /// Tasks that `parent` submitted.
    pub(crate) fn children_of(&self, parent: TaskId) -> Vec<TaskId> {
        let ready = self.queues.values().flat_map(|queue| queue.ready.iter());
        let flying = self.leases.values().flat_map(|lease| lease.in_flight.iter().map(|(_, task)| task));
        let all =
            ready.chain(flying).chain(self.at_home.iter()).chain(self.undecided.values()).chain(self.resting.iter());
        all.filter(|task| task.spec.parent == Some(parent)).map(|task| task.spec.id).collect()
    }

    /// The connection to a process ended.
    pub(crate) fn connection_lost(&mut self, worker: ProcessId, now_ms: u64, out: &mut Vec<Action>) {
        let Some(id) = self.by_worker.get(&worker).copied() else { return };
        let Some(lease) = self.leases.get_mut(&id) else { return };
        if !matches!(lease.phase, Phase::Lost { .. }) {
            lease.phase = Phase::Lost { since_ms: now_ms };
        }
        if let Some(death) = lease.death.take() {
            self.bury(id, Some(death), now_ms, out);
        }
    }

    /// The head says how a worker process ended. Acted upon once the connection has ended too, so that
    /// results which are still on their way count.
    pub(crate) fn worker_died(&mut self, death: WorkerDeath, now_ms: u64, out: &mut Vec<Action>) {
        let Some(id) = self.by_worker.get(&death.process).copied() else { return };
        let Some(lease) = self.leases.get_mut(&id) else { return };
        if matches!(lease.phase, Phase::Lost { .. }) {
            self.bury(id, Some(death), now_ms, out);
        } else {
            lease.death = Some(death);
        }
    }

    /// Settles all tasks in flight on a lost lease: unstarted ones are queued again for free, the others cost a retry or
    /// fail. Without a reported death the process may live, and the head still counts the lease: it is returned, and where
    /// something may still run there, the process is to end, or the next owner's tasks would wait behind that.
    fn bury(&mut self, id: LeaseId, death: Option<WorkerDeath>, now_ms: u64, out: &mut Vec<Action>) {
        let Some(lease) = self.give_up(id) else { return };
        if death.is_none() {
            out.push(match lease.in_flight.is_empty() {
                true => Action::Return { lease: id },
                false => Action::Abandon { lease: id },
            });
        }
        let started = death.as_ref().map_or(u64::MAX, |death| death.started);
        let is_moved = death.as_ref().is_some_and(|death| death.is_moved);
        for (seq, task) in lease.in_flight.into_iter().rev() {
            if seq < started {
                out.push(Action::Left { task: task.spec.id, outputs: task.spec.outputs, at: lease.grant.node.clone() });
            }
            if task.cancelled {
                let error = Error::Cancelled { task: task.name.to_string() };
                out.push(Action::Fail { task, error });
                continue;
            }
            let has_begun = seq < started;
            if self.session_over.is_none() && (!has_begun || is_moved && !task.runs_at_most_once()) {
                self.again(task, if has_begun { After::Move } else { After::Nothing });
                continue;
            }
            let error = match &death {
                Some(death) => death.exit.clone().into_error(task.name.to_string(), death.process, death.pid),
                None => Error::ContactLost {
                    what: task.name.to_string(),
                    who: format!("worker process {} on {}", lease.grant.pid, lease.grant.node.node),
                    why: format!("no exit was reported within {} s", CAUSE_LIMIT_MS / 1000),
                },
            };
            if self.may_retry(&task, &error) {
                self.failed(task, error, now_ms);
            } else {
                out.push(Action::Fail { task, error });
            }
        }
    }

    /// A node is gone with all its leases. Where a worker process is known to have ended before, that is the cause, and it
    /// is acted upon as soon as the connection has ended: what was moved away from the node has not failed.
    pub(crate) fn node_died(&mut self, node: NodeId, why: &str, out: &mut Vec<Action>) {
        self.dead_nodes.insert(node);
        let there = self.leases.values().filter(|lease| lease.grant.node.node == node && lease.death.is_none());
        let lost: Vec<LeaseId> = there.map(|lease| lease.grant.lease).collect();
        for id in lost {
            let Some(lease) = self.give_up(id) else { continue };
            for (_, task) in lease.in_flight.into_iter().rev() {
                let error = match task.cancelled {
                    true => Error::Cancelled { task: task.name.to_string() },
                    false => Error::NodeDied { what: task.name.to_string(), node, why: why.to_owned() },
                };
                if self.may_retry(&task, &error) {
                    self.again(task, After::Failure);
                } else {
                    out.push(Action::Fail { task, error });
                }
            }
        }
    }

    /// Whether it waits for the cause of a lost connection.
    pub(crate) fn waits_for_causes(&self) -> bool {
        self.leases.values().any(|lease| matches!(lease.phase, Phase::Lost { .. }))
    }

    /// There is no head that could have told a cause: the time for that begins anew.
    pub(crate) fn no_cause_is_told(&mut self, now_ms: u64) {
        for lease in self.leases.values_mut() {
            if let Phase::Lost { since_ms } = &mut lease.phase {
                *since_ms = now_ms;
            }
        }
    }

    /// Time passes. Answers in how many milliseconds it wants to be called again.
    pub(crate) fn tick(&mut self, now_ms: u64, out: &mut Vec<Action>) -> Option<u64> {
        let mut next: Option<u64> = None;
        let mut sooner = |ms: u64| next = Some(next.map_or(ms, |known: u64| known.min(ms)));
        let mut idle = Vec::new();
        let mut unexplained = Vec::new();
        for lease in self.leases.values() {
            match lease.phase {
                Phase::Lost { since_ms } if now_ms >= since_ms + CAUSE_LIMIT_MS => unexplained.push(lease.grant.lease),
                Phase::Lost { since_ms } => sooner(since_ms + CAUSE_LIMIT_MS - now_ms),
                // Where something waits that has nothing in flight, an earlier task has left something behind.
                Phase::Open | Phase::Waiting if lease.in_flight.is_empty() => {
                    if now_ms >= lease.idle_since_ms + IDLE_KEEP_MS {
                        idle.push(lease.grant.lease);
                    } else {
                        sooner(lease.idle_since_ms + IDLE_KEEP_MS - now_ms);
                        // Somebody else's unstarted tasks may be worth taking in a moment.
                        if self
                            .leases
                            .values()
                            .any(|other| other.grant.shape == lease.grant.shape && other.in_flight.len() > 1)
                        {
                            sooner(2);
                        }
                    }
                }
                // What stands behind a task that turns out to be long is to start elsewhere.
                Phase::Open if lease.in_flight.len() > 1 && !lease.is_stuck(now_ms) => {
                    sooner(lease.last_result_ms + STUCK_MS - now_ms);
                }
                _ => {}
            }
        }
        if let Some(ms) = self.resting.next(now_ms) {
            sooner(ms);
        }
        while let Some(task) = self.resting.rested(now_ms) {
            self.again(task, After::Nothing);
        }
        for id in unexplained {
            self.bury(id, None, now_ms, out);
        }
        for id in idle {
            if self.give_up(id).is_some() {
                out.push(Action::Return { lease: id });
            }
        }
        next
    }

    /// Gives back every lease under which nothing runs. Whether there were any.
    pub(crate) fn return_idle(&mut self, out: &mut Vec<Action>) -> bool {
        let is_idle =
            |lease: &&Lease| matches!(lease.phase, Phase::Open | Phase::Waiting) && lease.in_flight.is_empty();
        let idle: Vec<LeaseId> = self.leases.values().filter(is_idle).map(|lease| lease.grant.lease).collect();
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
        let leases = std::mem::take(&mut self.leases);
        self.by_worker.clear();
        let ready = queues.into_values().flat_map(|queue| queue.ready);
        let flying = leases.into_values().flat_map(|lease| lease.in_flight.into_iter().map(|(_, task)| task));
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

fn verdict(task: &Task, error: &Error) -> Verdict {
    match error {
        // A lost argument must be there again first; that costs no attempt.
        Error::ObjectLost { .. } => Verdict::Fail,
        error if error.is_system_failure() => Verdict::Retry,
        error => task.retry_on.verdict(error),
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
