//! The node's link to the head, over any number of connections.
//!
//! A connection that ends is no loss: the head is dialled again, and what was not answered is sent again, in both directions.
//! A head that was started again is told what runs here instead, and goes on with that.
//! The node ends when the head's machine says that nobody listens there any more and no other head is going to, when the head
//! says that it has given the node up, or when its term is over (`term.rs`): what runs here may then be started again elsewhere.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{DialError, Stream};
use wingbeat_net::handshake::{Epoch, Hello, Purpose, Resumes};
use wingbeat_net::limits::{self, limits};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, NodeInfo, Running, WorkerCommand};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::patience::Patience;
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, Node as _, NodeRequest, NodeResponse};
use wingbeat_net::silence::Probing;
use wingbeat_net::way::{Met, Way};
use wingbeat_node::term::Asked;

use tarpc::client::RpcError;

use super::Daemon;
use super::service::NodeService;
use super::term::{self, Term};

/// The first pause before the head is dialled again, and the longest. Short, so that a node whose network is back is back before its
/// term is over.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// What is kept of the connection to the head.
pub(super) struct HeadLink {
    pub way: Way,
    /// What the node says to it.
    pub link: Link<HeadMessage>,
    /// For questions, while there is a connection.
    client: Mutex<Option<HeadClient>>,
    /// The present one, or the last.
    connection: Mutex<Option<Connection>>,
    /// The number of the next batch of what the head says.
    heard: AtomicU64,
    term: Term,
    /// What the worker processes were told last of how long silence is borne.
    told: Mutex<Patience>,
}

impl HeadLink {
    pub(super) fn new(address: Address, others: Vec<Address>, epoch: Option<Epoch>) -> HeadLink {
        let term = Term::new(&address);
        let way = Way::new(address);
        others.into_iter().for_each(|other| way.learn(other));
        way.found(epoch);
        HeadLink {
            way,
            link: Link::new(),
            client: Mutex::default(),
            connection: Mutex::default(),
            heard: AtomicU64::new(0),
            term,
            told: Mutex::new(limits::patience()),
        }
    }

    /// Ends the connection, if there is one: another head is looked for.
    pub(super) fn leave(&self) {
        if let Some(connection) = &*self.connection.lock() {
            connection.close();
        }
    }

    /// A client for questions to the head; none while there is no connection.
    pub(super) fn client(&self) -> Option<HeadClient> {
        self.client.lock().clone()
    }

    /// The head may be there, too.
    pub(super) fn learn(&self, other: Address) {
        self.way.learn(other);
        self.has_learned();
    }

    /// Another place is known where the head may be.
    pub(super) fn has_learned(&self) {
        self.term.is_with(|| self.way.heads());
    }

    /// Whether a batch of what the head says is to be taken in, and has not come before.
    pub(super) fn hears(&self, number: u64) -> bool {
        self.heard.fetch_max(number + 1, Ordering::AcqRel) <= number
    }
}

/// Why there is no more head.
#[derive(Debug, thiserror::Error)]
enum Loss {
    #[error("the head is gone: nobody listens there any more; start this worker again when it is back")]
    Gone,
    #[error("the head has given this node up, because {0}; start this worker again")]
    GivenUp(String),
    #[error(
        "the head has answered nothing for {0:?}: it is gone, or will run elsewhere what ran here; start this worker again when there is a head"
    )]
    TooLong(Duration),
    #[error("this node has ended")]
    Ended,
}

/// What a head that was started again is told.
struct Snapshot {
    of: Epoch,
    running: Running,
}

impl Daemon {
    /// Joins the head, and stays with it until it is lost.
    pub(super) async fn join(self: Arc<Self>, info: NodeInfo) -> Result<(), Error> {
        let end = Instant::now() + limits().lost;
        let (mut resumes, mut snapshot) = (Resumes::Nothing, None);
        let mut keeps_term = false;
        let (connection, client) = loop {
            let tried = self.try_to_join(&info, &mut resumes, &mut snapshot).await;
            if let Ok((connection, client)) = &tried {
                // It may have waited for its disk for longer than the term, which counts from the head's latest answer that it knows this node.
                let margin = limits().margin;
                let asking = until_known(|| self.is_known(client, self.head.term.now()), margin / 20, margin);
                tokio::select! {
                    _ = asking => {}
                    // It is looked for next.
                    () = connection.closed() => {}
                }
            }
            // A head may have taken it in, and may wait for it no longer than for others.
            if resumes == Resumes::Joining && !std::mem::replace(&mut keeps_term, true) {
                self.vital("keeping its term", self.clone().keep_term());
            }
            match tried {
                Ok(joined) => break joined,
                // One that was there a moment ago is looked for, and asked again: it may have ended before it answered.
                Err(Error::Unreachable { .. } | Error::OutOfDescriptors { .. })
                    if self.head.way.is_followed() && Instant::now() < end =>
                {
                    tokio::time::sleep(PAUSES.1).await;
                }
                Err(error) => return Err(error),
            }
        };
        self.clone().vital("staying with the head", async move { self.stay(info, connection, client).await });
        Ok(())
    }

    async fn try_to_join(
        self: &Arc<Self>,
        info: &NodeInfo,
        resumes: &mut Resumes,
        snapshot: &mut Option<Snapshot>,
    ) -> Result<(Connection, HeadClient), Error> {
        let hello = Hello { resumes: *resumes, ..self.hello(Purpose::Control) };
        let (stream, met) = self.head.way.dial(&self.who.token, hello).await?;
        self.has_found_head();
        if let Met::Next(epoch) = met {
            self.note_for(epoch, snapshot);
        }
        let (connection, client) = self.serve_head(stream);
        *resumes = Resumes::Joining;
        let running = match snapshot {
            Some(snapshot) => snapshot.running.clone(),
            None => self.pool.lock().state.running(),
        };
        let joining = client.join_node(mux::within(limits().written), info.clone(), running);
        let answer = self.and_ask(&client, joining).await;
        let joined = mux::answered(answer, "the head").and_then(|joined| joined);
        if let Err(error) = joined {
            self.leave_connection(&connection);
            return Err(error);
        }
        // That it may go on is said in answer to its next question alone: a head that may not lead any more takes nodes in, too.
        self.head.way.joined(met);
        self.tell_of_patience();
        Ok((connection, client))
    }

    /// It may be another one, on another machine.
    fn has_found_head(&self) {
        self.head.term.is_with(|| self.head.way.heads());
        self.tell_workers_of_heads();
    }

    fn leave_connection(&self, connection: &Connection) {
        connection.close();
        self.ending.connections.lock().retain(|other| !other.is(connection));
    }

    fn serve_head(self: &Arc<Self>, stream: Stream) -> (Connection, HeadClient) {
        let (connection, client, server) = mux::connect_probing::<HeadRequest, HeadResponse, NodeRequest, NodeResponse>(
            stream,
            Waiting::Asleep,
            Probing::Both,
        );
        self.ending.connections.lock().push(connection.clone());
        *self.head.connection.lock() = Some(connection.clone());
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let service = NodeService::new(self.clone(), self.head.way.address().process);
        self.vital("hearing the head", mux::serve(server, service.serve()));
        (connection, client)
    }

    /// Talks to the head over one connection after the other, until it is lost.
    async fn stay(self: Arc<Self>, info: NodeInfo, mut connection: Connection, mut client: HeadClient) {
        self.talk(&connection, &client).await;
        let mut snapshot = None;
        let why = loop {
            self.leave_connection(&connection);
            if self.ending.ended.borrow().is_some() {
                break Loss::Ended;
            }
            tracing::warn!("the connection to the head has ended; looking for it");
            let (stream, met) = match self.find_head().await {
                Ok(found) => found,
                Err(why) => break why,
            };
            if let Met::Next(epoch) = met {
                self.note_for(epoch, &mut snapshot);
            }
            (connection, client) = self.serve_head(stream);
            match self.come_back(&client, &info, met, snapshot.as_ref()).await {
                Ok(None) => {
                    self.head.way.joined(met);
                    self.tell_of_patience();
                    tracing::info!("the head is back");
                    self.talk(&connection, &client).await;
                }
                Ok(Some(why)) => break Loss::GivenUp(why),
                // The next connection may tell.
                Err(_) => {}
            }
        };
        connection.close();
        self.head.link.broke();
        self.end(&why.to_string());
    }

    async fn talk(&self, connection: &Connection, client: &HeadClient) {
        *self.head.client.lock() = Some(client.clone());
        self.owners.steward.lend_head(Some(client.clone()));
        let request = |number, messages| HeadRequest::Deliver { number, messages };
        tokio::select! {
            () = self.head.link.carry(connection, request, messages_of) => {}
            never = self.ask(client) => match never {},
        }
        *self.head.client.lock() = None;
        self.owners.steward.lend_head(None);
    }

    /// Notes what runs here now. What was said to an earlier head, and what that said, is over.
    fn note_for(&self, epoch: Epoch, snapshot: &mut Option<Snapshot>) {
        // The next head may have taken in what it was told over an earlier connection.
        if snapshot.as_ref().is_some_and(|snapshot| snapshot.of == epoch) {
            return;
        }
        // Under the lock: what happens from now on is said after it.
        let pool = self.pool.lock();
        self.head.link.forget(HeadMessage::outlives_head);
        self.head.heard.store(0, Ordering::Release);
        let kept = self.kept.lock().version();
        let memory_short = self.memory_short().map(Box::new);
        let store = self.room.told();
        let running = Running { held: self.what_is_held(), memory_short, store, kept, ..pool.state.running() };
        *snapshot = Some(Snapshot { of: epoch, running });
    }

    /// Says to the worker processes how long silence is borne, if the head has said something else than the last one.
    fn tell_of_patience(&self) {
        let pool = self.pool.lock();
        let (patience, mut told) = (limits::patience(), self.head.told.lock());
        if std::mem::replace(&mut *told, patience) != patience {
            for commands in pool.processes.values().filter_map(|process| process.commands.as_ref()) {
                commands.send(WorkerCommand::Patience(patience));
            }
        }
    }

    /// Goes on with the head over a new connection. Why it does not know this node any more; none if it does, or does now.
    async fn come_back(
        &self,
        client: &HeadClient,
        info: &NodeInfo,
        met: Met,
        snapshot: Option<&Snapshot>,
    ) -> Result<Option<String>, RpcError> {
        let (Met::Next(_), Some(snapshot)) = (met, snapshot) else {
            return client.resume(mux::within(limits().silence)).await;
        };
        let joining = client.join_node(mux::within(limits().written), info.clone(), snapshot.running.clone());
        let joined = self.and_ask(client, joining).await?;
        if let Err(error) = &joined {
            tracing::warn!(%error, "the head that was started again does not take this node");
        }
        Ok(joined.err().map(|error| error.to_string()))
    }

    /// Waits for an answer, and asks the head meanwhile whether it knows this node: it may have to wait for its disk.
    async fn and_ask<T>(&self, client: &HeadClient, answer: impl Future<Output = T>) -> T {
        tokio::select! {
            answer = answer => answer,
            never = self.ask(client) => match never {},
        }
    }

    /// Asks the head whether it knows this node, again and again. An answer may be late, behind much else, and counts.
    async fn ask(&self, client: &HeadClient) -> Infallible {
        let mut questions = FuturesUnordered::new();
        loop {
            let asked = self.head.term.now();
            questions.push(self.is_known(client, asked));
            let mut pause = pin!(tokio::time::sleep(self.head.term.question()));
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    Some(_) = questions.next() => {}
                }
            }
        }
    }

    /// Asks the head once. A connection that has ended is found by others, and a node that is not known by its return.
    async fn is_known(&self, client: &HeadClient, asked: Asked) -> bool {
        let is_known = matches!(client.knows_node(mux::within(term::whole()), self.who.id).await, Ok(Some(true)));
        if is_known {
            self.head.term.is_known(asked);
        }
        is_known
    }

    /// Whether the head knows this node after its term.
    async fn is_known_all_the_same(&self) -> bool {
        let Some(limit) = self.head.term.last_question() else { return false };
        let ask = || async {
            match self.head.client() {
                Some(client) => self.is_known(&client, self.head.term.now()).await,
                // It is being looked for.
                None => false,
            }
        };
        until_known(ask, limit / 20, limit).await
    }

    /// Ends the node when its term is over.
    async fn keep_term(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        let term = &self.head.term;
        while !term.left().is_zero() || self.is_known_all_the_same().await || !term.left().is_zero() {
            let (began, look) = (term.now(), term.look());
            tokio::select! {
                () = tokio::time::sleep(look) => term.woke(began, look),
                _ = ended.wait_for(Option::is_some) => return,
            }
        }
        self.end(&Loss::TooLong(term::whole()).to_string());
    }

    /// Dials the head until it answers, or the node ends.
    async fn find_head(&self) -> Result<(Stream, Met), Loss> {
        let (mut pause, longest) = PAUSES;
        while self.ending.ended.borrow().is_none() {
            let hello = Hello { resumes: Resumes::Joined, ..self.hello(Purpose::Control) };
            let dialling = self.head.way.dial(&self.who.token, hello);
            // What is lost on the way is not waited for as long as a machine may take to answer.
            match tokio::time::timeout(limits().redial, dialling).await {
                Ok(Ok(found)) => {
                    self.has_found_head();
                    return Ok(found);
                }
                Ok(Err(DialError::Gone(_))) => return Err(Loss::Gone),
                Ok(Err(DialError::Failed(error))) => tracing::debug!(%error, "cannot reach the head"),
                Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
        Err(Loss::Ended)
    }
}

/// Asks until the answer is yes, with pauses between, and for so long at most. Whether it was.
async fn until_known<A: Future<Output = bool>>(mut ask: impl FnMut() -> A, pause: Duration, limit: Duration) -> bool {
    let asking = async {
        while !ask().await {
            tokio::time::sleep(pause).await;
        }
    };
    tokio::time::timeout(limit, asking).await.is_ok()
}

fn messages_of(request: HeadRequest) -> Vec<HeadMessage> {
    match request {
        HeadRequest::Deliver { messages, .. } => messages,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(150);
    const LIMIT: Duration = Duration::from_secs(3);

    #[tokio::test(start_paused = true)]
    async fn the_head_is_asked_until_it_knows_the_node() {
        let mut answers = [false, false, true].into_iter();
        assert!(until_known(|| std::future::ready(answers.next().unwrap_or_default()), PAUSE, LIMIT).await);
        assert_eq!(answers.next(), None, "once more after each no");
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_never_knows_the_node_is_asked_for_a_limited_time() {
        let mut asked = 0;
        let ask = || {
            asked += 1;
            std::future::ready(false)
        };
        assert!(!until_known(ask, PAUSE, LIMIT).await);
        assert!(asked > 1);
        assert!(!until_known(std::future::pending, PAUSE, LIMIT).await, "nor is an answer waited for any longer");
    }
}
