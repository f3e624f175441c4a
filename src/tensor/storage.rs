//! Tensors: shaped memory on a device, booked under a category.

use std::sync::Arc;

use super::memory::{Charge, MemoryCategory};
use super::pool::CpuPool;

/// Floating-point values in row-major order, owned, on one device.
///
/// On the CPU the values are `f32`, whatever the precision: under `Precision::Bf16` they are f32 values that bf16 can hold.
#[derive(Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
    pool: Arc<CpuPool>,
    charge: Charge,
}

impl Tensor {
    /// Wraps values that were just allocated. `data.len()` is the product of `shape`.
    pub(super) fn from_parts(shape: &[usize], data: Vec<f32>, pool: Arc<CpuPool>, charge: Charge) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), data.len());
        Self { shape: shape.to_vec(), data, pool, charge }
    }

    /// Sizes of the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
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

    /// The values, on the CPU.
    pub fn f32s(&self) -> &[f32] {
        &self.data
    }

    /// The values, on the CPU.
    pub fn f32s_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

/// Whether buffers of this category live for a block or a step only, and are used again after it.
pub(super) fn is_pooled(category: MemoryCategory) -> bool {
    matches!(category, MemoryCategory::Workspace | MemoryCategory::Activations)
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if is_pooled(self.category()) {
            self.pool.give_back(std::mem::take(&mut self.data));
        }
    }
}

/// 32-bit integers on one device: ids, rows, positions.
#[derive(Debug)]
pub struct Indices {
    data: Vec<i32>,
    _charge: Charge,
}

impl Indices {
    /// Wraps values that were just allocated.
    pub(super) fn from_parts(data: Vec<i32>, charge: Charge) -> Self {
        Self { data, _charge: charge }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// The values, on the CPU.
    pub fn i32s(&self) -> &[i32] {
        &self.data
    }
}
