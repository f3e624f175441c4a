//! The tables of `run.sqlite`: creating, writing and reading them.
//!
//! `seq` counts the events of a run over all tables, so that reading gives them back in their order.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};
use serde::de::IntoDeserializer as _;
use serde::de::value::StrDeserializer;
use serde::{Deserialize, Serialize};

use super::STORE_VERSION;
use crate::base::error::Result;
use crate::session::event::{Outcome, RunEvent, RunInfo, TimedEvent};
use crate::tensor::cuda::CounterValues;
use crate::tensor::memory::{CategoryBytes, MemoryReport};
use crate::tensor::phase::{PhaseTime, Span};
use crate::train::report::{EvalReport, StepReport};

const SCHEMA: &str = "
CREATE TABLE steps (
    seq INTEGER PRIMARY KEY, unix_ms INTEGER NOT NULL, step INTEGER NOT NULL,
    loss REAL, grad_norm REAL, clipped INTEGER NOT NULL, lr REAL,
    total_tokens INTEGER NOT NULL, document_tokens INTEGER NOT NULL, num_label_tokens INTEGER NOT NULL,
    step_ms REAL, not_attributed_ms REAL,
    now_bytes INTEGER NOT NULL, peak_bytes INTEGER NOT NULL, process_bytes INTEGER,
    epoch REAL, elapsed_s REAL, tokens_seen INTEGER NOT NULL, eta_s REAL,
    launches INTEGER, host_syncs INTEGER, allocations INTEGER, cache TEXT, copies TEXT, pinned TEXT, moe TEXT);
CREATE TABLE phases (
    id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, phase TEXT NOT NULL,
    forward_ms REAL, backward_ms REAL, step_ms REAL);
CREATE TABLE memory (
    id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, category TEXT NOT NULL,
    now_bytes INTEGER NOT NULL, peak_bytes INTEGER NOT NULL);
CREATE TABLE spans (
    id INTEGER PRIMARY KEY, seq INTEGER NOT NULL, lane TEXT NOT NULL, phase TEXT NOT NULL, pass TEXT NOT NULL,
    layer INTEGER, start_ms REAL NOT NULL, end_ms REAL NOT NULL);
CREATE INDEX spans_seq ON spans (seq);
CREATE TABLE evals (
    seq INTEGER PRIMARY KEY, unix_ms INTEGER NOT NULL, step INTEGER NOT NULL,
    loss REAL, num_label_tokens INTEGER NOT NULL, num_documents INTEGER NOT NULL, eval_ms REAL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, unix_ms INTEGER NOT NULL, kind TEXT NOT NULL, json TEXT NOT NULL);
";

/// Steps whose spans are kept: the last ones. A step has hundreds of spans, and only recent ones are looked at.
pub const KEPT_SPAN_STEPS: i64 = 32;

/// Creates the file with its tables.
pub(super) fn create(path: &Path) -> Result<Connection> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // In WAL mode NORMAL loses at most the last moments after a power cut, never the file.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    let transaction = connection.transaction()?;
    transaction.execute_batch(SCHEMA)?;
    transaction.pragma_update(None, "user_version", STORE_VERSION)?;
    transaction.commit()?;
    Ok(connection)
}

/// Writes events numbered from `first_seq` in one transaction.
pub(super) fn write(connection: &mut Connection, first_seq: i64, events: &[TimedEvent]) -> Result<()> {
    let transaction = connection.transaction()?;
    for (seq, timed) in (first_seq..).zip(events) {
        match &timed.event {
            RunEvent::Step { report, epoch, elapsed_s, tokens_seen, eta_s } => {
                let place =
                    StepPlace { epoch: *epoch, elapsed_s: *elapsed_s, tokens_seen: *tokens_seen, eta_s: *eta_s };
                write_step(&transaction, seq, timed.unix_ms, report, &place)?;
            }
            RunEvent::Eval(report) => write_eval(&transaction, seq, timed.unix_ms, report)?,
            other => {
                let json = serde_json::to_value(other)?;
                let kind = json["event"].as_str().unwrap_or_default();
                transaction.prepare_cached("INSERT INTO events VALUES (?, ?, ?, ?)")?.execute(params![
                    seq,
                    timed.unix_ms,
                    kind,
                    json.to_string()
                ])?;
            }
        }
    }
    transaction.commit()?;
    Ok(())
}

/// Where a step stands in its run.
struct StepPlace {
    epoch: f64,
    elapsed_s: f64,
    tokens_seen: u64,
    eta_s: Option<f64>,
}

fn write_step(t: &Transaction<'_>, seq: i64, unix_ms: i64, r: &StepReport, place: &StepPlace) -> Result<()> {
    t.prepare_cached(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )?
    .execute(params![
        seq,
        unix_ms,
        to_db(r.step),
        r.loss,
        r.grad_norm,
        r.clipped,
        r.lr,
        to_db(r.total_tokens),
        to_db(r.document_tokens),
        to_db(r.num_label_tokens),
        r.step_ms,
        r.not_attributed_ms,
        to_db(r.memory.now_bytes),
        to_db(r.memory.peak_bytes),
        r.memory.process_bytes.map(to_db),
        place.epoch,
        place.elapsed_s,
        to_db(place.tokens_seen),
        place.eta_s,
        r.counters.map(|c| to_db(c.launches)),
        r.counters.map(|c| to_db(c.host_syncs)),
        r.counters.map(|c| to_db(c.allocations)),
        r.cache.as_ref().map(serde_json::to_string).transpose()?,
        r.copies.as_ref().map(serde_json::to_string).transpose()?,
        r.memory.pinned.as_ref().map(serde_json::to_string).transpose()?,
        r.moe.as_ref().map(serde_json::to_string).transpose()?,
    ])?;
    let mut phases =
        t.prepare_cached("INSERT INTO phases (seq, phase, forward_ms, backward_ms, step_ms) VALUES (?, ?, ?, ?, ?)")?;
    for p in &r.phases {
        phases.execute(params![seq, word(&p.phase)?, p.forward_ms, p.backward_ms, p.step_ms])?;
    }
    let mut memory =
        t.prepare_cached("INSERT INTO memory (seq, category, now_bytes, peak_bytes) VALUES (?, ?, ?, ?)")?;
    for c in &r.memory.categories {
        memory.execute(params![seq, word(&c.category)?, to_db(c.now_bytes), to_db(c.peak_bytes)])?;
    }
    if r.spans.is_empty() {
        return Ok(());
    }
    let mut spans = t.prepare_cached(
        "INSERT INTO spans (seq, lane, phase, pass, layer, start_ms, end_ms) VALUES (?, ?, ?, ?, ?, ?, ?)",
    )?;
    for s in &r.spans {
        let (lane, phase, pass) = (word(&s.lane)?, word(&s.phase)?, word(&s.pass)?);
        spans.execute(params![seq, lane, phase, pass, s.layer, s.start_ms, s.end_ms])?;
    }
    t.prepare_cached(
        "DELETE FROM spans WHERE seq <= (SELECT DISTINCT seq FROM spans ORDER BY seq DESC LIMIT 1 OFFSET ?)",
    )?
    .execute([KEPT_SPAN_STEPS])?;
    Ok(())
}

fn write_eval(t: &Transaction<'_>, seq: i64, unix_ms: i64, r: &EvalReport) -> Result<()> {
    t.prepare_cached("INSERT INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)")?.execute(params![
        seq,
        unix_ms,
        to_db(r.step),
        r.loss,
        to_db(r.num_label_tokens),
        to_db(r.num_documents),
        r.eval_ms,
    ])?;
    Ok(())
}

/// All events in order.
pub(super) fn read(connection: &Connection) -> Result<Vec<TimedEvent>> {
    // One transaction, so that a run that is being written is seen at one moment.
    let connection = connection.unchecked_transaction()?;
    let mut events: Vec<(i64, TimedEvent)> = Vec::new();
    let mut statement = connection.prepare("SELECT seq, unix_ms, json FROM events")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let json: String = row.get(2)?;
        let event = serde_json::from_str(&json).with_context(|| format!("event {json}"))?;
        events.push((row.get(0)?, TimedEvent { unix_ms: row.get(1)?, event }));
    }
    let mut statement = connection.prepare("SELECT * FROM evals")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        events.push((row.get("seq")?, TimedEvent { unix_ms: row.get("unix_ms")?, event: RunEvent::Eval(eval(row)?) }));
    }
    let mut parts = StepParts::read(&connection)?;
    let mut statement = connection.prepare("SELECT * FROM steps")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let seq: i64 = row.get("seq")?;
        let event = RunEvent::Step {
            report: Box::new(step(row, seq, &mut parts)?),
            epoch: number(row, "epoch")?,
            elapsed_s: number(row, "elapsed_s")?,
            tokens_seen: from_db(row.get("tokens_seen")?),
            eta_s: row.get("eta_s")?,
        };
        events.push((seq, TimedEvent { unix_ms: row.get("unix_ms")?, event }));
    }
    events.sort_by_key(|(seq, _)| *seq);
    Ok(events.into_iter().map(|(_, event)| event).collect())
}

/// The lists of all steps, by `seq`.
struct StepParts {
    phases: HashMap<i64, Vec<PhaseTime>>,
    memory: HashMap<i64, Vec<CategoryBytes>>,
    spans: HashMap<i64, Vec<Span>>,
}

impl StepParts {
    fn read(connection: &Connection) -> Result<Self> {
        Ok(Self {
            phases: grouped(connection, "SELECT * FROM phases ORDER BY id", |row| {
                Ok(PhaseTime {
                    phase: tag(row, "phase")?,
                    forward_ms: row.get("forward_ms")?,
                    backward_ms: row.get("backward_ms")?,
                    step_ms: row.get("step_ms")?,
                })
            })?,
            memory: grouped(connection, "SELECT * FROM memory ORDER BY id", |row| {
                Ok(CategoryBytes {
                    category: tag(row, "category")?,
                    now_bytes: from_db(row.get("now_bytes")?),
                    peak_bytes: from_db(row.get("peak_bytes")?),
                })
            })?,
            spans: grouped(connection, "SELECT * FROM spans ORDER BY id", |row| {
                Ok(Span {
                    lane: tag(row, "lane")?,
                    phase: tag(row, "phase")?,
                    pass: tag(row, "pass")?,
                    layer: row.get("layer")?,
                    start_ms: row.get("start_ms")?,
                    end_ms: row.get("end_ms")?,
                })
            })?,
        })
    }
}

fn grouped<T>(
    connection: &Connection,
    sql: &str,
    read: impl Fn(&Row<'_>) -> Result<T>,
) -> Result<HashMap<i64, Vec<T>>> {
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query([])?;
    let mut groups: HashMap<i64, Vec<T>> = HashMap::new();
    while let Some(row) = rows.next()? {
        groups.entry(row.get("seq")?).or_default().push(read(row)?);
    }
    Ok(groups)
}

fn step(row: &Row<'_>, seq: i64, parts: &mut StepParts) -> Result<StepReport> {
    Ok(StepReport {
        step: from_db(row.get("step")?),
        loss: number(row, "loss")?,
        grad_norm: number(row, "grad_norm")?,
        clipped: row.get("clipped")?,
        lr: number(row, "lr")?,
        total_tokens: from_db(row.get("total_tokens")?),
        document_tokens: from_db(row.get("document_tokens")?),
        num_label_tokens: from_db(row.get("num_label_tokens")?),
        step_ms: number(row, "step_ms")?,
        phases: parts.phases.remove(&seq).unwrap_or_default(),
        not_attributed_ms: number(row, "not_attributed_ms")?,
        memory: MemoryReport {
            categories: parts.memory.remove(&seq).unwrap_or_default(),
            now_bytes: from_db(row.get("now_bytes")?),
            peak_bytes: from_db(row.get("peak_bytes")?),
            process_bytes: row.get::<_, Option<i64>>("process_bytes")?.map(from_db),
            pinned: json(row, "pinned")?,
        },
        counters: counters(row)?,
        cache: json(row, "cache")?,
        copies: json(row, "copies")?,
        moe: json(row, "moe")?,
        spans: parts.spans.remove(&seq).unwrap_or_default(),
    })
}

/// What a column holds as JSON; `None` where it is empty, and in stores that are older than the column.
fn json<T: for<'de> Deserialize<'de>>(row: &Row<'_>, column: &str) -> Result<Option<T>> {
    let Ok(index) = row.as_ref().column_index(column) else { return Ok(None) };
    let Some(text) = row.get::<_, Option<String>>(index)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).with_context(|| format!("column {column}"))
}

/// The counters of a step, where the device counts.
fn counters(row: &Row<'_>) -> Result<Option<CounterValues>> {
    let Some(launches) = row.get::<_, Option<i64>>("launches")? else { return Ok(None) };
    Ok(Some(CounterValues {
        launches: from_db(launches),
        host_syncs: from_db(row.get("host_syncs")?),
        allocations: from_db(row.get("allocations")?),
    }))
}

fn eval(row: &Row<'_>) -> Result<EvalReport> {
    Ok(EvalReport {
        step: from_db(row.get("step")?),
        loss: number(row, "loss")?,
        num_label_tokens: from_db(row.get("num_label_tokens")?),
        num_documents: from_db(row.get("num_documents")?),
        eval_ms: number(row, "eval_ms")?,
    })
}

/// What a list of runs shows of a store.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StoreSummary {
    /// Milliseconds since the Unix epoch of the first event.
    pub began_unix_ms: Option<i64>,
    /// Milliseconds since the Unix epoch of the last event.
    pub last_unix_ms: Option<i64>,
    /// Facts about the run, once training began.
    pub info: Option<RunInfo>,
    /// How it ended, if it did.
    pub outcome: Option<Outcome>,
    /// Steps done.
    pub steps: u64,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// The last held-out loss.
    pub last_eval_loss: Option<f64>,
}

/// Reads what a list of runs shows.
pub(super) fn summary(connection: &Connection) -> Result<StoreSummary> {
    let mut summary = StoreSummary::default();
    let mut statement =
        connection.prepare("SELECT json FROM events WHERE kind IN ('started', 'finished') ORDER BY seq")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        match serde_json::from_str(&row.get::<_, String>(0)?)? {
            RunEvent::Started(info) => summary.info = Some(info),
            RunEvent::Finished { outcome, .. } => summary.outcome = Some(outcome),
            _ => {}
        }
    }
    let last = "SELECT step, loss FROM steps ORDER BY seq DESC LIMIT 1";
    if let Some((step, loss)) = connection.query_row(last, [], |row| Ok((row.get(0)?, row.get(1)?))).optional()? {
        summary.steps = from_db(step);
        summary.last_loss = loss;
    }
    let last = "SELECT loss FROM evals ORDER BY seq DESC LIMIT 1";
    summary.last_eval_loss = connection.query_row(last, [], |row| row.get(0)).optional()?.flatten();
    let times =
        "SELECT MIN(unix_ms), MAX(unix_ms) FROM (SELECT unix_ms FROM events UNION ALL SELECT unix_ms FROM steps)";
    (summary.began_unix_ms, summary.last_unix_ms) =
        connection.query_row(times, [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(summary)
}

/// SQLite's integers are signed; the bits of a count stay as they are.
fn to_db(n: u64) -> i64 {
    n.cast_signed()
}

fn from_db(n: i64) -> u64 {
    n.cast_unsigned()
}

/// A number of a row; SQLite stores a NaN as NULL.
fn number(row: &Row<'_>, column: &str) -> Result<f64> {
    Ok(row.get::<_, Option<f64>>(column)?.unwrap_or(f64::NAN))
}

/// A unit variant as the word serde writes for it.
fn word<T: Serialize>(value: &T) -> Result<String> {
    match serde_json::to_value(value)? {
        serde_json::Value::String(word) => Ok(word),
        other => Err(anyhow!("{other} is not a word")),
    }
}

/// A unit variant read from the word in a column.
fn tag<T: for<'de> Deserialize<'de>>(row: &Row<'_>, column: &str) -> Result<T> {
    let word: String = row.get(column)?;
    let deserializer: StrDeserializer<'_, serde::de::value::Error> = word.as_str().into_deserializer();
    T::deserialize(deserializer).with_context(|| format!("column {column}"))
}
