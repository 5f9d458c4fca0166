"""lm-evaluation-harness says the same of our targets as of its own `hf` model, and the same with a drafter."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import folder as folder
from tiny import make_folder
from transformers import GenerationConfig
from verbs import outrider_with

from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError
from outrider.loading import load_drafter
from outrider.targets.hf.transformers import TransformersTarget as Target
from outrider.targets.load import load_target

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from outrider.gate import harness
from outrider.gate.harness import Job, both
from outrider.gate.language_model import OutriderLM

CONTEXTS = ("tell 1 xyxy", "a", "say abab 3 abab", "and so on " * 40)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """lm-eval's own model, which needs more than lm-eval: pip install 'lm-eval[hf]'."""
    for needed in ("accelerate", "peft"):
        pytest.importorskip(needed)
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Target:
    return load_target(folder)


@pytest.fixture(scope="module")
def drafter(ours: Target) -> Drafter:
    return load_drafter("ngram", ours, shortest=1)


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_answers_are_cut_and_stopped_as_by_the_hf_model(ours: Target, drafter: Drafter, theirs: Any) -> None:
    """Catches a stop that is kept, found too late or not at all, a limit that is off by one, a prompt cut at the wrong
    end.

    Stops are taken from what the model writes: one letter, several that end in the middle, two of which the second
    comes first, one that never comes, and the end of text by its name.
    """
    whole = theirs.generate_until(
        asked("generate_until", (CONTEXTS[0], {"until": [], "max_gen_toks": 24})), disable_tqdm=True
    )
    text = whole[0]
    assert len(text) > 12
    untils: list[Any] = [text[5], [text[4:9]], [text[10:13], text[3:6]], ["never there"], ["<|end|>"], text[:2], []]
    requests = asked(
        "generate_until",
        *(
            (context, {"until": until, "max_gen_toks": most})
            for context in CONTEXTS[::3]
            for until in untils
            for most in (1, 24)
        ),
    )
    wanted = theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(wanted)) > 5
    for arm in (None, drafter):
        assert OutriderLM(ours, arm, slots=5).generate_until(requests) == wanted


def test_greedy_answers_obey_the_generation_config_as_the_hf_model(ours: Target, theirs: Any, monkeypatch) -> None:
    """Catches keys that greedy tasks read past, and a penalty of the task that is lost beside them."""
    requests = asked("generate_until", *((context, {"until": [], "max_gen_toks": 20}) for context in CONTEXTS))
    before, own = OutriderLM(ours).generate_until(requests), ours.model.generation_config.to_dict()
    for asks in ({"no_repeat_ngram_size": 2, "min_new_tokens": 20}, {"suppress_tokens": list(range(3, 20))}):
        config = GenerationConfig(**own | asks)
        for model in (ours.model, theirs.model):
            monkeypatch.setattr(model, "generation_config", config)
        wanted = theirs.generate_until(requests, disable_tqdm=True)
        assert OutriderLM(ours).generate_until(requests) == wanted != before
    penalised = asked("generate_until", (CONTEXTS[0], {"until": [], "max_gen_toks": 20, "repetition_penalty": 1.9}))
    wanted = theirs.generate_until(penalised, disable_tqdm=True)
    assert OutriderLM(ours).generate_until(penalised) == wanted != before[:1]


def test_log_likelihoods_are_those_of_the_hf_model(ours: Target, theirs: Any) -> None:
    """Catches a row that is off by one, padding that is read, a context cut at the wrong end, and spaces on the wrong
    side."""
    text = theirs.generate_until(asked("generate_until", (CONTEXTS[0], {"max_gen_toks": 8})), disable_tqdm=True)[0]
    pairs = [("one", " two"), ("one ", "two"), ("", "alone"), ("x" * 300, "yz"), (CONTEXTS[0], text), ("a", "b" * 50)]
    model = OutriderLM(ours, slots=4)
    found = model.loglikelihood(asked("loglikelihood", *pairs))
    wanted = theirs.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-4, rel=1e-6)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert any(is_greedy for _, is_greedy in found)
    texts = [("short",), ("longer than the context is " * 24,), ("x",)]
    rolling = asked("loglikelihood_rolling", *texts)
    assert model.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3, rel=1e-6
    )


def test_sampled_answers_are_the_same_with_a_drafter(ours: Target, drafter: Drafter) -> None:
    """Catches a seed that is shared by all answers, or that does not reach the draw."""
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 20}
    requests = asked("generate_until", *[("say it", settings)] * 4)
    plain = OutriderLM(ours).generate_until(requests)
    assert len(set(plain)) == 4
    assert OutriderLM(ours, drafter).generate_until(requests) == plain
    assert OutriderLM(ours, seed=100).generate_until(requests) != plain


def test_settings_that_are_not_known_are_refused(ours: Target) -> None:
    """Catches a beam search that is run greedily in silence."""
    for settings in ({"num_beams": 4}, {"no_such_thing": 1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            OutriderLM(ours).generate_until(asked("generate_until", ("a", settings)))
    with pytest.raises(ConfigError, match="the context has 256"):
        OutriderLM(ours).generate_until(asked("generate_until", ("a", {"max_gen_toks": 256})))
    OutriderLM(ours).generate_until(asked("generate_until", ("a", {"num_beams": 1, "max_gen_toks": 1})))


def test_a_chat_template_is_the_targets_own(ours: Target, tmp_path: Path) -> None:
    """Catches a template that is left out, or asked for where there is none."""
    said = OutriderLM(ours).apply_chat_template([{"role": "user", "content": "hello"}])
    assert said == "<|user|>hello<|end|><|assistant|>"
    bare = load_target(make_folder(tmp_path / "bare", template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        OutriderLM(bare).apply_chat_template([])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks: greedy answers, choices, sampled answers, greedy answers whose settings name a temperature, and
    code."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [{"text": f"tell {i} {'xy' * i}", "wanted": "x", "choices": ["ab", "xy"], "label": i % 2} for i in range(6)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}", "metadata": {"version": 1},
        "dataset_kwargs": {"data_files": {"test": str(place / "rows.jsonl")}, "cache_dir": str(place / "cache")},
    }  # fmt: skip
    written = {"doc_to_target": "{{wanted}}", "output_type": "generate_until",
               "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 12, "do_sample": False}}  # fmt: skip
    matched = {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    chosen = {"doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}", "output_type": "multiple_choice",
              "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}  # fmt: skip
    hot = {"until": ["zzz"], "max_gen_toks": 12, "temperature": 1.0}
    drawn, cold = ({"generation_kwargs": hot | {"do_sample": sampled}} for sampled in (True, False))
    for name, own in (
        ("tiny_answers", written | matched), ("tiny_choices", chosen), ("tiny_drawn", written | matched | drawn),
        ("tiny_cold", written | matched | cold),
    ):  # fmt: skip
        (place / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | shared | own))
    unsafe = {"task": "tiny_code", "unsafe_code": True} | shared | written
    (place / "code.yaml").write_text(yaml.safe_dump(unsafe | matched))
    (place / "group.yaml").write_text(yaml.safe_dump({"group": "tiny_group", "task": ["tiny_answers", "tiny_code"]}))
    return place


def test_tasks_are_run_twice_and_compared(tasks, folder, tmp_path, capsys) -> None:
    """Catches a drafted run that is plain, answers that are compared with themselves, and scores that get lost."""
    common = ["--target", str(folder), "--include-path", str(tasks), "--json", str(tmp_path / "found.json")]
    assert outrider_with("lm-eval", "tiny_answers,tiny_choices", *common, "--limit", "4", "--set", "shortest=1") == 0
    answers, choices = json.loads((tmp_path / "found.json").read_text())["tasks"]
    assert (answers["task"], answers["prompts"], answers["answers"], answers["equal"]) == ("tiny_answers", 4, 4, 4)
    assert (choices["task"], choices["prompts"], choices["answers"], choices["equal"]) == ("tiny_choices", 4, 8, 8)
    assert answers["verdict"] == choices["verdict"] == "equal"
    assert answers["tokens_per_step"] > 1
    assert choices["tokens_per_step"] is choices["speedup"] is None
    assert answers["scores"][0]["metric"] == "exact_match,none"
    assert answers["scores"][0]["equivalence"]["verdict"] == "not enough prompts"
    assert answers["plain_s"] > 0
    assert "tiny_choices" in capsys.readouterr().out


def other_drafter(name: str, target: Target, **settings: Any) -> Drafter:
    """A drafter that changes what the target says while it drafts: a fault of the drafted run alone."""
    drafter, head = load_drafter(name, target, **settings), target.model.get_output_embeddings()
    whole = head.weight.detach().clone()

    class Meddling(type(drafter)):  # type: ignore[misc]
        """Bends the target's head from its first draft to its end."""

        def propose(self, memory: Any, state: Any, budget: Any) -> Any:
            head.weight.copy_(whole.roll(1, 0))
            return super().propose(memory, state, budget)

        def free(self, memory: Any, rows: Any) -> None:
            head.weight.copy_(whole)
            super().free(memory, rows)

    drafter.__class__ = Meddling
    return drafter


def test_greedy_answers_that_differ_end_in_code_1(tasks, folder, tmp_path, monkeypatch, capsys) -> None:
    """Catches a difference of texts that passes because few prompts prove nothing of scores, an equality that can't
    fail, luck taken for a fault, and a fault of greedy text taken for luck because its settings name a temperature."""
    monkeypatch.setattr(harness, "both", functools.partial(both, load=other_drafter))
    words = ["lm-eval", "tiny_drawn,tiny_cold", "--target", str(folder), "--include-path", str(tasks)]
    assert outrider_with(*words, "--limit", "4", "--json", str(tmp_path / "found.json")) == 1
    found = json.loads((tmp_path / "found.json").read_text())["tasks"]
    for one in found:
        assert one["equal"] < one["answers"] and one["verdict"] == "not enough prompts"
        assert one["first_different"]["plain"] != one["first_different"]["drafted"]
    assert [(one["is_sampled"], one["holds"]) for one in found] == [(True, True), (False, False)]
    said = capsys.readouterr().out
    assert f"tiny_cold: {4 - found[1]['equal']} of 4 greedy answers differ" in said
    assert said.count("greedy answers differ") == 1


def test_tasks_that_run_code_are_refused(tasks: Path, folder: Path) -> None:
    """Catches a task that runs the model's code, alone or as a member of a group."""
    for name in ("tiny_code", "tiny_group"):
        with pytest.raises(ConfigError, match="tiny_code runs code written by the model"):
            both(Job(tasks=(name,), target=str(folder), include_path=str(tasks)))


def test_it_is_known_to_lm_eval_by_name(folder: Path) -> None:
    """Catches a model that `--model outrider` does not find."""
    assert get_model("outrider") is OutriderLM
    made = OutriderLM.create_from_arg_string(f"target={folder},drafter=ngram", {"batch_size": 4, "device": "cpu"})
    assert (made.slots, type(made.drafter).__name__) == (4, "NGram")
