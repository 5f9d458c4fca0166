"""The models and prompts that ship with the package are what the model card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from outrider import demo
from outrider.errors import DataError
from outrider.machine import MatmulTimes
from outrider.runs.file import load
from scripts import demo_length

ROOT = Path(__file__).resolve().parent.parent
BOTH = pytest.mark.parametrize("folder", [demo.TARGET, demo.SMALL_MODEL], ids=["target", "small_model"])


def test_the_demo_fits_into_a_wheel():
    """Catches a checkpoint in float32, or training state, slipping into the package."""
    sizes = {
        path: path.stat().st_size for path in demo.TARGET.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert sum(sizes.values()) < 30e6
    assert (
        sum(size for path, size in sizes.items() if path.suffix == ".safetensors" and demo.SMALL_MODEL in path.parents)
        < 2e6
    )


def test_the_target_has_the_promised_shape():
    config = json.loads((demo.TARGET / "config.json").read_text())
    shape = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    assert tuple(config[key] for key in shape) == ("qwen3", 16, 256, 4, 2, 64, 704, 4096, 2048, True)


@BOTH
def test_the_tokenizer_is_byte_level_bpe_with_exactly_qwen2s_pre_tokenizer(folder):
    """Engines know a tokenizer by its pre-tokenizer; a near miss is served with other tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split, byte_level = tokenizer["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"] == {"Regex": PRETOKENIZE_REGEX}
    assert (split["behavior"], split["invert"]) == ("Isolated", False)
    assert (byte_level["type"], byte_level["add_prefix_space"], byte_level["use_regex"]) == ("ByteLevel", False, False)
    assert tokenizer["normalizer"] == {"type": "NFC"}
    assert tokenizer["model"]["type"] == "BPE"
    assert len(AutoTokenizer.from_pretrained(folder)) == 4096


@BOTH
def test_sixteen_ids_are_reserved_and_the_text_survives(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(list(range(4))) == ["<|endoftext|>", "<|pad|>", "<|mask|>", "<|reserved_0|>"]
    assert tokenizer.convert_ids_to_tokens(15) == "<|reserved_12|>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    text = "def f(x):\n\treturn {'ключ': x ** 2}  # 漢字 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_the_turns_and_an_end():
    tokenizer = AutoTokenizer.from_pretrained(demo.TARGET)
    talk = [{"role": "user", "content": "import "}, {"role": "assistant", "content": "os"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "import os<|endoftext|>"
    assert tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True) == "import "


@BOTH
def test_the_chat_template_reads_tools_and_parts_as_text(folder):
    """Catches None and a Python repr in a prompt: a call without content, a list of parts, a tool's mapping."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "add "}, "one"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": {"sum": 2}},
        {"role": "tool", "content": "done"},
        {"role": "assistant"},
    ]
    said = 'add one{"name": "add", "arguments": {"a": 1}}<|endoftext|>{"sum": 2}done<|endoftext|>'
    assert tokenizer.apply_chat_template(talk, tokenize=False) == said
    picture = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    with pytest.raises(TemplateError, match="content holds a part that is not text"):
        tokenizer.apply_chat_template(picture, tokenize=False)


def test_no_module_is_in_both_splits_and_none_is_a_test():
    """Catches prompts for measuring that a model was trained on."""
    splits = {split: {module.name for module in demo.modules(split)} for split in ("train", "held_out")}
    assert not splits["train"] & splits["held_out"]
    assert {name.split("/")[0].removesuffix(".py") for name in splits["held_out"]} <= demo.HELD_OUT
    assert not any(
        {"test", "tests", "site-packages"} & set(name.split("/")) for names in splits.values() for name in names
    )


def test_prompts_are_the_same_every_time_and_cover_modules_before_repeating_one():
    first = list(demo.prompts("held_out", 20))
    assert first == list(demo.prompts("held_out", 20))
    assert first == list(demo.prompts("held_out", 40))[:20]
    assert len({name.split(":")[0] for name, _ in first}) == 20
    assert all(text.endswith("\n") and len(text) <= 600 for _, text in first)


def test_an_interpreter_without_its_source_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="install the standard library's source"):
        list(demo.prompts("train", 3))


def test_the_demo_says_its_length_first_scaled_to_this_machine() -> None:
    """Catches ten minutes promised on a machine half as fast, answers counted twice, and a demo that begins in
    silence."""
    files = [load(ROOT / "recipes" / name)[0] for name in ("demo-dflash.yaml", "demo.yaml")]
    usual = demo_length.minutes(files, demo_length.TRIED)
    assert usual["prepare"] == files[1].usual_minutes["prepare"]
    assert usual["train"] == sum(file.usual_minutes["train"] for file in files)
    tried = demo_length.TRIED.ms
    slow = MatmulTimes({name: {column: 2 * ms for column, ms in own.items()} for name, own in tried.items()})
    assert demo_length.minutes(files, slow) == pytest.approx({stage: 2 * value for stage, value in usual.items()})
    assert demo_length.line(usual, "here").startswith(
        f"demo      about {sum(usual.values()):.0f} minutes on this machine: "
    )
    steps = (ROOT / "Makefile").read_text().partition("\ndemo: ")[2].splitlines()[1:4]
    assert "scripts/demo_length.py recipes/demo-dflash.yaml recipes/demo.yaml" in steps[0]
    assert [step.split()[-1] for step in steps[1:]] == ["recipes/demo-dflash.yaml", "recipes/demo.yaml"]
