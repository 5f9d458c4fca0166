"""ConFu: what training reads behind a text is what the verified pass says there, and no logit of the target's moves."""

import pytest
import torch
from conftest import batch_of

from benchmarks.families import tiny
from outrider.decoding.draft import Draft
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.lab.drafters import confu
from outrider.targets.load import load_target


def model_of(target, **settings) -> confu.Model:
    torch.manual_seed(1)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = confu.Config(length=3, ttt=3, partial_rotary_factor=1.0, **sizes, **settings)
    return confu.Model(config, target).to(getattr(torch, target.spec.dtype))


def futures(model, target, prompt, count) -> tuple[list[int], dict[int, tuple[torch.Tensor, int]]]:
    """The text, and f as serving saw it behind each position at which a step began, and how far behind its anchor."""
    drafter, seen = model.drafter(), {}
    (plain,) = generate(target, prompt, max_new_tokens=count)
    text, observe = prompt + plain.tokens, drafter.observe

    def told(memory, state, budget):
        """The next tokens of the text, none to two of them, so that f is read at several distances from an anchor."""
        at = len(state.tokens[0])
        ahead = text[at : at + min(at % 3, int(budget[0]))]
        return Draft.chain(torch.tensor([ahead], dtype=torch.int64), torch.tensor([len(ahead)]))

    def watched(memory, state, draft, accepted, scores):
        observe(memory, state, draft, accepted, scores)
        ended = accepted.next_tokens[0] >= 0
        seen[len(state.tokens[0]) - 1 - ended] = memory.head.guide[0].clone(), len(accepted.paths[0])

    drafter.observe, drafter.propose = watched, told
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
    served, lag = torch.stack([seen[place][0] for place in sorted(seen)]), [seen[place][1] for place in sorted(seen)]
    assert len(set(lag)) > 1
    read = model.guide(batch, at, torch.tensor([lag]))[0]
    within = 1e-5 if family == "llama4-chunks" else 1e-9  # its router computes in float32
    torch.testing.assert_close(read, served, rtol=within, atol=within)


def test_the_contemplate_token_is_a_mixture_by_the_last_state():
    """Catches a router that reads nothing, or weights that are no distribution: f would be the same everywhere."""
    target = load_target(tiny("gemma3", "sdpa"))
    model = model_of(target, experts=3)
    states = torch.randn(5, target.spec.hidden, dtype=model.dtype)
    mixed = model.contemplate(states)
    weights = torch.linalg.lstsq(model.experts.T, mixed.T).solution.T
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, dtype=model.dtype))
    assert bool((weights > 0).all()) and float(weights.std(0).min()) > 1e-3
    torch.testing.assert_close(model.contemplate(3 * states), mixed)  # the router's input is normed


def test_a_target_that_can_run_no_probe_is_refused_before_training():
    """Catches a training that would find out after its features were read, and a recurrent state that takes rows in."""
    recurrent = load_target(tiny("mamba2"))
    with pytest.raises(TargetError, match="can't run a probe"):
        model_of(recurrent)
