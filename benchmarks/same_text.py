"""Greedy text of every decoding path, compared token for token with transformers' own `generate`.

    python benchmarks/same_text.py KIND=FILE.jsonl ... [--target smollm2] [--prompts 60] [--new 128] [--slots 4]
                                   [--ways plain,suffix,...] [--out FILE]

KIND=FILE: a kind of prompts, such as code=humaneval.jsonl, whose rows have `turns`; the first turn is sent, through the
chat template.  `generate` of transformers continues one prompt at a time in float32.

Ways: `plain`, `ngram`, `suffix` and `dflash` (two layers of random weights: nearly every draft is wrong) with default
settings; `whole plain` and `whole dflash`, whose steps are one call each; `server plain` and `server suffix`, over HTTP
with as many clients as there are slots.  A text that diverges from transformers' is a tie if the logits of both tokens,
in float64, are closer than the error of float32 (`targets/accuracy.py`), otherwise a fault.  Prints JSON; exits with 1
on a fault.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import answering  # noqa: E402
from benchmarks.answering import Answers  # noqa: E402
from benchmarks.batch_time import promise, write  # noqa: E402
from benchmarks.engines.server_process import running  # noqa: E402
from outrider import load_drafter, machine  # noqa: E402
from outrider.targets import accuracy  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402

WAYS = ("plain", "ngram", "suffix", "dflash", "whole plain", "whole dflash", "server plain", "server suffix")
WHOLE, SERVER = "whole ", "server "
WAIT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="KIND=FILE")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=int, default=60, help="of each kind")
    parser.add_argument("--new", type=int, default=128, help="tokens a prompt, at most")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--ways", type=lambda names: names.split(","), default=WAYS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    target = load_target(options.target, compile="auto")
    pairs = (each.split("=") for each in options.kinds)
    prompts = [prompt for _, path in pairs for prompt in read(target, path, options.prompts)]
    reference = []
    for prompt in prompts:
        reference += answering.transformers(target, [prompt], options.new, 1)
        print(f"transformers: {len(reference)} of {len(prompts)}", file=sys.stderr, flush=True)
    judged = Verdicts(target, prompts, reference)
    rows = []
    for name in options.ways:
        with way(name, options.target, target, options.slots) as answers:
            rows.append({"way": name} | judged.of(answers(prompts, options.new, options.slots)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    faults = sum(row["faults"] for row in rows)
    write(
        {
            "promises": [promise("faults over all ways: none", 0, -faults)], "rows": rows, "texts": len(prompts),
            "reference_tokens": sum(map(len, reference)), "new": options.new, "slots": options.slots,
        },
        options.out,
    )  # fmt: skip
    return int(faults > 0)


def read(target: Any, path: str, count: int) -> list[list[int]]:
    """The first turns of a file's rows, formatted by the chat template."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[:count]
    return [target.encode([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in lines]


# ── ways ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def way(name: str, target_name: str, target: Any, slots: int) -> AbstractContextManager[Answers]:
    if name.startswith(SERVER):
        return server(target_name, name.removeprefix(SERVER), target, slots)
    is_whole, kind = name.startswith(WHOLE), name.removeprefix(WHOLE)
    torch.manual_seed(0)
    options = {"layers": 2, "block": 6} if kind == "dflash" else {}
    drafter = None if kind == "plain" else load_drafter(kind, target, **options)
    return nullcontext(partial(answering.outrider, target, drafter, is_whole))


@contextmanager
def server(target_name: str, kind: str, target: Any, slots: int) -> Iterator[Answers]:
    drafter = [] if kind == "plain" else ["--drafter", kind]

    def command(port: int) -> list[object]:
        return [sys.executable, "-m", "outrider", "serve", "--target", target_name, *drafter, "--port", port,
                "--slots", slots]  # fmt: skip

    with (
        running(f"outrider serve, {kind}", command) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{process.port}", timeout=WAIT_S) as client,
    ):

        def ask(prompt: list[int], new: int) -> list[int]:
            body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "return_token_ids": True}
            reply = client.post("/v1/completions", json=body).raise_for_status().json()
            return answering.without_ends(target, reply["choices"][0]["token_ids"])

        yield partial(answering.pooled, ask)


# ── verdicts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Verdicts:
    """Texts compared with transformers' own for the same prompts, in the same order."""

    def __init__(self, target: Any, prompts: Sequence[list[int]], reference: Sequence[list[int]]):
        self.target, self.prompts, self.reference = target, prompts, reference
        self.allowed = accuracy.allowance(target)
        self.exact = copy.deepcopy(target.model).double()

    def of(self, texts: Sequence[list[int]]) -> dict[str, Any]:
        """The number of equal texts, of ties with the largest margin, and of faults."""
        margins = [self.margin(number, text) for number, text in enumerate(texts)]
        apart = [margin for margin in margins if margin is not None]
        ties = [margin for margin in apart if self.allowed is not None and margin <= 2 * self.allowed.largest]
        return {
            "texts": len(texts), "tokens": sum(map(len, texts)), "equal": len(texts) - len(apart), "ties": len(ties),
            "faults": len(apart) - len(ties), "margin": max(apart, default=0.0),
        }  # fmt: skip

    @torch.inference_mode()
    def margin(self, number: int, text: list[int]) -> float | None:
        """Margin between the logits of both tokens where a text diverges from transformers' own; None if it does
        not."""
        reference = self.reference[number]
        if text == reference:
            return None
        at = next(n for n, (a, b) in enumerate(itertools.zip_longest(reference, text)) if a != b)
        logits = self.exact(torch.tensor([self.prompts[number] + reference[:at]])).logits[0, -1]
        one, other = (each[at] if at < len(each) else min(self.target.ends) for each in (reference, text))
        return float((logits[one] - logits[other]).abs())


if __name__ == "__main__":
    raise SystemExit(main())
