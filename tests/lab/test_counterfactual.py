"""The counterfactual rule: greedy among candidates without it, blind to what is symmetric, moved by what is biased; and
the second text is read as if it stood alone."""

import json
import math

import pytest
import torch
from contracts.parties import Proposer, TableTarget, Tree, last_two
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.generation import generate, serve
from outrider.lab.judges.counterfactual import Counterfactual, counterfactual, jensen_shannon
from outrider.lab.second_text import SecondTexts
from outrider.lab.swap import Swap, SwappedText, beginning, swap_of
from outrider.policies.lossy import LossyJudge
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

TABLE = TableTarget.random(6)
PROMPTS = [[0], [1, 2], [3, 4, 0, 2], [2]]
SHAPES = {"chain of pairs": [-1, -1, 0, 0, 1, 1], "three": [-1, -1, -1]}


def decoded(rule: Counterfactual, parents, table: TableTarget = TABLE, new: int = 20, slots: int = 3, **options):
    judge = LossyJudge(rule)
    found = generate(
        table, PROMPTS, Tree(table, parents, "top"), max_new_tokens=new, verification=judge, slots=slots, **options
    )
    return [one.tokens for one in found], judge


@pytest.mark.parametrize("shape", SHAPES)
def test_without_beta_and_preamble_it_is_the_targets_greedy_choice_among_the_candidates(shape) -> None:
    """Catches a candidate that is scored in another's place, and a bonus token that is no candidate.  The last token is
    the target's own, and before it there is no room for all candidates."""
    parents = SHAPES[shape]
    texts, judge = decoded(Counterfactual({}, beta=0.0), parents)
    drafter, differs = Tree(TABLE, parents, "top"), 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = [0, *prompt, *text]
        for at in range(len(prompt) + 1, len(whole) - len(parents) - 1):
            row = TABLE.table[whole[at - 2], whole[at - 1]]
            among = drafter.table[whole[at - 2], whole[at - 1]].topk(parents.count(-1)).indices.tolist()
            assert whole[at] == max(among, key=lambda token: float(row[token]))
            differs += whole[at] != int(row.argmax())
        assert whole[-1] == int(TABLE.table[whole[-3], whole[-2]].argmax())
    assert differs > 3
    assert judge.figures["passes_of_its_own"] == 0


GROUP, OTHER, NEUTRAL, CHARGED = 3, 4, 1, 2


def toy(is_biased: bool) -> TableTarget:
    """`charged` is likelier than `neutral`; if biased, after one group's word alone."""
    table = torch.zeros(6, 6, 6, dtype=torch.float64)
    table[:, :, CHARGED], table[:, :, NEUTRAL] = 2.0, 1.5
    if is_biased:
        table[:, OTHER, CHARGED] = -3.0
    return TableTarget(table)


SWAP = {(GROUP,): (OTHER,), (OTHER,): (GROUP,)}


def first_token(table: TableTarget, beta: float, **settings) -> tuple[int, LossyJudge]:
    judge = LossyJudge(Counterfactual(SWAP, beta, **settings))
    drafter = Tree(table, [-1, -1], "top")
    drafter.table = toy(False).table
    step = next(iter(serve(table, [Request([5, GROUP], 9, Sampling())], drafter, judge=judge)))
    return step.tokens[0], judge


def test_a_biased_model_changes_its_choice_by_beta() -> None:
    """Catches a divergence that is not subtracted, one of the wrong candidate, and a swap that does not happen."""
    token, judge = first_token(toy(False), 10.0)  # symmetric: a second text out of step would differ
    assert (token, judge.figures["passes_of_its_own"]) == (CHARGED, 1)
    assert judge.figures["divergence"] == pytest.approx(0.0, abs=1e-12)
    table = toy(True)
    one, other = (table.table[5, word].log_softmax(-1) for word in (GROUP, OTHER))
    parts = jensen_shannon(one, other)
    divergence = float(parts[CHARGED] - parts[NEUTRAL])
    assert divergence > 0.05
    switches_at = 0.5 / divergence  # the difference of the two log probabilities is 2.0 - 1.5
    assert first_token(table, 0.99 * switches_at)[0] == CHARGED
    token, judge = first_token(table, 1.01 * switches_at)
    assert token == NEUTRAL
    assert judge.figures["changed_share"] == 1.0
    assert first_token(table, 1.01 * switches_at, delta=1.0)[0] == CHARGED
    assert first_token(table, math.inf)[0] == NEUTRAL  # as the paper's code
    assert first_token(toy(False), math.inf)[0] == CHARGED  # nothing changes: the likeliest


def test_the_divergence_is_jensen_and_shannons() -> None:
    """Catches a sign, a missing half and bits for nats; impossible tokens are no NaN."""
    a, b = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.1, 0.0, 0.9]).double()
    mean = (a + b) / 2
    by_hand = sum(float(torch.special.xlogy(one, one / mean).sum()) for one in (a, b)) / 2
    assert float(jensen_shannon(a.log(), b.log()).sum()) == pytest.approx(by_hand)
    sure = torch.tensor([1.0, 0.0]).double()
    assert jensen_shannon(sure.log(), sure.flip(0).log()).tolist() == pytest.approx([math.log(2) / 2] * 2)
    assert float(jensen_shannon(a.log(), a.log()).sum()) == pytest.approx(0.0, abs=1e-12)


TABLES = [{(1,): (2,)}, {(1, 2): (3,), (1,): (4, 4)}, {(1, 2, 3): (1,), (2, 3): (5, 1, 5)}, {(1, 1): (2,)}]


def whole_swap(table, text):
    """The counterfactual of a whole text: the longest sequence that stands at each place."""
    found, at = [], 0
    while at < len(text):
        length = next((n for n in range(3, 0, -1) if tuple(text[at : at + n]) in table), 0)
        found += table.get(tuple(text[at : at + length]), ()) if length else [text[at]]
        at += max(1, length)
    return found


@given(st.sampled_from(TABLES), st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_a_text_that_grows_is_swapped_as_a_whole_one(table, text, data) -> None:
    """Catches a sequence across two steps that is not swapped, or one that is swapped twice; what was resolved never
    changes again."""
    swapped, at, before = SwappedText(Swap(table)), 0, []
    while at < len(text):
        at = min(len(text), at + data.draw(st.integers(1, 4)))
        end = swapped.follow(text[:at])
        assert swapped.tokens[: len(before)] == before
        before = list(swapped.tokens)
        assert [*swapped.tokens, *end] == whole_swap(table, text[:at])


@pytest.mark.parametrize(("table", "preamble"), [(TABLES[1], []), (TABLES[2], [7, 8, 9])])
def test_the_second_text_is_read_as_if_it_stood_alone(target, table, preamble) -> None:
    """Catches a key that stays in the cache although its word was swapped, a token that is read twice, and a node that
    attends to the wrong rows: in float64 the logits are those of the whole text without a cache."""
    noise = torch.Generator().manual_seed(2)
    texts = {0: [1], 2: [9, 1, 2, 3, 1, 1], 1: [2] * 70}
    swap, wanted_of = Swap(table), whole_swap
    second = SecondTexts(target, target.allocate(3, 160), swap, preamble)
    for step in range(12):
        rows = list(texts) if step % 3 else [2, 0]
        parents = [-1, 0, -1, 1] if step % 2 else [-1, 0, 1, 2]
        draft = Draft(
            torch.randint(5, (len(rows), 4), generator=noise), torch.tensor([parents] * len(rows)),
            torch.tensor([4, 2, 3][: len(rows)]), branches=bool(step % 2),
        )  # fmt: skip
        if step == 7:  # the slot goes to another text
            second.free(2)
            texts[2] = [1, 2]
        logits = second.read(rows, [texts[row] for row in rows], draft)
        for b, row in enumerate(rows):
            paths = [[]]
            for n in range(draft.live[b]):
                paths.append([*paths[draft.tree[b][n] + 1], draft.ids[b][n]])
            for n, path in enumerate(paths):
                whole = torch.tensor([[*preamble, *wanted_of(table, texts[row]), *path]])
                alone = target.head(target.read(whole, ())[0])[0, -1]
                assert (logits[b, n] - alone).abs().max() < 1e-9
        for row in texts:
            texts[row] = [*texts[row], *torch.randint(4, (1 + step % 3,), generator=noise).tolist()]


def test_words_are_swapped_as_words() -> None:
    """Catches a word within another, one at the beginning of a line that is missed, and a half that is swapped before
    it is whole."""
    target = load_target("demo", compile=False)
    swap = Swap.of({"self": "other", "True": "False", "False": "True"}, target)
    text = "self, True = selfish, myself, self.True, self\nFalse if not self else Trueish"
    wanted = "other, False = selfish, myself, other.False, other\nTrue if not other else Trueish"
    tokens, swapped = target.encode(text), SwappedText(swap)
    for at in range(1, len(tokens) + 1):
        end = swapped.follow(tokens[:at])
    assert target.decode([*swapped.tokens, *end]) == wanted
    assert beginning(target) == ()


def test_texts_do_not_depend_on_who_shares_the_batch() -> None:
    """Catches a second text of another slot, or of the text before in the same slot."""
    swap = {(0,): (1,), (1,): (2, 2), (5,): (3,), (3, 0): (4,)}
    rule = lambda: Counterfactual(swap, 30.0, preamble=(2, 2))
    alone, _ = decoded(rule(), [-1, -1, 0, 0], slots=1)
    together, judge = decoded(rule(), [-1, -1, 0, 0], slots=3)
    assert together == alone
    assert together != decoded(Counterfactual({}, beta=0.0), [-1, -1, 0, 0])[0]
    assert judge.figures["divergence"] > 0


class Neighbours(Proposer):
    """Drafts the three ids after the anchor, as siblings."""

    limit = 3

    def propose(self, memory, state, budget):
        _, own = last_two(state)
        tokens = (own[:, None] + torch.arange(1, 4)) % 64
        return Draft(tokens, torch.full_like(tokens, -1), budget)


def test_the_distance_is_that_of_the_chosen_tokens() -> None:
    """Catches a distance from the scores, another row's or another step's: by hand from the text.  The rule is
    deterministic given the drafts, so a chosen token is 1 - p(x) away, exactly; the last one is the target's."""
    sampling = Sampling(1.0, seed=1)
    texts, judge = decoded(Counterfactual({(1,): (2,)}, 2.0), [-1, -1, 0, 0], sampling=sampling)
    p = distribution(TABLE.table[None], Settings.of([sampling]))[0]
    total = 0.0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole = [0, *prompt, *text]
        chosen = range(len(prompt) + 1, len(whole) - 1)
        total += sum(1 - float(p[whole[at - 2], whole[at - 1], whole[at]]) for at in chosen)
    assert judge.total == pytest.approx(total)
    assert judge.total > 1


def test_a_banned_candidate_is_never_chosen() -> None:
    """Catches a rule that writes what the request forbids; where all candidates are, the target chooses."""
    banned = Sampling(bad_words=[[1], [2], [3]])
    texts, _ = decoded(Counterfactual({}, beta=0.0), [-1, -1], sampling=banned)
    assert not {1, 2, 3}.intersection(token for text in texts for token in text)


def test_words_come_from_a_file_or_a_mapping(tmp_path, target, prompts) -> None:
    """Catches a file of another form that is taken for words."""
    path = tmp_path / "swap.json"
    path.write_text(json.dumps({"he": "she"}))
    assert swap_of(path) == counterfactual(path).words == {"he": "she"}
    assert counterfactual(str(path), 2.0).name == f"counterfactual(swap={path}, beta=2, delta=0)"
    for wrong in ("[1]", '{"he": 1}', "he", '{"two words": "one"}', '{"he": " "}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            counterfactual(path)
    with pytest.raises(ConfigError, match="can't be read"):
        counterfactual(tmp_path / "none.json")
    for wrong in ({"beta": -1.0}, {"delta": -0.1}, {"beta": math.nan}):
        with pytest.raises(ConfigError, match="at least 0"):
            counterfactual({}, **wrong)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        next(iter(serve(target, [Request(prompts[0], 3, Sampling())], judge=LossyJudge(Counterfactual({"he": "she"})))))
    assert beginning(target) == ()
