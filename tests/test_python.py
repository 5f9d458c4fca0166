"""What users of transformers and vLLM write is taken: names for models, tensors for prompts, settings by themselves."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.checkpoint import save
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.drafters import find
from outrider.errors import CheckpointError, ConfigError, DrafterError
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.generation import Generation, generate, serve, stream
from outrider.generation import requests as asked
from outrider.loading import load_drafter
from outrider.measure.config import Config as EvaluateConfig
from outrider.measure.run import evaluate
from outrider.nn.draft_model import DraftModel
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

PROMPT = [3, 1, 2, 3, 1, 2, 3, 1]


def whole(pieces: Any) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


@pytest.fixture(scope="module")
def checkpoint(target: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    module = find("medusa")
    model: DraftModel = module.Model(module.Config(heads=2), target).to(torch.float64)
    save(folder, model)
    return folder


def test_a_drafter_may_be_a_kind_or_a_folder(target: TransformersTarget, checkpoint: Path) -> None:
    """Catches a name that is not loaded, or that is loaded for another target, in any call that takes a drafter."""
    (plain,) = generate(target, PROMPT, max_new_tokens=12)
    for given in ("ngram", str(checkpoint)):
        (found,) = generate(target, PROMPT, given, max_new_tokens=12, policy="fixed")
        assert found.tokens == plain.tokens
        assert whole(stream(target, PROMPT, given, max_new_tokens=12, policy="fixed")) == plain.tokens
        assert whole(serve(target, asked(target, PROMPT, 12, None), given)) == plain.tokens
    named, loaded = (
        generate(target, PROMPT, given, max_new_tokens=12, policy="fixed")
        for given in ("ngram", load_drafter("ngram", target))
    )
    assert named == loaded


def test_drafters_are_measured_by_name(tmp_path: Path) -> None:
    """Catches a comparison for which every drafter has to be loaded by hand."""
    (tmp_path / "few.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "cab"}\n')
    task = str(tmp_path / "few.jsonl")
    config = EvaluateConfig(tasks=(task,), prompts=1, max_new_tokens=4, temperatures=(0.0,), min_first_ngrams=0)
    target = load_target("demo", compile=False)
    report = evaluate(target, {"lookup": "ngram", "suffix": load_drafter("suffix", target)}, config)
    assert [row.drafter for row in report.rows] == ["lookup", "suffix"]
    (named,) = generate("demo", "import json\n", "ngram", max_new_tokens=6)
    assert whole(stream("demo", "import json\n", "ngram", max_new_tokens=6)) == named.tokens
    assert [row.drafter for row in evaluate("demo", ["ngram"], config).rows] == ["ngram"]
    with pytest.raises(ConfigError, match="has no name for the report; give a mapping of names such as"):
        evaluate(target, [load_drafter("ngram", target)], config)
    with pytest.raises(ConfigError, match=re.escape("target must be loaded, got 'demo'; give load_target('demo')")):
        load_drafter("ngram", "demo")  # type: ignore[arg-type]


WRONG = {
    "a slip": ("ngarm", ConfigError, "did you mean 'ngram'"),
    "a mapping": ({"kind": "ngram"}, ConfigError, "a kind such as 'ngram', or a folder, got {'kind': 'ngram'}"),
    "a folder of nothing": (Path(__file__).parent, CheckpointError, "name the folder of a trained drafter"),
    "another target's": (load_drafter, ConfigError, "drafter must be a drafter"),
}


@pytest.mark.parametrize(("given", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_drafter_is_refused_at_once(target, given, error, message):
    """Catches an AttributeError from inside the loop, and an error that comes with the first token."""
    for call in (generate, stream):
        with pytest.raises(error, match=re.escape(message)):
            call(target, PROMPT, given, max_new_tokens=3)
    drafter = load_drafter("medusa", target)
    drafter.hidden = 7
    with pytest.raises(DrafterError, match="it was built for another target"):
        generate(target, PROMPT, drafter, max_new_tokens=2)


def test_settings_by_themselves_are_those_of_sampling(target: TransformersTarget) -> None:
    """Catches a setting that is taken and changes nothing, or does so in one of the two calls alone."""
    settings: dict[str, Any] = {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "seed": 5}

    def text(**given: Any) -> Generation:
        (found,) = generate(target, PROMPT, "ngram", max_new_tokens=24, **given)
        return found

    wanted = text(sampling=Sampling(**settings))
    assert text(**settings).tokens == wanted.tokens == whole(stream(target, PROMPT, max_new_tokens=24, **settings))
    for name, other in {"temperature": 3.0, "top_p": 0.2, "top_k": 2, "seed": 6}.items():
        assert text(**settings | {name: other}).tokens != wanted.tokens, name
    assert text(temperature=0).tokens == text().tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 1.0, "seed": 3, "sampling": Sampling()}, "temperature and seed and sampling are both given"),
        ({"top_p": 0.9}, "top_p has no effect without a temperature; give temperature too"),
        ({"top_k": 5, "seed": 1}, "top_k has no effect without a temperature"),
        ({"temperature": -1}, "temperature must be a number of at least 0"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(target: TransformersTarget, given: Any, message: str) -> None:
    for call in (generate, stream):
        with pytest.raises(ConfigError, match=message):
            call(target, PROMPT, max_new_tokens=3, **given)


class WaitsForTheOther(Drafter):
    """Drafts nothing until the target has verified something meanwhile."""

    limit = 2

    def __init__(self) -> None:
        self.drafting, self.verified = threading.Event(), threading.Event()

    def propose(self, memory: Any, state: Any, budget: torch.Tensor) -> Draft:
        if not self.drafting.is_set():
            self.drafting.set()
            assert self.verified.wait(20), "nothing was verified while a draft was made"
        return super().propose(memory, state, budget)


def test_one_half_is_verified_while_the_other_is_drafted_for(target, monkeypatch):
    """Catches halves that take turns, and a text that depends on which half it is in."""
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11]]
    settings = {"max_new_tokens": 9, "temperature": 0.8, "seed": 3, "policy": "fixed", "slots": 3}
    plain = generate(target, prompts, **settings)
    drafter, verify = WaitsForTheOther(), target.verify

    def noted(*args: Any, **more: Any) -> Any:
        if drafter.drafting.is_set():
            drafter.verified.set()
        return verify(*args, **more)

    monkeypatch.setattr(target, "verify", noted)
    assert generate(target, prompts, drafter, **settings, halves=True) == plain


def test_what_two_halves_would_share_is_refused(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two threads that write into one policy, or replay into the same memory."""
    with pytest.raises(ConfigError, match="by name"):
        generate(target, [[1], [2]], "ngram", max_new_tokens=2, policy=Fixed(2), halves=True)
    monkeypatch.setattr(target.step, "graph", CudaGraphs(torch.nn.Identity()))
    with pytest.raises(ConfigError, match="compile=False"):
        generate(target, [[1], [2]], max_new_tokens=2, halves=True)
