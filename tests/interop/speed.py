"""Tokens a second of Transformers and PEFT in f32 on this CPU, for the first steps of a dump.

    python speed.py --model HF_FOLDER --adapter ADAPTER_FOLDER --config run.toml --dump dump.jsonl [--steps 3]

Every combination of form (documents one by one, packed with a mask) and gradient checkpointing (on as Tandem recomputes,
off as Tandem keeps) is measured after one warm-up step. A pack's tokens over the wall time of its whole step.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import reference


def measure(args, form: str, checkpointing: bool) -> dict:
    torch.set_num_threads(args.threads)
    steps, _ = reference.read_dump(args.dump)
    model = reference.load_peft(args.model, args.adapter, trainable=True)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer = reference.Trainer(model, reference.Settings.read(args.config), len(steps), form)
    trainer.step(steps[0])
    reports = [trainer.step(batches) for batches in steps[1 : args.steps + 1]]
    return {
        "form": form,
        "gradient_checkpointing": checkpointing,
        "tokens_per_sec": statistics.median(report["tokens"] / report["seconds"] for report in reports),
        "tokens_per_cpu_sec": statistics.median(report["tokens"] / report["cpu_seconds"] for report in reports),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "config", "dump"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", choices=reference.FORMS, action="append", help="only this form")
    parser.add_argument("--checkpointing", choices=("on", "off"), action="append", help="only this setting")
    args = parser.parse_args()
    for form in args.form or reference.FORMS:
        for checkpointing in args.checkpointing or ("on", "off"):
            print(json.dumps(measure(args, form, checkpointing == "on")), flush=True)
