"""What single drafters promise beyond the contracts every drafter is held to."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from conftest import Case, batch_of, cases, fast, tiny_model
from contracts.parties import OnAndOff
from drafters.proposals import exact, misreadings, path_to, watch

from outrider import drafters
from outrider.cli.drafters import about
from outrider.decoding.state import Request
from outrider.drafters import kinds
from outrider.errors import ConfigError, DrafterError
from outrider.generation import batch, generate, serve
from outrider.nn.drafting.block_drafter import sibling_tree
from outrider.sampling.settings import Sampling
from outrider.targets.cache.slots import SlotCache
from outrider.targets.load import load_target

EVERY = pytest.mark.parametrize("case", fast(cases(), ("recycle", "small_model", "dspark")))
CHAIN, TREE = Case("small_model"), Case("small_model", {"width": 3, "nodes": 10})


def test_every_file_is_a_drafter():
    """Catches a file in the folder that is none."""
    assert {"ngram", "small_model", "dflash", "dspark"} <= set(drafters.kinds())
    for kind in drafters.kinds():
        module = drafters.find(kind)
        assert module.Config().kind == kind
        assert callable(module.build)
        assert module.__doc__


WHOLE = """
from typing import Literal
from outrider.config import Config as Base
class Config(Base):
    kind: Literal["class_ngram"] = "class_ngram"
def build(config, target): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ('"class_ngram"', '"klass"', "class_ngram.py: Config.kind must be the file's name, 'class_ngram', got 'klass'"),
        (' = "class_ngram"', "", "Config.kind must be .*, got no field, or one without a default"),
        ("def build", "def make", r"has no `build\(config, target\)`; see docs/write-a-drafter.md"),
        ("(Base)", "", "drafters/class_ngram.py has no `Config`, a subclass"),
        ("from typing", "import no_such_package\nfrom typing", r"can't be imported \(ModuleNotFoundError: No module"),
    ],
    ids=["whole", "other kind", "no default", "no build", "no Config", "no import"],
)
def test_a_file_that_is_no_drafter_is_refused_and_the_others_are_listed(old, new, message, tmp_path, monkeypatch):
    """Catches one faulty file, or one faulty package beside ours, that takes the list and the contract suite down."""
    (tmp_path / "class_ngram.py").write_text(WHOLE.replace(old, new))
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
    if message is not None and new != "def make":
        return
    listed = {entry["kind"]: entry["summary"] for entry in map(about, kinds())}
    assert listed["ngram"].startswith("Prompt lookup")
    assert listed["class_ngram"] == "" if message is None else "class_ngram" in listed["class_ngram"]
    assert "class_ngram" in {case.kind for case in cases()}


@EVERY
def test_a_drafter_stays_within_its_budget(case, target, prompts, drafter_of, monkeypatch):
    """Catches nodes that nobody asked for, which cost a pass and may not fit."""
    drafter = drafter_of(case)
    monkeypatch.setattr(drafter, "propose", drafter.propose)
    seen = watch(drafter)
    generate(target, prompts[:3], drafter, max_new_tokens=10, slots=2)
    # at temperature 0 there is nothing to be drawn from
    assert seen and all(one.draft.q is None for one in seen)
    state = batch(target, 3, shared_noise=False)  # judged by q, which shared noise leaves unread
    hot = [Request(prompt, 12, Sampling(0.9, top_k=20, top_p=0.95, seed=n)) for n, prompt in enumerate(prompts[:4])]
    [*_] = serve(target, hot, drafter, state=state)
    assert state.invalid == 0
    for _, budget, draft in seen:
        assert bool((draft.sizes <= torch.tensor(budget)).all())
        assert draft.tokens.shape[1] <= drafter.limit
        assert draft.confidence is None or bool(((draft.confidence >= 0) & (draft.confidence <= 1)).all())


SEEDED, HOT = {"temperature": 1.0, "seed": 4}, {"temperature": 1.0}
WITH_BANS = [
    (TREE, SEEDED), (Case("eagle3", {"width": 3, "nodes": 12}), {}), (Case("jacobi", {"window": 4}), {}),
    (Case("jacobi", {"window": 4}), HOT), (Case("specblock"), {}), (Case("layer_skip"), SEEDED),
]  # fmt: skip


@pytest.mark.parametrize(("case", "settings"), WITH_BANS, ids=str)
def test_no_node_of_a_tree_is_a_banned_token(case, settings, target, prompts, workshop):
    """Catches a ban that is looked up along another branch's path: such a node is a sure rejection."""
    drafter, pairs = workshop.build(case, target), [(30, 31), (40, 50)]
    seen, sampling = watch(drafter), Sampling(**settings, bad_words=[*((token,) for token in range(20)), *pairs])
    generate(target, prompts[:3], drafter, max_new_tokens=15, sampling=sampling, slots=3)
    paths = [
        (text[-1], *path_to(one.draft, b, n))
        for one in seen
        for b, text in enumerate(one.texts)
        for n in range(one.draft.live[b])
    ]
    assert len(paths) > 50
    assert all(path[-1] >= 20 and path[-2:] not in pairs for path in paths)


@pytest.mark.parametrize(
    ("case", "nodes", "length"),
    [
        (Case("ngram", {"tree": "recency", "length": 5}), 16, 5),
        (Case("jacobi", {"window": 3, "branches": 2, "ngram": 3}), 7, 3),
        (TREE, 10, 4),
        (Case("medusa", {"heads": 3, "tree": ((0,), (1,), (0, 0)), "drawn": True}), 3, 3), (Case("specblock"), 7, 6),
        (Case("eagle3", {"length": 4, "width": 3, "nodes": 9}), 9, 4),
    ],
    ids=str,
)  # fmt: skip
def test_under_a_target_that_verifies_no_trees_a_chain_is_drafted_and_that_is_said(
    case, nodes, length, target, prompts, workshop, monkeypatch, caplog
):
    """Catches a tree of which the loop would keep the trunk alone."""
    assert workshop.build(case, target).limit == nodes and "can't verify" not in caplog.text
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="chain"))
    drafter = workshop.build(case, target)
    assert drafter.limit == length and "can't verify trees" in caplog.text
    seen = watch(drafter)
    exact(target, prompts[:1], drafter, max_new_tokens=16, sampling=Sampling(**SEEDED))
    assert not any(above != n - 1 for one in seen for n, above in enumerate(one.draft.tree[0]))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("eagle3", {"nodes": 9}), "nodes"),
        (Case("medusa", {"nodes": 9, "tree": ((0,),)}), "nodes"),
        (Case("jacobi", {"init": "repeat", "ngram": 3}), "ngram"),
        (Case("ngram", {"nodes": 9, "capacity": 5000, "tenants": 3}), "ngram.nodes and capacity and tenants"),
        (Case("ngram", {"tree": "recency", "nodes": 9, "capacity": 5000}), None),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_have_no_effect_are_named(case, said, target, workshop, caplog):
    """Catches a setting that is ignored in silence."""
    workshop.build(case, target)
    assert f"{said} has no effect" in caplog.text if said else not caplog.text


@pytest.mark.parametrize("kind", ["dflash", "deer", "peagle"])
def test_a_mask_token_of_the_tokenizer_stands_for_the_tokens_to_come(kind, workshop, monkeypatch):
    """Catches a learnt mask beside the tokenizer's own, and ids mixed up: the text is exact as well."""
    target = load_target(tiny_model())
    monkeypatch.setattr(target, "mask_token", 63)
    model = workshop.model(Case(kind), target)
    assert {name for name, _ in model.named_parameters() if "mask" in name} <= {"mask_hidden"}
    exact(target, [1, 2, 3], model.eval().drafter(), max_new_tokens=10)


@pytest.mark.parametrize("case", [Case("eagle3", {"width": 2, "nodes": 6}), Case("peagle"), Case("specblock")], ids=str)
def test_no_draft_holds_a_token_outside_its_vocabulary(case, target, prompts, workshop):
    """Catches draft ids taken for the target's, a q above 0 elsewhere."""
    model = workshop.model(Case(case.kind, case.choices | {"vocabulary": 10}), target)
    before, counts, inside = dict(model.facts()), torch.zeros(64), [3, 9, 17, 21, 30, 41, 55, 60, 62, 63]
    counts[inside] = 5
    model.begin(counts)
    assert list(before) == ["draft_vocabulary"] and model.facts() != before
    assert workshop.model(case, target).facts() == {}
    assert model.head.ids.tolist() == inside
    drafter, outside, state = model.eval().drafter(), torch.ones(64, dtype=torch.bool), batch(target, 3)
    outside[inside] = False
    seen = watch(drafter)
    exact(target, prompts[:3], drafter, max_new_tokens=10)
    [*_] = serve(target, [Request(prompt, 10, Sampling(1.0, seed=1)) for prompt in prompts[:3]], drafter, state=state)
    assert state.invalid == 0
    drafted = [token for one in seen for tokens in one.tokens for token in tokens]
    assert len(drafted) > 50 and len({*drafted}) > 1 and {*drafted} <= {*inside}
    assert not any(bool(one.draft.q[..., outside].any()) for one in seen if one.draft.q is not None)
    with pytest.raises(DrafterError, match="64"):
        workshop.model(Case(case.kind, {"vocabulary": 65}), target)


SMALL_MODEL = drafters.find("small_model")


def test_a_small_model_goes_on_being_right_beyond_its_context(target, tmp_path):
    """Catches a window whose positions or cache are off: what is read of the text is what a fresh model reads of it."""
    model = tiny_model(max_position_embeddings=24)
    model.save_pretrained(tmp_path)
    drafter = SMALL_MODEL.build(SMALL_MODEL.Config(model=str(tmp_path), length=4), target)
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
    tree = SMALL_MODEL.build(SMALL_MODEL.Config(model=str(tmp_path), length=4, width=2), target)
    exact(target, [[7, 7, 3], [5]], tree, max_new_tokens=28, slots=2)
    with pytest.raises(ConfigError, match="context"):
        SMALL_MODEL.build(SMALL_MODEL.Config(model=str(tmp_path), length=24), target)


@pytest.fixture(scope="module")
def untrained(workshop, target):
    return workshop.build(CHAIN, target).model


@pytest.fixture
def loaded(untrained, monkeypatch):
    """The small model, read from disk once for all trees."""
    monkeypatch.setattr("outrider.nn.language_model.load_target", lambda *args, **options: untrained)
    return untrained


def test_a_small_models_tree_leaves_its_cache_as_if_it_had_read_the_text(
    target, prompts, workshop, loaded, monkeypatch
):
    """Catches a path that is not moved together, a slot that keeps another's nodes, an anchor read twice or not at all.

    Texts of unequal length, slots used again, budgets that come and go; the seeds are fixed.
    """
    drafter, straighten, moved = workshop.build(TREE, target), SlotCache.straighten, [0]
    distances = misreadings(drafter)

    def counted(cache, row, start, path):
        moved[0] += [*path] != [*range(len(path))]
        straighten(cache, row, start, path)

    monkeypatch.setattr(SlotCache, "straighten", counted)
    for policy in (None, OnAndOff(10)):
        samplings = [Sampling(float(n % 3 > 0), seed=n) for n in range(len(prompts))]
        requests = [Request(text, 8 + 2 * n, samplings[n]) for n, text in enumerate(prompts)]
        [*_] = serve(target, requests, drafter, slots=3, policy=policy)
    assert len(distances) > 60 and max(distances) < 1e-10
    assert moved[0] > 5


def test_a_model_that_reads_no_trees_is_refused_one(target, workshop, loaded, monkeypatch):
    """Catches a tree drafted from logits that the self-test found wrong."""
    monkeypatch.setattr(loaded, "spec", replace(loaded.spec, mode="chain"))
    with pytest.raises(ConfigError, match=r"width 3 needs a model whose mode is 'tree'.*'chain'"):
        workshop.build(TREE, target)
    assert workshop.build(CHAIN, target).limit == 4


def test_the_papers_layout_is_the_default_one_of_a_block_more_without_the_anchors_prediction(target):
    """Catches masks in other places, a state taken from the wrong slot, and weights that one layout alone has."""
    module, sizes = drafters.find("dflash"), {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    torch.manual_seed(0)
    longer, papers = (
        module.Model(module.Config(block=block, anchor_predicts=own, **sizes), target).double()
        for block, own in ((5, True), (4, False))
    )
    papers.load_state_dict(longer.state_dict())
    batch = batch_of(target, longer.taps, torch.randint(64, (2, 20)))
    at, live = torch.tensor([[3, 9, 14], [0, 7, 15]]), torch.ones(2, 3, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(
            papers.backbone.drafted(batch, at, live), longer.backbone.drafted(batch, at, live)[:, :, 1:]
        )


def test_runners_up_are_leaves_beside_the_chain():
    """Catches a leaf under the wrong parent, a token of another slot or rank, and a prefix that is no draft."""
    tree = sibling_tree(3, (2, 1))
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
