"""`outrider ask --drafter`: drafts made here and verified by the server, whose own text is the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.cli import console
from outrider.cli.console import remark
from outrider.client import Client
from outrider.config import override
from outrider.errors import ConfigError
from outrider.loading import load_drafter
from outrider.sampling.settings import Sampling
from outrider.targets.remote.target import RemoteTarget, compare

MOST_TOKENS = 256
"""`--max-tokens` unless given."""


def ask_drafted(
    client: Client, body: Mapping[str, Any], tokenizer: str | None, drafter: str, settings: Sequence[str],
    unused: Mapping[str, object],
) -> dict[str, Any]:  # fmt: skip
    """Print the answer to a body's text or messages and its cost with and without drafts; returns the figures.

    unused: options that have no effect here.  Raises ConfigError if one is set.
    """
    if tokenizer is None:
        raise ConfigError(
            "--drafter drafts in token ids, so it needs the model's own --tokenizer: a folder or a Hub id"
        )
    if wrong := [name for name, value in unused.items() if value]:
        raise ConfigError(f"{wrong[0]} has no effect with --drafter; leave it out")
    client.model = body.get("model") or next(iter(client.models()), None)
    prompt = body.get("prompt") or body["messages"]
    sampling = Sampling(body.get("temperature", 0.0), seed=body.get("seed"))
    most = body.get("max_tokens", MOST_TOKENS)
    with RemoteTarget(client, tokenizer) as target:
        reader: Any = target  # a target without layers, enough for drafters that read only tokens
        built = load_drafter(drafter, reader, **override({}, settings))
        drafted = target.generate(prompt, built, max_new_tokens=most, sampling=sampling)
        [text] = drafted.texts
        print(console.written(text.text), file=console.out.file, flush=True)
        plain = target.plain(prompt, max_new_tokens=most, sampling=sampling)
    remark(compare(drafted, plain), "dim")
    figures = {"tokens": len(text.tokens), "accepted": sum(text.accepted), "finish_reason": text.finish_reason}
    return figures | {"drafted": asdict(drafted.traffic), "plain": asdict(plain.traffic)}
