"""A tiny Qwen3 on disk that reads and writes bytes, with its tokenizer and chat template, and a run file around it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] "
    "}}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DRAFTER = {
    "kind": "dspark",
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "intermediate": 32,
    "block": 3,
    "rank": 8,
}


def make_tokenizer(template: str | None = TEMPLATE, end: str | None = "<|end|>") -> PreTrainedTokenizerFast:
    """A token a byte, and the roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = template
    return fast


def make_folder(path: Path, seed: int = 0, template: str | None = TEMPLATE, **sizes: object) -> Path:
    """Save model and tokenizer; the model writes printable letters, as far as it is greedy, and ends a text with
    <|end|>."""
    tokenizer = make_tokenizer(template)
    model = tiny_model(seed, **({"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id} | sizes))
    letters = tokenizer.encode("".join(map(chr, range(32, 127))))
    with torch.no_grad():
        for token in {*range(256)} - {*letters}:
            model.lm_head.weight[token] = 0
    tokenizer.save_pretrained(path)
    # what transformers says of a template or of a missing pad token is nothing to do with us
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model.float().save_pretrained(path)
    return path


def write_run_file(path: Path, target: Path | str, **sections: Any) -> Path:
    """A run file of seconds; a section given as None is left out."""
    values: dict[str, Any] = {
        "target": str(target),
        "drafter": dict(DRAFTER),
        "prepare": {
            "conversations": str(path.parent / "prompts.jsonl"), "count": 6, "length": 48, "max_new_tokens": 16,
            "slots": 3,
        },
        "train": {"steps": 4, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1, "save_every": 2},
        "evaluate": {
            "tasks": [str(path.parent / "held_out.jsonl")], "prompts": 2, "max_new_tokens": 12, "baselines": ["ngram"],
            "min_first_ngrams": 0.0, "repeats": 0,
        },
    }  # fmt: skip
    values = {key: value for key, value in (values | sections).items() if value is not None}
    (path.parent / "prompts.jsonl").write_text(
        "".join(f'{{"id": "p{i}", "prompt": "say {"ab" * i} {i}"}}\n' for i in range(6))
    )
    (path.parent / "held_out.jsonl").write_text(
        "".join(f'{{"id": "h{i}", "prompt": "tell {i} {"xy" * i}"}}\n' for i in range(4))
    )
    path.write_text(yaml.safe_dump(values))
    return path


def randomise(model: torch.nn.Module, by: float = 0.1, seed: int = 3) -> torch.nn.Module:
    """Noise on every weight, so that none is at its initial zero."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += by * torch.randn(weight.shape, dtype=torch.float64, generator=noise).to(weight.dtype)
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target on disk."""
    return make_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def talker(folder: Path) -> TransformersTarget:
    """The tiny target with its tokenizer, in float64, so that a text does not depend on its batch."""
    return load_target(folder, dtype="float64")
