//! Calls whose arguments are other objects: they wait until those are there.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;
use wingbeat_core::TaskId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, Outputs};
use wingbeat_core::value::{ObjectValue, Packed};

use crate::owner::Owner;
use crate::owner::name::Name;
use crate::owner::object::{Handle, Producer};
use crate::owner::outbound::{Content, Outbound, PackedValue};
use crate::owner::submission::{Cancel, Request};
use crate::owner::unresolved::Unresolved;

/// So many arguments of a task that is waited for are told of at most.
const ARGUMENTS_LOOKED_FOR: usize = 64;

impl Owner {
    /// The arguments as they are pushed; none while one is not there.
    pub(crate) fn resolve_now(&self, args: &[Outbound]) -> Option<Result<Vec<Arg>, Error>> {
        let mut resolved = Vec::with_capacity(args.len());
        let mut failed = None;
        for arg in args {
            match self.resolve_one(arg)? {
                Ok(arg) => resolved.push(arg),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Some(failed.map_or(Ok(resolved), Err))
    }

    /// The same of arguments that travel in the message, and wait for nothing: their bytes are taken, and not counted anew. None if one
    /// does not.
    fn take_inline(&self, args: &mut [Outbound]) -> Option<Vec<Arg>> {
        let is_inline =
            |arg: &Outbound| matches!(arg, Outbound::Value(value) if matches!(value.content, Content::Inline(_)));
        if !args.iter().all(is_inline) {
            return None;
        }
        let taken = args.iter_mut().map(|arg| match arg {
            Outbound::Value(PackedValue { content: Content::Inline(bytes), held }) => {
                let refs = self.describe(held);
                Some(Arg::Value(Packed { bytes: std::mem::take(bytes).into(), refs }))
            }
            _ => None,
        });
        taken.collect()
    }

    /// One argument as it is pushed; none while it is not there.
    pub(crate) fn resolve_one(&self, arg: &Outbound) -> Option<Result<Arg, Error>> {
        let handle = match arg {
            Outbound::Value(packed) => match &packed.content {
                Content::Inline(bytes) => {
                    let refs = self.describe(&packed.held);
                    return Some(Ok(Arg::Value(Packed { bytes: bytes.clone().into(), refs })));
                }
                Content::Stored(handle) => handle,
            },
            Outbound::Object(handle) => handle,
        };
        Some(match handle.object().value()? {
            ObjectValue::Inline(packed) => Ok(Arg::Value(packed)),
            ObjectValue::Stored(mut stored) => {
                let owner = handle.id().owner();
                // The reader tells the owner of its copy, or that it found none, and may never have heard of it.
                if owner != self.id
                    && let Some(address) = self.outside.address_of(owner)
                {
                    let refs = stored.refs.get_or_insert_default();
                    if !refs.owners.iter().any(|known| known.process == owner) {
                        refs.owners.push(address);
                    }
                }
                Ok(Arg::Stored(handle.id(), stored))
            }
            ObjectValue::Failed(error) => Err(*error),
        })
    }

    /// Calls `then` with the arguments when the last one is there; at once, and on this thread, if they are.
    pub(crate) fn when_resolved(
        self: &Arc<Self>,
        (id, parent, name): (TaskId, Option<TaskId>, &Name),
        mut args: SmallVec<[Outbound; 3]>,
        then: impl FnOnce(Result<Vec<Arg>, Error>) + Send + 'static,
    ) {
        if let Some(taken) = self.take_inline(&mut args) {
            return then(Ok(taken));
        }
        if let Some(resolved) = self.resolve_now(&args) {
            return then(resolved);
        }
        let waiting = args.iter().filter_map(|arg| match arg {
            Outbound::Object(handle) if !handle.is_ready() => Some(handle.clone()),
            Outbound::Value(PackedValue { content: Content::Stored(handle), .. }) if !handle.is_ready() => {
                Some(handle.clone())
            }
            _ => None,
        });
        let waiting: SmallVec<[Handle; 3]> = waiting.collect();
        let unresolved = Arc::new(Unresolved::new((id, parent, name), waiting.len(), (args, Box::new(then))));
        self.submission.unresolved.insert(id, unresolved.clone());
        let callback: Arc<dyn Fn() + Send + Sync> = {
            let (owner, unresolved) = (self.clone(), unresolved.clone());
            Arc::new(move || owner.argument_arrived(&unresolved))
        };
        for handle in waiting {
            self.subscribe(&handle);
            match handle.object().when_ready(&callback) {
                Some(place) => unresolved.waits_at(handle, place),
                None => self.argument_arrived(&unresolved),
            }
        }
        if unresolved.is_cancelled() {
            // It was given up meanwhile.
            unresolved.leave_places();
        }
        self.argument_arrived(&unresolved);
    }

    /// The tasks whose results a call of ours lacks that was not submitted for that, and those that these lack, and what each is a call of. They become
    /// fewer with time.
    pub(crate) fn arguments_of(&self, task: TaskId) -> Vec<(TaskId, Option<Producer>)> {
        if !self.submission.unresolved.contains_key(&task) {
            return Vec::new();
        }
        let (mut missing, mut seen, mut next) = (Vec::new(), BTreeSet::from([task]), vec![task]);
        while let Some(task) = next.pop() {
            let Some(call) = self.submission.unresolved.get(&task).map(|call| call.clone()) else { continue };
            for (_, handle) in call.missing() {
                let argument = handle.id().task;
                if missing.len() == ARGUMENTS_LOOKED_FOR {
                    return missing;
                }
                if seen.insert(argument) {
                    missing.push((argument, handle.producer()));
                    next.push(argument);
                }
            }
        }
        missing
    }

    fn argument_arrived(self: &Arc<Self>, call: &Unresolved) {
        let Some((args, then)) = call.arrives() else { return };
        // If one that was there is lost again, a new entry takes the place of this one.
        self.when_resolved((call.id, call.parent, &call.name), args, then);
        // Only after it was submitted, so that who cancels it finds it here or there.
        self.submission.unresolved.remove_if(&call.id, |_, entry| std::ptr::eq(&**entry, call));
        if call.is_cancelled() {
            let outputs = Outputs::Fixed(1);
            self.submission.request(Request::Cancel(Cancel { task: call.id, outputs, force: false, again: false }));
        }
    }

    /// The call is not submitted any more. False if it is, or is about to be; then that is followed by its cancellation.
    pub(super) fn cancel_unresolved(&self, call: &Unresolved) -> bool {
        let Some((args, then)) = call.take(true) else { return false };
        self.submission.unresolved.remove(&call.id);
        call.leave_places();
        drop(args);
        then(Err(Error::Cancelled { task: call.name.to_string() }));
        true
    }

    /// Cancels a task or call. At once if it waits for its arguments: they may come before a request is taken in.
    pub(crate) fn cancel(&self, cancel: Cancel) {
        let waiting = self.submission.unresolved.get(&cancel.task).map(|waiting| waiting.clone());
        if !waiting.is_some_and(|waiting| self.cancel_unresolved(&waiting)) {
            self.submission.request(Request::Cancel(cancel));
        }
    }
}
