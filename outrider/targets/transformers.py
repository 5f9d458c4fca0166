"""Any Hugging Face causal LM as a Target: its law, its taps, its slots.  What it can be trusted with is tested at load.

Logits are the model's own, so scales and soft-caps are in them.  Taps and the final hidden state are caught by hooks on the
decoder layers and on the output head, which every family has.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider import demo, machine, packed
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import DataError, TargetError
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets import hooks, quantised
from outrider.targets.cache import SlotCache
from outrider.targets.detokenizer import detokenizer
from outrider.targets.family import embedding_scale, head_law, learn, media_tokens, output_layer, sizes, trunk
from outrider.targets.generation import ends_of, greedy_sampling
from outrider.targets.own_cache import OwnCache
from outrider.targets.prompts import single
from outrider.targets.protocol import Skip, TargetSpec
from outrider.targets.rotary import deciding
from outrider.targets.selftest import BROKEN, SelfTest, agreed, plain_words, refusal
from outrider.targets.sizes import layer_sizes, unused_row
from outrider.targets.skip import Sublayers
from outrider.targets.skip import learn as learn_sublayers
from outrider.targets.step import CompiledStep, passed
from outrider.targets.trust import Trust, tested, trust


class TransformersTarget:
    """A causal LM whose law is kept.  Made by `load_target`."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None, revision: str | None = None,
        base_hash: str | None = None, tested: bool = True,
    ):  # fmt: skip
        """tested: False for a model of which nothing is asked, since it is about to be tested itself."""
        quantised.check(model, name or type(model).__name__)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = model.device
        if self.device.type == "cpu":
            # or transformers copies keys and values to every query head of a group, a fifth of a masked pass
            os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
            if tested:
                packed.pack(model)
        with _refused(model):
            self._decoder_layers = _decoder_layers(model)
            self._embedding: Any = model.get_input_embeddings()
            self._head: Any = output_layer(model)
        if self._head is None:
            raise TargetError(refusal(model, "it has no output layer that tells the odds of tokens"))
        self._model_head: nn.Module = self._head  # which `lent` leaves in its place
        self._media = media_tokens(model.config)
        hooks.watch_input(self._model_head)
        hooks.watch_output(self._embedding)
        known = trust(model, functools.partial(TransformersTarget, tested=False)) if tested else None
        with _refused(model):
            self.family = learn(model) if known is None else learn(model, known.masks, known.one_by_one, known.past)
        self._trunk = trunk(model)
        self.spec = replace(_spec(model, tokenizer, name, revision), layers=len(self._decoder_layers), base_hash=base_hash)
        self._ends: frozenset[int] | None = None
        self.step = CompiledStep(self)
        with _refused(model):
            [text] = plain_words(self, 1, 8)
            self._scale, self._finish, said = self._what_the_ends_do(text)
        if tested:
            self.selftest = self._trusted(known, text, said)
            self.spec = replace(self.spec, mode=self.selftest.mode)
        self.mask_token: int | None = getattr(tokenizer, "mask_token_id", None)
        """Id that stands for a token yet to be drafted; None where the tokenizer has none."""

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a text: those of the model's generation_config as it is now, unless others were set here."""
        return ends_of(self.model) if self._ends is None else self._ends

    @ends.setter
    def ends(self, ends: frozenset[int]) -> None:
        self._ends = ends

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """Greedy decoding of this prompt as `model.generate(do_sample=False)` does it, by the model's generation_config.

        Raises ConfigError for a key of it that can't be done exactly.
        """
        return greedy_sampling(self.model, self.ends, self.spec.vocabulary, prompt, max_new_tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H], scaled as the family does."""
        words = self._embedding(tokens)
        return words if self._scale == 1.0 else words * self._scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states after the final norm, with the family's scale and soft cap."""
        # not called: its hook belongs to the model's own passes
        return self._finish(self._head.forward(hidden.to(self._head.weight.dtype)))

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]; for reading."""
        return quantised.values(self._head.weight)[tokens]

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the input embedding for these ids [n], without the family's scale; for reading."""
        return quantised.values(self._embedding.weight)[tokens]

    def copy_to(self, device: torch.device) -> TransformersTarget:
        """This target for a drafter on another device, which borrows embedding and head: they are copied there."""
        there = copy.copy(self)
        there.device = device
        there._embedding, there._head = _copied(self._embedding, device), _copied(self._head, device)
        return there

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are for reading.  A copy where they are quantised."""
        return quantised.plain(self._decoder_layers[index])

    def allocate(self, slots: int, length: int, undo: int = 0) -> Any:
        """A SlotCache for `slots` texts of at most `length` tokens, of which `cut` takes back up to `undo` without loss.

        An OwnCache where the family keeps what slots can't hold.
        """
        if self.family.past is not None:
            return OwnCache(self.model, self.family.past, slots, length)
        cache = SlotCache(slots, length, self.device, self.spec.layers, undo)
        return cache if self.step.shapes is None else cache.shaped_as(self.step.shapes)

    @torch.inference_mode()
    def prefill(
        self, cache: SlotCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...] = ()
    ) -> Scores:
        """Read one chunk [R, S], right-padded, behind what each slot holds.  `logits` [R, 1, V] follow the last real token."""
        if self.family.follows_one_path:
            # padding would enter the state; and only what follows other text has to go in steps
            parts = []
            for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                cache.open([row], length, in_steps=cache.lengths[row] > 0, noted=1 + cache.undo)
                parts.append(self._states(tokens[b : b + 1, :length], cache, taps))
                cache.append([length])
            hidden, tapped = _padded(parts)
        elif self.step.reads(cache, rows, tokens):
            _, hidden, tapped, *_ = self.step.run(cache, rows, tokens, None, None, taps)
            cache.append(lengths)
        else:
            cache.open(rows, tokens.shape[1])
            with self._prompt(cache, tokens, lengths):
                hidden, tapped = self._states(tokens, cache, taps)
            cache.append(lengths)
        last = torch.tensor([length - 1 for length in lengths], device=self.device)
        rows_of_hidden = hidden[torch.arange(len(last), device=self.device), last].unsqueeze(1)
        return Scores(self.head(rows_of_hidden), hidden, tapped)

    @torch.inference_mode()
    def verify(
        self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        """One pass over anchor and draft: logits [B, N+1, V].  Nothing is committed until `cache.keep`.

        Raises TargetError for a probe where rows can't be hidden from each other, or stand where the family can't be told.
        """
        if probe is not None:
            return self._verify_beside(cache, rows, anchor, draft, taps, probe)
        width = draft.tokens.shape[1] + 1
        tokens, visible, depths = passed(anchor, draft, self.spec.vocabulary)
        if self.step.fits(cache, rows, width):
            return self.step.run(cache, rows, tokens, visible, depths, taps)
        if self.family.rotary is not None:
            return self._verify_by_length(cache, list(rows), tokens, visible, depths, taps)
        cache.open(rows, tokens.shape[1], in_steps=self.family.is_recurrent)
        return self._each(tokens, cache, self._scores, visible, depths, taps)

    def _verify_beside(
        self, cache: SlotCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...], probe: Probe
    ) -> Scores:
        """A plain pass with the probe's rows after those of anchor and draft."""
        family = self.family
        is_free = self.spec.mode == "tree" and family.masks != "none" and family.takes_uneven_rows
        # embeddings of every layer go by token ids, of which a probe's rows have none
        if not is_free or family.follows_one_path or family.rotary is not None or self._has_ids_in_layers:
            raise TargetError(
                f"{self.spec.name} takes no probe: its passes have no mask by row, follow one path, or look at the length of "
                "the text or at token ids in every layer; draft without one"
            )
        slots, width, more = len(anchor), draft.tokens.shape[1] + 1, probe.depths.shape[1]
        tokens, _, _ = passed(anchor, draft, self.spec.vocabulary)
        tokens = torch.cat([tokens, tokens.new_zeros(slots, more)], 1)
        own, depths = draft.rows()
        mask = torch.cat([torch.nn.functional.pad(own, (0, more)), probe.mask], 1)
        cache.open(rows, width + more)
        words = probe.embeddings.to(self.model.dtype) / self._scale
        with hooks.replacing(self._embedding, words):
            scores = self._scores(tokens, cache, mask, torch.cat([depths, probe.depths], 1), taps)
        return scores.first(width)._replace(probe=scores.hidden[:, width:])

    def compile(self) -> float:
        """Have verify passes compiled; returns the seconds it took, 0 where that was done before.

        Raises NotCompiled, which says why, where it can't be: all works as before, at the plain path's speed.
        """
        return self.step.get(build=True)

    @torch.no_grad()
    def read(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a cache."""
        cache = self.allocate(*tokens.shape)
        cache.open(range(len(tokens)), tokens.shape[1])
        return self._states(tokens, cache, taps)

    @functools.cached_property
    def _has_ids_in_layers(self) -> bool:
        return any(name.endswith("embed_tokens_per_layer") for name, _ in self._trunk.named_modules())

    @functools.cached_property
    def _sublayers(self) -> Sublayers:
        return learn_sublayers(self)

    def skippable(self) -> Skip:
        """Sublayers that a pass may leave out.  Raises TargetError where the family allows none."""
        if self.device != self.model.device:
            raise TargetError(
                f"{self.spec.name} can't draft for itself on another device; leave the drafter on {self.model.device}"
            )
        if self.family.past is not None:
            raise TargetError(f"{self.spec.name} keeps texts in a cache of its own kind, and no sublayer of it can be left out")
        return self._sublayers.all

    @contextmanager
    def skipping(self, skip: Skip, cache: SlotCache, rows: Sequence[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Gives a function from tokens [R, n] to logits [R, n, V] that reads on behind these slots without `skip`.

        It writes where the next verified pass will write.  On every way out model and lengths are what they were before.
        """

        @torch.inference_mode()
        def read(tokens: Tensor) -> Tensor:
            cache.open(rows, tokens.shape[1])
            scores = self._each(tokens, cache, self._scores, None, None, ())
            cache.append([tokens.shape[1]] * len(rows))
            logits: Tensor = scores.logits
            return logits

        starts = [cache.lengths[row] for row in rows]
        try:
            if not cache.layers:  # a compiled step counts on buffers of every layer
                read(torch.zeros(len(rows), 1, dtype=torch.int64, device=self.device))
                cache.append([0] * len(rows))
            with self._sublayers.left_out(skip):
                yield read
        finally:
            for row, start in zip(rows, starts, strict=True):
                cache.lengths[row] = start

    def encode(self, prompt: Any, thinking: bool | None = None) -> list[int]:
        """Token ids of a text, of chat messages (through the chat template), or of ids given as they are.

        Ids may stand in an array, or as a tokenizer returns them.
        thinking: handed to the template as `enable_thinking`, unless None; a template that knows no such thing ignores it.
        Raises DataError for an empty prompt, ids outside the vocabulary, text without a tokenizer, messages that the template
        refuses, or what is no prompt.
        """
        given = single(prompt)
        if len(given) and isinstance(given[0], int):
            return self._known(given)  # type: ignore[arg-type]
        if self.tokenizer is None and len(given):
            raise DataError("this target was loaded without a tokenizer: give prompts as lists of token ids")
        try:
            return self._known(self._encoded(given, thinking) if len(given) else [])
        except (TypeError, ValueError, LookupError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"the tokenizer can't read the prompt {prompt!r}: {_first_line(error)}; correct it") from error

    def _encoded(self, given: Any, thinking: bool | None) -> list[int]:
        """Token ids of a text or of chat messages, by the tokenizer."""
        if isinstance(given, str):
            return list(self.tokenizer.encode(given, add_special_tokens=True))
        _refuse_media(given)
        if self.tokenizer.chat_template is None:
            raise DataError("the tokenizer has no chat template: give the prompt as one text instead of chat messages")
        said = {} if thinking is None else {"enable_thinking": thinking}
        try:
            tokens = self.tokenizer.apply_chat_template(
                given, add_generation_prompt=True, tokenize=True, return_dict=False, **said
            )
        except TemplateError as error:
            raise DataError(
                f"the target's chat template refuses these messages: {error}; ask with roles that it knows"
            ) from error
        return list(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, special tokens left out; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    @functools.cached_property
    def detokenizer(self) -> Detokenizer | None:
        """How its ids become text, as `decode` does it, for texts that grow; None without a tokenizer."""
        return None if self.tokenizer is None else detokenizer(self.tokenizer, self.spec.vocabulary)

    # ── rotary factors that go by the length of a text ────────────────────────────────────────────────────────────────────

    @contextmanager
    def _prompt(self, cache: SlotCache, tokens: Tensor, lengths: Sequence[int]) -> Iterator[None]:
        """A pass over part of a prompt: as far as is known, the text ends with one token behind it."""
        if self.family.rotary is None:
            yield
            return
        cache.reads(tokens)
        ends = [cache.lengths[row] + length + 1 for row, length in zip(cache.rows, lengths, strict=True)]
        for row, end in zip(cache.rows, ends, strict=True):
            cache.prompts[row] = -1 if cache.lengths[row] else end
            cache.long[row] = end > self.family.rotary.original
        with deciding(torch.tensor(ends, device=self.device)[:, None].expand(-1, tokens.shape[1])):
            yield

    def _verify_by_length(
        self, cache: SlotCache, rows: list[int], tokens: Tensor, visible: Tensor | None, depths: Tensor | None,
        taps: tuple[int, ...],
    ) -> Scores:  # fmt: skip
        """As `verify`: each token has the factors that `generate` gives it."""
        rotary = self.family.rotary
        assert rotary is not None
        for row in rows:
            length = cache.lengths[row] + 1
            is_prompt_in_parts = cache.prompts[row] not in (0, length) and length > rotary.original
            if is_prompt_in_parts or (rotary.rereads and length > rotary.original and not cache.long[row]):
                self._reread(cache, row, length if is_prompt_in_parts else rotary.original + 1)
            cache.prompts[row] = 0
        cache.open(rows, tokens.shape[1])
        cache.reads(tokens)
        ends = cache.positions(depths).expand_as(tokens) + 1
        with deciding(ends):
            scores: Scores = self._each(tokens, cache, self._scores, visible, depths, taps)
        if rotary.rereads:
            for b, row in enumerate(rows):
                if not cache.long[row] and int(ends[b].max()) > rotary.original:
                    seen, deep = (None if values is None else values[b : b + 1] for values in (visible, depths))
                    found = self._as_long(cache.texts[row][: cache.lengths[row]], tokens[b : b + 1], seen, deep, taps)
                    for values, others in zip(scores, found, strict=True):
                        if values is not None and others is not None:
                            values[b, ends[b] > rotary.original] = others[0, ends[b] > rotary.original]
        return scores

    def _reread(self, cache: SlotCache, row: int, length: int) -> None:
        """Read a slot's text again, as part of a text so long."""
        text = torch.tensor([cache.texts[row][: cache.lengths[row]]], device=self.device)
        cache.lengths[row], cache.long[row] = 0, True
        cache.open([row], text.shape[1])
        cache.reads(text)
        with deciding(torch.full_like(text, length)):
            self._states(text, cache, ())
        cache.append([text.shape[1]])

    def _as_long(
        self, text: list[int], tokens: Tensor, visible: Tensor | None, depths: Tensor | None, taps: tuple[int, ...]
    ) -> Scores:
        """Scores of tokens [1, n] behind a text that is read again as part of a longer one."""
        again = self.allocate(1, len(text) + tokens.shape[1] + 1)
        again.lengths, again.texts = [len(text)], [text]
        if text:
            self._reread(again, 0, len(text) + 1 + tokens.shape[1])
        again.open([0], tokens.shape[1])
        with deciding(again.positions(depths).expand_as(tokens) + 1):
            return self._scores(tokens, again, visible, depths, taps)

    # ── one forward pass ──────────────────────────────────────────────────────────────────────────────────────────────

    def _scores(
        self, tokens: Tensor, cache: SlotCache, visible: Tensor | None, depths: Tensor | None, taps: tuple[int, ...]
    ) -> Scores:
        out, caught = self._passed(self.model, tokens, cache, visible, depths, taps, self.spec.context)
        return Scores(out.logits, caught[self._model_head], self._tapped(caught, taps))

    def pass_through(
        self, tokens: Tensor, cache: Any, masks: Mapping[str, Tensor], positions: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits, hidden and the output of every layer of one pass whose masks and positions are given: what is traced."""
        with self._catching(tuple(range(self.spec.layers))) as caught:
            logits = self.model(input_ids=tokens, **self.family.arguments(cache, masks, positions)).logits
        return logits, caught[self._model_head], [caught[layer] for layer in self._decoder_layers]

    def _states(self, tokens: Tensor, cache: SlotCache, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return self._each(tokens, cache, self._hidden, None, None, taps)

    def _hidden(
        self, tokens: Tensor, cache: SlotCache, visible: Tensor | None, depths: Tensor | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        context = max(self.spec.context, tokens.shape[1])
        out, caught = self._passed(self._trunk, tokens, cache, visible, depths, taps, context)
        return out.last_hidden_state, self._tapped(caught, taps)

    def _passed(
        self, module: nn.Module, tokens: Tensor, cache: SlotCache | OwnCache, visible: Tensor | None, depths: Tensor | None,
        taps: tuple[int, ...], context: int,
    ) -> tuple[Any, dict[nn.Module, Any]]:  # fmt: skip
        """What the model or its trunk gives back for the open pass, and what was caught on the way."""
        if isinstance(cache, OwnCache):
            given = cache.given()
        else:
            given = self.family.arguments(cache, *self.family.seen(cache, visible, depths, self.model.dtype, context))
        with packed.products(), self._catching(taps) as caught:
            out = module(input_ids=tokens, **given)
        if isinstance(cache, OwnCache):
            cache.took(tokens, out)
        return out, caught

    def _each(
        self, tokens: Tensor, cache: SlotCache, run: Callable[..., Any], visible: Tensor | None, depths: Tensor | None,
        taps: tuple[int, ...],
    ) -> Any:  # fmt: skip
        """Run all rows of the open pass at once; one by one where they stand unevenly and the family can't be told so."""
        # a state alone does not ask where its row stands
        is_state = self.family.is_recurrent and self.family.past is None and not cache.layers
        if self.family.takes_uneven_rows or cache.is_even or is_state:
            return run(tokens, cache, visible, depths, taps)
        rows, parts = cache.rows, []
        for b, row in enumerate(rows):
            cache.open([row], tokens.shape[1])
            sight = (None if values is None else values[b : b + 1] for values in (visible, depths))
            parts.append(run(tokens[b : b + 1], cache, *sight, taps))
        cache.open(rows, tokens.shape[1])
        joined: Any = [None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)]
        return Scores(*joined) if isinstance(parts[0], Scores) else tuple(joined)

    @torch.inference_mode()
    def _what_the_ends_do(self, text: list[int]) -> tuple[float, Callable[[Tensor], Tensor], Tensor]:
        """The factor on embeddings before the first layer, what becomes of the output layer's values, and the logits [S, V]."""
        tokens = torch.tensor([text], device=self.device)
        words: list[Tensor] = []
        see = hooks.of_this_thread(lambda _module, args, kwargs: words.append(args[0] if args else kwargs["hidden_states"]))
        hook = self._decoder_layers[0].register_forward_pre_hook(see, with_kwargs=True)
        with self._catching(()) as caught:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        hook.remove()
        if not bool((logits < torch.inf).all()):
            raise TargetError(
                f"{self.spec.name}'s logits hold NaN or infinity; load it in float32 or bfloat16, since float16 overflows, and "
                "look for weights that are not finite"
            )
        finish = head_law(self._head.forward(caught[self._model_head]), logits, self.model.config.get_text_config())
        if finish is None:
            logging.getLogger(__name__).warning(
                "%s changes its logits after the output layer in a way that is not known here: drafters that use the target's "
                "head guess worse; the output is the target's all the same", self.spec.name,
            )  # fmt: skip
        return embedding_scale(self._embedding(tokens), words[0]), finish or (lambda values: values), logits[0]

    def _catching(self, taps: tuple[int, ...]) -> AbstractContextManager[dict[nn.Module, Tensor]]:
        """Catches what these layers give and what the output layer takes, in the passes that are run while it is open."""
        layers = [self._decoder_layers[layer] for layer in taps]
        for layer in layers:
            hooks.watch_output(layer)
        return hooks.catching([self._model_head, *layers])

    def _trusted(self, known: Trust | None, text: list[int], said: Tensor) -> SelfTest:
        """What is known of models like this one, where it agrees on the logits of a text; else what a test of it finds."""
        found = known and known.found and agreed(self, known.found, text, said)
        found = found or tested(self)
        reason = f" ({found.failed})" if found.failed else ""
        log = logging.getLogger(__name__)
        log.info("self-test of %s: %s%s", self.spec.name, found.mode, reason)
        if self.family.past is not None:
            log.warning(
                "%s keeps of a text what slots can't hold: every pass copies its own cache, and rows pass one by one; exact, "
                "and slow", self.spec.name,
            )  # fmt: skip
        return found

    def _tapped(self, caught: Mapping[nn.Module, Tensor], taps: tuple[int, ...]) -> Tensor | None:
        return torch.stack([caught[self._decoder_layers[layer]] for layer in taps], 2) if taps else None

    def _known(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise DataError("the prompt is empty; give at least one token of text")
        for token in tokens:
            if not 0 <= token < self.spec.vocabulary:
                raise DataError(f"token id {token} lies outside the target's vocabulary of {self.spec.vocabulary}")
            if token in self._media:
                raise DataError(
                    f"token id {token} stands for an image, a video or sound ({self._media[token]}), and targets read text "
                    "alone; leave it out"
                )
        return tokens


@contextmanager
def _refused(model: PreTrainedModel) -> Iterator[None]:
    """What a family raises that is not spoken to as others are becomes a TargetError."""
    try:
        yield
    except BROKEN as error:
        raise TargetError(refusal(model, f"a plain pass over text fails ({type(error).__name__}: {error})")) from error


def load_target(
    target: str | Path | PreTrainedModel,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    quantize: str | None = None,
    quantization: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compile: bool | None = None,
) -> TransformersTarget:
    """Load a causal LM as a target: `demo`, a Hugging Face id, a local folder, or a module that is already there.

    dtype: float32 on a CPU and the checkpoint's own on an accelerator, unless given; `auto` is the checkpoint's own where
    its products are as fast as float32's, measured on this machine.  quantize: `int8` rounds the weights of
    the linear layers, those of a module that is given too; it needs torchao, and the steps stay plain.  quantization is handed
    to transformers as `quantization_config`, device_map as it is; without it the weights of a checkpoint whose method would
    round activations are dequantised.  A bare module has no tokenizer: its prompts are token ids.
    compile: None takes a compiled step of this very model if one is on disk, True has one made (about a minute, once), False
    stays plain.
    Raises TargetError where it can't be found or loaded, where its plain decoding fails the self-test, or where it quantises
    activations, keys or values; ConfigError for a `quantize` that there is not.
    """
    if quantize is not None:
        quantised.library(quantize)
    if isinstance(target, nn.Module):
        model: Any = target
        model = model if device is None else model.to(device)
        model = model if dtype is None else model.to(dtype=_dtype(dtype, model.device, model.dtype))
        return _compiled(TransformersTarget(model, base_hash=_quantised(model, quantize)), compile)
    name = str(target)
    path = str(demo.TARGET) if name == "demo" else name
    device = default_device(device)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        wanted: Any = torch.float32 if device.type == "cpu" else "auto"
        config = AutoConfig.from_pretrained(path, **options)
        if dtype is not None:
            wanted = _dtype(dtype, device, config.get_text_config().dtype)
        whole = None if quantization is not None else quantised.whole_weights(config, name, device, device_map)
        read_as = quantization if whole is None else whole
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=wanted, device_map=device_map, output_loading_info=True, **options,
            # None would hide that a checkpoint comes quantised
            **({} if read_as is None else {"quantization_config": read_as}),
        )  # fmt: skip
        model, found = loaded
        if whole is not None and isinstance(wanted, torch.dtype):
            model = model.to(wanted)  # what was not quantised has it already, the rest is in the type of its scales
        tokenizer = _tokenizer(path, options)
    except (ImportError, RuntimeError) as error:  # such as a quantisation's library or device that is not there
        raise TargetError(
            f"can't load target {name!r}: {_first_line(error)}; install what it names, use a device that has it, or take the "
            "checkpoint unquantised"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(
            f"can't load target {name!r}: {_first_line(error)}; give `demo`, a folder with config.json and safetensors, or a "
            "Hugging Face id (which needs the network the first time)"
        ) from error
    if found["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(found["missing_keys"])
        raise TargetError(
            f"target {name!r} lacks {len(missing)} of its weights, such as {missing[0]}; copy it again, or take the checkpoint "
            "of a whole causal LM"
        )
    if device_map is None and model.device != torch.empty(0, device=device).device:  # some quantised models can't be moved
        model = model.to(device)
    return _compiled(TransformersTarget(model, tokenizer, name, revision, _quantised(model, quantize)), compile)


def default_device(asked: str | torch.device | None = None) -> torch.device:
    """The device asked for; else the accelerator where there is one."""
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def _quantised(model: Any, quantize: str | None) -> str | None:
    """Quantise all but the output layer, where that is asked for; returns the hash of the weights before, else None."""
    if quantize is None:
        return None
    if (already := quantised.precision(model)) is not None:
        raise TargetError(f"the target's weights are {already} as they are; leave quantize={quantize!r} out")
    base = hash_weights(model)
    quantised.quantise(model, quantize, keep=[output_layer(model)])
    return base


def _compiled(target: TransformersTarget, compile: bool | None) -> TransformersTarget:
    if compile:
        target.compile()
    if compile is not False:
        target.step.look()
    _warn_if_slow(target)
    _warn_if_endless(target)
    return target


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


def _dtype(dtype: str | torch.dtype, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The type asked for; for `auto` the one that the weights are stored in, where this device multiplies it fast."""
    if dtype == "auto":
        stored = stored or torch.float32
        return machine.decoding_dtype(stored) if device.type == "cpu" else stored
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise TargetError(
            f"dtype {dtype!r} is not a floating-point type of torch; use float32, bfloat16, float16, float64 or auto"
        )
    return found


def _warn_if_slow(target: TransformersTarget) -> None:
    """One line where this CPU multiplies the target's type much more slowly than another."""
    spec = target.spec
    if target.device.type != "cpu" or (spec.dtype == "float32" and spec.quantised is None):
        return
    way = spec.dtype if spec.quantised is None else machine.INT8
    slow = machine.slow_type(way, column=str(machine.ROWS[1]))
    if slow is not None:
        advice = "dtype=float32 is faster" if spec.quantised is None else "it saves memory, not time"
        logging.getLogger(__name__).warning("%s in %s: %s; %s", spec.name, spec.precision, slow, advice)


def _warn_if_endless(target: TransformersTarget) -> None:
    """One line where the config names an end that `model.generate` does not stop at."""
    named = getattr(target.model.config.get_text_config(), "eos_token_id", None)
    if named is not None and not target.ends:
        logging.getLogger(__name__).warning(
            "%s: its config names the end %s, its generation_config none, so texts go on to their limit, as with "
            "model.generate; set model.generation_config.eos_token_id to end them there", target.spec.name, named,
        )  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _copied(module: nn.Module, device: torch.device) -> Any:
    """A module without children, on another device; hooks and packed weights stay behind."""
    there = copy.copy(module)
    there.__dict__.pop("forward", None)
    there._forward_pre_hooks = OrderedDict()
    there._parameters = {
        name: None if weight is None else nn.Parameter(weight.to(device), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    there._buffers = {name: None if values is None else values.to(device) for name, values in module._buffers.items()}
    return there


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    count = sizes(model).layers
    # the text part first: a vision tower may have as many layers
    parts = (module for part in (model.get_decoder(), trunk(model)) for module in part.modules())
    lists = list(dict.fromkeys(part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count))
    for layers in lists:
        if len(lists) == 1 or _reads_text(model, layers[0]):
            return layers
    # a layer of some families is two of those that a config counts
    found: Any = getattr(model.get_decoder(), "layers", None)
    if isinstance(found, nn.ModuleList):
        return found
    raise TargetError(
        f"{type(model).__name__} has no list of {count} decoder layers to tap; use transformers' own generate for it"
    )


@torch.inference_mode()
def _reads_text(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Whether a pass over text runs this layer."""
    seen: list[bool] = []
    hook = layer.register_forward_pre_hook(hooks.of_this_thread(lambda *_: seen.append(True)))
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        hook.remove()
    return bool(seen)


def _padded(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Rows of unequal length, right-padded into one: hidden [R, S, H] and taps [R, S, T, H]."""
    hidden = nn.utils.rnn.pad_sequence([hidden[0] for hidden, _ in parts], batch_first=True)
    taps = [taps[0] for _, taps in parts if taps is not None]
    return hidden, nn.utils.rnn.pad_sequence(taps, batch_first=True) if taps else None


def _spec(model: PreTrainedModel, tokenizer: Any, name: str | None, revision: str | None) -> TargetSpec:
    found, words = sizes(model), output_layer(model).weight.shape[0]
    return TargetSpec(
        name=name or type(model).__name__,
        revision=revision or getattr(model.config, "_commit_hash", None),
        layers=found.layers,
        hidden=found.hidden,
        vocabulary=words,
        context=found.context,
        dtype=str(model.dtype).removeprefix("torch."),
        tokenizer_hash=None if tokenizer is None else hash_tokenizer(tokenizer),
        weights_hash=hash_weights(model),
        quantised=quantised.precision(model),
        sizes=layer_sizes(model.config),
        unused=unused_row(tokenizer, words),
    )


def _refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    for part in parts:
        if isinstance(part, Mapping) and (kind := part.get("type", "text")) != "text":
            raise DataError(
                f"a chat message has a part of type {kind!r}, and targets read text alone; give parts of type 'text'"
            )


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary, 16 hex digits."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{token}\t{number}" for token, number in pairs).encode()).hexdigest()[:16]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first values of every weight, read as bfloat16 so that the dtype does not matter."""
    digest = hashlib.sha256()
    for name, whole in sorted(model.state_dict().items()):
        for part, weight in quantised.parts(name, whole):
            sample = weight.flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(f"{part} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
