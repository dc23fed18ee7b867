//! What pages say is there: tests, files, headings, commands, variables and errors that they name.

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

/// What is not a program, or not for users.
fn is_left_out(folder: &str) -> bool {
    folder.starts_with('.') || ["target", "node_modules", "tests", "simulator", "matrix", "faults"].contains(&folder)
}

/// The files below a folder whose names end so, without those that are left out.
fn files_in(folder: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() && !path.is_symlink() && !is_left_out(&name) {
            files_in(&path, ends, found);
        } else if ends.iter().any(|end| name.ends_with(end)) {
            found.push(path);
        }
    }
}

/// The README and all pages of `docs`, each with its text.
fn pages() -> Vec<(PathBuf, String)> {
    let mut paths = vec![root().join("README.md")];
    files_in(&root().join("docs"), &[".md"], &mut paths);
    paths.sort();
    let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(&path).unwrap());
    paths.into_iter().map(read).collect()
}

fn short(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The lines of a page, each with the language of the block that it is in: none outside of one.
fn lines_of(text: &str) -> Vec<(Option<&str>, &str)> {
    let mut language = None;
    let mut lines = Vec::new();
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), language) {
            (Some(_), Some(_)) => language = None,
            (Some(name), None) => language = Some(name.trim()),
            (None, _) => lines.push((language, line)),
        }
    }
    lines
}

/// The parts of a line that are no code, and those that are.
fn without_code(line: &str) -> (String, Vec<&str>) {
    let parts: Vec<&str> = line.split('`').collect();
    let (text, code): (Vec<_>, Vec<_>) = parts.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    (text.into_iter().map(|(_, part)| part).collect(), code.into_iter().map(|(_, part)| part).collect())
}

/// The targets of a line's links.
fn links_of(line: &str) -> Vec<String> {
    let (text, _) = without_code(line);
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
    targets.collect()
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors_of(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    for (_, line) in lines_of(text).into_iter().filter(|(language, _)| language.is_none()) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        // Of a link, its text is a part of the title.
        let mut shown = String::new();
        let mut rest = title.trim();
        while let Some((before, after)) = rest.split_once("](") {
            shown.push_str(before);
            rest = after.split_once(')').map_or("", |(_, rest)| rest);
        }
        shown.push_str(rest);
        let anchor: String = shown
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let same = anchors.iter().filter(|known| **known == anchor).count();
        anchors.push(if same == 0 { anchor } else { format!("{anchor}-{same}") });
    }
    anchors
}

#[test]
fn every_link_of_a_page_leads_to_a_file_and_a_heading() {
    let (mut followed, mut broken) = (0, Vec::new());
    for (page, text) in pages() {
        for (_, line) in lines_of(&text).into_iter().filter(|(language, _)| language.is_none()) {
            for link in links_of(line) {
                if ["http://", "https://", "mailto:"].iter().any(|begin| link.starts_with(begin)) {
                    continue;
                }
                followed += 1;
                let (path, anchor) = link.split_once('#').map_or((&*link, None), |(path, at)| (path, Some(at)));
                let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
                let Ok(target) = target.canonicalize() else {
                    broken.push(format!("{}: {link}", short(&page)));
                    continue;
                };
                let is_heading = |anchor: &str| {
                    let text = std::fs::read_to_string(&target).unwrap_or_default();
                    anchors_of(&text).iter().any(|known| known == anchor)
                };
                let is_ours = target.starts_with(root().canonicalize().unwrap());
                if !is_ours || !anchor.is_none_or(is_heading) {
                    broken.push(format!("{}: {link}", short(&page)));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(followed > 100, "{followed}");
}

#[test]
fn the_table_of_contents_lists_every_page_of_the_guide() {
    let summary = std::fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let listed: Vec<String> = summary.lines().flat_map(links_of).collect();
    let missing: Vec<String> = pages()
        .iter()
        .filter_map(|(page, _)| page.strip_prefix(root().join("docs")).ok())
        .map(|page| page.display().to_string())
        .filter(|page| page != "SUMMARY.md" && !listed.contains(page))
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md does not list {missing:#?}");
}

#[test]
fn every_rust_block_of_the_guide_is_compiled() {
    let compiled = std::fs::read_to_string(root().join("tests/guide/src/lib.rs")).unwrap();
    for (page, text) in pages() {
        let has_rust =
            lines_of(&text).iter().any(|(language, _)| language.is_some_and(|name| name.starts_with("rust")));
        let name = short(&page);
        assert!(
            !has_rust || compiled.contains(&format!("\"../../../{name}\"")),
            "tests/guide/src/lib.rs does not include {name}"
        );
        assert!(!text.contains("```rust,ignore"), "{name}: what is not compiled becomes wrong");
    }
}

/// What a command takes: its options, each with whether a value follows.
fn options_of(binary: &Path, command: &str) -> Option<BTreeMap<String, bool>> {
    let output = std::process::Command::new(binary).args([command, "--help"]).output().unwrap();
    if !output.status.success() {
        return None;
    }
    let mut options = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines().map(str::trim_start) {
        if !line.starts_with('-') {
            continue;
        }
        let mut words = line.split_whitespace().peekable();
        while let Some(word) = words.next().filter(|word| word.starts_with('-')) {
            let has_value =
                words.peek().is_some_and(|next| next.starts_with('<')) || line.contains(", --") && line.contains('<');
            // `--watch[=<SECONDS>]`: a value that may be left out is behind a `=`.
            let name = word.trim_end_matches(',').split("[=").next().unwrap_or(word);
            options.insert(name.to_owned(), has_value);
        }
    }
    Some(options)
}

/// The commands of a line: without variables before `wingbeat`, and without a comment.
fn commands_in(line: &str) -> Vec<Vec<String>> {
    let line = line.split(" #").next().unwrap_or(line).trim_start_matches("$ ");
    let parts = line.split("&&").flat_map(|part| part.split(['|', ';']));
    let is_variable = |word: &&str| {
        word.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
    };
    parts
        .map(|part| {
            part.trim()
                .trim_end_matches('\\')
                .split_whitespace()
                .skip_while(is_variable)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter(|words| words.len() > 1 && words[0] == "wingbeat")
        .collect()
}

#[test]
fn every_command_line_of_a_page_is_one_that_the_command_takes() {
    let binary = wingbeat_tests::binary().unwrap();
    let mut known: BTreeMap<String, Option<BTreeMap<String, bool>>> = BTreeMap::new();
    let (mut checked, mut wrong) = (0, Vec::new());
    for (page, text) in pages() {
        let mut lines: Vec<&str> = Vec::new();
        for (language, line) in lines_of(&text) {
            match language {
                Some("sh") => lines.push(line),
                Some("text") => lines.extend(line.starts_with("$ ").then_some(line)),
                Some(_) => {}
                None => lines.extend(without_code(line).1),
            }
        }
        for words in lines.into_iter().flat_map(commands_in) {
            let command = &words[1];
            // A placeholder, or an option of the whole.
            if !command.starts_with(|c: char| c.is_ascii_lowercase()) {
                continue;
            }
            checked += 1;
            let line = format!("{}: `{}`", short(&page), words.join(" "));
            let options = known.entry(command.clone()).or_insert_with(|| options_of(&binary, command));
            let Some(options) = options else {
                wrong.push(format!("{line}: there is no such command"));
                continue;
            };
            let mut rest = words[2..].iter().peekable();
            let mut has_script = false;
            while let Some(word) = rest.next() {
                // What follows is the script's own.
                let is_script = !word.starts_with('-') && command == "torchrun";
                if word == "--" || is_script {
                    break;
                }
                if !word.starts_with('-') {
                    has_script |= command == "train";
                    continue;
                }
                let name = word.split('=').next().unwrap_or(word);
                match options.get(name) {
                    None if has_script => break,
                    None => wrong.push(format!("{line}: {name}")),
                    Some(true) if !word.contains('=') => {
                        rest.next();
                    }
                    Some(_) => {}
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 100, "{checked}");
}

/// The sources of what users run.
fn sources() -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    for folder in ["runtime", "worker", "client", "collective", "train", "cli", "python/wingbeat"] {
        files_in(&root().join(folder), &[".rs", ".py"], &mut paths);
    }
    paths.retain(|path| !short(path).ends_with("_tests.rs") && !short(path).contains("/explored/"));
    let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(&path).unwrap());
    paths.into_iter().map(read).collect()
}

/// A source as its texts read: what continues in the next line is in one.
fn joined(source: &str) -> String {
    let mut text = String::new();
    for line in source.lines() {
        let line = line.trim();
        // `\` at the end of a line of Rust; two texts behind each other of Python.
        let (begun, line) = (text.ends_with('\\'), line.trim_start_matches(['"', 'f']));
        if begun {
            text.pop();
        } else {
            text = text.trim_end_matches('"').to_owned();
        }
        text.push_str(line);
    }
    text.replace("\\\"", "\"")
}

/// Whether the parts of a text come behind each other, with little between them.
fn has_parts(source: &str, parts: &[&str]) -> bool {
    const BETWEEN: usize = 200;
    let [first, rest @ ..] = parts else { return false };
    source.match_indices(first).any(|(at, found)| {
        let mut at = at + found.len();
        rest.iter().all(|part| {
            let end = (at + BETWEEN + part.len()).min(source.len());
            let window = (at..=end).rev().find_map(|end| source.get(at..end)).unwrap_or_default();
            let place = window.find(part);
            at += place.unwrap_or_default() + part.len();
            place.is_some()
        })
    })
}

#[test]
fn every_error_that_troubleshooting_explains_is_one_of_the_code() {
    let page = std::fs::read_to_string(root().join("docs/guide/troubleshooting.md")).unwrap();
    let sources: Vec<String> = sources().iter().map(|(_, source)| joined(source)).collect();
    let (mut shown, mut unknown) = (0, Vec::new());
    for (_, line) in lines_of(&page) {
        let Some(error) = line.strip_prefix('`').and_then(|line| line.strip_suffix('`')) else { continue };
        shown += 1;
        let parts: Vec<&str> = error.split('…').map(str::trim).filter(|part| part.len() > 2).collect();
        if !sources.iter().any(|source| has_parts(source, &parts)) {
            unknown.push(error);
        }
    }
    assert!(unknown.is_empty(), "no source has {unknown:#?}");
    assert!(shown > 40, "{shown}");
}

#[test]
fn every_variable_is_explained_and_every_explained_one_is_read() {
    let page = |name: &str| std::fs::read_to_string(root().join(name)).unwrap();
    let (reference, limits) = (page("docs/guide/reference.md"), page("docs/limits.md"));
    let mut read = Vec::new();
    for (path, source) in sources() {
        for quote in ['"', '\''] {
            for text in source.split(quote).filter(|text| text.starts_with("WINGBEAT_")) {
                let is_name = text.chars().all(|c| c.is_ascii_uppercase() || c == '_');
                if is_name && !text.starts_with("WINGBEAT_TEST_") {
                    read.push((text.to_owned(), short(&path)));
                }
            }
        }
    }
    let unexplained: Vec<_> =
        read.iter().filter(|(name, _)| !reference.contains(name) && !limits.contains(name)).collect();
    assert!(unexplained.is_empty(), "docs/guide/reference.md does not explain {unexplained:#?}");
    let explained = reference.lines().filter_map(|line| line.strip_prefix("| `WINGBEAT_")?.split('`').next());
    let unread: Vec<_> = explained.filter(|name| !read.iter().any(|(read, _)| read.ends_with(name))).collect();
    assert!(unread.is_empty(), "nothing reads {unread:#?}");
    assert!(read.len() > 40, "{}", read.len());
}
