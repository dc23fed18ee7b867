//! What daemons write about themselves.

use tracing_subscriber::EnvFilter;

/// Has this process write to its standard error what `filter` says, else `WINGBEAT_LOG`, else warnings and what Wingbeat has to say.
pub fn to_stderr(filter: Option<&str>, has_colors: bool) {
    let filter = match filter {
        Some(filter) => EnvFilter::new(filter),
        None => {
            EnvFilter::try_from_env("WINGBEAT_LOG").unwrap_or_else(|_| EnvFilter::new("warn,tarpc=off,wingbeat=info"))
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(has_colors)
        .init();
}
