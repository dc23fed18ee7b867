//! Tasks and the actor that several programs of the matrix use.

use std::path::PathBuf;

use wingbeat::{ObjectRef, put};

use crate::world::{LARGE, exists};

#[wingbeat::remote(max_retries = 0)]
pub(crate) fn double(number: u64) -> u64 {
    2 * number
}

#[wingbeat::remote(max_retries = 0)]
pub(crate) fn waits_for_a_file(began: PathBuf, go_on: PathBuf) -> u64 {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    7
}

#[wingbeat::remote(max_retries = 0)]
pub(crate) fn large(byte: u8) -> Vec<u8> {
    vec![byte; LARGE]
}

/// New refs, of values that this process owns.
#[wingbeat::remote(max_retries = 0)]
pub(crate) fn makes_refs(count: u64) -> Vec<ObjectRef<u64>> {
    (0..count).map(|number| put(&number).unwrap()).collect()
}

#[wingbeat::remote(max_retries = 0)]
pub(crate) fn reads(refs: Vec<ObjectRef<Vec<u8>>>) -> String {
    match refs[0].get_blocking() {
        Ok(bytes) => format!("{} bytes", bytes.len()),
        Err(error) => format!("{:?}", error.kind()),
    }
}

#[wingbeat::remote(max_retries = 0)]
pub(crate) fn reads_when(refs: Vec<ObjectRef<Vec<u8>>>, began: PathBuf, go_on: PathBuf) -> String {
    std::fs::write(began, "").unwrap();
    exists(&go_on);
    reads(refs)
}

pub(crate) struct Counter {
    count: u64,
}

#[wingbeat::actor(num_cpus = 0.0)]
impl Counter {
    pub(crate) fn new() -> Counter {
        Counter { count: 0 }
    }

    pub(crate) fn add(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(crate) fn pid(&self) -> u32 {
        std::process::id()
    }

    /// Asks another actor to ask this one, which cannot answer meanwhile.
    pub(crate) fn asks(&mut self, other: CounterHandle, this: CounterHandle) -> u64 {
        other.passes_on(this).get_blocking().unwrap()
    }

    pub(crate) fn passes_on(&mut self, to: CounterHandle) -> u64 {
        to.add().get_blocking().unwrap()
    }

    pub(crate) fn numbers(&self, count: u64) -> impl Iterator<Item = u64> + use<> {
        0..count
    }

    pub(crate) fn puts(&self, len: usize) -> Vec<ObjectRef<Vec<u8>>> {
        vec![put(&vec![7; len]).unwrap()]
    }
}
