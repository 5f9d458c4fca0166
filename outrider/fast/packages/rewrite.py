"""Rewrites a traced graph before it is compiled: products of one input are joined, an MLP's gate is fused with its
products, attention uses our kernel, and cosines and sines of positions are computed once.

An input of several layers (queries, keys and values; gate and up) is then read once, and threads synchronise once.
Products are bit-identical: panels of outputs are concatenated, and each output is summed as before.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from outrider import kernels
from outrider.kernels import quantized

PREFIX = "panels_"
"""Prefix of the names of constants that are panels."""
MOST_JOINED = 2**23
"""Maximum bytes of quantised weights that are joined: larger products take longer than threads need to synchronise."""
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def with_kernels(graph: fx.Graph, panels: Mapping[str, int], holds_weights: bool = True) -> None:
    """Rewrite a graph of aten operators in which panels are multiplied by `outrider::multiply`; called by inductor.

    panels: numbers of the weights, by the names of the graph's constants.  The new graph's constants are named by these
    numbers, see `numbers_of`.  holds_weights: False if their values don't matter, since the package gets its panels
    when it is loaded.
    """
    _attend(graph)
    _gate(graph, panels, holds_weights)
    _join(graph, panels, holds_weights)
    _hold(graph)
    graph.lint()


def numbers_of(name: str) -> list[int] | None:
    """The panels joined in the constant of this name; None for other constants."""
    return [int(number) for number in name.removeprefix(PREFIX).split("_")] if name.startswith(PREFIX) else None


def _attend(graph: fx.Graph) -> None:
    """Replace attention with a mask, in float32, by `outrider::attend`."""
    node: Any
    for node in list(graph.nodes):
        if node.target is not ATTENTION:
            continue
        q, mask, results = node.args[0], node.kwargs.get("attn_mask"), list(node.users)
        is_ours = mask is not None and len(node.args) == 3 and q.meta["val"].dtype == torch.float32
        # the other result is for the gradient
        has_more = any(each.args[1] != 0 and each.users for each in results)
        if not is_ours or len(mask.meta["val"].shape) != 4 or has_more:
            continue
        scale = node.kwargs.get("scale") or q.meta["val"].shape[-1] ** -0.5
        with graph.inserting_before(node):
            attended = _call(graph, torch.ops.outrider.attend.default, *node.args, mask, scale)
        for result in results:
            if result.users:
                result.replace_all_uses_with(attended)
            graph.erase_node(result)
        graph.erase_node(node)


def _gate(graph: fx.Graph, numbers: Mapping[str, int], holds_weights: bool) -> None:
    """Replace silu(x G) * (x U) by `outrider::gated`, if nothing else uses the parts."""
    multiply = torch.ops.outrider.multiply.default
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.mul.Tensor:
            continue
        for activated, up in (node.args, node.args[::-1]):
            if not _is(activated, torch.ops.aten.silu.default):
                continue
            gate: Any = activated.args[0]
            if not (_is(gate, multiply) and _is(up, multiply)) or gate.args[::2] != up.args[::2]:
                continue
            weights = [_weight(graph, each) for each in (gate, up)]
            if weights[0].shape == weights[1].shape:
                with graph.inserting_before(node):
                    panels = _joined(graph, [gate, up], weights, numbers, holds_weights)
                    gated = _call(graph, torch.ops.outrider.gated.default, gate.args[0], panels, gate.args[2])
                node.replace_all_uses_with(gated)
                for each in (node, activated, gate, up):
                    graph.erase_node(each)
                break


def _is(node: Any, target: Any) -> bool:
    """Whether this is a call of `target` with a single user."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def _join(graph: fx.Graph, numbers: Mapping[str, int], holds_weights: bool) -> None:
    """Join products of the same tensor with weights of one kind into one, with slices for the users of each."""
    groups: dict[Any, list[tuple[Any, Tensor]]] = defaultdict(list)
    places = _places()
    for node in list(graph.nodes):
        if node.target in places:
            weight, outputs = _weight(graph, node), places[node.target]
            how = (*node.args[2:outputs], *node.args[outputs + 1 :])  # type and activations of quantised weights
            # float32 and bfloat16 differ in shape
            groups[node.target, node.args[0], how, weight.shape[1:]].append((node, weight))
        elif node.target is torch.ops.outrider.quantized_rows.default:
            with graph.inserting_before(node):
                panels = _joined(graph, [node], [_weight(graph, node)], numbers, holds_weights)
            node.args = (node.args[0], panels, *node.args[2:])
    for (called, *_), matmuls in groups.items():
        for few in _together(matmuls):
            _join_products(graph, called, few, numbers, holds_weights)


def _places() -> dict[Any, int]:
    """Products, and the index of the argument with their number of outputs."""
    return {torch.ops.outrider.multiply.default: 2, torch.ops.outrider.quantized.default: 3}


def _together(matmuls: list[tuple[Any, Tensor]]) -> list[list[tuple[Any, Tensor]]]:
    """Groups to join.  Large quantised weights are not joined: copied side by side, they would be in memory twice."""
    is_large = matmuls[0][1].dtype == torch.uint8 and sum(weight.nbytes for _, weight in matmuls) > MOST_JOINED
    return [[each] for each in matmuls] if is_large else [matmuls]


def _join_products(
    graph: fx.Graph, called: Any, matmuls: list[tuple[Any, Tensor]], numbers: Mapping[str, int], holds_weights: bool
) -> None:
    (nodes, weights), start, at = zip(*matmuls, strict=True), 0, _places()[called]
    width = kernels.panel_width() if weights[0].dtype != torch.uint8 else quantized.PANEL
    with graph.inserting_before(nodes[0]):
        outputs = nodes[0].args[at] if len(nodes) == 1 else sum(map(len, weights)) * width
        joined, arguments = _joined(graph, nodes, weights, numbers, holds_weights), nodes[0].args
        whole = _call(graph, called, arguments[0], joined, *arguments[2:at], outputs, *arguments[at + 1 :])
    for node, weight in matmuls:
        part = whole
        if len(matmuls) > 1:
            with graph.inserting_before(node):
                part = _call(graph, torch.ops.aten.slice.Tensor, whole, -1, start, start + node.args[at])
        start += weight.shape[0] * width
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _weight(graph: fx.Graph, matmul: Any) -> Tensor:
    weight: Tensor = operator.attrgetter(matmul.args[1].target)(graph.owning_module)
    return weight


def _joined(
    graph: fx.Graph, matmuls: Sequence[Any], weights: Sequence[Tensor], numbers: Mapping[str, int], holds_weights: bool
) -> fx.Node:  # fmt: skip
    """The panels of these products as one constant."""
    name, joined = PREFIX + "_".join(str(numbers[node.args[1].target]) for node in matmuls), weights[0]
    if len(weights) > 1:  # memory that is never touched is not allocated
        rows = sum(map(len, weights))
        joined = torch.cat([*weights]) if holds_weights else joined.new_empty(rows, *joined.shape[1:])
    return _constant(graph, name, joined, matmuls[0].args[0].meta["val"].fake_mode)


def _hold(graph: fx.Graph) -> None:
    """Store cosines and sines of positions, which inductor would compute for every head of every layer."""
    from torch._inductor import test_operators  # registers the operator that forces this

    stored = torch.ops._inductor_test.realize.default
    assert test_operators
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
            with graph.inserting_after(node):
                once = _call(graph, stored, node)
            node.replace_all_uses_with(once, delete_user_cb=lambda user, once=once: user is not once)


def _call(graph: fx.Graph, called: Any, *arguments: Any) -> fx.Node:
    node = graph.call_function(called, arguments)
    node.meta["val"] = called(*(each.meta["val"] if isinstance(each, fx.Node) else each for each in arguments))
    return node


def _constant(graph: fx.Graph, name: str, value: Tensor, fake: Any) -> fx.Node:
    assert graph.owning_module is not None
    graph.owning_module.register_buffer(name, value)
    node = graph.get_attr(name)
    node.meta["val"] = fake.from_tensor(value)
    return node
