//! A cluster of several machines under load, while everything that can break is broken.
//!
//! `cargo xtask chaos --seed N --minutes M` runs the `chaos` program, which starts itself again in namespaces of its own
//! ([`world`]): whatever it leaves there ends with it, and everything that is left can be counted. There it starts a head with a journal, four nodes
//! and three drivers, each on a machine ([`machines`], [`drivers`]). Drivers run [`programs`] of every kind beside each
//! other and report what came of each ([`report`]). Meanwhile the [`schedule`] of [`fault`]s, which the seed decides, is
//! carried out ([`injector`]). At the end every program must have ended right, or with an error that
//! `docs/guarantees.md` allows, and nothing may be left ([`rest`]); [`recovery`] says how long each kind of fault was felt.

pub mod driver;
pub mod drivers;
pub mod fault;
pub mod injector;
pub mod machines;
pub mod programs;
pub mod recovery;
pub mod report;
pub mod rest;
pub mod room;
pub mod run;
pub mod schedule;
pub mod signs;
pub mod world;
