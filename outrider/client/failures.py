"""Why a request has no answer.

ClientError
├── RefusedError      the server refused the request, and a retry would not help
├── Unavailable       no attempt was answered, and the client gave up
├── TornStream        an answer began, but is incomplete or can't be read
├── BudgetExceeded    another attempt could cost more than is left
└── CircuitOpen       the server failed too often in a row; nothing is sent to it for a while
"""

from __future__ import annotations

from outrider.errors import OutriderError


class ClientError(OutriderError):
    """A request has no answer.

    attempts: how often the request was sent.  request_id: the server's, of the last attempt.
    """

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None):
        super().__init__(message)
        self.message, self.attempts, self.request_id = str(self), attempts, request_id


class RefusedError(ClientError):
    """The server refused the request, and a retry would not help.  status: the HTTP status."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, status: int = 0):
        super().__init__(message, attempts, request_id)
        self.status = status


class Unavailable(ClientError):
    """No attempt was answered, and the client gave up."""


class TornStream(ClientError):
    """An answer began, but is incomplete or can't be read.  It may be charged.  text: the part that arrived."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, text: str = ""):
        super().__init__(message, attempts, request_id)
        self.text = text


class BudgetExceeded(ClientError):
    """Another attempt could cost more than is left of the budget, and was not sent."""


class CircuitOpen(ClientError):
    """The server failed too often in a row; nothing is sent to it for `retry_after_s` seconds."""

    def __init__(self, message: str, attempts: int = 0, request_id: str | None = None, retry_after_s: float = 0.0):
        super().__init__(message, attempts, request_id)
        self.retry_after_s = retry_after_s
