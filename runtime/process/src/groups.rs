//! Placement groups, as this process uses them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use wingbeat_core::PlacementGroupId;
use wingbeat_core::codec::encode_value;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{
    BundleSpec, PlacementGroupSpec, PlacementGroupState, PlacementStrategy, ScopedName, Shape, Strategy,
};
use wingbeat_core::value::{ObjectValue, Packed};
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux;

use crate::object::Handle;
use crate::options::check_name;
use crate::process::Process;
use crate::session::Session;

/// How long the head may take to write a group down.
const HEAD_LIMIT: Duration = Duration::from_secs(60);

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

/// Groups that this process watches.
#[derive(Default)]
pub(crate) struct Watched {
    groups: Mutex<BTreeMap<PlacementGroupId, Watch>>,
}

#[derive(Default)]
struct Watch {
    state: Option<PlacementGroupState>,
    /// Refs that are there as soon as the group is placed.
    ready: Vec<Handle>,
}

impl Watched {
    /// The head's word on a group, for those who wait for it.
    fn is_now(&self, id: PlacementGroupId, state: &PlacementGroupState) -> Vec<Handle> {
        let mut groups = self.groups.lock();
        let Some(watch) = groups.get_mut(&id) else { return Vec::new() };
        watch.state = Some(state.clone());
        match state {
            PlacementGroupState::Pending => Vec::new(),
            PlacementGroupState::Placed { .. } => std::mem::take(&mut watch.ready),
            PlacementGroupState::Gone { .. } => groups.remove(&id).map(|watch| watch.ready).unwrap_or_default(),
        }
    }

    /// The session is over: nobody will say anything of groups any more.
    pub(crate) fn end(&self) -> Vec<Handle> {
        let groups = std::mem::take(&mut *self.groups.lock());
        groups.into_values().flat_map(|watch| watch.ready).collect()
    }
}

impl Process {
    pub(crate) fn group_is(self: &Arc<Self>, id: PlacementGroupId, state: &PlacementGroupState) {
        for handle in self.groups.is_now(id, state) {
            self.resolve_object(handle.object(), ready_value(state), Vec::new());
        }
    }
}

/// What a ref to the readiness of a group gives.
fn ready_value(state: &PlacementGroupState) -> ObjectValue {
    let nodes = match state {
        PlacementGroupState::Gone { cause } => return ObjectValue::Failed(cause.clone()),
        PlacementGroupState::Placed { nodes } => nodes,
        PlacementGroupState::Pending => &Vec::new(),
    };
    match encode_value(nodes) {
        Ok(encoded) => ObjectValue::Inline(Packed::plain(encoded.into_bytes())),
        Err(error) => {
            let what = "the nodes of a placement group".into();
            ObjectValue::Failed(Box::new(Error::Encode { what, why: error.0 }))
        }
    }
}

impl Session {
    /// Makes a placement group. Waits for the head to know it, durably; not for its places.
    ///
    /// # Errors
    /// It makes no sense, or its name is taken. That no nodes could ever hold it is what its readiness gives.
    pub async fn create_placement_group(&self, options: GroupOptions) -> Result<PlacementGroupSpec, Error> {
        let process = self.process().clone();
        let name = options.name.map(|name| ScopedName { namespace: process.namespace.clone(), name });
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
            job: process.job,
            name,
            strategy: options.strategy,
            bundles: bundles.collect(),
            detached: options.detached,
            captures_children: options.captures_children,
            patient: options.patient,
            owner: process.address().clone(),
        };
        self.ask_head(move |head| async move { head.create_placement_group(mux::within(HEAD_LIMIT), spec).await })
            .await?
    }

    /// Removes a placement group: what runs in it is ended, and what it reserved is free again. No error if it is gone
    /// already.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn remove_placement_group(&self, id: PlacementGroupId) -> Result<(), Error> {
        self.ask_head(move |head| async move { head.remove_placement_group(mux::within(HEAD_LIMIT), id).await }).await?
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
        self.ask_head(move |head| async move { head.find_placement_group(mux::within(HEAD_LIMIT), name).await }).await?
    }

    /// A ref to the node of each bundle of the group, that is there when all have one. Answers at once.
    pub fn placement_group_ready(&self, id: PlacementGroupId) -> Handle {
        let process = self.process();
        let handle = process.objects.insert(self, process.next_task().output(0), None);
        let mut groups = process.groups.groups.lock();
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
            process.resolve_object(handle.object(), ready_value(&state), Vec::new());
        }
        if is_new {
            process.tell_head(HeadMessage::WatchPlacementGroup(id));
        }
        handle
    }

    /// The shape of what is submitted here: in the placement group that captures it, unless it says where it is to be.
    pub(crate) fn captured(&self, mut shape: Shape) -> Shape {
        if shape.strategy == Strategy::Default
            && shape.labels.is_empty()
            && let Some(group) = *self.process().captures.read()
        {
            shape.strategy = Strategy::Bundle { group, index: None };
        }
        shape
    }
}
