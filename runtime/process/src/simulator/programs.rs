//! The random programs: of drivers, tasks and actors.
//!
//! Whatever a program holds lies in its bag. Nobody can wait in a circle: a program waits for what was submitted before it or
//! by itself, and nobody but a driver for what an actor has kept.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Outcome, Outputs, PlacementGroupSpec, PlacementStrategy, Shape, TaskSpec};
use wingbeat_core::{Amount, FunctionId, PlacementGroupId, ResourceSet};

use super::execution::{Asked, Ended, Execution, Running};
use super::failing::{self, Failing};
use super::shapes::{self, Reserved};
use super::side::address;
use super::site::{How, Site, Stream, Submitted, failed};
use super::size;
use super::value::{Kind, Plan, Ref, refs_in};

/// How deep tasks of drivers may nest.
const DEPTH: u64 = 2;

/// What becomes of a program that is cancelled while it waits.
pub(super) fn cancelled(running: &Running) -> Ended {
    let task = running.execution.as_ref().map(|execution| execution.spec.id.to_string()).unwrap_or_default();
    failed(Error::Cancelled { task })
}

/// How many items a stream of this plan has.
fn items_of(plan: &Plan) -> u32 {
    (plan.seed % 7) as u32
}

/// A program at work.
struct Work<'a> {
    site: &'a Site,
    random: StdRng,
    depth: u64,
    bag: Vec<Ref>,
    is_driver: bool,
    /// What it has reserved.
    reserved: Option<Reserved>,
    /// Whether it has made an actor that holds a device.
    has_holder: bool,
}

/// A driver's program: it waits for all that it holds at last.
pub(super) async fn driver(site: Site, seed: u64) -> Ended {
    let depth = DEPTH + u64::from(site.shared.config.shares_much());
    let mut work = Work::new(&site, seed, depth, Vec::new(), true);
    let steps = work.random.random_range(8..40);
    for _ in 0..steps {
        let _ = work.step().await;
        if let Some(size) = site.shared.config.large()
            && work.chance(size::BURST_EVERY)
        {
            let _ = work.do_much(size.burst()).await;
        }
    }
    let _ = work.read_all().await;
    work.give_back().await;
    (Outcome::StreamEnded(0), Vec::new())
}

/// The constructor of an actor, which keeps its arguments.
pub(super) async fn constructor(site: Site, actor: Arc<ActorSpec>) -> Ended {
    match site.bring_in(&actor.args, true).await {
        Ok(incoming) => {
            let kept = site.refs(&Plan::read(&incoming[0].bytes).refs);
            site.process.kept.borrow_mut().extend(kept.into_iter().map(|held| (0, held)));
            (Outcome::StreamEnded(0), Vec::new())
        }
        Err(error) => failed(error),
    }
}

/// An attempt at a task or call, from its arguments to its result.
pub(super) async fn attempt(site: Site) -> Ended {
    let Some(execution) = site.execution.clone() else { return failed(Error::NoSession) };
    run(&site, &execution).await.unwrap_or_else(failed)
}

async fn run(site: &Site, execution: &Execution) -> Result<Ended, Error> {
    let spec = &execution.spec;
    let incoming = site.bring_in(&spec.args, execution.place.is_some()).await?;
    if execution.is_cancelled.get() {
        return Err(Error::Cancelled { task: execution.name.clone() });
    }
    execution.has_begun.set(true);
    let is_first = site.shared.attempts.borrow_mut().insert((spec.id, spec.attempt));
    assert!(is_first, "attempt {} at {} runs twice", spec.attempt, spec.id);
    let plan = Plan::read(&incoming[0].bytes);
    assert_eq!(plan.expects.len() + 1, incoming.len(), "{} has other arguments than were given", spec.id);
    let mut bag = site.refs(&plan.refs);
    for (value, id) in incoming[1..].iter().zip(&plan.expects) {
        bag.extend(site.refs(&refs_in(&value.bytes, *id)));
    }
    drop(incoming);
    site.shared.trace(|| format!("{} begins attempt {} at {} {plan:?}", site.process.id, spec.attempt, spec.id));
    let mut work = Work::new(site, plan.seed, plan.depth, bag, false);
    if let Some(actor) = execution.place.as_ref().map(|place| place.actor) {
        site.check_order(actor, &plan, spec);
        return work.call(&plan, spec).await;
    }
    site.shared.report.borrow_mut().tasks += 1;
    if let Outputs::Stream { ahead } = spec.outputs {
        return work.stream(&plan, spec, ahead).await;
    }
    if plan.kind == Kind::Fatal {
        work.pause().await;
        site.process.check_fatal(spec.id, &site.shared);
        site.shared.ends.borrow_mut().push(site.process.id);
        std::future::pending::<()>().await;
    }
    if spec.attempt < failing::failures(&plan) {
        work.pause().await;
        return Err(failing::failure(&plan, spec.id));
    }
    let shares_much = spec.shares_process && site.shared.config.shares_much() && plan.depth > 0;
    let steps = if shares_much { work.random.random_range(2..5) } else { work.random.random_range(0..5) };
    if plan.kind == Kind::Busy {
        work.be_busy(steps).await;
        return Ok(work.results(spec));
    }
    for _ in 0..steps {
        match shares_much && work.chance(2) {
            true => work.submit_and_perhaps_wait().await?,
            false => work.step().await?,
        }
    }
    Ok(work.results(spec))
}

impl<'a> Work<'a> {
    fn new(site: &'a Site, seed: u64, depth: u64, bag: Vec<Ref>, is_driver: bool) -> Work<'a> {
        Work { site, random: StdRng::seed_from_u64(seed), depth, bag, is_driver, reserved: None, has_holder: false }
    }

    fn chance(&mut self, of: u32) -> bool {
        self.random.random_range(0..of) == 0
    }

    /// Some of the bag, at most so many.
    fn some(&mut self, most: usize) -> Vec<Ref> {
        let count = self.random.random_range(0..=most);
        (0..count).filter_map(|_| self.one(|_| true)).collect()
    }

    fn one(&mut self, of: impl Fn(&Ref) -> bool) -> Option<Ref> {
        let fitting: Vec<&Ref> = self.bag.iter().filter(|held| of(held)).collect();
        match fitting.len() {
            0 => None,
            count => Some(fitting[self.random.random_range(0..count)].clone()),
        }
    }

    /// A value of the bag to wait for.
    fn value(&mut self) -> Option<Ref> {
        self.one(|held| held.actor.is_none())
    }

    fn objects(&mut self, most: usize) -> Vec<Ref> {
        let count = self.random.random_range(0..=most);
        (0..count).filter_map(|_| self.value()).collect()
    }

    async fn pause(&mut self) {
        let ms = match self.random.random_range(0..200) {
            // Long enough that whoever waits for it may have given it up.
            0 | 1 => self.random.random_range(3_000..30_000),
            2..=18 => self.random.random_range(40..400),
            _ => self.random.random_range(0..20),
        };
        self.site.sleep(ms).await;
    }

    /// Does one thing. An error is one that it does not go on after.
    async fn step(&mut self) -> Result<(), Error> {
        match self.random.random_range(0..24) {
            0..=2 => self.pause().await,
            3 | 4 => {
                let (refs, is_stored) = (self.some(2), self.chance(2));
                self.put(&refs, is_stored);
            }
            5..=10 if self.depth > 0 => self.submit_and_perhaps_wait().await?,
            11..=14 => {
                if let Some(value) = self.value() {
                    self.read(&value).await?;
                }
            }
            15 | 16 if !self.bag.is_empty() => {
                let at = self.random.random_range(0..self.bag.len());
                drop(self.bag.swap_remove(at));
            }
            17 if self.chance(2) => {
                if let Some(value) = self.value() {
                    let force = self.site.shared.config.faults && self.chance(4);
                    self.site.cancel(&value.handle, force);
                }
            }
            17 if self.site.shared.config.faults => {
                if let Some(actor) = self.one(|held| held.actor.is_some()) {
                    match self.random.random_range(0..6) {
                        0 => self.site.terminate_actor(&actor),
                        1 => self.site.kill_actor(&actor, false),
                        _ => self.site.kill_actor(&actor, true),
                    }
                }
            }
            18 | 19 if self.depth > 0 => self.consume().await?,
            20 if self.is_driver && self.chance(3) => match self.reserved {
                None => self.reserve().await,
                Some(_) => self.give_back().await,
            },
            20 if self.is_driver => self.make_actor().await?,
            21..=23 => self.call_actor().await?,
            _ => {}
        }
        Ok(())
    }

    fn plan(&mut self) -> Plan {
        Plan {
            seed: self.random.random_range(0..u64::MAX),
            depth: self.depth.saturating_sub(1),
            order: self.site.shared.id(),
            ..Plan::default()
        }
    }

    /// What shares its process is there for this: to submit, and to wait for some of it.
    async fn submit_and_perhaps_wait(&mut self) -> Result<(), Error> {
        let shares = self.site.execution.as_ref().is_some_and(|execution| execution.spec.shares_process);
        if !shares || self.chance(3) {
            self.submit();
            return Ok(());
        }
        let before = self.bag.len();
        for _ in 0..self.random.random_range(1..5) {
            self.submit();
        }
        let made: Vec<Ref> = self.bag[before..].to_vec();
        if self.chance(8) {
            let (any, force) = (self.random.random_range(0..made.len()), self.chance(2));
            self.pause().await;
            // One that runs elsewhere ends its process.
            self.site.cancel(&made[any].handle, force && self.site.shared.config.faults);
        }
        let waits_for = self.random.random_range(1..=made.len());
        for value in made.iter().rev().take(waits_for) {
            self.read(value).await?;
        }
        if self.chance(2) {
            self.bag.truncate(before);
        }
        Ok(())
    }

    /// How a task runs: which function, where, and whether it shares its process while it waits. That may be no task which runs at most
    /// once.
    fn how(&mut self, within: Option<Reserved>, retries: u32, plan: &Plan) -> How {
        let (retry_on, is_retried) = failing::retry_on(&mut self.random, plan);
        let attempts = failing::failures(plan);
        let failing = (attempts > 0).then_some(Failing { is_retried, retries, attempts });
        let limit = self.chance(30).then(|| self.random.random_range(1..100));
        let (function, shape, shares_process) = self.where_it_runs(within, retries);
        How { function, shape, shares_process, retry_on, failing, limit }
    }

    fn where_it_runs(&mut self, within: Option<Reserved>, retries: u32) -> (FunctionId, Shape, bool) {
        let function = FunctionId(10 + self.random.random_range(0..8));
        let mostly = self.site.shared.config.shares_much();
        if within.is_none() && retries > 0 && self.random.random_range(0..8) < if mostly { 7 } else { 3 } {
            return (function, Shape::of(ResourceSet::cpus(Amount::ONE)), true);
        }
        (function, shapes::of_waiting(&self.site.shared, &mut self.random, within), false)
    }

    fn submit(&mut self) {
        let (plan, refs, objects) = (self.plan(), self.some(2), self.objects(2));
        let outputs = Outputs::Fixed(self.random.random_range(1..3));
        let retries = self.random.random_range(u32::from(self.site.shared.config.shares_much())..4);
        let within = self.reserved.filter(|_| self.chance(2));
        let (kind, how) = match self.chance(4) {
            true => {
                let shape = shapes::of_busy(&mut self.random, within);
                (Kind::Busy, How { shape, shares_process: false, ..self.how(within, retries, &plan) })
            }
            false if self.site.shared.config.faults && self.chance(60) => {
                (Kind::Fatal, self.how(within, retries, &plan))
            }
            false => (Kind::Work, self.how(within, retries, &plan)),
        };
        let args = Site::arguments(Plan { kind, ..plan }, &refs, &objects);
        if let Submitted::Objects(refs) = self.site.submit(args, outputs, retries, how) {
            self.bag.extend(refs);
        }
    }

    /// Submits many tasks at once, or makes a tenth as many actors, and keeps some of what they make.
    async fn do_much(&mut self, most: u64) -> Result<(), Error> {
        let (count, kept) = (self.random.random_range(0..=most), self.bag.len() + 24);
        let is_of_actors = self.chance(3);
        for _ in 0..if is_of_actors { count.div_ceil(10) } else { count } {
            if is_of_actors {
                self.make_actor().await?;
                self.call_actor().await?;
            } else {
                self.submit();
            }
            self.bag.truncate(kept);
        }
        Ok(())
    }

    /// Reserves a CPU, and perhaps a device.
    async fn reserve(&mut self) {
        let (group, has_device) = (PlacementGroupId(self.site.shared.id()), self.chance(2));
        let strategy = [
            PlacementStrategy::Pack,
            PlacementStrategy::Spread,
            PlacementStrategy::StrictPack,
            PlacementStrategy::StrictSpread,
        ][self.random.random_range(0..4)];
        let spec = PlacementGroupSpec {
            id: group,
            job: self.site.process.job,
            name: None,
            strategy,
            bundles: shapes::bundles(has_device),
            detached: false,
            captures_children: self.chance(2),
            patient: true,
            owner: address(self.site.process.id),
        };
        if self.site.ask_head(Asked::Reserve(Box::new(spec))).await.is_ok() {
            self.reserved = Some(Reserved { group, has_device });
        }
    }

    async fn give_back(&mut self) {
        if let Some(Reserved { group, .. }) = self.reserved.take() {
            let _ = self.site.ask_head(Asked::GiveBack(group)).await;
        }
    }

    fn put(&mut self, refs: &[Ref], is_stored: bool) {
        // Without room there is none to keep.
        self.bag.extend(self.site.put(refs, is_stored).ok());
    }

    /// What waits for nobody.
    async fn be_busy(&mut self, steps: u32) {
        for _ in 0..steps {
            match self.random.random_range(0..3) {
                0 => self.pause().await,
                // What it owns itself would end with its process, which holds devices.
                1 if self.site.shared.config.faults => {
                    let (refs, is_stored) = (self.some(2), self.chance(2));
                    self.put(&refs, is_stored);
                }
                _ => drop(self.bag.pop()),
            }
        }
    }

    /// Waits for a value, and takes the refs in it.
    async fn read(&mut self, value: &Ref) -> Result<(), Error> {
        match self.site.get(&value.handle).await {
            Ok(refs) => {
                self.bag.extend(refs.into_iter().take(4));
                self.bag.truncate(24);
                Ok(())
            }
            Err(error) => {
                self.site.check_error(value.handle.id(), &error);
                if self.chance(2) { Err(error) } else { Ok(()) }
            }
        }
    }

    async fn read_all(&mut self) -> Result<(), Error> {
        while let Some(held) = self.bag.pop() {
            if held.actor.is_none() {
                match self.site.get(&held.handle).await {
                    // What is in them is looked at too, down to some depth.
                    Ok(refs) if self.bag.len() < 40 && !self.chance(4) => self.bag.extend(refs),
                    Ok(_) => {}
                    Err(error) => self.site.check_error(held.handle.id(), &error),
                }
            }
        }
        Ok(())
    }

    /// Consumes a stream, to its end or not.
    async fn consume(&mut self) -> Result<(), Error> {
        let (plan, refs) = (self.plan(), self.some(2));
        let ahead = self.random.random_range(1..4);
        let (wants, retries) = (self.random.random_range(0..12), self.random.random_range(0..3));
        let count = items_of(&plan);
        let within = self.reserved.filter(|_| self.chance(2));
        let how = How { failing: None, ..self.how(within, retries, &plan) };
        let args = Site::arguments(plan, &refs, &[]);
        match self.site.submit(args, Outputs::Stream { ahead }, retries, how) {
            Submitted::Stream(stream) => self.take(stream, wants, count).await,
            Submitted::Objects(_) => Ok(()),
        }
    }

    /// Takes so many items of a stream that has `count`.
    async fn take(&mut self, mut stream: Stream, wants: u32, count: u32) -> Result<(), Error> {
        let mut taken = 0;
        while taken < wants {
            match stream.next().await {
                Some(Ok(item)) => {
                    assert_eq!(item.handle.id(), stream.task.output(taken), "an item is out of order");
                    taken += 1;
                    self.site.shared.report.borrow_mut().items += 1;
                    self.read_item(&stream, item).await?;
                }
                Some(Err(error)) => {
                    self.site.check_error(stream.task.output(taken), &error);
                    return if self.chance(2) { Err(error) } else { Ok(()) };
                }
                None => {
                    assert_eq!(taken, count, "{} has ended, and not all items have come", stream.task);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn read_item(&mut self, _: &Stream, item: Ref) -> Result<(), Error> {
        if self.chance(3) {
            self.pause().await;
        }
        if !self.chance(4) {
            self.read(&item).await?;
        }
        if self.chance(2) {
            self.bag.push(item);
        }
        Ok(())
    }

    async fn make_actor(&mut self) -> Result<(), Error> {
        let (seed, refs) = (self.random.random_range(0..u64::MAX), self.some(2));
        let restarts = [0, 1, u32::MAX][self.random.random_range(0..3)];
        let of_job = self.site.process.job.0;
        let name = self.chance(2).then(|| format!("of {of_job}"));
        let holds = match self.is_driver && !self.has_holder && self.chance(4) {
            true => shapes::of_actor(),
            false => ResourceSet::new(),
        };
        self.has_holder |= !holds.is_empty();
        // The name may be taken.
        if let Ok(actor) = self.site.create_actor(seed, &refs, restarts, name, holds).await {
            self.bag.push(actor);
        }
        Ok(())
    }

    async fn call_actor(&mut self) -> Result<(), Error> {
        let mut actor = self.one(|held| held.actor.is_some());
        if self.is_driver && self.chance(4) {
            // Of any driver.
            let any = self.random.random_range(0..4 * self.site.shared.jobs.borrow().len());
            let of_job = self.site.shared.jobs.borrow().get(any).map_or(0, |job| job.0);
            if let Ok(found) = self.site.find_actor(format!("of {of_job}")).await {
                self.bag.push(found.clone());
                actor = Some(found);
            }
        }
        let Some(actor) = actor else { return Ok(()) };
        for _ in 0..self.random.random_range(1..4) {
            // What an actor gives back may be anything: nobody but a driver may wait for it.
            let kind = match self.random.random_range(0..3) {
                0 => Kind::Keep,
                1 if self.is_driver => Kind::Fetch,
                _ => Kind::Work,
            };
            let (plan, refs) = (Plan { kind, depth: 1, ..self.plan() }, self.some(2));
            if kind == Kind::Keep && self.chance(2) {
                // The actor alone holds from now on what it keeps, and nothing else that came with it.
                self.bag.retain(|held| held.actor.is_some());
            }
            // A call of this process holds back its later ones until its arguments are there.
            let objects = if self.is_driver { self.objects(1) } else { Vec::new() };
            let retries = if self.chance(3) { 2 } else { 0 };
            if self.is_driver && self.chance(5) {
                let (ahead, wants) = (self.random.random_range(1..4), self.random.random_range(0..12));
                let (plan, count) = (Plan { kind: Kind::Work, ..plan.clone() }, items_of(&plan));
                let outputs = Outputs::Stream { ahead };
                if let Submitted::Stream(stream) = self.site.call(&actor, plan, (&refs, &[]), outputs, retries) {
                    self.take(stream, wants, count).await?;
                }
                continue;
            }
            let result = self.site.call(&actor, plan, (&refs, &objects), Outputs::Fixed(1), retries);
            self.bag.push(result.one());
        }
        Ok(())
    }

    /// A call of the actor that this process is.
    async fn call(&mut self, plan: &Plan, spec: &TaskSpec) -> Result<Ended, Error> {
        self.site.shared.report.borrow_mut().calls += 1;
        if let Outputs::Stream { ahead } = spec.outputs {
            return self.stream(plan, spec, ahead).await;
        }
        let given = std::mem::take(&mut self.bag);
        if plan.kind != Kind::Keep || !self.chance(2) {
            self.pause().await;
        }
        if self.chance(3) {
            self.submit();
            if let Some(child) = self.value() {
                self.read(&child).await?;
            }
        }
        match plan.kind {
            Kind::Keep => {
                self.bag.clear();
                let mut kept = self.site.process.kept.borrow_mut();
                kept.extend(given.into_iter().map(|held| (plan.order, held)));
                let dropped: Vec<_> = if kept.len() > 6 { kept.drain(..3).collect() } else { Vec::new() };
                drop(kept);
                drop(dropped);
            }
            Kind::Fetch => {
                self.bag.clear();
                // What was kept later may hold the result of this call: such a circle would never be freed.
                let kept = self.site.process.kept.borrow();
                let before = kept.iter().filter(|(order, _)| *order < plan.order);
                self.bag.extend(before.take(3).map(|(_, held)| held.clone()));
            }
            // What it owns itself would end with it.
            Kind::Work | Kind::Busy | Kind::Fatal => {
                self.bag = if self.site.shared.config.faults { self.bag.split_off(0) } else { Vec::new() }
            }
        }
        Ok(self.results(spec))
    }

    async fn stream(&mut self, plan: &Plan, spec: &TaskSpec, ahead: u32) -> Result<Ended, Error> {
        let (count, is_actor) = (items_of(plan), plan.number > 0);
        for index in 0..count {
            self.site.room(index, ahead).await;
            self.pause().await;
            // What an actor owns itself would end with it.
            let may_own = !is_actor || self.site.shared.config.faults;
            let mut refs = self.some(1);
            if self.chance(2) && may_own {
                refs.push(self.site.put(&[], self.random.random_range(0..2) == 0)?);
            }
            let is_stored = self.chance(3);
            let (value, held) = self.site.pack(spec.id.output(index), &refs, is_stored, false)?;
            self.site.process.send_item(spec.id, index, value, held);
            // An actor's calls may not wait for others of it.
            if self.chance(3) && !is_actor {
                self.step().await?;
            }
            if !self.bag.is_empty() && self.chance(2) {
                let at = self.random.random_range(0..self.bag.len());
                drop(self.bag.swap_remove(at));
            }
        }
        Ok((Outcome::StreamEnded(count), Vec::new()))
    }

    /// The results, with some of the bag in them.
    fn results(&mut self, spec: &TaskSpec) -> Ended {
        let Outputs::Fixed(count) = spec.outputs else { return failed(Error::NoSession) };
        let (mut values, mut held) = (Vec::new(), Vec::new());
        for index in 0..count {
            let (refs, is_stored) = (self.some(3), self.chance(3));
            let packed = self.site.pack(spec.id.output(index), &refs, is_stored, !spec.remakes);
            let (value, handles) = match packed {
                Ok(packed) => packed,
                Err(error) => {
                    self.site.process.owner.discard(spec, &values);
                    return failed(error);
                }
            };
            values.push(value);
            held.extend(handles);
        }
        match values.len() {
            1 => (Outcome::One(values.remove(0)), held),
            _ => (Outcome::Many(values), held),
        }
    }
}
