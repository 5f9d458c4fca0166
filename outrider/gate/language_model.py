"""A target, with or without a drafter, as a model of lm-evaluation-harness.  Needs lm-eval, the extra `eval`.

Prompts are truncated, answers ended and post-processed like those of lm-eval's own `hf` model.  Log-likelihoods come
from the target alone, without drafts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.generation import batch, serve
from outrider.loading import load_drafter
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.protocol import members_of
from outrider.targets.text.cuts import Cuts
from outrider.targets.text.detokenizer import detokenizer

DRAWN = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""Sampling settings of a task, or those of the target's generation config if it has none.  `Sampling` uses the same
names."""
IDLE = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
"""Settings of transformers' `generate` that have no effect with these values."""


@register_model("outrider")
class OutriderLM(TemplateLM):
    """A target, with or without a drafter, as lm-eval's language model."""

    def __init__(
        self, target: str | TransformersTarget = "demo", drafter: Drafter | str | None = None, *, slots: int = 8,
        max_length: int | None = None, max_gen_toks: int = 256, add_bos_token: bool | None = None,
        think_end_token: str | None = None, seed: int = 0, batch_size: int | str | None = None,
        device: str | None = None,
        dtype: str | None = None, max_batch_size: int | None = None,
        on_request: Callable[[int, int], None] | None = None,
    ):  # fmt: skip
        """drafter: an object, a kind, or a checkpoint folder.  batch_size: replaces slots if it is a number.
        seed: for tasks that sample; texts depend on nothing else.

        on_request(done, of) is called after each answer.
        """
        super().__init__()
        self.target = load_target(target, device=device, dtype=dtype) if isinstance(target, str) else target
        if self.target.tokenizer is None:
            raise ConfigError(f"{self.target.spec.name} has no tokenizer, which tasks need; load a target that has one")
        self.drafter = load_drafter(drafter, self.target) if isinstance(drafter, str) else drafter
        self.tokenizer: Any = self.target.tokenizer
        self.slots = int(batch_size) if batch_size is not None and str(batch_size).isdigit() else slots
        self.max_length = max_length or self.target.spec.context
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.think_end_token = think_end_token
        self.seed = seed
        self.on_request = on_request
        self.seconds = 0.0
        """Seconds spent in the model."""
        self.cuts = Cuts()
        """Contexts that were cut at the front."""
        self.tokens = self.steps = 0
        """Tokens of answers; log-likelihoods add none."""

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def eot_token_id(self) -> int:
        token = self.tokenizer.eos_token_id
        return int(min(self.target.ends, default=0) if token is None else token)

    @property
    def prefix_token_id(self) -> int:
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        return self.target.spec.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{self.target.spec.name} has no chat template; leave --apply-chat-template out")
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens unless disabled or already present."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            if has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
                add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        tokens: list[int] = self.tokenizer.encode(string, **options)
        return tokens

    # ── answers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to (context, generation settings), in order, batched over slots whatever their settings."""
        prepared = [self._request(request.args[0], request.args[1], number) for number, request in enumerate(requests)]
        # longest first, so that running out of memory happens at once
        order = sorted(range(len(prepared)), key=lambda i: -len(prepared[i][0].prompt))
        tokens: list[list[int]] = [[] for _ in prepared]
        state = batch(self.target, self.slots, ends=self.target.ends | {self.eot_token_id})
        done = 0
        began = time.perf_counter()
        ordered = [prepared[i][0] for i in order]
        for progress in serve(self.target, ordered, self.drafter, slots=self.slots, state=state):
            tokens[order[progress.request]] += progress.tokens
            self.steps += 1
            if progress.finish_reason is not None:
                done += 1
                if self.on_request is not None:
                    self.on_request(done, len(prepared))
        self.seconds += time.perf_counter() - began
        self.tokens += sum(map(len, tokens))
        answers: list[str] = []
        for request, answer, (_, until) in zip(requests, tokens, prepared, strict=True):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            answers.append(postprocess_generated_text(text, stop=until, think_end_token=self.think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _request(self, context: str, settings: Mapping[str, Any], number: int) -> tuple[Request, list[str]]:
        """The request and its stop strings."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        until = handle_stop_sequences(
            kwargs.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        )
        longest = int(kwargs.pop("max_gen_toks"))
        is_sampled = kwargs.pop("do_sample", False)
        temperature, options = self._sampling_options(kwargs)
        room = self.max_length - longest
        if room <= 0:
            raise ConfigError(
                f"a task asks for {longest} new tokens, but the context has {self.max_length}; set max_gen_toks lower"
            )
        prompt = self.cuts.fit(self.tok_encode(context) or [self.prefix_token_id], room, f"request {number}")
        sampling = self._sampled(temperature, options, number) if is_sampled else self._greedy(options, prompt, longest)
        # like the `hf` model, look for stop strings in the text with its special tokens
        return Request(prompt, longest, sampling, tuple(filter(None, until)), self._with_specials), until

    @functools.cached_property
    def _with_specials(self) -> Detokenizer:
        return detokenizer(self.tokenizer, self.target.spec.vocabulary, skip_special_tokens=False)

    def _sampled(self, temperature: float, options: dict[str, Any], number: int) -> Sampling:
        """Missing options come from the target's generation config, as in transformers' `generate`."""
        config = getattr(self.target.model, "generation_config", None)
        values = {key: getattr(config, key, None) if value is None else value for key, value in options.items()}
        named: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        return Sampling(temperature, seed=self.seed + number if temperature else None, **named)

    def _greedy(self, options: dict[str, Any], prompt: list[int], most: int) -> Sampling:
        """Like `generate(do_sample=False)` with the target's generation config; the task may set another penalty."""
        sampling = self.target.default_sampling(prompt, most)
        penalty = options["repetition_penalty"]
        if penalty is None:
            return sampling
        if sampling.processors:
            raise ConfigError(
                "a task sets repetition_penalty, but the target's generation_config has processors whose order "
                "matters; set model.generation_config.repetition_penalty instead, and leave it out of the task"
            )
        return replace(sampling, repetition_penalty=penalty)

    def _sampling_options(self, kwargs: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """A task's temperature and its DRAWN settings.  Raises ConfigError for unknown settings."""
        temperature = float(kwargs.pop("temperature", 0.0) or 0.0)
        options = {key: kwargs.pop(key, None) for key in DRAWN}
        unknown = sorted(key for key, value in kwargs.items() if key not in IDLE or IDLE[key] != value)
        if unknown:
            raise ConfigError(
                f"a task's generation_kwargs have {', '.join(unknown)}, which are not supported; leave them out, or "
                f"use until, max_gen_toks, do_sample, temperature, {', '.join(DRAWN)}"
            )
        return temperature, options

    # ── log-likelihoods ───────────────────────────────────────────────────────────────────────────────────────────────

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log probability of each continuation, and whether it is the greedy one."""
        return list(super().loglikelihood(list(requests), disable_tqdm=True))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log probability of whole texts, in windows of the context's length, each token predicted once."""
        windows, owner = [], []
        for number, request in enumerate(requests):
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):  # fmt: skip
                windows.append((None, *make_disjoint_window(pair)))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log probabilities of (text, context ids, continuation ids), in batches of about equal length."""
        began = time.perf_counter()
        fit = self.cuts.fit
        texts = [
            fit(context + continuation, self.max_length + 1, f"likelihood {number}")[:-1]
            for number, (_, context, continuation) in enumerate(requests)
        ]
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        for start in range(0, len(order), self.slots):
            rows = order[start : start + self.slots]
            values = self._read([texts[i] for i in rows], [requests[i][2] for i in rows])
            for i, value in zip(rows, values, strict=True):
                results[i] = value
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], value)
            if self.on_request is not None:
                self.on_request(min(start + self.slots, len(order)), len(order))
        self.seconds += time.perf_counter() - began
        return results

    @torch.inference_mode()
    def _read(self, texts: Sequence[list[int]], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        if members_of(self.target):
            raise ConfigError(
                f"{self.target.spec.name} is an ensemble, whose likelihoods can't be computed; choose tasks that "
                "generate"
            )
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self.device)
        hidden, _ = self.target.read(padded, ())
        results = []
        for states, text, tokens in zip(hidden, texts, continuations, strict=True):
            expected = torch.tensor(tokens, device=self.device)
            log_probs = self.target.head(states[len(text) - len(tokens) : len(text)]).float().log_softmax(-1)
            total = log_probs.gather(-1, expected[:, None]).sum()
            results.append((float(total), bool((log_probs.argmax(-1) == expected).all())))
        return results
