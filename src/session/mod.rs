//! Runs as plain data: configuration file, commands and events, run store, run loop, previews.

pub mod config;
pub mod event;
pub mod machine;
pub mod recent;
pub mod runtime;
pub mod starter;

pub use crate::data::options::{LayoutChoice, Overlong, TrainOn};
pub use crate::tensor::memory::{CategoryBytes, MemoryCategory, MemoryReport};
pub use crate::tensor::phase::{LaneKind, Pass, Phase, PhaseTime, Span};
pub use crate::train::config::{
    Activations, DeviceChoice, MethodConfig, MethodKind, OptimizerConfig, Precision, ScheduleKind, TrainConfig,
};
pub use crate::train::report::{EvalReport, StepReport};
