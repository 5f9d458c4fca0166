"""A real llama-server answers the demo target's prompts: its ids, its greedy texts, and the distribution it draws from.

Built by `python benchmarks/engines/build_llama.py`, or named by LLAMA_SERVER.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LLAMA_SERVER

from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import Answer, read_answers
from outrider.data.config import Config
from outrider.data.sources.conversations import Conversation
from outrider.engines import llama_server
from outrider.export.target import export_target
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.remote.served import load_served

pytestmark = pytest.mark.slow  # collected where there is a server (tests/conftest.py)


@pytest.fixture(scope="module")
def demo() -> TransformersTarget:
    return load_target("demo", dtype="float32", compile=False)


@pytest.fixture(scope="module")
def url(demo: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that has the demo target, keys and values in float32."""
    place = tmp_path_factory.mktemp("llama")
    export_target(demo, place / "gguf", "f32")
    options = ["-c", 4096, "-np", 2, "-t", 1, "-ctk", "f32", "-ctv", "f32"]
    words = [LLAMA_SERVER, "-m", place / "gguf" / "model.gguf", *options]
    with llama_server.serving(words, place / "log") as client:
        yield str(client.base_url).rstrip("/")


def answers(target: Any, folder: Path, talks: list[Conversation], **settings: Any) -> list[Answer]:
    config = Config(**({"length": 512, "in_flight": 2} | settings))
    return read_answers(prepare(target, target.tokenizer, talks, folder, config))


@pytest.mark.parametrize("ask", ["tokens", "chat"])
def test_llama_server_answers_as_the_target_does(ask: str, url: str, demo: TransformersTarget, tmp_path: Path) -> None:
    """Catches ids that it gives otherwise than was thought, a prompt with a second beginning, and a lost end; two turns
    each, by a target whose weights are not loaded."""
    turns = ("def area(width, height):\n", "import os\n\n\ndef walk(folder):\n", "class Stack:\n")
    talks = [
        Conversation(f"t{i}", [{"role": "user", "content": one}, {"role": "user", "content": "return None\n"}])
        for i, one in enumerate(turns)
    ]
    how = {"temperature": 0.0, "max_new_tokens": 24}
    here = answers(demo, tmp_path / "here", talks, **how)
    there = answers(load_served("demo"), tmp_path / "there", talks, servers=(url,), ask=ask, **how)
    assert [(one.id, one.tokens, one.learn) for one in there] == [(one.id, one.tokens, one.learn) for one in here]
    assert not any(one.retokenised for one in there)


def test_llama_server_draws_from_the_same_distribution(url: str, demo: TransformersTarget, tmp_path: Path) -> None:
    """Catches top_p that is taken before the temperature, which is llama.cpp's own order: five tokens in place of
    hundreds.  False alarms: 1e-16, and 1e-3 for rounding at the nucleus' edge."""
    asked = [{"role": "user", "content": "def main(argv):\n    "}]
    talks = [Conversation(f"t{i}", asked) for i in range(24)]
    found = answers(
        load_served("demo"), tmp_path, talks, servers=(url,), temperature=2.0, top_p=0.5, top_k=0, max_new_tokens=1
    )
    assert len(found) == 24
    ((start, _),) = found[0].learn
    hidden, _ = demo.read(torch.tensor([list(found[0].tokens[:start])]), ())
    logits = demo.head(hidden[0, -1]).double()
    drawn = {one.tokens[start] for one in found}
    assert drawn <= nucleus(logits / 2.0, 0.5 + 1e-4)
    assert not drawn <= nucleus(logits, 0.5)


def nucleus(logits: torch.Tensor, top_p: float) -> set[int]:
    p, tokens = logits.softmax(-1).sort(descending=True)
    return {int(token) for token in tokens[p.cumsum(0) - p < top_p]}
