"""Acceptance on answers that a draft model was not trained on: what serving can be compared with.

On the answers that it learnt, a draft model is far better than on new ones, so acceptance there promises too much.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.decoding.accept import overlap
from outrider.nn.draft_model import DraftModel, FeatureSource
from outrider.training.step import chunk_size


@torch.no_grad()
def acceptance(model: DraftModel, source: FeatureSource, seed: int = 0) -> dict[str, list[float]]:
    """Acceptance by depth over one pass of `source`, given that all tokens before were accepted.

    `overlap`: mean of sum(min(p, q)) at temperature 1.  `agreement`: share of rows where both models have the same most
    probable token, which is acceptance at temperature 0.  `with_siblings`: share where the target's is the draft's or
    one of its runners-up at that depth, for drafters that draft some.
    """
    siblings = torch.tensor([*getattr(model.config, "siblings", ()), 0])
    state = torch.get_rng_state()
    torch.manual_seed(seed)  # which rows are drawn; the random state of the training is put back
    found: list[tuple[torch.Tensor, ...]] = []
    for step in range(source.steps_per_pass):
        batch = source.batch(step)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=source.manifest.dtype == "bfloat16"):
            rows = model.predict(batch)
            for draft, target, part in rows.chunks(chunk_size(rows)):
                counts = rows.weight[part] > 0
                q, p, depth = draft[counts].float(), target[counts].float(), rows.depth[part][counts]
                choice = p.argmax(-1, keepdim=True)
                rank = (q > q.gather(-1, choice)).sum(-1)
                allowed = siblings.to(depth.device)[depth.clamp(max=len(siblings) - 1)]
                found.append((depth, overlap(p.softmax(-1), q.softmax(-1)), rank == 0, rank <= allowed))
    torch.set_rng_state(state)
    depth, *columns = (torch.cat(column).cpu() for column in zip(*found, strict=True))
    at = depth.bincount().clamp(min=1)
    means = [(depth.bincount(values.double()) / at).tolist() for values in columns]
    named = dict(zip(("overlap", "agreement", "with_siblings"), means, strict=True))
    if not siblings.any():
        del named["with_siblings"]
    return {name: [round(value, 4) for value in values] for name, values in named.items()}


def facts(model: DraftModel, source: FeatureSource, temperature: float | None) -> dict[str, Any]:
    """`held_out` of metrics.jsonl.  temperature: at which the target drew these answers; None where it did not."""
    return {"answers": source.manifest.texts, "temperature": temperature, **acceptance(model, source)}
