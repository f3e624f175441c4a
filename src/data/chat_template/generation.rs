//! `{% generation %}` blocks: rewritten into plain Jinja that prints marks, which are taken out of the text afterwards.

use std::ops::Range;

use anyhow::Context as _;
use serde_json::Value as Json;

use super::Rendered;
use crate::base::error::Result;

/// Template variable that prints the opening mark.
pub const OPEN_VARIABLE: &str = "__generation_open__";
/// Template variable that prints the closing mark.
pub const CLOSE_VARIABLE: &str = "__generation_close__";

/// A template without generation blocks.
pub struct Rewritten {
    /// The source.
    pub source: String,
    /// How many blocks it had.
    pub num_blocks: usize,
}

/// Replaces generation blocks by blocks Jinja knows.
///
/// A block must stand where the tag stood, because whitespace control acts at the tag's two outer sides. So the opening
/// tag becomes `{% with %}mark{% if true %}` with its own minus and plus signs outside, the closing one
/// `{% endif %}mark{% endwith %}`. `with` is the scope Transformers gives such a block: a `set` inside stays inside.
pub fn rewrite(source: &str) -> Rewritten {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() + 256);
    let mut num_blocks = 0;
    let mut rest = source.as_str();
    let mut in_raw = false;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let kind = rest.as_bytes().get(1).copied();
        let len = match kind {
            Some(b'%') => tag_len(rest, "%}"),
            Some(b'{') if !in_raw => tag_len(rest, "}}"),
            Some(b'#') if !in_raw => rest.find("#}").map_or(rest.len(), |end| end + 2),
            _ => 1,
        };
        let (tag, after) = rest.split_at(len);
        rest = after;
        let block = if kind == Some(b'%') { Block::parse(tag) } else { None };
        match block {
            Some(block) if block.name == "raw" || block.name == "endraw" => {
                in_raw = block.name == "raw";
                out.push_str(tag);
            }
            Some(Block { left, name: "generation", right }) if !in_raw => {
                num_blocks += 1;
                out += &format!("{{%{left} with %}}{{{{ {OPEN_VARIABLE} }}}}{{% if true {right}%}}");
            }
            Some(Block { left, name: "endgeneration", right }) if !in_raw => {
                out += &format!("{{%{left} endif %}}{{{{ {CLOSE_VARIABLE} }}}}{{% endwith {right}%}}");
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    Rewritten { source: out, num_blocks }
}

/// A block tag of one word, with its whitespace signs.
struct Block<'a> {
    left: &'a str,
    name: &'a str,
    right: &'a str,
}

impl<'a> Block<'a> {
    fn parse(tag: &'a str) -> Option<Self> {
        let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
        let sign = |b: Option<u8>| matches!(b, Some(b'-' | b'+'));
        let (left, inner) = inner.split_at(usize::from(sign(inner.bytes().next())));
        let (inner, right) = inner.split_at(inner.len() - usize::from(sign(inner.bytes().last())));
        Some(Self { left, name: inner.trim(), right })
    }
}

/// Bytes of a tag that starts `rest` and ends with `end`, which does not count inside a string.
fn tag_len(rest: &str, end: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut quote = None;
    let mut i = 2;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (None, b @ (b'"' | b'\'')) => quote = Some(b),
            (None, _) if bytes[i..].starts_with(end.as_bytes()) => return i + end.len(),
            _ => {}
        }
        i += 1;
    }
    rest.len()
}

/// Two characters that occur nowhere in what is rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Printed where a block begins.
    pub open: char,
    /// Printed where it ends.
    pub close: char,
}

impl Marks {
    /// Two private-use characters that neither messages nor tools contain.
    ///
    /// # Errors
    /// When there are no two such characters among thousands, which no text does by accident.
    pub fn absent_from(messages: &[Json], tools: Option<&Json>) -> Result<Self> {
        let mut found = ('\u{F0000}'..='\u{F1000}').filter(|c| {
            !messages.iter().any(|message| contains(message, *c)) && !tools.is_some_and(|tools| contains(tools, *c))
        });
        let none_left = "the conversation uses every private-use character that could mark what the assistant wrote";
        Ok(Self { open: found.next().context(none_left)?, close: found.next().context(none_left)? })
    }

    /// The text without marks, and the ranges that were between them.
    pub fn extract(self, marked: &str) -> Rendered {
        let mut text = String::with_capacity(marked.len());
        let mut assistant_spans: Vec<Range<usize>> = Vec::new();
        let mut start = None;
        for c in marked.chars() {
            if c == self.open {
                start = Some(text.len());
            } else if c == self.close {
                assistant_spans.extend(start.take().map(|start| start..text.len()));
            } else {
                text.push(c);
            }
        }
        Rendered { text, assistant_spans }
    }
}

fn contains(value: &Json, c: char) -> bool {
    match value {
        Json::String(text) => text.contains(c),
        Json::Array(items) => items.iter().any(|item| contains(item, c)),
        Json::Object(map) => map.iter().any(|(key, item)| key.contains(c) || contains(item, c)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_real_tags_are_rewritten() {
        for untouched in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{% set x = '%} {% generation %}' %}",
            "{% raw %}{% generation %}{{ {% endraw %}",
            "{ {%generation x%} }",
            "{{ unclosed",
            "text { % generation % }",
        ] {
            let rewritten = rewrite(untouched);
            assert_eq!((rewritten.source.as_str(), rewritten.num_blocks), (untouched, 0));
        }
    }

    #[test]
    fn whitespace_signs_stay_outside() {
        let rewritten = rewrite("{%-generation+%}x{%+ endgeneration -%}");
        assert_eq!(
            rewritten.source,
            "{%- with %}{{ __generation_open__ }}{% if true +%}x{%+ endif %}{{ __generation_close__ }}{% endwith -%}"
        );
        assert_eq!(rewritten.num_blocks, 1);
    }
}
