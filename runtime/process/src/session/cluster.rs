//! What a session can ask about the cluster, and change about it.

use std::time::Duration;

use wingbeat_core::error::Error;
use wingbeat_core::resources::{misnamed, quota_of};
use wingbeat_core::{NodeId, ResourceSet};
use wingbeat_net::limits::limits;
use wingbeat_net::messages::{ClusterState, Explanation, Subject};
use wingbeat_net::mux;

use crate::session::session::Session;

impl Session {
    /// What the head knows of the cluster.
    ///
    /// # Errors
    /// The head is gone.
    pub async fn cluster_state(&self) -> Result<ClusterState, Error> {
        self.ask_head(move |head| async move { head.state(mux::within(limits().head)).await }).await
    }

    /// Why something waits, or where it runs: the answer of `wingbeat why`. Takes the id of an object (its task is
    /// meant), an actor, a placement group or a node.
    ///
    /// # Errors
    /// Nobody knows it, or the head is gone.
    pub async fn why(&self, subject: impl Into<Subject>) -> Result<Explanation, Error> {
        let subject = subject.into();
        self.ask_head(move |head| async move { head.explain(mux::within(limits().head), subject).await }).await?
    }

    /// Sets what all jobs of a namespace together may hold at a time; `None` for anything. Resources that are not named
    /// are not limited.
    ///
    /// # Errors
    /// An amount that cannot be, or the head is gone.
    pub async fn set_quota(&self, namespace: &str, limit: Option<&[(&str, f64)]>) -> Result<(), Error> {
        let mut quota = limit.map(|_| ResourceSet::new());
        for (name, value) in limit.unwrap_or_default() {
            let invalid = |why| Error::InvalidOption {
                what: format!("the quota of `{namespace}`"),
                option: (*name).to_owned(),
                why,
            };
            if let Some(usual) = misnamed(name) {
                return Err(invalid(format!("it would limit nothing that is there: write {usual}")));
            }
            let amount = quota_of(name, *value).map_err(|error| invalid(error.to_string()))?;
            if let Some(quota) = &mut quota {
                quota.set(name, amount);
            }
        }
        let namespace = namespace.to_owned();
        self.ask_head(move |head| {
            let (namespace, quota) = (namespace.clone(), quota.clone());
            async move { head.set_quota(mux::within(limits().written), namespace, quota).await }
        })
        .await?
    }

    /// Places nothing more on a node; what still runs there after `within` is ended and runs again elsewhere, as far as
    /// it may be tried again.
    ///
    /// # Errors
    /// There is no such node, or the head is gone.
    pub async fn drain_node(&self, node: NodeId, within: Duration, why: &str) -> Result<(), Error> {
        self.set_drain(node, Some(within.as_millis() as u64), why).await
    }

    /// A node that was being drained takes work again.
    ///
    /// # Errors
    /// There is no such node, or the head is gone.
    pub async fn end_drain(&self, node: NodeId) -> Result<(), Error> {
        self.set_drain(node, None, "").await
    }

    async fn set_drain(&self, node: NodeId, within: Option<u64>, why: &str) -> Result<(), Error> {
        let why = why.to_owned();
        self.ask_head(move |head| {
            let why = why.clone();
            async move { head.drain_node(mux::within(limits().written), node, within, why, false).await }
        })
        .await?
    }
}
