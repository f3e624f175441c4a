//! The largest batch before the first step, held to the memory plan; and what to change when memory runs out all the same.

use super::preparing::{Planned, Prepared};
use crate::base::error::{OutOfMemory, Result};
use crate::base::units;
use crate::session::event::NoteLevel;
use crate::session::handle::RunContext;
use crate::tensor::cuda::Pool;
use crate::tensor::{Device, Gpu};
use crate::train::plan::{Need, deviation, largest_batch};

/// Runs the passes of the largest batch that the run was planned for, and tells how far the plan was off; `false` when it was stopped on the way. Without
/// a plan there is nothing to do.
pub(super) fn rehearse(prepared: &mut Prepared, context: &RunContext) -> Result<bool> {
    let Prepared { trainer, planned: Some(planned), .. } = prepared else { return Ok(true) };
    let Device::Cuda(gpu) = trainer.model().device().clone() else { return Ok(true) };
    if !trainer.rehearse(&largest_batch(trainer.passes_of(planned.plan.work))?, context.control.stop_flag())? {
        return Ok(false);
    }
    let Some(need) = planned.plan.need() else { return Ok(true) };
    for told in deviations(need, &gpu) {
        context.sink.note(NoteLevel::Warning, format!("the memory plan is off; {told}"));
    }
    let (planned_bytes, measured) = (need.vram_bytes(), gpu.driver_used_bytes());
    if let Some(measured) = measured {
        let (planned, measured) = (units::bytes(planned_bytes), units::bytes(measured));
        let text = format!("the largest pack ran: {measured} of the GPU's memory are in use, {planned} were planned");
        context.sink.note(NoteLevel::Info, text);
    }
    // What else may be planned starts from what was measured.
    if let Some(more) = measured.and_then(|measured| measured.checked_sub(planned_bytes)) {
        planned.planner.machine.before_bytes += more;
    }
    Ok(true)
}

/// What a rehearsed step took otherwise than planned, by more than a twentieth.
fn deviations(need: &Need, gpu: &Gpu) -> Vec<String> {
    let slabs: u64 = [Pool::Lasting, Pool::Pass].map(|pool| gpu.arena_bytes(pool).slabs).iter().sum();
    let driver = gpu.driver_used_bytes().and_then(|used| deviation("by the driver", need.vram_bytes(), used));
    let own = deviation("in slabs of the engine", need.slab_bytes(), slabs);
    driver.into_iter().chain(own).collect()
}

/// An error with one change that makes the run fit, where it is that memory ran out.
pub(super) fn with_way_out(error: anyhow::Error, planned: Option<&Planned>) -> anyhow::Error {
    let change =
        planned.filter(|_| error.is::<OutOfMemory>()).and_then(|Planned { planner, plan }| planner.way_out(plan));
    match change {
        Some(change) => {
            error.context(format!("the GPU's memory ran out; start again with a change that fits: {change}"))
        }
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;
    use crate::session::config::RunConfig;
    use crate::session::{bench, estimate};
    use crate::tensor::cuda::{DeviceFacts, RecordingFacts};
    use crate::train::plan::{Machine, Planner, Workload};

    fn planner() -> Planner {
        let model: ModelConfig = bench::model_config("llama-3.2-1b").unwrap();
        let work = Workload { tokens: 2048, longest: 2048, batches: 1 };
        estimate::planner(&RunConfig::default(), &model, work, Machine::assumed(24 << 30, true), 1)
    }

    #[test]
    fn an_error_of_memory_names_a_change_and_others_stay_as_they_are() {
        let planner = planner();
        let planned = Planned { plan: planner.plan(), planner };
        let out_of_memory = || OutOfMemory { wanted_bytes: 2, free_bytes: 1, category: "workspace" };
        let error = with_way_out(out_of_memory().into(), Some(&planned));
        assert!(error.is::<OutOfMemory>(), "whoever branches on it still can");
        let text = format!("{error:#}");
        assert!(text.contains("activations = \"recompute\"") && text.contains("out of memory"), "{text}");
        assert_eq!(with_way_out(out_of_memory().into(), None).to_string(), out_of_memory().to_string());
        assert_eq!(with_way_out(anyhow::anyhow!("other"), Some(&planned)).to_string(), "other");
    }

    #[test]
    fn slabs_beside_those_planned_are_told() {
        let plan = planner().plan();
        let facts = RecordingFacts {
            free_bytes: Some(20 << 30),
            ..RecordingFacts::unbounded(DeviceFacts::assumed(24 << 30), true)
        };
        let Device::Cuda(gpu) = Device::recording(facts) else { panic!("a GPU") };
        plan.reserve(&gpu);
        let need = plan.need().unwrap();
        let _lasting = gpu.try_alloc(1).unwrap();
        let scope = gpu.pass_scope();
        let _pass = gpu.try_alloc(1).unwrap();
        assert_eq!(deviations(need, &gpu), Vec::<String>::new());
        let _more = gpu.try_alloc(2 << 30).unwrap();
        drop(scope);
        let told = deviations(need, &gpu);
        assert!(told.len() == 1 && told[0].starts_with("in slabs of the engine"), "{told:?}");
    }
}
