"""Policies and ways to verify are made from their names, fresh; what is no name is refused with the nearest one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import SHIPPED
from contracts.parties import Oracle, TableTarget

from outrider.errors import ConfigError
from outrider.generation import generate, stream
from outrider.measure.config import Config as Evaluate
from outrider.policies import named
from outrider.policies.auto import Auto
from outrider.policies.fixed import Fixed
from outrider.policies.lossy import LossyJudge
from outrider.sampling.settings import Sampling

TABLE = TableTarget.random(6)
DRAFTER = Oracle([], 6, depth=2)


@pytest.mark.parametrize(("name", "kind"), [("fixed", Fixed), ("auto", Auto)])
def test_a_policy_is_made_for_its_drafter_and_not_shared(name, kind):
    """Catches a policy of another drafter's size, and counts that two runs share."""
    one, two = named.policy(name, DRAFTER), named.policy(name, DRAFTER)
    assert type(one) is type(two) is kind
    assert one is not two
    assert (one.limit if kind is Auto else one.nodes) == DRAFTER.limit
    assert named.policy(one, DRAFTER) is one


def test_the_default_measures_and_goes_on_with_what_it_measured(monkeypatch):
    """Catches a default that drafts whatever it costs, one that begins anew with every request, and one that two
    drafters or two threads share.
    """
    monkeypatch.setattr(named, "DEFAULT", SHIPPED)
    (plain,) = generate(TABLE, [1], max_new_tokens=9)
    drafter, other = (Oracle([[1, *plain.tokens]], 6) for _ in "ab")
    one = named.policy(None, drafter)
    assert type(one) is Auto
    generate(TABLE, [1], drafter, max_new_tokens=9)
    assert named.policy(None, drafter) is one
    assert one.step
    assert named.policy(None, other) is not one
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(named.policy, None, drafter).result() is not one


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A table of cue words and one of swapped words, where the process stands."""
    (tmp_path / "cues.json").write_text('{"selected": ["So"]}')
    (tmp_path / "swap.json").write_text('{"he": "she"}')
    monkeypatch.chdir(tmp_path)


ASKED = [
    "typical(epsilon=0.2, delta=0.5)", "relaxed(k=3)", "relay(cues=cues.json, min_tokens=3, answer=</think>)",
    "scorer(tau=-1.5, aggregate=min, block=4, force_reject_first=0)",
    "scorer(tau=-inf, aggregate=mean, block=sentence, force_reject_first=1)",
    "counterfactual(swap=swap.json, beta=inf, delta=0.1)",
    "counterfactual(swap=swap.json, beta=2, delta=0, preamble=Be fair, be brief.)",
]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_a_rule_is_asked_for_by_the_name_it_reports(asked, files):
    """Catches a setting that is lost, and a name in a report that nobody can ask for again; each needs consent, in a
    run file too."""
    judge = named.judge(asked, allow_lossy=True)
    assert isinstance(judge, LossyJudge)
    assert judge.rule.name == asked and named.judge(asked, allow_lossy=True) is not judge
    assert Evaluate(verification=asked, allow_lossy=True).verification == asked
    for refused in (lambda: named.judge(asked), lambda: Evaluate(verification=asked), lambda: named.judge(asked, 1)):
        with pytest.raises(ValueError, match="set allow_lossy: true"):
            refused()


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("relay", r"needs cues; write relay\(cues=...\)"), ("scorer()", "needs tau"),
        ("relaxed(n=2)", "unknown setting of verification 'relaxed' 'n'"), ("relaxed(k=two)", "must be a number"),
        ("relaxed(3)", "'3' is not a setting"), ("block(k=1)", "has no settings"),
        ("relais(k=1)", "did you mean 'relay'"),
        ("relay(cues=none.json)", "can't be read"), ("scorer(tau=0, block=word)", "'sentence' or a number"),
        ("scorer(tau=0, score=os:getcwd)", "unknown setting"),
    ],
)  # fmt: skip
def test_settings_that_are_none_are_refused(wrong, hint):
    """Catches a rule with its defaults where something else was asked for, and code that a text could name."""
    for refused in (named.judge, named.check_verification):
        with pytest.raises(ConfigError, match=hint):
            refused(wrong, True)


def test_names_are_refused_before_anything_is_computed_and_taken_by_generate():
    """Catches a name that `generate` lets through to the first step, or does not know."""
    for wrong in ({"policy": "autom"}, {"verification": "blocks"}):
        for refuses in (generate, stream):
            with pytest.raises(ConfigError, match="did you mean '(auto|block)'"):
                refuses(TABLE, [1], max_new_tokens=3, **wrong)
    with pytest.raises(ConfigError, match="unknown policy 'zz'; known: "):
        named.policy("zz", DRAFTER)
    for gone in ("adaptive", "by_load", "by_confidence"):
        with pytest.raises(ConfigError, match="was removed; use auto"):
            named.policy(gone, DRAFTER)
    (plain,) = generate(TABLE, [1], max_new_tokens=30)
    oracle = Oracle([[1, *plain.tokens]], 6)
    for policy in named.POLICIES:
        for verification in named.EXACT:
            (found,) = generate(TABLE, [1], oracle, max_new_tokens=30, policy=policy, verification=verification)
            assert found.tokens == plain.tokens
            assert found.steps < 30


def test_a_judge_serves_one_batch_at_a_time(target, prompts):
    """Catches a judge whose bans and stop strings are another stream's, or those of a text that was left off."""
    judge = named.judge("standard")
    banned = Sampling(bad_words=[[n] for n in range(60)])
    first = stream(target, prompts[0], max_new_tokens=8, verification=judge, sampling=banned)
    next(first)
    with pytest.raises(ConfigError, match="belongs to another batch"):
        next(stream(target, prompts[1], max_new_tokens=8, verification=judge))
    first.close()
    del first
    wanted = generate(target, prompts[1], max_new_tokens=8)[0].tokens
    assert generate(target, prompts[1], max_new_tokens=8, verification=judge)[0].tokens == wanted
