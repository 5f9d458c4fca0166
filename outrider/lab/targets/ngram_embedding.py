"""A causal LM whose input embeddings depend on earlier tokens: means of a token's embedding and its hashed n-grams'.

LongCat-Flash-Lite (arXiv 2601.21204): orders 2 to n, k tables each, table j of m + 2j + 1 rows.  Order o looks up row
(x_i + x_{i-1} V + ... + x_{i-o+1} V^{o-1}) mod rows; the sum stops at the beginning of a text and at an end token.

`NgramEmbeddingForCausalLM` adds this to a causal LM of transformers that takes embeddings and positions.  A token's
context is what it attends to, so a drafted node looks up its own branch.  Ids are cached as the keys of one additional
layer, so they are kept, moved, cut and copied like keys.

Differs from the paper: tables are one matrix, and so are the projections of their rows; the sum is the same.

R rows, Q tokens of a pass, K cached columns, n order, J tables, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    DynamicLayer,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from outrider.errors import ConfigError, TargetError
from outrider.targets.hf.anatomy import cache_argument, trunk

KIND = "ngram_embedding"
"""Its `model_type` in a config.json."""

# ── hashes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """Which rows of which tables a token and those before it look up."""

    vocabulary: int
    order: int
    """Longest n-gram; 2 looks one token back."""
    splits: int
    """Tables of each order."""
    table_size: int
    """Rows of table j are this and 2 j + 1 more.  Near a multiple of the vocabulary many n-grams share a row."""

    def __post_init__(self) -> None:
        if self.order < 2 or self.splits < 1 or self.table_size < 1:
            raise ConfigError(
                f"n-gram hashes of order {self.order}, {self.splits} splits and {self.table_size} rows look up "
                "nothing; give an order of 2 or more, and 1 or more of the others"
            )

    @property
    def orders(self) -> list[int]:
        """The order of every table."""
        return [order for order in range(2, self.order + 1) for _ in range(self.splits)]

    @property
    def sizes(self) -> list[int]:
        """Rows of every table."""
        return [self.table_size + 2 * table + 1 for table in range(len(self.orders))]

    @property
    def powers(self) -> list[list[int]]:
        """[n][J]: what the token so many positions back is multiplied by; 0 beyond a table's order."""
        tables = list(zip(self.orders, self.sizes, strict=True))
        return [
            [pow(self.vocabulary, back, size) if back < order else 0 for order, size in tables]
            for back in range(self.order)
        ]


def hashed(context: Tensor, powers: Tensor, sizes: Tensor) -> Tensor:
    """Row of every table, [..., J].  context [..., n] int64 as `stopped` returns it, powers [n, J], sizes [J]."""
    return (context[..., None] * powers).sum(-2).remainder(sizes)


class NgramEmbedding(nn.Module):
    """Mean of a word's embedding and of what its n-grams look up."""

    def __init__(self, hashes: NgramHashes, hidden: int, dim: int):
        """dim: width of a table's row."""
        super().__init__()
        self.hashes, self.tables = hashes, len(hashes.orders)
        self.ngram_table = nn.Embedding(sum(hashes.sizes), dim)
        self.projection = nn.Linear(self.tables * dim, hidden, bias=False)
        for name, values in self._constants().items():
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def _constants(self) -> dict[str, Any]:
        sizes = self.hashes.sizes
        return {"powers": self.hashes.powers, "sizes": sizes, "offsets": [sum(sizes[:j]) for j in range(len(sizes))]}

    @torch.no_grad()
    def reset_constants(self) -> None:
        """Write the buffers again, which no checkpoint holds."""
        for name, values in self._constants().items():
            self.get_buffer(name).copy_(torch.tensor(values, device="cpu"))

    def forward(self, words: Tensor, context: Tensor) -> Tensor:
        """[..., H] of words [..., H] and their context [..., n]."""
        powers, sizes, offsets = (self.get_buffer(name) for name in ("powers", "sizes", "offsets"))
        rows = self.ngram_table(hashed(context, powers, sizes) + offsets).flatten(-2)
        mean: Tensor = (words + self.projection(rows)) / (self.tables + 1)
        return mean


# ── contexts: a token and those before it, newest first ───────────────────────────────────────────────────────────────


def stopped(context: Tensor, ends: Sequence[int]) -> Tensor:
    """The context [..., n] with 0 from the first missing token (-1) or end token on, the newest excepted."""
    before = context[..., 1:]
    is_over = before < 0
    for end in ends:
        is_over = is_over | (before == end)
    is_over = is_over.long().cumsum(-1) > 0
    return torch.cat([context[..., :1], before.masked_fill(is_over, 0)], -1)


def shifted(tokens: Tensor, order: int, documents: Tensor | None = None) -> Tensor:
    """Context [R, S, n] of every token of texts [R, S], -1 where there is none.  documents [R, S] as in `Batch`."""
    columns = [tokens]
    for back in range(1, order):
        earlier = _later(tokens, back)
        columns.append(earlier if documents is None else earlier.where(_later(documents, back) == documents, -1))
    return torch.stack(columns, -1)


def _later(values: Tensor, by: int) -> Tensor:
    """values [R, S] so many columns further right, -1 before them."""
    return nn.functional.pad(values, (by, 0), value=-1)[:, : values.shape[1]]


def attended(tokens: Tensor, columns: Tensor, mask: Tensor, order: int) -> Tensor:
    """Context [R, Q, n] of tokens [R, Q], which attend to the columns [R, K] of mask [R or 1, Q, K] bool.

    A text's columns, and those of a branch, are in its own order; the last attended column is the token's own.
    """
    at = torch.arange(columns.shape[1], device=columns.device).where(mask, -1)
    # so many columns more, which nothing attends to, that there are enough to choose from
    at = nn.functional.pad(at.expand(len(columns), -1, -1), (order, 0), value=-1)
    last = at.topk(order, -1).values[..., 1:]
    before = columns.gather(1, last.clamp(min=0).flatten(1)).view(last.shape)
    return torch.cat([tokens[..., None], before.where(last >= 0, -1)], -1)


def _attended_columns(attention_mask: Any, queries: int, columns: int) -> Tensor | None:
    """What each token of a pass attends to, [R or 1, Q, K] bool, from the mask that the pass is given; None where that
    is all before it.

    Of masks by kind of layer the one of whole texts, or the first.
    """
    if isinstance(attention_mask, Mapping):
        masks = [attention_mask.get("full_attention"), *attention_mask.values()]
        attention_mask = next((mask for mask in masks if mask is not None), None)
    if attention_mask is None:
        return None
    if attention_mask.dim() == 2:  # [R, K], 0 for padding
        order = torch.arange(columns, device=attention_mask.device)
        return attention_mask[:, None, :columns].bool() & (order <= order[columns - queries :, None])
    mask = attention_mask[:, 0, :, :columns]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _remembered(cache: Any, tokens: Tensor, layer: int) -> Tensor:
    """All tokens that the cache holds of each row, these [R, Q] included: [R, K].  layer: one after the model's."""
    if isinstance(cache, Cache) and cache.layer_class_to_replicate is None:
        cache.layers.extend(DynamicLayer() for _ in range(layer + 1 - len(cache.layers)))
    ids = tokens[:, None, :, None]
    stored: Tensor = cache.update(ids, ids, layer)[0]
    return stored[:, 0, :, 0]


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class NgramEmbeddingConfig(PreTrainedConfig):
    """The config of a causal LM, `text_config`, and of the tables before its layers."""

    model_type = KIND
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    def __init__(
        self, text_config: Any = None, ngram_order: int = 4, ngram_splits: int = 4,
        ngram_table_size: int | None = None, ngram_dim: int | None = None,
        boundary_token_ids: Sequence[int] | None = None, **others: Any,
    ):  # fmt: skip
        """Sizes unless given: 78 rows a word, as in LongCat-Flash-Lite, rows as wide together as a hidden state; the
        sum stops at the text's end tokens.  Raises ConfigError where a window is shorter than an n-gram."""
        super().__init__(**others)  # first, since it resets how the text's attention and experts are computed
        text: Any = Qwen3Config() if text_config is None else text_config
        self.text_config: Any = AutoConfig.for_model(**text) if isinstance(text, dict) else text
        words, window = self.text_config.vocab_size, getattr(self.text_config, "sliding_window", None)
        if window is not None and window < ngram_order:
            raise ConfigError(f"n-grams of {ngram_order} tokens reach beyond a window of {window}; lower ngram_order")
        self.ngram_order, self.ngram_splits = ngram_order, ngram_splits
        self.ngram_table_size = 78 * words if ngram_table_size is None else ngram_table_size
        tables = len(NgramHashes(words, ngram_order, ngram_splits, self.ngram_table_size).orders)
        self.ngram_dim = max(1, self.text_config.hidden_size // tables) if ngram_dim is None else ngram_dim
        ends = self.text_config.eos_token_id if boundary_token_ids is None else boundary_token_ids
        self.boundary_token_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @property
    def hashes(self) -> NgramHashes:
        return NgramHashes(self.text_config.vocab_size, self.ngram_order, self.ngram_splits, self.ngram_table_size)


class NgramEmbeddingForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal LM with an n-gram embedding before its layers."""

    config_class = NgramEmbeddingConfig
    base_model_prefix = ""
    has_ngrams = True
    """Its passes need ids, and not their embeddings alone."""
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: NgramEmbeddingConfig):
        super().__init__(config)
        self.lm: Any = AutoModelForCausalLM.from_config(config.text_config)
        self.ngrams = NgramEmbedding(config.hashes, config.text_config.hidden_size, config.ngram_dim)
        self._cache_name = cache_argument(inspect.signature(self.lm.forward).parameters)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NgramEmbedding):
            module.reset_constants()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
        cache: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """As the causal LM's own, of token ids.  Raises TargetError for embeddings, which have no n-grams."""
        arguments = self.lm_arguments(input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, others)
        return self.lm(**arguments)

    def lm_arguments(
        self, input_ids: Tensor | None, attention_mask: Any, position_ids: Tensor | None, cache: Any,
        inputs_embeds: Tensor | None, use_cache: bool | None, others: Mapping[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """Arguments of the same pass of the causal LM or its trunk, which is given embeddings."""
        if input_ids is None or inputs_embeds is not None:
            raise TargetError(
                "a model with an n-gram embedding reads token ids, since its embeddings depend on the tokens before; "
                "got embeddings: use a method that drafts without rows of its own in the target's pass"
            )
        arguments = dict(others)
        cache = arguments.pop(self._cache_name, cache)  # as transformers up to 5.23 call it
        use_cache = True if use_cache is None else use_cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config.text_config)
        arguments |= {
            "inputs_embeds": self.embedded(input_ids, attention_mask, position_ids, cache),
            "attention_mask": attention_mask, "use_cache": use_cache, self._cache_name: cache,
        }  # fmt: skip
        return arguments if position_ids is None else arguments | {"position_ids": position_ids}

    def embedded(
        self, tokens: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Embeddings [R, Q, H] of a pass over tokens [R, Q]; the cache, if there is one, reads the tokens."""
        layer = self.config.text_config.num_hidden_layers
        columns = tokens if cache is None else _remembered(cache, tokens, layer)
        queries, order = tokens.shape[1], self.config.ngram_order
        mask = _attended_columns(attention_mask, queries, columns.shape[1])
        if mask is not None:
            context = attended(tokens, columns, mask, order)
        elif cache is None and position_ids is not None:
            # without masks, transformers tells texts in one row apart by positions that do not go on
            begins = nn.functional.pad(position_ids.diff() != 1, (1, 0)).cumsum(-1)
            context = shifted(tokens, order, begins.expand_as(tokens))
        else:
            context = shifted(columns[:, -(queries + order - 1) :], order)[:, -queries:]
        words = self.lm.get_input_embeddings()(tokens)
        return self.ngrams(words, stopped(context, self.config.boundary_token_ids))

    @property
    def model(self) -> nn.Module:
        """The model without its output layer."""
        return _Trunk(self)

    def get_decoder(self) -> Any:
        return self.lm.get_decoder()

    def get_input_embeddings(self) -> Any:
        """Of single words."""
        return self.lm.get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        self.lm.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.lm.get_output_embeddings()

    def set_output_embeddings(self, value: Any) -> None:
        self.lm.set_output_embeddings(value)


class _Trunk(nn.Module):
    """The causal LM's trunk, given embeddings."""

    def __init__(self, model: NgramEmbeddingForCausalLM):
        super().__init__()
        self.trunk, self._lm_arguments = trunk(model.lm), model.lm_arguments

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Any = None, position_ids: Tensor | None = None,
        cache: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        arguments = self._lm_arguments(input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, others)
        return self.trunk(**arguments)


def grown(model: PreTrainedModel, **sizes: Any) -> NgramEmbeddingForCausalLM:
    """A copy of a causal LM with an n-gram embedding that changes nothing yet, to be trained on.

    sizes: as in `NgramEmbeddingConfig`, but for its text.  Word embeddings are multiplied by the number of tables and
    one more, of which the mean is taken; projections are 0; embedding and output layer are no longer one matrix.
    """
    text = copy.deepcopy(model.config)
    text.tie_word_embeddings = False
    model_with_ngrams = NgramEmbeddingForCausalLM(NgramEmbeddingConfig(text, **sizes))
    nn.Module.to(model_with_ngrams, model.device, model.dtype)
    model_with_ngrams.lm.load_state_dict(model.state_dict())
    with torch.no_grad():
        model_with_ngrams.lm.get_input_embeddings().weight.mul_(model_with_ngrams.ngrams.tables + 1)
        model_with_ngrams.ngrams.projection.weight.zero_()
    model_with_ngrams.generation_config = copy.deepcopy(model.generation_config)
    return model_with_ngrams


# transformers loads such a folder by its config.json
AutoConfig.register(KIND, NgramEmbeddingConfig, exist_ok=True)
AutoModelForCausalLM.register(NgramEmbeddingConfig, NgramEmbeddingForCausalLM, exist_ok=True)
