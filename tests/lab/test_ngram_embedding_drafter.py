"""Hashed n-grams as a drafter: logits by hand, serving as in training, every node after its own branch."""

import pytest
import torch
from tiny import randomise

from outrider.decoding.state import DecodeState, Request
from outrider.lab.drafters import ngram_embedding
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

ENDS = (9, 3)
TEXTS = [[5], [40, 9], [11, 12, 9, 13, 14, 15], [3, 8, 7]]


def made(target, **settings):
    torch.manual_seed(1)
    config = ngram_embedding.Config(**{"order": 4, "dim": 8, "boundaries": ENDS} | settings)
    model = ngram_embedding.Model(config, target).double()
    randomise(model, by=0.3)
    return model.eval()


def state_of(target, texts, temperature: float = 0.0) -> DecodeState:
    state = DecodeState(len(texts), 100, judge=SamplingJudge())
    for row, text in enumerate(texts):
        state.admit(row, Request(text, 20, Sampling(temperature)))
    return state


def logits_after(model, text: list[int]) -> torch.Tensor:
    tokens = torch.tensor([text])
    with torch.no_grad():
        return model.logits(model.read(tokens, torch.ones_like(tokens)))[0, -1]


def test_logits_are_the_targets_head_of_the_mean_of_what_is_looked_up(target):
    """Catches rows of another table, an n-gram that reaches over an end, and a sum in place of the mean."""
    model = made(target, splits=2, ratio=3)
    text, powers = [12, 20, 9, 13, 14, 15], [64**back for back in range(4)]
    with torch.no_grad():
        terms, start = [model.word(target.embed(torch.tensor(15)))], 0
        for table in range(6):
            size, grams = 3 * 64 + 2 * table + 1, [15, 14, 13][: 2 + table // 2]  # 9 ends the longest
            row = sum(token * power for token, power in zip(grams, powers, strict=False)) % size
            own = model.ngrams.projection.weight[:, 8 * table : 8 * table + 8]
            terms.append(own @ model.ngrams.ngram_table.weight[start + row])
            start += size
        wanted = target.head(model.norm(torch.stack(terms).mean(0)))
    torch.testing.assert_close(logits_after(model, text), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_trees_node_is_drafted_after_its_own_branch(target, temperature):
    """Catches siblings that see each other: every eldest child comes from the distribution after its own path."""
    model = made(target, width=2, nodes=10)
    draft = model.drafter().propose(None, state_of(target, TEXTS, temperature), torch.full((4,), 10))
    for b, text in enumerate(TEXTS):
        paths, eldest = [list(text)], 0
        for n, (token, parent) in enumerate(zip(draft.ids[b], draft.tree[b], strict=True)):
            paths.append([*paths[parent + 1], token])
            if parent in draft.tree[b][:n]:
                continue
            eldest += 1
            logits = logits_after(model, paths[parent + 1])
            if temperature:
                torch.testing.assert_close(draft.q[b, n], (logits / 0.7).softmax(-1), rtol=1e-6, atol=1e-8)
            else:
                assert token == int(logits.argmax())
        assert eldest > 3


def test_the_ends_of_training_stay_those_of_serving(target, monkeypatch):
    """Catches n-grams that change with the end tokens that a user sets later."""
    monkeypatch.setattr(target, "ends", frozenset({7, 2}))
    model = ngram_embedding.Model(ngram_embedding.Config(), target)
    assert model.config.boundaries == (2, 7)
    assert made(target).config.boundaries == (3, 9)
