"""The transformers class for a config: a causal LM, or a model that also reads images."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from outrider.errors import TargetError, first_line


def loader_of(config: Any, name: str) -> Any:
    """The class whose `from_pretrained` loads a checkpoint with this config.

    Raises TargetError for a config of something else, such as an encoder.
    """
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        return AutoModelForImageTextToText
    raise not_causal(config, name)


def not_causal(config: Any, name: str) -> TargetError:
    return TargetError(
        f"{name} is a model of {type(config).__name__}, and transformers has no causal LM for it; use a model that "
        "generates text"
    )


def text_model(config: Any, name: str) -> Any:
    """A causal LM of a text part's config, with new weights on the current default device.

    Raises TargetError if there is none.
    """
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None)
    if not is_causal and (type(config) not in MODEL_MAPPING or config.is_encoder_decoder):
        raise not_causal(config, name)
    try:
        return AutoModelForCausalLM.from_config(config) if is_causal else TextPart(config)
    except Exception as error:  # every family checks its sizes in its own way
        what = f"{name}'s config describes a {type(config).__name__} that can't be built: {first_line(error)}"
        raise TargetError(f"{what}; correct its config.json") from error


class TextPart(nn.Module):
    """The language model of a model that reads images, and its output layer unless it is tied to the embedding."""

    def __init__(self, config: Any):
        super().__init__()
        self.model = AutoModel.from_config(config)
        if not getattr(config, "tie_word_embeddings", False):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.get_default_dtype())
