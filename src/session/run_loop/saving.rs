//! What a run leaves behind: its adapter (or its model, for full fine-tuning), and the adapter it starts from.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use crate::base::error::Result;
use crate::export;
use crate::export::adapter::{self, AdapterWeights, NamedTensor, Side};
use crate::formats::peft::{AdapterConfig, PROJECTIONS};
use crate::formats::safetensors::Dtype;
use crate::model::loading::Checkpoint;
use crate::model::transformer::Transformer;
use crate::train::config::{MethodConfig, MethodKind};
use crate::train::trainer::Trainer;

/// Suffixes of adapter parameters in the engine, and the matrix each is.
const SUFFIXES: [(&str, Side); 2] = [(".lora_A", Side::A), (".lora_B", Side::B)];

/// Where something was saved, and what the user should know about it.
pub(super) struct Saved {
    pub path: PathBuf,
    pub notes: Vec<String>,
}

/// Writes what was trained into `<folder>/adapter<suffix>`, or `<folder>/model<suffix>` for full fine-tuning.
///
/// # Errors
/// When the folder cannot be written.
pub(super) fn save(
    trainer: &Trainer,
    method: &MethodConfig,
    checkpoint: &Checkpoint,
    folder: &Path,
    suffix: &str,
) -> Result<Saved> {
    let model = trainer.model();
    match method.kind {
        MethodKind::Lora | MethodKind::Qlora => {
            let path = folder.join(format!("adapter{suffix}"));
            adapter::save(&weights(model, method, checkpoint.path())?, &path)?;
            Ok(Saved { path, notes: Vec::new() })
        }
        MethodKind::Full => {
            let path = folder.join(format!("model{suffix}"));
            let notes = export::model::save(&path, model.config(), Dtype::F32, checkpoint.path(), |name| {
                let id = model.params().find(name).with_context(|| format!("the model has no {name}"))?;
                let values = model.params().to_vec(id);
                model.device().check()?;
                Ok(Cow::Owned(values))
            })?;
            Ok(Saved { path, notes })
        }
    }
}

/// The adapter of a model in PEFT's names.
fn weights(model: &Transformer, method: &MethodConfig, base: &Path) -> Result<AdapterWeights> {
    let mut tensors = Vec::new();
    for (id, parameter) in model.adapters() {
        let Some((module, side)) = split(&parameter.name) else {
            bail!("{} is not a matrix of an adapter", parameter.name);
        };
        tensors.push(NamedTensor {
            name: adapter::tensor_name(module, side),
            shape: model.adapter_shape(id),
            data: model.adapter_layout(id, model.params().to_vec(id)),
        });
    }
    model.device().check()?;
    // The modules that have matrices, and no others: PEFT reads the names of an MLP's layers as experts in some families.
    let has = |name: &&&str| model.adapters().any(|(_, parameter)| parameter.name.contains(&format!(".{name}.lora_")));
    let target_modules = PROJECTIONS.iter().filter(has).map(|name| (*name).to_owned()).collect();
    let config = AdapterConfig {
        base_model_name_or_path: Some(base.display().to_string()),
        r: method.r,
        lora_alpha: method.lora_alpha,
        lora_dropout: method.lora_dropout,
        use_rslora: method.use_rslora,
        target_modules,
        target_parameters: method.target_parameters.clone(),
        layers_to_transform: method.layers_to_transform.clone(),
    };
    Ok(AdapterWeights { config, tensors })
}

fn split(name: &str) -> Option<(&str, Side)> {
    SUFFIXES.iter().find_map(|(suffix, side)| Some((name.strip_suffix(suffix)?, *side)))
}

/// Puts the adapter in `folder` in the place of the fresh one.
///
/// # Errors
/// When it cannot be read, does not fit the model, or has another shape or scale than the run's method.
pub(super) fn set_init_adapter(trainer: &mut Trainer, method: &MethodConfig, folder: &Path) -> Result<()> {
    let context = || format!("`init_adapter` in [method]: cannot start from {}", folder.display());
    let start = adapter::load(folder).with_context(context)?;
    start.check_fits(trainer.model().config()).with_context(context)?;
    ensure!(
        start.config.r == method.r,
        "{}: its rank is {}, the run's is {}: set r = {}",
        context(),
        start.config.r,
        method.r,
        start.config.r
    );
    let scale = AdapterConfig {
        r: method.r,
        lora_alpha: method.lora_alpha,
        use_rslora: method.use_rslora,
        ..start.config.clone()
    }
    .scale();
    ensure!(
        start.config.scale() == scale,
        "{}: its output is scaled by {}, the run's by {scale}: set lora_alpha = {} and use_rslora = {}",
        context(),
        start.config.scale(),
        start.config.lora_alpha,
        start.config.use_rslora
    );
    let mut tensors = Vec::new();
    for tensor in &start.tensors {
        let (module, side) = adapter::parse_name(&tensor.name).with_context(context)?;
        let suffix = SUFFIXES.iter().find(|(_, s)| *s == side).map_or("", |(suffix, _)| suffix);
        tensors.push((format!("{module}{suffix}"), tensor.shape.as_slice(), tensor.data.as_slice()));
    }
    trainer.model_mut().set_adapters(tensors).with_context(context)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::testing::tiny;
    use crate::ops::testing::cpu;
    use crate::train::config::OptimizerConfig;
    use crate::train::switches::Switches;
    use crate::train::trainer::TrainerSetup;

    #[test]
    fn an_adapter_names_the_modules_that_have_matrices_and_no_others() {
        let experts = json!({
            "model_type": "qwen3_moe", "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
            "num_hidden_layers": 2
        });
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"];
        let on_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
        for (targets, parameters, want) in [
            (&["all-linear"][..], &[][..], &attention[..]),
            (&["all-linear"], &on_experts, &attention),
            (&["v_proj", "up_proj"], &on_experts[1..], &["v_proj"]),
            (&[], &on_experts, &[]),
        ] {
            let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
            let method = MethodConfig {
                r: 2,
                target_modules: names(targets),
                target_parameters: names(parameters),
                ..MethodConfig::default()
            };
            let optimizer = OptimizerConfig::default();
            let setup = TrainerSetup {
                method: method.clone(),
                optimizer,
                switches: Switches::default(),
                seed: 0,
                total_steps: 1,
            };
            let trainer = Trainer::new(tiny(&cpu(1), &experts), setup).unwrap();
            let saved = weights(trainer.model(), &method, Path::new("base")).unwrap();
            assert_eq!(
                (&saved.config.target_modules, &saved.config.target_parameters),
                (&names(want), &names(parameters))
            );
            saved.check_fits(trainer.model().config()).unwrap();
            // And so it is from its file.
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("adapter");
            adapter::save(&saved, &path).unwrap();
            let read = adapter::load(&path).unwrap();
            assert_eq!(read.config.target_modules, names(want));
            read.check_fits(trainer.model().config()).unwrap();
        }
    }
}
