"""A target run by a server: config, tokenizer and end tokens are local, its layers are not.

Enough to send requests, store the answers, and train on an engine's states.  Embedding, final norm and output
layer are loaded when first used, from a checkpoint reduced to its first layer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from outrider.errors import TargetError, first_line
from outrider.hub import missing_path
from outrider.sampling.text import Detokenizer
from outrider.targets import catalog, quantised
from outrider.targets.gguf.files import locate
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.identity import hash_stored, load_tokenizer, spec_of
from outrider.targets.load import default_device, dtype_of
from outrider.targets.progress import no_reports
from outrider.targets.text.detokenizer import detokenizer
from outrider.targets.text.generation import ends_of
from outrider.targets.text.prompts import ids_of


class ServedTarget:
    """A target whose passes run elsewhere.  Created by `load_served`."""

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None, **how: Any):
        """model: on the meta device.  how: `stored`, the hash of its weights, `device`, `dtype`, `quantize`,
        and `options` of transformers."""
        self.tokenizer, self._model, self._how = tokenizer, model, how
        self.device: torch.device = how["device"]
        self.spec = replace(spec_of(model, tokenizer, name, revision, how["stored"]), quantised=how["quantize"])
        self.ends = ends_of(model)
        self.mask_token: int | None = getattr(tokenizer, "mask_token_id", None)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return int(self._model.num_parameters())

    def encode(self, prompt: Any, thinking: bool | None = None) -> list[int]:
        """Token ids, like `TransformersTarget.encode`."""
        return ids_of(prompt, self.tokenizer, self.spec.vocabulary, {}, thinking)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, without special tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    @functools.cached_property
    def detokenizer(self) -> Detokenizer | None:
        """Incremental `decode`, for streamed text; None without a tokenizer."""
        return None if self.tokenizer is None else detokenizer(self.tokenizer, self.spec.vocabulary)

    # ── embedding, final norm and head ────────────────────────────────────────────────────────────────────────────────

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H], with the family's scale."""
        return self._ends.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], with the family's scale and soft cap."""
        return self._ends.head(hidden)

    def finish(self, states: Tensor) -> Tensor:
        """Hidden states [..., H] after the final norm, from those of the last layer."""
        return self._ends.finish(states)

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]."""
        return self._ends.head_rows(tokens)

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        return self._ends.head_over(tokens, dtype)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the input embedding for these ids [n], without the family's scale."""
        return self._ends.embedding_rows(tokens)

    def copy_to(self, device: torch.device) -> TransformersTarget:
        """Embedding, final norm and head on another device."""
        return self._ends.copy_to(device)

    @functools.cached_property
    def _ends(self) -> TransformersTarget:
        """The model with one layer.  Raises TargetError if its weights can't be loaded."""
        how, name = self._how, self.spec.name
        try:
            with no_reports():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    how["path"], config=_shortened(self._model.config), dtype=how["dtype"], output_loading_info=True,
                    **how["options"],
                )  # fmt: skip
            model, loading_info = loaded
            if missing := sorted(loading_info["missing_keys"]):
                raise OSError(f"it lacks {missing[0]}")
            return TransformersTarget(model.to(self.device), self.tokenizer, name, self.spec.revision, tested=False)
        except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
            raise TargetError(
                f"an engine's states need the embedding, the final norm and the output layer of {name}, which can't be "
                f"read: {first_line(error)}; put its safetensors files into that folder (only these parts are loaded)"
            ) from error

    # ── passes and layers, which are not here ─────────────────────────────────────────────────────────────────────────

    def _refused(self, *_: Any, **__: Any) -> Never:
        """Raises TargetError: passes and layers need the weights."""
        raise TargetError(
            f"this needs a pass or a layer of {self.spec.name}, whose weights are not loaded here; leave out "
            "prepare.servers, set prepare.features to live or cached, or leave out what copies its layers"
        )

    read = layer = check_probe = read_probe = allocate = prefill = verify = default_sampling = _refused


def load_served(
    name: str, *, device: str | None = None, dtype: str | None = None, quantize: str | None = None,
    revision: str | None = None, trust_remote_code: bool = False,
) -> ServedTarget:  # fmt: skip
    """A target from its config and tokenizer: `demo`, `smollm2`, a folder (weights not needed), or a Hugging Face id.

    The settings are those of `load_target`, so that both describe the same target.  Raises TargetError if config or
    tokenizer can't be read.
    """
    path = catalog.checkpoint(name)
    if locate(path, revision) is not None:
        raise TargetError(
            f"target {name!r} is a GGUF file, whose states no server can send; leave out prepare.servers, or give the "
            "checkpoint that the server runs"
        )
    pinned: dict[str, Any] = {} if revision is None else {"revision": revision}
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    place = default_device(device)
    try:
        if (problem := missing_path(path)) is not None:
            raise OSError(problem)
        config = AutoConfig.from_pretrained(path, **options)
        weight_dtype = dtype_of(config, dtype, place)
        is_whole = quantize is None and getattr(config, "quantization_config", None) is None
        if quantised.whole_weights(config, name, place) is not None:
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code).to(weight_dtype)
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(path, **pinned)
        tokenizer, reason = load_tokenizer(path, **options)
        if reason:
            raise OSError(f"no tokenizer: {reason}")
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise TargetError(
            f"can't describe target {name!r}: {first_line(error)}; give `demo`, `smollm2`, a folder "
            "with config.json and tokenizer, or a Hugging Face id (needs the network once)"
        ) from error
    stored = hash_stored(path, revision, model) if is_whole else ""
    return ServedTarget(
        model, tokenizer, name, revision, stored=stored, device=place, dtype=weight_dtype, quantize=quantize,
        options=options, path=path,
    )  # fmt: skip


RunTarget = TransformersTarget | ServedTarget
"""The targets of prepare and training."""


def stores_weights(name: str) -> bool:
    """Whether a folder has files of weights; True for `demo` and anything that is not a folder."""
    folder = Path(name)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _shortened(config: Any) -> Any:
    """The config of the same model with only its first layer."""
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, key, value[:1])
    text.num_hidden_layers = 1
    return short
