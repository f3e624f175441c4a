//! What integration tests share: a tiny model with its tokenizer, made on the spot, and a small dataset.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use tandem::formats::nf4::Nf4;
use tandem::formats::safetensors::{Dtype, TensorSpec, write};
use tandem::model::config::ModelConfig;
use tandem::model::loading::Checkpoint;

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
    let path = folder.join("tiny módel");
    fs::create_dir_all(&path).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 256 + SPECIALS.len(), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 256, "eos_token_id": 258, "torch_dtype": "float32",
    });
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

/// Stores the projections of the model in `source` as NF4 in `folder`, as bitsandbytes and Transformers do, and the rest as it is. With `double`
/// their scales are quantized, too.
pub fn nf4_copy(source: &Path, folder: &Path, double: bool) {
    copy_with_config(source, folder, |config| {
        config["quantization_config"] = json!({
            "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8",
        });
    });
    let checkpoint = Checkpoint::open(source).unwrap();
    let mut tensors = Vec::new();
    for name in checkpoint.tensor_names() {
        let (values, shape) = (checkpoint.tensor_f32(name).unwrap(), checkpoint.shape(name).unwrap());
        if name.contains("_proj.weight") {
            let weight = Nf4::quantize(name, &values, shape, Dtype::F32, double).unwrap();
            let parts = weight.parts().unwrap();
            tensors.extend(
                parts
                    .into_iter()
                    .map(|part| (format!("{name}{}", part.suffix), part.dtype, part.shape, part.bytes.into_owned())),
            );
        } else {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            tensors.push((name.clone(), Dtype::F32, shape.to_vec(), bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Stores what the model in `source` has after dequantizing as a plain f32 model in `folder`.
pub fn dequantized_copy(source: &Path, folder: &Path) {
    copy_with_config(source, folder, |config| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    let checkpoint = Checkpoint::open(source).unwrap();
    let specs: Vec<TensorSpec> = checkpoint
        .tensor_names()
        .iter()
        .map(|name| TensorSpec {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: checkpoint.shape(name).unwrap().to_vec(),
        })
        .collect();
    let values = |spec: &TensorSpec| Ok(checkpoint.tensor_f32(&spec.name)?.into());
    write(&folder.join("model.safetensors"), &BTreeMap::new(), &specs, values).unwrap();
}

/// Copies what is not weights, with a change to config.json.
fn copy_with_config(source: &Path, folder: &Path, change: impl Fn(&mut Value)) {
    fs::create_dir_all(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_str(&fs::read_to_string(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}
