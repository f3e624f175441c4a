//! NF4 against bitsandbytes: what it stores for a weight, and what it makes of that again (`tests/golden/README.md`).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;

use golden_family::golden_file;
use half::bf16;
use tandem::formats::nf4::Nf4;
use tandem::formats::safetensors::{Dtype, SafetensorsFile};

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
