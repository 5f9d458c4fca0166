"""Which conversations a run uses: mixed by weight, without duplicates, each once, the same each time."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from outrider.data.answers.dialogue import hash_conversations
from outrider.data.answers.store import Answer, hold_out
from outrider.data.config import Config, Source
from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.sources import manifest, mixture
from outrider.data.sources.conversations import Conversation, Skipped
from outrider.data.sources.duplicates import NEAR, SIZE, content_key, near_duplicates
from outrider.data.sources.mixture import NothingLeft, Selection, opening, select
from outrider.data.sources.readers import rows
from outrider.data.split import Openings, held_out
from outrider.errors import DataError
from outrider.measure.tasks.names import Prompt as TaskPrompt
from outrider.measure.tasks.names import prompts as task_prompts

WORDS = "apple river stone cloud green seven paper light house train water glass music".split()  # noqa: SIM905
KOREAN = "사과 강물 바위 구름 초록 일곱 종이 불빛 기차 유리 음악 북쪽 책상 학교 바다".split()  # noqa: SIM905


def write(path: Path, texts: list[str], **more: Any) -> Path:
    rows = [{"messages": [{"role": "user", "content": text}]} | more for text in texts]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts_of(found: Selection) -> list[str]:
    return [conversation.messages[0]["content"] for conversation in found]


def mixed(tmp_path: Path, **settings: Any) -> Config:
    for name, count in (("a", 100), ("b", 60), ("c", 10)):
        write(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(count)])
    weights = settings.pop("weights", (None, None, None))
    given = [{"path": str(tmp_path / f"{n}.jsonl"), "weight": w} for n, w in zip("abc", weights, strict=True)]
    return Config(sources=given, **settings)


@pytest.mark.parametrize(("count", "wanted"), [(None, (30, 60, 10)), (10, (3, 6, 1))])
def test_shares_are_those_of_the_weights(count: int | None, wanted: tuple[int, ...], tmp_path: Path) -> None:
    """Catches a small source that is repeated or thinned so that the mixture is another than the weights say."""
    found = select(mixed(tmp_path, weights=(3, 6, None), count=count))
    assert tuple(part.count for part in found.parts) == wanted
    assert Counter(text[0] for text in texts_of(found)) == dict(zip("abc", wanted, strict=True))


def test_a_larger_count_uses_the_same_and_more(tmp_path: Path) -> None:
    """Catches answers that are thrown away because the count was raised, and a sample that is the file's first rows."""
    for weights in ((None, None, None), (1, 2, 1)):
        before: set[str] = set()
        for count in (3, 10, 30, 40):
            chosen = set(texts_of(select(mixed(tmp_path, weights=weights, count=count))))
            assert len(chosen) == count
            assert before <= chosen
            before = chosen
    few = texts_of(select(Config(conversations=str(tmp_path / "a.jsonl"), count=10)))
    assert set(few) != {f"a{i}" for i in range(10)}
    assert few == sorted(few, key=lambda text: int(text[1:])), "one source stays in its order"
    assert set(few) != set(texts_of(select(Config(conversations=str(tmp_path / "a.jsonl"), count=10, seed=5))))


def test_sources_are_spread_over_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a source that comes after another, so that a stopped run has answers of one alone."""
    monkeypatch.setattr(mixture, "WINDOW", 4)
    texts = texts_of(select(mixed(tmp_path)))
    assert len(set(texts)) == 170
    for start in range(0, 160, 34):
        part = Counter(text[0] for text in texts[start : start + 34])
        assert part["a"] >= 14 and part["b"] >= 7


def test_a_source_has_its_own_count(tmp_path: Path) -> None:
    """Catches a count of one source that is ignored, and a run file that names two things of which one is ignored."""
    write(tmp_path / "a.jsonl", ["", *(f"long enough {i}" for i in range(20)), "x"])
    path = tmp_path / "a.jsonl"
    given = Config(sources=[{"path": str(path), "count": 5}], min_characters=3, skip_bad=True)
    assert len(texts_of(select(given))) == 5
    with pytest.raises(ValueError, match="leave one of them out"):
        Config(conversations="a.jsonl", sources=[{"path": "b.jsonl"}])
    assert Config(sources=[{"path": "b.jsonl"}, {"name": "c/d"}]).label == "b.jsonl, c/d"


def test_ids_are_told_from_each_other_across_sources(tmp_path: Path) -> None:
    """Catches two conversations under one name in a report: file names repeat between folders."""
    for name in "xy":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", [name + "1", name + "2"], id="same")
    found = select(Config(sources=[{"path": str(tmp_path / name)} for name in "xy"]))
    ids = [one.id for one in found]
    assert "same" in ids and len(ids) == 4
    assert sorted(ids) == sorted(one.id for one in found)


def test_a_source_that_changes_is_refused(tmp_path: Path) -> None:
    """Catches conversations that nobody has checked: the file was written to between two readings."""
    path = write(tmp_path / "a.jsonl", [f"t{i}" for i in range(10)])
    found = select(Config(conversations=str(path)))
    for texts in ([f"t{i}" for i in range(9)], ["new", *(f"t{i}" for i in range(9))]):
        write(path, texts)
        with pytest.raises(DataError, match=r"a\.jsonl has changed since it was read"):
            list(found)


def test_lengths_are_limits(tmp_path: Path) -> None:
    """Catches a filter that cuts, or one that leaves out what is just long enough; and a run of nothing."""
    path = write(tmp_path / "a.jsonl", ["ab", "abc", "가" * 9, "가" * 10])
    found = select(Config(conversations=str(path), min_characters=3, max_characters=9))
    assert texts_of(found) == ["abc", "가" * 9]
    assert found.left_out == {"too short": 1, "too long": 1}
    with pytest.raises(NothingLeft, match=r"no conversations are left in .*4 too short"):
        select(Config(conversations=str(path), min_characters=99))


def test_equal_conversations_are_used_once(tmp_path: Path) -> None:
    """Catches a duplicate in another source, and two answers of one question taken for one where they train."""
    rows = [("q1", "a"), ("q2", "a"), ("q1", "b"), ("q1", "a")]
    for name in "xy":
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"prompt": ask, "response": answer}) + "\n" for ask, answer in rows)
        )
    given = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "xy"]
    assert sorted(texts_of(select(Config(sources=given, deduplicate="exact")))) == ["q1", "q2"]
    found = select(Config(sources=given, deduplicate="exact", regenerate=False))
    assert sorted(texts_of(found)) == ["q1", "q1", "q2"]
    assert found.left_out["duplicate"] == 5
    assert [part.count for part in found.parts] == [3, 0], "the first one stays"
    assert len(select(Config(sources=given))) == 8


def sentence(words: list[str], seed: int, count: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join(
        draw.choice(words) + (str(draw.randrange(100)) if draw.random() < 0.5 else "") for _ in range(count)
    )


@pytest.mark.parametrize("words", [WORDS, KOREAN], ids=["english", "korean"])
def test_nearly_equal_conversations_are_used_once(words: list[str], tmp_path: Path) -> None:
    """Catches copies with another greeting, other capitals or one word changed."""
    texts = [sentence(words, i) for i in range(30)]
    copies = [
        text.upper() + "!" if i % 3 == 0 else text.replace(" ", ",  ", 3) if i % 3 == 1 else text + " 7"
        for i, text in enumerate(texts)
    ]
    path = write(tmp_path / "a.jsonl", texts + copies)
    found = select(Config(conversations=str(path), deduplicate="near"))
    assert texts_of(found) == texts
    assert found.left_out == {"nearly a duplicate": 30}
    assert len(select(Config(conversations=str(path), deduplicate="exact"))) == 60


def test_near_duplicates_are_those_that_every_pair_gives() -> None:
    """Catches a bucket that compares with its first member alone.  The slow way: all pairs, joined."""
    draw = np.random.default_rng(0)
    bases = draw.integers(0, 2**32, (6, SIZE), dtype=np.uint32)
    rows = []
    for _ in range(120):
        row = bases[draw.integers(6)].copy()
        changed = draw.random(SIZE) < draw.choice([0.02, 0.1, 0.3, 0.6])
        row[changed] = draw.integers(0, 2**32, int(changed.sum()), dtype=np.uint32)
        rows.append(row)
    signatures = np.array(rows)
    alike = (signatures[:, None] == signatures[None]).mean(2) >= NEAR
    for _ in range(7):
        alike = (alike.astype(int) @ alike.astype(int)) > 0  # joined through others
    slow = np.array([alike[i, :i].any() for i in range(len(rows))])
    assert 10 < slow.sum() < 110
    assert (near_duplicates(signatures) == slow).all()
    assert not near_duplicates(np.zeros((0, SIZE), np.uint32)).any()


class Prompt(NamedTuple):
    id: str
    questions: tuple[str, ...]


LONG = "A farmer sells apples for two coins each; Mary buys seven and pays with a twenty-coin note."
KOREAN_LONG = (
    "농부가 사과를 한 개에 두 냥씩 팔고 있는데 마리아가 일곱 개를 사고 스무 냥짜리 지폐를 냈다면 거스름돈은 얼마인가요"
)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (f"Please answer. {LONG.upper()} Thanks!", "whole"), (f"I wonder: {LONG}", "words"), (LONG, "whole"),
        ("What is the capital of France?", "whole"),
        ("what's the capital of france", "whole"),
        ("Name the three longest rivers of France, by length and flows!", "near"),
        (f"다음 문제를 풀어 주세요. {KOREAN_LONG} 답만 쓰세요.", "words"), ("대한민국의 수도는 어디?", "whole"),
        ("What is the capital of Sweden and its history?", None), ("Mary sells apples.", None), ("go on", None),
        ("농부가 사과를 팔아요", None), ("?!", None),
    ],
)  # fmt: skip
def test_what_an_evaluation_asks_is_found(text: str, how: str | None) -> None:
    """Catches a prompt that is trained on and measured on, also in Korean; and one that shares only common words."""
    prompts = [
        Prompt("1", (LONG, "go on")), Prompt("2", ("What's the capital of France?",)), Prompt("3", (KOREAN_LONG,)),
        Prompt("4", ("대한민국의 수도는 어디?",)), Prompt("5", ("What is the capital of France?",)),
        Prompt("6", ("...",)), Prompt("7", ("Name the three longest rivers of France by length and flow",)),
    ]  # fmt: skip
    found = EvaluationPrompts({"quiz": prompts}).overlap((text,))
    assert (None if found is None else found.how) == how
    if found is not None:
        assert found.task == "quiz"


def test_what_many_prompts_share_does_not_count() -> None:
    """Catches a whole source that is thrown away since it has the instruction which all prompts of a task have."""
    common = "please reason step by step and put your final answer within a box at the end"
    prompts = [Prompt(str(i), (f"{sentence(WORDS, i, 5)} {common}",)) for i in range(30)]
    evaluated = EvaluationPrompts({"quiz": prompts})
    assert evaluated.overlap((f"{sentence(KOREAN, 1, 9)} {common}",)) is None
    assert evaluated.overlap((prompts[3].questions[0],)) == ("quiz", "3", "whole")
    for few in (2, 3, 5):
        assert EvaluationPrompts({"quiz": prompts[:few]}).overlap((f"other {common}",)) is None
    assert EvaluationPrompts({}).overlap(("x",)) is None


def test_only_the_first_turn_is_compared_as_a_short_whole() -> None:
    """Catches dialogues that are thrown away for a `go on` that every dialogue has."""
    evaluated = EvaluationPrompts({"quiz": [Prompt("1", ("go on",))]})
    assert evaluated.overlap(("tell me of apples", "go on")) is None
    assert evaluated.overlap(("Go on!", "x")) == ("quiz", "1", "whole")
    later = EvaluationPrompts({"quiz": [Prompt("1", (LONG,))]}).overlap(("hello", f"Please answer. {LONG}"))
    assert later == ("quiz", "1", "whole"), "a long prompt is found in every turn"


def test_contaminated_conversations_are_left_out_and_named(tmp_path: Path) -> None:
    """Catches a drafter that is measured on what it was trained on, and a report that does not say what was dropped."""
    path = write(tmp_path / "a.jsonl", ["harmless one", LONG, "harmless two"])
    evaluated = EvaluationPrompts({"quiz": [Prompt("7", (LONG,))]})
    found = select(Config(conversations=str(path)), evaluated=evaluated)
    assert texts_of(found) == ["harmless one", "harmless two"]
    assert found.left_out == {"contaminated": 1}
    written = json.loads(manifest.write(tmp_path / "answers", found).read_text())
    assert written["contamination"]["left_out"] == 1
    assert written["contamination"]["prompts"] == 1
    assert written["contamination"]["first"] == [
        {"id": "a.jsonl:2", "place": "a.jsonl:2", "task": "quiz", "prompt": "7", "how": "whole"}
    ]


def test_the_manifest_says_what_went_in(tmp_path: Path) -> None:
    """Catches counts that don't add up, and a file that can't be told from another of its name."""
    config = mixed(tmp_path, weights=(1, 1, 1), count=15, skip_bad=True)
    (tmp_path / "b.jsonl").open("a").write("torn\n{}\n")
    (tmp_path / "LICENSE").write_text("CC0")
    found = select(config, Skipped())
    written = json.loads(manifest.write(tmp_path / "answers", found).read_text())
    assert [one["used"] for one in written["sources"]] == [5, 5, 5]
    assert [one["unreadable"] for one in written["sources"]] == [0, 2, 0]
    for one in written["sources"]:
        assert one["read"] == one["used"] + sum(one["left_out"].values())
        (file,) = one["files"]
        assert file["sha256"] == hashlib.sha256(Path(file["file"]).read_bytes()).hexdigest()
        assert one["licence_file"] == str(tmp_path / "LICENSE")
    before = (tmp_path / "answers/sources.json").read_bytes()
    manifest.write(tmp_path / "answers", select(config, Skipped()))
    assert (tmp_path / "answers/sources.json").read_bytes() == before


def test_conversations_that_begin_alike_are_on_one_side() -> None:
    """Catches a log that has a dialogue once for each of its turns, of which one is held out and the others train."""
    draw = np.random.default_rng(1)
    hashes = draw.integers(0, 2**64, 400, dtype=np.uint64)
    openings = np.repeat(draw.integers(0, 2**64, 100, dtype=np.uint64), 4)
    known = Openings(hashes, openings)
    assert (known.of(hashes) == openings).all()
    answers = [Answer(str(i), [1], [(0, 1)], prompt_hash=f"{one:016x}") for i, one in enumerate(hashes.tolist())]
    learnt, out = ({int(openings[int(one.id)]) for one in part} for part in hold_out(answers, 25, known))
    assert len(out) == 6 and not learnt & out
    is_out = held_out(hashes, openings, 25)
    assert is_out.sum() == 24
    assert not set(openings[is_out]) & set(openings[~is_out])
    more = np.concatenate([hashes, draw.integers(0, 2**64, 40, dtype=np.uint64)])
    assert known.of(more)[-1] == more[-1], "an unknown prompt begins as itself"
    assert held_out(more, known.of(more), 25)[:400][is_out].mean() > 0.7
    # an opening has no answer in it
    system, first, second = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    whole = Conversation("a", [system, first, second, first])
    assert opening(whole) == opening(Conversation("b", [system, first])) == [system, first]
    assert opening(Conversation("c", [second, first])) == [second, first]


@pytest.mark.parametrize("regenerate", [True, False])
def test_hashes_of_prompts_are_known_without_their_texts(regenerate: bool, tmp_path: Path) -> None:
    """Catches answers that belong to no prompt of a run: hashes of the first reading that are not those of the second,
    where texts, ids, or both come twice, in two sources, with and without tools."""
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"id": "x", "prompt": "one"}, {"id": "x", "prompt": "one"}, {"id": "x", "prompt": "two"}, {"prompt": "same"},
        {"prompt": "same"}, {"prompt": "same"}, {"id": "y", "messages": dialogue}, {"messages": dialogue},
        {"messages": dialogue, "tools": [{"type": "function", "function": {"name": "f"}}]}, {"prompt": "날씨는?"},
    ]  # fmt: skip
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [{"path": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl")]
    config = Config(sources=both, regenerate=regenerate, count=17)
    found = select(config)
    asked = list(hash_conversations(found, config))
    assert len(asked) == 17 and len({one.prompt_hash for one in asked}) == 17
    assert sorted(found.prompt_hashes.tolist()) == sorted(int(one.prompt_hash, 16) for one in asked)
    beginning = dict(zip(found.prompt_hashes.tolist(), found.openings.tolist(), strict=True))
    assert all(beginning[int(one.prompt_hash, 16)] == content_key(opening(one.conversation)) for one in asked)


def with_held_out(tmp_path: Path, texts: list[str], **settings: Any) -> Config:
    write(tmp_path / "a.jsonl", [f"a{i}" for i in range(100)])
    write(tmp_path / "mine.jsonl", texts)
    return Config(conversations=str(tmp_path / "a.jsonl"), held_out=str(tmp_path / "mine.jsonl"), **settings)


def test_what_the_held_out_source_asks_never_trains(tmp_path: Path) -> None:
    """Catches a held-out prompt that also trains, and one that is lost to a duplicate, a count or an evaluation."""
    for settings in ({}, {"count": 7}, {"deduplicate": "exact"}, {"deduplicate": "near"}):
        config = with_held_out(tmp_path, ["x0", "a3", "x1"], **settings)
        found = select(config, evaluated=EvaluationPrompts({"t": [TaskPrompt("one", ("x0",))]}))
        texts, hashes = texts_of(found), found.held_out_hashes
        assert len(hashes) == 3
        assert {"x0", "a3", "x1"} <= set(texts)
        assert texts.count("a3") == 1
        assert len(texts) == settings.get("count", 99) + 3
        of_text = {one.messages[0]["content"]: int(one.prompt_hash(answered=False), 16) for one in found}
        assert {text for text in texts if of_text[text] in hashes} == {"x0", "a3", "x1"}


def test_held_out_prompts_have_a_count_of_their_own_and_must_exist(tmp_path: Path) -> None:
    """Catches a count that is shared with what trains, weights that count it, and a silent empty source."""
    config = with_held_out(tmp_path, [f"x{i}" for i in range(20)])
    few = config.model_copy(update={"held_out": Source(path=str(tmp_path / "mine.jsonl"), count=4)})
    assert len(select(few).held_out_hashes) == 4
    assert select(mixed(tmp_path, weights=(1, 1, 1))).held_out_hashes == frozenset()
    weighed = mixed(tmp_path, weights=(1, 1, 1)).model_copy(update={"held_out": few.held_out})
    assert [part.count for part in select(weighed).parts] == [10, 10, 10, 4]
    with pytest.raises(DataError, match=r"prepare\.held_out .*mine\.jsonl has no conversation"):
        select(with_held_out(tmp_path, []))


def test_the_librarys_held_out_prompts_are_not_those_of_an_evaluation() -> None:
    """Catches a training that is stopped, or a best checkpoint that is chosen, on the prompts it is measured with."""
    source = Source(path="stdlib:held_out", count=24)
    chosen = {name for name, _ in rows(source, skip_bad=False, skipped=Skipped(), seed=0)}
    drawn = {prompt.id for prompt in task_prompts("stdlib", 24, 0)}
    assert len(chosen) == len(drawn) == 24
    assert len(chosen & drawn) <= 4, "short modules have few pieces"


def test_the_instructions_are_ours_to_train_on_and_their_held_out_ones_are_others():
    """Catches a row without a text, one that is twice, and a held-out text, or most of it, that trains too."""
    texts = {}
    for split, count in (("train", 720 + 140), ("held_out", 72)):
        every = list(rows(Source(path=f"instructions:{split}", count=1000), False, Skipped(), 3))
        texts[split] = [" ".join(row["turns"]) for _, row in every]
        assert len(set(texts[split])) == count and all(text.strip() for text in texts[split])
        assert [row for _, row in rows(Source(path=f"instructions:{split}", count=9), False, Skipped(), 4)] != [
            row for _, row in every[:9]
        ]

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.lower().split()
        return {tuple(words[at : at + 6]) for at in range(len(words) - 5)}

    trained = set().union(*map(grams, texts["train"]))
    assert max(len(grams(text) & trained) for text in texts["held_out"]) <= 2
    with pytest.raises(DataError, match="use instructions:train or instructions:held_out"):
        list(rows(Source(path="instructions:test"), False, Skipped()))
