"""The benchmarks of exactness find what they are for: planted faults are mismatches, and only near logits are a tie."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import families, replay, soak
from outrider.decoding import static
from outrider.decoding.noise import Streams
from outrider.decoding.state import Request
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache
from outrider.targets.load import load_target


@pytest.fixture
def two_families(monkeypatch):
    """One that verifies trees, and one of chains."""
    monkeypatch.setattr(soak, "SMALL", ["qwen3", "lfm2"])
    monkeypatch.setattr(soak, "FORMS", {})


def soaked(cases: int) -> soak.Outcome:
    total = soak.Sum(spans=[[0, 0]])
    for number in range(cases):
        case = soak.drawn(3, number)
        total.add(case, soak.run(case))
    return total.found


@pytest.mark.slow
def test_a_soak_finds_nothing_where_nothing_is_wrong(two_families):
    """Catches settings that can't be drawn or told; and that a case is its number's alone."""
    found = soaked(6)
    assert (found.mismatches, found.ties) == ([], [])
    assert found.tokens > 500
    assert found.events["tokens that `generate` writes too"] > 50
    assert found.events["paths that are no prefix of their tree"] > 10
    assert soak.drawn(3, 2).drafter == soak.drawn(3, 2).drafter != soak.drawn(4, 2).drafter


def test_a_soak_that_was_stopped_goes_on_with_what_it_had(tmp_path, monkeypatch):
    """Catches counts that are lost or doubled when a run is taken up again, and a fault that stays when it was
    mended."""
    monkeypatch.setattr(soak, "drawn", lambda seed, number: number)
    monkeypatch.setattr(
        soak, "tried", lambda case: soak.Outcome(9, mismatches=[{"case": case, "crash": "x"}] * (case == 1))
    )
    first = soak.Sum(spans=[[0, 3]], seconds=2.0)
    first.found = soak.Outcome(
        70, soak.Counter(top_k=30), [{"case": 1, "crash": "x"}], [{"case": 2}], soak.Counter(cut=4)
    )
    mended = {"case": 0, "crash": "y"}
    first.found.mismatches.append(mended)
    first.cases.update(top_k=2)
    (tmp_path / "soak.json").write_text(json.dumps(first.as_json(5, 1.0)))
    again = soak.Sum()
    again.add_file(tmp_path / "soak.json", 5)
    first.found.mismatches.remove(mended)
    told = [total.as_json(5, 0.0) for total in (first, again)]
    assert again.seconds == 3.0
    for name in ("totals", "spans", "settings", "events", "mismatches", "ties"):
        assert told[0][name] == told[1][name]
    assert told[1]["totals"] == {
        "seed": 5,
        "cases": 3,
        "tokens": 70,
        "mismatches": 1,
        "of_these": {"crash": 1},
        "ties": 1,
    }


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_soak_of_recorded_steps_compares_them(is_faulty, monkeypatch):
    """Catches a soak that has rotted, or records nothing; and, planted, noise that is drawn for the token before."""
    monkeypatch.setattr(soak, "SMALL", ["qwen3"])
    monkeypatch.setattr(soak, "FORMS", {})
    advance = static._advance
    if is_faulty:
        monkeypatch.setattr(soak, "wrong", lambda *_: "")
        monkeypatch.setattr(
            static, "_advance", lambda slots, *more: (advance(slots, *more), slots.index.sub_(slots.live.long()))
        )
    case = soak.drawn(3, 1)
    assert is_faulty or soak.tried(case).mismatches == []
    found = soak.tried(soak.recorded(case))
    assert not found.events and found.tokens > 100
    assert bool(found.mismatches) == is_faulty and not any("crash" in one for one in found.mismatches)


def faulty_draw(draw):
    return lambda streams, weights, depth, purpose: draw(streams, weights, 0 * depth, purpose)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Streams, "draw", faulty_draw),
        (SlotCache, "straighten", lambda _: lambda cache, row, start, path: None),
        (SlotCache, "note", lambda _: lambda cache, layer: None),
    ],
    ids=["noise of another depth", "a path that is not moved", "a state that is not noted"],
)
def test_a_soak_sees_planted_faults(two_families, monkeypatch, owner, name, fault):
    """Catches a comparison of a text with itself.  The targets were tried before the fault."""
    for family in soak.SMALL:
        for dtype in ("float32", "float64"):
            soak.target_of(family, dtype)
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    assert soaked(4).mismatches


def test_only_logits_that_are_near_are_a_tie(monkeypatch):
    """Catches an audit that calls everything a tie, at temperature 0, above it, and where a tail is cut."""
    case = soak.Case(0, "qwen3", "float32", [], 1, 1, 64, frozenset(), {}, "whole")
    logits = torch.full((128,), -3.0)
    logits[5], logits[9], logits[20] = 1.0, 1.0 - 3e-6, 0.0
    monkeypatch.setattr(soak, "spread", lambda *_: (logits, 1e-6))
    greedy = Request([1, 2], 8, Sampling())
    assert soak.audit(case, greedy, [3], 5, 9)["drawn"] == [5, 9]
    assert soak.audit(case, greedy, [3], 5, 20) is None
    cold = Request([1, 2], 8, Sampling(1.0, seed=0, top_k=1))
    assert soak.audit(case, cold, [3], 5, 9)["drawn"] == [5, 9]
    assert soak.audit(case, Request([1, 2], 8, Sampling(1.0, seed=0, top_k=3)), [3], 5, 77) is None


def test_the_families_benchmark_sees_a_text_that_is_not_the_models():
    """Catches a comparison of a text with itself; behind the fault the text is compared again."""
    target = load_target(families.tiny("qwen3", "sdpa"))
    texts = families.written(target.model, [12] * 20)
    assert families.compared(target, texts, replay.Replay(texts, 128)) == ([], [])
    texts[2][-4] = (texts[2][-4] + 1) % 128
    mismatches, ties = families.compared(target, texts, replay.Replay(texts, 128))
    assert (mismatches[0]["text"], mismatches[0]["at"], ties) == (2, 8, [])
    one, difference = replay.spread(target, texts[0][:20], 3)
    torch.testing.assert_close(
        one, target.model(torch.tensor([texts[0][:20]])).logits[0, -1].detach(), rtol=1e-9, atol=1e-9
    )
    assert difference < 1e-12


def table(monkeypatch, path, *forms: tuple[str, str]) -> dict[tuple[str, str], dict]:
    """The rows that the table of all forms has when it has tried these."""
    monkeypatch.setattr(families, "forms", lambda: list(forms))
    monkeypatch.setattr("sys.argv", ["families.py", "--tokens", "8", "--out", str(path)])
    with pytest.raises(SystemExit):
        families.main()
    return {(row["family"], row["form"]): row for row in json.loads(path.read_text())["rows"]}


def test_a_table_of_every_family_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    """Catches rows that are lost or tried again, and a family whose outcome is another than its kind's."""
    causal, path = families.CAUSAL, tmp_path / "out.json"
    first = table(monkeypatch, path, ("qwen2", causal), ("bert", causal), ("blip", families.NESTED))
    assert [row["outcome"] for row in first.values()] == ["refused", "not built", "exact"]
    monkeypatch.setattr(
        families, "try_form", lambda kind, form, tokens: {"family": kind, "form": form, "outcome": "exact"}
    )
    second = table(monkeypatch, path, *first, ("llama", causal))
    assert second == {**first, ("llama", causal): {"family": "llama", "form": causal, "outcome": "exact"}}


def test_a_text_that_is_not_generates_is_wrong_in_the_table(monkeypatch):
    """Catches a comparison that compares nothing."""
    true = families.continued
    monkeypatch.setattr(families, "continued", lambda *given: [*true(*given)[:-1], (true(*given)[-1] + 1) % 128])
    row = families.try_form("qwen2", families.CAUSAL, 8)
    assert (row["outcome"], row["mismatches"]) == ("wrong", 4)
