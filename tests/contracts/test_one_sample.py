"""One text learnt by heart is drafted without a miss.

The sharpest test of a method's plumbing: a mask, a position, a tap, a label that is off by one between training and
serving, and blocks stop being kept whole.
"""

import pytest
import torch
from conftest import Case, batch_of, cases, fast, train

from outrider.decoding.state import Request
from outrider.generation import serve
from outrider.sampling.settings import Sampling

LENGTH, PROMPT = 32, 6


LAYOUTS = [
    Case("dflash", {"anchor_predicts": False}),
    Case("medusa", {"sequential": True, "heads": 3}),
    Case("eagle3", {"vocabulary": 48}),
    Case("eagle3", {"fc_norm": True, "norm_output": True, "gated": True}),
]
"""Other layouts of a method that train and serve by code of their own."""


@pytest.mark.parametrize(
    "case",
    fast((case for case in cases() if case.trains and not case.is_variant), ("eagle3",))
    + [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in LAYOUTS],
)
def test_every_block_of_a_text_learnt_by_heart_is_kept_whole(case, target, workshop, prompts, plain):
    """Catches whatever makes serving another game than training; the last block ends with the text."""
    model = workshop.model(case, target)
    prompt = prompts[0][:PROMPT]
    text = (prompt + plain(target, prompt, LENGTH))[:LENGTH]
    model.begin(torch.bincount(torch.tensor(text), minlength=target.spec.vocabulary))
    batch = batch_of(target, model.taps, torch.tensor([text]))
    for _ in range(12):
        if train(model, batch, 50, lr=5e-3)[-1] < 0.02:
            break
    drafter = model.eval().drafter()
    request = Request(prompt, LENGTH - len(prompt), Sampling())
    steps = [(progress.accepted, progress.reached) for progress in serve(target, [request], drafter, slots=1)]
    deepest = max(reached for _, reached in steps)
    assert deepest >= min(2, drafter.limit)
    begin = int(drafter.probe_rows > 0)  # a probe answers from the first pass on
    assert steps[begin:-1] == [(deepest, deepest)] * (len(steps) - 1 - begin)
