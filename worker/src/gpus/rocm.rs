//! What the kernel says of AMD's devices: the topology that its `amdgpu` driver shows.

use std::collections::BTreeMap;
use std::path::Path;

use wingbeat_net::messages::DeviceInfo;

const TOPOLOGY: &str = "/sys/class/kfd/kfd/topology/nodes";

/// All devices, in the order in which ROCm numbers them.
pub(super) fn devices() -> Vec<DeviceInfo> {
    devices_in(Path::new(TOPOLOGY))
}

fn devices_in(topology: &Path) -> Vec<DeviceInfo> {
    let Ok(nodes) = std::fs::read_dir(topology) else { return Vec::new() };
    let mut numbered: Vec<(u32, std::path::PathBuf)> =
        nodes.flatten().filter_map(|node| Some((node.file_name().to_str()?.parse().ok()?, node.path()))).collect();
    numbered.sort();
    numbered.iter().filter_map(|(_, path)| device(path)).collect()
}

/// A node of the topology with compute units; processors have none.
fn device(path: &Path) -> Option<DeviceInfo> {
    let properties = read_properties(&path.join("properties"));
    let is_device = properties.get("simd_count").is_some_and(|count| *count > 0);
    is_device.then(|| DeviceInfo {
        uuid: properties.get("unique_id").filter(|id| **id != 0).map(|id| format!("GPU-{id:016x}")),
        model: std::fs::read_to_string(path.join("name")).unwrap_or_default().trim().to_owned(),
        memory: memory(&path.join("mem_banks")),
        island: None,
        numa: None,
    })
}

fn memory(banks: &Path) -> u64 {
    let Ok(banks) = std::fs::read_dir(banks) else { return 0 };
    let sizes = banks.flatten().map(|bank| read_properties(&bank.path().join("properties")));
    sizes.filter_map(|properties| properties.get("size_in_bytes").copied()).sum()
}

fn read_properties(path: &Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    pairs.filter_map(|(name, value)| Some((name.to_owned(), value.trim().parse().ok()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_compute_units_are_devices() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("0/properties", "cpu_cores_count 64\nsimd_count 0\n");
        write("1/properties", "simd_count 304\nunique_id 255\n");
        write("1/name", "gfx942\n");
        write("1/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 1000\n");
        let devices = devices_in(dir.path());
        assert_eq!(devices.len(), 1);
        assert_eq!((devices[0].model.as_str(), devices[0].memory), ("gfx942", 1000));
        assert_eq!(devices[0].uuid.as_deref(), Some("GPU-00000000000000ff"));
    }
}
