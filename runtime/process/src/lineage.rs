//! How a lost object is made again: for every value in shared memory that a task of this process made, the
//! owner remembers what the task was called with.
//!
//! A [`Recipe`] holds no handles. What it was made from may be freed, and is then made again too, as far
//! as its own recipe is known:
//!
//! ```text
//!   object ──▶ recipe ──▶ ingredient: bytes, or an object and its recipe ──▶ ...
//! ```
//!
//! Values that were put, outputs of actors and items of streams have no recipe: they are lost with their last copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Arg, Shape, TaskSpec};
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_core::{NodeId, ObjectId};
use wingbeat_net::messages::{PeerMessage, Registration};

use crate::arguments::Outbound;
use crate::dispatch::Task;
use crate::name::Name;
use crate::object::{Handle, Loss};
use crate::process::Process;
use crate::refs::{Content, PackedValue};
use crate::session::Session;
use crate::submission::when_resolved;

/// So many tasks in a row are remembered; of a longer chain, only the last ones.
const DEPTH_LIMIT: u32 = 256;
/// Bytes of arguments that all recipes of a process may hold; later objects get none.
const BYTES_LIMIT: u64 = 256 << 20;

/// What a task was called with.
pub(crate) struct Recipe {
    /// Without arguments.
    spec: Arc<TaskSpec>,
    shape: Arc<Shape>,
    name: Name,
    retry_errors: bool,
    /// Attempts that are left, over all times that it is made again.
    retries: AtomicU32,
    attempt: AtomicU32,
    /// Whether an attempt is under way.
    busy: AtomicBool,
    ingredients: Vec<Ingredient>,
    depth: u32,
    bytes: u64,
    /// What all recipes of the process hold.
    total: Arc<AtomicU64>,
}

enum Ingredient {
    /// The argument's bytes, and the refs inside it.
    Bytes(Packed, Vec<Source>),
    /// The value of an object.
    Object(Source),
}

struct Source {
    id: ObjectId,
    recipe: Option<Arc<Recipe>>,
}

impl Drop for Recipe {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Says of a task that it makes lost objects again; while it lives, no second one does.
pub(crate) struct Remaking(Arc<Recipe>);

impl Remaking {
    fn begin(recipe: &Arc<Recipe>) -> Option<Remaking> {
        let began = !recipe.busy.swap(true, Ordering::AcqRel);
        began.then(|| Remaking(recipe.clone()))
    }
}

impl Drop for Remaking {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

/// Bytes that are held by all recipes.
#[derive(Default)]
pub(crate) struct Lineage {
    total: Arc<AtomicU64>,
}

impl Process {
    /// What `task`, which is done, was called with; none if it may not run again.
    pub(crate) fn recipe(&self, task: &Task) -> Option<Arc<Recipe>> {
        if let Some(Remaking(recipe)) = &task.remaking {
            recipe.retries.store(task.retries, Ordering::Relaxed);
            recipe.attempt.store(task.spec.attempt, Ordering::Relaxed);
            return Some(recipe.clone());
        }
        if task.retries == 0 {
            return None;
        }
        let bytes =
            task.spec.args.iter().map(|arg| if let Arg::Value(packed) = arg { packed.bytes.0.len() } else { 0 });
        let bytes = bytes.sum::<usize>() as u64;
        let total = &self.lineage.total;
        if total.fetch_add(bytes, Ordering::Relaxed) + bytes > BYTES_LIMIT {
            total.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        let source =
            |id: &ObjectId| Source { id: *id, recipe: self.objects.get(*id).and_then(|object| object.recipe()) };
        let ingredients = task.spec.args.iter().map(|arg| match arg {
            Arg::Value(packed) => {
                let refs = packed.refs.iter().flat_map(|refs| &refs.ids).map(source).collect();
                Ingredient::Bytes(Packed { bytes: packed.bytes.clone(), refs: None }, refs)
            }
            Arg::Stored(id, _) | Arg::Ref(id, _) => Ingredient::Object(source(id)),
        });
        let mut ingredients: Vec<Ingredient> = ingredients.collect();
        let mut depth = 0;
        for source in ingredients.iter().flat_map(Ingredient::sources) {
            depth = depth.max(source.recipe.as_ref().map_or(0, |recipe| recipe.depth + 1));
        }
        if depth >= DEPTH_LIMIT {
            depth = 0;
            for source in ingredients.iter_mut().flat_map(Ingredient::sources_mut) {
                source.recipe = None;
            }
        }
        let mut spec = (*task.spec).clone();
        spec.args = Vec::new();
        Some(Arc::new(Recipe {
            attempt: AtomicU32::new(spec.attempt),
            spec: Arc::new(spec),
            shape: task.shape.clone(),
            name: task.name.clone(),
            retry_errors: task.retry_errors,
            retries: AtomicU32::new(task.retries),
            busy: AtomicBool::new(false),
            ingredients,
            depth,
            bytes,
            total: total.clone(),
        }))
    }

    /// Copies of one of our objects cannot be read at these nodes. Without any other, it is made again.
    pub(crate) fn object_lost(self: &Arc<Self>, id: ObjectId, at: &[NodeId], why: &str) {
        let Some(object) = self.objects.get(id) else { return };
        let (loss, gone) = object.lose(at);
        self.objects.not_stored(id, &gone);
        for holder in gone {
            // Whoever cannot read it there must not find it there later.
            self.delete_at(&holder, id);
        }
        match loss {
            Loss::None => {}
            Loss::All(Some(recipe)) => {
                // On the IO thread, which also takes in results: a task that makes another output of the same task again is
                // then either under way or over, and not in between.
                let (process, why) = (self.clone(), why.to_owned());
                self.io.spawn(async move { process.make_again(recipe, &why) });
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
            if id.owner() == self.id {
                self.object_lost(id, &[node], &why);
            } else if let Some(object) = self.objects.get(id) {
                // The owner hears of it too; it is asked when somebody reads.
                object.forget_copies(&[node]);
            }
        }
    }

    /// The argument `id` of a task could not be read: it waits for it again.
    pub(crate) fn argument_lost(self: &Arc<Self>, mut task: Task, id: ObjectId, why: &str) {
        let session = Session::of(self);
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
        let handle = |id: ObjectId| self.borrow(&session, id);
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
        when_resolved(&session, (id, parent, &name), args, move |session, args| {
            session.process().submit_resolved(task, args)
        });
    }

    fn make_again(self: &Arc<Self>, recipe: Arc<Recipe>, why: &str) {
        let mut to_make = vec![recipe];
        while let Some(recipe) = to_make.pop() {
            let Some(remaking) = Remaking::begin(&recipe) else { continue };
            self.start_again(remaking, why, &mut to_make);
        }
    }

    fn start_again(self: &Arc<Self>, remaking: Remaking, why: &str, to_make: &mut Vec<Arc<Recipe>>) {
        let session = Session::of(self);
        let recipe = remaking.0.clone();
        let attempt = recipe.attempt.load(Ordering::Relaxed) + 1;
        let spec = TaskSpec { attempt, remakes: true, ..(*recipe.spec).clone() };
        let (id, outputs) = (spec.id, spec.outputs);
        let retries = recipe.retries.load(Ordering::Relaxed);
        if retries == 0 {
            let why = format!("{why}; {} has no retries left to make it again", recipe.name);
            self.fail_outputs(id, outputs, &Error::ObjectLost { object: id.output(0), why });
            return;
        }
        recipe.retries.store(retries - 1, Ordering::Relaxed);
        tracing::info!(task = %recipe.name, why, "a lost object is made again");
        let args: SmallVec<[Outbound; 3]> = recipe
            .ingredients
            .iter()
            .map(|ingredient| match ingredient {
                Ingredient::Object(source) => Outbound::Object(self.revive(&session, source, to_make)),
                Ingredient::Bytes(packed, refs) => {
                    let held = refs.iter().map(|source| self.revive(&session, source, to_make)).collect();
                    Outbound::Value(PackedValue { content: Content::Inline(packed.bytes.0.clone()), held })
                }
            })
            .collect();
        let task = Task {
            spec: Arc::new(spec),
            shape: recipe.shape.clone(),
            name: recipe.name.clone(),
            retries: retries - 1,
            retry_errors: recipe.retry_errors,
            cancelled: false,
            held: crate::submission::holds(&args),
            remaking: Some(remaking),
        };
        let (id, parent, name) = (task.spec.id, task.spec.parent, task.name.clone());
        when_resolved(&session, (id, parent, &name), args, move |session, args| {
            session.process().submit_resolved(task, args)
        });
    }

    /// An object that a lost one was made from: as it is, or to be made again.
    fn revive(self: &Arc<Self>, session: &Session, source: &Source, to_make: &mut Vec<Arc<Recipe>>) -> Handle {
        let id = source.id;
        if id.owner() != self.id {
            return self.borrow(session, id);
        }
        let (handle, new) = self.objects.handle(session, id, Registration::default);
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

impl Ingredient {
    fn sources(&self) -> &[Source] {
        match self {
            Ingredient::Bytes(_, sources) => sources,
            Ingredient::Object(source) => std::slice::from_ref(source),
        }
    }

    fn sources_mut(&mut self) -> &mut [Source] {
        match self {
            Ingredient::Bytes(_, sources) => sources,
            Ingredient::Object(source) => std::slice::from_mut(source),
        }
    }
}
