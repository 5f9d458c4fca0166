"""A tiny target whose tokenizer llama.cpp can read, byte-level BPE with merges, and drafters for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_model
from tiny import randomise
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider import load_target
from outrider.checkpoint import save
from outrider.config import build
from outrider.drafters import find as find_drafter
from outrider.export.writing import export_folder
from outrider.formats.gguf import file, reading
from outrider.formats.gguf.tokenizer import QWEN2

SPECIALS = ("<|end|>", "<|user|>")
PADDED = 3
"""Rows of the head that no token belongs to."""
PAIRS = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n"), ("e", "r"), ("Ġ", "a"), ("r", "e"), ("o", "n")]


def tokenizer(
    pattern: str | None = QWEN2, whole: bool = False, merges: int = 9, normalizer: Any = None, prefix: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits by `pattern` and joins a few pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *("".join(pair) for pair in PAIRS[:merges])]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, PAIRS[:merges], ignore_merges=whole))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    splits = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise]) if splits else bytewise
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    made.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")


def make_target(folder: Path) -> Any:
    """A tiny Qwen3 in float32 with that tokenizer, saved and loaded."""
    words = tokenizer()
    words.save_pretrained(folder)
    tiny_model(vocab_size=len(words) + PADDED, eos_token_id=words.eos_token_id).float().save_pretrained(folder)
    return load_target(folder)


# ── drafters for it ──────────────────────────────────────────────────────────────────────────────────────────────────

LAYER = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
BLOCK = {**LAYER, "mask_token": 5, "layers": 2, "block": 3, "taps": [0, 2]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", {**BLOCK, "rank": 8}),
    "dspark, no confidence": ("dspark", {**BLOCK, "rank": 8, "confidence": False, "rope_theta": 1e6}),
    "dspark, a bonus anchor": ("dspark", {**BLOCK, "rank": 8, "anchor_predicts": False}),
    "dflash": ("dflash", {**BLOCK, "anchor_predicts": False}),
    "dflash, in the anchor's slot": ("dflash", {**BLOCK, "partial_rotary_factor": 0.5}),
    "dflash, stretched": ("dflash", {**BLOCK, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "eagle3": ("eagle3", {**LAYER, "taps": [0, 1, 2]}),
    "eagle3, 40 tokens": ("eagle3", {**LAYER, "taps": [0, 1, 2], "vocabulary": 40, "norm_before_residual": True,
                                     "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4}),
    "mtp": ("mtp", {"native": False, "intermediate": 48}),
    "mtp, normed": ("mtp", {"native": False, "qk_norm": True}),
}  # fmt: skip
"""Every layout, with options that leave traces in the file."""


def fresh(kind: str, settings: dict[str, Any], target: Any, path: Path) -> Path:
    """A checkpoint with random weights, of which a report has 2.5 tokens per step."""
    module = find_drafter(kind)
    torch.manual_seed(0)
    model = module.Model(build(module.Config, {"kind": kind, **settings}, "drafter"), target).to(torch.float32)
    randomise(model)
    if settings.get("vocabulary"):
        model.begin(torch.randperm(target.spec.vocabulary, generator=torch.Generator().manual_seed(4)))
    row = {"tokens_per_step": 2.5, "temperature": 0.0, "task": "stdlib"}
    save(path, model, {"steps": 3}, measured={"report": {"rows": [row]}})
    return path


class Made:
    """Checkpoints of the settings above, each made once, and their files in float32."""

    def __init__(self, target: Any, place: Path):
        self.target, self.place = target, place

    def checkpoint(self, case: str) -> Path:
        path = self.place / case.replace(" ", "-")
        return path if path.exists() else fresh(*SETTINGS[case], self.target, path)

    def folder(self, case: str) -> Path:
        path = self.place / f"{case.replace(' ', '-')}-f32"
        return path if path.exists() else export_folder(self.checkpoint(case), "gguf", path, self.target, "f32")

    def file(self, case: str) -> Path:
        return self.folder(case) / "model.gguf"


def rewritten(
    ours: Path, theirs: Path, tensors: Callable[[dict[str, Any]], Any] = lambda found: None, precision: str = "f32",
    **keys: Any,
) -> Path:  # fmt: skip
    """A file without our keys, and with other tensors or keys (`dflash__block_size` is dflash.block_size)."""
    said = {name: value for name, value in reading.read_header(ours).keys.items() if not name.startswith("outrider.")}
    found = reading.read_tensors(ours)
    tensors(found)
    file.write(theirs, said | {name.replace("__", "."): value for name, value in keys.items()}, found, precision)
    return theirs
