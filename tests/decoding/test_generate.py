"""What `generate`, `stream` and `serve` promise around the loop, and what one step of it asks, shows and leaves
behind."""

from typing import Any

import pytest
import torch
from conftest import tiny_model
from contracts.parties import Drawn, Oracle, Proposer, TableTarget
from decoding.drafts import prefill
from tiny import folder
from tiny import talker as writer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider.decoding.draft import Draft
from outrider.decoding.loop import step
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, DataError, DrafterError
from outrider.generation import batch, generate, serve, stream
from outrider.loading import load_drafter
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

__all__ = ["folder", "writer"]
TABLE = TableTarget.random(6)


@pytest.fixture(scope="module")
def oracle(target, prompts, plain):
    return Oracle([prompt + plain(target, prompt, 48) for prompt in prompts], 64)


@pytest.fixture(scope="module")
def talker(target) -> TransformersTarget:
    """The tiny target with a tokenizer like Llama 2's: id 5 is special, most ids are bytes, of which few make whole
    letters."""
    lead = [f"<0x{byte:02X}>" for byte in (0xC3, 0xC4, 0xC5, 0xD0, *range(0x80, 0x9C), 0x0A, 0x41)]
    names = [*"abcde", "<s>", *lead, *(f"▁{letter}" for letter in "fghijklmnopqrstuvwxyz")]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return TransformersTarget(target.model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))


def test_the_pieces_of_a_stream_sum_to_the_generations(talker, prompts, plain, oracle):
    """Catches a stream and a batch that are two programs, pieces of one prompt out of order, and a text that is put
    together of parts, where bytes, special tokens and nameless ids stand between them."""
    options = {"max_new_tokens": 40, "slots": 3}
    whole = generate(talker, prompts, oracle, **options)
    tokens = [[] for _ in prompts]
    text, drafted, steps = [""] * len(prompts), [0] * len(prompts), [0] * len(prompts)
    for piece in stream(talker, prompts, oracle, **options):
        tokens[piece.prompt] += piece.tokens
        text[piece.prompt] += piece.text
        drafted[piece.prompt] += piece.drafted
        steps[piece.prompt] += 1
    assert tokens == [found.tokens for found in whole] == [plain(talker, prompt, 40) for prompt in prompts]
    assert text == [found.text for found in whole] == [talker.decode(own) for own in tokens]
    assert "\ufffd" in "".join(text)
    assert drafted == [sum(found.accepted) for found in whole]
    assert steps == [found.steps for found in whole]


def test_a_stop_string_ends_drafted_and_plain_texts_at_the_same_token(talker, prompts, plain, oracle):
    """Catches tokens or text behind the stop, and one that only shows while a run of bytes is open: the block's end no
    longer holds it."""
    for prompt in prompts[::3]:
        tokens = plain(talker, prompt, 40)
        for place in (3, 9, 20):
            stop = talker.decode(tokens[: place + 1])[-2:]
            last = next(n for n in range(1, 41) if stop in talker.decode(tokens[:n]))
            text = talker.decode(tokens[:last])
            for drafter in (None, oracle):
                options = {"max_new_tokens": 40, "stop": [stop, "nowhere"]}
                (found,) = generate(talker, prompt, drafter, **options)
                wanted = tokens[:last], text[: text.find(stop)], "stop"
                assert (found.tokens, found.text, found.finish_reason) == wanted
                assert "".join(piece.text for piece in stream(talker, prompt, drafter, **options)) == found.text


def test_a_stop_string_with_a_special_token_is_no_error(talker):
    """Catches lists of stop strings, as lm-eval and front ends send them, refused for one that no text can hold."""
    for stop in ("a<s>", ["<think>", "</s>"]):
        assert generate(talker, [1], max_new_tokens=3, stop=stop)[0].finish_reason == "length"


def test_requests_are_served_in_their_order():
    """Catches a queue that is a stack, and a batch that outgrows the memory that was planned for it."""
    state = batch(TABLE, 3)
    requests = [Request([n % 6], 1 + n % 5, Sampling()) for n in range(10)]
    served: dict[int, int] = {}
    for progress in serve(TABLE, requests, state=state):
        served[progress.request] = served.get(progress.request, 0) + len(progress.tokens)
        assert len(state.rows) <= 3
    assert [*served.items()] == [(n, request.max_new_tokens) for n, request in enumerate(requests)]


def test_zero_tokens_are_no_step_at_all(target):
    """Catches a token that comes for nothing."""
    (found,) = generate(target, [1, 2], max_new_tokens=0)
    assert (found.tokens, found.text, found.steps, found.finish_reason) == ([], "", 0, "length")
    assert list(stream(target, [1, 2], max_new_tokens=0)) == []
    mixed = [Request([1], 0, Sampling()), Request([2], 3, Sampling()), Request([3], 0, Sampling())]
    assert {progress.request for progress in serve(TABLE, mixed)} == {1}


REFUSED: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
    (DataError, "empty", "", {}), (DataError, "empty", [[1, 2], []], {}),
    (DataError, "vocabulary", [64], {}), (DataError, "vocabulary", [-1], {}), (DataError, "vocabulary", [1, 2**40], {}),
    (DataError, "tokenizer", "hello", {}), (DataError, "tokenizer", [{"role": "user", "content": "hello"}], {}),
    (ConfigError, "max_new_tokens", [1], {"max_new_tokens": -1}), (ConfigError, "stop", [1], {"stop": ""}),
    (ConfigError, "stop", [1], {"stop": ["a", ""]}), (ConfigError, "slots", [1], {"slots": 0}),
    (ConfigError, r"stop strings \['END'\] need", [1], {"stop": ["END"]}),
    *((DataError, "prompt 1 has", [[1, 2], [3] * length], {}) for length in (20, 50)),
]  # fmt: skip
"""The error, its text, the prompt and options; the context is 20 tokens long."""


@pytest.mark.parametrize(("error", "message", "prompt", "options"), REFUSED)
def test_arguments_without_meaning_are_refused(error, message, prompt, options, short_target):
    """Catches a slot without an anchor, an index error of the embedding, a text that is read as a list of letters, and
    a stream that fails at the second prompt, after the first was paid for."""
    for refuses in (generate, stream):
        with pytest.raises(error, match=message):
            refuses(short_target, prompt, **{"max_new_tokens": 3} | options)


def test_a_drafter_of_another_shape_is_refused(target, oracle, monkeypatch):
    """Catches an index error of a layer that the target does not have, and torch's own error of a product, in the first
    step, where the taps exist in both."""
    monkeypatch.setattr(oracle, "taps", (1, 4), raising=False)
    with pytest.raises(DrafterError, match="layer 4"):
        generate(target, [1, 2], oracle, max_new_tokens=3)
    small, large = load_target(tiny_model()), load_target(tiny_model(hidden_size=64))
    with pytest.raises(DrafterError, match="hidden states of size 32.*have 64"):
        generate(large, [1, 2], load_drafter("dflash", small), max_new_tokens=3)


def test_a_seed_gives_the_same_text_again_and_none_does_not():
    """Catches noise from the clock under a seed.  Without seeds two texts of 40 tokens are equal with odds below
    1e-9."""
    hot = Sampling(1.0, seed=5)
    one, two = (generate(TABLE, [1], max_new_tokens=40, sampling=hot)[0].tokens for _ in range(2))
    assert one == two
    one, two = (generate(TABLE, [1], max_new_tokens=40, sampling=Sampling(1.0))[0].tokens for _ in range(2))
    assert one != two


class Greedy(Proposer):
    """Offers more than it is asked for, and notes what that was."""

    limit = 7

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        self.asked.append(budget.tolist())
        shape = (len(state.rows), self.limit)
        return Draft.chain(torch.randint(6, shape, generator=memory), torch.full(shape[:1], self.limit))


def test_no_node_is_asked_for_or_verified_that_could_never_be_kept():
    """Catches a draft that leaves no place for the target's own token, and a drafter that is taken at its word."""
    verified = []

    class Watching(Fixed):
        def observe(self, state: Any, sizes: torch.Tensor, accepted: Any, timing: Any) -> None:
            verified.append(sizes.tolist())

    requests = [Request([1, 2], 12, Sampling()), Request([3], 5, Sampling()), Request([4], 1, Sampling())]
    drafter, state = Greedy(), batch(TABLE, 3)
    left, served = [], serve(TABLE, requests, drafter, policy=Watching(6), state=state)
    before = {n: request.max_new_tokens for n, request in enumerate(requests)}
    while before:
        left.append([before[n] for n in sorted(before)])
        for _ in range(len(before)):
            progress = next(served)
            before[progress.request] -= len(progress.tokens)
        before = {n: most for n, most in before.items() if most}
    assert next(served, None) is None
    wanted = [[min(most - 1, 6) for most in row] for row in left]
    # where nobody has room nothing is asked
    assert drafter.asked == [row for row in wanted if any(row)]
    assert verified == wanted


@pytest.mark.parametrize("before_draw", [True, False])
def test_a_policy_sees_confidences_that_were_known_before_the_draw_and_no_others(before_draw):
    """Catches a confidence that has seen its token and stops the draft there: the output would be inexact."""
    seen = []

    class Watching(Fixed):
        def keep(self, state: Any, sizes: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
            seen.append(confidence)
            return sizes

    distribution = lambda before, own: TABLE.table[before, own].softmax(-1)
    drafter = Drawn(distribution, 3, confidence=lambda before, own: torch.full((len(own),), 0.25))
    drafter.confidence_before_draw = before_draw
    generate(TABLE, [1, 2], drafter, max_new_tokens=9, sampling=Sampling(1.0), policy=Watching(3))
    assert len(seen) > 1
    assert all((confidence is not None) == before_draw for confidence in seen)


@pytest.mark.parametrize(("place", "true_is_eldest"), [(0, True), (1, False), (3, False), (6, False)])
def test_a_slot_that_ended_within_a_block_has_all_but_its_last_token_in_the_cache(place, true_is_eldest, writer):
    """Catches rows behind an end token that stay, and an anchor that is in the cache already; its neighbour goes on."""
    prompt, other = writer.encode("say abc"), writer.encode("tell 3")
    # a drawn text, since the greedy one repeats itself; under a seed it is the same whatever drafts
    asked = [Request(own, 30, Sampling(1.5, seed=seed)) for own, seed in ((prompt, 3), (other, 4))]
    texts = [list(request.prompt) for request in asked]
    for progress in serve(writer, asked, state=batch(writer, 2, ends=frozenset())):
        texts[progress.request] += progress.tokens
    end = texts[0][len(prompt) + place]
    assert end not in [*texts[0][len(prompt) : len(prompt) + place], *texts[1][len(other) : len(other) + 12]]
    oracle = Oracle(texts, writer.spec.vocabulary, true_is_eldest=true_is_eldest)
    state = batch(writer, 2, ends=frozenset({end}))
    for row, request in enumerate(asked):
        state.admit(row, request)
    cache = writer.allocate(2, 60)
    memory = oracle.allocate(cache)
    prefill(writer, oracle, cache, memory, state, [0, 1])
    while state.finished[0] is None:
        accepted, _ = step(writer, oracle, Fixed(oracle.limit), cache, memory, state)
        for row in state.rows:
            assert cache.lengths[row] == len(state.tokens[row]) - 1
    assert state.finished == ["stop", None]
    assert state.tokens[0] == texts[0][: len(prompt) + place + 1]
    # each step emits 3 drafted tokens and one more
    assert (accepted.next_tokens[0] == -1) == (place % 4 != 3)
    assert len(accepted.paths[0]) == min(place % 4 + 1, 3)
