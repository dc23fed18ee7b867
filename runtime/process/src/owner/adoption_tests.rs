use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use wingbeat_core::error::Error;
use wingbeat_core::spec::{Address, MachineId};
use wingbeat_core::value::{ObjectValue, Packed, Refs, StoreNode, Stored};
use wingbeat_core::{ClusterId, NodeId, ObjectId, ProcessId, TaskId};
use wingbeat_net::messages::{HeadMessage, PeerMessage, Registration, Shadow};

use crate::owner::table::Released;
use crate::owner::{Outside, Owner};

const STEWARD: ProcessId = ProcessId(1);
const DEAD: ProcessId = ProcessId(2);
const BORROWER: ProcessId = ProcessId(3);
const OTHER: ProcessId = ProcessId(4);

/// Everybody can be reached but who is gone, and everything that is said is kept.
#[derive(Default)]
struct World {
    said: Mutex<Vec<(ProcessId, PeerMessage)>>,
    deleted: Mutex<Vec<ObjectId>>,
    gone: Mutex<Vec<ProcessId>>,
    kept: Mutex<Vec<ProcessId>>,
}

fn address(process: ProcessId) -> Address {
    Address { process, machine: MachineId(1), unix: String::new(), tcp: None, steward: None }
}

impl Outside for World {
    fn has_work_at_home(&self) {}

    fn now_ms(&self) -> u64 {
        0
    }
    fn learn(&self, _: &Address) {}
    fn address_of(&self, process: ProcessId) -> Option<Address> {
        Some(address(process))
    }
    fn is_gone(&self, process: ProcessId) -> bool {
        self.gone.lock().contains(&process)
    }
    fn send(&self, owner: &Arc<Owner>, to: &Address, message: PeerMessage) -> bool {
        self.send_to(owner, to.process, message, false)
    }
    fn send_to(&self, _: &Arc<Owner>, to: ProcessId, message: PeerMessage, _: bool) -> bool {
        let reaches = !self.is_gone(to);
        if reaches {
            self.said.lock().push((to, message));
        }
        reaches
    }
    fn lacks_descriptors(&self) -> Option<String> {
        None
    }

    fn has_head(&self) -> bool {
        true
    }
    fn has_steward(&self, _: ProcessId) -> bool {
        false
    }
    fn left_to(&self, _: ProcessId) -> Vec<ProcessId> {
        Vec::new()
    }
    fn tell_steward(&self, _: &Arc<Owner>, message: PeerMessage) -> bool {
        self.said.lock().push((STEWARD, message));
        true
    }
    fn run(&self, code: Box<dyn FnOnce() + Send>) {
        code();
    }
    fn keeps_for_a_while(&self, _: &Arc<Owner>, gone: ProcessId) {
        self.kept.lock().push(gone);
    }
    fn when_taken_in(&self, _: &Arc<Owner>, _: ProcessId, _: Registration) -> bool {
        true
    }
    fn tell_head(&self, _: &Arc<Owner>, _: HeadMessage) {}
    fn delete_at(&self, _: &Arc<Owner>, _: &StoreNode, object: ObjectId) {
        self.deleted.lock().push(object);
    }
    fn has_ebbed(&self, _: &Arc<Owner>) {}
}

/// A steward and what it has let go of.
struct Bench {
    world: Arc<World>,
    steward: Arc<Owner>,
    released: UnboundedReceiver<Released>,
}

impl Bench {
    fn new() -> Bench {
        let world = Arc::new(World::default());
        let (steward, released) = Owner::new(STEWARD, ClusterId(1), world.clone());
        steward.serve_as_steward();
        Bench { world, steward, released }
    }

    fn hears(&self, from: ProcessId, message: PeerMessage) {
        self.steward.hears(from, message);
    }

    fn shadows(&self, id: ObjectId, value: Option<ObjectValue>) {
        self.hears(DEAD, PeerMessage::Shadows(vec![Shadow::Kept(id, value)]));
    }

    fn dies(&self) {
        self.world.gone.lock().push(DEAD);
        let borrowed = self.steward.borrowed_over(DEAD);
        self.steward.settle_borrowed(DEAD, borrowed);
    }

    /// What the borrower was told of its objects since this was asked last.
    fn told(&self) -> Vec<(ObjectId, ObjectValue)> {
        let said = std::mem::take(&mut *self.world.said.lock());
        let told = said.into_iter().filter_map(|(to, message)| match message {
            PeerMessage::Resolved(values) if to == BORROWER => Some(values),
            _ => None,
        });
        told.flatten().collect()
    }

    fn is_told_that_its_owner_died(&self, id: ObjectId) -> bool {
        let told = self.told();
        assert_eq!(told.len(), 1, "{told:?}");
        let (of, value) = &told[0];
        *of == id && matches!(value, ObjectValue::Failed(error) if matches!(**error, Error::OwnerDied { .. }))
    }

    fn lets_go(&mut self) {
        self.steward.let_go_of(DEAD);
        while let Ok(released) = self.released.try_recv() {
            self.steward.release([released]);
        }
    }
}

fn object(owner: ProcessId, seq: u64) -> ObjectId {
    TaskId { owner, seq }.output(0)
}

fn inline(refs: &[ObjectId]) -> ObjectValue {
    let refs = (!refs.is_empty()).then(|| Box::new(Refs { ids: refs.to_vec(), owners: Vec::new() }));
    ObjectValue::Inline(Packed { bytes: Bytes::from_static(b"value").into(), refs })
}

fn stored() -> ObjectValue {
    let at = StoreNode { node: NodeId(9), address: address(ProcessId(9)) };
    ObjectValue::Stored(Stored { size: 1 << 20, nodes: vec![at], refs: None })
}

#[test]
fn a_borrower_reads_what_was_adopted_and_its_release_frees_it() {
    let mut bench = Bench::new();
    let id = object(DEAD, 1);
    bench.shadows(id, None);
    bench.shadows(id, Some(stored()));
    bench.dies();
    bench.hears(BORROWER, PeerMessage::Borrow(vec![(id, Registration(5))]));
    bench.hears(BORROWER, PeerMessage::Subscribe(vec![id]));
    assert!(matches!(bench.told().as_slice(), [(of, ObjectValue::Stored(_))] if *of == id));
    assert_eq!(bench.steward.keeps(vec![id, object(DEAD, 2)], false), [id]);
    bench.lets_go();
    assert!(bench.world.deleted.lock().is_empty(), "it is still borrowed");
    bench.hears(BORROWER, PeerMessage::Release(vec![(id, Registration(5))]));
    assert_eq!(*bench.world.deleted.lock(), [id]);
    assert_eq!(bench.steward.what_is_left(), Vec::<String>::new());
}

#[test]
fn what_nobody_registers_is_kept_for_a_while() {
    let mut bench = Bench::new();
    let id = object(DEAD, 1);
    bench.shadows(id, Some(stored()));
    bench.dies();
    assert_eq!(*bench.world.kept.lock(), [DEAD]);
    // Somebody who has registered does not end that: another may be about to.
    bench.hears(BORROWER, PeerMessage::Borrow(vec![(id, Registration(1))]));
    bench.hears(BORROWER, PeerMessage::Release(vec![(id, Registration(1))]));
    assert!(bench.world.deleted.lock().is_empty());
    bench.lets_go();
    assert_eq!(*bench.world.deleted.lock(), [id]);
    assert_eq!(bench.steward.what_is_left(), Vec::<String>::new());
}

#[test]
fn whoever_notices_the_end_sooner_is_answered_after_it() {
    let bench = Bench::new();
    let id = object(DEAD, 1);
    bench.shadows(id, Some(inline(&[])));
    bench.hears(BORROWER, PeerMessage::Borrow(vec![(id, Registration(1))]));
    bench.hears(BORROWER, PeerMessage::Subscribe(vec![id]));
    let asks = |(to, message): &(ProcessId, PeerMessage)| *to == DEAD && matches!(message, PeerMessage::Borrow(_));
    assert!(bench.world.said.lock().iter().any(asks), "its owner is spoken to, so that its end shows");
    assert!(bench.told().is_empty(), "its owner may live");
    bench.dies();
    assert!(matches!(bench.told().as_slice(), [(of, ObjectValue::Inline(_))] if *of == id));
}

#[test]
fn an_owner_whose_end_nobody_noticed_is_adopted_when_it_is_asked_for() {
    let bench = Bench::new();
    let id = object(DEAD, 1);
    bench.shadows(id, Some(inline(&[])));
    bench.world.gone.lock().push(DEAD);
    bench.hears(BORROWER, PeerMessage::Subscribe(vec![id]));
    assert!(matches!(bench.told().as_slice(), [(of, ObjectValue::Inline(_))] if *of == id));
}

#[test]
fn what_was_not_ready_or_not_referred_to_dies_with_its_owner() {
    let bench = Bench::new();
    let (pending, freed, unknown) = (object(DEAD, 1), object(DEAD, 2), object(DEAD, 3));
    bench.shadows(pending, None);
    bench.shadows(freed, Some(stored()));
    bench.hears(DEAD, PeerMessage::Shadows(vec![Shadow::Freed(freed)]));
    bench.dies();
    for id in [pending, freed, unknown] {
        bench.hears(BORROWER, PeerMessage::Subscribe(vec![id]));
        assert!(bench.is_told_that_its_owner_died(id), "{id}");
    }
}

#[test]
fn what_was_freed_while_there_was_no_contact_is_forgotten_when_all_was_said_again() {
    let mut bench = Bench::new();
    let (kept, freed, theirs) = (object(DEAD, 1), object(DEAD, 2), object(OTHER, 1));
    bench.shadows(kept, Some(inline(&[])));
    bench.shadows(freed, Some(inline(&[theirs])));
    let again = [Shadow::Again, Shadow::Kept(kept, Some(inline(&[]))), Shadow::AllSaid];
    for shadow in again {
        assert_eq!(bench.steward.values_shadowed_of(DEAD).len(), 2);
        bench.hears(DEAD, PeerMessage::Shadows(vec![shadow]));
    }
    assert_eq!(bench.steward.values_shadowed_of(DEAD), [kept]);
    bench.lets_go();
    let releases =
        |(to, message): &(ProcessId, PeerMessage)| *to == OTHER && matches!(message, PeerMessage::Release(_));
    assert!(bench.world.said.lock().iter().any(releases), "the ref in it is held no longer");
}

#[test]
fn what_is_adopted_of_a_job_that_is_over_is_not_kept_for_those_who_may_come() {
    let mut bench = Bench::new();
    let (lent, unneeded) = (object(DEAD, 1), object(DEAD, 2));
    bench.shadows(lent, Some(stored()));
    bench.shadows(unneeded, Some(stored()));
    assert_eq!(bench.steward.keeps(vec![lent, unneeded], true), [lent, unneeded], "its end is not known here");
    bench.dies();
    bench.hears(BORROWER, PeerMessage::Borrow(vec![(lent, Registration(1))]));
    assert_eq!(bench.steward.keeps(vec![lent, unneeded], false), [lent, unneeded]);
    assert_eq!(bench.steward.keeps(vec![lent, unneeded], true), [lent]);
    bench.lets_go();
    assert_eq!(*bench.world.deleted.lock(), [unneeded]);
}

#[test]
fn a_value_that_could_not_be_read_while_it_was_borrowed_is_readable_when_it_is_adopted() {
    let bench = Bench::new();
    let (outer, inner) = (object(OTHER, 1), object(DEAD, 1));
    bench.hears(OTHER, PeerMessage::Shadows(vec![Shadow::Kept(outer, Some(inline(&[inner])))]));
    bench.shadows(inner, Some(inline(&[])));
    let lost = bench.steward.borrowed_over(DEAD);
    bench.steward.settle_borrowed(DEAD, lost);
    bench.dies();
    bench.hears(BORROWER, PeerMessage::Subscribe(vec![inner]));
    let told = bench.told();
    assert!(matches!(told.as_slice(), [(of, ObjectValue::Inline(_))] if *of == inner), "{told:?}");
}

#[test]
fn nobody_but_a_steward_hears_of_shadows() {
    let world = Arc::new(World::default());
    let (process, _released) = Owner::new(STEWARD, ClusterId(1), world);
    process.hears(DEAD, PeerMessage::Shadows(vec![Shadow::Kept(object(DEAD, 1), Some(inline(&[])))]));
    assert!(process.values_shadowed_of(DEAD).is_empty());
}

#[test]
fn refs_inside_a_value_are_held_as_long_as_it_is() {
    let mut bench = Bench::new();
    let (outer, inner, theirs) = (object(DEAD, 1), object(DEAD, 2), object(OTHER, 1));
    bench.shadows(inner, Some(stored()));
    bench.shadows(outer, Some(inline(&[inner, theirs])));
    let registers = |(to, message): &(ProcessId, PeerMessage)| {
        *to == OTHER && matches!(message, PeerMessage::Borrow(ids) if ids.iter().any(|(id, _)| *id == theirs))
    };
    assert!(bench.world.said.lock().iter().any(registers), "their owner would free them when this one has ended");
    bench.dies();
    bench.hears(BORROWER, PeerMessage::Borrow(vec![(outer, Registration(1))]));
    bench.lets_go();
    assert!(bench.world.deleted.lock().is_empty(), "the outer value refers to it");
    bench.hears(BORROWER, PeerMessage::Release(vec![(outer, Registration(1))]));
    bench.lets_go();
    assert_eq!(*bench.world.deleted.lock(), [inner]);
    let releases =
        |(to, message): &(ProcessId, PeerMessage)| *to == OTHER && matches!(message, PeerMessage::Release(_));
    assert!(bench.world.said.lock().iter().any(releases));
    assert_eq!(bench.steward.objects.len(), 0);
}

#[test]
fn an_owner_says_what_others_may_refer_to_and_nothing_else() {
    let world = Arc::new(World::default());
    let (owner, _released) = Owner::new(DEAD, ClusterId(1), world.clone());
    let (mine, lent) = (object(DEAD, 1), object(DEAD, 2));
    let handles = [owner.new_object(mine, None), owner.new_object(lent, None)];
    owner.resolve_object(handles[0].object(), inline(&[]), Vec::new());
    owner.hears(BORROWER, PeerMessage::Borrow(vec![(lent, Registration(1))]));
    owner.resolve_object(handles[1].object(), inline(&[]), Vec::new());
    owner.hears(BORROWER, PeerMessage::Release(vec![(lent, Registration(1))]));
    drop(handles);
    let said = world.said.lock();
    let shadows = said.iter().filter_map(|(to, message)| match message {
        PeerMessage::Shadows(shadows) if *to == STEWARD => Some(shadows),
        _ => None,
    });
    let kinds: Vec<_> = shadows
        .flatten()
        .map(|shadow| match shadow {
            Shadow::Kept(id, value) => (*id, Some(value.is_some())),
            Shadow::Freed(id) => (*id, None),
            Shadow::Again | Shadow::AllSaid | Shadow::Leaves => panic!("no contact was lost: {shadow:?}"),
        })
        .collect();
    assert_eq!(kinds, [(lent, Some(false)), (lent, Some(true)), (lent, None)]);
}
