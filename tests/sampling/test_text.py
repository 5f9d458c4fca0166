"""A streamed text is what the tokenizer makes of all its tokens, in pieces; and no part of a stop string is ever
shown."""

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.errors import ConfigError
from outrider.sampling import text
from outrider.sampling.text import Detokenizer, TextStream, with_stops
from outrider.targets.text.detokenizer import detokenizer

LETTERS = ["a", "b", "n", "nd", "é", "日", "\ufffd", ".", "'", "s", "n't", " ", "\n"]
"""Plain tokens of every tokenizer here: among them what the clean-up of spaces looks for, and a U+FFFD that is one."""
CHARACTERS = ["中", "🙂", "é", "\n", " ", "A", "\u200d", "\ufffd"]
"""Written byte by byte, where a tokenizer has bytes."""
SPECIAL, ADDED, NAMELESS = "<s>", "<think>", 3


def made(names: Sequence[str], decoder: decoders.Decoder | None, kind: type = models.WordLevel, **options: object):
    """A tokenizer of these names, a special token and an added one."""
    vocabulary = {name: token for token, name in enumerate(["<unk>", *dict.fromkeys(names)])}
    model = models.BPE(vocabulary, []) if kind is models.BPE else kind(vocabulary, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken(ADDED, special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL, **options)


def sentencepiece(*last: decoders.Decoder) -> PreTrainedTokenizerFast:
    names = [f"<0x{byte:02X}>" for byte in range(256)] + [
        name.replace(" ", "▁") for name in [*LETTERS, " a", "  ", "b c"]
    ]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    return made(names, decoders.Sequence(steps), models.BPE)


def byte_level() -> PreTrainedTokenizerFast:
    letters = pre_tokenizers.ByteLevel.alphabet()
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    longer = ["".join(part for part, _ in cut.pre_tokenize_str(name)) for name in [*LETTERS, " a", "🙂"]]
    halves = [name[:-1] for name in longer if len(name) > 2]
    return made([*letters, *longer, *halves], decoders.ByteLevel(), models.BPE)


def with_marks(cleans: bool) -> PreTrainedTokenizerFast:
    names = ["▁", "▁▁", "▁a", "▁'", "▁n", "'▁", "b▁c", *(name.replace(" ", "▁") for name in LETTERS)]
    return made(names, decoders.Metaspace(), clean_up_tokenization_spaces=cleans)


TOKENIZERS = {
    "byte level": byte_level(),
    "llama 2": sentencepiece(decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece(),
    "metaspace": with_marks(cleans=False),
    "metaspace, cleaned": with_marks(cleans=True),
    "wordpiece": made([*LETTERS, "##a", "##'", "##nd"], decoders.WordPiece(), models.WordPiece),
    "wordpiece, cleaned": made(
        [*LETTERS, "##a", "##'", "##nd"], decoders.WordPiece(), models.WordPiece, clean_up_tokenization_spaces=True
    ),
    "words": made(LETTERS, None),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@functools.cache
def detokenizer_of(name: str) -> Detokenizer:
    tokenizer = TOKENIZERS[name]
    return detokenizer(tokenizer, len(tokenizer) + NAMELESS)


@functools.cache
def spelt(name: str) -> Callable[[str], list[int]]:
    """Token ids of a text, byte by byte where the tokenizer has bytes, else letter by letter."""
    names = TOKENIZERS[name].get_vocab()
    if name == "byte level":
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return lambda text: [names[letter] for part, _ in cut.pre_tokenize_str(text) for letter in part]
    if "<0x00>" in names:
        return lambda text: [names[f"<0x{byte:02X}>"] for byte in text.encode()]
    return lambda text: [names[letter] for letter in text]


@functools.cache
def parts(name: str) -> list[list[int]]:
    """What the texts of a tokenizer are made of: a few bytes that are no text, whole characters, every other token."""
    names = TOKENIZERS[name].get_vocab()
    spells = name == "byte level" or "<0x00>" in names
    whole = [spelt(name)(character) for character in CHARACTERS] if spells else []
    alone = [
        token for name, token in names.items() if not name.startswith("<0x") or name in ("<0xE4>", "<0xB8>", "<0xFF>")
    ]
    return [*whole, *whole, *([token] for token in alone), *([len(names) + n] for n in range(NAMELESS))]


@st.composite
def texts(draw: st.DrawFn, name: str, most: int = 60) -> list[int]:
    return [token for part in draw(st.lists(st.sampled_from(parts(name)), max_size=most)) for token in part]


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Sizes of the pushes, over and over."""


def pushed(stream: TextStream, tokens: list[int], cuts: list[int]) -> list[tuple[int, str]]:
    """What each push gave out, and how many tokens stood before its end; it ends as the loop does, where the stream
    stops."""
    found, begin = [], 0
    for size in itertools.cycle(cuts):
        is_last = begin + size >= len(tokens)
        given_out = stream.push(tokens[begin : begin + size], is_last)
        begin += given_out.tokens
        found.append((begin, given_out.text))
        if is_last or given_out.is_stopped:
            return found
    raise AssertionError("no cut, no end")


@every_tokenizer
@settings(max_examples=25)
@given(st.data())
def test_the_pieces_joined_are_the_tokenizers_text_whatever_follows(name, data):
    """Catches a character that is lost, shown twice or half; a byte run, a mark or a space shown before it is certain.

    What was given out is compared with the text of other tokens too that could have followed.
    """
    tokens, other, cuts = data.draw(texts(name)), data.draw(texts(name, 6)), data.draw(CUTS)
    own = detokenizer_of(name)
    shown = ""
    for end, piece in pushed(TextStream(own), tokens, cuts)[:-1]:
        shown += piece
        assert own.decode(tokens[:end] + other).startswith(shown)
    assert "".join(piece for _, piece in pushed(TextStream(own), tokens, cuts)) == own.decode(tokens)


@pytest.mark.parametrize("name", ["byte level", "llama 2", "metaspace, cleaned", "wordpiece"])
@settings(max_examples=30)
@given(st.data())
def test_a_text_ends_before_its_first_stop_string(name, data):
    """Catches a stop string over a border, or in a text that one token more would change; against decoding token by
    token."""
    own, tokens, cuts = detokenizer_of(name), data.draw(texts(name, 20)), data.draw(CUTS)
    letters = st.sampled_from("ab n.é日中🙂\n\ufffd'A")
    held = st.tuples(st.integers(0, 30), st.integers(1, 4)).map(lambda at: own.decode(tokens)[at[0] : sum(at)])
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=3) | held, min_size=1, max_size=3))
    assume("" not in stops)
    # the slow way: all tokens decoded again at every one of them
    wholes = [own.decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
    last = next((n for n, whole in enumerate(wholes, 1) if any(stop in whole for stop in stops)), None)
    wanted = own.decode(tokens)
    if last is not None:
        wanted = wholes[last - 1][: min(at for stop in stops if (at := wholes[last - 1].find(stop)) >= 0)]
    found = pushed(TextStream(own, stops), tokens, cuts)
    assert (found[-1][0], "".join(piece for _, piece in found)) == (len(tokens) if last is None else last, wanted)


def test_text_is_shown_as_soon_as_it_is_certain():
    """Catches a stream that is right because it waits for the end; `中` given out before the byte that turns it into
    U+FFFD, which no later piece can take back; bytes counted as shown that are still to become a character; and a run
    of bytes that ends at a token which decoding leaves out."""
    names, spells = TOKENIZERS["llama 2"].get_vocab(), spelt("llama 2")
    a, b, special, nameless, (first, second, last) = (
        names["a"],
        names["b"],
        names[SPECIAL],
        len(names) + 1,
        spells("中"),
    )
    in_bytes = spelt("byte level")("中a中")
    window = [[a] * text.WINDOW, [a, first, second], [last, a]]
    for name, pushes, shown in [
        ("llama 2", [a, *spells("中"), a, a, *spells("\n"), a], ["a", "", "", "", "中a", "a", "", "\na"]),
        ("byte level", in_bytes, ["", "", "中", "a", "", "", "中"]),
        ("llama 2", [b, *spells("中\n"), first, b], ["b", "", "", "", "", "", "\ufffd" * 5 + "b"]),
        ("llama 2", window, ["a" * text.WINDOW, "a", "中a"]),
        ("llama 2", [first, second, special, nameless, last, a], ["", "", "", "", "", "中a"]),
    ]:
        stream = TextStream(detokenizer_of(name))
        assert [stream.push(own if isinstance(own, list) else [own]).text for own in pushes] == shown


def test_a_stop_string_is_looked_for_in_the_text_and_not_in_the_bytes():
    """Catches ` A` found in the bytes of a text whose first blank is left out, and so a text that ends too soon."""
    spells = spelt("llama 2")
    found = pushed(TextStream(detokenizer_of("llama 2"), [" A"]), spells(" A A A"), [1])
    assert (found[-1][0], "".join(piece for _, piece in found)) == (4, "A")


def test_a_window_that_no_letter_ends_is_not_cut():
    """Catches a cut among quotes, which the clean-up pairs with blanks from the first of them on."""
    for name, count in itertools.product(["metaspace, cleaned", "wordpiece, cleaned"], [60, 61]):
        own, names = detokenizer_of(name), TOKENIZERS[name].get_vocab()
        quote = names["▁'"] if "▁'" in names else names["'"]
        tokens = [names["a"], *[quote] * count, names["s"], names["b"], *[quote] * count]
        found = pushed(TextStream(own), tokens, [1])
        assert "".join(piece for _, piece in found) == own.decode(tokens), (name, count)


@pytest.mark.parametrize(
    "decoder",
    [decoders.BPEDecoder("</w>"), decoders.Sequence([decoders.Replace("a", "aa"), decoders.Fuse()])],
    ids=["BPEDecoder", "letters replaced"],
)
def test_a_decoder_that_is_not_known_gives_its_text_out_at_the_end(decoder, caplog):
    """Catches a guess about a decoder: `a` that was shown, and then came to be `c`; and a stop string that is missed
    there."""
    tokenizer = made(["a", "b", " ", "a</w>"], decoder)
    own = detokenizer(tokenizer, len(tokenizer))
    assert "is not supported" in caplog.text
    tokens = tokenizer.convert_tokens_to_ids(["a</w>", "a", "b", " ", "a", " "])
    stream = TextStream(own)
    assert [stream.push([token]).text for token in tokens] == [""] * len(tokens)
    assert stream.push([], is_last=True).text == tokenizer.decode(tokens)
    stopped = pushed(TextStream(own, ["b"]), tokens, [1])
    wholes = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    assert stopped[-1][0] == next((n for n, whole in enumerate(wholes) if "b" in whole), len(tokens))


def test_a_tokenizer_that_decodes_its_own_way_is_not_known():
    """Catches trust in a decoder whose text the tokenizer changes afterwards."""

    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return super()._decode(*args, **kwargs).upper()

    assert not detokenizer(Shouting(tokenizer_object=TOKENIZERS["gemma"].backend_tokenizer), 300).is_local


def test_a_stop_string_without_a_tokenizer_is_refused():
    """Catches a text that runs to its limit, since there is none in which the string could be found."""
    for refuse in (with_stops, TextStream):
        with pytest.raises(ConfigError, match=r"stop strings \['b'\] need a tokenizer"):
            refuse(None, ["b"])
    own = detokenizer_of("llama 2")
    assert with_stops(own, ["a", ADDED]) is own


def test_a_special_token_as_a_stop_string_ends_the_text_at_that_token():
    """Catches lm-eval's stops refused (`Question:`, `</s>`), and a text that runs past a special token that was named.

    A string with a special token and more can never stand in a text; it ends none.
    """
    names = TOKENIZERS["llama 2"].get_vocab()
    tokens = [names[name] for name in ("a", "b", SPECIAL, "a", "b")]
    for stops, end, shown in (([SPECIAL, "x"], 3, "ab"), ([f"{SPECIAL}a"], 5, "abab"), ([SPECIAL, "b"], 2, "a")):
        found = pushed(TextStream(detokenizer_of("llama 2"), stops), tokens, [2])
        assert (found[-1][0], "".join(piece for _, piece in found)) == (end, shown)


@every_tokenizer
@settings(max_examples=25)
@given(st.data())
def test_a_text_that_goes_on_from_a_prompt_is_what_both_together_add(name, data):
    """Catches the space between a prompt and its continuation, which decoders of SentencePiece drop at a text's
    beginning; and a prompt's end shown again where only its last tokens are decoded."""
    prompt, tokens, cuts = data.draw(texts(name)), data.draw(texts(name)), data.draw(CUTS)
    own = detokenizer_of(name)
    whole, shown = own.decode(prompt + tokens), own.decode(prompt)
    is_open = bool(prompt) and (prompt[-1] in own.byte_tokens or shown.endswith("\ufffd"))
    assume(not is_open and whole.startswith(shown))  # else the prompt's own text changes
    found = pushed(TextStream(own, before=prompt), tokens, cuts) if tokens else []
    assert shown + "".join(piece for _, piece in found) == whole


def test_what_stands_before_the_bytes_of_a_prompt_is_not_shown_again():
    """Catches a U+FFFD of the prompt taken for half a character that the text completes, where a run of bytes stands
    between both (CI found it); and a space dropped after a prompt that is nothing but such a run."""
    names, spells = TOKENIZERS["llama 2"].get_vocab(), spelt("llama 2")
    for before, added in (([names["\ufffd"]], "中"), ([], " ")):
        stream = TextStream(detokenizer_of("llama 2"), before=[*before, *spells("中"), names[SPECIAL]])
        assert stream.push(spells(added), is_last=True).text == added
