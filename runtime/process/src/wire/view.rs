//! Bytes that are read where they lie: in a message, or in the node's shared memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use bytes::Bytes;
use wingbeat_core::ObjectId;
use wingbeat_core::codec::{self, CodecError, Number};
use wingbeat_store::Region;

use crate::wire::node_link::NodeLink;

/// The bytes of an encoded value.
#[derive(Clone)]
pub enum Bits {
    /// They came with a message.
    Inline(Bytes),
    /// They are in shared memory, pinned.
    Shared(Arc<Pinned>),
}

impl Deref for Bits {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Bits::Inline(bytes) => bytes,
            Bits::Shared(pinned) => &pinned.region,
        }
    }
}

/// An object in shared memory that stays where it is until this is dropped.
pub struct Pinned {
    region: Region,
    object: ObjectId,
    node: NodeLink,
}

impl Pinned {
    pub(crate) fn new(region: Region, object: ObjectId, node: NodeLink) -> Self {
        Pinned { region, object, node }
    }

    /// The same bytes; they and all slices of them keep the object where it is.
    pub(crate) fn into_bytes(self: Arc<Self>) -> Bytes {
        Bytes::from_owner(Kept(self))
    }
}

/// What `Bytes` keep of an object in shared memory.
struct Kept(Arc<Pinned>);

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        &self.0.region
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.node.unpin(self.object);
    }
}

/// A vector of numbers, read in place. The memory stays pinned while a view of it lives.
pub struct ObjectView<T> {
    bits: Bits,
    /// Set when the bytes are not aligned where they lie, as small inline ones may be.
    copied: Option<Arc<Vec<T>>>,
    element: PhantomData<T>,
}

impl<T: Number> ObjectView<T> {
    pub(crate) fn new(bits: Bits) -> Result<Self, CodecError> {
        let content = codec::plain_content::<T>(&bits)?;
        let copied = match codec::plain_slice::<T>(content) {
            Some(_) => None,
            None => Some(Arc::new(codec::decode_plain(&bits)?)),
        };
        Ok(ObjectView { bits, copied, element: PhantomData })
    }
}

impl<T> Clone for ObjectView<T> {
    fn clone(&self) -> Self {
        ObjectView { bits: self.bits.clone(), copied: self.copied.clone(), element: PhantomData }
    }
}

impl<T: Number> Deref for ObjectView<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        if let Some(copied) = &self.copied {
            return copied;
        }
        // Both were checked when the view was made; the bytes have not moved since.
        codec::plain_content::<T>(&self.bits).ok().and_then(codec::plain_slice).unwrap_or(&[])
    }
}

impl<T: Number + fmt::Debug> fmt::Debug for ObjectView<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().take(8)).finish()?;
        write!(f, " of {} elements", self.len())
    }
}
