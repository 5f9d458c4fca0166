"""The new owner of a key's name tries to find the former owner's text in the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import load_drafter
from outrider.serve.http import keys
from outrider.targets.hf.transformers import TransformersTarget

from .running import MODEL, Running, running

SECRET = "The vault opens with zebra 7741. " * 3


class Two:
    """A server with two keys."""

    def __init__(self, server: Running, ann: str, bob: str):
        self.server, self.ann, self.bob = server, ann, bob

    def ask(self, key: str, prompt: str = SECRET, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "include_drafts": True}
        answer = httpx.post(
            f"{self.server.url}/v1/completions",
            json=body | more,
            headers={"authorization": f"Bearer {key}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(params=["ngram", "suffix"])
def two(talker: TransformersTarget, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Two]:
    file = tmp_path / "keys.json"
    ann, bob = keys.add(file, "ann"), keys.add(file, "bob")
    drafter = load_drafter(request.param, talker, shared="tenant")
    with running(talker, drafter, (request.param,), keys=str(file), prefix_bytes=1 << 24) as server:
        yield Two(server, ann, bob)


def test_a_key_that_is_made_anew_finds_nothing(two: Two) -> None:
    """Catches a name that is given to somebody else, who inherits the former owner's texts."""
    cold = two.ask(two.ann)
    file = Path(two.server.service.config.keys or "")
    keys.revoke(file, "ann")
    heir = keys.add(file, "ann")
    answer = two.ask(heir)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["outrider"]["accepted"] == cold["outrider"]["accepted"]
