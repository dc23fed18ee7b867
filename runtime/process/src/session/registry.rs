//! What code this executable has: remote functions and actor classes, known by path and signature.
//!
//! The `#[remote]` and `#[actor]` macros write one static of [`Function`] or [`Class`] each and submit a
//! reference to it; nothing is registered by hand. Driver and worker process are the same executable, so
//! both have the same tables.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use serde::Serialize;
use smallvec::SmallVec;
use wingbeat_core::FunctionId;
use wingbeat_core::codec::{self, Encoded};
use wingbeat_core::error::{ApplicationError, Error};

use crate::owner::retrying::RetryOn;
use crate::session::arguments::Arguments;
pub use crate::session::outgoing::Outgoing;

/// The outputs of a finished function, one per returned object.
pub type OutputValues = SmallVec<[Box<dyn Outgoing>; 1]>;

/// How a function ended.
pub type Finished = Result<OutputValues, Error>;

/// An item of a stream.
pub type Item = Result<Box<dyn Outgoing>, Error>;

/// A call that has its turn. It runs outside of any runtime.
pub type Turn = Box<dyn FnOnce() -> Finished + Send>;

/// A function that was called with its arguments.
pub enum Running {
    /// It was not asynchronous, and has ended.
    Done(Finished),
    /// It is not asynchronous, and waits for its turn at the actor's state.
    Waiting(BoxFuture<'static, Turn>),
    /// It goes on when polled.
    Future(BoxFuture<'static, Finished>),
    /// It gives its items one after another.
    Items(Box<dyn Iterator<Item = Item> + Send>),
    /// As `Items`, of an actor whose state the items borrow: it is polled outside of any runtime.
    ItemsOfActor(BoxStream<'static, Item>),
    /// It gives its items when polled.
    Stream(BoxStream<'static, Item>),
}

/// Makes one [`OutputValues`] of one value.
pub fn one<T: Serialize + Send + 'static>(value: T) -> OutputValues {
    SmallVec::from_buf([Box::new(value)])
}

/// The error that a function's own `Err(error)` becomes.
pub fn application_error<E: Serialize + std::fmt::Display + 'static>(function: &str, error: &E) -> Error {
    // An error that cannot be encoded still has its text.
    let payload = codec::encode_value(error).map(Encoded::into_bytes).unwrap_or_default();
    Error::Application {
        task: function.to_owned(),
        error: ApplicationError {
            type_name: std::any::type_name::<E>().to_owned(),
            message: error.to_string(),
            payload: payload.into(),
        },
        attempts: 1,
    }
}

/// Options of a task that the attribute gives; the call may override them. A field for each word that the attribute knows: macros fill them by name.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    /// CPUs.
    pub num_cpus: Option<f64>,
    /// GPUs.
    pub num_gpus: Option<f64>,
    /// Bytes of one GPU's memory, instead of GPUs.
    pub gpu_memory: Option<u64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Custom resources.
    pub resources: &'static [(&'static str, f64)],
    /// Rules about labels; the first that a node with room meets.
    pub labels: &'static [&'static str],
    /// Whether it goes to as many nodes as there are.
    pub spread: bool,
    /// Whether it waits for a node that could hold it, when there is none.
    pub wait_until_feasible: bool,
    /// How long a task or call may take from the call to its result.
    pub timeout: Option<Duration>,
    /// Attempts after the first that a system failure may cost.
    pub max_retries: Option<u32>,
    /// Attempts that are ended because memory is short, and that are made again.
    pub max_memory_retries: Option<u32>,
    /// Which of the function's own errors are retried too.
    pub retry_on: RetryOn,
    /// Whether it has a process of its own, and runs nothing else in that while it waits.
    pub isolated: bool,
    /// For actors: restarts.
    pub max_restarts: Option<u32>,
    /// For actors: attempts after the first that restarts may cost a call that says nothing itself.
    pub max_task_retries: Option<u32>,
    /// For actors: calls of one process that may be pending.
    pub max_pending_calls: Option<u32>,
    /// For actors: calls that run at a time.
    pub max_concurrency: Option<u32>,
    /// For actors: `(name, calls at a time)`.
    pub groups: &'static [(&'static str, u32)],
    /// For streams: items that may be on the way.
    pub stream_ahead: Option<u32>,
}

impl Defaults {
    /// Whether they say nothing of what is held, and where.
    pub(crate) fn hold_nothing(&self) -> bool {
        let Defaults { num_cpus, num_gpus, gpu_memory, memory, resources, labels, spread, wait_until_feasible, .. } =
            self;
        num_cpus.is_none()
            && num_gpus.is_none()
            && gpu_memory.is_none()
            && memory.is_none()
            && resources.is_empty()
            && labels.is_empty()
            && !spread
            && !wait_until_feasible
    }

    /// Nothing set.
    pub const NONE: Defaults = Defaults {
        num_cpus: None,
        num_gpus: None,
        gpu_memory: None,
        memory: None,
        resources: &[],
        labels: &[],
        spread: false,
        wait_until_feasible: false,
        timeout: None,
        max_retries: None,
        max_memory_retries: None,
        retry_on: RetryOn::Nothing,
        isolated: false,
        max_restarts: None,
        max_task_retries: None,
        max_pending_calls: None,
        max_concurrency: None,
        groups: &[],
        stream_ahead: None,
    };
}

/// A remote function.
pub struct Function {
    /// Crate, modules and name: `my_crate::jobs::square`.
    pub path: &'static str,
    /// Its signature as written, without white space that does not matter.
    pub signature: &'static str,
    /// Names of its parameters.
    pub parameters: &'static [&'static str],
    /// How many objects it returns; `None` for a stream.
    pub outputs: Option<u32>,
    /// Whether it is an `async fn`, which does not block its thread.
    pub is_asynchronous: bool,
    /// What the attribute says.
    pub defaults: Defaults,
    /// Decodes the arguments and calls it.
    pub run: fn(Arguments) -> Result<Running, Error>,
    /// Bit `i`: argument `i` has been seen to survive encoding and decoding.
    pub checked: AtomicU32,
}

impl Function {
    /// Its id.
    pub const fn id(&self) -> FunctionId {
        function_id(self.path, self.signature)
    }
}

/// An actor that lives in this process: what the macro's methods downcast to their own cell type.
pub type Instance = Arc<dyn Any + Send + Sync>;

/// A constructor that was called.
pub enum Constructing {
    /// It has ended.
    Done(Result<Instance, Error>),
    /// It goes on when polled.
    Future(BoxFuture<'static, Result<Instance, Error>>),
}

/// A class of actors.
pub struct Class {
    /// Crate, modules and name.
    pub path: &'static str,
    /// The constructor's signature.
    pub signature: &'static str,
    /// Names of the constructor's parameters.
    pub parameters: &'static [&'static str],
    /// What the attribute says.
    pub defaults: Defaults,
    /// Decodes the arguments and constructs.
    pub construct: fn(Arguments) -> Result<Constructing, Error>,
    /// Its methods.
    pub methods: &'static [&'static Method],
    /// As [`Function::checked`], for the constructor.
    pub checked: AtomicU32,
}

impl Class {
    /// Its id.
    pub const fn id(&self) -> FunctionId {
        function_id(self.path, self.signature)
    }
}

/// A method of an actor class.
pub struct Method {
    /// Crate, modules, class and name.
    pub path: &'static str,
    /// Its signature.
    pub signature: &'static str,
    /// Names of its parameters, without the receiver.
    pub parameters: &'static [&'static str],
    /// How many objects it returns; `None` for a stream.
    pub outputs: Option<u32>,
    /// Its concurrency group.
    pub group: Option<&'static str>,
    /// What the attribute says.
    pub defaults: Defaults,
    /// Decodes the arguments and calls it.
    pub run: fn(Instance, Arguments) -> Result<Running, Error>,
    /// As [`Function::checked`].
    pub checked: AtomicU32,
}

impl Method {
    /// Its id.
    pub const fn id(&self) -> FunctionId {
        function_id(self.path, self.signature)
    }
}

/// What the macros submit.
pub enum Entry {
    /// A remote function.
    Function(&'static Function),
    /// An actor class.
    Class(&'static Class),
}

inventory::collect!(Entry);

/// FNV-1a over path and signature, so that it can be a constant.
pub const fn function_id(path: &str, signature: &str) -> FunctionId {
    const fn mix(mut hash: u64, text: &str) -> u64 {
        let bytes = text.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
            i += 1;
        }
        hash
    }
    FunctionId(mix(mix(mix(0xcbf2_9ce4_8422_2325, path), "\u{0}"), signature))
}

/// Every function, class and method of this executable by id.
pub struct Table {
    functions: BTreeMap<FunctionId, &'static Function>,
    classes: BTreeMap<FunctionId, &'static Class>,
    methods: BTreeMap<FunctionId, &'static Method>,
}

impl Table {
    /// The function of this id.
    ///
    /// # Errors
    /// [`Error::FunctionNotFound`], with what there is.
    pub fn function(&self, id: FunctionId, called: Option<&str>) -> Result<&'static Function, Error> {
        self.functions.get(&id).copied().ok_or_else(|| self.missing(id, called))
    }

    /// What the function or method of this id is called.
    pub fn path(&self, id: FunctionId) -> Option<&'static str> {
        let function = self.functions.get(&id).map(|function| function.path);
        function.or_else(|| self.methods.get(&id).map(|method| method.path))
    }

    /// The actor class of this id.
    ///
    /// # Errors
    /// [`Error::FunctionNotFound`], with what there is.
    pub fn class(&self, id: FunctionId, called: &str) -> Result<&'static Class, Error> {
        self.classes.get(&id).copied().ok_or_else(|| self.missing(id, Some(called)))
    }

    /// The method of this id, which was called of an actor of this class.
    ///
    /// # Errors
    /// [`Error::FunctionNotFound`], with the methods that the class has.
    pub fn method(&self, id: FunctionId, class: &str) -> Result<&'static Method, Error> {
        self.methods.get(&id).copied().ok_or_else(|| {
            let known = self.classes.values().filter(|known| known.path == class).flat_map(|known| known.methods);
            not_found(&format!("a method of {class}"), id, known.map(|method| method.path).collect())
        })
    }

    fn missing(&self, id: FunctionId, called: Option<&str>) -> Error {
        let mut known: Vec<&str> = self.functions.values().map(|f| f.path).collect();
        known.extend(self.classes.values().map(|c| c.path));
        not_found(called.unwrap_or("a function"), id, known)
    }
}

fn not_found(called: &str, id: FunctionId, mut known: Vec<&str>) -> Error {
    known.sort_unstable();
    let more = known.len().saturating_sub(8);
    known.truncate(8);
    let mut shown = known.join(", ");
    if more > 0 {
        shown.push_str(&format!(", and {more} more"));
    }
    Error::FunctionNotFound {
        function: format!("{called} ({id})"),
        known: if shown.is_empty() { "none at all".into() } else { shown },
    }
}

/// The table of this executable, built on first use.
///
/// # Panics
/// When two entries have the same id: one of them could never be called, so nothing may start.
pub fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Table { functions: BTreeMap::new(), classes: BTreeMap::new(), methods: BTreeMap::new() };
        let mut seen: BTreeMap<FunctionId, (&str, &str)> = BTreeMap::new();
        let mut claim = |id: FunctionId, path: &'static str, signature: &'static str| {
            if let Some((other, _)) = seen.insert(id, (path, signature)) {
                panic!("the remote functions {other} and {path} have the same id {id}; rename one of them");
            }
        };
        for entry in inventory::iter::<Entry> {
            match entry {
                Entry::Function(function) => {
                    claim(function.id(), function.path, function.signature);
                    table.functions.insert(function.id(), function);
                }
                Entry::Class(class) => {
                    claim(class.id(), class.path, class.signature);
                    table.classes.insert(class.id(), class);
                    for method in class.methods {
                        claim(method.id(), method.path, method.signature);
                        table.methods.insert(method.id(), method);
                    }
                }
            }
        }
        table
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_depends_on_path_and_signature_and_nothing_else() {
        const A: FunctionId = function_id("a::f", "fn(u64)");
        assert_eq!(A, function_id("a::f", "fn(u64)"));
        assert_ne!(A, function_id("a::f", "fn(u32)"));
        assert_ne!(function_id("ab", "c"), function_id("a", "bc"));
    }
}
