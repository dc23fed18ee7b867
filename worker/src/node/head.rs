//! The node's link to the head, over any number of connections.
//!
//! A connection that ends is no loss: the head is dialled again, and what was not answered is sent again, in both directions.
//! The node ends when the head's machine says that nobody listens there any more, when the head says that it has given the node
//! up, or when its term is over (`term.rs`): what runs here may then be started again elsewhere.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_net::address::{self, DialError, Stream};
use wingbeat_net::handshake::{Hello, Purpose};
use wingbeat_net::limits::limits;
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadMessage, NodeInfo};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{HeadClient, HeadRequest, HeadResponse, Node as _, NodeRequest, NodeResponse};
use wingbeat_net::silence::Probing;

use super::Daemon;
use super::service::NodeService;
use super::term::{self, Asked, Term};

/// The first pause before the head is dialled again, and the longest. Short, so that a node whose network is back is back before its
/// term is over.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// How long that may take.
const DIAL: Duration = Duration::from_secs(2);

/// What is kept of the connection to the head.
pub(super) struct HeadLink {
    pub address: Address,
    /// What the node says to it.
    pub link: Link<HeadMessage>,
    /// For questions, while there is a connection.
    client: Mutex<Option<HeadClient>>,
    /// The number of the next batch of what the head says.
    heard: AtomicU64,
    term: Term,
}

impl HeadLink {
    pub(super) fn new(address: Address) -> HeadLink {
        let term = Term::new(&address);
        HeadLink { address, link: Link::new(), client: Mutex::default(), heard: AtomicU64::new(0), term }
    }

    /// A client for questions to the head; none while there is no connection.
    pub(super) fn client(&self) -> Option<HeadClient> {
        self.client.lock().clone()
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
    #[error("the head has given this node up, because it had heard nothing from it for {:?}; start this worker again", limits().lost)]
    GivenUp,
    #[error("the head has answered nothing for {0:?}, and is about to give this node up; start this worker again")]
    TooLong(Duration),
    #[error("this node has ended")]
    Ended,
}

impl Daemon {
    /// Joins the head, and stays with it until it is lost.
    pub(super) async fn join(self: Arc<Self>, info: NodeInfo) -> Result<(), Error> {
        let hello = self.hello(Purpose::Control);
        let stream = address::dial(&self.head.address, "the head", &self.who.token, hello).await?;
        let (connection, client) = self.serve_head(stream);
        let running = self.pool.lock().state.running();
        let asked = self.head.term.now();
        let answer = client.join_node(mux::within(limits().head), info, running).await;
        mux::answered(answer, "the head")??;
        self.head.term.is_known(asked);
        self.vital("keeping its term", self.clone().keep_term());
        self.clone().vital("staying with the head", async move { self.stay(connection, client).await });
        Ok(())
    }

    fn serve_head(self: &Arc<Self>, stream: Stream) -> (Connection, HeadClient) {
        let (connection, client, server) = mux::connect_probing::<HeadRequest, HeadResponse, NodeRequest, NodeResponse>(
            stream,
            Waiting::Asleep,
            Probing::Both,
        );
        self.ending.connections.lock().push(connection.clone());
        let client = HeadClient::new(mux::client_config(), client).spawn();
        let service = NodeService::new(self.clone(), self.head.address.process);
        self.vital("hearing the head", mux::serve(server, service.serve()));
        (connection, client)
    }

    /// Talks to the head over one connection after the other, until it is lost.
    async fn stay(self: Arc<Self>, mut connection: Connection, mut client: HeadClient) {
        let mut is_back = false;
        loop {
            let asked = self.head.term.now();
            let resumed = match is_back {
                true => client.resume(mux::within(limits().silence)).await,
                false => Ok(true),
            };
            if let Ok(true) = resumed {
                if is_back {
                    self.head.term.is_known(asked);
                    tracing::info!("the head is back");
                }
                *self.head.client.lock() = Some(client.clone());
                let request = |number, messages| HeadRequest::Deliver { number, messages };
                tokio::select! {
                    () = self.head.link.carry(&connection, request, messages_of) => {}
                    () = self.ask(&client) => {}
                }
                *self.head.client.lock() = None;
            }
            // Without an answer, the next connection may tell.
            let is_known = !matches!(resumed, Ok(false));
            connection.close();
            self.ending.connections.lock().retain(|other| !other.is(&connection));
            let found = match is_known {
                true if self.ending.ended.borrow().is_some() => Err(Loss::Ended),
                true => {
                    tracing::warn!("the connection to the head has ended; looking for it");
                    self.find_head().await
                }
                false => Err(Loss::GivenUp),
            };
            match found {
                Ok(stream) => (connection, client) = self.serve_head(stream),
                Err(why) => {
                    self.head.link.broke();
                    return self.end(&why.to_string());
                }
            }
            is_back = true;
        }
    }

    /// Asks the head whether it knows this node, again and again. An answer may be late, behind much else, and counts.
    async fn ask(&self, client: &HeadClient) {
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
        let is_known = matches!(client.knows_node(mux::within(term::whole()), self.who.id).await, Ok(true));
        if is_known {
            self.head.term.is_known(asked);
        }
        is_known
    }

    /// Whether the head knows this node after its term.
    async fn is_known_all_the_same(&self) -> bool {
        let Some(limit) = self.head.term.last_question() else { return false };
        let asking = async {
            loop {
                if let Some(client) = self.head.client()
                    && self.is_known(&client, self.head.term.now()).await
                {
                    return;
                }
                // It is being looked for.
                tokio::time::sleep(limit / 20).await;
            }
        };
        tokio::time::timeout(limit, asking).await.is_ok()
    }

    /// Ends the node when its term is over.
    async fn keep_term(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        while !self.head.term.left().is_zero() || self.is_known_all_the_same().await {
            tokio::select! {
                () = tokio::time::sleep(self.head.term.look()) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
        }
        self.end(&Loss::TooLong(term::whole()).to_string());
    }

    /// Dials the head until it answers, or the node ends.
    async fn find_head(&self) -> Result<Stream, Loss> {
        let (mut pause, longest) = PAUSES;
        while self.ending.ended.borrow().is_none() {
            let hello = Hello { resumes: true, ..self.hello(Purpose::Control) };
            let dialling = address::dial_known(&self.head.address, "the head", &self.who.token, hello);
            // What is lost on the way is not waited for as long as a machine may take to answer.
            match tokio::time::timeout(DIAL, dialling).await {
                Ok(Ok(stream)) => return Ok(stream),
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

fn messages_of(request: HeadRequest) -> Vec<HeadMessage> {
    match request {
        HeadRequest::Deliver { messages, .. } => messages,
        _ => Vec::new(),
    }
}
