"""Every family, with both ways of attention, says what `model.generate` says; taps and hidden states are the model's own."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import scaled
from contracts.parties import Oracle, Proposer
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.decoding.draft import Draft
from outrider.decoding.generate import advance, generate
from outrider.decoding.state import Request
from outrider.targets.transformers import FAMILIES, load_target

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
OWN = {
    "llama": {"num_key_value_heads": 2}, "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None}, "phi": {"num_key_value_heads": 4},
    "gpt_neox": {}, "gpt2": {},
}  # fmt: skip
BOTH = pytest.mark.parametrize(
    ("family", "attention"), [(family, attention) for family in sorted(FAMILIES) for attention in ("sdpa", "eager")]
)


@functools.cache
def model_of(family: str, attention: str = "sdpa"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | OWN.get(family, {})), attn_implementation=attention)
    assert config._attn_implementation == attention
    return scaled(AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval(), 1.5)


@functools.cache
def target_of(family: str, attention: str = "sdpa"):
    return load_target(model_of(family, attention))


@functools.cache
def texts_of(family: str) -> list[list[int]]:
    """Prompts of unequal length with 30 greedy tokens behind each."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(60, (length,), generator=generator) for length in (6, 1, 13, 3, 9)]
    return [
        model_of(family)
        .generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=30, do_sample=False, pad_token_id=0
        )[0]
        .tolist()
        for prompt in prompts
    ]


class Guesses(Proposer):
    """A ragged tree of ids that are mostly wrong, as cheap drafts are."""

    def propose(self, memory, state, budget):
        shape = (len(state.rows), 4)
        tokens = torch.randint(60, shape, generator=memory)
        parents = torch.tensor([-1, -1, 0, 1]).expand(shape)
        return Draft(tokens, parents, torch.minimum(budget, torch.tensor([1 + row % 4 for row in state.rows])))


def continued(family, attention, drafter, slots) -> None:
    texts = texts_of(family)
    counts = [30, 17, 23, 9, 30]
    requests = [Request(text[:-30], count) for text, count in zip(texts, counts, strict=True)]
    found, kept = [[] for _ in requests], [0]
    for progress in advance(target_of(family, attention), requests, drafter, slots=slots):
        found[progress.request] += progress.tokens
        kept.append(progress.accepted)
    for text, tokens, count in zip(texts, found, counts, strict=True):
        assert tokens == text[len(text) - 30 :][:count]
    if isinstance(drafter, Oracle):
        assert max(kept) == drafter.depth


@BOTH
def test_plain_and_drafted_text_is_the_models_own(family, attention):
    """Catches positions, masks or caches that one family reads otherwise; slots are ragged and used again."""
    continued(family, attention, None, 2)
    continued(family, attention, Guesses(), 3)


@BOTH
def test_deep_paths_of_a_tree_are_the_models_own(family, attention):
    """Catches keys that keep the position of another branch: paths are three deep and never a prefix of the draft."""
    continued(family, attention, Oracle(texts_of(family), 60), 3)
    continued(family, attention, Oracle(texts_of(family), 60), 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_slot_at_the_end_of_the_context_stands_beside_others(family):
    """Catches padding whose position lies outside the model's table: gpt2 looks positions up."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | OWN.get(family, {}) | {"max_position_embeddings": 16}))
    target = load_target(scaled(AutoModelForCausalLM.from_config(config).double().eval(), 1.5))
    prompts = [[5] * 14, [3, 4], [7] * 15, [9, 1, 2]]
    alone = [generate(target, prompt, max_new_tokens=40)[0] for prompt in prompts]
    assert [len(prompt) + len(generation.tokens) for prompt, generation in zip(prompts, alone, strict=True)] == [16] * 4
    assert all(generation.finish_reason == "context" for generation in alone)
    found = generate(target, prompts, max_new_tokens=40)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in alone]
    found = generate(target, prompts, Guesses(), max_new_tokens=40)
    assert [generation.tokens for generation in found] == [generation.tokens for generation in alone]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_taps_are_the_outputs_of_the_layers(family):
    """Catches a tap that is off by one layer, or taken before the residual is added."""
    target = target_of(family)
    tokens = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = target.model(tokens, output_hidden_states=True)
    hidden, taps = target.read(tokens, (0, 1))
    torch.testing.assert_close(taps, torch.stack(out.hidden_states[1:3], 2), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hidden, out.hidden_states[-1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(target.head(hidden), out.logits, rtol=1e-9, atol=1e-9)
    # the last layer's own output, before the final norm, is not in hidden_states: its neighbours must differ from it
    _, last = target.read(tokens, (2,))
    assert not torch.allclose(last[:, :, 0], hidden)
    # asking for other taps, or for none, changes nothing
    _, again = target.read(tokens, (1,))
    assert torch.equal(again[:, :, 0], taps[:, :, 1])
    assert target.read(tokens)[1] is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_passes_of_the_loop_see_what_reading_at_once_sees(family):
    """Catches states, taps and logits that hang on how a text was cut into prefill and verification."""
    target = target_of(family)
    text = torch.randint(60, (1, 12), generator=torch.Generator().manual_seed(3))
    hidden, taps = target.read(text, (1, 2))
    cache = target.allocate(1, 20)
    first = target.prefill(cache, [0], torch.nn.functional.pad(text[:, :4], (0, 2)), [4], (1, 2))
    second = target.prefill(cache, [0], text[:, 4:7], [3], (1, 2))
    draft = Draft.chain(text[:, 8:], torch.tensor([4]))
    scores = target.verify(cache, [0], text[:, 7], draft, (1, 2))
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(first.hidden[:, :4], hidden[:, :4])
    close(second.taps, taps[:, 4:7])
    close(second.logits, target.head(hidden[:, 6:7]))
    close(scores.hidden, hidden[:, 7:])
    close(scores.taps, taps[:, 7:])
    close(scores.logits, target.head(hidden[:, 7:]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_is_what_the_head_was_given(family):
    """Catches a hidden state from before the final norm: drafters that reuse the head would learn another space."""
    target, given = target_of(family), []
    handle = target.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    cache = target.allocate(2, 8)
    scores = target.verify(cache, [0, 1], torch.tensor([3, 4]), Draft.chain(torch.tensor([[1], [2]]), torch.tensor([1, 1])))
    handle.remove()
    assert torch.equal(scores.hidden, given[0])
    torch.testing.assert_close(target.head(scores.hidden), scores.logits)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_embedding_is_the_models_own(family):
    """Catches a borrowed embedding that is another table."""
    target = target_of(family)
    tokens = torch.tensor([[0, 59], [7, 7]])
    assert torch.equal(target.embed(tokens), target.model.get_input_embeddings()(tokens))
