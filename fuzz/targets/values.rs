//! Users' values, as types that they are not.

#![no_main]

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use wingbeat_core::Buffer;
use wingbeat_core::codec::{decode_plain, decode_value, decode_value_in_place};

fuzz_target!(|data: &[u8]| {
    let _ = decode_value::<String>(data);
    let _ = decode_value::<Vec<f32>>(data);
    let _ = decode_value::<(String, Vec<u8>, Option<Box<str>>)>(data);
    let _ = decode_value::<BTreeMap<String, Vec<(u32, Option<String>)>>>(data);
    let _ = decode_value::<Vec<Buffer<f32>>>(data);
    let _ = decode_value::<(Buffer<u64>, VecDeque<u16>, Option<Buffer<[u8; 3]>>, Bytes)>(data);
    let kept = || Bytes::copy_from_slice(data);
    let _ = decode_value_in_place::<BTreeMap<u8, Buffer<f64>>>(data, &kept);
    let _ = decode_value_in_place::<Vec<(Bytes, Buffer<u8>)>>(data, &kept);
    let _ = decode_plain::<f64>(data);
});
