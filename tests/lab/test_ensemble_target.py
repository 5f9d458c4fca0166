"""An ensemble of models of one vocabulary: p is the mean of what each says after the same text."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from conftest import first, scaled, tiny_model
from contracts.chances import emitted, follows
from contracts.parties import Oracle
from serve.test_engine import Caller
from tiny import make_folder

import outrider
from outrider import drafters, load_drafter
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import ConfigError, TargetError
from outrider.generation import generate
from outrider.lab.alignment import Opinion
from outrider.lab.targets.ensemble import EnsembleTarget, Shares
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling
from outrider.serve.engine import Engine
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch

WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def members() -> list[TransformersTarget]:
    """Three models of other shapes, which disagree often."""
    found = [
        tiny_model(),
        scaled(tiny_model(5, hidden_size=24, num_hidden_layers=2, head_dim=12, num_attention_heads=2), 1.2),
        tiny_model(6, num_hidden_layers=1),
    ]
    return [load_target(model) for model in found]


@pytest.fixture(scope="module")
def ensemble(members) -> EnsembleTarget:
    return EnsembleTarget(members, WEIGHTS)


@torch.inference_mode()
def p_after(members: Sequence[TransformersTarget], weights: Sequence[float], text: Sequence[int]) -> torch.Tensor:
    """The mean after a text, by whole passes of the plain models."""
    ids = torch.tensor([list(text)])
    own = [member.model(ids, use_cache=False).logits[0, -1].double().softmax(-1) for member in members]
    return sum(weight * p for weight, p in zip(weights, own, strict=True))


def brute(members: Sequence[TransformersTarget], weights: Sequence[float], prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(p_after(members, weights, text).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("positions", ["all", "disputed"])
def test_greedy_text_is_that_of_averaging_token_by_token(members, prompts, positions):
    """Catches a mean of logits in place of distributions, weights in another order, one member's cache that keeps a
    rejected token or the text of a slot's request before, and a dispute that is taken for an agreement."""
    if positions == "disputed":  # members that agree now and then
        members = [members[0], near(3), near(4)]
    ensemble = EnsembleTarget(members, WEIGHTS, positions)
    wanted = [brute(members, WEIGHTS, prompt, 16) for prompt in prompts]
    whole = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    for drafter in (small_model(members[1]), Oracle(whole, 64)):
        results = generate(ensemble, prompts, drafter, max_new_tokens=16, slots=2, policy="fixed")
        assert [each.tokens for each in results] == wanted
        assert sum(sum(each.accepted) for each in results) > 8
    share = ensemble.shares.ensembled / ensemble.shares.positions
    assert share == 1 if positions == "all" else 0.1 < share < 1


def near(seed: int) -> TransformersTarget:
    """The first member with noise on its weights."""
    model, noise = tiny_model(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=noise)
    return load_target(model)


ROWS = [  # p of three members, and whether they are averaged
    ([[0.6, 0.3, 0.1], [0.4, 0.3, 0.3], [0.5, 0.4, 0.1]], False),  # the same token is the likeliest
    ([[0.4, 0.3, 0.3], [0.4, 0.35, 0.25], [0.4, 0.3, 0.3]], False),  # also below half
    ([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2]], False),  # 0.63 of the mean
    ([[0.45, 0.4, 0.15], [0.2, 0.7, 0.1], [0.3, 0.6, 0.1]], True),  # 0.345 of it
    ([[0.45, 0.4, 0.15], [0.2, 0.7, 0.1], None], False),  # one has no such position
]


def test_members_are_averaged_where_all_are_asked_and_it_can_change_the_choice(members):
    """Catches a threshold of another share, a member that is not asked, and a mean where all agree."""
    safe = EnsembleTarget(members, WEIGHTS, "disputed")
    for several, is_averaged in ROWS:
        rows = [torch.tensor([[row or [0.0] * 3]], dtype=torch.float64) for row in several]
        opinions = [Opinion(p.log(), None if p.sum() else torch.ones(1, 1).double()) for p in rows[1:]]
        p, is_ensembled, _ = safe.average.of(rows[0].log(), rows[0].argmax(-1), opinions)
        mean = sum(weight * row for weight, row in zip(WEIGHTS, rows, strict=True))
        assert bool(is_ensembled) == is_averaged
        assert torch.allclose(p.exp(), mean if is_averaged else rows[0])


def small_model(member: TransformersTarget, **settings: object) -> Drafter:
    module = drafters.find("small_model")
    return module.SmallModel(member, module.Config(**settings))


@pytest.mark.parametrize("positions", ["all", "disputed"])
@pytest.mark.parametrize("sampling", first([{"temperature": 0.8, "top_k": 4}, {"temperature": 1.6}]), ids=str)
def test_sampled_tokens_follow_the_mean(sampling, positions):
    """Catches a q or p of one member where the ensemble's is due, a mean where members agree, and a temperature inside
    each member's softmax: p is the mean to the power of 1 / T.  Chi-square over 1500 texts of three tokens; a false
    alarm has odds of 1e-6."""
    own = [load_target(scaled(tiny_model(seed, vocab_size=6, num_hidden_layers=1), 1.5)) for seed in (0, 3)]
    both, prompt = EnsembleTarget(own, (0.6, 0.4), positions), [1, 4]
    means = []
    settings = Settings.of([Sampling(**sampling)])

    def rule(weights, text) -> torch.Tensor:
        one, two = (p_after([member], (1.0,), text) for member in own)
        mean, best = weights[0] * one + weights[1] * two, int(one.argmax())
        means.append(positions == "all" or (best != int(two.argmax()) and float(mean[best]) <= 0.5))
        return mean if means[-1] else one

    def exact(weights) -> torch.Tensor:
        joint = torch.ones(1, dtype=torch.float64)
        for n in range(3):
            paths = [[]] if n == 0 else torch.cartesian_prod(*[torch.arange(6)] * n).view(-1, n).tolist()
            ps = [rule(weights, [*prompt, *path]).log()[None] for path in paths]
            joint = (joint[:, None] * torch.stack([distribution(p, settings)[0] for p in ps])).flatten()
        return joint.view(6, 6, 6)

    tokens, _, accepted = emitted(both, small_model(own[1], length=3), prompt=prompt, slots=1500, sampling=sampling)
    assert accepted > 500
    assert follows(tokens, exact((0.6, 0.4)))
    assert not follows(tokens, exact((0.4, 0.6)))  # the test can see it
    assert positions == "all" or 0 < sum(means) < len(means)


def test_weight_one_is_the_first_member_bit_for_bit(members, prompts, monkeypatch):
    """Catches a mean with nothing that rounds the logits, and a member that runs for nothing."""
    alone = EnsembleTarget(members, (2, 0, 0))
    for member in members[1:]:
        monkeypatch.setattr(member, "verify", None)
        monkeypatch.setattr(member, "prefill", None)
    draft = Draft.chain(torch.tensor([[3, 9]]), torch.tensor([2]))
    logits = []
    for target in (alone, members[0]):
        cache = target.allocate(1, 40)
        first = target.prefill(cache, [0], torch.tensor([prompts[0]]), [len(prompts[0])], (1,))
        scores = target.verify(cache, [0], torch.tensor([4]), draft, (1,))
        logits.append([first.logits, first.taps, scores.logits, scores.hidden, scores.taps])
    assert all(torch.equal(one, other) for one, other in zip(*logits, strict=True))
    assert [each.tokens for each in generate(alone, prompts, max_new_tokens=20)] == [
        each.tokens for each in generate(members[0], prompts, max_new_tokens=20)
    ]


def test_spare_rows_of_an_embedding_are_no_tokens(members, prompts):
    """Catches a member of the same tokenizer whose output has other spare rows: their probability is not lost."""
    for size in (60, 70):
        other = load_target(tiny_model(9, vocab_size=size))
        first = load_target(tiny_model())
        for member in (first, other):
            member.spec = replace(member.spec, tokenizer_hash="of both")
        both = EnsembleTarget([first, other])
        text = [token % 60 for token in prompts[4]]
        logits = both.prefill(both.allocate(1, 40), [0], torch.tensor([text]), [len(text)]).logits[0, -1]
        with torch.inference_mode():
            one, two = (member.model(torch.tensor([text])).logits[0, -1] for member in (first, other))
        p = one.softmax(-1)
        p[: min(size, 64)] += two[: min(size, 64)].softmax(-1)
        assert torch.allclose(logits.exp(), p / 2, atol=1e-9)
        (found,) = generate(both, [63, 61, 3], small_model(first), max_new_tokens=10)
        assert len(found.tokens) == 10


def test_shares_count_what_was_committed(members, prompts):
    """Catches rejected rows that are counted, and a last or first position that is not."""
    members = [members[0], near(3)]
    both = EnsembleTarget(members)
    found = generate(both, prompts, small_model(members[0]), max_new_tokens=14, slots=3)
    disagreed = changed = undecided = 0
    for prompt, each in zip(prompts, found, strict=True):
        for n in range(len(each.tokens)):
            text = [*prompt, *each.tokens[:n]]
            one, two = (p_after([member], (1.0,), text) for member in members)
            mean, is_split = (one + two) / 2, int(one.argmax()) != int(two.argmax())
            disagreed += is_split
            changed += int(mean.argmax()) != int(one.argmax())
            undecided += is_split and float(mean.max()) <= 0.5
    total = sum(len(each.tokens) for each in found)
    own = both.shares
    assert (own.positions, own.ensembled) == (total, total)
    assert (own.disagreed, own.changed, own.undecided) == (disagreed, changed, undecided)
    assert 0 < own.changed < own.disagreed < total
    assert f"{total:,} positions, 100.0% ensembled" in str(own) and "0 positions" in str(Shares())


def test_states_and_head_are_the_first_members(members, ensemble, prompts):
    """Catches features of another member, whose size a drafter would read as its own."""
    tokens = torch.tensor([prompts[4]])
    for one, other in zip(ensemble.read(tokens, (1, 2)), members[0].read(tokens, (1, 2)), strict=True):
        assert torch.equal(one, other)
    hidden, _ = ensemble.read(tokens)
    assert torch.equal(ensemble.head(hidden), members[0].head(hidden))
    assert torch.equal(ensemble.embed(tokens), members[0].embed(tokens))
    assert (ensemble.spec.hidden, ensemble.spec.layers) == (32, 4)
    # a drafter of the first member fits: it is bound by that one's hash
    assert ensemble.spec.base_hash == members[0].spec.weights_hash
    assert ensemble.spec.weights_hash not in {member.spec.weights_hash for member in members}
    others = EnsembleTarget(members), EnsembleTarget(members, WEIGHTS, "disputed")
    assert len({target.spec.weights_hash for target in (ensemble, *others)}) == 3


def test_what_needs_one_model_is_refused(ensemble):
    """Catches one that takes the first member for the ensemble, and promises texts that are another's."""
    for kind, settings in (("tidar", {"block": 3, "mask_token": 3}), ("jacobi_denoising", {"window": 3})):
        module = drafters.find(kind)
        with pytest.raises(TargetError, match="is an ensemble, and this needs the weights of one model"):
            module.TargetModel(module.Config(**settings), ensemble)
    with pytest.raises(outrider.errors.DrafterError, match="layer_skip"):
        load_drafter("layer_skip", ensemble)


def test_the_weakest_member_says_what_is_verified(members):
    """Catches a tree that a member with a recurrent state can't read."""
    chain = load_target(tiny_model(3))
    chain.spec = replace(chain.spec, mode="chain")
    target = EnsembleTarget([members[0], chain])
    assert target.spec.mode == "chain" and EnsembleTarget([chain, members[0]]).spec.mode == "chain"
    assert EnsembleTarget([members[0], chain], (1, 0)).spec.mode == "tree"
    wanted = brute([members[0], chain], (0.5, 0.5), [5], 20)
    (found,) = generate(target, [5], Oracle([[5, *wanted]], 64, true_is_eldest=True), max_new_tokens=20)
    assert found.tokens == wanted and max(found.accepted) > 1


def test_an_engine_serves_it(ensemble, members, prompts):
    """Catches what a server asks of a target's cache and an ensemble's has not: sizes, beginnings that are shared."""
    with Engine(ensemble, small_model(members[1]), slots=3, length=80, prefix_bytes=10**6) as engine:
        callers = [Caller.of(Request(prompt, 12, Sampling())) for prompt in prompts]
        for caller in callers:
            engine.submit(caller.call)
        found = [caller.wait().tokens for caller in callers]
    assert found == [one.tokens for one in generate(ensemble, prompts, max_new_tokens=12)]
    assert ensemble.allocate(2, 8).column_bytes == 0
    assert engine.scheduler.cache.column_bytes == sum(part.column_bytes for part in engine.scheduler.cache.parts) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ensembles")
    make_folder(path / "one")
    make_folder(path / "two", seed=4, num_hidden_layers=2)
    (path / "both").mkdir()
    (path / "both" / "ensemble.json").write_text(json.dumps({"members": ["../one", "../two"], "weights": [3, 1]}))
    (path / "safe").mkdir()
    (path / "safe" / "ensemble.json").write_text(
        json.dumps({"members": ["../one", "../two"], "positions": "disputed", "sharpen": True})
    )
    return path


def test_a_folder_is_loaded_as_any_other_target(folder):
    """Catches members looked for where the process stands, options that reach one member alone, weights that are not
    divided by their sum, and a second copy of a member's weights in memory."""
    target = load_target(folder / "both", dtype="float64", compile=False)
    assert isinstance(target, EnsembleTarget) and target.weights == (0.75, 0.25)
    assert {member.spec.dtype for member in target.members} == {"float64"}
    (found,) = outrider.generate(target, "def read", max_new_tokens=12)
    prompt = target.encode("def read")
    assert found.tokens == brute(target.members, target.weights, prompt, 12)[: len(found.tokens)]
    safe = load_target(folder / "safe", compile=False)
    rules = [(each.average.is_selective, each.average.sharpen) for each in (target, safe)]
    assert rules == [(False, False), (True, True)]
    assert sketch(str(folder / "both")).spec.hidden == target.spec.hidden
    assert target.parameters == sum(member.parameters for member in target.members)
    # a member that drafts too is not loaded a second time
    drafter = load_drafter("small_model", target, model=target.members[1].spec.name)
    assert drafter.model is target.members[1]


WRONG = [
    ("{", r"ensemble\.json can't be read"),
    ({"members": ["../one"]}, "members"),
    ({"members": ["../one", "../two"], "weights": [1]}, "as many weights"),
    ({"members": ["../one", "../two"], "weights": [-1, 2]}, "none below 0"),
    ({"members": ["../one", "../two"], "weights": [0, 0]}, "not all 0"),
    ({"members": ["../one", "../two"], "weight": [1, 1]}, "unknown key 'weight'; did you mean 'weights'"),
    ({"members": ["../one", "../two"], "positions": "some"}, "positions"),
    ({"members": ["../one", "../both"]}, "is an ensemble and can't be a member"),
    ({"members": ["../one", "./nowhere"]}, "no such folder"),
]


def test_what_is_wrong_with_a_folder_is_said(folder):
    """Catches an ensemble of one, weights that are dropped in silence, and a cycle of folders."""
    (folder / "wrong").mkdir()
    for values, said in WRONG:
        (folder / "wrong" / "ensemble.json").write_text(values if isinstance(values, str) else json.dumps(values))
        with pytest.raises((ConfigError, TargetError), match=said.replace("?", r"\?")):
            load_target(folder / "wrong", compile=False)


def test_members_that_do_not_go_together_are_refused(folder, members):
    """Catches members without a common tokenizer, and a revision that one of them alone has."""
    with pytest.raises(ConfigError, match="revision 'main' names one checkpoint"):
        load_target(folder / "both", revision="main")
    with pytest.raises(ConfigError, match="at least two loaded targets, got \\['TransformersTarget'\\]"):
        EnsembleTarget(members[:1])
    with pytest.raises(ConfigError, match="load each with load_target"):
        EnsembleTarget([members[0], "demo"])
    with pytest.raises(TargetError, match="no tokenizer says what they share"):
        EnsembleTarget([members[0], load_target(tiny_model(vocab_size=70))])
    with pytest.raises(ConfigError, match="none below 0"):
        EnsembleTarget(members, (1, math.nan, 1))
