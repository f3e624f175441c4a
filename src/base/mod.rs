//! What every floor needs: typed errors, folders, random numbers, units.

pub mod error;
pub mod files;
pub mod paths;
pub mod rng;
pub mod units;
