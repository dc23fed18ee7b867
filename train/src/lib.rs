//! Groups of ranked actors that run distributed PyTorch.
//!
//! - [`TorchTrainer`]: what to run; [`Scaling`]: on how many ranks; `fit()` runs it, and [`Run`] is a run to be watched.
//! - `reservation`: what ranks run in; `group`: the ranks' actors: placed, checked, and let go.
//! - `fit`: a run, from its first attempt to its result.
//! - `launch`: what is found out before they start, and their start, of which `calls` makes those of Rust functions; `attempt`: one attempt: the ranks run to their end, or until the first fails; `reports` and `hang` are its pure parts,
//!   `ras` asks NCCL.
//! - `environment`: the environment of every rank, as torchrun defines it; `ports` and `interface`: where and over
//!   what they meet.
//! - `rank`: the actor of one rank, which supervises one Python process (`process`), or hears what the rank's function asks
//!   (`questions`).
//! - [`Ranks`]: groups whose ranks are Rust functions; [`TorchTrainer::function`] makes one.
//! - [`RankOutput`]: where what ranks print goes, [`Lines`] makes lines of it; `printer`: the thread that hands it over.
//! - `preflight`: what would go wrong between nodes.
//! - `storage`: checkpoints; `recorder`: metrics.
//! - `warm`: a node's Python with torch imported, from which ranks are forked; `package`: the Python that they run with;
//!   `shipping`: the user's own code; `cache`: where both lie.
//!
//! ```no_run
//! use wingbeat_train::{Scaling, TorchTrainer};
//!
//! # async fn run() -> Result<(), wingbeat_train::TrainError> {
//! wingbeat::init().await?;
//! let result = TorchTrainer::script("train.py").args(["--epochs", "3"]).scaling(Scaling::workers(2)).fit().await?;
//! println!("{} ranks in {:.1?}", result.ranks, result.elapsed);
//! # Ok(())
//! # }
//! ```

mod attempt;
mod cache;
mod calls;
mod context;
mod environment;
mod error;
mod fit;
mod group;
mod hang;
mod identity;
mod interface;
mod launch;
mod limits;
mod links;
mod output;
mod own_folder;
mod own_runtime;
mod package;
mod plan;
mod ports;
mod preflight;
mod printer;
mod process;
mod progress;
mod questions;
mod rank;
mod ranks;
mod ras;
mod recorder;
mod reports;
mod reservation;
mod result;
mod room;
mod run;
mod scaling;
mod shipping;
mod shown;
mod so_far;
mod stopper;
mod storage;
mod trainer;
mod warm;

pub use context::RankContext;
pub use environment::Layout;
pub use error::{PythonError, ReportError, TrainError};
pub use output::{Line, Lines, RankOutput};
pub use plan::{Backend, Returns};
pub use preflight::{Diagnosis, NodeReport, Problem, doctor};
pub use progress::{Progress, RankProgress};
pub use ranks::{Ranks, Returned};
pub use result::TrainResult;
pub use run::Run;
pub use scaling::Scaling;
pub use stopper::Stopper;
pub use storage::{BestCheckpoints, Checkpoint, CheckpointConfig, ScoreOrder};
pub use trainer::{TorchTrainer, default_python};
