"""Right answers are right however they are written, wrong ones are wrong, and code is run only where that was asked
for."""

import base64
import json
import pickle
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DataError
from outrider.measure.tasks.names import TASKS, Prompt, load
from outrider.measure.tasks.scoring import code_in, final_answer, normal, run_tests, same, score, value

EQUAL = [
    ("1,234", "1234"), ("1{,}000", "1000"), ("12,345,678.50", "12345678.5"), ("$18", "18"), ("\\$3.50", "3.5"),
    ("5.", "5"), ("18 dollars", "18"), ("10 square feet", "10"), ("10\\text{ cm}", "10"), ("10 \\text{ cm}^2", "10"),
    ("50\\%", "50"), ("50%", "50"), ("90^\\circ", "90"), ("90^{\\circ}", "90"), ("\\frac12", "0.5"),
    ("\\dfrac{1}{2}", "1/2"), ("-\\tfrac{3}{4}", "\\frac{-3}{4}"), ("\\frac{3}{-4}", "-0.75"),
    ("\\frac{2}{4}", "\\frac12"), ("2\\frac{1}{2}", "2.5"), ("3\\sqrt2", "3\\sqrt{2}"), ("sqrt(2)", "\\sqrt{2}"),
    ("x = 5", "5"), ("x \\in [1,2]", "[1, 2]"), ("+7", "7"), ("-0", "0"), ("(0.5, 1)", "(\\frac{1}{2},1)"),
    ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,\\frac{\\pi}{2})"), ("1,-2", "1, -2.0"),
    ("(-\\infty, 0.50]", "(-\\infty,\\frac12]"), ("\\text{Evelyn}", "Evelyn"), ("\\text{(C)}", "C"),
    ("\\{1,2\\}", "\\{1.0, 2\\}"), ("x^{2}+1", "x^2 + 1"), ("$\\frac{1}{3}$", "1/3"), ("\\(7\\)", "7"), ("−3", "-3"),
    ("7/1", "7"), (".5", "0.50"),
]  # fmt: skip
UNEQUAL = [
    ("0.333", "1/3"), ("50%", "0.5"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("1,234", "1.234"), ("-5", "5"),
    ("\\pi", "3.14"), ("2\\sqrt{3}", "3\\sqrt{2}"), ("\\frac{1}{23}", "\\frac{12}{3}"), ("1,2", "12"), ("3 \\pi", "3"),
    ("3pi", "3"), ("x+1", "1"), ("2^{10}", "2^10"), ("10^1", "101"), ("\\frac{1}{0}", "0"), ("A", "B"),
    ("1000000000000000000000001", "1e24"), ("", "0"), ("0.1000000000000000000001", "0.1"), ("x^2", "2"),
]  # fmt: skip


def test_one_answer_written_in_two_ways_is_the_same() -> None:
    """Catches a right answer that scores 0 for its commas, its unit or its LaTeX; both ways round, and in its normal
    form."""
    assert [(one, other) for one, other in EQUAL if not (same(one, other) and same(other, one))] == []
    assert [one for one, _ in EQUAL if normal(normal(one)) != normal(one)] == []


def test_two_answers_are_not_the_same() -> None:
    """Catches normalising so much that wrong answers pass, and comparing in floating point."""
    assert [(one, other) for one, other in UNEQUAL if same(one, other) or same(other, one)] == []


@settings(max_examples=60, deadline=None)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_numbers_are_equal_exactly_when_their_values_are(one: Fraction, other: Fraction) -> None:
    """Catches a way of writing that reads as another number; no false alarm, whatever is drawn."""
    a, b = one.numerator, one.denominator
    ways = [f"{a}/{b}", f"\\frac{{{a}}}{{{b}}}", f"${a} / {b}$", f"\\dfrac{{{-a}}}{{{-b}}}"]
    ways += [f"{3 * a}/{3 * b} \\text{{ m}}"]
    if b == 1:
        ways += [f"{a:,}", f"{a}.00", f"{a} apples"]
    for way in ways:
        assert value(normal(way)) == one
        assert same(way, f"{other.numerator}/{other.denominator}") == (one == other)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(st.text("ab1 ,", max_size=3), lambda inner: st.builds("{{{}}}{}".format, inner, inner), max_leaves=6)
)
def test_a_box_is_read_to_its_own_end(inside: str) -> None:
    """Catches a fraction in a box that is cut at the first brace; no false alarm: escaped braces are not drawn."""
    assert final_answer(f"so \\boxed{{no}}, rather \\boxed {{{inside}}}; see 7}} {{") == inside


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first \\boxed{1}, then \\boxed{2}", "2"), ("\\boxed{\\frac{1}{2}} and \\boxed{3", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"), ("It makes $1,234. Or -5/3", "-5/3"), ("5-3", "3"),
        ("a total of $1,200.", "$1,200"),
        ("1,2345", "2345"), ("none", None), ("", None), ("about .5", ".5"), ("\\fboxed{4}", "4"),
    ],
)  # fmt: skip
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    """Catches a number of the way there that passes for the end, and a cut-off box that hides the whole one before
    it."""
    assert final_answer(text) == answer


def test_a_score_is_1_or_0_or_nothing() -> None:
    """Catches 0 where nothing was judged: it would pull a mean down."""
    prompt = Prompt("1", ("q",), reference="1,006")
    assert score("gsm8k", prompt, ["so \\boxed{1006}"]) == 1.0
    assert score("gsm8k", prompt, ["\\boxed{1006}", "\\boxed{5}"]) == 0.0
    assert score("gsm8k", prompt, ["I don't know"]) == 0.0
    for task, given_, answers in (
        ("gsm8k", Prompt("1", ("q",)), ["1"]), ("alpaca", prompt, ["1006"]), ("stdlib", prompt, ["1006"]),
        ("gsm8k", prompt, []), ("my/file.jsonl", prompt, ["1006"]), ("humaneval", HUMANEVAL, [RIGHT]),
    ):  # fmt: skip
        assert score(task, given_, answers) is None


def test_a_very_long_answer_is_no_number() -> None:
    """Catches minutes spent on, or an error from, a model that writes digits without end."""
    assert score("gsm8k", Prompt("1", ("q",), reference="5"), ["9" * 100_000]) == 0.0
    assert score("gsm8k", Prompt("1", ("q",), reference="5"), ["\\boxed{" * 2000]) == 0.0


STUB = 'from typing import List\n\n\ndef least(numbers: List[int]) -> int:\n    """The least of them."""\n'
HUMANEVAL = TASKS["humaneval"].prompt(
    {"task_id": "HumanEval/0", "prompt": STUB, "entry_point": "least",
     "test": "def check(candidate):\n    assert candidate([2, 1]) == 1\n    assert candidate([3]) == 3\n"}
)  # fmt: skip
RIGHT = (
    "Sure:\n```python\ndef least(numbers: List[int]) -> int:\n    return min(numbers)\n```\n"
    "Then:\n```python\n1 / 0\n```"
)
MBPP = TASKS["mbpp"].prompt(
    {"task_id": 2, "prompt": "Write a function to add.", "test_imports": ["import math"],
     "test_list": ["assert math.isclose(sum_up(1, 2), 3)", "assert set([sum_up(0, 0)]) == {0}"]}
)  # fmt: skip


@pytest.mark.parametrize(
    ("task", "prompt", "answer", "right"),
    [
        ("humaneval", HUMANEVAL, RIGHT, 1.0),
        ("humaneval", HUMANEVAL, "    return min(numbers)\n", 1.0),
        ("humaneval", HUMANEVAL, "```python\ndef least(numbers):\n    return max(numbers)\n```", 0.0),
        ("humaneval", HUMANEVAL, "```python\ndef least(numbers):\n    return min(numbers)", 1.0),
        ("mbpp", MBPP, "```python\ndef sum_up(a, b):\n    return a + b\n```", 1.0),
        ("mbpp", MBPP, "```python\nfrom math import hypot\ndef helper(): pass\ndef add(a, b):\n    return a + b\n```",
        1.0),
        ("mbpp", MBPP, "```python\ndef add(a, b):\n    return a - b\n```", 0.0),
    ],
)  # fmt: skip
def test_code_is_scored_by_its_tests(task: str, prompt: Prompt, answer: str, right: float) -> None:
    """Catches the wrong block of an answer, a stub's imports that are missing, and a name that the prompt never
    said."""
    assert score(task, prompt, [answer], allow_code=True) == right
    assert score(task, prompt, [answer]) is None


def test_the_code_of_an_answer_is_its_last_block() -> None:
    """Catches the command that installs something being run as Python, and a usage example chosen over the function."""
    answer = "```python\ndef f(): pass\n```\n```bash\npip install x\n```\n```\nf()\n```\n"
    assert code_in(answer) == "f()\n"
    assert code_in(answer, "f") == "def f(): pass\n"
    assert code_in("x = 1") == "x = 1"


def packed(cases: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def problem(name: str | None, public: list[dict[str, Any]], private: str) -> Prompt:
    metadata = json.dumps({} if name is None else {"func_name": name})
    row = {"public_test_cases": json.dumps(public), "private_test_cases": private, "metadata": metadata}
    return Prompt("p", ("q",), reference=lambda: row)


CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10.0"}]
METHOD = (
    "```python\nclass Solution:\n    def total(self, numbers: List[int], more):\n"
    "        return (sum(numbers) + more,)\n```"
)


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        (None, "```python\na, b = map(int, input().split())\nprint(a + b)\n```", 1.0),
        (None, "```python\nimport sys\ndef main():\n    print(sum(map(int, sys.stdin.buffer.read().split())))\n"
               "if __name__ == '__main__':\n    main()\n    sys.exit()\n```", 1.0),
        (None, "```python\nprint(sum(map(int, open(0).read().split())))\n```", 1.0),
        (None, "```python\nprint(3)\n```", 0.0),
        (None, "```python\nraise SystemExit\n```", 0.0),
        ("total", METHOD, 1.0),
        ("total", METHOD.replace("+ more", "- more"), 0.0),
    ],
)  # fmt: skip
def test_programs_are_scored_by_what_they_write_and_methods_by_what_they_give(name, answer, right) -> None:
    """Catches one way of reading standard input that sees nothing, cases that see each other, and private cases left
    out."""
    mine = CASES if name is None else [{"input": "[1, 2]\n3", "output": "[6]"}, {"input": "[]\n4", "output": "[4]"}]
    assert score("livecodebench", problem(name, mine[:1], packed(mine[1:])), [answer], allow_code=True) == right


class Trap:
    """A pickle that would leave a mark where it is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_packed_cases_are_taken_apart_and_never_executed(tmp_path: Path) -> None:
    """Catches unpickling what came from a network; the trap works, as the last line shows."""
    trap = pickle.dumps(Trap(tmp_path / "mark"))
    for content in (trap, pickle.dumps([1]), pickle.dumps(["[]", "[]"]), b"no pickle"):
        bad = problem(None, CASES, base64.b64encode(zlib.compress(content)).decode())
        with pytest.raises(DataError, match="the tests of livecodebench p can't be read"):
            run_tests("livecodebench", bad, "print(3)")
    with pytest.raises(DataError, match="can't be read"):
        run_tests("livecodebench", problem(None, [], "not base64!"), "print(3)")
    assert not (tmp_path / "mark").exists()
    pickle.loads(trap)
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("mbpp", {"task_id": 2, "prompt": "Add.", "test_imports": [], "test_list": []}),
        (
            "mbpp",
            {"task_id": 2, "prompt": "Add.", "test_imports": [], "test_list": ["assert add(1, 2) == 3", "assert ("]},
        ),
        ("humaneval", {"task_id": 2, "prompt": STUB, "entry_point": "least", "test": "def check(candidate:\n"}),
    ],
)
def test_tests_that_can_not_be_read_are_an_error_of_the_data(task: str, row: dict[str, Any]) -> None:
    """Catches a traceback hours after the start, and tests that no answer can pass counted as wrong answers."""
    with pytest.raises(DataError, match=f"the tests of {task} .*2 can't be read"):
        run_tests(task, TASKS[task].prompt(row), RIGHT)


def test_a_task_read_from_a_folder_is_scored(tmp_path: Path) -> None:
    """Catches a reference that the reader makes and the scorer does not know."""
    row = {"question_id": "1", "question_content": "q", "starter_code": "", "metadata": "{}",
           "public_test_cases": json.dumps(CASES), "private_test_cases": packed(CASES)}  # fmt: skip
    (tmp_path / "livecodebench.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = load("livecodebench", tmp_path).prompts
    assert (
        score("livecodebench", prompt, ["```python\nprint(sum(map(int, input().split())))\n```"], allow_code=True)
        == 1.0
    )
