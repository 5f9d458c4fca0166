"""Acceptance on answers that a draft model was not trained on, as a reference for serving.

A draft model is far better on its training answers than on new ones, so acceptance on them is too optimistic.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.decoding.accept import overlap
from outrider.nn.draft_model import DraftModel, FeatureSource
from outrider.training import losses
from outrider.training.config import Config
from outrider.training.rows import weights
from outrider.training.step import chunk_size


@torch.no_grad()
def acceptance(
    model: DraftModel, source: FeatureSource, seed: int = 0, config: Config | None = None
) -> dict[str, Any]:  # fmt: skip
    """Acceptance by depth over one pass of `source`, given that all earlier tokens were accepted.

    `overlap`: mean of sum(min(p, q)) at temperature 1.  `agreement`: share of rows where both models have the same most
    likely token, which is acceptance at temperature 0.  `with_siblings`: share where the target's token is the draft's
    or one of its siblings at that depth, for drafters with siblings.  The method's own figures are added.  config: the
    training's; if given, `divergence` is added, with the losses and weights that training reports on its own texts.
    """
    siblings = torch.tensor([*getattr(model.config, "siblings", ()), 0])
    state = torch.get_rng_state()
    torch.manual_seed(seed)  # for sampling rows; the training run's random state is restored below
    rows_by_depth: list[tuple[torch.Tensor, ...]] = []
    figures: dict[str, list[torch.Tensor]] = {}
    weighed = torch.zeros(2, dtype=torch.float64)
    """Sums of the weighted divergences and of the weights."""
    for step in range(source.steps_per_pass):
        batch = source.batch(step)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=source.manifest.dtype == "bfloat16"):
            rows = model.predict(batch)
            for draft, target, part in rows.chunks(chunk_size(rows)):
                counts, served = rows.weight[part] > 0, rows.served(part, draft)
                for name, values in rows.figures(part, draft, target).items():
                    figures.setdefault(name, []).append(values.double().cpu())
                q = (draft if served is None else served)[counts].float()
                p, depth = target[counts].float(), rows.depth[part][counts]
                choice = p.argmax(-1, keepdim=True)
                rank = (q > q.gather(-1, choice)).sum(-1)
                allowed = siblings.to(depth.device)[depth.clamp(max=len(siblings) - 1)]
                rows_by_depth.append((depth, overlap(p.softmax(-1), q.softmax(-1)), rank == 0, rank <= allowed))
                if config is not None:
                    each = losses.combine(config.loss, draft, target, rows.labels[part])
                    weight = weights(config.position, rows, part, draft)
                    weighed += torch.stack([(weight * each).sum(), weight.sum()]).double().cpu()
    torch.set_rng_state(state)
    depth, *columns = (torch.cat(column).cpu() for column in zip(*rows_by_depth, strict=True))
    at = depth.bincount().clamp(min=1)
    means = [(depth.bincount(values.double()) / at).tolist() for values in columns]
    named = dict(zip(("overlap", "agreement", "with_siblings"), means, strict=True))
    if not siblings.any():
        del named["with_siblings"]
    extra = {} if config is None else {"divergence": round(float(weighed[0] / weighed[1].clamp(min=1e-9)), 4)}
    extra |= {name: round(float(torch.cat(values).mean()), 4) for name, values in figures.items()}
    return extra | {name: [round(value, 4) for value in values] for name, values in named.items()}


def facts(
    model: DraftModel, source: FeatureSource, temperature: float | None, config: Config | None = None
) -> dict[str, Any]:  # fmt: skip
    """`held_out` of metrics.jsonl.  temperature: used by the target to sample these answers; None if it did not write
    them.  config: as in `acceptance`."""
    return {"answers": source.manifest.texts, "temperature": temperature, **acceptance(model, source, config=config)}
