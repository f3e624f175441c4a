"""Writes tests/golden/<family>/bf16_errors.json: how far Transformers itself in bf16 is from its f32 reference.

For every tensor of case.safetensors that is a result: ‖bf16 − f32‖ / ‖f32‖ over the whole tensor. The weights are loaded as bf16,
the documents run one by one, attention is `eager`: its casts are the plain ones (scores, probabilities and output stored in bf16,
softmax in f32). The loss is computed in f32 from bf16 logits, as the models of Transformers do. Parameter gradients are those of
autograd, stored in bf16, added up over the documents in f32. Adapters stay in f32 on the bf16 base (`autocast_adapter_dtype` of
PEFT); `lora_loss` holds the six AdamW steps of the reference.

In families with experts the choices of the f32 model are replayed: the router's logits are those of bf16, the experts those that f32 chose,
so that the errors are those of arithmetic and not of a close choice that fell otherwise.

    python make_bf16.py [--attention sdpa] [--dry-run] [family …]
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss")
STEPS = 6


def load(folder: Path, attention: str):
    # `from_pretrained` casts parameters only: rotary frequencies stay in f32, as in a real bf16 run.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention).train()


def routers(model):
    """The routers of a model, in the order of its layers: modules that return (logits, weights, experts)."""
    return [module for _, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")]


def record(model, case):
    """The experts that an f32 model chooses: for each document, for each layer, [tokens, k]."""
    chosen, hooks = [], []
    for router in routers(model):
        hooks.append(router.register_forward_hook(lambda _, __, out: chosen[-1].append(out[2].clone())))
    with torch.no_grad():
        for input_ids, _ in documents(case):
            chosen.append([])
            model(input_ids=input_ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return chosen


class Replay:
    """Lets the routers of a bf16 model weigh given experts instead of choosing some: `chosen` is what `record` gives."""

    def __init__(self, model):
        self.chosen, self.document = None, 0
        for layer, router in enumerate(routers(model)):
            router.register_forward_hook(lambda router, _, out, layer=layer: self.weigh(router, out, layer))

    def weigh(self, router, out, layer):
        logits, weights, _ = out
        experts = self.chosen[self.document][layer]
        if type(router).__name__.startswith("GptOss"):
            # Softmax over the chosen logits, in their own type.
            weighed = torch.softmax(logits.gather(1, experts), dim=1, dtype=weights.dtype)
        else:
            weighed = torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, experts)
            if getattr(router, "norm_topk_prob", True):
                weighed = weighed / weighed.sum(-1, keepdim=True)
            weighed = weighed.to(weights.dtype)
        return logits, weighed, experts


def documents(case):
    bounds = case["cu_seqlens"].tolist()
    for start, end in zip(bounds, bounds[1:]):
        yield case["input_ids"][start:end].long(), case["labels"][start:end].long()


def gradients(model, case, parameters, replay=None):
    """Mean loss, all logits, and the gradient of the mean loss for each of `parameters` (summed over documents in f32)."""
    denominator = int((case["labels"] != -100).sum())
    logits, total = [], 0.0
    sums = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    for number, (input_ids, labels) in enumerate(documents(case)):
        if replay:
            replay.document = number
        out = model(input_ids=input_ids[None], use_cache=False).logits[0]
        logits.append(out.detach().float())
        loss = F.cross_entropy(out.float(), labels, ignore_index=-100, reduction="sum")
        total += loss.item()
        if not bool((labels != -100).any()):
            continue
        (loss / denominator).backward()
        for name, p in parameters.items():
            if p.grad is not None:
                sums[name] += p.grad.float()
            p.grad = None
    return torch.tensor(total / denominator), torch.cat(logits), sums


def adapter_parameters(model):
    """Trainable adapter matrices by their name in the reference: `<module>.lora_A`."""
    named = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.dtype == torch.float32, name
            named[name.removeprefix("base_model.model.").removesuffix(".default.weight")] = p
    return named


def error(got, want) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def adapted(base, folder: Path, case):
    """The model with the reference's adapter at its start, and a function that takes a step and gives loss and gradients before it."""
    model = PeftModel.from_pretrained(base, folder / "adapter_after_6_steps", is_trainable=True).train()
    adapters = adapter_parameters(model)
    with torch.no_grad():
        for name, p in adapters.items():
            p.copy_(case[f"lora.{name}"])
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def update(replay):
        loss, _, grads = gradients(model, case, adapters, replay)
        for name, p in adapters.items():
            p.grad = grads[name].clone()
        optimizer.step()
        optimizer.zero_grad()
        return loss, grads

    return model, update


def errors(folder: Path, attention: str) -> dict[str, float]:
    case = load_file(folder / "case.safetensors")
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    model = load(folder, attention)
    replay = Replay(model) if routers(exact) else None
    if replay:
        replay.chosen = record(exact, case)
    loss, logits, grads = gradients(model, case, dict(model.named_parameters()), replay)
    got = {"logits": logits, "loss_mean": loss, **{f"grad.{name}": g for name, g in grads.items()}}

    model, update = adapted(load(folder, attention), folder, case)
    # In f32 the same steps are taken beside, for the choices of each.
    replay = Replay(model) if routers(exact) else None
    exact, update_exact = adapted(exact, folder, case) if replay else (None, None)
    losses = []
    for step in range(STEPS):
        if replay:
            replay.chosen = record(exact, case)
            update_exact(None)
        loss, grads = update(replay)
        losses.append(loss)
        if step == 0:
            got |= {f"lora_grad.{name}": g for name, g in grads.items()}
    got["lora_loss"] = torch.stack(losses)

    inputs = ("input_ids", "labels", "cu_seqlens", "loss_sum")
    results = {name for name in case if name not in inputs and not name.startswith("lora.")}
    assert results == set(got), results ^ set(got)
    return {name: error(got[name], case[name]) for name in sorted(got)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--attention", default="eager", choices=("eager", "sdpa"))
    parser.add_argument("--dry-run", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    for family in args.families:
        result = errors(GOLDEN / family, args.attention)
        grads = [e for name, e in result.items() if name.startswith("grad.")]
        adapters = [e for name, e in result.items() if name.startswith("lora_grad.")]
        print(
            f"{family}: logits {result['logits']:.2e}, loss {result['loss_mean']:.2e}, gradients {min(grads):.2e} to "
            f"{max(grads):.2e}, adapter gradients {min(adapters):.2e} to {max(adapters):.2e}, "
            f"losses of six steps {result['lora_loss']:.2e}"
        )
        if not args.dry_run:
            text = json.dumps({name: float(f"{e:.3e}") for name, e in result.items()}, indent=1)
            (GOLDEN / family / "bf16_errors.json").write_text(text + "\n")
