//! Parameters: names, shapes, values and gradients, in one list with one order.
//!
//! A projection's weights and the adapters on them lie in one matrix, so that one product reads them all (see `projection`). Such a parameter
//! is a part of the matrix, or, where it trains, an f32 tensor of its own with the part as its working copy.
//!
//! The weights of a block's experts are one parameter [experts, out, in], as in Transformers, and so is each matrix of their adapters. They may stay
//! in MXFP4: products then read a tensor that is made of them each time.

use super::held::{Held, Hold, Operand};
use super::matrix::Matrix;
use crate::formats::mxfp4::Mxfp4;
use crate::formats::nf4::Nf4;
use crate::ops::mxfp4::{self, Mxfp4Weight};
use crate::tensor::{Device, MemoryCategory, Precision, Tensor, View, ViewMut};

/// Index of a parameter in its model's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

/// Index of a matrix that several parameters share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MatrixId(usize);

/// A block of a shared matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The matrix.
    pub matrix: MatrixId,
    /// First row.
    pub row: usize,
    /// First column.
    pub col: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Where values lie.
#[derive(Debug)]
enum Place {
    Own(Tensor),
    Part(Part),
    Packed(Box<PackedExperts>),
}

/// Weights of experts in MXFP4, and what is made of them.
#[derive(Debug)]
struct PackedExperts {
    weight: Mxfp4Weight,
    held: Held,
}

/// One parameter: its name, its value and whether it trains.
#[derive(Debug)]
pub struct Parameter {
    /// Name as in a Hugging Face checkpoint, or, for adapters, `<module>.lora_A` and `<module>.lora_B`.
    pub name: String,
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// What its memory is for.
    pub category: MemoryCategory,
    /// Whether the optimizer updates it.
    pub trainable: bool,
    /// Whether operations read it in f32 on every device, so that it needs no working copy.
    in_f32: bool,
    /// Value, exact: f32 where it trains.
    value: Place,
    /// What products read, where that is not `value` itself.
    working: Option<Place>,
    /// Where its gradient lies in the gradients of its matrix: first row.
    stacked: Option<usize>,
}

impl Parameter {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn new(name: &str, shape: &[usize], category: MemoryCategory, value: Place) -> Self {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        Self { name, shape, category, trainable: false, in_f32: false, value, working: None, stacked: None }
    }
}

/// All parameters of a model, base weights and adapters, in the order in which they were made. The single walk over them.
#[derive(Debug)]
pub struct Params {
    device: Device,
    list: Vec<Parameter>,
    matrices: Vec<Matrix>,
}

impl Params {
    /// An empty list for parameters on `device`.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), list: Vec::new(), matrices: Vec::new() }
    }

    /// Adds a base weight that does not train, in the device's format.
    pub fn push(&mut self, name: &str, value: Tensor) -> ParamId {
        let (shape, category) = (value.shape().to_vec(), value.category());
        self.push_parameter(Parameter::new(name, &shape, category, Place::Own(value)))
    }

    /// Adds the weights of experts [experts, out, in] in MXFP4; they have no values until [`Self::set_mxfp4`].
    pub fn push_mxfp4(&mut self, name: &str, shape: [usize; 3]) -> ParamId {
        let weight = Mxfp4Weight::room(&self.device, &shape);
        let value = Place::Packed(Box::new(PackedExperts { weight, held: Held::default() }));
        self.push_parameter(Parameter::new(name, &shape, MemoryCategory::Weights, value))
    }

    /// Adds an adapter matrix that is a tensor of its own: f32, trains, with a copy in the device's format that products read, where that is another.
    pub fn push_own_adapter(&mut self, name: &str, shape: &[usize], values: impl FnOnce() -> Vec<f32>) -> ParamId {
        let category = MemoryCategory::Adapters;
        let working = (self.device.precision() == Precision::Bf16).then(|| self.device.zeros(category, shape));
        let value = self.device.empty_f32(category, shape);
        let adapter = Parameter::new(name, shape, category, Place::Own(value));
        let id = self.push_parameter(Parameter { trainable: true, working: working.map(Place::Own), ..adapter });
        if self.device.keeps_values() {
            self.set(id, &values());
        }
        id
    }

    /// As [`Self::push`], of a weight that operations read in f32 on every device, whether it trains or not.
    pub fn push_f32(&mut self, name: &str, shape: &[usize]) -> ParamId {
        let value = Place::Own(self.device.zeros_f32(MemoryCategory::Weights, shape));
        let parameter = Parameter::new(name, shape, MemoryCategory::Weights, value);
        self.push_parameter(Parameter { in_f32: true, ..parameter })
    }

    /// Lets a base weight that is a tensor of its own and does not train lie in `value`, with its shape and format and what it holds.
    pub fn replace(&mut self, id: ParamId, value: Tensor) {
        let parameter = &mut self.list[id.0];
        assert!(!parameter.trainable && parameter.working.is_none(), "{} trains", parameter.name);
        assert_eq!(parameter.shape, value.shape(), "shape of {}", parameter.name);
        parameter.value = Place::Own(value);
    }

    /// Adds a matrix of zeros for several parameters.
    pub fn push_matrix(&mut self, rows: usize, cols: usize) -> MatrixId {
        self.matrices.push(Matrix::whole(&self.device, rows, cols));
        MatrixId(self.matrices.len() - 1)
    }

    /// Adds a matrix of weights in NF4, one below the other, of those rows and `cols` columns each, with room for `columns` columns of adapters. The
    /// weights have no values until [`Self::set_nf4`]; with `double` there is room for absmaxes in 8 bits.
    pub fn push_packed_matrix(&mut self, rows: &[usize], cols: usize, columns: usize, double: bool) -> MatrixId {
        let mut matrix = Matrix::packed(&self.device, rows, cols, double);
        matrix.make_room(&self.device, (rows.iter().sum(), cols), columns);
        self.matrices.push(matrix);
        MatrixId(self.matrices.len() - 1)
    }

    /// Adds a base weight that does not train as a part of a matrix; its values are zero until [`Self::set`].
    pub fn push_part(&mut self, name: &str, part: Part) -> ParamId {
        self.push_parameter(Parameter::new(name, &[part.rows, part.cols], MemoryCategory::Weights, Place::Part(part)))
    }

    /// Adds an adapter matrix: an f32 tensor that trains, with `part` as the copy that products read. With `stacked` its gradient lies in the
    /// gradients of the matrix ([`Grads::stacked_mut`]) from that row on.
    pub fn push_adapter(
        &mut self,
        name: &str,
        part: Part,
        values: impl FnOnce() -> Vec<f32>,
        stacked: Option<usize>,
    ) -> ParamId {
        let shape = [part.rows, part.cols];
        let value = self.device.empty_f32(MemoryCategory::Adapters, &shape);
        let adapter = Parameter::new(name, &shape, MemoryCategory::Adapters, Place::Own(value));
        let working = Some(Place::Part(part));
        let id = self.push_parameter(Parameter { trainable: true, working, stacked, ..adapter });
        if let Some(first) = stacked {
            let (rows, cols) = &mut self.matrices[part.matrix.0].stacked;
            (*rows, *cols) = ((*rows).max(first + part.rows), part.cols);
        }
        if self.device.keeps_values() {
            self.set(id, &values());
        }
        id
    }

    fn push_parameter(&mut self, parameter: Parameter) -> ParamId {
        self.list.push(parameter);
        ParamId(self.list.len() - 1)
    }

    /// Gives a matrix of weights with `rows` rows and `cols` columns room for `columns` columns of adapters; what it holds stays where it is in it, the
    /// rest is zero.
    pub fn make_room(&mut self, id: MatrixId, rows: usize, cols: usize, columns: usize) {
        self.matrices[id.0].make_room(&self.device, (rows, cols), columns);
    }

    /// A shared matrix as products read it. One in 4 bits is made anew, unless somebody holds it.
    pub fn matrix(&self, id: MatrixId) -> Operand<'_> {
        self.matrices[id.0].operand(&self.device)
    }

    /// Keeps what is made of a matrix in 4 bits while the hold lives; for others it does nothing.
    pub fn hold(&self, id: MatrixId) -> Hold<'_> {
        self.matrices[id.0].hold()
    }

    /// Whether a parameter is a weight in 4 bits. Such a weight does not train.
    pub fn is_nf4(&self, id: ParamId) -> bool {
        match &self.list[id.0].value {
            Place::Own(_) | Place::Packed(_) => false,
            Place::Part(part) => self.matrices[part.matrix.0].nf4(part).is_some(),
        }
    }

    /// Whether a parameter is held in MXFP4. It does not train then.
    pub fn is_mxfp4(&self, id: ParamId) -> bool {
        matches!(self.list[id.0].value, Place::Packed(_))
    }

    /// Sets weights that are held in MXFP4.
    pub fn set_mxfp4(&mut self, id: ParamId, values: &Mxfp4<'_>) {
        match &mut self.list[id.0] {
            Parameter { value: Place::Packed(experts), .. } => experts.weight.set(values),
            Parameter { name, .. } => unreachable!("{name} is not in MXFP4"),
        }
    }

    /// The weights of experts as grouped products read them: [experts · out, in]. Those in MXFP4 are made anew, unless somebody holds them.
    pub fn experts(&self, id: ParamId) -> Operand<'_> {
        match &self.list[id.0].value {
            Place::Packed(experts) => experts.held.get(|| {
                let mut made = self.device.empty(MemoryCategory::Workspace, &self.list[id.0].shape);
                mxfp4::dequantize(&self.device, &experts.weight, &mut made);
                made
            }),
            Place::Own(_) | Place::Part(_) => Operand::Lasting(self.operand(id)),
        }
    }

    /// Keeps what is made of experts in MXFP4 while the hold lives; for others it does nothing.
    pub fn hold_experts(&self, id: ParamId) -> Hold<'_> {
        match &self.list[id.0].value {
            Place::Packed(experts) => experts.held.hold(),
            Place::Own(_) | Place::Part(_) => Hold::nothing(),
        }
    }

    /// Sets a weight in 4 bits.
    pub fn set_nf4(&mut self, id: ParamId, weight: &Nf4<'_>) {
        let Self { device, list, matrices } = self;
        match &list[id.0].value {
            Place::Part(part) => matrices[part.matrix.0].set_nf4(device, part, weight),
            Place::Own(_) | Place::Packed(_) => unreachable!("{} is not in NF4", list[id.0].name),
        }
    }

    /// Makes a base weight trainable. What products read becomes the working copy of an f32 master, where the two differ or lie apart.
    pub fn train(&mut self, id: ParamId) {
        self.train_in(id, &mut |_, _| None);
    }

    /// As [`Self::train`], with the f32 master in what `room(category, shape)` gives, where it gives something.
    pub fn train_in(&mut self, id: ParamId, room: &mut dyn FnMut(MemoryCategory, &[usize]) -> Option<Tensor>) {
        if self.list[id.0].trainable {
            return;
        }
        let is_part = matches!(self.list[id.0].value, Place::Part(_));
        if is_part || (self.device.precision() == Precision::Bf16 && !self.list[id.0].in_f32) {
            let values = self.device.keeps_values().then(|| self.to_vec(id));
            let parameter = &mut self.list[id.0];
            let category = MemoryCategory::Optimizer;
            let master = room(category, &parameter.shape);
            let mut master = master.unwrap_or_else(|| self.device.empty_f32(category, &parameter.shape));
            if let Some(values) = values {
                master.set(&values);
            }
            parameter.working = Some(std::mem::replace(&mut parameter.value, Place::Own(master)));
        }
        self.list[id.0].trainable = true;
    }

    /// The exact value of a parameter whose products read a working copy: nothing but the optimizer touches it.
    pub fn exact(&self, id: ParamId) -> Option<&Tensor> {
        match &self.list[id.0] {
            Parameter { value: Place::Own(value), working: Some(_), .. } => Some(value),
            _ => None,
        }
    }

    /// Moves that value to `room`, of its shape and format. From and to a GPU this waits for the device.
    pub fn move_exact(&mut self, id: ParamId, mut room: Tensor) {
        let values = self.device.keeps_values().then(|| self.to_vec(id));
        let parameter = &mut self.list[id.0];
        assert_eq!(parameter.shape, room.shape(), "shape of {}", parameter.name);
        if let Some(values) = values {
            room.set(&values);
        }
        parameter.value = Place::Own(room);
    }

    /// What operations other than a projection's read of a parameter that is a tensor of its own: norms, biases, embeddings, the head.
    pub fn operand(&self, id: ParamId) -> &Tensor {
        let Parameter { value, working, name, .. } = &self.list[id.0];
        match working.as_ref().unwrap_or(value) {
            Place::Own(tensor) => tensor,
            Place::Part(_) | Place::Packed(_) => unreachable!("{name} is no tensor of its own"),
        }
    }

    /// A copy of the exact values on the host. From a GPU this waits for the device.
    pub fn to_vec(&self, id: ParamId) -> Vec<f32> {
        match &self.list[id.0].value {
            Place::Own(tensor) => tensor.to_vec(),
            Place::Part(part) => match self.matrices[part.matrix.0].nf4(part) {
                Some(weight) => weight.to_vec(&self.device),
                None => self.part(part).to_vec(),
            },
            Place::Packed(_) => self.experts(id).view().to_vec(),
        }
    }

    /// A part of a matrix; of one in 4 bits, a part of the adapters beside and below its weights.
    pub fn part(&self, part: &Part) -> View<'_> {
        self.matrices[part.matrix.0].view(part)
    }

    /// Replaces the values, the working copy included. Weights in 4 bits take [`Self::set_nf4`].
    pub fn set(&mut self, id: ParamId, values: &[f32]) {
        let precision = self.device.precision();
        let Self { list, matrices, .. } = self;
        let Parameter { value, working, .. } = &mut list[id.0];
        let mut write = |place: &mut Place, values: &[f32]| match place {
            Place::Own(tensor) => tensor.set(values),
            Place::Part(part) => matrices[part.matrix.0].view_mut(part).set(values),
            Place::Packed(_) => unreachable!("weights in MXFP4 take set_mxfp4"),
        };
        write(value, values);
        if let Some(working) = working {
            let mut rounded = values.to_vec();
            precision.round_slice(&mut rounded);
            write(working, &rounded);
        }
    }

    /// Replaces the values of a parameter that does not train, from bf16 as files hold it: two little-endian bytes a value, row-major.
    pub fn set_bf16(&mut self, id: ParamId, bytes: &[u8]) {
        let Self { list, matrices, .. } = self;
        let Parameter { value, working, .. } = &mut list[id.0];
        debug_assert!(working.is_none(), "a working copy would stay behind");
        match value {
            Place::Own(tensor) => tensor.view_mut().set_bf16(bytes),
            Place::Part(part) => matrices[part.matrix.0].view_mut(part).set_bf16(bytes),
            Place::Packed(_) => unreachable!("weights in MXFP4 take set_mxfp4"),
        }
    }

    /// Replaces the values of one expert [out, in] of a parameter [experts, out, in] that does not train and is not packed.
    pub fn set_expert(&mut self, id: ParamId, expert: usize, values: &[f32]) {
        self.expert_mut(id, expert).set(values);
    }

    /// As [`Self::set_expert`], from bf16 as files hold it.
    pub fn set_expert_bf16(&mut self, id: ParamId, expert: usize, bytes: &[u8]) {
        self.expert_mut(id, expert).set_bf16(bytes);
    }

    fn expert_mut(&mut self, id: ParamId, expert: usize) -> ViewMut<'_> {
        let Parameter { value, working, shape, name, .. } = &mut self.list[id.0];
        debug_assert!(working.is_none(), "a working copy would stay behind");
        let rows = shape[1];
        match value {
            Place::Own(tensor) => tensor.view_mut().row_range(expert * rows, rows),
            Place::Part(_) | Place::Packed(_) => unreachable!("{name} has no experts to set"),
        }
    }

    /// Value and working copy of a parameter that trains, for the optimizer.
    pub fn trained_mut(&mut self, id: ParamId) -> (&mut Tensor, Option<ViewMut<'_>>) {
        let Self { list, matrices, .. } = self;
        let Parameter { value, working, name, .. } = &mut list[id.0];
        let working = working.as_mut().map(|place| match place {
            Place::Own(tensor) => tensor.view_mut(),
            Place::Part(part) => matrices[part.matrix.0].view_mut(part),
            Place::Packed(_) => unreachable!("a working copy is not packed"),
        });
        match value {
            Place::Own(value) => (value, working),
            Place::Part(_) | Place::Packed(_) => unreachable!("{name} does not train"),
        }
    }

    /// As [`Self::trained_mut`], to look at.
    pub fn trained(&self, id: ParamId) -> (&Tensor, Option<View<'_>>) {
        let Parameter { value, working, name, .. } = &self.list[id.0];
        let working = working.as_ref().map(|place| match place {
            Place::Own(tensor) => tensor.view(),
            Place::Part(part) => self.part(part),
            Place::Packed(_) => unreachable!("a working copy is not packed"),
        });
        match value {
            Place::Own(value) => (value, working),
            Place::Part(_) | Place::Packed(_) => unreachable!("{name} does not train"),
        }
    }

    /// A parameter.
    pub fn get(&self, id: ParamId) -> &Parameter {
        &self.list[id.0]
    }

    /// Name of a parameter.
    pub fn name(&self, id: ParamId) -> &str {
        &self.list[id.0].name
    }

    /// Whether a parameter trains.
    pub fn is_trainable(&self, id: ParamId) -> bool {
        self.list[id.0].trainable
    }

    /// Ids of all parameters, in order; they do not borrow the list.
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.list.len()).map(ParamId)
    }

    /// All parameters with their ids, in order.
    pub fn iter(&self) -> impl Iterator<Item = (ParamId, &Parameter)> {
        self.ids().zip(&self.list)
    }

    /// Lets the optimizer update a parameter that was made to train, or leaves it alone from now on.
    pub fn set_trainable(&mut self, id: ParamId, trainable: bool) {
        self.list[id.0].trainable = trainable;
    }

    /// The parameter of that name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.list.iter().position(|p| p.name == name).map(ParamId)
    }

    /// Parameters that train, in values.
    pub fn num_trainable(&self) -> u64 {
        self.list.iter().filter(|p| p.trainable).map(|p| p.len() as u64).sum()
    }
}

/// Gradients of the parameters that train, f32.
#[derive(Debug)]
pub struct Grads {
    /// Tensors of their own.
    own: Vec<Option<Tensor>>,
    /// For each parameter, the rows of its matrix's stack that are its gradient.
    stacked: Vec<Option<(MatrixId, usize, usize)>>,
    /// For each matrix, the gradients that are computed at once.
    stacks: Vec<Option<Tensor>>,
}

impl Grads {
    /// Zero gradients for every parameter of `params` that trains.
    pub fn new(params: &Params) -> Self {
        let zeros = |shape: &[usize]| params.device.zeros_f32(MemoryCategory::Gradients, shape);
        let stack = |matrix: &Matrix| {
            let (rows, cols) = matrix.stacked;
            (rows > 0).then(|| zeros(&[rows, cols]))
        };
        let stacked = |p: &Parameter| match (p.stacked, &p.working) {
            (Some(first), Some(Place::Part(part))) => Some((part.matrix, first, part.rows)),
            _ => None,
        };
        let own = |p: &Parameter| (p.trainable && stacked(p).is_none()).then(|| zeros(&p.shape));
        Self {
            own: params.list.iter().map(own).collect(),
            stacked: params.list.iter().map(stacked).collect(),
            stacks: params.matrices.iter().map(stack).collect(),
        }
    }

    /// Sets every gradient to zero.
    pub fn zero(&mut self) {
        self.own.iter_mut().chain(&mut self.stacks).flatten().for_each(Tensor::fill_zero);
    }

    /// Gradient of a parameter, if it trains; its rows follow each other without a gap.
    pub fn get(&self, id: ParamId) -> Option<View<'_>> {
        match self.stacked[id.0] {
            Some((matrix, first, rows)) => Some(self.stacks[matrix.0].as_ref()?.view().row_range(first, rows)),
            None => self.own[id.0].as_ref().map(Tensor::view),
        }
    }

    /// Gradient of a parameter to add to, if it trains and has a tensor of its own.
    pub fn get_mut(&mut self, id: ParamId) -> Option<&mut Tensor> {
        self.own[id.0].as_mut()
    }

    /// As [`Self::get_mut`] for several parameters, in their order; those that have no tensor of their own are left out.
    pub fn several_mut(&mut self, ids: &[ParamId]) -> Vec<&mut Tensor> {
        let place = |i: usize| ids.iter().position(|id| id.0 == i);
        let mut found: Vec<(usize, &mut Tensor)> =
            self.own.iter_mut().enumerate().filter_map(|(i, own)| place(i).zip(own.as_mut())).collect();
        found.sort_by_key(|(place, _)| *place);
        found.into_iter().map(|(_, own)| own).collect()
    }

    /// As [`Self::get_mut`] for two parameters and [`Self::stacked_mut`] at once; `None` unless all three are there.
    pub fn pair_and_stack_mut(
        &mut self,
        pair: [ParamId; 2],
        matrix: MatrixId,
    ) -> Option<([&mut Tensor; 2], &mut Tensor)> {
        let [Some(a), Some(b)] = self.own.get_disjoint_mut(pair.map(|id| id.0)).ok()? else { return None };
        Some(([a, b], self.stacks[matrix.0].as_mut()?))
    }

    /// The gradients of a matrix that are computed at once, to add to: [rows, in].
    pub fn stacked_mut(&mut self, matrix: MatrixId) -> Option<&mut Tensor> {
        self.stacks[matrix.0].as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_a_matrix_that_grows_around_them() {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let mut params = Params::new(&device);
        let matrix = params.push_matrix(2, 3);
        let weight = params.push_part("weight", Part { matrix, row: 0, col: 0, rows: 2, cols: 3 });
        params.set(weight, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        params.make_room(matrix, 2, 3, 1);
        let part = Part { matrix, row: 2, col: 0, rows: 1, cols: 3 };
        let a = params.push_adapter("lora_A", part, || vec![7.0, 8.0, 9.0], Some(0));
        assert_eq!(params.matrix(matrix).view().f32s(), [1.0, 2.0, 3.0, 0.0, 4.0, 5.0, 6.0, 0.0, 7.0, 8.0, 9.0, 0.0]);
        assert_eq!(params.to_vec(weight), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        params.train(weight);
        let (value, working) = params.trained_mut(weight);
        assert_eq!((value.len(), working.unwrap().stride()), (6, 4));
        let grads = Grads::new(&params);
        assert_eq!(grads.get(a).unwrap().cols(), 3);
        assert!(grads.get(weight).is_some());
        assert_eq!(params.num_trainable(), 9);
    }
}
