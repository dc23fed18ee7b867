//! Whose objects lie in the store. An owner deletes them when nobody needs them; when it is gone, the steward of its node does,
//! for those to which somebody refers. Nobody would delete the others.
//!
//! The head knows who is gone. It is asked now and then, so that nothing depends on the arrival of one message. Before anything is
//! deleted, the steward is asked what it keeps.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::Mutex;
use wingbeat_core::limits::limit;
use wingbeat_core::spec::Address;
use wingbeat_core::{JobId, ObjectId, ProcessId};
use wingbeat_net::address::{self, DialError};
use wingbeat_net::handshake::Purpose;
use wingbeat_net::limits::limits;
use wingbeat_net::link::IDS_A_MESSAGE;
use wingbeat_net::messages::HeadMessage;
use wingbeat_net::mux::{self, Waiting};
use wingbeat_net::services::{NodeRequest, NodeResponse, ProcessClient, ProcessRequest, ProcessResponse};
use wingbeat_process::Steward;

use super::Daemon;

/// How often the head is asked: 10 s, `WINGBEAT_OWNERS_MS`.
static ASKED_EVERY: LazyLock<Duration> = LazyLock::new(|| limit("WINGBEAT_OWNERS_MS", Duration::from_secs(10)));

/// The owners of objects that were stored here, each with the steward of its node, if that is known.
type Known = BTreeMap<ProcessId, Option<Address>>;

/// Whose objects lie here, and who answers for those of this node's own processes when they are no more.
pub(super) struct Owners {
    pub steward: Steward,
    /// By the job in whose name they were stored.
    by_job: Mutex<BTreeMap<JobId, Known>>,
}

impl Owners {
    pub(super) fn new(steward: Steward) -> Owners {
        Owners { steward, by_job: Mutex::default() }
    }

    pub(super) fn note(&self, job: JobId, owner: ProcessId, steward: Option<Address>) {
        let mut by_job = self.by_job.lock();
        let known = by_job.entry(job).or_default().entry(owner).or_default();
        if steward.is_some() {
            *known = steward;
        }
    }

    /// Forgets those for whom `has_objects` says no; answers with the others.
    fn with_objects(&self, has_objects: impl Fn(ProcessId) -> bool) -> BTreeMap<JobId, BTreeSet<ProcessId>> {
        let mut by_job = self.by_job.lock();
        by_job.retain(|_, owners| {
            owners.retain(|owner, _| has_objects(*owner));
            !owners.is_empty()
        });
        by_job.iter().map(|(job, owners)| (*job, owners.keys().copied().collect())).collect()
    }

    fn steward_of(&self, owner: ProcessId) -> Option<Address> {
        self.by_job.lock().values().find_map(|owners| owners.get(&owner)?.clone())
    }
}

impl Daemon {
    /// Asks who is gone until the daemon ends.
    pub(super) async fn ask_for_owners(self: Arc<Self>) {
        let mut ended = self.ending.ended.subscribe();
        loop {
            tokio::select! {
                () = tokio::time::sleep(*ASKED_EVERY) => {}
                _ = ended.wait_for(Option::is_some) => return,
            }
            let owners = self.owners.with_objects(|owner| self.store.has_objects_of(owner));
            if !owners.is_empty() {
                self.head.link.send(HeadMessage::Owners(owners));
            }
        }
    }

    /// The owners are gone, and maybe their jobs: what their stewards do not keep is nobody's any more. What somebody reads goes when
    /// it was read.
    pub(super) fn owners_gone(self: &Arc<Self>, owners: &[ProcessId], are_jobs_over: bool) {
        let mut elsewhere: BTreeMap<ProcessId, (Address, Vec<ObjectId>)> = BTreeMap::new();
        for owner in owners {
            let objects = self.store.objects_of(*owner);
            match self.owners.steward_of(*owner) {
                None => self.delete_all_but(objects, Vec::new()),
                Some(steward) if steward.process == self.owners.steward.address().process => {
                    let kept = self.owners.steward.keeps(objects.clone(), are_jobs_over);
                    self.delete_all_but(objects, kept);
                }
                Some(steward) => {
                    elsewhere.entry(steward.process).or_insert_with(|| (steward, Vec::new())).1.extend(objects);
                }
            }
        }
        for (steward, objects) in elsewhere.into_values() {
            let daemon = self.clone();
            self.vital("asking a steward", async move {
                daemon.delete_unless_kept(&steward, objects, are_jobs_over).await;
            });
        }
    }

    /// Asks the steward of another node what it keeps. Where it does not answer, it is asked when the head was asked again.
    async fn delete_unless_kept(self: &Arc<Self>, steward: &Address, objects: Vec<ObjectId>, are_jobs_over: bool) {
        let hello = self.hello(Purpose::Control);
        let stream = match address::dial_known(steward, "a steward", &self.who.token, hello).await {
            Ok(stream) => stream,
            // Its node is gone, with all that it kept.
            Err(DialError::Gone(_)) => return self.delete_all_but(objects, Vec::new()),
            Err(DialError::Failed(error)) => {
                // A machine that is off, or behind a firewall, says nothing. The head knows whether its node is lost.
                let head = self.head.client();
                let ended = match &head {
                    Some(head) => head.has_ended(mux::within(limits().head), steward.process).await,
                    None => Ok(false),
                };
                return match ended {
                    Ok(true) => self.delete_all_but(objects, Vec::new()),
                    _ => tracing::debug!(%error, "cannot ask a steward"),
                };
            }
        };
        let (connection, client, server) =
            mux::connect::<ProcessRequest, ProcessResponse, NodeRequest, NodeResponse>(stream, Waiting::Asleep);
        drop(server);
        let client = ProcessClient::new(mux::client_config(), client).spawn();
        for objects in objects.chunks(IDS_A_MESSAGE) {
            match client.keeps(mux::within(limits().head), objects.to_vec(), are_jobs_over).await {
                Ok(kept) => self.delete_all_but(objects.to_vec(), kept),
                Err(error) => {
                    tracing::debug!(%error, "a steward does not answer");
                    break;
                }
            }
        }
        connection.close();
    }

    fn delete_all_but(self: &Arc<Self>, mut objects: Vec<ObjectId>, kept: Vec<ObjectId>) {
        let kept: HashSet<ObjectId> = kept.into_iter().collect();
        objects.retain(|object| !kept.contains(object));
        if !objects.is_empty() {
            tracing::debug!(count = objects.len(), "deletes objects whose owners have ended");
            self.delete(objects);
        }
    }
}
