//! What a node offers, as people say it: by options of the command, or for a test.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wingbeat_core::error::Error;
use wingbeat_net::Token;

use crate::gpus::{self, Offered};
use crate::join::{self, Found};
use crate::node::{MemoryConfig, NodeConfig};

/// What a node offers; what is not said is what its machine has.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Offer {
    /// CPUs; all if nothing is said.
    pub num_cpus: Option<u32>,
    /// GPUs, the first that there are; all if nothing is said.
    pub num_gpus: Option<u32>,
    /// The same, of which those are pretended that are not there.
    pub pretend_gpus: Option<u32>,
    /// Memory that each GPU is pretended to have, in bytes.
    pub gpu_memory: Option<u64>,
    /// Custom resources.
    pub resources: BTreeMap<String, f64>,
    /// `key=value` labels.
    pub labels: BTreeMap<String, String>,
    /// Capacity of the object store in bytes; 30% of the memory if nothing is said.
    pub object_store_memory: Option<u64>,
    /// Where objects go when the store is full.
    pub spill_dir: Option<PathBuf>,
    /// How much may go there, in bytes; half of what is free on its disk if nothing is said.
    pub spill_limit: Option<u64>,
    /// The part of the store above which objects go there before others need their room; [`join::SPILL_AHEAD`] if nothing is said.
    pub spill_ahead: Option<f64>,
    /// The part of all memory above which the node ends processes, from 0 to 1; 0 for never.
    pub memory_threshold: Option<f64>,
    /// How often memory is looked at.
    pub memory_check_interval: Option<Duration>,
}

impl Offer {
    /// The node that offers this in the cluster of the head that was found. It listens for other machines at `ip`.
    ///
    /// # Errors
    /// An option that makes no sense.
    pub fn node(self, found: Found, token: Token, ip: Option<IpAddr>) -> Result<NodeConfig, Error> {
        let gpus = gpus::of_machine(Offered::of(self.num_gpus, self.pretend_gpus), self.gpu_memory)?;
        let spill_dir = self.spill_dir.unwrap_or_else(join::default_spill_dir);
        Ok(NodeConfig {
            head: found.head,
            others: found.others,
            epoch: found.epoch,
            token,
            cluster: found.cluster,
            resources: join::machine_resources(self.num_cpus, gpus.count, &self.resources)?,
            labels: join::labels_of(&gpus, self.labels),
            gpus,
            store_bytes: self.object_store_memory.unwrap_or_else(join::default_store_bytes),
            spill_bytes: self.spill_limit.unwrap_or_else(|| join::default_spill_bytes(&spill_dir)),
            spill_dir: Some(spill_dir),
            spill_ahead: self.spill_ahead.unwrap_or(join::SPILL_AHEAD),
            memory: MemoryConfig::given(self.memory_threshold, self.memory_check_interval)?,
            listen: ip.map(|ip| SocketAddr::new(ip, 0)),
        })
    }
}
