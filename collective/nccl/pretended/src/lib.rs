//! A CUDA driver and an NCCL between threads of one process, for tests of what is done with them: meetings that do not take
//! place, members that die, calls that fail. Device memory is plain memory, elements are `f32`, and what a stream would
//! run, threads do, in its order.

#![allow(
    non_snake_case,
    missing_docs,
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    reason = "the calls of cuda.h and nccl.h, where their meaning and their callers' duties are written down"
)]

mod cuda;
mod nccl;
mod stream;

pub use cuda::*;
pub use nccl::*;
