//! Tests of how weights of experts are put together: tensors of their own, stacks, transposed stacks, MXFP4, GGUF.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::{Order, arranged};
use crate::formats::mxfp4::Mxfp4;
use crate::formats::safetensors::{Dtype, SafetensorsFile, TensorSpec, write};
use crate::model::config::ModelConfig;
use crate::model::loading::{Checkpoint, INDEX_FILE, SINGLE_FILE};

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
        assert_eq!(names, grads, "{family}");
        for name in &names {
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
