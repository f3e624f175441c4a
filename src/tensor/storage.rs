//! Tensors: shaped memory on a device, booked under a category.

use std::sync::Arc;

use half::bf16;
use rayon::prelude::*;

use super::cuda::{CudaBuffer, Pitched};
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

    /// The memory of a GPU tensor under a second name that does not own it and is not booked. Whoever has it uses it only while the memory holds
    /// what was meant: between two recorded graphs, under [`HeldPass`](super::cuda::HeldPass).
    pub fn alias(&self) -> Self {
        match &self.storage {
            Storage::Host { .. } => unreachable!("only the memory of recorded graphs has a second name"),
            Storage::Cuda(buffer) => {
                let device = buffer.device();
                let charge = device.ledger().charge(self.category(), 0);
                Self::from_parts(&self.shape, self.dtype, Storage::Cuda(device.alias(buffer)), charge)
            }
        }
    }

    /// Whether it lies in host memory, which the GPU reaches over the bus.
    pub fn is_mapped(&self) -> bool {
        matches!(&self.storage, Storage::Cuda(buffer) if buffer.is_mapped())
    }

    /// A copy of the values on the host. From a GPU this waits for the device.
    pub fn to_vec(&self) -> Vec<f32> {
        self.read_rows(0, 1, self.len(), self.len())
    }

    /// Replaces the values. `values.len()` must be the tensor's.
    pub fn set(&mut self, values: &[f32]) {
        let len = self.len();
        self.write_rows(0, 1, len, len, values);
    }

    /// A copy of `rows` rows of `cols` values, `stride` apart, from value `offset` on.
    pub(super) fn read_rows(&self, offset: usize, rows: usize, cols: usize, stride: usize) -> Vec<f32> {
        match &self.storage {
            Storage::Host { data, .. } => {
                let mut values = Vec::with_capacity(rows * cols);
                (0..rows).for_each(|row| values.extend_from_slice(&data[offset + row * stride..][..cols]));
                values
            }
            Storage::Cuda(buffer) => {
                let bytes = self.dtype.num_bytes();
                let pitched = Pitched { rows, row_bytes: cols * bytes, pitch: stride * bytes };
                match self.dtype {
                    DType::F32 => buffer.read(offset * bytes, pitched),
                    DType::Bf16 => {
                        let bits: Vec<u16> = buffer.read(offset * bytes, pitched);
                        bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
                    }
                }
            }
        }
    }

    /// Replaces `rows` rows of `cols` values, `stride` apart, from value `offset` on.
    pub(super) fn write_rows(&mut self, offset: usize, rows: usize, cols: usize, stride: usize, values: &[f32]) {
        assert_eq!(values.len(), rows * cols, "values of another number");
        match &mut self.storage {
            Storage::Host { data, .. } => {
                for (row, values) in values.chunks_exact(cols.max(1)).enumerate() {
                    data[offset + row * stride..][..cols].copy_from_slice(values);
                }
            }
            Storage::Cuda(buffer) => {
                let bytes = self.dtype.num_bytes();
                let pitched = Pitched { rows, row_bytes: cols * bytes, pitch: stride * bytes };
                match self.dtype {
                    DType::F32 => buffer.write(offset * bytes, pitched, values),
                    DType::Bf16 => {
                        let bits: Vec<u16> = values.par_iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                        buffer.write(offset * bytes, pitched, &bits);
                    }
                }
            }
        }
    }

    /// As [`Self::write_rows`], from bf16 as files hold it: two little-endian bytes a value. A device that keeps bf16 gets them as they are.
    pub(super) fn write_bf16_rows(&mut self, offset: usize, rows: usize, cols: usize, stride: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), 2 * rows * cols, "values of another number");
        match &self.storage {
            Storage::Cuda(buffer) if self.dtype == DType::Bf16 => {
                let pitched = Pitched { rows, row_bytes: 2 * cols, pitch: 2 * stride };
                buffer.write(2 * offset, pitched, bytes);
            }
            _ => {
                let value = |bytes: &[u8; 2]| bf16::from_le_bytes(*bytes).to_f32();
                let values: Vec<f32> = bytes.as_chunks().0.par_iter().map(value).collect();
                self.write_rows(offset, rows, cols, stride, &values);
            }
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

    /// A copy of the values on the host. From a GPU this waits for the device.
    pub fn to_vec(&self) -> Vec<i32> {
        match &self.storage {
            IndexStorage::Host(data) => data.clone(),
            IndexStorage::Cuda(buffer) => buffer.device().download(buffer.pointer(), self.len),
        }
    }

    /// Takes over the values of `from`, as many, on the same device; on a GPU in stream order, and, as in an upload, no launch is counted.
    pub fn copy_from(&mut self, from: &Self) {
        assert_eq!(self.len, from.len, "integers of another number");
        match (&mut self.storage, &from.storage) {
            (IndexStorage::Host(to), IndexStorage::Host(from)) => to.copy_from_slice(from),
            (IndexStorage::Cuda(to), IndexStorage::Cuda(from)) => {
                to.device().bring(from.pointer(), to.pointer(), self.len * size_of::<i32>());
            }
            _ => unreachable!("a copy between devices"),
        }
    }

    /// The values on the CPU. CPU forms of operations get no other kind.
    pub fn i32s(&self) -> &[i32] {
        match &self.storage {
            IndexStorage::Host(data) => data,
            IndexStorage::Cuda(_) => unreachable!("a CPU form was given GPU indices"),
        }
    }

    /// The values on the CPU, to change.
    pub fn i32s_mut(&mut self) -> &mut [i32] {
        match &mut self.storage {
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
