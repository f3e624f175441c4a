//! NF4 against bitsandbytes: what it stores for a weight, and what it makes of that again; MXFP4 against Transformers (`tests/golden/README.md`).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;

use std::path::PathBuf;

use golden_family::{Family, NEVER, adapter_values, assert_close, golden_file, set_adapters};
use half::bf16;
use tandem::formats::mxfp4::{BLOCK_BYTES, Mxfp4};
use tandem::formats::nf4::Nf4;
use tandem::formats::safetensors::{Dtype, SafetensorsFile};
use tandem::model::loading::Checkpoint;
use tandem::model::transformer::{Form, Transformer};
use tandem::tensor::{Device, MemoryCategory, Precision};
use tandem::train::batch::upload;
use tandem::train::config::{Activations, Dequantized, MethodConfig, MethodKind};
use tandem::train::trainer::{Trainer, lora_spec};

fn reference() -> SafetensorsFile {
    SafetensorsFile::open(&golden_file("nf4.safetensors")).unwrap()
}

/// The weights of the file: every `<name>.weight`.
fn names(file: &SafetensorsFile) -> Vec<&str> {
    let names: Vec<&str> = file.names().filter_map(|name| name.strip_suffix(".weight")).collect();
    assert!(!names.is_empty());
    names
}

/// The name of the part with a suffix: the packed codes, which have none, lie beside the original weight as `packed`.
fn part_name(weight: &str, suffix: &str) -> String {
    if suffix.is_empty() { format!("{weight}.packed") } else { format!("{weight}{suffix}") }
}

#[test]
fn golden_nf4_bytes_are_those_of_bitsandbytes() {
    let file = reference();
    for name in names(&file) {
        let weight = format!("{name}.weight");
        let info = file.info(&weight).unwrap();
        let quantized = Nf4::quantize(name, &file.to_f32(&weight).unwrap(), &info.shape, info.dtype, true).unwrap();
        let parts = quantized.parts().unwrap();
        for part in &parts {
            let stored = part_name(name, part.suffix);
            let info = file.info(&stored).unwrap();
            assert_eq!(info.dtype, part.dtype, "{stored}");
            let wanted = file.bytes(&stored).unwrap();
            assert_eq!(wanted.len(), part.bytes.len(), "{stored}");
            let different = wanted.iter().zip(part.bytes.iter()).filter(|(a, b)| a != b).count();
            assert_eq!(different, 0, "{stored}: bytes that differ, of {}", wanted.len());
        }
        let others = file.names().filter(|other| other.starts_with(&format!("{name}."))).count();
        assert_eq!(parts.len() + 2, others, "{name}: every part but the weight and its dequantized form is compared");
    }
}

#[test]
fn golden_nf4_dequantizes_to_the_same_values() {
    let file = reference();
    for name in names(&file) {
        let read = Nf4::read(&|suffix| {
            let stored = part_name(name, suffix);
            Some((file.info(&stored)?.dtype, file.bytes(&stored).unwrap()))
        });
        let weight = read.unwrap();
        let wanted = format!("{name}.dequantized");
        let info = file.info(&wanted).unwrap();
        assert_eq!((info.dtype, info.shape.as_slice()), (Dtype::BF16, weight.shape()), "{name}");
        let ours: Vec<u16> = weight.dequantize().unwrap().iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        let theirs: Vec<u16> =
            file.bytes(&wanted).unwrap().as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        let different = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
        assert_eq!((different, ours.len()), (0, theirs.len()), "{name}: values that differ");
    }
}

#[test]
fn golden_mxfp4_dequantizes_to_the_values_of_transformers() {
    let file = SafetensorsFile::open(&golden_file("mxfp4.safetensors")).unwrap();
    let names: Vec<&str> = file.names().filter_map(|name| name.strip_suffix("_blocks")).collect();
    assert_eq!(names.len(), 2, "the weights of the file");
    for name in names {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        let [experts, out, in_blocks, BLOCK_BYTES] = file.info(&blocks).unwrap().shape[..] else {
            panic!("{blocks} has another shape")
        };
        let shape = [experts, out, 32 * in_blocks];
        let weight = Mxfp4::new(&shape, file.bytes(&blocks).unwrap(), file.bytes(&scales).unwrap()).unwrap();
        // Transformers turns each expert around: [experts, in, out].
        let wanted = file.to_f32(&format!("{name}_dequantized")).unwrap();
        let ours = weight.dequantize();
        assert_eq!(ours.len(), wanted.len(), "{name}");
        let [_, rows, cols] = shape;
        let turned = |i: usize| i / (rows * cols) * rows * cols + i % cols * rows + i / cols % rows;
        let different = ours.iter().enumerate().filter(|(i, x)| x.to_bits() != wanted[turned(*i)].to_bits()).count();
        assert_eq!(different, 0, "{name}: values that differ, of {}", wanted.len());
        // What such values are quantized to stands for them again.
        assert_eq!(Mxfp4::quantize(&ours, &shape).unwrap().dequantize(), ours, "{name}");
    }
}

#[test]
fn golden_qlora_trains_the_same_from_4_bits_and_from_their_values() {
    for family in Family::all() {
        let device = Device::cpu(0, Precision::F32).unwrap();
        let batch = family.batch();
        let run = |dequantized, activations| {
            let method = MethodConfig { kind: MethodKind::Qlora, ..family.method() };
            let (lora, weights) = (lora_spec(&method), method.weight_format(dequantized));
            let checkpoint = Checkpoint::open(&family.folder).unwrap();
            let form = Form { lora: lora.as_ref(), weights, ..Form::default() };
            let model = Transformer::load_unless_stopped(&checkpoint, &device, form, &mut |_, _| {}, &NEVER);
            let (model, setup) = (model.unwrap().unwrap(), family.setup(method, activations, true));
            let weights_bytes =
                device.memory().categories.iter().find(|c| c.category == MemoryCategory::Weights).unwrap().now_bytes;
            let mut trainer = Trainer::new(model, setup).unwrap();
            set_adapters(&mut trainer, &family.case);
            let step = |_| trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss;
            let losses: Vec<f64> = (0..4).map(step).collect();
            (losses, adapter_values(&trainer), weights_bytes)
        };
        let (losses, adapters, resident_bytes) = run(Dequantized::Resident, Activations::Keep);
        let plain = family.case.to_f32("lora_loss").unwrap();
        println!("{}: losses {losses:.4?} in 4 bits, {plain:.4?} unquantized", family.name);
        assert!(
            losses.iter().zip(&plain).all(|(ours, plain)| (ours - f64::from(*plain)).abs() > 1e-5),
            "{}: nothing was quantized",
            family.name
        );
        for activations in [Activations::Keep, Activations::Recompute] {
            let (same, equal, scratch_bytes) = run(Dequantized::Scratch, activations);
            assert_eq!(same, losses, "{}", family.name);
            assert!(equal == adapters, "{}: adapters differ", family.name);
            assert!(scratch_bytes < resident_bytes, "{}: {scratch_bytes} of {resident_bytes}", family.name);
        }
    }
}

#[test]
fn golden_bitsandbytes_folders_give_the_losses_of_transformers_and_peft() {
    let device = Device::cpu(0, Precision::F32).unwrap();
    // Where the golden folder has none, all of it is the repository's own.
    let folders = golden_file("bitsandbytes");
    let root = folders.parent().unwrap().to_owned();
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folders).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let reference = SafetensorsFile::open(&folder.join("case.safetensors")).unwrap();
        // Its documents and the adapter's start are those of the family that the folder was made of.
        let family = Family::at(&root.join(&name));
        let method = MethodConfig { kind: MethodKind::Qlora, ..family.method() };
        let lora = lora_spec(&method);
        let form = Form { lora: lora.as_ref(), weights: method.weight_format(Dequantized::Scratch), ..Form::default() };
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let model = Transformer::load_unless_stopped(&checkpoint, &device, form, &mut |_, _| {}, &NEVER);
        let model = model.unwrap().unwrap();
        let batch = family.batch();
        let rows: Vec<i32> = (0..batch.input_ids.len() as i32).collect();
        let logits = model.logits(&upload(&model, &batch).unwrap(), &rows, &NEVER).unwrap().to_vec();
        assert_close(&format!("{name}: logits"), &logits, &reference.to_f32("logits").unwrap(), 1e-4);

        let mut trainer = Trainer::new(model, family.setup(method, Activations::Recompute, true)).unwrap();
        set_adapters(&mut trainer, &family.case);
        let wanted = reference.to_f32("lora_loss").unwrap();
        let step = |_| trainer.step_and_wait(std::slice::from_ref(&batch), 0.0, &NEVER).unwrap().unwrap().loss as f32;
        let losses: Vec<f32> = (0..wanted.len()).map(step).collect();
        println!("{name}: {losses:.6?}, PEFT {wanted:.6?}");
        assert_close(&format!("{name}: losses"), &losses, &wanted, 1e-4);
    }
}
