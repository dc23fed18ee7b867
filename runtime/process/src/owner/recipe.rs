//! What is remembered of a task, so that its outputs can be made again when they are lost.
//!
//! A [`Recipe`] holds no handles. What it was made from may be freed, and is then made again too, as far
//! as its own recipe is known:
//!
//! ```text
//!   object ──▶ recipe ──▶ ingredient: bytes, or an object and its recipe ──▶ ...
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use wingbeat_core::spec::{Arg, Outputs, Shape, TaskSpec};
use wingbeat_core::value::Packed;
use wingbeat_core::{ObjectId, TaskId};

use crate::owner::memory_retries::MemoryRetries;
use crate::owner::name::Name;
use crate::owner::retrying::{RetryOn, one_less};

/// So many tasks in a row are remembered; of a longer chain, only the last ones.
const DEPTH_LIMIT: u32 = 256;
/// Bytes of arguments that all recipes of a process may hold; later objects get none.
const BYTES_LIMIT: u64 = 256 << 20;

/// What a task was called with. Lives as long as an output of it, or a recipe that was made from one.
pub(crate) struct Recipe {
    /// Without arguments.
    spec: TaskSpec,
    /// What it ran on, and asks for again.
    pub(super) shape: Arc<Shape>,
    /// For people.
    pub(super) name: Name,
    /// Those that were left when it was done: each time that it is made again has as many.
    pub(super) memory_retries: MemoryRetries,
    /// Which errors of its own cost a retry, as the task said.
    pub(super) retry_on: RetryOn,
    /// Attempts that are left, over all times that it is made again.
    retries: AtomicU32,
    /// The last that has begun.
    attempt: AtomicU32,
    /// Whether an attempt is under way.
    busy: AtomicBool,
    /// Its arguments, in order.
    pub(super) ingredients: Vec<Ingredient>,
    /// How many recipes lie behind it, one made from the next.
    depth: u32,
    /// What it holds of `total`, until it is dropped.
    bytes: u64,
    /// What all recipes of the process hold.
    total: Arc<AtomicU64>,
}

pub(super) enum Ingredient {
    /// The argument's bytes, and the refs inside it.
    Bytes(Packed, Vec<Source>),
    /// The value of an object.
    Object(Source),
}

pub(super) struct Source {
    pub id: ObjectId,
    pub recipe: Option<Arc<Recipe>>,
}

impl Drop for Recipe {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Recipe {
    /// The next attempt, without arguments, and how many are left after it. None if there are no more.
    pub(super) fn next_attempt(&self) -> Option<(TaskSpec, u32)> {
        let retries = self.retries.load(Ordering::Relaxed);
        let left = (retries > 0).then(|| one_less(retries))?;
        self.retries.store(left, Ordering::Relaxed);
        let attempt = self.attempt.load(Ordering::Relaxed).saturating_add(1);
        self.attempt.store(attempt, Ordering::Relaxed);
        Some((TaskSpec { attempt, remakes: true, ..self.spec.clone() }, left))
    }

    /// The task, and what it answers with.
    pub(super) fn outputs(&self) -> (TaskId, Outputs) {
        (self.spec.id, self.spec.outputs)
    }
}

/// Says of a task that it makes lost objects again; while it lives, no second one does.
pub(crate) struct Remaking(Arc<Recipe>);

impl Remaking {
    pub(super) fn begin(recipe: &Arc<Recipe>) -> Option<Remaking> {
        let began = !recipe.busy.swap(true, Ordering::AcqRel);
        began.then(|| Remaking(recipe.clone()))
    }

    pub(super) fn recipe(&self) -> &Arc<Recipe> {
        &self.0
    }

    /// It goes on with this attempt, and has so many left. Whoever makes the task again later begins after it, however this
    /// ends: other outputs of it may be lost then.
    pub(super) fn goes_on(&self, attempt: u32, retries: u32) {
        self.0.retries.store(retries, Ordering::Relaxed);
        self.0.attempt.store(attempt, Ordering::Relaxed);
    }
}

impl Drop for Remaking {
    fn drop(&mut self) {
        self.0.busy.store(false, Ordering::Release);
    }
}

/// A task as its recipe remembers it.
pub(super) struct SubmittedTask<'a> {
    pub spec: &'a TaskSpec,
    pub shape: &'a Arc<Shape>,
    pub name: &'a Name,
    pub retries: u32,
    pub memory_retries: MemoryRetries,
    pub retry_on: &'a RetryOn,
}

/// Bytes that are held by all recipes.
#[derive(Default)]
pub(crate) struct Lineage {
    total: Arc<AtomicU64>,
}

impl Lineage {
    /// The recipe of a task that is done; `known` gives those of the objects that it was made from. None if all recipes hold
    /// too much already.
    pub(super) fn remember(
        &self,
        task: &SubmittedTask<'_>,
        known: impl Fn(ObjectId) -> Option<Arc<Recipe>>,
    ) -> Option<Arc<Recipe>> {
        let args = &task.spec.args;
        let bytes = args.iter().map(|arg| if let Arg::Value(packed) = arg { packed.bytes.0.len() } else { 0 });
        let bytes = bytes.sum::<usize>() as u64;
        if self.total.fetch_add(bytes, Ordering::Relaxed) + bytes > BYTES_LIMIT {
            self.total.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        let source = |id: &ObjectId| Source { id: *id, recipe: known(*id) };
        let ingredients = args.iter().map(|arg| match arg {
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
        Some(Arc::new(Recipe {
            attempt: AtomicU32::new(task.spec.attempt),
            spec: TaskSpec { args: Vec::new(), ..task.spec.clone() },
            shape: task.shape.clone(),
            name: task.name.clone(),
            memory_retries: task.memory_retries,
            retry_on: task.retry_on.clone(),
            retries: AtomicU32::new(task.retries),
            busy: AtomicBool::new(false),
            ingredients,
            depth,
            bytes,
            total: self.total.clone(),
        }))
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
