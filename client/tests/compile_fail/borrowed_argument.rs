#[wingbeat::remote]
fn length(text: &str) -> u64 {
    text.len() as u64
}

fn main() {}
