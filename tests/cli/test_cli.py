"""The command line, in this process and on the tiny recipe: what it writes, where it goes on, what it refuses and
how."""

import functools
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from rich.console import Console
from tiny import DRAFTER, write_run_file
from torch import Tensor
from verbs import outrider_with

from outrider import cli, generate
from outrider.cli import console
from outrider.data.answers import regenerate
from outrider.data.answers.store import read_answers
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.errors import DataError
from outrider.fast import NotCompiled
from outrider.measure import run as measure
from outrider.policies import named
from outrider.runs import baselines, stages
from outrider.runs.file import load
from outrider.runs.forecast.checks import check
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.training import trainer


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What went to standard error, as one line."""
        return " ".join(self.err.split())


Outrider = Callable[..., Done]


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Outrider]:
    """Run a command as `outrider` would, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "out", Console(width=300))
    monkeypatch.setattr(console, "note", Console(stderr=True, width=300))
    # a process that was started in the background ignores Ctrl-C, and so would these tests
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    capsys.readouterr()

    def command(*words: object) -> Done:
        code = outrider_with(*map(str, words))
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    yield command
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny recipe was run to its end."""
    place = tmp_path_factory.mktemp("made")
    write_run_file(place / "tiny.yaml", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert outrider_with("run", "tiny.yaml") == 0
    return place


def test_a_run_leaves_what_the_design_promises(made: Path) -> None:
    """Catches a stage that is skipped, or writes elsewhere."""
    place = made / "runs/tiny"
    assert {path.name for path in place.iterdir()} == {
        "config.yaml", "provenance.json", "metrics.jsonl", "answers", "checkpoint", "checkpoints", "report.json",
        "report.html", "prompts.jsonl",
    }  # fmt: skip
    assert {answer.id for answer in read_answers(place / "answers/answers.jsonl")} == {f"p{i}" for i in range(6)}
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "loss" in row] == [1, 2, 3, 4]
    report = json.loads((place / "report.json").read_text())
    assert [(row["drafter"], row["temperature"], row["exact"]) for row in report["rows"]] == [
        ("ngram", 0.0, True), ("ngram", 1.0, None), ("dspark", 0.0, True), ("dspark", 1.0, None),
    ]  # fmt: skip
    briefly = json.loads((place / "checkpoint/outrider.json").read_text())["report"]
    assert [(row["temperature"], row["exact"]) for row in briefly["rows"]] == [(0.0, True), (1.0, None)]
    assert briefly["rows"][0]["tokens_per_step"] == pytest.approx(report["rows"][2]["tokens_per_step"])
    facts = json.loads((place / "provenance.json").read_text())
    assert {"made", "outrider", "commit", "python", "torch", "transformers", "machine", "config"} <= facts.keys()
    assert yaml.safe_load((place / "config.yaml").read_text())["drafter"]["kind"] == "dspark"


@pytest.mark.usefixtures("spares")
def test_the_probe_asks_for_whole_drafts(folder: Path, talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a probe of acceptance whose steps draft as much as paid on this machine."""
    asked: list[int] = []

    class Asked(Drafter):
        limit = 3

        def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
            asked.extend(budget.tolist())
            return Draft.empty(len(state.rows), state.device)

    def none_held_out() -> Any:
        raise DataError("no answer is held out")

    settings, _ = load(write_run_file(tmp_path / "tiny.yaml", folder))
    probe = stages._probe(settings, talker, check(settings, ["prepare", "train"]), none_held_out)
    assert probe(SimpleNamespace(drafter=Asked))["probe_tokens_per_step"] == 1.0
    assert max(asked) == 3


def test_a_second_run_repeats_nothing(made: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers written again, steps trained again, or a checkpoint written anew."""
    monkeypatch.chdir(made)
    place = made / "runs/tiny"
    files = [place / "answers/answers.jsonl", place / "metrics.jsonl", place / "checkpoint/model.safetensors"]
    state = lambda: [(path.read_bytes(), path.name.startswith("metrics") or path.stat().st_mtime_ns) for path in files]
    before = state()
    monkeypatch.setattr(trainer, "optimise", lambda *_: pytest.fail("trained again"))
    done = outrider("run", "tiny.yaml")
    assert done.code == 0, done.err
    assert "2 prompts were measured before" in done.out
    assert state() == before
    assert "6 prompts from" in done.out and "6 already answered" in done.out
    monkeypatch.setattr(measure, "measure", lambda *_, **__: pytest.fail("measured first"))
    done = outrider("evaluate", "tiny.yaml", "--json", "nowhere/found.json")
    assert (done.code, "can't write nowhere/found.json" in done.said) == (1, True)


def test_the_stages_one_by_one_are_the_run(made, folder, outrider, tmp_path, monkeypatch):
    """Catches a verb that does more, less or other than its share of `run`; and after Ctrl-C a traceback, exit code 0,
    answers or steps that are done again, or another result; weights are compared bit for bit."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    answers, optimise, steps = regenerate._answers, trainer.optimise, []

    def interrupted_answers(*given: Any) -> Iterator[Any]:
        for n, answer in enumerate(answers(*given)):
            if n == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield answer

    def interrupted_steps(*given: Any) -> Any:
        steps.append(given[4])
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return optimise(*given)

    monkeypatch.setattr(trainer, "optimise", interrupted_steps)
    for verb in ("prepare", "train"):
        with monkeypatch.context() as patched:
            if verb == "prepare":
                patched.setattr(regenerate, "_answers", interrupted_answers)
            done = outrider(verb, "tiny.yaml")
        assert done.code == 130 and "Traceback" not in done.err
        assert "stopped; rerun the same command to resume" in done.said
        done = outrider(verb, "tiny.yaml")
        assert done.code == 0 and ("2 already answered" in done.out) == (verb == "prepare")
        assert (tmp_path / "runs/tiny/checkpoint").exists() == (verb == "train")
    assert steps == [0, 1, 2, 3] and not (tmp_path / "runs/tiny/report.json").exists()
    done = outrider("evaluate", "tiny.yaml", "evaluate.prompts=1", "--json", "found.json")
    assert done.code == 0, done.err
    mine, theirs = tmp_path / "runs/tiny", made / "runs/tiny"
    weights = [(place / "checkpoint/model.safetensors").read_bytes() for place in (mine, theirs)]
    assert weights[0] == weights[1]
    lines = [sorted((place / "answers/answers.jsonl").read_text().splitlines()) for place in (mine, theirs)]
    assert lines[0] == lines[1]
    assert json.loads((tmp_path / "found.json").read_text()) == json.loads((mine / "report.json").read_text())


def test_json_on_standard_output_is_json_alone(made: Path, outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches progress or a table in front of the JSON, so that `| jq` fails."""
    monkeypatch.chdir(made)
    found = {}
    for words in (("evaluate", "tiny.yaml"), ("show", "tiny.yaml"), ("drafters",), ("doctor",)):
        done = outrider(*words, "--json", "-")
        assert done.code == 0, done.err
        found[words[0]] = json.loads(done.out)
    kinds = {entry.pop("kind"): entry for entry in found["drafters"]}
    assert [(kinds[kind]["trains"], kinds[kind]["taps"]) for kind in ("dspark", "ngram")] == [(True,) * 2, (False,) * 2]
    assert all((check["advice"] == "") == check["ok"] for check in found["doctor"])


def test_rows_that_are_left_out_are_said(folder: Path, outrider: Outrider, tmp_path: Path) -> None:
    """Catches --skip-bad that skips in silence, and a bad row that is skipped without it."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"id": "torn", "prom')
    done = outrider("prepare", "tiny.yaml", "prepare.count=9")
    assert (done.code, "line 7 is not JSON (the line is cut off)" in done.said) == (1, True), done.err
    done = outrider("prepare", "tiny.yaml", "--skip-bad", "prepare.count=9")
    assert done.code == 0, done.err
    assert "1 rows left out; the first: " in done.out
    assert "line 7" in done.out


def test_show_says_how_large_a_drafter_becomes_beside_its_target(outrider: Outrider, tmp_path: Path) -> None:
    """Catches sizes that are open until training begins: a folder with a config.json tells them, each with its
    origin."""
    layers = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36}
    sizes = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, **layers}
    (tmp_path / "qwen").mkdir()
    config = {**sizes, "rope_theta": 1000000, "torch_dtype": "bfloat16"}
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(config))
    (tmp_path / "four.yaml").write_text("target: qwen\ndrafter: {kind: dspark, heads: 16}\n")
    done = outrider("show", "four.yaml", "drafter.kv_heads=4", "--json", "shown.json")
    assert done.code == 0, done.err
    found = {key: (own["value"], own["from"]) for key, own in json.loads((tmp_path / "shown.json").read_text()).items()}
    layer = 2560 * 128 * (2 * 16 + 2 * 4) + 2 * 128 + 3 * 2560 * 9728 + 2 * 2560
    count = 5 * layer + 5 * 2560 * 2560 + 2 * 2560 + 2560 + 2 * 151936 * 256 + 2560 + 256 + 1
    wanted = {
        "drafter.heads": (16, "file"), "drafter.kv_heads": (4, "override"), "drafter.intermediate": (9728, "target"),
        "drafter.rope_theta": (1e6, "target"), "drafter.taps": ([1, 9, 17, 25, 33], "target"),
        "drafter.mask_token": ("learnt", "target"), "drafter.rank": (256, "default"),
        "sizes.parameters": (count, "counted"), "sizes.serving_bytes": (2 * count, "counted"),
    }  # fmt: skip
    assert found | wanted == found
    lines = [line.split() for line in done.out.splitlines()]
    assert ["drafter.intermediate", "9728", "target"] in lines
    assert {line[0] for line in lines if line} >= found.keys() and not (tmp_path / "runs").exists()
    (tmp_path / "far.yaml").write_text("target: ./nowhere\ndrafter: {kind: dspark}\n")
    done = outrider("show", "far.yaml")
    assert done.code == 0, done.err
    assert "unknown here" in done.err and "drafter.rank" in done.out


def test_help_of_every_verb_is_there(outrider: Outrider) -> None:
    """Catches a verb whose options can't be built, and -h that is unknown."""
    verbs = [[verb] for verb in cli.app.commands]
    verbs += [[group, verb] for group, (_, _, table) in cli.GROUPS.items() for verb in table]
    assert len(verbs) == 46
    for verb in verbs:
        done = outrider(*verb, "-h")
        assert (done.code, " ".join(verb) in done.out) == (0, True), done.err


@functools.cache
def text_of(folder: Path, prompt: str) -> str:
    return generate(load_target(folder), prompt, max_new_tokens=12)[0].text


def test_decode_to_a_pipe_is_plain_text(made, folder, outrider, monkeypatch):
    """Catches escape codes, the prompt or statistics among the text, `-` taken for the prompt, a trained drafter that
    can be measured and not used, settings that are not passed on, and a second generation that a script pays for
    unasked."""
    words = ("decode", "--target", folder, "--max-new-tokens", 12)
    checkpoint, ngram = ("--drafter", made / "runs/tiny/checkpoint"), ("--drafter", "ngram")
    settings = ("--set", "tree=frequency", "--set", "nodes=4")
    for more in (("abcabc", *ngram, *settings), ("abcabc", *checkpoint, "--compare"), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("abcabc"))
        done = outrider(*words, *more)
        assert (done.code, done.out) == (0, text_of(folder, "abcabc") + "\n"), done.err
        assert "12 tokens in" in done.said and ("without the drafter" in done.said) == ("--compare" in more)
    wrong = outrider(*words, "x", *ngram, "--set", "node=4")
    assert wrong.code != 0 and "nodes" in wrong.err
    assert "--drafter" in outrider(*words, "x", "--set", "nodes=4").err
    alone = outrider(*words, "x", "--compare")
    assert (alone.code, "--compare needs a drafter" in alone.said) == (2, True)


def test_decode_drafts_and_verifies_as_it_is_asked_to(folder, outrider, monkeypatch):
    """Catches a choice that is lost on its way: the text of exact ones is the same, and each is asked for by its
    name."""
    asked: list[object] = []
    policy, judge = named.policy, named.judge
    monkeypatch.setattr(named, "policy", lambda name, *rest: (asked.append(name), policy(name, *rest))[1])
    monkeypatch.setattr(named, "judge", lambda *given: (asked.append(given), judge(*given))[1])
    words = ("decode", "abcabcabc", "--target", folder, "--max-new-tokens", 12, "--drafter", "ngram")
    for more, wanted in (
        ((), ("auto", ("standard", False))),
        (("--policy", "fixed", "--verification", "block"), ("fixed", ("block", False))),
        (
            ("--policy", "fixed", "--verification", "relaxed", "--allow-lossy"),
            ("fixed", ("relaxed", True)),
        ),
    ):
        asked.clear()
        done = outrider(*words, *more)
        # greedy text is the target's own under a lossy verification too
        assert (done.code, done.out) == (0, text_of(folder, "abcabcabc") + "\n"), done.err
        assert set(wanted) <= set(asked)


def test_cue_words_are_ranked_and_the_text_is_relayed_by_them(outrider: Outrider, tmp_path: Path) -> None:
    """Catches a table that the next command can't read, consent that is not asked for, and settings that are lost."""
    prompts = [{"prompt": "import os\n\n\ndef read(path):\n"}, {"prompt": "class Queue:\n    def put(self, item):\n"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    words = ("--words", "self,return,def,if,no_such_word", "--max-tokens", 24)
    done = outrider(
        "lab", "cues", "prompts.jsonl", "--small-model", "demo", *words, "--out", "tuned", "--json", "found.json"
    )
    assert done.code == 0, done.err
    table = json.loads((tmp_path / "tuned/cues.json").read_text())
    assert (table["target"], table["small_model"], table["answers"]) == ("demo", "demo", 2)
    means = {cue["word"]: cue["mean"] for cue in table["cues"]}
    assert means and "no_such_word" not in means and [*means.values()] == sorted(means.values(), reverse=True)
    (tmp_path / "tuned/cues.json").write_text(json.dumps({"selected": ["self", "return", "def"]}))
    decode = ("decode", prompts[1]["prompt"], "--max-new-tokens", 32, "--policy", "fixed", "--drafter", "small_model")
    relay = ("--verification", "relay(cues=tuned/cues.json, min_tokens=1)")
    plain, refused = outrider(*decode), outrider(*decode, *relay)
    assert refused.code == 2 and "allow_lossy" in refused.said
    relayed = outrider(*decode, *relay, "--allow-lossy")
    assert relayed.code == plain.code == 0 and relayed.out != plain.out, relayed.err


def test_decode_compiles_where_it_is_asked_to(made, folder, outrider, monkeypatch):
    """Catches a choice that is lost on its way, and a drafter that is left out; nothing is
    compiled."""
    asked: dict[str, bool | None] = {}

    def remember(target: TransformersTarget, choice: bool | None) -> TransformersTarget:
        asked["target"] = choice
        return target

    def refuse(drafter: Drafter, several: bool = False) -> float:
        asked["block"] = True
        raise NotCompiled("no g++ here")

    monkeypatch.setattr("outrider.targets.load._compiled", remember)
    monkeypatch.setattr(baselines, "compile_passes", refuse)
    monkeypatch.chdir(made)
    both, decode = {"target": True, "block": True}, ("decode", "hello", "--target", folder, "--max-new-tokens", 5)
    for words, wanted in (
        ((*decode, "--drafter", "ngram"), {"target": None}),
        ((*decode, "--drafter", "dspark", "--compile"), both),
        ((*decode, "--drafter", "ngram", "--no-compile"), {"target": False}),
        (("evaluate", "tiny.yaml", "target.compile=true"), both),
    ):
        asked.clear()
        done = outrider(*words)
        assert (done.code, asked) == (0, wanted), done.err
        if words[0] == "decode":
            assert ("no g++" in done.said) == (wanted == both)


def test_a_checkpoint_is_evaluated_on_the_target_that_it_names(made, outrider, tmp_path, monkeypatch):
    """Catches a checkpoint that can be measured only by the run file that trained it."""
    monkeypatch.chdir(tmp_path)
    words = ("--tasks", made / "held_out.jsonl", "--prompts", 1, "--max-new-tokens", 8, "evaluate.min_first_ngrams=0")
    checkpoint = made / "runs/tiny/checkpoint"
    done = outrider("evaluate", checkpoint, "ngram", *words, "--temperatures", "0", "--dry-run")
    assert done.code == 0 and "results in" in done.out and not (tmp_path / "runs").exists()
    done = outrider("evaluate", checkpoint, "ngram", *words, "--temperatures", "0,1")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "runs/evaluate-dspark-ngram/report.json").read_text())
    assert [(row["drafter"], row["temperature"]) for row in found["rows"]] == [
        (drafter, temperature) for drafter in ("dspark", "ngram") for temperature in (0.0, 1.0)
    ]
    assert found["training"]["dspark"]["steps"] == 4 and found["training"]["ngram"]["seconds"] == 0
    for words, said in (
        (("tiny.yaml", "ngram"), "give one run file, or drafters"),
        ((made / "tiny.yaml", "--out", "x"), "--out has no effect on a run file"),
        (("ngram", "train.steps=3"), "train: settings of drafters by name begin with evaluate. or target."),
        (("ngarm",), "did you mean 'ngram'"),
    ):
        done = outrider("evaluate", *words)
        assert done.code == 2 and said in " ".join(done.err.split()), done.err


def test_prompt_sets_come_from_a_folder(made: Path, folder: Path, tmp_path: Path, outrider: Outrider) -> None:
    """Catches `--data` that is not passed on (the hub would be asked), a second turn that is dropped, and a second
    drafter of the same kind taking the first one's place in silence."""
    sets = tmp_path / "sets"
    sets.mkdir()
    (sets / "gsm8k.jsonl").write_text(json.dumps({"turns": ["What is 1 + 1?"]}) + "\n")
    (sets / "mt-bench.jsonl").write_text(json.dumps({"turns": ["Say a.", "Say b."]}) + "\n")
    measured = {"tasks": ["gsm8k", "mt-bench"], "prompts": 1, "max_new_tokens": 4, "min_first_ngrams": 0.0}
    baselines = [{"kind": "ngram", "tree": "frequency"}, str(made / "runs/tiny/checkpoint")]
    measured |= {"temperatures": [0.0], "baselines": baselines}
    write_run_file(tmp_path / "sets.yaml", folder, drafter="ngram", train=None, evaluate=measured)
    done = outrider("evaluate", "sets.yaml", "--data", sets, "--json", "found.json")
    assert done.code == 0, done.err
    found = json.loads(Path("found.json").read_text())
    rows = {(row["drafter"], row["task"], row["exact"], row["tokens"]) for row in found["rows"]}
    assert len(rows) == 6 and {row[1:] for row in rows} == {("gsm8k", True, 4), ("mt-bench", True, 8)}
    assert str(sets / "gsm8k.jsonl") in json.dumps(found["tasks"])


def test_what_is_wrong_is_one_sentence_and_an_exit_code(folder: Path, outrider: Outrider, tmp_path: Path) -> None:
    """Catches tracebacks, exit code 0, and messages that do not name the key; 2 is a wrong setting, 1 is wrong data."""
    write_run_file(tmp_path / "tiny.yaml", folder)
    write_run_file(tmp_path / "bare.yaml", folder, train=None, evaluate=None)
    write_run_file(tmp_path / "counting.yaml", folder, drafter={"kind": "ngram"})
    write_run_file(tmp_path / "deep.yaml", folder, drafter=DRAFTER | {"taps": [1, 40]})
    decode = ("decode", "--target", folder)
    for words, code, said in (
        (("train", "tiny.yaml", "train.stepz=3"), 2, "train: unknown key 'stepz'; did you mean 'steps'?"),
        (("train", "bare.yaml"), 2, "bare.yaml has no `train:` section; add one, at least `train: {}`"),
        (("evaluate", "bare.yaml"), 2, "bare.yaml has no `evaluate:` section"),
        (("run", "counting.yaml"), 2, "'ngram' has nothing to train"),
        (("show", "[bold]no[/bold].yaml"), 2, "can't read run file [bold]no[/bold].yaml"),
        (("train", "tiny.yaml"), 1, "run `outrider prepare` first"),
        (("evaluate", "tiny.yaml"), 2, "checkpoint"),
        (("train", "deep.yaml"), 1, "taps (1, 40) are out of range"),
        (("prepare", "tiny.yaml", "target.name=/no/such/model"), 2, "target.name: no such folder: /no/such/model"),
        (("drafters", "--json", "nowhere/d.json"), 1, "can't write nowhere/d.json"),
        ((*decode, ""), 1, "the prompt is empty"),
        ((*decode, "x" * 300), 1, "has 300 tokens and leaves no room in the target's context of 256"),
        ((*decode, "x", "--drafter", "ngarm"), 2, "did you mean 'ngram'"),
        ((*decode, "x", "--verification", "typical"), 2, "verification 'typical' changes the target's output"),
        ((*decode, "x", "--max-new-tokens", "0"), 2, "--max-new-tokens"),
        (("shwo",), 2, "No such command 'shwo'"),
        (("show",), 2, "show needs a run file"),
    ):
        done = outrider(*words)
        assert (done.code, said in done.said, "Traceback" in done.err) == (code, True, False), (words, done)
    assert not list(tmp_path.glob("runs/*/answers")) and not (tmp_path / "runs/tiny/checkpoint").exists()
