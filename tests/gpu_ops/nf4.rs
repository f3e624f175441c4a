//! Matrices made of weights in 4 bits on the GPU: the same bits as on the CPU.

use tandem::formats::nf4::Nf4;
use tandem::formats::safetensors::Dtype;
use tandem::ops::nf4::{self, Border, Nf4Weight};

use super::{Bench, SCRATCH, tensor};

#[test]
fn matrices_of_weights_in_4_bits_are_bit_equal_to_the_cpu() {
    let Some(mut b) = Bench::new() else { return };
    let cases: [(&[usize], usize, usize); 6] = [
        (&[1], 8, 0),
        (&[5, 3], 24, 8),
        (&[64, 16, 16], 64, 24),
        (&[96], 2048, 16),
        (&[1001, 7], 136, 64),
        (&[3000, 1, 9], 328, 8),
    ];
    for (outs, cols, r) in cases {
        for (double, dtype) in [(true, Dtype::BF16), (true, Dtype::F32), (false, Dtype::BF16), (false, Dtype::F16)] {
            let stored: Vec<Nf4<'static>> = outs
                .iter()
                .map(|&rows| Nf4::quantize("w", &b.values(rows * cols), &[rows, cols], dtype, double).unwrap())
                .collect();
            let rows: usize = outs.iter().sum();
            let (a_values, b_values) = (b.values(r * cols), b.values(rows * (r + 8)));
            let stride = (cols + r).next_multiple_of(64);
            let around = b.values((rows + r) * stride);
            let [cpu, gpu] = [1, 2].map(|i| {
                let d = &b.devices[i];
                d.run(|| {
                    let mut first = 0;
                    let weights: Vec<(usize, Nf4Weight)> = stored
                        .iter()
                        .map(|stored| {
                            let [rows, cols] = stored.shape() else { panic!("a matrix") };
                            let mut weight = Nf4Weight::room(d, *rows, *cols, true);
                            weight.set(d, stored);
                            first += rows;
                            (first - rows, weight)
                        })
                        .collect();
                    let weights: Vec<(usize, &Nf4Weight)> =
                        weights.iter().map(|(row, weight)| (*row, weight)).collect();
                    let (lora_a, lora_b) = (
                        tensor(
                            d,
                            &[r.max(1), cols],
                            &[a_values.as_slice(), &vec![0.0; if r == 0 { cols } else { 0 }]].concat(),
                        ),
                        tensor(d, &[rows, r + 8], &b_values),
                    );
                    let border = (r > 0).then(|| Border { b: lora_b.first_columns(r), a: lora_a.view() });
                    let mut out = d.tensor(SCRATCH, &[rows + r, stride], around.clone());
                    nf4::dequantize(d, &weights, border, &mut out);
                    out.to_vec()
                })
            });
            b.devices[2].check().unwrap();
            assert!(cpu == gpu, "{outs:?} of {cols} columns, r {r}, double {double}, {dtype}");
        }
    }
}
