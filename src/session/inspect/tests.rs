//! Models looked at before training, compared with what the engine makes of them.

use super::*;
use crate::model::transformer::Transformer;
use crate::session::support;
use crate::tensor::device::Device;
use crate::train::config::{Activations, OptimizerConfig, Precision};
use crate::train::switches::Switches;
use crate::train::trainer::{Trainer, TrainerSetup};

#[test]
fn a_model_folder_tells_its_shape_and_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path = support::tiny_model(folder.path());
    let info = inspect(&path).unwrap();
    assert_eq!((info.name.as_str(), info.architecture), ("tiny módel", "LlamaForCausalLM"));
    assert_eq!((info.num_hidden_layers, info.hidden_size, info.vocab_size), (2, 32, 259));
    assert_eq!((info.dtype.as_str(), info.end_token.as_deref()), ("f32", Some("<|im_end|>")));
    assert!(info.has_chat_template && info.pad_differs && info.warnings.is_empty(), "{info:?}");
    assert_eq!(info.bytes, info.num_parameters * 4);
    let error = inspect(&folder.path().join("none")).unwrap_err();
    assert!(format!("{error:#}").contains("none"), "{error:#}");
}

#[test]
fn experts_are_told_with_the_blocks_that_have_them() {
    let folder = tempfile::tempdir().unwrap();
    let info = inspect(&support::tiny_sparse_model(folder.path(), 3, &[1])).unwrap();
    let experts = info.experts.as_ref().unwrap();
    assert_eq!(experts.describe(), "6 experts, 2 a token, in 2 of 3 layers");
    assert_eq!(experts.layers, [true, false, true]);
    assert_eq!(experts.projections, [("gate_up_proj", 48, 32), ("down_proj", 32, 24)]);
    assert!(info.has_mlp());
    assert_eq!(info.bytes, info.num_parameters * 4);
    let info = inspect(&support::tiny_sparse_model(folder.path(), 2, &[])).unwrap();
    assert_eq!(info.experts.as_ref().unwrap().describe(), "6 experts, 2 a token");
    assert!(!info.has_mlp());
    let dense = inspect(&support::tiny_model(folder.path())).unwrap();
    assert!(dense.experts.is_none() && dense.has_mlp());
}

fn method(targets: &[&str], parameters: &[&str], layers: &[usize]) -> MethodConfig {
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
    MethodConfig {
        r: 4,
        target_modules: words(targets),
        target_parameters: words(parameters),
        layers_to_transform: layers.to_vec(),
        ..MethodConfig::default()
    }
}

#[test]
fn trainable_weights_are_those_the_trainer_trains() {
    let folder = tempfile::tempdir().unwrap();
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    let dense = support::tiny_model(folder.path());
    let sparse = support::tiny_sparse_model(folder.path(), 3, &[1]);
    let (gate_up, down) = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj");
    for (path, method) in [
        (&dense, method(&["all-linear"], &[], &[])),
        (&dense, method(&["q_proj", "down_proj"], &[], &[1])),
        (&dense, full.clone()),
        (&sparse, method(&["all-linear"], &[], &[])),
        (&sparse, method(&["q_proj", "down_proj"], &[down], &[1, 2])),
        (&sparse, method(&["v_proj"], &[gate_up, down], &[])),
        (&sparse, method(&[], &[gate_up], &[0])),
        (&sparse, full),
    ] {
        let info = inspect(path).unwrap();
        let device = Device::cpu(1, Precision::F32).unwrap();
        let model = Transformer::load(&Checkpoint::open(path).unwrap(), &device, &mut |_, _| {}).unwrap();
        let setup = TrainerSetup {
            method: method.clone(),
            optimizer: OptimizerConfig::default(),
            switches: Switches { activations: Activations::Keep, ..Switches::default() },
            seed: 0,
            total_steps: 1,
        };
        let trainer = Trainer::new(model, setup).unwrap();
        assert_eq!(info.num_trainable(&method), trainer.num_trainable(), "{method:?}");
    }
}

#[test]
fn models_are_named_as_people_know_them() {
    for (path, expected) in [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("/m/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/h/hub/models--Qwen--Qwen3-0.6B/snapshots/0a1b", "Qwen3-0.6B"),
        ("/h/hub/models--gpt2/snapshots/0a1b", "gpt2"),
    ] {
        assert_eq!(model_name(Path::new(path)), expected);
    }
}
