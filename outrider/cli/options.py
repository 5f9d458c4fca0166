"""Options that several verbs share, and options made from the fields of a config.

A parameter annotated with `Fields` stands for several options.  Their names, types, defaults and help are those of the
config's fields, so they are written once.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from rich.markup import escape

from outrider import config as configs

RunFile = Annotated[Path, typer.Argument(help="Run file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.path=value, such as train.lr=3e-4", show_default=False)
]
TargetName = Annotated[str, typer.Option("--target", help="`demo`, `smollm2`, a folder, or a Hugging Face id.")]
DrafterName = Annotated[
    str | None, typer.Option("--drafter", help="Drafter kind or checkpoint folder; no drafts unless given.")
]
DrafterSettings = Annotated[
    list[str] | None, typer.Option("--set", help="Drafter setting, key=value; can be repeated.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the chat template to the prompt.")]
KeyFrom = Annotated[
    str | None, typer.Option("--key-from", metavar="VARIABLE", help="Environment variable with the API key.")
]
JsonTo = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - is standard output.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Write more than 10 GB without asking.")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip and count unreadable rows instead of stopping at the first.")
]

TARGET_OPTIONS = "name=target quantize activations tensor_parallel compile"
DRAFTERS_OWN = {"name": "the drafter's own"}
"""Default target of verbs that read it from a trained drafter."""


class Fields(NamedTuple):
    """Annotation of a parameter that stands for some fields of a config."""

    schema: Any
    """A pydantic model or dataclass."""
    names: str
    """Field names, as `field=option` where the option has another name."""
    section: str | None = None
    """Section of a run file.  If set, the verb gets overrides such as `serve.port=0` for the options that were given;
    otherwise it gets a `schema`."""
    defaults: Mapping[str, Any] = {}
    """Defaults of required fields; with a section, they are only shown as the default."""

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Field → the parameter of its option."""
        pairs = (name.partition("=") for name in self.names.split())
        return {field: self._parameter(field, option or field) for field, _, option in pairs}

    def _parameter(self, field: str, option: str) -> inspect.Parameter:
        info = self.schema.__pydantic_fields__[field]
        default = self.defaults.get(field) if info.is_required() else info.get_default(call_default_factory=True)
        kind = _option_type(info.annotation)
        flag = "--" + option.replace("_", "-")
        if kind is bool and default is not False:
            flag += f"/--no-{flag[2:]}"
        shown: Any = True
        if isinstance(default, tuple) or (self.section is not None and default is not False):
            shown = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default or "")
            default = None  # not on the command line
        text = escape(" ".join((info.description or "").split()))
        annotation: Any = Annotated[
            kind if default is not None else kind | None, typer.Option(flag, help=text, show_default=shown or False)
        ]
        return inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, parameters: Mapping[str, inspect.Parameter], values: Mapping[str, Any]) -> Any:
        """Arguments for the verb.  values: by option."""
        fields = {}
        for field, parameter in parameters.items():
            if (value := values[parameter.name]) != parameter.default:
                is_tuple = get_origin(self.schema.__pydantic_fields__[field].annotation) is tuple
                fields[field] = [part for part in map(str.strip, value.split(",")) if part] if is_tuple else value
        if self.section is not None:
            return [f"{self.section}.{field}={configs.to_yaml(value)}" for field, value in fields.items()]
        fields = {**self.defaults, **fields}
        return configs.build(self.schema, fields) if issubclass(self.schema, BaseModel) else self.schema(**fields)


def _option_type(annotation: Any) -> Any:
    """The type of the option for a field: `int` for `PositiveInt | None`, text for a tuple (`a,b`), a list for a
    sequence (the option can be repeated)."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return next(_option_type(each) for each in args if each is not NoneType)
    if origin is Annotated:
        return _option_type(args[0])
    if origin is Sequence:
        return GenericAlias(list, args)
    return str if origin is tuple else annotation


def with_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a verb: replaces parameters annotated with `Fields` by options."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, tuple[Fields, dict[str, inspect.Parameter]]] = {}
    signature: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        metadata = getattr(hints[parameter.name], "__metadata__", ())
        if fields := next((each for each in metadata if isinstance(each, Fields)), None):
            groups[parameter.name] = (fields, fields.parameters())
            signature += groups[parameter.name][1].values()
        else:
            annotation = hints[parameter.name]
            signature.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:
        configs_by_name = {name: fields.value(parameters, values) for name, (fields, parameters) in groups.items()}
        names_of_options = {each.name for _, parameters in groups.values() for each in parameters.values()}
        verb(**{name: value for name, value in values.items() if name not in names_of_options}, **configs_by_name)

    call.__name__, call.__doc__, call.__module__ = verb.__name__, verb.__doc__, verb.__module__
    call.__annotations__ = {each.name: each.annotation for each in signature}
    call.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return call
