"""Why a request has no answer.

ClientError
├── RefusedError      the server said no, and would again: it was not asked a second time
├── Unavailable       given up: no attempt was answered
├── TornStream        an answer began and did not arrive whole, or can't be read
├── BudgetExceeded    another attempt could cost more than is left
└── CircuitOpen       the server failed too often in a row, and is left alone for a while
"""

from __future__ import annotations

from outrider.errors import OutriderError


class ClientError(OutriderError):
    """A request has no answer.

    attempts: how often it was sent.  request_id: the server's, of the last attempt.
    """

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None):
        super().__init__(message)
        self.message, self.attempts, self.request_id = message, attempts, request_id


class RefusedError(ClientError):
    """The server said no, and would again.  status: of HTTP."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, status: int = 0):
        super().__init__(message, attempts, request_id)
        self.status = status


class Unavailable(ClientError):
    """Given up: no attempt was answered."""


class TornStream(ClientError):
    """An answer began and did not arrive whole, or can't be read.  It may be charged.  text: what arrived of it."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, text: str = ""):
        super().__init__(message, attempts, request_id)
        self.text = text


class BudgetExceeded(ClientError):
    """Another attempt could cost more than is left; it was not sent."""


class CircuitOpen(ClientError):
    """The server failed too often in a row, and is left alone until `retry_after_s` seconds have passed."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, retry_after_s: float = 0.0):
        super().__init__(message, attempts, request_id)
        self.retry_after_s = retry_after_s
