//! How two members' numbers of half precision become one: in single precision, and rounded once; or by their order. Also as
//! processors with AVX2 do it, which is four to eight times as fast.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Numbers that are converted at once where the processor has no instruction that is used here.
const BLOCK: usize = 512;

/// A number of half precision: two bytes.
pub(crate) trait Half: Copy {
    const INFINITY: u16;
    const NAN: u16;
    fn bits(self) -> u16;
    fn of(bits: u16) -> Self;
    /// Combines in single precision. What is no number is to become `f32::NAN`.
    fn calculate(into: &mut [Self], from: &[Self], with: impl Fn(f32, f32) -> f32);
}

impl Half for f16 {
    const INFINITY: u16 = f16::INFINITY.to_bits();
    const NAN: u16 = f16::NAN.to_bits();

    fn bits(self) -> u16 {
        self.to_bits()
    }

    fn of(bits: u16) -> Self {
        f16::from_bits(bits)
    }

    fn calculate(into: &mut [f16], from: &[f16], with: impl Fn(f32, f32) -> f32) {
        #[cfg(target_arch = "x86_64")]
        let (into, from) = match is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the processor has both.
            true => unsafe { wide::f16_in_eights(into, from, &with) },
            false => (into, from),
        };
        in_blocks(into, from, with);
    }
}

impl Half for bf16 {
    const INFINITY: u16 = bf16::INFINITY.to_bits();
    const NAN: u16 = bf16::NAN.to_bits();

    fn bits(self) -> u16 {
        self.to_bits()
    }

    fn of(bits: u16) -> Self {
        bf16::from_bits(bits)
    }

    fn calculate(into: &mut [bf16], from: &[bf16], with: impl Fn(f32, f32) -> f32) {
        #[cfg(target_arch = "x86_64")]
        let (into, from) = match is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it.
            true => unsafe { wide::bf16_in_eights(into, from, &with) },
            false => (into, from),
        };
        one_by_one(into, from, with);
    }
}

pub(crate) fn least<T: Half>(into: &mut [T], from: &[T]) {
    by_order(into, from, i16::MAX, Ord::min);
}

pub(crate) fn most<T: Half>(into: &mut [T], from: &[T]) {
    by_order(into, from, i16::MIN, Ord::max);
}

/// By the order of numbers, in which what is none has this place, behind all.
fn by_order<T: Half>(into: &mut [T], from: &[T], last: i16, of: impl Fn(i16, i16) -> i16) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has it.
        return unsafe { wide::in_order(into, from, last, of) };
    }
    in_order(into, from, last, of);
}

#[inline(always)]
fn in_order<T: Half>(into: &mut [T], from: &[T], last: i16, of: impl Fn(i16, i16) -> i16) {
    let place = |value: T| match value.bits() & 0x7FFF > T::INFINITY {
        true => last,
        false => turned(value.bits() as i16),
    };
    for (into, from) in into.iter_mut().zip(from) {
        let place = of(place(*into), place(*from));
        *into = T::of(if place == last { T::NAN } else { turned(place) as u16 });
    }
}

/// From bits to a place among all numbers, and back: what is negative counts the other way.
#[inline(always)]
fn turned(bits: i16) -> i16 {
    bits ^ ((bits >> 15) & 0x7FFF)
}

fn in_blocks(into: &mut [f16], from: &[f16], with: impl Fn(f32, f32) -> f32) {
    let (mut ours, mut theirs) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (into, from) in into.chunks_mut(BLOCK).zip(from.chunks(BLOCK)) {
        let (ours, theirs) = (&mut ours[..into.len()], &mut theirs[..into.len()]);
        into.convert_to_f32_slice(ours);
        from.convert_to_f32_slice(theirs);
        for (ours, theirs) in ours.iter_mut().zip(theirs) {
            *ours = with(*ours, *theirs);
        }
        into.convert_from_f32_slice(ours);
    }
}

fn one_by_one(into: &mut [bf16], from: &[bf16], with: impl Fn(f32, f32) -> f32) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = bf16::from_f32(with(into.to_f32(), from.to_f32()));
    }
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    use super::{Half, bf16, f16};

    #[target_feature(enable = "avx2")]
    pub(super) fn in_order<T: Half>(into: &mut [T], from: &[T], last: i16, of: impl Fn(i16, i16) -> i16) {
        super::in_order(into, from, last, of);
    }

    /// Returns what is left over.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn f16_in_eights<'a, 'b>(
        into: &'a mut [f16],
        from: &'b [f16],
        with: impl Fn(f32, f32) -> f32,
    ) -> (&'a mut [f16], &'b [f16]) {
        let (into, last) = into.as_chunks_mut::<8>();
        let (from, their_last) = from.as_chunks::<8>();
        for (into, from) in into.iter_mut().zip(from) {
            let combined = combined(_mm256_cvtph_ps(load(into)), _mm256_cvtph_ps(load(from)), &with);
            store(into, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(combined));
        }
        (last, their_last)
    }

    /// Returns what is left over.
    #[target_feature(enable = "avx2")]
    pub(super) fn bf16_in_eights<'a, 'b>(
        into: &'a mut [bf16],
        from: &'b [bf16],
        with: impl Fn(f32, f32) -> f32,
    ) -> (&'a mut [bf16], &'b [bf16]) {
        let (into, last) = into.as_chunks_mut::<8>();
        let (from, their_last) = from.as_chunks::<8>();
        for (into, from) in into.iter_mut().zip(from) {
            let combined = combined(shifted(load(into)), shifted(load(from)), &with);
            store(into, rounded(combined));
        }
        (last, their_last)
    }

    /// As `f32`, of which these are the upper halves.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn shifted(values: __m128i) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values)))
    }

    /// The upper halves: the nearest, and of two as near the even one. What is no number is `f32::NAN`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn rounded(values: __m256) -> __m128i {
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let halves = _mm256_srli_epi32::<16>(rounded);
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn combined(ours: __m256, theirs: __m256, with: impl Fn(f32, f32) -> f32) -> __m256 {
        let (mut into, mut from) = ([0.0; 8], [0.0; 8]);
        // SAFETY: there are eight of all.
        unsafe {
            _mm256_storeu_ps(into.as_mut_ptr(), ours);
            _mm256_storeu_ps(from.as_mut_ptr(), theirs);
        }
        for (into, from) in into.iter_mut().zip(from) {
            *into = with(*into, from);
        }
        // SAFETY: as before.
        unsafe { _mm256_loadu_ps(into.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load<T: Half>(from: &[T; 8]) -> __m128i {
        const { assert!(size_of::<[T; 8]>() == size_of::<__m128i>()) };
        // SAFETY: as long as the other.
        unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store<T: Half>(into: &mut [T; 8], values: __m128i) {
        const { assert!(size_of::<[T; 8]>() == size_of::<__m128i>()) };
        // SAFETY: as long as the other, and any bits are numbers.
        unsafe { _mm_storeu_si128(into.as_mut_ptr().cast(), values) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{least as least_of_two, most as most_of_two, one_nan};

    /// All numbers, each with some others, and a length that is no multiple of anything.
    fn check<T: Half>(
        to: impl Fn(T) -> f32,
        rounded: impl Fn(f32) -> T,
        combine: impl Fn(&mut [T], &[T]),
        with: impl Fn(f32, f32) -> f32,
    ) {
        for step in [0, 1, 0x1235, 0x8000, 0x8001] {
            let ours: Vec<T> = (0..=u16::MAX).chain(0..7).map(T::of).collect();
            let theirs: Vec<T> =
                ours.iter().map(|value| T::of(value.bits().wrapping_mul(step | 1).wrapping_add(step))).collect();
            let mut got = ours.clone();
            combine(&mut got, &theirs);
            for ((ours, theirs), got) in ours.iter().zip(&theirs).zip(got) {
                let right = rounded(with(to(*ours), to(*theirs)));
                assert_eq!(got.bits(), right.bits(), "{:x} and {:x}", ours.bits(), theirs.bits());
            }
        }
    }

    #[test]
    fn half_precision_is_calculated_as_one_by_one() {
        let (sum, product) = (|a: f32, b: f32| one_nan(a + b), |a: f32, b: f32| one_nan(a * b));
        check(f16::to_f32, f16::from_f32, |into, from| f16::calculate(into, from, sum), sum);
        check(f16::to_f32, f16::from_f32, |into, from| f16::calculate(into, from, product), product);
        check(f16::to_f32, f16::from_f32, |into, from| in_blocks(into, from, sum), sum);
        check(bf16::to_f32, bf16::from_f32, |into, from| bf16::calculate(into, from, sum), sum);
        check(bf16::to_f32, bf16::from_f32, |into, from| bf16::calculate(into, from, product), product);
        check(bf16::to_f32, bf16::from_f32, |into, from| one_by_one(into, from, product), product);
    }

    #[test]
    fn half_precision_has_the_order_of_single_precision() {
        check(f16::to_f32, f16::from_f32, least, least_of_two);
        check(f16::to_f32, f16::from_f32, most, most_of_two);
        check(bf16::to_f32, bf16::from_f32, least, least_of_two);
        check(bf16::to_f32, bf16::from_f32, most, most_of_two);
        check(bf16::to_f32, bf16::from_f32, |into, from| in_order(into, from, i16::MIN, Ord::max), most_of_two);
    }
}
