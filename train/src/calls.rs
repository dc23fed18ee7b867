//! The calls of a group whose ranks are Rust functions: made in their bundles, and heard to their end.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{SelectAll, Stream, StreamExt};
use wingbeat::{NodeId, ObjectStream, with_defaults, without_retries};
use wingbeat_collective::Meeting;

use crate::context::{Called, MakeCall, RankContext};
use crate::group::Group;
use crate::launch::{Launched, Stored};
use crate::plan::Plan;
use crate::process::{Event, Outcome};

impl Group {
    /// Makes the calls of all ranks.
    pub(crate) fn make_calls(&self, plan: &Plan, make: &MakeCall, attempt: u32, stored: &Stored) -> Launched {
        let mut launched = Launched { events: SelectAll::new(), port: 0, ras: None, calls: Vec::new() };
        let world_size = self.ranks.len() as u32;
        let meeting = Meeting::of(world_size);
        for (index, rank) in self.ranks.iter().enumerate() {
            let of_node = self.ranks[..index].iter().filter(|other| other.at.node == rank.at.node);
            let context = RankContext {
                rank: index as u32,
                world_size,
                local_rank: of_node.count() as u32,
                attempt,
                node: NodeId(rank.at.node),
                meeting: meeting.clone(),
                actor: rank.handle.clone(),
                checkpoint: stored.checkpoints.get(index).filter(|path| !path.is_empty()).cloned(),
                stopped: Arc::default(),
            };
            let place = plan.scaling.of_call(self.reserved.bundles.id(), rank.bundle);
            // One alone must not be made again: the others would wait for the first.
            let Called { call, ended } = with_defaults(place, || without_retries(|| make(context)));
            launched.calls.push(call);
            let heard = heard(rank.handle.questions(), ended).map(move |event| (index, event));
            launched.events.push(heard.boxed());
        }
        launched
    }
}

/// What a rank says: what its function asks, and at last how its call has ended.
fn heard(
    questions: ObjectStream<Event>,
    ended: BoxFuture<'static, wingbeat::Result<()>>,
) -> impl Stream<Item = wingbeat::Result<Event>> + Send + use<> {
    futures::stream::unfold(Some((questions, ended)), |goes_on| async move {
        let (mut questions, mut ended) = goes_on?;
        tokio::select! {
            biased;
            Some(asked) = questions.next() => {
                // Its actor is gone, and the rank with that.
                let is_lost = asked.is_err();
                Some((asked, (!is_lost).then_some((questions, ended))))
            }
            done = &mut ended => {
                let event = match done {
                    Ok(()) => Event::Ended(Outcome { code: Some(0), ..Outcome::default() }),
                    Err(error) => Event::Failed(error),
                };
                Some((Ok(event), None))
            }
        }
    })
}
