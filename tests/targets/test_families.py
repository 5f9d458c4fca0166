"""Every family says what `model.generate` says; taps and hidden states are the model's own; and an index of keys takes
the earliest of equal scores, so that a text is the same however it is batched."""

import functools
from dataclasses import replace

import pytest
import torch
from conftest import scaled, tiny_model
from contracts.parties import Oracle, Proposer
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.families import SMALL, built, tiny
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.errors import TargetError
from outrider.generation import generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.cache.slots import SlotCache
from outrider.targets.cache.states import RecurrentStates
from outrider.targets.hf.anatomy import ARGUMENTS
from outrider.targets.hf.proof import selftest
from outrider.targets.hf.sparse_index import earliest
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

V = 128
NEW = 14
RECURRENT = {"qwen3-next", "qwen3.5", "falcon-h1", "nemotron-h", "jamba", "mamba2", "lfm2"}
FAST = [
    "qwen3", "mistral-window", "gemma3", "llama4-chunks", "deepseek-v3", "bloom", "gpt2", "qwen3-next", "mamba2",
    "lfm2",
]  # fmt: skip
"""One of every way that a family can differ in; `make test-all` takes all of them."""
OTHERS = [name for name in SMALL if name not in FAST]
ALL = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
EAGER = {"gemma2", "gpt-oss", "bloom", "mamba2"}
"""Families that have no other attention."""


@functools.cache
def target_of(family: str) -> TransformersTarget:
    return load_target(tiny(family, "eager" if family in EAGER else "sdpa"))


@functools.cache
def texts_of(family: str) -> list[list[int]]:
    """Prompts of unequal length, one beyond every window, with NEW greedy tokens after each."""
    noise, model = torch.Generator().manual_seed(1), target_of(family).model
    prompts = [torch.randint(V, (1, length), generator=noise) for length in (6, 1, 31, 3, 9)]
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return [model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist() for ids in prompts]


class Guesses(Proposer):
    """A ragged tree of ids that are mostly wrong, as cheap drafts are."""

    def propose(self, memory, state, budget):
        shape = (len(state.rows), 4)
        tokens = torch.randint(V, shape, generator=memory)
        parents = torch.tensor([-1, -1, 0, 1]).expand(shape)
        return Draft(tokens, parents, torch.minimum(budget, torch.tensor([1 + row % 4 for row in state.rows])))


def continued(family, drafter, slots) -> None:
    texts = texts_of(family)
    counts = [NEW, 9, 12, 5, NEW]
    requests = [Request(text[:-NEW], count, Sampling()) for text, count in zip(texts, counts, strict=True)]
    outputs, accepted = [[] for _ in requests], [0]
    for progress in serve(target_of(family), requests, drafter, slots=slots):
        outputs[progress.request] += progress.tokens
        accepted.append(progress.accepted)
    for text, tokens, count in zip(texts, outputs, counts, strict=True):
        assert tokens == text[len(text) - NEW :][:count]
    if isinstance(drafter, Oracle):
        assert max(accepted) == drafter.depth


@pytest.mark.parametrize("family", ALL)
def test_plain_and_drafted_text_is_the_models_own(family):
    """Catches positions, masks, caches or states that one family reads otherwise."""
    target = target_of(family)
    assert target.spec.mode == target.selftest.mode == ("chain" if family in {*RECURRENT, "bloom"} else "tree")
    assert target.family.is_recurrent == (family in RECURRENT)
    if family in RECURRENT:
        assert "recurrent" in target.selftest.failed
    continued(family, Guesses(), 3)
    drafter = Oracle(texts_of(family), V, true_is_eldest=target.spec.mode == "chain")
    continued(family, drafter, 3)


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """Nothing is known of any family: a planted fault is not among what answers are kept under."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))


def failing(family: str) -> str:
    """The check at which a fresh target of this family stops."""
    found = load_target(tiny(family)).selftest
    return found.failed.split(":")[0] if found.failed else "none"


def test_a_window_that_is_one_too_wide_is_found(monkeypatch, unknown):
    monkeypatch.setattr(
        "outrider.targets.hf.family._limit", lambda kind, config: AttentionLimit("window", config.sliding_window + 1)
    )
    with pytest.raises(TargetError, match="single steps"):
        selftest.selftest(TransformersTarget(tiny("mistral-window"), tested=False))
    assert load_target(tiny("mistral-window")).family.past in ARGUMENTS, "the family's own cache masks rightly"


def test_a_tree_whose_nodes_stand_where_they_were_drawn_is_found(monkeypatch, unknown):
    """Positions by order instead of depth: right for every chain."""
    rows = Draft.rows
    by_order = lambda draft: torch.arange(draft.tokens.shape[1] + 1).expand(len(draft.tokens), -1)
    monkeypatch.setattr(Draft, "rows", lambda draft: (rows(draft)[0], by_order(draft)))
    assert failing("qwen3") == "tree"
    assert load_target(tiny("qwen3")).spec.mode == "chain"


def test_a_path_that_is_not_moved_together_is_found(monkeypatch, unknown):
    monkeypatch.setattr(SlotCache, "straighten", lambda cache, row, start, path: None)
    assert failing("qwen3") == "path"


def test_a_state_that_is_not_noted_is_found(monkeypatch, unknown):
    """The state behind the last position, whatever was kept: right for all that is accepted whole."""
    monkeypatch.setattr(RecurrentStates, "note", lambda states, layer: None)
    assert failing("mamba2") == "cut"
    assert load_target(tiny("mamba2")).spec.mode == "off"


def test_a_target_that_is_off_or_a_chain_is_never_given_more():
    """Catches a mode that is printed and not obeyed."""
    target, widths = load_target(tiny_model()), []
    verify = target.verify
    for mode in ("chain", "off"):
        target.spec = replace(target.spec, mode=mode)
        target.verify = lambda cache, rows, anchor, draft, taps=(), probe=None: (
            widths.append(draft) or verify(cache, rows, anchor, draft, taps, probe)
        )
        found = generate(target, [[3, 4, 5]], Guesses(), max_new_tokens=12)[0].tokens
        assert not any(draft.branches for draft in widths)
        assert mode != "off" or not any(int(draft.sizes.max()) for draft in widths)
        assert (
            found
            == target.model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
        )
        widths.clear()


def test_a_slot_at_the_end_of_the_context_stands_beside_others():
    """Catches padding whose position lies outside the model's table: gpt2 looks positions up."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}
    gpt2 = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    target = load_target(scaled(GPT2LMHeadModel(gpt2).double(), 1.5))
    prompts = [[5] * 14, [3, 4], [7] * 15, [9, 1, 2]]
    alone = [generate(target, prompt, max_new_tokens=40)[0] for prompt in prompts]
    assert [len(prompt) + len(generation.tokens) for prompt, generation in zip(prompts, alone, strict=True)] == [16] * 4
    assert all(generation.finish_reason == "context" for generation in alone)
    for drafter in (None, Guesses()):
        found = generate(target, prompts, drafter, max_new_tokens=40)
        assert [generation.tokens for generation in found] == [generation.tokens for generation in alone]


@pytest.mark.parametrize("family", ALL)
def test_taps_are_the_outputs_of_the_layers(family):
    """Catches a tap that is off by one layer, or taken before the residual is added."""
    target, heads, embedded = target_of(family), [], []
    tokens = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = target.model(tokens, output_hidden_states=True)
    hooks = [
        target.layer(0).register_forward_pre_hook(
            lambda _, args, kwargs: embedded.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
        target.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0])),
    ]
    hidden, taps = target.read(tokens, (0, 1))
    chain = Draft.chain(torch.tensor([[1], [2]]), torch.tensor([1, 1]))
    heads.clear()
    scores = target.verify(target.allocate(2, 8), [0, 1], torch.tensor([3, 4]), chain, (0, 1))
    for hook in hooks:
        hook.remove()
    first = 0 if family == "mamba2" else 1  # its list begins after the first layer
    torch.testing.assert_close(taps, torch.stack(out.hidden_states[first : first + 2], 2), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hidden, out.hidden_states[-1], rtol=1e-9, atol=1e-9)
    # some families make their logits float32
    torch.testing.assert_close(target.head(hidden), out.logits, rtol=1e-6, atol=1e-6, check_dtype=False)
    # the last layer's own output, before the final norm, is not in hidden_states: its neighbours must differ from it
    _, last = target.read(tokens, (3,))
    assert not torch.allclose(last[:, :, 0], hidden)
    # asking for other taps, or for none, changes nothing
    _, again = target.read(tokens, (1,))
    assert torch.equal(again[:, :, 0], taps[:, :, 1])
    assert target.read(tokens)[1] is None
    assert torch.equal(scores.hidden, torch.cat(heads) if len(heads) > 1 else heads[0])
    wanted = target.read(torch.tensor([[3, 1], [4, 2]]), (0, 1))[1]
    torch.testing.assert_close(scores.taps, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(target.head(scores.hidden), scores.logits, rtol=1e-6, atol=1e-6, check_dtype=False)
    if family not in {"gpt2", "opt", "bloom"}:  # positions are added to it, or a norm applied
        torch.testing.assert_close(target.embed(tokens), embedded[0], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(target.embed(tokens), target.model.get_input_embeddings()(tokens))


def test_equal_scores_are_taken_in_their_order() -> None:
    for columns in (8, 30, 70, 300):
        scores = torch.zeros(2, 3, columns).index_fill(-1, torch.tensor([5, 2]), 1.0)
        found = earliest(scores, 6)
        assert found.indices.tolist() == [[[2, 5, 0, 1, 3, 4]] * 3] * 2
        assert found.values.tolist() == torch.topk(scores, 6).values.tolist()
    assert earliest(scores[0, 0], k=3, dim=0).indices.tolist() == [2, 5, 0]


def test_what_follows_a_text_does_not_move_the_keys_that_it_reads() -> None:
    """By the model's own topk the difference is more than 1e-4."""
    model = built("hy_v4", "causal", torch.float64)
    load_target(model)
    noise = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.get_text_config().vocab_size, (24, 90), generator=noise)
    with torch.inference_mode():
        whole = model(input_ids=texts, use_cache=False).logits[:, :50]
        beginning = model(input_ids=texts[:, :50], use_cache=False).logits
    torch.testing.assert_close(beginning, whole, rtol=0, atol=1e-5, check_dtype=False)
