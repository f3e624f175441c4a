"""Trains a dump of `tandem data dump` in Transformers and PEFT, and writes what happened as JSON.

python peft_run.py --model HF_FOLDER --adapter ADAPTER_FOLDER --config run.toml --dump dump.jsonl --out result.json
"""

import argparse
import json
from pathlib import Path

import torch

import reference


def check_forms(model, steps, settings) -> None:
    """Documents one by one and a packed row with a block-diagonal mask must give the same loss and gradient."""
    found = {}
    for form in reference.FORMS:
        trainer = reference.Trainer(model, settings, len(steps), form)
        trainer.optimizer.zero_grad(set_to_none=True)
        loss = trainer.gradients(steps[0])
        found[form] = loss, torch.cat([p.grad.flatten() for p in trainer.parameters])
    (loss_a, grad_a), (loss_b, grad_b) = found.values()
    error = ((grad_a - grad_b).norm() / grad_a.norm()).item()
    print(f"documents against packed, step 1: loss {loss_a:.6f} / {loss_b:.6f}, gradient differs by {error:.1e}")
    assert abs(loss_a - loss_b) < 1e-4 and error < 1e-4


def run(args) -> dict:
    torch.set_num_threads(args.threads)
    steps, held_out = reference.read_dump(args.dump)
    settings = reference.Settings.read(args.config)
    model = reference.load_peft(args.model, args.adapter, trainable=True)
    if args.check_forms:
        check_forms(model, steps, settings)
    trainer = reference.Trainer(model, settings, len(steps), args.form)
    evals, reports = [], []

    def evaluate() -> None:
        evals.append({"step": trainer.steps_done, "loss": reference.evaluate(model, held_out)})
        print(f"held out after {trainer.steps_done} steps: {evals[-1]['loss']:.6f}", flush=True)

    evaluate()
    for batches in steps[: args.max_steps]:
        reports.append(trainer.step(batches))
        report = reports[-1]
        print(f"step {report['step']}: loss {report['loss']:.6f}, norm {report['grad_norm']:.4f}", flush=True)
        if trainer.steps_done % args.eval_every == 0:
            evaluate()
    if args.save_adapter:
        model.save_pretrained(args.save_adapter)
    seconds = sum(report["seconds"] for report in reports)
    result = {
        "form": args.form,
        "threads": args.threads,
        "evals": evals,
        "steps": reports,
        "tokens_per_sec": sum(report["tokens"] for report in reports) / seconds,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "config", "dump", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--save-adapter", type=Path, help="folder for the trained adapter")
    parser.add_argument("--form", choices=reference.FORMS, default="documents")
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--max-steps", type=int, help="train only the first steps (the schedule stays that of all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check-forms", action="store_true", help="first compare the two forms on step 1")
    print(f"{run(parser.parse_args())['tokens_per_sec']:.1f} tokens/s")
