"""Pipelined decoding: the text is the target's, and cycles are counted as the paper counts them."""

import pytest
import torch
from conftest import Case
from contracts.chances import follows
from contracts.parties import TableTarget

from outrider.generation import batch, requests
from outrider.lab.pipeline import PipelineDrafter, StageOutput, cycles
from outrider.lab.stages import LayerRange, stages_of
from outrider.sampling.distribution import Settings
from outrider.sampling.settings import Sampling

CASE = Case("pipeline")


class Oracle(PipelineDrafter):
    """Knows the text, or always guesses a token beside it."""

    def __init__(self, text: list[int], vocabulary: int, beside: int = 0):
        self.text, self.vocabulary, self.beside = text, vocabulary, beside

    def guess(self, memory, state, tokens, known):
        token = (self.text[len(state.tokens[0]) + len(tokens)] + self.beside) % self.vocabulary
        return torch.nn.functional.one_hot(torch.tensor([token]), self.vocabulary).double()


def written(target, stages, drafter, prompt, count, sampling=None) -> tuple[list[int], list[int | None]]:
    """The new tokens, and what each cycle committed."""
    state = batch(target, 1, ends=frozenset())
    (request,) = requests(target, prompt, count, sampling or Sampling())
    found = list(cycles(stages, drafter, state, request))
    return state.tokens[0][len(prompt) :], found


def stages_for(target, count, drafter, length=90) -> list[LayerRange]:
    return stages_of(target, count, length, drafter.taps)


@pytest.mark.parametrize("stages", [2, 4])
def test_every_text_is_the_targets_own(target, prompts, plain, drafter_of, stages):
    """Catches a stage that reads other positions, keys of a dropped token, or a token committed for being guessed."""
    drafter = drafter_of(CASE)
    for prompt in prompts[:3]:
        text, found = written(target, stages_for(target, stages, drafter), drafter, prompt, 24)
        assert text == plain(target, prompt, 24)
        assert [token for token in found if token is not None] == text


def test_a_seeded_text_is_plain_decodings(target, prompts, drafter_of):
    """Catches noise of another output index: drafted and judged by the target's own draws, the text is the same."""
    drafter, sampling = drafter_of(CASE), Sampling(1.0, seed=5)
    for prompt in prompts[:2]:
        plain_text, _ = written(target, stages_for(target, 1, drafter), drafter, prompt, 16, sampling)
        text, _ = written(target, stages_for(target, 4, drafter), drafter, prompt, 16, sampling)
        assert text == plain_text


class TableStage:
    """Stage `number` of a table's three: only the last gives logits, of the token that it reads and the one before."""

    def __init__(self, target: TableTarget, number: int):
        self.target, self.number, self.text = target, number, list[int]()

    def begin(self, tokens, states, start):
        assert (states is None) == (self.number == 0)
        self.text[start:] = tokens[0].tolist()

    def end(self):
        before, own = ([0, *self.text])[-2:]
        logits = self.target.table[before, own][None, None] if self.number == 2 else None
        return StageOutput(self.target.features[before, own][None, None], None, logits)


class Near(PipelineDrafter):
    """Guesses from a table that is near the target's, and not it."""

    def __init__(self, target: TableTarget):
        noise = torch.randn(target.table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.table = 0.6 * target.table + 0.7 * noise

    def guess(self, memory, state, tokens, known):
        before, own = ([0, *state.tokens[0], *tokens])[-2:]
        return self.table[before, own][None]


def test_sampled_texts_follow_the_targets_distribution():
    """Catches noise that a draft and its judge share, and a q of another token.  False alarm 1e-6."""
    sampling, table, tokens = {"temperature": 1.0}, TableTarget.random(3), []
    drafter, stages = Near(table), [TableStage(table, number) for number in range(3)]
    for _ in range(500):
        tokens.append(written(table, stages, drafter, [0, 1], 3, Sampling(**sampling))[0])
    expected = table.distribution([0, 1], 3, Settings.of([Sampling(**sampling)]))
    assert follows(torch.tensor(tokens), expected)


def test_a_request_ends_where_it_asks_to(target, prompts, plain, drafter_of):
    """Catches tokens beyond an end, a limit or a context, and a slot that can't be used again."""
    drafter, prompt = drafter_of(CASE), prompts[0]
    stages, state = stages_for(target, 2, drafter), batch(target, 1, ends=frozenset([plain(target, prompt, 9)[6]]))
    for _ in range(2):
        (request,) = requests(target, prompt, 20, Sampling())
        list(cycles(stages, drafter, state, request))
        assert state.tokens[0][len(prompt) :] == plain(target, prompt, 7)
        assert state.finished[0] == "stop"
