//! Files as text: which kind a file is, its encoding, its lines and paragraphs.

use std::path::Path;

use anyhow::{Context as _, bail};

use crate::base::error::Result;

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// One JSON object a line.
    JsonLines,
    /// Text without columns.
    PlainText,
    /// The name does not say.
    Unknown,
}

/// A line that is not blank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    /// 1-based.
    pub number: usize,
    /// Without its end.
    pub text: &'a str,
}

/// What the file's name says.
///
/// # Errors
/// For a folder, and for formats known by name that are not read.
pub fn kind(path: &Path) -> Result<FileKind> {
    if path.is_dir() {
        bail!("{} is a folder; choose a .jsonl or .txt file in it", path.display());
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    Ok(match extension.as_str() {
        "jsonl" | "ndjson" | "json" => FileKind::JsonLines,
        "txt" | "text" | "md" => FileKind::PlainText,
        "csv" | "tsv" | "parquet" | "arrow" | "gz" | "zst" | "zip" | "xlsx" => {
            bail!("{}: .{extension} files are not read; convert it to .jsonl, one JSON object a line", path.display())
        }
        _ => FileKind::Unknown,
    })
}

/// Settles what the name left open by the first character of the text.
///
/// # Errors
/// When the text is a JSON array, and when neither name nor text says what the file is.
pub fn resolve(kind: FileKind, path: &Path, text: &str) -> Result<FileKind> {
    let first = text.trim_start().chars().next();
    match (kind, first) {
        (FileKind::PlainText, _) => Ok(FileKind::PlainText),
        (_, Some('[')) => bail!(
            "{} is one JSON array; write it as JSON lines, one object a line (`jq -c '.[]' {0} > rows.jsonl`)",
            path.display()
        ),
        (FileKind::JsonLines, _) | (FileKind::Unknown, Some('{')) => Ok(FileKind::JsonLines),
        (FileKind::Unknown, _) => {
            bail!("{}: neither name nor content says what this file is; name it .jsonl or .txt", path.display())
        }
    }
}

/// The file's text: UTF-8, a byte-order mark dropped.
///
/// # Errors
/// When it cannot be read, and when it is UTF-16 or has a byte that is not UTF-8: the error names the line.
pub fn read_utf8(path: &Path) -> Result<String> {
    let mut bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let utf16 = bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) || mostly_zeros(&bytes);
    if utf16 {
        bail!("{} is UTF-16; save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)", path.display());
    }
    if bytes.starts_with(&[0xEF, 0xBB, 0xBF]) {
        bytes.drain(..3);
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        let bytes = e.as_bytes();
        let line = bytes[..at].iter().filter(|b| **b == b'\n').count() + 1;
        let byte = bytes.get(at).copied().unwrap_or_default();
        anyhow::anyhow!(
            "{}:{line}: byte {byte:#04x} is not valid UTF-8; save the file as UTF-8 (for Western European text: `iconv -f WINDOWS-1252 -t UTF-8`)",
            path.display()
        )
    })
}

/// UTF-16 without a mark: plain letters leave every second byte zero.
fn mostly_zeros(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(1024)];
    head.len() >= 4 && head.iter().filter(|b| **b == 0).count() * 3 > head.len()
}

/// The lines that are not blank.
pub fn lines(text: &str) -> Vec<Line<'_>> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(i, text)| Line { number: i + 1, text })
        .collect()
}

/// Runs of lines between blank lines, each with the number of its first line. Line ends inside are kept as `\n`.
pub fn paragraphs(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut lines = text.lines().enumerate().peekable();
    std::iter::from_fn(move || {
        while lines.next_if(|(_, line)| line.trim().is_empty()).is_some() {}
        let (first, line) = lines.next()?;
        let mut paragraph = line.to_owned();
        while let Some((_, line)) = lines.next_if(|(_, line)| !line.trim().is_empty()) {
            paragraph.push('\n');
            paragraph.push_str(line);
        }
        Some((first + 1, paragraph))
    })
}
