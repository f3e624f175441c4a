//! The tensors that the files of a family have for a weight: most are the weight itself, experts are taken apart or turned.

use std::borrow::Cow;

use super::config::{Architecture, ModelConfig};
use super::stored::{Order, arranged, expert_name};

/// A tensor of a file, and where its values are in the weight it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    /// Its name in the file.
    pub name: String,
    /// Its shape in the file, slowest dimension first.
    pub shape: Vec<usize>,
    /// The weight, as [`ModelConfig::expected_tensors`] calls it.
    pub weight: String,
    /// First of its values in the weight, where its values follow each other.
    first: usize,
    /// Whether each matrix of the weight is turned.
    is_transposed: bool,
}

impl FileTensor {
    /// Whether it is the weight as it is.
    pub fn is_whole_weight(&self) -> bool {
        self.name == self.weight && !self.is_transposed
    }

    /// Its values, from those of the whole weight.
    pub fn values<'a>(&self, weight: &'a [f32]) -> Cow<'a, [f32]> {
        let len = self.shape.iter().product();
        if !self.is_transposed {
            return weight[self.first..self.first + len].into();
        }
        let (rows, cols) = (self.shape[1], self.shape[2]);
        let turned =
            weight.chunks_exact((rows * cols).max(1)).map(|one| arranged(vec![one.into()], Order::Transposed, cols));
        let mut out = Vec::with_capacity(len);
        turned.for_each(|one| out.extend_from_slice(&one));
        out.into()
    }
}

/// What the files of the model's family have for its weights, in the order of [`ModelConfig::expected_tensors`]: of Qwen3-MoE and Mixtral a tensor for each
/// projection of each expert, of gpt-oss stacks with `in` before `out`.
pub fn file_tensors(config: &ModelConfig) -> Vec<FileTensor> {
    config.expected_tensors().into_iter().flat_map(|(weight, shape)| of_weight(config, weight, &shape)).collect()
}

fn of_weight(config: &ModelConfig, weight: String, shape: &[usize]) -> Vec<FileTensor> {
    let family = config.architecture;
    let Some((block, part)) = weight.split_once(".mlp.experts.") else {
        let is_router = family == Architecture::Mixtral && weight.ends_with(".mlp.gate.weight");
        let name = if is_router { weight.replace(".mlp.gate.", ".block_sparse_moe.gate.") } else { weight.clone() };
        return vec![FileTensor { name, shape: shape.to_vec(), weight, first: 0, is_transposed: false }];
    };
    let modules: &[&str] = match (family, shape, part) {
        (Architecture::GptOss, &[experts, rows, cols], _) => {
            let (name, shape) = (weight.clone(), vec![experts, cols, rows]);
            return vec![FileTensor { name, shape, weight, first: 0, is_transposed: true }];
        }
        (Architecture::Qwen3Moe | Architecture::Mixtral, _, "gate_up_proj") => &["gate_proj", "up_proj"],
        (Architecture::Qwen3Moe | Architecture::Mixtral, _, "down_proj") => &["down_proj"],
        _ => {
            let name = weight.clone();
            return vec![FileTensor { name, shape: shape.to_vec(), weight, first: 0, is_transposed: false }];
        }
    };
    let (rows, cols) = (shape[1] / modules.len(), shape[2]);
    let each =
        (0..shape[0]).flat_map(|expert| modules.iter().enumerate().map(move |(at, module)| (expert, at, module)));
    let tensor = |(expert, at, module): (usize, usize, &&str)| FileTensor {
        name: expert_name(family, false, block, expert, module),
        shape: vec![rows, cols],
        weight: weight.clone(),
        first: (expert * modules.len() + at) * rows * cols,
        is_transposed: false,
    };
    each.map(tensor).collect()
}
