"""Hostile code is run for real: what it must not reach is there, and stays as it was."""

import os
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.measure.tasks import sandbox
from outrider.measure.tasks.sandbox import Outcome, run, walls_missing
from outrider.measure.tasks.sandboxed import PROCESSES

MISSING = walls_missing()


def wall(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name in MISSING, reason=f"unshare:{name}")


@pytest.fixture(params=["walls", "none"])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With what this machine can build, and as on a machine without `unshare`."""
    if request.param == "none":
        monkeypatch.setenv("PATH", "/nowhere")
    sandbox._unshare.cache_clear()
    yield request.param
    sandbox._unshare.cache_clear()


def test_code_passes_when_its_tests_come_to_their_end(walls: str) -> None:
    """Catches tests that see nothing of the code, and a verdict that is always the same."""
    code = "import json, math, collections\ndef plus(a, b):\n    return a + b\n"
    assert run(code, "assert plus(1, 2) == 3").passed
    wrong = run(code, "assert plus(1, 2) == 4, 'three'")
    assert not wrong.passed and wrong.reason == "AssertionError: three"
    assert wrong.missing == (sandbox.WALLS if walls == "none" else MISSING)


LEAVING = [
    ("import os; os._exit(0)", "ended before"),
    ("import sys; sys.exit(0)", "the code left before the end"),
    ("raise SystemExit", "the code left before the end"),
    ("def f(): raise SystemExit", "the tests left before the end"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
    ("import ctypes; ctypes.string_at(0)", "killed by signal 11"),
    ("def f(): import os; os._exit(0)", "ended before"),
    ("import atexit, os; atexit.register(os._exit, 0); f = 1", "TypeError"),
    ("def f(:", "SyntaxError"),
    ("x = [0] * 10**10", "out of memory"),
    ("open('big', 'wb').write(bytes(17 << 20))", "File too large"),
    ("def f(n=0): return f(n + 1)", "RecursionError"),
    ("import os\nfor n in range(3, 256):\n  try: os.write(n, b'x' * 50000)\n  except OSError: pass",
    "pipe that is for"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("walls", "code", "reason"),
    [*(("walls", *row) for row in LEAVING), *(("none", *row) for row in LEAVING[::4])],
    indirect=["walls"],
)
def test_leaving_early_never_counts_as_passed(walls: str, code: str, reason: str) -> None:
    """Catches a verdict taken from an exit code, and limits that are not set."""
    found = run(code, "f()\nassert False")
    assert not found.passed and reason in found.reason


STUBBORN = "while True:\n  try:\n    while True: pass\n  except BaseException: pass"


def test_endless_code_is_stopped(walls: str) -> None:
    """Catches a run that hangs on one answer; the limit is a second, so the test hangs where it does not hold."""
    code = STUBBORN if walls == "walls" else "import time; time.sleep(60)"
    assert run(code, "", timeout_s=1).reason == "no end after 1 s"


def test_the_tests_keep_the_real_builtins(walls: str) -> None:
    """Catches an answer that passes by changing what the tests are made of."""
    code = (
        "import builtins\nbuiltins.all = lambda _: True\nbuiltins.AssertionError = ValueError\n"
        "builtins.len = lambda _: 3\n"
    )
    assert not run(code, "assert all([False])").passed
    assert not run(code, "assert len('') == 3").passed


def test_a_flood_of_output_is_nobodys_memory(walls: str) -> None:
    """Catches output that is kept, and a pipe that fills and blocks."""
    assert run("import sys\nfor _ in range(2000): print('x' * 10**5); print('y' * 10**5, file=sys.stderr)", "").passed


def test_nothing_of_the_environment_is_handed_in(monkeypatch: pytest.MonkeyPatch, walls: str) -> None:
    """Catches a token of the user's in reach of an answer."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os; assert set(os.environ) <= {'PATH', 'LC_CTYPE'}, list(os.environ)\nassert not os.listdir('.')"
    assert run(code, "") == Outcome(True, "", sandbox.WALLS if walls == "none" else MISSING)


@wall("files")
def test_files_of_the_machine_can_be_neither_read_nor_written(tmp_path: Path) -> None:
    """Catches keys in a home folder within reach, other processes' environments, and a library that an answer
    changes."""
    secret = tmp_path / "key"
    secret.write_text("secret")
    tries = [
        f"open({str(secret)!r})", f"open({str(secret)!r}, 'w')", "open('/etc/passwd')", "open('/proc/1/environ')",
        "open('/usr/new', 'w')", "open('/new', 'w')", "open(os.__file__, 'a')", "os.chmod(os.__file__, 0o777)",
        "os.listdir(os.path.expanduser('~/.ssh'))", "os.chroot('/scratch')", "os.setuid(1)", "os.mkdir('/tmp/x')",
    ]  # fmt: skip
    code = "import os\n" + "".join(
        f"try:\n    {one}\nexcept OSError: pass\nelse: raise ValueError({one!r})\n" for one in tries
    )
    assert run(code, "open('mine', 'w').write('x'); assert open('mine').read() == 'x'") == Outcome(True, "", MISSING)
    assert secret.read_text() == "secret"


@pytest.mark.skipif(os.geteuid() != 0, reason="root")
@wall("files")
@wall("network")
def test_root_is_left_behind() -> None:
    """Catches answers that run as root: no limit on processes holds for it."""
    assert run("import os; assert 0 not in (os.getuid(), os.getgid(), *os.getgroups())", "") == Outcome(True, "", ())


@wall("files")
def test_walls_can_not_be_taken_down_from_inside() -> None:
    """Catches capabilities that are kept: with them an answer mounts the machine's files again."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"tmpfs", b"/scratch", b"tmpfs", 0, None) == -1 and ctypes.get_errno() == 1
assert libc.unshare(0x10000000 | 0x00020000) in (-1, 0)  # a name space of its own gives no rights over ours
assert libc.mount(None, b"/", None, 32, None) == -1
"""
    assert run(code, "").passed


@wall("network")
def test_no_address_can_be_reached() -> None:
    """Catches an answer that sends what it read; a server listens, and nobody comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        found = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2)", "")
        assert not found.passed and "OSError" in found.reason
        with pytest.raises(TimeoutError):
            server.accept()


@wall("processes")
def test_a_fork_bomb_stops_at_a_few(tmp_path: Path) -> None:
    """Catches a bomb that takes the machine with it."""
    code = f"""
import os
count = 0
try:
    while count < {4 * PROCESSES}:
        if os.fork() == 0:
            import time; time.sleep(30); os._exit(0)
        count += 1
except OSError:
    pass
assert 0 < count <= {PROCESSES}, count
"""
    assert run(code, "").passed


@wall("processes")
def test_what_an_answer_leaves_behind_ends_with_it() -> None:
    """Catches daemons that left their group and their session, and live on, if only for the moment that the kernel
    takes."""
    mark = uuid.uuid4().hex
    code = f"""
import os, sys, time
for _ in range(12):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            command = "kept = bytearray(20 << 20)\\nimport time; time.sleep(300)"
            os.execv({os.path.realpath(sys.executable)!r}, ["python", "-c", command, {mark!r}])
        os._exit(0)
time.sleep(0.1)
"""
    for _ in range(3):
        assert run(code, "").passed
        lines = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(place.read_bytes())
            except OSError:
                continue
        assert lines and not any(mark.encode() in line for line in lines)


def test_the_caller_s_files_and_processes_are_left_in_order(walls: str) -> None:
    """Catches pipes and folders that pile up over a thousand answers."""
    run("", "")
    before = set(os.listdir("/proc/self/fd"))
    for code in ("", "import os; os._exit(0)", "1/0"):
        run(code, "")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_less_memory_than_the_interpreter_takes_is_a_failure_like_others(walls: str) -> None:
    """Catches an error in the caller where the inner program could not even begin."""
    assert not run("x = list(range(10**6))", "", memory_bytes=1 << 20).passed


HOLDING = """
import os, time
heard, said = os.pipe()
held = b""
for _ in range(2):
    if os.fork() == 0:
        own = b"x" * ({own} << 20)
        os.write(said, b".")
        time.sleep(20)
        os._exit(0)
while len(held) < 2:
    held += os.read(heard, 2)
time.sleep(1)
"""


@pytest.mark.parametrize(("own", "walls"), [(120, "walls"), (20, "walls"), (120, "none")], indirect=["walls"])
def test_the_processes_of_an_answer_share_one_limit_of_memory(own: int, walls: str) -> None:
    """Catches a limit for each of 32 processes, which together take 16 GB."""
    found = run(HOLDING.format(own=own), "", timeout_s=60, memory_bytes=200 << 20)
    assert found.passed == (own == 20), found
    assert found.passed or found.reason == "out of memory: its processes hold more than 200 MiB together"


@wall("processes")
def test_memory_that_processes_share_counts_once() -> None:
    """Catches an answer with a table and four workers that is stopped for holding the table five times."""
    four = HOLDING.format(own=0).replace("range(2)", "range(4)").replace("held) < 2", "held) < 4")
    code = 'table = b"x" * (60 << 20)\n' + four
    assert run(code, "", timeout_s=60, memory_bytes=200 << 20) == Outcome(True, "", MISSING)
