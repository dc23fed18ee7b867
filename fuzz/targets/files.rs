//! What is read from files: the facts of a journal, and the steps of recordings.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use wingbeat_core::codec::decode_message;
use wingbeat_head::state as head;
use wingbeat_node as node;
use wingbeat_process::recorded as process;

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::copy_from_slice(data);
    let _ = decode_message::<head::FactKey>(bytes.clone());
    if let Ok(fact) = decode_message::<head::Fact>(bytes.clone()) {
        let _ = (fact.key(), fact.is_end());
    }
    let _ = decode_message::<head::Beginning>(bytes.clone());
    let _ = decode_message::<head::Input>(bytes.clone());
    let _ = decode_message::<node::Config>(bytes.clone());
    let _ = decode_message::<node::Event>(bytes.clone());
    let _ = decode_message::<process::Beginning>(bytes.clone());
    let _ = decode_message::<process::Event>(bytes);
});
