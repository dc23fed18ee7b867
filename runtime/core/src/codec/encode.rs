//! Writing a user's value.
//!
//! What bincode's serializer writes, with fixed-width little-endian integers, and two things that it cannot: vectors of numbers
//! are copied in one piece, wherever they stand in the value, and a [`Buffer`] is written beside it.

use std::fmt::Display;

use bytes::Bytes;
use serde::ser::{
    self, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

use super::{BESIDE_FROM, CodecError, Encoded, RAW, align};
use crate::buffer::Buffer;
use crate::pages;
use crate::plain::{Plain, numbers, plain_bytes};
use crate::same::same;

/// A part of a value that is as long as this is not made longer, which would move it, but followed by another.
const PART_FROM: usize = 1 << 20;

/// How much room the following parts have. What of it is not written to costs nothing.
const PART: usize = 32 << 20;

/// A value that is being written.
pub(super) struct Writer {
    /// What comes before `out`.
    parts: Vec<Vec<u8>>,
    out: Vec<u8>,
    /// Buffers that come after the value, each with the part and the place in it where it is to say at which offset.
    beside: Vec<(usize, usize, Bytes)>,
}

impl Writer {
    pub(super) fn with_capacity(capacity: usize) -> Self {
        Writer { parts: Vec::new(), out: Vec::with_capacity(capacity), beside: Vec::new() }
    }

    /// What was written, with the buffers in their places.
    pub(super) fn finish<'a>(self) -> Encoded<'a> {
        let Writer { mut parts, out, beside } = self;
        if parts.is_empty() && beside.is_empty() {
            return Encoded::Bytes(out);
        }
        parts.push(out);
        let mut end = parts.iter().map(Vec::len).sum();
        let place = |(part, field, bytes): (usize, usize, Bytes)| {
            let start = align(end);
            parts[part][field..field + 8].copy_from_slice(&(start as u64).to_le_bytes());
            end = start + bytes.len();
            bytes
        };
        let buffers = beside.into_iter().map(place).collect();
        Encoded::Parts(parts, buffers)
    }

    #[inline]
    fn room(&self) -> usize {
        self.out.capacity() - self.out.len()
    }

    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        if self.room() < N {
            self.grow(N);
        }
        self.out.extend_from_slice(&bytes);
    }

    #[cold]
    fn grow(&mut self, more: usize) {
        if self.out.len() < PART_FROM {
            return pages::reserve(&mut self.out, more);
        }
        let mut next = Vec::new();
        pages::reserve(&mut next, more.max(PART));
        self.parts.push(std::mem::replace(&mut self.out, next));
    }

    #[inline]
    fn put_slice(&mut self, bytes: &[u8]) {
        let mut bytes = bytes;
        if self.room() < bytes.len() {
            if self.out.len() >= PART_FROM {
                let (here, rest) = bytes.split_at(self.room());
                self.out.extend_from_slice(here);
                bytes = rest;
            }
            self.grow(bytes.len());
        }
        self.out.extend_from_slice(bytes);
    }

    fn put_all(&mut self, count: usize, bytes: &[u8]) {
        if self.room() < 8 && bytes.len() >= PART_FROM {
            // Once, for both.
            self.grow(8 + bytes.len());
        }
        self.put((count as u64).to_le_bytes());
        self.put_slice(bytes);
    }

    #[inline]
    fn put_length(&mut self, length: Option<usize>) -> Result<(), CodecError> {
        let Some(length) = length else {
            let why = "it has a sequence or a map that does not say how long it is, as `#[serde(flatten)]` makes";
            return Err(CodecError(why.to_owned()));
        };
        self.put((length as u64).to_le_bytes());
        Ok(())
    }

    /// How many elements, of which size, and where they are: at an offset of the whole, or, with zero, just behind this.
    fn buffer<T: Plain>(&mut self, buffer: &Buffer<T>) {
        let bytes = plain_bytes(buffer);
        self.put((buffer.len() as u64 | RAW).to_le_bytes());
        self.put((size_of::<T>() as u64).to_le_bytes());
        self.put([0; 8]);
        match bytes.len() < BESIDE_FROM {
            true => self.put_slice(bytes),
            false => self.beside.push((self.parts.len(), self.out.len() - 8, buffer.to_bytes())),
        }
    }
}

/// Writes a buffer beside the value that it is a part of, or, to any serializer but that of values, as a sequence.
pub(crate) fn serialize_buffer<T: Plain + Serialize, S: Serializer>(
    buffer: &Buffer<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    // SAFETY: the reference is used in this function alone, during which the serializer that it was is not dropped.
    match unsafe { same::<S, &mut Writer>(serializer) } {
        Ok(writer) => {
            writer.buffer(buffer);
            // SAFETY: neither has lifetimes.
            unsafe { same::<(), S::Ok>(()) }.map_err(|()| ser::Error::custom("the serializer of values has no answer"))
        }
        Err(serializer) => serializer.collect_seq(buffer.iter()),
    }
}

impl ser::Error for CodecError {
    fn custom<T: Display>(why: T) -> Self {
        CodecError(why.to_string())
    }
}

macro_rules! write_numbers {
    ($($name:ident: $kind:ty),* $(,)?) => {$(
        #[inline]
        fn $name(self, value: $kind) -> Result<(), CodecError> {
            self.put(value.to_le_bytes());
            Ok(())
        }
    )*};
}

impl Serializer for &mut Writer {
    type Ok = ();
    type Error = CodecError;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    write_numbers! {
        serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64, serialize_i128: i128,
        serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64, serialize_u128: u128,
        serialize_f32: f32, serialize_f64: f64,
    }

    #[inline]
    fn serialize_bool(self, value: bool) -> Result<(), CodecError> {
        self.serialize_u8(u8::from(value))
    }

    fn serialize_char(self, value: char) -> Result<(), CodecError> {
        self.put_slice(value.encode_utf8(&mut [0; 4]).as_bytes());
        Ok(())
    }

    fn serialize_str(self, value: &str) -> Result<(), CodecError> {
        self.serialize_bytes(value.as_bytes())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), CodecError> {
        self.put_all(value.len(), value);
        Ok(())
    }

    #[inline]
    fn serialize_none(self) -> Result<(), CodecError> {
        self.serialize_u8(0)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), CodecError> {
        self.put([1]);
        value.serialize(self)
    }

    #[inline]
    fn serialize_unit(self) -> Result<(), CodecError> {
        Ok(())
    }

    #[inline]
    fn serialize_unit_struct(self, _name: &'static str) -> Result<(), CodecError> {
        Ok(())
    }

    #[inline]
    fn serialize_unit_variant(self, _: &'static str, index: u32, _: &'static str) -> Result<(), CodecError> {
        self.serialize_u32(index)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), CodecError> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        value: &T,
    ) -> Result<(), CodecError> {
        self.put(index.to_le_bytes());
        value.serialize(self)
    }

    #[inline]
    fn serialize_seq(self, length: Option<usize>) -> Result<Self, CodecError> {
        self.put_length(length)?;
        Ok(self)
    }

    #[inline]
    fn serialize_tuple(self, _: usize) -> Result<Self, CodecError> {
        Ok(self)
    }

    #[inline]
    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self, CodecError> {
        Ok(self)
    }

    #[inline]
    fn serialize_tuple_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, CodecError> {
        self.put(index.to_le_bytes());
        Ok(self)
    }

    #[inline]
    fn serialize_map(self, length: Option<usize>) -> Result<Self, CodecError> {
        self.put_length(length)?;
        Ok(self)
    }

    #[inline]
    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self, CodecError> {
        Ok(self)
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, CodecError> {
        self.put(index.to_le_bytes());
        Ok(self)
    }

    /// What vectors and slices call.
    fn collect_seq<I>(self, elements: I) -> Result<(), CodecError>
    where
        I: IntoIterator,
        I::Item: Serialize,
    {
        let mut elements = elements;
        macro_rules! try_numbers {
            ($($t:ty),*) => {$(
                // SAFETY: the vector is used in this block alone, where what it was borrowed from still is.
                match unsafe { same::<I, &Vec<$t>>(elements) } {
                    Ok(vec) => {
                        self.put_all(vec.len(), plain_bytes(vec.as_slice()));
                        return Ok(());
                    }
                    Err(others) => elements = others,
                }
                // SAFETY: as above.
                match unsafe { same::<I, &[$t]>(elements) } {
                    Ok(slice) => {
                        self.put_all(slice.len(), plain_bytes(slice));
                        return Ok(());
                    }
                    Err(others) => elements = others,
                }
            )*};
        }
        numbers!(try_numbers);
        let elements = elements.into_iter();
        let length = match elements.size_hint() {
            (least, Some(most)) if least == most => Some(least),
            _ => None,
        };
        self.put_length(length)?;
        for element in elements {
            element.serialize(&mut *self)?;
        }
        Ok(())
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

macro_rules! write_parts {
    ($($part:ident: $name:ident),* $(,)?) => {$(
        impl $part for &mut Writer {
            type Ok = ();
            type Error = CodecError;

            #[inline]
            fn $name<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CodecError> {
                value.serialize(&mut **self)
            }

            #[inline]
            fn end(self) -> Result<(), CodecError> {
                Ok(())
            }
        }
    )*};
}
write_parts! {
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field,
    SerializeTupleVariant: serialize_field,
}

/// Fields have no names in the encoded form: one that is left out this time would make its reader take the next for it. `skip_serializing_if`
/// alone comes here; what is left out always (`skip`) is no field of either side.
#[cold]
fn left_out(field: &'static str) -> CodecError {
    CodecError(format!(
        "its field `{field}` is left out of it (`skip_serializing_if`), which a reader cannot see, since fields are known by their \
         places; write the field always"
    ))
}

macro_rules! write_fields {
    ($($part:ident),* $(,)?) => {$(
        impl $part for &mut Writer {
            type Ok = ();
            type Error = CodecError;

            #[inline]
            fn serialize_field<T: Serialize + ?Sized>(&mut self, _: &'static str, value: &T) -> Result<(), CodecError> {
                value.serialize(&mut **self)
            }

            fn skip_field(&mut self, field: &'static str) -> Result<(), CodecError> {
                Err(left_out(field))
            }

            #[inline]
            fn end(self) -> Result<(), CodecError> {
                Ok(())
            }
        }
    )*};
}
write_fields!(SerializeStruct, SerializeStructVariant);

impl SerializeMap for &mut Writer {
    type Ok = ();
    type Error = CodecError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), CodecError> {
        key.serialize(&mut **self)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), CodecError> {
        value.serialize(&mut **self)
    }

    #[inline]
    fn end(self) -> Result<(), CodecError> {
        Ok(())
    }
}
