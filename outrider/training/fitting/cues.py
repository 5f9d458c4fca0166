"""Cue words for `relay`: words after which a small model predicts the rest of the target's sentence with confidence.

RelayGen (arXiv 2602.06454).  The small model reads the target's own answers.  Its margin at a token is p1 - p2, the
difference between the probabilities of its two most likely tokens.  Margins from the token after a cue word to the end
of the sentence are pooled.  Cues are ranked by mean margin; a cue is selected if its mean is above that of all other
tokens.  Candidates are the words that begin the answers' sentences.  They and the selection rule are ours: the paper's
code prints means, deviations and differences, and its word lists are written by hand.

S tokens of a text, V vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import DataError
from outrider.generation import generate
from outrider.policies.sentences import Piece, decode_of, pieces
from outrider.targets.protocol import Target

OPENING = re.compile(r"(?:^|[.!?]\s+|\n\s*)(\w+)")
"""The first word of a sentence or line."""
MIN_COUNT = 3
"""Minimum number of occurrences of a selected cue."""


class Trace(NamedTuple):
    """One answer of the target, token by token."""

    pieces: list[Piece]
    margins: list[float]
    """The small model's p1 - p2 at the position that predicts each token."""


@dataclass(frozen=True)
class Cue:
    """A word and the small model's margins after it."""

    word: str
    count: int
    """Occurrences."""
    tokens: int
    """Tokens after these occurrences, up to the ends of their sentences."""
    mean: float
    """Mean margin at these tokens."""
    deviation: float
    standard_error: float
    difference: float
    """Mean of these margins minus the mean of all others."""


@dataclass(frozen=True)
class Table:
    """All words that occurred, highest mean margin first, and the selected ones."""

    cues: tuple[Cue, ...]
    selected: tuple[str, ...]
    mean: float
    """Mean of all margins."""
    tokens: int

    def save(self, path: str | Path, **facts: Any) -> None:
        """Write it as JSON, with additional facts."""
        text = json.dumps({"kind": "relay", **facts, **asdict(self)}, indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def ranked(traces: Iterable[Trace], words: Sequence[str] | None = None, min_count: int = MIN_COUNT) -> Table:
    """Rank words by the margins after them.  Raises DataError if the traces hold no tokens."""
    traces = list(traces)
    words = openings(traces, min_count) if words is None else list(words)
    pooled: dict[str, list[float]] = {word: [] for word in words}
    counts = dict.fromkeys(words, 0)
    every: list[float] = []
    for trace in traces:
        every += trace.margins
        for at, token in enumerate(trace.pieces):
            word = token.completes(words)
            if word is not None and (after := _sentence(trace, at + 1)):
                counts[word] += 1
                pooled[word] += after
    if not every:
        raise DataError("no answer contains a token, so cue words can't be ranked; give other prompts")
    cues = [_cue(word, counts[word], margins, every) for word, margins in pooled.items() if margins]
    cues.sort(key=lambda cue: (-cue.mean, cue.word))
    selected = tuple(cue.word for cue in cues if cue.difference > 0 and cue.count >= min_count)
    return Table(tuple(cues), selected, statistics.fmean(every), len(every))


def openings(traces: Sequence[Trace], min_count: int) -> list[str]:
    """Words that begin so many sentences of the traces, the most frequent first."""
    texts = ("".join(piece.added for piece in trace.pieces) for trace in traces)
    counts = Counter(word for text in texts for word in OPENING.findall(text) if not word.isdigit())
    return [word for word, count in counts.most_common() if count >= min_count]


def _sentence(trace: Trace, start: int) -> list[float]:
    """Margins from a token to the end of its sentence, or of the text."""
    end = next((at for at in range(start, len(trace.pieces)) if trace.pieces[at].ends_sentence), len(trace.pieces) - 1)
    return trace.margins[start : end + 1]


def _cue(word: str, count: int, margins: list[float], every: list[float]) -> Cue:
    mean, deviation = statistics.fmean(margins), statistics.pstdev(margins)
    others = len(every) - len(margins)  # a token after two cues in one sentence is pooled for both
    outside = (sum(every) - sum(margins)) / others if others > 0 else mean
    error = deviation / math.sqrt(len(margins))
    return Cue(word, count, len(margins), mean, deviation, error, mean - outside)


def calibrate(
    target: Target, small_model: Any, prompts: Sequence[list[int]], *, max_new_tokens: int = 256,
    words: Sequence[str] | None = None, min_count: int = MIN_COUNT, slots: int = 16,
    say: Callable[[int], None] = lambda done: None,
) -> Table:  # fmt: skip
    """Let the target answer prompts greedily, read the answers with the small model, and rank cue words.

    small_model: a target with the same vocabulary, such as a `small_model` drafter's `model`.  say is called with the
    number of answers read.  Raises ConfigError for a target without a tokenizer, DataError if no answer contains a
    token.
    """
    decode, traces = decode_of(target, "relay"), list[Trace]()
    answers = generate(target, [list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens, slots=slots)
    for prompt, answer in zip(prompts, answers, strict=True):
        text, start = [*prompt, *answer.tokens], len(prompt)
        answer_margins = margins(small_model, text, start)
        traces.append(Trace(pieces(decode, text, len(text) - len(answer_margins)), answer_margins))
        say(len(traces))
    return ranked(traces, words, min_count)


@torch.inference_mode()
def margins(model: Any, text: Sequence[int], start: int) -> list[float]:
    """p1 - p2 of a model at each token of a text from `start` (at least 1) on; only the last tokens if the text exceeds
    the model's context."""
    first = max(0, len(text) - model.spec.context)
    hidden: Tensor = model.read(torch.tensor([text[first:]], device=model.device), ())[0]
    p = model.head(hidden[0, max(0, start - first - 1) : -1]).float().softmax(-1)
    best = p.topk(2, -1).values
    gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
    return gaps
