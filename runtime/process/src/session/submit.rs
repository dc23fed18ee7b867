//! What a session can be asked to do: tasks, actors, calls, cancelling.

use std::future::Future;
use std::sync::{Arc, LazyLock};

use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_core::resources::ResourceSet;
use wingbeat_core::spec::{ActorInfo, ActorSpec, Arg, Outputs, ScopedName, Shape, TaskSpec};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, Amount};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{HeadMessage, PeerMessage};
use wingbeat_net::mux;

use crate::context;
use crate::owner::calls::Call;
use crate::owner::dispatch::Task;
use crate::owner::memory_retries::{MEMORY_RETRIES, MemoryRetries};
use crate::owner::name::Name;
use crate::owner::object::{Handle, Producer};
use crate::owner::outbound::{Outbound, holds};
use crate::owner::submission::{Cancel, Request};
use crate::recorded::Event;
use crate::session::actor::ActorHandle;
use crate::session::options::{ActorOptions, DEFAULT_RETRIES, DEFAULT_STREAM_AHEAD, TaskOptions};
use crate::session::registry::{Class, Function, Method};
use crate::session::session::Session;
use crate::session::stream::StreamHandle;
use crate::session::values::check_ours;
use crate::work::DEFAULT_GROUP;

/// What a call answers at once.
pub enum Submitted {
    /// Objects that will be there later.
    Objects(SmallVec<[Handle; 1]>),
    /// Items that arrive one after another.
    Stream(StreamHandle),
}

/// The arguments of a call, or what was wrong with them.
pub type Args = Result<SmallVec<[Outbound; 3]>, Error>;

static ONE_CPU: LazyLock<Arc<Shape>> = LazyLock::new(|| Arc::new(Shape::of(ResourceSet::cpus(Amount::ONE))));

/// A submission that failed before it was one.
pub fn failed(outputs: Option<u32>, error: Error) -> Submitted {
    match outputs {
        None => Submitted::Stream(StreamHandle::failed(error)),
        Some(count) => Submitted::Objects((0..count.max(1)).map(|_| Handle::failed(error.clone())).collect()),
    }
}

fn outputs_of(outputs: Option<u32>, ahead: Option<u32>) -> Outputs {
    match outputs {
        Some(count) => Outputs::Fixed(count),
        None => Outputs::Stream { ahead: ahead.unwrap_or(DEFAULT_STREAM_AHEAD).max(1) },
    }
}

impl Session {
    /// Submits a task. Pauses only when very many wait already; what is wrong with it is what its outputs give.
    pub fn submit(&self, function: &'static Function, args: Args, options: &TaskOptions) -> Submitted {
        let shape = options.shape(function.path, &function.defaults).map(|shape| self.captured(shape));
        let shape = match shape {
            Ok(shape) if shape == **ONE_CPU => ONE_CPU.clone(),
            Ok(shape) => Arc::new(shape),
            Err(error) => return failed(function.outputs, error),
        };
        let args = match args {
            Ok(args) => args,
            Err(error) => return failed(function.outputs, error),
        };
        let bytes = self.submits(&args);
        let process = self.process();
        if let Some(error) = process.ended() {
            return failed(function.outputs, error.clone());
        }
        let id = process.owner.next_task();
        let outputs = outputs_of(function.outputs, options.stream_ahead.or(function.defaults.stream_ahead));
        let submitted = self.outputs(id, outputs, None);
        let retries = match crate::session::options::are_retried() {
            true => options.max_retries.or(function.defaults.max_retries).unwrap_or(DEFAULT_RETRIES),
            false => 0,
        };
        let memory_retries = options.max_memory_retries.or(function.defaults.max_memory_retries);
        let memory_retries = MemoryRetries::of(memory_retries.unwrap_or(MEMORY_RETRIES), retries);
        let spec = TaskSpec {
            id,
            function: function.id(),
            name: options.name.as_deref().map(Into::into),
            args: Vec::new(),
            outputs,
            attempt: 0,
            remakes: false,
            yields_memory: memory_retries.has_any(),
            // One that may not run twice does not run where another can end its process.
            shares_process: retries > 0
                && memory_retries.has_any()
                && Arc::ptr_eq(&shape, &ONE_CPU)
                && !options.isolated.unwrap_or(function.defaults.isolated),
            group: None,
            parent: context::parent(),
        };
        let name = Name::new(options.name.as_deref(), function.path);
        let task = Task {
            spec: Arc::new(spec),
            shape,
            name,
            retries,
            failures: 0,
            memory_retries,
            retry_on: options.retry_on.as_ref().unwrap_or(&function.defaults.retry_on).clone(),
            cancelled: false,
            held: holds(&args),
            bytes,
            remaking: None,
        };
        if let Some(limit) = options.timeout.or(function.defaults.timeout) {
            self.cancel_after(limit, id, outputs, task.name.to_string());
        }
        let (parent, name) = (task.spec.parent, task.name.clone());
        let owner = self.owner().clone();
        self.owner().when_resolved((id, parent, &name), args, move |args| owner.submit_resolved(task, args));
        self.has_submitted();
        submitted
    }

    /// What was submitted is sent while this thread goes on; or a moment later, if it is all there is, since who submits one at a
    /// time mostly waits for it next, and sends it then.
    fn has_submitted(&self) {
        let process = self.process();
        if process.rests() && (context::current().is_some() || !process.owner.submission.is_at_most_one()) {
            process.attend();
        }
    }

    fn outputs(&self, id: wingbeat_core::TaskId, outputs: Outputs, producer: Option<Producer>) -> Submitted {
        match outputs {
            Outputs::Stream { .. } => Submitted::Stream(StreamHandle::new(self, id, producer)),
            Outputs::Fixed(count) => Submitted::Objects(
                (0..count).map(|index| self.owner().new_object(id.output(index), producer)).collect(),
            ),
        }
    }

    fn cancel_after(&self, limit: std::time::Duration, task: wingbeat_core::TaskId, outputs: Outputs, name: String) {
        let process = self.process().clone();
        let timeout = async move {
            tokio::time::sleep(limit).await;
            if !process.owner.submission.timeouts.end(task) {
                return;
            }
            let error = Error::TimedOut { what: name, limit_ms: limit.as_millis() as u64 };
            process.owner.fail_outputs(task, outputs, &error);
            process.owner.cancel(Cancel { task, outputs, force: false, again: false });
        };
        let process = self.process();
        process.owner.submission.timeouts.begin(task, || {
            let timer = process.vital("a time limit", timeout);
            Box::new(move || timer.abort())
        });
    }

    /// Calls a method of an actor. Pauses only when very many wait already.
    pub fn call(&self, actor: &ActorHandle, method: &'static Method, args: Args, options: &TaskOptions) -> Submitted {
        let session = match check_ours(self.owner().cluster, actor.handle()) {
            Ok(()) => self,
            Err(error) => return failed(method.outputs, error),
        };
        let args = match options.check_name(method.path).and(args) {
            Ok(args) => args,
            Err(error) => return failed(method.outputs, error),
        };
        let bytes = session.submits(&args);
        let process = session.process();
        if let Some(error) = process.ended() {
            return failed(method.outputs, error.clone());
        }
        let id = process.owner.next_task();
        let outputs = outputs_of(method.outputs, options.stream_ahead.or(method.defaults.stream_ahead));
        let producer = Producer { actor: actor.id(), group: method.group.unwrap_or(DEFAULT_GROUP) };
        let submitted = session.outputs(id, outputs, Some(producer));
        let name = Name::new(options.name.as_deref(), method.path);
        let mut held = holds(&args);
        held.push(actor.handle().clone());
        let spec = TaskSpec {
            id,
            function: method.id(),
            name: options.name.as_deref().map(Into::into),
            args: Vec::new(),
            outputs,
            attempt: 0,
            remakes: false,
            yields_memory: false,
            shares_process: false,
            group: method.group.map(Into::into),
            parent: context::parent(),
        };
        if let Some(limit) = options.timeout.or(method.defaults.timeout) {
            session.cancel_after(limit, id, outputs, name.to_string());
        }
        let retries = match crate::session::options::are_retried() {
            true => options.max_retries.or(method.defaults.max_retries).unwrap_or(actor.max_task_retries()),
            false => 0,
        };
        let limit = actor.max_pending_calls();
        let spec = Arc::new(spec);
        let mut call = Call { spec, name, resolved: false, retries, limit, cancelled: false, held, bytes };
        let (target, class_name) = (actor.id(), actor.class_name_arc().clone());
        // It takes its place in the queue now, with or without its arguments.
        match session.owner().resolve_now(&args) {
            Some(Ok(args)) => {
                Arc::make_mut(&mut call.spec).args = args;
                call.resolved = true;
                process.owner.submission.request(Request::Call { actor: target, class_name, call });
            }
            Some(Err(error)) => {
                process.owner.submission.timeouts.end(id);
                process.owner.fail_outputs(id, outputs, &error);
            }
            None => {
                let (parent, name) = (call.spec.parent, call.name.clone());
                process.owner.submission.request(Request::Call { actor: target, class_name, call });
                let owner = session.owner().clone();
                session.owner().when_resolved((id, parent, &name), args, move |args| {
                    owner.submission.request(Request::CallReady { actor: target, id, args });
                });
            }
        }
        session.has_submitted();
        submitted
    }

    fn actor_spec(&self, class: &'static Class, args: &[Outbound], options: &ActorOptions) -> Result<ActorSpec, Error> {
        let process = self.process();
        let (placement, holds) = options.shapes(class.path, &class.defaults)?;
        let placement = self.captured(placement);
        let mut groups: std::collections::BTreeMap<String, u32> =
            class.defaults.groups.iter().map(|(name, most)| ((*name).to_owned(), *most)).collect();
        groups.extend(options.groups.clone());
        if options.detached && options.name.is_none() {
            return Err(Error::InvalidOption {
                what: class.path.to_owned(),
                option: "detached".into(),
                why: "a detached actor needs a name, or nobody could ever find it again".into(),
            });
        }
        let has_refs = args.iter().any(|arg| matches!(arg, Outbound::Object(_)));
        let args = args
            .iter()
            .map(|arg| match (self.owner().resolve_one(arg), arg) {
                (Some(resolved), _) => resolved,
                // The worker process asks its owner, however long it takes.
                (None, Outbound::Object(handle)) => {
                    let owner = process
                        .address_of(handle.id().owner())
                        .ok_or(Error::OwnerDied { object: handle.id(), owner: handle.id().owner() })?;
                    Ok(Arg::Ref(handle.id(), owner))
                }
                (None, Outbound::Value(_)) => Err(Error::NoSession),
            })
            .collect::<Result<Vec<Arg>, Error>>()?;
        let max_restarts = options.max_restarts.or(class.defaults.max_restarts).unwrap_or(0);
        if options.detached && max_restarts != 0 && (has_refs || args.iter().any(|arg| matches!(arg, Arg::Stored(..))))
        {
            return Err(Error::InvalidOption {
                what: class.path.to_owned(),
                option: "detached".into(),
                why: "an argument of its constructor is a ref, or larger than 100 KiB, so that it ends with this program, and the actor could \
                      not be started again: have the constructor read it from where it stays, or give it with a call; without max_restarts \
                      the first life has it"
                    .into(),
            });
        }
        Ok(ActorSpec {
            id: ActorId::random(),
            job: process.wire.who.job,
            class: class.id(),
            class_name: class.path.to_owned(),
            args,
            placement,
            holds,
            max_restarts,
            max_concurrency: options.max_concurrency.or(class.defaults.max_concurrency).unwrap_or(1),
            max_task_retries: options.max_task_retries.or(class.defaults.max_task_retries).unwrap_or(0),
            max_pending_calls: options.max_pending_calls.or(class.defaults.max_pending_calls),
            groups,
            name: options.name.clone().map(|name| ScopedName {
                namespace: options.namespace.clone().unwrap_or_else(|| process.wire.who.namespace.clone()),
                name,
            }),
            detached: options.detached,
            yields_to_drain: options.yields_to_drain,
            handle: process.owner.next_task().output(0),
            owner: process.address().clone(),
        })
    }

    /// Makes an actor. Waits only for the head to have taken it in; whatever else goes wrong is what its
    /// calls give.
    pub fn create_actor(&self, class: &'static Class, args: Args, options: &ActorOptions) -> ActorHandle {
        let created = self.request_actor(class, args, options).and_then(|(spec, args)| {
            let session = self.clone();
            self.process().on_io(async move { session.send_actor(class, spec, args, false).await })
        });
        created.unwrap_or_else(|error| ActorHandle::failed(class, error))
    }

    /// The actor of the name in `options`, made if there is none.
    pub fn get_or_create_actor(
        &self,
        class: &'static Class,
        args: Args,
        options: &ActorOptions,
    ) -> impl Future<Output = Result<ActorHandle, Error>> + Send + use<> {
        let request = self.request_actor(class, args, options);
        let session = self.clone();
        async move {
            let (spec, args) = request?;
            if spec.name.is_none() {
                return Err(Error::InvalidOption {
                    what: class.path.to_owned(),
                    option: "name".into(),
                    why: "get_or_create needs a name".into(),
                });
            }
            session.clone().on_io_async(async move { session.send_actor(class, spec, args, true).await }).await
        }
    }

    fn request_actor(
        &self,
        class: &'static Class,
        args: Args,
        options: &ActorOptions,
    ) -> Result<(ActorSpec, SmallVec<[Outbound; 3]>), Error> {
        if let Some(error) = self.process().ended() {
            return Err(error.clone());
        }
        let args = args?;
        Ok((self.actor_spec(class, &args, options)?, args))
    }

    async fn on_io_async<T, F>(&self, future: F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
        T: Send + 'static,
    {
        match self.process().io().spawn(future).await {
            Ok(answer) => answer,
            Err(_) => Err(self.process().no_answer()),
        }
    }

    async fn send_actor(
        self,
        class: &'static Class,
        spec: ActorSpec,
        args: SmallVec<[Outbound; 3]>,
        or_get: bool,
    ) -> Result<ActorHandle, Error> {
        let process = self.process();
        let (id, object, detached) = (spec.id, spec.handle, spec.detached);
        let (limit, retries) = (spec.max_pending_calls, spec.max_task_retries);
        let handle = process.owner.new_object(object, None);
        // Constructor arguments live as long as the actor: a restart needs them again.
        handle.object().resolve(ObjectValue::Failed(Box::new(Error::NoSession)), holds(&args).into_vec());
        // Before it is known: a head that is started again meanwhile is told of it.
        if !detached {
            process.owner.actors.makes(handle.object(), spec.clone());
        }
        process.wire.record(|| Event::CreateActor(Box::new(spec.clone())));
        let answer = self.ask_head(move |head| {
            let spec = spec.clone();
            async move { head.create_actor(mux::within(limits().written), spec, or_get).await }
        });
        let info = match answer.await {
            Ok(Ok(info)) => info,
            Ok(Err(error)) => {
                process.owner.actors.forget(object);
                return Err(error);
            }
            Err(error) => {
                process.owner.actors.forget(object);
                // It may exist, or be made when the head goes on. Nobody would ever hold a handle of it.
                let by = "its creator, which had no answer from the head".to_owned();
                process.tell_head(HeadMessage::TerminateActor { actor: id, by });
                return Err(error);
            }
        };
        if info.id != id {
            process.owner.actors.forget(object);
            return self.actor_handle(class, info);
        }
        if detached {
            process.owner.actors.keeps(id, handle.clone());
        }
        Ok(ActorHandle::new(handle, id, class.id(), class.path.into(), detached)
            .with_limit(limit)
            .with_retries(retries))
    }

    fn actor_handle(&self, class: &'static Class, info: ActorInfo) -> Result<ActorHandle, Error> {
        if info.class != class.id() {
            return Err(Error::InvalidArgument {
                what: format!(
                    "the actor of that name is a {} and not a {} of this executable; \
                     actors are shared only between programs built from the same source",
                    info.class_name, class.path
                ),
            });
        }
        if info.is_of_another_build && self.process().wire.other_builds.insert(info.id) {
            self.process().notice(&format!(
                "{} ({}) runs in another build than this process: what has a type whose fields have changed is misread, or an error. To \
                 replace it, kill it and make it again",
                info.class_name, info.id
            ));
        }
        Ok(self.handle_of_any_class(info))
    }

    fn handle_of_any_class(&self, info: ActorInfo) -> ActorHandle {
        self.process().know(&info.owner);
        let handle = if info.detached {
            self.owner().new_object(self.owner().next_task().output(0), None)
        } else {
            let handle = self.owner().borrow(info.handle);
            // Also of an actor of ours: its last handle may have been dropped, and what is known of its calls goes with this one.
            self.owner().actors.holds(handle.object(), info.id);
            handle
        };
        ActorHandle::new(handle, info.id, info.class, info.class_name.into(), info.detached)
            .with_limit(info.max_pending_calls)
            .with_retries(info.max_task_retries)
    }

    /// A handle of the actor that this process is.
    ///
    /// # Errors
    /// It is none, or of another class.
    pub(crate) fn own_handle(&self, class: &'static Class) -> Result<ActorHandle, Error> {
        let spec = self.process().wire.assigned.read().actor.clone().ok_or(Error::NoSession)?;
        if spec.class != class.id() {
            let what = format!("this actor is a {}, and not a {}", spec.class_name, class.path);
            return Err(Error::InvalidArgument { what });
        }
        let info = ActorInfo {
            id: spec.id,
            class: spec.class,
            class_name: spec.class_name.clone(),
            handle: spec.handle,
            owner: spec.owner.clone(),
            detached: spec.detached,
            max_task_retries: spec.max_task_retries,
            max_pending_calls: spec.max_pending_calls,
            is_of_another_build: false,
        };
        self.actor_handle(class, info)
    }

    /// Finds an actor by name; in the session's namespace if none is given, and of any class if none is.
    pub fn find_actor(
        &self,
        name: &str,
        namespace: Option<&str>,
        class: Option<&'static Class>,
    ) -> impl Future<Output = Result<ActorHandle, Error>> + Send + use<> {
        let name = ScopedName {
            namespace: namespace.unwrap_or(&self.process().wire.who.namespace).to_owned(),
            name: name.to_owned(),
        };
        let session = self.clone();
        let checked = [&name.namespace, &name.name].into_iter().try_for_each(|name| {
            let checked = wingbeat_core::names::check(name);
            checked.map_err(|why| Error::InvalidArgument { what: format!("finding an actor by its name: {why}") })
        });
        async move {
            checked?;
            let asks = session.process().wire.who.job;
            let find = session.ask_head(move |head| {
                let name = name.clone();
                async move { head.find_actor(mux::within(limits().head), name, asks).await }
            });
            let found = find.await??;
            match class {
                Some(class) => session.actor_handle(class, found),
                None => Ok(session.handle_of_any_class(found)),
            }
        }
    }

    /// Ends an actor at once.
    pub fn kill(&self, actor: &ActorHandle, may_restart: bool) {
        self.owner().kill_actor(actor.id(), may_restart);
    }

    /// Lets an actor finish what this process has called and others have sent, and ends it. Later calls fail.
    pub fn terminate(&self, actor: &ActorHandle) {
        self.owner().submission.request(Request::Terminate(actor.id()));
    }

    /// Asks for the task that makes this object not to run, or to stop; if another process owns the object, that one is
    /// asked to. With `force`, a task's worker process ends if it runs; a call of an actor is answered at once, and the
    /// actor lives on. A finished task is left alone.
    pub fn cancel(&self, handle: &Handle, force: bool) {
        if handle.is_ready() {
            return;
        }
        let (process, object) = (self.process(), handle.id());
        if object.owner() == process.id() {
            process.owner.cancel_object(object, force);
        } else {
            // An owner that is gone has failed its objects already.
            process.send_to(object.owner(), PeerMessage::CancelObject { object, force });
        }
    }
}
