//! Every micro-batch of a run in training order, for comparing with other tools.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use serde::Serialize;

use crate::base::error::Result;
use crate::data::loader::Cursor;
use crate::data::pack::PackedBatch;
use crate::session::config::RunConfig;
use crate::session::starter;
use crate::session::training_data::{self, Progress, TrainingData};

/// One line of the dump.
#[derive(Serialize)]
struct Line<'a> {
    /// 1-based step; `null` for a held-out batch.
    step: Option<u64>,
    /// 0-based place in the step, or among the held-out batches.
    micro_batch: usize,
    /// Whether it is a held-out batch.
    eval: bool,
    input_ids: &'a [i32],
    labels: &'a [i32],
    cu_seqlens: &'a [i32],
}

/// Writes the micro-batches of a run as JSON lines, exactly as the run would train them: first the held-out ones, then
/// step after step. Returns the number of steps, or `None` when `stop` was raised.
///
/// # Errors
/// As [`super::preview`], and when `out` cannot be written.
pub fn dump(config: &RunConfig, out: &mut dyn Write, progress: Progress<'_>, stop: &AtomicBool) -> Result<Option<u64>> {
    let config = starter::resolved(config)?;
    let builder = training_data::example_builder(&config)?;
    let Some(data) = TrainingData::read(&config, &builder, progress, stop)? else { return Ok(None) };
    for (micro_batch, batch) in data.eval_batches.iter().enumerate() {
        write_line(out, None, micro_batch, batch)?;
    }
    let total = data.plan.total_steps();
    let mut loader = data.plan.start(Cursor::default())?;
    let mut step = 0;
    while let Some(loaded) = loader.next_step()? {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        step += 1;
        progress("writing", step, total);
        for (micro_batch, batch) in loaded.batches.iter().enumerate() {
            write_line(out, Some(step), micro_batch, batch)?;
        }
    }
    Ok(Some(step))
}

fn write_line(out: &mut dyn Write, step: Option<u64>, micro_batch: usize, batch: &PackedBatch) -> Result<()> {
    let line = Line {
        step,
        micro_batch,
        eval: step.is_none(),
        input_ids: &batch.input_ids,
        labels: &batch.labels,
        cu_seqlens: &batch.cu_seqlens,
    };
    let written = serde_json::to_writer(&mut *out, &line).map_err(std::io::Error::from);
    written.and_then(|()| out.write_all(b"\n")).context("cannot write the dump")
}
