"""Configs: strict about keys, frozen, and every number in a YAML file is the number that was meant."""

from pathlib import Path

import pytest
import yaml
from pydantic import PositiveFloat, PositiveInt, ValidationError

from outrider import config as configs
from outrider.config import RENAMED, build
from outrider.data.config import Config as PrepareConfig
from outrider.drafters import find, kinds
from outrider.errors import ConfigError
from outrider.gate.policy import Policy as GatePolicy
from outrider.measure.config import Config as EvaluateConfig
from outrider.runs.file import load


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


def test_all_wrong_values_are_said_at_once_by_their_paths() -> None:
    """Catches a user who must run once per mistake, and an error that says what is wrong but not where."""
    with pytest.raises(ConfigError) as caught:
        configs.build(Outer, {"name": [], "inner": {"steps": -1, "lr": "x"}}, "drafter")
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["drafter.name", "drafter.inner.lr", "drafter.inner.steps"]
    assert "given: -1" in lines[2]


UNREADABLE = [
        ("on: 3\ntarget: demo\n", r"unknown key|\[key\]"), ("1: 3\ntarget: demo\n", r"unknown key|\[key\]"),
        ("target: demo\ndrafter: {kind: ngram, off: 1}\n", r"unknown key|\[key\]"),
        ("target: demo\ndrafter: {kind: 5}\n", "drafter"), ("target: demo\ndrafter: {kind: [ngram]}\n", "drafter"),
        ("- 1\n- 2\n", "not list"), ("", "not NoneType"), ("a: [1\n", "is not YAML"), (b"name: \xff\xfe", "can't read"),
]  # fmt: skip


def test_a_file_that_is_no_mapping_of_words_is_refused(tmp_path: Path) -> None:
    """Catches a TypeError for YAML 1.1's `on:`, which is the key True, and for a number as a key or a kind."""
    path = tmp_path / "a.yaml"
    for text, said in UNREADABLE:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError, match=said):
            load(path)
    for unreadable in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="can't read run file"):
            configs.read(unreadable)


@pytest.mark.parametrize("text", ["3e-4", ".0003"])
def test_a_number_in_any_notation_is_that_number(text: str, tmp_path: Path) -> None:
    """Catches YAML 1.1's trap: 3e-4 without a dot is a string there."""
    path = write(tmp_path / "a.yaml", f"inner: {{lr: {text}}}\nweights: {{ce: {text}}}\n")
    found = configs.build(Outer, configs.read(path))
    assert (found.inner.lr, found.weights) == (3e-4, {"ce": 3e-4})
    assert configs.build(Outer, configs.override({}, [f"inner.lr={text}"])).inner.lr == 3e-4


def test_overrides_go_as_deep_as_their_path_and_leave_the_rest() -> None:
    """Catches an override that replaces its whole section, changes the mapping it was laid over."""
    given = {"inner": {"lr": 1.0, "steps": 5}, "weights": {"ce": 1.0}, "serve": None}
    items = ["inner.steps=1", "inner.steps=10_000", "weights.kl=2", "name=z", "new.deep.key=[1, 2]", "serve.port=8001"]
    assert configs.override(given, items) == {
        "inner": {"lr": 1.0, "steps": 10_000}, "weights": {"ce": 1.0, "kl": 2}, "name": "z",
        "new": {"deep": {"key": [1, 2]}}, "serve": {"port": 8001},
    }  # fmt: skip
    assert given == {"inner": {"lr": 1.0, "steps": 5}, "weights": {"ce": 1.0}, "serve": None}


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
    flattened = configs.flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}, "f": [3]})
    assert flattened == {"a.b": 1, "a.c.d": 2, "e": {}, "f": [3]}


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
    run, _ = load(write(tmp_path / "mine.yaml", RUN))
    again, origins = load(write(tmp_path / "again.yaml", yaml.safe_dump(run.model_dump(mode="json"))))
    assert again == run
    assert set(origins.values()) == {"file"}
    with pytest.raises(ValidationError, match="frozen"):
        run.name = "y"


def test_target_and_drafter_may_be_single_words(tmp_path: Path) -> None:
    """Catches the short form being lost when an override names a key below it."""
    path = write(tmp_path / "a.yaml", "target: demo\ndrafter: ngram\n")
    run, _ = load(path, ["target.dtype=float64", "drafter.length=3"])
    assert (run.target.name, run.target.dtype) == ("demo", "float64")
    assert (run.drafter["kind"], run.drafter["length"]) == ("ngram", 3)


NGRAM, DSPARK = "target: demo\ndrafter: ngram\n", "target: demo\ndrafter: dspark\n"
WRONG = [
    ("drafter: ngram\n", "target: Field required"), ("target: demo\n", "drafter: Field required"),
    ("target: demo\ndrafter: {block: 3}\n", "kind is missing"),
    ("target: demo\ndrafter: {kind: dspark, blok: 3}\n", "drafter: unknown key 'blok'; did you mean 'block'"),
    (NGRAM + "prepare: {count: 0}\n", "prepare.count: "),
    ("target: {name: demo, dtype: fp4}\ndrafter: ngram\n", "target.dtype: Input should be 'auto', "),
    ("target: demo\ndrafter: {kind: ngram, shortest: 5, longest: 3}\n", "drafter: shortest must be at most longest"),
    # what only a later stage needs, which must not be refused after hours of answers
    (DSPARK + "train: {loss: {}}\n", "has no term"), (NGRAM + "train: {}\n", "nothing to train"),
    (DSPARK + "train: {calibrate: 200}\n", "add an `evaluate:` section"),
    ("target: demo\ndrafter: eagle\ntrain: {calibrate: 200}\nevaluate: {}\n", "has none; use dspark"),
    ("target: demo\ndrafter: dflash\ntrain: {select: 0.4, reference: runs/nowhere/checkpoint}\n",
     "train.reference runs/nowhere/checkpoint does not exist"),
    (NGRAM + "prepare: {top_p: 1.5}\n", "top_p"), (NGRAM + "evaluate: {tasks: []}\n", "tasks"),
    (NGRAM + "evaluate: {tasks: [gsm9k]}\n", "unknown task"),
    (NGRAM + "evaluate: {baselines: [ngarm]}\n", "did you mean 'ngram'"),
    (NGRAM + "evaluate: {baselines: [{kind: ngram, node: 4}]}\n", "did you mean 'nodes'"),
    (NGRAM + "evaluate: {baselines: [{nodes: 4}]}\n", "evaluate.baselines: kind is missing"),
    # with the line, and the right name
    ("target: demo\ndrafter: EAGLE3\n", "a.yaml, line 2: drafter.kind: unknown drafter 'EAGLE3'; did you mean"),
    ("model: demo\ndrafter: ngram\n", "a.yaml, line 1: unknown key 'model'; it is called 'target' here"),
    (DSPARK + "train:\n  lr: 1\n  learning_rate: 2\n",
     "line 5: train: unknown key 'learning_rate'; it is called 'lr' here"),
    (DSPARK + "train: {max_length: 2}\n", "it is called 'prepare.length' here"),
    (NGRAM + "learning_rate: 1e-4\n", "it is called 'train.lr' here"),
    ("target: demo\ndrafter: {kind: eagle3, num_speculative_tokens: 2}\n", "it is called 'length' here"),
    ("target: demo\ndrafter: {kind: dspark, num_speculative_tokens: 2}\n", "it is called 'block' here"),
    (DSPARK + "train:\n  clip: 1\n  steps: -3\n", "a.yaml, line 5: train.steps: "),
    (DSPARK + "train:\n  loss:\n    klt: 1\n", "a.yaml, line 4: train.loss: unknown loss 'klt'; did you mean 'kl'"),
    (DSPARK + "train: {steps: 2, epochs: 2}\n", "leave one out"),
    ("target: demo\ndrafter:\n  kind: ngram\n bad: 1\n", "a.yaml, line 4, column 2, is not YAML: "),
    (NGRAM + "target: other\n", "a.yaml, line 3: target is set twice, first in line 1"),
]  # fmt: skip


def test_what_is_wrong_with_a_run_is_said_before_anything_loads(tmp_path: Path) -> None:
    """Catches a mistake that is found only once the weights are there, or at a later stage."""
    for text, said in WRONG:
        with pytest.raises((ConfigError, ValueError)) as caught:
            load(write(tmp_path / "a.yaml", text))
        assert said in str(caught.value)


@pytest.mark.parametrize("place", ["runs", "answers"])
def test_a_file_where_a_folder_is_wanted_is_said_before_anything_loads(place: str, tmp_path: Path, monkeypatch) -> None:
    """Catches "File exists" after hours of work, and advice to make room."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "a.yaml", "target: demo\ndrafter: ngram\nprepare: {folder: answers/of/a}\n")
    load(path)
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).touch()
    with pytest.raises(ConfigError, match=f"^{place} is a file, but must be a folder"):
        load(path)


ROOT = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(ROOT.glob("**/*.yaml"))


def test_every_recipe_that_ships_can_be_read() -> None:
    """Catches a key that a method no longer has, a paper's loss that is not there, a new method without recipes."""
    kinds: dict[str, set[str]] = {}
    for path in RECIPES:
        settings, _ = load(path, [])
        kind = settings.drafter["kind"]
        kinds.setdefault("paper" if "paper" in str(path.relative_to(ROOT)) else path.parent.name, set()).add(kind)
        of_a_target = path.parent.name == "targets" and path.stem.endswith(f"-{kind}")
        assert of_a_target or path.stem in ("demo", "smollm2", f"demo-{kind}", f"paper-{kind}", kind)
        assert settings.drafter_config is not None
        assert settings.train is not None and settings.prepare.folder
    assert kinds["recipes"] | kinds["lab"] == kinds["paper"] and len(kinds["paper"]) == 20
    assert not kinds["recipes"] & kinds["lab"]


MEANT = [
        ("evaluate: {tasks: 'gsm8k, mt-bench'}", "evaluate.tasks", ["gsm8k", "mt-bench"]),
        ("evaluate: {temperatures: 0}", "evaluate.temperatures", [0.0]),
        ("evaluate: {temperatures: '0,1'}", "evaluate.temperatures", [0.0, 1.0]),
        ("evaluate: {baselines: ngram}", "evaluate.baselines", ["ngram"]),
        ("evaluate: {baselines: {kind: ngram, nodes: 8}}", "evaluate.baselines", [{"kind": "ngram", "nodes": 8}]),
        ("train: {loss: kl}", "train.loss.kl", 1.0), ("train: {steps: 1e4}", "train.steps", 10_000),
        ("train: {steps: 2.5e3}", "train.steps", 2500), ("train: {epochs: 2}", "train.epochs", 2.0),
        ("train: {epochs: 2}", "train.steps", None), ("prepare: {count: 1E3}", "prepare.count", 1000),
]  # fmt: skip


def test_what_is_meant_is_taken(tmp_path: Path) -> None:
    """Catches `tasks=gsm8k`, `loss=kl` and `steps=1e4` being refused, from a file and from an override."""
    base = "target: demo\ndrafter: dspark\n"
    for text, key, value in MEANT:
        run, _ = load(write(tmp_path / "a.yaml", base + text + "\n"))
        assert configs.flatten(run.model_dump(mode="json"))[key] == value
        section, _, rest = text.partition(": {")
        name, _, written = rest.removesuffix("}").partition(": ")
        again, _ = load(write(tmp_path / "b.yaml", base), [f"{section}.{name}={written}"])
        assert again.model_copy(update={"name": "a"}) == run


def test_an_override_that_is_wrong_is_not_blamed_on_a_line_of_the_file(tmp_path: Path) -> None:
    """Catches the line of a setting that is right in the file and wrong on the command line."""
    path = write(tmp_path / "a.yaml", "target: demo\ndrafter: dspark\ntrain: {steps: 3}\n")
    with pytest.raises(ConfigError, match=r"^train\.steps: "):
        load(path, ["train.steps=-1"])


def test_a_setting_of_old_is_an_error_that_gives_the_new_name() -> None:
    """Catches an old name that is still taken, and a hint at a setting that is gone."""
    every = [find(kind).Config for kind in kinds()] + [PrepareConfig, EvaluateConfig, GatePolicy]
    for before, now in RENAMED.items():
        takes = [config for config in every if now in config.model_fields]
        assert takes and not any(before in config.model_fields for config in every), before
        with pytest.raises(ConfigError, match=f"unknown key '{before}'; it is called '{now}' now"):
            build(takes[0], {before: 1})
    with pytest.raises(ConfigError, match="unknown key 'rotate'; it was removed, use 'feature_encoding' instead"):
        build(PrepareConfig, {"rotate": 64})
    for setting in ("score", "allow_code_execution"):
        with pytest.raises(ConfigError, match=f"unknown key '{setting}'; it was removed, use `outrider lm-eval`"):
            build(EvaluateConfig, {setting: True})
