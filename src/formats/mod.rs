//! File formats as bytes and tables: safetensors, GGUF, quantized blocks, PEFT configuration.

pub mod blocks;
pub mod gguf;
pub mod gguf_value;
pub mod gguf_write;
pub mod mapped;
pub mod peft;
pub mod safetensors;
