use serde::Serialize;
use serde::de::DeserializeOwned;
use wingbeat_core::Buffer;
use wingbeat_core::codec::Plain;
use wingbeat_process::CallArgs;

use crate::ObjectRef;

/// What can be given where a remote function takes a `T`: a `T`, or a ref to one; where it takes a `String`, also a `&str`, and
/// where it takes a [`Buffer`], also a `Vec`.
///
/// Since several types fit, the compiler cannot guess what `.into()` is to make, or the type of `None`: write
/// `String::from(x)` or `None::<u64>`.
///
/// Implemented here for those, and not for types of your own: serde makes them a `T`. Called by the code that the macros write.
///
/// ```no_run
/// # #[wingbeat::remote] fn square(x: u64) -> u64 { x * x }
/// # async fn run() -> wingbeat::Result<()> {
/// let nine = square::remote(3);      // a value
/// let more = square::remote(&nine);  // a ref to one
/// let most = square::remote(more);   // or a ref that is not needed any more
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be given where the remote function takes `{T}`",
    label = "expected `{T}`, or an `ObjectRef<{T}>`",
    note = "arguments travel to another process: their types need serde's Serialize and Deserialize"
)]
pub trait IntoArg<T> {
    /// Adds this to the arguments of a call.
    #[doc(hidden)]
    fn add_to(self, args: &mut CallArgs<'_>);
}

impl<T: Serialize + DeserializeOwned + Send + 'static> IntoArg<T> for T {
    fn add_to(self, args: &mut CallArgs<'_>) {
        args.value(&self);
    }
}

impl IntoArg<String> for &str {
    fn add_to(self, args: &mut CallArgs<'_>) {
        args.value(&self.to_owned());
    }
}

impl<T: Plain + Serialize + DeserializeOwned> IntoArg<Buffer<T>> for Vec<T> {
    fn add_to(self, args: &mut CallArgs<'_>) {
        args.value(&Buffer::from(self));
    }
}

impl<T> IntoArg<T> for ObjectRef<T> {
    fn add_to(self, args: &mut CallArgs<'_>) {
        args.object(self.handle());
    }
}

impl<T> IntoArg<T> for &ObjectRef<T> {
    fn add_to(self, args: &mut CallArgs<'_>) {
        args.object(self.handle());
    }
}
