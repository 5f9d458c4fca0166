"""Search for the sublayers that `layer_skip` should skip, on the user's prompts before decoding; the result is saved.

Differs from SWIFT (arXiv 2410.06916): it maximises the expected speed-up computed from measured seconds, not just the
agreement, and its surrogate is a Bayesian linear regression instead of a Gaussian process.

D tokens of a draft; R texts of a search.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.errors import DataError
from outrider.generation import generate
from outrider.targets.protocol import Skip, SkipsLayers, Target
from outrider.targets.skip import every_second, probability, require_skipping

WHICH = ("attention", "mlp")
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Values of `min_confidence` that a search tries."""


@dataclass(frozen=True)
class Found:
    """A set of sublayers and its speed-up on some prompts.  Greedy, one slot."""

    target: str
    weights_hash: str
    skip_attention: tuple[int, ...]
    skip_mlp: tuple[int, ...]
    length: int
    """Tokens per draft; `length` and `min_confidence` are the fastest for this set."""
    min_confidence: float
    agreement: float
    """Share of drafts whose first token is the target's own."""
    accepted: float
    """Drafted tokens accepted per step."""
    passes: float
    """Drafting passes per step, including the one whose token falls below `min_confidence`."""
    plain_s: float
    """Seconds of a plain step; the next two are those of one drafting pass, and of a step that verifies drafts of this
    length."""
    draft_s: float
    verify_s: float
    drafts: int
    """Number of measured drafts."""

    @property
    def skip(self) -> Skip:
        return Skip(frozenset(self.skip_attention), frozenset(self.skip_mlp))

    @property
    def speedup(self) -> float:
        """Expected tokens per second relative to plain decoding: E[tokens] T(1) / (T(n) + T_draft)."""
        return (1 + self.accepted) * self.plain_s / (self.verify_s + self.passes * self.draft_s)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(
            json.dumps({"kind": "layer_skip", **asdict(self), "speedup": self.speedup}, indent=2) + "\n"
        )


def search(
    target: Target, prompts: Sequence[list[int]], *, tokens: int = 64, tries: int = 60, length: int = 8, seed: int = 0,
    say: Callable[[int, Found], None] = lambda number, candidate: None,
) -> list[Found]:  # fmt: skip
    """Try sets of sublayers on the target's own greedy texts.  Returns all of them, best expected speed-up first.

    prompts: token ids; each is continued by `tokens` tokens, and every `length` tokens give one draft of up to `length`
    tokens.  The same seed and equal timings give the same sets.  `say` is called after each new set.  Raises
    DrafterError if the target can't skip sublayers, DataError if the texts are too short for a draft.
    """
    possible, noise = require_skipping(target).skippable(), torch.Generator().manual_seed(seed)
    clock = _Clock(target, _Texts(target, prompts, tokens, length))
    space = [(which, layer) for which in WHICH for layer in sorted(getattr(possible, which))]
    tried: dict[Skip, Found] = {}
    starts = _starts(target.spec.layers, possible)
    for number in range(tries):
        skip = starts[number] if number < len(starts) else _next(space, tried, noise)
        if skip not in tried:
            tried[skip] = clock.judged(skip)
            say(number, tried[skip])
    by_speedup = lambda candidate: -candidate.speedup
    best = sorted(tried.values(), key=by_speedup)
    return [*sorted((clock.judged(candidate.skip, is_timed=True) for candidate in best[:3]), key=by_speedup), *best[3:]]


def _starts(layers: int, possible: Skip) -> list[Skip]:
    """Every second layer, early exits, and every MLP or every attention of the middle layers."""
    exits = [frozenset(range(layers * part // 8, layers)) for part in (7, 6, 4)]
    middle = frozenset(range(1, layers - 1))
    starts = [Skip(early & possible.attention, early & possible.mlp) for early in exits]
    starts += [Skip(middle & possible.attention), Skip(mlp=middle & possible.mlp)]
    return [skip for skip in (every_second(layers, possible), *starts) if skip != Skip()]


class _Texts:
    """The target's own texts in a cache, each twice: the original, and a copy to draft on."""

    def __init__(self, target: Target, prompts: Sequence[list[int]], tokens: int, length: int):
        answers = generate(target, [list(prompt) for prompt in prompts], max_new_tokens=tokens, slots=len(prompts))
        texts = [(p, one.tokens) for p, one in zip(prompts, answers, strict=True) if len(one.tokens) >= length]
        if not texts:
            raise DataError(f"no text has at least {length} tokens; give other prompts, or a lower length")
        self.target, self.device, self.length = target, target.device, length
        self.starts = [len(prompt) - 1 for prompt, _ in texts]
        self.drafts = [len(new) // length for _, new in texts]
        self.texts = [[*prompt, *new] for prompt, new in texts]
        self.cache: Any = target.allocate(2 * len(texts), max(map(len, self.texts)) + length + 2)
        for row in range(len(texts)):
            self._read(row, row)

    def _read(self, row: int, text: int) -> None:
        """Prefill a row with this text except for its last token."""
        tokens = self.texts[text][:-1]
        self.cache.free([row])
        self.target.prefill(self.cache, [row], torch.tensor([tokens], device=self.device), [len(tokens)], ())

    @torch.inference_mode()
    def drafted(self, target: SkipsLayers, skip: Skip) -> tuple[Tensor, Tensor]:
        """Draft every `length` tokens.  Returns how many leading tokens of each draft match the text, [drafts], and the
        probability of the most likely token after each token of the text, [drafts, length].

        Goes from the last draft to the first, since a draft never reads cache entries at later positions.
        """
        count = len(self.texts)
        for text in range(count):  # the previous set of sublayers overwrote the target's keys
            self._read(count + text, text)
        leads, sure = [], []
        for number in reversed(range(max(self.drafts))):
            starts = {
                text: self.starts[text] + number * self.length for text in range(count) if number < self.drafts[text]
            }
            for text, at in starts.items():
                self.cache.lengths[count + text] = at
            pieces = [self.texts[text][at : at + self.length + 1] for text, at in starts.items()]
            tokens = torch.tensor(pieces, device=self.device)
            with target.skipping(skip, self.cache, [count + text for text in starts]) as read:
                logits = read(tokens[:, :-1])
            leads.append((logits.argmax(-1) == tokens[:, 1:]).long().cumprod(-1).sum(-1).cpu())
            sure.append(probability(logits).cpu())
        return torch.cat(leads), torch.cat(sure)


class _Clock:
    """Seconds of a step with 0, 1, … drafted tokens, and of a drafting pass depending on what it skips."""

    def __init__(self, target: Target, texts: _Texts):
        self.target, self.texts, self.skips = target, texts, require_skipping(target)
        possible = self.skips.skippable()
        self.whole = _draft_s(self.skips, texts, Skip())
        self.saved = {}
        """Seconds saved by skipping one sublayer, by kind."""
        for which in WHICH:
            layers = getattr(possible, which)
            less = self.whole - _draft_s(self.skips, texts, Skip(**{which: layers}))
            self.saved[which] = max(0.0, less) / max(len(layers), 1)
        self.steps = [_verify_s(target, texts, nodes) for nodes in range(texts.length + 1)]

    def judged(self, skip: Skip, is_timed: bool = False) -> Found:
        """A set with the length and the threshold that make it fastest.

        is_timed: measure its drafting pass instead of estimating it from the savings per sublayer.
        """
        leads, sure = self.texts.drafted(self.skips, skip)
        saved = sum(len(getattr(skip, which)) * each for which, each in self.saved.items())
        draft_s = _draft_s(self.skips, self.texts, skip) if is_timed else max(self.whole - saved, 0.02 * self.whole)
        spec = self.target.spec
        skipped = spec.name, spec.weights_hash, tuple(sorted(skip.attention)), tuple(sorted(skip.mlp))
        agreement, steps = float((leads > 0).double().mean()), torch.tensor(self.steps, dtype=torch.float64)
        options = []
        for min_confidence in THRESHOLDS:
            reach = (sure >= min_confidence).long().cumprod(-1).sum(-1)
            for length in range(1, len(steps)):
                sizes = reach.clamp(max=length)
                counts = torch.minimum(leads, sizes), (reach + 1).clamp(max=length)
                accepted, passes = (float(count.double().mean()) for count in counts)
                seconds = self.steps[0], draft_s, float(steps[sizes].mean())
                options.append(
                    Found(*skipped, length, min_confidence, agreement, accepted, passes, *seconds, len(leads))
                )
        return max(options, key=lambda candidate: candidate.speedup)


def _draft_s(skips: SkipsLayers, texts: _Texts, skip: Skip) -> float:
    texts.cache.lengths[0] = len(texts.texts[0]) - 1
    token = torch.tensor([texts.texts[0][-1:]], device=texts.device)
    with skips.skipping(skip, texts.cache, [0]) as read:

        def once() -> None:
            texts.cache.lengths[0] = len(texts.texts[0]) - 1
            read(token)

        return _seconds(once, texts.device)


def _verify_s(target: Target, texts: _Texts, nodes: int) -> float:
    text = texts.texts[0]
    texts.cache.lengths[0] = len(text) - 1
    anchor = torch.tensor(text[-1:], device=texts.device)
    draft = Draft.chain(torch.zeros(1, nodes, dtype=torch.int64, device=texts.device), torch.tensor([nodes]))
    return _seconds(lambda: target.verify(texts.cache, [0], anchor, draft, ()), texts.device)


def _seconds(run: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Median of `rounds` runs, after one warm-up run."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _next(space: list[tuple[str, int]], tried: dict[Skip, Found], noise: torch.Generator) -> Skip:
    """The set to try next: the most promising among variations of the best sets and random ones.

    The surrogate is linear in the skipped sublayers: log speed-up = w x + error, with a Gaussian prior on w.  A set's
    score is its predicted mean plus one standard deviation, so that uncertain sets are explored as well.
    """
    x = torch.stack([_as_bits(space, skip) for skip in tried])
    y = torch.tensor([candidate.speedup for candidate in tried.values()], dtype=torch.float64).log()
    best = x[y.argsort(descending=True)[:5]]
    few = best[torch.randint(len(best), (128,), generator=noise)]
    flips = torch.rand(few.shape, generator=noise) < 1.5 / len(space)
    share = torch.rand(64, 1, generator=noise)
    pool = torch.cat([(few.bool() ^ flips).double(), (torch.rand(64, len(space), generator=noise) < share).double()])
    pool = torch.stack([row for row in pool if bool(row.any()) and _as_skip(space, row) not in tried] or [pool[-1]])
    mean, deviation = _predicted(x, y, pool)
    return _as_skip(space, pool[int((mean + deviation).argmax())])


def _predicted(x: Tensor, y: Tensor, pool: Tensor, prior: float = 0.1, error: float = 0.1) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation at `pool` [P, F] of a Bayesian linear regression of y [T] on x [T, F].

    prior: standard deviation of a weight before any measurement; error: standard deviation of one measurement.
    """
    centre, middle = y.mean(), x.mean(0)
    x, pool = x - middle, pool - middle
    precision = x.T @ x / error**2 + torch.eye(x.shape[1], dtype=x.dtype) / prior**2
    covariance = torch.linalg.inv(precision)
    weights = covariance @ x.T @ (y - centre) / error**2
    return centre + pool @ weights, (pool @ covariance * pool).sum(-1).clamp(min=0).sqrt()


def _as_bits(space: list[tuple[str, int]], skip: Skip) -> Tensor:
    return torch.tensor([layer in getattr(skip, which) for which, layer in space], dtype=torch.float64)


def _as_skip(space: list[tuple[str, int]], bits: Tensor) -> Skip:
    chosen = [place for place, bit in zip(space, bits.tolist(), strict=True) if bit]
    return Skip(*(frozenset(layer for kind, layer in chosen if kind == which) for which in WHICH))
