"""Writes tests/golden/adamw8.safetensors: twenty steps of bitsandbytes' AdamW8bit on the CPU.

Needs torch and bitsandbytes 0.50. Its form for the CPU looks codes up in a table over [-1, 1], which is coarser than the map near zero; its forms for
GPUs take the nearest value of the map, and move on by one code where that would change the sign of a first moment. Training happens on GPUs, so states are
quantized like that here (`torch.bucketize` over the middles, as in bitsandbytes' form in plain PyTorch); everything else is bitsandbytes' own code.

The gradient of step t (from 1) is a * coefficients[t-1, 0] + b * coefficients[t-1, 1], in f32, one rounding for each operation.

    python make_adamw8.py
"""

from pathlib import Path

import bitsandbytes as bnb
import torch
from bitsandbytes.backends.cpu import ops
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import save_file

OUT = Path(__file__).parents[1] / "golden" / "adamw8.safetensors"
STEPS, SEEN = 20, (1, 5, 20)
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def quantize_nearest(values, code, absmax_out, codes_out, blocksize):
    middles = (code[:-1] + code[1:]) / 2
    for block, start in enumerate(range(0, values.numel(), blocksize)):
        part = values.reshape(-1)[start : start + blocksize]
        absmax = part.abs().max()
        unit = part / absmax if absmax > 0 else torch.zeros_like(part)
        codes = torch.bucketize(unit, middles)
        if code[0] < 0:
            codes += (code[codes].signbit() != part.signbit()) * torch.where(part > 0, 1, -1)
        codes_out.view(-1)[start : start + blocksize] = codes.to(torch.uint8)
        absmax_out[block] = absmax


def main():
    ops._quant_blockwise_fp32_direct = quantize_nearest
    generator = torch.Generator().manual_seed(8)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    tensors = {
        # Not a multiple of 256; gradients over many orders of magnitude, as in a language model.
        "ragged": (randn(37, 139) * 0.1, randn(37, 139) * torch.exp(2 * randn(37, 139)) * 1e-3),
        # Exactly at the limit of 8 bits.
        "limit": (randn(64, 64), randn(64, 64) * 1e-2),
        # Below it: state stays in 32 bits.
        "tiny": (randn(300), randn(300)),
        # Whole blocks without a gradient, and single zeros among others.
        "sparse": (randn(4, 1100), randn(4, 1100) * (torch.arange(4400).view(4, 1100) % 3 > 0)),
    }
    tensors["sparse"][1].view(-1)[512:1300] = 0.0
    coefficients = torch.stack([torch.linspace(1.0, 0.3, STEPS), torch.sin(torch.arange(STEPS) * 0.9)], dim=1)
    saved = {"coefficients": coefficients, "map.signed": create_dynamic_map(True), "map.unsigned": create_dynamic_map(False)}
    parameters = {}
    for name, (start, a) in tensors.items():
        b = a[torch.randperm(a.shape[0], generator=generator)].contiguous()
        if name == "sparse":
            b = b * (a != 0)
        parameters[name] = (torch.nn.Parameter(start.clone()), a, b)
        saved |= {f"{name}.start": start, f"{name}.a": a, f"{name}.b": b}
    optimizer = bnb.optim.AdamW8bit([p for p, _, _ in parameters.values()], **SETTINGS)
    for step in range(1, STEPS + 1):
        for p, a, b in parameters.values():
            p.grad = a * coefficients[step - 1, 0] + b * coefficients[step - 1, 1]
        optimizer.step()
        if step not in SEEN:
            continue
        for name, (p, _, _) in parameters.items():
            state = optimizer.state[p]
            saved[f"{name}.{step}.value"] = p.detach().clone()
            for ours, theirs in (("m", 1), ("v", 2)):
                moment = state[f"state{theirs}"].clone()
                if moment.dtype == torch.uint8:
                    saved[f"{name}.{step}.{ours}.codes"] = moment
                    saved[f"{name}.{step}.{ours}.absmax"] = state[f"absmax{theirs}"].clone()
                else:
                    saved[f"{name}.{step}.{ours}"] = moment
    settings = {name: str(value) for name, value in SETTINGS.items()}
    save_file({name: t.contiguous() for name, t in saved.items()}, OUT, metadata={"bitsandbytes": bnb.__version__, **settings})
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
