#[wingbeat::remote(retry_on = String)]
fn with_a_value(x: u64) -> Result<u64, String> {
    Ok(x)
}

#[wingbeat::remote(max_retries = -1)]
fn as_elsewhere(x: u64) -> u64 {
    x
}

#[wingbeat::actor(max_restarts = always)]
impl Missing {
    fn new() -> Self {
        Missing
    }
}

struct Missing;

fn main() {}
