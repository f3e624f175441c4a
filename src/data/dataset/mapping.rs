//! Text with `{column}` in it, for rows whose columns have names of their own.

use serde_json::Value;

use super::Row;

/// A text with places for columns: `Define "{headword}".` Braces are written `{{` and `}}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextTemplate {
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Column(String),
}

impl TextTemplate {
    /// Reads a template.
    ///
    /// # Errors
    /// In words, when a brace is not closed, not opened, or encloses nothing.
    pub fn parse(source: &str) -> Result<Self, String> {
        let mut pieces = Vec::new();
        let mut text = String::new();
        let mut rest = source;
        while let Some(at) = rest.find(['{', '}']) {
            text.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            let after = &rest[at + 1..];
            if let Some(after) = after.strip_prefix(brace) {
                text.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(format!("`}}` without `{{` in `{source}`; write `}}}}` for the character itself"));
            }
            let end = after
                .find('}')
                .ok_or_else(|| format!("`{{` is never closed in `{source}`; write `{{{{` for the character itself"))?;
            let column = after[..end].trim();
            if column.is_empty() {
                return Err(format!("`{{}}` in `{source}` names no column"));
            }
            if !text.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut text)));
            }
            pieces.push(Piece::Column(column.to_owned()));
            rest = &after[end + 1..];
        }
        text.push_str(rest);
        if !text.is_empty() {
            pieces.push(Piece::Text(text));
        }
        Ok(Self { pieces })
    }

    /// The columns it names.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Column(name) => Some(name.as_str()),
            Piece::Text(_) => None,
        })
    }

    /// The text with the values of `row`.
    ///
    /// # Errors
    /// In words, when the row lacks a column or its value is not text, a number or a boolean.
    pub fn fill(&self, row: &Row) -> Result<String, String> {
        let mut out = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out.push_str(text),
                Piece::Column(name) => match row.get(name) {
                    Some(Value::String(value)) => out.push_str(value),
                    Some(value @ (Value::Number(_) | Value::Bool(_))) => out.push_str(&value.to_string()),
                    Some(Value::Null) => return Err(format!("column `{name}` is null")),
                    Some(_) => return Err(format!("column `{name}` is not text, a number or a boolean")),
                    None => return Err(format!("column `{name}` is missing")),
                },
            }
        }
        Ok(out)
    }
}
