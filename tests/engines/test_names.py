"""Engines and formats by any of their names."""

import pytest
from verbs import outrider_with

from outrider.engines import names
from outrider.engines.engine import ENGINES, engine_name
from outrider.errors import ConfigError
from outrider.export import names as formats
from outrider.export.formats import find

CHOICES = [
    ("vllm", "dflash", "speculators"), ("vLLM", "small_model", "transformers"), ("vllm", "medusa", "medusa"),
    ("sglang", "dflash", "sglang"), ("llama.cpp", "small_model", "gguf"), ("gguf", "dspark", "gguf"),
    ("llama-server", "dspark", "gguf"), ("transformers", "small_model", "transformers"), ("trtllm", "eagle3", "trtllm"),
    ("TensorRT-LLM", "dspark", "deepspec"), ("speculators", "mtp", "speculators"), ("triton", "dflash", "speculators"),
]  # fmt: skip
REFUSED = [
    ("vlm", "dflash", "unknown engine or format 'vlm'; did you mean 'vllm'?"),
    ("speculator", "dflash", "did you mean 'speculators'?"),
    ("ours", "dflash", "unknown engine or format 'ours'; known: "),
    ("vllm", "domino", "vLLM does not run domino: sglang runs it"), ("vllm", "mtp", "writes no folder of mtp for vLLM"),
]  # fmt: skip


def test_an_engine_stands_for_the_format_that_it_reads() -> None:
    """Catches `--to vllm` that is unknown, a folder that the engine does not read, and a name that offers no other."""
    for name, kind, format in CHOICES:
        found = names.chosen(name, kind)
        assert found.format == format
        assert found.engine is None or format in ENGINES[found.engine].methods[kind].formats
    for name, kind, reason in REFUSED:
        with pytest.raises(ConfigError) as caught:
            names.chosen(name, kind)
        assert reason in str(caught.value)


def test_one_list_has_every_engine_and_format() -> None:
    """Catches an engine or a format that `outrider formats` does not print, and a name with two meanings."""
    rows, engines = names.rows(), names.engines()
    assert {row["format"] for row in rows} == set(formats()) and [one["engine"] for one in engines] == list(ENGINES)
    every = [name for one in engines for name in (one["engine"], *one["names"])]
    assert len(every) == len(set(every)) and all(engine_name(name.upper()) in ENGINES for name in every)
    for name, engine in ENGINES.items():
        for kind, method in engine.methods.items():
            for format in method.formats:
                same = [name in row["engines"] for row in rows if (row["format"], row["kind"]) == (format, kind)]
                assert same in ([], [True]) and format in formats() and find(format)
    with pytest.raises(ConfigError, match="speculators is a format, not .* an engine that reads it: vllm, triton"):
        engine_name("speculators")


def test_export_deploy_and_verify_export_take_the_same_names(home, tmp_path, capsys):
    """Catches `--to llama.cpp` that one verb knows and another does not; the misspelt one offers the nearest in all
    three."""
    checkpoint, target = str(home / "checkpoint"), str(home / "target")
    assert outrider_with("export", checkpoint, "--to", "vLLM", "--out", str(tmp_path / "out"), "--target", target) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "vLLM reads dflash in the layout of speculators" in said and "dflash as speculators for vLLM" in said
    assert outrider_with("deploy", str(tmp_path / "out"), "--to", "VLLM", "--target", target) == 0
    for words in (
        ["export", checkpoint, "--to", "vlm", "--out", str(tmp_path / "no")],
        ["deploy", checkpoint, "--to", "vlm"],
        ["verify-export", checkpoint, "--engine", "vlm"],
    ):
        capsys.readouterr()
        assert outrider_with(*words, "--target", target) == 2
        assert "did you mean 'vllm'?" in capsys.readouterr().err
    assert outrider_with("verify-export", checkpoint, "--engine", "trt-llm", "--target", target) == 2
    assert "drafts of TensorRT-LLM can't be compared" in " ".join(capsys.readouterr().err.split())
    assert outrider_with("verify-export", checkpoint, "--engine", "vLLM", "--python", "x", "--target", target) == 2
    assert "export it first: `outrider export" in " ".join(capsys.readouterr().err.split())
