#[wingbeat::remote(timeout = 30)]
fn square(x: u64) -> u64 {
    x * x
}

#[wingbeat::remote(timeout = "0s")]
fn cube(x: u64) -> u64 {
    x * x * x
}

fn main() {}
