"""Are the answers the same?  Compares greedy texts token by token, and tells rounding ties from faults.

A pass over eight rows rounds differently from a pass over one, so two nearly equal top tokens may swap: a tie.  The
margin tells ties from faults.  The model itself, without cache and draft, reads the shared text in one pass, in its own
precision and again in float64, which shows how far each of the two tokens is below the top one, in units of rounding.
Every token of the drafted text is checked this way, so faults that both texts share are also found.  Above temperature
0, distributions are compared (`two_samples`); scores are compared by `equivalence`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.gate.statistics.two_samples import Samples, two_samples
from outrider.generation import serve
from outrider.measure.tasks import names
from outrider.measure.tasks.prompts import as_tokens
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.accuracy import recast
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts, sentence

log = logging.getLogger(__name__)

Verdict = Literal["equal", "tie", "bug"]
Prompts = Sequence[Sequence[int]]
OnText = Callable[[int], None]
ALLOWED = 4.0
"""Units of rounding that a tie may span.  On the demo target, shapes and precisions differ by up to 2.3."""


@dataclass(frozen=True, slots=True)
class Margin:
    """The model's logits where two texts first differ, or where one departs from the model's choice."""

    position: int
    """Tokens of the answer before it."""
    tokens: tuple[int | None, int | None]
    """Tokens of the plain and the drafted text; None if one had ended."""
    shortfall: tuple[float | None, float | None]
    """How far each is below the model's largest logit."""
    exact_shortfall: tuple[float | None, float | None] | None
    """The same in float64; None if that is impossible or not needed."""
    unit: float
    """One unit of rounding there; see `unit_of`."""
    verdict: Verdict

    @property
    def units(self) -> float:
        """The margin: the larger shortfall in units of rounding, in the more lenient of the two precisions."""
        shortfalls = [each for each in (self.shortfall, self.exact_shortfall) if each is not None]
        return min(map(_largest, shortfalls)) / self.unit

    @property
    def strays(self) -> str:
        """Which text departs from the model's choice here: plain, drafted, both or neither."""
        plain, drafted = (value is None or value > ALLOWED * self.unit for value in self.shortfall)
        return "both" if plain and drafted else "plain" if plain else "drafted" if drafted else "neither"


@dataclass(frozen=True, slots=True)
class GreedyPair:
    """One prompt continued with and without a drafter."""

    id: str
    tokens: int
    """Of the longer text."""
    shared: int
    """Tokens before the first difference."""
    worst: float
    """Largest shortfall of a drafted token in the model's own pass over the whole text, in units of rounding."""
    margin: Margin | None
    """Where the two differ, or where the drafted text departs from the model's choice; None if neither happens."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GreedyComparison:
    """The greedy texts of all prompts, with and without a drafter."""

    pairs: tuple[GreedyPair, ...]
    dtype: str
    allowed: float = ALLOWED

    @property
    def verdict(self) -> Verdict:
        verdicts = {pair.verdict for pair in self.pairs}
        return "bug" if "bug" in verdicts else "tie" if "tie" in verdicts else "equal"

    @property
    def worst(self) -> float:
        return max((pair.worst for pair in self.pairs), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Values for JSON.  The infinite margin of a text that ended too early is written as null."""
        pairs = [asdict(pair) for pair in self.pairs]
        for row, pair in zip(pairs, self.pairs, strict=True):
            if pair.margin is not None:
                units = pair.margin.units
                row["margin"] |= {"units": units if math.isfinite(units) else None, "strays": pair.margin.strays}
        equal = sum(pair.verdict == "equal" for pair in self.pairs)
        head = {
            "verdict": self.verdict,
            "prompts": len(pairs),
            "equal": equal,
            "tokens": sum(p.tokens for p in self.pairs),
        }
        return head | {"dtype": self.dtype, "allowed": self.allowed, "worst": self.worst, "pairs": pairs}


# ── greedy ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(
    target: TransformersTarget, prompts: Prompts, drafter: Drafter, *, max_new_tokens: int = 96, slots: int = 8,
    judge: SamplingJudge | None = None, ids: Sequence[str] | None = None, on_prompt: OnText | None = None,
) -> GreedyComparison:  # fmt: skip
    """Continue every prompt (token ids) greedily with and without the drafter, and judge each pair.

    on_prompt(done) counts finished texts, two per prompt.  Raises DataError without prompts, or for one that does not
    fit.
    """
    audit = Audit(target)
    _fits(target, prompts, max_new_tokens)
    requests = [Request(list(prompt), max_new_tokens, Sampling()) for prompt in prompts]
    plain, drafted = _both(target, [requests, requests], drafter, slots, judge, on_prompt)
    named = ids or [str(i) for i in range(len(prompts))]
    pairs = [audit.pair(*row) for row in zip(named, prompts, plain, drafted, strict=True)]
    return GreedyComparison(tuple(pairs), target.spec.dtype)


def prompts_of(
    target: TransformersTarget, task: str, count: int, max_new_tokens: int, seed: int = 0
) -> tuple[list[str], list[list[int]]]:
    """Names and token ids of `count` prompts of a task, truncated on the left to leave room for `max_new_tokens`."""
    drawn = list(names.prompts(task, count, seed))
    room = target.spec.context - max_new_tokens
    cuts = Cuts()
    tokens = [cuts.fit(as_tokens(target, prompt), room, prompt.id) for prompt in drawn]
    if cuts.lost:
        log.warning("%s", sentence(cuts.lost))
    return [prompt.id for prompt in drawn], tokens


def _fits(target: TransformersTarget, prompts: Prompts, max_new_tokens: int) -> None:
    if not prompts:
        raise DataError("no prompts to compare on; give at least one")
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= target.spec.context - max_new_tokens:
            raise DataError(
                f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones, the context of "
                f"{target.spec.context} has room for 1 to {target.spec.context - max_new_tokens}; cut it, or ask for "
                "fewer new tokens"
            )


def _both(
    target: TransformersTarget, requests: Sequence[Sequence[Request]], drafter: Drafter, slots: int,
    judge: SamplingJudge | None, on_text: OnText | None, shared_noise: bool = True,
) -> list[list[list[int]]]:  # fmt: skip
    """New tokens of every request: of the first list without the drafter, of the second with it."""
    both: list[list[list[int]]] = []
    done = 0
    for some, arm in zip(requests, (None, drafter), strict=True):
        texts: list[list[int]] = [[] for _ in some]
        for progress in serve(target, some, arm, slots=slots, judge=judge or "standard", shared_noise=shared_noise):
            texts[progress.request] += progress.tokens
            if progress.finish_reason is not None:
                done += 1
                if on_text is not None:
                    on_text(done)
        both.append(texts)
    return both


class Audit:
    """Checks texts with the model itself, outside the loop: no cache, no draft, one text at a time."""

    def __init__(self, target: TransformersTarget):
        self.target, self.model = target, target.model

    def pair(self, name: str, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> GreedyPair:
        """Judge two texts of one prompt.  The worst finding is the pair's verdict."""
        longer = max(len(plain), len(drafted))
        shared = next((i for i, (a, b) in enumerate(zip_longest(plain, drafted)) if a != b), longer)
        worst, strays = self._worst(prompt, drafted)
        margin = self.margin(prompt, plain, drafted, shared) if shared < longer else None
        if worst > ALLOWED and (margin is None or margin.verdict != "bug"):
            # the pass over the whole text has rounding of its own, so check that position again
            both = plain if plain[: strays + 1] == drafted[: strays + 1] else drafted
            stray = self.margin(prompt, both, drafted, strays)
            margin = stray if margin is None or stray.verdict == "bug" else margin
        is_bug = margin is not None and margin.verdict == "bug"
        return GreedyPair(
            name, longer, shared, worst, margin, "bug" if is_bug else "equal" if shared == longer else "tie"
        )

    def margin(self, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int], position: int) -> Margin:
        """The model's logits after the prompt and the first `position` tokens of the answer, compared with both
        texts."""
        text = [*prompt, *drafted[:position]]
        tokens = (
            plain[position] if position < len(plain) else None,
            drafted[position] if position < len(drafted) else None,
        )
        logits = self._logits(self.model, text)[-1]
        shortfall = _shortfalls(logits, tokens)
        unit = float(unit_of(logits, self.target))
        exact = None
        if _largest(shortfall) > ALLOWED * unit and None not in tokens and (model := self._double) is not None:
            exact = _shortfalls(self._logits(model, text)[-1], tokens)
        margin = Margin(position, tokens, shortfall, exact, unit, "tie")
        return margin if margin.units <= ALLOWED else replace(margin, verdict="bug")

    def _worst(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, int]:
        """The largest shortfall among the answer's tokens, in units, and its position."""
        if not answer:
            return 0.0, 0
        logits = self._logits(self.model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(-1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        units = (logits.amax(-1) - chosen) / unit_of(logits, self.target)
        position = int(units.argmax())
        return float(units[position]), position

    @torch.inference_mode()
    def _logits(self, model: Any, text: Sequence[int]) -> Tensor:
        """[S, V] in float64, from the model's own forward over one whole text."""
        tokens = torch.tensor([list(text)], device=model.device)
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits[0].double()

    @cached_property
    def _double(self) -> Any:
        """The model in float64, created once; None if it is quantised or would not fit into half of the free memory.

        Parts that a family always computes in float32, such as norms, stay in float32.
        """
        model: Any = self.model
        if self.target.spec.quantised is not None:
            return None
        return model if model.dtype == torch.float64 else recast(model, torch.float64)


def unit_of(logits: Tensor, target: TransformersTarget) -> Tensor:
    """One unit of rounding of these logits [..., V].  Returns [...].

    ulp(z) · sqrt(2 L + 1), with z the largest logit or, if larger, their root mean square.  The residual stream is
    rounded once after each of the two sublayers of L layers, the logits once more; errors of equal size and random sign
    grow with the square root of their number.  A unit is an order of magnitude, not a bound: roundings inside a
    sublayer add up to a few units.
    """
    size = torch.maximum(logits.amax(-1).abs(), logits.pow(2).mean(-1).sqrt()).clamp(min=1e-30)
    spacing = torch.finfo(getattr(torch, target.spec.dtype)).eps * 2 ** size.log2().floor()
    return spacing * math.sqrt(2 * target.spec.layers + 1)


def _shortfalls(logits: Tensor, tokens: tuple[int | None, int | None]) -> tuple[float | None, float | None]:
    top = logits.max()
    one, other = (None if token is None else float(top - logits[token]) for token in tokens)
    return one, other


def _largest(shortfall: tuple[float | None, float | None]) -> float:
    """Infinite if only one text ended: no logit explains that."""
    return max(math.inf if value is None else value for value in shortfall)


# ── sampled ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_samples(
    target: TransformersTarget, prompts: Prompts, drafter: Drafter, *, sampling: Sampling, samples: int = 200,
    max_new_tokens: int = 16, slots: int = 32, judge: SamplingJudge | None = None, alpha: float = 0.01, seed: int = 0,
    on_text: OnText | None = None,
) -> Samples:  # fmt: skip
    """Sample `samples` texts per prompt with and without the drafter, with independent noise, and test the two sets.

    With the same seeds, the texts would be equal token by token, which does not test the acceptance rule of unseeded
    requests.  Here the noise is not shared, but a run is still repeatable.  on_text(done) counts the texts of both
    sets.
    """
    _fits(target, prompts, max_new_tokens)
    requests = [
        [
            Request(list(prompt), max_new_tokens, replace(sampling, seed=(seed << 32) + 2 * (i * samples + n) + arm))
            for i, prompt in enumerate(prompts) for n in range(samples)
        ]
        for arm in range(2)
    ]  # fmt: skip
    sets = [
        [texts[start : start + samples] for start in range(0, len(texts), samples)]
        for texts in _both(target, requests, drafter, slots, judge, on_text, shared_noise=False)
    ]
    return two_samples(sets[0], sets[1], positions=min(8, max_new_tokens), alpha=alpha, seed=seed)
