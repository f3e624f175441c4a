//! Adapters as PEFT stores them: `adapter_config.json` and `adapter_model.safetensors` in one folder.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use crate::base::error::Result;
use crate::base::files;
use crate::formats::peft::{AdapterConfig, CONFIG_FILE, EXPERT_PARAMETERS, PROJECTIONS, WEIGHTS_FILE};
use crate::formats::safetensors::{Dtype, SafetensorsFile, TensorSpec, write};
use crate::model::config::ModelConfig;

/// What PEFT puts before the module names of the base model.
const PREFIX: &str = "base_model.model.";

/// A matrix of an adapter under its name in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// As made by [`tensor_name`].
    pub name: String,
    /// `[r, in]` for A, `[out, r]` for B.
    pub shape: Vec<usize>,
    /// Values, row-major.
    pub data: Vec<f32>,
}

/// A whole adapter in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterWeights {
    /// Its shape and scale.
    pub config: AdapterConfig,
    /// Its matrices: an A and a B for every adapted module.
    pub tensors: Vec<NamedTensor>,
}

/// Which of the two matrices of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// `lora_A` [r, in].
    A,
    /// `lora_B` [out, r].
    B,
}

/// The name in the file of a matrix of `module`, for example of `model.layers.0.self_attn.q_proj`:
/// `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
pub fn tensor_name(module: &str, side: Side) -> String {
    let side = match side {
        Side::A => "lora_A",
        Side::B => "lora_B",
    };
    format!("{PREFIX}{module}.{side}.weight")
}

/// The module and side that a name in the file stands for; the adapter's own name (`.default`) may be in it.
pub fn parse_name(name: &str) -> Option<(&str, Side)> {
    let rest = name.strip_prefix(PREFIX)?.strip_suffix(".weight")?;
    let rest = rest.strip_suffix(".default").unwrap_or(rest);
    let (module, side) = rest.rsplit_once('.')?;
    match side {
        "lora_A" => Some((module, Side::A)),
        "lora_B" => Some((module, Side::B)),
        _ => None,
    }
}

/// What an adapter of a block is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adapted {
    /// A linear layer, one of [`PROJECTIONS`].
    Projection(&'static str),
    /// The module of routed experts. PEFT wraps it once for each adapted parameter, the inner one as `base_layer`.
    Experts { inner: bool },
}

/// Block number and adapted thing of a module such as `model.layers.3.mlp.up_proj`.
fn place(module: &str) -> Option<(usize, Adapted)> {
    let (layer, rest) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let (parent, name) = rest.split_once('.')?;
    let layer = layer.parse().ok()?;
    if let ("mlp", "experts" | "experts.base_layer") = (parent, name) {
        return Some((layer, Adapted::Experts { inner: name != "experts" }));
    }
    let at = PROJECTIONS.iter().position(|p| *p == name)?;
    // The first four are the attention's, the others the MLP's.
    let right = if at < 4 { "self_attn" } else { "mlp" };
    (parent == right).then_some((layer, Adapted::Projection(PROJECTIONS[at])))
}

/// The module under which PEFT keeps the adapters of a parameter of experts, one of [`EXPERT_PARAMETERS`] by number; `None` where `adapted` says that it
/// has none.
fn experts_module(parameter: usize, adapted: [bool; 2]) -> Option<&'static str> {
    let inner = adapted == [true, true] && parameter == 0;
    adapted[parameter].then_some(if inner { "mlp.experts.base_layer" } else { "mlp.experts" })
}

impl AdapterWeights {
    /// Check names, shapes and completeness against the adapter's own configuration.
    ///
    /// # Errors
    /// When a name is not one of an adapted projection, a matrix has another rank than the configuration or no partner,
    /// or the number of values does not fit the shape.
    pub fn check(&self) -> Result<()> {
        let (projections, experts) = (self.config.projections()?, self.config.experts()?);
        let mut sides: HashMap<&str, [bool; 2]> = HashMap::new();
        for t in &self.tensors {
            let name = &t.name;
            let (module, side) = parse_name(name).with_context(|| format!("tensor {name} is not a LoRA matrix"))?;
            let Some((layer, adapted)) = place(module) else {
                bail!("tensor {name} belongs to no linear layer of a block");
            };
            // PEFT does not ask `layers_to_transform` about parameters of experts.
            let wanted = match adapted {
                Adapted::Projection(projection) => projections.contains(&projection) && self.config.has_layer(layer),
                Adapted::Experts { inner: true } => experts == [true, true],
                Adapted::Experts { inner: false } => experts.contains(&true),
            };
            ensure!(
                wanted,
                "tensor {name} belongs to a module that target_modules, target_parameters and layers_to_transform leave out"
            );
            let r = self.config.r;
            let fits = match (side, t.shape.as_slice()) {
                (Side::A, [rank, _]) | (Side::B, [_, rank]) => match adapted {
                    Adapted::Projection(_) => *rank == r,
                    // One below or beside the other.
                    Adapted::Experts { .. } => *rank > 0 && rank.is_multiple_of(r),
                },
                _ => false,
            };
            ensure!(fits, "tensor {name} has shape {:?}, which does not fit r = {r}", t.shape);
            ensure!(
                t.data.len() == t.shape.iter().product::<usize>(),
                "tensor {name} has {} values, its shape {:?} takes others",
                t.data.len(),
                t.shape
            );
            let seen = &mut sides.entry(module).or_default()[usize::from(side == Side::B)];
            ensure!(!*seen, "tensor {name} is there twice");
            *seen = true;
        }
        ensure!(!sides.is_empty(), "there are no LoRA matrices");
        if let Some((module, _)) = sides.iter().find(|(_, s)| **s != [true, true]) {
            bail!("module {module} has only one of its two LoRA matrices");
        }
        Ok(())
    }

    /// Check that the adapter fits a model: every adapted module exists in it with these dimensions, and no module that
    /// the configuration names is left without its matrices.
    ///
    /// # Errors
    /// When it does not; the message names the first module that does not fit.
    pub fn check_fits(&self, model: &ModelConfig) -> Result<()> {
        self.check()?;
        let by_name: HashMap<&str, &NamedTensor> = self.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
        if let Some(layer) = self.config.layers_to_transform.iter().find(|l| **l >= model.num_hidden_layers) {
            bail!("the adapter is for block {layer}, the model has {} blocks", model.num_hidden_layers);
        }
        let (projections, experts) = (self.config.projections()?, self.config.experts()?);
        let mut wanted = 0;
        for (name, shape) in model.expected_tensors() {
            let Some((module, rank)) = self.adapted_module(&name, &shape, &projections, experts) else { continue };
            let [.., out, inner] = shape[..] else { continue };
            for (side, want) in [(Side::A, [rank, inner]), (Side::B, [out, rank])] {
                let key = tensor_name(&module, side);
                let t = by_name.get(key.as_str()).with_context(|| format!("the adapter has no {key}"))?;
                ensure!(t.shape == want, "the adapter's {key} has shape {:?}, this model takes {want:?}", t.shape);
                wanted += 1;
            }
        }
        ensure!(wanted == self.tensors.len(), "the adapter has matrices for blocks that the model does not have");
        Ok(())
    }

    /// The module under which the adapter of a weight is kept, and its rank there (that of all experts together); `None` where it has none.
    fn adapted_module(
        &self,
        name: &str,
        shape: &[usize],
        projections: &[&str],
        experts: [bool; 2],
    ) -> Option<(String, usize)> {
        let r = self.config.r;
        if let [num_experts, ..] = *shape
            && let Some((parameter, block)) =
                EXPERT_PARAMETERS.iter().enumerate().find_map(|(i, end)| Some((i, name.strip_suffix(end)?)))
        {
            let module = experts_module(parameter, experts)?;
            return Some((format!("{block}{module}"), r * num_experts));
        }
        let module = name.strip_suffix(".weight")?;
        let (layer, Adapted::Projection(projection)) = place(module)? else { return None };
        (self.config.has_layer(layer) && projections.contains(&projection)).then(|| (module.to_owned(), r))
    }
}

/// Write an adapter into `folder`, which is created where it does not exist. PEFT loads it from there.
///
/// A new folder appears complete or not at all. In a folder that holds an adapter already, the old one stays whole until
/// the new files are on disk; if the configuration changes too, the configuration is taken away before the weights are
/// exchanged, so a crash can leave a folder without an adapter, but never one that mixes two.
///
/// # Errors
/// When the adapter contradicts itself ([`AdapterWeights::check`]) or the folder cannot be written.
pub fn save(adapter: &AdapterWeights, folder: &Path) -> Result<()> {
    let context = || format!("cannot save the adapter in {}", folder.display());
    adapter.check().with_context(context)?;
    let config = adapter.config.to_json().with_context(context)?;
    if folder.exists() {
        let config_path = folder.join(CONFIG_FILE);
        if std::fs::read_to_string(&config_path).is_ok_and(|old| old != config) {
            let weights = folder.join(WEIGHTS_FILE);
            // The new weights first go beside the old ones: a full disk must not cost the old adapter.
            let staged = tempfile::Builder::new().prefix(".tandem-").tempdir_in(folder).with_context(context)?;
            let new_weights = staged.path().join(WEIGHTS_FILE);
            write_weights(&new_weights, adapter).with_context(context)?;
            std::fs::remove_file(&config_path).with_context(context)?;
            std::fs::rename(&new_weights, &weights).with_context(context)?;
            files::sync_folder(folder);
        } else {
            write_weights(&folder.join(WEIGHTS_FILE), adapter).with_context(context)?;
        }
        return write_config(&config_path, &config).with_context(context);
    }
    files::create_folder_atomic(folder, |new| {
        write_weights(&new.join(WEIGHTS_FILE), adapter)?;
        write_config(&new.join(CONFIG_FILE), &config)
    })
    .with_context(context)
}

fn write_config(path: &Path, text: &str) -> Result<()> {
    files::write_atomic(path, |out| Ok(out.write_all(text.as_bytes())?))
}

fn write_weights(path: &Path, adapter: &AdapterWeights) -> Result<()> {
    let mut tensors: Vec<&NamedTensor> = adapter.tensors.iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    // Names go without `.default`, as PEFT writes them.
    let mut by_name = HashMap::new();
    let mut specs = Vec::new();
    for t in tensors {
        let (module, side) = parse_name(&t.name).with_context(|| format!("tensor {} is not a LoRA matrix", t.name))?;
        let name = tensor_name(module, side);
        by_name.insert(name.clone(), &t.data);
        specs.push(TensorSpec { name, dtype: Dtype::F32, shape: t.shape.clone() });
    }
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write(path, &metadata, &specs, |spec| {
        let data = by_name.get(&spec.name).context("its values are missing")?;
        Ok(data.as_slice().into())
    })
}

/// Read an adapter from its folder, whether Tandem or PEFT wrote it.
///
/// # Errors
/// When a file is missing or broken, the adapter is not plain LoRA, or it contradicts itself.
pub fn load(folder: &Path) -> Result<AdapterWeights> {
    read(folder).with_context(|| format!("cannot load the adapter in {}", folder.display()))
}

fn read(folder: &Path) -> Result<AdapterWeights> {
    let config_path = folder.join(CONFIG_FILE);
    let text = std::fs::read_to_string(&config_path).with_context(|| format!("cannot read {CONFIG_FILE}"))?;
    let config = AdapterConfig::from_json(&text).with_context(|| format!("cannot use {CONFIG_FILE}"))?;
    let weights = folder.join(WEIGHTS_FILE);
    if !weights.exists() && folder.join("adapter_model.bin").exists() {
        bail!(
            "its weights are in adapter_model.bin, a format that can run code when it is opened, so Tandem does not read it; \
             save it again with a current PEFT, which writes {WEIGHTS_FILE}"
        );
    }
    let file = SafetensorsFile::open(&weights)?;
    let mut tensors = Vec::new();
    for name in file.names() {
        let (module, side) = parse_name(name)
            .with_context(|| format!("{WEIGHTS_FILE}: tensor {name} is not a LoRA matrix of a linear layer"))?;
        let shape = file.info(name).map(|i| i.shape.clone()).unwrap_or_default();
        tensors.push(NamedTensor { name: tensor_name(module, side), shape, data: file.to_f32(name)? });
    }
    let adapter = AdapterWeights { config, tensors };
    adapter.check()?;
    Ok(adapter)
}

#[cfg(test)]
#[path = "adapter_tests.rs"]
mod tests;
