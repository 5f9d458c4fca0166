"""Calibrate a checkpoint's confidences on drafts it makes for held-out prompts.

Half of the prompts are used for fitting, the other half for evaluation.  M drafts, K slots of a block.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from outrider import checkpoint
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.errors import CheckpointError, DataError
from outrider.export.reading import import_folder
from outrider.generation import serve
from outrider.loading import find_folder, load_drafter
from outrider.nn.heads import ConfidenceHead
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import Target
from outrider.training.fitting.scaling import BINS, Outcomes, Scaling, scaling

MIN_DRAFTS = 20 * BINS
"""Minimum number of drafts per slot; with fewer, the fitted temperature would be noise."""


class _Noting(SamplingJudge):
    """The standard judge; it also stores the last draft."""

    draft: Draft
    rows: list[int]
    """Cache slots of that draft."""

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        self.draft, self.rows = draft, list(state.rows)
        return super().__call__(draft, scores, state)


def watch(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], *, max_new_tokens: int = 96,
    temperature: float = 1.0,
    seed: int = 0, slots: int = 16, on_prompt: Callable[[int], None] | None = None,
) -> Outcomes:  # fmt: skip
    """Continue every prompt; record each confidence and whether its token was accepted.

    on_prompt is called with the number of finished prompts.  In a draft that ends a text, slots up to the end count and
    later ones do not: if such drafts were dropped, end tokens would be counted only when rejected.
    """
    longest = max(map(len, prompts), default=0)
    if longest + max_new_tokens > target.spec.context:
        request = f"a prompt of {longest} tokens and {max_new_tokens} new ones"
        raise DataError(
            f"{request} do not fit into the target's context of {target.spec.context}; give shorter prompts, or fewer "
            "tokens"
        )
    requests = [
        Request(prompt, max_new_tokens, Sampling(temperature, seed=seed + i), detokenizer=target.detokenizer)
        for i, prompt in enumerate(prompts)
    ]
    judge, done, outcomes = _Noting(), 0, []
    for step in serve(target, requests, drafter, policy="fixed", judge=judge, slots=slots, shared_noise=False):
        draft, b = judge.draft, judge.rows.index(step.row)
        if max(draft.live) and (draft.confidence is None or draft.branches):
            raise DataError(
                "this drafter drafts a tree, or without confidences; calibrate at a temperature above 0, where it "
                "drafts a chain"
            )
        if draft.live[b] and draft.confidence is not None:
            promised = draft.confidence[b, : draft.live[b]].to("cpu", torch.float64, copy=True)
            # a text that ends within a draft gets no bonus token from the target
            outcomes.append((promised, len(promised), step.accepted, len(step.tokens) == step.accepted, step.request))
        done += step.finish_reason is not None
        if step.finish_reason is not None and on_prompt is not None:
            on_prompt(done)
    if not outcomes:
        raise DataError(
            f"{len(prompts)} prompts of {max_new_tokens} new tokens gave no draft to calibrate on; give more prompts "
            "and tokens"
        )
    promises, *columns = zip(*outcomes, strict=True)
    confidence = pad_sequence(list(promises), batch_first=True, padding_value=1.0)
    drafted, accepted, ended, numbers = (torch.tensor(column)[:, None] for column in columns)
    at = torch.arange(confidence.shape[1])
    survived = at < accepted
    return Outcomes(confidence, survived, (at < drafted) & (survived | ~ended), numbers[:, 0])


@dataclass(frozen=True)
class Calibration:
    """The scaling of a checkpoint and its errors on held-out prompts."""

    temperatures: list[float]
    """[K], as now stored in the checkpoint."""
    shifts: list[float]
    before: list[float]
    """[K] expected calibration error of accepting each slot, with the previous scaling."""
    after: list[float]
    noise: list[float]
    """[K] error of perfect confidences on the same number of drafts."""
    drafts: tuple[int, int]
    """For fitting, for evaluation."""
    prompts: tuple[int, int]
    temperature: float
    """Sampling temperature."""
    bins: int = BINS


def calibrate(
    folder: str | Path, target: TransformersTarget, prompts: Sequence[list[int]], *, out: Path | None = None,
    max_new_tokens: int = 96, temperature: float = 1.0, shifting: bool = True, seed: int = 0, slots: int = 16,
    on_prompt: Callable[[int], None] | None = None,
) -> Calibration:  # fmt: skip
    """Fit the confidence scaling of the checkpoint in `folder` on every second prompt, evaluate it on the others, and
    store it.

    out: write a new checkpoint instead, atomically; `folder` is then a published drafter (a folder or Hugging Face id)
    and stays unchanged.

    The checkpoint is rewritten atomically; only its scaling and `calibration` in its manifest change.  Raises
    CheckpointError if it has no confidence head, DataError if the prompts give too few drafts.
    """
    drafter = load_drafter(folder, target)
    name, head = head_of(drafter, folder)
    outcomes = watch(
        target, drafter, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, slots=slots,
        on_prompt=on_prompt,
    )  # fmt: skip
    scaled, judged = outcomes.of(outcomes.prompts % 2 == 0), outcomes.of(outcomes.prompts % 2 == 1)
    fewest = int(min(half.is_drafted.sum(0).min() for half in (scaled, judged)))
    if fewest < MIN_DRAFTS:
        drafts = f"got {fewest} from {len(prompts)} prompts with answers of {max_new_tokens} tokens"
        enough = -(-len(prompts) * MIN_DRAFTS // max(fewest, 1))
        required = f"each position of a block needs at least {MIN_DRAFTS} drafts"
        raise DataError(f"{required}, {drafts}; give at least {enough} prompts, or allow longer answers")
    change = scaling(scaled, shifting)
    better = judged.scaled(change)
    before = head.temperatures.double().cpu()
    scales = Scaling(before * change.temperatures, head.shifts.double().cpu() + before * change.shifts)
    calibration = Calibration(
        temperatures=scales.temperatures.tolist(), shifts=scales.shifts.tolist(),
        before=judged.errors(), after=better.errors(), noise=better.noise(),
        drafts=(len(scaled.confidence), len(judged.confidence)), prompts=(-(-len(prompts) // 2), len(prompts) // 2),
        temperature=temperature,
    )  # fmt: skip
    weights = {f"{name}.{key}": value.float() for key, value in scales._asdict().items()}
    _write(folder, out, target, weights, {"calibration": asdict(calibration)})
    return calibration


def _write(
    folder: str | Path, out: Path | None, target: TransformersTarget, weights: dict[str, Tensor], facts: dict[str, Any]
) -> None:  # fmt: skip
    """Amend a checkpoint, or make one from a published drafter."""
    if out is None:
        checkpoint.amend(folder, weights, facts)
        return
    import_folder(find_folder(folder), out, target)
    try:
        checkpoint.amend(out, weights, facts)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # an empty one would look calibrated
        raise


def head_of(drafter: Any, folder: str | Path) -> tuple[str, ConfidenceHead]:
    """Name and module of a loaded checkpoint's confidence head.  Raises CheckpointError if there is none."""
    model = getattr(drafter, "model", None)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, ConfidenceHead):
            return name, module
    raise CheckpointError(
        f"{folder} has no confidence head to calibrate; train one, such as dspark with confidence: true"
    )
