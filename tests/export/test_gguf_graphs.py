"""What llama.cpp computes with an MTP module's file, by its graphs in torch: our own logits.  Files of other kinds are
held against our drafters in tests/engines/test_gguf_reader.py."""

from typing import Any

import llama_graphs
import pytest
import torch

from outrider.checkpoint import load_model
from outrider.nn.blocks import attending

pytest.importorskip("gguf")


def text_of(target: Any) -> torch.Tensor:
    return torch.tensor(target.tokenizer.encode("then the inner one read a line, and another"))


def ours(model: Any, target: Any, text: torch.Tensor) -> torch.Tensor:
    """Logits [V] of the token after a text, by the module's own step."""
    hidden, taps = target.read(text[None, :-1], model.taps)
    features, tokens = model.features(hidden[:, :, None] if taps is None else taps), text[1:]
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
    angle = model.cos_sin(torch.arange(len(tokens))[None])
    out = model.step(0, target.embed(tokens[None]), features, angle, attending(mask))
    return model.logits(out[:, -1])[0]


@pytest.mark.parametrize("case", ["mtp", "mtp, normed"])
@torch.no_grad()
def test_llama_cpps_graph_gives_our_logits(case, bpe, made):
    """Catches what reads back well and computes otherwise: rows in transformers' order, a layer norm under the name
    that another architecture gives it."""
    text, read = text_of(bpe), llama_graphs.File(made.file(case))
    wanted = ours(load_model(made.checkpoint(case), bpe), bpe, text)
    torch.testing.assert_close(llama_graphs.mtp(read, text), wanted, rtol=0, atol=2e-4)
    assert torch.allclose(llama_graphs.states(read, text), bpe.read(text[None], ())[0][0], atol=1e-4)
