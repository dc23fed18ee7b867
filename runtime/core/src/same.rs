//! Whether two types are the same, of which one is known only where generic code is compiled.
//!
//! serde has no specialization: a serializer is given a sequence of whatever. Type ids tell when that is a vector of numbers,
//! which is then copied in one piece.

use std::mem::{ManuallyDrop, transmute_copy};

/// `value` as a `B`, if `A` is that type.
///
/// # Safety
/// Lifetimes count for nothing in the comparison: those in `B` may not be longer than those in `A`.
pub(crate) unsafe fn same<A, B>(value: A) -> Result<B, A> {
    if typeid::of::<A>() != typeid::of::<B>() {
        return Err(value);
    }
    let value = ManuallyDrop::new(value);
    // SAFETY: both are one type, but for lifetimes, of which the caller takes care; the original is not dropped.
    Ok(unsafe { transmute_copy::<A, B>(&value) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_itself_and_no_other() {
        let local = vec![1u8];
        // SAFETY: what is asked for lives no longer.
        unsafe {
            assert_eq!(same::<String, String>("a".to_owned()), Ok("a".to_owned()));
            assert_eq!(same::<&str, String>("a"), Err("a"));
            assert_eq!(same::<&Vec<u8>, &Vec<u8>>(&local), Ok(&local));
        }
    }
}
