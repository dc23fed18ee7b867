//! The Rust blocks of the README and the guide, compiled and run by `cargo test --doc`.
//!
//! `tests/tests/pages.rs` checks that every page with such a block is here.

/// A type for each page, with the page as its documentation. Only the documentation tests see them.
macro_rules! pages {
    ($($name:ident = $page:literal),* $(,)?) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!($page)]
            struct $name;
        )*
    };
}

pages! {
    Readme = "../../../README.md",
    Clusters = "../../../docs/guide/clusters.md",
    Collectives = "../../../docs/guide/collectives.md",
    ComingFrom = "../../../docs/guide/coming-from.md",
    Comparison = "../../../docs/guide/comparison.md",
    Operations = "../../../docs/guide/operations.md",
    Reference = "../../../docs/guide/reference.md",
    Resources = "../../../docs/guide/resources.md",
    Sessions = "../../../docs/guide/sessions.md",
    Start = "../../../docs/guide/start.md",
    Tasks = "../../../docs/guide/tasks.md",
    Testing = "../../../docs/guide/testing.md",
    Training = "../../../docs/guide/training.md",
    Troubleshooting = "../../../docs/guide/troubleshooting.md",
}
