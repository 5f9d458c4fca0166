"""Tiny random targets of words and pictures in float64, and the loop with every draw of its noise scripted."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from conftest import scaled
from contracts.chances import every_script
from decoding.drafts import prefill
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.decoding.accept import accept
from outrider.decoding.loop import step
from outrider.decoding.state import DecodeState, Request
from outrider.lab.targets.pictures import vocabulary
from outrider.policies.fixed import Fixed
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1}  # fmt: skip
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1}  # fmt: skip


def picture_model(codes: int = 64 - vocabulary.FIRST, seed: int = 0, by: float = 2.0, **sizes: int) -> LlamaForCausalLM:
    """A random one whose greedy text does not collapse at once; of 64 tokens by default.  Equal seed and sizes, equal
    weights."""
    torch.manual_seed(seed)
    return scaled(LlamaForCausalLM(vocabulary.config(codes, **(SIZES | sizes))).double().eval(), by)


def of_three_codes() -> Any:
    """A target whose vocabulary is a codebook of three, so that all that can happen can be summed."""
    return load_target(picture_model(by=6.0, vocab_size=3, eos_token_id=None, **TINY))


def distribution_after(target: Any, prompt: Sequence[int], temperature: float = 1.0) -> Callable[..., Tensor]:
    """From a path of tokens to the target's distribution after prompt and path."""

    def distribution(path: tuple[int, ...]) -> Tensor:
        logits = target.model(torch.tensor([[*prompt, *path]]), use_cache=False).logits[0, -1].detach()
        return (logits / temperature).softmax(-1)

    return distribution


def pictures(
    target: Any, drafter: Any, judge: Callable[[], SamplingJudge] = lambda: SamplingJudge(accept), *,
    prompt: Sequence[int] = (0,), codes: int = 3, temperature: float = 1.0, patch: Any,
) -> Iterator[tuple[float, list[int]]]:  # fmt: skip
    """Every picture of so many codes that the loop can write, and how likely: all draws of drafter and judge are walked
    through.  patch: a MonkeyPatch, by which the script takes the place of the loop's noise."""

    def written(chance: Any) -> list[int]:
        patch.setattr(DecodeState, "streams", property(lambda _: chance))
        state = DecodeState(1, target.spec.context, frozenset(), judge=judge())
        state.admit(0, Request(list(prompt), codes, Sampling(temperature)))
        cache = target.allocate(1, len(prompt) + codes + 2 * drafter.limit + drafter.probe_rows + 1)
        memory = drafter.allocate(cache)
        state.judge.allocate(target, cache)
        prefill(target, drafter, cache, memory, state, [0])
        while state.left[0]:
            step(target, drafter, Fixed(drafter.limit), cache, memory, state)
        return state.tokens[0][len(prompt) :]

    yield from every_script(written)
