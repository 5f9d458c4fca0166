"""What the tests of lossy rules share: a table target whose tokens are words, drafters of a script, one judged step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from contracts.parties import Proposer, TableTarget, last_two
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.policies.lossy import LossyRule, Verified
from outrider.sampling.settings import Sampling

WORDS = (" a", " b", " c", ".", " So", " then")
A, B, C, END, SO, THEN = range(6)


class WordTarget(TableTarget):
    """A table target with a tokenizer of a few words."""

    words: Sequence[str] = WORDS

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens)

    def encode(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        found: list[int] = []
        while prompt:
            word = max((word for word in self.words if prompt.startswith(word)), key=len)
            found.append(self.words.index(word))
            prompt = prompt[len(word) :]
        return found


def writes(follows: dict[int, int]) -> WordTarget:
    """A target that always writes this token after that."""
    table = torch.zeros(6, 6, 6, dtype=torch.float64)
    for token, following in follows.items():
        table[:, token, following] = 8.0
    return WordTarget(table)


def words_of_three(*words: str) -> WordTarget:
    """For enumerations, which bring their own distributions."""
    made = WordTarget(torch.zeros(3, 3, 3, dtype=torch.float64))
    made.words = words
    return made


def random_words(seed: int = 0) -> WordTarget:
    return WordTarget(TableTarget.random(6, seed).table)


class Follows(Proposer):
    """A small model that always writes this token after that: a deterministic chain."""

    def __init__(self, follows: dict[int, int], limit: int = 4):
        self.follows, self.limit = follows, limit

    def propose(self, memory: Any, state: Any, budget: Tensor) -> Draft:
        _, own = last_two(state)
        rows = []
        for token in own.tolist():
            chain = [token]
            while len(chain) <= int(budget.max()):
                chain.append(self.follows[chain[-1]])
            rows.append(chain[1:])
        return Draft.chain(torch.tensor(rows), budget)


def chain(follows: dict[int, int], start: int, count: int) -> list[int]:
    """What such a model writes after a token."""
    found = [start]
    while len(found) <= count:
        found.append(follows[found[-1]])
    return found[1:]


class Coin:
    """A coin that falls the same way for the same question."""

    def __init__(self, coin: Any, known: dict[Any, Tensor], key: tuple[Any, ...]):
        self.coin, self.known, self.key = coin, known, key

    def __mul__(self, by: Tensor) -> Coin:
        return Coin(self.coin * by, self.known, (*self.key, float(by)))

    def __lt__(self, threshold: Tensor) -> Tensor:
        key = (*self.key, float(threshold))
        if key not in self.known:
            self.known[key] = self.coin < threshold
        return self.known[key]


class Remembered:
    """One slot's scripted noise, of which equal questions get equal answers, as they do of `Streams`."""

    seeded = None

    def __init__(self, chance: Any):
        self.chance, self.known = chance, dict[Any, Tensor]()

    def uniform(self, depth: Any, purpose: Any, salt: Any = 0) -> Coin:
        return Coin(self.chance.uniform(depth, purpose, salt), self.known, (int(depth), int(salt)))

    def draw(self, weights: Tensor, depth: Any, purpose: Any) -> Tensor:
        key = int(depth), *weights[0].tolist()
        if key not in self.known:
            self.known[key] = self.chance.draw(weights, depth, purpose)
        return self.known[key]


def begun(rule: LossyRule, text: Sequence[int], target: WordTarget | None = None) -> Callable[..., Accepted]:
    """The rule as a function of draft, p and scripted noise, each time at the beginning of a step after this text."""
    rule.allocate(target or random_words(), None)

    def judged(draft: Draft, p: Tensor, chance: Any) -> Accepted:
        rule.admit(0, Request(list(text), 50, Sampling()))
        rule.begin(Verified([0], [list(text)], p.log()))
        return rule(draft, p, Remembered(chance))

    return judged
