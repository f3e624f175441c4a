//! The shape of the source tree, checked by a program: floors, borders, headers, file sizes, banned words, repository size,
//! and that the documents name only what exists. ARCHITECTURE.md says why each rule is there.

#![allow(clippy::disallowed_methods, clippy::disallowed_macros)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The floors, from the ground up: a module may use those before it, never those after it.
const FLOORS: [&str; 11] =
    ["base", "formats", "data", "tensor", "ops", "layers", "model", "train", "export", "session", "gui"];

/// Files of `src/` that belong to the binary, not to a floor.
const BINARY: [&str; 2] = ["main", "cli"];

const MAX_LINES: usize = 600;

/// Files that may be longer, each with the reason. An entry whose file is short again (or gone) fails the test.
const LONG_FILES: [(&str, &str); 0] = [];

const MAX_TREE_BYTES: u64 = 30 << 20;

// ---------------------------------------------------------------------------------------------------------------------
// A small reader of Rust source: tokens without comments and strings, and the paths that leave a module.

#[derive(Debug, Clone, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

/// Splits Rust source into identifiers, `::` and single punctuation characters. Comments, strings and character literals are left out.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut out = Vec::new();
    let (mut i, mut line) = (0, 1);
    while i < chars.len() {
        let start = i;
        let first_line = line;
        let c = chars[i];
        if c == '/' && at(i + 1) == '/' {
            while i < chars.len() && chars[i] != '\n' {
                i += 1;
            }
        } else if c == '/' && at(i + 1) == '*' {
            let mut depth = 0;
            loop {
                if at(i) == '/' && at(i + 1) == '*' {
                    depth += 1;
                    i += 2;
                } else if at(i) == '*' && at(i + 1) == '/' {
                    depth -= 1;
                    i += 2;
                } else {
                    i += 1;
                }
                if depth == 0 || i >= chars.len() {
                    break;
                }
            }
        } else if c == '"' {
            i = end_of_string(&chars, i);
        } else if c.is_alphabetic() || c == '_' {
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            let word: String = chars[start..i].iter().collect();
            let hashes = chars[i..].iter().take_while(|c| **c == '#').count();
            if matches!(word.as_str(), "r" | "br" | "cr") && at(i + hashes) == '"' {
                let close: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
                i += hashes + 1;
                while i < chars.len() && !chars[i..].starts_with(&close) {
                    i += 1;
                }
                i += close.len();
            } else {
                out.push(Token { text: word, line });
            }
        } else if c == '\'' {
            // A character literal ends with a quote after one (possibly escaped) character; otherwise it is a lifetime.
            if at(i + 1) == '\\' {
                i += 3;
                while i < chars.len() && chars[i] != '\'' {
                    i += 1;
                }
                i += 1;
            } else if at(i + 2) == '\'' {
                i += 3;
            } else {
                i += 1;
            }
        } else if c == ':' && at(i + 1) == ':' {
            out.push(Token { text: "::".into(), line });
            i += 2;
        } else {
            if !c.is_whitespace() {
                out.push(Token { text: c.to_string(), line });
            }
            i += 1;
        }
        line = first_line + chars[start..i.min(chars.len())].iter().filter(|c| **c == '\n').count();
    }
    out
}

fn end_of_string(chars: &[char], open: usize) -> usize {
    let mut i = open + 1;
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

/// The module a file of `src/` is: `src/data/pack.rs` → `[data, pack]`, `src/data/mod.rs` → `[data]`, `src/lib.rs` → `[]`.
fn module_of(relative: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        relative.with_extension("").components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
        parts.pop();
    }
    parts
}

/// Every first segment below the crate root that the source names through `crate::…` or a `super::…` chain, with its line.
/// Groups (`use crate::{a::b, c}`) count once per member.
fn crate_paths(source: &str, module: &[String]) -> Vec<(usize, String)> {
    let tokens = tokens(source);
    let text = |i: usize| tokens.get(i).map_or("", |t| t.text.as_str());
    let mut found = Vec::new();
    // Braces open now; true for those that open an inline module.
    let mut braces: Vec<bool> = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        match text(i) {
            "{" => braces.push(i >= 2 && text(i - 2) == "mod"),
            "}" => {
                braces.pop();
            }
            "crate" | "super" if i == 0 || text(i - 1) != "::" => {
                let mut depth = module.len() + braces.iter().filter(|inline| **inline).count();
                let mut next = i;
                if text(i) == "crate" {
                    depth = 0;
                } else {
                    while text(next) == "super" {
                        depth = depth.saturating_sub(1);
                        next += if text(next + 1) == "::" && text(next + 2) == "super" { 2 } else { 1 };
                    }
                    next -= 1;
                }
                if text(next + 1) == "::" && depth == 0 {
                    first_segments(&tokens, next + 2, &mut found);
                }
                i = next;
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// The first segment of each path of the use-tree that starts at token `i`.
fn first_segments(tokens: &[Token], i: usize, found: &mut Vec<(usize, String)>) {
    let Some(first) = tokens.get(i) else { return };
    if first.text != "{" {
        found.push((first.line, first.text.clone()));
        return;
    }
    let (mut depth, mut j, mut member_starts) = (1, i + 1, true);
    while depth > 0 && j < tokens.len() {
        match tokens[j].text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => member_starts = true,
            _ if member_starts => {
                found.push((tokens[j].line, tokens[j].text.clone()));
                member_starts = false;
            }
            _ => {}
        }
        j += 1;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The rules, as functions of one file, so that the tests at the end can show each of them failing.

fn floor_index(name: &str) -> Option<usize> {
    FLOORS.iter().position(|f| *f == name)
}

/// Whether code on floor `from` may name floor `to`, and the rule it breaks if not.
fn may_use(from: &str, to: &str) -> Result<(), String> {
    let (Some(f), Some(t)) = (floor_index(from), floor_index(to)) else { return Ok(()) };
    let engine = ["tensor", "ops", "layers", "model"];
    if t > f {
        return Err(format!("`{from}` stands below `{to}` and may not use it"));
    }
    if (from == "data" && engine.contains(&to)) || (to == "data" && engine.contains(&from)) {
        return Err(format!("`{from}` and `{to}` never see each other: `train` is where they meet"));
    }
    if from == "gui" && !["gui", "session", "export", "base"].contains(&to) {
        return Err("`gui` uses `session`, `export` and `base` only".to_owned());
    }
    Ok(())
}

/// Breaches of the floors and of the borders around external crates in one file of `src/`.
fn floor_breaches(relative: &Path, source: &str) -> Vec<String> {
    let module = module_of(relative);
    let own = module.first().map_or("", String::as_str);
    let mut out = Vec::new();
    if !own.is_empty() && floor_index(own).is_none() && !BINARY.contains(&own) {
        out.push(format!("src/{}: `{own}` is not a floor", relative.display()));
    }
    for (line, to) in crate_paths(source, &module) {
        if let Err(why) = may_use(own, &to) {
            out.push(format!("src/{}:{line}: {why}", relative.display()));
        }
    }
    for token in tokens(source) {
        let home: &[&str] = match token.text.as_str() {
            "egui" | "eframe" | "egui_plot" | "egui_extras" | "rfd" => &["gui"],
            "cudarc" => &["tensor", "ops"],
            _ => continue,
        };
        if !home.contains(&own) {
            out.push(format!(
                "src/{}:{}: only {} may name `{}`",
                relative.display(),
                token.line,
                home.join(" and "),
                token.text
            ));
        }
    }
    out
}

/// Lines with a word that marks unfinished code or a path of one particular machine.
fn word_breaches(name: &str, source: &str) -> Vec<String> {
    // Spelled in halves, so that this file passes its own test.
    let unfinished = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("todo", "!(")];
    let unfinished_macros = [concat!("unimplemented", "!("), concat!("dbg", "!(")];
    let machine = [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];
    let mut out = Vec::new();
    for (i, line) in source.lines().enumerate() {
        for word in unfinished.iter().chain(&unfinished_macros) {
            if line.contains(word) {
                out.push(format!("{name}:{}: unfinished: `{word}`", i + 1));
            }
        }
        for path in machine {
            if line.contains(path) {
                out.push(format!("{name}:{}: a path of one machine: `{path}`", i + 1));
            }
        }
    }
    out
}

/// `#[ignore]` hides a test that does not pass.
fn ignored_tests(name: &str, source: &str) -> Vec<String> {
    let tokens = tokens(source);
    tokens
        .windows(3)
        .filter(|w| w[0].text == "#" && w[1].text == "[" && w[2].text == "ignore")
        .map(|w| format!("{name}:{}: an ignored test", w[0].line))
        .collect()
}

/// Paths, tasks and links of a document that lead nowhere.
fn dead_references(name: &str, document: &str, exists: &dyn Fn(&str) -> bool, tasks: &BTreeSet<String>) -> Vec<String> {
    let mut out = Vec::new();
    let folders = ["src/", "tests/", "packaging/", "assets/", "docs/", "kernels/", "benches/", "fuzz/", ".ci/"];
    for (i, line) in document.lines().enumerate() {
        for span in line.split('`').skip(1).step_by(2) {
            let path = span.split([':', ' ']).next().unwrap_or_default();
            let is_pattern = path.contains(['*', '<', '{', '…']);
            // Made by `cargo xtask kernels`, so it is there only after it.
            let is_made = path.starts_with("kernels/build");
            if folders.iter().any(|f| path.starts_with(f)) && !is_pattern && !is_made && !exists(path) {
                out.push(format!("{name}:{}: `{path}` does not exist", i + 1));
            }
        }
        for (at, _) in line.match_indices("](") {
            let target = line[at + 2..].split(')').next().unwrap_or_default();
            let target = target.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !exists(target) {
                out.push(format!("{name}:{}: the link to {target} is dead", i + 1));
            }
        }
        for (at, found) in line.match_indices("cargo xtask ") {
            let rest = &line[at + found.len()..];
            let task: String = rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
            if !task.is_empty() && !tasks.contains(&task) {
                out.push(format!("{name}:{}: there is no `cargo xtask {task}`", i + 1));
            }
        }
    }
    out
}

// ---------------------------------------------------------------------------------------------------------------------
// The tree.

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file that is, or would be, committed. From git; in a copy without git, everything outside `target`.
fn tracked_files() -> Vec<PathBuf> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    if let Ok(output) = git
        && output.status.success()
    {
        let list = String::from_utf8(output.stdout).expect("file names are UTF-8");
        return list
            .split('\0')
            .filter(|n| !n.is_empty())
            .map(PathBuf::from)
            .filter(|p| root().join(p).is_file())
            .collect();
    }
    let mut files = Vec::new();
    walk(root(), &mut files);
    files.into_iter().map(|p| p.strip_prefix(root()).expect("below the root").to_path_buf()).collect()
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("readable folder") {
        let path = entry.expect("readable entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", ".git", ".gpu-stage"].contains(&name.as_str()) {
                walk(&path, files);
            }
        } else {
            files.push(path);
        }
    }
}

/// (path from the root, content) of the tracked files with one of these extensions.
fn sources(extensions: &[&str]) -> Vec<(String, String)> {
    tracked_files()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)))
        .map(|p| {
            let text = std::fs::read_to_string(root().join(&p)).unwrap_or_else(|e| panic!("{}: {e}", p.display()));
            (p.to_string_lossy().replace('\\', "/"), text)
        })
        .collect()
}

fn report(breaches: Vec<String>) {
    assert!(breaches.is_empty(), "\n{}\n", breaches.join("\n"));
}

#[test]
fn floors_look_down_only() {
    let files = sources(&["rs"]);
    let in_src: Vec<_> = files.iter().filter_map(|(p, s)| p.strip_prefix("src/").map(|p| (p, s))).collect();
    assert!(in_src.len() > FLOORS.len(), "found only {} files in src", in_src.len());
    report(in_src.iter().flat_map(|(path, source)| floor_breaches(Path::new(path), source)).collect());
}

#[test]
fn the_crate_root_lists_the_floors_in_order() {
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).expect("src/lib.rs");
    let listed: Vec<String> =
        tokens(&lib).windows(2).filter(|w| w[0].text == "mod").map(|w| w[1].text.clone()).collect();
    assert_eq!(listed, FLOORS);
}

#[test]
fn every_file_says_what_lives_there() {
    let files = sources(&["rs"]);
    report(
        files
            .iter()
            .filter(|(_, source)| {
                let first = source.lines().next().unwrap_or_default();
                first.strip_prefix("//! ").is_none_or(|said| said.trim().is_empty())
            })
            .map(|(path, _)| format!("{path}: the first line must be `//! …`"))
            .collect(),
    );
}

#[test]
fn files_stay_short() {
    let mut breaches = Vec::new();
    let files = sources(&["rs", "py", "cu", "cuh"]);
    for (path, source) in &files {
        let lines = source.lines().count();
        let excepted = LONG_FILES.iter().any(|(long, _)| long == path);
        if lines > MAX_LINES && !excepted {
            breaches.push(format!("{path}: {lines} lines; split it by topic (limit {MAX_LINES})"));
        }
        if lines <= MAX_LINES && excepted {
            breaches.push(format!("{path}: short again with {lines} lines: take it off LONG_FILES"));
        }
    }
    for (long, reason) in LONG_FILES {
        if !files.iter().any(|(path, _)| path == long) {
            breaches.push(format!("{long}: on LONG_FILES, but gone"));
        }
        if reason.len() < 10 {
            breaches.push(format!("{long}: on LONG_FILES without a reason"));
        }
    }
    report(breaches);
}

#[test]
fn nothing_unfinished_and_no_machine_paths() {
    let files = sources(&["rs", "py", "toml", "md", "sh", "cu", "cuh", "yml", "yaml"]);
    report(files.iter().flat_map(|(path, source)| word_breaches(path, source)).collect());
}

#[test]
fn no_test_is_ignored() {
    report(sources(&["rs"]).iter().flat_map(|(path, source)| ignored_tests(path, source)).collect());
}

#[test]
fn the_tree_stays_small() {
    let size = |p: &PathBuf| std::fs::metadata(root().join(p)).map_or(0, |m| m.len());
    let files = tracked_files();
    let total: u64 = files.iter().map(size).sum();
    let mut largest: Vec<(u64, &PathBuf)> = files.iter().map(|p| (size(p), p)).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    assert!(total > 0);
    assert!(total <= MAX_TREE_BYTES, "the tree holds {total} bytes; the largest: {:#?}", &largest[..10]);
}

#[test]
fn documents_name_only_what_exists() {
    let xtask = std::fs::read_to_string(root().join("packaging/xtask/src/main.rs")).expect("the xtask's main file");
    let tasks: BTreeSet<String> = xtask
        .lines()
        .filter_map(|l| l.trim().strip_prefix('"')?.split_once("\" =>"))
        .map(|(t, _)| t.to_owned())
        .collect();
    assert!(tasks.contains("run") && tasks.contains("test"), "tasks read from the xtask: {tasks:?}");
    let documents = sources(&["md"]);
    report(
        documents
            .iter()
            .flat_map(|(path, text)| {
                let folder = Path::new(path).parent().unwrap_or(Path::new("")).to_path_buf();
                let exists = |p: &str| root().join(p).exists() || root().join(&folder).join(p).exists();
                dead_references(path, text, &exists, &tasks)
            })
            .collect(),
    );
}

#[test]
fn the_architecture_document_lists_every_floor() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let places: Vec<Option<usize>> = FLOORS.iter().map(|f| text.find(&format!("| `src/{f}/`"))).collect();
    assert!(places.iter().all(Option::is_some), "a floor is missing: {places:?}");
    assert!(places.is_sorted(), "the floors are not in order: {places:?}");
}

// ---------------------------------------------------------------------------------------------------------------------
// Each rule can fail.

fn breaches_of(path: &str, source: &str) -> usize {
    floor_breaches(Path::new(path), source).len()
}

#[test]
fn the_reader_skips_comments_strings_and_characters() {
    let source = "// crate::gui\n/* crate::gui /* nested */ crate::gui */ let a = \"crate::gui \\\" crate::gui\";\n\
                  let b = r#\"crate::gui \" \"#; let c = '\"'; fn f<'a>(x: &'a str) {} let d = '\\''; crate::gui::x();";
    assert_eq!(crate_paths(source, &["base".into()]), [(3, "gui".to_owned())]);
}

#[test]
fn upward_paths_are_found_in_every_spelling() {
    assert_eq!(breaches_of("base/units.rs", "use crate::gui::app;"), 1);
    assert_eq!(breaches_of("base/units.rs", "use crate::{base::error, formats::gguf, gui};"), 2);
    assert_eq!(breaches_of("base/units.rs", "fn f() { let x = crate::session::config::RunConfig::default(); }"), 1);
    assert_eq!(breaches_of("base/units.rs", "use super::super::gui::app;"), 1);
    assert_eq!(breaches_of("base/mod.rs", "use super::{gui, formats};"), 2);
    assert_eq!(breaches_of("base/units.rs", "mod tests { use super::super::super::gui; }"), 1);
    assert_eq!(breaches_of("base/units.rs", "pub(crate) fn f() {} mod tests { use super::super::error; }"), 0);
    assert_eq!(breaches_of("gui/app.rs", "use crate::session::handle; use super::theme; use crate::base::error;"), 0);
}

#[test]
fn borders_between_floors_hold() {
    assert_eq!(breaches_of("model/block.rs", "use crate::data::pack::PackedBatch;"), 1);
    assert_eq!(breaches_of("data/pack.rs", "use crate::formats::gguf;"), 0);
    assert_eq!(breaches_of("train/batch.rs", "use crate::data::pack::PackedBatch; use crate::model::block;"), 0);
    assert_eq!(breaches_of("gui/app.rs", "use crate::train::config::TrainConfig;"), 1);
    assert_eq!(breaches_of("session/a.rs", "fn f(x: egui::Color32) {}"), 1);
    assert_eq!(breaches_of("main.rs", "fn f() { eframe::run_native(); }"), 1);
    assert_eq!(breaches_of("tensor/device.rs", "use cudarc::driver;"), 0);
    assert_eq!(breaches_of("layers/linear.rs", "use cudarc::driver;"), 1);
    assert_eq!(breaches_of("helpers/a.rs", ""), 1);
}

#[test]
fn words_and_references_are_found() {
    assert_eq!(word_breaches("a", concat!("// TO", "DO: later\nlet p = \"/ho", "me/me/x\";\n")).len(), 2);
    assert_eq!(ignored_tests("a", "#[test]\n#[ignore = \"slow\"]\nfn f() {}").len(), 1);
    let exists = |p: &str| p == "src/lib.rs";
    let tasks = BTreeSet::from(["run".to_owned()]);
    let text = "`src/lib.rs` `src/gone.rs:12` [a](gone.md) [b](https://x.org) `cargo xtask run` `cargo xtask fly`";
    assert_eq!(dead_references("a", text, &exists, &tasks).len(), 3);
}
