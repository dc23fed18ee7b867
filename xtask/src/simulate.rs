//! `cargo xtask simulate`: the scheduler in a world of pretended nodes, as fast as users run it.

use anyhow::Result;

use crate::steps::{cargo, step};

pub(crate) fn run(args: &[String]) -> Result<()> {
    let mut simulate = cargo(&["run", "--quiet", "--release", "-p", "wingbeat-head", "--example", "simulate", "--"])?;
    step("simulation", simulate.args(args))
}
