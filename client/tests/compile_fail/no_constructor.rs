struct Tally;

#[wingbeat::actor]
impl Tally {
    fn add(&mut self) {}
}

fn main() {}
