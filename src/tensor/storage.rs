//! Tensors: shaped memory on a device, booked under a category.

use std::sync::Arc;

use half::bf16;

use super::cuda::CudaBuffer;
use super::dtype::DType;
use super::memory::{Charge, MemoryCategory};
use super::pool::CpuPool;

/// Floating-point values in row-major order, owned, on one device.
///
/// On the CPU the values are `f32`, whatever the precision: under `Precision::Bf16` they are f32 values that bf16 can hold. On a GPU they are
/// what `dtype` says.
#[derive(Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    storage: Storage,
    charge: Charge,
}

#[derive(Debug)]
pub(super) enum Storage {
    Host { data: Vec<f32>, pool: Arc<CpuPool> },
    Cuda(CudaBuffer),
}

impl Tensor {
    /// Wraps memory that was just allocated for the product of `shape` values.
    pub(super) fn from_parts(shape: &[usize], dtype: DType, storage: Storage, charge: Charge) -> Self {
        Self { shape: shape.to_vec(), dtype, storage, charge }
    }

    /// Sizes of the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Format of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// What the memory is for.
    pub fn category(&self) -> MemoryCategory {
        self.charge.category()
    }

    /// The values of a CPU tensor. CPU forms of operations get no other kind.
    pub fn f32s(&self) -> &[f32] {
        match &self.storage {
            Storage::Host { data, .. } => data,
            Storage::Cuda(_) => unreachable!("a CPU form was given a GPU tensor"),
        }
    }

    /// The values of a CPU tensor, to change.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        match &mut self.storage {
            Storage::Host { data, .. } => data,
            Storage::Cuda(_) => unreachable!("a CPU form was given a GPU tensor"),
        }
    }

    /// Address of a GPU tensor. Launchers get no other kind.
    pub fn pointer(&self) -> u64 {
        match &self.storage {
            Storage::Host { .. } => unreachable!("a launcher was given a CPU tensor"),
            Storage::Cuda(buffer) => buffer.pointer(),
        }
    }

    /// A copy of the values on the host. From a GPU this waits for the device.
    pub fn to_vec(&self) -> Vec<f32> {
        match &self.storage {
            Storage::Host { data, .. } => data.clone(),
            Storage::Cuda(buffer) => match self.dtype {
                DType::F32 => buffer.device().download(buffer.pointer(), self.len()),
                DType::Bf16 => {
                    let bits: Vec<u16> = buffer.device().download(buffer.pointer(), self.len());
                    bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
                }
            },
        }
    }

    /// Replaces the values. `values.len()` must be the tensor's.
    pub fn set(&mut self, values: &[f32]) {
        assert_eq!(values.len(), self.len(), "values of another number");
        match &mut self.storage {
            Storage::Host { data, .. } => data.copy_from_slice(values),
            Storage::Cuda(buffer) => match self.dtype {
                DType::F32 => buffer.device().upload(buffer.pointer(), values),
                DType::Bf16 => {
                    let bits: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                    buffer.device().upload(buffer.pointer(), &bits);
                }
            },
        }
    }

    /// Sets every value to zero.
    pub fn fill_zero(&mut self) {
        let bytes = self.len() * self.dtype.num_bytes();
        match &mut self.storage {
            Storage::Host { data, .. } => data.fill(0.0),
            Storage::Cuda(buffer) => buffer.device().zero(buffer.pointer(), bytes),
        }
    }
}

/// Whether buffers of this category are used again: those that live for a block or a step.
pub(super) fn is_pooled(category: MemoryCategory) -> bool {
    matches!(category, MemoryCategory::Workspace | MemoryCategory::Activations)
}

impl Drop for Tensor {
    fn drop(&mut self) {
        let pooled = is_pooled(self.category());
        if let (true, Storage::Host { data, pool }) = (pooled, &mut self.storage) {
            pool.give_back(std::mem::take(data));
        }
    }
}

/// 32-bit integers on one device: ids, rows, positions.
#[derive(Debug)]
pub struct Indices {
    storage: IndexStorage,
    len: usize,
    _charge: Charge,
}

#[derive(Debug)]
pub(super) enum IndexStorage {
    Host(Vec<i32>),
    Cuda(CudaBuffer),
}

impl Indices {
    /// Wraps `len` values that were just allocated.
    pub(super) fn from_parts(storage: IndexStorage, len: usize, charge: Charge) -> Self {
        Self { storage, len, _charge: charge }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values on the CPU. CPU forms of operations get no other kind.
    pub fn i32s(&self) -> &[i32] {
        match &self.storage {
            IndexStorage::Host(data) => data,
            IndexStorage::Cuda(_) => unreachable!("a CPU form was given GPU indices"),
        }
    }

    /// Address on the GPU. Launchers get no other kind.
    pub fn pointer(&self) -> u64 {
        match &self.storage {
            IndexStorage::Host(_) => unreachable!("a launcher was given CPU indices"),
            IndexStorage::Cuda(buffer) => buffer.pointer(),
        }
    }
}
