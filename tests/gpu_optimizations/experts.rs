//! Routed experts on a GPU: every routing against the reference, adapters on experts, what the host waits for.

use tandem::formats::safetensors::SafetensorsFile;
use tandem::layers::moe::Choices;
use tandem::model::transformer::Transformer;
use tandem::tensor::{Device, Precision};
use tandem::train::config::{Activations, Routing};
use tandem::train::switches::Switches;
use tandem::train::trainer::Trainer;

use super::super::golden_family::{Family, NEVER, adapter_values, error, set_adapters};
use super::super::gpu;

const ROUTINGS: [Routing; 3] = [Routing::Grouped, Routing::Sorted, Routing::PerExpert];

fn families() -> Vec<Family> {
    let with_experts =
        Family::all().into_iter().filter(|family| family.folder.join("case_experts.safetensors").exists());
    let families: Vec<Family> = with_experts.collect();
    assert!(!families.is_empty(), "no family has experts");
    families
}

/// A trainer of the reference's adapters on experts, at their start values.
fn trainer(family: &Family, case: &SafetensorsFile, device: &Device, routing: Routing) -> Trainer {
    let mut setup = family.setup(family.method_of("expert_adapter_after_4_steps"), Activations::Recompute, true);
    setup.switches.routing = routing;
    let mut trainer = Trainer::new(family.model(device), setup).unwrap();
    set_adapters(&mut trainer, case);
    trainer
}

fn noted(model: &Transformer) -> Vec<Vec<i32>> {
    let k = model.config().moe.as_ref().unwrap().num_experts_per_tok as i32;
    let mut noted = model.choices().unwrap().noted.lock().unwrap().clone();
    // Some for padding behind the batch.
    noted.iter_mut().for_each(|layer| layer.extend((0..64 * k).map(|i| i % k)));
    noted
}

#[test]
fn golden_adapters_on_experts_are_as_near_to_f32_as_on_the_cpu_in_every_routing() {
    let Some(gpu) = gpu() else { return };
    for family in families() {
        let case = SafetensorsFile::open(&family.folder.join("case_experts.safetensors")).unwrap();
        let (batch, want) = ([family.batch()], case.to_f32("lora_loss").unwrap());
        // Choices of f32, step by step.
        let cpu = Device::cpu(0, Precision::F32).unwrap();
        let mut exact = trainer(&family, &case, &cpu, Routing::Grouped);
        let choices: Vec<Vec<Vec<i32>>> = (0..want.len())
            .map(|_| {
                exact.model_mut().set_choices(Some(Choices::default()));
                exact.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap();
                noted(exact.model())
            })
            .collect();
        let run = |device: &Device, routing| {
            let mut trainer = trainer(&family, &case, device, routing);
            let (mut losses, mut worst) = (Vec::new(), Vec::new());
            for given in &choices {
                let given = Some(given.clone());
                trainer.model_mut().set_choices(Some(Choices { given, ..Choices::default() }));
                losses.push(trainer.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap().loss as f32);
                if losses.len() == 1 {
                    let model = trainer.model();
                    worst = model
                        .adapters()
                        .map(|(id, parameter)| {
                            let want = case.to_f32(&format!("lora_grad.{}", parameter.name)).unwrap();
                            let got = model.adapter_layout(id, trainer.grads().get(id).unwrap().to_vec());
                            error(&got, &want)
                        })
                        .collect();
                }
            }
            (error(&losses, &want), worst)
        };
        let (theirs, of_gradients) = run(&Device::cpu(0, Precision::Bf16).unwrap(), Routing::Grouped);
        for routing in ROUTINGS {
            let (losses, gradients) = run(&gpu, routing);
            let ratios = gradients.iter().zip(&of_gradients).map(|(ours, theirs)| ours / theirs);
            let worst = ratios.fold(0.0, f64::max);
            println!(
                "{}: {routing:?}: losses off by {losses:.1e} (bf16 on the CPU {theirs:.1e}), gradients up to {worst:.2} times",
                family.name
            );
            // A loss is a sum in which errors cancel by chance: half a rounding at least.
            assert!(losses <= 2.0 * theirs.max(1.0 / 2048.0), "{}: {routing:?}", family.name);
            assert!(worst <= 3.0, "{}: {routing:?}", family.name);
        }
    }
}

#[test]
fn routings_repeat_to_the_bit_and_only_grouped_waits_for_nothing() {
    let Some(device) = gpu() else { return };
    for family in families() {
        let layers = family.choices().unwrap().len() as u64;
        let experts = family.model(&device).config().moe.as_ref().unwrap().num_experts as u64;
        let batch = [family.batch()];
        let mut of_form = Vec::new();
        for routing in ROUTINGS {
            let run = || {
                let mut trainer = family.lora_trainer(&device, Activations::Recompute);
                trainer.set_switches(Switches { routing, ..trainer.switches() });
                let step = |_| trainer.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap();
                let reports: Vec<_> = (0..5).map(step).collect();
                let losses: Vec<f32> = reports.iter().map(|report| report.loss as f32).collect();
                let last = reports.into_iter().last().unwrap();
                (losses, last.counters.unwrap().host_syncs, last.moe.unwrap(), adapter_values(&trainer))
            };
            let (losses, syncs, report, adapters) = run();
            let (again, _, same, values) = run();
            assert!((&again, &values) == (&losses, &adapters), "{}: {routing:?} differs from itself", family.name);
            assert_eq!(report.tokens_per_expert, same.tokens_per_expert);
            assert_eq!(report.tokens_per_expert.len() as u64, layers);
            // Forward and recomputation of every layer.
            let want = match routing {
                Routing::Grouped => 0,
                Routing::Sorted => 2 * layers,
                Routing::PerExpert => 2 * layers * experts,
            };
            assert_eq!(syncs, want, "{}: {routing:?}", family.name);
            of_form.push(losses);
        }
        for losses in &of_form[1..] {
            let off = error(losses, &of_form[0]);
            println!("{}: losses of another routing off by {off:.1e}", family.name);
            assert!(off <= 1.0 / 512.0, "{}: {of_form:?}", family.name);
        }
    }
}

#[test]
fn experts_in_mxfp4_give_the_bits_of_experts_dequantized_once() {
    let Some(device) = gpu() else { return };
    use tandem::model::transformer::Form;
    use tandem::session::Dequantized;
    let text = include_str!("../../assets/models/gpt-oss-20b.json");
    let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
    let small = [("hidden_size", 192), ("intermediate_size", 96), ("num_hidden_layers", 2), ("num_attention_heads", 4)];
    let more = [("num_key_value_heads", 2), ("num_local_experts", 6), ("vocab_size", 500)];
    small.into_iter().chain(more).for_each(|(key, value)| json[key] = value.into());
    json["layer_types"] = serde_json::json!(["sliding_attention", "full_attention"]);
    let config = tandem::model::config::ModelConfig::from_hf_json(&json.to_string()).unwrap();
    let made = |experts| {
        let model = Transformer::random(&config, &device, Form { experts, ..Form::default() }, 3).unwrap();
        let packed: Vec<_> = model.params().ids().filter(|&id| model.params().is_mxfp4(id)).collect();
        let values: Vec<Vec<f32>> = packed.iter().map(|&id| model.params().to_vec(id)).collect();
        (model, packed, values)
    };
    let (packed_model, packed, values) = made(Dequantized::Scratch);
    assert_eq!(packed.len(), 4, "two stacks of experts in each of two blocks");
    let (mut resident, none, _) = made(Dequantized::Resident);
    assert!(none.is_empty());
    for (id, values) in packed.iter().zip(&values) {
        let name = packed_model.params().name(*id).to_owned();
        let id = resident.params().find(&name).unwrap();
        resident.params_mut().set(id, values);
    }
    let family = &families()[0];
    let batch = [family.batch()];
    let run = |model: Transformer| {
        let mut setup = family.setup(family.method(), Activations::Recompute, true);
        setup.method.target_modules = vec!["q_proj".into(), "o_proj".into()];
        let mut trainer = Trainer::new(model, setup).unwrap();
        let step = |_| trainer.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap().loss.to_bits();
        let losses: Vec<u64> = (0..5).map(step).collect();
        (losses, adapter_values(&trainer))
    };
    assert!(run(packed_model) == run(resident), "packed and dequantized differ");
}

#[test]
fn golden_auxiliary_losses_on_the_gpu_are_as_near_to_f32_as_bf16_elsewhere() {
    let Some(gpu) = gpu() else { return };
    let mut compared = 0;
    for family in families() {
        let run = |device: &Device, cuda_graphs| {
            let (model, of) = family.with_auxiliary_loss(device)?;
            let setup = family.setup(family.method(), Activations::Recompute, cuda_graphs);
            let mut trainer = Trainer::new(model, setup).unwrap();
            set_adapters(&mut trainer, &family.case);
            let batch = [family.batch()];
            let step = |_| trainer.step_and_wait(&batch, 0.0, &NEVER).unwrap().unwrap().loss as f32;
            let want: Vec<f32> = serde_json::from_value(of["losses"].clone()).unwrap();
            let losses: Vec<f32> = (0..want.len()).map(step).collect();
            Some((error(&losses, &want), losses))
        };
        let Some((theirs, _)) = run(&Device::cpu(0, Precision::Bf16).unwrap(), false) else { continue };
        let (ours, losses) = run(&gpu, true).unwrap();
        assert_eq!(run(&gpu, false).unwrap().1, losses, "{}: graphs change nothing", family.name);
        println!(
            "{}: losses with the auxiliary loss off by {ours:.1e}, in bf16 on the CPU by {theirs:.1e}",
            family.name
        );
        // A close choice of an expert may fall otherwise.
        assert!(ours <= 2.0 * theirs.max(1.0 / 512.0), "{}: {losses:?}", family.name);
        compared += 1;
    }
    assert!(compared > 0, "no family has auxiliary losses");
}
