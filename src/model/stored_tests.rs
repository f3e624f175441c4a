//! Tests of how weights of experts are put together: tensors of their own, stacks, transposed stacks, MXFP4, GGUF.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::{Order, arranged};
use crate::formats::blocks::BlockKind;
use crate::formats::gguf_value::GgmlType;
use crate::formats::mxfp4::Mxfp4;
use crate::formats::safetensors::{Dtype, SafetensorsFile, TensorSpec, write};
use crate::model::config::{ModelConfig, RopeScaling};
use crate::model::loading::{Checkpoint, INDEX_FILE, SINGLE_FILE};
use crate::model::testing::gguf_header;

fn golden(family: &str) -> PathBuf {
    let root = std::env::var_os("TANDEM_GOLDEN")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), PathBuf::from);
    root.join(family)
}

fn refusal(path: &Path) -> String {
    format!("{:#}", Checkpoint::open(path).unwrap_err())
}

/// A tensor of a file to be: its name, shape and values, or its bytes.
type Entry = (String, Vec<usize>, Vec<f32>);

/// The stored tensors of a golden folder.
fn entries(family: &str) -> Vec<Entry> {
    let file = SafetensorsFile::open(&golden(family).join(SINGLE_FILE)).unwrap();
    let entry = |name: &str| (name.to_owned(), file.info(name).unwrap().shape.clone(), file.to_f32(name).unwrap());
    file.names().map(entry).collect()
}

fn write_folder(config: &Value, dtype: Dtype, entries: &[Entry]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let spec = |(name, shape, _): &Entry| TensorSpec { name: name.clone(), dtype, shape: shape.clone() };
    let specs: Vec<TensorSpec> = entries.iter().map(spec).collect();
    let values = |t: &TensorSpec| Ok(entries.iter().find(|e| e.0 == t.name).unwrap().2.as_slice().into());
    write(&dir.path().join(SINGLE_FILE), &BTreeMap::new(), &specs, values).unwrap();
    dir
}

fn config(family: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(golden(family).join("config.json")).unwrap()).unwrap()
}

/// All weights of two checkpoints are equal, whole and expert by expert.
fn assert_same(a: &Checkpoint, b: &Checkpoint) {
    assert_eq!(a.tensor_names(), b.tensor_names());
    for name in a.tensor_names() {
        let whole = a.tensor_f32(name).unwrap();
        assert_eq!(whole, b.tensor_f32(name).unwrap(), "{name}");
        if name.contains(".experts.") {
            let num_experts = a.shape(name).unwrap()[0];
            for (expert, want) in whole.chunks_exact(whole.len() / num_experts).enumerate() {
                assert_eq!(b.expert_f32(name, expert).unwrap(), want, "{name} {expert}");
            }
            assert!(b.expert_f32(name, num_experts).is_err());
        }
    }
}

#[test]
fn golden_mixtures_open_with_the_names_and_numbers_of_their_references() {
    for family in ["qwen3_moe", "mixtral", "gpt_oss"] {
        let c = Checkpoint::open(&golden(family)).unwrap();
        assert_eq!(c.config().architecture.name(), family);
        assert!(c.ignored_tensors().is_empty(), "{family}: {:?}", c.ignored_tensors());
        assert_eq!((c.bytes_on_disk(), c.dtype_summary().as_str()), (4 * c.num_parameters(), "f32"));
        let case = SafetensorsFile::open(&golden(family).join("case.safetensors")).unwrap();
        let grads: Vec<&str> = case.names().filter_map(|n| n.strip_prefix("grad.")).collect();
        let mut names: Vec<&str> = c.tensor_names().iter().map(String::as_str).collect();
        names.sort_unstable();
        // Files that are kept small have gradients of experts for one block only.
        let is_stack = |name: &&&str| c.shape(name).is_some_and(|shape| shape.len() == 3);
        let left_out = names.iter().filter(is_stack).filter(|name| !grads.contains(*name)).count();
        assert_eq!((names.len() - left_out, left_out <= 4), (grads.len(), true), "{family}");
        assert!(grads.iter().all(|name| names.contains(name)), "{family}");
        for name in names.iter().filter(|name| grads.contains(*name)) {
            let shape = c.shape(name).unwrap();
            let mut stored = case.info(&format!("grad.{name}")).unwrap().shape.clone();
            if family == "gpt_oss" && stored.len() == 3 {
                stored.swap(1, 2);
            }
            assert_eq!(shape, stored, "{family}: {name}");
            assert_eq!(c.tensor_f32(name).unwrap().len(), shape.iter().product::<usize>());
            assert!(c.tensor_mxfp4(name).unwrap().is_none());
        }
        assert_same(&c, &c);
    }
}

#[test]
fn experts_of_their_own_are_gate_rows_then_up_rows() {
    for (family, gate, up) in [
        ("qwen3_moe", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"),
        ("mixtral", "block_sparse_moe.experts.3.w1", "block_sparse_moe.experts.3.w3"),
    ] {
        let c = Checkpoint::open(&golden(family)).unwrap();
        let file = SafetensorsFile::open(&golden(family).join(SINGLE_FILE)).unwrap();
        let read = |module: &str| file.to_f32(&format!("model.layers.1.{module}.weight")).unwrap();
        let name = "model.layers.1.mlp.experts.gate_up_proj";
        assert_eq!(c.expert_f32(name, 3).unwrap(), [read(gate), read(up)].concat());
    }
}

#[test]
fn stacks_of_gpt_oss_are_turned_even_where_shapes_do_not_tell() {
    let c = Checkpoint::open(&golden("gpt_oss")).unwrap();
    let file = SafetensorsFile::open(&golden("gpt_oss").join(SINGLE_FILE)).unwrap();
    let name = "model.layers.2.mlp.experts.gate_up_proj";
    let (stored, got) = (file.to_f32(name).unwrap(), c.tensor_f32(name).unwrap());
    let (h, rows) = (64, 256);
    for (expert, row, col) in [(0, 0, 1), (1, 255, 63), (7, 100, 2)] {
        assert_eq!(got[(expert * rows + row) * h + col], stored[(expert * h + col) * rows + row]);
    }
    // 2·I = H and I = H: shapes are square.
    for (part, inner) in [("gate_up_proj", 32), ("down_proj", 64)] {
        let mut config = config("gpt_oss");
        config["intermediate_size"] = json!(inner);
        config["num_local_experts"] = json!(3);
        let square: Vec<f32> = (0..3 * 64 * 64).map(|i| i as f32).collect();
        let entry = |(name, shape): (String, Vec<usize>)| {
            let len = shape.iter().product();
            let shape = if shape.len() == 3 { vec![shape[0], shape[2], shape[1]] } else { shape };
            let values = if shape == [3, 64, 64] { square.clone() } else { vec![0.5; len] };
            (name, shape, values)
        };
        let expected = ModelConfig::from_hf_json(&config.to_string()).unwrap().expected_tensors();
        let entries: Vec<Entry> = expected.into_iter().map(entry).collect();
        let dir = write_folder(&config, Dtype::F32, &entries);
        let c = Checkpoint::open(dir.path()).unwrap();
        let one = c.expert_f32(&format!("model.layers.0.mlp.experts.{part}"), 2).unwrap();
        assert_eq!((one[0], one[1], one[64]), (8192.0, 8192.0 + 64.0, 8193.0), "{part}");
    }
}

#[test]
fn experts_may_be_spread_over_shards_and_a_missing_one_is_named() {
    let (all, dir) = (entries("mixtral"), tempfile::tempdir().unwrap());
    std::fs::copy(golden("mixtral").join("config.json"), dir.path().join("config.json")).unwrap();
    let lost = "model.layers.2.block_sparse_moe.experts.1.w3.weight";
    let write_shards = |entries: &[Entry]| {
        let mut map = serde_json::Map::new();
        for shard in 0..3 {
            let file = format!("model-{:05}-of-00003.safetensors", shard + 1);
            let each = || entries.iter().skip(shard).step_by(3);
            let specs: Vec<TensorSpec> = each()
                .map(|(name, shape, _)| TensorSpec { name: name.clone(), dtype: Dtype::BF16, shape: shape.clone() })
                .collect();
            let values = |t: &TensorSpec| Ok(each().find(|e| e.0 == t.name).unwrap().2.as_slice().into());
            write(&dir.path().join(&file), &BTreeMap::new(), &specs, values).unwrap();
            map.extend(specs.iter().map(|t| (t.name.clone(), json!(file))));
        }
        std::fs::write(dir.path().join(INDEX_FILE), json!({"weight_map": map}).to_string()).unwrap();
    };
    write_shards(&all);
    let c = Checkpoint::open(dir.path()).unwrap();
    let whole = Checkpoint::open(&golden("mixtral")).unwrap();
    assert_eq!((c.dtype_summary().as_str(), c.bytes_on_disk() * 2), ("bf16", whole.bytes_on_disk()));
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    let want: Vec<half::bf16> = whole.expert_f32(name, 2).unwrap().into_iter().map(half::bf16::from_f32).collect();
    let bytes: Vec<u8> = want.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(c.expert_bf16(name, 2).unwrap().unwrap(), bytes);
    assert!(matches!(c.expert_bf16("model.layers.1.mlp.experts.down_proj", 2).unwrap(), Some(Cow::Borrowed(_))));
    assert!(whole.expert_bf16(name, 2).unwrap().is_none());
    assert_eq!(c.tensor_bf16(name).unwrap(), None);

    let without: Vec<Entry> = all.into_iter().filter(|(name, ..)| name != lost).collect();
    write_shards(&without);
    let e = refusal(dir.path());
    assert!(e.contains(&format!("tensor {lost} missing")), "{e}");
    let mut config = config("mixtral");
    config["num_local_experts"] = json!(5);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    assert!(refusal(dir.path()).contains("block_sparse_moe.gate.weight has shape [4, 64]"), "{}", refusal(dir.path()));
}

#[test]
fn fused_stacks_are_taken_as_they_are() {
    let c = Checkpoint::open(&golden("qwen3_moe")).unwrap();
    let entry = |name: &String| (name.clone(), c.shape(name).unwrap().to_vec(), c.tensor_f32(name).unwrap());
    let fused: Vec<Entry> = c.tensor_names().iter().map(entry).collect();
    let dir = write_folder(&config("qwen3_moe"), Dtype::F32, &fused);
    assert_same(&c, &Checkpoint::open(dir.path()).unwrap());
    let dir = write_folder(&config("qwen3_moe"), Dtype::BF16, &fused);
    let c = Checkpoint::open(dir.path()).unwrap();
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let (whole, one) = (c.tensor_bf16(name).unwrap().unwrap(), c.expert_bf16(name, 7).unwrap().unwrap());
    assert_eq!(whole[7 * one.len()..], *one);
}

/// The golden gpt-oss model with its experts in MXFP4, as tensors of bytes; `spoil` may change them.
fn mxfp4_folder(spoil: impl Fn(&mut Vec<(String, Dtype, Vec<usize>, Vec<u8>)>)) -> tempfile::TempDir {
    let c = Checkpoint::open(&golden("gpt_oss")).unwrap();
    let mut tensors = Vec::new();
    for name in c.tensor_names() {
        let (values, shape) = (c.tensor_f32(name).unwrap(), c.shape(name).unwrap());
        if shape.len() < 3 {
            let bytes = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
            tensors.push((name.clone(), Dtype::BF16, shape.to_vec(), bytes));
            continue;
        }
        let weight = Mxfp4::quantize(&values, shape).unwrap();
        let scales = [shape[0], shape[1], shape[2] / 32];
        tensors.push((format!("{name}_blocks"), Dtype::U8, [&scales[..], &[16]].concat(), weight.blocks().to_vec()));
        tensors.push((format!("{name}_scales"), Dtype::U8, scales.to_vec(), weight.scales().to_vec()));
    }
    spoil(&mut tensors);
    let dir = tempfile::tempdir().unwrap();
    let mut config = config("gpt_oss");
    config["quantization_config"] = json!({"quant_method": "mxfp4"});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &dir.path().join(SINGLE_FILE)).unwrap();
    dir
}

#[test]
fn mxfp4_stays_packed_and_reads_as_its_values() {
    let dir = mxfp4_folder(|_| {});
    let c = Checkpoint::open(dir.path()).unwrap();
    assert!(c.ignored_tensors().is_empty(), "{:?}", c.ignored_tensors());
    assert_eq!((c.dtype_summary().as_str(), c.quantized()), ("mxfp4", None));
    let packed = c.mxfp4().unwrap();
    assert_eq!((packed.num_weights, packed.num_bytes), (6, packed.num_elements / 32 * 17));
    assert!(c.describe().contains("mxfp4"), "{}", c.describe());
    let floats = Checkpoint::open(&golden("gpt_oss")).unwrap();
    for part in ["gate_up_proj", "down_proj"] {
        let name = &format!("model.layers.1.mlp.experts.{part}");
        let shape = c.shape(name).unwrap();
        let want = Mxfp4::quantize(&floats.tensor_f32(name).unwrap(), shape).unwrap();
        assert_eq!(c.tensor_mxfp4(name).unwrap().unwrap(), want);
        assert_eq!(c.tensor_f32(name).unwrap(), want.dequantize());
        let one = c.expert_mxfp4(name, 5).unwrap().unwrap();
        assert_eq!(one.shape(), &shape[1..]);
        assert_eq!(one.dequantize(), c.expert_f32(name, 5).unwrap());
        assert_eq!(c.tensor_bytes(name), (shape.iter().product::<usize>() / 32 * 17) as u64);
    }
    assert!(c.tensor_mxfp4("model.layers.0.mlp.router.weight").unwrap().is_none());

    let name = "model.layers.0.mlp.experts.down_proj";
    let dir = mxfp4_folder(|tensors| tensors.retain(|t| t.0 != format!("{name}_scales")));
    let e = refusal(dir.path());
    assert!(e.contains(&format!("tensor {name} of model.safetensors is stored in MXFP4, but its scales")), "{e}");
    let dir = mxfp4_folder(|tensors| tensors.retain(|t| t.0 != format!("{name}_blocks")));
    assert!(refusal(dir.path()).contains(&format!("tensor {name} missing")));
    let dir = mxfp4_folder(|tensors| {
        let blocks = tensors.iter_mut().find(|t| t.0 == format!("{name}_blocks")).unwrap();
        blocks.2 = vec![8, 64, 8, 8];
    });
    assert!(refusal(dir.path()).contains("is not MXFP4 as gpt-oss has it"));
}

#[test]
fn rows_are_arranged_by_their_order() {
    let run = |pieces: &[&'static [i32]], order, cols| {
        arranged(pieces.iter().map(|piece| Cow::Borrowed(*piece)).collect(), order, cols).into_owned()
    };
    assert_eq!(run(&[&[1, 2, 3, 4], &[5, 6, 7, 8]], Order::Rows, 2), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(run(&[&[1, 2, 3, 4], &[5, 6, 7, 8]], Order::Interleaved, 2), [1, 2, 5, 6, 3, 4, 7, 8]);
    assert_eq!(run(&[&[1, 2, 3, 4, 5, 6, 7, 8]], Order::Interleaved, 2), [1, 2, 5, 6, 3, 4, 7, 8]);
    assert_eq!(run(&[&[1, 2, 3, 4, 5, 6]], Order::Transposed, 2), [1, 4, 2, 5, 3, 6]);
}

/// The golden model as the GGUF file that llama.cpp's converter makes of it; with `packed`, experts' weights in MXFP4. `fused` puts gate and up rows
/// into one tensor.
fn as_gguf(family: &str, packed: bool, fused: bool) -> (Checkpoint, Vec<u8>) {
    let c = Checkpoint::open(&golden(family)).unwrap();
    let (m, moe) = (c.config(), c.config().moe.as_ref().unwrap());
    let arch = match family {
        "qwen3_moe" => "qwen3moe",
        "gpt_oss" => "gpt-oss",
        _ => "llama",
    };
    let k = |s: &str| format!("{arch}.{s}");
    let mut b = gguf_header(m, arch)
        .u32(&k("expert_count"), moe.num_experts as u32)
        .u32(&k("expert_used_count"), moe.num_experts_per_tok as u32)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.padding_token_id", 0);
    if family != "mixtral" {
        b = b.u32(&k("expert_feed_forward_length"), moe.moe_intermediate_size as u32);
    }
    if let RopeScaling::Yarn { factor, original_max_position_embeddings, .. } = m.rope_scaling {
        b = b
            .u32(&k("attention.sliding_window"), 16)
            .string(&k("rope.scaling.type"), "yarn")
            .f32(&k("rope.scaling.factor"), factor as f32)
            .u32(&k("rope.scaling.original_context_length"), original_max_position_embeddings as u32);
    }
    for name in c.tensor_names() {
        let (values, shape) = (c.tensor_f32(name).unwrap(), c.shape(name).unwrap().to_vec());
        let Some((block, part)) = name.strip_prefix("model.layers.").and_then(|n| n.split_once('.')) else {
            let name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm");
            b = b.tensor_f32(&name.replace("lm_head", "output"), &shape, &values);
            continue;
        };
        let norm = if family == "gpt_oss" { "post_attention_norm" } else { "ffn_norm" };
        let name = [
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", norm),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.sinks", "attn_sinks.weight"),
            ("mlp.gate.", "ffn_gate_inp."),
            ("mlp.router.", "ffn_gate_inp."),
            ("mlp.experts.gate_up_proj_bias", "ffn_gate_up_exps.bias"),
            ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
            ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
            ("mlp.experts.down_proj", "ffn_down_exps.weight"),
        ];
        let name = name.iter().fold(part.to_owned(), |name, (hf, gguf)| name.replace(hf, gguf));
        let mut tensor = |name: &str, shape: &[usize], values: &[f32]| {
            let name = format!("blk.{block}.{name}");
            let builder = std::mem::take(&mut b);
            b = match packed && shape.len() == 3 {
                true => builder.tensor(&name, GgmlType::of(BlockKind::Mxfp4), shape, &gguf_mxfp4(values, shape)),
                false => builder.tensor_f32(&name, shape, values),
            };
        };
        if let Some(kind) = name.strip_prefix("ffn_gate_up_exps.") {
            // Rows of gate, then rows of up, of every expert.
            let cols = shape.get(2).copied().unwrap_or(1);
            let half = shape[1] / 2;
            let rows = |expert: usize, up: usize| {
                let row = move |i: usize| if moe.interleaved { 2 * i + up } else { up * half + i };
                (0..half).map(move |i| (expert * 2 * half + row(i)) * cols)
            };
            let of = |expert: usize, up: usize| {
                rows(expert, up).flat_map(|at| values[at..at + cols].to_vec()).collect::<Vec<f32>>()
            };
            let experts = 0..shape[0];
            if fused {
                let both: Vec<f32> = experts.flat_map(|e| [of(e, 0), of(e, 1)].concat()).collect();
                tensor(&name, &shape, &both);
                continue;
            }
            let mut one = shape.clone();
            one[1] = half;
            for (up, module) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
                let all: Vec<f32> = experts.clone().flat_map(|e| of(e, up)).collect();
                tensor(&format!("{module}.{kind}"), &one, &all);
            }
            continue;
        }
        let heads = match part {
            "self_attn.q_proj.weight" if family == "mixtral" => m.num_attention_heads,
            "self_attn.k_proj.weight" if family == "mixtral" => m.num_key_value_heads,
            _ => 0,
        };
        if heads == 0 {
            tensor(&name, &shape, &values);
            continue;
        }
        let (half, cols) = (m.head_dim / 2, shape[1]);
        let row = |r: usize| (r / (2 * half)) * 2 * half + (r % 2) * half + r % (2 * half) / 2;
        let turned: Vec<f32> =
            (0..shape[0]).flat_map(|r| values[row(r) * cols..(row(r) + 1) * cols].to_vec()).collect();
        tensor(&name, &shape, &turned);
    }
    let bytes = b.build();
    (c, bytes)
}

/// Blocks of MXFP4 in the order of GGUF files, each from its values.
fn gguf_mxfp4(values: &[f32], shape: &[usize]) -> Vec<u8> {
    let weight = Mxfp4::quantize(values, shape).unwrap();
    let mut bytes = Vec::new();
    for (codes, scale) in weight.blocks().chunks_exact(16).zip(weight.scales()) {
        let code = |i: usize| codes[i / 2] >> (4 * (i % 2)) & 15;
        bytes.push(*scale);
        bytes.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
    }
    bytes
}

fn gguf_file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

#[test]
fn golden_mixtures_and_their_gguf_files_are_the_same_models() {
    for family in ["qwen3_moe", "mixtral", "gpt_oss"] {
        for fused in [false, true] {
            let (folder, bytes) = as_gguf(family, false, fused);
            let file = gguf_file(&bytes);
            let c = Checkpoint::open(file.path()).unwrap();
            assert!(c.ignored_tensors().is_empty(), "{family}: {:?}", c.ignored_tensors());
            assert_same(&folder, &c);
            // The class in Transformers has what GGUF files leave out.
            assert_eq!(c.config(), folder.config(), "{family}");
        }
    }
}

#[test]
fn mxfp4_of_gguf_files_is_that_of_folders() {
    let dir = mxfp4_folder(|_| {});
    let folder = Checkpoint::open(dir.path()).unwrap();
    for fused in [false, true] {
        let file = gguf_file(&as_gguf("gpt_oss", true, fused).1);
        let c = Checkpoint::open(file.path()).unwrap();
        assert_eq!((c.dtype_summary().as_str(), c.mxfp4()), ("MXFP4", folder.mxfp4()));
        for part in ["gate_up_proj", "down_proj"] {
            let name = &format!("model.layers.2.mlp.experts.{part}");
            assert_eq!(c.tensor_mxfp4(name).unwrap(), folder.tensor_mxfp4(name).unwrap(), "{part}");
            assert_eq!(c.expert_mxfp4(name, 3).unwrap(), folder.expert_mxfp4(name, 3).unwrap(), "{part}");
            assert_eq!(c.expert_f32(name, 3).unwrap(), folder.expert_f32(name, 3).unwrap(), "{part}");
        }
    }
}
