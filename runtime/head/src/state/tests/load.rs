//! Long loads in virtual time: who gets how much, and who waits for how long.

use super::*;

/// What a process does, again and again.
#[derive(Clone)]
enum Habit {
    /// Has endless tasks of some shapes, and keeps its leases as long as it may.
    Streams(Vec<Shape>),
    /// Has one task at a time, and gives its lease back after it.
    Loops(Shape),
    /// The same, each time of another shape.
    EverNew(ResourceSet),
    /// Makes an actor, and ends it.
    Actors(ResourceSet),
    /// Makes a placement group of one bundle, and removes it.
    Groups(ResourceSet),
}

struct Process {
    habit: Habit,
    /// Of one task, or of one life.
    millis: Millis,
    done: u64,
    /// Milliseconds that its tasks used, by what they hold.
    used: i64,
    shape: Option<Shape>,
}

enum Next {
    TaskDone(ProcessId, LeaseId),
    ActorDone(ProcessId, ActorId, LeaseId),
    GroupIsOver(ProcessId, u64),
}

struct Load {
    bench: Bench,
    processes: BTreeMap<ProcessId, Process>,
    /// Leases with the shape under which they were granted, and whether they are to be given back.
    held: BTreeMap<LeaseId, (ProcessId, Shape, bool)>,
    later: BTreeMap<(Millis, u64), Next>,
    ids: u64,
    next_tick: Option<Millis>,
    placed: BTreeMap<PlacementGroupId, Millis>,
}

impl Load {
    fn on(nodes: u64, cpus_each: f64) -> Load {
        let mut bench = Bench::empty();
        for id in 1..=nodes {
            bench.node(id, cpus(cpus_each));
        }
        let (processes, held, later) = Default::default();
        Load { bench, processes, held, later, ids: 1_000, next_tick: None, placed: BTreeMap::new() }
    }

    fn id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// A driver, and a job of its own.
    fn driver(&mut self, id: u64, habit: Habit, millis: Millis) {
        self.bench.driver(ProcessId(id));
        self.process(id, habit, millis);
    }

    fn process(&mut self, id: u64, habit: Habit, millis: Millis) {
        self.processes.insert(ProcessId(id), Process { habit, millis, done: 0, used: 0, shape: None });
        self.begin(ProcessId(id));
    }

    fn begin(&mut self, process: ProcessId) {
        let id = self.id();
        let known = self.processes.get_mut(&process).unwrap();
        match known.habit.clone() {
            Habit::Streams(shapes) => {
                for shape in shapes {
                    self.bench.wants(process, shape, 64);
                }
            }
            Habit::Loops(shape) => {
                known.shape = Some(shape.clone());
                self.bench.wants(process, shape, 1);
            }
            Habit::EverNew(resources) => {
                let shape = Shape { patient: true, ..shape(resources.with("own", Amount::from_units(id as i64))) };
                known.shape = Some(shape.clone());
                self.bench.wants(process, shape, 1);
            }
            Habit::Actors(holds) => {
                let spec = ActorSpec { holds, placement: shape(ResourceSet::new()), ..actor_of(process, id) };
                self.bench.create(spec, false).unwrap();
            }
            Habit::Groups(bundle) => {
                self.bench.group(group_of(process, id, PlacementStrategy::Pack, &[bundle])).unwrap();
            }
        }
        self.hear();
    }

    fn after(&mut self, millis: Millis, next: Next) {
        let (at, id) = (self.bench.now + millis, self.id());
        self.later.insert((at, id), next);
    }

    /// Everybody does what the head said.
    fn hear(&mut self) {
        loop {
            let starts = self.bench.starts();
            for start in &starts {
                self.bench.says(
                    NodeId(1),
                    HeadMessage::LeaseReady { lease: start.lease, worker: address(worker_of(start.lease)), pid: 7 },
                );
                if let LeaseHolder::Actor(spec, life, _) = &start.holder {
                    let (process, actor, lease) = (spec.owner.process, spec.id, start.lease);
                    self.bench
                        .says(NodeId(1), HeadMessage::ActorStarted { actor, incarnation: *life, outcome: Ok(()) });
                    let millis = self.processes[&process].millis;
                    self.after(millis, Next::ActorDone(process, actor, lease));
                }
            }
            let told = std::mem::take(&mut self.bench.told);
            self.bench.ordered.clear();
            if starts.is_empty() && told.is_empty() {
                break;
            }
            for (process, event) in told {
                match event {
                    HeadEvent::Granted { shape, lease, .. } => {
                        self.held.insert(lease, (process, (*shape).clone(), false));
                        let millis = self.processes[&process].millis;
                        self.after(millis, Next::TaskDone(process, lease));
                    }
                    HeadEvent::Recall(lease) => {
                        if let Some(held) = self.held.get_mut(&lease) {
                            held.2 = true;
                        }
                    }
                    HeadEvent::PlacementGroup { group, state: PlacementGroupState::Placed { .. } } => {
                        self.placed.insert(group, self.bench.now);
                        if self.processes.get(&process).is_some_and(|known| matches!(known.habit, Habit::Groups(_))) {
                            let millis = self.processes[&process].millis;
                            self.after(millis, Next::GroupIsOver(process, group.0));
                        }
                    }
                    HeadEvent::Refused { error, .. } => panic!("{process} was refused: {error}"),
                    _ => {}
                }
            }
        }
        let now = self.bench.now;
        self.next_tick = self.bench.state.next_tick().map(|after| now + after).into_iter().chain(self.next_tick).min();
    }

    fn happen(&mut self, next: Next) {
        match next {
            Next::TaskDone(process, lease) => {
                let (_, shape, is_recalled) = self.held[&lease].clone();
                let known = self.processes.get_mut(&process).unwrap();
                known.done += 1;
                known.used += shape.resources.get(CPU).units() * known.millis as i64;
                let streams = matches!(known.habit, Habit::Streams(_));
                if streams && !is_recalled {
                    let millis = known.millis;
                    return self.after(millis, Next::TaskDone(process, lease));
                }
                self.held.remove(&lease);
                self.bench.return_and_end(process, lease);
                if streams {
                    self.bench.wants(process, shape, 64);
                } else {
                    self.bench.wants(process, shape, 0);
                    self.begin(process);
                }
            }
            Next::ActorDone(process, actor, lease) => {
                self.bench.says(DRIVER, HeadMessage::KillActor { actor, may_restart: false });
                self.bench.says(NodeId(1), HeadMessage::LeaseEnded(lease));
                self.processes.get_mut(&process).unwrap().done += 1;
                self.begin(process);
            }
            Next::GroupIsOver(process, group) => {
                self.bench.remove_group(group);
                self.processes.get_mut(&process).unwrap().done += 1;
                self.begin(process);
            }
        }
        self.hear();
    }

    /// Goes on until then, or until something is so.
    fn until(&mut self, end: Millis, is_so: impl Fn(&Load) -> bool) -> bool {
        while !is_so(self) {
            let next = self.later.keys().next().map(|(at, _)| *at);
            let Some(at) = next.into_iter().chain(self.next_tick).min().filter(|at| *at <= end) else {
                self.bench.now = end;
                return is_so(self);
            };
            self.bench.now = self.bench.now.max(at);
            if self.next_tick == Some(at) {
                self.next_tick = None;
                self.bench.step(Event::Tick);
                self.hear();
            } else if let Some((_, next)) = self.later.pop_first() {
                self.happen(next);
            }
        }
        true
    }

    fn for_some_time(&mut self, millis: Millis) {
        let end = self.bench.now + millis;
        self.until(end, |_| false);
    }

    fn used(&self, process: u64) -> i64 {
        self.processes[&ProcessId(process)].used
    }

    fn forget_what_was_used(&mut self) {
        for process in self.processes.values_mut() {
            process.used = 0;
        }
    }
}

/// Habits of sixteen drivers that leave no room for long, and never all of it at once.
fn crowds() -> Vec<(&'static str, Habit)> {
    let half = cpus(0.5);
    vec![
        ("tasks one after the other", Habit::Loops(shape(half.clone()))),
        ("tasks of ever new shapes", Habit::EverNew(half.clone())),
        ("short actors", Habit::Actors(half.clone())),
        ("short groups", Habit::Groups(half.clone())),
        ("streams", Habit::Streams(vec![shape(half)])),
    ]
}

fn crowd(habit: &Habit) -> Load {
    let mut load = Load::on(1, 4.0);
    let all = cpus(4.0).with("own", amount(1_000_000.0));
    load.bench.step(Event::NodeLost(NodeId(1), "test".into()));
    load.bench.node(2, all);
    for driver in 0..16 {
        load.driver(10 + driver, habit.clone(), 60 + driver);
    }
    load.for_some_time(2_000);
    load
}

#[test]
fn a_large_task_is_served_soon_whatever_small_things_come_and_go() {
    for (what, habit) in crowds() {
        let mut load = crowd(&habit);
        load.driver(50, Habit::Loops(shape(cpus(4.0))), 100);
        let begun = load.bench.now;
        let served = load.until(begun + 3_000, |load| load.used(50) > 0);
        assert!(served, "beside {what}, a task of 4 CPUs got none in 3 s");
        load.bench.state.audit_all().unwrap();
    }
}

#[test]
fn a_large_group_or_actor_is_placed_soon_whatever_small_things_come_and_go() {
    for (what, habit) in crowds() {
        let mut load = crowd(&habit);
        load.bench.driver(ProcessId(50));
        let begun = load.bench.now;
        load.bench.group(group_of(ProcessId(50), 5, PlacementStrategy::Pack, &[cpus(4.0)])).unwrap();
        load.hear();
        let placed = load.until(begun + 3_000, |load| load.placed.contains_key(&PlacementGroupId(5)));
        assert!(placed, "beside {what}, a group of 4 CPUs got none in 3 s");
        load.bench.remove_group(5);
        load.driver(51, Habit::Actors(cpus(4.0)), 100);
        let begun = load.bench.now;
        let placed = load.until(begun + 3_000, |load| load.processes[&ProcessId(51)].done > 0);
        assert!(placed, "beside {what}, an actor of 4 CPUs got none in 3 s");
    }
}

#[test]
fn a_gang_as_large_as_the_cluster_gets_it_beside_any_number_of_streams() {
    for streams in [1, 2, 3, 6] {
        let mut load = Load::on(4, 4.0);
        for driver in 0..streams {
            load.driver(10 + driver, Habit::Streams(vec![shape(cpus(1.0))]), 50);
        }
        load.for_some_time(2_000);
        load.bench.driver(ProcessId(50));
        let begun = load.bench.now;
        load.bench.group(group_of(ProcessId(50), 5, PlacementStrategy::StrictSpread, &vec![cpus(4.0); 4])).unwrap();
        load.hear();
        let placed = load.until(begun + 1_500, |load| load.placed.contains_key(&PlacementGroupId(5)));
        assert!(placed, "beside {streams} streams, it was not placed in 1.5 s");
    }
}

#[test]
fn room_that_is_kept_does_not_keep_back_what_the_waiter_itself_waits_for() {
    let mut bench = Bench::new(cpus(2.0).with("license", amount(1.0)));
    // A parent holds the license, and waits for its child, which needs both CPUs that are left.
    bench.demand(DRIVER, cpus(1.0).with("license", amount(1.0)), 1);
    let parent = bench.ready()[0];
    bench.demand(OTHER, cpus(2.0).with("license", amount(1.0)), 1);
    bench.tick(1_500);
    bench.tick(25);
    let worker = worker_of(parent);
    bench.step(Event::ProcessConnected(worker));
    bench.wait(worker, parent, 1);
    bench.demand(worker, cpus(2.0), 1);
    for _ in 0..1_000 {
        if !bench.starts().is_empty() {
            return;
        }
        bench.tick(25);
    }
    panic!("the child of somebody in the way was held back for ever");
}

#[test]
fn of_two_equal_jobs_each_gets_half_whatever_its_shapes() {
    let many = |count: u32| -> Vec<Shape> {
        (0..count).map(|index| shape(ResourceSet::cpus(Amount::from_units(10_000 - i64::from(index))))).collect()
    };
    let others: Vec<(&str, Vec<Shape>)> = vec![
        ("32 shapes", many(32)),
        ("larger tasks", vec![shape(cpus(4.0))]),
        ("smaller tasks", vec![shape(cpus(0.5))]),
        ("two sizes", vec![shape(cpus(2.0)), shape(cpus(1.0))]),
    ];
    for (what, shapes) in others {
        let mut load = Load::on(4, 4.0);
        load.driver(10, Habit::Streams(vec![shape(cpus(1.0))]), 50);
        load.driver(11, Habit::Streams(shapes), 50);
        load.for_some_time(3_000);
        load.forget_what_was_used();
        load.for_some_time(20_000);
        let (one, other) = (load.used(10), load.used(11));
        let part = 100 * one / (one + other);
        assert!((45..=55).contains(&part), "a job of one shape got {part} % beside one of {what}");
    }
}

#[test]
fn a_job_with_many_submitters_gets_no_more_than_one_with_one() {
    let mut load = Load::on(4, 4.0);
    load.driver(10, Habit::Streams(vec![shape(cpus(1.0))]), 50);
    load.bench.driver(ProcessId(11));
    for worker in 100..116 {
        // A worker process of job 11.
        load.bench.step(Event::ProcessConnected(ProcessId(worker)));
        load.bench.state.worker_known(ProcessId(worker), JobId(11), NodeId(1));
        load.process(worker, Habit::Streams(vec![shape(cpus(1.0))]), 50);
    }
    load.for_some_time(3_000);
    load.forget_what_was_used();
    load.for_some_time(20_000);
    let (one, others) = (load.used(10), (100..116).map(|worker| load.used(worker)).sum::<i64>());
    let part = 100 * one / (one + others);
    assert!((45..=55).contains(&part), "the plain driver got {part} %");
}

#[test]
fn a_new_shape_waits_for_idle_leases_of_others_no_longer_however_many_wait() {
    for waiting in [300, 1_000, 10_000] {
        let mut bench = Bench::empty();
        bench.node(1, cpus(1.0));
        bench.driver(DRIVER);
        bench.driver(OTHER);
        for index in 0..waiting {
            let large = ResourceSet::cpus(Amount::from_units(20_000 + index));
            bench.wants(OTHER, Shape { patient: true, ..shape(large) }, 1);
        }
        bench.tick(1);
        // Tasks one after the other, each of a new shape; its lease stays idle with its owner until it is recalled.
        let mut idle: Vec<LeaseId> = Vec::new();
        let mut waits = Vec::new();
        for index in 0..100 {
            let new = shape(ResourceSet::cpus(Amount::from_units(1_000 - index)));
            bench.wants(DRIVER, new, 1);
            let begun = bench.now;
            let lease = loop {
                for lease in bench.recalled(DRIVER) {
                    idle.retain(|other| *other != lease);
                    bench.return_and_end(DRIVER, lease);
                }
                if let Some(lease) = bench.ready().pop() {
                    break lease;
                }
                bench.now += 1;
                if bench.now.is_multiple_of(TICK_MS) {
                    bench.step(Event::Tick);
                }
                assert!(bench.now < begun + 1_000, "a new shape waits for a second");
            };
            idle.push(lease);
            waits.push(bench.now - begun);
            // The task takes some time.
            bench.now += 4;
        }
        waits.sort_unstable();
        assert!(waits[98] <= 50, "among {waiting} that wait, a new shape waits for {waits:?} ms");
    }
}

/// How often the head looks at those who wait.
const TICK_MS: Millis = 25;

#[test]
fn while_nothing_changes_nobody_is_tried_again() {
    let mut bench = Bench::new(cpus(1.0));
    for index in 0..10_000 {
        let large = ResourceSet::cpus(Amount::from_units(20_000 + index));
        bench.wants(OTHER, Shape { patient: true, ..shape(large) }, 1);
    }
    bench.demand(DRIVER, cpus(1.0), 1);
    let lease = bench.ready()[0];
    bench.return_and_end(DRIVER, lease);
    for _ in 0..200 {
        bench.tick(25);
    }
    let before = bench.state.nodes.index.questions();
    for _ in 0..100 {
        bench.tick(25);
    }
    assert_eq!(bench.state.nodes.index.questions(), before);
}
