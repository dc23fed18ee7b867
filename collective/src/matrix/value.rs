//! The types of a cell, and what is right for each: computed plainly, in `i128` and `f64`.

use super::Chance;
use crate::{Element, Op, bf16, f16};

/// Which values members have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mix {
    /// Near 1.
    Plain,
    /// Among them what an operation could go wrong with.
    Odd,
    /// Any bits.
    Bits,
}

pub(super) const MIXES: [Mix; 3] = [Mix::Plain, Mix::Odd, Mix::Bits];

pub(super) trait Value: Element + std::fmt::Debug {
    /// The bits, which are compared.
    fn bits(self) -> u64;
    fn any(mix: Mix, chance: &mut Chance) -> Self;
    /// Whether this is what the values of two or more members come to.
    fn is_right(self, op: Op, values: &[Self]) -> bool;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Value for $type {
            fn bits(self) -> u64 {
                self as u64
            }

            fn any(mix: Mix, chance: &mut Chance) -> Self {
                let odd = [<$type>::MIN, <$type>::MAX, 0, 1, (0 as $type).wrapping_sub(1)];
                match mix {
                    Mix::Plain => chance.below(7) as $type + 1,
                    Mix::Odd => odd[chance.below(odd.len())],
                    Mix::Bits => chance.any() as $type,
                }
            }

            fn is_right(self, op: Op, values: &[Self]) -> bool {
                let each = values.iter().map(|value| *value as i128);
                let sum: i128 = each.clone().sum();
                // The sum of 64-bit integers wraps before it is divided.
                let sum_of_mean = if size_of::<$type>() == 8 { sum as $type as i128 } else { sum };
                let right = match op {
                    Op::Sum => sum,
                    Op::Product => each.fold(1, i128::wrapping_mul),
                    Op::Min => each.min().unwrap(),
                    Op::Max => each.max().unwrap(),
                    Op::Avg => sum_of_mean / values.len() as i128,
                };
                self == right as $type
            }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// What a type can hold, and how exactly.
struct Precision {
    /// By how much of it a result can differ when it is rounded.
    rounding: f64,
    least: f64,
    most: f64,
}

const F16: Precision = Precision { rounding: 1.0 / 2048.0, least: 1.0 / 16_777_216.0, most: 65_504.0 };
const BF16: Precision = Precision { rounding: 1.0 / 256.0, least: 9.2e-41, most: 3.389e38 };
const F32: Precision = Precision { rounding: f32::EPSILON as f64 / 2.0, least: 1.5e-45, most: f32::MAX as f64 };
const F64: Precision = Precision { rounding: f64::EPSILON / 2.0, least: 5e-324, most: f64::MAX };

macro_rules! floats {
    ($($type:ty: $bits:ty, $precision:ident, in $wide:ident, $to:expr, $from:expr);* $(;)?) => {$(
        impl Value for $type {
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }

            fn any(mix: Mix, chance: &mut Chance) -> Self {
                let odd = [
                    <$type>::NAN,
                    -<$type>::NAN,
                    <$type>::INFINITY,
                    <$type>::NEG_INFINITY,
                    $from(0.0),
                    $from(-0.0),
                    <$type>::MAX,
                    <$type>::MIN,
                    <$type>::MIN_POSITIVE,
                    <$type>::from_bits(1),
                    -<$type>::from_bits(1),
                    // The largest that is subnormal.
                    <$type>::from_bits(<$type>::MIN_POSITIVE.to_bits() - 1),
                ];
                match mix {
                    Mix::Bits => <$type>::from_bits(chance.any() as $bits),
                    Mix::Odd if chance.below(4) > 0 => odd[chance.below(odd.len())],
                    _ => {
                        let size = 0.5 + 1.5 * (chance.below(1 << 20) as f64 / (1 << 20) as f64);
                        $from(if chance.below(2) == 0 { size } else { -size })
                    }
                }
            }

            fn is_right(self, op: Op, values: &[Self]) -> bool {
                // All that are no number are one, whatever they were made of.
                let is_one = !self.is_nan() || self.to_bits() == <$type>::NAN.to_bits();
                let values: Vec<f64> = values.iter().map(|value| $to(*value)).collect();
                is_one && is_close($to(self), op, &values, &$precision, &$wide)
            }
        }
    )*};
}

// A mean of half precision is formed in single precision.
floats! {
    f16: u16, F16, in F32, |value: f16| value.to_f64(), f16::from_f64;
    bf16: u16, BF16, in F32, |value: bf16| value.to_f64(), bf16::from_f64;
    f32: u32, F32, in F32, f64::from, |value: f64| value as f32;
    f64: u64, F64, in F64, |value: f64| value, |value: f64| value;
}

/// Whether a result is as near to the exact one as it can be in any order. Where the order decides what it is, as
/// where a part of the sum is too large, anything is; members must still have the same.
fn is_close(got: f64, op: Op, values: &[f64], own: &Precision, wide: &Precision) -> bool {
    if values.iter().any(|value| value.is_nan()) && !matches!(op, Op::Min | Op::Max) {
        return got.is_nan();
    }
    match op {
        Op::Sum => is_sum(got, values, own),
        // The sum of as many first, and then rounded twice: when it is divided, and to its own type.
        Op::Avg => {
            let count = values.len() as f64;
            let parts: Vec<f64> = values.iter().map(|value| value / count).collect();
            let size: f64 = values.iter().map(|value| value.abs()).filter(|value| value.is_finite()).sum();
            size >= wide.most
                || is_near(got, exact_sum(&parts), || {
                    let size: f64 = parts.iter().map(|part| part.abs()).sum();
                    2.0 * count * wide.rounding * size + 3.0 * own.rounding * exact_sum(&parts).abs() + 2.0 * own.least
                })
        }
        Op::Product => is_product(got, values, own),
        Op::Min => is_same(got, numbers(values).min_by(f64::total_cmp)),
        Op::Max => is_same(got, numbers(values).max_by(f64::total_cmp)),
    }
}

/// `slack` counts where the right result is finite.
fn is_near(got: f64, right: f64, slack: impl FnOnce() -> f64) -> bool {
    if right.is_finite() { (got - right).abs() <= slack() } else { got == right || (got.is_nan() && right.is_nan()) }
}

/// A NaN gives way to a number, and zeros have an order.
fn is_same(got: f64, right: Option<f64>) -> bool {
    right.map_or(got.is_nan(), |right| got.to_bits() == right.to_bits())
}

fn numbers(values: &[f64]) -> impl Iterator<Item = f64> {
    values.iter().copied().filter(|value| !value.is_nan())
}

fn exact_sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

fn is_sum(got: f64, values: &[f64], own: &Precision) -> bool {
    let size: f64 = values.iter().map(|value| value.abs()).filter(|value| value.is_finite()).sum();
    let slack = 2.0 * values.len() as f64 * own.rounding * size;
    size + slack >= own.most || is_near(got, exact_sum(values), || slack)
}

fn is_product(got: f64, values: &[f64], own: &Precision) -> bool {
    let sizes = || values.iter().map(|value| value.abs()).filter(|size| size.is_finite() && *size > 0.0);
    let (large, small) = (sizes().map(|size| size.max(1.0)), sizes().map(|size| size.min(1.0)));
    let (large, small): (f64, f64) = (large.product(), small.product());
    let vanishes = small < 2.0 * own.least;
    let has_infinite = values.iter().any(|value| value.is_infinite());
    let right: f64 = values.iter().product();
    let steps = values.len() as f64;
    // What is too small on the way may be made larger afterwards.
    let slack = 2.0 * steps * (own.rounding * right.abs() + own.least * large);
    2.0 * large >= own.most || (has_infinite && vanishes) || is_near(got, right, || slack)
}
