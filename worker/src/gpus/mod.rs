//! The GPUs of this machine: found when a node starts, named for CUDA when a worker process does.
//!
//! - `nvml`: what NVIDIA's driver says, loaded when there is one.
//! - `rocm`: what the kernel says of AMD's.
//!
//! `--pretend-gpus N` offers devices that are not there, so that everything but CUDA itself can be tried without a GPU.

mod nvml;
mod rocm;

use std::collections::{BTreeMap, BTreeSet};

use wingbeat_core::error::Error;
use wingbeat_net::messages::DeviceInfo;

/// Set by the user to let processes that got no GPU see all of them.
pub const SHOW_ALL: &str = "WINGBEAT_SHOW_ALL_GPUS";

/// The label with the model of a node's GPUs.
pub const MODEL_LABEL: &str = "accelerator-type";

/// The GPUs that a node offers, numbered from 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpus {
    /// How many.
    pub count: u32,
    /// What is known of each; empty if nothing is.
    pub devices: Vec<DeviceInfo>,
    /// By which name a process is told to use each, in the variable of `kind`.
    names: Vec<String>,
    kind: Kind,
}

/// Whose devices they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Nvidia,
    Amd,
}

impl Kind {
    /// The variable that says which devices a process sees.
    fn variable(self) -> &'static str {
        match self {
            Kind::Nvidia => "CUDA_VISIBLE_DEVICES",
            Kind::Amd => "HIP_VISIBLE_DEVICES",
        }
    }
}

/// Which of a machine's devices are offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offered {
    /// All that are found.
    #[default]
    All,
    /// The first so many.
    First(u32),
    /// So many, of which those that are not there are pretended.
    Pretended(u32),
}

impl Offered {
    /// As people say it: so many, or so many that may be pretended.
    pub fn of(num_gpus: Option<u32>, pretend_gpus: Option<u32>) -> Offered {
        match (pretend_gpus, num_gpus) {
            (Some(count), _) => Offered::Pretended(count),
            (None, Some(count)) => Offered::First(count),
            (None, None) => Offered::All,
        }
    }
}

/// What is used on a device by whom: process id and memory in bytes.
pub(crate) type Users = Vec<(u32, Option<u64>)>;

impl Gpus {
    /// What this machine has and may be used.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] where it has fewer than are to be offered.
    pub fn find(offered: Offered) -> Result<Gpus, Error> {
        let (kind, found) = match nvml::devices() {
            found if !found.is_empty() => (Kind::Nvidia, found),
            _ => match rocm::devices() {
                found if !found.is_empty() => (Kind::Amd, found),
                _ => (Kind::Nvidia, Vec::new()),
            },
        };
        let visible = std::env::var(kind.variable()).ok();
        Self::of(kind, found, visible.as_deref(), offered).that_are_enough(offered, visible.as_deref())
    }

    fn that_are_enough(self, offered: Offered, visible: Option<&str>) -> Result<Gpus, Error> {
        match offered {
            Offered::First(count) if count > self.count => {
                let told =
                    visible.map(|visible| format!(", with {}={visible}", self.kind.variable())).unwrap_or_default();
                let why = format!(
                    "it is {count}, and this machine has {}{told}; for tests, pretend_gpus offers devices that are not there",
                    self.count
                );
                Err(invalid("num_gpus", why))
            }
            _ => Ok(self),
        }
    }

    /// `visible` is what the daemon itself was told to use: its GPUs are numbered in that order.
    fn of(kind: Kind, found: Vec<DeviceInfo>, visible: Option<&str>, offered: Offered) -> Gpus {
        let all = found.iter().enumerate().map(|(index, device)| (index.to_string(), Some(device.clone())));
        let mut seen: Vec<(String, Option<DeviceInfo>)> = match visible {
            None => all
                .map(|(index, device)| match &device {
                    // A part of a device has no number of its own.
                    Some(DeviceInfo { uuid: Some(uuid), .. }) if uuid.starts_with("MIG-") => (uuid.clone(), device),
                    _ => (index, device),
                })
                .collect(),
            Some(visible) => {
                let names = visible.split(',').map(str::trim).filter(|name| !name.is_empty());
                // CUDA stops at the first name that it does not know.
                let known = names.map_while(|name| {
                    let device = find_by_name(&found, name);
                    let is_none = matches!(name, "-1" | "NoDevFiles");
                    (device.is_some() || found.is_empty() && !is_none).then(|| (name.to_owned(), device))
                });
                let mut seen: Vec<(String, Option<DeviceInfo>)> = Vec::new();
                for (name, device) in known {
                    // A device that is named twice is one.
                    let uuid = |device: &Option<DeviceInfo>| device.as_ref().and_then(|device| device.uuid.clone());
                    let is_same = |other: &Option<DeviceInfo>| uuid(other).is_some() && uuid(other) == uuid(&device);
                    if !seen.iter().any(|(known, other)| *known == name || is_same(other)) {
                        seen.push((name, device));
                    }
                }
                seen
            }
        };
        match offered {
            // Without a driver there is nothing behind the names, unless somebody says that there is.
            Offered::All if visible.is_some() && found.is_empty() => seen.clear(),
            Offered::All => {}
            Offered::First(count) | Offered::Pretended(count) => seen.truncate(count as usize),
        }
        if let Offered::Pretended(count) = offered {
            let given: Vec<String> = seen.iter().map(|(name, _)| name.clone()).collect();
            // Behind those that are there: what is hidden from the daemon is not to be used.
            let pretended = (found.len() as u32..).map(|index| index.to_string()).filter(|name| !given.contains(name));
            seen.extend(pretended.take((count as usize).saturating_sub(given.len())).map(|name| (name, None)));
        }
        let devices: Option<Vec<DeviceInfo>> = seen.iter().map(|(_, device)| device.clone()).collect();
        let names: Vec<String> = seen.into_iter().map(|(name, _)| name).collect();
        Gpus { count: names.len() as u32, devices: devices.unwrap_or_default(), names, kind }
    }

    /// These labels say what they are.
    pub fn labels(&self) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        if let Some(first) = self.devices.first()
            && self.devices.iter().all(|device| device.model == first.model)
        {
            let model = label_of(&first.model);
            if !model.is_empty() {
                labels.insert(MODEL_LABEL.to_owned(), model);
            }
        }
        labels
    }

    /// Pretends that every device has so much memory, in bytes. For trying things without a GPU.
    pub fn with_memory(mut self, bytes: u64) -> Gpus {
        self.devices.resize(self.count as usize, DeviceInfo::default());
        for device in &mut self.devices {
            device.memory = bytes;
        }
        self
    }

    /// The environment of a process that may use `devices`.
    pub(crate) fn environment(&self, devices: &[u32], job: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let is_shown_all = job.get(SHOW_ALL).is_some_and(|value| !value.is_empty() && value != "0");
        let mut env = BTreeMap::new();
        if devices.is_empty() && is_shown_all {
            return env;
        }
        let name = |device: &u32| self.names.get(*device as usize).cloned().unwrap_or_else(|| device.to_string());
        let names: Vec<String> = devices.iter().map(name).collect();
        env.insert(self.kind.variable().to_owned(), names.join(","));
        if self.kind == Kind::Amd {
            // PyTorch for ROCm reads this one too.
            env.insert("CUDA_VISIBLE_DEVICES".to_owned(), names.join(","));
        }
        if !devices.is_empty() {
            // Otherwise CUDA numbers devices by speed, and everybody else by their place on the bus.
            env.insert("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
        }
        env
    }

    /// Who uses a device now. Empty where nobody can tell.
    pub(crate) fn users(&self, device: u32) -> Users {
        let uuid = self.devices.get(device as usize).and_then(|device| device.uuid.as_deref());
        uuid.filter(|_| self.kind == Kind::Nvidia).map(nvml::users).unwrap_or_default()
    }
}

/// Those who use a device beside those who did `before`, in words; none if nobody does.
pub(crate) fn leaked(users: &Users, before: &BTreeSet<u32>, name_of: impl Fn(u32) -> Option<String>) -> Option<String> {
    let left: Vec<String> = users
        .iter()
        .filter(|(pid, _)| !before.contains(pid))
        .map(|(pid, memory)| {
            let name = name_of(*pid).map_or_else(|| "a process that has ended".into(), |name| format!("`{name}`"));
            let memory = memory.map(|bytes| format!(", {} MiB", bytes >> 20)).unwrap_or_default();
            format!("pid {pid} ({name}{memory})")
        })
        .collect();
    (!left.is_empty()).then(|| format!("its last lease is over, and {} still uses it", left.join(" and ")))
}

/// What a process is called.
pub(crate) fn process_name(pid: u32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}

fn find_by_name(found: &[DeviceInfo], name: &str) -> Option<DeviceInfo> {
    if let Ok(index) = name.parse::<usize>() {
        return found.get(index).cloned();
    }
    let mut named = found.iter().filter(|device| device.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(name)));
    // A beginning of a name will do as long as there is only one.
    named.next().filter(|_| named.next().is_none()).cloned()
}

/// A model as the value of a label: `NVIDIA H200` becomes `NVIDIA-H200`.
fn label_of(model: &str) -> String {
    // What no selector can say is left out, as the parentheses of "Orin (nvgpu)".
    let may_be_said = |c: &char| c.is_ascii_alphanumeric() || "-_./:".contains(*c);
    let words = model.split_whitespace().map(|word| word.chars().filter(may_be_said).collect::<String>());
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// The machine's devices that are offered, each with so much memory if that is pretended.
///
/// # Errors
/// [`Error::InvalidOption`] where it has fewer, or for memory of GPUs that there are not.
pub fn of_machine(offered: Offered, memory: Option<u64>) -> Result<Gpus, Error> {
    let gpus = Gpus::find(offered)?;
    match memory {
        None => Ok(gpus),
        Some(bytes) if bytes > 0 && gpus.count > 0 => Ok(gpus.with_memory(bytes)),
        Some(_) => Err(invalid("gpu_memory", "there is no GPU that could have it".into())),
    }
}

fn invalid(option: &str, why: String) -> Error {
    Error::InvalidOption { what: "the node".into(), option: option.into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str) -> DeviceInfo {
        DeviceInfo { uuid: Some(uuid.into()), model: "NVIDIA H200".into(), memory: 1 << 37, ..DeviceInfo::default() }
    }

    fn three() -> Vec<DeviceInfo> {
        ["GPU-aa", "GPU-ab", "GPU-cc"].map(device).to_vec()
    }

    fn visible(gpus: &Gpus, devices: &[u32]) -> Option<String> {
        gpus.environment(devices, &BTreeMap::new()).remove("CUDA_VISIBLE_DEVICES")
    }

    #[test]
    fn what_the_daemon_may_use_is_numbered_from_0_and_named_as_it_was_given() {
        let gpus = Gpus::of(Kind::Nvidia, three(), Some("2, GPU-aa"), Offered::All);
        assert_eq!((gpus.count, gpus.devices[0].uuid.as_deref()), (2, Some("GPU-cc")));
        assert_eq!(visible(&gpus, &[0]).as_deref(), Some("2"));
        assert_eq!(visible(&gpus, &[1, 0]).as_deref(), Some("GPU-aa,2"));
    }

    #[test]
    fn names_end_at_the_first_that_nobody_knows_or_that_could_be_two() {
        assert_eq!(Gpus::of(Kind::Nvidia, three(), Some("0,7,1"), Offered::All).count, 1);
        assert_eq!(Gpus::of(Kind::Nvidia, three(), Some("GPU-a"), Offered::All).count, 0);
        for none in ["", "-1", "NoDevFiles"] {
            assert_eq!(Gpus::of(Kind::Nvidia, three(), Some(none), Offered::All).count, 0);
            let pretended = Gpus::of(Kind::Nvidia, Vec::new(), Some(none), Offered::Pretended(2));
            assert_eq!(visible(&pretended, &[0, 1]).as_deref(), Some("0,1"));
        }
    }

    #[test]
    fn a_device_that_is_named_twice_is_one() {
        let gpus = Gpus::of(Kind::Nvidia, three(), Some("0,0,GPU-aa,1"), Offered::All);
        assert_eq!((gpus.count, visible(&gpus, &[0, 1]).as_deref()), (2, Some("0,1")));
        assert_eq!(
            visible(&Gpus::of(Kind::Nvidia, Vec::new(), Some("1"), Offered::Pretended(3)), &[0, 1, 2]).as_deref(),
            Some("1,0,2")
        );
    }

    #[test]
    fn a_process_without_a_gpu_sees_none_unless_the_user_wants_it_to() {
        let gpus = Gpus::of(Kind::Nvidia, three(), None, Offered::All);
        assert_eq!(visible(&gpus, &[]).as_deref(), Some(""));
        let job = BTreeMap::from([(SHOW_ALL.to_owned(), "1".to_owned())]);
        assert!(gpus.environment(&[], &job).is_empty());
        assert_eq!(gpus.environment(&[1], &job)["CUDA_DEVICE_ORDER"], "PCI_BUS_ID");
    }

    #[test]
    fn devices_can_be_fewer_or_only_pretended() {
        assert_eq!(Gpus::of(Kind::Nvidia, three(), None, Offered::Pretended(2)).devices.len(), 2);
        let pretended = Gpus::of(Kind::Nvidia, Vec::new(), None, Offered::Pretended(2));
        assert_eq!((pretended.count, pretended.devices.len()), (2, 0));
        assert_eq!(visible(&pretended, &[1]).as_deref(), Some("1"));
        assert_eq!(pretended.with_memory(8 << 30).devices[1].memory, 8 << 30);
        // The daemon was told of devices 4 and 5, and there is no driver to ask.
        let told = Gpus::of(Kind::Nvidia, Vec::new(), Some("4,5"), Offered::Pretended(2));
        assert_eq!(visible(&told, &[1]).as_deref(), Some("5"));
        assert_eq!(Gpus::of(Kind::Nvidia, Vec::new(), Some("4,5"), Offered::All).count, 0);
    }

    #[test]
    fn parts_of_a_device_go_by_their_own_names_and_models_become_labels() {
        let gpus = Gpus::of(Kind::Nvidia, vec![device("MIG-x"), device("MIG-y")], None, Offered::All);
        assert_eq!(visible(&gpus, &[1]).as_deref(), Some("MIG-y"));
        assert_eq!(gpus.labels()[MODEL_LABEL], "NVIDIA-H200");
    }

    #[test]
    fn more_devices_than_there_are_are_offered_only_if_they_are_to_be_pretended() {
        let enough = |count, visible| {
            let offered = Offered::First(count);
            Gpus::of(Kind::Nvidia, three(), visible, offered).that_are_enough(offered, visible).map(|gpus| gpus.count)
        };
        assert_eq!(enough(2, None).unwrap(), 2);
        let error = enough(2, Some("1")).unwrap_err().to_string();
        assert!(
            error.contains("num_gpus") && error.contains("this machine has 1, with CUDA_VISIBLE_DEVICES=1"),
            "{error}"
        );
        let hidden = Gpus::of(Kind::Nvidia, three(), Some("1"), Offered::Pretended(3));
        assert_eq!(
            visible(&hidden, &[0, 1, 2]).as_deref(),
            Some("1,3,4"),
            "the machine has a 0 and a 2, which are not its own"
        );
        let told = Gpus::of(Kind::Nvidia, Vec::new(), Some("4,5,6"), Offered::First(2));
        assert_eq!(
            (told.count, visible(&told, &[1]).as_deref()),
            (2, Some("5")),
            "where NVIDIA's library is not installed"
        );
    }

    #[test]
    fn a_model_of_which_nothing_can_be_said_is_no_label() {
        let nameless = DeviceInfo { model: "(?)".into(), ..device("GPU-x") };
        assert!(
            Gpus::of(Kind::Nvidia, vec![nameless], None, Offered::All).labels().is_empty(),
            "nothing that a selector could say"
        );
    }

    #[test]
    fn whoever_used_a_device_before_its_lease_is_no_leak() {
        let users = vec![(7, None), (9, Some(64 << 20))];
        let name = |_| Some("python".to_owned());
        let text = leaked(&users, &BTreeSet::from([7]), name).unwrap();
        assert!(text.contains("pid 9 (`python`, 64 MiB)") && !text.contains("pid 7"), "{text}");
        assert_eq!(leaked(&users, &BTreeSet::from([7, 9]), name), None);
    }
}
