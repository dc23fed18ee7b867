type Result<T> = std::result::Result<T, String>;

#[wingbeat::remote]
fn parse(text: String) -> Result<u64> {
    text.parse().map_err(|_| text)
}

fn main() {}
