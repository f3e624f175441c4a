//! Packed attention against the definition with a dense mask, and its gradients against finite differences.

use super::{AttentionShape, Qkv, Saved, TileList, backward, forward};
use crate::ops::testing::{Values, assert_close, assert_gradient, cpu, dot};
use crate::tensor::{Device, MemoryCategory, Tensor};

const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

struct Case {
    device: Device,
    shape: AttentionShape,
    tiles: TileList,
    cu_seqlens: Vec<i32>,
    window: Option<usize>,
}

impl Case {
    fn new(threads: usize, heads: (usize, usize), head_dim: usize, cu_seqlens: &[i32], window: Option<usize>) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Self {
            device: cpu(threads),
            shape: AttentionShape { num_heads: heads.0, num_kv_heads: heads.1, head_dim, scale },
            tiles: TileList::new(cu_seqlens, window),
            cu_seqlens: cu_seqlens.to_vec(),
            window,
        }
    }

    fn widths(&self) -> [usize; 3] {
        let (q, kv) = (self.shape.num_heads * self.shape.head_dim, self.shape.num_kv_heads * self.shape.head_dim);
        [q, kv, kv]
    }

    fn qkv(&self, seed: u64) -> [Tensor; 3] {
        let mut values = Values::new(seed);
        self.widths().map(|width| values.tensor(&self.device, &[self.tiles.total_tokens(), width]))
    }

    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
        let mut o = self.device.empty(SCRATCH, &[q.rows(), q.cols()]);
        let mut lse = self.device.empty(SCRATCH, &[q.rows(), self.shape.num_heads]);
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        self.device.run(|| forward(&self.device, &self.shape, &self.tiles, qkv, &mut o, &mut lse));
        (o, lse)
    }

    /// Gradients of q, k and v.
    fn backward(&self, [q, k, v]: [&Tensor; 3], o: &Tensor, softmax_lse: &Tensor, d_o: &Tensor) -> [Vec<f32>; 3] {
        let [q_width, kv_width, _] = self.widths();
        // Rows with room behind them, as the engine has them.
        let mut dqkv = self.device.empty(SCRATCH, &[q.rows(), q_width + 2 * kv_width + 3]);
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let saved = Saved { qkv, o: o.view(), softmax_lse };
        self.device.run(|| {
            let dqkv = dqkv.first_columns_mut(q_width + 2 * kv_width);
            backward(&self.device, &self.shape, &self.tiles, &saved, d_o, dqkv);
        });
        let dqkv = dqkv.view();
        [(0, q_width), (q_width, kv_width), (q_width + kv_width, kv_width)]
            .map(|(from, width)| dqkv.columns(from, width).to_vec())
    }

    /// The definition, in f64, with the mask spelled out per pair.
    fn reference(&self, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = self.shape;
        let total = self.tiles.total_tokens();
        let document = |row: usize| self.cu_seqlens.iter().filter(|&&start| start as usize <= row).count();
        let mut o = vec![0.0f32; total * heads * d];
        for (i, h) in (0..total).flat_map(|i| (0..heads).map(move |h| (i, h))) {
            let kv = h / (heads / num_kv_heads);
            let seen: Vec<usize> = (0..total)
                .filter(|&j| document(i) == document(j) && j <= i && i - j < self.window.unwrap_or(usize::MAX))
                .collect();
            let score = |j: usize| -> f64 {
                let (q, k) = (&q[(i * heads + h) * d..][..d], &k[(j * num_kv_heads + kv) * d..][..d]);
                f64::from(scale) * q.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
            };
            let max = seen.iter().map(|&j| score(j)).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = seen.iter().map(|&j| (score(j) - max).exp()).sum();
            for c in 0..d {
                let mix: f64 =
                    seen.iter().map(|&j| (score(j) - max).exp() * f64::from(v[(j * num_kv_heads + kv) * d + c])).sum();
                o[(i * heads + h) * d + c] = (mix / sum) as f32;
            }
        }
        o
    }
}

#[test]
fn forward_agrees_with_the_definition() {
    for window in [None, Some(1), Some(5), Some(64), Some(70)] {
        let case = Case::new(2, (4, 2), 8, &[0, 3, 4, 140, 205], window);
        let [q, k, v] = case.qkv(1);
        let (o, _) = case.forward(&q, &k, &v);
        assert_close(&format!("window {window:?}"), o.f32s(), &case.reference(q.f32s(), k.f32s(), v.f32s()), 2e-6);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for window in [None, Some(3)] {
        let case = Case::new(2, (4, 2), 3, &[0, 1, 8], window);
        let [q, k, v] = case.qkv(2);
        let (o, softmax_lse) = case.forward(&q, &k, &v);
        let d_o = Values::new(3).tensor(&case.device, &[8, 12]);
        let [dq, dk, dv] = case.backward([&q, &k, &v], &o, &softmax_lse, &d_o);
        let loss = |q: &[f32], k: &[f32], v: &[f32]| dot(d_o.f32s(), &case.reference(q, k, v));
        assert_gradient("dq", q.f32s(), &dq, |q| loss(q, k.f32s(), v.f32s()));
        assert_gradient("dk", k.f32s(), &dk, |k| loss(q.f32s(), k, v.f32s()));
        assert_gradient("dv", v.f32s(), &dv, |v| loss(q.f32s(), k.f32s(), v));
    }
}

#[test]
fn packed_equals_unpacked_and_threads_do_not_matter() {
    let run = |threads, cu_seqlens: &[i32], rows: std::ops::Range<usize>| {
        let case = Case::new(threads, (3, 1), 16, cu_seqlens, Some(40));
        let whole = Case::new(1, (3, 1), 16, &[0, 200], None).qkv(5);
        let part = |x: &Tensor| {
            let data = x.f32s()[rows.start * x.cols()..rows.end * x.cols()].to_vec();
            case.device.tensor(SCRATCH, &[rows.len(), x.cols()], data)
        };
        let [q, k, v] = [part(&whole[0]), part(&whole[1]), part(&whole[2])];
        let (o, softmax_lse) = case.forward(&q, &k, &v);
        let [dq, dk, dv] = case.backward([&q, &k, &v], &o, &softmax_lse, &q);
        [o.to_vec(), dq, dk, dv]
    };
    let packed = run(2, &[0, 77, 200], 0..200);
    assert_eq!(packed, run(1, &[0, 77, 200], 0..200), "thread counts must not change a bit");
    let (first, second) = (run(1, &[0, 77], 0..77), run(1, &[0, 123], 77..200));
    for (packed, (first, second)) in packed.iter().zip(first.iter().zip(&second)) {
        assert_eq!(packed, &[first.as_slice(), second.as_slice()].concat(), "packed must equal unpacked");
    }
}
