//! What this machine is: processor, memory, disk, graphics card.
//!
//! `sysinfo` answers on Linux, macOS and Windows with one small crate; container limits count as the memory there is.

use std::path::Path;

use sysinfo::{CpuRefreshKind, Disks, MemoryRefreshKind, RefreshKind, System};

/// The machine as plain data, as it was at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Processor in words; empty when the system does not say.
    pub cpu: String,
    /// Logical cores this process may use.
    pub cores: usize,
    /// Memory in all, in bytes.
    pub ram_total_bytes: u64,
    /// Memory that can still be had, in bytes.
    pub ram_free_bytes: u64,
    /// Space left where runs are written; `None` when the system does not say.
    pub disk_free_bytes: Option<u64>,
}

impl Machine {
    /// Looks at the machine; `runs` is where runs are written (it need not exist yet). Takes a few milliseconds.
    pub fn read(runs: &Path) -> Self {
        let system = System::new_with_specifics(
            RefreshKind::nothing()
                .with_cpu(CpuRefreshKind::nothing())
                .with_memory(MemoryRefreshKind::nothing().with_ram()),
        );
        let (total, free) = match system.cgroup_limits() {
            Some(limits) if limits.total_memory > 0 && limits.total_memory < system.total_memory() => {
                (limits.total_memory, limits.free_memory.min(system.available_memory()))
            }
            _ => (system.total_memory(), system.available_memory()),
        };
        Self {
            cpu: system.cpus().first().map(|cpu| tidy(cpu.brand())).unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            ram_total_bytes: total,
            ram_free_bytes: free,
            disk_free_bytes: disk_free(runs),
        }
    }
}

/// One space between words: vendors pad their names.
fn tidy(brand: &str) -> String {
    brand.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Space on the disk that holds `folder`: the one with the longest mount point above it.
fn disk_free(folder: &Path) -> Option<u64> {
    let existing = folder.ancestors().find(|ancestor| ancestor.exists())?.canonicalize().ok()?;
    Disks::new_with_refreshed_list()
        .iter()
        .filter(|disk| existing.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().as_os_str().len())
        .map(sysinfo::Disk::available_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_memory() {
        let folder = tempfile::tempdir().expect("folder");
        let machine = Machine::read(&folder.path().join("not yet/there"));
        assert!(machine.cores >= 1);
        assert!(machine.ram_total_bytes > 64 << 20, "{machine:?}");
        assert!(machine.ram_free_bytes <= machine.ram_total_bytes, "{machine:?}");
    }

    #[test]
    fn names_are_tidied() {
        assert_eq!(tidy("Intel(R) Xeon(R)   CPU @ 2.1GHz  "), "Intel(R) Xeon(R) CPU @ 2.1GHz");
    }
}
