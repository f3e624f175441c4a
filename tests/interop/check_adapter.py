"""Loads an adapter that Tandem saved in PEFT and measures the held-out loss of a dump.

python check_adapter.py --model HF_FOLDER --adapter ADAPTER_FOLDER --dump dump.jsonl --expect 2.345
"""

import argparse
import sys
from pathlib import Path

import torch

import reference

TOLERANCE = 1e-3


def held_out_loss(model_folder: Path, adapter: Path, dump: Path, threads: int) -> float:
    torch.set_num_threads(threads)
    model = reference.load_peft(model_folder, adapter, trainable=False)
    return reference.evaluate(model, reference.read_dump(dump)[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "dump"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--expect", type=float, required=True, help="the held-out loss Tandem reported")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    loss = held_out_loss(args.model, args.adapter, args.dump, args.threads)
    print(f"held-out loss in PEFT {loss:.6f}, in Tandem {args.expect:.6f}, difference {abs(loss - args.expect):.1e}")
    if not abs(loss - args.expect) <= TOLERANCE:
        sys.exit(f"more than {TOLERANCE} apart")
