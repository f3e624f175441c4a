//! `tandem bench`: steps of a real model shape on random weights, on the documents of the baselines.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;

use super::bench_ops::{random, time};
use super::bench_plan::{self, PlanCheck};
use super::compare::{self, CompareEvent, CompareOptions, Subject};
use super::trace::Trace;
use crate::base::error::Result;
use crate::base::rng::{Philox, unit_f32};
use crate::data::example::{Example, IGNORE_INDEX};
use crate::data::pack::PackedBatch;
use crate::model::config::ModelConfig;
use crate::model::transformer::Transformer;
use crate::ops::matmul;
use crate::tensor::cuda::Pool;
use crate::tensor::memory::MemoryReport;
use crate::tensor::phase::PhaseTime;
use crate::tensor::{Device, MemoryCategory};
use crate::train::config::{
    ActivationsChoice, DeviceChoice, MemoryPolicy, MethodConfig, MethodKind, OptimizerConfig, Precision, ScheduleKind,
};
use crate::train::plan::MemoryPlan;
use crate::train::report::{CacheReport, Choice, CopyReport, MoeReport, StepReport};
use crate::train::snapshot::Snapshot;
use crate::train::switches::Switches;
use crate::train::trainer::{Stepped, Trainer, TrainerSetup, lora_spec};

/// Configurations that come with Tandem: sizes and flags of published models, without weights.
const KNOWN: [(&str, &str); 8] = [
    ("llama-3.2-1b", include_str!("../../assets/models/llama-3.2-1b.json")),
    ("llama-3.1-8b", include_str!("../../assets/models/llama-3.1-8b.json")),
    ("qwen3-0.6b", include_str!("../../assets/models/qwen3-0.6b.json")),
    ("qwen3-8b", include_str!("../../assets/models/qwen3-8b.json")),
    ("qwen3-14b", include_str!("../../assets/models/qwen3-14b.json")),
    ("qwen3-32b", include_str!("../../assets/models/qwen3-32b.json")),
    ("qwen3-30b-a3b", include_str!("../../assets/models/qwen3-30b-a3b.json")),
    ("gpt-oss-20b", include_str!("../../assets/models/gpt-oss-20b.json")),
];

/// Mean length of a document, spread of its logarithm, and the factor that makes up for cutting at pack ends: the baselines' workload.
const MEAN_LEN: f64 = 512.0;
const SIGMA: f64 = 0.8;
const CUT_FACTOR: f64 = 1.18;

/// What to measure.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// A name of [`known_models`], or the path of a config.json.
    pub model: String,
    /// Tokens in one optimizer step.
    pub tokens: usize,
    /// Tokens in one micro-batch.
    pub pack: usize,
    /// Steps before measuring.
    pub warmup: usize,
    /// Steps measured.
    pub steps: usize,
    /// What is switched how.
    pub switches: Switches,
    /// What blocks keep: of `switches`, or what is fastest and fits.
    pub activations: ActivationsChoice,
    /// Rank of the adapters on all linears.
    pub r: usize,
    /// Whether the weights below them are in NF4, or train themselves.
    pub method: MethodKind,
    /// Bits of a value of the optimizer's moments.
    pub bits: u32,
    /// Whether a pack is one document.
    pub one_document: bool,
}

impl BenchOptions {
    fn check(&self) -> Result<()> {
        let &Self { tokens, pack, steps, .. } = self;
        ensure!(
            pack >= 2 && tokens >= pack && tokens.is_multiple_of(pack),
            "tokens ({tokens}) must be a multiple of pack ({pack})"
        );
        ensure!(steps >= 1, "at least one step must be measured");
        let joined = self.switches.memory.pass_tokens;
        ensure!(
            joined == 0 || (joined >= pack && tokens > pack),
            "pass_tokens ({joined}) joins packs of a step: it must be at least pack ({pack}), and tokens ({tokens}) several packs"
        );
        Ok(())
    }

    /// Lengths of the documents of a step.
    pub(super) fn lengths(&self) -> Vec<usize> {
        if self.one_document {
            return vec![self.pack; self.tokens / self.pack];
        }
        document_lengths(self.tokens, self.pack)
    }
}

/// One row of the table: medians over the measured steps.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
    /// Model.
    pub model: String,
    /// Which parameters train, on what.
    pub method: MethodKind,
    /// Bits of a value of the optimizer's moments.
    pub bits: u32,
    /// Device in words.
    pub device: String,
    /// Tokens in one micro-batch.
    pub pack: usize,
    /// Tokens in one step.
    pub tokens: usize,
    /// What was switched how.
    #[serde(flatten)]
    pub switches: Switches,
    /// Whether passes were recorded as CUDA graphs; `None` on the CPU.
    pub recorded: Option<bool>,
    /// Why not, where it was asked for.
    pub unrecorded: Option<String>,
    /// Tokens a second.
    pub tokens_per_sec: f64,
    /// Whole step, in milliseconds.
    pub step_ms: f64,
    /// Phases of the median step that were measured.
    pub phases: Vec<PhaseTime>,
    /// Part of the step that no phase claims, in milliseconds.
    pub not_attributed_ms: f64,
    /// Most memory at one time, by our accounting, in bytes.
    pub peak_bytes: u64,
    /// Memory by category.
    pub memory: MemoryReport,
    /// What the driver says is in use on the card after the last step, by everybody, its own part included.
    pub driver_bytes: Option<u64>,
    /// The memory plan beside what was measured, on a GPU.
    pub plan: Option<PlanCheck>,
    /// Kernel launches of the median step, on a GPU.
    pub launches: Option<u64>,
    /// Times the host waited for the device in the median step.
    pub host_syncs: Option<u64>,
    /// Driver allocations in the median step.
    pub allocations: Option<u64>,
    /// What the metadata cache did in the median step.
    pub cache: Option<CacheReport>,
    /// What was copied to host memory and back in it.
    pub copies: Option<CopyReport>,
    /// What routed experts did in it.
    pub moe: Option<MoeReport>,
    /// Which optimizations are on, and why.
    pub choices: Vec<Choice>,
    /// FLOPs of the model a token, recomputation not counted.
    pub flops_per_token: f64,
    /// Rate of the model's FLOPs, in TFLOP/s.
    pub tflops: f64,
    /// A square bf16 (CPU: f32) matrix product in this process, in TFLOP/s.
    pub matmul_tflops: f64,
    /// `tflops / matmul_tflops`.
    pub mfu: f64,
    /// Loss of the last step, in nats.
    pub loss: f64,
}

/// Names that [`BenchOptions::model`] takes.
pub fn known_models() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|(name, _)| *name)
}

/// The configuration of a known name or of a config.json.
///
/// # Errors
/// When it is neither, with the names there are.
pub fn model_config(model: &str) -> Result<ModelConfig> {
    if let Some((_, json)) = KNOWN.iter().find(|(name, _)| *name == model) {
        return ModelConfig::from_hf_json(json);
    }
    let path = Path::new(model);
    if !path.is_file() {
        bail!(
            "there is no file {model}, and no known model of that name: {}",
            known_models().collect::<Vec<_>>().join(", ")
        );
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {model}"))?;
    ModelConfig::from_hf_json(&text).with_context(|| format!("reading {model}"))
}

/// The device to measure; `auto` is the GPU where there is one, used as if it had no more than the limit.
///
/// # Errors
/// When the GPU is asked for and cannot be had, or the CPU refuses its threads.
pub fn device(choice: DeviceChoice, precision: Precision, vram_limit_bytes: Option<u64>) -> Result<Device> {
    match choice {
        DeviceChoice::Cpu => Device::cpu(0, precision),
        DeviceChoice::Cuda => Ok(Device::cuda_within(vram_limit_bytes)?),
        DeviceChoice::Auto => Device::cuda_within(vram_limit_bytes).or_else(|_| Device::cpu(0, precision)),
    }
}

/// A device, and the model that was measured last: the next measurement of the same model starts from the same state.
#[derive(Debug)]
pub struct Bench {
    device: Device,
    matmul_tflops: Option<f64>,
    model: Option<Loaded>,
}

/// What a model was made for: another measurement with the same can use it.
#[derive(Debug, PartialEq)]
struct Made {
    name: String,
    method: MethodConfig,
    bits: u32,
    memory: MemoryPolicy,
}

/// A trainer on random weights, and the state it began in.
#[derive(Debug)]
struct Loaded {
    made: Made,
    config: ModelConfig,
    trainer: Trainer,
    start: Snapshot,
    /// Of the row that is measured, on a GPU.
    plan: Option<MemoryPlan>,
}

impl Bench {
    /// Nothing is measured yet.
    pub fn new(device: Device) -> Self {
        Self { device, matmul_tflops: None, model: None }
    }

    /// The model of `options` in its first state, switched as they ask.
    fn load(&mut self, options: &BenchOptions) -> Result<&mut Loaded> {
        let BenchOptions { ref model, switches, r, method, bits, .. } = *options;
        let config = model_config(model)?;
        let method = MethodConfig { kind: method, r, ..MethodConfig::default() };
        let optimizer = OptimizerConfig { schedule: ScheduleKind::Constant, bits, ..OptimizerConfig::default() };
        let mut setup = TrainerSetup { method, optimizer, switches, seed: 1, total_steps: 1 };
        ensure!(
            options.activations != ActivationsChoice::Auto
                || matches!(self.device, Device::Cpu(_))
                || switches.memory == MemoryPolicy::default(),
            "with --activations auto the memory plan says where things lie and how much is worked on at one time: leave out \
             --embedding, --optimizer-state, --dequantized, --middle, --qkv, --mlp-rows and --pass-tokens, or name the activations"
        );
        let plan = match &self.device {
            Device::Cpu(_) => None,
            Device::Cuda(gpu) => Some((bench_plan::plan(options, &config, &setup, gpu), gpu.clone())),
        };
        if let Some((plan, _)) = plan.as_ref().filter(|_| options.activations == ActivationsChoice::Auto) {
            setup.switches = plan.choice().switches;
        }
        let made = Made { name: model.clone(), method: setup.method.clone(), bits, memory: setup.switches.memory };
        let mut loaded = match self.model.take().filter(|loaded| loaded.made == made) {
            Some(loaded) => loaded,
            None => {
                if let Some((plan, gpu)) = &plan {
                    bench_plan::reserve(gpu, Pool::Lasting, plan);
                }
                let lora = lora_spec(&setup.method);
                let weights = Transformer::random(&config, &self.device, setup.form(lora.as_ref()), 1)?;
                let trainer = Trainer::new(weights, setup)?;
                let start = trainer.snapshot();
                Loaded { made, config, trainer, start, plan: None }
            }
        };
        // What other switches have recorded holds memory that is none of this measurement's.
        loaded.trainer.forget_recordings();
        if let Some((plan, gpu)) = &plan {
            bench_plan::reserve(gpu, Pool::Pass, plan);
        }
        loaded.plan = plan.map(|(plan, _)| plan);
        bench_plan::switch(&mut loaded.trainer, options, loaded.plan.as_ref());
        loaded.trainer.restore(&loaded.start);
        self.device.reset_memory_peaks();
        Ok(self.model.insert(loaded))
    }

    /// Compares optimizations on random weights, as [`compare::compare_all`].
    ///
    /// # Errors
    /// As [`Self::run`], and when an optimization cannot be switched on here.
    pub fn compare(
        &mut self,
        options: &BenchOptions,
        comparison: &CompareOptions,
        on_event: &(dyn Fn(CompareEvent) + Sync),
        stop: &AtomicBool,
    ) -> Result<()> {
        options.check()?;
        let Loaded { config, trainer, .. } = self.load(options)?;
        let lengths = options.lengths();
        let batches = vec![micro_batches(&lengths, options.pack, config.vocab_size); comparison.num_steps()];
        let subject = Subject { model: &options.model, batches: &batches };
        compare::compare_all(trainer, subject, comparison, on_event, stop)
    }

    /// Measures one row; its steps go to `trace`.
    ///
    /// # Errors
    /// When the model does not fit the device or the options make no batch.
    pub fn run(&mut self, options: &BenchOptions, trace: Option<&mut Trace>) -> Result<BenchRow> {
        options.check()?;
        let device = self.device.clone();
        let matmul_tflops = match self.matmul_tflops {
            Some(tflops) => tflops,
            None => *self.matmul_tflops.insert(device.run(|| square_product_tflops(&device))?),
        };
        let Loaded { config, trainer, plan, .. } = self.load(options)?;
        measure(options, config, trainer, plan.as_ref(), matmul_tflops, trace)
    }
}

/// Measures one row on a trainer in its first state.
fn measure(
    options: &BenchOptions,
    config: &ModelConfig,
    trainer: &mut Trainer,
    plan: Option<&MemoryPlan>,
    matmul_tflops: f64,
    trace: Option<&mut Trace>,
) -> Result<BenchRow> {
    let BenchOptions { tokens, pack, warmup, steps, r, .. } = *options;
    let switches = trainer.switches();
    let device = trainer.model().device().clone();
    let lengths = options.lengths();
    let micro_batches = micro_batches(&lengths, pack, config.vocab_size);
    let flops_per_token = flops_per_token(config, &lengths, options.method.has_adapters().then_some(r));
    let stop = AtomicBool::new(false);
    // Steps follow each other without a wait between them, as in a run; the reports come late.
    let mut reports: Vec<StepReport> = Vec::with_capacity(warmup + steps);
    for _ in 0..warmup + steps {
        match trainer.step(&micro_batches, 0.0, &stop)? {
            Stepped::Stopped => bail!("the step was stopped"),
            Stepped::Submitted(report) => reports.extend(report.map(|report| *report)),
        }
    }
    reports.extend(trainer.flush()?);
    if let Some(trace) = trace {
        trace.begin(&format!("{}, pack {pack}", options.model));
        reports.iter().for_each(|report| trace.add(report));
    }
    reports.drain(..warmup);
    let loss = reports.last().map_or(f64::NAN, |report| report.loss);
    reports.sort_by(|a, b| a.step_ms.total_cmp(&b.step_ms));
    let median = &reports[reports.len() / 2];
    let tokens_per_sec = tokens as f64 / (median.step_ms / 1e3);
    let tflops = tokens_per_sec * flops_per_token / 1e12;
    Ok(BenchRow {
        model: options.model.clone(),
        method: options.method,
        bits: options.bits,
        device: device.describe(),
        pack,
        tokens,
        switches,
        recorded: matches!(device, Device::Cuda(_)).then(|| switches.cuda_graphs && trainer.unrecorded().is_none()),
        unrecorded: trainer.unrecorded().map(str::to_owned),
        tokens_per_sec,
        step_ms: median.step_ms,
        phases: median.phases.iter().copied().filter(|time| time.total_ms().is_some()).collect(),
        not_attributed_ms: median.not_attributed_ms,
        peak_bytes: median.memory.peak_bytes,
        memory: median.memory.clone(),
        driver_bytes: match &device {
            Device::Cpu(_) => None,
            Device::Cuda(gpu) => gpu.driver_used_bytes(),
        },
        plan: plan
            .and_then(MemoryPlan::need)
            .and_then(|need| bench_plan::check(&device, need, device.memory().peak_bytes)),
        launches: median.counters.map(|c| c.launches),
        host_syncs: median.counters.map(|c| c.host_syncs),
        allocations: median.counters.map(|c| c.allocations),
        cache: median.cache.clone(),
        copies: median.copies,
        moe: median.moe.clone(),
        choices: trainer.choices(),
        flops_per_token,
        tflops,
        matmul_tflops,
        mfu: tflops / matmul_tflops,
        loss,
    })
}

/// Log-normal lengths that add up to `tokens`, cut at pack ends.
fn document_lengths(tokens: usize, pack: usize) -> Vec<usize> {
    let mean = MEAN_LEN.min(pack as f64) * CUT_FACTOR;
    let mu = mean.ln() - SIGMA * SIGMA / 2.0;
    let generator = Philox::new(1, 1);
    let (mut lengths, mut total, mut draw) = (Vec::new(), 0, 0);
    while total < tokens {
        // Box–Muller: one normal number from two uniform ones.
        let [a, b, ..] = generator.block(draw).map(|word| f64::from(unit_f32(word)));
        draw += 1;
        let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        let length = ((mu + SIGMA * normal).exp() as usize).clamp(8, pack);
        let room = pack - total % pack;
        for part in if length <= room { [length, 0] } else { [room, length - room] } {
            let part = part.min(tokens - total);
            if part > 0 {
                lengths.push(part);
                total += part;
            }
        }
    }
    lengths
}

/// Random tokens in those documents, every position but each document's last one supervised, in packs.
fn micro_batches(lengths: &[usize], pack: usize, vocab: usize) -> Vec<PackedBatch> {
    let generator = Philox::new(1, 2);
    let mut next = 0u64;
    let mut example = |length: usize| {
        let input_ids: Vec<i32> = (0..length as u64).map(|i| generator.below(next + i, vocab as u64) as i32).collect();
        next += length as u64;
        let labels = input_ids[1..].iter().copied().chain([IGNORE_INDEX]).collect();
        Example { input_ids, labels }
    };
    let (mut batches, mut documents, mut filled) = (Vec::new(), Vec::new(), 0);
    for &length in lengths {
        documents.push(example(length));
        filled += length;
        if filled == pack {
            batches.push(PackedBatch::from_examples(&std::mem::take(&mut documents)));
            filled = 0;
        }
    }
    batches
}

/// FLOPs a token, forward and backward, recomputation not counted: `4N` for frozen linears (`2N` forward, `2N` for the input's gradient),
/// `4·V·H` for the head, `3.5·4·d·Hq·ctx` a layer for attention with `ctx` the mean number of keys a query sees, `6r·(in + out)` for adapters of rank
/// `r`, those on experts aside. Of experts, as many count as a token goes to. Without adapters all weights have gradients: `6N` and `6·V·H`.
fn flops_per_token(config: &ModelConfig, lengths: &[usize], r: Option<usize>) -> f64 {
    let (hidden, inner) = (config.hidden_size as f64, config.intermediate_size as f64);
    let (q, kv) = (config.q_size() as f64, config.kv_size() as f64);
    let layers = config.num_hidden_layers as f64;
    let attention = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)];
    let mlp = [(hidden, inner), (hidden, inner), (inner, hidden)];
    let with_experts = config.moe.as_ref().map_or(0, |moe| moe.layers.iter().filter(|has| **has).count()) as f64;
    let adapters = |linears: &[(f64, f64)]| linears.iter().map(|(a, b)| r.unwrap_or(0) as f64 * (a + b)).sum::<f64>();
    let dense = layers - with_experts;
    let all_weights = (0..config.num_hidden_layers).map(|layer| config.active_weights(layer)).sum::<usize>() as f64;
    let all_adapters = layers * adapters(&attention) + dense * adapters(&mlp);
    let of_a_weight = if r.is_some() { 4.0 } else { 6.0 };
    let total: f64 = lengths.iter().map(|&n| n as f64).sum();
    let context = lengths.iter().map(|&n| n as f64 * (n as f64 + 1.0) / 2.0).sum::<f64>() / total;
    of_a_weight * all_weights
        + 6.0 * all_adapters
        + layers * 3.5 * 4.0 * q * context
        + of_a_weight * config.vocab_size as f64 * hidden
}

/// Rate of a large square product, in TFLOP/s.
fn square_product_tflops(device: &Device) -> Result<f64> {
    let (n, calls) = match device {
        Device::Cpu(_) => (1024, 3),
        Device::Cuda(_) => (8192, 20),
    };
    let a = random(device, &[n, n]);
    let mut c = device.empty(MemoryCategory::Workspace, &[n, n]);
    let ms = time(device, calls, || matmul::nt(device, 1.0, &a, &a, 0.0, &mut c))?;
    Ok(2.0 * (n as f64).powi(3) / ms / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_fill_the_packs_exactly() {
        for (tokens, pack) in [(16_384, 8192), (16_384, 2048), (4096, 4096), (64, 8)] {
            let lengths = document_lengths(tokens, pack);
            assert_eq!(lengths.iter().sum::<usize>(), tokens);
            let batches = micro_batches(&lengths, pack, 1000);
            assert_eq!(batches.len(), tokens / pack);
            for batch in batches {
                batch.check().unwrap();
                assert_eq!(batch.input_ids.len(), pack);
            }
        }
    }

    #[test]
    fn known_models_parse_and_have_their_sizes() {
        let billions: Vec<f64> =
            known_models().map(|name| model_config(name).unwrap().num_parameters() as f64 / 1e9).collect();
        let want = [1.236, 8.030, 0.596, 8.191, 14.768, 32.762, 30.532, 20.915];
        for (got, want) in billions.iter().zip(want) {
            assert!((got - want).abs() < 0.01 * want, "{billions:?}");
        }
        assert!(model_config("qwen9").unwrap_err().to_string().contains("qwen3-8b"));
    }
}
