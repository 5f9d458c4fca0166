"""Mixing: who gets how many nodes, that parts are independent and told all they need, and that slots forget."""

import pytest
import torch
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import Proposer, TableTarget, Tree

from outrider import drafters
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request
from outrider.generation import generate, serve
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer

mix = drafters.find("mix")
TARGET = TableTarget.random(5)


def made(*found, **settings):
    """A mix of any drafters."""
    return mix.Mix(found, [f"part {n}" for n in range(len(found))], mix.Config(**settings))


class Says(Proposer):
    """Proposes the token `ahead` more than the last, and so on; taps are for show."""

    def __init__(self, ahead: int, limit: int = 4, vocabulary: int = 7):
        self.ahead, self.limit, self.vocabulary = ahead, limit, vocabulary
        self.asked: list[list[int]] = []

    def propose(self, memory, state, budget):
        self.asked.append(budget.tolist())
        steps = self.ahead * torch.arange(1, self.limit + 1)
        return Draft.chain((state.anchor[:, None] + steps) % self.vocabulary, budget)


def counting(vocabulary: int = 7, ahead: int = 1) -> TableTarget:
    """A target that counts."""
    table = torch.full((vocabulary,) * 3, -50.0, dtype=torch.float64)
    for token in range(vocabulary):
        table[:, token, (token + ahead) % vocabulary] = 0
    return TableTarget(table)


@pytest.mark.parametrize(
    ("pair", "share"),
    [(("replacement", "mixed"), "bandit"), (("without", "top"), "request")],
    ids=str,
)
def test_mixed_trees_keep_the_distribution(pair, share):
    """Catches a younger drafter's q, a merge or a split that looks at what was drawn.  False alarm 1e-6."""
    found = [Tree(TARGET, shape, how) for shape, how in zip(([-1, -1, 0], [-1, 0, -1, 1]), pair, strict=True)]
    drafter = made(*found, share=share, nodes=6)
    assert keeps_the_distribution(TARGET, drafter, slots=1000)
    _, _, kept = emitted(TARGET, drafter, slots=100)
    assert kept > 50


def test_all_nodes_are_given_out_and_a_part_gets_no_more_than_it_can():
    """Catches nodes that nobody gets while a part could, and a split over the budget."""
    shares = mix.Shares([3, 5])
    for most in range(12):
        split = shares.split(most)
        assert sum(split) == min(most, 8)
        assert split[0] <= 3 and split[1] <= 5


def test_the_better_part_comes_to_have_the_nodes_and_the_other_is_tried_again():
    """Catches counts of the wrong part, and a bandit that never looks back once the text has changed."""
    shares = mix.Shares([8, 8])
    for turn in range(300):
        first, second = shares.split(8)
        if turn == 150:
            assert first >= 6
        kept = [list(range(first)), []] if turn < 150 else [[], list(range(second))]
        shares.learn([list(range(first)), list(range(second))], kept)
    assert shares.split(8)[1] >= 6


def test_a_slot_used_again_begins_anew():
    """Catches counts of one request that steer another's draft."""
    drafter = made(Says(1), Says(2), nodes=4)

    class Slots:
        slots = 1

    memory, state = drafter.allocate(Slots()), DecodeState(1, 100)
    memory.shares[0].learn([[0, 1], [0]], [[0, 1], []])
    memory.serving[0] = 1
    drafter.free(memory, [0])
    assert memory.shares[0].steps == 0 and memory.serving == {}
    state.admit(0, Request([0], 9, Sampling()))
    assert memory.shares[0].split(4) == mix.Shares([4, 4]).split(4)


def test_a_request_is_served_by_one_part_and_the_better_part_gets_more_of_them():
    """Catches a request that changes its part, one drafted for by both, and a choice that never learns."""
    right, wrong = Says(1), Says(3)
    drafter = made(wrong, right, share="request", nodes=4)
    served = []
    choose = drafter._chosen

    def chosen(memory, state, row):
        served.append(choose(memory, state, row))
        return served[-1]

    drafter._chosen = chosen
    found = generate(counting(), [[n % 7] for n in range(30)], drafter, max_new_tokens=20, slots=3)
    assert len(served) == 30
    assert served[-15:].count(1) >= 14 and 0 in served[:5]
    # 19 tokens in 4 steps of 5, or in 20 steps of 1
    assert {len(one.accepted) for one in found} <= {4, 20}
    for first, second in zip(wrong.asked, right.asked, strict=False):
        assert not (len(first) == 1 and first == second == [4])


def test_each_kind_of_text_has_the_part_that_kept_most_of_it():
    """Catches counts of code that steer chat, and a kind that is not looked at."""
    wrong, right = Says(3), Says(1)
    drafter = made(wrong, right, share="request", nodes=4)
    for kind, best in (("code", 0), ("chat", 1)):
        for part in 20 * [0, 1]:
            drafter.tallies.of(f"\0{kind}").learn(part, float(part == best))

    def steps(text: str) -> int:
        request = Request([0], 20, Sampling(), detokenizer=Detokenizer(lambda _: text))
        return sum(1 for _ in serve(counting(), [request], drafter, slots=1))

    # the counts lie: what is said to be best for code is always wrong
    assert steps("x = f(y)[0]\n") == 20
    assert steps("How are you today?") == 4


def test_texts_are_told_apart_by_their_signs():
    """Catches a kind that every text is."""
    texts = ["def f(x):\n    return x[0] + 1\n", "What is 12 * 7 + 38, and $\\frac{3}{4}$ of 96?", "In spring.", ""]
    assert [mix.kind_of(text) for text in texts] == ["code", "math", "chat", "chat"]


def test_a_request_may_name_its_part(caplog):
    """Catches a name that is not looked at, and an unknown one that ends the batch."""
    right, wrong = Says(1), Says(3)
    drafter = made(wrong, right, share="request", nodes=4)

    def asked(name):
        return sum(1 for _ in serve(counting(), [Request([0], 20, Sampling(), drafter=name)], drafter, slots=1))

    assert asked("part 1") == 4
    assert asked("part 0") == 20
    assert asked("part 7") in (4, 20)
    assert "part 7" in caplog.text


def test_each_part_sees_its_own_taps():
    """Catches taps in another's order, and taps for one who asked for none."""
    shapes = []

    class Tapped(Says):
        def __init__(self, taps, wanted):
            super().__init__(1)
            self.taps, self.wanted = taps, wanted

        def admit(self, memory, rows, state, scores, lengths):
            self.observe(memory, state, None, None, scores)

        def observe(self, memory, state, draft, kept, scores):
            shapes.append(None if scores.taps is None else scores.taps.shape[2])
            if scores.taps is not None:
                # the table's layer i adds i to the hidden state
                found = (scores.taps - scores.hidden[:, : scores.taps.shape[1], None]).mean((0, 1, 3))
                assert found.tolist() == pytest.approx(self.wanted)

    drafter = made(Tapped((3, 1), [3, 1]), Tapped((), []), Tapped((1, 2), [1, 2]))
    assert drafter.taps == (1, 2, 3)
    generate(counting(), [[0, 1, 2], [2]], drafter, max_new_tokens=12)
    assert {2, None} == set(shapes)
