"""Shared by the parts of `serving.py`: requests with known answers, servers that take turns, and figures."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPException
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engines.server_process import Server, running
from benchmarks.replay import spread
from benchmarks.serving_clients import Due
from outrider import demo, generate
from outrider.errors import OutriderError
from outrider.report.bootstrap import rate_ratio, ratio_of_rates, resampled

CANNOT = (OSError, HTTPException, OutriderError, MemoryError, ValueError)
"""Errors meaning that a server is unavailable here, or does not support the request."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def at_most(what: str, most: float, found: float) -> dict[str, Any]:
    """One line of `promises`, for a value that should be at most this large."""
    return {"promise": what, "wanted": most, "found": found, "holds": found <= most}


def leave_out(left_out: list[dict[str, Any]], way: str, error: BaseException) -> None:
    tell(f"left out: {way}: {error}")
    one = {"way": way, "why": str(error)[:400]}
    if one not in left_out:
        left_out.append(one)


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
    as the text does: that is not a tie.
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
    """The result of one way in one turn."""

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
            # servers count the end of a text differently: here equal texts have equal counts
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


def started(given: Mapping[str, Any], name: str) -> Any:
    """One of our servers, started."""
    return running(name, partial(outrider_serve, **given))


@contextmanager
def asleep(
    starts: Mapping[str, Callable[[str], Any]], left_out: list[dict[str, Any]], warm: Callable[[Server], None]
) -> Iterator[dict[str, Server]]:
    """Servers by name, started one after the other, warmed up and paused; unavailable ones are left out."""
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, start in starts.items():
            with ExitStack() as own:
                try:
                    server = own.enter_context(start(name))
                    warm(server)
                    tell(f"{name}: started, {server.resident_bytes() >> 20} MiB")
                    server.pause()
                except CANNOT as error:
                    leave_out(left_out, name, error)
                else:
                    servers[name] = server
                    stack.enter_context(own.pop_all())
        yield servers


def warmed(clients: Clients, server: Server, pool: Sequence[Due]) -> None:
    """Send some requests to one of our servers, so that all its code has run."""
    clients.turn(server, pool, list(range(min(8, len(pool)))), 4)


def numbers_of(turn: int, count: int, pool: int) -> list[int]:
    """The requests of a turn: different in each turn, the same for all ways."""
    begin = turn * count % pool
    return list(islice(cycle(range(pool)), begin, begin + count))


def by_turns(
    ways: Sequence[str], turns: int, ask: Callable[[str, int], Turn], left_out: list[dict[str, Any]]
) -> dict[str, list[Turn]]:
    """Every way's turns, one way after the other, starting with a different one in each turn.  The first turn is a
    warm-up."""
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(turns + 1):
        begin = number % len(ways)
        for way in [*ways[begin:], *ways[:begin]]:
            if way not in found:
                continue
            try:
                done = ask(way, number)
            except CANNOT as error:
                leave_out(left_out, way, error)
                del found[way]
                continue
            if number:
                found[way].append(done)
    return found


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def rate(turns: Sequence[Turn]) -> float:
    """Tokens per second."""
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def ratio(one: Sequence[Turn], other: Sequence[Turn]) -> dict[str, Any]:
    """Ratio of the two tokens/s, paired by turn, with the 95 % interval."""
    found = ratio_of_rates([(a.tokens, a.seconds, b.tokens, b.seconds) for a, b in zip(one, other, strict=True)])
    return {"ratio": found.center, "interval": [found.low, found.high]}


def ratio_over(one: Sequence[Turn], plain: Sequence[Turn], best: Sequence[tuple[Turn, Turn]]) -> dict[str, Any]:
    """The speed-up of one over plain requests to its server, relative to that of the best, paired by turn."""
    sides = zip(one, plain, best, strict=True)
    table = np.array([[value for turn in (a, b, *c) for value in (turn.tokens, turn.seconds)] for a, b, c in sides])

    def ratios(values: Any) -> Any:
        return rate_ratio(values[..., :4]) / rate_ratio(values[..., 4:])

    low, high = np.quantile(resampled(table, ratios, 10_000, 0), [0.025, 0.975])
    return {"ratio": float(ratios(table)), "interval": [float(low), float(high)]}


def best_over_plain(
    ways: Mapping[str, Sequence[Turn]], plain: Sequence[Turn]
) -> tuple[list[tuple[Turn, Turn]], list[str]]:
    """The fastest among one server's ways and plain requests to it, paired with the plain turns, and its names."""
    best, names = best_by_halves({"plain": plain, **ways})
    return list(zip(best, plain, strict=False)), names


def best_by_halves(ways: Mapping[str, Sequence[Turn]]) -> tuple[list[Turn], list[str]]:
    """Turns of the fastest way, and its names: even turns use the fastest of the odd ones, and vice versa."""
    names = []
    for half in (0, 1):
        rates = {name: rate(turns[1 - half :: 2] or turns) for name, turns in ways.items()}
        names.append(max(rates, key=rates.__getitem__))
    count = min(map(len, ways.values()))
    return [ways[names[n % 2]][n] for n in range(count)], list(dict.fromkeys(names))


def first_s(turns: Sequence[Turn]) -> list[float]:
    return [row["first_s"] for turn in turns for row in turn.rows]


def per_token_s(turns: Sequence[Turn]) -> list[float]:
    """For each answer of two or more tokens, the mean time per token after the first."""
    rows = [row for turn in turns for row in turn.rows if row["tokens"] > 1]
    return [(row["whole_s"] - row["first_s"]) / (row["tokens"] - 1) for row in rows]


def quantiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float]:
    return {f"p{share}": scale * float(np.quantile(values, share / 100)) for share in (50, 99)} if values else {}


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """One way at one concurrency.  A gap is the time between two pieces, each with one step's tokens."""
    rows = [row for turn in turns for row in turn.rows]
    gaps = [gap for row in rows for gap in row["gaps_s"]]
    return {
        "tokens_per_s": rate(turns), "tokens": sum(turn.tokens for turn in turns),
        "seconds": sum(turn.seconds for turn in turns), "texts": len(rows),
        "texts_equal": sum(row["is_equal"] for row in rows), "first_ms": quantiles(first_s(turns)),
        "per_token_ms": quantiles(per_token_s(turns)), "gap_ms": quantiles(gaps),
        "clients_cpu": statistics.mean(turn.cpu for turn in turns),
    }  # fmt: skip


def goodput(turns: Sequence[Turn], first: float, per_token: float) -> float:
    """Share of answers whose first token took at most `first` seconds and the others at most `per_token` each."""
    rows = [row for turn in turns for row in turn.rows]
    good = [
        row["first_s"] <= first and row["whole_s"] - row["first_s"] <= per_token * (row["tokens"] - 1) for row in rows
    ]
    return sum(good) / len(rows)
