//! Plain elements that are shared, and that travel beside the value that they are a part of.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ::bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::codec;
use crate::plain::{Plain, plain_bytes, plain_slice, plain_vec};

/// Numbers, or other [`Plain`] elements, that are copied once on their way into the cluster and not at all on their way out.
///
/// It is read as a slice, made from a `Vec` without a copy, and may stand anywhere in a value that is sent: in a struct, in a
/// map, as an argument, a result or an item of a stream. One of 4 KiB or more, in a value of more than 100 KiB, is written straight
/// into the node's shared memory, and whoever gets the value reads it there. Items of a queue are copied. Clones share the elements. To change them, take them out with [`into_vec`](Self::into_vec), or
/// change them in place with [`to_mut`](Self::to_mut): both copy what is shared, or lies in shared memory.
///
/// A buffer that lies in shared memory keeps the whole value there that it was a part of, also when nobody has a ref to that
/// any more: take a copy (`to_vec`) of what is to stay for long.
///
/// To other serializers it is a sequence.
///
/// ```
/// # use wingbeat_core::buffer::Buffer;
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Recording {
///     rate: u32,
///     samples: Buffer<f32>,
/// }
///
/// let recording = Recording { rate: 48_000, samples: vec![0.5; 480_000].into() };
/// assert_eq!(recording.samples.iter().sum::<f32>(), 240_000.0);
/// let samples: Vec<f32> = recording.samples.into_vec();  // without a copy, since nobody shares them
/// ```
pub struct Buffer<T> {
    content: Content<T>,
}

enum Content<T> {
    Owned(Arc<Vec<T>>),
    /// Whole elements, and aligned for them.
    Elsewhere(Bytes),
}

/// The bytes of a vector that others share.
struct BytesOf<T>(Arc<Vec<T>>);

impl<T: Plain> AsRef<[u8]> for BytesOf<T> {
    fn as_ref(&self) -> &[u8] {
        plain_bytes(&self.0)
    }
}

impl<T: Plain> Buffer<T> {
    /// The elements as they lie in `bytes`, or, where they are not aligned there, a copy of them. None if `bytes` does not
    /// end with an element.
    pub(crate) fn of_bytes(bytes: Bytes) -> Option<Self> {
        match plain_slice::<T>(&bytes) {
            Some(_) => Some(Buffer { content: Content::Elsewhere(bytes) }),
            None => Self::copy_of_bytes(&bytes),
        }
    }

    pub(crate) fn copy_of_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.len().is_multiple_of(size_of::<T>()).then(|| plain_vec(bytes).into())
    }

    /// The elements' bytes, shared.
    pub(crate) fn to_bytes(&self) -> Bytes {
        match &self.content {
            Content::Owned(elements) => Bytes::from_owner(BytesOf(elements.clone())),
            Content::Elsewhere(bytes) => bytes.clone(),
        }
    }

    /// The elements as a vector of their own. Copies them if others share them, or they lie in shared memory.
    ///
    /// ```
    /// # use wingbeat_core::buffer::Buffer;
    /// let mut squares = Buffer::from(vec![1u32, 4, 9]).into_vec();
    /// squares.push(16);
    /// ```
    #[must_use]
    pub fn into_vec(self) -> Vec<T> {
        match self.content {
            Content::Owned(elements) => Arc::try_unwrap(elements).unwrap_or_else(|shared| shared.to_vec()),
            Content::Elsewhere(bytes) => plain_vec(&bytes),
        }
    }

    /// The elements, to be changed. Copies them before if others share them, or they lie in shared memory.
    ///
    /// ```
    /// # use wingbeat_core::buffer::Buffer;
    /// let mut buffer = Buffer::from(vec![1u32, 2]);
    /// let before = buffer.clone();
    /// buffer.to_mut()[0] = 7;
    /// assert_eq!((&buffer[..], &before[..]), (&[7, 2][..], &[1, 2][..]));
    /// ```
    pub fn to_mut(&mut self) -> &mut Vec<T> {
        if let Content::Elsewhere(bytes) = &self.content {
            self.content = Content::Owned(Arc::new(plain_vec(bytes)));
        }
        match &mut self.content {
            Content::Owned(elements) => Arc::make_mut(elements),
            Content::Elsewhere(_) => unreachable!("it was taken out just above"),
        }
    }

    /// Whether the elements lie elsewhere than in a vector of this process: mostly in the node's shared memory, which is kept
    /// as long as this buffer or a clone of it lives.
    ///
    /// ```
    /// # use wingbeat_core::buffer::Buffer;
    /// assert!(!Buffer::from(vec![1.0f32]).is_elsewhere());
    /// ```
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.content, Content::Elsewhere(_))
    }
}

impl<T: Plain> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match &self.content {
            Content::Owned(elements) => elements,
            // Length and alignment were checked when the buffer was made; the bytes have not moved since.
            Content::Elsewhere(bytes) => plain_slice(bytes).unwrap_or(&[]),
        }
    }
}

impl<T: Plain> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        let content = match &self.content {
            Content::Owned(elements) => Content::Owned(elements.clone()),
            Content::Elsewhere(bytes) => Content::Elsewhere(bytes.clone()),
        };
        Buffer { content }
    }
}

impl<T: Plain> Default for Buffer<T> {
    fn default() -> Self {
        Vec::new().into()
    }
}

/// Without a copy.
impl<T: Plain> From<Vec<T>> for Buffer<T> {
    fn from(elements: Vec<T>) -> Self {
        Buffer { content: Content::Owned(Arc::new(elements)) }
    }
}

impl<T: Plain> From<&[T]> for Buffer<T> {
    fn from(elements: &[T]) -> Self {
        plain_vec(plain_bytes(elements)).into()
    }
}

impl<T: Plain> FromIterator<T> for Buffer<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        Vec::from_iter(elements).into()
    }
}

/// Copies them if others share them, or they lie in shared memory.
impl<T: Plain> From<Buffer<T>> for Vec<T> {
    fn from(buffer: Buffer<T>) -> Self {
        buffer.into_vec()
    }
}

/// Without a copy.
impl From<Bytes> for Buffer<u8> {
    fn from(bytes: Bytes) -> Self {
        Buffer { content: Content::Elsewhere(bytes) }
    }
}

/// Without a copy.
impl From<Buffer<u8>> for Bytes {
    fn from(buffer: Buffer<u8>) -> Self {
        buffer.to_bytes()
    }
}

impl<'a, T: Plain> IntoIterator for &'a Buffer<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: Plain + PartialEq> PartialEq for Buffer<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Plain + Eq> Eq for Buffer<T> {}

impl<T: Plain + PartialEq> PartialEq<[T]> for Buffer<T> {
    fn eq(&self, other: &[T]) -> bool {
        **self == *other
    }
}

impl<T: Plain + PartialEq> PartialEq<Vec<T>> for Buffer<T> {
    fn eq(&self, other: &Vec<T>) -> bool {
        **self == **other
    }
}

/// The first elements, and how many there are.
impl<T: Plain + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().take(8)).finish()?;
        write!(f, " of {} elements", self.len())
    }
}

impl<T: Plain + Serialize> Serialize for Buffer<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        codec::serialize_buffer(self, serializer)
    }
}

impl<'de, T: Plain + Deserialize<'de>> Deserialize<'de> for Buffer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        codec::deserialize_buffer(deserializer)
    }
}

/// For fields of type [`Bytes`], with `#[serde(with = "…")]`: they then go into shared memory and out of it as a
/// [`Buffer`] does. Without it they are copied once more on their way in.
pub mod bytes {
    use ::bytes::Bytes;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Buffer;

    /// Writes the bytes as a buffer.
    ///
    /// # Errors
    /// Whatever the serializer answers.
    pub fn serialize<S: Serializer>(bytes: &Bytes, serializer: S) -> Result<S::Ok, S::Error> {
        Buffer::from(bytes.clone()).serialize(serializer)
    }

    /// Reads a buffer of bytes.
    ///
    /// # Errors
    /// When there is none.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        Buffer::<u8>::deserialize(deserializer).map(Bytes::from)
    }
}
