"""A small language model drafts token by token; the classic pair.  (Leviathan 2211.17192, Chen 2302.01318.)

Any causal LM, best with the target's own vocabulary.  Its cache follows the committed text: what was rejected is forgotten
(recurrent layers go back to a state that was noted), and what it has not read yet (one token, or two after a block that was
kept whole) it reads before it drafts.  Of a text that is longer than its context it reads the end.  `width` above 1 grows a
tree (see `nn.trees`): each level is a pass over the nodes read so far, of which the accepted path stays in the cache.

A model of another vocabulary reads the committed text in tokens of its own and drafts one of two ways (Timor et al.
2502.05202).  `intersection`: it draws among the tokens that both have, from its law given that; this is q, over the target's
ids.  `text`: it goes on in its own tokens, and what they say is encoded with the target's; a deterministic draft.

It can be trained to say what the target says, all of its weights.  (DistillSpec, Zhou et al. 2310.08461.)  Every token of a
text is a row: the model's law of it against the target's.  Differs from the paper: all texts are the target's, made
beforehand; the model writes none itself while it learns.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from outrider import demo
from outrider.config import Config as Base
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Cache, Scores, Target
from outrider.decoding.sampling import Purpose, distribution
from outrider.decoding.state import DecodeState
from outrider.errors import ConfigError, DrafterError
from outrider.nn import trees
from outrider.nn.draft_model import Batch, DraftModel
from outrider.nn.vocabulary import Overlap, Transcript, Twins, Vocabulary, continuation, overlap
from outrider.targets.cache import SlotCache
from outrider.targets.family import head_law, trunk
from outrider.targets.quantised import quantise
from outrider.targets.transformers import TransformersTarget, hash_tokenizer, load_target


class New(Base):
    """Sizes of a model that training begins from nothing: a Qwen3 of the target's vocabulary and context."""

    layers: PositiveInt = 2
    """Decoder layers."""
    hidden: PositiveInt = 256
    """Width of its states."""
    intermediate: PositiveInt = 704
    """Width of the MLP."""
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 64
    rope_theta: PositiveFloat = 10_000.0
    tied: bool = True
    """One matrix is embedding and head."""


class Config(Base):
    kind: Literal["small_model"] = "small_model"
    model: str = "demo"
    """Folder or Hugging Face id of the drafting model; `demo` is the one that ships with Outrider."""
    new: New | None = None
    """Sizes of a fresh model to train, in place of `model`."""
    architecture: dict[str, Any] | None = None
    """What a checkpoint knows of the trained model's shape, as in a config.json: `model` is not needed again."""
    quantize: Literal["int8"] | None = None
    """Round the linear layers of the drafting model, whatever the target's are; needs torchao."""
    device: str | None = None
    """Where it drafts, such as cuda:1; the target's device unless given."""
    length: PositiveInt = 4
    """Tokens drafted per step; levels of a tree."""
    width: PositiveInt = 1
    """Children a node may have; above 1 the draft is a tree: the likeliest paths at temperature 0, drawn siblings else."""
    nodes: PositiveInt = 16
    """Nodes of a tree; a chain has `length`."""
    replacement: bool = False
    """Draw the siblings of a tree independently; by default a younger one is none of its elders, and more are kept."""
    vocabulary: Literal["same", "intersection", "text"] = "same"
    """What a model with another tokenizer may draft: `same` refuses it, `intersection` drafts the tokens that both have, `text`
    drafts text and encodes it with the target's tokenizer (certain tokens, so best at low temperatures)."""
    least_overlap: Annotated[float, Field(ge=0, le=1)] = 0.8
    """`intersection` drafts nothing where the tokens in common hold less than this share of the target's probability."""

    @model_validator(mode="after")
    def _one_model(self) -> Config:
        if self.new is not None and "model" in self.model_fields_set and self.model != "demo":
            raise ValueError(f"`new` asks for a fresh model and `model` for {self.model!r}; give one of them")
        return self


@dataclass
class Memory:
    """The model's cache, and the tree it read in the pass that is still open."""

    cache: SlotCache
    skipped: list[int]
    """Tokens at the beginning of each slot's text that are read no longer: there were more than the model's context takes."""
    tree: Draft | None = None


class SmallModel:
    """Drafts a chain or a tree with a language model of its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: TransformersTarget, config: Config):
        self.model = model
        self.config = config
        self.parents = trees.shape(config.width, config.length, config.nodes) if config.width > 1 else ()
        self.limit = config.length if config.width == 1 else len(self.parents)
        self.room = model.spec.context - config.length
        """Tokens of a text that it can read and still draft behind."""
        if self.room < 1:
            raise ConfigError(
                f"small_model.length {config.length} leaves no room in the drafting model's context of {model.spec.context}; "
                "choose a smaller length"
            )

    def compile(self, several: bool = False) -> float:
        """Have its own passes of one slot, or of several, compiled; returns the seconds it took.  NotCompiled says why not."""
        return self.model.compile(several)

    def allocate(self, cache: Cache) -> Memory:
        read = self.config.width * (self.config.length - 1)
        own = self.model.allocate(cache.slots, cache.length + max(self.limit, read), undo=self.limit)
        return Memory(own, [0] * cache.slots)

    def admit(self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        self._read(memory.cache, rows, [self._seen(memory, row, state.tokens[row][: state.prefilled[row]]) for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._read(memory.cache, state.rows, [self._seen(memory, row, state.tokens[row]) for row in state.rows])
        if self.config.width == 1:
            return trees.chain(logits, lambda tokens: self._read_one(memory.cache, state.rows, tokens), budget, state)
        return self._tree(memory, state, budget, logits)

    def _tree(self, memory: Memory, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        rows, cache = state.rows, memory.cache

        def expand(tree: Draft, fresh: int) -> Tensor:
            if memory.tree is None:
                for row in rows:  # the anchor was read with the text; from here on it is the root of every pass
                    cache.lengths[row] -= 1
            memory.tree = tree
            return trees.masked(self.model.verify(cache, rows, state.anchor, tree).logits[:, -fresh:], tree, state)

        logits = state.masked(logits)
        if state.settings.is_greedy:
            return trees.beam(logits, expand, budget, width=self.config.width, depth=self.config.length)
        return trees.sampled(
            logits, expand, budget, parents=self.parents, settings=state.settings, streams=state.streams,
            replacement=self.config.replacement,
        )  # fmt: skip

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        """Forget what was rejected: of the committed tokens all but the last may stand in the cache, and no draft beyond."""
        if memory.tree is not None:
            tree, memory.tree = memory.tree, None
            read = [memory.skipped[row] + memory.cache.lengths[row] for row in state.rows]
            memory.cache.keep(
                trees.paths(tree, [state.tokens[row][at + 1 : -1] for row, at in zip(state.rows, read, strict=True)])
            )
            return
        for b, row in enumerate(state.rows):
            agreed = len(state.tokens[row]) - memory.skipped[row] - (kept.next_tokens[b] >= 0)
            memory.cache.cut(row, agreed)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.skipped[row] = 0

    def _seen(self, memory: Memory, row: int, text: list[int]) -> list[int]:
        """What is read of a text: its end, where all of it is more than the model's context takes."""
        if len(text) - memory.skipped[row] > self.room:
            # half of the room, so that all is read anew only once in a while
            memory.skipped[row] = len(text) - max(1, self.room // 2)
            memory.cache.free([row])
        return text[memory.skipped[row] :]

    def _read(self, memory: SlotCache, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read what the cache lacks of these texts; logits [R, V] after the last token of each."""
        for row, text in zip(rows, texts, strict=True):
            if len(rows) > 1 and len(text) - memory.lengths[row] > self.limit + 1:  # one that lags would pad all others
                self._read(memory, [row], [text[:-1]])
        pieces = [text[memory.lengths[row] :] for row, text in zip(rows, texts, strict=True)]
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        tokens = torch.tensor(padded, device=self.model.device)
        return self.model.prefill(memory, rows, tokens, lengths).logits[:, -1]

    def _read_one(self, memory: SlotCache, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one token more in every slot; logits [R, V] after it.  tokens [R]."""
        logits = self.model.verify(memory, rows, tokens, Draft.empty(len(rows), tokens.device)).logits[:, -1]
        memory.append([1] * len(rows))
        return logits


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Model(DraftModel):
    """A causal LM of the target's vocabulary, all of its weights trained; embedding and head are its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target):
        super().__init__()
        self.target = target
        self.lm: Any = _to_train(config, target)
        if config.vocabulary != "same":
            _warn_of_vocabulary(config)
        self.config = config.model_copy(update={"architecture": architecture_of(self.lm)})
        self._finish, self._reads_packed = _learn(self.lm, config.model)

    def read(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """States [B, S, H] before the head; every text is read as if it stood alone.  tokens, documents [B, S]."""
        self._check_length(documents)
        follows = documents[:, 1:] == documents[:, :-1]
        if bool((follows | (documents[:, 1:] == 0)).all()):  # one text a row, padding behind it
            return self._states(tokens)
        if self._reads_packed:
            return self._states(tokens, position_ids=_positions(documents))
        begins = nn.functional.pad(~follows, (1, 0), value=True).flatten()
        lengths = torch.diff(begins.nonzero()[:, 0].cpu(), append=torch.tensor([begins.numel()])).tolist()
        alone = self._states(pad_sequence(tokens.flatten().split(lengths), batch_first=True))
        return torch.cat([states[:n] for states, n in zip(alone, lengths, strict=True)]).view(*tokens.shape, -1)

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., V], the family's soft cap and scale applied."""
        head = self.lm.get_output_embeddings()
        return self._finish(head(states.to(head.weight.dtype)))

    def predict(self, batch: Batch) -> TokenRows:
        return TokenRows(self, batch)

    def drafter(self) -> SmallModel:
        """Drafts with a copy of the model's modules around the same weights: to serve it freezes and hooks nothing here."""
        shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in self.lm.parameters()}
        served = load_target(copy.deepcopy(self.lm, shared))
        return SmallModel(served, _allowed(self.config, served, self.target))

    def _states(self, tokens: Tensor, **given: Tensor) -> Tensor:
        found: Tensor = trunk(self.lm)(input_ids=tokens, use_cache=False, **given).last_hidden_state
        return found

    def _check_length(self, documents: Tensor) -> None:
        context = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        if context is None or documents.shape[1] <= context:
            return
        longest = int(_positions(documents)[documents > 0].max()) + 1
        if longest > context:
            raise DrafterError(
                f"a text of {longest} tokens is longer than the context of small_model {self.config.model!r}, {context}; "
                f"set prepare.length to {context} or less"
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """Weights follow a change of type; what is computed once, such as rotary frequencies, keeps its own."""
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            there = module._buffers[name]
            assert there is not None
            module._buffers[name] = buffer.to(there.device)
        return self


class TokenRows:
    """Predictions of a language model: a row, and a block, for every token that is one to learn.

    The head runs chunk by chunk on a detached copy of the states; `backward` sends its gradient through the model at once.
    """

    def __init__(self, model: Model, batch: Batch):
        self.model, self.vocabulary = model, model.target.spec.vocabulary
        documents = batch.documents
        follows = batch.loss_mask[:, 1:] & (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
        rows, at = follows.nonzero(as_tuple=True)
        self._states = model.read(batch.tokens, documents)[rows, at]
        self._hidden = batch.hidden[rows, at]
        self.labels = batch.tokens[rows, at + 1]
        self.weight = torch.ones(len(at), device=at.device)
        self.depth = torch.zeros_like(at)
        self.block = torch.arange(len(at), device=at.device)
        self.states = self._states.detach().requires_grad_()

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        for start in range(0, len(self.labels), max(1, rows)):
            part = slice(start, min(start + max(1, rows), len(self.labels)))
            with torch.no_grad():
                target = self.model.target.head(self._hidden[part])
            yield self.model.head(self.states[part]), target, part

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return {}

    def backward(self) -> None:
        if self.states.grad is not None:
            self._states.backward(self.states.grad)


def _positions(documents: Tensor) -> Tensor:
    """Places within each text, from 0.  documents [B, S]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return places - places.where(begins, 0).cummax(1).values


def _to_train(config: Config, target: Target) -> Any:
    """The language model in float32: of a checkpoint's shape, of the sizes asked for, or the one that is named."""
    if config.architecture is not None:
        lm = _fresh(AutoConfig.for_model(**config.architecture))
    elif config.new is not None:
        lm = _fresh(_qwen3(config.new, target))
    else:
        lm = _named(config, target)
    own = lm.get_output_embeddings().weight.shape[0]
    if own != target.spec.vocabulary:
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {own}, the target {target.spec.name!r} one of "
            f"{target.spec.vocabulary}; one of another vocabulary can't be trained: choose a model with the target's tokenizer"
        )
    return lm.eval()


def _named(config: Config, target: Target) -> Any:
    name = str(demo.SMALL_MODEL) if config.model == "demo" else config.model
    try:
        lm = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise DrafterError(
            f"can't load small_model.model {config.model!r}: {str(error).strip().splitlines()[0]}; give `demo`, a folder with "
            "config.json and safetensors, or a Hugging Face id; or sizes of a fresh model in small_model.new"
        ) from error
    theirs = target.spec.tokenizer_hash
    mine = _tokenizer_hash(name) if theirs is not None else None
    if mine != theirs:
        raise DrafterError(
            f"small_model {config.model!r} has the tokenizer {mine}, the target {target.spec.name!r} {theirs}; one of another "
            "vocabulary can't be trained: choose a model with the target's tokenizer"
        )
    return lm


def _tokenizer_hash(name: str) -> str | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None
    # where there are no files, transformers makes up one of special tokens alone
    return hash_tokenizer(tokenizer) if len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens) else None


def _qwen3(new: New, target: Target) -> Qwen3Config:
    if new.heads % new.kv_heads:
        raise DrafterError(f"small_model.new: heads {new.heads} is no multiple of kv_heads {new.kv_heads}")
    if new.head_dim % 2:
        raise DrafterError(f"small_model.new: head_dim {new.head_dim} is odd; rotary positions turn pairs, choose an even one")
    return Qwen3Config(
        vocab_size=target.spec.vocabulary, max_position_embeddings=target.spec.context, num_hidden_layers=new.layers,
        hidden_size=new.hidden, intermediate_size=new.intermediate, num_attention_heads=new.heads,
        num_key_value_heads=new.kv_heads, head_dim=new.head_dim, tie_word_embeddings=new.tied,
        rope_parameters={"rope_type": "default", "rope_theta": new.rope_theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def _fresh(shape: Any) -> Any:
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
"""What a config.json says besides the shape of a model."""


def architecture_of(lm: Any) -> dict[str, Any]:
    """The model's shape as a config.json says it; where its weights came from, and their type, is no part of it."""
    said = json.loads(lm.config.to_json_string())
    return {key: said[key] for key in said if key not in NOT_SHAPE}


@torch.no_grad()
def _learn(lm: Any, name: str) -> tuple[Callable[[Tensor], Tensor], bool]:
    """What becomes of the output layer's values, and whether texts in one row whose positions begin anew are read apart."""
    tokens, read, head = torch.arange(12)[None] % lm.config.get_text_config().vocab_size, trunk(lm), lm.get_output_embeddings()
    alone = torch.cat([read(input_ids=part, use_cache=False).last_hidden_state for part in tokens.split((7, 5), 1)], 1)
    finish = head_law(head(alone[:, :7]), lm(input_ids=tokens[:, :7], use_cache=False).logits, lm.config.get_text_config())
    if finish is None:
        raise DrafterError(
            f"small_model {name!r} changes its logits after the output layer in a way that is not known here, so it can't be "
            "trained; choose a model of another family"
        )
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    try:
        packed = read(input_ids=tokens, position_ids=places, use_cache=False).last_hidden_state
    except (RuntimeError, TypeError, ValueError):
        return finish, False
    return finish, torch.allclose(packed, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


# ── another vocabulary ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Reading:
    """One slot's text in the drafting model's tokens."""

    transcript: Transcript
    held: list[int]
    """Ids that stand in its cache."""
    skipped: int = 0
    """Ids at the beginning of the text that are read no longer: there were more than the cache takes."""


@dataclass
class Readings:
    """The model's cache, and what it read in each slot."""

    cache: SlotCache
    slots: list[Reading]


REWRITTEN = 8
"""Tokens at the end of a text that may read otherwise in this vocabulary once the text goes on; more are read from the start
where layers keep states."""


class Translated:
    """Drafts a chain with a language model of another vocabulary."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: TransformersTarget, config: Config, own: Vocabulary, target: Vocabulary, p: Tensor):
        """p [..., V]: the target's distributions at the places of a sample text."""
        self.model = model
        self.config = config
        self.own, self.target = own, target
        self.twins = Twins(own, target, model.device)
        self.overlap: Overlap = overlap(self.twins, p)
        self.limit = config.length
        if config.vocabulary == "intersection" and (self.overlap.mass < config.least_overlap or not self.twins.count):
            self.limit = 0
        self._small = SmallModel(model, config)
        mute = [piece is None and token != own.end for token, piece in enumerate(own.pieces)]
        self._mute = torch.tensor(mute, device=model.device)
        """[U] ids that say nothing."""

    def compile(self, several: bool = False) -> float:
        """As `SmallModel.compile`."""
        return self.model.compile(several)

    def allocate(self, cache: Cache) -> Readings:
        # a text may have more tokens in this vocabulary than in the target's; of a longer one the end is read
        length = min(2 * cache.length, self.model.spec.context) + self.limit
        cache_of_own = self.model.allocate(cache.slots, length, undo=self.limit + REWRITTEN)
        return Readings(cache_of_own, [self._blank() for _ in range(cache.slots)])

    def admit(self, memory: Readings, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        if self.limit:
            self._follow(memory, rows, [state.tokens[row][: state.prefilled[row]] for row in rows])

    @torch.inference_mode()
    def propose(self, memory: Readings, state: DecodeState, budget: Tensor) -> Draft:
        logits = self._follow(memory, state.rows, [state.tokens[row] for row in state.rows])
        if self.config.vocabulary == "text":
            return self._in_text(memory, state, budget, logits)
        return self._in_common(memory, state, budget, logits)

    def _in_common(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """Tokens that both vocabularies have, each drawn from the model's law given that it is one of them."""
        rows, sizes = state.rows, budget.tolist()
        for b, row in enumerate(rows):
            if any(token not in self.twins.by_target for token in memory.slots[row].transcript.waiting):
                sizes[b] = 0  # the model can't be told where the text stands
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        for depth in range(max(sizes)):
            if depth:
                logits = self._read_one(memory, rows, self.twins.own(tokens[-1]))
            logits = state.masked(self.twins.spread(logits), tokens)
            if state.bans:
                # a law with nothing left: that is known before the draw, so a slot may end there
                stuck = logits.amax(-1) == -torch.inf
                sizes = [min(size, depth) if is_stuck else size for size, is_stuck in zip(sizes, stuck.tolist(), strict=True)]
                logits = logits.masked_fill(stuck[:, None], 0.0)
            if state.settings.is_greedy:
                tokens.append(logits.argmax(-1))
            else:
                q.append(distribution(logits, state.settings))
                tokens.append(state.streams.draw(q[-1], depth, Purpose.DRAFT))
        if not tokens:
            return Draft.empty(len(rows), state.device)
        return Draft.chain(torch.stack(tokens, 1), torch.tensor(sizes), torch.stack(q, 1) if q else None)

    def _in_text(self, memory: Readings, state: DecodeState, budget: Tensor, logits: Tensor) -> Draft:
        """The model's likeliest text, in the target's tokens: as many of its own are read as the target's are wanted."""
        rows, own = state.rows, [logits.masked_fill(self._mute, -torch.inf).argmax(-1)]
        while len(own) < int(budget.max()):
            logits = self._read_one(memory, rows, own[-1])
            own.append(logits.masked_fill(self._mute, -torch.inf).argmax(-1))
        said = zip(rows, torch.stack(own, 1).tolist(), budget.tolist(), strict=True)
        found = [self._translation(memory.slots[row].transcript, ids)[:most] for row, ids, most in said]
        width = max(map(len, found))
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in found], dtype=torch.int64)
        return Draft.chain(tokens.view(len(found), width).to(state.device), torch.tensor([len(tokens) for tokens in found]))

    def _translation(self, transcript: Transcript, ids: list[int]) -> list[int]:
        """The target's tokens for what these ids say behind the text; the end of a text is a token of both."""
        spoken = list(itertools.takewhile(lambda token: token != self.own.end, ids))
        said = b"".join(self.own.pieces[token] or b"" for token in spoken)
        found = continuation(self.target, transcript.text, transcript.waiting_bytes, said)
        is_over = len(spoken) < len(ids)
        if is_over and self.target.end is not None and (found or said == transcript.waiting_bytes):
            found.append(self.target.end)
        return found

    def observe(self, memory: Readings, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        """What was rejected is forgotten with the next reading, which begins where the texts part."""

    def free(self, memory: Readings, rows: Sequence[int]) -> None:
        memory.cache.free(rows)
        for row in rows:
            memory.slots[row] = self._blank()

    def _blank(self) -> Reading:
        return Reading(Transcript(self.target, self.own), [])

    def _follow(self, memory: Readings, rows: Sequence[int], texts: Sequence[list[int]]) -> Tensor:
        """Read these texts of the target's tokens, as far as they changed; logits [R, U] after each."""
        wanted = []
        for row, text in zip(rows, texts, strict=True):
            reading = memory.slots[row]
            reading.transcript.push(text[reading.transcript.taken :])
            ids = self._ids(reading, memory.cache.length - self.limit)
            memory.cache.cut(row, min(_agreement(reading.held, ids), len(ids) - 1))
            reading.held = ids
            wanted.append(ids)
        return self._small._read(memory.cache, rows, wanted)

    def _ids(self, reading: Reading, room: int) -> list[int]:
        """What the model is to read: the text's end where all of it takes more than `room`."""
        transcript = reading.transcript
        twins = [self.twins.by_target.get(token) for token in transcript.waiting]
        behind = [] if self.config.vocabulary == "text" or None in twins else [twin for twin in twins if twin is not None]
        if len(transcript.ids) + len(behind) - reading.skipped > room - len(self.own.begin):
            # half of the room, so that all is read anew only once in a while
            reading.skipped = max(0, len(transcript.ids) - room // 2)
        ids = [*transcript.ids[reading.skipped :], *behind]
        if ids[: len(self.own.begin)] != self.own.begin:
            ids = self.own.begin + ids
        return ids or [self.own.filler]

    def _read_one(self, memory: Readings, rows: Sequence[int], tokens: Tensor) -> Tensor:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            memory.slots[row].held.append(token)
        return self._small._read_one(memory.cache, rows, tokens)


def _agreement(held: list[int], wanted: list[int]) -> int:
    """How many ids both begin with."""
    near = max(0, min(len(held), len(wanted)) - 64)
    begin = near if held[:near] == wanted[:near] else 0  # texts mostly part near their end
    least = min(len(held), len(wanted))
    return next((n for n in range(begin, least) if held[n] != wanted[n]), least)


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(config: Config, target: Target) -> SmallModel | Translated:
    if config.architecture is not None or config.new is not None:
        fresh = Model(config, target).to(target.device, getattr(torch, target.spec.dtype))
        if config.quantize is not None:
            quantise(fresh, config.quantize)
        return fresh.drafter()
    name = str(demo.SMALL_MODEL) if config.model == "demo" else config.model
    model = load_target(name, device=target.device, dtype=target.spec.dtype, quantize=config.quantize)
    mine, theirs = model.spec, target.spec
    is_same = mine.vocabulary == theirs.vocabulary and theirs.tokenizer_hash in (None, mine.tokenizer_hash)
    if not is_same and config.vocabulary != "same":
        return _translated(config, model, target)
    if not is_same:
        raise DrafterError(
            f"small_model {config.model!r} has a vocabulary of {mine.vocabulary} (tokenizer {mine.tokenizer_hash}), the target "
            f"{theirs.name!r} one of {theirs.vocabulary} (tokenizer {theirs.tokenizer_hash}); choose a model with the target's "
            "tokenizer, or set small_model.vocabulary to intersection or text"
        )
    if config.vocabulary != "same":
        _warn_of_vocabulary(config)
    return SmallModel(model, _allowed(config, model, target))


def _warn_of_vocabulary(config: Config) -> None:
    logging.getLogger(__name__).warning(
        "small_model.vocabulary %s has no effect: %r has the target's own vocabulary", config.vocabulary, config.model
    )


SAMPLE = """The committee met on Tuesday and agreed, after a short discussion, that the road should be repaired before winter.
def mean(values):
    return sum(values) / len(values)  # fails for an empty list
In 2024 about 3,150 people lived there; by 1911 it had been twice as many.
Die Straße führt über den Fluss. La forêt était déjà loin. El niño llegó mañana.
{"name": "Ann", "items": [1, 2.5, null], "done": true}
"""
"""Prose, code, numbers and letters beyond English: where the target's probability of the tokens in common is measured."""


def _translated(config: Config, model: TransformersTarget, target: Target) -> Translated:
    log = logging.getLogger(__name__)
    if config.width > 1:
        raise ConfigError(
            f"small_model.width {config.width} asks for a tree, but a model of another vocabulary, as {config.model!r} is, "
            "drafts chains alone; set width to 1, or choose a model with the target's tokenizer"
        )
    own = Vocabulary(model.tokenizer, model.spec.vocabulary, config.model)
    theirs = Vocabulary(getattr(target, "tokenizer", None), target.spec.vocabulary, target.spec.name)
    drafter = Translated(model, _allowed(config, model, target), own, theirs, _law_of_sample(theirs, target))
    log.info("small_model %s beside %s: %s", config.model, target.spec.name, drafter.overlap)
    if not drafter.limit:
        log.warning(
            "small_model %s drafts nothing for %s: %s, and less than small_model.least_overlap %s does not pay; "
            "set small_model.vocabulary to text, choose a model of a nearer tokenizer, or lower least_overlap",
            config.model, target.spec.name, drafter.overlap, config.least_overlap,
        )  # fmt: skip
    return drafter


@torch.inference_mode()
def _law_of_sample(vocabulary: Vocabulary, target: Target) -> Tensor:
    """The target's distributions [1, S, V] at the places of the sample text, at temperature 1."""
    ids = [token for token in vocabulary.encode(SAMPLE).ids if token < vocabulary.size]
    tokens = torch.tensor([[*vocabulary.begin, *ids][: target.spec.context] or [vocabulary.filler]], device=target.device)
    hidden, _ = target.read(tokens, ())
    return target.head(hidden).float().softmax(-1)


def _allowed(config: Config, model: TransformersTarget, target: Target) -> Config:
    """The config that both models can follow.  Raises ConfigError for a tree that the drafting model can't read."""
    log = logging.getLogger(__name__)
    if config.width == 1:
        idle = [name for name in ("nodes", "replacement") if getattr(config, name) != Config.model_fields[name].default]
        if idle:
            log.warning("small_model.%s has no effect on a chain; set width above 1 for a tree", " and ".join(idle))
    elif target.spec.mode != "tree":
        log.warning(
            "%s verifies no trees (its mode is %s): small_model drafts a chain of %d, as with width 1",
            target.spec.name, target.spec.mode, config.length,
        )  # fmt: skip
        return config.model_copy(update={"width": 1})
    elif model.spec.mode != "tree":
        raise ConfigError(
            f"small_model.width {config.width} asks for a tree; the self-test allows {config.model!r} no more than the mode "
            f"{model.spec.mode!r} ({model.selftest.failed}); set width to 1, or choose a model whose mode is 'tree'"
        )
    return config
