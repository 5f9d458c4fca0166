"""Masked-diffusion language models as they are published, such as Dream and Open-dCoder.

They have Qwen2's layers and names of weights, attend in both directions, and were trained on from an autoregressive
model: the row at position i says which token stands at i + 1, so the first mask after a text is read at the text's last
token.

B slots, S tokens, K masks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

from outrider.decoding.draft import padded
from outrider.errors import DrafterError, first_line
from outrider.targets.identity import load_tokenizer
from outrider.targets.progress import no_bars
from outrider.targets.protocol import Target

LAYOUTS = ("Dream", "qwen2")
"""`model_type` of the configs that are read."""
NOT_SHAPE = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype")


class DiffusionLM:
    """One denoising step of a published model."""

    def __init__(self, name: str, target: Target):
        """name: a folder or a Hugging Face id.  Raises DrafterError for another layout, weights that are missing, a
        vocabulary that is not the target's, and a model without a mask token."""
        self.model = _model(name).to(target.device, getattr(torch, target.spec.dtype)).eval().requires_grad_(False)
        self.vocabulary, self.context = target.spec.vocabulary, self.model.config.max_position_embeddings
        vocabulary = self.model.config.vocab_size
        if vocabulary < self.vocabulary:
            raise DrafterError(
                f"{name} has a vocabulary of {vocabulary}, and the target {target.spec.name!r} one of "
                f"{self.vocabulary}; choose a model with the target's tokenizer"
            )
        self.mask_token = _mask_token(name, self.model.config)

    def logits(self, texts: Sequence[Sequence[int]], masks: int) -> Tensor:
        """Logits [B, K, V] of the tokens after these texts, each read whole, with so many masks behind it."""
        device = self.model.device
        counts = torch.tensor([len(text) for text in texts], device=device)
        tokens = padded([[*text, *[self.mask_token] * masks] for text in texts], self.mask_token, device)
        line = torch.arange(tokens.shape[1], device=device)
        # both directions; what stands behind a shorter text's masks is padding
        is_real = line < counts[:, None] + masks
        lowest = torch.finfo(self.model.dtype).min
        mask = torch.zeros(is_real.shape, dtype=self.model.dtype, device=device).masked_fill(~is_real, lowest)
        mask = mask[:, None, None].expand(-1, 1, len(line), -1)
        states = self.model.model(
            input_ids=tokens, attention_mask=mask, position_ids=line.expand_as(tokens), use_cache=False
        ).last_hidden_state
        rows = counts[:, None] - 1 + torch.arange(masks, device=device)
        all_logits = self.model.lm_head(states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1])))
        if self.mask_token < all_logits.shape[-1]:
            all_logits[..., self.mask_token] = -torch.inf
        logits: Tensor = all_logits[..., : self.vocabulary]
        return logits


def _model(name: str) -> Any:
    """The weights, in the layers that they are for; no code of the checkpoint is executed."""
    try:
        fields, _ = PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise DrafterError(
            f"can't read the config of {name}: {first_line(error)}; give a folder with config.json and safetensors, or "
            "a Hugging Face id"
        ) from error
    if fields.get("model_type") not in LAYOUTS:
        raise DrafterError(
            f"{name} has model_type {fields.get('model_type')!r}; a diffusion model must have one of "
            f"{', '.join(LAYOUTS)}: train a drafter of your own instead (deer without `pretrained`)"
        )
    config = Qwen2Config(**{key: value for key, value in fields.items() if key not in NOT_SHAPE})
    with no_bars():
        try:
            loaded: Any = Qwen2ForCausalLM.from_pretrained(name, config=config, output_loading_info=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise DrafterError(f"can't load the weights of {name}: {first_line(error)}") from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise DrafterError(f"{name} lacks {len(missing)} weights, such as {missing[0]}; fetch it again")
    return model


def _mask_token(name: str, config: Any) -> int:
    """As the config has it, or else the tokenizer."""
    mask_token = getattr(config, "mask_token_id", None)
    if mask_token is None:
        tokenizer, _ = load_tokenizer(name)
        mask_token = None if tokenizer is None else tokenizer.mask_token_id
    if mask_token is None or not 0 <= mask_token < config.vocab_size:
        raise DrafterError(
            f"{name} has the mask token {mask_token}, of {config.vocab_size} tokens; set mask_token_id in its "
            "config.json"
        )
    return int(mask_token)
