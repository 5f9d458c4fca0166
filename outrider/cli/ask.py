"""`outrider ask`: send a prompt or a file of prompts to a server with OpenAI's API, and report the cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import bar, key_of, lasting, place_of_json, remark, say, write_json
from outrider.cli.options import DrafterSettings, JsonTo, KeyFrom
from outrider.client import (
    AsyncClient,
    Client,
    ClientError,
    Fallback,
    Limits,
    Profile,
    Retries,
    Timeouts,
    load_prices,
    load_profiles,
)
from outrider.client.asking import FileProgress, Prompt, ask_all, locked, read_prompts, stream_text, unanswered
from outrider.config import nearest
from outrider.errors import ConfigError, DataError

FILES = (".jsonl", ".ndjson")
"""Suffixes of prompt files."""
SHOWN = 3
"""Number of failures printed for a file."""

MadeClient = Callable[[], AsyncClient]


def ask(
    what: Annotated[
        str,
        typer.Argument(metavar="TEXT|FILE", help="A prompt, or a file (.jsonl) with one per line.", show_default=False),
    ],
    server: Annotated[str, typer.Option(metavar="URL", help="A server with OpenAI's API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model; the server's first one unless given.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the answers to a file go; prompts with an answer are skipped."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the server's default unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampled answers.")] = None,
    completions: Annotated[
        bool, typer.Option("--completions", help="Continue the text, for models without a chat template.")
    ] = False,
    prediction: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text that the answer is likely to repeat.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the answer as it is generated.")] = True,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests for a file.")] = 16,
    attempts: Annotated[int, typer.Option(min=1, help="How often a prompt is sent before it counts as failed.")] = 4,
    timeout: Annotated[
        float | None,
        typer.Option(help="Time limit of an answer in seconds, including pauses; 600, or the profile's.", min=0),
    ] = None,
    rpm: Annotated[float | None, typer.Option(help="Most requests per minute.")] = None,
    tpm: Annotated[float | None, typer.Option(help="Most tokens per minute.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="5.00", help="Cost limit of this run, by --prices and --max-tokens.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices of models (YAML); see docs/client.md.")
    ] = None,
    fallback: Annotated[
        list[str] | None,
        typer.Option(metavar="'[URL] [MODEL]'", help="Server or model for what got no answer; can be repeated."),
    ] = None,
    fallback_key_from: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the API key of other servers.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Defaults of a workload: chat, code, extract, write."),
    ] = None,
    profiles: Annotated[Path | None, typer.Option(metavar="FILE", help="Profiles (YAML); see docs/client.md.")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Cache of complete answers, by the content of requests.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Kind that drafts here, such as ngram or suffix; the server verifies.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The server's tokenizer, for --drafter: a folder or a Hub id.")
    ] = None,
    set_: DrafterSettings = None,
    key_from: KeyFrom = None,
    json_to: JsonTo = None,
) -> None:
    """Send a prompt, or a file of prompts with progress and resume, and report the cost."""
    place_of_json(json_to)
    is_file = what.endswith(FILES)
    if is_file and not Path(what).exists():
        raise DataError(f"can't read {what}: there is no such file; give a JSONL file of prompts")
    if is_file and out is None:
        raise ConfigError(f"answers to {what} need a file; name one with --out")
    if not is_file and out is not None:
        raise ConfigError("--out is for a file of prompts (.jsonl); the answer to a text is printed")
    table, key = None if prices is None else load_prices(prices), key_of(key_from)
    fields: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    fields["prediction"] = None if prediction is None else _text_in(prediction)
    settings = {name: value for name, value in fields.items() if value is not None}
    others = [_fallback(text, key_of(fallback_key_from)) for text in fallback or ()]
    workload = None if profile is None else _profile(profile, profiles)
    if profiles is not None and profile is None:
        raise ConfigError(f"--profiles {profiles} has no effect without a name; give --profile NAME")

    def made() -> AsyncClient:
        limits = Limits(concurrency, requests_per_minute=rpm, tokens_per_minute=tpm)
        return AsyncClient(
            server, model=model, api_key=key, timeouts=None if timeout is None else Timeouts(total_s=timeout),
            retries=Retries(attempts), limits=limits, budget=_amount(budget), prices=table, cache=cache,
            fallbacks=others, profile=workload,
        )  # fmt: skip

    if drafter is None and (tokenizer or set_):
        raise ConfigError("--tokenizer and --set have no effect without --drafter; name one")
    if drafter is not None:
        from outrider.cli.ask_drafted import ask_drafted  # loads torch, which nothing else here needs

        body = _body(what, completions) | settings
        unused = {
            "--out": out, "--prediction": prediction, "--budget": budget, "--prices": prices, "--cache": cache,
            "--fallback": fallback, "--profile": profile,
        }  # fmt: skip
        with Client(server, api_key=key, retries=Retries(attempts)) as client:
            write_json(json_to, ask_drafted(client, body, tokenizer, drafter, set_ or (), unused))
        return
    if out is None:
        report = _ask_one(made, {**_body(what, completions), **settings}, stream)
    else:
        report = _ask_file(made, Path(what), settings, out, concurrency)
    write_json(json_to, report)
    if report["failed"] or report["stopped"]:
        raise SystemExit(1)


# ── one text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ask_one(made: MadeClient, body: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    """Print the answer to a text, and usage on standard error."""
    show = lambda text: print(console.written(text), end="", file=console.out.file, flush=True)

    async def main() -> dict[str, Any]:
        began = time.monotonic()
        async with made() as client:
            await _name_model(client)
            async for text in stream_text(client, body, stream):
                show(text)
            show("\n")
            report = _report(client, FileProgress(answered=1), time.monotonic() - began)
        remark(", ".join(_summary(report)), "dim")
        return report

    return asyncio.run(main())


def _fallback(text: str, key: str | None) -> Fallback:
    """`URL`, `MODEL`, or both."""
    words = text.split()
    urls = [word for word in words if "://" in word]
    models = [word for word in words if "://" not in word]
    if len(urls) > 1 or len(models) > 1 or not words:
        raise ConfigError(f"--fallback must be an address, a model, or both, got {text!r}")
    url, model = next(iter(urls), None), next(iter(models), None)
    return Fallback(url, model, api_key=key if urls else None)


def _profile(name: str, file: Path | None) -> Profile:
    table = load_profiles(file)
    if name not in table:
        raise ConfigError(f"unknown profile {name!r}{nearest(name, table)}")
    return table[name]


def _text_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path}: {error}; give a file of text in UTF-8") from None


def _amount(budget: str | None) -> Decimal | None:
    try:
        return None if budget is None else Decimal(budget)
    except InvalidOperation:
        raise ConfigError(f"--budget must be an amount such as 5.00, got {budget!r}") from None


def _body(text: str, completions: bool) -> dict[str, Any]:
    return {"prompt": text} if completions else {"messages": [{"role": "user", "content": text}]}


async def _name_model(client: AsyncClient) -> None:
    """Use the server's first model if none was named.  Servers that list none accept requests without one."""
    if client.model is None:
        client.model = next(iter(await client.models()), None)


# ── a file ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ask_file(
    made: MadeClient, source: Path, settings: Mapping[str, Any], out: Path, concurrency: int
) -> dict[str, Any]:
    """Answer the prompts of a file into another file, and print a summary."""
    prompts = read_prompts(source, settings)
    if out.exists() and out.samefile(source):
        raise ConfigError(f"answers would overwrite {source}; name another file with --out")
    with locked(out):
        left = unanswered(prompts, out)
        before = len(prompts) - len(left)
        report = asyncio.run(_main(made, source, left, before, out, concurrency))
    _print(report, out)
    return report


async def _main(
    made: MadeClient, source: Path, left: list[Prompt], before: int, out: Path, concurrency: int
) -> dict[str, Any]:
    began, total = time.monotonic(), len(left) + before
    async with made() as client:
        if left:
            await _name_model(client)
        say(f"ask       {source}: {total} prompts, {before} answered before; model {client.model}, answers in {out}")
        with bar("prompts", total, before) as update:
            tell = lambda done, failed: update(before + done + failed, f"{failed} failed" if failed else "")
            progress = await ask_all(client, left, out, concurrency, tell)
        return _report(client, progress, time.monotonic() - began)


def _report(client: AsyncClient, progress: FileProgress, seconds: float) -> dict[str, Any]:
    """The result as JSON; amounts are strings, since JSON numbers are not exact."""
    totals, prices = client.usage, client.prices
    counts = {name: f"{value:f}" if isinstance(value, Decimal) else value for name, value in asdict(totals).items()}
    return {
        "model": client.model, "seconds": round(seconds, 3),
        "answered": progress.answered,
        "failed": {name: _described(error) for name, error in progress.failed.items()},
        "stopped": None if progress.stopped is None else str(progress.stopped),
        "cost": None if totals.cost is None or prices is None else f"{totals.cost:f}",
        "currency": None if prices is None else prices.currency,
        "prices_of": None if prices is None else str(prices.date),
        "usage": counts,
    }  # fmt: skip


def _described(error: ClientError) -> str:
    return f"{type(error).__name__}: {error}"


def _summary(report: Mapping[str, Any]) -> list[str]:
    """Usage of an answer: tokens, time, attempts, cost."""
    usage = report["usage"]
    repeated = usage["attempts"] - usage["requests"] + usage["cached"]
    parts = [f"{usage['completion_tokens']} tokens after {usage['prompt_tokens']}", lasting(report["seconds"])]
    parts += [f"sent {usage['attempts']} times"] if repeated > 0 else []
    parts += ["from the cache"] if usage["cached"] else []
    return [*parts, f"cost {_cost(report)}"]


def _cost(report: Mapping[str, Any]) -> str:
    if report["currency"] is None:
        return "unknown: no --prices"
    if report["cost"] is None:
        return f"unknown: no price of {report['model']}, or a server that does not count tokens"
    return f"{report['cost']} {report['currency']} by prices of {report['prices_of']}"


def _print(report: Mapping[str, Any], out: Path) -> None:
    """Print one table and the first failures."""
    usage, failed = report["usage"], report["failed"]
    rows = {"answered": str(report["answered"]), "failed": str(len(failed)), "time": lasting(report["seconds"])}
    rows |= {"from the cache": str(usage["cached"])} if usage["cached"] else {}
    rows["sent"] = f"{usage['attempts']} times"
    rows["tokens"] = f"{usage['prompt_tokens']} of prompts, {usage['completion_tokens']} of answers"
    predicted = usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"]
    rows |= {"predicted": f"{usage['accepted_prediction_tokens']} of {predicted} accepted"} if predicted else {}
    rows["cost"] = _cost(report)
    if usage["uncertain"]:
        most = f", at most {usage['uncertain_cost']} {report['currency']}" if report["currency"] else ""
        rows["may be charged too"] = f"{usage['uncertain']} attempts that broke off{most}"
    table = console.table("", "")
    for title, value in rows.items():
        table.add_row(title, value)
    console.show(table)
    for name in list(failed)[:SHOWN]:
        say(f"          {name}: {failed[name]}")
    if report["stopped"]:
        say(f"          stopped early: {report['stopped']}")
    if failed or report["stopped"]:
        say(f"          rerun the same command to retry prompts without an answer in {out}")
