"""transformers' own assisted generation on the demo pair: the drafter as `outrider export --to transformers` writes it.

    python benchmarks/engines/assisted.py [--prompts 12] [--new 96] [--out benchmarks/results/assisted.json]

Compared are token ids of greedy texts: `generate` with the exported drafter as assistant, `generate` without, and ours with the
same drafter.  Where two texts part, the gap between the target's two best logits there says whether rounding could do it.
transformers counts no drafts, so its candidate generator is listened to.  No times are taken.  Exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engines.llama_cpp import LENGTH, ROUNDING, gap  # noqa: E402
from benchmarks.replay import progress_bar, provenance, publish  # noqa: E402
from outrider import demo, generate, load_drafter, load_target  # noqa: E402
from outrider.checkpoint import save  # noqa: E402
from outrider.config import build  # noqa: E402
from outrider.drafters import find  # noqa: E402
from outrider.export.formats import export  # noqa: E402


class Round(NamedTuple):
    drafted: int
    kept: int


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
        assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = generate(target, prompts, load_drafter(checkpoint, target), max_new_tokens=wanted.new)
    assistant.generation_config.update(num_assistant_tokens=LENGTH, num_assistant_tokens_schedule="constant")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    parted: list[dict[str, Any]] = []
    with listening() as rounds, progress_bar() as bar:
        for number, prompt in enumerate(bar.track(prompts)):
            texts = {"assisted": continued(target, prompt, wanted.new, assistant),
                     "plain": continued(target, prompt, wanted.new), "ours": ours[number].tokens}  # fmt: skip
            for name in ("plain", "ours"):
                parted += difference(target, number, prompt, texts["assisted"], texts[name], name)
    ties = sum(one["gap"] < ROUNDING for one in parted)
    drafted, kept = (sum(getattr(one, field) for one in rounds) for field in ("drafted", "kept"))
    publish(
        {
            **provenance(time.monotonic() - began), "prompts": len(prompts), "new_tokens": wanted.new, "draft_length": LENGTH,
            "compared_tokens": 2 * sum(len(one.tokens) for one in ours), "ties": ties, "mismatches": len(parted) - ties,
            "parted": parted,
            "assisted": {"steps": len(rounds), "drafted": drafted, "kept": kept, "tokens_per_step": 1 + kept / len(rounds)},
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
    return place / "checkpoint", export(place / "checkpoint", "transformers", place / "folder", target)


@torch.inference_mode()
def continued(target: Any, prompt: list[int], new: int, assistant: Any = None) -> list[int]:
    """transformers' greedy text behind a prompt."""
    inputs = torch.tensor([prompt])
    extra = {} if assistant is None else {"assistant_model": assistant}
    out = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, do_sample=False, pad_token_id=0, **extra
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


@contextmanager
def listening() -> Iterator[list[Round]]:
    """What becomes of each draft."""
    found: list[Round] = []
    draft, told = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy
    last = 0

    def drafts(self: Any, input_ids: Any, *others: Any, **named: Any) -> Any:
        nonlocal last
        candidates = draft(self, input_ids, *others, **named)
        last = candidates[0].shape[1] - input_ids.shape[1]
        return candidates

    def hears(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        found.append(Round(last, int(num_matches)))
        return told(self, input_ids, scores, num_matches)

    AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy = drafts, hears
    try:
        yield found
    finally:
        AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy = draft, told


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
