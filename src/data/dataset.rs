//! Datasets: files of rows into records. Stop 1 of the walk.
//!
//! A `.jsonl` (or `.ndjson`) file has one JSON object a line; its layout is found from the columns or chosen. A `.txt`
//! (or `.md`) file is plain text: blank lines separate its documents.

mod file;
mod layouts;
mod mapping;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail, ensure};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::options::LayoutChoice;
use crate::base::error::{BadRecord, Result};
use crate::base::rng::Philox;
use file::{FileKind, Line};
use layouts::Layout;
pub use layouts::turn;

/// A row as it was written.
type Row = Map<String, Value>;
/// A row, or in words why there is none.
type RowOrReason = Result<Row, String>;

/// One row of a file, checked and brought into one of three shapes.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// File it came from.
    pub path: Arc<Path>,
    /// 1-based line at which it starts.
    pub line: usize,
    /// What it says.
    pub content: Content,
}

impl Record {
    /// This record as one that cannot be used.
    pub fn bad(&self, reason: impl Into<String>) -> BadRecord {
        BadRecord { path: self.path.to_path_buf(), line: self.line, reason: reason.into() }
    }
}

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Turns for a chat template.
    Conversation {
        /// Each an object with at least `role`, as chat templates read them.
        messages: Vec<Value>,
        /// Tools offered to the model, as chat templates read them.
        tools: Option<Value>,
    },
    /// One question and its answer: two turns for a chat template, or one text for a model without.
    Pair {
        /// System message.
        system: Option<String>,
        /// What the user says.
        prompt: String,
        /// What the assistant answers.
        completion: String,
        /// Put between the two when there is no chat template.
        separator: &'static str,
    },
    /// Text as it is.
    Text(String),
}

/// What to make of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DatasetOptions {
    /// Layout of the rows.
    pub layout: LayoutChoice,
    /// For a mapping: the user's text, with `{column}` where a column's value goes.
    pub prompt: Option<String>,
    /// For a mapping: the assistant's text, with `{column}` where a column's value goes.
    pub completion: Option<String>,
    /// System message put before every conversation that has none.
    pub system: Option<String>,
    /// Use only the first so many usable records; 0 means all.
    pub max_records: usize,
}

/// The usable records of a file, and what was found on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// Usable records in the order of the file.
    pub records: Vec<Record>,
    /// Rows that cannot be used, with line and reason.
    pub rejected: Vec<BadRecord>,
    /// Columns in the order in which they first occur; empty for plain text.
    pub columns: Vec<String>,
    /// The layout used; never `Auto`.
    pub layout: LayoutChoice,
}

impl Dataset {
    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read or is not UTF-8, when the options contradict each other or the file, when a mapping
    /// names a column that no row has, and when no row is usable: then the error lists the columns found and what was
    /// looked for. A single bad row is not an error: it is in `rejected`.
    pub fn open(path: &Path, options: &DatasetOptions) -> Result<Self> {
        let never = AtomicBool::new(false);
        Self::open_unless_stopped(path, options, &never)?.context("reading was stopped")
    }

    /// As [`Dataset::open`]; `None` when `stop` was raised on the way.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn open_unless_stopped(path: &Path, options: &DatasetOptions, stop: &AtomicBool) -> Result<Option<Self>> {
        let kind = file::kind(path)?;
        let text = file::read_utf8(path)?;
        match file::resolve(kind, path, &text)? {
            FileKind::PlainText => Self::from_plain_text(path, &text, options).map(Some),
            _ => Self::from_json_lines(path, &text, options, stop),
        }
    }

    fn from_plain_text(path: &Path, text: &str, options: &DatasetOptions) -> Result<Self> {
        ensure!(
            matches!(options.layout, LayoutChoice::Auto | LayoutChoice::Text),
            "{} is plain text and has no columns; set data.layout to \"auto\" or \"text\"",
            path.display()
        );
        ensure!(
            options.prompt.is_none() && options.completion.is_none(),
            "{} is plain text: data.prompt and data.completion need a file with columns",
            path.display()
        );
        refuse_system_for_text(options)?;
        let source: Arc<Path> = path.into();
        let mut records: Vec<Record> = file::paragraphs(text)
            .map(|(line, text)| Record { path: source.clone(), line, content: Content::Text(text) })
            .collect();
        ensure!(!records.is_empty(), "{} holds no text", path.display());
        if options.max_records > 0 {
            records.truncate(options.max_records);
        }
        Ok(Self { records, rejected: Vec::new(), columns: Vec::new(), layout: LayoutChoice::Text })
    }

    fn from_json_lines(path: &Path, text: &str, options: &DatasetOptions, stop: &AtomicBool) -> Result<Option<Self>> {
        let source: Arc<Path> = path.into();
        let lines = file::lines(text);
        // `None` from one row, when stopped, ends the work on the others.
        let going = || (!stop.load(Ordering::Relaxed)).then_some(());
        let rows: Option<Vec<(usize, RowOrReason)>> = lines
            .par_iter()
            .map(|Line { number, text }| {
                going()?;
                Some((*number, parse_row(text)))
            })
            .collect();
        let Some(rows) = rows else { return Ok(None) };
        let columns = columns_of(&rows);
        let layout = Layout::choose(options, &rows, &columns).with_context(|| format!("{}", path.display()))?;
        if layout.choice() == LayoutChoice::Text {
            refuse_system_for_text(options)?;
        }
        let contents: Option<Vec<(usize, Result<Content, String>)>> = rows
            .into_par_iter()
            .map(|(line, row)| {
                going()?;
                Some((line, row.and_then(|row| layout.read(row, options.system.as_deref()))))
            })
            .collect();
        let Some(contents) = contents else { return Ok(None) };
        let (mut records, mut rejected) = (Vec::new(), Vec::new());
        for (line, content) in contents {
            match content {
                Ok(content) => records.push(Record { path: source.clone(), line, content }),
                Err(reason) => rejected.push(BadRecord { path: path.to_path_buf(), line, reason }),
            }
            if options.max_records > 0 && records.len() == options.max_records {
                break;
            }
        }
        if records.is_empty() {
            bail!(no_usable_row(path, &columns, &layout.looked_for(), &rejected));
        }
        Ok(Some(Self { records, rejected, columns, layout: layout.choice() }))
    }
}

fn refuse_system_for_text(options: &DatasetOptions) -> Result<()> {
    ensure!(
        options.system.is_none(),
        "data.system cannot be put before plain text; remove it or choose another layout"
    );
    Ok(())
}

fn parse_row(text: &str) -> RowOrReason {
    match serde_json::from_str(text) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(_) => Err("a row must be a JSON object like {\"prompt\": …, \"completion\": …}".into()),
        Err(e) => {
            let message = e.to_string();
            let what = message.split(" at line ").next().unwrap_or(&message);
            Err(format!("not valid JSON at column {}: {what}", e.column()))
        }
    }
}

fn columns_of(rows: &[(usize, RowOrReason)]) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for key in rows.iter().filter_map(|(_, row)| row.as_ref().ok()).flat_map(Map::keys) {
        if seen.insert(key.as_str()) {
            columns.push(key.clone());
        }
    }
    columns
}

fn no_usable_row(path: &Path, columns: &[String], looked_for: &str, rejected: &[BadRecord]) -> String {
    let mut message = format!(
        "{} has no usable row: columns found: {}; looked for {looked_for}",
        path.display(),
        layouts::list(columns)
    );
    for bad in rejected.iter().take(3) {
        message += &format!("\n  line {}: {}", bad.line, bad.reason);
    }
    if rejected.len() > 3 {
        message += &format!("\n  … and {} more rejected rows", rejected.len() - 3);
    }
    message
}

/// Stream of the held-out split, so that it shares no random numbers with shuffling.
const SPLIT_STREAM: u64 = 0xDA7A_5911_0000_0000;

/// Divides records into those that train and those held out: `fraction` of them, rounded, at least one when
/// `fraction` is above 0 and there are two records, never all. Both keep the order of the file, and the same seed gives
/// the same split.
///
/// # Errors
/// When `fraction` is not in [0, 1).
pub fn split<T>(records: Vec<T>, fraction: f64, seed: u64) -> Result<(Vec<T>, Vec<T>)> {
    ensure!((0.0..1.0).contains(&fraction), "the held-out share must be at least 0 and below 1, not {fraction}");
    let n = records.len();
    if fraction == 0.0 || n < 2 {
        return Ok((records, Vec::new()));
    }
    let num_held_out = ((n as f64 * fraction).round() as usize).clamp(1, n - 1);
    let mut order: Vec<usize> = (0..n).collect();
    Philox::new(seed, SPLIT_STREAM).shuffle(&mut order);
    let mut held_out = vec![false; n];
    for i in &order[..num_held_out] {
        held_out[*i] = true;
    }
    let (mut train, mut eval) = (Vec::with_capacity(n - num_held_out), Vec::with_capacity(num_held_out));
    for (record, held_out) in records.into_iter().zip(held_out) {
        if held_out { eval.push(record) } else { train.push(record) }
    }
    Ok((train, eval))
}

#[cfg(test)]
mod tests;
