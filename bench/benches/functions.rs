//! Single functions of the hot path: `cargo bench -p wingbeat-bench`.

#![allow(clippy::unwrap_used, reason = "a bench that cannot go on fails")]

use bytes::BytesMut;
use divan::{Bencher, black_box};
use wingbeat::put;
use wingbeat_core::codec;
use wingbeat_core::spec::{Arg, Outputs, Shape, TaskSpec};
use wingbeat_core::value::Packed;
use wingbeat_core::{Amount, ClusterId, FunctionId, LeaseId, ObjectId, ProcessId, ResourceSet, TaskId};
use wingbeat_head::state::{Event, State};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Work};
use wingbeat_store::{NodeStore, StoreConfig};

fn main() {
    // Refs need a session.
    wingbeat::init_blocking().unwrap();
    divan::main();
    wingbeat::shutdown_blocking();
}

/// A push of so many tasks with one small argument each.
fn push(tasks: u64) -> PeerMessage {
    let spec = |seq| TaskSpec {
        id: TaskId { owner: ProcessId(1), seq },
        function: FunctionId(7),
        name: None,
        args: vec![Arg::Value(Packed::plain(vec![7; 8].into()))],
        outputs: Outputs::Fixed(1),
        attempt: 0,
        remakes: false,
        yields_memory: false,
        shares_process: false,
        group: None,
        parent: None,
    };
    Work::Tasks { lease: LeaseId(1), first: 0, tasks: (0..tasks).map(|seq| spec(seq).into()).collect() }.into()
}

#[divan::bench(args = [1, 100])]
fn encode_tasks(bencher: Bencher<'_, '_>, tasks: u64) {
    let message = push(tasks);
    let mut out = BytesMut::with_capacity(1 << 20);
    bencher.bench_local(|| {
        out.clear();
        codec::encode_message(black_box(&message), &mut out).unwrap();
    });
}

#[divan::bench(args = [1, 100])]
fn decode_tasks(bencher: Bencher<'_, '_>, tasks: u64) {
    let mut out = BytesMut::new();
    codec::encode_message(&push(tasks), &mut out).unwrap();
    let frame = out.freeze();
    bencher.bench_local(|| codec::decode_message::<PeerMessage>(black_box(frame.clone())).unwrap());
}

#[divan::bench]
fn head_takes_in_a_demand(bencher: Bencher<'_, '_>) {
    let mut state = State::new(ClusterId(1), 1);
    state.step(0, Event::ProcessConnected(ProcessId(1)));
    let shape = Shape::of(ResourceSet::cpus(Amount::ONE));
    let mut wanted = 0;
    bencher.bench_local(|| {
        wanted = 1 + wanted % 64;
        state.step(
            1,
            Event::Says(ProcessId(1).into(), HeadMessage::Demand { shape: shape.clone(), wanted, name: String::new() }),
        )
    });
}

#[divan::bench(args = [200 << 10, 4 << 20])]
fn store_create_seal_delete(bencher: Bencher<'_, '_>, bytes: u64) {
    let store = NodeStore::new(StoreConfig {
        capacity: 64 << 20,
        spill_dir: None,
        spill_capacity: 0,
        write_ahead_above: u64::MAX,
    })
    .unwrap();
    let process = ProcessId(1);
    let _arena = store.attach(process);
    let mut seq = 0;
    bencher.bench_local(|| {
        seq += 1;
        let id = ObjectId { task: TaskId { owner: process, seq }, index: 0 };
        store.create(id, bytes, process).unwrap();
        store.seal(id, process).unwrap();
        store.delete(id);
    });
}

#[divan::bench]
fn ref_clone_and_drop(bencher: Bencher<'_, '_>) {
    let object = put(&7u64).unwrap();
    bencher.bench_local(|| drop(black_box(object.clone())));
}

#[divan::bench]
fn put_and_free(bencher: Bencher<'_, '_>) {
    bencher.bench_local(|| drop(put(black_box(&7u64)).unwrap()));
}
