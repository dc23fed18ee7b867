//! How many ranks a group has, where that may vary, and what each holds. Pure.

use std::ops::RangeInclusive;

use wingbeat::{Bundle, PlacementStrategy};
use wingbeat_core::resources::{Amount, ResourceSet};

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
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// A unit is a rank, or a node with as many ranks.
    pub(crate) least: u32,
    pub(crate) most: u32,
    /// Ranks of each node, if units are nodes.
    pub(crate) per_node: Option<u32>,
    cpus: f64,
    gpus: f64,
}

impl Scaling {
    /// As many ranks, close to each other.
    pub fn workers(workers: u32) -> Scaling {
        Scaling { least: workers, most: workers, per_node: None, cpus: 1.0, gpus: 0.0 }
    }

    /// As many nodes, and as many ranks on each.
    pub fn nodes(nodes: u32, workers: u32) -> Scaling {
        Scaling { per_node: Some(workers), ..Self::workers(nodes) }
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

    /// That there is at least one rank, and that the least is not more than the most.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let (least, most) = (self.least, self.most);
        if self.ranks() == 0 {
            return Err(TrainError::Invalid("a training run needs at least one worker".into()));
        }
        if least == 0 || least > most {
            return Err(TrainError::Invalid(format!("there are to be at least {least} and at most {most} workers")));
        }
        Ok(())
    }

    /// What a rank holds.
    pub(crate) fn rank(&self) -> ResourceSet {
        let amount = |value: f64| Amount::new(value).unwrap_or_default();
        ResourceSet::new().with("CPU", amount(self.cpus)).with("GPU", amount(self.gpus))
    }

    /// CPUs and GPUs of a rank, as an actor asks for them.
    pub(crate) fn cpus_and_gpus(&self) -> (f64, Option<f64>) {
        (self.cpus, Some(self.gpus).filter(|gpus| *gpus > 0.0))
    }

    pub(crate) fn each(&self) -> String {
        match self.gpus {
            0.0 => format!("{} CPU", self.cpus),
            gpus => format!("{} CPU and {gpus} GPU", self.cpus),
        }
    }

    /// What so many units reserve, and how.
    pub(crate) fn bundles(&self, units: u32) -> (Vec<Bundle>, PlacementStrategy) {
        let ranks = f64::from(self.per_node.unwrap_or(1));
        // A bundle reserves something.
        let least = if self.gpus > 0.0 { 0.0 } else { LEAST_CPUS };
        let bundle = Bundle::new().num_cpus((self.cpus * ranks).max(least));
        let bundle = if self.gpus > 0.0 { bundle.num_gpus(self.gpus * ranks) } else { bundle };
        let strategy = match self.per_node {
            None => PlacementStrategy::Pack,
            Some(_) => PlacementStrategy::StrictSpread,
        };
        (vec![bundle; units as usize], strategy)
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
        Some(Scaling { most, ..*self })
    }

    /// How many units fit into this, at most as many as there may be.
    pub(crate) fn fits(&self, nodes: &[ResourceSet]) -> u32 {
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

    /// How many units to start with what is free now, of what there is; none while more will soon be free.
    pub(crate) fn choose(&self, free: &[ResourceSet], total: &[ResourceSet]) -> Option<u32> {
        let (now, ever) = (self.fits(free), self.fits(total));
        (now >= ever.max(self.least)).then_some(now)
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
        assert_eq!(ranks.choose(&cpus(&[1, 2]), &cpus(&[2, 2])), None);
        assert_eq!(ranks.choose(&cpus(&[2, 2]), &cpus(&[2, 2])), Some(4));
        assert_eq!(ranks.choose(&cpus(&[2]), &cpus(&[2])), Some(2));
        assert_eq!(ranks.choose(&cpus(&[0]), &cpus(&[0])), None);
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
    fn ranks_of_a_node_share_its_bundle() {
        let scaling = Scaling::nodes(2, 4).gpus_per_worker(0.5);
        let (bundles, strategy) = scaling.bundles(2);
        assert_eq!((bundles.len(), strategy), (2, PlacementStrategy::StrictSpread));
        assert_eq!([0, 3, 4, 7].map(|rank| scaling.bundle_of(rank)), [0, 0, 1, 1]);
    }
}
