"""A question is recognised without its layout, whole however short, by its own units, and in other words; another
question is not."""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.data.overlap import hash_files, near
from outrider.data.overlap.content import tokens, weights_of
from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.overlap.hash_files import Collector, HashFile, Statements, read
from outrider.data.overlap.layout_texts import STEP_BY_STEP
from outrider.data.overlap.near import NearIndex
from outrider.data.overlap.questions import Questions
from outrider.data.overlap.units import bare, units
from outrider.measure.tasks import layouts
from outrider.measure.tasks.layouts import Prompt


class Case(NamedTuple):
    question: str
    training: str
    is_contaminated: bool


STUB = """def tally_ripe(baskets: list[list[int]]) -> int:
    \"\"\" Count the ripe plums in all baskets.
    >>> tally_ripe([[1, 0], [1]])
    2
    \"\"\"
"""
OTHER_STUB = STUB.replace("Count the ripe plums in", "Weigh the rotten pears of").replace("tally_ripe", "mass")
CHOICE = "Which planet has the most moons?\nA) Mars\nB) Saturn\nC) Venus\nD) Mercury"
INTRODUCTION = (
    "A ferry leaves the island of Brisk at nine in the morning, calls at Holm and Skerry, and returns before dusk."
)
CASES = {
    "a short question": Case("What is 7 times 8?", "What is 7 times 8? Think step by step.", True),
    "a short question inside a talk": Case(
        "Who wrote Middlemarch?", "Hi! We read a novel at school. Who wrote Middlemarch? My teacher knows.", True
    ),
    "one instruction and last word": Case(
        "How many days are in eleven weeks?", f"What is the area of a field of eleven weeks?{STEP_BY_STEP}", False
    ),
    "one operation or another": Case("What is 17 + 5?", "What is 17 - 5?", False),
    "LaTeX or signs": Case(
        "Find $\\dfrac{1}{2}\\cdot 8 + x^{2}$ at $x=3$.", "find \\(\\frac12 \\times 8+x^2\\) at $x = 3.0$", True
    ),
    "a stub in other fences": Case(
        STUB, f"Complete this:\n~~~~\n{STUB.replace('    ', '  ')}~~~~\nReturn only code.", True
    ),
    "the sentence of a stub": Case(STUB, "Count the ripe plums in all baskets.", True),
    "a stub of one signature": Case(STUB, OTHER_STUB, False),
    "options in another order": Case(
        CHOICE, "Which planet has the most moons?\n(a) Venus\n(b) Mercury\n(c) Mars\n(d) Saturn\nGive only the letter.",
        True,
    ),
    "a stem without options": Case(CHOICE, "Which planet has the most moons?", True),
    "a stem with other options": Case(
        CHOICE, "Which planet has the most moons?\nA) Uranus\nB) Neptune\nC) Pluto\nD) Ceres", False
    ),
    "other words in another order": Case(
        "A bakery sells 24 muffins each morning and twice as many in the afternoon. How many muffins does it sell in "
        "a week?",
        "Every morning 24 muffins are sold at a bakery, and in the afternoon double that. What's the number of muffins "
        "sold over seven days? I asked my brother too, who only shrugged. "
        "Later we drove along the river to our aunt, whose garden has a swing, two beehives, and a rusty tractor. "
        "Nobody noticed the thunderstorm until hailstones drummed on the greenhouse, so we hid beneath the porch with "
        "the chickens, drank lukewarm cocoa, and listened to grandfather's gramophone until midnight.",
        True,
    ),
    "other numbers": Case(
        "A tank is filled by one pipe in 6 hours and emptied by another in 9 hours. How long until it overflows?",
        "A tank is filled by one pipe in 8 hours and emptied by another in 12 hours. How long until it overflows?",
        False,
    ),
    "the contrary": Case(
        "Write a function to count the number of vowels in a given string.",
        "Write a function to count the number of consonants in a given string.", False,
    ),
    "one introduction": Case(
        f"{INTRODUCTION} Its captain burns forty litres of diesel a mile, pays two sailors, and sells tickets to "
        "pilgrims, of whom a third are pensioners with a discount. What profit remains after the accountant's fee?",
        f"{INTRODUCTION} Draw a timetable of its harbours for the tourist office, and name the ships of the line.",
        False,
    ),
    "one instruction for two inputs": Case(
        "Identify the literary device used in this line.\nThe kettle sang its tired song to the empty kitchen.",
        "Identify the literary device used in this line.\n\n### Input:\nPale parrots picked plums past midnight.",
        False,
    ),
    "Chinese in another order": Case(
        "一个农夫有12只羊和8头牛，他卖掉了5只羊。现在他一共有多少只动物？",
        "农夫原来有12只羊、8头牛，卖掉5只羊之后，他现在一共有多少动物？", True,
    ),
    "Chinese of other things": Case(
        "一个农夫有12只羊和8头牛，他卖掉了5只羊。现在他一共有多少只动物？",
        "一个商店有30个苹果和15个梨，卖掉了9个梨。现在一共有多少个水果？", False,
    ),
}  # fmt: skip


def by_text(prompts: list[Prompt], *turns: str) -> set[str]:
    overlap = EvaluationPrompts({"quiz": prompts}).overlap(turns)
    return set() if overlap is None else {overlap.prompt}


def by_hashes(prompts: list[Prompt], path: Path, *turns: str) -> set[str]:
    collected = Collector("prompts")
    collected.add("prompts", turns)
    stored, questions = read(HashFile(path, collected.save(path))), Questions({"quiz": prompts})
    return {questions.keys[number][1] for number in stored.questions_in("prompts", questions)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_text_asks_a_question_or_does_not(case: Case, tmp_path: Path) -> None:
    """Catches a question that trains and is measured since its form differs, and another that is called the same."""
    prompts = [Prompt("mine", (case.question + STEP_BY_STEP,), bare=(case.question,))]
    prompts += [Prompt(str(i), (f"{name} of a kind{STEP_BY_STEP}",)) for i, name in enumerate(("ferns", "gulls"))]
    expected = {"mine"} if case.is_contaminated else set()
    assert by_text(prompts, case.training) == expected
    assert by_hashes(prompts, tmp_path / "g", case.training) == expected, "stored hashes judge as texts do"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a short question inside a talk", "whole"), ("options in another order", "whole"),
        ("the sentence of a stub", "whole"), ("a stem without options", "part"),
        ("other words in another order", "near"),
    ],
)  # fmt: skip
def test_what_is_word_for_word_is_called_so(name: str, how: str) -> None:
    """Catches a unit of a question that is lost, where its content words alone would still tell."""
    overlap = EvaluationPrompts({"quiz": [Prompt("1", (CASES[name].question,))]}).overlap([CASES[name].training])
    assert overlap == ("quiz", "1", how)


SENTENCES = st.lists(st.sampled_from(("amber", "brook", "cedar", "ember", "fjord", "grove")), min_size=3, max_size=20)
LAYOUTS = {
    "gsm8k": lambda text: layouts.gsm8k({"question": text, "answer": "#### 1"}),
    "problem": lambda text: layouts.problem({"problem": text, "answer": "1"}),
    "humaneval": lambda text: layouts.humaneval({"task_id": "1", "prompt": text, "entry_point": "f", "test": ""}),
    "livecodebench": lambda text: layouts.livecodebench({"question_id": "1", "question_content": text}),
    "alpaca": lambda text: layouts.alpaca({"instruction": text, "input": "zephyr"}),
    "arena_hard": lambda text: layouts.arena_hard({"uid": "1", "prompt": text}),
    "plain": lambda text: layouts.plain({"turns": [text]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None, max_examples=20)
@given(SENTENCES)
def test_a_layout_does_not_change_the_question(name: str, words: list[str]) -> None:
    """Catches a layout whose texts are compared, on either side, and a prompt that does not carry its bare question."""
    prompt = LAYOUTS[name](f"{' '.join(words)}?")
    assert units(prompt.turns[0]).whole == units(prompt.questions[0]).whole
    assert [word for sentence in bare(prompt.questions[0]) for word in sentence][: len(words)] == words


def test_an_unknown_instruction_is_no_evidence_where_two_prompts_share_it(tmp_path: Path) -> None:
    """Catches a rule for what is common that needs ten prompts: an evaluation may have two."""
    instruction = (
        "Speak like the harbour master of Brisk, in exactly three verses without the vowel that opens `umbrella`."
    )
    prompts = [
        Prompt(name, (f"{topic}\n{instruction}",)) for name, topic in (("1", "Fog at sea."), ("2", "Lost oars."))
    ]
    assert (
        by_text(prompts, f"Salted herring.\n{instruction}") == by_hashes(prompts, tmp_path / "g", instruction) == set()
    )
    assert by_text(prompts, f"Lost oars.\n{instruction}") == {"2"}


def test_a_follow_up_is_a_question_only_with_what_came_before() -> None:
    """Catches talks that are left out since they go on as a benchmark's do; a long later turn counts by itself."""
    prompts = [
        Prompt("1", ("Compose a limerick about a tax inspector.", "Now set it on a submarine full of walruses.")),
        Prompt("2", ("Hello.", f"{INTRODUCTION} How many passengers does it carry?")),
    ]
    assert by_text(prompts, "Compose an ode to rain.", "Now set it on a submarine full of walruses.") == set()
    assert by_text(prompts, "Good day.", prompts[1].turns[1].upper()) == {"2"}
    assert by_text(prompts, "Listen.", prompts[0].turns[0]) == {"1"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$2x$", "$2 \\, x$"), ("1,000 m", "1000m"), ("3.50", "3.5"), ("twenty-one", "21"), ("7 × 8", "$7\\cdot8$"),
        ("\\left(a\\right)", "(a)"), ("a/b = 2", "\\frac{a}{b}=2"),
    ],
)  # fmt: skip
def test_numbers_and_formulas_have_one_form(one: str, other: str) -> None:
    """Catches a formula that hides behind its spacing."""
    assert bare(one) == bare(other)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_the_index_finds_what_every_pair_gives(seed: int) -> None:
    """Catches weights that are added to another question, or a candidate that the index passes over.  The slow way: all
    pairs of sets."""
    draw = random.Random(seed)
    words = [f"{letter}{ending}" for letter in "bdfgklmnprst" for ending in ("ulk", "arn", "ost")] + [
        "7",
        "350",
        "story",
    ]
    texts = [" ".join(draw.sample(words, draw.randrange(2, 8))) for _ in range(24)]
    bags = [np.unique(np.array(tokens(text.split()), np.uint32)) for text in texts]
    index = NearIndex([[bag] for bag in bags[:12]], range(12), 12)
    pairs = set(index.near([[bag] for bag in bags[12:]]))
    holders = {one: sum(one in bag for bag in bags[:12]) for bag in bags for one in bag.tolist()}
    assert pairs == {
        (text, number) for text in range(12) for number in range(12)
        if is_near(bags[number], bags[12 + text], holders)
    }  # fmt: skip


def is_near(question: np.ndarray, text: np.ndarray, holders: dict[int, int]) -> bool:
    factor = lambda one: min(1.0, max(0.2, np.log(42 / max(1, holders[one])) / np.log(30)))
    weigh = lambda bag: sum(weights_of(np.array([one]))[0] * factor(one) for one in bag)
    sides = [set(bag.tolist()) for bag in (question, text)]
    both = sides[0] & sides[1]
    mine, theirs, shared = (weigh(bag) for bag in (*sides, both))
    count = lambda bag, kind: sum(bool(kind(np.array([one]))[0]) for one in bag)
    numbers, names = ([count(bag, kind) for bag in (*sides, both)] for kind in (near._is_number, near._is_rare))
    agree = numbers[2] == numbers[0] and numbers[1] <= numbers[2] + 1
    alike = near.ALIKE_BY_NUMBERS[min(numbers[2], 3)] if agree else near.ALIKE
    alike = alike if numbers[0] or names[0] else near.USUAL_ALIKE
    low, high = sorted((mine, theirs))
    is_inside = shared >= near.CONTAINED * low and shared >= near.COVERED * high
    has_sentence = mine < near.HEAVY or shared >= near.SENTENCE * mine
    return (
        mine >= near.LIGHTEST and theirs >= near.LIGHTEST_TEXT
        and (is_inside or (2 * shared >= alike * (mine + theirs) and has_sentence))
        and numbers[2] >= near.NUMBERS * min(numbers[:2]) and names[2] >= near.NAMES * min(names[:2])
        and (names[2] > 0 or not names[0] or numbers[2] > 1)
    )  # fmt: skip


def test_statements_take_bounded_memory_in_any_order() -> None:
    """Catches a large corpus that fills the memory, and a sample that depends on what came first."""
    draw = np.random.default_rng(3)
    texts = [[np.unique(draw.integers(0, 2**32, 6, dtype=np.uint32)) for _ in range(2)] for _ in range(300)]
    one, other = Statements(limit=2000), Statements(limit=2000)
    for bags in texts:
        one.add(bags)
    for bags in reversed(texts + texts):
        other.add(bags)
    (arrays, one_in), (again, _) = one.result(), other.result()
    assert one_in > 1 and len(arrays["tokens"]) + hash_files.ENTRY * len(arrays["tokens.sentences"]) <= 2000
    assert all((arrays[name] == again[name]).all() for name in arrays)
    assert arrays["tokens.sizes"].sum() == len(arrays["tokens"])
    assert arrays["tokens.sentences"].sum() == len(arrays["tokens.sizes"])
