//! Activations on their way between device and page-locked memory: two streams beside the compute stream, ordered by events.
//!
//! Where the driver refuses page-locked memory for all of them, the rest waits in pageable memory: a thread moves it through a small page-locked
//! ring. That cannot be part of a recorded graph, and the host follows the device more closely then. On a recording device page-locked memory is
//! counted, and nothing travels.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, DriverError, sys};

use super::driver::Driver;
use super::pinned::PinnedBuffer;
use crate::base::error::Result;
use crate::tensor::clock::Copying;
use crate::tensor::device::Gpu;
use crate::tensor::lane::{CopyLane, Event};
use crate::tensor::phase::LaneKind;

/// Bytes of one piece of the ring, and how many it has.
const PIECE_BYTES: usize = 4 << 20;
const NUM_PIECES: usize = 4;

/// Host memory for activations, one slot each, and what orders the copies.
pub struct CudaSlots {
    gpu: Gpu,
    slots: Vec<Slot>,
    ring: Option<Ring>,
    /// Compute is done with the buffers that the next copies back go to. `None` on a recording device.
    free: Option<Arc<CudaEvent>>,
}

struct Slot {
    host: Host,
    /// `None` on a recording device.
    events: Option<Events>,
    /// Where a thread copies: the end of its last job.
    job: Option<Event>,
}

/// The activation is there to be copied; its copy to the host is done; the copy back is done.
struct Events {
    ready: Arc<CudaEvent>,
    stored: Arc<CudaEvent>,
    full: Arc<CudaEvent>,
}

enum Host {
    Pinned(PinnedBuffer),
    /// Empty on a recording device.
    Pageable(Arc<Mutex<Vec<u8>>>),
}

/// A small page-locked buffer and the thread that moves pageable memory through it.
struct Ring {
    thread: CopyLane,
    pieces: Arc<Pieces>,
}

struct Pieces {
    buffer: PinnedBuffer,
    /// The last copy from or to each piece; none on a recording device.
    used: Vec<CudaEvent>,
}

impl std::fmt::Debug for CudaSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaSlots").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

fn event(context: &Arc<CudaContext>) -> Result<Arc<CudaEvent>, DriverError> {
    context.new_event(None).map(Arc::new)
}

impl Events {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self { ready: event(context)?, stored: event(context)?, full: event(context)? })
    }
}

impl Pieces {
    fn new(gpu: &Gpu) -> Result<Self, DriverError> {
        let used = |driver: &Driver| {
            let used = |_| driver.context.new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
            (0..NUM_PIECES).map(used).collect::<Result<_, _>>()
        };
        Ok(Self {
            buffer: PinnedBuffer::new(gpu.pinned(), NUM_PIECES * PIECE_BYTES)?,
            used: gpu.driver().map(used).transpose()?.unwrap_or_default(),
        })
    }

    fn pointer(&self, piece: usize) -> *mut u8 {
        // SAFETY: within the buffer.
        unsafe { self.buffer.pointer().add(piece % NUM_PIECES * PIECE_BYTES) }
    }

    /// The start of a piece, when the device is done with it.
    fn idle(&self, piece: usize) -> Result<*mut u8, DriverError> {
        self.used[piece % NUM_PIECES].synchronize()?;
        Ok(self.pointer(piece))
    }

    /// Copies a piece out, when the device has filled it.
    fn take(&self, piece: usize, to: &mut [u8]) -> Result<(), DriverError> {
        let from = self.idle(piece)?;
        // SAFETY: a piece has room for as many bytes; only the ring's one thread touches it, and the device has passed its last copy.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Fills a piece, when the device is done with it.
    fn put(&self, piece: usize, from: &[u8]) -> Result<*const u8, DriverError> {
        let to = self.idle(piece)?;
        // SAFETY: as in `take`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(to)
    }
}

impl CudaSlots {
    /// Slots of so many bytes each: the first `pinned` of them page-locked as far as the driver allows, the others pageable.
    ///
    /// # Errors
    /// When the driver refuses even the ring, or events.
    pub fn new(gpu: &Gpu, slots: &[usize], pinned: usize, ring_refused: bool) -> Result<Self> {
        let driver = gpu.driver();
        let mut refused = false;
        let slots = slots.iter().enumerate().map(|(i, &bytes)| {
            let buffer = if i < pinned && !refused { PinnedBuffer::new(gpu.pinned(), bytes).ok() } else { None };
            refused |= buffer.is_none();
            let host = match buffer {
                Some(buffer) => Host::Pinned(buffer),
                None => {
                    let bytes = if driver.is_some() { bytes } else { 0 };
                    let mut memory = Vec::new();
                    memory.try_reserve_exact(bytes).context("there is no host memory for activations")?;
                    memory.resize(bytes, 0);
                    Host::Pageable(Arc::new(Mutex::new(memory)))
                }
            };
            let events = driver.map(|driver| Events::new(&driver.context)).transpose()?;
            Ok(Slot { host, events, job: None })
        });
        let slots = slots.collect::<Result<Vec<_>>>()?;
        let ring = refused.then(|| {
            anyhow::ensure!(!ring_refused, "the driver refuses page-locked memory");
            let pieces = Pieces::new(gpu).context("the driver refuses page-locked memory, even a little")?;
            Ok(Ring { thread: CopyLane::new("offload")?, pieces: Arc::new(pieces) })
        });
        let free = driver.map(|driver| event(&driver.context)).transpose()?;
        Ok(Self { gpu: gpu.clone(), slots, ring: ring.transpose()?, free })
    }

    /// Slots that are not page-locked.
    pub fn num_pageable(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot.host, Host::Pageable(_))).count()
    }

    /// Whether a slot is page-locked, so that its copies are done in the order in which they were queued.
    pub fn is_pinned(&self, slot: usize) -> bool {
        matches!(self.slots[slot].host, Host::Pinned(_))
    }

    /// Queues the copy of `bytes` bytes at `pointer` to a slot, behind what computes them. They must stay as they are until [`Self::await_stored`].
    pub fn store(&mut self, slot: usize, pointer: u64, bytes: usize, copying: Copying) {
        let (gpu, slot) = (&self.gpu, &mut self.slots[slot]);
        if gpu.has_failed() {
            return;
        }
        let Some((driver, events)) = gpu.driver().zip(slot.events.as_ref()) else { return slot.skip(gpu, copying) };
        let stream = driver.lane(LaneKind::D2h);
        gpu.latch_result(events.ready.record(&driver.stream), "marking an activation as ready");
        gpu.latch_result(stream.wait(&events.ready), "waiting for an activation");
        match (&slot.host, &self.ring) {
            (Host::Pinned(buffer), _) => {
                gpu.clock().copy(copying, || {
                    // SAFETY: the slot has room for as many bytes, and lives until the device has passed the copy.
                    let status = unsafe {
                        sys::cuMemcpyDtoHAsync_v2(buffer.pointer().cast(), pointer, bytes, stream.cu_stream())
                    };
                    gpu.latch_result(status.result(), "copying an activation to host memory");
                });
                gpu.latch_result(events.stored.record(stream), "marking an activation as stored");
            }
            (Host::Pageable(memory), Some(ring)) => {
                if gpu.refuses_while_capturing("a copy through pageable memory") {
                    return;
                }
                let (gpu, memory, pieces) = (gpu.clone(), Arc::clone(memory), Arc::clone(&ring.pieces));
                let stored = Arc::clone(&events.stored);
                let job = ring.thread.submit(&[], move || {
                    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    let done = store_by_pieces(&gpu, &pieces, pointer, &mut memory[..bytes], copying, &stored);
                    gpu.latch_result(done, "copying an activation to host memory");
                });
                slot.job = self.gpu.latch_result(job, "copying an activation to host memory");
            }
            (Host::Pageable(_), None) => unreachable!("pageable slots come with a ring"),
        }
    }

    /// Lets later compute wait until a slot has what was stored last: then its place on the device is free.
    pub fn await_stored(&mut self, slot: usize) {
        self.await_job(slot);
        if let Some((driver, events)) = self.gpu.driver().zip(self.slots[slot].events.as_ref()) {
            self.gpu.latch_result(driver.stream.wait(&events.stored), "waiting for a copy to host memory");
        }
    }

    /// Lets later copies back wait for compute queued so far, which is done with their buffers then.
    pub fn await_free(&self) {
        if let Some((driver, free)) = self.gpu.driver().zip(self.free.as_ref()).filter(|_| !self.gpu.has_failed()) {
            self.gpu.latch_result(free.record(&driver.stream), "marking a buffer as free");
            self.gpu.latch_result(driver.lane(LaneKind::H2d).wait(free), "waiting for a buffer");
        }
    }

    /// Queues the copy of a slot to device memory, behind what [`Self::await_free`] made copies wait for.
    pub fn load(&mut self, slot: usize, pointer: u64, bytes: usize, copying: Copying) {
        let (gpu, slot) = (&self.gpu, &mut self.slots[slot]);
        if gpu.has_failed() {
            return;
        }
        let Some((driver, events)) = gpu.driver().zip(slot.events.as_ref()) else { return slot.skip(gpu, copying) };
        let stream = driver.lane(LaneKind::H2d);
        match (&slot.host, &self.ring) {
            (Host::Pinned(buffer), _) => {
                gpu.clock().copy(copying, || {
                    // SAFETY: as in `store`.
                    let status = unsafe {
                        sys::cuMemcpyHtoDAsync_v2(pointer, buffer.pointer().cast(), bytes, stream.cu_stream())
                    };
                    gpu.latch_result(status.result(), "copying an activation back");
                });
                gpu.latch_result(events.full.record(stream), "marking a buffer as full");
            }
            (Host::Pageable(memory), Some(ring)) => {
                if gpu.refuses_while_capturing("a copy through pageable memory") {
                    return;
                }
                let (gpu, memory, pieces) = (gpu.clone(), Arc::clone(memory), Arc::clone(&ring.pieces));
                let full = Arc::clone(&events.full);
                let job = ring.thread.submit(&[], move || {
                    let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    let done = load_by_pieces(&gpu, &pieces, pointer, &memory[..bytes], copying, &full);
                    gpu.latch_result(done, "copying an activation back");
                });
                slot.job = self.gpu.latch_result(job, "copying an activation back");
            }
            (Host::Pageable(_), None) => unreachable!("pageable slots come with a ring"),
        }
    }

    /// Lets later compute wait until the copy that was queued last by [`Self::load`] is done.
    pub fn await_loaded(&mut self, slot: usize) {
        self.await_job(slot);
        if let Some((driver, events)) = self.gpu.driver().zip(self.slots[slot].events.as_ref()) {
            self.gpu.latch_result(driver.stream.wait(&events.full), "waiting for an activation to come back");
        }
    }

    /// Waits until a thread has queued what it was given: before that there is nothing on the device to wait for.
    fn await_job(&mut self, slot: usize) {
        if let Some(job) = self.slots[slot].job.take() {
            if !job.is_done() {
                self.gpu.count_held_back();
            }
            job.wait();
        }
    }
}

impl Slot {
    /// What a recording device does of a copy.
    fn skip(&self, gpu: &Gpu, copying: Copying) {
        let pageable = matches!(self.host, Host::Pageable(_));
        if !(pageable && gpu.refuses_while_capturing("a copy through pageable memory")) {
            gpu.clock().copy(copying, || ());
        }
    }
}

/// Copies device memory to `memory` through the ring: while the device fills one piece, the thread empties another.
fn store_by_pieces(
    gpu: &Gpu,
    pieces: &Pieces,
    pointer: u64,
    memory: &mut [u8],
    copying: Copying,
    stored: &CudaEvent,
) -> Result<()> {
    gpu.bind();
    let Some(driver) = gpu.driver() else { return Ok(()) };
    let stream = driver.lane(LaneKind::D2h);
    let mut parts: Vec<&mut [u8]> = memory.chunks_mut(PIECE_BYTES).collect();
    let mut queued: Result<()> = Ok(());
    gpu.clock().copy(copying, || {
        queued = (0..parts.len()).try_for_each(|piece| {
            if let Some(before) = piece.checked_sub(NUM_PIECES) {
                pieces.take(before, parts[before])?;
            }
            let len = parts[piece].len();
            let to = pieces.idle(piece)?;
            let from = pointer + (piece * PIECE_BYTES) as u64;
            // SAFETY: the piece is free, has room for as many bytes and outlives the copy.
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, len, stream.cu_stream()) }.result()?;
            pieces.used[piece % NUM_PIECES].record(stream)?;
            Ok(())
        });
    });
    queued?;
    stored.record(stream)?;
    for piece in parts.len().saturating_sub(NUM_PIECES)..parts.len() {
        pieces.take(piece, parts[piece])?;
    }
    Ok(())
}

/// Copies `memory` to device memory through the ring: while the device takes one piece, the thread fills another.
fn load_by_pieces(
    gpu: &Gpu,
    pieces: &Pieces,
    pointer: u64,
    memory: &[u8],
    copying: Copying,
    full: &CudaEvent,
) -> Result<()> {
    gpu.bind();
    let Some(driver) = gpu.driver() else { return Ok(()) };
    let stream = driver.lane(LaneKind::H2d);
    let mut queued: Result<()> = Ok(());
    gpu.clock().copy(copying, || {
        queued = memory.chunks(PIECE_BYTES).enumerate().try_for_each(|(piece, part)| {
            let from = pieces.put(piece, part)?;
            let to = pointer + (piece * PIECE_BYTES) as u64;
            // SAFETY: as in `store_by_pieces`.
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), part.len(), stream.cu_stream()) }.result()?;
            pieces.used[piece % NUM_PIECES].record(stream)?;
            Ok(())
        });
    });
    queued?;
    full.record(stream)?;
    Ok(())
}
