//! Options that tasks and actors share: what they hold, and where.

/// Adds the methods to a builder with `options` of what is held besides CPUs.
macro_rules! holding_options {
    () => {
        /// GPUs that it holds: a fraction of one, or whole ones. Fractions share a device, whole ones never do.
        pub fn num_gpus(mut self, gpus: f64) -> Self {
            self.options.place.num_gpus = Some(gpus);
            self
        }

        /// Memory of one GPU that it holds, such as `ByteSize::gib(8)`, instead of a number of GPUs. It counts as the fraction that
        /// it is of the node's devices, and so fits only where their memory is known.
        pub fn gpu_memory(mut self, size: impl Into<$crate::ByteSize>) -> Self {
            self.options.place.gpu_memory = Some(size.into());
            self
        }

        /// Memory that it holds.
        pub fn memory(mut self, size: impl Into<$crate::ByteSize>) -> Self {
            self.options.place.memory = Some(size.into().bytes());
            self
        }

        /// An amount of a custom resource that it holds.
        pub fn resource(mut self, name: &str, amount: f64) -> Self {
            self.options.place.resources.insert(name.to_owned(), amount);
            self
        }

        /// Only on nodes whose labels meet these rules: `zone=a`, `zone!=a`, `zone in (a, b)`, `zone not in (a, b)`,
        /// `zone`, joined by commas. Given again, what to look for where the rules before find no room.
        pub fn labels(mut self, rules: &str) -> Self {
            self.options.place.labels.push(rules.to_owned());
            self
        }
    };
}

/// Adds the methods to a builder with `options` of a place.
macro_rules! placement_options {
    ($builder:ident) => {
        impl<Signature> $builder<Signature> {
            $crate::placement::holding_options!();

            /// On as many nodes as there are.
            pub fn spread(mut self) -> Self {
                self.options.place.strategy = wingbeat_core::spec::Strategy::Spread;
                self
            }

            /// On this node alone.
            pub fn on_node(mut self, node: wingbeat_core::NodeId) -> Self {
                self.options.place.strategy = wingbeat_core::spec::Strategy::Node { node, soft: false };
                self
            }

            /// On this node; on another if it has no room or is gone.
            pub fn prefer_node(mut self, node: wingbeat_core::NodeId) -> Self {
                self.options.place.strategy = wingbeat_core::spec::Strategy::Node { node, soft: true };
                self
            }

            /// In what a placement group has reserved: in whichever of its bundles has room.
            pub fn in_group(mut self, group: impl Into<wingbeat_core::PlacementGroupId>) -> Self {
                let group = group.into();
                self.options.place.strategy = wingbeat_core::spec::Strategy::Bundle { group, index: None };
                self
            }

            /// In this bundle of a placement group, numbered from 0.
            pub fn in_bundle(mut self, group: impl Into<wingbeat_core::PlacementGroupId>, index: u32) -> Self {
                let group = group.into();
                self.options.place.strategy = wingbeat_core::spec::Strategy::Bundle { group, index: Some(index) };
                self
            }

            /// When no node could ever hold it, it waits for one that could, instead of failing at once.
            pub fn wait_until_feasible(mut self) -> Self {
                self.options.place.patient = true;
                self
            }
        }
    };
}
pub(crate) use {holding_options, placement_options};
