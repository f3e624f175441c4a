//! One file per operation family: contract, CPU form, launcher.
//!
//! Contract of all of them: gradients of parameters accumulate (`+=`), gradients of activations assign (`=`) unless the name says otherwise.
//! Shapes are checked by `assert!` at the entry: a wrong one is a defect of the caller, never of a user's input.

pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod matmul;
pub mod norm;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;

#[cfg(test)]
pub(crate) mod testing;

/// Rows that one task of a row-wise operation handles at least: below it, handing out work costs more than doing it.
pub(crate) const MIN_ROWS_PER_TASK: usize = 16;

/// `Σ a·b` in f32 with sixteen running sums: fixed order, more accurate than one sum, and the compiler can use vectors.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}
