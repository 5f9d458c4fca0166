"""Text and weights at the boundary to transformers: identical to transformers' own, or refused by name.

    python benchmarks/borders.py [--texts 50000] [--parts text,weights] [--seed 0] [--no-compile] [--out FILE]

Text: twelve tokenizers of different kinds, each saved, loaded with a tiny model, and compared with transformers' own
`decode`, `tokenizer(text)` and `apply_chat_template` over random texts.

- `streamed`: tokens pushed in random pieces, and the pieces concatenated.
- `continued`: what a text adds to that of its prompt. If the text changes the prompt's own text, nothing is guaranteed,
and the case is counted as such.
- `stopped`: strings and special tokens that end a text, with and without a prompt, compared with a search in all text
  so far.
- `encoded`: a string prompt; `chats`: messages, as such and as text rendered by the template; `unembedded`: text with a
token for which the model has no embedding, which must be refused by name.
- `generated`: `generate` and `stream` of the model itself, a few for each tokenizer.

Weights: many ways to change them after loading, before the first text or between two texts; and before loading, when a
model of the same shape was already compiled.  The same change to a copy that Outrider never saw gives the reference:
its greedy `generate`, and its logits after a prompt.  Where texts diverge, it is a tie if the two logits in float64 are
closer than the rounding error of the dtype.  With a `dflash` drafter, drafts must also equal those of a drafter and a
target loaded with the changed weights.  The same is required of drafters whose own weights change; their texts must not
change at all.  `invisible` changes affect no logit or draft: their equality shows nothing.

Compiled steps are built once (about a minute) and kept in Outrider's cache.  Prints JSON; exits with 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import promise, write  # noqa: E402
from outrider import drafters, generate, kernels, load_target, machine, stream  # noqa: E402
from outrider.decoding.protocols import Drafter  # noqa: E402
from outrider.errors import OutriderError  # noqa: E402
from outrider.fast import NotCompiled, compile_passes  # noqa: E402
from outrider.fast.passes.compiled import has_adapters  # noqa: E402
from outrider.kernels import prepacked  # noqa: E402
from outrider.sampling.text import TextStream  # noqa: E402

peft: Any = None
with suppress(ImportError):
    import peft

EXAMPLES = 3
"""Maximum number of wrong texts shown per tokenizer and check."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=50_000, help="over all tokenizers")
    parser.add_argument("--parts", type=lambda names: names.split(","), default=["text", "weights"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # refusals and fallbacks to plain steps are counted here
    left_out: dict[str, str] = {}
    results: dict[str, Any] = {}
    if "text" in options.parts:
        results["text"] = measure_text(options.texts, options.seed)
    if "weights" in options.parts:
        results |= measure_weights(not options.no_compile, left_out)
    rows = [row for part in results.values() for row in part]
    wrong = {part: sum(row["wrong"] for row in rows) for part, rows in results.items()}
    promises = [promise(f"{part}: none is wrong", 0, -count) for part, count in wrong.items()]
    write({"promises": promises, "seed": options.seed, "left_out": left_out, **results}, options.out)
    return int(not rows or any(wrong.values()))


def note(*parts: object) -> None:
    print(*parts, file=sys.stderr, flush=True)


# ── tokenizers ────────────────────────────────────────────────────────────────────────────────────────────────────────

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "[gMASK]", "<sop>", "[CLS]", "[SEP]")
ADDED = (
    AddedToken("<think>", special=False, normalized=False), AddedToken("né", special=False, normalized=False),
    AddedToken("<tool>", special=False, lstrip=True, rstrip=True), AddedToken("🙂🙂", special=False),
    AddedToken(" and ", special=False, normalized=False), AddedToken("word", special=False, single_word=True),
)  # fmt: skip
NEW = tuple(f"<new_{number}>" for number in range(4))
"""Added last, so that a small enough embedding lacks them."""
NAMELESS = 3
"""Rows of the embedding without a token."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = 400
"""Number of pieces that a tokenizer learns from the documentation."""


class Make(NamedTuple):
    """A tokenizer, and the tokens added by its template and its post-processor."""

    raw: Tokenizer
    template_begins: str = ""
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    cleans: bool = False
    has_added: bool = True


@functools.cache
def lines() -> list[str]:
    pages = sorted((ROOT / "docs").glob("*.md"))[:8]
    return [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]


def learned(kind: Any, trainer: Any, pre_tokenizer: Any, **options: Any) -> dict[str, Any]:
    """The state of a tokenizer model trained on the documentation."""
    raw = Tokenizer(kind())
    raw.pre_tokenizer = pre_tokenizer
    raw.train_from_iterator(lines(), trainer(vocab_size=WORDS, show_progress=False, **options))
    state: dict[str, Any] = json.loads(raw.to_str())["model"]
    return state


def numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def byte_level(has_prefix: bool) -> Tokenizer:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    state = learned(models.BPE, trainers.BpeTrainer, cut, initial_alphabet=alphabet)
    raw = Tokenizer(models.BPE(state["vocab"], [tuple(pair) for pair in state["merges"]]))
    raw.pre_tokenizer, raw.decoder = cut, decoders.ByteLevel()
    return raw


def sentencepiece(has_prefix: bool) -> Tokenizer:
    """BPE with byte fallback, as Llama 2's and Gemma's."""
    state = learned(models.BPE, trainers.BpeTrainer, pre_tokenizers.Metaspace(), limit_alphabet=70)
    vocabulary = numbered(["<unk>", *BYTES, *state["vocab"]])
    merges = [tuple(pair) for pair in state["merges"]]
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = normalizers.Replace(" ", "▁")
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if has_prefix else marks
    raw.decoder = fallback_decoder(has_prefix)
    return raw


def fallback_decoder(strips: bool) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)


def unigram(scheme: str, has_bytes: bool) -> Tokenizer:
    state = learned(
        models.Unigram, trainers.UnigramTrainer, pre_tokenizers.Metaspace(), unk_token="<unk>", special_tokens=["<unk>"]
    )
    pieces = [(name, score) for name, score in state["vocab"]]
    if has_bytes:
        pieces += [(name, -20.0) for name in BYTES]
    raw = Tokenizer(models.Unigram(pieces, 0, has_bytes))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.decoder = fallback_decoder(True) if has_bytes else decoders.Metaspace(prepend_scheme=scheme)
    return raw


def wordpiece(cleans: bool) -> Tokenizer:
    cut = pre_tokenizers.BertPreTokenizer()
    state = learned(models.WordPiece, trainers.WordPieceTrainer, cut, special_tokens=["[UNK]"])
    raw = Tokenizer(models.WordPiece(state["vocab"], unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(lowercase=False), cut
    raw.decoder = decoders.WordPiece(cleanup=cleans)
    return raw


def plain_words() -> Tokenizer:
    cut = pre_tokenizers.Whitespace()
    state = learned(models.WordLevel, trainers.WordLevelTrainer, cut, special_tokens=["<unk>"])
    raw = Tokenizer(models.WordLevel(state["vocab"], unk_token="<unk>"))
    raw.pre_tokenizer = cut
    return raw


def makes() -> dict[str, Make]:
    begin = ("<s>",)
    return {
        "byte level": Make(byte_level(False), "<s>", begin),
        "byte level, prefix space": Make(byte_level(True), has_added=False),
        "byte level, two begin tokens": Make(byte_level(False), "[gMASK]<sop>", ("[gMASK]", "<sop>")),
        "llama 2": Make(sentencepiece(True), "<s>", begin),
        "gemma": Make(sentencepiece(False), "<s>", begin),
        "metaspace, always": Make(unigram("always", False), has_added=False),
        "metaspace, never": Make(unigram("never", False), "<s>"),
        "metaspace, first": Make(unigram("first", False), "<s>", begin),
        "unigram, byte fallback": Make(unigram("always", True), "", begin),
        "wordpiece": Make(wordpiece(False), "", ("[CLS]",), ("[SEP]",)),
        "wordpiece, cleaned": Make(wordpiece(True), "", ("[CLS]",), ("[SEP]",), cleans=True),
        "words": Make(plain_words(), "<s>", has_added=False),
    }


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def finished(make: Make) -> PreTrainedTokenizerFast:
    raw = make.raw
    raw.add_special_tokens(list(SPECIAL))
    raw.add_tokens([*(ADDED if make.has_added else ()), *(AddedToken(name, special=False) for name in NEW)])
    if names := (*make.begins, *make.ends):
        single = " ".join((*make.begins, "$A", *make.ends))
        special = [(name, raw.token_to_id(name)) for name in names]
        raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    bos = {"bos_token": "<s>"} if "<s>" in (*make.begins, make.template_begins) else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", clean_up_tokenization_spaces=make.cleans, **bos
    )
    tokenizer.chat_template = make.template_begins + TEMPLATE
    return tokenizer


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

CHECKS = ("streamed", "continued", "stopped", "encoded", "chats", "unembedded", "generated")
GENERATED = 12
"""Texts generated by the model itself per tokenizer."""
CHARACTERS = (
    " ", "  ", "\n", "\t", "\r\n", "中", "文", "🙂", "👩\u200d👧", "e\u0301", "é", "ﬃ", "\u00a0", "\ufffd", "▁", "##a",
    "<0x41>", "'s", " n't", " .", " '", "'", ".", "A", "\x00", "\u202e", "ا", "ไ", "🏳", "\ufe0f",
)  # fmt: skip


@dataclass
class Tally:
    """How many of some cases were equal, refused, wrong, or not covered by a guarantee."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def says(self) -> dict[str, Any]:
        return {key: self.counts[key] for key in ("equal", "refused", "not_promised", "wrong") if self.counts[key]}


@dataclass
class Party:
    """A tokenizer and transformers' own copy of it, with a target that uses it."""

    make: Make
    tokenizer: Any
    target: Any
    short: Any
    """A target whose embedding lacks the tokens NEW."""
    draw: random.Random
    tallies: dict[str, Tally] = field(default_factory=lambda: {check: Tally() for check in CHECKS})
    examples: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, check: str, expected: Any, got: Any, **case: Any) -> None:
        """Record a case; `got` is an OutriderError if it was refused, and so may `expected` be."""
        counts = self.tallies[check].counts
        if isinstance(got, OutriderError) and isinstance(expected, Exception):
            counts["refused"] += 1
            return
        is_equal = type(expected) is type(got) and expected == got
        counts["equal" if is_equal else "wrong"] += 1
        if not is_equal and sum(example["check"] == check for example in self.examples) < EXAMPLES:
            self.examples.append({"check": check, **case, "expected": repr(expected)[:300], "got": repr(got)[:300]})

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    @functools.cached_property
    def special(self) -> dict[int, str]:
        added = self.tokenizer.added_tokens_decoder
        return {token: each.content for token, each in added.items() if each.special}

    def string(self, most: int = 10) -> str:
        """Random text that does not start with the name of a first token."""
        draw = self.draw
        names = [*SPECIAL, *(each.content for each in ADDED)]
        parts = [
            draw.choice(words()) if (at := draw.random()) < 0.5 else draw.choice(CHARACTERS if at < 0.9 else names)
            for _ in range(draw.randrange(most))
        ]
        text = "".join(part + draw.choice(("", " ")) for part in parts)
        return "x" + text if text.lstrip().startswith(SPECIAL) else text

    def ids(self, most: int = 24) -> list[int]:
        """Random tokens: any, those of words and characters, parts of them, and ids without a name."""
        draw, count = self.draw, len(self.tokenizer)
        tokens: list[int] = []
        for _ in range(draw.randrange(most)):
            at = draw.random()
            if at < 0.45:
                tokens.append(draw.randrange(count + NAMELESS))
                continue
            text = draw.choice(words() if at < 0.7 else CHARACTERS)
            spelled = self.spelled(text)
            tokens += spelled[: draw.randint(1, 4)] if at > 0.92 else spelled
        return tokens

    @functools.lru_cache(4096)  # noqa: B019
    def spelled(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    __hash__ = object.__hash__


@functools.cache
def words() -> list[str]:
    return sorted({word for line in lines() for word in line.split()})[::7]


def measure_text(count: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    every = makes()
    for number, (name, make) in enumerate(every.items()):
        party = loaded(make, random.Random(f"{seed} {name}"))
        texts = count // len(every) + (number < count % len(every))
        for _ in range(texts):
            for check in (check_streamed, check_continued, check_stopped, check_encoded, check_chat, check_unembedded):
                check(party)
        for _ in range(GENERATED):
            check_generated(party)
        tallies = party.tallies
        rows.append({
            "tokenizer": name, "texts": texts, "streams": party.target.detokenizer.is_local,
            **{key: sum(tally.counts[key] for tally in tallies.values()) for key in
               ("equal", "refused", "not_promised", "wrong")},
            "checks": {check: tally.says() for check, tally in tallies.items()}, "examples": party.examples,
        })  # fmt: skip
        note(json.dumps({key: rows[-1][key] for key in ("tokenizer", "texts", "equal", "refused", "wrong")}))
    return rows


def loaded(make: Make, draw: random.Random) -> Party:
    """The tokenizer saved with a tiny model, and both loaded the way a user does."""
    tokenizer = finished(make)
    targets = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for rows in (len(tokenizer) + NAMELESS, len(tokenizer) - len(NEW)):
            tiny_model(vocab_size=rows, num_hidden_layers=1, max_position_embeddings=512).save_pretrained(folder)
            targets.append(load_target(folder, compile=False))
        return Party(make, AutoTokenizer.from_pretrained(folder), *targets, draw)


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """The return value of a call, or the error it raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def pushed(party: Party, stream: TextStream, tokens: Sequence[int]) -> tuple[str, int]:
    """The text in random pieces, and how many tokens belong to it."""
    text, begin = "", 0
    while True:
        size = party.draw.randint(1, 5)
        piece = stream.push(tokens[begin : begin + size], begin + size >= len(tokens))
        text, begin = text + piece.text, begin + piece.tokens
        if piece.is_stopped or begin >= len(tokens):
            return text, begin


def check_streamed(party: Party) -> None:
    tokens = party.ids() if party.draw.random() < 0.7 else party.spelled(party.string())
    text, _ = pushed(party, TextStream(party.target.detokenizer), tokens)
    party.judge("streamed", party.decode(tokens), text, ids=tokens)


def prompt_of(party: Party) -> tuple[list[int], str]:
    """A random prompt, and the part of its text that a continuation can't change: an incomplete character at its end
    may still change."""
    prompt = party.ids(12) if party.draw.random() < 0.5 else party.spelled(party.string(6))
    return prompt, party.decode(prompt).removesuffix("\ufffd")


def ends_in_bytes(party: Party, prompt: Sequence[int]) -> bool:
    """Whether it ends in a run of byte tokens, which following text may turn into different text."""
    tokens = [token for token in prompt if token not in party.target.detokenizer.skipped]
    return bool(tokens) and tokens[-1] in party.target.detokenizer.byte_tokens


def added(party: Party, shown: str, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """What tokens add to a prompt's text; None if they change it, in which case nothing is guaranteed."""
    if party.target.detokenizer.skipped.keys() >= set(tokens):
        return ""
    whole = party.decode([*prompt, *tokens])
    return whole[len(shown) :] if whole.startswith(shown) and not ends_in_bytes(party, prompt) else None


def check_continued(party: Party) -> None:
    prompt, shown = prompt_of(party)
    tokens = [*party.ids(12), party.draw.randrange(len(party.tokenizer))]
    expected = added(party, shown, prompt, tokens)
    if expected is None:
        party.tallies["continued"].counts["not_promised"] += 1
        return
    text, _ = pushed(party, TextStream(party.target.detokenizer, before=prompt), tokens)
    party.judge("continued", expected, text, prompt=prompt, ids=tokens)


def check_stopped(party: Party) -> None:
    draw, tokens = party.draw, party.ids(16)
    prompt, shown = prompt_of(party) if draw.random() < 0.5 else ([], "")
    texts = [added(party, shown, prompt, tokens[:count]) for count in range(len(tokens) + 1)]
    if None in texts:
        party.tallies["stopped"].counts["not_promised"] += 1
        return
    stops = stops_of(party, texts[-1])
    special = {token for token, name in party.special.items() if name in stops}
    sought = [stop for stop in stops if stop not in party.special.values()]
    expected = texts[-1], len(tokens)
    for count, text in enumerate(texts[1:], 1):
        places = [at for stop in sought if (at := text.find(stop)) >= 0]
        if places or tokens[count - 1] in special:
            expected = text[: min(places, default=len(text))], count
            break
    stream = TextStream(party.target.detokenizer, stops, prompt)
    party.judge("stopped", expected, pushed(party, stream, tokens), prompt=prompt, ids=tokens, stops=stops)


def stops_of(party: Party, text: str) -> list[str]:
    """Random stop strings: parts of the text, characters, added and special tokens, and those within other text."""
    draw, stops = party.draw, []
    for _ in range(draw.randint(1, 3)):
        at, begin = draw.random(), draw.randrange(max(1, len(text)))
        if at < 0.5:
            stops.append(text[begin : begin + draw.randint(1, 4)] or "x")
        elif at < 0.7:
            stops.append(draw.choice(CHARACTERS))
        else:
            name = draw.choice(SPECIAL if at < 0.9 else [each.content for each in ADDED])
            stops.append(name if draw.random() < 0.8 else name + "a")
    return stops


def check_encoded(party: Party) -> None:
    text = party.string() if party.draw.random() > 0.002 else "a\ud800b"
    expected = attempt(lambda: party.tokenizer(text)["input_ids"])
    if not text or expected == []:  # for empty text transformers creates only the first token
        expected = ValueError("an empty prompt")
    party.judge("encoded", expected, attempt(party.target.encode, text), text=text)


def check_chat(party: Party) -> None:
    """Messages, and the template's text of them, which already has the first tokens if the template writes them."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": party.string(6)} for role, _ in zip(roles, range(3), strict=False)]
    messages = messages[: party.draw.choice((1, 3))]
    options = {"add_generation_prompt": True}
    expected = party.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    party.judge("chats", expected, attempt(party.target.encode, messages), messages=messages)
    rendered = party.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids = party.tokenizer(rendered, add_special_tokens=not party.make.template_begins)["input_ids"]
    party.judge("chats", ids, attempt(party.target.encode, rendered), rendered=rendered)


def check_unembedded(party: Party) -> None:
    """A text with a token beyond the embedding's last row; the message must name it."""
    name = party.draw.choice(NEW)
    text = f"a {name} {party.string(4)}"
    given = party.draw.choice((text, [{"role": "user", "content": text}]))
    got = attempt(party.short.encode, given)
    is_named = isinstance(got, OutriderError) and name in str(got)
    party.judge("unembedded", ValueError(name), got if is_named else repr(got), text=text)


def check_generated(party: Party) -> None:
    """Texts of the model itself: continuing a string, and answering a chat."""
    text, target = f"a {party.string(6)}b", party.target
    prompt = party.draw.choice((text, [{"role": "user", "content": text}]))
    [made] = generate(target, [prompt], max_new_tokens=16)
    before = target.encode(prompt) if isinstance(prompt, str) else []
    whole, shown = party.decode([*before, *made.tokens]), party.decode(before)
    if not whole.startswith(shown):
        party.tallies["generated"].counts["not_promised"] += 1
        return
    streamed = "".join(piece.text for piece in stream(target, [prompt], max_new_tokens=16))
    expected = whole[len(shown) :]
    party.judge("generated", (expected, expected), (made.text, streamed), prompt=prompt, ids=made.tokens)


# ── ways to change weights ────────────────────────────────────────────────────────────────────────────────────────────

Way = Callable[[Any], Iterator[None]]
"""A generator over a model: prepares it before the first `yield`, changes it before the second, and stays open while
texts are compared."""
DOWN, QUERY, NORM, BIAS, EMBEDDING, HEAD = (
    "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.v_proj.bias", "model.embed_tokens.weight",
    "lm_head.weight",
)  # fmt: skip


def tiny_model(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """A random Llama with biases; equal seed and shape give equal weights."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.2,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.1)
    return model


def noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randn(like.shape, generator=generator).to(like.dtype) * 0.5


def data(model: nn.Module, name: str = DOWN) -> Tensor:
    return model.get_parameter(name).data


def without_grad(change: Callable[[nn.Parameter], object], name: str = DOWN) -> Callable[[nn.Module], object]:
    return lambda model: torch.no_grad()(change)(model.get_parameter(name))


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, nn.Parameter(value, requires_grad=False))


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The mean of a model's weights and noisy ones; buffers are unchanged."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {name: value + noise(value) / 2 if name in names else value for name, value in state.items()}


def replace_module(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.down_proj = copy.deepcopy(mlp.down_proj)
    mlp.down_proj.weight.data.neg_()


def replace_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    data(model).neg_()


def replace_layers(model: Any) -> None:
    model.model.layers = copy.deepcopy(model.model.layers)
    data(model).neg_()


def replace_trunk(model: Any) -> None:
    words, model.model = model.model.embed_tokens, copy.deepcopy(model.model)
    model.model.embed_tokens = words
    data(model).neg_()


def replace_norm(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data.mul_(torch.linspace(-1, 2, 32))


def replace_head(model: Any) -> None:
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data.neg_()


def replace_embedding(model: Any) -> None:
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    data(model, EMBEDDING).neg_()


def remove_layer(model: Any) -> None:
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def swap_layers(model: Any) -> None:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    model.model.layers[0].mlp, model.model.layers[1].mlp = second, first


def take_step(model: Any) -> None:
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tokens = torch.arange(20)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)


def through_numpy(model: nn.Module) -> None:
    weight = data(model)
    weight.view(torch.int16 if weight.itemsize == 2 else torch.int32).numpy()[3] ^= -(2 ** (8 * weight.itemsize - 1))


def through_dlpack(model: nn.Module) -> None:
    torch.from_dlpack(data(model)).mul_(-1)


def through_vector(model: nn.Module) -> None:
    weights = list(model.parameters())
    vector = parameters_to_vector(weights).detach()
    vector_to_parameters(vector + 0.2 * noise(vector), weights)


def swap_tensors(model: nn.Module) -> None:
    weight = model.get_parameter(DOWN)
    torch.utils.swap_tensors(weight, nn.Parameter(-weight.detach(), requires_grad=False))


def move_storage(model: nn.Module) -> None:
    """The same values in new storage, then other values there."""
    model.get_parameter(DOWN).data = data(model).clone()
    data(model).neg_()


def share_memory(model: nn.Module) -> None:
    model.share_memory()
    data(model).neg_()


def reuse_storage(model: nn.Module) -> None:
    weight = model.get_parameter(DOWN)
    with torch.no_grad():
        weight.set_(noise(weight.data))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def untie(model: Any) -> None:
    set_parameter(model, HEAD, -model.lm_head.weight.data)


def tie(model: Any) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def update_average(model: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(model))
    other = copy.deepcopy(model)
    other.load_state_dict(averaged(model))
    for each in (model, other):
        average.update_parameters(each)
    model.load_state_dict(average.module.state_dict())


CHANGES: dict[str, Callable[[Any], object]] = {
    "data.copy_": lambda model: data(model, QUERY).copy_(noise(data(model, QUERY))),
    "data.add_": lambda model: data(model).add_(noise(data(model))),
    "data.mul_": lambda model: data(model).mul_(-1.5),
    "data.lerp_": lambda model: [each.data.lerp_(noise(each.data), 0.2) for each in model.parameters()],
    "data.masked_fill_": lambda model: data(model).masked_fill_(noise(data(model)) > 0.2, 0),
    "data[:] =": lambda model: data(model).__setitem__(slice(None), noise(data(model))),
    "view of data": lambda model: data(model).view(-1)[:400].neg_(),
    "transposed data": lambda model: data(model).t()[5].fill_(1.0),
    "detach": lambda model: model.get_parameter(DOWN).detach().neg_(),
    "no_grad: add_": without_grad(lambda weight: weight.add_(noise(weight))),
    "no_grad: copy_": without_grad(lambda weight: weight.copy_(noise(weight))),
    "no_grad: index_add_": without_grad(lambda weight: weight.index_add_(0, torch.tensor([3]), noise(weight[:1]))),
    "no_grad: init.normal_": lambda model: nn.init.normal_(
        model.get_parameter(DOWN), 0.1, 0.3, generator=torch.Generator().manual_seed(5)
    ),
    "inference_mode": lambda model: torch.inference_mode()(lambda: model.get_parameter(DOWN).neg_())(),
    "foreach": lambda model: torch._foreach_mul_([each.data for each in model.model.layers.parameters()], 0.8),
    "one element": lambda model: data(model)[3].__setitem__(7, 9.0),
    "one bit": lambda model: data(model).view(torch.int16).view(-1)[-1:].bitwise_xor_(-0x8000),
    "two rows swapped": lambda model: data(model).copy_(data(model).roll(1, 0)),
    "a row of the embedding": lambda model: data(model, EMBEDDING)[5].neg_(),
    "last element of the head": lambda model: data(model, HEAD)[-1].__setitem__(-1, 9.0),
    "the head": lambda model: data(model, HEAD).add_(noise(data(model, HEAD))),
    "the embedding": lambda model: data(model, EMBEDDING).add_(noise(data(model, EMBEDDING))),
    "a bias": lambda model: data(model, BIAS).add_(3.0),
    "a norm": lambda model: data(model, NORM).mul_(torch.linspace(-1, 2, 32)),
    "one element of a norm": lambda model: data(model, NORM).__setitem__(0, 5.0),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "a new buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.5),
    "load_state_dict": lambda model: model.load_state_dict(averaged(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(averaged(model), assign=True),
    "load_state_dict, one weight": lambda model: model.load_state_dict({DOWN: -data(model)}, strict=False),
    "state_dict's tensors": lambda model: model.state_dict()[DOWN].neg_(),
    "AveragedModel": update_average,
    "data =": lambda model: setattr(model.get_parameter(DOWN), "data", noise(data(model))),
    "data = transposed": lambda model: setattr(
        model.get_parameter(DOWN), "data", noise(data(model)).t().contiguous().t()
    ),
    "no_grad: set_": reuse_storage,
    "swap_tensors": swap_tensors,
    "moved storage": move_storage,
    "share_memory": share_memory,
    "a new parameter": lambda model: set_parameter(model, DOWN, noise(data(model))),
    "a new bias": lambda model: set_parameter(model, BIAS, noise(data(model, BIAS))),
    "a bias removed": lambda model: setattr(model.model.layers[1].mlp.down_proj, "bias", None),
    "a new head": lambda model: set_parameter(model, HEAD, noise(data(model, HEAD))),
    "a module replaced": replace_module,
    "a norm replaced": replace_norm,
    "a layer replaced": replace_layer,
    "all layers replaced": replace_layers,
    "the trunk replaced": replace_trunk,
    "the head replaced": replace_head,
    "the embedding replaced": replace_embedding,
    "a layer removed": remove_layer,
    "two modules swapped": swap_layers,
    "resize_token_embeddings": lambda model: model.resize_token_embeddings(70),
    "vector_to_parameters": through_vector,
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "an optimiser's step": take_step,
    "parametrize": lambda model: parametrize.register_parametrization(
        model.model.layers[1].mlp.down_proj, "weight", Doubled()
    ),
    "prune": lambda model: prune.l1_unstructured(model.model.layers[1].mlp.down_proj, "weight", 0.5),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(float32)": lambda model: model.to(torch.float32),
    "half()": lambda model: model.half(),
    "double()": lambda model: model.double(),
    "one layer to(bfloat16)": lambda model: data(model).copy_(data(model).to(torch.bfloat16)).mul_(1.01),
    "tied": tie,
}  # fmt: skip
OF_TIED: dict[str, Callable[[Any], object]] = {
    "tied weights": lambda model: data(model, EMBEDDING).add_(noise(data(model, EMBEDDING))),
    "tied weights untied": untie,
    "tied weights, one element": lambda model: data(model, HEAD)[-1].__setitem__(-1, 9.0),
}
"""For a model whose head is its embedding."""


def way_of(change: Callable[[Any], object]) -> Way:
    def way(model: Any) -> Iterator[None]:
        yield
        change(model)
        yield

    return way


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)


def adapted(model: Any, *names: str) -> Any:
    """The model with random adapters."""
    wrapped = peft.get_peft_model(model, lora())
    for name in names:
        wrapped.add_adapter(name, lora())
    return wrapped


def with_adapters(change: Callable[[Any], object], *names: str) -> Way:
    """A change to a PeftModel that was created before the target was loaded."""

    def way(model: Any) -> Iterator[None]:
        wrapped = adapted(model, *names)
        yield
        change(wrapped)
        yield

    return way


def disabled(model: Any) -> Iterator[None]:
    wrapped = adapted(model)
    yield
    with wrapped.disable_adapter():
        yield


def enabled(model: Any) -> Iterator[None]:
    wrapped = adapted(model)
    wrapped.base_model.disable_adapter_layers()
    yield
    wrapped.base_model.enable_adapter_layers()
    yield


def unmerged(model: Any) -> Iterator[None]:
    wrapped = adapted(model)
    wrapped.merge_adapter()
    yield
    wrapped.unmerge_adapter()
    yield


def own_adapter(model: Any) -> Iterator[None]:
    """transformers' own way to add an adapter and then disable it."""
    model.add_adapter(lora(), "default")
    yield
    model.disable_adapters()
    yield


def mixed(wrapped: Any) -> None:
    wrapped.add_weighted_adapter(["default", "other"], [0.7, 0.5], "mixed", combination_type="linear")
    wrapped.set_adapter("mixed")


def adapter_ways() -> dict[str, Way]:
    return {
        "peft: get_peft_model": way_of(adapted),
        "peft: get_peft_model, merged": way_of(lambda model: adapted(model).merge_adapter()),
        "peft: get_peft_model, unloaded": way_of(lambda model: adapted(model).merge_and_unload()),
        "peft: merge_adapter": with_adapters(lambda wrapped: wrapped.merge_adapter()),
        "peft: unmerge_adapter": unmerged,
        "peft: disable_adapter": disabled,
        "peft: enable_adapter_layers": enabled,
        "peft: set_adapter": with_adapters(lambda wrapped: wrapped.set_adapter("other"), "other"),
        "peft: add_adapter, set_adapter": with_adapters(
            lambda wrapped: (wrapped.add_adapter("other", lora()), wrapped.set_adapter("other"))
        ),
        "peft: add_weighted_adapter": with_adapters(mixed, "other"),
        "peft: delete_adapter": with_adapters(lambda wrapped: wrapped.delete_adapter("default"), "other"),
        "peft: merge_and_unload": with_adapters(lambda wrapped: wrapped.merge_and_unload()),
        "peft: unload": with_adapters(lambda wrapped: wrapped.unload()),
        "peft: an adapter's weights": with_adapters(
            lambda wrapped: [each.data.neg_() for name, each in wrapped.named_parameters() if "lora_A" in name]
        ),
        "peft: scaling": with_adapters(
            lambda wrapped: wrapped.base_model.model.model.layers[1].mlp.down_proj.set_scale("default", 3.0)
        ),
    }


def own_adapter_ways() -> dict[str, Way]:
    return {
        "transformers: add_adapter": way_of(lambda model: model.add_adapter(lora(), "default")),
        "transformers: disable_adapters": own_adapter,
    }


# ── a target's weights ────────────────────────────────────────────────────────────────────────────────────────────────

PROMPTS = ([5, 9, 2, 33, 7], [11, 63, 5, 40, 8, 8, 19, 1, 22], [3])
TOKENS = 12
CLOSE, TIMES = 1e-4, 8
"""Logits may differ by this share of the largest, or by this multiple of the dtype's rounding error."""


class Setting(NamedTuple):
    """The setting in which changes are tried."""

    name: str
    dtype: torch.dtype
    packed: str = "plain"
    moment: Literal["before loading", "before the first text", "between two texts"] = "between two texts"
    is_compiled: bool = False
    has_drafter: bool = False


SETTINGS = (
    Setting("float32, before the first text", torch.float32, "panels", "before the first text"),
    Setting("float32, between two texts", torch.float32, "panels"),
    Setting("float32 by oneDNN, between two texts", torch.float32, "onednn"),
    Setting("bfloat16, before the first text", torch.bfloat16, moment="before the first text"),
    Setting("bfloat16, between two texts", torch.bfloat16),
    Setting("float32, compiled with other weights before loading", torch.float32, "panels", "before loading", True),
    Setting("float32 compiled, between two texts", torch.float32, "panels", is_compiled=True),
    Setting("float32 with dflash, between two texts", torch.float32, "panels", has_drafter=True),
)


def packing(way: str) -> AbstractContextManager[Any]:
    """Pack linear layers this way, whichever is fastest."""
    return mock.patch.object(prepacked, "_fastest", return_value=way)


class Outcome(NamedTuple):
    verdict: str
    """equal, tie, refused or wrong."""
    reason: str = ""
    is_visible: bool = True


def measure_weights(compiles: bool, left_out: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    ways = {name: way_of(change) for name, change in (CHANGES | OF_TIED).items()}
    if peft is None:
        left_out["adapters"] = "peft is not installed"
    else:
        ways |= adapter_ways()
        try:
            tiny_model().add_adapter(lora(), "default")
            ways |= own_adapter_ways()
        except ValueError as error:
            left_out["transformers' own adapters"] = str(error)
    rows = []
    for setting in SETTINGS:
        reason = why_not(setting, compiles)
        if reason:
            left_out[setting.name] = reason
            continue
        outcomes = {}
        for name, way in ways.items():
            outcomes[name] = tried(way, tiny_model(tie_word_embeddings=name in OF_TIED), setting)
        rows.append(row_of("setting", setting.name, outcomes))
    return {"target_weights": rows, "drafter_weights": measure_drafters(compiles, left_out)}


def why_not(setting: Setting, compiles: bool) -> str:
    """Why nothing can be tried in this setting; "" if it can.  Compiles what the setting needs."""
    if setting.packed not in prepacked.ways():
        return f"this machine has no {setting.packed}"
    if not setting.is_compiled:
        return ""
    if not compiles:
        return "--no-compile"
    try:
        with packing(setting.packed):
            for is_tied in (False, True):
                load_target(tiny_model(tie_word_embeddings=is_tied), compile=True)
    except NotCompiled as error:
        return str(error)
    return ""


def row_of(label: str, name: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    counts = Counter(outcome.verdict for outcome in outcomes.values())
    by_verdict = {
        verdict: {way: each.reason for way, each in outcomes.items() if each.verdict == verdict}
        for verdict in ("tie", "refused", "wrong")
    }
    row = {
        label: name, "ways": len(outcomes), **{key: counts[key] for key in ("equal", "tie", "refused", "wrong")},
        "invisible": [way for way, each in outcomes.items() if not each.is_visible and each.verdict != "refused"],
        "named": {verdict: ways for verdict, ways in by_verdict.items() if ways},
    }  # fmt: skip
    note(json.dumps({key: row[key] for key in (label, "ways", "equal", "tie", "refused", "wrong")}))
    return row


def tried(way: Way, model: Any, setting: Setting) -> Outcome:
    """One change to the model of a target, and to a copy that Outrider does not see."""
    model = model.to(setting.dtype)
    copied = copy.deepcopy(model)
    ours, theirs = way(model), way(copied)
    for steps in (ours, theirs):
        torch.manual_seed(7)
        next(steps)
    before = last_logits(copied)
    go_on(theirs)
    if setting.moment == "before loading":
        go_on(ours)
    try:
        with packing(setting.packed):
            target = load_target(model, compile=None if setting.is_compiled else False)
            drafter = draft_model("dflash", target).drafter() if setting.has_drafter else None
            if setting.moment == "between two texts":
                texts(target, drafter)
            if setting.moment != "before loading":
                refuse_plain(setting, target)
                go_on(ours)
            return compared(target, drafter, copied, before)
    except OutriderError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {str(error)[:300]}")


def go_on(steps: Iterator[None]) -> None:
    torch.manual_seed(8)
    next(steps)


def refuse_plain(setting: Setting, target: Any) -> None:
    """Raises RuntimeError if a compiled step should be in use and is not; adapters keep steps plain."""
    if setting.is_compiled and target.step.graph is None and not has_adapters(target.model):
        raise RuntimeError("no compiled step was taken")


def texts(target: Any, drafter: Drafter | None = None) -> list[list[int]]:
    made = generate(target, PROMPTS, drafter, max_new_tokens=TOKENS, policy="fixed")
    return [each.tokens for each in made]


@torch.inference_mode()
def last_logits(model: Any) -> Tensor:
    logits: Tensor = model(torch.tensor(PROMPTS[:1])).logits[0, -1].double()
    return logits


@torch.inference_mode()
def reference(model: Any) -> list[list[int]]:
    made = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        made.append(ids[0, len(prompt) :].tolist())
    return made


def compared(target: Any, drafter: Drafter | None, copied: Any, before: Tensor) -> Outcome:
    """A changed target compared with the same model, changed in the same way."""
    with recorded(drafter) as drafts:
        made = texts(target, drafter)
    prompt = PROMPTS[0]
    scores = target.prefill(target.allocate(1, 16), [0], torch.tensor([prompt]), [len(prompt)])
    logits, expected = last_logits(copied), reference(copied)
    is_visible = logits.shape != before.shape or float((logits - before).abs().max()) > 1e-3
    reason = "" if drafter is None else other_drafts(drafts, copied)
    exact = copied.double()  # the last use of the copy: not every changed model can be copied again
    lost = float((logits - last_logits(exact)).abs().max())
    margin = max(margin_of(exact, *each) for each in zip(PROMPTS, expected, made, strict=True))
    off = float((scores.logits[0, -1].double() - logits).abs().max())
    if margin > 2 * TIMES * lost:
        reason = f"another text, by a margin of {margin:.1e} where rounding is {lost:.1e}"
    elif not off <= max(CLOSE * float(logits.abs().max()), TIMES * lost):
        reason = f"logits differ by {off:.1e} where rounding is {lost:.1e}"
    if reason:
        return Outcome("wrong", reason, is_visible)
    return Outcome("tie" if margin else "equal", f"{margin:.1e}" if margin else "", is_visible)


@torch.inference_mode()
def margin_of(exact: Any, prompt: list[int], expected: list[int], got: list[int]) -> float:
    """Margin between the logits of both tokens in float64 where a text diverges from transformers' own; 0 if it does
    not."""
    if expected == got:
        return 0.0
    if len(expected) != len(got):
        return float("inf")
    at = next(number for number, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
    logits = exact(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    return max(float((logits[expected[at]] - logits[got[at]]).abs()), 1e-12)


def other_drafts(drafts: list[list[int]], copied: Any) -> str:
    """How drafts differ from those of a drafter and a target loaded with the changed weights; "" if they don't."""
    target = load_target(copied, compile=False)
    expected = possible_drafts(target, draft_model("dflash", target).drafter())
    return "" if drafts in expected else f"drafts are not those of a target loaded with these weights: {drafts[:1]}"


def possible_drafts(target: Any, drafter: Drafter) -> list[list[list[int]]]:
    """Drafts from packed and from unpacked weights: the order of two close logits may differ."""
    packed, _ = drafts_of(target, drafter)
    with prepacked.disabled():
        plain, _ = drafts_of(target, drafter)
    return [packed, plain]


# ── drafters' weights ─────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = {
    "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "length": 3, "rank": 8,
    "gru": 8,
}  # fmt: skip
"""Applied to the fields that a drafter's Config has."""
KINDS: dict[str, dict[str, Any]] = {
    "small_model": {
        "new": {"layers": 2, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 8, "tied": False}
    },
    "dflash": {}, "dspark": {}, "medusa": {}, "eagle": {}, "eagle3": {}, "mtp": {},
}  # fmt: skip


def largest(model: nn.Module) -> tuple[str, nn.Parameter]:
    """The drafter's own hidden-layer matrix with the most values, and its name."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.dim() == 2]
    return max(named, key=lambda pair: ("embed" not in pair[0] and "head" not in pair[0], pair[1].numel()))


def change_all(change: Callable[[Tensor], object]) -> Callable[[nn.Module], object]:
    return lambda model: [change(weight) for weight in model.parameters()]


def matrices_reset(model: nn.Module) -> None:
    for name, weight in list(model.named_parameters()):
        if weight.dim() == 2:
            set_parameter(model, name, noise(weight.data))


DRAFTER_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "data.copy_": change_all(lambda weight: weight.data.copy_(noise(weight.data))),
    "data.add_": change_all(lambda weight: weight.data.add_(noise(weight.data))),
    "data.mul_": lambda model: largest(model)[1].data.mul_(-3),
    "data =": change_all(lambda weight: setattr(weight, "data", noise(weight.data))),
    "no_grad: add_": change_all(torch.no_grad()(lambda weight: weight.add_(noise(weight)))),
    "inference_mode": change_all(torch.inference_mode()(lambda weight: weight.add_(noise(weight)))),
    "one element": lambda model: largest(model)[1].data.view(-1)[-1:].fill_(30.0),
    "a row": lambda model: largest(model)[1].data[0].add_(5.0),
    "load_state_dict": lambda model: model.load_state_dict(averaged(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(averaged(model), assign=True),
    "a new parameter": matrices_reset,
    "vector_to_parameters": through_vector,
    "state_dict's tensors": lambda model: [
        model.state_dict()[name].add_(noise(weight)) for name, weight in model.named_parameters()
    ],
    "numpy": lambda model: largest(model)[1].detach().numpy().__imul__(-3),
}


def draft_model(kind: str, target: Any) -> Any:
    """A random draft model; the same in every call."""
    module = drafters.find(kind)
    values = {key: value for key, value in SIZES.items() if key in module.Config.model_fields} | KINDS[kind]
    torch.manual_seed(1)
    model = module.Model(module.Config(**values), target)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.to(target.device, torch.float32).eval().requires_grad_(False)


def weights_of(drafter: Any) -> nn.Module:
    """The module whose weights draft; a small model's drafter wraps a target."""
    model = drafter.model
    module: nn.Module = model if isinstance(model, nn.Module) else model.model
    return module


class recorded(AbstractContextManager["list[list[int]]"]):
    """Collects the tokens of all drafts that the drafter makes while this is open."""

    def __init__(self, drafter: Drafter | None):
        self.drafter, self.drafts = drafter, []

    def __enter__(self) -> list[list[int]]:
        if self.drafter is not None:
            propose = self.drafter.propose

            def noted(*arguments: Any) -> Any:
                draft = propose(*arguments)
                self.drafts.append(draft.tokens.flatten().tolist())
                return draft

            vars(self.drafter)["propose"] = noted
        return self.drafts

    def __exit__(self, *_: object) -> None:
        if self.drafter is not None:
            del vars(self.drafter)["propose"]


def measure_drafters(compiles: bool, left_out: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    target = load_target(tiny_model(), compile=False)
    plain = texts(target)
    for kind, is_compiled in [*((kind, False) for kind in KINDS), ("dflash", True)]:
        name = f"{kind}, compiled" if is_compiled else kind
        if is_compiled and not compiles:
            left_out[name] = "--no-compile"
            continue
        try:
            outcomes = {
                f"{way}, {moment}": drafter_tried(target, plain, kind, change, moment != "before the first draft",
                                                  is_compiled)
                for way, change in DRAFTER_CHANGES.items()
                for moment in ("before the first draft", "between two texts")
            }  # fmt: skip
        except NotCompiled as error:
            left_out[name] = str(error)
            continue
        rows.append(row_of("drafter", name, outcomes))
    return rows


def drafter_tried(
    target: Any, plain: list[list[int]], kind: str, change: Callable[[nn.Module], object], has_text_before: bool,
    is_compiled: bool,
) -> Outcome:  # fmt: skip
    """One change to a drafter, compared with a drafter created from the changed weights."""
    with packing("panels" if kernels.library() is not None else "plain"):
        drafter = draft_model(kind, target).drafter()
        model = weights_of(drafter)
        if is_compiled:
            compile_passes(drafter)
        if has_text_before:
            texts(target, drafter)
        unchanged = possible_drafts(target, draft_model(kind, target).drafter())
        try:
            change(model)
            drafts, made = drafts_of(target, drafter)
        except OutriderError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("wrong", f"{type(error).__name__}: {str(error)[:300]}")
        other = draft_model(kind, target)
        (other.lm if kind == "small_model" else other).load_state_dict(model.state_dict())
        expected = possible_drafts(target, other.drafter())
    is_visible = expected[0] not in unchanged
    if made != plain:
        return Outcome("wrong", "the text changed", is_visible)
    if drafts not in expected:
        stale = " but those of the old ones" if drafts in unchanged else ""
        return Outcome("wrong", f"drafts are not those of the new weights{stale}", is_visible)
    return Outcome("equal", "", is_visible)


def drafts_of(target: Any, drafter: Drafter) -> tuple[list[list[int]], list[list[int]]]:
    with recorded(drafter) as drafts:
        made = texts(target, drafter)
    return drafts, made


if __name__ == "__main__":
    raise SystemExit(main())
