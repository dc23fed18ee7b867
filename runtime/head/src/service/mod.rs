//! The thin shell around [`State`]: connections in, orders out.
//!
//! The state sits behind one lock. Whoever holds it also queues the actions that a step gave, so that orders
//! leave in the order of the decisions; queueing never waits. What processes and nodes may ask for is in `calls`.

mod absent;
mod calls;
mod copies;
mod peers;
pub(crate) mod promise;
#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only a head with a journal has a standby"))]
pub(crate) mod standby;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};
use wingbeat_core::error::Error;
use wingbeat_core::{JobId, NodeId, ProcessId, TaskId};
use wingbeat_net::address::Stream;
use wingbeat_net::handshake::{Epoch, Hello, Resumes, Role};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Explanation, HeadEvent, NodeMessage, ProcessStacks, Subject, TaskStanding};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::panics;
use wingbeat_net::services::{
    Head as _, HeadRequest, HeadResponse, NodeClient, NodeRequest, NodeResponse, ProcessClient, ProcessRequest,
    ProcessResponse,
};
use wingbeat_net::silence::Probing;

use calls::Service;
use copies::{Copies, Returns};
use peers::{Absence, Before, Entered, Peer, Return};
use promise::Promise;
use standby::Follower;

use crate::programs::{Giver, Keeping, Programs};
use crate::state::{Action, Event, Fact, Millis, State};

/// The next tick is awaited without looking for what may make it come sooner: nothing comes that much sooner.
const SHORT: Duration = Duration::from_millis(25);
/// How long nodes may take to hear that they are to stop.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// How often it is looked meanwhile whether everybody is back.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long the last facts may take to be written when the head ends.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// A node says within this time what the threads of a process do, or why it cannot.
const STACKS_LIMIT: Duration = Duration::from_secs(25);
/// How long a process may take to say what one of its tasks waits for.
const EXPLAIN_LIMIT: Duration = Duration::from_secs(2);
/// How long the last output of a job may take to be shown.
const OUTPUT_LIMIT: Duration = Duration::from_secs(1);

/// Where what must survive the head is written. Implemented by the journal.
pub(crate) trait Durable: Send + Sync {
    /// Queues facts that are true now. They are written as soon as that can be done. Called in the order in which they
    /// became true.
    fn write(&self, facts: Vec<Fact>);
    /// As [`Durable::write`], and tells when they, and all before them, are safe. After an error they are still to be written.
    fn write_and_tell(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>>;
    /// Writes facts that are to become true, and waits until they, and all before them, are safe. After an error they are
    /// not written, and must not become true.
    fn intend(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>>;
    /// Has a standby sent what is written, from now on, after all that is there.
    fn feed(&self);
}

/// What was made true is being written. Dropped before that is over (the request was given up), it waits for it all the
/// same.
struct Written {
    result: BoxFuture<'static, Result<(), Error>>,
    /// What is to be made if it cannot be written. None once that is over.
    back: Option<(Arc<Shell>, Change)>,
}

/// A change of the state, with what follows from it.
type Change = Box<dyn FnOnce(&mut State, Millis) -> Vec<Action> + Send>;

impl Future for Written {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        let written = std::task::ready!(self.result.as_mut().poll(context));
        if let (Err(_), Some((shell, back))) = (&written, self.back.take()) {
            shell.change(|state, now| ((), back(state, now)));
        }
        Poll::Ready(written)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let Some((shell, back)) = self.back.take() else { return };
        let result = std::mem::replace(&mut self.result, Box::pin(async { Ok(()) }));
        // Without a runtime the head has ended, and nobody hears of it any more.
        if tokio::runtime::Handle::try_current().is_ok() {
            let undoing = shell.clone();
            undoing.vital("taking a change back", async move {
                if result.await.is_err() {
                    shell.change(|state, now| ((), back(state, now)));
                }
            });
        }
    }
}

/// Everything that the head's tasks share. It lives as long as any of them.
pub(crate) struct Shell {
    /// What changes together. Never held across an await.
    inside: Mutex<Inside>,
    /// Where facts are written; none where nodes keep them, or nobody does.
    journal: Option<Box<dyn Durable>>,
    /// The executables of detached actors, each while one needs it.
    programs: Arc<Programs>,
    /// When the state's time began.
    started: Instant,
    /// Notified when time may matter from now on.
    ticks: Notify,
    /// How far the head's end is. It only goes on.
    stopping: watch::Sender<Stage>,
    /// Why it cannot go on, if it cannot.
    broken: OnceLock<String>,
    /// Which head of its cluster it is, if the next one goes on with it.
    epoch: Option<Epoch>,
    /// What it is told of an earlier head. None where a journal says it, or none follows.
    returns: Option<Returns>,
    /// What an earlier head has promised to those that knew it.
    earlier: Promise,
    /// Its standby, if it may have one: where it keeps a journal.
    standby: Option<Arc<Follower>>,
}

#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Stage {
    Running,
    /// Everybody is being told that the cluster ends.
    Stopping,
    /// Nodes have been told.
    Told,
    Stopped,
    /// It has stopped, and the next head goes on with its cluster.
    Left,
}

struct Inside {
    state: State,
    /// Drivers and worker processes that are connected or away, until they are lost.
    processes: BTreeMap<ProcessId, Peer<ProcessClient, HeadEvent>>,
    /// The same of nodes.
    nodes: BTreeMap<NodeId, Peer<NodeClient, NodeMessage>>,
    /// What nodes keep for the next head, where no journal does.
    copies: Option<Copies>,
    /// As of which [`State::programs_version`] the programs that nobody needs were let go.
    programs_seen: u64,
}

impl Inside {
    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Tell(process, event) => {
                    if let Some(peer) = self.processes.get(&process) {
                        peer.link.send(event);
                    }
                }
                Action::Order(node, message) => {
                    if let Some(peer) = self.nodes.get(&node) {
                        peer.link.send(message);
                    }
                }
            }
        }
    }
}

/// What follows from a journal that cannot be written.
const UNCHANGED: &str = "nothing was changed; make room for the journal and try again";

/// An error of the journal, and what it means for what was asked.
fn but(error: Error, what_follows: &str) -> Error {
    match error {
        Error::Failed { what, why } => Error::Failed { what, why: format!("{why}; {what_follows}") },
        Error::Io { what, why, code } => Error::Io { what, why: format!("{why}; {what_follows}"), code },
        other => other,
    }
}

fn change_failed() -> Error {
    Error::Failed { what: "a change of the cluster".into(), why: "the head has ended meanwhile; see its log".into() }
}

fn unknown(what: &str) -> Error {
    Error::InvalidArgument {
        what: format!("{what} is not known to this head; `wingbeat status` shows what waits and what runs"),
    }
}

impl Shell {
    pub(crate) fn new(
        mut state: State,
        journal: Option<Box<dyn Durable>>,
        programs: Programs,
        epoch: Option<Epoch>,
        standby: Option<Arc<Follower>>,
    ) -> Arc<Shell> {
        if journal.is_some() || epoch.is_some() {
            state.keep_facts();
        }
        // Of those that another follows, one without a journal.
        let alone = epoch.filter(|_| journal.is_none());
        let copies = alone.map(Copies::new);
        programs.keep_only(&state.programs());
        Arc::new(Shell {
            inside: Mutex::new(Inside {
                state,
                processes: BTreeMap::new(),
                nodes: BTreeMap::new(),
                copies,
                programs_seen: 0,
            }),
            journal,
            programs: Arc::new(programs),
            started: Instant::now(),
            ticks: Notify::new(),
            stopping: watch::Sender::new(Stage::Running),
            broken: OnceLock::new(),
            epoch,
            returns: alone.map(|_| Returns::new()),
            earlier: Promise::default(),
            standby,
        })
    }

    /// Which head of its cluster it is, if the next one goes on with it.
    pub(crate) fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// How whoever connects was connected before.
    fn before(&self, hello: &Hello, state: &State) -> Before {
        let process = hello.address.process;
        let is_awaited = match hello.role {
            Role::Worker => state.may_come_back(process),
            Role::Driver(job) => state.is_recovering() && state.may_come_back(process) && !state.has_ended_before(job),
            _ => state.is_recovering(),
        };
        let is_lost = match hello.role {
            Role::Driver(_) => state.is_over(process) || state.has_seen_the_end_of(process),
            Role::Node(node) => state.will_not_come_back(node),
            _ => false,
        };
        match hello.resumes {
            Resumes::Nothing => Before::Never,
            Resumes::Joining | Resumes::Joined if hello.epoch == self.epoch => Before::WithThis,
            // It may have nothing that this head could know of, and so be awaited by nobody.
            Resumes::Joining if !is_lost => Before::WithEarlier,
            Resumes::Joined if is_awaited && !is_lost => Before::WithEarlier,
            Resumes::Joining | Resumes::Joined => Before::TooLongAgo,
        }
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    fn step(&self, event: Event) {
        // Nothing true follows from a state that may be half changed, nor from the end of connections that the head has left.
        if self.broken.get().is_some() || self.has_left() {
            return;
        }
        self.change(|state, now| ((), state.step(now, event)));
        self.note_time();
    }

    /// Has the time looked at, if something depends on it now.
    fn note_time(&self) {
        if self.inside.lock().state.next_tick().is_some() {
            self.ticks.notify_one();
        }
    }

    /// Changes the state, and does what follows from it.
    fn change<R>(&self, change: impl FnOnce(&mut State, Millis) -> (R, Vec<Action>)) -> R {
        self.change_in(&mut self.inside.lock(), change)
    }

    fn change_in<R>(&self, inside: &mut Inside, change: impl FnOnce(&mut State, Millis) -> (R, Vec<Action>)) -> R {
        let (answer, actions) = change(&mut inside.state, self.now());
        let facts = inside.state.take_facts();
        inside.keep(&facts);
        self.write(facts);
        inside.perform(actions);
        let version = inside.state.programs_version();
        if version != inside.programs_seen {
            inside.programs_seen = version;
            // Under the lock: a creation that is under way has either been counted, or still holds its program.
            self.programs.keep_only(&inside.state.programs());
        }
        answer
    }

    /// Lets go of the programs that no detached actor needs.
    fn let_programs_go(&self) {
        let inside = self.inside.lock();
        self.programs.keep_only(&inside.state.programs());
    }

    /// Keeps the program of a job for as long as what is returned lives, and longer if a detached actor of it does by
    /// then. Whoever asks runs that program, and gives it if it is not here yet. None where nobody else could ever run
    /// it: in a driver's own cluster.
    async fn keep_program(&self, from: ProcessId, job: JobId) -> Result<Option<Keeping>, Error> {
        let (program, client) = {
            let inside = self.inside.lock();
            (inside.state.program_of(job), inside.processes.get(&from).map(|peer| peer.client.clone()))
        };
        match program.filter(Programs::can_keep) {
            Some(program) => self.programs.keep(&program, client.map(Giver::Process)).await.map(Some),
            None => Ok(None),
        }
    }

    fn write(&self, facts: Vec<Fact>) {
        let is_broken = self.broken.get().is_some();
        if let Some(journal) = self.journal.as_ref().filter(|_| !facts.is_empty() && !is_broken) {
            journal.write(facts);
        }
    }

    /// As [`Shell::change`], for a change that somebody asked for and that must survive: `fact` is what it is to make
    /// true. It is written first, so that a disk without room changes nothing. If the change then answers something
    /// else, `undone` is written over it.
    async fn change_durably<R: Send + 'static>(
        self: &Arc<Self>,
        fact: impl FnOnce(&State) -> Option<Fact>,
        undone: impl FnOnce(&Result<R, Error>) -> Option<Fact> + Send + 'static,
        change: impl FnOnce(&mut State, Millis) -> (Result<R, Error>, Vec<Action>) + Send + 'static,
    ) -> Result<R, Error> {
        let fact = if self.epoch.is_some() { fact(&self.inside.lock().state) } else { None };
        let is_kept = fact.is_some();
        let Some(fact) = fact.filter(|_| self.journal.is_some()) else {
            // At once: what the same process says next must find it done.
            let answer = self.change(change);
            self.note_time();
            if is_kept && answer.is_ok() {
                self.kept_elsewhere().await;
            }
            return answer;
        };
        let shell = self.clone();
        // A task of its own, which ends when the fact is written: the request may be given up at any time, and what is on
        // the disk must then be true all the same.
        let (told, changed) = oneshot::channel();
        let changing = async move {
            if let Some(journal) = &shell.journal {
                journal.intend(vec![fact]).await.map_err(|error| but(error, UNCHANGED))?;
            }
            let answer = shell.change(|state, now| {
                let changed = change(state, now);
                if let Some(undone) = undone(&changed.0) {
                    // Under the lock, and so before whatever becomes true later.
                    shell.write(vec![undone]);
                }
                changed
            });
            shell.note_time();
            answer
        };
        self.vital("a change of the cluster", async move {
            // Whoever asked may be gone.
            let _ = told.send(changing.await);
        });
        let answer = changed.await.unwrap_or_else(|_| Err(change_failed()));
        if self.has_left() {
            // The standby may not have it, and nobody waits for that any more: it is asked of the next head.
            std::future::pending::<()>().await;
        }
        answer
    }

    /// As [`Shell::change_durably`], for a change whose result only its asker can use: it is made first, and written as it
    /// came out, once. If it cannot be written, what it made true is owed to the disk, and `back` is made.
    async fn change_and_write<R: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut State, Millis) -> (Result<R, Error>, Vec<Action>),
        back: impl FnOnce(&mut State, Millis) -> Vec<Action> + Send + 'static,
    ) -> Result<R, Error> {
        let Some(journal) = &self.journal else {
            let answer = self.change(change);
            self.note_time();
            return answer;
        };
        let (answer, written) = {
            let mut inside = self.inside.lock();
            let (answer, actions) = change(&mut inside.state, self.now());
            let facts = inside.state.take_facts();
            // What was asked for may be true already, and not be written yet.
            let waits = answer.is_ok() || !facts.is_empty();
            // Under the lock, and so before whatever becomes true later.
            let written = waits
                .then(|| Written { result: journal.write_and_tell(facts), back: Some((self.clone(), Box::new(back))) });
            inside.perform(actions);
            (answer, written)
        };
        self.note_time();
        match written {
            Some(written) => written.await.and(answer),
            None => answer,
        }
    }

    /// Waits until all that is true was written, as far as that can be done.
    pub(crate) async fn settle_journal(&self) {
        if let Some(journal) = &self.journal
            && let Ok(Err(error)) = tokio::time::timeout(SETTLE_LIMIT, journal.intend(Vec::new())).await
        {
            tracing::error!(%error, "the journal misses what happened last");
        }
    }

    /// Has the state know whether the journal can be written.
    #[cfg(feature = "journal")]
    pub(crate) async fn hear_of_the_journal(self: Arc<Self>, mut fails: watch::Receiver<Option<String>>) {
        while fails.changed().await.is_ok() {
            let why = fails.borrow_and_update().clone();
            self.step(Event::JournalFails(why));
        }
    }

    /// Ticks while something depends on time; an idle head does not wake up.
    pub(crate) async fn let_time_pass(self: Arc<Self>) {
        let ticking = async {
            loop {
                let next = self.inside.lock().state.next_tick();
                match next.map(Duration::from_millis) {
                    None => self.ticks.notified().await,
                    Some(time) if time <= SHORT => {
                        tokio::time::sleep(time).await;
                        self.until_nobody_else_leads().await;
                        self.change(|state, now| ((), state.step(now, Event::Tick)));
                    }
                    // Something may happen that makes the tick come sooner.
                    Some(time) => match tokio::time::timeout(time, self.ticks.notified()).await {
                        Ok(()) => {}
                        Err(_) => {
                            self.until_nobody_else_leads().await;
                            self.change(|state, now| ((), state.step(now, Event::Tick)));
                        }
                    },
                }
            }
        };
        self.until_stopped(ticking).await;
    }

    /// How far a task's owner knows what it waits for, or where it is.
    async fn standing(&self, task: TaskId) -> Result<TaskStanding, Error> {
        let client = self.inside.lock().processes.get(&task.owner).map(|peer| peer.client.clone());
        let client = client.ok_or_else(|| unknown(&format!("the owner of {task}, {},", task.owner)))?;
        mux::answered(client.explain_task(mux::within(EXPLAIN_LIMIT), task).await, "the task's owner")
    }

    /// What the threads of the process of a task, a call or an actor do: its node asks it.
    async fn stacks(&self, subject: Subject) -> Result<ProcessStacks, Error> {
        let in_none = |what: String| Error::InvalidArgument { what: format!("{what}: it runs in no process now") };
        let found = match subject {
            Subject::Task(task) => match self.standing(task).await? {
                TaskStanding::OnLease(so_far, lease) => {
                    let process = self.inside.lock().state.process_of_lease(lease);
                    process.ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::WaitsForActor(so_far, actor) => {
                    let process = self.inside.lock().state.process_of_actor(actor);
                    process.ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::InProcess(so_far, process) => {
                    let node = self.inside.lock().state.node_of_process(process);
                    node.map(|node| (process, node)).ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::Known(so_far) | TaskStanding::WaitsForLease(so_far, _) => {
                    Err(format!("{} {}", so_far.subject, so_far.state))
                }
            },
            Subject::Actor(actor) => {
                let mut inside = self.inside.lock();
                let now = self.now();
                match inside.state.process_of_actor(actor) {
                    Some(process) => Ok(process),
                    None => {
                        let explained =
                            inside.state.explain(now, subject).ok_or_else(|| unknown(&subject.to_string()))?;
                        Err(format!("{} {}", explained.subject, explained.state))
                    }
                }
            }
            Subject::Process(process) => {
                let node = self.inside.lock().state.node_of_process(process);
                node.map(|node| (process, node)).ok_or_else(|| format!("{process} runs no task or actor here"))
            }
            Subject::Pid(pid, node) => Ok(self.process_of_pid(pid, node).await?),
            Subject::Node(_) | Subject::PlacementGroup(_) => {
                let what = format!("{subject} has no threads; name a task, an object, an actor, or a process");
                return Err(Error::InvalidArgument { what });
            }
        };
        let (process, node) = found.map_err(in_none)?;
        let client = self.inside.lock().nodes.get(&node).map(|peer| peer.client.clone());
        let client = client.ok_or_else(|| unknown(&format!("{node}, which is lost or cut off,")))?;
        mux::answered(client.stacks(mux::within(STACKS_LIMIT), process).await, "the node of the process")?
    }

    /// The worker process with this process id, or the one that has started the process with it, or sees it through, as its node
    /// knows.
    async fn process_of_pid(&self, pid: u32, on: Option<NodeId>) -> Result<(ProcessId, NodeId), Error> {
        let invalid = |what: String| Error::InvalidArgument { what };
        let (mut found, nodes) = {
            let inside = self.inside.lock();
            let found = inside.state.processes_with_pid(pid, on);
            let has_it: BTreeSet<NodeId> = found.values().copied().collect();
            let asked =
                inside.nodes.iter().filter(|(node, _)| on.is_none_or(|on| on == **node) && !has_it.contains(node));
            let nodes: Vec<_> = asked.map(|(node, peer)| (*node, peer.client.clone())).collect();
            (found, nodes)
        };
        let answers = nodes
            .into_iter()
            .map(|(node, client)| async move { (node, client.process_above(mux::within(EXPLAIN_LIMIT), pid).await) });
        let mut silent = Vec::new();
        for (node, answer) in futures::future::join_all(answers).await {
            match answer {
                Ok(process) => found.extend(process.map(|process| (process, node))),
                // It may be there; one that is elsewhere is shown all the same.
                Err(_) => silent.push(node.to_string()),
            }
        }
        if let Some(found) = crate::state::the_one_with_pid(pid, &found).map_err(invalid)? {
            return Ok(found);
        }
        let mut what =
            format!("no worker process has the process id {pid}, and none has started the process that has it");
        if !silent.is_empty() {
            let which = silent.join(", ");
            what = format!("{what}, as far as is known: {which} did not answer within {} s", EXPLAIN_LIMIT.as_secs());
        }
        Err(invalid(what))
    }

    /// Why something waits. A task's owner says how far it knows; the scheduler goes on from there.
    async fn explain(&self, subject: Subject) -> Result<Explanation, Error> {
        let Subject::Task(task) = subject else {
            let explained = self.inside.lock().state.explain(self.now(), subject);
            return explained.ok_or_else(|| unknown(&subject.to_string()));
        };
        let standing = self.standing(task).await?;
        let mut inside = self.inside.lock();
        let (state, now) = (&mut inside.state, self.now());
        Ok(match standing {
            TaskStanding::Known(explanation) | TaskStanding::InProcess(explanation, _) => explanation,
            TaskStanding::WaitsForLease(so_far, shape) => state.explain_demand(now, task.owner, &shape, so_far),
            TaskStanding::OnLease(so_far, lease) => state.explain_lease(now, lease, so_far),
            TaskStanding::WaitsForActor(mut so_far, actor) => {
                if let Some(actor) = state.explain(now, Subject::Actor(actor)) {
                    so_far.reasons.push(format!("{} {}", actor.subject, actor.state));
                    so_far.reasons.extend(actor.reasons);
                    so_far.holders = actor.holders;
                    so_far.help.extend(actor.help);
                }
                so_far
            }
        })
    }

    pub(crate) async fn until_stopped(&self, work: impl Future<Output = ()>) {
        let mut stopping = self.stopping.subscribe();
        tokio::select! {
            () = work => {}
            _ = stopping.wait_for(|stage| *stage >= Stage::Stopped) => {}
        }
    }

    pub(crate) async fn stopped(&self) -> Result<(), String> {
        let mut stopping = self.stopping.subscribe();
        let _ = stopping.wait_for(|stage| *stage >= Stage::Told).await;
        self.broken.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    /// Runs a part without which something here would never happen: if it panics, which was printed there, the head ends. What
    /// it knows may be half changed by then.
    pub(crate) fn vital(self: &Arc<Self>, part: &'static str, running: impl Future<Output = ()> + Send + 'static) {
        let shell = self.clone();
        tokio::spawn(async move {
            if let Err(said) = panics::caught(running).await {
                shell.is_defect(part, &said);
            }
        });
    }

    /// A part without which something here would never happen has panicked.
    pub(crate) fn is_defect(&self, part: &'static str, said: &str) {
        let _ = self.broken.set(panics::defect("the head", part, said));
        self.stop();
    }

    pub(crate) fn stop(&self) {
        self.advance(Stage::Stopped);
    }

    /// Ends this head alone: from now on, who is gone has not ended. What it knows is written.
    pub(crate) async fn leave(&self) {
        if self.standby_that_is_current().is_some() {
            // As long as it is connected: it takes over with this.
            self.settle_journal().await;
        }
        self.advance(Stage::Left);
        if let Some(standby) = &self.standby {
            standby.is_done_with();
        }
        self.settle_journal().await;
    }

    /// Whether the next head is to be told what this one hears.
    pub(crate) fn has_left(&self) -> bool {
        *self.stopping.borrow() == Stage::Left
    }

    /// Goes on to a later stage. Whether it was in an earlier one.
    fn advance(&self, to: Stage) -> bool {
        self.stopping.send_if_modified(|stage| {
            let is_later = *stage < to;
            if is_later {
                *stage = to;
            }
            is_later
        })
    }

    /// Ends the cluster, and waits until everybody was told. Once begun it goes to its end, also when whoever asked for it is gone.
    pub(crate) async fn stop_nodes(self: &Arc<Self>) {
        if self.advance(Stage::Stopping) {
            let shell = self.clone();
            self.vital("stopping the cluster", async move { shell.tell_of_the_stop().await });
        }
        let _ = self.stopping.subscribe().wait_for(|stage| *stage >= Stage::Told).await;
    }

    /// Tells everybody that the cluster ends. Those that may still come back since the head was started again have a moment.
    async fn tell_of_the_stop(&self) {
        let everybody = async {
            self.until_learned(false).await;
            while !self.inside.lock().state.absent().is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        let _ = tokio::time::timeout(STOP_LIMIT, everybody).await;
        let (nodes, processes): (Vec<Link<NodeMessage>>, Vec<Link<HeadEvent>>) = {
            let inside = self.inside.lock();
            (peers::links_of_present(&inside.nodes), peers::links_of_present(&inside.processes))
        };
        // Each hears it, also when another takes nothing in.
        for link in &processes {
            link.send(HeadEvent::Stops);
        }
        for link in &nodes {
            link.send(NodeMessage::Stop("the cluster was stopped".into()));
        }
        let nodes = futures::future::join_all(nodes.iter().map(Link::flushed));
        let processes = futures::future::join_all(processes.iter().map(Link::flushed));
        let standby = self.tell_standby_of_the_stop();
        let _ = tokio::time::timeout(STOP_LIMIT, futures::future::join3(nodes, processes, standby)).await;
        self.is_ending();
    }

    /// Nodes that are lost from now on have ended with the cluster.
    pub(crate) fn is_ending(&self) {
        self.advance(Stage::Told);
    }

    pub(crate) async fn serve_connection(self: Arc<Self>, stream: Stream, hello: Hello) {
        let process = hello.address.process;
        self.note_return(&hello);
        self.note_later_head(&hello);
        match hello.role {
            Role::Node(node) => self.serve_node(stream, node, hello).await,
            Role::Driver(job) => self.serve_process(stream, hello, Some(job)).await,
            Role::Worker => self.serve_process(stream, hello, None).await,
            Role::Tool | Role::Head => {
                let (connection, client, server) =
                    mux::connect::<ProcessRequest, ProcessResponse, HeadRequest, HeadResponse>(stream, Waiting::Asleep);
                drop(client);
                let service = Service { shell: self.clone(), process, role: hello.role, is_known: false, knew: None };
                self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
                if hello.role == Role::Head {
                    self.standby_left(process);
                }
            }
        }
    }

    async fn run(&self, connection: &Connection, serving: impl Future<Output = ()>, sending: impl Future<Output = ()>) {
        self.until_stopped(async {
            tokio::select! {
                () = serving => {}
                () = sending => {}
                () = connection.closed() => {}
            }
        })
        .await;
        connection.close();
    }

    async fn serve_process(self: Arc<Self>, stream: Stream, hello: Hello, job: Option<JobId>) {
        // A driver looks for the next head when this one stands still.
        let probing = if job.is_some() && self.epoch.is_some() { Probing::Sends } else { Probing::default() };
        let (connection, client, server) = mux::connect_probing::<
            ProcessRequest,
            ProcessResponse,
            HeadRequest,
            HeadResponse,
        >(stream, Waiting::Asleep, probing);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        let process = hello.address.process;
        let role = job.map_or(Role::Worker, Role::Driver);
        let entered = {
            let mut inside = self.inside.lock();
            let before = self.before(&hello, &inside.state);
            peers::enter(&mut inside.processes, process, client, &connection, before)
        };
        let mut service = Service { shell: self.clone(), process, role, is_known: true, knew: None };
        let link = match entered {
            Entered::New(link) => {
                self.step(Event::ProcessConnected(process));
                link
            }
            Entered::Back(link) => link,
            Entered::Unknown => {
                service.is_known = false;
                return self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
            }
            Entered::Taken => {
                tracing::warn!(%process, "refused a second connection of a process");
                return connection.close();
            }
        };
        if let Some(standby) = self.standby_address() {
            link.send(HeadEvent::Standby(Some(standby)));
        }
        let request = |number, events| ProcessRequest::HeadEvents { number, events };
        let carrying = link.carry(&connection, request, events_of);
        self.run(&connection, mux::serve(server, service.serve()), carrying).await;
        let Some(absence) = peers::leave(&mut self.inside.lock().processes, &process, &connection) else { return };
        if self.returns(&absence, &hello).await == Return::Back {
            return;
        }
        let Some(lost) = peers::lose(&mut self.inside.lock().processes, &process, &absence) else { return };
        lost.link.broke();
        self.step(Event::ProcessLost(process, job));
    }

    async fn serve_node(self: Arc<Self>, stream: Stream, node: NodeId, hello: Hello) {
        let (connection, client, server) = mux::connect_probing::<NodeRequest, NodeResponse, HeadRequest, HeadResponse>(
            stream,
            Waiting::Asleep,
            Probing::Both,
        );
        let client = NodeClient::new(mux::client_config(), client).spawn();
        let (process, role) = (hello.address.process, Role::Node(node));
        let knew = hello.epoch.filter(|epoch| hello.resumes != Resumes::Nothing && Some(*epoch) != self.epoch);
        let mut service = Service { shell: self.clone(), process, role, is_known: true, knew };
        let entered = {
            let mut inside = self.inside.lock();
            let before = self.before(&hello, &inside.state);
            let entered = peers::enter(&mut inside.nodes, node, client, &connection, before);
            if let Entered::Back(_) = entered {
                self.change_in(&mut inside, |state, now| ((), state.step(now, Event::NodeBack(node))));
            }
            entered
        };
        let link = match entered {
            Entered::New(link) => link,
            Entered::Back(link) => {
                tracing::info!("{node} is back");
                self.note_time();
                link
            }
            Entered::Unknown => {
                service.is_known = false;
                return self.run(&connection, mux::serve(server, service.serve()), std::future::pending()).await;
            }
            Entered::Taken => {
                tracing::warn!(%node, "refused a second connection of a node");
                return connection.close();
            }
        };
        let request = |number, messages| NodeRequest::Orders { number, messages };
        let carrying = link.carry(&connection, request, orders_of);
        self.run(&connection, mux::serve(server, service.serve()), carrying).await;
        let absence = {
            let mut inside = self.inside.lock();
            let Some(absence) = peers::leave(&mut inside.nodes, &node, &connection) else { return };
            self.change_in(&mut inside, |state, now| ((), state.step(now, Event::NodeAway(node))));
            absence
        };
        if !absence.is_leaving() && *self.stopping.borrow() == Stage::Running {
            tracing::info!("{node} is suspect: its connection has ended; it may come back");
        }
        let why = match self.returns(&absence, &hello).await {
            Return::Back => return,
            Return::Ended => "its connection to the head ended".to_owned(),
            Return::TooLate => {
                self.until_nobody_else_leads().await;
                format!("the head heard nothing from it for {} s", self.lost_after().as_secs_f64())
            }
        };
        let Some(lost) = peers::lose(&mut self.inside.lock().nodes, &node, &absence) else { return };
        lost.link.broke();
        if *self.stopping.borrow() == Stage::Running && self.inside.lock().state.offers_work(node) {
            tracing::warn!("{node} is lost: {why}");
        }
        self.step(Event::NodeLost(node, why));
        self.inside.lock().choose_keepers();
    }

    /// Waits until a peer that is away is back, or lost. A head that ends waits for nobody.
    async fn returns(&self, absence: &Absence, hello: &Hello) -> Return {
        let mut stopping = self.stopping.subscribe();
        let may_hide = match hello.role {
            Role::Driver(_) => true,
            // A driver's own node, for its objects alone.
            Role::Node(node) => !self.inside.lock().state.offers_work(node),
            _ => false,
        };
        tokio::select! {
            ended = absence.ends(&hello.address, may_hide, || self.lost_after()) => ended,
            _ = stopping.wait_for(|stage| *stage >= Stage::Stopped) => Return::Ended,
        }
    }
}

fn events_of(request: ProcessRequest) -> Vec<HeadEvent> {
    match request {
        ProcessRequest::HeadEvents { events, .. } => events,
        _ => Vec::new(),
    }
}

fn orders_of(request: NodeRequest) -> Vec<NodeMessage> {
    match request {
        NodeRequest::Orders { messages, .. } => messages,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
