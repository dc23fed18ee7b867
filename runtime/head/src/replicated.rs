//! A journal that a standby may have a copy of: what somebody waits for is then written by both.

use std::sync::Arc;

use futures::future::BoxFuture;
use wingbeat_core::error::Error;

use crate::journal::Journal;
use crate::service::Durable;
use crate::service::succession::Follower;
use crate::state::Fact;

/// The journal of a head that may have a standby.
pub(crate) struct Replicated {
    pub journal: Journal,
    pub standby: Arc<Follower>,
}

impl Replicated {
    fn by_both(&self, written: BoxFuture<'static, Result<(), Error>>) -> BoxFuture<'static, Result<(), Error>> {
        let standby = self.standby.clone();
        Box::pin(async move {
            written.await?;
            standby.has_confirmed().await;
            Ok(())
        })
    }
}

impl Durable for Replicated {
    fn write(&self, facts: Vec<Fact>) {
        self.journal.write(facts);
    }

    fn write_and_tell(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        self.by_both(self.journal.write_and_tell(facts))
    }

    fn intend(&self, facts: Vec<Fact>) -> BoxFuture<'static, Result<(), Error>> {
        self.by_both(self.journal.intend(facts))
    }

    fn feed(&self) {
        self.journal.feed();
    }

    fn why_it_fails(&self) -> Option<String> {
        self.journal.why_it_fails()
    }
}
