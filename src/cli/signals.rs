//! Ctrl-C, SIGTERM and a closed terminal: the first asks the command to save and end, the second ends it at once.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use signal_hook::consts::TERM_SIGNALS;
use signal_hook::flag;
use tandem::base::error::Result;

/// Exit code of a program ended by Ctrl-C, as shells know it.
const INTERRUPTED: i32 = 130;

/// A flag that the first signal raises; the next one ends the process.
///
/// # Errors
/// When the system refuses the handlers.
pub fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in signals() {
        // In this order: the shutdown looks at the flag before the same signal raises it.
        flag::register_conditional_shutdown(signal, INTERRUPTED, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("cannot listen to Ctrl-C")?;
    }
    Ok(stop)
}

/// The signals that ask a program to end.
fn signals() -> Vec<i32> {
    let mut signals = TERM_SIGNALS.to_vec();
    #[cfg(unix)]
    signals.push(signal_hook::consts::SIGHUP);
    signals
}
