//! What a task or call is called in messages.

use std::ops::Deref;
use std::sync::Arc;

/// The path of its function, or what the user gave.
#[derive(Clone, Debug)]
pub(crate) enum Name {
    Path(&'static str),
    Given(Arc<str>),
}

impl Name {
    pub(crate) fn new(given: Option<&str>, path: &'static str) -> Name {
        given.map_or(Name::Path(path), |given| Name::Given(given.into()))
    }
}

impl Deref for Name {
    type Target = str;
    fn deref(&self) -> &str {
        match self {
            Name::Path(path) => path,
            Name::Given(name) => name,
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self)
    }
}
