//! Which part of a record's text the assistant wrote.
//!
//! A template with `{% generation %}` blocks says so itself. For the others the conversation is rendered up to each
//! assistant turn, with the generation prompt, and up to its end: what lies between is the turn. That holds only when
//! both renderings are beginnings of the whole one, which is checked.

use std::ops::Range;

use serde_json::Value;

use super::ExampleBuilder;
use crate::base::error::BadRecord;
use crate::data::chat_template::{ChatTemplate, Rendered};
use crate::data::dataset::{Content, Record, turn};
use crate::data::options::TrainOn;

/// A record as one text, with the parts that train.
pub struct Marked {
    /// The text.
    pub text: String,
    /// Byte ranges that train, in order, not overlapping.
    pub trained: Vec<Range<usize>>,
    /// Whether the tokenizer adds its own start token; a template writes it itself.
    pub add_special_tokens: bool,
    /// Whether the text must end with an end token.
    pub end_expected: bool,
}

/// A conversation as a template reads it.
struct Conversation<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Value],
    tools: Option<&'a Value>,
}

impl ExampleBuilder {
    /// The text of a record and what trains in it.
    pub(super) fn mark(&self, record: &Record) -> Result<Marked, BadRecord> {
        let marked = match (&record.content, &self.template) {
            (Content::Text(text), _) => Ok(plain(text.clone(), 0)),
            (Content::Pair { system, prompt, completion, .. }, Some(template)) => {
                let system = system.as_ref().map(|text| turn("system", text.as_str()));
                let mut messages: Vec<Value> = system.into_iter().collect();
                messages.extend([turn("user", prompt.as_str()), turn("assistant", completion.as_str())]);
                self.conversation(&Conversation { template, messages: &messages, tools: None })
            }
            (Content::Pair { system: Some(_), .. }, None) => Err(
                "a system message needs a chat template and the model has none: remove it, or set model.chat_template"
                    .into(),
            ),
            (Content::Pair { prompt, completion, separator, .. }, None) => {
                let start = prompt.len() + separator.len();
                let start = if self.train_on == TrainOn::Everything { 0 } else { start };
                Ok(plain(format!("{prompt}{separator}{completion}"), start))
            }
            (Content::Conversation { messages, tools }, Some(template)) => {
                self.conversation(&Conversation { template, messages, tools: tools.as_ref() })
            }
            (Content::Conversation { .. }, None) => {
                Err("a conversation needs a chat template and the model has none: set model.chat_template to a file"
                    .into())
            }
        };
        marked.map_err(|reason: String| record.bad(reason))
    }

    fn conversation(&self, conversation: &Conversation<'_>) -> Result<Marked, String> {
        let messages = conversation.messages;
        let Rendered { text, assistant_spans } = conversation.render(messages.len(), false)?;
        let turns: Vec<usize> = (0..messages.len()).filter(|i| messages[*i]["role"] == "assistant").collect();
        let ends_with_assistant = turns.last().is_some_and(|last| last + 1 == messages.len());
        let trained = match (self.train_on, turns.last()) {
            (TrainOn::Everything, _) => Ok(std::iter::once(0..text.len()).collect()),
            (_, None) => Err("there is no assistant turn to train on".into()),
            (TrainOn::Assistant, _) if conversation.template.marks_assistant() => Ok(assistant_spans),
            (TrainOn::LastTurn, Some(last)) if conversation.template.marks_assistant() => {
                let earlier = conversation.render(*last, true)?.assistant_spans.len();
                Ok(assistant_spans.into_iter().skip(earlier).collect())
            }
            (TrainOn::Assistant, _) => turns.iter().map(|i| self.turn_range(conversation, &text, *i)).collect(),
            (TrainOn::LastTurn, Some(last)) => self.turn_range(conversation, &text, *last).map(|range| vec![range]),
        }?;
        let end_expected = ends_with_assistant || self.train_on == TrainOn::Everything;
        Ok(Marked { text, trained, add_special_tokens: false, end_expected })
    }

    /// The range of assistant turn `i` in the rendered conversation, its end token included.
    fn turn_range(&self, conversation: &Conversation<'_>, text: &str, i: usize) -> Result<Range<usize>, String> {
        let start = self.turn_start(conversation, text, i)?;
        let through = conversation.render(i + 1, false)?.text;
        if text.starts_with(&through) && through.len() >= start {
            let turn = text[start..through.len()].trim_end();
            // White space after the end token separates turns; the model never writes it.
            let ended = self.eos_texts.iter().any(|eos| turn.ends_with(eos.as_str()));
            return Ok(start..if ended { start + turn.len() } else { through.len() });
        }
        // Some templates write the last turn in another way (Qwen3 keeps its thoughts, Phi-3 adds an end of text): then
        // what follows, up to the next turn of the assistant, must settle it, and the turn ends at its end token.
        let messages = conversation.messages;
        let next = (i + 1..messages.len()).find(|j| messages[*j]["role"] == "assistant").unwrap_or(messages.len());
        let unclear = || not_a_prefix(i, "the conversation up to its end");
        if next == i + 1 {
            return Err(unclear());
        }
        let limit = if next == messages.len() { text.len() } else { self.turn_start(conversation, text, next)? };
        let region = text.get(start..limit).ok_or_else(unclear)?;
        let end = self.eos_texts.iter().filter_map(|eos| region.find(eos.as_str()).map(|at| at + eos.len())).min();
        end.map(|end| start..start + end).ok_or_else(unclear)
    }

    /// Where the text of assistant turn `i` starts: after the generation prompt.
    fn turn_start(&self, conversation: &Conversation<'_>, text: &str, i: usize) -> Result<usize, String> {
        let before = conversation.render(i, true)?.text;
        if text.starts_with(&before) {
            return Ok(before.len());
        }
        // A generation prompt may go on where a written turn does not (DeepSeek-R1 opens the thoughts): the turn starts
        // after the last special token that both have.
        let base = conversation.render(i, false)?.text;
        let common = text.bytes().zip(before.bytes()).take_while(|(a, b)| a == b).count();
        let header = if text.starts_with(&base) { text.as_bytes().get(base.len()..common) } else { None };
        let header = header.unwrap_or_default();
        let ends = self.tokenizer.special_texts().filter_map(|token| {
            let token = token.as_bytes();
            header.windows(token.len().max(1)).rposition(|window| window == token).map(|at| at + token.len())
        });
        let end = ends.max().ok_or_else(|| not_a_prefix(i, "the generation prompt before it"))?;
        Ok(base.len() + end)
    }
}

impl Conversation<'_> {
    /// Renders the first `n` messages.
    fn render(&self, n: usize, add_generation_prompt: bool) -> Result<Rendered, String> {
        let rendered = self.template.render(&self.messages[..n], self.tools, add_generation_prompt);
        rendered.map_err(|e| {
            let part =
                if n < self.messages.len() { format!(", rendering its first {n} messages") } else { String::new() };
            format!("{e:#}{part}")
        })
    }
}

fn plain(text: String, start: usize) -> Marked {
    let trained = std::iter::once(start..text.len()).collect();
    Marked { text, trained, add_special_tokens: true, end_expected: true }
}

fn not_a_prefix(i: usize, what: &str) -> String {
    format!(
        "cannot tell what the assistant wrote in message {}: the template renders {what} in another way than in the whole conversation; use a template with {{% generation %}} blocks (model.chat_template), or train on \"last_turn\" or \"everything\"",
        i + 1
    )
}
