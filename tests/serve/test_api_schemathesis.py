"""Bodies that nobody thought of, drawn from the OpenAPI document: none is answered with a 5xx or against the document.

Here are as many as take some seconds; a nightly run sets OUTRIDER_SCHEMATHESIS_CASES.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outrider.targets.hf.transformers import TransformersTarget
from serve.running import Running, running

CASES = int(os.environ.get("OUTRIDER_SCHEMATHESIS_CASES", "4"))
"""Of each route with a body."""


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, max_tokens=8, timeout_s=20.0) as found:
        yield found
        assert found.settled(lambda: not found.engine.running and not found.engine.queued), "slots stay taken"
        assert not found.engine.error and not found.service.jobs and not found.admission.num_active


VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
POSTS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /tokenize",
    "POST /detokenize",
)
GETS = ("GET /v1/models", "GET /v1/models/{model}", "GET /health", "GET /ready", "GET /stats", "GET /metrics", "GET /")


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    found = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    assert {one.ok().label for one in found.get_all_operations()} == {*POSTS, *GETS}
    return found


@pytest.mark.parametrize(
    ("route", "mode"), [(route, VALID) for route in (*POSTS, *GETS)] + [(route, INVALID) for route in POSTS]
)
def test_whatever_is_asked_is_answered_as_the_document_says(route, mode, document):
    """Catches a 500, a body that the document forbids and the server takes, and an answer of another form."""
    method, path = route.split()
    operation, count = document[path][method], CASES if method == "POST" else 1

    @settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None, phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)

    ask()
