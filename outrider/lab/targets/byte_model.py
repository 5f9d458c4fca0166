"""A language model of bytes and patches: a local encoder, a global model over patches, a light local decoder.
(BLT 2412.09871.)

A small model of bytes, the patcher, reads every byte; where it is uncertain about the next one, a patch ends.  The
encoder reads every byte too.  At the end of a patch, its last row attends to the encoder's rows of the patch and goes
through the global model, which attends to earlier patches.  The result is the patch's latent.  In the decoder, every
byte attends to the latents of all patches that have ended.  Everything is causal byte by byte, so a pass over an anchor
and its draft verifies the draft; if no patch ends in a pass, the global model does not run.

Differs from the paper: a patch asks with its last byte's row, in the local width; bytes attend to all earlier latents,
not to one; there are no hashed n-grams of bytes.

`load_target` loads its folders like any other causal LM.

R rows of a batch, n bytes a row of the pass, K columns that they may attend to, E rows that end a patch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from outrider.lab.byte_patches import Known, free_rows, noted, notes_of

NOTES = 2
"""Layers of a cache that store what rows must know of those before them: positions, and ends of patches."""
SPECIALS = ("<|end|>", "<|mask|>")
"""Tokens after the 256 bytes: the end of a text, and a byte yet to be drafted."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""It continues text: a turn is its content, and an answer ends with the end."""
CACHE = "cache" if "cache" in vars(CausalLMOutputWithPast)["__dataclass_fields__"] else "past_key_values"
"""What this version of transformers calls a cache that a pass hands on."""
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the keys and values of a pass to those that its rows may attend to."""


class ByteConfig(PreTrainedConfig):
    """Sizes; those without a prefix are of the local layers."""

    model_type = "outrider_bytes"

    vocab_size: int = 258
    hidden_size: int = 128
    intermediate_size: int = 384
    num_attention_heads: int = 4
    local_encoder_layers: int = 1
    local_decoder_layers: int = 1
    window_size: int = 128
    """Bytes that a local layer attends to."""
    patcher_layers: int = 1
    patcher_hidden_size: int = 64
    patcher_intermediate_size: int = 192
    patcher_attention_heads: int = 4
    entropy_threshold: float = 2.0
    """A byte ends its patch if the patcher's prediction of the next one has more entropy than this, in nats."""
    global_layers: int = 4
    global_hidden_size: int = 256
    global_intermediate_size: int = 768
    global_attention_heads: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    num_hidden_layers: int | None = None
    """Layers of a cache: of all parts, of attention to bytes and to patches, and notes.  Follows from the others."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        layers = self.local_encoder_layers + self.global_layers + self.local_decoder_layers + self.patcher_layers
        self.num_hidden_layers = layers + 1 + self.local_decoder_layers + NOTES
        super().__post_init__(**kwargs)


class Layer(nn.Module):
    """Attention with rotary positions, then a gated MLP, each after a norm."""

    def __init__(self, hidden: int, heads: int, intermediate: int, config: ByteConfig):
        super().__init__()
        self.heads, self.theta = heads, config.rope_theta
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, hidden_states: Tensor, mask: Tensor, positions: Tensor, store: Store) -> Tensor:
        """hidden_states [R, n, H], mask [R or 1, n, K] bool, positions [R, n]."""
        q, k, v = self.qkv(self.attention_norm(hidden_states)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = rotated(torch.stack([q, k]), positions, self.theta).transpose(2, 3).unbind(0)
        keys, values = store(k, v.transpose(1, 2))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None])
        hidden_states = hidden_states + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(hidden_states)).chunk(2, -1)
        changed: Tensor = hidden_states + self.down(F.silu(gate) * up)
        return changed


def rotated(states: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Queries or keys [..., R, n, h, d] at positions [R, n]."""
    half = states.shape[-1] // 2
    exact = torch.promote_types(states.dtype, torch.float32)  # bfloat16 phases would be wrong at far positions
    frequencies = theta ** -(torch.arange(half, device=states.device, dtype=exact) / half)
    phases = positions[..., None, None].to(exact) * frequencies
    cos, sin = phases.cos().to(states.dtype), phases.sin().to(states.dtype)
    one, other = states[..., :half], states[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Across(nn.Module):
    """Attention of some rows to others: of a patch to its bytes, of bytes to patches."""

    def __init__(self, hidden: int, heads: int, sources: int, config: ByteConfig):
        """sources: width of the rows that are attended to."""
        super().__init__()
        self.heads, self.theta = heads, config.rope_theta
        self.norm, self.source_norm = (nn.RMSNorm(width, config.rms_norm_eps) for width in (hidden, sources))
        self.q, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.kv = nn.Linear(sources, 2 * hidden, bias=False)

    def forward(self, states: Tensor, sources: Tensor, mask: Tensor, positions: Tensor, store: Store) -> Tensor:
        """States [R, n, H] that attend to sources [R, n, ...] of this pass and earlier ones, by mask [R, n, K]; those
        that it allows nothing are unchanged."""
        is_any = mask.any(-1, keepdim=True)
        q = self.q(self.norm(states)).unflatten(-1, (self.heads, -1))
        k, v = self.kv(self.source_norm(sources)).unflatten(-1, (2, self.heads, -1)).unbind(2)
        q, k = rotated(torch.stack([q, k]), positions, self.theta).transpose(2, 3).unbind(0)
        keys, values = store(k, v.transpose(1, 2))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=(mask | ~is_any)[:, None])
        added: Tensor = states + self.out(attended.transpose(1, 2).flatten(2)) * is_any
        return added


class Patcher(nn.Module):
    """A small model of bytes, whose uncertainty about the next byte ends a patch."""

    def __init__(self, config: ByteConfig, first: int):
        """first: its first layer of a cache."""
        super().__init__()
        hidden, heads = config.patcher_hidden_size, config.patcher_attention_heads
        self.first, self.heads, self.threshold = first, heads, config.entropy_threshold
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(
            [Layer(hidden, heads, config.patcher_intermediate_size, config) for _ in range(config.patcher_layers)]
        )
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """Logits [R, n, V] of the next byte."""
        states = self.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            states = layer(states, mask, positions, partial(stored, cache, self.first + index))
        logits: Tensor = self.head(self.norm(states))
        return logits

    @torch.no_grad()
    def ends(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Which bytes end a patch, [R, n] bool; it does not run if all of them are held."""
        free = free_rows(ids.shape[1])
        if not free:
            shape = len(ids), self.heads, ids.shape[1], self.embed_tokens.embedding_dim
            skip(cache, range(self.first, self.first + len(self.layers)), self.embed_tokens.weight, shape)
            return torch.zeros_like(ids, dtype=torch.bool)
        ends = entropies(self(ids, mask, positions, cache)) > self.threshold
        ends[:, free:] = False
        return ends


def entropies(logits: Tensor) -> Tensor:
    """In nats, [...] of logits [..., V]."""
    logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def skip(cache: Any, layers: range, like: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Store zeros as keys and values of layers that do not run.  shape: rows, heads, columns, width of all heads."""
    if cache is not None:
        nothing = like.new_zeros(*shape[:3], shape[3] // shape[1])
        for layer in layers:
            cache.update(nothing, nothing, layer)


class GlobalModel(nn.Module):
    """Reads the rows at which patches end, and attends to those alone."""

    def __init__(self, config: ByteConfig):
        super().__init__()
        self.first = config.local_encoder_layers + config.local_decoder_layers
        """Its first layer of a cache."""
        self.wide, self.heads = config.global_hidden_size, config.global_attention_heads
        self.enter = nn.Linear(config.hidden_size, self.wide, bias=False)
        self.layers = nn.ModuleList(
            [Layer(self.wide, self.heads, config.global_intermediate_size, config) for _ in range(config.global_layers)]
        )

    def forward(self, states: Tensor, ends: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Latents [R, n, W], 0 where no patch ends.  states [R, n, H], ends [R, n]; mask [R, n, K]: ends up to each."""
        most = int(ends.sum(-1).amax())
        order = ends.int().argsort(dim=-1, descending=True, stable=True)[:, :most]
        is_real = ends.gather(1, order)
        latents = states.new_zeros(*ends.shape, self.wide)
        if not most:
            layers = range(self.first, self.first + len(self.layers))
            skip(cache, layers, states, (len(states), self.heads, ends.shape[1], self.wide))
            return latents
        # autocast would give another type than the states'
        patches = self.enter(taken(states, order)).to(states.dtype)
        # a row with fewer ends than another has rows too many, which no one reads
        mask = taken(mask, order) | ~is_real[..., None]
        for index, layer in enumerate(self.layers):
            store = self._store(cache, self.first + index, order, is_real, ends.shape[1])
            patches = layer(patches, mask, positions.gather(1, order), store)
        patches = patches.to(states.dtype) * is_real[..., None]
        return latents.scatter(1, order[..., None].expand_as(patches), patches)

    def _store(self, cache: Any, layer: int, order: Tensor, is_real: Tensor, width: int) -> Store:
        """Keys and values of ends in their columns, and 0 in the others."""

        def spread(states: Tensor) -> Tensor:
            at = order[:, None, :, None].expand_as(states)
            nothing = states.new_zeros(*states.shape[:2], width, states.shape[3])
            return nothing.scatter(2, at, states * is_real[:, None, :, None])

        return lambda keys, values: stored(cache, layer, spread(keys), spread(values))


def taken(states: Tensor, order: Tensor) -> Tensor:
    """Rows [R, E, ...] of states [R, n, ...] by their numbers [R, E]."""
    return states.gather(1, order[..., None].expand(-1, -1, states.shape[-1]))


def stored(cache: Any, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if cache is None:
        return keys, values
    columns: tuple[Tensor, Tensor] = cache.update(keys, values, layer)
    return columns


class ByteTrunk(PreTrainedModel):
    """The model without its output layer.  `layers` are the local ones: those that every byte goes through."""

    config_class = ByteConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: ByteConfig):
        super().__init__(config)
        sizes = config.hidden_size, config.num_attention_heads, config.intermediate_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Layer(*sizes, config) for _ in range(config.local_encoder_layers + config.local_decoder_layers)]
        )
        self.global_model = GlobalModel(config)
        self.patcher = Patcher(config, len(self.layers) + config.global_layers)
        local = config.hidden_size, config.num_attention_heads
        self.to_bytes = Across(*local, config.hidden_size, config)
        self.to_patches = nn.ModuleList(
            [Across(*local, config.global_hidden_size, config) for _ in range(config.local_decoder_layers)]
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, cache: Any = None,
        past_key_values: Any = None, use_cache: bool | None = None, **_: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        past, (rows, width) = 0 if cache is None else cache.get_seq_length(), input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(past, past + width, device=input_ids.device)[None]
        positions = position_ids.expand(rows, -1)
        states, first = self.embed_tokens(input_ids), self._first
        notes = noted(cache, first, notes_of(positions, states.dtype))
        columns = Known.of(allowed_by(attention_mask, past, width, input_ids.device), notes)
        mask, encoders = columns.within(positions, self.config.window_size), self.config.local_encoder_layers
        ends = self.patcher.ends(input_ids, mask, positions, cache)
        ended = noted(cache, first + 1, ends[..., None].to(states.dtype))[..., 0] > 0
        for index, layer in enumerate(self.layers[:encoders]):
            states = layer(states, mask, positions, partial(stored, cache, index))
        patches, store = columns.allowed & ended[:, None], partial(stored, cache, first + NOTES)
        pooled = self.to_bytes(states, states, columns.of_patch(positions, ended), positions, store)
        latents = self.global_model(pooled, ends, patches, positions, cache)
        for index, (across, layer) in enumerate(zip(self.to_patches, self.layers[encoders:], strict=True)):
            store = partial(stored, cache, first + NOTES + 1 + index)
            states = across(states, latents, patches, positions, store)
            states = layer(states, mask, positions, partial(stored, cache, encoders + index))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states), **{CACHE: cache})

    @property
    def _first(self) -> int:
        """The first of the layers of a cache that store notes and what is attended to across."""
        return len(self.layers) + self.config.global_layers + self.config.patcher_layers


class ByteModel(PreTrainedModel, GenerationMixin):
    """The model with its output layer: logits of the next byte."""

    config_class = ByteConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    has_patches = True
    """Its passes read whole patches, which hang on ids before them."""

    def __init__(self, config: ByteConfig):
        super().__init__(config)
        self.model = ByteTrunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, cache: Any = None,
        past_key_values: Any = None, use_cache: bool | None = None, **_: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        cache_arguments = {"cache": cache, "past_key_values": past_key_values, "use_cache": use_cache}
        output = self.model(input_ids, attention_mask, position_ids, **cache_arguments)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), **{CACHE: output.get(CACHE)})


def allowed_by(attention_mask: Any, past: int, width: int, device: torch.device) -> Tensor:
    """The mask [R or 1, n, K] bool that a pass was given: by kind of layer, by row and column, by column, or none."""
    if isinstance(attention_mask, Mapping):
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is not None and attention_mask.dim() == 4:
        mask: Tensor = attention_mask[:, 0]
        return mask if mask.dtype == torch.bool else mask == 0
    columns = torch.arange(past + width, device=device)
    causal = (columns <= columns[past:, None])[None]
    return causal if attention_mask is None else causal & attention_mask[:, None].bool()


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, whose id is the byte, and `SPECIALS` after them."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    end, mask = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, mask_token=mask, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


# transformers loads such a folder by its config.json
AutoConfig.register(ByteConfig.model_type, ByteConfig, exist_ok=True)
AutoModelForCausalLM.register(ByteConfig, ByteModel, exist_ok=True)
