//! Reports of comparisons as test data.

use tandem::gui::current_comparison::Findings;
use tandem::session::compare::{
    Arm, ArmMemory, Better, CompareEvent, CompareReport, Difference, PairDifferences, Parity, Prediction, Quantities,
    Setting, Variation, Verdict, VerdictKind,
};
use tandem::session::config::RunConfig;
use tandem::session::{Phase, PhaseTime, Switches};

use super::noise;

fn difference(
    name: &str,
    unit: &str,
    decimals: usize,
    [a, b]: [f64; 2],
    half: Option<f64>,
    better: Better,
) -> Difference {
    let difference = a - b;
    Difference {
        name: name.into(),
        unit: unit.into(),
        decimals,
        a: Some(a),
        b: Some(b),
        difference: Some(difference),
        interval: half.map(|half| [difference - half, difference + half]),
        exact: half.is_none(),
        percent: (better != Better::Neither && unit != "%" && b != 0.0).then(|| 100.0 * difference / b),
        better,
    }
}

fn phases(exposed: f64, attention: f64) -> Vec<PhaseTime> {
    let time = |(phase, ms)| PhaseTime { phase, forward_ms: None, backward_ms: Some(ms), step_ms: None };
    let times = [
        (Phase::Attention, attention),
        (Phase::Mlp, 380.0),
        (Phase::HeadLoss, 59.8),
        (Phase::Recompute, 129.6),
        (Phase::ExposedCopy, exposed),
        (Phase::Metadata, 0.4),
        (Phase::Optimizer, 3.0),
        (Phase::HostWait, 1.0),
    ];
    times.map(time).to_vec()
}

/// A comparison of two buffers with one.
pub fn two_buffers() -> CompareReport {
    let pairs: Vec<f64> = (0..40).map(|i| -143.5 + 12.0 * (noise(i, 5) - 0.5)).collect();
    let losses: Vec<f64> = (0..6).map(|i| 0.92 + 0.2 * (noise(i, 9) - 0.5)).collect();
    let arm = |label: &str, description: &str| Arm {
        label: label.into(),
        description: description.into(),
        switches: Switches::default(),
    };
    let lower = Better::Lower;
    CompareReport {
        title: "Overlapped copies, on against off".into(),
        variation: Variation::Buffers,
        model: "Qwen3-8B".into(),
        device: "NVIDIA H200, bf16".into(),
        workload: "1,024 tokens a step in 1 micro-batches on average · same weights, same batches, same seed".into(),
        arms: [
            arm("A on", "two buffers: copies beside compute"),
            arm("B off", "one buffer: copy, then compute, in turns"),
        ],
        pairs: 40,
        pairs_planned: 40,
        steps_per_block: 5,
        rows: vec![
            difference("Step", "ms", 2, [697.31, 840.84], Some(1.18), lower),
            difference("Tokens/s", "", 0, [1440.0, 1194.0], Some(2.2), Better::Higher),
            difference("Forward", "ms", 2, [172.71, 172.73], Some(0.09), lower),
            difference("Backward", "ms", 2, [520.84, 664.35], Some(1.09), lower),
            difference("Metadata", "ms", 3, [0.381, 0.380], Some(0.004), lower),
            difference("Metadata builds", "", 0, [2.0, 2.0], None, lower),
            difference("Recompute", "ms", 2, [129.61, 129.58], Some(0.08), lower),
            difference("Exposed copy", "ms", 2, [4.1, 147.6], Some(0.41), lower),
            difference("Copy hidden", "%", 1, [98.6, 50.0], Some(0.2), Better::Higher),
            difference("Peak memory", "GiB", 2, [9.03, 8.95], None, lower),
            difference("Host memory of inputs", "GiB", 2, [3.02, 3.02], None, lower),
            difference("Kernel launches", "", 0, [2310.0, 2310.0], None, lower),
            difference("Host syncs", "", 0, [0.0, 0.0], None, lower),
            difference("Loss", "", 5, [0.91421, 0.91421], None, Better::Neither),
            difference("Gradient norm", "", 5, [0.41331, 0.41331], None, Better::Neither),
        ],
        losses: [losses.clone(), losses],
        grad_norms: [vec![0.4; 6], vec![0.4; 6]],
        phases: [phases(4.1, 120.1), phases(147.6, 120.2)],
        step_ms: [697.31, 840.84],
        not_attributed_ms: [0.7, 0.7],
        pair_differences: PairDifferences { ms: pairs, mean_ms: -143.53, interval_ms: Some([-144.71, -142.35]) },
        predictions: vec![Prediction {
            name: "Overlapped copies".into(),
            formula: "−(L−1)·min(c, g) a micro-batch".into(),
            predicted_ms: Some(-143.5),
            measured_ms: Some(-143.53),
            half_interval_ms: Some(1.18),
            gain_percent: Some(20.6),
            published: Some("steps/s +8.40 % (8B), +6.70 % (14B), +4.61 % (32B) on a B200".into()),
            why: "as predicted".into(),
        }],
        quantities: Quantities {
            num_blocks: 36,
            num_micro_batches: 1.0,
            num_offloaded: Some(36),
            build_ms: Some(0.19),
            builds_avoided: None,
            reload_ms: Some(4.1),
            block_backward_ms: Some(13.3),
            step_ms: 840.84,
        },
        settings: vec![Setting { field: "optimizations.offload_buffers".into(), a: "2".into(), b: "1".into() }],
        parity: Parity {
            bit_equal: true,
            repeats: true,
            must_be_bit_equal: true,
            max_loss_difference: 0.0,
            max_grad_norm_difference: 0.0,
            max_loss: 4.0,
        },
        memory: [ArmMemory::default(); 2],
        verdict: Verdict {
            kind: VerdictKind::Faster,
            sentence: "On is 1.21 times as fast, takes 86.00 MiB more memory, and learns the same.".into(),
            detail: "144 ms less a step (95 % interval 142 to 145). Every loss and gradient norm has the same bits."
                .into(),
        },
        notes: Vec::new(),
    }
}

/// A second one, in which attention by a mask sums in another order, and which is slower here.
pub fn slower() -> CompareReport {
    let mut report = two_buffers();
    report.title = "Variable-length attention, on against off".into();
    report.variation = Variation::Attention;
    report.losses[1].iter_mut().enumerate().for_each(|(i, loss)| *loss += 0.002 * (noise(i as u64, 3) - 0.5));
    report.parity = Parity {
        bit_equal: false,
        repeats: true,
        must_be_bit_equal: false,
        max_loss_difference: 9.1e-4,
        max_grad_norm_difference: 2.2e-3,
        max_loss: 4.0,
    };
    report.pair_differences =
        PairDifferences { ms: vec![12.1, 14.0, 11.2], mean_ms: 12.43, interval_ms: Some([8.83, 16.03]) };
    report.pairs = 3;
    report.rows[0] = difference("Step", "ms", 2, [709.74, 697.31], Some(3.6), Better::Lower);
    report.verdict.kind = VerdictKind::Slower;
    report.verdict.sentence = "Slower here: on is 1.8 % slower, and learns the same up to rounding.".into();
    report.notes = vec!["neither arm uses CUDA graphs: without the metadata cache the host acts within a pass".into()];
    report
}

/// Comparisons that are done.
pub fn findings(reports: Vec<CompareReport>) -> Findings {
    let mut config = RunConfig::default();
    config.model.path = "/models/Qwen3-8B".into();
    config.packing.pack_len = 1024;
    let mut found = Findings::new(&config);
    reports.into_iter().for_each(|report| found.apply(CompareEvent::Finished { report: Box::new(report) }));
    found
}
