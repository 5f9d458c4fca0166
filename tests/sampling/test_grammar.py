"""Grammars, and the pruning of what can't be kept: by enumeration, through the loop, and with llguidance on the demo
target."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from contracts.chances import _drafts, difference, judged
from contracts.test_acceptance_rule_enumerated import SHAPES, drawn, random_distribution
from decoding.drafts import numbers

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError
from outrider.generation import generate, serve
from outrider.loading import load_drafter
from outrider.sampling.grammar import Grammar
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import Prefix, pruned
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target


class Turns:
    """What may follow hangs on every token so far, by their sum modulo 3: place to allowed tokens."""

    def __init__(self, allowed: list[list[int]], vocabulary: int):
        self.masks = [
            torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True) for ids in allowed
        ]

    def start(self) -> Place:
        return Place(self.masks)


class Place:
    def __init__(self, masks):
        self.masks, self.at = masks, 0

    def push(self, tokens):
        self.at += sum(tokens)

    def allowed(self, path):
        return self.masks[(self.at + sum(path)) % 3]


SMALL = Turns([[0, 1], [1, 2], [0, 2]], 3)
BANS = {"grammar": {"grammar": SMALL}, "bad words": {"bad_words": [[2], [1, 1]]}, "least": {"min_new_tokens": 2}}
ENDS = {"least": frozenset({1})}


@pytest.mark.parametrize(
    ("name", "how"), [("grammar", "mixed"), ("bad words", "without"), ("bad words", "replacement"), ("least", "top")]
)
def test_a_pruned_draft_keeps_the_distribution_exactly(name, how):
    """Catches a node dropped for its own value, and one that lost its parent or its q, with no chance of a false
    alarm."""
    free, prefix = random_distribution(0), Prefix(Sampling(1.0, **BANS[name]), [0], ENDS.get(name, ()))

    def distribution(path):
        p = free(path) * prefix.possible(path, 3)
        return p / p.sum() if p.sum() > 0 else free(path)

    def drafted(parents):
        for weight, tokens, rows in _drafts(drawn(parents, 0, how), len(parents)):
            q = None if how == "top" else torch.stack(rows)[None]
            draft = Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(parents)]), q)
            yield weight, pruned(draft, [(0, prefix)], None, 3).checked(1)

    for shape in (SHAPES["both"], SHAPES["long"]):
        assert difference(judged(drafted(shape), distribution), distribution) < 1e-12, (shape, how)


def test_what_stays_is_what_can_be_kept_and_the_first_drawn_token_that_cannot():
    """Catches a branch cut too long or too short: grammar of places, two end tokens, three slots of which one is
    free."""
    rules = Turns([[0, 1, 4], [1, 2], [0, 2]], 5)
    prefix = Prefix(Sampling(grammar=rules), [3], frozenset({4}))
    tokens = torch.tensor([[1, 3, 0, 2, 4, 1, 2, 9]]).expand(3, -1)
    parents = torch.tensor([[-1, -1, 0, 0, -1, 4, 1, -1]]).expand(3, -1)
    sizes = torch.tensor([8, 8, 7])
    confidence = torch.arange(8.0).expand(3, -1)
    draft = Draft(tokens, parents, sizes, confidence=confidence)
    # node 1 can't begin, so 6 goes with it; 2 can't follow 1; 5 follows an end; 7 has no such id, and is counted by the
    # distribution
    found = pruned(draft, [(0, prefix), (2, prefix)], None, 5)
    assert found.sizes.tolist() == [4, 8, 3]
    assert found.confidence[0, :4].tolist() == numbers(found)[0, :4].tolist() == [0, 3, 4, 7]
    assert found.tokens[0, :4].tolist() == [1, 2, 4, 9]
    assert found.parents[0, :4].tolist() == [-1, 0, -1, -1]
    assert torch.equal(found.tokens[1], tokens[1]) and torch.equal(found.parents[1], parents[1])
    assert found.tokens[2, :3].tolist() == [1, 2, 4]
    drawn_ones = replace(draft, q=torch.full((3, 8, 5), 0.2))
    found = pruned(drawn_ones, [(0, prefix)], None, 5)
    assert found.confidence[0, :6].tolist() == [0, 1, 2, 3, 4, 7]
    seeded = pruned(drawn_ones, [(0, prefix)], torch.tensor([True, False, False]), 5)
    assert seeded.sizes.tolist() == [4, 8, 7]


def test_a_drafter_sees_what_may_follow_its_own_tokens():
    """Catches a mask of another slot, or of the anchor alone."""
    state = DecodeState(2, 100, judge=SamplingJudge())
    state.admit(0, Request([1], 5, Sampling(grammar=SMALL)))
    state.admit(1, Request([1], 5, Sampling()))
    logits = torch.zeros(2, 3)
    assert (state.judge.masked(logits) == -torch.inf).nonzero().tolist() == [[0, 2]]
    drafted = [torch.tensor([1, 0]), torch.tensor([1, 0])]
    assert (state.judge.masked(logits, drafted[:1]) == -torch.inf).nonzero().tolist() == [[0, 0]]
    assert (state.judge.masked(logits, drafted) == -torch.inf).nonzero().tolist() == [[0, 1]]
    state.tokens[0].append(1)
    state.judge.prefixes[0][1].push([1])
    assert (state.judge.masked(logits) == -torch.inf).nonzero().tolist() == [[0, 0]]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"[a-z]{3}(, [a-z]{1,4}){2,4}\."
LARK = 'start: "[" word ("+" word)* "]"\nword: /[ab]{1,3}/\n'


def is_person(text: str) -> bool:
    found = json.loads(text)
    _, age, tags = found.values()
    return list(found) == ["name", "age", "tags"] and 0 <= age <= 120 and set(tags) <= {"red", "green"} and tags != []


@pytest.fixture(scope="module")
def demo():
    return load_target("demo")


@pytest.fixture(scope="module")
def requests(demo) -> list[Request]:
    """Grammars of every kind beside free slots, greedy and drawn."""
    made = []
    for text, sampling in [
        ("import json\n", Sampling(grammar=Grammar.json(PERSON))),
        ("import os\n", Sampling()),
        ("def read(path):\n", Sampling(1.0, seed=5, grammar=Grammar.json(PERSON))),
        ("# ", Sampling(grammar=Grammar.regex(PATTERN), repetition_penalty=1.1)),
        ("# ", Sampling(0.8, seed=2, grammar=Grammar.regex(PATTERN), top_k=50)),
        ("x = ", Sampling(0.7, seed=1)),
        ("x = ", Sampling(1.0, seed=8, grammar=Grammar.lark(LARK))),
    ]:
        if sampling.grammar is not None:
            sampling = replace(sampling, grammar=sampling.grammar.compiled(demo))
        made.append(Request(demo.encode(text), 40 if sampling.grammar else 16, sampling))
    return made


def served(target, requests, drafter=None, **options):
    """Tokens and the reason why they end, of each."""
    found, reasons = [[] for _ in requests], [None] * len(requests)
    for progress in serve(target, requests, drafter, **options):
        found[progress.request] += progress.tokens
        reasons[progress.request] = progress.finish_reason
    return found, reasons


def test_plain_output_fits_its_grammar(demo, requests):
    """Catches a text that ends too early, goes on, or leaves its grammar; and of drafted ones, which are the same, a
    mask of another node's prefix, a matcher that does not go back, and slots that disturb each other."""
    tokens, reasons = wanted = served(demo, requests, slots=1)
    texts = [demo.decode(each) for each in tokens]
    assert is_person(texts[0]) and is_person(texts[2])
    assert re.fullmatch(PATTERN, texts[3]) and re.fullmatch(PATTERN, texts[4])
    assert re.fullmatch(r"\[[ab]{1,3}(\+[ab]{1,3})*\]", texts[6])
    for n, request in enumerate(requests):
        if request.sampling.grammar is not None:
            assert reasons[n] == "stop" and tokens[n][-1] in demo.ends, n
    assert served(demo, requests, load_drafter("small_model", demo), slots=3) == wanted


def test_a_mask_is_what_it_is_by_hand(demo, monkeypatch):
    """Catches bits in another order, an end token in the wrong place, and a path that leaves traces in the next."""
    monkeypatch.setattr(demo, "ends", frozenset({0, 7}))
    ids = {text: demo.encode(text)[0] for text in "ab"}
    pieces = [demo.tokenizer.decode([n]) for n in range(demo.spec.vocabulary)]

    def by_hand(text: str) -> list[int]:
        fits = [n for n, piece in enumerate(pieces) if piece and set(piece) <= set("ab") and len(text + piece) <= 4]
        return sorted({*fits} - demo.ends | (demo.ends if 2 <= len(text) <= 4 else set()))

    grammar = Grammar.regex("[ab]{2,4}").compiled(demo)
    assert Grammar.regex("[ab]{2,4}").compiled(demo) is grammar
    automaton, other = grammar.start(), grammar.start()
    committed = ""
    for texts in (["", "a", "ab", "b", "bbb", "a", "bbba", ""], ["", "bab", "b", "ba", "aab"], ["", "b", "a"]):
        for text in texts:
            found = automaton.allowed(tuple(ids[letter] for letter in text)).nonzero().flatten().tolist()
            assert found == by_hand(committed + text), (committed, text)
        assert not automaton.allowed((ids["a"], demo.encode("c")[0], ids["a"])).any()
        automaton.push([ids["a"]])
        committed += "a"
    assert other.allowed(()).nonzero().flatten().tolist() == by_hand("")


def test_a_bad_grammar_is_refused_where_it_is_made():
    """Catches a mistake that shows only after the first weights are loaded."""
    for make, wrong in (
        (Grammar.json, {"type": "objekt"}), (Grammar.json, "{"), (Grammar.json, 3), (Grammar.regex, "(a"),
        (Grammar.json, {"contains": {}, "unevaluatedItems": 3}), (Grammar.lark, "start: missing"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"grammar|schema"):
            make(wrong)
    with pytest.raises(ConfigError, match="grammar"):
        Sampling(grammar={"type": "object"})


def test_a_target_that_knows_no_text_is_refused(target, monkeypatch):
    """Catches a grammar that is ignored, or an attribute error from within."""
    sampling = Sampling(grammar=Grammar.regex("a"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(target, [1], max_new_tokens=4, sampling=sampling)
    monkeypatch.setattr(target, "tokenizer", object(), raising=False)
    with pytest.raises(ConfigError, match="no end token"):
        generate(target, [1], max_new_tokens=4, sampling=sampling)
    monkeypatch.setattr(target, "ends", frozenset({1}))
    with pytest.raises(ConfigError, match="can't read the tokenizer"):
        generate(target, [1], max_new_tokens=4, sampling=sampling)
    with pytest.raises(ConfigError, match="compiled"):
        list(serve(target, [Request([1], 4, sampling)]))


def test_a_grammar_that_leaves_no_token_is_an_error(demo):
    """Catches token 0 where a complete text must not end yet."""
    sampling = Sampling(grammar=Grammar.regex("ab"), min_new_tokens=10)
    with pytest.raises(ConfigError, match="no token possible"):
        generate(demo, "x", max_new_tokens=12, sampling=sampling)
