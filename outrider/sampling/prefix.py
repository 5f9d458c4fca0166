"""Every node is judged on its own prefix: logits are changed by what stands before a token, row by row of a drafted block.

A row's prefix is the prompt, the committed tokens, and the drafted tokens down to its node.  One penalty vector for all rows
of a block would be cheaper, and would not be the target's law.  In this order: logit bias, repetition penalty (prompt and
output, as transformers), frequency and presence penalty (output alone, as OpenAI and vLLM), bad words, end tokens before
`min_new_tokens`, the grammar, the request's processors.  What depends on no prefix follows in `sampling.distribution`.

B live slots, N drafted nodes, V vocabulary; a row of a slot is 0 for the anchor, n + 1 for node n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.errors import ConfigError
from outrider.sampling.settings import Sampling

Path = tuple[int, ...]


class Prefix:
    """One request's text so far, for the settings that look at it."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], ends: Iterable[int], device: torch.device | str = "cpu"):
        self.sampling = sampling
        self.tokens = list(prompt)
        self.start = len(prompt)
        self.ends = sorted(ends)
        self.counts = Counts(prompt, device) if sampling.penalises else None
        self.strength = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.biased = torch.tensor([token for token, _ in sampling.biases], dtype=torch.int64, device=device)
        self.bias = torch.tensor([value for _, value in sampling.biases], dtype=torch.float64, device=device)
        self._single = {word[0] for word in sampling.bad_words if len(word) == 1}
        self.banned = torch.tensor(sorted(self._single), dtype=torch.int64, device=device)
        self._words: dict[int, list[Path]] = {}
        """Bad words of several tokens, by the token before the last."""
        for word in sampling.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(tuple(word))
        self.automaton = None if sampling.grammar is None else sampling.grammar.start()
        self._possible: dict[Path, Tensor] = {}
        """What `possible` found since the last commit: drafter, pruning and judgement ask for the same paths."""

    def push(self, tokens: Sequence[int]) -> None:
        """These were committed."""
        self.tokens += tokens
        self._possible.clear()
        if self.automaton is not None:
            self.automaton.push(tokens)
        if self.counts is not None:
            self.counts.push(tokens)

    def possible(self, path: Path, vocabulary: int) -> Tensor:
        """Which tokens may follow this path by bad words, least length and grammar: [V] bool on the CPU, not to be changed."""
        if path not in self._possible:
            mask = torch.ones(vocabulary, dtype=torch.bool) if self.automaton is None else self.automaton.allowed(path)
            assert mask.shape == (vocabulary,), f"a grammar's mask is {tuple(mask.shape)}, the vocabulary {vocabulary}"
            banned = [*self._single, *self.forbidden(path, vocabulary)]
            self._possible[path] = mask.index_fill(0, torch.tensor(banned), False) if banned else mask
        return self._possible[path]

    def permits(self, path: Path, token: int, vocabulary: int) -> bool:
        """Whether `possible` has this token; where no grammar asks, no mask is made."""
        if self.automaton is not None:
            return bool(self.possible(path, vocabulary)[token])
        return token not in self._single and token not in self.forbidden(path, vocabulary)

    def forbidden(self, path: Path, vocabulary: int) -> list[int]:
        """Tokens that can't follow this path: the last of bad words of several tokens, and end tokens that come too early."""
        found: list[int] = []
        if self._words:
            last = path[-1] if path else self.tokens[-1]
            found += [word[-1] for word in self._words.get(last, ()) if self._ends_with(path, word[:-1])]
        if len(self.tokens) - self.start + len(path) < self.sampling.min_new_tokens:
            found += [token for token in self.ends if token < vocabulary]
        return found

    def _ends_with(self, path: Path, words: Path) -> bool:
        missing = len(words) - len(path)
        own = (*self.tokens[-missing:], *path) if missing > 0 else path[-len(words) :]
        return own == words


class Counts:
    """How often each token of prompt or output stands in the output: on the host, and as tensors that grow in place."""

    def __init__(self, prompt: Sequence[int], device: torch.device | str = "cpu"):
        self.output: Counter[int] = Counter()
        self._place = {token: n for n, token in enumerate(dict.fromkeys(prompt))}
        self._ids = torch.tensor(list(self._place), dtype=torch.int64, device=device)
        self._times = torch.zeros(len(self._place), dtype=torch.int64, device=device)

    @property
    def ids(self) -> Tensor:
        """[U] every token once."""
        return self._ids[: len(self._place)]

    @property
    def times(self) -> Tensor:
        """[U] how often each stands in the output."""
        return self._times[: len(self._place)]

    def push(self, tokens: Sequence[int]) -> None:
        self.output.update(tokens)
        changed = list(dict.fromkeys(tokens))
        places = [self._place.setdefault(token, len(self._place)) for token in changed]
        spare = len(self._place) - len(self._ids)
        if spare > 0:
            room = self._ids.new_zeros(spare + 64)
            self._ids, self._times = torch.cat([self._ids, room]), torch.cat([self._times, room])
        at = torch.tensor(places, dtype=torch.int64, device=self._ids.device)
        self._ids[at] = torch.tensor(changed, dtype=torch.int64, device=at.device)
        self._times[at] = torch.tensor([self.output[token] for token in changed], dtype=torch.int64, device=at.device)


def processed(logits: Tensor, draft: Draft, prefixes: Sequence[tuple[int, Prefix]]) -> Tensor:
    """Logits [B, N+1, V] with every row's own prefix taken into account, in one copy; the same tensor where no slot asks.

    prefixes: place in the batch and prefix of each slot that asks.  Rows behind an id outside the vocabulary, which can't be
    kept, are processed in part; so are rows behind a token that is already impossible, which no processor is asked about.
    """
    if not prefixes:
        return logits
    out = logits.clone() if logits.dtype == torch.float64 else logits.to(torch.float32, copy=True)
    tokens, parents, sizes = draft.tokens.tolist(), draft.parents.tolist(), draft.sizes.tolist()
    slots = [_Slot(b, prefix, _paths(tokens[b], parents[b], sizes[b], out.shape[-1])) for b, prefix in prefixes]
    _add_bias(out, [slot for slot in slots if slot.prefix.sampling.logit_bias])
    _penalise(out, [slot for slot in slots if slot.prefix.counts is not None])
    _ban(out, slots)
    _constrain(out, [slot for slot in slots if slot.prefix.automaton is not None], parents)
    for slot in slots:
        if slot.prefix.sampling.processors:
            _call_processors(out[slot.b], slot, parents[slot.b])
    return out


def emitting_rows(accepted: Accepted, b: int) -> list[int]:
    """The rows that predicted a slot's committed tokens: each token's is its predecessor's."""
    rows = accepted.rows(b)
    return rows if accepted.next_tokens[b] >= 0 else rows[:-1]


class _Slot(NamedTuple):
    """One slot that asks, and the drafted tokens down to each of its rows; None where a row can't be reached."""

    b: int
    prefix: Prefix
    paths: list[Path | None]

    def reached(self) -> list[tuple[int, Path]]:
        return [(row, path) for row, path in enumerate(self.paths) if path is not None]


def _paths(tokens: list[int], parents: list[int], size: int, vocabulary: int) -> list[Path | None]:
    paths: list[Path | None] = [()]
    for token, parent in zip(tokens[:size], parents[:size], strict=True):
        above = paths[parent + 1]
        paths.append(None if above is None or not 0 <= token < vocabulary else (*above, token))
    return paths


def _joined(slots: list[_Slot], column: Callable[[Prefix], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(place in the batch, place in `slots`, value), one entry for each entry of every slot's column."""
    columns = [column(slot.prefix) for slot in slots]
    sizes = torch.tensor([len(values) for values in columns], device=columns[0].device)
    which = torch.arange(len(slots), device=sizes.device).repeat_interleave(sizes)
    return torch.tensor([slot.b for slot in slots], device=sizes.device)[which], which, torch.cat(columns)


def _add_bias(out: Tensor, slots: list[_Slot]) -> None:
    if slots:
        where, _, ids = _joined(slots, lambda prefix: prefix.biased)
        bias = torch.cat([slot.prefix.bias for slot in slots])
        out[where, :, ids] = (out[where, :, ids] + bias[:, None]).to(out.dtype)


def _penalise(out: Tensor, slots: list[_Slot]) -> None:
    """Sparse: the tokens of each text once for all its rows, then those of each path, whose counts are that row's own."""
    if not slots:
        return
    strength = torch.tensor([slot.prefix.strength for slot in slots], dtype=torch.float64, device=out.device)
    where, which, ids = _joined(slots, lambda prefix: _counts(prefix).ids)
    times = _joined(slots, lambda prefix: _counts(prefix).times)[2]
    entries = [
        (k, slot.b, row, token, _counts(slot.prefix).output[token] + more)
        for k, slot in enumerate(slots)
        for row, path in slot.reached()
        for token, more in Counter(path).items()
    ]
    own, b, row, token, drafted = torch.tensor(entries, dtype=torch.int64, device=out.device).view(-1, 5).unbind(-1)
    before = out[b, row, token]
    out[where, :, ids] = _penalised(out[where, :, ids], times[:, None], strength[which, None])
    out[b, row, token] = _penalised(before, drafted, strength[own])


def _counts(prefix: Prefix) -> Counts:
    assert prefix.counts is not None
    return prefix.counts


def _penalised(scores: Tensor, times: Tensor, strength: Tensor) -> Tensor:
    """Scores of tokens that stand in the text.  strength [..., 3]: repetition, presence, frequency."""
    repetition, presence, frequency = strength.unbind(-1)
    damped = torch.where(scores < 0, scores * repetition, scores / repetition)
    return (damped - frequency * times - presence * (times > 0)).to(scores.dtype)


def _ban(out: Tensor, slots: list[_Slot]) -> None:
    where, _, ids = _joined(slots, lambda prefix: prefix.banned)
    if len(ids):
        out[where, :, ids] = -torch.inf
    entries = [
        (slot.b, row, token)
        for slot in slots
        for row, path in slot.reached()
        for token in slot.prefix.forbidden(path, out.shape[-1])
    ]
    if entries:
        b, row, token = torch.tensor(entries, device=out.device).unbind(-1)
        out[b, row, token] = -torch.inf


def _constrain(out: Tensor, slots: list[_Slot], parents: list[list[int]]) -> None:
    """Rows under an impossible token are left as they are: they can't be reached, and all of -inf would become NaN."""
    places: list[tuple[int, int]] = []
    masks: list[Tensor] = []
    vocabulary = out.shape[-1]
    for slot in slots:
        for row, path in slot.reached():
            above = slot.paths[parents[slot.b][row - 1] + 1] if row else None
            if row and (above is None or not slot.prefix.permits(above, path[-1], vocabulary)):
                slot.paths[row] = None
                continue
            places.append((slot.b, row))
            masks.append(slot.prefix.possible(path, vocabulary))
    if places:
        b, rows = torch.tensor(places, device=out.device).unbind(-1)
        out[b, rows] = out[b, rows].masked_fill(~torch.stack(masks).to(out.device), -torch.inf)


def _call_processors(rows: Tensor, slot: _Slot, parents: list[int]) -> None:
    """Each row [V] of `rows` on its own prefix, parents first; not where the token before is already impossible."""
    for row, path in slot.reached():
        if path and float(rows[parents[row - 1] + 1, path[-1]]) == -torch.inf:
            slot.paths[row] = None
            continue
        text = torch.tensor([[*slot.prefix.tokens, *path]], device=rows.device)
        scores = rows[row : row + 1].clone()
        for processor in slot.prefix.sampling.processors:
            scores = processor(text, scores)
            if scores.shape != rows[row : row + 1].shape:
                raise ConfigError(
                    f"processor {processor!r} returned scores of shape {tuple(scores.shape)}; wanted (1, {rows.shape[-1]})"
                )
        rows[row] = scores[0]


# ── nodes that can't be kept leave the draft before the target reads it ───────────────────────────────────────────────


def pruned(draft: Draft, prefixes: Sequence[tuple[int, Prefix]], seeded: Tensor | None, vocabulary: int) -> Draft:
    """The draft without what can't be kept; the same one where no slot bans anything.

    A token outside the grammar, the last of a bad word, an end token that comes too early: what stands under it is never
    reached, nor is what stands under an end token, and both go.  The impossible node itself goes where it is deterministic.  A
    drawn one stays, the last of its branch: its sure rejection turns p into the residual, and without it the next token would
    come from p, though it was drawn from q already (a total variation of 0.24 in the tests).

    prefixes: place in the batch and prefix of slots that may ask.  seeded [B] bool: slots whose every node is deterministic.
    """
    banning = [(b, prefix) for b, prefix in prefixes if prefix.sampling.bans]
    if not banning or not draft.tokens.shape[1]:
        return draft
    tokens, parents, sizes = draft.ids, draft.tree, draft.live
    kept = [list(range(size)) for size in sizes]
    for b, prefix in banning:
        reached = _reached(tokens[b][: sizes[b]], parents[b], prefix, vocabulary)
        is_seeded = seeded is not None and bool(seeded[b])
        kept[b] = [n for n, may_stay in reached if may_stay or not (is_seeded or _is_deterministic(draft, b, n))]
    if [len(nodes) for nodes in kept] == sizes:
        return draft
    return draft.only(kept)


def _reached(tokens: list[int], parents: Sequence[int], prefix: Prefix, vocabulary: int) -> list[tuple[int, bool]]:
    """One slot's nodes under none that is impossible or an end token, parents first, and whether each may stay as it is.

    An id outside the vocabulary may: the acceptance rule counts it.
    """
    found: list[tuple[int, bool]] = []
    paths: list[Path | None] = [()]
    for n, token in enumerate(tokens):
        above = paths[parents[n] + 1]
        paths.append(None)
        if above is None:
            continue
        is_known = 0 <= token < vocabulary
        is_possible = is_known and prefix.permits(above, token, vocabulary)
        if is_possible and token not in prefix.ends:
            paths[-1] = (*above, token)
        found.append((n, is_possible or not is_known))
    return found


def _is_deterministic(draft: Draft, b: int, n: int) -> bool:
    """A node without q, or with one that is one-hot at its own token."""
    if draft.q is None:
        return True
    q = draft.q[b, n]
    return bool(q[draft.tokens[b, n]] == 1) and int(q.count_nonzero()) == 1
