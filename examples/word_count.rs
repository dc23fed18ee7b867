//! Map-reduce over real text: counts the words of every Rust source that cargo downloaded on this machine.
//!
//! Map tasks read files and answer with one table a partition, as a ref each; reduce tasks take the refs of their
//! partition. The driver sees file names, refs, and the top words: the text and the tables never pass through it.
//!
//! ```text
//! word_count [--min-mb N] [--limit-mb N] [--check] [--json FILE]
//! ```

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use wingbeat::prelude::*;

/// Partitions of the words, each reduced by one task.
const PARTITIONS: usize = 4;
/// Text that one map task reads, in bytes.
const CHUNK: u64 = 2 << 20;

type Table = HashMap<String, u64>;

#[wingbeat::remote]
fn map(files: Vec<PathBuf>) -> Result<Vec<ObjectRef<Table>>, String> {
    let mut tables = vec![Table::new(); PARTITIONS];
    for file in files {
        let text = std::fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        count_words(&text, |word| {
            let table = &mut tables[partition_of(word)];
            match table.get_mut(word) {
                Some(count) => *count += 1,
                None => drop(table.insert(word.to_owned(), 1)),
            }
        });
    }
    tables.iter().map(|table| put(table).map_err(|error| error.to_string())).collect()
}

/// What is known of a partition.
#[derive(Serialize, Deserialize)]
struct Reduced {
    words: u64,
    distinct: u64,
    /// Of every word with its count.
    checksum: u64,
    /// Its most frequent words.
    top: Vec<(String, u64)>,
}

#[wingbeat::remote]
fn reduce(tables: Vec<ObjectRef<Table>>) -> Result<Reduced, String> {
    let mut sum = Table::new();
    for table in tables {
        for (word, count) in table.get_blocking().map_err(|error| error.to_string())? {
            *sum.entry(word).or_default() += count;
        }
    }
    let words = sum.values().sum();
    let distinct = sum.len() as u64;
    let checksum = checksum(&sum);
    let mut top: Vec<(String, u64)> = sum.into_iter().collect();
    top.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    top.truncate(10);
    Ok(Reduced { words, distinct, checksum, top })
}

/// Of every word with its count, in whatever order.
fn checksum<'a>(counts: impl IntoIterator<Item = (&'a String, &'a u64)>) -> u64 {
    let one = |(word, count): (&String, &u64)| {
        word.bytes().fold(*count, |hash, byte| hash.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte))
    };
    counts.into_iter().map(one).fold(0, u64::wrapping_add)
}

fn count_words(text: &[u8], mut found: impl FnMut(&str)) {
    for word in text.split(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_') {
        if let Ok(word) = std::str::from_utf8(word)
            && !word.is_empty()
        {
            found(word);
        }
    }
}

fn partition_of(word: &str) -> usize {
    word.bytes().fold(0usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into())) % PARTITIONS
}

/// Every Rust source below `dir`, with its size.
fn sources(dir: &Path, found: &mut Vec<(PathBuf, u64)>) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => sources(&path, found),
            Ok(kind) if kind.is_file() && path.extension().is_some_and(|extension| extension == "rs") => {
                found.push((path, entry.metadata().map_or(0, |meta| meta.len())));
            }
            _ => {}
        }
    }
}

struct Arguments {
    /// Bytes that there must be, and that are read at most.
    min: u64,
    limit: u64,
    check: bool,
    json: Option<PathBuf>,
}

fn arguments() -> Result<Arguments> {
    let mut arguments = Arguments { min: 0, limit: 64 << 20, check: false, json: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--min-mb" => arguments.min = megabytes(&word, words.next())?,
            "--limit-mb" => arguments.limit = megabytes(&word, words.next())?,
            "--check" => arguments.check = true,
            "--json" => arguments.json = Some(words.next().context("--json needs a file")?.into()),
            other => bail!("unknown argument {other}; known are --min-mb N, --limit-mb N, --check, --json FILE"),
        }
    }
    Ok(arguments)
}

fn megabytes(flag: &str, value: Option<String>) -> Result<u64> {
    let number = value.and_then(|value| value.parse::<u32>().ok());
    Ok(u64::from(number.with_context(|| format!("{flag} needs a whole number of MiB"))?) << 20)
}

#[wingbeat::main]
async fn main() -> Result<()> {
    let arguments = arguments()?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")));
    let dir = home.context("neither CARGO_HOME nor HOME is set")?.join("registry/src");
    let mut files = Vec::new();
    sources(&dir, &mut files);
    files.sort();
    if files.is_empty() {
        bail!("there are no Rust sources in {}; build something with dependencies first", dir.display());
    }
    let found: u64 = files.iter().map(|(_, size)| size).sum();
    if found < arguments.min || arguments.limit < arguments.min {
        bail!(
            "--min-mb asks for {} MiB; {} has {} MiB of Rust sources, and --limit-mb allows {}",
            arguments.min >> 20,
            dir.display(),
            found >> 20,
            arguments.limit >> 20
        );
    }
    let mut bytes = 0;
    files.retain(|(_, size)| {
        let room = bytes < arguments.limit;
        bytes += if room { *size } else { 0 };
        room
    });

    wingbeat::init().await?;
    let begun = Instant::now();
    let mut chunks: Vec<Vec<PathBuf>> = vec![Vec::new()];
    let mut filled = 0;
    for (file, size) in &files {
        if filled >= CHUNK {
            chunks.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(chunk) = chunks.last_mut() {
            chunk.push(file.clone());
        }
    }
    let bar = ProgressBar::new(chunks.len() as u64);
    bar.set_style(ProgressStyle::with_template("   map {bar:40} {pos}/{len} chunks, {elapsed}")?);
    let mut said = 0;
    let mut pending: Vec<_> = chunks.into_iter().map(map::remote).collect();
    let mut partitions: Vec<Vec<ObjectRef<Table>>> = vec![Vec::new(); PARTITIONS];
    while !pending.is_empty() {
        let (ready, rest) = wait(pending, 1, None).await?;
        pending = rest;
        for tables in ready {
            for (partition, table) in tables.get().await?.into_iter().enumerate() {
                partitions[partition].push(table);
            }
            bar.inc(1);
        }
        let (done, all) = (bar.position(), bar.length().unwrap_or_default());
        if bar.is_hidden() && (done == all || done >= said + all.div_ceil(10)) {
            // Without a terminal there is no bar.
            eprintln!("map: {done} of {all} chunks");
            said = done;
        }
    }
    bar.finish();
    let reduced: Vec<_> = partitions.into_iter().map(reduce::remote).collect();
    let (mut words, mut distinct, mut all, mut top) = (0, 0, 0u64, Vec::new());
    for partition in reduced {
        let partition = partition.get().await?;
        words += partition.words;
        distinct += partition.distinct;
        all = all.wrapping_add(partition.checksum);
        top.extend(partition.top);
    }
    top.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    top.truncate(10);
    let (seconds, mb) = (begun.elapsed().as_secs_f64(), bytes as f64 / 1e6);

    println!("{mb:.1} MB in {} files: {words} words, {distinct} distinct, in {seconds:.2} s", files.len());
    for (word, count) in &top {
        println!("{count:>10}  {word}");
    }
    if arguments.check {
        let mut expected: HashMap<String, u64> = HashMap::new();
        for (file, _) in &files {
            count_words(&std::fs::read(file)?, |word| match expected.get_mut(word) {
                Some(count) => *count += 1,
                None => {
                    expected.insert(word.to_owned(), 1);
                }
            });
        }
        let known = (expected.values().sum::<u64>(), expected.len() as u64, checksum(&expected));
        if known != (words, distinct, all) {
            bail!(
                "a sequential count gives {} words, {} distinct, checksum {:x}; the cluster gave {words}, {distinct}, {all:x}",
                known.0,
                known.1,
                known.2
            );
        }
        println!("every count agrees with a sequential one");
    }
    if let Some(file) = arguments.json {
        let report = serde_json::json!({
            "files": files.len(), "mb": mb, "words": words, "distinct": distinct, "seconds": seconds,
        });
        std::fs::write(file, report.to_string())?;
    }
    println!("word_count: ok");
    Ok(())
}
