"""Error responses: OpenAI's error object with its HTTP status."""

from __future__ import annotations

import math
from typing import Any

LONGEST = 600
"""Maximum number of characters of a message, which may quote what the client sent."""

KINDS = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}
"""Types of OpenAI's error object by status; the others are invalid_request_error below 500, and server_error."""


class Refusal(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after_s: float | None = None, allow: str | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= LONGEST else f"{message[: LONGEST - 4]} ..."
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        if allow is not None:
            self.headers["allow"] = allow
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """The request is invalid."""
    return Refusal(400, message, param, code)


def internal() -> Refusal:
    """The server failed; only its log has the reason."""
    return Refusal(500, "the server failed on this request; see its log for the reason", code="internal_error")


def draining() -> Refusal:
    return Refusal(
        503, "the server is stopping and accepts no more requests; try again", code="stopping", retry_after_s=5
    )
