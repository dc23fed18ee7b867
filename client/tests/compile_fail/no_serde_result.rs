struct Opaque;

struct Mute;

#[wingbeat::remote]
fn make() -> Result<Opaque, Mute> {
    Ok(Opaque)
}

fn main() {}
