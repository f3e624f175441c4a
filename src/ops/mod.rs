//! One file per operation family: contract, CPU form, launcher.
//!
//! Contract of all of them: gradients of parameters accumulate (`+=`), gradients of activations assign (`=`) unless the name says otherwise.
//! Shapes are checked by `assert!` at the entry: a wrong one is a defect of the caller, never of a user's input.

pub mod adamw;
pub mod adamw8;
pub mod adapter;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod expert_activation;
pub mod expert_balance;
pub mod expert_bias;
pub mod grouped_matmul;
pub mod grouped_matmul_hopper;
pub mod grouped_matmul_plan;
pub mod matmul;
pub mod matmul_plan;
pub mod multi_tensor;
pub mod mxfp4;
pub mod nf4;
pub mod norm;
pub mod qk_norm;
pub mod rms_norm;
pub mod rope;
pub mod routing;
pub mod sequence;
pub mod swiglu;
pub mod swiglu_lora;

mod vector;

#[cfg(test)]
pub(crate) mod testing;

/// Rows that one task of a row-wise operation handles at least: below it, handing out work costs more than doing it.
pub(crate) const MIN_ROWS_PER_TASK: usize = 16;

/// Values that one task of an element-wise operation handles at least.
pub(crate) const MIN_VALUES_PER_TASK: usize = 16_384;

/// Rows of `width` values that one task of an element-wise operation handles at least.
pub(crate) fn min_rows(width: usize) -> usize {
    MIN_VALUES_PER_TASK.div_ceil(width.max(1))
}
