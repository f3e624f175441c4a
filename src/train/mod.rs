//! Training: configuration, trainer, optimizer, schedule, evaluation, report.

pub mod config;
pub mod report;
