//! The last step as a file that Perfetto opens.

use std::path::{Path, PathBuf};

use crate::base::error::Result;
use crate::session::StepReport;
use crate::session::runtime::{Task, Waker};
use crate::session::trace::Trace;

/// Asks for a file with the system's dialog and writes the spans of `report` into it, under the name of its run. Without a result when the user closes the
/// dialog.
pub fn ask_and_write(run: String, report: StepReport, waker: Waker) -> Task<PathBuf> {
    Task::future(Some(waker), async move {
        let picked = rfd::AsyncFileDialog::new()
            .set_title("Save the step for Perfetto")
            .set_file_name(format!("step-{}.json", report.step))
            .add_filter("Trace", &["json"])
            .save_file();
        let Some(file) = picked.await else { return Ok(None) };
        write(file.path(), &run, &report)?;
        Ok(Some(file.path().to_owned()))
    })
}

fn write(path: &Path, run: &str, report: &StepReport) -> Result<()> {
    let mut trace = Trace::new(None);
    trace.begin(run);
    trace.add(report);
    trace.write(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::event::RunEvent;
    use crate::session::{LaneKind, Pass, Phase, Span};

    #[test]
    fn the_spans_of_the_step_are_in_the_file() {
        let event = crate::gui::views::live::test_step(7, |report| {
            let (lane, phase, pass) = (LaneKind::Compute, Phase::Mlp, Pass::Backward);
            report.spans = vec![Span { lane, phase, pass, layer: Some(3), start_ms: 1.0, end_ms: 2.5 }];
        });
        let RunEvent::Step { report, .. } = event.event else { panic!("a step") };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step.json");
        write(&path, "my run", &report).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("my run") && text.contains("mlp"), "{text}");
    }
}
