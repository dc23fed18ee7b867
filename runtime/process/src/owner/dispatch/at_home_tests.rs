use super::*;
use crate::owner::dispatch::tests::{Said, death, grant, id, said, settle, task};

/// As in a recursion: each has another parent.
fn shared(seq: u64) -> Task {
    child_of(1_000 + seq, seq)
}

fn child_of(parent: u64, seq: u64) -> Task {
    let mut task = task(seq);
    let spec = Arc::make_mut(&mut task.spec);
    (spec.shares_process, spec.parent) = (true, Some(id(parent)));
    task
}

fn submitted(tasks: impl IntoIterator<Item = Task>) -> Dispatch {
    let mut dispatch = Dispatch::default();
    tasks.into_iter().for_each(|task| dispatch.submit(task, &mut Vec::new()));
    dispatch
}

/// What is taken home: a task, by its number.
fn take(dispatch: &mut Dispatch, now: u64) -> Option<u64> {
    match dispatch.take_home(&mut Vec::new(), now, |_| true) {
        TakenHome::Task { spec, .. } => Some(spec.id.seq),
        TakenHome::NotThis | TakenHome::Nothing => None,
    }
}

fn granted(dispatch: &mut Dispatch, lease: u64, now: u64) -> Said {
    let mut out = Vec::new();
    dispatch.granted(grant(lease), now, &mut out);
    dispatch.settle(now, &mut out);
    said(out)
}

#[test]
fn the_newest_run_at_home_and_the_oldest_elsewhere() {
    let mut dispatch = submitted((0..4).map(shared));
    settle(&mut dispatch, 0);
    assert_eq!(take(&mut dispatch, 0), Some(3));
    assert_eq!(granted(&mut dispatch, 1, 0).pushed[&1], [0]);
    assert_eq!((take(&mut dispatch, 0), take(&mut dispatch, 0), take(&mut dispatch, 0)), (Some(2), Some(1), None));
    assert!(!dispatch.is_done());
    for seq in 1..4 {
        assert!(matches!(dispatch.finished_at_home(id(seq), None, 1_000, 1), Some(Settled::Done(_))));
        assert!(dispatch.finished_at_home(id(seq), None, 1_000, 1).is_none(), "it runs here no more");
    }
}

#[test]
fn of_siblings_the_oldest_runs_first_so_that_it_does_not_wait_for_ever_behind_those_that_come() {
    let mut dispatch = submitted((0..3).map(|seq| child_of(100, seq)));
    settle(&mut dispatch, 0);
    // A map submits another one with each result.
    for seq in 0..20 {
        let mut news = vec![Request::Task(child_of(100, seq + 3))];
        let taken = dispatch.take_home(&mut news, 0, |_| true);
        assert!(matches!(taken, TakenHome::Task { spec, .. } if spec.id.seq == seq), "{seq}");
        news.into_iter().for_each(|request| match request {
            Request::Task(task) => dispatch.submit(task, &mut Vec::new()),
            _ => unreachable!("it is one"),
        });
    }
    // What the one that runs submits goes first, to its end.
    dispatch.submit(child_of(19, 100), &mut Vec::new());
    assert_eq!([take(&mut dispatch, 0), take(&mut dispatch, 0)], [Some(100), Some(20)]);
}

#[test]
fn nor_does_it_behind_tasks_of_another_parent() {
    let mut dispatch = submitted([shared(1_000), child_of(100, 0), child_of(100, 1)]);
    settle(&mut dispatch, 0);
    let mut waits = std::collections::BTreeSet::from([0, 1]);
    for seq in 2..100 {
        dispatch.submit(child_of(100, seq), &mut Vec::new());
        waits.remove(&take(&mut dispatch, 0).unwrap());
    }
    assert!(waits.is_empty(), "{waits:?}");
}

#[test]
fn who_has_waited_long_at_the_front_is_next_whatever_is_newer() {
    let mut dispatch = submitted([shared(1), shared(2), child_of(100, 3)]);
    settle(&mut dispatch, 0);
    let mut taken = Vec::new();
    for seq in 4..10 {
        dispatch.submit(child_of(100, seq), &mut Vec::new());
        taken.push(take(&mut dispatch, FRONT_MS + seq).unwrap());
    }
    assert_eq!(taken[..2], [1, 5], "one so often");
    assert_eq!(take(&mut dispatch, 2 * FRONT_MS + 4), Some(2));
}

#[test]
fn one_at_the_front_that_may_not_run_here_keeps_those_behind_it_no_longer_waiting() {
    let mut dispatch = submitted([task(1), shared(2), child_of(100, 3)]);
    settle(&mut dispatch, 0);
    dispatch.submit(child_of(100, 4), &mut Vec::new());
    assert_eq!(take(&mut dispatch, FRONT_MS), Some(2));
    assert_eq!(take(&mut dispatch, FRONT_MS), Some(4));
}

#[test]
fn what_was_just_asked_for_is_taken_first_and_only_if_it_is_a_task_that_fits() {
    let mut dispatch = submitted([shared(1)]);
    let mut news = vec![Request::Task(shared(2))];
    assert!(dispatch.asks_for_home(&news));
    assert!(matches!(dispatch.take_home(&mut news, 0, |_| false), TakenHome::NotThis));
    assert!(matches!(dispatch.take_home(&mut news, 0, |_| true), TakenHome::Task { spec, .. } if spec.id.seq == 2));
    assert!(news.is_empty());
    // One of its own process hides what is ready: order is kept for all others.
    let mut news = vec![Request::Task(task(3))];
    assert!(matches!(dispatch.take_home(&mut news, 0, |_| true), TakenHome::Task { spec, .. } if spec.id.seq == 1));
    assert!(matches!(dispatch.take_home(&mut news, 0, |_| true), TakenHome::Nothing));
    assert_eq!(news.len(), 1);
}

#[test]
fn others_are_asked_for_what_the_process_does_not_take_in_time() {
    let mut dispatch = submitted((0..3).map(shared));
    assert_eq!(take(&mut dispatch, 100), Some(2));
    assert_eq!(settle(&mut dispatch, 100).wanted, None, "it goes on with these itself");
    assert_eq!(dispatch.left_until(100), Some(LEFT_MS));
    assert_eq!(settle(&mut dispatch, 100 + LEFT_MS).wanted, Some(2));
    // And at once when it takes nothing any more.
    let mut dispatch = submitted([shared(0)]);
    assert_eq!(settle(&mut dispatch, 100).wanted, Some(1));
}

#[test]
fn a_process_that_has_found_nothing_hears_once_when_there_is_something() {
    let mut dispatch = Dispatch::default();
    assert_eq!(take(&mut dispatch, 0), None);
    dispatch.submit(task(1), &mut Vec::new());
    assert!(!settle(&mut dispatch, 0).offers_home, "it has a process of its own");
    dispatch.submit(shared(2), &mut Vec::new());
    assert!(settle(&mut dispatch, 0).offers_home);
    assert!(!settle(&mut dispatch, 0).offers_home);
    assert_eq!(take(&mut dispatch, 0), Some(2));
    assert_eq!(take(&mut dispatch, 0), None);
    dispatch.home_is_closed();
    dispatch.submit(shared(3), &mut Vec::new());
    assert!(!settle(&mut dispatch, 0).offers_home);
}

#[test]
fn tasks_that_take_long_have_processes_of_their_own() {
    let mut dispatch = submitted((0..4).map(shared));
    assert_eq!(take(&mut dispatch, 0), Some(3));
    assert!(dispatch.finished_at_home(id(3), None, 50_000_000, 50).is_some());
    assert_eq!(take(&mut dispatch, 50), Some(2), "the first may have taken long to begin");
    assert!(dispatch.finished_at_home(id(2), None, 50_000_000, 100).is_some());
    assert_eq!(take(&mut dispatch, 100), None);
}

#[test]
fn what_is_cancelled_by_force_at_home_is_over_and_what_is_asked_is_not() {
    let mut dispatch = submitted([shared(0), shared(1)]);
    take(&mut dispatch, 0);
    take(&mut dispatch, 0);
    let (mut wanted, mut out) = (Wanted::default(), Vec::new());
    wanted.insert(id(0), true);
    wanted.insert(id(1), false);
    dispatch.cancel(&mut wanted, &mut out);
    let said = said(out);
    assert_eq!(said.stopped, [0, 1]);
    assert!(matches!(&said.failed[..], [(0, Error::Cancelled { .. })]));
    assert!(dispatch.finished_at_home(id(0), None, 1, 0).is_none());
    assert!(matches!(dispatch.finished_at_home(id(1), None, 1, 0), Some(Settled::Done(_))));
}

#[test]
fn a_recalled_lease_whose_task_may_run_others_is_told() {
    let mut dispatch = submitted([shared(0)]);
    granted(&mut dispatch, 1, 0);
    let mut out = Vec::new();
    dispatch.recalled(grant(1).lease, &mut out);
    assert!(matches!(out[..], [Action::TakeBack { recalled: true, most: 1, .. }]));
}

#[test]
fn a_task_whose_process_has_ended_is_tried_again_in_one_of_its_own() {
    let mut dispatch = submitted([shared(0)]);
    granted(&mut dispatch, 1, 0);
    let mut out = Vec::new();
    dispatch.connection_lost(grant(1).worker.process, 1, &mut out);
    dispatch.worker_died(death(1, 1), 1, &mut out);
    assert_eq!(take(&mut dispatch, 1), None, "neither does it run beside who has submitted it");
    let again = granted(&mut dispatch, 2, 1);
    assert_eq!(again.pushed[&2], [0]);
}
