use serde::{Deserialize, Serialize};
use wingbeat_collective::CollectiveError;

/// Why an operation between devices did not succeed. The group is of no use after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// There is no NCCL on this node.
    #[error(
        "NCCL is not there: no libnccl.so.2 among {}; install PyTorch with CUDA or nvidia-nccl-cu12, or name the file in WINGBEAT_NCCL",
        .tried.join(", ")
    )]
    NotFound {
        /// Where it was looked for.
        tried: Vec<String>,
    },
    /// A library was found that is of no use.
    #[error("{path} cannot be used: {why}")]
    Unusable {
        /// Its path.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// NCCL has refused something, or failed.
    #[error("NCCL failed in {what}: {why}")]
    Failed {
        /// What was tried.
        what: String,
        /// What NCCL says.
        why: String,
    },
    /// NCCL has not come to an end.
    #[error("{what} of rank {rank} was not done after {seconds} s, and has been aborted")]
    TooLong {
        /// What was tried.
        what: String,
        /// This member.
        rank: u32,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Members share a device, which NCCL cannot do.
    #[error(
        "ranks {first} and {second} have the same device; give each rank its own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL has it"
    )]
    SameDevice {
        /// A member.
        first: u32,
        /// Another.
        second: u32,
    },
    /// CUDA has refused something, or is not there.
    #[error("CUDA failed in {what}: {why}")]
    Cuda {
        /// What was tried.
        what: String,
        /// What CUDA says.
        why: String,
    },
    /// A member is gone, or calls something else.
    #[error(transparent)]
    Group(#[from] CollectiveError),
}

impl NcclError {
    pub(crate) fn cuda(what: &'static str, error: impl std::fmt::Debug) -> Self {
        NcclError::Cuda { what: what.to_owned(), why: format!("{error:?}") }
    }
}

pub(crate) type Result<T> = std::result::Result<T, NcclError>;
