//! Parameters: names, shapes, values and gradients, in one list with one order.

use crate::tensor::{Device, MemoryCategory, Tensor};

/// Index of a parameter in its model's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

/// One parameter: its name, its value and whether it trains.
#[derive(Debug)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, or, for adapters, `<module>.lora_A` and `<module>.lora_B`.
    pub name: String,
    /// Value.
    pub value: Tensor,
    /// Whether the optimizer updates it.
    pub trainable: bool,
}

/// All parameters of a model, base weights and adapters, in the order in which they were made. The single walk over them.
#[derive(Debug, Default)]
pub struct Params(Vec<Parameter>);

impl Params {
    /// Adds a parameter.
    pub fn push(&mut self, parameter: Parameter) -> ParamId {
        self.0.push(parameter);
        ParamId(self.0.len() - 1)
    }

    /// Value of a parameter.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.0[id.0].value
    }

    /// Value of a parameter, to update.
    pub fn value_mut(&mut self, id: ParamId) -> &mut Tensor {
        &mut self.0[id.0].value
    }

    /// Name of a parameter.
    pub fn name(&self, id: ParamId) -> &str {
        &self.0[id.0].name
    }

    /// Whether a parameter trains.
    pub fn is_trainable(&self, id: ParamId) -> bool {
        self.0[id.0].trainable
    }

    /// All parameters with their ids, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Parameter)> {
        self.0.iter().enumerate().map(|(i, p)| (ParamId(i), p))
    }

    /// All parameters with their ids, in order, to change.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ParamId, &mut Parameter)> {
        self.0.iter_mut().enumerate().map(|(i, p)| (ParamId(i), p))
    }

    /// The parameter of that name.
    pub fn find(&self, name: &str) -> Option<&Parameter> {
        self.0.iter().find(|p| p.name == name)
    }

    /// Parameters that train, in values.
    pub fn num_trainable(&self) -> u64 {
        self.0.iter().filter(|p| p.trainable).map(|p| p.value.len() as u64).sum()
    }
}

/// Gradients of the parameters that train, f32.
#[derive(Debug)]
pub struct Grads(Vec<Option<Tensor>>);

impl Grads {
    /// Zero gradients for every parameter of `params` that trains.
    pub fn new(device: &Device, params: &Params) -> Self {
        let grad = |p: &Parameter| p.trainable.then(|| device.zeros(MemoryCategory::Gradients, p.value.shape()));
        Self(params.iter().map(|(_, p)| grad(p)).collect())
    }

    /// Sets every gradient to zero.
    pub fn zero(&mut self) {
        self.0.iter_mut().flatten().for_each(|grad| grad.f32s_mut().fill(0.0));
    }

    /// Gradient of a parameter, if it trains.
    pub fn get(&self, id: ParamId) -> Option<&Tensor> {
        self.0[id.0].as_ref()
    }

    /// Gradient of a parameter to add to, if it trains.
    pub fn get_mut(&mut self, id: ParamId) -> Option<&mut Tensor> {
        self.0[id.0].as_mut()
    }
}
