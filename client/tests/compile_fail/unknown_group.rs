struct Rooms;

#[wingbeat::actor(concurrency_groups(io = 2))]
impl Rooms {
    fn new() -> Self {
        Rooms
    }
    #[method(group = "disk")]
    async fn read(&self) {}
}

fn main() {}
