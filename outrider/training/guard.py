"""Protect a draft model from bad steps: skip them, then restore the last checkpoint, then end training.

A step is bad if its loss or gradient is not finite, or its loss is a spike: many times that of recent steps.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider import checkpoint
from outrider.errors import TrainingError
from outrider.nn.draft_model import Batch, DraftModel
from outrider.processes import ALONE, Processes
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers, unpack
from outrider.training.step import chunk_size, first_of

log = logging.getLogger(__name__)
REMEMBERED, FEWEST = 32, 8
"""Number of recent good losses that spikes are compared with; with fewer than FEWEST, no spike is detected."""


class Held:
    """An optimiser whose step is deferred until the loss is known to be good; see `Guard.meet`."""

    def __init__(self, optimizer: Optimizers):
        self.optimizer = optimizer
        self.lr: float | None = None
        """Learning rate of the pending step; None if there is none."""
        self.noise = torch.get_rng_state()
        """The random state before the step's first batch."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.lr, self.noise = None, torch.get_rng_state()

    def step(self, lr: float) -> None:
        self.lr = lr

    def take(self) -> None:
        """Apply the pending step."""
        assert self.lr is not None
        self.optimizer.step(self.lr)


class Guard:
    """Skips bad steps: they change nothing, and training continues with the next batch.

    After more than `train.skip` in a row, the weights and moments of the last checkpoint are restored; if that does not
    help, training ends.
    """

    def __init__(
        self, config: Config, place: Path, model: DraftModel, optimizer: Optimizers, processes: Processes = ALONE
    ):  # fmt: skip
        self.config, self.place, self.model, self.optimizer = config, place, model, optimizer
        self.processes = processes
        self.held: Any = Held(optimizer)
        """Passed to `step.optimise` in place of the optimiser."""

    def meet(self, figures: dict[str, Any], facts: dict[str, Any], batch: Callable[[], Iterator[Batch]]) -> None:
        """Judge a step of the training run described by these facts: apply it, or store in `figures` why it is `bad`.

        batch: returns the step's batches again, to find where it went wrong.
        Raises TrainingError after too many bad steps.
        """
        if "bad" in figures:
            figures["bad"] += first_of(self.processes, self._blame(batch))
        elif (spike := self._spike(figures["loss"], facts.get("losses", ()))) is not None:
            figures["bad"] = spike
        if "bad" not in figures:
            self.held.take()
            facts["losses"] = [*facts.get("losses", ()), figures["loss"]][-REMEMBERED:]
            for key in ("skipped", "restored"):
                facts.pop(key, None)
            return
        self._skip(f"step {facts['step']}: {figures['bad']}", facts)

    def _skip(self, problem: str, facts: dict[str, Any]) -> None:
        facts["skipped"], most = facts.get("skipped", 0) + 1, self.config.skip
        if facts["skipped"] <= most:
            log.warning("%s; the step is skipped", problem)
        elif most and "restored" not in facts and self._restore():
            facts["restored"], facts["skipped"] = facts["step"], 0
            log.warning("%s, and so were %d before it; the weights of the last checkpoint are restored", problem, most)
        else:
            rate = f"lower train.lr (now {facts['config']['lr']}) or inspect that tensor"
            raise TrainingError(f"{problem}. The last checkpoint is intact; {rate}")

    def _spike(self, loss: float, before: list[float]) -> str | None:
        """Why a finite loss is a spike; None if it is not."""
        if not self.config.spike or len(before) < FEWEST:
            return None
        usual = statistics.median(before)
        if usual <= 0 or loss <= self.config.spike * usual:
            return None
        local = self.processes.weights.local
        norms = {name: float(local(w.grad).norm()) for name, w in self.model.named_parameters() if w.grad is not None}
        largest = max(norms, key=lambda name: norms[name])
        return (
            f"the loss is {loss:.4g}, {loss / usual:.1f} times the median of the last {len(before)} (train.spike "
            f"{self.config.spike:g}); largest gradient: {largest}"
        )

    def _blame(self, batch: Callable[[], Iterator[Batch]]) -> str:
        """A note on the first module that turns finite values into non-finite ones; empty if there is none."""
        is_split = self.config.distributed == "fsdp" or self.config.sequence_parallel > 1
        if is_split and self.processes.count > 1:
            return ""  # a pass needs all processes, but the others may have seen nothing wrong
        after = torch.get_rng_state()
        torch.set_rng_state(self.held.noise)
        try:
            module = first_bad_module(self.model, batch(), self.config.dtype)
        finally:
            torch.set_rng_state(after)
        return "" if module is None else f"; first bad module: {module}"

    def _restore(self) -> bool:
        """Restore the last checkpoint's weights and moments.  Returns False if there is none with both."""
        if not checkpoint.is_there(self.place):
            return False
        state = checkpoint.load_state(self.place)
        if state is None:
            return False
        self.processes.weights.load(self.place, self.model)
        unpack(state, self.model, self.optimizer, self.processes.weights)
        return True


@torch.no_grad()
def first_bad_module(model: DraftModel, batches: Iterator[Batch], dtype: str) -> str | None:
    """Name and type of the first module whose output is not finite although its input is; None if there is none."""
    bad_modules: list[str] = []

    def looked(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
            # an attention mask is -inf at masked positions
            is_fed_bad = any(bool((v.isnan() | v.isposinf()).any()) for v in _floats((inputs, named)))
            if not bad_modules and not is_fed_bad and any(not bool(v.isfinite().all()) for v in _floats(output)):
                bad_modules.append(f"{name} ({type(module).__name__})")

        return look

    hooks = [
        module.register_forward_hook(looked(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        for batch in batches:
            with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                predictions = model.predict(batch)
                for _ in predictions.chunks(chunk_size(predictions)):
                    if bad_modules:
                        break
            if bad_modules:
                break
    finally:
        torch.clear_autocast_cache()  # it holds weights that were cast without a gradient
        for hook in hooks:
            hook.remove()
    return bad_modules[0] if bad_modules else None


def _floats(value: Any) -> Iterator[Tensor]:
    """All floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _floats(one)
    elif isinstance(value, Mapping):
        yield from _floats(tuple(value.values()))
