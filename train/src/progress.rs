//! How far a run has come.

use std::collections::BTreeMap;

/// How far a run has come: what its handle and its callback tell.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Progress {
    /// The attempt that runs, from 0.
    pub attempt: u32,
    /// Its ranks; none before they are placed.
    pub ranks: Vec<RankProgress>,
    /// How often all ranks have reported in this attempt.
    pub reports: u64,
}

/// Where a rank is, and how far.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RankProgress {
    /// Its node's name.
    pub node: String,
    /// Its devices, by number on that node.
    pub gpus: Vec<u32>,
    /// Whether it is forked from a process with torch imported.
    pub is_warm: bool,
    /// What it has reported last.
    pub metrics: BTreeMap<String, f64>,
}
