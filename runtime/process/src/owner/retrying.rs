//! Which errors of user code are tried again, and how often.

use std::fmt;
use std::sync::Arc;

use wingbeat_core::error::Error;

use crate::user_thread;

/// No limit, of retries and of restarts.
pub const UNLIMITED: u32 = u32::MAX;

/// What is left of a number of attempts after one more.
pub(crate) fn one_less(attempts: u32) -> u32 {
    if attempts == UNLIMITED { UNLIMITED } else { attempts.saturating_sub(1) }
}

/// How long a task rests that failures have cost so many retries already before it is tried again, in milliseconds: a function that
/// fails at once, or ends its process, is not run as often as the machine can.
pub(crate) fn pause_ms(failures: u32) -> u64 {
    match failures {
        0 => 0,
        failures => (PAUSE_MS << (failures - 1).min(10)).min(PAUSE_LIMIT_MS),
    }
}

/// The pause before the second retry; each later one is twice as long as that before, up to the limit. Before the first there is
/// none: most often it was one process that was killed.
const PAUSE_MS: u64 = 10;
const PAUSE_LIMIT_MS: u64 = 1_000;

/// Whether an error of user code is to be tried again, as user code says.
pub type Predicate = Arc<dyn Fn(&Error) -> bool + Send + Sync>;

/// Which errors of a function cost it a retry instead of failing its task. What the machine does is always tried again.
#[derive(Clone, Default)]
pub enum RetryOn {
    /// None of them.
    #[default]
    Nothing,
    /// All errors and panics.
    Everything,
    /// Those that an attribute names.
    Declared(&'static Declared),
    /// Those that a call names.
    Chosen(Arc<Chosen>),
}

/// What `#[remote(retry_on(…), retry_if = …)]` names: a type or a predicate is enough.
#[derive(Debug)]
pub struct Declared {
    /// Names of error types, as [`std::any::type_name`] gives them.
    pub types: &'static [fn() -> &'static str],
    /// Of errors of other types.
    pub predicate: Option<fn(&Error) -> bool>,
}

/// What the options of a call name: one of these is enough.
#[derive(Clone, Default)]
pub struct Chosen {
    types: Vec<&'static str>,
    predicates: Vec<Predicate>,
}

impl Drop for Chosen {
    /// What predicates have captured is dropped with them, and may do anything. This thread may be the one that all others wait for, so
    /// another does it.
    fn drop(&mut self) {
        let predicates = std::mem::take(&mut self.predicates);
        if predicates.is_empty() {
            return;
        }
        user_thread::drop_there(predicates);
    }
}

/// What is known of an error without running user code.
pub(crate) enum Verdict {
    Retry,
    Fail,
    /// User code is to be asked.
    Ask,
}

impl RetryOn {
    /// These, and errors of one more type.
    #[must_use]
    pub fn or_type(self, name: &'static str) -> RetryOn {
        self.or(|chosen| chosen.types.push(name))
    }

    /// These, and those of which this holds.
    #[must_use]
    pub fn or_if(self, predicate: Predicate) -> RetryOn {
        self.or(|chosen| chosen.predicates.push(predicate))
    }

    fn or(self, add: impl FnOnce(&mut Chosen)) -> RetryOn {
        let mut chosen = match self {
            RetryOn::Everything => return self,
            RetryOn::Nothing | RetryOn::Declared(_) => Arc::default(),
            RetryOn::Chosen(chosen) => chosen,
        };
        add(Arc::make_mut(&mut chosen));
        RetryOn::Chosen(chosen)
    }

    /// Runs no user code.
    pub(crate) fn verdict(&self, error: &Error) -> Verdict {
        let of_users = matches!(error, Error::Application { .. } | Error::Panicked { .. });
        let (has_type, asks) = match self {
            RetryOn::Everything if of_users => return Verdict::Retry,
            RetryOn::Declared(declared) => {
                (declared.types.iter().any(|name| error.is_of_type(name())), declared.predicate.is_some())
            }
            RetryOn::Chosen(chosen) => {
                (chosen.types.iter().any(|name| error.is_of_type(name)), !chosen.predicates.is_empty())
            }
            RetryOn::Nothing | RetryOn::Everything => return Verdict::Fail,
        };
        match error {
            Error::Application { .. } if has_type => Verdict::Retry,
            Error::Application { .. } if asks => Verdict::Ask,
            _ => Verdict::Fail,
        }
    }

    /// Asks user code; to be called on a thread on which that may run. A predicate that panics says no.
    pub(crate) fn ask(&self, error: &Error) -> bool {
        let ask = || match self {
            RetryOn::Nothing | RetryOn::Everything => false,
            RetryOn::Declared(declared) => declared.predicate.is_some_and(|predicate| predicate(error)),
            RetryOn::Chosen(chosen) => chosen.predicates.iter().any(|predicate| predicate(error)),
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(ask)).unwrap_or(false)
    }
}

impl fmt::Debug for RetryOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetryOn::Nothing => f.write_str("Nothing"),
            RetryOn::Everything => f.write_str("Everything"),
            RetryOn::Declared(declared) => declared.fmt(f),
            RetryOn::Chosen(chosen) => write!(f, "{:?} and {} predicates", chosen.types, chosen.predicates.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::codec::Payload;
    use wingbeat_core::error::ApplicationError;

    use super::*;

    fn error(type_name: &str) -> Error {
        let error =
            ApplicationError { type_name: type_name.to_owned(), message: "no".into(), payload: Payload::default() };
        Error::Application { task: "a task".into(), error, attempts: 1 }
    }

    #[test]
    fn a_type_is_known_by_its_name_and_user_code_is_asked_last() {
        let (known, other) = (error("Busy"), error("Broken"));
        let by_type = RetryOn::Nothing.or_type("Busy");
        assert!(matches!(by_type.verdict(&known), Verdict::Retry));
        assert!(matches!(by_type.verdict(&other), Verdict::Fail));
        let either = by_type.or_if(Arc::new(|error| error.to_string().contains("no")));
        assert!(matches!(either.verdict(&known), Verdict::Retry));
        assert!(matches!(either.verdict(&other), Verdict::Ask) && either.ask(&other));
    }

    #[test]
    fn a_panic_is_of_no_type_and_a_predicate_that_panics_says_no() {
        let panicked =
            Error::Panicked { task: "a task".into(), message: "oh".into(), backtrace: String::new(), attempts: 1 };
        let asks = RetryOn::Nothing.or_if(Arc::new(|_| panic!("in a predicate")));
        assert!(matches!(asks.verdict(&panicked), Verdict::Fail));
        assert!(!asks.ask(&error("Busy")));
        assert!(matches!(RetryOn::Everything.or_type("Busy").verdict(&panicked), Verdict::Retry));
    }

    #[test]
    fn the_first_retry_comes_at_once_and_the_others_ever_more_seldom() {
        let pauses: Vec<u64> = (0..10).map(pause_ms).collect();
        assert_eq!(pauses, [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000]);
        assert_eq!(pause_ms(u32::MAX), 1_000);
    }

    #[test]
    fn what_has_no_limit_stays_without() {
        assert_eq!((one_less(UNLIMITED), one_less(2), one_less(0)), (UNLIMITED, 1, 0));
    }
}
