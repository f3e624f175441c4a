//! From files to packed batches, on the host: datasets, chat templates, tokenizer, packing, loader.

pub mod chat_template;
pub mod dataset;
pub mod example;
pub mod loader;
pub mod options;
pub mod pack;
#[cfg(test)]
mod testing;
pub mod tokenizer;
