"""What is measured is what happened: counts, shares and exactness against brute force, faults planted to be found."""

import json
import random
import re
from typing import Any

import pytest
import torch
from tiny import DRAFTER, make_folder

import outrider
from outrider import config as configs
from outrider import load_drafter
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.measure import row as summary
from outrider.measure import run as measure
from outrider.measure import timing
from outrider.measure.config import Config
from outrider.measure.journal import PromptRecord, Record
from outrider.measure.row import conditional, first_difference
from outrider.measure.run import evaluate
from outrider.measure.tasks import prompts
from outrider.measure.tasks.prompts import as_tokens, draw, first_ngram_share
from outrider.measure.timing import generate_once
from outrider.policies import named
from outrider.report.page import render
from outrider.report.schema import Report
from outrider.report.summary import headline, left_out_because, skews
from outrider.sampling import judge
from outrider.targets.hf.transformers import TransformersTarget as Target
from outrider.targets.load import load_target

Drafters, Patch = dict[str, Drafter], pytest.MonkeyPatch
PROMPTS = ["tell 1", "xyxyxy", "q", "another one"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(make_folder(tmp_path_factory.mktemp("target") / "tiny"), dtype="float64")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "quiz.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": prompt}) + "\n" for i, prompt in enumerate(PROMPTS)))
    return str(path)


def settings(task: str, **more: Any) -> Config:
    """Three prompts, of which none is traced, unless said otherwise."""
    given = {"prompts": 3, "max_new_tokens": 16, "min_first_ngrams": 0.0, "repeats": 0, "traced_prompts": 0}
    return Config(**({"tasks": (task,)} | given | more))


@pytest.fixture(scope="module")
def drafters(talker: Target) -> Drafters:
    return {
        "ngram": load_drafter("ngram", talker, shortest=1),
        "dspark": load_drafter("dspark", talker, **{key: value for key, value in DRAFTER.items() if key != "kind"}),
    }


@pytest.fixture(scope="module")
def report(talker: Target, drafters: Drafters, task: str) -> Report:
    return evaluate(talker, drafters, settings(task, traced_prompts=3))


def test_depths_that_were_never_reached_are_not_measured() -> None:
    """Catches a division by zero, and 0 in the place of nothing."""
    assert conditional([], []) == []
    assert conditional([0, 0], [0, 0]) == []
    assert conditional([0, 0], [2, 2]) == [0.0, None]


def test_a_loop_has_few_fresh_pieces() -> None:
    """Catches short texts counting as loops, and loops of any period that pass."""
    assert first_ngram_share(list(range(50))) == 1.0
    assert first_ngram_share([1] * 7) == 1.0
    assert first_ngram_share([]) == 1.0
    assert first_ngram_share([1] * 100) == pytest.approx(1 / 93)
    assert first_ngram_share([1, 2, 3] * 40) == pytest.approx(3 / 113)
    assert first_ngram_share([1, 1, 2], n=1) == pytest.approx(2 / 3)


def test_every_drafter_has_its_rows(report: Report, talker: Target) -> None:
    """Catches a drafter or a temperature that is left out, reports that any two machines may compare, and a clock that
    is left in the model and slows every later pass."""
    assert [(row.drafter, row.temperature, row.task, row.prompts) for row in report.rows] == [
        ("ngram", 0.0, "quiz", 3), ("ngram", 1.0, "quiz", 3), ("dspark", 0.0, "quiz", 3), ("dspark", 1.0, "quiz", 3),
    ]  # fmt: skip
    assert [prompt.id for prompt in report.rows[0].per_prompt] == ["q0", "q1", "q2"]
    assert (report.fingerprint["torch"], report.fingerprint["dtype"]) == (torch.__version__, "float64")
    assert all(row.memory_peak_bytes is None or row.memory_peak_bytes > 2**20 for row in report.rows)
    modules = (talker.model, talker.model.base_model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)


def test_greedy_text_is_exact_and_sampled_text_is_not_compared(report: Report) -> None:
    """Catches `exact` claimed for what was never compared, and denied for what is equal."""
    for row in report.rows:
        assert row.exact is (True if row.temperature == 0 else None)
        assert row.compared_tokens == (48 if row.temperature == 0 else 0)
        assert {prompt.exact for prompt in row.per_prompt} == {True if row.temperature == 0 else None}
        assert {prompt.first_difference for prompt in row.per_prompt} == {None}
        assert row.invalid == 0


def test_a_rule_that_keeps_one_token_too_many_is_found_out(talker: Target, task: str, monkeypatch: Patch) -> None:
    """Catches a measurement of exactness that can't fail; the first difference is where brute force sees it too."""
    real = judge.accept_greedy

    def generous(draft: Draft, choice: list[list[int]], vocabulary: int) -> Accepted:
        found = real(draft, choice, vocabulary)
        kept = found.counts[0]
        if len(found.paths) > 1 or kept >= draft.live[0]:
            return found
        return Accepted([list(range(kept + 1))], [choice[0][kept + 1]], found.invalid)

    with monkeypatch.context() as patched:
        patched.setattr(judge, "accept_greedy", generous)
        drafter = load_drafter("dspark", talker, **{key: value for key, value in DRAFTER.items() if key != "kind"})
        found = evaluate(talker, {"dspark": drafter}, settings(task, temperatures=(0.0,)))
        texts = outrider.generate(
            talker, [[{"role": "user", "content": p}] for p in PROMPTS[:3]], drafter, max_new_tokens=16, slots=1
        )
    (row,) = found.rows
    assert row.exact is False
    for prompt, seen, text in zip(PROMPTS, row.per_prompt, texts, strict=False):
        wanted, _ = generate_once(talker, talker.encode([{"role": "user", "content": prompt}]), 16)
        assert seen.exact is False
        assert seen.first_difference == first_difference(text.tokens, wanted) is not None


def test_nobody_who_is_timed_is_timed_cold(talker: Target, drafters: Drafters, task: str, monkeypatch: Patch) -> None:
    """Catches first passes that the first prompt of the baseline pays for, which would flatter every drafter."""
    run, generated = timing.run_batch, timing.generate_once
    calls: list[Any] = []

    class Timed(Exception):
        """The warm-up is over."""

    def timed(*_: Any) -> None:
        raise Timed

    def ran(target: Target, requests: Any, drafter: Any = None, *rest: Any, **more: Any) -> list[summary.Run]:
        found = run(target, requests, drafter, *rest, **more)
        calls.append((requests[0].sampling.temperature, drafter, len(found[0].tokens) > 4))
        return found

    monkeypatch.setattr(timing, "run_batch", ran)
    monkeypatch.setattr(timing, "generate_once", lambda *given: (calls.append("generate"), generated(*given))[1])
    monkeypatch.setattr(measure, "_next_group", timed)
    with pytest.raises(Timed):
        evaluate(talker, drafters, settings(task))
    ngram, dspark = drafters["ngram"], drafters["dspark"]
    assert "generate" in calls
    assert all((heat, drafter, True) in calls for heat in (0.0, 1.0) for drafter in (None, ngram, dspark))


def test_prompts_that_loop_are_left_out_and_listed(talker, task, drafters, monkeypatch) -> None:
    """Catches a loop that flatters the drafter, or one that vanishes without a word; another prompt takes its place."""
    real, calls = prompts.first_ngram_share, []

    def share(tokens: list[int]) -> float:
        calls.append(tokens)
        return 0.25 if len(calls) == 2 else real(tokens)

    monkeypatch.setattr(prompts, "first_ngram_share", share)
    found = evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, min_first_ngrams=0.3, temperatures=(0.0,)))
    assert [prompt.id for prompt in found.rows[0].per_prompt] == ["q0", "q2", "q3"]
    assert [(left.id, left.first_ngram_share) for left in found.left_out] == [("q1", 0.25)]
    assert found.share_left_out == pytest.approx(1 / 4)


def test_an_answer_of_one_token_is_left_out_for_a_reason_of_its_own_and_kept_where_all_are(
    talker: Target, drafters: Drafters, task: str, monkeypatch: Patch
) -> None:
    """Catches a short answer listed as a loop that is wholly fresh, and min_first_ngrams=0 which does not keep all."""
    asked = draw(task, settings(task)).prompts
    first = generate_once(talker, as_tokens(talker, asked[1]), 1)[0]
    monkeypatch.setattr(talker, "ends", frozenset(first))
    only = {"ngram": drafters["ngram"]}
    found = evaluate(talker, only, settings(task, min_first_ngrams=1e-9, prompts=2, temperatures=(0.0,)))
    short = [left for left in found.left_out if left.id == "q1"]
    assert [(left.first_ngram_share, left.reason) for left in short] == [(1.0, "short")]
    assert "a single token" in left_out_because(found) and "(one token)" in render(found)
    (row,) = evaluate(talker, only, settings(task, prompts=4, temperatures=(0.0,))).rows
    assert [prompt.tokens for prompt in row.per_prompt][1] == 1 and row.exact
    drawn = {task: measure.PromptSet(asked[1:2], "", None, None)}
    with pytest.raises(
        DataError, match=r"every one of 1 prompts is answered with one token; set evaluate\.min_first_ngrams=0"
    ):
        evaluate(talker, only, settings(task, min_first_ngrams=0.6), drawn=drawn)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tasks": ()}, "evaluate.tasks"), ({"temperatures": ()}, "evaluate.temperatures"),
        ({"prompts": 0}, "evaluate.prompts"), ({"temperatures": (-1.0,)}, "evaluate.temperatures"),
        ({"temperatures": (0.0, 1.0, 0.0)}, "has a temperature twice"),
        ({"tasks": ("stdlib", "gsm8k", "stdlib")}, "evaluate.tasks: stdlib is named twice"),
        ({"tasks": ("a/quiz.jsonl", "b/quiz.txt")}, "a/quiz.jsonl and b/quiz.txt have one name, 'quiz'"),
        ({"revisions": {"gsm8": "0" * 40}}, "evaluate.revisions: 'gsm8' is not a task; did you mean 'gsm8k'"),
        ({"revisions": {"quiz.jsonl": "sha256:0"}}, "'quiz.jsonl' is not a task; did you mean 'x/quiz.jsonl'"),
        ({"revisions": {"x/quiz.jsonl": "main"}}, "x/quiz.jsonl is a file and has no commit, got 'main'"),
        ({"revisions": {"stdlib": "0" * 40}}, "evaluate.revisions: stdlib is .* can't be pinned"),
        ({"verification": "typical"}, "evaluate.allow_lossy: verification 'typical' changes .* set allow_lossy: true"),
        ({"verification": "blok"}, "evaluate.verification: unknown verification 'blok'; did you mean 'block'"),
        ({"policy": "adaptive"}, "evaluate.policy: .*'fixed' or 'auto'"),
    ],
)  # fmt: skip
def test_settings_that_measure_nothing_are_refused(values: dict[str, Any], said: str) -> None:
    """Catches settings that fail after the models were loaded, a misspelt name measured as the default or as the newest
    commit, rows of two tasks under one name, exactness lost by one word, and an error without its key."""
    with pytest.raises(ConfigError, match=said):
        configs.build(Config, {"tasks": ("gsm8k", "x/quiz.jsonl")} | values, "evaluate")


def test_an_evaluation_of_no_drafter_is_refused(talker: Target, drafters: Drafters, task: str) -> None:
    """Catches a division by zero, a report without numbers, and `generate` running beyond the context: a false alarm of
    inexactness."""
    with pytest.raises(OutriderError, match="drafter"):
        evaluate(talker, {}, settings(task))
    for count in (255, 300):
        with pytest.raises(OutriderError, match="max_new_tokens"):
            evaluate(talker, drafters, settings(task, max_new_tokens=count))
    with pytest.raises(DataError, match=r"every one of 4 prompts falls into a loop; set evaluate\.min_first_ngrams=0"):
        evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, min_first_ngrams=1.5))


def test_a_prompt_too_long_for_the_context_loses_its_beginning(talker, drafters, tmp_path) -> None:
    """Catches a crash on one long prompt of a task, and a cut that leaves no room for the answer."""
    path = tmp_path / "long.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh", k=500)) + "\n")
    (row,) = evaluate(talker, {"ngram": drafters["ngram"]}, settings(str(path), prompts=1, temperatures=(0.0,))).rows
    assert (row.tokens, row.exact) == (16, True)


def test_a_lossy_rule_is_said_in_every_row(talker: Target, drafters: Drafters, task: str, report: Report) -> None:
    """Catches a rule that is not used, or is used and not told; a greedy text stays the target's own, at distance 0."""
    config = settings(task, verification="typical", allow_lossy=True, temperatures=(0.0, 1.0))
    found = evaluate(talker, {"dspark": drafters["dspark"]}, config)
    assert {row.rule for row in found.rows} == {"typical(epsilon=0.09, delta=0.3)"}
    assert {row.lossless for row in found.rows} == {False}
    for row in found.rows:
        if row.temperature == 0:
            assert (row.exact, row.distance) == (True, 0.0)
        else:
            assert 0 < row.distance < 1
    for row in report.rows:
        assert (row.rule, row.lossless, row.distance) == (None, True, 0.0)


def test_a_rows_distance_is_that_of_its_tokens(talker: Target, drafters: Drafters, task: str) -> None:
    """Catches a mean over steps or prompts in the place of tokens."""
    runs = [
        summary.Run([1] * 4, 2, [1, 1], [1, 1], 1.0, tv_distance=1.0),
        summary.Run([1], 1, [0], [1], 1.0, tv_distance=0.5),
    ]
    for run in runs:
        run.verify_s = 1.0
    samples = [measure.Sample(measure.Prompt("a", ("?",)), run, run, [run.tokens], 1.0) for run in runs]
    measured = measure.Measured(measure.Entry("n", drafters["ngram"], 1.0), "quiz", samples, rule="r")
    row = measure.summarise(measured, talker)
    assert (row.rule, row.lossless, row.distance) == ("r", False, 0.3)


def test_a_policy_that_is_asked_for_is_measured_and_observed(talker, drafters, task, monkeypatch) -> None:
    """Catches a setting that no run looks at, or the timed ones alone, so that what is observed is not what was
    measured, and a policy that forgets what it learnt with every prompt."""
    real, asked = named.policy, []

    def noted(name: Any, drafter: Drafter, kept: Any = None) -> Any:
        asked.append((name, drafter.limit > 0))
        return real(name, drafter, kept)

    monkeypatch.setattr(named, "policy", noted)
    config = settings(task, policy="auto", temperatures=(0.0,), traced_prompts=3)
    (row,) = evaluate(talker, {"ngram": drafters["ngram"]}, config).rows
    assert row.exact and row.lossless
    made = [found for found, drafts in asked if drafts and found]
    # three prompts are timed, all with one policy, and traced with copies of it; the warm-up has none
    assert "auto" in made
    used = [policy for policy in made if policy != "auto"]
    assert len(used) == 6
    assert len(set(map(id, used))) == 4


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "talk.jsonl"
    rows = [{"id": "t0", "turns": ["say ab", "and now?", "again"]}, {"id": "t1", "turns": ["q"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_participant_is_asked_the_same_conversation(talker, drafters, dialogue, monkeypatch) -> None:
    """Catches a later turn that is dropped, a participant that goes on from its own answers, and counts of one turn
    alone."""
    real, asked = timing.run_batch, []

    def noted(target: Target, requests: Any, drafter: Any = None, *rest: Any, **more: Any) -> list[summary.Run]:
        found = real(target, requests, drafter, *rest, **more)
        for request, run in zip(requests, found, strict=True):
            asked.append((request.sampling.temperature, drafter, request.prompt, len(run.tokens), run.steps))
        return found

    monkeypatch.setattr(timing, "run_batch", noted)
    found = evaluate(talker, drafters, settings(dialogue, prompts=2, max_new_tokens=8, traced_prompts=0))
    said: list[dict[str, str]] = []
    wanted = []
    for turn in ("say ab", "and now?", "again"):
        said.append({"role": "user", "content": turn})
        wanted.append(talker.encode(said))
        said.append({"role": "assistant", "content": talker.decode(generate_once(talker, wanted[-1], 8)[0])})
    asked = asked[6:]  # the warm-up
    participants = [(temperature, drafter) for temperature in (0.0, 1.0) for drafter in (None, *drafters.values())]
    for one in participants:
        own = [prompt for temperature, drafter, prompt, *_ in asked if (temperature, drafter) == one]
        assert own[:3] == wanted
        assert len(own) == 4
    for row in found.rows:
        one, other = row.per_prompt
        assert (one.tokens, other.tokens, row.compared_tokens) == (24, 8, 32 if row.temperature == 0 else 0)
        assert row.exact is (True if row.temperature == 0 else None)
        own = row.temperature, drafters[row.drafter]
        assert row.steps == sum(n for temperature, drafter, *_, n in asked if (temperature, drafter) == own)


def test_a_sampled_run_is_drawn_as_requests_without_a_seed_are_and_can_be_repeated(
    talker: Target, drafters: Drafters, task: str, monkeypatch: Patch
) -> None:
    """Catches drafts that share the target's noise, which keep less than users' requests do, and noise that is not
    fixed."""
    real, shared = drafters["dspark"].propose, []

    def noted(memory: Any, state: Any, budget: Any) -> Any:
        shared.append(state.seeded is not None)
        return real(memory, state, budget)

    monkeypatch.setattr(drafters["dspark"], "propose", noted, raising=False)
    config = settings(task, temperatures=(1.0,), prompts=2)
    first, second = (evaluate(talker, {"dspark": drafters["dspark"]}, config).rows[0] for _ in range(2))
    assert shared and not any(shared)
    assert first.accepted_histogram == second.accepted_histogram
    assert first.per_prompt[0].steps == second.per_prompt[0].steps


def test_an_answer_changed_in_a_later_turn_is_found_out(talker, drafters, dialogue, monkeypatch) -> None:
    """The planted fault: a second turn that differs from generate's is no longer exact, and the place is counted over
    turns."""
    real, calls = timing.run_batch, []

    def wrong(target: Target, requests: Any, drafter: Any = None, *rest: Any, **more: Any) -> list[summary.Run]:
        found = real(target, requests, drafter, *rest, **more)
        calls.append(drafter)
        if len([one for one in calls if one is not None]) == 3:  # warm-up, first turn, second turn
            found[0].tokens[3] ^= 1
        return found

    monkeypatch.setattr(timing, "run_batch", wrong)
    config = settings(dialogue, prompts=1, max_new_tokens=8, temperatures=(0.0,), traced_prompts=0)
    (row,) = evaluate(talker, {"ngram": drafters["ngram"]}, config).rows
    assert (row.exact, row.plain_exact, row.per_prompt[0].first_difference) == (False, True, 8 + 3)


def test_thinking_is_handed_to_the_template(talker, drafters, task, monkeypatch, caplog) -> None:
    """Catches a setting without effect that is ignored in silence, and one that is set although nobody asked."""
    prompt = draw(task, settings(task)).prompts[0]
    plain = as_tokens(talker, prompt)
    evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, prompts=1, temperatures=(0.0,), thinking=True))
    assert "evaluate.thinking has no effect" in caplog.text
    template = talker.tokenizer.chat_template
    added = "{% if enable_thinking is defined %}{% if enable_thinking %}yes{% else %}no{% endif %}{% endif %}"
    monkeypatch.setattr(talker.tokenizer, "chat_template", template + added)
    said = {choice: talker.decode(as_tokens(talker, prompt, thinking=choice)) for choice in (None, True, False)}
    assert said == {None: talker.decode(plain), True: talker.decode(plain) + "yes", False: talker.decode(plain) + "no"}
    caplog.clear()
    found = evaluate(
        talker, {"ngram": drafters["ngram"]}, settings(task, prompts=1, temperatures=(0.0,), thinking=False)
    )
    assert found.rows[0].exact
    assert "no effect" not in caplog.text


def test_without_a_template_a_conversation_is_one_text(talker: Target, monkeypatch: Patch) -> None:
    """Catches a crash on base models, and a system prompt or an earlier turn that they never see."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", None)
    prompt = measure.Prompt("p", ("one", "two"), "sys ")
    assert as_tokens(talker, prompt) == talker.encode("sys one")
    assert as_tokens(talker, prompt, [" 1 "]) == talker.encode("sys one 1 two")


def test_what_stands_behind_a_text_s_end_was_not_turned_down(talker, drafters, monkeypatch) -> None:
    """Catches an end of text within a draft that is counted as a rejection of what nobody judged."""
    prompt = talker.encode([{"role": "user", "content": "xyxyxy"}])
    whole, _ = generate_once(talker, prompt, 24)
    # an end that greedy decoding reaches, and that a draft of its own text runs over
    end = next(token for n, token in enumerate(whole) if n > 6 and token not in whole[:n])
    monkeypatch.setattr(talker, "ends", frozenset({end}))

    class Foretold(Drafter):
        limit = 5

        def propose(self, memory: None, state: Any, budget: torch.Tensor) -> Draft:
            at = len(state.tokens[state.rows[0]]) - len(prompt)
            return Draft.chain(torch.tensor([whole[at : at + 5]]), torch.tensor([5]))

    at = whole.index(end)
    shifted = [n for n in range(at + 1) if n % 6 == 0][-1]
    run = timing.run_batch(talker, [measure.Request(prompt, 24, measure.Sampling(0.0))], Foretold())[0]
    assert run.tokens == whole[: at + 1]
    assert run.accepted == run.reached
    assert sum(run.nodes) == 5 * run.steps
    assert run.reached[-1] == min(5, at - shifted + 1)
    row = summary.acceptance([run])
    assert (row["token_acceptance"], row["draft_acceptance"]) == (1.0, 1.0)
    assert row["wasted"] == pytest.approx(1 - sum(run.accepted) / (5 * run.steps))


def test_branches_count_as_verified_tokens(talker: Target, task: str) -> None:
    """Catches a tree that seems to waste as little as its longest branch; ngram by frequency drafts several
    branches."""
    drafter = load_drafter("ngram", talker, shortest=1, tree="frequency", nodes=6)
    prompt = talker.encode([{"role": "user", "content": "xyxzxyxzxw xyxz"}])
    run = timing.run_batch(talker, [measure.Request(prompt, 24, measure.Sampling(0.0))], drafter)[0]
    assert len(run.nodes) == run.steps == len(run.reached)
    assert all(nodes >= reached for nodes, reached in zip(run.nodes, run.reached, strict=True))
    assert sum(run.nodes) > sum(run.reached)


def test_the_first_prompts_are_observed_in_every_row(report: Report, talker: Target) -> None:
    """Catches observations of another prompt, or of another entry's temperature, and rows without any."""
    for row in report.rows:
        assert [seen.id for seen in row.traced] == ["q0", "q1", "q2"]
        assert [len(seen.tokens) for seen in row.traced] == [prompt.tokens for prompt in row.per_prompt]
        places = [place for seen in row.traced for place in seen.tokens]
        assert row.rejections is not None
        tested = sum(pattern.tested for pattern in row.rejections.by_rank)
        assert tested == sum(place.depth is not None for place in places)
        # all prompts were observed: what was kept there is what was kept in the timed runs
        assert sum(pattern.accepted for pattern in row.rejections.by_rank) == pytest.approx(
            row.token_acceptance * tested
        )
        assert 0 <= row.expected_acceptance <= 1
        if row.temperature == 0:
            assert row.expected_acceptance == pytest.approx(row.token_acceptance)
    texts = {seen.id: "".join(place.text for place in seen.tokens) for seen in report.rows[0].traced}
    wanted, _ = generate_once(talker, talker.encode([{"role": "user", "content": PROMPTS[0]}]), 16)
    assert texts["q0"].startswith(talker.decode(wanted)[:8])


def test_overlaps_are_each_drafter_s_own(talker: Target, drafters: Drafters, task: str) -> None:
    """Catches one drafter's training set held against another, and drafters that were not looked at taken for clean."""
    overlaps = {
        "dspark": summary.Overlaps({("quiz", "q0"): True, ("quiz", "q1"): False, ("quiz", "q2"): False}, "a word")
    }
    found = evaluate(talker, drafters, settings(task, temperatures=(0.0,)), overlaps=overlaps)
    ngram, dspark = found.rows
    assert ngram.clean is None
    assert {prompt.contaminated for prompt in ngram.per_prompt} == {None}
    assert (dspark.clean.contaminated, dspark.clean.checked, dspark.clean.rule) == (("q0",), 3, "a word")
    steps = sum(prompt.steps for prompt in dspark.per_prompt[1:])
    assert dspark.clean.tokens_per_step == pytest.approx(32 / steps)


def test_less_than_training_expected_is_said(talker: Target, drafters: Drafters, task: str) -> None:
    """Catches a drafter that is served otherwise than it was trained."""
    high = {"dspark": {"agreement": [0.99] * 3, "temperature": 0.7}}
    config = settings(task, temperatures=(0.0,))
    found = evaluate(talker, {"dspark": drafters["dspark"]}, config, training=high)
    assert found.rows[0].predicted_by_depth == pytest.approx((0.99, 0.99**2, 0.99**3))
    (said,) = skews(found)
    assert re.search("dspark on quiz at temperature 0: .* training measured 9[789] %", said)
    assert said in headline(found)


def test_tasks_are_counted_together(talker: Target, drafters: Drafters, task: str, dialogue: str) -> None:
    """Catches a progress bar that begins again with every task, and rows of one task alone."""
    told: list[tuple[int, int, int]] = []
    config = Config(
        tasks=(task, dialogue), prompts=2, max_new_tokens=4, min_first_ngrams=0.0, temperatures=(0.0,), traced_prompts=0
    )
    found = evaluate(talker, {"ngram": drafters["ngram"]}, config, on_prompt=lambda *counts: told.append(counts))
    assert told == [(1, 4, 0), (2, 4, 0), (3, 4, 0), (4, 4, 0)]
    assert [row.task for row in found.rows] == ["quiz", "talk"]
    assert all((row.traced, row.rejections, row.expected_acceptance) == ((), None, None) for row in found.rows)


def test_a_task_is_read_from_where_the_settings_say_and_the_report_says_so(talker, drafters, tmp_path) -> None:
    """Catches a folder or a pinned content that is dropped, and a report that does not tell which rows it measured."""
    rows = [{"question": f"What is {n} + 1?", "answer": f"think\n#### {n + 1}"} for n in range(30)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings("gsm8k", prompts=2, max_new_tokens=4, temperatures=(0.0,), data=str(tmp_path), traced_prompts=0)
    found = evaluate(talker, {"ngram": drafters["ngram"]}, config)
    source = found.tasks["gsm8k"]
    assert str(tmp_path) in source.source and source.prompts == 30 and source.revision.startswith("sha256:")
    assert found.rows[0].prompts == 2
    assert len(draw("gsm8k", config).prompts) == 8
    wrong = config.model_copy(update={"revisions": {"gsm8k": "sha256:0123"}})
    with pytest.raises(DataError, match="but sha256:0123 is pinned"):
        evaluate(talker, {"ngram": drafters["ngram"]}, wrong)


def test_a_speed_up_is_over_plain_decoding_at_the_same_temperature(drafters: Drafters, task: str) -> None:
    """Catches a sampled run held against greedy plain decoding, which is faster."""
    plain = {"0": summary.Run([1, 2], 2, seconds=1.0), "1": summary.Run([1, 2], 2, seconds=3.0)}
    run = summary.Run([1, 2], 1, seconds=0.5)
    records = {0: Record("quiz", [0], ["d"], prompts=[PromptRecord([[1, 2]], 1.0, plain, [run])])}
    for temperature, seconds in ((0.0, 1.0), (1.0, 3.0)):
        own = measure.Measured(measure.Entry("n", drafters["ngram"], temperature), "quiz", [])
        measure._fill(own, 0, [0], records, [measure.Prompt("a", ("?",))], settings(task, traced_prompts=0))
        assert [sample.plain.seconds for sample in own.samples] == [seconds]
