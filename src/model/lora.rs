//! Adapters on a model: which projections get one, fresh matrices or given ones.

use anyhow::{bail, ensure};

use super::block::PROJECTIONS;
use super::skeleton::adapter_columns;
use super::transformer::Transformer;
use crate::base::error::Result;
use crate::base::rng::Philox;
use crate::formats::peft::expand_targets;
use crate::layers::parameter::{ParamId, Parameter, Part};
use crate::layers::projection::Lora;
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

    /// Rank of the adapter that module `module` of block `layer` gets; 0 for none, or when [`Transformer::add_lora`] will refuse the targets.
    pub(super) fn rank_of(&self, layer: usize, module: &str) -> usize {
        let targets = expand_targets(&self.target_modules).unwrap_or_default();
        if self.wants(&targets, layer, module) { self.r } else { 0 }
    }

    fn wants<T: AsRef<str>>(&self, targets: &[T], layer: usize, module: &str) -> bool {
        (self.layers_to_transform.is_empty() || self.layers_to_transform.contains(&layer))
            && targets.iter().any(|target| module.ends_with(target.as_ref()))
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
        ensure!(self.adapters().next().is_none(), "the model has adapters already");
        let Self { device, params, blocks, .. } = self;
        let mut index = 0;
        for block in blocks {
            let number = block.index as usize;
            for (modules, projection) in PROJECTIONS.into_iter().zip(block.projections_mut()) {
                let wanted = |module: &str| spec.wants(&targets, number, module);
                let count = modules.iter().filter(|module| wanted(module)).count();
                let columns = adapter_columns(device, spec.r);
                let (matrix, inner, outer) = (projection.matrix, projection.in_features, projection.out_features);
                projection.adapter_columns = count * columns;
                params.make_room(matrix, outer, inner, count * columns);
                let mut first = 0;
                for (module, linear) in modules.iter().zip(&mut projection.linears).filter(|(module, _)| wanted(module))
                {
                    let name = format!("model.layers.{number}.{module}");
                    let bound = 1.0 / (inner as f64).sqrt();
                    let values = || uniform(Philox::new(seed, INIT_STREAM + u64::from(index)), spec.r * inner, bound);
                    let a = Part { matrix, row: outer + first, col: 0, rows: spec.r, cols: inner };
                    let a = params.push_adapter(&format!("{name}.lora_A"), a, values, Some(first));
                    let rows = linear.out_features;
                    let b = Part { matrix, row: linear.first, col: inner + first, rows, cols: spec.r };
                    let b = params.push_adapter(&format!("{name}.lora_B"), b, || vec![0.0; rows * spec.r], None);
                    let (scale, dropout) = (spec.scale as f32, spec.dropout as f32);
                    linear.lora = Some(Lora { a, b, r: spec.r, first, scale, dropout, index });
                    first += columns;
                    index += 1;
                }
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
        let mut missing: std::collections::BTreeSet<String> = self.adapters().map(|(_, p)| p.name.clone()).collect();
        for (name, shape, data) in tensors {
            let id = self.params.find(&name).filter(|&id| is_adapter(self.params.get(id)));
            let Some(id) = id else {
                bail!(
                    "the adapter has {name}, which this run's method does not: match r, target_modules and layers_to_transform to it"
                );
            };
            let own_shape = &self.params.get(id).shape;
            ensure!(
                own_shape == shape,
                "{name} has shape {shape:?} in the adapter and {own_shape:?} in this run: set method.r to the adapter's"
            );
            self.params.set(id, data);
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

    /// The adapter matrices with their ids, in order.
    pub fn adapters(&self) -> impl Iterator<Item = (ParamId, &Parameter)> {
        self.params.iter().filter(|(_, p)| is_adapter(p))
    }
}

fn is_adapter(parameter: &Parameter) -> bool {
    parameter.category == MemoryCategory::Adapters
}

/// `len` values uniform in [−bound, bound).
fn uniform(generator: Philox, len: usize, bound: f64) -> Vec<f32> {
    let values = (0..len.div_ceil(4) as u64).flat_map(|block| generator.block(block));
    values.map(|bits| ((f64::from(bits) / 4_294_967_296.0 * 2.0 - 1.0) * bound) as f32).take(len).collect()
}
