"""The part of `serving.py` that sends the same requests to other servers: `transformers serve`, vLLM and
llama.cpp's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.batch_time import CHECKPOINT, parties, promise
from benchmarks.engines import build_llama, gguf_files, install, vllm_server
from benchmarks.engines.server_process import Server, running
from benchmarks.serving_clients import Due
from benchmarks.serving_turns import (
    Clients,
    Turn,
    asleep,
    audit,
    by_turns,
    figures,
    known,
    numbers_of,
    started,
    tell,
    with_body,
)
from outrider import demo
from outrider.formats.gguf import layouts
from outrider.weights import weights_of

OURS, OTHERS = "outrider: ", {"transformers serve": 2.0, "vLLM": 1.0, "llama.cpp": 1.0}
"""Name prefixes, and the required speed of our fastest way relative to the fastest of each."""
ROUNDING = 1e-3
"""Logits closer than this may swap if float32 sums are ordered differently."""
PAGED = ("--continuous-batching", "--cb-max-memory-percent", "0.1")
"""Its pages fill 90 % of the memory by default."""
NEW = (48, 64, 80)
"""Maximum answer lengths in tokens; requests cycle through them."""
MOST_AUDITED = 20


def peers(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Callable[[], None]) -> None:
    target, _ = parties([])
    pool = known(target, wanted.pool, NEW)
    rows = own.setdefault("rows", [])
    own["versions"] = {"llama.cpp": build_llama.COMMIT, "vLLM": install.VLLM}
    bodies: dict[str, list[Due]] = {}

    def warm(server: Server) -> None:
        bodies[server.name] = with_body(pool, **body_for(server))
        clients.turn(server, bodies[server.name], list(range(4)), 4)

    with tempfile.TemporaryDirectory() as place:
        starts = our_servers(wanted) | their_servers(target, wanted, Path(place))
        with asleep(starts, own["left_out"], warm) as servers:
            for concurrency in wanted.peer_concurrency:
                if any(row["concurrency"] == concurrency for row in rows):
                    continue
                count = max(8, 2 * concurrency)

                def ask(way: str, number: int, count: int = count, concurrency: int = concurrency) -> Turn:
                    with servers[way].awake() as server:
                        return clients.turn(server, bodies[way], numbers_of(number, count, len(pool)), concurrency)

                for way, turns in by_turns(list(servers), wanted.peer_turns, ask, own["left_out"]).items():
                    row = {"way": way, "concurrency": concurrency} | figures(turns) | texts(target, pool, turns)
                    rows.append(row)
                    tell(f"peers: {concurrency} at a time: {way}: {row['tokens_per_s']:.0f} tokens/s")
                own["promises"] = peer_promises(rows)
                save()


def texts(target: Any, pool: Sequence[Due], turns: Sequence[Turn]) -> dict[str, Any]:
    """How many of the texts that differ from ours diverge where two logits are within rounding."""
    rows = [(number, row) for turn in turns for number, row in zip(turn.numbers, turn.rows, strict=True)]
    others = sorted({(number, row["text"]) for number, row in rows if not row["is_equal"]})
    audits = [audit(target, pool[number], text) for number, text in others[:MOST_AUDITED]]
    margins = [one["margin"] for one in audits if one is not None]
    return {"other_texts": len(others), "audited": len(audits), "margins": margins,
            "ties": sum(margin <= ROUNDING for margin in margins)}  # fmt: skip


def peer_promises(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for concurrency in dict.fromkeys(row["concurrency"] for row in rows):
        speed = {row["way"]: row["tokens_per_s"] for row in rows if row["concurrency"] == concurrency}
        mine = max((way for way in speed if way.startswith(OURS)), key=speed.__getitem__, default=None)
        for party, wanted in OTHERS.items():
            best = max((way for way in speed if way.startswith(party)), key=speed.__getitem__, default=None)
            if mine is not None and best is not None:
                what = f"{concurrency} at a time: {mine} over {best}"
                found.append(promise(what, wanted, speed[mine] / speed[best]))
    return found


# ── the servers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def body_for(server: Server) -> dict[str, Any]:
    """Server-specific fields added to the common request body."""
    if server.name.startswith("transformers"):
        return {"model": str(demo.TARGET)}
    more = {"cache_prompt": False} if server.name.startswith("llama.cpp") else {}
    return {"model": server.model(), **more}


def our_servers(wanted: argparse.Namespace) -> dict[str, Any]:
    settings = {"slots": wanted.slots, "length": wanted.length}
    drafters: dict[str, dict[str, str]] = {
        "plain": {}, "dspark": {"drafter": str(CHECKPOINT)}, "ngram": {"drafter": "ngram"}
    }  # fmt: skip
    return {OURS + name: partial(started, settings | own) for name, own in drafters.items()}


def their_servers(target: Any, wanted: argparse.Namespace, place: Path) -> dict[str, Any]:
    """How to start each of the requested servers, by name."""
    found: dict[str, Any] = {
        "transformers serve": partial(transformers_serve, ()),
        "transformers serve, continuous batching": partial(transformers_serve, PAGED),
        "vLLM: float32": partial(vllm_serve, wanted.slots, None),
        "vLLM: float32, its n-grams": partial(vllm_serve, wanted.slots, vllm_server.NGRAM),
    }
    for name, kind in {"float32": "f32", "16 bits": "f16"}.items():
        for draft in ("", ", its n-grams", ", our dspark"):
            found[f"llama.cpp: {name}{draft}"] = partial(llama_serve, target, wanted, place, kind, draft)
    return {name: start for name, start in found.items() if name.lower().startswith(wanted.only.lower())}


def transformers_serve(more: Sequence[str], name: str) -> Any:
    command = [Path(sys.executable).with_name("transformers"), "serve", demo.TARGET, "--device", "cpu",
               "--dtype", "float32", "--host", "127.0.0.1", "--log-level", "error", *more]  # fmt: skip
    return running(name, lambda port: [*command, "--port", port], {"HF_HUB_OFFLINE": "1"})


def vllm_serve(slots: int, speculative: Mapping[str, Any] | None, name: str) -> Any:
    if not vllm_server.PYTHON.exists():
        raise FileNotFoundError(f"no {vllm_server.PYTHON}: run benchmarks/engines/install.py")
    more = ["--max-num-seqs", slots, "--no-enforce-eager", "--no-enable-prefix-caching",
            "--per-request-spec-decode-metrics", "none", "--speculative-config", json.dumps(speculative)]  # fmt: skip
    return running(name, lambda port: [vllm_server.HERE / "serve_vllm.sh", "--port", port, *more])


def llama_serve(target: Any, wanted: argparse.Namespace, place: Path, kind: str, draft: str, name: str) -> Any:
    binary = Path(os.environ.get("LLAMA_SERVER", build_llama.server()))
    if not binary.exists():
        raise FileNotFoundError(f"no {binary}: run benchmarks/engines/build_llama.py")
    threads = torch.get_num_threads()
    command: list[object] = [
        binary, "-m", gguf_of(target, place, kind), "--host", "127.0.0.1", "-c", wanted.length * wanted.slots,
        "-np", wanted.slots, "-t", threads, "-tb", threads,
    ]  # fmt: skip
    if draft == ", its n-grams":
        command += ["--spec-type", "ngram-simple"]
    elif draft:
        command += ["--spec-type", "draft-dspark", "-md", gguf_files.drafter(CHECKPOINT, target, place, kind)]
    return running(name, lambda port: [*command, "--port", port])


def gguf_of(target: Any, place: Path, kind: str) -> Path:
    """The target as a GGUF file for llama.cpp, written once."""
    path, lm = place / f"target-{kind}.gguf", target.model
    if not path.exists():
        layouts.write_file(path, layouts.header(lm, target.tokenizer, kind), weights_of(lm), lm, kind)
    return path
