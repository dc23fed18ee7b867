//! Large parts of values, in shared memory without a copy of their own.
//!
//! An ordinary value is encoded and then copied into the node's shared memory, and whoever gets it decodes it into memory of its
//! own. A [`Buffer`](crate::Buffer) is written there at once, and read there.
//!
//! ```no_run
//! use serde::{Deserialize, Serialize};
//! use wingbeat::prelude::*;
//!
//! #[derive(Clone, Copy, Serialize, Deserialize, wingbeat::Plain)]
//! #[repr(C)]
//! struct Point { x: f32, y: f32, z: f32 }
//!
//! #[derive(Serialize, Deserialize)]
//! struct Scan {
//!     sensor: String,
//!     points: Buffer<Point>,
//!     #[serde(with = "wingbeat::buffer::bytes")]
//!     image: bytes::Bytes,
//! }
//!
//! #[wingbeat::remote]
//! fn height(scan: Scan) -> f32 {
//!     scan.points.iter().map(|point| point.z).fold(f32::MIN, f32::max)  // read where they lie
//! }
//!
//! # async fn run(points: Vec<Point>) -> wingbeat::Result<()> {
//! let scan = Scan { sensor: "roof".to_owned(), points: points.into(), image: bytes::Bytes::new() };
//! println!("{}", height::remote(wingbeat::put(&scan)?).get().await?);
//! # Ok(())
//! # }
//! ```

pub use wingbeat_core::buffer::bytes;
