//! Devices, tensors, memory accounting by category, copy lanes and events, phase clock.

pub mod bytes;
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

pub use bytes::Bytes;
pub use device::{CpuDevice, Device, Gpu, Segment};
pub use dtype::{DType, Precision};
pub use memory::MemoryCategory;
pub use storage::{Indices, Tensor};
pub use view::{View, ViewMut};
