"""The OpenAPI document of the server: request bodies, responses, and this server's limits."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider.serve.bodies import request_models as requests
from outrider.serve.bodies.responses import ResponseRequest
from outrider.serve.http.response_models import Error, Event
from outrider.serve.service import Service

BODIES: tuple[type[BaseModel], ...] = (
    requests.CompletionRequest, requests.ChatRequest, requests.TokenizeText, requests.TokenizeChat,
    requests.DetokenizeRequest, ResponseRequest,
)  # fmt: skip
REFUSALS = {
    400: "The request is invalid; the message says why.",
    401: "The API key is missing or unknown.",
    403: "The Host header is not a name of this server.",
    404: "The model does not exist.",
    408: "The request took longer than its timeout.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests are waiting, or running under this key; Retry-After says for how many seconds.",
    500: "The server failed.",
    503: "The server is stopping.",
}
OF_EVERY_ROUTE = (401, 403, 429, 503)


def responses_of(model: Any, *errors: int) -> dict[int | str, dict[str, Any]]:
    """Responses of a route: this model, and errors with these statuses besides those that every route can return."""
    responses: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status in (*OF_EVERY_ROUTE, *errors):
        responses[status] = {"model": Error, "description": REFUSALS[status]}
    return responses


def with_body(model: type[BaseModel], *bodies: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    """FastAPI's arguments for a route that returns `model` and parses its body, one of `bodies`, itself."""
    responses = responses_of(model, *(status for status in REFUSALS if status not in OF_EVERY_ROUTE))
    if streams:
        responses[200]["content"] = {"text/event-stream": {"schema": Event.model_json_schema()}}
    refs = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies]
    content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
    return {"responses": responses, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


def document(app: FastAPI, service: Service) -> dict[str, Any]:
    """The OpenAPI document, with this server's limits."""
    if app.openapi_schema is None:
        openapi = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
        )
        openapi["components"]["schemas"] |= definitions["$defs"]
        _limit(openapi["components"]["schemas"], service)
        app.openapi_schema = openapi
    return app.openapi_schema


def _limit(schemas: dict[str, Any], service: Service) -> None:
    """Write this server's limits into the schemas of the bodies."""
    config, longest = service.config, service.engine.length - 1
    max_tokens = min(longest, config.max_tokens or longest)
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
    limits = {"n": config.n} | dict.fromkeys(names, max_tokens)
    for body in BODIES:
        fields = schemas[body.__name__]["properties"]
        fields["model"] = {"enum": [service.name, None], "description": "The model, or null."}
        for field, maximum in limits.items():
            for option in fields.get(field, {}).get("anyOf", ()):
                if option.get("type") == "integer":
                    option["maximum"] = maximum
