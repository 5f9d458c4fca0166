"""Texts that share 13 words in a row are known again, whatever their form; others are not; many are kept in little
memory."""

import json
import os
import random
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import ANSWERS, NGRAM_HASHES
from outrider.data.config import Config
from outrider.data.overlap import hash_files, ngram_hashes
from outrider.data.overlap.hash_files import COMMON, Collector, HashCounter, HashFile, NgramHashes, named, read
from outrider.data.overlap.ngram_hashes import WORDS, Pieces, words_of
from outrider.data.sources.conversations import Conversation
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget

QUESTION = (
    "A farmer's market sells apples for two coins each; if Mary buys seven of them and pays with a twenty-coin note, "
    "how many coins does she get back?"
)
KOREAN = "농부가 사과를 한 개에 이천 원에 팝니다. 영희가 일곱 개를 사고 이만 원을 냈다면 거스름돈은 얼마입니까?"
CHINESE = "一个农夫每个苹果卖两元。如果小明买了七个苹果，并付了二十元的钞票，他应该找回多少钱？"


class Hashes(NamedTuple):
    runs: np.ndarray
    whole: int | None


def hashes(text: str) -> Hashes:
    words = words_of(text)
    pieces = Pieces(words)
    return Hashes(pieces.runs(), int(pieces.wholes([0], [len(words)])[0]) if words else None)


def opened(path: Path, documents: dict[str, list[list[str]]], limit: int = hash_files.LIMIT) -> NgramHashes:
    collected = Collector(*documents, limit=limit)
    for part, texts in documents.items():
        for turns in texts:
            collected.add(part, turns)
    return read(HashFile(path, collected.save(path)))


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text.replace(" ", "\n\n  "),
        lambda text: "«" + text.replace(";", " — ").replace("'", "\u2019").replace("?", "!!") + "»",
        lambda text: "".join(
            chr(ord(letter) + 0xFEE0) if letter.isalpha() and letter.isascii() else letter for letter in text
        ),
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: text.replace("e", "e\u00ad"),
        lambda text: "".join(
            chr(ord(letter) - ord("A") + 0x1D400) if "A" <= letter <= "Z" else letter for letter in text
        ),
    ],
    ids=["case", "lines", "punctuation", "full width", "decomposed", "soft hyphens", "bold"],
)
def test_form_does_not_matter(change: Callable[[str], str]) -> None:
    """Catches a leak that hides behind an upper-case letter, another quotation mark or a line break."""
    for text in (QUESTION, KOREAN, CHINESE, "Straße, déjà vu: naïve Ærø " * 6):
        one, other = hashes(text), hashes(change(text))
        assert len(one.runs) > 0
        assert one.runs.tolist() == other.runs.tolist()
        assert one.whole == other.whole


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.sampled_from("abc"), max_size=40))
def test_texts_share_a_hash_just_where_they_share_a_run(one: list[str], other: list[str]) -> None:
    """Catches a rolling sum that forgets the order of words or its last window."""

    def runs(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}

    mine, theirs = hashes(" ".join(one)), hashes(" ".join(other))
    assert len(mine.runs) == len(runs(one))
    assert len(np.intersect1d(mine.runs, theirs.runs)) == len(runs(one) & runs(other))
    assert (mine.whole == theirs.whole) == (one == other)
    assert mine.whole is None or mine.whole not in mine.runs


def random_runs(count: int) -> np.ndarray:
    """Of texts of 100 words from 200: much alike, so what collides easily does."""
    order = random.Random(7)
    words = [f"w{i}" for i in range(200)]
    return np.concatenate([hashes(" ".join(order.choices(words, k=100))).runs for _ in range(count // 88)])


def test_false_alarms_are_rarer_than_one_in_a_million() -> None:
    """Catches hashes that are cut or badly mixed.  A false alarm of the test: 3e-9 by a collision, 1e-7 by a bit."""
    found = random_runs(100_000)
    assert len(np.unique(found)) == len(found)
    shares = [np.mean((found >> np.uint64(bit)) & np.uint64(1)) for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 6 * 0.5 / len(found) ** 0.5


def test_odd_texts_have_hashes_too() -> None:
    """Catches half a surrogate pair, an empty text, or signs alone bringing it down."""
    assert hashes("").whole is hashes("?! …\n").whole is None
    assert hashes("\ud800 half").whole == hashes("half").whole
    assert len(hashes("a" * 100_000).runs) == 0
    assert len(hashes("one two " * 50_000).runs) == 2


@pytest.mark.parametrize("limit", [10**6, 700])
def test_a_tally_counts_as_a_counter_does_and_samples_alike_in_any_order(limit: int) -> None:
    """Catches a merge that loses counts, a cap that wraps around, or a sample that depends on what came first."""
    order = np.random.default_rng(5)
    documents = [np.unique(ngram_hashes.mixed(order.integers(0, 3000, 40, dtype=np.uint64))) for _ in range(400)]
    documents += [documents[0]] * 300
    slow = Counter(one for document in documents for one in document.tolist())
    often, once = HashCounter(limit), HashCounter(limit)
    for document in documents:
        often.add(document)
        often.result()
    for document in reversed(documents):
        once.add(document)
    known, counts, one_in = once.result()
    assert [values.tolist() for values in often.result()[:2]] == [known.tolist(), counts.tolist()]
    assert often.result()[2] == one_in == (1 if limit > len(slow) else 8)
    assert known.tolist() == sorted(one for one in slow if one % one_in == 0)
    assert counts.tolist() == [min(slow[one], COMMON + 1) for one in known.tolist()]
    assert len(known) <= limit and (one_in == 1 or sum(one % (one_in // 2) == 0 for one in slow) > limit)


def test_pieces_are_found_in_the_part_that_holds_them(tmp_path: Path) -> None:
    """Catches a part asked for another, or another question of the same things flagged."""
    found = opened(
        tmp_path / "g", {"prompts": [["short one"], [], [f"Please solve: {QUESTION}"]], "answers": [[KOREAN]]}
    )
    assert found.holding(f"Question 7.\n{QUESTION.upper()}") == ("prompts",)
    assert found.holding(KOREAN) == ("answers",)
    assert found.holding("Short one!") == ("prompts",)
    for other in (
        "Apples cost three coins. How many of them will Mary get for thirty coins at the market?",
        "short one more",
        "사과 한 개는 이천 원이다. 영희는 일곱 개를 샀다. 이만 원을 내면 얼마를 거슬러 받는가?",
        "",
        "?",
    ):
        assert found.holding(other) == ()


def test_what_everybody_says_does_not_count_but_a_whole_prompt_does(tmp_path: Path) -> None:
    """Catches a system prompt in every conversation flagging all."""
    system = "You are a helpful assistant who answers in plain words and never says more than was asked for by the user"
    few, many = (
        [[system, f"question {i}"] for i in range(COMMON)],
        [[f"{system} {i}", "go on"] for i in range(COMMON + 1)],
    )
    assert opened(tmp_path / "few", {"p": few}).holding(f"{system} and ever")
    everybody = opened(tmp_path / "many", {"p": [*many, *[[QUESTION]] * 50]})
    assert not everybody.holding(f"{system} and ever")
    assert not everybody.holding("Go on.")
    assert everybody.holding(f"{system} 3")
    assert everybody.holding(QUESTION)


def test_a_sample_finds_long_texts_and_every_whole_one(tmp_path: Path) -> None:
    """Catches a search that expects what was not kept.  400 runs, 1 in 8 kept: all missed once in 10**23."""
    order = random.Random(3)
    texts = [" ".join(f"w{order.randrange(5000)}" for _ in range(412)) for _ in range(20)]
    found = opened(tmp_path / "g", {"p": [[text] for text in texts]}, limit=1200)
    assert found.sampled == 8
    assert all(found.holding(f"before {text} behind") for text in texts)
    assert found.holding(texts[3])


def swapped(path: Path) -> None:
    opened(path, {"prompts": [["another"]], "answers": []})


def turned(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [swapped, turned, lambda path: os.truncate(path, 60), lambda path: path.unlink()])
def test_a_file_that_is_not_the_one_its_manifest_names_is_refused(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """Catches hashes of other texts, or half of them, answering for these: everything would be clean."""
    collected = Collector("prompts", "answers")
    collected.add("prompts", [QUESTION])
    facts = collected.save(tmp_path / "g")
    assert read(HashFile(tmp_path / "g", facts)).holding(QUESTION)
    with pytest.raises(DataError, match="format 0"):
        read(HashFile(tmp_path / "g", facts | {"format": 0}))
    harm(tmp_path / "g")
    with pytest.raises(DataError, match=r"match its manifest|missing"):
        read(HashFile(tmp_path / "g", facts))


def asked(count: int = 5) -> list[Conversation]:
    return [Conversation(f"p{i}", [{"role": "user", "content": f"{QUESTION} {i}"[-60 - i :]}]) for i in range(count)]


def answer(target: TransformersTarget, folder: Path, conversations: list[Conversation], **settings: Any) -> None:
    config = Config(max_new_tokens=6, length=120, slots=2)
    prepare(target, target.tokenizer, conversations, folder, config.model_copy(update=settings))


def test_prepare_keeps_hashes_of_prompts_and_answers(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches prompts hashed with their template, answers forgotten."""
    answer(talker, tmp_path, asked())
    found = named(tmp_path)
    assert found is not None
    assert found.facts["parts"]["prompts"]["documents"] == found.facts["parts"]["answers"]["documents"] == 5
    opened = read(found)
    assert all(opened.holding(one.messages[0]["content"]) == ("prompts",) for one in asked())
    rows = [json.loads(line) for line in (tmp_path / ANSWERS).read_text().splitlines()]
    said = [talker.decode(row["tokens"][start:end]) for row in rows for start, end in row["learn"]]
    assert any(hashes(text).whole is not None for text in said)
    assert all("answers" in opened.holding(text) for text in said if hashes(text).whole is not None)
    assert opened.holding("nobody said this") == ()


def test_a_resumed_prepare_keeps_the_same_file(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches hashes of the later part alone, and a file written again where nothing has changed."""
    answer(talker, tmp_path / "whole", asked())
    answer(talker, tmp_path / "parts", asked(2))
    early = named(tmp_path / "parts")
    answer(talker, tmp_path / "parts", asked())
    found = [(tmp_path / name / NGRAM_HASHES).read_bytes() for name in ("whole", "parts")]
    assert found[0] == found[1]
    assert early is not None and early.facts["parts"]["prompts"]["documents"] == 2
    before = (tmp_path / "parts" / NGRAM_HASHES).stat().st_mtime_ns
    answer(talker, tmp_path / "parts", asked(3))
    assert (tmp_path / "parts" / NGRAM_HASHES).stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*/*.part"))
    swapped(tmp_path / "parts" / NGRAM_HASHES)  # a manifest is not trusted without its file
    answer(talker, tmp_path / "parts", asked())
    assert (tmp_path / "parts" / NGRAM_HASHES).read_bytes() == found[0]
    answer(talker, tmp_path / "none", asked(1), ngram_hashes=False)
    assert not (tmp_path / "none" / NGRAM_HASHES).exists() and named(tmp_path / "none") is None


def test_hashes_of_fewer_answers_than_there_are_do_not_count(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a stopped prepare whose later answers are trained on and were never hashed."""
    answer(talker, tmp_path, asked(2))

    def stop(done: int, _: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(
            talker, talker.tokenizer, asked(), tmp_path, Config(max_new_tokens=6, length=120, slots=2), on_answer=stop
        )
    assert named(tmp_path) is None
    answer(talker, tmp_path, asked(1))  # asked less: the prompt of one answer is not known here
    found = named(tmp_path)
    assert found is not None and found.facts["unknown"] == 2
    answer(talker, tmp_path, asked(3))
    found = named(tmp_path)
    assert found is not None and found.facts["unknown"] == 0
