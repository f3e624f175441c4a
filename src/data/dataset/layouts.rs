//! The layouts of rows: finding one from the columns, and reading a row by it.

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::mapping::TextTemplate;
use super::{Content, DatasetOptions, Row, RowOrReason};
use crate::base::error::Result;
use crate::data::options::LayoutChoice;

/// How rows are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// A list of turns in `messages`, `conversations` or `conversation`.
    Messages,
    /// `instruction`, `input`, `output`, with `system` and `history` where they exist.
    Alpaca,
    /// `prompt`, `completion`.
    PromptCompletion,
    /// `question`, `answer`.
    QuestionAnswer,
    /// `text`.
    Text,
    /// Templates over the columns.
    Mapping {
        /// The user's text.
        prompt: TextTemplate,
        /// The assistant's text.
        completion: TextTemplate,
    },
}

/// Layouts in the order in which they are tried: a row with `messages` and `text` is a conversation.
const FOUND_FROM_COLUMNS: [Layout; 5] =
    [Layout::Messages, Layout::Alpaca, Layout::PromptCompletion, Layout::QuestionAnswer, Layout::Text];

const TURN_COLUMNS: [&str; 3] = ["messages", "conversations", "conversation"];

impl Layout {
    /// The layout the options name, or the one most rows have.
    ///
    /// # Errors
    /// When the options contradict each other, a mapping names a column that no row has, or no layout fits any row.
    pub fn choose(options: &DatasetOptions, rows: &[(usize, RowOrReason)], columns: &[String]) -> Result<Self> {
        let has_templates = options.prompt.is_some() || options.completion.is_some();
        let chosen = match options.layout {
            LayoutChoice::Auto if has_templates => return Self::mapping(options, columns),
            LayoutChoice::Mapping => return Self::mapping(options, columns),
            LayoutChoice::Auto => None,
            LayoutChoice::Messages => Some(Self::Messages),
            LayoutChoice::Alpaca => Some(Self::Alpaca),
            LayoutChoice::PromptCompletion => Some(Self::PromptCompletion),
            LayoutChoice::QuestionAnswer => Some(Self::QuestionAnswer),
            LayoutChoice::Text => Some(Self::Text),
        };
        ensure!(
            !has_templates,
            "data.prompt and data.completion belong to the layout \"mapping\"; set data.layout to it or remove them"
        );
        if let Some(layout) = chosen {
            return Ok(layout);
        }
        let count = |layout: &Self| rows.iter().filter_map(|(_, r)| r.as_ref().ok()).filter(|r| layout.fits(r)).count();
        let mut best = None;
        for layout in FOUND_FROM_COLUMNS {
            let n = count(&layout);
            if n > best.as_ref().map_or(0, |(most, _)| *most) {
                best = Some((n, layout));
            }
        }
        if let Some((_, layout)) = best {
            return Ok(layout);
        }
        if columns.is_empty() {
            let first = rows.iter().find_map(|(line, row)| row.as_ref().err().map(|e| format!("line {line}: {e}")));
            bail!("no usable row: {}", first.as_deref().unwrap_or("the file is empty"));
        }
        let looked_for: Vec<_> = FOUND_FROM_COLUMNS.iter().map(Self::looked_for).collect();
        bail!(
            "no usable row: columns found: {}; looked for {}; for other names set data.prompt and data.completion to texts with {{column}} in them, for example completion = \"{{{}}}\"",
            list(columns),
            looked_for.join(", or "),
            columns.last().map_or("column", String::as_str)
        )
    }

    fn mapping(options: &DatasetOptions, columns: &[String]) -> Result<Self> {
        let template = |name: &str, source: &Option<String>| -> Result<TextTemplate> {
            let source = source.as_deref().with_context(|| {
                format!("data.{name} is missing: a mapping needs data.prompt and data.completion, texts with {{column}} in them")
            })?;
            let template = TextTemplate::parse(source).map_err(|e| anyhow::anyhow!("data.{name}: {e}"))?;
            for column in template.columns() {
                ensure!(
                    columns.iter().any(|c| c == column),
                    "data.{name} names the column `{column}`, which no row has; columns found: {}",
                    list(columns)
                );
            }
            Ok(template)
        };
        let prompt = template("prompt", &options.prompt)?;
        let completion = template("completion", &options.completion)?;
        ensure!(
            completion.columns().next().is_some(),
            "data.completion names no column, so every answer would be the same text"
        );
        Ok(Self::Mapping { prompt, completion })
    }

    /// Its name among the choices.
    pub fn choice(&self) -> LayoutChoice {
        match self {
            Self::Messages => LayoutChoice::Messages,
            Self::Alpaca => LayoutChoice::Alpaca,
            Self::PromptCompletion => LayoutChoice::PromptCompletion,
            Self::QuestionAnswer => LayoutChoice::QuestionAnswer,
            Self::Text => LayoutChoice::Text,
            Self::Mapping { .. } => LayoutChoice::Mapping,
        }
    }

    /// The columns it reads, in words.
    pub fn looked_for(&self) -> String {
        match self {
            Self::Messages => "`messages` or `conversations`".into(),
            Self::Alpaca => "`instruction` and `output`".into(),
            Self::PromptCompletion => "`prompt` and `completion`".into(),
            Self::QuestionAnswer => "`question` and `answer`".into(),
            Self::Text => "`text`".into(),
            Self::Mapping { prompt, completion } => {
                list(&prompt.columns().chain(completion.columns()).map(String::from).collect::<Vec<_>>())
            }
        }
    }

    fn fits(&self, row: &Row) -> bool {
        let has = |name: &str| row.contains_key(name);
        match self {
            Self::Messages => TURN_COLUMNS.iter().any(|c| has(c)),
            Self::Alpaca => has("instruction") && has("output"),
            Self::PromptCompletion => has("prompt") && has("completion"),
            Self::QuestionAnswer => has("question") && has("answer"),
            Self::Text => has("text"),
            Self::Mapping { .. } => true,
        }
    }

    /// Reads one row.
    ///
    /// # Errors
    /// In words, when the row cannot be used.
    pub fn read(&self, mut row: Row, system: Option<&str>) -> Result<Content, String> {
        match self {
            Self::Messages => conversation(row, system),
            Self::Alpaca => alpaca(&row, system),
            Self::PromptCompletion => {
                pair(text(&row, "prompt")?, text(&row, "completion")?, own_system(&row)?.or(system), "")
            }
            Self::QuestionAnswer => {
                pair(text(&row, "question")?, text(&row, "answer")?, own_system(&row)?.or(system), "\n")
            }
            Self::Text => {
                let text = match row.remove("text") {
                    Some(Value::String(text)) => text,
                    other => return Err(wrong_kind("text", other.as_ref())),
                };
                if text.trim().is_empty() { Err("`text` is empty".into()) } else { Ok(Content::Text(text)) }
            }
            Self::Mapping { prompt, completion } => pair(&prompt.fill(&row)?, &completion.fill(&row)?, system, ""),
        }
    }
}

fn object<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// A turn as chat templates read it.
pub fn turn(role: &str, content: impl Into<Value>) -> Value {
    object([("role", role.into()), ("content", content.into())])
}

/// Names in backquotes, or the words that there are none.
pub fn list(names: &[String]) -> String {
    if names.is_empty() {
        return "none".into();
    }
    names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")
}

fn wrong_kind(column: &str, value: Option<&Value>) -> String {
    match value {
        None => format!("column `{column}` is missing"),
        Some(Value::Null) => format!("`{column}` is null"),
        Some(Value::Array(_) | Value::Object(_)) => format!("`{column}` must be text, not a list or an object"),
        Some(_) => format!("`{column}` must be text"),
    }
}

fn text<'a>(row: &'a Row, column: &str) -> Result<&'a str, String> {
    row.get(column).and_then(Value::as_str).ok_or_else(|| wrong_kind(column, row.get(column)))
}

/// The row's own system message; missing, null and empty mean none.
fn own_system(row: &Row) -> Result<Option<&str>, String> {
    match row.get("system") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|t| !t.trim().is_empty())),
        other => Err(wrong_kind("system", other)),
    }
}

fn pair(prompt: &str, completion: &str, system: Option<&str>, separator: &'static str) -> Result<Content, String> {
    if prompt.trim().is_empty() {
        return Err("the prompt is empty".into());
    }
    if completion.trim().is_empty() {
        return Err("the completion is empty: there is nothing to learn".into());
    }
    Ok(Content::Pair {
        system: system.map(String::from),
        prompt: prompt.into(),
        completion: completion.into(),
        separator,
    })
}

fn alpaca(row: &Row, system: Option<&str>) -> Result<Content, String> {
    let instruction = text(row, "instruction")?;
    let input = match row.get("input") {
        None | Some(Value::Null) => "",
        Some(_) => text(row, "input")?,
    };
    let prompt = match (instruction.trim().is_empty(), input.trim().is_empty()) {
        (false, false) => format!("{instruction}\n\n{input}"),
        (true, _) => input.to_owned(),
        (false, true) => instruction.to_owned(),
    };
    let system = own_system(row)?.or(system);
    let last = pair(&prompt, text(row, "output")?, system, "\n")?;
    let history = match row.get("history") {
        None | Some(Value::Null) => return Ok(last),
        Some(Value::Array(history)) if history.is_empty() => return Ok(last),
        Some(Value::Array(history)) => history,
        Some(_) => return Err("`history` must be a list of [question, answer]".into()),
    };
    let mut messages: Vec<Value> = system.map(|s| turn("system", s)).into_iter().collect();
    for pair in history {
        let (Some(question), Some(answer)) = (pair[0].as_str(), pair[1].as_str()) else {
            return Err("`history` must be a list of [question, answer]".into());
        };
        messages.push(turn("user", question));
        messages.push(turn("assistant", answer));
    }
    messages.push(turn("user", prompt));
    messages.push(turn("assistant", text(row, "output")?));
    Ok(Content::Conversation { messages, tools: None })
}

fn conversation(mut row: Row, system: Option<&str>) -> Result<Content, String> {
    let system = own_system(&row)?.or(system).map(String::from);
    let tools = tools(row.remove("tools"))?;
    let column = TURN_COLUMNS
        .into_iter()
        .find(|c| row.contains_key(*c))
        .ok_or("columns `messages` and `conversations` are missing")?;
    let turns = match row.remove(column) {
        Some(Value::Array(turns)) if !turns.is_empty() => turns,
        Some(Value::Array(_)) => return Err(format!("`{column}` is empty")),
        _ => return Err(format!("`{column}` must be a list of turns like {{\"role\": \"user\", \"content\": …}}")),
    };
    let mut messages = Vec::with_capacity(turns.len() + 1);
    for (i, turn) in turns.into_iter().enumerate() {
        messages.push(message(turn).map_err(|e| format!("turn {} of `{column}`: {e}", i + 1))?);
    }
    if let Some(system) = system.filter(|_| messages[0]["role"] != "system") {
        messages.insert(0, turn("system", system));
    }
    Ok(Content::Conversation { messages, tools })
}

/// Tools as a list; LLaMA-Factory writes them as JSON inside a string.
fn tools(value: Option<Value>) -> Result<Option<Value>, String> {
    let value = match value {
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|e| format!("`tools` is not JSON: {e}"))?,
        Some(value) => value,
        None => return Ok(None),
    };
    match value {
        Value::Null => Ok(None),
        Value::Array(tools) if tools.is_empty() => Ok(None),
        tools @ Value::Array(_) => Ok(Some(tools)),
        _ => Err("`tools` must be a list".into()),
    }
}

/// A turn as chat templates read it: `from` and `value` (ShareGPT) become `role` and `content`.
fn message(turn: Value) -> Result<Value, String> {
    let Value::Object(mut turn) = turn else {
        return Err("a turn must be an object like {\"role\": \"user\", \"content\": …}".into());
    };
    if let Some(from) = turn.remove("from") {
        let value = turn.remove("value").ok_or("has `from` but no `value`")?;
        let role = match from.as_str() {
            Some("human" | "user") => "user",
            Some("gpt" | "assistant" | "model" | "bot" | "chatgpt") => "assistant",
            Some("system") => "system",
            Some("observation" | "tool" | "function_response") => "tool",
            Some("function_call") => return function_call(&value),
            _ => return Err(format!("`from` is {from}; known are human, gpt, system, function_call and observation")),
        };
        turn.shift_insert(0, "role".into(), role.into());
        turn.shift_insert(1, "content".into(), value);
    }
    match turn.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        _ => return Err("has no `role` (nor `from`)".into()),
    }
    match turn.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            if let Some(kind) = parts.iter().map(|p| &p["type"]).find(|kind| *kind != "text") {
                return Err(format!("has a content part of type {kind}; only \"text\" can be trained"));
            }
        }
        None | Some(Value::Null) if turn.get("tool_calls").is_some_and(|calls| !calls.is_null()) => {}
        None | Some(Value::Null) => return Err("has no `content`".into()),
        Some(_) => return Err("`content` must be text".into()),
    }
    Ok(Value::Object(turn))
}

/// A ShareGPT function call, JSON inside a string, as an assistant turn with `tool_calls`.
fn function_call(value: &Value) -> Result<Value, String> {
    let call: Value = value
        .as_str()
        .and_then(|text| serde_json::from_str(text).ok())
        .ok_or("the value of a function_call must be JSON like {\"name\": …, \"arguments\": {…}}")?;
    let calls = if let Value::Array(calls) = call { calls } else { vec![call] };
    if calls.iter().any(|c| !c["name"].is_string()) {
        return Err("a function_call has no `name`".into());
    }
    let calls: Vec<Value> = calls.into_iter().map(|c| object([("type", "function".into()), ("function", c)])).collect();
    Ok(object([("role", "assistant".into()), ("content", "".into()), ("tool_calls", calls.into())]))
}
