//! Runs as plain data: configuration file, commands and events, run store, run loop, previews.

pub mod bench;
pub mod bench_ops;
pub mod bench_plan;
pub mod compare;
pub mod config;
pub mod estimate;
pub mod event;
mod event_sink;
pub mod handle;
pub mod inspect;
pub mod machine;
pub mod preview;
pub mod recent;
pub mod run_folder;
mod run_loop;
pub mod run_view;
pub mod runs;
pub mod runtime;
pub mod starter;
pub mod store;
pub mod trace;
pub mod training_data;

/// The tiny model that integration tests use, for unit tests.
#[cfg(test)]
#[path = "../../tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

pub use crate::data::options::{LayoutChoice, Overlong, TrainOn};
pub use crate::formats::peft::{EXPERT_PARAMETERS, expert_targets};
pub use crate::model::metadata::{CacheCounts, CacheEntry, MetadataPolicy};
pub use crate::tensor::memory::{CategoryBytes, MemoryCategory, MemoryReport};
pub use crate::tensor::phase::{LaneKind, Pass, Phase, PhaseTime, Span};
pub use crate::train::config::{
    Activations, ActivationsChoice, AttentionPath, Dequantized, DeviceChoice, MemoryConfig, MemoryPolicy, Metadata,
    MetadataBaseline, MethodConfig, MethodKind, OffloadPolicy, OptimizationsConfig, OptimizerConfig, Placement,
    PlacementChoice, Precision, Routing, RoutingBaseline, ScheduleKind, Switch, TrainConfig,
};
pub use crate::train::report::{CacheReport, Choice, CopyReport, EvalReport, MoeReport, Optimization, StepReport};
pub use crate::train::switches::Switches;
