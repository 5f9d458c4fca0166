"""LiLiCorr: its scores against their formula, its loss, its rows' context, and its folders."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import batch_of
from safetensors.torch import load_file
from tiny import randomise
from torch import nn

from outrider.checkpoint import load_model, save
from outrider.errors import ExportError
from outrider.export.formats import identify
from outrider.export.reading import imported
from outrider.export.writing import export_folder
from outrider.generation import generate
from outrider.lab.drafters import lilicorr
from outrider.lab.drafters.lilicorr.scorer import Scorer
from outrider.nn.drafting.lattice import Candidates
from outrider.nn.drafting.lattice_model import LatticeDrafter

OWN = {
    "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 3, "taps": (0, 2),
    "mask_token": 3, "candidates": 4, "scorer_hidden": 16, "scorer_heads": 2, "factor": 8,
}  # fmt: skip


def model_of(target, **choices) -> lilicorr.Model:
    torch.manual_seed(0)
    return randomise(lilicorr.Model(lilicorr.Config(**(OWN | choices)), target))  # type: ignore[return-value]


def test_scores_are_the_formula() -> None:
    """Catches neighbours or rows that change places, a bias of the wrong distance, logits that are added, and an anchor
    that is missing."""
    n, rows, k, size, hidden, heads = 2, 3, 4, 12, 8, 2
    scorer = randomise(Scorer(size, hidden, rows + 1, k, 2, heads, 1.5, 6, 3.0, 1e-6, 1e-6).double(), 0.5)
    noise = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=noise)
    words, log_q, states = draw(n, rows, k, size), draw(n, rows, k).log_softmax(-1), draw(n, rows, size)
    before = draw(n, size)
    before[1] = 0
    first, pairs = scorer(words, log_q, states, before)
    norm = lambda x, layer: F.rms_norm(x, (hidden,), layer.weight, 1e-6)
    for b in range(n):
        x = torch.zeros(rows * k, hidden, dtype=torch.float64)
        for row in range(rows):
            for own in range(k):
                q = log_q[b, row, own]
                gap = q - log_q[b, row].max()
                features = torch.stack([q, q.exp(), gap, torch.tensor(own / 3.0), torch.tensor(float(own == 0))])
                x[row * k + own] = (
                    scorer.token_proj(words[b, row, own]) + scorer.pass_hidden_proj(states[b, row])
                    + scorer.feature_mlp(features.double()) + scorer.slot_embedding[0, 0, row, 0]
                    + scorer.rank_embedding[0, 0, 0, own]
                )  # fmt: skip
        bias = torch.zeros(heads, rows * k, rows * k, dtype=torch.float64)
        for i in range(rows * k):
            for j in range(rows * k):
                away = i // k - j // k
                bias[:, i, j] = scorer.relative_slot_bias[:, away + rows + 1] + (away == 0) * scorer.same_slot_bias
        for layer in scorer.layers:
            library = nn.MultiheadAttention(hidden, heads, batch_first=True).double()
            library.load_state_dict(layer.attn.state_dict())
            own = norm(x, layer.attn_norm)[None]
            x = x + library(own, own, own, attn_mask=bias, need_weights=False)[0][0]
            x = x + layer.mlp(norm(x, layer.mlp_norm))
        x = norm(x, scorer.output_norm)
        anchor = norm(scorer.context_proj(before[b]) if b == 0 else torch.zeros(hidden).double(), scorer.anchor_norm)
        factors = F.silu(scorer.factor_input_proj(torch.cat([x, anchor.expand_as(x), x * anchor], -1)))
        unit = lambda v: v / v.norm(dim=-1, keepdim=True)
        out, into = unit(scorer.out_head(factors)), unit(scorer.in_head(factors))
        start = unit(scorer.anchor_out_head(anchor))
        for own in range(k):
            assert torch.allclose(first[b, own], 3 * start @ into[own])
            for row in range(rows - 1):
                for above in range(k):
                    score = 3 * out[row * k + above] @ into[(row + 1) * k + own]
                    assert torch.allclose(pairs[b, row, above, own], score)


def test_the_loss_ends_with_the_first_token_that_is_no_candidate(target) -> None:
    """Catches rows behind a lost prefix that train, and a penalty of what the target likes better."""
    model = model_of(target, ce=0.5, margin=0.25, penalty=2.0)
    scores = torch.tensor([[[1.0, 0.0, -1.0], [0.5, 0.2, 0.1], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    gold = torch.tensor([[[False, True, False], [False, False, False], [True, False, False]]])
    truth = torch.tensor([[[3.0, 2.0, 1.0]] * 3], dtype=torch.float64)
    loss = model.lattice_loss(scores, gold, truth)
    p = scores[0, 0].softmax(-1)
    expected = -0.5 * p[1].log() + 0.25 * (2 - (0.0 - 1.0)) + 2.0 * p[2] * (2.0 - 1.0)
    assert torch.allclose(loss[0], torch.stack([expected, torch.zeros(()).double(), torch.zeros(()).double()]))


def test_training_and_serving_score_with_the_same_context(target, prompts) -> None:
    """Catches the state of another token before the anchor, and one of another text."""
    model = model_of(target).double().eval()
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    batch = batch_of(target, model.taps, tokens)
    rows = model.predict(replace(batch, loss_mask=torch.ones_like(tokens, dtype=torch.bool)))
    for n, at in enumerate(rows.anchors_at.tolist()):
        text, anchor = divmod(at, tokens.shape[1])
        if anchor:
            end = torch.tensor([anchor])
            own = model.before(batch.taps[text, None, :anchor], torch.arange(anchor)[None], end)
            assert torch.allclose(rows.before[n], own[0])
        else:
            assert not rows.before[n].any()


def test_it_trains_its_scorer_and_its_backbone(target) -> None:
    """Catches candidates whose probabilities have no gradient, and a scorer that learns nothing."""
    model = model_of(target).train()
    batch = batch_of(target, model.taps, torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1)))
    rows = model.predict(batch)
    for draft, own, part in rows.chunks(64):
        rows.extra(part, draft, own)["lattice"].sum().backward()
    rows.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.lilicorr.parameters())
    assert any(weight.grad is not None for weight in model.backbone.parameters())


def test_a_walk_and_a_tree_write_the_targets_text(target, prompts) -> None:
    """Catches a tree that is no `LatticeDrafter`, and a draft of another state."""
    [plain] = generate(target, prompts[:1], max_new_tokens=16)
    for nodes in (0, 7):
        drafter = model_of(target, nodes=nodes).double().eval().drafter()
        assert isinstance(drafter, LatticeDrafter) == bool(nodes)
        [text] = generate(target, prompts[:1], drafter, max_new_tokens=16, policy="fixed")
        assert text.tokens == plain.tokens


def test_a_folder_reads_back_bit_for_bit(target, tmp_path) -> None:
    """Catches a lost key, a name that engines do not know, and convolutions that are dropped in silence."""
    save(tmp_path / "mine", model_of(target).to(getattr(torch, target.spec.dtype)))
    out = export_folder(tmp_path / "mine", "sglang", tmp_path / "out", target)
    before, config = load_model(tmp_path / "mine", target), json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LiLiCorrDraftModel"] and config["dflash_config"]["block_size"] == 4
    weights = load_file(out / "model.safetensors")
    assert {
        "lilicorr.layers.0.attn.in_proj_weight", "lilicorr.feature_mlp.3.bias", "lilicorr.relative_slot_bias",
        "lilicorr.token_proj.weight", "lilicorr.anchor_out_head.bias",
    } <= weights.keys()  # fmt: skip
    assert weights["lilicorr.slot_embedding"].shape == (1, 1, 3, 1, 16)
    assert weights["lilicorr.relative_slot_bias"].shape == (2, 2 * 4 - 1)
    (out / "outrider.json").unlink()
    assert identify(out) == ("sglang", "lilicorr")
    found = imported(out, target)
    old, new = before.state_dict(), found.state_dict()
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    for key in ("block", "candidates", "scorer_hidden", "scorer_heads", "scorer_ratio", "scale", "factor"):
        assert getattr(found.config, key) == getattr(before.config, key), key
    config["dflash_config"]["conv_kernel_size"] = 2
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="it has convolutions around its layers"):
        imported(out, target)


def test_scores_after_a_token_that_is_no_candidate_are_those_after_the_likeliest(target) -> None:
    """Catches a row of the lattice that is read by a token's id."""
    model = model_of(target).double()
    noise = torch.Generator().manual_seed(2)
    states = torch.randn(1, 3, target.spec.hidden, dtype=torch.float64, generator=noise)
    best = Candidates.of(model.logits(states), 4)
    previous = torch.tensor([[7, int(best.ids[0, 0, 2]), next(t for t in range(64) if t not in best.ids[0, 1])]])
    lattice = model.scored(states, previous[:, 0], best, None)
    scores = model.scored_after(states, previous, best, None)
    assert torch.equal(scores[:, 0], lattice.first)
    assert torch.equal(scores[:, 1], lattice.pairs[:, 0, 2]) and torch.equal(scores[:, 2], lattice.pairs[:, 1, 0])
