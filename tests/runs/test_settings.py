"""What can be set in a run file, from one source: the docstrings of the Configs, the schema, the page, the command
line."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from outrider import drafters, registry
from outrider.cli.show import page
from outrider.drafters import find, own
from outrider.runs import settings
from outrider.runs.schema import FROM_TARGET, make

ROOT = Path(__file__).parent.parent.parent
UNITS = re.compile(
    r"\b(tokens?|steps?|nodes?|slots?|layers?|heads?|prompts?|answers?|conversations|texts?|passes|blocks?|positions|rollouts|"
    r"anchors|queries|children|successors|levels|depths?|n-grams?|tenants|guesses|modules|seconds|minutes|share|probability|"
    r"rank|width|weighs?|weights?|id|seed|temperatures?|rate|times|how often|number|base|norm|units?|"
    r"processes|nearly|bound|rows|channels|bytes|size|port|noise|connections|requests)\b",
    re.IGNORECASE,
)
"""Words that say what a number counts or measures."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return make(own())


class Yaml12(yaml.SafeLoader):
    """As editors read YAML: 1e-3 is a number."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def undocumented(schema: dict[str, Any]) -> list[str]:
    """Settings without a docstring, and numbers whose docstring has no unit."""
    found = []
    for where, section in (("run", schema), *schema["$defs"].items()):
        for name, one in section["properties"].items():
            text = one.get("description", "")
            is_number = bool({"integer", "number"} & {option.get("type") for option in one.get("anyOf", [one])})
            if name != "kind" and (len(text.split()) < 2 or (is_number and not UNITS.search(text))):
                found.append(f"{where}.{name}: {text!r}")
    return found


def test_every_setting_says_what_it_means_and_in_which_unit(schema):
    """Catches a field without a docstring, and a number of which nobody knows what it counts."""
    assert not undocumented(schema)


def test_the_shipped_schema_and_page_are_those_of_the_configs(schema):
    """Catches a setting that editors, `outrider drafters KIND` and docs/settings.md do not know, or know otherwise."""
    how = "run python scripts/settings.py"
    assert json.loads(settings.SCHEMA.read_text()) == schema, how
    assert (ROOT / "docs" / "settings.md").read_text() == page(settings.sections(own())), how


def test_every_run_file_of_ours_fits_the_schema(schema):
    """Catches a schema that marks good files in an editor."""
    validator = jsonschema.Draft202012Validator(schema)
    files = sorted((ROOT / "recipes").glob("**/*.yaml"))
    assert len(files) > 10
    for path in files:
        assert not [error.message for error in validator.iter_errors(yaml.load(path.read_text(), Yaml12))], path.name
        named = path.read_text().partition("$schema=")[2].split()[0]
        assert (path.parent / named).resolve() == settings.SCHEMA, f"{path.name} names another schema for editors"


def test_the_schema_takes_what_a_run_file_may_say(schema):
    """Catches a short form that editors mark, and a slip that they don't."""
    ngram = {"target": "demo", "drafter": "ngram"}
    right = [
        ngram, {"target": {"name": "demo"}, "drafter": {"kind": "dspark", "block": 4}},
        {"target": "demo", "drafter": "runs/demo/checkpoint", "evaluate": {"tasks": "gsm8k"}},
        {"target": "demo", "drafter": {"kind": "eagle3", "taps": [1, 2]}, "train": {"loss": "kl", "steps": 1e4}},
        {"target": "demo", "drafter": {"from": "runs/demo/checkpoint", "length": 3}},
    ]  # fmt: skip
    wrong = [{"target": "demo"}, ngram | {"train": {"lr": "fast"}}, ngram | {"evalute": {}}]
    for drafter in ({"block": 4}, {"kind": "dspark", "blok": 4}, {"kind": "dsparc"}, {"kind": "dspark", "block": 0}):
        wrong.append(ngram | {"drafter": drafter})
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    assert all(map(is_valid, right)) and not any(map(is_valid, wrong))


def test_defaults_in_words_are_those_of_the_config():
    """Catches a default that was changed after the page was written, and a drafter's setting that has no row."""
    for kind in own():
        fields = find(kind).Config.model_fields
        shown = {setting.name: setting.default for setting in settings.section(kind).settings}
        assert {name for name in shown if "." not in name} == set(fields) - {"kind"}
        for name, field in fields.items():
            if name == "kind" or field.is_required():
                continue
            default = field.get_default(call_default_factory=True, validated_data={})
            if default is None or default == "":
                assert shown[name] == ("from the target" if name in FROM_TARGET else "not set")
            elif isinstance(default, int | float | str):
                assert yaml.load(shown[name], Yaml12) == default, name


def test_a_drafter_of_another_distribution_has_its_settings_too(tmp_path, monkeypatch):
    """Catches a reference that knows the drafters that ship alone."""
    (tmp_path / "their_drafter.py").write_text(
        '"""Theirs: does nothing.  (2026.)"""\nfrom typing import Literal\nfrom outrider.config import Config as Base\n'
        'class Config(Base):\n    kind: Literal["theirs"] = "theirs"\n    pace: int = 3\n    """Tokens per step."""\n'
        "def build(config, target): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("theirs", "their_drafter", drafters.REGISTRY.group)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    settings.schema.cache_clear()
    try:
        found = settings.section("theirs")
        assert found.summary.startswith("Theirs: does nothing")
        assert found.settings == [settings.Setting("pace", "whole number", "3", "Tokens per step.")]
    finally:
        settings.schema.cache_clear()


QUICK = """
import sys
from outrider.cli import app, complete
import outrider.cli.drafters, outrider.cli.report, outrider.report.compare
from outrider.engines import commands, manifests
from outrider.engines.tuning import tune
from outrider.runs import settings
from tests.gate.test_verdict import Report, made, outrider_with
settings.sections(), complete.kinds(), complete.tasks(""), complete.engines_and_formats()
Report.model_validate(made()[1]).save(sys.argv[1])
assert outrider_with("gate", sys.argv[1], "--baseline", sys.argv[1]) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_settings_completion_reports_and_the_gate_need_no_torch(tmp_path):
    """Catches seconds of waiting for what is a page of text, and a dashboard's machine that needs torch."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", QUICK, str(tmp_path)], env=environment, check=True)
