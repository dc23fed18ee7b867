#[wingbeat::remote]
fn first<T: Clone>(items: Vec<T>) -> T {
    items[0].clone()
}

#[wingbeat::remote(instances(u64))]
fn last<T: Clone>(items: Vec<T>) -> T {
    items[items.len() - 1].clone()
}

#[wingbeat::remote(instances(u64))]
fn both<A, B>(a: A, b: B) -> (A, B) {
    (a, b)
}

#[wingbeat::remote(instances(u64))]
fn plain(x: u64) -> u64 {
    x
}

struct Stack;

#[wingbeat::actor]
impl Stack {
    fn new() -> Stack {
        Stack
    }

    fn push<T>(&mut self, item: T) {
        drop(item);
    }
}

fn main() {
    let _ = last::<String>::remote(vec!["a".to_owned()]);
}
