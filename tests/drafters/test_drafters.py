"""What single drafters promise beyond the contracts every drafter is held to."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from conftest import FEW, Case, batch_of, cases, fast, tiny_model
from contracts.parties import OnAndOff
from transformers import GPT2Config, GPT2LMHeadModel

from outrider import drafters
from outrider.cli.drafters import about
from outrider.decoding.state import DecodeState, Request
from outrider.drafters import dflash, kinds
from outrider.errors import ConfigError, DrafterError
from outrider.generation import batch, generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.cache import SlotCache
from outrider.targets.load import load_target

EVERY = pytest.mark.parametrize("case", fast(cases(), FEW))


def test_every_file_is_a_drafter():
    """Catches a file in the folder that is none."""
    assert {"ngram", "small_model", "dflash", "dspark"} <= set(drafters.kinds())
    for kind in drafters.kinds():
        module = drafters.find(kind)
        assert module.Config().kind == kind
        assert callable(module.build)
        assert module.__doc__


def test_an_unknown_kind_is_refused_with_the_nearest_name():
    """Catches an import error where a name was mistyped."""
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        drafters.find("ngramm")


WHOLE = """
from typing import Literal
from outrider.config import Config as Base
class Config(Base):
    kind: Literal["class_ngram"] = "class_ngram"
def build(config, target): ...
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (WHOLE, None),
        (
            WHOLE.replace('"class_ngram"', '"klass"'),
            "drafters/class_ngram.py: Config.kind must be the file's name, 'class_ngram', got 'klass'",
        ),
        (WHOLE.replace(' = "class_ngram"', ' = "klass"'), "got 'klass'"),
        (WHOLE.replace(' = "class_ngram"', ""), "Config.kind must be .*, got none, or one without a default"),
        (WHOLE.replace("def build", "def make"), r"has no `build\(config, target\)`; see docs/write-a-drafter.md"),
        (WHOLE.replace("(Base)", ""), "drafters/class_ngram.py has no `Config`, a subclass"),
        ("import no_such_package", r"drafters/class_ngram.py can't be imported \(ModuleNotFoundError: No module named"),
    ],
    ids=["whole", "other kind", "other default", "no default", "no build", "no Config", "no import"],
)
def test_a_file_that_is_no_drafter_is_refused_and_the_others_are_listed(source, message, tmp_path, monkeypatch):
    """Catches one faulty file, or one faulty package beside ours, that takes the list and the contract suite down."""
    (tmp_path / "class_ngram.py").write_text(source)
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setattr(drafters, "class_ngram", None, raising=False)  # set by the import, and so taken back
    monkeypatch.setitem(sys.modules, "outrider.drafters.class_ngram", None)
    del sys.modules["outrider.drafters.class_ngram"]
    importlib.invalidate_caches()
    if message is None:
        drafters.find("class_ngram")
    else:
        with pytest.raises(ConfigError, match=message):
            drafters.find("class_ngram")
    listed = {entry["kind"]: entry["summary"] for entry in map(about, kinds())}
    assert listed["ngram"].startswith("Prompt lookup")
    assert listed["class_ngram"] == "" if message is None else "class_ngram" in listed["class_ngram"]
    assert "class_ngram" in {case.kind for case in cases()}


def test_an_entry_point_of_another_name_is_refused(monkeypatch):
    """Catches a message that speaks of a file where a package is meant."""
    monkeypatch.setattr(
        drafters, "kinds", lambda: {"repeat": "outrider.drafters.ngram", "twice": "no_such_package:thing"}
    )
    monkeypatch.setattr(drafters, "__name__", "elsewhere")
    with pytest.raises(
        ConfigError, match="outrider.drafters.ngram: Config.kind must be the entry point's name, .*, got 'ngram'"
    ):
        drafters.find("repeat")
    with pytest.raises(ConfigError, match="no_such_package:thing can't be imported"):
        drafters.find("twice")


@EVERY
def test_a_drafter_stays_within_its_budget(case, target, prompts, drafter_of, monkeypatch):
    """Catches nodes that nobody asked for: they cost a pass and may not fit."""
    drafter, seen = drafter_of(case), []
    propose = drafter.propose

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        assert bool((draft.sizes <= budget).all())
        assert draft.tokens.shape[1] <= drafter.limit
        seen.append(draft)
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    generate(target, prompts, drafter, max_new_tokens=15, slots=3)
    assert seen
    # at temperature 0 there is nothing to be drawn from
    assert all(draft.q is None for draft in seen)
    hot = [Request(prompt, 10, Sampling(1.0, seed=1)) for prompt in prompts]
    for _ in serve(target, hot, drafter, slots=3):
        pass
    for draft in seen:
        if draft.confidence is not None:
            assert bool(((draft.confidence >= 0) & (draft.confidence <= 1)).all())


@EVERY
def test_no_drafters_nodes_are_counted_as_invalid(case, target, prompts, drafter_of):
    """Catches a q that is no distribution, or that gives its own token nothing: half of the draft's worth is lost
    unseen."""
    state = batch(target, 3, shared_noise=False)  # judged by q, which shared noise leaves unread
    requests = [Request(prompt, 20, Sampling(0.9, top_k=20, top_p=0.95, seed=n)) for n, prompt in enumerate(prompts)]
    for _ in serve(target, requests, drafter_of(case), state=state):
        pass
    assert state.invalid == 0


# ── ngram ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def proposed(config, text: list[int], budget: int = 4) -> list[int]:
    drafter = drafters.find("ngram").build(config, None)
    state = DecodeState(1, 1000)
    state.admit(0, Request(text, 100, Sampling()))

    class Slots:
        slots = 1

    draft = drafter.propose(drafter.allocate(Slots()), state, torch.tensor([budget]))
    return draft.tokens[0, : int(draft.sizes[0])].tolist()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the most recent of equals
        ([9, 1, 2, 3, 1, 2, 4, 9, 1, 2], [3, 1, 2, 4]),  # the longest wins over the most recent
        ([1, 2, 3, 4], []),
        ([5], []),
        ([7, 7, 7], [7]),
    ],
    ids=str,
)
def test_ngram_proposes_what_followed_the_longest_latest_match(text, wanted):
    """Catches a match of the text's end with itself, and the order of preferences."""
    found = proposed(drafters.find("ngram").Config(length=4, longest=3, shortest=2), text)
    assert found == wanted


def test_ngram_learns_from_its_own_text_as_from_the_prompt():
    """Catches a history that is read only once: by looking up every prefix of a text, step by step and at once."""
    config = drafters.find("ngram").Config(length=3, longest=3, shortest=1)
    text = torch.randint(3, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    drafter = drafters.find("ngram").build(config, None)

    class Slots:
        slots = 1

    memory, state = drafter.allocate(Slots()), DecodeState(1, 1000)
    state.admit(0, Request(text[:2], 100, Sampling()))
    for end in range(2, 60):
        state.tokens[0] = text[:end]
        draft = drafter.propose(memory, state, torch.tensor([3]))
        assert draft.tokens[0, : int(draft.sizes[0])].tolist() == proposed(config, text[:end], 3)


def test_ngram_refuses_a_shortest_above_its_longest():
    """Catches a drafter that never proposes."""
    with pytest.raises(ValueError, match="shortest"):
        drafters.find("ngram").Config(shortest=5, longest=3)


# ── small_model ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_small_model_that_is_the_target_is_always_right(target, prompts, plain, tmp_path):
    """Catches a small model's cache that loses the text: any slip shows as a rejection."""
    target.model.save_pretrained(tmp_path)
    module = drafters.find("small_model")
    drafter = module.build(module.Config(model=str(tmp_path), length=4), target)
    found = generate(target, prompts, drafter, max_new_tokens=40, slots=3)
    for prompt, generation in zip(prompts, found, strict=True):
        assert generation.tokens == plain(target, prompt, 40)
        assert generation.accepted == [4] * 8
    hot = generate(target, prompts, drafter, max_new_tokens=40, slots=3, sampling=Sampling(1.0, seed=0))
    # q equals p but for rounding: a rejection has odds below 1e-9
    assert all(generation.accepted == [4] * 8 for generation in hot)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("context", [20, 27])
def test_a_small_model_reads_the_end_of_a_text_beyond_its_context(width, context, target, prompts, plain, tmp_path):
    """Catches positions that the model has never seen, or does not have: GPT-2's are a table, and beyond it is a
    crash."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(GPT2Config(n_positions=context, **shape)).double().save_pretrained(tmp_path)
    module = drafters.find("small_model")
    drafter = module.build(module.Config(model=str(tmp_path), length=4, width=width), target)
    for slots in (1, 3):
        found = generate(target, prompts, drafter, max_new_tokens=40, slots=slots)
        assert [generation.tokens for generation in found] == [plain(target, prompt, 40) for prompt in prompts]
    with pytest.raises(ConfigError, match="context"):
        module.build(module.Config(model=str(tmp_path), length=context), target)


def test_a_small_model_goes_on_being_right_beyond_its_context(target, plain, tmp_path):
    """Catches a window whose positions or cache are off: what is read of the text is what a fresh model reads of it."""
    model = tiny_model(max_position_embeddings=24)
    model.save_pretrained(tmp_path)
    module = drafters.find("small_model")
    drafter = module.build(module.Config(model=str(tmp_path), length=4), target)
    (found,) = generate(target, [7, 7, 3], drafter, max_new_tokens=60)
    text, room, skipped = [7, 7, 3], 20, 0
    for n, accepted in enumerate(found.accepted[:-1]):
        skipped = len(text) - 10 if len(text) - skipped > room else skipped
        window = torch.tensor([text[skipped:]])
        alone = model.generate(window, attention_mask=torch.ones_like(window), max_new_tokens=4, do_sample=False)[0]
        ahead = found.tokens[len(text) - 3 :][:4]
        drafted = alone[window.shape[1] :].tolist()
        agreed = next((i for i, (a, b) in enumerate(zip(drafted, ahead, strict=False)) if a != b), 4)
        assert accepted == agreed, n
        text = text + found.tokens[len(text) - 3 :][: accepted + 1]


def test_a_small_model_of_another_vocabulary_is_refused(target, tmp_path):
    """Catches ids that mean other words."""
    tiny_model(vocab_size=48).save_pretrained(tmp_path)
    module = drafters.find("small_model")
    with pytest.raises(DrafterError, match="48"):
        module.build(module.Config(model=str(tmp_path)), target)


CHAIN, TREE = Case("small_model"), Case("small_model", {"width": 3, "nodes": 10})


@pytest.fixture(scope="module")
def untrained(workshop, target):
    return workshop.build(CHAIN, target).model


@pytest.fixture
def loaded(untrained, monkeypatch):
    """The small model, read from disk once for all trees."""
    monkeypatch.setattr("outrider.nn.language_model.load_target", lambda *args, **options: untrained)
    return untrained


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_small_models_tree_leaves_its_cache_as_if_it_had_read_the_text(
    temperature, target, prompts, workshop, loaded, monkeypatch
):
    """Catches a path that is not moved together, a slot that keeps another's nodes, and an anchor read twice or not at
    all.

    Texts of unequal length, slots used again, budgets that come and go; the seeds are fixed.
    """
    drafter = workshop.build(TREE, target)
    read, straighten, worst, moved = drafter._read, SlotCache.straighten, [0.0], [0]

    def watched(memory, rows, texts):
        logits = read(memory, rows, texts)
        for b, text in enumerate(texts):
            assert memory.cache.lengths[rows[b]] == len(text)
            hidden, _ = drafter.model.read(torch.tensor([text]))
            worst.append(float((logits[b] - drafter.model.head(hidden[0, -1])).abs().max()))
        return logits

    def counted(cache, row, start, path):
        moved[0] += [*path] != [*range(len(path))]
        straighten(cache, row, start, path)

    monkeypatch.setattr(drafter, "_read", watched)
    monkeypatch.setattr(SlotCache, "straighten", counted)
    for policy in (None, OnAndOff(10)):
        requests = [
            Request(prompt, 8 + 3 * n, Sampling(temperature * (n % 3 > 0), seed=None if n % 2 else n))
            for n, prompt in enumerate(prompts)
        ]
        state = batch(target, 3)
        state.admit = with_seeds(state)
        for _ in serve(target, requests, drafter, state=state, policy=policy):
            pass
    assert len(worst) > 100 and max(worst) < 1e-10
    assert moved[0] > 10


def with_seeds(state):
    """`admit` in which a slot without a seed has its own number for one."""
    admit = state.admit

    def admitted(row, request):
        admit(row, request)
        state.seeds[row] = 100 + row
        state._select()

    return admitted


def test_a_tree_keeps_more_than_a_chain_of_its_depth(target, prompts, workshop, loaded):
    """Catches a tree in a bad order or under a wrong mask; counts of steps, the same in every run."""

    def steps(choices, **sampling):
        drafter = workshop.build(Case("small_model", choices), target)
        found = generate(target, prompts[:4], drafter, max_new_tokens=24, sampling=Sampling(**sampling), slots=4)
        return sum(generation.steps for generation in found)

    for sampling in ({}, {"temperature": 1.0, "seed": 5}):
        chain, small, large = (
            steps(choices, **sampling) for choices in ({}, {"width": 2, "nodes": 6}, {"width": 4, "nodes": 16})
        )
        assert large < small < chain


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_no_node_of_a_tree_is_a_banned_token(settings, target, prompts, workshop, loaded):
    """Catches a ban that is looked up along another branch's path: such a node is a sure rejection."""
    drafter, words = workshop.build(TREE, target), [(token,) for token in range(20)] + [(30, 31), (40, 50)]
    sampling, propose, nodes = Sampling(**settings, bad_words=words), drafter.propose, []

    def watched(memory, state, budget):
        draft = propose(memory, state, budget)
        for b, size in enumerate(draft.sizes.tolist()):
            tokens, parents = draft.tokens[b].tolist(), draft.parents[b].tolist()
            for n in range(size):
                above = state.tokens[state.rows[b]][-1] if parents[n] < 0 else tokens[parents[n]]
                nodes.append(tokens[n])
                assert tokens[n] >= 20 and (above, tokens[n]) not in {(30, 31), (40, 50)}
        return draft

    drafter.propose = watched
    found = generate(target, prompts[:3], drafter, max_new_tokens=15, sampling=sampling, slots=3)
    plainly = generate(target, prompts[:3], max_new_tokens=15, sampling=sampling, slots=3)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in plainly]
    assert len(nodes) > 50


def test_a_model_that_reads_no_trees_is_refused_one(target, workshop, loaded, monkeypatch):
    """Catches a tree drafted from logits that the self-test found wrong."""
    monkeypatch.setattr(loaded, "spec", replace(loaded.spec, mode="chain"))
    with pytest.raises(ConfigError, match=r"width 3 needs a model whose mode is 'tree'.*'chain'"):
        workshop.build(TREE, target)
    assert workshop.build(CHAIN, target).limit == 4


def test_under_a_target_that_verifies_no_trees_a_small_model_drafts_a_chain_and_says_so(
    target, prompts, plain, workshop, loaded, monkeypatch, caplog
):
    """Catches a tree of which the loop would keep the trunk alone."""
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="chain"))
    drafter = workshop.build(TREE, target)
    assert drafter.limit == 4 and "verifies no trees" in caplog.text
    (found,) = generate(target, prompts[0], drafter, max_new_tokens=20)
    assert found.tokens == plain(target, prompts[0], 20)


def test_settings_of_a_tree_on_a_chain_are_said_to_be_idle(target, workshop, loaded, caplog):
    """Catches a setting that is ignored in silence."""
    workshop.build(Case("small_model", {"nodes": 9}), target)
    assert "nodes has no effect" in caplog.text


# ── block drafters ────────────────────────────────────────────────────────────────────────────────────────────────────

IN_BLOCKS = [case for case in cases() if case.kind in ("dflash", "dspark", "domino", "deer")]
BLOCKS = pytest.mark.parametrize("case", IN_BLOCKS, ids=str)


@BLOCKS
def test_a_draft_does_not_depend_on_the_slots_beside_it(case, target, prompts, drafter_of, monkeypatch):
    """Catches padding between slots that is attended to, and positions of another slot."""
    drafter = drafter_of(case)

    def drafts(requests, slots):
        found = {}
        propose = drafter.propose

        def watched(memory, state, budget):
            draft = propose(memory, state, budget)
            for b, row in enumerate(state.rows):
                size = int(draft.sizes[b])
                found[tuple(state.tokens[row])] = draft.tokens[b, :size].tolist()
            return draft

        with monkeypatch.context() as patch:
            patch.setattr(drafter, "propose", watched)
            for _ in serve(target, requests, drafter, slots=slots):
                pass
        return found

    requests = [Request(prompt, 20, Sampling()) for prompt in prompts]
    together = drafts(requests, 3)
    for request in requests:
        for text, draft in drafts([request], 1).items():
            assert together[text] == draft


def test_the_papers_layout_is_the_default_one_of_a_block_more_without_the_anchors_prediction(target):
    """Catches masks in other places, a state taken from the wrong slot, and weights that one layout alone has."""
    module, sizes = drafters.find("dflash"), {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    torch.manual_seed(0)
    longer, papers = (
        module.Model(module.Config(block=block, anchor_predicts=own, **sizes), target).double()
        for block, own in ((5, True), (4, False))
    )
    papers.load_state_dict(longer.state_dict())
    tokens = torch.randint(64, (2, 20))
    batch = batch_of(target, longer.taps, tokens)
    at, live = torch.tensor([[3, 9, 14], [0, 7, 15]]), torch.ones(2, 3, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(
            papers.backbone.drafted(batch, at, live), longer.backbone.drafted(batch, at, live)[:, :, 1:]
        )


def test_runners_up_are_leaves_beside_the_chain():
    """Catches a leaf under the wrong parent, a token of another slot or rank, and a prefix that is no draft."""
    tree = dflash.sibling_tree(3, (2, 1))
    assert tree.depths.tolist() == [0, 1, 2, 0, 1, 0]
    assert tree.ranks.tolist() == [0, 0, 0, 1, 1, 2]
    assert list(tree.parents) == [-1, 0, 1, -1, 0, -1]
    logits = torch.randn(2, 3, 9)
    order = logits.argsort(-1, descending=True)
    draft = tree.draft(tree.choices(logits), torch.tensor([6, 4]))
    assert draft.sizes.tolist() == [6, 4]
    for b in range(2):
        assert draft.tokens[b].tolist() == [
            int(order[b, k, rank]) for k, rank in zip(tree.depths, tree.ranks, strict=True)
        ]
    for size in range(7):
        kept = draft.first(torch.tensor([size, size])).checked(2)
        assert kept.sizes.tolist() == [size, min(size, 4)]


def test_a_tree_of_runners_up_keeps_what_the_chain_would_miss(target, prompts, drafter_of):
    """Catches runners-up that are never reached: with them a text takes fewer steps, and stays the same."""
    steps = {}
    for siblings in ((), (8, 8, 8, 8)):
        drafter = dflash.BlockDrafter(drafter_of(Case("dflash")).model)
        drafter.tree = dflash.sibling_tree(drafter.block, siblings)
        drafter.limit = len(drafter.tree.paths)
        found = generate(target, prompts, drafter, max_new_tokens=40)
        steps[siblings] = sum(one.steps for one in found), [one.tokens for one in found]
    (chain, plain), (tree, same) = steps.values()
    assert plain == same
    assert tree < chain


@pytest.mark.parametrize("siblings", [(1, 1, 1, 1, 1), (64,)])
def test_runners_up_that_cannot_be_are_refused(siblings, target):
    """Catches an index error deep in top-k."""
    with pytest.raises(DrafterError, match="siblings"):
        drafters.find("dflash").build(drafters.find("dflash").Config(block=4, siblings=siblings), target)


@BLOCKS
def test_heads_that_do_not_divide_are_refused(case, target):
    """Catches a shape error deep in attention."""
    module = drafters.find(case.kind)
    with pytest.raises(DrafterError, match="kv_heads"):
        module.build(module.Config(heads=4, kv_heads=3), target)


@pytest.mark.parametrize("case", [case for case in IN_BLOCKS if case.kind != "deer"], ids=str)
def test_taps_the_target_does_not_have_are_refused(case, target):
    """Catches a hook on a layer counted from the end."""
    module = drafters.find(case.kind)
    with pytest.raises(DrafterError, match="4 layers"):
        module.build(module.Config(taps=(1, 9)), target)


@BLOCKS
def test_a_mask_token_of_the_tokenizer_stands_for_the_tokens_to_come(case, workshop, monkeypatch):
    """Catches a learnt mask beside the tokenizer's own, and ids mixed up: with the mask token the text is exact as
    well."""
    target = load_target(tiny_model())
    monkeypatch.setattr(target, "mask_token", 63)
    model = workshop.model(Case(case.kind, case.choices), target)
    assert not any("mask" in name for name, _ in model.named_parameters())
    (found,) = generate(target, [1, 2, 3], model.eval().drafter(), max_new_tokens=10)
    (wanted,) = generate(target, [1, 2, 3], max_new_tokens=10)
    assert found.tokens == wanted.tokens
