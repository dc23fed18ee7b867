//! How a lost object is made again: for every value in shared memory that a task of this process made, the
//! owner remembers what the task was called with, in a [`Recipe`].
//!
//! Values that were put, outputs of actors and items of streams have no recipe: they are lost with their last copy.

use std::sync::Arc;

use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::spec::Arg;
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{NodeId, ObjectId};
use wingbeat_net::messages::{PeerMessage, Registration};

use crate::owner::Owner;
use crate::owner::argument_bytes::ArgumentBytes;
use crate::owner::dispatch::Task;
use crate::owner::object::{Handle, Loss};
use crate::owner::outbound::{Content, Outbound, PackedValue, holds};
use crate::owner::recipe::{Ingredient, Recipe, Remaking, Source, SubmittedTask};
use crate::owner::submission::Request;

impl Owner {
    /// What `task`, which is done, was called with; none if it may not run again.
    pub(super) fn recipe(&self, task: &Task) -> Option<Arc<Recipe>> {
        if let Some(remaking) = &task.remaking {
            return Some(remaking.recipe().clone());
        }
        if task.retries == 0 {
            return None;
        }
        let (shape, name) = (&task.shape, &task.name);
        let made = SubmittedTask {
            spec: &task.spec,
            shape,
            name,
            retries: task.retries,
            memory_retries: task.memory_retries,
            retry_on: &task.retry_on,
        };
        self.lineage.remember(&made, |id| self.objects.get(id).and_then(|object| object.recipe()))
    }

    /// Copies of one of our objects cannot be read at these nodes. Without any other, it is made again.
    pub(crate) fn object_lost(self: &Arc<Self>, id: ObjectId, at: &[NodeId], why: &str) {
        let Some(object) = self.objects.get(id) else { return };
        let (loss, gone) = object.lose(at);
        self.objects.not_stored(id, &gone);
        if let Loss::None = loss {
            self.shadow_changed(&object);
        }
        for holder in gone {
            // Whoever cannot read it there must not find it there later.
            self.delete_at(&holder, id);
        }
        match loss {
            Loss::None => {}
            Loss::All(Some(recipe)) => {
                self.submission.request(Request::MakeAgain(recipe, why.to_owned()));
            }
            Loss::All(None) if object.is_adopted() => {
                let why = format!("{why}; it cannot be made again: its owner, {}, has ended", id.owner());
                let error = Error::ObjectLost { object: id, why };
                self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
            }
            Loss::All(None) => {
                let why = format!("{why}; it cannot be made again: only results of tasks that may be retried can");
                let error = Error::ObjectLost { object: id, why };
                self.resolve_object(&object, ObjectValue::Failed(Box::new(error)), Vec::new());
            }
        }
    }

    /// A reader here could not read any of these copies: the owner is told, and asked again.
    pub(crate) fn copies_lost(self: &Arc<Self>, id: ObjectId, at: &[NodeId], why: &str) {
        if id.owner() == self.id {
            return self.object_lost(id, at, why);
        }
        if let Some(object) = self.objects.get(id) {
            let gone = object.forget_copies(at);
            self.objects.not_stored(id, &gone);
        }
        self.send_to(id.owner(), PeerMessage::Lost { object: id, at: at.to_vec(), why: why.to_owned() });
    }

    /// A node is gone with everything in its store.
    pub(crate) fn copies_lost_with(self: &Arc<Self>, node: NodeId, why: &str) {
        let why = format!("{node} had its last copy, and died: {why}");
        for id in self.objects.take_stored_at(node) {
            let Some(object) = self.objects.get(id) else { continue };
            match self.owns(&object) {
                true => self.object_lost(id, &[node], &why),
                // The owner hears of it too; it is asked when somebody reads.
                false => drop(object.forget_copies(&[node])),
            }
        }
    }

    /// The argument `id` of a task could not be read: it waits for it again.
    pub(crate) fn argument_lost(self: &Arc<Self>, mut task: Task, id: ObjectId, why: &str) {
        for arg in &task.spec.args {
            if let Arg::Stored(stored_id, stored) = arg
                && *stored_id == id
            {
                let at: Vec<NodeId> = stored.nodes.iter().map(|holder| holder.node).collect();
                self.copies_lost(id, &at, why);
            }
        }
        let args = std::mem::take(&mut Arc::make_mut(&mut task.spec).args);
        // The task holds every object that occurs here.
        let handle = |id: ObjectId| self.borrow(id);
        let args: SmallVec<[Outbound; 3]> = args
            .into_iter()
            .map(|arg| match arg {
                Arg::Stored(id, _) | Arg::Ref(id, _) => Outbound::Object(handle(id)),
                Arg::Value(packed) => {
                    let held = packed.refs.iter().flat_map(|refs| &refs.ids).map(|id| handle(*id)).collect();
                    Outbound::Value(PackedValue { content: Content::Inline(packed.bytes.0), held })
                }
            })
            .collect();
        let (id, parent, name) = (task.spec.id, task.spec.parent, task.name.clone());
        let owner = self.clone();
        self.when_resolved((id, parent, &name), args, move |args| owner.submit_resolved(task, args));
    }

    /// Makes what a recipe describes again, and what it needs for that.
    pub(super) fn make_again(self: &Arc<Self>, recipe: Arc<Recipe>, why: &str) {
        let mut to_make = vec![recipe];
        while let Some(recipe) = to_make.pop() {
            let Some(remaking) = Remaking::begin(&recipe) else { continue };
            self.start_again(remaking, why, &mut to_make);
        }
    }

    fn start_again(self: &Arc<Self>, remaking: Remaking, why: &str, to_make: &mut Vec<Arc<Recipe>>) {
        let recipe = remaking.recipe().clone();
        let Some((spec, retries)) = recipe.next_attempt() else {
            let (id, outputs) = recipe.outputs();
            let why = format!("{why}; {} has no retries left to make it again", recipe.name);
            self.fail_outputs(id, outputs, &Error::ObjectLost { object: id.output(0), why });
            return;
        };
        tracing::info!(task = %recipe.name, why, "a lost object is made again");
        let args: SmallVec<[Outbound; 3]> = recipe
            .ingredients
            .iter()
            .map(|ingredient| match ingredient {
                Ingredient::Object(source) => Outbound::Object(self.revive(source, to_make)),
                Ingredient::Bytes(packed, refs) => {
                    let held = refs.iter().map(|source| self.revive(source, to_make)).collect();
                    Outbound::Value(PackedValue { content: Content::Inline(packed.bytes.0.clone()), held })
                }
            })
            .collect();
        let task = Task {
            spec: Arc::new(spec),
            shape: recipe.shape.clone(),
            name: recipe.name.clone(),
            retries,
            failures: 0,
            memory_retries: recipe.memory_retries,
            retry_on: recipe.retry_on.clone(),
            cancelled: false,
            held: holds(&args),
            bytes: ArgumentBytes::of(&args),
            remaking: Some(remaking),
        };
        let (id, parent, name) = (task.spec.id, task.spec.parent, task.name.clone());
        let owner = self.clone();
        self.when_resolved((id, parent, &name), args, move |args| owner.submit_resolved(task, args));
    }

    /// An object that a lost one was made from: as it is, or to be made again.
    fn revive(self: &Arc<Self>, source: &Source, to_make: &mut Vec<Arc<Recipe>>) -> Handle {
        let id = source.id;
        if id.owner() != self.id {
            return self.borrow(id);
        }
        let (handle, new) = self.objects.handle(self.clone(), id, Registration::default);
        match &source.recipe {
            _ if !new => {}
            Some(recipe) => {
                handle.object().set_recipe(recipe.clone());
                to_make.push(recipe.clone());
            }
            None => {
                let why = "it was freed, and was put or came from an actor: nothing can make it again".to_owned();
                let error = Error::ObjectLost { object: id, why };
                self.resolve_object(handle.object(), ObjectValue::Failed(Box::new(error)), Vec::new());
            }
        }
        handle
    }
}
