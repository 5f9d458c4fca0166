"""Which tokens train: by the template's marks, or by what follows the prompt; never by a guess."""

import json
from typing import Any

import pytest
from tiny import TEMPLATE, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import manifest_for, read_answers
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens, render
from outrider.data.sources.conversations import Conversation, Skipped
from outrider.targets.hf.transformers import TransformersTarget

UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "system", "content": "짧게 답하세요"}, {"role": "user", "content": "수도는? 🙂"},
    {"role": "assistant", "content": "서울이에요 👍🏽"}, {"role": "user", "content": "그럼 ü?"},
    {"role": "assistant", "content": "é 입니다"}, {"role": "user", "content": "남은 질문"},
]  # fmt: skip
FORGETS = (  # as Qwen3: a thought is shown in the last answer alone
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def texts(tokenizer: Any, found: Any) -> list[str]:
    return [tokenizer.decode(found.tokens[start:end]) for start, end in found.learn]


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED, None], ids=["marks", "prompts", "none"])
def test_every_answer_trains_whatever_its_letters(template: str | None) -> None:
    """Catches an answer of several turns that is lost, and letters of several bytes that are cut in two."""
    tokenizer = make_tokenizer(template)
    found = render(tokenizer, TALK, 10_000)
    ends = ["<|end|>"] * 2 if template else ["", "<|end|>"]
    assert texts(tokenizer, found) == [f"서울이에요 👍🏽{ends[0]}", f"é 입니다{ends[1]}"]
    assert found.unstable == 0
    assert found.learn[0][0] == len(prompt_tokens(tokenizer, TALK[:2]))


def test_marks_and_prompts_agree() -> None:
    """Catches two ways that give two masks: the marks of this template are where its prompts end."""
    marked, unmarked = make_tokenizer(TEMPLATE), make_tokenizer(UNMARKED)
    for length in range(1, 130, 7):
        assert render(marked, TALK, length) == render(unmarked, TALK, length)


def test_marks_that_end_inside_an_answer_are_followed() -> None:
    """Catches a mask that trains what closes a turn where the template says that it does not."""
    inner = TEMPLATE.replace(
        "{{ m['content'] }}<|end|>{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}<|end|>"
    )
    assert inner != TEMPLATE
    tokenizer = make_tokenizer(inner)
    assert texts(tokenizer, render(tokenizer, TALK, 10_000)) == ["서울이에요 👍🏽", "é 입니다"]


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Letters, and `:a` as one token."""
    letters = {letter: i for i, letter in enumerate("abcUA: \n")}
    model = models.BPE(vocab=letters | {":a": len(letters)}, merges=[(":", "a")])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_token_on_both_sides_of_a_boundary_does_not_train(is_marked: bool) -> None:
    """Catches a guess: the prompt `A:` is one token of two, but before an `a` the engine reads another."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if is_marked else ("", "")
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}\n{% else %}A:" + begin
        + "{{ m['content'] }}\n" + end + "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )  # fmt: skip
    tokenizer = merging_tokenizer(template)
    ask, bad, good = (
        {"role": role, "content": text} for role, text in (("user", "b"), ("assistant", "ab"), ("assistant", "bc"))
    )
    found = render(tokenizer, [ask, bad, ask, good], 100)
    assert found.unstable == 1
    assert texts(tokenizer, found) == ["b c \n"] or texts(tokenizer, found) == ["bc\n"]
    assert render(tokenizer, [ask, bad], 100).learn == []


def test_an_answer_that_a_later_rendering_changes_does_not_train() -> None:
    """Catches tokens that train and that the engine never draws there; Qwen3 takes thoughts out of earlier answers."""
    tokenizer = make_tokenizer(FORGETS)
    found = render(tokenizer, TALK, 10_000)
    assert found.unstable == 1
    assert texts(tokenizer, found) == ["<think></think>é 입니다<|end|>"]


def test_thinking_is_what_the_template_gets() -> None:
    """Catches a switch that reaches the evaluation alone: prompts would be prepared in another mode than measured."""
    tokenizer = make_tokenizer(FORGETS)
    shown = {given: tokenizer.decode(prompt_tokens(tokenizer, TALK[:2], given)) for given in (None, True, False)}
    assert shown[None] == shown[True] == shown[False].removesuffix("<think></think>") != shown[False]
    found = render(tokenizer, TALK[:3], 10_000, thinking=False)
    assert texts(tokenizer, found) == ["서울이에요 👍🏽<|end|>"], "the empty thought is part of the prompt"


def test_thinking_shapes_the_answers(talker: TransformersTarget) -> None:
    """Catches answers of two modes in one folder; and older answers that are refused because the setting is new."""
    for given, wanted in ((True, True), ("on", True), (False, False), ("off", False), ("keep", None)):
        assert Config(thinking=given).enable_thinking is wanted
    kept, on = (manifest_for(talker, talker.tokenizer, Config(thinking=one))["config"] for one in ("keep", "on"))
    assert on == kept | {"thinking": "on"}


def test_answers_without_a_sure_boundary_are_counted(talker, tmp_path, monkeypatch) -> None:
    """Catches an answer that is left out in silence."""
    tokenizer, skipped = make_tokenizer(FORGETS), Skipped()
    path = prepare(
        talker, tokenizer, [Conversation("t", TALK)], tmp_path, Config(regenerate=False, length=1000), skipped=skipped
    )
    assert skipped.unstable == 1
    assert len(read_answers(path)[0].learn) == 1
    assert json.loads(path.read_text())["id"] == "t"
