//! Packed attention over ragged documents: every head size, group, window and path.

use tandem::ops::attention::{AttentionShape, Qkv, Saved, TileList, backward, forward};
use tandem::ops::{elementwise, sequence};
use tandem::tensor::Device;

use super::{Bench, SCRATCH, tensor};

#[test]
fn attention_over_ragged_documents() {
    let Some(mut b) = Bench::new() else { return };
    let ragged: Vec<i32> = vec![0, 1, 2, 39, 104, 105, 361, 400];
    let ones: Vec<i32> = (0..=8000).collect();
    /// cu_seqlens, heads, head_dim, window.
    type Case<'a> = (&'a [i32], (usize, usize), usize, Option<usize>);
    let cases: [Case; 10] = [
        (&ragged, (4, 2), 16, None),
        (&ragged, (4, 1), 64, None),
        (&ragged, (8, 2), 128, Some(64)),
        // A window of 1 would make every softmax 1 and dq zero: nothing to compare.
        (&ragged, (9, 3), 64, Some(2)),
        (&ragged, (2, 2), 40, Some(5)),
        (&ragged, (6, 2), 72, Some(128)),
        // Thousands of documents of one token, and one document as long as a model reads.
        (&ones, (4, 2), 64, None),
        (&[0, 32_768], (1, 1), 64, None),
        (&[0, 700], (4, 2), 128, None),
        // All query heads share one key head.
        (&[0, 300, 1000], (8, 1), 128, None),
    ];
    for (cu_seqlens, (heads, kv_heads), head_dim, window) in cases {
        let shape = attention_shape(heads, kv_heads, head_dim);
        compare_attention(&mut b, &shape, cu_seqlens, window, false, TileList::on_device);
    }
}

#[test]
fn query_heads_of_a_group_in_several_blocks_and_in_one() {
    let Some(mut b) = Bench::new() else { return };
    let short: Vec<i32> = (0..=133).map(|i| i * 60).collect();
    /// cu_seqlens, heads, head_dim, window.
    type Case<'a> = (&'a [i32], (usize, usize), usize, Option<usize>);
    let cases: [Case; 9] = [
        // On cards of 63 to 249 multiprocessors: a block for each head of a group, with a long document among few tiles,
        (&[0, 2048], (4, 1), 64, None),
        (&[0, 3, 1500, 1600], (8, 1), 64, Some(300)),
        (&[0, 1, 900, 930], (6, 2), 128, Some(129)),
        (&[0, 1000], (3, 1), 80, None),
        (&[0, 130, 1100], (8, 1), 104, None),
        (&[0, 700], (5, 1), 40, Some(64)),
        // several heads a block,
        (&short, (16, 2), 64, None),
        // and tiles enough for a block to take the whole group.
        (&short, (16, 8), 32, None),
        (&short, (8, 4), 128, None),
    ];
    for (cu_seqlens, (heads, kv_heads), head_dim, window) in cases {
        let shape = attention_shape(heads, kv_heads, head_dim);
        compare_attention(&mut b, &shape, cu_seqlens, window, false, TileList::on_device);
    }
    for (heads, kv_heads, head_dim) in [(8, 2, 64), (3, 1, 128)] {
        let shape = attention_shape(heads, kv_heads, head_dim);
        compare_attention(&mut b, &shape, &[0, 600, 1100], Some(400), true, TileList::masked);
    }
}

#[test]
fn attention_with_sinks() {
    let Some(mut b) = Bench::new() else { return };
    let ragged: Vec<i32> = vec![0, 1, 2, 39, 104, 105, 361, 400];
    // Every kind of tile (one head, two and four of a group) and, last, a head size that the plain kernels take.
    for ((heads, kv_heads), head_dim, window) in [
        ((8, 2), 64, Some(128)),
        ((9, 3), 64, None),
        ((4, 2), 128, Some(64)),
        ((5, 1), 96, None),
        ((4, 2), 20, Some(7)),
    ] {
        let shape = attention_shape(heads, kv_heads, head_dim);
        compare_attention(&mut b, &shape, &ragged, window, true, TileList::on_device);
        compare_attention(&mut b, &shape, &ragged, window, true, TileList::masked);
    }
}

#[test]
fn attention_by_a_dense_mask() {
    let Some(mut b) = Bench::new() else { return };
    let ragged: Vec<i32> = vec![0, 1, 2, 39, 104, 105, 361, 400];
    /// cu_seqlens, heads, head_dim, window.
    type Case<'a> = (&'a [i32], (usize, usize), usize, Option<usize>);
    let cases: [Case; 9] = [
        (&ragged, (4, 1), 64, None),
        (&ragged, (9, 3), 64, Some(2)),
        (&ragged, (2, 2), 40, Some(65)),
        (&ragged, (8, 2), 128, Some(63)),
        (&ragged, (5, 1), 96, Some(64)),
        // A head size that the plain kernels take.
        (&ragged, (4, 2), 20, Some(7)),
        // Whole tiles, and one row more.
        (&[0, 384, 512], (2, 1), 64, None),
        (&[0, 384, 513], (2, 1), 128, None),
        (&[0, 1100], (4, 2), 128, Some(128)),
    ];
    for (cu_seqlens, (heads, kv_heads), head_dim, window) in cases {
        let shape = attention_shape(heads, kv_heads, head_dim);
        compare_attention(&mut b, &shape, cu_seqlens, window, false, TileList::masked);
    }
}

#[test]
fn masks_boundaries_and_positions_are_those_of_the_cpu() {
    let Some(b) = Bench::new() else { return };
    let ones: Vec<i32> = (0..=3000).collect();
    let documents: [&[i32]; 4] = [&[0, 1], &[0, 1, 1, 2, 39, 104, 105, 361, 400], &ones, &[0, 500, 1024, 1030]];
    for cu_seqlens in documents {
        for window in [None, Some(1), Some(2), Some(63), Some(64), Some(65)] {
            let [cpu, _, gpu] =
                b.devices.each_ref().map(|device| TileList::masked(device, cu_seqlens, window).mask().unwrap().words());
            assert_eq!(gpu, cpu, "{cu_seqlens:?}, window {window:?}");
            let piecewise = TileList::masked_by_documents(&b.devices[2], cu_seqlens, window);
            assert_eq!(piecewise.mask().unwrap().words(), cpu, "{cu_seqlens:?}, window {window:?}, by documents");
        }
        let [cpu, _, gpu] = b.devices.each_ref().map(|device| {
            let lengths = cu_seqlens.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
            let lengths = device.indices(SCRATCH, lengths);
            let boundaries = sequence::cumulative_lengths(device, &lengths);
            let tokens = *cu_seqlens.last().unwrap() as usize;
            let positions = sequence::document_positions(device, &boundaries, tokens);
            (boundaries.to_vec(), positions.to_vec(), sequence::longest(device, &lengths))
        });
        assert_eq!((&gpu, &gpu.0[..]), (&cpu, cu_seqlens));
    }
    b.devices[2].check().unwrap();
}

fn attention_shape(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { num_heads, num_kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5) }
}

/// Compares o, lse and the gradients of q, k, v and, with `sinks`, theirs.
fn compare_attention(
    b: &mut Bench,
    shape: &AttentionShape,
    cu_seqlens: &[i32],
    window: Option<usize>,
    sinks: bool,
    path: fn(&Device, &[i32], Option<usize>) -> TileList,
) {
    let tokens = *cu_seqlens.last().unwrap() as usize;
    let AttentionShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, .. } = *shape;
    let (q_width, width) = (shape.q_width(), shape.qkv_width());
    let (qkv, d_o, sink_values) = (b.values(tokens * width), b.values(tokens * q_width), b.values(heads));
    b.compare(
        &format!("attention {heads}/{kv_heads} heads of {head_dim}, window {window:?}, {tokens} tokens, sinks {sinks}"),
        3.0,
        |d| {
            let tiles = path(d, cu_seqlens, window);
            let d_o = tensor(d, &[tokens, q_width], &d_o);
            // Beside each other, as the projections write them, with room behind them.
            let mut operands = d.zeros(SCRATCH, &[tokens, width + 16]);
            operands.first_columns_mut(width).set(&qkv);
            let qkv = Qkv::of(shape, operands.view(), None);
            let sinks = sinks.then(|| d.tensor_f32(SCRATCH, &[heads], sink_values.clone()));
            // What was there before stays in the sum.
            let mut d_sinks = sinks.as_ref().map(|_| d.tensor_f32(SCRATCH, &[heads], sink_values.clone()));
            let mut o = d.zeros(SCRATCH, &[tokens, q_width + 8]);
            let mut softmax_lse = d.empty_f32(SCRATCH, &[tokens, heads]);
            forward(d, shape, &tiles, qkv, sinks.as_ref(), o.first_columns_mut(q_width), &mut softmax_lse);
            let mut dqkv = d.zeros(SCRATCH, &[tokens, width + 8]);
            let saved = Saved { qkv, sinks: sinks.as_ref(), o: o.first_columns(q_width), softmax_lse: &softmax_lse };
            backward(d, shape, &tiles, &saved, &d_o, dqkv.first_columns_mut(width), d_sinks.as_mut());
            let Qkv { q, k, v } = Qkv::of(shape, dqkv.view(), None);
            let parts = [q, k, v].map(|gradient| {
                let mut part = d.empty(SCRATCH, &[tokens, gradient.cols()]);
                elementwise::copy(d, gradient, &mut part);
                part
            });
            [o, softmax_lse].into_iter().chain(parts).chain(d_sinks).collect()
        },
    );
}
