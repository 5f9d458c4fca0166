"""A leak that was planted is found through prepare, training and a move; what kept no hashes is not known, never
clean."""

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tiny import folder, talker
from training.bench import TAPS, fit

from outrider import checkpoint, load_drafter
from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import ANSWERS, read_answers
from outrider.data.config import Config
from outrider.data.features.live import LiveFeatures
from outrider.data.overlap import hash_files
from outrider.data.overlap.contamination import OverlapReport, TextSource, check, sources_of
from outrider.data.sources.conversations import Conversation
from outrider.errors import ConfigError
from outrider.measure.tasks.names import Prompt
from outrider.retrieval.corpus import corpora
from outrider.targets.hf.transformers import TransformersTarget

__all__ = ["folder", "talker"]

LEAKED = "Three hens lay two eggs on each of four days; how many eggs lie in the nest when a fox has taken five?"
PLANTED = "three HENS lay two eggs\non each of four days:\n\nHow many eggs lie in the nest, when a fox has taken five"
PARAPHRASE = (
    "A fox steals five eggs from a nest to which three hens have added two apiece daily for four days. What is left?"
)
CLEAN = "A fox keeps nine dens in two woods, and badgers have moved into four of them; how many are still empty?"
KOREAN = "암탉 세 마리가 나흘 동안 날마다 알을 두 개씩 낳았고 여우가 다섯 개를 가져갔다면 둥지에는 몇 개가 남습니까?"
PROMPTS = [
    Prompt("leaked", (LEAKED,)),
    Prompt("clean", (CLEAN,)),
    Prompt("second turn", ("Hello.", LEAKED.upper())),
    Prompt("korean", (KOREAN.replace(" ", ""),), system=LEAKED),
    Prompt("short", ("Say: b!",)),
]
ASKED = {"quiz": PROMPTS}


def ids(found: OverlapReport) -> set[str]:
    return {name for _, name in found.overlapping}


def texts(*extra: str) -> list[Conversation]:
    said = ["say a", "say b", *extra]
    return [Conversation(f"p{i}", [{"role": "user", "content": text}]) for i, text in enumerate(said)]


def answered(
    target: TransformersTarget, folder: Path, asked: list[Conversation], held_out: Collection[int] = ()
) -> Path:
    config = Config(max_new_tokens=8, length=400, slots=2, temperature=1.0)
    prepare(target, target.tokenizer, asked, folder, config, held_out=held_out)
    return folder


def source_of(target: TransformersTarget, answers: Path) -> LiveFeatures:
    read = read_answers(answers / ANSWERS)
    return LiveFeatures(target, read, TAPS, batch=2, length=400, ngram_hashes=hash_files.named(answers))


@pytest.fixture(scope="module")
def answers(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared from prompts among which are two that are measured."""
    return answered(talker, tmp_path_factory.mktemp("answers"), texts(f"Please tell me. {PLANTED}", KOREAN))


@pytest.fixture(scope="module")
def trained(talker: TransformersTarget, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was moved away from where it was trained."""
    run = tmp_path_factory.mktemp("run")
    fit(run, talker, source=source_of(talker, answers), steps=4)
    return (run / "checkpoint").rename(run.parent / f"{run.name} elsewhere")


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / checkpoint.MANIFEST).read_text())


def test_a_planted_leak_is_found_in_a_moved_checkpoint(trained: Path, answers: Path) -> None:
    """Catches a leak in other letters that is lost on the way, or a system prompt taken for one."""
    amended = shutil.copytree(trained, trained.with_name("amended"))
    checkpoint.amend(amended, {}, {"calibration": {}})
    for source in (TextSource("drafter", trained), TextSource("answers", answers), TextSource("amended", amended)):
        found = check(ASKED, [source])
        assert ids(found) == {"leaked", "second turn", "korean", "short"}
        assert check({"quiz": PROMPTS * 2}, [source]).overlapping == found.overlapping
        assert set(found.overlapping.values()) == {(source.name,)}
        assert found.unknown == {} and found.checked == 5
        assert found.counts[source.name]["prompts"] == 4
        assert found.overlaps(ASKED) == {("quiz", prompt.id): prompt.id != "clean" for prompt in PROMPTS}
        assert found.line().startswith("4 of 5 sampled prompts overlap")
        assert "13 words" in found.rule
        assert ids(check({"quiz": [Prompt("reworded", (PARAPHRASE,))]}, [source])) == {"reworded"}


def test_held_out_prompts_are_not_what_was_trained_on(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches an evaluation that calls its prompts learnt because acceptance was measured on texts like them."""
    asked = texts(f"Please tell me. {PLANTED}", KOREAN)
    held_out = [int(asked[2].prompt_hash(answered=False), 16)]
    found = check(ASKED, [TextSource("answers", answered(talker, tmp_path / "some", asked, held_out))])
    assert ids(found) == {"korean", "short"}
    assert found.counts["answers"]["prompts"] == 2 and found.unknown == {}


def test_prompts_of_two_tasks_may_have_one_id(answers, tmp_path) -> None:
    """Catches a known prompt that marks those of other tasks, and prompts that nobody hashed passing for clean."""
    asked = {"quiz": [Prompt("1", (LEAKED,))], "poems": [Prompt("1", (CLEAN,))]}
    found = check(asked, [TextSource("answers", answers)])
    assert found.overlaps(asked) == {("quiz", "1"): True, ("poems", "1"): False}
    assert found.line().startswith("1 of 2 sampled prompts")
    copy = shutil.copytree(answers, tmp_path / "answers")
    facts = json.loads((copy / "answers.json").read_text())
    facts["ngram_hashes"]["unknown"] = 3
    (copy / "answers.json").write_text(json.dumps(facts))
    found = check(ASKED, [TextSource("answers", copy)])
    assert "3 of its prompts" in found.unknown["answers"] and "leaked" in ids(found)


def test_a_swapped_file_is_not_known(trained: Path, talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches another training's hashes, or none, speaking for this one: all prompts would be clean."""
    clean = answered(talker, tmp_path / "clean", texts("nothing of that"))
    copy = shutil.copytree(trained, tmp_path / "copy")
    shutil.copyfile(clean / "prompts.grams", copy / checkpoint.NGRAM_HASHES)
    found = check(ASKED, [TextSource("drafter", copy)])
    assert "does not match its manifest" in found.unknown["drafter"]
    assert (found.overlapping, found.checked, found.overlaps(ASKED)) == ({}, 0, {})
    (copy / checkpoint.NGRAM_HASHES).unlink()
    assert "missing" in check(ASKED, [TextSource("drafter", copy)]).unknown["drafter"]
    assert load_drafter(copy, talker)


@pytest.mark.parametrize(
    "training", [{}, {"ngram_hashes": []}, {"ngram_hashes": [None]}, {"ngram_hashes": "damaged"}, None]
)
def test_an_old_checkpoint_is_not_known_rather_than_clean(training, trained, talker, tmp_path) -> None:
    """Catches a checkpoint of before, or a damaged one, that passes for clean, or that does not load any more."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / checkpoint.NGRAM_HASHES).unlink()
    (copy / checkpoint.MANIFEST).write_text(json.dumps(manifest(copy) | {"training": training}))
    found = check(ASKED, [TextSource("drafter", copy)])
    assert "no hashes" in found.unknown["drafter"]
    assert (found.checked, found.overlaps(ASKED)) == (0, {})
    assert "unknown" in found.line()
    assert load_drafter(copy, talker)


def test_hashes_of_an_earlier_format_are_unknown(answers: Path, tmp_path: Path) -> None:
    """Catches hashes by the former rule, which say nothing of sentences and content words, answering for this one."""
    copy = shutil.copytree(answers, tmp_path / "answers")
    facts = json.loads((copy / "answers.json").read_text())
    facts["ngram_hashes"]["format"] = 1
    (copy / "answers.json").write_text(json.dumps(facts))
    found = check(ASKED, [TextSource("answers", copy)])
    assert "has format 1, but this Outrider reads 2; run `outrider prepare` again" in found.unknown["answers"]
    assert (found.checked, found.overlaps(ASKED)) == (0, {})


class Stop(Exception):
    """Stands for any crash."""


def stopped(target: TransformersTarget, run: Path, source: Any) -> None:
    def crash(step: int, _: Any) -> None:
        if step == 3:
            raise Stop

    with pytest.raises(Stop):
        fit(run, target, source=source, steps=4, on_step=crash)


def test_texts_of_before_a_stop_are_not_forgotten(talker: TransformersTarget, answers: Path, tmp_path: Path) -> None:
    """Catches a resumed training that names the texts of its second half alone."""
    stopped(talker, tmp_path / "run", source_of(talker, answers))
    other = answered(talker, tmp_path / "other", texts(CLEAN))
    fit(tmp_path / "run", talker, source=source_of(talker, other), steps=4)
    place = tmp_path / "run" / "checkpoint"
    assert sorted(path.name for path in place.glob("*.grams")) == ["training.2.grams", "training.grams"]
    found = check(ASKED, [TextSource("drafter", place)])
    assert ids(found) == {prompt.id for prompt in PROMPTS} and found.unknown == {}


@pytest.mark.parametrize("first", ["known", "old"])
def test_training_in_part_on_unknown_texts_is_not_known(first, talker, answers, tmp_path) -> None:
    """Catches half a training whose texts kept no hashes, or that began before hashes were kept, passing for clean."""
    known = source_of(talker, answers)
    unknown = LiveFeatures(talker, known.texts, TAPS, batch=2, length=400)
    place = tmp_path / "checkpoint"
    stopped(talker, tmp_path, known)
    if first == "old":
        old = manifest(place)
        del old["training"]["ngram_hashes"]
        (place / checkpoint.MANIFEST).write_text(json.dumps(old))
    fit(tmp_path, talker, source=unknown if first == "known" else known, steps=4)
    found = check(ASKED, [TextSource("drafter", place)])
    assert "leaked" in ids(found) and "drafter" in found.unknown
    assert set(found.overlaps(ASKED).values()) == {True}, "what was not found may stand in the unknown texts"


@pytest.mark.parametrize(("at", "said"), [(0, "missing"), (3, None)])
def test_training_outlives_its_hashes(at, said, talker, answers, tmp_path) -> None:
    """Catches hours of training lost because a file was deleted beside it, and a later save that looks for it again."""
    copy = shutil.copytree(answers, tmp_path / "answers", copy_function=shutil.copy2)

    def delete(step: int, _: Any = None) -> None:
        if step == at:
            shutil.rmtree(copy)

    source = source_of(talker, copy)
    delete(0)
    fit(tmp_path / "run", talker, source=source, steps=4, on_step=delete)
    unknown = check(ASKED, [TextSource("drafter", tmp_path / "run" / "checkpoint")]).unknown
    assert said in unknown["drafter"] if said else unknown == {}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of two texts, one with a leak in its middle, without hashes yet."""
    from outrider.retrieval.corpus.build import build

    monkeypatch.setenv("OUTRIDER_CORPORA", str(tmp_path / "corpora"))
    build(tmp_path / "corpora" / "mine", [[4, 5, 6, 7], [4, 5, 8]], vocabulary=100)
    return tmp_path / "corpora" / "mine"


def collected() -> hash_files.Collector:
    documents = hash_files.Collector("documents")
    documents.add("documents", [f"# Notes\n\nOn Monday they asked this. {PLANTED} I did not know."])
    documents.add("documents", ["say b"])
    return documents


def test_a_corpus_tells_what_it_holds(corpus: Path) -> None:
    """Catches hashes beside a corpus that its header does not seal, or that stop it from opening."""
    from outrider.retrieval.corpus.build import build
    from outrider.retrieval.corpus.files import verify
    from outrider.retrieval.corpus.suffix_array import Corpus

    source = sources_of({"kind": "suffix", "corpora": ["mine"]})
    assert source == [TextSource("corpus mine", corpus)]
    assert "corpus mine" in check(ASKED, source).unknown
    corpora.keep_hashes(corpus, collected().save)
    found = check(ASKED, source)
    assert ids(found) == {"leaked", "second turn", "short"} and found.unknown == {}
    assert found.counts == {"corpus mine": {"documents": 3}}
    verify(corpus)
    assert Corpus.open(corpus).longest([4, 5]).length == 2
    assert corpora.names() == ["mine"]
    build(corpus, [[1, 2, 3]], vocabulary=100)
    assert "corpus mine" in check(ASKED, source).unknown, "the hashes were those of other texts"


def test_a_drafter_of_parts_is_asked_part_by_part(corpus: Path, trained: Path) -> None:
    """Catches a corpus or a checkpoint inside mix or graft that nobody asks, or that is asked twice."""
    inner = {"kind": "graft", "base": str(trained), "retriever": {"kind": "suffix", "corpora": ["mine"]}}
    parts = [inner["retriever"], {"kind": "ngram"}, {"kind": "small_model", "model": "org/other"}]
    assert sources_of(inner) == [TextSource("corpus mine", corpus), TextSource(str(trained), trained)][::-1]
    assert [source.name for source in sources_of({"kind": "mix", "members": parts})] == ["corpus mine", "org/other"]
    assert sources_of("ngram") == sources_of({"kind": "suffix"}) == []
    assert sources_of(str(trained)) == [TextSource(str(trained), trained)]
    assert "does not exist" in check(ASKED, sources_of("org/drafter")).unknown["org/drafter"]
    with pytest.raises(ConfigError):
        sources_of({"kind": "sufix"})
    nothing = check(ASKED, [])
    assert (nothing.overlapping, nothing.checked, nothing.unknown, nothing.overlaps(ASKED)) == ({}, 0, {}, {})
