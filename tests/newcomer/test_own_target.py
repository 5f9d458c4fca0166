"""README's commands for a target of one's own, as they stand there, on a random Qwen3 of four layers and a ShareGPT
file."""

import json
import re
import shlex
from pathlib import Path

from tiny import make_folder
from verbs import outrider_with

README = Path(__file__).resolve().parent.parent.parent / "README.md"
FEW = {
    "run": (
        "prepare.max_new_tokens=16", "prepare.length=96", "train.epochs=1", "drafter.layers=1", "drafter.rank=8",
        "drafter.block=3", "evaluate.prompts=2", "evaluate.max_new_tokens=12", "evaluate.min_first_ngrams=0",
        "evaluate.repeats=0",
    ),
    "decode": ("--max-new-tokens", "8"),
}  # fmt: skip
"""What a test has no time for."""


def commands() -> list[list[str]]:
    section = README.read_text(encoding="utf-8").partition("## For a target of your own\n")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^\$ (.*)$", section, re.MULTILINE)]


def sharegpt(path: Path, count: int) -> None:
    rows = [
        {"id": f"{path.stem}_{i}", "conversations": [
            {"from": "human", "value": f"{path.stem} {'ab' * i} {i}"}, {"from": "gpt", "value": "ab"},
            {"from": "human", "value": "and now?"}, {"from": "gpt", "value": "xy"},
        ]}
        for i in range(count)
    ]  # fmt: skip
    path.write_text(json.dumps(rows, indent=1))


def test_readme_alone_leads_from_the_install_to_a_drafter(tmp_path, monkeypatch, capsys):
    """Catches a command of README's that fails, that asks for what README does not name, or that is the seventh."""
    monkeypatch.chdir(tmp_path)
    make_folder(
        tmp_path / "my-target", num_hidden_layers=4, vocab_size=264
    )  # with rows that no token takes, as Qwen3 has
    sharegpt(tmp_path / "sharegpt.json", 6)
    sharegpt(tmp_path / "held-out.json", 4)
    install, *rest = commands()
    assert install == ["pip", "install", "."] and len(rest) <= 5
    for program, verb, *words in rest:
        assert program == "outrider"
        before = sorted(tmp_path.rglob("*"))
        more = FEW.get(verb, ())
        assert outrider_with(verb, *words, *more) == 0, capsys.readouterr()
        if "--dry-run" in words:
            assert sorted(tmp_path.rglob("*")) == before
            assert "6 prompts" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "runs/mine/checkpoint/outrider.json").read_text())
    assert manifest["kind"] == "dspark" and manifest["training"]["step"] == 1
    assert (tmp_path / "runs/mine/report.html").exists() and (tmp_path / "mine-for-vllm/config.json").exists()
