//! AdamW with state in 8 bits against bitsandbytes: maps, and what parameters and states are after 1, 5 and 20 steps (`tests/golden/README.md`).

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;

use golden_family::{device, error, golden_file};
use tandem::formats::blockwise8::{dynamic_map, unsigned_dynamic_map};
use tandem::formats::safetensors::SafetensorsFile;
use tandem::ops::adamw::{self, AdamWParams};
use tandem::ops::adamw8::{self, MIN_LEN, Moment8};

/// How far values may be from the reference, as a share of how far they moved: roundings of f32.
const VALUE_BOUND: f64 = 1e-5;
/// Share of values for which a rounding may have moved a number across the middle between two codes in one of twenty steps: they go their own way a
/// little from then on. A chance of about 1e-5 for each number and step, and two numbers a value.
const OTHER_CODE: f64 = 2e-3;

fn params(step: u64) -> AdamWParams {
    AdamWParams { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, step }
}

struct Reference(SafetensorsFile);

impl Reference {
    fn open() -> Self {
        Self(SafetensorsFile::open(&golden_file("adamw8.safetensors")).unwrap())
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.0.to_f32(name).unwrap()
    }

    /// Calls `f(step, gradient of that step)` for each step.
    fn for_each_step(&self, tensor: &str, mut f: impl FnMut(u64, &[f32])) {
        let (a, b) = (self.f32s(&format!("{tensor}.a")), self.f32s(&format!("{tensor}.b")));
        for (step, c) in (1..).zip(self.f32s("coefficients").as_chunks::<2>().0) {
            let gradient: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a * c[0] + b * c[1]).collect();
            f(step, &gradient);
        }
    }

    /// The value of a tensor after a step, where the file has it.
    fn after(&self, tensor: &str, step: u64) -> Option<Vec<f32>> {
        let name = format!("{tensor}.{step}.value");
        self.0.info(&name).is_some().then(|| self.f32s(&name))
    }
}

/// Error of the way that a value has come from its start, by norm.
fn moved_error(value: &[f32], wanted: &[f32], start: &[f32]) -> f64 {
    let moved = |value: &[f32]| -> Vec<f32> { value.iter().zip(start).map(|(x, start)| x - start).collect() };
    error(&moved(value), &moved(wanted))
}

#[test]
fn golden_maps_are_those_of_bitsandbytes() {
    let reference = Reference::open();
    assert_eq!(reference.f32s("map.signed"), dynamic_map());
    assert_eq!(reference.f32s("map.unsigned"), unsigned_dynamic_map());
}

#[test]
fn golden_states_in_8_bits_follow_bitsandbytes_for_twenty_steps() {
    let reference = Reference::open();
    let device = device(2);
    for tensor in ["ragged", "limit", "sparse"] {
        let start = reference.f32s(&format!("{tensor}.start"));
        assert!(start.len() >= MIN_LEN);
        let mut value = start.clone();
        let mut moments = [Moment8::zeros(&device, start.len()), Moment8::zeros(&device, start.len())];
        let mut compared = 0;
        reference.for_each_step(tensor, |step, gradient| {
            let [m, v] = &mut moments;
            device.run(|| adamw8::update(&params(step), 1.0, &mut value, gradient, m, v));
            let Some(wanted) = reference.after(tensor, step) else { return };
            let moved = value.iter().zip(&wanted).zip(&start).map(|((x, wanted), start)| [*x, *wanted, *start]);
            let off = |[x, wanted, start]: &[f32; 3]| {
                let lr = params(step).lr as f32;
                f64::from((x - wanted).abs()) > VALUE_BOUND * f64::from((wanted - start).abs() + lr)
            };
            let off = moved.filter(off).count();
            assert!(off as f64 <= OTHER_CODE * value.len() as f64, "{tensor} after step {step}: {off} values are off");
            for (name, moment) in ["m", "v"].into_iter().zip(&moments) {
                let name = format!("{tensor}.{step}.{name}");
                let codes = reference.0.bytes(&format!("{name}.codes")).unwrap();
                let different = moment.codes.u8s().iter().zip(codes).filter(|(a, b)| a != b).count();
                assert_eq!(moment.codes.len(), codes.len().next_multiple_of(256));
                let most = OTHER_CODE * codes.len() as f64;
                assert!(different as f64 <= most, "{name}: {different} of {} codes differ", codes.len());
                let off = error(moment.absmax.f32s(), &reference.f32s(&format!("{name}.absmax")));
                assert!(off <= VALUE_BOUND, "{name}.absmax: {off:.2e}");
            }
            compared += 1;
        });
        assert_eq!(compared, 3);
    }
}

#[test]
fn golden_small_tensors_keep_32_bits_as_in_bitsandbytes() {
    let reference = Reference::open();
    let start = reference.f32s("tiny.start");
    assert!(start.len() < MIN_LEN);
    let (mut value, mut m, mut v) = (start.clone(), vec![0.0; start.len()], vec![0.0; start.len()]);
    reference.for_each_step("tiny", |step, gradient| {
        adamw::update(&params(step), 1.0, &mut value, gradient, &mut m, &mut v);
        let Some(wanted) = reference.after("tiny", step) else { return };
        assert!(moved_error(&value, &wanted, &start) <= VALUE_BOUND, "step {step}");
        for (name, moment) in [("m", &m), ("v", &v)] {
            assert!(
                error(moment, &reference.f32s(&format!("tiny.{step}.{name}"))) <= VALUE_BOUND,
                "{name}, step {step}"
            );
        }
    });
}
