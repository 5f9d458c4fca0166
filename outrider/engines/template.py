"""Files of a deployment, from the templates next to this file (jinja2).  No torch."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

SHARES = (0.5, 0.95, 0.99)


def rendered(template: str, **values: Any) -> str:
    """A template with its values filled in.  Untrusted text goes through `json`, which is also valid YAML."""
    return TEMPLATES.get_template(template).render(values)


def _quantiles(histogram: str | None) -> list[tuple[str, str]]:
    """(PromQL, legend) for each quantile of a histogram; empty if there is no histogram."""
    ask = "histogram_quantile({share}, sum by (le) (rate({name}_bucket[5m])))"
    return [
        (ask.format(share=share, name=histogram), f"p{share * 100:.0f}") for share in SHARES if histogram is not None
    ]


TEMPLATES = Environment(
    loader=PackageLoader("outrider.engines"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True,
)  # fmt: skip
TEMPLATES.filters |= {"json": json.dumps, "repr": repr, "quantiles": _quantiles}
