//! Whether the logs of a cluster are worth printing at its end.

/// Whether this test has failed, or may have, and what it prints is only shown then.
///
/// A test that returns an error has not panicked, and nobody tells its values how it ends. So where the harness captures what a test prints,
/// which it shows of failing tests, everything is printed.
pub(super) fn is_to_be_printed() -> bool {
    std::thread::panicking() || is_captured(std::env::args(), |name| std::env::var_os(name).is_some(), is_of_a_test())
}

/// The harness gives each test a thread with a name, unless one runs after the other; a program's own thread is `main`.
fn is_of_a_test() -> bool {
    std::thread::current().name().is_some_and(|name| name != "main")
}

fn is_captured(mut args: impl Iterator<Item = String>, is_set: impl Fn(&str) -> bool, is_of_a_test: bool) -> bool {
    // It has tests print everything, and captures that itself.
    if is_set("NEXTEST") {
        return true;
    }
    let shows = |arg: String| ["--nocapture", "--no-capture", "--show-output"].contains(&arg.as_str());
    is_of_a_test && !is_set("RUST_TEST_NOCAPTURE") && !args.any(shows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_printed_where_the_harness_keeps_it_back() {
        let captured = |args: &[&str], variable: &str, is_of_a_test| {
            is_captured(args.iter().map(|arg| (*arg).to_owned()), |name| name == variable, is_of_a_test)
        };
        assert!(captured(&["test", "a_name"], "", true));
        assert!(!captured(&["test", "--nocapture"], "", true) && !captured(&["test"], "RUST_TEST_NOCAPTURE", true));
        assert!(!captured(&["program"], "", false));
        assert!(captured(&["test", "--nocapture"], "NEXTEST", false));
    }
}
