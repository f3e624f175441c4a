//! Host memory that kernels read and write over the bus: page-locked, at the address that it has for the host (unified addressing).
//!
//! It serves what a step touches once and in order: optimizer state, the rows of an embedding table. The host's own reads and writes wait for the
//! device first.

use std::sync::{Arc, Mutex, PoisonError};

use super::copies::bytes_of;
use super::pinned::PinnedBuffer;
use super::{CudaBuffer, CudaDevice, Owned, Pitched};
use crate::base::units;
use crate::tensor::memory::available_host_bytes;

/// Small buffers share slabs of this many bytes: page-locking takes time, and whole pages.
const SLAB_BYTES: usize = 4 << 20;
/// Where buffers of a slab may begin: what vector loads want.
const ALIGN: usize = 512;

/// The slab that has room left.
#[derive(Default)]
pub(super) struct MappedPool(Mutex<Option<Slab>>);

struct Slab {
    memory: Arc<PinnedBuffer>,
    bytes: usize,
    used: usize,
}

impl Slab {
    /// The first byte of `bytes` more, where there is room.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let start = self.used;
        let end = start + bytes.next_multiple_of(ALIGN);
        (end <= self.bytes).then(|| {
            self.used = end;
            start
        })
    }
}

/// Part of page-locked memory that a buffer has.
#[derive(Clone)]
pub(super) struct MappedPart {
    memory: Arc<PinnedBuffer>,
    start: usize,
}

impl CudaDevice {
    /// `bytes` bytes of zeros in host memory that kernels reach. Memory of a slab is given back with the slab's last buffer.
    ///
    /// # Errors
    /// Why there is none, as a clause: host and device share their memory, the budget of half of the host memory that could be had is used up, or the
    /// driver refuses.
    pub fn alloc_mapped(&self, bytes: usize) -> Result<CudaBuffer, String> {
        if self.facts().integrated {
            return Err("host and device share their memory here".into());
        }
        let mut open = self.inner.mapped.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(slab) = open.as_mut()
            && let Some(start) = slab.take(bytes)
        {
            let part = MappedPart { memory: Arc::clone(&slab.memory), start };
            return Ok(self.mapped_buffer(part, bytes));
        }
        let slab_bytes = bytes.max(SLAB_BYTES).next_multiple_of(ALIGN);
        self.within_budget(slab_bytes as u64)?;
        let memory = PinnedBuffer::new(self.pinned(), slab_bytes);
        let memory = memory
            .map_err(|error| format!("the driver refuses to lock {}: {error}", units::bytes(slab_bytes as u64)))?;
        if !memory.pointer().is_null() {
            // SAFETY: the memory has as many bytes, and nobody else knows of it yet.
            unsafe { std::ptr::write_bytes(memory.pointer(), 0, slab_bytes) };
        }
        let memory = Arc::new(memory);
        let part = MappedPart { memory: Arc::clone(&memory), start: 0 };
        if bytes < SLAB_BYTES {
            *open = Some(Slab { memory, bytes: slab_bytes, used: bytes.next_multiple_of(ALIGN) });
        }
        Ok(self.mapped_buffer(part, bytes))
    }

    /// Whether `bytes` more may be locked.
    fn within_budget(&self, bytes: u64) -> Result<(), String> {
        let locked = self.pinned_bytes().now;
        // What is locked already is not available any more; a recording device says what was before.
        let host_bytes = match self.recording_facts() {
            Some(facts) => facts.host_bytes,
            None => available_host_bytes().map(|available| available + locked),
        };
        match host_bytes.map(|host_bytes| host_bytes / 2).filter(|budget| locked + bytes > *budget) {
            None => Ok(()),
            Some(budget) => Err(format!(
                "{} of host memory would be locked, and half of what is free is {}",
                units::bytes(locked + bytes),
                units::bytes(budget)
            )),
        }
    }

    fn mapped_buffer(&self, part: MappedPart, bytes: usize) -> CudaBuffer {
        let pointer = part.memory.pointer() as u64 + part.start as u64;
        CudaBuffer { owned: Owned::Host(part), pointer, bytes, device: self.clone() }
    }
}

impl CudaBuffer {
    /// Whether it is host memory.
    pub fn is_mapped(&self) -> bool {
        matches!(self.owned, Owned::Host(_))
    }

    /// Where the rows lie for the host, when the device has done what was queued; `None` where nothing is kept or the device has failed.
    fn host_rows(&self, part: &MappedPart, offset: usize, rows: Pitched) -> Option<*mut u8> {
        let end = offset + rows.rows.saturating_sub(1) * rows.pitch + rows.row_bytes;
        assert!(end <= self.bytes, "rows to byte {end} of {}", self.bytes);
        if self.device.refuses_while_capturing("reading or writing host memory") {
            return None;
        }
        self.device.synchronize();
        let base = part.memory.pointer();
        (!self.device.has_failed() && !base.is_null()).then(|| base.wrapping_add(part.start + offset))
    }

    /// Replaces rows from byte `offset` on; `values` holds them one after the other.
    pub(in crate::tensor) fn write<T: Copy>(&self, offset: usize, rows: Pitched, values: &[T]) {
        let Owned::Host(part) = &self.owned else {
            return self.device.upload_rows(self.pointer + offset as u64, rows, values);
        };
        let Some(base) = self.host_rows(part, offset, rows).filter(|_| !values.is_empty()) else { return };
        for (row, bytes) in bytes_of(values).chunks(rows.row_bytes).enumerate() {
            // SAFETY: all rows lie in the buffer, which this value has alone, and the device is done with it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.add(row * rows.pitch), bytes.len()) };
        }
    }

    /// A copy of rows from byte `offset` on, one after the other. This waits for the device.
    pub(in crate::tensor) fn read<T: Copy + Default>(&self, offset: usize, rows: Pitched) -> Vec<T> {
        let Owned::Host(part) = &self.owned else {
            return self.device.download_rows(self.pointer + offset as u64, rows);
        };
        let mut values = vec![T::default(); rows.rows * rows.row_bytes / size_of::<T>()];
        let Some(base) = self.host_rows(part, offset, rows).filter(|_| !values.is_empty()) else { return values };
        let into: *mut u8 = values.as_mut_ptr().cast();
        for row in 0..rows.rows {
            // SAFETY: all rows lie in the buffer and in `values`, numbers of any bits, and the device is done with the buffer.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    base.add(row * rows.pitch),
                    into.add(row * rows.row_bytes),
                    rows.row_bytes,
                );
            }
        }
        values
    }
}
