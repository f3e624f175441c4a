//! CPU form of packed attention: one task a tile, small matrix products inside, online softmax.

use std::ops::Range;

use rayon::prelude::*;

use super::tiles::TILE_ROWS;
use super::{AttentionShape, Qkv, Saved, Tile, TileList};
use crate::ops::MIN_ROWS_PER_TASK;
use crate::ops::matmul::{Mat, MatMut, gemm_serial};
use crate::ops::vector::{dot, exp, exp_in_place, max, softmax_gradient};
use crate::tensor::{Precision, Tensor, View, ViewMut};

/// Splits a row-major buffer into the rows of each tile, `stride` values each (the last row may be shorter); tiles cover the rows in order.
fn rows_of<'a>(tiles: &[Tile], stride: usize, mut rest: &'a mut [f32]) -> Vec<&'a mut [f32]> {
    tiles
        .iter()
        .map(|tile| {
            let end = ((tile.end - tile.start) * stride).min(rest.len());
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(end);
            rest = tail;
            head
        })
        .collect()
}

/// Rows `start..end` of head `head` in a [T, heads·d] matrix.
fn head_rows(x: View<'_>, start: usize, end: usize, head: usize, d: usize) -> Mat<'_> {
    x.row_range(start, end - start).columns(head * d, d).into()
}

/// Cuts `start..end` into runs of at most [`TILE_ROWS`].
fn runs(start: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
    (start..end).step_by(TILE_ROWS).map(move |a| (a, (a + TILE_ROWS).min(end)))
}

#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    d_scores: Vec<f32>,
    row_max: Vec<f32>,
    row_sum: Vec<f32>,
    accumulator: Vec<f32>,
}

pub(super) fn forward(
    precision: Precision,
    shape: &AttentionShape,
    tiles: &TileList,
    qkv: Qkv<'_>,
    sinks: Option<&Tensor>,
    o: ViewMut<'_>,
    softmax_lse: &mut [f32],
) {
    let sinks = sinks.map(Tensor::f32s);
    let (heads, o_stride) = (shape.num_heads, o.stride());
    let o_rows = rows_of(&tiles.query_tiles, o_stride, o.into_f32s());
    let lse_rows = rows_of(&tiles.query_tiles, heads, softmax_lse);
    tiles.query_tiles.par_iter().zip(o_rows).zip(lse_rows).for_each_init(
        Scratch::default,
        |scratch, ((tile, o), lse)| {
            for head in 0..heads {
                let sink = sinks.map(|sinks| sinks[head]);
                forward_tile(precision, shape, tiles, tile, head, qkv, sink, (&mut *o, o_stride), lse, scratch);
            }
        },
    );
}

/// One query tile of one head: passes over its keys once, keeping the running maximum and sum of each row.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn forward_tile(
    precision: Precision,
    shape: &AttentionShape,
    tiles: &TileList,
    tile: &Tile,
    head: usize,
    Qkv { q, k, v }: Qkv<'_>,
    sink: Option<f32>,
    (o, o_stride): (&mut [f32], usize),
    lse: &mut [f32],
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, head_dim: d, scale, .. } = *shape;
    let kv_head = head / shape.group();
    let rows = tile.end - tile.start;
    let Scratch { scores, row_max, row_sum, accumulator, .. } = scratch;
    // The sink is a first score, with no value.
    reset(row_max, rows, sink.unwrap_or(f32::NEG_INFINITY));
    reset(row_sum, rows, if sink.is_some() { 1.0 } else { 0.0 });
    reset(accumulator, rows * d, 0.0);
    for (k_start, k_end) in runs(tile.other_start, tile.other_end) {
        let cols = k_end - k_start;
        reset(scores, rows * cols, 0.0);
        let (q_tile, k_tile) = (head_rows(q, tile.start, tile.end, head, d), head_rows(k, k_start, k_end, kv_head, d));
        gemm_serial(scale, q_tile, k_tile.t(), 0.0, MatMut::new(scores, rows, cols, cols));
        for (i, scores) in scores.chunks_exact_mut(cols).enumerate() {
            let seen = mask(tiles, tile.start + i, k_start, scores);
            if seen.is_empty() {
                // A window passed these keys by: they add nothing to this row.
                scores.fill(0.0);
                continue;
            }
            let max = max(&scores[seen]).max(row_max[i]);
            let correction = exp(row_max[i] - max);
            let sum = exp_in_place(scores, max);
            row_max[i] = max;
            row_sum[i] = row_sum[i] * correction + sum;
            accumulator[i * d..][..d].iter_mut().for_each(|x| *x *= correction);
        }
        let v_tile = head_rows(v, k_start, k_end, kv_head, d);
        gemm_serial(1.0, Mat::new(scores, rows, cols, cols), v_tile, 1.0, MatMut::new(accumulator, rows, d, d));
    }
    for i in 0..rows {
        lse[i * heads + head] = row_max[i] + row_sum[i].ln();
        let out = &mut o[i * o_stride + head * d..][..d];
        for (out, x) in out.iter_mut().zip(&accumulator[i * d..]) {
            *out = precision.round(x / row_sum[i]);
        }
    }
}

/// Sets the scores that `query` must not see to −∞, and returns a range around those it sees, empty if there are none; `scores` belong to keys
/// from `k_start` on.
fn mask(tiles: &TileList, query: usize, k_start: usize, scores: &mut [f32]) -> Range<usize> {
    if tiles.mask().is_some() {
        let mut seen = 0..0;
        for (i, score) in scores.iter_mut().enumerate() {
            if tiles.sees(query, k_start + i) {
                seen = 0..i + 1;
            } else {
                *score = f32::NEG_INFINITY;
            }
        }
        return seen;
    }
    let visible_end = (query + 1).saturating_sub(k_start).min(scores.len());
    let visible_start = (query + 1).saturating_sub(tiles.window).saturating_sub(k_start).min(visible_end);
    scores[visible_end..].fill(f32::NEG_INFINITY);
    scores[..visible_start].fill(f32::NEG_INFINITY);
    visible_start..visible_end
}

pub(super) fn backward(
    precision: Precision,
    shape: &AttentionShape,
    tiles: &TileList,
    saved: &Saved<'_>,
    d_o: View<'_>,
    mut dqkv: ViewMut<'_>,
    d_sinks: Option<&mut Tensor>,
) {
    let AttentionShape { num_heads: heads, head_dim: d, .. } = *shape;
    // D [T, Hq] = rowsum(do ⊙ o)
    let rows = d_o.f32s().par_chunks(d_o.stride()).zip(saved.o.f32s().par_chunks(saved.o.stride()));
    let rows = rows.with_min_len(MIN_ROWS_PER_TASK);
    let delta: Vec<f32> = rows
        .flat_map_iter(|(a, b)| a.chunks_exact(d).zip(b.chunks_exact(d)).take(heads).map(|(a, b)| dot(a, b)))
        .collect();

    if let (Some(d_sinks), Some(sinks)) = (d_sinks, saved.sinks) {
        let (lse, sinks) = (saved.softmax_lse.f32s(), sinks.f32s());
        d_sinks.f32s_mut().par_iter_mut().enumerate().for_each(|(head, gradient)| {
            let rows = lse.iter().zip(&delta).skip(head).step_by(heads);
            // Terms of both signs, one a token: their order should not be seen in the sum.
            *gradient -= rows.map(|(&lse, &delta)| f64::from(exp(sinks[head] - lse) * delta)).sum::<f64>() as f32;
        });
    }

    let stride = dqkv.stride();
    let gradients = rows_of(&tiles.key_tiles, stride, dqkv.f32s_mut());
    tiles.key_tiles.par_iter().zip(gradients).for_each_init(Scratch::default, |scratch, (tile, rows)| {
        for_rows(rows, stride, shape.q_width()..shape.qkv_width(), |part| part.fill(0.0));
        for head in 0..heads {
            key_tile(shape, tiles, tile, head, saved, d_o, &delta, (&mut *rows, stride), scratch);
        }
        for_rows(rows, stride, shape.q_width()..shape.qkv_width(), |part| precision.round_slice(part));
    });

    let gradients = rows_of(&tiles.query_tiles, stride, dqkv.f32s_mut());
    tiles.query_tiles.par_iter().zip(gradients).for_each_init(Scratch::default, |scratch, (tile, rows)| {
        for head in 0..heads {
            query_tile(shape, tiles, tile, head, saved, d_o, &delta, (&mut *rows, stride), scratch);
        }
        for_rows(rows, stride, 0..shape.q_width(), |part| precision.round_slice(part));
    });
}

/// Calls `f` with the given columns of every row.
fn for_rows(rows: &mut [f32], stride: usize, columns: Range<usize>, f: impl Fn(&mut [f32])) {
    rows.chunks_mut(stride).for_each(|row| f(&mut row[columns.clone()]));
}

/// Adds to the gradients of the keys and values of one tile what one query head contributes. `rows` has those of q, k and v beside each other.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn key_tile(
    shape: &AttentionShape,
    tiles: &TileList,
    tile: &Tile,
    head: usize,
    saved: &Saved<'_>,
    d_o: View<'_>,
    delta: &[f32],
    (rows, stride): (&mut [f32], usize),
    scratch: &mut Scratch,
) {
    let AttentionShape { head_dim: d, scale, .. } = *shape;
    let kv_head = head / shape.group();
    let keys = tile.end - tile.start;
    let (dk_at, dv_at) = (shape.q_width() + kv_head * d, shape.q_width() + shape.kv_width() + kv_head * d);
    for (q_start, q_end) in runs(tile.other_start, tile.other_end) {
        let queries = q_end - q_start;
        probabilities(shape, tiles, head, saved, d_o, delta, (q_start, q_end), (tile.start, tile.end), scratch);
        let (p, ds) =
            (Mat::new(&scratch.scores, queries, keys, keys), Mat::new(&scratch.d_scores, queries, keys, keys));
        let d_o_tile = head_rows(d_o, q_start, q_end, head, d);
        let q_tile = head_rows(saved.qkv.q, q_start, q_end, head, d);
        gemm_serial(1.0, p.t(), d_o_tile, 1.0, MatMut::new(&mut rows[dv_at..], keys, d, stride));
        gemm_serial(scale, ds.t(), q_tile, 1.0, MatMut::new(&mut rows[dk_at..], keys, d, stride));
    }
}

/// Assigns the gradient of the queries of one tile and one head.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn query_tile(
    shape: &AttentionShape,
    tiles: &TileList,
    tile: &Tile,
    head: usize,
    saved: &Saved<'_>,
    d_o: View<'_>,
    delta: &[f32],
    (rows, stride): (&mut [f32], usize),
    scratch: &mut Scratch,
) {
    let AttentionShape { head_dim: d, scale, .. } = *shape;
    let kv_head = head / shape.group();
    let queries = tile.end - tile.start;
    let mut beta = 0.0;
    for (k_start, k_end) in runs(tile.other_start, tile.other_end) {
        let keys = k_end - k_start;
        probabilities(shape, tiles, head, saved, d_o, delta, (tile.start, tile.end), (k_start, k_end), scratch);
        let ds = Mat::new(&scratch.d_scores, queries, keys, keys);
        let k_tile = head_rows(saved.qkv.k, k_start, k_end, kv_head, d);
        gemm_serial(scale, ds, k_tile, beta, MatMut::new(&mut rows[head * d..], queries, d, stride));
        beta = 1.0;
    }
}

/// Fills `scores` with P = exp(S − lse) and `d_scores` with dS = P⊙(do·vᵀ − D) for queries × keys; 0 where a key is not seen.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn probabilities(
    shape: &AttentionShape,
    tiles: &TileList,
    head: usize,
    saved: &Saved<'_>,
    d_o: View<'_>,
    delta: &[f32],
    (q_start, q_end): (usize, usize),
    (k_start, k_end): (usize, usize),
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, head_dim: d, scale, .. } = *shape;
    let kv_head = head / shape.group();
    let (queries, keys) = (q_end - q_start, k_end - k_start);
    let Scratch { scores, d_scores, .. } = scratch;
    reset(scores, queries * keys, 0.0);
    reset(d_scores, queries * keys, 0.0);
    let q_tile = head_rows(saved.qkv.q, q_start, q_end, head, d);
    let k_tile = head_rows(saved.qkv.k, k_start, k_end, kv_head, d);
    let v_tile = head_rows(saved.qkv.v, k_start, k_end, kv_head, d);
    let d_o_tile = head_rows(d_o, q_start, q_end, head, d);
    gemm_serial(scale, q_tile, k_tile.t(), 0.0, MatMut::new(scores, queries, keys, keys));
    gemm_serial(1.0, d_o_tile, v_tile.t(), 0.0, MatMut::new(d_scores, queries, keys, keys));
    for (i, (scores, d_scores)) in scores.chunks_exact_mut(keys).zip(d_scores.chunks_exact_mut(keys)).enumerate() {
        let row = (q_start + i) * heads + head;
        let (lse, delta) = (saved.softmax_lse.f32s()[row], delta[row]);
        mask(tiles, q_start + i, k_start, scores);
        softmax_gradient(scores, d_scores, lse, delta);
    }
}

fn reset(buffer: &mut Vec<f32>, len: usize, value: f32) {
    buffer.clear();
    buffer.resize(len, value);
}
