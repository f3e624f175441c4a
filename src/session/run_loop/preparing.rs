//! Before the first step: device, model, data, trainer; every stage tells its progress and sees a stop.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use super::saving;
use crate::base::error::Result;
use crate::base::units;
use crate::data::loader::{Cursor, Loader};
use crate::data::pack::PackedBatch;
use crate::formats::peft::{PROJECTIONS, expand_targets};
use crate::model::config::ModelConfig;
use crate::model::loading::{Checkpoint, Quantized};
use crate::model::transformer::Transformer;
use crate::session::config::RunConfig;
use crate::session::estimate;
use crate::session::event::{NoteLevel, RunEvent, RunInfo};
use crate::session::handle::RunContext;
use crate::session::run_folder;
use crate::session::training_data::{self, Progress, TrainingData};
use crate::tensor::device::{Device, Gpu};
use crate::tensor::dtype::DType;
use crate::train::config::{DequantizedChoice, DeviceChoice, MethodConfig, MethodKind};
use crate::train::plan::{Machine, MemoryPlan, Planner};
use crate::train::switches::Switches;
use crate::train::trainer::{Trainer, TrainerSetup, lora_spec};

/// Least time between two progress events of one stage.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Everything that training needs.
pub(super) struct Prepared {
    pub checkpoint: Checkpoint,
    pub trainer: Trainer,
    /// On a GPU.
    pub planned: Option<Planned>,
    pub loader: Loader,
    pub eval_batches: Vec<PackedBatch>,
    /// Tokens of documents that a step holds on average.
    pub tokens_per_step: f64,
    pub info: RunInfo,
}

/// A trainer and its data, before anything of a run exists: what a run and a comparison share.
pub(in crate::session) struct Loaded {
    pub checkpoint: Checkpoint,
    pub trainer: Trainer,
    pub planned: Option<Planned>,
    pub data: TrainingData,
}

/// The memory plan of a run, and what it was made with.
pub(in crate::session) struct Planned {
    pub planner: Planner,
    pub plan: MemoryPlan,
}

/// Hears what happens while that is loaded.
#[derive(Clone, Copy)]
pub(in crate::session) struct Listener<'a> {
    /// Stages, from any thread, often.
    pub stage: Progress<'a>,
    /// What the user should know.
    pub note: &'a dyn Fn(NoteLevel, String),
}

/// Tells stages, from any thread: the first and the last word of each, and some between.
struct Stages<'a> {
    listener: Progress<'a>,
    /// The stage told last, and when.
    told: Mutex<Option<(String, Instant)>>,
}

impl Stages<'_> {
    fn tell(&self, stage: &str, done: u64, total: u64) {
        let is_last = total > 0 && done == total;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_last && told.as_ref().is_some_and(|(last, at)| last == stage && at.elapsed() < TELL_EVERY) {
            return;
        }
        *told = Some((stage.into(), Instant::now()));
        (self.listener)(stage, done, total);
    }
}

/// Loads what a configuration names and checks that it fits together; `None` when it was stopped on the way. Cheap checks come first, loading the
/// weights last.
pub(in crate::session) fn load(
    config: &RunConfig,
    listener: Listener<'_>,
    stop: &AtomicBool,
) -> Result<Option<Loaded>> {
    let Listener { stage, note } = listener;
    let stages = Stages { listener: stage, told: Mutex::new(None) };
    let device = choose_device(config, note)?;
    stages.tell("opening the model", 0, 0);
    let checkpoint = Checkpoint::open(&config.model.path)?;
    if let Some(quantized) = checkpoint.quantized().filter(|_| config.method.kind != MethodKind::Qlora) {
        note(NoteLevel::Info, held_dequantized(&quantized, &device));
    }
    about_experts(&checkpoint, config, note)?;
    let config = &estimate::as_stored(config, &checkpoint);
    let builder = training_data::example_builder(config)?;
    let data = TrainingData::read(config, &builder, &|stage, done, total| stages.tell(stage, done, total), stop)?;
    let Some(data) = data else { return Ok(None) };
    for (level, text) in &data.notes {
        note(*level, text.clone());
    }
    check_fits(&data, &checkpoint, note)?;

    let planned = match &device {
        Device::Cpu(_) => None,
        Device::Cuda(gpu) => Some(plan(config, checkpoint.config(), &data, gpu, note)?),
    };
    let mut setup = TrainerSetup {
        method: config.method.clone(),
        optimizer: config.optimizer.clone(),
        switches: Switches::of(&config.train, &config.optimizations, &config.memory),
        seed: config.seed,
        total_steps: data.plan.total_steps(),
    };
    if let Some(planned) = &planned {
        // In which form the weights are held is part of the plan.
        setup.switches = planned.plan.choice().switches;
    }
    let model = Transformer::load_unless_stopped(
        &checkpoint,
        &device,
        setup.form(lora_spec(&config.method).as_ref()),
        &mut |done, total| stages.tell("loading weights", done, total),
        stop,
    )?;
    let Some(model) = model else { return Ok(None) };
    let mut trainer = Trainer::new(model, setup)?;
    match &planned {
        Some(planned) => trainer.follow(&planned.plan),
        None => trainer.choose_activations(config.train.activations, config.packing.pack_len),
    }
    if let Some(folder) = &config.method.init_adapter {
        saving::set_init_adapter(&mut trainer, &config.method, folder)?;
    }
    Ok(Some(Loaded { checkpoint, trainer, planned, data }))
}

/// Prepares a run; `None` when it was stopped on the way.
pub(super) fn prepare(context: &RunContext) -> Result<Option<Prepared>> {
    let RunContext { config, sink, control, .. } = context;
    let stage = |stage: &str, done, total| sink.emit(RunEvent::Preparing { stage: stage.into(), done, total });
    let note = |level, text| sink.note(level, text);
    let loaded = load(config, Listener { stage: &stage, note: &note }, control.stop_flag())?;
    let Some(Loaded { checkpoint, trainer, planned, data }) = loaded else { return Ok(None) };
    let steps_per_epoch = data.plan.steps_per_epoch() as f64;
    let info = RunInfo {
        name: run_folder::run_name(config),
        folder: context.folder.clone(),
        model: run_folder::short_name(&config.model.path),
        method: describe_method(&config.method, config.optimizer.bits),
        device: trainer.model().device().describe(),
        total_steps: data.plan.total_steps(),
        steps_per_epoch,
        pack_len: config.packing.pack_len,
        num_parameters: checkpoint.num_parameters(),
        num_trainable: trainer.num_trainable(),
        num_hidden_layers: checkpoint.config().num_hidden_layers,
        num_train_records: data.num_train_records,
        num_eval_records: data.num_eval_records,
    };
    let tokens_per_step = data.plan.tokens_per_epoch() as f64 / steps_per_epoch;
    let loader = data.plan.start(Cursor::default())?;
    Ok(Some(Prepared { checkpoint, trainer, planned, loader, eval_batches: data.eval_batches, tokens_per_step, info }))
}

/// The memory plan of a run on a GPU, whose arenas it is told.
fn plan(
    config: &RunConfig,
    model: &ModelConfig,
    data: &TrainingData,
    gpu: &Gpu,
    note: &dyn Fn(NoteLevel, String),
) -> Result<Planned> {
    let work = estimate::workload(config, data);
    let planner = estimate::planner(config, model, work, Machine::of(gpu), data.plan.total_steps());
    let plan = planner.plan();
    let choice = plan.choice();
    let Some(need) = plan.need() else {
        bail!("{}", choice.against.as_deref().unwrap_or("nothing could be planned"));
    };
    let advice = plan.advice.iter().map(|advice| format!("\n  {advice}")).collect::<String>();
    if need.vram_bytes() > plan.vram_bytes {
        bail!("the run does not fit into the GPU's memory: {}{advice}", plan.why);
    }
    if plan.host_bytes.is_some_and(|bytes| need.host_bytes > bytes) {
        let against = choice.against.as_deref().unwrap_or("host memory is short");
        bail!("the run does not fit: {}; {against}{advice}", plan.why);
    }
    let level = if plan.fits() { NoteLevel::Info } else { NoteLevel::Warning };
    note(level, format!("memory plan: {}; {}{advice}", choice.what, plan.why));
    plan.reserve(gpu);
    Ok(Planned { planner, plan })
}

/// The device a configuration asks for; what `auto` decides is told with its reason.
fn choose_device(config: &RunConfig, note: &dyn Fn(NoteLevel, String)) -> Result<Device> {
    let train = &config.train;
    let cpu = || Device::cpu(train.threads, train.precision);
    let limit = train.vram_limit_bytes();
    match train.device {
        DeviceChoice::Cpu => cpu(),
        DeviceChoice::Cuda => Device::cuda_within(limit).map_err(|reason| {
            anyhow::Error::new(reason).context("`device` in [train] is \"cuda\"; set it to \"cpu\" or \"auto\"")
        }),
        DeviceChoice::Auto => match Device::cuda_within(limit) {
            Ok(device) => {
                let text = format!("training on {}, the first GPU found", device.describe());
                note(NoteLevel::Info, text);
                Ok(device)
            }
            Err(reason) => {
                note(NoteLevel::Info, format!("training on the CPU, because there is {reason}"));
                cpu()
            }
        },
    }
}

/// What becomes of weights in 4 bits, and what memory that takes.
fn held_dequantized(quantized: &Quantized, device: &Device) -> String {
    let dtype = device.dtype();
    let name = match dtype {
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
    };
    format!(
        "{} weights are stored in 4 bits (NF4, {}); they are held dequantized in {name}: {}. kind = \"qlora\" in [method] keeps them in 4 bits",
        quantized.num_weights,
        units::bytes(quantized.num_bytes),
        units::bytes(quantized.num_elements * dtype.num_bytes() as u64)
    )
}

/// What becomes of weights of experts in 4 bits, of experts under QLoRA, and of adapters on layers that a mixture does not have.
///
/// # Errors
/// When `dequantized` is about weights in 4 bits, and there are none; when `target_parameters` names experts, and there are none.
fn about_experts(checkpoint: &Checkpoint, config: &RunConfig, note: &dyn Fn(NoteLevel, String)) -> Result<()> {
    let (method, resident) = (config.method.kind, config.memory.dequantized == DequantizedChoice::Resident);
    let moe = checkpoint.config().moe.as_ref();
    // Of a mixed file none stays packed.
    let packed = checkpoint.mxfp4().filter(|_| moe.is_some_and(|moe| moe.mxfp4));
    ensure!(
        moe.is_some() || config.method.target_parameters.is_empty() || !method.has_adapters(),
        "`target_parameters` in [method] names weights of experts, and this model has none: remove it"
    );
    ensure!(
        !resident || packed.is_some() || method == MethodKind::Qlora,
        "`dequantized` in [memory] is about weights in 4 bits, and this model has none with kind = \"lora\": remove it, or set \
         kind = \"qlora\" in [method]"
    );
    if let Some(Quantized { num_weights, num_bytes, .. }) = packed {
        let fate = match method {
            MethodKind::Full => "they are held dequantized, since they train",
            _ if resident => "they are dequantized once, as [memory] says",
            _ => "they stay so, and a block's are dequantized when it needs them",
        };
        note(
            NoteLevel::Info,
            format!("{num_weights} weights of experts are in MXFP4 ({}); {fate}", units::bytes(num_bytes)),
        );
    } else if method == MethodKind::Qlora && moe.is_some() {
        let text =
            "kind = \"qlora\" quantizes the linear layers of attention and dense MLPs; experts are held unquantized";
        note(NoteLevel::Info, text.into());
    }
    let all_sparse = moe.is_some_and(|moe| moe.layers.iter().all(|has_experts| *has_experts));
    if all_sparse && method.has_adapters() {
        let targets = expand_targets(&config.method.target_modules).unwrap_or_default();
        let of_mlp: Vec<&str> = targets.into_iter().filter(|target| PROJECTIONS[4..].contains(target)).collect();
        if !of_mlp.is_empty() && config.method.target_parameters.is_empty() {
            let text = format!(
                "every block has experts in place of an MLP, so {} get no adapters: only attention is adapted; \
                 `target_parameters` in [method] puts adapters on experts",
                of_mlp.join(", ")
            );
            note(NoteLevel::Info, text);
        }
    }
    Ok(())
}

/// Checks that data and model fit each other.
fn check_fits(data: &TrainingData, checkpoint: &Checkpoint, note: &dyn Fn(NoteLevel, String)) -> Result<()> {
    let config = checkpoint.config();
    let (largest, vocab_size) = (data.max_token_id, config.vocab_size);
    ensure!(
        usize::try_from(largest).is_ok_and(|id| id < vocab_size),
        "the tokenizer makes token {largest}, the model's vocabulary has {vocab_size}: tokenizer and model do not belong \
         together"
    );
    let (longest, context) = (data.longest, config.max_position_embeddings);
    if longest > context {
        let text = format!(
            "the longest document has {} tokens, the model was made for {}: set `pack_len` in [packing] to that",
            units::count(longest as u64),
            units::count(context as u64)
        );
        note(NoteLevel::Warning, text);
    }
    if data.eval_batches.is_empty() {
        let text =
            "no records are held out, so there is no held-out loss; set `eval_fraction` or `eval_path` in [data]";
        note(NoteLevel::Info, text.into());
    }
    Ok(())
}

/// One line on the method.
pub(in crate::session) fn describe_method(method: &MethodConfig, optimizer_bits: u32) -> String {
    let of = match method.kind {
        MethodKind::Full => "full fine-tuning".into(),
        MethodKind::Lora => describe_adapters("LoRA", method),
        MethodKind::Qlora => describe_adapters("QLoRA", method),
    };
    if optimizer_bits == 8 { format!("{of}, 8-bit AdamW") } else { of }
}

fn describe_adapters(kind: &str, method: &MethodConfig) -> String {
    let scale = if method.use_rslora { " (rsLoRA)" } else { "" };
    format!("{kind} r{}{scale}", method.r)
}
