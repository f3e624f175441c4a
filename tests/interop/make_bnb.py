"""Writes tests/golden/bitsandbytes/<family>/: the family's model as bitsandbytes and Transformers store it in 4 bits, and what PEFT makes of it.

The folder is what `save_pretrained` writes of the model loaded with NF4, double quantization and f32 arithmetic on the CPU. `case.safetensors` has its
`loss_mean` and `logits` on the documents of the family's case, and `lora_loss`, the loss before each of six AdamW steps (lr 1e-2, weight decay 0.01) on the adapter that the
family's case starts with. Documents run one by one, in training mode: in evaluation mode bitsandbytes' form for the CPU repacks weights.

    python make_bnb.py [--check FOLDER]

`--check` loads a folder that `tandem quantize --dtype f32` wrote of a family instead, and prints how far its logits are from those of the case.
"""

import argparse
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from make_bf16 import GOLDEN, STEPS, adapter_parameters, error, gradients

FAMILIES = ("llama", "qwen3")


def quantized(folder: Path):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=config, device_map={"": "cpu"}
    ).train()


def lora_losses(folder: Path, case) -> torch.Tensor:
    model = PeftModel.from_pretrained(quantized(folder), folder / "adapter_after_6_steps", is_trainable=True).train()
    adapters = adapter_parameters(model)
    with torch.no_grad():
        for name, p in adapters.items():
            p.copy_(case[f"lora.{name}"])
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    found = []
    for _ in range(STEPS):
        loss, _, grads = gradients(model, case, adapters)
        found.append(float(loss))
        for name, p in adapters.items():
            p.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(found)


def make(family: str):
    folder, target = GOLDEN / family, GOLDEN / "bitsandbytes" / family
    case = load_file(folder / "case.safetensors")
    model = quantized(folder)
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    loss, logits, _ = gradients(model, case, {n: p for n, p in model.named_parameters() if p.requires_grad})
    values = {"loss_mean": loss.float().reshape(1), "logits": logits, "lora_loss": lora_losses(folder, case)}
    save_file({name: value.contiguous() for name, value in values.items()}, target / "case.safetensors")
    print(family, float(loss), values["lora_loss"].tolist())


def check(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", device_map={"": "cpu"}).train()
    family = next(f for f in FAMILIES if f == model.config.model_type)
    case = load_file(GOLDEN / family / "case.safetensors")
    _, logits, _ = gradients(model, case, {})
    wanted = load_file(GOLDEN / "bitsandbytes" / family / "case.safetensors")["logits"]
    print(f"{folder}: logits differ by {error(logits, wanted):.2e} from those of bitsandbytes' own folder")


parser = argparse.ArgumentParser()
parser.add_argument("--check", type=Path)
arguments = parser.parse_args()
if arguments.check:
    check(arguments.check)
else:
    for family in FAMILIES:
        make(family)
