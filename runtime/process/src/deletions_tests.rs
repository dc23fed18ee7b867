//! A node whose first connections break.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tarpc::context::Context;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, ProcessId};
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::Welcome;
use wingbeat_net::messages::{Fetch, Located, WorkerStart};
use wingbeat_net::services::Node;

use super::*;
use crate::process::tests::start;

/// A node that is told what to delete.
#[derive(Clone, Default)]
struct Deleting(Arc<Mutex<BTreeSet<u32>>>);

impl Node for Deleting {
    async fn deliver(self, _: Context, messages: Vec<NodeMessage>) {
        for message in messages {
            let NodeMessage::Delete(ids) = message else { continue };
            self.0.lock().extend(ids.iter().map(|id| id.index));
        }
    }
    async fn register_worker(self, _: Context, _: Address, _: u32) -> Result<WorkerStart, Error> {
        Err(Error::NoSession)
    }
    async fn create(self, _: Context, _: ObjectId, _: u64, _: bool) -> Result<Option<Located>, Error> {
        Err(Error::NoSession)
    }
    async fn seal(self, _: Context, _: ObjectId) -> Result<(), Error> {
        Err(Error::NoSession)
    }
    async fn settle_output(self, _: Context, _: JobId) {}
    async fn fetch(self, _: Context, _: Fetch) -> Result<(Located, bool), Error> {
        Err(Error::NoSession)
    }
}

#[test]
fn what_a_broken_connection_did_not_carry_is_deleted_over_the_next() {
    let session = start();
    let process = session.process().clone();
    let node = Deleting::default();
    let (deleting, token, cluster) = (node.clone(), process.token.clone(), process.cluster());
    let binding = process.io().spawn(async move {
        let listener = Listener::bind(ProcessId::random(), None).await.unwrap();
        let address = listener.address().clone();
        let welcome = Welcome { address: address.clone(), cluster };
        let connections = Arc::new(AtomicUsize::new(0));
        tokio::spawn(listener.serve(token, welcome, move |stream, _| {
            if connections.fetch_add(1, Ordering::Relaxed) < 2 {
                // It ends before anything is taken in.
                return drop(stream);
            }
            let deleting = deleting.clone();
            tokio::spawn(async move {
                let (connection, _, server) =
                    mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
                mux::serve(server, deleting.serve()).await;
                connection.closed().await;
            });
        }));
        address
    });
    let address = session.block_on(binding).unwrap();
    let at = StoreNode { node: NodeId(3), address };
    let task = process.next_task();
    for index in 0..10_000 {
        process.delete_at(&at, task.output(index));
    }
    let begun = Instant::now();
    while node.0.lock().len() < 10_000 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} of 10,000 were deleted", node.0.lock().len());
        std::thread::yield_now();
    }
    process.shut_down("the test is over");
}
