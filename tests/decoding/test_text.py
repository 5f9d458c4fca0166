"""A streamed text is the whole text, in pieces; and no part of a stop string is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.decoding.text import TextStream


def byte_level() -> Tokenizer:
    """Bytes and a few merges, so that tokens end in the middle of characters and of stop strings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the end of the stop ends here. naïve café 日本語 🙂🙂 " * 20], trainer)
    return tokenizer


TOKENIZER = byte_level()
TEXTS = st.text(alphabet=st.sampled_from("abst op.\n é日本🙂\u200d\ufffdнd"), max_size=120)


def decode(tokens) -> str:
    return TOKENIZER.decode(list(tokens))


def streamed(tokens: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    stream, pieces, begin = TextStream(decode, stops), [], 0
    for size in cuts:
        if begin + size >= len(tokens):
            break
        pieces.append(stream.push(tokens[begin : begin + size]))
        begin += size
    return [*pieces, stream.push(tokens[begin:], is_last=True)]


CUTS = st.lists(st.integers(1, 5), max_size=300)


@given(TEXTS, CUTS)
def test_the_pieces_joined_are_the_whole_text(text, cuts):
    """Catches a character that is lost, shown twice or shown half, over windows longer than the stream keeps."""
    tokens = TOKENIZER.encode(text).ids
    assert decode(tokens) == text
    pieces = streamed(tokens, cuts)
    assert "".join(pieces) == text


@given(st.integers(0, 400))
def test_a_long_text_streamed_token_by_token_is_whole(length):
    """Catches the border where old tokens leave the window, one token at a time."""
    text = ("né日🙂 ab\n" * 60)[:length]
    tokens = TOKENIZER.encode(text).ids
    assert "".join(streamed(tokens, [1] * len(tokens))) == text


@given(st.lists(st.integers(0, 255), max_size=150), CUTS)
def test_bytes_that_are_no_text_are_streamed_as_they_decode(ids, cuts):
    """Catches a stream that stops at broken bytes, as a small model writes them."""
    tokens = [token % TOKENIZER.get_vocab_size() for token in ids]
    assert "".join(streamed(tokens, cuts)) == decode(tokens)


@given(TEXTS, CUTS, st.lists(st.text(alphabet="abst op.é日", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_is_never_shown(text, cuts, stops):
    """Catches a stop string over the border of two tokens, and a beginning of one that is shown too soon."""
    tokens = TOKENIZER.encode(text).ids
    # as the loop does: the tokens end with the one that completes the first stop string
    last = next((n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops)), len(tokens))
    pieces = streamed(tokens[:last], cuts, tuple(stops))
    shown = "".join(pieces)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    whole = decode(tokens[:last])
    begins = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert shown == whole[: min(begins)] if found else shown == text
    for n in range(len(pieces)):
        assert not any(stop in "".join(pieces[: n + 1]) for stop in stops)


def test_a_beginning_of_a_stop_string_is_held_and_given_out_when_it_goes_on_otherwise():
    """Catches text that is swallowed because it looked like a stop string."""
    stream = TextStream(lambda tokens: "".join(map(chr, tokens)), ("END",))
    given_out = [stream.push([ord(letter)]) for letter in "aENxEN"]
    assert given_out == ["a", "", "", "ENx", "", ""]
    assert stream.push([ord("d")], is_last=True) == "ENd"


def test_a_half_character_waits_for_its_other_half():
    """Catches a replacement character that is shown for a character still to come."""
    tokens = list("é".encode())
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert [stream.push(tokens[:1]), stream.push(tokens[1:])] == ["", "é"]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_demos_own_tokenizer_streams_whole(size):
    """The same with the tokenizer that ships, where it is there."""
    from outrider import demo

    path = demo.TARGET / "tokenizer.json"
    if not path.exists():
        pytest.skip("the demo target is not in this tree")
    tokenizer = Tokenizer.from_file(str(path))
    text = 'def naïve(日本):\n    """🙂 ends"""\n    return 0\n' * 12
    tokens = tokenizer.encode(text).ids
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    pieces = [stream.push(tokens[n : n + size]) for n in range(0, len(tokens), size)]
    assert "".join(pieces) + stream.push([], is_last=True) == tokenizer.decode(tokens, skip_special_tokens=True)
