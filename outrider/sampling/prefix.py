"""Settings that depend on the prefix, applied to every row of a drafted block separately.

A row's prefix is the prompt, the committed tokens, and the drafted tokens down to its node.  One penalty vector for all
rows of a block would be cheaper, but would not be the target's distribution.  The order is: logit bias, repetition
penalty (prompt and output, as in transformers), frequency and presence penalty (output only, as in OpenAI's API and
vLLM), bad words, end tokens before `min_new_tokens`, the grammar, the request's processors.  Settings that do not
depend on a prefix follow in `sampling.distribution`.

B live slots, N drafted nodes, V vocabulary; a row of a slot is 0 for the anchor, n + 1 for node n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.errors import ConfigError
from outrider.sampling.settings import Sampling

Path = tuple[int, ...]


class Prefix:
    """One request's text so far, for the settings that depend on it."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], ends: Iterable[int], device: torch.device | str = "cpu"
    ):
        self.sampling = sampling
        self.tokens = list(prompt)
        self.start = len(prompt)
        self.ends = sorted(ends)
        self.penalties = Penalties(sampling, prompt, device) if sampling.penalises else None
        self._single = {word[0] for word in sampling.bad_words if len(word) == 1}
        self._words: dict[int, list[Path]] = {}
        """Bad words of several tokens, by their second-to-last token."""
        for word in sampling.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        bias = dict(sampling.biases) | dict.fromkeys(self._single, -math.inf)
        self.biased = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)
        """Added to the logits of `biased` after any prefix; -inf for bad words of one token."""
        self.automaton = None if sampling.grammar is None else sampling.grammar.start()
        self._possible: dict[Path, Tensor] = {}
        """Results of `possible` since the last commit: drafter, pruning and judge use the same paths."""

    def push(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self.tokens += tokens
        self._possible.clear()
        if self.automaton is not None:
            self.automaton.push(tokens)
        if self.penalties is not None:
            self.penalties.push(tokens)

    def possible(self, path: Path, vocabulary: int) -> Tensor:
        """The tokens that may follow this path by bad words, minimum length and grammar: [V] bool on the CPU,
        read-only."""
        if path not in self._possible:
            mask = torch.ones(vocabulary, dtype=torch.bool) if self.automaton is None else self.automaton.allowed(path)
            assert mask.shape == (vocabulary,), f"a grammar's mask is {tuple(mask.shape)}, the vocabulary {vocabulary}"
            banned = [*self._single, *self.forbidden(path, vocabulary)]
            self._possible[path] = mask.index_fill(0, torch.tensor(banned), False) if banned else mask
        return self._possible[path]

    def permits(self, path: Path, token: int, vocabulary: int) -> bool:
        """Whether this token is `possible`; builds no mask without a grammar."""
        if self.automaton is not None:
            return bool(self.possible(path, vocabulary)[token])
        return token not in self._single and token not in self.forbidden(path, vocabulary)

    def forbidden(self, path: Path, vocabulary: int) -> list[int]:
        """Tokens that can't follow this path: the last token of bad words, and premature end tokens."""
        words = self._words.get(path[-1] if path else self.tokens[-1], ()) if self._words else ()
        forbidden_ids = [word[-1] for word in words if self._ends_with(path, word[:-1])]
        if len(self.tokens) - self.start + len(path) < self.sampling.min_new_tokens:
            forbidden_ids += [token for token in self.ends if token < vocabulary]
        return forbidden_ids

    def _ends_with(self, path: Path, words: Path) -> bool:
        return (*self.tokens[-len(words) :], *path)[-len(words) :] == words


class Penalties:
    """How often each token of prompt or output occurs in the output, and the penalties for it."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], device: torch.device | str = "cpu"):
        self.strength = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.output: Counter[int] = Counter()
        self._place = {token: n for n, token in enumerate(dict.fromkeys(prompt))}
        self.ids = torch.tensor(list(self._place), dtype=torch.int64, device=device)
        """[U] the distinct tokens."""
        self.times = torch.zeros_like(self.ids)
        """[U] how often each occurs in the output."""

    def push(self, tokens: Sequence[int]) -> None:
        self.output.update(tokens)
        new = [token for token in dict.fromkeys(tokens) if token not in self._place]
        self._place |= {token: n for n, token in enumerate(new, len(self._place))}
        self.ids = torch.cat([self.ids, self.ids.new_tensor(new)])
        self.times = torch.cat([self.times, self.times.new_zeros(len(new))])
        at = self.ids.new_tensor([self._place[token] for token in tokens])
        self.times.index_add_(0, at, torch.ones_like(at))


Row = tuple[int, Prefix, int, Path]
"""A reachable row: the index and prefix of its slot, its number in the slot, the drafted tokens down to it."""


def processed(logits: Tensor, draft: Draft, prefixes: Sequence[tuple[int, Prefix]]) -> Tensor:
    """Logits [B, N+1, V] after the settings of every row's own prefix, in one copy; the same tensor without such slots.

    prefixes: index in the batch and prefix of each such slot.  Unreachable rows are only partly processed, without
    calling processors.
    """
    if not prefixes:
        return logits
    out = logits.clone() if logits.dtype == torch.float64 else logits.to(torch.float32, copy=True)
    rows: list[Row] = []
    for b, prefix in prefixes:
        rows.append((b, prefix, 0, ()))
        for n, path, may_stay in _reached(draft, b, prefix, out.shape[-1]):
            # nothing may follow a token outside the grammar: its row would be all -inf and become NaN
            if path is not None and (may_stay or prefix.automaton is None):
                rows.append((b, prefix, n + 1, path))
    _add_bias(out, prefixes)
    _penalise(out, {b: prefix.penalties for b, prefix in prefixes if prefix.penalties is not None}, rows)
    _ban(out, rows)
    _call_processors(out, draft, rows)
    return out


def pruned(draft: Draft, banning: Sequence[tuple[int, Prefix]], seeded: Tensor | None, vocabulary: int) -> Draft:
    """The draft without nodes that can't be accepted; the same one if no slot bans anything.

    Impossible tokens are those outside the grammar, the last token of a bad word, and premature end tokens.  Nodes
    below them, or below any end token, can't be reached and are removed.  An impossible node is itself removed if it is
    deterministic.  A sampled one stays as the last of its branch: its certain rejection turns p into the residual;
    without it the next token would come from p although a token was already sampled from q (a total variation of 0.24
    in the tests).

    banning: index in the batch and prefix of each slot that bans.  seeded [B] bool: slots whose every node is
    deterministic.
    """
    if not banning or not draft.tokens.shape[1]:
        return draft
    remaining = [list(range(size)) for size in draft.live]
    for b, prefix in banning:
        q = None if seeded is not None and bool(seeded[b]) else draft.q
        nodes = _reached(draft, b, prefix, vocabulary)
        remaining[b] = [
            n for n, _, stays in nodes if stays or not (q is None or is_one_hot(q[b, n], draft.tokens[b, n]))
        ]
    return draft if list(map(len, remaining)) == draft.live else draft.only(remaining)


def _reached(draft: Draft, b: int, prefix: Prefix, vocabulary: int) -> Iterator[tuple[int, Path | None, bool]]:
    """One slot's nodes that are not below an impossible or end token, parents first: number, the tokens down to it, and
    whether it may stay.  An id outside the vocabulary has no path and may stay: the acceptance rule counts it."""
    paths: dict[int, Path] = {-1: ()}
    for n, token in enumerate(draft.ids[b][: draft.live[b]]):
        above = paths.get(draft.tree[b][n])
        if above is None:
            continue
        if not 0 <= token < vocabulary:
            yield n, None, True
            continue
        path, is_possible = (*above, token), prefix.permits(above, token, vocabulary)
        if is_possible and token not in prefix.ends:
            paths[n] = path
        yield n, path, is_possible


def is_one_hot(q: Tensor, tokens: Tensor) -> Tensor:
    """Whether q [..., V] is 1 at its own token and 0 elsewhere.  [...] bool."""
    q_of_token = q.gather(-1, tokens.clamp(0, q.shape[-1] - 1)[..., None])[..., 0]
    return (q_of_token == 1) & (q.count_nonzero(dim=-1) == 1)


def _joined(columns: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """(index in the batch, value), one entry for each value of every slot's column."""
    slots, values = zip(*columns, strict=True)
    where = torch.tensor(slots).repeat_interleave(torch.tensor([len(column) for column in values]))
    return where.to(values[0].device), torch.cat(values)


def _add_bias(out: Tensor, prefixes: Sequence[tuple[int, Prefix]]) -> None:
    where, ids = _joined([(b, prefix.biased) for b, prefix in prefixes])
    if len(ids):
        bias = torch.cat([prefix.bias for _, prefix in prefixes])[:, None]
        # not the sum for a banned token: with +inf it would be NaN
        out[where, :, ids] = torch.where(bias.isinf(), bias, out[where, :, ids] + bias).to(out.dtype)


def _penalise(out: Tensor, penalties: dict[int, Penalties], rows: list[Row]) -> None:
    """Works sparsely: the tokens of each text once for all its rows, then those of each path with the counts of its
    row."""
    if not penalties:
        return
    where, ids = _joined([(b, penalty.ids) for b, penalty in penalties.items()])
    times = torch.cat([penalty.times for penalty in penalties.values()])
    strength = out.new_ones(len(out), 3, dtype=torch.float64)
    strength[list(penalties)] = strength.new_tensor([penalty.strength for penalty in penalties.values()])
    entries = [
        (b, row, token, penalties[b].output[token] + more)
        for b, _, row, path in rows
        if b in penalties
        for token, more in Counter(path).items()
    ]
    b, row, token, drafted = torch.tensor(entries, dtype=torch.int64, device=out.device).view(-1, 4).unbind(-1)
    before = out[b, row, token]
    out[where, :, ids] = _penalised(out[where, :, ids], times[:, None], strength[where, None])
    out[b, row, token] = _penalised(before, drafted, strength[b])


def _penalised(scores: Tensor, times: Tensor, strength: Tensor) -> Tensor:
    """Scores of tokens that occur in the text.  strength [..., 3]: repetition, presence, frequency."""
    repetition, presence, frequency = strength.unbind(-1)
    damped = torch.where(scores < 0, scores * repetition, scores / repetition)
    return (damped - frequency * times - presence * (times > 0)).to(scores.dtype)


def _ban(out: Tensor, rows: list[Row]) -> None:
    """Sets tokens to -inf that bad words of several tokens, the minimum length or the grammar forbid."""
    entries = [(b, row, token) for b, prefix, row, path in rows for token in prefix.forbidden(path, out.shape[-1])]
    if entries:
        b, at, token = torch.tensor(entries, device=out.device).unbind(-1)
        out[b, at, token] = -torch.inf
    ruled = [(b, prefix, row, path) for b, prefix, row, path in rows if prefix.automaton is not None]
    if ruled:  # all rows' masks go to the device at once
        b, at = torch.tensor([(b, row) for b, _, row, _ in ruled], device=out.device).unbind(-1)
        possible = torch.stack([prefix.possible(path, out.shape[-1]) for _, prefix, _, path in ruled])
        out[b, at] = out[b, at].masked_fill(~possible.to(out.device), -torch.inf)


def _call_processors(out: Tensor, draft: Draft, rows: list[Row]) -> None:
    """Call the processors for each row on its prefix, parents first, but not after an impossible token."""
    for b, prefix, row, path in rows:
        processors = prefix.sampling.processors
        if not processors or (path and float(out[b, draft.tree[b][row - 1] + 1, path[-1]]) == -torch.inf):
            continue
        text = torch.tensor([[*prefix.tokens, *path]], device=out.device)
        scores = out[b, row : row + 1].clone()
        for processor in processors:
            scores = processor(text, scores)
            if scores.shape != out[b, row : row + 1].shape:
                raise ConfigError(
                    f"processor {processor!r} returned scores of shape {tuple(scores.shape)}; expected "
                    f"(1, {out.shape[-1]})"
                )
        out[b, row] = scores[0]
