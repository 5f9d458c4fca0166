"""speculators, the format that vLLM loads.

config.json is flat except for `transformer_layer_config` (the draft layers) and `speculators_config` (how many tokens
to draft, and for which target).  EAGLE-3 and P-EAGLE have a head in the file, even if it is the target's, and no
embedding.  Layer k is the state after k layers, one more than ours.  There is no `model_type`: with one, vLLM would
take the folder for another kind of model.

Missing keys have the defaults of speculators 0.7.0, even where vLLM's reader differs: it defaults a DSpark's
`sample_from_anchor` to false and an EAGLE-3's `norm_before_residual` to true, the opposite of speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from outrider.errors import ExportError
from outrider.formats import released
from outrider.formats.layout import Config, Source
from outrider.method import Method
from outrider.targets.hf.transformers import TransformersTarget

NAME = "speculators"
VERSION = "0.7.0"
"""Version of the layout that is written."""
SHIFT = 1


def is_of(name: str) -> Callable[[Config, Collection[str]], bool]:
    """A check whether a config.json names this method of speculators."""
    return lambda config, names: config.get("speculators_model_type") == name


# ── written ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def common(source: Source, name: str, architecture: str, family: str, layers: int, tokens: int) -> dict[str, Any]:
    """The keys that all configs share.  name: the method's name in speculators.  tokens: drafted per step."""
    spec = source.target.spec
    return {
        "architectures": [architecture],
        "speculators_model_type": name,
        "speculators_version": VERSION,
        "dtype": spec.dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": released.written(source.settings, layers, spec, family),
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": spec.name,
                "architectures": list(getattr(source.target.model.config, "architectures", None) or []),
            },
        },
    }


def fused(source: Source, name: str, architecture: str, family: str, layers: int) -> dict[str, Any]:
    """The keys that EAGLE-3 and P-EAGLE share."""
    settings, spec = source.settings, source.target.spec
    return common(source, name, architecture, family, layers, settings.length) | {
        "draft_vocab_size": settings.vocabulary or spec.vocabulary,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False, "target_hidden_size": spec.hidden,
        "eagle_aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
    }  # fmt: skip


def block(source: Source, name: str, architecture: str) -> dict[str, Any]:
    """The config of a block drafter."""
    settings, spec = source.settings, source.target.spec
    backbone: Any = source.model.backbone
    return common(source, name, architecture, "qwen3", settings.layers, settings.block) | {
        "draft_vocab_size": spec.vocabulary,
        "block_size": backbone.width,
        "sample_from_anchor": settings.anchor_predicts,
        "target_hidden_size": spec.hidden,
        "aux_hidden_state_layer_ids": [tap + SHIFT for tap in source.model.taps],
        "mask_token_id": source.mask_token,
        # there are no sliding-window layers, but vLLM masks the block of every layer unless this is true
        "sliding_window_non_causal": True,
    }


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def drafted(config: Config) -> int:
    """Tokens per step that the config proposes."""
    return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])


def read_fused(config: Config, target: TransformersTarget, method: Method, flags: Sequence[str]) -> dict[str, Any]:
    """The settings that EAGLE-3 and P-EAGLE share.  flags: settings whose config keys have the same name."""
    if config.get("norm_before_fc"):
        raise ExportError(
            "norm_before_fc is true: one norm over all taps, which Outrider can't run; use a draft with "
            "norm_before_fc: false"
        )
    taps = released.taps(config, NAME, method)
    return {**released.head(config, target, flags), "length": drafted(config), "taps": taps}


def read_block(config: Config, target: TransformersTarget, method: Method) -> dict[str, Any]:
    """The settings of a block drafter."""
    if config.get("draft_vocab_size", target.spec.vocabulary) != target.spec.vocabulary:
        raise ExportError(
            f"draft_vocab_size is {config['draft_vocab_size']}, but Outrider drafts blocks from the whole vocabulary; "
            "use a draft without draft_vocab_size"
        )
    return released.block(config, NAME, method, target)


def embedding(trained: bool) -> Callable[[Config, Collection[str]], dict[str, Any]]:
    """A check that a trained embedding is in the file; it is later compared with the target's.  trained: the default if
    config.json has no `embed_requires_grad`."""

    def check(config: Config, names: Collection[str]) -> dict[str, Any]:
        if config.get("embed_requires_grad", trained) and "embed_tokens.weight" not in names:
            where = "where it is the target's, write embed_requires_grad: false into config.json"
            raise ExportError(f"its embedding was trained too and is not in the file; {where}")
        return {}

    return check
