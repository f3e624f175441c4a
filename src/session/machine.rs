//! What this machine is: processor, memory, disk, graphics card.
//!
//! `sysinfo` answers on Linux, macOS and Windows with one small crate; container limits count as the memory there is.

use std::path::Path;

use crate::tensor::device::Device;
use sysinfo::{CpuRefreshKind, DiskRefreshKind, Disks, MemoryRefreshKind, RefreshKind, System};

/// The machine as plain data, as it was at one moment. `None` is what the system does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Processor in words.
    pub cpu: Option<String>,
    /// Logical cores this process may use.
    pub cores: usize,
    /// Memory in all and memory that can still be had, in bytes.
    pub ram: Option<Ram>,
    /// Space left where runs are written, in bytes.
    pub disk_free_bytes: Option<u64>,
    /// The graphics card that can train, in words, or why there is none.
    pub gpu: Result<String, String>,
}

/// Main memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ram {
    /// All of it (of the container, where one sets a limit).
    pub total_bytes: u64,
    /// What can still be had.
    pub free_bytes: u64,
}

impl Machine {
    /// Looks at the machine; `runs` is where runs are written (it need not exist yet). Takes a few milliseconds.
    pub fn read(runs: &Path) -> Self {
        let wanted = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(wanted).ok();
        Self {
            cpu: system.as_ref().and_then(|system| system.cpus().first()).and_then(|cpu| tidy(cpu.brand())),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            ram: system.as_ref().map(ram),
            disk_free_bytes: disk_free(runs),
            gpu: Device::cuda().map(|device| device.describe()).map_err(|none| none.reason),
        }
    }
}

fn ram(system: &System) -> Ram {
    let (total_bytes, free_bytes) = (system.total_memory(), system.available_memory());
    match system.cgroup_limits() {
        Some(limits) if limits.total_memory > 0 && limits.total_memory < total_bytes => {
            Ram { total_bytes: limits.total_memory, free_bytes: limits.free_memory.min(free_bytes) }
        }
        _ => Ram { total_bytes, free_bytes },
    }
}

/// One space between words: vendors pad their names. `None` when nothing is left.
fn tidy(brand: &str) -> Option<String> {
    let words: Vec<_> = brand.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// Space on the disk that holds `folder`: the one with the longest mount point above it.
fn disk_free(folder: &Path) -> Option<u64> {
    let existing = folder.ancestors().find(|ancestor| ancestor.exists())?.canonicalize().ok()?;
    let disks = Disks::new_with_refreshed_list_specifics(DiskRefreshKind::nothing().with_storage()).ok()?;
    let disk = disks
        .iter()
        .filter(|disk| existing.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().as_os_str().len())?;
    Some(disk.available_space())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_memory() {
        let folder = tempfile::tempdir().expect("folder");
        let machine = Machine::read(&folder.path().join("not yet/there"));
        assert!(machine.cores >= 1);
        if let Some(ram) = machine.ram {
            assert!(ram.total_bytes > 64 << 20 && ram.free_bytes <= ram.total_bytes, "{machine:?}");
        }
    }

    #[test]
    fn names_are_tidied() {
        assert_eq!(tidy("Intel(R) Xeon(R)   CPU @ 2.1GHz  ").as_deref(), Some("Intel(R) Xeon(R) CPU @ 2.1GHz"));
        assert_eq!(tidy("  "), None);
    }
}
