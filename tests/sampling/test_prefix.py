"""Penalties, bias, bad words and the least length, on each node's own prefix; beside a slow twin, transformers and the
exact."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from conftest import FEW, cases, fast, first
from contracts.chances import emitted, follows
from contracts.parties import Oracle, TableTarget, Tree
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError
from outrider.generation import generate, serve
from outrider.sampling import prefix as prefixes
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.judge import SamplingJudge
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
EACH = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


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


def test_what_nobody_asks_for_costs_nothing():
    """Catches a copy of the logits on the default path."""
    logits = torch.randn(1, 1, V)
    assert processed(logits, Draft.empty(1), []) is logits
    state = DecodeState(2, 100, judge=SamplingJudge())
    state.admit(0, Request([1], 5, Sampling(0.7, top_k=3, min_p=0.1, seed=1)))
    assert state.judge.prefixes == []
    state.admit(1, Request([1], 5, Sampling(presence_penalty=0.1)))
    assert [b for b, _ in state.judge.prefixes] == [1]
    state.free(1)
    assert state.judge.prefixes == []


def test_bfloat16_logits_are_penalised_in_float32():
    """Catches penalties that are lost to rounding."""
    prefix = Prefix(Sampling(frequency_penalty=0.01), [0], ())
    prefix.push([1])
    logits = torch.tensor([[[8.0, 8.0, 8.0]]], dtype=torch.bfloat16)
    found = processed(logits, Draft.empty(1), [(0, prefix)])
    assert found[0, 0].tolist() == pytest.approx([8.0, 7.99, 8.0])


@pytest.mark.parametrize(
    ("settings", "processor"),
    [
        ({"repetition_penalty": 1.3}, lambda start: RepetitionPenaltyLogitsProcessor(1.3)),
        ({"bad_words": [[1], [3, 4], [0, 0, 6]]}, lambda start: NoBadWordsLogitsProcessor([[1], [3, 4], [0, 0, 6]])),
        ({"logit_bias": {0: 2.5, 3: -4.0}}, lambda start: SequenceBiasLogitsProcessor([[[0], 2.5], [[3], -4.0]])),
        (
            {"min_new_tokens": 3},
            lambda start: MinNewTokensLengthLogitsProcessor(start, 3, eos_token_id=sorted(ENDS), device="cpu"),
        ),
    ],
    ids=["repetition", "bad words", "bias", "least"],
)
def test_a_row_is_what_transformers_makes_of_it(settings, processor):
    """Catches a meaning that users do not know from elsewhere."""
    generator = torch.Generator().manual_seed(4)
    for start in [3, 5] * 10:
        text = torch.randint(V, (start + 4,), generator=generator).tolist()
        logits = 2 * torch.randn(1, 5, V, dtype=torch.float64, generator=generator)
        prefix = Prefix(Sampling(**settings), text[:start], ENDS)
        found = processed(logits, Draft.chain(torch.tensor([text[start:]]), torch.tensor([4])), [(0, prefix)])
        is_over = False
        for row in range(5):
            wanted = processor(start)(torch.tensor([text[: start + row]]), logits[:, row].clone())
            torch.testing.assert_close(found[:, row], wanted, rtol=1e-12, atol=1e-12)
            if is_over:
                break  # no later row can be reached
            is_over = row < 4 and (text[start + row] in ENDS or wanted[0, text[start + row]] == -math.inf)


# ── greedy: token for token ───────────────────────────────────────────────────────────────────────────────────────────

WIDE = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": dict.fromkeys(range(0, 64, 3), 1.5)},
    "bad words": {"bad_words": [[n] for n in range(0, 64, 5)] + [[n, n + 1] for n in range(60)] + [[1, 2, 3]]},
    "least": {"min_new_tokens": 12},
    "all": {
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {5: 2.0, 9: -3.0},
        "bad_words": [[n] for n in range(1, 64, 7)] + [[n, 5] for n in range(30)], "min_new_tokens": 9,
    },
}  # fmt: skip
SAMPLINGS = [Sampling(**settings) for settings in WIDE.values()]


def served(target, requests, drafter=None, **options) -> list[list[int]]:
    found = [[] for _ in requests]
    for progress in serve(target, requests, drafter, **options):
        found[progress.request] += progress.tokens
    return found


@pytest.fixture(scope="module")
def wanted(target, prompts) -> list[list[int]]:
    """Every setting, decoded plainly and alone."""
    ends = target.ends
    target.ends = frozenset(range(0, 64, 4))
    requests = [Request(prompts[n % len(prompts)], 30, sampling) for n, sampling in enumerate(SAMPLINGS)]
    found = [served(target, [request])[0] for request in requests]
    target.ends = ends
    return found


@pytest.mark.parametrize("case", fast(cases(), FEW))
def test_greedy_with_every_setting_is_plain_decoding(case, target, prompts, drafter_of, wanted, monkeypatch):
    """Catches a node judged on another's prefix, in chains and trees, with slots of other settings beside it."""
    monkeypatch.setattr(target, "ends", frozenset(range(0, 64, 4)))
    requests = [Request(prompts[n % len(prompts)], 30, sampling) for n, sampling in enumerate(SAMPLINGS)]
    for slots in (1, 4):
        assert served(target, requests, drafter_of(case), slots=slots) == wanted


def test_a_deep_tree_with_penalties_is_plain_decoding(target, prompts):
    """Catches paths that take a sibling's token; here every kept node has a wrong elder sibling."""
    for name, settings in WIDE.items():
        sampling = Sampling(**settings)
        plain = generate(target, prompts, max_new_tokens=48, sampling=sampling)
        oracle = Oracle([prompt + found.tokens for prompt, found in zip(prompts, plain, strict=True)], 64)
        drafted = generate(target, prompts, oracle, max_new_tokens=32, sampling=sampling, slots=3)
        assert [found.tokens for found in drafted] == [found.tokens[:32] for found in plain], name
        assert max(max(found.accepted) for found in drafted) == 3


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (WIDE["repetition"], WIDE["repetition"]),
        (WIDE["bad words"], {"bad_words_ids": WIDE["bad words"]["bad_words"]}),
        ({"min_new_tokens": 12}, {"min_new_tokens": 12}),
        ({"logit_bias": {5: 2.0, 9: -3.0}}, {"sequence_bias": [[[5], 2.0], [[9], -3.0]]}),
        (
            {"repetition_penalty": 1.2, "bad_words": [[3], [4, 8]], "min_new_tokens": 6},
            {"repetition_penalty": 1.2, "bad_words_ids": [[3], [4, 8]], "min_new_tokens": 6},
        ),
    ],
    ids=["repetition", "bad words", "least", "bias", "three"],
)
def test_greedy_output_is_generates_own(settings, theirs, target, prompts, drafter_of, monkeypatch):
    """Catches another order, or another meaning, than transformers' own `generate`."""
    ends = [n for n in range(64) if n % 6 == 1]
    monkeypatch.setattr(target, "ends", frozenset(ends))
    drafter = drafter_of(next(case for case in cases() if case.kind == "small_model"))
    ours = generate(target, prompts, drafter, max_new_tokens=24, sampling=Sampling(**settings), slots=3)
    for prompt, found in zip(prompts, ours, strict=True):
        text = torch.tensor([prompt])
        out = target.model.generate(
            text, attention_mask=torch.ones_like(text), max_new_tokens=24, do_sample=False, eos_token_id=ends,
            pad_token_id=ends[0], **theirs,
        )  # fmt: skip
        assert found.tokens == out[0, len(prompt) :].tolist()


# ── the distribution ──────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = TableTarget.random(4)
MIXED = {
    "temperature": 1.0, "repetition_penalty": 2.5, "presence_penalty": 0.7, "frequency_penalty": 0.9,
    "bad_words": [[1, 2], [3, 3]],
}  # fmt: skip
TREES = {
    "chain": Tree(SMALL, [-1, 0, 1], "replacement"),
    "replacement": Tree(SMALL, [-1, -1, 0, 0, 1, 2], "replacement"),
    "without": Tree(SMALL, [-1, -1, 0, 0, 1, 2], "without"),
    "top": Tree(SMALL, [-1, -1, 0, 0, 1, 2], "top"),
}
EVERY = pytest.mark.parametrize("tree", first(TREES.values(), 2), ids=TREES.keys())


def exact_distribution(prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """Distribution of three tokens, [4, 4, 4], text by text."""
    joint = torch.zeros(4, 4, 4, dtype=torch.float64)
    settings = Settings.of([sampling])
    for text in itertools.product(range(4), repeat=3):
        chance = 1.0
        for n, token in enumerate(text):
            before, own = ([0, *prompt, *text[:n]])[-2:]
            row = by_hand(SMALL.table[before, own].tolist(), prompt, list(text[:n]), sampling, ())
            chance *= float(distribution(torch.tensor([row], dtype=torch.float64), settings)[0, token])
        joint[text] = chance
    return joint


@pytest.mark.parametrize("seeded", [False, True], ids=["ratio", "seeded"])
@EVERY
def test_penalised_and_banned_texts_keep_the_distribution(tree, seeded):
    """Catches residuals and coins that see another distribution than the one drawn from.  False alarm 1e-6."""
    tokens, _, kept = emitted(SMALL, tree, slots=4000, prompt=[0, 1], sampling=MIXED, seeded=seeded)
    assert follows(tokens, exact_distribution([0, 1], Sampling(**MIXED)))
    assert kept > 1000


@pytest.mark.parametrize("seeded", [False, True], ids=["ratio", "seeded"])
@EVERY
def test_one_penalty_vector_for_a_whole_block_is_caught(tree, seeded, monkeypatch):
    """Planted fault: every row is judged on the committed text alone."""
    reached = prefixes._reached
    monkeypatch.setattr(
        prefixes, "_reached", lambda *args: [(n, path and (), stays) for n, path, stays in reached(*args)]
    )
    tokens, _, _ = emitted(SMALL, tree, slots=4000, prompt=[0, 1], sampling=MIXED, seeded=seeded)
    assert not follows(tokens, exact_distribution([0, 1], Sampling(**MIXED)))


def test_a_siblings_path_is_caught(monkeypatch):
    """Planted fault: a chain's prefixes for a tree's nodes."""
    reached = prefixes._reached
    as_chain = functools.lru_cache(1)(lambda draft: Draft.chain(draft.tokens, draft.sizes))
    monkeypatch.setattr(prefixes, "_reached", lambda draft, *rest: reached(as_chain(draft), *rest))
    tokens, _, _ = emitted(SMALL, TREES["without"], slots=4000, prompt=[0, 1], sampling=MIXED)
    assert not follows(tokens, exact_distribution([0, 1], Sampling(**MIXED)))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {V: 1.0}}, {"logit_bias": {-1: 1.0}}, {"bad_words": [[0, V]]}, {"bad_words": [[-2]]},
        {"bad_words": [[n] for n in range(V)]}, {"min_new_tokens": 11},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_target_cannot_follow_is_refused_at_once(wrong):
    """Catches an index error in mid-text, a ban that wraps around to another token, and a text that can't be."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generate(TableTarget.random(V), [1], max_new_tokens=10, sampling=Sampling(**wrong))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prefix_that_leaves_no_token_is_an_error(temperature):
    """Catches token 0, or NaN, where everything is forbidden."""
    bad = [[1, n] for n in range(V)]
    table = TableTarget.random(V)
    sampling = Sampling(temperature, bad_words=[[n] for n in range(V) if n != 1] + bad)
    with pytest.raises(ConfigError, match="no token possible"):
        generate(table, [0], max_new_tokens=10, sampling=sampling)
