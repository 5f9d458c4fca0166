"""A real server in a thread of this process, on a free port."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from outrider.decoding.protocols import Drafter
from outrider.serve.config import Config
from outrider.serve.engine import Engine
from outrider.serve.http import server
from outrider.serve.http.admission import Admission
from outrider.serve.http.api import make_app
from outrider.serve.http.connections import Connections
from outrider.serve.http.keys import KeyRing
from outrider.serve.records.metrics import Telemetry
from outrider.serve.records.request_log import RequestLog
from outrider.serve.service import Post, Service
from outrider.targets.hf.transformers import TransformersTarget

MODEL = "tiny"


@dataclass
class Running:
    url: str
    service: Service
    admission: Admission
    server: server.Server

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def limits(self) -> Connections:
        return self.server.limits

    @property
    def service_loop(self) -> asyncio.AbstractEventLoop:
        assert self.server.post.loop is not None
        return self.server.post.loop

    def client(self, key: str = "none", **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **settings)

    def settled(self, is_so: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Whether it becomes so in time."""
        until = time.monotonic() + seconds
        while not is_so() and time.monotonic() < until:
            time.sleep(0.01)
        return is_so()


@contextmanager
def engine_of(target: TransformersTarget, drafter: Drafter | None, config: Config) -> Iterator[tuple[Engine, Post]]:
    post = Post()
    telemetry = Telemetry(MODEL, config.slots)
    with Engine(
        target, drafter, slots=config.slots, length=config.length, queue=config.queue, policy="fixed",
        prefix_bytes=config.prefix_bytes or 0, telemetry=telemetry, post=post, interval_s=config.interval_s,
    ) as engine:  # fmt: skip
        yield engine, post


def _run(own: server.Server, work: Coroutine[Any, Any, None]) -> None:
    """On the event loop that the server would take."""
    with asyncio.Runner(loop_factory=own.config.get_loop_factory()) as runner:
        runner.run(work)


@contextmanager
def running(
    target: TransformersTarget, drafter: Drafter | None = None, drafters: tuple[str, ...] = (),
    log: RequestLog | None = None, **settings: Any,
) -> Iterator[Running]:  # fmt: skip
    """A server at 127.0.0.1; settings: of its Config."""
    config = Config(**({"port": 0, "slots": 4, "prefix_bytes": 0, "drain_s": 5.0} | settings))
    with engine_of(target, drafter, config) as (engine, post), server.bound(config) as sock:
        service = Service(engine, target, config, name=MODEL, drafters=drafters, log=log)
        app = make_app(service, engine.telemetry, lambda: admission.is_closed)
        admission = Admission(app, config, KeyRing(config.keys) if config.keys else None, engine.telemetry)
        answers = threading.Event()
        own = server.Server(admission, service, post, ready=answers.set)
        thread = threading.Thread(target=lambda: _run(own, own.serve([sock])), daemon=True)
        thread.start()
        found = Running(server.address_of(sock), service, admission, own)
        assert answers.wait(20)
        try:
            yield found
        finally:
            own.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not end"
