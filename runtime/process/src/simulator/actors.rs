//! Actors as programs use them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use wingbeat_core::error::Error;
use wingbeat_core::spec::{ActorSpec, Arg, Outputs, ScopedName, Shape};
use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ActorId, Amount, FunctionId, ResourceSet};

use super::execution::{Answer, Asked, Question};
use super::head::NAMESPACE;
use super::side::address;
use super::site::{Site, Submitted};
use super::value::{Plan, Ref};
use crate::owner::calls::Call;
use crate::owner::name::Name;
use crate::owner::object::Producer;
use crate::owner::outbound::holds as args_held;
use crate::owner::submission::Request;
use crate::work::DEFAULT_GROUP;

impl Site {
    pub(super) async fn ask_head(&self, asked: Asked) -> Answer {
        let answer: Rc<RefCell<Option<Answer>>> = Rc::default();
        let mut asked = Some(asked);
        poll_fn(|cx| {
            if let Some(asked) = asked.take() {
                let (by, answer, waker) = (self.process.id, answer.clone(), cx.waker().clone());
                self.shared.questions.borrow_mut().push(Question { by, asked, answer, waker });
            }
            answer.borrow_mut().take().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Makes an actor that keeps these refs.
    pub(super) async fn create_actor(
        &self,
        seed: u64,
        refs: &[Ref],
        restarts: u32,
        name: Option<String>,
        holds: ResourceSet,
    ) -> Result<Ref, Error> {
        // Of a small cluster with faults: somebody has to end it.
        let is_detached = self.shared.config.faults && self.shared.config.large().is_none() && seed.is_multiple_of(3);
        let owner = &self.process.owner;
        let args = Self::arguments(Plan { seed, ..Plan::default() }, refs, &[]);
        let resolved: Vec<Arg> =
            args.iter().map(|arg| owner.resolve_one(arg).expect("it is a value")).collect::<Result<_, _>>()?;
        let (id, object) = (ActorId(self.shared.id()), owner.next_task().output(0));
        let spec = ActorSpec {
            id,
            job: self.process.job,
            class: FunctionId(2),
            class_name: "actor".into(),
            args: resolved,
            placement: Shape::of(if holds.is_empty() { ResourceSet::cpus(Amount::ONE) } else { holds.clone() }),
            holds,
            max_restarts: restarts,
            max_concurrency: 1,
            max_task_retries: 0,
            max_pending_calls: None,
            groups: BTreeMap::new(),
            detached: is_detached && name.is_some(),
            name: name.map(|name| ScopedName { namespace: NAMESPACE.into(), name }),
            yields_to_drain: seed.is_multiple_of(5),
            handle: object,
            owner: address(self.process.id),
        };
        if spec.yields_to_drain {
            self.shared.yielding.borrow_mut().insert(id);
        }
        let handle = owner.new_object(object, None);
        // What it was made with lives as long as the actor: a restart needs it again.
        handle.object().resolve(ObjectValue::Failed(Box::new(Error::NoSession)), args_held(&args).into_vec());
        owner.actors.makes(handle.object(), spec.clone());
        self.ask_head(Asked::Create(Box::new(spec))).await.inspect_err(|_| {
            owner.actors.forget(object);
        })?;
        Ok(Ref { handle, actor: Some(id) })
    }

    /// The actor of this name, which another process may have made.
    pub(super) async fn find_actor(&self, name: String) -> Result<Ref, Error> {
        let asked = Asked::Find(ScopedName { namespace: NAMESPACE.into(), name }, self.process.job);
        let info = self.ask_head(asked).await?.expect("it was found");
        self.shared.found.borrow_mut().insert(info.id);
        self.shared.found_handles.borrow_mut().insert(info.handle);
        self.process.side_learns(&info.owner);
        let handle = self.process.owner.borrow(info.handle);
        self.process.owner.actors.holds(handle.object(), info.id);
        Ok(Ref { handle, actor: Some(info.id) })
    }

    /// Calls an actor.
    pub(super) fn call(
        &self,
        actor: &Ref,
        plan: Plan,
        (refs, objects): (&[Ref], &[Ref]),
        outputs: Outputs,
        retries: u32,
    ) -> Submitted {
        let owner = &self.process.owner;
        let target = actor.actor.expect("it is a handle of an actor");
        let mut made = self.process.calls_made.borrow_mut();
        let number = made.entry(target).or_default();
        *number += 1;
        let plan = Plan { number: *number, ..plan };
        drop(made);
        let args = Self::arguments(plan, refs, objects);
        let id = owner.next_task();
        let submitted = self.outputs(id, outputs, Some(Producer { actor: target, group: DEFAULT_GROUP }));
        let name = Name::Given(id.to_string().into());
        let mut held = args_held(&args);
        held.push(actor.handle.clone());
        let spec = Arc::new(self.spec(id, outputs));
        let bytes = Default::default();
        let mut call = Call { spec, name, resolved: false, retries, limit: None, cancelled: false, held, bytes };
        let class_name: Arc<str> = "actor".into();
        match owner.resolve_now(&args) {
            Some(Ok(args)) => {
                Arc::make_mut(&mut call.spec).args = args;
                call.resolved = true;
                owner.submission.request(Request::Call { actor: target, class_name, call });
            }
            Some(Err(error)) => owner.fail_outputs(id, outputs, &error),
            None => {
                let (parent, name) = (call.spec.parent, call.name.clone());
                owner.submission.request(Request::Call { actor: target, class_name, call });
                let caller = owner.clone();
                owner.when_resolved((id, parent, &name), args, move |args| {
                    caller.submission.request(Request::CallReady { actor: target, id, args });
                });
            }
        }
        submitted
    }

    /// Ends an actor at once; it may be made again.
    pub(super) fn kill_actor(&self, actor: &Ref, may_restart: bool) {
        let Some(actor) = actor.actor else { return };
        self.shared.report.borrow_mut().deaths += 1;
        self.process.owner.kill_actor(actor, may_restart);
    }

    /// Ends an actor after the calls that this process has made.
    pub(super) fn terminate_actor(&self, actor: &Ref) {
        let Some(actor) = actor.actor else { return };
        self.shared.report.borrow_mut().deaths += 1;
        self.process.owner.submission.request(Request::Terminate(actor));
    }
}
