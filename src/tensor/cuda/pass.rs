//! Memory of passes over a model: taken from an arena of its own, so that recorded graphs can use its addresses again in every pass.

use std::sync::atomic::Ordering;

use super::CudaDevice;
use super::arena::{Pool, Snapshot};

/// While it lives, allocations are a pass's own: everything that is allocated meanwhile must be dropped before the next pass.
#[derive(Debug)]
pub struct PassScope<'a> {
    device: &'a CudaDevice,
    outer: bool,
}

/// The memory of passes as it was in the middle of one.
#[derive(Debug, Clone)]
pub struct PassMemory(Snapshot);

/// While it lives, memory that was in use at that point of a pass is in use again; then all is free.
#[derive(Debug)]
pub struct HeldPass<'a> {
    device: &'a CudaDevice,
}

impl CudaDevice {
    /// Lets a pass take its memory from the arena of passes.
    pub fn pass_scope(&self) -> PassScope<'_> {
        PassScope { device: self, outer: self.inner.in_pass.swap(true, Ordering::Relaxed) }
    }

    /// The memory of passes as it is now.
    pub fn pass_memory(&self) -> PassMemory {
        PassMemory(self.arena(Pool::Pass).snapshot())
    }

    /// Whether all memory of that time is still the engine's, so that a graph recorded then may run.
    pub fn is_current(&self, memory: &PassMemory) -> bool {
        self.arena(Pool::Pass).is_current(&memory.0)
    }

    /// Makes in use what was in use then, for work between two graphs that were recorded around that point. `memory` must be current, and no
    /// tensor of a pass may be left.
    pub fn hold_pass(&self, memory: &PassMemory) -> HeldPass<'_> {
        self.arena(Pool::Pass).hold(&memory.0);
        HeldPass { device: self }
    }
}

impl Drop for PassScope<'_> {
    fn drop(&mut self) {
        self.device.inner.in_pass.store(self.outer, Ordering::Relaxed);
    }
}

impl Drop for HeldPass<'_> {
    fn drop(&mut self) {
        self.device.arena(Pool::Pass).release();
    }
}
