//! A node whose first connections break.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use wingbeat_core::ProcessId;
use wingbeat_core::value::{ObjectValue, Stored};
use wingbeat_net::address::Listener;
use wingbeat_net::handshake::Welcome;
use wingbeat_net::services::Node as _;

use super::*;
use crate::owner::object::Handle;
use crate::wire::pretended_node::PretendedNode;
use crate::wire::process::tests::start;

/// A node that listens. Its first connections end before anything is taken in.
fn listening(process: &Process, breaking: usize) -> (PretendedNode, StoreNode) {
    let node = PretendedNode::new(process);
    let (serving, token, cluster) = (node.clone(), process.wire.who.token.clone(), process.cluster());
    let binding = process.io().spawn(async move {
        let listener = Listener::bind(ProcessId::random(), None).await.unwrap();
        let address = listener.address().clone();
        let welcome = Welcome { address: address.clone(), cluster, epoch: None, patience: None, stands_by: None };
        let connections = Arc::new(AtomicUsize::new(0));
        tokio::spawn(listener.serve(token, welcome, move |stream, _| {
            if connections.fetch_add(1, Ordering::Relaxed) < breaking {
                return drop(stream);
            }
            let serving = serving.clone();
            tokio::spawn(async move {
                let (connection, _, server) =
                    mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
                mux::serve(server, serving.serve()).await;
                connection.closed().await;
            });
        }));
        address
    });
    let address = process.io().block_on(binding).unwrap();
    (node, StoreNode { node: NodeId(3), address })
}

fn stored_at(at: &StoreNode) -> ObjectValue {
    ObjectValue::Stored(Stored { size: 1, nodes: vec![at.clone()], refs: None })
}

#[test]
fn what_a_broken_connection_did_not_carry_is_deleted_over_the_next() {
    let session = start();
    let process = session.process().clone();
    let (node, at) = listening(&process, 2);
    let task = process.owner.next_task();
    for index in 0..10_000 {
        process.delete_at(&at, task.output(index));
    }
    node.wait_for(|told| told.deleted.len() == 10_000);
    process.shut_down("the test is over");
}

#[test]
fn what_was_made_again_while_its_deletion_waited_is_not_deleted() {
    let session = start();
    let process = session.process().clone();
    let (node, at) = listening(&process, 1);
    let task = process.owner.next_task();
    let needed = process.owner.new_object(task.output(0), None);
    process.owner.resolve_object(needed.object(), stored_at(&at), Vec::new());
    process.delete_at(&at, task.output(0));
    process.delete_at(&at, task.output(1));
    node.wait_for(|told| !told.deleted.is_empty());
    assert_eq!(node.told().deleted, BTreeSet::from([1]));
    drop(needed);
    node.wait_for(|told| told.deleted.len() == 2);
    process.shut_down("the test is over");
}

#[test]
fn a_node_that_is_gone_is_not_dialled() {
    let session = start();
    let process = session.process().clone();
    let (_, at) = listening(&process, usize::MAX);
    let task = process.owner.next_task();
    process.delete_at(&at, task.output(0));
    process.wire.deletions.forget(at.node);
    process.delete_at(&at, task.output(1));
    assert!(process.wire.deletions.nodes.is_empty());
    process.shut_down("the test is over");
}

#[test]
fn what_attempts_left_is_deleted_when_the_value_is_elsewhere_or_nobody_needs_it() {
    let session = start();
    let process = session.process().clone();
    let (node, at) = listening(&process, 0);
    let elsewhere = StoreNode { node: NodeId(4), ..at.clone() };
    let task = process.owner.next_task();
    let handle = |index| process.owner.new_object(task.output(index), None);
    let resolve = |handle: &Handle, value| process.owner.resolve_object(handle.object(), value, Vec::new());

    let (moved, same, late, dropped) = (handle(0), handle(1), handle(2), handle(3));
    resolve(&late, stored_at(&elsewhere));
    for index in 0..4 {
        process.owner.left_over(task.output(index), &at);
    }
    // Nobody holds a ref.
    process.owner.left_over(task.output(4), &at);
    resolve(&moved, stored_at(&elsewhere));
    resolve(&same, stored_at(&at));
    drop(dropped);
    node.wait_for(|told| told.deleted.len() >= 4);
    assert_eq!(node.told().deleted, BTreeSet::from([0, 2, 3, 4]));
    assert!(process.owner.has_no_leftovers());
    process.shut_down("the test is over");
}
