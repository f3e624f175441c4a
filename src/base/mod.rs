//! What every floor needs: typed errors, folders, units, logging.

pub mod error;
pub mod paths;
pub mod units;
