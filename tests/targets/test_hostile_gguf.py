"""GGUF files that are cut, wrong or made to break a reader: one TargetError each, and no memory for what they claim."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf_models
import pytest

from outrider import load_target
from outrider.errors import TargetError
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf import reader

MUTATIONS = 200


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return gguf_models.write(path, gguf_models.model_of("llama"), "Q4_1").read_bytes()


def refused(path: Path) -> str:
    """What loading the file says; fails where it says nothing."""
    with pytest.raises(TargetError) as error:
        gguf.load(str(path), [path])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


# ── headers made by hand ─────────────────────────────────────────────────────────────────────────────────────────────


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], at: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)


def whole(keys: list[bytes], tensors: list[bytes], size: int = 4096, count: int | None = None) -> bytes:
    counts = (len(tensors) if count is None else count, len(keys))
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors) + bytes(size)


LLAMA = key(b"general.architecture", 8, text(b"llama"))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "another format": (b"GGML" + bytes(64), "not a GGUF file"),
    "a version to come": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "its version is 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "2^62 tensors": (whole([], [], count=2**62), "declares"),
    "0 x 2^63": (whole([LLAMA], [tensor(b"a", (2**63, 0))]), r"has shape \(0, 9223372036854775808\), in a"),
    "2^62 x 2^62": (whole([LLAMA], [tensor(b"a", (2**62, 2**62))]), "ends within a"),
    "no dimensions": (whole([LLAMA], [tensor(b"a", ())]), "0 dimensions"),
    "nine dimensions": (whole([LLAMA], [tensor(b"a", (1,) * 9)]), "9 dimensions"),
    "rows that are cut": (whole([LLAMA], [tensor(b"a", (33,), kind=8)]), "not a whole number of blocks"),
    "an offset that is not aligned": (whole([LLAMA], [tensor(b"a", (4,), 3)]), "begins at 3"),
    "an offset beyond the end": (whole([LLAMA], [tensor(b"a", (4,), 2**40)]), "ends within a"),
    "an offset that overflows": (whole([LLAMA], [tensor(b"a", (4,), 2**64 - 32)]), "ends within a"),
    "tensors over the same bytes": (
        whole([LLAMA], [tensor(b"a%d" % i, (512,)) for i in range(100)]), "a0 and a1 overlap"),
    "a tensor twice": (whole([LLAMA], [tensor(b"a", (4,)), tensor(b"a", (4,), 32)]), "a occurs twice"),
    "a key twice": (whole([LLAMA, LLAMA], []), "general.architecture occurs twice"),
    "an endless name": (whole([struct.pack("<Q", 2**63)], []), "a text declares"),
    "a name that is not UTF-8": (whole([key(b"\xff\xfe", 4, bytes(4))], []), "is not UTF-8"),
    "a name that clears the screen": (whole([LLAMA], [tensor(b"\x1b[2J" * 50, (4,), 1)]), r"\\x1b\[2J.*\.\.\. begins"),
    "an unknown type of value": (whole([key(b"a", 99, bytes(8))], []), "type 99, which is unknown, in a"),
    "an endless list": (whole([key(b"a", 9, struct.pack("<IQ", 0, 2**62))], []), "declares 4611686018427387904"),
    "an endless list of texts": (whole([key(b"a", 9, struct.pack("<IQ", 8, 2**61))], []), "declares"),
    "lists in lists": (whole([key(b"a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))], []), "a list holds lists"),
    "an alignment of 0": (whole([key(b"general.alignment", 4, bytes(4))], []), "general.alignment is 0"),
    "an alignment that is a text": (whole([key(b"general.alignment", 8, text(b"x"))], []), "general.alignment is x"),
    "no architecture": (whole([], []), "its architecture None is not supported"),
    "another architecture": (
        whole([key(b"general.architecture", 8, text(b"mamba\x1b"))], []), r"architecture mamba\\x1b is not supported"),
    "no sizes": (whole([LLAMA], []), "lacks the key llama.embedding_length"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_ends_in_one_sentence(case: str, tmp_path: Path) -> None:
    """Catches memory that is taken for what a header claims, a loop over it, and an error of Python's own."""
    data, said = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(TargetError, match=said):
            gguf.load(str(path), [path])
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_list_of_a_whole_file_is_refused(tmp_path: Path) -> None:
    """Catches a list of small numbers that takes eight times the file in memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole([key(b"a", 9, struct.pack("<IQ", 0, reader.MOST_VALUES + 1))], [], reader.MOST_VALUES + 1))
    assert f"more than {reader.MOST_VALUES} values" in refused(path)


# ── a whole file, changed ────────────────────────────────────────────────────────────────────────────────────────────


Change = Callable[[dict, dict], None]
CHANGED: dict[str, tuple[Change, str]] = {
    "more layers than weights": (lambda keys, _: keys.update({"llama.block_count": 2**30}), "is 1073741824"),
    "fewer layers": (lambda keys, _: keys.update({"llama.block_count": 1}), "weights of 2 layers"),
    "wide heads": (lambda keys, _: keys.update({"llama.attention.key_length": 2**20}), "keys of|differ in width"),
    "another width": (lambda keys, _: keys.update({"llama.feed_forward_length": 9}), "require blk.0.ffn_up.weight"),
    "many heads": (lambda keys, _: keys.update({"llama.attention.head_count": 3}), "can't share|require"),
    "no number": (lambda keys, _: keys.update({"llama.attention.layer_norm_rms_epsilon": float("nan")}), "not a fin"),
    "a number as text": (lambda keys, _: keys.update({"llama.context_length": "512"}), "not an integer above 0"),
    "a scaling to come": (lambda keys, _: keys.update({"llama.rope.scaling.type": "new"}), "rotary scaling is 'new'"),
    "experts": (lambda keys, _: keys.update({"llama.expert_count": 8}), "expert_count is 8, which is not supported"),
    "a soft cap": (lambda keys, _: keys.update({"llama.final_logit_softcapping": 30.0}), "not supported for this"),
    "a lost tensor": (lambda _, found: found.pop("blk.1.attn_v.weight"), "do not both have attn_v.weight"),
    "a lost norm": (lambda _, found: found.pop("output_norm.weight"), "lacks 1 of the model's weights"),
    "a tensor too many": (
        lambda _, found: found.update({"blk.0.x.weight": found["blk.0.attn_norm.weight"],
                                       "blk.1.x.weight": found["blk.0.attn_norm.weight"]}), "does not have"),
    "another shape": (
        lambda _, found: found.update({"blk.1.ffn_down.weight": found["blk.1.ffn_up.weight"]}), "require"),
    "no embedding": (lambda _, found: found.pop("token_embd.weight"), "has no token_embd.weight"),
    "divisors of another scaling": (
        lambda _, found: found.update({"rope_freqs.weight": found["output_norm.weight"][:16].abs() + 1}), "llama3's"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_a_model_that_is_no_llama_is_refused_by_name(case: str, tmp_path: Path) -> None:
    """Catches weights that stay random, a size that nothing checks, and a key that changes the function and is
    ignored."""
    change, said = CHANGED[case]
    model = gguf_models.model_of("llama")
    path = gguf_models.write(tmp_path / "model.gguf", model, "Q8_0", change=lambda keys, found: change(keys, found))
    with pytest.raises(TargetError, match=said):
        gguf.load(str(path), [path])


def test_a_type_that_is_not_multiplied_is_refused_with_its_tensor(good: bytes, tmp_path: Path) -> None:
    """Catches blocks of a type without a kernel that are read as another type's."""
    path, name = tmp_path / "model.gguf", b"blk.1.ffn_up.weight"
    at = good.index(name) + len(name) + 4 + 16
    path.write_bytes(good[:at] + struct.pack("<I", 16) + good[at + 4 :])  # IQ2_XXS, whose blocks are smaller
    assert "has blk.1.ffn_up.weight in IQ2_XXS, which is not supported; use F32, F16" in refused(path)
    path.write_bytes(good[:at] + struct.pack("<I", 200) + good[at + 4 :])
    assert "has blk.1.ffn_up.weight in type 200" in refused(path)


def test_a_file_is_cut_anywhere(good: bytes, tmp_path: Path) -> None:
    """Catches a download that ended early and loads with zeros."""
    path = tmp_path / "model.gguf"
    draw = random.Random(5)
    for size in (*range(1, 40), *(draw.randrange(len(good)) for _ in range(40)), len(good) - 1):
        path.write_bytes(good[:size])
        assert "can't be read" in refused(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a signal that kills the process, as reading a mapped file's lost pages does."""
    path = tmp_path / "model.gguf"
    path.write_bytes(good)
    read = reader.read_header

    def shrinking(path: Path) -> reader.Header:
        found = read(path)
        os.truncate(path, len(good) // 2)
        return found

    monkeypatch.setattr(reader, "read_header", shrinking)
    assert "became shorter" in refused(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_devices_and_folders_are_no_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Catches a reader that waits for ever for the other end of a pipe, or reads an endless device."""
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(TargetError):
        load_target(path)


def mutated(good: bytes, draw: random.Random) -> bytes:
    """The file with a few bytes changed, most of them in its header, or a piece cut out or doubled."""
    data, header = bytearray(good), 6000
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(24 if draw.random() < 0.2 else header)
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", draw.choice((0, 1, 8, 9, 10, 255, 2**31, 2**32 - 1)))
        elif kind == 3:
            del data[at : at + draw.randrange(1, 64)]
        else:
            data[at:at] = data[at : at + draw.randrange(1, 64)]
    return bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_load_or_end_in_one_sentence(seed: int, good: bytes, tmp_path: Path) -> None:
    """Catches any other exception, a hang, and memory beyond a few times the file.  By a seed: no false alarm."""
    path, draw = tmp_path / "model.gguf", random.Random(int(os.environ.get("OUTRIDER_TEST_SEED", "0")) * 4 + seed)
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS // 4):
            path.write_bytes(mutated(good, draw))
            with suppress(TargetError):
                gguf.load(str(path), [path])
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
