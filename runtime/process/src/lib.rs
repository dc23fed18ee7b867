//! One participating process.
