"""What a loaded model can be trusted with, found by doing it on random tokens and comparing with whole passes.

Checked in order: single steps, a chain verified in one pass, going on after a cut, a tree, going on after one of its paths;
always two slots of unequal length, and beyond the window or across a chunk's border where that is near.  The first failure
decides the mode; a model whose single steps fail is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.decoding.draft import Draft
from outrider.errors import TargetError

PARENTS = (-1, 0, -1, 0, 1, 2)
"""A tree in which children stand apart from their parents and one path is three deep."""
PATH = (0, 1, 4)


@dataclass(frozen=True)
class SelfTest:
    """What was found."""

    mode: Literal["tree", "chain", "off"]
    failed: str | None
    """The check that stopped it there."""
    errors: dict[str, float]
    """Largest difference of a logit, by check."""
    allowed: float
    """Five times the difference between single steps and a whole pass, both transformers' own; or 16 units of
    rounding, of float32 at least."""


@torch.inference_mode()
def selftest(target: Any) -> SelfTest:
    """Try a target and say what it may be used for.  Raises TargetError where even single steps are wrong."""
    trial = _Trial(target)
    modes: list[tuple[str, Literal["tree", "chain", "off"]]] = [
        ("steps", "off"), ("chain", "off"), ("cut", "chain"), ("tree", "chain"), ("path", "tree"),
    ]  # fmt: skip
    errors: dict[str, float] = {}
    reached: Literal["tree", "chain", "off"] = "off"
    failed = None
    for check, mode in modes:
        if check == "tree" and target.family.is_recurrent:
            failed = "tree: a recurrent state follows one path"
            break
        try:
            errors[check] = getattr(trial, check)()
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            failed = f"{check}: {type(error).__name__}: {error}"
            break
        if not errors[check] <= trial.allowed:
            failed = f"{check}: logits differ by {errors[check]:.1e}, allowed are {trial.allowed:.1e}"
            break
        reached = mode
    if "steps" not in errors or not errors["steps"] <= trial.allowed:
        raise TargetError(
            f"{target.spec.name} ({target.model.config.model_type}) can't be decoded here: single steps with our cache differ "
            f"from a whole pass ({failed}); use transformers' own generate for it"
        )
    found = SelfTest(reached, failed, errors, trial.allowed)
    logging.getLogger(__name__).info("self-test of %s: %s%s", target.spec.name, reached, f" ({failed})" if failed else "")
    return found


class _Trial:
    """Two slots of unequal length with random text, and what the model itself says of any text."""

    def __init__(self, target: Any):
        self.target = target
        noise = torch.Generator().manual_seed(7)
        self.length = _length(target)
        self.texts = torch.randint(target.spec.vocabulary, (2, self.length + 16), generator=noise).tolist()
        self.nodes = torch.randint(target.spec.vocabulary, (2, len(PARENTS)), generator=noise)
        self.lengths = [self.length, self.length - 3]
        scale, floor = self._floor()
        # families compute softmax, routers and states in float32 whatever their type
        self.allowed = max(5 * floor, 16 * max(torch.finfo(dtype).eps for dtype in (target.model.dtype, torch.float32)) * scale)

    def whole(self, text: list[int]) -> Tensor:
        """Logits [S, V] of one pass without a cache."""
        return self.target.model(input_ids=torch.tensor([text], device=self.target.device), use_cache=False).logits[0]

    def _floor(self) -> tuple[float, float]:
        """Largest logit, and how far transformers' own single steps are from its own whole pass."""
        model, text = self.target.model, self.texts[0][: self.length + 4]
        whole, cache = self.whole(text), DynamicCache(config=self.target.model.config)
        worst, given = 0.0, {self.target.family.cache: cache, "use_cache": True}
        for end in range(self.length, len(text) + 1):
            part = text[: self.length] if end == self.length else [text[end - 1]]
            logits = model(input_ids=torch.tensor([part], device=self.target.device), **given).logits[0, -1]
            worst = max(worst, float((logits - whole[end - 1]).abs().max()))
        return float(whole.abs().max()), worst

    def _filled(self) -> Any:
        """Both texts read up to their anchors."""
        cache = self.target.allocate(2, self.length + 32)
        for row, length in enumerate(self.lengths):
            head = torch.tensor([self.texts[row][: length - 1]], device=self.target.device)
            self.target.prefill(cache, [row], head, [length - 1])
        return cache

    def _verify(self, cache: Any, texts: list[list[int]], draft: Draft, paths: Callable[[int], list[list[int]]]) -> float:
        """Verify `draft` behind these texts; how far any row is from a whole pass over the text and that row's path."""
        anchor = torch.tensor([text[-1] for text in texts], device=self.target.device)
        logits = self.target.verify(cache, [0, 1], anchor, draft).logits
        worst = 0.0
        for b, text in enumerate(texts):
            for n, path in enumerate([[], *paths(b)]):
                wanted = self.whole(text + path)[-1]
                worst = max(worst, float((logits[b, n] - wanted).abs().max()))
        return worst

    def _begun(self) -> list[list[int]]:
        return [text[:length] for text, length in zip(self.texts, self.lengths, strict=True)]

    def _chain(self, texts: list[list[int]], nodes: int) -> tuple[Draft, Callable[[int], list[list[int]]]]:
        """The texts' own next tokens as a draft, and the path to each."""
        following = [all_[len(text) : len(text) + nodes] for all_, text in zip(self.texts, texts, strict=True)]
        draft = Draft.chain(torch.tensor(following, device=self.target.device), torch.full((2,), nodes))
        return draft, lambda b: [following[b][: n + 1] for n in range(nodes)]

    def steps(self) -> float:
        cache, worst = self._filled(), 0.0
        for n in range(4):
            texts = [text[: length + n] for text, length in zip(self.texts, self.lengths, strict=True)]
            worst = max(worst, self._verify(cache, texts, Draft.empty(2, self.target.device), lambda b: []))
            cache.keep([[], []])
        return worst

    def chain(self) -> float:
        return self._verify(self._filled(), self._begun(), *self._chain(self._begun(), 5))

    def cut(self) -> float:
        """One slot keeps two tokens of five, the other none."""
        cache = self._filled()
        self._verify(cache, self._begun(), *self._chain(self._begun(), 5))
        cache.keep([[0, 1], []])
        texts = [self.texts[0][: self.lengths[0] + 3], self.texts[1][: self.lengths[1] + 1]]
        return self._verify(cache, texts, *self._chain(texts, 4))

    def _tree(self) -> tuple[Draft, Callable[[int], list[list[int]]]]:
        parents = torch.tensor(PARENTS, device=self.target.device).expand(2, -1)
        draft = Draft(self.nodes.to(self.target.device), parents, torch.full((2,), len(PARENTS)))

        def path(b: int, n: int) -> list[int]:
            return [] if n < 0 else [*path(b, PARENTS[n]), int(self.nodes[b, n])]

        return draft, lambda b: [path(b, n) for n in range(len(PARENTS))]

    def tree(self) -> float:
        return self._verify(self._filled(), self._begun(), *self._tree())

    def path(self) -> float:
        """One slot keeps the tree's longest path, the other a younger child of the anchor."""
        cache = self._filled()
        self._verify(cache, self._begun(), *self._tree())
        cache.keep([PATH, [2]])
        kept = [[*self.nodes[0, list(PATH)].tolist()], [int(self.nodes[1, 2])]]
        texts = [text + path + [0] for text, path in zip(self._begun(), kept, strict=True)]
        following = torch.ones(2, 3, dtype=torch.int64, device=self.target.device)
        return self._verify(
            cache, texts, Draft.chain(following, torch.full((2,), 3)), lambda b: [[1] * (n + 1) for n in range(3)]
        )


def _length(target: Any) -> int:
    """Beyond the window, and just before a chunk's border, where that is near; always within the context."""
    most = 512 if target.device.type == "cpu" else 4096
    sizes = [limit.size for limit in target.family.limits.values() if limit is not None and limit.size <= most]
    wanted = max([24, *(size + 12 for size in sizes)])
    for limit in target.family.limits.values():
        if limit is not None and limit.kind == "chunk" and limit.size <= most:
            wanted += -wanted % limit.size - 1
    return max(6, min(wanted, target.spec.context - 24))
