//! Links over real sockets: order, answers, and peers that read slowly.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::Arc;

use common::{Heard, answers_as_anybody};
use parking_lot::Mutex;
use tarpc::context::Context;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::address::Stream;
use wingbeat_net::link::Link;
use wingbeat_net::messages::PeerMessage;
use wingbeat_net::moment::Moment;
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{Process, ProcessRequest, ProcessResponse};

/// Keeps what it is sent, as far as it is let.
#[derive(Clone)]
struct Peer {
    got: Arc<Mutex<Vec<u64>>>,
    may_take: Arc<Semaphore>,
}

impl Process for Peer {
    async fn deliver(self, _: Context, _: u64, _: u64, messages: Vec<PeerMessage>) {
        self.may_take.acquire().await.unwrap().forget();
        for message in messages {
            match message {
                PeerMessage::Ready(lease) => self.got.lock().push(lease.0),
                PeerMessage::Resolved(values) => self.got.lock().extend(values.iter().map(|(id, _)| id.task.seq)),
                other => panic!("{other:?}"),
            }
        }
    }
    answers_as_anybody!();
}

struct Pair {
    link: Link<PeerMessage>,
    ours: Connection,
    theirs: Connection,
    peer: Peer,
}

/// One end of a connection, and what is said over it.
fn saying_over(stream: Stream) -> (Link<PeerMessage>, Connection) {
    let (ours, _, _) =
        mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
    let link = Link::new();
    let (running, over) = (link.clone(), ours.clone());
    tokio::spawn(async move {
        running.run(&over, |messages| ProcessRequest::Deliver { contact: 0, number: 0, messages }).await
    });
    (link, ours)
}

fn connected(here: Stream, there: Stream) -> Pair {
    let peer = Peer { got: Arc::default(), may_take: Arc::new(Semaphore::new(0)) };
    let (link, ours) = saying_over(here);
    let (theirs, _, server) =
        mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(there, Waiting::Awake);
    tokio::spawn(mux::serve(server, peer.clone().serve()));
    Pair { link, ours, theirs, peer }
}

fn unix() -> Pair {
    let (here, there) = UnixStream::pair().unwrap();
    connected(Stream::Unix(here), Stream::Unix(there))
}

fn megabyte(number: u64) -> PeerMessage {
    let task = TaskId { owner: ProcessId(1), seq: number };
    let packed = Packed::plain(vec![7; 1 << 20].into());
    PeerMessage::Resolved(vec![(ObjectId { task, index: 0 }, ObjectValue::Inline(packed))])
}

const ALWAYS: usize = 1 << 20;

#[tokio::test]
async fn messages_arrive_in_order_and_their_arrival_is_known() {
    let pair = unix();
    pair.peer.may_take.add_permits(ALWAYS);
    for number in 0..10_000 {
        pair.link.send(PeerMessage::Ready(LeaseId(number)));
    }
    assert!(pair.link.flushed().await);
    assert!(pair.link.is_idle());
    assert_eq!(*pair.peer.got.lock(), (0..10_000).collect::<Vec<u64>>());
}

#[tokio::test]
async fn what_was_queued_before_there_was_a_connection_is_sent() {
    let pair = unix();
    pair.peer.may_take.add_permits(ALWAYS);
    pair.link.send_in_a_hurry(PeerMessage::Ready(LeaseId(1)));
    assert!(pair.link.flushed().await);
    assert_eq!(*pair.peer.got.lock(), [1]);
}

#[tokio::test]
async fn what_may_wait_for_others_goes_alone_after_a_moment() {
    let moment = Arc::new(Moment::new().unwrap());
    let ripening = moment.clone();
    tokio::spawn(async move { ripening.run().await });
    let pair = unix();
    pair.peer.may_take.add_permits(ALWAYS);
    for number in 1..=3 {
        pair.link.send_with_others(PeerMessage::Ready(LeaseId(number)), &moment);
        while pair.link.taken_in() < number {
            tokio::task::yield_now().await;
        }
    }
    // Who waits for it does not wait for that.
    pair.link.send_with_others(PeerMessage::Ready(LeaseId(4)), &Moment::new().unwrap());
    assert!(pair.link.flushed().await);
    assert_eq!(*pair.peer.got.lock(), [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_peer_that_takes_nothing_in_is_not_taken_for_one_that_did() {
    let pair = unix();
    pair.link.send_in_a_hurry(PeerMessage::Ready(LeaseId(1)));
    let flushed = tokio::spawn({
        let link = pair.link.clone();
        async move { link.flushed().await }
    });
    tokio::task::yield_now().await;
    assert!(!pair.link.is_idle());
    pair.peer.may_take.add_permits(1);
    assert!(flushed.await.unwrap());
}

#[tokio::test]
async fn more_than_the_sockets_hold_arrives_all_the_same() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (here, there) =
        tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await.unwrap().0 });
    for pair in [unix(), connected(Stream::Tcp(here.unwrap()), Stream::Tcp(there))] {
        pair.peer.may_take.add_permits(ALWAYS);
        for number in 0..64 {
            pair.link.send(megabyte(number));
        }
        assert!(pair.link.flushed().await);
        assert_eq!(*pair.peer.got.lock(), (0..64).collect::<Vec<u64>>());
    }
}

/// Takes in each batch once, and answers as many as it may.
#[derive(Clone)]
struct Forgetful {
    heard: Heard,
    may_answer: Arc<Semaphore>,
}

impl Process for Forgetful {
    async fn deliver(self, _: Context, _: u64, number: u64, messages: Vec<PeerMessage>) {
        self.heard.take_in(number, messages);
        self.may_answer.acquire().await.unwrap().forget();
    }
    answers_as_anybody!();
}

#[tokio::test]
async fn a_link_that_is_carried_goes_on_over_the_next_connection_and_nothing_is_lost_or_taken_in_twice() {
    let link = Link::new();
    let heard = Heard::default();
    let mut sent = 0;
    let kept = |request| match request {
        ProcessRequest::Deliver { messages, .. } => messages,
        _ => Vec::new(),
    };
    for round in 0..20 {
        let (here, there) = UnixStream::pair().unwrap();
        let (ours, _, _) = mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
            Stream::Unix(here),
            Waiting::Asleep,
        );
        let (theirs, _, server) = mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
            Stream::Unix(there),
            Waiting::Asleep,
        );
        // So many batches are answered before the connection ends; the last one answers all.
        let may_answer = Arc::new(Semaphore::new(if round == 19 { ALWAYS } else { round % 3 }));
        let peer = Forgetful { heard: heard.clone(), may_answer };
        tokio::spawn(mux::serve(server, peer.serve()));
        let (running, over) = (link.clone(), ours.clone());
        let carrying = tokio::spawn(async move {
            let request = |number, messages| ProcessRequest::Deliver { contact: 0, number, messages };
            running.carry(&over, request, kept).await;
        });
        for _ in 0..1_500 {
            link.send(PeerMessage::Ready(LeaseId(sent)));
            sent += 1;
        }
        if round == 19 {
            assert!(link.flushed().await);
            assert!(link.is_idle());
        } else {
            while heard.batches() <= round as u64 {
                tokio::task::yield_now().await;
            }
            theirs.close();
            carrying.await.unwrap();
            assert!(!link.is_broken());
        }
    }
    assert_eq!(heard.numbers(), (0..sent).collect::<Vec<u64>>());
}

/// Keeps values.
#[derive(Clone, Default)]
struct Keeper(Arc<Mutex<Vec<ObjectValue>>>);

impl Process for Keeper {
    async fn deliver(self, _: Context, _: u64, _: u64, messages: Vec<PeerMessage>) {
        for message in messages {
            let PeerMessage::Resolved(values) = message else { panic!("{message:?}") };
            self.0.lock().extend(values.into_iter().map(|(_, value)| value));
        }
    }
    answers_as_anybody!();
}

#[tokio::test]
async fn a_small_value_that_is_kept_keeps_nothing_else_of_what_was_read() {
    let (here, there) = UnixStream::pair().unwrap();
    let (link, _ours) = saying_over(Stream::Unix(here));
    let (_theirs, _, server) = mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
        Stream::Unix(there),
        Waiting::Asleep,
    );
    let keeper = Keeper::default();
    tokio::spawn(mux::serve(server, keeper.clone().serve()));
    for number in 0..3 {
        let task = TaskId { owner: ProcessId(1), seq: number };
        let value = ObjectValue::Inline(Packed::plain(vec![7; 100].into()));
        link.send(PeerMessage::Resolved(vec![(ObjectId { task, index: 0 }, value)]));
        assert!(link.flushed().await);
    }
    let kept = std::mem::take(&mut *keeper.0.lock());
    assert_eq!(kept.len(), 3);
    for value in kept {
        let ObjectValue::Inline(packed) = value else { panic!("{value:?}") };
        assert!(packed.bytes.0.is_unique(), "it shares its memory with what was read beside it");
    }
}

#[tokio::test]
async fn a_connection_that_is_closed_does_not_wait_for_a_peer_that_reads_nothing() {
    let (here, unread) = UnixStream::pair().unwrap();
    let (link, ours) = saying_over(Stream::Unix(here));
    for number in 0..8 {
        link.send(megabyte(number));
    }
    // It is being written.
    unread.readable().await.unwrap();
    ours.close();
    ours.closed().await;
    assert!(link.is_broken() || !link.flushed().await);
    drop(unread);
}

#[tokio::test]
async fn the_end_of_the_connection_ends_every_wait() {
    let pair = unix();
    pair.link.send(PeerMessage::Ready(LeaseId(1)));
    let flushed = pair.link.flushed();
    pair.theirs.close();
    assert!(!flushed.await);
    pair.ours.closed().await;
    assert!(pair.ours.is_closed());
}
