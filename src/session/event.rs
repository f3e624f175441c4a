//! What a run says and what it can be told: closed, serializable enums.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::train::report::{Choice, EvalReport, Optimization, StepReport};

/// What a run can be told while it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Save what was trained and end after the current micro-batch.
    Stop,
    /// Save what was trained and go on.
    SaveNow,
    /// Switch an optimization between two steps.
    Switch {
        /// Which one.
        optimization: Optimization,
        /// On or off.
        on: bool,
    },
}

/// How serious a log line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoteLevel {
    /// Something to know.
    Info,
    /// Something the user may want to change.
    Warning,
    /// Something that ended the run or lost something.
    Error,
}

/// Facts about a run, fixed when it starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// Name of the run.
    pub name: String,
    /// The run's folder.
    pub folder: PathBuf,
    /// Name of the model (folder or file name).
    pub model: String,
    /// One line on the method, for example `LoRA r16`.
    pub method: String,
    /// Device in words.
    pub device: String,
    /// Optimizer steps planned.
    pub total_steps: u64,
    /// Steps in one pass over the training data.
    pub steps_per_epoch: f64,
    /// Tokens in a pack.
    pub pack_len: usize,
    /// All parameters of the model, adapters not counted.
    pub num_parameters: u64,
    /// Parameters that train.
    pub num_trainable: u64,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Records that train.
    pub num_train_records: usize,
    /// Records held out.
    pub num_eval_records: usize,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All steps done.
    Completed,
    /// Stopped by the user; what was trained is saved.
    Stopped,
    /// Ended by an error, in words.
    Failed(String),
}

/// What a run says, in order. Stop 8 of the walk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum RunEvent {
    /// A stage before the first step, with its progress (bytes or records; `total` 0 when not known).
    Preparing {
        /// The stage in words: `reading the dataset`, `loading weights`.
        stage: String,
        /// Units done.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// Training begins.
    Started(RunInfo),
    /// One optimizer step.
    Step {
        /// The step as measured.
        report: Box<StepReport>,
        /// Passes over the training data so far.
        epoch: f64,
        /// Seconds since training began.
        elapsed_s: f64,
        /// Tokens of documents trained on so far.
        tokens_seen: u64,
        /// Seconds left, from tokens; `None` while unknown.
        eta_s: Option<f64>,
    },
    /// Which optimizations are on, and why: when training begins, and whenever that changes.
    Choices {
        /// First step that runs with them; 0 in runs that were stored before it was kept.
        #[serde(default)]
        step: u64,
        /// All of them.
        choices: Vec<Choice>,
    },
    /// A held-out evaluation.
    Eval(EvalReport),
    /// The run was told to stop; it saves and ends.
    Stopping,
    /// The adapter (or the model, for full fine-tuning) was written.
    Saved {
        /// Step it holds.
        step: u64,
        /// Where.
        path: PathBuf,
    },
    /// A log line.
    Note {
        /// How serious it is.
        level: NoteLevel,
        /// The line.
        text: String,
    },
    /// The run ended.
    Finished {
        /// How.
        outcome: Outcome,
        /// Steps done.
        steps: u64,
    },
}

/// An event with the time at which it happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimedEvent {
    /// Milliseconds since the Unix epoch.
    pub unix_ms: i64,
    /// The event.
    #[serde(flatten)]
    pub event: RunEvent,
}
