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

/// Queries, keys, values, and sinks.
struct Inputs {
    qkv: [Tensor; 3],
    sinks: Option<Tensor>,
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

    /// The same on the masked path.
    fn masked(self) -> Self {
        Self { tiles: TileList::masked(&self.device, &self.cu_seqlens, self.window), ..self }
    }

    fn inputs(&self, seed: u64, sinks: bool) -> Inputs {
        let mut values = Values::new(seed);
        let widths = [self.shape.q_width(), self.shape.kv_width(), self.shape.kv_width()];
        let qkv = widths.map(|width| values.tensor(&self.device, &[self.tiles.total_tokens(), width]));
        let sinks = sinks.then(|| values.tensor(&self.device, &[self.shape.num_heads]));
        Inputs { qkv, sinks }
    }

    fn forward(&self, inputs: &Inputs) -> (Tensor, Tensor) {
        let Inputs { qkv: [q, k, v], sinks } = inputs;
        let mut o = self.device.empty(SCRATCH, &[q.rows(), q.cols()]);
        let mut lse = self.device.empty(SCRATCH, &[q.rows(), self.shape.num_heads]);
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        self.device.run(|| forward(&self.device, &self.shape, &self.tiles, qkv, sinks.as_ref(), &mut o, &mut lse));
        (o, lse)
    }

    /// Gradients of q, k and v, and, where there are sinks, what is added to their gradient.
    fn backward(&self, inputs: &Inputs, o: &Tensor, softmax_lse: &Tensor, d_o: &Tensor) -> Vec<Vec<f32>> {
        let Inputs { qkv: [q, k, v], sinks } = inputs;
        let (width, heads) = (self.shape.qkv_width(), self.shape.num_heads);
        // Rows with room behind them, as the engine has them.
        let mut dqkv = self.device.empty(SCRATCH, &[q.rows(), width + 3]);
        let before = 0.25;
        let mut d_sinks = sinks.as_ref().map(|_| self.device.tensor(SCRATCH, &[heads], vec![before; heads]));
        let qkv = Qkv { q: q.view(), k: k.view(), v: v.view() };
        let saved = Saved { qkv, sinks: sinks.as_ref(), o: o.view(), softmax_lse };
        self.device.run(|| {
            let dqkv = dqkv.first_columns_mut(width);
            backward(&self.device, &self.shape, &self.tiles, &saved, d_o, dqkv, d_sinks.as_mut());
        });
        let Qkv { q, k, v } = Qkv::of(&self.shape, dqkv.view(), None);
        let added = d_sinks.map(|gradient| gradient.f32s().iter().map(|x| x - before).collect());
        [q, k, v].iter().map(|part| part.to_vec()).chain(added).collect()
    }

    /// The definition, in f64, with the mask spelled out per pair: o and the logarithm of the softmax's denominator.
    fn reference(&self, [q, k, v]: [&[f32]; 3], sinks: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
        let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = self.shape;
        let total = self.tiles.total_tokens();
        let document = |row: usize| self.cu_seqlens.iter().filter(|&&start| start as usize <= row).count();
        let (mut o, mut lse) = (vec![0.0f32; total * heads * d], vec![0.0f32; total * heads]);
        for (i, h) in (0..total).flat_map(|i| (0..heads).map(move |h| (i, h))) {
            let kv = h / (heads / num_kv_heads);
            let seen: Vec<usize> = (0..total)
                .filter(|&j| document(i) == document(j) && j <= i && i - j < self.window.unwrap_or(usize::MAX))
                .collect();
            let score = |j: usize| -> f64 {
                let (q, k) = (&q[(i * heads + h) * d..][..d], &k[(j * num_kv_heads + kv) * d..][..d]);
                f64::from(scale) * q.iter().zip(k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
            };
            let sink = sinks.map(|sinks| f64::from(sinks[h]));
            let sum: f64 = seen.iter().map(|&j| score(j)).chain(sink).map(f64::exp).sum();
            for c in 0..d {
                let mix: f64 =
                    seen.iter().map(|&j| score(j).exp() * f64::from(v[(j * num_kv_heads + kv) * d + c])).sum();
                o[(i * heads + h) * d + c] = (mix / sum) as f32;
            }
            lse[i * heads + h] = sum.ln() as f32;
        }
        (o, lse)
    }
}

#[test]
fn forward_agrees_with_the_definition() {
    for (window, sinks) in [(None, false), (Some(1), false), (Some(5), true), (Some(64), false), (Some(70), true)] {
        let case = Case::new(2, (4, 2), 8, &[0, 3, 4, 140, 205], window);
        let inputs = case.inputs(1, sinks);
        let (o, lse) = case.forward(&inputs);
        let (want_o, want_lse) =
            case.reference(inputs.qkv.each_ref().map(Tensor::f32s), inputs.sinks.as_ref().map(Tensor::f32s));
        assert_close(&format!("window {window:?}"), o.f32s(), &want_o, 2e-6);
        assert_close(&format!("lse, window {window:?}"), lse.f32s(), &want_lse, 2e-6);
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for (window, sinks) in [(None, false), (Some(3), false), (None, true), (Some(3), true)] {
        let case = Case::new(2, (4, 2), 3, &[0, 1, 8], window);
        let inputs = case.inputs(2, sinks);
        let (o, softmax_lse) = case.forward(&inputs);
        let d_o = Values::new(3).tensor(&case.device, &[8, 12]);
        let gradients = case.backward(&inputs, &o, &softmax_lse, &d_o);
        assert_eq!(gradients.len(), if sinks { 4 } else { 3 });
        let [q, k, v] = inputs.qkv.each_ref().map(Tensor::f32s);
        let sinks = inputs.sinks.as_ref().map(Tensor::f32s);
        let loss = |qkv: [&[f32]; 3], sinks: Option<&[f32]>| dot(d_o.f32s(), &case.reference(qkv, sinks).0);
        assert_gradient("dq", q, &gradients[0], |q| loss([q, k, v], sinks));
        assert_gradient("dk", k, &gradients[1], |k| loss([q, k, v], sinks));
        assert_gradient("dv", v, &gradients[2], |v| loss([q, k, v], sinks));
        if let Some(sinks) = sinks {
            assert_gradient("dsinks", sinks, &gradients[3], |sinks| loss([q, k, v], Some(sinks)));
        }
    }
}

#[test]
fn a_sink_that_weighs_nothing_changes_nothing_and_one_that_weighs_all_leaves_nothing() {
    let case = Case::new(1, (2, 1), 8, &[0, 5, 90], Some(40));
    let mut inputs = case.inputs(4, false);
    let (without, _) = case.forward(&inputs);
    let mut with = |sink: f32| {
        inputs.sinks = Some(case.device.tensor(SCRATCH, &[2], vec![sink; 2]));
        case.forward(&inputs).0
    };
    assert_eq!(with(-1e4).f32s(), without.f32s());
    assert!(with(1e4).f32s().iter().all(|&x| x == 0.0));
}

#[test]
fn masked_equals_varlen() {
    // One-token documents, an empty one, and, as padding is, a document at the end. Without sinks a window of 1 has no gradients of q and k.
    let cu_seqlens = [0, 1, 1, 2, 40, 171, 200, 213];
    for (window, sinks) in [
        (None, false),
        (None, true),
        (Some(1), true),
        (Some(2), false),
        (Some(63), true),
        (Some(64), false),
        (Some(65), true),
    ] {
        let run = |threads, masked| {
            let case = Case::new(threads, (4, 2), 8, &cu_seqlens, window);
            let case = if masked { case.masked() } else { case };
            let inputs = case.inputs(7, sinks);
            let (o, softmax_lse) = case.forward(&inputs);
            let d_o = Values::new(8).tensor(&case.device, &[213, 32]);
            let mut all = case.backward(&inputs, &o, &softmax_lse, &d_o);
            all.extend([o.to_vec(), softmax_lse.to_vec()]);
            all
        };
        let masked = run(2, true);
        assert_eq!(masked, run(1, true), "thread counts must not change a bit");
        for (i, (masked, varlen)) in masked.iter().zip(run(2, false)).enumerate() {
            assert_close(&format!("output {i}, window {window:?}, sinks {sinks}"), masked, &varlen, 1e-6);
        }
    }
}

#[test]
fn packed_equals_unpacked_and_threads_do_not_matter() {
    let run = |threads, cu_seqlens: &[i32], rows: std::ops::Range<usize>| {
        let case = Case::new(threads, (3, 1), 16, cu_seqlens, Some(40));
        let whole = Case::new(1, (3, 1), 16, &[0, 200], None).inputs(5, true);
        let part = |x: &Tensor| {
            let data = x.f32s()[rows.start * x.cols()..rows.end * x.cols()].to_vec();
            case.device.tensor(SCRATCH, &[rows.len(), x.cols()], data)
        };
        let inputs = Inputs { qkv: whole.qkv.each_ref().map(part), sinks: whole.sinks };
        let (o, softmax_lse) = case.forward(&inputs);
        let mut all = case.backward(&inputs, &o, &softmax_lse, &inputs.qkv[0]);
        let d_sinks = all.pop().unwrap();
        all.push(o.to_vec());
        (all, d_sinks)
    };
    let (packed, d_sinks) = run(2, &[0, 77, 200], 0..200);
    assert_eq!((packed.clone(), d_sinks.clone()), run(1, &[0, 77, 200], 0..200), "thread counts must not change a bit");
    let ((first, d_first), (second, d_second)) = (run(1, &[0, 77], 0..77), run(1, &[0, 123], 77..200));
    for (packed, (first, second)) in packed.iter().zip(first.iter().zip(&second)) {
        assert_eq!(packed, &[first.as_slice(), second.as_slice()].concat(), "packed must equal unpacked");
    }
    let sum: Vec<f32> = d_first.iter().zip(&d_second).map(|(a, b)| a + b).collect();
    assert_close("dsinks are sums over documents", &d_sinks, &sum, 1e-5);
}
