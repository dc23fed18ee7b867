//! Links over a network that delays, holds and cuts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tarpc::context::Context;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::{LeaseId, ProcessId, TaskId};
use wingbeat_net::address::{self, Listener, Stream};
use wingbeat_net::handshake::{Hello, Token, Welcome};
use wingbeat_net::link::Link;
use wingbeat_net::messages::{Explanation, HeadEvent, LogLine, PeerMessage, TaskStanding, WorkerCommand};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{Process, ProcessRequest, ProcessResponse};
use wingbeat_net::transport::memory::Network;
use wingbeat_net::transport::{Listening, Transport};

/// One of two that say numbers to each other.
#[derive(Clone, Default)]
struct Side {
    link: Link<PeerMessage>,
    /// The number of the next batch from the other.
    heard: Arc<Mutex<u64>>,
    got: Arc<Mutex<Vec<u64>>>,
}

impl Process for Side {
    async fn deliver(self, _: Context, _: u64, number: u64, messages: Vec<PeerMessage>) {
        let mut heard = self.heard.lock();
        if number < *heard {
            return;
        }
        *heard = number + 1;
        self.got.lock().extend(messages.into_iter().map(|message| match message {
            PeerMessage::Ready(lease) => lease.0,
            other => panic!("{other:?}"),
        }));
    }
    async fn head_events(self, _: Context, _: u64, _: Vec<HeadEvent>) {}
    async fn commands(self, _: Context, _: Vec<WorkerCommand>) {}
    async fn logs(self, _: Context, _: Vec<LogLine>) {}
    async fn explain_task(self, _: Context, task: TaskId) -> TaskStanding {
        TaskStanding::Known(Explanation { subject: task.to_string(), ..Explanation::default() })
    }
    async fn read_executable(self, _: Context, _: u64) -> Result<Payload, Error> {
        Ok(Payload(Vec::new().into()))
    }
}

impl Side {
    fn says(&self, numbers: std::ops::Range<u64>) {
        for number in numbers {
            self.link.send(PeerMessage::Ready(LeaseId(number)));
        }
    }

    /// Talks over a connection until it ends.
    async fn talk(self, stream: Stream) {
        let (connection, _, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let request = |number, messages| ProcessRequest::Deliver { contact: 0, number, messages };
        let kept = |request| match request {
            ProcessRequest::Deliver { messages, .. } => messages,
            _ => Vec::new(),
        };
        let link = self.link.clone();
        let saying = async {
            link.carry(&connection, request, kept).await;
            connection.close();
        };
        mux::beside(mux::serve(server, self.serve()), saying).await;
    }
}

/// Two that find each other again whenever their connection has ended, until both have heard all.
async fn converse(network: &Network, count: u64, mut between: impl FnMut(u64)) -> (Side, Side) {
    let Listening { address, mut incoming } = network.listen(ProcessId(1), None).await.unwrap();
    let (one, other) = (Side::default(), Side::default());
    one.says(0..count);
    other.says(0..count);
    let mut connections = 0;
    while one.got.lock().len() < count as usize || other.got.lock().len() < count as usize {
        let here = network.open(&address).await.unwrap();
        let (there, _) = incoming.next().await.unwrap();
        let done = async {
            let flushed = tokio::join!(one.link.flushed(), other.link.flushed());
            assert_eq!(flushed, (true, true));
        };
        tokio::select! {
            _ = async { tokio::join!(one.clone().talk(here), other.clone().talk(there)) } => {}
            () = done => {}
        }
        connections += 1;
        between(connections);
    }
    (one, other)
}

fn all(count: u64) -> Vec<u64> {
    (0..count).collect()
}

#[tokio::test]
async fn what_is_said_arrives_once_and_in_order_wherever_the_connection_is_cut() {
    let network = Network::new();
    let mut most = 0;
    for bytes in 0..1_500 {
        network.cut_after(bytes);
        let mut connections = 0;
        let (one, other) = converse(&network, 40, |number| connections = number).await;
        assert_eq!((&*one.got.lock(), &*other.got.lock()), (&all(40), &all(40)), "cut after {bytes} bytes");
        if connections > 1 {
            most = bytes;
        }
        network.heal();
    }
    assert!(most > 400, "the whole conversation took {most} bytes");
    network.close();
}

#[tokio::test]
async fn a_slow_network_that_is_cut_again_and_again_loses_nothing() {
    let network = Network::new();
    network.delay(Duration::from_millis(1));
    let mut connections = 0;
    let mut cut_again = |number| {
        connections = number;
        // More than may be on its way, so that each connection gets somewhere.
        network.cut_after(1 << 20);
    };
    cut_again(0);
    let (one, other) = converse(&network, 200_000, &mut cut_again).await;
    assert_eq!((&*one.got.lock(), &*other.got.lock()), (&all(200_000), &all(200_000)));
    assert!(connections > 3, "{connections}");
    network.close();
}

#[tokio::test]
async fn whoever_listens_in_a_pretended_network_is_dialled_there_and_is_gone_when_it_has_ended() {
    let network = Network::new();
    let token = Token::random();
    let listener = Listener::bind_in(&network, ProcessId(7), None).await.unwrap();
    let here = listener.address().clone();
    let cluster = wingbeat_core::ClusterId::random();
    let welcome = Welcome { address: here.clone(), cluster, epoch: None };
    let serving = tokio::spawn(listener.serve(token.clone(), welcome, |stream, _| {
        tokio::spawn(async move {
            std::future::pending::<Stream>().await;
            drop(stream)
        });
    }));
    assert!(!address::is_gone(&here).await);
    let (_stream, welcome) = address::dial_and_learn(&here, "the listener", &token, Hello::of_tool()).await.unwrap();
    assert_eq!(welcome.cluster, cluster);
    network.hold(true);
    let dialling = address::dial(&here, "the listener", &token, Hello::of_tool());
    assert!(tokio::time::timeout(Duration::from_millis(50), dialling).await.is_err(), "nobody is told");
    network.hold(false);
    address::dial(&here, "the listener", &token, Hello::of_tool()).await.unwrap();
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    assert!(address::is_gone(&here).await);
    network.close();
}
