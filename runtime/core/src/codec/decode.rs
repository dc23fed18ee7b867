//! Reading a user's value: what [`super::encode`] writes, and nothing else.
//!
//! The bytes may be anybody's. Nothing is allocated for what they only claim to hold: strings and vectors of numbers are
//! compared with what is left before, and other sequences grow as they are read (serde bounds what it reserves for them).

use std::any::TypeId;
use std::fmt::{self, Display};
use std::sync::LazyLock;

use bytes::Bytes;
use serde::de::{
    self, Deserialize, DeserializeSeed, Deserializer, EnumAccess, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

use super::{BESIDE_FROM, CodecError, RAW, align};
use crate::buffer::Buffer;
use crate::plain::{Plain, numbers, plain_vec};
use crate::same::same;

/// So many elements that take no bytes may one sequence have: nothing else bounds how long it would be read.
const MOST_OF_NOTHING: usize = 1 << 30;

/// What may keep the bytes that are read, so that buffers and `Bytes` can stay where they are.
pub type Keeper<'a> = &'a dyn Fn() -> Bytes;

/// A value that is being read.
pub(super) struct Reader<'de, 'a> {
    /// All of it, with the buffers behind it.
    whole: &'de [u8],
    /// What is left.
    rest: &'de [u8],
    keeper: Option<Keeper<'a>>,
    /// What the keeper has answered.
    kept: Option<Bytes>,
    /// Where the first buffer starts and the last one so far ends.
    beside: Option<(usize, usize)>,
}

impl<'de, 'a> Reader<'de, 'a> {
    pub(super) fn new(whole: &'de [u8], keeper: Option<Keeper<'a>>) -> Self {
        Reader { whole, rest: whole, keeper, kept: None, beside: None }
    }

    /// Whether all of it was read, and the buffers lie where a writer would have put them.
    pub(super) fn finish(self) -> Result<(), CodecError> {
        let read = self.offset_of(self.rest);
        match self.beside {
            None if self.rest.is_empty() => Ok(()),
            None => Err(CodecError(format!("{} bytes are left over after the value", self.rest.len()))),
            Some((start, end)) if start == align(read) && end == self.whole.len() => Ok(()),
            Some(_) => Err(CodecError("its buffers are not where they should be".to_owned())),
        }
    }

    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(cut_short)?;
        self.rest = rest;
        Ok(*head)
    }

    #[inline]
    fn take_slice(&mut self, length: usize) -> Result<&'de [u8], CodecError> {
        let (head, rest) = self.rest.split_at_checked(length).ok_or_else(cut_short)?;
        self.rest = rest;
        Ok(head)
    }

    #[inline]
    fn count(&mut self) -> Result<u64, CodecError> {
        self.take().map(u64::from_le_bytes)
    }

    #[inline]
    fn variant(&mut self) -> Result<u32, CodecError> {
        self.take().map(u32::from_le_bytes)
    }

    /// The bytes of a buffer of `count` elements, of which size they are said to be, and whether they lie beside the value.
    fn raw(&mut self, count: u64) -> Result<Raw<'de>, CodecError> {
        let (size, offset) = (self.count()?, self.count()?);
        let length = (count & !RAW).checked_mul(size).and_then(|length| usize::try_from(length).ok());
        let length = length.ok_or_else(cut_short)?;
        if size == 0 {
            return Err(CodecError("it has a buffer whose elements are empty".to_owned()));
        }
        let size = size as usize;
        if offset == 0 {
            let bytes = self.take_slice(length)?;
            return Ok(Raw { bytes, size, offset: self.offset_of(bytes) });
        }
        let start = usize::try_from(offset).map_err(|_| cut_short())?;
        let is_next = match self.beside {
            None => start == align(start) && start <= self.whole.len(),
            Some((_, end)) => start == align(end),
        };
        let bytes = start.checked_add(length).and_then(|end| self.whole.get(start..end)).ok_or_else(cut_short)?;
        if !is_next {
            return Err(CodecError("its buffers are not where they should be".to_owned()));
        }
        self.beside = Some((self.beside.map_or(start, |(first, _)| first), start + length));
        Ok(Raw { bytes, size, offset: start })
    }

    /// Where bytes that were read lie in the whole.
    fn offset_of(&self, bytes: &[u8]) -> usize {
        bytes.as_ptr() as usize - self.whole.as_ptr() as usize
    }

    /// The bytes at an offset of the whole, kept where they are; none where nothing keeps them, or so few are copied.
    fn kept(&mut self, offset: usize, length: usize) -> Option<Bytes> {
        if length < BESIDE_FROM {
            return None;
        }
        if self.kept.is_none() {
            self.kept = Some(self.keeper?());
        }
        let whole = self.kept.as_ref()?;
        (whole.len() == self.whole.len()).then(|| whole.slice(offset..offset + length))
    }

    fn buffer<T: Plain + Deserialize<'de>>(&mut self) -> Result<Buffer<T>, CodecError> {
        let before = self.rest;
        let count = self.count()?;
        if count & RAW == 0 {
            // It was written through a serializer that stood between.
            self.rest = before;
            return Vec::deserialize(self).map(Buffer::from);
        }
        let raw = self.raw(count)?;
        if raw.size != size_of::<T>() {
            let (found, wanted) = (raw.size, size_of::<T>());
            let why =
                format!("a buffer has elements of {found} bytes, and not of {wanted} as {} has", type_name::<T>());
            return Err(CodecError(why));
        }
        let buffer = match self.kept(raw.offset, raw.bytes.len()) {
            Some(bytes) => Buffer::of_bytes(bytes),
            None => Buffer::copy_of_bytes(raw.bytes),
        };
        buffer.ok_or_else(cut_short)
    }

    fn sequence<V: Visitor<'de>>(&mut self, left: usize, visitor: V) -> Result<V::Value, CodecError> {
        visitor.visit_seq(Elements { reader: self, left, size: None })
    }

    /// The bytes of a byte string, and where they lie in the whole.
    fn byte_string(&mut self) -> Result<(&'de [u8], usize), CodecError> {
        let count = self.count()?;
        if count & RAW != 0 {
            let raw = self.raw(count)?;
            return match raw.size {
                1 => Ok((raw.bytes, raw.offset)),
                size => Err(CodecError(format!("a buffer has elements of {size} bytes where bytes are expected"))),
            };
        }
        let bytes = self.take_slice(usize::try_from(count).map_err(|_| cut_short())?)?;
        Ok((bytes, self.offset_of(bytes)))
    }
}

struct Raw<'de> {
    bytes: &'de [u8],
    size: usize,
    offset: usize,
}

fn type_name<T>() -> &'static str {
    std::any::type_name::<T>()
}

#[cold]
fn cut_short() -> CodecError {
    CodecError("it is cut short".to_owned())
}

#[cold]
fn undescribed() -> CodecError {
    CodecError("its type asks the encoding what comes next, as serde_json::Value and untagged enums do".to_owned())
}

#[cold]
fn not_text() -> CodecError {
    CodecError("it has text that is not UTF-8".to_owned())
}

impl de::Error for CodecError {
    fn custom<T: Display>(why: T) -> Self {
        CodecError(why.to_string())
    }
}

/// Reads a buffer from beside the value that it is a part of, or, from any deserializer but that of values, a sequence.
pub(crate) fn deserialize_buffer<'de, T, D>(deserializer: D) -> Result<Buffer<T>, D::Error>
where
    T: Plain + Deserialize<'de>,
    D: Deserializer<'de>,
{
    // SAFETY: the reference is used in this function alone, during which the deserializer that it was is not dropped, and what
    // a `Deserializer<'de>` of this type reads from lives as long as `'de`.
    match unsafe { same::<D, &mut Reader<'de, '_>>(deserializer) } {
        Ok(reader) => reader.buffer().map_err(|error| de::Error::custom(error.0)),
        Err(deserializer) => Vec::deserialize(deserializer).map(Buffer::from),
    }
}

/// Answers, as the error, which visitor a type reads itself with.
struct WhichVisitor;

#[derive(Debug)]
struct Found(Option<TypeId>);

impl Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("which visitor")
    }
}

impl std::error::Error for Found {}

impl de::Error for Found {
    fn custom<T: Display>(_: T) -> Self {
        Found(None)
    }
}

impl<'de> Deserializer<'de> for WhichVisitor {
    type Error = Found;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Found> {
        Err(Found(Some(typeid::of::<V>())))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// The visitor with which a `T` reads itself. It does what `T` does, and no more: who meets it may do the same in another way.
fn visitor_of<'de, T: Deserialize<'de>>() -> Option<TypeId> {
    T::deserialize(WhichVisitor).err().and_then(|Found(visitor)| visitor)
}

/// Whether a visitor is the one of `T` itself, and not one of a user that also makes a `T`.
macro_rules! is_visitor_of {
    ($visitor:ty, $t:ty) => {{
        static OWN: LazyLock<Option<TypeId>> = LazyLock::new(visitor_of::<$t>);
        *OWN == Some(typeid::of::<$visitor>())
    }};
}

/// `made`, a vector of numbers or `Bytes`, as the value of a visitor that makes it.
fn as_value<T: 'static, V>(made: T) -> Result<V, CodecError> {
    // SAFETY: neither vectors of numbers nor `Bytes` have lifetimes.
    unsafe { same::<T, V>(made) }.map_err(|_| undescribed())
}

macro_rules! read_numbers {
    ($($name:ident: $visit:ident, $kind:ty),* $(,)?) => {$(
        fn $name<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
            visitor.$visit(<$kind>::from_le_bytes(self.take()?))
        }
    )*};
}

impl<'de> Deserializer<'de> for &mut Reader<'de, '_> {
    type Error = CodecError;

    read_numbers! {
        deserialize_i8: visit_i8, i8, deserialize_i16: visit_i16, i16, deserialize_i32: visit_i32, i32,
        deserialize_i64: visit_i64, i64, deserialize_i128: visit_i128, i128,
        deserialize_u8: visit_u8, u8, deserialize_u16: visit_u16, u16, deserialize_u32: visit_u32, u32,
        deserialize_u64: visit_u64, u64, deserialize_u128: visit_u128, u128,
        deserialize_f32: visit_f32, f32, deserialize_f64: visit_f64, f64,
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, CodecError> {
        Err(undescribed())
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, _: V) -> Result<V::Value, CodecError> {
        Err(undescribed())
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, CodecError> {
        Err(undescribed())
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        match self.take()? {
            [0] => visitor.visit_bool(false),
            [1] => visitor.visit_bool(true),
            [byte] => Err(CodecError(format!("a bool is neither 0 nor 1, but {byte}"))),
        }
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        let first = *self.rest.first().ok_or_else(cut_short)?;
        let length = match first {
            0..0x80 => 1,
            0xc0..0xe0 => 2,
            0xe0..0xf0 => 3,
            0xf0..0xf8 => 4,
            _ => return Err(not_text()),
        };
        let text = std::str::from_utf8(self.take_slice(length)?).map_err(|_| not_text())?;
        visitor.visit_char(text.chars().next().ok_or_else(not_text)?)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        let length = usize::try_from(self.count()?).map_err(|_| cut_short())?;
        let bytes = self.take_slice(length)?;
        visitor.visit_borrowed_str(std::str::from_utf8(bytes).map_err(|_| not_text())?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        visitor.visit_borrowed_bytes(self.byte_string()?.0)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        let (bytes, offset) = self.byte_string()?;
        // They keep all of the value where it is: who has asked for no buffer does not expect that of a small part.
        let is_most = bytes.len() >= self.whole.len() / 2;
        if is_most
            && is_visitor_of!(V, Bytes)
            && let Some(kept) = self.kept(offset, bytes.len())
        {
            return as_value(kept);
        }
        visitor.visit_byte_buf(plain_vec(bytes))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        match self.take()? {
            [0] => visitor.visit_none(),
            [1] => visitor.visit_some(self),
            [byte] => Err(CodecError(format!("an Option is neither 0 nor 1, but {byte}"))),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, CodecError> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, CodecError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        let count = self.count()?;
        let raw = if count & RAW == 0 { None } else { Some(self.raw(count)?) };
        let count = usize::try_from(count & !RAW).map_err(|_| cut_short())?;
        macro_rules! try_numbers {
            ($($t:ty),*) => {$(
                if typeid::of::<V::Value>() == TypeId::of::<Vec<$t>>() && is_visitor_of!(V, Vec<$t>) {
                    let bytes = match &raw {
                        Some(raw) if raw.size == size_of::<$t>() => raw.bytes,
                        Some(raw) => return Err(of_size(raw.size, size_of::<$t>())),
                        None => {
                            let length = count.checked_mul(size_of::<$t>()).ok_or_else(cut_short)?;
                            self.take_slice(length)?
                        }
                    };
                    return as_value(plain_vec::<$t>(bytes));
                }
            )*};
        }
        numbers!(try_numbers);
        let Some(raw) = raw else { return self.sequence(count, visitor) };
        // As elements: whoever reads them does not know buffers, or does not read from here alone.
        let after = std::mem::replace(&mut self.rest, raw.bytes);
        let read = visitor.visit_seq(Elements { reader: self, left: count, size: Some(raw.size) });
        self.rest = after;
        read
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, CodecError> {
        self.sequence(length, visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, CodecError> {
        self.sequence(length, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CodecError> {
        let left = usize::try_from(self.count()?).map_err(|_| cut_short())?;
        visitor.visit_map(Elements { reader: self, left, size: None })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, CodecError> {
        self.sequence(fields.len(), visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, CodecError> {
        visitor.visit_enum(Variant(self))
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

#[cold]
fn of_size(found: usize, wanted: usize) -> CodecError {
    CodecError(format!("a buffer has elements of {found} bytes where elements of {wanted} are expected"))
}

/// The rest of a sequence or a map.
struct Elements<'r, 'de, 'a> {
    reader: &'r mut Reader<'de, 'a>,
    left: usize,
    /// That each must have, where that is known.
    size: Option<usize>,
}

impl<'de> Elements<'_, 'de, '_> {
    fn read<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, CodecError> {
        let before = self.reader.rest.len();
        let value = seed.deserialize(&mut *self.reader)?;
        let taken = before - self.reader.rest.len();
        if taken == 0 && self.left > MOST_OF_NOTHING {
            return Err(CodecError("it claims to be larger than any value can be".to_owned()));
        }
        match self.size {
            Some(size) if size != taken => Err(of_size(size, taken)),
            _ => Ok(value),
        }
    }

    #[inline]
    fn is_next(&mut self) -> bool {
        let is_next = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_next
    }
}

impl<'de> SeqAccess<'de> for Elements<'_, 'de, '_> {
    type Error = CodecError;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, CodecError> {
        if self.is_next() { self.read(seed).map(Some) } else { Ok(None) }
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> MapAccess<'de> for Elements<'_, 'de, '_> {
    type Error = CodecError;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, CodecError> {
        if self.is_next() { self.read(seed).map(Some) } else { Ok(None) }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, CodecError> {
        seed.deserialize(&mut *self.reader)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

struct Variant<'r, 'de, 'a>(&'r mut Reader<'de, 'a>);

impl<'de> EnumAccess<'de> for Variant<'_, 'de, '_> {
    type Error = CodecError;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self), CodecError> {
        let index = self.0.variant()?;
        let variant = seed.deserialize(IntoDeserializer::<CodecError>::into_deserializer(index))?;
        Ok((variant, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_, 'de, '_> {
    type Error = CodecError;

    fn unit_variant(self) -> Result<(), CodecError> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, CodecError> {
        seed.deserialize(self.0)
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, CodecError> {
        self.0.sequence(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, CodecError> {
        self.0.sequence(fields.len(), visitor)
    }
}
