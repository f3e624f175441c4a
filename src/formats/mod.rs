//! File formats as bytes and tables: safetensors, GGUF, quantized blocks, NF4, MXFP4, PEFT configuration.

pub mod blocks;
pub mod blockwise8;
pub mod gguf;
pub mod gguf_value;
pub mod gguf_write;
pub mod mapped;
pub mod mxfp4;
pub mod nf4;
pub mod peft;
pub mod safetensors;
