"""The chain that a `readers.Draft` drafts after a text, from the target's own states, with the output of every stage.

There is no cache: the whole text is read for each draft, which is slow, but nothing can go stale.

n tokens, K drafted, T taps, L target layers, H hidden size, V vocabulary, D draft vocabulary, h heads, d head size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engines.verify.readers import TRAINED, Draft, Rotation
from outrider.targets.hf.transformers import TransformersTarget


class States(NamedTuple):
    """The target's states of a text."""

    tokens: list[int]
    layers: Tensor
    """[n, L, H], the output of each decoder layer."""
    hidden: Tensor
    """[n, H], after the final norm."""
    target: TransformersTarget


class Drafted(NamedTuple):
    """One chain, and the output of each stage that led to it."""

    tokens: list[int]
    stages: dict[str, Tensor]


@torch.inference_mode()
def states(target: TransformersTarget, tokens: Sequence[int]) -> States:
    """The target's states of a whole text."""
    every = tuple(range(target.spec.layers))
    hidden, layers = target.read(torch.tensor([list(tokens)], device=target.device), every)
    assert layers is not None
    return States(list(tokens), layers[0].float(), hidden[0].float(), target)


@torch.inference_mode()
def drafted(draft: Draft, text: States, anchor: int, length: int) -> Drafted:
    """The chain of `length` tokens after the token at position `anchor`, from the states of the tokens before it."""
    kinds = {"eagle3": _eagle3_chain, "peagle": _peagle_chain, "medusa": _medusa_chain}
    stages: dict[str, Tensor] = {}
    return Drafted(kinds.get(draft.kind, _block_chain)(draft, text, anchor, length, stages), stages)


def _eagle3_chain(draft: Draft, text: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    embedded = _embedded(text, text.tokens[1 : anchor + 1])
    features = _fused(draft, text, anchor, stages)
    chain: list[int] = []
    for step in range(length):
        note = stages if step == 0 else {}
        state = _layer(draft, 0, embedded, features, None, note)
        normed = _norm(draft, "norm", state)
        note["norm"] = normed[-1:]
        chain.append(_choice(draft, text, normed[-1], note))
        following = normed if "norm_output" in draft.flags else state
        embedded = torch.cat([embedded, _embedded(text, chain[-1:])])
        features = torch.cat([features, following[-1:]])
    return chain


def _peagle_chain(draft: Draft, text: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    features = _fused(draft, text, anchor, stages)
    empty = _linear(draft, "fc", draft.weights["mask_hidden"].float().flatten()[None])
    assert draft.mask is not None
    embedded = _embedded(text, [*text.tokens[1 : anchor + 1], *[draft.mask] * (length - 1)])
    x = torch.cat([features, empty.expand(length - 1, -1)])
    return [_choice(draft, text, row, stages) for row in _through(draft, embedded, x, None, length, stages)]


def _block_chain(draft: Draft, text: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    context = _norm(draft, "hidden_norm", _fused(draft, text, anchor, stages))
    stages["hidden_norm"] = context
    assert draft.mask is not None
    slots = _embedded(text, [text.tokens[anchor], *[draft.mask] * (length + draft.skip - 1)])
    x = _through(draft, None, slots, context, length, stages)
    if draft.kind == "dflash":
        return [_choice(draft, text, row, stages) for row in x]
    if draft.kind == "dflash2":
        walk = [text.tokens[anchor]]
        for row in x:
            walk.append(_after(draft, text, row, walk[-1], stages))
        return walk[1:]
    correct = _markov if draft.kind == "dspark" else _domino
    chain, memory = [text.tokens[anchor]], torch.zeros(1)
    for k, row in enumerate(x):
        added, memory = correct(draft, text, row.cpu(), chain[-1], memory)
        stages[f"correction {k}"] = added = added * (k >= draft.prefix)
        chain.append(_choice(draft, text, row, stages, added))
    return chain[1:]


def _through(
    draft: Draft, embedded: Tensor | None, x: Tensor, context: Tensor | None, length: int, stages: dict[str, Tensor]
) -> Tensor:  # fmt: skip
    """Rows x [n, H] through all layers; the last `length` rows are normalised.  embedded: tokens that the first layer
    reads along with x."""
    for layer in range(1 + max(int(name.split(".")[1]) for name in draft.weights if name.startswith("layers."))):
        x = _layer(draft, layer, embedded if layer == 0 else None, x, context, stages)
    x = stages["norm"] = _norm(draft, "norm", x)[-length:]
    return x


def _after(draft: Draft, text: States, row: Tensor, token: int, stages: dict[str, Tensor]) -> int:
    """The best of DFlash 2's candidates of a row after a token: the row's own logit plus the pair's score."""
    logits = text.target.head(row[None])[0].cpu()
    stages.setdefault("head", logits)
    best = logits.topk(draft.candidates)
    part = "candidate_selector."
    after = draft.weights[part + "predecessor_codebook"][token].float()
    pairs = draft.weights[part + "successor_codebook"][best.indices].float() @ (
        after * _linear(draft, part + "hidden_projection", row.cpu())
    )
    stages.setdefault("scores", best.values + pairs)
    return int(best.indices[(best.values + pairs).argmax()])


def _markov(draft: Draft, text: States, row: Tensor, token: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """DSpark's correction [V] for the slot after a token, and its state along the block."""
    word = draft.weights["markov_head.markov_w1.weight"][token].float()
    if draft.markov == "gated":
        word = _linear(draft, "markov_head.gate_proj", torch.cat([row, word]), has_bias=True).sigmoid() * word
    elif draft.markov == "rnn":
        joint = torch.cat([memory.expand(len(word)), word, row])
        keep, new, out = _linear(draft, "markov_head.joint_proj", joint, has_bias=True).chunk(3)
        memory = keep.sigmoid() * memory + (1 - keep.sigmoid()) * new.tanh()
        word = out.tanh()
    return _linear(draft, "markov_head.markov_w2", word), memory


def _domino(draft: Draft, text: States, row: Tensor, token: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Domino's correction [V] for the slot after a token, and the state of its GRU."""
    w_ih, w_hh = (draft.weights[f"prefix_gru.weight_{part}_l0"].float() for part in ("ih", "hh"))
    word = _embedded(text, [token]).cpu()
    memory = torch.gru_cell(word, memory.expand(1, w_hh.shape[1]), w_ih, w_hh)[0]
    return _linear(draft, "embed_proj.2", F.silu(_linear(draft, "embed_proj.0", torch.cat([row, memory])))), memory


def _medusa_chain(draft: Draft, text: States, anchor: int, length: int, stages: dict[str, Tensor]) -> list[int]:
    chain = []
    for depth in range(length):
        k, x, n = draft.order[depth], text.hidden[anchor - 1], 0
        while (name := f"blocks.{k}.layers.{n}") + ".weight" in draft.weights:
            x, n = x + F.silu(_linear(draft, name, x, "bias" in draft.flags)), n + 1
        stages[f"head {depth}"] = x
        chain.append(int(_linear(draft, f"lm_heads.{k}", x).argmax()))
    return chain


def _embedded(text: States, tokens: Sequence[int]) -> Tensor:
    return text.target.embed(torch.tensor(list(tokens), device=text.target.device)).float()


def _fused(draft: Draft, text: States, anchor: int, stages: dict[str, Tensor]) -> Tensor:
    """Features [anchor, H] of the tokens before the anchor."""
    taps = text.layers[:anchor, list(draft.taps)]
    stages["taps"] = taps
    if "fc_norm" in draft.flags:
        taps = torch.stack([_norm(draft, f"fc_norm.{i}", taps[:, i]) for i in range(len(draft.taps))], 1)
    stages["fc"] = _linear(draft, "fc", taps.flatten(1))
    return stages["fc"]


def _linear(draft: Draft, name: str, x: Tensor, has_bias: bool = False) -> Tensor:
    bias = draft.weights[name + ".bias"].float() if has_bias else None
    return F.linear(x, draft.weights[name + ".weight"].float(), bias)


def _norm(draft: Draft, name: str, x: Tensor) -> Tensor:
    weight = draft.norms[name + ".weight"].float()
    return F.rms_norm(x, weight.shape, weight, draft.eps)


def _layer(
    draft: Draft, number: int, embedded: Tensor | None, x: Tensor, context: Tensor | None, stages: dict[str, Tensor]
) -> Tensor:  # fmt: skip
    """One decoder layer over rows x [n, H]: causal, or a block after a context that all its rows attend to."""
    name = f"layers.{number}"
    residual = x
    if embedded is None:
        rows = _norm(draft, f"{name}.input_layernorm", x)
    else:
        normed = _norm(draft, f"{name}.hidden_norm", x)
        residual = normed if "norm_before_residual" in draft.flags else x
        rows = torch.cat([_norm(draft, f"{name}.input_layernorm", embedded), normed], -1)
    stages[f"{name} norms"] = rows
    attention = lambda rows: _attended(draft, name, rows, context, stages)
    x = stages[f"{name} attention"] = residual + _around(draft, f"{name}.attention_conv", rows, attention)

    def mlp(rows: Tensor) -> Tensor:
        gate, up = (_linear(draft, f"{name}.mlp.{half}_proj", rows) for half in ("gate", "up"))
        return _linear(draft, f"{name}.mlp.down_proj", F.silu(gate) * up)

    rows = _norm(draft, f"{name}.post_attention_layernorm", x)
    x = stages[f"{name} out"] = x + _around(draft, f"{name}.mlp_conv", rows, mlp)
    return x


def _attended(
    draft: Draft, name: str, rows: Tensor, context: Tensor | None, stages: dict[str, Tensor]
) -> Tensor:  # fmt: skip
    """The output of a layer's attention for rows [n, H]."""
    keyed, before = (rows, 0) if context is None else (torch.cat([context, rows]), len(context))
    heads, kv_heads, _ = draft.heads
    part = f"{name}.self_attn."
    q = _rotate(draft, _headed(draft, part + "q_norm", _linear(draft, part + "q_proj", rows), heads), before)
    keys = _linear(draft, part + "k_proj", keyed)
    k = _headed(draft, part + "k_norm", keys, kv_heads)
    if draft.first_norm and context is not None:
        k = torch.cat([_headed(draft, "layers.0.self_attn.k_norm", keys[:before], kv_heads), k[:, before:]], 1)
    k = stages[f"{name} rotation"] = _rotate(draft, k)
    v = _linear(draft, part + "v_proj", keyed).unflatten(-1, (kv_heads, -1)).transpose(0, 1)
    mask = torch.ones(len(rows), len(keyed), dtype=torch.bool, device=rows.device)
    mask = mask.tril(before) if context is None or draft.causal else mask
    mask = mask if draft.window is None else mask.triu(before - draft.window + 1)
    attended = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]
    return _linear(draft, part + "o_proj", attended.transpose(0, 1).flatten(1))


def _around(draft: Draft, name: str, rows: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer over normalised rows [n, H], between the two convolutions that a DFlash 2 has around it."""
    base = draft.weights.get(f"{name}.base_kernel")
    if base is None:
        return sublayer(rows)
    _, taps, hidden = base.shape
    added = _linear(draft, f"{name}.kernel_projection", rows).view(len(rows), 2, taps, -1)
    kernels = base.to(rows) + added.repeat_interleave(hidden // added.shape[-1], -1)

    def mixed(x: Tensor, side: int) -> Tensor:
        before = [F.pad(x, (0, 0, tap, 0))[: len(x)] for tap in range(taps)]  # zeros before the anchor's row
        return (kernels[:, side] * torch.stack(before, 1)).sum(1)

    return mixed(sublayer(mixed(rows, 0)), 1)


def _headed(draft: Draft, norm: str, x: Tensor, heads: int) -> Tensor:
    """[h, n, d], normalised per head if the folder has such a norm."""
    x = x.unflatten(-1, (heads, draft.heads[2]))
    return (_norm(draft, norm, x) if norm + ".weight" in draft.norms else x).transpose(0, 1)


def _rotate(draft: Draft, x: Tensor, first: int = 0) -> Tensor:
    """x [h, n, d] rotated by positions from `first` on; pairs take one number from each half."""
    size = int(draft.heads[2] * draft.rotation.share)
    frequencies, scale = _frequencies(draft.rotation, size)
    angle = torch.arange(first, first + x.shape[1]).float()[:, None] * frequencies
    cos, sin = (scale * angle.cos()).to(x.device), (scale * angle.sin()).to(x.device)
    one, other, rest = x.tensor_split((size // 2, size), -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


def _frequencies(rotation: Rotation, size: int) -> tuple[Tensor, float]:
    """The angle of each pair per position [size / 2], and the factor of cos and sin, as in vLLM's layers."""
    frequencies = rotation.theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    if not rotation.scaling:
        return frequencies, 1.0
    settings = json.loads(rotation.scaling)
    if settings["rope_type"] == "divisors":
        return frequencies / torch.tensor(settings["divisors"]), 1.0
    factor, kind = settings["factor"], settings["rope_type"]
    if kind == "linear":
        return frequencies / factor, 1.0
    if kind == "llama3":
        rotations = settings[TRAINED] * frequencies / (2 * math.pi)  # rotations of each pair over the trained length
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / factor), 1.0
    # YaRN: the range of pairs over which the angle blends from unscaled to scaled
    begin, end = (
        size * math.log(settings[TRAINED] / (rotations * 2 * math.pi)) / (2 * math.log(rotation.theta))
        for rotations in (settings.get("beta_fast") or 32, settings.get("beta_slow") or 1)
    )
    if settings.get("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, size - 1)
    scaled = ((torch.arange(size // 2) - begin) / max(end - begin, 1e-3)).clamp(0, 1)
    return frequencies * (1 - scaled + scaled / factor), _attention_factor(settings)


def _attention_factor(settings: Mapping[str, Any]) -> float:
    """YaRN: the factor of cos and sin."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1 if settings["factor"] > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return mscale(settings["mscale"]) / mscale(settings["mscale_all_dim"])
    return mscale(1)


def _choice(
    draft: Draft, text: States, state: Tensor, stages: dict[str, Tensor], added: Tensor | None = None
) -> int:  # fmt: skip
    logits = text.target.head(state[None])[0] if draft.head is None else draft.head.float() @ state.cpu()
    logits = logits if added is None else logits + added.to(logits.device)
    stages.setdefault("head", logits)
    best = int(logits.argmax())
    chosen = best if draft.ids is None else int(draft.ids[best])
    stages.setdefault("token", torch.tensor([float(chosen)]))
    return chosen
