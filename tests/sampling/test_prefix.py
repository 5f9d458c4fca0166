"""Penalties, bias, bad words and the least length, on each node's own prefix; beside a slow twin, transformers and the
exact."""

import itertools
import math

import pytest
import torch
from contracts.chances import emitted, follows
from contracts.parties import TableTarget, Tree
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.errors import ConfigError
from outrider.generation import generate
from outrider.sampling.prefix import Prefix, processed
from outrider.sampling.settings import Sampling

V = 7
ENDS = frozenset({2, 5})
SETTINGS = {
    "repetition": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {0: 2.5, 3: -4.0}},
    "bad words": {"bad_words": [[1], [3, 4], [0, 0, 6], [6, 3, 3, 0]]},
    "least": {"min_new_tokens": 3},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.5, "logit_bias": {6: 1.5},
        "bad_words": [[3, 4], [6, 6], [0]], "min_new_tokens": 2,
    },
}  # fmt: skip


def by_hand(logits: list[float], prompt: list[int], output: list[int], sampling: Sampling, ends=ENDS) -> list[float]:
    """One row, the slow way: every token by itself."""
    bias, text, found = dict(sampling.logit_bias), prompt + output, []
    for token, value in enumerate(logits):
        value += bias.get(token, 0.0)
        if token in text:
            value = value * sampling.repetition_penalty if value < 0 else value / sampling.repetition_penalty
        value -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty * (token in output)
        for word in sampling.bad_words:
            if (
                word[-1] == token
                and tuple(text[len(text) - len(word) + 1 :]) == word[:-1]
                and len(text) >= len(word) - 1
            ):
                value = -math.inf
        if token in ends and len(output) < sampling.min_new_tokens:
            value = -math.inf
        found.append(value)
    return found


def path_to(tokens: list[int], parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path, node = [tokens[node], *path], parents[node]
    return path


@st.composite
def drafted(draw):
    """A draft of some slots, each with its settings, prompt and output."""
    slots, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    token = st.integers(0, V - 1)
    parents = [draw(st.integers(-1, n - 1)) for n in range(nodes)]
    table = [[draw(token) for _ in range(nodes)] for _ in range(slots)]
    texts = [(draw(st.lists(token, min_size=1, max_size=5)), draw(st.lists(token, max_size=6))) for _ in range(slots)]
    chosen = [draw(st.sampled_from([None, *SETTINGS])) for _ in range(slots)]
    sizes = [draw(st.integers(0, nodes)) for _ in range(slots)]
    return table, parents, sizes, texts, chosen, draw(st.integers(0, 1000))


@given(drafted())
def test_every_row_is_what_it_is_by_hand(drawn):
    """Catches a row with another's prefix, a count that is off, and a setting that reaches the neighbour."""
    table, parents, sizes, texts, chosen, seed = drawn
    slots, nodes = len(table), len(parents)
    prefixes = []
    for b, name in enumerate(chosen):
        if name is not None:
            prefix = Prefix(Sampling(**SETTINGS[name]), texts[b][0], ENDS | {10_000})
            for token in texts[b][1]:
                prefix.push([token])
            prefixes.append((b, prefix))
    logits = 2 * torch.randn(slots, nodes + 1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    tokens = torch.tensor(table, dtype=torch.int64).view(slots, nodes)
    draft = Draft(tokens, torch.tensor(parents, dtype=torch.int64).expand(slots, nodes), torch.tensor(sizes))
    found = processed(logits, draft, prefixes)
    assert torch.equal(logits, before)
    for b, name in enumerate(chosen):
        followed = {0}
        for row in range(sizes[b] + 1):
            if row and parents[row - 1] + 1 not in followed:
                continue  # it can't be reached
            output = texts[b][1] + path_to(table[b], parents, row - 1)
            sampling = Sampling(**SETTINGS[name]) if name else Sampling()
            wanted = by_hand(logits[b, row].tolist(), texts[b][0], output, sampling, ENDS if name else ())
            assert found[b, row].tolist() == pytest.approx(wanted, abs=1e-12)
            may_follow = {n for n in range(V) if wanted[n] > -math.inf and not (name and n in ENDS)}
            followed |= {n + 1 for n in range(sizes[b]) if parents[n] == row - 1 and table[b][n] in may_follow}


def test_bfloat16_logits_are_penalised_in_float32():
    """Catches penalties that are lost to rounding."""
    prefix = Prefix(Sampling(frequency_penalty=0.01), [0], ())
    prefix.push([1])
    logits = torch.tensor([[[8.0, 8.0, 8.0]]], dtype=torch.bfloat16)
    found = processed(logits, Draft.empty(1), [(0, prefix)])
    assert found[0, 0].tolist() == pytest.approx([8.0, 7.99, 8.0])


SMALL = TableTarget.random(4)
MIXED = {
    "temperature": 1.0, "repetition_penalty": 2.5, "presence_penalty": 0.7, "frequency_penalty": 0.9,
    "bad_words": [[1, 2], [3, 3]],
}  # fmt: skip
TREES = {"chain": Tree(SMALL, [-1, 0, 1], "replacement"), "without": Tree(SMALL, [-1, -1, 0, 0, 1, 2], "without")}


@pytest.mark.parametrize(("tree", "seeded"), [("chain", False), ("without", True)])
def test_penalised_and_banned_texts_keep_the_distribution(tree, seeded):
    """Catches residuals and coins that see another distribution than the one drawn from, one penalty for a whole block,
    and a sibling's path.  False alarm 1e-6."""
    prompt, sampling, joint = [0, 1], Sampling(**MIXED), torch.zeros(4, 4, 4, dtype=torch.float64)
    for text in itertools.product(range(4), repeat=3):
        chance = 1.0
        for n, token in enumerate(text):
            before, own = ([*prompt, *text[:n]])[-2:]
            row = by_hand(SMALL.table[before, own].tolist(), prompt, list(text[:n]), sampling, ())
            chance *= float(torch.tensor(row, dtype=torch.float64).softmax(-1)[token])
        joint[text] = chance
    tokens, _, kept = emitted(SMALL, TREES[tree], slots=1000, prompt=prompt, sampling=MIXED, seeded=seeded)
    assert follows(tokens, joint)
    assert kept > 250


def test_what_the_target_cannot_follow_is_refused_at_once():
    """Catches an index error in mid-text, a ban that wraps around to another token, and a text that can't be."""
    for name, value in (
        ("logit_bias", {V: 1.0}), ("logit_bias", {-1: 1.0}), ("bad_words", [[0, V]]), ("bad_words", [[-2]]),
        ("bad_words", [[n] for n in range(V)]), ("min_new_tokens", 11),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            generate(TableTarget.random(V), [1], max_new_tokens=10, sampling=Sampling(**{name: value}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prefix_that_leaves_no_token_is_an_error(temperature):
    """Catches token 0, or NaN, where everything is forbidden."""
    bad = [[1, n] for n in range(V)]
    table = TableTarget.random(V)
    sampling = Sampling(temperature, bad_words=[[n] for n in range(V) if n != 1] + bad)
    with pytest.raises(ConfigError, match="no token possible"):
        generate(table, [0], max_new_tokens=10, sampling=sampling)
