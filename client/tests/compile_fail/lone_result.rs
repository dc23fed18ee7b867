#[wingbeat::remote]
fn parse(text: String) -> std::io::Result<u64> {
    text.parse().map_err(std::io::Error::other)
}

#[wingbeat::remote]
fn write(_text: String) -> std::fmt::Result {
    Ok(())
}

mod by_another_name {
    type Result<T> = std::result::Result<Vec<T>, String>;

    #[wingbeat::remote]
    fn all(x: u64) -> Result<u64> {
        Ok(vec![x])
    }
}

fn main() {}
