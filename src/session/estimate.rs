//! What a run will take before it starts: `tandem estimate`, and what a run plans by.

use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};

use super::bench;
use super::config::RunConfig;
use super::preview::Preview;
use super::run_loop::preparing::describe_method;
use super::starter;
use super::training_data::{self, TrainingData};
use crate::base::error::Result;
use crate::base::units;
use crate::model::config::ModelConfig;
use crate::model::loading::Checkpoint;
use crate::tensor::Device;
use crate::tensor::memory::available_host_bytes;
use crate::train::config::{DeviceChoice, MethodKind};
pub use crate::train::plan::{HostPart, MemoryPlan, Need, Part, Tried, Workload};
use crate::train::plan::{Machine, Planner};
use crate::train::switches::Switches;
use crate::train::trainer::TrainerSetup;

/// The memory plan of a run as it was made before the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The model.
    pub model: String,
    /// What trains.
    pub method: String,
    /// The card in words.
    pub device: String,
    /// Parameters of the model.
    pub num_parameters: u64,
    /// The plan.
    pub plan: MemoryPlan,
}

/// The estimate for a run configuration on this machine, with the largest pack and the longest document of its data; `None` when `stop` was raised
/// on the way.
///
/// # Errors
/// When the model or the data cannot be read, the run trains on the CPU, or there is no GPU and no limit that stands for one.
pub fn of_run(config: &RunConfig, stop: &AtomicBool) -> Result<Option<Estimate>> {
    let machine = machine(config)?;
    let config = starter::resolved(config)?;
    let checkpoint = Checkpoint::open(&config.model.path)?;
    let config = as_stored(&config, &checkpoint);
    let builder = training_data::example_builder(&config)?;
    let Some(data) = TrainingData::read(&config, &builder, &|_, _, _| (), stop)? else { return Ok(None) };
    let model = checkpoint.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    estimate(model, &config, checkpoint.config(), workload(&config, &data), machine).map(Some)
}

/// As [`of_run`], of data that were looked at. The GPU is asked once: while a run trains on it, what the run takes does not count.
///
/// # Errors
/// As [`of_run`].
pub fn of_preview(config: &RunConfig, preview: &Preview) -> Result<Estimate> {
    static SEEN: OnceLock<Result<Machine, String>> = OnceLock::new();
    let seen = || machine(&RunConfig::default()).map_err(|error| format!("{error:#}"));
    let machine = match SEEN.get_or_init(seen) {
        Ok(seen) if config.train.device != DeviceChoice::Cpu => {
            let vram_bytes = config.train.vram_limit_bytes().unwrap_or(u64::MAX).min(seen.vram_bytes);
            Machine { vram_bytes, host_bytes: available_host_bytes(), ..seen.clone() }
        }
        _ => machine(config)?,
    };
    let checkpoint = Checkpoint::open(&starter::resolve_model(&config.model.path)?)?;
    let model = checkpoint.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let config = &as_stored(config, &checkpoint);
    estimate(model, config, checkpoint.config(), workload(config, preview.data()), machine)
}

/// The estimate for a model of known shape (a name of [`bench::known_models`] or the path of a config.json) that is trained as `config` says; of its
/// sections `model` and `data` nothing counts. Packs are full, with documents of at most `longest` tokens.
///
/// # Errors
/// When there is no such model, or as [`of_run`].
pub fn of_shape(shape: &str, config: &RunConfig, longest: Option<usize>) -> Result<Estimate> {
    let machine = machine(config)?;
    let model = bench::model_config(shape)?;
    let (tokens, batches) = (config.packing.pack_len, config.train.grad_accum_steps);
    let longest = longest.unwrap_or(tokens);
    ensure!(
        (2..=tokens).contains(&longest),
        "the longest document must have from 2 to {tokens} tokens, found {longest}"
    );
    estimate(shape.to_owned(), config, &model, Workload { tokens, longest, batches }, machine)
}

/// Whether `model` is a shape that [`of_shape`] takes, and no model with weights and a tokenizer.
pub fn is_shape(model: &str) -> bool {
    bench::known_models().any(|name| name == model) || Path::new(model).extension().is_some_and(|e| e == "json")
}

fn estimate(
    name: String,
    config: &RunConfig,
    model: &ModelConfig,
    work: Workload,
    machine: Machine,
) -> Result<Estimate> {
    let planner = planner(config, model, work, machine, 1);
    let plan = planner.plan();
    if plan.need().is_none() {
        bail!("{}", plan.choice().against.as_deref().unwrap_or("nothing could be planned"));
    }
    let Machine { card, vram_bytes, .. } = &planner.machine;
    Ok(Estimate {
        model: name,
        method: describe_method(&config.method, config.optimizer.bits),
        device: match card.vram_bytes == *vram_bytes {
            true => card.name.clone(),
            false => format!("{}, used up to {}", card.name, units::bytes(*vram_bytes)),
        },
        num_parameters: model.num_parameters(),
        plan,
    })
}

/// The configuration as the weights of `checkpoint` are: what is stored in 4 bits keeps its scales as they are stored.
pub fn as_stored(config: &RunConfig, checkpoint: &Checkpoint) -> RunConfig {
    let mut config = config.clone();
    if let Some(quantized) = checkpoint.quantized().filter(|_| config.method.kind == MethodKind::Qlora) {
        config.method.double_quant = quantized.double_quant;
    }
    config
}

/// The largest step that a run takes.
pub fn workload(config: &RunConfig, data: &TrainingData) -> Workload {
    let tokens = data.plan.largest_batch().max(2);
    Workload { tokens, longest: data.longest.clamp(2, tokens), batches: config.train.grad_accum_steps }
}

/// What a run on a GPU plans with.
pub fn planner(config: &RunConfig, model: &ModelConfig, work: Workload, machine: Machine, total_steps: u64) -> Planner {
    Planner {
        config: model.clone(),
        setup: TrainerSetup {
            method: config.method.clone(),
            optimizer: config.optimizer.clone(),
            switches: Switches::of(&config.train, &config.optimizations, &config.memory),
            seed: config.seed,
            total_steps,
        },
        activations: config.train.activations,
        memory: Some(config.memory.clone()),
        work,
        machine,
    }
}

/// The GPU of this machine, or, without one, a card with as much memory as the configuration allows.
fn machine(config: &RunConfig) -> Result<Machine> {
    ensure!(
        config.train.device != DeviceChoice::Cpu,
        "the run trains on the CPU, which has no plan: it takes what the system gives; set device = \"auto\" in [train]"
    );
    match Device::cuda_within(config.train.vram_limit_bytes()) {
        Ok(Device::Cuda(gpu)) => Ok(Machine::of(&gpu)),
        Ok(Device::Cpu(_)) => bail!("the CPU was found where a GPU was asked for"),
        Err(none) => match config.train.vram_limit_bytes() {
            Some(vram_bytes) => Ok(Machine::assumed(vram_bytes, true)),
            None => bail!(
                "the run trains on the CPU here: there is {none}; with vram_limit_gib in [train] (--vram-gib) it is planned for a \
                 card with as much memory"
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::config::Override;

    fn config(overrides: &[(&str, &str)]) -> RunConfig {
        let given = [("model.path", "starter"), ("data.path", "starter")];
        let overrides = given.iter().chain(overrides).map(|(field, value)| Override {
            flag: (*field).into(),
            field: (*field).into(),
            value: (*value).into(),
        });
        RunConfig::load_with(None, &overrides.collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_shape_is_planned_for_a_card_of_the_given_size() {
        let config = config(&[("train.vram_limit_gib", "24"), ("packing.pack_len", "4096"), ("method.r", "8")]);
        let estimate = of_shape("llama-3.2-1b", &config, Some(512)).unwrap();
        assert_eq!((estimate.plan.work.tokens, estimate.plan.work.longest), (4096, 512));
        assert_eq!(estimate.plan.vram_bytes, 24 << 30);
        assert!(estimate.plan.fits() && estimate.method.contains("r8"), "{estimate:?}");
        let text = serde_json::to_string(&estimate).unwrap();
        assert_eq!(serde_json::from_str::<Estimate>(&text).unwrap(), estimate);
        assert!(of_shape("llama-3.2-1b", &config, Some(5000)).unwrap_err().to_string().contains("from 2 to 4096"));
        assert!(of_shape("llama-9", &config, None).unwrap_err().to_string().contains("llama-3.1-8b"));
    }

    #[test]
    fn without_a_card_or_on_the_cpu_it_says_what_to_give() {
        let error = of_shape("qwen3-0.6b", &config(&[("train.device", "cpu")]), None).unwrap_err().to_string();
        assert!(error.contains("device = \"auto\""), "{error}");
        if Device::cuda().is_err() {
            let error = of_shape("qwen3-0.6b", &config(&[]), None).unwrap_err().to_string();
            assert!(error.contains("--vram-gib"), "{error}");
        }
    }

    #[test]
    fn shapes_are_known_names_and_configurations() {
        assert!(is_shape("qwen3-8b") && is_shape("some/config.json"));
        assert!(!is_shape("starter") && !is_shape("models/Qwen3-8B"));
    }
}
