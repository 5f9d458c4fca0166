"""Client libraries against a server, each run unmodified by its own Python: `make clients` installs them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.storage import cache
from outrider.targets import catalog
from outrider.targets.load import load_target

from .running import MODEL, Running, running

PROGRAMS = Path(__file__).with_name("client_programs.py")
PYTHON = os.environ.get("OUTRIDER_CLIENTS", str(Path(__file__).parents[2] / "build/clients-venv/bin/python"))
"""The Python that has the libraries."""
PREPARED = cache.folder() / "models" / f"smollm2-bfloat16-{catalog.SHA256[:8]}-{catalog.VERSION}"
"""The user's own: the folder of tests has none yet, and would fetch one."""
LIBRARIES = ("openai", "litellm", "langchain_openai", "llm", "instructor", "pydantic_ai")
TEMPLATE = """{% if tools %}<|im_start|>system
Functions: {% for tool in tools %}{{ tool.function | tojson }}{% endfor %}
Call one with <tool_call>{"name": NAME, "arguments": {}}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Hermes' form of tools, in the marks of SmolLM2, whose own template shows no tools."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    target = load_target(str(PREPARED) if PREPARED.is_dir() else "smollm2", compile=False)
    target.tokenizer.chat_template = TEMPLATE
    with running(target, length=2048, slots=2) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_client_works_unmodified(server: Running, library: str) -> None:
    """Catches a field, a chunk or an error that a client library does not understand, in chats, streams, tools,
    schemas, log probabilities, usage and errors."""
    python = PYTHON if Path(PYTHON).exists() else sys.executable
    if python == sys.executable and find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make clients, or OUTRIDER_CLIENTS=a Python that has it")
    command = [python, str(PROGRAMS), library, f"{server.url}/v1", MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert server.settled(lambda: server.engine.running == server.engine.queued == 0)
