//! A first look at a dataset file: size and columns, also of files that no layout fits yet.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

use crate::base::error::Result;
use crate::session::starter;

/// Bytes and rows that are looked at.
const LOOKED_AT_BYTES: u64 = 1 << 20;
const LOOKED_AT_ROWS: usize = 200;
/// Characters kept of a sample value.
const SAMPLE_CHARS: usize = 80;

/// What a first look at a dataset file found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFacts {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Columns of the first rows with the beginning of their first text value, in the order in which they occur; empty
    /// for plain text.
    pub columns: Vec<Column>,
}

/// A column of a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The beginning of its first value, as text.
    pub sample: String,
}

/// Looks at the first rows of a dataset (`starter` stands for the starter dataset).
///
/// # Errors
/// When the file cannot be read.
pub fn probe(path: &Path) -> Result<DataFacts> {
    let path = starter::resolve_dataset(path)?;
    let context = || format!("cannot read {}", path.display());
    let bytes = path.metadata().with_context(context)?.len();
    let mut columns: Vec<Column> = Vec::new();
    let mut lines = BufReader::new(File::open(&path).with_context(context)?.take(LOOKED_AT_BYTES));
    let mut line = Vec::new();
    for _ in 0..LOOKED_AT_ROWS {
        line.clear();
        if lines.read_until(b'\n', &mut line).with_context(context)? == 0 {
            break;
        }
        // Rows that are not JSON objects are the preview's business; here they have no columns.
        let Ok(Value::Object(row)) = serde_json::from_slice(&line) else { continue };
        for (name, value) in row {
            if !columns.iter().any(|column| column.name == name) {
                columns.push(Column { name, sample: sample(&value) });
            }
        }
    }
    Ok(DataFacts { path, bytes, columns })
}

fn sample(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let mut chars = text.chars();
    let beginning: String = chars.by_ref().take(SAMPLE_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if chars.next().is_some() { beginning + "…" } else { beginning }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_come_with_a_sample_in_their_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("Frag & Antwort.jsonl");
        std::fs::write(&path, "{\"b\": \"x\\ny\", \"a\": 1}\nnot json\n{\"c\": [1, 2]}\n").unwrap();
        let facts = probe(&path).unwrap();
        let seen: Vec<_> = facts.columns.iter().map(|column| (column.name.as_str(), column.sample.as_str())).collect();
        assert_eq!(seen, [("b", "x y"), ("a", "1"), ("c", "[1,2]")]);
        std::fs::write(&path, "Just text.\n").unwrap();
        assert_eq!(probe(&path).unwrap().columns, []);
        let error = probe(Path::new("/no/such/file.jsonl")).unwrap_err();
        assert!(error.to_string().contains("cannot read /no/such/file.jsonl"), "{error}");
    }
}
