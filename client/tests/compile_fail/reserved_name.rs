struct Scene;

#[wingbeat::actor]
impl Scene {
    fn new() -> Self {
        Scene
    }
    fn actor(&self) {}
}

fn main() {}
