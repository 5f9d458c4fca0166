"""Runs a model without some of its sublayers: stand-ins run in place of their modules.

They run only in the thread that skips these sublayers; passes in other threads, including `model.generate`, run the
modules themselves.

In a decoder layer, the child that writes to the cache is the attention, and the only other child with weight matrices
is the MLP.  A skipped attention adds nothing and writes no keys; a layer with both skipped returns its input.  A family
is refused if a layer without both is not the identity, since then its sublayers don't add to a residual stream.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import DrafterError, TargetError
from outrider.targets.hf import hooks
from outrider.targets.hf.anatomy import BROKEN
from outrider.targets.protocol import Skip, SkipsLayers, Target

Shape = int | None
"""Length of the tuple that a module returns; None for a bare tensor."""
StandIn = Callable[..., Any]


@dataclass(frozen=True)
class Sublayers:
    """Modules that can be skipped, by layer, each with the shape of its output."""

    layers: list[tuple[nn.Module, Shape]]
    attention: dict[int, tuple[nn.Module, Shape]]
    mlp: dict[int, tuple[nn.Module, Shape]]

    @property
    def all(self) -> Skip:
        return Skip(frozenset(self.attention), frozenset(self.mlp))

    def left_out(self, skip: Skip) -> AbstractContextManager[None]:
        """Within this context, the model runs without these."""
        whole = skip.attention & skip.mlp
        layers = [self.layers[index] for index in whole]
        identities = {module: _answering(shape, lambda hidden: hidden) for module, shape in layers}
        return _replaced(identities | self.silent(Skip(skip.attention - whole, skip.mlp - whole)))

    def only(self, layers: range, states: Tensor | None) -> AbstractContextManager[None]:
        """Within this context, the model runs only these layers.  states: their input; None if they are the first."""
        answers = {
            module: _answering(shape, lambda hidden: hidden)
            for index, (module, shape) in enumerate(self.layers)
            if index not in layers
        }
        if states is not None:
            before, shape = self.layers[layers.start - 1]
            answers[before] = _answering(shape, lambda _hidden: states)
        return _replaced(answers)

    def silent(self, skip: Skip) -> dict[nn.Module, StandIn]:
        """Stand-ins that return zeros, for these sublayers."""
        chosen = [*(self.attention[index] for index in skip.attention), *(self.mlp[index] for index in skip.mlp)]
        return {module: _answering(shape, torch.zeros_like) for module, shape in chosen}


@contextmanager
def _replaced(stand_ins: Mapping[nn.Module, StandIn]) -> Iterator[None]:
    """Within this context, stand-ins run for these modules in this thread; on exit the modules are restored."""
    with _LOCK:
        for module in stand_ins:
            if not _users[module]:
                _previous[module] = vars(module).get("forward")
                vars(module)["forward"] = functools.partial(_answer, module, module.forward)
            _users[module] += 1
    try:
        with hooks.during(_stand_ins, {**_stand_ins.get(), **stand_ins}):
            yield
    finally:
        with _LOCK:
            for module in stand_ins:
                _users[module] -= 1
                if not _users[module]:  # the last user restores it
                    del _users[module]
                    if (previous := _previous.pop(module)) is None:
                        del vars(module)["forward"]
                    else:
                        vars(module)["forward"] = previous


_stand_ins: ContextVar[Mapping[nn.Module, StandIn]] = ContextVar("stand_ins", default=MappingProxyType({}))
"""The stand-in of each module in this thread."""


_LOCK = threading.Lock()
_users: Counter[nn.Module] = Counter()
"""Modules whose calls are looked up in `_stand_ins`, with the number of open contexts."""
_previous: dict[nn.Module, Any] = {}
"""The previous instance attribute `forward` of each; None if it had none."""


def _answer(module: nn.Module, forward: StandIn, *args: Any, **kwargs: Any) -> Any:
    return _stand_ins.get().get(module, forward)(*args, **kwargs)


def _answering(shape: Shape, answer: Callable[[Tensor], Tensor]) -> StandIn:
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = answer(args[0] if args else kwargs["hidden_states"])
        return output if shape is None else (output, *[None] * (shape - 1))

    return forward


def learn_sublayers(target: Any) -> Sublayers:
    """Find the sublayers by observing one pass, and test the model without them.  target: a TransformersTarget.

    Raises TargetError if none can be skipped: because of a recurrent state, sublayers that can't be identified, or a
    layer that is not the identity without them.
    """
    if target.family.is_recurrent:
        raise _refused(target, "some of its layers carry a recurrent state, which follows one text")
    sublayers = _watched(target)
    if not sublayers.attention and not sublayers.mlp:
        raise _refused(target, "the attention and the MLP of its layers can't be identified")
    _try(target, sublayers)
    return sublayers


def _refused(target: Any, reason: str) -> TargetError:
    kind = target.model.config.model_type
    return TargetError(
        f"{target.spec.name} ({kind}) can't run without some of its layers: {reason}; choose another drafter"
    )


@torch.inference_mode()
def _watched(target: Any) -> Sublayers:
    """The attention and MLP of each layer, as far as a one-token pass identifies them."""
    returned: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []
    writers: set[nn.Module] = set()
    layers = list(target._decoder_layers)
    cache = target.allocate(1, 2)
    update = cache.update

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        running.pop()
        returned[module] = output

    def write(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        writers.update(running[-1:])  # an n-gram embedding writes its tokens outside the layers
        return update(*args, **kwargs)

    cache.update = write
    enter, leave = hooks.of_this_thread(lambda module, _args: running.append(module)), hooks.of_this_thread(leave)
    watched = [child for layer in layers for child in (layer, *layer.children())]
    handles = [child.register_forward_pre_hook(enter) for child in watched]
    handles += [child.register_forward_hook(leave) for child in watched]
    try:
        target.prefill(cache, [0], torch.zeros(1, 1, dtype=torch.int64, device=target.device), [1])
    finally:
        for handle in handles:
            handle.remove()
    sublayers = Sublayers([(layer, _shape(returned[layer])) for layer in layers], {}, {})
    for index, layer in enumerate(layers):
        called = [child for child in layer.children() if child in returned]
        writing = [child for child in called if child in writers]
        others = [child for child in called if child not in writers and _has_matrix(child)]
        for which, children in ((sublayers.attention, writing), (sublayers.mlp, others)):
            if len(children) == 1 and _state(returned[children[0]]).shape == _state(returned[layer]).shape:
                which[index] = children[0], _shape(returned[children[0]])
    return sublayers


def _has_matrix(module: nn.Module) -> bool:
    """Whether it has a weight matrix; those in GGUF blocks are buffers."""
    return any(weight.dim() > 1 for weight in (*module.parameters(), *module.buffers()))


def _state(output: Any) -> Tensor:
    """The hidden states in a module's output."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state


def _shape(output: Any) -> Shape:
    return len(output) if isinstance(output, tuple) else None


@torch.inference_mode()
def _try(target: Any, sublayers: Sublayers) -> None:
    """Raise TargetError unless layers without both sublayers return their input."""
    whole = [index for index in sublayers.attention if index in sublayers.mlp]
    traced: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def trace(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        traced[module] = args[0] if args else kwargs["hidden_states"], _state(output)

    trace = hooks.of_this_thread(trace)
    handles = [sublayers.layers[index][0].register_forward_hook(trace, with_kwargs=True) for index in whole]
    tokens = torch.arange(2, device=target.device)[None] % target.spec.vocabulary
    try:
        with _replaced(sublayers.silent(sublayers.all)):
            target.prefill(target.allocate(1, 4), [0], tokens, [2])
    except BROKEN as error:
        raise _refused(target, f"{type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not all(torch.allclose(before, after, rtol=1e-3, atol=1e-5) for before, after in traced.values()):
        raise _refused(target, "a layer without attention and MLP changes its input")


# ── for drafters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def require_skipping(target: Target) -> SkipsLayers:
    """The target, if it can skip layers and verify drafts; otherwise raises DrafterError."""
    if not isinstance(target, SkipsLayers):
        raise DrafterError(
            f"layer_skip needs a target that can run without some sublayers, and {target.spec.name} can't; choose "
            "another drafter"
        )
    if target.spec.mode == "off":
        raise DrafterError(f"{target.spec.name} can't verify drafts (its mode is off); decode it without a drafter")
    try:
        target.skippable()
    except TargetError as error:
        raise DrafterError(str(error)) from error
    return target


def every_second(layers: int, possible: Skip) -> Skip:
    """Every second layer except the last: the set that SWIFT starts from (arXiv 2410.06916)."""
    chosen = frozenset(range(1, layers - 1, 2))
    return Skip(chosen & possible.attention, chosen & possible.mlp)


def listed(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "none"


@torch.inference_mode()
def refuse_failing(target: Target, skip: Skip) -> None:
    """Raises DrafterError if the target can't read two tokens without these sublayers, as when another layer needs
    what one of them writes."""
    cache = target.allocate(1, 4)
    try:
        with require_skipping(target).skipping(skip, cache, [0]) as read:
            for token in (0, 1):
                read(torch.tensor([[token % target.spec.vocabulary]], device=target.device))
    except BROKEN as error:
        raise DrafterError(
            f"{target.spec.name} does not run without the attention of layers {listed(skip.attention)} and the MLP of "
            f"{listed(skip.mlp)} ({type(error).__name__}: {error}); skip fewer of them"
        ) from error


def runs(target: Target, skip: Skip) -> bool:
    """Whether it runs without these sublayers."""
    try:
        refuse_failing(target, skip)
    except DrafterError:
        return False
    return True


def probability(logits: Tensor) -> Tensor:
    """The probability of the likeliest token at temperature 1.  logits [B, V]; returns [B] float32."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp().clamp(0, 1)
