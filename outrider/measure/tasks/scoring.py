"""Whether an answer is right: its final answer equals the reference exactly, or its code passes the task's tests.

Expressions are normalised and compared: numbers as exact fractions, lists element by element, all else as text without
the marks that LaTeX allows to differ.  Nothing is evaluated, so 2+2 is not 4, and sqrt(8) is not 2 sqrt(2).  Code runs
only where that is asked for, in `sandbox`.  Does not import torch.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from outrider.errors import DataError
from outrider.measure.tasks import sandbox
from outrider.measure.tasks.names import TASKS, Prompt, task_name

LONGEST = 1000
"""Characters of an expression.  A longer one is not a final answer, and reading it as a number would take long."""
CASES_BYTES = 512 << 20
"""Largest size of decoded test cases."""
PROGRAM_S = 60.0
"""Time limit for all cases of a program together."""


def score(task: str, prompt: Prompt, answers: Sequence[str], *, allow_code: bool = False) -> float | None:
    """1 where the last answer is right, 0 where it is wrong.  None where there is no score: no reference, no answer, a
    task that needs a judge, or a task of code without `allow_code`.  Raises DataError for a reference that can't be
    read."""
    known = TASKS.get(task_name(task))
    if known is None or known.score is None or prompt.reference is None or not answers:
        return None
    if known.score == "answer":
        return float(same(final_answer(answers[-1]), str(prompt.reference)))
    return float(run_tests(known.name, prompt, answers[-1]).passed) if allow_code else None


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?|(?<![\w.])-?\.\d+")


def final_answer(text: str) -> str | None:
    """The content of the last complete box, else the last number; None where there is neither."""
    boxed, numbers = _last_box(text), _NUMBER.findall(text)
    return boxed if boxed is not None else numbers[-1] if numbers else None


def _last_box(text: str) -> str | None:
    """The content of the last \\boxed{...} whose brace is closed, in one pass."""
    boxes = {found.end() for found in re.finditer(r"\\f?boxed\s*\{", text)}
    opened: list[int] = []
    last = (-1, -1)
    for found in re.finditer(r"(?<!\\)[{}]", text):
        if found[0] == "{":
            opened.append(found.end())
        elif opened and (start := opened.pop()) in boxes:
            last = max(last, (start, found.start()))
    return None if last[0] < 0 else text[slice(*last)]


def same(one: str | None, other: str | None) -> bool:
    """Whether two expressions are the same answer.  Symmetric; None equals nothing, not even None."""
    return one is not None and other is not None and normal(one) == normal(other)


_UNIT = re.compile(
    r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?$|(?<=\d)(?:\s+(?!pi\b|and\b|or\b|sqrt)[A-Za-z]{2,})+$"
)
_LABEL = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}")
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|degree|[!,;: %$()\[\]])|\^\{?\\circ\}?|[$~%°\s]")
_NAMED = re.compile(r"^[A-Za-z](?:=|\\in)(?=.)")
_SHORT = (
    (r"\\frac(\w)", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}"),
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z\\])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"([_^])\{(\w)\}", r"\1\2"),
    (r"^\(([A-Z])\)$", r"\1"),
)
"""Short ways of writing, each with the full one."""
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_DECIMAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
_RATIO = re.compile(r"(-?)(?:\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|([\d.]+)/([\d.]+))")
_MIXED = re.compile(r"(-?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")


def normal(expression: str) -> str:
    """The normal form of an expression: numbers as fractions in lowest terms, LaTeX without what may differ."""
    text = expression.strip().strip("$").strip().removesuffix(".")
    if len(text) > LONGEST:
        return text
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("{,}", ",").replace("−", "-")
    text = _DROPPED.sub("", _LABEL.sub(r"\1", _UNIT.sub("", text)))
    text = _NAMED.sub("", text).removeprefix("+")
    for short, whole in _SHORT:
        text = re.sub(short, whole, text)
    return _by_parts(text.replace("\\{", "{").replace("\\}", "}"))


def _by_parts(text: str) -> str:
    """A number, or a list or an interval with each of its parts, or the text as it is."""
    number = value(text)
    if number is not None:
        return str(number)
    starts = [place for place, depth in _depths(text) if depth == 0]
    if len(text) > 1 and text[0] in "([{" and text[-1] in ")]}" and starts == [len(text) - 1]:
        return text[0] + _by_parts(text[1:-1]) + text[-1]
    ends = [place for place in starts if text[place] == ","]
    if not ends:
        return text
    return ",".join(
        _by_parts(text[i:j]) for i, j in zip([0, *(end + 1 for end in ends)], [*ends, len(text)], strict=True)
    )


def _depths(text: str) -> list[tuple[int, int]]:
    """Each position, and how many brackets are open after it."""
    found, depth = [], 0
    for place, mark in enumerate(text):
        depth += (mark in "([{") - (mark in ")]}")
        found.append((place, depth))
    return found


def value(text: str) -> Fraction | None:
    """The exact number that a text without spaces writes; None where it is not a number."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    mixed = _MIXED.fullmatch(text)
    if mixed and int(mixed[4]):
        whole = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -whole if mixed[1] else whole
    ratio = _RATIO.fullmatch(text)
    parts = [part for part in ratio.groups()[1:] if part is not None] if ratio else []
    if not ratio or not all(map(_DECIMAL.fullmatch, parts)) or Fraction(parts[1]) == 0:
        return None
    found = Fraction(parts[0]) / Fraction(parts[1])
    return -found if ratio[1] else found


# ── code ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_FENCE = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def code_in(answer: str, name: str | None = None) -> str:
    """The Python of an answer: its last fenced block, one that defines `name` first; all of it where nothing is
    fenced."""
    blocks = [text for language, text in _FENCE.findall(answer) if language.lower() in ("", "python", "python3", "py")]
    if not blocks:
        return answer
    naming = [
        text
        for text in blocks
        if name is not None and re.search(rf"^\s*(?:def|class)\s+{re.escape(name)}\b", text, re.M)
    ]
    return (naming or blocks)[-1]


def run_tests(task: str, prompt: Prompt, answer: str) -> sandbox.Outcome:
    """Run an answer's code against the task's tests, in the sandbox.  The caller must have permission to run code."""
    return sandbox.run(*program(task, prompt, answer))


def program(task: str, prompt: Prompt, answer: str) -> tuple[str, str, float]:
    """Code, tests and time limit in seconds for an answer.  Raises DataError where the tests can't be read."""
    reference = prompt.reference() if callable(prompt.reference) else prompt.reference
    try:
        return PROGRAMS[task](reference, answer)
    except (LookupError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError, zlib.error) as error:
        raise DataError(
            f"the tests of {task} {prompt.id} can't be read: {type(error).__name__}: {error}; correct the row, or "
            "leave "
            f"it out"
        ) from None


def _humaneval(reference: Mapping[str, Any], answer: str) -> tuple[str, str, float]:
    stub, name = reference["stub"], reference["name"]
    ast.parse(reference["test"])
    # the stub comes first, for its imports and helpers; an indented answer is its body
    return f"{stub}\n\n{code_in(answer, name)}", f"{reference['test']}\n\ncheck({name})\n", 10.0


def _mbpp(reference: Mapping[str, Any], answer: str) -> tuple[str, str, float]:
    asserts = list(reference["asserts"])
    name, *_ = [_called(test) for test in asserts]
    found = ADOPT.format(name=name) if name else ""
    return code_in(answer, name), "\n".join([*reference["imports"], found, *asserts]), 10.0


ADOPT = """
if "{name}" not in globals():
    functions = [thing for thing in list(globals().values()) if type(thing).__name__ == "function"]
    own = [thing for thing in functions if thing.__module__ == "answer"]
    {name} = own[-1]
"""
"""The prompt does not name the function that its tests call, so the last function of an answer is taken."""


def _called(test: str) -> str | None:
    """The function that a test calls and that is not a builtin."""
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id):
            return node.func.id
    return None


def _livecodebench(reference: Mapping[str, Any], answer: str) -> tuple[str, str, float]:
    cases = [
        *json.loads(reference.get("public_test_cases") or "[]"),
        *_decoded(reference.get("private_test_cases") or "[]"),
    ]
    if not cases:
        raise ValueError("it has no test case")
    expected = [(case["input"], case["output"]) for case in cases]
    name = json.loads(reference.get("metadata") or "{}").get("func_name")
    code = code_in(answer)
    if name:
        return f"from typing import *\n{code}", FUNCTION.format(name=name, cases=json.dumps(expected)), PROGRAM_S
    return "", PROGRAM.format(code=code, cases=json.dumps(expected)), PROGRAM_S


def _decoded(encoded: str) -> list[dict[str, Any]]:
    """Test cases from JSON, or from base64 of zlib of a pickled text, which is read and never executed."""
    if encoded.lstrip().startswith("["):
        return json.loads(encoded)
    opened = zlib.decompressobj()
    pickled = opened.decompress(base64.b64decode(encoded, validate=True), CASES_BYTES)
    if opened.unconsumed_tail:
        raise ValueError(f"its cases decode to more than {CASES_BYTES} bytes")
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(pickled):  # reads the operations; runs nothing
        if "UNICODE" in operation.name:
            texts.append(str(argument))
        elif operation.name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"):
            raise ValueError(f"its pickle is more than a text: {operation.name}")
    if len(texts) != 1:
        raise ValueError(f"its pickle holds {len(texts)} texts, not one")
    return json.loads(texts[0])


FUNCTION = """
import json
ask = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
for given, wanted in json.loads({cases!r}):
    found = ask(*map(json.loads, given.splitlines()))
    assert json.loads(json.dumps(found)) == json.loads(wanted), "another result"
"""
"""Each case's arguments are a line of JSON each; tuples count as lists."""

PROGRAM = """
import decimal, io, json, os, sys
program = compile({code!r}, "answer", "exec")
def same(one, other):
    try:
        return one == other or decimal.Decimal(one) == decimal.Decimal(other)
    except decimal.InvalidOperation:
        return False
for given, wanted in json.loads({cases!r}):
    with open("given", "w") as file:
        file.write(given)
    file = os.open("given", os.O_RDONLY)
    if file != 0:  # a program that closed its input gave the number 0 to this file
        os.dup2(file, 0)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    written, out = io.BytesIO(), sys.stdout
    page = sys.stdout = io.TextIOWrapper(written, write_through=True)
    try:
        exec(program, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    finally:
        page.flush()
        sys.stdout = out
    found = written.getvalue().decode().split()
    assert len(found) == len(wanted.split()) and all(map(same, found, wanted.split())), "another output"
"""
"""Each case runs the program again; words are compared, numbers by their value."""

PROGRAMS: Mapping[str, Callable[[Mapping[str, Any], str], tuple[str, str, float]]] = {
    "humaneval": _humaneval, "mbpp": _mbpp, "livecodebench": _livecodebench,
}  # fmt: skip
