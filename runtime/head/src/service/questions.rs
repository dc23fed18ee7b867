//! Questions that one connection has another answer: why something waits, and what its threads do.

use std::collections::BTreeSet;
use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::{NodeId, ProcessId, TaskId};
use wingbeat_net::messages::{Explanation, ProcessStacks, Subject, TaskStanding};
use wingbeat_net::mux;

use super::{Shell, unknown};

/// A node says within this time what the threads of a process do, or why it cannot.
const STACKS_LIMIT: Duration = Duration::from_secs(25);
/// How long a process may take to say what one of its tasks waits for.
const EXPLAIN_LIMIT: Duration = Duration::from_secs(2);

impl Shell {
    /// How far a task's owner knows what it waits for, or where it is.
    async fn standing(&self, task: TaskId) -> Result<TaskStanding, Error> {
        let client = self.inside.lock().processes.get(&task.owner).map(|peer| peer.client.clone());
        let client = client.ok_or_else(|| unknown(&format!("the owner of {task}, {},", task.owner)))?;
        mux::answered(client.explain_task(mux::within(EXPLAIN_LIMIT), task).await, "the task's owner")
    }

    /// What the threads of the process of a task, a call or an actor do: its node asks it.
    pub(super) async fn stacks(&self, subject: Subject) -> Result<ProcessStacks, Error> {
        let in_none = |what: String| Error::InvalidArgument { what: format!("{what}: it runs in no process now") };
        let found = match subject {
            Subject::Task(task) => match self.standing(task).await? {
                TaskStanding::OnLease(so_far, lease) => {
                    let process = self.inside.lock().state.process_of_lease(lease);
                    process.ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::WaitsForActor(so_far, actor) => {
                    let process = self.inside.lock().state.process_of_actor(actor);
                    process.ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::InProcess(so_far, process) => {
                    let node = self.inside.lock().state.node_of_process(process);
                    node.map(|node| (process, node)).ok_or_else(|| format!("{} {}", so_far.subject, so_far.state))
                }
                TaskStanding::Known(so_far) | TaskStanding::WaitsForLease(so_far, _) => {
                    Err(format!("{} {}", so_far.subject, so_far.state))
                }
            },
            Subject::Actor(actor) => {
                let mut inside = self.inside.lock();
                let now = self.now();
                match inside.state.process_of_actor(actor) {
                    Some(process) => Ok(process),
                    None => {
                        let explained =
                            inside.state.explain(now, subject).ok_or_else(|| unknown(&subject.to_string()))?;
                        Err(format!("{} {}", explained.subject, explained.state))
                    }
                }
            }
            Subject::Process(process) => {
                let node = self.inside.lock().state.node_of_process(process);
                node.map(|node| (process, node)).ok_or_else(|| format!("{process} runs no task or actor here"))
            }
            Subject::Pid(pid, node) => Ok(self.process_of_pid(pid, node).await?),
            Subject::Node(_) | Subject::PlacementGroup(_) => {
                let what = format!("{subject} has no threads; name a task, an object, an actor, a process or a job");
                return Err(Error::InvalidArgument { what });
            }
        };
        let (process, node) = found.map_err(in_none)?;
        let client = self.inside.lock().nodes.get(&node).map(|peer| peer.client.clone());
        let client = client.ok_or_else(|| unknown(&format!("{node}, which is lost or cut off,")))?;
        let silent = || match self.suspicion_of(node) {
            None => Ok(()),
            Some(suspicion) => Err(Error::Failed {
                what: format!("looking at {process}"),
                why: format!("its node {suspicion}; what runs there cannot be asked before it is back"),
            }),
        };
        silent()?;
        let answer = client.stacks(mux::within(STACKS_LIMIT), process).await;
        if answer.is_err() {
            // It may have become suspect meanwhile.
            silent()?;
        }
        mux::answered(answer, &format!("{node}, the node of the process,"))?
    }

    fn suspicion_of(&self, node: NodeId) -> Option<String> {
        self.inside.lock().state.suspicion_of(self.now(), node)
    }

    /// The worker process with this process id, or the one that has started the process with it, or sees it through, as its node
    /// knows.
    async fn process_of_pid(&self, pid: u32, on: Option<NodeId>) -> Result<(ProcessId, NodeId), Error> {
        let invalid = |what: String| Error::InvalidArgument { what };
        let (mut found, nodes) = {
            let inside = self.inside.lock();
            let found = inside.state.processes_with_pid(pid, on);
            let has_it: BTreeSet<NodeId> = found.values().copied().collect();
            let asked =
                inside.nodes.iter().filter(|(node, _)| on.is_none_or(|on| on == **node) && !has_it.contains(node));
            let nodes: Vec<_> = asked.map(|(node, peer)| (*node, peer.client.clone())).collect();
            (found, nodes)
        };
        let answers = nodes
            .into_iter()
            .map(|(node, client)| async move { (node, client.process_above(mux::within(EXPLAIN_LIMIT), pid).await) });
        let mut silent = Vec::new();
        for (node, answer) in futures::future::join_all(answers).await {
            match answer {
                Ok(process) => found.extend(process.map(|process| (process, node))),
                // It may be there; one that is elsewhere is shown all the same.
                Err(_) => silent.push(node),
            }
        }
        if let Some(found) = crate::state::the_one_with_pid(pid, &found).map_err(invalid)? {
            return Ok(found);
        }
        let mut what =
            format!("no worker process has the process id {pid}, and none has started the process that has it");
        if !silent.is_empty() {
            let said = silent.iter().map(|node| match self.suspicion_of(*node) {
                Some(suspicion) => suspicion,
                None => format!("{node} did not answer; see `wingbeat why {node}`"),
            });
            what = format!("{what}, as far as is known: {}", said.collect::<Vec<_>>().join("; "));
        }
        Err(invalid(what))
    }

    /// Why something waits. A task's owner says how far it knows; the scheduler goes on from there.
    pub(super) async fn explain(&self, subject: Subject) -> Result<Explanation, Error> {
        let Subject::Task(task) = subject else {
            let explained = self.inside.lock().state.explain(self.now(), subject);
            return explained.ok_or_else(|| unknown(&subject.to_string()));
        };
        let standing = self.standing(task).await?;
        let mut inside = self.inside.lock();
        let (state, now) = (&mut inside.state, self.now());
        Ok(match standing {
            TaskStanding::Known(explanation) | TaskStanding::InProcess(explanation, _) => explanation,
            TaskStanding::WaitsForLease(so_far, shape) => state.explain_demand(now, task.owner, &shape, so_far),
            TaskStanding::OnLease(so_far, lease) => state.explain_lease(now, lease, so_far),
            TaskStanding::WaitsForActor(mut so_far, actor) => {
                if let Some(actor) = state.explain(now, Subject::Actor(actor)) {
                    so_far.reasons.push(format!("{} {}", actor.subject, actor.state));
                    so_far.reasons.extend(actor.reasons);
                    so_far.holders = actor.holders;
                    so_far.help.extend(actor.help);
                }
                so_far
            }
        })
    }
}
