//! What leaves a run: adapters in PEFT format, whole models as Hugging Face folders.

pub mod adapter;
pub mod hf_config;
pub mod model;
pub mod nf4;
