"""Prompts that are longer than the context are cut, and every report says so."""

import json
import logging
from pathlib import Path

import pytest
from tiny import make_folder

from outrider.gate import parity
from outrider.measure.config import Config
from outrider.measure.run import evaluate
from outrider.plan.measured import probe
from outrider.plan.measured.sample import draw
from outrider.report import summary
from outrider.report.page import render
from outrider.report.schema import Report
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.text.cuts import Cuts, sentence

LONG = "many words " * 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    return load_target(str(make_folder(tmp_path_factory.mktemp("target") / "t", max_position_embeddings=256)))


def test_what_fits_is_whole_and_what_does_not_is_named() -> None:
    """Catches a cut at the wrong end, one that is not counted, and a prompt of just the right length that is."""
    cuts = Cuts()
    assert cuts.fit([1, 2, 3], 3, "a") == [1, 2, 3] and not cuts.lost
    assert cuts.fit([1, 2, 3, 4, 5], 3, "b") == [3, 4, 5]
    assert cuts.fit([1, 2, 3, 4], 3, "b") == [2, 3, 4]
    assert cuts.lost == {"b": 2}
    assert sentence({}) == ""
    assert sentence(cuts.lost).startswith("1 prompt was cut at the front") and "b (by 2 tokens)" in sentence(cuts.lost)
    assert sentence({str(i): i for i in range(1, 9)}).endswith("and 3 more")


def test_an_evaluation_names_the_prompts_that_it_cut(target: TransformersTarget, tmp_path: Path) -> None:
    """Catches figures of a half prompt that pass for the prompt's, in report.json, on the page and after a restart."""
    task = tmp_path / "task.jsonl"
    rows = [{"id": "short", "turns": ["hi"]}, {"id": "long", "turns": [LONG]}, {"id": "later", "turns": ["a", LONG]}]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(tasks=(str(task),), prompts=3, max_new_tokens=8, min_first_ngrams=0.0, repeats=0)
    report = evaluate(target, "ngram", config)
    assert set(report.cut) == {"long", "later"} and min(report.cut.values()) > 100
    again = Report.model_validate_json(report.model_dump_json(by_alias=True))
    assert again.cut == report.cut
    assert "long (by " in summary.cut_sentence(report)
    assert "2 prompts were cut at the front" in render(report)


def test_parity_and_a_probe_say_what_they_cut(
    target: TransformersTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches the other places that make room for an answer."""
    path = tmp_path / "task.jsonl"
    path.write_text(json.dumps({"id": "long", "messages": [{"role": "user", "content": LONG}]}) + "\n")
    with caplog.at_level(logging.WARNING):
        names, tokens = parity.prompts_of(target, str(path), 1, 8)
        assert (names, len(tokens[0])) == (["long"], 248)
        reads, refused = probe.encode(target, draw(path, None, 1, 0).questions)
    assert (len(reads), refused) == (1, 0)
    assert sum("1 prompt was cut at the front" in record.getMessage() for record in caplog.records) == 2
