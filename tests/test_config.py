"""Configs: strict about keys, frozen, and every number in a YAML file is the number that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import PositiveFloat, PositiveInt, ValidationError

from outrider import config as configs
from outrider.config import ELSEWHERE, RENAMED, build
from outrider.data.config import Config as PrepareConfig
from outrider.drafters import find, kinds
from outrider.errors import ConfigError
from outrider.gate.policy import Policy as GatePolicy
from outrider.measure.config import Config as EvaluateConfig
from outrider.runs.file import RunConfig, TargetConfig, load
from outrider.training.config import Config as TrainConfig


class Inner(configs.Config):
    lr: PositiveFloat = 1e-3
    steps: PositiveInt = 10


class Outer(configs.Config):
    name: str = "x"
    inner: Inner = Inner()
    weights: dict[str, float] = {}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nmae": "y"}, "unknown key 'nmae'; did you mean 'name'?"),
        ({"inner": {"step": 3}}, "inner: unknown key 'step'; did you mean 'steps'?"),
        ({"zzzzz": 1}, "unknown key 'zzzzz'; known: inner, name, weights"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(values: dict, said: str) -> None:
    """Catches a typo that silently leaves the default in place."""
    with pytest.raises(ConfigError) as caught:
        configs.build(Outer, values)
    assert str(caught.value) == said


def test_a_wrong_value_is_named_by_its_path() -> None:
    """Catches an error that says what is wrong but not where."""
    with pytest.raises(ConfigError, match=r"^drafter\.inner\.steps: .*given: -1"):
        configs.build(Outer, {"inner": {"steps": -1}}, "drafter")


def test_all_wrong_values_are_said_at_once() -> None:
    """Catches a user who must run once per mistake."""
    with pytest.raises(ConfigError) as caught:
        configs.build(Outer, {"name": [], "inner": {"steps": 0, "lr": "x"}})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["name", "inner.lr", "inner.steps"]


def test_a_key_that_is_no_word_is_refused(tmp_path: Path) -> None:
    """Catches a TypeError for YAML 1.1's `on:`, which is the key True, or for a number as a key."""
    for text in ("on: 3\ntarget: demo\n", "1: 3\ntarget: demo\n", "target: demo\ndrafter: {kind: ngram, off: 1}\n"):
        with pytest.raises(ConfigError, match=r"unknown key|\[key\]"):
            load(write(tmp_path / "a.yaml", text))


def test_a_drafter_kind_that_is_no_word_is_refused(tmp_path: Path) -> None:
    """Catches a TypeError for `kind: 5` or `kind: [ngram]`."""
    for kind in ("5", "[ngram]", "{a: 1}"):
        with pytest.raises(ConfigError, match="drafter"):
            load(write(tmp_path / "a.yaml", f"target: demo\ndrafter: {{kind: {kind}}}\n"))


def test_a_config_is_frozen() -> None:
    """Catches a stage that changes its own settings after they were written down."""
    with pytest.raises(ValidationError, match="frozen"):
        Outer().name = "y"


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "3E-4", "0.0003", ".0003"])
def test_a_number_in_any_notation_is_that_number(text: str, tmp_path: Path) -> None:
    """Catches YAML 1.1's trap: 3e-4 without a dot is a string there."""
    path = write(tmp_path / "a.yaml", f"inner: {{lr: {text}}}\nweights: {{ce: {text}}}\n")
    found = configs.build(Outer, configs.read(path))
    assert (found.inner.lr, found.weights) == (3e-4, {"ce": 3e-4})
    assert configs.build(Outer, configs.override({}, [f"inner.lr={text}"])).inner.lr == 3e-4


def test_underscores_in_a_count_are_read() -> None:
    """Catches 10_000 becoming a string, as it is in YAML 1.2."""
    assert configs.build(Outer, configs.override({}, ["inner.steps=10_000"])).inner.steps == 10_000


def test_overrides_go_as_deep_as_their_path_and_leave_the_rest() -> None:
    """Catches an override that replaces its whole section, or changes the mapping it was laid over."""
    given = {"inner": {"lr": 1.0, "steps": 5}, "weights": {"ce": 1.0}}
    merged = configs.override(given, ["inner.steps=7", "weights.kl=2", "name=z", "new.deep.key=[1, 2]"])
    assert merged == {
        "inner": {"lr": 1.0, "steps": 7}, "weights": {"ce": 1.0, "kl": 2}, "name": "z", "new": {"deep": {"key": [1,
        2]}},
    }  # fmt: skip
    assert given == {"inner": {"lr": 1.0, "steps": 5}, "weights": {"ce": 1.0}}


def test_the_last_override_of_a_key_wins() -> None:
    """Catches an order that depends on anything but the command line."""
    assert configs.override({}, ["a=1", "a=2"]) == {"a": 2}


def test_a_section_that_a_resolved_file_writes_as_null_takes_settings() -> None:
    """Catches `outrider serve runs/NAME/config.yaml --port 8001`, refused where the run had no section `serve`."""
    given = {"serve": None, "name": "x"}
    assert configs.override(given, ["serve.port=8001"]) == {"serve": {"port": 8001}, "name": "x"}
    assert given["serve"] is None


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("inner.lr", "must be written key.path=value"), ("=3", "must be written key.path=value"),
        ("name.first=3", "'name' is 'x', not a section with keys"), ("name=[1", "is not YAML"),
    ],
)  # fmt: skip
def test_a_bad_override_is_refused(item: str, said: str) -> None:
    """Catches an override that is dropped or crashes."""
    with pytest.raises(ConfigError, match=f"override {item!r}".replace("[", r"\[")) as caught:
        configs.override({"name": "x"}, [item])
    assert said in str(caught.value)


def test_flattening_names_every_leaf_by_its_path() -> None:
    """Catches a nested or an empty mapping that vanishes from `outrider show`."""
    assert configs.flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}, "f": [3]}) == {
        "a.b": 1,
        "a.c.d": 2,
        "e": {},
        "f": [3],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [("- 1\n- 2\n", "not list"), ("", "not NoneType"), ("a: [1\n", "is not YAML"), ("just words", "not str")],
)
def test_a_file_that_is_no_mapping_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """Catches an AttributeError for an empty or a wrong file."""
    with pytest.raises(ConfigError, match=said):
        configs.read(write(tmp_path / "a.yaml", text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Catches an OSError or a UnicodeDecodeError that reaches the user."""
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match="can't read run file"):
            configs.read(path)


# ── a run file ────────────────────────────────────────────────────────────────────────────────────────────────────────

RUN = "target: demo\ndrafter: {kind: dspark, block: 5}\ntrain: {lr: 3e-4}\n"


def test_every_value_of_a_run_knows_its_origin(tmp_path: Path) -> None:
    """Catches `outrider show` claiming that an override came from the file, or a default from anywhere."""
    run, origins = load(write(tmp_path / "mine.yaml", RUN), ["train.steps=7", "drafter.rank=9"])
    values = configs.flatten(run.model_dump(mode="json"))
    assert origins.keys() == values.keys()
    assert {key for key, origin in origins.items() if origin == "override"} == {"train.steps", "drafter.rank"}
    assert {key for key, origin in origins.items() if origin == "file"} == {
        "target.name", "drafter.kind", "drafter.block", "train.lr",
    }  # fmt: skip
    assert (values["train.steps"], values["drafter.rank"], values["train.lr"], run.name) == (7, 9, 3e-4, "mine")


def test_the_resolved_run_is_a_run_file_that_resolves_to_itself(tmp_path: Path) -> None:
    """Catches a dump that loses `kind`, a tuple or a default, so that config.yaml can't be run again."""
    import yaml

    run, _ = load(write(tmp_path / "mine.yaml", RUN))
    again, origins = load(write(tmp_path / "again.yaml", yaml.safe_dump(run.model_dump(mode="json"))))
    assert again == run
    assert set(origins.values()) == {"file"}


def test_target_and_drafter_may_be_single_words(tmp_path: Path) -> None:
    """Catches the short form being lost when an override names a key below it."""
    run, _ = load(
        write(tmp_path / "a.yaml", "target: demo\ndrafter: ngram\n"), ["target.dtype=float64", "drafter.length=3"]
    )
    assert (run.target.name, run.target.dtype, run.drafter["kind"], run.drafter["length"]) == (
        "demo",
        "float64",
        "ngram",
        3,
    )
    assert isinstance(run, RunConfig)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drafter: ngram\n", "target: Field required"),
        ("target: demo\n", "drafter: Field required"),
        ("target: demo\ndrafter: {block: 3}\n", "kind is missing"),
        ("target: demo\ndrafter: dpsark\n", "unknown drafter 'dpsark'; did you mean 'dspark'"),
        ("target: demo\ndrafter: {kind: dspark, blok: 3}\n", "drafter: unknown key 'blok'; did you mean 'block'"),
        ("target: demo\ndrafter: ngram\ntrian: {}\n", "unknown key 'trian'; did you mean 'train'"),
        ("target: demo\ndrafter: ngram\ntrain: {step: 3}\n", "train: unknown key 'step'; did you mean 'steps'"),
        ("target: demo\ndrafter: ngram\nprepare: {count: 0}\n", "prepare.count: "),
        ("target: {name: demo, dtype: fp4}\ndrafter: ngram\n", "target.dtype: Input should be 'auto', "),
        (
            "target: demo\ndrafter: {kind: ngram, shortest: 5, longest: 3}\n",
            "drafter: shortest must be at most longest",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_said_before_anything_loads(text: str, said: str, tmp_path: Path) -> None:
    """Catches a mistake that is found only once the weights are there."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "a.yaml", text))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drafter: dspark\ntrain: {loss: {klt: 1}}\n", "did you mean 'kl'"),
        ("drafter: dspark\ntrain: {loss: {}}\n", "has no term"),
        ("drafter: ngram\ntrain: {}\n", "nothing to train"),
        ("drafter: dspark\ntrain: {calibrate: 200}\n", "add an `evaluate:` section"),
        ("drafter: eagle\ntrain: {calibrate: 200}\nevaluate: {}\n", "has none; use dspark"),
        (
            "drafter: dflash\ntrain: {select: 0.4, reference: runs/nowhere/checkpoint}\n",
            "train.reference runs/nowhere/checkpoint does not exist",
        ),
        ("drafter: ngram\nprepare: {top_p: 1.5}\n", "top_p"),
        ("drafter: ngram\nevaluate: {tasks: []}\n", "tasks"),
        ("drafter: ngram\nevaluate: {temperatures: []}\n", "temperatures"),
        ("drafter: ngram\nevaluate: {tasks: [gsm9k]}\n", "unknown task"),
        ("drafter: ngram\nevaluate: {baselines: [ngarm]}\n", "did you mean 'ngram'"),
        ("drafter: ngram\nevaluate: {baselines: [{kind: ngram, node: 4}]}\n", "did you mean 'nodes'"),
        ("drafter: ngram\nevaluate: {baselines: [{nodes: 4}]}\n", "evaluate.baselines: kind is missing"),
    ],
)
def test_what_only_a_later_stage_needs_is_checked_at_the_start_too(text: str, said: str, tmp_path: Path) -> None:
    """Catches `outrider run` that answers prompts for hours and then refuses its own train or evaluate section."""
    with pytest.raises((ConfigError, ValueError)) as caught:
        load(write(tmp_path / "a.yaml", "target: demo\n" + text))
    assert said in str(caught.value)


@pytest.mark.parametrize("place", ["runs", "runs/a", "answers"])
def test_a_file_where_a_folder_is_wanted_is_said_before_anything_loads(place: str, tmp_path: Path, monkeypatch) -> None:
    """Catches "File exists" after hours of work, and advice to make room."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.yaml", "target: demo\ndrafter: ngram\nprepare: {folder: answers/of/a}\n")
    load(path)
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).touch()
    with pytest.raises(ConfigError, match=f"^{place} is a file, but a folder is needed there"):
        load(path)


RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("**/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_that_ships_can_be_read(path: Path) -> None:
    """Catches a key that a method no longer has, and a paper's loss that is not there."""
    settings, _ = load(path, [])
    kind = settings.drafter["kind"]
    of_a_target = path.parent.name == "targets" and path.stem.endswith(f"-{kind}")
    assert of_a_target or path.stem in ("demo", f"demo-{kind}", kind)
    assert settings.drafter_config is not None
    assert settings.train is not None and settings.prepare.folder


def test_every_method_that_trains_has_a_recipe_for_the_demo_and_its_paper_s() -> None:
    """Catches a new method without recipes."""
    kinds = {
        of: {load(path, [])[0].drafter["kind"] for path in RECIPES if path.parent.name == of}
        for of in ("recipes", "paper")
    }
    assert kinds["recipes"] == kinds["paper"] and len(kinds["paper"]) == 17


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("evaluate: {tasks: gsm8k}", "evaluate.tasks", ["gsm8k"]),
        ("evaluate: {tasks: 'gsm8k, mt-bench'}", "evaluate.tasks", ["gsm8k", "mt-bench"]),
        ("evaluate: {temperatures: 0}", "evaluate.temperatures", [0.0]),
        ("evaluate: {temperatures: '0,1'}", "evaluate.temperatures", [0.0, 1.0]),
        ("evaluate: {baselines: ngram}", "evaluate.baselines", ["ngram"]),
        ("evaluate: {baselines: {kind: ngram, nodes: 8}}", "evaluate.baselines", [{"kind": "ngram", "nodes": 8}]),
        ("train: {loss: kl}", "train.loss.kl", 1.0), ("train: {steps: 1e4}", "train.steps", 10_000),
        ("train: {steps: 2.5e3}", "train.steps", 2500), ("train: {epochs: 2}", "train.epochs", 2.0),
        ("train: {epochs: 2}", "train.steps", None), ("prepare: {count: 1E3}", "prepare.count", 1000),
    ],
)  # fmt: skip
def test_what_is_meant_is_taken(text: str, key: str, value: object, tmp_path: Path) -> None:
    """Catches `tasks=gsm8k`, `loss=kl` and `steps=1e4` being refused, from a file and from an override."""
    base = "target: demo\ndrafter: dspark\n"
    run, _ = load(write(tmp_path / "a.yaml", base + text + "\n"))
    assert configs.flatten(run.model_dump(mode="json"))[key] == value
    section, _, rest = text.partition(": {")
    name, _, written = rest.removesuffix("}").partition(": ")
    again, _ = load(write(tmp_path / "b.yaml", base), [f"{section}.{name}={written}"])
    assert again.model_copy(update={"name": "a"}) == run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: demo\ndrafter: EAGLE3\n",
        "a.yaml, line 2: drafter.kind: unknown drafter 'EAGLE3'; did you mean 'eagle3'?"),
        ("target: demo\ndrafter: layer-skip\n", "did you mean 'layer_skip'?"),
        ("model: demo\ndrafter: ngram\n", "a.yaml, line 1: unknown key 'model'; it is called 'target' here"),
        (
            "target: demo\ndrafter: dspark\ntrain:\n  lr: 1\n  learning_rate: 2\n",
            "line 5: train: unknown key 'learning_rate'; it is called 'lr' here",
        ),
        ("target: demo\ndrafter: dspark\ntrain: {per_device_batch: 2}\n", "it is called 'batch' here"),
        ("target: demo\ndrafter: dspark\ntrain: {num_train_epochs: 2}\n", "it is called 'epochs' here"),
        ("target: demo\ndrafter: dspark\ntrain: {max_length: 2}\n", "it is called 'prepare.length' here"),
        ("target: demo\ndrafter: ngram\nlearning_rate: 1e-4\n", "it is called 'train.lr' here"),
        ("target: demo\ndrafter: {kind: dspark, num_hidden_layers: 2}\n", "it is called 'layers' here"),
        ("target: demo\ndrafter: {kind: eagle3, num_speculative_tokens: 2}\n", "it is called 'length' here"),
        ("target: demo\ndrafter: {kind: dspark, num_speculative_tokens: 2}\n", "it is called 'block' here"),
        ("target: demo\ndrafter: ngram\nevaluate: {temperature: 0}\n", "it is called 'temperatures' here"),
        ("target: demo\ndrafter: dspark\ntrain:\n  clip: 1\n  steps: -3\n", "a.yaml, line 5: train.steps: "),
        ("target: demo\ndrafter: dspark\ntrain:\n  loss:\n    klt: 1\n",
        "a.yaml, line 4: train.loss: unknown loss 'klt'"),
        ("target: demo\ndrafter: dspark\ntrain: {steps: 2, epochs: 2}\n", "leave one out"),
        ("target: demo\ndrafter:\n  kind: ngram\n bad: 1\n", "a.yaml, line 4, column 2, is not YAML: "),
        ("target: demo\ndrafter: ngram\ntarget: other\n", "a.yaml, line 3: target is set twice, in line 1 too"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_value_is_an_error_with_its_line_and_the_right_name(
    text: str, said: str, tmp_path: Path
) -> None:
    """Catches an error that only lists what is known, and one without a line."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "a.yaml", text))
    assert said in str(caught.value)


def test_an_override_that_is_wrong_is_not_blamed_on_a_line_of_the_file(tmp_path: Path) -> None:
    """Catches the line of a setting that is right in the file and wrong on the command line."""
    path = write(tmp_path / "a.yaml", "target: demo\ndrafter: dspark\ntrain: {steps: 3}\n")
    with pytest.raises(ConfigError, match=r"^train\.steps: "):
        load(path, ["train.steps=-1"])


def test_what_others_call_a_setting_is_a_setting_here() -> None:
    """Catches an advice to use a setting that there is not."""
    sections: dict[str, type[configs.Config]] = {
        "": RunConfig, "prepare": PrepareConfig, "train": TrainConfig, "evaluate": EvaluateConfig,
        "target": TargetConfig,
    }  # fmt: skip
    every = {field for kind in kinds() for field in find(kind).Config.model_fields}
    for path in ELSEWHERE:
        section, _, name = path.rpartition(".")
        assert name in (every if section == "drafter" else sections[section].model_fields), path


@pytest.mark.parametrize(("before", "now"), RENAMED.items())
def test_a_setting_of_old_is_an_error_that_gives_the_new_name(before: str, now: str) -> None:
    """Catches an old name that is still taken, and a hint at a setting that is gone."""
    every = [find(kind).Config for kind in kinds()] + [PrepareConfig, EvaluateConfig, GatePolicy]
    takes = [config for config in every if now in config.model_fields]
    assert takes and not any(before in config.model_fields for config in every)
    with pytest.raises(ConfigError, match=f"unknown key '{before}'; it is called '{now}' now"):
        build(takes[0], {before: 1})
