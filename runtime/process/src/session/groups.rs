//! Placement groups, as this process uses them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wingbeat_core::PlacementGroupId;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{
    BundleSpec, PlacementGroupSpec, PlacementGroupState, PlacementStrategy, ScopedName, Shape, Strategy,
};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux;

use crate::owner::object::Handle;
use crate::recorded::Event;
use crate::session::options::check_name;
use crate::session::session::Session;
pub use crate::wire::watched::Drained;
use crate::wire::watched::ready_value;

/// What a placement group is asked for with.
#[derive(Clone, Debug, Default)]
pub struct GroupOptions {
    /// What it reserves; each was made like the shape of a task.
    pub bundles: Vec<Shape>,
    /// How its bundles lie to each other.
    pub strategy: PlacementStrategy,
    /// A name to find it by.
    pub name: Option<String>,
    /// Whether it outlives its creator.
    pub detached: bool,
    /// Whether what runs in it runs its own tasks there too.
    pub captures_children: bool,
    /// Whether it waits for nodes that could hold it, when there are none.
    pub patient: bool,
}

/// A group that was made for somebody who may not wait for it any more.
struct Unclaimed {
    session: Session,
    group: PlacementGroupId,
    is_claimed: AtomicBool,
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if !*self.is_claimed.get_mut() {
            self.session.give_up_placement_group(self.group);
        }
    }
}

impl Session {
    /// Makes a placement group. Waits for the head to know it, durably; not for its places. If this is dropped before it is
    /// done, there will be no group.
    ///
    /// # Errors
    /// It makes no sense, its name is taken, or no nodes could ever hold it.
    pub async fn create_placement_group(&self, options: GroupOptions) -> Result<PlacementGroupSpec, Error> {
        let process = self.process().clone();
        let name = options.name.map(|name| ScopedName { namespace: process.wire.who.namespace.clone(), name });
        check_name("a placement group", "name", name.as_ref().map(|name| name.name.as_str()))?;
        if options.detached && name.is_none() {
            return Err(Error::InvalidOption {
                what: "a placement group".into(),
                option: "detached".into(),
                why: "a detached group needs a name, or nobody could ever find it again".into(),
            });
        }
        let bundles = options.bundles.into_iter().map(|shape| {
            let Shape { resources, gpu_memory, labels, .. } = shape;
            BundleSpec { resources, gpu_memory, labels }
        });
        let spec = PlacementGroupSpec {
            id: PlacementGroupId::random(),
            job: process.wire.who.job,
            name,
            strategy: options.strategy,
            bundles: bundles.collect(),
            detached: options.detached,
            captures_children: options.captures_children,
            patient: options.patient,
            owner: process.address().clone(),
        };
        // Also when nothing is heard of it in time: the head may still make it.
        let (session, group) = (self.clone(), spec.id);
        let unclaimed = Arc::new(Unclaimed { session, group, is_claimed: AtomicBool::new(false) });
        // At once: somebody else may find and remove it before the answer is here.
        if !spec.detached {
            self.process().wire.own_groups.insert(spec.id, false);
        }
        self.process().wire.record(|| Event::CreateGroup(Box::new(spec.clone())));
        let made = self.ask_head(move |head| {
            let (spec, unclaimed) = (spec.clone(), unclaimed.clone());
            async move {
                let made = head.create_placement_group(mux::within(limits().written), spec).await?;
                Ok((made, unclaimed))
            }
        });
        let (answer, unclaimed) = made.await?;
        // The head has made it, or has not.
        unclaimed.is_claimed.store(true, Ordering::Relaxed);
        let own = &self.process().wire.own_groups;
        match &answer {
            Ok(_) => own.alter(&group, |_, _| true),
            Err(_) => drop(own.remove(&group)),
        }
        answer
    }

    /// As [`Session::remove_placement_group`], without waiting for it.
    pub fn give_up_placement_group(&self, id: PlacementGroupId) {
        let session = self.clone();
        // It fails only when the head is gone, and then nothing is reserved any more.
        self.process().vital("giving up a placement group", async move {
            let _ = session.remove_placement_group(id).await;
        });
    }

    /// Removes a placement group: what runs in it is ended, and what it reserved is free again. No error if it is gone
    /// already.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn remove_placement_group(&self, id: PlacementGroupId) -> Result<(), Error> {
        self.process().wire.record(|| Event::RemoveGroup(id));
        self.process().wire.own_groups.remove(&id);
        self.ask_head(move |head| async move { head.remove_placement_group(mux::within(limits().written), id).await })
            .await?
    }

    /// The placement group of this name, in the session's namespace unless told otherwise.
    ///
    /// # Errors
    /// [`Error::PlacementGroupNotFound`].
    pub async fn find_placement_group(&self, name: &str, namespace: Option<&str>) -> Result<PlacementGroupSpec, Error> {
        let namespace = namespace.unwrap_or(self.namespace()).to_owned();
        for name in [name, &namespace] {
            check_name("finding a placement group", "name", Some(name))?;
        }
        let name = ScopedName { namespace, name: name.to_owned() };
        self.ask_head(move |head| {
            let name = name.clone();
            async move { head.find_placement_group(mux::within(limits().head), name).await }
        })
        .await?
    }

    /// A ref to the node of each bundle of the group, that is there when all have one. Answers at once.
    pub fn placement_group_ready(&self, id: PlacementGroupId) -> Handle {
        let process = self.process();
        let handle = process.owner.new_object(process.owner.next_task().output(0), None);
        let mut groups = process.wire.groups.groups.lock();
        if process.ended().is_some() {
            // Then the handle says so already.
            return handle;
        }
        let watch = groups.entry(id).or_default();
        let is_new = watch.state.is_none() && watch.ready.is_empty();
        let known = watch.state.clone().filter(|state| matches!(state, PlacementGroupState::Placed { .. }));
        if known.is_none() {
            watch.ready.push(handle.clone());
        }
        drop(groups);
        if let Some(state) = known {
            process.owner.resolve_object(handle.object(), ready_value(&state), Vec::new());
        }
        if is_new {
            process.tell_head(HeadMessage::WatchPlacementGroup(id));
        }
        handle
    }

    /// Waits until a node of a group is drained; for a group whose readiness was asked for here. It is not for those who
    /// use its bundles for single tasks and actors, which are moved one by one.
    pub async fn placement_group_drained(&self, id: PlacementGroupId) -> Drained {
        loop {
            if let Some(drained) = self.placement_group_draining(id, None).await {
                return drained;
            }
        }
    }

    /// As [`Session::placement_group_drained`]: waits until something else than `known` is true. None when no node of it is
    /// drained any more.
    pub async fn placement_group_draining(&self, id: PlacementGroupId, known: Option<&Drained>) -> Option<Drained> {
        let watched = &self.process().wire.groups;
        loop {
            let told = watched.told.notified();
            // A group that is gone, or of which nobody will hear any more, is no group that stays where it is.
            let now = watched.groups.lock().get(&id).map(|watch| watch.drained.clone());
            match (now, known) {
                (None, _) | (Some(None), None) => {}
                (Some(Some(now)), Some(known)) if now.is_as(known) => {}
                (Some(now), _) => return now,
            }
            told.await;
        }
    }

    /// The shape of what is submitted here: in the placement group that captures it, unless it says where it is to be.
    pub(crate) fn captured(&self, mut shape: Shape) -> Shape {
        if shape.strategy == Strategy::Default
            && shape.labels.is_empty()
            && let Some(group) = self.process().wire.assigned.read().captures
        {
            shape.strategy = Strategy::Bundle { group, index: None };
        }
        shape
    }
}
