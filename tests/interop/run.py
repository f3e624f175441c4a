"""The whole comparison of Tandem with Transformers and PEFT: one command, one table, exit status 1 outside the bounds.

    python run.py [--tandem target/release/tandem] [--config assets/examples/starter.toml] [--work target/interop]

1. The starter model is dequantized once into a Hugging Face folder, and a PEFT adapter is made with a fixed seed.
2. `tandem data dump` writes the packed batches; their documents are compared with ones built here from the dataset.
3. `tandem train --json` trains from the GGUF file and that adapter; PEFT trains the same batches from the folder.
4. Held-out losses, learning rates, the adapter loaded in PEFT, and tokens a second are compared.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

HELD_OUT_BOUND = 0.01  # relative, at every evaluation
ADAPTER_BOUND = 1e-3  # absolute, Tandem's adapter in PEFT
LR_BOUND = 1e-6  # relative, every step


def write_config(source: Path, target: Path, adapter: Path, runs: Path, threads: int) -> None:
    """A copy of the run file that starts from `adapter`; both trainers get the same threads."""
    added = {
        "[method]": f'init_adapter = "{adapter}"',
        "[train]": f'device = "cpu"\nthreads = {threads}',
    }
    lines = [f'runs_dir = "{runs}"']
    for line in source.read_text().splitlines():
        lines.append(line)
        if line.strip() in added:
            lines.append(added.pop(line.strip()))
    assert not added, f"{source} has no {' or '.join(added)} section"
    target.write_text("\n".join(lines) + "\n")


def tandem(args, *arguments: str) -> list[str]:
    """Lines that the binary wrote to its standard output."""
    done = subprocess.run([str(args.tandem), *arguments], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"tandem {' '.join(arguments)} ended with status {done.returncode}")
    return done.stdout.splitlines()


def dump_batches(args, config: Path, dump: Path) -> None:
    dump.write_text("\n".join(tandem(args, "data", "dump", str(config))) + "\n")


def compare_documents(config: Path, dump: Path) -> str:
    """Every document of the dump must be one that this folder's own code builds from the dataset."""
    import tomllib

    import make_dump
    import reference

    section = tomllib.loads(config.read_text())
    built = make_dump.documents(
        section["data"]["prompt"], section["data"]["completion"], section["packing"]["pack_len"]
    )
    expected = Counter((tuple(ids), tuple(labels)) for ids, labels in built)
    steps, held_out = reference.read_dump(dump)
    groups = {"training": [batch for step in steps for batch in step], "held-out": held_out}
    for name, batches in groups.items():
        found = Counter(
            (tuple(ids.tolist()), tuple(labels.tolist())) for batch in batches for ids, labels in batch.documents()
        )
        strange = found - expected if name == "held-out" else Counter(set(found) - set(expected))
        if strange:
            ids, labels = next(iter(strange))
            sys.exit(f"{sum(strange.values())} {name} documents are not in the dataset, for example\n{ids}\n{labels}")
    seen = {tuple(ids.tolist()) for batch in groups["training"] for ids, _ in batch.documents()}
    leaked = [1 for batch in held_out for ids, _ in batch.documents() if tuple(ids.tolist()) in seen]
    assert not leaked, f"{len(leaked)} held-out documents are trained on"
    return f"{len(seen)} training documents, {sum(len(b.cu_seqlens) - 1 for b in held_out)} held out, all as expected"


def train_in_tandem(args, config: Path, log: Path) -> dict:
    start = time.perf_counter()
    lines = tandem(args, "train", str(config), "--json")
    log.write_text("\n".join(lines) + "\n")
    events = [json.loads(line) for line in lines]

    def of(kind: str) -> list[dict]:
        return [event for event in events if event["event"] == kind]

    steps = [event["report"] for event in of("step")]
    return {
        "evals": {event["step"]: event["loss"] for event in of("eval")},
        "steps": steps,
        "device": of("started")[0]["device"],
        "adapter": Path(of("saved")[-1]["path"]),
        "tokens_per_sec": sum(r["document_tokens"] for r in steps) / sum(r["step_ms"] / 1e3 for r in steps),
        "seconds": time.perf_counter() - start,
    }


def train_in_peft(args, paths: dict) -> dict:
    command = [sys.executable, "-W", "ignore", str(HERE / "peft_run.py"), "--check-forms", "--form", "packed"]
    for name in ("model", "adapter", "config", "dump"):
        command += [f"--{name}", str(paths[name])]
    command += [
        "--threads",
        str(args.threads),
        "--out",
        str(paths["peft"]),
        "--save-adapter",
        str(paths["peft_adapter"]),
    ]
    subprocess.run(command, check=True)
    return json.loads(paths["peft"].read_text())


def report(ours: dict, peft: dict, adapter_loss: float) -> tuple[list[str], list[str]]:
    """The table in Markdown, and what is outside the bounds."""
    lines = ["| step | Tandem held-out loss | PEFT held-out loss | difference |", "|---|---|---|---|"]
    broken = []
    theirs = {row["step"]: row["loss"] for row in peft["evals"]}
    for step, loss in theirs.items():
        if step not in ours["evals"]:
            lines.append(f"| {step} | not evaluated | {loss:.5f} | |")
            if step > 0:
                broken.append(f"Tandem did not evaluate at step {step}")
            continue
        relative = ours["evals"][step] / loss - 1.0
        lines.append(f"| {step} | {ours['evals'][step]:.5f} | {loss:.5f} | {relative:+.3%} |")
        if not abs(relative) <= HELD_OUT_BOUND:
            broken.append(f"held-out loss at step {step} differs by {relative:+.3%}")
    if len(ours["steps"]) != len(peft["steps"]):
        broken.append(f"{len(ours['steps'])} steps against {len(peft['steps'])}")
    worst_loss = worst_norm = 0.0
    for a, b in zip(ours["steps"], peft["steps"]):
        worst_loss = max(worst_loss, abs(a["loss"] - b["loss"]))
        worst_norm = max(worst_norm, abs(a["grad_norm"] / b["grad_norm"] - 1.0))
        if abs(a["lr"] - b["lr"]) > LR_BOUND * max(b["lr"], 1e-9):
            broken.append(f"step {a['step']}: learning rate {a['lr']} against {b['lr']}")
    last = max(ours["evals"])
    apart = abs(adapter_loss - ours["evals"][last])
    if not apart <= ADAPTER_BOUND:
        broken.append(f"Tandem's adapter has held-out loss {adapter_loss:.5f} in PEFT, {apart:.1e} away")
    rates = ours["tokens_per_sec"], peft["tokens_per_sec"]
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| largest difference of a step's training loss | {worst_loss:.1e} |",
        f"| largest relative difference of a step's gradient norm | {worst_norm:.1e} |",
        f"| Tandem's adapter in PEFT: held-out loss | {adapter_loss:.5f} ({apart:.1e} from Tandem's own) |",
        f"| training tokens/s of the two runs: Tandem, PEFT, ratio | {rates[0]:.0f}, {rates[1]:.0f}, {rates[0] / rates[1]:.2f} |",
    ]
    return lines, broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", type=Path, default=ROOT / "target/release/tandem")
    parser.add_argument("--config", type=Path, default=ROOT / "assets/examples/starter.toml")
    parser.add_argument("--work", type=Path, default=ROOT / "target/interop")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    names = ("adapter", "config", "dump", "peft", "peft_adapter")
    files = ("adapter", "run.toml", "dump.jsonl", "peft.json", "peft_adapter")
    paths = {"model": work / "smollm2_f32"} | {name: work / file for name, file in zip(names, files)}

    import make_adapter
    import smollm2

    smollm2.save_hf_folder(paths["model"])
    shutil.rmtree(paths["adapter"], ignore_errors=True)
    make_adapter.make(paths["model"], paths["adapter"], r=16, lora_alpha=32, seed=0)
    write_config(args.config, paths["config"], paths["adapter"], work / "runs", args.threads)
    dump_batches(args, paths["config"], paths["dump"])
    print(compare_documents(paths["config"], paths["dump"]), flush=True)
    ours = train_in_tandem(args, paths["config"], work / "tandem.jsonl")
    peft = train_in_peft(args, paths)

    import check_adapter

    adapter_loss = check_adapter.held_out_loss(paths["model"], ours["adapter"], paths["dump"], args.threads)
    lines, broken = report(ours, peft, adapter_loss)
    text = "\n".join([f"{date.today()}, {ours['device']}, {args.threads} threads", "", *lines])
    (work / "report.md").write_text(text + "\n")
    print(text)
    if broken:
        sys.exit("outside the bounds:\n  " + "\n  ".join(broken))


if __name__ == "__main__":
    main()
