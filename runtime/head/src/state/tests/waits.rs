//! Executions that wait for each other, and what their processes hear of it.

use wingbeat_net::messages::{Await, AwaitedTask, Callee, Within};

use super::*;
use crate::state::suspects::ASKED_AFTER;

/// Processes, some of whose executions wait.
struct Waiters {
    bench: Bench,
    /// What was said of these, and holds.
    waits: Vec<(ProcessId, Wait)>,
}

impl Waiters {
    fn new() -> Waiters {
        let mut bench = Bench::new(cpus(4.0));
        for process in [10, 20] {
            bench.step(Event::ProcessConnected(ProcessId(process)));
        }
        Waiters { bench, waits: Vec::new() }
    }

    /// An execution in this process waits for all of these, to the end. How many deadlocks the process hears of.
    fn wait(&mut self, on: u64, seq: u64, actor: Option<(u64, u32)>, for_: &[(u64, Option<u64>)]) -> usize {
        let task = |seq| TaskId { owner: DRIVER, seq };
        let callee = |actor| Callee { actor: ActorId(actor), group: "".into() };
        let awaited = |(seq, actor): &(u64, Option<u64>)| AwaitedTask {
            task: task(*seq),
            callee: actor.map(callee),
            after: Vec::new(),
        };
        let wait = Wait {
            task: task(seq),
            name: format!("execution {seq}"),
            within: actor.map(|(id, room)| Within { actor: ActorId(id), group: Some("".into()), room }),
            waits_for: WaitsFor::Results,
            awaits: vec![Await { on: for_.iter().map(awaited).collect(), ends_without: 1 }],
        };
        let process = ProcessId(on);
        self.waits.push((process, wait.clone()));
        self.bench.says(process, HeadMessage::Waiting { lease: None, wait });
        self.bench.tick(ASKED_AFTER);
        self.answer();
        self.bench.told_to(process, |event| matches!(event, HeadEvent::Deadlock { .. }).then_some(())).len()
    }

    /// All that are asked say what holds.
    fn answer(&mut self) {
        for process in [10, 20].map(ProcessId) {
            let asked = self.bench.told_to(process, |event| match event {
                HeadEvent::SayAgain { question, tasks } => Some((*question, tasks.clone())),
                _ => None,
            });
            for (question, tasks) in asked {
                let holds = self.waits.iter().filter(|(by, wait)| *by == process && tasks.contains(&wait.task));
                let waits: Vec<Wait> = holds.map(|(_, wait)| wait.clone()).collect();
                for wait in waits.into_iter().map(Some).chain([None]) {
                    self.bench.says(process, HeadMessage::SaidAgain { question, wait });
                }
            }
        }
    }
}

#[test]
fn a_circle_of_waits_through_an_actor_and_a_task_is_told_to_who_closes_it() {
    let mut waiters = Waiters::new();
    // A runs 1, which waits for the task 2, which waits for the call 3 to A.
    assert_eq!(waiters.wait(10, 1, Some((100, 1)), &[(2, None)]), 0);
    assert_eq!(waiters.wait(20, 2, None, &[(3, Some(100))]), 1);
}

#[test]
fn a_circle_that_is_over_when_its_members_are_asked_is_told_to_nobody() {
    let mut waiters = Waiters::new();
    waiters.wait(10, 1, Some((100, 1)), &[(2, None)]);
    // That it goes on is on its way.
    waiters.waits.clear();
    assert_eq!(waiters.wait(20, 2, None, &[(3, Some(100))]), 0);
}

#[test]
fn waits_of_a_dead_process_close_no_circle() {
    let mut waiters = Waiters::new();
    waiters.wait(10, 1, Some((100, 1)), &[(2, None)]);
    waiters.bench.step(Event::ProcessLost(ProcessId(10), None));
    assert_eq!(waiters.wait(20, 2, None, &[(3, Some(100))]), 0);
}

#[test]
fn a_full_actor_one_of_whose_executions_will_go_on_is_no_circle() {
    let mut waiters = Waiters::new();
    // A runs 1 and 2. 2 waits for a task that just takes its time, and then there is room for 4.
    assert_eq!(waiters.wait(10, 1, Some((100, 2)), &[(3, None)]), 0);
    assert_eq!(waiters.wait(10, 2, Some((100, 2)), &[(9, None)]), 0);
    assert_eq!(waiters.wait(20, 3, None, &[(4, Some(100))]), 0);
}
