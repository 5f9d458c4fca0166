"""Any Hugging Face causal LM as a Target: distribution, taps, slots.  What it can do is tested at load.

Logits are the model's own, including scales and soft caps.  Taps and the final hidden state are captured by hooks on
the decoder layers and the output head, which every family has.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import TargetError
from outrider.kernels import prepacked
from outrider.kernels.contents import Contents
from outrider.registry import Registry
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets import quantised
from outrider.targets.cache.attention_mask import Tree, additive, limited
from outrider.targets.cache.own import OwnCache
from outrider.targets.cache.slots import COLUMNS, SlotCache
from outrider.targets.hf import chunks, gpu_attention, hooks, probes
from outrider.targets.hf.anatomy import (
    PartialHead,
    copied,
    decoder_layers,
    final_norm,
    measure_ends,
    output_layer,
    trunk,
)
from outrider.targets.hf.family import learn_family, media_tokens
from outrider.targets.hf.passes import Passes, passed
from outrider.targets.hf.proof.capabilities import capabilities_of, selftest_of
from outrider.targets.hf.proof.selftest import plain_words, refusal, refusing
from outrider.targets.hf.rotary import reading_prompt, verify_by_length
from outrider.targets.identity import hash_weights, spec_of
from outrider.targets.parallel import spread
from outrider.targets.protocol import Skip
from outrider.targets.skip import Sublayers, learn_sublayers
from outrider.targets.text.detokenizer import detokenizer
from outrider.targets.text.generation import ends_of, greedy_sampling
from outrider.targets.text.prompts import ids_of
from outrider.targets.text.turns import closing_of

FASTER = Registry("pass", ("outrider.fast.passes",), "outrider.passes")
"""Faster passes, looked up by name, since the packages with kernels and graphs are in a higher layer."""


class TransformersTarget(Passes):
    """A causal LM as a target; drafting does not change its distribution.  Created by `load_target`."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None, revision: str | None = None,
        base_hash: str | None = None, tested: bool = True, weights_hash: str | None = None,
    ):  # fmt: skip
        """weights_hash: computed unless given.  tested: False for a model that is about to be tested itself."""
        quantised.check(model, name or type(model).__name__)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = spread.device_of(model, name or type(model).__name__)
        self.is_whole = spread.is_whole(model)
        """Whether all weights are in this process's memory, on one device."""
        if self.device.type == "cpu":
            # otherwise transformers copies keys and values to every query head of a group, which takes a fifth of a
            # masked pass
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
            if tested and self.is_whole:
                prepacked.pack(model)
        else:
            gpu_attention.install()
        with refusing(model):
            self._decoder_layers = decoder_layers(model)
            self._embedding: Any = model.get_input_embeddings()
            self._head: Any = output_layer(model)
        if self._head is None:
            raise TargetError(refusal(model, "it has no output layer"))
        self._model_head: nn.Module = self._head  # `copy_to` replaces `_head` only
        self._media = media_tokens(model.config)
        hooks.watch_input(self._model_head)
        hooks.watch_output(self._embedding)
        capabilities = capabilities_of(model, functools.partial(TransformersTarget, tested=False)) if tested else None
        with refusing(model):
            if capabilities is None:
                self.family = learn_family(model)
            else:
                self.family = learn_family(model, capabilities.masks, capabilities.one_by_one, capabilities.past)
        self._trunk = trunk(model)
        self.spec = replace(
            spec_of(model, tokenizer, name, revision, weights_hash),
            layers=len(self._decoder_layers),
            base_hash=base_hash,
        )
        self._contents = Contents(model)
        self._contents.changes()
        self._ends: frozenset[int] | None = None
        self.step: Any = FASTER.find("compiled").step(self)
        with refusing(model):
            [text] = plain_words(self, 1, 8)
            self._scale, self._finish, logits = measure_ends(self, text)
        if tested:
            self.selftest = selftest_of(self, capabilities, text, logits)
            self.spec = replace(self.spec, mode=self.selftest.mode)
        self.mask_token: int | None = getattr(tokenizer, "mask_token_id", None)
        """Id of the mask token, for tokens yet to be drafted; None if the tokenizer has none."""

    def refresh(self) -> list[str]:
        """Detect weights that changed in any way since the last batch; returns their names.

        Called for every new batch.  Packed weights, hashes and graphs are rebuilt.  Raises TargetError if the
        model's shape changed; the target must then be loaded again.
        """
        changed = self._contents.changes()
        if not changed:
            return []
        parts = self.model.get_input_embeddings(), output_layer(self.model), trunk(self.model)
        words, layers = quantised.rows_of(self._model_head), decoder_layers(self.model)
        if parts != (self._embedding, self._model_head, self._trunk) or layers is not self._decoder_layers:
            raise TargetError(
                f"the embedding, the output layer or the layers of {self.spec.name} were replaced after it was loaded; "
                "load it again"
            )
        if words != self.spec.vocabulary:
            raise TargetError(f"the vocabulary of {self.spec.name} was resized after it was loaded; load it again")
        if self.device.type == "cpu" and self.is_whole:
            prepacked.pack(self.model, changed)
        self.spec = replace(self.spec, weights_hash=hash_weights(self.model))
        self.step.renew()
        return changed

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a text: those of the model's current generation_config and the one that ends a turn in
        the chat template, unless set here."""
        if self._ends is not None:
            return self._ends
        closing = closing_of(self.tokenizer)
        return ends_of(self.model) | (frozenset() if closing is None else {closing.end})

    @ends.setter
    def ends(self, ends: frozenset[int]) -> None:
        self._ends = ends

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        blocks = quantised.parts_in_blocks(self.model)
        return int(self.model.num_parameters()) + sum(part.rows * part.columns for part in blocks)

    @property
    def generation_config(self) -> Any:
        """The model's; None if it has none."""
        return self.model.generation_config

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """Greedy decoding as in `model.generate(do_sample=False)`, following the model's generation_config.

        Raises ConfigError for a key that can't be followed exactly.
        """
        return greedy_sampling(self.model, self.ends, self.spec.vocabulary, prompt, max_new_tokens)

    @torch.inference_mode()
    def generate_plainly(self, tokens: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """transformers' own `generate` for prompts [R, S]: [R, S + new]."""
        made: Any = self.model
        output: Tensor = made.generate(tokens, **settings)
        return output

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H], with the family's scale."""
        words = self._embedding(tokens)
        return words if self._scale == 1.0 else words * self._scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states after the final norm, with the family's scale and soft cap."""
        # `forward`, not a call: the hook is for the model's own passes
        return self._finish(self._head.forward(hidden.to(quantised.dtype_of(self._head))))

    def finish(self, states: Tensor) -> Tensor:
        """Hidden states [..., H] after the final norm, from those of the last layer.

        Raises TargetError if the family's norm is not found.
        """
        with torch.no_grad():
            normed: Tensor = self._final_norm(states.to(self.device, self.model.dtype))
        return normed

    @functools.cached_property
    def _final_norm(self) -> nn.Module:
        return final_norm(self, plain_words(self, 1, 8)[0])

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]; read-only."""
        return quantised.rows_at(self._head, tokens)

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        bias = None if self._head.bias is None else self._head.bias[tokens]
        return PartialHead(self.head_rows(tokens), bias, self._finish, dtype)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the input embedding for these ids [n], without the family's scale; read-only."""
        return quantised.rows_at(self._embedding, tokens)

    def copy_to(self, device: torch.device) -> TransformersTarget:
        """This target with embedding and head copied to another device, for a drafter there."""
        there = copy.copy(self)
        there.device = device
        there._embedding, there._head = copied(self._embedding, device), copied(self._head, device)
        return there

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are read-only.  A copy, if they are quantised or not
        complete in this process."""
        return quantised.plain(spread.copied(self._decoder_layers[index]))

    def allocate(self, slots: int, length: int, undo: int = 0) -> Any:
        """A SlotCache for `slots` texts of at most `length` tokens, up to `undo` of which `cut` can undo without loss.

        An OwnCache if the family has its own kind of cache.
        """
        self.refresh()
        if self.family.past is not None:
            return OwnCache(self.model, self.family.past, slots, length)
        if self.device.type == "cuda":
            # a cache of the same size often gets the same memory, so its captures can be reused
            length = -(-length // COLUMNS) * COLUMNS
        # one buffer for all layers needs them on one device
        cache = SlotCache(slots, length, self.device, self.spec.layers if self.is_whole else 1, undo)
        return cache if self.step.layout is None else cache.laid_out(self.step.layout)

    @torch.inference_mode()
    def prefill(
        self, cache: SlotCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...] = ()
    ) -> Scores:
        """Read one chunk [R, S], right-padded, after what each slot holds.  `logits` [R, 1, V] follow the last real
        token."""
        # padding must not enter a recurrent state, and costs time on a CPU
        most = 0 if self.family.follows_one_path else chunks.FULL if self.device.type == "cpu" else tokens.numel()
        shares = chunks.shares(lengths, most)
        if len(shares) > 1:
            return chunks.joined(
                [self.prefill(cache, rows[s], tokens[s, : max(lengths[s])], lengths[s], taps) for s in shares]
            )
        if self.step.reads(cache, rows, tokens):
            scores = self.step.run(cache, rows, tokens, None, taps, [length - 1 for length in lengths])
            cache.append(lengths)
            return scores
        if self.family.follows_one_path:
            # a chunk after other text must run in steps
            cache.open(rows, lengths[0], in_steps=cache.lengths[rows[0]] > 0, noted=1 + cache.undo)
            hidden, tapped = self._each(self._hidden, tokens[:, : lengths[0]], cache, None, taps)
        else:
            cache.open(rows, tokens.shape[1])
            with reading_prompt(self, cache, tokens, lengths):
                hidden, tapped = self._each(self._hidden, tokens, cache, None, taps)
        cache.append(lengths)
        last = to_device([length - 1 for length in lengths], self.device)
        rows_of_hidden = hidden[torch.arange(len(last), device=self.device), last].unsqueeze(1)
        return Scores(self.head(rows_of_hidden), hidden, tapped)

    @torch.inference_mode()
    def verify(
        self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        """One pass over anchor and draft: logits [B, N+1, V].  Nothing is committed until `cache.keep`.

        Raises TargetError for a probe if the family takes no mask or positions by row.
        """
        if probe is not None:
            return probes.verify(self, cache, rows, anchor, draft, taps, probe)
        width = draft.tokens.shape[1] + 1
        tokens, tree = passed(anchor, draft, self.spec.vocabulary)
        if self.step.fits(cache, rows, width):
            return self.step.run(cache, rows, tokens, tree, taps)
        if self.family.rotary is not None:
            return verify_by_length(self, cache, rows, tokens, tree, taps)
        cache.open(rows, tokens.shape[1], in_steps=self.family.is_recurrent)
        return self._each(self._scores, tokens, cache, tree, taps)

    def check_probe(self) -> None:
        """Raises TargetError if the family's passes can't include a probe."""
        probes.check(self)

    def compile(self) -> float:
        """Compile verification; returns the seconds it took, 0 if it was already compiled.

        Raises NotCompiled with the reason if it can't be compiled; steps then stay plain.
        """
        return self.step.get(build=True)

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a
        cache."""
        cache = self.allocate(*tokens.shape)
        cache.open(range(len(tokens)), tokens.shape[1])
        states: tuple[Tensor, Tensor | None] = self._each(self._hidden, tokens, cache, None, taps)
        return states

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        """Like `Target.read_probe`.  Raises TargetError like `verify`."""
        return probes.read(self, tokens, documents, probe)

    def masked(self, cache: Any, mask: Tensor, at: Tensor, keys: Tensor) -> dict[str, Any]:
        """Arguments of a pass over rows at positions `at` [B, Q], which attend to keys at positions `keys` [B or 1, K]
        under mask [B, Q, K] bool, each kind of layer within its limit.  cache: None for a pass without one."""
        limits = self.family.limits.items()
        masks = {kind: additive(limited(mask, limit, at, keys), self.model.dtype) for kind, limit in limits}
        return self.family.arguments(cache, masks, at.clamp(max=self.spec.context - 1).expand(len(mask), -1))

    @functools.cached_property
    def _has_ids_in_layers(self) -> bool:
        return any(name.endswith("embed_tokens_per_layer") for name, _ in self._trunk.named_modules())

    @functools.cached_property
    def _sublayers(self) -> Sublayers:
        return learn_sublayers(self)

    def skippable(self) -> Skip:
        """Sublayers that a pass can leave out.  Raises TargetError if the family allows none."""
        if self.device != self.model.device:
            raise TargetError(
                f"{self.spec.name} can't draft for itself on another device; leave the drafter on {self.model.device}"
            )
        if self.family.past is not None:
            raise TargetError(
                f"{self.spec.name} uses its own cache class, which layer_skip does not support; choose another drafter"
            )
        return self._sublayers.all

    @contextmanager
    def skipping(self, skip: Skip, cache: SlotCache, rows: Sequence[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Like `reading_on`, but without these sublayers, which are restored on exit."""
        with self.reading_on(cache, rows) as read, self._sublayers.left_out(skip):
            yield read

    @contextmanager
    def reading_on(self, cache: SlotCache, rows: Sequence[int]) -> Iterator[Callable[..., Tensor]]:
        """Yields a function from tokens [R, n], appended to these slots, and their `Tree` if they are not a chain, to
        logits [R, n, V].

        It writes where the next verified pass will write.  On exit the slots' lengths are restored.
        """

        @torch.inference_mode()
        def read(tokens: Tensor, tree: Tree | None = None) -> Tensor:
            cache.open(rows, tokens.shape[1])
            logits: Tensor = self._each(self._scores, tokens, cache, tree).logits
            cache.append([tokens.shape[1]] * len(rows))
            return logits

        starts = [cache.lengths[row] for row in rows]
        try:
            if not cache.layers:  # a compiled step needs buffers of every layer
                read(torch.zeros(len(rows), 1, dtype=torch.int64, device=self.device))
                cache.append([0] * len(rows))
            yield read
        finally:
            for row, start in zip(rows, starts, strict=True):
                cache.lengths[row] = start

    def encode(self, prompt: Any, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a text or of chat messages (through the chat template); token ids are returned unchanged.

        Ids may be a list, an array, or what a tokenizer returns.
        thinking: passed to the template as `enable_thinking` unless None; templates without it ignore it.
        tools: passed to the template.
        Raises DataError for an empty prompt, ids outside the vocabulary, text without a tokenizer, messages that the
        template refuses, or anything that is not a prompt.
        """
        return ids_of(prompt, self.tokenizer, self.spec.vocabulary, self._media, thinking, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, without special tokens; empty without a tokenizer."""
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=True)

    @functools.cached_property
    def detokenizer(self) -> Detokenizer | None:
        """Incremental `decode`, for streamed text; None without a tokenizer."""
        return None if self.tokenizer is None else detokenizer(self.tokenizer, self.spec.vocabulary)
