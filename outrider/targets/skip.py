"""A model without some of its sublayers: while a set is left out, stand-ins answer in place of their modules.

They answer the thread that leaves the set out; a pass of another thread meets the modules themselves, `model.generate` too.

Which child of a decoder layer is its attention is seen by who writes to the cache; its MLP is the one other child with weight
matrices.  An attention that is left out adds nothing and writes no keys; a layer of which both are left out hands its input on.
A family whose layer without both is anything but the identity is refused: what it adds up would not be its residual stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import DrafterError, TargetError
from outrider.targets import hooks
from outrider.targets.protocol import Skip, SkipsLayers, Target

Shape = int | None
"""Length of the tuple that a module returns; None for a bare tensor."""
StandIn = Callable[..., Any]


@dataclass(frozen=True)
class Sublayers:
    """Modules that can be left out, by layer, each with the shape of its answer."""

    layers: list[tuple[nn.Module, Shape]]
    attention: dict[int, tuple[nn.Module, Shape]]
    mlp: dict[int, tuple[nn.Module, Shape]]

    @property
    def all(self) -> Skip:
        return Skip(frozenset(self.attention), frozenset(self.mlp))

    def left_out(self, skip: Skip) -> AbstractContextManager[None]:
        """While this is open, the model runs without these."""
        return _replaced(dict(self._stand_ins(skip)))

    def _stand_ins(self, skip: Skip) -> Iterator[tuple[nn.Module, StandIn]]:
        whole = skip.attention & skip.mlp
        for layer in whole:
            module, shape = self.layers[layer]
            yield module, _answering(shape, lambda hidden: hidden)
        for modules, which in ((self.attention, skip.attention), (self.mlp, skip.mlp)):
            for layer in which - whole:
                module, shape = modules[layer]
                yield module, _answering(shape, torch.zeros_like)

    def silent(self) -> Iterator[tuple[nn.Module, StandIn]]:
        """Stand-ins for every sublayer, the layers themselves left to run."""
        for module, shape in (*self.attention.values(), *self.mlp.values()):
            yield module, _answering(shape, torch.zeros_like)


@contextmanager
def _replaced(stand_ins: Mapping[nn.Module, StandIn]) -> Iterator[None]:
    """While this is open, stand-ins answer this thread for these modules; on every way out each is what it was."""
    token = _stand_ins.set({**_stand_ins.get(), **stand_ins})
    _divert(stand_ins)
    try:
        yield
    finally:
        _restore(stand_ins)
        _stand_ins.reset(token)


_stand_ins: ContextVar[Mapping[nn.Module, StandIn]] = ContextVar("stand_ins", default=MappingProxyType({}))
"""Who answers for a module in this thread."""


@dataclass
class _Diverted:
    """A module whose calls are looked up in `_stand_ins`."""

    own: Any
    """Its own attribute `forward`, None where it is its class's."""
    users: int = 0


_LOCK = threading.Lock()
_diverted: dict[nn.Module, _Diverted] = {}


def _divert(modules: Iterable[nn.Module]) -> None:
    with _LOCK:
        for module in modules:
            if module not in _diverted:
                _diverted[module] = _Diverted(vars(module).get("forward"))
                vars(module)["forward"] = functools.partial(_answer, module, module.forward)
            _diverted[module].users += 1


def _restore(modules: Iterable[nn.Module]) -> None:
    """The last that leaves makes each module what it was."""
    with _LOCK:
        for module in modules:
            _diverted[module].users -= 1
            if _diverted[module].users:
                continue
            own = _diverted.pop(module).own
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def _answer(module: nn.Module, forward: StandIn, *args: Any, **kwargs: Any) -> Any:
    return _stand_ins.get().get(module, forward)(*args, **kwargs)


def _answering(shape: Shape, answer: Callable[[Tensor], Tensor]) -> StandIn:
    def forward(*args: Any, **kwargs: Any) -> Any:
        found = answer(args[0] if args else kwargs["hidden_states"])
        return found if shape is None else (found, *[None] * (shape - 1))

    return forward


def learn(target: Any) -> Sublayers:
    """Find the sublayers by watching one pass, and try the model without them.  target: a TransformersTarget.

    Raises TargetError where nothing can be left out: a recurrent state, sublayers that can't be told, a layer that is not the
    identity without them.
    """
    if target.family.is_recurrent:
        raise _refused(target, "some of its layers carry a recurrent state, which follows one text")
    watch = _Watch(target)
    found = Sublayers(watch.shaped(target), watch.attention, watch.mlp)
    if not found.attention and not found.mlp:
        raise _refused(target, "its layers have no attention or MLP of their own that could be told")
    _try(target, found)
    return found


def _refused(target: Any, reason: str) -> TargetError:
    kind = target.model.config.model_type
    return TargetError(f"{target.spec.name} ({kind}) can't run without some of its layers: {reason}; choose another drafter")


class _Watch:
    """One pass of one token, and what the children of every decoder layer were seen to do."""

    @torch.inference_mode()
    def __init__(self, target: Any):
        self.attention: dict[int, tuple[nn.Module, Shape]] = {}
        self.mlp: dict[int, tuple[nn.Module, Shape]] = {}
        self.returned: dict[nn.Module, Any] = {}
        self.open: list[nn.Module] = []
        self.writers: set[nn.Module] = set()
        layers = list(target._decoder_layers)
        children = [child for layer in layers for child in (layer, *layer.children())]
        enter = hooks.of_this_thread(lambda module, _args: self.open.append(module))
        leave = hooks.of_this_thread(self._close)
        handles = [child.register_forward_pre_hook(enter) for child in children]
        handles += [child.register_forward_hook(leave) for child in children]
        cache = target.allocate(1, 2)
        update = cache.update

        def write(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.writers.add(self.open[-1])
            return update(*args, **kwargs)

        cache.update = write
        try:
            target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1])
        finally:
            for handle in handles:
                handle.remove()
        for index, layer in enumerate(layers):
            self._sort(index, layer)

    def _close(self, module: nn.Module, _args: Any, output: Any) -> None:
        self.open.pop()
        self.returned[module] = output

    def _sort(self, index: int, layer: nn.Module) -> None:
        """Which child of a layer is its attention and which its MLP, where that is certain."""
        called = [child for child in layer.children() if child in self.returned]
        writers = [child for child in called if child in self.writers]
        others = [child for child in called if child not in self.writers and any(w.dim() > 1 for w in child.parameters())]
        for which, children in ((self.attention, writers), (self.mlp, others)):
            if len(children) == 1 and self._state(children[0]).shape == self._state(layer).shape:
                which[index] = children[0], self._shape(children[0])

    def _state(self, module: nn.Module) -> Tensor:
        output = self.returned[module]
        state: Tensor = output[0] if isinstance(output, tuple) else output
        return state

    def _shape(self, module: nn.Module) -> Shape:
        output = self.returned[module]
        return len(output) if isinstance(output, tuple) else None

    def shaped(self, target: Any) -> list[tuple[nn.Module, Shape]]:
        return [(layer, self._shape(layer)) for layer in target._decoder_layers]


@torch.inference_mode()
def _try(target: Any, found: Sublayers) -> None:
    """Raise TargetError unless layers without any sublayer hand their input on."""
    whole = [index for index in found.attention if index in found.mlp]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen[module] = args[0] if args else kwargs["hidden_states"], output[0] if isinstance(output, tuple) else output

    see = hooks.of_this_thread(see)
    handles = [found.layers[index][0].register_forward_hook(see, with_kwargs=True) for index in whole]
    tokens = torch.arange(2, device=target.device)[None] % target.spec.vocabulary
    try:
        with _replaced(dict(found.silent())):
            target.prefill(target.allocate(1, 4), [0], tokens, [2])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _refused(target, f"{type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not all(torch.allclose(before, after, rtol=1e-3, atol=1e-5) for before, after in seen.values()):
        raise _refused(target, "a layer without attention and MLP changes what passes through it")


# ── what a drafter asks ───────────────────────────────────────────────────────────────────────────────────────────────


def able(target: Target) -> SkipsLayers:
    """The target as one that can skip.  Raises DrafterError where it can't, or where drafts can't be verified."""
    if not isinstance(target, SkipsLayers):
        raise DrafterError(f"layer_skip needs a target that can leave sublayers out; {target.spec.name} can't, choose another")
    if target.spec.mode == "off":
        raise DrafterError(f"{target.spec.name} verifies no drafts (its mode is off); decode it without layer_skip")
    try:
        target.skippable()
    except TargetError as error:
        raise DrafterError(str(error)) from error
    return target


def every_second(layers: int, possible: Skip) -> Skip:
    """Every second layer but the last, whole: where SWIFT begins."""
    chosen = frozenset(range(1, layers - 1, 2))
    return Skip(chosen & possible.attention, chosen & possible.mlp)


def listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"


@torch.inference_mode()
def refuse_failing(target: Target, skip: Skip) -> None:
    """Read two tokens without these sublayers.  Raises DrafterError where another layer needs what one of them writes."""
    cache = target.allocate(1, 4)
    try:
        with able(target).skipping(skip, cache, [0]) as read:
            for token in (0, 1):
                read(torch.tensor([[token % target.spec.vocabulary]], device=target.device))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DrafterError(
            f"{target.spec.name} does not run without the attention of layers {listed(skip.attention)} and the MLP of "
            f"{listed(skip.mlp)} ({type(error).__name__}: {error}); leave out less"
        ) from error


def probability(logits: Tensor) -> Tensor:
    """The likeliest token's, at temperature 1.  logits [B, V]; returns [B] float32."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp().clamp(0, 1)
