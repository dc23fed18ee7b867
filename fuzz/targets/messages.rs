//! Everything that a connection decodes. Deadlines are set to what a connection limits them to.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use tarpc::{ClientMessage, Response};
use wingbeat_core::codec::decode_message;
use wingbeat_net::handshake::{Hello, Welcome};
use wingbeat_net::services::{
    HeadRequest, HeadResponse, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse, StandbyRequest, StandbyResponse,
};

fuzz_target!(|data: &[u8]| {
    let answer = Bytes::copy_from_slice(data);
    let mut request = data.to_vec();
    if let Some(seconds) = request.get_mut(8..16) {
        seconds.copy_from_slice(&60u64.to_le_bytes());
    }
    let request = Bytes::from(request);
    let _ = decode_message::<ClientMessage<HeadRequest>>(request.clone());
    let _ = decode_message::<ClientMessage<NodeRequest>>(request.clone());
    let _ = decode_message::<ClientMessage<StandbyRequest>>(request.clone());
    let _ = decode_message::<ClientMessage<ProcessRequest>>(request);
    let _ = decode_message::<Response<HeadResponse>>(answer.clone());
    let _ = decode_message::<Response<NodeResponse>>(answer.clone());
    let _ = decode_message::<Response<StandbyResponse>>(answer.clone());
    let _ = decode_message::<Response<ProcessResponse>>(answer.clone());
    let _ = decode_message::<Hello>(answer.clone());
    let _ = decode_message::<Welcome>(answer);
});
