"""The routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import outrider
from outrider.serve.bodies import request_models as requests
from outrider.serve.bodies.refusals import Refusal, internal
from outrider.serve.bodies.responses import ResponseRequest
from outrider.serve.http import response_models as responses
from outrider.serve.http.admission import Receive, Scope, Send, response_to
from outrider.serve.http.document import document, responses_of, with_body
from outrider.serve.http.page import page
from outrider.serve.pacing import LARGE_BODIES, Places
from outrider.serve.records.metrics import Telemetry
from outrider.serve.service import SMALL, Job, Kind, Service

BODY_S = 60.0
"""Seconds within which the body of a request has to arrive."""
METRICS = "text/plain; version=0.0.4; charset=utf-8"
PAGE_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def make_app(service: Service, telemetry: Telemetry, is_stopping: Callable[[], bool]) -> FastAPI:
    """The routes of a service.  `Admission` decides who may use them."""
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    # only for the OpenAPI document: `Admission` checks the keys
    bearer = HTTPBearer(scheme_name="key", auto_error=False)
    router = APIRouter(dependencies=[] if service.config.keys is None else [Depends(bearer)])
    _add_models(router, service)
    _add_texts(router, service)
    app.include_router(router)
    _add_pages(app, service, telemetry, is_stopping)
    _add_refusals(app)
    app.openapi = lambda: document(app, service)  # type: ignore[method-assign]
    return app


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        # its frames would keep the body in memory while the response is held back
        refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        return response_to(refusal)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return response_to(_refusal_of_route(request, error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return response_to(internal())  # `Admission` logs the error


def _add_models(router: APIRouter, service: Service) -> None:
    served = {
        "id": service.name, "object": "model", "created": int(time.time()), "owned_by": "outrider",
        "max_model_len": service.engine.length,
    }  # fmt: skip

    @router.get("/v1/models", responses=responses_of(responses.Models))
    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [served]})

    @router.get("/v1/models/{model:path}", responses=responses_of(responses.Model, 404))
    async def model(model: str) -> Response:
        """The model's properties."""
        service.reader.check_model(model)
        return JSONResponse(served)


def _add_texts(router: APIRouter, service: Service) -> None:
    max_bytes, large = service.config.body_bytes, Places(LARGE_BODIES)

    @asynccontextmanager
    async def values_of(request: Request) -> AsyncIterator[tuple[Any, int]]:
        """The JSON of a body, and its size in bytes."""
        owner, size = request.state.owner, _declared(request)
        is_free = not owner or (size is not None and size <= SMALL)
        async with nullcontext() if is_free else large.place(owner, BODY_S):
            body = await read_body(request, max_bytes)
            yield await service.values(body, owner, request.state.arrived), len(body)

    async def answer(request: Request, kind: Kind) -> Response:
        state = request.state
        async with values_of(request) as (values, size):
            job = await service.start(kind, values, size, state.owner, state.arrived)
        return JobResponse(service, job)

    @router.post("/v1/completions", **with_body(responses.Completion, requests.CompletionRequest, streams=True))
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        return await answer(request, "completion")

    @router.post("/v1/chat/completions", **with_body(responses.ChatCompletion, requests.ChatRequest, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await answer(request, "chat")

    @router.post("/v1/responses", **with_body(responses.Response, ResponseRequest, streams=True))
    async def new_response(request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's responses API; nothing is stored."""
        return await answer(request, "response")

    @router.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        raise Refusal(
            404, "this server generates text and has no embeddings; send this to a server with an embedding model",
            code="unsupported_endpoint",
        )  # fmt: skip

    @router.post("/tokenize", **with_body(responses.Tokens, requests.TokenizeText, requests.TokenizeChat))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a chat."""
        async with values_of(request) as (values, size):
            return JSONResponse(await service.tokenize(values, size, request.state.owner))

    @router.post("/detokenize", **with_body(responses.DetokenizedText, requests.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        async with values_of(request) as (values, size):
            return JSONResponse(await service.detokenize(values, size, request.state.owner))


def _add_pages(app: FastAPI, service: Service, telemetry: Telemetry, is_stopping: Callable[[], bool]) -> None:
    html, policy = page()

    def status() -> str:
        if service.engine.error:
            return "failed"
        return "stopping" if is_stopping() else "degraded" if service.engine.is_degraded else "ok"

    @app.get("/health", responses=responses_of(responses.Health) | {503: {"model": responses.Health}})
    async def health() -> Response:
        """Whether the process works; if not, the server should be restarted."""
        return JSONResponse({"status": status()}, 503 if service.engine.error else 200)

    @app.get("/ready", responses=responses_of(responses.Health) | {503: {"model": responses.Health}})
    async def ready() -> Response:
        """Whether new requests are admitted; don't send any to a server that is not ready."""
        return JSONResponse({"status": status()}, 503 if service.engine.error or is_stopping() else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(telemetry.text(), media_type=METRICS)

    @app.get("/stats", responses=responses_of(responses.Stats))
    async def stats() -> Response:
        """Figures of the live page."""
        return JSONResponse(telemetry.snapshot())

    @app.get("/", response_class=HTMLResponse)
    async def live_page() -> Response:
        """The live page: what the server is doing, and a playground."""
        return HTMLResponse(html, headers=PAGE_HEADERS | {"content-security-policy": policy})


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request, which must be declared as JSON.  Raises Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages of other sites can send any other content type without a preflight
        shown = repr(kind[:80]) if kind else "missing"
        raise Refusal(415, f"the content-type is {shown}; send the header `Content-Type: application/json`")
    too_large = Refusal(413, f"the body is larger than {max_bytes} bytes, the limit of this server; send less")
    if (_declared(request) or 0) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_S:.0f} s; send it again") from None
    return bytes(body)


def _declared(request: Request) -> int | None:
    """The size of a body by its head, in bytes; None if the head has none."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None


class JobResponse(Response):
    """A job's answer: one JSON object, or a stream of events.  The job ends when the client disconnects."""

    def __init__(self, service: Service, job: Job):
        super().__init__()
        self.service, self.job = service, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self.job.body.stream:
                await self._stream(scope, receive, send)
            else:
                content = await self.service.content(self.job)
                await Response(content, headers=self._job_headers, media_type="application/json")(scope, receive, send)
        finally:
            watch.cancel()
            self.service.finish(self.job)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self.service.events(self.job)
        first = await anext(events)  # before the headers: a request that fails by then still gets an error status
        head = Response(headers=self._job_headers | STREAM_HEADERS, media_type="text/event-stream")
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for chunk in events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        """End the job when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.service.cancel(self.job)

    @property
    def _job_headers(self) -> dict[str, str]:
        unused = self.job.answer.ignored
        return {"x-request-id": self.job.answer.id} | ({"x-ignored-fields": ", ".join(unused)} if unused else {})


def _refusal_of_route(request: Request, error: HTTPException) -> Refusal:
    """The refusal of an unknown path or method."""
    path = request.url.path[:80]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Refusal(405, f"{path} does not accept {request.method}; it accepts {allowed}", allow=allowed)
    if error.status_code == 404:
        return Refusal(404, f"unknown path: {path}; /openapi.json lists the paths", code="unknown_path")
    return Refusal(error.status_code, str(error.detail))
