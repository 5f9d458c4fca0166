"""DFlash 2: begun as DFlash; convolutions, windows and pairs against their formulas; trees, figures."""

from dataclasses import replace

import pytest
import torch
from conftest import Case, batch_of, tiny_model
from contracts.chances import keeps_the_distribution
from contracts.parties import TableTarget
from pydantic import ValidationError
from tiny import randomise

from outrider.checkpoint import load_model, manifest_of, save
from outrider.decoding.draft import Draft
from outrider.drafters import dflash, dflash2
from outrider.drafters.dflash2.convolution import DynamicConvolution
from outrider.drafters.dflash2.selector import PairSelector
from outrider.errors import ConfigError, DrafterError
from outrider.fast.block import seen
from outrider.generation import generate
from outrider.loading import load_drafter
from outrider.nn.blocks import block_mask
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting.lattice import Candidates
from outrider.nn.drafting.lattice_model import LatticeDrafter
from outrider.runs.stages import _settle
from outrider.sampling.settings import Sampling
from outrider.targets.cache.attention_mask import PassLayout
from outrider.targets.load import load_target

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "rank": 8}
OWN = {**SIZES, "candidates": 3, "conv_group": 4}


def model_of(target, **choices) -> dflash2.Model:
    torch.manual_seed(0)
    model = dflash2.Model(dflash2.Config(**(OWN | choices)), target)
    return randomise(model.to(target.device, torch.float64)).eval()  # type: ignore[return-value]


def test_before_training_it_is_a_dflash(target, prompts) -> None:
    """Catches convolutions or pairs that are not begun as none."""
    torch.manual_seed(0)
    new = dflash2.Model(dflash2.Config(**OWN), target).double().eval()
    sizes = {key: value for key, value in SIZES.items() if key != "rank"}
    plain = dflash.Model(dflash.Config(**sizes, anchor_predicts=False), target).double().eval()
    plain.load_state_dict(
        {name: weight for name, weight in new.state_dict().items() if "_conv." not in name and "selector" not in name}
    )
    batch = batch_of(target, new.taps, torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1)))
    found = []
    for model in (new, plain):
        torch.manual_seed(3)
        states = model.predict(batch).states
        found.append(
            (states, model.decode(states.unflatten(0, (-1, 4)), batch.tokens[0, :1].expand(len(states) // 4), None)[0])
        )
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


# ── convolutions and windows ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_a_convolution_is_its_formula_and_nothing_crosses_a_block(taps) -> None:
    """Catches taps before the block, or the anchor's row left out of the first mask's; coefficients of the output in
    place of the input's; the sides or taps of the kernel in another order."""
    hidden, group, width = 8, 4, 3
    convolution = randomise(DynamicConvolution(hidden, taps, group, width).double(), 0.5)
    x = torch.randn(2, 2 * width, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    added = convolution.kernel_projection(x).view(2, 2 * width, 2, taps, hidden // group)

    def by_hand(rows: torch.Tensor, side: int) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for t in range(2 * width):
            for tap in range(taps):
                if t % width - tap >= 0:
                    for c in range(hidden):
                        kernel = convolution.base_kernel[side, tap, c] + added[:, t, side, tap, c // group]
                        out[:, t, c] += kernel * rows[:, t - tap, c]
        return out

    sublayer = torch.tanh
    assert torch.allclose(convolution(x, sublayer), by_hand(sublayer(by_hand(x, 0)), 1), atol=1e-12)


def test_a_group_must_divide_the_hidden_size() -> None:
    with pytest.raises(DrafterError, match="conv_group 16 does not divide the hidden size of 40"):
        DynamicConvolution(40, 2, 16, 4)


def test_a_window_reaches_back_from_each_slot_and_not_into_its_block() -> None:
    """Catches a window that is one off, or counted from the anchor or a padded column, in training and serving."""
    window, width, length = 5, 3, 12
    documents, anchors = torch.ones(1, length, dtype=torch.int64), torch.tensor([[2, 9]])
    mask = block_mask(anchors, length, width, documents, torch.tensor([[True, True]]), window)[0, 0]
    for block, anchor in enumerate([2, 9]):
        for slot in range(width):
            row = mask[block * width + slot]
            expected = [c for c in range(anchor) if anchor + slot - c < window]
            assert row[:length].nonzero()[:, 0].tolist() == expected
            assert row[length:].nonzero()[:, 0].tolist() == [block * width + j for j in range(width)]
    new, starts, counts = 4, torch.tensor([7, 2]), torch.tensor([2, 4])
    columns = torch.arange(7 + new + width)
    served = seen(PassLayout(starts, columns, new + width), new, counts, width, window)
    for b, (start, count) in enumerate(zip([7, 2], [2, 4], strict=True)):
        for slot in range(width):
            context = [c for c in range(start + count) if start + count + slot - c < window]
            assert served[b, slot].nonzero()[:, 0].tolist() == [*context, *range(start + new, start + new + width)]


def test_a_window_that_is_wider_than_the_text_changes_nothing(target, prompts) -> None:
    """Catches a window that is not the same in a plain pass with and without a mask."""
    texts = [
        [g.steps for g in generate(target, prompts[:3], model_of(target, window=window).drafter(), max_new_tokens=12)]
        for window in (None, 200)
    ]
    assert texts[0] == texts[1]


# ── pairs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_are_the_formula_and_training_scores_what_serving_does() -> None:
    """Catches a predecessor that is a row off, states of the row before, and codebooks that change places."""
    noise = torch.Generator().manual_seed(0)
    selector = randomise(PairSelector(9, 6, 4).double(), 0.5)
    states, logits = (
        torch.randn(2, 3, 6, dtype=torch.float64, generator=noise),
        torch.randn(2, 3, 9, dtype=torch.float64, generator=noise),
    )
    anchors, best = torch.tensor([5, 2]), Candidates.of(logits, 3)
    lattice = selector.lattice(states, anchors, best)
    for b in range(2):
        for row in range(3):
            projected = selector.hidden_projection.weight @ states[b, row]
            for own in range(3):
                token = best.ids[b, row, own]
                for above in range(3 if row else 1):
                    before = best.ids[b, row - 1, above] if row else anchors[b]
                    pair = selector.predecessor_codebook[before] * projected * selector.successor_codebook[token]
                    score = lattice.pairs[b, row - 1, above, own] if row else lattice.first[b, own]
                    assert torch.allclose(score, best.logits[b, row, own] + pair.sum())
    previous = torch.stack([anchors, best.ids[:, 0, 1], best.ids[:, 1, 2]], 1)
    taught = selector.taught(states, previous, best)
    assert torch.allclose(taught[:, 0], lattice.first)
    assert torch.allclose(taught[:, 1], lattice.pairs[:, 0, 1]) and torch.allclose(taught[:, 2], lattice.pairs[:, 1, 2])
    selector.share.zero_()
    assert torch.equal(selector.lattice(states, anchors, best).first, best.logits[:, 0])


def test_each_token_is_drawn_from_the_scores_after_the_one_drawn_before(target) -> None:
    """Catches draws from each row's own distribution, which are exact and accepted less."""
    model, noise = model_of(target, vocabulary=40), torch.Generator().manual_seed(4)
    model.begin(torch.arange(64))
    states, anchors = torch.randn(3, 4, 32, dtype=torch.float64, generator=noise), torch.tensor([3, 60, 9])
    asked = []

    def pick(logits: torch.Tensor, row: int) -> torch.Tensor:
        asked.append(logits)
        return model.named(torch.multinomial(logits.softmax(-1), 1, generator=noise)[:, 0])

    tokens, _, confidence = model.decode(states, anchors, pick)
    lattice = model.lattice(states, anchors)
    at = torch.zeros(3, 1, dtype=torch.int64)
    for row, logits in enumerate(asked):
        scores = lattice.after(row, at)[:, 0]
        assert torch.equal(model.whole(logits), lattices.spread(scores, lattice.ids[:, row], 64))
        assert torch.allclose(confidence[:, row], lattices.confidence(scores, lattice.rest[:, row]))
        at = (lattice.ids[:, row] == tokens[:, row, None]).long().argmax(-1, keepdim=True)


def test_the_loss_of_pairs_leaves_the_backbone_as_it_is_unless_asked(target) -> None:
    """Catches a stop-gradient that stops nothing, one that stops the selector, and a start that is not waited for."""
    batch = batch_of(target, (1,), torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1)))
    for choices, reaches, trains in (
        ({}, False, True),
        ({"selector_gradient": True}, True, True),
        ({"selector_start": 0.5}, False, False),
    ):
        model = model_of(target, taps=(1,), **choices).train()
        model.progress = 0.25
        rows = model.predict(batch)
        for draft, own, part in rows.chunks(64):
            loss = rows.extra(part, draft.detach() if not reaches else draft, own)["selector"].sum()
            if loss.requires_grad:
                loss.backward()
        rows.backward()
        assert (model.candidate_selector.successor_codebook.grad is not None) == trains
        assert any(weight.grad is not None for weight in model.backbone.parameters()) == reaches


def test_the_loss_of_pairs_is_the_divergence_over_candidates_and_the_rest() -> None:
    """Catches a rest that is left out, and 0 times minus infinity."""
    logits = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    best = Candidates.of(logits, 4)
    p = torch.tensor([[0.1, 0.0, 0.5, 0.2], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    q = logits.softmax(-1).gather(-1, best.ids)
    found = dflash2.selector_loss(best.logits, best.rest, p)
    by_hand = []
    for own, theirs in zip(p.tolist(), q.tolist(), strict=True):
        pairs = [*zip(own, theirs, strict=True), (1 - sum(own), 1 - sum(theirs))]
        by_hand.append(sum(a * torch.tensor(a / b).log().item() for a, b in pairs if a > 1e-12))
    assert torch.allclose(found, torch.tensor(by_hand, dtype=torch.float64))
    assert dflash2.hits(torch.tensor([3, 9]), torch.tensor([[3, 1], [2, 4]])).tolist() == [[1, 0], [0, 0]]


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_are_what_verifying_the_text_would_accept(target) -> None:
    """Catches the metric trap: what the rows' own choices are worth, reported as the draft's; and rows that count
    behind the first at which the text is not what the target would write."""
    model = model_of(target)
    text = torch.randint(64, (3, 5), generator=torch.Generator().manual_seed(1))
    out = target.model.generate(text, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    out[1, 15] = (out[1, 15] + 1) % 64  # from here on the text is another's
    batch = batch_of(target, model.taps, out)
    mask = torch.zeros_like(out, dtype=torch.bool)
    mask[:, 5:] = True
    rows = model.predict(replace(batch, loss_mask=mask))
    sums: dict[str, list[float]] = {}
    for draft, own, part in rows.chunks(8):
        for name, values in rows.figures(part, draft, own).items():
            sums.setdefault(name, []).extend(values.double().tolist())
    states = rows.states.unflatten(0, (-1, 4))
    anchors = rows.previous.view(-1, 4)[:, 0]
    expected: dict[str, list[float]] = {name: [] for name in sums}
    walked, logits, _ = model.decode(states, anchors, None)
    target_logits = torch.cat([own for _, own, _ in rows.chunks(10**9)]).argmax(-1).view(-1, 4)
    labels, weight = rows.labels.view(-1, 4), rows.weight.view(-1, 4)
    for b in range(len(states)):
        live = [bool(weight[b, k] > 0) and bool((labels[b, :k] == target_logits[b, :k]).all()) for k in range(4)]
        if not live[0]:
            continue
        best = logits[b].topk(3, -1).indices
        right = {
            "walk": [bool(walked[b, k] == target_logits[b, k]) for k in range(4)],
            "unary": [bool(best[k, 0] == target_logits[b, k]) for k in range(4)],
            "oracle": [bool((best[k] == target_logits[b, k]).any()) for k in range(4)],
        }
        for name, hits in right.items():
            count = next((k for k in range(4) if not (hits[k] and live[k])), 4)
            expected[f"tokens_{name}"].append(1 + count)
        expected["recall"] += [float(right["oracle"][k]) for k in range(4) if live[k]]
    for name in ("tokens_walk", "tokens_unary", "tokens_oracle", "recall"):
        assert sorted(sums[name]) == sorted(expected[name]), name
    assert len(sums["selector_accuracy"]) == len(sums["recall"])
    held_out = {"tokens_walk": 2.0, "tokens_unary": 2.0}
    assert float(model.settled(held_out)["candidate_selector.share"]) == 0.0
    assert float(model.settled(held_out | {"tokens_walk": 2.1})["candidate_selector.share"]) == 1.0


# ── trees ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tree_keeps_the_distribution(workshop) -> None:
    """Catches a drawn tree whose q is another's than was drawn from.  False alarm 1e-6."""
    table = TableTarget.random(5)
    drafter = workshop.build(Case("dflash2", {"nodes": 6}), table)
    assert isinstance(drafter, LatticeDrafter)
    assert keeps_the_distribution(table, drafter, slots=700, prompt=[0, 3])
    sampling = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}
    assert keeps_the_distribution(table, drafter, slots=700, prompt=[0, 3], sampling=sampling)


def test_a_tree_is_the_best_first_one_of_the_pass_and_the_chain_its_walk(target, prompts, monkeypatch) -> None:
    """Catches a tree of another state's lattice, and one of more nodes than were asked for."""
    model = model_of(target, nodes=9)
    drafter, seen_drafts = model.drafter(), []
    lattice_of, propose = drafter.lattice, drafter.propose
    held = []
    monkeypatch.setattr(drafter, "lattice", lambda inputs: held.append(lattice_of(inputs)) or held[-1])

    def watched(memory, state, budget):
        seen_drafts.append(propose(memory, state, budget))
        return seen_drafts[-1]

    monkeypatch.setattr(drafter, "propose", watched)
    [text] = generate(target, prompts[:1], drafter, max_new_tokens=20, policy="fixed")
    for lattice, draft in zip(held, seen_drafts, strict=True):
        tokens, parents = lattices.best_first(lattice, draft.tokens.shape[1])
        assert torch.equal(draft.tokens, tokens) and torch.equal(draft.parents, parents)
        assert isinstance(draft, Draft) and draft.q is None
    [plain] = generate(target, prompts[:1], max_new_tokens=20)
    assert text.tokens == plain.tokens
    assert max(draft.depth for draft in seen_drafts) > 1 and len(held) > 2


def test_bans_reach_a_trees_nodes(target, prompts) -> None:
    """Catches a tree of candidates that a request forbids, which would end every draft."""
    drafter, banned = model_of(target, nodes=9).drafter(), [(token,) for token in range(0, 64, 2)]
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 12, "sampling": Sampling(temperature, bad_words=tuple(banned), seed=3)}
        [text] = generate(target, prompts[:1], drafter, **options)
        [plain] = generate(target, prompts[:1], **options)
        assert text.tokens == plain.tokens and all(token % 2 for token in text.tokens)


def test_a_trained_one_is_loaded_with_a_tree_or_a_shorter_block(target, prompts, tmp_path) -> None:
    """Catches settings that a folder ignores, weights that do not come along, and a block that was never trained."""
    save(tmp_path / "mine", model_of(target))
    whole = load_drafter(tmp_path / "mine", target).model.state_dict()
    tree, shorter = load_drafter(tmp_path / "mine", target, nodes=9), load_drafter(tmp_path / "mine", target, block=2)
    assert (tree.limit, shorter.limit) == (9, 2)
    for drafter in (tree, shorter):
        own = drafter.model.state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in whole.items())
        [text] = generate(target, prompts[:1], drafter, max_new_tokens=16, policy="fixed")
        [plain] = generate(target, prompts[:1], max_new_tokens=16)
        assert text.tokens == plain.tokens
    with pytest.raises(ConfigError, match="block 5 is more than the 4 that .* was trained for"):
        load_drafter(tmp_path / "mine", target, block=5)
    with pytest.raises(ConfigError, match="leave out rank; nodes and block can be set"):
        load_drafter(tmp_path / "mine", target, rank=4, nodes=3)


def test_a_checkpoint_says_whether_its_pairs_help(target, tmp_path) -> None:
    """Catches a selector that drafts although held-out answers showed that it harms, and one settled twice."""
    for walk, share in ((1.9, 0.0), (2.1, 1.0)):
        place = tmp_path / str(walk)
        save(place, model_of(target), {"step": 7, "seconds": 0.0, "tokens": 1, "config": {}, "ngram_hashes": []})
        metrics = [
            {"step": 3, "held_out": {"tokens_walk": 9.0, "tokens_unary": 1.0}},
            {"step": 7, "held_out": {"tokens_walk": walk, "tokens_unary": 2.0}},
        ]
        for _ in range(2):
            _settle(place, model_of(target), metrics)
        assert manifest_of(place)["held_out"]["tokens_walk"] == walk
        assert float(load_model(place, target).candidate_selector.share) == share


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_settings_that_do_not_fit_are_refused() -> None:
    """Catches siblings that would be left out in silence, and a window that a block does not fit into."""
    with pytest.raises(ValidationError, match="set nodes for a tree from the pairs"):
        dflash2.Config(siblings=(1,))
    with pytest.raises(ValidationError, match="window 7 must be above block 7"):
        dflash2.Config(window=7)
    with pytest.raises(DrafterError, match="candidates must be at most the 64 tokens"):
        dflash2.Model(dflash2.Config(**(OWN | {"candidates": 65})), load_target(tiny_model()))
