//! Pages name tests as the proof of what they say: those are there.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Test files by name, each with the names of its functions.
fn tests_in(folder: &Path, found: &mut BTreeMap<String, Vec<String>>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() && !name.starts_with('.') && name != "target" && name != "node_modules" {
            tests_in(&path, found);
        }
        let Some((stem, "rs" | "py")) = name.rsplit_once('.') else { continue };
        let text = std::fs::read_to_string(&path).unwrap();
        let names = text.lines().filter_map(|line| {
            let line = line.trim_start();
            let line = line.strip_prefix("async ").unwrap_or(line);
            let name = line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "))?;
            Some(name.split('(').next().unwrap_or(name).to_owned())
        });
        found.entry(stem.to_owned()).or_default().extend(names);
    }
}

/// Whether a name that may leave something out (`…`) stands for this one.
fn stands_for(short: &str, name: &str) -> bool {
    let parts: Vec<&str> = short.split('…').collect();
    let [first, .., last] = parts[..] else { return short == name };
    name.len() >= first.len() + last.len() && name.starts_with(first) && name.ends_with(last)
}

#[test]
fn every_test_that_a_page_names_is_there() {
    let mut tests = BTreeMap::new();
    for folder in ["tests", "runtime", "worker", "client", "collective", "train", "cli", "python"] {
        tests_in(&root().join(folder), &mut tests);
    }
    let (mut named, mut missing) = (0, Vec::new());
    for page in ["docs/guarantees.md", "docs/limits.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        for quoted in text.split('`').skip(1).step_by(2) {
            let Some((file, test)) = quoted.split_once(": ") else { continue };
            if file.contains(|c: char| !c.is_ascii_lowercase() && c != '_') {
                continue;
            }
            let files = [file.to_owned(), format!("{file}_tests")];
            let mut known = files.iter().filter_map(|file| tests.get(file)).flatten();
            let python = format!("test_{test}");
            if !known.any(|name| stands_for(test, name) || stands_for(&python, name)) {
                missing.push(format!("{page}: `{quoted}`"));
            }
            named += 1;
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(named > 60, "{named}");
}
