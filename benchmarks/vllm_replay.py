"""Do a real server's counters say what its answers say?  A replay against vLLM with n-gram speculation, added up three
ways.

    benchmarks/engines/install.py && benchmarks/engines/serve_vllm.sh &
    python benchmarks/vllm_replay.py --server http://127.0.0.1:8123 [--prompts 100] [--max-tokens 64]

Shown are three identities, over every request and to the token (for answers that end at
a stop string only the second: vLLM 0.32 leaves the figures of their drafts out of them):

1. drafts, drafted and accepted tokens of the counters = those of all answers added up;
2. tokens received = tokens the counters call generated;
3. tokens received = requests + steps + accepted - cut.  A request's first token comes from its prefill, behind which no
   step stands; each step writes one token of the target's own; `cut` are tokens that a step wrote behind the end of its
   answer, and that nobody receives.  The last part takes every step apart and counts them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from outrider import demo
from outrider.traffic import counters
from outrider.traffic.logs import traces
from outrider.traffic.replay.plan import Plan
from outrider.traffic.replay.run import replay

PLACE = Path(__file__).resolve().parent / "results" / "vllm_replay.json"


GROUPS = {
    "greedy": "all at temperature 0",
    "sampled": "all at temperature 0.7",
    "mixed": "temperatures 0 and 0.7 in turns",
    "stop": "all at temperature 0, with a stop string",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8123")
    parser.add_argument("--prompts", type=int, default=100, help="greedy ones; a quarter as many in each other group")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--out", type=Path, default=PLACE)
    parser.add_argument(
        "--only-steps", action="store_true", help="measure the last part again, into the file that is there"
    )
    wanted = parser.parse_args()
    few = max(2, wanted.prompts // 4)
    if wanted.only_steps:
        found = json.loads(wanted.out.read_text())
    else:
        found = grouped(wanted.server, wanted.prompts, few, wanted.max_tokens, wanted.concurrency)
    found["steps"] = taken_apart(wanted.server, bodies_of("greedy", few, wanted.max_tokens))
    told("steps", "the first greedy ones again, step by step", found["steps"])
    wanted.out.parent.mkdir(exist_ok=True)
    part = wanted.out.with_name(wanted.out.name + ".part")
    part.write_text(json.dumps(found, indent=2) + "\n")
    part.replace(wanted.out)
    print(f"          {wanted.out}")
    wrong = [
        f"{name}: {what}" for name in (*GROUPS, "steps") for what, holds in found[name]["holds"].items() if not holds
    ]
    if wrong:
        raise SystemExit("does not hold: " + "; ".join(wrong))


def grouped(server: str, count: int, few: int, max_tokens: int, concurrency: int) -> dict[str, Any]:
    """Every group through the replay."""
    most = (count + 4 * few) * max_tokens
    print(f"vllm      {count} + 4 × {few} prompts of held-out code at {server}: at most {most:,} tokens", flush=True)
    found: dict[str, Any] = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "server": about(server)}
    answers = {}
    for group, meaning in GROUPS.items():
        bodies = bodies_of(group, count if group == "greedy" else few, max_tokens)
        found[group], answers[group] = replayed(server, bodies, concurrency, ends_early=group == "stop")
        told(group, meaning, found[group])
    pairs = [(answers["greedy"][k], answers["mixed"][k]) for k in range(0, few, 2)]
    found["mixed"]["greedy_answers_as_in_the_first_group"] = (
        f"{sum(one == other for one, other in pairs)} of {len(pairs)}"
    )
    print(f"          greedy answers as in the first group: {found['mixed']['greedy_answers_as_in_the_first_group']}")
    return found


def told(group: str, meaning: str, found: dict[str, Any]) -> None:
    """One group in two lines."""
    counted, holds = found["counters"], found["holds"]
    print(
        f"{group:9} {found['requests']} requests, {meaning}: {found['tokens']:,} tokens in {counted['steps']:,} "
        f"steps, {counted['drafts']:,} with a draft, accepted by depth {list(counted['by_position'])}, "
        f"cut {found['cut']}"
    )
    print(f"          {sum(holds.values())} of {len(holds)} identities hold", flush=True)


def bodies_of(group: str, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of one group; the same prompts in every group."""
    bodies = []
    for number, (_, text) in enumerate(demo.prompts("held_out", count)):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if group == "sampled" or (group == "mixed" and number % 2):
            body |= {"temperature": 0.7, "seed": number}
        if group == "stop":
            body |= {"stop": ["\n\n"]}
        bodies.append(body)
    return bodies


def about(server: str) -> dict[str, str]:
    version = httpx.get(f"{server}/version", timeout=10).json()["version"]
    return {
        "engine": "vLLM",
        "version": version,
        "target": "outrider/demo/target",
        "speculation": "ngram, 5 tokens, windows 2-5",
    }


def replayed(
    server: str, bodies: list[dict[str, Any]], concurrency: int, ends_early: bool
) -> tuple[dict[str, Any], dict[int, str]]:
    """All requests through `traffic.replay.run`: what the counters say beside what the answers say, and the answers.

    With `ends_early` the answers are not asked: vLLM says nothing of the drafts of one that ended at a stop string.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        log.write_text("".join(json.dumps({"t": 0.1 * k, "body": body}) + "\n" for k, body in enumerate(bodies)))
        result = replay(traces.read(log), [server], Plan(concurrency=concurrency), folder=Path(folder) / "out")
        calls = [json.loads(line) for line in (Path(folder) / "out" / "calls.jsonl").read_text().splitlines()]
    (end,) = result.endpoints
    answers = {call["call"]: next(iter(call["servers"].values()))["answer"] for call in calls}
    said, counted = end.reported_acceptance or {}, end.acceptance or {}
    cut = counted["first_tokens"] + counted["steps"] + counted["accepted"] - counted["generated"]
    holds = {
        "every request is accounted for": end.sent == end.answered == len(bodies),
        "tokens received = tokens generated": end.tokens == counted["generated"],
        "one first token a request": counted["first_tokens"] == end.answered,
        "accepted by position add up": sum(counted["by_position"]) == counted["accepted"],
    }
    if not ends_early:
        names = ("drafts", "drafted", "accepted")
        holds |= {"every answer speaks of its drafts": said["answers"] == len(bodies)}
        holds |= {f"{name}: counters = answers": counted[name] == said[name] for name in names}
        holds |= {"cut is at most the last draft of each request": 0 <= cut <= 5 * end.answered}
    found = {
        "requests": end.sent, "answered": end.answered, "failed": end.failed, "cut_off": end.cut_off,
        "tokens": end.tokens,
        "counters": counted, "answers": said, "cut": cut, "holds": holds,
    }  # fmt: skip
    return found, answers


def taken_apart(server: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests one after the other, step by step: every piece of a stream is one step's tokens.

    A server that is too busy to send sends two steps in one piece; such an answer is asked for again, and counted.
    """
    totals = dict.fromkeys(("tokens", "steps", "drafts", "accepted", "cut"), 0)
    places, counted = [0] * 5, dict.fromkeys(("steps", "drafts", "accepted", "generated"), 0)
    counted_places = [0] * 5
    explained = asked_again = 0
    for body in bodies:
        for _ in range(10):
            before = counters.scrape(server)
            pieces, kept = pieces_of(server, body)
            since = counters.scrape(server).since(before)
            if since.steps == len(pieces) - 1:
                break
            asked_again += 1
        for name in counted:
            counted[name] += getattr(since, name)
        counted_places = [total + count for total, count in zip(counted_places, since.by_position, strict=True)]
        steps = pieces[1:]
        # steps that wrote one token may have had a draft or none; those that wrote more are in order among the drafts
        ended = 1 + kept[-1] - steps[-1] if kept and steps and is_last_drafted(steps, kept) else 0
        totals["tokens"] += sum(pieces)
        totals["steps"] += len(steps)
        totals["drafts"] += len(kept)
        totals["accepted"] += sum(kept)
        totals["cut"] += ended
        explained += pieces[:1] == [1] and sum(pieces) == 1 + len(steps) + sum(kept) - ended
        for accepted in kept:
            for place in range(accepted):
                places[place] += 1
    return {
        "requests": len(bodies), **totals, "counters": counted | {"by_position": counted_places},
        "asked_again": asked_again,
        "holds": {
            "tokens = 1 + steps + accepted - cut, in every request": explained == len(bodies),
            "steps: counters = pieces of the streams": counted["steps"] == totals["steps"],
            "drafts: counters = answers": counted["drafts"] == totals["drafts"],
            "accepted: counters = answers": counted["accepted"] == totals["accepted"],
            "by position: counters = answers": counted_places == places,
            "tokens: counters = streams": counted["generated"] == totals["tokens"],
        },
    }  # fmt: skip


def is_last_drafted(steps: list[int], kept: list[int]) -> bool:
    """Whether the last step had a draft: then the longer steps before it are the longer drafts but the last.

    A last step that was not cut, or had no draft, is the last of the longer steps itself.
    """
    longer = [accepted + 1 for accepted in kept if accepted]
    return [size for size in steps if size > 1] != longer and [size for size in steps[:-1] if size > 1] == longer[:-1]


def pieces_of(server: str, body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(tokens of every piece of the stream, drafted tokens kept in every step with a draft)."""
    asked = body | {
        "model": "demo",
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    pieces, said = [], {}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=asked, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            said = (event.get("metrics") or {}).get("speculative_decoding") or said
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    pieces.append(len(choice["token_ids"]))
    return pieces, said.get("per_step_accepted") or []


if __name__ == "__main__":
    main()
