//! From a run configuration to the documents that train and those held out: what a run, the preview and the dump share.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, ensure};

use super::config::RunConfig;
use super::event::NoteLevel;
use crate::base::error::{BadRecord, Result};
use crate::base::units;
use crate::data::dataset::{Dataset, DatasetOptions, Record, split};
use crate::data::example::{Built, Example, ExampleBuilder, IGNORE_INDEX};
use crate::data::loader::{LoaderOptions, LoaderPlan, RunLength};
use crate::data::options::LayoutChoice;
use crate::data::pack::{self, PackCounts, PackOptions, PackedBatch};
use crate::data::tokenizer::Tokenizer;

/// Rejected rows that are told one by one.
const TOLD_REJECTIONS: usize = 3;

/// Called, from any thread, with a stage in words, units done and units in all (0 when not known).
pub type Progress<'a> = &'a (dyn Fn(&str, u64, u64) + Sync);

/// Documents ready to be packed, and what happened on the way to them.
#[derive(Debug, Clone)]
pub struct TrainingData {
    /// The documents that train, and which of them share a step.
    pub plan: LoaderPlan,
    /// The held-out documents as batches.
    pub eval_batches: Vec<PackedBatch>,
    /// The dataset's layout, as found or as chosen.
    pub layout: LayoutChoice,
    /// The dataset's columns.
    pub columns: Vec<String>,
    /// Documents that train as they were before any was cut, in the order of the file.
    pub documents: Vec<Document>,
    /// Rows that give no document, with reasons.
    pub rejected: Vec<BadRecord>,
    /// Records that train.
    pub num_train_records: usize,
    /// Records held out.
    pub num_eval_records: usize,
    /// Tokens of the longest document that trains.
    pub longest: usize,
    /// The largest token id of all documents.
    pub max_token_id: i32,
    /// What the user should know.
    pub notes: Vec<(NoteLevel, String)>,
}

/// A document that trains, as it was before any was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Document {
    /// 1-based line of its row.
    pub line: usize,
    /// Its tokens.
    pub num_tokens: usize,
    /// Whether it ends with an end token that is trained.
    pub ends: bool,
}

impl TrainingData {
    /// Reads, splits, renders and tokenizes the data of a configuration whose `starter` words are resolved; `None` when
    /// `stop` was raised on the way.
    ///
    /// # Errors
    /// When a file cannot be read, has no usable row, or no row has a token that is trained.
    pub fn read(
        config: &RunConfig,
        builder: &ExampleBuilder,
        progress: Progress<'_>,
        stop: &AtomicBool,
    ) -> Result<Option<Self>> {
        let mut notes = Vec::new();
        progress("reading the dataset", 0, 0);
        let data = &config.data;
        let Some(dataset) = open(&data.path, config, stop)? else { return Ok(None) };
        tell_rejected(&dataset.rejected, &mut notes);
        let (layout, columns) = (dataset.layout, dataset.columns);
        let mut rejected = dataset.rejected;
        let (train_records, eval_records) = match &data.eval_path {
            Some(path) => {
                let eval = open(path, config, stop).context("`eval_path` in [data]")?;
                let Some(eval) = eval else { return Ok(None) };
                tell_rejected(&eval.rejected, &mut notes);
                rejected.extend(eval.rejected);
                (dataset.records, eval.records)
            }
            None => split(dataset.records, data.eval_fraction, config.seed)?,
        };
        let Some(train) = tokenize(builder, &train_records, "tokenizing", progress, stop) else { return Ok(None) };
        let held_out = "tokenizing held-out records";
        let Some(eval) = tokenize(builder, &eval_records, held_out, progress, stop) else { return Ok(None) };
        tell_rejected(&train.rejected, &mut notes);
        tell_rejected(&eval.rejected, &mut notes);
        let (num_train_records, num_eval_records) = (train.examples.len(), eval.examples.len());
        ensure!(num_train_records > 0, "{}", nothing_to_train(&data.path, &notes));
        let documents = documents(builder, &train_records, &train);
        rejected.extend(train.rejected);
        rejected.extend(eval.rejected);
        tell_end(&documents, &mut notes);
        let max_token_id = max_token_id(train.examples.iter().chain(&eval.examples));

        let options = loader_options(config, builder);
        let plan = LoaderPlan::new(train.examples, options)?;
        tell_overlong("documents that train", &plan.counts(), &options.pack, &mut notes);
        let (eval, eval_counts) = pack::fit(eval.examples, &options.pack)?;
        tell_overlong("held-out documents", &eval_counts, &options.pack, &mut notes);
        let eval_batches = pack::plan(&pack::lengths(&eval), &options.pack, config.seed, 0);
        Ok(Some(Self {
            eval_batches: eval_batches.iter().map(|batch| batch.build(&eval, options.pack.pad_id)).collect(),
            layout,
            columns,
            documents,
            rejected,
            num_train_records,
            num_eval_records,
            longest: plan.examples().iter().map(|example| example.input_ids.len()).max().unwrap_or(0),
            max_token_id,
            plan,
            notes,
        }))
    }
}

/// How a configuration turns documents into steps.
fn loader_options(config: &RunConfig, builder: &ExampleBuilder) -> LoaderOptions {
    LoaderOptions {
        pack: PackOptions {
            packing: config.packing.enabled,
            pack_len: config.packing.pack_len,
            overlong: config.packing.overlong,
            pad_id: builder.tokenizer().pad_id(),
        },
        grad_accum_steps: config.train.grad_accum_steps,
        seed: config.seed,
        length: match config.train.max_steps {
            0 => RunLength::Epochs(config.train.epochs),
            steps => RunLength::Steps(steps),
        },
    }
}

/// What turns records into examples, for the model and the choices of a configuration.
///
/// # Errors
/// When the model's tokenizer or the chat template cannot be read.
pub fn example_builder(config: &RunConfig) -> Result<ExampleBuilder> {
    let tokenizer = Tokenizer::open(&config.model.path)?;
    ExampleBuilder::for_model(tokenizer, config.model.chat_template.as_deref(), config.data.train_on)
}

fn open(path: &Path, config: &RunConfig, stop: &AtomicBool) -> Result<Option<Dataset>> {
    let data = &config.data;
    let options = DatasetOptions {
        layout: data.layout,
        prompt: data.prompt.clone(),
        completion: data.completion.clone(),
        system: data.system.clone(),
        max_records: data.max_records,
    };
    Dataset::open_unless_stopped(path, &options, stop)
}

fn tokenize(
    builder: &ExampleBuilder,
    records: &[Record],
    stage: &str,
    progress: Progress<'_>,
    stop: &AtomicBool,
) -> Option<Built> {
    let total = records.len() as u64;
    if total > 0 {
        progress(stage, 0, total);
    }
    builder.build_all(records, &|done| progress(stage, done as u64, total), stop)
}

fn max_token_id<'a>(examples: impl Iterator<Item = &'a Example>) -> i32 {
    examples.flat_map(|example| &example.input_ids).copied().max().unwrap_or(0)
}

fn tell_rejected(rejected: &[BadRecord], notes: &mut Vec<(NoteLevel, String)>) {
    if rejected.is_empty() {
        return;
    }
    let mut text = format!("{} rows are left out: ", units::count(rejected.len() as u64));
    let told: Vec<String> = rejected.iter().take(TOLD_REJECTIONS).map(ToString::to_string).collect();
    text += &told.join("; ");
    if rejected.len() > TOLD_REJECTIONS {
        text += &format!("; and {} more", units::count((rejected.len() - TOLD_REJECTIONS) as u64));
    }
    notes.push((NoteLevel::Warning, text));
}

/// Why no record trains.
fn nothing_to_train(path: &Path, notes: &[(NoteLevel, String)]) -> String {
    let mut text = format!(
        "{}: no record has a token that is trained; check `layout` and `train_on` in [data] and the chat template",
        path.display()
    );
    for (_, note) in notes {
        text += &format!("\n{note}");
    }
    text
}

/// The documents of a training set before any is cut.
fn documents(builder: &ExampleBuilder, records: &[Record], built: &Built) -> Vec<Document> {
    let ends = builder.tokenizer().eos_ids();
    let rejected: HashSet<(&Path, usize)> = built.rejected.iter().map(|bad| (bad.path.as_path(), bad.line)).collect();
    let kept = records.iter().filter(|record| !rejected.contains(&(&*record.path, record.line)));
    let document = |(record, example): (&Record, &Example)| Document {
        line: record.line,
        num_tokens: example.input_ids.len(),
        ends: ends_trained(example, &ends),
    };
    kept.zip(&built.examples).map(document).collect()
}

/// Whether the last trained token, or one of the two before it (a template may write a line break after the end), is
/// one that means the end.
fn ends_trained(example: &Example, ends: &[i32]) -> bool {
    let trained = example.labels.iter().rev().filter(|label| **label != IGNORE_INDEX);
    trained.take(3).any(|label| ends.contains(label))
}

/// Tells when no answer ends with an end token that is trained: the model would not learn to stop.
fn tell_end(documents: &[Document], notes: &mut Vec<(NoteLevel, String)>) {
    if !documents.iter().any(|document| document.ends) {
        let text = "no answer ends with a token that means the end, so the model will not learn to stop; \
                    check the chat template";
        notes.push((NoteLevel::Warning, text.into()));
    }
}

fn tell_overlong(what: &str, counts: &PackCounts, options: &PackOptions, notes: &mut Vec<(NoteLevel, String)>) {
    if counts.num_overlong == 0 {
        return;
    }
    let count = |n: usize| units::count(n as u64);
    let mut parts = Vec::new();
    for (n, verb) in [
        (counts.num_truncated, "were cut"),
        (counts.num_split, "were cut into pieces"),
        (counts.num_dropped, "were left out"),
        (counts.num_unsupervised, "documents or pieces had nothing left to train and were left out"),
    ] {
        if n > 0 {
            parts.push(format!("{} {verb}", count(n)));
        }
    }
    let text = format!(
        "{} of {} {what} are longer than pack_len ({} tokens): {}; {} tokens are not used",
        count(counts.num_overlong),
        count(counts.num_documents),
        count(options.pack_len),
        parts.join(", "),
        count(counts.num_lost_tokens)
    );
    notes.push((NoteLevel::Warning, text));
}
