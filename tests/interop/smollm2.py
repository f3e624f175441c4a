"""The starter model for the Python side: its GGUF file, its tokenizer, its weights as a Hugging Face folder."""

import hashlib
import os
import sys
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3  # value of tokenizer.ggml.token_type for special tokens


def gguf_path() -> Path:
    """The starter model's file: `TANDEM_STARTER_MODEL`, else the place where Tandem caches it."""
    data_home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    path = Path(os.environ.get("TANDEM_STARTER_MODEL") or Path(data_home) / "tandem/models" / GGUF_NAME)
    if not path.is_file():
        sys.exit(f"{path} is missing: run `cargo xtask run` once, or set TANDEM_STARTER_MODEL to the file")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        sys.exit(f"{path} has sha256 {found}, expected {GGUF_SHA256}")
    return path


def tokenizer() -> Tokenizer:
    """The tokenizer inside the GGUF file, with the pre-tokenizer that its `pre = "smollm"` stands for.

    SmolLM2 splits digits one by one, before the GPT-2 pattern. Transformers' own conversion of the file leaves
    that out, which changes whitespace in front of digits and signs such as "½".
    """
    fields = gguf.GGUFReader(gguf_path()).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    built = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    built.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, types) if kind == CONTROL]
    )
    return built


def chat_template() -> str:
    """The chat template inside the GGUF file."""
    return gguf.GGUFReader(gguf_path()).fields["tokenizer.chat_template"].contents()


def load_gguf():
    """The model in f32, dequantized by Transformers from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM

    path = gguf_path()
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # Transformers marks the model as quantized and then refuses to save it; the weights are plain f32 already.
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    plain = type(loaded)(config).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    return plain


def load_folder(folder: Path):
    """The model in f32 from a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def save_hf_folder(folder: Path) -> None:
    """Writes the dequantized model as a Hugging Face folder, once."""
    if (folder / "config.json").is_file():
        return
    partial = folder.with_name(folder.name + ".partial")
    load_gguf().save_pretrained(partial)
    tokenizer().save(str(partial / "tokenizer.json"))
    (partial / "chat_template.jinja").write_text(chat_template())
    partial.rename(folder)
