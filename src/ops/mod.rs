//! One file per operation family: contract, CPU form, launcher.
