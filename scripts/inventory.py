"""Print everything a user can name, a sorted line per fact: verbs, settings, kinds, formats, public names and so on.

python scripts/inventory.py > docs/inventory.txt
python scripts/inventory.py --against docs/inventory.txt    # missing (-) and new (+); exits with 1 if any is missing

Every list is taken from the code: from the modules named below, or else from the only file of the package that defines
it.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

import outrider
from outrider.policies.named import LOSSY

HOMES = {
    "app": "cli cli.app cli.main", "matrix": "export.formats", "train": "training.trainer",
    "evaluate": "measure.run", "ENGINES": "engines.engine",
    "NAMES": "traffic.counters",
    "FORMATS": "traffic.logs.formats", "Sampling": "sampling.settings decoding.sampling sampling",
    "RunConfig": "runs.file", "kinds": "drafters drafters.registry",
}  # fmt: skip
"""Modules that may hold a name; the first that has it counts.  Names defined only once in the package need no entry."""
TABLES = dict(
    task="TASKS", loss="DIVERGENCES", weighing="WEIGHINGS", limit="LIMITS", log="FORMATS", precision="PRECISIONS"
)
ROOT = Path(outrider.__file__).parent
TEXTS = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text(
        encoding="utf-8"
    )
    for path in sorted(ROOT.rglob("*.py"))
}
is_section = lambda kind: isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind))


def home(name: str) -> Any:
    """The object a name refers to in the package."""
    defining = [
        place for place, text in TEXTS.items() if re.search(rf"^(class |def )?{name}\b *[:=(]", text, re.MULTILINE)
    ]
    for place in [
        *(f"outrider.{place}" for place in HOMES.get(name, "").split()),
        *(defining if len(defining) == 1 else ()),
    ]:
        if place in TEXTS and hasattr(module := import_module(place), name):
            return getattr(module, name)
    raise SystemExit(f"{name} was not found (defined in: {', '.join(defining) or 'no file'}); add its module to HOMES")


def said(kind: Any) -> str:
    """A type.  Section classes are left out, since nobody writes their names; choices have their own lines."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [limit for given in args[1:] for limit in getattr(given, "metadata", [given])]
        return " ".join(
            [said(args[0]), *(repr(limit) for limit in limits if type(limit).__module__ == "annotated_types")]
        )
    if origin is Literal or is_section(kind):
        return "section" if origin is None else "choice"
    if origin in (Union, UnionType):
        return " | ".join(map(said, args))
    if isinstance(kind, list) or args:
        return f"{getattr(origin, '__name__', '')}[{', '.join(map(said, args or kind))}]"
    return "..." if kind is ... else "None" if kind is NoneType else getattr(kind, "__name__", str(kind))


def default(value: Any) -> str:
    """The end of a line; `...` means no default."""
    word = "section" if is_section(type(value)) else getattr(value, "__name__", repr(value))
    return "" if value is ... or value is inspect.Parameter.empty else f" = {re.sub(' at 0x[0-9a-f]+', '', word)}"


def settings(head: str, schema: Any, given: Any = None) -> Iterator[str]:
    """Every field with its choices and inner fields.  given: the section's default value, if there is one."""
    if not hasattr(schema, "model_fields"):
        hints = get_type_hints(schema, include_extras=True)
        found = [(key, hints[key], each.default) for key, each in inspect.signature(schema).parameters.items()]
    else:
        first = lambda info: ... if info.is_required() else info.get_default(call_default_factory=True)
        found = [
            (key, Annotated[each.annotation, *each.metadata, 0], first(each))
            for key, each in schema.model_fields.items()
        ]
    for name, kind, usual in found:
        value, parts = usual if given is None else getattr(given, name), [kind]
        yield f"{head}{name}: {said(kind)}{default(value)}"
        for part in parts:  # grows inside the loop
            if get_origin(part) is Literal:
                yield from (f"{head}{name} may be {choice!r}" for choice in get_args(part))
            elif is_section(part) and part is not schema:
                yield from settings(f"{head}{name}.", part, value if isinstance(value, part) else None)
            parts += [] if get_origin(part) is Literal else get_args(part)


def called(head: str, what: Any) -> Iterator[str]:
    """A callable and its arguments, numbered if they can be positional."""
    yield head
    for place, each in enumerate(inspect.signature(what).parameters.values(), 1):
        by_place = f"{place} " if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) else ""
        yield f"{head} takes {by_place}{each.replace(annotation=each.empty, default=each.empty)}{default(each.default)}"


def verbs(command: Any, path: str) -> Iterator[str]:
    load = getattr(command, "load", lambda name: command.commands[name])  # verbs may be loaded lazily
    for name in getattr(command, "commands", ()):
        yield from (f"{path} {name}", *verbs(load(name), f"{path} {name}"))
    for place, each in enumerate(sorted(command.params, key=lambda each: each.opts[0].startswith("-")), 1):
        kind = said(each.type_descriptor.annotation) if hasattr(each, "type_descriptor") else each.type.name
        kind += "".join(
            f" {end}={getattr(each, end)}" for end in ("min", "max") if getattr(each, end, None) is not None
        )
        for key in [*each.opts, *each.secondary_opts]:
            what = key if key[0] == "-" else f"{place} {key}"
            yield f"{path} {what}: {kind}{default(... if each.required else each.default)}"


def facts() -> Iterator[str]:
    yield from verbs(home("app"), "verb")
    run = [
        *settings("setting ", home("RunConfig")),
        *settings("setting gate.", get_type_hints(home("policy_of"))["return"]),
    ]
    yield from (*run, *settings("sampling ", home("Sampling")), *settings("metric report.", home("Report")))
    yield from ("optimizer " + line.split("'")[1] for line in run if line.startswith("setting train.optimizer may be "))
    for kind in home("kinds")():
        registry = sys.modules[home("kinds").__module__]
        module, learns = registry.find(kind), registry.trained(kind) is not None
        yield from (f"kind {kind}{fact}" for fact in ("", " can be trained")[: 1 + learns])
        yield from settings(f"setting drafter[{kind}].", module.Config)
    for place in (place for place, text in TEXTS.items() if re.search(r"def (budget|keep)\(", text)):
        ours = [
            each for each in vars(import_module(place)).values() if isinstance(each, type) and each.__module__ == place
        ]
        ours = [
            each for each in ours if {"budget", "keep"} <= {*dir(each)} and not getattr(each, "_is_protocol", False)
        ]
        yield from (line for each in ours for line in called(f"policy {each.__name__}", each))
    rules = {name: getattr(LOSSY.find(name), name) for name in LOSSY.own()}
    yield from (line for name, rule in rules.items() for line in called(f"rule {name}", rule))
    yield from (
        f"format {row['format']} {row['kind']} {way}" for row in home("matrix")() for way in row if row[way] is True
    )
    yield from (f"{sort} {name}" for sort, table in TABLES.items() for name in home(table))
    for name, engine in home("ENGINES").items():
        yield from (f"engine {name}", *(f"engine {name} {kind}" for kind in engine.methods))
    for name in {*outrider.__all__, *getattr(outrider, "_MODULES", ())}:
        found = getattr(outrider, name)
        yield from called(f"public {name}", home(name) if inspect.ismodule(found) else found)
        bases = [base for base in getattr(found, "__mro__", ()) if base.__module__.startswith("outrider")]
        yield from (f"public {name}.{what}" for base in bases for what in vars(base) if not what.startswith("_"))
    yield from (
        f"metric {row.server} {key}: {name}" for row in home("NAMES") for key, name in row._asdict().items() if name
    )
    errors = [
        each for each in vars(sys.modules[home("OutriderError").__module__]).values() if hasattr(each, "with_traceback")
    ]
    yield from (f"error {each.__name__} is {base.__name__}" for each in errors for base in each.__mro__[1:-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="an inventory to compare with")
    against, now = parser.parse_args().against, set(facts())
    before = now if against is None else set(against.read_text(encoding="utf-8").splitlines())
    lines = now if against is None else {f"- {line}" for line in before - now} | {f"+ {line}" for line in now - before}
    sys.stdout.writelines(f"{line}\n" for line in sorted(lines))
    sys.exit(bool(before - now))


if __name__ == "__main__":
    main()
