"""Published GGUF files: what our drafters don't compute is refused, and a spoilt file ends in one sentence."""

import shutil
from collections.abc import Callable
from typing import Any

import llama_graphs
import pytest
import torch
from gguf_targets import rewritten

from outrider.errors import ExportError
from outrider.export.reading import import_folder
from outrider.export.writing import export_folder
from outrider.formats.gguf import reading
from outrider.loading import load_drafter

library = pytest.importorskip("gguf")


def _no_change(found: dict[str, Any]) -> None:
    pass


THEIRS: dict[str, tuple[str, Callable[[dict[str, Any]], None], dict[str, Any], str]] = {
    "sliding windows": ("dflash", _no_change, {"dflash__attention__sliding_window": 64}, "sliding_window is 64"),
    "causal blocks": ("dspark", _no_change, {"dflash__attention__causal": True}, "attention.causal is True"),
    "GELU": ("dspark", _no_change, {"dflash__hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "one norm of all taps": ("eagle3", _no_change, {"eagle3__norm_before_fc": True}, "norm_before_fc is True"),
    "another width": ("eagle3", _no_change, {"eagle3__target_hidden_size": 64}, "target_hidden_size is 64"),
    "another vocabulary": ("dspark", _no_change, {"tokenizer__ggml__tokens": ["a", "b"]}, "the file has 2 tokens"),
    "no layers": ("dspark", _no_change, {"dflash__target_layers": []}, "dflash.target_layers is missing"),
    "sinks": ("dspark", lambda found: found.update({"blk.0.attn_sinks.weight": torch.ones(2)}), {}, "attn_sinks"),
    "half a DFlash 2": ("dflash", lambda found: found.update({"selector_hidden.weight": torch.ones(2, 2)}), {},
                        "dflash.conv_kernel_size is missing"),
    "its own embedding": ("dflash", lambda found: found.update({"token_embd.weight": torch.ones(271, 32)}), {},
                          "its own embedding|has shape"),
    "a foreign map": ("eagle3, 40 tokens", lambda found: found.update({"d2t": found["d2t"] + 10**6}), {}, "d2t names"),
    "no weights of a layer": ("dspark", lambda found: found.pop("blk.1.attn_q.weight"), {}, "lacks the weights blk.1"),
    "no number": ("dspark", lambda found: found["fc.weight"].fill_(torch.nan), {}, "not finite"),
    "yarn": ("dflash", _no_change, {"dflash__rope__scaling__type": "yarn"}, "rope.scaling.type yarn"),
}  # fmt: skip


def test_a_published_file_that_computes_otherwise_is_refused(bpe, made, tmp_path, monkeypatch):
    """Catches a draft that loads and drafts worse than in the engine that it was made for."""
    for case, (own, tensors, keys, said) in THEIRS.items():
        with monkeypatch.context() as patched:
            if case == "no number":  # the writer refuses it too
                patched.setattr(torch.Tensor, "isfinite", lambda self: torch.ones_like(self, dtype=torch.bool))
            path = rewritten(made.file(own), tmp_path / f"{case}.gguf", tensors, **keys)
        with pytest.raises(ExportError, match=said):
            import_folder(path, tmp_path / "back", bpe)
        assert not (tmp_path / "back").exists(), case


def test_a_tensor_that_is_quantised_otherwise_is_refused_by_its_name(bpe, made, tmp_path):
    """Catches whole numbers that are read as blocks of eight bits."""
    export_folder(made.checkpoint("dspark"), "gguf", tmp_path / "there", bpe, "q8_0")
    path = tmp_path / "there" / "model.gguf"
    header = reading.read_header(path)
    name = next(name for name, info in header.tensors.items() if info.type == 8)
    raw = path.read_bytes()
    at = raw.index(name.encode()) + len(name) + 4 + 8 * len(header.tensors[name].shape)
    path.write_bytes(raw[:at] + (24).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(ExportError, match=f"has {name} in I8; use a file in F32, F16"):
        import_folder(path.parent, tmp_path / "back", bpe)


def _huge(raw: bytes) -> bytes:
    return raw[:8] + (2**62).to_bytes(8, "little") + raw[16:]


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in its keys": (lambda raw: raw[:200], "within a value|more than it has bytes"),
    "cut in a tensor": (lambda raw: raw[:-4000], "ends within"),
    "empty": (lambda raw: b"", "it is empty"),
    "no GGUF": (lambda raw: b"GGML" + raw[4:], "not a GGUF file"),
    "a version to come": (lambda raw: raw[:4] + (9).to_bytes(4, "little") + raw[8:], "its version is 9"),
    "endless tensors": (_huge, "declares"),
}


def test_a_spoilt_file_is_refused_in_one_sentence(bpe, made, tmp_path):
    """Catches a reader that takes memory for what a header claims, or loops over it."""
    path = shutil.copytree(made.folder("dspark"), tmp_path / "there") / "model.gguf"
    for spoil, said in SPOILT.values():
        path.write_bytes(spoil(made.file("dspark").read_bytes()))
        with pytest.raises(ExportError, match=said):
            import_folder(path.parent, tmp_path / "back", bpe)


def test_our_reader_reads_what_llama_cpps_library_reads(bpe, made, tmp_path):
    """The fast reader beside the library's: equal keys, names, shapes and numbers."""
    export_folder(made.checkpoint("eagle3, 40 tokens"), "gguf", tmp_path / "there", bpe, "q8_0")
    path = tmp_path / "there" / "model.gguf"
    reader, header = library.GGUFReader(path), reading.read_header(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.keys == theirs
    ours = reading.read_tensors(path)
    assert ours.keys() == {one.name for one in reader.tensors}
    file = llama_graphs.File(path)
    assert all(torch.equal(ours[name].to(weight.dtype), weight) for name, weight in file.tensors.items())


def test_several_files_are_no_draft(bpe, made, tmp_path):
    """Catches a folder of many quantisations, of which the first would be taken in silence."""
    raw = made.file("dspark").read_bytes()
    (tmp_path / "hub").mkdir()
    for name in ("a-q8_0.gguf", "a-f16.gguf"):
        (tmp_path / "hub" / name).write_bytes(raw)
    with pytest.raises(ExportError, match=r"has 2 GGUF files: a-f16.gguf, a-q8_0.gguf; name one"):
        load_drafter(tmp_path / "hub", bpe)
    assert load_drafter(tmp_path / "hub" / "a-f16.gguf", bpe).model.config.kind == "dspark"


def test_a_rounded_copy_of_the_targets_embedding_is_the_targets(made, bpe, tmp_path):
    """Catches a published file of eight bits that is refused for its copy, as llama.cpp's converter writes it."""
    own = bpe.model.get_input_embeddings().weight.detach()
    files = [
        rewritten(made.file("dspark"), tmp_path / f"{n}.gguf", lambda found, one=one: found.update(one), "q8_0")
        for n, one in enumerate(({"token_embd.weight": own}, {"token_embd.weight": own.flip(0)}))
    ]
    assert load_drafter(files[0], bpe).model.config.kind == "dspark"
    with pytest.raises(ExportError, match="its own embedding"):
        load_drafter(files[1], bpe)
