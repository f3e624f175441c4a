//! The transformer: configuration, blocks, named parameters, loading, generation.

pub mod batch;
pub mod block;
pub mod config;
pub mod config_gguf;
pub mod config_hf;
pub mod generate;
pub mod loading;
pub mod lora;
mod names;
pub mod policy;
pub mod rotary;
pub mod transformer;

#[cfg(test)]
pub(crate) mod testing;
