"""Every divergence against brute force in float64, its gradient against finite differences, and where it vanishes."""

import functools
import math

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.training import losses

NAMES = sorted(losses.DIVERGENCES)
NEAR = 0.6
DIVERGENCES = losses.DIVERGENCES | {"lk_lambda": functools.partial(losses.lk_lambda, near=NEAR)}


def brute_force(name: str, draft: list[float], target: list[float], label: int) -> float:
    """One row by the definition, in Python's float64."""
    q, p = softmax(draft), softmax(target)
    kept = sum(map(min, p, q))
    if name == "ce":
        return -math.log(q[label])
    if name == "kl":
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    if name == "rkl":
        return sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    if name == "jsd":
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        return sum(a * math.log(a / m) + b * math.log(b / m) for a, b, m in zip(p, q, middle, strict=True)) / 2
    if name == "tv":
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    if name == "lk_alpha":
        return -math.log(kept)
    assert name == "lk_lambda"
    w = math.exp(-NEAR)
    return w * brute_force("kl", draft, target, label) + (1 - w) * brute_force("tv", draft, target, label)


def softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    weights = [math.exp(x - most) for x in logits]
    return [w / sum(weights) for w in weights]


def rows(m: int = 6, vocabulary: int = 7, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(5)
    draft, target = scale * torch.randn(2, m, vocabulary, generator=noise)
    return draft, target, torch.randint(vocabulary, (m,), generator=noise)


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_is_its_definition(name: str) -> None:
    """Catches p and q swapped, a missing half, or a wrong sum; float32 against float64, so to 1e-5."""
    draft, target, labels = rows()
    found = DIVERGENCES[name](draft, target, labels)
    wanted = [brute_force(name, *row) for row in zip(draft.tolist(), target.tolist(), labels.tolist(), strict=True)]
    assert found.shape == (6,)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_the_slope(name: str) -> None:
    """Catches a detach too many or too few."""
    draft, target, labels = rows()
    draft.requires_grad_()
    DIVERGENCES[name](draft, target, labels).sum().backward()
    step = 1e-5
    for m, (logits, wanted, label) in enumerate(zip(draft.tolist(), target.tolist(), labels.tolist(), strict=True)):
        for v in range(len(logits)):
            ends = [
                brute_force(name, [*logits[:v], logits[v] + s, *logits[v + 1 :]], wanted, label) for s in (step, -step)
            ]
            assert float(draft.grad[m, v]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_hopeless_draft_has_a_finite_loss_and_gradient(name: str) -> None:
    """Catches log 0 and 0 * inf where draft and target have nothing in common, in float32 and bfloat16."""
    target = torch.zeros(1, 9)
    target[0, 0] = 300.0
    for dtype in (torch.float32, torch.bfloat16):
        draft = target.flip(-1).to(dtype).requires_grad_()
        found = DIVERGENCES[name](draft, target.to(dtype), torch.tensor([0]))
        found.sum().backward()
        assert found.dtype == torch.float32
        assert found.isfinite().all()
        assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_what_can_not_be_drafted_counts_as_lost(name: str) -> None:
    """Catches a target that is renormalised over the draft's vocabulary, 0 * inf."""
    draft, target, labels = rows()
    reach = torch.tensor([0, 2, 3, 6])
    small = draft[:, reach].requires_grad_()
    whole = torch.full_like(draft, -torch.inf).index_copy(-1, reach, small)
    found = DIVERGENCES[name](whole, target, labels)
    found.sum().backward()
    assert bool(found.isfinite().all())
    assert bool(small.grad.isfinite().all())
    p, q = (
        target.double().softmax(-1),
        torch.zeros(6, 7).double().index_copy(-1, reach, small.detach().double().softmax(-1)),
    )
    alpha = torch.minimum(p, q).sum(-1)
    inside, middle = q > 0, (p + q) / 2
    ratio = torch.where(inside, p / q.clamp(min=1e-30), 1.0).log()
    forward = (p * ratio * inside).sum(-1) + 1 - (p * inside).sum(-1)
    weight = math.exp(-NEAR)
    said = q.gather(-1, labels[:, None])[:, 0]
    wanted = {
        "ce": torch.where(said > 0, -said.clamp(min=1e-30).log(), losses.UNREACHABLE),
        "kl": forward,
        "rkl": -(q * ratio).sum(-1),
        "jsd": ((p * (p / middle).log()).sum(-1) + (q * (q.clamp(min=1e-30) / middle).log()).sum(-1)) / 2,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": weight * forward + (1 - weight) * (1 - alpha),
    }[name]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    if name in ("kl", "tv", "lk_alpha", "lk_lambda"):
        perfect = torch.full_like(draft, -torch.inf).index_copy(-1, reach, target[:, reach])
        assert bool((DIVERGENCES[name](perfect, target, labels) > 1e-3).all())


def test_lk_lambda_goes_from_kl_to_tv() -> None:
    """Catches a mean overlap that does not arrive, and a weight that grows with it."""
    draft, target, labels = rows()
    far, near = losses.kl(draft, target, labels), losses.tv(draft, target, labels)
    for overlap_found, weight in ((0.0, 1.0), (0.5, math.exp(-0.5)), (1.0, math.exp(-1.0))):
        found = losses.combine({"lk_lambda": 2.0}, draft, target, labels, overlap_found)
        torch.testing.assert_close(found, 2 * (weight * far + (1 - weight) * near))
    found = losses.combine({"ce": 0.1, "tv": 1.8}, draft, target, labels)
    torch.testing.assert_close(found, 0.1 * losses.ce(draft, target, labels) + 1.8 * near)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"kll": 1.0}, "unknown loss 'kll'; did you mean 'kl'?"),
        ({"hinge": 1.0}, "unknown loss 'hinge'; known: ce, jsd, kl, lk_alpha, lk_lambda, rkl, tv"),
        ({}, "the loss has no term"),
    ],
)
def test_an_unknown_loss_is_refused_with_the_nearest_one(loss: dict[str, float], said: str) -> None:
    """Catches a KeyError, or training on a loss that is always 0."""
    with pytest.raises(ConfigError) as caught:
        losses.check(loss)
    assert said in str(caught.value)
