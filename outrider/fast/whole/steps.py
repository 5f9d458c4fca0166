"""A whole step in one call: verify, accept, commit, observe and propose the next draft, without the host in between.

It is a graph on a CUDA device, and a package on a CPU if one was built.  Between two calls the host reads what was
committed and drafted, a policy decides how much of the draft is verified next, and slots enter and leave.  While a slot
is here, its state is in tensors; it is loaded from the drafter's memory, even in the middle of a text, and stored there
when the slot leaves, so that steps that need the host can be run in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.protocols import Drafter, NoStatic, Policy
from outrider.decoding.scheduler import draft_columns
from outrider.decoding.state import DecodeState, Judge
from outrider.fast import Graph, NotCompiled
from outrider.fast.gpu import cuda_graphs
from outrider.fast.gpu.cuda_graphs import CudaGraphs, Recorder
from outrider.fast.static.rules import RANKS, Kind
from outrider.fast.static.step import PendingDraft, SlotResult, StaticDraft, StaticDrafter, StaticSlots, StaticStep
from outrider.fast.static.target import StaticPass, with_buffers
from outrider.fast.whole.graphs import StepGraphs, rerunning
from outrider.fast.whole.package import LENGTH, SLOTS, CompiledWholeStep, StepPackage
from outrider.kernels import prepacked
from outrider.kernels.contents import Contents
from outrider.sampling.judge import SamplingJudge, error_of
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget


class WholeSteps:
    """Steps of one batch, each one call; a `decoding.loop.StepRunner`."""

    def __init__(
        self, target: Any, drafter: Drafter, slots: int, length: int, ends: frozenset[int], kernels: Any = None,
        recorder: Recorder | None = None, builds: bool = False,
    ):  # fmt: skip
        """length: tokens of the longest text.  kernels: as in `SamplingJudge.kernels`.  recorder: default CUDA graphs
        on a CUDA device; a CPU uses the package.  builds: whether missing packages are built.

        Raises NoStatic if steps of this target and drafter can't run on tensors only.
        """
        self.target, self.drafter, self.length, self.builds = target, drafter, length, builds
        self.recorder = recorder or (cuda_graphs.cuda_graph if target.device.type == "cuda" else None)
        self.kernels = kernels if target.device.type == "cuda" else None
        self.cache = with_buffers(target, target.allocate(slots, length + draft_columns(drafter)))
        drafter.refresh()
        self.memory: Any = drafter.allocate(self.cache)
        self.slots = StaticSlots.empty(slots, target.device)
        self.ends = torch.tensor(sorted(ends), dtype=torch.int64, device=target.device)
        self.halves: dict[bool, StaticStep] = {}
        """Steps for greedy requests and for others."""
        self.launchers: dict[Kind, StepGraphs | StepPackage | None] = {}
        self.kind: Kind | None = None
        """Kind of the slots that are currently here."""
        self.waiting: dict[int, PendingDraft] = {}
        """The pending draft of each slot that is here."""
        self._for: tuple[list[int] | None, Kind | None] = None, None
        """The live slots of the last call of `_kind`, and their kind."""
        self.drafts = self._half(is_greedy=True).drafter.nodes > 0
        """Whether there is a drafter; without one every step is plain, but still one call."""
        parts = (target.model, self.halves[True].drafter.model)
        self.contents = Contents(nn.ModuleList(each for each in parts if each is not None))
        self.contents.changes()

    def renew(self) -> None:
        """Adopt new weights of the drafter, with the same shapes; no slot may be here."""
        self.halves, self.launchers = {}, {}
        self._half(is_greedy=True)

    def serves(self, target: Any, drafter: Drafter, slots: int, length: int, ends: frozenset[int]) -> bool:
        """Whether it can run the steps of this batch, with no slot of another one left."""
        is_same = self.drafter is drafter or not (self.drafts or drafter.limit)
        is_same = is_same and self.target is target and self.ends.tolist() == sorted(ends)
        fits = is_same and len(self.slots.anchor) == slots and self.length >= length
        return fits and not self.waiting and not self.contents.changes()

    def end(self) -> None:
        """End the batch, and offer this runner to the next batch of its drafter, or of its target if there is no
        drafter."""
        self._for = None, None
        vars(self.drafter if self.drafts else self.target)["whole"] = self

    # ── which steps can be whole ──────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, state: DecodeState) -> bool:
        """Whether these live slots can run a whole step now.  If not, slots that are here leave."""
        kind = self._kind(state)
        if kind is None or self._launcher(kind) is None:
            self.leave(state)
            return False
        if self.kind is not None and kind.is_greedy != self.kind.is_greedy:
            self.leave(state)
        state.undrafted = {row for row in state.rows if row not in self.waiting} if self.waiting else set()
        return True

    def _kind(self, state: DecodeState) -> Kind | None:
        rows, kind = self._for
        if rows is not state.rows:
            requests, kind = [state.requests[row] for row in state.rows], None
            if is_usual(state.judge) and not any(len(request.prediction) for request in requests):
                kind = self._kind_of([request.sampling for request in requests], state.shared_noise)
            self._for = state.rows, kind
        return kind

    def made(self, samplings: Sequence[Sampling], shared_noise: bool) -> None:
        """Create the launcher for these requests.  Raises NoStatic if there can be none."""
        kind = self._kind_of(samplings, shared_noise)
        if kind is None:
            raise NoStatic("these requests need the host")
        self.launchers[kind] = self._made(kind)

    def _kind_of(self, samplings: Sequence[Sampling], shared_noise: bool) -> Kind | None:
        kind = Kind.of(samplings, shared_noise, self.target.spec.vocabulary)
        # without drafts, none is sampled with the target's noise
        return kind if kind is None or self.drafts else kind._replace(has_seeded=False)

    def _launcher(self, kind: Kind) -> StepGraphs | StepPackage | None:
        """The launcher for steps of this kind; None if there can be none."""
        if kind not in self.launchers:
            try:
                self.launchers[kind] = self._made(kind)
            except NoStatic:
                self.launchers[kind] = None
        return self.launchers[kind]

    def _made(self, kind: Kind) -> StepGraphs | StepPackage:
        half = self._half(kind.is_greedy)
        slots = replace(self.slots, has_seeded=kind.has_seeded)
        parts = half._replace(slots=slots, rule=kind.rule(self.kernels))
        if self.recorder is not None:
            return StepGraphs(parts, self.recorder)
        return StepPackage(parts, self._compiled(kind))

    def _half(self, is_greedy: bool) -> StaticStep:
        if is_greedy not in self.halves:
            target, vocabulary = self.target, self.target.spec.vocabulary
            with prepacked.enabled():
                drafter = self.drafter.static(self.memory, is_greedy) if self.drafter.limit else StaticDrafter()
            passes = StaticPass(target, self.cache, None if drafter.varies else drafter.parents, self.drafter.taps)
            if not passes.is_chain and target.spec.mode != "tree":
                raise NoStatic(f"{target.spec.name} verifies only chains, but the drafter's tree has branches")
            dtype = torch.float64 if target.spec.dtype == "float64" else torch.float32  # as in `distribution.wide`
            draft = StaticDraft(len(self.slots.anchor), drafter, vocabulary, target.device, dtype)
            rule = Kind(is_greedy, False).rule(self.kernels)
            self.halves[is_greedy] = StaticStep(self.slots, draft, passes, drafter, rule, self.ends)
        return self.halves[is_greedy]

    def _compiled(self, kind: Kind) -> CompiledWholeStep:
        """The package of these steps, stored in its model for later batches.  Raises NoStatic if there is none."""
        if not is_compiled(self.target) or kind.rank > max(RANKS):  # sorting all tokens is slow on a CPU
            raise NoStatic("such steps are not compiled")
        drafter = self._half(kind.is_greedy).drafter
        packages = vars(drafter.model or self.target.model).setdefault("whole_steps", {})
        key = kind, drafter.nodes, drafter.varies, tuple(drafter.parents)
        if key not in packages:
            # traced with few slots, in a separate batch
            few = WholeSteps(self.target, self.drafter, SLOTS, LENGTH, frozenset({0, 1}), recorder=rerunning)
            packages[key] = CompiledWholeStep(few._made(kind).parts, kind)
        try:
            packages[key].get(build=self.builds)
        except NotCompiled as error:
            raise NoStatic(str(error)) from error
        return packages[key]

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def step(
        self, policy: Policy, state: DecodeState, budget: Sequence[int]
    ) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
        """Like `loop.step`, after `prepare`. budget [B]: maximum number of nodes of each live slot."""
        had_drafts = bool(self.waiting)
        launcher = self._entered(state)
        drafter = launcher.parts.drafter
        sizes = self._sizes(launcher, policy, state, budget)
        nodes = max(sizes)
        columns = max(len(state.tokens[row]) for row in state.rows) + nodes
        packets = launcher.launch(columns, state.rows, nodes)
        outcomes = [SlotResult.read(packet, drafter) for packet in packets]
        accepted, errors = self._committed(state, sizes, outcomes)
        for row, outcome in zip(state.rows, outcomes, strict=True):
            self.waiting[row] = outcome.drafted
            self._note_length(row, state)
        state.timing.lap("verify")
        if had_drafts or not drafter.nodes:  # otherwise nothing could have been verified
            policy.observe(state, torch.tensor(sizes), accepted, state.timing)
        return accepted, errors

    def _entered(self, state: DecodeState) -> StepGraphs | StepPackage:
        """Let all live slots enter.  The first step of a new one verifies no draft."""
        kind = self._kind(state)
        launcher = self.launchers[kind] if kind is not None else None
        assert launcher is not None and kind is not None
        new = [row for row in state.rows if row not in self.waiting]
        if new or self.kind != kind:
            self._write_back()
        self.kind = kind
        if new:
            launcher.parts.drafter.enter(new, state)
        for row in new:
            self.slots.enter(row, state)
            launcher.parts.draft.sizes[row] = 0
            self.waiting[row] = PendingDraft(0, [0] * launcher.parts.drafter.nodes, (), None)
            self._note_length(row, state)
        return launcher

    def _sizes(
        self, launcher: StepGraphs | StepPackage, policy: Policy, state: DecodeState, budget: Sequence[int]
    ) -> list[int]:  # fmt: skip
        """How many nodes of each slot's draft are verified now; also sets them on the device."""
        drafts, drafter = [self.waiting[row] for row in state.rows], launcher.parts.drafter
        sizes = [min(draft.size, most) for draft, most in zip(drafts, budget, strict=True)]
        if any(sizes):
            confidence = None
            if drafter.has_confidence and self.drafter.confidence_before_draw:
                none = [0.0] * drafter.nodes
                confidence = torch.tensor([draft.confidence or none for draft in drafts])
            kept = policy.keep(state, torch.tensor(sizes), confidence)
            sizes = [min(pair) for pair in zip(sizes, kept.tolist(), strict=True)]
        if sizes != [draft.size for draft in drafts]:
            launcher.set_sizes(sizes, state.rows)
        return sizes

    def _committed(
        self, state: DecodeState, sizes: Sequence[int], outcomes: Sequence[SlotResult]
    ) -> tuple[Accepted, Mapping[int, Exception]]:  # fmt: skip
        """Commit what the device has committed, by the same rules."""
        drafts, nodes = [self.waiting[row] for row in state.rows], max(sizes)
        parents = [list(draft.parents[:nodes]) or [-1] * nodes for draft in drafts]
        verified = Draft(
            padded([draft.tokens[:nodes] for draft in drafts], 0), padded(parents, -1), torch.tensor(sizes),
            branches=any(above != list(range(-1, nodes - 1)) for above in parents),
        )  # fmt: skip
        on_device = Accepted(
            [each.path for each in outcomes],
            [each.next_token for each in outcomes],
            [each.invalid for each in outcomes],
        )
        accepted = state.commit(verified, on_device)
        errors: dict[int, Exception] = {}
        for b, (row, outcome) in enumerate(zip(state.rows, outcomes, strict=True)):
            count = len(accepted.paths[b]) + (accepted.next_tokens[b] >= 0)
            # a stop string ends it earlier; the device finds all other ends
            assert count == outcome.committed or state.finished[row] == "stop", "host and device disagree on an end"
            if outcome.is_wrong:
                where = f"after {len(state.tokens[row]) - count} or more tokens"
                errors[row] = error_of(float("nan"), False, state.requests[row], where)
        return accepted, errors

    # ── slots that leave ──────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def free(self, rows: Sequence[int]) -> None:
        """The requests in these slots have ended; called before their caches are freed."""
        gone = [row for row in rows if row in self.waiting]
        if gone:
            self._write_back()  # before anything else writes to the tensors, such as the next request's prompt
        for row in gone:
            self.slots.leave(row)
            del self.waiting[row]

    @torch.inference_mode()
    def leave(self, state: DecodeState) -> None:
        """Store all slots in the drafter's memory, and drop their drafts."""
        state.undrafted = set()
        if self.kind is None:
            return
        self._write_back()
        self.halves[self.kind.is_greedy].drafter.leave(list(self.waiting), state)
        for row in self.waiting:
            self.slots.leave(row)
        self.waiting, self.kind = {}, None

    def _write_back(self) -> None:
        launcher = None if self.kind is None else self.launchers[self.kind]
        if launcher is not None:
            launcher.write_back()

    def _note_length(self, row: int, state: DecodeState) -> None:
        """Set the length of a text in the caches, so that slots can be moved.  The target has not read its anchor, but
        a drafter may have."""
        assert self.kind is not None
        length = len(state.tokens[row])
        self.cache.lengths[row] = length - 1
        for there in self.halves[self.kind.is_greedy].drafter.caches:
            there.cache.lengths[row] = length


def is_usual(judge: Judge) -> bool:
    """Whether a judge accepts by the usual rule and does not inspect drafts or scores."""
    kind = type(judge)
    is_own = isinstance(judge, SamplingJudge) and judge.rule is None
    return is_own and kind.__call__ is SamplingJudge.__call__ and kind.observe is SamplingJudge.observe


def is_compiled(target: Any) -> bool:
    """Whether this target's passes are a package or captured, and its `verify` is not replaced."""
    is_own = isinstance(target, TransformersTarget) and "verify" not in vars(target)
    return is_own and isinstance(target.step.graph, Graph | CudaGraphs)
