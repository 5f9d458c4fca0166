"""The demo in llama.cpp: does its server write, with our drafters and without, what the target writes here?

    python benchmarks/engines/build_llama.py
    python benchmarks/engines/llama_cpp.py [--prompts 24] [--new 96] [--rows 'dspark;eagle3'] [--runs runs] [--out FILE]

Target and drafter are written as GGUF by `outrider export`'s own code, the target in float32.  Compared are token ids:
of texts through the server's /tokenize, and of greedy continuations, the server's without a draft, with the drafter in
float32 and in float16, and ours.  Where two texts part, the gap between the target's two best logits there says whether
rounding could do it. Drafts are counted by the server and, for the same drafter and prompts, here.  No times are taken.
Then every kind that is exported, trained, is compared step by step as `outrider verify-export` does it, and planted
faults must be found: `llama_drafters.py`.

LLAMA_SERVER names another binary.  Prints JSON; exits with 1 on a difference, with 3 where there is no server.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import llama_drafters  # noqa: E402
from benchmarks.engines.build_llama import CANNOT, COMMIT, VERSION, server  # noqa: E402
from benchmarks.replay import progress_bar, provenance, publish  # noqa: E402
from outrider import demo, generate, load_drafter, load_target  # noqa: E402
from outrider.checkpoint import save  # noqa: E402
from outrider.config import build  # noqa: E402
from outrider.drafters import find  # noqa: E402
from outrider.export.writing import export_folder  # noqa: E402
from outrider.formats.gguf import layouts  # noqa: E402
from outrider.weights import weights_of  # noqa: E402

LENGTH = 4
SAME = ("--metrics", "--no-warmup", "-ctk", "f32", "-ctv", "f32", "-fa", "off")
"""Arithmetic as ours: caches in float32."""
ROUNDING = 1e-3
"""Logits nearer than this may change places by the order of a float32 sum alone."""
HARD = [
    "'RE you sure? I'Ve 3 33 333 3333 tokens", "tabs\t\tand  \n \n\n  spaces   ", "ünïcödé — 語 🚀 \u200d",
    "def f(x):\n    return x\n", "<|endoftext|> spelled out", "0x7f != 1e-9; a[i] += b{j}", " leading", "trailing ",
    "\r\nwindows\r\n",
]  # fmt: skip
"""Texts on which tokenizers part."""


class Text(NamedTuple):
    tokens: list[int]
    drafted: int
    kept: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="where the trained checkpoints are")
    parser.add_argument("--rows", default=";".join(("small_model", *llama_drafters.CHECKPOINTS)), help="with ; between")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    binary = found_binary()
    if binary is None:
        return CANNOT
    began = time.monotonic()
    torch.set_num_threads(wanted.threads)
    target = load_target("demo", dtype="float32", compile=False)
    texts = [text for _, text in demo.prompts("held_out", wanted.prompts)]
    prompts = [target.encode(text) for text in texts]
    with tempfile.TemporaryDirectory() as place:
        files, checkpoint = written(target, Path(place))
        plain = [one.tokens for one in generate(target, prompts, max_new_tokens=wanted.new)]
        drafted = generate(target, prompts, load_drafter(checkpoint, target), max_new_tokens=wanted.new, policy="fixed")
        assert [one.tokens for one in drafted] == plain
        found: dict[str, Any] = {"plain": None, "drafter in float32": files["f32"], "drafter in float16": files["f16"]}
        rows, ids = [], []
        for name, draft in found.items():
            with serving(
                binary, files["target"], target.spec.context, wanted.threads, [*SAME, *drafting(draft)]
            ) as client:
                if draft is None:
                    ids = [tokenized(client, text) == target.tokenizer.encode(text) for text in [*texts, *HARD]]
                answers = continued(client, prompts, wanted.new, name)
                rows.append(compared(target, name, prompts, plain, answers) | steps_of(client, bool(draft)))
        sizes = {name: path.stat().st_size for name, path in files.items()}
        rows.append(llama(target, Path(place), binary, prompts[:4], wanted.new, wanted.threads))
        names = tuple(wanted.rows.split(";"))
        drafters = list(
            llama_drafters.rows(target, wanted.runs, checkpoint, Path(place), binary, prompts, wanted.new, names)
        )
    promised = llama_drafters.promises(drafters)
    steps = sum(one.steps for one in drafted)
    offered = sum(len(one.tokens) for one in drafted)
    publish(
        {
            **provenance(time.monotonic() - began),
            "llama_cpp": {"package": f"llama-cpp-python {VERSION}", "commit": COMMIT, "binary": version_of(binary)},
            "prompts": len(prompts), "new_tokens": wanted.new, "draft_length": LENGTH, "size_bytes": sizes,
            "tokenized": {"texts": len(ids), "equal": sum(ids)}, "rows": rows,
            "drafters": drafters, "promises": promised,
            "ours": {"tokens": offered, "steps": steps, "kept": sum(sum(one.accepted) for one in drafted),
                     "tokens_per_step": sum(sum(one.accepted) for one in drafted) / steps + 1},
        },
        wanted.out,
    )  # fmt: skip
    kept = all(one["holds"] for one in promised)
    return int(not all(ids) or any(row["mismatches"] for row in rows) or not kept)


def found_binary() -> Path | None:
    """The server; where there is none, that is said."""
    binary = Path(os.environ.get("LLAMA_SERVER", server()))
    if binary.exists():
        return binary
    print(f"skipped: no {binary}; build it: python benchmarks/engines/build_llama.py", file=sys.stderr)
    return None


def written(target: Any, place: Path) -> tuple[dict[str, Path], Path]:
    """GGUF files of the demo pair, the drafter in two precisions, and the drafter's checkpoint."""
    module = find("small_model")
    settings = build(module.Config, {"kind": "small_model", "length": LENGTH}, "drafter")
    save(place / "checkpoint", module.Model(settings, target))
    files = {
        name: export_folder(place / "checkpoint", "gguf", place / name, target, name) / layouts.FILE
        for name in ("f32", "f16")
    }
    lm = target.model
    layouts.write_file(place / "target.gguf", layouts.header(lm, target.tokenizer, "f32"), weights_of(lm), lm, "f32")
    return {"target": place / "target.gguf", **files}, place / "checkpoint"


def llama(
    target: Any, place: Path, binary: Path, prompts: Sequence[list[int]], new: int, threads: int
) -> dict[str, Any]:  # fmt: skip
    """A random Llama whose rotation is stretched as Llama 3's, without a draft: its rows and frequencies are written
    anew."""
    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256}  # fmt: skip
    shape = LlamaConfig(
        vocab_size=target.spec.vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=rope, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=target.tokenizer.eos_token_id,
    )  # fmt: skip
    lm = LlamaForCausalLM(shape).eval()
    layouts.write_file(place / "llama.gguf", layouts.header(lm, target.tokenizer, "f32"), weights_of(lm), lm, "f32")
    other = load_target(lm)
    plain = [one.tokens for one in generate(other, prompts, max_new_tokens=new)]
    with serving(binary, place / "llama.gguf", 2048, threads, SAME) as client:
        return compared(other, "a random llama", prompts, plain, continued(client, prompts, new, "a random llama"))


def drafting(draft: Path | None) -> list[object]:
    """Arguments for a small model that drafts."""
    return ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", LENGTH] if draft else []


@contextmanager
def serving(
    binary: Path, model: Path, context: int, threads: int, more: Sequence[object] = (), slots: int = 1
) -> Iterator[httpx.Client]:  # fmt: skip
    """llama-server on a free port of the loopback, stopped at the end.  context: of each slot; more: arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        binary, "-m", model, "--host", "127.0.0.1", "--port", port, "-c", context * slots, "-np", slots,
        "-t", threads, "-tb", threads, *more,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                if not ready(client, process):
                    log.seek(0)
                    raise SystemExit("llama-server did not start:\n" + "".join(log.readlines()[-15:]))
                yield client
        finally:
            process.terminate()
            process.wait(30)


def ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    for _ in range(600):
        if process.poll() is not None:
            return False
        try:
            if client.get("/health").status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return False


def tokenized(client: httpx.Client, text: str) -> list[int]:
    answer = client.post(
        "/tokenize", json={"content": text, "add_special": True, "parse_special": True}
    ).raise_for_status()
    return list(answer.json()["tokens"])


def continued(client: httpx.Client, prompts: Sequence[list[int]], new: int, name: str) -> list[Text]:
    """Greedy continuations, one after the other."""
    found = []
    with progress_bar() as bar:
        for prompt in bar.track(prompts, description=name):
            asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True}
            said = client.post("/completion", json=asked).raise_for_status().json()
            times = said["timings"]
            found.append(Text(list(said["tokens"]), times.get("draft_n", 0), times.get("draft_n_accepted", 0)))
    return found


def compared(
    target: Any, name: str, prompts: Sequence[list[int]], ours: Sequence[list[int]], theirs: Sequence[Text]
) -> dict[str, Any]:  # fmt: skip
    """What became of one setting; a difference whose two tokens lie within `ROUNDING` is a tie."""
    parted = []
    for number, (prompt, mine, answer) in enumerate(zip(prompts, ours, theirs, strict=True)):
        ends = set(target.ends)
        own = mine[:-1] if mine and mine[-1] in ends else mine  # the server leaves out what ends a text
        other = answer.tokens[:-1] if answer.tokens and answer.tokens[-1] in ends else answer.tokens
        if own != other:
            place = next(
                (i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other))
            )
            parted.append({"prompt": number, "token": place, "gap": gap(target, [*prompt, *own[:place]])})
    ties = sum(one["gap"] < ROUNDING for one in parted)
    return {
        "name": name, "texts": len(prompts), "equal": len(prompts) - len(parted), "ties": ties,
        "mismatches": len(parted) - ties, "parted": parted, "compared_tokens": sum(map(len, ours)),
        "drafted": sum(one.drafted for one in theirs), "kept": sum(one.kept for one in theirs),
    }  # fmt: skip


@torch.inference_mode()
def gap(target: Any, text: list[int]) -> float:
    """Between the two best logits behind a text."""
    best = target.model(torch.tensor([text])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def steps_of(client: httpx.Client, speculates: bool) -> dict[str, float]:
    """Drafted blocks and tokens per step, as the server counts them; steps without a draft are not among them."""
    if not speculates:
        return {}
    lines = [
        line.split() for line in client.get("/metrics").raise_for_status().text.splitlines() if not line.startswith("#")
    ]
    counts = {line[0].removeprefix("llamacpp:spec_decode_num_").removesuffix("_total"): float(line[1]) for line in lines
              if line and line[0].startswith("llamacpp:spec_decode_num_")}  # fmt: skip
    return {"steps": counts["drafts"], "tokens_per_step": 1 + counts["accepted_tokens"] / counts["drafts"]}


def version_of(binary: Path) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True)
    return next((line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")), "not known")


if __name__ == "__main__":
    raise SystemExit(main())
