//! Training: configuration, memory plan, trainer, optimizer, schedule, evaluation, report.

pub mod batch;
pub mod config;
pub mod optimizer;
pub mod plan;
pub mod report;
pub mod schedule;
pub mod snapshot;
pub mod state_place;
pub mod switches;
pub mod trainer;
