//! Two processes whose connections break.

use std::time::Duration;

use wingbeat_core::ClusterId;
use wingbeat_core::error::Error;
use wingbeat_net::handshake::Token;
use wingbeat_net::transport::memory::{Disturbance, Network};

use crate::owner::object::Handle;
use crate::session::session::Session;
use crate::wire::process::tests::start_with;

/// Only something that hangs takes so long.
const LIMIT: Duration = Duration::from_secs(60);

/// An owner, and a process that knows where it is.
fn two() -> (Session, Session) {
    two_over(None)
}

fn two_over(network: Option<Network>) -> (Session, Session) {
    let (token, cluster) = (Token::random(), ClusterId::random());
    let [owner, borrower] = [(); 2].map(|()| start_with(token.clone(), cluster, network.clone()));
    borrower.process().know(owner.process().address());
    (owner, borrower)
}

/// Values of one process are read by the other, and freed.
fn some_are_read(owner: &Session, borrower: &Session, count: u64, mut between: impl FnMut(u64)) {
    let own: Vec<Handle> = (0..count).map(|number| owner.put(&number).unwrap()).collect();
    let ids: Vec<_> = own.iter().map(Handle::id).collect();
    for (at, handle) in borrower.owner().borrow_all(&ids).iter().enumerate() {
        between(at as u64);
        value(borrower, handle).unwrap();
    }
    drop(own);
    let begun = std::time::Instant::now();
    while owner.process().live_objects() > 0 || borrower.process().live_objects() > 0 {
        assert!(begun.elapsed() < LIMIT, "something is kept");
        std::thread::yield_now();
    }
}

#[test]
fn a_network_that_is_cut_at_any_byte_costs_no_value_and_frees_all() {
    let network = Network::new();
    let (owner, borrower) = two_over(Some(network.clone()));
    for bytes in (0..6_000).step_by(25) {
        network.cut_after(bytes);
        some_are_read(&owner, &borrower, 20, |_| {});
    }
    end([&owner, &borrower]);
    network.close();
}

#[test]
fn a_slow_network_that_is_cut_again_and_again_costs_no_value_and_frees_all() {
    let network = Network::new();
    let (owner, borrower) = two_over(Some(network.clone()));
    network.delay(Duration::from_millis(3));
    for _ in 0..5 {
        some_are_read(&owner, &borrower, 20, |at| {
            if at % 4 == 0 {
                network.cut();
            }
        });
    }
    end([&owner, &borrower]);
    network.close();
}

#[test]
fn a_network_that_reorders_loses_and_cuts_by_a_seed_costs_no_value_and_frees_all() {
    for seed in 0..10 {
        let network = Network::new();
        let (token, cluster) = (Token::random(), ClusterId::random());
        let sessions = [(); 3].map(|()| start_with(token.clone(), cluster, Some(network.clone())));
        for (one, other) in [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)] {
            sessions[other].process().know(sessions[one].process().address());
        }
        let (late, lost_for) = (Duration::from_millis(2), Duration::from_millis(20));
        network.disturb(Disturbance { seed, late, cuts: 0.02, loses: 0.01, lost_for });
        for (one, other) in [(0, 1), (1, 2), (2, 0), (1, 0)] {
            some_are_read(&sessions[one], &sessions[other], 20, |_| {});
        }
        end([&sessions[0], &sessions[1]]);
        end([&sessions[2], &sessions[2]]);
        network.close();
    }
}

#[test]
fn what_is_asked_while_nothing_arrives_is_answered_when_all_goes_on() {
    let network = Network::new();
    let (owner, borrower) = two_over(Some(network.clone()));
    some_are_read(&owner, &borrower, 1, |_| {});
    network.hold(true);
    let own = owner.put(&1).unwrap();
    let borrowed = borrower.owner().borrow(own.id());
    assert!(!borrowed.is_ready(), "nothing arrives");
    // What was said is lost, and nobody is connected.
    network.cut();
    network.hold(false);
    value(&borrower, &borrowed).unwrap();
    drop((own, borrowed));
    some_are_read(&owner, &borrower, 1, |_| {});
    end([&owner, &borrower]);
    network.close();
}

fn value(session: &Session, borrowed: &Handle) -> Result<(), Error> {
    let waiting = session.value(borrowed);
    let waited = session.process().io().spawn(async move { tokio::time::timeout(LIMIT, waiting).await });
    session.block_on(waited).unwrap().expect("it waits for ever").map(drop)
}

fn end(sessions: [&Session; 2]) {
    for session in sessions {
        session.process().shut_down("the test is over");
    }
}

#[test]
fn connections_that_break_again_and_again_lose_nothing_and_free_nothing_too_early() {
    let (owner, borrower) = two();
    for round in 0..100 {
        let own: Vec<Handle> = (0..50).map(|number| owner.put(&(round * 50 + number)).unwrap()).collect();
        let ids: Vec<_> = own.iter().map(Handle::id).collect();
        let borrowed = borrower.owner().borrow_all(&ids);
        for (at, handle) in borrowed.iter().enumerate() {
            match at % 10 {
                0 => owner.process().wire.peers.close(),
                5 => borrower.process().wire.peers.close(),
                _ => {}
            }
            value(&borrower, handle).unwrap();
        }
        // From now on they live because they are borrowed.
        drop(own);
    }
    while owner.process().live_objects() > 0 || borrower.process().live_objects() > 0 {
        std::thread::yield_now();
    }
    end([&owner, &borrower]);
}

fn a_loss_that_one_side_notices(is_taken_for_gone: bool) {
    let (owner, borrower) = two();
    let first = owner.put(&1).unwrap();
    let borrowed = borrower.owner().borrow(first.id());
    value(&borrower, &borrowed).unwrap();
    let never = owner.owner().new_object(owner.owner().next_task().output(0), None);
    let awaited = borrower.owner().borrow(never.id());
    let waiting = std::thread::spawn({
        let (borrower, awaited) = (borrower.clone(), awaited.clone());
        move || value(&borrower, &awaited)
    });
    let (process, peer) = (owner.process().clone(), borrower.process().id());
    if is_taken_for_gone {
        process.wire.peers.certainly_gone(peer);
    }
    process.contact_lost(peer, 0);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::ContactLost { .. }), "{error}");
    // More than a link has on its way at a time.
    for number in 0..200 {
        let own = owner.put(&number).unwrap();
        value(&borrower, &borrower.owner().borrow(own.id())).unwrap();
    }
    drop((first, borrowed, awaited, never));
    for session in [&owner, &borrower] {
        let process = session.process().clone();
        let flushed = process.io().clone().spawn(async move {
            tokio::time::timeout(LIMIT, process.wire.peers.flushed()).await.expect("what was said is not answered");
        });
        session.block_on(flushed).unwrap();
    }
    while owner.process().live_objects() > 0 || borrower.process().live_objects() > 0 {
        std::thread::yield_now();
    }
    end([&owner, &borrower]);
}

#[test]
fn who_hears_of_a_loss_is_in_the_contact_after_it_and_notices_the_end_of_the_other() {
    let (owner, borrower) = two();
    let owned = owner.put(&1).unwrap();
    let borrowed = borrower.owner().borrow(owned.id());
    value(&borrower, &borrowed).unwrap();
    let (process, peer) = (owner.process().clone(), borrower.process().id());
    borrower.process().contact_lost(process.id(), 0);
    // It looks for who broke the connection, and hears so.
    let is_next = || {
        process
            .wire
            .peers
            .contacts
            .get(&peer)
            .is_some_and(|contact| contact.numbers.contact == 1 && contact.link.is_some())
    };
    let begun = std::time::Instant::now();
    while !is_next() {
        assert!(begun.elapsed() < LIMIT, "it is in no contact");
        std::thread::yield_now();
    }
    drop(borrowed);
    borrower.process().shut_down("the test is over");
    while process.wire.peers.has_contact(peer) {
        assert!(begun.elapsed() < LIMIT, "it does not notice that the other has ended");
        std::thread::yield_now();
    }
    end([&owner, &borrower]);
}

#[test]
fn an_address_that_cannot_be_dialled_is_no_loss_for_one_that_dials_itself() {
    let (owner, borrower) = two();
    let mut nowhere = borrower.process().address().clone();
    nowhere.unix = "wingbeat-nobody-listens-here".into();
    let (process, peer) = (owner.process().clone(), borrower.process().id());
    process.know(&nowhere);
    // It is said to nobody, and that is noticed.
    process.send_to(peer, wingbeat_net::messages::PeerMessage::Borrow(Vec::new()));
    while !process.wire.peers.is_gone(peer) {
        std::thread::yield_now();
    }
    let owned = owner.put(&1).unwrap();
    let borrowed = borrower.owner().borrow(owned.id());
    value(&borrower, &borrowed).unwrap();
    assert_eq!(borrower.process().wire.peers.link_or_new(owner.process().id()).1, 0, "its first words were lost");
    drop((owned, borrowed));
    end([&owner, &borrower]);
}

#[test]
fn who_has_not_noticed_that_a_contact_was_lost_learns_of_it_and_the_next_one_works() {
    a_loss_that_one_side_notices(false);
}

#[test]
fn who_was_taken_for_gone_learns_of_it_and_the_next_contact_works() {
    a_loss_that_one_side_notices(true);
}
