"""Tests what a model can do, on random tokens, by comparing with passes without a cache.

First: are the logits of a text reproducible, and independent of the tokens after it?  The difference between passes
with other lengths and numbers of rows is the allowed rounding.  Then, in order: single steps, `generate`'s own text
across every limit, a chain verified in one pass, continuing after a truncation, a tree, continuing after one of its
paths; with slots of unequal and of equal length.  The first failure determines the mode; a model whose single steps or
texts fail is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.errors import TargetError
from outrider.targets.hf.anatomy import BROKEN
from outrider.targets.hf.family import WINDOWS

Mode = Literal["tree", "chain", "off"]
PARENTS = (-1, 0, -1, 0, 1, 2)
"""A tree in which children are not adjacent to their parents and one path has three nodes."""
PATH = (0, 1, 4)
CHECKS: tuple[tuple[str, Mode | None], ...] = (
    ("steps", None), ("text", "off"), ("chain", "off"), ("cut", "chain"), ("tree", "chain"), ("path", "tree"),
)  # fmt: skip
"""The checks in order, each with the mode of a model that has passed it; None means refused."""
WRITTEN = 24
"""Number of tokens of `generate` that are compared: more than a window of the miniature, so that the prompt leaves the
window."""


class WrongText(TargetError):
    """Single steps are wrong with this kind of cache; another kind may work."""


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test."""

    mode: Mode
    failed: str | None
    """The first failed check; None if all passed."""
    errors: dict[str, float]
    """Largest difference of a logit, by check."""
    allowed: float
    """Five times the difference between passes without a cache that have other lengths and numbers of rows, but at
    least 16 rounding units of the dtype and 64 of float32."""


@torch.inference_mode()
def selftest(target: Any) -> SelfTest:
    """Test a target.  Raises TargetError if even single steps are wrong."""
    trial = _Trial(target)
    errors: dict[str, float] = {}
    reached: Mode | None = None
    failed = None
    for check, mode in CHECKS:
        if check == "tree" and target.family.follows_one_path:
            what = "a recurrent state" if target.family.is_recurrent else "a cache of the family's own kind"
            failed = f"tree: {what} follows one path"
            break
        try:
            errors[check] = getattr(trial, check)()
        except BROKEN as error:
            failed = f"{check}: {type(error).__name__}: {error}"
            break
        if not errors[check] <= trial.allowed:
            failed = f"{check}: logits differ by {errors[check]:.1e}, allowed are {trial.allowed:.1e}"
            break
        reached = mode
    if reached is None:
        cache = "our" if target.family.past is None else "its own"
        reason = f"single steps with {cache} cache differ from a pass without one ({failed})"
        if failed is not None and failed.startswith("text"):
            reason = f"its own `generate` produces a different text from passes without a cache ({failed})"
        raise WrongText(refusal(target.model, reason))
    return SelfTest(reached, failed, errors, trial.allowed)


@torch.inference_mode()
def agreed(target: Any, reference: SelfTest, text: list[int], whole: Tensor) -> SelfTest | None:
    """The self-test of a model with the same config, with this model's rounding; None if this model does not agree with
    it.

    text: a short one; whole [S, V]: the logits of a pass over it without a cache.  Takes two more passes: the first
    half of the text, and then the rest of it as a draft.
    """
    half = len(text) // 2
    try:
        cache = target.allocate(1, len(text) + 8)
        head, rest = (torch.tensor([part], device=target.device) for part in (text[:half], text[half:]))
        last = target.prefill(cache, [0], head, [half]).logits[0, -1]
        draft = Draft.empty(1, target.device) if reference.mode == "off" else chain_of(rest[:, 1:])
        logits = target.verify(cache, [0], rest[:, 0], draft).logits[0]
    except BROKEN:
        return None
    # the first half has nothing before it, so it shows the rounding between passes of different lengths
    floor = _max_difference(last, whole[half - 1])
    minimum = rounding(target, whole)
    allowed = max(5 * min(floor, minimum), minimum)
    error = _max_difference(logits, whole[half : half + len(logits)])
    if not error <= allowed:
        return None
    return replace(reference, errors={**reference.errors, "agreed": error}, allowed=allowed)


def chain_of(tokens: Tensor) -> Draft:
    """These tokens [B, N] as a chain."""
    return Draft.chain(tokens, torch.full((len(tokens),), tokens.shape[1]))


def tree_of(tokens: Tensor) -> Draft:
    """These tokens [B, N] as a tree of the shape of `PARENTS`, or its first N nodes."""
    parents = torch.tensor(PARENTS, device=tokens.device)[: tokens.shape[1]].expand_as(tokens)
    return Draft(tokens, parents, torch.full((len(tokens),), tokens.shape[1]))


def refusal(model: Any, reason: str) -> str:
    """The error message that refuses a model."""
    name = f"{type(model).__name__} ({model.config.model_type})"
    return f"{name} can't be decoded here: {reason}; use transformers' own generate for it"


@contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Turn the exception of a family that needs to be called differently into a TargetError."""
    try:
        yield
    except BROKEN as error:
        raise TargetError(refusal(model, f"a plain pass over text fails ({type(error).__name__}: {error})")) from error


def rounding(target: Any, logits: Tensor) -> float:
    """16 rounding units of the largest logit, at least 64 of float32."""
    # families compute softmax, routers and states in float32 whatever the dtype, some without scaling their scores
    unit = max(16 * torch.finfo(target.model.dtype).eps, 64 * torch.finfo(torch.float32).eps)
    return unit * float(logits.abs().max())


def plain_words(target: Any, rows: int, count: int) -> list[list[int]]:
    """Random texts [rows][count] without special tokens."""
    configs = target.model.config, target.model.config.get_text_config(decoder=True)
    named = [
        value
        for config in configs
        for key, value in vars(config).items()
        if key.endswith(("_token_id", "_token_index"))
    ]
    special = {word for value in named for word in (value if isinstance(value, list | tuple) else [value])}
    words = torch.tensor([word for word in range(target.spec.vocabulary) if word not in special])
    noise = torch.Generator().manual_seed(7)
    texts: list[list[int]] = words[torch.randint(len(words), (rows, count), generator=noise)].tolist()
    return texts


class _Trial:
    """Two slots with random text, and the model's logits for any text without a cache."""

    def __init__(self, target: Any):
        self.target = target
        self.length = _length(target)
        self.written = max(2, min(WRITTEN, target.spec.context // 4))
        self.around = _around(target, target.spec.context - self.written)
        *self.texts, nodes = plain_words(target, 3, max(self.length, *self.around) + 16)
        self.nodes = torch.tensor([nodes[: len(PARENTS)], nodes[-len(PARENTS) :]], device=target.device)
        self.uneven = [self.length, self.length - 3]
        self.even = [self.length, self.length]
        self.passes: list[tuple[list[int], Tensor]] = []
        self.allowed = self._allowed()
        for text in self.texts:
            self.expected(text[: self.length + 8])

    def expected(self, text: list[int]) -> Tensor:
        """Logits [V] after a text, from a pass without a cache over it or over a longer text with this prefix."""
        for longer, logits in self.passes:
            if longer[: len(text)] == text:
                return logits[len(text) - 1]
        self.passes.append((text, self.whole(text)[0]))
        return self.passes[-1][1][-1]

    def whole(self, *texts: list[int]) -> Tensor:
        """Logits [R, S, V] of one pass over rows of equal length without a cache."""
        logits: Tensor = self.target.model(
            input_ids=torch.tensor(texts, device=self.target.device), use_cache=False
        ).logits
        return logits

    def _allowed(self) -> float:
        """How much logits may differ.  Raises TargetError if the same text has different logits for reasons other than
        rounding."""
        texts = [text[: self.length + 4] for text in self.texts]
        with refusing(self.target.model):
            whole, again = self.whole(texts[0])[0], self.whole(texts[0])[0]
            shorter = [self.whole(texts[0][:end])[0] for end in (self.length - 3, self.length)]
        minimum = rounding(self.target, whole)
        most = min(16 * minimum, float(whole.abs().max()) / 4)
        if not _max_difference(whole, again) <= most:
            raise TargetError(
                refusal(self.target.model, "it is random: the same text has different logits in every pass")
            )
        floor = max(_max_difference(part, whole[: len(part)]) for part in shorter)
        if not floor <= most:
            raise TargetError(
                refusal(self.target.model, "it is not causal: what follows a text changes the logits before it")
            )
        try:
            batched = _max_difference(whole, self.whole(*texts)[0])
        except BROKEN:
            batched = 0.0  # rows can't share a pass
        return max(5 * max(floor, min(most, batched)), minimum)

    def _filled(self, lengths: Sequence[int]) -> Any:
        """Both texts read up to their anchors."""
        cache = self.target.allocate(2, self.length + 32)
        for row, length in enumerate(lengths):
            self._read(cache, row, self.texts[row][:length])
        return cache

    def _read(self, cache: Any, row: int, text: list[int]) -> None:
        if len(text) > 1:
            head = torch.tensor([text[:-1]], device=self.target.device)
            self.target.prefill(cache, [row], head, [len(text) - 1])

    def _verify(self, cache: Any, texts: list[list[int]], draft: Draft) -> float:
        """Verify `draft` after these texts; returns the largest difference of a row from a pass over the text and its
        path without a cache."""
        logits = self._logits(cache, texts, draft)
        rows: list[tuple[list[int], Tensor]] = []
        for b, text in enumerate(texts):
            paths = [text]
            for token, parent in zip(draft.ids[b], draft.tree[b], strict=True):
                paths.append([*paths[parent + 1], token])
            rows += zip(paths, logits[b], strict=True)
        # the longest first: a pass over it has the logits of all its prefixes
        return max(
            _max_difference(row_logits, self.expected(text))
            for text, row_logits in sorted(rows, key=lambda row: -len(row[0]))
        )

    def _logits(self, cache: Any, texts: list[list[int]], draft: Draft) -> Tensor:
        anchor = torch.tensor([text[-1] for text in texts], device=self.target.device)
        logits: Tensor = self.target.verify(cache, [0, 1], anchor, draft).logits
        return logits

    def _begun(self, lengths: Sequence[int]) -> list[list[int]]:
        return [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def _chain(self, texts: list[list[int]], nodes: int) -> Draft:
        """The texts' own next tokens as a draft."""
        following = [all_[len(text) : len(text) + nodes] for all_, text in zip(self.texts, texts, strict=True)]
        return chain_of(torch.tensor(following, device=self.target.device))

    def _both(self, drafted: Callable[[list[list[int]]], Draft]) -> float:
        """Largest difference between a draft and passes without a cache, in slots of unequal and of equal length."""
        texts = {tuple(lengths): self._begun(lengths) for lengths in (self.uneven, self.even)}
        return max(self._verify(self._filled(lengths), begun, drafted(begun)) for lengths, begun in texts.items())

    def steps(self) -> float:
        worst = 0.0
        for lengths, count in ((self.uneven, 4), (self.even, 2)):
            cache = self._filled(lengths)
            for n in range(count):
                texts = self._begun([length + n for length in lengths])
                worst = max(worst, self._verify(cache, texts, Draft.empty(2, self.target.device)))
                cache.keep([[], []])
        return worst

    def text(self) -> float:
        """`generate`'s text after a prompt that ends before every limit and after one that ends past them, in one
        batch.

        Returns the largest difference between the likeliest token's logit and that of the generated token.
        """
        prompts = [text[:length] for text, length in zip(self.texts, self.around, strict=True)]
        written = [self._generated(prompt) for prompt in prompts]
        count = min(len(text) - len(prompt) for text, prompt in zip(written, prompts, strict=True))
        cache, worst = self.target.allocate(2, max(self.around) + 2 * self.written), 0.0
        for row, prompt in enumerate(prompts):
            self._read(cache, row, prompt)
        for at in range(count):
            texts = [text[: len(prompt) + at] for text, prompt in zip(written, prompts, strict=True)]
            logits = self._logits(cache, texts, Draft.empty(2, self.target.device))[:, 0]
            next_tokens = torch.tensor(
                [text[len(begun)] for text, begun in zip(written, texts, strict=True)], device=logits.device
            )
            worst = max(worst, float((logits.max(-1).values - logits.gather(-1, next_tokens[:, None])[:, 0]).max()))
            cache.keep([[], []])
        return worst

    def _generated(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=self.target.device)
        tokens: list[int] = self.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.written, do_sample=False, pad_token_id=0
        )[0].tolist()
        return tokens

    def chain(self) -> float:
        return self._both(lambda texts: self._chain(texts, 5))

    def cut(self) -> float:
        """One slot accepts two of five tokens, the other none."""
        cache, begun = self._filled(self.uneven), self._begun(self.uneven)
        self._logits(cache, begun, self._chain(begun, 5))
        cache.keep([[0, 1], []])
        texts = self._begun([self.uneven[0] + 3, self.uneven[1] + 1])
        return self._verify(cache, texts, self._chain(texts, 4))

    def tree(self) -> float:
        return self._both(lambda texts: tree_of(self.nodes))

    def path(self) -> float:
        """One slot accepts the tree's longest path, the other a later child of the anchor."""
        cache, begun = self._filled(self.uneven), self._begun(self.uneven)
        self._logits(cache, begun, tree_of(self.nodes))
        cache.keep([PATH, [2]])
        accepted = [[*self.nodes[0, list(PATH)].tolist()], [int(self.nodes[1, 2])]]
        texts = [text + path + [self.texts[0][0]] for text, path in zip(begun, accepted, strict=True)]
        return self._verify(cache, texts, chain_of(torch.tensor([self.texts[1][:3]] * 2, device=self.target.device)))


def _max_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _limits(target: Any) -> list[int]:
    """Sizes of windows and chunks up to a bound, including those that only the config names."""
    most = 512 if target.device.type == "cpu" else 4096
    config = target.model.config.get_text_config(decoder=True)
    named = [getattr(config, name, None) for name in WINDOWS]
    sizes = [*named, *(limit.size for limit in target.family.limits.values() if limit is not None)]
    return [size for size in sizes if isinstance(size, int) and 0 < size <= most]


def _length(target: Any) -> int:
    """A text length past the window, or just before a chunk's end, if these are close; always within the context."""
    sizes = _limits(target)
    length = max([24, *(size + 12 for size in sizes)])
    if (
        target.family.rotary is not None
    ):  # beyond it, a pass without a cache uses the last token's factors for all tokens
        return max(2, min(length, target.family.rotary.original - 9))
    for limit in target.family.limits.values():
        if limit is not None and limit.kind == "chunk" and limit.size in sizes:
            length += -length % limit.size - 1
    return max(6, min(length, target.spec.context - 24))


def _around(target: Any, most: int) -> list[int]:
    """Lengths, at most `most`, of a prompt that ends before every nearby limit and of one that ends past them."""
    # in some families `generate` changes behaviour here, even if their rotary factors don't
    config, rotary = target.model.config.get_text_config(decoder=True), target.family.rotary
    firsts = [getattr(config, "original_max_position_embeddings", None), None if rotary is None else rotary.original]
    limits = [*_limits(target), *(first for first in firsts if isinstance(first, int) and first <= 512)]
    farthest = min(max([16, *limits]), most - 6)
    return [max(2, farthest - 6), max(3, farthest + 6)]
