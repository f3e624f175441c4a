//! Rotary frequencies of a model, with their scaling for long contexts.

use std::f64::consts::TAU;

use super::config::{ModelConfig, RopeScaling};

/// What cosines and sines are multiplied by: 1 but for YaRN.
pub fn attention_factor(config: &ModelConfig) -> f32 {
    match config.rope_scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
        _ => 1.0,
    }
}

/// Inverse frequencies, f32 [head_dim / 2].
///
/// The base is `1 / theta^(2i/d)`, rounded where Transformers rounds; scaling as in `ROPE_INIT_FUNCTIONS` of Transformers:
/// `linear` divides by the factor; `llama3` divides wavelengths above `L/low`, keeps those below `L/high`, and blends between; `yarn` keeps frequency
/// numbers below `low`, divides those above `high`, and blends by number between, where `low` and `high` are the (broken) numbers of frequencies that
/// turn `beta_fast` and `beta_slow` times in the original context.
pub fn inv_freq(config: &ModelConfig) -> Vec<f32> {
    let d = config.head_dim;
    let powers = (0..d / 2).map(|i| {
        let exponent = (2 * i) as f32 / d as f32;
        config.rope_theta.powf(f64::from(exponent)) as f32
    });
    let base = powers.clone().map(|power| 1.0 / power);
    match &config.rope_scaling {
        RopeScaling::None => base.collect(),
        RopeScaling::Linear { factor } => base.map(|f| f / *factor as f32).collect(),
        RopeScaling::Factors(factors) => base.zip(factors).map(|(f, factor)| f / factor).collect(),
        RopeScaling::Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow, truncate, .. } => {
            let number_of = |turns: f64| {
                let turn = *original_max_position_embeddings as f64 / (turns * TAU);
                d as f64 * turn.ln() / (2.0 * config.rope_theta.ln())
            };
            let (mut low, mut high) = (number_of(*beta_fast), number_of(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(d as f64 - 1.0));
            if low == high {
                high += 0.001; // as Transformers does, against a division by zero
            }
            let blend = |(i, power): (usize, f32)| {
                let kept = 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                1.0 / (*factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
            };
            powers.enumerate().map(blend).collect()
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn gpt_oss(truncate: bool) -> ModelConfig {
        let text = serde_json::json!({
            "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 8, "head_dim": 64, "rope_theta": 150_000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": truncate},
        });
        ModelConfig::from_hf_json(&text.to_string()).unwrap()
    }

    #[test]
    fn yarn_blends_between_the_numbers_of_gpt_oss() {
        // low 8.093, high 17.398.
        let (config, plain) = (gpt_oss(false), ModelConfig { rope_scaling: RopeScaling::None, ..gpt_oss(false) });
        assert!((attention_factor(&config) - 1.346_573_6).abs() < 1e-7);
        assert_eq!(attention_factor(&plain), 1.0);
        let (scaled, base) = (inv_freq(&config), inv_freq(&plain));
        assert_eq!(scaled[..9], base[..9]);
        let close = |i: usize, divided: f32| {
            let want = base[i] * (1.0 - divided) + base[i] / 32.0 * divided;
            assert!((scaled[i] - want).abs() < 1e-4 * want, "{i}: {} is not {want}", scaled[i]);
        };
        close(9, (9.0 - 8.092_779) / (17.397_948 - 8.092_779));
        close(13, (13.0 - 8.092_779) / (17.397_948 - 8.092_779));
        (18..32).for_each(|i| close(i, 1.0));
        let truncated = inv_freq(&gpt_oss(true));
        assert!((truncated[9] - (base[9] * 0.9 + base[9] / 32.0 * 0.1)).abs() < 1e-5 * base[9]);
    }
}
