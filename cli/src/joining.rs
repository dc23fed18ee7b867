//! How a run joins its cluster: the options that `train`, `torchrun` and `doctor` share.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use wingbeat_core::names;
use wingbeat_worker::{join, token};

use crate::context::NAMESPACE_VARIABLE;

#[derive(Args)]
pub(crate) struct Joining {
    /// The head of a cluster, as host:port, or several places where it may be; else a cluster on this machine, for this command alone.
    #[arg(long, env = join::ADDRESS_VARIABLE)]
    pub address: Option<String>,
    /// File with the cluster's token; else as for `wingbeat head`.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// The namespace of the job, to which quotas apply; a new one if nothing is said.
    #[arg(long, env = NAMESPACE_VARIABLE)]
    namespace: Option<String>,
    /// Whose work is placed first: that of the job with the larger number.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    priority: i32,
    /// What to call the job in `wingbeat status`; else what it runs.
    #[arg(long, value_name = "NAME")]
    job_name: Option<String>,
}

impl Joining {
    /// How to join, at the address if there is one, by this command, which runs this.
    pub(crate) fn init(&self, command: &str, runs: Option<&str>) -> Result<wingbeat::Init> {
        let mut init = self.alone(command, runs)?;
        if let Some(address) = &self.address {
            init = init.address(address);
        }
        if let Some(token) = token::given(self.token_file.as_deref())? {
            init = init.token(token.reveal());
        }
        Ok(init)
    }

    /// How to start a cluster for this command alone, whatever the options and variables name.
    pub(crate) fn alone(&self, command: &str, runs: Option<&str>) -> Result<wingbeat::Init> {
        if let Some(name) = &self.job_name {
            names::check(name).map_err(|why| anyhow::anyhow!("--job-name: {why}"))?;
        }
        // Of a script's path, the end is what tells it apart.
        let script = runs.and_then(|path| Path::new(path).file_name()?.to_str());
        let runs = self.job_name.as_deref().or(script);
        let name = runs.map_or_else(|| format!("wingbeat {command}"), |runs| format!("wingbeat {command} {runs}"));
        // Whatever a file is called, it runs.
        let mut init = wingbeat::init().priority(self.priority).name(&names::made_of(&name));
        if let Some(namespace) = self.namespace.as_ref().filter(|namespace| !namespace.is_empty()) {
            init = init.namespace(namespace);
        }
        Ok(init)
    }
}
