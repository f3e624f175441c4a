//! Adapters on a model: which projections get one, fresh matrices or given ones.

use anyhow::{bail, ensure};

use super::transformer::Transformer;
use crate::base::error::Result;
use crate::base::rng::Philox;
use crate::formats::peft::expand_targets;
use crate::layers::linear::Lora;
use crate::layers::parameter::Parameter;
use crate::tensor::MemoryCategory;

/// Random stream of adapter number 0; the others follow. Above the streams of shuffling (small numbers) and of dropout (the step in the upper
/// bits): dropout would get here after 182 million steps.
const INIT_STREAM: u64 = 0xADA9_7E20_0000_0000;

/// Shape and placement of the adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraSpec {
    /// Rank.
    pub r: usize,
    /// Factor on the adapter's output.
    pub scale: f64,
    /// Probability of dropping an input.
    pub dropout: f64,
    /// Projections, by name; `all-linear` alone means all seven.
    pub target_modules: Vec<String>,
    /// Blocks; empty means all.
    pub layers_to_transform: Vec<usize>,
}

impl LoraSpec {
    /// The scale of an adapter: `lora_alpha / r`, or `lora_alpha / √r` (rsLoRA, arXiv 2312.03732).
    pub fn scale(r: usize, lora_alpha: f64, use_rslora: bool) -> f64 {
        if use_rslora { lora_alpha / (r as f64).sqrt() } else { lora_alpha / r as f64 }
    }
}

impl Transformer {
    /// Puts an adapter on every projection that `spec` names: `lora_A` uniform in ±1/√in (PEFT's Kaiming start with a = √5), `lora_B` zero.
    ///
    /// # Errors
    /// When `spec` names a projection or a block that the model does not have, or the model has adapters already.
    pub fn add_lora(&mut self, spec: &LoraSpec, seed: u64) -> Result<()> {
        let targets = expand_targets(&spec.target_modules)?;
        let num_layers = self.config.num_hidden_layers;
        if let Some(layer) = spec.layers_to_transform.iter().find(|&&layer| layer >= num_layers) {
            bail!("layers_to_transform names block {layer}; this model has blocks 0 to {}", num_layers - 1);
        }
        ensure!(spec.r >= 1, "an adapter's rank r must be at least 1");
        ensure!((0.0..1.0).contains(&spec.dropout), "lora_dropout must lie in 0 ≤ p < 1, found {}", spec.dropout);
        let mut index = 0;
        for block in &mut self.blocks {
            let number = block.index as usize;
            let wanted = spec.layers_to_transform.is_empty() || spec.layers_to_transform.contains(&number);
            for (module, linear) in block.linears_mut() {
                ensure!(linear.lora.is_none(), "block {number} has an adapter on {module} already");
                if !wanted || !targets.iter().any(|target| module.ends_with(target)) {
                    continue;
                }
                let name = format!("model.layers.{number}.{module}");
                let bound = 1.0 / (linear.in_features as f64).sqrt();
                let values =
                    uniform(Philox::new(seed, INIT_STREAM + u64::from(index)), spec.r * linear.in_features, bound);
                let mut push = |suffix: &str, shape: [usize; 2], data| {
                    self.params.push(Parameter::adapter(&self.device, format!("{name}.{suffix}"), &shape, data))
                };
                let a = push("lora_A", [spec.r, linear.in_features], values);
                let b = push("lora_B", [linear.out_features, spec.r], vec![0.0; linear.out_features * spec.r]);
                linear.lora = Some(Lora { a, b, scale: spec.scale as f32, dropout: spec.dropout as f32, index });
                index += 1;
            }
        }
        ensure!(index > 0, "no projection gets an adapter: check target_modules and layers_to_transform");
        Ok(())
    }

    /// Replaces the values of all adapters. `tensors` gives (name as in [`Parameter::name`], shape, values) and must name each adapter matrix once.
    ///
    /// # Errors
    /// When a matrix is missing, unknown, or of another shape.
    pub fn set_adapters<'a>(
        &mut self,
        tensors: impl IntoIterator<Item = (String, &'a [usize], &'a [f32])>,
    ) -> Result<()> {
        let mut missing: std::collections::BTreeSet<String> = self.adapters().map(|p| p.name.clone()).collect();
        for (name, shape, data) in tensors {
            let parameter = self.params.iter_mut().map(|(_, p)| p).find(|p| p.name == name && is_adapter(p));
            let Some(parameter) = parameter else {
                bail!(
                    "the adapter has {name}, which this run's method does not: match r, target_modules and layers_to_transform to it"
                );
            };
            ensure!(
                parameter.value.shape() == shape,
                "{name} has shape {shape:?} in the adapter and {:?} in this run: set method.r to the adapter's",
                parameter.value.shape()
            );
            parameter.set(data);
            missing.remove(&name);
        }
        if let Some(name) = missing.first() {
            bail!(
                "the adapter lacks {name} (and {} more): match target_modules and layers_to_transform to it",
                missing.len() - 1
            );
        }
        Ok(())
    }

    /// The adapter matrices, in order.
    pub fn adapters(&self) -> impl Iterator<Item = &Parameter> {
        self.params.iter().map(|(_, p)| p).filter(|p| is_adapter(p))
    }
}

fn is_adapter(parameter: &Parameter) -> bool {
    parameter.value.category() == MemoryCategory::Adapters
}

/// `len` values uniform in [−bound, bound).
fn uniform(generator: Philox, len: usize, bound: f64) -> Vec<f32> {
    let values = (0..len.div_ceil(4) as u64).flat_map(|block| generator.block(block));
    values.map(|bits| ((f64::from(bits) / 4_294_967_296.0 * 2.0 - 1.0) * bound) as f32).take(len).collect()
}
