//! How many ranks a group has, where that may vary. Pure.

use wingbeat_core::resources::ResourceSet;

/// How ranks lie on nodes, and how many there are: a unit is a rank, or a node with as many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scaling {
    pub least: u32,
    pub most: u32,
    /// Ranks of each node, if units are nodes.
    pub per_node: Option<u32>,
}

impl Scaling {
    pub(crate) fn ranks_of(self, units: u32) -> u32 {
        units.saturating_mul(self.per_node.unwrap_or(1))
    }

    pub(crate) fn is_elastic(self) -> bool {
        self.least < self.most
    }

    /// How many units fit into this, at most as many as there may be.
    pub(crate) fn fits(self, nodes: &[ResourceSet], rank: &ResourceSet) -> u32 {
        let mut units = 0;
        for node in nodes {
            let ranks = ranks_in(node, rank, self.ranks_of(self.most));
            units += match self.per_node {
                Some(each) => u32::from(ranks >= each),
                None => ranks,
            };
        }
        units.min(self.most)
    }

    /// How many units to start with what is free now, of what there is; none while more will soon be free.
    pub(crate) fn choose(self, free: &[ResourceSet], total: &[ResourceSet], rank: &ResourceSet) -> Option<u32> {
        let (now, ever) = (self.fits(free, rank), self.fits(total, rank));
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
        let ranks = Scaling { least: 2, most: 4, per_node: None };
        let one = &cpus(&[1])[0];
        assert_eq!(ranks.fits(&cpus(&[1, 2]), one), 3);
        assert_eq!(ranks.fits(&cpus(&[8]), one), 4);
        let nodes = Scaling { least: 1, most: 3, per_node: Some(2) };
        assert_eq!(nodes.fits(&cpus(&[1, 2, 5]), one), 2);
        assert_eq!(nodes.ranks_of(2), 4);
    }

    #[test]
    fn what_will_be_free_again_is_waited_for_and_what_is_lost_is_not() {
        let ranks = Scaling { least: 1, most: 4, per_node: None };
        let one = &cpus(&[1])[0];
        assert_eq!(ranks.choose(&cpus(&[1, 2]), &cpus(&[2, 2]), one), None);
        assert_eq!(ranks.choose(&cpus(&[2, 2]), &cpus(&[2, 2]), one), Some(4));
        assert_eq!(ranks.choose(&cpus(&[2]), &cpus(&[2]), one), Some(2));
        assert_eq!(ranks.choose(&cpus(&[0]), &cpus(&[0]), one), None);
    }
}
