//! Types whose values are their bytes.

use std::mem::{align_of, size_of, size_of_val};

use crate::codec::CodecError;
use crate::pages;

#[cfg(target_endian = "big")]
compile_error!("Wingbeat's wire format is little-endian and read in place; big-endian machines are not supported");

/// Calls `$then!(type, …)` for each number whose vectors lie on the wire as in memory.
macro_rules! numbers {
    ($then:ident) => {
        $then! { u8, i8, u16, i16, u32, i32, u64, i64, u128, i128, f32, f64 }
    };
}
pub(crate) use numbers;

/// A type whose values are their bytes: numbers, arrays of them, and structs of your own with `#[derive(wingbeat::Plain)]`.
/// A [`Buffer`](crate::buffer::Buffer) of them goes into shared memory and is read there, without passing through serde.
///
/// # Safety
/// The type has no padding (every byte of a value is initialized), every bit pattern is a value, it is not empty, and it
/// holds no pointer, since it is read in another process.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not plain: its bytes are not its value",
    note = "numbers and arrays of numbers are plain; a struct of your own is with `#[repr(C)]` and `#[derive(wingbeat::Plain)]`"
)]
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

/// The plain numbers: a `Vec` of them lies on the wire as it lies in memory, so that it can be viewed in place.
///
/// Implemented for the fixed-width integers and floats; called by object views.
pub trait Number: Plain + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! impl_plain {
    ($($t:ty),*) => {$(
        // SAFETY: integers and floats of fixed width have neither padding nor bit patterns that are no value.
        unsafe impl Plain for $t {}
        impl sealed::Sealed for $t {}
        impl Number for $t {}
    )*};
}
numbers!(impl_plain);

// SAFETY: an array is its elements, one after another; that it is not empty is checked where one is used.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The size of a `T` in bytes, which is not zero.
pub(crate) const fn size_of_plain<T: Plain>() -> usize {
    const { assert!(size_of::<T>() > 0, "an empty array is no element of a buffer") }
    size_of::<T>()
}

/// The bytes of `slice`, as they go on the wire.
pub fn plain_bytes<T: Plain>(slice: &[T]) -> &[u8] {
    // SAFETY: every byte of a `Plain` is initialized; the length is that of the slice in bytes.
    unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), size_of_val(slice)) }
}

/// The elements in `bytes`, if `bytes` is aligned and of whole length.
pub fn plain_slice<T: Plain>(bytes: &[u8]) -> Option<&[T]> {
    let size = size_of_plain::<T>();
    if !bytes.len().is_multiple_of(size) || !(bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()) {
        return None;
    }
    // SAFETY: alignment and length were checked just above, and every bit pattern is a valid `Plain`.
    Some(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size) })
}

/// The elements in `bytes`, copied; what does not fill an element is left out.
pub(crate) fn plain_vec<T: Plain>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of_plain::<T>();
    let mut out: Vec<T> = Vec::new();
    pages::reserve(&mut out, count);
    // SAFETY: the capacity covers `count` elements, the source has as many and does not overlap memory that was just
    // allocated, and every bit pattern is a valid `Plain`.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.as_mut_ptr().cast::<u8>(), count * size_of::<T>());
        out.set_len(count);
    }
    out
}

/// Decodes a vector of numbers, in one copy.
///
/// # Errors
/// When the length does not fit the bytes.
pub fn decode_plain<T: Number>(bytes: &[u8]) -> Result<Vec<T>, CodecError> {
    plain_content::<T>(bytes).map(plain_vec)
}

/// The element bytes of an encoded `Vec<T>`: what follows its length.
///
/// # Errors
/// When the length does not fit the bytes.
pub fn plain_content<T: Number>(bytes: &[u8]) -> Result<&[u8], CodecError> {
    let Some((head, content)) = bytes.split_first_chunk::<8>() else {
        return Err(CodecError("a vector is cut short".into()));
    };
    let count = u64::from_le_bytes(*head) as usize;
    match count.checked_mul(size_of::<T>()) {
        Some(len) if len == content.len() => Ok(content),
        _ => Err(CodecError(format!("a vector of {count} elements does not fit its {} bytes", content.len()))),
    }
}
