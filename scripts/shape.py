"""The shape of the package: code lines by room, the largest files, the longest functions, imports inside functions.

$ python scripts/shape.py

A report, not a limit.  Code lines are those with code on them: no blanks, comments or docstrings.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"
MOST = 5
"""Files and functions that are named."""
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    lines, rooms = {file: code_lines(file, trees[file]) for file in files}, Counter[str]()
    for file, count in lines.items():
        rooms[file.relative_to(PACKAGE).parts[0]] += count
    functions = [(node.end_lineno - node.lineno + 1, f"{name(file)}.{node.name}") for file, node in functions_of(trees)]
    lengths = sorted(length for length, _ in functions)
    print(f"{sum(lines.values()):,} code lines in {len(files)} files")
    print("rooms:             " + ", ".join(f"{room} {count:,}" for room, count in rooms.most_common()))
    print(
        "largest files:     " + ", ".join(f"{name(file)} {count}" for file, count in Counter(lines).most_common(MOST))
    )
    middle, high = statistics.median(lengths), lengths[len(lengths) * 99 // 100]
    print(f"functions:         {len(lengths):,}, median {middle:.0f} lines, p99 {high}")
    longest = sorted(functions, reverse=True)[:MOST]
    print("longest functions: " + ", ".join(f"{where} {length}" for length, where in longest))
    print("deferred imports:  " + (", ".join(deferred(trees)) or "none"))


def code_lines(file: Path, tree: ast.Module) -> int:
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    code = {line for one in tokens if one.type not in SILENT for line in range(one.start[0], one.end[0] + 1)}
    return len(code - texts)


def functions_of(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield file, node


def deferred(trees: dict[Path, ast.Module]) -> list[str]:
    """Imports of the package's own modules inside functions."""
    return [
        f"{name(file)} -> {node.module}"
        for file, function in functions_of(trees)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name)
    ]


def name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


if __name__ == "__main__":
    main()
