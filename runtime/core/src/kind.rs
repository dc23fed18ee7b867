//! Errors by what whoever has one can do about it.

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// What an [`Error`] means for whoever has it: enough for most programs to match on. A variant of the error itself says what
/// failed, where and why.
///
/// | operation | kinds |
/// |---|---|
/// | `init()` | `Session`, `Invalid`, `Full` |
/// | `put` | `Session`, `Invalid`, `Full` |
/// | `remote(…)`, a call of an actor | none: whatever goes wrong is the error of their results |
/// | `get`, `view`, `next`, `get_all` | all |
/// | finding or making something by name | `Name`, `Session`, `Invalid`, `CannotRun` |
/// | waiting for a placement group | `CannotRun`, `TimedOut`, `Session` |
///
/// ```
/// use wingbeat_core::error::Error;
/// use wingbeat_core::kind::ErrorKind;
///
/// fn advice(error: &Error) -> &'static str {
///     match error.kind() {
///         ErrorKind::Task => "look at the function",
///         ErrorKind::Invalid | ErrorKind::CannotRun => "change the program, or what it asks for",
///         ErrorKind::Session => "look at the cluster",
///         _ if error.is_retryable() => "try again",
///         _ => "read the error",
///     }
/// }
///
/// assert_eq!(advice(&Error::NoSession), "look at the cluster");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The user's function returned an error ([`Error::application`] has it) or panicked.
    Task,
    /// A process, a node, a connection or all copies of a value are gone. Another attempt may succeed.
    Lost,
    /// Memory ran out on a node, and the process was ended for that: [`Error::OutOfMemory`] says who used it. Another attempt may
    /// succeed where there is more, or when others use less.
    OutOfMemory,
    /// The actor is dead, is being started again, or has too many calls; [`Error::cause`] says why.
    Actor,
    /// Somebody cancelled it.
    Cancelled,
    /// It took longer than it was allowed to, and goes on.
    TimedOut,
    /// It can never run: no node could hold it, its placement group is gone, or it waits for itself.
    CannotRun,
    /// A name is taken, or nothing has it.
    Name,
    /// The program asks for what cannot be, or for a value that cannot be sent.
    Invalid,
    /// There is no room, or a machine or a part of the cluster has failed at something. It may pass.
    Full,
    /// There is no cluster, it cannot be reached, it refuses this process, or the session is over.
    Session,
}

/// What the system answers where the same may work later: EINTR, EAGAIN, ENOMEM, ENOSPC and EDQUOT, as on Linux.
const PASSING: [i32; 5] = [4, 11, 12, 28, 122];

impl Error {
    /// What it means for whoever has it. One that a function returned because another had failed means what that does.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Application { error, .. } => error.passed_on().map_or(ErrorKind::Task, |error| error.kind()),
            Error::Panicked { .. } => ErrorKind::Task,
            Error::WorkerCrashed { .. }
            | Error::NodeDied { .. }
            | Error::ContactLost { .. }
            | Error::OwnerDied { .. }
            | Error::ObjectLost { .. }
            | Error::ObjectUnavailable { .. } => ErrorKind::Lost,
            Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Error::ActorUnavailable { .. }
            | Error::ActorDied { .. }
            | Error::ActorEnded { .. }
            | Error::TooManyPendingCalls { .. } => ErrorKind::Actor,
            Error::Cancelled { .. } => ErrorKind::Cancelled,
            Error::TimedOut { .. } => ErrorKind::TimedOut,
            Error::Deadlock { .. } | Error::Infeasible { .. } | Error::PlacementGroupGone { .. } => {
                ErrorKind::CannotRun
            }
            Error::PlacementGroupNotFound { .. }
            | Error::PlacementGroupNameTaken { .. }
            | Error::ActorNotFound { .. }
            | Error::ActorNameTaken { .. } => ErrorKind::Name,
            Error::InvalidOption { .. }
            | Error::InvalidArgument { .. }
            | Error::Encode { .. }
            | Error::Decode { .. }
            | Error::FunctionNotFound { .. }
            | Error::ForeignRef { .. }
            | Error::ObjectTooLarge { .. } => ErrorKind::Invalid,
            Error::StoreFull { .. } | Error::OutOfDescriptors { .. } | Error::Io { .. } | Error::Failed { .. } => {
                ErrorKind::Full
            }
            Error::Unreachable { .. } | Error::Refused { .. } | Error::NoSession | Error::SessionEnded { .. } => {
                ErrorKind::Session
            }
        }
    }

    /// Whether the same work may succeed when it is done again, by the same program on the same cluster: what it needed was lost, away,
    /// full or slow. Of a value that was lost, the work is what has made it. What the attribute and the options say of retries was tried
    /// before. A function's own error, a panic, a dead actor and a file that is missing are final, and so is what nobody knows better of
    /// ([`Error::Failed`]).
    ///
    /// ```
    /// use wingbeat_core::error::Error;
    ///
    /// let slow = Error::TimedOut { what: "getting fetch".into(), limit_ms: 500 };
    /// assert!(slow.is_retryable());
    /// assert!(!Error::NoSession.is_retryable());
    /// ```
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            // It is what the function failed of.
            Error::Application { error, .. } => error.passed_on().is_some_and(|error| error.is_retryable()),
            Error::ActorUnavailable { .. } | Error::TooManyPendingCalls { .. } | Error::Unreachable { .. } => true,
            // A file that is missing stays so, and of the rest nobody knows.
            Error::Io { code, .. } => code.is_some_and(|code| PASSING.contains(&code)),
            Error::Failed { .. } => false,
            other => {
                use ErrorKind::{Full, Lost, OutOfMemory, TimedOut};
                matches!(other.kind(), Lost | OutOfMemory | Full | TimedOut)
            }
        }
    }

    /// Why an actor is dead or away, if that is what this says. It is in the text of the error, too; so this is not its
    /// `source()`, which whoever prints an error with all its sources would show twice.
    #[must_use]
    pub fn cause(&self) -> Option<&Error> {
        match self {
            Error::ActorDied { cause, .. } | Error::ActorUnavailable { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ActorId, NodeId};

    #[test]
    fn the_cause_of_an_actors_death_is_kept_as_an_error() {
        let lost = Error::NodeDied { what: "actor Tally".into(), node: NodeId(7), why: "a test".into(), attempts: 1 };
        let died = Error::ActorDied { actor: ActorId(1), class: "Tally".into(), cause: Box::new(lost) };
        assert_eq!(died.kind(), ErrorKind::Actor);
        assert_eq!(died.cause().map(Error::kind), Some(ErrorKind::Lost));
        assert!(died.cause().and_then(Error::cause).is_none());
    }

    #[test]
    fn what_was_lost_or_away_is_worth_another_try_and_what_is_final_is_not() {
        let lost = || Error::NodeDied { what: "f".into(), node: NodeId(7), why: "a test".into(), attempts: 1 };
        let (actor, class, cause) = (ActorId(1), "Tally".to_owned(), Box::new(lost()));
        let away = Error::ActorUnavailable { actor, class: class.clone(), cause: cause.clone() };
        let dead = Error::ActorDied { actor, class, cause };
        assert!(lost().is_retryable() && away.is_retryable());
        assert!(!dead.is_retryable(), "no call of it ever succeeds");
        let own = |error: &Error| {
            let payload = crate::codec::encode_value(error).map(crate::codec::Encoded::into_bytes).unwrap_or_default();
            let (type_name, message) = (std::any::type_name::<Error>().to_owned(), error.to_string());
            let error = crate::error::ApplicationError { type_name, message, payload: payload.into() };
            Error::Application { task: "f".into(), error, attempts: 1 }
        };
        assert!(own(&lost()).is_retryable(), "the function failed of what was lost");
        assert!(!own(&Error::NoSession).is_retryable());
        let io = |code| Error::io("opening a file", &std::io::Error::from_raw_os_error(code)).is_retryable();
        assert!(io(28) && !io(2), "a disk that is full, and a file that is missing");
        assert!(!Error::Cancelled { task: "f".into() }.is_retryable());
    }
}
