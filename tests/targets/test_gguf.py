"""Targets in GGUF files: the same function as transformers' class on the numbers that the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models
import gguf_targets
import pytest
import torch

from outrider import checkpoint, generate, load_drafter, load_target
from outrider.errors import CheckpointError, ConfigError, ExportError, TargetError
from outrider.export import target as exported
from outrider.plan.paper import anatomy
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf import model as gguf_model

IDS = torch.tensor([[5, 77, 131, 9, 200, 14, 60, 61, 33, 7, 8, 250, 4, 90, 91, 17]])


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def built(path: Path) -> Any:
    return gguf_model.build(gguf_model.GgufFiles([path]))


def rounding(reference: torch.Tensor) -> float:
    """What float32 sums in another order may differ by."""
    return 2e-5 * float(reference.abs().max())


@pytest.mark.parametrize("case", gguf_models.CASES)
def test_every_architecture_computes_what_transformers_computes(case: str, tmp_path: Path) -> None:
    """Catches a name of a weight, a permutation, an offset of norms, a rotation or a scale that is read wrongly: names,
    layouts and values are llama.cpp's own library's."""
    reference = gguf_models.model_of(case)
    path = gguf_models.write(tmp_path / "tiny.gguf", gguf_models.model_of(case), "Q8_0", like=reference)
    ids = IDS.repeat(1, 12)[:, :180]  # past a window, and past the context of the first training
    expected = logits(reference, ids)
    assert (logits(built(path), ids) - expected).abs().max() <= rounding(expected)


@pytest.mark.parametrize("kind", gguf_models.KINDS)
def test_every_type_of_block_is_read_as_llama_cpps_library_reads_it(kind: str, tmp_path: Path) -> None:
    """Catches nibbles in the wrong order, a min that is ignored, a scale of the neighbouring block."""
    reference = gguf_models.model_of("qwen3")
    path = gguf_models.write(tmp_path / "tiny.gguf", gguf_models.model_of("qwen3"), kind, like=reference)
    model, expected = built(path), logits(reference)
    assert (logits(model) - expected).abs().max() <= rounding(expected)
    assert [name for name, _ in model.named_parameters() if kind != "F32" and _.dim() > 1] == [], "no float copy"


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Catches a float copy of a matrix, and blocks of a tied head that are there twice."""
    path = gguf_models.write(tmp_path / "tiny.gguf", gguf_models.model_of("llama"), "Q4_1")
    parts = gguf_model.GgufFiles([path])
    model: Any = gguf_model.build(parts)
    held = {weight.data_ptr(): weight.nbytes for weight in (*model.parameters(), *model.buffers())}
    assert sum(held.values()) <= 1.05 * parts.weight_bytes + 2**14, "buffers and norms besides"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_models.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", gguf_models.model_of("llama"), "Q4_1")


@pytest.fixture(scope="module")
def target(file: Path) -> Any:
    return load_target(file)


def test_a_drafter_changes_no_token(target: Any) -> None:
    """Catches a pass of several rows whose logits are not those of single rows."""
    plain = generate(target, ["the other then"], None, max_new_tokens=32)
    for drafter in (load_drafter("ngram", target), load_drafter("small_model", target, model=target.spec.name)):
        assert generate(target, ["the other then"], drafter, max_new_tokens=32)[0].tokens == plain[0].tokens


def test_a_target_says_what_it_is(target: Any, file: Path) -> None:
    """Catches a hash, a size or a precision that is that of packed bytes, and not of the model."""
    reference = gguf_models.model_of("llama")
    gguf_models.write(file.with_name("same.gguf"), gguf_models.model_of("llama"), "Q4_1", like=reference)
    plain = load_target(reference)
    assert target.spec.weights_hash == plain.spec.weights_hash and target.parameters == plain.parameters
    assert (target.spec.quantised, target.spec.precision, target.spec.mode) == ("q4_1", "q4_1", "tree")
    assert target.spec.sizes == plain.spec.sizes and target.spec.vocabulary == plain.spec.vocabulary
    ids = torch.tensor([3, 250])
    assert torch.equal(target.head_rows(ids), plain.head_rows(ids))
    assert torch.equal(target.embedding_rows(ids), plain.embedding_rows(ids))
    ours, theirs = target.layer(1), plain.layer(1)
    assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight), "drafters begin with these"


def test_a_drafter_of_another_precision_drafts_and_is_reported(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a drafter of the 16-bit weights that is refused for a file of them, or that loses in silence; and one of
    other weights of the same precision that is taken."""
    settings = {"layers": 1, "block": 3, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "taps": [0, 1]}
    made = load_drafter("dspark", target, mask_token=5, **settings)
    checkpoint.save(tmp_path / "ck", made.model, {"steps": 0})
    others = {"q8_0": gguf_models.model_of("llama"), "q4_1": gguf_models.model_of("llama, biased")}
    for kind, model in others.items():
        gguf_models.write(tmp_path / f"{kind}.gguf", model, kind.upper())
    served = load_target(tmp_path / "q8_0.gguf")
    drafter = load_drafter(tmp_path / "ck", served)
    assert "trained on q4_1, served on q8_0; the text stays this target's own" in caplog.text
    plain = generate(served, ["the other then"], None, max_new_tokens=12)[0].tokens
    assert generate(served, ["the other then"], drafter, max_new_tokens=12)[0].tokens == plain
    with pytest.raises(CheckpointError, match="weights_hash was"):
        load_drafter(tmp_path / "ck", load_target(tmp_path / "q4_1.gguf"))


def test_its_tokenizer_is_the_one_that_was_written(target: Any) -> None:
    """Catches ids that differ from the checkpoint's: another split, a special token that is cut, a lost template."""
    words = gguf_targets.tokenizer()
    for text in ("the other then", "<|user|>the<tool> 1234  x\n\n y", "naïve 日本", "<|end|>"):
        assert target.tokenizer.encode(text) == words.encode(text)
        assert target.decode(words.encode(text)) == words.decode(words.encode(text), skip_special_tokens=True)
    assert target.tokenizer.get_vocab() == words.get_vocab(), "rows of the head without a token are none"
    assert target.ends == {words.eos_token_id}


def test_an_unknown_split_leaves_a_target_of_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a vocabulary whose texts are split by another's pattern, which gives wrong ids without a sign."""
    path = gguf_models.write(
        tmp_path / "tiny.gguf", gguf_models.model_of("llama"),
        change=lambda keys, _: keys.update({"tokenizer.ggml.pre": "poro-chat"}),
    )  # fmt: skip
    found = gguf.load(str(path), [path])
    assert found.tokenizer is None and "splits texts as poro-chat" in found.why_none


# ── which files a name stands for ────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_a_split_and_a_file_without_ending_are_the_same_model(file: Path, tmp_path: Path) -> None:
    """Catches a folder whose first file is taken in silence, and a split that is read in part."""
    raw, folder = file.read_bytes(), tmp_path / "folder"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(raw)
    (folder / "mmproj-tiny.gguf").write_bytes(raw)
    assert gguf_model_of(str(folder)) == (folder / "tiny.gguf",)
    (folder / "other.gguf").write_bytes(raw)
    with pytest.raises(TargetError, match=r"has 2 GGUF models: other.gguf, tiny.gguf; name one"):
        load_target(folder)
    (folder / "sha256-abc").write_bytes(raw)
    assert gguf_model_of(str(folder / "sha256-abc")) == (folder / "sha256-abc",)
    with pytest.raises(TargetError, match=r"no such file: .*tiny-00001-of-00002.gguf"):
        load_target(folder / "tiny-00001-of-00002.gguf")
    (folder / "tiny-00001-of-00002.gguf").write_bytes(raw)
    with pytest.raises(TargetError, match=r"no such file: .*tiny-00002-of-00002.gguf; .* is one of 2 files"):
        load_target(folder / "tiny-00001-of-00002.gguf")


def gguf_model_of(name: str) -> Any:
    from outrider.targets.gguf.files import locate

    return locate(name)


def test_a_split_is_read_whole(tmp_path: Path) -> None:
    """Catches layers of the second file that are left random, and parts of two models side by side."""
    reference = gguf_models.model_of("llama")
    for number in range(2):

        def half(keys: dict[str, Any], tensors: dict[str, torch.Tensor], number: int = number) -> None:
            keys |= {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
            for name in [name for name in tensors if (("blk.1." in name) != (number == 1))]:
                del tensors[name]

        path = tmp_path / f"tiny-0000{number + 1}-of-00002.gguf"
        gguf_models.write(path, gguf_models.model_of("llama"), "Q8_0", change=half)
    gguf_models.write(tmp_path / "whole.gguf", gguf_models.model_of("llama"), "Q8_0", like=reference)
    parts = [tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert gguf_model_of(str(parts[1])) == tuple(parts)
    expected = logits(reference)
    assert (logits(gguf_model.build(gguf_model.GgufFiles(parts))) - expected).abs().max() <= rounding(expected)
    with pytest.raises(TargetError, match="says that it is number 1 of 2 files"):
        gguf.load("tiny", parts[::-1])
    with pytest.raises(TargetError, match="says that it is number 0 of 2 files"):
        gguf.load("tiny", parts[:1])


def test_a_file_of_the_hub_is_fetched_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches OWNER/NAME:FILE taken for a path that is missing."""
    import huggingface_hub

    asked: list[Any] = []

    def download(repository: str, name: str, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert gguf_model_of("owner/name:q4/tiny.gguf") == (file,) and asked == [("owner/name", "q4/tiny.gguf", None)]


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"device_map": "auto"},
                                     {"tensor_parallel": 2}, {"activations": "int4"}])  # fmt: skip
def test_options_that_do_not_go_with_blocks_are_refused(file: Path, options: dict[str, Any]) -> None:
    """Catches an option that is ignored in silence."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        load_target(file, **options)
    with pytest.raises(ConfigError, match="is for weights in blocks, and demo has none"):
        load_target("demo", activations="int8")


# ── without its weights ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plan_counts_the_bytes_of_its_blocks(file: Path) -> None:
    """Catches a plan for weights of two or four bytes, where five bits are read."""
    found, own = anatomy.anatomy(str(file)), gguf_model.GgufFiles([file])
    matrices = sum(info.size for info in own.tensors.values() if len(info.shape) > 1)
    assert found.weight.bytes == found.head_bytes == 20 / 32
    assert abs(found.weight_bytes - matrices) <= 0.01 * matrices


def test_it_is_exported_as_it_is(file: Path, tmp_path: Path) -> None:
    """Catches a file that is dequantised and written anew, larger and slower."""
    assert exported.is_model([file])
    exported.pass_on(str(file), [file], tmp_path / "out")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == file.read_bytes()
    with pytest.raises(ExportError, match="exists already"):
        exported.pass_on(str(file), [file], tmp_path / "out")
