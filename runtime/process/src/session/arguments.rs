//! Arguments on their way into user code, and on their way out of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;
use smallvec::SmallVec;
use wingbeat_core::error::Error;
use wingbeat_net::panics::said;

use crate::owner::object::Handle;
use crate::owner::outbound::{Outbound, PackedValue};
use crate::session::session::Session;
use crate::session::values;
use crate::session::values::pack;
use crate::wire::view::Bits;

/// The arguments of a call that is about to run: encoded values, all of them here.
pub struct Arguments {
    function: &'static str,
    session: Session,
    values: std::vec::IntoIter<Incoming>,
}

/// A value that arrived, with what keeps the refs inside it alive until they are decoded.
pub struct Incoming {
    /// The encoded value.
    pub bits: Bits,
    /// Handles of the refs inside.
    pub held: Vec<Handle>,
}

impl Arguments {
    /// The values of a call of `function`.
    pub fn new(function: &'static str, session: Session, values: Vec<Incoming>) -> Self {
        Arguments { function, session, values: values.into_iter() }
    }

    /// Decodes the next argument.
    ///
    /// # Errors
    /// [`Error::Decode`], naming function and argument.
    pub fn next<T: DeserializeOwned + 'static>(&mut self, name: &'static str) -> Result<T, Error> {
        let fail = |why: String| Error::Decode { what: format!("argument `{name}` of {}", self.function), why };
        let Some(incoming) = self.values.next() else {
            return Err(fail("the caller sent fewer arguments".into()));
        };
        values::decode(self.session.owner(), &incoming.bits).map_err(|error| fail(error.0))
    }
}

/// Collects the arguments of a call.
pub struct CallArgs<'a> {
    session: &'a Session,
    function: &'static str,
    parameters: &'static [&'static str],
    checked: &'a std::sync::atomic::AtomicU32,
    args: SmallVec<[Outbound; 3]>,
    error: Option<Error>,
}

impl<'a> CallArgs<'a> {
    /// For a call of `function` whose parameters are these; `checked` is its registry entry's.
    pub fn new(
        session: &'a Session,
        function: &'static str,
        parameters: &'static [&'static str],
        checked: &'a std::sync::atomic::AtomicU32,
    ) -> Self {
        CallArgs { session, function, parameters, checked, args: SmallVec::new(), error: None }
    }

    /// Adds a value. The first time that a function is called in this process, the value is also decoded
    /// again, so that a type which cannot make the journey is found here and not at the other end.
    pub fn value<T: Serialize + DeserializeOwned + Send + 'static>(&mut self, value: &T) {
        let index = self.args.len();
        let packed = pack(self.session.process(), value);
        match packed {
            Ok(packed) => {
                let bit = 1u32 << (index as u32).min(31);
                if self.checked.load(Ordering::Relaxed) & bit == 0 {
                    let decode = AssertUnwindSafe(|| values::decode_packed::<T>(self.session.owner(), &packed));
                    match catch_unwind(decode) {
                        Ok(Ok(())) => {
                            self.checked.fetch_or(bit, Ordering::Relaxed);
                        }
                        Ok(Err(error)) => self.fail(index, error.0),
                        // As at the other end, it is the error of the call.
                        Err(payload) => self.fail(index, format!("its Deserialize panicked: {}", said(&*payload))),
                    }
                }
                self.args.push(Outbound::Value(packed));
            }
            Err(error) => {
                match error {
                    values::PackError::Codec(error) => self.fail(index, error.0),
                    values::PackError::Other(error) => {
                        let error = error.about(|| self.argument(index));
                        self.error = self.error.take().or(Some(error));
                    }
                }
                self.args.push(Outbound::Value(PackedValue::default()));
            }
        }
    }

    /// Adds an object whose value is the argument.
    pub fn object(&mut self, handle: &Handle) {
        if let Err(error) = values::check_ours(self.session.owner().cluster, handle) {
            self.error = self.error.take().or(Some(error));
        }
        self.args.push(Outbound::Object(handle.clone()));
    }

    fn fail(&mut self, index: usize, why: String) {
        let what = self.argument(index);
        self.error = self.error.take().or(Some(Error::Encode { what, why }));
    }

    fn argument(&self, index: usize) -> String {
        let name = self.parameters.get(index).copied().unwrap_or("?");
        format!("argument `{name}` of {}", self.function)
    }

    /// The arguments, or the first thing that was wrong with them.
    ///
    /// # Errors
    /// [`Error::Encode`], [`Error::ForeignRef`], or what storing a large argument answered.
    pub fn finish(self) -> Result<SmallVec<[Outbound; 3]>, Error> {
        match self.error {
            None => Ok(self.args),
            Some(error) => Err(error),
        }
    }
}
