#[wingbeat::remote(retry_on = String)]
fn with_a_value(x: u64) -> Result<u64, String> {
    Ok(x)
}

#[wingbeat::remote(max_retries = -1)]
fn as_elsewhere(x: u64) -> u64 {
    x
}

#[wingbeat::remote(retry_on(String))]
fn without_errors(x: u64) -> u64 {
    x
}

#[wingbeat::remote(retry_if = |error: &String| error.is_empty())]
fn with_errors_among_items(x: u64) -> impl Iterator<Item = Result<u64, String>> {
    (0..x).map(Ok)
}

#[wingbeat::actor(max_restarts = always)]
impl Missing {
    fn new() -> Self {
        Missing
    }
}

struct Missing;

fn main() {}
