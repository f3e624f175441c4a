//! A GPU without a driver: launchers, arenas and accounting are those of a real one, and nothing is done.
//!
//! The memory plan runs the trainer's own steps on it. Addresses are counted up, launches and copies are counted and left out, what is read back is
//! zero, and events give no times.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::probe::DeviceFacts;
use crate::tensor::memory::available_host_bytes;

/// Memory that one arena is given at once where a recording device has as much as is asked for: more than any model.
const UNBOUNDED: u64 = 1 << 50;
/// Bytes between two slabs, as the driver leaves some.
const GAP: u64 = 2 << 20;

/// What a recording device stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingFacts {
    /// The card.
    pub card: DeviceFacts,
    /// Device memory that the engine may take, in bytes: what the driver's context leaves of the card or of the limit. `None`: as much as is asked
    /// for, and then each arena is one slab, so that [`super::ArenaBytes::reach`] is what a slab must have for the same allocations.
    pub free_bytes: Option<u64>,
    /// Host memory that could be had, in bytes, where that is known.
    pub host_bytes: Option<u64>,
    /// Whether the vendor's library computes matrix products; its workspace is part of what the driver's context takes.
    pub vendor_library: bool,
}

impl RecordingFacts {
    /// A card like `card`, with the vendor's library or without, and with as much memory as is asked for.
    pub fn unbounded(card: DeviceFacts, vendor_library: bool) -> Self {
        Self { card, free_bytes: None, host_bytes: available_host_bytes(), vendor_library }
    }
}

/// Device memory that is only counted: addresses, handed out one slab after another and never again.
#[derive(Debug)]
pub(super) struct VirtualMemory {
    total_bytes: u64,
    granted: Mutex<Granted>,
}

#[derive(Debug)]
struct Granted {
    /// Of the next slab.
    address: u64,
    bytes: u64,
}

impl VirtualMemory {
    pub(super) fn new(facts: &RecordingFacts) -> Arc<Self> {
        // Address 0 stands for a failed allocation.
        let granted = Granted { address: GAP, bytes: 0 };
        Arc::new(Self { total_bytes: facts.free_bytes.unwrap_or(u64::MAX >> 1), granted: granted.into() })
    }

    /// The address of `bytes` more bytes, where there are as many.
    pub(super) fn grant(&self, bytes: u64) -> Option<u64> {
        let mut granted = self.lock();
        if bytes > self.total_bytes - granted.bytes {
            return None;
        }
        let address = granted.address;
        granted.address += bytes.next_multiple_of(GAP) + GAP;
        granted.bytes += bytes;
        Some(address)
    }

    /// Takes a slab back.
    pub(super) fn give_back(&self, bytes: u64) {
        self.lock().bytes -= bytes;
    }

    /// Bytes that may still be asked for.
    pub(super) fn room(&self) -> u64 {
        self.total_bytes - self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Granted> {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first slab of an arena of such a device.
pub(super) fn first_slab_bytes(facts: &RecordingFacts) -> u64 {
    if facts.free_bytes.is_none() { UNBOUNDED } else { 0 }
}
