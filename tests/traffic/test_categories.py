"""What a request is about: every mark is seen, and what is unsure is `other`."""

from typing import Any

from outrider.traffic.logs.categories import MARKS, Category, category_of, marks

JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {}}}
SEEN: list[tuple[Category, str, str, dict[str, Any]]] = [
    ("code", "fence", "What does this do?\n```\nx\n```", {}),
    ("code", "line of code", "def area(width, height):\n    return width", {}),
    ("code", "traceback", "Traceback (most recent call last)", {}),
    ("code", "asked for", "Write a short function that reverses a list.", {}),
    ("code", "named", "Is Rust faster here?", {}), ("math", "notation", r"Find $x^2$ where x is \frac{1}{2}", {}),
    ("math", "arithmetic", "What is 17 * (4 + 3)", {}), ("math", "asked for", "Prove the inequality of the means.", {}),
    ("math", "how many", "Ada has 3 pens and buys 4. How many has she", {}),
    ("extraction", "asked for", "Summarise it for the board.", {}),
    ("extraction", "given text", "Who signed the following contract", {}),
    ("extraction", "form", "Return JSON with name and age.", {}), ("extraction", "schema", "Ada, 36", JSON_SCHEMA),
    ("language", "translation", "Translate: good night", {}), ("language", "named", "Now put it into Japanese", {}),
    ("language", "script", "Какая завтра погода", {}),
    ("language", "words", "Wie ist das Wetter, und ist die Luft kalt", {}), ("chat", "greeting", "Hello there", {}),
    ("chat", "opinion", "Tell me about your day", {}), ("chat", "writing", "Write a poem about rain.", {}),
    ("chat", "question", "Who wrote Faust?", {}),
]  # fmt: skip


def test_every_mark_is_seen():
    """Catches a mark that no longer matches, or that decides for another category, and one without a text here."""
    for category, mark, text, settings in SEEN:
        assert mark in marks(text, settings)[category] and category_of(text, settings) == category, text
    listed = {(category, name) for category, patterns in MARKS.items() for name in patterns}
    more = {("language", "script"), ("language", "words"), ("chat", "question"), ("extraction", "schema")}
    assert {(category, mark) for category, mark, _, _ in SEEN} == listed | more


def test_what_is_unsure_is_other():
    """Catches a guess: no mark, or as many of two categories."""
    for text in ("", "7", "lorem ipsum dolor sit amet", "Translate this: Traceback (most recent call last)"):
        assert category_of(text) == "other", text


def test_talk_gives_way_and_most_marks_win():
    """Catches a question about code that counts as talk, and code to be translated that counts as language."""
    assert category_of("Hi! Can you fix this function?") == "code"
    assert category_of("Translate this Python function to Rust:\n```python\ndef f(): pass\n```") == "code"


def test_the_last_question_decides_and_earlier_ones_help():
    """Catches a conversation that is judged by its beginning, or by the assistant's words."""
    turn = lambda role, content: {"role": role, "content": content}
    before = [turn("user", "Write a Python function that sorts."), turn("assistant", "Hello! 1 + 1 = 2")]
    assert category_of([*before, turn("user", "What is 12 * 12")]) == "math"
    assert category_of([*before, turn("user", "Again, shorter")]) == "code"


def test_a_long_text_is_looked_at_from_both_ends():
    """Catches a question that stands behind a long document."""
    assert category_of("lorem " * 20_000 + "\nSummarize it.") == "extraction"
