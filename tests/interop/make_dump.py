"""Builds the documents of the starter dataset without Tandem: same template, tokenizer, labels.

Run alone it writes a dump in the format of `tandem data dump`, packed in file order, to try the Python side; `run.py`
compares the documents in Tandem's dump with the ones from here.

    python make_dump.py --out dump.jsonl [--pack-len 1024 --steps 60]
"""

import argparse
import json
from pathlib import Path

import smollm2
from reference import IGNORE_INDEX

DATASET = Path(__file__).parents[2] / "assets/starter/devil.jsonl"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def documents(prompt: str, completion: str, pack_len: int) -> list[tuple[list[int], list[int]]]:
    """(input_ids, shifted labels) of every record; the answer and its <|im_end|> are trained, longer ones are cut."""
    tokenizer = smollm2.tokenizer()
    built = []
    for line in DATASET.read_text().splitlines():
        record = json.loads(line)
        user, answer = (pattern.format_map(record) for pattern in (prompt, completion))
        head = f"{SYSTEM}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids, answer_ids, tail_ids = (
            tokenizer.encode(text, add_special_tokens=False).ids for text in (head, f"{answer}<|im_end|>", "\n")
        )
        ids = prompt_ids + answer_ids + tail_ids
        targets = [IGNORE_INDEX] * len(prompt_ids) + answer_ids + [IGNORE_INDEX] * len(tail_ids)
        ids, targets = ids[:pack_len], targets[:pack_len]
        built.append((ids, targets[1:] + [IGNORE_INDEX]))
    return built


def pack_in_order(examples, pack_len: int):
    """Neighbours into packs, no cleverness."""
    packs, current = [], []
    for example in examples:
        if current and sum(len(ids) for ids, _ in current) + len(example[0]) > pack_len:
            packs.append(current)
            current = []
        current.append(example)
    return packs + [current]


def row(pack) -> dict:
    cu_seqlens = [0]
    for ids, _ in pack:
        cu_seqlens.append(cu_seqlens[-1] + len(ids))
    return {
        "input_ids": [i for ids, _ in pack for i in ids],
        "labels": [i for _, labels in pack for i in labels],
        "cu_seqlens": cu_seqlens,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompt", default='Define "{headword}" in the manner of Ambrose Bierce.')
    parser.add_argument("--completion", default="{entry}")
    args = parser.parse_args()
    examples = documents(args.prompt, args.completion, args.pack_len)
    rows = [
        {"step": step, "micro_batch": 0, **row(pack)}
        for step, pack in zip(range(args.steps), pack_in_order(examples[50:], args.pack_len))
    ]
    rows += [{"eval": True, **row(pack)} for pack in pack_in_order(examples[:50], args.pack_len)]
    args.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
