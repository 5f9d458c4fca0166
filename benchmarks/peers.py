"""Tokens per second compared with other engines on the same machine: whole requests including the prompt, one at a time
and in batches.

    python benchmarks/engines/build_llama.py
    python benchmarks/engines/install_openvino.py
    python3.11 benchmarks/engines/install.py
    python benchmarks/peers.py [--batches 1,4,16,64] [--only ours,llama] [--prompts 8] [--new 96] [--rounds 2] [--out
    FILE]

The demo target, greedy, with every configuration of every engine interleaved.  Ours, compiled: plain, with ngram, and
with the checkpoint of the last `make demo`; plain and that checkpoint also with steps that are one call, to which the
promises about plain apply. llama.cpp's server, with weights in float32 and in 16 bits: by default, with its own
n-grams, and with our small model and that checkpoint as drafters.  OpenVINO GenAI on the 16-bit file, with and without
its prompt lookup; vLLM in float32, with and without its n-grams; `generate` of transformers.  Whatever is unavailable
here, or fails in the warm-up, is in `left_out`, with the reason.

Batch 1 is `--prompts` requests, one after the other, with configurations interleaved per request; `first_ms` is a
request for one token.  Batch b is twice b requests, at least eight: b are served at a time, and the next one starts
when one ends.  Servers get b clients and b slots; transformers, which can't replace a row, gets b prompts at a time,
left-padded. vLLM starts once, with as many slots as the largest batch.  Prefix caching is off.  Texts are compared with
our plain ones, whose weights and caches are float32; the others use their default caches: llama.cpp's in 16 bits,
OpenVINO's in 8.

LLAMA_SERVER names another binary of llama.cpp.  Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from batch_time import CHECKPOINT, parties, promise, prompts_of, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import gguf_files, install, install_openvino, llama_cpp, openvino_worker, vllm_server  # noqa: E402
from benchmarks.engines.build_llama import COMMIT, VERSION, server  # noqa: E402
from outrider import generate, machine  # noqa: E402
from outrider.errors import OutriderError  # noqa: E402
from outrider.fast.runner import using  # noqa: E402
from outrider.formats.gguf import layouts as gguf  # noqa: E402
from outrider.weights import weights_of  # noqa: E402

Answers = Callable[[list[list[int]], int, int], list[list[int]]]
"""(prompts, new tokens, number of prompts at a time) to the tokens of the answers, without the end token."""
Offer = tuple[str, AbstractContextManager[Answers]]
"""A configuration by name, and what starts and stops it."""
CANNOT = (OSError, OutriderError, httpx.HTTPError, SystemExit)
"""Errors meaning that a configuration is unavailable here."""
OURS, SIXTEEN = "outrider: ", "llama.cpp: 16 bits"
ONE_CALL = ", one call"
"""Marks a configuration whose steps are one call each."""
PLAIN = ("transformers", "OpenVINO: 16 bits", "vLLM: float32")
"""Other engines without a draft."""
KINDS = {"float32": "f32", "16 bits": "f16"}
SETTLE = 2.0
"""Seconds before each turn: a server may stay busy for one after a request."""
LOOKUP = 5
"""Tokens that transformers drafts from the prompt."""


class Way(NamedTuple):
    name: str
    answers: Answers


class Measured(NamedTuple):
    """One configuration's requests at one batch size, without the warm-up."""

    seconds: list[float]
    first: list[float]
    texts: list[list[int]]
    """By round."""


def main() -> int:
    wanted = settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything started is stopped too
    machine.set_up_process()
    target, drafters = parties(["ngram", "dspark"])
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    with ExitStack() as whole, tempfile.TemporaryDirectory() as place:
        files = written(target, Path(place))
        vllm = started(whole, vllm_ways(target, max(wanted.batches)), wanted, left_out)
        for batch in wanted.batches:
            prompts = prompts_of(target, wanted.prompts if batch == 1 else max(8, 2 * batch))
            with ExitStack() as stack:
                offers = itertools.chain(
                    our_ways(target, drafters), transformers_ways(target, batch), llama_ways(target, files, batch),
                    openvino_ways(target, files, batch),
                )  # fmt: skip
                ways = [*started(stack, offers, wanted, left_out, batch), *vllm]
                rows += measured(ways, prompts, wanted.new, batch, wanted.rounds, left_out)
            save(target, rows, left_out, wanted)
    return 0


def save(target: Any, rows: list[dict[str, Any]], left_out: list[dict[str, Any]], wanted: argparse.Namespace) -> None:
    """Save the results so far: a stopped run keeps the batch sizes it finished."""
    lengths = [len(prompt) for prompt in prompts_of(target, wanted.prompts)]
    done = dict.fromkeys(row["batch"] for row in rows)
    write(
        {
            "promises": [one for batch in done for one in promises(rows, batch)],
            "llama_cpp": {"package": f"llama-cpp-python {VERSION}", "commit": COMMIT},
            "openvino": install_openvino.PINS[0], "vllm": install.VLLM, "left_out": left_out, "rows": rows,
            "prompts": wanted.prompts, "prompt_tokens": statistics.mean(lengths), "new": wanted.new,
        },
        wanted.out,
    )  # fmt: skip


def settings() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda said: [int(one) for one in said.split(",")], default=[1])
    parser.add_argument(
        "--only", type=lambda said: tuple(said.lower().split(",")), help="beginnings of names; ours always"
    )
    parser.add_argument("--prompts", type=int, default=8, help="at batch 1")
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def started(
    stack: ExitStack, offers: Iterator[Offer], wanted: argparse.Namespace, left_out: list[dict[str, Any]],
    batch: int | None = None,
) -> list[Way]:  # fmt: skip
    """The requested configurations that are available; the others are left out."""
    ways = []
    for name, start in offers:
        if wanted.only and not name.startswith(OURS) and not name.lower().startswith(wanted.only):
            continue
        try:
            ways.append(Way(name, stack.enter_context(start)))
        except CANNOT as error:
            leave_out(left_out, name, batch, error)
    return ways


def leave_out(left_out: list[dict[str, Any]], name: str, batch: int | None, error: BaseException) -> None:
    print(f"left out: {name}: {error}", file=sys.stderr, flush=True)
    left_out.append({"way": name, "batch": batch, "why": str(error)})


def measured(
    ways: Sequence[Way], prompts: list[list[int]], new: int, batch: int, rounds: int, left_out: list[dict[str, Any]]
) -> list[dict[str, Any]]:  # fmt: skip
    """Every configuration's requests, interleaved, after a warm-up."""
    groups = [[prompt] for prompt in prompts] if batch == 1 else [prompts]
    found = {}
    for way in ways:
        try:
            for group in groups:
                asked(way, group, new, batch)
            found[way] = Measured([], [], [])
        except CANNOT as error:
            leave_out(left_out, way.name, batch, error)
    for number in range(rounds):
        for n, group in enumerate(groups):
            for way, own in found.items():
                first, seconds, texts = asked(way, group, new, batch)
                own.first.append(first)
                own.seconds.append(seconds)
                own.texts.extend(texts)
            said = f"batch {batch}, round {number + 1} of {rounds}: {n + 1} of {len(groups)} turns"
            print(said, file=sys.stderr, flush=True)
    plain = next(own.texts for way, own in found.items() if way.name == OURS + "plain")
    return [row(way.name, batch, own, plain[: len(prompts)]) for way, own in found.items()]


def asked(way: Way, group: list[list[int]], new: int, batch: int) -> tuple[float, float, list[list[int]]]:
    """Seconds to a first token, only at batch 1; seconds of the requests; texts."""
    time.sleep(SETTLE)
    began = time.perf_counter()
    if batch == 1:
        way.answers(group, 1, 1)
    middle = time.perf_counter()
    texts = way.answers(group, new, batch)
    return middle - began, time.perf_counter() - middle, texts


def row(name: str, batch: int, own: Measured, plain: list[list[int]]) -> dict[str, Any]:
    return {
        "way": name, "batch": batch, "tokens_per_s": sum(map(len, own.texts)) / sum(own.seconds),
        "first_ms": 1e3 * statistics.median(own.first) if batch == 1 else None, "texts": len(plain),
        "equal": sum(mine == text for mine, text in zip(plain, own.texts, strict=False)),
    }  # fmt: skip


def promises(rows: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """The promises for one batch size, for the engines that are present."""
    own = {one["way"]: one for one in rows if one["batch"] == batch}
    speed = {name: one["tokens_per_s"] for name, one in own.items()}
    theirs = [name for name in speed if not name.startswith(OURS)]
    if not theirs:
        return []
    plain, mine = speed[OURS + "plain" + ONE_CALL], max(speed.keys() - theirs, key=speed.__getitem__)
    best = max(theirs, key=speed.__getitem__)
    found = [promise(f"batch {batch}: {mine} over the best of others, {best}", 1.5, speed[mine] / speed[best])]
    if SIXTEEN in speed:
        found.insert(
            0, promise(f"batch {batch}: plain over llama.cpp with 16-bit weights", 1.1, plain / speed[SIXTEEN])
        )
    found += [promise(f"batch {batch}: plain over {name}", 1.5, plain / speed[name]) for name in PLAIN if name in speed]
    if batch == 1:
        first = min(own[name]["first_ms"] for name in theirs)
        found.append(
            promise("batch 1: first token: theirs over ours", 1.0, first / own[OURS + "plain" + ONE_CALL]["first_ms"])
        )
    return found


# ── the engines ───────────────────────────────────────────────────────────────────────────────────────────────────────


def our_ways(target: Any, drafters: dict[str, Any]) -> Iterator[Offer]:
    for name, drafter in ({"plain": None} | drafters).items():
        yield OURS + name, nullcontext(partial(outrider, target, drafter, False))
    for name in ("plain", "dspark"):
        if name == "plain" or name in drafters:
            yield OURS + name + ONE_CALL, nullcontext(partial(outrider, target, drafters.get(name), True))


def outrider(
    target: Any, drafter: Any, is_one_call: bool, prompts: list[list[int]], new: int, slots: int
) -> list[list[int]]:  # fmt: skip
    with using("built" if is_one_call else "none"):
        found = generate(target, prompts, drafter, max_new_tokens=new, slots=slots)
    return [without_ends(target, one.tokens) for one in found]


def transformers_ways(target: Any, batch: int) -> Iterator[Offer]:
    yield "transformers", nullcontext(partial(transformers, target, {}))
    if batch == 1:  # it does not draft for batches
        yield (
            "transformers, its prompt lookup",
            nullcontext(partial(transformers, target, {"prompt_lookup_num_tokens": LOOKUP})),
        )


@torch.inference_mode()
def transformers(target: Any, more: dict[str, Any], prompts: list[list[int]], new: int, slots: int) -> list[list[int]]:
    pad, found = min(target.ends), []
    for part in (prompts[at : at + slots] for at in range(0, len(prompts), slots)):
        longest = max(map(len, part))
        given = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in part])
        texts = target.model.generate(
            given, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=pad, **more
        )
        found += [without_ends(target, text) for text in texts[:, longest:].tolist()]
    return found


def llama_ways(target: Any, files: dict[str, Path], batch: int) -> Iterator[Offer]:
    binary = Path(os.environ.get("LLAMA_SERVER", server()))
    for name, kind in KINDS.items():
        serve = partial(llama, target, binary, files[kind], batch)
        dspark = partial(gguf_files.drafter, CHECKPOINT, target, files[kind].parent, kind)
        yield f"llama.cpp: {name}", serve(list)
        yield f"llama.cpp: {name}, its n-grams", serve(lambda: ["--spec-type", "ngram-simple"])
        yield f"llama.cpp: {name}, our small model", serve(partial(llama_cpp.drafting, files[f"draft {kind}"]))
        yield (
            f"llama.cpp: {name}, our dspark",
            serve(lambda dspark=dspark: ["--spec-type", "draft-dspark", "-md", dspark()]),
        )


@contextmanager
def llama(target: Any, binary: Path, model: Path, slots: int, more: Callable[[], list[object]]) -> Iterator[Answers]:
    threads = torch.get_num_threads()
    with llama_cpp.serving(binary, model, target.spec.context, threads, more(), slots) as client:

        def ask(prompt: list[int], new: int) -> list[int]:
            body = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True}
            said = client.post("/completion", json=body).raise_for_status().json()
            return without_ends(target, said["tokens"])

        yield partial(pooled, ask)


def openvino_ways(target: Any, files: dict[str, Path], batch: int) -> Iterator[Offer]:
    yield "OpenVINO: 16 bits", openvino(target, files["f16"], batch, lookup=False)
    yield "OpenVINO: 16 bits, its prompt lookup", openvino(target, files["f16"], batch, lookup=True)


@contextmanager
def openvino(target: Any, model: Path, slots: int, lookup: bool) -> Iterator[Answers]:
    python = install_openvino.AT / "bin" / "python"
    with openvino_worker.working(python, model, slots, torch.get_num_threads(), lookup) as ask:
        yield lambda prompts, new, _: [without_ends(target, text) for text in ask(prompts, new)]


def vllm_ways(target: Any, slots: int) -> Iterator[Offer]:
    yield "vLLM: float32", vllm(target, slots, None)
    yield "vLLM: float32, its n-grams", vllm(target, slots, vllm_server.NGRAM)


@contextmanager
def vllm(target: Any, slots: int, speculative: dict[str, Any] | None) -> Iterator[Answers]:
    with vllm_server.serving(slots, speculative) as client:

        def ask(prompt: list[int], new: int) -> list[int]:
            body = {"model": "demo", "prompt": prompt, "max_tokens": new, "temperature": 0, "return_token_ids": True}
            said = client.post("/v1/completions", json=body).raise_for_status().json()
            return without_ends(target, said["choices"][0]["token_ids"])

        yield partial(pooled, ask)


def pooled(
    ask: Callable[[list[int], int], list[int]], prompts: list[list[int]], new: int, slots: int
) -> list[list[int]]:
    """A server's answers to this many clients, each with one request at a time."""
    with ThreadPoolExecutor(slots) as clients:
        return list(clients.map(ask, prompts, itertools.repeat(new)))


def without_ends(target: Any, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token not in target.ends]


def written(target: Any, place: Path) -> dict[str, Path]:
    """The target and our small model as GGUF files, by number type."""
    lm, drafts = target.model, llama_cpp.written(target, place)[0]
    files = {f"draft {kind}": drafts[kind] for kind in KINDS.values()}
    for kind in KINDS.values():
        files[kind] = place / f"target-{kind}.gguf"
        gguf.write_file(files[kind], gguf.header(lm, target.tokenizer, kind), weights_of(lm), lm, kind)
    return files


if __name__ == "__main__":
    raise SystemExit(main())
