//! What a test cluster is to have.

use std::time::Duration;

use wingbeat_core::ByteSize;
use wingbeat_core::error::Result;
use wingbeat_worker::offer::Offer;

use super::TestCluster;

/// An object store that is enough for tests, and is only taken as objects need it.
const STORE: u64 = 64 << 20;

/// A node of a [`TestCluster`]: one CPU, no GPU and an object store of 64 MiB unless it is said otherwise.
///
/// ```
/// use wingbeat::testing::TestNode;
/// let node = TestNode::default().num_cpus(4).num_gpus(2).gpu_memory(80 << 30).label("zone", "a").resource("license", 1.0);
/// ```
#[derive(Clone, Debug)]
pub struct TestNode {
    pub(super) offer: Offer,
}

impl Default for TestNode {
    fn default() -> TestNode {
        let offer =
            Offer { num_cpus: Some(1), pretend_gpus: Some(0), object_store_memory: Some(STORE), ..Offer::default() };
        TestNode { offer }
    }
}

impl TestNode {
    /// CPUs; 1 if nothing is said. They may be more than the machine has.
    pub fn num_cpus(mut self, cpus: u32) -> Self {
        self.offer.num_cpus = Some(cpus);
        self
    }

    /// GPUs, the first of the machine; more than it has are pretended. 0 if nothing is said.
    pub fn num_gpus(mut self, gpus: u32) -> Self {
        self.offer.pretend_gpus = Some(gpus);
        self
    }

    /// The memory that each GPU is pretended to have.
    pub fn gpu_memory(mut self, size: impl Into<ByteSize>) -> Self {
        self.offer.gpu_memory = Some(size.into().bytes());
        self
    }

    /// A custom resource.
    pub fn resource(mut self, name: &str, amount: f64) -> Self {
        self.offer.resources.insert(name.to_owned(), amount);
        self
    }

    /// A label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.offer.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Capacity of the object store; 64 MiB if nothing is said.
    pub fn object_store_memory(mut self, size: impl Into<ByteSize>) -> Self {
        self.offer.object_store_memory = Some(size.into().bytes());
        self
    }
}

/// How a [`TestCluster`] is started.
///
/// ```no_run
/// # fn test() -> wingbeat::Result<()> {
/// use wingbeat::testing::{TestCluster, TestNode};
/// let cluster = TestCluster::builder()
///     .nodes(2).num_cpus(4).label("zone", "a")                    // two nodes that are alike
///     .node(TestNode::default().num_gpus(8).label("zone", "b"))   // and another
///     .start()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is started before `start()`"]
#[derive(Clone, Debug, Default)]
pub struct TestClusterBuilder {
    count: Option<usize>,
    /// What those nodes have.
    alike: TestNode,
    others: Vec<TestNode>,
    pub(super) env: Vec<(String, String)>,
    pub(super) suspect_after: Option<Duration>,
    pub(super) lost_after: Option<Duration>,
    pub(super) has_machines: bool,
    pub(super) global: bool,
}

impl TestClusterBuilder {
    /// So many nodes that are alike; 1 if nothing is said, and 0 if there are others ([`TestClusterBuilder::node`]).
    pub fn nodes(mut self, count: usize) -> Self {
        self.count = Some(count);
        self
    }

    /// CPUs of each of these nodes; 1 if nothing is said.
    pub fn num_cpus(mut self, cpus: u32) -> Self {
        self.alike = self.alike.num_cpus(cpus);
        self
    }

    /// GPUs of each of these nodes; more than the machine has are pretended. 0 if nothing is said.
    pub fn num_gpus(mut self, gpus: u32) -> Self {
        self.alike = self.alike.num_gpus(gpus);
        self
    }

    /// A custom resource of each of these nodes.
    pub fn resource(mut self, name: &str, amount: f64) -> Self {
        self.alike = self.alike.resource(name, amount);
        self
    }

    /// A label of each of these nodes.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.alike = self.alike.label(key, value);
        self
    }

    /// Capacity of the object store of each of these nodes; 64 MiB if nothing is said.
    pub fn object_store_memory(mut self, size: impl Into<ByteSize>) -> Self {
        self.alike = self.alike.object_store_memory(size);
        self
    }

    /// Another node; may be repeated.
    pub fn node(mut self, node: TestNode) -> Self {
        self.others.push(node);
        self
    }

    /// After how much silence a node is suspect; a third of `lost_after`, and 5 s at most, if nothing is said.
    pub fn suspect_after(mut self, time: Duration) -> Self {
        self.suspect_after = Some(time);
        self
    }

    /// After how much silence a node is lost, 3 s at least; 30 s if nothing is said. The test's process has the times of the cluster that it
    /// has last connected to, so that tests that depend on such times belong into processes of their own.
    pub fn lost_after(mut self, time: Duration) -> Self {
        self.lost_after = Some(time);
        self
    }

    /// A variable of the head, the nodes and their worker processes; may be repeated.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Gives each node a machine of its own, a network namespace, so that [`TestCluster::cut`] can cut it off. Needs root and `ip`. Nodes then
    /// have no shared memory in common, and copy the test's executable. Worker processes get only the variables that cross a network
    /// ([`Init::env`](crate::Init::env)).
    pub fn machines(mut self) -> Self {
        self.has_machines = true;
        self
    }

    /// Whether the session becomes the one of the whole process, which only one test of it can have at a time. For programs that
    /// start threads by themselves.
    pub fn global(mut self, global: bool) -> Self {
        self.global = global;
        self
    }

    /// Starts the head and the nodes, waits until all are there, and joins them with this thread.
    ///
    /// # Errors
    /// An option makes no sense, or a process does not start: the error has what it wrote.
    pub fn start(self) -> Result<TestCluster> {
        TestCluster::start(self)
    }

    pub(super) fn all_nodes(&self) -> Vec<TestNode> {
        let count = self.count.unwrap_or(usize::from(self.others.is_empty()));
        std::iter::repeat_n(&self.alike, count).chain(&self.others).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_node_unless_it_is_said_otherwise() {
        let cpus = |builder: TestClusterBuilder| -> Vec<Option<u32>> {
            builder.all_nodes().iter().map(|node| node.offer.num_cpus).collect()
        };
        let builder = TestClusterBuilder::default;
        assert_eq!(cpus(builder()), [Some(1)]);
        assert_eq!(cpus(builder().nodes(0)), []);
        assert_eq!(cpus(builder().node(TestNode::default().num_cpus(3))), [Some(3)]);
        let both = builder().node(TestNode::default()).nodes(2).num_cpus(4);
        assert_eq!(cpus(both), [Some(4), Some(4), Some(1)]);
    }
}
