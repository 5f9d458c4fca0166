"""How many small random changes of the package the tests catch.

python scripts/mutants.py RECORDING [--beside FOLDER RECORDING] [--seed 0] [--count 200] [--json FILE]

A mutant is the package with one operator, constant or condition changed; the selection depends only on the seed and the
package's source.  RECORDING is a folder written by `scripts/recording.py`: each mutant is tried with the tests that run
its line.  With `--beside`, mutants that the tests miss are also tried with the tests of another checkout (an earlier
commit's, with its own recording), which shows what has been lost since.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import planting
from recording import Recording

LIMIT_S = 600
"""CPU seconds for the tests of one mutant."""


class Mutant(NamedTuple):
    path: Path
    start: tuple[int, int]
    """Line (from 1) and column in bytes."""
    end: tuple[int, int]
    new: str
    says: str


OPPOSITE: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Every variant of the node with one thing changed."""
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[at] = OPPOSITE[type(operator)]()
            yield other
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in OPPOSITE:
        other = copy.deepcopy(node)
        other.op = OPPOSITE[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)


def candidates(path: Path, text: str) -> Iterator[Mutant]:
    """Every mutant of a file.  Annotations, strings and type-checking code are left alone."""
    stack: list[ast.AST] = [ast.parse(text)]
    while stack:
        node = stack.pop()
        for name, value in reversed(list(ast.iter_fields(node))):
            if name in ("annotation", "returns", "type_params") or isinstance(node, ast.JoinedStr):
                continue
            stack += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
            yield mutant(path, node.test, ast.UnaryOp(ast.Not(), node.test))
        if isinstance(node, ast.expr):
            for other in changed(node):
                yield mutant(path, node, other)


def mutant(path: Path, node: ast.expr, other: ast.AST) -> Mutant:
    new = f"({ast.unparse(other)})"
    start, end = (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Mutant(path, start, end, new, f"{path}:{node.lineno}: {ast.unparse(node)} -> {new[1:-1]}")


def apply(text: str, change: Mutant) -> str:
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    (first, begin), (last, end) = change.start, change.end
    head, tail = lines[first - 1][:begin], lines[last - 1][end:]
    return b"".join([*lines[: first - 1], head, change.new.encode(), tail, *lines[last:]]).decode()


def sample(root: Path, seed: int, count: int) -> list[Mutant]:
    """At most one mutant per line; every line of the package that can be changed is equally likely."""
    by_line: dict[tuple[Path, int], list[Mutant]] = {}
    for path in sorted((root / "outrider").rglob("*.py")):
        name = path.relative_to(root)
        for each in candidates(name, path.read_text()):
            by_line.setdefault((name, each.start[0]), []).append(each)
    random_ = random.Random(seed)
    mutants: list[Mutant] = []
    places = sorted(by_line)
    random_.shuffle(places)
    for place in places:
        each = random_.choice(by_line[place])
        try:
            ast.parse(apply((root / each.path).read_text(), each))
        except SyntaxError:  # for example a constant in a pattern
            continue
        mutants.append(each)
        if len(mutants) == count:
            break
    return mutants


_BENCHES: list[tuple[planting.Bench, Recording]] = []


def _begin(suites: list[tuple[Path, Path]]) -> None:
    """Copies of each checkout, all with this checkout's package."""
    for root, recording in suites:
        _BENCHES.append((planting.Bench(root), Recording(recording)))


def _try(change: Mutant) -> list[planting.Trial]:
    trials: list[planting.Trial] = []
    for bench, recording in _BENCHES:
        text = apply((bench.copy / change.path).read_text(), change)
        tests = recording.covering(change.path, range(change.start[0], change.end[0] + 1))
        with bench.planted([(change.path, text)]):
            trials.append(planting.run_tests(bench.copy, tests, recording.costs, LIMIT_S))
        if trials[-1].failed:
            break
    return trials


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--beside", type=Path, nargs=2, metavar=("FOLDER", "RECORDING"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    suites = [(planting.ROOT, options.recording), *([tuple(options.beside)] if options.beside else [])]
    for root, _ in suites[1:]:
        if planting.package_digest(root) != planting.package_digest(planting.ROOT):
            parser.error(f"{root}/outrider differs from this checkout's: the same mutants must be planted in both")
    mutants = sample(planting.ROOT, options.seed, options.count)
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, initializer=_begin, initargs=(suites,)) as pool:
        pending = {pool.submit(_try, each): each for each in mutants}
        for done in as_completed(pending):
            trials = done.result()
            says = pending[done].says
            rows.append({"mutant": says, "trials": [trial._asdict() for trial in trials]})
            print(
                f"{len(rows):4} {says[:90]:90} " + " | ".join((trial.failed or ("-",))[0] for trial in trials),
                flush=True,
            )
    caught = [sum(any(trial["failed"] for trial in row["trials"][: n + 1]) for row in rows) for n in range(len(suites))]
    result = {
        "seed": options.seed,
        "mutants": len(rows),
        "caught": caught[0],
        "caught_with_beside": caught[-1],
        "untested_lines": sum(not any(trial["tests"] for trial in row["trials"]) for row in rows),
        "rows": sorted(rows, key=lambda row: row["mutant"]),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "rows"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
