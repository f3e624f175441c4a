//! Steps on a recording device: a GPU without a driver, on which the trainer's own code takes memory and nothing is done.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, clippy::disallowed_macros)]

#[path = "support/golden_family.rs"]
mod golden_family;

use golden_family::{Family, NEVER};
use tandem::base::error::OutOfMemory;
use tandem::data::example::{Example, IGNORE_INDEX};
use tandem::data::pack::PackedBatch;
use tandem::model::config::ModelConfig;
use tandem::model::transformer::{Form, Transformer};
use tandem::tensor::cuda::{DeviceFacts, Pool, RecordingFacts};
use tandem::tensor::{Device, Gpu, MemoryCategory};
use tandem::train::batch::bucket;
use tandem::train::config::{
    Activations, AttentionPath, MemoryPolicy, Metadata, MetadataPolicy, MethodConfig, MethodKind, OffloadPolicy,
    OptimizerConfig, Placement,
};
use tandem::train::report::Optimization;
use tandem::train::switches::Switches;
use tandem::train::trainer::{Stepped, Trainer, TrainerSetup, lora_spec};

const LLAMA_1B: &str = include_str!("../assets/models/llama-3.2-1b.json");
const QWEN3_8B: &str = include_str!("../assets/models/qwen3-8b.json");
const QWEN3_32B: &str = include_str!("../assets/models/qwen3-32b.json");

fn facts() -> RecordingFacts {
    RecordingFacts { host_bytes: Some(1 << 40), ..RecordingFacts::unbounded(DeviceFacts::assumed(24 << 30), true) }
}

fn gpu(device: &Device) -> Gpu {
    let Device::Cuda(gpu) = device else { panic!("a recording device is a GPU to whoever uses it") };
    gpu.clone()
}

fn pack(lengths: &[usize]) -> PackedBatch {
    let document = |&len: &usize| {
        let input_ids: Vec<i32> = (0..len as i32).map(|i| i % 61).collect();
        Example { labels: input_ids[1..].iter().copied().chain([IGNORE_INDEX]).collect(), input_ids }
    };
    PackedBatch::from_examples(&lengths.iter().map(document).collect::<Vec<_>>())
}

fn trainer(device: &Device, config: &str, method: MethodConfig, switches: Switches) -> Trainer {
    let config = ModelConfig::from_hf_json(config).unwrap();
    let lora = lora_spec(&method);
    let setup = TrainerSetup { method, optimizer: OptimizerConfig::default(), switches, seed: 1, total_steps: 10 };
    let model = Transformer::random(&config, device, setup.form(lora.as_ref()), 1).unwrap();
    Trainer::new(model, setup).unwrap()
}

fn switches(activations: Activations) -> Switches {
    let offload = OffloadPolicy { buffers: 2, force: true, ..OffloadPolicy::default() };
    Switches { activations, offload, ..Switches::default() }
}

/// Steps of which each is queued; the last report comes with the flush.
fn steps(trainer: &mut Trainer, batches: &[PackedBatch], count: usize) {
    for _ in 0..count {
        assert!(matches!(trainer.step(batches, 0.0, &NEVER).unwrap(), Stepped::Submitted(_)));
    }
    let report = trainer.flush().unwrap().unwrap();
    assert_eq!((report.loss, report.grad_norm), (0.0, 0.0), "nothing is computed");
}

fn peak(device: &Device, category: MemoryCategory) -> u64 {
    device.memory().categories.into_iter().find(|bytes| bytes.category == category).unwrap().peak_bytes
}

#[test]
fn golden_families_train_on_a_device_that_does_nothing_and_allocate_once() {
    for family in Family::all() {
        for activations in [Activations::Keep, Activations::Recompute, Activations::Offload] {
            let device = Device::recording(facts());
            let gpu = gpu(&device);
            let mut trainer = family.lora_trainer(&device, activations);
            trainer.set_switches(switches(activations));
            let batch = family.batch();
            let batches = std::slice::from_ref(&batch);
            let mut counters = vec![gpu.counters()];
            let mut memory = Vec::new();
            for _ in 0..4 {
                steps(&mut trainer, batches, 1);
                counters.push(gpu.counters());
                memory.push((device.memory().now_bytes, device.memory().peak_bytes, gpu.arena_bytes(Pool::Pass)));
            }
            let launches: Vec<u64> = counters.windows(2).map(|pair| (pair[1] - pair[0]).launches).collect();
            assert!(launches[0] > 50, "{}: {launches:?}", family.name);
            assert_eq!(launches[2], launches[3], "{}", family.name);
            assert_eq!(trainer.unrecorded(), None, "passes are recorded as on a GPU");
            assert_eq!((counters[4] - counters[2]).allocations, 0, "{}", family.name);
            assert_eq!(memory[2], memory[3], "{}: two steps alike take the same", family.name);
            assert_eq!(memory[0].2, memory[3].2, "{}: a recorded pass takes the places of the first", family.name);
            assert_eq!(peak(&device, MemoryCategory::OffloadBuffers) > 0, activations == Activations::Offload);
            drop(trainer);
            assert_eq!(device.memory().now_bytes, 0, "{}: everything is given back", family.name);
        }
    }
}

#[test]
fn peaks_by_category_are_what_arithmetic_says() {
    let config = ModelConfig::from_hf_json(LLAMA_1B).unwrap();
    let (hidden, inner, layers) = (config.hidden_size, config.intermediate_size, config.num_hidden_layers);
    let (q, kv, vocab) = (config.q_size(), config.kv_size(), config.vocab_size);
    let method = MethodConfig { r: 16, ..MethodConfig::default() };
    let tokens = 2048;
    let linears =
        [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden)];
    let adapters = 4 * 16 * layers * linears.iter().map(|(inputs, outputs)| inputs + outputs).sum::<usize>();
    let stride = |columns: usize| columns.next_multiple_of(64);
    // Weights of one input with their adapters, in rows of whole lines; table, norms.
    let matrices = (q + 2 * kv + 48) * stride(hidden + 48)
        + (hidden + 16) * stride(q + 16)
        + (2 * inner + 32) * stride(hidden + 32)
        + (hidden + 16) * stride(inner + 16);
    let weights = 2 * (layers * (matrices + 2 * hidden) + vocab * hidden + hidden);

    for (activations, inputs) in
        [(Activations::Recompute, layers), (Activations::Offload, 1), (Activations::Keep, layers)]
    {
        let device = Device::recording(facts());
        let mut trainer = trainer(&device, LLAMA_1B, method.clone(), switches(activations));
        steps(&mut trainer, &[pack(&[tokens])], 3);
        assert_eq!(peak(&device, MemoryCategory::Weights), weights as u64);
        assert_eq!(peak(&device, MemoryCategory::Adapters), adapters as u64);
        assert_eq!(peak(&device, MemoryCategory::Gradients), adapters as u64);
        let optimizer = peak(&device, MemoryCategory::Optimizer);
        assert!((2 * adapters as u64..2 * adapters as u64 + (1 << 16)).contains(&optimizer), "{optimizer}");
        let input = 2 * tokens * hidden;
        // q, k, v, attention's output with its statistics, the middle of the stream, gate and up.
        let block = 2 * tokens * (q + 2 * kv + stride(q + 16) + hidden + stride(2 * inner + 32))
            + 4 * tokens * config.num_attention_heads;
        // Where inputs are not kept, the z of both.
        let z = 2 * tokens * (48 + 32);
        let kept = peak(&device, MemoryCategory::Activations);
        let (want, slack) = match activations {
            // And the statistics of a norm that is not kept.
            Activations::Keep => (layers * (input + block + z) + input + 4 * tokens, 0),
            _ => (inputs * input + block, 2 * input + z),
        };
        assert!((want as u64..=(want + slack) as u64).contains(&kept), "{activations:?}: {kept}, {want} by hand");
        let buffers = if activations == Activations::Offload { input } else { 0 };
        assert_eq!(peak(&device, MemoryCategory::OffloadBuffers), buffers as u64);
        // Beside the memory for uploads, and that for results of steps.
        let pinned = (8 << 20) + if activations == Activations::Offload { (layers - 1) * input } else { 0 };
        let locked = gpu(&device).pinned_bytes().peak;
        assert!((pinned as u64..pinned as u64 + 64).contains(&locked), "{activations:?}: {locked} bytes are locked");
    }
}

#[test]
fn what_a_recording_device_measures_is_what_one_slab_must_have() {
    let run = |free_bytes: Option<u64>, first: Option<[u64; 2]>| {
        let device = Device::recording(RecordingFacts { free_bytes, ..facts() });
        let gpu = gpu(&device);
        for (pool, bytes) in [Pool::Lasting, Pool::Pass].into_iter().zip(first.into_iter().flatten()) {
            gpu.set_first_slab(pool, bytes);
        }
        let mut trainer = trainer(&device, LLAMA_1B, MethodConfig::default(), switches(Activations::Recompute));
        steps(&mut trainer, &[pack(&[1500, 500]), pack(&[700, 900])], 3);
        [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool))
    };
    let reach = run(None, None).map(|bytes| bytes.reach);
    let whole = |bytes: u64| bytes.next_multiple_of(2 << 20);
    let in_one = run(Some(1 << 40), Some(reach));
    assert_eq!(in_one.map(|bytes| bytes.reach), reach);
    assert_eq!(in_one.map(|bytes| bytes.slabs), reach.map(whole), "no second slab was asked for");
    // Without it slabs come as they are needed, and something is lost between them.
    let grown = run(Some(1 << 40), None);
    assert!(grown.iter().zip(&reach).all(|(grown, &reach)| grown.slabs > whole(reach)), "{grown:?} against {reach:?}");
}

#[test]
fn memory_that_is_not_there_is_refused_as_by_a_driver() {
    let facts = RecordingFacts { free_bytes: Some(3 << 30), ..facts() };
    let device = Device::recording(facts);
    let mut trainer = trainer(&device, LLAMA_1B, MethodConfig::default(), switches(Activations::Keep));
    let before = device.available_bytes().unwrap();
    assert!(before < 1 << 30, "weights are in use: {before}");
    let error = trainer.step(&[pack(&[8192])], 0.0, &NEVER).unwrap_err();
    let OutOfMemory { wanted_bytes, free_bytes, .. } = error.downcast_ref().unwrap();
    assert!(wanted_bytes > free_bytes, "{error:#}");
    steps(&mut trainer, &[pack(&[64])], 2);
}

#[test]
fn full_fine_tuning_and_masks_take_their_memory_too() {
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    let device = Device::recording(facts());
    let mut trainer_of_all = trainer(&device, LLAMA_1B, full, switches(Activations::Recompute));
    steps(&mut trainer_of_all, &[pack(&[512])], 2);
    let parameters = ModelConfig::from_hf_json(LLAMA_1B).unwrap().num_parameters();
    assert_eq!(peak(&device, MemoryCategory::Gradients), 4 * parameters);
    // Masters and both moments.
    let optimizer = peak(&device, MemoryCategory::Optimizer);
    assert!((12 * parameters..12 * parameters + (1 << 20)).contains(&optimizer), "{optimizer}");
    let device = Device::recording(facts());
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    steps(&mut trainer(&device, LLAMA_1B, full, in_host()), &[pack(&[512])], 2);
    let (optimizer, locked) = (peak(&device, MemoryCategory::Optimizer), gpu(&device).pinned_bytes().peak);
    assert!(
        optimizer < 1 << 20 && locked > 12 * parameters,
        "{optimizer} bytes on the device, {locked} in host memory"
    );

    let metadata = |attention| {
        let device = Device::recording(facts());
        let masked = Switches { attention, ..switches(Activations::Recompute) };
        steps(&mut trainer(&device, LLAMA_1B, MethodConfig::default(), masked), &[pack(&[8192])], 3);
        peak(&device, MemoryCategory::Metadata)
    };
    let mask = (8192 * 8192 / 8) as u64;
    let (varlen, masked) = (metadata(AttentionPath::Varlen), metadata(AttentionPath::Masked));
    // The one that was built, and the one that the graph reads.
    assert!((varlen + 2 * mask..varlen + 4 * mask).contains(&masked), "{masked} against {varlen}");
}

#[test]
fn a_model_of_32_billion_parameters_takes_no_memory_of_the_host() {
    let tokens = 16_384;
    let device = Device::recording(facts());
    let process_bytes = || device.memory().process_bytes;
    let before = process_bytes();
    let mut trainer = trainer(&device, QWEN3_32B, MethodConfig::default(), switches(Activations::Recompute));
    steps(&mut trainer, &[pack(&[tokens])], 2);
    let config = ModelConfig::from_hf_json(QWEN3_32B).unwrap();
    assert!(device.memory().peak_bytes > 2 * config.num_parameters());
    let inputs = (2 * bucket(tokens) * config.hidden_size * config.num_hidden_layers) as u64;
    assert!(peak(&device, MemoryCategory::Activations) > inputs);
    if let Some((before, after)) = before.zip(process_bytes()) {
        assert!(after < before + (1 << 30), "{} bytes of host memory for a plan", after - before);
    }
}

fn in_host() -> Switches {
    let memory =
        MemoryPolicy { embedding: Placement::Host, optimizer_state: Placement::Host, ..MemoryPolicy::default() };
    Switches { memory, ..switches(Activations::Recompute) }
}

/// The choice about a placement, if the run tells of it.
fn told(trainer: &Trainer, placement: Optimization) -> Option<(bool, String)> {
    let choice = trainer.choices().into_iter().find(|choice| choice.optimization == placement)?;
    Some((choice.on, choice.why))
}

#[test]
fn what_lies_in_host_memory_takes_none_of_the_device() {
    let config = ModelConfig::from_hf_json(QWEN3_8B).unwrap();
    let table = (2 * config.vocab_size * config.hidden_size) as u64;
    let method = MethodConfig { r: 16, ..MethodConfig::default() };
    for bits in [32, 8] {
        let run = |switches: Switches| {
            let device = Device::recording(facts());
            let lora = lora_spec(&method);
            let form = Form { lora: lora.as_ref(), embedding: switches.memory.embedding, ..Form::default() };
            let model = Transformer::random(&config, &device, form, 1).unwrap();
            let optimizer = OptimizerConfig { bits, ..OptimizerConfig::default() };
            let setup = TrainerSetup { method: method.clone(), optimizer, switches, seed: 1, total_steps: 10 };
            let mut trainer = Trainer::new(model, setup).unwrap();
            steps(&mut trainer, &[pack(&[512])], 3);
            let tells = [Optimization::HostEmbedding, Optimization::HostOptimizerState]
                .map(|placement| told(&trainer, placement));
            let peaks = [MemoryCategory::Weights, MemoryCategory::Optimizer].map(|category| peak(&device, category));
            (peaks, device.memory(), tells, trainer.num_trainable())
        };
        let (on_device, before, silent, adapters) = run(switches(Activations::Recompute));
        let (in_host, after, tells, _) = run(in_host());
        assert_eq!(silent, [None, None], "a run tells of what was asked for");
        let state = on_device[1] - in_host[1];
        // 32 bits: eight bytes a value; 8 bits: two and eight for each 256, and small matrices as before.
        let want = if bits == 32 { 8 * adapters } else { 2 * adapters + adapters / 32 };
        assert!(state.abs_diff(want) < 1 << 20, "{bits} bits: {state} bytes of state, {want} by hand");
        assert!(in_host[1] < 1 << 20, "the table of tensors stays: {in_host:?}");
        assert_eq!(on_device[0] - in_host[0], table);
        // The f32 values of the adapters go with their moments.
        let moved = table + state + 4 * adapters;
        assert_eq!(before.peak_bytes - after.peak_bytes, moved);
        let locked = after.pinned.unwrap().peak - before.pinned.unwrap().peak;
        assert!((moved..moved + (moved >> 5) + (8 << 20)).contains(&locked), "{locked} bytes are locked for {moved}");
        let [embedding, moments] = tells.map(Option::unwrap);
        assert!(embedding.0 && embedding.1.contains("GiB are read over the bus"), "{embedding:?}");
        assert!(moments.0 && moments.1.ends_with("of moments and exact weights go over the bus"), "{moments:?}");
    }
}

#[test]
fn what_host_memory_has_no_room_for_stays_on_the_device_and_the_reason_is_said() {
    // Half of it may be locked: enough for some of the moments.
    let device = Device::recording(RecordingFacts { host_bytes: Some(256 << 20), ..facts() });
    let mut limited = trainer(&device, QWEN3_8B, MethodConfig { r: 16, ..MethodConfig::default() }, in_host());
    steps(&mut limited, &[pack(&[512])], 2);
    let (on, why) = told(&limited, Optimization::HostEmbedding).unwrap();
    assert!(!on && why.contains("half of what is free is 128.00 MiB"), "{why}");
    let (on, why) = told(&limited, Optimization::HostOptimizerState).unwrap();
    assert!(on && why.contains("; the rest is on the device: ") && why.contains("128.00 MiB"), "{why}");
    assert!(gpu(&device).pinned_bytes().peak <= (128 << 20) + 64, "and what results of steps are copied to");

    let device = Device::recording(facts());
    let mut tied = trainer(&device, LLAMA_1B, MethodConfig::default(), in_host());
    steps(&mut tied, &[pack(&[512])], 2);
    assert_eq!(
        told(&tied, Optimization::HostEmbedding).unwrap(),
        (false, "the head multiplies by the same table".into())
    );
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    let all = trainer(
        &device,
        &LLAMA_1B.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"),
        full,
        in_host(),
    );
    assert_eq!(told(&all, Optimization::HostEmbedding).unwrap(), (false, "it trains".into()));

    let shared = DeviceFacts { integrated: true, ..DeviceFacts::assumed(24 << 30) };
    let device =
        Device::recording(RecordingFacts { host_bytes: Some(1 << 40), ..RecordingFacts::unbounded(shared, true) });
    let trainer = trainer(&device, LLAMA_1B, MethodConfig::default(), in_host());
    let (on, why) = told(&trainer, Optimization::HostOptimizerState).unwrap();
    assert_eq!((on, why.as_str()), (false, "host and device share their memory here"));
}

#[test]
fn what_the_device_has_no_room_for_stays_in_host_memory_and_the_run_goes_on() {
    // More state than the memory of a pass, which is given back when memory is short.
    let method = MethodConfig { r: 128, ..MethodConfig::default() };
    let run = |free_bytes| {
        let device = Device::recording(RecordingFacts { free_bytes, ..facts() });
        let mut trainer = trainer(&device, QWEN3_8B, method.clone(), in_host());
        steps(&mut trainer, &[pack(&[512])], 2);
        let reach = [Pool::Lasting, Pool::Pass].map(|pool| gpu(&device).arena_bytes(pool).reach);
        (device, trainer, reach.iter().sum::<u64>())
    };
    let (_, _, needed) = run(None);
    let (device, mut trainer, _) = run(Some(needed + (512 << 20)));
    let before = device.memory();
    let memory = MemoryPolicy { optimizer_state: Placement::Device, ..in_host().memory };
    trainer.set_switches(Switches { memory, ..in_host() });
    device.check().unwrap();
    let (on, why) = told(&trainer, Optimization::HostOptimizerState).unwrap();
    assert!(on && why.contains("it stays there: out of memory"), "{why}");
    assert_eq!(trainer.switches(), in_host(), "switches say what is");
    let after = device.memory();
    assert_eq!(after.now_bytes, before.now_bytes, "what was taken on the way is given back");
    assert_eq!(after.pinned.unwrap().now, before.pinned.unwrap().now);
    steps(&mut trainer, &[pack(&[512])], 2);
}

#[test]
fn what_lies_where_can_change_between_steps() {
    let device = Device::recording(facts());
    let mut trainer = trainer(&device, QWEN3_8B, MethodConfig::default(), switches(Activations::Recompute));
    steps(&mut trainer, &[pack(&[512])], 2);
    let on_device = (device.memory().now_bytes, gpu(&device).pinned_bytes().now);
    trainer.set_switches(in_host());
    steps(&mut trainer, &[pack(&[512])], 2);
    let in_host = (device.memory().now_bytes, gpu(&device).pinned_bytes().now);
    assert!(in_host.0 + (1 << 30) < on_device.0 && in_host.1 > on_device.1 + (1 << 30), "{on_device:?} {in_host:?}");
    trainer.set_switches(switches(Activations::Recompute));
    steps(&mut trainer, &[pack(&[512])], 2);
    let back = (device.memory().now_bytes, gpu(&device).pinned_bytes().now);
    assert_eq!(back.0, on_device.0);
    assert!(back.1 - on_device.1 <= 4 << 20, "one slab at most waits for what comes next");
}

/// Two blocks of Llama 3 8B's sizes, and a head that takes little.
const LLAMA_8B_SLICE: &str = r#"{
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "vocab_size": 1024,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5
}"#;

#[test]
fn a_document_of_two_hundred_thousand_tokens_launches_only_what_a_gpu_launches() {
    let tokens = 200_000;
    let lora = |r, lora_dropout| MethodConfig { r, lora_dropout, ..MethodConfig::default() };
    let full = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    for vendor_library in [true, false] {
        for (method, mlp_rows) in [(lora(32, 0.0), 0), (lora(32, 0.0), 4096), (lora(40, 0.1), 0), (full.clone(), 0)] {
            for attention in [AttentionPath::Varlen, AttentionPath::Masked] {
                let device = Device::recording(RecordingFacts {
                    host_bytes: Some(1 << 40),
                    ..RecordingFacts::unbounded(DeviceFacts::assumed(24 << 30), vendor_library)
                });
                let metadata = MetadataPolicy { metadata: Metadata::Published, capacity: 0 };
                let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
                let switches = Switches { attention, metadata, memory, ..switches(Activations::Recompute) };
                let mut trainer = trainer(&device, LLAMA_8B_SLICE, method.clone(), switches);
                // A launch that no GPU takes would be the step's error.
                steps(&mut trainer, &[pack(&[tokens])], 1);
            }
        }
    }
}

#[test]
fn a_long_document_holds_what_a_block_says_it_holds() {
    let tokens = 65_536;
    let unit = (2 * tokens * 4096) as u64;
    let held = |mlp_rows, qk_norm: bool| {
        let device = Device::recording(facts());
        let config = LLAMA_8B_SLICE.replace("\"llama\"", if qk_norm { "\"qwen3\"" } else { "\"llama\"" });
        let memory = MemoryPolicy { mlp_rows, ..MemoryPolicy::default() };
        let offload = OffloadPolicy { buffers: 1, force: true, ..OffloadPolicy::default() };
        let switches = Switches { memory, offload, ..switches(Activations::Offload) };
        let method = MethodConfig { r: 8, ..MethodConfig::default() };
        steps(&mut trainer(&device, &config, method, switches), &[pack(&[tokens])], 2);
        let at_peak = gpu(&device).ledger().at_peak().unwrap();
        let of_passes = |category| matches!(category, MemoryCategory::Activations | MemoryCategory::Workspace);
        let bytes: u64 = at_peak.into_iter().filter(|(category, _)| of_passes(*category)).map(|(_, bytes)| bytes).sum();
        bytes as f64 / unit as f64
    };
    // Beside what is counted there: statistics of rows, columns of adapters, and what a product needs.
    for (qk_norm, counted) in [(false, 7.0), (true, 8.25)] {
        let tiled = held(1024, qk_norm);
        assert!((counted..counted + 0.4).contains(&tiled), "{tiled} units, {counted} are counted");
        let whole = held(0, qk_norm);
        assert!(whole > tiled + 5.0, "{whole} units without tiles, {tiled} with them");
    }
}
