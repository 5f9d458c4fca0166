"""Learning while serving: what is stored, how acceptance is judged, and that a swap of drafters changes no text."""

import json
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from conftest import Case

from outrider.errors import ConfigError, DataError
from outrider.serve.calls import Call
from outrider.serve.engine import Engine
from outrider.serve.learning import buffer
from outrider.serve.learning.buffer import FILES, Buffer, Text
from outrider.serve.learning.live_acceptance import Counts, change, counts_of, tokens_per_draft
from serve.running import MODEL, running
from serve.test_engine import Caller, alone, mixed, served

DEPTHS = 4


class Listened:
    """Keeps what the engine says."""

    def __init__(self) -> None:
        self.texts: list[tuple[Call, list[int]]] = []
        self.states: list[bool] = []

    def ended(self, call: Call, answer: list[int]) -> None:
        self.texts.append((call, answer))

    def busy(self, is_busy: bool) -> None:
        self.states.append(is_busy)


def text(prompt: Sequence[int], drafts: Sequence[tuple[int, int]] = (), answer: Sequence[int] = (1, 2, 3)) -> Text:
    return Text(list(prompt), list(answer), list(drafts))


def test_texts_come_back_the_newest_first_and_a_cut_line_is_left_out(tmp_path):
    """Catches a line that a crash has cut, which would make the whole file unreadable, or the line after it."""
    there = Buffer(tmp_path, 10**6, 4)
    given = [text([n, n + 1], [(3, 1), (2, 2)]) for n in range(40)]
    for one in given:
        there.add([one])
    for part in ("train", "held_out"):
        own = [one for one in given if there.part_of(one.prompt) == part]
        assert there.newest(part, 99) == own[::-1]
        assert there.newest(part, 2) == own[::-1][:2]
    [file] = there.files("train")
    with file.open("ab") as torn:
        torn.write(b'{"prompt": [1, 2], "answ')
    last = next(text([n]) for n in range(99) if there.part_of([n]) == "train")
    there.add([last])
    assert there.newest("train", 1) == [last]
    assert len(buffer.read(file)) == len([one for one in given if there.part_of(one.prompt) == "train"]) + 1


def test_the_buffer_is_bounded_and_the_oldest_go_first(tmp_path):
    """Catches a buffer that grows for ever, and one that deletes what is new."""
    most = 16_000
    there = Buffer(tmp_path, most, 2)
    for n in range(750):
        there.add([text([n])])
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) <= most
    found = there.newest("train", 750)
    assert [one.prompt[0] for one in found] == sorted((one.prompt[0] for one in found), reverse=True)
    assert found[0].prompt[0] > 740 and len(there.files("train")) in (FILES - 1, FILES, FILES + 1)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.jsonl")) > most * 0.8


def test_a_prompt_is_always_on_the_same_side(tmp_path):
    """Catches a held-out prompt that is trained on when it comes again."""
    there, draw = Buffer(tmp_path, 10**6, 4), random.Random(0)
    prompts = [[draw.randrange(64) for _ in range(5)] for _ in range(400)]
    for _ in range(2):
        there.add([text(prompt) for prompt in prompts])
    train = {tuple(one.prompt) for one in there.newest("train", 10**4)}
    held_out = {tuple(one.prompt) for one in there.newest("held_out", 10**4)}
    assert not train & held_out
    assert 60 < len(held_out) < 140  # a quarter of 400; outside with a chance of 4e-6
    assert len(there.newest("held_out", 10**4, is_distinct=True)) == len(held_out)


def test_texts_of_another_target_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"token id 70, but this target's ids end at 63, .*; name another folder"):
        buffer.check([text([1], answer=[5, 70])], 64, tmp_path)


def test_rejected_places_are_those_where_another_token_came():
    """Catches an offset by the token that follows what was accepted."""
    #  step 1: two of three accepted, then a correction at 2; step 2: none of one; step 3: nothing drafted; step 4: all
    found = text([1], [(3, 2), (1, 0), (0, 0), (2, 2)], answer=range(8)).rejected
    assert found == [2, 3]


def drawn(draw: random.Random, shares: Sequence[float], texts: int, shallow: float = 0.0) -> list[Counts]:
    """Of texts whose drafts are accepted with these chances.  shallow: share of the steps with a draft of one token."""
    found = []
    for _ in range(texts):
        steps = []
        for _ in range(12):
            depth = 1 if draw.random() < shallow else len(shares)
            accepted = 0
            while accepted < depth and draw.random() < shares[accepted]:
                accepted += 1
            steps.append((depth, accepted))
        found.append(counts_of(text([1], steps), DEPTHS))
    return found


def test_tokens_per_draft_do_not_depend_on_how_deep_a_policy_drafts():
    """Catches a version that is rolled back because the load rose."""
    shares, draw = [0.8, 0.6, 0.5, 0.4], random.Random(1)
    wanted = 1 + sum(np.cumprod(shares))
    for shallow in (0.0, 0.5, 0.9):
        own = drawn(draw, shares, 1000, shallow)
        whole = Counts(sum(one.tried for one in own), sum(one.accepted for one in own))
        assert float(tokens_per_draft(whole)) == pytest.approx(wanted, rel=0.08)  # 5 standard errors at least


def test_the_last_step_of_a_text_does_not_count():
    """Catches ends of texts that are taken for rejections."""
    tried, accepted = counts_of(text([1], [(4, 2), (4, 0)]), DEPTHS)
    assert (tried.tolist(), accepted.tolist()) == ([1, 1, 1, 0], [1, 1, 0, 0])


def test_a_drop_is_found_and_noise_is_not():
    """Both directions of error: false alarms at their rate, and a loss of a quarter always found."""
    draw, good, bad = random.Random(2), [0.7, 0.6, 0.5, 0.4], [0.5, 0.4, 0.3, 0.2]
    tail = 0.05
    alarms = sum(change(drawn(draw, good, 30), drawn(draw, good, 60), tail).is_drop for _ in range(40))
    assert alarms <= 8  # of 40 with a chance of 1 in 20 each: more with 0.1 %
    assert all(change(drawn(draw, bad, 30), drawn(draw, good, 60), 0.001).is_drop for _ in range(10))
    assert not any(change(drawn(draw, good, 30), drawn(draw, bad, 60), 0.001).is_drop for _ in range(10))
    never = drawn(draw, [0.0] * 4, 16)
    assert change(never, drawn(draw, good, 16), 0.001).is_drop and not change(never, never, 0.001).is_drop


def test_a_swap_in_the_middle_of_texts_changes_none(target, prompts, drafter_of, workshop):
    """Catches a drafter that draws from what the one before it has stored, as if it were the target's."""
    asked, drafters = mixed(prompts, 8), [workshop.build(Case("dspark"), target), drafter_of(Case("dspark"))]
    with Engine(target, drafter_of(Case("dspark")), slots=4, length=128) as engine:
        callers = [Caller.of(each) for each in asked]
        callers[3].on_output = lambda output: engine.replace(drafters[len(callers[3].outputs) % 2])
        for caller in callers:
            engine.submit(caller.call)
        for caller in callers:
            caller.wait()
        assert engine.replaced > 0
        assert not engine.is_degraded
    assert [caller.tokens for caller in callers] == [alone(target, each) for each in asked]


def test_a_drafter_of_another_shape_is_refused(target, drafter_of):
    with (
        Engine(target, drafter_of(Case("dspark")), slots=2, length=64) as engine,
        pytest.raises(ConfigError, match=r"can't replace one like .*; restart the server with it"),
    ):
        engine.replace(drafter_of(Case("medusa")))


def test_the_listener_is_told_of_every_step_of_texts_that_ended(target, prompts, drafter_of):
    """Catches steps that do not add up to the text, and a server that is called busy while it sleeps."""
    asked, listened = mixed(prompts, 6), Listened()
    engine = Engine(target, drafter_of(Case("dspark")), slots=4, length=128)
    engine.listener = listened
    with engine:
        callers = served(engine, asked)
        cancelled = Caller.of(mixed(prompts, 1)[0])
        cancelled.on_output = lambda output: engine.cancel(cancelled.call)
        engine.submit(cancelled.call)
        cancelled.wait()
        end = time.monotonic() + 20
        while not listened.states and time.monotonic() < end:  # until it sleeps
            time.sleep(0.01)
    own = {id(call): (call, answer) for call, answer in listened.texts}
    for caller in callers:
        call, answer = own[id(caller.call)]
        assert answer == caller.tokens
        written = sum(accepted + 1 for _, accepted in call.drafts)
        assert len(answer) <= written <= len(answer) + 1  # where the last step was cut
        assert sum(accepted for _, accepted in call.drafts) == call.accepted
        assert all(accepted <= depth for depth, accepted in call.drafts)
    assert listened.states[0] is False and listened.states[1] is True


def test_a_request_can_keep_its_texts_out(talker):
    """Catches `store: false` that is taken and forgotten."""
    with running(talker) as there:
        listened = there.engine.listener = Listened()
        for store in (None, True, False):
            body = {} if store is None else {"store": store}
            there.client().completions.create(model=MODEL, prompt="abcabc", max_tokens=4, extra_body=body)
        assert there.settled(lambda: len(listened.texts) == 3)
    assert [call.is_stored for call, _ in listened.texts] == [True, True, False]


def test_a_line_of_the_buffer_is_what_the_docs_say(tmp_path):
    Buffer(tmp_path, 10**6, 2).add([Text([5], [6, 7], [(4, 1)], 0.5, 20, 0.9)])
    [file] = tmp_path.rglob("*.jsonl")
    assert json.loads(file.read_text()) == {
        "prompt": [5], "answer": [6, 7], "drafts": [[4, 1]], "temperature": 0.5, "top_k": 20, "top_p": 0.9,
    }  # fmt: skip
    assert file.stat().st_mode & 0o077 == 0  # nobody else reads what users wrote
