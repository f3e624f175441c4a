//! CPU form of packed attention: one task a tile, small matrix products inside, online softmax.

use std::ops::Range;

use rayon::prelude::*;

use super::tiles::TILE_ROWS;
use super::{AttentionShape, Saved, Tile, TileList};
use crate::ops::MIN_ROWS_PER_TASK;
use crate::ops::matmul::{Mat, MatMut, gemm_serial};
use crate::ops::vector::{dot, exp, exp_in_place, max, softmax_gradient};
use crate::tensor::Precision;

/// Splits a row-major buffer into the rows of each tile; tiles cover the rows in order.
fn rows_of<'a>(tiles: &[Tile], width: usize, mut rest: &'a mut [f32]) -> Vec<&'a mut [f32]> {
    tiles
        .iter()
        .map(|tile| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut((tile.end - tile.start) * width);
            rest = tail;
            head
        })
        .collect()
}

/// Rows `start..end` of head `head` in a [T, heads·d] buffer.
fn head_rows(x: &[f32], start: usize, end: usize, head: usize, heads: usize, d: usize) -> Mat<'_> {
    Mat::new(&x[start * heads * d + head * d..], end - start, d, heads * d)
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
    [q, k, v]: [&[f32]; 3],
    o: &mut [f32],
    softmax_lse: &mut [f32],
) {
    let heads = shape.num_heads;
    let o_rows = rows_of(&tiles.query_tiles, heads * shape.head_dim, o);
    let lse_rows = rows_of(&tiles.query_tiles, heads, softmax_lse);
    tiles.query_tiles.par_iter().zip(o_rows).zip(lse_rows).for_each_init(
        Scratch::default,
        |scratch, ((tile, o), lse)| {
            for head in 0..heads {
                forward_tile(precision, shape, tiles, tile, head, [q, k, v], o, lse, scratch);
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
    [q, k, v]: [&[f32]; 3],
    o: &mut [f32],
    lse: &mut [f32],
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = *shape;
    let kv_head = head / shape.group();
    let rows = tile.end - tile.start;
    let Scratch { scores, row_max, row_sum, accumulator, .. } = scratch;
    reset(row_max, rows, f32::NEG_INFINITY);
    reset(row_sum, rows, 0.0);
    reset(accumulator, rows * d, 0.0);
    for (k_start, k_end) in runs(tile.other_start, tile.other_end) {
        let cols = k_end - k_start;
        reset(scores, rows * cols, 0.0);
        let (q_tile, k_tile) = (
            head_rows(q, tile.start, tile.end, head, heads, d),
            head_rows(k, k_start, k_end, kv_head, num_kv_heads, d),
        );
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
        let v_tile = head_rows(v, k_start, k_end, kv_head, num_kv_heads, d);
        gemm_serial(1.0, Mat::new(scores, rows, cols, cols), v_tile, 1.0, MatMut::new(accumulator, rows, d, d));
    }
    for i in 0..rows {
        lse[i * heads + head] = row_max[i] + row_sum[i].ln();
        let out = &mut o[(i * heads + head) * d..][..d];
        for (out, x) in out.iter_mut().zip(&accumulator[i * d..]) {
            *out = precision.round(x / row_sum[i]);
        }
    }
}

/// Sets the scores that `query` must not see to −∞, and returns which it sees; `scores` belong to keys from `k_start` on.
fn mask(tiles: &TileList, query: usize, k_start: usize, scores: &mut [f32]) -> Range<usize> {
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
    d_o: &[f32],
    [dq, dk, dv]: [&mut [f32]; 3],
) {
    let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, .. } = *shape;
    // D [T, Hq] = rowsum(do ⊙ o)
    let rows = d_o.par_chunks_exact(d).zip(saved.o.f32s().par_chunks_exact(d)).with_min_len(MIN_ROWS_PER_TASK);
    let delta: Vec<f32> = rows.map(|(a, b)| dot(a, b)).collect();

    let kv_width = num_kv_heads * d;
    let (dk_rows, dv_rows) = (rows_of(&tiles.key_tiles, kv_width, dk), rows_of(&tiles.key_tiles, kv_width, dv));
    tiles.key_tiles.par_iter().zip(dk_rows).zip(dv_rows).for_each_init(
        Scratch::default,
        |scratch, ((tile, dk), dv)| {
            dk.fill(0.0);
            dv.fill(0.0);
            for head in 0..heads {
                key_tile(shape, tiles, tile, head, saved, d_o, &delta, dk, dv, scratch);
            }
            precision.round_slice(dk);
            precision.round_slice(dv);
        },
    );

    let dq_rows = rows_of(&tiles.query_tiles, heads * d, dq);
    tiles.query_tiles.par_iter().zip(dq_rows).for_each_init(Scratch::default, |scratch, (tile, dq)| {
        for head in 0..heads {
            query_tile(shape, tiles, tile, head, saved, d_o, &delta, dq, scratch);
        }
        precision.round_slice(dq);
    });
}

/// Adds to `dk` and `dv` of one key tile what one query head contributes.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn key_tile(
    shape: &AttentionShape,
    tiles: &TileList,
    tile: &Tile,
    head: usize,
    saved: &Saved<'_>,
    d_o: &[f32],
    delta: &[f32],
    dk: &mut [f32],
    dv: &mut [f32],
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = *shape;
    let kv_head = head / shape.group();
    let keys = tile.end - tile.start;
    for (q_start, q_end) in runs(tile.other_start, tile.other_end) {
        let queries = q_end - q_start;
        probabilities(shape, tiles, head, saved, d_o, delta, (q_start, q_end), (tile.start, tile.end), scratch);
        let (p, ds) =
            (Mat::new(&scratch.scores, queries, keys, keys), Mat::new(&scratch.d_scores, queries, keys, keys));
        let d_o_tile = head_rows(d_o, q_start, q_end, head, heads, d);
        let q_tile = head_rows(saved.q.f32s(), q_start, q_end, head, heads, d);
        let width = num_kv_heads * d;
        gemm_serial(1.0, p.t(), d_o_tile, 1.0, MatMut::new(&mut dv[kv_head * d..], keys, d, width));
        gemm_serial(scale, ds.t(), q_tile, 1.0, MatMut::new(&mut dk[kv_head * d..], keys, d, width));
    }
}

/// Assigns `dq` of one query tile of one head.
#[expect(clippy::too_many_arguments, reason = "the body of one loop")]
fn query_tile(
    shape: &AttentionShape,
    tiles: &TileList,
    tile: &Tile,
    head: usize,
    saved: &Saved<'_>,
    d_o: &[f32],
    delta: &[f32],
    dq: &mut [f32],
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = *shape;
    let kv_head = head / shape.group();
    let queries = tile.end - tile.start;
    let mut beta = 0.0;
    for (k_start, k_end) in runs(tile.other_start, tile.other_end) {
        let keys = k_end - k_start;
        probabilities(shape, tiles, head, saved, d_o, delta, (tile.start, tile.end), (k_start, k_end), scratch);
        let ds = Mat::new(&scratch.d_scores, queries, keys, keys);
        let k_tile = head_rows(saved.k.f32s(), k_start, k_end, kv_head, num_kv_heads, d);
        gemm_serial(scale, ds, k_tile, beta, MatMut::new(&mut dq[head * d..], queries, d, heads * d));
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
    d_o: &[f32],
    delta: &[f32],
    (q_start, q_end): (usize, usize),
    (k_start, k_end): (usize, usize),
    scratch: &mut Scratch,
) {
    let AttentionShape { num_heads: heads, num_kv_heads, head_dim: d, scale } = *shape;
    let kv_head = head / shape.group();
    let (queries, keys) = (q_end - q_start, k_end - k_start);
    let Scratch { scores, d_scores, .. } = scratch;
    reset(scores, queries * keys, 0.0);
    reset(d_scores, queries * keys, 0.0);
    let q_tile = head_rows(saved.q.f32s(), q_start, q_end, head, heads, d);
    let k_tile = head_rows(saved.k.f32s(), k_start, k_end, kv_head, num_kv_heads, d);
    let v_tile = head_rows(saved.v.f32s(), k_start, k_end, kv_head, num_kv_heads, d);
    let d_o_tile = head_rows(d_o, q_start, q_end, head, heads, d);
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
