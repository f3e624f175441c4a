//! Devices: where tensors live and operations run.

use std::sync::Arc;

use anyhow::Context as _;

use super::bytes::{ByteStorage, Bytes};
use super::clock::{PhaseClock, Script};
use super::cuda::{CounterValues, CudaDevice, EventClock, Graph, PassScope, RecordingFacts};
use super::dtype::{DType, Precision};
use super::memory::{Ledger, MemoryCategory, MemoryReport};
use super::pool::CpuPool;
use super::storage::{IndexStorage, Indices, Storage, Tensor, is_pooled};
use crate::base::error::{NoDevice, Result};

/// Why nothing is put into host memory on the CPU.
const CPU_IS_HOST: &str = "a CPU keeps it in host memory anyway";

/// A device to train on. Cheap to clone: clones share memory accounting and clock.
#[derive(Debug, Clone)]
pub enum Device {
    /// The host's cores.
    Cpu(CpuDevice),
    /// An NVIDIA GPU.
    Cuda(Gpu),
}

/// The host's cores, used through one pool of named threads.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    inner: Arc<CpuInner>,
}

/// An NVIDIA GPU with its phase clock.
#[derive(Debug, Clone)]
pub struct Gpu {
    device: CudaDevice,
    clock: Arc<PhaseClock>,
}

impl std::ops::Deref for Gpu {
    type Target = CudaDevice;

    fn deref(&self) -> &CudaDevice {
        &self.device
    }
}

/// A part of a step that was recorded on a GPU: its work, and the phases that the work belongs to.
#[derive(Debug)]
pub struct Segment {
    graph: Graph,
    script: Script,
}

impl Gpu {
    /// Records what `work` queues instead of doing it ([`CudaDevice::capture`]), outside of any phase.
    ///
    /// # Errors
    /// When something in `work` failed or cannot be recorded. Nothing was done then.
    pub fn record<R>(&self, work: impl FnOnce() -> R) -> Result<(R, Segment)> {
        self.clock.begin_script();
        let captured = self.device.capture(work);
        let script = self.clock.end_script();
        let (returned, graph) = captured?;
        Ok((returned, Segment { graph, script }))
    }

    /// The clock that phases are booked on.
    pub fn clock(&self) -> &PhaseClock {
        &self.clock
    }

    /// Queues a recorded part, and books its phases in the step that is open.
    pub fn replay(&self, segment: &mut Segment) {
        let Segment { graph, script } = segment;
        self.clock.replay(script, |events| graph.launch(events));
    }
}

#[derive(Debug)]
struct CpuInner {
    threads: rayon::ThreadPool,
    precision: Precision,
    ledger: Arc<Ledger>,
    pool: Arc<CpuPool>,
    clock: PhaseClock,
}

impl Device {
    /// The CPU with `threads` threads (0: one a core) and the given arithmetic.
    ///
    /// # Errors
    /// When the system refuses the threads.
    pub fn cpu(threads: usize, precision: Precision) -> Result<Self> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("tandem-cpu-{i}"))
            .build()
            .context("the system refused the CPU engine's threads; set train.threads to a smaller number")?;
        Ok(Self::Cpu(CpuDevice {
            inner: Arc::new(CpuInner {
                threads,
                precision,
                ledger: Arc::default(),
                pool: Arc::default(),
                clock: PhaseClock::default(),
            }),
        }))
    }

    /// The first NVIDIA GPU.
    ///
    /// # Errors
    /// With the reason: no driver, no GPU, a card or a driver that is too old, or no kernels in this build.
    pub fn cuda() -> Result<Self, NoDevice> {
        Self::cuda_within(None)
    }

    /// The first NVIDIA GPU, used as if it had `vram_limit_bytes` of memory: the driver's own use counts.
    ///
    /// # Errors
    /// As [`Self::cuda`].
    pub fn cuda_within(vram_limit_bytes: Option<u64>) -> Result<Self, NoDevice> {
        Ok(Self::on(CudaDevice::new(vram_limit_bytes)?))
    }

    /// A GPU without a driver, on which a step takes the memory that it takes on a real one, and nothing is computed: for plans.
    pub fn recording(facts: RecordingFacts) -> Self {
        Self::on(CudaDevice::recording(facts))
    }

    fn on(device: CudaDevice) -> Self {
        let clock = Arc::new(PhaseClock::on_device(EventClock::new(device.clone())));
        Self::Cuda(Gpu { device, clock })
    }

    /// Whether tensors hold the values they are given. On a recording device they hold none, so whoever would make many for it need not.
    pub fn keeps_values(&self) -> bool {
        !matches!(self, Self::Cuda(gpu) if gpu.recording_facts().is_some())
    }

    /// Host memory that could be had without swapping, in bytes, where that is known; on a recording device that of the machine it stands for.
    pub fn available_host_bytes(&self) -> Option<u64> {
        match self {
            Self::Cuda(gpu) => match gpu.recording_facts() {
                // What was locked before is not available.
                Some(facts) => facts.host_bytes.map(|bytes| bytes.saturating_sub(gpu.pinned_bytes().now)),
                None => super::memory::available_host_bytes(),
            },
            Self::Cpu(_) => super::memory::available_host_bytes(),
        }
    }

    /// The device in words: `CPU, 8 threads, f32`.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => {
                let precision = match cpu.precision() {
                    Precision::F32 => "f32",
                    Precision::Bf16 => "bf16 rounding",
                };
                match cpu.num_threads() {
                    1 => format!("CPU, 1 thread, {precision}"),
                    n => format!("CPU, {n} threads, {precision}"),
                }
            }
            Self::Cuda(gpu) => {
                let facts = gpu.facts();
                let (major, minor) = facts.compute_capability;
                let vram = crate::base::units::bytes(facts.vram_bytes);
                format!("{}, sm_{major}{minor}, {vram}, {}", facts.name, gpu.matrix_library())
            }
        }
    }

    /// Runs `work` with the device's threads: every model entry point does its work in here.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Cpu(cpu) => cpu.inner.threads.install(work),
            Self::Cuda(gpu) => {
                gpu.bind();
                work()
            }
        }
    }

    /// Lets a pass take its memory from the GPU's arena of passes: what is allocated while the scope lives must be dropped before the next pass.
    pub fn pass_scope(&self) -> Option<PassScope<'_>> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(gpu) => Some(gpu.pass_scope()),
        }
    }

    /// The clock that phases are booked on.
    pub fn clock(&self) -> &PhaseClock {
        match self {
            Self::Cpu(cpu) => &cpu.inner.clock,
            Self::Cuda(gpu) => gpu.clock(),
        }
    }

    /// Arithmetic of the device.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Cpu(cpu) => cpu.precision(),
            Self::Cuda(_) => Precision::Bf16,
        }
    }

    /// Memory by category.
    pub fn memory(&self) -> MemoryReport {
        match self {
            Self::Cpu(cpu) => cpu.inner.ledger.report(),
            Self::Cuda(gpu) => MemoryReport { pinned: Some(gpu.pinned_bytes()), ..gpu.ledger().report() },
        }
    }

    /// Lets the peaks of [`Self::memory`] start anew from what is allocated now.
    pub fn reset_memory_peaks(&self) {
        match self {
            Self::Cpu(cpu) => cpu.inner.ledger.reset_peaks(),
            Self::Cuda(gpu) => {
                gpu.ledger().reset_peaks();
                gpu.reset_pinned_peak();
            }
        }
    }

    /// Memory that could be had now, in bytes: on a GPU what the driver has free, within the limit that was set, and what the engine has free itself; on
    /// the CPU what the system says. `None` where it does not.
    pub fn available_bytes(&self) -> Option<u64> {
        match self {
            Self::Cpu(_) => super::memory::available_host_bytes(),
            Self::Cuda(gpu) => Some(gpu.available_bytes()),
        }
    }

    /// Gives freed buffers back to the system.
    pub fn trim(&self) {
        match self {
            Self::Cpu(cpu) => cpu.inner.pool.clear(),
            Self::Cuda(gpu) => gpu.trim(),
        }
    }

    /// Format of activations and weights: f32 on the CPU, bf16 on a GPU.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Cpu(_) => DType::F32,
            Self::Cuda(_) => DType::Bf16,
        }
    }

    /// Waits until the device has done everything that was queued.
    pub fn synchronize(&self) {
        if let Self::Cuda(gpu) = self {
            gpu.synchronize();
        }
    }

    /// What the host did to the device so far; the CPU has nothing to count.
    pub fn counters(&self) -> Option<CounterValues> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(gpu) => Some(gpu.counters()),
        }
    }

    /// `n` columns rounded up to what the device's vector loads want: eight on a GPU, one on the CPU.
    pub fn padded(&self, n: usize) -> usize {
        match self {
            Self::Cpu(_) => n,
            Self::Cuda(_) => n.next_multiple_of(8),
        }
    }

    /// Values between rows of a matrix of `n` columns that products read and write in part: whole lines of 128 bytes on a GPU, `n` on the CPU.
    pub fn stride(&self, n: usize) -> usize {
        match self {
            Self::Cpu(_) => n,
            Self::Cuda(_) => n.next_multiple_of(64),
        }
    }

    /// Whether an error waits for [`Self::check`]: until then nothing is done.
    pub fn has_failed(&self) -> bool {
        matches!(self, Self::Cuda(gpu) if gpu.has_failed())
    }

    /// The first error of the device since the last call. The CPU has none of its own.
    ///
    /// # Errors
    /// What a GPU latched: an out-of-memory, a failed launch.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(gpu) => gpu.check(),
        }
    }

    /// A tensor in the device's format whose values are not set: whoever asks for it writes every one. Debug builds of the CPU engine fill it
    /// with NaN.
    pub fn empty(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        self.alloc(category, shape, self.dtype(), false)
    }

    /// As [`Self::empty`], for memory that can be done without: `None` where there is none, and no error is latched.
    pub fn try_empty(&self, category: MemoryCategory, shape: &[usize]) -> Option<Tensor> {
        match self {
            Self::Cpu(_) => Some(self.empty(category, shape)),
            Self::Cuda(gpu) => {
                let bytes = shape.iter().product::<usize>() * self.dtype().num_bytes();
                let buffer = gpu.try_alloc(bytes)?;
                let charge = gpu.ledger().charge(category, bytes as u64);
                Some(Tensor::from_parts(shape, self.dtype(), Storage::Cuda(buffer), charge))
            }
        }
    }

    /// Zeros in host memory, which the GPU reads and writes over the bus. They take no device memory, so none is booked.
    ///
    /// # Errors
    /// Why there are none, as a clause; on the CPU, whose memory is the host's anyway.
    pub fn zeros_mapped(&self, category: MemoryCategory, shape: &[usize], dtype: DType) -> Result<Tensor, String> {
        let Self::Cuda(gpu) = self else { return Err(CPU_IS_HOST.into()) };
        let buffer = gpu.alloc_mapped(shape.iter().product::<usize>() * dtype.num_bytes())?;
        Ok(Tensor::from_parts(shape, dtype, Storage::Cuda(buffer), gpu.ledger().charge(category, 0)))
    }

    /// As [`Self::zeros_mapped`], `len` bytes.
    ///
    /// # Errors
    /// As there.
    pub fn zero_mapped_bytes(&self, category: MemoryCategory, len: usize) -> Result<Bytes, String> {
        let Self::Cuda(gpu) = self else { return Err(CPU_IS_HOST.into()) };
        let buffer = gpu.alloc_mapped(len)?;
        Ok(Bytes::from_parts(ByteStorage::Cuda(buffer), len, gpu.ledger().charge(category, 0)))
    }

    /// As [`Self::empty`], in f32 on every device.
    pub fn empty_f32(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        self.alloc(category, shape, DType::F32, false)
    }

    /// A tensor of zeros in the device's format.
    pub fn zeros(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        self.alloc(category, shape, self.dtype(), true)
    }

    /// A tensor of zeros in f32 on every device.
    pub fn zeros_f32(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        self.alloc(category, shape, DType::F32, true)
    }

    fn alloc(&self, category: MemoryCategory, shape: &[usize], dtype: DType, zero: bool) -> Tensor {
        let len: usize = shape.iter().product();
        match self {
            Self::Cpu(cpu) => {
                let (mut data, is_zero) = cpu.buffer(category, len);
                if zero && !is_zero {
                    data.fill(0.0);
                } else if cfg!(debug_assertions) && !zero {
                    data.fill(f32::NAN);
                }
                cpu.tensor(category, shape, data)
            }
            Self::Cuda(gpu) => {
                let bytes = len * dtype.num_bytes();
                let buffer = gpu.alloc(category, bytes);
                if zero {
                    gpu.zero(buffer.pointer(), bytes);
                }
                Tensor::from_parts(shape, dtype, Storage::Cuda(buffer), gpu.ledger().charge(category, bytes as u64))
            }
        }
    }

    /// A tensor with the given values in the device's format. `data.len()` must be the product of `shape`.
    pub fn tensor(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>) -> Tensor {
        self.tensor_as(category, shape, data, self.dtype())
    }

    /// As [`Self::tensor`], in f32 on every device.
    pub fn tensor_f32(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>) -> Tensor {
        self.tensor_as(category, shape, data, DType::F32)
    }

    fn tensor_as(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>, dtype: DType) -> Tensor {
        match self {
            Self::Cpu(cpu) => cpu.tensor(category, shape, data),
            Self::Cuda(_) => {
                let mut tensor = self.alloc(category, shape, dtype, false);
                tensor.set(&data);
                tensor
            }
        }
    }

    /// Room for `len` integers, for a kernel to fill; zeros on the CPU.
    pub fn empty_indices(&self, category: MemoryCategory, len: usize) -> Indices {
        match self {
            Self::Cpu(_) => self.indices(category, vec![0; len]),
            Self::Cuda(gpu) => {
                let bytes = len * size_of::<i32>();
                let charge = gpu.ledger().charge(category, bytes as u64);
                Indices::from_parts(IndexStorage::Cuda(gpu.alloc(category, bytes)), len, charge)
            }
        }
    }

    /// `len` bytes, all zero.
    pub fn zero_bytes(&self, category: MemoryCategory, len: usize) -> Bytes {
        let (storage, ledger) = match self {
            Self::Cpu(cpu) => (ByteStorage::Host(vec![0; len]), &cpu.inner.ledger),
            Self::Cuda(gpu) => {
                let buffer = gpu.alloc(category, len);
                gpu.zero(buffer.pointer(), len);
                (ByteStorage::Cuda(buffer), gpu.ledger())
            }
        };
        Bytes::from_parts(storage, len, ledger.charge(category, len as u64))
    }

    /// Integers on the device.
    pub fn indices(&self, category: MemoryCategory, data: Vec<i32>) -> Indices {
        let (len, bytes) = (data.len(), size_of_val(data.as_slice()));
        match self {
            Self::Cpu(cpu) => {
                let charge = cpu.inner.ledger.charge(category, bytes as u64);
                Indices::from_parts(IndexStorage::Host(data), len, charge)
            }
            Self::Cuda(gpu) => {
                let buffer = gpu.alloc(category, bytes);
                gpu.upload(buffer.pointer(), &data);
                let charge = gpu.ledger().charge(category, bytes as u64);
                Indices::from_parts(IndexStorage::Cuda(buffer), len, charge)
            }
        }
    }
}

impl CpuDevice {
    /// Arithmetic of the engine.
    pub fn precision(&self) -> Precision {
        self.inner.precision
    }

    /// Threads in the pool.
    pub fn num_threads(&self) -> usize {
        self.inner.threads.current_num_threads()
    }

    /// Room for `len` values, and whether they are zero.
    fn buffer(&self, category: MemoryCategory, len: usize) -> (Vec<f32>, bool) {
        if is_pooled(category) { self.inner.pool.take(len) } else { (vec![0.0; len], true) }
    }

    fn tensor(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>) -> Tensor {
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        let charge = self.inner.ledger.charge(category, size_of_val(data.as_slice()) as u64);
        let storage = Storage::Host { data, pool: Arc::clone(&self.inner.pool) };
        Tensor::from_parts(shape, DType::F32, storage, charge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_booked_and_freed() {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let a = device.zeros(MemoryCategory::Weights, &[4, 8]);
        let b = device.empty(MemoryCategory::Workspace, &[16]);
        assert_eq!(device.memory().now_bytes, (32 + 16) * 4);
        drop((a, b));
        assert_eq!(device.memory().now_bytes, 0);
        assert_eq!(device.memory().peak_bytes, (32 + 16) * 4);
    }

    #[test]
    fn zeros_are_zero_even_when_the_buffer_was_used() {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let mut a = device.zeros(MemoryCategory::Workspace, &[16]);
        a.f32s_mut().fill(3.0);
        drop(a);
        assert!(device.zeros(MemoryCategory::Workspace, &[4, 4]).f32s().iter().all(|&x| x == 0.0));
    }

    #[test]
    fn without_a_gpu_the_reason_is_said() {
        match Device::cuda() {
            Ok(device) => assert!(device.describe().contains("sm_"), "{}", device.describe()),
            Err(error) => assert!(error.reason.len() > 10, "{error}"),
        }
    }
}
