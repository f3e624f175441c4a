//! Adapters on weights in 4 bits on a GPU.

use tandem::model::loading::Checkpoint;
use tandem::model::transformer::{Form, Transformer};
use tandem::tensor::{Device, Precision};
use tandem::train::config::{Activations, Dequantized, MethodConfig, MethodKind};
use tandem::train::switches::Switches;
use tandem::train::trainer::{Trainer, lora_spec};

use super::super::golden_family::{Family, NEVER, adapter_values, set_adapters};
use super::{gpu, offload, steps};

fn trainer(family: &Family, device: &Device, dequantized: Dequantized, switches: Switches) -> Trainer {
    let method = MethodConfig { kind: MethodKind::Qlora, ..family.method() };
    let (lora, weights) = (lora_spec(&method), method.weight_format(dequantized));
    let checkpoint = Checkpoint::open(&family.folder).unwrap();
    let form = Form { lora: lora.as_ref(), weights, ..Form::default() };
    let model = Transformer::load_unless_stopped(&checkpoint, device, form, &mut |_, _| {}, &NEVER).unwrap().unwrap();
    let mut trainer = Trainer::new(model, family.setup(method, switches.activations, switches.cuda_graphs)).unwrap();
    trainer.set_switches(switches);
    set_adapters(&mut trainer, &family.case);
    trainer
}

#[test]
fn golden_qlora_from_4_bits_equals_qlora_from_their_values_bit_by_bit() {
    let Some(gpu) = gpu() else { return };
    for family in Family::all() {
        let run = |device: &Device, dequantized, activations, cuda_graphs| {
            let switches = Switches { activations, cuda_graphs, offload: offload(2), ..Switches::default() };
            let mut trainer = trainer(&family, device, dequantized, switches);
            let losses: Vec<f64> = steps(&family, &mut trainer, 5).iter().map(|report| report.loss).collect();
            (losses, adapter_values(&trainer))
        };
        let reference = run(&gpu, Dequantized::Resident, Activations::Keep, true);
        for activations in [Activations::Keep, Activations::Recompute, Activations::Offload] {
            for cuda_graphs in [true, false] {
                let same = run(&gpu, Dequantized::Scratch, activations, cuda_graphs) == reference;
                assert!(same, "{}: {activations:?}, graphs {cuda_graphs}", family.name);
            }
        }
        let [exact, bf16] = [Precision::F32, Precision::Bf16].map(|precision| {
            let cpu = Device::cpu(0, precision).unwrap();
            run(&cpu, Dequantized::Scratch, Activations::Recompute, false).0
        });
        println!("{}: {:.5?} on the GPU, {exact:.5?} in f32, {bf16:.5?} in bf16 on the CPU", family.name, reference.0);
        // Elsewhere a close choice of an expert may fall otherwise, which says nothing about arithmetic.
        let is_dense = family.choices().is_none();
        for ((ours, exact), bf16) in reference.0.iter().zip(&exact).zip(&bf16).filter(|_| is_dense) {
            let (ours, bf16) = ((ours - exact).abs() / exact, (bf16 - exact).abs() / exact);
            assert!(
                ours <= 2.0 * bf16.max(1.0 / 512.0),
                "{}: error {ours:.2e}, {bf16:.2e} in bf16 on the CPU",
                family.name
            );
        }
    }
}
