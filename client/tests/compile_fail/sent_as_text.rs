struct Unsendable;

#[wingbeat::remote(retry_on(Unsendable))]
fn sent_as_text(x: u64) -> Result<u64, String> {
    Ok(x)
}

fn main() {}
