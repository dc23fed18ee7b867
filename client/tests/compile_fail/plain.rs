use wingbeat::Plain;

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Gap {
    small: u8,
    large: u32,
}

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Tail {
    large: u64,
    small: u16,
}

#[derive(Clone, Copy, Plain)]
struct AnyOrder {
    x: f32,
}

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Flags {
    is_set: bool,
}

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Pair<T> {
    both: [T; 2],
}

#[derive(Clone, Copy, Plain)]
#[repr(u8)]
enum Color {
    Red,
}

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Nothing;

#[derive(Clone, Copy, Plain)]
#[repr(C)]
struct Empty {
    nothing: [u8; 0],
}

fn main() {
    let _ = wingbeat::Buffer::from(vec![String::new()]);
}
