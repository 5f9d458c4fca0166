"""Contemplate rows beside every node: one file on the `Probe` seam, exact, and read where they are said to stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import contemplate

from benchmarks.families import tiny
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target


def test_it_is_one_file_of_at_most_150_lines():
    """Catches a seam that asks for more than a drafter."""
    assert len(Path(contemplate.__file__).read_text().splitlines()) <= 150


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_texts_are_the_targets_own(target, prompts, slots, sampling):
    """Catches probe rows that a drafted row sees, that stay in the cache, or that move a position."""
    drafter = contemplate.build(contemplate.Config(), target)
    found = generate(target, prompts, drafter, max_new_tokens=24, slots=slots, sampling=sampling)
    wanted = generate(target, prompts, max_new_tokens=24, slots=slots, sampling=sampling)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


def test_contemplate_rows_are_what_the_target_makes_of_the_soft_prompt_behind_the_text(target, prompts):
    """Catches a row that stands elsewhere, sees another branch or another node's rows, or is given another
    embedding."""
    seen: list[tuple[int, torch.Tensor]] = []

    class Watched(contemplate.Contemplate):
        def observe(self, memory, state, draft, accepted, scores: Scores):
            super().observe(memory, state, draft, accepted, scores)
            seen.extend(
                (len(state.tokens[row]) - (accepted.next_tokens[b] >= 0), memory[row])
                for b, row in enumerate(state.rows)
            )

    drafter = Watched(target, contemplate.Config())
    (found,) = generate(target, prompts[2], drafter, max_new_tokens=20)
    text = [*target.encode(prompts[2]), *found.tokens]
    assert len(seen) == found.steps
    for length, states in seen:
        words = torch.cat([target.embed(torch.tensor(text[:length])), drafter.prompt.to(torch.float64)])
        wanted = target.model.model(inputs_embeds=words[None]).last_hidden_state[0, length:]
        torch.testing.assert_close(states, wanted, rtol=1e-8, atol=1e-8)


def test_a_target_without_masks_by_row_refuses_a_probe():
    """Catches a recurrent target whose state would take the soft prompt in."""
    recurrent = load_target(tiny("mamba2"))
    with pytest.raises(TargetError, match="can't run a probe"):
        generate(recurrent, [[1, 2, 3]], contemplate.build(contemplate.Config(), recurrent), max_new_tokens=4)


def test_a_probe_that_drafted_rows_see_is_caught(target, prompts, monkeypatch):
    """Planted fault: the last drafted row sees the first row of the probe."""
    scores = target._scores

    def leaking(tokens, cache, tree, taps):
        if tree is not None and tree.mask.shape[1] > 4:
            mask = tree.mask.clone()
            mask[:, : mask.shape[1] // 4, -1] = True
            tree = tree._replace(mask=mask)
        return scores(tokens, cache, tree, taps)

    monkeypatch.setattr(target, "_scores", leaking)
    with pytest.raises(AssertionError):
        test_texts_are_the_targets_own(target, prompts, 1, None)


def test_a_probe_is_three_tensors():
    probe = Probe(torch.zeros(1, 2, 4), torch.zeros(1, 2, 3, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64))
    assert probe.mask.shape[2] == 1 + probe.depths.shape[1]
