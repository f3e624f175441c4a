"""The same training run in Transformers and PEFT: batches from `tandem data dump`, adapter, loss, schedule, one step.

The run is written in the plainest way: AdamW of PyTorch, the schedule of Transformers, the loss in f32 over the supervised
tokens of the whole step, every document on its own (`documents`) or a whole pack with a block-diagonal mask (`packed`).
Both forms give the same gradients; `peft_run.py --check-forms` shows it.
"""

import json
import math
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import get_scheduler

IGNORE_INDEX = -100
FORMS = ("documents", "packed")


@dataclass
class Batch:
    """One packed micro-batch: `labels` are shifted already, −100 is not trained."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: list[int]

    @property
    def num_label_tokens(self) -> int:
        return int((self.labels != IGNORE_INDEX).sum())

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def documents(self):
        """(input_ids, labels) of each document."""
        for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:]):
            yield self.input_ids[start:end], self.labels[start:end]


def read_dump(path: Path) -> tuple[list[list[Batch]], list[Batch]]:
    """The training steps (each a list of micro-batches) and the held-out batches of a dump."""
    steps: dict[int, list[tuple[int, Batch]]] = {}
    held_out = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        batch = Batch(torch.tensor(row["input_ids"]), torch.tensor(row["labels"]), [int(x) for x in row["cu_seqlens"]])
        assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == len(batch.input_ids) == len(batch.labels)
        if row.get("eval"):
            held_out.append(batch)
        else:
            steps.setdefault(row["step"], []).append((row["micro_batch"], batch))
    numbers = sorted(steps)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "the dump leaves steps out"
    return [[batch for _, batch in sorted(steps[n], key=lambda pair: pair[0])] for n in numbers], held_out


@dataclass
class Settings:
    """What a run file says about the optimizer; defaults as in Tandem."""

    lr: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    method: dict = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Settings":
        config = tomllib.loads(path.read_text())
        return cls(**config.get("optimizer", {}), method=config.get("method", {}))


def load_peft(model_folder: Path, adapter: Path, trainable: bool):
    """The model in f32 with a saved adapter."""
    from peft import PeftModel

    import smollm2

    base = smollm2.load_folder(model_folder)
    base.config.use_cache = False
    return PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def loss_sum(model, batch: Batch, form: str):
    """Yields the summed loss of each forward pass of a batch; call backward on each before taking the next."""
    if form == "documents":
        for input_ids, labels in batch.documents():
            if bool((labels != IGNORE_INDEX).any()):
                logits = model(input_ids=input_ids[None], use_cache=False).logits[0]
                yield F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return
    lengths = [end - start for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:])]
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document[None, :]) & (position_ids[:, None] >= position_ids[None, :])
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=batch.input_ids[None],
        attention_mask=mask[None, None],
        position_ids=position_ids[None],
        use_cache=False,
    ).logits[0]
    yield F.cross_entropy(logits, batch.labels, ignore_index=IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def evaluate(model, batches: list[Batch], form: str = "documents") -> float:
    """Mean loss over the supervised tokens of all batches."""
    model.eval()
    total = sum(float(loss) for batch in batches for loss in loss_sum(model, batch, form))
    return total / sum(batch.num_label_tokens for batch in batches)


class Trainer:
    """AdamW on the adapter, one learning rate a step, clipping by the global norm."""

    def __init__(self, model, settings: Settings, total_steps: int, form: str):
        self.model, self.settings, self.form = model, settings, form
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
        self.scheduler = get_scheduler(name, self.optimizer, settings.warmup_steps, total_steps)
        self.steps_done = 0

    def gradients(self, batches: list[Batch]) -> float:
        """Accumulates the gradient of the step's mean loss, and returns that loss."""
        self.model.train()
        denominator = sum(batch.num_label_tokens for batch in batches)
        total = 0.0
        for batch in batches:
            for loss in loss_sum(self.model, batch, self.form):
                total += loss.item()
                (loss / denominator).backward()
        return total / denominator

    def step(self, batches: list[Batch]) -> dict:
        """One optimizer update; the loss is the one before it."""
        start, cpu_start = time.perf_counter(), time.process_time()
        lr = self.scheduler.get_last_lr()[0]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradients(batches)
        limit = self.settings.max_grad_norm
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit if limit > 0 else math.inf).item()
        self.optimizer.step()
        self.scheduler.step()
        self.steps_done += 1
        return {
            "step": self.steps_done,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": sum(batch.num_tokens for batch in batches),
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
        }
