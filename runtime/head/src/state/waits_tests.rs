//! What waits for each other, and what is asked before that is believed.

use super::super::suspects::{ASKED_AFTER, ASKED_AGAIN_AFTER, TOLD_AGAIN_AFTER};
use super::*;

fn task(seq: u64) -> TaskId {
    TaskId { owner: ProcessId(1), seq }
}

/// An execution that waits for all of these.
fn wait(seq: u64, actor: Option<(u64, u32)>, on: &[(u64, Option<u64>)]) -> Wait {
    Wait {
        task: task(seq),
        name: format!("execution {seq}"),
        within: actor.map(|(actor, room)| Within { actor: ActorId(actor), group: Some("".into()), room }),
        waits_for: WaitsFor::Results,
        awaits: vec![for_all(on)],
    }
}

fn on_task(seq: u64, callee: Option<Callee>) -> AwaitedTask {
    AwaitedTask { task: task(seq), callee, after: Vec::new() }
}

fn for_all(on: &[(u64, Option<u64>)]) -> Await {
    let on = on.iter().map(|(seq, actor)| on_task(*seq, actor.map(|actor| callee(actor, ""))));
    Await { on: on.collect(), ends_without: 1 }
}

/// Which never ends if so many of these do not.
fn for_some(ends_without: u32, on: &[(u64, Option<u64>)]) -> Await {
    Await { ends_without, ..for_all(on) }
}

/// A process answers.
fn say_again(waits: &mut Waits, process: ProcessId, question: u64, again: Vec<Wait>) {
    again.into_iter().for_each(|wait| waits.again(ASKED_AFTER, process, question, wait));
    waits.has_answered_all(process, question);
}

/// All that are asked now say the same again.
fn all_say_it_again(waits: &mut Waits, now: Millis) {
    for (process, question, tasks) in waits.questions(now) {
        let again = tasks.iter().map(|task| waits.waits[task].wait.clone()).collect();
        say_again(waits, process, question, again);
    }
}

/// The circles that lasted until then, as all in them say.
fn circles_at(waits: &mut Waits, now: Millis) -> Vec<Circle> {
    all_say_it_again(waits, now);
    waits.confirmed(now)
}

fn callee(actor: u64, group: &str) -> Callee {
    Callee { actor: ActorId(actor), group: group.into() }
}

/// An execution in the actor 100, in a group that runs two at a time, which waits for a call of a group of it.
fn inside(seq: u64, group: Option<&str>, on: (u64, &str)) -> Wait {
    let within =
        Within { actor: ActorId(100), group: group.map(Into::into), room: if group.is_some() { 2 } else { 1 } };
    let on = vec![on_task(on.0, Some(callee(100, on.1)))];
    let awaits = vec![Await { on, ends_without: 1 }];
    Wait {
        task: task(seq),
        name: format!("execution {seq}"),
        within: Some(within),
        waits_for: WaitsFor::Results,
        awaits,
    }
}

#[test]
fn two_actors_that_call_each_other_and_wait_are_a_circle() {
    let mut waits = Waits::default();
    // A runs 1 and waits for 2, sent to B; B runs 2 and waits for 3, sent to A.
    assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))])));
    assert!(waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
    // Believed only when it lasts.
    assert!(circles_at(&mut waits, ASKED_AFTER - 1).is_empty());
    let [circle] = &circles_at(&mut waits, ASKED_AFTER)[..] else { panic!("no circle") };
    assert_eq!((circle.process, circle.task, circle.on), (ProcessId(20), task(2), task(3)));
    assert_eq!(circle.members, ["execution 2", "execution 1", "execution 2"]);
    waits.end(task(2));
    assert!(!waits.has_suspects());
}

#[test]
fn of_several_things_that_somebody_waits_for_the_one_in_the_circle_is_named() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200)), (7, None), (8, Some(300))]));
    assert!(waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(6, None), (3, Some(100)), (9, Some(300))])));
    let on: Vec<TaskId> = circles_at(&mut waits, ASKED_AFTER).iter().map(|circle| circle.on).collect();
    assert_eq!(on, [task(3)]);
}

#[test]
fn an_actor_with_room_for_another_call_is_no_circle() {
    let mut waits = Waits::default();
    assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 2)), &[(2, Some(200))])));
    assert!(!waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
}

#[test]
fn an_actor_all_of_whose_threads_are_blocked_is_full_though_it_may_run_more() {
    let mut waits = Waits::default();
    // One waits and blocks nothing, and two block the two threads. A call can begin on none.
    assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 9)), &[(11, Some(100))])));
    assert!(!waits.begin(0, ProcessId(10), wait(2, Some((100, 2)), &[(12, Some(100))])));
    assert!(waits.begin(0, ProcessId(10), wait(3, Some((100, 2)), &[(13, Some(100))])));
    let circles = circles_at(&mut waits, ASKED_AFTER);
    assert_eq!(circles.iter().map(|circle| circle.task).collect::<Vec<_>>(), [task(3)]);
    waits.end(task(3));
    assert!(waits.stuck_with(task(1), |_| true).is_none());
}

#[test]
fn of_many_that_wait_in_a_full_actor_each_is_told_of_itself_alone() {
    let mut waits = Waits::default();
    for seq in 1..=64 {
        waits.begin(0, ProcessId(10), wait(seq, Some((100, 64)), &[(100 + seq, Some(100))]));
    }
    let circles = circles_at(&mut waits, ASKED_AFTER);
    let [circle] = &circles[..] else { panic!("{} circles", circles.len()) };
    assert_eq!((circle.task, circle.on), (task(64), task(164)));
    assert_eq!(circle.members, ["execution 64", "execution 64"]);
}

#[test]
fn of_many_that_look_stuck_in_a_full_actor_at_a_time_one_is_told() {
    let mut waits = Waits::default();
    let both = |seq| Wait {
        awaits: [100, 200].map(|from| for_all(&[(from + seq, Some(100))])).to_vec(),
        ..wait(seq, Some((100, 64)), &[])
    };
    // Each says again what it waits for, and finds that the actor is full.
    for seq in (1..=64).chain(1..=64) {
        waits.begin(0, ProcessId(10), both(seq));
    }
    assert_eq!(circles_at(&mut waits, ASKED_AFTER).len(), 1);
}

#[test]
fn of_a_circle_one_is_told_though_answers_come_one_by_one() {
    let mut waits = two_in_a_circle();
    waits.begin(0, ProcessId(10), wait(1, None, &[(2, None)]));
    waits.begin(0, ProcessId(40), wait(4, None, &[(3, None)]));
    assert!(waits.begin(0, ProcessId(30), wait(3, None, &[(4, None)])));
    let mut told = 0;
    for (process, question, tasks) in waits.questions(ASKED_AFTER) {
        let again = tasks.iter().map(|task| waits.waits[task].wait.clone()).collect();
        say_again(&mut waits, process, question, again);
        told += waits.confirmed(ASKED_AFTER).len();
    }
    assert_eq!(told, 2, "one of each circle");
}

#[test]
fn of_a_circle_through_the_state_of_an_actor_whoever_holds_it_is_told() {
    let mut waits = Waits::default();
    // 1 has the state, and waits for 2, which waits for its turn.
    assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 8)), &[(2, Some(100))])));
    assert!(waits.begin(0, ProcessId(10), Wait { waits_for: WaitsFor::Turn, ..wait(2, Some((100, 8)), &[(1, None)]) }));
    let circles = circles_at(&mut waits, ASKED_AFTER);
    let [circle] = &circles[..] else { panic!("{} circles", circles.len()) };
    assert_eq!((circle.task, circle.on), (task(1), task(2)));
    assert_eq!(circle.members, ["execution 1", "execution 2", "execution 1"]);
}

#[test]
fn a_group_is_full_whatever_runs_in_others() {
    let mut waits = Waits::default();
    // Each waits for the other group, which has room.
    assert!(!waits.begin(0, ProcessId(10), inside(1, Some("io"), (11, ""))));
    assert!(!waits.begin(0, ProcessId(10), inside(2, Some("io"), (12, ""))));
    // One waits for its own group, which has room; then none has.
    assert!(!waits.begin(0, ProcessId(10), inside(3, Some(""), (13, ""))));
    assert!(waits.begin(0, ProcessId(10), inside(4, Some(""), (14, ""))));
    let circles = circles_at(&mut waits, ASKED_AFTER);
    assert_eq!(circles.iter().map(|circle| circle.task).collect::<Vec<_>>(), [task(4)]);
    (1..=4).for_each(|seq| waits.end(task(seq)));
    assert!(waits.of_actor.is_empty() && waits.awaited_of_actor.is_empty());
}

#[test]
fn two_groups_that_wait_for_each_other_are_a_circle() {
    let mut waits = Waits::default();
    assert!(!waits.begin(0, ProcessId(10), inside(1, Some("io"), (11, ""))));
    assert!(!waits.begin(0, ProcessId(10), inside(2, Some("io"), (12, ""))));
    assert!(!waits.begin(0, ProcessId(10), inside(3, Some(""), (13, "io"))));
    assert!(waits.begin(0, ProcessId(10), inside(4, Some(""), (14, "io"))));
}

#[test]
fn no_call_of_any_group_begins_beside_a_constructor() {
    let mut waits = Waits::default();
    assert!(waits.begin(0, ProcessId(10), inside(1, None, (11, "io"))));
}

#[test]
fn a_circle_through_a_task_is_found() {
    let mut waits = Waits::default();
    assert!(!waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, None)])));
    assert!(waits.begin(0, ProcessId(30), wait(2, None, &[(3, Some(100))])));
}

/// Each waits for the one before, and says so after that, as where messages of many processes come in any order.
#[test]
fn a_long_chain_is_looked_through_once_and_only_by_whoever_somebody_waits_for() {
    const LENGTH: u64 = 2_000;
    let mut waits = Waits::default();
    for seq in 1..LENGTH {
        assert!(!waits.begin(0, ProcessId(10), wait(seq, None, &[(seq - 1, None)])));
    }
    assert_eq!(waits.looks.get(), 0, "nobody waits for the last one");
    // Somebody waits for the last one, which says again what it waits for.
    waits.begin(0, ProcessId(10), wait(LENGTH + 1, None, &[(LENGTH - 1, None)]));
    waits.begin(0, ProcessId(10), wait(LENGTH - 1, None, &[(LENGTH - 2, None)]));
    assert!(waits.looks.get() <= LENGTH as usize, "{}", waits.looks.get());
    (1..LENGTH + 2).for_each(|seq| waits.end(task(seq)));
    assert!(waits.awaited.is_empty() && waits.of_process.is_empty());
}

#[test]
fn a_wait_that_ended_is_forgotten() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
    waits.end(task(1));
    assert!(!waits.begin(0, ProcessId(20), wait(2, Some((200, 1)), &[(3, Some(100))])));
}

#[test]
fn a_circle_that_is_said_again_lasts() {
    let mut waits = Waits::default();
    let last = || wait(2, Some((200, 1)), &[(3, Some(100))]);
    waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
    assert!(waits.begin(0, ProcessId(20), last()));
    assert!(waits.begin(ASKED_AFTER - 1, ProcessId(20), last()));
    assert_eq!(circles_at(&mut waits, ASKED_AFTER).len(), 1);
}

#[test]
fn a_circle_is_told_when_all_in_it_have_said_that_they_still_wait() {
    let mut waits = two_in_a_circle();
    let questions = waits.questions(ASKED_AFTER);
    let asked: Vec<ProcessId> = questions.iter().map(|(process, ..)| *process).collect();
    assert_eq!(asked, [ProcessId(10), ProcessId(20)]);
    let question = questions[0].1;
    say_again(&mut waits, ProcessId(10), question, vec![wait(1, None, &[(2, None)])]);
    assert!(waits.confirmed(ASKED_AFTER).is_empty(), "one has not answered");
    assert!(waits.questions(ASKED_AFTER).is_empty(), "they were asked");
    say_again(&mut waits, ProcessId(20), question, vec![wait(2, None, &[(1, None)])]);
    assert_eq!(waits.confirmed(ASKED_AFTER).len(), 1);
    waits.end(task(2));
    assert!(!waits.has_suspects());
}

/// 1 waits for 2, and 2 for 1.
fn two_in_a_circle() -> Waits {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, None, &[(2, None)]));
    assert!(waits.begin(0, ProcessId(20), wait(2, None, &[(1, None)])));
    waits
}

#[test]
fn what_one_waits_for_instead_is_kept_and_asked_about() {
    let mut waits = Waits::default();
    let either = |a, b| Wait { awaits: vec![for_all(&[(a, None)]), for_all(&[(b, None)])], ..wait(1, None, &[]) };
    waits.begin(0, ProcessId(10), either(2, 3));
    for seq in [2, 3, 4] {
        waits.begin(0, ProcessId(20), wait(seq, None, &[(1, None)]));
    }
    let questions = waits.questions(ASKED_AFTER);
    let question = questions[0].1;
    // As many waits as before, of which one is new.
    say_again(&mut waits, ProcessId(10), question, vec![either(3, 4)]);
    let others = [2, 3].map(|seq| wait(seq, None, &[(1, None)]));
    say_again(&mut waits, ProcessId(20), question, others.to_vec());
    assert!(waits.confirmed(ASKED_AFTER).is_empty(), "that was not said before");
    let told: Vec<TaskId> = circles_at(&mut waits, 3 * ASKED_AFTER).iter().map(|circle| circle.task).collect();
    assert_eq!(told.len(), 1, "the rest is asked again when that goes on: {told:?}");
}

#[test]
fn what_is_said_for_the_first_time_after_a_question_is_no_answer_to_it() {
    let mut waits = two_in_a_circle();
    let question = waits.questions(ASKED_AFTER)[0].1;
    waits.end(task(1));
    waits.begin(ASKED_AFTER, ProcessId(10), wait(1, None, &[(2, None)]));
    for (process, seq, on) in [(10, 1, 2), (20, 2, 1)] {
        say_again(&mut waits, ProcessId(process), question, vec![wait(seq, None, &[(on, None)])]);
    }
    assert!(waits.confirmed(ASKED_AFTER).is_empty());
    assert_eq!(circles_at(&mut waits, 3 * ASKED_AFTER).len(), 1);
}

#[test]
fn whoever_waits_into_a_circle_tells_of_it() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(5, None, &[(4, None)]));
    waits.begin(0, ProcessId(10), wait(1, None, &[(2, None)]));
    waits.begin(0, ProcessId(10), wait(2, None, &[(1, None)]));
    assert!(waits.begin(0, ProcessId(10), wait(4, None, &[(1, None)])), "somebody waits for it");
    let told: Vec<TaskId> = circles_at(&mut waits, ASKED_AFTER).iter().map(|circle| circle.task).collect();
    assert!(matches!(told[..], [one, _] | [one] if one == task(2) || one == task(1)), "{told:?}");
}

#[test]
fn one_that_was_told_and_says_the_same_is_told_again() {
    let mut waits = two_in_a_circle();
    assert_eq!(circles_at(&mut waits, ASKED_AFTER).len(), 1);
    assert!(circles_at(&mut waits, 2 * ASKED_AFTER).is_empty());
    assert_eq!(circles_at(&mut waits, ASKED_AFTER + TOLD_AGAIN_AFTER).len(), 1);
    waits.end(task(1));
    waits.end(task(2));
    assert!(!waits.has_suspects());
}

#[test]
fn a_task_is_in_vain_as_long_as_anything_is_in_its_way() {
    let mut waits = Waits::default();
    let after = |seq, first, second| AwaitedTask {
        after: vec![(task(first), None), (task(second), None)],
        ..on_task(seq, None)
    };
    // 1 waits for one of two, each of which lacks two arguments: one that takes its time, and one that waits for 1.
    let on = vec![after(2, 11, 12), after(3, 21, 22)];
    let one = Wait { awaits: vec![Await { on, ends_without: 2 }], ..wait(1, None, &[]) };
    waits.begin(0, ProcessId(10), one);
    for slow in [11, 21] {
        waits.begin(0, ProcessId(10), wait(slow, None, &[(100 + slow, None)]));
    }
    assert!(!waits.begin(0, ProcessId(10), wait(12, None, &[(1, None)])));
    assert!(waits.begin(0, ProcessId(10), wait(22, None, &[(1, None)])));
    waits.end(task(11));
    waits.end(task(21));
    assert_eq!(circles_at(&mut waits, ASKED_AFTER).len(), 1);
}

#[test]
fn whoever_goes_on_before_the_answer_is_in_no_circle() {
    let mut waits = two_in_a_circle();
    let question = waits.questions(ASKED_AFTER)[0].1;
    // 1 has the result of 2, and nothing is left of its wait.
    say_again(&mut waits, ProcessId(10), question, Vec::new());
    say_again(&mut waits, ProcessId(20), question, vec![wait(2, None, &[(1, None)])]);
    assert!(waits.confirmed(ASKED_AFTER).is_empty());
    // What was said of it is asked again until it is taken back.
    assert!(waits.has_suspects());
    waits.end(task(1));
    assert!(waits.questions(3 * ASKED_AFTER).is_empty());
    assert!(!waits.has_suspects());
}

#[test]
fn what_is_new_in_an_answer_is_asked_again() {
    let mut waits = two_in_a_circle();
    let question = waits.questions(ASKED_AFTER)[0].1;
    let other = Wait { awaits: vec![for_all(&[(2, None)]), for_all(&[(3, None)])], ..wait(1, None, &[]) };
    say_again(&mut waits, ProcessId(10), question, vec![other]);
    say_again(&mut waits, ProcessId(20), question, vec![wait(2, None, &[(1, None)])]);
    assert!(waits.confirmed(ASKED_AFTER).is_empty(), "1 goes on when 3 is done");
    assert!(!waits.has_suspects());
    // Then 3 waits for it, too.
    assert!(waits.begin(ASKED_AFTER, ProcessId(30), wait(3, None, &[(1, None)])));
    assert_eq!(circles_at(&mut waits, 2 * ASKED_AFTER).len(), 1);
}

#[test]
fn results_that_come_meanwhile_leave_the_rest_of_the_circle() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, None, &[(5, None), (6, None), (2, None)]));
    assert!(waits.begin(0, ProcessId(20), wait(2, None, &[(1, None)])));
    let question = waits.questions(ASKED_AFTER)[0].1;
    say_again(&mut waits, ProcessId(10), question, vec![wait(1, None, &[(6, None), (2, None)])]);
    say_again(&mut waits, ProcessId(20), question, vec![wait(2, None, &[(1, None)])]);
    let circles = waits.confirmed(ASKED_AFTER);
    assert_eq!(circles.iter().map(|circle| circle.task).collect::<Vec<_>>(), [task(2)]);
}

#[test]
fn a_process_that_does_not_answer_keeps_no_other_circle_from_being_told_and_is_asked_again() {
    let mut waits = two_in_a_circle();
    waits.begin(0, ProcessId(30), wait(3, None, &[(4, None)]));
    assert!(waits.begin(0, ProcessId(40), wait(4, None, &[(3, None)])));
    let questions = waits.questions(ASKED_AFTER);
    assert_eq!(questions.len(), 4);
    for (process, question, tasks) in questions.iter().filter(|(process, ..)| *process != ProcessId(10)) {
        let again = tasks.iter().map(|task| waits.waits[task].wait.clone()).collect();
        say_again(&mut waits, *process, *question, again);
    }
    let told: Vec<TaskId> = waits.confirmed(ASKED_AFTER).iter().map(|circle| circle.task).collect();
    assert_eq!(told, [task(4)]);
    assert!(waits.questions(2 * ASKED_AFTER).is_empty(), "it was asked");
    let later = ASKED_AFTER + ASKED_AGAIN_AFTER;
    assert!(waits.confirmed(later).is_empty());
    let told: Vec<TaskId> = circles_at(&mut waits, later + ASKED_AFTER).iter().map(|circle| circle.task).collect();
    assert_eq!(told, [task(2), task(4)], "4 has heard nothing that it looks at");
}

#[test]
fn whoever_waits_for_a_process_that_is_lost_is_not_stuck() {
    let mut waits = two_in_a_circle();
    waits.questions(ASKED_AFTER);
    waits.forget_process(ProcessId(10));
    assert!(waits.confirmed(ASKED_AFTER).is_empty());
    waits.forget_process(ProcessId(20));
    assert!(waits.confirmed(ASKED_AFTER).is_empty() && !waits.has_suspects());
}

#[test]
fn an_execution_goes_on_as_soon_as_one_of_its_waits_is_over() {
    let mut waits = Waits::default();
    let either = Wait { awaits: vec![for_all(&[(2, None)]), for_all(&[(3, None)])], ..wait(1, None, &[]) };
    waits.begin(0, ProcessId(10), either);
    assert!(!waits.begin(0, ProcessId(20), wait(2, None, &[(1, None)])), "3 may be done");
    assert!(waits.begin(0, ProcessId(30), wait(3, None, &[(1, None)])));
    let circles = circles_at(&mut waits, ASKED_AFTER);
    assert_eq!(circles.iter().map(|circle| (circle.task, circle.on)).collect::<Vec<_>>(), [(task(3), task(1))]);
}

#[test]
fn a_wait_for_some_of_several_never_ends_when_too_many_of_them_do_not() {
    let mut waits = Waits::default();
    // Two of three are waited for: it never ends without two of them.
    let two = Wait { awaits: vec![for_some(2, &[(2, None), (3, None), (4, None)])], ..wait(1, None, &[]) };
    waits.begin(0, ProcessId(10), two);
    assert!(!waits.begin(0, ProcessId(20), wait(2, None, &[(1, None)])));
    assert!(waits.begin(0, ProcessId(30), wait(3, None, &[(1, None)])));
    // A wait that names fewer than that ends.
    let two = Wait { awaits: vec![for_some(2, &[(2, None)])], ..wait(1, None, &[]) };
    assert!(!waits.begin(0, ProcessId(10), two));
}

#[test]
fn a_task_that_has_not_begun_waits_for_its_arguments() {
    let mut waits = Waits::default();
    // 1 waits for 2, which takes what 3 gives, a call of the actor in which 1 runs.
    let after = vec![(task(3), Some(callee(100, "")))];
    let on = |after| vec![AwaitedTask { after, ..on_task(2, None) }];
    let awaits = |after| vec![Await { on: on(after), ends_without: 1 }];
    let stuck = Wait { awaits: awaits(after), ..wait(1, Some((100, 1)), &[]) };
    assert!(waits.begin(0, ProcessId(10), stuck.clone()));
    let circles = circles_at(&mut waits, ASKED_AFTER);
    assert_eq!(circles.iter().map(|circle| (circle.task, circle.on)).collect::<Vec<_>>(), [(task(1), task(2))]);
    waits.end(task(1));
    // Its arguments have come when it is asked.
    assert!(waits.begin(0, ProcessId(10), stuck.clone()));
    let question = waits.questions(ASKED_AFTER)[0].1;
    say_again(&mut waits, ProcessId(10), question, vec![Wait { awaits: awaits(Vec::new()), ..stuck }]);
    assert!(waits.confirmed(ASKED_AFTER).is_empty() && !waits.has_suspects());
    waits.end(task(1));
    assert!(waits.awaited.is_empty() && waits.awaited_of_actor.is_empty());
}

#[test]
fn whoever_blocks_the_thread_of_one_that_it_waits_for_is_told() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, None, &[(2, None)]));
    let on_its_thread = Wait { waits_for: WaitsFor::Thread, ..wait(2, None, &[(1, None)]) };
    assert!(waits.begin(0, ProcessId(10), on_its_thread));
    let circle = circles_at(&mut waits, ASKED_AFTER).remove(0);
    assert_eq!((circle.task, circle.on), (task(1), task(2)));
    assert_eq!(circle.members, ["execution 1", "execution 2 (whose thread is blocked)", "execution 1"]);
}

#[test]
fn a_circle_that_the_news_dissolves_is_none() {
    let mut waits = Waits::default();
    waits.begin(0, ProcessId(10), wait(1, Some((100, 1)), &[(2, Some(200))]));
    assert!(waits.begin(5, ProcessId(20), wait(4, Some((200, 1)), &[(5, Some(100))])));
    // The result of 2 had been on its way: 1 goes on.
    waits.end(task(1));
    assert!(circles_at(&mut waits, 5 + ASKED_AFTER).is_empty());
}
