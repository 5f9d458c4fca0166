"""Greedy decoding that follows a model's generation_config, as in `model.generate(do_sample=False)`.

Keys that `Sampling` supports become its settings, which drafters support too.  If there is any other key, all of them
are applied by transformers' own processors, in transformers' order.  A key that requires anything but greedy decoding
of one text is refused by name; keys about sampling, the cache or an assistant do not change greedy output.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from outrider.errors import ConfigError, TargetError
from outrider.sampling.settings import Processor, Sampling

IDLE: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,), "dola_layers": (),
    "guidance_scale": (1,), "watermarking_config": (), "token_healing": (False,), "stop_strings": (), "max_time": (),
    "constraints": (), "force_words_ids": (), "is_assistant": (False,),
}  # fmt: skip
"""Keys that make `generate` do something other than greedy decoding of one text, and the values that don't."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "sequence_bias": (), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (), "begin_suppress_tokens": (), "renormalize_logits": (False,),
}  # fmt: skip
"""Keys that `Sampling` does not support, and the values that change nothing."""

INSTEAD = "remove the key, or pass `sampling=`, which replaces all of generation_config except its end tokens"


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """The ids at which `model.generate` ends a text: those of its current generation_config.  Raises TargetError for
    anything other than ids."""
    config = model.generation_config
    ends = getattr(model.config, "eos_token_id", None) if config is None else config.eos_token_id
    try:
        ids = torch.as_tensor([] if ends is None else ends, device="cpu").flatten().tolist()
        return frozenset(operator.index(token) for token in ids if token >= 0)  # no text has a negative id
    except (RuntimeError, TypeError, ValueError):
        raise TargetError(
            f"generation_config.eos_token_id must be a token id or a list of them, got {ends!r:.80}; correct it"
        ) from None


def greedy_sampling(
    model: PreTrainedModel, ends: frozenset[int], vocabulary: int, prompt: Sequence[int], max_new_tokens: int
) -> Sampling:
    """The `Sampling` that continues this prompt as `model.generate(do_sample=False)` does.

    Raises ConfigError for a key of the model's generation_config that is not supported or invalid.
    """
    config = model.generation_config
    settings = {} if config is None else {key: value for key, value in vars(config).items() if value is not None}
    for key, idle in IDLE.items():
        if key in settings and settings[key] not in idle:
            raise ConfigError(
                f"the target's generation_config.{key} is {settings[key]!r}, which is not greedy decoding of one text; "
                f"{INSTEAD}"
            )
    settings = {key: value for key, value in settings.items() if key not in NEUTRAL or value not in NEUTRAL[key]}
    text = _Text(prompt, max_new_tokens, sorted(ends), vocabulary, str(model.device))
    if "min_length" in settings:  # includes the prompt, and is overridden by min_new_tokens
        with _config_errors("min_length", settings["min_length"]):
            settings.setdefault("min_new_tokens", max(0, settings["min_length"] - len(prompt)))
    return _by_processors(model, settings, text) if settings.keys() & NEUTRAL.keys() else _by_settings(settings, text)


class _Text(NamedTuple):
    """The text to continue, and its limits."""

    prompt: Sequence[int]
    max_new_tokens: int
    ends: list[int]
    vocabulary: int
    device: str

    @property
    def ids(self) -> Any:
        """Token ids [1, n] of the prompt."""
        return torch.tensor([[*self.prompt]], device=self.device)

    def checked(self, tokens: Iterable[int]) -> list[int]:
        """These ids.  Raises ValueError for one outside the vocabulary."""
        ids = list(tokens)
        wrong = [token for token in ids if not 0 <= token < self.vocabulary]
        if wrong:
            raise ValueError(f"token {wrong[0]} is outside the vocabulary of {self.vocabulary}")
        return ids

    def no_ends(self, words: Iterable[list[int]]) -> list[list[int]]:
        """These bad words, except single end tokens, which transformers does not ban."""
        return [self.checked(word) for word in words if word not in [[end] for end in self.ends]]


@contextmanager
def _config_errors(key: str, value: Any) -> Iterator[None]:
    """Turn an exception for a bad value into a ConfigError that names the key."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"the target's generation_config.{key} {value!r} can't be read ({error}); {INSTEAD}"
        ) from error


SETTINGS: Mapping[str, Callable[[Any, _Text, Sampling], dict[str, Any]]] = {
    "repetition_penalty": lambda value, text, sampling: {"repetition_penalty": value},
    "bad_words_ids": lambda value, text, sampling: {"bad_words": text.no_ends(value)},
    "suppress_tokens": lambda value, text, sampling: {
        "bad_words": [*sampling.bad_words, *((token,) for token in value if 0 <= token < text.vocabulary)]
    },
    "min_new_tokens": lambda value, text, sampling: {"min_new_tokens": min(value, text.max_new_tokens)},
}
"""Keys that `Sampling` supports, and the settings they become."""


def _by_settings(settings: Mapping[str, Any], text: _Text) -> Sampling:
    sampling = Sampling()
    for key, setting in SETTINGS.items():
        if key in settings:
            with _config_errors(key, settings[key]):
                sampling = replace(sampling, **setting(settings[key], text, sampling))
    return sampling


TOKENS: Mapping[str, Callable[[Any], Iterable[int]]] = {
    "sequence_bias": lambda value: itertools.chain(
        *(value if isinstance(value, Mapping) else (words for words, _ in value))
    ),
    "forced_bos_token_id": lambda value: [value],
    "forced_eos_token_id": lambda value: [value] if isinstance(value, int) else value,
}
"""Keys whose tokens transformers does not check in advance."""
OF_ENDS = ("min_new_tokens", "exponential_decay_length_penalty")
"""Keys that have no effect if the model has no end token."""


def _by_processors(model: Any, settings: Mapping[str, Any], text: _Text) -> Sampling:
    keys = [key for key in (*NEUTRAL, *SETTINGS) if text.ends or key not in OF_ENDS]
    chosen = {key: value for key, value in settings.items() if key in keys}

    def made(keys: Mapping[str, Any]) -> list[Processor]:
        config = GenerationConfig(max_length=len(text.prompt) + text.max_new_tokens)
        vars(config).update(keys, _eos_token_tensor=torch.tensor(text.ends, device=text.device) if text.ends else None)
        length, device = len(text.prompt), text.device
        return list(
            model._get_logits_processor(config, input_ids_seq_length=length, encoder_input_ids=text.ids, device=device)
        )

    for key, value in chosen.items():  # one by one, so that the error names the key
        with _config_errors(key, value):
            text.checked(TOKENS[key](value) if key in TOKENS else ())
            if key == "bad_words_ids":
                chosen[key] = text.no_ends(value) or None
            made({key: chosen[key]})
    return Sampling(processors=made(chosen))
