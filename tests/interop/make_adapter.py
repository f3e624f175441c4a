"""Writes a fresh PEFT adapter folder with a fixed seed: the same start for both trainers.

python make_adapter.py --model HF_FOLDER --out ADAPTER_FOLDER [--r 16 --lora-alpha 32 --seed 0]
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import smollm2

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make(model_folder: Path, out: Path, r: int, lora_alpha: int, seed: int) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=ALL_LINEAR, lora_dropout=0.0, task_type="CAUSAL_LM")
    get_peft_model(smollm2.load_folder(model_folder), config).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--lora-alpha", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.model, args.out, args.r, args.lora_alpha, args.seed)
