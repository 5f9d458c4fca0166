"""Sentence ends and cue words are found in tokens as they are in the text."""

import pytest
from policies.worded import random_words

from outrider.policies.sentences import Piece, piece, pieces

DECODE = random_words().decode


@pytest.mark.parametrize(
    ("before", "added", "ends"),
    [
        ("a b", ".", True), ("a b", " c", False), ("a", "! ", True), ("a", ' why?"', False), ("a\n", "\n", True),
        ("a", "\n\n", True), ("a\n", "  \n", True), ("a\n\n", " b", False), ("a\n\n", "", False), ("a", "\n", False),
        ("", ".", True), ("a", " 3.14", False), ("a.", " ", False),
    ],
)  # fmt: skip
def test_a_sentence_ends_at_a_stop_or_a_blank_line(before: str, added: str, ends: bool) -> None:
    """Catches an end that is told again at the next token, and one that only a look at the line before shows."""
    assert Piece(before, added).ends_sentence is ends


@pytest.mark.parametrize(
    ("before", "added", "found"),
    [
        ("a.", " So", "So"), ("a.", " Som", None), ("aS", "o", None), ("a. So", ",", "So,"), ("a. So", " ", None),
        ("", "So", "So"), ("a (", "So", "So"), ("a.", " So ", "So"), ("a. S", "o", "So"), ("Also", " So", "So"),
    ],
)  # fmt: skip
def test_a_cue_is_a_whole_word_that_this_token_completes(before: str, added: str, found: str | None) -> None:
    """Catches a word within another, and one that is found twice because white space follows it."""
    assert Piece(before, added).completes(["So", "So,"]) == found


def test_pieces_join_to_the_text() -> None:
    """Catches a window that repeats or loses text; the word pieces are longer than one window."""
    tokens = [n % 6 for n in range(50)]
    assert "".join(one.added for one in pieces(DECODE, tokens, 0)) == DECODE(tokens)
    assert piece(DECODE, tokens, 40).before == DECODE(tokens[24:40])
