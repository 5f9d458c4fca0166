"""Steps whose loss or gradient is not finite: skipped, then the last checkpoint, then the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider import checkpoint
from outrider.errors import TrainingError
from outrider.nn.draft_model import DraftModel
from outrider.training.optimizers import Optimizers, unpack

log = logging.getLogger(__name__)


class Guard:
    """A bad step changes nothing, and training goes on with the next batch.

    After more than `most` in a row the weights and moments of the last checkpoint are taken again; where that does not
    help either, training ends.
    """

    def __init__(self, most: int, place: Path, model: DraftModel, optimizer: Optimizers):
        self.most, self.place, self.model, self.optimizer = most, place, model, optimizer

    def meet(self, found: Mapping[str, Any], facts: dict[str, Any]) -> None:
        """A step of the training that these facts describe found this.  Raises TrainingError for one bad step too
        many."""
        if "bad" not in found:
            for key in ("skipped", "restored"):
                facts.pop(key, None)
            return
        problem = f"step {facts['step']}: {found['bad']}"
        facts["skipped"] = facts.get("skipped", 0) + 1
        if facts["skipped"] <= self.most:
            log.warning("%s; the step is skipped", problem)
        elif self.most and "restored" not in facts and self._restore():
            facts["restored"], facts["skipped"] = facts["step"], 0
            log.warning("%s, and %d before it; the weights of the last checkpoint are taken again", problem, self.most)
        else:
            rate = f"lower train.lr (now {facts['config']['lr']}) or look at that tensor"
            raise TrainingError(f"{problem}. The last checkpoint is intact; {rate}")

    def _restore(self) -> bool:
        """Take the last checkpoint's weights and moments; whether there was one with both."""
        if not (checkpoint.whole(self.place) / checkpoint.MANIFEST).exists():
            return False
        state = checkpoint.load_state(self.place)
        if state is None:
            return False
        checkpoint.load_weights(self.place, self.model)
        unpack(state, self.model, self.optimizer)
        return True
