//! What may be a name: of actors, namespaces, jobs, tasks, groups, resources and labels.
//!
//! Names are shown on terminals, in errors and in logs of other people. So they are short, and hold nothing that a terminal
//! takes for an order or shows as something else. Clients refuse others, and so does the head.

use std::borrow::Cow;
use std::fmt::Write;

use crate::labels::{LabelTest, Selector};
use crate::resources::ResourceSet;

/// The most bytes of a name. Names of Kubernetes have 253.
pub const LONGEST_NAME: usize = 256;
/// The most rules of one selector, values of one rule, and selectors of one request: more is a mistake in a program, and
/// each is held against each node.
pub const MOST_RULES: usize = 64;

/// Whether a terminal would not show it as it is: controls, line ends, and what changes the direction or is invisible.
fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Checks a name.
///
/// ```
/// use wingbeat_core::names;
/// assert!(names::check("trainer 1: Zürich/東京").is_ok());
/// assert!(names::check("two\nlines").unwrap_err().contains("\\n"));
/// ```
///
/// # Errors
/// Why it is none, in words that can be shown.
pub fn check(name: &str) -> Result<(), String> {
    if name.len() > LONGEST_NAME {
        return Err(format!("a name may have {LONGEST_NAME} bytes, and this has {}", name.len()));
    }
    match name.chars().find(|letter| is_hidden(*letter)) {
        None => Ok(()),
        Some(letter) => {
            Err(format!("a name may not contain {}, which terminals do not show as it is", letter.escape_default()))
        }
    }
}

/// Checks the names of resources.
///
/// # Errors
/// As [`check`].
pub fn check_resources(resources: &ResourceSet) -> Result<(), String> {
    let mut named = resources.iter();
    named.try_for_each(|(name, _)| check(name).map_err(|why| format!("resource {}: {why}", shortened(name))))
}

/// Checks rules about labels.
///
/// # Errors
/// As [`check`], or there are too many.
pub fn check_selectors(selectors: &[Selector]) -> Result<(), String> {
    let few = |count: usize, of: &str| {
        if count > MOST_RULES { Err(format!("{count} {of}, and {MOST_RULES} are the most")) } else { Ok(()) }
    };
    few(selectors.len(), "alternatives of rules about labels")?;
    for selector in selectors {
        few(selector.rules.len(), "rules about labels")?;
        for (key, test) in &selector.rules {
            let values = match test {
                LabelTest::Is(value) | LabelTest::IsNot(value) => std::slice::from_ref(value),
                LabelTest::In(values) | LabelTest::NotIn(values) => values,
                LabelTest::Exists => &[],
            };
            few(values.len(), "values of one label")?;
            let mut words = std::iter::once(key).chain(values);
            words.try_for_each(|word| check(word).map_err(|why| format!("label {}: {why}", shortened(key))))?;
        }
    }
    Ok(())
}

/// A text from outside as it can be shown on one line: what a terminal would not show is escaped.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden)
}

/// As [`printable`], for a text of several lines.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |letter| is_hidden(letter) && !matches!(letter, '\n' | '\t'))
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_escaped(letter) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "{}", letter.escape_default());
        } else {
            shown.push(letter);
        }
    }
    Cow::Owned(shown)
}

/// The beginning of a text that is no name, to show in the message that says so.
pub fn shortened(text: &str) -> String {
    let beginning: String = text.chars().take(64).collect();
    let rest = if beginning.len() < text.len() { "…" } else { "" };
    format!("`{}{rest}`", printable(&beginning))
}

/// A name made of a text that may be none, for what cannot be refused.
pub fn made_of(text: &str) -> Cow<'_, str> {
    // What is escaped becomes longer.
    let whole = printable(text);
    let mut end = whole.len().min(LONGEST_NAME);
    while !whole.is_char_boundary(end) {
        end -= 1;
    }
    match whole {
        Cow::Borrowed(text) => Cow::Borrowed(&text[..end]),
        Cow::Owned(mut text) => {
            text.truncate(end);
            Cow::Owned(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_or_hide_is_no_name() {
        for name in ["", "a", "my-actor_1.2:3/4", "größer", "東京 42", &"x".repeat(LONGEST_NAME)] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for name in
            ["\u{1b}[31mred", "two\nlines", "nul\0", "\rover", "\u{202e}txt.exe", "\u{85}", "\u{200b}", "\u{7f}"]
        {
            let why = check(name).unwrap_err();
            assert!(!why.chars().any(is_hidden), "{why:?}");
        }
        assert!(check(&"x".repeat(LONGEST_NAME + 1)).unwrap_err().contains("257"));
        for text in ["\u{200b}".to_owned() + &"x".repeat(300), "\u{200b}".repeat(100), "ö".repeat(200)] {
            assert_eq!(check(&made_of(&text)), Ok(()), "{text:?}");
        }
    }

    #[test]
    fn rules_about_labels_are_bounded() {
        let rule = |key: &str, test: LabelTest| Selector { rules: vec![(key.to_owned(), test)] };
        assert!(check_selectors(&[rule("zone", LabelTest::Is("a".into()))]).is_ok());
        assert!(check_selectors(&[rule("zone", LabelTest::Is("a".repeat(10 << 20)))]).is_err());
        assert!(check_selectors(&[rule(&"k".repeat(1_000), LabelTest::Exists)]).is_err());
        assert!(check_selectors(&[rule("zone", LabelTest::In(vec!["a".into(); 1_000]))]).is_err());
        assert!(check_selectors(&vec![rule("zone", LabelTest::Exists); 1_000]).is_err());
        assert!(check_selectors(&[Selector { rules: vec![("zone".into(), LabelTest::Exists); 1_000] }]).is_err());
    }

    #[test]
    fn what_is_shown_is_escaped_and_short() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(printable_lines("a\n\tb\u{1b}"), "a\n\tb\\u{1b}");
        assert!(shortened(&"x\n".repeat(1 << 20)).len() < 200);
        assert_eq!(made_of("task"), "task");
        assert!(made_of(&"é".repeat(1_000)).len() <= LONGEST_NAME);
    }
}
