//! Amounts of memory as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of memory: a number of bytes, or a text such as `8GiB`.
///
/// ```
/// use wingbeat_core::ByteSize;
/// let eight: ByteSize = "8GiB".parse()?;
/// assert_eq!(eight, ByteSize::from(8 << 30));
/// assert_eq!(eight, ByteSize::gib(8));
/// assert_eq!(eight.to_string(), "8.0 GiB");
/// # Ok::<(), wingbeat_core::InvalidByteSize>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct ByteSize(u64);

impl ByteSize {
    /// So many MiB.
    pub const fn mib(count: u32) -> ByteSize {
        ByteSize((count as u64) << 20)
    }

    /// So many GiB.
    pub const fn gib(count: u32) -> ByteSize {
        ByteSize((count as u64) << 30)
    }

    /// The bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl From<u64> for ByteSize {
    fn from(bytes: u64) -> ByteSize {
        ByteSize(bytes)
    }
}

/// A text that is no amount of memory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{text}` is not a size; write 512MiB or 8GiB")]
pub struct InvalidByteSize {
    /// The text.
    pub text: String,
}

impl FromStr for ByteSize {
    type Err = InvalidByteSize;

    fn from_str(text: &str) -> Result<ByteSize, InvalidByteSize> {
        let size: Result<bytesize::ByteSize, _> = text.parse();
        size.map(|size| ByteSize(size.as_u64())).map_err(|_| InvalidByteSize { text: text.to_owned() })
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bytesize::ByteSize(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_size_is_named() {
        let error = "much".parse::<ByteSize>().unwrap_err();
        assert_eq!(error.to_string(), "`much` is not a size; write 512MiB or 8GiB");
        assert_eq!("512MiB".parse(), Ok(ByteSize::mib(512)));
    }
}
