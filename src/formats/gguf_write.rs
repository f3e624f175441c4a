//! Writer of GGUF files (version 3, little-endian), the counterpart of `gguf`: builds small files in memory.

use super::blocks::BlockKind;
use super::gguf_value::GgmlType;

/// A GGUF file being put together: metadata first, then tensors, in the order of the calls.
#[derive(Debug, Clone, Default)]
pub struct GgufBuilder {
    metadata: Vec<u8>,
    num_values: u64,
    table: Vec<u8>,
    num_tensors: u64,
    data: Vec<u8>,
}

/// Alignment of tensor data, the format's default.
const ALIGNMENT: usize = 32;

impl GgufBuilder {
    /// A file without metadata and tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Add a u32.
    pub fn u32(mut self, key: &str, value: u32) -> Self {
        self.key(key, 4);
        self.metadata.extend(value.to_le_bytes());
        self
    }

    /// Add an f32.
    pub fn f32(mut self, key: &str, value: f32) -> Self {
        self.key(key, 6);
        self.metadata.extend(value.to_le_bytes());
        self
    }

    /// Add a truth value.
    pub fn bool(mut self, key: &str, value: bool) -> Self {
        self.key(key, 7);
        self.metadata.push(u8::from(value));
        self
    }

    /// Add text.
    pub fn string(mut self, key: &str, value: &str) -> Self {
        self.key(key, 8);
        text(&mut self.metadata, value);
        self
    }

    /// Add a list of texts.
    pub fn strings<S: AsRef<str>>(mut self, key: &str, values: &[S]) -> Self {
        self.array(key, 8, values.len());
        for v in values {
            text(&mut self.metadata, v.as_ref());
        }
        self
    }

    /// Add a list of i32.
    pub fn i32s(mut self, key: &str, values: &[i32]) -> Self {
        self.array(key, 5, values.len());
        self.metadata.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self
    }

    /// Add a list of f32.
    pub fn f32s(mut self, key: &str, values: &[f32]) -> Self {
        self.array(key, 6, values.len());
        self.metadata.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self
    }

    /// Add a tensor of f32 with dimensions slowest first (`[out, in]`).
    pub fn tensor_f32(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, GgmlType::of(BlockKind::F32), shape, &bytes)
    }

    /// Add a tensor from its stored bytes, with dimensions slowest first. Nothing is checked: tests write broken files.
    pub fn tensor(mut self, name: &str, kind: GgmlType, shape: &[usize], bytes: &[u8]) -> Self {
        text(&mut self.table, name);
        self.table.extend((shape.len() as u32).to_le_bytes());
        for d in shape.iter().rev() {
            self.table.extend((*d as u64).to_le_bytes());
        }
        self.table.extend(kind.0.to_le_bytes());
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.table.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.num_tensors += 1;
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.num_tensors.to_le_bytes());
        out.extend(self.num_values.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.table);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&self.data);
        out
    }

    fn key(&mut self, key: &str, kind: u32) {
        text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.num_values += 1;
    }

    fn array(&mut self, key: &str, kind: u32, len: usize) {
        self.key(key, 9);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend((len as u64).to_le_bytes());
    }
}

/// A u64 length and the bytes of `s`.
fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}
