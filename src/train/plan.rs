//! The memory plan of a run on a GPU: what its steps take, found by running them on a recording device.
//!
//! Nothing here knows how large an activation is. The trainer's own code runs two steps of the largest batch without a driver, and what it took is
//! what the run will take: the slabs of both arenas, which the run then asks for at once ([`MemoryPlan::reserve`]), page-locked memory, and what the
//! driver's context has.

mod search;
mod ways;

use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use tracing::subscriber::NoSubscriber;

use self::ways::kept_in_words;
use super::batch::bucket;
use super::config::{Activations, ActivationsChoice, MemoryConfig, PlacementChoice};
use super::switches::Switches;
use super::trainer::{Trainer, TrainerSetup, lora_spec};
use crate::base::error::Result;
use crate::base::units;
use crate::data::example::{Example, IGNORE_INDEX};
use crate::data::pack::PackedBatch;
use crate::model::config::ModelConfig;
use crate::model::transformer::Transformer;
use crate::tensor::cuda::{DeviceFacts, Pool, RecordingFacts};
use crate::tensor::memory::{MemoryCategory, available_host_bytes};
use crate::tensor::{Device, Gpu};

/// What the driver's context takes where no driver can be asked, in bytes: an assumption. It was between 0.3 and 0.6 GB on cards of the last years,
/// with the kernels and the matrix library's workspace.
const ASSUMED_CONTEXT: u64 = 480 << 20;
/// What the driver takes for kernels of the vendor's matrix library when they are first used, in bytes: an assumption, as nobody says it before.
const ASSUMED_LIBRARY_KERNELS: u64 = 64 << 20;
/// Recordings of other sizes of packs that a run may keep beside that of the largest.
const OTHER_RECORDINGS: u64 = 7;

/// The largest step of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Tokens of the largest packed batch.
    pub tokens: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Packed batches in a step.
    pub batches: usize,
}

/// The machine that a plan is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The card.
    pub card: DeviceFacts,
    /// Whether the vendor's library computes matrix products.
    pub vendor_library: bool,
    /// Device memory that may be in use, by everybody: the card's, or the limit that was set.
    pub vram_bytes: u64,
    /// What of it is in use before the first tensor, by the driver's context and by others.
    pub before_bytes: u64,
    /// Whether the driver said so; else it is an assumption.
    pub before_is_measured: bool,
    /// Host memory that could be had, where that is known.
    pub host_bytes: Option<u64>,
}

impl Machine {
    /// The machine of a GPU.
    pub fn of(gpu: &Gpu) -> Self {
        Self {
            card: gpu.facts().clone(),
            vendor_library: gpu.has_vendor_library(),
            vram_bytes: gpu.limit_bytes(),
            before_bytes: gpu.bytes_before(),
            before_is_measured: true,
            host_bytes: available_host_bytes(),
        }
    }

    /// A machine of which only the card's memory is known, with the vendor's library or without.
    pub fn assumed(vram_bytes: u64, vendor_library: bool) -> Self {
        Self {
            card: DeviceFacts::assumed(vram_bytes),
            vendor_library,
            vram_bytes,
            before_bytes: ASSUMED_CONTEXT,
            before_is_measured: false,
            host_bytes: available_host_bytes(),
        }
    }
}

/// Bytes of one category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// What they are for.
    pub category: MemoryCategory,
    /// At the moment at which most was in use.
    pub bytes: u64,
}

/// Bytes of host memory for one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPart {
    /// What they are for.
    pub what: String,
    /// How many.
    pub bytes: u64,
}

/// What steps take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// By category when most was in use: they add up to [`Self::peak_bytes`].
    pub parts: Vec<Part>,
    /// Most device memory in use at one time, by our accounting.
    pub peak_bytes: u64,
    /// The slab of what lasts.
    pub lasting_bytes: u64,
    /// The slab of passes.
    pub pass_bytes: u64,
    /// In use before the first tensor.
    pub before_bytes: u64,
    /// What kernels of the vendor's matrix library will take, by assumption.
    pub library_bytes: u64,
    /// Page-locked host memory.
    pub pinned_bytes: u64,
    /// Host memory, page-locked memory included.
    pub host_bytes: u64,
    /// What host memory holds.
    pub host: Vec<HostPart>,
}

impl Need {
    /// Device memory as the driver will count it.
    pub fn vram_bytes(&self) -> u64 {
        self.before_bytes + self.library_bytes + self.slab_bytes()
    }

    /// Both slabs.
    pub fn slab_bytes(&self) -> u64 {
        self.lasting_bytes + self.pass_bytes
    }

    /// What slabs hold beyond what is in use when most is: gaps, and what the two arenas need at different times.
    pub fn gap_bytes(&self) -> u64 {
        self.slab_bytes().saturating_sub(self.peak_bytes)
    }
}

/// One way to train, and what it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The way in words, as a clause: `inputs of blocks wait in host memory`.
    pub what: String,
    /// How a run file asks for it: `activations = "offload"`.
    pub setting: String,
    /// What is switched how.
    pub switches: Switches,
    /// What it takes; `None` where it cannot be done.
    pub need: Option<Need>,
    /// Why it is not the way; `None` where it fits.
    pub against: Option<String>,
}

/// What was chosen for a run, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// What was planned for.
    pub work: Workload,
    /// Device memory that may be in use.
    pub vram_bytes: u64,
    /// Whether what the driver's context takes was measured; else it is an assumption.
    pub before_is_measured: bool,
    /// Host memory that could be had, where that is known.
    pub host_bytes: Option<u64>,
    /// All ways, the fastest first.
    pub tried: Vec<Tried>,
    /// The number of the way that was chosen: the first that fits, or where none does the one that takes least.
    pub chosen: usize,
    /// Why, as a clause.
    pub why: String,
    /// What would make the run fit, where no way does: changes that were tried.
    pub advice: Vec<String>,
}

impl MemoryPlan {
    /// The way that was chosen.
    pub fn choice(&self) -> &Tried {
        &self.tried[self.chosen]
    }

    /// Ways beside the one that was chosen: of those that keep the same in blocks, the one that takes least.
    pub fn others(&self) -> Vec<&Tried> {
        let mut others: Vec<&Tried> = Vec::new();
        let bytes = |tried: &Tried| tried.need.as_ref().map_or(u64::MAX, Need::vram_bytes);
        for (_, tried) in self.tried.iter().enumerate().filter(|(number, _)| *number != self.chosen) {
            match others.iter_mut().find(|other| kept_in_words(&other.switches) == kept_in_words(&tried.switches)) {
                Some(other) if bytes(tried) < bytes(other) => *other = tried,
                Some(_) => {}
                None => others.push(tried),
            }
        }
        others
    }

    /// Whether it fits.
    pub fn fits(&self) -> bool {
        self.choice().against.is_none()
    }

    /// What it takes.
    pub fn need(&self) -> Option<&Need> {
        self.choice().need.as_ref()
    }

    /// Lets the arenas of a GPU begin with the slabs that the chosen way needs. Where there is not as much memory they grow as they must.
    pub fn reserve(&self, gpu: &Gpu) {
        if let Some(need) = self.need().filter(|_| self.fits()) {
            gpu.set_first_slab(Pool::Lasting, need.lasting_bytes);
            gpu.set_first_slab(Pool::Pass, need.pass_bytes);
        }
    }
}

/// What a plan is made of.
#[derive(Debug, Clone)]
pub struct Planner {
    /// The model.
    pub config: ModelConfig,
    /// How it is trained. What of `switches` is left to Tandem (`activations`, `memory`, a number of buffers of 0) is chosen.
    pub setup: TrainerSetup,
    /// What blocks shall keep.
    pub activations: ActivationsChoice,
    /// What of memory is left to Tandem; `None`: nothing is, and `setup` says it all.
    pub memory: Option<MemoryConfig>,
    /// The largest step.
    pub work: Workload,
    /// Where.
    pub machine: Machine,
}

impl Planner {
    /// What steps of the largest batch take with `switches`.
    ///
    /// # Errors
    /// When the method does not fit the model, or the step cannot be done in this way.
    pub fn need(&self, switches: Switches) -> Result<Need> {
        self.need_for(switches, self.work)
    }

    /// As [`Self::need`], for another step.
    fn need_for(&self, switches: Switches, work: Workload) -> Result<Need> {
        // What the engine logs of such a step is no news of a run.
        tracing::subscriber::with_default(NoSubscriber::new(), || self.record(switches, work))
    }

    /// Whether things lie where this plan put them.
    fn check_places(&self, trainer: &Trainer) -> Result<()> {
        let refused = trainer
            .model()
            .embedding_refused()
            .filter(|_| self.memory.as_ref().is_some_and(|asked| asked.embedding == PlacementChoice::Auto));
        ensure!(refused.is_none(), "the embedding's table stays on the device: {}", refused.unwrap_or_default());
        let refused = trainer.state_place().refused.as_deref();
        let refused = refused
            .filter(|_| self.memory.as_ref().is_some_and(|asked| asked.optimizer_state == PlacementChoice::Auto));
        ensure!(refused.is_none(), "the optimizer's state stays on the device: {}", refused.unwrap_or_default());
        Ok(())
    }

    fn record(&self, switches: Switches, work: Workload) -> Result<Need> {
        let Machine { ref card, vendor_library, host_bytes, before_bytes, .. } = self.machine;
        let device =
            Device::recording(RecordingFacts { card: card.clone(), free_bytes: None, host_bytes, vendor_library });
        let Device::Cuda(gpu) = &device else { unreachable!("a recording device is a GPU to whoever uses it") };
        let setup = TrainerSetup { switches, ..self.setup.clone() };
        let lora = lora_spec(&setup.method);
        let model = Transformer::random(&self.config, &device, setup.form(lora.as_ref()), 0)?;
        let mut trainer = Trainer::new(model, setup)?;
        self.check_places(&trainer)?;
        let work = trainer.passes_of(work);
        let batch = largest_batch(work)?;
        let batches = vec![batch; work.batches.max(1)];
        let never = AtomicBool::new(false);
        // The first is queued launch by launch, the second is recorded.
        for _ in 0..2 {
            trainer.step(&batches, 0.0, &never)?;
        }
        trainer.flush()?;
        let offload = trainer.model().offload_state();
        if switches.activations == Activations::Offload {
            ensure!(offload.refused.is_none(), "{}", offload.refused.unwrap_or_default());
            // Moving pageable memory costs more than what is kept beside inputs saves.
            let fallback = offload.fallback.filter(|_| self.keeps_more_than_asked(&switches.memory));
            ensure!(fallback.is_none(), "{}", fallback.unwrap_or_default());
        }
        let others =
            if trainer.switches().cuda_graphs && trainer.unrecorded().is_none() { OTHER_RECORDINGS } else { 0 };
        let documents: u64 = trainer.model().metadata_entries().iter().map(|entry| entry.bytes).sum();
        let twin_bytes = documents + (bucket(work.tokens) * 2 * size_of::<i32>()) as u64;
        let [lasting, pass] = [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool).reach);
        let pinned = gpu.pinned_bytes().peak;
        let host = host_parts(&trainer, pinned, offload.host_bytes);
        let parts = gpu.ledger().at_peak().context("a recording device notes its peak")?;
        Ok(Need {
            peak_bytes: parts.iter().map(|(_, bytes)| bytes).sum(),
            parts: parts.into_iter().map(|(category, bytes)| Part { category, bytes }).collect(),
            lasting_bytes: in_granules(lasting + others * twin_bytes),
            pass_bytes: in_granules(pass),
            before_bytes,
            library_bytes: if vendor_library { ASSUMED_LIBRARY_KERNELS } else { 0 },
            pinned_bytes: pinned,
            host_bytes: host.iter().map(|part| part.bytes).sum(),
            host,
        })
    }
}

/// Parts of host memory that a step takes.
fn host_parts(trainer: &Trainer, pinned_bytes: u64, offload_bytes: u64) -> Vec<HostPart> {
    let embedding = trainer.model().embedding_host_bytes().unwrap_or(0);
    let state = trainer.state_place().host_bytes;
    let named = [("activations", offload_bytes), ("embedding", embedding), ("optimizer", state)];
    let known: u64 = named.iter().map(|(_, bytes)| bytes).sum();
    let rest = ("copies and results", pinned_bytes.saturating_sub(known));
    let part = |(what, bytes): (&str, u64)| HostPart { what: what.into(), bytes };
    named.into_iter().chain([rest]).filter(|(_, bytes)| *bytes > 0).map(part).collect()
}

/// What the driver gives is a multiple of this many bytes.
fn in_granules(bytes: u64) -> u64 {
    bytes.next_multiple_of(2 << 20)
}

/// The batch of a step that takes most: as many documents of the greatest length as it holds and one with the rest, everything supervised.
///
/// # Errors
/// When it would have no token to learn from.
pub fn largest_batch(work: Workload) -> Result<PackedBatch> {
    let Workload { tokens, longest, .. } = work;
    let longest = longest.min(tokens);
    ensure!(longest >= 2, "a document of {longest} tokens has none to learn from");
    let document = |length: usize| {
        let labels = (1..length).map(|_| 0).chain([IGNORE_INDEX]);
        Example { input_ids: vec![0; length], labels: labels.collect() }
    };
    let rest = tokens % longest;
    let mut documents = vec![document(longest); tokens / longest];
    documents.extend((rest > 0).then(|| document(rest)));
    Ok(PackedBatch::from_examples(&documents))
}

/// How far what was measured is off what was planned, in words; `None` where it is less than a twentieth.
pub fn deviation(what: &str, planned_bytes: u64, measured_bytes: u64) -> Option<String> {
    let part = measured_bytes as f64 / planned_bytes.max(1) as f64 - 1.0;
    (part.abs() > 0.05).then(|| {
        let (planned, measured) = (units::bytes(planned_bytes), units::bytes(measured_bytes));
        format!("{what}: {measured} where {planned} were planned ({:+.1} %)", 100.0 * part)
    })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
