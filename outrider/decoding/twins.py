"""Twins of the law: other ways to the same distribution, each faster or more frugal where its conditions hold.

`accept` is the law; every function here emits what it emits, or the same distribution, and is tested against it.  Where a
draft does not meet a twin's conditions, the twin hands it to `accept`.  (Greedy decoding has its twin beside the law:
`accept_greedy`.)

    accept_chain     chains drawn from q        token for token `accept`, without a loop over nodes
    accept_block     chains drawn from q        never fewer tokens in expectation (block verification, arXiv 2403.10444)
    accept_coupled   any draft, q unread        the text hangs on the seed alone, not on the drafter (arXiv 2408.07978)
    accept_top1      deterministic drafts       from logits, rows that are walked through only, no softmax

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import Verdict, _is_distribution, _residual, accept
from outrider.decoding.draft import Draft
from outrider.decoding.sampling import _STEP, Purpose, Settings, Streams, _mix, _to_unit, distribution

# ── chains drawn from q ───────────────────────────────────────────────────────────────────────────────────────────────


def accept_chain(draft: Draft, p: Tensor, streams: Streams) -> Verdict:
    """The law for a chain with dense q, all nodes at once.  p [B, N+1, V]; the coins are those of `accept`.

    Equals `accept` token for token.  Trees and deterministic drafts go to `accept` itself.
    """
    if draft.q is None or not _is_sampled_chain(draft, p):
        return accept(draft, p, streams)
    nodes = _Nodes.of(draft, draft.q, p)
    went = nodes.live & nodes.known & (_coins(streams, draft.tokens.shape[1]) * nodes.q_own < nodes.p_own)
    accepted = went.long().cumprod(-1).sum(-1)
    return nodes.verdict(accepted, draft.q, p, None, streams)


def accept_block(draft: Draft, p: Tensor, streams: Streams) -> Verdict:
    """Block verification: the draft is judged as a whole, so a later token may save an earlier one.  p [B, N+1, V].

    With w the chance that the first i tokens stay, w[i] = min(1, w[i-1] p(x)/q(x)), the longest prefix whose coin falls below
    S[i] / (S[i] + 1 - w[i]) stays, where S[i] = sum(max(w[i] p - q, 0)) at the node behind it; the whole draft's below w.
    Then a token from norm(max(w p - q, 0)).  Exact for chains whose length is a stopping rule's, by induction from the end:
    the first i tokens stay with chance w[i], whether the draft ends there or goes on.  Never fewer tokens in expectation than
    `accept`, equal with one node or deterministic ones.  Trees and deterministic drafts go to `accept` itself.
    """
    if draft.q is None or not _is_sampled_chain(draft, p):
        return accept(draft, p, streams)
    nodes = _Nodes.of(draft, draft.q, p)
    stays = nodes.stays()
    before = torch.cat([torch.ones_like(stays[:, :1]), stays[:, :-1]], 1)
    q = _as_judged(draft.q, nodes.tokens, nodes.known, nodes.lawful, p.dtype)
    rest = (before[..., None].to(p.dtype) * p[:, :-1] - q).clamp(min=0).sum(-1).double()
    behind = torch.cat([rest[:, 1:], torch.zeros_like(rest[:, :1])], 1)
    total = behind + 1 - stays
    chance = torch.where(total > 0, behind / total, 1.0)
    length = torch.arange(1, stays.shape[1] + 1, device=stays.device)
    chance = torch.where(length == nodes.sizes[:, None], stays, chance)
    accepted = _longest(nodes.live & (_coins(streams, stays.shape[1]) < chance))
    return nodes.verdict(accepted, draft.q, p, before, streams)


def _longest(passed: Tensor) -> Tensor:
    """The longest prefix whose own coin passed, whatever the shorter ones' did.  passed [B, N]; returns [B], 0 for none."""
    return (passed * torch.arange(1, passed.shape[1] + 1, device=passed.device)).amax(-1)


def _is_sampled_chain(draft: Draft, p: Tensor) -> bool:
    """Whether every node is the child of the one before it and has a q over the target's vocabulary."""
    return draft.q is not None and not draft.branches and draft.tokens.numel() > 0 and draft.q.shape[-1] == p.shape[-1]


class _Nodes(NamedTuple):
    """A sampled chain's nodes as the law judges them: unlawful ones as deterministic.  All [B, N] but `sizes` [B]."""

    tokens: Tensor
    known: Tensor
    lawful: Tensor
    live: Tensor
    p_own: Tensor
    """The target's probability of the node's token; of token 0 where the id is outside the vocabulary."""
    q_own: Tensor
    """The drafter's; above 0."""
    sizes: Tensor

    @classmethod
    def of(cls, draft: Draft, q: Tensor, p: Tensor) -> _Nodes:
        known = (draft.tokens >= 0) & (draft.tokens < p.shape[-1])
        tokens = draft.tokens.where(known, 0)
        own = tokens[..., None]
        lawful = known & _is_distribution(q, tokens)
        q_own = torch.where(lawful, q.gather(-1, own)[..., 0].to(p.dtype), 1.0)
        sizes = draft.sizes.to(tokens.device)
        live = torch.arange(tokens.shape[1], device=tokens.device) < sizes[:, None]
        return cls(tokens, known, lawful, live, p[:, :-1].gather(-1, own)[..., 0], q_own, sizes)

    def stays(self) -> Tensor:
        """Chance w[i] that the first i tokens stay, i = 1 ... N: min(1, w[i-1] p/q), w[0] = 1.  [B, N] float64."""
        ratio = torch.where(self.known, self.p_own.double() / self.q_own.double(), 0.0)
        walk = ratio.log().cumsum(-1)
        # a sum held down at 0 is the sum less its highest point so far
        return (walk - walk.cummax(-1).values.clamp(min=0)).exp()

    def verdict(self, accepted: Tensor, q: Tensor, p: Tensor, weight: Tensor | None, streams: Streams) -> Verdict:
        """Keep the first `accepted` [B] nodes; the next token comes from norm(max(weight p - q, 0)), or p behind the last.

        weight [B, N], that of the row each node was drawn for; None is 1.
        """
        slots, at = torch.arange(len(accepted), device=accepted.device), accepted.clamp(max=self.tokens.shape[1] - 1)
        judged = _as_judged(q[slots, at], self.tokens[slots, at], self.known[slots, at], self.lawful[slots, at], p.dtype)
        left = p[slots, accepted]
        held = left if weight is None else left * weight[slots, at, None].to(p.dtype)
        left = torch.where((accepted < self.sizes)[:, None], _residual(held, judged), left)
        step = torch.arange(int(accepted.max()), device=accepted.device)
        path = step.where(step < accepted[:, None], -1)
        unlawful = (~self.lawful & self.live).sum(-1)
        return Verdict(path, accepted, streams.draw(left, accepted, Purpose.TARGET), unlawful)


def _as_judged(q: Tensor, tokens: Tensor, known: Tensor, lawful: Tensor, dtype: torch.dtype) -> Tensor:
    """q [..., V] with unlawful rows made one-hot at their own token, or 0 everywhere where the id is outside."""
    one_hot = torch.zeros_like(q, dtype=dtype).scatter_(-1, tokens[..., None], known[..., None].to(dtype))
    return torch.where(lawful[..., None], q.to(dtype), one_hot)


# ── the target's own draw, and whether the draft foresaw it ───────────────────────────────────────────────────────────


def accept_coupled(draft: Draft, p: Tensor, streams: Streams) -> Verdict:
    """Emit argmax(log p + g), with g the noise of (seed, output index): q is not read.  p [B, N+1, V].

    The text hangs on the seed alone: not on the drafter, its budget or what was kept before, and it is that of plain
    decoding.  For deterministic drafts `accept` does just this, in the form argmax(p / E) with g = -log E; here sampled ones
    are judged so too.  A drafter meets it most often that draws argmax(log q + g) with the same noise,
    `streams.draw(q, depth, Purpose.TARGET)`: at least (1 - TV) / (1 + TV) of the time.  Such a draft is for this rule only:
    `accept` would draw its correction from noise that has already chosen the draft.  `unlawful` counts ids alone.
    """
    slots = torch.arange(len(p), device=p.device)

    def choose(row: Tensor, depth: int) -> Tensor:
        # float64: two tokens whose log p + g are close must come out as they do in `Streams.draw`
        return (p[slots, row].double().log() + _gumbel(streams, depth, p.shape[-1])).argmax(-1)

    return _follow(draft, p.shape[-1], choose)


def accept_top1(draft: Draft, logits: Tensor, settings: Settings, streams: Streams) -> Verdict:
    """The law for deterministic drafts, chain or tree, from logits [B, N+1, V] of which only walked rows are read.

    The target's token is argmax(logits / temperature + g), which needs no softmax; where a slot cuts its tail (top-k, top-p
    and their kin) the rows go through `distribution`.  Equals `accept` token for token, but for ties within rounding.

    The trap (SGLang PR 26235 takes the drafter's softmax out where it drafts its top-1 token): q is then one-hot at that
    token.  Testing p against the drafter's soft q, or against a constant put in its place, and drawing the correction from p
    rather than from p without the token, are each biased at any temperature above 0.  Sample and match reads no q at all; a
    draft that brings one was not drafted by argmax and goes to `accept`.
    """
    if draft.q is not None:
        return accept(draft, distribution(logits, settings), streams)
    slots = torch.arange(len(logits), device=logits.device)
    return _follow(draft, logits.shape[-1], lambda row, depth: _draw(logits[slots, row], settings, streams, depth))


def _draw(logits: Tensor, settings: Settings, streams: Streams, depth: int) -> Tensor:
    """The target's own token from one row a slot.  logits [B, V]; returns [B]."""
    if settings.temperature is None:
        return logits.argmax(-1)
    if any(cut is not None for cut in settings[1:]):
        return streams.draw(distribution(logits, settings), depth, Purpose.TARGET)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    temperature = settings.temperature.to(logits.dtype)[:, None]
    # the largest is 0, so that a temperature near 0 overflows to -inf alone, as in `distribution`
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature == 0, 1.0, temperature)
    warm = (scaled + _gumbel(streams, depth, logits.shape[-1])).argmax(-1)
    return torch.where(temperature[:, 0] == 0, logits.argmax(-1), warm)


def _follow(draft: Draft, vocabulary: int, choose: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Walk down while a child is the token chosen, a depth at a time.  choose: rows [B] and their depth to tokens [B]."""
    slots, nodes = draft.tokens.shape
    order = torch.arange(nodes, device=draft.tokens.device)
    live = order < draft.sizes.to(order.device)[:, None]
    at = torch.full((slots,), -1, device=order.device)
    wanted = choose(at + 1, 0)
    steps: list[Tensor] = []
    for depth in range(1, nodes + 1):
        fits = live & (order > at[:, None]) & (draft.parents == at[:, None]) & (draft.tokens == wanted[:, None])
        went = fits.any(-1)
        if not went.any():
            break
        at = torch.where(went, fits.long().argmax(-1), at)
        steps.append(at.where(went, -1))
        wanted = torch.where(went, choose(at + 1, depth), wanted)
    path = torch.stack(steps, 1) if steps else torch.empty(slots, 0, dtype=torch.int64, device=order.device)
    outside = (draft.tokens < 0) | (draft.tokens >= vocabulary)
    return Verdict(path, (path >= 0).sum(-1), wanted, (outside & live).sum(-1))


# ── the noise of `Streams`, laid out otherwise ────────────────────────────────────────────────────────────────────────


def _coins(streams: Streams, nodes: int) -> Tensor:
    """[B, N] float64: column n is `streams.uniform(n, Purpose.ACCEPT, salt=n)`, the coin that `accept` throws at node n."""
    n = torch.arange(nodes, device=streams.index.device)
    flat = Streams(streams.seeds[:, None], streams.index[:, None])
    return _to_unit(_mix(flat._key(n, Purpose.ACCEPT) + n * _STEP))


def _gumbel(streams: Streams, depth: int, vocabulary: int) -> Tensor:
    """[B, V] float64: -log E for the E of `streams.draw(..., depth, Purpose.TARGET)`."""
    tokens = torch.arange(vocabulary, device=streams.index.device)
    exponential = -_to_unit(_mix(streams._key(depth, Purpose.TARGET)[:, None] + tokens * _STEP)).log()
    return -exponential.log()
