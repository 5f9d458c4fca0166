"""The trie against plain searches of the texts: matches, order, memory and cost; test_native.py has its native twin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.retrieval.texts import History
from outrider.retrieval.trie import Trie

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=4)
ORDERS = ("recency", "frequency")


def longest_suffix(text: list[int], learnt: list[list[int]], depth: int) -> int:
    """Tokens of the text's end, at most `depth`, that stand somewhere in the learnt texts."""
    windows = {tuple(own[at : at + n]) for own in learnt for n in range(1, depth + 1) for at in range(len(own) - n + 1)}
    return max((n for n in range(1, min(depth, len(text)) + 1) if tuple(text[-n:]) in windows), default=0)


def checked(grown: Trie) -> None:
    """Every node's parts are there: its prefix, its suffix, its count no larger than theirs."""
    hung = {(): grown.nodes[()]}
    waiting = [grown.nodes[()]]
    while waiting:
        node = waiting.pop()
        for token, child in node.children.items():
            assert child.gram == (*node.gram, token)
            hung[child.gram] = child
            waiting.append(child)
    assert hung == grown.nodes
    assert len(hung) == len(grown) + 1
    for gram, node in hung.items():
        assert node.count <= hung[gram[1:]].count or len(gram) < 2
        assert node.updated < hung[gram[1:]].updated or len(gram) < 2
    clocks = [node.updated for node in grown.nodes.values()]
    assert clocks == sorted(clocks)


@given(texts=TEXTS, reader=st.lists(st.integers(0, 3), max_size=12), depth=st.integers(2, 5))
def test_a_cursor_finds_the_longest_suffix_that_was_learnt(texts, reader, depth):
    """Catches windows that are left out, a match that is not the longest, and a miss that is kept for good; by a search
    of all windows."""
    grown = Trie(depth, 10_000)
    waits = grown.cursor()
    waits.follow(reader)
    for n, text in enumerate(texts):
        writer = grown.cursor()
        writer.append(text)
        assert writer.match == min(depth, len(text))
        follower = grown.cursor()
        follower.follow(reader)
        assert waits.match == follower.match == longest_suffix(reader, texts[: n + 1], depth)


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=60), shortest=st.integers(1, 3))
def test_a_chain_begins_as_prompt_lookup_does(text, shortest):
    """Catches another order of preferences than the longest match, then the most recent; token by token and at once."""
    grown, slow = Trie(4, 10_000), Trie(4, 10_000)
    one = slow.cursor()
    for token in text:
        one.append([token])
    whole = grown.cursor()
    whole.append(text)
    history = History(shortest, 3)
    history.read(text)
    wanted = history.propose(text, 1).tokens
    assert whole.chain(1, shortest) == one.chain(1, shortest) == wanted
    assert whole.chain(9, shortest)[:1] == wanted


def test_a_cursor_whose_node_is_gone_notices():
    """Catches a node that is used after it was dropped, and a text that can't go on behind it."""
    grown = Trie(3, 12)  # far too small for both; the one that waits is compared with a fresh one
    waits, writes, fresh = (grown.cursor() for _ in range(3))
    waits.append([1, 2, 3])
    writes.append(range(10, 30))
    fresh.follow([1, 2, 3])
    assert (waits.match, waits.chain(3)) == (fresh.match, fresh.chain(3)) and not waits.match
    waits.append([1, 2, 3, 1, 2])
    assert waits.match == 3 and waits.chain(1) == [3]


@given(
    texts=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=20)), max_size=12),
    capacity=st.integers(8, 60), depth=st.integers(2, 4),
)  # fmt: skip
def test_memory_is_bounded_and_what_is_left_hangs_together(texts, capacity, depth):
    """Catches a trie that outgrows its capacity, and an n-gram that goes before a longer one that needs it."""
    grown = Trie(depth, capacity)
    cursors = [grown.cursor() for _ in range(3)]
    for which, tokens in texts:
        for token in tokens:
            cursors[which].append([token])
            assert len(grown) <= capacity
        checked(grown)


def test_what_is_seen_again_stays():
    """Catches eviction by age alone: a phrase in use outlives a flood of new text."""
    grown = Trie(3, 60)
    cursor, other = grown.cursor(), grown.cursor()
    for start in range(100, 2000, 5):
        cursor.append([1, 2, 3])
        other.append(range(start, start + 5))
    cursor.append([1, 2])
    assert cursor.chain(1, shortest=2) == [3]
    other.append([101, 102])
    assert other.chain(1) == []


@pytest.mark.parametrize("order", ORDERS)
@given(texts=TEXTS, levels=st.integers(1, 4), shortest=st.integers(1, 2))
def test_every_prefix_of_a_proposal_is_the_proposal_of_that_budget(order, texts, levels, shortest):
    """Catches an order that hangs on the budget, a parent behind its child, twins under one parent."""
    grown = Trie(4, 10_000)
    for text in texts:
        cursor = grown.cursor()
        cursor.append(text)
    tokens, parents, shares = whole = cursor.tree(order, 12, levels, shortest)
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens) <= 12
    depths: list[int] = []
    for n, parent in enumerate(parents):
        assert -1 <= parent < n
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths, default=0) <= levels
    for budget in range(len(tokens)):
        assert cursor.tree(order, budget, levels, shortest) == whole.first(budget)
    assert shares == sorted(shares, reverse=True) and all(0 < share < 1 for share in shares)
    assert len(shares) == (len(tokens) if order == "frequency" else 0)
    if tokens and order == "recency":
        assert tokens[0] == cursor.chain(1, shortest)[0]


def test_the_likeliest_paths_come_first():
    """Catches shares that are not multiplied along a path."""
    cursor = Trie(3, 1000).cursor()
    cursor.append([1, 2, 5, 9, 1, 2, 5, 9, 1, 2, 6, 9, 1, 3, 9, 1])
    tokens, parents, shares = cursor.tree("frequency", 5, 2)
    # [9, 1] was seen four times: 2 behind it has 2/5, 3 has 1/5; [1, 2] three times: 5 has 2/4 of 2/5 and 6 has 1/4 of
    # it; [1, 3] once: 9 has 1/2 of 1/5.  Of equals the later one comes first, and what [1] offers is there already.
    assert list(zip(tokens, parents, strict=True)) == [(2, -1), (3, -1), (5, 0), (9, 1), (6, 0)]
    assert shares == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.1])
    # nothing has followed [7, 1], so [1] says: 7 followed it as often as 3 did, and later
    cursor.append([7, 1])
    assert cursor.tree("frequency", 3, 1)[:2] == ([2, 7, 3], [-1, -1, -1])


def test_the_latest_continuations_of_a_short_match_stand_side_by_side():
    """Catches a breadth that is the same for every match and level."""
    cursor = Trie(4, 1000).cursor()
    cursor.append([7, 1, 5, 7, 2, 5, 7, 3, 6, 6, 7])
    tokens, parents, _ = cursor.tree("recency", 4, 2)
    assert tokens[:3] == [3, 2, 1] and parents[:3] == [-1, -1, -1]
    long = Trie(4, 1000).cursor()
    long.append([8, 9, 7, 1, 5, 8, 9, 7, 2, 5, 8, 9, 7])
    # three tokens match: one continuation, and one behind it, before the shorter matches have their turn
    tokens, parents, _ = long.tree("recency", 3, 2)
    assert (tokens, parents) == ([2, 5, 1], [-1, 0, -1])


def test_a_cleared_trie_forgets_and_its_cursors_go_on():
    """Catches a cursor that points into what was cleared."""
    grown = Trie(3, 1000)
    cursor = grown.cursor()
    cursor.append([1, 2, 3, 1, 2])
    assert cursor.chain(2) == [3, 1]
    grown.clear()
    assert (len(grown), cursor.match, cursor.chain(2)) == (0, 0, [])
    cursor.append([1, 2, 3, 1, 2])
    assert cursor.chain(2) == [3, 1]
