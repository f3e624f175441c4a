//! The MoE side of the cache tile: figures, heat map, and what it says where there is nothing to show.

use std::path::PathBuf;

use egui::accesskit::Role;
use egui::{Rect, pos2};
use egui_kittest::kittest::{NodeT as _, Queryable as _};
use tandem::session::run_view::RunView;

use super::fixture::{self, experts};
use super::{App, app, build, builder, click, with_run};

fn map(harness: &App) -> Rect {
    harness.get_by_label_contains("Tokens of ").rect()
}

fn shown(view: RunView, size: [f32; 2]) -> App {
    let mut harness = build(builder().with_size(size));
    app(&mut harness).show_run(PathBuf::from("/runs/sparse"), view);
    harness.run_steps(3);
    click(&mut harness, Role::RadioButton, "MoE");
    harness
}

/// Points at the middle of a cell of a map of so many layers and experts.
fn point_at(harness: &mut App, (layer, layers): (usize, usize), (expert, experts): (usize, usize)) {
    let part = |i: usize, cells: usize| (i as f32 + 0.5) / cells as f32;
    let map = map(harness);
    let x = map.left() + map.width() * part(expert, experts);
    harness.hover_at(pos2(x, map.top() + map.height() * part(layer, layers)));
    harness.run_steps(3);
}

#[test]
fn the_cache_tile_has_a_second_side_for_experts() {
    let mut harness = with_run(experts::run(experts::SMALL, 40));
    harness.get_by_role_and_label(Role::Heading, "Packing metadata cache");
    click(&mut harness, Role::RadioButton, "MoE");
    harness.get_by_role_and_label(Role::Heading, "Experts");
    harness.get_by_label("grouped, step 40");
    harness.get_by_label("Tokens of 24 layers × 32 experts, 1,023.5 an expert on average");
    let view = experts::run(experts::SMALL, 40);
    let report = view.last_step().unwrap().report.moe.clone().unwrap();
    let (_, worst) = report.worst_layer().unwrap();
    assert!(worst > 2.0 && report.idle_experts() > 0, "there is something to see");
    harness.get_by_label(&format!("Worst layer {worst:.2} ×"));
    harness.get_by_label(&format!("Mean {:.2} ×", report.mean_imbalance().unwrap()));
    harness.get_by_label(&format!("Idle {} of 768", report.idle_experts()));
    harness.get_by_label("Host syncs 0 a layer");
    harness.get_by_label_contains("Routing 1.9 ms");

    let tokens = report.tokens_per_expert[7][30];
    point_at(&mut harness, (7, 24), (30, 32));
    harness.get_by_label_contains(&format!("layer 7, expert 30: {} tokens, ", tandem::base::units::count(tokens)));
    click(&mut harness, Role::RadioButton, "cache");
    harness.get_by_role_and_label(Role::Heading, "Packing metadata cache");
    harness.get_by_label("Lookups 60");
}

#[test]
fn before_the_switch_every_expert_cost_a_read() {
    let harness = shown(experts::run(experts::SMALL, experts::SWITCHED - 1), [1440.0, 900.0]);
    harness.get_by_label_contains("per expert, as published, step 24");
    harness.get_by_label("Host syncs 64 a layer");
    harness.get_by_label(
        "Grouped MoE routing: off, a search and a read an expert, as published; this run trains in another process",
    );
}

#[test]
fn many_experts_stay_readable_in_a_small_window() {
    for size in [[1440.0, 900.0], [1280.0, 720.0]] {
        let mut harness = shown(experts::run(experts::LARGE, 30), size);
        let place = map(&harness);
        assert!(place.width() >= 256.0 && place.height() >= 72.0, "{place:?} at {size:?}");
        if size[1] > 700.0 {
            // The first layer has no experts.
            point_at(&mut harness, (47, 48), (127, 128));
            harness.get_by_label_contains("layer 48, expert 127: ");
            point_at(&mut harness, (0, 48), (0, 128));
            harness.get_by_label_contains("layer 1, expert 0: ");
        }
    }
}

#[test]
fn routing_has_its_phase_and_its_switch() {
    let harness = with_run(experts::run(experts::SMALL, 40));
    harness.get_by_label_contains("routing 1.9 ms, ");
    harness.get_by_label("mlp: every layer has experts");
    harness.get_by_role_and_label(Role::Switch, "Grouped MoE routing");
    harness.get_by_label_contains("Grouped MoE routing: on, the host reads nothing, one product for all experts");
}

#[test]
fn a_dense_model_has_no_such_side() {
    let harness = with_run(fixture::run(37));
    assert!(harness.query_by_label("MoE").is_none());
    assert!(harness.query_by_role_and_label(Role::Switch, "Grouped MoE routing").is_none());
    harness.get_by_label("moe: no experts in this model");
    harness.get_by_label("routing: no experts in this model");
}

#[test]
fn what_is_not_there_is_said() {
    let mut view = experts::run(experts::SMALL, 5);
    let report = |view: &mut RunView| view.steps.last_mut().unwrap().report.moe.take().unwrap();
    let whole = report(&mut view);
    let harness = shown(view.clone(), [1440.0, 900.0]);
    harness.get_by_label("This step did not tell what its experts got.");

    let mut bare = whole.clone();
    bare.tokens_per_expert.clear();
    view.steps.last_mut().unwrap().report.moe = Some(bare);
    let harness = shown(view.clone(), [1440.0, 900.0]);
    harness.get_by_label_contains("Counts of step 5 are in the run's folder");
    harness.get_by_label("Worst layer —");

    let mut none = whole;
    none.tokens_per_expert.iter_mut().flatten().for_each(|tokens| *tokens = 0);
    view.steps.last_mut().unwrap().report.moe = Some(none);
    let harness = shown(view, [1440.0, 900.0]);
    harness.get_by_label("Idle 768 of 768");
    harness.get_by_label("Mean —");
    let image = harness.get_by_label_contains("Tokens of 24 layers");
    assert!(image.accesskit_node().label().unwrap().contains(", 0.0 an expert"));
}
