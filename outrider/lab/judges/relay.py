"""Relay: the small model generates segments of the text, from a cue word to the end of its sentence, and the target the
rest.  LOSSY.

RelayGen (arXiv 2602.06454): after some words of a chain of reasoning ("So", "Therefore") a small model is confident.
These words are calibrated on the target's own answers: `training.fitting` averages the small model's margins p1 - p2
from each cue to the end of its sentence, and selects cues with a mean above that of all other tokens.  The target hands
over at a cue, but at least `min_tokens` tokens after it took over, so that it cannot loop on one.  After `answer`, the
text that ends the reasoning, such as `</think>`, the small model generates the rest.

Here the hand-over is an acceptance rule with a state per text: drafts within a relayed segment are accepted without a
test, and the target adds no token.  It still reads every token into its cache, so the verified pass is then a prefill
as long as the draft.  Outside of segments the acceptance rule decides, so drafts are exact there.

Differs from the paper: hand-overs are decided token by token, not by an engine's stop strings.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.config import read_object
from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.lab.take_over import (
    distances_of,
    eldest_child,
    ending_in_draft,
    forced,
    node_distances,
    possible,
)
from outrider.policies.lossy import LossyRule, Verified
from outrider.policies.sentences import WINDOW, Piece, decode_of, piece

SETTINGS = {"cues": str, "min_tokens": int, "answer": str}
REQUIRED = "cues"

MIN_TOKENS = 5
"""Least number of tokens that the target generates before it hands over, as in the paper."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Which model generates one text, token by token."""

    cues: tuple[str, ...]
    min_tokens: int
    answer: str = ""
    """What the small model's final answer follows; none if empty."""
    is_relayed: bool = False
    """The small model generates the next token."""
    is_answer: bool = False
    """It does so to the end of the text."""
    since: int = 0
    """Tokens that the target has generated since it took over."""
    written: int = 0
    """Tokens of the text so far, the prompt left out."""
    switches: tuple[tuple[int, bool], ...] = ()
    """Index of each token that another one writes than the token before it, and whether the small model does."""

    @property
    def count(self) -> int:
        """Segments that were begun."""
        return (len(self.switches) + 1) // 2

    def after(self, token: Piece) -> Segments:
        """The state after one token more."""
        written, since = self.written + 1, self.since + (not self.is_relayed)
        if self.is_answer or (self.answer and token.contains_end(self.answer)):
            begun = () if self.is_relayed else ((written, True),)
            return replace(
                self, written=written, since=since, is_relayed=True, is_answer=True, switches=(*self.switches, *begun)
            )
        if self.is_relayed:
            is_switch = token.ends_sentence
        else:
            is_switch = since >= self.min_tokens and token.completes(self.cues) is not None
        if not is_switch:
            return replace(self, written=written, since=since)
        switches = (*self.switches, (written, not self.is_relayed))
        return replace(self, written=written, since=0, is_relayed=not self.is_relayed, switches=switches)


class Relay(LossyRule):
    """Accepts drafts within relayed segments as they are, and those outside by the acceptance rule."""

    def __init__(
        self, cues: Sequence[str], min_tokens: int = MIN_TOKENS, answer: str = "", name: str | None = None
    ):  # fmt: skip
        """Raises ConfigError for a cue without a letter, and for min_tokens below 1."""
        if min_tokens < 1:
            raise ConfigError(f"relay: min_tokens must be at least 1, got {min_tokens}")
        self.cues, self.min_tokens = tuple(cue.strip() for cue in cues), min_tokens
        if not all(self.cues):
            raise ConfigError(f"relay: a cue must be a word, got {[*cues]}; leave the empty ones out")
        self.answer = answer
        self.name = name or f"relay({len(self.cues)} cues, min_tokens={min_tokens}{_shown(answer)})"
        self.texts: dict[int, Segments] = {}
        """By slot."""
        self.tokens = self.relayed_tokens = self.segments = self.prefills = 0
        """Tokens emitted; those that the small model wrote; segments begun; passes of a text in which the target
        decided nothing."""
        self._taken: list[list[int]] = []
        self._emitted: list[list[int]] = []

    def allocate(self, target: Any, cache: Any) -> None:
        self._decode = decode_of(target, "relay")

    def admit(self, row: int, request: Request) -> None:
        self.texts[row] = Segments(self.cues, self.min_tokens, self.answer)

    def free(self, row: int) -> None:
        self.texts.pop(row, None)

    def begin(self, verified: Verified) -> None:
        self._verified = verified

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        allowed = possible(draft, self._verified.logits)
        paths: list[list[int]] = [[] for _ in draft.live]
        judged: tuple[list[list[int]], Accepted] | None = None
        while True:  # a cue among the accepted tokens makes the rest of the draft a segment, so more is taken each time
            walks = [self._walk(draft, b, path, allowed[b]) for b, path in enumerate(paths)]
            taken = [nodes for nodes, _ in walks]
            if judged is not None and judged[0] == taken:
                accepted = judged[1]
                break
            judged = taken, accept(*forced(draft, p, taken), streams)
            paths = judged[1].paths
        self._taken = taken
        is_whole = [after.is_relayed for _, after in walks]
        rest = [[] if whole else [-1] for whole in is_whole]
        self._emitted = [[*path, *rest_of_slot] for path, rest_of_slot in zip(paths, rest, strict=True)]
        return ending_in_draft(draft, accepted, is_whole)

    def _walk(self, draft: Draft, b: int, path: Sequence[int], allowed: Sequence[bool]) -> tuple[list[int], Segments]:
        """The nodes that the small model writes, along an accepted path and on from its end, and the state there."""
        window, segments = self._verified.texts[b][-WINDOW:], self.texts[self._verified.rows[b]]
        taken, at, steps = list[int](), -1, iter(path)
        while True:
            node = eldest_child(draft, b, at) if segments.is_relayed else next(steps, None)
            if node is None or (segments.is_relayed and not allowed[node]):
                return taken, segments
            if segments.is_relayed:
                taken.append(node)
                if next(steps, node) != node:  # in a tree, another branch was accepted: the rest is judged again
                    steps = iter(())
            window = [*window, draft.ids[b][node]]
            segments, at = segments.after(piece(self._decode, window, len(window) - 1)), node

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        return distances_of(node_distances(draft, p, is_by_q=True), self._emitted, self._taken)

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        for b, (row, tokens) in enumerate(zip(self._verified.rows, texts, strict=True)):
            count, before = len(accepted.paths[b]) + (accepted.next_tokens[b] >= 0), self.texts[row]
            for at in range(len(tokens) - count, len(tokens)):
                self.texts[row] = self.texts[row].after(piece(self._decode, tokens, at))
            taken = sum(node in self._taken[b] for node in self._emitted[b][:count])
            self.tokens += count
            self.relayed_tokens += taken
            self.prefills += taken == count
            self.segments += self.texts[row].count - before.count

    def figures(self) -> dict[str, float]:
        share = self.relayed_tokens / self.tokens if self.tokens else 0.0
        return {"relayed_share": share, "segments": self.segments, "prefills": self.prefills}


def _shown(answer: str) -> str:
    return f", answer={answer}" if answer else ""


def relay(cues: str | Path | Sequence[str], min_tokens: int = MIN_TOKENS, answer: str = "") -> Relay:
    """The rule with these cue words, or with the selected ones of a table that `outrider lab cues` wrote.  The small
    model also writes what follows the text `answer`.

    Raises ConfigError for a file that is not such a table.
    """
    if not isinstance(cues, str | Path):
        return Relay(cues, min_tokens, answer)
    name = f"relay(cues={cues}, min_tokens={min_tokens}{_shown(answer)})"
    return Relay(selected(cues), min_tokens, answer, name)


def selected(path: str | Path) -> list[str]:
    """The selected cues of a table.  Raises ConfigError for a file that is not one."""
    hint = "relay needs a table of cue words, which `outrider lab cues` writes"
    try:
        cues = read_object(Path(path))["selected"]
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror or error}); {hint}") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{path} has no list `selected`; {hint}") from None
    if not (isinstance(cues, list) and all(isinstance(cue, str) for cue in cues)):
        raise ConfigError(f"{path}: `selected` must be a list of texts, got {cues!r}; {hint}")
    return cues
