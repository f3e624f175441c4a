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
fn adapters_of_an_mlp_count_in_dense_blocks_only() {
    let folder = tempfile::tempdir().unwrap();
    let dense = inspect(&support::tiny_model(folder.path())).unwrap();
    let mixture = ModelInfo { experts: Some((8, 2)), sparse: vec![false, true], ..dense.clone() };
    let method = |targets: &[&str], layers: &[usize]| MethodConfig {
        target_modules: targets.iter().map(|target| (*target).to_owned()).collect(),
        layers_to_transform: layers.to_vec(),
        ..MethodConfig::default()
    };
    let [both, first, second] = [&[][..], &[0], &[1]].map(|layers| method(&["q_proj", "down_proj"], layers));
    assert_eq!(dense.num_trainable(&both), 2 * dense.num_trainable(&first));
    assert_eq!(mixture.num_trainable(&first), dense.num_trainable(&first));
    assert_eq!(mixture.num_trainable(&second), dense.num_trainable(&method(&["q_proj"], &[1])));
    assert_eq!(mixture.num_trainable(&both), mixture.num_trainable(&first) + mixture.num_trainable(&second));
}

#[test]
fn trainable_weights_are_those_the_trainer_trains() {
    let folder = tempfile::tempdir().unwrap();
    let path = support::tiny_model(folder.path());
    let info = inspect(&path).unwrap();
    let some = |targets: &[&str], layers: &[usize]| MethodConfig {
        r: 4,
        target_modules: targets.iter().map(|target| (*target).to_owned()).collect(),
        layers_to_transform: layers.to_vec(),
        ..MethodConfig::default()
    };
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    for method in [some(&["all-linear"], &[]), some(&["q_proj", "down_proj"], &[1]), full] {
        let device = Device::cpu(1, Precision::F32).unwrap();
        let model = Transformer::load(&Checkpoint::open(&path).unwrap(), &device, &mut |_, _| {}).unwrap();
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
