"""Grafting: what is cut, what fills the room, and that both drafters see the text."""

from dataclasses import replace

import pytest
import torch
from conftest import Case
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import OnAndOff, TableTarget, Tree
from drafters.proposals import exact, misreadings, watch

from outrider import drafters
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request, Scores
from outrider.errors import ConfigError
from outrider.generation import batch, generate, serve
from outrider.sampling.settings import Sampling

graft, recycle, small_model = (drafters.find(kind) for kind in ("graft", "recycle", "small_model"))
TARGET = TableTarget.random(5)
SEEDED = Sampling(1.0, seed=4)


def made(base, target=TARGET, **settings):
    """A graft on any drafter."""
    return graft.Graft(base, recycle.build(recycle.Config(), target), graft.Config(**settings))


class Cutting(graft.Worth):
    """Cuts everything under a score from the first step on, as if it were known to be worthless."""

    least = 2

    def stays(self, mark):
        self.num_steps, self.first_cut = 1, dict.fromkeys(range(9), self.least)
        return super().stays(mark)


@pytest.fixture
def cutting(monkeypatch):
    monkeypatch.setattr(graft, "Worth", Cutting)


def test_scores_multiply_down_the_path():
    """Catches a sibling's confidence in a node's score, and a depth counted from 1."""
    draft = Draft(
        torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[-1, -1, 0, 2]]), torch.tensor([4]), None,
        torch.tensor([[0.5, 0.7, 0.5, 0.25]]),
    )  # fmt: skip
    assert graft.marks_of(draft) == [[(0, 2), (0, 1), (1, 4), (2, 8)]]
    assert graft.marks_of(replace(draft, confidence=None)) == [[(0, 0), (1, 0), (2, 0), (3, 0)]]
    sharp = torch.tensor([[[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]])
    # the distribution's likeliest token, not the one that was drawn
    assert graft.marks_of(replace(draft, confidence=None, q=sharp)) == [[(0, 0), (0, 2), (1, 0), (2, 2)]]


def test_the_threshold_is_the_largest_below_which_the_risk_is_kept():
    """Catches a threshold on the wrong side, one bin off, or set by too few nodes."""
    worth = graft.Worth(0.1)
    nodes = [((0, score), n < kept) for score, kept in ((2, 20), (5, 4), (9, 1), (12, 0)) for n in range(40)]
    worth.learn(nodes[::-1])
    # 1 of 80 below the third bin, 5 of 120 below the second, 25 of 160 in all
    assert worth.first_cut[0] in (3, 4, 5)
    assert worth.staying([(0, 2), (1, 2), (0, 5), (1, 5)], [-1, 0, -1, 2]) == [0, 1]
    few = graft.Worth(0.1)
    few.learn([((0, 9), False)] * 5)
    assert few.staying([(0, 9)], [-1]) == [0]


def test_without_risk_nothing_is_cut():
    """Catches a node that goes although it may be kept: with risk 0 the base's draft comes first, whole."""
    worth = graft.Worth(0.0)
    for _ in range(50):
        worth.learn([((0, 20), False)] * 100)
    assert worth.staying([(0, 20), (1, 24)], [-1, 0]) == [0, 1]
    tree = Tree(TARGET, [-1, -1, 0, 0, 1, 2], "top")
    base = made(tree, risk=0.0, nodes=9)
    drafts, joined = watch(tree), watch(base)
    generate(TARGET, [[0], [3, 1]], base, max_new_tokens=30, sampling=Sampling(1.0, seed=1))
    assert len(drafts) > 10
    for whole, (_, budget, draft) in zip(drafts, joined, strict=True):
        for b, tokens in enumerate(whole.tokens):
            assert draft.ids[b][: len(tokens)] == tokens
            assert draft.tree[b][: len(tokens)] == whole.draft.tree[b][: len(tokens)]
            assert draft.live[b] <= budget[b]


def test_freed_nodes_go_to_the_retriever_and_no_sibling_is_there_twice(cutting):
    """Catches room that stays empty while the retriever knows more, more nodes than before."""
    base = made(Tree(TARGET, [-1, -1, 0, 0, 1, 2], "top"))
    seen, sizes = watch(base), []
    generate(TARGET, [[0], [3, 1], [4]], base, max_new_tokens=60, sampling=Sampling(1.0, seed=1))
    for one in seen:
        for b, size in enumerate(one.draft.live):
            siblings = [(one.draft.tree[b][n], one.draft.ids[b][n]) for n in range(size)]
            assert len(set(siblings)) == len(siblings) <= 6
            sizes.append(size)
    assert sum(size == 6 for size in sizes) > 0.6 * len(sizes)


def test_a_stopped_chain_begins_as_the_whole_one(target, prompts, workshop):
    """Catches a stop that changes what is drawn before it, or ends a draft one node off."""
    base = workshop.build(Case("small_model", {"length": 4}), target)
    for temperature in (0.0, 1.0):
        drafts = {}
        for least in (1, 3, graft.BINS):
            state = batch(target, 1)
            state.admit(0, Request(prompts[0], 20, Sampling(temperature, seed=3)))
            worth = Cutting(0.1)
            worth.least = least
            ending = graft.Ending(worth, [4])
            memory = base.allocate(target.allocate(1, 64))
            drafts[least] = base.propose(memory, state.replaced(stop=ending), torch.tensor([4]))
            size = drafts[least].live[0]
            assert len(ending.marks[0]) == size and all(score < least for _, score in ending.marks[0])
        whole = drafts[graft.BINS].ids[0]
        assert len(whole) == 4 > drafts[1].live[0]
        assert all(draft.ids[0][: draft.live[0]] == whole[: draft.live[0]] for draft in drafts.values())


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [("eagle3", SEEDED), ("dspark", Sampling()), ("specblock", SEEDED), ("layer_skip", Sampling())],
    ids=str,
)  # fmt: skip
def test_any_base_may_be_stopped(kind, sampling, target, prompts, workshop, cutting):
    """Catches a base that takes a draft for longer than it was ended, in slots that end at unequal depths."""
    drafter = made(workshop.build(Case(kind), target), target, nodes=10)
    exact(target, prompts[:4], drafter, OnAndOff(10), max_new_tokens=16, sampling=sampling, slots=3)


def phrases() -> TableTarget:
    """Says two phrases in turn, 0 1 2 3 4 5 and 0 6 7 8 9 10: what follows 0 is never what followed it last."""
    table = torch.full((11, 11, 11), -50.0, dtype=torch.float64)
    for token, following in zip(range(1, 11), (2, 3, 4, 5, 0, 7, 8, 9, 10, 0), strict=True):
        table[:, token, following] = 0
    table[5, 0, 6] = table[10, 0, 1] = table[:5, 0, 1] = table[6:10, 0, 1] = 0
    return TableTarget(table)


@pytest.mark.parametrize("settings", [
    {"kind": "ngram"}, {"kind": "ngram", "tree": "frequency"}, {"kind": "suffix"}, {"kind": "recycle"},
], ids=lambda settings: "-".join(settings.values()))  # fmt: skip
def test_what_follows_a_text_is_the_same_where_its_end_is_only_drafted(settings):
    """Catches a look-up that forgets the drafted tokens, or where they stand, and one that learns them."""
    target, text = phrases(), [1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10, 0] * 3 + [1, 2, 3]
    kind = drafters.find(settings["kind"])
    drafter = kind.build(kind.Config(**settings), target)

    def asked(tokens, ahead):
        """After `text` was read."""
        state = batch(target, 1)
        state.admit(0, Request(text, 20, Sampling()))
        memory = drafter.allocate(target.allocate(1, 64))
        accepted = Accepted([list(range(len(text) - 2))], [text[-1]], [0])
        chain = Draft.chain(torch.tensor([text[1:-1]]), torch.tensor([len(text) - 2]))
        logits = torch.nn.functional.one_hot(torch.tensor([text[1:]]), 11).double()
        drafter.observe(memory, state, chain, accepted, Scores(logits, logits, None))
        drafter.propose(memory, state, torch.tensor([6]))
        state.tokens[0] = list(tokens)
        found = drafter.look_up(memory, state, [ahead], torch.tensor([6]))
        state.tokens[0] = list(text)
        again = drafter.propose(memory, state, torch.tensor([6]))
        return [(draft.ids[0][: draft.live[0]], draft.tree[0][: draft.live[0]]) for draft in (found, again)]

    whole, unchanged = asked(text, [])
    assert whole == unchanged and len(whole[0]) > 2
    for n in (1, 2, 5):
        assert asked(text[:-n], text[-n:]) == [whole, whole]
    elsewhere, unchanged = asked(text, [4, 5, 0, 6])
    assert elsewhere[0][0] == 7 and unchanged == whole


def test_cut_and_grafted_drafts_keep_the_distribution(cutting):
    """Catches a cut that looks at a node's own token, or a sibling put before it.  False alarm 1e-6."""
    drafter = made(Tree(TARGET, [-1, -1, 0, 0, 1, 2], "mixed"), nodes=8)
    assert keeps_the_distribution(TARGET, drafter, slots=1000, prompt=[0, 1, 0, 1])
    _, _, kept = emitted(TARGET, drafter, slots=100)
    assert kept > 30


def test_the_bases_cache_stands_as_if_it_had_read_the_text(target, prompts, workshop):
    """Catches a base whose cache holds its own rejected tokens where the retriever's were kept."""
    base = workshop.build(Case("small_model", {"width": 3, "nodes": 6}), target)
    distances = misreadings(base)
    requests = [Request(prompt, 8 + 3 * n, Sampling(n % 3 / 2, seed=n)) for n, prompt in enumerate(prompts[:6])]
    [*_] = serve(target, requests, made(base, target, nodes=12), slots=3, policy=OnAndOff(12))
    assert len(distances) > 20 and max(distances) < 1e-10


def test_a_part_that_cannot_be_is_refused():
    """Catches a setting that is swallowed, and a checkpoint that would need what stands above the drafters."""
    with pytest.raises(ValueError, match="did you mean 'ngram'"):
        graft.Config(base={"kind": "ngramm"})
    with pytest.raises(ValueError, match="lengthh"):
        graft.Config(base={"kind": "ngram", "lengthh": 3})
    with pytest.raises(ValueError, match="no kind"):
        graft.Config(base={"length": 3})
    with pytest.raises(ConfigError, match="load_drafter"):
        graft.build(graft.Config(base="runs/some/checkpoint"), TARGET)
    opened = []

    def load(folder, target):
        opened.append(folder)
        return Tree(TARGET, [-1, 0], "top")

    assert graft.build(graft.Config(base="runs/some/checkpoint"), TARGET, load).limit == 2
    assert opened == ["runs/some/checkpoint"]


def test_confidences_that_may_know_their_own_token_are_not_looked_at():
    """Catches a node that is cut by what was known only after its draw: its base does not say when it was known."""
    base = Tree(TARGET, [-1, 0, 1], "top")
    propose, seen = base.propose, []
    base.propose = lambda *args: replace(propose(*args), confidence=torch.full((1, 3), 0.25))
    for is_known in (False, True):
        base.confidence_before_draw = is_known
        drafter, state = made(base), batch(TARGET, 1)
        state.admit(0, Request([1, 2], 20, Sampling()))
        memory = drafter.allocate(TARGET.allocate(1, 64))
        drafter.propose(memory, state, torch.tensor([3]))
        seen.append([score for _, score in memory.marks[0]])
    assert seen == [[0, 0, 0], [4, 8, 12]]


def test_a_part_with_a_probe_is_refused():
    """Catches a drafter whose rows nobody puts into the pass, met in mid-text."""
    base = Tree(TARGET, [-1, 0, 1], "top")
    base.probe_rows = 3
    with pytest.raises(ConfigError, match="use it alone"):
        made(base)
