#[wingbeat::remote(num_returns = 3)]
fn two(x: u64) -> (u64, u64) {
    (x, x)
}

#[wingbeat::remote(num_returns = 2)]
fn none(x: u64) -> Vec<u64> {
    vec![x]
}

#[wingbeat::remote(num_returns = 2)]
fn items(x: u64) -> impl Iterator<Item = (u64, u64)> {
    std::iter::once((x, x))
}

#[wingbeat::remote(num_returns = 1)]
fn one(x: u64) -> (u64,) {
    (x,)
}

fn main() {}
