//! What a worker process does with a [`Process`]: arguments in, results out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, Outputs, TaskResult, TaskSpec};
use wingbeat_core::value::{ObjectValue, Stored};
use wingbeat_core::{LeaseId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{MESSAGE_LIMIT, NodeMessage, PeerMessage, Weight};

use crate::owner::dispatch::TakenHome;
use crate::owner::object::Handle;
use crate::owner::objects::too_many;
use crate::session::arguments::Incoming;
use crate::session::context::Execution;
use crate::session::get::Value;
use crate::session::outgoing::Outgoing;
use crate::session::registry;
use crate::session::session::Session;
use crate::session::values::PackError;
use crate::session::values::pack_output;
use crate::wire::process::Process;
use crate::wire::view::Bits;

/// How often a task lets go of its arguments because there is no room for all of them, and how long at most it has none then.
const LETS_GO: u32 = 5;
const LET_GO_FOR: Duration = Duration::from_secs(2);

/// How long an orderly end waits until the head has leases back. Without it they end with their worker processes.
const RETURN_LIMIT: Duration = Duration::from_millis(200);

impl Session {
    /// Brings the arguments of a task into reach, in order. For arguments of actors (`patient`), whose place in the
    /// queue must be kept, it waits until what was lost is made again; a task goes back to its owner instead.
    ///
    /// # Errors
    /// When one cannot be read: [`Error::ObjectLost`], [`Error::StoreFull`] and the like, or the error that the task
    /// which makes it ended with.
    pub async fn bring_in(&self, args: &[Arg], patient: bool) -> Result<Vec<Incoming>, Error> {
        let process = self.process();
        let mut incoming = Vec::with_capacity(args.len());
        self.fits_in_the_store(args)?;
        // All at once: the disk and other nodes are faster so than one after another.
        let fetch = || {
            join_all(args.iter().filter_map(|arg| match arg {
                Arg::Stored(id, stored) => Some(process.fetch_argument(*id, stored)),
                Arg::Value(_) | Arg::Ref(..) => None,
            }))
        };
        let mut fetched = fetch().await;
        let mut times = 0;
        // Several such tasks may each have a part of theirs in a full store. The others can go on when one lets go.
        while fetched.len() > 1
            && times < LETS_GO
            && fetched.iter().any(Result::is_err)
            && fetched.iter().all(|got| matches!(got, Ok(_) | Err(Error::StoreFull { .. })))
        {
            drop(fetched);
            times += 1;
            tokio::time::sleep(LET_GO_FOR.mul_f64(rand::random::<f64>())).await;
            fetched = fetch().await;
        }
        let mut fetched = fetched.into_iter();
        for arg in args {
            incoming.push(match arg {
                Arg::Value(packed) => Incoming {
                    held: process.owner.hold_refs(packed.refs.as_deref()),
                    bits: Bits::Inline(packed.bytes.0.clone()),
                },
                Arg::Stored(id, stored) => match fetched.next() {
                    None => break,
                    Some(Ok(bits)) => Incoming { held: process.owner.hold_refs(stored.refs.as_deref()), bits },
                    Some(Err(Error::ObjectLost { why, .. })) if patient && process.address_of(id.owner()).is_some() => {
                        let at: Vec<_> = stored.nodes.iter().map(|holder| holder.node).collect();
                        process.owner.copies_lost(*id, &at, &why);
                        let handle = process.owner.borrow(*id);
                        let value: Value = self.value(&handle).await?;
                        Incoming { bits: value.bits().clone(), held: vec![handle] }
                    }
                    Some(Err(error)) => return Err(error),
                },
                Arg::Ref(id, owner) => {
                    process.know(owner);
                    let handle = process.owner.borrow(*id);
                    let value: Value = self.value(&handle).await?;
                    Incoming { bits: value.bits().clone(), held: vec![handle] }
                }
            });
        }
        Ok(incoming)
    }

    /// Refuses arguments that could never be in the node's store at the same time.
    fn fits_in_the_store(&self, args: &[Arg]) -> Result<(), Error> {
        let stored = args.iter().filter_map(|arg| match arg {
            Arg::Stored(id, stored) => Some((*id, stored.size)),
            Arg::Value(_) | Arg::Ref(..) => None,
        });
        if stored.clone().nth(1).is_none() {
            return Ok(());
        }
        let sizes: BTreeMap<ObjectId, u64> = stored.collect();
        let needed: u64 = sizes.values().sum();
        let capacity = self.process().storage().map_or(u64::MAX, |node| node.mapping().capacity());
        if needed <= capacity {
            return Ok(());
        }
        let why = format!(
            "they have {needed} bytes, and the store {capacity}, where all are at the same time. Start the node with a larger store \
             (--object-store-memory), or take fewer at a time"
        );
        Err(Error::StoreFull { what: "all arguments of a task".into(), why })
    }

    /// Whether [`Session::bring_in`] needs nobody else: then it is done in one poll.
    pub fn is_at_hand(args: &[Arg]) -> bool {
        args.iter().all(|arg| matches!(arg, Arg::Value(_)))
    }

    /// Encodes an output of a task. The handles are of the refs inside; they must live until the owner says
    /// that it received the result. What an earlier attempt left in the store is kept, unless this `replaces` it.
    ///
    /// # Errors
    /// [`Error::Encode`], or what the store answers.
    pub fn pack_output(
        &self,
        id: ObjectId,
        value: &dyn Outgoing,
        replaces: bool,
        what: &str,
    ) -> Result<(ObjectValue, Vec<Handle>), Error> {
        let packed = pack_output(self.process(), id, value, replaces).map_err(|error| match error {
            PackError::Codec(error) => Error::Encode { what: format!("the result of {what}"), why: error.0 },
            PackError::Other(error) => error.about(|| format!("the result of {what}")),
        })?;
        match too_many(&packed.0, || format!("the result of {what}")) {
            Some(error) => {
                if let ObjectValue::Stored(stored) = &packed.0
                    && replaces
                {
                    self.owner().delete_stored(id, stored);
                }
                Err(error)
            }
            None => Ok(packed),
        }
    }
}

/// A task that blocks its thread is not run on one where others are under way.
#[derive(Clone, Copy, Debug)]
pub struct ForAnotherThread;

/// The objects that an argument refers to, itself included.
fn refs_of(arg: &Arg) -> impl Iterator<Item = &ObjectId> {
    let (itself, refs) = match arg {
        Arg::Value(packed) => (None, packed.refs.as_deref()),
        Arg::Stored(id, stored) => (Some(id), stored.refs.as_deref()),
        Arg::Ref(id, _) => (Some(id), None),
    };
    itself.into_iter().chain(refs.into_iter().flat_map(|refs| &refs.ids))
}

impl Process {
    async fn fetch_argument(&self, id: ObjectId, stored: &Stored) -> Result<Bits, Error> {
        for owner in stored.refs.iter().flat_map(|refs| &refs.owners) {
            self.know(owner);
        }
        // Also when the call is cancelled meanwhile.
        self.fetch_to_the_end(id, stored.clone()).await
    }

    /// Sends a result to the task's owner, after the refs in its arguments that are still held here are registered: the
    /// owner holds them until then. With `may_wait`, more results follow soon, and it may go with the next of them.
    pub fn send_result(&self, spec: &TaskSpec, mut result: TaskResult, may_wait: bool) {
        let args = &spec.args;
        let owner = result.id.owner;
        let is_plain = args.iter().all(|arg| matches!(arg, Arg::Value(packed) if packed.refs.is_none()));
        // What makes lost outputs again is heard of in order with their losses; so are items of a stream and its end.
        let is_alone = !spec.remakes && matches!(spec.outputs, Outputs::Fixed(_)) && !result.outcome.has_refs();
        if owner == self.id() && is_plain && is_alone {
            match self.owner.result_at_home(result) {
                Ok(()) => return,
                Err(back) => result = back,
            }
        }
        let message = PeerMessage::Results(vec![result]);
        if is_plain && may_wait {
            return self.send_with_others(owner, message);
        }
        if is_plain {
            self.send_to(owner, message);
            return;
        }
        self.owner.confirm(owner, args.iter().flat_map(refs_of), message);
    }

    /// Why a result cannot be sent, if it cannot.
    pub fn too_large(result: &TaskResult) -> Option<Error> {
        let weight = result.weight();
        (weight > MESSAGE_LIMIT).then(|| Error::InvalidArgument {
            what: format!(
                "the result of {} needs {weight} bytes in one message, over the limit of {MESSAGE_LIMIT}; return fewer outputs or refs at a time",
                result.id
            ),
        })
    }

    /// Deletes the outputs of a task that fails after it has stored them.
    pub fn discard(&self, spec: &TaskSpec, outputs: &[ObjectValue]) {
        self.owner.discard(spec, outputs);
    }

    /// The next task to run in this process while the one that submitted it waits, if there is one: only if it is asynchronous, if
    /// the thread has others under way. An error says that there is one that is not.
    ///
    /// # Errors
    /// It is for another thread.
    pub fn take_home(&self, if_asynchronous: bool) -> Result<Option<Arc<TaskSpec>>, ForAnotherThread> {
        let functions = registry::table();
        let is_asynchronous = |spec: &TaskSpec| {
            functions.function(spec.function, spec.name.as_deref()).is_ok_and(|function| function.is_asynchronous)
        };
        match self.owner.take_home(|spec| !if_asynchronous || is_asynchronous(spec)) {
            TakenHome::Task { spec, .. } => Ok(Some(spec)),
            TakenHome::Nothing => Ok(None),
            TakenHome::NotThis => Err(ForAnotherThread),
        }
    }

    /// Whether there is one. If not, the executor hears when there is.
    pub fn asks_for_home(&self) -> bool {
        self.owner.asks_for_home()
    }

    /// None is taken for now.
    pub fn closes_home(&self) {
        self.owner.closes_home();
    }

    /// Whether a message could be sent to a process now.
    pub fn can_reach(&self, process: ProcessId) -> bool {
        self.wire.peers.can_reach(process)
    }

    /// Before the process ends in order: waits until every result so far, and whatever else was queued for others, was
    /// taken in.
    pub async fn results_taken_in(&self) {
        let has_returned = self.owner.return_idle_leases();
        self.owner.registrations.settled().await;
        self.wire.peers.flushed().await;
        if has_returned {
            let _ = tokio::time::timeout(RETURN_LIMIT, self.head_flushed()).await;
        }
    }

    /// Whether the process can end without anybody's loss.
    pub fn is_done(&self) -> bool {
        self.wire.own_groups.is_empty() && self.owner.is_done()
    }

    /// Whether it can end once the steward of its node answers for what it owns.
    pub fn may_leave(&self) -> bool {
        let steward = self.wire.steward();
        self.wire.own_groups.is_empty() && steward.is_some_and(|steward| self.owner.may_leave(steward.process))
    }

    /// Whether that process answers for the objects of this one when it is no more.
    pub fn is_steward(&self, process: ProcessId) -> bool {
        self.wire.steward().is_some_and(|steward| steward.process == process)
    }

    /// Asks the steward whether it may. False if there is none.
    pub fn asks_to_leave(&self) -> bool {
        self.owner.asks_to_leave()
    }

    /// Sends an item of a stream to its consumer.
    pub fn send_item(&self, task: TaskId, index: u32, value: ObjectValue) {
        self.send_to(task.owner, PeerMessage::StreamItem { task, index, value });
        self.attend();
    }

    /// Gives unstarted tasks back to their owner.
    pub fn give_back(&self, owner: ProcessId, lease: LeaseId, tasks: Vec<TaskId>, waiting: bool) {
        self.send_to(owner, PeerMessage::GaveBack { lease, tasks, waiting });
    }

    /// Tells the owner of a lease that this process takes tasks again.
    pub fn say_ready(&self, owner: ProcessId, lease: LeaseId) {
        self.send_to(owner, PeerMessage::Ready(lease));
    }

    /// Tells the daemon.
    pub fn tell_node(&self, message: NodeMessage) {
        if let Some(storage) = self.storage() {
            storage.send(message);
        }
    }

    /// The objects that this process owns or has borrowed.
    pub fn live_objects(&self) -> usize {
        self.owner.objects.len()
    }

    /// Tells a task or call that it is to stop, by `tell`, and cancels what it has submitted here so far. What it submits when it has heard,
    /// to leave things in order, is carried out, also where it is told again; and whoever sees that something is cancelled that it has submitted
    /// sees that it is itself.
    pub fn cancel_with_children(&self, execution: &Execution, tell: impl FnOnce(&Execution)) {
        let before = execution.first_told(|| self.owner.next_number());
        tell(execution);
        if let Some(before) = before {
            self.owner.cancel_children(execution.task, before);
        }
    }
}
