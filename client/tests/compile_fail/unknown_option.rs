#[wingbeat::remote(cpus = 2)]
fn square(x: u64) -> u64 {
    x * x
}

fn main() {}
