//! Programs that together send every kind of message, and check what they get.

mod actors;
mod deaths;
mod drain;
mod head;
mod tasks;
mod tools;
mod values;

pub(crate) use self::actors::{actors, groups};
pub(crate) use self::deaths::{abandoned, deaths, lost, owners, short, unstarted};
pub(crate) use self::drain::drain;
pub(crate) use self::head::{COMES_AND_GOES, comes_and_goes, detached, restart, standby, without_journal};
pub(crate) use self::tasks::tasks;
pub(crate) use self::tools::tools;
pub(crate) use self::values::{streams, values};
