"""Writes tests/golden/router_loss.json: losses of models that train with the auxiliary loss of their routers, by Transformers.

Each family's adapter (`adapter_after_6_steps`, at its start values) takes six steps as in case.safetensors; the loss is the mean over the
supervised tokens plus `coef` times `load_balancing_loss_func` over the router's logits of all documents, which are run one by one.
`lora_grad` holds the norm of each adapter matrix's gradient before the first step.

    python make_router_loss.py
"""

import json

import torch
import torch.nn.functional as F
from make_bf16 import GOLDEN, STEPS, adapted, adapter_parameters, documents
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

COEF = 0.5
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")


def run(family):
    folder = GOLDEN / family
    case = load_file(folder / "case.safetensors")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = base.config
    model, _ = adapted(base, folder, case)
    adapters = adapter_parameters(model)
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    supervised = int((case["labels"] != -100).sum())
    losses, norms = [], {}
    for step in range(STEPS):
        total, logits = 0.0, []
        for input_ids, labels in documents(case):
            out = model(input_ids=input_ids[None], use_cache=False, output_router_logits=True)
            total = total + F.cross_entropy(out.logits[0].float(), labels, ignore_index=-100, reduction="sum")
            logits.append(out.router_logits)
        pooled = tuple(torch.cat(layer) for layer in zip(*logits))
        loss = total / supervised + COEF * load_balancing_loss_func(pooled, config.num_local_experts, config.num_experts_per_tok)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            norms = {name: p.grad.double().norm().item() for name, p in adapters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "lora_grad": norms}


if __name__ == "__main__":
    result = {"coef": COEF, **{family: run(family) for family in FAMILIES}}
    for family in FAMILIES:
        print(family, result[family]["losses"])
    (GOLDEN / "router_loss.json").write_text(json.dumps(result, indent=1) + "\n")
