//! What NCCL calls numbers and operations.

use std::ffi::c_int;

use cudarc::driver::DeviceRepr;
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use half::{bf16, f16};
use wingbeat_collective::{Element, Op};

/// A number that devices reduce and send: as [`Element`], but for the integers of 16 bits, which NCCL does not know.
pub trait DeviceElement: Element + DeviceRepr + sealed::Named {}

impl<T: Element + DeviceRepr + sealed::Named> DeviceElement for T {}

mod sealed {
    pub trait Named {
        const TYPE: super::ncclDataType_t;
    }
}

macro_rules! named {
    ($($type:ty: $name:ident),*) => {
        $(impl sealed::Named for $type {
            const TYPE: ncclDataType_t = ncclDataType_t::$name;
        })*
    };
}

named!(
    i8: ncclInt8, u8: ncclUint8, i32: ncclInt32, u32: ncclUint32, i64: ncclInt64, u64: ncclUint64,
    f16: ncclFloat16, bf16: ncclBfloat16, f32: ncclFloat32, f64: ncclFloat64
);

pub(crate) fn type_of<T: DeviceElement>() -> c_int {
    <T as sealed::Named>::TYPE as c_int
}

pub(crate) fn number_of(op: Op) -> c_int {
    let op = match op {
        Op::Sum => ncclRedOp_t::ncclSum,
        Op::Product => ncclRedOp_t::ncclProd,
        Op::Min => ncclRedOp_t::ncclMin,
        Op::Max => ncclRedOp_t::ncclMax,
        Op::Avg => ncclRedOp_t::ncclAvg,
    };
    op as c_int
}
