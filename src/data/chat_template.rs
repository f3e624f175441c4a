//! Chat templates of Hugging Face models, rendered as Transformers renders them.
//!
//! The language is Jinja; the differences between its two implementations (Python's `str()`, `json.dumps`, string
//! methods, `{% generation %}`) are bridged in the files beside this one.

mod generation;
mod python;

use std::ops::Range;

use anyhow::{Context as _, anyhow};
use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde_json::Value as Json;

use crate::base::error::Result;

/// The special tokens a template may print. A missing one is undefined in the template, as in Transformers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// `pad_token`.
    pub pad: Option<String>,
    /// `unk_token`.
    pub unk: Option<String>,
}

/// A chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    marks_assistant: bool,
    tokens: SpecialTokens,
    now: DateTime,
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges of `text` inside `{% generation %}` blocks, in order. Empty when the template has none.
    pub assistant_spans: Vec<Range<usize>>,
}

/// Name of the one template in the environment: what error messages call it.
const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Reads a template. The date templates can print is that of this moment, for every rendering: see [`Self::with_now`].
    ///
    /// # Errors
    /// When the source is not a template, with its line.
    pub fn new(source: &str, tokens: SpecialTokens) -> Result<Self> {
        let mut environment = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().context("template syntax")?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        minijinja_contrib::add_to_environment(&mut environment);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(|out, _, value| python::write_str(out, value));
        environment.add_filter("tojson", python::to_json);
        environment.add_filter("string", python::to_str);
        environment.add_filter("trim", python::trim);
        python::add_tests(&mut environment);
        environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let rewritten = generation::rewrite(source);
        environment.add_template_owned(NAME, rewritten.source).map_err(|e| anyhow!("chat template: {}", words(&e)))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            marks_assistant: rewritten.num_blocks > 0,
            tokens,
            now: jiff::Zoned::now().datetime(),
        })
    }

    /// The same template with another date for `strftime_now`.
    #[must_use]
    pub fn with_now(self, now: DateTime) -> Self {
        Self { now, ..self }
    }

    /// The source as given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template says itself what the assistant wrote (`{% generation %}`).
    pub fn marks_assistant(&self) -> bool {
        self.marks_assistant
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// When the template raises an error (roles in an order it does not take, a field it needs), in its words.
    pub fn render(&self, messages: &[Json], tools: Option<&Json>, add_generation_prompt: bool) -> Result<Rendered> {
        let marks = generation::Marks::absent_from(messages, tools)?;
        let now = self.now;
        let strftime_now = Value::from_function(move |format: String| python::strftime(&format, now));
        let mut context = vec![
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(Serde(tools))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("strftime_now", strftime_now),
            (generation::OPEN_VARIABLE, Value::from(marks.open.to_string())),
            (generation::CLOSE_VARIABLE, Value::from(marks.close.to_string())),
        ];
        for (name, token) in [
            ("bos_token", &self.tokens.bos),
            ("eos_token", &self.tokens.eos),
            ("pad_token", &self.tokens.pad),
            ("unk_token", &self.tokens.unk),
        ] {
            context.extend(token.as_ref().map(|t| (name, Value::from(t.as_str()))));
        }
        let text = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from_pairs(context)))
            .map_err(|e| anyhow!("chat template: {}", words(&e)))?;
        Ok(marks.extract(&text))
    }
}

/// The error in one line: what happened, and at which line of the template.
fn words(error: &minijinja::Error) -> String {
    let what = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation | ErrorKind::SyntaxError, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let tokens = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), ..SpecialTokens::default() };
        let now = jiff::civil::date(2026, 7, 5).at(9, 3, 0, 0);
        ChatTemplate::new(source, tokens).unwrap().with_now(now)
    }

    fn render(source: &str) -> String {
        let messages = [json!({"role": "user", "content": "Hi <b>", "n": 1.0, "none": null, "list": ["a'b", 2, true]})];
        template(source).render(&messages, None, false).unwrap().text
    }

    #[test]
    fn values_print_as_python_prints_them() {
        assert_eq!(render("{{ messages[0].none }} {{ true }} {{ messages[0].n }} {{ missing }}"), "None True 1.0 ");
        assert_eq!(
            render("{{ messages[0].list }} {{ messages[0].list | string }}"),
            "[\"a'b\", 2, True] [\"a'b\", 2, True]"
        );
        assert_eq!(render("{{ {'k': none, 'x': 'it'} }}"), "{'k': None, 'x': 'it'}");
        assert_eq!(render("{{ bos_token }}{{ messages[0].content }}{{ pad_token }}"), "<s>Hi <b>");
    }

    #[test]
    fn tojson_is_pythons_json_dumps() {
        assert_eq!(
            render("{{ messages[0] | tojson }}"),
            r#"{"role": "user", "content": "Hi <b>", "n": 1.0, "none": null, "list": ["a'b", 2, true]}"#
        );
        assert_eq!(render("{{ ['é', '🙂\n\x7f'] | tojson }}"), "[\"é\", \"🙂\\n\x7f\"]");
        assert_eq!(render("{{ ['é', '🙂'] | tojson(ensure_ascii=True) }}"), r#"["\u00e9", "\ud83d\ude42"]"#);
        assert_eq!(
            render("{{ {'b': [1, {}], 'a': []} | tojson(indent=2) }}"),
            "{\n  \"b\": [\n    1,\n    {}\n  ],\n  \"a\": []\n}"
        );
        assert_eq!(
            render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=True) }}"),
            r#"{"a":2,"b":1}"#
        );
        assert_eq!(
            render("{{ [1e16, 1e-5, 123456.5, 1e22, 0.1, 100000.0] | tojson }}"),
            "[1e+16, 1e-05, 123456.5, 1e+22, 0.1, 100000.0]"
        );
        assert!(template("{{ missing | tojson }}").render(&[], None, false).is_err());
    }

    #[test]
    fn blocks_take_their_lines_with_them() {
        assert_eq!(render("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
        assert_eq!(render("a\r\n{% if true %}\r\nb{% endif %}"), "a\nb");
        assert_eq!(render("{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"), "13");
    }

    #[test]
    fn the_date_is_given() {
        assert_eq!(render("{{ strftime_now('%d %b %Y %H:%M') }}"), "05 Jul 2026 09:03");
        assert_eq!(render("{% macro m() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ m() }}"), "2026-07-05");
    }

    #[test]
    fn string_methods_of_python_are_there() {
        assert_eq!(
            render("{{ 'a,b'.split(',')[-1] }}{{ ' x '.strip() }}{{ 'abc'.removeprefix('a').removesuffix('c') }}"),
            "bxb"
        );
        assert_eq!(
            render("{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a=b=c'.partition('=')[2] }}{{ 'ab'.rpartition('=') }}"),
            "['a,b', 'c']b=c['', '', 'ab']"
        );
        assert_eq!(
            render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 7) }}"),
            "a17"
        );
    }

    #[test]
    fn tests_answer_as_in_jinja2() {
        assert_eq!(
            render(
                "{{ none is iterable }} {{ 'a' is iterable }} {{ 'a' is sequence }} {{ {} is sequence }} {{ none is sequence }} {{ true is number }}"
            ),
            "False True True True False True"
        );
        assert_eq!(
            render("{{ (1,) }} {{ 1e20 | trim }} {{ 'xax' | trim('x') }} {{ {none: 1, true: 2} | tojson }}"),
            "(1,) 1e+20 a {\"null\": 1, \"true\": 2}"
        );
    }

    #[test]
    fn errors_carry_the_templates_words_and_line() {
        let error = template("\n{{ raise_exception('roles must alternate') }}").render(&[], None, false).unwrap_err();
        assert_eq!(error.to_string(), "chat template: roles must alternate (line 2 of the template)");
        assert!(template("{{ messages[0].role }}").render(&[], None, false).is_err());
        assert!(ChatTemplate::new("{% if %}", SpecialTokens::default()).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn generation_blocks_become_spans() {
        let source = "{% for m in messages %}\n{{ m.role }}:\n  {%- generation %}\n[{{ m.content }}]\n  {% endgeneration -%}\n\n;{% endfor %}";
        let messages = [json!({"role": "a", "content": "é"}), json!({"role": "b", "content": "x"})];
        let template = template(source);
        assert!(template.marks_assistant());
        let rendered = template.render(&messages, None, false).unwrap();
        assert_eq!(rendered.text, "a:[é]\n;b:[x]\n;");
        let spans: Vec<_> = rendered.assistant_spans.iter().map(|s| &rendered.text[s.clone()]).collect();
        assert_eq!(spans, ["[é]\n", "[x]\n"]);
    }

    #[test]
    fn a_set_inside_a_generation_block_stays_there() {
        assert_eq!(render("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"), "21");
    }

    #[test]
    fn private_characters_in_messages_survive() {
        let text: String = ['\u{F0000}', '\u{10FFFD}', '\u{E000}', '\u{FFFFD}'].iter().collect();
        let messages = [json!({"role": "user", "content": text})];
        let rendered = template("{% generation %}{{ messages[0].content }}{% endgeneration %}")
            .render(&messages, None, false)
            .unwrap();
        assert_eq!(rendered.text, text);
        assert_eq!(rendered.assistant_spans, std::iter::once(0..text.len()).collect::<Vec<_>>());
    }
}
