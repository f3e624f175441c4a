//! Adapters on a model: which projections get one, fresh matrices or given ones.

use anyhow::{bail, ensure};

use super::block::Block;
use super::skeleton::adapter_columns;
use super::transformer::Transformer;
use crate::base::error::Result;
use crate::base::rng::Philox;
use crate::formats::peft::{expand_targets, expert_targets};
use crate::layers::feed_forward::FeedForward;
use crate::layers::moe::ExpertsLora;
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
    /// Projections, by name; `all-linear` alone means all of a block, but for those of routed experts.
    pub target_modules: Vec<String>,
    /// Weights of routed experts, by name: `mlp.experts.gate_up_proj`, `mlp.experts.down_proj`; in every block, as in PEFT.
    pub target_parameters: Vec<String>,
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
        let targets = self.targets().unwrap_or_default();
        if self.wants(&targets, layer, module) { self.r } else { 0 }
    }

    fn wants<T: AsRef<str>>(&self, targets: &[T], layer: usize, module: &str) -> bool {
        self.has_layer(layer) && targets.iter().any(|target| module.ends_with(target.as_ref()))
    }

    fn has_layer(&self, layer: usize) -> bool {
        self.layers_to_transform.is_empty() || self.layers_to_transform.contains(&layer)
    }

    /// The linear layers that [`Self::target_modules`] means: none where only experts get adapters.
    fn targets(&self) -> Result<Vec<&'static str>> {
        if self.target_modules.is_empty() && !self.target_parameters.is_empty() {
            return Ok(Vec::new());
        }
        expand_targets(&self.target_modules)
    }
}

impl Transformer {
    /// Puts an adapter on every projection that `spec` names: `lora_A` uniform in ±1/√in (PEFT's Kaiming start with a = √5), `lora_B` zero.
    ///
    /// # Errors
    /// When `spec` names a projection or a block that the model does not have, or the model has adapters already.
    pub fn add_lora(&mut self, spec: &LoraSpec, seed: u64) -> Result<()> {
        let targets = spec.targets()?;
        let on_experts = expert_targets(&spec.target_parameters)?;
        if on_experts.contains(&true) {
            ensure!(
                self.config.moe.is_some(),
                "target_parameters names weights of experts, which this model does not have"
            );
            ensure!(
                spec.dropout == 0.0,
                "lora_dropout must be 0 where target_parameters names weights of experts, as in PEFT"
            );
        }
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
            for (modules, projection) in block.projections_mut() {
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
            let FeedForward::Moe(moe) = &mut block.mlp else { continue };
            let num_experts = moe.num_experts;
            // PEFT wraps the module once for each parameter: the inner one is called `base_layer`.
            let names = if on_experts == [true, true] { [".base_layer", ""] } else { ["", ""] };
            let layers = [&mut moe.gate_up, &mut moe.down].into_iter().zip(names).zip(on_experts);
            // In every block: PEFT does not ask `layers_to_transform` about parameters.
            for ((experts, name), _) in layers.filter(|(_, wanted)| *wanted) {
                let name = format!("model.layers.{number}.mlp.experts{name}");
                let (r, inner, outer) = (spec.r, experts.in_features, num_experts * experts.out_features);
                let bound = 1.0 / (inner as f64).sqrt();
                let generator = Philox::new(seed, INIT_STREAM + u64::from(index));
                let a = || uniform(generator, num_experts * r * inner, bound);
                let a = params.push_own_adapter(&format!("{name}.lora_A"), &[num_experts * r, inner], a);
                let b = params.push_own_adapter(&format!("{name}.lora_B"), &[outer, r], || vec![0.0; outer * r]);
                experts.lora = Some(ExpertsLora { a, b, r, scale: spec.scale as f32 });
                index += 1;
            }
        }
        ensure!(
            index > 0,
            "no projection gets an adapter: check target_modules, target_parameters and layers_to_transform"
        );
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
            let own_shape = self.adapter_shape(id);
            ensure!(
                own_shape == shape,
                "{name} has shape {shape:?} in the adapter and {own_shape:?} in this run: set method.r to the adapter's"
            );
            match self.experts_of_b(id) {
                Some(experts) => self.params.set(id, &experts_first(data, experts, shape[0])),
                None => self.params.set(id, data),
            }
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

    /// Shape of an adapter matrix as PEFT stores it: `lora_B` of experts is [out, r·E], the expert fastest.
    pub fn adapter_shape(&self, id: ParamId) -> Vec<usize> {
        let shape = &self.params.get(id).shape;
        match self.experts_of_b(id) {
            Some(experts) => vec![shape[0] / experts, shape[1] * experts],
            None => shape.clone(),
        }
    }

    /// Values in the order of [`Self::adapter_shape`], from those in the order of the parameter: of an adapter matrix, or of its gradient.
    pub fn adapter_layout(&self, id: ParamId, values: Vec<f32>) -> Vec<f32> {
        match self.experts_of_b(id) {
            Some(experts) => experts_last(&values, experts, self.params.get(id).shape[0] / experts),
            None => values,
        }
    }

    /// Number of experts, where the parameter is the `lora_B` of experts.
    fn experts_of_b(&self, id: ParamId) -> Option<usize> {
        let experts = self.config.moe.as_ref()?.num_experts;
        let mut adapters = self.blocks.iter().filter_map(Block::experts).flatten().filter_map(|experts| experts.lora);
        adapters.any(|lora| lora.b == id).then_some(experts)
    }

    /// The adapter matrices with their ids, in order.
    pub fn adapters(&self) -> impl Iterator<Item = (ParamId, &Parameter)> {
        self.params.iter().filter(|(_, p)| is_adapter(p))
    }
}

fn is_adapter(parameter: &Parameter) -> bool {
    parameter.category == MemoryCategory::Adapters
}

/// [E, out, r] → [out, r, E].
fn experts_last(values: &[f32], experts: usize, out: usize) -> Vec<f32> {
    let r = values.len() / (experts * out);
    let at = |i: usize| values[i % experts * out * r + i / experts];
    (0..values.len()).map(at).collect()
}

/// [out, r, E] → [E, out, r].
fn experts_first(values: &[f32], experts: usize, out: usize) -> Vec<f32> {
    let r = values.len() / (experts * out);
    let at = |i: usize| values[i % (out * r) * experts + i / (out * r)];
    (0..values.len()).map(at).collect()
}

/// `len` values uniform in [−bound, bound).
fn uniform(generator: Philox, len: usize, bound: f64) -> Vec<f32> {
    let values = (0..len.div_ceil(4) as u64).flat_map(|block| generator.block(block));
    values.map(|bits| ((f64::from(bits) / 4_294_967_296.0 * 2.0 - 1.0) * bound) as f32).take(len).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_experts_turns_there_and_back() {
        // Two experts, three outputs, rank 2: value = 100·expert + 10·out + r.
        let own: Vec<f32> = (0..12).map(|i| (i / 6 * 100 + i % 6 / 2 * 10 + i % 2) as f32).collect();
        let peft = experts_last(&own, 2, 3);
        assert_eq!(peft, [0., 100., 1., 101., 10., 110., 11., 111., 20., 120., 21., 121.]);
        assert_eq!(experts_first(&peft, 2, 3), own);
    }
}
