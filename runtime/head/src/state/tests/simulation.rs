//! Random events from a seed, and what must hold after each of them.

use std::collections::BTreeSet;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

/// What the nodes hold according to what they were told, and not to what the state believes.
#[derive(Default)]
struct Shadow {
    /// Leases that a node was told to start and has not reported as over.
    live: BTreeMap<LeaseId, (NodeId, LeaseStart)>,
    ready: BTreeSet<LeaseId>,
    owned: BTreeMap<LeaseId, ProcessId>,
    /// How many of its executions wait.
    waiting: BTreeMap<LeaseId, u64>,
    /// Told to end by the head.
    ending: BTreeSet<LeaseId>,
    /// Nobody went on after a wait yet, so that nothing may be over-committed.
    balanced: bool,
}

fn totals() -> [(u64, ResourceSet); 3] {
    [(1, cpus(4.0)), (2, cpus(2.0).with(GPU, amount(2.0))), (3, cpus(8.0).with(GPU, amount(4.0)))]
}

impl Shadow {
    fn take_in(&mut self, bench: &mut Bench) {
        for (node, message) in bench.ordered.drain(..) {
            match message {
                NodeMessage::StartLease(start) => {
                    self.live.insert(start.lease, (node, *start));
                }
                NodeMessage::EndLease { lease, .. } => {
                    self.ending.insert(lease);
                }
                _ => {}
            }
        }
        for (process, event) in bench.told.drain(..) {
            if let HeadEvent::Granted { lease, .. } = event {
                self.owned.insert(lease, process);
            }
        }
    }

    /// No device is held beyond one, by whoever has not reported its end; and no CPU either, but by those
    /// that wait, were returned, or went on.
    fn check(&self, seed: u64) {
        for (node, total) in totals() {
            let here = || self.live.values().filter(|(on, _)| *on == NodeId(node));
            let mut devices: BTreeMap<u32, Amount> = BTreeMap::new();
            for (device, amount) in here().flat_map(|(_, start)| &start.gpus) {
                let held = devices.entry(*device).or_default();
                *held = *held + *amount;
                assert!(*held <= Amount::ONE, "seed {seed}: device {device} of node {node} was granted twice");
                assert!(i64::from(*device) < total.get(GPU).units() / 10_000, "seed {seed}: no device {device}");
            }
            for (_, start) in here() {
                let sum: i64 = start.gpus.iter().map(|(_, amount)| amount.units()).sum();
                assert_eq!(sum, start.resources.get(GPU).units(), "seed {seed}: devices are not what was asked for");
            }
            if self.balanced {
                let busy = here().filter(|(_, start)| {
                    !self.ending.contains(&start.lease) && !self.waiting.contains_key(&start.lease)
                });
                let cpus: i64 = busy.map(|(_, start)| start.resources.get(CPU).units()).sum();
                assert!(cpus <= total.get(CPU).units(), "seed {seed}: the CPUs of node {node} were granted twice");
            }
        }
    }
}

/// Runs `steps` random events, ends everything, and checks that everything is there again.
fn simulate(seed: u64, steps: usize) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bench = Bench::empty();
    let mut shadow = Shadow { balanced: true, ..Shadow::default() };
    let drivers: Vec<ProcessId> = (1..=3).map(ProcessId).collect();
    for (id, total) in totals() {
        bench.node(id, total);
    }
    for driver in &drivers {
        bench.driver(*driver);
    }
    let shapes = [cpus(1.0), cpus(2.0), gpus(0.5), gpus(0.3), gpus(1.0), cpus(1.0).with(GPU, amount(2.0))];
    let mut actors = 0;
    for _ in 0..steps {
        bench.now += random.random_range(0..40);
        let driver = drivers[random.random_range(0..drivers.len())];
        let pick =
            |random: &mut StdRng, of: Vec<LeaseId>| (!of.is_empty()).then(|| of[random.random_range(0..of.len())]);
        let live: Vec<LeaseId> = shadow.live.keys().copied().collect();
        match random.random_range(0..13) {
            0..=2 => {
                let wanted = random.random_range(0..5);
                let shape = shapes[random.random_range(0..shapes.len())].clone();
                bench.demand(driver, shape, wanted);
            }
            3 | 4 => {
                let starting = live.into_iter().filter(|lease| !shadow.ready.contains(lease)).collect();
                if let Some(lease) = pick(&mut random, starting) {
                    shadow.ready.insert(lease);
                    bench.step(Event::Ready(lease, address(worker_of(lease)), 7));
                    if let LeaseHolder::Actor(spec, life) = &shadow.live[&lease].1.holder {
                        bench.step(Event::ActorStarted(spec.id, *life, Ok(())));
                    }
                }
            }
            5 => {
                let starting = live.into_iter().filter(|lease| !shadow.ready.contains(lease)).collect();
                if let Some(lease) = pick(&mut random, starting) {
                    shadow.live.remove(&lease);
                    bench.step(Event::Failed(lease, Error::NoSession));
                }
            }
            6 => {
                let owned = shadow.owned.keys().copied().collect();
                if let Some(lease) = pick(&mut random, owned) {
                    bench.step(Event::Returned(shadow.owned[&lease], lease));
                }
            }
            7 => {
                let ending = live.into_iter().filter(|lease| shadow.ending.contains(lease)).collect();
                if let Some(lease) = pick(&mut random, ending) {
                    shadow.live.remove(&lease);
                    bench.step(Event::Ended(lease));
                }
            }
            8 => {
                let ready = live.into_iter().filter(|lease| shadow.ready.contains(lease)).collect();
                if let Some(lease) = pick(&mut random, ready) {
                    shadow.live.remove(&lease);
                    bench.crash(lease);
                }
            }
            9 => {
                let working = live.into_iter().filter(|id| shadow.ready.contains(id) && !shadow.ending.contains(id));
                let working = working.collect();
                if let Some(lease) = pick(&mut random, working) {
                    let count = shadow.waiting.entry(lease).or_default();
                    *count += 1;
                    bench.wait(worker_of(lease), lease, *count);
                }
            }
            10 => {
                let waiting = live.into_iter().filter(|lease| shadow.waiting.contains_key(lease)).collect();
                if let Some(lease) = pick(&mut random, waiting) {
                    let count = shadow.waiting[&lease];
                    bench.resume(worker_of(lease), lease, count);
                    if count > 1 {
                        shadow.waiting.insert(lease, count - 1);
                    } else {
                        shadow.waiting.remove(&lease);
                        shadow.balanced = false;
                    }
                }
            }
            11 => {
                actors += 1;
                let holds = shapes[random.random_range(0..shapes.len())].clone();
                let max_restarts = random.random_range(0..3);
                let _ = bench.create(ActorSpec { holds, max_restarts, ..actor_of(driver, actors) }, false);
            }
            _ => match random.random_range(0..3) {
                0 => bench.step(Event::Kill(ActorId(random.random_range(0..=actors)), random.random())),
                1 => bench.step(Event::Terminate(ActorId(random.random_range(0..=actors)), "test".into())),
                _ => bench.step(Event::Tick),
            },
        }
        shadow.take_in(&mut bench);
        shadow.check(seed);
    }
    for driver in drivers {
        bench.step(Event::ProcessLost(driver, Some(JobId(driver.0))));
    }
    shadow.take_in(&mut bench);
    for lease in shadow.live.keys() {
        assert!(shadow.ending.contains(lease), "seed {seed}: nobody told the node to end {lease}");
        bench.step(Event::Ended(*lease));
    }
    let picture = bench.state.picture();
    for ((id, total), node) in totals().into_iter().zip(&picture.nodes) {
        assert_eq!(node.available, total, "seed {seed}: node {id}");
        assert_eq!(node.leases, 0, "seed {seed}: node {id}");
        assert!(
            bench.state.nodes.get(NodeId(id)).is_some_and(|node| node.pool.has_room(&total)),
            "seed {seed}: devices"
        );
    }
    assert!(picture.jobs.is_empty() && picture.actors.is_empty() && picture.pending.is_empty(), "seed {seed}");
    assert!(bench.state.next_tick().is_none(), "seed {seed}: an idle head wakes up");
}

#[test]
fn nothing_is_granted_twice_and_everything_comes_back() {
    for seed in 0..300 {
        simulate(seed, 400);
    }
}

#[test]
fn the_same_seed_gives_the_same_actions() {
    let run = || {
        let mut bench = Bench::new(cpus(4.0));
        for i in 0..50 {
            bench.demand(if i % 2 == 0 { DRIVER } else { OTHER }, cpus(1.0), i % 5);
            bench.tick(25);
            bench.ready();
        }
        format!("{:?} {:?}", bench.ordered, bench.told)
    };
    assert_eq!(run(), run());
}
