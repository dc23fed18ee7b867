//! Users' values: what is written is read, in the form that bincode has, and buffers lie beside it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Debug;

use bytes::Bytes;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde::de::{DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use wingbeat_core::Buffer;
use wingbeat_core::codec::{BESIDE_FROM, Plain, decode_value, decode_value_in_place, encode_value};

fn encoded<T: Serialize + 'static>(value: &T) -> Bytes {
    let encoded = encode_value(value).unwrap();
    let len = encoded.len();
    let bytes = encoded.into_bytes();
    assert_eq!(bytes.len(), len);
    bytes
}

/// The same bytes where a store would have them: at a multiple of 64.
#[derive(Clone)]
#[repr(align(64))]
struct Line([u8; 64]);

struct Stored(Vec<Line>, usize);

impl AsRef<[u8]> for Stored {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the lines are bytes, one after another, and at least as many.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1) }
    }
}

fn stored(bytes: &[u8]) -> Bytes {
    let line = |part: &[u8]| {
        let mut line = Line([0; 64]);
        line.0[..part.len()].copy_from_slice(part);
        line
    };
    Bytes::from_owner(Stored(bytes.chunks(64).map(line).collect(), bytes.len()))
}

fn in_place<T: DeserializeOwned + 'static>(bytes: &Bytes) -> Result<T, String> {
    decode_value_in_place(bytes, &|| bytes.clone()).map_err(|error| error.0)
}

/// Reads a value in both ways.
fn read<T: DeserializeOwned + PartialEq + Debug + 'static>(bytes: &[u8]) -> T {
    let copied: T = decode_value(bytes).unwrap();
    let kept: T = in_place(&stored(bytes)).unwrap();
    assert_eq!(copied, kept);
    kept
}

fn comes_back<T: Serialize + DeserializeOwned + PartialEq + Debug + 'static>(value: &T) {
    assert_eq!(read::<T>(&encoded(value)), *value);
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
enum Shape {
    Unit,
    New(f32),
    Tuple(i8, char),
    Struct { wide: i128, text: String },
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Ordinary {
    flag: bool,
    numbers: (u8, u16, u32, u64, u128, i8, i16, i32, i64, f32, f64),
    floats: Vec<f32>,
    nested: Vec<Vec<i16>>,
    boxed: Box<[u64]>,
    array: [u16; 3],
    bytes: Bytes,
    shapes: Vec<Shape>,
    map: BTreeMap<String, Option<Vec<i128>>>,
    unit: (),
}

fn shape() -> impl Strategy<Value = Shape> {
    prop_oneof![
        Just(Shape::Unit),
        any::<i16>().prop_map(|n| Shape::New(f32::from(n))),
        (any::<i8>(), any::<char>()).prop_map(|(n, c)| Shape::Tuple(n, c)),
        (any::<i128>(), ".{0,9}").prop_map(|(wide, text)| Shape::Struct { wide, text }),
    ]
}

fn ordinary() -> impl Strategy<Value = Ordinary> {
    let numbers = (any::<(u8, u16, u32, u64, u128)>(), any::<(i8, i16, i32, i64)>(), any::<(i16, i32)>());
    let lists = (vec(any::<i16>(), 0..40), vec(vec(any::<i16>(), 0..9), 0..9), vec(any::<u64>(), 0..9));
    let rest = (vec(any::<u8>(), 0..40), vec(shape(), 0..9));
    let map = btree_map(".{0,5}", proptest::option::of(vec(any::<i128>(), 0..4)), 0..5);
    (any::<bool>(), numbers, lists, any::<[u16; 3]>(), rest, map).prop_map(
        |(flag, ((a, b, c, d, e), (f, g, h, i), (j, k)), (floats, nested, boxed), array, (bytes, shapes), map)| {
            Ordinary {
                flag,
                numbers: (a, b, c, d, e, f, g, h, i, f32::from(j), f64::from(k)),
                floats: floats.into_iter().map(f32::from).collect(),
                nested,
                boxed: boxed.into(),
                array,
                bytes: bytes.into(),
                shapes,
                map,
                unit: (),
            }
        },
    )
}

/// A value with buffers wherever one may stand.
#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
struct Buffered<T: Plain> {
    name: String,
    first: Buffer<T>,
    list: Vec<Buffer<T>>,
    map: BTreeMap<u8, Buffer<T>>,
    maybe: Option<(Buffer<T>, u16)>,
    either: Either<T>,
    last: Buffer<u8>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Clone)]
enum Either<T: Plain> {
    New(Buffer<T>),
    Tuple(u8, Buffer<T>),
    Struct { inner: Buffer<T> },
}

/// Lengths in bytes, at and around the threshold.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let near = BESIDE_FROM - 40..BESIDE_FROM + 40;
    vec(prop_oneof![Just(0), Just(16), 0..100usize, near, BESIDE_FROM..3 * BESIDE_FROM], 7)
}

fn buffers_come_back<T>(name: &str, lengths: &[usize], content: u8)
where
    T: Plain + Serialize + DeserializeOwned + PartialEq + Debug,
{
    let mut next = content;
    let mut buffer = |bytes: usize| -> Buffer<T> {
        let bytes: Vec<u8> = (0..bytes / size_of::<T>() * size_of::<T>())
            .map(|_| {
                // Below 127, so that no four of them are a NaN.
                next = (next + 1) % 127;
                next
            })
            .collect();
        let mut elements = Vec::new();
        for element in bytes.chunks(size_of::<T>()) {
            elements.push(decode_value::<T>(element).unwrap());
        }
        elements.into()
    };
    let first = buffer(lengths[0]);
    let either = match content % 3 {
        0 => Either::New(buffer(lengths[4])),
        1 => Either::Tuple(content, buffer(lengths[4])),
        _ => Either::Struct { inner: buffer(lengths[4]) },
    };
    let value = Buffered {
        name: name.to_owned(),
        list: vec![buffer(lengths[1]), first.clone(), buffer(lengths[2])],
        first,
        map: BTreeMap::from([(1, buffer(lengths[3])), (2, buffer(lengths[0]))]),
        maybe: content.is_multiple_of(2).then(|| (buffer(lengths[5]), 7)),
        either,
        last: vec![content; lengths[6]].into(),
    };
    let bytes = encoded(&value);
    assert_eq!(read::<Buffered<T>>(&bytes), value);
    let kept: Buffered<T> = in_place(&stored(&bytes)).unwrap();
    for buffer in kept.list.iter().chain([&kept.first]) {
        assert_eq!(buffer.is_elsewhere(), size_of_val(&**buffer) >= BESIDE_FROM);
        if buffer.is_elsewhere() {
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
        }
    }
    // What was read is written as what was made.
    assert_eq!(encoded(&kept), bytes);
    comes_back(&value.first);
    comes_back(&(value.last.clone(), value.first.clone()));
    assert!(decode_value::<Buffered<T>>(&bytes[..bytes.len() - 1]).is_err());
    assert!(decode_value::<Buffered<T>>(&[&bytes[..], &[0]].concat()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 64 }))]

    #[test]
    fn ordinary_values_have_the_form_that_bincode_gives_them(value in ordinary()) {
        let bytes = encoded(&value);
        let config = bincode::config::standard().with_fixed_int_encoding();
        prop_assert_eq!(&bytes, &bincode::serde::encode_to_vec(&value, config).unwrap());
        prop_assert_eq!(read::<Ordinary>(&bytes), value);
        for len in [0, bytes.len() / 3, bytes.len() - 1] {
            prop_assert!(decode_value::<Ordinary>(&bytes[..len]).is_err());
        }
    }

    #[test]
    fn buffers_of_every_element_come_back(name in ".{0,20}", lengths in lengths(), content in 0..100u8) {
        buffers_come_back::<u8>(&name, &lengths, content);
        buffers_come_back::<[u16; 3]>(&name, &lengths, content);
        if cfg!(miri) {
            // It takes its time.
            return Ok(());
        }
        buffers_come_back::<i8>(&name, &lengths, content);
        buffers_come_back::<u16>(&name, &lengths, content);
        buffers_come_back::<i16>(&name, &lengths, content);
        buffers_come_back::<u32>(&name, &lengths, content);
        buffers_come_back::<i32>(&name, &lengths, content);
        buffers_come_back::<u64>(&name, &lengths, content);
        buffers_come_back::<i64>(&name, &lengths, content);
        buffers_come_back::<u128>(&name, &lengths, content);
        buffers_come_back::<i128>(&name, &lengths, content);
        buffers_come_back::<f32>(&name, &lengths, content);
        buffers_come_back::<f64>(&name, &lengths, content);
    }

    #[test]
    fn whatever_is_changed_in_a_value_it_is_read_or_an_error(
        lengths in lengths(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let value = Buffered::<f32> {
            name: "x".to_owned(),
            first: vec![1.5; lengths[0] / 4].into(),
            list: lengths[1..].iter().map(|length| vec![2.5; length / 4].into()).collect(),
            map: BTreeMap::new(),
            maybe: None,
            either: Either::Tuple(3, vec![3.5; lengths[1] / 4].into()),
            last: vec![4; lengths[2]].into(),
        };
        let mut bytes = encoded(&value).to_vec();
        for (at, byte, is_early) in changes {
            // The heads of buffers are among the first bytes.
            let range = if is_early { bytes.len().min(600) } else { bytes.len() };
            let at = at.index(range);
            bytes[at] = byte;
        }
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            let _ = decode_value::<Buffered<f32>>(bytes);
            let _ = in_place::<Buffered<f32>>(&stored(bytes));
            let _ = decode_value::<Buffered<u16>>(bytes);
            let _ = decode_value::<(String, VecDeque<f32>, Vec<Vec<f32>>)>(bytes);
            let _ = decode_value::<(String, Buffer<f32>, HashMap<u64, Bytes>)>(bytes);
        }
    }
}

/// An encoded buffer of its own: how many elements, of which size, at which offset, and what comes then.
fn head(count: u64, size: u64, offset: u64) -> Vec<u8> {
    [count | 1 << 63, size, offset].iter().flat_map(|field| field.to_le_bytes()).collect()
}

#[test]
fn a_buffer_that_does_not_lie_where_a_writer_puts_it_is_an_error() {
    let with = |head: Vec<u8>, total: usize| {
        let mut bytes = head;
        bytes.resize(total, 0);
        bytes
    };
    assert!(decode_value::<Buffer<u32>>(&with(head(4, 4, 64), 80)).is_ok());
    let wrong = [
        ("not aligned", with(head(4, 4, 65), 81)),
        ("over the value itself", with(head(4, 4, 24), 40)),
        ("after a gap", with(head(4, 4, 128), 144)),
        ("before its end", with(head(3, 4, 64), 80)),
        ("cut short", with(head(5, 4, 64), 80)),
        ("beyond the end", with(head(4, 4, 1 << 40), 80)),
        ("beyond all numbers", with(head(4, 4, u64::MAX - 63), 80)),
        ("of another element", with(head(8, 2, 64), 80)),
        ("of empty elements", with(head(4, 0, 64), 64)),
        ("too long for a number", with(head(1 << 62, 1 << 62, 64), 80)),
        ("as long as all memory", with(head(u64::MAX >> 1, 4, 0), 80)),
        ("longer than what is here", with(head(15, 4, 0), 80)),
    ];
    for (how, bytes) in wrong {
        assert!(decode_value::<Buffer<u32>>(&bytes).is_err(), "{how}");
        assert!(in_place::<Buffer<u32>>(&stored(&bytes)).is_err(), "{how}");
        assert!(decode_value::<Vec<u32>>(&bytes).is_err(), "{how}");
        assert!(decode_value::<VecDeque<u32>>(&bytes).is_err(), "{how}");
    }
    // Two that lie on each other.
    let twice = with([head(4, 4, 64), head(4, 4, 64)].concat(), 80);
    assert!(decode_value::<(Buffer<u32>, Buffer<u32>)>(&twice).is_err());
}

#[test]
#[cfg_attr(miri, ignore = "it is too large")]
fn a_large_value_is_written_in_parts() {
    let text = "x".repeat(300);
    let rows: Vec<Vec<u32>> = (0..40u32).map(|n| vec![n; 500_000]).collect();
    let map: HashMap<u64, String> = (0..9000).map(|n| (n, text.clone())).collect();
    let buffers: Vec<(char, Buffer<u16>)> = (0..3000u16).map(|n| ('é', vec![n; usize::from(n)].into())).collect();
    let value = (map, rows, buffers, vec![1u8; 40 << 20], 7u8);
    let bytes = encoded(&value);
    assert!(bytes.len() > 120 << 20);
    assert!(read::<Large>(&bytes) == value);
    let ordinary = (value.0, value.1, value.3, value.4);
    let config = bincode::config::standard().with_fixed_int_encoding();
    assert!(encoded(&ordinary) == bincode::serde::encode_to_vec(&ordinary, config).unwrap());
}

type Large = (HashMap<u64, String>, Vec<Vec<u32>>, Vec<(char, Buffer<u16>)>, Vec<u8>, u8);

#[test]
fn bytes_within_a_buffer_that_is_read_as_elements_are_those_that_lie_there() {
    // As a hostile writer might: a buffer whose one element is a byte string, and nothing else of its length before it.
    let mut bytes = head(1, 8 + 5000, 64);
    bytes.resize(64, 9);
    bytes.extend_from_slice(&5000u64.to_le_bytes());
    bytes.resize(64 + 8 + 5000, 7);
    let read: VecDeque<Bytes> = in_place(&stored(&bytes)).unwrap();
    assert_eq!(read[0], vec![7; 5000]);
}

#[test]
fn a_keeper_of_other_bytes_is_not_believed() {
    let bytes = encoded(&Buffer::from(vec![1u8; 5000]));
    let read: Buffer<u8> = decode_value_in_place(&bytes, &|| Bytes::from_static(b"other")).unwrap();
    assert_eq!(read, vec![1; 5000]);
}

#[test]
fn a_buffer_and_a_vector_are_read_as_each_other() {
    for count in [0, 1, 1000, 2000] {
        let numbers: Vec<f32> = (0..count).map(|n| n as f32).collect();
        let buffer = Buffer::from(numbers.clone());
        let of_buffer = encoded(&(buffer.clone(), 7u8));
        assert_eq!(read::<(Vec<f32>, u8)>(&of_buffer), (numbers.clone(), 7));
        assert_eq!(read::<(VecDeque<f32>, u8)>(&of_buffer), (numbers.iter().copied().collect(), 7));
        assert_eq!(read::<(Buffer<f32>, u8)>(&encoded(&(numbers, 7u8))), (buffer, 7));
        assert!(decode_value::<(VecDeque<u16>, u8)>(&of_buffer).is_err() || count == 0);
    }
}

#[test]
fn to_other_serializers_a_buffer_is_a_sequence() {
    let buffer = Buffer::from((0..3000u16).collect::<Vec<_>>());
    let json = serde_json::to_string(&buffer).unwrap();
    assert!(json.starts_with("[0,1,2,"));
    assert_eq!(serde_json::from_str::<Buffer<u16>>(&json).unwrap(), buffer);
    let config = bincode::config::standard();
    let plain = bincode::serde::encode_to_vec(&buffer, config).unwrap();
    assert_eq!(plain, bincode::serde::encode_to_vec(buffer.to_vec(), config).unwrap());
    assert_eq!(bincode::serde::decode_from_slice::<Buffer<u16>, _>(&plain, config).unwrap().0, buffer);
}

#[test]
fn bytes_stay_where_they_are() {
    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Image {
        #[serde(with = "wingbeat_core::buffer::bytes")]
        pixels: Bytes,
        also: Bytes,
        small: Bytes,
    }
    let image = Image { pixels: vec![1; 9000].into(), also: vec![2; 20_000].into(), small: vec![3; 5000].into() };
    let at = stored(&encoded(&image));
    let read: Image = in_place(&at).unwrap();
    assert_eq!(read, image);
    let within = |bytes: &Bytes| at.as_ptr_range().contains(&bytes.as_ptr());
    assert!(within(&read.pixels) && within(&read.also));
    // It would keep the others, too.
    assert!(!within(&read.small));
    let alone = stored(&encoded(&image.also));
    let read: Bytes = in_place(&alone).unwrap();
    assert!(read == image.also && alone.as_ptr_range().contains(&read.as_ptr()));
    assert_eq!(decode_value::<Vec<u8>>(&alone).unwrap(), image.also);
}

#[test]
fn maps_of_numbers_come_back() {
    for count in [0, 1, if cfg!(miri) { 70 } else { 70_000 }] {
        comes_back(&(0..count).map(|n| (n, n as f64)).collect::<HashMap<u64, f64>>());
        comes_back(&(0..count as i32).map(|n| (-n, n as f32)).collect::<HashMap<i32, f32>>());
        comes_back(&((0..count as u8).map(|n| (n, n)).collect::<HashMap<u8, u8>>(), 7u8));
    }
    // Twice the same key, and fewer entries than it claims.
    let twice = encoded(&vec![(7u64, 1.0f64), (7, 2.0)]);
    assert_eq!(read::<HashMap<u64, f64>>(&twice), HashMap::from([(7, 2.0)]));
    assert!(decode_value::<HashMap<u64, f64>>(&twice[..twice.len() - 1]).is_err());
    assert!(decode_value::<HashMap<u64, f64>>(&(1u64 << 59).to_le_bytes()).is_err());
}

/// Halves of numbers, which are doubled when they are read.
#[derive(PartialEq, Debug)]
struct Halved(Vec<f32>);

impl Serialize for Halved {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|number| number / 2.0))
    }
}

impl<'de> Deserialize<'de> for Halved {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Doubling;
        impl<'de> Visitor<'de> for Doubling {
            type Value = Vec<f32>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("numbers")
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut numbers: A) -> Result<Vec<f32>, A::Error> {
                let mut doubled = Vec::new();
                while let Some(number) = numbers.next_element::<f32>()? {
                    doubled.push(number * 2.0);
                }
                Ok(doubled)
            }
        }
        deserializer.deserialize_seq(Doubling).map(Halved)
    }
}

#[test]
fn a_visitor_of_a_users_own_is_not_passed_over() {
    comes_back(&Halved(vec![2.0, 4.0]));
    assert_eq!(read::<Vec<f32>>(&encoded(&Halved(vec![2.0, 4.0]))), [1.0, 2.0]);
}

#[test]
fn a_buffer_shares_its_elements_until_it_is_changed() {
    let mut buffer = Buffer::from(vec![1u64; 1000]);
    let other = buffer.clone();
    assert_eq!(buffer.as_ptr(), other.as_ptr());
    buffer.to_mut()[0] = 2;
    assert_eq!((buffer[0], other[0]), (2, 1));
    let at = other.as_ptr();
    let taken = other.into_vec();
    assert_eq!(taken.as_ptr(), at);
    let read: Buffer<u64> = in_place(&stored(&encoded(&buffer))).unwrap();
    assert!(read.is_elsewhere());
    let mut changed = read.clone();
    changed.to_mut().push(3);
    assert_eq!((changed.len(), read.len(), read.into_vec().len()), (1001, 1000, 1000));
}

#[test]
fn sequences_of_nothing_are_not_read_for_ever() {
    let count = |count: u64| count.to_le_bytes();
    assert_eq!(decode_value::<Vec<()>>(&count(1000)).unwrap().len(), 1000);
    assert!(decode_value::<Vec<()>>(&count(1 << 60)).is_err());
    assert!(decode_value::<Vec<()>>(&count(u64::MAX)).is_err());
}

#[derive(Serialize, Deserialize, PartialEq, Debug, Default)]
struct Sometimes {
    first: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    last: u32,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
enum SometimesOf {
    Here {
        #[serde(skip_serializing_if = "Vec::is_empty")]
        items: Vec<u8>,
        last: u32,
    },
}

#[test]
fn a_field_that_is_left_out_this_time_is_an_error() {
    comes_back(&Sometimes { note: Some("here".to_owned()), ..Sometimes::default() });
    comes_back(&SometimesOf::Here { items: vec![1], last: 2 });
    let why = |error: Option<wingbeat_core::codec::CodecError>| error.unwrap().0;
    let of_struct = why(encode_value(&vec![Sometimes::default()]).err());
    assert!(of_struct.contains("field `note`") && of_struct.contains("skip_serializing_if"), "{of_struct}");
    let of_variant = why(encode_value(&SometimesOf::Here { items: vec![], last: 2 }).err());
    assert!(of_variant.contains("field `items`"), "{of_variant}");
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Never {
    first: u32,
    #[serde(skip)]
    here_alone: Option<String>,
    last: u32,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
enum SkipsTheLast {
    First(u8),
    Second(u8),
    #[serde(skip)]
    #[allow(dead_code, reason = "it is never written")]
    HereAlone(u8),
}

#[test]
fn what_is_always_left_out_is_no_field_of_either_side() {
    comes_back(&Never { first: 1, here_alone: None, last: 2 });
    comes_back(&vec![SkipsTheLast::First(1), SkipsTheLast::Second(2)]);
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
enum SkipsTheFirst {
    #[serde(skip)]
    #[allow(dead_code, reason = "it is never written")]
    HereAlone(u8),
    Second(u8),
    Third(u8),
}

/// Why the guide says that skipped variants come last: derived serde counts them when it writes, and not when it reads.
#[test]
fn behind_a_skipped_variant_each_is_read_as_the_next() {
    assert_eq!(read::<SkipsTheFirst>(&encoded(&SkipsTheFirst::Second(1))), SkipsTheFirst::Third(1));
    decode_value::<SkipsTheFirst>(&encoded(&SkipsTheFirst::Third(1))).unwrap_err();
}
