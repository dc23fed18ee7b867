//! Links over a network that delays, holds and cuts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::{Heard, answers_as_anybody};
use tarpc::context::Context;
use wingbeat_core::{LeaseId, ProcessId};
use wingbeat_net::address::{self, Listener, Stream};
use wingbeat_net::handshake::{Hello, Token, Welcome};
use wingbeat_net::link::Link;
use wingbeat_net::messages::PeerMessage;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{Process, ProcessRequest, ProcessResponse};
use wingbeat_net::transport::memory::{Disturbance, Network};
use wingbeat_net::transport::{Listening, Transport};

/// One of two that say numbers to each other.
#[derive(Clone, Default)]
struct Side {
    link: Link<PeerMessage>,
    heard: Heard,
}

impl Process for Side {
    async fn deliver(self, _: Context, _: u64, number: u64, messages: Vec<PeerMessage>) {
        self.heard.take_in(number, messages);
    }
    answers_as_anybody!();
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
    while one.heard.count() < count as usize || other.heard.count() < count as usize {
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
        assert_eq!((one.heard.numbers(), other.heard.numbers()), (all(40), all(40)), "cut after {bytes} bytes");
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
    assert_eq!((one.heard.numbers(), other.heard.numbers()), (all(200_000), all(200_000)));
    assert!(connections > 3, "{connections}");
    network.close();
}

#[tokio::test]
async fn whatever_a_seed_does_to_connections_all_arrives_once_and_in_order() {
    for seed in 0..100 {
        let network = Network::new();
        let (late, lost_for) = (Duration::from_micros(500), Duration::from_millis(2));
        network.disturb(Disturbance { seed, late, cuts: 0.05, loses: 0.05, lost_for });
        let mut connections = 0;
        let (one, other) = converse(&network, 2_000, |number| {
            connections = number;
            // Each connection gets somewhere in the end.
            if number == 50 {
                network.heal();
            }
        })
        .await;
        assert_eq!((one.heard.numbers(), other.heard.numbers()), (all(2_000), all(2_000)), "seed {seed}");
        network.close();
    }
}

#[tokio::test]
async fn whoever_listens_in_a_pretended_network_is_dialled_there_and_is_gone_when_it_has_ended() {
    let network = Network::new();
    let token = Token::random();
    let listener = Listener::bind_in(&network, ProcessId(7), None).await.unwrap();
    let here = listener.address().clone();
    let cluster = wingbeat_core::ClusterId::random();
    let welcome = Welcome { address: here.clone(), cluster, epoch: None, patience: None, stands_by: None };
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
