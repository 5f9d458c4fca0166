"""Heads on the last state: what they draft, in which tree, and how the tree is found."""

from dataclasses import replace

import pytest
import torch
from conftest import batch_of
from contracts.chances import keeps_the_distribution
from contracts.parties import TableTarget

from outrider import checkpoint
from outrider.config import build as checked
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.drafters import medusa
from outrider.errors import ConfigError, DrafterError
from outrider.loading import load_drafter
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

BUSHY = ((0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 2), (0, 1, 0))
TABLE = TableTarget.random(5)


def made(target, **settings) -> medusa.Model:
    """A model whose heads are no longer what they began as."""
    torch.manual_seed(3)
    model = medusa.Model(medusa.Config(**{"heads": 3, "tree": BUSHY} | settings), target)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model.to(getattr(torch, target.spec.dtype)).eval()


class Slots:
    slots, length = 2, 100


def proposed(model, texts, budget=100, sampling=Sampling()) -> Draft:  # noqa: B008  (frozen)
    """The draft behind these texts, each read up to its anchor."""
    drafter, state = model.drafter(), DecodeState(len(texts), 256, judge=SamplingJudge())
    memory = drafter.allocate(Slots())
    for row, text in enumerate(texts):
        state.admit(row, Request(text, 100, sampling))
        state.prefilled[row] = len(text) - 1
        hidden, _ = model.target.read(torch.tensor([text[:-1]]))
        drafter.admit(memory, [row], state, Scores(hidden, hidden, None), [len(text) - 1])
    return drafter.propose(memory, state, torch.full((len(texts),), min(budget, drafter.limit)))


def said(model, text, path) -> torch.Tensor:
    """Logits [V] of the head behind a text and this drafted path, as training sees them."""
    hidden, _ = model.target.read(torch.tensor([text[:-1]]))
    tokens = [text[-1], *path]
    words = model.words(torch.tensor([tokens + [0] * (model.config.heads - len(tokens))]))
    with torch.no_grad():
        return model.along(hidden[:, -1], words, model.config.heads)[0, len(path)]


def follows_the_heads(model, texts, draft, banned=frozenset()) -> bool:
    """Whether every node is the choice of its rank of its head, behind its own path."""
    paths = [*model.drafter().tree.paths][: draft.tokens.shape[1]]
    for b, text in enumerate(texts):
        tokens = dict(zip(paths, draft.ids[b], strict=True))
        for path in paths:
            logits = said(model, text, [tokens[path[:n]] for n in range(1, len(path))])
            logits[list(banned)] = -torch.inf
            if tokens[path] != int(logits.topk(path[-1] + 1).indices[-1]):
                return False
    return True


TEXTS = [[5, 9, 11, 3], [40, 2]]
KINDS = pytest.mark.parametrize("sequential", [False, True], ids=["independent", "sequential"])
HEADS = pytest.mark.parametrize(("sequential", "head"), [(False, "target"), (True, "own")])


@HEADS
def test_heads_begin_as_the_targets_own(sequential, head, target):
    """Catches a start that is worse than no head at all."""
    model = medusa.Model(
        medusa.Config(heads=2, sequential=sequential, head=head, layers=2, tree=BUSHY[:5]), target
    ).double()
    hidden, _ = target.read(torch.tensor([TEXTS[0][:-1]]))
    best = target.head(hidden[0, -1]).topk(3).indices.tolist()
    assert proposed(model, TEXTS[:1]).ids[0] == [best[path[-1]] for path in BUSHY[:5]]


@HEADS
def test_every_node_is_its_ranks_choice_behind_its_own_path(sequential, head, target):
    """Catches a head of another depth, a rank too far, and words of another branch."""
    model = made(target, sequential=sequential, head=head)
    draft = proposed(model, TEXTS)
    assert draft.tree[0] == (-1, -1, 0, -1, 0, 1, 2, 2, 5, 4)
    assert draft.q is None
    assert follows_the_heads(model, TEXTS, draft)


def test_a_sequential_heads_choice_hangs_on_the_token_before_it(target):
    """Catches words that never reach the head: then two branches would go on alike."""
    model = made(target, sequential=True, tree=((0,), (1,), (0, 0), (1, 0)))
    different = [draft[2] != draft[3] for text in range(8) for draft in proposed(model, [[text, text + 9]]).ids]
    assert any(different)


@KINDS
def test_no_node_is_a_banned_token(sequential, target):
    """Catches a ban that is looked up for the first level alone."""
    model, banned = made(target, sequential=sequential), frozenset(range(0, 64, 2))
    draft = proposed(model, TEXTS, sampling=Sampling(bad_words=[(token,) for token in banned]))
    assert all(token not in banned for ids in draft.ids for token in ids)
    assert follows_the_heads(model, TEXTS, draft, banned)


def test_a_slot_without_a_state_drafts_nothing_and_keeps_nothing(target):
    """Catches a request that is drafted for with the state of the one before it in its slot."""
    model = made(target)
    drafter, state = model.drafter(), DecodeState(2, 256)
    memory = drafter.allocate(Slots())
    for row in range(2):
        state.admit(row, Request([row + 1], 100, Sampling()))
    assert not drafter.propose(memory, state, torch.tensor([5, 5])).live[0]
    states = torch.randn(2, 3, 32, dtype=torch.float64)
    kept = Accepted([[1], []], [7, 8], [0, 0])
    drafter.observe(memory, state, Draft.empty(2), kept, Scores(states, states, None))
    assert torch.equal(memory.hidden, torch.stack([states[0, 2], states[1, 0]]))
    drafter.free(memory, [0])
    assert drafter.propose(memory, state, torch.tensor([5, 5])).live == [0, 5]


@KINDS
def test_drawn_and_certain_trees_keep_the_distribution(sequential):
    """Catches a q that is not what a node was drawn from.  False alarm 1e-6."""
    models = [made(TABLE, sequential=sequential, drawn=drawn) for drawn in (False, True)]
    assert [proposed(model, [[1, 2]], sampling=Sampling(1.0)).q is not None for model in models] == [False, True]
    assert proposed(models[1], [[1, 2]]).q is None
    assert keeps_the_distribution(TABLE, models[sequential].drafter(), slots=2000)


def test_the_best_tree_is_neither_the_widest_nor_the_deepest():
    """Catches a search level by level, one depth first, and a child before its parent where a head is always right."""
    whole = ((0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1))
    assert medusa.search([[0.6, 0.3], [0.6, 0.1]], 4) == whole[:4]
    assert medusa.search([[0.6, 0.3], [0.6, 0.1]], 99) == whole
    assert medusa.search([[1.0, 1.0], [1.0, 1.0]], 6)[:2] == ((0,), (1,))


def counted(target, draft, best, learnt, model=None) -> medusa.Rows:
    """Rows of 2 anchors and 2 heads, told what heads and target said."""
    model = model or medusa.Model(medusa.Config(heads=2), target).double()
    batch = batch_of(target, (), torch.tensor([[1, 2, 3, 4, 5]]))
    rows = model.predict(replace(batch, loss_mask=torch.tensor([learnt])))
    said = torch.nn.functional.one_hot(torch.tensor(best), 64).double()
    for part in (slice(0, 2), slice(2, 4)):
        rows.extra(part, draft[part], said[part])
    return rows


def test_accuracies_are_counted_by_hand(target):
    """Catches a rank or a head that is off by one, and rows that are not learnt."""
    draft = torch.zeros(4, 64)
    draft[:, 10], draft[:, 20], draft[:, 30] = 3.0, 2.0, 1.0
    every = [True] * 5
    rows = counted(target, draft, [10, 30, 20, 10], every)
    # the second anchor's head 1 predicts the last token, the third anchor's would stand behind it
    assert rows.depth.tolist() == [0, 1, 0, 1, 0, 1]
    assert rows.weight.tolist() == pytest.approx([1, 0.8, 1, 0.8, 1, 0])
    assert rows.hits.sum(1).tolist() == [2, 2]
    assert rows.hits[:, :4].tolist() == [[1, 1, 0, 0], [1, 0, 1, 0]]
    # of equals the lower id comes first: three are ahead of them all, and ids 0 to 4
    assert counted(target, draft, [5, 10, 11, 20], every).hits[0].tolist() == [0] * 8 + [1, 0, 1]
    swapped = counted(target, draft, [30, 10, 10, 20], every)
    assert not torch.equal(swapped.hits, rows.hits)
    short = counted(target, draft, [10, 30, 20, 10], [True, True, True, True, False])
    assert short.hits.sum(1).tolist() == [2, 1]
    before = rows.model.accuracies.clone()
    rows.backward()
    found = torch.tensor([[0.5, 0.5, 0], [0.5, 0, 0.5]])
    torch.testing.assert_close(rows.model.accuracies[:, :3], 0.95 * before[:, :3] + 0.05 * found, check_dtype=False)
    assert not rows.hits.any()
    before = rows.model.eval().accuracies.clone()
    again = counted(target, draft, [10, 30, 20, 10], every, rows.model)
    again.backward()
    assert torch.equal(rows.model.accuracies, before), "an evaluation moves no tree"


def test_a_checkpoint_brings_its_tree(target, tmp_path):
    """Catches accuracies that are not saved, and a tree that is asked for and not drafted."""
    config = medusa.Config(heads=2, nodes=5)
    model = medusa.Model(config, target).double()
    model.accuracies.copy_(torch.tensor([[0.2, 0.19, 0.16] + [0.01] * 7, [0.9, 0.05, 0.04] + [0.001] * 7]))
    checkpoint.save(tmp_path / "checkpoint", model)
    wanted = ((0,), (1,), (0, 0), (1, 0), (2,))
    assert load_drafter(tmp_path / "checkpoint", target).tree.paths == wanted
    assert model.drafter().tree.paths == wanted
    model.config = config.model_copy(update={"tree": BUSHY[:3]})
    assert model.drafter().tree.paths == BUSHY[:3]


def test_a_tree_that_is_none_is_refused(target):
    """Catches a node without a parent deep in a step, and a rank beyond the vocabulary deep in top-k."""
    for tree, message in (
        ([[0, 0], [0]], "before its parent"), ([[0], [0]], "is empty, repeated, or before its parent"),
        ([[]], "is empty"), ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "deeper than 3 heads"), ([], "at least one node"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            checked(medusa.Config, {"heads": 3, "tree": tree})
    with pytest.raises(DrafterError, match="rank 64"):
        medusa.Model(medusa.Config(tree=((0,), (64,))), target)


def test_every_position_trains_unless_anchors_are_drawn(target):
    """Catches positions that are left out or trained twice, and more anchors than were asked for."""
    counting = torch.arange(24).expand(2, -1) + torch.tensor([[0], [30]])
    batch = batch_of(target, (), counting)
    documents = torch.ones(2, 24, dtype=torch.int64)
    documents[0, 10:], documents[1, 20:] = 2, 0
    batch = replace(batch, documents=documents, loss_mask=documents > 0)
    rows = medusa.Model(medusa.Config(heads=3), target).double().predict(batch)
    first = rows.labels[(rows.depth == 0) & (rows.weight > 0)].tolist()
    # the first two tokens of a text have no anchor with a state before it
    assert sorted(first) == [*range(2, 10), *range(12, 24), *range(32, 50)]
    drawn = medusa.Model(medusa.Config(heads=3, anchors=4), target).double().predict(batch)
    few = drawn.labels[drawn.depth == 0].tolist()
    assert len(few) == 8 and set(few) <= set(first) and sum(label < 30 for label in few) == 4


def test_a_batch_with_nothing_to_learn_trains_nothing(target):
    """Catches an error on a batch of texts too short, or of prompts alone."""
    batch = batch_of(target, (), torch.arange(12).view(1, 12))
    for nothing in (replace(batch, loss_mask=batch.loss_mask & False), batch_of(target, (), torch.tensor([[1, 2]]))):
        model = medusa.Model(medusa.Config(heads=3, anchors=4), target).double()
        rows = model.predict(nothing)
        assert list(rows.chunks(8)) == [] and len(rows.labels) == 0
        rows.backward()
        assert bool(model.accuracies.isfinite().all())
