"""Tokens a second of Transformers and PEFT in f32 on this CPU, for the first steps of a dump; with --tandem, of both programs in turns.

    python speed.py --model HF_FOLDER --adapter ADAPTER_FOLDER --config run.toml --dump dump.jsonl [--steps 3] [--tandem BINARY]

Every combination of form (documents one by one, packed with a mask) and gradient checkpointing (on as Tandem recomputes,
off as Tandem keeps) is measured after one warm-up step. A pack's tokens over the wall time of its whole step.
With --tandem, each of --rounds rounds measures every combination of PEFT and both settings of Tandem, each in a process of its own,
on the same batches; the table has the median over the rounds, and the ratio to PEFT's fastest form.
`run.py` leaves the four paths in its work folder.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
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


def measure_tandem(args, activations: str) -> float:
    """Tokens a second of `tandem train` on the first batches of the run, the first step left out."""
    command = [str(args.tandem), "train", str(args.config), "--json"]
    command += [f"--activations={activations}", f"--max-steps={args.steps + 1}", "--eval-every=0"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    reports = [event["report"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert len(reports) == args.steps + 1
    return statistics.median(report["document_tokens"] / report["step_ms"] * 1e3 for report in reports[1:])


def in_turns(args) -> None:
    """Both programs one after the other, round by round, so that what else the machine does meets both alike."""
    rates: dict[str, list[float]] = {}
    own = [sys.executable, "-W", "ignore", __file__, f"--steps={args.steps}", f"--threads={args.threads}"]
    own += [f"--{name}={getattr(args, name)}" for name in ("model", "adapter", "config", "dump")]
    for _ in range(args.rounds):
        for activations in ("recompute", "keep"):
            rates.setdefault(f"Tandem, {activations}", []).append(measure_tandem(args, activations))
        for form in reference.FORMS:
            for checkpointing in ("on", "off"):
                command = [*own, f"--form={form}", f"--checkpointing={checkpointing}"]
                line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                name = f"PEFT, {form}, checkpointing {checkpointing}"
                rates.setdefault(name, []).append(json.loads(line)["tokens_per_sec"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max(value for name, value in medians.items() if name.startswith("PEFT"))
    print("| program | tokens/s | rounds | over PEFT's fastest |\n|---|---|---|---|")
    for name, value in medians.items():
        rounds = ", ".join(f"{rate:.0f}" for rate in rates[name])
        print(f"| {name} | {value:.0f} | {rounds} | {value / fastest:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "config", "dump"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", choices=reference.FORMS, action="append", help="only this form")
    parser.add_argument("--checkpointing", choices=("on", "off"), action="append", help="only this setting")
    parser.add_argument("--tandem", type=Path, help="measure this binary and PEFT in turns")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.tandem:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        in_turns(args)
        sys.exit()
    for form in args.form or reference.FORMS:
        for checkpointing in args.checkpointing or ("on", "off"):
            print(json.dumps(measure(args, form, checkpointing == "on")), flush=True)
