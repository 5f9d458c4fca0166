"""A drafter that learns while it serves: what it learns from shifted traffic, what it costs users without drafts, and
what is refused.

    python benchmarks/learning.py --minutes 60 --out benchmarks/results/learning.json

Traffic is the library's source in another register, see `REGISTERS`.  Traffic and evaluation use different modules.
Two servers of the demo's pair take turns: one learns, in the CPU time that requests leave free; the other shows what
happens without learning.  Both get the same requests, one at a time with a pause in between; every second request
disables drafts.  While one is in use, the other is paused.

Afterwards: the version served at the end is compared with the first one on held-out traffic, prompt by prompt; the same
buffer with shuffled answers, which the gate has to refuse; and a version with corrupted weights, which has to be rolled
back. dspark is the checkpoint of the last `make demo`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.batch_time import CHECKPOINT, promise
from benchmarks.engines.server_process import Server, running
from benchmarks.replay import provenance, publish
from benchmarks.serving_clients import Due
from benchmarks.serving_turns import Clients, at_most, outrider_serve, tell
from outrider import checkpoint, demo, load_drafter, load_target, machine
from outrider.serve.learning.buffer import Buffer, Text
from outrider.serve.learning.folder import RESULT, Folder
from outrider.serve.learning.trial import compared

CHARACTERS, SLOTS, LENGTH = 600, 4, 512
NEW = (48, 64, 80)
"""Maximum answer lengths in tokens; requests cycle through them."""
EVALUATED = ("argparse", "calendar", "csv", "dataclasses", "heapq", "queue", "shlex", "textwrap", "weakref")
"""Modules of the evaluation; the other held-out ones are used for traffic."""

# ── traffic ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def capitals(name: str, text: str) -> str:
    """The source in capital letters."""
    return text.upper()


def quoted(name: str, text: str) -> str:
    """The source's lines as a JSON list."""
    return json.dumps({"file": name, "lines": text.splitlines()}, indent=1)


def renamed(name: str, text: str) -> str:
    """Letters in identifiers are substituted."""
    return "".join(chr((ord(c) - 97 + 13) % 26 + 97) if "a" <= c <= "z" else c for c in text)


REGISTERS: dict[str, Callable[[str, str], str]] = {"capitals": capitals, "quoted": quoted, "renamed": renamed}


def shifted(register: str, count: int, is_evaluated: bool, seed: int = 0) -> list[str]:
    """Prompts of the traffic, or of the evaluation, in this register."""
    pieces = demo.prompts("held_out", 4000, seed)
    own = ((name, text) for name, text in pieces if name.startswith(EVALUATED) == is_evaluated)
    found = [REGISTERS[register](name, text)[:CHARACTERS] for (name, text), _ in zip(own, range(count), strict=False)]
    return list(dict.fromkeys(found))


def asked(prompts: Sequence[str], seed: int) -> list[Due]:
    """Requests, every second one without drafts; their answers are not compared."""
    order = random.Random(seed).sample(prompts, len(prompts))
    found = []
    for number, prompt in enumerate(order):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": NEW[number % len(NEW)], "temperature": 0}
        body |= {"stream": True} | ({"speculative": False} if number % 2 else {})
        found.append(Due("/v1/completions", body, "", [], ""))
    return found


# ── the two servers ───────────────────────────────────────────────────────────────────────────────────────────────────


def server(name: str, wanted: argparse.Namespace, folder: Path | None) -> Any:
    more = ["serve.interval_s=0"]
    if folder is not None:
        more += [f"serve.learning.folder={folder}", f"serve.learning.steps={wanted.steps}"]
        more += [f"serve.learning.every_texts={wanted.every_texts}", f"serve.learning.held_out={wanted.held_out}"]
        more += [f"serve.learning.prompts={wanted.prompts}"]
        more += [] if wanted.lr is None else [f"serve.learning.lr={wanted.lr}"]
    start = partial(
        outrider_serve, slots=SLOTS, length=LENGTH, drafter=str(CHECKPOINT), policy="fixed",
        dtype=None if wanted.compile else "float32", more=more,
    )  # fmt: skip
    return running(name, start)


def visited(server: Server, clients: Clients, due: Sequence[Due], thought_s: float) -> list[dict[str, Any]]:
    """Send requests one after the other, with this many seconds of pause; returns the times of each answer."""
    rows = []
    with server.awake():
        for one in due:
            time.sleep(thought_s)
            found = clients.ask(do="turn", port=server.port, clients=1, requests=[[one.path, one.body]])
            [row] = found["rows"]
            if row["status"] != 200 or row["error"]:
                why = f"{row['error']} {row['body']}; its log ends with {server.log_end(2000)}"
                raise SystemExit(f"{server.name} answered {row['status']}: {why}")
            is_plain = one.body.get("speculative") is False
            rows.append({"is_plain": is_plain, "first_s": row["first_s"], "gaps_s": row["gaps_s"]})
    return rows


def traffic(wanted: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    """Both servers in turns until the time is over, then wait for the version in training."""
    prompts, windows = shifted(wanted.register, 4000, is_evaluated=False), {"learning": [], "still": []}
    ends, turn = time.monotonic() + 60 * wanted.minutes, 0
    with Clients() as clients, server("learning", wanted, folder) as learning, server("still", wanted, None) as still:
        for one in (learning, still):
            one.pause()
        for one in (learning, still):  # a warm-up, so that all code paths have run
            visited(one, clients, asked(prompts, 999)[:6], 0.05)
        while time.monotonic() < ends:
            due, turn = asked(prompts, turn)[: wanted.requests], turn + 1
            both = (
                (("learning", learning), ("still", still)) if turn % 2 else (("still", still), ("learning", learning))
            )
            for name, one in both:
                windows[name].append(visited(one, clients, due, wanted.thought_s))
            with learning.awake():
                time.sleep(wanted.rest_s)
            if turn % 8 == 1:
                left = (ends - time.monotonic()) / 60
                tell(f"{turn} turns, {left:.0f} minutes left; {[event['event'] for event in Folder(folder).events()]}")
    texts = sum(len(rows) for rows in windows["learning"])
    found["traffic"] = {"prompts": len(prompts), "turns": turn, "texts": texts, "windows": len(windows["still"])}
    found["users"] = {kind: waits(windows, is_plain) for kind, is_plain in (("plain", True), ("drafted", False))}


def waits(windows: dict[str, list[list[dict[str, Any]]]], is_plain: bool, draws: int = 1000) -> dict[str, Any]:
    """p50 and p99 in ms of the first token and of gaps, on both servers, and the ratios of the p99 with the 95 %
    interval of a bootstrap over turns."""
    found: dict[str, Any] = {}
    for what in ("first", "gap"):
        own = {
            name: [np.array([value for row in rows if row["is_plain"] == is_plain for value in times(row, what)])
                   for rows in turns]
            for name, turns in windows.items()
        }  # fmt: skip
        every = {name: np.concatenate(turns) for name, turns in own.items()}
        noise, drawn = np.random.default_rng(0), []
        for _ in range(draws):
            taken = noise.integers(0, len(own["still"]), len(own["still"]))
            high = [np.quantile(np.concatenate([own[name][n] for n in taken]), 0.99) for name in ("learning", "still")]
            drawn.append(high[0] / high[1])
        found[what] = {
            name: {f"p{q}_ms": 1e3 * float(np.quantile(values, q / 100)) for q in (50, 99)} | {"count": len(values)}
            for name, values in every.items()
        }  # fmt: skip
        ratio = float(np.quantile(every["learning"], 0.99) / np.quantile(every["still"], 0.99))
        found[what]["p99_ratio"] = {"ratio": ratio, "interval": np.quantile(drawn, [0.025, 0.975]).tolist()}
    return found


def times(row: dict[str, Any], what: str) -> list[float]:
    return [row["first_s"]] if what == "first" else row["gaps_s"]


# ── what it has learnt ────────────────────────────────────────────────────────────────────────────────────────────────


def gained(wanted: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    """The version served at the end compared with version 0, on prompts of modules that no request came from."""
    there, target = Folder(folder), load_target("demo", compile=False)
    prompts = shifted(wanted.register, wanted.evaluated, is_evaluated=True)
    texts = [Text(target.encode(prompt), [0] * 96, []) for prompt in prompts]
    drafters = {name: load_drafter(path, target) for name, path in (("new", there.current), ("old", CHECKPOINT))}
    trial = compared(target, drafters["new"], drafters["old"], texts, 96, 16)
    events = there.events()
    found["gain"] = {
        "version": there.state().version, "prompts": len(texts), "gate": trial.outcome.headline,
        "tokens_per_step": {"old": trial.old.rows[0].tokens_per_step, "new": trial.new.rows[0].tokens_per_step},
        "new_over_old": list(trial.gain or ()),
    }  # fmt: skip
    found["log"] = events


def poisoned(folder: Path, place: Path) -> dict[str, Any]:
    """The job over the same buffer with its answers shuffled: all their tokens mixed."""
    shutil.copytree(folder, place)
    there, draw = Folder(place), random.Random(0)
    parts = {part: there.buffer.newest(part, 10**5)[::-1] for part in ("train", "held_out")}  # type: ignore[arg-type]
    shutil.rmtree(place / "texts")
    tokens = [token for texts in parts.values() for text in texts for token in text.answer]
    spoilt = Buffer(place / "texts", int(there.config.max_mb * 1e6), there.config.held_out)
    for texts in parts.values():
        spoilt.add([text._replace(answer=[draw.choice(tokens) for _ in text.answer]) for text in texts])
    subprocess.run(
        [sys.executable, "-m", "outrider.serve.learning.job", str(place)], check=True, stdout=subprocess.DEVNULL
    )
    return Folder(place).events()[-1]


def rolled_back(wanted: argparse.Namespace, folder: Path, place: Path) -> dict[str, Any]:
    """A version that passed by mistake, whose weights have `spoilt` noise added: seconds from its swap to its
    rollback."""
    shutil.copytree(folder, place)
    there, target = Folder(place), load_target("demo", compile=False)
    version, before = there.next_version(), there.state().version
    there.use(before, version - 1)
    spoil(there, target, version, before, wanted.spoilt)
    prompts, since, seconds = shifted(wanted.register, 4000, is_evaluated=False), 0.0, None
    began = time.monotonic()
    with Clients() as clients, server("spoilt", wanted, place) as own:
        own.pause()
        number = 0
        while seconds is None and time.monotonic() < began + 300:
            visited(own, clients, asked(prompts, 5)[number : number + 2], wanted.thought_s)
            number += 2
            served = Folder(place).state().version
            if served == version and not since:
                since = time.monotonic()
            if since and served != version:
                seconds = time.monotonic() - since
    return {"seconds": seconds, "texts_a_second": number / (time.monotonic() - began), "event": there.events()[-1]}


def spoil(there: Folder, target: Any, version: int, origin: int, by: float) -> None:
    """Add noise of `by` times its own spread to every matrix."""
    model = checkpoint.load_model(there.checkpoint(origin), target)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += by * weight.std() * torch.randn(weight.shape, generator=noise).to(weight.dtype)
    checkpoint.save(there.place(version) / "checkpoint", model)
    result = {"version": version, "from": origin, "passed": True, "reason": "spoilt by the benchmark"}
    (there.place(version) / RESULT).write_text(json.dumps(result))


# ── all parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def promises(found: dict[str, Any]) -> list[dict[str, Any]]:
    plain = found["users"]["plain"]
    ratios = found["gain"]["new_over_old"] or [0.0]
    return [
        promise("tokens per step on held-out shifted traffic, new over old", 1.10, ratios[0]),
        at_most("plain users: p99 of the first token over that without learning, lower end of the interval", 1.0,
                plain["first"]["p99_ratio"]["interval"][0]),
        at_most("plain users: p99 of a gap over that without learning, lower end of the interval", 1.0,
                plain["gap"]["p99_ratio"]["interval"][0]),
        promise("a buffer of shuffled answers is refused", 1, int(found["poisoned"]["event"] == "refused")),
        at_most("seconds until a spoilt version is rolled back", 60, found["rolled_back"]["seconds"] or 1e9),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of traffic, at both servers together")
    parser.add_argument("--register", default="capitals", choices=list(REGISTERS))
    parser.add_argument("--requests", type=int, default=12, help="of a turn, at each of the servers")
    parser.add_argument("--thought-s", type=float, default=0.4, help="seconds before each request")
    parser.add_argument("--rest-s", type=float, default=10, help="seconds without requests after each turn")
    parser.add_argument("--every-texts", type=int, default=150)
    parser.add_argument("--held-out", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--evaluated", type=int, default=96, help="prompts of the evaluation")
    parser.add_argument("--spoilt", type=float, default=0.5, help="noise on a version's weights, of their spread")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--folder", type=Path, help="of the drafter that learns; kept, and gone on with")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped too
    machine.set_up_process()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder, found = wanted.folder or Path(scratch) / "learned", dict[str, Any]()
        tell(f"learning: about {wanted.minutes + 6:.0f} minutes")
        traffic(wanted, folder, found)
        gained(wanted, folder, found)
        found["poisoned"] = poisoned(folder, Path(scratch) / "poisoned")
        found["rolled_back"] = rolled_back(wanted, folder, Path(scratch) / "spoilt")
        found["promises"] = promises(found)
        settings = {name: value for name, value in vars(wanted).items() if name not in ("folder", "out")}
        publish({"provenance": provenance(time.monotonic() - began), "settings": settings, **found}, wanted.out, True)
        for one in found["promises"]:
            holds = "holds" if one["holds"] else "DOES NOT HOLD"
            tell(f"learning: {one['promise']}: {one['found']:.4g}, wanted {one['wanted']:g}: {holds}")
    return int(not all(one["holds"] for one in found["promises"]))


if __name__ == "__main__":
    raise SystemExit(main())
