//! What a call may ask for.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::labels::Selector;
use wingbeat_core::names;
use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::spec::{Shape, Strategy};
use wingbeat_core::{Amount, ByteSize, ResourceSet};

pub use crate::owner::retrying::{Declared, Predicate, RetryOn, UNLIMITED};
use crate::session::registry::Defaults;

/// Attempts after the first that a system failure may cost, unless told otherwise.
pub const DEFAULT_RETRIES: u32 = 3;

/// Items of a stream that may be on the way, unless told otherwise.
pub const DEFAULT_STREAM_AHEAD: u32 = 16;

/// What a task, an actor or a bundle holds besides CPUs, and where it may be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlaceOptions {
    /// GPUs: a fraction of one, or whole ones.
    pub num_gpus: Option<f64>,
    /// Memory of one GPU, such as `8GiB`, instead of a number of GPUs.
    pub gpu_memory: Option<ByteSize>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Custom resources.
    pub resources: BTreeMap<String, f64>,
    /// Where it may be.
    pub strategy: Strategy,
    /// Rules about labels; the first that a node with room meets.
    pub labels: Vec<String>,
    /// Whether it waits for a node that could hold it, when there is none.
    pub patient: bool,
}

/// Options of a task or an actor call.
#[derive(Clone, Debug, Default)]
pub struct TaskOptions {
    /// What to call the task in logs and errors.
    pub name: Option<String>,
    /// CPUs; 1 if nothing is said.
    pub num_cpus: Option<f64>,
    /// What else it holds, and where it may run.
    pub place: PlaceOptions,
    /// Attempts after the first that a system failure may cost.
    pub max_retries: Option<u32>,
    /// Attempts that are ended because memory is short, and that are made again.
    pub max_memory_retries: Option<u32>,
    /// Which of the function's own errors are retried too.
    pub retry_on: Option<RetryOn>,
    /// Whether it has a process of its own, and runs nothing else in that while it waits.
    pub isolated: Option<bool>,
    /// How long the task may take from the call to its result; then it is cancelled.
    pub timeout: Option<Duration>,
    /// Items of a stream that may be on the way.
    pub stream_ahead: Option<u32>,
}

/// Options of an actor.
#[derive(Clone, Debug, Default)]
pub struct ActorOptions {
    /// A name to find it by.
    pub name: Option<String>,
    /// The namespace of the name; the session's if nothing is said.
    pub namespace: Option<String>,
    /// Whether it outlives its creator.
    pub detached: bool,
    /// A node that is drained may end without it.
    pub yields_to_drain: bool,
    /// CPUs for life. If nothing is said: 1 to be placed, none while it lives.
    pub num_cpus: Option<f64>,
    /// What else it holds for life, and where it may live.
    pub place: PlaceOptions,
    /// How often it may be started again.
    pub max_restarts: Option<u32>,
    /// Attempts after the first that restarts may cost a call.
    pub max_task_retries: Option<u32>,
    /// Calls that run at a time in the default group.
    pub max_concurrency: Option<u32>,
    /// Calls of one process that may be pending; more fail.
    pub max_pending_calls: Option<u32>,
    /// Concurrency groups, beside those that the class declares.
    pub groups: BTreeMap<String, u32>,
}

fn amount(what: &str, option: &str, value: f64) -> Result<Amount, Error> {
    Amount::new(value).map_err(|error| Error::InvalidOption {
        what: what.to_owned(),
        option: option.to_owned(),
        why: error.to_string(),
    })
}

impl PlaceOptions {
    fn is_plain(&self) -> bool {
        *self == PlaceOptions::default()
    }

    /// These, and what the attribute says where they say nothing.
    fn over(&self, defaults: &Defaults) -> PlaceOptions {
        let mut all = self.clone();
        if all.num_gpus.is_none() && all.gpu_memory.is_none() {
            (all.num_gpus, all.gpu_memory) = (defaults.num_gpus, defaults.gpu_memory.map(ByteSize::from));
        }
        all.memory = all.memory.or(defaults.memory);
        for (name, amount) in defaults.resources {
            all.resources.entry((*name).to_owned()).or_insert(*amount);
        }
        if all.labels.is_empty() {
            all.labels = defaults.labels.iter().map(|rules| (*rules).to_owned()).collect();
        }
        if defaults.spread && all.strategy == Strategy::default() {
            all.strategy = Strategy::Spread;
        }
        all.patient |= defaults.wait_until_feasible;
        all
    }

    /// The shape of something that holds these and so many CPUs.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn shape(&self, what: &str, cpus: Option<f64>) -> Result<Shape, Error> {
        let invalid =
            |option: &str, why: String| Error::InvalidOption { what: what.to_owned(), option: option.to_owned(), why };
        let mut set = ResourceSet::new();
        if let Some(cpus) = cpus {
            set.set(CPU, amount(what, "num_cpus", cpus)?);
        }
        if let Some(gpus) = self.num_gpus {
            set.set(GPU, amount(what, "num_gpus", gpus)?);
        }
        if let Some(memory) = self.memory {
            set.set(MEMORY, amount(what, "memory", memory as f64)?);
        }
        for (name, value) in &self.resources {
            if [CPU, GPU, MEMORY].contains(&name.as_str()) {
                let why = "this resource has an option of its own: num_cpus, num_gpus or memory";
                return Err(invalid(&format!("resource {name}"), why.into()));
            }
            set.set(name, amount(what, &format!("resource {}", names::shortened(name)), *value)?);
        }
        set.check().map_err(|error| invalid("num_gpus", error.to_string()))?;
        names::check_resources(&set).map_err(|why| invalid("resource", why))?;
        let gpu_memory = self.gpu_memory.map_or(0, ByteSize::bytes);
        let labels = self.labels.iter().map(|text| text.parse::<Selector>());
        let labels = labels.collect::<Result<Vec<_>, _>>().map_err(|error| invalid("labels", error.to_string()))?;
        names::check_selectors(&labels).map_err(|why| invalid("labels", why))?;
        let shape =
            Shape { resources: set, gpu_memory, strategy: self.strategy.clone(), labels, patient: self.patient };
        shape.check().map_err(|why| invalid("gpu_memory", why))?;
        Ok(shape)
    }
}

/// Checks a name that was given as an option.
pub(crate) fn check_name(what: &str, option: &str, name: Option<&str>) -> Result<(), Error> {
    let checked = name.map_or(Ok(()), names::check);
    checked.map_err(|why| Error::InvalidOption { what: what.to_owned(), option: option.to_owned(), why })
}

impl TaskOptions {
    /// Checks the name of a task or call of `what`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn check_name(&self, what: &str) -> Result<(), Error> {
        check_name(what, "name", self.name.as_deref())
    }

    /// The shape of a task of `what` with these options and the attribute's defaults.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn shape(&self, what: &str, defaults: &Defaults) -> Result<Shape, Error> {
        self.check_name(what)?;
        if self.num_cpus.is_none() && self.place.is_plain() && defaults.hold_nothing() {
            return Ok(Shape::of(ResourceSet::cpus(Amount::ONE)));
        }
        let cpus = self.num_cpus.or(defaults.num_cpus).unwrap_or(1.0);
        self.place.over(defaults).shape(what, Some(cpus))
    }
}

impl ActorOptions {
    /// What an actor of `what` needs to be placed, and what it holds for life.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn shapes(&self, what: &str, defaults: &Defaults) -> Result<(Shape, ResourceSet), Error> {
        check_name(what, "name", self.name.as_deref())?;
        check_name(what, "namespace", self.namespace.as_deref())?;
        self.groups.keys().try_for_each(|group| check_name(what, "concurrency_group", Some(group)))?;
        let cpus = self.num_cpus.or(defaults.num_cpus);
        let mut placement = self.place.over(defaults).shape(what, cpus)?;
        let holds = placement.resources.clone();
        if cpus.is_none() {
            placement.resources.set(CPU, Amount::ONE);
        }
        let concurrency = self.max_concurrency.or(defaults.max_concurrency);
        let mut groups = self.groups.values().copied().chain(defaults.groups.iter().map(|(_, most)| *most));
        if concurrency == Some(0) || groups.any(|most| most == 0) {
            return Err(Error::InvalidOption {
                what: what.to_owned(),
                option: "max_concurrency".into(),
                why: "at least one call must be able to run".into(),
            });
        }
        // Its methods were compiled to exclude each other: nothing asks its type to be `Sync`.
        let is_exclusive = defaults.max_concurrency.unwrap_or(1) == 1 && defaults.groups.is_empty();
        if is_exclusive && (concurrency.is_some_and(|calls| calls > 1) || !self.groups.is_empty()) {
            return Err(Error::InvalidOption {
                what: what.to_owned(),
                option: "max_concurrency".into(),
                why: format!(
                    "its class runs one call at a time; write #[wingbeat::actor(max_concurrency = {})] above its impl \
                     block, which this option may then change",
                    concurrency.unwrap_or(1).max(2)
                ),
            });
        }
        if self.max_pending_calls == Some(0) {
            return Err(Error::InvalidOption {
                what: what.to_owned(),
                option: "max_pending_calls".into(),
                why: "at least one call must be able to wait".into(),
            });
        }
        Ok((placement, holds))
    }
}

thread_local! {
    static ONCE: Cell<bool> = const { Cell::new(false) };
}

/// Calls `submit`; the tasks and calls that it submits on this thread are not tried again after a crash, whatever their options and
/// those of their actors say.
/// For tasks that are of use together only, where something larger is started again.
pub fn without_retries<T>(submit: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ONCE.set(self.0);
        }
    }
    let _restore = Restore(ONCE.replace(true));
    submit()
}

pub(crate) fn are_retried() -> bool {
    !ONCE.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_spreads_and_waits_unless_the_call_says_another_place() {
        let defaults = Defaults { spread: true, wait_until_feasible: true, ..Defaults::NONE };
        let shape = TaskOptions::default().shape("f", &defaults).unwrap();
        assert_eq!((shape.strategy, shape.patient), (Strategy::Spread, true));
        let node = Strategy::Node { node: wingbeat_core::NodeId::random(), soft: false };
        let place = PlaceOptions { strategy: node.clone(), ..PlaceOptions::default() };
        let there = TaskOptions { place, ..TaskOptions::default() };
        assert_eq!(there.shape("f", &defaults).unwrap().strategy, node);
    }
}
