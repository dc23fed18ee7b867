//! The calls of one process to one actor that it did not send yet, in order. The arguments of 100,000 calls may come while the
//! first waits for its own: none of them is searched.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use wingbeat_core::TaskId;
use wingbeat_core::spec::Arg;

use crate::owner::calls::Call;
use crate::owner::wanted::Wanted;

/// The number of the first call of all: more than will ever be put before it.
const MIDDLE: u64 = 1 << 63;
/// So many places of calls that were taken out are kept in any case.
const FEW: usize = 64;

pub(crate) struct CallQueue {
    /// By number, from `first` on. None was taken out of the middle: the first and the last are there.
    places: VecDeque<Option<Call>>,
    first: u64,
    len: usize,
    /// The numbers of those whose arguments are not all there.
    unresolved: HashMap<TaskId, u64>,
}

impl Default for CallQueue {
    fn default() -> CallQueue {
        CallQueue { places: VecDeque::new(), first: MIDDLE, len: 0, unresolved: HashMap::new() }
    }
}

impl CallQueue {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The last in line.
    pub(crate) fn push_back(&mut self, call: Call) {
        if !call.resolved {
            self.unresolved.insert(call.spec.id, self.first.wrapping_add(self.places.len() as u64));
        }
        self.places.push_back(Some(call));
        self.len += 1;
    }

    /// The first in line.
    pub(crate) fn push_front(&mut self, call: Call) {
        self.first = self.first.wrapping_sub(1);
        if !call.resolved {
            self.unresolved.insert(call.spec.id, self.first);
        }
        self.places.push_front(Some(call));
        self.len += 1;
    }

    pub(crate) fn front(&self) -> Option<&Call> {
        self.places.front()?.as_ref()
    }

    pub(crate) fn pop_front(&mut self) -> Option<Call> {
        let call = self.places.pop_front()??;
        self.first = self.first.wrapping_add(1);
        self.taken(&call);
        Some(call)
    }

    /// In order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Call> {
        self.places.iter().flatten()
    }

    /// All, in order.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Call> + use<> {
        std::mem::take(self).places.into_iter().flatten()
    }

    /// The arguments of a call are all there.
    pub(crate) fn resolved(&mut self, id: TaskId, args: Vec<Arg>) {
        let Some(number) = self.unresolved.remove(&id) else { return };
        if let Some(call) = self.at(number) {
            Arc::make_mut(&mut call.spec).args = args;
            call.resolved = true;
        }
    }

    /// Takes out a call whose arguments are not all there.
    pub(crate) fn take_unresolved(&mut self, id: TaskId) -> Option<Call> {
        let number = *self.unresolved.get(&id)?;
        let call = self.places.get_mut(number.wrapping_sub(self.first) as usize)?.take()?;
        self.taken(&call);
        Some(call)
    }

    /// Takes out those that are wanted, in order.
    pub(crate) fn take_wanted(&mut self, wanted: &mut Wanted) -> Vec<Call> {
        let mut found = Vec::new();
        for place in &mut self.places {
            if wanted.is_empty() {
                break;
            }
            if place.as_ref().is_some_and(|call| wanted.take(call.spec.id).is_some()) {
                found.extend(place.take());
            }
        }
        for call in &found {
            self.taken(call);
        }
        found
    }

    fn at(&mut self, number: u64) -> Option<&mut Call> {
        self.places.get_mut(number.wrapping_sub(self.first) as usize)?.as_mut()
    }

    /// A call has left its place.
    fn taken(&mut self, call: &Call) {
        self.len -= 1;
        if !call.resolved {
            self.unresolved.remove(&call.spec.id);
        }
        while let Some(None) = self.places.front() {
            self.places.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        while let Some(None) = self.places.back() {
            self.places.pop_back();
        }
        if self.places.len() > 2 * self.len + FEW {
            self.close_up();
        }
    }

    /// Gives those that are there new numbers, without places between them.
    fn close_up(&mut self) {
        self.places.retain(Option::is_some);
        for (index, call) in self.places.iter().enumerate() {
            if let Some(call) = call.as_ref().filter(|call| !call.resolved) {
                self.unresolved.insert(call.spec.id, self.first.wrapping_add(index as u64));
            }
        }
    }
}
