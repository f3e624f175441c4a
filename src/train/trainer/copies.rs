//! What offloading copied in a step, from its spans.

use std::collections::HashSet;

use crate::model::offload::OffloadState;
use crate::tensor::clock::CopiedBytes;
use crate::tensor::overlap::{CopyTimes, copy_times};
use crate::tensor::phase::{LaneKind, Pass, Phase, Span};
use crate::train::report::CopyReport;

/// What was copied in a step of these spans.
pub(super) fn copy_report(offload: &OffloadState, spans: &[Span], copied: CopiedBytes) -> CopyReport {
    let CopyTimes { d2h_ms, h2d_ms, copy_ms, hidden_ms } = copy_times(spans);
    let returned: Vec<Option<u32>> = spans.iter().filter(|s| s.lane == LaneKind::H2d).map(|s| s.layer).collect();
    let travels: HashSet<_> = returned.iter().collect();
    let works = |span: &&Span| {
        span.lane == LaneKind::Compute
            && span.pass == Pass::Backward
            && matches!(span.phase, Phase::Attention | Phase::Mlp | Phase::Moe | Phase::Routing | Phase::Recompute)
            && travels.contains(&span.layer)
    };
    let reloads = returned.len() / offload.parts.max(1);
    let backward_ms: f64 = spans.iter().filter(works).map(|span| span.end_ms - span.start_ms).sum();
    CopyReport {
        buffers: offload.buffers.as_ref().map_or(0, |(buffers, _)| *buffers),
        buffer_bytes: offload.buffer_bytes,
        blocks: offload.num_blocks,
        host_bytes: offload.host_bytes,
        d2h_bytes: copied.d2h,
        h2d_bytes: copied.h2d,
        d2h_ms,
        h2d_ms,
        copy_ms,
        hidden_ms,
        reloads,
        block_backward_ms: (reloads > 0 && backward_ms > 0.0).then(|| backward_ms / reloads as f64),
    }
}
