//! Memory for large values: in huge pages, where the kernel has them.
//!
//! Memory that was never touched costs a fault for each of its pages; for a copy of 64 MiB in pages of 4 KiB that is several
//! times what the copy itself costs.

use rustix::mm::{Advice, madvise};

/// From so many bytes on, a vector asks for huge pages: below, there may be none within it.
const HUGE_FROM: usize = 4 << 20;

/// The pages to which advice is aligned, and the huge ones.
const PAGE: usize = 64 << 10;

/// As [`Vec::reserve`].
pub(crate) fn reserve<T>(out: &mut Vec<T>, more: usize) {
    if out.capacity() - out.len() >= more {
        return;
    }
    out.reserve(more);
    let spare = out.spare_capacity_mut();
    let len = size_of_val(spare);
    if len >= HUGE_FROM {
        let start = spare.as_mut_ptr().cast::<u8>();
        let ahead = start.align_offset(PAGE);
        // SAFETY: the range lies within memory that the vector owns; the advice changes no content. A kernel that refuses it
        // leaves the pages as they are.
        let _ = unsafe { madvise(start.add(ahead).cast(), (len - ahead) / PAGE * PAGE, Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_that_grows_keeps_what_is_in_it() {
        let mut out = vec![7u32; 3];
        reserve(&mut out, HUGE_FROM);
        assert!(out.capacity() >= 3 + HUGE_FROM);
        out.extend(std::iter::repeat_n(8, HUGE_FROM));
        assert_eq!((out[2], out[3], out[HUGE_FROM]), (7, 8, 8));
    }
}
