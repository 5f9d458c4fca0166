"""Server-sent events, decoded as in the HTML standard, 9.2.6."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator


class EventDecoder:
    """Turns bytes, cut anywhere, into the data of server-sent events.

    `event`, `id` and `retry` lines are skipped: in OpenAI's API all information is in the data.
    """

    def __init__(self) -> None:
        self.decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True
        )
        self.rest = ""
        self.lines: list[str] = []

    def feed(self, part: bytes, is_last: bool = False) -> Iterator[str]:
        """Every event that `part` completes."""
        *complete, self.rest = (self.rest + self.decoder.decode(part, is_last)).split("\n")
        for line in complete:
            name, _, value = line.partition(":")
            if name == "data":
                self.lines.append(value.removeprefix(" "))
            elif not line and self.lines:
                event, self.lines = "\n".join(self.lines), []
                yield event

    def end(self) -> Iterator[str]:
        """The last event, if no empty line terminated it: crashed servers leave that line out, and a few others do."""
        return self.feed(b"\n\n", is_last=True)
