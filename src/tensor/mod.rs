//! Devices, tensors, memory accounting by category, copy lanes and events, phase clock.

pub mod clock;
pub mod cuda;
pub mod device;
pub mod dtype;
pub mod lane;
pub mod memory;
pub mod offload;
pub mod overlap;
pub mod phase;
pub mod view;

mod pool;
mod storage;

pub use device::{CpuDevice, Device, Gpu, Segment};
pub use dtype::{DType, Precision};
pub use memory::MemoryCategory;
pub use storage::{Bytes, Indices, Tensor};
pub use view::{View, ViewMut};
