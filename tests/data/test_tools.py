"""Tools that a request offers the model: templates show them, servers are sent them, and they tell prompts apart."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import TEMPLATE, make_tokenizer

from data.answering import serving
from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import Answer, read_answers
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens, render
from outrider.data.sources.conversations import Conversation, parse
from outrider.data.sources.mixture import select
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget

SHOWS = "{% for t in tools or [] %}<|tool|>{{ t['function']['name'] }};{% endfor %}" + TEMPLATE
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "날씨"}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASKED = [{"role": "user", "content": "hot?"}]
TALK = [*ASKED, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]


@pytest.fixture
def shown(talker: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> TransformersTarget:
    """The tiny target, whose template shows tools."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", SHOWS)
    return talker


@pytest.mark.parametrize(
    "row",
    [
        {"custom_id": "a", "method": "POST", "body": {"messages": ASKED, "tools": [WEATHER], "tool_choice": "auto"}},
        {"request": {"messages": ASKED, "tools": [WEATHER]}, "response": {"choices": []}},
        {"request": json.dumps({"messages": ASKED, "tools": [WEATHER]})},
        {"body": {"messages": ASKED, "functions": [WEATHER["function"]]}},
        {"messages": ASKED, "tools": [WEATHER]},
        {"messages": ASKED, "tools": json.dumps([WEATHER])},
    ],
)
def test_every_layout_brings_its_tools(row: dict[str, Any]) -> None:
    """Catches tools that are read from one kind of log and lost from another."""
    assert parse(row, "log:1").tools == (WEATHER,)


def test_what_offers_no_tools_has_none() -> None:
    """Catches tools shown to a model that was told not to use them, and definitions that break a template later."""
    assert not parse({"body": {"messages": ASKED, "tools": [WEATHER], "tool_choice": "none"}}, "log:1").tools
    assert not parse({"messages": ASKED, "tools": None}, "log:1").tools
    with pytest.raises(DataError, match=r"log:7: tools must be a list of definitions, got 'weather'"):
        parse({"body": {"messages": ASKED, "tools": "weather"}}, "log:7")
    with pytest.raises(DataError, match="half of a surrogate pair"):
        parse({"messages": ASKED, "tools": [{"name": "\ud800"}]}, "log:8")


@pytest.mark.parametrize("template", [SHOWS, SHOWS.replace("{% generation %}", "").replace("{% endgeneration %}", "")])
def test_the_template_shows_them_and_they_do_not_train(template: str) -> None:
    """Catches tools in the prompt and not in the whole, where every boundary would move, by marks and by prompts."""
    tokenizer = make_tokenizer(template)
    answered = [*ASKED, {"role": "assistant", "content": "yes"}]
    prompt = prompt_tokens(tokenizer, ASKED, tools=[WEATHER, CLOCK])
    assert tokenizer.decode(prompt) == "<|tool|>weather;<|tool|>clock;<|user|>hot?<|end|><|assistant|>"
    found = render(tokenizer, answered, 200, tools=[WEATHER, CLOCK])
    assert found.tokens[: len(prompt)] == prompt and not found.unstable
    assert [tokenizer.decode(found.tokens[start:end]) for start, end in found.learn] == ["yes<|end|>"]


def test_tools_tell_prompts_apart(tmp_path: Path) -> None:
    """Catches two requests that differ in their tools alone taken for duplicates."""
    rows = [{"messages": ASKED}, {"messages": ASKED, "tools": [WEATHER]}, {"messages": ASKED, "tools": [CLOCK]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    found = select(Config(conversations=str(tmp_path / "p.jsonl"), deduplicate="exact"))
    assert [list(one.tools) for one in found] == [[], [WEATHER], [CLOCK]]
    assert len({int(key) for key in found.parts[0].openings}) == 3
    assert Conversation("a", ASKED).content(answered=False) == ASKED
    assert Conversation("a", ASKED, tools=(CLOCK,)).characters == 4 + len("typefunctionfunctionnameclock")


@pytest.mark.parametrize("way", [None, "tokens", "chat"])
def test_every_turn_is_answered_with_the_tools(way: str | None, shown: TransformersTarget, tmp_path: Path) -> None:
    """Catches tools that only the first turn has, or that a server is not sent; here, by ids and by messages."""
    talk = Conversation("t", TALK, tools=[WEATHER])
    how = {"max_new_tokens": 12, "length": 120, "temperature": 0.0}
    with serving(shown) as stub:
        if way is not None:
            how |= {"servers": (stub.url,), "ask": way}
        path = prepare(shown, shown.tokenizer, [talk], tmp_path, Config(**how))
        bodies = [body for body in stub.bodies if body["max_tokens"] > 1]
    (found,) = read_answers(path)
    starts = [start for start, _ in found.learn]
    assert len(starts) == 2
    second = [*ASKED, {"role": "assistant", "content": text_of(shown, found, 0)}, TALK[-1]]
    assert found.tokens[: starts[1]] == prompt_tokens(shown.tokenizer, second, tools=[WEATHER])
    assert shown.tokenizer.decode(found.tokens[: starts[0]]).startswith("<|tool|>weather;<|user|>")
    if way == "chat":
        assert [body["tools"] for body in bodies] == [[WEATHER]] * 2
    elif way is not None:
        assert not any("tools" in body for body in bodies)


def text_of(target: TransformersTarget, answer: Answer, turn: int) -> str:
    start, end = answer.learn[turn]
    return target.decode(answer.tokens[start:end])


def test_a_call_without_its_ids_is_no_empty_answer(shown: TransformersTarget, tmp_path: Path) -> None:
    """Catches a tool call that a server took out of the text, trained on as an answer that ends at once."""
    with serving(shown, ids=None, calls=True) as stub:
        how = Config(servers=(stub.url,), ask="chat", attempts=2, max_new_tokens=8, length=99)
        path = prepare(shown, shown.tokenizer, [Conversation("t", ASKED, tools=[WEATHER])], tmp_path, how)
    assert not read_answers(path)
