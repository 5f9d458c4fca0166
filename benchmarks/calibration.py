"""How far a drafter's confidences are from what is kept, before and after scaling, on prompts not used for it.

    python benchmarks/calibration.py --checkpoint runs/NAME/checkpoint [--prompts 800] [--out FILE]

The drafter is served at temperature 1 on held-out prompts.  The error is the expected calibration error of reaching and
keeping each slot, over 15 bins of equally many drafts; `noise` is what perfect promises would show on so few drafts, by
outcomes drawn from the promises.  Every second prompt is scaled on, the others are judged.  The checkpoint is read, not
written; a scaling that it has counts as part of what it promises.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from batch_time import prompts_of, write

from outrider import load_drafter, load_target
from outrider.training.fitting.calibrate import head_of, watch
from outrider.training.fitting.scaling import BINS, Outcomes, Scaling, scaling

WANTED = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="of a drafter with a confidence head")
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--raw", action="store_true", help="forget the scaling that the checkpoint has")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = load_target("demo")
    drafter = load_drafter(options.checkpoint, target)
    _, head = head_of(drafter, options.checkpoint)
    if options.raw:
        head.temperatures.fill_(1)
        head.shifts.fill_(0)

    def say(done: int) -> None:
        if done % 50 == 0:
            print(f"prompt {done} of {options.prompts}", file=sys.stderr, flush=True)

    prompts = prompts_of(target, options.prompts)
    found = watch(target, drafter, prompts, max_new_tokens=options.tokens, slots=options.slots, on_prompt=say)
    scaled, judged = found.of(found.prompts % 2 == 0), found.of(found.prompts % 2 == 1)
    ways = {"as_it_is": judged}
    for name, shifting in (("temperatures_alone", False), ("temperatures_and_shifts", True)):
        ways[name] = judged.scaled(scaling(scaled, shifting))
    errors = {name: told(outcomes) for name, outcomes in ways.items()}
    best = errors["temperatures_and_shifts"]["mean_error"]
    promises = [
        {"promise": "mean error over slots after scaling", "wanted": WANTED, "found": best, "holds": best <= WANTED},
    ]
    write(
        {
            "promises": promises,
            "bins": BINS, "temperature": 1.0, "checkpoint_scaling": said(Scaling(head.temperatures, head.shifts)),
            "drafts": {"scaled_on": len(scaled.confidence), "judged_on": len(judged.confidence)},
            "survival": [share(judged, k) for k in range(judged.known.shape[1])],
            "scaling": {name: said(scaling(scaled, "shifts" in name)) for name in ways if name != "as_it_is"},
            "errors": errors,
        },
        options.out,
    )  # fmt: skip


def told(outcomes: Outcomes) -> dict[str, Any]:
    errors, noise = outcomes.errors(), outcomes.noise()
    means = {"mean_error": sum(errors) / len(errors), "mean_noise": sum(noise) / len(noise)}
    return {"by_slot": errors, "noise_by_slot": noise, **means}


def said(found: Scaling) -> dict[str, list[float]]:
    return {name: [round(value, 4) for value in column.tolist()] for name, column in found._asdict().items()}


def share(outcomes: Outcomes, slot: int) -> float:
    seen: torch.Tensor = outcomes.seen[:, slot]
    return float(outcomes.survived[seen, slot].double().mean())


if __name__ == "__main__":
    main()
