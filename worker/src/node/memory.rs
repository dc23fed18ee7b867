//! The memory of the node: who uses what, and the end of who takes too much of it. [`wingbeat_node::memory`] decides who that is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use wingbeat_core::ProcessId;
use wingbeat_core::error::Error;
use wingbeat_core::limits::limit;
use wingbeat_core::memory::{EndedBy, MemoryShortage, MemoryUsage, MemoryUser};
use wingbeat_net::messages::HeadMessage;
use wingbeat_node::Event;
use wingbeat_node::memory::{self, KernelKills, Sample, Strain, User, Verdict, Watch, Work};

use super::Daemon;
use crate::{guard, machine};

/// Processes that an error names.
const NAMED: usize = 8;

/// A program whose worker process was ended is waited for so long before another process is ended, too.
const LEFT_BEHIND: Duration = Duration::from_secs(2);

/// A look at who uses what takes at most this part of the time, as long as nobody has to be ended.
const SHARE_OF_TIME: u32 = 10;

/// Bytes that the node pretends to have, for its worker processes and its object store alone. For tests: `WINGBEAT_MEMORY_LIMIT`.
static PRETENDED: LazyLock<Option<u64>> =
    LazyLock::new(|| std::env::var("WINGBEAT_MEMORY_LIMIT").ok()?.trim().parse().ok());

/// How a node watches its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryConfig {
    /// The part of all memory above which it ends processes, from 0 to 1. 0 for never.
    pub threshold: f64,
    /// How often it looks when a quarter of all memory is left; more rarely or more often where more or less is.
    pub interval: Duration,
}

impl MemoryConfig {
    /// What is given, or else the environment (`WINGBEAT_MEMORY_THRESHOLD`, `WINGBEAT_MEMORY_CHECK_MS`), or else 0.95 and 250 ms.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a threshold that is no part.
    pub fn given(threshold: Option<f64>, interval: Option<Duration>) -> Result<MemoryConfig, Error> {
        let of_environment = || std::env::var("WINGBEAT_MEMORY_THRESHOLD").ok().map(|text| text.trim().parse());
        let threshold = match threshold {
            Some(threshold) => threshold,
            None => of_environment().unwrap_or(Ok(0.95)).unwrap_or(f64::NAN),
        };
        if !(0.0..=1.0).contains(&threshold) {
            return Err(Error::InvalidOption {
                what: "the node".into(),
                option: "memory threshold".into(),
                why: "it is a part of all memory, from 0 to 1, such as 0.95; 0 turns the watch off".into(),
            });
        }
        let interval = interval.unwrap_or_else(|| limit("WINGBEAT_MEMORY_CHECK_MS", Duration::from_millis(250)));
        Ok(MemoryConfig { threshold, interval })
    }

    /// The part of all memory that objects may fill.
    pub(super) fn for_objects(&self) -> f64 {
        if self.threshold > 0.0 { self.threshold } else { 1.0 }
    }
}

/// What the daemon knows of its memory.
pub(super) struct Memory {
    config: MemoryConfig,
    began: Instant,
    kills: Mutex<KernelKills>,
    /// As it was at the last look.
    latest: Mutex<(MemoryUsage, Vec<MemoryUser>)>,
    /// As it was when it became short, until there is enough: as the head has been told.
    short: Mutex<Option<MemoryUsage>>,
    /// Before this, nobody looks again who uses what.
    rests_until: Mutex<Instant>,
    /// Programs of worker processes, each until it has ended, with when it was started and since when its worker process is gone.
    programs: Mutex<BTreeMap<u32, (u64, Option<Instant>)>>,
}

impl Memory {
    pub(super) fn new(config: MemoryConfig) -> Memory {
        let mut kills = KernelKills::default();
        kills.counts(0, machine::HERE.kernel_kills());
        let began = Instant::now();
        Memory {
            config,
            began,
            kills: Mutex::new(kills),
            latest: Mutex::default(),
            short: Mutex::default(),
            rests_until: Mutex::new(began),
            programs: Mutex::default(),
        }
    }

    /// Programs that outlive their worker processes, as their keepers end them; and whether any of them has for no longer than that takes. What they
    /// use is nobody's: not that of the process from which they were forked.
    fn left_behind(&self, workers: &[Worker], processes: &BTreeMap<u32, Process>) -> (BTreeSet<u32>, bool) {
        let own: BTreeSet<u32> = workers.iter().filter_map(|worker| worker.program).collect();
        let mut programs = self.programs.lock();
        let started = |pid: &u32| Some((*pid, (processes.get(pid)?.started, None)));
        programs.extend(own.iter().filter_map(started));
        // One that nobody has waited for yet uses nothing. Of one that has ended, another process may have the id.
        programs.retain(|pid, (started, _)| {
            processes.get(pid).is_some_and(|process| process.bytes > 0 && process.started == *started)
        });
        let left = programs.iter_mut().filter(|(pid, _)| !own.contains(pid));
        let since: BTreeMap<u32, Instant> =
            left.map(|(pid, (_, since))| (*pid, *since.get_or_insert_with(Instant::now))).collect();
        let is_ending = since.values().any(|since| since.elapsed() < LEFT_BEHIND);
        (since.into_keys().collect(), is_ending)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn count_kills(&self) {
        self.kills.lock().counts(self.now(), machine::HERE.kernel_kills());
    }
}

/// A process of the machine.
struct Process {
    parent: u32,
    /// When it was started, in ticks since the machine was: with its id, it is no other.
    started: u64,
    command: String,
    /// Memory of its own: what it shares with others, such as the object store, is not.
    bytes: u64,
}

/// A worker process, with what runs in it.
struct Worker {
    user: User,
    pid: u32,
    /// A program that is its own, and may have been forked elsewhere.
    program: Option<u32>,
    name: String,
}

/// What a look has found.
struct Look {
    sample: Sample,
    largest: Vec<MemoryUser>,
}

impl Daemon {
    /// Looks after the memory of the node until it ends.
    pub(super) async fn watch_memory(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        let (mut watch, mut strain) = (Watch::default(), Strain::default());
        let mut relief: Option<JoinHandle<bool>> = None;
        let (mut is_store_dry, mut is_told) = (false, false);
        let mut pause = self.memory.config.interval;
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            if relief.as_ref().is_some_and(JoinHandle::is_finished)
                && let Some(done) = relief.take()
            {
                is_store_dry = !done.await.unwrap_or(false);
            }
            let daemon = self.clone();
            let store_may_give = relief.is_some() || !is_store_dry;
            let Ok(Some(look)) = self.on_disk("looking at memory", move || daemon.look(store_may_give)).await else {
                // Nobody can say any more that it is short.
                if strain.look(self.memory.now(), &MemoryUsage::default()).is_some() {
                    self.tell_of_memory(None);
                }
                pause = self.memory.config.interval;
                continue;
            };
            let verdict = watch.look(self.memory.now(), &look.sample);
            if let Some(is_short) = strain.look(self.memory.now(), &look.sample.usage) {
                self.tell_of_memory(is_short.then(|| look.sample.usage.clone()));
            }
            match verdict {
                Verdict::Enough => (is_store_dry, is_told) = (false, false),
                Verdict::Relieve(bytes) if relief.is_none() => {
                    let daemon = self.clone();
                    relief = Some(self.on_disk("making the store smaller", move || daemon.store.give_back(bytes)));
                }
                Verdict::Relieve(_) => {}
                Verdict::Retire(process) | Verdict::End(process, _) => self.end_for_memory(&look, process),
                Verdict::Helpless if !is_told => {
                    is_told = true;
                    let shortage = self.shortage(EndedBy::Node, look.sample.usage.clone(), look.largest.clone());
                    tracing::warn!(
                        "memory is short, and nothing that runs on this node would help by ending: {}",
                        shortage.usage
                    );
                }
                Verdict::Helpless => {}
            }
            pause = match verdict {
                // That may last, and costs a look each time.
                Verdict::Helpless => self.memory.config.interval,
                _ => self.pause_after(&look),
            };
            *self.memory.latest.lock() = (look.sample.usage, look.largest);
        }
    }

    /// Has the head show that memory is short here, or that there is enough.
    fn tell_of_memory(&self, short: Option<MemoryUsage>) {
        let mut told = self.memory.short.lock();
        told.clone_from(&short);
        self.head.link.send(HeadMessage::MemoryShort(short.map(Box::new)));
    }

    /// What the head has been told of memory.
    pub(super) fn memory_short(&self) -> Option<MemoryUsage> {
        self.memory.short.lock().clone()
    }

    fn pause_after(&self, look: &Look) -> Duration {
        let interval = u64::try_from(self.memory.config.interval.as_millis()).unwrap_or(u64::MAX);
        match look.sample.usage.threshold {
            // Only the kernel's kills are counted.
            0 => Duration::from_millis(interval.saturating_mul(4)),
            _ => Duration::from_millis(memory::pause(&look.sample.usage, interval)),
        }
    }

    /// Who uses what now.
    fn look(&self, store_may_give: bool) -> Option<Look> {
        self.memory.count_kills();
        let store = self.store.stats().backed;
        let threshold = |limit: u64| (limit as f64 * self.memory.config.threshold) as u64;
        let (mut usage, group) = match *PRETENDED {
            Some(limit) => {
                let of = "WINGBEAT_MEMORY_LIMIT".to_owned();
                (MemoryUsage { of, limit, used: store, threshold: threshold(limit), store }, None)
            }
            None => {
                let machine::Memory { limit, used, group } = machine::HERE.scarcest()?;
                let of =
                    group.as_ref().map_or("the machine".into(), |group| format!("control group {}", group.display()));
                (MemoryUsage { of, limit, used, threshold: threshold(limit), store }, group)
            }
        };
        let (mut users, mut largest) = (None, Vec::new());
        let mut is_ending = self.pool.lock().state.is_ending_for_memory();
        let is_due = usage.used >= usage.threshold || Instant::now() >= *self.memory.rests_until.lock();
        if PRETENDED.is_some() || memory::is_scarce(&usage) && is_due {
            let begun = Instant::now();
            let mut workers = self.workers_by_memory();
            let processes = processes();
            let (left_behind, is_left) = self.memory.left_behind(&workers, &processes);
            is_ending |= is_left;
            let owner = attribute(&processes, &mut workers, &left_behind, usage.limit);
            if PRETENDED.is_some() {
                usage.used += workers.iter().map(|worker| worker.user.bytes).sum::<u64>();
            }
            if usage.used >= usage.threshold {
                largest = name_largest(&processes, &workers, &owner, group);
            }
            users = Some(workers.into_iter().map(|worker| worker.user).collect());
            *self.memory.rests_until.lock() = Instant::now() + begun.elapsed() * SHARE_OF_TIME;
        }
        let store_gives = store_may_give && store > 0;
        let sample = Sample { usage, users, is_ending, store_gives };
        Some(Look { sample, largest })
    }

    /// The worker process that has started the process with this id, or sees it through.
    pub(super) fn process_above(&self, pid: u32) -> Option<ProcessId> {
        let workers = self.workers_by_memory();
        // A rank is forked from a process of another worker process, so that its keeper is looked for first.
        let is_it = |pid: &u32| {
            let program = workers.iter().find(|worker| worker.program == Some(*pid));
            program.or_else(|| workers.iter().find(|worker| worker.pid == *pid)).map(|worker| worker.user.process)
        };
        std::iter::successors(Some(pid), |pid| parent_of(*pid)).find_map(|pid| is_it(&pid))
    }

    fn workers_by_memory(&self) -> Vec<Worker> {
        let pool = self.pool.lock();
        let mut workers = Vec::new();
        for (mut user, pid) in pool.state.users_of_memory() {
            let Some(known) = pool.processes.get(&user.process) else { continue };
            user.started = known.page.started();
            if let Work::Tasks { yields, .. } = &mut user.work {
                *yields = known.page.yields_memory();
            }
            let name = match user.work {
                Work::Idle | Work::Leaving => "(idle worker process)".into(),
                Work::Tasks { .. } | Work::Actor { .. } => known.page.name(),
            };
            workers.push(Worker { user, pid, program: known.page.program(), name });
        }
        workers
    }

    /// Ends a process that was looked at, unless it does something else by now.
    fn end_for_memory(self: &Arc<Self>, look: &Look, process: ProcessId) {
        let users = look.sample.users.iter().flatten();
        let Some(user) = users.into_iter().find(|user| user.process == process) else { return };
        let mut pool = self.pool.lock();
        let Some(known) = pool.processes.get(&process) else { return };
        if known.page.started() != user.started {
            return;
        }
        let shortage = self.shortage(EndedBy::Node, look.sample.usage.clone(), look.largest.clone());
        match user.work {
            Work::Tasks { .. } | Work::Actor { .. } => {
                tracing::warn!(what = known.page.name(), "is ended for want of memory: {shortage}")
            }
            Work::Idle => tracing::info!(%process, "memory is short, and an idle worker process is asked to leave"),
            Work::Leaving => tracing::warn!(
                %process,
                "an idle worker process that was asked to leave, and has not, is ended for want of memory; values that it owns may be lost: {shortage}"
            ),
        }
        let shortage = Box::new(shortage);
        let is_leaving = user.work == Work::Leaving;
        self.step_with(&mut pool, Event::MemoryRanOut { process, lease: user.lease, is_leaving, shortage });
    }

    fn shortage(&self, by: EndedBy, usage: MemoryUsage, largest: Vec<MemoryUser>) -> MemoryShortage {
        MemoryShortage { node: self.who.id, hostname: self.who.hostname.clone(), by, usage, largest }
    }

    /// What is to be known of a process that a SIGKILL ended before it is said that it has: whether that was the kernel's, for
    /// want of memory.
    pub(super) fn killed_for_memory(&self, process: ProcessId, was_told_to_end: bool) -> Option<Event> {
        if was_told_to_end {
            return None;
        }
        self.memory.count_kills();
        let (usage, largest) = self.memory.latest.lock().clone();
        let by_kernel = self.memory.kills.lock().explains();
        by_kernel.then(|| {
            let shortage = Box::new(self.shortage(EndedBy::Kernel, usage, largest));
            Event::MemoryRanOut { process, lease: None, is_leaving: false, shortage }
        })
    }
}

/// All processes of the machine that can be seen.
fn processes() -> BTreeMap<u32, Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return BTreeMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let page = rustix::param::page_size() as u64;
    pids.filter_map(|pid| Some((pid, process(pid, page)?))).collect()
}

fn process(pid: u32, page: u64) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (command, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(1);
    let (parent, started) = (fields.next()?.parse().ok()?, fields.nth(17)?.parse().ok()?);
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut numbers = statm.split_whitespace().skip(1).map_while(|number| number.parse::<u64>().ok());
    let (resident, shared) = (numbers.next()?, numbers.next()?);
    Some(Process { parent, started, command: command.to_owned(), bytes: resident.saturating_sub(shared) * page })
}

/// The process that has started this one, or has taken its children in.
fn parent_of(pid: u32) -> Option<u32> {
    process(pid, 0).map(|process| process.parent).filter(|parent| *parent != pid)
}

/// Counts what each process has as that of the worker process that has started it, or sees it through. Answers with whose each is, by its place.
fn attribute(
    processes: &BTreeMap<u32, Process>,
    workers: &mut [Worker],
    left_behind: &BTreeSet<u32>,
    limit: u64,
) -> BTreeMap<u32, usize> {
    let programs = workers.iter().enumerate().filter_map(|(at, worker)| Some((worker.program?, at)));
    let pids = workers.iter().enumerate().map(|(at, worker)| (worker.pid, at));
    // What is a worker process is nobody's program.
    let by_pid: BTreeMap<u32, usize> = programs.chain(pids).collect();
    let by_process: BTreeMap<ProcessId, usize> =
        workers.iter().enumerate().map(|(at, worker)| (worker.user.process, at)).collect();
    let mut owner = BTreeMap::new();
    for (pid, process) in processes {
        let above = |pid: &u32| processes.get(pid).map(|process| process.parent).filter(|parent| parent != pid);
        let upwards = || std::iter::successors(Some(*pid), above);
        if upwards().take_while(|pid| !by_pid.contains_key(pid)).any(|pid| left_behind.contains(&pid)) {
            continue;
        }
        let below = upwards().find_map(|pid| by_pid.get(&pid).copied());
        // Whoever lost its parent carries its mark. Looked for where it matters only.
        let is_large = process.bytes > limit / 1024;
        let whose = below.or_else(|| is_large.then(|| by_process.get(&guard::started_by(*pid)?).copied()).flatten());
        if let Some(at) = whose {
            owner.insert(*pid, at);
            workers[at].user.bytes += process.bytes;
        }
    }
    owner
}

/// Those of a control group, or of the machine, that use most.
fn name_largest(
    processes: &BTreeMap<u32, Process>,
    workers: &[Worker],
    owner: &BTreeMap<u32, usize>,
    group: Option<PathBuf>,
) -> Vec<MemoryUser> {
    let members = group.and_then(|group| std::fs::read_to_string(group.join("cgroup.procs")).ok());
    let members: Option<Vec<u32>> = members.map(|text| text.lines().filter_map(|pid| pid.parse().ok()).collect());
    let is_here = |pid: &u32| {
        let is_other = || members.as_ref().map_or(PRETENDED.is_none(), |members| members.contains(pid));
        owner.contains_key(pid) || is_other()
    };
    let mut all: Vec<(&u32, &Process)> = processes.iter().filter(|(pid, _)| is_here(pid)).collect();
    all.sort_unstable_by_key(|(_, process)| std::cmp::Reverse(process.bytes));
    let named = all.into_iter().take(NAMED).map(|(pid, process)| {
        let what = match owner.get(pid).and_then(|at| workers.get(*at)) {
            Some(worker) if worker.pid == *pid => worker.name.clone(),
            Some(worker) => format!("{}, which {} has started", process.command, worker.name),
            None => process.command.clone(),
        };
        MemoryUser { pid: *pid, what, bytes: process.bytes }
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(pid: u32, program: Option<u32>) -> Worker {
        let process = ProcessId(pid.into());
        let user = User { process, lease: None, work: Work::Idle, started: 0, bytes: 0 };
        Worker { user, pid, program, name: String::new() }
    }

    /// The warm Python's worker process is 10, and the rank's 20; the rank, 13, was forked from 11 by its keeper, 12.
    fn used(workers: &mut [Worker], left_behind: &[u32]) -> Vec<u64> {
        let parents = [(10, 1), (11, 10), (12, 11), (13, 12), (20, 1)];
        let of = |parent| Process { parent, started: 0, command: String::new(), bytes: 1 };
        let processes = parents.into_iter().map(|(pid, parent)| (pid, of(parent))).collect();
        attribute(&processes, workers, &left_behind.iter().copied().collect(), u64::MAX);
        workers.iter().map(|worker| worker.user.bytes).collect()
    }

    #[test]
    fn what_a_forked_rank_uses_is_its_actors_and_nobodys_when_that_has_ended() {
        assert_eq!(used(&mut [worker(10, None), worker(20, Some(12))], &[]), [2, 3]);
        assert_eq!(used(&mut [worker(10, None)], &[12]), [2], "its keeper is ending it");
        assert_eq!(used(&mut [worker(10, None), worker(20, None)], &[]), [4, 1], "it has not said so yet");
    }
}
