"""Shared by `serving.py` and `learning.py`: requests with known answers, the client process, our server's command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.server_process import Server
from benchmarks.replay import spread
from benchmarks.serving_clients import Due
from outrider import demo, generate


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def at_most(what: str, most: float, found: float) -> dict[str, Any]:
    """One line of `promises`, for a value that should be at most this large."""
    return {"promise": what, "wanted": most, "found": found, "holds": found <= most}


# ── requests with known answers ───────────────────────────────────────────────────────────────────────────────────────


def known(
    target: Any, count: int, longest: Sequence[int], sizes: Sequence[int] = (600,), has_all: bool = False
) -> list[Due]:  # fmt: skip
    """Requests over the demo's held-out prompts, with the answers of `generate`.

    longest: maximum answer lengths in tokens, in cycles; sizes: characters of a prompt, in cycles.  has_all: one in
    four is a chat, and one in five is sampled with a seed.
    """
    texts = [list(demo.prompts("held_out", -(-count // len(sizes)), characters=size)) for size in sizes]
    prompts = [text for _, text in islice((one for row in zip(*texts, strict=False) for one in row), count)]
    groups: dict[tuple[int, bool], list[int]] = {}
    for number in range(len(prompts)):
        groups.setdefault((longest[number % len(longest)], has_all and number % 7 == 6), []).append(number)
    found: dict[int, Due] = {}
    for (new, is_drawn), numbers in groups.items():
        drawn = {"temperature": 0.8, "seed": new} if is_drawn else {}
        asked = [asking(prompts[number], has_all and number % 4 == 3) for number in numbers]
        given = [body["messages"] if "messages" in body else body["prompt"] for _, body in asked]
        answers = generate(target, given, max_new_tokens=new, **drawn)
        for number, (path, body), answer in zip(numbers, asked, answers, strict=True):
            body |= {"max_tokens": new, "temperature": 0, "stream": True, **drawn}
            body |= {"stream_options": {"include_usage": True}}
            reason = "stop" if answer.finish_reason == "stop" else "length"
            found[number] = Due(path, body, answer.text, answer.tokens, reason)
    return [found[number] for number in range(len(prompts))]


def asking(prompt: str, is_chat: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    if is_chat:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", {"prompt": prompt}


def with_body(pool: Sequence[Due], **more: Any) -> list[Due]:
    return [due._replace(body=due.body | more) for due in pool]


def audit(target: Any, due: Due, text: str) -> dict[str, Any] | None:
    """Where a greedy text diverges from the known one, and by what margin the target prefers its own token there.

    `difference` is the largest change of a logit there between passes of different shapes.  None if no token continues
    the way the text does: then it is not a tie.
    """
    decode = target.detokenizer.decode
    at = max(n for n in range(len(due.tokens) + 1) if text.startswith(decode(due.tokens[:n]).removesuffix("\ufffd")))
    rest = text[len(decode(due.tokens[:at]).removesuffix("\ufffd")) :]
    if at == len(due.tokens):
        return None
    pieces = {token: decode([token]) for token in range(target.spec.vocabulary)}
    fits = [token for token, piece in pieces.items() if piece and (rest.startswith(piece) or piece.startswith(rest))]
    others = [token for token in (fits if rest else target.ends) if token != due.tokens[at]]
    if not others:
        return None
    prompt = target.encode(due.body.get("messages") or due.body["prompt"])
    logits, difference = spread(target, [*prompt, *due.tokens[:at]], len(prompt))
    margin = float(logits[due.tokens[at]] - logits[others].max())
    return {"at": at, "margin": margin, "difference": difference}


def audited(target: Any, pool: Sequence[Due], partings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each answer that differs from the known one: whether it diverges at a tie, as greedy answers may."""
    found = []
    for one in partings:
        due = pool[one["due"]]
        is_text = one["kind"] in ("lost", "repeated", "other") and not due.body["temperature"]
        margin = audit(target, due, one["text"]) if is_text else None
        is_tie = margin is not None and margin["margin"] <= 4 * margin["difference"]
        found.append({**one, "wanted": due.text, "parted": margin, "is_tie": is_tie})
    return found


# ── clients and servers ───────────────────────────────────────────────────────────────────────────────────────────────


class Turn(NamedTuple):
    """The result of one configuration in one turn."""

    tokens: int
    seconds: float
    cpu: float
    """Share of a core used by the clients."""
    rows: list[dict[str, Any]]
    """Tokens of the answers."""
    numbers: list[int]
    """Indices of the requests in the pool."""


class Clients:
    """The client process."""

    def __enter__(self) -> Clients:
        command = [sys.executable, str(Path(__file__).with_name("serving_clients.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, **plan: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(plan), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the clients' process ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self, server: Server, pool: Sequence[Due], numbers: Sequence[int], clients: int) -> Turn:
        """Send requests of the pool from this many clients.  Raises ValueError if one is not answered."""
        requests = [[pool[number].path, pool[number].body] for number in numbers]
        found = self.ask(do="turn", port=server.port, clients=clients, requests=requests)
        bad = next((row for row in found["rows"] if row["status"] != 200 or row["error"]), None)
        if bad is not None:
            raise ValueError(f"{server.name} answered {bad['status']}: {bad['error']} {bad['body']}")
        for number, row in zip(numbers, found["rows"], strict=True):
            row["is_equal"] = row["text"] == pool[number].text
            # servers count the end of a text differently; here, equal texts have equal counts
            row["tokens"] = len(pool[number].tokens) if row["is_equal"] else row["counted"] or 1 + len(row["gaps_s"])
        tokens = sum(row["tokens"] for row in found["rows"])
        return Turn(tokens, found["seconds"], found["cpu"], found["rows"], list(numbers))


def outrider_serve(
    port: int, *, slots: int, length: int, drafter: str | None = None, policy: str | None = None,
    dtype: str | None = None, prefix_bytes: int = 0, more: Sequence[object] = (),
) -> list[object]:  # fmt: skip
    """The command of one of our servers, compiled unless a dtype is given; it does not share prompt prefixes."""
    command = [sys.executable, "-m", "outrider", "serve", "--target", "demo", "--port", port, "--slots", slots]
    command += ["--length", length, f"serve.prefix_bytes={prefix_bytes}"]
    for option, value in {"--drafter": drafter, "--policy": policy}.items():
        command += [] if value is None else [option, value]
    return [*command, *(["--compile"] if dtype is None else ["--no-compile", f"target.dtype={dtype}"]), *more]
