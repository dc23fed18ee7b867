//! How many descriptors this process may have.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Tells processes of a node the limit that its daemon was started with, for the programs of others that they start.
pub const USUAL: &str = "WINGBEAT_NOFILE";

static BEFORE: OnceLock<Option<u64>> = OnceLock::new();

/// The limit that this process was started with, or where a process of a node asks, its daemon. None for no limit.
pub fn usual_limit() -> Option<u64> {
    let told = std::env::var(USUAL).ok().and_then(|text| text.parse().ok());
    told.or_else(|| *BEFORE.get_or_init(|| getrlimit(Resource::Nofile).current))
}

/// Raises the limit of descriptors as far as the system lets this process. The usual one of 1,024 is there for programs that
/// call `select`; each connection, worker process and mapping here needs some.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    BEFORE.get_or_init(|| limit.current);
    if limit.current != limit.maximum {
        // Refused nowhere; and else the limit stays what it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_what_the_system_allows() {
        raise_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
