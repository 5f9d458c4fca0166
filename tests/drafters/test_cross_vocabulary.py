"""A small model of another vocabulary: exact for the target's distribution, true to the text."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import OnAndOff, TableTarget
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider import drafters
from outrider.decoding.state import Request
from outrider.errors import ConfigError, DrafterError
from outrider.generation import batch, generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.text.vocabulary import SharedVocabulary, Transcript, Vocabulary, _seam, continuation

MODULE = drafters.find("cross_vocabulary")
LINES = [
    "the road over the river is long, and the river is wide", "der Fluß ist breit und die Straße über den Fluß lang",
    "la forêt était déjà loin de la rivière", "道は長い。川は広い。", "def mean(values): return sum(values)",
    "a smile 🙂 and a river 🌊 and the road", "  two  spaces\n\tand a tab",
]  # fmt: skip
WAYS = pytest.mark.parametrize("vocabulary", ["intersection", "text"])


def byte_level(
    size: int, lines: list[str], ends: str | None = "<|end|>", alphabet: bool = True
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    specials = [ends] if ends else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=letters, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends)


def unigram(size: int, lines: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_fallback(size: int, lines: list[str]) -> PreTrainedTokenizerFast:
    """BPE over whole lines, spaces as `▁`, one before every text; letters that it does not know are bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size - 257, show_progress=False))
    parts = json.loads(tokenizer.to_str())
    vocabulary = {text: n + 257 for text, n in parts["model"]["vocab"].items()}
    vocabulary |= {"<s>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    merges = [tuple(pair) for pair in parts["model"]["merges"]]
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def letters_alone(order: list[int]) -> PreTrainedTokenizerFast:
    """64 letters without a merge; letter n has the id order[n]."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(48 + n): order[n] for n in range(64)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary(tokenizer, len(tokenizer), "a test's")


def loaded(folder, tokenizer, seed: int = 0, **sizes: object) -> TransformersTarget:
    """A tiny model with this tokenizer, by way of the disk."""
    if not (folder / "config.json").exists():
        tokenizer.save_pretrained(folder)
        tiny_model(seed, **({"vocab_size": len(tokenizer)} | sizes)).save_pretrained(folder)
    return load_target(folder, dtype="float64")


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> TransformersTarget:
    """A target of byte-level BPE."""
    return loaded(tmp_path_factory.mktemp("wide"), byte_level(320, LINES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, wide):
    """A small model with a unigram tokenizer, for `wide`."""
    path = tmp_path_factory.mktemp("narrow")
    loaded(path, unigram(110, LINES), seed=1, num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def made(folder, wide):
    """Drafters for `wide`; the small model is read from disk once."""
    model = load_target(folder, dtype="float64")

    def build(**settings: object) -> MODULE.CrossVocabulary:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.nn.language_model.load_target", lambda *args, **options: model)
            return MODULE.build(MODULE.Config(model=str(folder), min_overlap=0, **settings), wide)

    return build


def texts(target: TransformersTarget, count: int = 9) -> list[list[int]]:
    """Prompts that are cut anywhere, inside a character too."""
    generator = torch.Generator().manual_seed(3)
    found = [target.encode(line) for line in LINES]
    cuts = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [found[n % len(found)][:cut] for n, cut in enumerate(cuts)]


def test_byte_tokens_and_special_tokens_are_not_text():
    """Catches `<0x0A>` taken for six letters, and a special token that is drafted as if it were written."""
    tokenizer = unigram(110, LINES)
    tokenizer.add_tokens(["<0x0A>", AddedToken("  ", special=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.pieces[tokenizer.convert_tokens_to_ids("  ")] == b"  "
    assert vocabulary.pieces[tokenizer.convert_tokens_to_ids("<|user|>")] is None
    assert vocabulary.specials["<|user|>"] == tokenizer.convert_tokens_to_ids("<|user|>")
    plain = Tokenizer(models.BPE(vocab={"a": 0, "<0x0A>": 1, "▁": 2}, merges=[]))
    assert vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=plain)).pieces == [b"a", b"\n", b" "]


def test_what_has_no_twin_is_never_drawn():
    """Catches a mask that is the wrong way round; what is left is the distribution given that a token is in common."""
    own, target = vocabulary_of(unigram(110, LINES)), vocabulary_of(byte_level(320, LINES))
    shared = SharedVocabulary(own, target)
    assert shared.by_target[target.end] == own.end  # whatever their names
    logits = torch.randn(3, own.size, dtype=torch.float64)
    q, distribution = shared.spread(logits).softmax(-1), logits.softmax(-1)[:, shared.drafter_ids]
    assert torch.allclose(q[:, shared.target_ids], distribution / distribution.sum(-1, keepdim=True))
    assert int((q > 0).sum()) == 3 * shared.count
    assert torch.equal(shared.to_drafter(shared.target_ids), shared.drafter_ids)


SOURCE, READER = vocabulary_of(byte_level(320, LINES)), vocabulary_of(byte_level(300, LINES[:3]))


PARTS = st.one_of(st.integers(1, 319), st.sampled_from(LINES).map(lambda line: SOURCE.encode(line).ids))


@given(st.lists(PARTS, max_size=12), st.randoms())
def test_a_transcript_is_the_text(parts, random):
    """Catches letters lost or doubled at a seam, half characters, and stray bytes that are waited for without end."""
    tokens = [token for part in parts for token in (part if isinstance(part, list) else [part])]
    transcript, at = Transcript(SOURCE, READER), 0
    while at < len(tokens):
        count = random.randint(1, 4)
        transcript.push(tokens[at : at + count])
        at += count
        done = tokens[:at]
        whole = done[: len(done) - len(transcript.incomplete)]
        assert transcript.taken == len(done) and len(transcript.incomplete) <= 3
        assert transcript.text == b"".join(SOURCE.pieces[token] for token in whole).decode(errors="replace")
        assert b"".join(READER.pieces[token] for token in transcript.ids) == transcript.text.encode()


def test_a_seam_is_not_inside_a_character():
    """Catches a byte lost where one encoding's token holds a space and half a character, and the other's do not."""
    halves = [(0, 1), (1, 2), (1, 2), (2, 3)]
    joined = [(0, 2), (1, 2), (2, 3)]
    assert _seam(halves, 1, joined) == (3, 2)
    assert _seam([(0, 1), *joined[1:]], 1, [(0, 1), (1, 2), (1, 2), (2, 3)]) == (2, 3)
    assert _seam(halves, 1, halves[:1]) is None


def test_a_special_token_is_read_where_both_have_it():
    """Catches a marker spelt out in letters, which no model was trained on."""
    with_user = byte_level(300, LINES[:3])
    with_user.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    source, reader = vocabulary_of(with_user), vocabulary_of(unigram(110, LINES))
    ids = [source.specials["<|user|>"], *source.encode("the road").ids, source.end]
    both, one = Transcript(source, source), Transcript(source, reader)
    both.push(ids)
    one.push(ids)
    assert both.ids == ids
    assert one.text == "the road"


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=lambda make: make.__name__)
def test_a_continuation_begins_at_the_seam(make):
    """Catches tokens of the known text drafted again, merges over the seam."""
    target = vocabulary_of(make(500, LINES))
    pairs = [("the road ", "over the"), ("the ro", "ad over"), ("", "the"), ("der Fluß", " ist breit"), ("a\n", "\tb")]
    for before, said in pairs:
        ids = continuation(target, before, b"", said.encode())
        assert b"".join(target.pieces[token] for token in ids) == said.encode()
    # no token of either holds all of it
    umbrella = "☂".encode()
    ids = continuation(target, "an ", umbrella[:2], umbrella + b" and" + umbrella[:2])
    assert b"".join(target.pieces[token] for token in ids) == umbrella[2:] + b" and"
    assert continuation(target, "an ", umbrella[:2], b"xy") == []
    assert continuation(target, "an ", b"", umbrella[:2]) == []
    # a normaliser changes what was said, and with it where the new tokens begin
    reader = vocabulary_of(unigram(110, LINES))
    assert continuation(reader, "the road", b"", " ☂ is".encode()) == []
    assert continuation(reader, "the road", b"", b" is") != []


SMALL_TEXT = ["ab é ab ba a é b abé"]


@pytest.fixture(scope="module")
def table() -> TableTarget:
    """Eight tokens of byte-level BPE, halves of é among them."""
    tokenizer = byte_level(8, SMALL_TEXT, ends=None, alphabet=False)
    assert len(tokenizer) == 8
    target = TableTarget.random(8)
    target.tokenizer = tokenizer
    return target


@pytest.fixture(scope="module")
def beside(tmp_path_factory, table):
    """Drafters for the table."""
    path = tmp_path_factory.mktemp("beside")
    model = loaded(path, unigram(11, SMALL_TEXT), seed=10, num_hidden_layers=1)

    def build(vocabulary: str) -> MODULE.CrossVocabulary:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.nn.language_model.load_target", lambda *args, **options: model)
            return MODULE.build(MODULE.Config(model=str(path), vocabulary=vocabulary, length=3, min_overlap=0), table)

    return build


@pytest.mark.parametrize(
    ("vocabulary", "sampling"),
    [("text", {"temperature": 1.0}), ("intersection", {"temperature": 0.7, "top_k": 5, "top_p": 0.9})],
    ids=str,
)  # fmt: skip
def test_the_distribution_is_kept(vocabulary, sampling, table, beside):
    """Catches a q over the wrong tokens, a draft that hangs on the noise it is judged by, and a cut that is made before
    what has no twin is left out, in q alone.  False alarm 1e-6."""
    prompt = table.tokenizer.encode("ab é a")
    assert keeps_the_distribution(table, beside(vocabulary), prompt=prompt, slots=700, sampling=sampling)
    _, state, kept = emitted(table, beside(vocabulary), prompt=prompt, slots=100, sampling=sampling)
    assert kept > 30
    assert state.invalid == 0


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A target, and the same model with its letters in another order."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    target = loaded(tmp_path_factory.mktemp("ordered"), letters_alone(list(range(64))))
    path = tmp_path_factory.mktemp("shuffled")
    letters_alone(order).save_pretrained(path)
    model = tiny_model()
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[order] = weight.clone()
    model.save_pretrained(path)
    return target, path


@WAYS
def test_the_target_itself_in_other_ids_is_always_right(vocabulary, twin, prompts, monkeypatch):
    """Catches a map that is off anywhere, a cache that loses the text, tokens read twice."""
    (target, path), prompts = twin, prompts[:4]
    drafter = MODULE.build(MODULE.Config(model=str(path), vocabulary=vocabulary), target)
    assert drafter.overlap.tokens == 64 and drafter.overlap.mass == pytest.approx(1)
    read, prefill = [], drafter.model.prefill
    monkeypatch.setattr(drafter.model, "prefill", lambda *given: (read.extend(given[3]), prefill(*given))[1])
    for sampling in (Sampling(), Sampling(1.0, seed=0))[: 1 if vocabulary == "text" else 2]:
        read.clear()
        found = generate(target, prompts, drafter, max_new_tokens=20, slots=3, sampling=sampling)
        assert all(each.accepted == [4] * 4 for each in found)
        # nothing is read twice: of a step the last drafted token and the bonus, and the prompt's last token
        assert sum(read) <= sum(len(prompt) + 2 * 4 for prompt in prompts)


@pytest.mark.parametrize(("vocabulary", "room"), [("text", 24), ("intersection", 256)])
def test_the_small_models_cache_is_as_if_it_had_read_the_text(vocabulary, room, wide, made, monkeypatch):
    """Catches a draft in wrong ids, slots that are used again with another's text in them, an invalid q, and a cache
    that is not taken back to where two encodings part, also where only the end of the text fits."""
    drafter = made(vocabulary=vocabulary)
    monkeypatch.setattr(drafter.model, "spec", replace(drafter.model.spec, context=room))
    worst, lengths, read = [0.0], [0], MODULE.read_texts

    def watched(model, cache, rows, texts, most):
        logits = read(model, cache, rows, texts, most)
        for b, text in enumerate(texts):
            assert cache.lengths[rows[b]] == len(text)
            hidden, _ = drafter.model.read(torch.tensor([text]))
            worst.append(float((logits[b] - drafter.model.head(hidden[0, -1])).abs().max()))
            lengths.append(len(text))
        return logits

    monkeypatch.setattr(MODULE, "read_texts", watched)
    prompts, served = enumerate(texts(wide)[-4:]), []
    requests = [Request(prompt, 10 + 3 * n, Sampling(float(n % 2), seed=n)) for n, prompt in prompts]
    for crossing, policy in ((None, None), (drafter, None), (drafter, OnAndOff(4))):
        state = batch(wide, 3, ends=frozenset())
        served.append([[] for _ in requests])
        for progress in serve(wide, requests, crossing, state=state, policy=policy):
            served[-1][progress.request] += progress.tokens
        assert state.invalid == 0
    assert served[0] == served[1] == served[2]
    assert max(worst) < 1e-9
    assert max(lengths) <= room
    # the short one held less than some texts have
    assert (max(lengths) < 30) == (room < 30)


def test_the_end_of_a_text_is_drafted_as_text(wide, made):
    """Catches the small model's end token spelt out, dropped, or read on behind."""
    drafter = made(vocabulary="text")
    own, target = drafter.vocabulary, drafter.target
    transcript = Transcript(target, own)
    transcript.push(target.encode("the road").ids)
    river = own.encode("river").ids
    assert transcript.continued([own.end, *river]) == [target.end]
    found = transcript.continued([*river, own.end, *river])
    assert found[-1] == target.end
    assert b"".join(target.pieces[token] for token in found[:-1]) == b" river"
    transcript.push(target.encode("🙂").ids[:1])  # half a character: no end can follow
    assert transcript.incomplete and transcript.continued([own.end]) == []


def test_where_no_common_token_may_follow_nothing_is_drafted(wide, made):
    """Catches a distribution of nothing but impossible tokens, which is no distribution."""
    drafter = made(vocabulary="intersection")
    shared = set(drafter.shared.by_target)
    for banned in (shared, shared - {min(shared)}):
        state = batch(wide, 2, ends=frozenset())
        sampling = Sampling(1.0, bad_words=[(token,) for token in sorted(banned)])
        requests = [Request(prompt, 8, sampling) for prompt in texts(wide, 3)]
        reached = [each.reached for each in serve(wide, requests, drafter, slots=2, state=state)]
        assert state.invalid == 0
        assert (max(reached) == 0) == (banned == shared)


def test_what_cannot_be_is_refused_by_name(folder, wide, target):
    """Catches a missing tokenizer found in the middle of a text, and a draft that is longer than the context."""
    small_model = drafters.find("small_model")
    with pytest.raises(DrafterError, match="or draft with cross_vocabulary"):
        small_model.build(small_model.Config(model=str(folder)), wide)
    with pytest.raises(DrafterError, match="no tokenizer"):
        MODULE.build(MODULE.Config(model=str(folder), vocabulary="text"), target)
    with pytest.raises(ConfigError, match="leaves no room"):
        MODULE.build(MODULE.Config(model=str(folder), vocabulary="text", length=100000), wide)
    with pytest.raises(DrafterError, match="a slow tokenizer"):
        Vocabulary(SimpleNamespace(), 5, "old")
