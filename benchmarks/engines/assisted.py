"""transformers' own assisted generation on the demo pair: the drafter as `outrider export --to transformers` writes it.

    python benchmarks/engines/assisted.py [--prompts 12] [--new 96] [--out benchmarks/results/assisted.json]

Compared are token ids of greedy texts: `generate` with the exported drafter as assistant, `generate` without, and ours
with the same drafter.  Where two texts part, the gap between the target's two best logits there says whether rounding
could do it. `outrider verify-export --engine transformers` does so with any small_model.  No times are taken.  Exits
with 1 on a difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engines.llama_cpp import LENGTH, ROUNDING, gap  # noqa: E402
from benchmarks.replay import progress_bar, provenance, publish  # noqa: E402
from outrider import demo, generate, load_drafter, load_target  # noqa: E402
from outrider.checkpoint import save  # noqa: E402
from outrider.config import build  # noqa: E402
from outrider.drafters import find  # noqa: E402
from outrider.engines.verify.transformers import continued, loaded, recorded  # noqa: E402
from outrider.export.writing import export_folder  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(wanted.threads)
    target = load_target("demo", dtype="float32", compile=False)
    prompts = [target.encode(text) for _, text in demo.prompts("held_out", wanted.prompts)]
    with tempfile.TemporaryDirectory() as place:
        checkpoint, folder = written(target, Path(place))
        assistant = loaded(folder, LENGTH)
        ours = generate(target, prompts, load_drafter(checkpoint, target), max_new_tokens=wanted.new, policy="fixed")
    parted: list[dict[str, Any]] = []
    with recorded() as rounds, progress_bar() as bar:
        for number, prompt in enumerate(bar.track(prompts)):
            texts = {"assisted": continued(target, prompt, wanted.new, assistant),
                     "plain": continued(target, prompt, wanted.new), "ours": ours[number].tokens}  # fmt: skip
            for name in ("plain", "ours"):
                parted += difference(target, number, prompt, texts["assisted"], texts[name], name)
    ties = sum(one["gap"] < ROUNDING for one in parted)
    drafted, kept = (sum(getattr(one, field) for one in rounds) for field in ("drafted", "accepted"))
    publish(
        {
            **provenance(time.monotonic() - began), "prompts": len(prompts), "new_tokens": wanted.new,
            "draft_length": LENGTH,
            "compared_tokens": 2 * sum(len(one.tokens) for one in ours), "ties": ties, "mismatches": len(parted) - ties,
            "parted": parted,
            "assisted": {"steps": len(rounds), "drafted": drafted, "kept": kept,
            "tokens_per_step": 1 + kept / len(rounds)},
            "ours": {"steps": sum(one.steps for one in ours), "kept": sum(sum(one.accepted) for one in ours),
                     "tokens_per_step": 1 + sum(sum(one.accepted) for one in ours) / sum(one.steps for one in ours)},
        },
        wanted.out,
    )  # fmt: skip
    return int(len(parted) > ties)


def written(target: Any, place: Path) -> tuple[Path, Path]:
    """The demo drafter as a checkpoint and as a folder for transformers."""
    module = find("small_model")
    settings = build(module.Config, {"kind": "small_model", "length": LENGTH}, "drafter")
    save(place / "checkpoint", module.Model(settings, target))
    return place / "checkpoint", export_folder(place / "checkpoint", "transformers", place / "folder", target)


def difference(
    target: Any, number: int, prompt: list[int], assisted: list[int], other: list[int], name: str
) -> list[dict[str, Any]]:  # fmt: skip
    """Where two texts part; empty where they don't."""
    if assisted == other:
        return []
    places = [i for i, (a, b) in enumerate(zip(assisted, other, strict=False)) if a != b]
    place = places[0] if places else min(len(assisted), len(other))
    return [{"prompt": number, "against": name, "token": place, "gap": gap(target, [*prompt, *other[:place]])}]


if __name__ == "__main__":
    raise SystemExit(main())
