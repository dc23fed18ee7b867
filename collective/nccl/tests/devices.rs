//! Groups of devices, with a pretended CUDA and a pretended NCCL under them: this test starts itself again where they are
//! found instead of the real ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use wingbeat_collective::{CollectiveError, Group, Op};
use wingbeat_nccl::cudarc::driver::CudaStream;
use wingbeat_nccl::{DeviceGroup, NcclError, device};

mod support;

const INSIDE: &str = "WINGBEAT_TEST_INSIDE";

/// Runs a test of this program where the pretended libraries are.
fn in_pretended_world(name: &str, test: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return test();
    }
    let this = std::env::current_exe().unwrap();
    // Cargo builds it for this test, beside it.
    let library: PathBuf = this.parent().unwrap().join("libwingbeat_pretended_nccl.so");
    let folder = tempfile::tempdir().unwrap();
    symlink(&library, folder.path().join("libcuda.so")).unwrap();
    let mut again = Command::new(&this);
    again.args(["--exact", name, "--nocapture"]).env(INSIDE, "1");
    again.env("LD_LIBRARY_PATH", folder.path()).env("WINGBEAT_NCCL", &library);
    let output = again.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

/// What two members do, each on its device.
fn on_devices<R: Send>(devices: [usize; 2], work: impl Fn(Group, Arc<CudaStream>) -> R + Sync) -> [R; 2] {
    support::pair(|group| {
        let stream = device(devices[group.rank() as usize]).unwrap().new_stream().unwrap();
        work(group, stream)
    })
}

#[test]
fn all_operations_move_data_between_devices() {
    in_pretended_world("all_operations_move_data_between_devices", || {
        on_devices([0, 1], |group, stream| {
            let mut group = DeviceGroup::join(group, stream.clone()).unwrap();
            let rank = group.rank();
            let own = rank as f32;
            let on_device = |values: &[f32]| stream.clone_htod(values).unwrap();
            let zeros = |count: usize| stream.alloc_zeros::<f32>(count).unwrap();

            let mut data = on_device(&[own + 1.0, 5.0]);
            group.all_reduce(&mut data, Op::Sum).unwrap();
            group.all_reduce(&mut data, Op::Avg).unwrap();
            group.wait().unwrap();
            assert_eq!(stream.clone_dtoh(&data).unwrap(), [3.0, 10.0]);

            let mut data = on_device(&[own + 2.0]);
            group.reduce(&mut data, Op::Product, 1).unwrap();
            assert_eq!(stream.clone_dtoh(&data).unwrap(), [if rank == 1 { 6.0 } else { 2.0 }]);
            group.reduce(&mut data, Op::Max, 0).unwrap();
            group.broadcast(&mut data, 0).unwrap();
            assert_eq!(stream.clone_dtoh(&data).unwrap(), [6.0]);

            let (mine, mut all) = (on_device(&[own, 7.0]), zeros(4));
            group.all_gather(&mine, &mut all).unwrap();
            assert_eq!(stream.clone_dtoh(&all).unwrap(), [0.0, 7.0, 1.0, 7.0]);

            let mut part = zeros(2);
            group.reduce_scatter(&all, &mut part, Op::Sum).unwrap();
            assert_eq!(stream.clone_dtoh(&part).unwrap(), [own * 2.0, 14.0]);

            let (out, mut into) = (on_device(&[own * 10.0, own * 10.0 + 1.0]), zeros(2));
            group.all_to_all(&out, &mut into).unwrap();
            assert_eq!(stream.clone_dtoh(&into).unwrap(), [own, 10.0 + own]);

            let mut got = zeros(1);
            match rank {
                0 => group.send(&on_device(&[42.0]), 1).unwrap(),
                _ => group.recv(&mut got, 0).unwrap(),
            }
            assert_eq!(stream.clone_dtoh(&got).unwrap(), [if rank == 1 { 42.0 } else { 0.0 }]);
            group.wait().unwrap();
            // And for what is not on devices.
            let mut sum = [rank];
            group.host().all_reduce(&mut sum, Op::Sum).unwrap();
            assert_eq!(sum, [1]);
        });
    });
}

#[test]
fn what_does_not_match_is_named_before_a_device_hangs_with_it() {
    in_pretended_world("what_does_not_match_is_named_before_a_device_hangs_with_it", || {
        let errors = on_devices([0, 1], |group, stream| {
            let mut group = DeviceGroup::join(group, stream.clone()).unwrap();
            let count = 4 + group.rank() as usize;
            let mut data = stream.alloc_zeros::<f32>(count).unwrap();
            group.all_reduce(&mut data, Op::Sum).unwrap_err().to_string()
        });
        assert!(errors[0].starts_with("rank 1 calls all_reduce of 5 f32 (sum) on devices"), "{errors:?}");
    });
}

#[test]
fn a_member_that_dies_ends_what_others_have_on_their_devices() {
    in_pretended_world("a_member_that_dies_ends_what_others_have_on_their_devices", || {
        let [error, _] = on_devices([0, 1], |group, stream| {
            let mut group = DeviceGroup::join(group, stream.clone()).unwrap();
            let mut data = stream.alloc_zeros::<f32>(4).unwrap();
            if group.rank() == 1 {
                // It agrees to it, and is gone before its device has begun.
                group.host().agree::<f32>(wingbeat_collective::Call::AllReduce(Op::Sum), 4).unwrap();
                return None;
            }
            group.all_reduce(&mut data, Op::Sum).unwrap();
            // Not only who waits for the group goes on, but also who waits for its stream.
            stream.synchronize().unwrap();
            Some(group.wait().unwrap_err())
        });
        assert_eq!(error, Some(NcclError::Group(CollectiveError::PeerLost { rank: 1 })));
    });
}

#[test]
fn two_members_on_one_device_are_refused() {
    in_pretended_world("two_members_on_one_device_are_refused", || {
        let errors = on_devices([1, 1], |group, stream| DeviceGroup::join(group, stream).err());
        assert_eq!(errors, [(); 2].map(|()| Some(NcclError::SameDevice { first: 0, second: 1 })));
    });
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    in_pretended_world("a_device_that_is_not_there_is_an_error", || {
        let error = device(7).unwrap_err().to_string();
        assert!(error.starts_with("CUDA failed in opening a device"), "{error}");
    });
}
