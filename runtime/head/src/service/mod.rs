//! The thin shell around [`State`]: connections in, orders out.
//!
//! The state sits behind one lock. Whoever holds it also queues the actions that a step gave, so that orders
//! leave in the order of the decisions; queueing never waits. What processes and nodes may ask for is in `calls`, who connects in
//! `connections`, who may take over from this head in `succession`, and how all ends in `ending`.

mod absent;
mod calls;
mod connections;
mod copies;
mod ending;
mod peers;
pub(crate) mod promise;
mod questions;
#[cfg_attr(not(feature = "journal"), allow(dead_code, reason = "only a head with a journal has a standby"))]
pub(crate) mod succession;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};
use wingbeat_core::error::Error;
use wingbeat_core::{JobId, NodeId, ProcessId};
use wingbeat_net::handshake::Epoch;
use wingbeat_net::messages::{HeadEvent, NodeMessage};
use wingbeat_net::services::{NodeClient, ProcessClient};

use copies::{Copies, Returns};
use peers::Peer;
use promise::Promise;
use succession::Follower;

use crate::programs::{Giver, Keeping, Programs};
use crate::state::{Action, Event, Fact, Millis, State};

/// The next tick is awaited without looking for what may make it come sooner: nothing comes that much sooner.
const SHORT: Duration = Duration::from_millis(25);
/// How long the last facts may take to be written when the head ends.
const SETTLE_LIMIT: Duration = Duration::from_secs(5);

/// How long the last output of a job may take to be shown.
const OUTPUT_LIMIT: Duration = Duration::from_secs(1);
/// How often it is looked whether the actors of a job that leaves have ended.
const ENDING_LOOK: Duration = Duration::from_millis(2);

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
    /// Why nothing can be written now, if nothing can.
    fn why_it_fails(&self) -> Option<String>;
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
const UNCHANGED: &str = "nothing was changed; try again when the journal can be written";

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
        self.while_it_leads().await;
        answer
    }

    /// Ends never once this head has left: the standby may not have what was asked for, and nobody waits for that any more. It is
    /// asked of the next head.
    async fn while_it_leads(&self) {
        if self.has_left() {
            std::future::pending::<()>().await;
        }
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
            Some(written) => {
                let written = written.await;
                self.while_it_leads().await;
                written.and(answer)
            }
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
}

#[cfg(test)]
mod tests;
