//! What daemons write about themselves.

/// Has this process write warnings, and what Wingbeat has to say, to its standard error; `WINGBEAT_LOG` says otherwise.
pub fn to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("WINGBEAT_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,tarpc=off,wingbeat=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
