//! Devices: where tensors live and operations run.

use std::sync::Arc;

use anyhow::Context as _;

use super::clock::PhaseClock;
use super::dtype::Precision;
use super::memory::{Ledger, MemoryCategory, MemoryReport};
use super::pool::CpuPool;
use super::storage::{Indices, Tensor, is_pooled};
use crate::base::error::{NoDevice, Result};

/// A device to train on. Cheap to clone: clones share memory accounting and clock.
#[derive(Debug, Clone)]
pub enum Device {
    /// The host's cores.
    Cpu(CpuDevice),
    /// An NVIDIA GPU.
    Cuda(CudaDevice),
}

/// The host's cores, used through one pool of named threads.
#[derive(Debug, Clone)]
pub struct CpuDevice {
    inner: Arc<CpuInner>,
}

/// An NVIDIA GPU. This build has no CUDA engine, so no value of this type exists.
#[derive(Debug, Clone, Copy)]
pub enum CudaDevice {}

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

    /// An NVIDIA GPU.
    ///
    /// # Errors
    /// Always, with the reason: this build has no CUDA engine.
    pub fn cuda() -> Result<Self, NoDevice> {
        Err(NoDevice { device: "cuda", reason: "this build of Tandem has no CUDA engine".into() })
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
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// Runs `work` with the device's threads: every model entry point does its work in here.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Self::Cpu(cpu) => cpu.inner.threads.install(work),
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// The clock that phases are booked on.
    pub fn clock(&self) -> &PhaseClock {
        match self {
            Self::Cpu(cpu) => &cpu.inner.clock,
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// Arithmetic of the device.
    pub fn precision(&self) -> Precision {
        match self {
            Self::Cpu(cpu) => cpu.precision(),
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// Memory by category.
    pub fn memory(&self) -> MemoryReport {
        match self {
            Self::Cpu(cpu) => cpu.inner.ledger.report(),
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// Gives freed buffers back to the system.
    pub fn trim(&self) {
        match self {
            Self::Cpu(cpu) => cpu.inner.pool.clear(),
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// A tensor whose values are not set: whoever asks for it writes every one. Debug builds fill it with NaN.
    pub fn empty(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        match self {
            Self::Cpu(cpu) => {
                let (mut data, _) = cpu.buffer(category, shape);
                if cfg!(debug_assertions) {
                    data.fill(f32::NAN);
                }
                cpu.tensor(category, shape, data)
            }
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// A tensor of zeros.
    pub fn zeros(&self, category: MemoryCategory, shape: &[usize]) -> Tensor {
        match self {
            Self::Cpu(cpu) => {
                let (mut data, is_zero) = cpu.buffer(category, shape);
                if !is_zero {
                    data.fill(0.0);
                }
                cpu.tensor(category, shape, data)
            }
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// A tensor with the given values. `data.len()` must be the product of `shape`.
    pub fn tensor(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>) -> Tensor {
        match self {
            Self::Cpu(cpu) => cpu.tensor(category, shape, data),
            Self::Cuda(cuda) => match *cuda {},
        }
    }

    /// Integers on the device.
    pub fn indices(&self, category: MemoryCategory, data: Vec<i32>) -> Indices {
        match self {
            Self::Cpu(cpu) => {
                let charge = cpu.inner.ledger.charge(category, size_of_val(data.as_slice()) as u64);
                Indices::from_parts(data, charge)
            }
            Self::Cuda(cuda) => match *cuda {},
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

    /// Room for a tensor, and whether its values are zero.
    fn buffer(&self, category: MemoryCategory, shape: &[usize]) -> (Vec<f32>, bool) {
        let len = shape.iter().product();
        if is_pooled(category) { self.inner.pool.take(len) } else { (vec![0.0; len], true) }
    }

    fn tensor(&self, category: MemoryCategory, shape: &[usize], data: Vec<f32>) -> Tensor {
        let charge = self.inner.ledger.charge(category, size_of_val(data.as_slice()) as u64);
        Tensor::from_parts(shape, data, Arc::clone(&self.inner.pool), charge)
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
    fn cuda_says_why_not() {
        let error = Device::cuda().unwrap_err();
        assert!(error.to_string().contains("no CUDA engine"), "{error}");
    }
}
