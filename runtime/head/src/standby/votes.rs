//! A standby asks nodes whether it may lead.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use wingbeat_core::spec::Address;
use wingbeat_core::{NodeId, ProcessId};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{Ballot, Vote};
use wingbeat_net::mux::Waiting;
use wingbeat_net::services::{NodeClient, NodeRequest, NodeResponse, ProcessRequest, ProcessResponse};
use wingbeat_net::{address, mux};

use super::{Next, Standby};
use crate::succession::standing_by::Order;

/// How long a ballot may take.
const VOTE_LIMIT: Duration = Duration::from_secs(1);

/// Answers of nodes that wait to be looked at.
pub(super) const VOTES: usize = 1024;

impl Standby {
    /// Decides until something else comes next.
    pub(super) async fn decide(
        self: &Arc<Self>,
        votes: &mpsc::Sender<(NodeId, Ballot, Vote)>,
        incoming: &mut mpsc::Receiver<(NodeId, Ballot, Vote)>,
    ) -> Next {
        let followed = self.deciding.lock().may_follow();
        let mut beat = tokio::time::interval(limits().takeover / 16);
        let mut lacks_file = false;
        loop {
            let orders = tokio::select! {
                _ = beat.tick() => self.deciding.lock().tick(self.now()),
                vote = incoming.recv() => match vote {
                    Some((node, ballot, vote)) => self.deciding.lock().voted(self.now(), node, &ballot, vote),
                    None => Vec::new(),
                },
            };
            for order in orders {
                match order {
                    Order::Lead(epoch) => return Next::Leads(epoch),
                    Order::Ask(ballot, nodes) => {
                        // With a promise, nodes would refuse the head that is started again.
                        if let Err(error) = self.keeps_its_file().await {
                            if !std::mem::replace(&mut lacks_file, true) {
                                tracing::error!(%error, "this standby cannot take over");
                            }
                            continue;
                        }
                        for (node, address) in nodes {
                            let (standby, ballot, votes) = (self.clone(), ballot.clone(), votes.clone());
                            // It ends within a second.
                            tokio::spawn(async move {
                                let asking = standby.ask(&address, &ballot);
                                if let Ok(Some(vote)) = tokio::time::timeout(VOTE_LIMIT, asking).await {
                                    tracing::debug!(%node, ?ballot, ?vote, "a node has voted");
                                    let _ = votes.send((node, ballot, vote)).await;
                                }
                            });
                        }
                    }
                }
            }
            let may_follow = self.deciding.lock().may_follow();
            if may_follow != followed {
                return if may_follow { Next::Follows } else { Next::Runs };
            }
        }
    }

    async fn ask(&self, node: &Address, ballot: &Ballot) -> Option<Vote> {
        let hello = self.hello(ProcessId(self.cluster.0));
        let stream = address::dial(node, "a node", &self.token, hello).await.ok()?;
        let (connection, client, _) =
            mux::connect::<NodeRequest, NodeResponse, ProcessRequest, ProcessResponse>(stream, Waiting::Asleep);
        let _closes = connection.closes();
        let client = NodeClient::new(mux::client_config(), client).spawn();
        client.elect(mux::within(VOTE_LIMIT), ballot.clone()).await.ok()
    }
}
