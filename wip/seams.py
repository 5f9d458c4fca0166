"""Apply the seams of part L once it is quiet."""
from pathlib import Path
import sys
R=Path(sys.argv[1])
def edit(path, *pairs):
    p=R/path; s=p.read_text()
    for a,b in pairs:
        if b in s and (a not in s or a in b): print("already", path, a[:40]); continue
        assert s.count(a)==1,(path,a,s.count(a))
        s=s.replace(a,b)
    p.write_text(s); print("ok",path)

edit("outrider/serve/calls.py",
("from typing import Literal\n","from typing import Literal, Protocol\n"),
('''    written: int = 0
    """Tokens written so far."""
''','''    written: int = 0
    """Tokens written so far."""
    is_stored: bool = True
    """A drafter may learn from it."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Of each step, where the engine has a listener: depth of its draft, and how many drafted tokens were accepted."""


class Listener(Protocol):
    """Is told of texts by the engine, in its thread, so it returns at once."""

    def ended(self, call: Call, answer: list[int]) -> None:
        """A text ended by itself."""

    def busy(self, is_busy: bool) -> None:
        """There are calls from now on, or none."""
'''),
)
edit("outrider/serve/guard.py",
('''    def allocate(self, cache: Cache) -> Any:
        return self.inner.allocate(cache)
''','''    def replace(self, inner: Drafter) -> None:
        """Ask this one from now on; it takes over the memory of the one before, see `shape_of`."""
        self.inner = inner

    def allocate(self, cache: Cache) -> Any:
        return self.inner.allocate(cache)
'''),
('''class Abandoned(BaseException):''','''def shape_of(drafter: Drafter) -> tuple[object, ...]:
    """What is equal where one drafter can take over what another stores of its slots."""
    own = drafter.taps, drafter.limit, drafter.hidden, drafter.confidence_before_draw, drafter.probe_rows
    return (type(drafter), *own)


class Abandoned(BaseException):'''),
)
edit("outrider/serve/engine.py",
("from outrider.serve.calls import Call, Ending, EngineStopped, Output, QueueFull, WaitingCalls\n",
 "from outrider.serve.calls import Call, Ending, EngineStopped, Listener, Output, QueueFull, WaitingCalls\n"),
("from outrider.serve.guard import Abandoned, GuardedDrafter\n","from outrider.serve.guard import Abandoned, GuardedDrafter, shape_of\n"),
('''        self._drafts_always = bool(inner.limit)
        if not inner.probe_rows:
            inner = Predicted(inner, target.spec.vocabulary, inner.limit or PREDICTED)
''','''        self._drafts_always, self._shape = bool(inner.limit), shape_of(inner)
        inner = self._with_predictions(inner)
'''),
('''        """Why the engine ended by itself; "" while it works."""
''','''        """Why the engine ended by itself; "" while it works."""
        self.listener: Listener | None = None
        """Set before `start`."""
        self.replaced = 0.0
        """When another drafter was taken, by `time.monotonic`."""
        self._replacement: Drafter | None = None
'''),
('''        self._drafter_timeout_s, self._threads = drafter_timeout_s, torch.get_num_threads()
''','''        self._drafter_timeout_s, self.threads = drafter_timeout_s, torch.get_num_threads()
'''),
('''        torch.set_num_threads(self._threads)  #''','''        torch.set_num_threads(self.threads)  #'''),
('''    def stop(self, drain_s: float = 0.0) -> None:
''','''    def replace(self, drafter: Drafter) -> None:
        """Draft with other weights from the next step on; slots go on with what is stored for them.  No text changes.

        Raises ConfigError for a drafter of another shape.
        """
        if (shape := shape_of(drafter)) != self._shape:
            raise ConfigError(f"a drafter like {shape} can't replace one like {self._shape}; start a server with it")
        with self._changed:
            self._replacement = drafter
            self._changed.notify()

    def stop(self, drain_s: float = 0.0) -> None:
'''),
('''        self._emit(None)  # of a step that another thread did not finish
        if not self._admit():
            return False
''','''        self._emit(None)  # of a step that another thread did not finish
        if not self._admit():
            return False
        self._exchange()
'''),
('''            while not (self._serving or self._waiting or self._is_draining):
                self._cancelled.clear()
                self._changed.wait()
''','''            while not (self._serving or self._waiting or self._is_draining or self._replacement):
                self._cancelled.clear()
                self._sleep()
'''),
('''    def _limit_drafts(self) -> None:
''','''    def _sleep(self) -> None:
        """Until something changes; the listener knows that there are no calls meanwhile."""
        if self.listener is not None:
            self.listener.busy(False)
        self._changed.wait()
        if self.listener is not None:
            self.listener.busy(True)

    def _exchange(self) -> None:
        """Take another drafter where one was given."""
        with self._changed:
            drafter, self._replacement = self._replacement, None
        if drafter is not None:
            self.drafter.replace(self._with_predictions(drafter))
            self.replaced = time.monotonic()

    def _with_predictions(self, drafter: Drafter) -> Drafter:
        """The same drafter for requests that say what their answers repeat, too."""
        if drafter.probe_rows:
            return drafter
        return Predicted(drafter, self.target.spec.vocabulary, drafter.limit or PREDICTED)

    def _limit_drafts(self) -> None:
'''),
('''            call.steps, call.drafted, call.accepted = call.steps + 1, call.drafted + nodes, call.accepted + count
''','''            call.steps, call.drafted, call.accepted = call.steps + 1, call.drafted + nodes, call.accepted + count
        if self.listener is not None:
            for call, depth, count in zip(calls, state.reached, counts, strict=True):
                call.drafts.append((depth, count))
'''),
('''            if not call.finished and reason is not None:
                self._ended(call, reason)
''','''            if not call.finished and reason is not None:
                self._ended(call, reason)
                if self.listener is not None:
                    self.listener.ended(call, state.tokens[row][len(call.request.prompt) :])
'''),
)
edit("outrider/serve/config.py",
("from outrider.config import Config as Base\n","from outrider.config import Config as Base\nfrom outrider.serve.learning.config import Learning\n"),
('''    """Write prompts and answers into the request log too.  Ask those who send them first."""
''','''    """Write prompts and answers into the request log too.  Ask those who send them first."""
    learning: Learning | None = None
    """The drafter learns from the texts that are served, which are stored; see docs/learning.md.  It does not unless
    given."""
'''),
)
edit("outrider/serve/service.py",
('''        self.calls.append(Call(request, functools.partial(self._take, index), owner, deadline))
        return self.calls[-1]
''','''        call = Call(request, functools.partial(self._take, index), owner, deadline)
        call.is_stored = self.body.store is not False
        self.calls.append(call)
        return call
'''),
)
edit("outrider/serve/schema.py",
('''    user: str | None = None
    """No effect, as the four below."""
    store: bool | None = None
    metadata:''','''    store: bool | None = None
    """false: no drafter learns from the texts of this request."""
    user: str | None = None
    """No effect, as the three below."""
    metadata:'''),
)
edit("outrider/cli/serve.py",
("from outrider.serve.keys import KeyRing\n","from outrider.serve.keys import KeyRing\nfrom outrider.serve.learning import folder as learning\nfrom outrider.serve.learning.learner import Learner\n"),
('''from contextlib import contextmanager
from pathlib''','''from contextlib import ExitStack, contextmanager
from pathlib'''),
('''            service, post = loading.submit(_loaded, served, printer, log).result()
        with service.engine:
            _say_engine(service.engine, config)
            yield service, post
''','''            service, post, learner = loading.submit(_loaded, served, printer, log).result()
        with ExitStack() as running:
            if learner is not None:
                running.enter_context(learner)
                say(f"learning  from what is served, version {learner.state.version}; log in {learner.folder.path}")
            running.enter_context(service.engine)
            _say_engine(service.engine, config)
            yield service, post
'''),
('''def _loaded(served: Served, printer: Printer, log: RequestLog) -> tuple[Service, Post]:
    config = served.config
''','''def _loaded(served: Served, printer: Printer, log: RequestLog) -> tuple[Service, Post, Learner | None]:
    config = served.config
    learned = _learned(served)
'''),
('''    drafter, label, names = _drafter(served, target, printer)
    name, post''','''    drafter, label, names = _drafter(served, target, printer, learned)
    name, post'''),
('''def _drafter(served: Served, target: TransformersTarget, printer: Printer) -> tuple[Drafter | None, str, list[str]]:
    """The drafter, what it is called, and the names that a request may ask for."""
''','''def _drafter(
    served: Served, target: TransformersTarget, printer: Printer, learned: learning.Folder | None
) -> tuple[Drafter | None, str, list[str]]:
    """The drafter, what it is called, and the names that a request may ask for."""
'''),
('''    drafter = load_drafter(kind, target, **own)
    if served.target.compile:
        compile_drafter(drafter, printer)
''','''    drafter = load_drafter(kind if learned is None else learned.current, target, **own)
    if served.target.compile:
        compile_drafter(drafter, printer)
    if learned is not None:
        learned.set(compile=any(step.graph is not None for step in drafter.steps))
'''),
('''    telemetry.length = engine.length
    return Service(engine, target, config, name=name, drafters=names, log=log), post
''','''    telemetry.length = engine.length
    learner = None if learned is None else Learner(engine, target, learned)
    return Service(engine, target, config, name=name, drafters=names, log=log), post, learner


def _learned(served: Served) -> learning.Folder | None:
    """The folder of a drafter that learns.  Raises ConfigError for one that can't, before anything loads."""
    if served.config.learning is None:
        return None
    kind = served.drafter if isinstance(served.drafter, str | None) else parted(served.drafter)[0]
    return learning.opened(served.config.learning, kind or "none", served.target.model_dump(), torch.get_num_threads())
'''),
("import typer\nimport yaml\n","import torch\nimport typer\nimport yaml\n"),
)
edit("outrider/cli/__init__.py",
('''class Verbs(TyperGroup):''','''LEARNING = {
    "Commands": {
        "log": ("learning", "What was trained, served, refused and rolled back"),
        "undo": ("learning", "Go back to an earlier version of the drafter"),
    },
}


class Verbs(TyperGroup):'''),
('''def main() -> None:
    """Entry point:''','''app.add_command(
    Verbs(
        "learning", LEARNING, prefix="learning_", help="A drafter that learns while it serves: log, undo.",
        rich_help_panel="Servers",
    )
)  # fmt: skip


def main() -> None:
    """Entry point:'''),
)
