//! Arrays of the crate `ndarray` as values.

#![cfg(feature = "ndarray")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::future::IntoFuture;

use ndarray::{Array, Array2, ArrayD, Axis, Ix2, IxDyn, s};
use wingbeat::{ArrayBuffer, block_on, put};
use wingbeat_core::codec::{decode_value, encode_value};

#[wingbeat::remote]
fn column_sums(matrix: ArrayBuffer<f64, Ix2>) -> ArrayBuffer<f64> {
    matrix.view().sum_axis(Axis(0)).into_dyn().into()
}

fn matrix(rows: usize, columns: usize) -> Array2<f64> {
    Array::from_shape_fn((rows, columns), |(row, column)| (row * columns + column) as f64)
}

#[test]
fn an_array_is_an_argument_and_a_result() {
    let init = wingbeat::init().num_cpus(1).global(false).log_to_driver(false);
    let session = block_on(init.into_future()).unwrap();
    let entered = session.enter();
    for (rows, columns) in [(0, 3), (3, 1), (300, 400)] {
        let array = matrix(rows, columns);
        let buffer = ArrayBuffer::from(array.clone());
        let object = put(&buffer).unwrap();
        let got = object.get_blocking().unwrap();
        assert_eq!((got.view(), got.elements().is_elsewhere()), (array.view(), rows == 300));
        let sums = column_sums::remote(&object).get_blocking().unwrap();
        assert_eq!(sums.into_array(), array.sum_axis(Axis(0)).into_dyn());
    }
    drop(entered);
    block_on(session.shutdown());
}

#[test]
fn an_array_is_taken_as_it_lies_or_in_its_order() {
    let array = matrix(4, 6);
    let at = array.as_ptr();
    let taken = ArrayBuffer::from(array);
    assert_eq!(taken.elements().as_ptr(), at);
    assert_eq!(taken.into_array(), matrix(4, 6));
    let part = matrix(4, 6).slice_move(s![1..3, ..]);
    assert_eq!(ArrayBuffer::from(part.clone()).view(), part);
    let transposed = matrix(4, 6).reversed_axes();
    assert_eq!(ArrayBuffer::from(transposed.clone()).view(), transposed);
    let mirrored = matrix(4, 6).slice_move(s![.., ..;-1]);
    assert_eq!(ArrayBuffer::from(mirrored.clone()).view(), mirrored);
}

#[test]
fn a_shape_that_does_not_fit_is_an_error() {
    let read = |shape: &[u64], count: u16| {
        let elements: wingbeat::Buffer<u16> = (0..count).collect();
        let bytes = encode_value(&(shape.to_vec(), elements)).unwrap().into_bytes();
        (decode_value::<ArrayBuffer<u16, Ix2>>(&bytes).is_ok(), decode_value::<ArrayBuffer<u16, IxDyn>>(&bytes).is_ok())
    };
    assert_eq!(read(&[2, 3], 6), (true, true));
    assert_eq!(read(&[6], 6), (false, true));
    assert_eq!(read(&[], 1), (false, true));
    assert_eq!(read(&[2, 3], 5), (false, false));
    assert_eq!(read(&[2, 3], 7), (false, false));
    assert_eq!(read(&[u64::MAX, u64::MAX], 1), (false, false));
    assert_eq!(read(&[1 << 62, 0, 1 << 62], 0), (false, false));
    let array: ArrayD<u16> = ArrayD::zeros(vec![2, 2]);
    let bytes = encode_value(&ArrayBuffer::from(array)).unwrap().into_bytes();
    assert_eq!(decode_value::<ArrayBuffer<u16, Ix2>>(&bytes).unwrap().shape(), [2, 2]);
}
