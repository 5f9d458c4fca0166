"""Texts that part are told apart: by rounding, or by a fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, tiny_model
from tiny import folder as folder
from tiny import write_run_file
from verbs import outrider_with

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.protocols import Drafter
from outrider.errors import DataError
from outrider.gate.parity import Audit, compare, compare_samples
from outrider.gate.texts import compare_texts
from outrider.runs import stages
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget as Target
from outrider.targets.load import load_target

DrafterOf = Callable[[Case], Drafter]


def keeps_the_first(draft: Draft, p: torch.Tensor, streams: Streams) -> Accepted:
    """A broken rule: the first drafted token stays, whatever the target says of it."""
    if not draft.tokens.shape[1]:
        return accept(draft, p, streams)
    has = draft.sizes > 0
    following = streams.draw(p[torch.arange(len(p)), has.long()], has.long(), Purpose.TARGET)
    return Accepted([[0] if kept else [] for kept in has.tolist()], following.tolist(), [0] * len(p))


def test_a_rule_that_keeps_a_wrong_token_is_a_bug(target, prompts, drafter_of) -> None:
    """Catches an audit that finds an excuse for everything: the kept token stands far below the likeliest."""
    found = compare(target, prompts, drafter_of(Case("ngram")), max_new_tokens=24, judge=SamplingJudge(keeps_the_first))
    assert found.verdict == "bug"
    faulty = [pair for pair in found.pairs if pair.verdict == "bug"]
    for pair in faulty:
        assert pair.margin is not None
        assert pair.margin.strays == "drafted"
        assert pair.margin.units > 1000
        assert pair.margin.position == pair.shared
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["verdict"] == "bug"


def twins(gap: float = 0.0) -> tuple[Target, list[int], list[int], list[int]]:
    """A bfloat16 target whose two likeliest first tokens have the same row of the head, up to a factor; and both
    texts."""
    model = tiny_model().bfloat16()
    prompt = [5, 9, 3]
    with torch.no_grad():
        first = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
        other = (first + 7) % 64
        model.lm_head.weight[other] = model.lm_head.weight[first] * (1 - gap)
    target = load_target(model)
    rest = {token: greedy(model, [*prompt, token], 5) for token in (first, other)}
    return target, prompt, [first, *rest[first]], [other, *rest[other]]


def greedy(model: Any, text: list[int], count: int) -> list[int]:
    for _ in range(count):
        text = [*text, int(model(torch.tensor([text])).logits[0, -1].argmax())]
    return text[-count:]


def test_two_tokens_with_one_row_of_the_head_are_a_tie() -> None:
    """Catches an audit that calls rounding a fault."""
    target, prompt, plain, drafted = twins()
    pair = Audit(target).pair("twins", prompt, plain, drafted)
    assert pair.verdict == "tie"
    assert pair.shared == 0
    assert pair.margin is not None
    assert (pair.margin.units, pair.margin.strays) == (0, "neither")


def test_two_tokens_a_third_apart_are_no_tie() -> None:
    """Catches a unit of rounding that is far too large: the same texts, with the second token's row a third smaller."""
    target, prompt, plain, drafted = twins(0.34)
    pair = Audit(target).pair("apart", prompt, plain, drafted)
    assert pair.verdict == "bug"
    assert pair.margin is not None
    assert pair.margin.strays == "drafted"
    assert pair.margin.exact_shortfall is not None, "a tiny model fits in float64"
    assert pair.margin.exact_shortfall[1] == pytest.approx(pair.margin.shortfall[1], rel=0.1)


def test_the_side_that_strays_is_named(target: Target, prompts: list[list[int]]) -> None:
    """Catches a fault of plain decoding that is laid at the drafter's door, and one that both share."""
    right = greedy(target.model, prompts[0], 6)
    wrong = [*right[:3], (right[3] + 1) % 64, *right[4:]]
    audit = Audit(target)
    for plain, drafted, strays in ((right, wrong, "drafted"), (wrong, right, "plain"), (wrong, wrong, "both")):
        pair = audit.pair("", prompts[0], plain, drafted)
        assert pair.verdict == "bug"
        assert pair.margin is not None
        assert (pair.margin.strays, pair.margin.position) == (strays, 3)


def test_a_text_that_ends_too_early_is_a_bug(target: Target, prompts: list[list[int]]) -> None:
    """Catches a comparison up to the shorter text's end."""
    right = greedy(target.model, prompts[0], 6)
    pair = Audit(target).pair("", prompts[0], right, right[:4])
    assert (pair.verdict, pair.shared, pair.tokens) == ("bug", 4, 6)
    assert pair.margin is not None
    assert pair.margin.tokens == (right[4], None)


def test_prompts_that_leave_no_room_are_refused(target: Target, drafter_of: DrafterOf) -> None:
    """Catches texts of unequal length that only the context's end made so."""
    with pytest.raises(DataError, match="room for 1 to 246"):
        compare(target, [[1] * 250], drafter_of(Case("ngram")), max_new_tokens=10)


@pytest.fixture(scope="module")
def cool(prompts: list[list[int]]) -> dict[str, Any]:
    """Settings under which a few tokens share the probability."""
    return {
        "prompts": [prompts[0], prompts[2]],
        "sampling": Sampling(0.7, top_k=4),
        "samples": 100,
        "max_new_tokens": 2,
        "slots": 50,
    }


def test_sampled_texts_of_an_honest_drafter_follow_the_distribution(target, drafter_of, cool) -> None:
    """Catches two sets that share their noise, or a rule of comparison that is not the distribution; false alarms: 1 %,
    seeds fixed."""
    found = compare_samples(target, drafter=drafter_of(Case("small_model")), **cool)
    assert found.verdict == "no difference"
    assert (found.prompts, found.samples) == (2, 100)
    assert 0 < found.detectable < 0.45


def test_a_sampled_draft_that_is_always_kept_is_caught(target, drafter_of, cool) -> None:
    """Catches a comparison that runs the distribution whatever rule it was given, or one that is blind."""
    found = compare_samples(
        target, drafter=drafter_of(Case("small_model")), judge=SamplingJudge(keeps_the_first), **cool
    )
    assert found.verdict == "different"


def answers(path: Path, *rows: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_texts_of_two_servers_are_compared_by_id(tmp_path: Path) -> None:
    """Catches a comparison by order where ids say otherwise, and an index that is off by one."""
    ours = answers(tmp_path / "a.jsonl", {"id": "x", "text": "one two"}, {"id": "y", "answer": "same"})
    theirs = answers(tmp_path / "b.jsonl", {"id": "y", "text": "same"}, {"id": "x", "text": "one too"})
    differing, equal = compare_texts(ours, theirs).pairs
    assert (differing.id, differing.first_character, differing.excerpts) == ("x", 5, ("wo", "oo"))
    assert (equal.id, equal.is_equal) == ("y", True)


def test_files_of_answers_that_can_not_be_compared_are_refused(tmp_path: Path) -> None:
    """Catches answers that are left out in silence."""
    ours = answers(tmp_path / "a.jsonl", {"id": "x", "text": "one"})
    for rows, message in (
        ([{"id": "z", "text": "one"}], "has an answer to 'x', but"),
        ([{"id": "x", "prompt": "one"}], "line 1 has no answer"),
        ([{"id": "x", "text": "a"}, {"id": "x", "text": "b"}], "line 2: id 'x' occurs a second time"),
        ([], "has no answer in it"),
    ):
        with pytest.raises(DataError, match=message):
            compare_texts(ours, answers(tmp_path / "b.jsonl", *rows))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_compares_greedy_and_sampled_texts(folder, here, capsys, monkeypatch) -> None:
    """Catches a verb whose parts do not fit together, a JSON that lacks what the table says, and a target's setting
    that the run obeys and the comparison does not, such as whether steps are compiled."""
    given: list[dict[str, Any]] = []
    load = stages.load_target
    monkeypatch.setattr(
        stages, "load_target", lambda name, **options: (given.append(options), load(name, **options))[1]
    )
    recipe = write_run_file(here / "tiny.yaml", folder, drafter={"kind": "ngram"}, train=None, evaluate=None)
    target = f"target: {{name: {folder}, dtype: float32, compile: false}}"
    recipe.write_text(recipe.read_text().replace(f"target: {folder}", target))
    prompts = str(here / "held_out.jsonl")
    common = ["--prompts", prompts, "--count", "2", "--max-new-tokens", "8", "--json", "found.json"]
    sampled = ["--temperature", "1", "--samples", "20", "--sampled-tokens", "3"]
    assert outrider_with("parity", str(recipe), *common, *sampled) == 0
    assert [(options["dtype"], options["compile"]) for options in given] == [("float32", False)]
    found = json.loads((here / "found.json").read_text())
    assert (found["greedy"]["verdict"], found["sampled"]["verdict"]) == ("equal", "no difference")
    assert found["drafter"] == "ngram" and found["weights"] is None
    said = capsys.readouterr().out
    assert "2 of 2 texts equal" in said
    assert "80 % power" in said
    assert outrider_with("parity", "--target", str(folder), "--drafter", "ngram", *common) == 0
    assert json.loads((here / "found.json").read_text())["sampled"] is None


def test_the_command_ends_with_1_where_texts_differ_and_2_where_it_is_used_wrongly(here, capsys) -> None:
    """Catches a difference that a script would take for success."""
    ours = answers(here / "a.jsonl", {"id": "x", "text": "one"})
    theirs = answers(here / "b.jsonl", {"id": "x", "text": "two"})
    assert outrider_with("parity", "--texts", str(ours), "--texts", str(theirs)) == 1
    assert outrider_with("parity", "--texts", str(ours), "--texts", str(ours)) == 0
    assert outrider_with("parity", "--texts", str(ours)) == 2
    assert outrider_with("parity") == 2
    assert outrider_with("parity", "tiny.yaml", "--drafter", "ngram") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_command_ends_with_1_on_a_bug(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exit code that hangs on the table alone.  The rule is broken beneath the command, which offers
    none."""
    from outrider.cli import parity

    whole = parity.compare
    monkeypatch.setattr(
        parity, "compare", lambda *given, **more: whole(*given, **more, judge=SamplingJudge(keeps_the_first))
    )
    write_run_file(here / "tiny.yaml", folder)
    options = ["--prompts", str(here / "held_out.jsonl"), "--count", "2", "--max-new-tokens", "16"]
    assert outrider_with("parity", "--target", str(folder), "--drafter", "recycle", *options) == 1
