"""Writes tests/golden/smollm2_generation.json: what Transformers answers, greedily and in f32, to one question."""

import json
from pathlib import Path

import torch
from transformers.utils.chat_template_utils import render_jinja_template

import smollm2

OUT = Path(__file__).parents[1] / "golden/smollm2_generation.json"
QUESTION = "What is the capital of France?"
MAX_NEW_TOKENS = 64

tokenizer = smollm2.tokenizer()
model = smollm2.load_gguf().eval()
conversation = [{"role": "user", "content": QUESTION}]
rendered, _ = render_jinja_template(
    conversations=[conversation], chat_template=smollm2.chat_template(), add_generation_prompt=True
)
prompt_text = rendered[0]
prompt_ids = tokenizer.encode(prompt_text, add_special_tokens=False).ids
stop_id = tokenizer.token_to_id("<|im_end|>")

generated_ids, margins = [], []
with torch.no_grad():
    while len(generated_ids) < MAX_NEW_TOKENS:
        logits = model(torch.tensor([prompt_ids + generated_ids])).logits[0, -1]
        best = logits.topk(2)
        margins.append((best.values[0] - best.values[1]).item())
        token = best.indices[0].item()
        if token == stop_id:
            break
        generated_ids.append(token)
    by_generate = model.generate(
        torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=stop_id
    )[0, len(prompt_ids) :].tolist()
assert [t for t in by_generate if t != stop_id] == generated_ids, "generate() and the plain loop differ"

result = {
    "question": QUESTION,
    "prompt_text": prompt_text,
    "prompt_ids": prompt_ids,
    "max_new_tokens": MAX_NEW_TOKENS,
    "stop_id": stop_id,
    "generated_ids": generated_ids,
    "text": tokenizer.decode(generated_ids),
    "smallest_margin": min(margins),
}
OUT.write_text(json.dumps(result, indent=1) + "\n")
print(result)
