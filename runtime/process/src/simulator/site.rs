//! What a program can do where it runs: what a session is to user code.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, Outcome, Outputs, Shape, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed, StoreNode, Stored};
use wingbeat_core::{FunctionId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Work};

use super::execution::{Ended, Execution, Shared};
use super::failing::Failing;
use super::planned::{Planned, TimesOut};
use super::process::Process;
use super::side::{Awaited, address};
use super::value::{Plan, Ref, Written, refs_in, value_of};
use crate::owner::dispatch::Task;
use crate::owner::memory_retries::{MEMORY_RETRIES, MemoryRetries};
use crate::owner::name::Name;
use crate::owner::object::{Handle, Producer};
use crate::owner::outbound::{Content, Outbound, PackedValue, holds};
use crate::owner::retrying::RetryOn;
use crate::owner::streams::Cell;
use crate::owner::submission::Cancel;
use crate::work::{self, Left, On};

/// Where a program runs, and as what.
#[derive(Clone)]
pub(super) struct Site {
    pub process: Rc<Process>,
    /// None for the program of a driver.
    pub execution: Option<Rc<Execution>>,
    pub shared: Rc<Shared>,
}

/// How a task runs.
pub(super) struct How {
    pub function: FunctionId,
    pub shape: Shape,
    /// Whether its process runs what it has submitted while it waits for that.
    pub shares_process: bool,
    pub retry_on: RetryOn,
    /// Set if it fails by itself.
    pub failing: Option<Failing>,
    /// After how long it is given up.
    pub limit: Option<u64>,
}

/// An argument that is here, and what keeps the refs in it.
pub(super) struct Incoming {
    pub bytes: Bytes,
    #[expect(dead_code, reason = "it is only dropped")]
    held: Vec<Handle>,
}

/// While it lives, its execution waits.
struct Waiting {
    site: Site,
    number: u64,
}

impl Waiting {
    fn begin(site: &Site, awaited: work::Awaited) -> Option<Waiting> {
        let execution = site.execution.as_ref()?;
        let (number, is_first) =
            execution.waits.borrow_mut().add(awaited, work::Manner::default(), site.shared.instant());
        assert!(is_first, "a program waits for one thing at a time");
        if execution.is_at_home {
            site.process.begin_wait_at_home(execution, &site.shared);
            execution.waits.borrow_mut().begun_at_home();
            site.process.look_at_waits(&site.shared);
        } else {
            let goes_on = site.process.begin_wait(&site.shared);
            let (message, _) = execution.waits.borrow_mut().begun(&execution.waiter(), goes_on);
            site.tell_head(message);
        }
        Some(Waiting { site: site.clone(), number })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Waiting { site, number } = self;
        let Some(execution) = site.execution.as_ref().filter(|_| site.process.is_alive.get()) else { return };
        let left = execution.waits.borrow_mut().remove(&execution.waiter(), *number, site.shared.instant());
        if let Left::None(Some(resumed)) = left {
            site.tell_head(resumed);
        }
        match execution.is_at_home {
            true => site.process.end_wait_at_home(execution),
            false => site.process.end_wait(&site.shared),
        }
    }
}

impl Site {
    pub(super) fn tell_head(&self, message: HeadMessage) {
        self.process.owner.outside.tell_head(&self.process.owner, message);
    }

    pub(super) async fn sleep(&self, ms: u64) {
        let at = self.shared.now() + ms;
        poll_fn(|cx| {
            if self.shared.now() >= at {
                return Poll::Ready(());
            }
            self.shared.timers.borrow_mut().push((at, cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    fn here(&self) -> StoreNode {
        let node = self.process.node.get();
        StoreNode { node, address: address(ProcessId(node.0)) }
    }

    /// The value of an object, checked, and the refs in it.
    pub(super) async fn get(&self, handle: &Handle) -> Result<Vec<Ref>, Error> {
        let bytes = self.read(handle).await?;
        self.shared.report.borrow_mut().values += 1;
        Ok(self.refs(&refs_in(&bytes, handle.id())))
    }

    async fn read(&self, handle: &Handle) -> Result<Bytes, Error> {
        let owner = &self.process.owner;
        let id = handle.id();
        loop {
            let (mut place, mut waiting) = (None, None);
            let value = poll_fn(|cx| {
                let value = handle.object().poll(&mut place, cx);
                if value.is_pending() {
                    owner.subscribe(handle);
                    if waiting.is_none() {
                        waiting = Waiting::begin(self, work::Awaited::all([On::value(handle)]));
                    }
                }
                value
            })
            .await;
            drop(waiting);
            let stored = match value {
                ObjectValue::Inline(packed) => return Ok(packed.bytes.0),
                ObjectValue::Failed(error) => return Err(*error),
                ObjectValue::Stored(stored) => stored,
            };
            match self.fetch(id, &stored).await {
                Err(Error::ObjectLost { why, .. }) if !stored.nodes.is_empty() => {
                    let from: Vec<_> = stored.nodes.iter().map(|holder| holder.node).collect();
                    owner.copies_lost(id, &from, &why);
                }
                bytes => return bytes,
            }
        }
    }

    /// Brings a copy to the node here, and tells the owner of it.
    async fn fetch(&self, id: ObjectId, stored: &Stored) -> Result<Bytes, Error> {
        let found = self.shared.copies.borrow().get(&(id, self.process.node.get())).cloned();
        if let Some((_, bytes)) = found {
            return Ok(bytes);
        }
        self.sleep(1 + self.shared.below(6)).await;
        self.has_room_for(id)?;
        let at = self.here();
        let mut copies = self.shared.copies.borrow_mut();
        let found = stored.nodes.iter().find_map(|holder| copies.get(&(id, holder.node)).cloned());
        let Some((_, bytes)) = found else {
            return Err(Error::ObjectLost { object: id, why: "no node that was said to have a copy has one".into() });
        };
        let is_new = copies.insert((id, at.node), (self.process.job, bytes.clone())).is_none();
        drop(copies);
        if is_new && id.owner() == self.process.id {
            self.process.owner.copied(id, at);
        } else if is_new && self.process.say(id.owner(), PeerMessage::Copied { object: id, at: at.clone() }) {
            self.process.side.await_all(id.owner(), Awaited::Copied(id, at));
        }
        Ok(bytes)
    }

    /// Handles of refs that were read. Whatever held them until now may let go of them.
    pub(super) fn refs(&self, written: &[Written]) -> Vec<Ref> {
        let ids: Vec<ObjectId> = written.iter().map(|written| written.id).collect();
        let handles = self.process.owner.borrow_all(&ids);
        let with_actor = |(handle, written): (Handle, &Written)| {
            if let Some(actor) = written.actor {
                self.process.owner.know_actor(&handle, actor);
            }
            Ref { handle, actor: written.actor }
        };
        handles.into_iter().zip(written).map(with_actor).collect()
    }

    /// Brings the arguments of a task or call into reach.
    pub(super) async fn bring_in(&self, args: &[Arg], patient: bool) -> Result<Vec<Incoming>, Error> {
        let (owner, mut incoming) = (&self.process.owner, Vec::new());
        for arg in args {
            incoming.push(match arg {
                Arg::Value(packed) => {
                    Incoming { held: owner.hold_refs(packed.refs.as_deref()), bytes: packed.bytes.0.clone() }
                }
                Arg::Stored(id, stored) => {
                    stored.refs.iter().flat_map(|refs| &refs.owners).for_each(|owner| self.process.side_learns(owner));
                    match self.fetch(*id, stored).await {
                        Ok(bytes) => Incoming { held: owner.hold_refs(stored.refs.as_deref()), bytes },
                        Err(Error::ObjectLost { why, .. })
                            if patient && owner.outside.address_of(id.owner()).is_some() =>
                        {
                            let at: Vec<_> = stored.nodes.iter().map(|holder| holder.node).collect();
                            owner.copies_lost(*id, &at, &why);
                            let handle = owner.borrow(*id);
                            Incoming { bytes: self.read(&handle).await?, held: vec![handle] }
                        }
                        Err(error) => return Err(error),
                    }
                }
                Arg::Ref(id, at) => {
                    self.process.side_learns(at);
                    let handle = owner.borrow(*id);
                    Incoming { bytes: self.read(&handle).await?, held: vec![handle] }
                }
            });
        }
        Ok(incoming)
    }

    fn has_room_for(&self, id: ObjectId) -> Result<(), Error> {
        match self.shared.full.borrow().contains(&self.process.node.get()) {
            true => Err(Error::StoreFull { what: id.to_string(), why: "the simulation".into() }),
            false => Ok(()),
        }
    }

    /// The value of an object as it travels, inline or in the store of the node here. What lies there is kept unless this
    /// `replaces` it.
    pub(super) fn pack(
        &self,
        id: ObjectId,
        refs: &[Ref],
        is_stored: bool,
        replaces: bool,
    ) -> Result<(ObjectValue, Vec<Handle>), Error> {
        let held: Vec<Handle> = refs.iter().map(|held| held.handle.clone()).collect();
        let (bytes, described) = (value_of(id, refs), self.process.owner.describe(&held));
        if !is_stored {
            return Ok((ObjectValue::Inline(Packed { bytes: bytes.into(), refs: described }), held));
        }
        let at = self.here();
        let mut copies = self.shared.copies.borrow_mut();
        if replaces || !copies.contains_key(&(id, at.node)) {
            self.has_room_for(id)?;
        }
        if replaces || !copies.contains_key(&(id, at.node)) {
            copies.insert((id, at.node), (self.process.job, bytes));
        }
        Ok((ObjectValue::Stored(Stored { size: 200_000, nodes: vec![at], refs: described }), held))
    }

    /// An object of this process with these refs in it.
    pub(super) fn put(&self, refs: &[Ref], is_stored: bool) -> Result<Ref, Error> {
        let owner = &self.process.owner;
        let id = owner.next_task().output(0);
        let (value, held) = self.pack(id, refs, is_stored, false)?;
        let handle = owner.new_object(id, None);
        owner.resolve_object(handle.object(), value, held);
        Ok(Ref::of(handle))
    }

    /// The arguments of a call: its plan with refs in it, and the values of objects.
    pub(super) fn arguments(plan: Plan, refs: &[Ref], objects: &[Ref]) -> SmallVec<[Outbound; 3]> {
        let plan = Plan {
            expects: objects.iter().map(|object| object.handle.id()).collect(),
            refs: refs.iter().map(Ref::written).collect(),
            ..plan
        };
        let held = refs.iter().map(|held| held.handle.clone()).collect();
        let packed = PackedValue { content: Content::Inline(plan.bytes()), held };
        let objects = objects.iter().map(|object| Outbound::Object(object.handle.clone()));
        std::iter::once(Outbound::Value(packed)).chain(objects).collect()
    }

    pub(super) fn spec(&self, id: TaskId, outputs: Outputs) -> TaskSpec {
        let parent = self.execution.as_ref().map(|execution| execution.spec.id);
        if let Some(parent) = parent {
            self.shared.parents.borrow_mut().insert(id, parent);
        }
        TaskSpec {
            id,
            function: FunctionId(1),
            name: None,
            args: Vec::new(),
            outputs,
            attempt: 0,
            remakes: false,
            yields_memory: false,
            shares_process: false,
            group: None,
            parent,
        }
    }

    pub(super) fn submit(
        &self,
        args: SmallVec<[Outbound; 3]>,
        outputs: Outputs,
        retries: u32,
        How { function, shape, shares_process, retry_on, failing, limit }: How,
    ) -> Submitted {
        let owner = &self.process.owner;
        let id = owner.next_task();
        let submitted = self.outputs(id, outputs, None);
        let most = if retries == 0 { 0 } else { [1, 2, MEMORY_RETRIES][self.shared.below(3) as usize] };
        let memory_retries = MemoryRetries::of(most, retries);
        if let Some(failing) = failing {
            self.shared.failing.borrow_mut().insert(id.to_string(), failing);
        }
        if let Some(after) = limit {
            owner.submission.timeouts.begin(id, || Box::new(|| ()));
            let times_out = TimesOut { after, at: self.process.id, task: id, outputs };
            self.shared.planned.borrow_mut().push(Planned::TimesOut(times_out));
        }
        self.shared.memory_retries.borrow_mut().insert(id.to_string(), most);
        let yields_memory = memory_retries.has_any();
        let spec = Arc::new(TaskSpec { function, yields_memory, shares_process, ..self.spec(id, outputs) });
        let (parent, name) = (spec.parent, Name::Given(id.to_string().into()));
        let task = Task {
            spec,
            shape: Arc::new(shape),
            name: name.clone(),
            retries,
            failures: 0,
            memory_retries,
            retry_on,
            cancelled: false,
            held: holds(&args),
            bytes: Default::default(),
            remaking: None,
        };
        let submitter = owner.clone();
        owner.when_resolved((id, parent, &name), args, move |args| submitter.submit_resolved(task, args));
        submitted
    }

    pub(super) fn outputs(&self, id: TaskId, outputs: Outputs, producer: Option<Producer>) -> Submitted {
        let owner = &self.process.owner;
        match outputs {
            Outputs::Fixed(count) => Submitted::Objects(
                (0..count).map(|index| Ref::of(owner.new_object(id.output(index), producer))).collect(),
            ),
            Outputs::Stream { .. } => {
                self.shared.streams.borrow_mut().insert(id);
                Submitted::Stream(Stream { site: self.clone(), task: id, cell: owner.streams.begin(id) })
            }
        }
    }

    /// Asks for the task that makes an object to be cancelled. With `force`, its worker process ends if it runs.
    pub(super) fn cancel(&self, handle: &Handle, force: bool) {
        if handle.is_ready() {
            return;
        }
        let object = handle.id();
        let mut report = self.shared.report.borrow_mut();
        report.cancels += 1;
        report.deaths += u64::from(force);
        drop(report);
        self.shared.cancelled.borrow_mut().insert(object.task);
        match object.owner() == self.process.id {
            true => self.process.owner.cancel_object(object, force),
            false => drop(self.process.say(object.owner(), PeerMessage::CancelObject { object, force })),
        }
    }

    /// Room for an item of the stream that runs here.
    pub(super) async fn room(&self, index: u32, ahead: u32) {
        let Some(task) = self.execution.as_ref().map(|execution| execution.spec.id) else { return };
        let credit = self.process.queue.borrow_mut().streams.entry(task).or_default().clone();
        let mut waiting = None;
        poll_fn(|cx| {
            if index < credit.taken.get().saturating_add(ahead) {
                return Poll::Ready(());
            }
            if waiting.is_none() {
                waiting = Waiting::begin(self, work::Awaited::nobody());
            }
            credit.waker.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

/// What a submission answers.
pub(super) enum Submitted {
    Objects(Vec<Ref>),
    Stream(Stream),
}

impl Submitted {
    pub(super) fn one(self) -> Ref {
        match self {
            Submitted::Objects(mut refs) => refs.pop().expect("a task has an output"),
            Submitted::Stream(_) => panic!("it is a stream"),
        }
    }
}

/// The consumer's end of a stream. Dropping it cancels the task.
pub(super) struct Stream {
    site: Site,
    pub task: TaskId,
    cell: Arc<Cell>,
}

impl Stream {
    /// The next item.
    pub(super) async fn next(&mut self) -> Option<Result<Ref, Error>> {
        let mut waiting = None;
        poll_fn(|cx| {
            let mut state = self.cell.lock();
            let index = state.taken;
            if let Some(handle) = state.items.remove(&index) {
                state.taken += 1;
                for worker in state.senders() {
                    self.site.process.say(worker, Work::StreamTaken { task: self.task, count: state.taken }.into());
                }
                return Poll::Ready(Some(Ok(Ref::of(handle))));
            }
            if state.count.is_some_and(|count| index >= count) {
                return Poll::Ready(None);
            }
            if state.failed {
                return Poll::Ready(state.error.take().map(Err));
            }
            state.waker = Some(cx.waker().clone());
            drop(state);
            if waiting.is_none() {
                waiting = Waiting::begin(&self.site, work::Awaited::all([On::next_item(self.task, None, &self.cell)]));
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let owner = &self.site.process.owner;
        owner.streams.forget(self.task);
        let mut state = self.cell.lock();
        let is_over = state.failed || state.count.is_some();
        let items = std::mem::take(&mut state.items);
        drop(state);
        drop(items);
        if !is_over && self.site.process.is_alive.get() {
            self.site.shared.cancelled.borrow_mut().insert(self.task);
            owner.cancel(Cancel { task: self.task, outputs: Outputs::Stream { ahead: 0 }, force: false, again: false });
        }
    }
}

/// An attempt that failed.
pub(super) fn failed(error: Error) -> Ended {
    (Outcome::Failed(Box::new(error)), Vec::new())
}
