//! What a call may ask for.

use std::collections::BTreeMap;
use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::spec::{Shape, Strategy};
use wingbeat_core::{Amount, ResourceSet};

use crate::registry::Defaults;

/// Attempts after the first that a system failure may cost, unless told otherwise.
pub const DEFAULT_RETRIES: u32 = 3;

/// Items of a stream that may be on the way, unless told otherwise.
pub const DEFAULT_STREAM_AHEAD: u32 = 16;

/// Options of a task or an actor call.
#[derive(Clone, Debug, Default)]
pub struct TaskOptions {
    /// What to call the task in logs and errors.
    pub name: Option<String>,
    /// CPUs; 1 if nothing is said.
    pub num_cpus: Option<f64>,
    /// GPUs: a fraction of one, or whole ones.
    pub num_gpus: Option<f64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Custom resources.
    pub resources: BTreeMap<String, f64>,
    /// Attempts after the first that a system failure may cost.
    pub max_retries: Option<u32>,
    /// Whether the function's own errors are retried too.
    pub retry_errors: Option<bool>,
    /// How long the task may take from the call to its result; then it is cancelled.
    pub timeout: Option<Duration>,
    /// Where it may run.
    pub strategy: Strategy,
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
    /// CPUs for life. If nothing is said: 1 to be placed, none while it lives.
    pub num_cpus: Option<f64>,
    /// GPUs for life.
    pub num_gpus: Option<f64>,
    /// Bytes of memory for life.
    pub memory: Option<u64>,
    /// Custom resources for life.
    pub resources: BTreeMap<String, f64>,
    /// How often it may be started again.
    pub max_restarts: Option<u32>,
    /// Calls that run at a time in the default group.
    pub max_concurrency: Option<u32>,
    /// Concurrency groups, beside those that the class declares.
    pub groups: BTreeMap<String, u32>,
    /// Where it may live.
    pub strategy: Strategy,
}

fn amount(what: &str, option: &str, value: f64) -> Result<Amount, Error> {
    Amount::new(value).map_err(|error| Error::InvalidOption {
        what: what.to_owned(),
        option: option.to_owned(),
        why: error.to_string(),
    })
}

fn resources(
    what: &str,
    cpus: Option<f64>,
    gpus: Option<f64>,
    memory: Option<u64>,
    custom: &BTreeMap<String, f64>,
) -> Result<ResourceSet, Error> {
    let mut set = ResourceSet::new();
    if let Some(cpus) = cpus {
        set.set(CPU, amount(what, "num_cpus", cpus)?);
    }
    if let Some(gpus) = gpus {
        set.set(GPU, amount(what, "num_gpus", gpus)?);
    }
    if let Some(memory) = memory {
        set.set(MEMORY, amount(what, "memory", memory as f64)?);
    }
    for (name, value) in custom {
        if [CPU, GPU, MEMORY].contains(&name.as_str()) {
            return Err(Error::InvalidOption {
                what: what.to_owned(),
                option: format!("resource {name}"),
                why: "this resource has an option of its own: num_cpus, num_gpus or memory".into(),
            });
        }
        set.set(name, amount(what, &format!("resource {name}"), *value)?);
    }
    set.check().map_err(|error| Error::InvalidOption {
        what: what.to_owned(),
        option: "num_gpus".to_owned(),
        why: error.to_string(),
    })?;
    Ok(set)
}

impl TaskOptions {
    /// Whether nothing was said that changes the shape of a task.
    fn is_plain(&self) -> bool {
        self.num_cpus.is_none()
            && self.num_gpus.is_none()
            && self.memory.is_none()
            && self.resources.is_empty()
            && self.strategy == Strategy::Default
    }

    /// The shape of a task of `what` with these options and the attribute's defaults.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn shape(&self, what: &str, defaults: &Defaults) -> Result<Shape, Error> {
        if self.is_plain() && defaults.num_cpus.is_none() && defaults.num_gpus.is_none() {
            return Ok(Shape { resources: ResourceSet::cpus(Amount::ONE), strategy: Strategy::Default });
        }
        let cpus = self.num_cpus.or(defaults.num_cpus).unwrap_or(1.0);
        let gpus = self.num_gpus.or(defaults.num_gpus);
        let resources = resources(what, Some(cpus), gpus, self.memory, &self.resources)?;
        Ok(Shape { resources, strategy: self.strategy.clone() })
    }
}

impl ActorOptions {
    /// What an actor of `what` needs to be placed, and what it holds for life.
    ///
    /// # Errors
    /// [`Error::InvalidOption`].
    pub fn shapes(&self, what: &str, defaults: &Defaults) -> Result<(Shape, ResourceSet), Error> {
        let cpus = self.num_cpus.or(defaults.num_cpus);
        let gpus = self.num_gpus.or(defaults.num_gpus);
        let holds = resources(what, cpus, gpus, self.memory, &self.resources)?;
        let mut placement = holds.clone();
        if cpus.is_none() {
            placement.set(CPU, Amount::ONE);
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
        Ok((Shape { resources: placement, strategy: self.strategy.clone() }, holds))
    }
}
