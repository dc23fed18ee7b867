//! The shapes that somebody asks for, each under a number, so that they are compared and hashed once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use wingbeat_core::PlacementGroupId;
use wingbeat_core::spec::Shape;

use super::index::RequirementId;
use super::nodes::{Nodes, requirements_of};
use super::queue::{Account, Class};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct ShapeId(u32);

impl ShapeId {
    /// No shape's number is smaller.
    pub(super) const FIRST: ShapeId = ShapeId(0);
}

#[derive(Default)]
pub(super) struct Shapes {
    /// Never iterated: its order is random.
    ids: HashMap<Arc<Shape>, ShapeId>,
    known: BTreeMap<ShapeId, Known>,
    in_groups: BTreeMap<PlacementGroupId, BTreeSet<ShapeId>>,
    next: u32,
}

struct Known {
    shape: Arc<Shape>,
    uses: u32,
    requirements: Vec<RequirementId>,
}

impl Shapes {
    /// Somebody asks for this from now on, until [`Shapes::remove`].
    pub(super) fn add(&mut self, shape: Shape, nodes: &mut Nodes) -> ShapeId {
        if let Some(id) = self.ids.get(&shape) {
            if let Some(known) = self.known.get_mut(id) {
                known.uses += 1;
            }
            return *id;
        }
        let id = ShapeId(self.next);
        self.next += 1;
        let requirements = match shape.bundle() {
            Some((group, _)) => {
                self.in_groups.entry(group).or_default().insert(id);
                Vec::new()
            }
            None => requirements_of(&shape).into_iter().map(|requirement| nodes.index.add(requirement)).collect(),
        };
        let shape = Arc::new(shape);
        self.ids.insert(shape.clone(), id);
        self.known.insert(id, Known { shape, uses: 1, requirements });
        id
    }

    pub(super) fn id_of(&self, shape: &Shape) -> Option<ShapeId> {
        self.ids.get(shape).copied()
    }

    pub(super) fn remove(&mut self, id: ShapeId, nodes: &mut Nodes) {
        let Some(known) = self.known.get_mut(&id) else { return };
        known.uses -= 1;
        if known.uses > 0 {
            return;
        }
        let Some(known) = self.known.remove(&id) else { return };
        self.ids.remove(&known.shape);
        for requirement in known.requirements {
            nodes.index.remove(requirement);
        }
        if let Some((group, _)) = known.shape.bundle()
            && let Some(shapes) = self.in_groups.get_mut(&group)
        {
            shapes.remove(&id);
            if shapes.is_empty() {
                self.in_groups.remove(&group);
            }
        }
    }

    pub(super) fn get(&self, id: ShapeId) -> Option<&Arc<Shape>> {
        self.known.get(&id).map(|known| &known.shape)
    }

    /// One for each of its selectors, in order; none for a shape in a placement group.
    pub(super) fn requirements(&self, id: ShapeId) -> &[RequirementId] {
        self.known.get(&id).map_or(&[], |known| &known.requirements)
    }

    /// The class of those of a job who wait for a shape.
    pub(super) fn class_of(&self, id: ShapeId, job: Account) -> Class {
        match self.get(id).and_then(|shape| shape.bundle()) {
            Some(_) => Class::InGroup(id, job),
            None => Class::Shape(id, job),
        }
    }

    /// Shapes in bundles of this group.
    pub(super) fn in_group(&self, group: PlacementGroupId) -> Vec<ShapeId> {
        self.in_groups.get(&group).into_iter().flatten().copied().collect()
    }
}
