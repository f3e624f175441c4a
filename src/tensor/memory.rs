//! Memory accounting: every allocation belongs to a category, and every category has a now and a peak.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::cuda::PinnedBytes;

/// What an allocation is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCategory {
    /// Base weights of the model.
    Weights,
    /// LoRA matrices.
    Adapters,
    /// Gradients of trainable parameters.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// What the forward pass keeps for the backward pass.
    Activations,
    /// Buffers that carry activations to host memory and back.
    OffloadBuffers,
    /// Scratch that lives no longer than one operation or one block.
    Workspace,
    /// Boundaries, positions, tile lists and masks of packed batches.
    Metadata,
}

impl MemoryCategory {
    /// All categories in the order in which they are shown.
    pub const ALL: [Self; 8] = [
        Self::Weights,
        Self::Activations,
        Self::Workspace,
        Self::Optimizer,
        Self::OffloadBuffers,
        Self::Adapters,
        Self::Gradients,
        Self::Metadata,
    ];

    /// The name shown to people and written to files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Adapters => "adapters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::OffloadBuffers => "offload buffers",
            Self::Workspace => "workspace",
            Self::Metadata => "metadata",
        }
    }
}

/// Bytes of one category at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CategoryBytes {
    /// The category.
    pub category: MemoryCategory,
    /// Bytes allocated now.
    pub now_bytes: u64,
    /// Most bytes allocated at any time, or since [`Ledger::reset_peaks`].
    pub peak_bytes: u64,
}

/// Memory by category, with the whole and its peak (the peak of the sum, not the sum of the peaks).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryReport {
    /// One entry a category, in the order of [`MemoryCategory::ALL`].
    pub categories: Vec<CategoryBytes>,
    /// Bytes allocated now over all categories.
    pub now_bytes: u64,
    /// Most bytes allocated at one time.
    pub peak_bytes: u64,
    /// Resident memory of the process as the system reports it, when it does.
    pub process_bytes: Option<u64>,
    /// Page-locked host memory, on a GPU: what copies go through, and what was put there instead of into the device's memory.
    #[serde(default)]
    pub pinned: Option<PinnedBytes>,
}

/// Live counters behind [`MemoryReport`]; shared by everything that allocates on one device.
#[derive(Debug, Default)]
pub struct Ledger {
    now: [AtomicU64; MemoryCategory::ALL.len()],
    peak: [AtomicU64; MemoryCategory::ALL.len()],
    total_now: AtomicU64,
    total_peak: AtomicU64,
    /// What was allocated when most was, where that is noted.
    at_peak: Option<Mutex<[u64; MemoryCategory::ALL.len()]>>,
}

impl Ledger {
    /// A ledger that notes what was allocated when most was ([`Self::at_peak`]); for one thread.
    pub fn noting_peak() -> Self {
        Self { at_peak: Some(Mutex::default()), ..Self::default() }
    }

    /// Bytes of each category at the moment at which most was allocated, in the order of [`MemoryCategory::ALL`]: they add up to the peak. `None`
    /// unless that is noted.
    pub fn at_peak(&self) -> Option<Vec<(MemoryCategory, u64)>> {
        let noted = *self.at_peak.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        Some(MemoryCategory::ALL.into_iter().map(|category| (category, noted[category as usize])).collect())
    }

    /// Books `bytes` under `category` until the returned charge is dropped.
    pub fn charge(self: &Arc<Self>, category: MemoryCategory, bytes: u64) -> Charge {
        let i = category as usize;
        let now = self.now[i].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[i].fetch_max(now, Ordering::Relaxed);
        let total = self.total_now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let before = self.total_peak.fetch_max(total, Ordering::Relaxed);
        if let Some(at_peak) = self.at_peak.as_ref().filter(|_| total > before) {
            *at_peak.lock().unwrap_or_else(PoisonError::into_inner) =
                std::array::from_fn(|i| self.now[i].load(Ordering::Relaxed));
        }
        Charge { ledger: Arc::clone(self), category, bytes }
    }

    /// Lets every peak start anew from what is allocated now.
    pub fn reset_peaks(&self) {
        let restart = |peak: &AtomicU64, now: &AtomicU64| peak.store(now.load(Ordering::Relaxed), Ordering::Relaxed);
        self.peak.iter().zip(&self.now).for_each(|(peak, now)| restart(peak, now));
        restart(&self.total_peak, &self.total_now);
    }

    /// The counters as they stand.
    pub fn report(&self) -> MemoryReport {
        let categories = MemoryCategory::ALL
            .into_iter()
            .map(|category| CategoryBytes {
                category,
                now_bytes: self.now[category as usize].load(Ordering::Relaxed),
                peak_bytes: self.peak[category as usize].load(Ordering::Relaxed),
            })
            .collect();
        MemoryReport {
            categories,
            now_bytes: self.total_now.load(Ordering::Relaxed),
            peak_bytes: self.total_peak.load(Ordering::Relaxed),
            process_bytes: process_bytes(),
            pinned: None,
        }
    }
}

/// Bytes booked in a [`Ledger`]; dropping it takes them off again.
#[derive(Debug)]
pub struct Charge {
    ledger: Arc<Ledger>,
    category: MemoryCategory,
    bytes: u64,
}

impl Charge {
    /// What the bytes are for.
    pub fn category(&self) -> MemoryCategory {
        self.category
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.ledger.now[self.category as usize].fetch_sub(self.bytes, Ordering::Relaxed);
        self.ledger.total_now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Resident memory of this process, where the system says it (Linux: second field of `/proc/self/statm`, in pages).
fn process_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Host memory that could be had without swapping, in bytes, where the system says it (Linux: `MemAvailable` of `/proc/meminfo`).
pub fn available_host_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_ascii_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_of_the_sum_is_not_the_sum_of_peaks() {
        let ledger = Arc::new(Ledger::default());
        let a = ledger.charge(MemoryCategory::Weights, 100);
        drop(a);
        let b = ledger.charge(MemoryCategory::Adapters, 40);
        let report = ledger.report();
        assert_eq!((report.now_bytes, report.peak_bytes), (40, 100));
        let weights = report
            .categories
            .iter()
            .find(|c| c.category == MemoryCategory::Weights)
            .map(|c| (c.now_bytes, c.peak_bytes));
        assert_eq!(weights, Some((0, 100)));
        ledger.reset_peaks();
        let report = ledger.report();
        assert_eq!((report.now_bytes, report.peak_bytes), (40, 40));
        assert_eq!(report.categories.iter().map(|c| c.peak_bytes).sum::<u64>(), 40);
        drop(b);
        assert_eq!(ledger.report().now_bytes, 0);
        assert_eq!(ledger.at_peak(), None, "nobody asked for it");
    }

    #[test]
    fn what_was_allocated_at_the_peak_adds_up_to_it() {
        let ledger = Arc::new(Ledger::noting_peak());
        let _weights = ledger.charge(MemoryCategory::Weights, 100);
        let activations = ledger.charge(MemoryCategory::Activations, 60);
        drop(activations);
        let workspace = ledger.charge(MemoryCategory::Workspace, 50);
        drop(workspace);
        let _equal = ledger.charge(MemoryCategory::Workspace, 60);
        let at_peak: Vec<(MemoryCategory, u64)> =
            ledger.at_peak().unwrap().into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        assert_eq!(at_peak, [(MemoryCategory::Weights, 100), (MemoryCategory::Activations, 60)]);
        assert_eq!(at_peak.iter().map(|(_, bytes)| bytes).sum::<u64>(), ledger.report().peak_bytes);
    }
}
