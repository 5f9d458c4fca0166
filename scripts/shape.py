"""The shape of the package: code lines by package, the largest files, the longest functions, imports inside functions.

$ python scripts/shape.py           # a report
$ python scripts/shape.py --check   # fails if a package has grown beyond scripts/sizes.toml
$ python scripts/shape.py --write   # rewrites the table; the diff says what grew, and the commit why

Code lines are lines with code on them: blanks, comments and docstrings are not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"
SIZES = Path(__file__).with_name("sizes.toml")
TOP_LEVEL = "top-level modules"
MOST = 5
"""Number of files and functions listed."""
SLACK = 20
"""Code lines that a package may grow by before the table must be raised."""
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with sizes.toml")
    parser.add_argument("--write", action="store_true", help="write sizes.toml")
    options = parser.parse_args()
    files = sorted(PACKAGE.rglob("*.py"))
    trees = {file: ast.parse(file.read_text()) for file in files}
    lines = {file: code_lines(file, trees[file]) for file in files}
    packages = by_package(lines)
    if options.write:
        rows = (f'"{package}" = {count}\n' for package, count in sorted(packages.items()))
        SIZES.write_text("# Code lines of each package, by `python scripts/shape.py --write`.\n" + "".join(rows))
    elif options.check:
        return check(packages)
    else:
        report(trees, lines, packages)
    return 0


def by_package(lines: dict[Path, int]) -> Counter[str]:
    packages = Counter[str]()
    for file, count in lines.items():
        parts = file.relative_to(PACKAGE).parts
        packages[parts[0] if len(parts) > 1 else TOP_LEVEL] += count
    return packages


def check(packages: Counter[str]) -> int:
    """The exit code: 1 if a package is larger than the table allows, or is missing from it."""
    sizes = tomllib.loads(SIZES.read_text())
    grown = [
        f"{package} has {count:,} code lines, and scripts/sizes.toml allows {sizes.get(package, 0):,}"
        for package, count in sorted(packages.items())
        if count > sizes.get(package, 0) + SLACK
    ]
    for line in grown:
        print(f"{line}; simplify, or raise it with `python scripts/shape.py --write` and say why in the commit")
    return 1 if grown else 0


def report(trees: dict[Path, ast.Module], lines: dict[Path, int], packages: Counter[str]) -> None:
    functions = [(node.end_lineno - node.lineno + 1, f"{name(file)}.{node.name}") for file, node in functions_of(trees)]
    lengths = sorted(length for length, _ in functions)
    print(f"{sum(lines.values()):,} code lines in {len(lines)} files")
    print("packages:          " + ", ".join(f"{package} {count:,}" for package, count in packages.most_common()))
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
    sys.exit(main())
