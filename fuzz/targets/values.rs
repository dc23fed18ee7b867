//! Users' values, as types that they are not.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use wingbeat_core::codec::{decode_plain, decode_value};

fuzz_target!(|data: &[u8]| {
    let _ = decode_value::<String>(data);
    let _ = decode_value::<Vec<f32>>(data);
    let _ = decode_value::<(String, Vec<u8>, Option<Box<str>>)>(data);
    let _ = decode_value::<BTreeMap<String, Vec<(u32, Option<String>)>>>(data);
    let _ = decode_plain::<f64>(data);
});
