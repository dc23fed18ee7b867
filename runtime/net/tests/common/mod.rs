//! What test programs share: processes to which only messages of their peers matter.

#![allow(dead_code, unused_macros, unused_imports, reason = "each test program uses its part")]

use std::sync::Arc;

use parking_lot::Mutex;
use wingbeat_net::messages::PeerMessage;

/// The rest of a `Process` of which only `deliver` matters.
macro_rules! answers_as_anybody {
    () => {
        async fn head_events(self, _: tarpc::context::Context, _: u64, _: Vec<wingbeat_net::messages::HeadEvent>) {}
        async fn commands(self, _: tarpc::context::Context, _: Vec<wingbeat_net::messages::WorkerCommand>) {}
        async fn logs(self, _: tarpc::context::Context, _: Vec<wingbeat_net::messages::LogLine>) {}
        async fn explain_task(
            self,
            _: tarpc::context::Context,
            task: wingbeat_core::TaskId,
        ) -> wingbeat_net::messages::TaskStanding {
            wingbeat_net::messages::TaskStanding::Known(wingbeat_net::messages::Explanation {
                subject: task.to_string(),
                ..Default::default()
            })
        }
        async fn stacks(
            self,
            _: tarpc::context::Context,
        ) -> Result<wingbeat_net::messages::ProcessStacks, wingbeat_core::error::Error> {
            Ok(Default::default())
        }
        async fn keeps(
            self,
            _: tarpc::context::Context,
            _: Vec<wingbeat_core::ObjectId>,
            _: bool,
        ) -> Vec<wingbeat_core::ObjectId> {
            Vec::new()
        }
        async fn read_executable(
            self,
            _: tarpc::context::Context,
            offset: u64,
        ) -> Result<wingbeat_core::codec::Payload, wingbeat_core::error::Error> {
            Ok(wingbeat_core::codec::Payload(offset.to_le_bytes().to_vec().into()))
        }
    };
}
pub(crate) use answers_as_anybody;

/// Numbers that came in batches over any number of connections.
#[derive(Clone, Default)]
pub(crate) struct Heard {
    /// The number of the next batch.
    next: Arc<Mutex<u64>>,
    got: Arc<Mutex<Vec<u64>>>,
}

impl Heard {
    /// Takes a batch in, unless it has come before.
    pub(crate) fn take_in(&self, number: u64, messages: Vec<PeerMessage>) {
        let mut next = self.next.lock();
        if number < *next {
            return;
        }
        *next = number + 1;
        self.got.lock().extend(messages.into_iter().map(|message| match message {
            PeerMessage::Ready(lease) => lease.0,
            other => panic!("{other:?}"),
        }));
    }

    pub(crate) fn batches(&self) -> u64 {
        *self.next.lock()
    }

    pub(crate) fn count(&self) -> usize {
        self.got.lock().len()
    }

    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.got.lock().clone()
    }
}
