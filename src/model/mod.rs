//! The transformer: configuration, blocks, named parameters, loading, generation.

pub mod config;
pub mod config_gguf;
pub mod config_hf;
pub mod loading;
