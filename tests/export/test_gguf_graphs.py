"""What llama.cpp computes with our files, by its graphs in torch: our own logits; and planted faults move them."""

from pathlib import Path
from typing import Any

import llama_graphs
import pytest
import torch
from gguf_targets import SETTINGS

from outrider.checkpoint import load_model
from outrider.nn.blocks import attending

pytest.importorskip("gguf")


def text_of(target: Any) -> torch.Tensor:
    return torch.tensor(target.tokenizer.encode("then the inner one read a line, and another"))


@torch.no_grad()
def ours_of_a_block(model: Any, target: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [K, V] and confidences [K] of the block after a text, whose last token is the anchor."""
    _, taps = target.read(text[None, :-1], model.taps)
    length = torch.tensor([[len(text) - 1]])
    _, logits, confidence = model(
        taps, torch.arange(len(text) - 1)[None], text[-1:], length[0], None, None, None
    )  # fmt: skip
    return logits[0], None if confidence is None else confidence[0]


@torch.no_grad()
def ours_of_pairs(model: Any, target: Any, text: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits [steps, V] of the tokens after a text, by the module's own steps."""
    hidden, taps = target.read(text[None, :-1], model.taps)
    features, tokens, rows = model.features(hidden[:, :, None] if taps is None else taps), text[1:], []
    for _ in range(steps):
        positions = torch.arange(len(tokens))[None]
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
        angle = model.cos_sin(positions)
        out = model.step(0, target.embed(tokens[None]), features, angle, attending(mask))
        rows.append(model.logits(out[:, -1])[0])
        features, tokens = torch.cat([features, out[:, -1:]], 1), torch.cat([tokens, rows[-1].argmax()[None]])
    return torch.stack(rows)


def worst(case: str, target: Any, checkpoint: Path, file: Path) -> float:
    """Largest difference between our logits or confidences and those of llama.cpp's graph over a file; infinite for
    others in number."""
    kind, model, read = SETTINGS[case][0], load_model(checkpoint, target), llama_graphs.File(file)
    text, pairs = text_of(target), []
    if kind == "eagle3":
        pairs.append((ours_of_pairs(model, target, text, 2), llama_graphs.eagle3(read, target.model, text)))
    elif kind == "mtp":
        pairs.append((ours_of_pairs(model, target, text, 1)[0], llama_graphs.mtp(read, text)))
    else:
        ours, confidence = ours_of_a_block(model, target, text)
        theirs, theirs_confidence = llama_graphs.block(read, target.model, text[:-1], int(text[-1]))
        pairs.append((ours, theirs))
        assert (confidence is None) == (theirs_confidence is None)
        pairs += [] if confidence is None else [(confidence, theirs_confidence)]
    if any(ours.shape != theirs.shape or not torch.equal(ours.isinf(), theirs.isinf()) for ours, theirs in pairs):
        return torch.inf
    return max(float((ours - theirs)[~ours.isinf()].abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("case", SETTINGS)
def test_llama_cpps_graph_gives_our_logits(case, bpe, made):
    """Catches what reads back well and computes otherwise: rows in transformers' order, taps one off, a token's map as
    offsets."""
    assert worst(case, bpe, made.checkpoint(case), made.file(case)) < 2e-4


@torch.no_grad()
def test_the_target_in_an_mtps_file_is_the_target(bpe, made):
    """Catches a layer norm under the name that another architecture gives it."""
    text = text_of(bpe)
    found = llama_graphs.states(llama_graphs.File(made.file("mtp")), text)
    assert torch.allclose(found, bpe.read(text[None], ())[0][0], atol=1e-4)
