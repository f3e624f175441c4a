//! Model folders with weights in NF4, as Transformers and bitsandbytes write them, and the same with what those weights become.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::serialize_to_file;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tandem::formats::nf4::Nf4;
use tandem::formats::safetensors::{Dtype, TensorSpec, write};
use tandem::model::loading::Checkpoint;

/// Stores the projections of the model in `source` as NF4 in `folder`, as bitsandbytes and Transformers do, and the rest as it is. With `double`
/// their scales are quantized, too.
pub fn nf4_copy(source: &Path, folder: &Path, double: bool) {
    copy_with_config(source, folder, |config| {
        config["quantization_config"] = json!({
            "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8",
        });
    });
    let checkpoint = Checkpoint::open(source).unwrap();
    let mut tensors = Vec::new();
    for name in checkpoint.tensor_names() {
        let (values, shape) = (checkpoint.tensor_f32(name).unwrap(), checkpoint.shape(name).unwrap());
        if name.contains("_proj.weight") {
            let weight = Nf4::quantize(name, &values, shape, Dtype::F32, double).unwrap();
            let parts = weight.parts().unwrap();
            tensors.extend(
                parts
                    .into_iter()
                    .map(|part| (format!("{name}{}", part.suffix), part.dtype, part.shape, part.bytes.into_owned())),
            );
        } else {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            tensors.push((name.clone(), Dtype::F32, shape.to_vec(), bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Stores what the model in `source` has after dequantizing as a plain f32 model in `folder`.
pub fn dequantized_copy(source: &Path, folder: &Path) {
    copy_with_config(source, folder, |config| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    let checkpoint = Checkpoint::open(source).unwrap();
    let specs: Vec<TensorSpec> = checkpoint
        .tensor_names()
        .iter()
        .map(|name| TensorSpec {
            name: name.clone(),
            dtype: Dtype::F32,
            shape: checkpoint.shape(name).unwrap().to_vec(),
        })
        .collect();
    let values = |spec: &TensorSpec| Ok(checkpoint.tensor_f32(&spec.name)?.into());
    write(&folder.join("model.safetensors"), &BTreeMap::new(), &specs, values).unwrap();
}

/// Copies what is not weights, with a change to config.json.
fn copy_with_config(source: &Path, folder: &Path, change: impl Fn(&mut Value)) {
    fs::create_dir_all(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_str(&fs::read_to_string(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}
