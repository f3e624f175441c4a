//! Rotary frequencies of a model, with their scaling for long contexts.

use std::f64::consts::TAU;

use super::config::{ModelConfig, RopeScaling};

/// Inverse frequencies, f32 [head_dim / 2].
///
/// The base is `1 / theta^(2i/d)`, rounded where Transformers rounds; scaling as in `ROPE_INIT_FUNCTIONS` of Transformers:
/// `linear` divides by the factor; `llama3` divides wavelengths above `L/low`, keeps those below `L/high`, and blends between.
pub fn inv_freq(config: &ModelConfig) -> Vec<f32> {
    let d = config.head_dim;
    let base = (0..d / 2).map(|i| {
        let exponent = (2 * i) as f32 / d as f32;
        1.0 / config.rope_theta.powf(f64::from(exponent)) as f32
    });
    match &config.rope_scaling {
        RopeScaling::None => base.collect(),
        RopeScaling::Linear { factor } => base.map(|f| f / *factor as f32).collect(),
        RopeScaling::Factors(factors) => base.zip(factors).map(|(f, factor)| f / factor).collect(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let original = *original_max_position_embeddings as f64;
            let scale = |f: f32| {
                let frequency = f64::from(f);
                let wavelength = TAU / frequency;
                if wavelength > original / low_freq_factor {
                    return (frequency / factor) as f32;
                }
                if wavelength < original / high_freq_factor {
                    return f;
                }
                let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                ((1.0 - smooth) * frequency / factor + smooth * frequency) as f32
            };
            base.map(scale).collect()
        }
    }
}
