//! File formats as bytes and tables: safetensors, GGUF, quantized blocks, PEFT configuration.
