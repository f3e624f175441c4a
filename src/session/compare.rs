//! Paired comparison: an optimization on against off, in blocks A B B A … from the same state, on the same batches, with the same seed.

mod report;

pub use self::report::{
    Arm, ArmMemory, Better, CompareEvent, CompareOptions, CompareReport, Difference, Effect, PairDifferences, Parity,
    Prediction, Quantities, Setting, Variation, Verdict, VerdictKind,
};
