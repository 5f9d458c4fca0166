"""Our server compared with llama-server and with `generate`, on a real model, over HTTP.

    python benchmarks/engines/build_llama.py
    python benchmarks/real_server.py KIND=FILE.jsonl ... [--drafter CHECKPOINT] [--clients 1,16] [--prompts 16]
                                     [--new 96] [--rounds 3] [--out FILE]

KIND=FILE: a kind of prompts, such as code=humaneval.jsonl, whose rows have `turns`; the first turn is sent.  Greedy.
Ways: our server without a drafter, with `suffix`, and with the drafter of the last `make demo` combined with suffix
(`mix`); llama-server with bfloat16 weights and flash attention, as many slots as clients, without prompt caching;
`generate` with the same drafters, as many slots as clients.  Servers are paused while another is measured; in every
round all ways answer the same prompts, in rotating order.  Ratios are of seconds per token over all rounds, with a
bootstrap interval.  Prints JSON; exits with 1 if two of our own texts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import CHECKPOINTS, promise, write  # noqa: E402
from benchmarks.engines.build_llama import server as llama_server  # noqa: E402
from benchmarks.engines.server_process import Server, running  # noqa: E402
from outrider import generate, load_drafter, machine  # noqa: E402
from outrider.fast import compile_passes  # noqa: E402
from outrider.formats.gguf import layouts  # noqa: E402
from outrider.report.bootstrap import ratio_of_totals  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402
from outrider.weights import weights_of  # noqa: E402

NODES = 6
"""Settings of the mix, as in `make demo`."""
WAIT_S = 600


class Answers(NamedTuple):
    """A way's answers to concurrent prompts."""

    seconds: float
    tokens: int
    texts: list[str]


Way = Callable[[Sequence[str], int, int], Answers]
"""Prompts, new tokens, clients."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="KIND=FILE")
    parser.add_argument("--drafter", type=Path, default=CHECKPOINTS["smollm2"])
    parser.add_argument("--clients", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16])
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    files = [each.partition("=")[2] for each in options.kinds]
    prompts = [first_turn(line) for file in files for line in Path(file).read_text().splitlines()[: options.prompts]]
    target = load_target("smollm2", compile="auto")
    found: dict[str, Any] = {"prompts": len(prompts), "new": options.new, "rounds": options.rounds, "clients": {}}
    for clients in options.clients:
        with ExitStack() as stack, tempfile.TemporaryDirectory() as place:
            ways = dict(our_servers(stack, options.drafter, clients)) | dict(in_process(target, options.drafter))
            ways |= dict(their_server(stack, target, Path(place), clients))
            found["clients"][clients] = measured(ways, prompts, options.new, clients, options.rounds)
        found["promises"] = promises(found["clients"])
        write(found, options.out)
    return int(any(own["texts_that_differ"] for own in found["clients"].values()))


def first_turn(line: str) -> str:
    turn: str = json.loads(line)["turns"][0]
    return turn


# ── ways ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def drafters(checkpoint: Path) -> dict[str, tuple[str, list[str]]]:
    """By name: kind, and its settings as on the command line."""
    found: dict[str, tuple[str, list[str]]] = {"plain": ("", []), "suffix": ("suffix", [])}
    if checkpoint.exists():
        found["mix"] = ("mix", [f"members=[{checkpoint}, suffix]", f"nodes={NODES}"])
    return found


def our_servers(stack: ExitStack, checkpoint: Path, clients: int) -> Iterator[tuple[str, Way]]:
    for name, (kind, settings) in drafters(checkpoint).items():
        words = [sys.executable, "-m", "outrider", "serve", "--target", "smollm2", "--compile", "--slots", clients]
        words += ["serve.prefix_bytes=0"]  # prompts are repeated in every round
        words += ["--drafter", kind] * bool(kind) + [word for each in settings for word in ("--set", each)]
        server = stack.enter_context(running(name, partial(with_port, words), {"PYTHONPATH": str(ROOT)}))
        server.pause()
        yield f"serve {name}", partial(over_http, server, {"model": "smollm2"})


def with_port(words: Sequence[object], port: int) -> list[object]:
    return [*words, "--port", port]


def in_process(target: Any, checkpoint: Path) -> Iterator[tuple[str, Way]]:
    for name, (kind, settings) in drafters(checkpoint).items():
        drafter = None
        if kind:
            chosen: dict[str, Any] = {"members": [str(checkpoint), "suffix"], "nodes": NODES} if settings else {}
            drafter = load_drafter(kind, target, **chosen)
            compile_passes(drafter)
        yield f"generate {name}", partial(generated, target, drafter)


def generated(target: Any, drafter: Any, prompts: Sequence[str], new: int, clients: int) -> Answers:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    began = time.perf_counter()
    found = generate(target, chats, drafter, max_new_tokens=new, slots=clients)
    seconds = time.perf_counter() - began
    return Answers(seconds, sum(len(each.tokens) for each in found), [each.text for each in found])


def their_model(target: Any, place: Path) -> list[object] | None:
    """The start of llama-server's command, with this target's weights in bfloat16; None if it was not built."""
    binary = Path(os.environ.get("LLAMA_SERVER", llama_server()))
    if not binary.exists():
        print(f"left out: llama.cpp: no {binary}; run benchmarks/engines/build_llama.py", file=sys.stderr)
        return None
    model, lm = place / "bf16.gguf", target.model
    layouts.write_file(model, layouts.header(lm, target.tokenizer, "bf16"), weights_of(lm), lm, "bf16")
    return [binary, "-m", model]


def their_server(stack: ExitStack, target: Any, place: Path, clients: int) -> Iterator[tuple[str, Way]]:
    words = their_model(target, place)
    if words is not None:
        words += ["-np", clients, "-c", 2048 * clients, "-fa", "on", "-t", os.cpu_count(), "--jinja"]
        server = stack.enter_context(running("llama-server", partial(with_port, words)))
        server.pause()
        yield "llama-server", partial(over_http, server, {"cache_prompt": False})


def over_http(server: Server, more: dict[str, Any], prompts: Sequence[str], new: int, clients: int) -> Answers:
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    with server.awake(), httpx.Client(timeout=WAIT_S, limits=httpx.Limits(max_connections=clients)) as client:

        def ask(prompt: str) -> Any:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": new, "temperature": 0} | more
            return client.post(url, json=body).raise_for_status().json()

        with ThreadPoolExecutor(clients) as threads:
            began = time.perf_counter()
            found = list(threads.map(ask, prompts))
            seconds = time.perf_counter() - began
    texts = [each["choices"][0]["message"]["content"] for each in found]
    return Answers(seconds, sum(each["usage"]["completion_tokens"] for each in found), texts)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(ways: dict[str, Way], prompts: Sequence[str], new: int, clients: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Answers]] = defaultdict(list)
    order = list(ways)
    for name, way in ways.items():
        way(prompts[:clients], 32, clients)
        print(f"{clients} at a time: {name} is warm", file=sys.stderr, flush=True)
    for number in range(rounds):
        order = [*order[1:], order[0]]
        for name in order:
            own = ways[name](prompts, new, clients)
            found[name].append(own)
            print(f"round {number + 1}: {name}: {own.tokens / own.seconds:.0f} tokens/s", file=sys.stderr, flush=True)
    rates = {name: sum(own.tokens for own in answers) / sum(own.seconds for own in answers)
             for name, answers in found.items()}  # fmt: skip
    ours = [name for name in found if name != "llama-server"]
    reference = found[ours[0]][0].texts
    differ = sum(
        text != wanted
        for name in ours
        for own in found[name]
        for text, wanted in zip(own.texts, reference, strict=True)
    )
    pairs = [(f"serve {name}", f"generate {name}") for name in ("plain", "suffix", "mix")]
    pairs += [(name, "llama-server") for name in ours if name.startswith("serve")]
    ratios = {
        f"{one} over {other}": ratio(found[one], found[other]) for one, other in pairs if {one, other} <= found.keys()
    }
    return {"tokens_per_s": rates, "ratios": ratios, "texts_that_differ": differ}


def ratio(one: Sequence[Answers], other: Sequence[Answers]) -> dict[str, float]:
    """Ratio of tokens per second."""
    theirs, ours = ([own.seconds / own.tokens for own in answers] for answers in (other, one))
    found = ratio_of_totals(theirs, ours)
    return {"low": found.low, "center": found.center, "high": found.high}


def promises(by_clients: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for clients, own in by_clients.items():
        rates, where = own["tokens_per_s"], f"{clients} at a time: "
        best = max((name for name in rates if name.startswith("serve")), key=rates.__getitem__)
        if "llama-server" in rates:
            wanted = 1.15 if clients == 1 else 1.3
            lines.append(promise(f"{where}{best} over llama-server", wanted, rates[best] / rates["llama-server"]))
        alone = best.replace("serve", "generate")
        lines.append(promise(f"{where}{best} over {alone}", 0.97, rates[best] / rates[alone]))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
