//! What somebody can take from: a node, or a bundle of a placement group. Devices are accounted one by one.

use std::collections::BTreeMap;

use wingbeat_core::resources::{CPU, GPU, MEMORY};
use wingbeat_core::{Amount, ResourceSet};
use wingbeat_net::messages::DeviceInfo;

/// Bits of each part of [`Pool::left_over`], and the most that is told apart: 1,677 CPUs.
const LEFT_OVER_BITS: u32 = 24;
const LEFT_OVER_MOST: u64 = (1 << LEFT_OVER_BITS) - 1;

/// What there is, and what of it is free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pool {
    pub total: ResourceSet,
    /// May be negative: who goes on after a wait over-commits the node.
    pub available: ResourceSet,
    devices: Vec<Device>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Device {
    number: u32,
    /// How much of it belongs to this pool.
    whole: Amount,
    free: Amount,
    /// Somebody who has no lease still uses it, so that it is given to nobody.
    is_held: bool,
}

/// Devices, and how much of each.
pub(super) type Devices = Vec<(u32, Amount)>;

/// How close the devices of a lease or a gang are to each other, the closest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Span {
    OneDevice,
    /// All reach each other over NVLink.
    Island,
    /// All are next to the same memory.
    Numa,
    Node,
}

impl Span {
    pub(super) fn of(devices: &[u32], known: &[DeviceInfo]) -> Span {
        let all_in_one = |group: fn(&DeviceInfo) -> Option<u32>| {
            let mut groups = devices.iter().map(|device| known.get(*device as usize).and_then(group));
            groups.next().flatten().is_some_and(|first| groups.all(|group| group == Some(first)))
        };
        match devices {
            [] | [_] => Span::OneDevice,
            _ if all_in_one(|device| device.island) => Span::Island,
            _ if all_in_one(|device| device.numa) => Span::Numa,
            _ => Span::Node,
        }
    }

    /// In words.
    pub(super) fn shown(self) -> &'static str {
        match self {
            Span::OneDevice => "one device",
            Span::Island => "joined by NVLink",
            Span::Numa => "next to one memory node, not joined by NVLink",
            Span::Node => "on one node, as far as is known not joined by NVLink",
        }
    }
}

impl Pool {
    /// All of a node.
    pub(super) fn of_node(total: &ResourceSet) -> Pool {
        let count = (total.get(GPU).units() / Amount::ONE.units()).max(0) as u32;
        Pool::new(total, &(0..count).map(|device| (device, Amount::ONE)).collect::<Devices>())
    }

    /// These resources, with these devices among them.
    pub(super) fn new(total: &ResourceSet, devices: &[(u32, Amount)]) -> Pool {
        let devices = devices.iter().map(|(number, whole)| Device {
            number: *number,
            whole: *whole,
            free: *whole,
            is_held: false,
        });
        Pool { total: total.clone(), available: total.clone(), devices: devices.collect() }
    }

    pub(super) fn has_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    pub(super) fn has_room(&self, needed: &ResourceSet) -> bool {
        self.available.covers(needed) && self.could_pick(needed.get(GPU), |device| device.free)
    }

    /// Whether it could hold `needed` if nothing else were in it.
    pub(super) fn could_hold(&self, needed: &ResourceSet) -> bool {
        self.total.covers(needed) && self.could_pick(needed.get(GPU), |device| device.whole)
    }

    /// Whether devices that are `free` to this degree can serve `amount`, without picking any.
    fn could_pick(&self, amount: Amount, free: impl Fn(&Device) -> Amount) -> bool {
        let usable = |device: &&Device| !device.is_held;
        if amount.is_zero() {
            true
        } else if amount < Amount::ONE {
            self.devices.iter().filter(usable).any(|device| free(device) >= amount)
        } else {
            let whole = self.devices.iter().filter(usable).filter(|device| free(device) == Amount::ONE).count();
            whole as i64 >= amount.units() / Amount::ONE.units()
        }
    }

    /// Takes `resources`; whole devices as close as possible to each other and to `beside`. None if there is no room.
    pub(super) fn take(&mut self, resources: &ResourceSet, known: &[DeviceInfo], beside: &[u32]) -> Option<Devices> {
        let devices = self.pick(resources.get(GPU), known, beside)?;
        for (number, amount) in &devices {
            if let Some(device) = self.devices.iter_mut().find(|device| device.number == *number) {
                device.free = device.free - *amount;
            }
        }
        self.available.subtract(resources);
        Some(devices)
    }

    pub(super) fn give_back(&mut self, resources: &ResourceSet, devices: &[(u32, Amount)]) {
        for (number, amount) in devices {
            if let Some(device) = self.devices.iter_mut().find(|device| device.number == *number) {
                device.free = device.free + *amount;
                debug_assert!(device.free <= device.whole, "a device was given back twice");
            }
        }
        self.available.add(resources);
    }

    /// Whether these very devices, and the rest of `resources`, are free.
    pub(super) fn has_exactly(&self, resources: &ResourceSet, devices: &[(u32, Amount)]) -> bool {
        let free = |number: &u32| self.devices.iter().find(|device| device.number == *number).map(|device| device.free);
        self.available.covers(resources)
            && devices.iter().all(|(number, amount)| free(number).is_some_and(|free| free >= *amount))
    }

    /// Takes exactly these devices, which a node says are in use.
    pub(super) fn take_exactly(&mut self, resources: &ResourceSet, devices: &[(u32, Amount)]) {
        for (number, amount) in devices {
            if let Some(device) = self.devices.iter_mut().find(|device| device.number == *number) {
                device.free = device.free - *amount;
            }
        }
        self.available.subtract(resources);
    }

    /// What is free of each device.
    pub(super) fn free_devices(&self) -> Devices {
        self.devices.iter().map(|device| (device.number, device.free)).filter(|(_, free)| !free.is_zero()).collect()
    }

    /// Each device's number, how much of it belongs here, and how much of that is free.
    pub(super) fn devices(&self) -> impl Iterator<Item = (u32, Amount, Amount)> {
        self.devices.iter().map(|device| (device.number, device.whole, device.free))
    }

    /// The devices that may be given away, and what is free of each.
    pub(super) fn usable(&self) -> impl Iterator<Item = (u32, Amount)> {
        self.devices.iter().filter(|device| !device.is_held).map(|device| (device.number, device.free))
    }

    /// Says which devices somebody without a lease uses.
    pub(super) fn hold_devices(&mut self, held: impl Fn(u32) -> bool) {
        for device in &mut self.devices {
            device.is_held = held(device.number);
        }
    }

    /// Whether `held` has something that `needed` lacks here.
    pub(super) fn would_help(&self, held: &ResourceSet, needed: &ResourceSet) -> bool {
        needed.iter().any(|(name, amount)| {
            let no_device = name == GPU && !self.could_pick(amount, |device| device.free);
            (self.available.get(name) < amount || no_device) && !held.get(name).is_zero()
        })
    }

    /// What is missing for `needed`, in words.
    pub(super) fn missing(&self, needed: &ResourceSet) -> Vec<String> {
        let free = |name: &str| self.available.get(name);
        let mut short: Vec<String> = needed
            .iter()
            .filter(|(name, amount)| free(name) < *amount)
            .map(|(name, _)| {
                // Less than none, while one that waited goes on where another has its place.
                let (free, total) = (free(name).max(Amount::ZERO), self.total.get(name));
                match total.is_zero() {
                    true => format!("no {name}"),
                    false => format!("{} {name} free of {}", free.shown(name), total.shown(name)),
                }
            })
            .collect();
        let gpu = needed.get(GPU);
        if free(GPU) >= gpu && !self.could_pick(gpu, |device| device.free) {
            short.push(format!("{} GPU free, but in pieces of several devices", free(GPU)));
        }
        short
    }

    /// How much of its scarcest resource is given away, in thousandths.
    pub(super) fn load_permille(&self) -> i64 {
        let load = |name: &str, total: Amount| match total.units() {
            0 => 0,
            total => (total - self.available.get(name).units()) * 1000 / total,
        };
        self.total.iter().map(|(name, total)| load(name, total)).max().unwrap_or(0)
    }

    /// How much stays free of what is asked for, when it is taken: of the device that it would share, then of devices and
    /// whatever else is counted, then of CPUs. Smaller than 2⁶².
    pub(super) fn left_over(&self, needed: &ResourceSet) -> u64 {
        let left = |name: &str| (self.available.get(name) - needed.get(name)).units().max(0) as u64;
        let gpu = needed.get(GPU);
        let room = self.usable().map(|(_, free)| free).filter(|free| *free >= gpu);
        let of_device = match room.min() {
            Some(least) if !gpu.is_zero() && gpu < Amount::ONE => (least - gpu).units().max(0) as u64,
            _ => 0,
        };
        let counted = needed.iter().map(|(name, _)| name).filter(|name| ![CPU, MEMORY].contains(name));
        let of_counted = counted.map(left).sum::<u64>().min(LEFT_OVER_MOST);
        let of_cpus = if needed.get(CPU).is_zero() { 0 } else { left(CPU).min(LEFT_OVER_MOST) };
        of_device << (2 * LEFT_OVER_BITS) | of_counted << LEFT_OVER_BITS | of_cpus
    }

    /// A fraction shares the fullest device that still has room for it; whole ones are never shared, and come from
    /// one island if one has enough, else from the devices next to one memory node, else from anywhere.
    fn pick(&self, amount: Amount, known: &[DeviceInfo], beside: &[u32]) -> Option<Devices> {
        if amount.is_zero() {
            return Some(Vec::new());
        }
        let usable = || self.devices.iter().filter(|device| !device.is_held);
        if amount < Amount::ONE {
            let room = usable().filter(|device| device.free >= amount);
            let fullest = room.min_by_key(|device| (device.free, device.number))?;
            return Some(vec![(fullest.number, amount)]);
        }
        let wanted = (amount.units() / Amount::ONE.units()) as usize;
        let free: Vec<u32> = usable().filter(|device| device.free == Amount::ONE).map(|device| device.number).collect();
        if free.len() < wanted {
            return None;
        }
        let island = |device: u32| known.get(device as usize).and_then(|device| device.island);
        let numa = |device: u32| known.get(device as usize).and_then(|device| device.numa);
        let picked = closest(&free, wanted, beside, island)
            .or_else(|| closest(&free, wanted, beside, numa))
            .unwrap_or_else(|| free.iter().copied().take(wanted).collect());
        Some(picked.into_iter().map(|device| (device, Amount::ONE)).collect())
    }
}

/// `wanted` of the free devices out of one group: that of `beside` if it has enough, else the smallest that has, so
/// that large groups stay whole.
fn closest(free: &[u32], wanted: usize, beside: &[u32], group_of: impl Fn(u32) -> Option<u32>) -> Option<Vec<u32>> {
    let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for device in free {
        if let Some(group) = group_of(*device) {
            members.entry(group).or_default().push(*device);
        }
    }
    let is_beside = |group: u32| beside.iter().any(|device| group_of(*device) == Some(group));
    let enough = members.into_iter().filter(|(_, members)| members.len() >= wanted);
    let (_, mut best) = enough.min_by_key(|(group, members)| (!is_beside(*group), members.len(), *group))?;
    best.truncate(wanted);
    Some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(count: f64) -> ResourceSet {
        ResourceSet::new().with(GPU, Amount::new(count).unwrap())
    }

    fn islands(of: &[u32]) -> Vec<DeviceInfo> {
        of.iter()
            .map(|island| DeviceInfo { island: Some(*island), numa: Some(island / 2), ..DeviceInfo::default() })
            .collect()
    }

    fn numbers(devices: Devices) -> Vec<u32> {
        devices.into_iter().map(|(number, _)| number).collect()
    }

    #[test]
    fn whole_devices_come_from_the_smallest_island_that_has_enough() {
        let known = islands(&[0, 0, 0, 0, 1, 1]);
        let mut pool = Pool::of_node(&gpus(6.0));
        let two = numbers(pool.take(&gpus(2.0), &known, &[]).unwrap());
        assert_eq!((two.clone(), Span::of(&two, &known)), (vec![4, 5], Span::Island));
        let four = numbers(pool.take(&gpus(4.0), &known, &[]).unwrap());
        assert_eq!((four.clone(), Span::of(&four, &known)), (vec![0, 1, 2, 3], Span::Island));
    }

    #[test]
    fn when_no_island_has_enough_one_memory_node_is_next_and_then_anything() {
        let known = islands(&[0, 0, 1, 1, 2, 2]);
        let mut pool = Pool::of_node(&gpus(6.0));
        let three = numbers(pool.take(&gpus(3.0), &known, &[]).unwrap());
        assert_eq!((three.clone(), Span::of(&three, &known)), (vec![0, 1, 2], Span::Numa));
        let rest = numbers(pool.take(&gpus(3.0), &known, &[]).unwrap());
        assert_eq!((rest.clone(), Span::of(&rest, &known)), (vec![3, 4, 5], Span::Node));
    }

    #[test]
    fn the_next_of_a_gang_lies_beside_the_others() {
        let known = islands(&[0, 0, 1, 1]);
        let mut pool = Pool::of_node(&gpus(4.0));
        assert_eq!(numbers(pool.take(&gpus(1.0), &known, &[3]).unwrap()), [2]);
    }

    #[test]
    fn a_device_that_somebody_still_uses_is_given_to_nobody() {
        let mut pool = Pool::of_node(&gpus(2.0));
        pool.hold_devices(|device| device == 0);
        assert_eq!(numbers(pool.take(&gpus(0.5), &[], &[]).unwrap()), [1]);
        assert!(pool.take(&gpus(1.0), &[], &[]).is_none());
        pool.hold_devices(|_| false);
        assert_eq!(numbers(pool.take(&gpus(1.0), &[], &[]).unwrap()), [0]);
    }

    #[test]
    fn a_bundle_gives_only_what_it_has_of_a_device() {
        let mut bundle = Pool::new(&gpus(0.5), &[(3, Amount::new(0.5).unwrap())]);
        assert!(!bundle.could_hold(&gpus(1.0)));
        assert_eq!(bundle.take(&gpus(0.5), &[], &[]).unwrap(), [(3, Amount::new(0.5).unwrap())]);
        assert!(!bundle.has_room(&gpus(0.1)));
    }
}
