"""Whole steps that were compiled into one call write what plain steps write."""

from typing import Any

import pytest
from conftest import Case, Workshop, first, tiny_model
from test_whole_step import SAMPLINGS, V, cells, requests_of, small, taken_as_it_is, written

from outrider import generation
from outrider.decoding.protocols import Drafter
from outrider.fast.whole import steps as whole_step
from outrider.fast.whole.package import CompiledWholeStep, StepPackage
from outrider.sampling.settings import Sampling
from outrider.targets.cache import stacks
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

__all__ = ["small"]
PLAIN, TREE = Case("plain"), Case("dflash", {"siblings": (2, 1)})
CASES = [
    PLAIN, TREE, Case("dspark"), Case("eagle3"), Case("mtp"), Case("medusa"), Case("small_model"), Case("domino"),
    Case("eagle3", {"width": 3, "nodes": 7}), Case("mtp", {"width": 2, "nodes": 9}),
    Case("medusa", {"sequential": True}), Case("small_model", {"width": 2, "nodes": 9}),
]  # fmt: skip
SLOTS = (3, 6)
"""Of batches: fewer than requests, so that they are used again, and as many, so that some end beside others."""


@pytest.fixture(scope="module")
def fast() -> TransformersTarget:
    target = load_target(tiny_model(vocab_size=V, num_hidden_layers=2))
    target.compile()
    return target


@pytest.fixture(autouse=True)
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow while texts do."""
    monkeypatch.setattr(stacks.lazy_memory, "comes_by_page", lambda device: False)
    monkeypatch.setattr(stacks, "FIRST", 40)


def drafter_of(case: Case, target: Any, workshop: Workshop) -> Any:
    return Drafter() if case == PLAIN else workshop.build(case, target)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots of every step that was launched."""
    found: list[list[int]] = []
    real = StepPackage.launch

    def noted(self: StepPackage, columns: int, rows: Any, nodes: int) -> Any:
        found.append([*rows])
        assert len(found) < 2000, "a text without an end"
        return real(self, columns, rows, nodes)

    monkeypatch.setattr(StepPackage, "launch", noted)
    return found


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledWholeStep, "get", taken_as_it_is)
    monkeypatch.setattr(whole_step, "is_compiled", lambda target: True)


def compare(case: Case, kind: str, target: Any, workshop: Workshop, launched: list[list[int]]) -> None:
    """Uneven prompts, slots that are used again and slots between which none is live, ends by token, length and the
    host's stop, caches that grow.  A second batch begins with nothing of the first."""
    drafter, requests = drafter_of(case, target, workshop), requests_of(SAMPLINGS[kind])
    for slots in SLOTS:
        plain, found = (written(target, drafter, requests, slots=slots, packages=way) for way in (False, True))
        if kind in ("mixed", "cut"):  # slots go from steps of greedy requests to others and back, and lose a draft
            plain, found = ([own[:2] for own in texts] for texts in (plain, found))
        assert found == plain
        assert {reason for _, reason, *_ in plain} >= {"stop", "length"}
    live = {len(rows) for rows in launched}
    assert live > {*SLOTS} and min(live) < min(SLOTS)
    assert any(rows != [*range(rows[0], rows[0] + len(rows))] for rows in launched)


@pytest.mark.slow
def test_packaged_trees_are_those_of_plain_steps(fast, workshop, launched):
    """Catches a tensor that the package does not write, one of another slot, a size that was fixed when the step was
    traced, and a setting of `generate` that records steps in Python where passes are compiled.
    """
    compare(TREE, "greedy", fast, workshop, launched)
    drafter = workshop.build(TREE, fast)
    before, prompts = len(launched), [[1, 2, 3], [4], [5, 6]]
    given: Any = {"max_new_tokens": 12, "policy": "fixed"}
    plain = generation.generate(fast, prompts, drafter, **given)
    assert generation.generate(fast, prompts, drafter, **given) == plain
    assert len(launched) > before


@pytest.mark.parametrize("cell", first(cells(CASES), 8), ids=lambda cell: "-".join(map(str, cell)))
def test_what_is_compiled_writes_what_plain_steps_write(cell, small, workshop, launched, not_compiled):
    """The same of what would be compiled, for more drafters than there is time to compile: catches tensors of slots
    that are not side by side which are written back too late, over those of the next request."""
    compare(*cell, small, workshop, launched)


@pytest.mark.parametrize(("kind", "is_greedy"), [("eagle3", True), ("small_model", False)])
def test_trees_of_other_shapes_are_other_packages(kind, is_greedy, small, workshop, not_compiled):
    """Catches a package on disk that is taken for one of another width, depth or number of nodes."""
    shapes: list[dict[str, int]] = [{"width": 2}, {"width": 3}, {"width": 2, "nodes": 5}, {"width": 2, "length": 2}]
    asked = Sampling(temperature=0.0 if is_greedy else 0.8)
    keys = set()
    for shape in shapes:
        drafter = workshop.build(Case(kind, shape), small)
        first, again = (written(small, drafter, requests_of([asked])[:1], packages=True) for _ in "ab")
        assert first == again
        [made] = vars(getattr(drafter.model, "model", drafter.model))["whole_steps"].values()
        keys.add(repr(made.settings()))
    assert len(keys) == len(shapes)
