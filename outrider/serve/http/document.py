"""The OpenAPI document of the server: bodies, answers, and its own limits."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from outrider.serve.bodies import schema
from outrider.serve.http import replies
from outrider.serve.service import Service

REFUSALS = {
    400: "The request can't be answered as it is; the message says why.",
    401: "No key, or an unknown one.",
    403: "The Host header is no name of this server.",
    404: "No such model.",
    408: "The request took longer than its timeout.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    429: "Too many requests wait, or run under this key; Retry-After says for how many seconds.",
    500: "The server failed.",
    503: "The server is stopping.",
}


def replying(model: Any, *more: int) -> dict[int | str, dict[str, Any]]:
    """What FastAPI is told of a route's answers: this one, and errors with these statuses besides everybody's."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    for status in (401, 403, 429, 503, *more):
        found[status] = {"model": replies.Error, "description": REFUSALS[status]}
    return found


def bodied(
    body: type[schema.Body], answer: type[replies.Reply], *others: type[schema.Body], streams: bool = False
) -> dict[str, Any]:
    """What FastAPI is told of a route that reads a body itself."""
    responses = replying(answer, *(status for status in REFUSALS if status not in (401, 403, 429, 503)))
    if streams:
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        responses[200]["content"] = {"text/event-stream": {"schema": event}}
    refs = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in (body, *others)]
    content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
    return {"responses": responses, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


def document(app: FastAPI, service: Service) -> dict[str, Any]:
    """The OpenAPI document, with this server's limits."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = (
            schema.CompletionRequest, schema.ChatRequest, schema.TokenizeText, schema.TokenizeChat,
            schema.DetokenizeRequest,
        )  # fmt: skip
        _, definitions = models_json_schema(
            [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
        )
        found["components"]["schemas"] |= definitions["$defs"]
        _limit(found["components"]["schemas"], service)
        if service.config.keys is not None:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, methods in found["paths"].items():
                for operation in methods.values() if path.startswith("/v1/") or path.endswith("tokenize") else ():
                    operation["security"] = [{"key": []}]
        app.openapi_schema = found
    return app.openapi_schema


def _limit(schemas: dict[str, Any], service: Service) -> None:
    """Write what this server takes into the bodies' schemas."""
    config, most = service.config, service.engine.length - 1
    for name in ("CompletionRequest", "ChatRequest", "TokenizeText", "TokenizeChat", "DetokenizeRequest"):
        fields = schemas[name]["properties"]
        fields["model"] = {"enum": [service.name, None], "description": "The model, or null."}
        limits = {"n": config.n, "max_tokens": min(most, config.max_tokens or most)}
        limits |= {"max_completion_tokens": limits["max_tokens"], "min_tokens": limits["max_tokens"]}
        for field, highest in limits.items():
            for option in fields.get(field, {}).get("anyOf", ()):
                if option.get("type") == "integer":
                    option["maximum"] = highest
