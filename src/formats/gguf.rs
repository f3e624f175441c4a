//! Reader of GGUF files (versions 2 and 3, little-endian): metadata, tensor table, tensor bytes.
//!
//! Layout: magic `GGUF`, u32 version, u64 tensor count, u64 metadata count, the metadata (name, type, value), the tensor
//! table (name, u32 number of dimensions, u64 dimensions with the fastest first, u32 type, u64 offset), padding to
//! `general.alignment` (32 when absent), then the tensors' bytes; offsets count from there.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use memmap2::Mmap;

use super::gguf_value::{Cursor, GgmlType, GgufValue, ValueKind};
use super::{blocks, mapped};
use crate::base::error::Result;
use crate::base::units;

/// Alignment of the tensor data when the file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Most dimensions a tensor may have (as in ggml).
const MAX_DIMS: u32 = 4;

/// One entry of the tensor table.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTensor {
    /// Its name in the file, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub kind: GgmlType,
    /// Dimensions, slowest first: `[out, in]` for a matrix (the file stores them the other way round).
    pub shape: Vec<usize>,
    /// Where its bytes are in the file; checked to be inside.
    bytes: Range<usize>,
}

impl GgufTensor {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes it takes in the file.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// An open GGUF file, mapped into memory.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    version: u32,
    metadata: HashMap<String, GgufValue>,
    tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

impl GgufFile {
    /// Open and check the file: header, metadata and tensor table are read, every tensor lies inside the file and none
    /// overlaps another. Tensor data stays on disk.
    ///
    /// # Errors
    /// When it is not a little-endian GGUF file of version 2 or 3, is truncated, or contradicts itself. A tensor of a
    /// kind that cannot be converted is no error here; [`GgufFile::to_f32`] says so.
    pub fn open(path: &Path) -> Result<Self> {
        let map = mapped::open(path)?;
        let (version, metadata, tensors) =
            parse(&map).with_context(|| format!("cannot read the GGUF file {}", path.display()))?;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { path: path.to_owned(), map, version, metadata, tensors, by_name })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// All tensors in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The stored bytes of a tensor of this file.
    pub fn bytes(&self, tensor: &GgufTensor) -> &[u8] {
        self.map.get(tensor.bytes.clone()).unwrap_or_default()
    }

    /// The tensor's values as f32, row-major in its [`GgufTensor::shape`].
    ///
    /// # Errors
    /// When there is no such tensor, or its kind cannot be converted.
    pub fn to_f32(&self, name: &str) -> Result<Vec<f32>> {
        let tensor =
            self.tensor(name).with_context(|| format!("{} holds no tensor named {name}", self.path.display()))?;
        let kind = tensor
            .kind
            .block_kind()
            .with_context(|| format!("{}: tensor {name} {}", self.path.display(), unsupported_kind(tensor)))?;
        blocks::to_f32(kind, self.bytes(tensor), tensor.num_elements())
            .with_context(|| format!("{}: tensor {name}", self.path.display()))
    }

    /// All metadata keys, sorted.
    pub fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.metadata.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    /// The metadata value of this key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    /// A whole number that fits in u32; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type, negative or too large.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        let value = match self.get(key) {
            None => return Ok(None),
            Some(GgufValue::Uint(v)) => u32::try_from(*v).ok(),
            Some(GgufValue::Int(v)) => u32::try_from(*v).ok(),
            Some(other) => return self.wrong_type(key, other, "a whole number"),
        };
        value.map(Some).with_context(|| format!("{}: {key} is out of range", self.path.display()))
    }

    /// A number as f32; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is not a number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        Ok(self.f64(key)?.map(|v| v as f32))
    }

    /// A number as f64; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is not a number.
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(v)) => Ok(Some(*v)),
            Some(GgufValue::Uint(v)) => Ok(Some(*v as f64)),
            Some(GgufValue::Int(v)) => Ok(Some(*v as f64)),
            Some(other) => self.wrong_type(key, other, "a number"),
        }
    }

    /// A truth value; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(v)) => Ok(Some(*v)),
            Some(other) => self.wrong_type(key, other, "a truth value"),
        }
    }

    /// Text; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::String(v)) => Ok(Some(v)),
            Some(other) => self.wrong_type(key, other, "text"),
        }
    }

    /// A list of texts, borrowed from the file; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type or one text is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.list(key, "a list of texts", |kind| kind == ValueKind::String, |cursor, _| cursor.string())
    }

    /// A list of whole numbers that fit in u32; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type, or one number is negative or too large.
    pub fn u32s(&self, key: &str) -> Result<Option<Vec<u32>>> {
        self.list(key, "a list of whole numbers", is_integer, |cursor, kind| match cursor.value(kind)? {
            GgufValue::Uint(v) => u32::try_from(v).context("a number is out of range"),
            GgufValue::Int(v) => u32::try_from(v).context("a number is out of range"),
            other => bail!("{} among whole numbers", other.type_name()),
        })
    }

    /// A list of whole numbers that fit in i32; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type, or one number is too large.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        self.list(key, "a list of whole numbers", is_integer, |cursor, kind| match cursor.value(kind)? {
            GgufValue::Uint(v) => i32::try_from(v).context("a number is out of range"),
            GgufValue::Int(v) => i32::try_from(v).context("a number is out of range"),
            other => bail!("{} among whole numbers", other.type_name()),
        })
    }

    /// A list of numbers as f32; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is of another type.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.list(
            key,
            "a list of numbers",
            |kind| kind.size().is_some(),
            |cursor, kind| match cursor.value(kind)? {
                GgufValue::Float(v) => Ok(v as f32),
                GgufValue::Uint(v) => Ok(v as f32),
                GgufValue::Int(v) => Ok(v as f32),
                other => bail!("{} among numbers", other.type_name()),
            },
        )
    }

    /// Read an array's elements one by one with `read`.
    fn list<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        accepts: impl Fn(ValueKind) -> bool,
        read: impl Fn(&mut Cursor<'a>, ValueKind) -> Result<T>,
    ) -> Result<Option<Vec<T>>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array { kind, count, bytes }) if accepts(*kind) => {
                let mut cursor = Cursor::new(self.map.get(bytes.clone()).unwrap_or_default());
                // The count was checked against the file's bytes when it was opened.
                (0..*count)
                    .map(|_| read(&mut cursor, *kind))
                    .collect::<Result<Vec<T>>>()
                    .map(Some)
                    .with_context(|| format!("{}: metadata {key}", self.path.display()))
            }
            Some(other) => self.wrong_type(key, other, wanted),
        }
    }

    fn wrong_type<T>(&self, key: &str, found: &GgufValue, wanted: &str) -> Result<T> {
        bail!("{}: metadata {key} is {}, expected {wanted}", self.path.display(), found.type_name())
    }
}

fn is_integer(kind: ValueKind) -> bool {
    kind.size().is_some() && !matches!(kind, ValueKind::F32 | ValueKind::F64 | ValueKind::Bool)
}

/// Why a tensor cannot be converted and what to use instead, to follow the tensor's name in a message.
pub fn unsupported_kind(tensor: &GgufTensor) -> String {
    format!(
        "is quantized as {}, which Tandem does not read; use the model's Hugging Face folder, or a GGUF file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or MXFP4",
        tensor.kind.name()
    )
}

/// Read and check header, metadata and tensor table.
fn parse(file: &[u8]) -> Result<(u32, HashMap<String, GgufValue>, Vec<GgufTensor>)> {
    let mut cursor = Cursor::new(file);
    let magic: [u8; 4] = cursor.array().context("not a GGUF file")?;
    if &magic != b"GGUF" {
        bail!("not a GGUF file: it starts with {:?} instead of \"GGUF\"", String::from_utf8_lossy(&magic));
    }
    let version = cursor.u32()?;
    match version {
        2 | 3 => {}
        1 => bail!("GGUF version 1 is not supported; convert the model again with a current llama.cpp"),
        // The version number of a big-endian file, read the wrong way round.
        v if v.swap_bytes() < 16 => bail!("it is a big-endian GGUF file; only little-endian ones are supported"),
        v => bail!("GGUF version {v} is not supported (2 and 3 are)"),
    }
    let num_tensors = cursor.u64()?;
    let num_values = cursor.u64()?;
    // The smallest entries are 13 bytes (metadata) and 24 bytes (tensor): larger counts cannot be true.
    let claimed = u128::from(num_tensors) * 24 + u128::from(num_values) * 13;
    if claimed > cursor.left() as u128 {
        bail!(
            "it claims {num_tensors} tensors and {num_values} metadata values, more than its {} can hold: it is truncated or damaged",
            units::bytes(file.len() as u64)
        );
    }

    let mut metadata = HashMap::new();
    for _ in 0..num_values {
        let name = cursor.name()?;
        let value = cursor.typed_value().with_context(|| format!("metadata {name}"))?;
        if metadata.insert(name.to_owned(), value).is_some() {
            bail!("metadata {name} appears twice: the file is damaged");
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(GgufValue::Uint(a)) if a.is_power_of_two() && *a >= 8 && *a <= 1 << 20 => *a,
        Some(other) => bail!("general.alignment is {other:?}; expected a power of two from 8 on"),
    };

    let mut table = Vec::new();
    for _ in 0..num_tensors {
        let name = cursor.name()?;
        let entry = tensor_entry(&mut cursor).with_context(|| format!("tensor {name}"))?;
        if entry.offset % alignment != 0 {
            bail!("tensor {name} starts at offset {}, which is not a multiple of {alignment}", entry.offset);
        }
        table.push((name.to_owned(), entry));
    }
    let data_start = (cursor.position() as u64).next_multiple_of(alignment);
    let tensors = place(table, data_start, file.len() as u64)?;
    Ok((version, metadata, tensors))
}

/// A tensor table entry before its place in the file is checked.
struct Entry {
    kind: GgmlType,
    shape: Vec<usize>,
    offset: u64,
    num_bytes: u64,
}

fn tensor_entry(cursor: &mut Cursor<'_>) -> Result<Entry> {
    let num_dims = cursor.u32()?;
    if num_dims > MAX_DIMS {
        bail!("it claims {num_dims} dimensions (at most {MAX_DIMS} are allowed): the file is damaged");
    }
    let mut dims = Vec::new();
    for _ in 0..num_dims {
        dims.push(cursor.u64()?);
    }
    let kind = GgmlType(cursor.u32()?);
    let offset = cursor.u64()?;
    let num_elements = dims
        .iter()
        .try_fold(1u64, |a, &d| a.checked_mul(d))
        .filter(|n| *n > 0)
        .with_context(|| format!("its dimensions {dims:?} make no sense: the file is damaged"))?;
    let num_bytes = kind.tensor_bytes(dims.first().copied().unwrap_or(1), num_elements)?;
    let shape = dims
        .iter()
        .rev()
        .map(|&d| usize::try_from(d).context("a dimension is too large for this machine"))
        .collect::<Result<_>>()?;
    Ok(Entry { kind, shape, offset, num_bytes })
}

/// Check that every tensor lies inside the file and overlaps no other, and turn offsets into byte ranges.
fn place(table: Vec<(String, Entry)>, data_start: u64, file_len: u64) -> Result<Vec<GgufTensor>> {
    let mut tensors = Vec::new();
    let mut seen = HashMap::new();
    let mut furthest: Option<(u64, &str)> = None;
    let ends = table
        .iter()
        .map(|(name, e)| {
            let end = data_start.checked_add(e.offset).and_then(|s| s.checked_add(e.num_bytes));
            end.with_context(|| format!("tensor {name} lies beyond any possible file: the file is damaged"))
        })
        .collect::<Result<Vec<u64>>>()?;
    for ((name, _), &end) in table.iter().zip(&ends) {
        if seen.insert(name.as_str(), ()).is_some() {
            bail!("tensor {name} appears twice: the file is damaged");
        }
        if furthest.is_none_or(|(f, _)| end > f) {
            furthest = Some((end, name));
        }
    }
    if let Some((end, name)) = furthest.filter(|(end, _)| *end > file_len) {
        bail!(
            "it is truncated: tensor {name} ends at byte {end}, the file has {file_len} ({} missing); fetch it again",
            units::bytes(end - file_len)
        );
    }
    let mut order: Vec<(u64, u64, &str)> =
        table.iter().zip(&ends).map(|((n, e), end)| (end - e.num_bytes, *end, n.as_str())).collect();
    order.sort_unstable();
    for pair in order.windows(2) {
        if pair[0].1 > pair[1].0 {
            bail!("tensors {} and {} overlap: the file is damaged", pair[0].2, pair[1].2);
        }
    }
    for ((name, e), end) in table.iter().zip(&ends) {
        // Both ends are inside the mapped file, so they fit in usize.
        let bytes = (end - e.num_bytes) as usize..*end as usize;
        tensors.push(GgufTensor { name: name.clone(), kind: e.kind, shape: e.shape.clone(), bytes });
    }
    Ok(tensors)
}

#[cfg(test)]
#[path = "gguf_tests.rs"]
mod tests;
