"""Formats of others: every key accounted for, read back as it was, and nothing that is damaged comes through."""

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_targets import fresh
from safetensors.torch import load_file, save_file
from tiny import make_folder
from transformers import LlamaConfig, Qwen3Config

from outrider import generate, load_target
from outrider.checkpoint import load_model, manifest_of
from outrider.drafters import find
from outrider.errors import ExportError
from outrider.export import formats
from outrider.export.reading import import_folder
from outrider.export.writing import export_folder
from outrider.formats import released
from outrider.loading import load_drafter
from outrider.weights import weights_of

LAYER = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
MASKED = {"mask_token": 5}
BLOCK = {**LAYER, **MASKED, "layers": 2, "block": 3, "taps": [0, 2]}
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("speculators", "eagle3"): {**LAYER, "taps": [0, 1, 3], "vocabulary": 40, "fc_norm": True, "qk_norm": True},
    ("speculators", "peagle"): {**LAYER, **MASKED, "layers": 2, "taps": [0, 2], "norm_before_residual": True},
    ("speculators", "dflash"): {**BLOCK, "anchor_predicts": False},
    ("speculators", "dspark"): {**BLOCK, "rank": 8, "markov": "gated"},
    ("speculators", "mtp"): {**LAYER, "native": False},
    ("sglang", "eagle3"): {**LAYER, "taps": [0, 1, 3], "vocabulary": 40},
    ("sglang", "dflash"): {**BLOCK, "anchor_predicts": False, "rope_theta": 1e6},
    ("sglang", "dspark"): {**BLOCK, "rank": 8, "confidence": True},
    ("sglang", "domino"): {**BLOCK, "rank": 8, "gru": 8, "anchor_predicts": False},
    ("speculators", "dflash2"): {**BLOCK, "rank": 8, "candidates": 4, "conv_group": 8, "window": 12},
    ("sglang", "dflash2"): {**BLOCK, "rank": 8, "candidates": 4, "conv_group": 4, "conv_taps": 3},
    ("deepspec", "eagle3"): {**LAYER, "taps": [0, 1, 2, 3], "qk_norm": True},
    ("deepspec", "dflash"): BLOCK,
    ("deepspec", "dspark"): {**BLOCK, "rank": 8, "markov": "rnn"},
    ("medusa", "medusa"): {"heads": 3, "nodes": 7},
    ("transformers", "small_model"): {
        "new": {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
    },
}
"""Every pair that goes both ways, with options that leave traces in the files."""


BOTH = {"embed_tokens.weight", "lm_head.weight"}
SELF_ATTENTION = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
NORMED = SELF_ATTENTION | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
REST = {f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
REST |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
DRAFT = {f"layers.{i}.{name}" for i in (0, 1) for name in NORMED | REST} | {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
}
PAIRS = {f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook")}
PAIRS |= {"candidate_selector.hidden_projection.weight"}
PAIRS |= {
    f"layers.{i}.{part}_conv.{name}"
    for i in (0, 1) for part in ("attention", "mlp") for name in ("base_kernel", "kernel_projection.weight")
}  # fmt: skip
MARKOV = {f"markov_head.markov_{name}.weight" for name in ("w1", "w2")}
MARKOV |= {f"confidence_head.proj.{name}" for name in ("weight", "bias")}
KEYS = {
    ("speculators", "eagle3"): {f"layers.0.{name}" for name in NORMED | REST | {"hidden_norm.weight"}}
    | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "fc_norm.0.weight", "fc_norm.1.weight",
    "fc_norm.2.weight"},
    ("speculators", "peagle"): {f"layers.0.{name}" for name in NORMED | REST | {"hidden_norm.weight"}}
    | {f"layers.1.{name}" for name in NORMED | REST} | {"fc.weight", "norm.weight", "lm_head.weight", "mask_hidden"},
    ("speculators", "dflash"): DRAFT,
    ("speculators", "dspark"): DRAFT | MARKOV | {"markov_head.gate_proj.weight", "markov_head.gate_proj.bias"},
    ("speculators", "mtp"): {f"mtp_layers.0.{name}" for name in SELF_ATTENTION | REST}
    | {f"mtp_layers.0.{name}.weight" for name in ("input_proj", "hidden_layernorm", "token_layernorm",
    "final_layernorm")},
    ("sglang", "eagle3"): {f"midlayer.{name}" for name in SELF_ATTENTION | REST | {"hidden_norm.weight"}}
    | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"},
    ("sglang", "dflash"): DRAFT,
    ("speculators", "dflash2"): DRAFT | PAIRS,
    ("sglang", "dflash2"): DRAFT | PAIRS,
    ("sglang", "dspark"): DRAFT | MARKOV,
    ("sglang", "domino"): DRAFT
    | {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"},
    ("deepspec", "eagle3"): {f"layers.0.{name}" for name in NORMED | REST | {"hidden_norm.weight"}}
    | {"fc.weight", "norm.weight"} | BOTH,
    ("deepspec", "dflash"): DRAFT | BOTH,
    ("deepspec", "dspark"): DRAFT | BOTH | MARKOV | {"markov_head.joint_proj.weight", "markov_head.joint_proj.bias"},
    ("medusa", "medusa"): {f"blocks.{k}.layers.0.{part}" for k in range(3) for part in ("weight", "bias")}
    | {f"lm_heads.{k}.weight" for k in range(3)},
}  # fmt: skip
"""The names that the formats' own readers look for, written out by hand."""


WHERE = {
    ("speculators", "eagle3"): (("eagle_aux_hidden_state_layer_ids",), 1),
    ("speculators", "peagle"): (("eagle_aux_hidden_state_layer_ids",), 1),
    ("speculators", "dflash"): (("aux_hidden_state_layer_ids",), 1),
    ("speculators", "dspark"): (("aux_hidden_state_layer_ids",), 1),
    ("sglang", "eagle3"): (("eagle_config", "eagle_aux_hidden_state_layer_ids"), 0),
    ("sglang", "dflash"): (("dflash_config", "target_layer_ids"), 0),
    ("speculators", "dflash2"): (("aux_hidden_state_layer_ids",), 1),
    ("sglang", "dflash2"): (("dflash_config", "target_layer_ids"), 0),
    ("sglang", "dspark"): (("target_layer_ids",), 0),
    ("sglang", "domino"): (("dflash_config", "target_layer_ids"), 0),
    ("deepspec", "eagle3"): (("target_layer_ids",), 0),
    ("deepspec", "dflash"): (("target_layer_ids",), 0),
    ("deepspec", "dspark"): (("target_layer_ids",), 0),
}


@pytest.fixture(scope="module")
def made(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A checkpoint with random weights, of the settings above."""
    place = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(format: str, kind: str) -> Path:
        path = place / f"{format}-{kind}"
        return path if path.exists() else fresh(kind, SETTINGS[format, kind], target, path)

    return checkpoint


@pytest.fixture
def sent(target: Any, made: Any, tmp_path: Path) -> Callable[..., Path]:
    """An export of it, as `there` in the test's folder."""

    def export(format: str, kind: str) -> Path:
        first = made(format, kind).with_name(f"{format}-{kind}-there")
        if not first.exists():
            export_folder(made(format, kind), format, first, target)
        return shutil.copytree(first, tmp_path / "there")

    return export


@pytest.mark.parametrize(("format", "kind"), SETTINGS)
def test_what_is_written_reads_back_as_it_was(format, kind, target, made, sent, tmp_path):
    """Catches a lost key, a setting that a format does not carry, a layer number that is shifted (off by one keeps 1
    token where 50 were), a prefix that an engine would skip in silence, and a reader that leans on outrider.json, which
    released drafts have not."""
    checkpoint, there = made(format, kind), sent(format, kind)
    if (format, kind) in KEYS:
        assert load_file(there / "model.safetensors").keys() == KEYS[format, kind]
    path, shift = WHERE.get((format, kind), ((), 0))
    layers = json.loads((there / "config.json").read_text())
    for key in path:
        layers = layers[key]
    assert not path or layers == [tap + shift for tap in SETTINGS[format, kind]["taps"]]
    import_folder(there, tmp_path / "back", target)
    before, after = load_model(checkpoint, target), load_model(tmp_path / "back", target)
    for key in ("config", "report"):
        assert manifest_of(tmp_path / "back")[key] == manifest_of(checkpoint)[key]
    old, new = weights_of(before), weights_of(after)
    assert before.taps == after.taps and old.keys() == new.keys()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    (there / "outrider.json").unlink()
    new = weights_of(import_folder(there, tmp_path / "bare", target, format))
    unmapped = {"accuracies", "confidence_head.temperatures", "confidence_head.shifts"}
    # a head that is the target's own in every copy is taken for one of Medusa's own
    own_heads = {name for name in new.keys() - old.keys() if kind == "medusa" and name.endswith(".1.weight")}
    assert old.keys() == new.keys() - own_heads and load_model(tmp_path / "bare", target).taps == before.taps
    assert [name for name in old.keys() - unmapped if not torch.equal(old[name], new[name])] == []


def test_a_draft_vocabulary_is_written_as_all_tokens(target, tmp_path, caplog):
    """Catches an engine that reads the rows of a reduced correction as those of other tokens."""
    few = fresh("dspark", SETTINGS["deepspec", "dspark"] | {"vocabulary": 20}, target, tmp_path / "few")
    import_folder(export_folder(few, "deepspec", tmp_path / "there", target), tmp_path / "back", target)
    assert "drafts 20 of the target's tokens" in caplog.text
    before, after = load_model(few, target), load_model(tmp_path / "back", target)
    ids, correction = before.reduced.ids, after.markov_head.markov_w2.weight
    assert after.reduced is None
    assert torch.equal(correction[ids], before.markov_head.markov_w2.weight)
    assert int(correction.any(1).sum()) == 20


@pytest.mark.parametrize(("kind", "scaling"), [("eagle3", None), ("dspark", {"rope_type": "linear", "factor": 2.0})])
def test_heads_that_turn_in_part_do_so_for_every_reader(kind, scaling, target, tmp_path):
    """Catches the commonest loss of all: transformers lets rope_scaling, even none, take the place of
    rope_parameters."""
    turned = {"partial_rotary_factor": 0.5, "rope_theta": 5e5, "rope_scaling": scaling}
    checkpoint = fresh(kind, SETTINGS["speculators", kind] | turned, target, tmp_path / "checkpoint")
    export_folder(checkpoint, "speculators", tmp_path / "there", target)
    import_folder(tmp_path / "there", tmp_path / "back", target)
    assert manifest_of(tmp_path / "back")["config"]["partial_rotary_factor"] == 0.5
    layers = json.loads((tmp_path / "there" / "config.json").read_text())["transformer_layer_config"]
    assert layers["partial_rotary_factor"] == 0.5  # vLLM's own classes look there alone
    given = {key: value for key, value in layers.items() if key != "model_type"}
    for theirs in (LlamaConfig, Qwen3Config):
        assert theirs(**given).rope_parameters["partial_rotary_factor"] == 0.5
        assert theirs(**given).rope_parameters["rope_theta"] == 5e5


UNSERVED = [
    ("sglang", "eagle3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 1"),
    *[("sglang", "domino", {"pure_prefix": prefix}, "pure_prefix: 1") for prefix in (0, 2)],
]


@pytest.mark.parametrize(("format", "kind", "change", "said"), UNSERVED)
def test_what_an_engine_would_compute_otherwise_is_not_written(format, kind, change, said, target, tmp_path):
    checkpoint = fresh(kind, SETTINGS[format, kind] | change, target, tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=said):
        export_folder(checkpoint, format, tmp_path / "there", target)
    assert not (tmp_path / "there").exists()


def test_a_folder_for_vllm_that_looks_like_the_authors_is_read_by_its_own_numbers(target, sent, tmp_path):
    """Catches taps that are guessed although they are there: the folder has EAGLE-3's architecture and no
    eagle_config."""
    there = sent("sglang", "eagle3")

    def numbered(config: dict[str, Any]) -> None:
        del config["eagle_config"]
        config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": True}

    model = import_folder(_changed(there, numbered), tmp_path / "back", target)
    assert (model.taps, model.config.norm_before_residual) == ((0, 1, 3), True)


def test_every_pair_that_goes_both_ways_is_tested():
    """Catches a new pair without its round trip."""
    # GGUF needs a tokenizer that llama.cpp can read: its pairs are in test_gguf_drafters.py; the lab's are in tests/lab
    both = {(name, kind) for name in formats.names() for kind, layout in formats.find(name).items()
            if name != "gguf" and layout.config is not None and layout.settings is not None}  # fmt: skip
    of_the_lab = {kind for _, kind in both if find(kind).__name__.startswith("outrider.lab.")}
    assert {(name, kind) for name, kind in both if kind not in of_the_lab} == set(SETTINGS)


def test_a_pair_that_there_is_not_is_refused_by_name(target, tmp_path):
    """Catches a pair that ends in a KeyError, or in a folder that no engine reads."""
    (tmp_path / "mine").mkdir()
    for format in formats.names():
        written = {kind for kind, layout in formats.find(format).items() if layout.config}
        for kind in {*(kind for _, kind in SETTINGS), "eagle", "ngram"} - written:
            checkpoint = {"version": 1, "kind": kind, "config": {}, "target": {}, "taps": []}
            (tmp_path / "mine" / "outrider.json").write_text(json.dumps(checkpoint))
            with pytest.raises(ExportError, match=f"^{kind} can't be written as {format}; kinds that can: ") as caught:
                export_folder(tmp_path / "mine", format, tmp_path / "there", target)
            assert set(str(caught.value).split("that can: ")[1].split(", ")) == (written or {"none"})
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


NOTED = [
    ("speculators", "mtp", {}, "no engine loads it"),
    ("speculators", "dspark", {}, "no parameters for a gated"),
    ("speculators", "dspark", {"markov": "vanilla"}, None),
    ("deepspec", "dspark", {}, "no parameters for a rnn"),
    ("sglang", "dspark", {"markov": "gated"}, None),
]


@pytest.mark.parametrize(("format", "kind", "change", "said"), NOTED)
def test_a_folder_that_an_engine_will_not_load_is_written_with_a_word(
    format, kind, change, said, target, tmp_path, caplog
):
    """Catches an export that succeeds and can't be served, of which the user learns from an engine's traceback."""
    checkpoint = fresh(kind, SETTINGS[format, kind] | change, target, tmp_path / "checkpoint")
    caplog.clear()
    export_folder(checkpoint, format, tmp_path / "there", target)
    notes = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [said in note for note in notes] == [True] if said else notes == []


def _changed(folder: Path, change: Callable[[dict[str, Any]], None], notes: bool = False) -> Path:
    """A folder from elsewhere, with another config.json; with notes, that of our own export with other notes."""
    path = folder / ("outrider.json" if notes else "config.json")
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    if not notes:
        (folder / "outrider.json").unlink(missing_ok=True)
    return folder


def _no_mask(config: dict[str, Any]) -> None:
    for place in (config, config.get("dflash_config", {})):
        if "mask_token_id" in place:
            place["mask_token_id"] = None


@pytest.mark.parametrize(
    ("format", "kind"),
    [("speculators", "peagle"), ("speculators", "dflash"), ("sglang", "domino"), ("deepspec", "dspark")],
)
def test_a_mask_that_is_nowhere_is_not_made_up(format, kind, target, sent, tmp_path):
    """Catches a mask of random numbers: the import succeeds, and twice gives two drafters."""
    there = _changed(sent(format, kind), _no_mask)
    with pytest.raises(ExportError, match="mask_token_id is missing, and .* has no mask token"):
        import_folder(there, tmp_path / "back", target, format)
    masked = copy.copy(target)
    masked.mask_token = 9
    assert import_folder(there, tmp_path / "back", masked, format).config.mask_token == 9


def test_weights_that_nothing_speaks_of_are_not_left_random(target, sent, tmp_path):
    """Catches a setting in our notes whose weights are in no file: learnt queries would be drawn anew in every
    import."""
    there = _changed(sent("sglang", "eagle3"), lambda notes: notes["config"].update(aggregate="metaquery"), notes=True)
    with pytest.raises(ExportError, match="no values for metaquery.* would stay random"):
        import_folder(there, tmp_path / "back", target)


def test_a_copy_that_was_trained_along_is_refused(folder, target, sent, tmp_path):
    """Catches an embedding that moved by little everywhere and is taken for the target's; and a comparison too strict
    for what is released: copies of 16 bits, a target that is itself rounded when loaded."""
    there = sent("deepspec", "dflash")
    for name, away in zip(sorted(BOTH), (0.009, 1e-5), strict=True):
        whole = load_file(there / "model.safetensors")
        _edit(lambda w, away=away, name=name: w.update({name: formats.borrowed(target, name) + away}))(there)
        with pytest.raises(ExportError, match=f"has its own .* in {name}, but Outrider uses the target's"):
            import_folder(there, tmp_path / "back", target)
        save_file(whole, there / "model.safetensors")
    for dtype, loaded in ((torch.bfloat16, "float32"), (torch.float16, "bfloat16")):
        _edit(lambda w, dtype=dtype: w.update({name: formats.borrowed(target, name).to(dtype) for name in BOTH}))(there)
        import_folder(there, tmp_path / f"{dtype}", load_target(folder, dtype=loaded))


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_an_embedding_that_was_trained_along_and_left_out_is_missed(kind, target, sent, tmp_path):
    """Catches a file without the embedding that its config says was trained; P-EAGLE's library trains it unless told
    not to."""
    there = sent("speculators", kind)
    _changed(there, lambda config: config.update(embed_requires_grad=True) if kind == "eagle3"
             else config.pop("embed_requires_grad"))  # fmt: skip
    with pytest.raises(ExportError, match="embedding was trained too"):
        import_folder(there, tmp_path / "back", target)
    _edit(lambda w: w.update({"embed_tokens.weight": formats.borrowed(target, "embed_tokens.weight")}))(there)
    import_folder(there, tmp_path / "back", target)


SILENT = {
    "sample_from_anchor": ("dspark", "anchor_predicts", True),
    "enable_confidence_head": ("dspark", "confidence", True),
    "norm_before_residual": ("eagle3", "norm_before_residual", False),
}


@pytest.mark.parametrize("key", SILENT)
def test_a_key_that_is_missing_means_what_the_formats_own_library_says(key, target, sent, tmp_path):
    """Catches a default of vLLM's reader taken for speculators': a block that is read one slot off."""
    kind, setting, value = SILENT[key]
    there = _changed(sent("speculators", kind), lambda config: config.pop(key) and None)
    model = import_folder(there, tmp_path / "back", target)
    assert getattr(model.config, setting) is value


def test_a_p_eagle_of_llamas_layers_is_refused_by_name(target, sent, tmp_path):
    """Catches norms of queries and keys that are missed without a word of why."""
    there = sent("speculators", "peagle")
    _changed(there, lambda config: config["transformer_layer_config"].update(model_type="llama"))
    with pytest.raises(ExportError, match="model_type 'llama'; Outrider's P-EAGLE has Qwen3"):
        import_folder(there, tmp_path / "back", target)


def _eagle(target: Any, place: Path, architecture: str, has_bias: bool, **said: Any) -> Path:
    """EAGLE-1 as it is released, beside the checkpoint that it is made from."""
    checkpoint = fresh("eagle", {**LAYER, "bias": has_bias}, target, place / "checkpoint")
    config = released.written(load_model(checkpoint, target).config, 1, target.spec, "llama") | said
    weights = load_file(checkpoint / "model.safetensors")
    weights["embed_tokens.weight"] = formats.borrowed(target, "embed_tokens.weight").half()
    formats.folders.write(place / "there", config | {"architectures": [architecture]}, weights)
    return place / "there"


@pytest.mark.parametrize(
    ("architecture", "bias", "said"),
    [
        ("LlamaForCausalLM", True, {}),
        ("LlamaForCausalLM", False, {"bias": False}),
        ("LlamaForCausalLMEagle", False, {}),
    ],
)
def test_eagle_is_read_as_its_authors_release_it(architecture, bias, said, target, tmp_path):
    """Catches EAGLE-1 taken for a plain Llama, a head without bias, which vLLM and most releases have, taken for torn,
    and a torn file read as a head without bias."""
    there = _eagle(target, tmp_path, architecture, bias, **said)
    model = import_folder(there, tmp_path / "back", target)
    assert (model.config.kind, model.config.bias) == ("eagle", bias)
    own = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert own.keys() == weights_of(model).keys()
    assert all(torch.equal(weight, own[name]) for name, weight in weights_of(model).items())
    assert generate(target, [[1, 2, 3]], load_drafter(tmp_path / "back", target), max_new_tokens=6)
    if not bias:
        _changed(there, lambda config: config.update(bias=True))
        with pytest.raises(ExportError, match="lacks the weights fc.bias"):
            import_folder(there, tmp_path / "torn", target)


def test_eagle3_without_numbers_reads_the_layers_that_its_authors_code_reads(tmp_path):
    """Catches layers one off, or of another target's depth: of 10 layers those are 1, 10 / 2 - 1 and 10 - 4."""
    deep = load_target(make_folder(tmp_path / "deep", num_hidden_layers=10))
    checkpoint = fresh("eagle3", {**LAYER, "taps": [1, 4, 6], "vocabulary": 40}, deep, tmp_path / "checkpoint")
    export_folder(checkpoint, "sglang", tmp_path / "there", deep)
    there = _changed(tmp_path / "there", lambda config: config.pop("eagle_config") and None)
    model, own = import_folder(there, tmp_path / "back", deep), load_model(checkpoint, deep)
    assert (model.config.kind, model.taps, model.config.qk_norm) == ("eagle3", (1, 4, 6), False)
    assert all(torch.equal(weight, weights_of(own)[name]) for name, weight in weights_of(model).items())


def test_zlabs_dflash_drafts_one_token_less_than_its_block_and_counts_layers_as_we_do(target, made, sent, tmp_path):
    """Catches vLLM's shift of layers laid over z-lab's numbers, and the anchor's slot taken for one that drafts."""
    settings = {"block_size": 4, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}}
    there = _changed(sent("sglang", "dflash"), lambda config: config.update(settings))
    model = import_folder(there, tmp_path / "back", target, "zlab", "dflash")
    own = load_model(made("sglang", "dflash"), target)
    assert (model.taps, model.config.block, model.config.anchor_predicts) == ((0, 2), 3, False)
    assert (model.config.mask_token, model.backbone.width) == (5, 4)
    assert all(torch.equal(weight, weights_of(own)[name]) for name, weight in weights_of(model).items())


LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"rope_parameters": PLAIN, "rope_scaling": LINEAR}, "rope_scaling is .*linear"),
    "type, none at the old place": ({"rope_parameters": {**PLAIN, **LINEAR}, "rope_scaling": None}, "rope_scaling is "
    "both None"),
    "factor": ({"rope_parameters": {**PLAIN, **LINEAR}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_scaling is"),
    "share": ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "rope_scaling": None}, "rotary_factor is "
    "both 1.0"),
    "share at the top": (
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25},
        "rotary_factor is both 0.25",
    ),
    "base": ({"rope_parameters": {**PLAIN, "rope_theta": 5e5}}, "rope_theta is both 1000000.0"),
}  # fmt: skip
AGREEING: dict[str, tuple[dict[str, Any], Any]] = {
    "new alone": ({"rope_parameters": {**PLAIN, **LINEAR}}, LINEAR),
    "old alone": ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4}}, LINEAR),
    "both": ({"rope_parameters": {**PLAIN, **LINEAR}, "rope_scaling": {"type": "linear", "factor": 4}}, LINEAR),
    "both, the new of the base alone": ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": LINEAR}, LINEAR),
    "none": ({"rope_parameters": PLAIN, "rope_scaling": None}, None),
}


def _turned(folder: Path, values: dict[str, Any]) -> Path:
    def change(config: dict[str, Any]) -> None:
        for key in ("rope_parameters", "rope_scaling", "partial_rotary_factor"):
            config.pop(key, None)
        config.update(values)

    return _changed(folder, change)


def test_a_config_that_turns_heads_in_two_ways_is_refused(target, sent, tmp_path):
    """Catches a draft that turns otherwise here than in the engine it was trained for: transformers lets the old key
    win; and a guard that keeps out what transformers itself has written in its versions."""
    there = sent("sglang", "dflash")
    for values, said in CONTRADICTIONS.values():
        with pytest.raises(ExportError, match=f"{said}.*contradicts itself"):
            import_folder(_turned(there, values), tmp_path / "back", target)
    for case, (values, scaling) in AGREEING.items():
        config = import_folder(_turned(there, values), tmp_path / case, target).config
        assert (config.rope_scaling, config.rope_theta, config.partial_rotary_factor) == (scaling, 1e6, 1.0), case


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    return edit


def test_a_draft_of_another_target_is_refused(sent, tmp_path):
    """Catches a folder of the right shape that belongs to other weights, and notes of another version."""
    other, there = load_target(make_folder(tmp_path / "other", seed=1)), sent("speculators", "eagle3")
    with pytest.raises(ExportError, match="weights_hash"):
        import_folder(there, tmp_path / "back", other)
    _changed(there, lambda notes: notes.update(version=99), notes=True)
    with pytest.raises(ExportError, match="is of version 99, but this Outrider reads 1"):
        import_folder(there, tmp_path / "back", other)


def test_what_reads_back_differently_is_not_kept(target, made, tmp_path, monkeypatch):
    """The planted fault: a writer that loses a bit of one weight is caught before the folder appears."""
    real = formats.folders.write

    def careless(folder, config, weights):
        real(folder, config, {name: w.clone().index_fill_(0, torch.tensor([0]), 0.5) if name == "norm.weight" else w
                              for name, w in weights.items()})  # fmt: skip

    monkeypatch.setattr(formats.folders, "write", careless)
    with pytest.raises(ExportError, match="reads back with different weights: backbone.norm.weight"):
        export_folder(made("deepspec", "dflash"), "deepspec", tmp_path / "there", target)
    assert not list(tmp_path.iterdir())
