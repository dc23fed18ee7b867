//! Groups of ranked actors that run distributed PyTorch.
//!
//! - [`TorchTrainer`]: what to run, on how many ranks; `fit()` runs it.
//! - `rank`: the actor of one rank, which supervises one Python process.
//! - `group`: one attempt: actors placed, environment made, ranks run to their end.
//! - `environment`: the environment of every rank, as torchrun defines it.
//! - `process`: a Python process, from its start to its end.
//!
//! ```no_run
//! use wingbeat_train::TorchTrainer;
//!
//! # async fn run() -> Result<(), wingbeat_train::TrainError> {
//! wingbeat::init().await?;
//! let result = TorchTrainer::script("train.py").args(["--epochs", "3"]).workers(2).fit().await?;
//! println!("{} ranks in {:.1} s", result.ranks, result.seconds);
//! # Ok(())
//! # }
//! ```

mod environment;
mod error;
mod group;
mod process;
mod rank;
mod trainer;

pub use error::{PythonError, TrainError};
pub use process::Line;
pub use trainer::{Backend, TorchTrainer, TrainResult};
