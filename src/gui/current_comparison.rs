//! The comparisons that the Compare screen shows: what they found so far, and the thread that makes them.

use std::time::Duration;

use super::drain::{Drained, drain};
use crate::base::error::Result;
use crate::session::compare::{self, CompareEvent, CompareHandle, CompareOptions, CompareReport, Variation};
use crate::session::config::RunConfig;
use crate::session::event::RunInfo;
use crate::session::{Optimization, run_folder};

/// Where comparisons stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stage {
    /// Before the first pair: the stage in words, with units done and in all (`total` 0 when not known).
    Preparing {
        /// The stage.
        stage: String,
        /// Units done.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// Pairs are run.
    Pairs {
        /// Of which comparison.
        variation: Variation,
        /// Pairs done.
        done: usize,
        /// Pairs in all.
        pairs: usize,
    },
}

/// What comparisons said so far.
#[derive(Debug, Clone, PartialEq)]
pub struct Findings {
    /// Name of the model.
    pub model: String,
    /// Tokens in a pack.
    pub pack_len: usize,
    /// Where the one that runs stands.
    pub stage: Stage,
    /// Those that are done, in order.
    pub done: Vec<CompareReport>,
    /// What is known of the one that runs, after its first pair.
    pub so_far: Option<Box<CompareReport>>,
    /// Lines to know.
    pub notes: Vec<String>,
    /// The error that ended them, in words.
    pub failure: Option<String>,
}

impl Findings {
    /// Nothing yet, of comparisons on the model and the data of `config`.
    pub fn new(config: &RunConfig) -> Self {
        Self {
            model: run_folder::short_name(&config.model.path),
            pack_len: config.packing.pack_len,
            stage: Stage::Preparing { stage: "starting".into(), done: 0, total: 0 },
            done: Vec::new(),
            so_far: None,
            notes: Vec::new(),
            failure: None,
        }
    }

    /// Takes in one event.
    pub fn apply(&mut self, event: CompareEvent) {
        match event {
            CompareEvent::Preparing { stage, done, total } => self.stage = Stage::Preparing { stage, done, total },
            CompareEvent::Progress { variation, done, pairs, report } => {
                self.stage = Stage::Pairs { variation, done, pairs };
                self.so_far = report;
            }
            CompareEvent::Finished { report } => {
                self.so_far = None;
                self.done.push(*report);
            }
            CompareEvent::Note { text } => self.notes.push(text),
            CompareEvent::Failed { text } => self.failure = Some(text),
        }
    }

    /// Those that are done, then the one that runs, once a pair of it is known.
    pub fn reports(&self) -> impl Iterator<Item = &CompareReport> {
        self.done.iter().chain(self.so_far.as_deref())
    }

    /// What single optimizations took off a step of such a run, in milliseconds: measured alone, on the same model and device with as long packs.
    pub fn paired(&self, info: &RunInfo) -> Vec<(Optimization, f64)> {
        let fits = |report: &&CompareReport| {
            report.model == info.model && report.device == info.device && self.pack_len == info.pack_len
        };
        let of = |report: &CompareReport| Some((optimization(report.variation)?, report.pair_differences.mean_ms));
        self.done.iter().filter(fits).filter_map(of).collect()
    }
}

/// The optimization that a comparison varies alone.
fn optimization(variation: Variation) -> Option<Optimization> {
    match variation {
        Variation::Cache => Some(Optimization::MetadataCache),
        Variation::Buffers => Some(Optimization::DoubleBuffer),
        Variation::Offload => Some(Optimization::ActivationOffload),
        Variation::Keep => Some(Optimization::KeepActivations),
        Variation::Attention => Some(Optimization::VarlenAttention),
        Variation::Graphs => Some(Optimization::CudaGraphs),
        Variation::Routing => Some(Optimization::GroupedRouting),
        Variation::CacheFused | Variation::RoutingSorted | Variation::All => None,
    }
}

/// Comparisons that run or ran in this window.
pub struct CurrentComparison {
    /// What they found.
    pub found: Findings,
    handle: Option<CompareHandle>,
    stopping: bool,
}

impl CurrentComparison {
    /// Starts comparisons; `ctx` is asked for a repaint when events come, at most ten times a second.
    ///
    /// # Errors
    /// As [`compare::start`].
    pub fn start(config: RunConfig, options: CompareOptions, ctx: &egui::Context) -> Result<Self> {
        let ctx = ctx.clone();
        let waker = Box::new(move || ctx.request_repaint_after(super::app::REPAINT_EVERY));
        let found = Findings::new(&config);
        let handle = compare::start(config, options, Some(waker))?;
        Ok(Self { found, handle: Some(handle), stopping: false })
    }

    /// Comparisons that ended before.
    pub fn ended(found: Findings) -> Self {
        Self { found, handle: None, stopping: false }
    }

    /// Takes in the events that have come, for at most `budget`. Returns whether there were any.
    pub fn drain(&mut self, budget: Duration) -> bool {
        let Some(handle) = &self.handle else { return false };
        let Drained { changed, ended } =
            drain(budget, handle.is_finished(), |max| handle.drain(max), |event| self.found.apply(event));
        if ended {
            self.handle = None;
        }
        changed
    }

    /// Whether it runs.
    pub fn is_running(&self) -> bool {
        self.handle.is_some()
    }

    /// Whether it was told to stop and has not ended yet.
    pub fn is_stopping(&self) -> bool {
        self.stopping && self.is_running()
    }

    /// Ends it after the current micro-batch; the pairs that were done are its result.
    pub fn stop(&mut self) {
        if let Some(handle) = &self.handle {
            handle.stop();
            self.stopping = true;
        }
    }
}
