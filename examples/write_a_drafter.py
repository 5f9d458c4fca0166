"""Write a drafter: one file that proposes tokens by the bigrams of the text so far, drawn at random.

    $ python examples/write_a_drafter.py

At a temperature its drafts are drawn, so every token comes with q, its distribution, which `chain` records.
"""

from itertools import pairwise
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

import outrider
from outrider.decoding.state import DecodeState
from outrider.nn.drafting.serving import chain
from outrider.targets.protocol import Target


class Config(outrider.DrafterConfig):
    kind: Literal["bigram"] = "bigram"
    length: PositiveInt = 4
    """Tokens proposed per step."""


class Bigram(outrider.Drafter):
    def __init__(self, config: Config, vocabulary: int):
        self.limit, self.vocabulary = config.length, vocabulary

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> outrider.Draft:
        def logits_after(tokens: Tensor) -> Tensor:  # [B] -> [B, V]
            pairs = zip(state.rows, tokens.tolist(), strict=True)
            return torch.stack([self.logits(state.tokens[row], token) for row, token in pairs])

        return chain(logits_after(state.anchor), logits_after, budget, state)

    def logits(self, text: list[int], token: int) -> Tensor:
        """[V], by how often each token follows this one in the text."""
        followers = [after for before, after in pairwise(text) if before == token]
        counts = torch.tensor(followers, dtype=torch.int64).bincount(minlength=self.vocabulary)
        return (counts + 1e-3).log()


def build(config: Config, target: Target) -> Bigram:
    return Bigram(config, target.spec.vocabulary)


def main() -> None:
    target, prompt = outrider.load_target("demo"), "import os\nimport re\n"
    drafter = build(Config(), target)
    for sampling in (None, outrider.Sampling(temperature=1.0, seed=3)):
        settings = {"max_new_tokens": 64, "sampling": sampling, "policy": "fixed"}
        [plain], [drafted] = (outrider.generate(target, prompt, own, **settings) for own in (None, drafter))
        assert drafted.tokens == plain.tokens
        print(f"{len(drafted.tokens)} tokens, equal with and without drafts, in {drafted.steps} steps")


if __name__ == "__main__":
    main()
