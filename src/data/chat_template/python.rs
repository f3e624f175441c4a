//! What Python does and Rust does not: `str()`, `repr()`, `json.dumps`, string methods, `strftime`.

use std::fmt::Write as _;

use jiff::civil::DateTime;
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Methods of Python's strings and dicts: those of minijinja-contrib, and some that templates use besides.
pub fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let texts = |parts: &[&str]| parts.iter().map(|part| Value::from(*part)).collect::<Vec<Value>>();
    match (value.as_str(), name) {
        (Some(text), "removeprefix") => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        (Some(text), "removesuffix") => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        (Some(text), "rsplit")
            if args.first().is_some_and(|separator| separator.as_str().is_some_and(|s| !s.is_empty())) =>
        {
            let (separator, most): (&str, Option<usize>) = from_args(args)?;
            let mut parts: Vec<&str> = match most {
                Some(most) => text.rsplitn(most + 1, separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(Value::from(texts(&parts)))
        }
        (Some(text), "partition") => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if before.len() == text.len() { "" } else { separator };
            Ok(Value::from(texts(&[before, found, after])))
        }
        (Some(text), "rpartition") => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if after.len() == text.len() { "" } else { separator };
            Ok(Value::from(texts(&[before, found, after])))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// The tests that answer otherwise in Jinja2: `none` is not iterable, text and dicts are sequences, a boolean is a number.
pub fn add_tests(environment: &mut minijinja::Environment<'_>) {
    environment.add_test("iterable", |v: &Value| !v.is_none() && v.try_iter().is_ok());
    environment.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
    });
    environment.add_test("number", |v: &Value| matches!(v.kind(), ValueKind::Number | ValueKind::Bool));
}

/// Writes a value as `{{ value }}` prints it in Python.
pub fn write_str(out: &mut minijinja::Output, value: &Value) -> Result<(), Error> {
    let text = match value.as_str() {
        Some(text) => return out.write_str(text).map_err(|_| write_failed()),
        None => to_str(value)?,
    };
    out.write_str(&text).map_err(|_| write_failed())
}

fn write_failed() -> Error {
    Error::new(ErrorKind::WriteFailure, "the text could not be written")
}

/// `str(value)`.
pub fn to_str(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let mut out = String::new();
    repr(&mut out, value)?;
    Ok(out)
}

/// The filter `trim`: `str(value).strip(chars)`.
pub fn trim(value: &Value, chars: Option<&str>) -> Result<String, Error> {
    let text = to_str(value)?;
    Ok(match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text.trim().to_owned(),
    })
}

/// `repr(value)` for what JSON can hold.
fn repr(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => {
            repr_str(out, value.as_str().unwrap_or_default());
        }
        ValueKind::Number if !value.is_integer() => out.push_str(&float(value)),
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &item)?;
            }
            out.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(out, &key)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?)?;
            }
            out.push('}');
        }
        _ => {
            // True, False, None and whole numbers already print as in Python.
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn repr_str(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// `repr(float)`: the shortest digits that read back, an exponent below 1e-4 and from 1e16 on.
fn float(value: &Value) -> String {
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    if !number.is_finite() {
        return if number.is_nan() {
            "nan"
        } else if number > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{number:?}")
}

/// `strftime` of a fixed moment.
pub fn strftime(format: &str, now: DateTime) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

/// The filter `tojson` of Transformers: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub fn to_json(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let option = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let given = if index < args.len() { Some(args[index].clone()) } else { kwargs.get::<Option<Value>>(name)? };
        Ok(given.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = option(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match option(1, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(n) => Some(" ".repeat(n.as_usize().unwrap_or(0))),
    };
    let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(separators) = option(2, "separators")? {
        let text = |i: usize| separators.get_item_by_index(i).map(|v| v.as_str().unwrap_or_default().to_owned());
        (item, key) = (text(0)?, text(1)?);
    }
    let sort_keys = option(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let mut json = JsonWriter { out: String::new(), ensure_ascii, indent, item, key, sort_keys };
    json.write(value, 0)?;
    Ok(Value::from(json.out))
}

struct JsonWriter {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl JsonWriter {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => {
                let text = float(value);
                self.out.push_str(match text.as_str() {
                    "nan" => "NaN",
                    "inf" => "Infinity",
                    "-inf" => "-Infinity",
                    text => text,
                });
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', &items, depth, |json, item| json.write(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.container('{', '}', &keys, depth, |json, key| {
                    match key.kind() {
                        ValueKind::None => json.string("null"),
                        ValueKind::Bool => json.string(if key.is_true() { "true" } else { "false" }),
                        _ => json.string(&to_str(key)?),
                    }
                    json.out.push_str(&json.key.clone());
                    json.write(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable")));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.item.clone());
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}
