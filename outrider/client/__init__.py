"""A client for servers with OpenAI's API: budgets, rate limits, retries and a circuit breaker.  No torch."""

from outrider.client.account import Totals
from outrider.client.answers import Answer, Chunk
from outrider.client.asynchronous import AsyncClient
from outrider.client.blocking import Client
from outrider.client.failures import BudgetExceeded, CircuitOpen, ClientError, RefusedError, TornStream, Unavailable
from outrider.client.prices import Price, Prices, Usage, load_prices
from outrider.client.settings import Fallback, Limits, Profile, Retries, Timeouts, load_profiles

__all__ = [
    "Answer", "AsyncClient", "BudgetExceeded", "Chunk", "CircuitOpen", "Client", "ClientError", "Fallback", "Limits",
    "Price", "Prices", "Profile", "RefusedError", "Retries", "Timeouts", "TornStream", "Totals", "Unavailable",
    "Usage", "load_prices", "load_profiles",
]  # fmt: skip
