//! The optimizations of a run before it starts: what is left to Tandem and what is set.

use egui::Ui;

use super::SetupView;
use super::fields::{choice, prose};
use super::form::{CacheChoice, RoutingChoice};
use crate::gui::theme::Theme;
use crate::session::{ActivationsChoice, AttentionPath, MetadataBaseline, PlacementChoice, RoutingBaseline};

impl SetupView {
    pub(super) fn optimization_fields(&mut self, ui: &mut Ui) {
        let theme = Theme::of(ui);
        let width = ui.available_width() - 6.0;
        let half = ((width - 10.0) / 2.0).floor();
        let form = &mut self.form;
        let kept = [
            (ActivationsChoice::Auto, "automatic: the fastest that fits"),
            (ActivationsChoice::Keep, "all activations: fastest, most memory"),
            (ActivationsChoice::Recompute, "their input, and compute the rest again"),
            (ActivationsChoice::Offload, "their input, in host memory: least memory"),
        ];
        choice(ui, "Blocks keep", &mut form.activations, &kept, width);
        ui.horizontal_top(|ui| {
            let caches = [
                (CacheChoice::Auto, "automatic"),
                (CacheChoice::Kept, "kept for all layers"),
                (CacheChoice::Rebuilt(MetadataBaseline::Published), "rebuilt, as published"),
                (CacheChoice::Rebuilt(MetadataBaseline::Fused), "rebuilt, fused"),
            ];
            choice(ui, "Packing metadata", &mut form.cache, &caches, half);
            let travels = matches!(form.activations, ActivationsChoice::Auto | ActivationsChoice::Offload);
            ui.add_enabled_ui(travels, |ui| {
                let buffers = [(0, "two where they fit"), (2, "two"), (1, "one: copy, then compute")];
                choice(ui, "Buffers of copies back", &mut form.offload_buffers, &buffers, half)
                    .on_disabled_hover_text("Nothing is offloaded with what blocks keep.");
            });
        });
        ui.horizontal_top(|ui| {
            let paths = [(AttentionPath::Varlen, "by documents"), (AttentionPath::Masked, "by a dense mask")];
            choice(ui, "Attention", &mut form.attention, &paths, half);
            let graphs = [(true, "on"), (false, "off")];
            choice(ui, "CUDA graphs", &mut form.cuda_graphs, &graphs, half);
        });
        if self.jobs.model.result.ok().is_some_and(|model| model.experts.is_some()) {
            let forms = [
                (RoutingChoice::Auto, "automatic"),
                (RoutingChoice::Grouped, "grouped: on the device alone"),
                (RoutingChoice::Off(RoutingBaseline::Sorted), "sorted: one read of counts, the published improvement"),
                (RoutingChoice::Off(RoutingBaseline::PerExpert), "per expert: a read each, the published baseline"),
            ];
            choice(ui, "Grouped routing", &mut form.routing, &forms, width);
        }
        ui.horizontal_top(|ui| {
            let places = [
                (PlacementChoice::Auto, "automatic"),
                (PlacementChoice::Device, "on the device"),
                (PlacementChoice::Host, "in host memory"),
            ];
            choice(ui, "Embedding table", &mut form.embedding, &places, half);
            choice(ui, "Optimizer's state", &mut form.optimizer_state, &places, half);
        });
        let words = "None of these changes what the model learns. What is automatic is chosen when the run starts; Live shows each choice with \
                     its reason, and can switch them between two steps.";
        prose(ui, words, theme.t3);
    }
}
