//! Tests of NF4: its constants, what quantizing keeps and refuses, and what is said about damaged parts.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// `num` values around zero, by Knuth's generator.
fn values(num: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut unit = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u32 << 24) as f32 - 0.5
    };
    (0..num).map(|_| bf16::from_f32(unit() + unit()).to_f32()).collect()
}

type Stored = HashMap<String, (Dtype, Vec<u8>)>;

fn stored(weight: &Nf4<'_>) -> Stored {
    weight.parts().unwrap().into_iter().map(|p| (p.suffix.to_owned(), (p.dtype, p.bytes.into_owned()))).collect()
}

fn read(parts: &Stored) -> Result<Nf4<'_>> {
    Nf4::read(&|suffix| parts.get(suffix).map(|(dtype, bytes)| (*dtype, bytes.as_slice())))
}

fn refusal(parts: &Stored) -> String {
    format!("{:#}", read(parts).unwrap_err())
}

#[test]
fn middles_are_those_of_the_gpu_kernels_up_to_their_last_bit() {
    // As `dQuantizeNF4` of bitsandbytes spells them. Where the sum of two values is a tie, the decimal number lies on its other side.
    #[allow(clippy::excessive_precision, reason = "the digits of the source")]
    let kernels: [f32; 15] = [
        -0.8480964004993439,
        -0.6106329262256622,
        -0.4599952697753906,
        -0.33967943489551544,
        -0.23460740596055984,
        -0.13791173323988914,
        -0.045525018125772476,
        0.03979014977812767,
        0.1202552504837513,
        0.2035212516784668,
        0.2920137718319893,
        0.3893125355243683,
        0.5016634166240692,
        0.6427869200706482,
        0.8614784181118011,
    ];
    assert!(MIDDLES.iter().zip(&kernels).all(|(a, b)| a.to_bits().abs_diff(b.to_bits()) <= 1), "{MIDDLES:?}");
}

#[test]
fn even_values_are_high_halves_and_the_last_half_is_zero() {
    let q = Nf4::quantize("w", &[2.0, -2.0, 0.0], &[3, 1], Dtype::F32, false).unwrap();
    assert_eq!(&*q.packed, [0xf0, 0x77]);
    assert_eq!(q.dequantize().unwrap(), [2.0, -2.0, 0.0]);
}

#[test]
fn zero_blocks_stay_zero_with_and_without_nesting() {
    for (num, double) in [(64, false), (64, true), (200, false), (200, true)] {
        let q = Nf4::quantize("w", &vec![0.0; num], &[num], Dtype::BF16, double).unwrap();
        assert!(q.packed.iter().all(|byte| *byte == 0x77));
        assert_eq!(q.dequantize().unwrap(), vec![0.0; num]);
    }
    // Between other blocks a block of zeros is zero, too.
    let mut mixed = values(192, 3);
    mixed[64..128].fill(0.0);
    for double in [false, true] {
        let back = Nf4::quantize("w", &mixed, &[3, 64], Dtype::F32, double).unwrap().dequantize().unwrap();
        assert_eq!(back[64..128], [0.0; 64]);
    }
}

#[test]
fn what_is_not_a_weight_is_refused_by_name() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = values(100, 1);
        x[70] = bad;
        let e = Nf4::quantize("model.layers.0.w", &x, &[100], Dtype::F32, true).unwrap_err().to_string();
        assert!(e.contains("model.layers.0.w") && e.contains("value 70 of 100"), "{e}");
    }
    let e = Nf4::quantize("w", &[f32::MAX; 256], &[256], Dtype::F32, true).unwrap_err().to_string();
    assert!(e.contains("too large"), "{e}");
    assert!(Nf4::quantize("w", &[1.0; 6], &[2, 2], Dtype::F32, true).is_err());
    assert!(Nf4::quantize("w", &[], &[0, 4], Dtype::F32, true).is_err());
    assert!(Nf4::quantize("w", &[1.0], &[1], Dtype::I32, true).is_err());
}

#[test]
fn threads_change_nothing() {
    let x = values(3 * CHUNK + 77, 9);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let q = Nf4::quantize("w", &x, &[x.len()], Dtype::BF16, true).unwrap();
            (q.dequantize().unwrap(), q)
        })
    };
    assert!(run(1) == run(3));
}

#[test]
fn the_mean_is_that_of_pytorch() {
    // `torch.mean` on one thread. The correctly rounded means are one unit in the last place higher.
    for (num, torch) in [(8209, 0.334_496_74_f32), (31_001, 0.332_904_67), (100_003, 0.334_817_05)] {
        let x: Vec<f32> = values(num, 1).iter().map(|x| x.abs()).collect();
        let exact = (x.iter().map(|x| f64::from(*x)).sum::<f64>() / num as f64) as f32;
        assert_eq!((mean::mean(&x), exact.to_bits()), (torch, torch.to_bits() + 1));
    }
    assert_eq!(mean::mean(&[1.0, 2.0, 6.0]), 3.0);
}

#[test]
fn the_state_is_written_as_python_writes_it() {
    let parts = stored(&Nf4::quantize("w", &[0.5; 128], &[2, 64], Dtype::BF16, true).unwrap());
    let (_, text) = &parts[".quant_state.bitsandbytes__nf4"];
    let wanted = r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [2, 64], "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}"#;
    assert_eq!(std::str::from_utf8(text).unwrap(), wanted);
    let parts = stored(&Nf4::quantize("w", &[0.5; 128], &[2, 64], Dtype::F16, false).unwrap());
    let (_, text) = &parts[".quant_state.bitsandbytes__nf4"];
    let wanted = r#"{"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [2, 64]}"#;
    assert_eq!(std::str::from_utf8(text).unwrap(), wanted);
    assert!(parts.len() == 4 && parts.keys().all(|suffix| suffix.is_empty() || owner(suffix) == Some("")));
    assert_eq!((owner("a.weight.absmax"), owner("a.weight"), owner("a.bias")), (Some("a.weight"), None, None));
}

#[test]
fn damaged_parts_are_named() {
    let whole = stored(&Nf4::quantize("w", &values(640, 2), &[10, 64], Dtype::BF16, true).unwrap());
    for suffix in whole.keys() {
        let mut parts = whole.clone();
        parts.remove(suffix);
        let e = refusal(&parts);
        assert!(e.contains("missing") && e.contains(suffix), "{suffix}: {e}");
        let mut parts = whole.clone();
        parts.get_mut(suffix).unwrap().1.pop();
        let e = refusal(&parts);
        assert!(e.contains("damaged") && e.contains(suffix), "{suffix}: {e}");
    }
    let with_state = |text: &str| {
        let mut parts = whole.clone();
        parts.insert(".quant_state.bitsandbytes__nf4".into(), (Dtype::U8, text.into()));
        refusal(&parts)
    };
    let state = |kind: &str, blocksize: usize, dtype: &str, shape: &str| {
        let text =
            format!(r#"{{"quant_type": "{kind}", "blocksize": {blocksize}, "dtype": "{dtype}", "shape": {shape}}}"#);
        with_state(&text)
    };
    assert!(state("fp4", 64, "bfloat16", "[10, 64]").contains("fp4"));
    assert!(state("nf4", 0, "bfloat16", "[10, 64]").contains("blocks of 0"));
    assert!(state("nf4", 64, "int8", "[10, 64]").contains("int8"));
    assert!(state("nf4", 64, "bfloat16", "[10, 65]").contains("650 values"));
    assert!(state("nf4", 64, "bfloat16", &format!("[{0}, {0}]", usize::MAX)).contains("shape"));
    assert!(state("nf4", 64, "bfloat16", "[10, 64]").contains("nested_offset"));
    let mut parts = whole.clone();
    parts.get_mut(".quant_map").unwrap().1[0] ^= 1;
    assert!(refusal(&parts).contains("values of NF4"));
    let mut parts = whole.clone();
    parts.get_mut(".nested_absmax").unwrap().1.copy_from_slice(&f32::NAN.to_le_bytes());
    let e = read(&parts).unwrap().dequantize().unwrap_err().to_string();
    assert!(e.contains("not finite"), "{e}");
    let mut parts = whole;
    parts.insert(".quant_state.bitsandbytes__fp4".into(), (Dtype::U8, Vec::new()));
    assert!(refusal(&parts).contains("FP4"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_shape_goes_to_a_file_and_back(rows in 1_usize..70, cols in 1_usize..70, seed: u64, double: bool, kind in 0..3) {
        let dtype = [Dtype::F32, Dtype::F16, Dtype::BF16][kind as usize];
        let x = values(rows * cols, seed);
        let q = Nf4::quantize("w", &x, &[rows, cols], dtype, double).unwrap();
        let parts = stored(&q);
        prop_assert_eq!(&read(&parts).unwrap(), &q);
        let back = q.dequantize().unwrap();
        prop_assert_eq!(back.len(), x.len());
        // Half the widest gap between two values is 0.152; absmax in 8 bits is off by up to 4% of the nested scale.
        for (x, back) in x.chunks(BLOCK).zip(back.chunks(BLOCK)) {
            let absmax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            let bound = 0.1525 * absmax + if double { 0.04 } else { 0.002 };
            prop_assert!(x.iter().zip(back).all(|(x, back)| (x - back).abs() <= bound));
        }
    }

    #[test]
    fn damaged_states_never_panic(at in 0_usize..200, byte: u8) {
        let mut parts = stored(&Nf4::quantize("w", &values(640, 2), &[10, 64], Dtype::BF16, true).unwrap());
        let text = &mut parts.get_mut(".quant_state.bitsandbytes__nf4").unwrap().1;
        let len = text.len();
        text[at % len] = byte;
        if let Ok(weight) = read(&parts) {
            prop_assert_eq!(weight.num_elements().div_ceil(2), 320);
            let _ = weight.dequantize();
        }
    }

    /// Without nesting a dequantized weight is its own nearest: nested scales are not their blocks' largest magnitudes any more.
    #[test]
    fn quantizing_again_changes_nothing(num in 1_usize..700, seed: u64, kind in 0..2) {
        let dtype = [Dtype::F32, Dtype::BF16][kind as usize];
        let q = Nf4::quantize("w", &values(num, seed), &[num], dtype, false).unwrap();
        let again = Nf4::quantize("w", &q.dequantize().unwrap(), &[num], dtype, false).unwrap();
        prop_assert_eq!(again, q);
    }
}
