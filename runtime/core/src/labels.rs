//! Which nodes will do, by their labels.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The longest text of a selector: more than all rules that make sense, and nothing to fill memories with.
const LONGEST_TEXT: usize = 16 << 10;

/// Labels of a node.
pub type Labels = BTreeMap<String, String>;

/// What one label must be.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum LabelTest {
    /// There, with this value.
    Is(String),
    /// Anything but this, or not there.
    IsNot(String),
    /// There, with one of these values.
    In(Vec<String>),
    /// None of these, or not there.
    NotIn(Vec<String>),
    /// There.
    Exists,
}

/// Rules about labels, all of which a node must meet.
///
/// Written as in Kubernetes: `zone=a`, `zone!=a`, `zone in (a, b)`, `zone not in (a, b)`, `zone`, joined by commas.
///
/// ```
/// use wingbeat_core::labels::Selector;
/// let selector: Selector = "accelerator-type in (H100, H200), zone != b".parse().unwrap();
/// let labels = [("accelerator-type", "H200"), ("zone", "a")].map(|(k, v)| (k.to_owned(), v.to_owned()));
/// assert!(selector.matches(&labels.into_iter().collect()));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Selector {
    /// Label and test.
    pub rules: Vec<(String, LabelTest)>,
}

impl Selector {
    /// Whether a node with these labels will do.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.failing(labels).is_none()
    }

    /// The first rule that these labels do not meet, in words.
    pub fn failing(&self, labels: &Labels) -> Option<String> {
        self.rules.iter().find_map(|(key, test)| {
            let value = labels.get(key);
            let met = match test {
                LabelTest::Is(wanted) => value == Some(wanted),
                LabelTest::IsNot(unwanted) => value != Some(unwanted),
                LabelTest::In(wanted) => value.is_some_and(|value| wanted.contains(value)),
                LabelTest::NotIn(unwanted) => value.is_none_or(|value| !unwanted.contains(value)),
                LabelTest::Exists => value.is_some(),
            };
            (!met).then(|| match value {
                Some(value) => format!("{key} is {value}"),
                None => format!("it has no label {key}"),
            })
        })
    }
}

/// A text that is no selector.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{text}` is no rule about labels: {why}; write KEY=VALUE, KEY!=VALUE, KEY in (A, B), KEY not in (A, B) or KEY"
)]
pub struct InvalidSelector {
    /// The part that cannot be read.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl FromStr for Selector {
    type Err = InvalidSelector;

    fn from_str(text: &str) -> Result<Self, InvalidSelector> {
        if text.len() > LONGEST_TEXT {
            // Not the text: it would be in the message.
            let text = text.chars().take(64).chain(std::iter::once('…')).collect();
            return Err(InvalidSelector { text, why: "it is longer than 16 KiB" });
        }
        let rules = split_outside_parentheses(text).into_iter().map(rule).collect::<Result<_, _>>()?;
        Ok(Selector { rules })
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .collect()
}

fn rule(text: &str) -> Result<(String, LabelTest), InvalidSelector> {
    let text = text.trim();
    let invalid = |why| InvalidSelector { text: crate::names::printable(text).into_owned(), why };
    let word = |word: &str| {
        let word = word.trim();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
        if word.is_empty() {
            Err(invalid("a key or a value is missing"))
        } else if !word.chars().all(plain) {
            Err(invalid("keys and values are letters, digits and -_./:"))
        } else {
            Ok(word.to_owned())
        }
    };
    if let Some((before, list)) = text.split_once('(') {
        let list = list.trim_end().strip_suffix(')').ok_or_else(|| invalid("a parenthesis is not closed"))?;
        let values = list.split(',').map(word).collect::<Result<Vec<_>, _>>()?;
        let mut words = before.split_whitespace();
        let key = word(words.next().unwrap_or_default())?;
        return match (words.next(), words.next(), words.next()) {
            (Some("in"), None, None) => Ok((key, LabelTest::In(values))),
            (Some("notin"), None, None) | (Some("not"), Some("in"), None) => Ok((key, LabelTest::NotIn(values))),
            _ => Err(invalid("before a list comes `in` or `not in`")),
        };
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Ok((word(key)?, LabelTest::IsNot(word(value)?)));
    }
    if let Some((key, value)) = text.split_once('=') {
        return Ok((word(key)?, LabelTest::Is(word(value.strip_prefix('=').unwrap_or(value))?)));
    }
    Ok((word(text)?, LabelTest::Exists))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, test)) in self.rules.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            match test {
                LabelTest::Is(value) => write!(f, "{key}={value}")?,
                LabelTest::IsNot(value) => write!(f, "{key}!={value}")?,
                LabelTest::In(values) => write!(f, "{key} in ({})", values.join(", "))?,
                LabelTest::NotIn(values) => write!(f, "{key} not in ({})", values.join(", "))?,
                LabelTest::Exists => f.write_str(key)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(of: &[(&str, &str)]) -> Labels {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_rule_must_be_met() {
        let node = labels(&[("zone", "a"), ("gpu", "H200")]);
        for (text, matches) in [
            ("zone=a", true),
            ("zone=b", false),
            ("zone!=b", true),
            ("zone!=a", false),
            ("rack!=1", true),
            ("zone in (a, b)", true),
            ("zone not in (a,b)", false),
            ("rack not in (1)", true),
            ("gpu", true),
            ("rack", false),
            ("zone = a, gpu in (H100,H200)", true),
            ("zone=a,gpu=H100", false),
        ] {
            assert_eq!(text.parse::<Selector>().unwrap().matches(&node), matches, "{text}");
        }
    }

    #[test]
    fn a_selector_reads_back_what_it_shows() {
        let text = "a=1, b!=2, c in (3, 4), d not in (5), e";
        let selector: Selector = text.parse().unwrap();
        assert_eq!(selector.to_string(), text);
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for text in ["", "=a", "a=", "a in b", "a in (b", "a near (b)", "a b", "a=b c", "a,,b"] {
            assert!(text.parse::<Selector>().is_err(), "{text}");
        }
        let error = format!("zone={}", "a".repeat(10 << 20)).parse::<Selector>().unwrap_err();
        assert!(error.to_string().len() < 1_000);
        let error = "zone=\u{1b}[31m".parse::<Selector>().unwrap_err().to_string();
        assert!(!error.contains('\u{1b}'), "{error:?}");
    }
}
