//! Every switch changes no result, and what fails or is refused is said and leaves the results as they are.

use std::sync::atomic::AtomicBool;

use serde_json::json;

use super::*;
use crate::data::example::Example;
use crate::model::metadata::MetadataPolicy;
use crate::model::policy::Metadata;
use crate::model::testing::{VOCAB, tiny};
use crate::ops::testing::{Values, assert_close, cpu};
use crate::tensor::offload::Faults;
use crate::tensor::{Device, MemoryCategory};
use crate::train::config::{
    AttentionPath, MemoryConfig, MemoryPolicy, OffloadPolicy, OptimizationsConfig, Routing, TrainConfig,
};
use crate::train::report::Optimization;

static NEVER: AtomicBool = AtomicBool::new(false);

/// Offload with a given number of buffers, without the guardrails that a tiny model would not pass.
fn offload(buffers: usize) -> OffloadPolicy {
    OffloadPolicy { buffers, force: true, ..OffloadPolicy::default() }
}

fn batches(lengths: &[usize]) -> Vec<PackedBatch> {
    let mut values = Values::new(7);
    let mut document = |&len: &usize| {
        let ids: Vec<i32> = (0..len).map(|_| ((values.next() + 1.0) / 2.0 * VOCAB as f32) as i32).collect();
        Example { labels: ids[1..].iter().copied().chain([IGNORE_INDEX]).collect(), input_ids: ids }
    };
    let mut pack = |lengths: &[usize]| {
        let documents: Vec<Example> = lengths.iter().map(&mut document).collect();
        PackedBatch::from_examples(&documents)
    };
    vec![pack(lengths), pack(&[9, 5])]
}

/// A model of five blocks whose windows alternate.
fn trainer(device: &Device, method: MethodKind, switches: Switches) -> Trainer {
    let config = json!({
        "model_type": "qwen3", "num_hidden_layers": 5, "use_sliding_window": true, "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    });
    let setup = TrainerSetup {
        method: MethodConfig { kind: method, r: 4, ..MethodConfig::default() },
        optimizer: OptimizerConfig { lr: 1e-2, ..OptimizerConfig::default() },
        switches,
        seed: 3,
        total_steps: 20,
    };
    Trainer::new(tiny(device, &config), setup).unwrap()
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<StepReport> {
    let batches = batches(&[20, 13, 1]);
    (0..count).map(|_| trainer.step_and_wait(&batches, 0.0, &NEVER).unwrap().unwrap()).collect()
}

fn bits(reports: &[StepReport]) -> Vec<[u64; 2]> {
    reports.iter().map(|report| [report.loss.to_bits(), report.grad_norm.to_bits()]).collect()
}

/// What blocks keep, buffers for what comes back, and what is kept beside inputs: the residual stream between attention and MLP, and q, k and v.
const WAYS: [(Activations, usize, [bool; 2]); 10] = [
    (Activations::Keep, 0, [false, false]),
    (Activations::Recompute, 0, [false, false]),
    (Activations::Recompute, 0, [true, false]),
    (Activations::Recompute, 0, [false, true]),
    (Activations::Offload, 1, [false, false]),
    (Activations::Offload, 1, [true, true]),
    (Activations::Offload, 2, [false, false]),
    (Activations::Offload, 2, [true, false]),
    (Activations::Offload, 2, [false, true]),
    (Activations::Offload, 2, [true, true]),
];

#[test]
fn no_switch_changes_a_bit_of_twenty_steps() {
    for method in [MethodKind::Lora, MethodKind::Full] {
        for attention in [AttentionPath::Varlen, AttentionPath::Masked] {
            let of = |activations, buffers, [middle, qkv]: [bool; 2], metadata| Switches {
                activations,
                attention,
                metadata: MetadataPolicy { metadata, capacity: 0 },
                routing: Routing::default(),
                offload: offload(buffers),
                cuda_graphs: true,
                memory: MemoryPolicy { middle, qkv, ..MemoryPolicy::default() },
            };
            let run = |switches| bits(&steps(&mut trainer(&cpu(2), method, switches), 20));
            let reference = run(of(Activations::Keep, 0, [false, false], Metadata::Cached));
            // What trains makes no difference to metadata: once is enough.
            let all = &[Metadata::Cached, Metadata::Fused, Metadata::Published];
            for &metadata in if method == MethodKind::Lora { &all[..] } else { &all[..1] } {
                let ways = WAYS.into_iter().filter(|way| way.2 == [false, false] || metadata == all[0]);
                for (activations, buffers, beside) in ways {
                    let got = run(of(activations, buffers, beside, metadata));
                    let what = format!(
                        "{method:?}, {attention:?}, {activations:?}, {buffers} buffers, beside {beside:?}, {metadata:?}"
                    );
                    assert_eq!(got, reference, "{what}");
                }
            }
        }
    }
}

#[test]
fn switching_between_steps_changes_no_bit_either() {
    let reference = bits(&steps(&mut trainer(&cpu(2), MethodKind::Lora, Switches::default()), 6));
    let mut switched = trainer(&cpu(2), MethodKind::Lora, Switches { offload: offload(0), ..Switches::default() });
    let mut got = bits(&steps(&mut switched, 1));
    let off = OptimizationsConfig::default().baselines();
    for (optimization, on) in [
        (Optimization::ActivationOffload, true),
        (Optimization::DoubleBuffer, false),
        (Optimization::MetadataCache, false),
        (Optimization::KeepActivations, true),
        (Optimization::MetadataCache, true),
    ] {
        switched.set_switches(switched.switches().with(optimization, on, off));
        got.extend(bits(&steps(&mut switched, 1)));
        let choice = switched.choices().into_iter().find(|choice| choice.optimization == optimization).unwrap();
        assert_eq!(choice.on, on, "{}", choice.describe());
    }
    assert_eq!(got, reference);
}

#[test]
fn the_cache_is_counted_and_one_entry_thrashes_on_alternating_windows() {
    let counts = |metadata, capacity, activations| {
        let metadata = MetadataPolicy { metadata, capacity };
        let mut trainer = trainer(&cpu(1), MethodKind::Lora, Switches { metadata, activations, ..Switches::default() });
        let cache = steps(&mut trainer, 2).pop().unwrap().cache.unwrap();
        (cache.counts.lookups, cache.counts.hits, cache.counts.builds, cache.entries.len())
    };
    // Two micro-batches, five layers, forward and recomputed; two windows.
    assert_eq!(counts(Metadata::Cached, 0, Activations::Recompute), (20, 16, 4, 2));
    assert_eq!(counts(Metadata::Cached, 0, Activations::Keep), (10, 6, 4, 2));
    assert_eq!(counts(Metadata::Published, 0, Activations::Recompute), (20, 0, 20, 0));
    // The last layer forward is the first one backward: the one lookup of a pass that finds its entry.
    assert_eq!(counts(Metadata::Cached, 1, Activations::Recompute), (20, 2, 18, 1));
}

#[test]
fn offload_is_measured_and_takes_one_activation_for_the_second_buffer() {
    let run = |activations, buffers| {
        let switches = Switches { activations, offload: offload(buffers), ..Switches::default() };
        steps(&mut trainer(&cpu(1), MethodKind::Lora, switches), 2).pop().unwrap()
    };
    let peak = |report: &StepReport, category| {
        report.memory.categories.iter().find(|c| c.category == category).unwrap().peak_bytes
    };
    let (one, two) = (run(Activations::Offload, 1), run(Activations::Offload, 2));
    let [copies_of_one, copies_of_two] = [&one, &two].map(|report| report.copies.unwrap());
    // 34 tokens of the larger micro-batch.
    let activation = copies_of_two.buffer_bytes;
    assert_eq!(activation % 34, 0);
    assert_eq!((copies_of_one.buffers, copies_of_two.buffers), (1, 2));
    // The first buffer is the input of the last block.
    assert_eq!(peak(&one, MemoryCategory::OffloadBuffers), 0);
    assert_eq!(peak(&two, MemoryCategory::OffloadBuffers), activation);
    for copies in [copies_of_one, copies_of_two] {
        assert_eq!((copies.blocks, copies.reloads, copies.host_bytes), (4, 8, 4 * activation));
        assert_eq!(copies.d2h_bytes, 4 * (activation + activation / 34 * 14), "both micro-batches");
        assert_eq!(copies.h2d_bytes, copies.d2h_bytes);
        assert!(copies.copy_ms >= copies.hidden_ms && copies.copy_ms <= copies.d2h_ms + copies.h2d_ms + 1e-9);
        assert!(copies.reload_ms().is_some() && copies.block_backward_ms.is_some());
    }
    assert!(run(Activations::Recompute, 0).copies.is_none());
    // What is kept beside inputs travels with them: a block comes back as often.
    let memory = MemoryPolicy { middle: true, qkv: true, ..MemoryPolicy::default() };
    let switches = Switches { activations: Activations::Offload, offload: offload(2), memory, ..Switches::default() };
    let copies = steps(&mut trainer(&cpu(1), MethodKind::Lora, switches), 2).pop().unwrap().copies.unwrap();
    assert!(copies.buffer_bytes > 2 * activation);
    assert_eq!((copies.blocks, copies.reloads, copies.host_bytes), (4, 8, 4 * copies.buffer_bytes));
}

#[test]
fn what_blocks_keep_beside_inputs_changes_no_bit_of_a_gradient() {
    let batches = batches(&[20, 13, 1]);
    for activations in [Activations::Recompute, Activations::Offload] {
        for mlp_rows in [0, 7] {
            let of = |middle, qkv| {
                let memory = MemoryPolicy { middle, qkv, mlp_rows, ..MemoryPolicy::default() };
                let switches = Switches { activations, offload: offload(2), memory, ..Switches::default() };
                let trainers = trainers_of(&cpu(2), switches).into_iter();
                trainers.map(|(what, mut trainer)| (what, gradients_of(&mut trainer, &batches))).collect::<Vec<_>>()
            };
            let nothing = of(false, false);
            for (middle, qkv) in [(true, false), (false, true), (true, true)] {
                for ((what, (loss, gradients, _)), (_, want)) in of(middle, qkv).iter().zip(&nothing) {
                    let what = format!("{what}, {activations:?}, tiles of {mlp_rows}, middle {middle}, qkv {qkv}");
                    assert_eq!(loss.to_bits(), want.0.to_bits(), "{what}");
                    assert_eq!(gradients, &want.1, "{what}");
                }
            }
        }
    }
}

#[test]
fn what_is_refused_or_fails_is_said_and_changes_no_result() {
    let reference = bits(&steps(&mut trainer(&cpu(1), MethodKind::Lora, Switches::default()), 3));
    let run = |policy: OffloadPolicy, faults| {
        let switches = Switches { activations: Activations::Offload, offload: policy, ..Switches::default() };
        let mut trainer = trainer(&cpu(1), MethodKind::Lora, switches);
        trainer.model.set_offload_faults(faults);
        assert_eq!(bits(&steps(&mut trainer, 3)), reference);
        trainer
    };
    let choice = |trainer: &Trainer, optimization| {
        trainer.choices().into_iter().find(|choice| choice.optimization == optimization).unwrap().describe()
    };
    let (offloading, buffering) = (Optimization::ActivationOffload, Optimization::DoubleBuffer);

    let small = run(OffloadPolicy::default(), Faults::default());
    assert!(
        choice(&small, offloading).contains("off (packs of 14 tokens are below 512"),
        "{}",
        choice(&small, offloading)
    );
    assert!(choice(&small, buffering).contains("off (no activations are offloaded)"));

    let no_second = run(offload(0), Faults { second_buffer: true, ..Faults::default() });
    assert!(choice(&no_second, offloading).starts_with("Activation offload: on"));
    assert!(choice(&no_second, buffering).contains("off (there is no memory for a second buffer of"));

    let no_memory = run(offload(0), Faults { pinned_from: Some(2), ..Faults::default() });
    assert!(choice(&no_memory, offloading).contains("off (there is no host memory for 4 activations)"));

    let little = OffloadPolicy { pinned_bytes: Some(100), ..offload(0) };
    assert!(choice(&run(little, Faults::default()), offloading).contains("off (there is no host memory"));
}

#[test]
fn a_failing_copy_ends_the_step_with_its_reason_and_leaves_the_trainer_usable() {
    let reference = bits(&steps(&mut trainer(&cpu(1), MethodKind::Lora, Switches::default()), 3));
    let switches = Switches { activations: Activations::Offload, offload: offload(2), ..Switches::default() };
    let mut trainer = trainer(&cpu(1), MethodKind::Lora, switches);
    let mut got = bits(&steps(&mut trainer, 1));
    trainer.model.set_offload_faults(Faults { store_to: Some(2), ..Faults::default() });
    let error = trainer.step(&batches(&[20, 13, 1]), 0.0, &NEVER).unwrap_err();
    assert_eq!(error.to_string(), "copying the input of block 2 to host memory failed");
    assert_eq!(trainer.steps_done(), 1);
    trainer.model.set_offload_faults(Faults::default());
    got.extend(bits(&steps(&mut trainer, 2)));
    assert_eq!(got, reference);
}

#[test]
fn a_step_without_memory_for_two_buffers_is_taken_again_with_one() {
    let run = |trainer: &mut Trainer, fault_at: u64| {
        trainer.report_late();
        let mut reports = Vec::new();
        for step in 1..=4 {
            let memory_for_two = step == fault_at;
            if memory_for_two {
                trainer.model.set_offload_faults(Faults { memory_for_two, ..Faults::default() });
            }
            let stepped = trainer.step(&batches(&[20, 13, 1]), 0.0, &NEVER).unwrap();
            let Stepped::Submitted(report) = stepped else { panic!("nobody stopped it") };
            reports.extend(report.map(|report| *report));
        }
        reports.extend(trainer.flush().unwrap());
        assert_eq!(reports.iter().map(|report| report.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
        bits(&reports)
    };
    let switches = Switches { activations: Activations::Offload, offload: offload(2), ..Switches::default() };
    let reference = run(&mut trainer(&cpu(1), MethodKind::Lora, switches), 0);
    for fault_at in [1, 3] {
        let mut trainer = trainer(&cpu(1), MethodKind::Lora, switches);
        assert_eq!(run(&mut trainer, fault_at), reference);
        let choices = trainer.choices();
        let buffers = choices.iter().find(|choice| choice.optimization == Optimization::DoubleBuffer).unwrap();
        assert!(!buffers.on && buffers.why.contains("out of memory"), "{}", buffers.describe());
    }
    // With one buffer from the start it does not come to that.
    let switches = Switches { offload: offload(1), ..switches };
    let mut one = trainer(&cpu(1), MethodKind::Lora, switches);
    one.model.set_offload_faults(Faults { memory_for_two: true, ..Faults::default() });
    assert_eq!(bits(&steps(&mut one, 4)), reference);
}

#[test]
fn a_rehearsal_changes_no_step() {
    for activations in [Activations::Recompute, Activations::Offload] {
        let switches = Switches { activations, offload: offload(2), ..Switches::default() };
        let mut reference = trainer(&cpu(1), MethodKind::Lora, switches);
        let mut rehearsed = trainer(&cpu(1), MethodKind::Lora, switches);
        assert!(rehearsed.rehearse(&batches(&[30, 20])[0], &NEVER).unwrap());
        assert_eq!(rehearsed.steps_done(), 0);
        assert_eq!(bits(&steps(&mut rehearsed, 3)), bits(&steps(&mut reference, 3)));
        assert!(!rehearsed.rehearse(&batches(&[30])[0], &AtomicBool::new(true)).unwrap(), "it can be stopped");
    }
    // Where memory runs out with two buffers there is one from then on.
    let switches = Switches { activations: Activations::Offload, offload: offload(2), ..Switches::default() };
    let mut trainer = trainer(&cpu(1), MethodKind::Lora, switches);
    trainer.model.set_offload_faults(Faults { memory_for_two: true, ..Faults::default() });
    assert!(trainer.rehearse(&batches(&[30])[0], &NEVER).unwrap());
    assert_eq!(trainer.model().offload_state().buffers.unwrap().0, 1);
}

#[test]
fn a_small_batch_beside_a_large_one_is_no_refusal() {
    // The second micro-batch has 14 tokens: with guardrails it would be refused, so the large one must be large.
    let policy = OffloadPolicy { buffers: 2, ..OffloadPolicy::default() };
    let switches = Switches { activations: Activations::Offload, offload: policy, ..Switches::default() };
    let mut trainer = trainer(&cpu(2), MethodKind::Lora, switches);
    let hidden = trainer.model().config().hidden_size;
    let documents = vec![64; (2_usize << 20).div_ceil(4 * hidden * 64)];
    let batches = batches(&documents);
    let report = trainer.step_and_wait(&batches, 0.0, &NEVER).unwrap().unwrap();
    assert_eq!(report.copies.map(|copies| (copies.blocks, copies.reloads)), Some((4, 4)), "the large one only");
    let choices = trainer.choices();
    let offload = choices.iter().find(|choice| choice.optimization == Optimization::ActivationOffload).unwrap();
    assert!(offload.on, "{}", offload.describe());
}

#[test]
fn the_choice_of_what_blocks_keep_follows_the_memory_and_says_why() {
    let mut trainer = trainer(&cpu(1), MethodKind::Lora, Switches::default());
    let mut chosen = |asked, tokens| {
        trainer.choose_activations(asked, tokens);
        let choices = trainer.choices();
        let keep = choices.iter().find(|choice| choice.optimization == Optimization::KeepActivations).unwrap();
        (trainer.switches().activations, keep.why.clone())
    };
    let (activations, why) = chosen(ActivationsChoice::Auto, 64);
    assert_eq!(activations, Activations::Keep);
    assert!(why.contains("for all blocks fit into"), "{why}");
    // More than any machine has.
    let (activations, why) = chosen(ActivationsChoice::Auto, 1 << 46);
    assert_eq!(activations, Activations::Recompute);
    assert!(why.contains("keeping all would need"), "{why}");
    assert_eq!(chosen(ActivationsChoice::Recompute, 64), (Activations::Recompute, "set in the configuration".into()));
}

#[test]
fn a_configuration_sets_the_switches() {
    let train = TrainConfig { activations: ActivationsChoice::Offload, cuda_graphs: false, ..TrainConfig::default() };
    let mut optimizations = OptimizationsConfig::default();
    assert_eq!(Switches::of(&TrainConfig::default(), &optimizations, &MemoryConfig::default()), Switches::default());
    optimizations.offload_headroom_mib = 3;
    optimizations.offload_pinned_gib = 0.5;
    optimizations.metadata_cache = crate::train::config::Switch::Off;
    optimizations.metadata_entries = 1;
    let switches = Switches::of(&train, &optimizations, &MemoryConfig::default());
    assert_eq!((switches.activations, switches.cuda_graphs), (Activations::Offload, false));
    assert_eq!(switches.metadata, MetadataPolicy { metadata: Metadata::Published, capacity: 1 });
    assert_eq!((switches.offload.headroom_bytes, switches.offload.pinned_bytes), (3 << 20, Some(1 << 29)));
}

/// Trainers of two models for the tests of tiles: norms of q and k and alternating windows, and biases; with LoRA, dropout, and every parameter.
fn trainers_of(device: &Device, switches: Switches) -> Vec<(String, Trainer)> {
    let models = [
        (
            "qwen3",
            json!({"model_type": "qwen3", "use_sliding_window": true, "sliding_window": 6, "max_window_layers": 1}),
        ),
        ("biases", json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true})),
    ];
    let methods = [
        ("lora", MethodConfig { r: 4, ..MethodConfig::default() }),
        ("dropout", MethodConfig { r: 4, lora_dropout: 0.3, ..MethodConfig::default() }),
        ("full", MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() }),
    ];
    let mut all = Vec::new();
    for (model, config) in &models {
        for (name, method) in &methods {
            let optimizer = OptimizerConfig { max_grad_norm: 0.0, ..OptimizerConfig::default() };
            let setup = TrainerSetup { method: method.clone(), optimizer, switches, seed: 3, total_steps: 20 };
            let mut trainer = Trainer::new(tiny(device, config), setup).unwrap();
            // B of fresh adapters is zero: gradients of A would be too. Large ones would make rounding large.
            let ids: Vec<_> = trainer.model().adapters().map(|(id, p)| (id, p.len())).collect();
            let mut values = Values::new(5);
            for (id, len) in ids {
                trainer
                    .model_mut()
                    .params_mut()
                    .set(id, &values.vec(len).iter().map(|x| 0.1 * x).collect::<Vec<f32>>());
            }
            all.push((format!("{model}, {name}"), trainer));
        }
    }
    all
}

/// Loss and gradients of one step.
fn gradients_of(trainer: &mut Trainer, batches: &[PackedBatch]) -> (f64, Vec<(String, Vec<f32>)>, StepReport) {
    let report = trainer.step_and_wait(batches, 0.0, &NEVER).unwrap().unwrap();
    let trained = trainer.model.params().iter().filter(|(_, parameter)| parameter.trainable);
    let of = |id, name: &str| (name.to_owned(), trainer.grads.get(id).unwrap().to_vec());
    (report.loss, trained.map(|(id, parameter)| of(id, &parameter.name)).collect(), report)
}

fn peak_of_passes(report: &StepReport) -> u64 {
    let held = |category| matches!(category, MemoryCategory::Activations | MemoryCategory::Workspace);
    report.memory.categories.iter().filter(|c| held(c.category)).map(|c| c.peak_bytes).sum()
}

#[test]
fn an_mlp_in_tiles_gives_the_same_up_to_the_order_of_sums_and_takes_less_memory() {
    let batches = batches(&[20, 13, 1]);
    for activations in [Activations::Recompute, Activations::Offload] {
        let of = |mlp_rows| {
            let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
            trainers_of(&cpu(2), Switches { activations, offload: offload(2), memory, ..Switches::default() })
        };
        let whole: Vec<_> =
            of(0).into_iter().map(|(what, mut trainer)| (what, gradients_of(&mut trainer, &batches))).collect();
        for mlp_rows in [1, 7, 17, 1000] {
            for ((what, mut trainer), (_, (loss, gradients, report))) in of(mlp_rows).into_iter().zip(&whole) {
                let what = format!("{what}, {activations:?}, tiles of {mlp_rows}");
                let (tiled_loss, tiled, tiled_report) = gradients_of(&mut trainer, &batches);
                assert!((tiled_loss - loss).abs() < 1e-6 * loss, "{what}: {tiled_loss} against {loss}");
                for ((name, tiled), (_, gradient)) in tiled.iter().zip(gradients) {
                    assert_close(&format!("{what}: {name}"), tiled, gradient, 3e-6);
                }
                let (tiled, whole) = (peak_of_passes(&tiled_report), peak_of_passes(report));
                // Inputs that threads carry leave sooner or later.
                let is_as_before = tiled == whole || activations == Activations::Offload;
                assert!(if mlp_rows < 34 { tiled < whole } else { is_as_before }, "{what}: {tiled} of {whole} bytes");
                let choices = trainer.choices();
                assert!(
                    choices.iter().any(|c| c.optimization == Optimization::MlpTiles && c.on),
                    "{what}: {choices:?}"
                );
            }
        }
    }
}

#[test]
fn tiles_are_off_with_a_reason_where_blocks_keep_all() {
    let memory = MemoryPolicy { mlp_rows: 7, ..MemoryPolicy::default() };
    let keep = |memory| Switches { activations: Activations::Keep, memory, ..Switches::default() };
    let run = |memory| {
        let mut trainer = trainer(&cpu(1), MethodKind::Lora, keep(memory));
        (bits(&steps(&mut trainer, 2)), trainer.choices())
    };
    let (whole, choices) = run(MemoryPolicy::default());
    assert!(choices.iter().all(|choice| choice.optimization != Optimization::MlpTiles), "nobody asked");
    let (asked, choices) = run(memory);
    assert_eq!(asked, whole);
    let choice = choices.into_iter().find(|choice| choice.optimization == Optimization::MlpTiles).unwrap();
    assert!(!choice.on && choice.why.contains("keep all"), "{}", choice.describe());
}

#[test]
fn joined_packs_give_what_they_give_one_by_one_and_reports_stay_true() {
    // Three packs of 34, 14 and 14 tokens: two passes of 48 and 14, or one.
    let packs = [batches(&[20, 13, 1]), batches(&[3, 11])].concat()[..3].to_vec();
    for activations in [Activations::Keep, Activations::Recompute] {
        let of = |pass_tokens| {
            let memory = MemoryPolicy { pass_tokens, mlp_rows: 24, ..MemoryPolicy::default() };
            trainers_of(&cpu(2), Switches { activations, memory, ..Switches::default() })
        };
        let apart: Vec<_> =
            of(0).into_iter().map(|(what, mut trainer)| (what, gradients_of(&mut trainer, &packs))).collect();
        for (pass_tokens, passes) in [(20, 3), (50, 2), (1000, 1)] {
            for ((what, mut trainer), (_, (loss, gradients, report))) in of(pass_tokens).into_iter().zip(&apart) {
                let what = format!("{what}, {activations:?}, passes of {pass_tokens}");
                let (joined_loss, joined, joined_report) = gradients_of(&mut trainer, &packs);
                let choices = trainer.choices();
                let choice = choices.iter().find(|c| c.optimization == Optimization::JoinedPacks).unwrap();
                let drops = what.contains("dropout");
                assert_eq!(choice.on, !drops, "{}", choice.describe());
                assert!(!drops || choice.why.contains("lora_dropout"), "{}", choice.describe());
                assert!((joined_loss - loss).abs() < 1e-6 * loss, "{what}: {joined_loss} against {loss}");
                for ((name, joined), (_, gradient)) in joined.iter().zip(gradients) {
                    assert_close(&format!("{what}: {name}"), joined, gradient, 3e-6);
                }
                let counted =
                    |report: &StepReport| [report.total_tokens, report.document_tokens, report.num_label_tokens];
                assert_eq!(counted(&joined_report), counted(report), "{what}");
                // The cache builds once a pass and window.
                let builds = |report: &StepReport| report.cache.as_ref().unwrap().counts.builds;
                let passes = if drops { 3 } else { passes };
                assert_eq!(builds(&joined_report) * 3, builds(report) * passes, "{what}");
            }
        }
    }
}

#[test]
fn masks_are_not_joined_and_plans_are_for_passes() {
    let memory = MemoryPolicy { pass_tokens: 100, ..MemoryPolicy::default() };
    let of = |attention| trainer(&cpu(1), MethodKind::Lora, Switches { attention, memory, ..Switches::default() });
    let (varlen, masked) = (of(AttentionPath::Varlen), of(AttentionPath::Masked));
    let choices = masked.choices();
    let choice = choices.iter().find(|choice| choice.optimization == Optimization::JoinedPacks).unwrap();
    assert!(!choice.on && choice.why.contains("mask"), "{}", choice.describe());
    let work = |tokens, batches| Workload { tokens, longest: 9, batches };
    assert_eq!(masked.passes_of(work(30, 4)), work(30, 4));
    assert_eq!(varlen.passes_of(work(30, 4)), work(100, 2), "packs may be shorter than the largest, and fill a pass");
    assert_eq!(varlen.passes_of(work(30, 2)), work(60, 1));
    assert_eq!(varlen.passes_of(work(300, 2)), work(300, 2));
}
