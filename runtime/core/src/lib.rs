//! Plain data that every part of Wingbeat shares: ids, resources, specs, errors, and the one codec.
//!
//! Nothing in here does IO, reads a clock or starts a thread.

pub mod buffer;
mod byte_size;
mod checked;
pub mod codec;
pub mod error;
#[cfg(test)]
mod error_texts;
pub mod ids;
pub mod kind;
pub mod labels;
pub mod limits;
pub mod memory;
pub mod names;
mod pages;
mod plain;
pub mod resources;
mod same;
pub mod schema;
pub mod spec;
pub mod value;

pub use buffer::Buffer;
pub use byte_size::{ByteSize, InvalidByteSize};
pub use error::{Error, Result};
pub use ids::*;
pub use kind::ErrorKind;
pub use resources::{Amount, ResourceSet};
