//! Resources that are reserved together.

use std::future::{Future, IntoFuture};
use std::pin::Pin;

#[allow(unused_imports, reason = "named in the documentation")]
use wingbeat_core::error::Error;
use wingbeat_core::error::Result;
use wingbeat_core::spec::{PlacementGroupSpec, PlacementStrategy};
use wingbeat_core::{NodeId, PlacementGroupId};
use wingbeat_process::Session;
use wingbeat_process::groups::{Drained, GroupOptions};
use wingbeat_process::options::PlaceOptions;

use crate::ObjectRef;
use crate::placement::holding_options;

/// What a placement group reserves on one node.
///
/// ```
/// use wingbeat::Bundle;
/// let bundle = Bundle::new().num_cpus(4.0).num_gpus(1.0).labels("accelerator-type=NVIDIA-H200");
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a bundle does nothing until it is in a placement group"]
pub struct Bundle {
    options: BundleOptions,
}

#[derive(Clone, Debug, Default)]
struct BundleOptions {
    num_cpus: Option<f64>,
    place: PlaceOptions,
}

impl Bundle {
    /// Nothing yet; a bundle must reserve something.
    pub fn new() -> Self {
        Self::default()
    }

    /// CPUs that it reserves; none if nothing is said.
    pub fn num_cpus(mut self, cpus: f64) -> Self {
        self.options.num_cpus = Some(cpus);
        self
    }

    holding_options!();
}

/// A placement group that is asked for; awaiting it makes the group.
///
/// ```no_run
/// use wingbeat::{Bundle, PlacementStrategy, placement_group};
///
/// # struct Trainer; #[wingbeat::actor] impl Trainer { fn new() -> Self { Trainer } fn step(&self) {} }
/// # async fn run() -> wingbeat::Result<()> {
/// let group = placement_group(vec![Bundle::new().num_cpus(1.0).num_gpus(1.0); 4])
///     .strategy(PlacementStrategy::StrictSpread)
///     .await?;
/// group.ready().get_timeout(std::time::Duration::from_secs(60)).await?;
/// let trainers: Vec<_> =
///     (0..4).map(|rank| Trainer::options().num_gpus(1.0).in_bundle(&group, rank).remote()).collect();
/// group.remove().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is reserved until this is awaited"]
pub struct PlacementGroupBuilder {
    bundles: Vec<Bundle>,
    options: GroupOptions,
}

/// A group of bundles that are reserved all at once or not at all; packed on few nodes if nothing else is said.
///
/// It lives until it is removed, or until its creator ends. What runs in it ends with it. A group with a bundle that no
/// node could ever hold, or with more than all nodes have, is not made: [`Error::Infeasible`](crate::Error::Infeasible).
pub fn placement_group(bundles: impl IntoIterator<Item = Bundle>) -> PlacementGroupBuilder {
    PlacementGroupBuilder { bundles: bundles.into_iter().collect(), options: GroupOptions::default() }
}

impl PlacementGroupBuilder {
    /// How its bundles lie to each other.
    pub fn strategy(mut self, strategy: PlacementStrategy) -> Self {
        self.options.strategy = strategy;
        self
    }

    /// A name by which [`PlacementGroup::named`] finds it, unique within the session's namespace.
    pub fn name(mut self, name: &str) -> Self {
        self.options.name = Some(name.to_owned());
        self
    }

    /// It outlives its creator and its job, until it is removed. It needs a name.
    pub fn detached(mut self) -> Self {
        self.options.detached = true;
        self
    }

    /// Tasks and actors that its tasks and actors make run in it too, unless they say where else.
    pub fn capture_children(mut self) -> Self {
        self.options.captures_children = true;
        self
    }

    /// When no nodes could ever hold it, it waits for such, instead of failing at once.
    pub fn wait_until_feasible(mut self) -> Self {
        self.options.patient = true;
        self
    }

    async fn create(self) -> Result<PlacementGroup> {
        let session = Session::current()?;
        let mut options = self.options;
        for (index, bundle) in self.bundles.into_iter().enumerate() {
            let what = format!("bundle {index} of a placement group");
            let BundleOptions { num_cpus, place } = bundle.options;
            options.bundles.push(place.shape(&what, num_cpus)?);
        }
        let spec = session.create_placement_group(options).await?;
        Ok(PlacementGroup { spec, session })
    }

    /// As awaiting it, blocking this thread.
    ///
    /// # Errors
    /// As [`placement_group`].
    pub fn create_blocking(self) -> Result<PlacementGroup> {
        let session = Session::current()?;
        session.block_on(self.create())
    }
}

impl IntoFuture for PlacementGroupBuilder {
    type Output = Result<PlacementGroup>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<PlacementGroup>> + Send>>;
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.create())
    }
}

/// A placement group. Copies of this handle are all the same group. Dropping them changes nothing: the group keeps what it
/// has reserved, also after the last one, until [`remove`](Self::remove) or the end of its creator.
#[derive(Clone, Debug)]
pub struct PlacementGroup {
    spec: PlacementGroupSpec,
    session: Session,
}

impl PlacementGroup {
    /// The group of this name in the session's namespace.
    ///
    /// # Errors
    /// [`Error::PlacementGroupNotFound`].
    pub async fn named(name: &str) -> Result<PlacementGroup> {
        let session = Session::current()?;
        let spec = session.find_placement_group(name, None).await?;
        Ok(PlacementGroup { spec, session })
    }

    /// The group of this name in another namespace.
    ///
    /// # Errors
    /// [`Error::PlacementGroupNotFound`].
    pub async fn named_in(namespace: &str, name: &str) -> Result<PlacementGroup> {
        let session = Session::current()?;
        let spec = session.find_placement_group(name, Some(namespace)).await?;
        Ok(PlacementGroup { spec, session })
    }

    /// Its id. It can be sent to others, who use it with `in_group` and `in_bundle`.
    pub fn id(&self) -> PlacementGroupId {
        self.spec.id
    }

    /// How many bundles it has.
    pub fn bundles(&self) -> usize {
        self.spec.bundles.len()
    }

    /// The node of each bundle, in order, as soon as all have one. It fails when the group can never be placed or is
    /// removed. A bundle whose node dies gets another, so ask again where that matters.
    pub fn ready(&self) -> ObjectRef<Vec<NodeId>> {
        ObjectRef::new(self.session.placement_group_ready(self.spec.id))
    }

    /// Waits until a node of the group is to be free of work (`wingbeat drain`), and gives which, why, and when what still
    /// runs there is ended. For those who use a group as one and move it as one; ask after [`ready`](Self::ready).
    pub async fn drained(&self) -> Drained {
        self.session.placement_group_drained(self.spec.id).await
    }

    /// As [`drained`](Self::drained), for those who know of a drain already: waits until something else is true. A nearer
    /// deadline, another node, or none where the drain was taken back (`wingbeat drain --undo`). Nothing more is heard of a
    /// group that is gone: wait for what uses it, too.
    pub async fn draining(&self, known: Option<&Drained>) -> Option<Drained> {
        self.session.placement_group_draining(self.spec.id, known).await
    }

    /// Removes the group: what runs in it is ended, and what it reserved is free again. No error if it is gone already.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn remove(&self) -> Result<()> {
        self.session.remove_placement_group(self.spec.id).await
    }

    /// As [`PlacementGroup::remove`], blocking this thread.
    ///
    /// # Errors
    /// The head is gone.
    pub fn remove_blocking(&self) -> Result<()> {
        self.session.block_on(self.remove())
    }
}

impl From<&PlacementGroup> for PlacementGroupId {
    fn from(group: &PlacementGroup) -> Self {
        group.id()
    }
}
