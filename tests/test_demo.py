"""The models and prompts that ship with the package are what the model card says."""

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from outrider import demo


@pytest.mark.parametrize("folder", [demo.TARGET, demo.SMALL_MODEL], ids=["target", "small_model"])
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
    assert first == list(demo.prompts("held_out", 40))[:20]
    assert len({name.split(":")[0] for name, _ in first}) == 20
    assert all(text.endswith("\n") and len(text) <= 600 for _, text in first)
