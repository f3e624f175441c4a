//! AdamW whose moments take 8 bits a value: the update of [`adamw`](super::adamw) with moments as bitsandbytes keeps them.
//!
//! In blocks of 256 values a moment is `map[code] · absmax[block]`, with the signed dynamic map for the first moment and the unsigned one for the second
//! (`formats::blockwise8`). An update makes both moments in f32, uses them, and stores the nearest codes. Source: Dettmers et al. 2021, "8-bit
//! Optimizers via Block-wise Quantization" (arXiv 2110.02861), and `kOptimizerStatic8bit2StateBlockwise` of bitsandbytes 0.50.

use std::sync::LazyLock;

use rayon::prelude::*;

use super::MIN_VALUES_PER_TASK;
use super::adamw::AdamWParams;
use crate::formats::blockwise8::{MAP_LEN, dynamic_map, middles, nearest, unsigned_dynamic_map};
use crate::tensor::{Bytes, Device, MemoryCategory, Tensor};

/// Values with an absmax of their own; the kernel has the same number.
pub const BLOCK: usize = 256;
/// Tensors with fewer values keep their moments in 32 bits (`min_8bit_size` of bitsandbytes): they take little, and may matter much.
pub const MIN_LEN: usize = 4096;

/// A map with what parts its values.
pub(super) struct Map {
    values: [f32; MAP_LEN],
    middles: [f32; MAP_LEN - 1],
}

impl Map {
    fn new(values: [f32; MAP_LEN]) -> Self {
        Self { middles: middles(&values), values }
    }
}

/// The map of the first moment.
static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(dynamic_map()));
/// The map of the second moment.
static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(unsigned_dynamic_map()));

/// Values of [`tables`].
pub(super) const TABLES_LEN: usize = 4 * MAP_LEN;

/// What the kernel reads: for the first and then the second moment, the 256 values of its map and its 255 middles with infinity behind them.
pub(super) fn tables() -> Vec<f32> {
    let of = |map: &Map| map.values.into_iter().chain(map.middles).chain([f32::INFINITY]);
    of(&SIGNED).chain(of(&UNSIGNED)).collect()
}

/// One moment of a tensor of `n` values.
#[derive(Debug)]
pub struct Moment8 {
    /// A code a value; room for whole blocks.
    pub codes: Bytes,
    /// The largest magnitude of each block [⌈n / 256⌉], f32.
    pub absmax: Tensor,
}

impl Moment8 {
    /// A moment that is zero, for `len` values.
    pub fn zeros(device: &Device, len: usize) -> Self {
        let (category, blocks) = (MemoryCategory::Optimizer, len.div_ceil(BLOCK));
        Self { codes: device.zero_bytes(category, blocks * BLOCK), absmax: device.zeros_f32(category, &[blocks]) }
    }

    /// The values that a moment with `map` stands for, on the host.
    fn to_vec(&self, len: usize, map: &Map) -> Vec<f32> {
        let (codes, absmax) = (self.codes.to_vec(), self.absmax.to_vec());
        let values = codes.iter().enumerate().map(|(i, code)| map.values[usize::from(*code)] * absmax[i / BLOCK]);
        values.take(len).collect()
    }

    /// The values of a first moment of `len` values, on the host. From a GPU this waits for the device.
    pub fn first_to_vec(&self, len: usize) -> Vec<f32> {
        self.to_vec(len, &SIGNED)
    }

    /// The values of a second moment of `len` values, on the host. From a GPU this waits for the device.
    pub fn second_to_vec(&self, len: usize) -> Vec<f32> {
        self.to_vec(len, &UNSIGNED)
    }
}

/// Updates `param`, and the moments `m` and `v`, from `grad·grad_scale`, on the CPU. On a GPU `multi_tensor` does the same, to the bit.
///
/// `m ← β1·m + (1 − β1)·g`; `v ← β2·v + (1 − β2)·g²`; the rest as [`adamw::update`](super::adamw::update), with the moments as they are before they are
/// rounded to codes.
pub fn update(p: &AdamWParams, grad_scale: f32, param: &mut [f32], grad: &[f32], m: &mut Moment8, v: &mut Moment8) {
    let blocks = param.len().div_ceil(BLOCK);
    assert_eq!((param.len(), m.codes.len(), v.codes.len()), (grad.len(), blocks * BLOCK, blocks * BLOCK), "adamw8");
    let c = p.constants();
    let codes = m.codes.u8s_mut().par_chunks_mut(BLOCK).zip(v.codes.u8s_mut().par_chunks_mut(BLOCK));
    let absmax = m.absmax.f32s_mut().par_iter_mut().zip(v.absmax.f32s_mut());
    let values = param.par_chunks_mut(BLOCK).zip(grad.par_chunks(BLOCK)).zip(codes.zip(absmax));
    values.with_min_len(MIN_VALUES_PER_TASK / BLOCK).for_each(
        |((param, grad), ((m_codes, v_codes), (m_absmax, v_absmax)))| {
            let (mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK]);
            for (i, (w, g)) in param.iter_mut().zip(grad).enumerate() {
                let g = g * grad_scale;
                m[i] = SIGNED.values[usize::from(m_codes[i])] * *m_absmax * c.beta1 + g * c.one_minus_beta1;
                v[i] = UNSIGNED.values[usize::from(v_codes[i])] * *v_absmax * c.beta2 + g * g * c.one_minus_beta2;
                *w = *w * c.decay - c.step_size * (m[i] / (v[i].sqrt() / c.root_correction2 + c.eps));
            }
            *m_absmax = largest(&m);
            *v_absmax = largest(&v);
            for i in 0..param.len() {
                m_codes[i] = signed_code(m[i], *m_absmax);
                v_codes[i] = nearest(&UNSIGNED.middles, unit(v[i], *v_absmax));
            }
        },
    );
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()))
}

/// A value in units of its block; 0 in a block of zeros.
fn unit(x: f32, absmax: f32) -> f32 {
    if absmax > 0.0 { x / absmax } else { 0.0 }
}

/// The nearest code that does not change the sign: what is negative and all but zero becomes the smallest negative value, not 0.
fn signed_code(x: f32, absmax: f32) -> u8 {
    let code = nearest(&SIGNED.middles, unit(x, absmax));
    if SIGNED.values[usize::from(code)].is_sign_negative() == x.is_sign_negative() {
        code
    } else if x > 0.0 {
        code + 1
    } else {
        code - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::adamw;
    use crate::ops::testing::{Values, assert_close, cpu};

    const P: AdamWParams = AdamWParams { lr: 1e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: 1 };

    #[test]
    fn steps_are_nearly_those_with_32_bits_whatever_the_threads() {
        let n = 20 * MIN_LEN + 100;
        let run = |threads| {
            let (device, mut values) = (cpu(threads), Values::new(3));
            let start = values.vec(n);
            let (mut ours, mut exact) = (start.clone(), start.clone());
            let mut moments = [Moment8::zeros(&device, n), Moment8::zeros(&device, n)];
            let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
            for step in 1..=5 {
                let (p, gradient) = (AdamWParams { step, ..P }, values.vec(n));
                device.run(|| {
                    let [m, v] = &mut moments;
                    update(&p, 0.5, &mut ours, &gradient, m, v);
                });
                adamw::update(&p, 0.5, &mut exact, &gradient, &mut m, &mut v);
            }
            let moved = |w: &[f32]| -> Vec<f32> { w.iter().zip(&start).map(|(w, start)| w - start).collect() };
            assert_close("way of the parameters", &moved(&ours), &moved(&exact), 2e-2);
            assert_close("first moment", &moments[0].first_to_vec(n), &m, 2e-2);
            assert_close("second moment", &moments[1].second_to_vec(n), &v, 2e-2);
            ours
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn zeros_stay_zero_and_signs_stay_signs() {
        let device = cpu(1);
        let mut moments = [Moment8::zeros(&device, 2 * BLOCK), Moment8::zeros(&device, 2 * BLOCK)];
        let mut value = vec![1.0; 2 * BLOCK];
        let mut gradient = vec![0.0; 2 * BLOCK];
        gradient[..3].copy_from_slice(&[1.0, -1e-9, 1e-9]);
        let [m, v] = &mut moments;
        update(&P, 1.0, &mut value, &gradient, m, v);
        let (first, second) = (m.first_to_vec(2 * BLOCK), v.second_to_vec(2 * BLOCK));
        assert!((first[0] - 0.1).abs() < 1e-7 && (second[0] - 0.01).abs() < 1e-7);
        assert!(first[1] < 0.0 && first[1] > -1e-7, "the smallest negative value, not zero: {}", first[1]);
        assert!(first[2..].iter().chain(&second[1..]).all(|x| *x == 0.0));
        assert!(value[3..].iter().all(|w| *w == 1.0 - 1e-3 * 0.1), "only weight decay acts");
    }

    #[test]
    fn a_value_takes_two_bytes_and_a_block_eight_more() {
        let device = cpu(1);
        let moments = [Moment8::zeros(&device, 10 * BLOCK), Moment8::zeros(&device, 10 * BLOCK)];
        assert_eq!(device.memory().now_bytes, 10 * (2 * BLOCK as u64 + 8));
        drop(moments);
        assert_eq!(device.memory().now_bytes, 0);
    }
}
