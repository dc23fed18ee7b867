//! Bytes that nobody of Wingbeat's would send, at a listener, at a served connection and at every decoder. Nothing of it may
//! panic, hang or keep others from being served. `WINGBEAT_FUZZ_ROUNDS` makes it longer, and `WINGBEAT_FUZZ_SEED` repeats it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::{Bytes, BytesMut};
use common::answers_as_anybody;
use tarpc::context::Context;
use tarpc::{ClientMessage, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wingbeat_core::Buffer;
use wingbeat_core::codec::{self};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, Arg, MachineId, Outputs, Shape, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed, Refs, Stored};
use wingbeat_core::{ClusterId, FunctionId, LeaseId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::address::{self, Listener, Stream};
use wingbeat_net::handshake::{Hello, Token, Welcome};
use wingbeat_net::messages::{HeadMessage, NodeInfo, NodeMessage, PeerMessage, Registration, Work, WorkerCommand};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{
    HeadRequest, HeadResponse, NodeRequest, NodeResponse, Process, ProcessRequest, ProcessResponse, StandbyRequest,
    StandbyResponse,
};

fn rounds(usual: usize) -> usize {
    let factor = std::env::var("WINGBEAT_FUZZ_ROUNDS").ok().and_then(|text| text.parse::<usize>().ok());
    usual * factor.unwrap_or(1).max(1)
}

/// SplitMix64: the same numbers for the same seed, in every version of everything.
struct Random(u64);

impl Random {
    fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.any() % end.max(1) as u64) as usize
    }

    fn bytes(&mut self, most: usize) -> Vec<u8> {
        (0..self.below(most)).map(|_| self.any() as u8).collect()
    }
}

fn random() -> Random {
    let seed = std::env::var("WINGBEAT_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    println!("repeat with WINGBEAT_FUZZ_SEED={seed}");
    Random(seed)
}

/// Panics of tasks are caught by the runtime; here they count.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        usual(info);
    }));
}

#[derive(Clone)]
struct Polite;

impl Process for Polite {
    async fn deliver(self, _: Context, _: u64, _: u64, _: Vec<PeerMessage>) {}
    answers_as_anybody!();
}

fn somewhere() -> Address {
    let tcp = Some("10.0.0.1:6420".parse().unwrap());
    Address { process: ProcessId(1), machine: MachineId(1), unix: "wingbeat-1".into(), tcp, steward: None }
}

/// Messages as they are, in every form that there is.
fn honest() -> Vec<Bytes> {
    let task = TaskId { owner: ProcessId(1), seq: 1 };
    let id = ObjectId { task, index: 0 };
    let refs = Some(Box::new(Refs { ids: vec![id; 3], owners: vec![somewhere()] }));
    let value = Packed { bytes: Bytes::from_static(b"a value").into(), refs: refs.clone() };
    let spec = TaskSpec {
        id: task,
        function: FunctionId(1),
        name: Some("name".into()),
        args: vec![
            Arg::Value(value.clone()),
            Arg::Ref(id, somewhere()),
            Arg::Stored(id, Stored { size: 9, nodes: Vec::new(), refs }),
        ],
        outputs: Outputs::Stream { ahead: 3 },
        attempt: 0,
        remakes: false,
        yields_memory: false,
        shares_process: false,
        group: Some("group".into()),
        parent: Some(task),
    };
    let failed = ObjectValue::Failed(Box::new(Error::OwnerDied { object: id, owner: ProcessId(2) }));
    let peer = vec![
        Work::Tasks { lease: LeaseId(1), first: 0, tasks: vec![spec.into(); 2] }.into(),
        PeerMessage::Resolved(vec![(id, ObjectValue::Inline(value)), (id, failed)]),
        PeerMessage::Borrow(vec![(id, Registration(7)); 4]),
    ];
    let node = NodeInfo {
        id: NodeId(1),
        address: somewhere(),
        hostname: "host".into(),
        resources: Default::default(),
        devices: Vec::new(),
        labels: BTreeMap::from([("zone".into(), "a".into())]),
        store_bytes: 7,
    };
    let demand = HeadMessage::Demand { shape: Shape::default(), wanted: 3, name: "f".into() };
    let mut all = Vec::new();
    for (id, message) in [
        ProcessRequest::Deliver { contact: 0, number: 0, messages: peer },
        ProcessRequest::ExplainTask { task },
        ProcessRequest::ReadExecutable { offset: 3 },
        ProcessRequest::Commands { commands: vec![WorkerCommand::Drain, WorkerCommand::Exit] },
    ]
    .into_iter()
    .enumerate()
    {
        all.push(encoded(&request(id as u64, message)));
    }
    all.push(encoded(&request(9, HeadRequest::Deliver { number: 0, messages: vec![demand] })));
    all.push(encoded(&request(10, HeadRequest::JoinNode { node, running: Default::default() })));
    all.push(encoded(&request(11, NodeRequest::Deliver { messages: vec![NodeMessage::Stop("why".into())] })));
    let cancel: ClientMessage<ProcessRequest> =
        ClientMessage::Cancel { trace_context: Default::default(), request_id: 2 };
    all.push(encoded(&cancel));
    all.push(encoded(&Response { request_id: 1, message: Ok(ProcessResponse::Deliver(())) }));
    all
}

fn request<T>(id: u64, message: T) -> ClientMessage<T> {
    ClientMessage::Request(Request { context: mux::no_deadline(), id, message })
}

fn encoded<T: serde::Serialize>(message: &T) -> Bytes {
    let mut out = BytesMut::new();
    codec::encode_message(message, &mut out).unwrap();
    out.freeze()
}

/// Something like `message`, and sometimes nothing like it.
fn changed(random: &mut Random, message: &[u8]) -> Vec<u8> {
    let mut bytes = message.to_vec();
    for _ in 0..random.below(6) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 => bytes.truncate(at),
            2 => {
                let extremes: [&[u8]; 3] = [&[0; 8], &[255; 8], &[255, 255, 255, 127, 0, 0, 0, 0]];
                let extreme = extremes[random.below(3)];
                let end = (at + extreme.len()).min(bytes.len());
                bytes[at..end].copy_from_slice(&extreme[..end - at]);
            }
            3 => bytes.extend(random.bytes(40)),
            4 => {
                let from = random.below(message.len());
                let piece = &message[from..(from + 12).min(message.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => bytes = random.bytes(200),
        }
    }
    bytes
}

#[test]
fn no_decoder_panics_whatever_it_is_given() {
    let mut random = random();
    let honest = honest();
    for _ in 0..rounds(20_000) {
        let message = &honest[random.below(honest.len())];
        let bytes = Bytes::from(changed(&mut random, message));
        // Deadlines are limited by the connection, before they are decoded; these are whole otherwise.
        let limited = |bytes: &Bytes| {
            let mut bytes = bytes.to_vec();
            if let Some(seconds) = bytes.get_mut(8..16) {
                seconds.copy_from_slice(&60u64.to_le_bytes());
            }
            Bytes::from(bytes)
        };
        let _ = codec::decode_message::<ClientMessage<ProcessRequest>>(limited(&bytes));
        let _ = codec::decode_message::<ClientMessage<HeadRequest>>(limited(&bytes));
        let _ = codec::decode_message::<ClientMessage<NodeRequest>>(limited(&bytes));
        let _ = codec::decode_message::<ClientMessage<StandbyRequest>>(limited(&bytes));
        let _ = codec::decode_message::<Response<ProcessResponse>>(bytes.clone());
        let _ = codec::decode_message::<Response<HeadResponse>>(bytes.clone());
        let _ = codec::decode_message::<Response<NodeResponse>>(bytes.clone());
        let _ = codec::decode_message::<Response<StandbyResponse>>(bytes.clone());
        let _ = codec::decode_message::<Hello>(bytes.clone());
        let _ = codec::decode_message::<Welcome>(bytes.clone());
        let _ = codec::decode_value::<Vec<String>>(&bytes);
        let _ = codec::decode_value::<BTreeMap<String, Vec<(u32, Option<String>)>>>(&bytes);
        let _ = codec::decode_value::<BTreeMap<u8, (Buffer<f32>, Bytes)>>(&bytes);
        let _ = codec::decode_value_in_place::<Vec<Buffer<u64>>>(&bytes, &|| bytes.clone());
        let _ = codec::decode_plain::<f64>(&bytes);
    }
}

#[tokio::test]
async fn a_served_connection_ends_or_goes_on_and_never_panics() {
    count_panics();
    let mut random = random();
    let honest = honest();
    for _ in 0..rounds(400) {
        let (here, mut there) = UnixStream::pair().unwrap();
        let (connection, client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, ProcessRequest, ProcessResponse>(
                Stream::Unix(here),
                Waiting::Asleep,
            );
        drop(client);
        let serving = tokio::spawn(mux::serve(server, Polite.serve()));
        let mut sent = Vec::new();
        for _ in 0..1 + random.below(20) {
            let message = &honest[random.below(honest.len())];
            let body = changed(&mut random, message);
            let len = match random.below(20) {
                0 => random.any() as u32,
                _ => body.len() as u32 + 1,
            };
            sent.extend_from_slice(&len.to_le_bytes());
            sent.push(if random.below(10) > 0 { 0 } else { random.any() as u8 });
            sent.extend_from_slice(&body);
        }
        // A deadline that no clock can hold, among others.
        if random.below(3) == 0 {
            let mut body = honest[1].to_vec();
            body[8..16].copy_from_slice(&(u64::MAX - random.any() / 2).to_le_bytes());
            let mut first = (body.len() as u32 + 1).to_le_bytes().to_vec();
            first.push(0);
            first.extend_from_slice(&body);
            first.extend_from_slice(&sent);
            sent = first;
        }
        // It may have been closed in the middle.
        let _ = there.write_all(&sent).await;
        let _ = there.shutdown().await;
        let _ = there.read_to_end(&mut Vec::new()).await;
        connection.closed().await;
        serving.await.unwrap();
    }
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_listener_serves_others_after_every_introduction_that_is_none() {
    let mut random = random();
    let listener = Listener::bind(ProcessId::random(), None).await.unwrap();
    let here = listener.address().clone();
    let cluster = ClusterId::random();
    let token = Token::new("secret");
    tokio::spawn(listener.serve(
        token.clone(),
        Welcome { address: here.clone(), cluster, epoch: None, patience: None, stands_by: None },
        |_, _| {},
    ));
    for _ in 0..rounds(300) {
        use std::os::linux::net::SocketAddrExt;
        let name = std::os::unix::net::SocketAddr::from_abstract_name(&here.unix).unwrap();
        let stream = std::os::unix::net::UnixStream::connect_addr(&name).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut stream = UnixStream::from_std(stream).unwrap();
        let mut greeting = [0; 60];
        stream.read_exact(&mut greeting).await.unwrap();
        let mut introduction = greeting[..28].to_vec();
        introduction.extend(random.bytes(300));
        let bytes = changed(&mut random, &introduction);
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.len() < 1024, "a stranger was told {} bytes", answer.len());
    }
    address::dial(&here, "the listener", &token, Hello::of_tool()).await.unwrap();
}
