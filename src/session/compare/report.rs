//! What a paired comparison found, and what it says on the way: plain data for the text, the HTML file and the window.

use std::str::FromStr;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::base::error::Result;
use crate::tensor::phase::PhaseTime;
use crate::train::switches::Switches;

/// What differs between the two arms: one optimization on against off, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variation {
    /// Metadata cached against built anew by every layer, as published.
    Cache,
    /// Metadata cached against built anew in few operations.
    CacheFused,
    /// Offloaded activations through two device buffers against one.
    Buffers,
    /// Inputs of blocks in host memory against on the device.
    Offload,
    /// Everything kept for the backward pass against computed again.
    Keep,
    /// Attention that visits only what documents let a token see against a dense mask.
    Attention,
    /// Tokens routed to experts on the device alone against a search and a read for each expert, as published.
    Routing,
    /// Tokens sorted by expert with one read for all experts, the published improvement, against the same.
    RoutingSorted,
    /// Passes recorded as CUDA graphs against queued launch by launch.
    Graphs,
    /// Every optimization that can be on against every one off.
    All,
}

impl Variation {
    /// All, in the order in which they are offered.
    pub const ALL: [Self; 10] = [
        Self::Cache,
        Self::CacheFused,
        Self::Buffers,
        Self::Offload,
        Self::Keep,
        Self::Attention,
        Self::Routing,
        Self::RoutingSorted,
        Self::Graphs,
        Self::All,
    ];

    /// The word of `--vary`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Cache => "cache",
            Self::CacheFused => "cache-fused",
            Self::Buffers => "buffers",
            Self::Offload => "offload",
            Self::Keep => "keep",
            Self::Attention => "attention",
            Self::Routing => "routing",
            Self::RoutingSorted => "routing-sorted",
            Self::Graphs => "graphs",
            Self::All => "all",
        }
    }

    /// The name shown to people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cache => "Packing metadata cache",
            Self::CacheFused => "Packing metadata cache, fused rebuild",
            Self::Buffers => "Overlapped copies",
            Self::Offload => "Activation offload",
            Self::Keep => "Keep instead of recompute",
            Self::Attention => "Variable-length attention",
            Self::Routing => "Grouped MoE routing",
            Self::RoutingSorted => "Sorted MoE routing",
            Self::Graphs => "CUDA graphs",
            Self::All => "All optimizations",
        }
    }

    /// Whether it needs a model with experts.
    pub fn needs_experts(self) -> bool {
        matches!(self, Self::Routing | Self::RoutingSorted)
    }
}

impl FromStr for Variation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|variation| variation.word() == text);
        found.ok_or_else(|| format!("`{text}` is none of {}", words()))
    }
}

/// The words of all variations.
fn words() -> String {
    Variation::ALL.map(Variation::word).join(", ")
}

/// One of the two sides of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// Short label: `A on`, `B off`.
    pub label: String,
    /// What it does, in a few words: `one build for each pack and window`.
    pub description: String,
    /// How everything is switched in it.
    pub switches: Switches,
}

/// Which direction of a figure is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Less is better.
    Lower,
    /// More is better.
    Higher,
    /// Neither: the arms should agree.
    Neither,
}

/// What a difference is for the one who looks at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The optimization is better here.
    Gain,
    /// It costs something here.
    Cost,
    /// No difference, none that can be told from noise, or one that is neither good nor bad.
    None,
}

/// A row of the table of differences: the means of both arms over all counted steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// What is measured: `Step`, `Peak device memory`.
    pub name: String,
    /// Its unit: `ms`, `GiB`, `tokens/s`, `%`, or nothing.
    pub unit: String,
    /// Decimals that are worth showing.
    pub decimals: usize,
    /// Value of arm A; `None` when it was not measured.
    pub a: Option<f64>,
    /// Value of arm B; `None` when it was not measured.
    pub b: Option<f64>,
    /// A − B; of times the mean of the pairs' differences. `None` unless both were measured.
    pub difference: Option<f64>,
    /// 95 % interval of `difference`, from the pairs. `None` for what is exact, and with fewer than two pairs.
    pub interval: Option<[f64; 2]>,
    /// Whether every step gives the same value, so that there is no interval to tell.
    pub exact: bool,
    /// A − B in percent of B; `None` where there is no ratio.
    pub percent: Option<f64>,
    /// Which direction is good.
    pub better: Better,
}

impl Difference {
    /// Gain or cost, where the difference can be told from noise.
    pub fn effect(&self) -> Effect {
        let known = match (self.interval, self.difference) {
            (Some([low, high]), Some(difference)) if low > 0.0 || high < 0.0 => difference,
            (None, Some(difference)) if self.exact => difference,
            _ => 0.0,
        };
        match (self.better, known) {
            (Better::Neither, _) => Effect::None,
            (_, 0.0) => Effect::None,
            (Better::Lower, known) if known < 0.0 => Effect::Gain,
            (Better::Higher, known) if known > 0.0 => Effect::Gain,
            _ => Effect::Cost,
        }
    }
}

/// Every pair of adjacent blocks: mean step of A minus mean step of B.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PairDifferences {
    /// One value a pair, in the order in which they ran, in milliseconds.
    pub ms: Vec<f64>,
    /// Their mean.
    pub mean_ms: f64,
    /// Its 95 % interval (Student's t); `None` with fewer than two pairs.
    pub interval_ms: Option<[f64; 2]>,
}

/// What a model says about a step beside what was measured; negative is time saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The optimization.
    pub name: String,
    /// The model in a formula: `−(builds avoided)·s`.
    pub formula: String,
    /// A − B by the model, in milliseconds; `None` where there is no model, or it lacks a quantity.
    pub predicted_ms: Option<f64>,
    /// A − B as measured, in milliseconds; `None` when it was not measured on its own.
    pub measured_ms: Option<f64>,
    /// Half the width of the 95 % interval of `measured_ms`.
    pub half_interval_ms: Option<f64>,
    /// Steps a second of A over those of B, minus one, in percent.
    pub gain_percent: Option<f64>,
    /// What was published, with model and machine.
    pub published: Option<String>,
    /// Why the two differ, or what is missing.
    pub why: String,
}

/// The run's own numbers in the models; `None` is not measured.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Quantities {
    /// L: blocks of the model.
    pub num_blocks: usize,
    /// Micro-batches in a step, on average.
    pub num_micro_batches: f64,
    /// L of the copies: blocks whose inputs travel.
    pub num_offloaded: Option<usize>,
    /// s: one build of metadata in arm B, in milliseconds.
    pub build_ms: Option<f64>,
    /// Builds of metadata in a step that arm A does not make.
    pub builds_avoided: Option<f64>,
    /// c: one copy back, in milliseconds.
    pub reload_ms: Option<f64>,
    /// g: the backward pass of one block, in milliseconds.
    pub block_backward_ms: Option<f64>,
    /// T: a step of arm B, in milliseconds.
    pub step_ms: f64,
}

/// A field of `run.toml` in which the arms differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its name with its section: `optimizations.metadata_cache`.
    pub field: String,
    /// As TOML in arm A.
    pub a: String,
    /// As TOML in arm B.
    pub b: String,
}

/// Whether both arms learn the same, step by step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Parity {
    /// Whether every loss and gradient norm has the same bits in both arms.
    pub bit_equal: bool,
    /// Whether every block of an arm has the same bits as its first: an arm repeats itself.
    pub repeats: bool,
    /// Whether the arms must be bit-equal: not where they sum in another order (masked attention; on a GPU, grouped products of experts).
    pub must_be_bit_equal: bool,
    /// Largest difference of losses, in nats.
    pub max_loss_difference: f64,
    /// Largest difference of gradient norms, relative to the norm.
    pub max_grad_norm_difference: f64,
    /// Largest loss, in nats; 0 in reports that are older.
    #[serde(default)]
    pub max_loss: f64,
}

impl Parity {
    /// Differences of losses and gradient norms, relative to them (for losses below 1, in nats), up to which arms that sum in another order still learn the
    /// same. A sum of bf16 values in another order is off by their rounding, 2⁻⁸ of a value; that of a mean over many tokens by less, unless a close
    /// choice of an expert falls otherwise.
    pub const TOLERANCE: f64 = 1.0 / 256.0;

    /// Whether the arms give the same results.
    pub fn holds(&self) -> bool {
        let close = self.max_loss_difference <= Self::TOLERANCE * self.max_loss.max(1.0)
            && self.max_grad_norm_difference <= 4.0 * Self::TOLERANCE;
        self.repeats && (self.bit_equal || !self.must_be_bit_equal && close)
    }
}

/// Most memory of an arm at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ArmMemory {
    /// On the device, by our accounting, in bytes (on the CPU: host memory).
    pub peak_bytes: u64,
    /// Page-locked host memory that activations wait in, in bytes; `None` where none are offloaded.
    pub pinned_bytes: Option<u64>,
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerdictKind {
    /// On is faster.
    Faster,
    /// On is slower.
    Slower,
    /// Nothing that can be told from noise.
    NoDifference,
    /// The arms do not learn the same: whatever the times say, something is wrong.
    ResultsDiffer,
}

/// The comparison in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// What came out.
    pub kind: VerdictKind,
    /// In one sentence.
    pub sentence: String,
    /// The figures behind it, in a line.
    pub detail: String,
}

/// A paired comparison. Of two values the first is arm A's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompareReport {
    /// `Packing metadata cache, on against off`.
    pub title: String,
    /// What was varied.
    pub variation: Variation,
    /// Name of the model.
    pub model: String,
    /// Device in words.
    pub device: String,
    /// What both arms did: `2 micro-batches of 16,384 tokens in all a step · same weights, same batches, same seed`.
    pub workload: String,
    /// A has the optimization on, B has it off.
    pub arms: [Arm; 2],
    /// Pairs of blocks that were run.
    pub pairs: usize,
    /// Pairs that were asked for: more than `pairs` in a report that is not final or was stopped.
    pub pairs_planned: usize,
    /// Counted steps in a block. A block has one more, its first, which is not counted.
    pub steps_per_block: usize,
    /// The table of differences.
    pub rows: Vec<Difference>,
    /// Losses of the steps of one block (the first of each arm), the uncounted one included; all blocks run the same steps.
    pub losses: [Vec<f64>; 2],
    /// Gradient norms of the same steps.
    pub grad_norms: [Vec<f64>; 2],
    /// Phases of the mean step, those that were measured.
    pub phases: [Vec<PhaseTime>; 2],
    /// The mean step, in milliseconds.
    pub step_ms: [f64; 2],
    /// Part of it that no phase claims, in milliseconds.
    pub not_attributed_ms: [f64; 2],
    /// A − B of every pair.
    pub pair_differences: PairDifferences,
    /// What models say beside what was measured.
    pub predictions: Vec<Prediction>,
    /// The run's own numbers in those models.
    pub quantities: Quantities,
    /// Fields of `run.toml` that differ.
    pub settings: Vec<Setting>,
    /// Whether both learn the same.
    pub parity: Parity,
    /// Memory of each arm.
    pub memory: [ArmMemory; 2],
    /// The comparison in words.
    pub verdict: Verdict,
    /// What else one should know: a rule of the comparison that changed both arms, a switch that was refused and why.
    pub notes: Vec<String>,
}

/// What a comparison says while it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum CompareEvent {
    /// A stage before the first pair, with its progress (`total` 0 when not known): `loading weights`, `warming up`.
    Preparing {
        /// The stage in words.
        stage: String,
        /// Units done.
        done: u64,
        /// Units in all.
        total: u64,
    },
    /// Pairs are being run.
    Progress {
        /// Of which comparison.
        variation: Variation,
        /// Pairs done.
        done: usize,
        /// Pairs in all.
        pairs: usize,
        /// What is known so far; `None` before the first pair.
        report: Option<Box<CompareReport>>,
    },
    /// A comparison is done, or was stopped after some pairs. Where several were asked for, the next follows.
    Finished {
        /// What it found.
        report: Box<CompareReport>,
    },
    /// Something to know.
    Note {
        /// The line.
        text: String,
    },
    /// An error ended it, in words. Finished comparisons stay true.
    Failed {
        /// The error.
        text: String,
    },
}

/// How much to measure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompareOptions {
    /// What to vary: each is a comparison of its own.
    pub vary: Vec<Variation>,
    /// Pairs of blocks.
    pub pairs: usize,
    /// Counted steps in a block.
    pub steps_per_block: usize,
}

impl CompareOptions {
    /// Steps of a block, the uncounted one included.
    pub fn num_steps(&self) -> usize {
        self.steps_per_block + 1
    }

    /// Sees that there is something to measure.
    ///
    /// # Errors
    /// When there are no variations, pairs or steps.
    pub fn check(&self) -> Result<()> {
        ensure!(!self.vary.is_empty(), "nothing to vary: name at least one of {}", words());
        ensure!(self.pairs >= 1 && self.steps_per_block >= 1, "a comparison takes at least one pair of one step each");
        Ok(())
    }
}

impl Default for CompareOptions {
    fn default() -> Self {
        Self { vary: vec![Variation::All], pairs: 10, steps_per_block: 5 }
    }
}
