//! Values as people have them: 64 MiB each, put and got by one process.

use std::collections::HashMap;
use std::hint::black_box;

use anyhow::ensure;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wingbeat::{ArrayBuffer, Buffer, put};

use super::Figures;
use crate::measure::repeated;
use crate::report::{Figure, Must};

const SIZE: usize = 64 << 20;
const FLOATS: usize = SIZE / 4;
/// Elements of a page: what was got is looked at once a page, as any reader would at least.
const A_PAGE: usize = 1024;
const ROW: usize = 64 << 10;

/// What putting and getting must reach where nothing but the elements themselves is copied, and only on the way in: a get takes 200 µs.
const OF_BUFFERS: [Must; 2] = [Must::Of("limit_memcpy", 0.8), Must::Reach(SIZE as f64 / 200e-6 / 1e9)];
/// The same of ordinary values of serde.
const OF_VECTORS: [Must; 2] = [Must::Reach(2.5), Must::Reach(2.0)];
/// Each row is memory of its own, too little for huge pages: in a driver, its page faults cost more than the copy, or nothing
/// where the allocator has kept it.
const OF_ROWS: [Must; 2] = [Must::Reach(2.5), Must::Nothing];

async fn put_and_get<T>(names: [&'static str; 2], must: [Must; 2], value: T, is_right: impl Fn(&T) -> bool) -> Figures
where
    T: Serialize + DeserializeOwned + Send + 'static,
{
    let puts = repeated(async || {
        drop(put(&value)?);
        Ok(())
    })
    .await?;
    let object = put(&value)?;
    drop(value);
    let gets = repeated(async || {
        let got = object.get().await?;
        ensure!(is_right(black_box(&got)));
        Ok(())
    })
    .await?;
    Ok(vec![
        Figure::bandwidth(names[0], SIZE as u64, &puts, must[0]),
        Figure::bandwidth(names[1], SIZE as u64, &gets, must[1]),
    ])
}

fn ones(count: usize) -> Vec<f32> {
    vec![1.0; count]
}

fn are_ones(floats: &[f32]) -> bool {
    floats.iter().step_by(A_PAGE).all(|float| *float == 1.0)
}

pub(super) async fn value_vec() -> Figures {
    let must = [Must::Of("limit_memcpy", 0.5), Must::Reach(2.0)];
    put_and_get(["value_vec_put", "value_vec_get"], must, ones(FLOATS), |got| is_right(got)).await
}

fn is_right(floats: &[f32]) -> bool {
    floats.len() == FLOATS && are_ones(floats)
}

#[derive(Serialize, Deserialize)]
struct Recording {
    name: String,
    rate: u32,
    samples: Buffer<f32>,
}

pub(super) async fn value_struct() -> Figures {
    let value = Recording { name: "left".to_owned(), rate: 48_000, samples: ones(FLOATS).into() };
    put_and_get(["value_struct_put", "value_struct_get"], OF_BUFFERS, value, |got| {
        got.name == "left" && got.rate == 48_000 && is_right(&got.samples)
    })
    .await
}

pub(super) async fn value_nested() -> Figures {
    let value: Vec<Buffer<f32>> = (0..FLOATS / ROW).map(|_| ones(ROW).into()).collect();
    put_and_get(["value_nested_put", "value_nested_get"], OF_BUFFERS, value, |got| {
        got.len() == FLOATS / ROW && got.iter().all(|row| row.len() == ROW && are_ones(row))
    })
    .await
}

pub(super) async fn value_ndarray() -> Figures {
    let value = ArrayBuffer::from(ndarray::Array2::<f32>::ones((FLOATS / ROW, ROW)));
    put_and_get(["value_ndarray_put", "value_ndarray_get"], OF_BUFFERS, value, |got| {
        got.shape() == [FLOATS / ROW, ROW] && are_ones(got.elements()) && got.view()[(7, 7)] == 1.0
    })
    .await
}

pub(super) async fn value_bytes() -> Figures {
    let value = Buffer::from(vec![1u8; SIZE]);
    put_and_get(["value_bytes_put", "value_bytes_get"], OF_BUFFERS, value, |got| are_one(got)).await
}

#[derive(Serialize, Deserialize)]
struct Samples {
    name: String,
    rate: u32,
    samples: Vec<f32>,
}

/// A struct, vectors in a vector, and `Bytes`, without a buffer in them.
pub(super) async fn value_serde() -> Figures {
    let value = Samples { name: "left".to_owned(), rate: 48_000, samples: ones(FLOATS) };
    let mut figures = put_and_get(["value_serde_put", "value_serde_get"], OF_VECTORS, value, |got| {
        got.name == "left" && got.rate == 48_000 && is_right(&got.samples)
    })
    .await?;
    let value: Vec<Vec<f32>> = (0..FLOATS / ROW).map(|_| ones(ROW)).collect();
    figures.extend(
        put_and_get(["value_serde_nested_put", "value_serde_nested_get"], OF_ROWS, value, |got| {
            got.len() == FLOATS / ROW && got.iter().all(|row| row.len() == ROW && are_ones(row))
        })
        .await?,
    );
    let value = (7u32, Bytes::from(vec![1u8; SIZE]));
    figures.extend(
        put_and_get(["value_serde_bytes_put", "value_serde_bytes_get"], OF_VECTORS, value, |got| are_one(&got.1))
            .await?,
    );
    Ok(figures)
}

fn are_one(bytes: &[u8]) -> bool {
    bytes.len() == SIZE && bytes.iter().step_by(4 * A_PAGE).all(|byte| *byte == 1)
}

/// A hash map is written entry by entry, and made anew by its reader: hashing costs more than all the rest.
pub(super) async fn value_map() -> Figures {
    const ENTRIES: u64 = (SIZE / 16) as u64;
    let value: HashMap<u64, f64> = (0..ENTRIES).map(|i| (i, i as f64)).collect();
    put_and_get(["value_map_put", "value_map_get"], [Must::Reach(2.5), Must::Reach(2.0)], value, |got| {
        got.len() as u64 == ENTRIES && got[&7] == 7.0
    })
    .await
}
