//! What is reduced, and how.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How elements of all members become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Their sum. Integers wrap.
    Sum,
    /// Their product. Integers wrap.
    Product,
    /// The smallest. A NaN gives way to a number.
    Min,
    /// The largest. A NaN gives way to a number.
    Max,
    /// Their mean. Integers round toward zero.
    Avg,
}

/// A number that groups can reduce and send.
pub trait Element: sealed::Element {}

impl<T: sealed::Element> Element for T {}

pub(crate) mod sealed {
    use super::Op;

    /// Any bytes are a value, and a value has no other bytes: members see each other's memory.
    ///
    /// # Safety
    /// It has no padding and no invalid values.
    pub unsafe trait Element: Copy + Send + Sync + 'static {
        const NAME: &'static str;
        /// Combines the elements of another into these. `Avg` adds, as `Sum`.
        fn combine(op: Op, into: &mut [Self], from: &[Self]);
        /// The end of `Avg`.
        fn divide(into: &mut [Self], by: u32);
    }
}

macro_rules! element {
    ($type:ty, $sum:expr, $product:expr, $min:expr, $max:expr, $divide:expr) => {
        // SAFETY: a plain number.
        unsafe impl sealed::Element for $type {
            const NAME: &'static str = stringify!($type);

            fn combine(op: Op, into: &mut [Self], from: &[Self]) {
                fn each(into: &mut [$type], from: &[$type], with: impl Fn($type, $type) -> $type) {
                    for (into, from) in into.iter_mut().zip(from) {
                        *into = with(*into, *from);
                    }
                }
                match op {
                    Op::Sum | Op::Avg => each(into, from, $sum),
                    Op::Product => each(into, from, $product),
                    Op::Min => each(into, from, $min),
                    Op::Max => each(into, from, $max),
                }
            }

            fn divide(into: &mut [Self], by: u32) {
                for value in into {
                    *value = $divide(*value, by);
                }
            }
        }
    };
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        // An average in a type that holds the number of members.
        element!(
            $type,
            |a, b| <$type>::wrapping_add(a, b),
            |a, b| <$type>::wrapping_mul(a, b),
            |a, b| a.min(b),
            |a, b| a.max(b),
            |a: $type, n: u32| (i128::from(a) / i128::from(n)) as $type
        );
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);
element!(f32, |a, b| a + b, |a, b| a * b, f32::min, f32::max, |a: f32, n: u32| a / n as f32);
element!(f64, |a, b| a + b, |a, b| a * b, f64::min, f64::max, |a: f64, n: u32| a / f64::from(n));
element!(f16, |a, b| a + b, |a, b| a * b, f16::min, f16::max, |a: f16, n: u32| f16::from_f32(a.to_f32() / n as f32));
element!(bf16, |a, b| a + b, |a, b| a * b, bf16::min, bf16::max, |a: bf16, n: u32| bf16::from_f32(
    a.to_f32() / n as f32
));

/// The bytes of elements.
pub(crate) fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements have no padding, and any alignment is enough for bytes.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), std::mem::size_of_val(elements)) }
}

/// The bytes of elements, to be written.
pub(crate) fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as `bytes_of`; and any bytes are elements.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), std::mem::size_of_val(elements)) }
}

#[cfg(test)]
mod tests {
    use super::sealed::Element;
    use super::*;

    #[test]
    fn every_operation_combines_element_by_element() {
        let combined = |op| {
            let mut into = [1.0f32, -2.0, 3.0];
            f32::combine(op, &mut into, &[4.0, 5.0, f32::NAN]);
            into
        };
        assert_eq!(combined(Op::Sum)[..2], [5.0, 3.0]);
        assert_eq!(combined(Op::Product)[..2], [4.0, -10.0]);
        assert_eq!(combined(Op::Min), [1.0, -2.0, 3.0]);
        assert_eq!(combined(Op::Max), [4.0, 5.0, 3.0]);
        let mut sum = [250u8];
        u8::combine(Op::Sum, &mut sum, &[10]);
        assert_eq!(sum, [4], "integers wrap");
        let mut mean = [bf16::from_f32(7.0)];
        bf16::divide(&mut mean, 2);
        assert_eq!(mean, [bf16::from_f32(3.5)]);
    }
}
