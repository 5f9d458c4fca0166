"""Server-sent events, read as in the HTML standard, 9.2.6."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator


class Events:
    """Turns bytes, cut anywhere, into the data of server-sent events.

    `event`, `id` and `retry` lines are read and not used: in OpenAI's API the data says it all.
    """

    def __init__(self) -> None:
        self.decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True
        )
        self.rest = ""
        self.lines: list[str] = []

    def feed(self, data: bytes, is_last: bool = False) -> Iterator[str]:
        """Every event that `data` completes."""
        *whole, self.rest = (self.rest + self.decoder.decode(data, is_last)).split("\n")
        for line in whole:
            name, _, value = line.partition(":")
            if name == "data":
                self.lines.append(value.removeprefix(" "))
            elif not line and self.lines:
                event, self.lines = "\n".join(self.lines), []
                yield event

    def end(self) -> Iterator[str]:
        """The last event where no empty line closed it: servers that die leave that out, and some others too."""
        return self.feed(b"\n\n", is_last=True)
