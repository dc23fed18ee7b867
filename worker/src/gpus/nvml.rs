//! What NVIDIA's management library says. It is loaded when there is a driver; without one, nothing is found.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use nvml_wrapper::enum_wrappers::nv_link::IntDeviceType;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::{Device, Nvml};
use wingbeat_net::messages::DeviceInfo;

/// Links of one device at most, on the largest so far.
const LINKS: u32 = 18;

static NVML: LazyLock<Option<Nvml>> = LazyLock::new(|| {
    // Looking for a file costs nothing; loading and starting the library costs tens of milliseconds.
    if !std::path::Path::new("/proc/driver/nvidia").exists() && !std::path::Path::new("/dev/nvidiactl").exists() {
        return None;
    }
    // The development packages' name for it, and the driver's own.
    let loaded = Nvml::init().or_else(|_| Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init());
    loaded.inspect_err(|error| tracing::warn!(%error, "there is an NVIDIA driver, and it cannot be asked")).ok()
});

/// All devices, in the order of the bus; of divided ones, the parts.
pub(super) fn devices() -> Vec<DeviceInfo> {
    let Some(nvml) = &*NVML else { return Vec::new() };
    let count = nvml.device_count().unwrap_or(0);
    let devices: Vec<Device<'_>> = (0..count).filter_map(|index| nvml.device_by_index(index).ok()).collect();
    let islands = islands(&devices);
    let mut found = Vec::new();
    for (index, device) in devices.iter().enumerate() {
        let numa = numa(device);
        let describe = |device: &Device<'_>, island: Option<u32>| DeviceInfo {
            uuid: device.uuid().ok(),
            model: device.name().unwrap_or_default(),
            memory: device.memory_info().map_or(0, |memory| memory.total),
            island,
            numa,
        };
        let parts = parts(device);
        if parts.is_empty() {
            found.push(describe(device, islands.get(&index).copied()));
        }
        // Parts of a device do not reach each other over NVLink.
        found.extend(parts.iter().map(|part| describe(part, None)));
    }
    found
}

/// The instances of a device that is divided.
fn parts<'nvml>(device: &Device<'nvml>) -> Vec<Device<'nvml>> {
    let count = match device.mig_mode() {
        Ok(mode) if mode.current == 1 => device.mig_device_count().unwrap_or(0),
        _ => 0,
    };
    (0..count).filter_map(|index| device.mig_device_by_index(index).ok()).collect()
}

/// Devices that reach each other over NVLink, directly or through a switch, have the same number.
fn islands(devices: &[Device<'_>]) -> BTreeMap<usize, u32> {
    let bus_ids: Vec<String> =
        devices.iter().map(|device| device.pci_info().map(|pci| pci.bus_id).unwrap_or_default()).collect();
    let mut group: Vec<usize> = (0..devices.len()).collect();
    let mut linked = vec![false; devices.len()];
    let mut at_switch: Option<usize> = None;
    for (index, device) in devices.iter().enumerate() {
        for link in 0..LINKS {
            let link_of = device.link_wrapper_for(link);
            if !link_of.is_active().unwrap_or(false) {
                continue;
            }
            linked[index] = true;
            let other = match link_of.remote_device_type(link) {
                // All switches of a machine are one fabric.
                Ok(IntDeviceType::Switch) => Some(*at_switch.get_or_insert(index)),
                _ => {
                    let remote = link_of.remote_pci_info().map(|pci| pci.bus_id).unwrap_or_default();
                    bus_ids.iter().position(|known| *known == remote)
                }
            };
            if let Some(other) = other {
                let (one, two) = (group[index], group[other]);
                for of in &mut group {
                    if *of == two {
                        *of = one;
                    }
                }
            }
        }
    }
    (0..devices.len()).filter(|index| linked[*index]).map(|index| (index, group[index] as u32)).collect()
}

/// The memory node that a device is next to.
fn numa(device: &Device<'_>) -> Option<u32> {
    let bus_id = device.pci_info().ok()?.bus_id.to_lowercase();
    // The library writes eight digits of the domain, and the kernel four.
    let (domain, rest) = bus_id.split_once(':')?;
    let domain = domain.get(domain.len().saturating_sub(4)..)?;
    let path = format!("/sys/bus/pci/devices/{domain}:{rest}/numa_node");
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Who uses a device now: process id, and memory in bytes if that is known.
pub(super) fn users(uuid: &str) -> Vec<(u32, Option<u64>)> {
    let Some(nvml) = &*NVML else { return Vec::new() };
    let running = nvml.device_by_uuid(uuid).and_then(|device| device.running_compute_processes());
    let memory = |used| match used {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    };
    running.unwrap_or_default().into_iter().map(|process| (process.pid, memory(process.used_gpu_memory))).collect()
}
