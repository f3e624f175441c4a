"""Writes tests/golden/full_finetune.json: the losses of full fine-tuning in Transformers, before each of six AdamW steps.

For each family `losses` in f32, and `bf16_error`, how far the same run with bf16 weights and f32 masters is from it, by norm: weights are the masters
rounded to bf16 (which they begin with), gradients are autograd's in bf16, added up over documents in f32, and the update is on the masters. Documents run one by one, never
packed; attention is `eager`. Weight decay spares norms and biases, as Transformers' Trainer does. Nothing is clipped.
In families with experts bf16 chooses them freely, and now and then otherwise than f32.

    python make_full_finetune.py
"""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from make_bf16 import FAMILIES, GOLDEN, STEPS, error, gradients

LR = 2e-3


def losses(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").train()
    case = load_file(folder / "case.safetensors")
    working = dict(model.named_parameters())
    masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in working.items()}
    decays = {name: (p.dim() > 1 and not name.endswith("bias")) or name.endswith("sinks") for name, p in masters.items()}
    groups = [
        {"params": [p for name, p in masters.items() if decays[name]], "weight_decay": 0.01},
        {"params": [p for name, p in masters.items() if not decays[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    found = []
    for _ in range(STEPS):
        loss, _, grads = gradients(model, case, working)
        found.append(loss)
        for name, p in masters.items():
            p.grad = grads[name]
        optimizer.step()
        with torch.no_grad():
            for name, p in working.items():
                p.copy_(masters[name])
    return torch.stack(found)


if __name__ == "__main__":
    torch.manual_seed(0)
    result = {"lr": LR}
    for family in FAMILIES:
        f32 = losses(GOLDEN / family, torch.float32)
        bf16 = losses(GOLDEN / family, torch.bfloat16)
        result[family] = {"losses": [float(x) for x in f32], "bf16_error": float(f"{error(bf16, f32):.3e}")}
        print(family, result[family])
    (GOLDEN / "full_finetune.json").write_text(json.dumps(result, indent=1) + "\n")
