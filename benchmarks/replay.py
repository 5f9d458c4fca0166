"""Shared by the exactness benchmarks: a drafter that knows the coming text, and how to tell a tie from a mismatch.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from outrider import machine
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.targets.hf.transformers import TransformersTarget


class Replay(Drafter):
    """Proposes the continuation of texts it knows, with wrong branches next to it and occasional wrong tokens.

    Every depth has `width` siblings, at most one of which is the true token; it comes first if `eldest`, for targets
    that only verify chains.  With probability 1 - `right` none is true and the draft continues anyway; the true text
    may also continue under a wrong sibling, where it must not be accepted.
    """

    def __init__(
        self, texts: Sequence[list[int]], vocabulary: int, *, depth: int = 4, width: int = 2, right: float = 0.8,
        eldest: bool = False, soft: bool = False, obeys: bool = True, seed: int = 0,
    ):  # fmt: skip
        self.texts, self.vocabulary = texts, vocabulary
        self.depth, self.width, self.right, self.eldest = depth, width, right, eldest
        self.soft = soft
        """Every node has a q."""
        self.obeys = obeys
        """Respects the budget; otherwise it proposes everything, no matter how much room is left."""
        self.limit = depth * (2 * width - 1)
        self.noise = random.Random(seed)
        self.kept: Counter[int] = Counter()
        """Number of steps by how many drafted tokens they accepted, if something was drafted."""
        self.jumps = 0
        """Accepted paths that were not a prefix of their tree."""

    def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
        drawn = [self._tree(self._coming(state.tokens[row])) for row in state.rows]
        full = torch.tensor([len(tokens) for tokens, _ in drawn])
        sizes = torch.minimum(full, budget) if self.obeys else full
        width = int(full.max())
        device = state.device
        tokens = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in drawn], device=device)
        q = None
        if self.soft:
            q = torch.full((*tokens.shape, self.vocabulary), 0.4 / self.vocabulary, device=device)
            q.scatter_add_(-1, tokens[..., None], torch.full((*tokens.shape, 1), 0.6, device=device))
        if self.width == 1:
            return Draft.chain(tokens, sizes, q)
        parents = torch.tensor([[*own, *[-1] * (width - len(own))] for _, own in drawn], device=device)
        return Draft(tokens, parents, sizes, q)

    def observe(self, memory: None, state: DecodeState, draft: Draft, accepted: Accepted, scores: Any) -> None:
        self.kept.update(len(path) for path, size in zip(accepted.paths, draft.live, strict=True) if size)
        self.jumps += sum(path != list(range(len(path))) for path in accepted.paths)

    def _coming(self, text: list[int]) -> list[int]:
        """The continuation of the known text with this prefix; random if there is none."""
        known = next((known for known in self.texts if known[: len(text)] == text), text)
        rest = known[len(text) : len(text) + self.depth]
        return [*rest, *(self.noise.randrange(self.vocabulary) for _ in range(self.depth - len(rest)))]

    def _tree(self, coming: list[int]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for depth, token in enumerate(coming):
            true = token if self.noise.random() < self.right else self._other(token)
            siblings = [true, *(self._other(token) for _ in range(self.width - 1))]
            place = 0 if self.eldest else self.noise.randrange(self.width)
            siblings[0], siblings[place] = siblings[place], siblings[0]
            first = len(tokens)
            tokens += siblings
            parents += [at] * self.width
            at = first + place
            for wrong in range(first, first + self.width):
                if wrong != at and depth + 1 < self.depth and self.noise.random() < 0.3:
                    tokens.append(coming[depth + 1])
                    parents.append(wrong)
        return tokens, parents

    def _other(self, token: int) -> int:
        return (token + self.noise.randrange(1, self.vocabulary)) % self.vocabulary


# ── ties ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def logits_by(target: TransformersTarget, text: list[int], prompt: int, rows: int) -> Tensor:
    """Logits [V] after `text`: its first `prompt` tokens read at once, the others in passes of `rows`."""
    cache = target.allocate(1, len(text) + rows + 1)
    at = prompt - 1
    if at:
        target.prefill(cache, [0], torch.tensor([text[:at]], device=target.device), [at])
    logits = torch.empty(0)
    while at < len(text):
        part = torch.tensor([text[at : at + rows]], device=target.device)
        draft = Draft.chain(part[:, 1:], torch.tensor([part.shape[1] - 1]))
        logits = target.verify(cache, [0], part[:, 0], draft).logits[0, -1]
        cache.keep([range(part.shape[1] - 1)])
        at += part.shape[1]
    return logits


@torch.inference_mode()
def spread(target: TransformersTarget, text: list[int], prompt: int) -> tuple[Tensor, float]:
    """Logits after `text` from one-row passes, and their largest difference from those of passes of several rows."""
    one = logits_by(target, text, prompt, 1)
    many = [logits_by(target, text, prompt, rows) for rows in (2, 3, 5)]
    return one, max(float((logits - one).abs().max()) for logits in many)


# ── output of every benchmark ─────────────────────────────────────────────────────────────────────────────────────────


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


def provenance(seconds: float) -> dict[str, Any]:
    """The provenance that a result must include."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "outrider": version("outrider"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        **processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The commit of this code; "" outside a clone."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def command() -> str:
    """The command line, without this machine's folders."""
    given = [Path(arg).name if Path(arg).is_absolute() else arg for arg in sys.argv[1:]]
    return " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *given])


def processor() -> dict[str, str]:
    """Name of the CPU, and the instruction sets that speed up products."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": machine.cpu_name(), "flags": " ".join(flag for flag in flags if flag.startswith(("avx", "amx", "fma",
        "f16c"))),
    }  # fmt: skip


def publish(found: dict[str, Any], out: Path | None, quiet: bool = False) -> None:
    """Print a result, unless `quiet`, and write it to `out`, if given."""
    text = json.dumps(found, indent=1)
    if not quiet:
        print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
