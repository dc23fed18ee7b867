//! What user code returns.

use serde::Serialize;
use wingbeat_core::codec::{self, CodecError, Encoded};

/// A value on its way out of user code, not encoded yet: large ones are encoded straight into shared
/// memory. Implemented for everything that serde can write.
pub trait Outgoing: Send {
    /// The encoded form; see [`codec::encode_value`].
    ///
    /// # Errors
    /// As [`codec::encode_value`].
    fn encode(&self) -> Result<Encoded<'_>, CodecError>;
}

impl<T: Serialize + Send + 'static> Outgoing for T {
    fn encode(&self) -> Result<Encoded<'_>, CodecError> {
        codec::encode_value(self)
    }
}
