//! How many ranks a group has, where that may vary, and what each holds. Pure.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use wingbeat::{Bundle, ByteSize, PlacementGroupId, PlacementStrategy};
use wingbeat_core::labels::Selector;
use wingbeat_core::resources::{Amount, CPU, GPU, MEMORY, ResourceSet};
use wingbeat_core::spec::Strategy;
use wingbeat_process::options::{PlaceOptions, TaskOptions};

use crate::error::TrainError;

/// A bundle must reserve something.
const LEAST_CPUS: f64 = 0.0001;

/// How many ranks there are, how they lie on nodes, and what each holds: a CPU, if nothing else is said.
///
/// ```
/// use wingbeat_train::Scaling;
/// let four_gpus = Scaling::workers(4).gpus_per_worker(1.0);
/// let two_to_four = Scaling::workers(4).elastic(2..=4);
/// let two_nodes_of_eight = Scaling::nodes(2, 8).gpus_per_worker(1.0).cpus_per_worker(4.0);
/// let on_h200s = Scaling::workers(2).gpus_per_worker(1.0).accelerator_type("NVIDIA-H200").strategy(wingbeat::PlacementStrategy::StrictPack);
/// let in_zone_a = Scaling::workers(2).labels("zone=a").memory_per_worker(wingbeat::ByteSize::gib(8)).resource_per_worker("license", 1.0);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scaling {
    /// A unit is a rank, or a node with as many ranks.
    pub(crate) least: u32,
    pub(crate) most: u32,
    /// Ranks of each node, if units are nodes.
    pub(crate) per_node: Option<u32>,
    cpus: f64,
    gpus: f64,
    /// In bytes.
    memory: u64,
    resources: BTreeMap<String, f64>,
    /// Rules about nodes; of several, the first for which there is room.
    labels: Vec<String>,
    /// Of which model the accelerators of nodes are.
    accelerator_type: Option<String>,
    strategy: PlacementStrategy,
}

impl Scaling {
    /// As many ranks, close to each other.
    pub fn workers(workers: u32) -> Scaling {
        Scaling {
            least: workers,
            most: workers,
            per_node: None,
            cpus: 1.0,
            gpus: 0.0,
            memory: 0,
            resources: BTreeMap::new(),
            labels: Vec::new(),
            accelerator_type: None,
            strategy: PlacementStrategy::Pack,
        }
    }

    /// As many nodes, and as many ranks on each.
    pub fn nodes(nodes: u32, workers: u32) -> Scaling {
        Scaling { per_node: Some(workers), strategy: PlacementStrategy::StrictSpread, ..Self::workers(nodes) }
    }

    /// So many workers, or nodes: as many as fit are started. The group starts again with fewer when a node is lost, and
    /// with more when there is room for them: at its next checkpoint, if it has a storage, and else at once.
    pub fn elastic(mut self, range: RangeInclusive<u32>) -> Scaling {
        (self.least, self.most) = range.into_inner();
        self
    }

    /// CPUs of each rank.
    pub fn cpus_per_worker(mut self, cpus: f64) -> Scaling {
        self.cpus = cpus;
        self
    }

    /// GPUs of each rank.
    pub fn gpus_per_worker(mut self, gpus: f64) -> Scaling {
        self.gpus = gpus;
        self
    }

    /// Memory that is reserved for each rank: `ByteSize::gib(8)`, or a number of bytes.
    pub fn memory_per_worker(mut self, size: impl Into<ByteSize>) -> Scaling {
        self.memory = size.into().bytes();
        self
    }

    /// An amount of a custom resource of each rank.
    pub fn resource_per_worker(mut self, name: &str, amount: f64) -> Scaling {
        self.resources.insert(name.to_owned(), amount);
        self
    }

    /// Only on nodes whose labels meet these rules, as [`Bundle::labels`] takes them: `zone=a`, `zone in (a, b)`, joined by commas. Given
    /// again, what to look for where the rules before find no room.
    pub fn labels(mut self, rules: &str) -> Scaling {
        self.labels.push(rules.to_owned());
        self
    }

    /// Only on nodes whose accelerators are of this model, which their label `accelerator-type` says: `NVIDIA-H200`. It goes with each of
    /// the rules of [`Scaling::labels`].
    pub fn accelerator_type(mut self, model: &str) -> Scaling {
        self.accelerator_type = Some(model.to_owned());
        self
    }

    /// How ranks lie to each other, instead of close. Those of [`Scaling::nodes`] lie on as many nodes as it says in any case.
    pub fn strategy(mut self, strategy: PlacementStrategy) -> Scaling {
        if self.per_node.is_none() {
            self.strategy = strategy;
        }
        self
    }

    /// Ranks lie on as many nodes as there are: [`PlacementStrategy::Spread`].
    pub fn spread(self) -> Scaling {
        self.strategy(PlacementStrategy::Spread)
    }

    /// That there is at least one rank, that the least is not more than the most, and that what each holds can be.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let (least, most) = (self.least, self.most);
        if self.ranks() == 0 {
            return Err(TrainError::Invalid("a training run needs at least one worker".into()));
        }
        if least == 0 || least > most {
            return Err(TrainError::Invalid(format!(
                "invalid range of workers {least}..={most}: the minimum is larger than the maximum"
            )));
        }
        let is_strict = matches!(self.strategy, PlacementStrategy::StrictPack | PlacementStrategy::StrictSpread);
        if self.is_elastic() && self.per_node.is_none() && is_strict {
            return Err(TrainError::Invalid(format!(
                "how many workers of {least}..={most} fit cannot be told with {:?}: give one number of workers, or let nodes vary",
                self.strategy
            )));
        }
        for (name, amount) in [("CPUs", self.cpus), ("GPUs", self.gpus)] {
            Amount::new(amount).map_err(|error| TrainError::Invalid(format!("{name} of a worker: {error}")))?;
        }
        for (name, amount) in &self.resources {
            if [CPU, GPU, MEMORY].contains(&name.as_str()) {
                return Err(TrainError::Invalid(format!("{name} of a worker has an option of its own")));
            }
            Amount::new(*amount).map_err(|error| TrainError::Invalid(format!("{name} of a worker: {error}")))?;
        }
        self.selectors().map(drop)
    }

    /// What nodes must meet one of, if anything.
    fn rules(&self) -> Vec<String> {
        match self.accelerator_type.as_ref().map(|model| format!("accelerator-type={model}")) {
            None => self.labels.clone(),
            Some(model) if self.labels.is_empty() => vec![model],
            Some(model) => self.labels.iter().map(|rules| format!("{rules},{model}")).collect(),
        }
    }

    fn selectors(&self) -> Result<Vec<Selector>, TrainError> {
        let parsed = self
            .rules()
            .into_iter()
            .map(|rules| rules.parse().map_err(|error| TrainError::Invalid(format!("{error}"))));
        parsed.collect()
    }

    /// Whether a rank may be on a node with these labels.
    pub(crate) fn accepts(&self, labels: &BTreeMap<String, String>) -> bool {
        let selectors = self.selectors().unwrap_or_default();
        selectors.is_empty() || selectors.iter().any(|selector| selector.matches(labels))
    }

    /// What a rank holds.
    pub(crate) fn rank(&self) -> ResourceSet {
        let amount = |value: f64| Amount::new(value).unwrap_or_default();
        let set = ResourceSet::new().with(CPU, amount(self.cpus)).with(GPU, amount(self.gpus));
        let set = set.with(MEMORY, amount(self.memory as f64));
        self.resources.iter().fold(set, |set, (name, value)| set.with(name, amount(*value)))
    }

    /// CPUs and GPUs of a rank, as an actor asks for them.
    pub(crate) fn cpus_and_gpus(&self) -> (f64, Option<f64>) {
        (self.cpus, Some(self.gpus).filter(|gpus| *gpus > 0.0))
    }

    pub(crate) fn each(&self) -> String {
        let mut parts = vec![format!("{} CPU", self.cpus)];
        if self.gpus > 0.0 {
            parts.push(format!("{} GPU", self.gpus));
        }
        if self.memory > 0 {
            parts.push(format!("{} bytes of memory", self.memory));
        }
        parts.extend(self.resources.iter().map(|(name, amount)| format!("{amount} {name}")));
        let rules: Vec<String> = self.rules().iter().map(|rules| format!("`{rules}`")).collect();
        let on = if rules.is_empty() { String::new() } else { format!(" on nodes with {}", rules.join(" or ")) };
        parts.join(" and ") + &on
    }

    /// What so many units reserve, and how.
    pub(crate) fn bundles(&self, units: u32) -> (Vec<Bundle>, PlacementStrategy) {
        let ranks = f64::from(self.per_node.unwrap_or(1));
        // A bundle reserves something.
        let least = if self.gpus > 0.0 { 0.0 } else { LEAST_CPUS };
        let bundle = Bundle::new().num_cpus((self.cpus * ranks).max(least));
        let bundle = if self.gpus > 0.0 { bundle.num_gpus(self.gpus * ranks) } else { bundle };
        let bundle = if self.memory > 0 { bundle.memory((self.memory as f64 * ranks) as u64) } else { bundle };
        let all = self.resources.iter().filter(|(_, amount)| **amount > 0.0);
        let bundle = all.fold(bundle, |bundle, (name, amount)| bundle.resource(name, amount * ranks));
        let bundle = self.rules().iter().fold(bundle, |bundle, rules| bundle.labels(rules));
        (vec![bundle; units as usize], self.strategy)
    }

    /// What the call of a rank holds, in its bundle.
    pub(crate) fn of_call(&self, group: PlacementGroupId, bundle: u32) -> TaskOptions {
        let place = PlaceOptions {
            // Also if it is nothing: what an attribute asks for beyond it is not there.
            num_gpus: Some(self.gpus),
            memory: Some(self.memory),
            resources: self
                .resources
                .iter()
                .filter(|(_, amount)| **amount > 0.0)
                .map(|(k, v)| (k.clone(), *v))
                .collect(),
            strategy: Strategy::Bundle { group, index: Some(bundle) },
            ..PlaceOptions::default()
        };
        TaskOptions { num_cpus: Some(self.cpus), place, ..TaskOptions::default() }
    }

    /// In which bundle a rank is, before ranks are ordered.
    pub(crate) fn bundle_of(&self, rank: u32) -> u32 {
        rank / self.per_node.unwrap_or(1).max(1)
    }

    /// The most ranks that there may be.
    pub(crate) fn ranks(&self) -> u32 {
        self.ranks_of(self.most)
    }

    pub(crate) fn ranks_of(&self, units: u32) -> u32 {
        units.saturating_mul(self.per_node.unwrap_or(1))
    }

    pub(crate) fn is_elastic(&self) -> bool {
        self.least < self.most
    }

    /// What could be added to so many units; none if there may be no more.
    pub(crate) fn beyond(&self, units: u32) -> Option<Scaling> {
        let most = self.most.checked_sub(units).filter(|more| *more > 0)?;
        Some(Scaling { most, ..self.clone() })
    }

    /// How many units fit into this, at most as many as there may be.
    pub(crate) fn fits<'a>(&self, nodes: impl IntoIterator<Item = &'a ResourceSet>) -> u32 {
        let (mut units, rank) = (0, self.rank());
        for node in nodes {
            let ranks = ranks_in(node, &rank, self.ranks_of(self.most));
            units += match self.per_node {
                Some(each) => u32::from(ranks >= each),
                None => ranks,
            };
        }
        units.min(self.most)
    }

    /// How many units may be held under a limit, beside what is used of it; at most as many as there may be. What the limit does not name
    /// is not limited.
    pub(crate) fn within(&self, limit: &ResourceSet, used: &ResourceSet) -> u32 {
        let (rank, ranks) = (self.rank(), i64::from(self.per_node.unwrap_or(1)));
        let limited = limit.iter().map(|(name, limit)| {
            let unit = rank.get(name).units().saturating_mul(ranks);
            // As in [`Scaling::bundles`].
            let is_least = unit == 0 && name == CPU && self.gpus == 0.0;
            (name, limit, if is_least { 1 } else { unit })
        });
        let left = limited.filter(|(_, _, unit)| *unit > 0).map(|(name, limit, unit)| {
            u32::try_from(((limit - used.get(name)).units() / unit).max(0)).unwrap_or(u32::MAX)
        });
        left.min().unwrap_or(self.most).min(self.most)
    }

    /// How many units to start where so many fit now, and so many could if nobody else held anything; none while more will soon be free.
    pub(crate) fn choose(&self, now: u32, ever: u32) -> Option<u32> {
        (now >= ever.max(self.least)).then_some(now)
    }

    /// Where it turned out that there cannot be more units than so many. There are never less than the least.
    pub(crate) fn up_to(&self, units: u32) -> Scaling {
        Scaling { most: units.clamp(self.least, self.most), ..self.clone() }
    }
}

/// How many ranks fit on a node.
fn ranks_in(node: &ResourceSet, rank: &ResourceSet, most: u32) -> u32 {
    let of = rank.iter().map(|(name, amount)| (node.get(name).units() / amount.units().max(1)).max(0) as u32);
    of.min().unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use wingbeat_core::resources::Amount;

    use super::*;

    fn cpus(counts: &[u32]) -> Vec<ResourceSet> {
        counts.iter().map(|count| ResourceSet::cpus(Amount::whole(*count))).collect()
    }

    #[test]
    fn as_many_as_fit_and_may_be() {
        let ranks = Scaling::workers(4).elastic(2..=4);
        assert_eq!(ranks.fits(&cpus(&[1, 2])), 3);
        assert_eq!(ranks.fits(&cpus(&[8])), 4);
        let nodes = Scaling::nodes(3, 2).elastic(1..=3);
        assert_eq!(nodes.fits(&cpus(&[1, 2, 5])), 2);
        assert_eq!(nodes.ranks_of(2), 4);
    }

    #[test]
    fn what_will_be_free_again_is_waited_for_and_what_is_lost_is_not() {
        let ranks = Scaling::workers(4).elastic(1..=4);
        let choose = |free: &[u32], total: &[u32]| ranks.choose(ranks.fits(&cpus(free)), ranks.fits(&cpus(total)));
        assert_eq!(choose(&[1, 2], &[2, 2]), None);
        assert_eq!(choose(&[2, 2], &[2, 2]), Some(4));
        assert_eq!(choose(&[2], &[2]), Some(2));
        assert_eq!(choose(&[0], &[0]), None);
    }

    #[test]
    fn a_limit_counts_what_ranks_hold_and_names() {
        let set = |cpus: u32, gpus: u32| ResourceSet::cpus(Amount::whole(cpus)).with(GPU, Amount::whole(gpus));
        let ranks = Scaling::workers(4).elastic(1..=4).gpus_per_worker(0.5);
        assert_eq!(ranks.within(&set(8, 1), &set(2, 0)), 2);
        assert_eq!(ranks.within(&set(3, 0), &set(2, 9)), 1, "GPUs are not limited");
        assert_eq!(ranks.within(&set(1, 0), &set(2, 0)), 0);
        let least = |units| ResourceSet::cpus(Amount::from_units(units));
        assert_eq!(Scaling::workers(4).elastic(1..=4).cpus_per_worker(0.0).within(&least(3), &least(1)), 2);
        assert_eq!(ranks.within(&ResourceSet::new().with("license", Amount::ONE), &set(9, 9)), 4);
        assert_eq!(Scaling::nodes(3, 2).elastic(1..=3).within(&set(5, 0), &set(1, 0)), 2, "a unit is a node with two");
    }

    #[test]
    fn a_group_that_finds_less_room_is_smaller_and_has_its_least() {
        let ranks = Scaling::workers(4).elastic(2..=4);
        assert_eq!(ranks.up_to(3).ranks(), 3);
        assert_eq!(ranks.up_to(0).ranks(), 2);
        assert!(!ranks.up_to(1).is_elastic());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert!(Scaling::workers(0).check().is_err());
        assert!(Scaling::nodes(2, 0).check().is_err());
        let (least, most) = (3, 2);
        assert!(Scaling::workers(4).elastic(least..=most).check().is_err());
        assert!(Scaling::workers(4).elastic(2..=4).check().is_ok());
    }

    #[test]
    fn amounts_and_rules_that_cannot_be_are_refused_by_name() {
        let said = |scaling: Scaling| scaling.check().unwrap_err().to_string();
        assert!(said(Scaling::workers(1).cpus_per_worker(f64::NAN)).contains("CPUs of a worker"));
        assert!(said(Scaling::workers(1).gpus_per_worker(-1.0)).contains("GPUs of a worker"));
        assert!(said(Scaling::workers(1).resource_per_worker("GPU", 1.0)).contains("an option of its own"));
        assert!(said(Scaling::workers(1).labels("zone in a")).contains("no rule about labels"));
    }

    #[test]
    fn only_nodes_with_one_of_the_labels_count_and_what_else_a_rank_holds_is_reserved() {
        let scaling = Scaling::workers(2).labels("zone=a").labels("zone=b").resource_per_worker("license", 0.5);
        let scaling = scaling.memory_per_worker(1 << 30);
        assert!(scaling.check().is_ok());
        let zone = |zone: &str| BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        assert_eq!(["a", "b", "c"].map(|name| scaling.accepts(&zone(name))), [true, true, false]);
        assert!(!scaling.accepts(&BTreeMap::new()) && Scaling::workers(1).accepts(&BTreeMap::new()));
        assert_eq!(scaling.fits(&cpus(&[4])), 0, "the node has no licenses");
        assert_eq!(
            scaling.each(),
            "1 CPU and 1073741824 bytes of memory and 0.5 license on nodes with `zone=a` or `zone=b`"
        );
        let (bundles, strategy) = Scaling::workers(2).spread().bundles(2);
        assert_eq!((bundles.len(), strategy), (2, PlacementStrategy::Spread));
    }

    #[test]
    fn the_model_of_accelerators_goes_with_each_of_the_rules() {
        let labels = |zone: &str, model: &str| {
            BTreeMap::from([("zone".to_owned(), zone.to_owned()), ("accelerator-type".to_owned(), model.to_owned())])
        };
        let alone = Scaling::workers(1).accelerator_type("H200");
        assert!(alone.accepts(&labels("c", "H200")) && !alone.accepts(&labels("a", "A100")));
        let in_zones = alone.labels("zone=a").labels("zone=b");
        let accepted = [("a", "H200"), ("b", "H200"), ("c", "H200"), ("a", "A100")];
        assert_eq!(accepted.map(|(zone, model)| in_zones.accepts(&labels(zone, model))), [true, true, false, false]);
    }

    #[test]
    fn what_is_strictly_placed_has_one_number_of_workers() {
        let strict = Scaling::workers(4).strategy(PlacementStrategy::StrictPack);
        assert!(strict.check().is_ok());
        let said = strict.elastic(2..=4).check().unwrap_err().to_string();
        assert!(said.contains("StrictPack"), "{said}");
        assert!(Scaling::nodes(4, 2).elastic(2..=4).check().is_ok(), "nodes may vary");
    }

    #[test]
    fn a_call_holds_what_is_reserved_for_its_rank() {
        let scaling =
            Scaling::nodes(2, 2).cpus_per_worker(2.0).gpus_per_worker(0.5).resource_per_worker("license", 1.0);
        let options = scaling.of_call(PlacementGroupId(7), 1);
        let (place, strategy) = (&options.place, Strategy::Bundle { group: PlacementGroupId(7), index: Some(1) });
        assert_eq!((options.num_cpus, place.num_gpus, place.memory), (Some(2.0), Some(0.5), Some(0)));
        assert_eq!((&place.resources, &place.strategy), (&BTreeMap::from([("license".to_owned(), 1.0)]), &strategy));
    }

    #[test]
    fn ranks_of_a_node_share_its_bundle() {
        let scaling = Scaling::nodes(2, 4).gpus_per_worker(0.5);
        let (bundles, strategy) = scaling.bundles(2);
        assert_eq!((bundles.len(), strategy), (2, PlacementStrategy::StrictSpread));
        assert_eq!([0, 3, 4, 7].map(|rank| scaling.bundle_of(rank)), [0, 0, 1, 1]);
    }
}
