"""Inputs and outputs of modules during a pass, recorded for that pass alone.

Hooks stay on a module once they are there, however often it is loaded.  They write for the pass that is open in their
own thread (its context), so passes of one model may run in parallel.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

_LOCK = threading.Lock()
_replaced: ContextVar[tuple[nn.Module, Tensor] | None] = ContextVar("replaced", default=None)
_selected: ContextVar[tuple[nn.Module, Tensor] | None] = ContextVar("selected", default=None)
_caught: ContextVar[dict[nn.Module, Tensor | None] | None] = ContextVar("caught", default=None)


@contextmanager
def during(variable: ContextVar[T], value: Any) -> Iterator[Any]:
    """While this is open, the variable has this value in this thread."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def catching(modules: Iterable[nn.Module]) -> AbstractContextManager[dict[nn.Module, Any]]:
    """While this is open, inputs or outputs of these modules in this thread are recorded under them."""
    return during(_caught, dict.fromkeys(modules))


def replacing(module: nn.Module, values: Tensor) -> AbstractContextManager[object]:
    """While this is open, the last rows of this watched module's output in this thread are replaced by these [B, P,
    H]."""
    return during(_replaced, (module, values))


def selecting(module: nn.Module, rows: Tensor) -> AbstractContextManager[object]:
    """While this is open, this module, whose input is watched, gets only these rows [B, K] of its input [B, S, H].

    What is caught is the whole input.
    """
    return during(_selected, (module, rows))


def watch_input(module: nn.Module) -> None:
    """Have the module's first argument caught."""
    if _of_input not in module._forward_pre_hooks.values():
        with _LOCK:
            if _of_input not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_of_input)


def watch_output(module: nn.Module) -> None:
    """Have the module's output caught, of a tuple the first."""
    if _of_output not in module._forward_hooks.values():
        with _LOCK:
            if _of_output not in module._forward_hooks.values():
                module.register_forward_hook(_of_output)


def wrap(module: nn.Module, function: Callable[..., Any]) -> None:
    """Have the module's `forward` called by `function(module, forward, …)`, however often this is asked for.

    A partial, not a closure: a copy of the model then calls its own modules.
    """
    current = vars(module).get("forward")
    if not (isinstance(current, functools.partial) and current.func is function):
        module.forward = functools.partial(function, module, module.forward)


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for the calls of the thread that asks; it does nothing in those of others."""
    thread = threading.get_ident()

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return called


def _of_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    caught = _caught.get()
    if caught is not None and module in caught:
        caught[module] = inputs[0]
    selected = _selected.get()
    if selected is None or selected[0] is not module:
        return None
    return (inputs[0].gather(1, selected[1][..., None].expand(-1, -1, inputs[0].shape[-1])), *inputs[1:])


def _of_output(module: nn.Module, _inputs: object, output: Any) -> Any:
    replaced = _replaced.get()
    if replaced is not None and replaced[0] is module:
        return torch.cat([output[:, : -replaced[1].shape[1]], replaced[1].to(output)], 1)
    caught = _caught.get()
    if caught is not None and module in caught:
        caught[module] = output[0] if isinstance(output, tuple) else output
    return None
