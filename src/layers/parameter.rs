//! Parameters: names, shapes, values and gradients, in one list with one order.

use crate::tensor::{DType, Device, MemoryCategory, Precision, Tensor};

/// Index of a parameter in its model's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

/// One parameter: its name, its value and whether it trains.
#[derive(Debug)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, or, for adapters, `<module>.lora_A` and `<module>.lora_B`.
    pub name: String,
    /// Value, exact: f32 where it trains.
    pub value: Tensor,
    /// What products read, where that is not `value` itself: a copy in the device's format.
    pub working: Option<Tensor>,
    /// Whether the optimizer updates it.
    pub trainable: bool,
}

impl Parameter {
    /// A base weight that does not train, in the device's format.
    pub fn frozen(name: &str, value: Tensor) -> Self {
        Self { name: name.into(), value, working: None, trainable: false }
    }

    /// An adapter matrix: f32, with a working copy where products read another format.
    pub fn adapter(device: &Device, name: String, shape: &[usize], values: Vec<f32>) -> Self {
        let copy = |values| device.tensor(MemoryCategory::Adapters, shape, values);
        let working = (device.dtype() != DType::F32).then(|| copy(values.clone()));
        Self { name, value: device.tensor_f32(MemoryCategory::Adapters, shape, values), working, trainable: true }
    }

    /// Makes a base weight trainable. Where products read rounded values, those become the working copy of an f32 master.
    pub fn train(&mut self, device: &Device) {
        if !std::mem::replace(&mut self.trainable, true) && device.precision() == Precision::Bf16 {
            let master = device.tensor_f32(MemoryCategory::Optimizer, self.value.shape(), self.value.to_vec());
            self.working = Some(std::mem::replace(&mut self.value, master));
        }
    }

    /// Replaces the value, and the working copy with it.
    pub fn set(&mut self, values: &[f32]) {
        self.value.set(values);
        if let Some(working) = &mut self.working {
            working.set(values);
        }
    }
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

    /// What products read of a parameter.
    pub fn operand(&self, id: ParamId) -> &Tensor {
        let Parameter { value, working, .. } = &self.0[id.0];
        working.as_ref().unwrap_or(value)
    }

    /// A parameter.
    pub fn get(&self, id: ParamId) -> &Parameter {
        &self.0[id.0]
    }

    /// A parameter, to update.
    pub fn get_mut(&mut self, id: ParamId) -> &mut Parameter {
        &mut self.0[id.0]
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
        let grad = |p: &Parameter| p.trainable.then(|| device.zeros_f32(MemoryCategory::Gradients, p.value.shape()));
        Self(params.iter().map(|(_, p)| grad(p)).collect())
    }

    /// Sets every gradient to zero.
    pub fn zero(&mut self) {
        self.0.iter_mut().flatten().for_each(Tensor::fill_zero);
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
