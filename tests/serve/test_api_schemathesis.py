"""Bodies that nobody thought of, drawn from the OpenAPI document: none is answered with a 5xx or against the document.

Here are as many as take some seconds; `benchmarks/serving.py` draws thousands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outrider.targets.transformers import TransformersTarget
from serve.running import Running, running

CASES = int(os.environ.get("OUTRIDER_SCHEMATHESIS_CASES", "8"))
"""Of each route."""


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, max_tokens=8, timeout_s=20.0) as found:
        yield found


ROUTES = (
    "POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize", "GET /v1/models",
    "GET /v1/models/{model}", "GET /health", "GET /stats", "GET /metrics", "GET /",
)  # fmt: skip


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("route", ROUTES)
def test_whatever_is_asked_is_answered_as_the_document_says(route: str, mode: GenerationMode, server: Running) -> None:
    """Catches a 500, a body that the document forbids and the server takes, and an answer of another form.

    Left out is one check: that everything of the right form is taken.  A prompt may be too long, and a schema one that
    llguidance does not know.
    """
    method, path = route.split()
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing of it can be wrong")

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck), deadline=None, phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)

    ask()


def test_every_route_of_the_document_is_asked(server: Running) -> None:
    """Catches a new route that is not in the list above."""
    found = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    labels = {one.ok().label for one in found.get_all_operations()}
    assert labels == set(ROUTES)


def test_the_server_goes_on_after_all_of_it(server: Running) -> None:
    """Catches slots that stay taken."""
    assert server.settled(lambda: not server.engine.running and not server.engine.queued)
    assert not server.engine.error and not server.service.jobs and not server.door.inside
