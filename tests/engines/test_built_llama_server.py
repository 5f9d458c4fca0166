"""The small demo's drafter in a real llama-server; collected where both are there (tests/conftest.py)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LLAMA_SERVER, TRAINED

from benchmarks.engines.gguf_faults import planted
from outrider import generate, load_target
from outrider.checkpoint import load_model
from outrider.engines.tuning import sweep
from outrider.engines.verify.comparison import prompt_tokens, verified
from outrider.export.writing import export_folder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_llama_server_drafts_what_we_draft_and_a_planted_fault_is_named(tmp_path: Path) -> None:
    """The demo's DSpark, sound and with its taps shifted, both in the server itself.

    A draft that learnt nothing keeps nothing on either side, so this needs one that was trained.
    """
    demo = load_target("demo", dtype="float32", compile=False)
    export_folder(TRAINED, "gguf", tmp_path / "sound", demo, "f32")
    model, prompts = load_model(TRAINED, demo), prompt_tokens(demo, "stdlib", 4)
    sound = verified(tmp_path / "sound", "llamacpp", None, demo, model, True, prompts, 64, server=str(LLAMA_SERVER))
    assert sound.error is None and sound.texts_hold and sound.is_equal and sound.causes == ()
    assert sound.steps[1] > 40 and sound.depths[0].engine > 0.3
    wrong = planted("taps one off", tmp_path / "sound", tmp_path / "wrong")
    found = verified(wrong, "llamacpp", None, demo, model, True, prompts, 64, server=str(LLAMA_SERVER))
    assert found.texts_hold and not found.is_equal and [cause.name for cause in found.causes] == ["taps"]


def test_the_path_on_the_page_leads_to_a_text(tmp_path: Path) -> None:
    """Catches a command of the page that a new user types in vain: at most four, from `make demo` to a text."""
    page = (ROOT / "docs" / "llama_cpp.md").read_text()
    block = page.partition("<!-- path -->")[2].partition("<!-- /path -->")[0]
    commands_ = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    assert 0 < len(commands_) <= 4
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "checkpoint").symlink_to(TRAINED)
    port = str(sweep.free_port())
    # on the small target, which the drafter here is for
    script = (
        "\n".join(commands_)
        .replace("export smollm2", "export demo")
        .replace("--out served/deployed", f"--port {port} --out served/deployed")
    )
    script = "set -e\n" + script.replace("8080", port).replace(
        "curl ", "curl --silent --show-error --output answer.json "
    )
    programs = f"{LLAMA_SERVER.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": programs}, start_new_session=True
    )
    try:
        assert ran.wait(300) == 0
    finally:
        os.killpg(ran.pid, signal.SIGKILL)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["timings"]["draft_n"] > answer["timings"]["draft_n_accepted"] > 0
    demo = load_target("demo", dtype="float32", compile=False)
    [own] = generate(demo, [demo.encode("def mean(numbers):")], max_new_tokens=64)
    assert answer["content"] == demo.tokenizer.decode(own.tokens, skip_special_tokens=True)
