//! The rotary embedding and the norms of heads on the GPU, over head sizes and numbers of heads.

use tandem::ops::qk_norm::{self, Heads, QkNorm};
use tandem::ops::rope::{self, RopeTable};

use super::{Bench, SCRATCH, tensor};

#[test]
fn rope_of_any_head_size_is_bit_equal_to_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let cases =
        [(1, 1, 8), (9, 130, 8), (7, 3, 24), (8, 5, 40), (9, 40, 64), (33, 9, 96), (1000, 10, 128), (5, 3, 256)];
    for (rows, heads, head_dim) in cases {
        let (width, stride) = (heads * head_dim, heads * head_dim + 8);
        let x = b.values(rows * stride);
        let inv_freq: Vec<f32> = (0..head_dim / 2).map(|i| 0.9f32.powi(i as i32)).collect();
        let positions: Vec<i32> = (0..rows as i32).map(|i| i * 7 % 100).collect();
        let [cpu, gpu] = [1, 2].map(|i| {
            let d = &b.devices[i];
            d.run(|| {
                // As YaRN has it.
                let table = RopeTable::scaled(d, &inv_freq, 1.346_573_6, 100);
                let positions = d.indices(SCRATCH, positions.clone());
                let [mut turned, mut back] = [(); 2].map(|()| tensor(d, &[rows, stride], &x));
                rope::forward(d, turned.first_columns_mut(width), &table, &positions);
                rope::backward(d, back.first_columns_mut(width), &table, &positions);
                [turned.to_vec(), back.to_vec()]
            })
        });
        b.devices[2].check().unwrap();
        assert!(cpu == gpu, "{rows} rows, {heads} heads of {head_dim}");
    }
}

#[test]
fn norms_of_heads() {
    let Some(mut b) = Bench::new() else { return };
    let cases = [
        (1, 1, 1, 8),
        (70, 3, 1, 64),
        (129, 4, 2, 128),
        (33, 2, 2, 40),
        (9, 5, 1, 256),
        (130, 32, 8, 128),
        (65, 32, 8, 64),
        (7, 3, 2, 96),
        (8, 40, 1, 24),
        (9, 9, 3, 8),
        (1000, 3, 1, 40),
    ];
    for (rows, heads, kv_heads, head_dim) in cases {
        let width = (heads + kv_heads) * head_dim;
        let (x, dy) = (b.values(rows * (width + 24)), b.values(rows * (width + 8)));
        let (q, k) = (b.values(head_dim), b.values(head_dim));
        let positions: Vec<i32> = (0..rows as i32).map(|i| i * 7 % 100).collect();
        let inv_freq: Vec<f32> = (0..head_dim / 2).map(|i| 0.9f32.powi(i as i32)).collect();
        b.compare(&format!("qk_norm {rows} rows, {heads}+{kv_heads} heads of {head_dim}"), 3.0, |d| {
            let table = RopeTable::new(d, &inv_freq, 100);
            let positions = d.indices(SCRATCH, positions.clone());
            let (q_weight, k_weight) = (tensor(d, &[head_dim], &q), tensor(d, &[head_dim], &k));
            let (q_weight, k_weight) = (&q_weight, &k_weight);
            let norm = QkNorm { q_weight, k_weight, eps: 1e-6, num_heads: heads, num_kv_heads: kv_heads };
            let x = tensor(d, &[rows, width + 24], &x);
            let mut dy = tensor(d, &[rows, width + 8], &dy);
            let mut y = d.empty(SCRATCH, &[rows, width]);
            let x = x.first_columns(width);
            qk_norm::forward(d, &norm, &table, &positions, x, &mut y);
            let mut weights = [d.zeros_f32(SCRATCH, &[head_dim]), d.zeros_f32(SCRATCH, &[head_dim])];
            for (heads, dweight) in [Heads::Query, Heads::Key].into_iter().zip(&mut weights) {
                let dy = dy.first_columns(width);
                qk_norm::backward_weight(d, &norm, &table, &positions, heads, x, dy, dweight);
            }
            qk_norm::backward_in_place(d, &norm, &table, &positions, x, dy.first_columns_mut(width));
            let [dq_weight, dk_weight] = weights;
            vec![y, dq_weight, dk_weight, dy]
        });
    }
}
