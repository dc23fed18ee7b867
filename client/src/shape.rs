//! What a call gives, by the shape of what the function returns.

use std::marker::PhantomData;

use wingbeat_core::error::Error;
use wingbeat_process::{Handle, StreamHandle, Submitted};

use crate::{ObjectRef, ObjectStream};

/// Maps what was submitted to what the caller holds. Implemented for the markers here, named by the macros.
pub trait Shape {
    /// What the caller holds.
    type Refs;
    /// Makes it.
    fn refs(submitted: Submitted) -> Self::Refs;
}

/// One object.
pub struct One<T>(PhantomData<fn() -> T>);
/// Several objects.
pub struct Many<T>(PhantomData<fn() -> T>);
/// A stream of objects.
pub struct Items<T>(PhantomData<fn() -> T>);

/// The handles of a submission; one that gave too few, which the registry rules out, gives errors.
fn handles(submitted: Submitted) -> impl Iterator<Item = Handle> {
    let mut handles = match submitted {
        Submitted::Objects(handles) => handles,
        Submitted::Stream(_) => Default::default(),
    }
    .into_iter();
    std::iter::from_fn(move || {
        let missing =
            || Handle::failed(Error::InvalidArgument { what: "the call returned fewer objects than declared".into() });
        Some(handles.next().unwrap_or_else(missing))
    })
}

impl<T> Shape for One<T> {
    type Refs = ObjectRef<T>;
    fn refs(submitted: Submitted) -> ObjectRef<T> {
        let handle = handles(submitted).next();
        ObjectRef::new(handle.unwrap_or_else(|| Handle::failed(Error::NoSession)))
    }
}

impl<T> Shape for Items<T> {
    type Refs = ObjectStream<T>;
    fn refs(submitted: Submitted) -> ObjectStream<T> {
        ObjectStream::new(match submitted {
            Submitted::Stream(stream) => stream,
            Submitted::Objects(_) => StreamHandle::failed(Error::NoSession),
        })
    }
}

macro_rules! many {
    ($($t:ident),*) => {
        impl<$($t),*> Shape for Many<($($t,)*)> {
            type Refs = ($(ObjectRef<$t>,)*);
            fn refs(submitted: Submitted) -> Self::Refs {
                let mut handles = handles(submitted);
                ($(ObjectRef::<$t>::new(handles.next().unwrap_or_else(|| Handle::failed(Error::NoSession))),)*)
            }
        }
    };
}
many!(A, B);
many!(A, B, C);
many!(A, B, C, D);
many!(A, B, C, D, E);
many!(A, B, C, D, E, F);
many!(A, B, C, D, E, F, G);
many!(A, B, C, D, E, F, G, H);

/// Implements the call for every number of arguments: `impl_arities!(Target, method -> Output)`.
macro_rules! arities {
    ($then:ident) => {
        $then!();
        $then!(A0 a0 0);
        $then!(A0 a0 0, A1 a1 1);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6, A7 a7 7);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6, A7 a7 7, A8 a8 8);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6, A7 a7 7, A8 a8 8, A9 a9 9);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6, A7 a7 7, A8 a8 8, A9 a9 9, A10 a10 10);
        $then!(A0 a0 0, A1 a1 1, A2 a2 2, A3 a3 3, A4 a4 4, A5 a5 5, A6 a6 6, A7 a7 7, A8 a8 8, A9 a9 9, A10 a10 10, A11 a11 11);
    };
}
pub(crate) use arities;
