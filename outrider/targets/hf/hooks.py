"""Inputs and outputs of modules, recorded during a pass.

A hook stays on its module, which has at most one no matter how often it is loaded.  It records for the pass that is
open in its own thread (a context variable), so passes of one model may run in parallel.
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
    """Sets the variable within this context, in this thread."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def catching(modules: Iterable[nn.Module]) -> AbstractContextManager[dict[nn.Module, Any]]:
    """Within this context, inputs or outputs of these modules in this thread are recorded in the dict, by module."""
    return during(_caught, dict.fromkeys(modules))


def replacing(module: nn.Module, values: Tensor) -> AbstractContextManager[object]:
    """Within this context, the last rows of this watched module's output in this thread are replaced by these [B, P,
    H]."""
    return during(_replaced, (module, values))


def selecting(module: nn.Module, rows: Tensor) -> AbstractContextManager[object]:
    """Within this context, this module, whose input is watched, receives only these rows [B, K] of its input [B, S, H].

    The whole input is recorded.
    """
    return during(_selected, (module, rows))


def watch_input(module: nn.Module) -> None:
    """Record the module's first argument in `catching`."""
    if _of_input not in module._forward_pre_hooks.values():
        with _LOCK:
            if _of_input not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_of_input)


def watch_output(module: nn.Module) -> None:
    """Record the module's output in `catching`, or the first one of a tuple."""
    if _of_output not in module._forward_hooks.values():
        with _LOCK:
            if _of_output not in module._forward_hooks.values():
                module.register_forward_hook(_of_output)


def wrap(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the module's `forward` with `function(module, forward, …)`, unless that has already been done.

    A partial, not a closure, so that a copy of the model calls its own modules.
    """
    current = vars(module).get("forward")
    if not (isinstance(current, functools.partial) and current.func is function):
        module.forward = functools.partial(function, module, module.forward)


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, for calls in the current thread only."""
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
