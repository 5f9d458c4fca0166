"""Any Hugging Face causal LM whose layers all attend in full, as a Target: its law, its taps, its slots.

Logits are the model's own, so scales and soft-caps are in them.  Taps and the final hidden state are caught by hooks on the
decoder layers and on the output head, which every family has.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider import demo, packed
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Scores, TargetSpec
from outrider.errors import DataError, TargetError
from outrider.targets.cache import SlotCache

FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral", "phi", "gpt_neox", "gpt2"})
"""Model types whose decoding was compared with `model.generate`, token for token, by the tests."""


class TransformersTarget:
    """A causal LM whose law is kept.  Made by `load_target`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None, revision: str | None = None):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = model.device
        if self.device.type == "cpu":
            # or transformers copies keys and values to every query head of a group, a fifth of a masked pass
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
            packed.pack(model)
        self._decoder_layers = _decoder_layers(model)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        self._caught: dict[int | str, Tensor] = {}
        self._hooked: set[int] = set()
        self._head.register_forward_pre_hook(self._catch_hidden)
        self._takes_masks_by_kind = _takes_masks_by_kind(model)
        self.spec = _spec(model, tokenizer, name, revision)
        self.ends = _ends(model)
        self.mask_token: int | None = getattr(tokenizer, "mask_token_id", None)
        """Id that stands for a token yet to be drafted; None where the tokenizer has none."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H]."""
        return self._embedding(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states after the final norm."""
        return self._head.forward(hidden.to(self._head.weight.dtype))  # not called: its hook belongs to the model's own passes

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are for reading."""
        return self._decoder_layers[index]

    def allocate(self, slots: int, length: int) -> SlotCache:
        return SlotCache(slots, length, self.device)

    @torch.inference_mode()
    def prefill(
        self, cache: SlotCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...] = ()
    ) -> Scores:
        """Read one chunk [R, S], right-padded, behind what each slot holds.  `logits` [R, 1, V] follow the last real token."""
        cache.open(rows, tokens.shape[1])
        last = torch.tensor([length - 1 for length in lengths], device=self.device)
        hidden, tapped = self._states(tokens, cache, taps)
        cache.append(lengths)
        rows_of_hidden = hidden[torch.arange(len(last), device=self.device), last].unsqueeze(1)
        return Scores(self.head(rows_of_hidden), hidden, tapped)

    @torch.inference_mode()
    def verify(self, cache: SlotCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = ()) -> Scores:
        """One pass over anchor and draft: logits [B, N+1, V].  Nothing is committed until `cache.keep`."""
        tokens = anchor.unsqueeze(-1)
        nodes = draft.tokens.shape[1]
        if nodes:
            # an id outside the vocabulary is judged by the law; here it only must not break the embedding
            tokens = torch.cat([tokens, draft.tokens.clamp(0, self.spec.vocabulary - 1)], -1)
        cache.open(rows, nodes + 1)
        visible = draft.visible() if draft.branches else None
        depths = nn.functional.pad(draft.depths() + 1, (1, 0)) if draft.branches else None
        self._tap(taps)
        # one token a row, all rows at one place: everything may be seen, and a family that lets us say so saves the mask
        unmasked = not nodes and cache.is_even and self._takes_masks_by_kind
        with packed.products():
            logits = self.model(
                input_ids=tokens,
                attention_mask={"full_attention": None} if unmasked else cache.mask(visible, self.model.dtype),
                position_ids=cache.positions(depths).clamp(max=self.spec.context - 1),  # padding may reach behind it
                past_key_values=cache,
                use_cache=True,
            ).logits
        return Scores(logits, self._caught["hidden"], self._tapped(taps))

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a cache."""
        cache = self.allocate(*tokens.shape)
        cache.open(range(len(tokens)), tokens.shape[1])
        return self._states(tokens, cache, taps)

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids given as they are.

        Raises DataError for an empty prompt, ids outside the vocabulary, or text without a tokenizer.
        """
        if len(prompt) == 0:
            raise DataError("the prompt is empty; give at least one token of text")
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            return self._known(list(prompt))  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise DataError("this target was loaded without a tokenizer: give prompts as lists of token ids")
        if isinstance(prompt, str):
            return self._known(self.tokenizer.encode(prompt, add_special_tokens=True))
        if self.tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template: give the prompt as one text instead of chat messages")
        return self._known(
            self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, special tokens left out; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    # ── one forward pass ──────────────────────────────────────────────────────────────────────────────────────────────

    def _states(self, tokens: Tensor, cache: SlotCache, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        self._tap(taps)
        with packed.products():
            hidden = self.model.base_model(
                input_ids=tokens,
                attention_mask=cache.mask(None, self.model.dtype),
                position_ids=cache.positions().clamp(max=max(self.spec.context, tokens.shape[1]) - 1),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return hidden, self._tapped(taps)

    def _tap(self, taps: tuple[int, ...]) -> None:
        for layer in taps:
            if layer not in self._hooked:
                self._decoder_layers[layer].register_forward_hook(self._catcher(layer))
                self._hooked.add(layer)

    def _catcher(self, layer: int) -> Any:
        def catch(_module: nn.Module, _inputs: object, output: Any) -> None:
            self._caught[layer] = output[0] if isinstance(output, tuple) else output

        return catch

    def _catch_hidden(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._caught["hidden"] = inputs[0]

    def _tapped(self, taps: tuple[int, ...]) -> Tensor | None:
        return torch.stack([self._caught[layer] for layer in taps], 2) if taps else None

    def _known(self, tokens: list[int]) -> list[int]:
        for token in tokens:
            if not 0 <= token < self.spec.vocabulary:
                raise DataError(f"token id {token} lies outside the target's vocabulary of {self.spec.vocabulary}")
        return tokens


def load_target(
    target: str | Path | PreTrainedModel,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    quantization: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> TransformersTarget:
    """Load a causal LM as a target: `demo`, a Hugging Face id, a local folder, or a module that is already there.

    dtype: float32 on a CPU and the checkpoint's own on an accelerator, unless given.  quantization is handed to transformers
    as `quantization_config`, device_map as it is.  A bare module has no tokenizer: its prompts are token ids.
    Raises TargetError where it can't be found or loaded, or where its family is not known to be exact.
    """
    if isinstance(target, nn.Module):
        _supported(target.config, type(target).__name__)
        model: Any = target
        model = model if dtype is None else model.to(dtype=_dtype(dtype))
        return TransformersTarget(model if device is None else model.to(device))
    name = str(target)
    path = str(demo.TARGET) if name == "demo" else name
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    wanted = _dtype(dtype) if dtype is not None else (torch.float32 if device.type == "cpu" else "auto")
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _supported(config, name)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=wanted, device_map=device_map, quantization_config=quantization, **options
        )
        tokenizer = _tokenizer(path, options)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"can't load target {name!r}: {_first_line(error)}; give `demo`, a folder with config.json and safetensors, or a "
            "Hugging Face id (which needs the network the first time)"
        ) from error
    if device_map is None and quantization is None:
        model = model.to(device)
    return TransformersTarget(model, tokenizer, name, revision)


def _tokenizer(path: str, options: dict[str, Any]) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        # where there are no files, transformers makes up a tokenizer of special tokens alone
        reason = "" if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else "its vocabulary is empty"
    except (OSError, ValueError, KeyError) as error:
        tokenizer, reason = None, _first_line(error)
    if reason:
        logging.getLogger(__name__).warning("no tokenizer for %s (%s): prompts must be token ids", path, reason)
        return None
    return tokenizer


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise TargetError(f"dtype {dtype!r} is not a floating-point type of torch; use float32, bfloat16, float16 or float64")
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _supported(config: Any, name: str) -> None:
    """Refuse what was not proven: another family, or layers that don't attend in full."""
    if config.model_type not in FAMILIES:
        raise TargetError(
            f"{name} is of family {config.model_type!r}, which Outrider does not know to decode exactly yet; "
            f"families it does: {', '.join(sorted(FAMILIES))}"
        )
    partial = {kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    if partial or window:
        what = ", ".join(sorted(partial)) or f"a sliding window of {window}"
        raise TargetError(f"{name} has layers that don't attend in full ({what}); only full attention is supported yet")


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TargetError(f"{type(model).__name__} has no list of {count} decoder layers to tap")


@torch.inference_mode()
def _takes_masks_by_kind(model: PreTrainedModel) -> bool:
    """Whether this family accepts {layer type: mask}, in which None means that nothing is masked.  Tried, not looked up."""
    if set(getattr(model.config, "layer_types", None) or ()) != {"full_attention"}:
        return False
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        given = model(input_ids=token, attention_mask={"full_attention": None}, use_cache=False).logits
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return torch.equal(given, model(input_ids=token, use_cache=False).logits)


def _ends(model: PreTrainedModel) -> frozenset[int]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = model.config.eos_token_id if ends is None else ends
    return frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)


def _spec(model: PreTrainedModel, tokenizer: Any, name: str | None, revision: str | None) -> TargetSpec:
    config: Any = model.config
    return TargetSpec(
        name=name or type(model).__name__,
        revision=revision or getattr(config, "_commit_hash", None),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        vocabulary=model.get_output_embeddings().weight.shape[0],
        context=config.max_position_embeddings,
        dtype=str(model.dtype).removeprefix("torch."),
        tokenizer_hash=None if tokenizer is None else hash_tokenizer(tokenizer),
        weights_hash=hash_weights(model),
    )


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary, 16 hex digits."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{token}\t{number}" for token, number in pairs).encode()).hexdigest()[:16]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first values of every weight, read as bfloat16 so that the dtype does not matter."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sample = weight.flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
