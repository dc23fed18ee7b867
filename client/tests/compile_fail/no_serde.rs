struct Opaque;

#[wingbeat::remote]
fn look(_: Opaque) -> u64 {
    0
}

fn main() {}
