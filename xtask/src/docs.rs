//! `cargo xtask docs`: the guide as a book.

use std::process::{Command, Stdio};

use anyhow::Result;

use crate::steps::{root, step};

/// What builds the book.
const MDBOOK: &str = "mdbook";

pub(crate) fn run() -> Result<()> {
    let root = root()?;
    let (pages, book) = (root.join("docs"), root.join("target/book"));
    if is_installed() {
        let mut build = Command::new(MDBOOK);
        step("the book", build.arg("build").arg("--dest-dir").arg(&book).arg(&pages))?;
        println!("the book: {}", book.join("index.html").display());
    } else {
        println!("mdBook is not installed, so there is no book. To have one:");
        println!("  cargo install mdbook --locked    (or a program from https://github.com/rust-lang/mdBook/releases)");
        println!("  cargo xtask docs");
    }
    println!("the pages: {}", pages.join("SUMMARY.md").display());
    Ok(())
}

fn is_installed() -> bool {
    let asked = Command::new(MDBOOK).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}
