//! Ids as people give them: whole, or as much of them as tells them apart.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use wingbeat_core::InvalidId;
use wingbeat_net::messages::ClusterState;
use wingbeat_net::mux;
use wingbeat_net::services::HeadClient;

const LIMIT: Duration = Duration::from_secs(10);

/// Ids that an error names one by one; of others, only the number is told.
const NAMED: usize = 8;

/// What changes something takes a beginning of so many digits.
const TO_CHANGE: usize = 4;

/// An id of this many digits is whole. Shorter ones may be, too.
const WHOLE: usize = 16;

/// The id that begins with `text`, of those that the head shows. A text that is none of them is given back: the head may know more, such
/// as what has ended, and tasks.
pub(crate) async fn whole(head: &HeadClient, text: &str) -> Result<String> {
    // Of a process id, the node behind it.
    let (before, text) = text.split_once('@').map_or(("", text), |(pid, _)| text.split_at(pid.len() + 1));
    if !may_be_a_beginning(text) {
        return Ok(format!("{before}{text}"));
    }
    let state = head.state(mux::within(LIMIT)).await.context("the head did not answer")?;
    Ok(format!("{before}{}", one_of(text, &ids(&state))?.unwrap_or(text)))
}

/// As [`whole`], for a command that changes what it names. The empty or short beginning that a script's variable has left is the
/// beginning of whatever is there alone.
pub(crate) async fn whole_to_change(head: &HeadClient, text: &str) -> Result<String> {
    let whole = whole(head, text).await?;
    check_to_change(text, &whole)?;
    Ok(whole)
}

fn check_to_change(text: &str, whole: &str) -> Result<()> {
    let digits = text.split_once('-').map_or("", |(_, digits)| digits);
    if whole != text && digits.len() < TO_CHANGE {
        bail!(
            "`{text}` is too short a beginning of {whole} to change that by: write {TO_CHANGE} of its digits or more"
        );
    }
    Ok(())
}

/// Whether a text can be an id at all, which needs no head.
pub(crate) fn check<Id: FromStr<Err = InvalidId>>(text: &str) -> Result<()> {
    if !may_be_a_beginning(text) {
        text.parse::<Id>()?;
    }
    Ok(())
}

/// Whether more could follow: not after a task's number, and there are no beginnings of process ids.
fn may_be_a_beginning(text: &str) -> bool {
    let Some((kind, digits)) = text.split_once('-') else { return false };
    !matches!(kind, "task" | "object") && digits.len() < WHOLE
}

/// Everything that `wingbeat status` shows.
pub(crate) fn ids(state: &ClusterState) -> Vec<String> {
    let nodes = state.nodes.iter().map(|node| node.info.id.to_string());
    let absent = state.absent.iter().map(ToString::to_string);
    let jobs = state.jobs.iter().map(|job| job.id.to_string());
    let actors = state.actors.iter().map(|actor| actor.id.to_string());
    let groups = state.placement_groups.iter().map(|group| group.id.to_string());
    let pending = state.pending.iter().map(|row| row.id.clone());
    let mut all: Vec<String> = nodes.chain(absent).chain(jobs).chain(actors).chain(groups).chain(pending).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The one of these that is `text`, or else begins with it; none if none does.
///
/// # Errors
/// Several begin with it.
pub(crate) fn one_of<'a>(text: &str, ids: &'a [String]) -> Result<Option<&'a str>> {
    if let Some(exact) = ids.iter().find(|id| *id == text) {
        return Ok(Some(exact));
    }
    let matches: Vec<&str> = ids.iter().map(String::as_str).filter(|id| id.starts_with(text)).collect();
    match matches[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => {
            let shown = matches[..matches.len().min(NAMED)].join(", ");
            let more = matches.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            bail!(
                "`{text}` is the beginning of {} ids: {shown}{more}; write more of the one that you mean",
                matches.len()
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use wingbeat_core::NodeId;

    use super::*;

    fn ids(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn an_id_is_found_by_as_much_of_it_as_tells_it_apart() {
        let known = ids(&["actor-12ab", "actor-12cd", "actor-12cdef", "node-12ab"]);
        let found = |text| one_of(text, &known).unwrap();
        assert_eq!(found("actor-12a"), Some("actor-12ab"));
        assert_eq!(found("n"), Some("node-12ab"));
        assert_eq!(found("actor-12cd"), Some("actor-12cd"), "it is one itself");
        assert_eq!(found("actor-9"), None);
    }

    #[test]
    fn what_changes_something_takes_no_beginning_that_is_of_whatever_is_there() {
        let whole = "node-1f2e3d4c5b6a7988";
        for short in ["no", "node-", "node-1", "node-1f2"] {
            let said = check_to_change(short, whole).unwrap_err().to_string();
            assert!(said.contains(short) && said.contains(whole), "{said}");
        }
        assert!(check_to_change("node-1f2e", whole).is_ok() && check_to_change(whole, whole).is_ok());
        assert!(check_to_change("node-1", "node-1").is_ok(), "nothing begins so: the head answers that");
    }

    #[test]
    fn of_a_beginning_that_several_have_the_error_names_them() {
        let known = ids(&["actor-12ab", "actor-12cd", "node-12ab"]);
        assert_eq!(
            one_of("actor-1", &known).unwrap_err().to_string(),
            "`actor-1` is the beginning of 2 ids: actor-12ab, actor-12cd; write more of the one that you mean"
        );
        let many: Vec<String> = (0..20).map(|number| format!("node-{number:02}")).collect();
        let said = one_of("node-", &many).unwrap_err().to_string();
        assert!(said.contains("20 ids") && said.contains("node-07 and 12 more"), "{said}");
    }

    #[test]
    fn what_cannot_go_on_is_given_to_the_head_as_it_is() {
        assert!(check::<NodeId>("12345").is_err() && check::<NodeId>("node-1").is_ok());
        assert!(["node-1", "node-1f2e3d4c5b6a", "actor-", "group-12", "process-7"].into_iter().all(may_be_a_beginning));
        assert!(
            !["12345", "12345@node", "task-12.3", "object-12.3.4", "node-0123456789abcdef"]
                .into_iter()
                .any(may_be_a_beginning)
        );
    }
}
