//! What integration tests share: a tiny model with its tokenizer, made on the spot, and a small dataset.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tandem::formats::safetensors::{Dtype, TensorSpec, write};
use tandem::model::config::ModelConfig;

/// Special tokens after the 256 bytes.
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// ChatML, with the assistant's turns marked.
const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}\
    {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}\
    {% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Writes a llama model of two small blocks with random weights and a tokenizer of bytes into `folder/tiny model`; the
/// space and the letter beyond ASCII in the name are there on purpose.
pub fn tiny_model(folder: &Path) -> PathBuf {
    write_model(
        folder.join("tiny módel"),
        &json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": 256 + SPECIALS.len(), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 512, "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 256, "eos_token_id": 258, "torch_dtype": "float32",
        }),
    )
}

/// As [`tiny_model`], a Qwen3-MoE model: of `layers` blocks each has 6 experts, 2 a token, but for those of `dense`.
#[allow(dead_code, reason = "each test binary uses its part")]
pub fn tiny_sparse_model(folder: &Path, layers: usize, dense: &[usize]) -> PathBuf {
    write_model(
        folder.join("tiny mixtüre"),
        &json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
            "vocab_size": 256 + SPECIALS.len(), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "max_position_embeddings": 512, "tie_word_embeddings": false, "attention_bias": false,
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": dense, "bos_token_id": 256, "eos_token_id": 258,
            "torch_dtype": "float32",
        }),
    )
}

fn write_model(path: PathBuf, config: &Value) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    fs::write(path.join("config.json"), config.to_string()).unwrap();
    write_weights(&path);
    fs::write(path.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    let tokenizer_config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, "chat_template": TEMPLATE,
        "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    });
    fs::write(path.join("tokenizer_config.json"), tokenizer_config.to_string()).unwrap();
    path
}

fn write_weights(path: &Path) {
    let config = ModelConfig::from_hf_path(path).unwrap();
    let specs: Vec<TensorSpec> = config
        .expected_tensors()
        .into_iter()
        .map(|(name, shape)| TensorSpec { name, dtype: Dtype::F32, shape })
        .collect();
    let mut state = 1_u64;
    write(&path.join("model.safetensors"), &BTreeMap::new(), &specs, |spec| {
        let scale = if spec.shape.len() == 1 { 0.0 } else { 0.3 };
        let values = (0..spec.num_elements()).map(|_| {
            // Knuth's MMIX generator; its upper bits are good enough for weights.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 40) as f32 / (1_u32 << 24) as f32;
            // Norms are 1, matrices are around 0.
            if scale == 0.0 { 1.0 } else { (unit - 0.5) * 2.0 * scale }
        });
        Ok(Cow::Owned(values.collect()))
    })
    .unwrap();
}

/// A byte-level BPE without merges: every byte is a token.
fn tokenizer() -> Value {
    let mut vocab = Map::new();
    for (id, c) in byte_letters().into_iter().enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    let added: Vec<Value> = SPECIALS
        .iter()
        .enumerate()
        .map(|(i, content)| {
            json!({"id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

/// GPT-2's letter for each byte: printable bytes are themselves, the others follow from U+0100.
fn byte_letters() -> Vec<char> {
    let mut next = 256;
    (0..=255_u32)
        .map(|byte| {
            let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
            if !printable {
                next += 1;
            }
            char::from_u32(if printable { byte } else { next - 1 }).unwrap()
        })
        .collect()
}

/// Writes `num_rows` rows of prompt and completion; answers repeat, so that there is something to learn.
pub fn dataset(folder: &Path, num_rows: usize) -> PathBuf {
    let path = folder.join("data set.jsonl");
    let answers = ["yes, of course", "no, never", "perhaps tomorrow"];
    let rows: String = (0..num_rows)
        .map(|i| json!({"prompt": format!("question {i}?"), "completion": answers[i % 3]}).to_string() + "\n")
        .collect();
    fs::write(&path, rows).unwrap();
    path
}
