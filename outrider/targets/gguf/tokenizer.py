"""The tokenizer of a GGUF file: byte-level BPE is built from tokens and merges; SentencePiece is built by transformers.

llama.cpp stores the name of the pre-tokenizer, which splits texts before merges are applied.  A target with an unknown
name gets no tokenizer, since wrong splits would silently give wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.targets.gguf.reader import shown

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens: ordinary, special, matched as a whole but not special, and rows of the head without a token."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+{0}|" + r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*{0}|"
GPT4O = CASED.replace("{0}", CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = CASED.replace("{0}", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "lfm2"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O), "tekken": TEKKEN,
}  # fmt: skip
"""llama.cpp's names of splits, and their patterns."""
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2", "tekken", "gpt-4o", "llama4")
"""Splits for which a word that is a token is encoded as that token, regardless of the merges."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "granite", "exaone")
"""Splits that separate all digits, and are otherwise GPT-2's."""
GPT2 = ("gpt-2", "gpt2", "jina-en", "phi-2", "roberta-bpe")
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""llama.cpp's names of special tokens → transformers'."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn or a message."""


class NoTokenizer(ValueError):
    """The tokenizer can't be built; the message says why."""


def ends(keys: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a text, the main one first."""
    ids = [_id(keys, name) for name in ENDS]
    return list(dict.fromkeys(number for number in ids if number is not None))


def special_ids(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """Ids of the beginning and padding tokens for a config."""
    return {"bos_token_id": _id(keys, "bos"), "pad_token_id": _id(keys, "padding")}


def of_keys(keys: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Raises NoTokenizer."""
    kind, tokens = keys.get("tokenizer.ggml.model"), keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise NoTokenizer("it has no list of tokens")
    kinds = keys.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise NoTokenizer("its lists of tokens and of their types differ in length")
    if kind == "gpt2":
        backend = _byte_level(keys, tokens, kinds)
    elif kind == "llama":
        backend = _sentencepiece(keys, tokens)
    else:
        raise NoTokenizer(f"its tokenizer is {shown(str(kind))}; supported are gpt2 and llama")
    _add(backend, tokens, kinds)
    names = {name: _token(keys, tokens, gguf_name) for gguf_name, name in SPECIAL.items()}
    _frame(backend, keys, names, kind)
    template = keys.get("tokenizer.chat_template")
    special = {f"{name}_token": token for name, token in names.items() if token is not None}
    made: Any = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    made._tokenizer = backend  # as in classes with their own backend; one passed as an argument would be copied
    made.__init__(
        clean_up_tokenization_spaces=False, chat_template=template if isinstance(template, str) else None, **special
    )
    whole: PreTrainedTokenizerFast = made
    return whole


def _byte_level(keys: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    split, merges = keys.get("tokenizer.ggml.pre"), keys.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise NoTokenizer("it has no list of merges")
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    pairs = [pair for merge in merges if len(pair := tuple(merge.split(" ", 1))) == 2]
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=split in WHOLE_WORDS)
    except Exception as error:  # the library's own class is not public
        raise NoTokenizer(f"its merges do not fit its tokens: {error}") from None
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(_splits(split))
    made.decoder = decoders.ByteLevel()
    return made


def _splits(name: Any) -> list[Any]:
    """The pre-tokenizers.  Raises NoTokenizer for an unknown name."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in DIGITS:
        return [pre_tokenizers.Digits(individual_digits=True), whole]
    if name in GPT2:
        return [whole]
    if name not in PATTERNS:
        supported = ", ".join((*PATTERNS, *DIGITS, *GPT2))
        raise NoTokenizer(f"it splits texts as {shown(str(name))}, which is not supported; supported are {supported}")
    cut = pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")
    return [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _sentencepiece(keys: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, whose merges follow from scores; built by transformers."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import select_tokenizer_builder

    scores = keys.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise NoTokenizer("its lists of tokens and of their scores differ in length")
    try:
        build = select_tokenizer_builder(str(keys.get("general.architecture")), "llama")
        made: Tokenizer = build({"tokens": tokens, "scores": scores}).backend_tokenizer
    except Exception as error:  # transformers does not check these lists
        raise NoTokenizer(f"transformers can't build its tokenizer: {error}") from None
    if keys.get("tokenizer.ggml.add_space_prefix") is False:
        made.pre_tokenizer, made.normalizer = _without_prefix(made)
    return made


def _without_prefix(made: Tokenizer) -> tuple[Any, Any]:
    """Its pre-tokenizer and normaliser, without a space before the text."""
    before = made.pre_tokenizer
    if isinstance(before, pre_tokenizers.Metaspace):
        before.prepend_scheme = "never"
    return before, made.normalizer


def _add(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add the tokens that are matched as a whole anywhere in a text."""
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _frame(backend: Tokenizer, keys: Mapping[str, Any], names: Mapping[str, str | None], kind: str) -> None:
    """Set the tokens before and after a text."""
    begins, ends_too = (
        keys.get("tokenizer.ggml.add_bos_token", kind == "llama"),
        keys.get("tokenizer.ggml.add_eos_token"),
    )
    before = names["bos"] if begins else None
    after = names["eos"] if ends_too else None
    framed = [token for token in (before, "$A", after) if token is not None]
    ids = [(token, backend.token_to_id(token)) for token in (before, after) if token is not None]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
    if ids:
        steps.append(processors.TemplateProcessing(single=" ".join(framed), special_tokens=ids))
    backend.post_processor = processors.Sequence(steps)


def _id(keys: Mapping[str, Any], name: str) -> int | None:
    """The id of a special token; None if the file has none within its vocabulary."""
    number, tokens = keys.get(f"tokenizer.ggml.{name}_token_id"), keys.get("tokenizer.ggml.tokens")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(tokens, list):
        return None
    return number if 0 <= number < len(tokens) else None


def _token(keys: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    number = _id(keys, name)
    return None if number is None else tokens[number]
