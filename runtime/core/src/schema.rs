//! A number for the form in which plain data travels: it changes with the sources that define that form.
//!
//! Two builds with the same number were made from the same definitions. A changed comment changes it too, which costs
//! nothing: whoever mixes builds from different sources is told so.

/// Folds a source text into a number (FNV-1a).
pub const fn fold(mut number: u64, text: &[u8]) -> u64 {
    let mut at = 0;
    while at < text.len() {
        number = (number ^ text[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    number
}

const START: u64 = 0xcbf2_9ce4_8422_2325;

/// The number of what this crate defines: the codec, ids, specs, values and errors.
pub const SCHEMA: u64 = {
    let codec = fold(START, include_bytes!("codec.rs"));
    let encode = fold(codec, include_bytes!("codec/encode.rs"));
    let ids = fold(encode, include_bytes!("ids.rs"));
    let labels = fold(ids, include_bytes!("labels.rs"));
    let resources = fold(labels, include_bytes!("resources.rs"));
    let spec = fold(resources, include_bytes!("spec.rs"));
    let value = fold(spec, include_bytes!("value.rs"));
    let memory = fold(value, include_bytes!("memory.rs"));
    fold(memory, include_bytes!("error.rs"))
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_letter_is_another_number() {
        assert_ne!(fold(START, b"struct A { a: u32 }"), fold(START, b"struct A { a: u64 }"));
        assert_ne!(SCHEMA, START);
    }
}
