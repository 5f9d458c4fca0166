"""Grafting: what is cut, what fills the room, and that both drafters see the text; the distribution for drawn
drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Case, first
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import Drawn, OnAndOff, Proposer, TableTarget, Tree

from outrider import drafters
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request, Scores
from outrider.errors import ConfigError
from outrider.generation import batch, generate, serve
from outrider.nn import language_model
from outrider.policies.fixed import Fixed
from outrider.retrieval.texts import History
from outrider.sampling.settings import Sampling

graft, recycle, small_model = (drafters.find(kind) for kind in ("graft", "recycle", "small_model"))
TARGET = TableTarget.random(5)


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


# ── what is cut ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    base, plain = made(tree, risk=0.0, nodes=9), tree.propose
    drafts = []

    def watched(memory, state, budget):
        drafts.append(plain(memory, state, budget))
        return drafts[-1]

    tree.propose = watched
    propose = base.propose

    def seen(memory, state, budget):
        draft = propose(memory, state, budget)
        whole = drafts[-1]
        for b, size in enumerate(whole.live):
            assert draft.ids[b][:size] == whole.ids[b][:size] and draft.tree[b][:size] == whole.tree[b][:size]
            assert draft.live[b] <= int(budget[b])
        return draft

    base.propose = seen
    generate(TARGET, [[0], [3, 1]], base, max_new_tokens=30, sampling=Sampling(1.0, seed=1))
    assert len(drafts) > 10


def test_freed_nodes_go_to_the_retriever_and_no_sibling_is_there_twice(cutting):
    """Catches room that stays empty while the retriever knows more, more nodes than before, and a token offered
    twice."""
    base = made(Tree(TARGET, [-1, -1, 0, 0, 1, 2], "top"))
    whole, seen, propose = 6, [], base.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        for b, size in enumerate(draft.live):
            siblings = [(draft.tree[b][n], draft.ids[b][n]) for n in range(size)]
            assert len(set(siblings)) == len(siblings)
            assert size <= whole
            seen.append(size)
        return draft

    base.propose = watched
    generate(TARGET, [[0], [3, 1], [4]], base, max_new_tokens=60, sampling=Sampling(1.0, seed=1))
    assert sum(size == whole for size in seen) > 0.6 * len(seen)


def test_a_graft_keeps_more_than_what_it_cut_from(target, prompts, plain, workshop):
    """Catches a retriever that is never asked, or is told nothing: counts of steps, the same in every run."""
    chain = workshop.build(Case("small_model", {"length": 2}), target)

    def steps(drafter):
        found = generate(target, prompts, drafter, max_new_tokens=40, slots=3)
        assert [one.tokens for one in found] == [plain(target, prompt, 40) for prompt in prompts]
        return sum(one.steps for one in found)

    assert steps(made(chain, target, nodes=10)) < steps(chain)


# ── what the base is spared ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def passes(monkeypatch):
    """Passes that small_model made for each draft."""
    counts, read_one, propose = [], language_model.read_one, small_model.SmallModel.propose

    def counted(*args):
        counts[-1] += 1
        return read_one(*args)

    def drafted(self, memory, state, budget):
        counts.append(0)
        draft = propose(self, memory, state, budget)
        counts[-1] = counts[-1], max(draft.live), int(budget.max())
        return draft

    monkeypatch.setattr(language_model, "read_one", counted)
    monkeypatch.setattr(small_model.SmallModel, "propose", drafted)
    return counts


@pytest.mark.parametrize("ignored", [False, True], ids=["stops", "planted fault"])
def test_a_chain_makes_no_pass_for_what_would_be_cut(
    ignored, target, prompts, plain, workshop, cutting, passes, monkeypatch
):
    """Catches a base that drafts on behind its first cut node.  Planted fault: a stop that nobody tells the base."""
    if ignored:
        ask = graft.Graft.ask
        monkeypatch.setattr(graft.Graft, "ask", lambda *args: ask(*args[:5]))
    drafter = made(workshop.build(Case("small_model", {"length": 5}), target), target, nodes=8)
    found = generate(target, prompts[:1], drafter, max_new_tokens=24)
    assert found[0].tokens == plain(target, prompts[0], 24)
    assert len(passes) > 4 and any(size < most for _, size, most in passes) is not ignored
    assert all(made <= size for made, size, _ in passes if size < 5) is True
    assert (sum(made for made, *_ in passes) < 0.9 * sum(most - 1 for *_, most in passes)) is not ignored


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
    "kind", first(["eagle3", "small_model", "dspark", "eagle", "mtp", "specblock", "layer_skip"], 3)
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=4)], ids=["greedy", "seeded"])
def test_any_base_may_be_stopped(kind, sampling, target, prompts, workshop, cutting):
    """Catches a base that takes a draft for longer than it was ended, in slots that end at unequal depths."""
    drafter = made(workshop.build(Case(kind), target), target, nodes=10)
    settings = {"max_new_tokens": 24, "sampling": sampling, "slots": 3}
    found = generate(target, prompts, drafter, policy=OnAndOff(10), **settings)
    assert [one.tokens for one in found] == [one.tokens for one in generate(target, prompts, **settings)]


# ── where the retriever's nodes hang ──────────────────────────────────────────────────────────────────────────────────


def phrases() -> TableTarget:
    """Says two phrases in turn, 0 1 2 3 4 5 and 0 6 7 8 9 10: what follows 0 is never what followed it last."""
    table = torch.full((11, 11, 11), -50.0, dtype=torch.float64)
    for token, following in zip(range(1, 11), (2, 3, 4, 5, 0, 7, 8, 9, 10, 0), strict=True):
        table[:, token, following] = 0
    table[5, 0, 6] = table[10, 0, 1] = table[:5, 0, 1] = table[6:10, 0, 1] = 0
    return TableTarget(table)


class First(Proposer):
    """Knows the next token, and no more."""

    limit = 1

    def propose(self, memory, state, budget):
        texts = [[0, *state.tokens[row]][-2:] for row in state.rows]
        return Draft.chain(
            torch.tensor([[int(phrases().table[before, own].argmax())] for before, own in texts]), budget
        )


def hung(under: str):
    """Steps of a text of phrases, with n-grams looked up under the anchor alone or under the base's token too."""
    ngram = drafters.find("ngram")
    retriever = ngram.build(ngram.Config(longest=1, shortest=1), phrases())
    drafter = graft.Graft(First(), retriever, graft.Config(nodes=7, under=under, risk=0.0))
    found = generate(phrases(), [[0]], drafter, max_new_tokens=120, policy=Fixed(7))[0]
    assert found.tokens == [1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10, 0] * 10
    return found.steps


def test_the_retriever_goes_on_after_what_the_base_drafted(monkeypatch):
    """Catches retrieved nodes that hang under the anchor alone.  Planted fault: the tip's token is not looked up."""
    both, anchor = hung("both"), hung("anchor")
    assert both < 0.9 * anchor
    propose = History.propose
    monkeypatch.setattr(History, "propose", lambda self, tokens, most, drafted=(): propose(self, tokens, most))
    assert hung("both") > 1.1 * both


@pytest.mark.parametrize("settings", [
    {"kind": "ngram"}, {"kind": "ngram", "tree": "recency"}, {"kind": "ngram", "tree": "frequency"}, {"kind": "suffix"},
    {"kind": "recycle"},
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


# ── the distribution ──────────────────────────────────────────────────────────────────────────────────────────────────

BASES = {
    "with replacement": lambda: Tree(TARGET, [-1, -1, 0, 0, 1, 2], "replacement"),
    "without replacement": lambda: Tree(TARGET, [-1, -1, 0, 0, 1, 2], "without"),
    "deterministic": lambda: Tree(TARGET, [-1, -1, -1, 0, 0, 3], "top"),
    "mixed": lambda: Tree(TARGET, [-1, -1, 0, 1, 1, 2], "mixed"),
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_cut_and_grafted_drafts_keep_the_distribution(base, cutting):
    """Catches a cut that looks at a node's own token, or a sibling put before it.  False alarm 1e-6."""
    assert keeps_the_distribution(TARGET, made(base(), nodes=8), slots=1500, prompt=[0, 1, 0, 1])
    _, _, kept = emitted(TARGET, made(base(), nodes=8), slots=300)
    assert kept > 100


def test_a_node_cut_for_the_probability_of_its_own_token_is_caught(cutting, monkeypatch):
    """Planted fault: the score is q of the token that was drawn."""
    uneven = TableTarget.of([0.7, 0.3])

    def distribution(before, own):
        return torch.tensor([0.4, 0.6], dtype=torch.float64).expand(len(own), -1)

    def confident(before, own):
        return torch.full((len(own),), 0.45)

    def own_q(draft: Draft) -> Draft:
        own = draft.q.gather(-1, draft.tokens[..., None])[..., 0]
        return Draft.chain(draft.tokens, draft.sizes, draft.q, own.float())

    assert keeps_the_distribution(uneven, made(Drawn(distribution, 2, confident), uneven, nodes=3), slots=2000)
    assert not keeps_the_distribution(uneven, made(Drawn(distribution, 2, bend=own_q), uneven, nodes=3), slots=2000)


def test_a_graft_on_a_small_model_keeps_the_distribution(workshop):
    """Catches noise shared between base and retriever, and a cache that gives another q than was drawn from."""
    base = workshop.build(Case("small_model", {"length": 3}), TARGET)
    assert keeps_the_distribution(TARGET, made(base, nodes=6), slots=1000, prompt=[0, 3])


# ── what the base is told ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("choices", [{"length": 3}, {"width": 3, "nodes": 6}], ids=["chain", "tree"])
def test_the_bases_cache_stands_as_if_it_had_read_the_text(
    choices, temperature, target, prompts, workshop, monkeypatch
):
    """Catches a base whose cache holds its own rejected tokens where the retriever's were kept: every reading is
    compared with one of the whole text.
    """
    base = workshop.build(Case("small_model", choices), target)
    drafter = made(base, target, nodes=12)
    read, worst = base._read, []

    def watched(memory, rows, texts):
        logits = read(memory, rows, texts)
        for b, text in enumerate(texts):
            assert memory.cache.lengths[rows[b]] == len(text)
            hidden, _ = base.model.read(torch.tensor([text]))
            worst.append(float((logits[b] - base.model.head(hidden[0, -1])).abs().max()))
        return logits

    monkeypatch.setattr(base, "_read", watched)
    for policy in (None, OnAndOff(12)):
        requests = [
            Request(prompt, 8 + 3 * n, Sampling(temperature * (n % 3 > 0), seed=None if n % 2 else n))
            for n, prompt in enumerate(prompts)
        ]
        for _ in serve(target, requests, drafter, slots=3, policy=policy):
            pass
    assert len(worst) > 80 and max(worst) < 1e-10


def test_parts_are_told_their_own_nodes_and_every_token():
    """Catches indices of the joined draft that reach a part, and tokens of others that it never sees."""
    told = []

    class Listening(Proposer):
        """Proposes the next two numbers, the first of them right."""

        limit = 2

        def propose(self, memory, state, budget):
            last = state.anchor
            return Draft.chain(torch.stack([(last + 1) % 5, last], 1), budget)

        def observe(self, memory, state, draft, kept, scores):
            for b, row in enumerate(state.rows):
                path, last = kept.paths[b], kept.next_tokens[b]
                text = [draft.ids[b][n] for n in path] + [last] * (last >= 0)
                assert state.tokens[row][-len(text) :] == text
                assert int(state.anchor[b]) == text[-1]
                assert all(draft.tree[b][n] == above for n, above in zip(path, [-1, *path], strict=False))
                before = state.tokens[row][-len(text) - 1]
                # row n + 1 of the scores is node n's own, row 0 that of the token before
                for at, token in zip([0, *(n + 1 for n in path)], [before, *text], strict=False):
                    assert int(scores.logits[b, at].argmax()) == (token + 1) % 5
                told.append((row, text))

    class Later(Proposer):
        """Knows the true three next tokens."""

        limit = 4

        def propose(self, memory, state, budget):
            last = state.anchor
            return Draft.chain(torch.stack([(last + n) % 5 for n in range(1, 5)], 1), budget)

    table = torch.full((5, 5, 5), -50.0, dtype=torch.float64)
    for token in range(5):
        table[:, token, (token + 1) % 5] = 0
    counting = TableTarget(table)
    for pair in ((Listening(), Later()), (Later(), Listening())):
        told.clear()
        drafter = graft.Graft(*pair, graft.Config(nodes=6))
        found = generate(counting, [[0], [3]], drafter, max_new_tokens=13)
        assert [one.tokens for one in found] == [[(n + 1) % 5 for n in range(13)], [(n + 4) % 5 for n in range(13)]]
        assert found[0].steps < 5
        for row, one in enumerate(found):
            assert [token for slot, text in told for token in text if slot == row] == one.tokens


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


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
