//! Two whole ends of a connection on one thread, as every process of Wingbeat has them: whatever is sent arrives, and
//! neither end stands still because the other does.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tarpc::context::Context;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::address::Stream;
use wingbeat_net::link::Link;
use wingbeat_net::messages::{HeadEvent, LogLine, PeerMessage, ProcessStacks, TaskStanding, WorkerCommand};
use wingbeat_net::mux::{self, Connection, Waiting};
use wingbeat_net::services::{Process, ProcessClient, ProcessRequest, ProcessResponse};

/// Far more than any of this takes on a loaded machine. An end that never gives its thread back cannot be seen from that
/// thread, so each test runs on one of its own.
const GENEROUS: Duration = Duration::from_secs(240);

fn on_one_thread<F: Future<Output = ()>>(work: impl FnOnce() -> F + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work());
        let _ = done.send(());
    });
    is_done.recv_timeout(GENEROUS).expect("the ends stand still, or one failed");
}

/// Counts what it is sent, as far as it is let, and answers with as many bytes as it is asked for.
#[derive(Clone)]
struct Counter {
    bytes: Arc<AtomicU64>,
    messages: Arc<AtomicU64>,
    may_take: Arc<Semaphore>,
}

impl Counter {
    fn new(permits: usize) -> Counter {
        Counter { bytes: Arc::default(), messages: Arc::default(), may_take: Arc::new(Semaphore::new(permits)) }
    }

    fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }
}

impl Process for Counter {
    async fn deliver(self, _: Context, _: u64, _: u64, messages: Vec<PeerMessage>) {
        match self.may_take.try_acquire() {
            Ok(permit) => permit.forget(),
            Err(_) => self.may_take.acquire().await.unwrap().forget(),
        }
        for message in messages {
            self.messages.fetch_add(1, Ordering::Relaxed);
            let PeerMessage::Resolved(values) = message else { continue };
            for (_, value) in values {
                let ObjectValue::Inline(packed) = value else { panic!("{value:?}") };
                self.bytes.fetch_add(packed.bytes.len() as u64, Ordering::Relaxed);
            }
        }
    }
    async fn head_events(self, _: Context, _: u64, _: Vec<HeadEvent>) {}
    async fn commands(self, _: Context, _: Vec<WorkerCommand>) {}
    async fn logs(self, _: Context, _: Vec<LogLine>) {}
    async fn explain_task(self, _: Context, _: TaskId) -> TaskStanding {
        panic!("nobody asks this end about a task")
    }
    async fn stacks(self, _: Context) -> Result<ProcessStacks, Error> {
        panic!("nobody asks for its threads")
    }
    async fn keeps(self, _: Context, _: Vec<ObjectId>, _: bool) -> Vec<ObjectId> {
        Vec::new()
    }
    async fn read_executable(self, _: Context, offset: u64) -> Result<Payload, Error> {
        Ok(Payload(vec![5; offset as usize].into()))
    }
}

struct End {
    link: Link<PeerMessage>,
    client: ProcessClient,
    service: Counter,
    connection: Connection,
    running: tokio::task::JoinHandle<()>,
}

/// Everything of one end: its link, its client and what it serves.
fn end(stream: Stream, service: Counter) -> End {
    let (connection, client, server) =
        mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Awake);
    let client = ProcessClient::new(mux::client_config(), client).spawn();
    let link = Link::new();
    let (serving, running, over) = (service.clone(), link.clone(), connection.clone());
    // One task serves and sends, as in every process.
    let running = tokio::spawn(async move {
        let sending = running.run(&over, |messages| ProcessRequest::Deliver { contact: 0, number: 0, messages });
        mux::beside(mux::serve(server, serving.serve()), sending).await;
        over.close();
    });
    End { link, client, service, connection, running }
}

fn unix() -> (Stream, Stream) {
    let (here, there) = UnixStream::pair().unwrap();
    (Stream::Unix(here), Stream::Unix(there))
}

async fn tcp() -> (Stream, Stream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (here, there) =
        tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), async { listener.accept().await.unwrap().0 });
    (Stream::Tcp(here.unwrap()), Stream::Tcp(there))
}

fn ends((here, there): (Stream, Stream)) -> (End, End) {
    (end(here, Counter::new(ALWAYS)), end(there, Counter::new(ALWAYS)))
}

const ALWAYS: usize = 1 << 24;

fn value(bytes: usize) -> PeerMessage {
    let task = TaskId { owner: ProcessId(1), seq: 1 };
    PeerMessage::Resolved(vec![(
        ObjectId { task, index: 0 },
        ObjectValue::Inline(Packed::plain(vec![7; bytes].into())),
    )])
}

#[test]
fn sixty_four_mebibytes_arrive_one_way() {
    on_one_thread(|| async {
        for pair in [unix(), tcp().await] {
            let (ours, theirs) = ends(pair);
            for _ in 0..64 {
                ours.link.send(value(1 << 20));
            }
            assert!(ours.link.flushed().await);
            assert_eq!(theirs.service.bytes.load(Ordering::Relaxed), 64 << 20);
        }
    });
}

#[test]
fn what_the_dead_have_said_is_taken_in() {
    for is_spoken_to in [false, true] {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        // As many as are sent without an answer.
        const BATCHES: u64 = 64;
        on_one_thread(move || async move {
            let dying = end(Stream::Unix(UnixStream::from_std(here).unwrap()), Counter::new(ALWAYS));
            for _ in 0..BATCHES {
                dying.link.send(value(100));
                while dying.link.queued() > 0 {
                    tokio::task::yield_now().await;
                }
            }
            // What is queued is written before it ends.
            dying.connection.close();
            dying.connection.closed().await;
        });
        on_one_thread(move || async move {
            let left = end(Stream::Unix(UnixStream::from_std(there).unwrap()), Counter::new(ALWAYS));
            if is_spoken_to {
                // Writing fails before anything is read.
                left.link.send(value(1 << 20));
            }
            left.running.await.unwrap();
            assert_eq!(left.service.messages.load(Ordering::Relaxed), BATCHES);
        });
    }
}

#[test]
fn a_connection_ends_for_who_serves_it_though_something_was_never_answered() {
    on_one_thread(|| async {
        let (here, there) = unix();
        let (_connection, _client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(here, Waiting::Asleep);
        // Takes nothing in.
        let serving = tokio::spawn(mux::serve(server, Counter::new(0).serve()));
        let other = end(there, Counter::new(ALWAYS));
        other.link.send(value(100));
        while other.link.queued() > 0 {
            tokio::task::yield_now().await;
        }
        // What came before this has begun.
        other.client.read_executable(mux::no_deadline(), 10).await.unwrap().unwrap();
        other.connection.close();
        serving.await.unwrap();
    });
}

#[test]
fn many_values_of_every_size_arrive_both_ways_at_once() {
    on_one_thread(|| async {
        for pair in [unix(), tcp().await] {
            let (ours, theirs) = ends(pair);
            let sizes = [0, 1_000, 50_000, 99_000, 1 << 20, 5 << 20];
            let mut sent = 0;
            for _ in 0..12 {
                for size in sizes {
                    sent += size as u64;
                    ours.link.send(value(size));
                    theirs.link.send(value(size));
                }
            }
            // Sixty-four mebibytes and more each way, and questions with large answers in between.
            assert!(sent > 64 << 20);
            let asking = async {
                for _ in 0..4 {
                    let (a, b) = tokio::join!(
                        ours.client.read_executable(mux::no_deadline(), 6 << 20),
                        theirs.client.read_executable(mux::no_deadline(), 6 << 20)
                    );
                    assert_eq!((a.unwrap().unwrap().len(), b.unwrap().unwrap().len()), (6 << 20, 6 << 20));
                }
            };
            let (a, b, ()) = tokio::join!(ours.link.flushed(), theirs.link.flushed(), asking);
            assert!(a && b);
            assert_eq!(ours.service.bytes.load(Ordering::Relaxed), sent);
            assert_eq!(theirs.service.bytes.load(Ordering::Relaxed), sent);
        }
    });
}

#[test]
fn an_answer_of_many_mebibytes_arrives() {
    on_one_thread(|| async {
        let (ours, _theirs) = ends(unix());
        for size in [4 << 20, (4 << 20) + 1, 64 << 20] {
            let answer = ours.client.read_executable(mux::no_deadline(), size).await.unwrap().unwrap();
            assert_eq!(answer.len() as u64, size);
        }
    });
}

#[test]
fn more_answers_than_the_connection_holds_reach_those_who_asked() {
    on_one_thread(|| async {
        let (ours, theirs) = ends(unix());
        // Both ask for far more than either can have on the way.
        let asks = (0..200).map(|_| ours.client.read_executable(mux::no_deadline(), 300_000));
        let others = (0..200).map(|_| theirs.client.read_executable(mux::no_deadline(), 300_000));
        let (a, b) = tokio::join!(futures::future::join_all(asks), futures::future::join_all(others));
        for answer in a.into_iter().chain(b) {
            assert_eq!(answer.unwrap().unwrap().len(), 300_000);
        }
    });
}

/// Lets everything go on that can.
async fn let_run() {
    for _ in 0..2_000 {
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_reader_that_stops_costs_little_memory_and_gets_everything_when_it_goes_on() {
    on_one_thread(|| async {
        let (here, there) = unix();
        let ours = end(here, Counter::new(ALWAYS));
        for _ in 0..64 {
            ours.link.send(value(1 << 20));
        }
        // The other side has a socket and reads nothing.
        let_run().await;
        assert!(ours.link.queued() > 50, "only {} of 64 MiB wait where they were", ours.link.queued());
        let theirs = end(there, Counter::new(ALWAYS));
        assert!(ours.link.flushed().await);
        assert_eq!(theirs.service.bytes.load(Ordering::Relaxed), 64 << 20);
    });
}

#[test]
fn a_peer_that_takes_nothing_in_is_sent_a_bounded_part_and_is_still_answered() {
    on_one_thread(|| async {
        let (here, there) = unix();
        let ours = end(here, Counter::new(ALWAYS));
        let theirs = end(there, Counter::new(0));
        for _ in 0..200 {
            ours.link.send(value(1 << 20));
        }
        let_run().await;
        assert!(ours.link.queued() >= 200 - 64, "{}", ours.link.queued());
        assert_eq!(theirs.service.messages(), 0);
        // What it does not take in keeps no other channel from its own.
        let answer = theirs.client.read_executable(mux::no_deadline(), 8 << 20).await.unwrap().unwrap();
        assert_eq!(answer.len(), 8 << 20);
        let answer = ours.client.read_executable(mux::no_deadline(), 8 << 20).await.unwrap().unwrap();
        assert_eq!(answer.len(), 8 << 20);
        theirs.service.may_take.add_permits(ALWAYS);
        assert!(ours.link.flushed().await);
        assert_eq!(theirs.service.messages(), 200);
    });
}

#[test]
fn more_than_a_frame_holds_goes_in_several() {
    on_one_thread(|| async {
        let (ours, theirs) = ends(unix());
        // In one batch they would be 400 MB. They share their bytes, which are therefore here once.
        let large = value(8 << 20);
        for _ in 0..50 {
            ours.link.send(large.clone());
        }
        assert!(ours.link.flushed().await);
        assert_eq!(theirs.service.bytes.load(Ordering::Relaxed), 50 * (8 << 20));
    });
}

#[test]
fn what_no_frame_can_hold_fails_alone_and_the_connection_goes_on() {
    on_one_thread(|| async {
        let (ours, theirs) = ends(unix());
        let answer = ours.client.read_executable(mux::no_deadline(), 257 << 20).await;
        let error = mux::answered(answer, "the other end").unwrap_err();
        assert!(error.to_string().contains("over the limit"), "{error}");
        ours.link.send(value(257 << 20));
        ours.link.send(PeerMessage::Ready(LeaseId(1)));
        assert!(ours.link.flushed().await);
        assert_eq!(theirs.service.messages(), 1);
        let answer = ours.client.read_executable(mux::no_deadline(), 10).await.unwrap().unwrap();
        assert_eq!(answer.len(), 10);
        assert!(!ours.connection.is_closed());
    });
}

#[test]
fn what_is_written_last_arrives_although_the_writer_has_not_read_everything() {
    on_one_thread(|| async {
        for _ in 0..20 {
            let (here, there) = tcp().await;
            let ours = end(here, Counter::new(ALWAYS));
            let mut there = match there {
                Stream::Tcp(stream) => stream,
                Stream::Unix(_) => unreachable!(),
            };
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            ours.link.send(value(3_000_000));
            while ours.link.queued() > 0 {
                tokio::task::yield_now().await;
            }
            // Probes, which the other end has no reason to read before it closes.
            let probes: Vec<u8> = [1u8, 0, 0, 0, 2].repeat(40_000);
            let (mut read, mut write) = there.split();
            let flood = async {
                // The end may have been reached before all were taken.
                let _ = write.write_all(&probes).await;
            };
            let last = async {
                let mut got = Vec::new();
                ours.connection.close();
                read.read_to_end(&mut got).await.map(|_| got)
            };
            let ((), got) = tokio::join!(flood, last);
            let got = got.unwrap();
            assert!(got.len() > 3_000_000);
            // Only whole frames.
            let mut rest = &got[..];
            while let Some((head, after)) = rest.split_first_chunk::<4>() {
                rest = &after[u32::from_le_bytes(*head) as usize..];
            }
            assert!(rest.is_empty());
        }
    });
}

#[test]
fn a_link_keeps_nothing_after_the_end_of_its_connection() {
    on_one_thread(|| async {
        let (ours, theirs) = ends(unix());
        theirs.connection.close();
        ours.connection.closed().await;
        while !ours.link.is_idle() {
            tokio::task::yield_now().await;
        }
        ours.link.broke();
        for _ in 0..1000 {
            ours.link.send(value(1000));
            ours.link.send_in_a_hurry(value(1000));
        }
        assert_eq!(ours.link.queued(), 0);
        assert!(!ours.link.flushed().await);
    });
}
