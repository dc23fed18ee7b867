//! What each namespace may hold at a time, so that one user cannot starve another.

use std::collections::BTreeMap;

use wingbeat_core::ResourceSet;

/// Namespaces without a quota are not accounted.
#[derive(Default)]
pub(super) struct Quotas {
    quotas: BTreeMap<String, Quota>,
    /// Nodes are yet to say what runs on them: who has a quota gets nothing more until it is known what it holds.
    pub is_use_unknown: bool,
}

#[derive(Clone)]
pub(super) struct Quota {
    pub limit: ResourceSet,
    pub used: ResourceSet,
}

impl Quotas {
    /// From now on, the namespace may hold this much; it holds `used` now.
    pub(super) fn set(&mut self, namespace: &str, limit: ResourceSet, used: ResourceSet) {
        self.quotas.insert(namespace.to_owned(), Quota { limit, used });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.quotas.is_empty()
    }

    pub(super) fn remove(&mut self, namespace: &str) {
        self.quotas.remove(namespace);
    }

    pub(super) fn get(&self, namespace: &str) -> Option<&Quota> {
        self.quotas.get(namespace)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Quota)> {
        self.quotas.iter().map(|(namespace, quota)| (namespace.as_str(), quota))
    }

    /// Whether the namespace may hold this too.
    pub(super) fn allows(&self, namespace: &str, asked: &ResourceSet) -> bool {
        self.quotas.get(namespace).is_none_or(|quota| !self.is_use_unknown && quota.exceeded_by(asked).is_none())
    }

    /// Whether it could ever hold this.
    pub(super) fn could_allow(&self, namespace: &str, asked: &ResourceSet) -> bool {
        self.quotas.get(namespace).is_none_or(|quota| quota.limit.iter().all(|(name, limit)| asked.get(name) <= limit))
    }

    /// What the namespace holds above its limit.
    pub(super) fn excess(&self, namespace: &str) -> ResourceSet {
        let mut excess = ResourceSet::new();
        if let Some(quota) = self.quotas.get(namespace) {
            for (name, limit) in quota.limit.iter().filter(|(name, limit)| quota.used.get(name) > *limit) {
                excess.set(name, quota.used.get(name) - limit);
            }
        }
        excess
    }

    pub(super) fn take(&mut self, namespace: &str, taken: &ResourceSet) {
        if let Some(quota) = self.quotas.get_mut(namespace) {
            quota.used.add(taken);
        }
    }

    /// Whether the namespace has a quota, so that somebody may wait for this.
    pub(super) fn give_back(&mut self, namespace: &str, taken: &ResourceSet) -> bool {
        let Some(quota) = self.quotas.get_mut(namespace) else { return false };
        quota.used.subtract(taken);
        true
    }
}

impl Quota {
    /// The first resource of which there would be too much, with what is used and the limit, in words.
    pub(super) fn exceeded_by(&self, asked: &ResourceSet) -> Option<String> {
        let over = |name: &str, limit| !asked.get(name).is_zero() && self.used.get(name) + asked.get(name) > limit;
        let (name, limit) = self.limit.iter().find(|(name, limit)| over(name, *limit))?;
        Some(format!("{} {name} of its quota of {limit} are in use", self.used.get(name)))
    }
}
