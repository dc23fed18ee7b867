//! The first example of the README: a remote function, an actor, and refs as arguments.

#![cfg_attr(rustfmt, rustfmt_skip)]

use wingbeat::prelude::*;

#[wingbeat::remote]
fn square(x: u64) -> u64 { x * x }

struct Tally { n: u64 }

#[wingbeat::actor]
impl Tally {
    fn new(start: u64) -> Self { Tally { n: start } }
    fn add(&mut self, by: u64) -> u64 { self.n += by; self.n }
}

#[wingbeat::main]
async fn main() -> wingbeat::Result<()> {
    wingbeat::init().await?;                       // a private cluster on this machine, or $WINGBEAT_ADDRESS
    let tally = Tally::remote(0);
    let mut last = tally.add(0);
    for i in 1..=10u64 { last = tally.add(square::remote(i)); }   // a ref is an argument
    println!("{}", last.get().await?);             // 385
    Ok(())
}
