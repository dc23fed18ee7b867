//! Amounts of resources, in fixed point.

use std::collections::BTreeMap;
use std::fmt;

use bytesize::ByteSize;
use compact_str::CompactString;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

/// The resource that a task asks for by default.
pub const CPU: &str = "CPU";
/// Accelerators, accounted per device.
pub const GPU: &str = "GPU";
/// Memory in bytes.
pub const MEMORY: &str = "memory";

const NEGATIVE: &str = "it must be a finite number, zero or more";

/// An amount of a resource in units of 1/10,000.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Amount(i64);

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match to.is_human_readable() {
            true => to.serialize_f64(self.as_f64()),
            false => to.serialize_i64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match from.is_human_readable() {
            true => Amount::new(f64::deserialize(from)?).map_err(serde::de::Error::custom),
            false => i64::deserialize(from).map(Amount),
        }
    }
}

impl Amount {
    /// Nothing.
    pub const ZERO: Amount = Amount(0);
    /// One whole unit.
    pub const ONE: Amount = Amount(10_000);

    /// The amount that stands for `value`.
    ///
    /// # Errors
    /// Negative, not finite, too large, or finer than 1/10,000.
    pub fn new(value: f64) -> Result<Amount, InvalidAmount> {
        let scaled = value * 10_000.0;
        if !value.is_finite() || value < 0.0 {
            return Err(InvalidAmount { value, why: NEGATIVE });
        }
        if scaled > 9.0e18 {
            return Err(InvalidAmount { value, why: "it is too large" });
        }
        // A tolerance, because 0.0003 * 10_000 is not exactly 3 in binary.
        if (scaled - scaled.round()).abs() > 1e-6 * scaled.max(1.0) {
            return Err(InvalidAmount { value, why: "it is finer than 1/10,000" });
        }
        Ok(Amount(scaled.round() as i64))
    }

    /// `count` whole units.
    pub fn whole(count: u32) -> Amount {
        Amount(i64::from(count) * 10_000)
    }

    /// As people read it, as an amount of `name`: memory in units of bytes.
    pub fn shown(self, name: &str) -> String {
        match u64::try_from(self.0 / Self::ONE.0) {
            Ok(bytes) if name == MEMORY => ByteSize(bytes).display().iec().to_string(),
            _ => self.to_string(),
        }
    }

    /// From units of 1/10,000.
    pub fn from_units(units: i64) -> Amount {
        Amount(units)
    }

    /// In units of 1/10,000.
    pub fn units(self) -> i64 {
        self.0
    }

    /// As a floating-point number, for people.
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / 10_000.0
    }

    /// Whether nothing.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// How a resource is called that `name` may be meant for, in other letters or in the plural: what is asked for or limited by another name is
/// another resource.
#[must_use]
pub fn misnamed(name: &str) -> Option<&'static str> {
    let is = |usual: &&str| {
        let singular = name.len() - usize::from(name.ends_with(['s', 'S']));
        name != *usual && (name.eq_ignore_ascii_case(usual) || name[..singular].eq_ignore_ascii_case(usual))
    };
    [CPU, GPU, MEMORY].into_iter().find(|usual| is(usual))
}

/// How much of `name` a quota allows.
///
/// # Errors
/// As [`Amount::new`]; and zero, since a set of resources has no zeros, so that it would mean that there is no limit.
pub fn quota_of(name: &str, value: f64) -> Result<Amount, InvalidAmount> {
    let amount = Amount::new(value)?;
    if amount.is_zero() {
        let why = if name == CPU {
            "a quota is more than zero; 0.0001 lets nothing run that has a CPU"
        } else {
            "a quota is more than zero; 0.0001 lets nothing run that asks for it"
        };
        return Err(InvalidAmount { value, why });
    }
    Ok(amount)
}

impl std::ops::Add for Amount {
    type Output = Amount;
    fn add(self, other: Amount) -> Amount {
        Amount(self.0 + other.0)
    }
}

impl std::ops::Sub for Amount {
    type Output = Amount;
    fn sub(self, other: Amount) -> Amount {
        Amount(self.0 - other.0)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.as_f64())
    }
}

impl fmt::Debug for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A number that is no amount.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{value} is no amount of a resource: {why}")]
pub struct InvalidAmount {
    /// What was given.
    pub value: f64,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Named amounts. Names that are absent stand for nothing; no stored amount is zero.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ResourceSet {
    /// By name, each once. There are few, so that a sorted list is faster than any map.
    amounts: SmallVec<[(CompactString, Amount); 2]>,
}

impl ResourceSet {
    /// Nothing at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only CPUs.
    pub fn cpus(amount: Amount) -> Self {
        Self::new().with(CPU, amount)
    }

    /// This set with `name` set to `amount`.
    pub fn with(mut self, name: &str, amount: Amount) -> Self {
        self.set(name, amount);
        self
    }

    fn find(&self, name: &str) -> Result<usize, usize> {
        self.amounts.binary_search_by(|(known, _)| known.as_str().cmp(name))
    }

    /// Sets `name` to `amount`.
    pub fn set(&mut self, name: &str, amount: Amount) {
        self.change(name, |_| amount);
    }

    fn change(&mut self, name: &str, change: impl FnOnce(Amount) -> Amount) {
        let at = self.find(name);
        let amount = change(at.map_or(Amount::ZERO, |at| self.amounts[at].1));
        match at {
            Ok(at) if amount.is_zero() => drop(self.amounts.remove(at)),
            Ok(at) => self.amounts[at].1 = amount,
            Err(_) if amount.is_zero() => {}
            Err(at) => self.amounts.insert(at, (name.into(), amount)),
        }
    }

    /// How much of `name`.
    pub fn get(&self, name: &str) -> Amount {
        self.find(name).map_or(Amount::ZERO, |at| self.amounts[at].1)
    }

    /// Every name with its amount, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Amount)> {
        self.amounts.iter().map(|(name, amount)| (name.as_str(), *amount))
    }

    /// Whether nothing.
    pub fn is_empty(&self) -> bool {
        self.amounts.is_empty()
    }

    /// Whether `self` holds at least `needed` of everything.
    pub fn covers(&self, needed: &ResourceSet) -> bool {
        needed.iter().all(|(name, amount)| self.get(name) >= amount)
    }

    /// Adds `other`.
    pub fn add(&mut self, other: &ResourceSet) {
        for (name, amount) in other.iter() {
            self.change(name, |known| known + amount);
        }
    }

    /// Takes `other` away. Amounts may become negative: a node that goes on after a wait is
    /// over-committed until balance returns.
    pub fn subtract(&mut self, other: &ResourceSet) {
        for (name, amount) in other.iter() {
            self.change(name, |known| known - amount);
        }
    }

    /// Checks what no request may be.
    ///
    /// # Errors
    /// Less than nothing, or more than one GPU that is not a whole number.
    pub fn check(&self) -> Result<(), InvalidAmount> {
        if let Some((_, amount)) = self.iter().find(|(_, amount)| amount.units() < 0) {
            return Err(InvalidAmount { value: amount.as_f64(), why: NEGATIVE });
        }
        let gpu = self.get(GPU);
        if gpu > Amount::ONE && gpu.units() % Amount::ONE.units() != 0 {
            return Err(InvalidAmount {
                value: gpu.as_f64(),
                why: "GPUs are asked for as a fraction of one device or as whole devices",
            });
        }
        Ok(())
    }
}

impl Serialize for ResourceSet {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.iter())
    }
}

impl<'de> Deserialize<'de> for ResourceSet {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let named = BTreeMap::<CompactString, Amount>::deserialize(from)?;
        Ok(ResourceSet { amounts: named.into_iter().filter(|(_, amount)| !amount.is_zero()).collect() })
    }
}

impl fmt::Display for ResourceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        for (i, (name, amount)) in self.iter().enumerate() {
            write!(f, "{}{} {name}", if i == 0 { "" } else { ", " }, amount.shown(name))?;
        }
        Ok(())
    }
}

impl fmt::Debug for ResourceSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_resource_that_is_misnamed_is_known() {
        assert_eq!(["cpu", "Cpus", "gpus", "MEMORY"].map(misnamed), [Some(CPU), Some(CPU), Some(GPU), Some(MEMORY)]);
        assert_eq!(["CPU", "GPU", "memory", "TPU", "cpu2", "s", ""].map(misnamed), [None; 7]);
    }

    #[test]
    fn a_quota_of_zero_is_refused_since_it_would_be_none() {
        assert_eq!(quota_of(CPU, 0.5), Amount::new(0.5));
        let error = quota_of(GPU, 0.0).unwrap_err().to_string();
        assert!(error.contains("more than zero"), "{error}");
    }

    #[test]
    fn memory_is_shown_in_units_that_people_read() {
        let set = ResourceSet::cpus(Amount::whole(2)).with(MEMORY, Amount::whole(3 << 20));
        assert_eq!(set.to_string(), "2 CPU, 3.0 MiB memory");
    }

    #[test]
    fn an_amount_is_exact_to_a_ten_thousandth_and_no_finer() {
        assert_eq!(Amount::new(0.0003).unwrap().units(), 3);
        assert!(Amount::new(0.00003).is_err());
        assert!(Amount::new(-1.0).is_err());
        assert!(Amount::new(f64::NAN).is_err());
    }

    #[test]
    fn gpus_are_a_fraction_of_one_or_whole() {
        let gpus = |n| ResourceSet::new().with(GPU, Amount::new(n).unwrap()).check();
        assert!(gpus(0.25).is_ok());
        assert!(gpus(2.0).is_ok());
        assert!(gpus(1.5).is_err());
    }

    /// Sets over a few names, with amounts that may be anything.
    fn sets() -> impl Strategy<Value = ResourceSet> {
        proptest::collection::vec((prop::sample::select(vec![CPU, GPU, MEMORY, "x", "y"]), -50_000i64..50_000), 0..6)
            .prop_map(|named| {
                named
                    .into_iter()
                    .fold(ResourceSet::new(), |set, (name, units)| set.with(name, Amount::from_units(units)))
            })
    }

    proptest! {
        #[test]
        fn what_is_taken_and_given_back_leaves_what_was(before in sets(), taken in sets()) {
            let mut set = before.clone();
            set.subtract(&taken);
            set.add(&taken);
            prop_assert_eq!(set, before);
        }

        #[test]
        fn the_order_of_adding_makes_no_difference(a in sets(), b in sets()) {
            let (mut ab, mut ba) = (a.clone(), b.clone());
            ab.add(&b);
            ba.add(&a);
            prop_assert_eq!(ab, ba);
        }

        #[test]
        fn a_set_covers_what_leaves_nothing_negative(has in sets(), needs in sets()) {
            let mut left = has.clone();
            left.subtract(&needs);
            let short = needs.iter().any(|(name, _)| left.get(name).units() < 0);
            prop_assert_eq!(has.covers(&needs), !short);
        }

        #[test]
        fn names_are_sorted_and_no_amount_is_zero(set in sets()) {
            let names: Vec<&str> = set.iter().map(|(name, _)| name).collect();
            prop_assert!(names.is_sorted());
            prop_assert!(set.iter().all(|(_, amount)| !amount.is_zero()));
        }

        #[test]
        fn a_set_travels_as_it_is(set in sets()) {
            let mut bytes = bytes::BytesMut::new();
            crate::codec::encode_message(&set, &mut bytes).unwrap();
            prop_assert_eq!(crate::codec::decode_message::<ResourceSet>(bytes.freeze()).unwrap(), set);
        }

        #[test]
        fn an_amount_shows_what_it_was_made_from(units in 0i64..1_000_000_000) {
            let shown = Amount::from_units(units).to_string();
            prop_assert_eq!(Amount::new(shown.parse().unwrap()).unwrap().units(), units);
        }
    }
}
