//! How things are said to people.

use std::io::Write;

/// `rank 3`, `ranks 0, 2 and 5`, `ranks 0, 1, 2 and 61 more`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    const NAMED: usize = 8;
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [named @ .., last] if ranks.len() <= NAMED => format!("ranks {} and {last}", joined(named)),
        _ => format!("ranks {} and {} more", joined(&ranks[..NAMED]), ranks.len() - NAMED),
    }
}

fn joined(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Tells the user what a run has to say about itself. Nobody may be there any more to read it.
pub(crate) fn notice(text: &str) {
    let _ = writeln!(std::io::stderr(), "wingbeat: {text}");
}

#[cfg(test)]
mod tests {
    use super::ranks;

    #[test]
    fn few_ranks_are_all_named_and_many_are_counted() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[0, 2, 5]), "ranks 0, 2 and 5");
        assert_eq!(ranks(&(0..20).collect::<Vec<_>>()), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more");
    }
}
