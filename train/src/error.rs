use serde::{Deserialize, Serialize};
use wingbeat::NodeId;

use crate::result::TrainResult;

/// The exception that ended a script, as Python told it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PythonError {
    /// Its class, such as `ValueError`.
    pub kind: String,
    /// Its text.
    pub message: String,
    /// The whole traceback.
    pub traceback: String,
    /// The exception of a Python function, pickled, where it could be.
    pub pickled: Option<Vec<u8>>,
}

/// Why a rank's report, or its question for a checkpoint, has failed. What Rust functions get of
/// [`RankContext`](crate::RankContext), and scripts as `ReportError`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The folder or file that was reported is not there.
    #[error("the checkpoint {path} does not exist on {node}; report a folder or file of the rank's own machine")]
    CheckpointMissing {
        /// Where it was to be.
        path: String,
        /// The rank's node.
        node: String,
    },
    /// The checkpoint cannot be stored or read.
    #[error("{0}")]
    Storage(String),
    /// A rank has ended without this report.
    #[error("{0}")]
    Uneven(String),
    /// Two reports of a rank at the same time.
    #[error(
        "another report of this rank came before all had come to this one: one process and one thread of a rank report"
    )]
    Overtaken,
    /// The rank or the run has ended.
    #[error("the run is over")]
    Over,
    /// What was reported cannot be.
    #[error("{0}")]
    Invalid(String),
    /// The process that looks after the rank does not answer.
    #[error("the rank cannot reach its run: {0}")]
    Unreachable(String),
}

/// Why a training run did not succeed.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A node does not have the script.
    #[error("{script} is not on {node} (looked from {working_dir}); give a path that every node has")]
    ScriptNotFound {
        /// The script.
        script: String,
        /// The node that lacks it.
        node: String,
        /// From where a relative path was looked for.
        working_dir: String,
    },
    /// A node does not have the interpreter.
    #[error(
        "the Python interpreter `{python}` does not run on {node}: {why}; name another (--python, TorchTrainer::python or WINGBEAT_PYTHON)"
    )]
    PythonNotFound {
        /// The interpreter.
        python: String,
        /// The node.
        node: String,
        /// What happened.
        why: String,
    },
    /// Nodes would run different Pythons.
    #[error(
        "nodes differ in Python's version: {versions}; install the same minor version everywhere, or name it with --python"
    )]
    PythonDiffers {
        /// Who has which.
        versions: String,
    },
    /// The script needs torch, and its Python has none.
    #[error("rank {rank}: `{python}` has no torch; install it there with `{python} -m pip install torch`")]
    TorchMissing {
        /// The rank.
        rank: u32,
        /// The interpreter.
        python: String,
    },
    /// The group could not be placed.
    #[error("cannot place {workers} worker{} of {each}: {why}", if *.workers == 1 { "" } else { "s" })]
    NotEnoughResources {
        /// How many.
        workers: u32,
        /// What each needs.
        each: String,
        /// What is missing.
        why: String,
    },
    /// A rank ended without success; the others were stopped.
    #[error("rank {rank} on {node} {exit}{}", shown(.python_error.as_deref(), .stderr))]
    RankFailed {
        /// The first rank that failed.
        rank: u32,
        /// Its node.
        node: String,
        /// How it ended: an exit code or a signal.
        exit: String,
        /// Its exit code, if it exited.
        code: Option<i32>,
        /// The exception, if there was one.
        python_error: Option<Box<PythonError>>,
        /// Its last lines of standard error.
        stderr: Vec<String>,
    },
    /// The actor of a rank is gone, and its process with it; the others were stopped.
    #[error("rank {rank} on {node} was lost: {cause}")]
    RankLost {
        /// The rank.
        rank: u32,
        /// Its node.
        node: String,
        /// What became of its actor.
        cause: Box<wingbeat::Error>,
    },
    /// The ranks had done nothing for too long; they were stopped.
    #[error("nothing was printed or reported for {seconds} s ({lagging} kept the others waiting)")]
    Hangs {
        /// For how long.
        seconds: u64,
        /// Who kept the others waiting.
        lagging: String,
    },
    /// The port of the ranks' store is somebody else's.
    #[error("port {port} of {node}, where rank 0 was to listen, is taken")]
    PortTaken {
        /// The port.
        port: u16,
        /// Rank 0's node.
        node: String,
    },
    /// Checkpoints cannot be stored or read.
    #[error("checkpoint storage: {0}")]
    Storage(String),
    /// A checkpoint for whose storing no rank waited was not stored.
    #[error("a checkpoint was not stored: {0}")]
    CheckpointLost(String),
    /// The group is to start again with more ranks. It is never the end of a run.
    #[error("there is room for {ranks} ranks; starting again with them")]
    Grows {
        /// How many there is room for.
        ranks: u32,
    },
    /// A node of the group is to be free of work, and the group starts again elsewhere. It is never the end of a run.
    #[error("{node} is drained ({why}); starting again elsewhere")]
    Moves {
        /// The node.
        node: NodeId,
        /// Why it is drained.
        why: String,
    },
    /// Something that was found before the run would keep it from working.
    #[error("the run would not work:\n  {}", .0.join("\n  "))]
    Preflight(Vec<String>),
    /// The run was stopped from outside.
    #[error("the run was stopped")]
    Stopped {
        /// How far it had come.
        so_far: Box<TrainResult>,
    },
    /// A rank that is a Rust function failed; the others were ended.
    #[error("rank {rank} failed: {cause}")]
    FunctionFailed {
        /// The rank.
        rank: u32,
        /// What became of its call.
        cause: Box<wingbeat::Error>,
    },
    /// The options or arguments are invalid.
    #[error("{0}")]
    Invalid(String),
    /// The runtime failed.
    #[error(transparent)]
    Runtime(#[from] wingbeat::Error),
}

impl TrainError {
    /// A run was stopped that had not come far.
    pub(crate) fn stopped() -> TrainError {
        TrainError::Stopped { so_far: Box::default() }
    }

    /// Whether a rank is said to be at fault.
    pub(crate) fn is_of_a_rank(&self) -> bool {
        matches!(
            self,
            TrainError::RankFailed { .. }
                | TrainError::RankLost { .. }
                | TrainError::FunctionFailed { .. }
                | TrainError::CheckpointLost(_)
        )
    }

    /// Whether another attempt may go better.
    pub(crate) fn may_pass(&self, retry_exceptions: bool) -> bool {
        match self {
            TrainError::RankFailed { python_error, .. } => retry_exceptions || python_error.is_none(),
            TrainError::FunctionFailed { cause, .. } => {
                // What it called may have failed, and not itself.
                let passed_on = cause.application::<wingbeat::Error>();
                let cause = passed_on.as_ref().unwrap_or(cause);
                !is_final(cause) && (retry_exceptions || is_loss(cause))
            }
            TrainError::Runtime(error) if is_final(error) => false,
            TrainError::RankLost { .. }
            | TrainError::Hangs { .. }
            | TrainError::CheckpointLost(_)
            | TrainError::Runtime(_) => true,
            _ => false,
        }
    }
}

/// Whether a call has failed with what it ran on or what it needed, and not by itself.
pub(crate) fn is_loss(cause: &wingbeat::Error) -> bool {
    use wingbeat::Error as Of;
    matches!(
        cause,
        Of::WorkerCrashed { .. }
            | Of::OutOfMemory { .. }
            | Of::NodeDied { .. }
            | Of::ContactLost { .. }
            | Of::Unreachable { .. }
            | Of::ActorDied { .. }
            | Of::ActorUnavailable { .. }
            | Of::OwnerDied { .. }
            | Of::ObjectLost { .. }
            | Of::StoreFull { .. }
            | Of::PlacementGroupGone { .. }
            | Of::Cancelled { .. }
            | Of::ObjectUnavailable { .. }
            | Of::OutOfDescriptors { .. }
            | Of::Io { .. }
            | Of::Failed { .. }
    )
}

/// Whether the same call fails each time: what it asks for cannot be.
fn is_final(cause: &wingbeat::Error) -> bool {
    use wingbeat::Error as Of;
    matches!(
        cause,
        Of::InvalidOption { .. }
            | Of::Encode { .. }
            | Of::Decode { .. }
            | Of::FunctionNotFound { .. }
            | Of::ForeignRef { .. }
            | Of::InvalidArgument { .. }
            | Of::ObjectTooLarge { .. }
            | Of::NoSession
            | Of::SessionEnded { .. }
    )
}

fn shown(error: Option<&PythonError>, stderr: &[String]) -> String {
    match error {
        Some(error) => format!(":\n{}", error.traceback.trim_end()),
        None if stderr.is_empty() => String::new(),
        None => format!("; its last lines of stderr:\n    {}", stderr.join("\n    ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of each variant.
    fn examples() -> Vec<TrainError> {
        let (node, python, why) = (|| "node-a".to_owned(), || "python3".to_owned(), || "the reason".to_owned());
        let lost = || Box::new(wingbeat::Error::NoSession);
        let raised = PythonError {
            kind: "ValueError".into(),
            message: "no".into(),
            traceback: "Traceback (most recent call last):\n  File \"a.py\", line 1\nValueError: no\n".into(),
            pickled: None,
        };
        let failed = |python_error| TrainError::RankFailed {
            rank: 1,
            node: node(),
            exit: "exited with code 1".into(),
            code: Some(1),
            python_error,
            stderr: vec!["a line".into(), "another".into()],
        };
        vec![
            TrainError::ScriptNotFound { script: "a.py".into(), node: node(), working_dir: "/home/me".into() },
            TrainError::PythonNotFound { python: python(), node: node(), why: why() },
            TrainError::PythonDiffers { versions: "3.11 on node-a, 3.12 on node-b".into() },
            TrainError::TorchMissing { rank: 1, python: python() },
            TrainError::NotEnoughResources { workers: 2, each: "1 GPU".into(), why: why() },
            failed(Some(Box::new(raised))),
            failed(None),
            TrainError::RankLost { rank: 1, node: node(), cause: lost() },
            TrainError::Hangs { seconds: 600, lagging: "rank 1".into() },
            TrainError::PortTaken { port: 29500, node: node() },
            TrainError::Storage(why()),
            TrainError::CheckpointLost(why()),
            TrainError::Grows { ranks: 4 },
            TrainError::Moves { node: NodeId(1), why: why() },
            TrainError::Preflight(vec!["node-a does not reach node-b".into(), "clocks differ by 5 s".into()]),
            TrainError::stopped(),
            TrainError::FunctionFailed { rank: 1, cause: lost() },
            TrainError::Invalid("what is wrong with it".into()),
            TrainError::Runtime(wingbeat::Error::NoSession),
        ]
    }

    /// A new variant does not compile here: give it an example above, too.
    fn has_an_example(error: &TrainError) {
        use TrainError::*;
        match error {
            ScriptNotFound { .. } | PythonNotFound { .. } | PythonDiffers { .. } | TorchMissing { .. } => {}
            NotEnoughResources { .. } | RankFailed { .. } | RankLost { .. } | Hangs { .. } | PortTaken { .. } => {}
            Storage(_) | CheckpointLost(_) | Grows { .. } | Moves { .. } | Preflight(_) | Stopped { .. } => {}
            FunctionFailed { .. } | Invalid(_) | Runtime(_) => {}
        }
    }

    #[test]
    fn what_a_function_asked_for_and_cannot_have_is_not_tried_again_and_its_own_error_only_if_asked() {
        use wingbeat::Error;
        let text = || "it".to_owned();
        let after = |cause, retries| TrainError::FunctionFailed { rank: 0, cause: Box::new(cause) }.may_pass(retries);
        let misspelt = || Error::InvalidOption { what: text(), option: text(), why: text() };
        let undecodable = || Error::Decode { what: text(), why: text() };
        let full = || Error::StoreFull { what: text(), why: text() };
        let late = || Error::TimedOut { what: text(), limit_ms: 1 };
        assert!(!after(misspelt(), true) && !after(undecodable(), true));
        assert!(after(full(), true) && after(full(), false));
        assert!(after(late(), true) && !after(late(), false), "by its own limit");
        assert!(!TrainError::Runtime(misspelt()).may_pass(true));
    }

    #[test]
    fn every_error_says_what_failed_and_why() {
        let text = |error: &TrainError| {
            has_an_example(error);
            let variant: String = format!("{error:?}").chars().take_while(|letter| letter.is_alphanumeric()).collect();
            format!("{variant}\n    {error}")
        };
        insta::assert_snapshot!(examples().iter().map(text).collect::<Vec<_>>().join("\n"));
    }
}
