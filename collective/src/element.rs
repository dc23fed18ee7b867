//! What is reduced, and how.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::halves::{self, Half};

/// How elements of all members become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Their sum. Integers wrap.
    Sum,
    /// Their product. Integers wrap.
    Product,
    /// The smallest, of zeros the negative one. A NaN gives way to a number.
    Min,
    /// The largest, of zeros the positive one. A NaN gives way to a number.
    Max,
    /// Their mean. Integers round toward zero. Only the sum of 64-bit integers can wrap before it is divided: what is
    /// smaller is added up as `i64`, and half precision as `f32`.
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
        /// What holds the sum of many of them.
        type Wide: Element;
        /// Whether that is something else.
        const IS_NARROW: bool;
        /// As that.
        fn widened(from: &[Self]) -> Vec<Self::Wide>;
        /// And back.
        fn narrow(from: &[Self::Wide], into: &mut [Self]);
        /// Combines the elements of another into these: the same bits whichever of the two they are. `Avg` adds, as `Sum`.
        fn combine(op: Op, into: &mut [Self], from: &[Self]);
        /// The end of `Avg`.
        fn divide(into: &mut [Self], by: u32);
    }
}

macro_rules! element {
    ($type:ty, $wide:ty, $sum:expr, $product:expr, $min:expr, $max:expr, $divide:expr) => {
        // SAFETY: a plain number.
        unsafe impl sealed::Element for $type {
            const NAME: &'static str = stringify!($type);
            type Wide = $wide;
            const IS_NARROW: bool = size_of::<$wide>() > size_of::<$type>();

            fn widened(from: &[Self]) -> Vec<$wide> {
                from.iter().map(|value| *value as $wide).collect()
            }

            fn narrow(from: &[$wide], into: &mut [Self]) {
                for (into, from) in into.iter_mut().zip(from) {
                    *into = *from as $type;
                }
            }

            fn combine(op: Op, into: &mut [Self], from: &[Self]) {
                match op {
                    Op::Sum | Op::Avg => $sum(into, from),
                    Op::Product => $product(into, from),
                    Op::Min => $min(into, from),
                    Op::Max => $max(into, from),
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
    ($($type:ty => $wide:ty),*) => {$(
        // An average in a type that holds the number of members.
        element!(
            $type,
            $wide,
            |into, from| each(into, from, <$type>::wrapping_add),
            |into, from| each(into, from, <$type>::wrapping_mul),
            |into, from| each(into, from, Ord::min),
            |into, from| each(into, from, Ord::max),
            |a: $type, n: u32| (i128::from(a) / i128::from(n)) as $type
        );
    )*};
}

macro_rules! floats {
    ($($type:ty),*) => {$(
        element!(
            $type,
            $type,
            |into: &mut [$type], from: &[$type]| {
                let sum = |a: $type, b: $type| a + b;
                unless_odd(into, from, |a, b| sum(a, b).is_nan(), sum, |a, b| one_nan(sum(a, b)));
            },
            |into: &mut [$type], from: &[$type]| {
                let product = |a: $type, b: $type| a * b;
                unless_odd(into, from, |a, b| product(a, b).is_nan(), product, |a, b| one_nan(product(a, b)));
            },
            |into: &mut [$type], from: &[$type]| {
                let of_numbers = |a: $type, b: $type| {
                    let (left, right) = (if a < b { a } else { b }, if b < a { b } else { a });
                    <$type>::from_bits(left.to_bits() | right.to_bits())
                };
                unless_odd(into, from, is_any_nan, of_numbers, least);
            },
            |into: &mut [$type], from: &[$type]| {
                let of_numbers = |a: $type, b: $type| {
                    let (left, right) = (if a > b { a } else { b }, if b > a { b } else { a });
                    <$type>::from_bits(left.to_bits() & right.to_bits())
                };
                unless_odd(into, from, is_any_nan, of_numbers, most);
            },
            |a: $type, n: u32| a / n as $type
        );

        impl Nan for $type {
            #[inline(always)]
            fn is_no_number(self) -> bool {
                self.is_nan()
            }

            fn one_nan(self) -> Self {
                if self.is_nan() { <$type>::NAN } else { self }
            }

            fn least(self, b: Self) -> Self {
                let is_first = self < b || b.is_nan() || (self == b && self.is_sign_negative());
                if is_first { self.one_nan() } else { b }
            }

            fn most(self, b: Self) -> Self {
                let is_first = self > b || b.is_nan() || (self == b && self.is_sign_positive());
                if is_first { self.one_nan() } else { b }
            }
        }
    )*};
}

#[inline(always)]
fn each<T: Copy>(into: &mut [T], from: &[T], with: impl Fn(T, T) -> T) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = with(*into, *from);
    }
}

/// Combines elements, quickly where none of a block is odd. Of zeros, which are equal, the quick way of `least` and `most`
/// has the signs of both.
fn unless_odd<T: Copy>(
    into: &mut [T],
    from: &[T],
    is_odd: impl Fn(T, T) -> bool,
    quick: impl Fn(T, T) -> T,
    exact: impl Fn(T, T) -> T,
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { in_wide_blocks(into, from, is_odd, quick, exact) };
    }
    in_blocks(into, from, is_odd, quick, exact);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn in_wide_blocks<T: Copy>(
    into: &mut [T],
    from: &[T],
    is_odd: impl Fn(T, T) -> bool,
    quick: impl Fn(T, T) -> T,
    exact: impl Fn(T, T) -> T,
) {
    in_blocks(into, from, is_odd, quick, exact);
}

/// So many elements are first looked through for what is odd: they then are in the fastest cache.
const BLOCK: usize = 1024;

#[inline(always)]
fn in_blocks<T: Copy>(
    into: &mut [T],
    from: &[T],
    is_odd: impl Fn(T, T) -> bool,
    quick: impl Fn(T, T) -> T,
    exact: impl Fn(T, T) -> T,
) {
    for (into, from) in into.chunks_mut(BLOCK).zip(from.chunks(BLOCK)) {
        // A number, and not a truth: a loop of these is made one of vectors.
        let odd = into.iter().zip(from).fold(0, |odd, (a, b)| odd | u32::from(is_odd(*a, *b)));
        match odd {
            0 => each(into, from, &quick),
            _ => each(into, from, &exact),
        }
    }
}

#[inline(always)]
fn is_any_nan<T: Nan>(a: T, b: T) -> bool {
    a.is_no_number() | b.is_no_number()
}

/// What is no number has many bits, and which of them an operation gives depends on the order of its operands.
pub(crate) trait Nan: Copy {
    fn is_no_number(self) -> bool;
    fn one_nan(self) -> Self;
    fn least(self, b: Self) -> Self;
    fn most(self, b: Self) -> Self;
}

#[inline(always)]
pub(crate) fn least<T: Nan>(a: T, b: T) -> T {
    a.least(b)
}

#[inline(always)]
pub(crate) fn most<T: Nan>(a: T, b: T) -> T {
    a.most(b)
}

#[inline(always)]
pub(crate) fn one_nan<T: Nan>(value: T) -> T {
    value.one_nan()
}

macro_rules! halves {
    ($($type:ty),*) => {$(
        // SAFETY: a plain number.
        unsafe impl sealed::Element for $type {
            const NAME: &'static str = stringify!($type);
            type Wide = f32;
            const IS_NARROW: bool = true;

            fn widened(from: &[Self]) -> Vec<f32> {
                let mut wide = vec![0.0; from.len()];
                from.convert_to_f32_slice(&mut wide);
                wide
            }

            fn narrow(from: &[f32], into: &mut [Self]) {
                into.convert_from_f32_slice(from);
            }

            fn combine(op: Op, into: &mut [Self], from: &[Self]) {
                match op {
                    Op::Sum | Op::Avg => <$type>::calculate(into, from, |a, b| one_nan(a + b)),
                    Op::Product => <$type>::calculate(into, from, |a, b| one_nan(a * b)),
                    Op::Min => halves::least(into, from),
                    Op::Max => halves::most(into, from),
                }
            }

            fn divide(into: &mut [Self], by: u32) {
                for value in into {
                    *value = Self::from_f32(value.to_f32() / by as f32);
                }
            }
        }
    )*};
}

integers!(i8 => i64, u8 => i64, i16 => i64, u16 => i64, i32 => i64, u32 => i64, i64 => i64, u64 => u64);
floats!(f32, f64);
halves!(f16, bf16);

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

    /// Values whose order could matter: zeros, what is no number, and what is not finite.
    const ODD: [f32; 8] = [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -1.5];

    #[test]
    fn the_order_of_two_members_does_not_matter() {
        fn check<T: Element + std::fmt::Debug>(of: impl Fn(f32) -> T, bits: impl Fn(T) -> u64) {
            for op in [Op::Sum, Op::Product, Op::Min, Op::Max] {
                for (a, b) in ODD.into_iter().flat_map(|a| ODD.map(|b| (a, b))) {
                    let (mut left, mut right) = ([of(a)], [of(b)]);
                    T::combine(op, &mut left, &[of(b)]);
                    T::combine(op, &mut right, &[of(a)]);
                    assert_eq!(bits(left[0]), bits(right[0]), "{op:?} of {a} and {b}");
                }
            }
        }
        check(|value| value, |value| u64::from(value.to_bits()));
        check(f64::from, f64::to_bits);
        check(f16::from_f32, |value| u64::from(value.to_bits()));
        check(bf16::from_f32, |value| u64::from(value.to_bits()));
    }

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
