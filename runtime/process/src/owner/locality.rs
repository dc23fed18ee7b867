//! Tasks go to their data.

use std::sync::Arc;

use wingbeat_core::NodeId;
use wingbeat_core::spec::{Arg, Shape, Strategy};

/// Arguments on one node that are worth a lease there. Moving less between machines takes less time than starting a
/// worker process.
const WORTH: u64 = 16 << 20;

/// The shape of a task with these arguments: on the node that holds most of them, if that is much and another node
/// might be chosen, and if the task may run anywhere.
pub(crate) fn near_data(shape: &Arc<Shape>, args: &[Arg], nodes: u32) -> Option<Arc<Shape>> {
    if nodes < 2 || shape.strategy != Strategy::Default || !shape.labels.is_empty() {
        return None;
    }
    let mut held: Vec<(NodeId, u64)> = Vec::new();
    for arg in args {
        let Arg::Stored(_, stored) = arg else { continue };
        for holder in &stored.nodes {
            match held.iter_mut().find(|(node, _)| *node == holder.node) {
                Some((_, bytes)) => *bytes += stored.size,
                None => held.push((holder.node, stored.size)),
            }
        }
    }
    let (node, _) = held.into_iter().filter(|(_, bytes)| *bytes >= WORTH).max_by_key(|(_, bytes)| *bytes)?;
    Some(Arc::new(Shape { strategy: Strategy::Node { node, soft: true }, ..(**shape).clone() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use wingbeat_core::spec::{Address, MachineId};
    use wingbeat_core::value::{StoreNode, Stored};
    use wingbeat_core::{Amount, ProcessId, ResourceSet, TaskId};

    fn stored(size: u64, at: &[u64]) -> Arg {
        let address =
            Address { process: ProcessId(1), machine: MachineId(1), unix: String::new(), tcp: None, steward: None };
        let nodes = at.iter().map(|node| StoreNode { node: NodeId(*node), address: address.clone() }).collect();
        Arg::Stored(TaskId { owner: ProcessId(1), seq: 1 }.output(0), Stored { size, nodes, refs: None })
    }

    #[test]
    fn a_task_goes_to_the_node_that_holds_most_of_its_arguments() {
        let shape = Arc::new(Shape::of(ResourceSet::cpus(Amount::ONE)));
        let args = [stored(WORTH, &[1]), stored(WORTH, &[2]), stored(WORTH, &[2])];
        let near = near_data(&shape, &args, 2).unwrap();
        assert_eq!(near.strategy, Strategy::Node { node: NodeId(2), soft: true });
        assert!(near_data(&shape, &args, 1).is_none(), "there is nowhere else to go");
        assert!(near_data(&shape, &[stored(WORTH - 1, &[1])], 2).is_none(), "little data travels");
        let spread = Arc::new(Shape { strategy: Strategy::Spread, ..(*shape).clone() });
        assert!(near_data(&spread, &args, 2).is_none(), "the user said where");
    }
}
