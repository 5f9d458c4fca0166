"""Targets whose weights are on a server: answered, kept and trained for without loading them here."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from serve.running import running
from tiny import DRAFTER, make_folder, write_run_file

import outrider
from data.answering import serving
from data.test_engine_states import Server
from outrider.data.answers.store import ANSWERS, MANIFEST, read_answers
from outrider.data.features.engine_states import engine_layers
from outrider.errors import TargetError
from outrider.runs import features, stages
from outrider.runs.forecast.checks import check
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.remote import served
from outrider.targets.remote.served import load_served


@pytest.fixture
def hollow(folder: Path, tmp_path: Path) -> Path:
    """The tiny target's config and tokenizer without its weights, under the same name as with them."""
    place = tmp_path / "hollow"
    shutil.copytree(folder, place, ignore=shutil.ignore_patterns("*.safetensors"))
    return place


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def target_in(answers: Path) -> dict[str, Any]:
    """The target that answers belong to."""
    found: dict[str, Any] = json.loads((answers / MANIFEST).read_text())["target"]
    return found


def no_weights(*_: Any, **__: Any) -> None:
    pytest.fail("weights were loaded")


def test_a_served_target_is_the_loaded_one(folder: Path) -> None:
    """Catches a shape, an end, a type or a hash that differs: its answers would be refused as another target's."""
    mine, whole = load_served(str(folder)), load_target(folder)
    assert mine.spec == whole.spec and mine.ends == whole.ends and mine.parameters == whole.parameters
    tokens = torch.tensor([3, 77, 200])
    words = whole.embed(tokens)
    for name, given in (("embed", tokens), ("head", words), ("finish", words), ("head_rows", tokens)):
        assert torch.equal(getattr(mine, name)(given), getattr(whole, name)(given)), name
    assert mine.decode([72, 73]) == whole.decode([72, 73]) and mine.encode("ab") == whole.encode("ab")


def test_the_hash_of_files_is_that_of_the_loaded_weights(tmp_path: Path) -> None:
    """Catches weights of one name that are shared under another, shards, and a changed value that is not seen."""
    place = make_folder(tmp_path / "target", tie_word_embeddings=True)
    whole = load_target(place).spec.weights_hash
    assert load_served(str(place)).spec.weights_hash == whole
    weights = load_file(place / "model.safetensors")
    parts = {f"model-{i}.safetensors": {name: weights[name] for name in sorted(weights)[i::2]} for i in range(2)}
    for name, part in parts.items():
        save_file(part, place / name, {"format": "pt"})
    index = {"weight_map": {weight: name for name, part in parts.items() for weight in part}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "model.safetensors").unlink()
    assert load_served(str(place)).spec.weights_hash == whole
    parts["model-1.safetensors"][next(iter(parts["model-1.safetensors"]))].view(-1)[5] += 1
    save_file(parts["model-1.safetensors"], place / "model-1.safetensors", {"format": "pt"})
    assert load_served(str(place)).spec.weights_hash not in (whole, "")
    (place / "model-1.safetensors").unlink()
    assert load_served(str(place)).spec.weights_hash == ""


def test_a_folder_without_weights_is_prepared_by_a_server(hollow, talker, folder, tmp_path, monkeypatch) -> None:
    """Catches weights that are loaded for the sake of their hash, answers that depend on them."""
    monkeypatch.setattr(stages, "load_target", no_weights)
    for name, place in (("without", hollow), ("with", folder)):
        file = write_run_file(tmp_path / f"{name}.yaml", place, evaluate=None)
        with running(talker) as there:
            outrider.run(file, [f'prepare.servers=["{there.url}"]'], stages=["prepare"])
    found, known = (tmp_path / "runs" / name / "answers" for name in ("without", "with"))
    texts = [[(one.id, one.tokens, one.learn) for one in read_answers(place / ANSWERS)] for place in (found, known)]
    assert texts[0] == texts[1] and len(texts[0]) == 6
    assert target_in(found)["weights_hash"] == "" and target_in(known)["weights_hash"] == talker.spec.weights_hash
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    file = write_run_file(tmp_path / "trains.yaml", folder, evaluate=None)
    for place in (found, known):
        outrider.run(file, [f"prepare.folder={place}", f"name=trained-{place.parent.name}"], stages=["train"])
    assert (tmp_path / "runs/trained-without/checkpoint/outrider.json").exists()


@pytest.mark.parametrize(
    ("overrides", "chosen", "why"),
    [
        ([], ["prepare"], "prepare.servers is empty, so the target answers here"),
        (['prepare.servers=["http://x"]', "prepare.features=cached"], ["prepare"], "prepare.features: cached reads"),
        (["prepare.features=live"], ["train"], "prepare.features: live reads the texts with the target here"),
    ],
)
def test_what_needs_weights_says_so(overrides, chosen, why, hollow, tmp_path) -> None:
    """Catches a file name of transformers as the answer to a folder without weights."""
    settings, _ = stages.load(write_run_file(tmp_path / "run.yaml", hollow, evaluate=None), overrides)
    with pytest.raises(TargetError, match=f"{hollow} holds no weights, but {why}"):
        check(settings, chosen)


def test_an_engine_needs_the_ends_alone(folder, hollow, tmp_path, monkeypatch) -> None:
    """Catches a target that is loaded whole for its final norm, and a missing norm that is told as something else."""
    short: list[int] = []
    original = TransformersTarget.__init__

    def watched(self: Any, model: Any, *given: Any, **named: Any) -> None:
        short.append(model.config.num_hidden_layers)
        original(self, model, *given, **named)

    monkeypatch.setattr(TransformersTarget, "__init__", watched)
    load_served(str(folder)).finish(torch.zeros(2, 32))
    assert short == [1]
    with pytest.raises(TargetError, match="an engine's states need the embedding, the final norm and the output"):
        load_served(str(hollow)).finish(torch.zeros(2, 32))
    with pytest.raises(TargetError, match="whose weights are not loaded here"):
        load_served(str(hollow)).read(torch.zeros(1, 2), (1,))


def test_a_drafter_learns_from_an_engine_without_the_targets_layers(talker, folder, tmp_path, monkeypatch):
    """Catches weights that are loaded by prepare or train, and a checkpoint that the loaded target refuses."""
    monkeypatch.setattr(served, "hash_stored", lambda *_: "")
    files = tmp_path / "files"
    files.mkdir()
    engine = Server(talker, files, engine_layers((1,), talker.spec.layers))
    patched = functools.partial(features.EngineStates, transport=engine.transport)
    monkeypatch.setattr(features, "EngineStates", patched)
    monkeypatch.setattr(stages, "load_target", no_weights)
    file = write_run_file(tmp_path / "run.yaml", folder, drafter={**DRAFTER, "taps": [1]})
    with serving(talker) as stub:
        given = [
            f'prepare.servers=["{stub.url}"]', "prepare.features=engine", "prepare.feature_server=http://engine",
            "prepare.recheck_every=1",
        ]  # fmt: skip
        for stage in ("prepare", "train"):
            outrider.run(file, given, stages=[stage])  # type: ignore[list-item]
    assert engine.bodies and not list(files.iterdir())
    text = read_answers(tmp_path / "runs/run/answers" / ANSWERS)[0]
    drafter = outrider.load_drafter(tmp_path / "runs/run/checkpoint", load_target(folder))
    (found,) = outrider.generate(talker, [text.tokens[:4]], drafter, max_new_tokens=8)
    (plain,) = outrider.generate(talker, [text.tokens[:4]], max_new_tokens=8)
    assert found.tokens == plain.tokens
