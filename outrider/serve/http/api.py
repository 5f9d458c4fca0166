"""The routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import outrider
from outrider.serve.bodies import schema
from outrider.serve.bodies.refusals import Refusal, internal
from outrider.serve.bodies.schema import ignored
from outrider.serve.http import replies
from outrider.serve.http.document import bodied, document, replying
from outrider.serve.http.door import Receive, Scope, Send, reply
from outrider.serve.http.page import page
from outrider.serve.records.metrics import Telemetry
from outrider.serve.service import Job, Kind, Service

BODY_S = 60.0
"""Seconds in which the body of a request has to arrive."""
METRICS = "text/plain; version=0.0.4; charset=utf-8"
PAGE_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def make_app(service: Service, telemetry: Telemetry, is_stopping: Callable[[], bool]) -> FastAPI:
    """The routes over a service.  Who may use them is the `Door`'s to say."""
    app = FastAPI(title="Outrider", version=outrider.__version__, docs_url=None, redoc_url=None)
    _add_refusals(app)
    _add_models(app, service)
    _add_texts(app, service)
    _add_pages(app, service, telemetry, is_stopping)
    app.openapi = lambda: document(app, service)  # type: ignore[method-assign]
    return app


def _add_refusals(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return reply(refusal)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return reply(_of_route(request, error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return reply(internal())  # the `Door` logs the error


def _add_models(app: FastAPI, service: Service) -> None:
    about = {
        "id": service.name, "object": "model", "created": int(time.time()), "owned_by": "outrider",
        "max_model_len": service.engine.length,
    }  # fmt: skip

    @app.get("/v1/models", responses=replying(replies.Models))
    async def models() -> Response:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [about]})

    @app.get("/v1/models/{model:path}", responses=replying(replies.Model, 404))
    async def model(model: str) -> Response:
        """What is known of the model."""
        service.reader.check_model(model)
        return JSONResponse(about)


def _add_texts(app: FastAPI, service: Service) -> None:
    limit = service.config.body_bytes

    async def answered(request: Request, kind: Kind) -> Response:
        body, state = await read_body(request, limit), request.state
        values = await service.values(body, state.owner)
        job = await service.start(kind, values, len(body), state.owner, state.arrived)
        return Answered(service, job)

    @app.post("/v1/completions", **bodied(schema.CompletionRequest, replies.Completion, streams=True))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await answered(request, "completion")

    @app.post("/v1/chat/completions", **bodied(schema.ChatRequest, replies.ChatCompletion, streams=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        return await answered(request, "chat")

    @app.post("/tokenize", **bodied(schema.TokenizeText, replies.Tokens, schema.TokenizeChat))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a chat."""
        body, owner = await read_body(request, limit), request.state.owner
        return JSONResponse(await service.tokenize(await service.values(body, owner), len(body), owner))

    @app.post("/detokenize", **bodied(schema.DetokenizeRequest, replies.DetokenizedText))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, owner = await read_body(request, limit), request.state.owner
        return JSONResponse(await service.detokenize(await service.values(body, owner), len(body), owner))


def _add_pages(app: FastAPI, service: Service, telemetry: Telemetry, is_stopping: Callable[[], bool]) -> None:
    html, policy = page()

    @app.get("/health", responses=replying(replies.Health) | {503: {"model": replies.Health}})
    async def health() -> Response:
        """Whether requests are answered."""
        engine = service.engine
        working = "degraded" if engine.is_degraded else "ok"
        status = "failed" if engine.error else "stopping" if is_stopping() else working
        return JSONResponse({"status": status}, 200 if status in ("ok", "degraded") else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(telemetry.text(), media_type=METRICS)

    @app.get("/stats", responses=replying(replies.Stats))
    async def stats() -> Response:
        """Figures for the page."""
        return JSONResponse(telemetry.snapshot())

    @app.get("/", response_class=HTMLResponse)
    async def live_page() -> Response:
        """What the server does, and a place to try it."""
        return HTMLResponse(html, headers=PAGE_HEADERS | {"content-security-policy": policy})


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request, which must say that it is JSON.  Raises Refusal."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site can send any other without asking
        given = repr(kind[:80]) if kind else "missing"
        raise Refusal(415, f"the content-type is {given}; send the header `Content-Type: application/json`")
    too_large = Refusal(413, f"the body is larger than {most} bytes, the limit of this server; send less")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_S:.0f} s; send it again") from None
    return bytes(body)


class Answered(Response):
    """The answer to a job: one JSON object, or a stream of events.  The job ends when the client goes away."""

    def __init__(self, service: Service, job: Job):
        super().__init__()
        self.service, self.job = service, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self.job.body.stream:
                await self._stream(scope, receive, send)
            else:
                body = await self.service.whole(self.job)
                await JSONResponse(body, headers=self._own_headers)(scope, receive, send)
        finally:
            watch.cancel()
            self.service.finish(self.job)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self.service.events(self.job)
        first = await anext(events)  # headers wait for it: a request that fails before has its own status
        head = Response(headers=self._own_headers | STREAM_HEADERS, media_type="text/event-stream")
        del head.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for chunk in events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        """Ends the job when the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.service.cancel(self.job)

    @property
    def _own_headers(self) -> dict[str, str]:
        unused = ignored(self.job.body)
        return {"x-request-id": self.job.answer.id} | ({"x-ignored-fields": ", ".join(unused)} if unused else {})


def _of_route(request: Request, error: HTTPException) -> Refusal:
    """What is said of a path or a method that does not exist."""
    path = request.url.path[:80]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Refusal(405, f"{path} does not take {request.method}; it takes {allowed}", allow=allowed)
    if error.status_code == 404:
        return Refusal(404, f"there is no {path} here; /openapi.json lists what there is", code="unknown_path")
    return Refusal(error.status_code, str(error.detail))
