#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use wingbeat_core::spec::{MachineId, Shape};
use wingbeat_core::{JobId, ProcessId, ResourceSet};

use super::*;
use crate::workers::{Worker, Workers};

const KILL: Event = Event::LeaseOver { kill: true };

fn assignment(lease: u64) -> Assignment {
    let start = LeaseStart {
        lease: LeaseId(lease),
        job: JobId(1),
        resources: ResourceSet::new(),
        gpus: Vec::new(),
        bundle: None,
        captures: None,
        holder: LeaseHolder::Tasks(ProcessId(1), Arc::new(Shape::default())),
    };
    Assignment { start, started: None, terminated: None }
}

fn contact() -> Contact {
    let address =
        Address { process: ProcessId(2), machine: MachineId(1), unix: String::new(), tcp: None, steward: None };
    Contact { address, is_fit: true }
}

/// A worker process after some events, and all effects in order.
fn after(events: Vec<Event>) -> (Stage, Vec<Effect>) {
    let now = 0;
    let mut effects = Vec::new();
    let mut stage = Stage::launching(now, Some(assignment(7)));
    for event in events {
        let (next, more) = stage.after(event, now);
        stage = next;
        effects.extend(more);
    }
    (stage, effects)
}

#[test]
fn a_process_that_is_told_to_die_before_its_launch_is_never_launched() {
    let (stage, effects) = after(vec![KILL, Event::HandedToGuard, Event::Reported(contact())]);
    assert!(matches!(stage, Stage::Gone));
    assert_eq!(effects, [Effect::LeaseEnded(LeaseId(7))]);
}

#[test]
fn a_process_that_is_told_to_die_while_it_starts_gets_no_orders() {
    let (stage, effects) = after(vec![Event::HandedToGuard, KILL, Event::Reported(contact())]);
    assert!(matches!(stage, Stage::Ending { assignment: Some(_), contact: None, by_head: true, .. }));
    assert_eq!(effects, [Effect::Kill]);
}

#[test]
fn a_lease_that_is_over_before_the_process_reports_leaves_it_to_others() {
    let over = Event::LeaseOver { kill: false };
    let (stage, effects) =
        after(vec![Event::HandedToGuard, over, Event::Assigned(Box::new(assignment(8))), Event::Reported(contact())]);
    assert_eq!(stage.assignment().unwrap().lease(), LeaseId(8));
    assert_eq!(effects, [Effect::LeaseEnded(LeaseId(7)), Effect::HandOver]);
}

#[test]
fn a_process_that_was_asked_to_exit_takes_no_lease_until_it_declines() {
    let over = Event::LeaseOver { kill: false };
    let (stage, effects) = after(vec![Event::HandedToGuard, Event::Reported(contact()), over, Event::Retire]);
    assert!(!stage.is_free());
    assert_eq!(effects.last(), Some(&Effect::AskToExit));
    let (stage, _) = stage.after(Event::Stays, 0);
    assert!(stage.is_free());
}

#[test]
fn a_process_that_lost_the_head_takes_no_further_lease() {
    let over = Event::LeaseOver { kill: false };
    let (stage, effects) =
        after(vec![Event::HandedToGuard, Event::Reported(contact()), Event::Unfit, over, Event::Stays]);
    assert!(matches!(stage, Stage::Retiring { .. }));
    assert_eq!(effects[1..], [Effect::LeaseEnded(LeaseId(7)), Effect::AskToExit]);
}

/// Whatever happens in whatever order: every lease ends exactly once, nobody gets orders after an end, and each lease and
/// each free process is found.
#[test]
fn every_lease_ends_exactly_once_in_any_order_of_events() {
    for seed in 0..200 {
        let mut random = rand::rngs::StdRng::seed_from_u64(seed);
        let mut workers = Workers::default();
        let mut next = 0;
        let mut open: BTreeMap<LeaseId, ProcessId> = BTreeMap::new();
        let mut killed: BTreeSet<ProcessId> = BTreeSet::new();
        let mut ended: BTreeSet<LeaseId> = BTreeSet::new();
        for step in 0..400 {
            let known: Vec<ProcessId> = workers.iter().map(|(process, _)| process).collect();
            let is_winding_down = step > 300;
            let process = (!known.is_empty()).then(|| known[random.random_range(0..known.len())]);
            let (process, event) = match (random.random_range(0..12), process) {
                (0..3, _) if !is_winding_down => {
                    next += 1;
                    match workers.free_for(JobId(1), &[], false) {
                        Some(process) => {
                            open.insert(LeaseId(next), process);
                            (process, Event::Assigned(Box::new(assignment(next))))
                        }
                        None => {
                            let process = ProcessId(next);
                            let assigned = Some(assignment(next));
                            workers.insert(process, Worker::new(0, JobId(1), Vec::new(), assigned));
                            open.insert(LeaseId(next), process);
                            continue;
                        }
                    }
                }
                (_, None) => continue,
                (3, Some(process)) => (process, Event::HandedToGuard),
                (4, Some(process)) => (process, Event::Reported(contact())),
                (5, Some(process)) => (process, Event::LeaseOver { kill: random.random() }),
                (6, Some(process)) => (process, Event::End { by_head: random.random() }),
                (7, Some(process)) => (process, Event::Retire),
                (8, Some(process)) => (process, Event::Stays),
                (9, Some(process)) => (process, Event::Unfit),
                (_, Some(process)) => {
                    // The guard reports the exits of those only that it was asked to start.
                    let is_started =
                        !matches!(workers.get(process).unwrap().stage(), Stage::Launching { with_guard: false, .. });
                    if !is_started {
                        continue;
                    }
                    if workers.apply(process, Event::Exited(Ended::default()), 0).is_empty() && random.random() {
                        continue;
                    }
                    let is_freeing = workers.get(process).unwrap().stage().is_gone();
                    let had_devices = random.random();
                    match is_freeing {
                        true => (process, Event::DevicesFree),
                        false => (process, Event::WoundUp { had_devices, failure: "a test".into() }),
                    }
                }
            };
            for effect in workers.apply(process, event, 0) {
                match effect {
                    Effect::LeaseEnded(lease) | Effect::LeaseFailed(lease, _) | Effect::NotStarted(lease) => {
                        assert!(ended.insert(lease), "{lease} ended twice (seed {seed})");
                        open.remove(&lease);
                    }
                    Effect::Kill => assert!(killed.insert(process), "{process} is killed twice (seed {seed})"),
                    Effect::HandOver => assert!(!killed.contains(&process)),
                    Effect::AskToExit => assert!(!workers.get(process).unwrap().stage().is_free()),
                    Effect::FreeDevices => assert!(workers.get(process).unwrap().stage().is_gone()),
                    Effect::Died(_) | Effect::NeverReported => {}
                }
            }
            for (lease, process) in &open {
                assert_eq!(workers.server_of(*lease), Some(*process), "seed {seed}");
            }
            let free = workers.iter().filter(|(_, worker)| worker.stage().is_free()).count();
            assert_eq!(workers.free_for(JobId(1), &[], false).is_some(), free > 0, "seed {seed}");
            if let Some(process) = workers.free_for(JobId(1), &[], false) {
                assert!(workers.get(process).unwrap().stage().is_free(), "seed {seed}");
            }
        }
    }
}
