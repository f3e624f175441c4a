//! What a run will train on, looked at before it starts: counts with reasons, lengths, and packs as the model sees them.
//!
//! Everything goes through [`TrainingData`], the same code that a run uses, so the preview cannot drift apart from it.

mod dump;
mod probe;
mod view;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::config::RunConfig;
use super::starter;
use super::training_data::{self, Progress, TrainingData};
use crate::base::error::{BadRecord, Result};
use crate::base::units;
use crate::data::example::{Example, ExampleBuilder, IGNORE_INDEX};
use crate::data::options::{LayoutChoice, Overlong};
use crate::data::pack::PlannedBatch;

pub use self::dump::dump;
pub use self::probe::{Column, DataFacts, probe};
pub use self::view::{DocumentView, Histogram, PackView, TokenView};

/// Bars of the histogram.
const HISTOGRAM_BINS: usize = 48;
/// Records whose tokens are turned into text and back.
const ROUND_TRIPS: usize = 64;
/// Rows named for each reason.
const ROWS_NAMED: usize = 5;
/// Reasons told one by one; the rest is summed up.
const REASONS: usize = 6;

/// A number of records with what happened to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// What happened, in a few words.
    pub text: String,
    /// To how many records.
    pub count: usize,
    /// Whether they are lost to training: left out, or cut.
    pub is_loss: bool,
    /// The first of them: line and details.
    pub rows: Vec<(usize, String)>,
}

/// Something that must hold before training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What holds, in words.
    pub name: &'static str,
    /// Why it does not.
    pub failure: Option<String>,
}

/// A dataset as a run would train on it.
pub struct Preview {
    /// The dataset file.
    pub dataset: PathBuf,
    /// The layout, as found or as chosen.
    pub layout: LayoutChoice,
    /// Columns of the file.
    pub columns: Vec<String>,
    /// Rows read.
    pub num_rows: usize,
    /// Records that train.
    pub num_train: usize,
    /// Records held out.
    pub num_eval: usize,
    /// Rows left out, cut, split or held out, with reasons.
    pub reasons: Vec<Reason>,
    /// Tokens of one pass over the training data.
    pub num_tokens: u64,
    /// How many of them are trained.
    pub num_trained_tokens: u64,
    /// Share of the packs' room that documents fill, 0 to 1.
    pub fill: f64,
    /// Tokens in a pack.
    pub pack_len: usize,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Lengths of the documents that train, before any is cut.
    pub histogram: Histogram,
    /// What must hold.
    pub checks: Vec<Check>,
    /// Time it took.
    pub took: Duration,
    data: TrainingData,
    plan: Vec<PlannedBatch>,
    builder: ExampleBuilder,
}

impl Preview {
    /// Rows that neither train nor are held out.
    pub fn num_dropped(&self) -> usize {
        self.num_rows - self.num_train - self.num_eval
    }

    /// What a run would train on.
    pub(super) fn data(&self) -> &TrainingData {
        &self.data
    }

    /// Packs in one pass over the training data.
    pub fn num_packs(&self) -> usize {
        self.plan.len()
    }

    /// Pack `index` of the first pass, in training order.
    pub fn pack(&self, index: usize) -> Option<PackView> {
        let tokenizer = self.builder.tokenizer();
        let batch = self.plan.get(index)?.build(self.data.plan.examples(), tokenizer.pad_id());
        let ends = tokenizer.eos_ids();
        // Ids that came out of the tokenizer decode; an error would mean that they did not.
        let text_of = |ids: &[i32]| tokenizer.decode(ids, false).unwrap_or_default();
        Some(PackView::new(&batch, self.pack_len, &text_of, &|id| ends.contains(&id)))
    }
}

/// Looks at the data of a configuration; `None` when `stop` was raised.
///
/// # Errors
/// When the model's tokenizer, its template or the dataset cannot be used; the message says what to do.
pub fn preview(config: &RunConfig, progress: Progress<'_>, stop: &AtomicBool) -> Result<Option<Preview>> {
    let began = Instant::now();
    let config = starter::resolved(config)?;
    progress("reading the tokenizer", 0, 0);
    let builder = training_data::example_builder(&config)?;
    if stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let Some(data) = TrainingData::read(&config, &builder, progress, stop)? else { return Ok(None) };
    progress("packing", 0, 0);
    let plan = data.plan.epoch(0);
    let trained = |examples: &[Example]| -> u64 { examples.iter().map(|example| num_labels(example) as u64).sum() };
    let num_tokens = data.plan.tokens_per_epoch();
    let room = (plan.len() * config.packing.pack_len) as f64;
    let counts = data.plan.counts();
    let emptied = if config.packing.overlong == Overlong::Truncate { counts.num_unsupervised } else { 0 };
    let lost = counts.num_dropped + emptied;
    let lengths: Vec<usize> = data.documents.iter().map(|document| document.num_tokens).collect();
    Ok(Some(Preview {
        dataset: config.data.path.clone(),
        layout: data.layout,
        columns: data.columns.clone(),
        num_rows: data.num_train_records + data.num_eval_records + data.rejected.len(),
        num_train: data.num_train_records - lost,
        num_eval: data.num_eval_records,
        reasons: reasons(&data, &config),
        num_tokens,
        num_trained_tokens: trained(data.plan.examples()),
        fill: num_tokens as f64 / room,
        pack_len: config.packing.pack_len,
        total_steps: data.plan.total_steps(),
        histogram: Histogram::new(&lengths, HISTOGRAM_BINS),
        checks: checks(&data, &plan, &builder)?,
        took: began.elapsed(),
        plan,
        data,
        builder,
    }))
}

fn num_labels(example: &Example) -> usize {
    example.labels.iter().filter(|label| **label != IGNORE_INDEX).count()
}

/// What happened to the rows that do not train as they are, the most frequent first; held-out ones last.
fn reasons(data: &TrainingData, config: &RunConfig) -> Vec<Reason> {
    let mut reasons = grouped(&data.rejected);
    let pack_len = config.packing.pack_len;
    let longer = || data.documents.iter().filter(|document| document.num_tokens > pack_len);
    let overlong = longer().count();
    if overlong > 0 {
        let (verb, is_loss) = match config.packing.overlong {
            Overlong::Truncate => ("cut", true),
            Overlong::Split => ("split", false),
            Overlong::Drop => ("left out", true),
        };
        let rows = longer().take(ROWS_NAMED).map(|d| (d.line, format!("{} tokens", units::count(d.num_tokens as u64))));
        reasons.push(Reason {
            text: format!("longer than {} tokens, {verb}", units::count(pack_len as u64)),
            count: overlong,
            is_loss,
            rows: rows.collect(),
        });
    }
    if data.plan.counts().num_unsupervised > 0 {
        reasons.push(Reason {
            text: "nothing trained left after the cut".into(),
            count: data.plan.counts().num_unsupervised,
            is_loss: true,
            rows: Vec::new(),
        });
    }
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.count));
    if data.num_eval_records > 0 {
        let share = match config.data.eval_path {
            Some(_) => String::new(),
            None => format!(", {} %", percent(config.data.eval_fraction)),
        };
        reasons.push(Reason {
            text: format!("held out for eval{share}"),
            count: data.num_eval_records,
            is_loss: false,
            rows: Vec::new(),
        });
    }
    reasons
}

fn percent(fraction: f64) -> f64 {
    (fraction * 1e4).round() / 1e2
}

/// Rejected rows by reason. Reasons that differ in details only (a column number, a name in quotes) are one.
fn grouped(rejected: &[BadRecord]) -> Vec<Reason> {
    let mut groups: Vec<Reason> = Vec::new();
    for bad in rejected {
        let text = gist(&bad.reason);
        let known = groups.iter().position(|group| group.text == text);
        let group = match known {
            Some(group) => &mut groups[group],
            None if groups.len() < REASONS => {
                groups.push(Reason { text, count: 0, is_loss: true, rows: Vec::new() });
                let last = groups.len() - 1;
                &mut groups[last]
            }
            None => {
                let last = groups.len() - 1;
                groups[last].text = "other reasons".into();
                &mut groups[last]
            }
        };
        group.count += 1;
        if group.rows.len() < ROWS_NAMED {
            group.rows.push((bad.line, bad.reason.clone()));
        }
    }
    groups
}

/// A reason without its details: up to the first colon, and without column numbers.
fn gist(reason: &str) -> String {
    let head = reason.split(": ").next().unwrap_or(reason);
    let head = head.split(" at column ").next().unwrap_or(head);
    head.trim_end_matches(':').to_owned()
}

fn checks(data: &TrainingData, plan: &[PlannedBatch], builder: &ExampleBuilder) -> Result<Vec<Check>> {
    let unended: Vec<usize> = data.documents.iter().filter(|document| !document.ends).map(|d| d.line).collect();
    let examples = data.plan.examples();
    let mut masked = 0;
    for batch in plan {
        masked += batch.documents.iter().filter(|d| num_labels(&examples[**d as usize]) == 0).count();
    }
    let step = (examples.len() / ROUND_TRIPS).max(1);
    let mut changed = 0;
    for example in examples.iter().step_by(step) {
        let text = builder.tokenizer().decode(&example.input_ids, false)?;
        changed += usize::from(builder.tokenizer().encode(&text, false)? != example.input_ids);
    }
    let lines = |lines: &[usize]| {
        let shown: Vec<String> = lines.iter().take(ROWS_NAMED).map(usize::to_string).collect();
        shown.join(", ")
    };
    Ok(vec![
        Check {
            name: "every record ends with the end token",
            failure: (!unended.is_empty()).then(|| {
                format!(
                    "{} records do not end with a trained end token (lines {}): the model may not learn to stop",
                    unended.len(),
                    lines(&unended)
                )
            }),
        },
        Check {
            name: "no record fully masked",
            failure: (masked > 0).then(|| format!("{masked} documents have no trained token")),
        },
        Check {
            name: "template round-trips",
            failure: (changed > 0).then(|| {
                format!(
                    "{changed} of {} records do not give the same tokens when decoded and encoded again",
                    examples.iter().step_by(step).len()
                )
            }),
        },
    ])
}

#[cfg(test)]
mod tests;
