"""ConFu: what training reads behind a text is what the verified pass says there, and no logit of the target's moves."""

import pytest
import torch
from conftest import batch_of

from benchmarks.families import tiny
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.lab.drafters import confu
from outrider.targets.load import load_target


def model_of(target, **settings) -> confu.Model:
    torch.manual_seed(1)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = confu.Config(length=3, ttt=3, partial_rotary_factor=1.0, **sizes, **settings)
    return confu.Model(config, target).to(getattr(torch, target.spec.dtype))


def futures(model, target, prompt, count) -> tuple[list[int], dict[int, torch.Tensor]]:
    """The text, and f as serving saw it behind each position at which a step began."""
    drafter, seen = model.drafter(), {}
    observe = drafter.observe

    def watched(memory, state, draft, accepted, scores):
        observe(memory, state, draft, accepted, scores)
        ended = accepted.next_tokens[0] >= 0
        seen[len(state.tokens[0]) - 1 - ended] = memory.guide[0].clone()

    drafter.observe = watched
    (found,) = generate(target, prompt, drafter, max_new_tokens=count)
    return prompt + found.tokens, seen


@pytest.mark.parametrize("family", ["gemma3", "llama4-chunks"])
def test_training_reads_the_future_that_serving_sees(family):
    """Catches a mask, a position, a window or a scale that differs between `read_probe` and the verified pass."""
    target = load_target(tiny(family, "sdpa"))
    model = model_of(target, rows=3)
    text, seen = futures(model, target, [3, 9, 4, 1, 7], 40)
    assert len(seen) >= 10
    batch, at = batch_of(target, model.taps, torch.tensor([text])), torch.tensor([sorted(seen)])
    read = model.guide(batch, at)[0]
    within = 1e-5 if family == "llama4-chunks" else 1e-9  # its router computes in float32
    torch.testing.assert_close(read, torch.stack([seen[place] for place in sorted(seen)]), rtol=within, atol=within)


def test_a_target_that_can_run_no_probe_is_refused_before_training():
    """Catches a training that would find out after its features were read, and a recurrent state that takes rows in."""
    recurrent = load_target(tiny("mamba2"))
    with pytest.raises(TargetError, match="can't run a probe"):
        model_of(recurrent)
