"""Write a drafter: one file that proposes tokens by the pairs of tokens in the text so far, drawn at random.

    $ python examples/write_a_drafter.py

At a temperature its drafts are drawn, so every token comes with q, the distribution it was drawn from; `chain` records it.
"""

import math
from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

import outrider
from outrider.decoding.state import DecodeState
from outrider.nn.serving import chain
from outrider.targets.protocol import Target


class Config(outrider.Config):
    kind: Literal["bigram"] = "bigram"
    length: PositiveInt = 4
    """Tokens proposed per step."""


class Bigram(outrider.Drafter):
    def __init__(self, config: Config, vocabulary: int):
        self.limit, self.vocabulary = config.length, vocabulary

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> outrider.Draft:
        texts = [state.tokens[row] for row in state.rows]

        def logits_after(tokens: Tensor) -> Tensor:  # [B] -> [B, V]
            return torch.stack([self.logits(text, token) for text, token in zip(texts, tokens.tolist(), strict=True)])

        return chain(logits_after(state.anchor), logits_after, budget, state)

    def logits(self, text: list[int], token: int) -> Tensor:
        """[V], by how often each token follows this one in the text."""
        followers = [after for before, after in pairwise(text) if before == token]
        return torch.full((self.vocabulary,), math.log(1e-3)).index_add(
            0, torch.tensor(followers, dtype=torch.int64), torch.full((len(followers),), 3.0)
        )


def build(config: Config, target: Target) -> Bigram:
    return Bigram(config, target.spec.vocabulary)


if __name__ == "__main__":
    target, prompt = outrider.load_target("demo"), "import os\nimport re\n"
    drafter = build(Config(), target)
    for sampling in (None, outrider.Sampling(temperature=1.0, seed=3)):
        settings = {"max_new_tokens": 64, "sampling": sampling, "policy": "fixed"}
        [plain], [drafted] = (outrider.generate(target, prompt, own, **settings) for own in (None, drafter))
        assert drafted.tokens == plain.tokens
        print(f"{len(drafted.tokens)} tokens, equal with and without drafts, in {drafted.steps} steps")
