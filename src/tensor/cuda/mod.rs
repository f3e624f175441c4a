//! The CUDA device: context, streams, arena, kernels, event clock.
//!
//! It has two forms. With a driver it works; without one it is a [recording device](CudaDevice::recording), on which the same code takes the same
//! memory and nothing is done.
//!
//! Nothing here panics on a machine without a driver: [`probe`] looks before any call that could. Work that fails on the device is latched:
//! the first error is kept, everything after it is skipped, and [`CudaDevice::check`] returns it at the end of a pass. So operations need no
//! result type, and an out-of-memory leaves the process usable.

pub mod arena;
pub mod blaslt;
mod clock;
mod copies;
mod driver;
pub mod graph;
pub mod images;
mod mapped;
pub mod offload;
mod pass;
mod pinned;
pub mod probe;
mod readback;
mod recording;
mod staging;
pub mod tensor_map;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};

use super::memory::{Ledger, MemoryCategory};
use crate::base::error::{NoDevice, OutOfMemory, Result};
use arena::{Arena, Block, Memory};
pub use arena::{ArenaBytes, Pool};
pub use clock::{EventClock, EventHandle};
pub use copies::Pitched;
use driver::Driver;
use graph::Capture;
pub use graph::Graph;
use mapped::{MappedPart, MappedPool};
pub use pass::{HeldPass, PassMemory, PassScope};
pub use pinned::PinnedBytes;
use pinned::{PinnedBuffer, PinnedSource};
pub use probe::DeviceFacts;
pub use readback::{ReadSlot, Readback};
pub use recording::RecordingFacts;
use recording::VirtualMemory;

/// One NVIDIA GPU. Cheap to clone.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

struct Inner {
    // Dropped in this order: arenas wait for the device, whose library and streams go last.
    /// Memory of what lasts, and of the pass that runs.
    arenas: [Arena; 2],
    backend: Backend,
    facts: DeviceFacts,
    /// Bytes that were in use on the card before the first allocation of an arena: the context's own and those of others. 0 on a recording device.
    bytes_before: u64,
    /// Most bytes that may be in use on the card, by everybody.
    limit_bytes: u64,
    pinned: PinnedSource,
    mapped: MappedPool,
    /// Whether a pass runs: it takes its memory from the second arena.
    in_pass: AtomicBool,
    /// Of the graph that is being recorded, if one is.
    capture: Mutex<Option<Capture>>,
    ledger: Arc<Ledger>,
    latch: Mutex<Option<anyhow::Error>>,
    failed: AtomicBool,
    counters: Counters,
}

/// Who does what is queued.
enum Backend {
    Driver(Box<Driver>),
    /// Nobody.
    Recording {
        facts: RecordingFacts,
        /// Counted as [`Staging`]'s is.
        _staging: PinnedBuffer,
    },
}

/// What the host did to the device, counted.
#[derive(Debug, Default)]
pub struct Counters {
    /// Kernels and library calls launched.
    pub launches: AtomicU64,
    /// Times the host waited for the device to finish everything, so that it stood still until the host had queued more. A copy from
    /// pageable memory, for which the driver may wait, counts as one.
    pub host_syncs: AtomicU64,
    /// Times the host waited because it was far ahead: the device had more to do all the while.
    pub held_back: AtomicU64,
    /// Driver allocations.
    pub allocations: AtomicU64,
}

/// A counter reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CounterValues {
    /// Kernels and library calls launched.
    pub launches: u64,
    /// Times the host waited for the device to finish everything, so that it stood still until the host had queued more.
    pub host_syncs: u64,
    /// Driver allocations.
    pub allocations: u64,
}

impl std::ops::Sub for CounterValues {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            launches: self.launches - before.launches,
            host_syncs: self.host_syncs - before.host_syncs,
            allocations: self.allocations - before.allocations,
        }
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("facts", &self.inner.facts).finish_non_exhaustive()
    }
}

/// How a kernel is laid out over the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
}

impl Launch {
    /// `blocks` blocks of `threads` threads, without dynamic shared memory.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { grid: [blocks as u32, 1, 1], block: threads, shared_bytes: 0 }
    }

    /// One thread for each of `n` values, `per_thread` values a thread, in blocks of 256.
    pub fn elements(n: usize, per_thread: usize) -> Self {
        Self::new(n.div_ceil(per_thread).div_ceil(256).max(1), 256)
    }
}

/// Blocks of a grid in each direction, on every card.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Memory of a tensor that kernels reach: the device's, given back to the arena when dropped, or the host's.
pub struct CudaBuffer {
    owned: Owned,
    pointer: u64,
    bytes: usize,
    device: CudaDevice,
}

/// What a buffer gives back.
enum Owned {
    /// Nothing: it has another's memory, or none.
    Nothing,
    Arena(Block),
    Host(MappedPart),
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl CudaBuffer {
    /// Device address; 0 when the allocation failed (and the device is latched).
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Device of the memory.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Owned::Arena(block) = self.owned {
            // Reuse is ordered by the one compute stream that all work runs on.
            self.device.arena(block.pool()).free(block);
        }
    }
}

impl CudaDevice {
    /// The first usable GPU.
    ///
    /// # Errors
    /// [`NoDevice`] with the reason: no driver, driver too old, no GPU, or no kernels for it in this build.
    pub fn new(vram_limit_bytes: Option<u64>) -> Result<Self, NoDevice> {
        let refuse = |reason: String| NoDevice { device: "cuda", reason };
        probe::driver().map_err(refuse)?;
        Self::open(vram_limit_bytes).map_err(|error| refuse(format!("{error:#}")))
    }

    fn open(vram_limit_bytes: Option<u64>) -> Result<Self> {
        let (driver, facts, pinned) = Driver::open()?;
        let bytes_before = driver.used_bytes().unwrap_or(0);
        let context = Arc::clone(&driver.context);
        let memory = || Memory::Driver { context: Arc::clone(&context), limit_bytes: vram_limit_bytes };
        let arenas = [Pool::Lasting, Pool::Pass].map(|pool| Arena::new(pool, memory()));
        let limit_bytes = vram_limit_bytes.unwrap_or(u64::MAX).min(facts.vram_bytes);
        Ok(Self::from_parts(Backend::Driver(Box::new(driver)), facts, [bytes_before, limit_bytes], pinned, arenas))
    }

    /// A device without a driver: what is asked of it takes memory and is counted, and nothing is done. Copies to the host give zeros.
    pub fn recording(facts: RecordingFacts) -> Self {
        let memory = VirtualMemory::new(&facts);
        let arenas = [Pool::Lasting, Pool::Pass].map(|pool| Arena::new(pool, Memory::Virtual(Arc::clone(&memory))));
        arenas.iter().for_each(|arena| arena.set_first_slab(recording::first_slab_bytes(&facts)));
        let (card, pinned) = (facts.card.clone(), PinnedSource::recording());
        let backend = Backend::Recording { facts, _staging: PinnedBuffer::counted(&pinned, staging::BYTES) };
        let limit_bytes = card.vram_bytes;
        Self::from_parts(backend, card, [0, limit_bytes], pinned, arenas)
    }

    fn from_parts(
        backend: Backend,
        facts: DeviceFacts,
        [bytes_before, limit_bytes]: [u64; 2],
        pinned: PinnedSource,
        arenas: [Arena; 2],
    ) -> Self {
        let ledger = match backend {
            Backend::Driver(_) => Ledger::default(),
            Backend::Recording { .. } => Ledger::noting_peak(),
        };
        Self {
            inner: Arc::new(Inner {
                backend,
                facts,
                bytes_before,
                limit_bytes,
                pinned,
                mapped: MappedPool::default(),
                arenas,
                in_pass: AtomicBool::new(false),
                capture: Mutex::default(),
                ledger: Arc::new(ledger),
                latch: Mutex::default(),
                failed: AtomicBool::new(false),
                counters: Counters::default(),
            }),
        }
    }

    /// The driver's side of the device; `None` on a recording device.
    fn driver(&self) -> Option<&Driver> {
        match &self.inner.backend {
            Backend::Driver(driver) => Some(driver),
            Backend::Recording { .. } => None,
        }
    }

    /// What the device stands for, if it is a recording device.
    pub fn recording_facts(&self) -> Option<&RecordingFacts> {
        match &self.inner.backend {
            Backend::Driver(_) => None,
            Backend::Recording { facts, .. } => Some(facts),
        }
    }

    /// Facts about the card.
    pub fn facts(&self) -> &DeviceFacts {
        &self.inner.facts
    }

    /// Whether the vendor's library computes matrix products: it was found and is allowed.
    pub fn has_vendor_library(&self) -> bool {
        match &self.inner.backend {
            Backend::Driver(driver) => driver.blas.is_ok(),
            Backend::Recording { facts, .. } => facts.vendor_library,
        }
    }

    /// What computes matrix products, in words: the vendor's library with its version, or the own kernels.
    pub fn matrix_library(&self) -> String {
        match &self.inner.backend {
            Backend::Driver(driver) => {
                driver.blas.as_ref().map_or_else(|_| "own matrix kernels".into(), blaslt::BlasLt::describe)
            }
            Backend::Recording { .. } => "nothing is computed".into(),
        }
    }

    /// Where page-locked memory comes from.
    fn pinned(&self) -> &PinnedSource {
        &self.inner.pinned
    }

    /// Page-locked host memory of the engine.
    pub fn pinned_bytes(&self) -> PinnedBytes {
        self.inner.pinned.bytes()
    }

    /// Lets the peak of [`Self::pinned_bytes`] start anew from what is locked now.
    pub fn reset_pinned_peak(&self) {
        self.inner.pinned.reset_peak();
    }

    /// Memory accounting.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.inner.ledger
    }

    /// Bytes the driver says are in use on the card, by everybody; `None` on a recording device.
    pub fn driver_used_bytes(&self) -> Option<u64> {
        self.driver()?.used_bytes()
    }

    /// Bytes that were in use on the card before the engine's first allocation, by the context and by others. 0 on a recording device.
    pub fn bytes_before(&self) -> u64 {
        self.inner.bytes_before
    }

    /// Most bytes that may be in use on the card, by everybody: its memory, or the limit that was set.
    pub fn limit_bytes(&self) -> u64 {
        self.inner.limit_bytes
    }

    /// Bytes of an arena.
    pub fn arena_bytes(&self, pool: Pool) -> ArenaBytes {
        self.arena(pool).bytes()
    }

    /// Lets an arena, whenever it is empty, begin with one slab of at least `bytes` bytes where there is room for it: what a recording device found
    /// ([`Self::arena_bytes`]).
    pub fn set_first_slab(&self, pool: Pool, bytes: u64) {
        self.arena(pool).set_first_slab(bytes);
    }

    /// Bytes that may still be asked from the driver, within the limit.
    fn room(&self) -> u64 {
        self.arena(Pool::Lasting).room()
    }

    /// Bytes that could be had now: from the driver, within the limit, and from the arenas' own free lists.
    pub fn available_bytes(&self) -> u64 {
        let [lasting, pass] = &self.inner.arenas;
        self.room() + lasting.free_bytes() + pass.free_bytes()
    }

    /// The counters as they stand, allocations by the arenas included.
    pub fn counters(&self) -> CounterValues {
        let Counters { launches, host_syncs, allocations, .. } = &self.inner.counters;
        CounterValues {
            launches: launches.load(Ordering::Relaxed),
            host_syncs: host_syncs.load(Ordering::Relaxed),
            allocations: allocations.load(Ordering::Relaxed)
                + self.inner.arenas.iter().map(Arena::num_allocations).sum::<u64>(),
        }
    }

    /// Times the host was held back because it was far ahead; no host syncs, as the device was not waiting for it.
    pub fn times_held_back(&self) -> u64 {
        self.inner.counters.held_back.load(Ordering::Relaxed)
    }

    /// Counts one time that the host was held back.
    pub(super) fn count_held_back(&self) {
        self.inner.counters.held_back.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one launch that was not made through [`Self::launch`].
    pub fn count_launch(&self) {
        self.inner.counters.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        if let Some(Err(error)) = self.driver().map(|driver| driver.context.bind_to_thread()) {
            self.latch(anyhow!(error).context("the CUDA context could not be used on this thread"));
        }
    }

    fn arena(&self, pool: Pool) -> &Arena {
        &self.inner.arenas[pool as usize]
    }

    /// The arena that serves now.
    fn current_arena(&self) -> &Arena {
        self.arena(if self.inner.in_pass.load(Ordering::Relaxed) { Pool::Pass } else { Pool::Lasting })
    }

    /// Memory for `bytes` bytes. On failure the device is latched with [`OutOfMemory`] and the buffer's address is 0.
    pub fn alloc(&self, category: MemoryCategory, bytes: usize) -> CudaBuffer {
        let empty = |device: &Self| CudaBuffer { owned: Owned::Nothing, pointer: 0, bytes, device: device.clone() };
        if bytes == 0 || self.has_failed() {
            return empty(self);
        }
        let arena = self.current_arena();
        let block = arena.alloc(bytes).or_else(|free_bytes| {
            if self.is_capturing() {
                return Err(free_bytes);
            }
            // Slabs that nobody uses may be too small, or in the way: before giving up they go back to the driver.
            self.trim();
            arena.alloc(bytes)
        });
        match block {
            Ok(block) => self.buffer(block, bytes),
            Err(free_bytes) => {
                let error = OutOfMemory { wanted_bytes: bytes as u64, free_bytes, category: category.name() };
                self.latch(error.into());
                empty(self)
            }
        }
    }

    /// As [`Self::alloc`], for memory that can be done without: `None` where there is none, and the device is not latched.
    pub fn try_alloc(&self, bytes: usize) -> Option<CudaBuffer> {
        if bytes == 0 || self.has_failed() {
            return None;
        }
        self.current_arena().alloc(bytes).ok().map(|block| self.buffer(block, bytes))
    }

    /// As [`Self::try_alloc`], of memory that the engine has and does not use.
    fn try_alloc_within(&self, bytes: usize) -> Option<CudaBuffer> {
        if bytes == 0 || self.has_failed() {
            return None;
        }
        self.current_arena().alloc_within(bytes).map(|block| self.buffer(block, bytes))
    }

    /// A second buffer over memory that it does not own: who has it keeps the memory.
    pub(super) fn alias(&self, buffer: &CudaBuffer) -> CudaBuffer {
        CudaBuffer { owned: Owned::Nothing, pointer: buffer.pointer, bytes: buffer.bytes, device: self.clone() }
    }

    fn buffer(&self, block: Block, bytes: usize) -> CudaBuffer {
        CudaBuffer { pointer: block.pointer(), owned: Owned::Arena(block), bytes, device: self.clone() }
    }

    /// Launches kernel `name` on the compute stream with its arguments in order ([`kernel_args`](crate::kernel_args) makes them).
    pub fn launch(&self, name: &str, launch: Launch, args: &[Arg]) {
        // The driver reads the arguments before the call returns, each through its own pointer.
        let mut pointers: Vec<*mut c_void> =
            args.iter().map(|arg| std::ptr::from_ref(&arg.0).cast_mut().cast()).collect();
        self.launch_raw(name, launch, &mut pointers);
    }

    /// Launches a kernel whose only parameter is the struct `params`, laid out as on the device (`#[repr(C)]`).
    pub fn launch_struct<T: Copy>(&self, name: &str, launch: Launch, params: &T) {
        self.launch_raw(name, launch, &mut [std::ptr::from_ref(params).cast_mut().cast()]);
    }

    fn launch_raw(&self, name: &str, launch: Launch, args: &mut [*mut c_void]) {
        if self.has_failed() || launch.grid.contains(&0) {
            return;
        }
        let [x, y, z] = launch.grid;
        if x > MAX_GRID[0] || y > MAX_GRID[1] || z > MAX_GRID[2] {
            return self.latch(anyhow!("{name} would need a grid of {x}×{y}×{z} blocks: more than a GPU launches"));
        }
        self.count_launch();
        if let Some(Err(error)) = self.driver().map(|driver| driver.launch(name, launch, args)) {
            self.latch(error);
        }
    }

    /// Queues a matrix product of the vendor's library, where [`Self::has_vendor_library`].
    pub fn blas_matmul(&self, shape: blaslt::Shape, operands: blaslt::Operands) {
        if self.has_failed() {
            return;
        }
        match &self.inner.backend {
            Backend::Driver(driver) => {
                let Ok(blas) = &driver.blas else { return };
                if let Err(error) = blas.matmul(self, driver, shape, operands) {
                    self.latch(error);
                }
            }
            Backend::Recording { .. } => self.count_launch(),
        }
    }

    /// Lets kernel `name` use up to `bytes` of dynamic shared memory.
    pub fn allow_shared_bytes(&self, name: &str, bytes: u32) {
        if let Some(Err(error)) = self.driver().map(|driver| driver.allow_shared_bytes(name, bytes)) {
            self.latch(anyhow!(error).context(format!("{bytes} bytes of shared memory for {name}")));
        }
    }

    /// Waits until the device has done everything: a host sync.
    pub fn synchronize(&self) {
        if self.refuses_while_capturing("waiting for the device") {
            return;
        }
        self.inner.counters.host_syncs.fetch_add(1, Ordering::Relaxed);
        if let Some(driver) = self.driver() {
            self.latch_result(driver.stream.synchronize(), "waiting for the device");
        }
    }

    /// The first error since the last check, if any. Clears it: after an out-of-memory the device is usable again.
    ///
    /// # Errors
    /// The error that was latched.
    pub fn check(&self) -> Result<()> {
        let error = self.lock().take();
        self.inner.failed.store(false, Ordering::Relaxed);
        error.map_or(Ok(()), Err)
    }

    /// Gives memory that no tensor uses back to the driver. What was recorded before must be recorded again ([`Self::is_current`]).
    pub fn trim(&self) {
        self.synchronize();
        self.inner.arenas.iter().for_each(Arena::trim);
    }

    pub(super) fn latch_result<T, E: Into<anyhow::Error>>(
        &self,
        result: Result<T, E>,
        what: &'static str,
    ) -> Option<T> {
        result.map_err(|error| self.latch(error.into().context(what))).ok()
    }

    fn latch(&self, error: anyhow::Error) {
        let mut latch = self.lock();
        if latch.is_none() {
            *latch = Some(error);
        }
        self.inner.failed.store(true, Ordering::Relaxed);
    }

    /// Whether an error is latched: nothing is queued until [`Self::check`].
    pub fn has_failed(&self) -> bool {
        self.inner.failed.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<anyhow::Error>> {
        self.inner.latch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One kernel argument by value: an address, an integer or a float. The kernel reads as many of its low bytes as its parameter has.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct Arg(u64);

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<i64> for Arg {
    fn from(value: i64) -> Self {
        Self(value.cast_unsigned())
    }
}

impl From<i32> for Arg {
    fn from(value: i32) -> Self {
        Self(u64::from(value.cast_unsigned()))
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

/// Arguments for [`CudaDevice::launch`]: `kernel_args![x.pointer(), rows, eps]`.
///
/// Each value must have exactly the kernel parameter's type: `u64` for pointers, `i32`, `u32`, `i64`, `f32`.
#[macro_export]
macro_rules! kernel_args {
    ($($value:expr),* $(,)?) => {
        &[$($crate::tensor::cuda::Arg::from($value)),*]
    };
}
