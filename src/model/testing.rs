//! Tiny random models for tests, with every odd size a real one might have.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::config::ModelConfig;
use super::loading::{Checkpoint, SINGLE_FILE};
use super::transformer::Transformer;
use crate::formats::gguf_write::GgufBuilder;
use crate::formats::safetensors::{Dtype, TensorSpec, write};
use crate::ops::testing::Values;
use crate::tensor::Device;

/// Tokens of the tiny vocabulary: odd, and no multiple of a vector.
pub(crate) const VOCAB: usize = 61;

/// The configuration that the tiny models share: three blocks, three query heads on one key head of 6 values.
fn config() -> Value {
    json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "max_position_embeddings": 256, "tie_word_embeddings": false, "hidden_act": "silu",
    })
}

/// A tiny model with random weights; `changes` replaces keys of its configuration.
pub(crate) fn tiny(device: &Device, changes: &Value) -> Transformer {
    let mut config = config();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let expected = ModelConfig::from_hf_path(folder.path()).unwrap().expected_tensors();
    let specs: Vec<TensorSpec> =
        expected.into_iter().map(|(name, shape)| TensorSpec { name, dtype: Dtype::F32, shape }).collect();
    let mut values = Values::new(17);
    let random = |spec: &TensorSpec| {
        let len = spec.shape.iter().product();
        // Matrices keep the size of what passes through them; norms are around 1, biases small.
        let (middle, width) = match spec.shape.as_slice() {
            [_, columns] if !spec.name.contains("embed") => (0.0, 1.7 / (*columns as f32).sqrt()),
            [_, _] => (0.0, 1.0),
            _ if spec.name.ends_with("bias") => (0.0, 0.3),
            _ => (1.0, 0.3),
        };
        Ok(values.vec(len).into_iter().map(|x| middle + width * x).collect::<Vec<f32>>().into())
    };
    write(&folder.path().join(SINGLE_FILE), &BTreeMap::new(), &specs, random).unwrap();
    Transformer::load(&Checkpoint::open(folder.path()).unwrap(), device, &mut |_, _| {}).unwrap()
}

/// The first keys of a GGUF file of a model, as llama.cpp's converter writes them for an architecture that it calls `arch`.
pub(crate) fn gguf_header(config: &ModelConfig, arch: &str) -> GgufBuilder {
    let key = |name: &str| format!("{arch}.{name}");
    GgufBuilder::new()
        .string("general.architecture", arch)
        .u32(&key("embedding_length"), config.hidden_size as u32)
        .u32(&key("block_count"), config.num_hidden_layers as u32)
        .u32(&key("feed_forward_length"), config.intermediate_size as u32)
        .u32(&key("attention.head_count"), config.num_attention_heads as u32)
        .u32(&key("attention.head_count_kv"), config.num_key_value_heads as u32)
        .u32(&key("attention.key_length"), config.head_dim as u32)
        .u32(&key("context_length"), config.max_position_embeddings as u32)
        .f32(&key("rope.freq_base"), config.rope_theta as f32)
        .f32(&key("attention.layer_norm_rms_epsilon"), config.rms_norm_eps as f32)
}
