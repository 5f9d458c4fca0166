"""MTP: modules that predict one token further each, those that the target ships or ones that are trained.  (arXiv 2412.19437.)

Module m reads a token and what module m - 1 said of the token before it, module 0 the target's final hidden state:
eh_proj [enorm(embedding); hnorm(state)], one decoder layer, a norm; the target's own head reads what comes out.  Step k of a
draft takes module min(k, modules - 1), so the last one goes on with its own output (FastMTP: one module shared over all steps).
Training weighs step k by 0.6 ** k, which the trainer normalises; FastMTP's loss is cross entropy of the text's own tokens.

`native` takes DeepSeek-V3's, GLM's, Qwen3-Next's, MiMo-V2's and others' modules from the target's own checkpoint, as
transformers builds them, and may tune them.  Otherwise they begin at random, with a dense layer, their weights named as
DeepSeek-V3's: layers.m.{enorm, hnorm, eh_proj, input_layernorm, self_attn, post_attention_layernorm, mlp, shared_head.norm},
counted from 0; native ones as transformers does, layers.m.{enorm, hnorm, eh_proj, mtp_block, post_norm}.

Assumes that the state from which one token is read knows something of the next ones.

Differs from the paper: [embedding; state] is the order of the released weights, not the paper's; the next module reads the
state after the norm, as in transformers; the target is frozen.  A draft may be a tree.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from safetensors import safe_open
from torch import Tensor, nn

from outrider.errors import DrafterError
from outrider.nn.blocks import MLP, RMSNorm, angles
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.recurrent import Attend, RecurrentAttention, RecurrentConfig, RecurrentDrafter, Unrolled, UnrolledRows
from outrider.nn.shape import FORMER, LayerConfig, resolved
from outrider.targets.cache import Limit
from outrider.targets.protocol import LayerSizes, Target

ATTENTION = "outrider"
"""Under this name transformers finds our attention."""


class Config(RecurrentConfig):
    kind: Literal["mtp"] = "mtp"
    length: PositiveInt = 3
    """Tokens drafted per step; levels of a tree."""
    native: bool | None = None
    """Take the modules that the target ships; unless given, where it ships any."""
    modules: PositiveInt = 1
    """Modules with weights of their own; of native ones the target says how many."""
    qk_norm: bool = False
    """Norm queries and keys, as Qwen3's layers do; DeepSeek's do not."""
    ttt: PositiveInt = 3
    """Steps unrolled in training."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Step s weighs decay ** s in training."""


class Module(nn.Module):
    """One module of our own, its weights named as in DeepSeek-V3's checkpoints."""

    def __init__(self, hidden: int, shape: LayerSizes, qk_norm: bool):
        super().__init__()
        self.enorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.self_attn = RecurrentAttention(hidden, hidden, shape, qk_norm)
        self.post_attention_layernorm = RMSNorm(hidden, shape.rms_norm_eps)
        self.mlp = MLP(hidden, shape.intermediate)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, shape.rms_norm_eps)})

    def forward(self, words: Tensor, states: Tensor, angle: Tensor, attend: Attend, number: int) -> Tensor:
        """words, states [B, n, H]; returns [B, n, H], which the head reads."""
        x = self.eh_proj(torch.cat([self.enorm(words), self.hnorm(states)], -1))
        x = x + self.self_attn(self.input_layernorm(x), angle, attend, number)
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


class Model(DraftModel):
    """The modules; embedding and head are the target's."""

    taps: tuple[int, ...] = ()
    shape: LayerSizes
    """Of modules of our own."""

    def __init__(self, config: Config, target: Target):
        super().__init__()
        shipped = None if config.native is False else native_modules(target, wanted=config.native is True)
        self.native = shipped is not None
        self.config, self.target = config.model_copy(update={"native": self.native}), target
        self.shared_post_norm: nn.Module | None = None
        if shipped is None:
            self.config, self.shape = resolved(self.config, target.spec)
            self.layers = nn.ModuleList(Module(target.spec.hidden, self.shape, config.qk_norm) for _ in range(config.modules))
            self.limits: tuple[Limit | None, ...] = (None,) * config.modules
        else:
            self._adopt(shipped)
        self.num_modules = len(self.layers)

    def _adopt(self, shipped: Any) -> None:
        """Make the modules of a transformers MtpModel ours.  Raises DrafterError where they say something else here."""
        _warn_of_idle(self.config)
        self.limits = limits_of(shipped.config, len(shipped.layers))
        self.layers = shipped.layers.requires_grad_(True)
        self.shared_post_norm = shipped.shared_post_norm.requires_grad_(True) if shipped.use_shared_post_norm else None
        # not a submodule: a model that is moved to bf16 would take its frequencies along
        self._rotary = (copy.deepcopy(shipped.rotary_emb),)
        self._kinds = shipped.config.layer_types if shipped.has_per_layer_rope else None
        prove(self, shipped)

    def features(self, seen: Tensor) -> Tensor:
        return seen.to(next(self.layers.parameters()).dtype)

    def turn(self, positions: Tensor) -> Tensor:
        """A pair stands where its token does, one behind the target's state."""
        return positions + 1

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        """angle: positions [B or 1, n], as `turn` gives them."""
        words = words.to(features.dtype)
        if not self.native:
            turns = angles(angle, self.shape)
            return self.layers[module](words, features, turns, attend, module)
        found = self.layers[module](
            words, features, position_embeddings=self._turns(module, words, angle), attention_mask=None, position_ids=angle,
            past_key_values=None, attend=attend,
        )  # fmt: skip
        return found if self.shared_post_norm is None else self.shared_post_norm(found)

    def _turns(self, module: int, words: Tensor, positions: Tensor) -> Any:
        """What the family's layers take for rotary positions."""
        rotary = self._rotary[0]
        if rotary is None:
            return None
        kind = {} if self._kinds is None else {"layer_type": self._kinds[module]}
        return rotary.to(words.device)(words, position_ids=positions, **kind)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden)

    def predict(self, batch: Batch) -> UnrolledRows:
        return UnrolledRows(self, batch, self.features(batch.hidden))

    def facts(self) -> Mapping[str, Any]:
        return {"native": self.native}

    def drafter(self) -> RecurrentDrafter:
        return RecurrentDrafter(self)


# ── modules of the target's own ────────────────────────────────────────────────────────────────────────────────────────


def native_modules(target: Target, wanted: bool) -> Any:
    """transformers' MtpModel of this target with its weights; None where it has none and they are not `wanted`.

    Raises DrafterError where they are wanted and not there, or can't be read.
    """
    model: Any = getattr(target, "model", None)
    text = None if model is None else model.config.get_text_config(decoder=True)
    count = 0 if text is None else getattr(text, "num_mtp_layers", None) or modules_on_disk(model)
    if not count:
        if wanted:
            raise DrafterError(
                f"{target.spec.name} ships no modules that transformers knows of: its config has no num_mtp_layers "
                "(num_nextn_predict_layers in many checkpoints) above 0, and its checkpoint no weights mtp.layers; set native "
                "to no and train modules of your own"
            )
        return None
    from transformers.modeling_layers import MtpModel  # seconds to import, and needed here alone

    _teach_names()
    try:
        with told(text, count):
            return MtpModel.from_pretrained(model, device_map={"": model.device})
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        looked = ", ".join(model._keys_to_ignore_on_load_unexpected or ["nothing: its class names no such weights"])
        said = str(error).strip().split("\n")[0]
        problem = (
            f"the config of {target.spec.name} speaks of {count} modules, but transformers can't load them from "
            f"{model.config.name_or_path or 'a model without a folder'} (weights looked for: {looked}): {said}"
        )
        if wanted:
            raise DrafterError(
                f"{problem}; load the target from its whole checkpoint, or set native to no and train modules of your own"
            ) from error
        logging.getLogger(__name__).warning("%s; modules of our own begin untrained in their place", problem)
        return None


def modules_on_disk(model: Any) -> int:
    """Modules in the model's checkpoint whose config is silent about them, as Qwen3-Next's and Qwen3.5's are."""
    path = model.config.name_or_path
    if not path or not any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected or ()):
        return 0
    found = {name: _file(path, name) for name in ("model.safetensors.index.json", "model.safetensors")}
    index, single = found.values()
    if index is not None:
        names = list(json.loads(Path(index).read_text())["weight_map"])
    elif single is not None:
        with safe_open(single, framework="pt") as file:
            names = list(file.keys())
    else:
        return 0
    numbers = [int(match[1]) for name in names if (match := re.match(r"(?:model\.)?mtp\.layers\.(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _file(path: str, name: str) -> str | None:
    """A file of a checkpoint, in a folder or the hub's cache."""
    from transformers.utils import cached_file

    found = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False, local_files_only=True,
    )  # fmt: skip
    return None if found is None else str(found)


NAMES = {"final_layernorm": "post_norm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""Norms as MiMo-V2's checkpoints call them, and as transformers does."""
KINDS = {"mimo_v2_flash": ("sliding_attention", "dense")}
"""Attention and MLP of a family's modules, where they are not full attention and the MLP of the last layer."""


@functools.cache
def _teach_names() -> None:
    """Let transformers know the names that it does not."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    more = [WeightRenaming(source_patterns=rf"\.{own}\.", target_patterns=f".{name}.") for own, name in NAMES.items()]
    register_checkpoint_conversion_mapping("MtpModel", [*more, *get_checkpoint_conversion_mapping("MtpModel")], overwrite=True)


@contextmanager
def told(text: Any, count: int) -> Iterator[None]:
    """A config that says for the while what it leaves out: how many modules there are, and of what kind."""
    last = (getattr(text, "mlp_layer_types", None) or [None])[-1]
    attends, feeds = KINDS.get(text.model_type, ("full_attention", last))
    said = {"num_mtp_layers": count, "mtp_layer_types": [attends] * count}
    if last is not None:
        said["mtp_mlp_layer_types"] = [feeds] * count
    missing = {name: value for name, value in said.items() if getattr(text, name, None) is None}
    before = {name: vars(text)[name] for name in missing if name in vars(text)}
    for name, value in missing.items():
        setattr(text, name, value)
    try:
        yield
    finally:
        for name in missing:
            if name in before:
                setattr(text, name, before[name])
            else:
                delattr(text, name)


def limits_of(config: Any, count: int) -> tuple[Limit | None, ...]:
    """How far each module of an MtpModel's config sees.  Raises DrafterError for layers that are no plain attention."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    strange = sorted(set(kinds[:count]) - {"full_attention", "sliding_attention"})
    if strange:
        raise DrafterError(
            f"the modules of {config.model_type} have layers of {', '.join(strange)}; here only full_attention and "
            "sliding_attention can be driven; set native to no and train modules of your own"
        )
    return tuple(Limit("window", config.sliding_window) if kind == "sliding_attention" else None for kind in kinds[:count])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    attend: Attend, scaling: float | None = None, s_aux: Tensor | None = None, **_given: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers' layers call it; keys, masks and positions are those of `attend`."""
    usual = query.shape[-1] ** -0.5
    if scaling is not None and not math.isclose(scaling, usual, rel_tol=1e-9):
        query = query * (scaling / usual)
    layer: Any = module.layer_idx
    return attend(query, key, value, layer, s_aux).transpose(1, 2).contiguous(), None


@torch.no_grad()
def prove(model: Model, shipped: Any) -> None:
    """Let the modules pass our way, and see that they say what they said before.

    Raises DrafterError where they don't: a family may do what is not known here.
    """
    from transformers import AttentionInterface
    from transformers.cache_utils import MtpCache

    target, device = model.target, shipped.layers[0].eh_proj.weight.device
    windows = [limit.size for limit in model.limits if limit]
    length = len(shipped.layers) + max([8, *(min(2 * size, 64) for size in windows)])
    tokens = (torch.arange(length) * 7 % target.spec.vocabulary)[None].to(device)
    noise = torch.randn(1, length, target.spec.hidden, generator=torch.Generator().manual_seed(0))
    begin = noise.to(device, shipped.layers[0].eh_proj.weight.dtype)
    positions = torch.arange(length, device=device)[None]

    cache, states, expected = MtpCache(config=shipped.config), begin, []
    for number in range(len(shipped.layers)):
        states = states[:, : length - number - 1]
        states = shipped.forward_layer(number, states, positions[:, number + 1 :], cache, input_ids=tokens[:, number + 1 :])
        expected.append(shipped._project_to_logits(states))

    AttentionInterface.register(ATTENTION, attention)
    for module in [shipped, *shipped.layers.modules()]:
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION
    documents = torch.ones(1, length, device=device)
    attend, states = Unrolled(documents, positions, positions, lambda layer: model.limits[layer]), begin
    try:
        for number, wanted in enumerate(expected):
            states, at = states[:, : length - number - 1], positions[:, number:-1]
            words = target.embed(tokens[:, number + 1 :].to(target.device)).to(device)
            states = model.step(number, words, states, model.turn(at), attend)
            said = target.head(states.to(target.device)).to(device)
            if said.shape != wanted.shape or _apart(said, wanted) > (1e-3 if wanted.dtype.itemsize > 2 else 0.05):
                raise DrafterError(_strange(model, number, "they say something else than in transformers' own pass"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DrafterError(_strange(model, number, str(error).strip().split("\n")[0])) from error


def _apart(said: Tensor, wanted: Tensor) -> float:
    """How far two passes are apart, relative, at half of the places: one place may fall to another expert."""
    said, wanted = said.double(), wanted.double()
    return float(((said - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).median())


def _strange(model: Model, number: int, reason: str) -> str:
    return (
        f"module {number} of {model.target.spec.name} can't be driven here: {reason}; set native to no and train modules of "
        "your own"
    )


def _warn_of_idle(config: Config) -> None:
    names = ("modules", "qk_norm", *(name for name in LayerConfig.model_fields if name != "device"))
    idle = [name for name in names if getattr(config, name) not in (Config.model_fields[name].default, FORMER.get(name))]
    if idle:
        logging.getLogger(__name__).warning(
            "mtp.%s has no effect on modules that the target ships; set native to no for modules of your own",
            " and ".join(idle),
        )


def build(config: Config, target: Target) -> RecurrentDrafter:
    return Model(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()
