//! The transformer: configuration, blocks, named parameters, loading, generation.

pub mod batch;
pub mod block;
pub mod config;
pub mod config_gguf;
pub mod config_hf;
mod config_moe;
mod experts;
pub mod file_tensors;
pub mod generate;
pub mod loading;
pub mod lora;
pub mod metadata;
pub mod offload;
pub mod policy;
pub mod recording;
pub mod rotary;
mod shards;
mod skeleton;
mod stored;
pub mod transformer;
mod weights;

#[cfg(test)]
pub(crate) mod testing;
