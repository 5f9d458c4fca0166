"""Scores of lm-evaluation-harness with and without speculation, and our model beside lm-eval's own, on the demo target.

    python benchmarks/lm_eval.py [--limit 48] [--out benchmarks/results/lm_eval.json]

Tasks of our own (benchmarks/lm_eval), whose rows come from the running interpreter's library.  First both runs of each
task, at temperature 0: every answer must be the same.  Then, where lm-eval's `hf` model can be imported (pip install
'lm-eval[hf]'), its log-likelihoods and answers on the demo target's folder beside ours.  Seconds mean little where
`load` is above the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
# the folder of tasks beside this file has the name of the library
sys.path = [place for place in sys.path if Path(place or ".").resolve() != HERE]

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from outrider import demo  # noqa: E402
from outrider.gate.harness import Job, both  # noqa: E402
from outrider.gate.language_model import OutriderLM  # noqa: E402
from outrider.loading import load_drafter  # noqa: E402
from outrider.runs.provenance import version_of  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402

TASKS = ("stdlib_assignments", "stdlib_bodies")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=48, help="prompts of each task")
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--beside", type=int, default=24, help="prompts of each task for lm-eval's own model")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lm_eval.json")
    options = parser.parse_args()
    job = Job(
        tasks=TASKS, drafter="ngram", limit=options.limit, include_path=str(HERE / "lm_eval"), slots=options.slots
    )
    runs = both(job)
    result = {
        "command": f"python benchmarks/lm_eval.py --limit {options.limit} --slots {options.slots} "
        f"--beside {options.beside}",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version_of(name) for name in ("outrider", "lm-eval", "torch", "transformers")},
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),
        "tasks": [run.as_json() for run in runs],
        "beside_hf": beside(options.beside),
        "all_equal": all(run.verdict == "equal" for run in runs),
    }
    part = options.out.with_name(f"{options.out.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(options.out)
    print(json.dumps(result, indent=1))
    sys.exit(not result["all_equal"])


def beside(count: int) -> dict[str, Any] | None:
    """Our log-likelihoods and answers less those of lm-eval's own model; None where it can't be imported."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError:
        return None
    theirs = HFLM(pretrained=str(demo.TARGET), device="cpu", dtype="float32", batch_size=1)
    target = load_target("demo")
    loaded = TaskManager(include_path=str(HERE / "lm_eval"), include_defaults=False).load(list(TASKS))["tasks"]
    found: dict[str, Any] = {}
    for name, task in loaded.items():
        task.build_all_requests(limit=count)
        requests: list[Instance] = task.instances
        kind = requests[0].request_type
        wanted = getattr(theirs, kind)(requests, disable_tqdm=True)
        for label, drafter in (("plain", None), ("drafted", load_drafter("ngram", target))):
            own = getattr(OutriderLM(target, drafter, slots=4), kind)(requests)
            if kind == "loglikelihood":
                worst = max(abs(a[0] - b[0]) for a, b in zip(own, wanted, strict=True))
                found[f"{name}, {label}"] = {"requests": len(own), "largest_difference": worst, "holds": worst <= 1e-4}
            else:
                equal = sum(a == b for a, b in zip(own, wanted, strict=True))
                found[f"{name}, {label}"] = {"requests": len(own), "equal": equal, "holds": equal == len(own)}
    return found


if __name__ == "__main__":
    main()
