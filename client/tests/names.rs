//! The names that users give do not meet the names in the code that the macros write.

#![allow(dead_code, reason = "it is enough that this compiles")]

use serde::{Deserialize, Serialize};

#[wingbeat::remote]
fn run(x: u64) -> u64 {
    x
}

#[wingbeat::remote]
fn takes(arguments: Vec<String>, takes: u64) -> u64 {
    takes + arguments.len() as u64
}

#[wingbeat::remote]
async fn items(item: u64) -> impl Iterator<Item = u64> {
    0..item
}

#[wingbeat::remote]
fn arguments(mut value: u64, (a, b): (u64, u64)) -> Result<(u64, u64), String> {
    value += a;
    Ok((value, b))
}

#[derive(Clone, Serialize, Deserialize)]
struct Counter {
    n: u64,
}

#[wingbeat::actor]
impl Counter {
    fn new(n: u64) -> Self {
        Counter { n }
    }
    fn add(&mut self, cell: u64, guard: u64, instance: Vec<u64>) -> u64 {
        self.n += cell + guard + instance.len() as u64;
        self.n
    }
    fn items(&self, items: Vec<u64>) -> impl Iterator<Item = u64> {
        items.into_iter()
    }
    #[cfg(any())]
    fn is_not_there(&self) -> NoSuchType {}
    fn merged(&self, other: Self) -> Self {
        Counter { n: self.n + other.n }
    }
}

macro_rules! remote_returning {
    ($name:ident, $returned:ty) => {
        #[wingbeat::remote]
        fn $name(x: u64) -> $returned {
            Ok(x)
        }
    };
}
remote_returning!(checked, Result<u64, String>);

/// `Result` with an error that is named elsewhere.
mod other_results {
    type Result<T> = std::result::Result<T, String>;

    #[wingbeat::remote(num_returns = 2)]
    pub(crate) fn split(x: u64) -> Result<(u64, u64)> {
        Ok((x / 2, x - x / 2))
    }

    #[wingbeat::remote(retry_on(String))]
    pub(crate) fn nothing() -> Result<()> {
        Ok(())
    }
}

/// A crate that has Wingbeat for its users.
mod facade {
    pub(crate) use wingbeat as remote_calls;
}

#[wingbeat::remote(crate = "crate::facade::remote_calls", retry_on(String), max_retries = unlimited)]
fn through_another_name(x: u64) -> Result<u64, String> {
    Ok(x)
}

struct Renamed;

#[wingbeat::actor(crate = "crate::facade::remote_calls", max_concurrency = 2)]
impl Renamed {
    async fn new() -> Self {
        Renamed
    }
    fn items(&self, count: u64) -> impl Iterator<Item = u64> {
        0..count
    }
}

#[derive(Clone, Copy, serde::Serialize, serde::Deserialize, wingbeat::Plain)]
#[plain(crate = "crate::facade::remote_calls")]
#[repr(C)]
struct Renumbered {
    number: u64,
}

mod with_a_main {
    #[wingbeat::main(crate = "crate::facade::remote_calls")]
    async fn main() -> wingbeat::Result<()> {
        Ok(())
    }
}

fn the_types_are_those_that_are_written(counter: &CounterHandle) {
    let _: wingbeat::ObjectRef<Counter> = counter.merged(Counter { n: 1 });
    let _: wingbeat::ObjectRef<u64> = checked::remote(1);
    let _: (wingbeat::ObjectRef<u64>, wingbeat::ObjectRef<u64>) = other_results::split::remote(1);
    let _: wingbeat::ObjectRef<()> = other_results::nothing::remote();
    let _: wingbeat::Buffer<Renumbered> = vec![Renumbered { number: 1 }].into();
    let _: wingbeat::ObjectStream<u64> = Renamed::remote().items(through_another_name::remote(1));
}
