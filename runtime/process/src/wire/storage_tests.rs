//! What a process asks of its node, and what it holds there.

use std::io::Read;
use std::os::unix::net::UnixStream;

use wingbeat_core::ProcessId;
use wingbeat_core::TaskId;
use wingbeat_core::codec;
use wingbeat_core::spec::Arg;

use super::*;
use crate::wire::pretended_node::PretendedNode;
use crate::wire::process::tests::start;

fn object() -> ObjectId {
    TaskId { owner: ProcessId(9), seq: 1 }.output(0)
}

fn stored() -> Stored {
    Stored { size: 8, nodes: Vec::new(), refs: None }
}

/// Whether nothing in the process can touch the memory any more.
fn is_given_back(lent: &UnixStream) -> bool {
    lent.set_nonblocking(true).unwrap();
    matches!((&mut &*lent).read(&mut [0]), Ok(0))
}

#[test]
fn memory_that_is_read_after_the_session_is_given_back_with_the_last_view() {
    let session = start();
    let process = session.process();
    let node = PretendedNode::new(process);
    let lent = node.attach(process);
    node.answers();
    let reading = process.clone();
    let bits = session.block_on(async move { reading.fetch_to_the_end(object(), stored()).await }).unwrap();
    let Bits::Shared(pinned) = bits else { panic!("it was not read in place") };
    let bytes = pinned.into_bytes();
    process.shut_down("the test is over");
    assert!(process.storage().is_none());
    assert!(!is_given_back(&lent));
    let part = bytes.slice(4..);
    drop(bytes);
    assert_eq!(part, [0; 4][..]);
    assert!(!is_given_back(&lent));
    drop(part);
    assert!(is_given_back(&lent));
}

#[test]
fn without_views_memory_is_given_back_with_the_session() {
    let session = start();
    let process = session.process();
    let lent = PretendedNode::new(process).attach(process);
    assert!(!is_given_back(&lent));
    process.shut_down("the test is over");
    assert!(is_given_back(&lent));
}

#[test]
fn an_argument_whose_call_is_cancelled_while_it_is_fetched_is_unpinned() {
    let session = start();
    let process = session.process();
    let node = PretendedNode::new(process);
    let _lent = node.attach(process);
    let args = [Arg::Stored(object(), stored())];
    let mut bringing = Box::pin(session.bring_in(&args, false));
    let polled = session.block_on(async { futures::poll!(&mut bringing) });
    assert!(polled.is_pending());
    node.wait_for(|told| told.fetched == [object()]);
    drop(bringing);
    node.answers();
    node.wait_for(|told| told.unpinned == [object()]);
    process.shut_down("the test is over");
}

#[test]
fn what_an_earlier_attempt_has_left_is_described_as_it_is() {
    let session = start();
    let process = session.process();
    let node = PretendedNode::new(process);
    let _lent = node.attach(process);
    let stored = process.store(object(), &codec::encode_value(&5u64).unwrap(), false).unwrap();
    assert_eq!(stored.size, 7);
    process.shut_down("the test is over");
}
