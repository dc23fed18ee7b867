//! Options that tasks and actors share: what they hold, and where.

/// Adds the methods to a builder with `options` of resources and a strategy.
macro_rules! placement_options {
    ($builder:ident) => {
        impl<Signature> $builder<Signature> {
            /// GPUs that it holds: a fraction of one, or whole ones.
            pub fn num_gpus(mut self, gpus: f64) -> Self {
                self.options.num_gpus = Some(gpus);
                self
            }

            /// Memory that it holds, in bytes.
            pub fn memory(mut self, bytes: u64) -> Self {
                self.options.memory = Some(bytes);
                self
            }

            /// An amount of a custom resource that it holds.
            pub fn resource(mut self, name: &str, amount: f64) -> Self {
                self.options.resources.insert(name.to_owned(), amount);
                self
            }

            /// On as many nodes as there are.
            pub fn spread(mut self) -> Self {
                self.options.strategy = wingbeat_core::spec::Strategy::Spread;
                self
            }

            /// On this node; with `soft`, on another if it has no room or is gone.
            pub fn on_node(mut self, node: wingbeat_core::NodeId, soft: bool) -> Self {
                self.options.strategy = wingbeat_core::spec::Strategy::Node { node, soft };
                self
            }
        }
    };
}
pub(crate) use placement_options;
