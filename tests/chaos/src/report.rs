//! What a driver says of its programs: a line of its standard output each.

use std::fmt;

/// What came of one run of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was right.
    Right,
    /// It failed with an error that is allowed.
    Excused(String),
    /// A result is wrong, or there is an error that is not allowed.
    Wrong(String),
    /// The driver's session has ended.
    Over(String),
}

/// A line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// It has joined the cluster.
    Joined,
    /// A program begins.
    Begins(String),
    /// A program has ended.
    Ended(String, Outcome),
    /// Everything that it held is free, and it ends.
    Leaves,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Report::Joined => f.write_str("joined"),
            Report::Begins(program) => write!(f, "begins {program}"),
            Report::Ended(program, Outcome::Right) => write!(f, "right {program}"),
            Report::Ended(program, Outcome::Excused(why)) => write!(f, "excused {program} {}", line(why)),
            Report::Ended(program, Outcome::Wrong(why)) => write!(f, "wrong {program} {}", line(why)),
            Report::Ended(program, Outcome::Over(why)) => write!(f, "over {program} {}", line(why)),
            Report::Leaves => f.write_str("leaves"),
        }
    }
}

fn line(text: &str) -> String {
    text.replace('\n', " | ")
}

impl Report {
    /// From a line.
    pub fn parse(line: &str) -> Option<Report> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (program, why) = rest.split_once(' ').unwrap_or((rest, ""));
        let (program, why) = (program.to_owned(), why.to_owned());
        Some(match word {
            "joined" => Report::Joined,
            "begins" => Report::Begins(program),
            "right" => Report::Ended(program, Outcome::Right),
            "excused" => Report::Ended(program, Outcome::Excused(why)),
            "wrong" => Report::Ended(program, Outcome::Wrong(why)),
            "over" => Report::Ended(program, Outcome::Over(why)),
            "leaves" => Report::Leaves,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_reported() {
        let reports = [
            Report::Joined,
            Report::Begins("tree".into()),
            Report::Ended("tree".into(), Outcome::Right),
            Report::Ended("tree".into(), Outcome::Excused("a node died".into())),
            Report::Ended("tree".into(), Outcome::Wrong("3, not 4".into())),
            Report::Ended("tree".into(), Outcome::Over("the head is gone".into())),
            Report::Leaves,
        ];
        for report in reports {
            assert_eq!(Report::parse(&report.to_string()), Some(report));
        }
        let long = Report::Ended("tree".into(), Outcome::Wrong("two\nlines".into()));
        assert!(!long.to_string().contains('\n'));
    }
}
