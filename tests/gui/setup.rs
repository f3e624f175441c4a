//! The Set up screen: paths typed and dropped, a bad dataset, a mapping, wrong fields, and the run that Start makes.

use std::path::Path;

use egui::accesskit::Role;
use egui_kittest::kittest::{NodeT as _, Queryable as _};
use tandem::gui::views::Screen;
use tandem::session::config::RunConfig;
use tandem::session::{
    ActivationsChoice, AttentionPath, LayoutChoice, Overlong, PlacementChoice, ScheduleKind, Switch,
};

use super::{App, app, build, builder, click, support, wait_for};

const START: &str = "Start training";

fn setup_screen() -> App {
    let mut harness = build(builder());
    click(&mut harness, Role::Tab, "Set up");
    assert_eq!(app(&mut harness).screen(), Screen::SetUp);
    harness
}

/// Replaces the content of a text field.
fn fill(harness: &mut App, field: &str, text: &str) {
    let node = || Role::TextInput;
    harness.get_by_role_and_label(node(), field).focus();
    harness.run_steps(2);
    harness.key_press_modifiers(egui::Modifiers::COMMAND, egui::Key::A);
    harness.run_steps(2);
    harness.get_by_role_and_label(node(), field).type_text(text);
    harness.run_steps(2);
}

fn type_paths(harness: &mut App, model: &Path, data: &Path) {
    fill(harness, "Model path", model.to_str().unwrap());
    fill(harness, "Dataset path", data.to_str().unwrap());
}

fn can_start(harness: &App) -> bool {
    !harness.get_by_role_and_label(Role::Button, START).accesskit_node().is_disabled()
}

#[test]
fn a_typed_dataset_is_looked_at_and_shown_as_the_model_sees_it() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("daten größe.jsonl");
    let row = |q: &str, a: &str| serde_json::json!({"prompt": q, "completion": a}).to_string() + "\n";
    std::fs::write(&data, row("first", "eins 1") + "broken\n" + &row("second", "zwei 2")).unwrap();
    let mut harness = setup_screen();
    assert!(!can_start(&harness));
    type_paths(&mut harness, &support::tiny_model(folder.path()), &data);
    fill(&mut harness, "Held out", "0");
    wait_for(&mut harness, "the preview", can_start);

    harness.get_by_label("Records 3");
    harness.get_by_label("Kept 2");
    harness.get_by_label("Dropped 1");
    harness.get_by_label("not valid JSON: 1");
    harness.get_by_label("pack 1 of 1");
    let second = "record 2 of 2 in this pack, positions restart at 0";
    wait_for(&mut harness, "the pack", |h| h.query_by_label_contains(second).is_some());
    harness.get_by_label("eins 1<|im_end|>↵");
    harness.get_by_label("every record ends with the end token");
    harness.get_by_label_contains("LlamaForCausalLM: 2 layers, hidden 32, 4 heads, 2 KV heads");

    click(&mut harness, Role::Link, "show: not valid JSON");
    harness.get_by_label_contains("line 2: not valid JSON");
    click(&mut harness, Role::RadioButton, "ids");
    // `<|im_start|>` is token 257.
    assert!(harness.query_all_by_label_contains("257 ").next().is_some());
}

#[test]
fn a_dataset_of_unknown_columns_is_mapped_and_trained() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("words.jsonl");
    let row =
        |i: usize| serde_json::json!({"word": format!("w{i}"), "meaning": format!("means {i}")}).to_string() + "\n";
    std::fs::write(&data, (0..40).map(row).collect::<String>()).unwrap();
    let model = support::tiny_model(folder.path());
    let mut harness = setup_screen();
    type_paths(&mut harness, &model, &data);
    wait_for(&mut harness, "the error", |h| h.query_by_label_contains("columns found: `word`, `meaning`").is_some());
    assert!(!can_start(&harness));
    harness.get_by_label("the dataset cannot be used; its tile says why");

    click(&mut harness, Role::Button, "Map the columns");
    wait_for(&mut harness, "the preview", can_start);
    let is_answer = |value: Option<String>| value.is_some_and(|text| text.ends_with("<|im_end|>↵"));
    wait_for(&mut harness, "an answer", |h| h.query_all_by_label_contains("means ").any(|row| is_answer(row.value())));
    fill(&mut harness, "Name", "wörter r4");
    fill(&mut harness, "Rank", "4");
    fill(&mut harness, "Learning rate", "1e-3");
    fill(&mut harness, "Tokens per pack", "256");
    click(&mut harness, Role::CheckBox, "k");
    click(&mut harness, Role::RadioButton, "steps");
    fill(&mut harness, "Steps", "3");
    wait_for(&mut harness, "the preview", can_start);
    harness.get_by_label("Steps 3");
    click(&mut harness, Role::Button, START);
    assert_eq!(app(&mut harness).screen(), Screen::Live);

    let run = harness.state().as_ref().unwrap().shown_run().unwrap().folder().to_path_buf();
    let config = RunConfig::load(&run.join("run.toml")).unwrap();
    let mut expected = RunConfig { name: "wörter r4".into(), ..RunConfig::default() };
    (expected.model.path, expected.data.path) = (model, data);
    expected.data.layout = LayoutChoice::Mapping;
    (expected.data.prompt, expected.data.completion) = (Some("{word}".into()), Some("{meaning}".into()));
    expected.packing.pack_len = 256;
    expected.method.r = 4;
    expected.method.target_modules =
        ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(String::from).to_vec();
    expected.optimizer.lr = 1e-3;
    expected.train.max_steps = 3;
    assert_eq!(config, expected);
    wait_for(&mut harness, "the end of the run", |h| h.query_by_role_and_label(Role::Label, "Completed").is_some());
}

#[test]
fn a_field_keeps_the_keyboard_when_a_job_brings_something_above_it() {
    let folder = tempfile::tempdir().unwrap();
    let unknown = folder.path().join("words.jsonl");
    std::fs::write(&unknown, "{\"word\": \"a\", \"meaning\": \"b\"}\n").unwrap();
    let mut harness = setup_screen();
    type_paths(&mut harness, &support::tiny_model(folder.path()), &support::dataset(folder.path(), 8));
    wait_for(&mut harness, "the preview", can_start);
    harness.get_by_role_and_label(Role::TextInput, "Held out").focus();
    harness.run_steps(2);
    // A dropped dataset puts the button Map the columns above the field.
    app(&mut harness).set_up(&unknown);
    wait_for(&mut harness, "the error", |h| h.query_by_label("Map the columns").is_some());
    harness.key_press_modifiers(egui::Modifiers::COMMAND, egui::Key::A);
    harness.run_steps(2);
    harness.get_by_role_and_label(Role::TextInput, "Held out").type_text("7");
    harness.run_steps(2);
    let value = harness.get_by_role_and_label(Role::TextInput, "Held out").accesskit_node().value();
    assert_eq!(value.as_deref(), Some("7"));
}

#[test]
fn wrong_fields_say_why_and_start_is_off() {
    let folder = tempfile::tempdir().unwrap();
    let mut harness = setup_screen();
    type_paths(&mut harness, &support::tiny_model(folder.path()), &support::dataset(folder.path(), 8));
    wait_for(&mut harness, "the preview", can_start);
    fill(&mut harness, "Rank", "0");
    harness.get_by_label("it must be at least 1; 8, 16 or 32 are usual");
    harness.get_by_label("Rank: it must be at least 1; 8, 16 or 32 are usual");
    assert!(!can_start(&harness));
    fill(&mut harness, "Rank", "8");
    assert!(can_start(&harness));
    fill(&mut harness, "Held out", "many");
    harness.get_by_label("not a number, such as 0.05 or 2e-4");
    fill(&mut harness, "Held out", "0");
    // Nothing is held out now: another preview, another sentence.
    wait_for(&mut harness, "the preview", |h| h.query_by_label_contains("Nothing is held out").is_some());
}

#[test]
fn optimizations_are_set_beside_the_rows() {
    let mut harness = setup_screen();
    let (config, _) = app(&mut harness).setup_config();
    assert_eq!(config.train.activations, ActivationsChoice::Auto);
    harness.get_by_role_and_label(Role::ComboBox, "Layout");
    click(&mut harness, Role::RadioButton, "optimizations");
    assert!(harness.query_by_role_and_label(Role::ComboBox, "Layout").is_none());
    let choose = |harness: &mut App, field: &str, words: &str| {
        harness.get_by_role_and_label(Role::ComboBox, field).click();
        harness.run_steps(3);
        harness.get_by_label(words).click();
        harness.run_steps(3);
    };
    let buffers = |harness: &App| {
        harness.get_by_role_and_label(Role::ComboBox, "Buffers of copies back").accesskit_node().is_disabled()
    };
    choose(&mut harness, "Packing metadata", "rebuilt, as published");
    choose(&mut harness, "Buffers of copies back", "one: copy, then compute");
    choose(&mut harness, "Attention", "by a dense mask");
    assert!(!buffers(&harness));
    choose(&mut harness, "Blocks keep", "their input, and compute the rest again");
    assert!(buffers(&harness), "nothing is offloaded");
    choose(&mut harness, "Blocks keep", "their input, in host memory: least memory");
    choose(&mut harness, "Embedding table", "in host memory");
    choose(&mut harness, "Optimizer state", "8 bits");
    fill(&mut harness, "Save every", "25");
    let (config, _) = app(&mut harness).setup_config();
    let memory = &config.memory;
    assert_eq!((memory.embedding, memory.optimizer_state), (PlacementChoice::Host, PlacementChoice::Auto));
    assert_eq!(config.optimizer.bits, 8);
    assert!(harness.query_by_label_contains("AdamW with 8-bit state").is_some());
    assert_eq!((config.train.activations, config.train.attention), (ActivationsChoice::Offload, AttentionPath::Masked));
    assert_eq!((config.optimizations.metadata_cache, config.optimizations.offload_buffers), (Switch::Off, 1));
    assert_eq!(config.train.save_every, 25);
}

#[test]
fn the_memory_plan_follows_what_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run.toml");
    support::tiny_model(folder.path());
    support::dataset(folder.path(), 12);
    let text = "[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n[train]\n";
    for size in [[1440.0, 900.0], [1280.0, 720.0]] {
        std::fs::write(&run, format!("{text}vram_limit_gib = 8\n")).unwrap();
        let mut harness = build(builder().with_size(size));
        click(&mut harness, Role::Tab, "Set up");
        if size[1] < 800.0 {
            click(&mut harness, Role::RadioButton, "memory");
        }
        harness.get_by_role_and_label(Role::Heading, "Memory plan");
        harness.get_by_label_contains("once a model and a dataset are chosen");
        app(&mut harness).set_up(&run);
        harness.run_steps(3);
        wait_for(&mut harness, "the plan", |h| h.query_by_label_contains("VRAM: ").is_some());
        assert!(harness.query_by_label_contains("of 8.00 GiB, ").is_some());
        harness.get_by_label_contains("Blocks keep everything for the backward pass: this takes ");
        // Less than a driver's context.
        std::fs::write(&run, format!("{text}vram_limit_gib = 0.1\n")).unwrap();
        app(&mut harness).set_up(&run);
        harness.run_steps(3);
        wait_for(&mut harness, "the other plan", |h| {
            h.query_by_label_contains("To make it fit, a card with ").is_some()
        });
        assert!(harness.query_by_label_contains(" missing").is_some());
        // A CPU has none.
        std::fs::write(&run, format!("{text}device = \"cpu\"\n")).unwrap();
        app(&mut harness).set_up(&run);
        harness.run_steps(3);
        wait_for(&mut harness, "the reason", |h| {
            h.query_by_label_contains("No plan: the run trains on the CPU").is_some()
        });
    }
}

#[test]
fn a_missing_model_is_an_error_in_its_tile() {
    let mut harness = setup_screen();
    fill(&mut harness, "Model path", "/no/such/model.gguf");
    wait_for(&mut harness, "the error", |h| h.query_by_label_contains("/no/such/model.gguf").is_some());
    assert!(!can_start(&harness));
}

#[test]
fn a_run_toml_fills_the_screen() {
    let folder = tempfile::tempdir().unwrap();
    support::tiny_model(folder.path());
    support::dataset(folder.path(), 12);
    let run = folder.path().join("run.toml");
    std::fs::write(
        &run,
        "name = \"from file\"\nseed = 5\n[model]\npath = \"tiny módel\"\n[data]\npath = \"data set.jsonl\"\n\
         [packing]\npack_len = 512\noverlong = \"split\"\n[optimizer]\nschedule = \"linear\"\nwarmup_steps = 1\n\
         [train]\nmax_steps = 2\n",
    )
    .unwrap();
    let mut harness = setup_screen();
    app(&mut harness).set_up(&run);
    harness.run_steps(3);
    wait_for(&mut harness, "the preview", can_start);
    let name = harness.get_by_role_and_label(Role::TextInput, "Name");
    assert_eq!(name.accesskit_node().value().as_deref(), Some("from file"));
    let (config, fine) = app(&mut harness).setup_config();
    assert!(fine);
    assert_eq!((config.seed, config.packing.pack_len, config.packing.overlong), (5, 512, Overlong::Split));
    assert_eq!((config.optimizer.schedule, config.optimizer.warmup_steps), (ScheduleKind::Linear, 1));
    assert!(config.model.path.is_absolute());

    std::fs::write(&run, "[method]\nrank = 3\n").unwrap();
    app(&mut harness).set_up(&run);
    harness.run_steps(3);
    assert_eq!(app(&mut harness).setup_config().0.seed, 5, "a broken file changes nothing");
    assert!(harness.query_by_label_contains("rank").is_some(), "and is told");
}

#[test]
fn experts_are_told_routed_and_adapted_where_the_model_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let data = support::dataset(folder.path(), 40);
    let sparse = support::tiny_sparse_model(folder.path(), 2, &[]);
    let mut harness = setup_screen();
    type_paths(&mut harness, &support::tiny_model(folder.path()), &data);
    wait_for(&mut harness, "the preview", can_start);
    let has = |harness: &App, role: Role, label: &str| harness.query_by_role_and_label(role, label).is_some();
    assert!(!has(&harness, Role::CheckBox, "experts down"), "a dense model");
    click(&mut harness, Role::RadioButton, "optimizations");
    assert!(harness.query_by_label("Grouped routing").is_none());
    click(&mut harness, Role::Tab, "Compare");
    let name = "Grouped MoE routing";
    assert!(harness.get_by_role_and_label(Role::Switch, name).accesskit_node().is_disabled());
    harness.get_by_label("Sorted MoE routing, the model in Set up is dense: it has no experts to route to");
    click(&mut harness, Role::Tab, "Set up");

    fill(&mut harness, "Model path", sparse.to_str().unwrap());
    wait_for(&mut harness, "experts", |h| has(h, Role::CheckBox, "experts down"));
    wait_for(&mut harness, "the preview", can_start);
    harness.get_by_label_contains("2 KV heads, 6 experts, 2 a token, vocabulary 259");
    assert!(harness.get_by_role_and_label(Role::CheckBox, "gate").accesskit_node().is_disabled());
    harness.get_by_label("No gate, up and down here: every layer has experts instead.");
    for chip in ["q", "k", "v", "o"] {
        click(&mut harness, Role::CheckBox, chip);
    }
    let problem = "choose at least one projection that this model has";
    assert!(harness.query_all_by_label(problem).count() > 0);
    assert!(!can_start(&harness), "gate, up and down are chosen, and there are none");
    click(&mut harness, Role::CheckBox, "experts down");
    // Two layers of six experts: A [6·16, 24] and B [32, 6·16].
    let count = tandem::base::units::count(2 * 6 * 16 * (32 + 24));
    harness.get_by_label_contains(&format!("{count} trainable weights"));
    let combo = harness.get_by_role_and_label(Role::ComboBox, "Grouped routing");
    combo.click();
    harness.run_steps(4);
    harness.get_by_label_contains("per expert: a read each").click();
    harness.run_steps(4);
    fill(&mut harness, "Tokens per pack", "64");
    click(&mut harness, Role::RadioButton, "steps");
    fill(&mut harness, "Steps", "2");
    wait_for(&mut harness, "the preview", can_start);

    click(&mut harness, Role::Tab, "Compare");
    assert!(!harness.get_by_role_and_label(Role::Switch, name).accesskit_node().is_disabled());
    click(&mut harness, Role::Tab, "Set up");
    wait_for(&mut harness, "the preview", can_start);
    click(&mut harness, Role::Button, START);
    let run = harness.state().as_ref().unwrap().shown_run().unwrap().folder().to_path_buf();
    let config = RunConfig::load(&run.join("run.toml")).unwrap();
    assert_eq!(config.method.target_parameters, ["mlp.experts.down_proj"]);
    assert_eq!(config.optimizations.grouped_routing, Switch::Off);
    assert_eq!(config.optimizations.routing_baseline, tandem::session::RoutingBaseline::PerExpert);
    wait_for(&mut harness, "the end of the run", |h| h.query_by_role_and_label(Role::Label, "Completed").is_some());
    harness.get_by_label_contains("Grouped MoE routing: off, a search and a read an expert, as published");
    click(&mut harness, Role::RadioButton, "MoE");
    harness.get_by_label_contains("Tokens of 2 layers × 6 experts, ");
    let view = tandem::session::run_view::RunView::load(&run).unwrap();
    let shown = harness.state().as_ref().unwrap().shown_run().unwrap().view.steps.last().unwrap().report.moe.clone();
    assert_eq!(view.last_step().unwrap().report.moe, shown, "the store has what the window had");
    let report = shown.unwrap();
    assert_eq!((report.layers.as_slice(), report.experts_per_token), (&[0, 1][..], 2));
    assert!(report.tokens_per_expert.iter().all(|layer| layer.iter().sum::<u64>() > 0));
}
