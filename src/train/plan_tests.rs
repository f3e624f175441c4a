//! Plans of known models on assumed machines.

use super::*;
use crate::tensor::cuda::PinnedBytes;
use crate::train::config::{
    Dequantized, DequantizedChoice, MemoryPolicy, MethodConfig, MethodKind, OptimizerConfig, Placement,
    PlacementChoice, Switch,
};

const LLAMA_1B: &str = include_str!("../../assets/models/llama-3.2-1b.json");
const QWEN3_8B: &str = include_str!("../../assets/models/qwen3-8b.json");

const GIB: u64 = 1 << 30;

fn planner(config: &str, tokens: usize, vram_bytes: u64) -> Planner {
    let setup = TrainerSetup {
        method: MethodConfig::default(),
        optimizer: OptimizerConfig::default(),
        switches: Switches::default(),
        seed: 0,
        total_steps: 1,
    };
    Planner {
        config: ModelConfig::from_hf_json(config).unwrap(),
        setup,
        activations: ActivationsChoice::Auto,
        memory: Some(MemoryConfig {
            optimizer_state: PlacementChoice::Device,
            mlp_rows: tokens,
            middle: Switch::Off,
            qkv: Switch::Off,
            ..MemoryConfig::default()
        }),
        work: Workload { tokens, longest: tokens, batches: 1 },
        machine: Machine { host_bytes: Some(64 * GIB), ..Machine::assumed(vram_bytes, true) },
    }
}

fn kept(plan: &MemoryPlan) -> (Activations, usize) {
    let Switches { activations, offload, .. } = plan.choice().switches;
    (activations, offload.buffers)
}

#[test]
fn the_first_way_that_fits_is_chosen_and_the_ways_get_leaner() {
    let needs: Vec<u64> = {
        let plan = planner(LLAMA_1B, 8192, 1000 * GIB).plan();
        assert_eq!((plan.chosen, kept(&plan).0), (0, Activations::Keep), "with room for all nothing is computed again");
        assert!(plan.why.contains("this takes") && plan.advice.is_empty(), "{}", plan.why);
        plan.tried.iter().map(|tried| tried.need.as_ref().unwrap().vram_bytes()).collect()
    };
    assert!(needs.is_sorted_by(|a, b| a > b), "{needs:?}");
    let ways =
        [(Activations::Keep, 0), (Activations::Recompute, 0), (Activations::Offload, 2), (Activations::Offload, 1)];
    for (number, (&need, way)) in needs.iter().zip(ways).enumerate() {
        // As much as it takes, and the margin.
        let plan = planner(LLAMA_1B, 8192, need + need / 60).plan();
        assert_eq!((plan.chosen, kept(&plan)), (number, way), "{}", plan.why);
        assert!(plan.fits());
        let passed = plan.why.matches(" would take ").count();
        assert_eq!(passed, number, "each way that was passed over is named: {}", plan.why);
    }
}

#[test]
fn parts_add_up_to_the_peak_and_slabs_hold_it() {
    let planner = planner(LLAMA_1B, 4096, 24 * GIB);
    for tried in planner.plan().tried {
        let need = tried.need.unwrap();
        assert_eq!(need.parts.iter().map(|part| part.bytes).sum::<u64>(), need.peak_bytes);
        assert!(need.slab_bytes() >= need.peak_bytes && need.gap_bytes() < need.peak_bytes / 10, "{need:?}");
        assert_eq!(need.vram_bytes(), need.slab_bytes() + ASSUMED_CONTEXT + ASSUMED_LIBRARY_KERNELS);
        let inputs = if tried.switches.activations == Activations::Offload { 15 * 4096 * 2048 * 2 } else { 0 };
        assert!((inputs..inputs + (9 << 20)).contains(&need.pinned_bytes), "{}", need.pinned_bytes);
    }
}

#[test]
fn host_memory_takes_what_is_read_in_rows_before_blocks_keep_less_and_state_at_the_end() {
    let mut planner = planner(QWEN3_8B, 2048, 1000 * GIB);
    planner.setup.method.kind = MethodKind::Qlora;
    planner.memory = Some(MemoryConfig { middle: Switch::Off, qkv: Switch::Off, ..MemoryConfig::default() });
    let plan = planner.plan();
    let ways: Vec<(Activations, MemoryPolicy)> =
        plan.tried.iter().map(|tried| (tried.switches.activations, tried.switches.memory)).collect();
    // Four of what blocks keep, three of where things lie; with the state in host memory once more, and in tiles where there are any.
    assert_eq!(ways.len(), 19);
    let host = MemoryPolicy { embedding: Placement::Host, ..MemoryPolicy::default() };
    assert_eq!(
        ways[1..4],
        [
            (Activations::Keep, MemoryPolicy::default()),
            (Activations::Keep, host),
            (Activations::Recompute, MemoryPolicy { dequantized: Dequantized::Resident, ..MemoryPolicy::default() }),
        ]
    );
    assert!(ways[12..].iter().all(|(_, memory)| memory.optimizer_state == Placement::Host));
    let need = |number: usize| plan.tried[number].need.as_ref().unwrap();
    let table = (2 * planner.config.vocab_size * planner.config.hidden_size) as u64;
    assert_eq!(need(1).peak_bytes - need(2).peak_bytes, table);
    let held: Vec<&HostPart> = need(2).host.iter().filter(|part| part.what == "embedding").collect();
    assert!(held.len() == 1 && held[0].bytes == table && need(2).pinned_bytes > table, "{held:?}");
    assert!(need(12).host.iter().any(|part| part.what == "optimizer" && part.bytes > 300 << 20), "{:?}", need(12).host);
    assert_eq!(need(12).host.iter().map(|part| part.bytes).sum::<u64>(), need(12).host_bytes);
    // Where the head multiplies by the table it stays, and what the configuration says stays, too.
    planner.memory.as_mut().unwrap().optimizer_state = PlacementChoice::Device;
    planner.config = ModelConfig::from_hf_json(LLAMA_1B).unwrap();
    assert_eq!(planner.plan().tried.len(), 11, "what blocks keep, whether weights stay dequantized, and tiles");
}

#[test]
fn where_nothing_fits_the_advice_does() {
    let planner = planner(QWEN3_8B, 16_384, 35 * GIB / 2);
    let plan = planner.plan();
    assert!(!plan.fits() && plan.choice().against.is_some());
    assert_eq!(kept(&plan), (Activations::Offload, 1), "the leanest stands for what is missing");
    let tokens: usize = {
        let text = plan.advice.iter().find(|text| text.contains("pack_len = ")).unwrap();
        text.split("pack_len = ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
    };
    let with = |tokens| Planner { work: Workload { tokens, longest: tokens, batches: 1 }, ..planner.clone() }.plan();
    assert!(with(tokens).fits() && !with(tokens + 64).fits(), "{tokens} is the longest that fits");
    let card = plan.advice.iter().find(|text| text.contains("a card with")).unwrap();
    let gib: f64 = card.split("a card with ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    let roomy = Machine { vram_bytes: ((gib + 0.01) * GIB as f64) as u64, ..planner.machine.clone() };
    assert!(Planner { machine: roomy, ..planner.clone() }.plan().fits(), "{card}");
    // The weights alone are too much.
    let hopeless = Planner { machine: Machine::assumed(8 * GIB, true), ..planner }.plan();
    assert!(!hopeless.advice.iter().any(|text| text.contains("pack_len")), "{:?}", hopeless.advice);
}

#[test]
fn what_the_configuration_sets_is_kept_and_what_it_closes_is_said() {
    let mut planner = planner(LLAMA_1B, 16_384, 7 * GIB);
    planner.activations = ActivationsChoice::Keep;
    let plan = planner.plan();
    assert_eq!((plan.tried.len(), kept(&plan).0, plan.fits()), (1, Activations::Keep, false));
    assert!(plan.advice.iter().any(|text| text.contains("activations = \"recompute\"")), "{:?}", plan.advice);
    planner.activations = ActivationsChoice::Offload;
    planner.machine.vram_bytes = 5 * GIB;
    planner.setup.switches.offload.buffers = 1;
    let plan = planner.plan();
    assert_eq!((plan.tried.len(), kept(&plan)), (1, (Activations::Offload, 1)));
    // Host memory counts too.
    planner.machine.host_bytes = Some(100 << 20);
    let plan = planner.plan();
    assert!(plan.choice().against.as_ref().unwrap().contains("host memory"), "{:?}", plan.choice());
}

#[test]
fn a_method_that_does_not_fit_is_told_of_a_leaner_one() {
    let mut planner = planner(LLAMA_1B, 4096, 12 * GIB);
    planner.setup.method = MethodConfig { kind: MethodKind::Full, ..MethodConfig::default() };
    let plan = planner.plan();
    assert!(!plan.fits());
    assert!(plan.advice.iter().any(|text| text.contains("kind = \"lora\"")), "{:?}", plan.advice);
    // Adapters on bf16 weights are still too much here.
    planner.config = ModelConfig::from_hf_json(QWEN3_8B).unwrap();
    let plan = planner.plan();
    assert!(plan.advice.iter().any(|text| text.contains("kind = \"qlora\"")), "{:?}", plan.advice);
}

#[test]
fn weights_stay_dequantized_where_that_fits_before_blocks_keep_less() {
    let mut planner = planner(LLAMA_1B, 4096, 1000 * GIB);
    planner.setup.method.kind = MethodKind::Qlora;
    let plan = planner.plan();
    let ways: Vec<(Activations, Dequantized)> =
        plan.tried.iter().map(|tried| (tried.switches.activations, tried.switches.memory.dequantized)).collect();
    assert_eq!(
        ways[..3],
        [
            (Activations::Keep, Dequantized::Resident),
            (Activations::Keep, Dequantized::Scratch),
            (Activations::Recompute, Dequantized::Resident),
        ]
    );
    let need = |number: usize| plan.tried[number].need.as_ref().unwrap().vram_bytes();
    assert!(need(0) > need(1) + GIB, "{} and {}", need(0), need(1));
    planner.machine.vram_bytes = need(0) - GIB / 2;
    let scratch = planner.plan();
    assert_eq!(scratch.chosen, 1);
    assert!(scratch.why.contains("faster ways of keeping everything would take"), "{}", scratch.why);
    assert!(scratch.choice().setting.contains("dequantized = \"scratch\""), "{}", scratch.choice().setting);
    // What the configuration says is not changed, and it means nothing without weights in 4 bits.
    planner.memory.as_mut().unwrap().dequantized = DequantizedChoice::Scratch;
    assert!(planner.plan().tried.iter().all(|tried| tried.switches.memory.dequantized == Dequantized::Scratch));
    planner.memory.as_mut().unwrap().dequantized = DequantizedChoice::Auto;
    planner.setup.method.kind = MethodKind::Lora;
    assert_eq!(planner.plan().tried.len(), 4);
}

#[test]
fn weights_in_four_bits_take_four_bits() {
    let need = |kind| {
        let mut planner = planner(QWEN3_8B, 2048, 24 * GIB);
        planner.setup.method.kind = kind;
        planner.need(Switches::default()).unwrap()
    };
    let weights = |need: &Need| need.parts.iter().find(|part| part.category == MemoryCategory::Weights).unwrap().bytes;
    let (plain, packed) = (weights(&need(MethodKind::Lora)), weights(&need(MethodKind::Qlora)));
    let config = ModelConfig::from_hf_json(QWEN3_8B).unwrap();
    let unquantized = 2 * 2 * config.vocab_size * config.hidden_size;
    let linear = plain as f64 - unquantized as f64;
    let share = (packed as f64 - unquantized as f64) / linear;
    // 4 bits of 16, and scales: 8 bits for each 64 values.
    assert!((0.25..0.27).contains(&share), "{share}: {packed} of {plain}");
}

#[test]
fn a_run_that_ran_out_of_memory_is_told_one_change_that_fits() {
    let planner = planner(LLAMA_1B, 8192, 1000 * GIB);
    let plan = planner.plan();
    let change = planner.way_out(&plan).unwrap();
    assert!(change.contains("activations = \"recompute\""), "{change}");
    // At the end of the ways packs get shorter.
    let last = MemoryPlan { chosen: plan.tried.len() - 1, ..plan };
    let change = planner.way_out(&last).unwrap();
    assert!(change.contains("pack_len = 7360 "), "{change}");
}

#[test]
fn a_real_device_with_the_slabs_of_the_plan_asks_for_nothing_else() {
    let planner = planner(LLAMA_1B, 2048, 24 * GIB);
    let plan = planner.plan();
    let need = plan.need().unwrap();
    // What a driver has, played by a device with so much and no more.
    let facts = RecordingFacts {
        free_bytes: Some(need.slab_bytes()),
        host_bytes: Some(64 * GIB),
        ..RecordingFacts::unbounded(planner.machine.card.clone(), true)
    };
    let device = Device::recording(facts);
    let Device::Cuda(gpu) = &device else { panic!("a GPU") };
    plan.reserve(gpu);
    let (setup, lora) = (&planner.setup, lora_spec(&planner.setup.method));
    let model = Transformer::random(&planner.config, &device, setup.form(lora.as_ref()), 0).unwrap();
    let mut trainer = Trainer::new(model, planner.setup.clone()).unwrap();
    trainer.follow(&plan);
    let never = AtomicBool::new(false);
    assert!(trainer.rehearse(&largest_batch(plan.work).unwrap(), &never).unwrap());
    // Smaller batches of several sizes, each of which is recorded.
    for tokens in [2048, 1800, 1500, 2000, 900, 1800, 1500, 2000, 900, 2048] {
        let batch = largest_batch(Workload { tokens, longest: 700, batches: 1 }).unwrap();
        trainer.step(&[batch], 0.0, &never).unwrap();
    }
    let slabs = [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool).slabs);
    assert_eq!(slabs, [need.lasting_bytes, need.pass_bytes]);
    assert_eq!(gpu.pinned_bytes(), PinnedBytes { now: need.pinned_bytes, peak: need.pinned_bytes });
    assert_eq!(gpu.ledger().report().peak_bytes, need.peak_bytes);
}

#[test]
fn deviations_are_told_from_a_twentieth_on() {
    assert_eq!(deviation("the peak", 1000, 1049), None);
    assert_eq!(deviation("the peak", 1000, 951), None);
    let told = deviation("the peak", GIB, GIB + GIB / 10).unwrap();
    assert_eq!(told, "the peak: 1.10 GiB where 1.00 GiB were planned (+10.0 %)");
    assert!(deviation("the peak", GIB, GIB - GIB / 10).is_some());
}

#[test]
fn what_is_not_computed_again_is_kept_where_it_fits_before_blocks_keep_less() {
    let mut planner = planner(QWEN3_8B, 8192, 1000 * GIB);
    let memory = planner.memory.as_mut().unwrap();
    (memory.middle, memory.qkv) = (Switch::Auto, Switch::Auto);
    let plan = planner.plan();
    let ways: Vec<(Activations, usize, [bool; 2])> = plan
        .tried
        .iter()
        .map(|Tried { switches: Switches { activations, offload, memory, .. }, .. }| {
            (*activations, offload.buffers, [memory.middle, memory.qkv])
        })
        .collect();
    let first = |way| ways.iter().position(|other| *other == way).unwrap();
    let (nothing, middle, both) = ([false, false], [true, false], [true, true]);
    let order = [
        first((Activations::Keep, 0, nothing)),
        first((Activations::Recompute, 0, both)),
        first((Activations::Recompute, 0, middle)),
        first((Activations::Recompute, 0, nothing)),
        first((Activations::Offload, 2, both)),
        first((Activations::Offload, 2, middle)),
        first((Activations::Offload, 2, nothing)),
        first((Activations::Offload, 1, nothing)),
    ];
    assert!(order.is_sorted(), "{ways:?}");
    assert!(ways.iter().all(|way| (way.0, way.1) != (Activations::Offload, 1) || way.2 == nothing), "{ways:?}");
    // It takes an activation a block; q, k and v are half as large again as the residual stream.
    let need = |number: usize| plan.tried[order[number]].need.as_ref().unwrap();
    let activation = (8192 * planner.config.hidden_size * 2) as u64;
    let blocks = planner.config.num_hidden_layers as u64;
    let more = need(2).peak_bytes - need(3).peak_bytes;
    assert!((blocks - 2..=blocks).contains(&(more / activation)), "{more}");
    let more = need(1).peak_bytes - need(2).peak_bytes;
    assert!((blocks - 2..=blocks).contains(&(more / (activation * 3 / 2))), "{more}");
    // Offloaded some buffers more, and as much host memory again.
    let pinned = |number: usize| need(number).pinned_bytes;
    assert!(need(4).peak_bytes - need(6).peak_bytes <= 7 * activation, "{:?} {:?}", need(4), need(6));
    assert_eq!(pinned(5) - pinned(6), (blocks - 1) * activation);
    assert_eq!(pinned(4) - pinned(5), (blocks - 1) * activation * 3 / 2);
}

#[test]
fn short_packs_are_joined_into_passes_that_keep_a_gpu_busy_or_nearly() {
    for (tokens, batches, want) in [
        (2048, 4, &[8192, 4096, 0][..]),
        (2048, 2, &[4096, 0]),
        (3000, 8, &[6000, 0]),
        (4096, 4, &[8192, 0]),
        (8192, 4, &[0]),
        (2048, 1, &[0]),
    ] {
        let mut planner = planner(LLAMA_1B, tokens, 1000 * GIB);
        planner.work.batches = batches;
        planner.activations = ActivationsChoice::Recompute;
        let mut passes: Vec<usize> =
            planner.plan().tried.iter().map(|tried| tried.switches.memory.pass_tokens).collect();
        passes.dedup();
        assert_eq!(passes, want, "{batches} packs of {tokens}");
    }
}

#[test]
fn what_is_kept_beside_inputs_must_have_room_in_page_locked_memory() {
    // Half of what is free may be page-locked: inputs of 35 blocks of 64 MiB fit, and queries, keys and values beside them do not.
    for (asked, qkv) in [(Switch::Auto, false), (Switch::On, true)] {
        let mut planner = planner(QWEN3_8B, 8192, 1000 * GIB);
        planner.setup.switches.memory.qkv = qkv;
        planner.activations = ActivationsChoice::Offload;
        planner.machine.host_bytes = Some(10 * GIB);
        let memory = planner.memory.as_mut().unwrap();
        (memory.middle, memory.qkv) = (Switch::Auto, asked);
        let plan = planner.plan();
        let both = |tried: &&Tried| tried.switches.memory.middle && tried.switches.memory.qkv;
        let tried = plan.tried.iter().find(both).unwrap();
        let against = tried.against.clone().unwrap_or_default();
        assert!(against.contains("activations wait in pageable memory"), "{asked:?}: {against}");
        let chosen = plan.choice().switches.memory;
        assert_eq!((chosen.middle, chosen.qkv), (!qkv, qkv), "{}", plan.why);
    }
}

#[test]
fn what_a_block_cannot_hide_is_not_offloaded_beside_its_input() {
    let kept = |config| {
        let mut planner = planner(config, 8192, 1000 * GIB);
        planner.activations = ActivationsChoice::Offload;
        let memory = planner.memory.as_mut().unwrap();
        (memory.middle, memory.qkv) = (Switch::Auto, Switch::Auto);
        let plan = planner.plan();
        let MemoryPolicy { middle, qkv, .. } = plan.choice().switches.memory;
        (middle, qkv)
    };
    // At 1B q, k and v and the stream are 8,500 operations a byte, the stream alone 14,800; at 8B both 13,500.
    assert_eq!((kept(LLAMA_1B), kept(QWEN3_8B)), ((true, false), (true, true)));
}
