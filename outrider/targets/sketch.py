"""A target known only by its config: enough to build a drafter without weights and to count parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from outrider.errors import TargetError, first_line
from outrider.hub import missing_path
from outrider.targets import catalog
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf.files import locate
from outrider.targets.hf.anatomy import PartialHead
from outrider.targets.hf.checkpoints.classes import text_model
from outrider.targets.identity import load_tokenizer
from outrider.targets.protocol import TargetSpec
from outrider.targets.sizes import layer_sizes, unused_row
from outrider.targets.sorts import special

TIED = "tie_word_embeddings"


class Sketch:
    """Stands in for a target when a draft model is built on the meta device.  It has shapes but no values."""

    device = torch.device("meta")

    def __init__(self, config: Any, spec: TargetSpec, mask_token: int | None):
        self.config, self.spec, self.mask_token = config, spec, mask_token
        self.ends: frozenset[int] = frozenset()

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.empty(*tokens.shape, self.spec.hidden, device=self.device)

    def head(self, hidden: Tensor) -> Tensor:
        return torch.empty(*hidden.shape[:-1], self.spec.vocabulary, device=self.device)

    def check_probe(self) -> None:
        """Does nothing: whether its passes can include a probe is only known with its weights."""

    head_rows = embedding_rows = embed

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        return PartialHead(self.head_rows(tokens), None, lambda values: values, dtype)

    def layer(self, index: int) -> nn.Module:
        return self._layers[index]

    @functools.cached_property
    def _model(self) -> Any:
        with torch.device(self.device):
            return text_model(self.config, self.spec.name)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(self.weights().values())

    def weights(self) -> dict[str, int]:
        """Number of values of each of its weights, by name."""
        return {name: weight.numel() for name, weight in self._model.named_parameters()}

    @functools.cached_property
    def _layers(self) -> Any:
        modules = self._model.modules()
        return next((m for m in modules if isinstance(m, nn.ModuleList) and len(m) == self.spec.layers), [])


def sketch(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Sketch:
    """The sketch of `demo`, `smollm2`, a folder with at least a config.json, a GGUF file, or a Hugging Face id.

    Reads no weights.  Raises TargetError if its config can't be read.
    """
    if (special_target := special(name)) is not None:
        sort, described = special_target
        return sketch(sort.first(described), revision, trust_remote_code)
    path = catalog.checkpoint(name)
    if (files := locate(path, revision)) is not None:
        config, parts = gguf.described(name, files)
        return of_config(config, name, revision, gguf.read_tokenizer(parts)[0])
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        if (problem := missing_path(path)) is not None:
            raise OSError(problem)
        config = AutoConfig.from_pretrained(path, **options)
        tokenizer, _ = load_tokenizer(path, **options)
        return of_config(config, name, revision, tokenizer)
    except Exception as error:  # every family checks its config in its own way
        raise unreadable(name, error) from error


def unreadable(name: str, error: Exception) -> TargetError:
    """The error for a target whose config.json could not be read."""
    return TargetError(
        f"the config of target {name!r} can't be read: {first_line(error)}; give `demo`, `smollm2`, a "
        "folder with config.json, or a Hugging Face id (which needs the network the first time)"
    )


def of_config(config: Any, name: str, revision: str | None = None, tokenizer: Any = None) -> Sketch:
    """The sketch of a model with this transformers config."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, TIED):  # the whole model's config has it
        setattr(text, TIED, getattr(config, TIED, False))
    spec = TargetSpec(
        name, revision, text.num_hidden_layers, text.hidden_size, text.vocab_size,
        getattr(text, "max_position_embeddings", 0), str(text.dtype or torch.float32).removeprefix("torch."),
        None, "",
        sizes=layer_sizes(config), unused=unused_row(tokenizer, text.vocab_size),
    )  # fmt: skip
    return Sketch(text, spec, getattr(tokenizer, "mask_token_id", None))
