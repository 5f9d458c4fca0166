"""A target as GGUF: `outrider export demo --to gguf`."""

import json

import llama_graphs
import pytest
import torch
from tiny import make_folder
from verbs import outrider_with

from outrider import load_target
from outrider.errors import ConfigError, ExportError
from outrider.export.target import export_target
from outrider.formats.gguf import model

library = pytest.importorskip("gguf")


@pytest.mark.parametrize(("precision", "worst"), {"f16": 0.02, "q8_0": 0.15, "q4_0": 1.0, None: 1e-5}.items())
@torch.no_grad()
def test_llama_cpps_graph_gives_the_targets_states(precision, worst, bpe, tmp_path):
    """Catches a target that verifies otherwise than the one that the drafter was measured with."""
    export_target(bpe, tmp_path / "there", precision)
    read = llama_graphs.File(tmp_path / "there" / "model.gguf")
    text = torch.tensor(bpe.tokenizer.encode("then the inner one read a line"))
    ours = bpe.read(text[None], ())[0][0]
    assert (llama_graphs.states(read, text) - ours).abs().max() < worst * ours.abs().max()
    types = {one.name: one.tensor_type.name for one in library.GGUFReader(tmp_path / "there" / "model.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == (precision or "f32").upper() and types["blk.0.attn_norm.weight"] == "F32"
    manifest = json.loads((tmp_path / "there" / "outrider.json").read_text())
    assert manifest["format"] == "gguf" and manifest["target"]["weights_hash"] == bpe.spec.weights_hash


def test_what_reads_back_differently_is_not_kept(bpe, tmp_path, monkeypatch):
    """The planted fault: a writer that leaves out a norm's weights, as if they were ones."""

    def careless(name, weight, keys, back=False):
        return torch.ones_like(weight) if name.endswith("input_layernorm.weight") and not back else weight

    monkeypatch.setattr(bpe.model.model.layers[1].input_layernorm.weight, "data", torch.full((32,), 2.0))
    monkeypatch.setattr(model, "reordered", careless)
    with pytest.raises(ExportError, match=r"reads back with different weights: model.layers.1.input_layernorm"):
        export_target(bpe, tmp_path / "there")
    assert not list(tmp_path.iterdir())


def test_the_command_line_writes_a_target(bpe, tmp_path, capsys):
    """Catches a target that is taken for a drafter without one."""
    folder = bpe.spec.name
    words = ("export", folder, "--to", "llama.cpp", "--out", str(tmp_path / "out"), "--precision", "q8_0")
    assert outrider_with(*words, "--json", str(tmp_path / "said.json")) == 0
    assert "as gguf" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.gguf", "outrider.json"}
    assert json.loads((tmp_path / "said.json").read_text())["kind"] == "target"
    assert outrider_with("export", folder, "--to", "vllm", "--out", str(tmp_path / "two")) == 2
    assert "is a target, which vllm reads unchanged" in " ".join(capsys.readouterr().err.split())


def test_what_llama_cpp_would_tokenise_otherwise_is_refused(bpe, tmp_path):
    with pytest.raises(ExportError, match="has no merges"):
        export_target(load_target(make_folder(tmp_path / "other")), tmp_path / "there")
    with pytest.raises(ConfigError, match="'q3_k'; choose one of f32, f16, bf16, q8_0, q4_0, q4_k"):
        export_target(bpe, tmp_path / "there", "q3_k")
    assert not (tmp_path / "there").exists()
