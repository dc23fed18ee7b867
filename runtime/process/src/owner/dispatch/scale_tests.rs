//! What a task costs its owner, by how many leases that has.

use std::time::Instant;

use super::*;
use crate::owner::dispatch::tests::{grant, task};

/// What an owner does when a worker process says something: results are taken in, decisions follow, and time passes.
fn hears(dispatch: &mut Dispatch, lease: u64, results: &[TaskId], now: u64, out: &mut Vec<Action>) {
    for id in results {
        dispatch.finished(ProcessId(100 + lease), *id, None, 1_000, now, out);
    }
    dispatch.settle(now, out);
    dispatch.tick(now, out);
    dispatch.settle(now, out);
}

/// An owner with so many leases, of which each has run a task.
fn with_leases(leases: u64, now: u64) -> Dispatch {
    let (mut dispatch, mut out) = (Dispatch::default(), Vec::new());
    for seq in 0..leases {
        dispatch.submit(task(seq), &mut out);
    }
    dispatch.settle(now, &mut out);
    for lease in 1..=leases {
        dispatch.granted(grant(lease), now, &mut out);
    }
    dispatch.settle(now, &mut out);
    for (lease, tasks) in pushed(&mut out) {
        hears(&mut dispatch, lease, &tasks, now, &mut out);
    }
    dispatch
}

/// What was pushed, and where.
fn pushed(out: &mut Vec<Action>) -> Vec<(u64, Vec<TaskId>)> {
    let pushed = out.drain(..).filter_map(|action| match action {
        Action::Push { lease, tasks, .. } => Some((lease.0, tasks.iter().map(|task| task.id).collect())),
        _ => None,
    });
    pushed.collect()
}

/// Runs so many tasks that are all submitted at once, whose results come in batches of `batch` from one lease after the other, a
/// thousand batches a millisecond.
fn run_all(dispatch: &mut Dispatch, tasks: u64, batch: usize, now: u64) {
    let mut out = Vec::new();
    for seq in 0..tasks {
        dispatch.submit(task((1 << 32) + seq), &mut out);
    }
    dispatch.settle(now, &mut out);
    let mut running: VecDeque<(u64, VecDeque<TaskId>)> = VecDeque::new();
    let (mut done, mut batches) = (0, 0);
    while done < tasks {
        for (lease, tasks) in pushed(&mut out) {
            running.push_back((lease, tasks.into()));
        }
        let Some((lease, mut ahead)) = running.pop_front() else { panic!("nothing runs, and {done} are done") };
        let results: Vec<TaskId> = ahead.drain(..batch.min(ahead.len())).collect();
        done += results.len() as u64;
        if !ahead.is_empty() {
            running.push_back((lease, ahead));
        }
        batches += 1;
        hears(dispatch, lease, &results, now + batches / 1_000, &mut out);
    }
}

/// Submits a task when the one before is done.
fn run_one_by_one(dispatch: &mut Dispatch, tasks: u64, now: u64) {
    let mut out = Vec::new();
    for seq in 0..tasks {
        dispatch.submit(task((1 << 33) + seq), &mut out);
        dispatch.tick(now, &mut out);
        dispatch.settle(now, &mut out);
        for (lease, tasks) in pushed(&mut out) {
            hears(dispatch, lease, &tasks, now, &mut out);
        }
    }
}

#[test]
fn leases_that_a_message_does_not_touch_are_not_looked_at() {
    let looks = |leases| {
        let mut dispatch = with_leases(leases, 0);
        let before = dispatch.leases.looks;
        run_all(&mut dispatch, 2_000, 8, 1);
        run_one_by_one(&mut dispatch, 100, 2);
        dispatch.leases.looks - before
    };
    let (few, many) = (looks(2), looks(200));
    // Each gets its first tasks once, is looked at when it has been silent for a while, and is idle in the end.
    assert!(many < few + 200 * 8, "{few} looks with 2 leases, and {many} with 200");
}

#[test]
#[ignore = "a measurement, for an optimized build"]
fn cost_of_a_task_by_leases() {
    for leases in [2, 20, 100, 400, 1_000] {
        let mut costs = Vec::new();
        for batch in [1, 8, 100] {
            let best = (0..3).map(|_| {
                let mut dispatch = with_leases(leases, 0);
                let begun = Instant::now();
                run_all(&mut dispatch, 20_000, batch, 1);
                begun.elapsed().as_nanos() as u64 / 20_000
            });
            costs.push(best.min().unwrap());
        }
        let mut dispatch = with_leases(leases, 0);
        let begun = Instant::now();
        run_one_by_one(&mut dispatch, 2_000, 1);
        let alone = begun.elapsed().as_nanos() as u64 / 2_000;
        println!("{leases} leases: {costs:?} ns a task in batches of 1, 8, 100; {alone} ns one by one");
    }
}
