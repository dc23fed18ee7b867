//! `cargo xtask fuzz`: the decoders of outside bytes and the handshake, given bytes that libFuzzer thinks out.
//!
//! It needs a C++ compiler, and no nightly Rust: what `cargo fuzz` asks of the compiler without a sanitizer is stable.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::steps::{cargo, root, step};

/// Has the compiler count which branches are taken, and what is compared.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                        -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";
const TARGETS: [&str; 4] = ["files", "handshake", "messages", "values"];
/// More memory than this for one input is a finding.
const MEMORY_MIB: u32 = 2048;

#[derive(Args)]
pub(crate) struct Fuzz {
    /// How long each target runs.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

pub(crate) fn run(fuzz: &Fuzz) -> Result<()> {
    let fuzzed = root()?.join("target/fuzz");
    let target = host()?;
    let mut build =
        cargo(&["build", "--quiet", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target", &target])?;
    // With a target named, build scripts and macros are not counted.
    step("targets", build.env("RUSTFLAGS", COVERAGE).env("CARGO_TARGET_DIR", &fuzzed))?;
    for name in TARGETS {
        // What it found worth trying is tried first the next time.
        let corpus: PathBuf = fuzzed.join("corpus").join(name);
        std::fs::create_dir_all(&corpus).with_context(|| format!("making {}", corpus.display()))?;
        let mut command = Command::new(fuzzed.join(&target).join("release").join(name));
        command.arg(format!("-max_total_time={}", fuzz.seconds)).arg(format!("-rss_limit_mb={MEMORY_MIB}"));
        command.args(["-verbosity=0", "-print_final_stats=1"]).arg(&corpus).current_dir(&fuzzed);
        step(name, &mut command)?;
    }
    Ok(())
}

/// This machine, as the compiler names it.
fn host() -> Result<String> {
    let said = Command::new("rustc").arg("-vV").output().context("asking rustc for its version")?;
    let text = String::from_utf8(said.stdout)?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    Ok(host.to_owned())
}
