//! Items of streams that arrive.

use std::sync::Arc;

use wingbeat_core::value::ObjectValue;
use wingbeat_core::{ProcessId, TaskId};
use wingbeat_net::messages::Work;

use crate::owner::Owner;
use crate::owner::streams::Place;

impl Owner {
    pub(super) fn stream_item(self: &Arc<Self>, from: ProcessId, task: TaskId, index: u32, value: ObjectValue) {
        let refs = value.refs().map(|refs| refs.ids.clone());
        self.place_item(from, task, index, value);
        // It holds the refs in the item until they are registered here, or until it hears that they are not needed.
        if let Some(refs) = refs {
            self.confirm(from, &refs, Work::ItemReceived(task.output(index)).into());
        }
    }

    fn place_item(self: &Arc<Self>, from: ProcessId, task: TaskId, index: u32, value: ObjectValue) {
        let mut place = Place::Nowhere;
        self.streams.look(task, |state| {
            state.is_sent_by(from);
            place = state.place_of(index);
        });
        match place {
            Place::Wanted => {
                let handle = self.new_object(task.output(index), None);
                let contained = self.hold_refs(value.refs());
                self.resolve_object(handle.object(), value, contained);
                // Items arrive on this thread alone, so that nobody else has put one there.
                self.streams.put(task, index, handle);
                return;
            }
            // Another attempt sends the first ones again. It must know how far the consumer is, or it would wait there for
            // room that nobody will make.
            Place::Taken(count) => {
                self.send_to(from, Work::StreamTaken { task, count }.into());
            }
            Place::Arrived => {}
            Place::Nowhere => {
                self.send_to(from, Work::Cancel { task, force: false }.into());
            }
        }
        // The first one's copies stand, as long as anybody needs them.
        if let ObjectValue::Stored(stored) = &value {
            let id = task.output(index);
            match self.objects.get(id).and_then(|object| object.value()) {
                Some(current) => self.delete_other_copies(id, stored, &current),
                None => self.delete_stored(id, stored),
            }
        }
    }
}
