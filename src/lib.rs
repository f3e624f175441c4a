//! Tandem: the training engine, the sessions that run it, and the window that shows it.
//!
//! The modules are floors: each may use those above it in this list, never those below
//! (`tests/architecture.rs` checks it; ARCHITECTURE.md says why).

// Tests may unwrap and panic: that is how they fail (clippy.toml).
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_macros))]

// Lets unit tests use what `tests/support` offers to the integration tests.
#[cfg(test)]
extern crate self as tandem;

pub mod base;
pub mod formats;

pub mod data;

pub mod tensor;

pub mod ops;

pub mod layers;

pub mod model;

pub mod train;

pub mod export;

pub mod session;

pub mod gui;
