"""Commands of engines: every flag is one that the engine has, what it can't do is refused by name."""

import ast
import itertools
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
import yaml
from tiny import make_folder
from verbs import outrider_with

from outrider import demo, drafters
from outrider.engines import commands, manifests
from outrider.engines.commands import command, draft_of
from outrider.engines.engine import ENGINES, Draft, Wish
from outrider.engines.export import export
from outrider.engines.tuning.tune import Range
from outrider.errors import ConfigError
from outrider.export import formats

VLLM_KEYS = {
    "enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size", "quantization",
    "moe_backend",
    "attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision",
    "index_share_for_mtp_iteration",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction", "use_heterogeneous_vocab",
    "prompt_lookup_max", "prompt_lookup_min", "parallel_drafting", "num_speculative_tokens_per_batch_size",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "draft_load_config", "rejection_sample_method", "synthetic_acceptance_rates",
    "synthetic_acceptance_length", "enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk",
}  # fmt: skip
"""Fields of vLLM 0.32's SpeculativeConfig, read off its source."""
SGLANG_FLAGS = {
    "speculative-algorithm", "speculative-draft-model-path", "speculative-num-steps", "speculative-eagle-topk",
    "speculative-num-draft-tokens", "speculative-dflash-block-size", "speculative-domino-candidate-pool-size",
    "speculative-dspark-block-size", "speculative-adaptive", "speculative-adaptive-config",
    "speculative-ngram-max-trie-depth", "speculative-ngram-external-corpus-path",
    "speculative-accept-threshold-single", "speculative-use-rejection-sampling",
}  # fmt: skip
"""Of SGLang 0.5.23, read off its source."""
SGLANG_OTHERS = {"model-path", "tp-size", "enable-metrics", "host", "port"}
LLAMACPP_FLAGS = {
    "metrics", "spec-default", "spec-draft-hf", "spec-draft-model", "spec-draft-n-max", "spec-draft-n-min",
    "spec-draft-p-min",
    "spec-draft-p-split", "spec-ngram-simple-size-m", "spec-ngram-simple-size-n", "spec-type", "host", "port",
}  # fmt: skip
"""Of llama.cpp 0c1e57098, read off its source."""
TRTLLM_KEYS = {
    "decoding_type", "max_draft_len", "speculative_model", "eagle3_layers_to_capture", "use_dynamic_tree",
    "dynamic_tree_max_topK", "max_total_draft_tokens", "max_matching_ngram_size", "mask_token_id", "target_layer_ids",
    "draft_len_schedule", "acceptance_rate_window_size", "acceptance_rate_threshold", "max_concurrency",
}  # fmt: skip
SCHEDULE = (Range(1, 8, 3), Range(9, 20, 1), Range(21, 512, 0))
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    "peagle": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
    "dflash": {"block_size": 8, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2]}},
}  # fmt: skip


def folder_of(place: Path, kind: str, format: str | None = "speculators", **config: Any) -> Path:
    """What `outrider export` leaves: outrider.json and config.json; without a format, a checkpoint."""
    folder = place / f"{kind}-{format}"
    folder.mkdir(exist_ok=True)
    manifest = {
        "version": 1, "kind": kind, "config": config or {"length": 4, "block": 7, "heads": 4}, "taps": [1, 2],
        "target": {"name": "org/target", "precision": "bfloat16"},
    }  # fmt: skip
    (folder / "outrider.json").write_text(json.dumps(manifest | ({} if format is None else {"format": format})))
    (folder / "config.json").write_text(json.dumps(CONFIGS.get(kind, {})))
    return folder


def draft(place: Path, kind: str, format: str | None) -> Draft:
    return draft_of(kind, "org/target") if format is None else draft_of(folder_of(place, kind, format))


def made(name: str, given: Draft, **wishes: Any) -> commands.Command:
    """A command; llama.cpp gets its target as GGUF, vLLM a version that still has Medusa."""
    given = given if name != "llamacpp" else Draft(given.kind, "target.gguf", given.folder, given.format, given.length)
    return command(name, given, Wish(**wishes), "0.32.0" if given.kind == "medusa" else None)


def unknown_to(name: str, found: commands.Command) -> set[str]:
    """Flags and keys of a command that its engine has not."""
    flags_ = {word[2:] for word in found.words if word.startswith("--")}
    if name in ("vllm", "triton"):
        return set(found.settings) - VLLM_KEYS
    if name == "sglang":
        return flags_ - SGLANG_FLAGS - SGLANG_OTHERS
    if name == "llamacpp":
        return flags_ - LLAMACPP_FLAGS
    if name == "trtllm":
        return set(yaml.safe_load(found.files["trtllm.yaml"])["speculative_config"]) - TRTLLM_KEYS
    ast.parse(found.files["generate.py"])
    return set()


@pytest.mark.parametrize("name", ENGINES)
def test_a_command_has_only_flags_that_its_engine_has(name: str, tmp_path: Path) -> None:
    """Catches a flag that is misspelt, or of another engine or year: the engine would end at once."""
    for kind, method in ENGINES[name].methods.items():
        wishes = [{}, {"tokens": 2}, {"tensor_parallel": 2} if name != "llamacpp" else {}, {"tokens": 0}]
        wishes += [{"schedule": SCHEDULE}] * method.varies + [{"width": 4}] * method.trees
        wishes += [{"cutoff": 0.3}] * method.cuts
        for wish in wishes:
            for format in method.formats or (None,):
                if wish == {"tokens": 0} and name == "transformers":
                    continue
                found = made(name, draft(tmp_path, kind, format), **wish)
                assert not found.settings if wish == {"tokens": 0} else not unknown_to(name, found)
                assert shlex.split(found.shell) == list(found.words) and "0.0.0.0" not in found.shell


@pytest.mark.parametrize(
    ("name", "kind", "format", "said"),
    [
        ("vllm", "medusa", "medusa", "only in versions before 0.33"), ("vllm", "domino", "sglang", "sglang runs it"),
        ("vllm", "eagle3", "sglang", "counted from 0 in sglang and from 1 in speculators"),
        ("sglang", "suffix", None, "use ngram"), ("sglang", "medusa", "medusa", "EAGLE-3"),
        ("trtllm", "peagle", "speculators", "vllm"),
        ("transformers", "eagle3", "speculators", "vllm, sglang, trtllm, llamacpp, triton can"),
        ("vllm", "specblock", "speculators", "DFlash"), ("sglang", "deer", "speculators", "outrider decode"),
        ("vllm", "small_model", "gguf", "export it --to transformers"),
    ],
)  # fmt: skip
def test_what_an_engine_can_not_do_is_refused_with_what_can(name, kind, format, said, tmp_path):
    """Catches a command that would end, or draft from the wrong layers, in the engine."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        command(name, draft(tmp_path, kind, format))


def test_a_wish_that_the_engine_can_not_fulfil_is_refused(tmp_path: Path) -> None:
    """Catches a setting that is dropped in silence, a block drafter asked for more than its block, a server that ends
    for want of a head, or that leaves the first drafted token of every block unread."""
    for wish, said in (
        (Wish(schedule=SCHEDULE), "can't change the draft length"), (Wish(width=4), "no trees"),
        (Wish(cutoff=0.5), "no cut-off"), (Wish(tokens=9), "one block of 7"), (Wish(tokens=-1), "must be at least 1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            command("sglang", draft(tmp_path, "dflash", "sglang"), wish)
    gated = replace(draft(tmp_path, "dspark", "speculators"), settings={"markov": "gated"})
    with pytest.raises(ConfigError, match="only with markov: vanilla, but this draft has gated"):
        command("vllm", gated)
    command("sglang", replace(gated, format="sglang"))
    held = lambda kind, **config: draft_of(folder_of(tmp_path, kind, "gguf", block=7, **config), "target.gguf")
    found = command("llamacpp", held("dspark", confidence=True), Wish(cutoff=0.3))
    assert found.settings["spec-draft-p-min"] == 0.3
    with pytest.raises(ConfigError, match="has no confidence head.*leave out --cutoff"):
        command("llamacpp", held("dspark", confidence=False), Wish(cutoff=0.3))
    for anchored, type in ((True, "draft-dspark"), (False, "draft-dflash")):
        assert command("llamacpp", held("dflash", anchor_predicts=anchored)).settings["spec-type"] == type


def test_a_checkpoint_is_refused_with_the_formats_to_export_first(tmp_path: Path) -> None:
    """Catches a folder that engines don't read, and advice that names no command."""
    with pytest.raises(ConfigError, match=r"outrider export .* --to speculators --out NEW` for vllm"):
        draft_of(folder_of(tmp_path, "eagle3", None))
    with pytest.raises(ConfigError, match="no engine runs deer"):
        draft_of(folder_of(tmp_path, "deer", None))
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match="name its kind and format with --kind"):
        draft_of(tmp_path / "bare", "org/target")
    with pytest.raises(ConfigError, match="no such folder"):
        draft_of(tmp_path / "none", "org/target")
    with pytest.raises(ConfigError, match="name it with --target"):
        draft_of("ngram")
    assert draft_of("ngram", "demo").target == str(demo.TARGET)


def test_known_bad_pairs_are_warned_of(tmp_path: Path) -> None:
    """Catches silence about a quantised target, a short draft, and layers that an engine would have to guess."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({"quantization_config": {"bits": 4}, "max_position_embeddings": 4096})
    )
    folder = folder_of(tmp_path, "eagle3")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    notes = " ".join(command("vllm", draft_of(folder, str(target)), Wish(tokens=9)).notes)
    for part in ("guess the layers", "is quantised", "2048 positions", "9 tokens per step are more than its own 4"):
        assert part in notes
    assert "guess" not in " ".join(command("vllm", draft_of(folder_of(tmp_path, "peagle"))).notes)


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "triton"])
def test_a_schedule_reaches_the_engine_and_its_longest_draft_is_what_it_allocates(name: str, tmp_path: Path) -> None:
    """Catches a table beside which the engine is started with a shorter draft, which it would clip to."""
    found = command(
        name, draft(tmp_path, "eagle3", ENGINES[name].methods["eagle3"].formats[0]), Wish(schedule=SCHEDULE)
    )
    if name in ("vllm", "triton"):
        assert found.settings["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 20, 1], [21, 512, 0]]
        assert found.settings["num_speculative_tokens"] == 3
    elif name == "sglang":
        assert found.settings["speculative-num-steps"] == 3
        assert json.loads(found.files["adaptive.json"])["9"] == {"candidate_steps": [1]}
    else:
        body = yaml.safe_load(found.files["trtllm.yaml"])["speculative_config"]
        assert body["draft_len_schedule"] == {8: 3, 20: 1} and body["max_draft_len"] == 3


def test_a_real_export_is_known_and_its_checkpoint_is_refused(home: Path, tmp_path: Path) -> None:
    """Catches a manifest whose keys are no longer those that export writes, a draft length that gets lost on the way,
    and a format named after an engine whose folders that engine's command refuses."""
    with pytest.raises(ConfigError, match="is a checkpoint"):
        draft_of(home / "checkpoint")
    found = draft_of(export(home / "checkpoint", "speculators", tmp_path / "there", str(home / "target")))
    own = json.loads((home / "checkpoint" / "outrider.json").read_text())
    assert (found.kind, found.format, found.target) == ("dflash", "speculators", str(home / "target"))
    assert (list(found.taps), found.length) == (own["taps"], own["config"]["block"])
    for name in ("vllm", "triton"):
        # what comes before it is said of every draft
        assert not made(name, found).notes[len((*ENGINES[name].notes, *ENGINES[name].methods["dflash"].notes)) :]
    for name in set(formats.names()) & ENGINES.keys():
        for kind, layout in formats.find(name).items():
            if layout.config is not None and not drafters.find(kind).__name__.startswith("outrider.lab."):
                assert name in ENGINES[name].methods[kind].formats, (name, kind)


@pytest.mark.parametrize("name", ["vllm", "trtllm", "llamacpp", "transformers"])
def test_a_draft_of_the_hub_is_named_by_its_id(name, tmp_path, monkeypatch, capsys):
    """Catches a path in the hub's cache in a command or a deployment, which means nothing on another machine."""
    kind = "small_model" if name == "transformers" else "eagle3"
    cache = folder_of(tmp_path, kind, ENGINES[name].methods[kind].formats[0])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda id: str(cache))
    target = "target.gguf" if name == "llamacpp" else "org/target"
    out, printed = tmp_path / "out", tmp_path / "printed.json"
    words = ("deploy", "org/draft", "--to", name, "--target", target, "--json", str(printed), "--out", str(out))
    assert outrider_with(*words) == 0
    said = json.loads(printed.read_text())
    written = {path.name: path.read_text() for path in out.rglob("*") if path.is_file()}
    everything = "".join([" ".join(capsys.readouterr().out.split()), printed.read_text(), *written.values()])
    assert str(cache) not in everything
    assert said["draft"] == "org/draft" and f"{kind} in org/draft" in everything
    if name == "llamacpp":  # it reads files only: they are downloaded first, and mounted
        assert said["before"] == "hf download org/draft --local-dir draft"
        assert ":/models/draft:ro" in written["compose.yaml"] and "draft/model.gguf" in said["command"]
    else:
        assert said["before"] is None and "/models/draft" not in everything
        assert "org/draft" in said["command"] + "".join(said["files"].values()) + "".join(written.values())


def test_a_draft_of_the_hub_beside_a_target_of_the_disk_is_fetched_by_the_container(tmp_path: Path) -> None:
    """Catches HF_HUB_OFFLINE in a container that has to fetch its draft."""
    target = tmp_path / "target"
    target.mkdir()
    held = draft_of(folder_of(tmp_path, "eagle3", "speculators"), str(target))
    for given, is_offline in ((held, True), (replace(held, hub_id="org/draft"), False)):
        files = manifests.files_of("vllm", given, Wish(), manifests.Place())
        assert ('HF_HUB_OFFLINE: "1"' in files["compose.yaml"]) == is_offline
        assert ("HF_HUB_OFFLINE" in files["kubernetes.yaml"]) == is_offline
        volumes = yaml.safe_load(files["compose.yaml"])["services"]["engine"]["volumes"]
        assert any(volume.startswith("hub:") for volume in volumes) != is_offline


def test_a_tree_is_never_larger_than_what_it_is_chosen_from(tmp_path: Path) -> None:
    """Catches a topk of more candidates than there are, at which SGLang stops."""
    for tokens, width in itertools.product(range(1, 9), range(2, 9)):
        found = command("sglang", draft(tmp_path, "eagle3", "sglang"), Wish(tokens=tokens, width=width)).settings
        assert found["speculative-num-draft-tokens"] - 1 <= width + (tokens - 1) * width**2


def test_a_folder_of_mtp_is_refused_by_every_engine_but_one_and_the_sentence_says_so(tmp_path: Path) -> None:
    """Catches advice to try another engine: vLLM 0.32 registers eagle3, peagle, dflash, dflash2 and dspark of
    speculators."""
    given = replace(draft(tmp_path, "mtp", "speculators"), target="target.gguf")
    for name in ENGINES:
        reads = "llama.cpp reads gguf for mtp; export it --to gguf"
        other = rf"llama.cpp loads mtp from a folder .*deploy mtp --to {name}"
        with pytest.raises(ConfigError, match=reads if name == "llamacpp" else other):
            command(name, given)
    found = command("llamacpp", replace(given, format="gguf"))
    assert found.words[:3] == ("llama-server", "-m", str(tmp_path / "mtp-speculators" / "model.gguf"))
    assert found.settings == {"spec-type": "draft-mtp", "spec-draft-n-max": 4}
    assert command("llamacpp", draft_of("mtp", "target.gguf")).words[2] == "target.gguf"


def test_a_version_is_asked_of_the_environment() -> None:
    """Catches a command for another version than the one installed, and 0.9 above 0.33."""
    versions = {"0.33.0rc1": (0, 33, 0), "v0.5.23": (0, 5, 23), "b9999": (9999,), "": ()}
    assert {text: commands.numbers(text) for text in versions} == versions
    assert commands.installed("transformers", sys.executable) == transformers.__version__
    with pytest.raises(ConfigError, match="has no vLLM"):
        commands.installed("vllm", sys.executable)
    with pytest.raises(ConfigError, match="can't be run"):
        commands.installed("sglang", "/no/such/python")


def test_the_script_for_transformers_decodes_what_the_target_alone_would(tmp_path, monkeypatch, capsys):
    """Catches a setting that generate() refuses: the script, with a draft and with n-grams, writes the same."""
    for seed, name in enumerate(("target", "small")):
        make_folder(tmp_path / name, seed, num_hidden_layers=1)
    small = Draft("small_model", str(tmp_path / "target"), tmp_path / "small", "transformers", 4)
    monkeypatch.setattr(sys, "argv", ["generate.py", "abcab"])
    texts = []
    for given, wish in ((small, Wish(tokens=0)), (small, Wish(cutoff=0.2)), (Draft("ngram", small.target), Wish())):
        exec(compile(command("transformers", given, wish).files["generate.py"], "generate.py", "exec"), {})
        texts.append(capsys.readouterr().out)
    assert texts[0].strip() and len(set(texts)) == 1


def test_print_gives_the_command_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches words in $(outrider deploy … --print) that a shell would run, and lines that are wrapped."""
    folder = folder_of(tmp_path, "dflash")
    assert outrider_with("deploy", str(folder), "--to", "vllm", "--print") == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert shlex.split(said) == list(command("vllm", draft_of(folder)).words)
