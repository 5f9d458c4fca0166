"""Cue words are ranked by the small model's margins after them, and the planted one is selected."""

import json
import random
import statistics

import pytest
import torch

from outrider.errors import ConfigError, DataError
from outrider.lab.judges.relay import relay
from outrider.policies.sentences import Piece
from outrider.training.fitting.cues import Trace, calibrate, margins, openings, ranked


def trace(seed: int, sure: str, words=("So", "But", "Now", "Then")) -> Trace:
    """Sentences of a cue and six words; margins are about 0.9 after the sure cue and about 0.4 elsewhere."""
    draw, text, found, given = random.Random(seed), "", [], []
    for _ in range(20):
        cue = draw.choice(words)
        for n, word in enumerate([f" {cue}", *[" word"] * 5, " end."]):
            found.append(Piece(text, word))
            text = (text + word)[-40:]
            mean = 0.9 if cue == sure and n else 0.4
            given.append(min(1.0, max(0.0, draw.gauss(mean, 0.1))))
    return Trace(found, given)


@pytest.mark.parametrize("sure", ["So", "But", "Then"])
def test_the_planted_cue_is_the_only_one_that_is_selected(sure: str) -> None:
    """Catches margins that are pooled from the cue itself, past the end of its sentence, or of another word."""
    table = ranked([trace(seed, sure) for seed in range(5)], ["So", "But", "Now", "Then"])
    assert table.cues[0].word == sure
    assert table.selected == (sure,)
    assert table.cues[0].mean == pytest.approx(0.9, abs=0.05)
    assert table.cues[0].difference == pytest.approx(0.5, abs=0.05)
    assert table.tokens == 5 * 20 * 7


def test_candidates_are_the_words_that_begin_the_answers_sentences() -> None:
    """Catches a word inside a sentence, a number of a list, and one that is too rare to rank."""
    words = ["So", " it", " is.", " Then", " so", " be", "\n", "So", " on.", " 1", ".", " So", "!", " Next", " one"]
    pieces = [Piece("".join(words[:at]), word) for at, word in enumerate(words)]
    assert openings([Trace(pieces, [])], 2) == ["So"]
    assert openings([Trace(pieces, [])], 1) == ["So", "Then", "Next"]
    table = ranked([trace(seed, "But") for seed in range(5)])  # its sentences begin with cues alone
    assert table.selected == ("But",) and len(table.cues) == 4


def test_figures_of_a_cue_are_those_of_its_sentences() -> None:
    """Catches a deviation of all tokens, and a count of tokens in the place of occurrences: by hand."""
    words = [" So", " a", " b.", " c", " So", " d", "\n\n", " So"]
    pieces = [Piece("".join(words[:at]), word) for at, word in enumerate(words)]
    table = ranked([Trace(pieces, [0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.9, 0.3])], ["So"], min_count=2)
    (cue,) = table.cues
    after = [0.2, 0.4, 0.7, 0.9]
    assert (cue.count, cue.tokens) == (2, 4)  # the last one has no token after it
    assert cue.mean == pytest.approx(statistics.fmean(after))
    assert cue.deviation == pytest.approx(statistics.pstdev(after))
    assert cue.standard_error == pytest.approx(cue.deviation / 2)
    assert cue.difference == pytest.approx(statistics.fmean(after) - statistics.fmean([0.1, 0.5, 0.6, 0.3]))
    assert table.mean == pytest.approx(3.7 / 8)
    assert table.selected == ("So",)
    assert ranked([Trace(pieces, [0.5] * 8)], ["So"], min_count=3).selected == ()


def test_a_table_is_what_relay_reads(tmp_path, target, prompts) -> None:
    """Catches a file whose form changed on one side."""
    table = ranked([trace(0, "So")], ["So", "But"])
    table.save(tmp_path / "cues.json", target="t")
    assert relay(tmp_path / "cues.json").cues == table.selected == ("So",)
    assert json.loads((tmp_path / "cues.json").read_text())["target"] == "t"
    with pytest.raises(DataError, match="no answer contains a token"):
        ranked([Trace([], [])])
    with pytest.raises(ConfigError, match="no tokenizer"):
        calibrate(target, target, prompts[:1])


def test_margins_are_the_models_own_at_each_token(target, short_target, prompts) -> None:
    """Catches the margin of the next row, and probabilities of another text."""
    text = prompts[2]
    wanted = []
    for at in range(4, len(text)):
        p = target.head(target.read(torch.tensor([text[:at]]), ())[0])[0, -1].softmax(-1)
        best = p.topk(2).values
        wanted.append(float(best[0] - best[1]))
    assert margins(target, text, 4) == pytest.approx(wanted, abs=1e-6)
    text = [n % 60 for n in range(50)]  # longer than the context
    for start, own in ((3, 1), (45, 15)):
        assert margins(short_target, text, start) == pytest.approx(margins(short_target, text[30:], own), abs=1e-6)
