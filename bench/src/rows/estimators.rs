//! Estimators: a logistic regression on two ranks and in one process, beside pyspark.ml.connect's.

use std::process::Command;

use anyhow::{Result, ensure};
use wingbeat_tests::TestCluster;

use super::Figures;
use super::launch::{peer, python, script, timed};
use crate::report::{Figure, Must};

pub(super) fn limit_pyspark_estimators() -> Figures {
    peer("pyspark", "pyspark_estimators", "limit_pyspark_estimators")
}

/// Seconds of each fit but the first, which imports torch.
fn fits(cluster: &TestCluster, local_bytes: u64) -> Result<Vec<f64>> {
    let mut command = Command::new(python()?);
    command.arg(script("estimators.py")).arg(local_bytes.to_string());
    let of_the_cluster = cluster.command()?;
    for (name, value) in of_the_cluster.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.env("WINGBEAT_BIN", wingbeat_tests::binary()?).env("WINGBEAT_PYTHON", python()?);
    command.env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/../python"));
    let (_, printed) = timed(command)?;
    let seconds = printed.lines().filter_map(|line| line.strip_prefix("seconds ")?.parse().ok());
    let seconds: Vec<f64> = seconds.skip(1).collect();
    ensure!(!seconds.is_empty(), "the script printed {printed:?}");
    Ok(seconds)
}

/// 400 rows of 10 features, 200 epochs.
pub(super) fn estimators() -> Figures {
    let cluster = TestCluster::start(1, 2)?;
    let must = || Must::Of("limit_pyspark_estimators", 20.0);
    Ok(vec![
        Figure::of("estimators", "s", true, fits(&cluster, 0)?, must()),
        Figure::of("estimators_in_process", "s", true, fits(&cluster, 1 << 30)?, must()),
    ])
}
