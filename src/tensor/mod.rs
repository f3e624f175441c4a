//! Devices, tensors, memory accounting by category, copy lanes and events, phase clock.

pub mod memory;
pub mod phase;
