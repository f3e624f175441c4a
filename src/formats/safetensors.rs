//! Reader and writer of safetensors files.
//!
//! Layout: u64 header length, a JSON object `{name: {dtype, shape, data_offsets}}` with free text under `__metadata__`,
//! then the tensors' bytes, without gaps, offsets counting from the end of the header.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use half::{bf16, f16};
use memmap2::Mmap;
pub use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo as Entry};
use serde_json::{Map, Value};

use super::blocks::BlockKind;
use super::{blocks, mapped};
use crate::base::error::Result;
use crate::base::{files, units};

/// Longest header that is believed, the limit of the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Type and shape of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Where its bytes are in the file; checked to be inside.
    bytes: Range<usize>,
}

impl TensorInfo {
    /// Bytes it takes in the file.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// How to turn it into f32, where it is a float Tandem reads.
    pub fn block_kind(&self) -> Option<BlockKind> {
        match self.dtype {
            Dtype::F32 => Some(BlockKind::F32),
            Dtype::F16 => Some(BlockKind::F16),
            Dtype::BF16 => Some(BlockKind::Bf16),
            _ => None,
        }
    }
}

/// An open safetensors file, mapped into memory.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Open the file and check its header against its length. Tensor data stays on disk.
    ///
    /// # Errors
    /// When it is not a safetensors file, contradicts itself, or is truncated (the message says by how much).
    pub fn open(path: &Path) -> Result<Self> {
        let map = mapped::open(path)?;
        let (metadata, tensors) =
            parse(&map).with_context(|| format!("cannot read the safetensors file {}", path.display()))?;
        Ok(Self { path: path.to_owned(), map, tensors, metadata })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Type and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Texts stored beside the tensors.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The stored bytes of a tensor, little-endian, row-major.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        Ok(self.map.get(self.expect(name)?.bytes.clone()).unwrap_or_default())
    }

    /// A tensor of F32, F16 or BF16 as f32, row-major.
    ///
    /// # Errors
    /// When there is no such tensor or it is of another type.
    pub fn to_f32(&self, name: &str) -> Result<Vec<f32>> {
        let info = self.expect(name)?;
        let Some(kind) = info.block_kind() else {
            bail!(
                "{}: tensor {name} is stored as {}; Tandem reads F32, F16 and BF16 weights",
                self.path.display(),
                info.dtype
            );
        };
        blocks::to_f32(kind, self.bytes(name)?, info.num_elements())
            .with_context(|| format!("{}: tensor {name}", self.path.display()))
    }

    /// A tensor of I32.
    ///
    /// # Errors
    /// When there is no such tensor or it is of another type.
    pub fn to_i32(&self, name: &str) -> Result<Vec<i32>> {
        let info = self.expect(name)?;
        ensure!(
            info.dtype == Dtype::I32,
            "{}: tensor {name} is stored as {}, expected I32",
            self.path.display(),
            info.dtype
        );
        Ok(self.bytes(name)?.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
    }

    fn expect(&self, name: &str) -> Result<&TensorInfo> {
        self.info(name).with_context(|| format!("{} holds no tensor named {name}", self.path.display()))
    }
}

type Header = (BTreeMap<String, String>, BTreeMap<String, TensorInfo>);

/// Read the header and check that the tensors fill the rest of the file exactly.
fn parse(file: &[u8]) -> Result<Header> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        bail!("not a safetensors file: it has only {} bytes", file.len());
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > MAX_HEADER_BYTES || rest.first() != Some(&b'{') {
        bail!("not a safetensors file{}", guess(file));
    }
    // At most 100 MB, so it fits.
    let header_bytes = header_bytes as usize;
    let Some((header, data)) = rest.split_at_checked(header_bytes) else {
        bail!("it is truncated: its header has {header_bytes} bytes, the file {}; fetch it again", file.len());
    };
    let object: Map<String, Value> = serde_json::from_slice(header).context("its header is not valid JSON")?;
    let mut metadata = BTreeMap::new();
    let mut entries: Vec<(String, Entry)> = Vec::new();
    for (name, value) in object {
        if name == "__metadata__" {
            metadata = serde_json::from_value(value).context("__metadata__ is not a table of texts")?;
        } else {
            let entry = serde_json::from_value(value).with_context(|| format!("the entry of tensor {name}"))?;
            entries.push((name, entry));
        }
    }
    entries.sort_by_key(|(_, e)| e.data_offsets);
    let table = Metadata::new(None, entries.clone()).context("its header contradicts itself")?;
    let (wanted, found) = (table.data_len(), data.len());
    if wanted > found {
        let missing = units::bytes((wanted - found) as u64);
        bail!(
            "it is truncated: {wanted} bytes of tensors announced, {found} found ({missing} missing); fetch it again"
        );
    }
    ensure!(wanted == found, "{} bytes follow the last tensor: the file is damaged, fetch it again", found - wanted);
    let start = 8 + header_bytes;
    let tensors = entries
        .into_iter()
        .map(|(name, e)| {
            let bytes = start + e.data_offsets.0..start + e.data_offsets.1;
            (name, TensorInfo { dtype: e.dtype, shape: e.shape, bytes })
        })
        .collect();
    Ok((metadata, tensors))
}

/// What a file that is no safetensors file may be instead, as the rest of a sentence.
fn guess(file: &[u8]) -> &'static str {
    match file.get(..4) {
        Some(b"GGUF") => ": it is a GGUF file",
        Some(b"PK\x03\x04") => ": it is a zip archive, perhaps a PyTorch checkpoint",
        Some(b"vers") => ": it is a Git LFS pointer; fetch the real file with `git lfs pull`",
        Some(b"<!DO" | b"<htm" | b"<!do") => ": it is a web page, the download went wrong",
        _ => "",
    }
}

/// A tensor about to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its type: F32, F16 or BF16.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes it takes in a file.
    pub fn num_bytes(&self) -> usize {
        self.num_elements() * self.dtype.bitsize() / 8
    }
}

/// Write a file. The values of each tensor are asked of `values` when its turn comes (types with larger elements first,
/// then in the order given), so only one tensor need be in memory. The file appears only when it is complete.
///
/// # Errors
/// When a name appears twice, a type is not a float, `values` fails or gives the wrong number of values, or the file
/// cannot be written.
pub fn write<'a>(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[TensorSpec],
    mut values: impl FnMut(&TensorSpec) -> Result<Cow<'a, [f32]>>,
) -> Result<()> {
    // Larger elements first keeps every tensor aligned to its element size.
    let mut order: Vec<&TensorSpec> = tensors.iter().collect();
    order.sort_by_key(|t| std::cmp::Reverse(t.dtype.bitsize()));
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".to_owned(), serde_json::to_value(metadata)?);
    }
    let mut offset = 0;
    for t in &order {
        ensure!(
            matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16),
            "tensor {} cannot be written as {}",
            t.name,
            t.dtype
        );
        let end = offset + t.num_bytes();
        let entry = Entry { dtype: t.dtype, shape: t.shape.clone(), data_offsets: (offset, end) };
        let before = header.insert(t.name.clone(), serde_json::to_value(entry)?);
        ensure!(before.is_none(), "tensor {} is there twice", t.name);
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    files::write_atomic(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for t in &order {
            let data = values(t).with_context(|| format!("tensor {}", t.name))?;
            ensure!(
                data.len() == t.num_elements(),
                "tensor {} has {} values, its shape {:?} takes {}",
                t.name,
                data.len(),
                t.shape,
                t.num_elements()
            );
            write_values(out, t.dtype, &data)?;
        }
        Ok(())
    })
}

/// Write values in the given float type, little-endian, rounding to nearest, ties to even.
pub fn write_values(out: &mut dyn Write, dtype: Dtype, values: &[f32]) -> Result<()> {
    let mut buffer = Vec::new();
    for part in values.chunks(64 * 1024) {
        buffer.clear();
        match dtype {
            Dtype::F16 => buffer.extend(part.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            Dtype::BF16 => buffer.extend(part.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
            _ => buffer.extend(part.iter().flat_map(|v| v.to_le_bytes())),
        }
        out.write_all(&buffer)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.into(), dtype, shape: shape.to_vec() }
    }

    /// A file with one tensor of each type that can be written, and its bytes.
    fn sample(dir: &Path) -> (PathBuf, Vec<u8>) {
        let path = dir.join("a.safetensors");
        let specs = [spec("h", Dtype::F16, &[3]), spec("w", Dtype::F32, &[2, 2]), spec("b", Dtype::BF16, &[1, 2])];
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        write(&path, &metadata, &specs, |t| {
            Ok(match t.name.as_str() {
                "h" => vec![1.0, 2.0, 0.1],
                "w" => vec![1.0, -2.0, 3.5, 0.1],
                _ => vec![1.0, 0.1],
            }
            .into())
        })
        .unwrap();
        let bytes = std::fs::read(&path).unwrap();
        (path, bytes)
    }

    fn refusal(dir: &Path, bytes: &[u8]) -> String {
        let path = dir.join("b.safetensors");
        std::fs::write(&path, bytes).unwrap();
        format!("{:#}", SafetensorsFile::open(&path).unwrap_err())
    }

    #[test]
    fn writes_what_it_and_the_reference_reader_read() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes) = sample(dir.path());
        let f = SafetensorsFile::open(&path).unwrap();
        assert_eq!(f.names().collect::<Vec<_>>(), ["b", "h", "w"]);
        assert_eq!(f.to_f32("w").unwrap(), [1.0, -2.0, 3.5, 0.1]);
        assert_eq!(f.to_f32("b").unwrap(), [1.0, bf16::from_f32(0.1).to_f32()]);
        assert_eq!(f.to_f32("h").unwrap(), [1.0, 2.0, f16::from_f32(0.1).to_f32()]);
        assert_eq!(f.info("w").unwrap().shape, [2, 2]);
        assert_eq!(f.metadata()["format"], "pt");
        let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(reference.tensor("w").unwrap().data(), f.bytes("w").unwrap());
        assert_eq!(reference.tensor("h").unwrap().data(), f.bytes("h").unwrap());
    }

    #[test]
    fn truncation_says_how_much_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let (_, bytes) = sample(dir.path());
        let e = refusal(dir.path(), &bytes[..bytes.len() - 5]);
        assert!(e.contains("b.safetensors") && e.contains("5 B missing"), "{e}");
        assert!(refusal(dir.path(), &bytes[..40]).contains("truncated"));
        assert!(refusal(dir.path(), &[&bytes[..], b"xy"].concat()).contains("2 bytes follow"));
    }

    #[test]
    fn other_files_are_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n";
        assert!(refusal(dir.path(), lfs).contains("git lfs pull"));
        assert!(refusal(dir.path(), b"GGUF\x03\0\0\0\0\0\0\0").contains("GGUF"));
        assert!(refusal(dir.path(), b"abc").contains("only 3 bytes"));
    }

    #[test]
    fn unknown_and_unreadable_types_name_the_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let header = br#"{"x":{"dtype":"F7","shape":[1],"data_offsets":[0,1]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0]].concat();
        let e = refusal(dir.path(), &file);
        assert!(e.contains("tensor x") && e.contains("F7"), "{e}");
        let header = br#"{"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
        let path = dir.path().join("c.safetensors");
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, &[0]].concat()).unwrap();
        let e = SafetensorsFile::open(&path).unwrap().to_f32("x").unwrap_err();
        assert!(format!("{e:#}").contains("tensor x is stored as I8"));
    }

    #[test]
    fn wrong_values_leave_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.safetensors");
        let specs = [spec("w", Dtype::F32, &[2])];
        let e = write(&path, &BTreeMap::new(), &specs, |_| Ok(vec![1.0].into())).unwrap_err();
        assert!(format!("{e:#}").contains("has 1 values"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn damaged_files_never_panic(at in 0usize..400, byte: u8, cut in 0usize..400) {
            static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| sample(tempfile::tempdir().unwrap().path()).1);
            let mut bytes = WHOLE.clone();
            let n = bytes.len();
            bytes[at % n] = byte;
            bytes.truncate(n - cut % n);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), &bytes).unwrap();
            if let Ok(f) = SafetensorsFile::open(file.path()) {
                for name in f.names() {
                    let _ = (f.to_f32(name), f.to_i32(name));
                }
            }
        }

        #[test]
        fn huge_offsets_are_refused(a: u64, b: u64, n: u64) {
            let header = format!(r#"{{"x":{{"dtype":"F32","shape":[{n}],"data_offsets":[{a},{b}]}}}}"#);
            let dir = tempfile::tempdir().unwrap();
            let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat();
            refusal(dir.path(), &file);
        }
    }
}
