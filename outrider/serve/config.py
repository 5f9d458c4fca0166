"""The `serve` section of a run file: address, slots, limits, and who may ask."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from outrider.config import Config as Base
from outrider.serve.learning.config import Learning


class Config(Base):
    """How a server decodes, what it refuses, and who may ask it."""

    host: str = "127.0.0.1"
    """Address to listen on.  One that other machines reach needs `keys`, or `allow_anonymous`."""
    port: int = Field(8000, ge=0, le=65535)
    """Number of the port to listen on; 0 takes a free one."""
    name: str | None = Field(None, min_length=1)
    """Name of the model in requests and answers; the target's own, or its folder's, unless given."""
    slots: PositiveInt = 16
    """Texts that are continued at the same time."""
    length: int | None = Field(None, ge=2)
    """Most tokens of a prompt with its answer; the target's context, or what fits into `memory_gb`, unless given."""
    memory_gb: PositiveFloat | None = None
    """Most memory of keys and values, in GB, of all texts together.  On a CPU under Linux a text that would exceed it
    waits; elsewhere slots that could exceed it are refused at the start.  Unless given, all that is free for a
    `length`, and half of it without one."""
    queue: PositiveInt = 256
    """Most texts that wait for a slot; a request that would make it more is refused with 429, unless its key has less
    than its share of these places."""
    policy: Literal["fixed", "auto"] = "auto"
    """How much is drafted: all that the drafter offers, or what pays by measured seconds at the load of the moment."""
    verification: str = "standard"
    """`standard`, or `block`, which accepts more of a sampled chain; both are exact.  `typical`, `relaxed`, `relay`,
    `scorer` and `counterfactual`, with their settings in brackets, are not."""
    allow_lossy: bool = False
    """A lossy verification is refused without it."""
    prefix_bytes: NonNegativeInt | None = None
    """Memory for the beginnings of prompts that requests share, as a number of bytes: with it, they are read once.  A
    tenth of what is free when the server starts, unless given; 0 shares none."""
    interval_s: NonNegativeFloat = 0.01
    """Fewest seconds between two pieces of a stream, so that steps of a millisecond are not sent one by one; first
    tokens and ends don't wait.  0 sends every step."""
    drafter_timeout_s: PositiveFloat = 10.0
    """Seconds after which a drafter that does not return is switched off."""
    timeout_s: PositiveFloat | None = None
    """Most seconds of a request, in the queue too; none unless given.  A request may ask for fewer."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds that running requests have to end in after SIGTERM."""
    body_bytes: PositiveInt = 4 * 2**20
    """Largest body of a request, as a number of bytes; a larger one is refused with 413."""
    connections: PositiveInt = 1024
    """Most connections at once, fewer where the process may open fewer files.  Where there are more, the address with
    most that answer nothing loses its oldest one."""
    address_connections: PositiveInt = 256
    """Most connections of one address that answer nothing."""
    prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt; what `length` allows unless given."""
    max_tokens: PositiveInt | None = None
    """Most tokens of an answer; what `length` allows unless given."""
    n: PositiveInt = 16
    """Highest number of answers to one prompt."""
    texts: PositiveInt = 64
    """Most texts of one request: prompts times answers."""
    keys: str | None = None
    """File of API keys, made by `outrider keys add`; without one everybody who reaches the server may ask."""
    concurrent: PositiveInt = 64
    """Requests that a key without a number of its own may have running at once; further ones are refused with 429."""
    allow_anonymous: bool = False
    """Let other machines ask without a key."""
    hosts: tuple[str, ...] = ()
    """Names besides those of this machine by which a server without keys may be asked."""
    request_log: str | None = None
    """File that gets a JSON line for each request, which `outrider replay` reads; lengths without texts."""
    log_prompts: bool = False
    """Write prompts and answers into the request log too.  Ask those who send them first."""
    learning: Learning | None = None
    """The drafter learns from the texts that are served, which are stored; see docs/learning.md.  It does not unless
    given."""
