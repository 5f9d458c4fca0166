"""The `serve` section of a run file: address, slots, limits and access."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outrider.config import Config as Base
from outrider.serve.learning.config import Learning


class Config(Base):
    """How a server decodes, what it refuses, and who has access."""

    host: str = "127.0.0.1"
    """Address to listen on.  An address that other machines can reach needs `keys`, or `allow_anonymous`."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    name: str | None = Field(None, min_length=1)
    """Name of the model in requests and answers; defaults to the target's name, or its folder's."""
    slots: PositiveInt = 16
    """Number of texts generated at the same time."""
    length: int | None = Field(None, ge=2)
    """Maximum number of tokens of a prompt and its answer together; defaults to the target's context, or to what fits
    into `memory_gb`."""
    memory_gb: PositiveFloat | None = None
    """Maximum memory for the KV cache of all texts together, in GB.  On a CPU under Linux a text that would exceed it
    waits; elsewhere slots that could exceed it are refused at the start.  Defaults to all free memory if `length` is
    given, and to half of it otherwise."""
    queue: PositiveInt = 256
    """Maximum number of texts that wait for a slot; a request beyond it is refused with 429, unless its key has less
    than its share of the queue."""
    policy: Literal["fixed", "auto"] = "auto"
    """How much is drafted: everything the drafter offers, or what pays off according to measured times at the current
    load."""
    verification: str = "standard"
    """`standard`, or `block`, which accepts more of a sampled chain; both are exact.  `typical`, `relaxed`, `relay`,
    `scorer` and `counterfactual`, with their settings in brackets, are lossy."""
    allow_lossy: bool = False
    """Allow a lossy verification."""
    prefix_bytes: NonNegativeInt | None = None
    """Memory of the prefix cache in bytes: prompts that begin alike share the computation of their common prefix.
    Defaults to a tenth of the memory that is free when the server starts; 0 switches the cache off."""
    interval_s: NonNegativeFloat = 0.01
    """Minimum time between two chunks of a stream, in seconds, so that millisecond steps are not sent one by one; first
    and last tokens are sent at once.  0 sends every step."""
    drafter_timeout_s: PositiveFloat = 10.0
    """Seconds after which a drafter that does not return is switched off."""
    timeout_s: PositiveFloat | None = None
    """Time limit of a request in seconds, including its time in the queue; no limit by default.  A request may set a
    shorter one."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    body_bytes: PositiveInt = 4 * 2**20
    """Largest request body in bytes; a larger one is refused with 413."""
    connections: PositiveInt = 1024
    """Maximum number of connections at once, fewer if the process may open fewer files.  Beyond it, the address with
    the most idle connections loses its oldest one."""
    address_connections: PositiveInt = 256
    """Maximum number of idle connections of one address.  One whose client does not read its responses counts as idle.
    """
    prompt_tokens: PositiveInt | None = None
    """Maximum number of tokens of a prompt; defaults to what `length` allows."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of an answer; defaults to what `length` allows."""
    n: PositiveInt = 16
    """Maximum number of answers to one prompt."""
    texts: PositiveInt = 64
    """Maximum number of texts of one request: prompts times answers."""
    keys: str | None = None
    """File of API keys, made by `outrider keys add`; without it, no key is required."""
    concurrent: PositiveInt = 64
    """Maximum number of concurrent requests of a key that has no limit of its own; further ones are refused with 429.
    """
    allow_anonymous: bool = False
    """Accept requests from other machines without a key."""
    hosts: tuple[str, ...] = ()
    """Additional host names, besides those of this machine, for which a server without keys accepts requests."""
    request_log: str | None = None
    """File to which a JSON line is written for each request, for `outrider replay`; it has lengths instead of texts."""
    log_prompts: bool = False
    """Also write prompts and answers to the request log.  Get the consent of the senders first."""
    traces: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces, which gets a span
    for each request, with times and counts but no text."""
    learning: Learning | None = None
    """Train the drafter on the served texts, which are stored; see docs/serve.md.  Off by default."""
