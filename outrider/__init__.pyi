"""Public names for type checkers and editors.  Written by scripts/public_stub.py; a test compares."""

# ruff: noqa: I001
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch

from outrider.targets.protocol import Target
from outrider.config import Config as DrafterConfig
from outrider.decoding.accept import Accepted as Accepted
from outrider.decoding.accept import accept as accept
from outrider.decoding.accept import overlap as overlap
from outrider.decoding.draft import Draft as Draft
from outrider.decoding.protocols import Drafter as Drafter
from outrider.generation import Generation as Generation
from outrider.generation import generate as generate
from outrider.generation import stream as stream
from outrider.measure.config import Config as EvaluateConfig
from outrider.measure.run import evaluate as evaluate
from outrider.report.schema import Report as Report
from outrider.runs.stages import run as run
from outrider.sampling.grammar import Grammar as Grammar
from outrider.sampling.settings import Sampling as Sampling
from outrider.targets.load import load_target as load_target
from outrider.training.config import Config as TrainConfig
from outrider.training.trainer import train as train

__all__ = [
    "Accepted", "Draft", "Drafter", "DrafterConfig", "EvaluateConfig", "Generation", "Grammar", "Report",
    "Sampling", "TrainConfig", "accept", "evaluate", "generate", "load_drafter", "load_target", "overlap", "run",
    "stream", "train",
]
__version__: str

@overload
def load_drafter(
    kind_or_path: Literal["confu"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, length: int = 5,
    width: int = 1, nodes: int = 16, replacement: bool = False, ttt: int = 7, decay: float = 0.8,
    anchors: int | None = None, taps: Sequence[int] | None = None, rows: int = 2, experts: int = 4,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["cross_vocabulary"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, model: str = 'demo', vocabulary: Literal['intersection', 'text'] = 'intersection',
    min_overlap: float = 0.8, length: int = 4,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["deer"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 32,
    layers: int = 5, init_from_layers: Sequence[int] | None = None, anchors: int = 512,
    mask_token: int | Literal['learnt'] | None = None, refine: float = 0.5, alpha: float = 1.02,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["dflash"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 16,
    anchor_predicts: bool = True, siblings: Sequence[int] = (), layers: int = 5, taps: Sequence[int] | None = None,
    init_from_layers: Sequence[int] | None = None, mask_token: int | Literal['learnt'] | None = None,
    anchors: int = 512, vocabulary: int | None = None, decay: float = 7.0, prefixes: float = 0.0,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["dflash2"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 7,
    anchor_predicts: bool = False, siblings: Sequence[int] = (), layers: int = 5, taps: Sequence[int] | None = None,
    init_from_layers: Sequence[int] | None = None, mask_token: int | Literal['learnt'] | None = None,
    anchors: int = 512, vocabulary: int | None = None, decay: float = 4.0, prefixes: float = 0.0, candidates: int = 16,
    rank: int = 256, conv_taps: int = 2, conv_group: int = 16, window: int | None = None, nodes: int = 0,
    selector_loss: Literal['kl', 'ce'] = 'kl', selector_start: float = 0.0, selector_gradient: bool = False,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["domino"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 16,
    anchor_predicts: bool = True, siblings: Sequence[int] = (), layers: int = 5, taps: Sequence[int] | None = None,
    init_from_layers: Sequence[int] | None = None, mask_token: int | Literal['learnt'] | None = None,
    anchors: int = 512, vocabulary: int | None = None, decay: float = 7.0, prefixes: float = 0.0, gru: int = 1024,
    rank: int = 256, pure_prefix: int = 1, curriculum: float = 0.5,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["dspark"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 7,
    anchor_predicts: bool = True, siblings: Sequence[int] = (), layers: int = 5, taps: Sequence[int] | None = None,
    init_from_layers: Sequence[int] | None = None, mask_token: int | Literal['learnt'] | None = None,
    anchors: int = 512, vocabulary: int | None = None, decay: float = 4.0, prefixes: float = 0.0,
    markov: Literal['vanilla', 'gated', 'rnn'] = 'vanilla', rank: int = 256, confidence: bool = True,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["eagle"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, length: int = 5,
    width: int = 1, nodes: int = 16, replacement: bool = False, ttt: int = 1, decay: float = 0.8,
    anchors: int | None = None, noise: float = 0.1, bias: bool = True,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["eagle3"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, length: int = 5,
    width: int = 1, nodes: int = 16, replacement: bool = False, ttt: int = 7, decay: float = 0.8,
    anchors: int | None = None, taps: Sequence[int] | None = None, vocabulary: int | None = None, qk_norm: bool = False,
    fc_norm: bool = False, norm_output: bool = False, norm_before_residual: bool = False, gated: bool = False,
    aggregate: Literal['fc', 'metaquery'] = 'fc', queries: int = 4,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["gemma4_assistant"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, model: str = '', length: int = 4,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["graft"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, base: str | Mapping[str, Any] = ..., retriever: str | Mapping[str, Any] = ...,
    risk: float = 0.02, nodes: int | None = None,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["jacobi"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, window: int = 8, init: Literal['ngram', 'repeat'] = 'ngram', ngram: int = 4,
    pool: int = 8192, branches: int = 0,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["jacobi_denoising"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, window: int = 8, levels: int = 2, anchors: int = 64,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["layer_skip"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, file: str | None = None, skip_attention: Sequence[int] | None = None,
    skip_mlp: Sequence[int] | None = None, length: int | None = None, min_confidence: float | None = None,
    search: int = 0,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["lilicorr"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, block: int = 7,
    anchor_predicts: bool = False, siblings: Sequence[int] = (), layers: int = 5, taps: Sequence[int] | None = None,
    init_from_layers: Sequence[int] | None = None, mask_token: int | Literal['learnt'] | None = None,
    anchors: int = 512, vocabulary: int | None = None, decay: float = 4.0, prefixes: float = 0.0, candidates: int = 16,
    nodes: int = 0, scorer_hidden: int | None = None, scorer_layers: int = 2, scorer_heads: int = 4,
    scorer_ratio: float = 2.0, factor: int = 64, scale: float = 10.0, factor_eps: float = 1e-06, ce: float = 0.25,
    margin: float = 0.0, penalty: float = 0.25,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["local_head"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, base: str | Mapping[str, Any] | None = None, head: str | None = None,
    local: float = 0.3, prior: float = 0.3, candidates: int = 32, gru: int = 512, rank: int = 128, context: int = 8,
    length: int = 4,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["medusa"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int = 5, layers: int = 1, head: Literal['target', 'own'] = 'target',
    sequential: bool = False, nodes: int = 16, tree: Sequence[Sequence[int]] | None = None, drawn: bool = True,
    anchors: int | None = None,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["mix"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, members: Sequence[str | Mapping[str, Any]] = ({'kind': 'ngram'}, {'kind': 'recycle'}),
    share: Literal['bandit', 'request'] = 'bandit', nodes: int = 16,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["mtp"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, length: int = 3,
    width: int = 1, nodes: int = 16, replacement: bool = False, ttt: int = 3, decay: float = 0.6,
    anchors: int | None = None, native: bool | None = None, modules: int = 1, qk_norm: bool = False,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["ngram"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, length: int = 7, longest: int = 4, shortest: int = 2,
    tree: Literal['chain', 'recency', 'frequency'] = 'chain', nodes: int = 16,
    shared: Literal[False, 'tenant', 'all'] = False, capacity: int = 1000000, tenants: int = 64,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["ngram_embedding"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, order: int = 3, splits: int = 2, ratio: int = 4, dim: int = 64,
    boundaries: Sequence[int] | None = None, length: int = 4, width: int = 1, nodes: int = 16,
    replacement: bool = False,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["patch_diffusion"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, block: int = 8, steps: int = 1, mask_token: int | None = None, anchors: int = 32,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["peagle"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, length: int = 8,
    norm_before_residual: bool = False, layers: int = 4, taps: Sequence[int] | None = None,
    vocabulary: int | None = None, init_from_layers: Sequence[int] | None = None,
    mask_token: int | Literal['learnt'] | None = None, ratio: float = 0.7, floor: float = 0.2, anchors: int = 512,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["pipeline"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, stages: int = 4,
    taps: Sequence[int] | None = None, anchors: int | None = None,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["recycle"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, nodes: int = 16, depth: int = 6, successors: int = 8, shared: bool = False,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["small_model"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, model: str = 'demo', new: Mapping[str, Any] | None = None,
    architecture: Mapping[str, Any] | None = None, length: int = 4, width: int = 1, nodes: int = 16,
    replacement: bool = False,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["specblock"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None,
    intermediate: int | None = None, rms_norm_eps: float | None = None, rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None, partial_rotary_factor: float | None = None, slots: int = 4,
    blocks: int = 2, nodes: int = 60, layers: int = 2, taps: Sequence[int] | None = None, vocabulary: int | None = None,
    init_from_layers: Sequence[int] | None = None, anchors: int = 512, decay: float = 0.8,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["stale_latent"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, length: int = 8,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["suffix"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, nodes: int = 16, levels: int = 16, factor: float = 16.0, min_confidence: float = 0.005,
    shortest: int = 1, longest: int = 8, corpora: Sequence[str] = (), shared: Literal[False, 'tenant', 'all'] = False,
    capacity: int = 1000000, tenants: int = 64,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: Literal["tidar"], target: Target, *, device: str | torch.device | None = None,
    quantize: str | None = None, block: int = 4, mask_token: int | None = None, anchors: int = 64,
) -> Drafter: ...

@overload
def load_drafter(
    kind_or_path: str | Path, target: Target, *, device: str | torch.device | None = None, quantize: str | None = None,
    **config: Any,
) -> Drafter: ...
