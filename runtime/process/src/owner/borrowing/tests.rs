//! What waits for what, message by message.

use wingbeat_core::TaskId;

use super::explored::Message;
use super::*;

pub(super) type Pid = u64;

pub(super) fn process(pid: Pid) -> ProcessId {
    ProcessId(pid)
}

pub(super) fn object(owner: Pid, seq: u64) -> ObjectId {
    TaskId { owner: process(owner), seq }.output(0)
}

#[test]
fn an_owner_that_stands_still_delays_only_what_is_about_its_objects() {
    let (still, lively, receiver) = (process(1), process(2), process(3));
    let mut borrowing = Borrowing::<&str>::default();
    let (a, b) = (object(1, 1), object(2, 1));
    let first = borrowing.register(a);
    let second = borrowing.register(b);
    borrowing.take_unsent();
    assert_eq!(borrowing.confirm(receiver, [&a], "about a"), None);
    assert_eq!(borrowing.confirm(receiver, [&b], "about b"), None);
    assert_eq!(borrowing.confirm(receiver, [], "about nothing"), Some("about nothing"));
    assert_eq!(
        borrowing.confirm(still, [&a], "to the owner, after the registration"),
        Some("to the owner, after the registration")
    );
    let mut ready = Vec::new();
    borrowing.acknowledged(lively, second, &mut ready);
    assert_eq!(ready, [Ready::Message("about b")]);
    ready.clear();
    borrowing.release(b, second, [], &mut ready);
    assert_eq!(ready, [Ready::Release(b, second)]);
    ready.clear();
    // Whoever comes second waits as well.
    assert_eq!(borrowing.confirm(receiver, [&a], "about a again"), None);
    borrowing.acknowledged(still, first, &mut ready);
    assert_eq!(ready.len(), 2);
    assert!(borrowing.is_idle());
}

#[test]
fn what_waits_for_an_owner_that_is_gone_goes_on_and_nothing_of_it_is_kept() {
    let mut borrowing = Borrowing::<&str>::default();
    let a = object(1, 1);
    borrowing.register(a);
    borrowing.take_unsent();
    assert_eq!(borrowing.confirm(process(3), [&a], "about a"), None);
    let mut ready = Vec::new();
    assert_eq!(borrowing.gone(process(1), &mut ready), [a]);
    assert_eq!(ready, [Ready::Message("about a")]);
    assert!(borrowing.is_idle() && borrowing.owners.is_empty());
}

/// Its steward may answer for its objects, and must know of this process before whoever gave the ref lets go of it.
#[test]
fn what_concerns_an_owner_with_whom_contact_was_lost_waits_until_it_is_known_who_answers_for_it() {
    let mut borrowing = Borrowing::<&str>::default();
    let (owner, holder) = (process(1), process(2));
    let (a, outer, b) = (object(1, 1), object(2, 1), object(1, 2));
    let [_, of_outer, of_b] = [a, outer, b].map(|id| borrowing.register(id));
    borrowing.take_unsent();
    borrowing.acknowledged(holder, of_outer, &mut Vec::new());
    let mut ready = Vec::new();
    assert_eq!(borrowing.lost(owner, &mut ready), [a, b]);
    borrowing.release(outer, of_outer, [&a], &mut ready);
    assert_eq!(borrowing.confirm(process(3), [&b], "about b"), None);
    assert!(ready.is_empty(), "{ready:?}");
    borrowing.release(b, of_b, [], &mut ready);
    assert_eq!(ready, [Ready::Release(b, of_b), Ready::Message("about b")], "this process relies on it no more");
    ready.clear();
    // Contact was lost once more before that.
    borrowing.lost(owner, &mut ready);
    borrowing.settled(owner, &mut ready);
    assert!(ready.is_empty());
    borrowing.settled(owner, &mut ready);
    assert_eq!(ready, [Ready::Release(outer, of_outer)]);
    assert!(borrowing.is_idle() && borrowing.unsettled.is_empty());
}

#[test]
fn a_release_ends_the_registration_that_it_names_and_no_later_one() {
    let mut borrowers = Borrowers::default();
    borrowers.borrow(process(1), Registration(1));
    borrowers.borrow(process(1), Registration(2));
    assert!(!borrowers.release(process(1), Registration(1)));
    assert!(!borrowers.is_empty());
    assert!(borrowers.release(process(1), Registration(2)));
    assert!(borrowers.is_empty());
}

#[test]
fn many_nested_objects_are_released_without_deep_recursion() {
    let mut borrowing = Borrowing::<()>::default();
    // Each in the value of the one before, and all of them with different owners: every release waits for the next.
    let objects: Vec<(ObjectId, Registration)> = (1..=100_000)
        .map(|owner| {
            let id = object(owner, 1);
            (id, borrowing.register(id))
        })
        .collect();
    borrowing.take_unsent();
    let mut ready = Vec::new();
    for pair in objects.windows(2) {
        borrowing.release(pair[0].0, pair[0].1, [&pair[1].0], &mut ready);
    }
    assert!(ready.is_empty());
    let (last, number) = objects[objects.len() - 1];
    borrowing.release(last, number, [], &mut ready);
    assert_eq!(ready.len(), objects.len());
    assert!(borrowing.is_idle() && borrowing.owners.is_empty());
}

#[test]
fn what_waited_for_a_ref_that_is_held_no_more_waits_for_the_refs_in_its_value() {
    let (outer, middle, inner) = (object(1, 1), object(2, 1), object(2, 2));
    let mut borrowing = Borrowing::<Message>::default();
    let mut ready = Vec::new();
    let registered = |borrowing: &mut Borrowing<Message>, id: ObjectId| {
        let number = borrowing.register(id);
        borrowing.take_unsent();
        borrowing.ask(id.owner());
        number
    };
    let first = registered(&mut borrowing, outer);
    borrowing.acknowledged(process(1), first, &mut ready);
    let second = registered(&mut borrowing, middle);
    // Its value came before that was acknowledged: from a steward, which was asked first.
    let third = registered(&mut borrowing, inner);
    borrowing.release(outer, first, &[middle], &mut ready);
    assert_eq!(ready, []);
    borrowing.release(middle, second, &[inner], &mut ready);
    assert_eq!(ready, [Ready::Release(middle, second)], "it is behind the others on its link");
    ready.clear();
    borrowing.acknowledged(process(2), second, &mut ready);
    assert_eq!(ready, [], "the value of the outer one may be all that keeps the inner one");
    borrowing.acknowledged(process(2), third, &mut ready);
    assert_eq!(ready, [Ready::Release(outer, first)]);
}
