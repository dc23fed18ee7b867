//! A run's metrics in its storage: lines of JSON for programs, and events for TensorBoard.
//!
//! TensorBoard's files are TFRecords (a length, its checksum, the bytes, their checksum) of `Event` messages
//! (tensorflow/core/util/event.proto); the few fields that are needed are written here by hand.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use futures::future::BoxFuture;
use serde_json::{Map, Value};

use crate::storage::{Claim, Result};

const LINES: &str = "metrics.jsonl";
/// What is kept back where each write makes another object.
const BATCH: usize = 64 << 10;
/// While so much waits to be written, what comes is not kept.
const LIMIT: usize = 16 << 20;

/// Writes the metrics of one attempt.
pub(crate) struct Recorder {
    attempt: u32,
    /// How often ranks were launched before. What comes after a checkpoint is reported again after a move or a growth, in the same attempt:
    /// of such reports, those of the last launch count.
    launch: u32,
    events_file: String,
    waiting: Batch,
    /// What comes after [`waiting`](Self::waiting), a batch with each checkpoint that is stored, or cannot be: a report that waits for its
    /// checkpoint has it, or an error, before anybody reads its metrics.
    held: VecDeque<Batch>,
    /// Whether a batch is being written.
    writes: bool,
    count: u64,
    /// Reports of which the metrics were not kept: too much waited already.
    missed: u64,
}

/// Metrics as they are written.
#[derive(Default)]
struct Batch {
    lines: Vec<u8>,
    events: Vec<u8>,
}

/// What came of writing a batch.
pub(crate) struct Recorded {
    /// What is still to be written.
    left: Batch,
    result: Result<()>,
}

impl Recorder {
    pub(crate) fn new(attempt: u32, launch: u32) -> Recorder {
        let now = now();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut events = Vec::new();
        record(&mut events, &[double(1, now), text(3, b"brain.Event:2")].concat());
        Recorder {
            attempt,
            launch,
            events_file: format!("events.out.tfevents.{}.{host}.{}", now as u64, std::process::id()),
            waiting: Batch { lines: Vec::new(), events },
            held: VecDeque::new(),
            writes: false,
            count: 0,
            missed: 0,
        }
    }

    /// Takes what rank 0 has reported. Its step is the metric `step`, or else how many reports were before it. It may wait
    /// until the checkpoint of the report [is stored](Recorder::stored).
    pub(crate) fn add(&mut self, metrics: &BTreeMap<String, f64>, waits_for_checkpoint: bool) {
        let step = metrics.get("step").map_or(self.count, |step| *step as u64);
        self.count += 1;
        if self.waiting.lines.len() + self.held.iter().map(|batch| batch.lines.len()).sum::<usize>() > LIMIT {
            self.missed += 1;
            return;
        }
        let now = now();
        let mut line = Map::new();
        for (name, value) in metrics {
            // JSON has no infinity.
            let number = serde_json::Number::from_f64(*value);
            line.insert(name.clone(), number.map_or_else(|| Value::String(value.to_string()), Value::Number));
        }
        // Also where a rank gives a metric one of these names.
        line.insert("time".into(), now.into());
        line.insert("attempt".into(), self.attempt.into());
        line.insert("launch".into(), self.launch.into());
        if waits_for_checkpoint {
            self.held.push_back(Batch::default());
        }
        let batch = self.held.back_mut().unwrap_or(&mut self.waiting);
        batch.lines.extend_from_slice(Value::Object(line).to_string().as_bytes());
        batch.lines.push(b'\n');
        let values: Vec<u8> = metrics
            .iter()
            .filter(|(name, _)| *name != "step")
            .flat_map(|(name, value)| bytes(1, &[text(1, name.as_bytes()), float(2, *value as f32)].concat()))
            .collect();
        record(&mut batch.events, &[double(1, now), number(2, step), bytes(5, &values)].concat());
    }

    /// The first checkpoint that metrics wait for is stored, or cannot be.
    pub(crate) fn stored(&mut self) {
        if let Some(mut batch) = self.held.pop_front() {
            self.waiting.lines.append(&mut batch.lines);
            self.waiting.events.append(&mut batch.events);
        }
    }

    /// No checkpoint is awaited any more.
    pub(crate) fn all_stored(&mut self) {
        while !self.held.is_empty() {
            self.stored();
        }
    }

    /// Begins to write what there is; unless `all`, only if it is enough. None if that is too little, or the last batch is
    /// still being written. What comes of it is for [`Recorder::recorded`].
    pub(crate) fn write(&mut self, claim: Arc<Claim>, all: bool) -> Option<BoxFuture<'static, Recorded>> {
        let is_enough = all || !claim.storage().makes_objects() || self.waiting.lines.len() >= BATCH;
        if self.writes || self.waiting.lines.is_empty() || !is_enough {
            return None;
        }
        self.writes = true;
        let (mut left, file) = (std::mem::take(&mut self.waiting), self.events_file.clone());
        Some(Box::pin(async move {
            let result = async {
                claim.storage().append(&file, &left.events).await?;
                left.events.clear();
                claim.storage().append(LINES, &left.lines).await?;
                left.lines.clear();
                Ok(())
            };
            let result = result.await;
            Recorded { left, result }
        }))
    }

    /// A batch was written, or could not be: then it is tried again with the next.
    pub(crate) fn recorded(&mut self, Recorded { mut left, result }: Recorded) -> Result<()> {
        self.writes = false;
        left.lines.append(&mut self.waiting.lines);
        left.events.append(&mut self.waiting.events);
        self.waiting = left;
        result
    }

    /// Of how many reports the metrics are missing in what was written since this was asked last.
    pub(crate) fn take_missed(&mut self) -> u64 {
        std::mem::take(&mut self.missed)
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn record(into: &mut Vec<u8>, data: &[u8]) {
    let masked = |bytes: &[u8]| crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let length = (data.len() as u64).to_le_bytes();
    into.extend_from_slice(&length);
    into.extend_from_slice(&masked(&length));
    into.extend_from_slice(data);
    into.extend_from_slice(&masked(data));
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

fn double(field: u64, value: f64) -> Vec<u8> {
    [varint(field << 3 | 1), value.to_le_bytes().to_vec()].concat()
}

fn float(field: u64, value: f32) -> Vec<u8> {
    [varint(field << 3 | 5), value.to_le_bytes().to_vec()].concat()
}

fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

fn text(field: u64, value: &[u8]) -> Vec<u8> {
    bytes(field, value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::Storage;

    #[test]
    fn events_begin_as_every_file_of_tensorboard_s() {
        let begin = Recorder::new(0, 0).waiting.events;
        // The length of the first event, 24 bytes, its masked checksum, and the tag of its time.
        assert_eq!(begin[..13], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22, 0x09]);
        assert_eq!(begin[21..36], *b"\x1a\x0dbrain.Event:2");
        assert_eq!(begin.len(), 12 + 24 + 4);
        assert_eq!(varint(300), [0xac, 0x02]);
    }

    #[tokio::test]
    async fn metrics_are_lines_of_json() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claim = Claim::new(&storage, "test", &|_| (), std::future::pending()).await.unwrap().unwrap();
        let (claim, mut recorder) = (Arc::new(claim), Recorder::new(1, 3));
        recorder.add(&BTreeMap::from([("loss".into(), 0.5), ("step".into(), 7.0)]), false);
        let first = recorder.write(claim.clone(), false).unwrap().await;
        recorder.add(&BTreeMap::from([("loss".into(), f64::INFINITY), ("attempt".into(), 7.0)]), false);
        assert!(recorder.write(claim.clone(), true).is_none(), "one batch after the other");
        recorder.recorded(first).unwrap();
        let second = recorder.write(claim, true).unwrap().await;
        recorder.recorded(second).unwrap();
        let text = std::fs::read_to_string(dir.path().join(LINES)).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines[0]["loss"].as_f64(), lines[0]["step"].as_f64()), (Some(0.5), Some(7.0)));
        assert_eq!((lines[1]["attempt"].as_u64(), lines[1]["loss"].as_str()), (Some(1), Some("inf")));
        assert_eq!(lines[1]["launch"].as_u64(), Some(3), "an attempt may be launched several times");
    }

    #[tokio::test]
    async fn metrics_with_a_checkpoint_and_those_after_them_wait_until_it_is_stored() {
        let dir = tempfile::tempdir().unwrap();
        let storage = Storage::open(&dir.path().display().to_string()).unwrap();
        let claim = Claim::new(&storage, "test", &|_| (), std::future::pending()).await.unwrap().unwrap();
        let (claim, mut recorder) = (Arc::new(claim), Recorder::new(0, 0));
        recorder.add(&BTreeMap::from([("loss".into(), 1.0)]), true);
        recorder.add(&BTreeMap::from([("loss".into(), 2.0)]), false);
        recorder.add(&BTreeMap::from([("loss".into(), 3.0)]), true);
        assert!(recorder.write(claim.clone(), false).is_none());
        recorder.stored();
        let written = recorder.write(claim.clone(), false).unwrap().await;
        recorder.recorded(written).unwrap();
        assert!(recorder.write(claim.clone(), false).is_none(), "the other checkpoint is not stored");
        recorder.all_stored();
        let written = recorder.write(claim, true).unwrap().await;
        recorder.recorded(written).unwrap();
        let text = std::fs::read_to_string(dir.path().join(LINES)).unwrap();
        let losses = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap());
        assert_eq!(losses.collect::<Vec<_>>(), [1.0, 2.0, 3.0]);
    }
}
