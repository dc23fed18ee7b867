//! Which variables of a driver go where.
//!
//! An environment holds secrets: keys of clouds, passwords of databases. On the driver's own machine worker processes get
//! all of it, as children of the driver would, if the head is there, which hands it on. What crosses a network or is written to a disk (the head's journal) holds
//! only what was named with `init().env(..)`, and what programs commonly need and what is no secret:
//!
//! - who and where: `PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `TMPDIR`, `TZ`, `TERM`, `LANG`, `LANGUAGE`, `LC_*`;
//! - how the program finds its libraries: `LD_LIBRARY_PATH`, `LD_PRELOAD`, `VIRTUAL_ENV`, `CONDA_PREFIX`, `PYTHON*`;
//! - how it runs: `RUST_*`, `RAYON_*`, `TOKIO_*`, `MALLOC_*`, `OMP_*`, `GOMP_*`, `KMP_*`, `MKL_*`, `OPENBLAS_*`;
//! - devices and training: `CUDA_*`, `NVIDIA_*`, `NCCL_*`, `HIP_*`, `ROCR_*`, `HSA_*`, `RCCL_*`, `GLOO_*`, `UCX_*`, `TORCH*`,
//!   `PYTORCH_*`, `TRITON_*`, `XLA_*`;
//! - `WINGBEAT_*`;
//!
//! and of these none whose name says that it is a secret: with `TOKEN`, `SECRET`, `PASSW`, `CREDENTIAL` or `KEY` in it.

use std::collections::BTreeMap;
use std::ffi::OsString;

use wingbeat_core::spec::is_secret;

use crate::start::{BELONGS, VARIABLE};
use crate::token::TOKEN_VARIABLE;

const NAMES: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TMPDIR",
    "TZ",
    "TERM",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
];

const PREFIXES: &[&str] = &[
    "LC_",
    "PYTHON",
    "RUST_",
    "RAYON_",
    "TOKIO_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "RCCL_",
    "GLOO_",
    "UCX_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "XLA_",
    "WINGBEAT_",
];

/// Whether a variable may leave its machine, or be written down, although nobody named it.
pub fn may_travel(name: &str) -> bool {
    let is_listed = NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    is_listed && !is_secret(name)
}

type Variables = BTreeMap<String, String>;

/// The variables that may travel, and the others. Those that are no text are left out.
pub(crate) fn split(variables: impl Iterator<Item = (OsString, OsString)>) -> (Variables, Variables) {
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        // What tells a process about this cluster or makes it a child is not for user code's children.
        .filter(|(name, _)| ![VARIABLE, BELONGS, TOKEN_VARIABLE].contains(&name.as_str()))
        .partition(|(name, _)| may_travel(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_stay_on_their_machine_and_what_programs_need_travels() {
        for name in ["PATH", "LC_ALL", "RUST_LOG", "PYTHONPATH", "NCCL_DEBUG", "WINGBEAT_LOG", "LD_LIBRARY_PATH"] {
            assert!(may_travel(name), "{name}");
        }
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "HF_TOKEN",
            "DATABASE_URL",
            "SSH_AUTH_SOCK",
            "https_proxy",
            "WINGBEAT_TOKEN",
            "WINGBEAT_TOKEN_FILE",
            "TORCH_API_KEY",
            "PATHS",
            "",
        ] {
            assert!(!may_travel(name), "{name}");
        }
    }

    #[test]
    fn the_token_goes_nowhere() {
        let given = [("WINGBEAT_TOKEN", "t"), ("PATH", "/bin"), ("DATABASE_URL", "postgres://me:pw@db")];
        let (travels, stays) = split(given.map(|(name, value)| (name.into(), value.into())).into_iter());
        assert_eq!(travels.keys().collect::<Vec<_>>(), ["PATH"]);
        assert_eq!(stays.keys().collect::<Vec<_>>(), ["DATABASE_URL"]);
    }
}
