//! A node for tests of this crate: it lends real memory, and remembers what it was told.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tarpc::context::Context;
use tokio::sync::Semaphore;
use wingbeat_core::codec::Payload;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::value::StoreNode;
use wingbeat_core::{JobId, NodeId, ObjectId, ProcessId};
use wingbeat_net::address::Stream;
use wingbeat_net::messages::{
    Ballot, Fetch, Leadership, Located, NodeMessage, Place, ProcessStacks, Support, Vote, WorkerStart,
};
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{Node, NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};
use wingbeat_store::{Arena, Mapping};

use crate::wire::node_link::NodeLink;
use crate::wire::process::Process;

#[derive(Clone)]
pub(crate) struct PretendedNode(Arc<Shared>);

struct Shared {
    arena: Arena,
    /// Its address is of nobody.
    at: StoreNode,
    told: Mutex<Told>,
    /// So many questions are answered.
    answers: Semaphore,
}

/// What it was told and asked.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) deleted: BTreeSet<u32>,
    pub(crate) unpinned: Vec<ObjectId>,
    pub(crate) fetched: Vec<ObjectId>,
}

impl PretendedNode {
    pub(crate) fn new(process: &Process) -> PretendedNode {
        let address = Address { process: ProcessId::random(), steward: None, ..process.address().clone() };
        PretendedNode(Arc::new(Shared {
            arena: Arena::create(1 << 20).unwrap(),
            at: StoreNode { node: NodeId(3), address },
            told: Mutex::default(),
            answers: Semaphore::new(0),
        }))
    }

    /// Makes it the node of a process. Answers with the socket over which it has lent its memory.
    pub(crate) fn attach(&self, process: &Process) -> UnixStream {
        let (node, joining) = (self.clone(), process.clone());
        let attaching = process.io().spawn(async move {
            let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
            let (connection, client, _) = mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(
                Stream::Unix(ours),
                Waiting::Asleep,
            );
            let (_, _, server) = mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(
                Stream::Unix(theirs),
                Waiting::Asleep,
            );
            tokio::spawn(mux::serve(server, node.clone().serve()));
            let (lease, lent) = UnixStream::pair().unwrap();
            let arena = &node.0.arena;
            let fd = arena.fd().try_clone_to_owned().unwrap();
            let mapping = Mapping::open_leased(fd, arena.capacity(), lease.into()).unwrap();
            let client = NodeClient::new(mux::client_config(), client).spawn();
            let StoreNode { node, address } = node.0.at.clone();
            joining.set_storage(NodeLink::start(node, address, client, mapping, connection));
            lent
        });
        process.io().block_on(attaching).unwrap()
    }

    /// It answers one more question about an object, which may have been asked already.
    pub(crate) fn answers(&self) {
        self.0.answers.add_permits(1);
    }

    pub(crate) fn told(&self) -> MutexGuard<'_, Told> {
        self.0.told.lock()
    }

    /// Waits until it was told what is `wanted`.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&Told) -> bool) {
        let begun = Instant::now();
        while !wanted(&self.told()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "the node was not told what it should be");
            std::thread::yield_now();
        }
    }

    async fn answer(&self) {
        self.0.answers.acquire().await.unwrap().forget();
    }
}

impl Node for PretendedNode {
    async fn deliver(self, _: Context, messages: Vec<NodeMessage>) {
        let mut told = self.0.told.lock();
        for message in messages {
            match message {
                NodeMessage::Delete(ids) => told.deleted.extend(ids.iter().map(|id| id.index)),
                NodeMessage::Unpin(ids) => told.unpinned.extend(ids),
                _ => {}
            }
        }
    }

    async fn fetch(self, _: Context, what: Fetch) -> Result<(Located, bool), Error> {
        self.0.told.lock().fetched.push(what.object);
        self.answer().await;
        Ok((Located { offset: 0, len: what.stored.size }, false))
    }

    /// Another attempt has made each object, of 7 bytes.
    async fn create(self, _: Context, _: ObjectId, _: u64, _: bool, _: Option<Box<Address>>) -> Result<Place, Error> {
        Ok(Place::Taken { len: 7 })
    }

    async fn seal(self, _: Context, _: ObjectId) -> Result<(), Error> {
        panic!("nothing is written here")
    }

    async fn orders(self, _: Context, _: u64, _: Vec<NodeMessage>) {}

    async fn register_worker(self, _: Context, _: Address, _: u32) -> Result<WorkerStart, Error> {
        Err(Error::NoSession)
    }

    async fn stacks(self, _: Context, _: ProcessId) -> Result<ProcessStacks, Error> {
        panic!("nobody asks for threads")
    }

    async fn process_above(self, _: Context, _: u32) -> Option<ProcessId> {
        None
    }

    async fn settle_output(self, _: Context, _: JobId) -> bool {
        true
    }

    async fn read_kept(self, _: Context, _: Option<Payload>) -> Vec<(Payload, Payload)> {
        Vec::new()
    }

    async fn support(self, _: Context, _: Leadership) -> Support {
        panic!("no head asks")
    }

    async fn elect(self, _: Context, _: Ballot) -> Vote {
        panic!("no standby asks")
    }
}
