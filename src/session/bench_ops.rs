//! `tandem bench --ops`: single operations at the sizes of an 8B model, and of gpt-oss for experts, held to what the memory or the matrix units of this machine give.

use std::time::Instant;

use serde::Serialize;

use crate::base::error::Result;
use crate::base::rng::{Philox, unit_f32};
use crate::formats::nf4::Nf4;
use crate::formats::safetensors::Dtype;
use crate::ops::attention::{self, AttentionShape, Qkv, Saved, TileList};
use crate::ops::grouped_matmul::{self, Groups};
use crate::ops::nf4::{self, Nf4Weight};
use crate::ops::qk_norm::{self, QkNorm};
use crate::ops::rms_norm::{self, NormRounding};
use crate::ops::rope::{self, RopeTable};
use crate::ops::{elementwise, matmul, swiglu};
use crate::tensor::{Device, MemoryCategory, Tensor};

const SCRATCH: MemoryCategory = MemoryCategory::Workspace;

/// One operation.
#[derive(Debug, Clone, Serialize)]
pub struct OpRow {
    /// What was measured.
    pub name: String,
    /// Mean time of a call, in milliseconds.
    pub ms: f64,
    /// Bytes read and written a second, in GB/s, where memory bounds the operation.
    pub gb_per_sec: Option<f64>,
    /// `gb_per_sec` over that of a plain copy of as many rows.
    pub share_of_copy: Option<f64>,
    /// Rate in TFLOP/s, where arithmetic bounds it. A masked half of causal attention does not count, but by a dense mask all pairs do.
    pub tflops: Option<f64>,
}

/// How large the operands are.
struct Sizes {
    rows: usize,
    hidden: usize,
    inner: usize,
    tokens: usize,
    calls: usize,
}

/// Measures every operation on `device`.
///
/// # Errors
/// When the operands do not fit the device.
pub fn run(device: &Device) -> Result<Vec<OpRow>> {
    let sizes = match device {
        // Several times the caches: 64 MB of L2 on the largest cards.
        Device::Cuda(_) => Sizes { rows: 32_768, hidden: 4096, inner: 12_288, tokens: 8192, calls: 20 },
        Device::Cpu(_) => Sizes { rows: 512, hidden: 512, inner: 1536, tokens: 256, calls: 2 },
    };
    let mut rows = device.run(|| memory_bound(device, &sizes))?;
    rows.extend(device.run(|| products(device, &sizes))?);
    rows.extend(device.run(|| products_by_group(device, &sizes))?);
    rows.extend(device.run(|| attention_rows(device, &sizes))?);
    Ok(rows)
}

/// Seeded values in [−0.5, 0.5): never zeros, which run faster.
pub(super) fn random(device: &Device, shape: &[usize]) -> Tensor {
    let generator = Philox::new(7, shape.iter().sum::<usize>() as u64);
    let len: usize = shape.iter().product();
    let values = (0..len.div_ceil(4) as u64).flat_map(|i| generator.block(i)).map(|word| unit_f32(word) - 0.5);
    device.tensor(SCRATCH, shape, values.take(len).collect())
}

/// Milliseconds of one call: the mean of many, after three that are not counted.
pub(super) fn time(device: &Device, calls: usize, mut call: impl FnMut()) -> Result<f64> {
    (0..3).for_each(|_| call());
    device.synchronize();
    let start = Instant::now();
    (0..calls).for_each(|_| call());
    device.synchronize();
    device.check()?;
    Ok(start.elapsed().as_secs_f64() * 1e3 / calls as f64)
}

fn memory_bound(device: &Device, sizes: &Sizes) -> Result<Vec<OpRow>> {
    let &Sizes { rows, hidden, inner, calls, .. } = sizes;
    let bytes_of = |values: usize| (values * device.dtype().num_bytes()) as f64;
    let x = random(device, &[rows, hidden]);
    let mut y = device.empty(SCRATCH, &[rows, device.stride(hidden + 48)]);
    let mut z = device.empty(SCRATCH, &[rows, hidden]);
    let copy_ms = time(device, calls, || elementwise::copy(device, &x, &mut z))?;
    let copy = bytes_of(2 * rows * hidden) / copy_ms / 1e6;
    let mut found = vec![OpRow {
        name: format!("copy {rows}×{hidden}"),
        ms: copy_ms,
        gb_per_sec: Some(copy),
        share_of_copy: Some(1.0),
        tflops: None,
    }];
    let mut add = |name: &str, values: usize, ms: f64| {
        let rate = bytes_of(values) / ms / 1e6;
        let share = Some(rate / copy);
        found.push(OpRow { name: name.into(), ms, gb_per_sec: Some(rate), share_of_copy: share, tflops: None });
    };

    let weight = random(device, &[hidden]);
    let mut rstd = device.empty_f32(SCRATCH, &[rows]);
    let ms = time(device, calls, || {
        rms_norm::forward(device, &x, &weight, (1e-6, NormRounding::default()), y.first_columns_mut(hidden), &mut rstd);
    })?;
    add("rms_norm forward", 2 * rows * hidden, ms);
    let ms = time(device, calls, || {
        rms_norm::backward(device, &z, &x, &weight, &rstd, true, y.first_columns_mut(hidden), None);
    })?;
    add("rms_norm backward, added to dx", 4 * rows * hidden, ms);
    let ms = time(device, calls, || elementwise::add_assign(device, y.first_columns_mut(hidden), &x))?;
    add("add_assign", 3 * rows * hidden, ms);

    let heads = hidden / 128;
    let table = RopeTable::new(device, &[0.5; 64], 64);
    let positions = device.indices(SCRATCH, (0..rows as i32).map(|i| i % 64).collect());
    let head_weight = random(device, &[128]);
    let (q_weight, k_weight) = (&head_weight, &head_weight);
    let norm = QkNorm { q_weight, k_weight, eps: 1e-6, num_heads: heads - heads / 4, num_kv_heads: heads / 4 };
    let ms = time(device, calls, || rope::forward(device, &mut z, &table, &positions))?;
    add("rope", 2 * rows * hidden, ms);
    let ms = time(device, calls, || qk_norm::forward(device, &norm, &table, &positions, &x, &mut z))?;
    add("qk_norm forward", 2 * rows * hidden, ms);
    let ms = time(device, calls, || qk_norm::backward_in_place(device, &norm, &table, &positions, &x, &mut z))?;
    add("qk_norm backward", 3 * rows * hidden, ms);
    drop((x, y, z));

    let outs = [inner, inner];
    let mut weights = Vec::new();
    for (i, &out) in outs.iter().enumerate() {
        let values = random(device, &[out, hidden]).to_vec();
        let stored = Nf4::quantize("gate or up", &values, &[out, hidden], Dtype::BF16, true)?;
        let mut weight = Nf4Weight::room(device, out, hidden, true);
        weight.set(device, &stored);
        weights.push((i * inner, weight));
    }
    let weights: Vec<(usize, &Nf4Weight)> = weights.iter().map(|(row, weight)| (*row, weight)).collect();
    let mut matrix = device.empty(SCRATCH, &[2 * inner, hidden]);
    let ms = time(device, calls, || nf4::dequantize(device, &weights, None, &mut matrix))?;
    // A value and a quarter for each: 2 bytes written, half a byte read.
    add("dequantize NF4", 2 * inner * hidden * 5 / 4, ms);
    drop((weights, matrix));

    let mut gate_up = random(device, &[rows / 4, device.stride(2 * inner + 32)]);
    let mut act = device.empty(SCRATCH, &[rows / 4, device.stride(inner + 16)]);
    let ms = time(device, calls, || {
        swiglu::forward(device, gate_up.first_columns(2 * inner), act.first_columns_mut(inner));
    })?;
    add("swiglu forward", 3 * rows / 4 * inner, ms);
    let ms = time(device, calls, || {
        swiglu::backward_in_place(device, act.first_columns(inner), gate_up.first_columns_mut(2 * inner));
    })?;
    add("swiglu backward", 5 * rows / 4 * inner, ms);
    Ok(found)
}

fn products(device: &Device, sizes: &Sizes) -> Result<Vec<OpRow>> {
    let &Sizes { hidden, inner, tokens, calls, .. } = sizes;
    let mut found = Vec::new();
    for (inputs, outputs) in [(hidden, hidden + hidden / 2), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)] {
        let (x, weight) = (random(device, &[tokens, inputs]), random(device, &[outputs, inputs]));
        let mut y = random(device, &[tokens, outputs]);
        let mut dx = device.empty(SCRATCH, &[tokens, inputs]);
        let mut dweight = device.zeros_f32(SCRATCH, &[outputs, inputs]);
        let mut add = |name: &str, ms: f64| {
            let tflops = 2.0 * tokens as f64 * inputs as f64 * outputs as f64 / ms / 1e9;
            let name = format!("{name} {tokens} rows, {inputs}→{outputs}");
            found.push(OpRow { name, ms, gb_per_sec: None, share_of_copy: None, tflops: Some(tflops) });
        };
        add("y = x·Wᵀ", time(device, calls, || matmul::nt(device, 1.0, &x, &weight, 0.0, &mut y))?);
        add("dx = dy·W", time(device, calls, || matmul::nn(device, 1.0, &y, &weight, 0.0, &mut dx))?);
        add("dW += dyᵀ·x", time(device, calls, || matmul::tn(device, 1.0, &y, &x, 1.0, &mut dweight))?);
    }
    Ok(found)
}

/// Products of experts with their tokens, beside a dense product of as many rows.
fn products_by_group(device: &Device, sizes: &Sizes) -> Result<Vec<OpRow>> {
    let &Sizes { rows, calls, .. } = sizes;
    let (experts, hidden) = match device {
        Device::Cuda(_) => (32, 2880),
        Device::Cpu(_) => (4, 96),
    };
    // From half to one and a half times as many rows as there would be on average.
    let first_row = |expert: usize| match expert {
        last if last == experts => rows,
        _ => rows * expert / experts + expert * 13 % experts * rows / (2 * experts * experts),
    };
    let host: Vec<usize> = (0..=experts).map(first_row).collect();
    let offsets = device.indices(SCRATCH, host.iter().map(|&row| row as i32).collect());
    let by = Groups::Device(&offsets);
    let mut found = Vec::new();
    for outputs in [2 * hidden, hidden] {
        let (x, one) = (random(device, &[rows, hidden]), random(device, &[outputs, hidden]));
        let mut weights = device.empty(SCRATCH, &[experts, outputs, hidden]);
        for expert in 0..experts {
            elementwise::copy(device, &one, weights.view_mut().row_range(expert * outputs, outputs));
        }
        let mut y = random(device, &[rows, outputs]);
        let mut dx = device.empty(SCRATCH, &[rows, hidden]);
        let mut add = |name: &str, ms: f64| {
            let tflops = 2.0 * rows as f64 * hidden as f64 * outputs as f64 / ms / 1e9;
            let name = format!("{name} {rows} rows, {hidden}→{outputs}");
            found.push(OpRow { name, ms, gb_per_sec: None, share_of_copy: None, tflops: Some(tflops) });
        };
        let ms = time(device, calls, || matmul::nt(device, 1.0, &x, &one, 0.0, &mut y))?;
        add("y = x·Wᵀ, dense", ms);
        let ms = time(device, calls, || matmul::nn(device, 1.0, &y, &one, 0.0, &mut dx))?;
        add("dx = dy·W, dense", ms);
        let known = Groups::Host(&host);
        let ms = time(device, calls, || grouped_matmul::nt(device, 1.0, &x, &weights, None, 0.0, known, &mut y))?;
        add(&format!("y = x·Wᵀ, a product for each of {experts} experts,"), ms);
        let ms = time(device, calls, || grouped_matmul::nt(device, 1.0, &x, &weights, None, 0.0, by, &mut y))?;
        add(&format!("y = x·Wᵀ, {experts} experts,"), ms);
        let ms = time(device, calls, || grouped_matmul::nn(device, 1.0, &y, &weights, 0.0, by, &mut dx))?;
        add(&format!("dx = dy·W, {experts} experts,"), ms);
        drop(weights);
        let mut dweights = device.zeros_f32(SCRATCH, &[experts, outputs, hidden]);
        let ms = time(device, calls, || grouped_matmul::tn(device, 1.0, &y, &x, by, &mut dweights))?;
        add(&format!("dW += dyᵀ·x, {experts} experts,"), ms);
    }
    Ok(found)
}

fn attention_rows(device: &Device, sizes: &Sizes) -> Result<Vec<OpRow>> {
    let &Sizes { tokens, calls, .. } = sizes;
    let mut found = Vec::new();
    for (head_dim, document, masked) in [
        (64, tokens / 16, false),
        (128, tokens / 16, false),
        (128, tokens, false),
        (64, tokens / 16, true),
        (128, tokens / 16, true),
    ] {
        let scale = (head_dim as f32).powf(-0.5);
        let shape = AttentionShape { num_heads: 32, num_kv_heads: 8, head_dim, scale };
        let cu_seqlens: Vec<i32> = (0..=tokens / document).map(|i| (i * document) as i32).collect();
        let tiles = if masked { TileList::masked } else { TileList::on_device }(device, &cu_seqlens, None);
        let operands = random(device, &[tokens, shape.qkv_width()]);
        let qkv = Qkv::of(&shape, operands.view(), None);
        let mut o = device.empty(SCRATCH, &[tokens, shape.q_width()]);
        let mut lse = device.empty_f32(SCRATCH, &[tokens, shape.num_heads]);
        let forward = time(device, calls, || attention::forward(device, &shape, &tiles, qkv, None, &mut o, &mut lse))?;
        let d_o = random(device, &[tokens, shape.q_width()]);
        let mut dqkv = device.empty(SCRATCH, &[tokens, shape.qkv_width()]);
        let saved = Saved { qkv, sinks: None, o: o.view(), softmax_lse: &lse };
        let backward =
            time(device, calls, || attention::backward(device, &shape, &tiles, &saved, &d_o, &mut dqkv, None))?;
        // Two products forward and five backward over the pairs that are seen; by a dense mask, over all pairs.
        let (keys, path) = if masked { (tokens as f64, ", dense mask") } else { ((document as f64 + 1.0) / 2.0, "") };
        let pairs = tokens as f64 * keys * shape.num_heads as f64 * head_dim as f64;
        for (name, ms, products) in [("forward", forward, 2.0), ("backward", backward, 5.0)] {
            let name = format!("attention {name}, heads of {head_dim}, documents of {document}{path}");
            let tflops = Some(2.0 * products * pairs / ms / 1e9);
            found.push(OpRow { name, ms, gb_per_sec: None, share_of_copy: None, tflops });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Precision;

    #[test]
    fn every_operation_gets_a_rate() {
        let rows = run(&Device::cpu(0, Precision::F32).unwrap()).unwrap();
        assert_eq!(rows.len(), 10 + 12 + 12 + 10);
        for row in rows {
            let rate = row.gb_per_sec.or(row.tflops).unwrap();
            assert!(rate.is_finite() && rate > 0.0 && row.ms > 0.0, "{row:?}");
        }
    }
}
