use wingbeat_core::{Amount, ProcessId, ResourceSet};

use super::*;
use crate::owner::dispatch::tests::{Said, grant, id, said, settle, task};
use crate::owner::dispatch::{Action, Grant, Task};

fn shape() -> Arc<Shape> {
    Arc::new(Shape { strategy: Strategy::Spread, ..Shape::of(ResourceSet::cpus(Amount::ONE)) })
}

fn submit(dispatch: &mut Dispatch, seqs: std::ops::Range<u64>) {
    for seq in seqs {
        dispatch.submit(Task { shape: shape(), ..task(seq) }, &mut Vec::new());
    }
}

/// An owner with so many tasks that are to be spread over as many nodes.
fn submitted(tasks: u64, nodes: u32) -> Dispatch {
    let mut dispatch = Dispatch::default();
    dispatch.nodes_are(nodes);
    submit(&mut dispatch, 0..tasks);
    dispatch
}

fn granted(dispatch: &mut Dispatch, lease: u64, now: u64) -> Said {
    let mut out: Vec<Action> = Vec::new();
    dispatch.granted(Grant { shape: shape(), ..grant(lease) }, now, &mut out);
    dispatch.settle(now, &mut out);
    said(out)
}

fn finish(dispatch: &mut Dispatch, lease: u64, seq: u64, now: u64) -> Said {
    let mut out = Vec::new();
    dispatch.finished(ProcessId(100 + lease), id(seq), None, 1_000, now, &mut out);
    dispatch.settle(now, &mut out);
    said(out)
}

#[test]
fn the_first_lease_takes_nothing_that_is_kept_for_those_to_come() {
    let mut dispatch = submitted(3, 3);
    assert_eq!(settle(&mut dispatch, 0).wanted, Some(3), "not a fourth, which would share a node");
    dispatch.starting(&shape(), 3, 3);
    for lease in 1..=3 {
        assert_eq!(granted(&mut dispatch, lease, lease).pushed[&lease], [lease - 1]);
        assert!(finish(&mut dispatch, lease, lease - 1, lease).pushed.is_empty());
    }
}

#[test]
fn what_is_more_than_is_kept_runs_meanwhile() {
    let mut dispatch = submitted(10, 2);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 10, 2);
    assert_eq!(granted(&mut dispatch, 1, 0).pushed[&1], [0]);
    let mut done = finish(&mut dispatch, 1, 0, 0).pushed[&1].clone();
    assert_eq!(done, [1, 2, 3, 4]);
    for seq in done.drain(..) {
        assert!(finish(&mut dispatch, 1, seq, 0).pushed.is_empty());
    }
    assert_eq!(granted(&mut dispatch, 2, 1).pushed[&2], [5, 6, 7, 8, 9]);
}

#[test]
fn until_the_head_has_answered_each_lease_gets_one_task() {
    let mut dispatch = submitted(1, 4);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 1, 1);
    granted(&mut dispatch, 1, 0);
    finish(&mut dispatch, 1, 0, 0);
    submit(&mut dispatch, 1..5);
    let said = settle(&mut dispatch, 0);
    assert_eq!((said.wanted, &said.pushed[&1]), (Some(4), &vec![1]));
    assert!(finish(&mut dispatch, 1, 1, 0).pushed.len() <= 1);
    // There is no room for more.
    dispatch.starting(&shape(), 4, 0);
    finish(&mut dispatch, 1, 2, 0);
    assert_eq!(settle(&mut dispatch, 0).pushed.len() + dispatch.leases.iter().next().unwrap().in_flight.len(), 2);
}

#[test]
fn tasks_that_come_one_by_one_go_round() {
    let mut dispatch = submitted(3, 3);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 3, 3);
    for lease in 1..=3 {
        granted(&mut dispatch, lease, 0);
        finish(&mut dispatch, lease, lease - 1, 0);
    }
    for seq in 3..9 {
        submit(&mut dispatch, seq..seq + 1);
        let lease = 1 + seq % 3;
        assert_eq!(settle(&mut dispatch, 0).pushed[&lease], [seq]);
        finish(&mut dispatch, lease, seq, 0);
    }
}

#[test]
fn what_is_kept_for_a_lease_that_does_not_come_goes_to_others_after_a_while() {
    let mut dispatch = submitted(2, 2);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 2, 2);
    assert_eq!(granted(&mut dispatch, 1, 10).pushed[&1], [0]);
    finish(&mut dispatch, 1, 0, 10);
    let mut now = 10;
    while now < 10 + KEEP_MS {
        let mut out = Vec::new();
        dispatch.tick(now, &mut out);
        let next = dispatch.next_tick(now).unwrap();
        assert!(out.is_empty(), "the lease that is there is kept for what waits");
        assert!(settle(&mut dispatch, now).pushed.is_empty());
        now += next;
    }
    assert_eq!(now, 10 + KEEP_MS);
    dispatch.tick(now, &mut Vec::new());
    assert_eq!(settle(&mut dispatch, now).pushed[&1], [1]);
}

#[test]
fn a_lease_that_comes_gets_a_task_however_much_is_kept_for_others() {
    // Three of five leases come, on nodes of which some are slow.
    let mut dispatch = submitted(5, 8);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 5, 5);
    for lease in 1..=3 {
        assert_eq!(granted(&mut dispatch, lease, lease).pushed[&lease], [lease - 1]);
        // Each answer tells of those that are yet to come.
        dispatch.starting(&shape(), 5, 5 - lease as u32);
    }
    let mut dispatch = submitted(4, 3);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 4, 3);
    assert_eq!(granted(&mut dispatch, 1, 1).pushed[&1], [0]);
}

#[test]
fn the_share_of_those_to_come_does_not_shrink_as_others_work() {
    let mut dispatch = submitted(100, 4);
    settle(&mut dispatch, 0);
    dispatch.starting(&shape(), 100, 4);
    let mut pushed = granted(&mut dispatch, 1, 0).pushed.remove(&1).unwrap();
    let mut run = 0;
    while let Some(seq) = pushed.pop() {
        run += 1;
        dispatch.starting(&shape(), 100 - run, 3);
        pushed.extend(finish(&mut dispatch, 1, seq, 0).pushed.into_values().flatten());
    }
    assert_eq!(run, 25);
}

#[test]
fn the_head_is_not_asked_again_for_each_task_that_is_done() {
    let mut dispatch = submitted(1_000, 4);
    let first = settle(&mut dispatch, 0).wanted.unwrap();
    dispatch.starting(&shape(), first, 4);
    let mut pushed = granted(&mut dispatch, 1, 0).pushed.remove(&1).unwrap();
    let mut asked = 0;
    while let Some(seq) = pushed.pop() {
        let said = finish(&mut dispatch, 1, seq, 0);
        asked += usize::from(said.wanted.is_some());
        pushed.extend(said.pushed.into_values().flatten());
    }
    assert!(asked < 20, "{asked}");
}
