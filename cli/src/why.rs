//! `wingbeat why`, `wingbeat drain` and `wingbeat quota`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use wingbeat_core::{NodeId, ResourceSet};
use wingbeat_net::messages::{Explanation, Subject};
use wingbeat_net::mux;

use crate::cluster::{Where, connect};
use crate::named;
use crate::say::say;
use crate::sizes;

const LIMIT: Duration = Duration::from_secs(10);

/// Say why something waits, or where it runs.
///
/// Takes what `wingbeat status` shows (an actor, a placement group, a node, a process whose tasks wait), or as much of it as tells it apart
/// from others (node-1f2e), what a program prints for a ref or a task, or the process id of a worker process: task-…, object-…, actor-…,
/// group-…, node-…, process-…, 12345, or 12345@node-…. What of a job waits, `wingbeat status job-…` shows.
#[derive(Args)]
pub(crate) struct WhyArgs {
    /// What to explain.
    id: String,
    #[command(flatten)]
    at: Where,
    /// Print JSON for programs.
    #[arg(long)]
    json: bool,
}

/// Free a node of work: nothing new is placed there, and what runs finishes, or is moved at the deadline.
///
///     wingbeat drain node-1f2e3d4c5b6a --within 10min --reason "kernel update" --stop
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct DrainArgs {
    /// The node, as `wingbeat status` shows it, or as much of its id as tells it apart from others.
    node: String,
    /// When what still runs is ended: tasks and restartable actors then run again elsewhere, and it costs them no retry.
    #[arg(long, default_value = "5min", value_parser = sizes::duration)]
    within: Duration,
    /// What to tell people.
    #[arg(long, default_value = "maintenance")]
    reason: String,
    /// End the node's `wingbeat worker` when nothing runs there any more.
    #[arg(long)]
    stop: bool,
    /// Take work again instead.
    #[arg(long, conflicts_with_all = ["within", "reason", "stop"])]
    undo: bool,
    #[command(flatten)]
    at: Where,
}

/// Set what all jobs of a namespace together may hold at a time, or show the quotas.
///
///     wingbeat quota team-a CPU=64 GPU=8      (what is not named is not limited)
///     wingbeat quota team-a --remove
///     wingbeat quota
#[derive(Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct QuotaArgs {
    /// The namespace.
    #[arg(value_parser = sizes::namespace)]
    namespace: Option<String>,
    /// Amounts, as NAME=AMOUNT.
    #[arg(value_parser = sizes::resource)]
    limits: Vec<(String, f64)>,
    /// No limit any more.
    #[arg(long, conflicts_with = "limits", requires = "namespace")]
    remove: bool,
    #[command(flatten)]
    at: Where,
}

pub(crate) async fn why(args: WhyArgs) -> Result<()> {
    if args.id.starts_with("job-") {
        bail!("`wingbeat status {0}` shows what of a job waits, and `wingbeat stack {0}` what it does", args.id);
    }
    named::check::<Subject>(&args.id)?;
    let head = connect(&args.at).await?;
    let subject: Subject = named::whole(&head, &args.id).await?.parse()?;
    let explanation = head.explain(mux::within(LIMIT), subject).await.context("the head did not answer")??;
    if args.json {
        say!("{}", serde_json::to_string_pretty(&explanation)?);
    } else {
        say!("{}", shown(&explanation).trim_end());
    }
    Ok(())
}

fn shown(explanation: &Explanation) -> String {
    let since = explanation.since_ms.map(|millis| format!(", for {}", sizes::ago(Duration::from_millis(millis))));
    let mut text = format!("{} {}{}\n", explanation.subject, explanation.state, since.unwrap_or_default());
    for (heading, lines) in
        [("because", &explanation.reasons), ("held by", &explanation.holders), ("what helps", &explanation.help)]
    {
        for (i, line) in lines.iter().enumerate() {
            text += &format!("  {:<11} {line}\n", if i == 0 { heading } else { "" });
        }
    }
    text
}

pub(crate) async fn drain(args: DrainArgs) -> Result<()> {
    named::check::<NodeId>(&args.node)?;
    let head = connect(&args.at).await?;
    let node: NodeId = named::whole_to_change(&head, &args.node).await?.parse()?;
    let within = (!args.undo).then_some(args.within.as_millis() as u64);
    let answer = head.drain_node(mux::within(LIMIT), node, within, args.reason, args.stop).await;
    answer.context("the head did not answer")??;
    let state = head.state(mux::within(LIMIT)).await.ok();
    let found = state.iter().flat_map(|state| &state.nodes).find(|state| state.info.id == node);
    let host = found.map(|found| format!(" ({})", found.info.hostname)).unwrap_or_default();
    if args.undo {
        say!("{node}{host} takes work again");
    } else {
        say!("{node}{host} takes no new work; what still runs is moved in {}", sizes::ago(args.within));
        say!("  look at it:   wingbeat why {node}");
        say!("  take it back: wingbeat drain {node} --undo");
    }
    Ok(())
}

pub(crate) async fn quota(args: QuotaArgs) -> Result<()> {
    let head = connect(&args.at).await?;
    let Some(namespace) = args.namespace else {
        let state = head.state(mux::within(LIMIT)).await.context("the head did not answer")?;
        if state.quotas.is_empty() {
            say!("no quotas; set one with `wingbeat quota NAMESPACE CPU=8`");
        }
        for row in state.quotas {
            say!("{}: {} of {}", row.namespace, row.used, row.limit);
        }
        return Ok(());
    };
    let limit = if args.remove {
        None
    } else if args.limits.is_empty() {
        bail!("say what `{namespace}` may hold, as in `wingbeat quota {namespace} CPU=8`, or --remove");
    } else {
        let mut limit = ResourceSet::new();
        for (name, value) in &args.limits {
            if !limit.get(name).is_zero() {
                bail!("{name} is given twice");
            }
            if let Some(usual) = wingbeat_core::resources::misnamed(name) {
                bail!("a quota of {name} would limit nothing that is there: write {usual}");
            }
            limit.set(name, wingbeat_core::resources::quota_of(name, *value)?);
        }
        Some(limit)
    };
    if limit.is_none() {
        let state = head.state(mux::within(LIMIT)).await.context("the head did not answer")?;
        let set: Vec<String> = state.quotas.into_iter().map(|row| row.namespace).collect();
        if !set.contains(&namespace) {
            let those = if set.is_empty() { String::new() } else { format!("; it is set for {}", set.join(", ")) };
            bail!("no quota is set for `{namespace}`{those}");
        }
    }
    head.set_quota(mux::within(LIMIT), namespace.clone(), limit.clone()).await.context("the head did not answer")??;
    match limit {
        Some(limit) => say!("{namespace} may hold {limit} at a time"),
        None => say!("{namespace} may hold anything"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explanation_reads_as_a_list() {
        let explanation = Explanation {
            subject: "actor Trainer (actor-1)".into(),
            state: "waits to be placed".into(),
            since_ms: Some(95_000),
            reasons: vec!["asks for 1 GPU".into(), "host1 has 0 GPU free of 1".into()],
            holders: vec!["train of job nightly holds 1 GPU".into()],
            help: vec!["wait for one of the holders, or end it".into()],
        };
        insta::assert_snapshot!(shown(&explanation), @r"
        actor Trainer (actor-1) waits to be placed, for 1m 35s
          because     asks for 1 GPU
                      host1 has 0 GPU free of 1
          held by     train of job nightly holds 1 GPU
          what helps  wait for one of the holders, or end it
        ");
    }
}
